//! A drive as the rest of the system holds it: deadline on every I/O, counters, a latch, and slices of it.
//!
//! Invariants:
//! - Once latched, a drive is never read or written again under this handle; a replacement is a new handle. The caller
//!   decides when to latch: see `Roster` in the array crate, which asks every array of the drive.
//! - A call that changes the drive is over when the drive says so. A write or discard whose caller gave up keeps its range
//!   ([`HeldRanges`]): a later write to the range waits until the first call has ended.
//! - A failed flush is remembered ([`crate::flushes`]): every later flush of this handle fails, whoever asks.

use crate::flushes::Flushes;
use crate::superblock::{self, Superblock};
use crate::{Drive, DriveError, Io};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, DriveId, Env, HeldRanges, Histogram, LocalBoxFuture};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use tokio::sync::oneshot;

/// A deadline is counted in so many steps. While the process or its machine is stopped (a signal, a suspended or migrating
/// virtual machine) time passes and nobody looks for answers; a pause of any length is one step, not the end of a drive
/// that has long answered.
const DEADLINE_STEPS: u32 = 8;

/// Whether a drive takes I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriveState {
    /// In use.
    Online,
    /// Latched after an error or by an administrator: the reason.
    Failed(String),
    /// Named by the store but not found: the reason.
    Missing(String),
}

impl DriveState {
    /// The state as one word.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Online => "online",
            Self::Failed(_) => "failed",
            Self::Missing(_) => "missing",
        }
    }

    /// Why the drive is not online; empty when it is.
    pub fn reason(&self) -> &str {
        match self {
            Self::Online => "",
            Self::Failed(why) | Self::Missing(why) => why,
        }
    }
}

/// What a drive did since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads that returned data.
    pub reads: u64,
    /// Writes that returned.
    pub writes: u64,
    /// Flushes that returned.
    pub flushes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// I/Os that failed.
    pub io_errors: u64,
    /// I/Os that had no answer within their deadline (also counted in `io_errors`).
    pub timeouts: u64,
    /// Blocks, trailers and other structures whose contents were not what was written there.
    pub checksum_errors: u64,
    /// Blocks and structures written again from redundancy.
    pub repaired_blocks: u64,
}

/// How long I/Os took, those without an answer included.
#[derive(Default)]
pub struct DriveLatency {
    /// Reads.
    pub read: Histogram,
    /// Writes.
    pub write: Histogram,
    /// Flushes.
    pub flush: Histogram,
}

/// A drive in use or missed.
pub struct DriveHandle {
    id: DriveId,
    path: String,
    size_bytes: u64,
    env: Env,
    drive: Option<Rc<dyn Drive>>,
    state: RefCell<DriveState>,
    counters: Cell<Counters>,
    latency: DriveLatency,
    flushes: Rc<Flushes>,
    /// Ranges of writes and discards that their callers gave up and that the drive may still do. A caller gives up only after a deadline, and then
    /// latches the drive or writes the same range again, which waits here.
    overdue: Rc<HeldRanges<()>>,
    superblock: tokio::sync::Mutex<Superblock>,
}

impl DriveHandle {
    /// A drive that was found, with the superblock it carries.
    pub fn online(env: Env, path: String, drive: Rc<dyn Drive>, superblock: Superblock) -> Rc<Self> {
        let size_bytes = drive.size_bytes();
        Self::new(env, path, size_bytes, Some(drive), DriveState::Online, superblock)
    }

    /// A drive that the store names but that could not be found or read.
    pub fn missing(env: Env, path: String, id: DriveId, size_bytes: u64, why: String) -> Rc<Self> {
        let superblock = Superblock { drive: id, size_bytes, ..Superblock::default() };
        Self::new(env, path, size_bytes, None, DriveState::Missing(why), superblock)
    }

    fn new(
        env: Env,
        path: String,
        size_bytes: u64,
        drive: Option<Rc<dyn Drive>>,
        state: DriveState,
        superblock: Superblock,
    ) -> Rc<Self> {
        Rc::new(Self {
            id: superblock.drive,
            path,
            size_bytes,
            env,
            drive,
            state: RefCell::new(state),
            counters: Cell::default(),
            latency: DriveLatency::default(),
            flushes: Rc::default(),
            overdue: Rc::default(),
            superblock: tokio::sync::Mutex::new(superblock),
        })
    }

    /// The drive's name for life.
    pub fn id(&self) -> DriveId {
        self.id
    }

