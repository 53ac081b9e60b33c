//! FUSE nodes: the files that the kernel knows, by the numbers (`nodeid`) under which it knows them.
//!
//! Each reply that names a file counts one lookup of its node, and a FORGET takes lookups back. As long as
//! the count is above 0, a program may have the file open, be in it, or hold it by `O_PATH`. The node has a
//! number of its own, because the kernel has one number where a file has two: its branch and its inode. The
//! inode number that programs see (`st_ino`) is the file's.
//!
//! The last attributes of a file that has lost its last name through this mount are kept with its node, and
//! answer for it once the service has dropped it. It has nothing else by then: a file is dropped only when
//! nobody has it open, and a directory that is removed is empty and stays so.
//!
//! For the kernel a directory that was removed is dead for good, whoever is in it. A crash of the service may
//! bring its name back. Then it gets another node, and the dead one keeps answering from its attributes
//! ([`crate::dead`]): a program in it does not reach the directory that is there now.
//!
//! Invariants:
//! - a file has a node exactly while the kernel knows it, and one that is not dead at most;
//! - no number is given twice in a mount, and numbers begin anywhere, so that neither a late request nor a
//!   handle of an earlier mount reaches another file. Some are given to no node ([`Nodes::stranger`]);
//! - attributes are kept only with a node, and a dead node always has some.

use crate::abi::ROOT_ID;
use penstock_base::{FileId, HashMap};
use penstock_client::Attr;
use rustix::fs::FileType;
use std::cell::RefCell;
use std::cmp::Ordering;

/// A file that the kernel knows.
struct Node {
    file: FileId,
    /// Replies that named it, less what the kernel has forgotten; at least 1.
    lookups: u64,
    state: State,
}

/// State of a node, as far as this mount knows.
enum State {
    /// It has a name.
    Named,
    /// It is a file that has lost its last name, with its last attributes.
    Nameless(Box<Attr>),
    /// It is a directory that was removed, with its last attributes.
    Dead(Box<Attr>),
}

/// The first number of a mount is below this. Nobody looks up the other 2^63 files.
const FIRST_BELOW: u64 = 1 << 63;

struct Table {
    nodes: HashMap<u64, Node>,
    /// The number of the node of each file. A dead one may be missing, if the file has another one.
    numbers: HashMap<FileId, u64>,
    /// The number that was given last.
    last: u64,
}

/// The table of nodes. That of the root directory is always there: the kernel never forgets it.
pub(crate) struct Nodes {
    root: FileId,
    table: RefCell<Table>,
}

impl Nodes {
    /// The table of a mount with this root directory. Numbers begin at one that is drawn from `random`.
    pub(crate) fn new(root: FileId, random: u64) -> Self {
        let last = ROOT_ID + random % FIRST_BELOW;
        let table = Table { nodes: HashMap::default(), numbers: HashMap::default(), last };
        Self { root, table: RefCell::new(table) }
    }

    /// The file of a node; none if the kernel has forgotten it.
    pub(crate) fn file(&self, nodeid: u64) -> Option<FileId> {
        match nodeid {
            ROOT_ID => Some(self.root),
            _ => self.table.borrow().nodes.get(&nodeid).map(|node| node.file),
        }
    }

    /// The node of a file; none if the kernel does not know the file, and therefore has nothing of it cached.
    pub(crate) fn node(&self, file: FileId) -> Option<u64> {
        match file == self.root {
            true => Some(ROOT_ID),
            false => self.table.borrow().numbers.get(&file).copied(),
        }
    }

    /// The inode number of a file that programs see.
    pub(crate) fn shown(&self, file: FileId) -> u64 {
        if file == self.root { ROOT_ID } else { file.ino.0 }
    }

    /// A reply names a file with these attributes. Returns the number of its node.
    pub(crate) fn looked_up(&self, attr: &Attr) -> u64 {
        let file = attr.file();
        if file == self.root {
            return ROOT_ID;
        }
        let mut table = self.table.borrow_mut();
        let Table { nodes, numbers, last } = &mut *table;
        let is_dead =
            |nodeid: &u64| nodes.get(nodeid).is_some_and(|node| matches!(node.state, State::Dead(_)));
        if attr.nlink > 0 && numbers.get(&file).is_some_and(is_dead) {
            numbers.remove(&file);
        }
        let nodeid = *numbers.entry(file).or_insert_with(|| {
            *last += 1;
            *last
        });
        let node = nodes.entry(nodeid).or_insert(Node { file, lookups: 0, state: State::Named });
        assert_eq!(node.file, file, "a node is of one file");
        node.lookups += 1;
        nodeid
    }

    /// A number that no node has, for a reply that names no file.
    pub(crate) fn stranger(&self) -> u64 {
        let mut table = self.table.borrow_mut();
        table.last += 1;
        table.last
    }

