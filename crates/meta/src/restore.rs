//! The name space's part of a restore of all rows from a copy ([`penstock_chunk::copies`]).
//!
//! Sessions and stored results are not copied: every session ends with the store that is lost. Numbers that
//! were given since the copy must not be given again, and are not known: as many as nobody gives in the time
//! between two copies are left out.
//!
//! A stack without names has no row of the file system. The file of its newer blocks gets a number that the
//! stack with the names has reserved durably before ([`reserve_for_newer`]).

use crate::error::MetaError;
use crate::names::INO_RUN;
use crate::rows::{FsRow, Home, StoreRow, decode_gone, encode_gone, fs_key, gone_key, store_key};
use crate::{LAST_INO, ROOT, store};
use penstock_base::num::number_by_time;
use penstock_base::{DecodeError, Ino, TargetId};
use penstock_chunk::copies::Names;
use penstock_kv::{Kv, WriteSet};
use penstock_session::rows::{LAST_SESSION, all_results, all_sessions};
use std::collections::BTreeSet;

/// Inode numbers that are left out.
const INODES_SINCE: u64 = 1 << 32;
/// Numbers of sessions that are left out.
const SESSIONS_SINCE: u64 = 1 << 32;
/// Numbers in the queue of work that are left out: each opening since may have left out 2^32 of them.
const QUEUED_SINCE: u64 = 1 << 48;
/// Inode numbers that are reserved for the files of newer blocks: many more than there are targets, so that
/// no opening takes these files for new ones that a crash has lost.
const FOR_NEWER: u64 = 16 * INO_RUN;

/// True for a row that a copy has.
pub fn is_copied(key: &[u8]) -> bool {
    let within = |(from, until): (Vec<u8>, Vec<u8>)| from.as_slice() <= key && key < until.as_slice();
    !within(all_results()) && !within(all_sessions())
}

/// The rows of a name space on their way from a copy into a new store.
pub struct RestoredNames {
    home: Home,
    kept_stripes: u16,
    /// The number of the file of newer blocks in a stack without names.
    newer: Ino,
    /// Numbers of the queue up to this one may have been given, by the time of the restore.
    queued: u64,
    store: Option<StoreRow>,
    fs: Option<FsRow>,
    forgotten: BTreeSet<TargetId>,
}

impl RestoredNames {
    /// Those of a store on these arrays, whose target does not use so many stripes. `newer` is the number of
    /// the file of newer blocks in a stack without names ([`number_of_newer`]), and `now_s` the time in
    /// seconds since 1970: a second restore from one copy goes on behind the numbers that the first one has
    /// given.
    pub fn new(home: Home, kept_stripes: u16, newer: Ino, now_s: u32) -> Self {
        // As many numbers a second as an opening leaves out, and far below the highest that a row may have.
        let queued = number_by_time(now_s);
        Self { home, kept_stripes, newer, queued, store: None, fs: None, forgotten: BTreeSet::new() }
    }

    /// The targets that are forgotten: those of the rows that were seen, and those of [`Self::forget`].
    pub fn forgotten(&self) -> &BTreeSet<TargetId> {
        &self.forgotten
    }

    /// These targets are forgotten too: since the copy was made, an administrator may have given them up.
    #[must_use]
    pub fn forget(mut self, targets: &BTreeSet<TargetId>) -> Self {
        self.forgotten.extend(targets);
        self
    }

    /// The highest number that counts as given.
    fn reserved(fs: &FsRow) -> u64 {
        (fs.reserved_ino + INODES_SINCE).min(LAST_INO.0)
    }

    /// The rows by which a start knows the store.
    fn rows(&self) -> Result<(&StoreRow, Option<&FsRow>), DecodeError> {
        let why = "without the row of the store, or that of the file system";
        let has_all = self.fs.is_some() == self.home.has_names();
        let store = self.store.as_ref().filter(|_| has_all);
        Ok((store.ok_or(DecodeError::Bad { what: "copy of the map", why })?, self.fs.as_ref()))
    }
}

/// The number of the file that gets the newer blocks of a target without names, with inode numbers reserved
/// up to `reserved` by the stack with the names.
pub fn number_of_newer(reserved: u64, target: TargetId) -> Ino {
    Ino(reserved + 1 + u64::from(target.0))
}

