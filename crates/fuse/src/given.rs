//! The attributes and names that the kernel may use without asking, beside other mounts: it got them under a
//! lease.
//!
//! The kernel counts the time from when the thread that asked takes the reply, which may be a moment after
//! the reply was written. A notice in between changes nothing. So a notice is sent [`TAKEN`] after the last
//! reply.
//!
//! A part that the kernel is told to forget counts as given until that has ended. A rename may move a name
//! meanwhile: the notice for the old one finds nothing, so the new one is told too.

use crate::attr::{TICKS, VALID};
use penstock_base::{Env, FileId, HashMap};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

/// A name in a directory.
pub(crate) type Name = (FileId, Box<[u8]>);

/// The time within which the kernel takes a reply.
const TAKEN: Duration = Duration::from_millis(50);
/// Most names of a directory that are remembered. With more, all of them must expire.
const MOST_NAMES: usize = 4096;
/// The least number of inodes above which those are forgotten of which the kernel uses nothing any more.
const MANY: usize = 1024;

/// The kernel's part of one inode.
#[derive(Debug, Default)]
struct Given {
    /// The time when it last got something, names included.
    last: Duration,
    /// The names of a directory, and when the kernel last got them.
    names: HashMap<Box<[u8]>, Duration>,
    /// There are more than [`MOST_NAMES`], the last of them given then.
    more: Option<Duration>,
}

impl Given {
    /// The time from which a notice finds everything in the kernel. None if the kernel uses nothing any more.
    fn settled(&self, now: Duration) -> Option<Duration> {
        (now < ends(self.last)).then_some(self.last + TAKEN)
    }

    /// The names that the kernel may use, each to be told by a notice, and when they end without one. None
    /// for the names if there are too many.
    fn names(&self, now: Duration) -> (Option<Vec<Box<[u8]>>>, Duration) {
        let last = self.names.values().copied().chain(self.more).max().unwrap_or_default();
        let used = self.names.iter().filter(|(_, given)| now < ends(**given)).map(|(name, _)| name.clone());
        let all = self.more.is_none_or(|more| ends(more) <= now);
        (all.then(|| used.collect()), ends(last))
    }

