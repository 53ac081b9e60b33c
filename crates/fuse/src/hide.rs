//! Drops all pages of files while no request is answered.
//!
//! A notice to drop pages waits for each page that is locked for a request. No such request is answered, so
//! each waiting notice gets a thread of its own, and other notices drop the pages before and behind the one
//! that it waits for. Single pages remain that are locked or under write-back. Programs see pages under
//! write-back, so the caller must know for each remaining page that no program sees it.
// Uses threads, which the kernel may block, and real time: nothing here is simulated.
#![allow(clippy::disallowed_methods)]

use crate::locked::halves;
use crate::notices::drop_pages_now;
use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// `FREE` threads are kept idle, and there are `MOST` at most. A locked folio of 1 MiB takes 512.
const FREE: usize = 16;
const MOST: usize = 1024;
const STACK_BYTES: usize = 64 << 10;
/// A notice that takes longer is assumed to wait for a page.
const WAITS: Duration = Duration::from_millis(20);
/// Time between two searches for waiting notices.
const LOOK: Duration = Duration::from_millis(5);

/// A range of pages of a file that are to be dropped.
#[derive(Clone)]
pub(crate) struct Part {
    pub(crate) nodeid: u64,
    pub(crate) bytes: Range<u64>,
    /// The size of the file, in bytes.
    pub(crate) size: u64,
}

#[derive(Default)]
struct Queue {
    parts: VecDeque<(u64, Part)>,
    closed: bool,
}

#[derive(Default)]
struct Work {
    queue: Mutex<Queue>,
    more: Condvar,
}

impl Work {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics under this lock.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<(u64, Part)> {
        let wait = |queue: &mut Queue| queue.parts.is_empty() && !queue.closed;
        let mut queue = self.more.wait_while(self.queue(), wait).unwrap_or_else(PoisonError::into_inner);
        if queue.closed { None } else { queue.parts.pop_front() }
    }

    /// Ends the idle threads. A thread that waits in the kernel ends when its notice returns.
    fn close(&self) {
        self.queue().closed = true;
        self.more.notify_all();
    }
}

enum Said {
    Begun(u64),
    Done(u64, io::Result<()>),
}

fn add_thread(work: &Arc<Work>, device: &Arc<File>, say: &Sender<Said>) -> io::Result<()> {
    let (work, device, say) = (work.clone(), device.clone(), say.clone());
    let run = move || {
        while let Some((number, part)) = work.next() {
            // The receiver may be gone by then.
            let _ = say.send(Said::Begun(number));
            let result = drop_pages_now(&device, part.nodeid, part.bytes);
            let _ = say.send(Said::Done(number, result));
        }
    };
    std::thread::Builder::new().name("hide pages".into()).stack_size(STACK_BYTES).spawn(run).map(drop)
}

/// Single pages whose notices are still waiting.
pub(crate) struct Left {
    parts: BTreeMap<u64, Part>,
    said: Receiver<Said>,
    deadline: Instant,
}

impl Left {
    /// Forgets the pages for which `keep` is false. Returns true if some remain.
    pub(crate) fn retain(&mut self, keep: impl Fn(&Part) -> bool) -> bool {
        self.parts.retain(|_, part| keep(part));
        !self.parts.is_empty()
    }

    /// Waits for the notices of the remaining pages, until the deadline. Fails if a notice failed.
    pub(crate) fn wait(mut self) -> io::Result<Self> {
        while !self.parts.is_empty() {
            let rest = self.deadline.saturating_duration_since(Instant::now());
            match self.said.recv_timeout(rest) {
                Ok(Said::Done(number, result)) => {
                    result?;
                    self.parts.remove(&number);
                }
                Ok(Said::Begun(_)) => {}
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        Ok(self)
    }
}

/// Drops ranges of pages within a time limit. Returns when only single pages remain whose notices wait. Fails
/// if a notice fails, if time runs out, or if more than `MOST` threads are needed.
pub(crate) fn hide(device: &Arc<File>, parts: Vec<Part>, within: Duration) -> io::Result<Left> {
    let work = Arc::new(Work::default());
    let result = hide_by(&work, device, parts, within);
    work.close();
    result
}

fn hide_by(work: &Arc<Work>, device: &Arc<File>, parts: Vec<Part>, within: Duration) -> io::Result<Left> {
    let deadline = Instant::now() + within;
    let (say, said) = channel();
    let mut left = BTreeMap::new();
    let mut threads = 0;
    let mut add = || {
        threads += 1;
        match threads > MOST {
            true => Err(io::Error::other(format!("{MOST} notices wait for pages that are locked"))),
            false => add_thread(work, device, &say),
        }
    };
    (0..FREE).try_for_each(|_| add())?;
    let mut last = 0;
    // By number: ranges not yet dropped nor known to wait, and the time at which their notice began.
    let mut open: BTreeMap<u64, (Part, Option<Instant>)> = BTreeMap::new();
    let mut todo = parts;
    loop {
        for part in todo.drain(..) {
            last += 1;
            open.insert(last, (part.clone(), None));
            work.queue().parts.push_back((last, part));
            work.more.notify_one();
        }
        if open.is_empty() {
            return Ok(Left { parts: left, said, deadline });
        }
        match said.recv_timeout(LOOK) {
            Ok(Said::Begun(number)) => {
                if let Some((_, since)) = open.get_mut(&number) {
                    *since = Some(Instant::now());
                }
                // More messages may be there already.
                continue;
            }
            Ok(Said::Done(number, result)) => {
                result?;
                open.remove(&number);
                left.remove(&number);
                continue;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => unreachable!("this end says something too"),
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("the kernel is too slow"));
        }
        let waits = |since: &Option<Instant>| since.is_some_and(|since| since.elapsed() > WAITS);
        let waiting: Vec<u64> =
            open.iter().filter(|(_, (_, since))| waits(since)).map(|(number, _)| *number).collect();
        for number in waiting {
            let Some((part, _)) = open.remove(&number) else { continue };
            add()?;
            match halves(&part.bytes, part.size) {
                Some(halves) => todo.extend(halves.map(|bytes| Part { bytes, ..part.clone() })),
                None => drop(left.insert(number, part)),
            }
        }
    }
}
