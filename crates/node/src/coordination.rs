//! Coordination of one node: claims in a file of the store's folder, replaced whole and durably with every change.

use penstock_array::ownership::{Claim, ClaimError, Ownership};
use penstock_base::{ArrayId, Epoch, LocalBoxFuture};
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Row {
    epoch: u64,
    revision: u64,
    stale_members: u64,
}

/// Claims in `coordination.json`. The folder's lock keeps other processes away.
pub struct FileOwnership {
    path: PathBuf,
    rows: RefCell<BTreeMap<String, Row>>,
}

/// Replaces a file whole: a power cut leaves the old one or the new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = std::fs::File::create(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    std::fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

impl FileOwnership {
    /// Opens the claims in `dir`; none yet is no error, since superblocks have epochs of their own.
    pub fn open(dir: &Path) -> Result<Self, String> {
        let path = dir.join("coordination.json");
        let rows = match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(|error| {
                format!("{} cannot be read ({error}); remove it to rely on the drives alone", path.display())
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => BTreeMap::new(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        Ok(Self { path, rows: RefCell::new(rows) })
    }

    fn claim(&self, array: ArrayId) -> Claim {
        self.rows.borrow().get(&array.to_string()).map_or(Claim::default(), |row| Claim {
            epoch: Epoch(row.epoch),
            revision: row.revision,
            stale: row.stale_members,
        })
    }

    fn try_swap(&self, array: ArrayId, expected: Claim, next: Claim) -> Result<(), ClaimError> {
        let found = self.claim(array);
        if found != expected {
            return Err(ClaimError::Changed(found));
        }
        let mut rows = self.rows.borrow().clone();
        let row = Row { epoch: next.epoch.0, revision: next.revision, stale_members: next.stale };
        rows.insert(array.to_string(), row);
        let unavailable =
            |error: String| ClaimError::Unavailable(format!("{}: {error}", self.path.display()));
        let bytes = serde_json::to_vec_pretty(&rows).map_err(|error| unavailable(error.to_string()))?;
        replace_file(&self.path, &bytes).map_err(|error| unavailable(error.to_string()))?;
        *self.rows.borrow_mut() = rows;
        Ok(())
    }
}

impl Ownership for FileOwnership {
    fn current(&self, array: ArrayId) -> LocalBoxFuture<'_, Result<Claim, ClaimError>> {
        let claim = self.claim(array);
        Box::pin(async move { Ok(claim) })
    }

    fn swap(
        &self,
        array: ArrayId,
        expected: Claim,
        next: Claim,
    ) -> LocalBoxFuture<'_, Result<(), ClaimError>> {
        let result = self.try_swap(array, expected, next);
        Box::pin(async move { result })
    }
}
