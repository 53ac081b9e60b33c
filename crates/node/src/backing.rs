//! Sources of drives: files and block devices of this machine, or the simulated world.

use penstock_base::Env;
use penstock_base::env::timeout;
use penstock_drive::superblock::{self, Superblock, SuperblockError};
use penstock_drive::{Drive, FileDrive};
use std::ops::Range;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// Kind of thing that exists at the path of a future drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The path does not exist.
    Nothing,
    /// A regular file in which nothing is allocated.
    EmptyFile,
    /// A regular file with contents.
    File,
    /// A block device.
    Device,
}

/// A source of drives, by path.
pub trait Backing {
    /// Opens the drive at `path`. Fails if another process uses it.
    fn open(&self, path: &str) -> Result<Rc<dyn Drive>, String>;

    /// Returns the kind of thing at `path`, and changes nothing.
    fn look(&self, path: &str) -> Result<Found, String>;

    /// Makes a blank drive of `size_bytes` at `path`, and replaces any regular file there: the caller made
    /// sure that nobody needs it. A block device keeps its size.
    fn create(&self, path: &str, size_bytes: u64) -> Result<(), String>;

    /// Allocates a range of bytes on the host, so that later writes to it cannot fail because the host is
    /// full.
    fn allocate(&self, path: &str, range: Range<u64>) -> Result<(), String>;
}

/// Longest time that a drive may take to return its superblock.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);

/// Reads a drive's superblock. None if the drive does not answer within [`ANSWER`].
pub(crate) async fn read_superblock(
    env: &Env,
    drive: &dyn Drive,
) -> Option<Result<Superblock, SuperblockError>> {
    timeout(env, ANSWER, superblock::read(drive)).await
}

/// Refuses a drive without a superblock that something else uses. The error is the reason.
pub(crate) async fn check_blank(env: &Env, path: &str, drive: &dyn Drive) -> Result<(), String> {
    match timeout(env, ANSWER, superblock::is_used(drive)).await {
        Some(Ok(false)) => Ok(()),
        Some(Ok(true)) => Err(format!("{path} is not blank")),
        Some(Err(error)) => Err(format!("{path}: {error}")),
        None => Err(format!("{path}: no answer within {ANSWER:?}")),
    }
}

/// Drives that are files and block devices of this machine.
pub struct FileBacking;

impl Backing for FileBacking {
    fn open(&self, path: &str) -> Result<Rc<dyn Drive>, String> {
        let drive = FileDrive::open(Path::new(path)).map_err(|error| error.to_string())?;
        if !drive.direct() {
            tracing::info!(path, "this file system refuses O_DIRECT: the drive works through the page cache");
        }
        Ok(Rc::new(drive))
    }

    fn look(&self, path: &str) -> Result<Found, String> {
        let fail = |error: std::io::Error| format!("{path}: {error}");
        let kind = match std::fs::metadata(path) {
            Ok(found) => found.file_type(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Found::Nothing),
            Err(error) => return Err(fail(error)),
        };
        if kind.is_block_device() {
            return Ok(Found::Device);
        }
        if !kind.is_file() {
            return Err(format!("{path} is neither a regular file nor a block device"));
        }
        let file = std::fs::File::open(path).map_err(fail)?;
        match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(0)) {
            Ok(_) => Ok(Found::File),
            Err(rustix::io::Errno::NXIO) => Ok(Found::EmptyFile),
            Err(error) => Err(fail(error.into())),
        }
    }

    fn create(&self, path: &str, size_bytes: u64) -> Result<(), String> {
        let place = Path::new(path);
        let fail = |error: std::io::Error| format!("{path}: {error}");
        let is_link = std::fs::symlink_metadata(place).is_ok_and(|found| found.is_symlink());
        match std::fs::metadata(place) {
            // Nobody looked if the file is the one that the link named before.
            Ok(found) if found.is_file() && is_link => {
                return Err(format!("{path} is a link to a file: name the file itself"));
            }
            Ok(found) if found.is_file() => std::fs::remove_file(place).map_err(fail)?,
            Ok(found) if found.is_dir() => return Err(format!("{path} is a directory")),
            // A device is overwritten, beginning with its superblock.
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
