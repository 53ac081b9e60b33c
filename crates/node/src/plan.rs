//! The choice of code and layout for a number of drives, and what follows from it.
//!
//! Pure: a plan says how arrays would lie on drives, and changes nothing.

use crate::error::StartError;
use penstock_array::moves::MOST_SPARES;
use penstock_array::{ArrayError, Layout, MAX_PARITY};
use penstock_layout::{MOST_MEMBERS, MOST_STRIPS, Shape};

/// The search for base permutations begins here, so that equal stores have equal layouts.
const SEED: u64 = 1;
/// From so many drives on, stripes do not lie on all of them.
const SPREAD_FROM: usize = 12;
/// From so many drives on, three may fail.
const THREE_FROM: usize = 65;

/// The arrangement of stripes over drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrangement {
    /// Groups of as many drives as a stripe has strips.
    Groups(usize),
    /// Spread over all drives, with so many spare places in each row.
    Declustered {
        /// Drives whose contents have room on the others.
        spares: usize,
    },
}

/// A code and its layout on a number of drives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    drives: usize,
    k: usize,
    m: usize,
    arrangement: Arrangement,
    /// Failure domains of equal size: drive `n` is in domain `n % domains`. As many as drives if each one
    /// fails alone.
    domains: usize,
}

impl Plan {
    /// The plan for a number of drives of which nothing else is said.
    pub fn for_drives(drives: usize) -> Result<Self, StartError> {
        let (k, m) = default_code(drives)?;
        Self::of_code(drives, k, m)
    }

    /// The same for drives in so many failure domains of equal size, as enclosures or controllers are: a
    /// shorter code if the default one has more strips than the domains can take.
    pub fn for_domains(drives: usize, domains: usize) -> Result<Self, StartError> {
        let (k, m) = default_code(drives)?;
        let k = k.min((domains.saturating_mul(m)).saturating_sub(m)).max(1);
        Self::of_code(drives, k, m)?.in_domains(domains)
    }

    /// The same with no more than m strips of a stripe, and as many copies of metadata, in one of so many
    /// failure domains of equal size. Drive `n` is in domain `n % domains`.
    pub fn in_domains(self, domains: usize) -> Result<Self, StartError> {
        let Self { drives, k, m, .. } = self;
        let refuse = |why: String| Err(StartError::Refused(why));
        if domains < 2 || !drives.is_multiple_of(domains) {
            return refuse(format!(
                "{drives} drives do not make {domains} failure domains of equal size; there are at least two"
            ));
        }
        if domains < drives && k + m > domains * m {
            return refuse(format!(
                "code {k}+{m} in {domains} failure domains: a stripe has {} strips, and at most {m} of them in \
                 each domain have place; a shorter code or more redundancy has",
                k + m
            ));
        }
        if let Arrangement::Groups(2..) = self.arrangement {
            return refuse(
                "stripes in several groups of drives take no failure domains; k+m spreads them".into(),
            );
        }
        // Even a single group: its layout knows no domains.
        let arrangement = match self.arrangement {
            Arrangement::Groups(_) if domains < drives => Arrangement::Declustered { spares: 0 },
            Arrangement::Declustered { spares } if domains < drives => {
                Arrangement::Declustered { spares: spares_apart(drives, (k, m), domains, spares) }
            }
            other => other,
        };
        Ok(Self { domains, arrangement, ..self })
    }

