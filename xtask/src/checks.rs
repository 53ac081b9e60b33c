//! Runs the checks that inspect the code without running it, each by name.

use std::time::Instant;

use anyhow::{Result, bail, ensure};

use crate::workspace::cargo;
use crate::{licences, tidy};

/// A check: its name and the function that runs it.
pub(crate) type Check = (&'static str, fn() -> Result<()>);

/// Cheap checks come first, so that a simple mistake shows early.
pub(crate) const CHECKS: [Check; 4] =
    [("fmt", fmt), ("tidy", tidy::check), ("licences", licences::check), ("clippy", clippy)];

/// Runs one check and prints its result and duration. Returns true if it passed.
pub(crate) fn passes(name: &str, check: fn() -> Result<()>) -> bool {
    println!("check {name}");
    let started = Instant::now();
    let outcome = check();
    let took_s = started.elapsed().as_secs_f32();
    match &outcome {
        Ok(()) => println!("check {name} ... ok ({took_s:.1} s)"),
        Err(error) => println!("{error:#}\ncheck {name} ... FAILED ({took_s:.1} s)"),
    }
    outcome.is_ok()
}

/// Runs every check, even after one has failed. The error names the failed checks.
pub(crate) fn ci() -> Result<()> {
    let failed: Vec<&str> =
        CHECKS.into_iter().filter(|(name, check)| !passes(name, *check)).map(|(name, _)| name).collect();
    ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
    Ok(())
}

fn fmt() -> Result<()> {
    if !cargo().args(["fmt", "--all", "--check"]).status()?.success() {
        bail!("some files are not formatted; `cargo fmt --all` does it");
    }
    Ok(())
}

fn clippy() -> Result<()> {
    let lints = ["clippy", "--workspace", "--all-targets", "--locked", "--", "-D", "warnings"];
    if !cargo().args(lints).status()?.success() {
        bail!("clippy found something (above)");
    }
    Ok(())
}
