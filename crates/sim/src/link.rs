//! A simulated byte stream between two ends in one world, which tests can delay, damage and break.
//!
//! It passes bytes in parts of any length and holds at most 64 KiB in each direction. Bytes in flight are
//! lost when it breaks.

use crate::World;
use penstock_base::LocalBoxFuture;
use penstock_base::num::to_usize;
use penstock_fabric::Link;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// The most bytes in flight in one direction.
const CAPACITY: usize = 64 << 10;

#[derive(Default)]
struct Pipe {
    bytes: RefCell<VecDeque<u8>>,
    closed: Cell<bool>,
    /// Bytes in flight, and the end of the stream, are held back for now.
    held: Cell<bool>,
    /// The reader is gone and the writer does not know it yet: written bytes are dropped.
    deaf: Cell<bool>,
    came: Notify,
    went: Notify,
    /// The byte that is written after this many others gets a bit flipped.
    damage_in: Cell<Option<usize>>,
}

/// One end of the stream.
pub struct SimLink {
    world: World,
    reads: Rc<Pipe>,
    writes: Rc<Pipe>,
}

impl SimLink {
    /// Returns both ends of a new stream.
    pub fn pair(world: &World) -> (Rc<Self>, Rc<Self>) {
        let (there, back): (Rc<Pipe>, Rc<Pipe>) = Default::default();
        let one = Self { world: world.clone(), reads: back.clone(), writes: there.clone() };
        let other = Self { world: world.clone(), reads: there, writes: back };
        (Rc::new(one), Rc::new(other))
    }

    /// Breaks the stream in both directions. Bytes in flight are lost.
    pub fn cut(&self) {
        for pipe in [&self.reads, &self.writes] {
            pipe.bytes.borrow_mut().clear();
            pipe.held.set(false);
        }
        self.close();
    }

    /// Holds back everything that this end sends, until the stream breaks.
    pub fn stall(&self) {
        self.writes.held.set(true);
    }

    /// Holds back everything in both directions, until the stream breaks.
    pub fn silence(&self) {
        self.stall();
        self.reads.held.set(true);
    }

    /// Breaks this end alone. The other end receives the bytes that were in flight, and the end of the
    /// stream, after `after`. Bytes that it sends until then are lost.
    pub fn cut_late(&self, after: Duration) {
        let (sent, answers) = (self.writes.clone(), self.reads.clone());
        if sent.closed.get() {
            return;
        }
        sent.held.set(true);
        answers.deaf.set(true);
        answers.held.set(false);
        answers.bytes.borrow_mut().clear();
        self.close();
        let env = self.world.env();
        let sleep = env.sleep(after);
        let arrive = async move {
            sleep.await;
            sent.held.set(false);
            answers.deaf.set(false);
            sent.came.notify_one();
        };
        env.spawn("late bytes", Box::pin(arrive));
    }

    /// Flips a bit of the byte that is written `after` bytes from now.
    pub fn damage(&self, after: usize) {
        self.writes.damage_in.set(Some(after));
    }

    fn part(&self, most: usize) -> usize {
        1 + to_usize(self.world.below(most as u64))
    }
}

impl Link for SimLink {
    fn try_read(&self, spaces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        let pipe = &self.reads;
        let mut bytes = pipe.bytes.borrow_mut();
        let wanted = spaces.iter().map(|space| space.len()).sum::<usize>().min(bytes.len());
        if pipe.held.get() {
            return Err(ErrorKind::WouldBlock.into());
        }
        if wanted == 0 {
            return if pipe.closed.get() { Ok(0) } else { Err(ErrorKind::WouldBlock.into()) };
        }
        let count = self.part(wanted);
        let mut rest = count;
        for space in spaces {
            let part = rest.min(space.len());
            bytes.drain(..part).zip(&mut space[..part]).for_each(|(byte, place)| *place = byte);
            rest -= part;
        }
        pipe.went.notify_one();
        Ok(count)
    }

    fn try_write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let pipe = &self.writes;
        if pipe.deaf.get() {
            return Ok(parts.iter().map(|part| part.len()).sum());
        }
        if pipe.closed.get() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        let mut bytes = pipe.bytes.borrow_mut();
        let all = parts.iter().map(|part| part.len()).sum::<usize>();
        let room = all.min(CAPACITY - bytes.len());
        if room == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        let count = self.part(room);
        let from = bytes.len();
        bytes.extend(parts.iter().flat_map(|part| part.iter()).take(count));
        if let Some(after) = pipe.damage_in.get() {
            pipe.damage_in.set(after.checked_sub(count));
            if after < count {
                bytes[from + after] ^= 1;
            }
        }
        pipe.came.notify_one();
        Ok(count)
    }

    fn readable(&self) -> LocalBoxFuture<'_, io::Result<()>> {
        Box::pin(async {
            while self.reads.held.get() || self.reads.bytes.borrow().is_empty() && !self.reads.closed.get() {
                self.reads.came.notified().await;
            }
            Ok(())
        })
    }

    fn writable(&self) -> LocalBoxFuture<'_, io::Result<()>> {
        Box::pin(async {
            while self.writes.bytes.borrow().len() == CAPACITY && !self.writes.closed.get() {
                self.writes.went.notified().await;
            }
            Ok(())
        })
    }

    fn close(&self) {
        for pipe in [&self.reads, &self.writes] {
            pipe.closed.set(true);
            pipe.came.notify_one();
            pipe.went.notify_one();
        }
    }
}