/// The row of the file system.
async fn fs_row(kv: &dyn Kv) -> Result<FsRow, MetaError> {
    let row = kv.get(fs_key()).await?.ok_or(store::LACKING)?;
    Ok(FsRow::decode(&row)?)
}

/// The highest inode number that the store with the names has reserved.
pub async fn reserved_inodes(kv: &dyn Kv) -> Result<u64, MetaError> {
    Ok(fs_row(kv).await?.reserved_ino)
}

/// Reserves numbers for the files of newer blocks of all targets, durably, in the store with the names.
/// Returns what was reserved before, for [`number_of_newer`].
pub async fn reserve_for_newer(kv: &dyn Kv) -> Result<u64, MetaError> {
    let fs = fs_row(kv).await?;
    let reserved = fs.reserved_ino;
    if !(ROOT.0..=LAST_INO.0 - FOR_NEWER).contains(&reserved) {
        let why = "no inode numbers are left";
        return Err(DecodeError::Bad { what: "row of the file system", why }.into());
    }
    let mut writes = WriteSet::new();
    writes.put(fs_key(), FsRow { reserved_ino: reserved + FOR_NEWER, ..fs }.encode()).reclaims();
    kv.commit_durable(writes).await?;
    Ok(reserved)
}

impl Names for RestoredNames {
    fn row(&mut self, key: &[u8], value: &[u8]) -> Result<Option<Vec<u8>>, DecodeError> {
        if key == store_key() {
            let store = StoreRow::decode(value)?;
            if store.home != self.home || store.kept_stripes != self.kept_stripes {
                return Err(DecodeError::Bad { what: "copy of the map", why: "of other arrays" });
            }
            self.store = Some(store);
            return Ok(None);
        }
        if key == fs_key() {
            let fs = FsRow::decode(value)?;
            if !(ROOT.0..LAST_INO.0).contains(&fs.reserved_ino) {
                return Err(DecodeError::Bad { what: "copy of the map", why: "no inode number is left" });
            }
            self.fs = Some(fs);
            return Ok(None);
        }
        if key == gone_key() {
            self.forgotten.extend(decode_gone(value)?);
            return Ok(None);
        }
        Ok(is_copied(key).then(|| value.to_vec()))
    }

    fn number(&self) -> Result<Ino, DecodeError> {
        // Rows that were copied later may have numbers behind the ones that were reserved first.
        Ok(self.rows()?.1.map_or(self.newer, |fs| Ino(Self::reserved(fs))))
    }

    fn loans(&self) -> Option<u64> {
        self.home.is_one_of_several.then_some(self.queued)
    }

