//! Checks of directory entries.

use super::{Diagnosis, Fix, Stage};
use crate::ROOT;
use crate::inode::DIRECTORY;
use crate::names::{SAME_HASH, check_name, first_cookie};
use crate::rows::{Entry, decode_entry_key, owner_of};
use penstock_base::{FindingKind as Kind, Ino};

/// Names in the bucket (directory and hash) that is being read.
#[derive(Default)]
pub(super) struct Bucket {
    place: (Ino, u64),
    names: Vec<Vec<u8>>,
}

impl Diagnosis {
    /// Checks an entry, after all rows of inodes and entries have been counted.
    pub(crate) fn see_entry(&mut self, key: &[u8], value: &[u8]) {
        self.enter(Stage::Entries);
        assert!(self.entries > 0, "entries are counted before they are checked");
        let read = owner_of(key, 4, true).and_then(|_| Ok((decode_entry_key(key)?, Entry::decode(value)?)));
        let ((dir, cookie), entry) = match read {
            Ok(row) => row,
            Err(error) => {
                let known = self.unreadable(Kind::BadEntryRow, key, &error, Fix::Keep(key.to_vec()));
                if let (false, Ok((dir, _))) = (known, decode_entry_key(key)) {
                    self.trace(dir).unsure = true;
                }
                return;
            }
        };
        let ino = entry.ino;
        let drop_it = Fix::Drop(key.to_vec());
        let name = String::from_utf8_lossy(&entry.name).into_owned();
        let holds = self.trace(dir).known_dir();
        if holds == Some(false) {
            let text = format!("the name {name:?} is in inode {dir}, which is no directory");
            return self.wrong(Kind::EntryWithoutDirectory, ino, text, drop_it);
        }
        if check_name(&entry.name).is_err() {
            let text = format!("{name:?} in directory {dir} can be no name");
            return self.wrong(Kind::BadEntryName, ino, text, drop_it);
        }
        let target = self.traces.get(&ino);
        if target.is_none_or(|trace| !trace.is_known() && !trace.has_data()) && ino != ROOT {
            let text = format!("{name:?} in directory {dir} is inode {ino}, which does not exist");
            return self.wrong(Kind::DanglingEntry, ino, text, drop_it);
        }
        if cookie / SAME_HASH * SAME_HASH != first_cookie(self.secret, &entry.name) {
            let text = format!("{name:?} in directory {dir} is not where it is looked for");
            self.wrong(Kind::MisplacedEntry, ino, text, Fix::Rehome(dir, cookie));
        }
        if self.bucket.place != (dir, cookie / SAME_HASH) {
            self.bucket = Bucket { place: (dir, cookie / SAME_HASH), names: Vec::new() };
        }
        if self.bucket.names.contains(&entry.name) {
            let text = format!("directory {dir} has the name {name:?} twice");
            return self.wrong(Kind::DuplicateName, ino, text, drop_it);
        }
        self.bucket.names.push(entry.name.clone());
        let row = self.traces.get(&ino).and_then(|trace| trace.row);
        if let Some(row) = row.filter(|row| row.type_bits != entry.kind) {
            let text = format!("{name:?} in directory {dir} says another type than inode {ino}");
            let right = Entry { kind: row.type_bits, ..entry.clone() }.encode();
            self.wrong(Kind::WrongEntryKind, ino, text, Fix::Put(key.to_vec(), right));
        }
        match row.map_or(entry.kind, |row| row.type_bits) == DIRECTORY {
            true => {
                self.trace(ino).holders.push((dir, cookie));
                self.trace(dir).subdirs += 1;
            }
            false => self.trace(ino).names += 1,
        }
    }
}
