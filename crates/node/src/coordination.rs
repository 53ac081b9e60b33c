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

/// What `coordination.json` holds: the claim of each array.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims(pub BTreeMap<ArrayId, Claim>);

impl Claims {
    /// The file's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let row = |(array, claim): (&ArrayId, &Claim)| {
            let row = Row { epoch: claim.epoch.0, revision: claim.revision, stale_members: claim.stale };
            (array.to_string(), row)
        };
        serde_json::to_vec_pretty(&self.0.iter().map(row).collect::<BTreeMap<_, _>>())
    }

    /// Reads the file's bytes; the error says what is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let rows: BTreeMap<String, Row> = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let claim = |(array, row): (String, Row)| {
            let id = array.parse().map_err(|error| format!("{array}: {error}"))?;
            if (row.epoch | row.revision) >> 63 != 0 {
                return Err(format!("{array}: a counter above 2^63"));
            }
            let claim = Claim { epoch: Epoch(row.epoch), revision: row.revision, stale: row.stale_members };
            Ok((ArrayId(id), claim))
        };
        rows.into_iter().map(claim).collect::<Result<_, String>>().map(Self)
    }
}

/// Claims in `coordination.json`. The folder's lock keeps other processes away.
pub struct FileOwnership {
    path: PathBuf,
    claims: RefCell<Claims>,
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
        let claims = match std::fs::read(&path) {
            Ok(bytes) => Claims::decode(&bytes).map_err(|error| {
                format!("{} cannot be read ({error}); remove it to rely on the drives alone", path.display())
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Claims::default(),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        Ok(Self { path, claims: RefCell::new(claims) })
    }

    fn claim(&self, array: ArrayId) -> Claim {
        self.claims.borrow().0.get(&array).copied().unwrap_or_default()
    }

    fn try_swap(&self, array: ArrayId, expected: Claim, next: Claim) -> Result<(), ClaimError> {
        let found = self.claim(array);
        if found != expected {
            return Err(ClaimError::Changed(found));
        }
        let mut claims = self.claims.borrow().clone();
        claims.0.insert(array, next);
        let unavailable =
            |error: String| ClaimError::Unavailable(format!("{}: {error}", self.path.display()));
        let bytes = claims.encode().map_err(|error| unavailable(error.to_string()))?;
        replace_file(&self.path, &bytes).map_err(|error| unavailable(error.to_string()))?;
        *self.claims.borrow_mut() = claims;
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
