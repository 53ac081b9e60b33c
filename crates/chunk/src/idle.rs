//! Idle stripes, pure: empty ones that are not discarded on the drives yet.
//!
//! A stripe that lost its last block rests before it is discarded, because programs that delete often write
//! again. Some stripes here may be in use again: a caller that takes one must check.

use penstock_array::Discard;
use std::collections::BTreeSet;
use std::ops::Range;

/// Empty stripes, by the time that they have rested.
#[derive(Default)]
pub(crate) struct Idle {
    /// Written in the table; added since the last rest began.
    young: BTreeSet<u64>,
    /// Unwritten in the table; added since the last rest began.
    reusable: BTreeSet<u64>,
    /// Added before the last rest began, of both kinds.
    aged: BTreeSet<u64>,
}

impl Idle {
    pub(crate) fn contains(&self, stripe: u64) -> bool {
        [&self.young, &self.reusable, &self.aged].iter().any(|set| set.contains(&stripe))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.young.is_empty() && self.reusable.is_empty() && self.aged.is_empty()
    }

    /// Ends a rest: everything may now be discarded on the drives.
    pub(crate) fn age(&mut self) {
        self.aged.append(&mut self.young);
        self.aged.append(&mut self.reusable);
    }

    /// Adds written stripes that are empty now. Returns false if there is no young stripe then.
    pub(crate) fn add(&mut self, stripes: impl IntoIterator<Item = u64>) -> bool {
        self.young.extend(stripes);
        !self.young.is_empty()
    }

    /// Adds stripes that are unwritten in the table.
    pub(crate) fn add_reusable(&mut self, stripes: std::ops::Range<u64>) {
        self.reusable.extend(stripes);
    }

    /// Adds stripes whose discard failed.
    pub(crate) fn put_back(&mut self, stripes: std::ops::Range<u64>) {
        self.aged.extend(stripes);
    }

    /// The number of stripes of a range that are unwritten in the table and young, and for which `is_ready`.
    pub(crate) fn reusable_count(&self, within: Range<u64>, is_ready: impl Fn(u64) -> bool) -> u64 {
        self.reusable.range(within).filter(|stripe| is_ready(**stripe)).count() as u64
    }

    /// Takes one of them.
    pub(crate) fn take_reusable(
        &mut self,
        within: Range<u64>,
        is_ready: impl Fn(u64) -> bool,
    ) -> Option<u64> {
        let last = self.reusable.range(within).rev().find(|stripe| is_ready(**stripe)).copied()?;
        self.reusable.take(&last)
    }

    /// Forgets the stripes of a range, which somebody else has.
    pub(crate) fn forget(&mut self, within: Range<u64>) {
        for set in [&mut self.young, &mut self.reusable, &mut self.aged] {
            set.retain(|stripe| !within.contains(stripe));
        }
    }

    /// Returns the set that the next batch of a discard is taken from.
    pub(crate) fn source(&mut self, how: Discard) -> &mut BTreeSet<u64> {
        match how {
            Discard::InTable if !self.young.is_empty() => &mut self.young,
            _ => &mut self.aged,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stripes_rest_before_they_are_discarded_on_the_drives() {
        let mut idle = Idle::default();
        idle.young.extend([1, 2]);
        assert!(idle.source(Discard::OnDrives).is_empty() && idle.contains(2));
        assert_eq!(idle.source(Discard::InTable).pop_first(), Some(1));
        idle.reusable.insert(1);
        idle.age();
        assert_eq!(idle.source(Discard::OnDrives).iter().copied().collect::<Vec<_>>(), [1, 2]);
        idle.young.insert(3);
        assert_eq!(idle.source(Discard::InTable).first(), Some(&3), "what is warm goes first");
    }

    #[test]
    fn a_stripe_is_idle_until_it_is_taken_from_its_last_set() {
        let mut idle = Idle::default();
        assert!(idle.is_empty() && idle.take_reusable(0..20, |_| true).is_none());
        assert!(!idle.add([]), "there is nothing to wait for");
        assert!(idle.add([4, 2]) && idle.add([]), "young stripes are still there");
        idle.add_reusable(8..10);
        assert_eq!(idle.reusable_count(0..20, |_| true), 2);
        for (stripe, expected) in [(2, true), (4, true), (3, false), (8, true), (9, true), (10, false)] {
            assert_eq!(idle.contains(stripe), expected, "stripe {stripe}");
        }
        assert_eq!(
            [
                idle.take_reusable(0..20, |_| true),
                idle.take_reusable(0..20, |_| true),
                idle.take_reusable(0..20, |_| true)
            ],
            [Some(9), Some(8), None]
        );
        idle.put_back(20..22);
        assert_eq!(idle.source(Discard::OnDrives).first(), Some(&20), "a failed discard is tried again");
        assert_eq!(idle.source(Discard::InTable).first(), Some(&2));
        idle.age();
        let aged: Vec<u64> = idle.source(Discard::InTable).iter().copied().collect();
        assert_eq!(aged, [2, 4, 20, 21], "without a young stripe, those that rested serve writes too");
        for stripe in aged {
            assert!(!idle.is_empty() && idle.contains(stripe));
            idle.source(Discard::OnDrives).remove(&stripe);
        }
        assert!(idle.is_empty());
    }
}
