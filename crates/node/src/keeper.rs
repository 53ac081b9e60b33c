//! Small files in the store's folder that are replaced as a whole.

use penstock_base::LocalBoxFuture;
use penstock_worker::blocking;
use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};

/// Replaces a file as a whole: after a power cut it is the old one or the new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    replace(path, bytes, 0o644)
}

/// Like [`replace_file`], with a file that nobody else may read.
pub fn replace_private_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    replace(path, bytes, 0o600)
}

fn replace(path: &Path, bytes: &[u8], mode: u32) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    // One that a crash left may have another mode.
    match std::fs::remove_file(&beside) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    std::fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

/// Storage for a few bytes.
pub trait Keeper {
    /// Reads the saved bytes; none if nothing was saved.
    fn load(&self) -> Result<Option<Vec<u8>>, String>;
    /// Replaces the saved bytes, durably.
    fn save(&self, bytes: Vec<u8>) -> LocalBoxFuture<'_, Result<(), String>>;
}

/// A file in the store's folder.
pub struct KeptFile {
    path: PathBuf,
    next: Cell<u64>,
    /// Number of the newest write: a write that a later one has overtaken is skipped.
    written: Arc<Mutex<u64>>,
}

impl KeptFile {
    /// Makes the handle of a file in `dir`; reads nothing.
    pub fn new(dir: &Path, name: &str) -> Rc<Self> {
        Rc::new(Self { path: dir.join(name), next: Cell::new(1), written: Arc::default() })
    }
}

impl Keeper for KeptFile {
    fn load(&self) -> Result<Option<Vec<u8>>, String> {
        match std::fs::read(&self.path) {
            Ok(bytes) => Ok(Some(bytes)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(format!("{}: {error}", self.path.display())),
        }
    }

    fn save(&self, bytes: Vec<u8>) -> LocalBoxFuture<'_, Result<(), String>> {
        let (path, written, number) = (self.path.clone(), self.written.clone(), self.next.get());
        self.next.set(number + 1);
        Box::pin(blocking(move || {
            let mut newest = written.lock().unwrap_or_else(PoisonError::into_inner);
            if *newest > number {
                return Ok(());
            }
            replace_file(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()))?;
            *newest = number;
            Ok(())
        }))
    }
}
