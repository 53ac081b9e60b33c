//! Places, the parameters of a declustered layout, and which of them are possible.

use thiserror::Error;

/// Most members of an array.
pub const MOST_MEMBERS: usize = 256;
/// Most strips of a stripe.
pub const MOST_STRIPS: usize = 64;

/// A place for one strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place {
    /// The number of the member.
    pub member: usize,
    /// The number of the strip on that member, from 0.
    pub row: u64,
}

/// An error of the parameters of a layout.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LayoutError {
    /// The parameters contradict each other.
    #[error("{0}")]
    Shape(String),
    /// The base permutations are not permutations of the members, or place too many strips in one domain.
    #[error("base permutation {number}: {why}")]
    Base {
        /// The number of the permutation.
        number: usize,
        /// The reason.
        why: String,
    },
}

/// The parameters of a declustered layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Members of the array.
    pub members: usize,
    /// Strips of a stripe, data and redundancy.
    pub strips: usize,
    /// Redundancy strips of a stripe.
    pub redundancy: usize,
    /// Spare places in each row: the number of members whose strips have room on the others.
    pub spares: usize,
    /// Failure domains of equal size. Member `n` is in domain `n % domains`. As many as members if each one
    /// fails alone.
    pub domains: usize,
}

impl Shape {
    /// Fails if no layout can have this shape.
    pub fn check(&self) -> Result<(), LayoutError> {
        let Self { members, strips, redundancy, spares, domains } = *self;
        let no = |why: String| Err(LayoutError::Shape(why));
        if !(1..=MOST_MEMBERS).contains(&members) {
            return no(format!("an array has 1 to {MOST_MEMBERS} members, not {members}"));
        }
        if !(1..=MOST_STRIPS).contains(&strips) || redundancy >= strips {
            return no(format!(
                "a stripe has 1 to {MOST_STRIPS} strips, not {strips}, and {redundancy} of redundancy are too many"
            ));
        }
        if strips.saturating_add(spares) > members {
            return no(format!("{strips} strips and {spares} spare places want more than {members} members"));
        }
        if domains == 0 || !members.is_multiple_of(domains) {
            return no(format!("{members} members do not divide into {domains} domains of equal size"));
        }
        if domains < members && strips > domains * redundancy {
            return no(format!(
                "{strips} strips have no place in {domains} domains with at most {redundancy} in each"
            ));
        }
        Ok(())
    }

    /// The domain of a member.
    pub fn domain(&self, member: usize) -> usize {
        member % self.domains
    }

    /// The most strips of a stripe that lie in one domain.
    pub fn most_in_domain(&self) -> usize {
        if self.domains < self.members { self.redundancy } else { 1 }
    }

    /// Places of a row that hold strips.
    pub fn used(&self) -> usize {
        self.members - self.spares
    }

    /// Rows of a band: the fewest that hold whole stripes only.
    pub fn rows(&self) -> usize {
        self.strips / gcd(self.strips, self.used())
    }

    /// Stripes of a band.
    pub fn stripes(&self) -> usize {
        self.used() / gcd(self.strips, self.used())
    }

    /// The share of the drives' space that holds data.
    pub fn efficiency(&self) -> f64 {
        let share = |part: usize, of: usize| part as f64 / of as f64;
        share(self.used(), self.members) * share(self.strips - self.redundancy, self.strips)
    }
}

/// A number that is below the number of members as an index.
pub(crate) fn index(number: u64) -> usize {
    usize::try_from(number).expect("it is smaller than the number of members")
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(members: usize, strips: usize, redundancy: usize, spares: usize, domains: usize) -> Shape {
        Shape { members, strips, redundancy, spares, domains }
    }

    #[test]
    fn what_is_not_possible_is_refused() {
        for wrong in [
            shape(0, 1, 0, 0, 1),
            shape(257, 6, 2, 1, 257),
            shape(70, 65, 2, 1, 70),
            shape(6, 2, 2, 0, 6),
            shape(6, 0, 0, 0, 6),
            shape(6, 6, 2, 1, 6),
            shape(12, 6, 2, usize::MAX, 12),
            shape(12, 6, 2, 1, 5),
            shape(12, 6, 2, 1, 0),
            shape(12, 6, 2, 1, 2),
            shape(12, 3, 0, 1, 6),
        ] {
            assert!(wrong.check().is_err(), "{wrong:?}");
        }
        for right in [shape(1, 1, 0, 0, 1), shape(12, 6, 2, 1, 3), shape(256, 64, 8, 4, 256)] {
            right.check().unwrap();
        }
    }

    #[test]
    fn a_band_has_whole_stripes_only() {
        for (members, strips, spares, rows, stripes) in
            [(60, 10, 2, 5, 29), (11, 10, 1, 1, 1), (24, 6, 1, 6, 23), (6, 6, 0, 1, 1)]
        {
            let shape = shape(members, strips, 1, spares, members);
            assert_eq!((shape.rows(), shape.stripes()), (rows, stripes), "{shape:?}");
            assert_eq!(rows * shape.used(), stripes * strips);
        }
        let wide = shape(24, 10, 2, 2, 24);
        assert!((wide.efficiency() - 22.0 / 24.0 * 0.8).abs() < 1e-9);
    }
}