    /// Where it stands on this machine.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether it was found at the start and is open, in use or not.
    pub fn is_open(&self) -> bool {
        self.drive.is_some()
    }

    /// Its size, or the size it had when last seen.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether it takes I/O.
    pub fn state(&self) -> DriveState {
        self.state.borrow().clone()
    }

    /// Whether it takes I/O.
    pub fn is_online(&self) -> bool {
        *self.state.borrow() == DriveState::Online
    }

    /// Refuses all I/O from now on. The first reason stays.
    pub fn latch(&self, why: String) {
        let mut state = self.state.borrow_mut();
        if *state == DriveState::Online {
            tracing::error!(drive = %self.id, path = self.path, why, "drive latched as failed");
            *state = DriveState::Failed(why);
        }
    }

    /// What it did so far.
    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// How long its I/Os took so far.
    pub fn latency(&self) -> &DriveLatency {
        &self.latency
    }

    /// Counts contents that were not what was written there.
    pub fn count_checksum_error(&self) {
        self.count(|counters| counters.checksum_errors += 1);
    }

    /// Counts a block or structure written again from redundancy.
    pub fn count_repaired(&self, blocks: u64) {
        self.count(|counters| counters.repaired_blocks += blocks);
    }

    fn count(&self, change: impl FnOnce(&mut Counters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    fn online_drive(&self) -> Result<Rc<dyn Drive>, DriveError> {
        match (&self.drive, &*self.state.borrow()) {
            (Some(drive), DriveState::Online) => Ok(drive.clone()),
            (_, state) => Err(DriveError::Down(format!("{}: {}", state.word(), state.reason()))),
        }
    }

    /// Waits for `work` as long as the deadline of `io` allows; none when it is over.
    async fn in_time<T>(&self, io: Io, mut work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        for _ in 0..DEADLINE_STEPS {
            if let Some(result) = timeout(&self.env, io.deadline / DEADLINE_STEPS, work.as_mut()).await {
                return Some(result);
            }
        }
        self.count(|counters| counters.timeouts += 1);
        None
    }

    /// An I/O that changes nothing, or whose failure its caller remembers.
    async fn run<F: Future>(
        &self,
        io: Io,
        start: impl FnOnce(Rc<dyn Drive>) -> F,
    ) -> Result<F::Output, DriveError> {
        let work = pin!(start(self.online_drive()?));
        self.in_time(io, work).await.ok_or(DriveError::Deadline(io.deadline))
    }

    /// A write that its caller may give up; the drive does not.
    async fn run_write(&self, at: u64, data: Buf, io: Io) -> Result<Result<(), DriveError>, DriveError> {
        let drive = self.online_drive()?;
        let unflushed = (!io.durable).then(|| Flushes::begin_write(&self.flushes));
        let range = at..at + data.len() as u64;
        if self.overdue.overlaps(&(), &range) {
            let free = pin!(self.overdue.wait_for(&(), &range));
            self.in_time(io, free).await.ok_or(DriveError::Deadline(io.deadline))?;
            self.online_drive()?;
        }
        let asked = io.durable.then(|| Flushes::ask(&self.flushes));
        let work = async move {
            let result = drive.write(at, data, io).await;
            match asked {
                Some(asked) => asked.answered(result).await,
                None => result,
            }
        };
        // Its end frees the range.
        let hold = || (HeldRanges::hold(&self.overdue, (), range), unflushed);
        self.run_to_end("overdue write", io, Box::pin(work), hold).await
    }

    /// A flush that its caller may give up; the drive does not.
    async fn run_flush(&self, io: Io) -> Result<Result<(), DriveError>, DriveError> {
        let drive = self.online_drive()?;
        let asked = Flushes::ask(&self.flushes);
        let work = async move { asked.answered(drive.flush(io).await).await };
        self.run_to_end("overdue flush", io, Box::pin(work), || ()).await
    }

    /// Does `work`. When its deadline is over it goes on, with what `hold` gives, and nobody waits for its result: what it may lose is
    /// remembered where the drive answers.
    async fn run_to_end<T: 'static>(
        &self,
        name: &'static str,
        io: Io,
        mut work: LocalBoxFuture<'static, Result<(), DriveError>>,
        hold: impl FnOnce() -> T,
    ) -> Result<Result<(), DriveError>, DriveError> {
        if let Some(result) = self.in_time(io, Pin::new(&mut work)).await {
            return Ok(result);
        }
        let held = hold();
        let rest = async move {
            let _ = work.await;
            drop(held);
        };
        self.env.spawn(name, Box::pin(rest));
        Err(DriveError::Deadline(io.deadline))
    }

    fn settle<T>(&self, result: Result<Result<T, DriveError>, DriveError>) -> Result<T, DriveError> {
        let result = result.and_then(|inner| inner);
        if let Err(error) = &result
            && !matches!(error, DriveError::Down(_) | DriveError::HostFull)
        {
            self.count(|counters| counters.io_errors += 1);
            tracing::warn!(drive = %self.id, path = self.path, %error, "drive I/O failed");
        }
        result
    }

    /// Reads `len` bytes at `at`.
    pub async fn read(&self, at: u64, len: usize, io: Io) -> Result<Buf, DriveError> {
        assert!(at.is_multiple_of(BLOCK_BYTES as u64) && len.is_multiple_of(BLOCK_BYTES), "{at} + {len}");
        let start = |drive: Rc<dyn Drive>| async move { drive.read(at, BufMut::recycled(len), io).await };
        let buf = self.settle(self.latency.read.time(&self.env, self.run(io, start)).await)?;
        assert_eq!(buf.len(), len, "a drive fills the whole buffer");
        self.count(|counters| {
            counters.reads += 1;
            counters.read_bytes += len as u64;
        });
        Ok(buf.freeze())
    }

    /// Writes `data` at `at`; durable after a later [`DriveHandle::flush`].
    pub async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError> {
        let len = data.len();
        assert!(at.is_multiple_of(BLOCK_BYTES as u64) && len.is_multiple_of(BLOCK_BYTES), "{at} + {len}");
        let failed = self.flushes.failed();
        let result = self.settle(self.latency.write.time(&self.env, self.run_write(at, data, io)).await);
        match result {
            // It may have been the flush within it that failed.
            Err(error) if io.durable => {
                self.flushes.note_failure(&error);
                return Err(error);
            }
            Ok(()) if io.durable && self.flushes.failed() != failed => {
                return Err(DriveError::FlushLost("a flush failed beside a durable write".into()));
            }
            result => result?,
        }
        self.count(|counters| {
            counters.writes += 1;
            counters.write_bytes += len as u64;
        });
        Ok(())
    }

    /// Makes durable what was written before. Callers that wait for the same flush share it. After one flush that failed,
    /// all fail.
    pub async fn flush(&self, io: Io) -> Result<(), DriveError> {
        self.online_drive()?;
        let Some(turn) = self.flushes.take_turn().await? else { return Ok(()) };
        turn.end(self.settle(self.latency.flush.time(&self.env, self.run_flush(io)).await))?;
        self.count(|counters| counters.flushes += 1);
        Ok(())
    }

    /// Gives space back. After an error of any kind the drive may still do it; the range is free for writes when it has.
    pub async fn discard(&self, at: u64, len: u64, io: Io) -> Result<(), DriveError> {
        let drive = self.online_drive()?;
        let (done, ended) = oneshot::channel();
        let range = HeldRanges::hold(&self.overdue, (), at..at + len);
        self.env.spawn(
            "discard",
            Box::pin(async move {
                let result = drive.discard(at, len, io).await;
                drop(range);
                // The caller may have given up.
                let _ = done.send(result);
            }),
        );
        let ended = pin!(async { ended.await.unwrap_or(Err(DriveError::Down("stopped".into()))) });
        self.settle(self.in_time(io, ended).await.ok_or(DriveError::Deadline(io.deadline)))
    }

    /// Changes the superblock and writes both copies, each durable before the next.
    pub async fn update_superblock(&self, change: impl FnOnce(&mut Superblock)) -> Result<(), DriveError> {
        let mut current = self.superblock.lock().await;
        let mut next = current.clone();
        change(&mut next);
        next.seq += 1;
        superblock::write(self, &next).await?;
        *current = next;
        Ok(())
    }

    /// The superblock as last read or written.
    pub async fn superblock(&self) -> Superblock {
        self.superblock.lock().await.clone()
    }

    /// Verifies both copies of the superblock and writes again what is bad. Returns how many copies were bad.
    pub async fn scrub_superblock(&self) -> Result<u64, DriveError> {
        let current = self.superblock.lock().await;
        let bad = superblock::bad_copies(self, &current).await?;
        if !bad.is_empty() {
            bad.iter().for_each(|_| self.count_checksum_error());
            superblock::write(self, &current).await?;
            self.count_repaired(bad.len() as u64);
        }
        Ok(bad.len() as u64)
    }
}

/// The part of a drive that belongs to one array. Offsets are relative to its start.
#[derive(Clone)]
pub struct Slice {
    drive: Rc<DriveHandle>,
    offset: u64,
    len: u64,
}

impl Slice {
    /// `len` bytes of `drive` from `offset` on.
    pub fn new(drive: Rc<DriveHandle>, offset: u64, len: u64) -> Self {
        assert!(offset + len <= drive.size_bytes(), "slice {offset}+{len} ends beyond the drive");
        Self { drive, offset, len }
    }

