//! Waits for other clients to sync a file: the service answers a request with "wait", and tells later under
//! the request's number that they have.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use tokio::sync::oneshot;

/// The waits of a client, by number.
#[derive(Default)]
pub(crate) struct Tickets {
    last: Cell<u64>,
    waiting: RefCell<BTreeMap<u64, oneshot::Sender<u32>>>,
}

/// A wait, which ends when this is dropped.
pub(crate) struct Ticket<'a> {
    tickets: &'a Tickets,
    number: u64,
    ended: oneshot::Receiver<u32>,
}

impl Tickets {
    /// Begins a wait, before the request is sent that has its number.
    pub(crate) fn begin(&self) -> Ticket<'_> {
        let number = self.last.get() + 1;
        self.last.set(number);
        let (sender, ended) = oneshot::channel();
        let before = self.waiting.borrow_mut().insert(number, sender);
        assert!(before.is_none(), "a number is given once");
        Ticket { tickets: self, number, ended }
    }

    /// The others have synced, or one could not for the reason `errno`. Does nothing if nobody waits under
    /// this number any more.
    pub(crate) fn end(&self, number: u64, errno: u32) {
        if let Some(waits) = self.waiting.borrow_mut().remove(&number) {
            // Its request may have been given up.
            let _ = waits.send(errno);
        }
    }

    /// Nobody will tell what the waits are about: the era is over.
    pub(crate) fn end_all(&self) {
        self.waiting.take();
    }
}

impl Ticket<'_> {
    /// The number for the request. Not 0.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Waits for the end. Returns an errno if a client could not sync, or 0; none if the era is over.
    pub(crate) async fn ended(&mut self) -> Option<u32> {
        (&mut self.ended).await.ok()
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.tickets.waiting.borrow_mut().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn a_wait_ends_once_with_what_is_told_of_its_number() {
        let tickets = Tickets::default();
        let (mut first, mut second, mut third) = (tickets.begin(), tickets.begin(), tickets.begin());
        assert!(first.number() > 0 && first.ended().now_or_never().is_none());
        tickets.end(second.number(), 28);
        tickets.end(first.number(), 0);
        tickets.end(second.number(), 5);
        assert_eq!(first.ended().now_or_never(), Some(Some(0)));
        assert_eq!(second.ended().now_or_never(), Some(Some(28)));
        tickets.end_all();
        assert_eq!(third.ended().now_or_never(), Some(None));
        drop((first, second, third));
        let number = tickets.begin().number();
        tickets.end(number, 0);
        assert!(tickets.waiting.borrow().is_empty(), "a wait that was given up leaves nothing");
    }
}
