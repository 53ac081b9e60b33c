//! Ownership of an array: the claim, and the seam to coordination.
//!
//! A claim is recorded by compare-and-swap before anything that rests on it. A stale owner cannot record, so
//! it cannot acknowledge a write that misses a member. One node keeps claims in a file of its folder; several
//! nodes will keep them in etcd behind the same trait.

use crate::format::descriptor::{FIRST_GENERATION, MemberEntry};
use crate::place::{MemberNo, MemberSet};
use penstock_base::{ArrayId, Epoch, LocalBoxFuture};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The record of an array in coordination.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The owner's epoch.
    pub epoch: Epoch,
    /// Raised with every change.
    pub revision: u64,
    /// Members recorded as stale.
    pub stale: MemberSet,
    /// Drives with contents of the past that openings use as they are.
    pub accepted: AcceptedLoss,
    /// By place, the generation of the drive that counts.
    pub generations: Generations,
    /// Epoch of the newest opening whose root is durable on every carrier.
    pub root_epoch: Epoch,
}

/// By place, the generation of the drive that counts: it is raised with each replacement. A drive that was
/// replaced names the same place in its own label, and has nothing that was written since.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Generations(BTreeMap<MemberNo, u64>);

impl Generations {
    /// The generations of places whose first drive was replaced. None if there is no such place, or no drive
    /// was replaced there.
    pub fn new(replaced: impl IntoIterator<Item = (u16, u64)>) -> Option<Self> {
        let place = |(member, generation): (u16, u64)| {
            Some((MemberNo::of_number(member)?, Some(generation).filter(|found| *found > FIRST_GENERATION)?))
        };
        replaced.into_iter().map(place).collect::<Option<_>>().map(Self)
    }

    /// Places whose first drive was replaced, with their generations.
    pub fn replaced(&self) -> impl Iterator<Item = (MemberNo, u64)> {
        self.0.iter().map(|(member, generation)| (*member, *generation))
    }

    pub(crate) fn of(members: &[MemberEntry]) -> Self {
        let generations =
            members.iter().enumerate().map(|(at, member)| (MemberNo::new(at), member.generation));
        Self(generations.filter(|(_, generation)| *generation > FIRST_GENERATION).collect())
    }
}

/// Drives from the past that openings used as they are, by an administrator's word. What an opening that is
/// cut leaves in their labels says nothing of how old they are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AcceptedLoss {
    /// By member, the epochs of labels that may be on a drive with contents of the past.
    members: BTreeMap<MemberNo, Since>,
    /// Members that this opening uses so. They count from its root on.
    used: MemberSet,
}

/// The openings that used a drive with contents of the past as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Since {
    /// The first of them.
    pub first: Epoch,
    /// The first one after it that found the right drive; 0 where none did.
    pub until: Epoch,
}

impl AcceptedLoss {
    /// Members for which such drives were used, and those that this opening uses. None if there is no such
    /// member, or a first epoch is 0.
    pub fn new(members: impl IntoIterator<Item = (u16, Since)>, used: MemberSet) -> Option<Self> {
        let entry = |(member, since): (u16, Since)| {
            Some((MemberNo::of_number(member)?, Some(since).filter(|since| since.first > Epoch(0))?))
        };
        let members = members.into_iter().map(entry).collect::<Option<_>>()?;
        Some(Self { members, used })
    }

    /// Members for which such drives were used, with the openings.
    pub fn members(&self) -> impl Iterator<Item = (MemberNo, Since)> {
        self.members.iter().map(|(member, since)| (*member, *since))
    }

    /// Members for which this opening uses such a drive.
    pub fn used(&self) -> MemberSet {
        self.used
    }

    /// A root of `epoch` is durable: the drives that its opening used count, and so do the right drives that
    /// it found.
    pub(crate) fn has_root(&mut self, epoch: Epoch) {
        let used = std::mem::take(&mut self.used);
        self.members.retain(|member, since| {
            let is_found = since.until > Epoch(0) && since.until <= epoch;
            !is_found && !used.contains(*member)
        });
    }

    /// True if a label of `epoch` may be on a drive with contents of the past.
    pub(crate) fn may_be_old(&self, member: MemberNo, epoch: Epoch) -> bool {
        self.members
            .get(&member)
            .is_some_and(|Since { first, until }| epoch >= *first && (*until == Epoch(0) || epoch < *until))
    }

    /// An opening of `epoch` finds a member's right drive.
    pub(crate) fn is_found(&mut self, member: MemberNo, epoch: Epoch) {
        if let Some(since) = self.members.get_mut(&member)
            && since.until == Epoch(0)
        {
            since.until = epoch;
        }
    }

    /// A member starts from nothing.
    pub(crate) fn made_again(&mut self, member: MemberNo) {
        self.members.remove(&member);
        self.used = self.used.without(MemberSet::one(member));
    }

    /// An opening of `epoch` uses these members as they are, and no others.
    pub(crate) fn uses(&mut self, members: MemberSet, epoch: Epoch) {
        self.used = members;
        for member in members.iter() {
            let since = self.members.entry(member).or_insert(Since { first: epoch, until: Epoch(0) });
            since.until = Epoch(0);
        }
    }
}

/// The way of an opening that finds drives away, or with contents of the past, although the array cannot miss
/// them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// Nothing is changed, and an error names the drives: with them nothing is lost.
    Refuse,
    /// An administrator accepts the loss: the array is opened with what there is. Data that only those drives
    /// have is lost.
    Accept,
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
        let claim = self.claims.borrow().get(&array).cloned().unwrap_or_default();
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
            let found = claims.get(&array).cloned().unwrap_or_default();
            if found != expected {
                return Err(ClaimError::Changed(Box::new(found)));
            }
            claims.insert(array, next);
            Ok(())
        })
    }
}