    /// The drive it is cut from.
    pub fn drive(&self) -> &Rc<DriveHandle> {
        &self.drive
    }

    /// Where on the drive it starts.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn place(&self, at: u64, len: u64) -> u64 {
        assert!(at + len <= self.len, "{at}+{len} ends beyond the slice of {} bytes", self.len);
        self.offset + at
    }

    /// Reads `len` bytes at `at`.
    pub async fn read(&self, at: u64, len: usize, io: Io) -> Result<Buf, DriveError> {
        self.drive.read(self.place(at, len as u64), len, io).await
    }

    /// Writes `data` at `at`.
    pub async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError> {
        self.drive.write(self.place(at, data.len() as u64), data, io).await
    }

    /// Makes durable what was written before.
    pub async fn flush(&self, io: Io) -> Result<(), DriveError> {
        self.drive.flush(io).await
    }

    /// Gives space back.
    pub async fn discard(&self, at: u64, len: u64, io: Io) -> Result<(), DriveError> {
        self.drive.discard(self.place(at, len), len, io).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::env::{LocalBoxFuture, Runtime};
    use std::task::Poll;
    use std::time::Duration;

    /// Comes back after so many polls.
    fn after_polls(mut polls: u32) -> LocalBoxFuture<'static, ()> {
        Box::pin(std::future::poll_fn(move |context| {
            context.waker().wake_by_ref();
            polls -= 1;
            if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
        }))
    }

