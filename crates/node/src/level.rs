//! Levels of protection by their usual names, and the plan that each one is on a number of drives.
//!
//! | level | stripes | drives |
//! |---|---|---|
//! | 0 | data only | from 1 on |
//! | 1 | copies on all drives | 2 to 4 |
//! | 5, 6, 7.3 | all drives in one group, with 1, 2 or 3 strips of redundancy | from 2 + redundancy to 64 |
//! | 10 | pairs of drives with the same contents | an even number, from 4 on |
//! | 50, 60, 70 | two or more groups of 5, 6 or 7.3 | a multiple of the number of groups |
//! | k+m | any code; spread over the drives if they are more than k+m | from k+m on |
//!
//! Pure.

use crate::error::StartError;
use crate::plan::Plan;
use penstock_base::text::parse_code;
use std::fmt;
use std::str::FromStr;

/// Most copies of level 1.
const MOST_COPIES: usize = 4;
/// Data strips of level 0 on more drives than that.
const WIDE: usize = 8;
/// The size of a group that is aimed at.
const GROUP: usize = 10;

/// A level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// 0: no redundancy.
    Stripes,
    /// 1: copies.
    Copies,
    /// 5, 6 and 7.3: one group with so many strips of redundancy.
    Group(usize),
    /// 10: groups of two copies.
    Pairs,
    /// 50, 60 and 70: groups with so many strips of redundancy.
    Groups(usize),
    /// Data and redundancy strips.
    Code(usize, usize),
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "0" => Self::Stripes,
            "1" => Self::Copies,
            "5" => Self::Group(1),
            "6" => Self::Group(2),
            "7.3" => Self::Group(3),
            "10" => Self::Pairs,
            "50" => Self::Groups(1),
            "60" => Self::Groups(2),
            "70" => Self::Groups(3),
            _ => {
                let (k, m) = parse_code(text).map_err(|_| {
                    format!("{text} is no level; there are 0, 1, 5, 6, 7.3, 10, 50, 60, 70 and data+redundancy, as in 8+2")
                })?;
                Self::Code(k, m)
            }
        })
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Stripes => "0",
            Self::Copies => "1",
            Self::Group(1) => "5",
            Self::Group(2) => "6",
            Self::Group(_) => "7.3",
            Self::Pairs => "10",
            Self::Groups(1) => "50",
            Self::Groups(2) => "60",
            Self::Groups(_) => "70",
            Self::Code(k, m) => return write!(f, "{k}+{m}"),
        })
    }
}

impl Level {
    /// The drives that it takes if nothing is said of them.
    pub fn default_drives(self) -> usize {
        match self {
            Self::Stripes | Self::Copies => 2,
            Self::Group(_) | Self::Pairs => 6,
            Self::Groups(_) => 12,
            Self::Code(k, m) => k.saturating_add(m),
        }
    }

    /// The plan on a number of drives, with so many groups if that is asked for.
    pub fn plan(self, drives: usize, groups: Option<usize>) -> Result<Plan, StartError> {
        let refuse = |why: String| Err(StartError::Refused(format!("level {self}: {why}")));
        if groups.is_some() && !matches!(self, Self::Groups(_) | Self::Code(..)) {
            return refuse("it has no groups that could be chosen".into());
        }
        match self {
            Self::Stripes => Plan::of_code(drives, if drives <= WIDE { drives } else { WIDE }, 0),
            Self::Copies if !(2..=MOST_COPIES).contains(&drives) => refuse(format!(
                "2 to {MOST_COPIES} drives hold the same, not {drives}; 10 and 1+2 spread copies over more"
            )),
            Self::Copies => Plan::of_code(drives, 1, drives - 1),
            Self::Group(m) if drives < m + 2 => {
                refuse(format!("it takes at least {} drives, not {drives}", m + 2))
            }
            Self::Group(m) => Plan::of_code(drives, drives - m, m),
            Self::Pairs if drives < 4 || !drives.is_multiple_of(2) => {
                refuse(format!("it takes an even number of at least 4 drives, not {drives}; 1+1 takes any"))
            }
            Self::Pairs => Plan::in_groups(drives / 2, 1, 1),
            Self::Groups(m) => {
                let least = m + 2;
                let groups = match groups {
                    Some(groups) => groups,
                    None => default_groups(drives, least)
                        .ok_or_else(|| StartError::Refused(format!(
                            "level {self}: {drives} drives do not divide into groups of equal size of at least {least}"
                        )))?,
                };
                if groups < 2 || !drives.is_multiple_of(groups) || drives / groups < least {
                    return refuse(format!(
                        "{drives} drives do not make {groups} groups of equal size of at least {least}; it has at least two"
                    ));
                }
                Plan::in_groups(groups, drives / groups - m, m)
            }
            Self::Code(k, m) => match groups {
                None => Plan::of_code(drives, k, m),
                Some(groups) if k.saturating_add(m).checked_mul(groups) == Some(drives) => {
                    Plan::in_groups(groups, k, m)
                }
                Some(groups) => refuse(format!("{groups} groups do not take {drives} drives")),
            },
        }
    }
}

