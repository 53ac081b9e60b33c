//! The sweep after a start: it looks for written stripes in which no block is allocated.
//!
//! Most are leftovers of writes that a crash kept from being committed, and become idle. Some may belong to
//! files whose bits are damaged: a discard would destroy their data, and so would a write of others. So a
//! written stripe is neither allocated nor discarded before the sweep has come to it, and it asks the map
//! rows for the owner of each one that it finds. If there is one, the bits of the group are suspect. So they
//! are while there is a map row that cannot be read, which may own any of them.
//!
//! It goes on in the background, since a start does not wait for all of a store to be read. Groups without
//! an empty stripe are passed over.

use super::Allocator;
use crate::ChunkError;
use crate::free::Kind;
use crate::rows::{LentKey, all_lent, all_maps, read_row};
use penstock_array::ArrayError;
use penstock_base::HashSet;
use penstock_base::rank::scoped;
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
        let is_over = || self.closed.get() || (self.is_compared.get() && self.is_swept());
        while !is_over() {
            let done = match self.compare().await {
                Ok(()) => self.sweep().await,
                failed => failed,
            };
            match done {
                Ok(()) | Err(ChunkError::Array(ArrayError::Closed)) => return,
                Err(error) => {
                    tracing::warn!(%error, "free stripes could not be found; it will be tried again");
                    self.env.sleep(super::REST).await;
                }
            }
        }
    }

    /// Sweeps the loans again: they could not be read before.
    pub(crate) fn sweep_loans(self: &Rc<Self>) {
        let groups = self.space().groups();
        self.loan_sweeps.set(self.loan_sweeps.get() + 1);
        self.swept.set(self.swept.get().min(groups.stripes_of(0..groups.own()).end));
        self.env.spawn("target sweep", Box::pin(scoped(self.clone().run_sweep())));
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
        let (swept, sweeps) = (self.swept.get(), self.loan_sweeps.get());
        let (bare, mut next) = self.find_bare(swept).await?;
        let owned = self.find_owned(&bare).await?;
        let group_of = |stripe| self.space().groups().of_stripe(stripe);
        owned.into_iter().map(group_of).for_each(|group| self.suspect(group));
        let idle: Vec<u64> =
            bare.into_iter().filter(|stripe| !self.space().is_suspect(group_of(*stripe))).collect();
        if self.idle.borrow_mut().add(idle) {
            self.has_idle.notify_one();
        }
        assert!(next > swept, "it goes on from {swept}");
        if self.loan_sweeps.get() != sweeps {
            // It has not seen the loans, which can be read since.
            let groups = self.space().groups();
            next = next.min(groups.stripes_of(0..groups.own()).end);
        }
        self.swept.set(next);
        self.space_mut().clear_unusable();
        Ok(())
    }

    /// Files own blocks in a group that are marked as free.
    pub(super) fn suspect(&self, group: u64) {
        if !self.space().is_suspect(group) {
            tracing::error!(
                group,
                "blocks of files are marked as free: nothing is allocated beside them until `penstock fs check --repair`"
            );
            self.space_mut().suspect(group);
        }
    }

    /// Written stripes from `from` on in which no block is allocated and which are not idle, and the stripe
    /// at which the next look begins. An error comes only if it found out nothing.
    async fn find_bare(&self, from: u64) -> Result<(Vec<u64>, u64), ChunkError> {
        let (mut bare, mut next) = (Vec::new(), from);
        match self.find_bare_from(&mut next, &mut bare).await {
            Err(error) if next == from => Err(error),
            _ => Ok((bare, next)),
        }
    }

    /// The same, `from` and `bare` as far as it got.
    async fn find_bare_from(&self, from: &mut u64, bare: &mut Vec<u64>) -> Result<(), ChunkError> {
        let groups = self.space().groups();
        let (own, all) = (groups.blocks() / groups.stripe_blocks(), groups.stripes_of(0..groups.count()).end);
        while bare.len() < BARE_AT_A_TIME {
            // There may be a gap behind the volume.
            let least = if *from < own { 0 } else { groups.own() };
            let group = match *from < all {
                true => {
                    self.space().next_group(Kind::Empty, groups.of_stripe(*from).max(least)..groups.count())
                }
                false => None,
            };
            let Some(group) = group else {
                *from = u64::MAX;
                break;
            };
            let first = (*from).max(groups.stripes(group).start);
            // A group without a used block is mostly unwritten too, and so are those that follow.
            let end = match self.space().counts(group).used {
                0 if group < groups.own() => own,
                _ => groups.stripes(group).end,
            };
            let written = self.volumes.written_in(first..end, STRIPES_AT_A_TIME).await?;
            let is_all = written.len() < STRIPES_AT_A_TIME;
            for stripe in &written {
                if self.space().counts(groups.of_stripe(*stripe)).empty > 0 && self.is_bare(*stripe).await? {
                    bare.push(*stripe);
                }
                *from = stripe + 1;
            }
            if is_all {
                *from = end;
            }
        }
        assert!(bare.is_sorted(), "they are listed in order");
        Ok(())
    }

    /// True if a stripe is written, no block of it is allocated, and it is not idle. It stays so until the
    /// sweep has come to it, since it is neither allocated nor discarded before.
    pub(crate) async fn is_bare(&self, stripe: u64) -> Result<bool, ChunkError> {
        let is_written = self.is_unwritten(stripe).await? == Some(false);
        Ok(is_written && self.space().is_empty(stripe) && !self.is_idle(stripe))
    }

    /// True if a stripe is bare although the sweep has come to it. Those of a lender that is away or
    /// suspended are found when it is back.
    pub(crate) async fn is_left_behind(&self, stripe: u64) -> Result<bool, ChunkError> {
        Ok(self.is_bare(stripe).await? && stripe < self.swept.get() && !self.space().is_away(stripe))
    }

    /// Those of these stripes in which a file owns blocks, or may own some.
    async fn find_owned(&self, bare: &[u64]) -> Result<BTreeSet<u64>, ChunkError> {
        let stripes: HashSet<u64> = bare.iter().copied().collect();
        let mut owned = BTreeSet::new();
        if bare.is_empty() {
            return Ok(owned);
        }
        let per_stripe = self.volumes.stripe_blocks();
        let is_bad = |key: &[u8], value: &[u8]| match LentKey::decode(key) {
            Ok(_) => self.runs_of(key, value).is_empty(),
            Err(_) => read_row(key, value).is_err(),
        };
        let mut see = |key: &[u8], value: &[u8]| {
            if is_bad(key, value) {
                owned.extend(bare);
            }
            for (first, count) in self.runs_of(key, value) {
                let of_part = first / per_stripe..(first + count).div_ceil(per_stripe);
                owned.extend(of_part.filter(|stripe| stripes.contains(stripe)));
            }
            Ok::<_, ChunkError>(())
        };
        for_each(&*self.kv, all_maps(), &mut see).await?;
        for_each(&*self.kv, all_lent(), &mut see).await?;
        assert!(owned.iter().all(|stripe| stripes.contains(stripe)), "only these were looked for");
        Ok(owned)
    }
}
