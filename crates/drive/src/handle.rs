//! The handle through which all other code uses a drive: deadlines, counters, a latch for failed drives, and
//! slices.
//!
//! Invariants:
//! - Once latched, a drive is never read or written again under this handle; a replacement gets a new handle.
//!   The caller decides when to latch: see `Roster` in the array crate, which asks every array of the drive.
//! - A call that changes the drive ends only when the drive has answered. A write or discard whose caller
//!   gave up keeps its range busy ([`HeldRanges`]): a later write to the range waits until the first call has
//!   ended.
//! - A failed flush is remembered ([`crate::flushes`]): every later flush of this handle fails, for every
//!   caller.

use crate::copies::{self, Holder, Scrubbed};
use crate::flushes::Flushes;
use crate::superblock::{SliceEntry, SliceTableError, Superblock};
use crate::{Drive, DriveError, Io};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, DriveId, Env, HeldRanges, Histogram, LocalBoxFuture};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use tokio::sync::oneshot;

/// The number of steps in which a deadline is counted. While the process or its node is stopped (by a signal,
/// or as a suspended or migrating virtual machine) time passes and nobody sees the drive's answers. With
/// steps a pause of any length costs one step, so a drive that has answered long ago does not miss its
/// deadline.
const DEADLINE_STEPS: u32 = 8;

/// The state of a drive. Only an online drive accepts I/O.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriveState {
    /// In use.
    Online,
    /// Latched after an error or by an administrator. Contains the reason.
    Failed(String),
    /// Listed by the store but not found. Contains the reason.
    Missing(String),
}

impl DriveState {
    /// The state as one lower-case word.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Online => "online",
            Self::Failed(_) => "failed",
            Self::Missing(_) => "missing",
        }
    }

    /// The reason why the drive is not online; empty if it is.
    pub fn reason(&self) -> &str {
        match self {
            Self::Online => "",
            Self::Failed(why) | Self::Missing(why) => why,
        }
    }
}

/// Counters of a drive since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Successful reads.
    pub reads: u64,
    /// Successful writes.
    pub writes: u64,
    /// Successful flushes.
    pub flushes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub write_bytes: u64,
    /// Failed I/Os.
    pub io_errors: u64,
    /// I/Os without an answer within their deadline (also counted in `io_errors`).
    pub timeouts: u64,
    /// Blocks, trailers and other structures with contents other than those written.
    pub checksum_errors: u64,
    /// Blocks and structures rewritten from redundancy.
    pub repaired_blocks: u64,
}

/// Latencies of I/Os, including failed ones and those that exceeded their deadline.
#[derive(Default)]
pub struct DriveLatency {
    /// Reads.
    pub read: Histogram,
    /// Writes.
    pub write: Histogram,
    /// Flushes.
    pub flush: Histogram,
}

/// A drive of the store, open or missing.
pub struct DriveHandle {
    id: DriveId,
    path: String,
    env: Env,
    drive: Option<Rc<dyn Drive>>,
    state: RefCell<DriveState>,
    counters: Cell<Counters>,
    latency: DriveLatency,
    flushes: Rc<Flushes>,
    /// Busy ranges of discards, and of writes that are still in flight although their callers gave up. A
    /// caller gives up only after a deadline, and then latches the drive or writes the same range again,
    /// which waits here.
    overdue: Rc<HeldRanges<()>>,
    superblock: tokio::sync::Mutex<Superblock>,
}

impl DriveHandle {
    /// A drive that was found, with its superblock.
    pub fn online(env: Env, path: String, drive: Rc<dyn Drive>, superblock: Superblock) -> Rc<Self> {
        Self::new(env, path, Some(drive), DriveState::Online, superblock)
    }

    /// A drive that the store lists but that could not be found or read, for the reason `why`.
    pub fn missing(env: Env, path: String, id: DriveId, why: String) -> Rc<Self> {
        let superblock = Superblock { drive: id, ..Superblock::default() };
        Self::new(env, path, None, DriveState::Missing(why), superblock)
    }

