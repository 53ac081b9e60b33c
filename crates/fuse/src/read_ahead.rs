//! Sets the kernel's read-ahead of a mount.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The read-ahead of a mount by root, in KiB. With the kernel's default of 128 KiB one request is in flight,
/// and a FUSE file system reaches a small part of its throughput with requests of 1 MiB.
pub(crate) const KIB: u64 = 4096;

/// Sets the read-ahead of a mount, in KiB, and returns the previous value. Needs root. The mount must be
/// served meanwhile.
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
