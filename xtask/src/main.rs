//! Every script of the project as one program, so that they are typed, tested and run alike everywhere.
//!
//! `cargo xtask ci` checks, `cargo xtask test` checks and tests, `cargo xtask show` runs the full form of an
//! acceptance line. Owns nothing that ships.
#![forbid(unsafe_code)]
// It drives real processes by the real clock and is no part of a simulation.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod campaign;
mod checks;
mod licences;
mod peers;
mod posix;
mod process;
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
    /// Formatting, lints, licences and tidiness
    Ci,
    /// Sizes, module headers, unsafe rules and links; errors as file:line
    Tidy,
    /// Every check and every test; the last line counts them
    Test {
        /// Leave out clippy and the examples in documentation
        #[arg(long)]
        fast: bool,
        /// Kill the run after this many seconds
        #[arg(long, default_value_t = 3600, value_name = "SECONDS")]
        limit_s: u64,
    },
    /// Run the full form of an acceptance line, such as 01.1; without a line, list them
    Show { line: Option<String> },
    /// Tests too long for every run, by seeds or rounds; what passed with this commit is not run again
    Campaign {
        #[command(subcommand)]
        which: campaign::Which,
        /// Where results are appended [default: campaign/results.jsonl in the target folder]
        #[arg(long, global = true, value_name = "FILE")]
        results: Option<std::path::PathBuf>,
        /// Processes at a time
        #[arg(long, global = true, default_value_t = 1, value_name = "N")]
        jobs: usize,
    },
    /// The same work on Penstock and its peers, interleaved: tables and JSON (`-- --help` lists the options)
    Peers {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<std::ffi::OsString>,
    },
    /// Processor time of Penstock for each byte and operation, by layer (`-- --help` lists the options)
    Layers {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<std::ffi::OsString>,
    },
    /// The rebuild of a drive beside what the drives allow, and readers beside it (`-- --help` lists the options)
    Rebuild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        options: Vec<std::ffi::OsString>,
    },
    /// pjdfstest on a mount of a store of its own; as root
    Posix {
        /// Also run fsx: N operations over several seeds
        #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "100000")]
        fsx: Option<u64>,
        /// Only the cases of pjdfstest whose name contains one of these
        cases: Vec<String>,
    },
    /// Install what some tests need (a Python with pyarrow) into the target folder; prints its path
    Tools,
}

fn main() -> ExitCode {
    let outcome = match Args::parse().command {
        Command::Ci => checks::ci(),
        Command::Tidy => tidy::check(),
        Command::Test { fast, limit_s } => test::run(fast, Duration::from_secs(limit_s)),
        Command::Show { line } => show::run(line.as_deref()),
        Command::Campaign { which, results, jobs } => campaign::run(&which, results, jobs),
        Command::Peers { options } => peers::run(&options),
        Command::Layers { options } => peers::layers(&options),
        Command::Rebuild { options } => peers::rebuild(&options),
        Command::Posix { fsx, cases } => posix::run(fsx, &cases),
        Command::Tools => tools::install().map(|tools| println!("{}", tools.display())),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The alternate form holds the whole chain of causes. A run that printed its own verdict sends
            // an empty message, so that the verdict stays the last line.
            let message = format!("{error:#}");
            if !message.is_empty() {
                eprintln!("error: {message}");
            }
            ExitCode::FAILURE
        }
    }
}