/// The number of groups, at least two, whose size is closest to [`GROUP`].
fn default_groups(drives: usize, least: usize) -> Option<usize> {
    let possible = (2..=drives / least).filter(|groups| drives.is_multiple_of(*groups));
    possible.min_by_key(|groups| (drives / groups).abs_diff(GROUP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Arrangement;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in ["0", "1", "5", "6", "7.3", "10", "50", "60", "70", "8+2", "1+3", "61+3"] {
            assert_eq!(name.parse::<Level>().unwrap().to_string(), name);
        }
        for name in ["", "2", "raid6", "7", "8+", "6.0", "+2", "100"] {
            assert!(name.parse::<Level>().is_err(), "{name}");
        }
    }

    #[test]
    fn levels_are_codes_in_groups() {
        let groups = Arrangement::Groups;
        for (name, drives, code, arrangement) in [
            ("0", 1, (1, 0), groups(1)),
            ("0", 8, (8, 0), groups(1)),
            ("0", 20, (8, 0), Arrangement::Declustered { spares: 0 }),
            ("1", 2, (1, 1), groups(1)),
            ("1", 4, (1, 3), groups(1)),
            ("5", 3, (2, 1), groups(1)),
            ("6", 6, (4, 2), groups(1)),
            ("7.3", 24, (21, 3), groups(1)),
            ("10", 8, (1, 1), groups(4)),
            ("50", 6, (2, 1), groups(2)),
            // Two virtual drives of ten, as the sources have them.
            ("60", 20, (8, 2), groups(2)),
            ("60", 24, (10, 2), groups(2)),
            ("70", 60, (7, 3), groups(6)),
            ("4+2", 6, (4, 2), groups(1)),
            ("8+2", 24, (8, 2), Arrangement::Declustered { spares: 2 }),
        ] {
            let level: Level = name.parse().unwrap();
            let plan = level.plan(drives, None).unwrap();
            assert_eq!((plan.code(), plan.arrangement()), (code, arrangement), "{name} on {drives}");
            assert_eq!(plan.layout().unwrap().members(), drives, "{name}");
        }
        let plan = Level::Groups(2).plan(24, Some(4)).unwrap();
        assert_eq!((plan.code(), plan.arrangement()), ((4, 2), groups(4)));
        assert_eq!(Level::Code(4, 2).plan(12, Some(2)).unwrap().arrangement(), groups(2));
    }

    #[test]
    fn drives_that_a_level_does_not_take_are_refused_with_a_word_of_help() {
        for (name, drives, groups, why) in [
            ("1", 1, None, "2 to 4 drives"),
            ("1", 5, None, "10 and 1+2"),
            ("5", 2, None, "at least 3 drives"),
            ("6", 3, None, "at least 4 drives"),
            ("7.3", 4, None, "at least 5 drives"),
            ("6", 65, None, "code 63+2"),
            ("10", 7, None, "even number"),
            ("60", 7, None, "do not divide"),
            ("60", 13, None, "do not divide"),
            ("60", 24, Some(5), "5 groups"),
            ("60", 24, Some(1), "at least two"),
            ("60", 24, Some(8), "at least 4"),
            ("6", 24, Some(2), "no groups"),
            ("8+2", 24, Some(2), "do not take"),
            ("0", 0, None, ""),
        ] {
            let level: Level = name.parse().unwrap();
            let error = level.plan(drives, groups).unwrap_err().to_string();
            assert!(error.contains(why), "{name} on {drives}: {error}");
        }
    }

    #[test]
    fn a_level_has_a_plan_for_its_own_number_of_drives() {
        for name in ["0", "1", "5", "6", "7.3", "10", "50", "60", "70", "16+3"] {
            let level: Level = name.parse().unwrap();
            assert_eq!(level.plan(level.default_drives(), None).unwrap().drives(), level.default_drives());
        }
    }
}
