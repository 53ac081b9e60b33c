//! Entries that wait for the log, and the callers that wait until they are durable.
//!
//! Data entries and control entries (all others) wait in two queues, each in order. The writer takes control
//! entries first: they may use the part of the log that is kept free for them, so a log full of data can
//! always be destaged.
//!
//! Invariants:
//! - of each kind, durable ≤ appended ≤ queued;
//! - everything queued is guaranteed to fit: producers reserve log space first ([`crate::log::space`]).
//!   Otherwise the writer and destage could wait for each other;
//! - once the queue is shut nobody waits for it: it is empty and stays so.
//!
//! Owns no log: any part may queue an entry, also the members, which are below the log.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::record::{Entry, head_blocks};
use crate::place::SegmentNo;
use crate::ranks;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf, Stripe, rank};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use tokio::sync::oneshot;

/// Entries that go into one record together.
pub(crate) struct Item {
    pub(crate) entries: Vec<Entry>,
    pub(crate) payload: Vec<Buf>,
    /// Gets the segment once the entry is durable and applied. Control items have one, data items have none.
    pub(crate) reply: Option<oneshot::Sender<SegmentNo>>,
    /// Segments whose entries this one replaces; unpinned when it is durable.
    pub(crate) replaces: Vec<SegmentNo>,
}

impl Item {
    fn blocks(&self) -> usize {
        self.payload.iter().map(Buf::len).sum::<usize>() / BLOCK_BYTES
    }
}

/// Items of each kind, counted since the array was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) data: u64,
    pub(crate) control: u64,
}

impl Count {
    fn reaches(self, other: Self) -> bool {
        self.data >= other.data && self.control >= other.control
    }
}

struct Waiter {
    upto: Count,
    done: oneshot::Sender<()>,
}

#[derive(Default)]
struct Queues {
    control: VecDeque<Item>,
    data: VecDeque<Item>,
    /// Blocks of payload in `data`.
    data_blocks: u64,
    queued: Count,
    appended: Count,
    durable: Count,
    waiters: Vec<Waiter>,
}

impl Queues {
    fn assert_order(&self) {
        assert!(
            self.appended.reaches(self.durable),
            "{:?} durable, {:?} appended",
            self.durable,
            self.appended
        );
        assert!(self.queued.reaches(self.appended), "{:?} appended, {:?} queued", self.appended, self.queued);
    }
}

/// The entries of one array that wait for its log.
pub(crate) struct EntryQueue {
    context: Rc<Context>,
    queues: RefCell<Queues>,
    shut: Cell<bool>,
}

impl EntryQueue {
    pub(crate) fn new(context: &Rc<Context>) -> Rc<Self> {
        Rc::new(Self { context: context.clone(), queues: RefCell::default(), shut: Cell::new(false) })
    }

    /// Blocks and items of data that wait to be appended.
    pub(crate) fn queued_data(&self) -> (u64, u64) {
        let queues = self.queues.borrow();
        (queues.data_blocks, queues.data.len() as u64)
    }

    /// Queues data entries that must be found together or not at all. Their order in the log is the order of
    /// these calls. `replaces` names the segments of the entries that these make void.
    pub(crate) fn push_data(&self, entries: Vec<Entry>, payload: Vec<Buf>, replaces: Vec<SegmentNo>) {
        let mut queues = self.queues.borrow_mut();
        let item = Item { entries, payload, reply: None, replaces };
        queues.data_blocks += item.blocks() as u64;
        queues.data.push_back(item);
        queues.queued.data += 1;
        drop(queues);
        self.context.signals.log.notify_one();
    }

    /// Queues a control entry; the receiver gets its segment once it is durable and applied.
    pub(crate) fn push_control(&self, entry: Entry, payload: Vec<Buf>) -> oneshot::Receiver<SegmentNo> {
        assert!(!matches!(entry, Entry::Data { .. }), "data entries have a queue of their own");
        let (reply, receiver) = oneshot::channel();
        if self.shut.get() {
            return receiver;
        }
        let mut queues = self.queues.borrow_mut();
        queues.control.push_back(Item {
            entries: vec![entry],
            payload,
            reply: Some(reply),
            replaces: vec![],
        });
        queues.queued.control += 1;
        drop(queues);
        self.context.signals.log.notify_one();
        receiver
    }

    /// Queues a control entry and waits until it is durable and applied. Returns its segment.
    pub(crate) async fn append(&self, entry: Entry, payload: Vec<Buf>) -> Result<SegmentNo, ArrayError> {
        self.context.check_open()?;
        rank::check(ranks::LOG_RECORD);
        self.push_control(entry, payload).await.map_err(|_| ArrayError::Closed)
    }

    /// Waits until all these records are durable and applied.
    pub(crate) async fn wait_for(
        &self,
        records: Vec<oneshot::Receiver<SegmentNo>>,
    ) -> Result<(), ArrayError> {
        rank::check(ranks::LOG_RECORD);
        for record in records {
            record.await.map_err(|_| ArrayError::Closed)?;
        }
        Ok(())
    }

