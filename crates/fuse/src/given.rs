//! The attributes and names that the kernel may use without asking, beside other mounts: it got them under a
//! lease.
//!
//! The kernel counts the time from when the thread that asked takes the reply, which may be a moment after
//! the reply was written. A notice in between changes nothing. So a notice is sent [`TAKEN`] after the last
//! reply.

use crate::attr::{TICKS, VALID};
use penstock_base::{FileId, HashMap};
use std::time::Duration;

/// The time within which the kernel takes a reply.
const TAKEN: Duration = Duration::from_millis(50);
/// Most names of a directory that are remembered. With more, all of them must expire.
const MOST_NAMES: usize = 4096;
/// The least number of inodes above which those are forgotten of which the kernel uses nothing any more.
const MANY: usize = 1024;

/// The kernel's part of one inode.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// The time when it last got something, names included.
    last: Duration,
    /// The names of a directory, and when the kernel last got them.
    names: HashMap<Box<[u8]>, Duration>,
    /// There are more than [`MOST_NAMES`], the last of them given then.
    more: Option<Duration>,
}

impl Given {
    /// The time from which a notice finds everything in the kernel. None if the kernel uses nothing any more.
    pub(crate) fn settled(&self, now: Duration) -> Option<Duration> {
        (now < ends(self.last)).then_some(self.last + TAKEN)
    }

    /// The names that the kernel may use, each to be told by a notice, and when they end without one. None
    /// for the names if there are too many.
    pub(crate) fn names(self, now: Duration) -> (Option<Vec<Box<[u8]>>>, Duration) {
        let last = self.names.values().copied().chain(self.more).max().unwrap_or_default();
        let used = self.names.into_iter().filter(|(_, given)| now < ends(*given)).map(|(name, _)| name);
        let all = self.more.is_none_or(|more| ends(more) <= now);
        (all.then(|| used.collect()), ends(last))
    }

    fn name(&mut self, name: &[u8], now: Duration) {
        self.last = now;
        if let Some(given) = self.names.get_mut(name) {
            *given = now;
            return;
        }
        if self.names.len() >= MOST_NAMES {
            self.names.retain(|_, given| now < ends(*given));
        }
        match self.names.len() < MOST_NAMES {
            true => drop(self.names.insert(name.into(), now)),
            false => self.more = Some(now),
        }
    }
}

/// The time when the kernel uses no more what it got at this time.
fn ends(given: Duration) -> Duration {
    given + VALID + TICKS
}

/// Everything that the kernel has, by inode.
#[derive(Debug, Default)]
pub(crate) struct AllGiven {
    inodes: HashMap<FileId, Given>,
    /// The number of inodes at which the table is looked through.
    many: usize,
}

impl AllGiven {
    /// The kernel gets the attributes of an inode.
    pub(crate) fn attributes(&mut self, file: FileId, now: Duration) {
        self.of(file, now).last = now;
    }

    /// The kernel gets a name of a directory.
    pub(crate) fn name(&mut self, dir: FileId, name: &[u8], now: Duration) {
        self.of(dir, now).name(name, now);
    }

    /// The time until which the kernel uses a name of a directory; none if it has not got it.
    pub(crate) fn name_ends(&self, dir: FileId, name: &[u8], now: Duration) -> Option<Duration> {
        let given = self.inodes.get(&dir)?;
        let last = given.names.get(name).copied().max(given.more)?;
        Some(ends(last)).filter(|end| now < *end)
    }

    /// Takes what the kernel has of an inode.
    pub(crate) fn take(&mut self, file: FileId) -> Option<Given> {
        self.inodes.remove(&file)
    }

    fn of(&mut self, file: FileId, now: Duration) -> &mut Given {
        if self.inodes.len() >= self.many.max(MANY) {
            self.inodes.retain(|_, given| now < ends(given.last));
            self.many = 2 * self.inodes.len();
        }
        self.inodes.entry(file).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId::of_numbers(0, 7);
    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn what_the_kernel_got_counts_until_it_has_expired() {
        let mut all = AllGiven::default();
        assert!(all.take(DIR).is_none());
        all.name(DIR, b"old", NOW);
        all.attributes(DIR, NOW + VALID);
        all.name(DIR, b"new", NOW + VALID);
        assert_eq!(all.name_ends(DIR, b"old", NOW + VALID), Some(NOW + VALID + TICKS));
        assert_eq!(all.name_ends(DIR, b"old", NOW + VALID + TICKS), None);
        assert_eq!(all.name_ends(DIR, b"none", NOW), None);
        let given = all.take(DIR).expect("it got something");
        assert!(all.take(DIR).is_none(), "it is taken");
        assert_eq!(given.settled(NOW + VALID), Some(NOW + VALID + TAKEN));
        assert_eq!(given.settled(NOW + 2 * VALID + TICKS), None);
        let (names, until) = given.names(NOW + VALID + TICKS);
        assert_eq!((names, until), (Some(vec![b"new".as_slice().into()]), NOW + 2 * VALID + TICKS));
    }

    #[test]
    fn too_many_names_must_expire_and_inodes_are_forgotten() {
        let mut all = AllGiven::default();
        (0..MOST_NAMES + 5).for_each(|number| all.name(DIR, number.to_string().as_bytes(), NOW));
        assert_eq!(all.inodes[&DIR].names.len(), MOST_NAMES);
        assert!(all.name_ends(DIR, b"any", NOW).is_some(), "it may be one of those left out");
        all.name(DIR, b"0", NOW + VALID);
        let (names, until) = all.take(DIR).expect("names").names(NOW + VALID);
        assert_eq!((names, until), (None, NOW + 2 * VALID + TICKS));
        (0..MOST_NAMES + 5).for_each(|number| all.name(DIR, number.to_string().as_bytes(), NOW));
        all.name(DIR, b"later", ends(NOW));
        let (names, _) = all.take(DIR).expect("names").names(ends(NOW));
        assert_eq!(names.map(|names| names.len()), Some(1), "all others have expired");
        let file = |ino: usize| FileId::of_numbers(0, ino as u64);
        (0..MANY).for_each(|ino| all.attributes(file(ino), NOW));
        all.attributes(file(MANY), ends(NOW));
        assert_eq!(all.inodes.len(), 1);
    }
}
