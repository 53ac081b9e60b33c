//! `cargo xtask peers`, `layers` and `rebuild`: builds the programs for a measurement and runs it.
//!
//! The measurement itself, with its workloads, peers and options, is in bench/peers.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::workspace::{cargo, target_dir};

/// Runs the comparison with peers. Like the others it replaces this process and returns only errors.
pub(crate) fn run(arguments: &[OsString]) -> Result<()> {
    let release = release(&["-p", "penstock-cli", "-p", "penstock-peers"])?;
    let mut peers = Command::new(release.join("peers"));
    become_it(peers.arg("--program").arg(release.join("penstock")).arg("--disk").arg(target_dir()), arguments)
}

/// Measures processor time by layer. The program has frame pointers, so it has a folder of its own.
pub(crate) fn layers(arguments: &[OsString]) -> Result<()> {
    let release = release(&["-p", "penstock-peers"])?;
    let target = target_dir().join("layers");
    let mut build = cargo();
    build.env("RUSTFLAGS", "-C force-frame-pointers=yes").env("CARGO_TARGET_DIR", &target);
    succeed(build.args(["build", "--release", "--locked", "-p", "penstock-cli"]))?;
    measure(&release, "layers", &target.join("release"), arguments)
}

/// Measures the rebuild of a drive.
pub(crate) fn rebuild(arguments: &[OsString]) -> Result<()> {
    let release = release(&["-p", "penstock-cli", "-p", "penstock-peers"])?;
    measure(&release, "rebuild", &release, arguments)
}

fn measure(release: &Path, what: &str, program: &Path, arguments: &[OsString]) -> Result<()> {
    let mut peers = Command::new(release.join("peers"));
    become_it(peers.arg(what).arg("--program").arg(program.join("penstock")), arguments)
}

/// Builds packages in release mode and returns the folder of their programs.
fn release(packages: &[&str]) -> Result<PathBuf> {
    succeed(cargo().args(["build", "--release", "--locked"]).args(packages))?;
    Ok(target_dir().join("release"))
}

fn succeed(build: &mut Command) -> Result<()> {
    ensure!(build.status()?.success(), "the build failed");
    Ok(())
}

/// Replaces this process with the command, so that Ctrl-C reaches a process that cleans up, and the shell
/// waits for it.
fn become_it(command: &mut Command, arguments: &[OsString]) -> Result<()> {
    Err(command.args(arguments).exec()).context("the measuring program does not start")
}