    /// Empties data entries of discarded stripes that are not appended yet: replay must never meet them
    /// behind the discard. They keep their place in the queue, so that a waiter for them waits no shorter.
    pub(crate) fn purge_data(&self, stripes: Range<Stripe>) {
        let mut queues = self.queues.borrow_mut();
        let mut blocks = 0;
        for item in &mut queues.data {
            let whole = std::mem::take(&mut item.payload);
            let mut parts = whole.into_iter();
            for entry in &mut item.entries {
                let part = parts.next().expect("a data entry has one part of the payload");
                match entry {
                    Entry::Data { stripe, crcs, .. } if stripes.contains(stripe) => {
                        blocks += crcs.len() as u64;
                        crcs.clear();
                        item.payload.push(part.slice(0..0));
                    }
                    _ => item.payload.push(part),
                }
            }
        }
        assert!(blocks <= queues.data_blocks, "{blocks} blocks purged of {}", queues.data_blocks);
        queues.data_blocks -= blocks;
    }

    /// Waits until everything queued so far is durable.
    pub(crate) async fn flush(&self) -> Result<(), ArrayError> {
        let upto = self.queues.borrow().queued;
        self.wait_until_durable(upto).await
    }

    /// Waits until every control entry queued so far is durable and applied.
    pub(crate) async fn flush_control(&self) -> Result<(), ArrayError> {
        let control = self.queues.borrow().queued.control;
        self.wait_until_durable(Count { data: 0, control }).await
    }

    async fn wait_until_durable(&self, upto: Count) -> Result<(), ArrayError> {
        if self.shut.get() {
            return Err(ArrayError::Closed);
        }
        rank::check(ranks::LOG_RECORD);
        let receiver = {
            let mut queues = self.queues.borrow_mut();
            if queues.durable.reaches(upto) {
                return Ok(());
            }
            let (done, receiver) = oneshot::channel();
            queues.waiters.push(Waiter { upto, done });
            receiver
        };
        self.context.signals.log.notify_one();
        receiver.await.map_err(|_| ArrayError::Closed)
    }

    /// Takes items for one record: control first, then data, as long as they fit in `left` blocks of the
    /// segment. If the first one does not, they are for a new segment. So at most the length of one item is
    /// wasted at its end.
    pub(crate) fn take(&self, mut left: u32) -> Vec<Item> {
        let geo = &self.context.geo;
        let mut queues = self.queues.borrow_mut();
        let (mut items, mut entry_bytes, mut payload) = (Vec::new(), 0, 0);
        loop {
            let from_control = !queues.control.is_empty();
            let next = if from_control { queues.control.front() } else { queues.data.front() };
            let Some(item) = next else { break };
            let blocks = item.blocks();
            let bytes = entry_bytes + item.entries.iter().map(Entry::encoded_bytes).sum::<usize>();
            let total = head_blocks(bytes) + payload + blocks;
            if items.is_empty() && to_u32(total) > left {
                left = geo.segment_blocks() - 1;
            }
            let too_long = payload + blocks > geo.max_payload_blocks() || to_u32(total) > left;
            if !items.is_empty() && too_long {
                break;
            }
            assert!(to_u32(total) < geo.segment_blocks(), "an entry of {total} blocks fits in no segment");
            let queue = if from_control { &mut queues.control } else { &mut queues.data };
            items.extend(queue.pop_front());
            if !from_control {
                queues.data_blocks -= blocks as u64;
            }
            entry_bytes = bytes;
            payload += blocks;
        }
        items
    }

    /// Records that items were appended. Returns how many data items are appended and queued by now.
    pub(crate) fn mark_appended(&self, more: Count) -> (u64, u64) {
        let mut queues = self.queues.borrow_mut();
        queues.appended.data += more.data;
        queues.appended.control += more.control;
        queues.assert_order();
        (queues.appended.data, queues.queued.data)
    }

    /// True if somebody waits for what is appended by now.
    pub(crate) fn wants_flush(&self) -> bool {
        let queues = self.queues.borrow();
        queues.appended.control > queues.durable.control
            || queues.waiters.iter().any(|waiter| queues.appended.reaches(waiter.upto))
    }

    /// True if somebody will wait for these items once they are appended.
    pub(crate) fn wants_flush_of(&self, items: &[Item]) -> bool {
        !items.is_empty()
            && (items.iter().any(|item| item.reply.is_some()) || !self.queues.borrow().waiters.is_empty())
    }

    /// Everything that is appended is durable: wakes the callers that wait for it. Returns the number of data
    /// items that are durable by now.
    pub(crate) fn mark_durable(&self) -> u64 {
        let mut queues = self.queues.borrow_mut();
        queues.durable = queues.appended;
        queues.assert_order();
        let durable = queues.durable;
        let (ready, waiting): (Vec<_>, Vec<_>) =
            std::mem::take(&mut queues.waiters).into_iter().partition(|waiter| durable.reaches(waiter.upto));
        queues.waiters = waiting;
        drop(queues);
        for waiter in ready {
            // A caller that went away waits for nothing.
            let _ = waiter.done.send(());
        }
        durable.data
    }

    /// Drops all entries and fails all waiters: the array was closed.
    pub(crate) fn shut(&self) {
        self.shut.set(true);
        *self.queues.borrow_mut() = Queues::default();
    }
}

#[cfg(test)]
mod tests;
