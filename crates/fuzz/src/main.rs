//! The fuzzer's command line: runs chosen decoders, or all of them in turn. See docs/testing.md.
#![forbid(unsafe_code)]

use clap::Parser;
use penstock_fuzz::campaign::{self, Limits};
use penstock_fuzz::{DECODERS, Decoder};
use std::process::ExitCode;
use std::time::Duration;

#[derive(Parser)]
#[command(about = "Fuzzes decoders; prints a line for each: name, executions, accepted")]
struct Args {
    /// Names of decoders; all decoders if none is given
    decoders: Vec<String>,
    /// Inputs for each decoder
    #[arg(long, default_value_t = u64::MAX)]
    executions: u64,
    /// Seconds for each decoder
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Number from which the inputs are generated
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only print the names of all decoders, each with the length of its longest input in bytes
    #[arg(long)]
    list: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        DECODERS.iter().for_each(|decoder| println!("{} {}", decoder.name, decoder.most_bytes));
        return ExitCode::SUCCESS;
    }
    let mut chosen: Vec<&Decoder> = Vec::new();
    for name in &args.decoders {
        let Some(decoder) = penstock_fuzz::find(name) else {
            eprintln!("there is no decoder {name}; --list prints them");
            return ExitCode::FAILURE;
        };
        chosen.push(decoder);
    }
    if chosen.is_empty() {
        chosen.extend(&DECODERS);
    }
    let limits = Limits { executions: args.executions, time: Duration::from_secs(args.seconds) };
    let mut failed = false;
    for decoder in chosen {
        match campaign::run(decoder, args.seed, limits) {
            Ok(totals) => println!("{} {} {}", decoder.name, totals.executions, totals.accepted),
            Err(failure) => {
                eprintln!("seed {}: {failure}", args.seed);
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
