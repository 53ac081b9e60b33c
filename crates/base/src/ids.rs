//! Identifiers and counters, each with a type of its own, so that the compiler tells them apart.

use std::fmt;
use std::str::FromStr;

/// A 128-bit identifier, drawn at random when the named object is created.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Id128(pub [u8; 16]);

impl Id128 {
    /// The identifier that names nothing.
    pub const NIL: Self = Self([0; 16]);

    /// Builds an identifier from two random 64-bit words.
    pub fn from_words(high: u64, low: u64) -> Self {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&high.to_be_bytes());
        bytes[8..].copy_from_slice(&low.to_be_bytes());
        Self(bytes)
    }

    /// True if this is [`Id128::NIL`].
    pub fn is_nil(&self) -> bool {
        *self == Self::NIL
    }
}

impl fmt::Display for Id128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Id128 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The text is not 32 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("an id is 32 hexadecimal digits")]
pub struct BadId;

impl FromStr for Id128 {
    type Err = BadId;

    fn from_str(text: &str) -> Result<Self, BadId> {
        // The conversion below would accept a sign as a digit.
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(BadId);
        }
        let mut bytes = [0; 16];
        for (byte, at) in bytes.iter_mut().zip((0..32).step_by(2)) {
            *byte = u8::from_str_radix(&text[at..at + 2], 16).map_err(|_| BadId)?;
        }
        Ok(Self(bytes))
    }
}

macro_rules! newtype {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

newtype!(
    /// Identifies a drive for life, independent of its path.
    DriveId(Id128)
);
newtype!(
    /// Identifies an array.
    ArrayId(Id128)
);
newtype!(
    /// Identifies a store: all drives that were created together or added later.
    StoreId(Id128)
);
newtype!(
    /// Identifies a pool: drives that an administrator joined under one code and layout. It has one array per
    /// stack for data, and one for metadata.
    PoolId(Id128)
);
newtype!(
    /// Number of a stack within a store: a data array, a metadata array with its key-value store, and a
    /// target.
    StackNo(u16)
);
newtype!(
    /// Number of a storage target within a store, never given again.
    TargetId(u32)
);
newtype!(
    /// Ownership revision of an array. An owner with a greater epoch fences all owners with smaller ones.
    Epoch(u64)
);
newtype!(
    /// Version of a strip, from one counter of the array; no value is given twice. A strip is valid if its
    /// version equals the one in the stripe table; versions are never compared by order.
    Version(u64)
);
newtype!(
    /// Number of a stripe within its array.
    Stripe(u64)
);
newtype!(
    /// Sequence of a record in an array's log.
    LogSeq(u64)
);
newtype!(
    /// Number of an inode. The upper 24 bits name the family: a fileset with all its clones.
    Ino(u64)
);
newtype!(
    /// A moment in the history of a family, from one counter: rows and extents carry the one at which they
    /// were made. Snapshots will raise it.
    Birth(u64)
);

impl StackNo {
    /// The stack with the names of the file system; the only one of many stores.
    pub const FIRST: Self = Self(0);

    /// The target of the stack. A store is made with as many targets as stacks.
    pub const fn target(self) -> TargetId {
        TargetId(self.0 as u32)
    }
}

/// Most stacks of a store.
pub const MOST_STACKS: u16 = 64;

impl Ino {
    /// Bits of the number within a family.
    const NUMBER_BITS: u32 = 40;

    /// Inode `number` of a family. Panics if there is no such number or family.
    pub const fn of_family(family: u32, number: u64) -> Self {
        assert!(family > 0 && family >> (64 - Self::NUMBER_BITS) == 0, "a family has 24 bits");
        assert!(number >> Self::NUMBER_BITS == 0, "a number within a family has 40 bits");
        Self(((family as u64) << Self::NUMBER_BITS) | number)
    }
}

impl Birth {
    /// The birth of everything as long as a family has no snapshot.
    pub const FIRST: Self = Self(1);

    /// The end of a key, big-endian: the newest birth comes first.
    pub const fn suffix(self) -> u64 {
        !self.0
    }

    /// The birth in a key with this end.
    pub const fn of_suffix(suffix: u64) -> Self {
        Self(!suffix)
    }
}

newtype!(
    /// A line of history of a family: 0 is the first fileset itself. Others are drawn once per store.
    Branch(u64)
);

impl Branch {
    /// The file system itself.
    pub const MAIN: Self = Self(0);
}

/// Names a file: an inode on a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// The branch.
    pub branch: Branch,
    /// The inode.
    pub ino: Ino,
}

impl fmt::Display for FileId {
    /// The number of the inode, with that of the branch if it is not the file system itself.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.branch {
            Branch::MAIN => write!(f, "{}", self.ino),
            branch => write!(f, "{} of branch {branch}", self.ino),
        }
    }
}

impl FileId {
    /// A file of the file system itself.
    pub const fn main(ino: Ino) -> Self {
        Self { branch: Branch::MAIN, ino }
    }

    /// The file with these numbers of its branch and of its inode, as in messages and keys.
    pub const fn of_numbers(branch: u64, ino: u64) -> Self {
        Self { branch: Branch(branch), ino: Ino(ino) }
    }
}

impl Stripe {
    /// `count` stripes from this one on.
    pub fn run(self, count: u64) -> impl DoubleEndedIterator<Item = Self> + Clone {
        (self.0..self.0 + count).map(Self)
    }

    /// The stripe after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}

impl LogSeq {
    /// The sequence after this one.
    pub fn next(self) -> Self {
        Self(self.0 + 1)
    }
}
