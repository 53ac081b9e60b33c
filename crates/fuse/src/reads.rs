//! Reads in flight, and the order in which the kernel hears from them where a file ends.
//!
//! The kernel takes a reply that is shorter than it asked for as the end of the file, where it believed in a larger size: at
//! the offset of the read and the bytes that came. Of reads that it sent together only the first short reply counts
//! (`fuse_read_update_size` in fs/fuse/file.c). So when one that begins behind the end was answered before the one that
//! reaches over it, the file seemed to end where the first one began, with zeros from its end up to there.
//!
//! Invariant: a read that found nothing is answered after all that came before it and begin at a smaller offset. None of
//! these waits for it, or for a lease.

use penstock_base::{HashMap, Ino};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use tokio::sync::Notify;

#[derive(Clone, Copy)]
struct Read {
    number: u64,
    offset: u64,
}

/// The reads of one mount that have their lease and are not answered.
#[derive(Default)]
pub(crate) struct Reads {
    last: Cell<u64>,
    files: RefCell<HashMap<Ino, Vec<Read>>>,
    answered: Notify,
}

/// A read in flight, while it lives.
pub(crate) struct InFlight {
    reads: Rc<Reads>,
    ino: Ino,
    read: Read,
}

impl Reads {
    /// A read begins.
    pub(crate) fn begins(self: &Rc<Self>, ino: Ino, offset: u64) -> InFlight {
        let read = Read { number: self.last.get() + 1, offset };
        self.last.set(read.number);
        self.files.borrow_mut().entry(ino).or_default().push(read);
        InFlight { reads: self.clone(), ino, read }
    }

    fn is_first(&self, ino: Ino, read: Read) -> bool {
        let files = self.files.borrow();
        let before = |other: &Read| other.number < read.number && other.offset < read.offset;
        !files.get(&ino).is_some_and(|reads| reads.iter().any(before))
    }
}

impl InFlight {
    /// Waits until those are answered that came before this one and begin before it.
    pub(crate) async fn first(&self) {
        loop {
            let answered = self.reads.answered.notified();
            if self.reads.is_first(self.ino, self.read) {
                return;
            }
            answered.await;
        }
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut files = self.reads.files.borrow_mut();
        let reads = files.get_mut(&self.ino).expect("a read is known until it is answered");
        reads.retain(|read| read.number != self.read.number);
        if reads.is_empty() {
            files.remove(&self.ino);
        }
        drop(files);
        self.reads.answered.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_read_behind_the_end_is_answered_after_those_before_it() {
        let (reads, ino) = (Rc::new(Reads::default()), Ino(5));
        let over = reads.begins(ino, 0);
        let behind = reads.begins(ino, 16_384);
        let later = reads.begins(ino, 4096);
        let elsewhere = reads.begins(Ino(6), 16_384);
        assert!(over.first().now_or_never().is_some());
        assert!(elsewhere.first().now_or_never().is_some());
        assert!(behind.first().now_or_never().is_none());
        drop(over);
        assert!(behind.first().now_or_never().is_some(), "one that came later is not waited for");
        drop((behind, later, elsewhere));
        assert!(reads.files.borrow().is_empty());
    }
}
