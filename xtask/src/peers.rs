//! `cargo xtask peers`, `layers`, `rebuild`: builds what is measured as users get it, and becomes what measures.
//!
//! Nothing of the measuring is here: lines, peers and options are in bench/peers.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::{cargo, target_dir};

/// The comparison. Returns only when something fails before it begins, like the others.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let release = release(&["-p", "penstock-cli", "-p", "penstock-peers"])?;
    let mut peers = Command::new(release.join("peers"));
    become_it(peers.arg("--program").arg(release.join("penstock")).arg("--disk").arg(target_dir()), arguments)
}

/// Processor time by layer: the program has frame pointers too, and lies in a folder of its own.
pub(crate) fn layers(arguments: &[OsString]) -> Result<()> {
    let release = release(&["-p", "penstock-peers"])?;
    let target = target_dir().join("layers");
    let mut build = cargo();
    build.env("RUSTFLAGS", "-C force-frame-pointers=yes").env("CARGO_TARGET_DIR", &target);
    succeed(build.args(["build", "--release", "--locked", "-p", "penstock-cli"]))?;
    measure(&release, "layers", &target.join("release"), arguments)
}

/// The rebuild of a drive.
pub(crate) fn rebuild(arguments: &[OsString]) -> Result<()> {
    let release = release(&["-p", "penstock-cli", "-p", "penstock-peers"])?;
    measure(&release, "rebuild", &release, arguments)
}

fn measure(release: &Path, what: &str, program: &Path, arguments: &[OsString]) -> Result<()> {
    let mut peers = Command::new(release.join("peers"));
    become_it(peers.arg(what).arg("--program").arg(program.join("penstock")), arguments)
}

/// Builds packages; gives the folder of their programs.
fn release(packages: &[&str]) -> Result<PathBuf> {
    succeed(cargo().args(["build", "--release", "--locked"]).args(packages))?;
    Ok(target_dir().join("release"))
}

fn succeed(build: &mut Command) -> Result<()> {
    ensure!(build.status()?.success(), "it does not build");
    Ok(())
}

/// In place of this process, so that Ctrl-C meets one that cleans up, and the shell waits for it.
fn become_it(command: &mut Command, arguments: &[OsString]) -> Result<()> {
    Err(command.args(arguments).exec()).context("what measures does not start")
}
