//! The sweep after a start: it looks for written stripes in which no block is allocated.
//!
//! Most are leftovers of writes that a crash kept from being committed, and become idle. Some may belong to
//! files whose bits are damaged: a discard would destroy their data, and so would a write of others. So a
//! written stripe is neither allocated nor discarded before the sweep has come to it, and it asks the map
//! rows for the owner of each one that it finds. If there is one, the bits of the group are suspect.
//!
//! It goes on in the background, since a start does not wait for all of a store to be read. Groups without
//! an empty stripe are passed over.

use super::Allocator;
use crate::ChunkError;
use crate::free::Kind;
use crate::rows::{all_maps, read_row, valid_part};
use penstock_array::ArrayError;
use penstock_base::HashSet;
use penstock_kv::for_each;
use std::collections::BTreeSet;
use std::rc::Rc;

/// Written stripes that are looked up at the same time.
pub(crate) const STRIPES_AT_A_TIME: usize = 4096;
/// Stripes without an owner that are looked for in the map rows at the same time.
const BARE_AT_A_TIME: usize = 1 << 20;

impl Allocator {
    /// True if the sweep is over.
    pub(crate) fn is_swept(&self) -> bool {
        self.swept.get() == u64::MAX
    }

    /// True if an empty stripe is known not to hold blocks of a file, written or not.
    pub(super) fn is_judged(&self, stripe: u64) -> bool {
        stripe < self.swept.get() || self.is_idle(stripe)
    }

    /// Sweeps until it is done or the target is closed.
    pub(crate) async fn run_sweep(self: Rc<Self>) {
        while !self.closed.get() && !self.is_swept() {
            match self.sweep().await {
                Ok(()) | Err(ChunkError::Array(ArrayError::Closed)) => return,
                Err(error) => {
                    tracing::warn!(%error, "free stripes could not be found; it will be tried again");
                    self.env.sleep(super::REST).await;
                }
            }
        }
    }

    /// Sweeps again from the first stripe on.
    pub(crate) async fn sweep_again(&self) -> Result<(), ChunkError> {
        self.swept.set(0);
        self.sweep().await
    }

    /// Waits until the sweep has come to all stripes, and drives it on. After an error it may be called
    /// again.
    pub(crate) async fn sweep(&self) -> Result<(), ChunkError> {
        while !self.is_swept() {
            self.sweep_on().await?;
        }
        Ok(())
    }

    /// One step of the sweep, if it is not over.
    pub(super) async fn sweep_on(&self) -> Result<(), ChunkError> {
        let _one = self.sweeping.lock().await;
        if self.closed.get() {
            return Err(ArrayError::Closed.into());
        }
        if self.is_swept() {
            return Ok(());
        }
        let (bare, next) = self.find_bare(self.swept.get()).await?;
        let owned = self.find_owned(&bare).await?;
        let group_of = |stripe| self.space().groups().of_stripe(stripe);
        for group in owned.into_iter().map(group_of) {
            if !self.space().is_suspect(group) {
                tracing::error!(
                    group,
                    "blocks of files are marked as free: nothing is allocated beside them until `penstock fs check --repair`"
                );
                self.space_mut().suspect(group);
            }
        }
        let idle: Vec<u64> =
            bare.into_iter().filter(|stripe| !self.space().is_suspect(group_of(*stripe))).collect();
        if self.idle.borrow_mut().add(idle) {
            self.has_idle.notify_one();
        }
        assert!(next > self.swept.get(), "it goes on from {}", self.swept.get());
        self.swept.set(next);
        self.space_mut().clear_unusable();
        Ok(())
    }

    /// Written stripes from `from` on in which no block is allocated and which are not idle, and the stripe
    /// at which the next look begins.
    async fn find_bare(&self, from: u64) -> Result<(Vec<u64>, u64), ChunkError> {
        let (mut bare, mut from) = (Vec::new(), from);
        let groups = self.space().groups();
        let stripes = groups.blocks() / groups.stripe_blocks();
        while bare.len() < BARE_AT_A_TIME {
            let group = match from < stripes {
                true => self.space().next_group(Kind::Empty, groups.of_stripe(from)..groups.count()),
                false => None,
            };
            let Some(group) = group else { return Ok((bare, u64::MAX)) };
            from = from.max(groups.stripes(group).start);
            // A group without a used block is mostly unwritten too, and so are those that follow.
            let end = match self.space().counts(group).used {
                0 => stripes,
                _ => groups.stripes(group).end,
            };
            let written = self.volume.written_in(from..end, STRIPES_AT_A_TIME).await?;
            let is_all = written.len() < STRIPES_AT_A_TIME;
            for stripe in &written {
                if self.space().counts(groups.of_stripe(*stripe)).empty > 0 && self.is_bare(*stripe).await? {
                    bare.push(*stripe);
                }
            }
            from = match written.last() {
                Some(last) if !is_all => last + 1,
                _ => end,
            };
        }
        assert!(bare.is_sorted(), "they are listed in order");
        Ok((bare, from))
    }

    /// True if a stripe is written, no block of it is allocated, and it is not idle. It stays so until the
    /// sweep has come to it, since it is neither allocated nor discarded before.
    pub(crate) async fn is_bare(&self, stripe: u64) -> Result<bool, ChunkError> {
        let is_written = self.is_unwritten(stripe).await? == Some(false);
        Ok(is_written && self.space().is_empty(stripe) && !self.is_idle(stripe))
    }

    /// Those of these stripes in which a file owns blocks.
    async fn find_owned(&self, bare: &[u64]) -> Result<BTreeSet<u64>, ChunkError> {
        let stripes: HashSet<u64> = bare.iter().copied().collect();
        let mut owned = BTreeSet::new();
        if bare.is_empty() {
            return Ok(owned);
        }
        let per_stripe = self.volume.stripe_blocks();
        for_each(&*self.kv, all_maps(), |key, value| {
            // A check reports rows that cannot be read.
            let Ok((_, row)) = read_row(key, value) else { return Ok(()) };
            let valid = |extent| valid_part(extent, self.chunk_blocks, self.volume.blocks());
            for part in row.extents.iter().map(valid).filter(|part| part.count > 0) {
                let (first, end) = (part.block, part.block + u64::from(part.count));
                let of_part = first / per_stripe..end.div_ceil(per_stripe);
                owned.extend(of_part.filter(|stripe| stripes.contains(stripe)));
            }
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok(owned)
    }
}
