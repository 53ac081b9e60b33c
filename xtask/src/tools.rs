//! Installs the programs that some tests need and that this workspace does not build.
//!
//! All of them are in the target folder. A Python environment with pyarrow serves the tests that read and
//! write Parquet through the mount. They find its interpreter through `PENSTOCK_PYTHON`, or at
//! `tools/venv/bin/python` in the target folder; if it is missing they print SKIPPED. The same environment
//! contains the compiler of CUDA kernels (NVRTC), a library that needs no GPU. Programs from crates.io serve
//! `cargo xtask posix` and the `fsx` campaign.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::{process, workspace};

/// pip tries the pinned release first. If that fails, as on a Python too new for it, any release from 21 on.
const REQUIREMENTS: [&str; 2] = ["pyarrow==21.0.0", "pyarrow>=21"];

/// The release whose output is `crates/gpu/kernels/code.ptx`. Tests that need it print SKIPPED without it.
const CUDA_COMPILER: &str = "nvidia-cuda-nvrtc-cu11==11.8.89";

/// File with the list of requirements. It is written last: an environment without it is incomplete.
const STAMP: &str = "penstock-stamp";

/// Returns the path of the interpreter. Prints a warning and returns `None` if it cannot be installed.
pub(crate) fn python_or_warn() -> Option<PathBuf> {
    match install() {
        Ok(venv) => Some(venv.join("bin/python")),
        Err(error) => {
            eprintln!("warning: tests that need Python with pyarrow will be skipped: {error:#}");
            None
        }
    }
}

/// Returns the folder of the tools and its lock. A second run waits for the lock, then finds the tools.
fn folder() -> Result<(PathBuf, File)> {
    let tools = workspace::target_dir().join("tools");
    fs::create_dir_all(&tools).with_context(|| format!("cannot create {}", tools.display()))?;
    let lock = File::create(tools.join("lock")).context("cannot create the lock of the tools folder")?;
    lock.lock().context("cannot lock the tools folder")?;
    Ok((tools, lock))
}

/// Installs one release of a program from crates.io if it is missing, and returns its path.
pub(crate) fn program(name: &str, version: &str) -> Result<PathBuf> {
    let (tools, _lock) = folder()?;
    // Each release has its own folder. A program that exists there is complete: cargo puts it there last.
    let root = tools.join(format!("{name}-{version}"));
    let program = root.join("bin").join(name);
    if !program.exists() {
        eprintln!("installing {name} {version} into {}", root.display());
        run(workspace::cargo()
            .args(["install", name, "--version", version, "--locked", "--root"])
            .arg(&root))?;
    }
    Ok(program)
}

/// Makes the Python environment if it is missing or out of date, and returns its folder.
pub(crate) fn install() -> Result<PathBuf> {
    let (tools, _lock) = folder()?;
    let venv = tools.join("venv");
    let wanted = format!("{}\n{CUDA_COMPILER}\n", REQUIREMENTS.join("\n"));
    if fs::read_to_string(venv.join(STAMP)).is_ok_and(|stamp| stamp == wanted) && imports(&venv) {
        return Ok(venv);
    }
    if venv.exists() {
        fs::remove_dir_all(&venv).with_context(|| format!("cannot remove {}", venv.display()))?;
    }
    eprintln!("installing Python tools into {}", venv.display());
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    let mut installed = Ok(());
    for requirement in REQUIREMENTS {
        installed = install_package(&venv, requirement);
        if installed.is_ok() {
            break;
        }
    }
    installed?;
    if let Err(error) = install_package(&venv, CUDA_COMPILER) {
        eprintln!("warning: the test that compiles CUDA kernels will be skipped: {error:#}");
    }
    ensure!(imports(&venv), "pyarrow is installed and cannot be imported");
    fs::write(venv.join(STAMP), wanted).context("cannot write the stamp")?;
    Ok(venv)
}

fn install_package(venv: &Path, requirement: &str) -> Result<()> {
    let mut pip = Command::new(venv.join("bin/python"));
    // Only binary packages: building Arrow from source takes an hour and needs a compiler.
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input"]);
    pip.args(["--only-binary", ":all:", "--retries", "2", requirement]);
    run(&mut pip)
}

/// Returns true if pyarrow can be imported. Also detects an environment whose Python was removed or replaced.
fn imports(venv: &Path) -> bool {
    let mut python = Command::new(venv.join("bin/python"));
    python.args(["-c", "import pyarrow.parquet"]);
    process::mark(&mut python).output().is_ok_and(|output| output.status.success())
}

/// Runs a program. The error contains its exit status and the last three lines of its output.
fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = process::mark(command).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        let end = lines[lines.len().saturating_sub(3)..].join("; ");
        bail!("{name}: {}: {end}", output.status);
    }
    Ok(())
}
