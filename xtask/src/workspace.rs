//! Finds the workspace, its target folder and its files, and calls cargo in it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The folder of the root Cargo.toml.
pub(crate) fn root() -> &'static Path {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask)
}

/// The folder that cargo builds into: `CARGO_TARGET_DIR`, or `target` in the workspace.
pub(crate) fn target_dir() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        // cargo resolves a relative path from the folder it is started in, here always the root.
        Some(dir) => root().join(dir),
        None => root().join("target"),
    }
}

/// Returns a command that runs the same cargo as this program, in the root of the workspace.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    crate::process::mark(&mut command).current_dir(root());
    command
}

/// Returns the files that git tracks or would add, relative to the root and sorted. Files that are deleted in
/// the working tree are left out.
pub(crate) fn files() -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .output();
    let mut files = match output {
        Ok(output) if output.status.success() => {
            let listing = String::from_utf8(output.stdout).context("a file name is not UTF-8")?;
            listing.split_terminator('\0').map(PathBuf::from).collect()
        }
        // An unpacked archive, or a machine without git.
        _ => walk(root())?,
    };
    files.retain(|file| root().join(file).is_file());
    files.sort();
    files.dedup();
    ensure!(!files.is_empty(), "no files found under {}", root().display());
    Ok(files)
}

fn walk(root: &Path) -> Result<Vec<PathBuf>> {
    const SKIPPED: [&str; 4] = [".git", "target", "mnt", "penstock-data"];
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::new()];
    while let Some(folder) = folders.pop() {
        let at = root.join(&folder);
        for entry in std::fs::read_dir(&at).with_context(|| format!("cannot list {}", at.display()))? {
            let entry = entry?;
            let path = folder.join(entry.file_name());
            if !entry.file_type()?.is_dir() {
                files.push(path);
            } else if !SKIPPED.iter().any(|name| path == Path::new(name)) {
                folders.push(path);
            }
        }
    }
    Ok(files)
}

/// Reads a file of the workspace. Bytes that are not valid UTF-8 are replaced.
pub(crate) fn read(file: &Path) -> Result<String> {
    let bytes =
        std::fs::read(root().join(file)).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