    /// The plan for a code on a number of drives: one group if they are as many as strips, else spread over
    /// all.
    pub fn of_code(drives: usize, k: usize, m: usize) -> Result<Self, StartError> {
        let refuse = |why: String| Err(StartError::Refused(why));
        let strips = k.saturating_add(m);
        if k == 0 || strips > MOST_STRIPS || m > MAX_PARITY {
            return refuse(format!(
                "code {k}+{m}: 1 to {MOST_STRIPS} strips, at most {MAX_PARITY} of them redundancy"
            ));
        }
        if drives < strips {
            return refuse(format!("code {k}+{m} takes at least {strips} drives, not {drives}"));
        }
        if drives > MOST_MEMBERS {
            return refuse(format!("an array lies on at most {MOST_MEMBERS} drives, not {drives}"));
        }
        let arrangement = match drives - strips {
            0 => Arrangement::Groups(1),
            // Without redundancy nothing can be made again.
            _ if m == 0 => Arrangement::Declustered { spares: 0 },
            free => Arrangement::Declustered { spares: default_spares(drives).min(free) },
        };
        if let Arrangement::Declustered { spares } = arrangement {
            assert!(strips + spares <= drives, "{k}+{m} and {spares} spare on {drives} drives");
        }
        Ok(Self { drives, k, m, arrangement, domains: drives })
    }

    /// The plan for a code in so many groups of as many drives as a stripe has strips.
    pub fn in_groups(groups: usize, k: usize, m: usize) -> Result<Self, StartError> {
        let drives = k.saturating_add(m).saturating_mul(groups);
        let plan = Self::of_code(drives, k, m)?;
        Ok(Self { arrangement: Arrangement::Groups(groups), ..plan })
    }

    /// The same with room on the others for the contents of so many drives.
    pub fn with_spares(self, spares: usize) -> Result<Self, StartError> {
        let Self { drives, k, m, arrangement, .. } = self;
        let Arrangement::Declustered { .. } = arrangement else {
            let why = "groups have no spare space: a lost drive is rebuilt when a new one is in its place";
            return match spares {
                0 => Ok(self),
                _ => Err(StartError::Refused(why.into())),
            };
        };
        let most = MOST_SPARES.min(drives - k - m);
        if m == 0 && spares > 0 || spares > most {
            return Err(StartError::Refused(format!(
                "code {k}+{m} on {drives} drives has spare space for at most {} of them, not {spares}",
                if m == 0 { 0 } else { most }
            )));
        }
        let domains = self.domains;
        if domains < drives && spares != spares_apart(drives, (k, m), domains, spares) {
            return Err(StartError::Refused(format!(
                "code {k}+{m} in {domains} failure domains fills each of them: it takes spare space for 0 drives or a multiple of {domains}, not {spares}"
            )));
        }
        Ok(Self { arrangement: Arrangement::Declustered { spares }, ..self })
    }

    /// Mirrors of metadata on the same drives, which survive what the data survives.
    pub fn metadata(&self) -> Self {
        let (k, strips) = (1, 1 + self.m);
        let spares = match self.arrangement {
            Arrangement::Groups(_) => 0,
            Arrangement::Declustered { spares } if self.domains < self.drives => {
                spares_apart(self.drives, (k, self.m), self.domains, spares)
            }
            Arrangement::Declustered { spares } => spares.min(self.drives - strips),
        };
        let is_even = self.drives.is_multiple_of(strips) && spares == 0 && self.domains == self.drives;
        let arrangement = match is_even {
            true => Arrangement::Groups(self.drives / strips),
            false => Arrangement::Declustered { spares },
        };
        assert!(strips <= self.drives, "a mirror of {strips} on {} drives", self.drives);
        Self { k, arrangement, ..*self }
    }

    /// Number of drives.
    pub fn drives(&self) -> usize {
        self.drives
    }

    /// Data and redundancy strips of a stripe.
    pub fn code(&self) -> (usize, usize) {
        (self.k, self.m)
    }

    /// The arrangement of stripes over the drives.
    pub fn arrangement(&self) -> Arrangement {
        self.arrangement
    }

    /// The share of the drives' space behind metadata that holds data.
    pub fn efficiency(&self) -> f64 {
        match self.arrangement {
            Arrangement::Groups(_) => self.shape(0).efficiency(),
            Arrangement::Declustered { spares } => self.shape(spares).efficiency(),
        }
    }

