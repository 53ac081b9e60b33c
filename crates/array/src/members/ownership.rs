//! Ownership of an array: the claim, and the seam to coordination.
//!
//! A claim is recorded by compare-and-swap before anything that rests on it. A stale owner cannot record, so
//! it cannot acknowledge a write that misses a member. One node keeps claims in a file of its folder; several
//! nodes will keep them in etcd behind the same trait.

use crate::format::descriptor::{FIRST_GENERATION, MemberEntry};
use crate::place::{Position, Positions};
use penstock_base::{ArrayId, Epoch, LocalBoxFuture};
use penstock_raid::MAX_STRIPS;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The record of an array in coordination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// The owner's epoch.
    pub epoch: Epoch,
    /// Raised with every change.
    pub revision: u64,
    /// Members recorded as stale.
    pub stale: Positions,
    /// Drives with contents of the past that openings use as they are.
    pub accepted: AcceptedLoss,
    /// By place, the generation of the drive that counts.
    pub generations: Generations,
    /// Epoch of the newest opening whose root is durable on every carrier.
    pub root_epoch: Epoch,
}

/// By place, the generation of the drive that counts: it is raised with each replacement. A drive that was
/// replaced names the same place in its own label, and has nothing that was written since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Generations([u64; MAX_STRIPS]);

impl Default for Generations {
    fn default() -> Self {
        Self([FIRST_GENERATION; MAX_STRIPS])
    }
}

impl Generations {
    /// The generations of places whose first drive was replaced. None if there is no such place, or no drive
    /// was replaced there.
    pub fn new(replaced: impl IntoIterator<Item = (usize, u64)>) -> Option<Self> {
        let mut generations = Self::default();
        for (member, generation) in replaced {
            *generations.0.get_mut(member).filter(|_| generation > FIRST_GENERATION)? = generation;
        }
        Some(generations)
    }

    /// Places whose first drive was replaced, with their generations.
    pub fn replaced(&self) -> impl Iterator<Item = (Position, u64)> {
        let replaced =
            self.0.iter().copied().enumerate().filter(|(_, generation)| *generation > FIRST_GENERATION);
        replaced.map(|(at, generation)| (Position::new(at), generation))
    }

    pub(crate) fn of(members: &[MemberEntry]) -> Self {
        let mut generations = Self::default();
        for (place, member) in generations.0.iter_mut().zip(members) {
            *place = member.generation.max(FIRST_GENERATION);
        }
        generations
    }
}

/// Drives from the past that openings used as they are, by an administrator's word. What an opening that is
/// cut leaves in their labels says nothing of how old they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AcceptedLoss {
    /// By member, the epochs of labels that may be on a drive with contents of the past.
    members: [Since; MAX_STRIPS],
    /// Members that this opening uses so. They count from its root on.
    used: Positions,
}

/// The openings that used a drive with contents of the past as it was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Since {
    /// The first of them; 0 where there is none.
    pub first: Epoch,
    /// The first one after it that found the right drive; 0 where none did.
    pub until: Epoch,
}

impl Default for AcceptedLoss {
    fn default() -> Self {
        Self { members: [Since::default(); MAX_STRIPS], used: Positions::NONE }
    }
}

impl AcceptedLoss {
    /// Members for which such drives were used, and those that this opening uses. None if there is no such
    /// member, or a first epoch is 0.
    pub fn new(members: impl IntoIterator<Item = (usize, Since)>, used: Positions) -> Option<Self> {
        let mut loss = Self { used, ..Self::default() };
        for (member, since) in members {
            *loss.members.get_mut(member).filter(|_| since.first > Epoch(0))? = since;
        }
        Some(loss)
    }

    /// Members for which such drives were used, with the openings.
    pub fn members(&self) -> impl Iterator<Item = (Position, Since)> {
        let used = self.members.iter().copied().enumerate().filter(|(_, since)| since.first > Epoch(0));
        used.map(|(at, since)| (Position::new(at), since))
    }

    /// Members for which this opening uses such a drive.
    pub fn used(&self) -> Positions {
        self.used
    }

    /// A root of `epoch` is durable: the drives that its opening used count, and so do the right drives that
    /// it found.
    pub(crate) fn has_root(&mut self, epoch: Epoch) {
        for (at, since) in self.members.iter_mut().enumerate() {
            let is_found = since.until > Epoch(0) && since.until <= epoch;
            if is_found || self.used.contains(Position::new(at)) {
                *since = Since::default();
            }
        }
        self.used = Positions::NONE;
    }

    /// True if a label of `epoch` may be on a drive with contents of the past.
    pub(crate) fn may_be_old(&self, member: Position, epoch: Epoch) -> bool {
        let Since { first, until } = self.members[member.index()];
        first > Epoch(0) && epoch >= first && (until == Epoch(0) || epoch < until)
    }

    /// An opening of `epoch` finds a member's right drive.
    pub(crate) fn is_found(&mut self, member: Position, epoch: Epoch) {
        let since = &mut self.members[member.index()];
        if since.first > Epoch(0) && since.until == Epoch(0) {
            since.until = epoch;
        }
    }

    /// A member starts from nothing.
    pub(crate) fn made_again(&mut self, member: Position) {
        self.members[member.index()] = Since::default();
        self.used = self.used.without(Positions::one(member));
    }

    /// An opening of `epoch` uses these members as they are, and no others.
    pub(crate) fn uses(&mut self, members: Positions, epoch: Epoch) {
        self.used = members;
        for at in members.iter() {
            let since = &mut self.members[at.index()];
            let first = if since.first > Epoch(0) { since.first } else { epoch };
            *since = Since { first, until: Epoch(0) };
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
