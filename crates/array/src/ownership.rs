//! Who may write to an array: the seam to coordination.
//!
//! A claim is recorded by compare-and-swap before anything that rests on it: a stale owner cannot record, so it
//! cannot acknowledge a write that misses a member. One node keeps claims in a file of its folder; several nodes
//! will keep them in etcd behind the same trait.

use penstock_base::{ArrayId, Epoch, LocalBoxFuture};
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
}

/// Members whose drives are from the past and are used as they are, by an administrator's word. As long as no root is of `epoch` or
/// later that opening is not over, and a superblock of theirs of `epoch` or later says nothing of how old the drive is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AcceptedLoss {
    /// That of the opening with the word.
    pub epoch: Epoch,
    /// As a bit mask.
    pub members: u64,
}

/// A claim could not be recorded.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ClaimError {
    /// Somebody else changed it.
    #[error("the claim on record is of epoch {}, revision {}", .0.epoch, .0.revision)]
    Changed(Claim),
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
#[derive(Default)]
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
                return Err(ClaimError::Changed(found));
            }
            claims.insert(array, next);
            Ok(())
        })
    }
}