    /// The parameters of stripes that are spread with so many spare places in a row.
    fn shape(&self, spares: usize) -> Shape {
        let Self { drives: members, k, m: redundancy, domains, .. } = *self;
        Shape { members, strips: k + redundancy, redundancy, spares, domains }
    }

    /// The layout. For stripes that are spread it is searched for, which may take some seconds for hundreds
    /// of drives.
    pub fn layout(&self) -> Result<Layout, ArrayError> {
        match self.arrangement {
            Arrangement::Groups(groups) => Layout::groups(groups, self.k + self.m),
            Arrangement::Declustered { spares } => Layout::spread(self.shape(spares), SEED),
        }
    }

    /// True if the plan survives the loss of m drives in each of several groups, with its metadata.
    pub fn survives_in_each_group(&self) -> bool {
        let Arrangement::Groups(groups) = self.arrangement else { return false };
        // Copies of metadata must lie within a group then.
        groups > 1 && self.m > 0 && (self.k + self.m).is_multiple_of(1 + self.m)
    }

    /// The losses that the plan survives, for people.
    pub fn survives(&self) -> String {
        let any = match self.m {
            0 => "no drive may be lost".to_owned(),
            1 => "one drive may be lost".to_owned(),
            m => format!("{m} drives may be lost at the same time"),
        };
        match (self.survives_in_each_group(), self.domains < self.drives) {
            (true, _) => format!("{any} in each group"),
            (_, true) => format!("{any}, or one of {} failure domains", self.domains),
            _ => any,
        }
    }

    /// Seconds until a lost drive's strips are made again, if `used_bytes` of it are, and each drive reads
    /// and writes at these rates in bytes per second beside everything else. None if nothing can be made
    /// again.
    ///
    /// With spare space each other drive reads and writes its share: `S (k/r + 1/w) / (C - 1)`. Without it
    /// the new drive is the limit, or the drives that are read: `S / min(r, w)`.
    pub fn rebuild_seconds(&self, used_bytes: f64, read: f64, write: f64) -> Option<f64> {
        match self.arrangement {
            _ if self.m == 0 => None,
            Arrangement::Declustered { spares } if spares > 0 => {
                let others = (self.drives - 1) as f64;
                Some(used_bytes * (self.k as f64 / read + 1.0 / write) / others)
            }
            _ => Some(used_bytes / read.min(write)),
        }
    }

    /// The plan in one line, for people.
    pub fn describe(&self) -> String {
        let Self { k, m, drives, arrangement, .. } = self;
        let survives = self.survives();
        match arrangement {
            Arrangement::Groups(1) => format!("code {k}+{m} on {drives} drives; {survives}"),
            Arrangement::Groups(groups) => {
                format!("code {k}+{m} in {groups} groups of {} drives; {survives}", k + m)
            }
            Arrangement::Declustered { spares } => {
                let room = match spares {
                    0 => "no spare space".to_owned(),
                    1 => "spare space for one drive".to_owned(),
                    spares => format!("spare space for {spares} drives"),
                };
                format!("code {k}+{m} spread over {drives} drives, with {room}; {survives}")
            }
        }
    }
}

/// The code for a number of drives of which nothing else is said.
fn default_code(drives: usize) -> Result<(usize, usize), StartError> {
    Ok(match drives {
        0 => return Err(StartError::Refused("a store has at least one drive".into())),
        1 => (1, 0),
        2 => (1, 1),
        3 => (2, 1),
        _ if drives < SPREAD_FROM => (drives - 2, 2),
        _ if drives < THREE_FROM => (8, 2),
        _ => (8, 3),
    })
}

/// The number of spare places, about as many as wanted, with which stripes of a code keep failure domains
/// apart: domains take turns in a row, and where a stripe goes on in the next row, that begins with the first
/// one again, unless as many places of each domain are spare.
fn spares_apart(drives: usize, (k, m): (usize, usize), domains: usize, wanted: usize) -> usize {
    let strips = k + m;
    if strips.div_ceil(domains) < m {
        return wanted.min(drives - strips);
    }
    let of_all = wanted.next_multiple_of(domains);
    if of_all <= MOST_SPARES && strips + of_all <= drives { of_all } else { 0 }
}