    /// The kernel has forgotten that many lookups of a node.
    pub(crate) fn forget(&self, nodeid: u64, lookups: u64) {
        let mut table = self.table.borrow_mut();
        let Table { nodes, numbers, .. } = &mut *table;
        let Some(node) = nodes.get_mut(&nodeid) else {
            if nodeid != ROOT_ID {
                tracing::debug!(nodeid, lookups, "the kernel forgets a node that no reply named");
            }
            return;
        };
        node.lookups = node.lookups.saturating_sub(lookups);
        if node.lookups == 0 {
            if numbers.get(&node.file) == Some(&nodeid) {
                numbers.remove(&node.file);
            }
            nodes.remove(&nodeid);
        }
        assert!(nodes.len() >= numbers.len(), "each file in the table has a node");
    }

    /// A name of a file was removed through this mount. `attr` are the attributes after that.
    pub(crate) fn unlinked(&self, attr: &Attr) {
        if attr.nlink > 0 || !is_directory(attr) {
            return self.note(attr);
        }
        let mut table = self.table.borrow_mut();
        let Table { nodes, numbers, .. } = &mut *table;
        if let Some(node) = numbers.get(&attr.file()).and_then(|nodeid| nodes.get_mut(nodeid)) {
            node.state = State::Dead(Box::new(attr.clone()));
        }
    }

    /// Takes in the attributes of a file in a reply of the service. Keeps them if it has no name, unless
    /// newer ones are kept: a reply may be late.
    pub(crate) fn note(&self, attr: &Attr) {
        let changed = |attr: &Attr| (attr.ctime.sec, attr.ctime.nsec);
        let mut table = self.table.borrow_mut();
        let Table { nodes, numbers, .. } = &mut *table;
        let Some(node) = numbers.get(&attr.file()).and_then(|nodeid| nodes.get_mut(nodeid)) else { return };
        let order = match &node.state {
            State::Named => Ordering::Greater,
            State::Nameless(kept) => changed(attr).cmp(&changed(kept)),
            State::Dead(_) => return,
        };
        match (attr.nlink, order) {
            (_, Ordering::Less) => {}
            (0, _) => node.state = State::Nameless(Box::new(attr.clone())),
            // The same time is that of a reply from before the removal, by a coarse clock.
            (_, Ordering::Equal) => {}
            (_, Ordering::Greater) => node.state = State::Named,
        }
    }

    /// Keeps attributes that a program has given to a file that has lost its last name.
    pub(crate) fn keep(&self, nodeid: u64, attr: &Attr) {
        assert_eq!(attr.nlink, 0, "the service keeps the attributes of files with a name");
        if let Some(node) = self.table.borrow_mut().nodes.get_mut(&nodeid) {
            match &mut node.state {
                State::Named => {}
                State::Nameless(kept) | State::Dead(kept) => **kept = attr.clone(),
            }
        }
    }

    /// The last attributes of a file that has lost its last name through this mount, and is no directory.
    pub(crate) fn nameless(&self, nodeid: u64) -> Option<Attr> {
        match &self.table.borrow().nodes.get(&nodeid)?.state {
            State::Nameless(kept) => Some((**kept).clone()),
            State::Named | State::Dead(_) => None,
        }
    }

    /// The last attributes of a directory that was removed through this mount.
    pub(crate) fn dead(&self, nodeid: u64) -> Option<Attr> {
        match &self.table.borrow().nodes.get(&nodeid)?.state {
            State::Dead(kept) => Some((**kept).clone()),
            State::Named | State::Nameless(_) => None,
        }
    }

    /// Number of files that the kernel knows, without the root directory.
    #[cfg(test)]
    fn len(&self) -> usize {
        self.table.borrow().nodes.len()
    }
}

