//! The check of log entries against the geometry: bytes from a drive are never asserted on.

use crate::format::record::{Entry, StripPatch};
use crate::geometry::Geometry;
use crate::layout::Layout;
use crate::moves::Moves;
use crate::place::Positions;

/// True if the entry names only stripes, strips and blocks that an array of this geometry has, and leaves its
/// table in a state that it can have.
pub(crate) fn is_sound(entry: &Entry, geo: &Geometry, layout: &Layout) -> bool {
    let contained = |blocks: &[(u32, u64)]| blocks.iter().all(|(block, _)| *block < geo.stripe_blocks());
    let within = |sets: &[Positions]| sets.iter().all(|set| set.without(geo.all_strips()).is_empty());
    let among = |moves: &Moves, strips: Positions| {
        let has_place = moves.iter().all(|(_, spare)| spare < layout.spares());
        has_place && moves.moved().without(strips).is_empty()
    };
    match entry {
        Entry::Data { stripe, block, crcs, .. } => {
            let end = (*block as usize).saturating_add(crcs.len());
            stripe.0 < geo.stripes && end <= geo.stripe_blocks() as usize
        }
        Entry::Fresh { stripe, version, stale, moves, contained: blocks, .. } => {
            let strips = within(&[*stale]) && among(moves, geo.all_strips());
            stripe.0 < geo.stripes && version.0 != 0 && strips && contained(blocks)
        }
        Entry::Destage { stripe, stale, contained: blocks, patches } => {
            let patch = |patch: &StripPatch| {
                patch.position.index() < geo.strips()
                    && patch.version.0 != 0
                    && patch.crcs.len() == geo.strip_blocks as usize
            };
            // Without a patch it could mark strips of a stripe as stale that holds nothing.
            let sound = stripe.0 < geo.stripes && within(&[*stale]) && !patches.is_empty();
            sound && contained(blocks) && patches.iter().all(patch)
        }
        Entry::Discard { stripe, count, .. } => {
            stripe.0.checked_add(*count).is_some_and(|end| end <= geo.stripes)
        }
        Entry::Versions { .. } => true,
        Entry::Strips { stripe, set, clear, version, moves } => {
            let strips = within(&[*set, *clear]) && among(moves, *clear);
            // Version 0 would make a stripe with stale strips unwritten.
            stripe.0 < geo.stripes && strips && (clear.is_empty() || version.0 != 0)
        }
        Entry::MemberReset { member } => member.index() < geo.members,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::CreateSpec;
    use crate::place::{MemberNo, Position};
    use penstock_base::{Stripe, Version};
    use penstock_layout::Shape;

    /// Regression: such entries left a stripe with stale strips and nothing written, which the table asserts
    /// on.
    #[test]
    fn entries_that_leave_an_impossible_stripe_are_not_sound() {
        let shape = Shape { members: 5, strips: 4, redundancy: 1, spares: 1, domains: 5 };
        let layout = Layout::declustered(shape, &[vec![0, 1, 2, 3, 4]]).unwrap();
        let spec = CreateSpec { k: 3, layout: layout.clone(), ..CreateSpec::new("t", 2, 1).unwrap() };
        let geometry = Geometry::fit(&spec, 1 << 30).unwrap();
        let (blocks, last) = (geometry.stripe_blocks(), Stripe(geometry.stripes - 1));
        let patch = |position, version, blocks| StripPatch {
            position: Position::new(position),
            version: Version(version),
            columns: Vec::new(),
            crcs: vec![0; blocks],
        };
        let destage = |patches| Entry::Destage {
            stripe: last,
            stale: Positions::from_bits(1),
            contained: Vec::new(),
            patches,
        };
        let moved = |spare| Moves::NONE.with(Position::new(1), Some(spare));
        let strips = |clear, version, moves| Entry::Strips {
            stripe: Stripe(0),
            set: Positions::NONE,
            clear: Positions::from_bits(clear),
            version: Version(version),
            moves,
        };
        let fresh = |stripe, version, stale, block| Entry::Fresh {
            stripe,
            upto: 0,
            version: Version(version),
            stale: Positions::from_bits(stale),
            moves: Moves::NONE,
            contained: vec![(block, 1)],
        };
        let data = |stripe, block| Entry::Data { stripe, order: 1, block, crcs: vec![0; 2] };
        for (expected, entry) in [
            (true, destage(vec![patch(2, 13, 64)])),
            (false, destage(vec![])),
            (false, destage(vec![patch(4, 13, 64)])),
            (false, destage(vec![patch(2, 0, 64)])),
            (false, destage(vec![patch(2, 13, 63)])),
            (true, strips(2, 5, Moves::NONE)),
            (true, strips(0, 0, Moves::NONE)),
            (false, strips(2, 0, Moves::NONE)),
            (false, strips(16, 5, Moves::NONE)),
            (true, strips(3, 5, moved(0))),
            (false, strips(3, 5, moved(1))),
            (false, strips(1, 5, moved(0))),
            (true, fresh(last, 1, 4, blocks - 1)),
            (false, fresh(last.next(), 1, 0, 0)),
            (false, fresh(last, 0, 0, 0)),
            (false, fresh(last, 1, 16, 0)),
            (false, fresh(last, 1, 0, blocks)),
            (true, data(last, blocks - 2)),
            (false, data(last, blocks - 1)),
            (false, data(last, u32::MAX)),
            (true, Entry::Discard { stripe: last, count: 1, upto: 0 }),
            (false, Entry::Discard { stripe: last, count: 2, upto: 0 }),
            (false, Entry::Discard { stripe: last, count: u64::MAX, upto: 0 }),
            (true, Entry::MemberReset { member: MemberNo::new(4) }),
            (false, Entry::MemberReset { member: MemberNo::new(5) }),
            (true, Entry::Versions { reserved: Version(1) }),
        ] {
            assert_eq!(is_sound(&entry, &geometry, &layout), expected, "{entry:?}");
        }
    }
}
