//! The two arrays of a stack, with the volumes and the key-value store on them, and stacks that do not have
//! both.

use crate::error::StartError;
use penstock_array::{Array, Volume};
use penstock_base::{Env, StackNo};
use penstock_chunk::copies::anchor_stripes;
use penstock_kv::{AheadKv, KvError, Mode, RedbKv};
use std::rc::Rc;

/// A stack that does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absent {
    /// Its number.
    pub(crate) number: StackNo,
    /// The reason.
    pub(crate) why: String,
}

/// The arrays of a stack.
#[derive(Clone)]
pub(crate) struct StackArrays {
    /// Its number.
    pub(crate) number: StackNo,
    /// The array with the chunks of files.
    pub(crate) data: Rc<Array>,
    /// The array with the key-value store.
    pub(crate) meta: Rc<Array>,
}

impl StackArrays {
    /// Both arrays.
    pub(crate) fn both(&self) -> [&Rc<Array>; 2] {
        [&self.data, &self.meta]
    }

    /// Stops both arrays: nothing goes on with them.
    pub(crate) fn stop(&self) {
        self.both().into_iter().for_each(|array| array.stop());
    }

    /// The volume of the target, and that of the anchors, in a store that has copies.
    pub(crate) fn parts(&self) -> Result<(Volume, Volume), StartError> {
        let whole = Volume::whole(&self.data);
        let kept = anchor_stripes(whole.stripe_blocks());
        match kept < self.data.geometry().stripes {
            true => Ok(whole.split_end(kept)),
            false => Err(StartError::Refused("the data array is too small for copies of the map".into())),
        }
    }

    /// Opens the key-value store.
    pub(crate) async fn open_kv(&self, env: &Env, mode: Mode) -> Result<Rc<AheadKv>, KvError> {
        let engine = RedbKv::open(env, Volume::whole(&self.meta), mode).await?;
        // Otherwise it may write when it closes, which is later.
        AheadKv::open(env, engine.clone()).await.inspect_err(|_| engine.retire())
    }
}