/// Drives whose contents have room on the others, if nothing is said of that.
fn default_spares(drives: usize) -> usize {
    match drives {
        0..24 => 1,
        24..96 => 2,
        _ => drives / 48,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_array::MemberNo;

    #[test]
    fn every_number_of_drives_has_a_plan() {
        for drives in 1..=256 {
            let plan = Plan::for_drives(drives).unwrap();
            for plan in [plan, plan.metadata()] {
                let (k, m) = plan.code();
                assert!(k + m <= drives, "{plan:?}");
                match plan.arrangement() {
                    Arrangement::Groups(groups) => assert_eq!(groups * (k + m), drives, "{plan:?}"),
                    Arrangement::Declustered { spares } => {
                        assert!(k + m + spares <= drives && spares <= 8, "{plan:?}");
                    }
                }
                assert!(plan.efficiency() > 0.2, "{plan:?}");
            }
            assert_eq!(plan.code().1, plan.metadata().code().1, "both survive the same");
            assert!(plan.code().1 == 2 || !(4..=64).contains(&drives), "{plan:?}");
        }
        assert!(Plan::for_drives(0).is_err() && Plan::for_drives(257).is_err());
    }

    #[test]
    fn plans_of_some_stores() {
        for (drives, expected) in [
            (1, "code 1+0 on 1 drives; no drive may be lost"),
            (3, "code 2+1 on 3 drives; one drive may be lost"),
            (6, "code 4+2 on 6 drives; 2 drives may be lost at the same time"),
            (
                24,
                "code 8+2 spread over 24 drives, with spare space for 2 drives; 2 drives may be lost at the \
                 same time",
            ),
            (
                200,
                "code 8+3 spread over 200 drives, with spare space for 4 drives; 3 drives may be lost at the \
                 same time",
            ),
        ] {
            assert_eq!(Plan::for_drives(drives).unwrap().describe(), expected);
        }
        let wide = Plan::of_code(24, 8, 2).unwrap();
        assert!((wide.efficiency() - 22.0 / 24.0 * 0.8).abs() < 1e-9);
        assert_eq!(Plan::of_code(6, 4, 2).unwrap().metadata().arrangement(), Arrangement::Groups(2));
        let odd = Plan::of_code(7, 5, 2).unwrap().metadata();
        assert_eq!(odd.arrangement(), Arrangement::Declustered { spares: 0 });
    }

    #[test]
    fn groups_survive_in_each_where_their_metadata_do() {
        for (groups, k, m, expected) in [
            (4, 1, 1, "code 1+1 in 4 groups of 2 drives; one drive may be lost in each group"),
            (
                2,
                4,
                2,
                "code 4+2 in 2 groups of 6 drives; 2 drives may be lost at the same time in each group",
            ),
            (2, 8, 2, "code 8+2 in 2 groups of 10 drives; 2 drives may be lost at the same time"),
        ] {
            let plan = Plan::in_groups(groups, k, m).unwrap();
            assert_eq!(plan.describe(), expected);
            let (layout, mirrors) = (plan.layout().unwrap(), plan.metadata().layout().unwrap());
            // The first m drives of each group.
            let lost = (0..groups * m).map(|at| MemberNo::new(at / m * (k + m) + at % m)).collect();
            assert_eq!(layout.most_lost(lost), m, "{plan:?}");
            assert_eq!(mirrors.most_lost(lost) <= m, plan.survives_in_each_group(), "{plan:?}");
        }
    }

    /// Domains of drives that people have. The loss of one leaves what the code needs, of data and metadata,
    /// and so does that of m drives.
    #[test]
    fn plans_in_failure_domains_have_layouts() {
        for (drives, domains, code, spares) in [
            (6, 3, (4, 2), 0),
            (12, 2, (2, 2), 2),
            (12, 4, (6, 2), 4),
            (24, 2, (2, 2), 2),
            (24, 4, (6, 2), 4),
            (24, 6, (8, 2), 6),
            (60, 5, (8, 2), 5),
            (60, 12, (8, 2), 2),
            (64, 4, (6, 2), 4),
            (96, 4, (8, 3), 4),
        ] {
            let plan = Plan::for_domains(drives, domains).unwrap();
            assert_eq!(
                (plan.code(), plan.arrangement()),
                (code, Arrangement::Declustered { spares }),
                "{drives}"
            );
            for plan in [plan, plan.metadata()] {
                let layout = plan.layout().unwrap_or_else(|error| panic!("{plan:?}: {error}"));
                let of_one = (0..drives / domains).map(|at| MemberNo::new(at * domains)).collect();
                assert!(layout.most_lost(of_one) <= plan.code().1, "{plan:?}");
            }
        }
        let plan = Plan::for_domains(12, 4).unwrap();
        assert!(
            plan.survives().contains("2 drives may be lost at the same time, or one of 4 failure domains")
        );
        for (drives, domains) in [(12, 5), (12, 1), (12, 0), (3, 4)] {
            assert!(Plan::for_domains(drives, domains).is_err(), "{drives} {domains}");
        }
        for (spares, may_be) in [(0, true), (1, false), (3, false), (4, true)] {
            assert_eq!(plan.with_spares(spares).is_ok(), may_be, "{spares}");
        }
        assert!(Plan::of_code(12, 8, 2).unwrap().in_domains(4).is_err());
        assert!(Plan::in_groups(2, 4, 2).unwrap().in_domains(4).is_err());
        assert_eq!(Plan::for_domains(6, 6).unwrap(), Plan::for_drives(6).unwrap(), "each fails alone");
    }

    #[test]
    fn spare_space_is_asked_for_within_bounds() {
        let plan = Plan::of_code(24, 8, 2).unwrap();
        assert_eq!(plan.with_spares(4).unwrap().arrangement(), Arrangement::Declustered { spares: 4 });
        assert_eq!(plan.with_spares(0).unwrap().arrangement(), Arrangement::Declustered { spares: 0 });
        assert!(plan.with_spares(9).is_err() && Plan::of_code(12, 8, 2).unwrap().with_spares(3).is_err());
        assert!(Plan::of_code(12, 4, 0).unwrap().with_spares(1).is_err());
        assert!(Plan::in_groups(2, 4, 2).unwrap().with_spares(1).is_err());
    }

    /// The example of the sources: 60 drives, 8+2, 7 and 4 GB/s, 10.6 times faster than onto one drive.
    #[test]
    fn a_rebuild_takes_as_long_as_the_formula_says() {
        let spread = Plan::of_code(60, 8, 2).unwrap().rebuild_seconds(4e12, 7e9, 4e9).unwrap();
        let fixed = Plan::in_groups(6, 8, 2).unwrap().rebuild_seconds(4e12, 7e9, 4e9).unwrap();
        assert!((fixed - 1000.0).abs() < 1e-6 && (fixed / spread - 10.6).abs() < 0.05, "{fixed} {spread}");
        assert_eq!(Plan::of_code(4, 4, 0).unwrap().rebuild_seconds(1e12, 7e9, 4e9), None);
    }

    #[test]
    fn plans_have_layouts() {
        for drives in [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 24, 31, 64] {
            let plan = Plan::for_drives(drives).unwrap();
            for plan in [plan, plan.metadata()] {
                assert_eq!(plan.layout().unwrap().members(), drives, "{plan:?}");
            }
        }
    }

    #[test]
    fn what_is_not_possible_is_refused() {
        for (drives, k, m) in [(6, 0, 2), (6, 5, 2), (70, 63, 2), (20, 8, 9), (257, 4, 2), (0, 1, 0)] {
            assert!(Plan::of_code(drives, k, m).is_err(), "{k}+{m} on {drives}");
        }
    }
}