    /// Every time is over when it is looked at again.
    struct Hurried;

    impl Runtime for Hurried {
        fn now(&self) -> Duration {
            Duration::ZERO
        }
        fn wall_ns(&self) -> i64 {
            0
        }
        fn sleep(&self, _period: Duration) -> LocalBoxFuture<'static, ()> {
            after_polls(2)
        }
        fn spawn(&self, _name: &'static str, _task: LocalBoxFuture<'static, ()>) {}
        fn random(&self) -> u64 {
            0
        }
    }

    /// Answers after so many polls.
    struct Late(u32);

    impl Drive for Late {
        fn size_bytes(&self) -> u64 {
            1 << 20
        }
        fn read(&self, _: u64, buf: BufMut, _: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
            let wait = after_polls(self.0);
            Box::pin(async move {
                wait.await;
                Ok(buf)
            })
        }
        fn write(&self, _: u64, _: Buf, _: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
            unreachable!("only read here")
        }
        fn flush(&self, _: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
            unreachable!("only read here")
        }
        fn discard(&self, _: u64, _: u64, _: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
            unreachable!("only read here")
        }
    }

    fn read(polls: u32) -> (Result<Buf, DriveError>, u64) {
        let superblock = Superblock { size_bytes: 1 << 20, ..Superblock::default() };
        let handle = DriveHandle::online(Rc::new(Hurried), "late".into(), Rc::new(Late(polls)), superblock);
        let io = Io::new(crate::Class::Client, "test");
        let result =
            crate::runtime::block_on(async { handle.read(0, BLOCK_BYTES, io).await }).expect("a worker");
        (result, handle.counters.get().timeouts)
    }

    #[test]
    fn an_answer_that_is_seen_only_after_a_pause_is_taken() {
        // The first time is over before the answer is seen, as after a pause.
        let (result, timeouts) = read(4);
        assert!(result.is_ok() && timeouts == 0, "{result:?}");
    }

    #[test]
    fn no_answer_in_all_steps_is_the_end() {
        let (result, timeouts) = read(1000);
        assert!(matches!(result, Err(DriveError::Deadline(_))) && timeouts == 1, "{result:?}");
    }
}