    fn new(
        env: Env,
        path: String,
        drive: Option<Rc<dyn Drive>>,
        state: DriveState,
        superblock: Superblock,
    ) -> Rc<Self> {
        Rc::new(Self {
            id: superblock.drive,
            path,
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

    /// The drive's identifier for life.
    pub fn id(&self) -> DriveId {
        self.id
    }

    /// The path of the drive on this node.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// True if the drive was found at the start and is open, even if it is latched.
    pub fn is_open(&self) -> bool {
        self.drive.is_some()
    }

    /// The size in bytes. None if the start did not find the drive: nothing else says its size.
    pub fn size_bytes(&self) -> Option<u64> {
        self.drive.as_ref().map(|drive| drive.size_bytes())
    }

    /// The current state.
    pub fn state(&self) -> DriveState {
        self.state.borrow().clone()
    }

    /// True if the drive accepts I/O.
    pub fn is_online(&self) -> bool {
        *self.state.borrow() == DriveState::Online
    }

    /// Latches an online drive as failed: all later I/O is refused. Has no effect on a drive that is not
    /// online, whose reason stays.
    pub fn latch(&self, why: String) {
        let mut state = self.state.borrow_mut();
        if *state == DriveState::Online {
            tracing::error!(drive = %self.id, path = self.path, why, "drive latched as failed");
            *state = DriveState::Failed(why);
        }
    }

    /// The counters so far.
    pub fn counters(&self) -> Counters {
        self.counters.get()
    }

    /// The latencies so far.
    pub fn latency(&self) -> &DriveLatency {
        &self.latency
    }

    /// Counts a checksum error. Callers report it when contents are not those written.
    pub fn count_checksum_error(&self) {
        self.count(|counters| counters.checksum_errors += 1);
    }

    /// Counts blocks or structures rewritten from redundancy.
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

    /// Waits for `work` until the deadline of `io`. Returns none, and counts a timeout, if it does not end in
    /// time.
    async fn in_time<T>(&self, io: Io, mut work: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        for _ in 0..DEADLINE_STEPS {
            if let Some(result) = timeout(&self.env, io.deadline / DEADLINE_STEPS, work.as_mut()).await {
                return Some(result);
            }
        }
        self.count(|counters| counters.timeouts += 1);
        None
    }

    /// Runs an I/O that changes nothing on the drive. It is dropped at its deadline.
    async fn run<F: Future>(
        &self,
        io: Io,
        start: impl FnOnce(Rc<dyn Drive>) -> F,
    ) -> Result<F::Output, DriveError> {
        let work = pin!(start(self.online_drive()?));
        self.in_time(io, work).await.ok_or(DriveError::Deadline(io.deadline))
    }

    /// Runs a write. At its deadline the caller gives up, and the write continues in a task.
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
        // The guards are dropped when the write ends, which frees the range.
        let hold = || (HeldRanges::hold(&self.overdue, (), range), unflushed);
        self.run_to_end("overdue write", io, Box::pin(work), hold).await
    }

    /// Runs a flush. At its deadline the caller gives up, and the flush continues in a task.
    async fn run_flush(&self, io: Io) -> Result<Result<(), DriveError>, DriveError> {
        let drive = self.online_drive()?;
        let asked = Flushes::ask(&self.flushes);
        let work = async move { asked.answered(drive.flush(io).await).await };
        self.run_to_end("overdue flush", io, Box::pin(work), || ()).await
    }

    /// Runs `work`. At its deadline `work` continues in a task, together with the guards that `hold` returns,
    /// and nobody waits for its result. The [`Asked`](crate::flushes::Asked) within `work` remembers a
    /// failure.
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

    /// Reads `len` bytes at offset `at`. Both must be multiples of 4 KiB.
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

    /// Writes `data` at offset `at`. Offset and length must be multiples of 4 KiB. Durable after a later
    /// [`DriveHandle::flush`], or on return if `io` asks for it.
    pub async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError> {
        let len = data.len();
        assert!(at.is_multiple_of(BLOCK_BYTES as u64) && len.is_multiple_of(BLOCK_BYTES), "{at} + {len}");
        let failed = self.flushes.failed();
        let result = self.settle(self.latency.write.time(&self.env, self.run_write(at, data, io)).await);
        match result {
            // The flush within the write may have failed.
            Err(error) if io.durable => {
                self.flushes.note_failure(&error);
                return Err(error);
            }
            Ok(()) if io.durable && self.flushes.failed() != failed => {
                return Err(DriveError::FlushLost("another flush failed during a durable write".into()));
            }
            result => result?,
        }
        self.count(|counters| {
            counters.writes += 1;
            counters.write_bytes += len as u64;
        });
        Ok(())
    }

    /// Makes earlier writes durable. Callers that wait at the same time share a flush. After a failed flush
    /// that may have lost writes, all later ones fail.
    pub async fn flush(&self, io: Io) -> Result<(), DriveError> {
        self.online_drive()?;
        let Some(turn) = self.flushes.take_turn().await? else { return Ok(()) };
        turn.end(self.settle(self.latency.flush.time(&self.env, self.run_flush(io)).await))?;
        self.count(|counters| counters.flushes += 1);
        Ok(())
    }

    /// Gives space back. After an error of any kind the drive may still carry it out. Writes to the range
    /// wait until the drive has ended it.
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

    /// Enters slices of one array in the slice table, in place of those that the array had on the drive, and
    /// writes both copies of the superblock, the first durable before the second is written. Nothing is
    /// written if a slice does not fit.
    pub async fn put_slices(&self, slices: &[SliceEntry]) -> Result<(), SliceTableError> {
        let mut current = self.superblock.lock().await;
        let mut next = current.clone();
        next.put_slices(slices)?;
        self.write_superblock(&mut current, next).await
    }

    /// Notes that the drive has grown, and moves the last copy of the superblock to its end. Does nothing if
    /// it has not.
    pub async fn note_size(&self) -> Result<(), SliceTableError> {
        let mut current = self.superblock.lock().await;
        match self.size_bytes() {
            Some(size) if size > current.size_bytes => {
                let next = Superblock { size_bytes: size, ..current.clone() };
                self.write_superblock(&mut current, next).await
            }
            _ => Ok(()),
        }
    }

    async fn write_superblock(
        &self,
        current: &mut Superblock,
        mut next: Superblock,
    ) -> Result<(), SliceTableError> {
        next.seq += 1;
        next.features = next.features.maintained();
        if let Err(error) = Superblock::decode(&next.encode()) {
            // A damaged superblock may have brought numbers near the end of what can be read.
            return Err(DriveError::Down(format!("its superblock cannot be changed: {error}")).into());
        }
        copies::write(self, copies::places(next.size_bytes), &next).await?;
        *current = next;
        Ok(())
    }

    /// The superblock as last read or written.
    pub async fn superblock(&self) -> Superblock {
        self.superblock.lock().await.clone()
    }

    /// Verifies both copies of the superblock, and rewrites both if one is bad.
    pub async fn scrub_superblock(&self) -> Scrubbed {
        let current = self.superblock.lock().await;
        let found = copies::scrub(self, copies::places(current.size_bytes), &*current).await;
        (0..found.bad).for_each(|_| self.count_checksum_error());
        self.count_repaired(found.repaired);
        found
    }
}

macro_rules! holders {
    ($($holder:ty),*) => {
        $(impl Holder for $holder {
            async fn read(&self, at: u64, len: usize, io: Io) -> Result<Buf, DriveError> {
                Self::read(self, at, len, io).await
            }

            async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError> {
                Self::write(self, at, data, io).await
            }

            async fn flush(&self, io: Io) -> Result<(), DriveError> {
                Self::flush(self, io).await
            }
        })*
    };
}

holders!(DriveHandle, Slice);

/// The part of a drive that belongs to one array. Offsets are relative to the start of the slice.
#[derive(Clone)]
pub struct Slice {
    drive: Rc<DriveHandle>,
    offset: u64,
    len: u64,
}

impl Slice {
    /// The slice of `len` bytes of `drive` from `offset` on. Panics if it extends beyond the drive.
    pub fn new(drive: Rc<DriveHandle>, offset: u64, len: u64) -> Self {
        let fits = drive.size_bytes().is_none_or(|size| offset + len <= size);
        assert!(fits, "slice {offset}+{len} ends beyond the drive");
        Self { drive, offset, len }
    }

    /// The drive that contains the slice.
    pub fn drive(&self) -> &Rc<DriveHandle> {
        &self.drive
    }

    /// The offset of the slice on the drive in bytes.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// True if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn place(&self, at: u64, len: u64) -> u64 {
        assert!(at + len <= self.len, "{at}+{len} ends beyond the slice of {} bytes", self.len);
        self.offset + at
    }

    /// Reads `len` bytes at offset `at`. Both must be multiples of 4 KiB.
    pub async fn read(&self, at: u64, len: usize, io: Io) -> Result<Buf, DriveError> {
        self.drive.read(self.place(at, len as u64), len, io).await
    }

    /// Writes `data` at offset `at` in the slice, as [`DriveHandle::write`].
    pub async fn write(&self, at: u64, data: Buf, io: Io) -> Result<(), DriveError> {
        self.drive.write(self.place(at, data.len() as u64), data, io).await
    }

    /// Makes earlier writes to the drive durable, as [`DriveHandle::flush`].
    pub async fn flush(&self, io: Io) -> Result<(), DriveError> {
        self.drive.flush(io).await
    }

    /// Gives space back, as [`DriveHandle::discard`].
    pub async fn discard(&self, at: u64, len: u64, io: Io) -> Result<(), DriveError> {
        self.drive.discard(self.place(at, len), len, io).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::copies::COPY_BYTES;
    use crate::{Class, MemoryDrive, superblock};
    use penstock_base::env::{LocalBoxFuture, Runtime};
    use penstock_base::{Features, Id128};
    use std::task::Poll;
    use std::time::Duration;

    /// Completes at the given poll.
    fn after_polls(mut polls: u32) -> LocalBoxFuture<'static, ()> {
        Box::pin(std::future::poll_fn(move |context| {
            context.waker().wake_by_ref();
            polls -= 1;
            if polls == 0 { Poll::Ready(()) } else { Poll::Pending }
        }))
    }

    /// A runtime in which every sleep is over at its second poll.
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

    /// A drive that answers a read at the given poll.
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
            penstock_worker::block_on(async { handle.read(0, BLOCK_BYTES, io).await }).expect("a worker");
        (result, handle.counters.get().timeouts)
    }

