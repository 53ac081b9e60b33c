//! The row of a key-value store: whose rows these are, and the opening of a store that has no names.
//!
//! The stack with the names of the file system has the file system's own row beside it. The others have maps
//! of chunks only.

use crate::error::MetaError;
use crate::rows::{FsRow, Home, StoreRow, fs_key, store_key};
use penstock_base::DecodeError;
use penstock_kv::{Kv, WriteSet};

/// The parameters of a store that is made, if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewStore<'a> {
    /// Name of the file system.
    pub name: &'a str,
    /// The arrays that it belongs to.
    pub home: Home,
    /// [`StoreRow::kept_stripes`].
    pub kept_stripes: u16,
}

impl NewStore<'_> {
    /// Puts the row of the new store.
    pub(crate) fn put(&self, writes: &mut WriteSet) {
        let &Self { home, kept_stripes, .. } = self;
        let store = StoreRow { features: home.features(), home, kept_stripes, is_unrepaired: false };
        writes.put(store_key(), store.encode());
    }
}

/// A store with rows and without the first ones. A new file system would take the place of the root
/// directory.
pub(crate) const LACKING: DecodeError = DecodeError::Bad {
    what: "row of the store",
    why: "it is missing, or that of the file system, and others are there",
};

/// Fails if the store has features that forbid this release to change it, or rows of something else, or none
/// although `has_data` says that the data array was written: what no row names would be discarded. Nothing
/// else may be opened on it before. Returns its row, if it has one.
pub async fn check_store(
    kv: &dyn Kv,
    home: Home,
    has_data: impl Fn() -> bool,
) -> Result<Option<StoreRow>, MetaError> {
    let fs = kv.get(fs_key()).await?;
    match kv.get(store_key()).await? {
        Some(store) if fs.is_some() == home.has_names() => {
            let store = StoreRow::decode(&store)?;
            check_home(&store, home)?;
            fs.map(|fs| FsRow::decode(&fs)).transpose()?;
            Ok(Some(store))
        }
        None if fs.is_none() && !has_rows(kv).await? => match has_data() {
            true => {
                let why = "it is missing, and the data array has data";
                Err(DecodeError::Bad { what: "row of the store", why }.into())
            }
            false => Ok(None),
        },
        _ => Err(LACKING.into()),
    }
}

/// Opens a store that has no names. An empty one gets its row, durably.
///
/// # Panics
/// If it is the one with the names.
pub async fn open_store(kv: &dyn Kv, new: NewStore<'_>) -> Result<(), MetaError> {
    assert!(!new.home.has_names(), "the metadata target opens the store with the names");
    if let Some(store) = kv.get(store_key()).await? {
        return keep(kv, &StoreRow::decode(&store)?, new.home).await;
    }
    let mut writes = WriteSet::new();
    new.put(&mut writes);
    Ok(kv.commit_durable(writes).await?)
}

/// Records that a restored store was repaired.
pub async fn set_repaired(kv: &dyn Kv) -> Result<(), MetaError> {
    let Some(row) = kv.get(store_key()).await? else { return Err(LACKING.into()) };
    let store = StoreRow::decode(&row)?;
    if !store.is_unrepaired {
        return Ok(());
    }
    let mut writes = WriteSet::new();
    writes.put(store_key(), StoreRow { is_unrepaired: false, ..store }.encode()).reclaims();
    Ok(kv.commit_durable(writes).await?)
}

/// True if a store has a row.
pub(crate) async fn has_rows(kv: &dyn Kv) -> Result<bool, MetaError> {
    Ok(!kv.keys(Vec::new(), vec![0xff; 16], 1).await?.is_empty())
}

/// Fails if the rows of a store are of other arrays: their blocks are there.
fn check_home(store: &StoreRow, home: Home) -> Result<(), MetaError> {
    let (Home { pool, data, .. }, wanted) = (store.home, home);
    match store.home == home {
        true => Ok(()),
        false => Err(MetaError::Foreign { pool, data, wanted: wanted.data }),
    }
}

/// Checks the row of a store, and drops the features from it that this release does not maintain.
pub(crate) async fn keep(kv: &dyn Kv, store: &StoreRow, home: Home) -> Result<(), MetaError> {
    check_home(store, home)?;
    let features = store.features.maintained();
    if features == store.features {
        return Ok(());
    }
    tracing::warn!(features = ?store.features, "features that this release does not maintain are dropped");
    let mut writes = WriteSet::new();
    writes.put(store_key(), StoreRow { features, ..store.clone() }.encode()).reclaims();
    Ok(kv.commit_durable(writes).await?)
}
