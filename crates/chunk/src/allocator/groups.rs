//! Allocation groups in memory as they are needed.
//!
//! Invariant: groups are read one after another, so nothing can have changed a row since it was read: whoever
//! changes bits has the group in memory.

use super::Allocator;
use crate::ChunkError;
use crate::free::Run;
use crate::rows::{Borrowed, GROUP_WORDS, decode_group, group_key};
use penstock_base::rank::RankedGuard;
use std::rc::Rc;

/// Groups that stay in memory while this lives.
pub(crate) struct GroupPins {
    allocator: Rc<Allocator>,
    groups: Vec<u64>,
}

impl Drop for GroupPins {
    fn drop(&mut self) {
        self.groups.iter().for_each(|group| self.allocator.space_mut().pin(*group, false));
    }
}

impl Allocator {
    /// True if the group of a stripe is in memory.
    pub(super) fn is_loaded(&self, stripe: u64) -> bool {
        let group = self.space().groups().of_stripe(stripe);
        self.space_mut().has(group)
    }

    /// Has the group of a stripe in memory. It stays there until the next wait.
    pub(crate) async fn load_of(&self, stripe: u64) -> Result<(), ChunkError> {
        let group = self.space().groups().of_stripe(stripe);
        self.load(group).await
    }

    /// Has a group in memory. It stays there until the next wait.
    pub(crate) async fn load(&self, group: u64) -> Result<(), ChunkError> {
        if self.space_mut().has(group) {
            return Ok(());
        }
        let _one_at_a_time = self.loading.lock().await;
        if self.space_mut().has(group) {
            return Ok(());
        }
        let is_borrowed = group >= self.space().groups().own();
        let key = if is_borrowed { Borrowed::key(group) } else { group_key(group) };
        let row = self.kv.get(key).await?;
        self.group_reads.set(self.group_reads.get() + 1);
        let words = match (is_borrowed, row.as_deref()) {
            (false, row) => words_of(group, row),
            // Nothing of it was committed yet, or it is no loan.
            (true, None) => vec![0; GROUP_WORDS],
            (true, Some(row)) => Borrowed::decode(row)?.1,
        };
        let agrees = self.space_mut().load(group, &words);
        if !agrees {
            tracing::error!(
                group,
                "an allocation group is not as it was counted: nothing is allocated in it until `penstock fs check --repair`"
            );
        }
        Ok(())
    }

    /// Waits for the group that is being read, and lets none be read meanwhile.
    pub(crate) async fn pause_loads(&self) -> RankedGuard<'_, ()> {
        self.loading.lock().await
    }

    /// Keeps the groups of these runs in memory.
    pub(crate) async fn pin_groups(self: &Rc<Self>, runs: &[Run]) -> Result<GroupPins, ChunkError> {
        let groups = self.space().groups();
        let mut pins = GroupPins { allocator: self.clone(), groups: Vec::new() };
        for group in groups.of_runs(runs) {
            if pins.groups.last() != Some(&group) {
                self.load(group).await?;
                self.space_mut().pin(group, true);
                pins.groups.push(group);
            }
        }
        assert!(pins.groups.iter().all(|group| self.space_mut().has(*group)), "they stay in memory");
        Ok(pins)
    }
}

/// The bits of a group's row. All blocks of a group whose row cannot be read count as used.
fn words_of(group: u64, row: Option<&[u8]>) -> Vec<u64> {
    let Some(row) = row else { return vec![0; GROUP_WORDS] };
    decode_group(row, GROUP_WORDS).unwrap_or_else(|error| {
        tracing::error!(group, %error, "an allocation group cannot be read: all of it counts as used until `penstock fs check --repair`");
        vec![u64::MAX; GROUP_WORDS]
    })
}