    #[test]
    fn an_answer_that_is_seen_only_after_a_pause_is_taken() {
        // The first step of the deadline is over before the answer is seen, as after a pause.
        let (result, timeouts) = read(4);
        assert!(result.is_ok() && timeouts == 0, "{result:?}");
    }

    #[test]
    fn no_answer_in_all_steps_is_the_end() {
        let (result, timeouts) = read(1000);
        assert!(matches!(result, Err(DriveError::Deadline(_))) && timeouts == 1, "{result:?}");
    }

    fn block_on<T>(work: impl Future<Output = T>) -> T {
        penstock_worker::block_on(work).expect("a worker")
    }

    /// The last copy moves to the end of a drive that has grown, so that it is found without the first. The
    /// superblock of a former use of that place does not count.
    #[test]
    fn a_superblock_grows_with_its_drive() {
        let drive = Rc::new(MemoryDrive::new(16 << 20));
        let io = Io::new(Class::Meta, "test");
        let old = Superblock {
            drive: DriveId(Id128([2; 16])),
            seq: 5,
            size_bytes: 8 << 20,
            features: Features { compatible: 8, ..Features::default() },
            ..Superblock::default()
        };
        let former =
            Superblock { drive: DriveId(Id128([9; 16])), seq: 70, size_bytes: 16 << 20, ..old.clone() };
        block_on(async {
            for (place, copy) in copies::places(8 << 20).into_iter().zip([old.clone(), old.clone()]) {
                drive.write(place, copy.encode(), io).await.unwrap();
            }
            drive.write(copies::places(16 << 20)[1], former.encode(), io).await.unwrap();
        });
        let found = block_on(superblock::read(&*drive)).unwrap();
        assert_eq!(found, old);
        let handle = DriveHandle::online(Rc::new(Hurried), "grown".into(), drive.clone(), found);
        block_on(handle.note_size()).unwrap();
        block_on(handle.note_size()).unwrap();
        block_on(drive.write(0, Buf::zeroed(COPY_BYTES), io)).unwrap();
        let grown = block_on(superblock::read(&*drive)).unwrap();
        let expected = Superblock { seq: 6, size_bytes: 16 << 20, features: Features::default(), ..old };
        assert_eq!(grown, expected, "without a feature that nothing maintains");
    }
}
