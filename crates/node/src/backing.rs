//! Where drives come from: files and devices of this machine, or the simulated world.

use penstock_drive::{Drive, FileDrive};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

/// A source of drives by path.
pub trait Backing {
    /// Opens the drive at `path`.
    fn open(&self, path: &str) -> Result<Rc<dyn Drive>, String>;

    /// Makes a blank drive of `size_bytes` at `path`, in the place of whatever file is there: the caller made sure that
    /// nobody wants it. A block device keeps its size.
    fn create(&self, path: &str, size_bytes: u64) -> Result<(), String>;

    /// Allocates a range in full, so that later writes to it cannot find the host full.
    fn allocate(&self, path: &str, range: Range<u64>) -> Result<(), String>;
}

/// Files and block devices.
pub struct FileBacking;

impl Backing for FileBacking {
    fn open(&self, path: &str) -> Result<Rc<dyn Drive>, String> {
        let drive = FileDrive::open(Path::new(path)).map_err(|error| error.to_string())?;
        if !drive.direct() {
            tracing::info!(path, "this file system refuses O_DIRECT: the drive works through the page cache");
        }
        Ok(Rc::new(drive))
    }

    fn create(&self, path: &str, size_bytes: u64) -> Result<(), String> {
        let place = Path::new(path);
        let fail = |error: std::io::Error| format!("{path}: {error}");
        match std::fs::metadata(place) {
            Ok(found) if found.is_file() => std::fs::remove_file(place).map_err(fail)?,
            Ok(found) if found.is_dir() => return Err(format!("{path} is a directory")),
            // A device is written over from its superblock on.
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(fail(error)),
        }
        FileDrive::create(place, size_bytes).map_err(fail)
    }

    fn allocate(&self, path: &str, range: Range<u64>) -> Result<(), String> {
        FileDrive::allocate(Path::new(path), range.start, range.end - range.start)
            .map_err(|error| format!("{path}: {error}"))
    }
}
