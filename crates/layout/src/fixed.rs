//! Groups of as many members as a stripe has strips. Stripes go round the groups, and strips round the
//! members of a group from row to row, so that redundancy is spread evenly.

use crate::shape::{LayoutError, MOST_MEMBERS, MOST_STRIPS, Place, index};

/// A layout of fixed groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    groups: usize,
    strips: usize,
}

impl Fixed {
    /// A layout of `groups` groups for stripes of `strips` strips.
    pub fn new(groups: usize, strips: usize) -> Result<Self, LayoutError> {
        let possible = (1..=MOST_STRIPS).contains(&strips)
            && (1..=MOST_MEMBERS).contains(&groups)
            && groups * strips <= MOST_MEMBERS;
        match possible {
            true => Ok(Self { groups, strips }),
            false => Err(LayoutError::Shape(format!(
                "{groups} groups of {strips} members are not 1 to {MOST_STRIPS} each and {MOST_MEMBERS} in all"
            ))),
        }
    }

    /// Members of the array.
    pub fn members(&self) -> usize {
        self.groups * self.strips
    }

    /// Strips of a stripe.
    pub fn strips(&self) -> usize {
        self.strips
    }

    /// Stripes that fit in this many rows.
    pub fn stripes(&self, rows: u64) -> u64 {
        rows * self.groups as u64
    }

    /// The place of a strip.
    ///
    /// # Panics
    /// If a stripe has no such strip.
    pub fn place(&self, stripe: u64, strip: usize) -> Place {
        assert!(strip < self.strips, "strip {strip} of {}", self.strips);
        let (row, group) = (stripe / self.groups as u64, index(stripe % self.groups as u64));
        Place { member: group * self.strips + (strip + self.turn(row)) % self.strips, row }
    }

    /// The stripe and the number of the strip at a place.
    ///
    /// # Panics
    /// If there is no such member.
    pub fn strip_at(&self, place: Place) -> (u64, usize) {
        assert!(place.member < self.members(), "member {} of {}", place.member, self.members());
        let (group, member) = (place.member / self.strips, place.member % self.strips);
        let strip = (member + self.strips - self.turn(place.row)) % self.strips;
        (place.row * self.groups as u64 + group as u64, strip)
    }

    fn turn(&self, row: u64) -> usize {
        index(row % self.strips as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_place_has_one_strip_and_members_have_all_positions_alike() {
        for (groups, strips) in [(1, 1), (1, 6), (2, 10), (12, 2), (4, 64), (256, 1)] {
            let layout = Fixed::new(groups, strips).unwrap();
            let rows = strips as u64;
            let mut counts = vec![vec![0; strips]; layout.members()];
            for row in 0..rows {
                for member in 0..layout.members() {
                    let place = Place { member, row };
                    let (stripe, strip) = layout.strip_at(place);
                    assert!(stripe < layout.stripes(rows));
                    assert_eq!(layout.place(stripe, strip), place);
                    counts[place.member][strip] += 1;
                }
            }
            assert!(counts.iter().flatten().all(|count| *count == 1), "{groups} x {strips}");
        }
    }

    #[test]
    fn the_strips_of_a_stripe_lie_in_one_group() {
        let layout = Fixed::new(3, 4).unwrap();
        for stripe in 0..40 {
            let mut members: Vec<usize> = (0..4).map(|strip| layout.place(stripe, strip).member).collect();
            members.sort_unstable();
            let first = 4 * (stripe % 3) as usize;
            assert_eq!(members, (first..first + 4).collect::<Vec<_>>());
        }
    }

    #[test]
    fn what_is_not_possible_is_refused() {
        for (groups, strips) in [(0, 6), (6, 0), (1, 65), (5, 64), (257, 1)] {
            assert!(Fixed::new(groups, strips).is_err(), "{groups} x {strips}");
        }
    }
}
