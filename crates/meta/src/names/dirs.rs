//! Directories: the cookie of each name, and finding a name.
//!
//! An entry's key contains its cookie: 55 bits of a keyed hash of the name, and 8 bits that distinguish names
//! with the same hash. The cookie of a name never changes while the name exists, whatever is added or removed
//! beside it, so a listing can be continued at any time. The key of the hash is a secret of the file system,
//! so nobody can choose names that collide.

use super::Names;
use super::entries::Bucket;
use crate::NAME_MAX;
use crate::error::MetaError;
use crate::rows::{Entry, decode_entry_key, entry_key, entry_range};
use penstock_base::num::to_usize;
use penstock_base::{DecodeError, HashSet, Id128, Ino};
use rustix::io::Errno;
use siphasher::sip::SipHasher13;
use std::hash::Hasher;

/// Most names with the same hash in one directory.
pub(crate) const SAME_HASH: u64 = 256;

/// Result of looking for a name.
pub(crate) struct Found {
    /// The entry and its cookie; none if the name does not exist.
    pub(crate) entry: Option<(u64, Entry)>,
    /// A free cookie for the name; none if the name exists, or if all cookies of its hash are taken.
    pub(crate) free: Option<u64>,
}

/// Refuses byte strings that cannot be a name.
pub(crate) fn check_name(name: &[u8]) -> Result<(), MetaError> {
    match name {
        _ if name.len() > NAME_MAX => Err(Errno::NAMETOOLONG.into()),
        b"" | b"." | b".." => Err(Errno::INVAL.into()),
        _ if name.contains(&b'/') || name.contains(&0) => Err(Errno::INVAL.into()),
        _ => Ok(()),
    }
}

/// The first cookie of the bucket in which a name belongs, with the file system's secret.
pub(crate) fn first_cookie(secret: Id128, name: &[u8]) -> u64 {
    let mut hasher = SipHasher13::new_with_key(&secret.0);
    hasher.write(name);
    // The bucket at 0 is left free for `.` and `..`.
    let first = ((hasher.finish() >> 9).max(1)) << 8;
    assert!(first.is_multiple_of(SAME_HASH) && first < 1 << 63, "a bucket has {SAME_HASH} cookies");
    first
}

impl Names {
    /// Looks for a name in a directory.
    pub(crate) async fn find(&self, dir: Ino, name: &[u8]) -> Result<Found, MetaError> {
        let first = first_cookie(self.fs.borrow().secret, name);
        let mut free = first;
        for (cookie, entry) in self.bucket(dir, first).await? {
            if entry.name == name {
                return Ok(Found { entry: Some((cookie, entry)), free: None });
            }
            if cookie == free {
                free += 1;
            }
        }
        assert!((first..=first + SAME_HASH).contains(&free), "the first free cookie is in the bucket");
        Ok(Found { entry: None, free: (free < first + SAME_HASH).then_some(free) })
    }

    /// The entries whose names share a hash, from the cache or from their rows.
    async fn bucket(&self, dir: Ino, first: u64) -> Result<Bucket, MetaError> {
        if let Some(bucket) = self.entries.borrow_mut().bucket(dir, first) {
            return Ok(bucket);
        }
        let before = self.transactions.get();
        let (from, until) = entry_range(dir, first, first + SAME_HASH);
        let mut bucket = Bucket::new();
        for (key, value) in self.kv.scan(from, until, to_usize(SAME_HASH)).await? {
            bucket.push((decode_entry_key(&key)?.1, Entry::decode(&value)?));
        }
        if self.is_unchanged(before) {
            self.entries.borrow_mut().fill(dir, first, bucket.clone());
        }
        Ok(bucket)
    }

    /// Returns an existing name's entry and cookie. ENOENT if there is none.
    pub(crate) async fn entry(&self, dir: Ino, name: &[u8]) -> Result<(u64, Entry), MetaError> {
        if name.len() > NAME_MAX {
            return Err(Errno::NAMETOOLONG.into());
        }
        self.find(dir, name).await?.entry.ok_or_else(|| Errno::NOENT.into())
    }

    /// Returns the key for a new name. EEXIST if the name exists, ENOSPC if all cookies of its hash are
    /// taken.
    pub(crate) async fn new_entry_key(&self, dir: Ino, name: &[u8]) -> Result<Vec<u8>, MetaError> {
        check_name(name)?;
        let found = self.find(dir, name).await?;
        if found.entry.is_some() {
            return Err(Errno::EXIST.into());
        }
        Ok(entry_key(dir, found.free.ok_or(Errno::NOSPC)?))
    }

    /// True if `dir` is `inner` or one of its ancestors. Fails if damaged directories contain each other.
    pub(crate) async fn is_above(&self, dir: Ino, inner: Ino) -> Result<bool, MetaError> {
        let mut at = inner;
        let mut seen = HashSet::default();
        while at != dir {
            let parent = self.inode(at).await?.parent;
            if parent == at {
                return Ok(false);
            }
            if !seen.insert(at) {
                let why = "it is below itself";
                return Err(DecodeError::Bad { what: "directory", why }.into());
            }
            at = parent;
        }
        Ok(true)
    }
}

/// Encodes the row of a directory entry.
pub(crate) fn entry_row(ino: Ino, kind: u32, name: &[u8]) -> Vec<u8> {
    Entry { ino, kind, name: name.to_vec() }.encode()
}
