//! redb's storage backend on an engine thread: sends requests to the worker that owns the volume.
//!
//! Writes are collected and handed over together, before a read or a sync: redb writes page by page, and
//! every hand-over switches threads. redb requires no order between two syncs, so the writes go by their
//! offset. redb's own order comes from a map with a random seed, and one seed of the simulation must give one
//! run.

use crate::damage::Refusal;
use crate::volume::Extent;
use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Mutex, MutexGuard};
use tokio::sync::mpsc::UnboundedSender;

/// Writes are handed over once they have this many bytes, even without a read or a sync.
const COLLECT_BYTES: usize = 8 << 20;

/// A request of redb to the volume.
#[derive(Debug)]
pub(crate) enum Ask {
    Len,
    SetLen(u64),
    Read(u64, usize),
    Write(Vec<Extent>),
}

/// The answer to a request.
#[derive(Debug)]
pub(crate) enum Answer {
    Done,
    Len(u64),
    Bytes(Vec<u8>),
}

/// A message from an engine thread to the worker.
#[derive(Debug)]
pub(crate) enum FromLane {
    /// A request of the backend. The thread waits for the answer.
    Ask(Ask, SyncSender<Result<Answer, Refusal>>),
    /// The job is done and its result is sent.
    JobDone,
}

#[derive(Debug)]
pub(crate) struct Backend {
    worker: UnboundedSender<FromLane>,
    collected: Mutex<Collected>,
}

/// Writes that were not handed over yet.
#[derive(Debug, Default)]
struct Collected {
    bytes: usize,
    extents: Vec<Extent>,
    /// The error of a write that was handed over. A read of another thread may have been told of it, so every
    /// later hand-over fails: redb must not take a sync for a success.
    failed: Option<String>,
}

impl Backend {
    pub(crate) fn new(worker: UnboundedSender<FromLane>) -> Self {
        Self { worker, collected: Mutex::default() }
    }

    fn ask(&self, ask: Ask) -> io::Result<Answer> {
        let (reply, answer) = std::sync::mpsc::sync_channel(1);
        let gone = || io::Error::other("the worker is gone");
        self.worker.send(FromLane::Ask(ask, reply)).map_err(|_| gone())?;
        Ok(answer.recv().map_err(|_| gone())??)
    }

    fn collected(&self) -> MutexGuard<'_, Collected> {
        self.collected.lock().expect("no holder of this lock can panic")
    }

    /// Hands over the collected writes. Keeps the lock until the answer arrives, so that a later read from
    /// any thread sees the writes.
    fn hand_over(&self) -> io::Result<()> {
        let mut collected = self.collected();
        if let Some(error) = &collected.failed {
            return Err(io::Error::other(error.clone()));
        }
        collected.bytes = 0;
        let extents = std::mem::take(&mut collected.extents);
        if extents.is_empty() {
            return Ok(());
        }
        assert!(extents.iter().all(|(_, bytes)| !bytes.is_empty()), "redb writes no empty page");
        let written = self.ask(Ask::Write(by_offset(extents))).map(|_| ());
        written.inspect_err(|error| collected.failed = Some(error.to_string()))
    }
}

/// Sorts writes by offset. If some overlap, keeps the order in which they came.
fn by_offset(extents: Vec<Extent>) -> Vec<Extent> {
    let mut order: Vec<usize> = (0..extents.len()).collect();
    order.sort_by_key(|index| extents[*index].0);
    let end = |index: usize| extents[index].0 + extents[index].1.len() as u64;
    if order.windows(2).any(|pair| end(pair[0]) > extents[pair[1]].0) {
        return extents;
    }
    let mut extents: Vec<Option<Extent>> = extents.into_iter().map(Some).collect();
    order.into_iter().filter_map(|index| extents[index].take()).collect()
}

fn unexpected(answer: &Answer) -> io::Error {
    io::Error::other(format!("an answer of the wrong kind: {answer:?}"))
}

impl redb::StorageBackend for Backend {
    fn len(&self) -> io::Result<u64> {
        match self.ask(Ask::Len)? {
            Answer::Len(len) => Ok(len),
            other => Err(unexpected(&other)),
        }
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.hand_over()?;
        match self.ask(Ask::Read(offset, out.len()))? {
            Answer::Bytes(bytes) if bytes.len() == out.len() => {
                out.copy_from_slice(&bytes);
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.hand_over()?;
        self.ask(Ask::SetLen(len)).map(|_| ())
    }

    fn sync_data(&self) -> io::Result<()> {
        // redb only needs order here. The volume keeps the order, and one flush after the commit makes it
        // durable.
        self.hand_over()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let full = {
            let mut collected = self.collected();
            collected.bytes += data.len();
            collected.extents.push((offset, data.to_vec()));
            collected.bytes >= COLLECT_BYTES
        };
        if full { self.hand_over() } else { Ok(()) }
    }

    fn close(&self) -> io::Result<()> {
        self.hand_over()
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods)]
mod tests {
    use super::*;
    use redb::StorageBackend;
    use std::sync::Arc;

    /// Regression: a write that failed under the read of another thread was forgotten, and the sync of the
    /// writer succeeded.
    #[test]
    fn a_sync_remembers_the_write_that_failed_under_a_read() {
        let (worker, mut requests) = tokio::sync::mpsc::unbounded_channel();
        let backend = Arc::new(Backend::new(worker));
        let serve = move || {
            while let Some(request) = requests.blocking_recv() {
                let FromLane::Ask(ask, answer) = request else { continue };
                let _ = answer.send(match ask {
                    Ask::Write(_) => Err(Refusal { is_damage: false, why: "the volume is full".into() }),
                    Ask::Read(_, len) => Ok(Answer::Bytes(vec![0; len])),
                    _ => Ok(Answer::Done),
                });
            }
        };
        let served = std::thread::Builder::new().spawn(serve).unwrap();
        backend.write(4096, &[1; 4096]).unwrap();
        assert!(backend.read(0, &mut [0; 4096]).is_err(), "the reader learns of it");
        let synced = [backend.sync_data(), backend.set_len(1 << 20), backend.close()];
        drop(backend);
        served.join().unwrap();
        for result in synced {
            assert_eq!(result.unwrap_err().to_string(), "the volume is full");
        }
    }
}
