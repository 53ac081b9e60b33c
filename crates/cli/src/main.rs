//! The `penstock` program. Commands are noun, then verb; every list and show command accepts `--json`.
//!
//! Commands find the running instance by `--dir` or `--api` and use its REST API. Error messages have one to
//! three lines: the failed operation, its object, the reason, and a remedy.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![deny(unsafe_code)]
#![allow(clippy::disallowed_methods)]

/// `println!` that ends the program quietly when its reader is gone, as other filters do.
macro_rules! println {
    () => { println!("") };
    ($($word:tt)*) => {
        if std::io::Write::write_fmt(&mut std::io::stdout(), format_args!("{}\n", format_args!($($word)*))).is_err() {
            std::process::exit(0);
        }
    };
}

mod args;
mod bundle;
mod commands;
mod events;
mod folder;
mod given;
mod local_http;
mod machine;
mod manual;
mod mount;
mod remote;
mod restore;
mod show;
mod up;
mod wanted;

use clap::Parser;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args = args::Args::parse();
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let filter = tracing_subscriber::EnvFilter::try_from_env("PENSTOCK_LOG")
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(|| show::LogOutput)
        .log_internal_errors(false)
        .with_ansi(colours)
        .with_target(false)
        .init();
    match commands::run(args) {
        Ok(code) => code,
        Err(error) => {
            // One line: the failed operation, followed by its causes.
            let causes: Vec<String> = error.chain().map(ToString::to_string).collect();
            eprintln!("penstock: {}", causes.join(": "));
            ExitCode::FAILURE
        }
    }
}