pub(crate) fn is_directory(attr: &Attr) -> bool {
    FileType::from_raw_mode(attr.mode) == FileType::Directory
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_wire::metadata::Time;

    const ROOT: FileId = FileId::of_numbers(0, 1 << 40);

    fn file(ino: u64) -> FileId {
        FileId::of_numbers(0, ino)
    }

    /// Attributes of a directory, last changed at this second.
    fn attr(ino: u64, nlink: u32, changed: i64) -> Attr {
        Attr { ino, nlink, mode: 0o040_700, ctime: Time { sec: changed, nsec: 0 }, ..Attr::default() }
    }

    #[test]
    fn a_file_has_a_node_until_all_its_lookups_are_forgotten() {
        let nodes = Nodes::new(ROOT, 77);
        let (seven, eight) = (nodes.looked_up(&attr(7, 1, 1)), nodes.looked_up(&attr(8, 1, 1)));
        assert!(seven != eight && ![seven, eight].contains(&ROOT_ID));
        assert_eq!(nodes.looked_up(&attr(7, 1, 1)), seven, "one file has one node");
        nodes.forget(seven, 1);
        assert_eq!((nodes.file(seven), nodes.node(file(7)), nodes.len()), (Some(file(7)), Some(seven), 2));
        nodes.forget(seven, 1);
        nodes.forget(99, 1);
        assert_eq!((nodes.file(seven), nodes.node(file(7)), nodes.len()), (None, None, 1));
        nodes.forget(eight, 5);
        assert_eq!(nodes.len(), 0);
        let again = nodes.looked_up(&attr(7, 1, 1));
        assert!(![seven, eight].contains(&again), "no number is given twice");
    }

    #[test]
    fn files_of_two_branches_have_two_nodes_and_show_one_inode_number() {
        let nodes = Nodes::new(ROOT, 77);
        let older = FileId::of_numbers(5, 7);
        let (one, other) =
            (nodes.looked_up(&attr(7, 1, 1)), nodes.looked_up(&Attr { branch: 5, ..attr(7, 1, 1) }));
        assert!(one != other && nodes.file(other) == Some(older));
        assert_eq!((nodes.shown(file(7)), nodes.shown(older)), (7, 7));
        nodes.forget(one, 1);
        assert_eq!((nodes.node(file(7)), nodes.node(older)), (None, Some(other)));
    }

    #[test]
    fn the_root_has_the_number_that_the_kernel_gives_it_and_is_never_forgotten() {
        let nodes = Nodes::new(ROOT, 77);
        assert_eq!((nodes.file(ROOT_ID), nodes.node(ROOT), nodes.shown(ROOT)), (Some(ROOT), Some(1), 1));
        assert_eq!(nodes.looked_up(&attr(ROOT.ino.0, 2, 1)), ROOT_ID);
        nodes.forget(ROOT_ID, 7);
        assert_eq!((nodes.file(ROOT_ID), nodes.len()), (Some(ROOT), 0));
    }

    /// Regression: the directory stayed empty on the mount that had removed it, and again once anything had
    /// shown its attributes.
    #[test]
    fn a_removed_directory_that_a_crash_brought_back_gets_another_node() {
        let nodes = Nodes::new(ROOT, 77);
        let dead = nodes.looked_up(&attr(7, 2, 1));
        nodes.unlinked(&attr(7, 0, 3));
        nodes.note(&attr(7, 2, 9));
        let revived = nodes.looked_up(&attr(7, 2, 9));
        assert!(revived != dead && nodes.node(file(7)) == Some(revived));
        assert_eq!([dead, revived].map(|nodeid| nodes.file(nodeid)), [Some(file(7)); 2]);
        assert_eq!(nodes.looked_up(&attr(7, 2, 1)), revived);
        assert_eq!((nodes.dead(dead), nodes.dead(revived)), (Some(attr(7, 0, 3)), None));
        // It is removed once more, or the reply was a late one: the first node answers as before.
        nodes.unlinked(&attr(7, 0, 12));
        nodes.forget(revived, 2);
        assert_eq!((nodes.dead(dead), nodes.node(file(7)), nodes.len()), (Some(attr(7, 0, 3)), None, 1));
        let again = nodes.looked_up(&attr(7, 2, 9));
        nodes.forget(dead, 1);
        assert_eq!((nodes.file(dead), nodes.node(file(7)), nodes.len()), (None, Some(again), 1));
        // A file has pages, which its two nodes would not share.
        let regular = |nlink, changed| Attr { mode: 0o100_600, ..attr(8, nlink, changed) };
        let nodeid = nodes.looked_up(&regular(1, 1));
        nodes.unlinked(&regular(0, 3));
        assert_eq!(nodes.looked_up(&regular(1, 1)), nodeid);
    }

    #[test]
    fn the_attributes_of_a_nameless_file_are_kept_while_the_kernel_knows_it() {
        let attr = |nlink, changed| Attr { mode: 0o100_600, ..attr(7, nlink, changed) };
        let nodes = Nodes::new(ROOT, 77);
        nodes.unlinked(&attr(0, 3));
        assert_eq!(nodes.len(), 0, "the kernel does not know it");
        let nodeid = nodes.looked_up(&attr(1, 1));
        nodes.unlinked(&attr(1, 2));
        assert_eq!(nodes.nameless(nodeid), None, "it has another name");
        nodes.unlinked(&attr(0, 3));
        // Regression: a late reply from before the removal forgot them.
        nodes.note(&attr(1, 2));
        nodes.note(&attr(1, 3));
        nodes.note(&Attr { mode: 0o100_500, ..attr(0, 2) });
        assert_eq!(nodes.nameless(nodeid), Some(attr(0, 3)));
        nodes.note(&attr(1, 4));
        assert_eq!(nodes.nameless(nodeid), None, "it has a name again");
        nodes.note(&attr(0, 5));
        nodes.keep(nodeid, &Attr { mode: 0o100_500, ..attr(0, 1) });
        assert_eq!(nodes.nameless(nodeid).map(|attr| attr.mode), Some(0o100_500), "a program changed it");
        nodes.looked_up(&attr(0, 5));
        nodes.forget(nodeid, 1);
        assert!(nodes.nameless(nodeid).is_some());
        nodes.forget(nodeid, 1);
        let again = nodes.looked_up(&attr(1, 1));
        assert_eq!(nodes.nameless(again), None, "the kernel had forgotten it");
    }

    #[test]
    fn two_mounts_begin_their_numbers_anywhere() {
        let first = |random| Nodes::new(ROOT, random).looked_up(&attr(7, 1, 1));
        assert_eq!([0, 5, u64::MAX].map(first), [2, 7, (1 << 63) + 1]);
    }
}
