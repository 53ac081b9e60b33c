//! What a check of a file system finds: a closed list of kinds, and findings in bounded number.
//!
//! docs/fs-check.md says of each kind what it means and what a repair does.

use crate::ids::Ino;
use std::collections::BTreeMap;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $word:literal,)*) => {
        /// A kind of finding, in the order in which a repair takes them: what it needs to be right comes first.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum FindingKind { $($(#[$doc])* $name,)* }

        impl FindingKind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The kind as one word.
            pub fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }
        }
    };
}

kinds! {
    /// A block of a file is marked as free.
    BlockNotMarked "block_not_marked",
    /// An allocation group's row cannot be read, or names blocks that the volume does not have.
    BadGroupRow "bad_group_row",
    /// Inode numbers in use may be given again.
    InodeReservationTooLow "inode_reservation_too_low",
    /// Session numbers in use may be given again.
    SessionReservationTooLow "session_reservation_too_low",
    /// A row that this release does not know.
    UnknownRow "unknown_row",
    /// The root directory does not exist or is no directory.
    MissingRoot "missing_root",
    /// An inode's row cannot be read.
    BadInodeRow "bad_inode_row",
    /// An inode's row says another number than its key.
    WrongInodeNumber "wrong_inode_number",
    /// A directory entry's row cannot be read.
    BadEntryRow "bad_entry_row",
    /// An extended attribute's row is none.
    BadXattrRow "bad_xattr_row",
    /// A row of the queue of removed files is none.
    BadQueueRow "bad_queue_row",
    /// A stored result of a session cannot be read or stands in the wrong place.
    BadSessionRow "bad_session_row",
    /// A chunk's map row cannot be read.
    BadMapRow "bad_map_row",
    /// An extent goes beyond its chunk.
    ExtentBeyondChunk "extent_beyond_chunk",
    /// An inode does not exist and something that holds data is its.
    MissingInode "missing_inode",
    /// A name points to an inode that does not exist.
    DanglingEntry "dangling_entry",
    /// A name that can be none.
    BadEntryName "bad_entry_name",
    /// A name stands where its hash does not put it: nobody finds it.
    MisplacedEntry "misplaced_entry",
    /// A directory has the same name twice.
    DuplicateName "duplicate_name",
    /// An entry says another type than its inode.
    WrongEntryKind "wrong_entry_kind",
    /// An entry is in an inode that is no directory.
    EntryWithoutDirectory "entry_without_directory",
    /// A directory has more than one name.
    DirectoryExtraName "directory_extra_name",
    /// Directories that contain each other and are not below the root.
    DirectoryCycle "directory_cycle",
    /// An inode has no name and was not removed.
    OrphanInode "orphan_inode",
    /// A file with names is in the queue of removed files.
    NamedAndQueued "named_and_queued",
    /// The queue of removed files names an inode that does not exist.
    QueuedWithoutInode "queued_without_inode",
    /// An inode holds its data in a way that its type does not.
    WrongInodeData "wrong_inode_data",
    /// A size that cannot be.
    WrongSize "wrong_size",
    /// A layout that is not the target's.
    WrongLayout "wrong_layout",
    /// A directory says another parent than the one that holds its name.
    WrongParent "wrong_parent",
    /// A link count does not agree with the names.
    WrongLinkCount "wrong_link_count",
    /// A directory's count of entries does not agree with its entries.
    WrongEntryCount "wrong_entry_count",
    /// An extent without blocks.
    EmptyExtent "empty_extent",
    /// An extent goes beyond the volume.
    ExtentBeyondVolume "extent_beyond_volume",
    /// A block belongs to two chunks, or twice to one.
    DoubleOwnedBlock "double_owned_block",
    /// Chunks of an inode that is no regular file.
    ChunksOfNonFile "chunks_of_non_file",
    /// A chunk lies beyond the largest offset that a file can have.
    ChunkBeyondLimit "chunk_beyond_limit",
    /// A block is marked as used and belongs to nothing.
    BlockNotOwned "block_not_owned",
    /// The counts of free space in memory are wrong.
    WrongFreeCount "wrong_free_count",
    /// A stripe is written although nothing is allocated in it.
    WrittenFreeStripe "written_free_stripe",
}

impl FindingKind {
    /// Whether it costs space only: a check that finds nothing else is clean.
    pub fn is_waste(self) -> bool {
        self == Self::WrittenFreeStripe
    }
}

impl std::fmt::Display for FindingKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// What kind of thing.
    pub kind: FindingKind,
    /// The inode that it is about, where it is about one.
    pub ino: Option<Ino>,
    /// A sentence.
    pub text: String,
    /// Whether a repair mends it.
    pub repairable: bool,
}

/// Findings of one kind that are kept; the others are counted.
const KEPT: u64 = 1000;

/// Findings, kept in bounded number and counted in full.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The first of each kind, in the order in which they were found.
    pub kept: Vec<Finding>,
    /// How many there are of each kind.
    pub counts: BTreeMap<FindingKind, u64>,
}

impl Findings {
    /// Adds one that a repair mends.
    pub fn add(&mut self, kind: FindingKind, ino: impl Into<Option<Ino>>, text: impl Into<String>) {
        self.push(Finding { kind, ino: ino.into(), text: text.into(), repairable: true });
    }

    /// Adds one that a repair leaves alone.
    pub fn add_hopeless(&mut self, kind: FindingKind, ino: impl Into<Option<Ino>>, text: impl Into<String>) {
        self.push(Finding { kind, ino: ino.into(), text: text.into(), repairable: false });
    }

    /// Adds one.
    pub fn push(&mut self, finding: Finding) {
        let count = self.counts.entry(finding.kind).or_default();
        *count += 1;
        if *count <= KEPT {
            self.kept.push(finding);
        }
    }

    /// How many there are of a kind.
    pub fn count(&self, kind: FindingKind) -> u64 {
        self.counts.get(&kind).copied().unwrap_or(0)
    }

    /// Whether nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.counts.keys().all(|kind| kind.is_waste())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_the_names_in_snake_case_and_the_page_explains_each() {
        let page = include_str!("../../../docs/fs-check.md");
        for kind in FindingKind::ALL {
            let name = format!("{kind:?}");
            let snake = name.chars().enumerate().fold(String::new(), |mut word, (at, letter)| {
                if at > 0 && letter.is_uppercase() {
                    word.push('_');
                }
                word.extend(letter.to_lowercase());
                word
            });
            assert_eq!(kind.word(), snake);
            assert!(page.contains(&format!("| `{snake}` |")), "docs/fs-check.md explains {snake}");
        }
    }

    #[test]
    fn findings_are_kept_in_bounded_number_and_waste_is_no_damage() {
        let mut findings = Findings::default();
        findings.add(FindingKind::WrittenFreeStripe, None, "waste");
        assert!(findings.is_clean());
        (0..KEPT + 5).for_each(|ino| findings.add(FindingKind::OrphanInode, Ino(ino), "lost"));
        assert_eq!(findings.count(FindingKind::OrphanInode), KEPT + 5);
        assert_eq!(findings.kept.len() as u64, KEPT + 1);
        assert!(!findings.is_clean());
    }
}