    /// The time until which the kernel uses a name; none if it has not got it.
    fn name_ends(&self, name: &[u8], now: Duration) -> Option<Duration> {
        let last = self.names.get(name).copied().max(self.more)?;
        Some(ends(last)).filter(|end| now < *end)
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

/// The part of one inode that the kernel is being told to forget.
#[derive(Debug)]
struct Forgotten {
    file: FileId,
    given: Given,
    /// The places to which renames have moved names of it since.
    moved: Vec<Name>,
}

/// Everything that the kernel has, by inode, at times that the caller says.
#[derive(Debug, Default)]
struct Tables {
    inodes: HashMap<FileId, Given>,
    /// The parts that the kernel is being told to forget, by numbers of their own.
    forgotten: BTreeMap<u64, Forgotten>,
    /// The last of these numbers.
    last: u64,
    /// The number of inodes at which the table is looked through.
    many: usize,
}

impl Tables {
    /// The kernel gets the attributes of an inode.
    fn attributes(&mut self, file: FileId, now: Duration) {
        self.of(file, now).last = now;
    }

    /// The kernel gets a name of a directory.
    fn name(&mut self, dir: FileId, name: &[u8], now: Duration) {
        self.of(dir, now).name(name, now);
    }

    /// The time until which the kernel uses a name of a directory; none if it has not got it.
    fn name_ends(&self, dir: FileId, name: &[u8], now: Duration) -> Option<Duration> {
        let forgotten = self.forgotten.values().filter(|forgotten| forgotten.file == dir);
        let all = self.inodes.get(&dir).into_iter().chain(forgotten.map(|forgotten| &forgotten.given));
        all.filter_map(|given| given.name_ends(name, now)).max()
    }

    /// True if the kernel uses a name that it is not being told to forget.
    fn has_name(&self, dir: FileId, name: &[u8], now: Duration) -> bool {
        self.inodes.get(&dir).is_some_and(|given| given.name_ends(name, now).is_some())
    }

    /// A rename moves a name. Whoever tells the kernel to forget the old one tells it to forget the new one.
    fn moves(&mut self, (dir, name): (FileId, &[u8]), (to, new): (FileId, &[u8]), now: Duration) {
        for forgotten in self.forgotten.values_mut().filter(|forgotten| forgotten.file == dir) {
            let is_moved = forgotten.moved.iter().any(|(other, moved)| *other == dir && **moved == *name);
            if is_moved || forgotten.given.name_ends(name, now).is_some() {
                forgotten.moved.push((to, new.into()));
            }
        }
    }

    /// The kernel is told from now on to forget what it has of an inode. Returns a number for what follows;
    /// none if it has nothing.
    fn forget(&mut self, file: FileId) -> Option<u64> {
        let given = self.inodes.remove(&file)?;
        self.last += 1;
        self.forgotten.insert(self.last, Forgotten { file, given, moved: Vec::new() });
        Some(self.last)
    }

    /// The part with this number.
    fn forgotten(&self, number: u64) -> &Given {
        &self.forgotten[&number].given
    }

    /// Takes the names to which such names were moved since.
    fn take_moved(&mut self, number: u64) -> Vec<Name> {
        std::mem::take(&mut self.forgotten.get_mut(&number).expect("it has not ended").moved)
    }

    /// The kernel has forgotten it, or nobody waits any more.
    fn end(&mut self, number: u64) {
        self.forgotten.remove(&number).expect("it ends once");
    }

    fn of(&mut self, file: FileId, now: Duration) -> &mut Given {
        if self.inodes.len() >= self.many.max(MANY) {
            self.inodes.retain(|_, given| now < ends(given.last));
            self.many = 2 * self.inodes.len();
        }
        self.inodes.entry(file).or_default()
    }
}

/// Everything that the kernel has.
pub(crate) struct AllGiven {
    env: Env,
    tables: RefCell<Tables>,
    /// Names that renames move now.
    moving: RefCell<Vec<Name>>,
}

impl AllGiven {
    pub(crate) fn new(env: &Env) -> Self {
        Self { env: env.clone(), tables: RefCell::default(), moving: RefCell::default() }
    }

    /// The kernel gets the attributes of an inode under a lease.
    pub(crate) fn attributes(&self, file: FileId) {
        self.tables.borrow_mut().attributes(file, self.env.now());
    }

    /// The kernel gets a name of a directory under a lease.
    pub(crate) fn name(&self, dir: FileId, name: &[u8]) {
        self.tables.borrow_mut().name(dir, name, self.env.now());
    }

    /// The time until which the kernel uses a name of a directory; none if it has not got it.
    pub(crate) fn name_ends(&self, dir: FileId, name: &[u8]) -> Option<Duration> {
        self.tables.borrow().name_ends(dir, name, self.env.now())
    }

    /// True if the kernel uses a name that it is not being told to forget.
    pub(crate) fn has_name(&self, dir: FileId, name: &[u8]) -> bool {
        self.tables.borrow().has_name(dir, name, self.env.now())
    }

    /// A rename moves a name in the kernel. Both directories are locked there until it is answered.
    pub(crate) fn moves(&self, old: (FileId, &[u8]), new: (FileId, &[u8])) {
        self.tables.borrow_mut().moves(old, new, self.env.now());
    }

    /// Begins a move of names by a rename. The kernel gets none of them until the result is dropped.
    pub(crate) fn names_move<'a>(&'a self, names: &[(FileId, &[u8])]) -> NamesMove<'a> {
        let names: Vec<_> = names.iter().map(|(dir, name)| (*dir, (*name).into())).collect();
        self.moving.borrow_mut().extend(names.iter().cloned());
        NamesMove { moving: &self.moving, names }
    }

    /// True if a rename moves this name now.
    pub(crate) fn does_move(&self, dir: FileId, name: &[u8]) -> bool {
        self.moving.borrow().iter().any(|(other, moved)| *other == dir && **moved == *name)
    }

    /// The kernel is told from now on to forget what it has of an inode. None if it has nothing.
    pub(crate) fn forget(&self, file: FileId) -> Option<Forgetting<'_>> {
        let number = self.tables.borrow_mut().forget(file)?;
        Some(Forgetting { of: self, number })
    }
}

/// Names that a rename moves, until this is dropped.
pub(crate) struct NamesMove<'a> {
    moving: &'a RefCell<Vec<Name>>,
    names: Vec<Name>,
}

impl Drop for NamesMove<'_> {
    fn drop(&mut self) {
        let mut moving = self.moving.borrow_mut();
        for name in &self.names {
            let at = moving.iter().position(|other| other == name).expect("it moves until now");
            moving.swap_remove(at);
        }
    }
}

/// The kernel is told to forget a part of what it was given, until this is dropped.
pub(crate) struct Forgetting<'a> {
    of: &'a AllGiven,
    number: u64,
}

