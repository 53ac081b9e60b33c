//! House rules that a program can check. Every finding is `file:line: what is wrong`.
//!
//! Owns the rules of layout; what rustfmt and clippy know is theirs.

mod code;
mod docs;
mod sources;

use std::fmt::Display;
use std::path::Path;

use anyhow::{Result, bail};

use crate::workspace;

/// What is wrong, one line each.
#[derive(Default)]
struct Findings(Vec<String>);

impl Findings {
    /// `line` counts from 1.
    fn add(&mut self, file: &Path, line: usize, what: impl Display) {
        self.0.push(format!("{}:{line}: {what}", file.display()));
    }
}

/// Checks every file that git knows or would add.
pub(crate) fn check() -> Result<()> {
    let files = workspace::files()?;
    let mut findings = Findings::default();
    sources::check(&files, &mut findings)?;
    docs::check(&files, &mut findings)?;
    if !findings.0.is_empty() {
        bail!("{}", findings.0.join("\n"));
    }
    Ok(())
}
