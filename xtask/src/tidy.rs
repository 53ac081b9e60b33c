//! House rules that a program can check. Every finding is `file:line: problem`.
//!
//! Owns the rules of layout and the measures of the house. Rules of rustfmt and clippy are theirs.

mod code;
mod docs;
mod house;
mod sources;

use std::fmt::Display;
use std::path::Path;

use anyhow::{Result, bail};

use crate::workspace;

/// Problems, one line each.
#[derive(Default)]
struct Findings(Vec<String>);

impl Findings {
    /// `line` counts from 1.
    fn add(&mut self, file: &Path, line: usize, what: impl Display) {
        self.0.push(format!("{}:{line}: {what}", file.display()));
    }
}

/// Prints the measures that the ratchet holds.
pub(crate) fn print_measures() -> Result<()> {
    house::print()
}

/// Records measures that are better than those that the ratchet holds.
pub(crate) fn record_measures() -> Result<()> {
    house::record()
}

/// Checks every file that git knows or would add.
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
