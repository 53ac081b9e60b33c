//! Every script of the project as one program, so that all are typed, tested and run in the same way.
//!
//! `cargo xtask ci` runs the checks, `cargo xtask test` the checks and the tests, and `cargo xtask show` the
//! full form of an acceptance line. Nothing in this program is shipped.
#![forbid(unsafe_code)]
// xtask drives real processes by the real clock and is not part of a simulation.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod campaign;
mod checks;
mod licences;
mod map;
mod mounted;
mod peers;
mod posix;
mod process;
mod session;
mod show;
mod test;
mod tidy;
mod tools;
mod workspace;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Checks, tests and demonstrations of Penstock")]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the formatting, lint, licence and tidiness checks
    Ci,
    /// Check sizes, module headers, unsafe rules, links and the measures of the house; prints file:line
    Tidy {
        /// Print the measures of every crate
        #[arg(long)]
        table: bool,
        /// Record measures that got better, so that they cannot get worse again
        #[arg(long)]
        record: bool,
    },
    /// List the files of all crates, or of those named, with the first sentence of their headers
    Map { crates: Vec<String> },
    /// Run every check and every test; the last line contains the counts
    Test {
        /// Leave out clippy and the tests in documentation
        #[arg(long)]
        fast: bool,
        /// Kill the run after this many seconds
        #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
        limit_s: u64,
    },
    /// Run the full form of an acceptance line, such as 01.1; without a line, list them
    Show { line: Option<String> },
    /// Run tests too long for every run, by seeds or rounds; items that passed at this commit are skipped
    Campaign {
        #[command(subcommand)]
        which: campaign::Which,
        /// File that results are appended to [default: campaign/results.jsonl in the target folder]
        #[arg(long, global = true, value_name = "FILE")]
        results: Option<std::path::PathBuf>,
        /// Number of processes at the same time
        #[arg(long, global = true, default_value_t = 1, value_name = "N")]
        jobs: usize,
        /// Targets of a real store, each as large as the only one would be
        #[arg(long, global = true, default_value_t = 1, value_name = "N")]
        targets: u16,
    },
    /// Compare Penstock and its peers on the same workloads: tables and JSON (`-- --help` lists options)
    Peers {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<std::ffi::OsString>,
    },
    /// Measure Penstock's processor time per byte and operation, by layer (`-- --help` lists options)
    Layers {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<std::ffi::OsString>,
    },
    /// Measure the rebuild of a drive, and reads during it, against plain copies (`-- --help` lists options)
    Rebuild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<std::ffi::OsString>,
    },
    /// Run pjdfstest on a mount of a store of its own; needs root
    Posix {
        /// Also run fsx: N operations over several seeds
        #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "100000")]
        fsx: Option<u64>,
        /// Run only the cases of pjdfstest whose name contains one of these
        cases: Vec<String>,
    },
    /// Run the session that README shows, on a store of its own, and print it
    Session {
        /// Also draw it as an animated picture
        #[arg(long, value_name = "FILE")]
        svg: Option<std::path::PathBuf>,
    },
    /// Install what some tests need (Python with pyarrow, NVRTC) into the target folder; prints its path
    Tools,
}

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Ci => checks::ci(),
        Command::Tidy { table: true, .. } => tidy::print_measures(),
        Command::Tidy { record: true, .. } => tidy::record_measures(),
        Command::Tidy { .. } => tidy::check(),
        Command::Map { crates } => map::run(&crates),
        Command::Test { fast, limit_s } => test::run(fast, Duration::from_secs(limit_s)),
        Command::Show { line } => show::run(line.as_deref()),
        Command::Campaign { which, results, jobs, targets } => campaign::run(&which, targets, results, jobs),
        Command::Peers { options } => peers::run(&options),
        Command::Layers { options } => peers::layers(&options),
        Command::Rebuild { options } => peers::rebuild(&options),
        Command::Posix { fsx, cases } => posix::run(fsx, &cases),
        Command::Session { svg } => session::run(svg.as_deref()),
        Command::Tools => tools::install().map(|tools| println!("{}", tools.display())),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate form contains the whole chain of causes. A run that printed its own verdict
            // returns an error without text, so that the verdict stays the last line.
            let message = format!("{error:#}");
            if !message.is_empty() {
                eprintln!("error: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
