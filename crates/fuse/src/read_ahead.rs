//! How far the kernel reads ahead on a mount.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// What a mount by root is set to, in KiB. The kernel's own 128 KiB keep one request on its way, and hold any FUSE file
/// system to a small part of what its requests of 1 MiB reach.
pub(crate) const KIB: u64 = 4096;

/// Sets how far the kernel reads ahead on a mount, in KiB; gives what it was. Takes root. The mount must be served
/// meanwhile.
pub fn set_read_ahead(mount: &Path, kib: u64) -> io::Result<u64> {
    let device = std::fs::metadata(mount)?.dev();
    let path =
        format!("/sys/class/bdi/{}:{}/read_ahead_kb", rustix::fs::major(device), rustix::fs::minor(device));
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{path}: {error}"));
    let before = std::fs::read_to_string(&path).map_err(named)?;
    let before = before.trim().parse().map_err(|error| named(io::Error::other(error)))?;
    std::fs::write(&path, kib.to_string()).map_err(named)?;
    Ok(before)
}
