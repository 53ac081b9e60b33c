//! `cargo xtask peers`: builds Penstock and the comparison as users get them, and becomes the comparison.
//!
//! Nothing of the comparison is here: its lines, peers and options are in bench/peers.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::{cargo, target_dir};

/// Returns only when something fails before the comparison begins.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let built = cargo()
        .args(["build", "--release", "--locked", "-p", "penstock-cli", "-p", "penstock-peers"])
        .status()?;
    ensure!(built.success(), "it does not build");
    let release = target_dir().join("release");
    let mut peers = Command::new(release.join("peers"));
    peers.arg("--program").arg(release.join("penstock")).arg("--disk").arg(target_dir());
    // In place of this process, so that Ctrl-C meets one that cleans up, and the shell waits for it.
    Err(peers.args(arguments).exec()).context("the comparison does not start")
}
