//! The check of log entries against the geometry: bytes from a drive are never asserted on.

use crate::format::record::{Entry, StripPatch};
use crate::geometry::Geometry;
use crate::place::Positions;

/// True if the entry names only stripes, strips and blocks that an array of this geometry has, and leaves its
/// table in a state that it can have.
pub(crate) fn is_sound(entry: &Entry, geo: &Geometry) -> bool {
    let contained = |blocks: &[(u32, u64)]| blocks.iter().all(|(block, _)| *block < geo.stripe_blocks());
    let within = |sets: &[Positions]| sets.iter().all(|set| set.without(geo.all_strips()).is_empty());
    match entry {
        Entry::Data { stripe, block, crcs, .. } => {
            let end = (*block as usize).saturating_add(crcs.len());
            stripe.0 < geo.stripes && end <= geo.stripe_blocks() as usize
        }
        Entry::Fresh { stripe, version, stale, contained: blocks, .. } => {
            stripe.0 < geo.stripes && version.0 != 0 && within(&[*stale]) && contained(blocks)
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
        Entry::Strips { stripe, set, clear, version } => {
            // Version 0 would make a stripe with stale strips unwritten.
            stripe.0 < geo.stripes && within(&[*set, *clear]) && (clear.is_empty() || version.0 != 0)
        }
        Entry::MemberReset { member } => member.index() < geo.strips(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::CreateSpec;
    use crate::place::Position;
    use penstock_base::{Stripe, Version};

    /// Regression: such entries left a stripe with stale strips and nothing written, which the table asserts
    /// on.
    #[test]
    fn entries_that_leave_an_impossible_stripe_are_not_sound() {
        let geometry = Geometry::fit(&CreateSpec::new("t", 2, 1), 1 << 30).unwrap();
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
        let strips = |clear, version| Entry::Strips {
            stripe: Stripe(0),
            set: Positions::NONE,
            clear: Positions::from_bits(clear),
            version: Version(version),
        };
        let fresh = |stripe, version, stale, block| Entry::Fresh {
            stripe,
            upto: 0,
            version: Version(version),
            stale: Positions::from_bits(stale),
            contained: vec![(block, 1)],
        };
        let data = |stripe, block| Entry::Data { stripe, order: 1, block, crcs: vec![0; 2] };
        for (expected, entry) in [
            (true, destage(vec![patch(2, 13, 64)])),
            (false, destage(vec![])),
            (false, destage(vec![patch(3, 13, 64)])),
            (false, destage(vec![patch(2, 0, 64)])),
            (false, destage(vec![patch(2, 13, 63)])),
            (true, strips(2, 5)),
            (true, strips(0, 0)),
            (false, strips(2, 0)),
            (false, strips(8, 5)),
            (true, fresh(last, 1, 4, blocks - 1)),
            (false, fresh(last.next(), 1, 0, 0)),
            (false, fresh(last, 0, 0, 0)),
            (false, fresh(last, 1, 8, 0)),
            (false, fresh(last, 1, 0, blocks)),
            (true, data(last, blocks - 2)),
            (false, data(last, blocks - 1)),
            (false, data(last, u32::MAX)),
            (true, Entry::Discard { stripe: last, count: 1, upto: 0 }),
            (false, Entry::Discard { stripe: last, count: 2, upto: 0 }),
            (false, Entry::Discard { stripe: last, count: u64::MAX, upto: 0 }),
            (true, Entry::MemberReset { member: Position::new(2) }),
            (false, Entry::MemberReset { member: Position::new(3) }),
            (true, Entry::Versions { reserved: Version(1) }),
        ] {
            assert_eq!(is_sound(&entry, &geometry), expected, "{entry:?}");
        }
    }
}