impl Forgetting<'_> {
    /// The time from which a notice finds everything in the kernel. None if the kernel uses nothing any more.
    pub(crate) fn settled(&self) -> Option<Duration> {
        self.of.tables.borrow().forgotten(self.number).settled(self.of.env.now())
    }

    /// The names that the kernel may use, each to be told by a notice, and when they end without one. None
    /// for the names if there are too many.
    pub(crate) fn names(&self) -> (Option<Vec<Box<[u8]>>>, Duration) {
        self.of.tables.borrow().forgotten(self.number).names(self.of.env.now())
    }

    /// Takes the names to which renames have moved such names since.
    pub(crate) fn take_moved(&self) -> Vec<Name> {
        self.of.tables.borrow_mut().take_moved(self.number)
    }
}

impl Drop for Forgetting<'_> {
    fn drop(&mut self) {
        self.of.tables.borrow_mut().end(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIR: FileId = FileId::of_numbers(0, 7);
    const NOW: Duration = Duration::from_secs(100);

    #[test]
    fn what_the_kernel_got_counts_until_it_has_expired() {
        let mut all = Tables::default();
        assert!(all.forget(DIR).is_none());
        all.name(DIR, b"old", NOW);
        all.attributes(DIR, NOW + VALID);
        all.name(DIR, b"new", NOW + VALID);
        assert_eq!(all.name_ends(DIR, b"old", NOW + VALID), Some(NOW + VALID + TICKS));
        assert_eq!(all.name_ends(DIR, b"old", NOW + VALID + TICKS), None);
        assert_eq!(all.name_ends(DIR, b"none", NOW), None);
        let number = all.forget(DIR).expect("it got something");
        assert!(all.forget(DIR).is_none(), "it is being forgotten");
        let given = all.forgotten(number);
        assert_eq!(given.settled(NOW + VALID), Some(NOW + VALID + TAKEN));
        assert_eq!(given.settled(NOW + 2 * VALID + TICKS), None);
        let (names, until) = given.names(NOW + VALID + TICKS);
        assert_eq!((names, until), (Some(vec![b"new".as_slice().into()]), NOW + 2 * VALID + TICKS));
    }

    /// Regression: a name counted as forgotten before the kernel had been told, and was moved. The kernel
    /// used the new name, of which nobody told it.
    #[test]
    fn a_name_counts_until_the_kernel_has_forgotten_it_wherever_it_is_moved() {
        let mut all = Tables::default();
        all.name(DIR, b"old", NOW);
        assert!(all.has_name(DIR, b"old", NOW));
        let number = all.forget(DIR).expect("a name");
        assert!(!all.has_name(DIR, b"old", NOW));
        assert_eq!(all.name_ends(DIR, b"old", NOW), Some(NOW + VALID + TICKS));
        let other = FileId::of_numbers(0, 8);
        all.moves((DIR, b"none"), (DIR, b"new"), NOW);
        all.moves((other, b"old"), (DIR, b"new"), NOW);
        assert!(all.take_moved(number).is_empty());
        all.moves((DIR, b"old"), (DIR, b"new"), NOW);
        all.moves((DIR, b"new"), (other, b"newer"), NOW);
        let moved = all.take_moved(number);
        assert_eq!(moved, [(DIR, b"new".as_slice().into()), (other, b"newer".as_slice().into())]);
        all.end(number);
        assert_eq!(all.name_ends(DIR, b"old", NOW), None);
        all.moves((DIR, b"old"), (DIR, b"new"), NOW);
    }

    #[test]
    fn too_many_names_must_expire_and_inodes_are_forgotten() {
        let mut all = Tables::default();
        (0..MOST_NAMES + 5).for_each(|number| all.name(DIR, number.to_string().as_bytes(), NOW));
        assert_eq!(all.inodes[&DIR].names.len(), MOST_NAMES);
        assert!(all.name_ends(DIR, b"any", NOW).is_some(), "it may be one of those left out");
        all.name(DIR, b"0", NOW + VALID);
        let number = all.forget(DIR).expect("names");
        let (names, until) = all.forgotten(number).names(NOW + VALID);
        assert_eq!((names, until), (None, NOW + 2 * VALID + TICKS));
        (0..MOST_NAMES + 5).for_each(|number| all.name(DIR, number.to_string().as_bytes(), NOW));
        all.name(DIR, b"later", ends(NOW));
        let number = all.forget(DIR).expect("names");
        let (names, _) = all.forgotten(number).names(ends(NOW));
        assert_eq!(names.map(|names| names.len()), Some(1), "all others have expired");
        let file = |ino: usize| FileId::of_numbers(0, ino as u64);
        (0..MANY).for_each(|ino| all.attributes(file(ino), NOW));
        all.attributes(file(MANY), ends(NOW));
        assert_eq!(all.inodes.len(), 1);
    }
}
