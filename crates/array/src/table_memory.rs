//! The memory that pages of stripe tables take, of all arrays of a store.
//!
//! It is a bound for pages that may leave the memory: pages that are pinned, or changed since the last
//! checkpoint, stay. Checkpoints see to it that few are of the second kind ([`TableMemory::most_unsaved`]).

use penstock_base::BLOCK_BYTES;
use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

/// Memory for pages of stripe tables unless said otherwise: with stripes of 4 MiB whose strips are where they
/// belong, it holds the table of 64 TiB.
pub const TABLE_BYTES: usize = 128 << 20;

/// The pages of one table.
pub(crate) trait PagesInMemory {
    /// Looks at some pages, and lets those leave the memory that are not needed, while there are too many.
    fn give_up_pages(&self);
}

/// The memory, and the tables that share it.
pub(crate) struct TableMemory {
    most: usize,
    used: Cell<usize>,
    tables: RefCell<Vec<Weak<dyn PagesInMemory>>>,
}

impl TableMemory {
    /// So many bytes; as many as suit most stores if none is given.
    pub(crate) fn new(most: Option<usize>) -> Rc<Self> {
        let most = most.unwrap_or(TABLE_BYTES);
        Rc::new(Self { most, used: Cell::new(0), tables: RefCell::default() })
    }

    /// A table that shares it.
    pub(crate) fn enter(&self, table: &Rc<dyn PagesInMemory>) {
        let mut tables = self.tables.borrow_mut();
        tables.retain(|table| table.strong_count() > 0);
        tables.push(Rc::downgrade(table));
    }

    pub(crate) fn is_exceeded(&self) -> bool {
        self.used.get() > self.most
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.used.set(self.used.get() + bytes);
    }

    pub(crate) fn remove(&self, bytes: usize) {
        self.used.set(self.used.get().checked_sub(bytes).expect("it was added"));
    }

    /// Pages that may be changed and not in a checkpoint, each as large as they come.
    pub(crate) fn most_unsaved(&self) -> usize {
        (self.most / BLOCK_BYTES / 2).max(1)
    }

    /// Lets pages go that are not needed, while there are too many. The tables take turns.
    pub(crate) fn make_room(&self) {
        if !self.is_exceeded() {
            return;
        }
        let tables: Vec<Rc<dyn PagesInMemory>> =
            self.tables.borrow().iter().filter_map(Weak::upgrade).collect();
        tables.iter().for_each(|table| table.give_up_pages());
        self.tables.borrow_mut().rotate_left(usize::from(!tables.is_empty()));
    }
}
