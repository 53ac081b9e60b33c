//! Blocks of a stripe that may have changed since a moment, told by the versions of its strips.
//!
//! Invariant: a strip with data that was written since then has a version above those given before, and so
//! have all valid parity strips of its stripe. A strip that was only made again has a newer version too; then
//! the parity tells that its contents are old. Nobody can read a stale strip of a stripe that lacks too many:
//! it counts as old, since reads of it fail for whoever has it.

use super::Stripes;
use crate::place::{Position, Positions};
use penstock_base::{Stripe, Version};
use std::ops::Range;

/// The blocks of a stripe with contents, by age. Runs of each list are in order, and no block is in both.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockChanges {
    /// Not changed since the moment.
    pub old: Vec<Range<u32>>,
    /// These may have changed.
    pub new: Vec<Range<u32>>,
}

impl BlockChanges {
    fn add(&mut self, block: u32, is_old: bool) {
        let runs = if is_old { &mut self.old } else { &mut self.new };
        match runs.last_mut() {
            Some(last) if last.end == block => last.end += 1,
            _ => runs.push(block..block + 1),
        }
    }
}

/// The data strips that were not changed since versions above `version` were given.
fn old_strips(
    data: impl Iterator<Item = Position>,
    parity: impl Iterator<Item = Position>,
    stale: Positions,
    version: Version,
    version_of: impl Fn(Position) -> Version,
) -> Positions {
    let parity: Vec<Position> = parity.collect();
    let is_old = |position: &Position| !stale.contains(*position) && version_of(*position).0 <= version.0;
    // A change of any data strip changes all valid parity strips.
    let all_are = parity.iter().any(is_old);
    let is_lost = |position: &Position| stale.len() > parity.len() && stale.contains(*position);
    data.filter(|position| all_are || is_old(position) || is_lost(position)).collect()
}

impl Stripes {
    /// The blocks of a stripe, whose page is in memory, by their age.
    pub(crate) fn changes_since(&self, stripe: Stripe, version: Version) -> BlockChanges {
        let (geo, overlay) = (&self.context.geo, self.overlay());
        let is_written = !self.is_unwritten(stripe);
        let old = match is_written {
            true => {
                old_strips(geo.data_strips(), geo.parity_strips(), self.stale(stripe), version, |position| {
                    self.version(stripe, position)
                })
            }
            false => Positions::default(),
        };
        let mut changes = BlockChanges::default();
        for block in 0..geo.stripe_blocks() {
            if overlay.get(stripe, block).is_some() {
                // It has no version before it is in its strip.
                changes.add(block, false);
            } else if is_written {
                changes.add(block, old.contains(geo.locate(block).0));
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The old ones of two data strips in a stripe with two parity strips: strips are stale or have these
    /// versions, and versions up to 10 are old.
    fn old(versions: [u64; 4], stale: &[usize]) -> Vec<usize> {
        let position = Position::new;
        let stale = stale.iter().map(|at| position(*at)).collect();
        let version_of = |position: Position| Version(versions[position.index()]);
        let found = old_strips((0..2).map(position), (2..4).map(position), stale, Version(10), version_of);
        found.iter().map(Position::index).collect()
    }

    #[test]
    fn a_strip_is_old_if_it_or_a_valid_parity_strip_is() {
        for (versions, stale, expected) in [
            ([5, 5, 5, 5], &[][..], &[0, 1][..]),
            ([5, 10, 11, 11], &[], &[0, 1]),
            ([5, 12, 12, 12], &[], &[0]),
            ([12, 12, 12, 12], &[], &[]),
            // Made again: the parity did not change.
            ([12, 5, 5, 5], &[], &[0, 1]),
            ([12, 13, 14, 5], &[], &[0, 1]),
            // A stale strip has missed a change and keeps its version.
            ([5, 5, 12, 12], &[0], &[1]),
            ([5, 5, 5, 12], &[2], &[0, 1]),
            ([12, 5, 5, 12], &[2], &[1]),
            ([5, 12, 5, 5], &[2, 3], &[0]),
            ([5, 12, 5, 5], &[1, 2, 3], &[0, 1]),
            ([12, 12, 5, 5], &[1, 2, 3], &[1]),
        ] {
            assert_eq!(old(versions, stale), expected, "{versions:?}, {stale:?} are stale");
        }
    }

    #[test]
    fn adjacent_blocks_of_one_age_are_one_run() {
        let mut changes = BlockChanges::default();
        for (block, is_old) in [(0, true), (1, true), (2, false), (4, false), (5, true)] {
            changes.add(block, is_old);
        }
        assert_eq!((changes.old, changes.new), (vec![0..2, 5..6], vec![2..3, 4..5]));
    }
}
