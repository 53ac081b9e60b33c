//! The two arrays of a stack, with the volumes and the key-value store on them, and stacks that do not have
//! both.

use crate::error::StartError;
use penstock_array::{Array, Volume};
use penstock_base::{Env, StackNo};
use penstock_chunk::copies::anchor_stripes;
use penstock_kv::{AheadKv, Engine, KvError, RedbKv};
use std::rc::Rc;

/// A stack that does not serve.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Absent {
    /// Its number.
    pub(crate) number: StackNo,
    /// The reason.
    pub(crate) why: String,
    /// An administrator has forgotten its target: it never serves again.
    pub(crate) is_forgotten: bool,
}

impl Absent {
    /// The word for its state.
    pub(crate) fn state(&self) -> &'static str {
        if self.is_forgotten { "forgotten" } else { "absent" }
    }

    /// A stack that may serve another time.
    pub(crate) fn new(number: StackNo, why: String) -> Self {
        Self { number, why, is_forgotten: false }
    }

    /// A stack whose target is forgotten.
    pub(crate) fn forgotten(number: StackNo) -> Self {
        let why = "an administrator has forgotten its target, and what files had there is lost".to_owned();
        Self { number, why, is_forgotten: true }
    }
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
    pub(crate) async fn open_kv(&self, env: &Env, engine: Engine) -> Result<Rc<AheadKv>, KvError> {
        let engine = RedbKv::open(env, Volume::whole(&self.meta), engine).await?;
        // Otherwise it may write when it closes, which is later.
        AheadKv::open(env, engine.clone()).await.inspect_err(|_| engine.retire())
    }
}
