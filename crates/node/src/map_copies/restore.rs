//! The restore of all rows from a copy of the map, before the services of a store are opened.
//!
//! Nothing is changed before a copy was read and verified in full. Then all of the key-value store is
//! discarded, and it is made anew. If the restore is interrupted, the rows by which a start knows the store
//! are missing; the start is refused, and the restore can be made again.

use crate::error::StartError;
use penstock_array::{Array, Discard, Volume};
use penstock_base::Env;
use penstock_base::rank::scoped;
use penstock_chunk::copies::{Newer, Restored, anchor_stripes, find, restore};
use penstock_kv::{AheadKv, Kv, KvError, Mode, RedbKv, for_each};
use penstock_meta::rows::Home;
use penstock_meta::{MetaTarget, RestoredNames};
use std::rc::Rc;

/// The arrays of a stack.
pub(crate) struct Arrays<'a> {
    pub(crate) data: &'a Rc<Array>,
    pub(crate) meta: &'a Rc<Array>,
}

impl Arrays<'_> {
    /// Opens the key-value store.
    pub(crate) async fn open_kv(&self, env: &Env, mode: Mode) -> Result<Rc<AheadKv>, KvError> {
        let engine = RedbKv::open(env, Volume::whole(self.meta), mode).await?;
        AheadKv::open(env, engine).await
    }
}

/// Fails if some row cannot be read, or if those are missing by which a start knows the store.
async fn read_all(env: &Env, arrays: &Arrays<'_>, mode: Mode, home: Home) -> Result<(), StartError> {
    let kv = arrays.open_kv(env, mode).await?;
    let read = async {
        let missing = || StartError::Refused("it has no rows".into());
        MetaTarget::check_store(&*kv, home, || true).await?.ok_or_else(missing)?;
        for_each(&*kv, (Vec::new(), vec![0xff; 256]), |_, _| Ok::<_, KvError>(())).await?;
        Ok(())
    };
    let read = read.await;
    kv.stop();
    read
}

/// Makes a new key-value store of the last copy of the map.
pub(crate) async fn restore_rows(
    env: &Env,
    arrays: &Arrays<'_>,
    mode: Mode,
    (home, how): (Home, Newer),
) -> Result<(Rc<AheadKv>, Restored), StartError> {
    let whole = Volume::whole(arrays.data);
    let kept = anchor_stripes(whole.stripe_blocks());
    if kept >= arrays.data.geometry().stripes {
        return Err(StartError::Refused("the data array is too small for copies of the map".into()));
    }
    let (volume, anchors) = whole.split_end(kept);
    let found = scoped(find(&volume, &anchors)).await?;
    match read_all(env, arrays, mode, home).await {
        Ok(()) => {
            return Err(StartError::Refused(
                "every row of this store can be read, so nothing was changed: `penstock up` starts it, and `penstock fs check --repair` repairs it".into(),
            ));
        }
        Err(error) => tracing::warn!(%error, "the key-value store cannot be read, and is made anew"),
    }
    let old = Volume::whole(arrays.meta);
    let left = old.discard(0, arrays.meta.geometry().stripes, Discard::InTable).await?;
    if !left.is_empty() {
        return Err(StartError::Refused(format!(
            "{} stripes of the metadata array cannot be used: their pages of the stripe table are lost; start with --accept-loss gives them up",
            left.len()
        )));
    }
    let kv = arrays.open_kv(env, mode).await?;
    let shared: Rc<dyn Kv> = kv.clone();
    let restored = scoped(restore(&found, &volume, &*shared, &mut RestoredNames::new(home), how)).await;
    match restored {
        Ok(restored) => Ok((kv, restored)),
        Err(error) => {
            kv.stop();
            Err(error.into())
        }
    }
}