    fn last(&self) -> Result<WriteSet, DecodeError> {
        let (store, fs) = self.rows()?;
        let mut writes = WriteSet::new();
        writes.put(store_key(), StoreRow { is_unrepaired: true, ..store.clone() }.encode());
        if let Some(fs) = fs {
            let last_queued = match self.home.is_one_of_several {
                true => fs.last_queued.saturating_add(QUEUED_SINCE).max(self.queued),
                false => fs.last_queued,
            };
            let fs = FsRow {
                reserved_ino: Self::reserved(fs),
                last_session: (fs.last_session + SESSIONS_SINCE).min(LAST_SESSION),
                last_queued,
                ..fs.clone()
            };
            writes.put(fs_key(), fs.encode());
        }
        if !self.forgotten.is_empty() {
            writes.put(gone_key(), encode_gone(&self.forgotten));
        }
        Ok(writes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rows::inode_key;
    use penstock_base::{ArrayId, Id128, StackNo};

    fn fs(last_queued: u64) -> FsRow {
        FsRow {
            id: Id128([1; 16]),
            name: "main".into(),
            created_ns: 5,
            secret: Id128([2; 16]),
            reserved_ino: ROOT.0 + 4096,
            last_session: 7,
            chunk_blocks: 256,
            last_queued,
        }
    }

    #[test]
    fn numbers_go_on_behind_those_that_may_have_been_given() {
        let fs = fs(0);
        let home = Home { data: ArrayId(Id128([3; 16])), ..Home::default() };
        let store = StoreRow { home, kept_stripes: 2, ..StoreRow::default() };
        let mut names = RestoredNames::new(home, 2, Ino(0), 5);
        assert!(names.number().is_err() && names.last().is_err());
        assert_eq!(names.row(&store_key(), &store.encode()), Ok(None));
        assert!(names.last().is_err());
        assert_eq!(names.row(&fs_key(), &fs.encode()), Ok(None));
        assert_eq!(names.row(&inode_key(ROOT), &[1]), Ok(Some(vec![1])));
        assert_eq!(names.number(), Ok(Ino(ROOT.0 + 4096 + INODES_SINCE)));
        let rows: Vec<_> =
            names.last().unwrap().changes().map(|(_, value)| value.unwrap().to_vec()).collect();
        assert_eq!(StoreRow::decode(&rows[0]), Ok(StoreRow { is_unrepaired: true, ..store.clone() }));
        let next = FsRow::decode(&rows[1]).unwrap();
        assert!(next.reserved_ino >= names.number().unwrap().0 && next.last_session > 7);
        assert_eq!(FsRow { reserved_ino: fs.reserved_ino, last_session: 7, ..next }, fs);
        // Also at the end of the numbers.
        let full = FsRow { reserved_ino: LAST_INO.0 - 1, last_session: LAST_SESSION, ..fs.clone() };
        assert_eq!(names.row(&fs_key(), &full.encode()), Ok(None));
        assert!(names.last().is_ok());
        let none = FsRow { reserved_ino: LAST_INO.0, ..fs };
        assert!(names.row(&fs_key(), &none.encode()).is_err());
        for (home, kept_stripes) in [(Home::default(), 2), (home, 4)] {
            let foreign =
                RestoredNames::new(home, kept_stripes, Ino(0), 5).row(&store_key(), &store.encode());
            assert!(foreign.unwrap_err().to_string().contains("of other arrays"));
        }
        for key in [all_results().0, all_sessions().0] {
            assert!(!is_copied(&key), "{key:?}");
        }
        assert!(is_copied(&store_key()) && is_copied(&[0x20]));
    }

    /// Regression: the number was above what a row of the file system may have, and the store did not start.
    #[test]
    fn a_later_restore_goes_on_behind_the_numbers_of_an_earlier_one() {
        let home = Home { is_one_of_several: true, ..Home::default() };
        let store = StoreRow { features: home.features(), home, kept_stripes: 2, ..StoreRow::default() };
        let fs = fs(9);
        let queued = |now_s| {
            let mut names = RestoredNames::new(home, 2, Ino(0), now_s);
            assert_eq!(names.row(&store_key(), &store.encode()), Ok(None));
            assert_eq!(names.row(&fs_key(), &fs.encode()), Ok(None));
            let last = names.last().unwrap();
            let rows: Vec<_> = last.changes().map(|(_, value)| value.unwrap().to_vec()).collect();
            FsRow::decode(&rows[1]).unwrap().last_queued
        };
        assert_eq!(queued(0), 9 + QUEUED_SINCE, "the clock is wrong");
        let (one, next) = (queued(1_800_000_000), queued(1_800_000_060));
        assert!(one > QUEUED_SINCE && next == one + (60 << 32), "{one} {next}");
        assert!(queued(u32::MAX) < 1 << 61);
        let loans = |now_s| RestoredNames::new(home, 2, Ino(0), now_s).loans().unwrap();
        assert!(loans(1_800_000_060) > loans(1_800_000_000));
    }

    #[test]
    fn a_stack_without_names_needs_no_row_of_the_file_system() {
        let home =
            Home { stack: StackNo(1), target: TargetId(1), is_one_of_several: true, ..Home::default() };
        let store = StoreRow { features: home.features(), home, kept_stripes: 2, ..StoreRow::default() };
        let mut names = RestoredNames::new(home, 2, number_of_newer(9000, TargetId(1)), 5);
        assert!(names.number().is_err() && names.last().is_err());
        assert_eq!(names.row(&store_key(), &store.encode()), Ok(None));
        assert_eq!(names.number(), Ok(Ino(9002)));
        let rows: Vec<_> =
            names.last().unwrap().changes().map(|(_, value)| value.unwrap().to_vec()).collect();
        assert_eq!(rows, [StoreRow { is_unrepaired: true, ..store }.encode()]);
    }
}
