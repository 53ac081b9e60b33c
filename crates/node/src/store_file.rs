//! `store.json`: the store of a folder and the paths at which its drives were last seen.
//!
//! A convenience: the drives contain everything else themselves, and without this file the folder is searched
//! for drives.

use crate::drive_set::DriveSet;
use crate::keeper::replace_file;
use penstock_array::format::descriptor::Role;
use penstock_base::{DriveId, StoreId};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const NAME: &str = "store.json";

/// Contents of the file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFile {
    /// Format number of the file; 1.
    pub format: u32,
    /// Identifier of the store.
    pub store: String,
    /// Code of the data array, as in `4+2`.
    pub code: String,
    /// Size of the largest drive, in bytes.
    pub drive_bytes: u64,
    /// Path of each drive, by the drive's identifier.
    pub drives: BTreeMap<String, String>,
}

impl StoreFile {
    /// Returns the contents to save for the drives of a running store.
    pub fn of(set: &DriveSet) -> Self {
        let drives = set.drives();
        let code = set.arrays().iter().find(|array| array.role() == Role::Data).map(|array| array.geometry());
        Self {
            format: 1,
            store: set.store().to_string(),
            code: code.map_or(String::new(), |geometry| format!("{}+{}", geometry.k, geometry.m)),
            drive_bytes: drives.iter().filter_map(|drive| drive.size_bytes()).max().unwrap_or(0),
            drives: drives.iter().map(|drive| (drive.id().to_string(), drive.path().to_owned())).collect(),
        }
    }

    /// Reads the file in `dir`; none if there is no file.
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

    /// Decodes the file. The error is the reason why it cannot be decoded.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let found: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        match found.format {
            1 => Ok(found),
            other => Err(format!("format {other} is of a later release")),
        }
    }

    /// Encodes the file.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        serde_json::to_vec_pretty(self)
    }

    /// Replaces the file in `dir`, durably. Does nothing if it would not change.
    pub fn save(&self, dir: &Path) -> Result<(), String> {
        let path = dir.join(NAME);
        let bytes = self.encode().map_err(|error| error.to_string())?;
        // A full host must not prevent the start of a store that has not changed.
        if std::fs::read(&path).is_ok_and(|known| known == bytes) {
            return Ok(());
        }
        replace_file(&path, &bytes).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Identifier of the store; none if the file's text is not one.
    pub fn store_id(&self) -> Option<StoreId> {
        self.store.parse().ok().map(StoreId)
    }

    /// Path of each drive; entries with an invalid identifier are left out.
    pub fn paths(&self) -> BTreeMap<DriveId, String> {
        let row = |(id, path): (&String, &String)| Some((DriveId(id.parse().ok()?), path.clone()));
        self.drives.iter().filter_map(row).collect()
    }
}
