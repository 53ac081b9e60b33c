//! The version of all messages of a connection, which its first exchange settles.

/// A message version that this release speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u16);

impl Version {
    /// The newest version of this release, which both ends of a connection within a process speak.
    pub const NEWEST: Self = Self(3);
    /// The oldest version of this release. The release before the next one speaks it too.
    pub const OLDEST: Self = Self(3);

    /// The version of this number; none if this release does not speak it.
    pub fn of_number(number: u16) -> Option<Self> {
        (Self::OLDEST.0..=Self::NEWEST.0).contains(&number).then_some(Self(number))
    }

    /// The number on the wire.
    pub fn number(self) -> u16 {
        self.0
    }

    /// The newest version that this release has in common with one that speaks `oldest` to `newest`; none if
    /// there is none.
    pub fn settle(oldest: u16, newest: u16) -> Option<Self> {
        let common = Self::of_number(newest.min(Self::NEWEST.0))?;
        (oldest <= common.0).then_some(common)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_common_version_is_settled() {
        let (oldest, newest) = (Version::OLDEST.0, Version::NEWEST.0);
        assert!(oldest <= newest && oldest > 0);
        for (from, until, wanted) in [
            (oldest, newest, Some(newest)),
            (oldest - 1, newest + 1, Some(newest)),
            (oldest - 1, oldest, Some(oldest)),
            (newest, newest + 7, Some(newest)),
            (newest + 1, newest + 7, None),
            (0, oldest - 1, None),
            (newest, oldest - 1, None),
        ] {
            assert_eq!(Version::settle(from, until).map(Version::number), wanted, "{from} to {until}");
        }
        assert_eq!(Version::of_number(newest + 1), None);
        assert_eq!(Version::of_number(oldest), Some(Version::OLDEST));
    }
}
