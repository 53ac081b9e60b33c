//! Settings of pools that an administrator may change while the store runs.
//!
//! `pools.json` in the store's folder has them. Without it each pool has the settings of a new one, and
//! nothing else is lost.

use crate::keeper::Keeper;
use penstock_array::{Array, RebuildRate};
use penstock_base::PoolId;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Name of the file in the store's folder.
pub const POOLS_FILE: &str = "pools.json";
const FORMAT: u32 = 1;

/// The settings of one pool. A field that a later release added is dropped.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolSettings {
    /// The rule of rebuilds: `auto`, `max`, or the most bytes of strips a second.
    #[serde(default)]
    pub rebuild_rate: RateText,
}

/// A change of the settings of a pool: of the fields that are given.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PoolChange {
    /// The rule of rebuilds.
    pub rebuild_rate: Option<RateText>,
}

/// A rebuild rate as text: `auto`, `max`, or bytes a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct RateText(pub RebuildRate);

impl From<RateText> for String {
    fn from(rate: RateText) -> Self {
        match rate.0 {
            RebuildRate::Auto => "auto".to_owned(),
            RebuildRate::Max => "max".to_owned(),
            RebuildRate::AtMost(bytes) => bytes.to_string(),
        }
    }
}

impl TryFrom<String> for RateText {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "auto" => Ok(Self(RebuildRate::Auto)),
            "max" => Ok(Self(RebuildRate::Max)),
            number => match number.parse() {
                Ok(bytes @ 1..) => Ok(Self(RebuildRate::AtMost(bytes))),
                _ => Err(format!("a rebuild rate is auto, max, or bytes a second, and not {text:?}")),
            },
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Contents {
    format: u32,
    pools: BTreeMap<String, PoolSettings>,
}

/// The settings of all pools of a store.
#[derive(Default)]
pub(crate) struct AllSettings {
    pools: RefCell<BTreeMap<String, PoolSettings>>,
    keeper: RefCell<Option<Rc<dyn Keeper>>>,
    /// Why the saved ones could not be read. They are not written over.
    unread: RefCell<Option<String>>,
}

fn decode(bytes: &[u8]) -> Result<BTreeMap<String, PoolSettings>, String> {
    let found: Contents = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    match found.format {
        FORMAT => Ok(found.pools),
        other => Err(format!("format {other} is of a later release")),
    }
}

impl AllSettings {
    /// Reads the settings, and applies them to arrays. What cannot be read is logged, and counts as not set.
    pub(crate) fn load(&self, keeper: Rc<dyn Keeper>, arrays: &[Rc<Array>]) {
        let loaded = keeper.load().and_then(|bytes| bytes.as_deref().map_or(Ok(BTreeMap::new()), decode));
        match loaded {
            Ok(pools) => *self.pools.borrow_mut() = pools,
            Err(why) => {
                *self.unread.borrow_mut() = Some(why.clone());
                tracing::warn!(why, "settings of pools cannot be read; each pool has those of a new one")
            }
        }
        *self.keeper.borrow_mut() = Some(keeper);
        arrays.iter().for_each(|array| self.apply(array));
    }

    fn apply(&self, array: &Array) {
        array.set_rebuild_rate(self.of(array.pool()).rebuild_rate.0);
    }

    /// The settings of a pool.
    pub(crate) fn of(&self, pool: PoolId) -> PoolSettings {
        self.pools.borrow().get(&pool.to_string()).cloned().unwrap_or_default()
    }

    /// Changes the settings of a pool, and applies them to its arrays among these. Durable when this returns;
    /// if they cannot be saved they hold until the next start, and the reason is returned.
    pub(crate) async fn change(
        &self,
        pool: PoolId,
        PoolChange { rebuild_rate }: PoolChange,
        arrays: &[Rc<Array>],
    ) -> Result<(), String> {
        let mut settings = self.of(pool);
        if let Some(rate) = rebuild_rate {
            settings.rebuild_rate = rate;
        }
        self.pools.borrow_mut().insert(pool.to_string(), settings);
        arrays.iter().filter(|array| array.pool() == pool).for_each(|array| self.apply(array));
        if let Some(why) = &*self.unread.borrow() {
            return Err(format!(
                "the saved ones cannot be read ({why}), and are not written over: move {POOLS_FILE} away and start again"
            ));
        }
        let contents = Contents { format: FORMAT, pools: self.pools.borrow().clone() };
        let bytes = serde_json::to_vec_pretty(&contents).map_err(|error| error.to_string())?;
        let keeper = self.keeper.borrow().clone();
        match keeper {
            Some(keeper) => keeper.save(bytes).await,
            None => Err("the store has no folder".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_they_are_written() {
        for rate in
            [RebuildRate::Auto, RebuildRate::Max, RebuildRate::AtMost(1), RebuildRate::AtMost(500 << 20)]
        {
            let text = String::from(RateText(rate));
            assert_eq!(RateText::try_from(text.clone()), Ok(RateText(rate)), "{text}");
        }
        for bad in ["", "0", "-1", "fast", "1.5", "1M"] {
            assert!(RateText::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn settings_of_a_later_release_are_refused_and_fields_have_defaults() {
        assert_eq!(decode(br#"{"format":1,"pools":{"a":{}}}"#).unwrap()["a"], PoolSettings::default());
        let found = decode(br#"{"format":1,"pools":{"a":{"rebuild_rate":"max","other":3}}}"#).unwrap();
        assert_eq!(found["a"].rebuild_rate, RateText(RebuildRate::Max));
        for bad in
            [&br#"{"format":2,"pools":{}}"#[..], b"{", br#"{"format":1,"pools":{"a":{"rebuild_rate":"x"}}}"#]
        {
            assert!(decode(bad).is_err());
        }
    }
}
