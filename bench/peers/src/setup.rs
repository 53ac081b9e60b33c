//! Setup and output that all runs share: rights, the program, a tmpfs, the file of figures.

use crate::guard::Guard;
use crate::peer::Held;
use anyhow::{Context, Result, ensure};
use serde::Serialize;
use std::path::{Path, PathBuf};

pub(crate) fn ensure_can_mount() -> Result<()> {
    ensure!(
        rustix::process::geteuid().is_root(),
        "mounting a tmpfs and starting GlusterFS take root: run it as root"
    );
    ensure!(Path::new("/dev/fuse").exists(), "/dev/fuse is missing: load the fuse module (modprobe fuse)");
    Ok(())
}

pub(crate) fn program(path: &Path) -> Result<PathBuf> {
    path.canonicalize().with_context(|| format!("no program {}", path.display()))
}

/// Mounts a tmpfs of `mib` MiB and returns its path. Dropping `held` removes it with everything on it.
pub(crate) fn memory(held: &mut Held, mib: u64) -> Result<PathBuf> {
    use rustix::mount::{MountFlags, mount};
    // Sockets are made below this path, and paths of sockets must be short.
    let path = std::env::temp_dir().join(format!("peers-{}", std::process::id()));
    held.keep(Guard::folder(&path)?);
    held.keep(Guard::mount(&path)?);
    let size = std::ffi::CString::new(format!("size={mib}m,mode=700"))?;
    mount("none", &path, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, size.as_c_str())
        .context("a tmpfs cannot be mounted")?;
    Ok(path)
}

pub(crate) fn write_json(path: Option<&Path>, outcome: &impl Serialize) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let json = serde_json::to_string_pretty(outcome)? + "\n";
    std::fs::write(path, json).with_context(|| format!("{} cannot be written", path.display()))
}
