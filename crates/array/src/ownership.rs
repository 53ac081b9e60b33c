//! Who may write to an array: the seam to coordination.
//!
//! A claim is recorded by compare-and-swap before anything that rests on it: a stale owner cannot record, so it
//! cannot acknowledge a write that misses a member. One node keeps claims in a file of its folder; several nodes
//! will keep them in etcd behind the same trait.

use crate::format::descriptor::{FIRST_GENERATION, MemberEntry};
use penstock_base::{ArrayId, Epoch, LocalBoxFuture};
use penstock_raid::MAX_STRIPS;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// What coordination knows of an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The owner's epoch.
    pub epoch: Epoch,
    /// Raised with every change.
    pub revision: u64,
    /// Members recorded as stale, as a bit mask.
    pub stale: u64,
    /// Drives from the past that openings use as they are.
    pub accepted: AcceptedLoss,
    /// Of which drive in each place the others speak.
    pub generations: Generations,
    /// The newest start whose root is durable on every carrier.
    pub root_epoch: Epoch,
}

/// How often the drive in each place was replaced. A place that is not stale is so with the drive of this generation: the one
/// that it replaced has the same place in its own superblock, and nothing of what was written since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generations([u64; MAX_STRIPS]);

impl Default for Generations {
    fn default() -> Self {
        Self([FIRST_GENERATION; MAX_STRIPS])
    }
}

impl Generations {
    /// Those of places whose first drive was replaced. None where there is no such place, or no drive was replaced there.
    pub fn new(replaced: impl IntoIterator<Item = (usize, u64)>) -> Option<Self> {
        let mut generations = Self::default();
        for (member, generation) in replaced {
            *generations.0.get_mut(member).filter(|_| generation > FIRST_GENERATION)? = generation;
        }
        Some(generations)
    }

    /// Places whose first drive was replaced.
    pub fn replaced(&self) -> impl Iterator<Item = (usize, u64)> {
        self.0.iter().copied().enumerate().filter(|(_, generation)| *generation > FIRST_GENERATION)
    }

    pub(crate) fn of(members: &[MemberEntry]) -> Self {
        let mut generations = Self::default();
        for (place, member) in generations.0.iter_mut().zip(members) {
            *place = member.generation.max(FIRST_GENERATION);
        }
        generations
    }
}

/// Drives from the past that openings used as they are, by an administrator's word. What an opening that is cut leaves in their
/// superblocks says nothing of how old they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedLoss {
    /// By member the epochs of superblocks that may be on a drive from the past.
    members: [Since; MAX_STRIPS],
    /// Members that this opening uses so, as a bit mask. They count from its root on.
    used: u64,
}

/// Openings that used a drive from the past as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Since {
    /// The first of them; 0 where there is none.
    pub first: Epoch,
    /// The first one after it that found the right drive; 0 where none did.
    pub until: Epoch,
}

impl Default for AcceptedLoss {
    fn default() -> Self {
        Self { members: [Since::default(); MAX_STRIPS], used: 0 }
    }
}

impl AcceptedLoss {
    /// Members for which drives from the past were used, and those that this opening uses. None where there is no such member,
    /// or the first epoch is 0.
    pub fn new(members: impl IntoIterator<Item = (usize, Since)>, used: u64) -> Option<Self> {
        let mut loss = Self { used, ..Self::default() };
        for (member, since) in members {
            *loss.members.get_mut(member).filter(|_| since.first > Epoch(0))? = since;
        }
        Some(loss)
    }

    /// The members.
    pub fn members(&self) -> impl Iterator<Item = (usize, Since)> {
        self.members.iter().copied().enumerate().filter(|(_, since)| since.first > Epoch(0))
    }

    /// Those that the opening uses, as a bit mask.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// There is a root of `epoch`: what its opening used counts, and so do the right drives that it found.
    pub(crate) fn has_root(&mut self, epoch: Epoch) {
        for (at, since) in self.members.iter_mut().enumerate() {
            let is_found = since.until > Epoch(0) && since.until <= epoch;
            if is_found || self.used & 1 << at != 0 {
                *since = Since::default();
            }
        }
        self.used = 0;
    }

    /// True if a superblock of `epoch` may be on a drive from the past.
    pub(crate) fn may_be_old(&self, member: usize, epoch: Epoch) -> bool {
        let Since { first, until } = self.members[member];
        first > Epoch(0) && epoch >= first && (until == Epoch(0) || epoch < until)
    }

    /// An opening of `epoch` finds a member's right drive.
    pub(crate) fn is_found(&mut self, member: usize, epoch: Epoch) {
        let since = &mut self.members[member];
        if since.first > Epoch(0) && since.until == Epoch(0) {
            since.until = epoch;
        }
    }

    /// A member is made again.
    pub(crate) fn is_made_again(&mut self, member: usize) {
        self.members[member] = Since::default();
        self.used &= !(1 << member);
    }

    /// An opening of `epoch` uses these members as they are, and no others.
    pub(crate) fn uses(&mut self, members: u64, epoch: Epoch) {
        self.used = members;
        for (at, since) in self.members.iter_mut().enumerate() {
            if members & 1 << at != 0 {
                let first = if since.first > Epoch(0) { since.first } else { epoch };
                *since = Since { first, until: Epoch(0) };
            }
        }
    }
}

/// A claim could not be recorded.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClaimError {
    /// Somebody else changed it.
    #[error("the claim on record is of epoch {}, revision {}", .0.epoch, .0.revision)]
    Changed(Box<Claim>),
    /// Coordination does not answer or cannot store.
    #[error("{0}")]
    Unavailable(String),
}

/// Coordination, as far as arrays need it.
pub trait Ownership {
    /// The claim on record; the default (epoch 0) when there is none.
    fn current(&self, array: ArrayId) -> LocalBoxFuture<'_, Result<Claim, ClaimError>>;

    /// Replaces `expected` by `next`, durable when it returns.
    fn swap(
        &self,
        array: ArrayId,
        expected: Claim,
        next: Claim,
    ) -> LocalBoxFuture<'_, Result<(), ClaimError>>;
}

/// Claims in memory that outlive a simulated machine.
#[derive(Clone, Default)]
pub struct MemoryOwnership {
    claims: RefCell<BTreeMap<ArrayId, Claim>>,
}

impl Ownership for MemoryOwnership {
    fn current(&self, array: ArrayId) -> LocalBoxFuture<'_, Result<Claim, ClaimError>> {
        let claim = self.claims.borrow().get(&array).copied().unwrap_or_default();
        Box::pin(async move { Ok(claim) })
    }

    fn swap(
        &self,
        array: ArrayId,
        expected: Claim,
        next: Claim,
    ) -> LocalBoxFuture<'_, Result<(), ClaimError>> {
        Box::pin(async move {
            let mut claims = self.claims.borrow_mut();
            let found = claims.get(&array).copied().unwrap_or_default();
            if found != expected {
                return Err(ClaimError::Changed(Box::new(found)));
            }
            claims.insert(array, next);
            Ok(())
        })
    }
}
