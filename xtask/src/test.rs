//! `cargo xtask test`: installs tools, runs the checks and tests, and counts them together.
//!
//! A check counts as one test. A test that printed a line `SKIPPED name: why` and passed counts as skipped,
//! as does an ignored test. The last line of the output contains the three counts and nothing else.

mod tally;

use std::io::IsTerminal;
use std::time::Duration;

use anyhow::{Result, bail};

pub(crate) use self::tally::Tally;
use crate::process::{self, Watchdog};
use crate::workspace::cargo;
use crate::{checks, tools};

/// Runs everything. If something failed, the error has no text, so that the counts stay the last line.
pub(crate) fn run(fast: bool, limit: Duration) -> Result<()> {
    let watchdog = Watchdog::start(limit);
    let mut tally = Tally::default();
    let python = tools::python_or_warn();
    for (name, check) in checks::CHECKS {
        if watchdog.fired() || (fast && name == "clippy") {
            continue;
        }
        match checks::passes(name, check) {
            true => tally.pass(),
            false => tally.fail(format!("check {name}")),
        }
    }
    if !watchdog.fired() {
        let mut command = cargo();
        command.args(["test", "--workspace", "--locked", "--no-fail-fast"]);
        if fast {
            command.args(["--lib", "--bins", "--tests"]);
        }
        let colour = if std::io::stdout().is_terminal() { "always" } else { "never" };
        // The output of passed tests contains the SKIPPED lines. The tally drops the rest of it.
        command.args(["--color", colour, "--", "--show-output", "--color", colour]);
        if let Some(python) = &python {
            command.env("PENSTOCK_PYTHON", python);
        }
        let status = process::stream(&mut command, &mut |line| {
            if tally.feed(line) {
                println!("{line}");
            }
        })?;
        tally.end(status);
    }
    if watchdog.fired() {
        tally.fail(format!("the run took longer than {} s and was killed", limit.as_secs()));
    }
    for (pid, line) in process::kill_all() {
        println!("warning: a test left process {pid} running ({line}); killed");
    }
    println!("\n{tally}");
    if tally.has_failed() {
        bail!("");
    }
    Ok(())
}
