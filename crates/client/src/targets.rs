//! The targets of the file system, and those that have writes which they were not asked to commit.

use penstock_base::num::to_u32;
use penstock_base::{FileId, HashMap, Spread, TargetId};
use penstock_wire::metadata::{Attr, HelloReply};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// The targets, and what they owe.
pub(crate) struct Targets {
    /// The one whose rows become durable with a `Sync` request: it shares the key-value store of the metadata
    /// target.
    home: Cell<TargetId>,
    /// Number of targets in the map of the file system.
    count: Cell<u32>,
    /// By file and target, the number of the last write that was done.
    written: RefCell<HashMap<FileId, BTreeMap<TargetId, u64>>>,
    last: Cell<u64>,
}

/// A target that is to commit a file, with the number of the last write that this covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Owed {
    pub(crate) target: TargetId,
    upto: u64,
}

impl Default for Targets {
    fn default() -> Self {
        Self {
            home: Cell::default(),
            count: Cell::new(1),
            written: RefCell::default(),
            last: Cell::default(),
        }
    }
}

impl Targets {
    /// Takes what the service says of its targets: the one with the names first.
    pub(crate) fn greeted(&self, reply: &HelloReply) {
        self.home.set(reply.targets.first().map(|place| TargetId(place.target)).unwrap_or_default());
        self.count.set(to_u32(reply.targets.len()).max(1));
    }

    /// The one whose rows become durable with a `Sync` request.
    pub(crate) fn home(&self) -> TargetId {
        self.home.get()
    }

    /// The targets of a file with these attributes. A layout that fits no map counts as none: requests that
    /// the service refuses are better than a panic.
    pub(crate) fn spread_of(&self, attr: &Attr) -> Spread {
        let count = self.count.get();
        let told = attr.layout.and_then(|layout| {
            let numbers = (u16::try_from(layout.count).ok()?, u16::try_from(layout.turn).ok()?);
            Spread::new(TargetId(layout.first), numbers.0, numbers.1, count)
        });
        told.unwrap_or_else(|| Spread::of_one(self.home(), count.max(self.home().0 + 1)))
    }

    /// A target has answered a write to a file, or a change of its space: a commit that was sent before may
    /// not cover it.
    pub(crate) fn wrote(&self, file: FileId, target: TargetId) {
        assert!(target.0 < self.count.get().max(self.home().0 + 1), "{target} is not in the map");
        self.last.set(self.last.get() + 1);
        self.written.borrow_mut().entry(file).or_default().insert(target, self.last.get());
    }

    /// The targets that have something of a file to commit, and the one with the names.
    pub(crate) fn owed(&self, file: FileId) -> Vec<Owed> {
        let written = self.written.borrow();
        let mut owed = BTreeMap::from([(self.home(), 0)]);
        owed.extend(written.get(&file).into_iter().flatten());
        assert!(owed.values().all(|upto| *upto <= self.last.get()), "{owed:?} were done");
        owed.into_iter().map(|(target, upto)| Owed { target, upto }).collect()
    }

    /// The targets that have answered writes to a file and have not committed it.
    pub(crate) fn written_on(&self, file: FileId) -> Vec<TargetId> {
        self.written.borrow().get(&file).into_iter().flat_map(|targets| targets.keys().copied()).collect()
    }

    /// A target has committed a file.
    pub(crate) fn committed(&self, file: FileId, Owed { target, upto }: Owed) {
        let mut written = self.written.borrow_mut();
        if let Some(of_file) = written.get_mut(&file) {
            of_file.retain(|id, last| *id != target || *last > upto);
            if of_file.is_empty() {
                written.remove(&file);
            }
        }
    }

    /// The service was started again: what was not durable is lost, or is written again.
    pub(crate) fn restarted(&self) {
        self.written.borrow_mut().clear();
    }

    /// Nobody wants any more what was written to a file and not committed.
    pub(crate) fn forget(&self, file: FileId) {
        self.written.borrow_mut().remove(&file);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_wire::metadata::{FileLayout, TargetPlace};

    const FILE: FileId = FileId::of_numbers(0, 7);

    fn targets(home: u32, others: u32) -> Targets {
        let targets = Targets::default();
        let place = |target| TargetPlace { target, addresses: Vec::new() };
        let others = (0..=others).filter(|target| *target != home).map(place);
        let reply = HelloReply {
            targets: [place(home)].into_iter().chain(others).collect(),
            ..HelloReply::default()
        };
        targets.greeted(&reply);
        targets
    }

    #[test]
    fn a_file_lies_where_its_attributes_say() {
        let targets = targets(1, 3);
        let of = |layout| targets.spread_of(&Attr { layout, ..Attr::default() }).all().collect::<Vec<_>>();
        assert_eq!(of(None), [TargetId(1)]);
        let layout = FileLayout { first: 3, count: 2, turn: 4, ..FileLayout::default() };
        assert_eq!(of(Some(layout)), [TargetId(3), TargetId(0)]);
        assert_eq!(of(Some(FileLayout { count: 9, ..layout })), [TargetId(1)], "it fits no map");
        assert_eq!(Targets::default().spread_of(&Attr::default()).all().collect::<Vec<_>>(), [TargetId(0)]);
    }

    #[test]
    fn a_target_owes_what_was_written_since_its_commit_began() {
        let targets = targets(0, 2);
        let owed = |targets: &Targets| -> Vec<u32> {
            targets.owed(FILE).into_iter().map(|owed| owed.target.0).collect()
        };
        assert_eq!(owed(&targets), [0], "the names are always asked");
        [1, 2, 1].into_iter().for_each(|target| targets.wrote(FILE, TargetId(target)));
        let begun = targets.owed(FILE);
        assert_eq!(owed(&targets), [0, 1, 2]);
        targets.wrote(FILE, TargetId(2));
        begun.into_iter().for_each(|owed| targets.committed(FILE, owed));
        assert_eq!(owed(&targets), [0, 2], "of this one the last write is not covered");
        targets.forget(FILE);
        assert_eq!(owed(&targets), [0]);
        targets.wrote(FILE, TargetId(1));
        targets.restarted();
        assert_eq!(owed(&targets), [0]);
    }
}
