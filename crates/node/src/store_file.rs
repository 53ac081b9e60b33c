//! `store.json`: which store a folder holds and where its drives were last seen. A convenience: the drives say
//! everything else themselves, and a folder without this file is searched.

use crate::assemble::Node;
use penstock_base::{DriveId, StoreId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

const NAME: &str = "store.json";

/// Replaces a file whole: a power cut leaves the old one or the new one.
pub(crate) fn replace_file(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let beside = path.with_extension("new");
    let mut file = std::fs::File::create(&beside)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(&beside, path)?;
    std::fs::File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()
}

/// The file's contents.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFile {
    /// Layout of this file.
    pub format: u32,
    /// The store.
    pub store: String,
    /// Code of its data array, as in `4+2`.
    pub code: String,
    /// Size of a drive in bytes.
    pub drive_bytes: u64,
    /// Paths by the drives' ids.
    pub drives: BTreeMap<String, String>,
}

impl StoreFile {
    /// What a running node would save.
    pub fn of(node: &Node) -> Self {
        let drives = node.drives();
        let code = node.arrays().iter().find(|array| array.name() == "data").map(|array| array.geometry());
        Self {
            format: 1,
            store: node.store().to_string(),
            code: code.map_or(String::new(), |geometry| format!("{}+{}", geometry.k, geometry.m)),
            drive_bytes: drives.iter().map(|drive| drive.size_bytes()).max().unwrap_or(0),
            drives: drives.iter().map(|drive| (drive.id().to_string(), drive.path().to_owned())).collect(),
        }
    }

    /// Reads the file in `dir`; none when there is none.
    pub fn load(dir: &Path) -> Result<Option<Self>, String> {
        let path = dir.join(NAME);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        let advice = "remove it to search the folder's drives instead";
        let found = Self::decode(&bytes)
            .map_err(|error| format!("{} cannot be read ({error}); {advice}", path.display()))?;
        Ok(Some(found))
    }

    /// Reads the file's bytes; the error says what is wrong with them.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let found: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        match found.format {
            1 => Ok(found),
            other => Err(format!("format {other} is of a later release")),
        }
    }

    /// The file's bytes.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec_pretty(self)
    }

    /// Replaces the file in `dir`, durably.
    pub fn save(&self, dir: &Path) -> Result<(), String> {
        let path = dir.join(NAME);
        let bytes = self.encode().map_err(|error| error.to_string())?;
        // A full host keeps no store from being started that has not changed.
        if std::fs::read(&path).is_ok_and(|known| known == bytes) {
            return Ok(());
        }
        replace_file(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// The store's id.
    pub fn store_id(&self) -> Option<StoreId> {
        self.store.parse().ok().map(StoreId)
    }

    /// Paths by drive.
    pub fn paths(&self) -> BTreeMap<DriveId, String> {
        let row = |(id, path): (&String, &String)| Some((DriveId(id.parse().ok()?), path.clone()));
        self.drives.iter().filter_map(row).collect()
    }
}
