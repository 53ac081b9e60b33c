//! Findings of a file-system check: a closed list of kinds, and a collection of bounded size.
//!
//! docs/fs-check.md describes the meaning and the repair of each kind.

use crate::ids::Ino;
use std::collections::BTreeMap;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $word:literal,)*) => {
        /// A kind of finding. A repair takes the kinds in this order: a kind comes after all kinds whose
        /// repair it relies on.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum FindingKind { $($(#[$doc])* $name,)* }

        impl FindingKind {
            /// Every kind.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The kind in snake case, as documents and JSON print it.
            pub fn word(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }
        }
    };
}

kinds! {
    /// The row of a loan cannot be read, at the lender or at the borrower.
    BadLoanRow "bad_loan_row",
    /// Lender and borrower do not know a loan alike.
    LoanDisagrees "loan_disagrees",
    /// A block that belongs to a file is marked as free.
    BlockNotMarked "block_not_marked",
    /// An allocation group's row cannot be read, or names blocks that the volume does not have.
    BadGroupRow "bad_group_row",
    /// Inode numbers in use lie beyond the reserved range, so new inodes could get them again.
    InodeReservationTooLow "inode_reservation_too_low",
    /// Session numbers in use lie beyond the counter, so new sessions could get them again.
    SessionReservationTooLow "session_reservation_too_low",
    /// A row that this release does not know.
    UnknownRow "unknown_row",
    /// The root directory does not exist or is not a directory.
    MissingRoot "missing_root",
    /// An inode's row contains another number than its key. First of the inodes: repairs of others need the
    /// root's.
    WrongInodeNumber "wrong_inode_number",
    /// An inode's row cannot be read.
    BadInodeRow "bad_inode_row",
    /// A directory entry's row cannot be read.
    BadEntryRow "bad_entry_row",
    /// An extended attribute's row cannot be read, or its value is too long.
    BadXattrRow "bad_xattr_row",
    /// A row of the queue of removed files cannot be read.
    BadQueueRow "bad_queue_row",
    /// A session's row or one of its stored results cannot be read, or has the wrong key.
    BadSessionRow "bad_session_row",
    /// A chunk's map row cannot be read.
    BadMapRow "bad_map_row",
    /// An extent goes beyond its chunk.
    ExtentBeyondChunk "extent_beyond_chunk",
    /// Chunks, extended attributes or entries exist of an inode that does not exist.
    MissingInode "missing_inode",
    /// A name points to an inode that does not exist.
    DanglingEntry "dangling_entry",
    /// An entry's name is not allowed, such as an empty one.
    BadEntryName "bad_entry_name",
    /// An entry's key does not match the hash of its name, so a lookup does not find it.
    MisplacedEntry "misplaced_entry",
    /// A directory has the same name twice.
    DuplicateName "duplicate_name",
    /// An entry records another file type than its inode.
    WrongEntryKind "wrong_entry_kind",
    /// An entry belongs to an inode that is not a directory.
    EntryWithoutDirectory "entry_without_directory",
    /// A directory has more than one name.
    DirectoryExtraName "directory_extra_name",
    /// Directories contain each other and cannot be reached from the root.
    DirectoryCycle "directory_cycle",
    /// An inode has no name and was not removed.
    OrphanInode "orphan_inode",
    /// A file with names is in the queue of removed files.
    NamedAndQueued "named_and_queued",
    /// The queue of removed files names an inode that does not exist.
    QueuedWithoutInode "queued_without_inode",
    /// The form in which an inode stores its data does not suit its file type.
    WrongInodeData "wrong_inode_data",
    /// A file is longer than the limit, or a symbolic link's size is not the length of its target.
    WrongSize "wrong_size",
    /// An inode's chunk size is not the target's.
    WrongLayout "wrong_layout",
    /// A directory records another parent than the directory that contains its name.
    WrongParent "wrong_parent",
    /// A link count is not the number of names.
    WrongLinkCount "wrong_link_count",
    /// A directory's count of entries is not the number of its entries.
    WrongEntryCount "wrong_entry_count",
    /// An extent has no blocks.
    EmptyExtent "empty_extent",
    /// An extent goes beyond the volume.
    ExtentBeyondVolume "extent_beyond_volume",
    /// A block belongs to two chunks, or twice to one.
    DoubleOwnedBlock "double_owned_block",
    /// An inode that is not a regular file has chunks.
    ChunksOfNonFile "chunks_of_non_file",
    /// A chunk lies beyond the largest offset that a file can have.
    ChunkBeyondLimit "chunk_beyond_limit",
    /// The row of a file on a target, or of an account, cannot be read.
    BadFileRow "bad_file_row",
    /// The row of a file on a target disagrees with its chunks or with its inode.
    WrongFileRow "wrong_file_row",
    /// The blocks counted for an owner are not those of the owner's files.
    WrongAccount "wrong_account",
    /// A block is marked as used and belongs to nothing.
    BlockNotOwned "block_not_owned",
    /// The counts of free space in memory are wrong.
    WrongFreeCount "wrong_free_count",
    /// A stripe counts as written although no block in it is allocated.
    WrittenFreeStripe "written_free_stripe",
}

impl FindingKind {
    /// True if the finding only costs space. A check with no other findings is clean.
    pub fn is_waste(self) -> bool {
        self == Self::WrittenFreeStripe
    }
}

impl std::fmt::Display for FindingKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.word())
    }
}

/// One inconsistency that a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The kind of inconsistency.
    pub kind: FindingKind,
    /// The inode concerned; none if the finding is not about one inode.
    pub ino: Option<Ino>,
    /// A sentence for people that names the rows, blocks or names concerned.
    pub text: String,
    /// True if a repair fixes it.
    pub repairable: bool,
}

/// The number of findings of each kind that are kept; further ones are only counted.
const KEPT: u64 = 1000;

/// Findings: a bounded number of each kind is kept, all are counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The first 1000 findings of each kind, in the order in which they were found.
    pub kept: Vec<Finding>,
    /// The number of findings of each kind.
    pub counts: BTreeMap<FindingKind, u64>,
}

impl Findings {
    /// Adds a finding that a repair fixes.
    pub fn add(&mut self, kind: FindingKind, ino: impl Into<Option<Ino>>, text: impl Into<String>) {
        self.push(Finding { kind, ino: ino.into(), text: text.into(), repairable: true });
    }

    /// Adds a finding that a repair leaves as it is.
    pub fn add_hopeless(&mut self, kind: FindingKind, ino: impl Into<Option<Ino>>, text: impl Into<String>) {
        self.push(Finding { kind, ino: ino.into(), text: text.into(), repairable: false });
    }

    /// Counts a finding, and keeps it if it is among the first 1000 of its kind.
    pub fn push(&mut self, finding: Finding) {
        let count = self.counts.entry(finding.kind).or_default();
        *count += 1;
        if *count <= KEPT {
            self.kept.push(finding);
        }
    }

    /// The number of findings of a kind.
    pub fn count(&self, kind: FindingKind) -> u64 {
        self.counts.get(&kind).copied().unwrap_or(0)
    }

    /// True if there are no findings, except those that only cost space.
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
