//! The gate: everything that changes rows holds it shared, and a check or repair exclusively, so that it sees
//! one consistent state.
//!
//! Taken after the turn at the name space, and before the locks of files ([`crate::rank`]).
//!
//! [`Quiet`] is the exclusive side. Methods that are legal only while nothing else changes rows ask for one.

use crate::rank::{Held, Rank, check};
use tokio::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

const RANK: Rank = Rank::new(30, "gate");

/// A gate shared by all parts of a stack that change rows.
#[derive(Default)]
pub struct Gate(RwLock<()>);

/// The right to change rows. Many hold it at the same time.
pub struct Changing<'a> {
    _shared: RwLockReadGuard<'a, ()>,
    _held: Held,
}

/// Proof that nothing else changes rows while it lives.
pub struct Quiet<'a> {
    gate: &'a Gate,
    _exclusive: RwLockWriteGuard<'a, ()>,
    _held: Held,
}

impl Gate {
    /// Waits until no check or repair runs.
    pub async fn change(&self) -> Changing<'_> {
        check(RANK);
        let shared = self.0.read().await;
        Changing { _shared: shared, _held: Held::new(RANK, 0) }
    }

    /// Waits until nothing changes rows, and lets nothing begin.
    pub async fn quiesce(&self) -> Quiet<'_> {
        check(RANK);
        let exclusive = self.0.write().await;
        Quiet { gate: self, _exclusive: exclusive, _held: Held::new(RANK, 0) }
    }
}

impl Quiet<'_> {
    /// True if it quiesces this gate and not another one.
    pub fn is_of(&self, gate: &Gate) -> bool {
        std::ptr::eq(self.gate, gate)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_check_waits_for_changes_and_keeps_others_out() {
        let (gate, other) = (Gate::default(), Gate::default());
        let changing = gate.change().now_or_never().unwrap();
        assert!(gate.change().now_or_never().is_some(), "changes run beside each other");
        assert!(gate.quiesce().now_or_never().is_none());
        drop(changing);
        let quiet = gate.quiesce().now_or_never().unwrap();
        assert!(gate.change().now_or_never().is_none());
        assert!(quiet.is_of(&gate) && !quiet.is_of(&other));
    }
}
