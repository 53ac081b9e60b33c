//! House rules that a program can check. Each finding has the form `file:line: problem`.
//!
//! Covers the rules of layout and the measures of the house. rustfmt and clippy check their own rules.

mod code;
mod docs;
mod house;
mod sources;

use std::fmt::Display;
use std::path::Path;

use anyhow::{Result, bail};

use crate::workspace;

/// Problems, one line of text each.
#[derive(Default)]
struct Findings(Vec<String>);

impl Findings {
    /// Adds a problem; `line` counts from 1.
    fn add(&mut self, file: &Path, line: usize, what: impl Display) {
        self.0.push(format!("{}:{line}: {what}", file.display()));
    }
}

/// Prints the present values of the measures that the ratchet holds.
pub(crate) fn print_measures() -> Result<()> {
    house::print()
}

/// Writes measures that are better than those of the ratchet into the ratchet.
pub(crate) fn record_measures() -> Result<()> {
    house::record()
}

/// Checks every file that git tracks or would add; an error that lists all findings if there are any.
pub(crate) fn check() -> Result<()> {
    let files = workspace::files()?;
    let mut findings = Findings::default();
    sources::check(&files, &mut findings)?;
    docs::check(&files, &mut findings)?;
    house::check(&files, &mut findings)?;
    if !findings.0.is_empty() {
        bail!("{}", findings.0.join("\n"));
    }
    Ok(())
}
