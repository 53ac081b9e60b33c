//! A drive wrapper that injects faults, for tests.
//!
//! A planted fault acts once, on the n-th matching I/O after it is planted. A slow write, flush or discard
//! runs in a task of its own, as in a kernel: it happens even if its caller gave up.

use crate::{Drive, DriveError, Io};
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Env, LocalBoxFuture, SECTOR_BYTES};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::oneshot;

/// The operation that a fault acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Writes that are durable when they return ([`Io::durable`]).
    DurableWrite,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
}

/// Random delays of I/Os, in addition to planted faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// One I/O in this many is slow on average; 0 for none.
    pub one_in: u64,
    /// The longest delay. Most delays are much shorter.
    pub most: Duration,
}

/// A fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The I/O fails. If it is a flush, the writes that it covers may be lost.
    Fail,
    /// The drive stores only the first sectors of the write, and reports success.
    Torn {
        /// The number of sectors stored.
        sectors: usize,
    },
    /// The drive stores the write this many blocks further on, and reports success.
    Misdirected {
        /// Distance in blocks.
        blocks: u64,
    },
    /// The drive stores nothing of the write, and reports success.
    Dropped,
    /// One bit of the read or written data is flipped.
    Rotten,
    /// The I/O is delayed by this time.
    Slow(Duration),
    /// The write or flush fails after this time, even if its caller has given up.
    SlowFail(Duration),
    /// The flush, or the write that includes one, fails now, and reports it after this time, even if its
    /// caller has given up.
    FailToldLate(Duration),
    /// The I/O never completes.
    Silent,
    /// The write fails with [`DriveError::HostFull`].
    HostFull,
}

struct Planted {
    op: Op,
    countdown: u64,
    fault: Fault,
    within: Range<u64>,
}

/// Bytes that reads do not bring as they are on the medium.
#[derive(Clone)]
struct BadBytes {
    bytes: Range<u64>,
    how: Bad,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Bad {
    Unreadable,
    Wrong,
}

/// A drive with planted faults.
pub struct FaultyDrive {
    inner: Rc<dyn Drive>,
    env: Env,
    planted: RefCell<Vec<Planted>>,
    bad: RefCell<Vec<BadBytes>>,
    pace: Cell<Option<Pace>>,
    /// Called when a flush, or a write that includes one, fails, and when a plain write suffers
    /// [`Fault::SlowFail`]: drops unflushed writes from the medium.
    forget: Option<Rc<dyn Fn()>>,
    gone: Cell<bool>,
    full: Cell<bool>,
}

impl FaultyDrive {
    /// A wrapper of `inner` without faults.
    pub fn new(env: Env, inner: Rc<dyn Drive>) -> Self {
        Self {
            inner,
            env,
            planted: RefCell::default(),
            bad: RefCell::default(),
            pace: Cell::new(None),
            forget: None,
            gone: Cell::new(false),
            full: Cell::new(false),
        }
    }

    /// The same drive; `forget` is called when a flush, or a write that includes one, fails. It drops
    /// unflushed writes.
    pub fn forgetting(self, forget: impl Fn() + 'static) -> Self {
        Self { forget: Some(Rc::new(forget)), ..self }
    }

    /// Fails a flush, or a write that includes one, with the delays of `fault`. Unflushed writes may be lost.
    async fn fail_flush(&self, fault: Option<Fault>, error: DriveError) -> Result<(), DriveError> {
        let mut forget = self.forget.clone();
        let delay = match fault {
            Some(Fault::SlowFail(after)) => Some(after),
            Some(Fault::FailToldLate(after)) => {
                forget.take().iter().for_each(|forget| forget());
                Some(after)
            }
            _ => None,
        };
        let fail = async move {
            forget.iter().for_each(|forget| forget());
            Err(error)
        };
        self.late(delay, fail).await
    }

    /// Makes reads that touch these bytes fail until one write covers all of them.
    pub fn set_unreadable(&self, bytes: Range<u64>) {
        self.bad.borrow_mut().push(BadBytes { bytes, how: Bad::Unreadable });
    }

    /// Makes reads that touch these bytes bring other ones there, without an error, until one write covers
    /// all of them.
    pub fn set_wrong(&self, bytes: Range<u64>) {
        self.bad.borrow_mut().push(BadBytes { bytes, how: Bad::Wrong });
    }

    /// Undoes all calls of [`FaultyDrive::set_unreadable`] and [`FaultyDrive::set_wrong`].
    pub fn set_readable(&self) {
        self.bad.borrow_mut().clear();
    }

    /// Delays I/Os at random from now on; none stops that.
    pub fn set_pace(&self, pace: Option<Pace>) {
        self.pace.set(pace);
    }

    /// The delay of the next I/O; none if it is not delayed.
    fn delay(&self, fault: Option<Fault>) -> Option<Duration> {
        if let Some(Fault::Slow(more)) = fault {
            return Some(more);
        }
        let pace = self.pace.get().filter(|pace| pace.one_in > 0)?;
        if !self.env.random().is_multiple_of(pace.one_in) {
            return None;
        }
        // The number of halvings is uniform, 0 to 11.
        let halvings = self.env.random() % 12;
        Some(pace.most / (1 << halvings))
    }

    /// Runs `work` in a task of its own after `delay`, or at once in the caller's task if there is none.
    async fn late<T: 'static>(
        &self,
        delay: Option<Duration>,
        work: impl Future<Output = Result<T, DriveError>> + 'static,
    ) -> Result<T, DriveError> {
        let Some(delay) = delay else { return work.await };
        let (done, answer) = oneshot::channel();
        let pause = self.env.sleep(delay);
        self.env.spawn(
            "late I/O",
            Box::pin(async move {
                pause.await;
                // The caller may have given up.
                let _ = done.send(work.await);
            }),
        );
        answer.await.unwrap_or(Err(DriveError::Down("stopped".into())))
    }

    /// Plants `fault` on the `nth` matching I/O from now (0 is the next).
    pub fn plant(&self, op: Op, nth: u64, fault: Fault) {
        self.plant_within(op, nth, fault, 0..u64::MAX);
    }

    /// As [`FaultyDrive::plant`], but only I/Os entirely within these bytes match, and a misdirected write
    /// stays within them. A flush has offset and length 0.
    pub fn plant_within(&self, op: Op, nth: u64, fault: Fault, within: Range<u64>) {
        self.planted.borrow_mut().push(Planted { op, countdown: nth, fault, within });
    }

    /// True if a planted fault has not acted yet.
    pub fn has_planted(&self) -> bool {
        self.waiting() > 0
    }

    /// The number of planted faults that have not acted yet.
    pub fn waiting(&self) -> usize {
        self.planted.borrow().len()
    }

    /// With true every I/O fails from now on, with false I/O works again.
    pub fn set_gone(&self, gone: bool) {
        self.gone.set(gone);
    }

    /// With true every write fails from now on with [`DriveError::HostFull`], with false writes work again.
    pub fn set_full(&self, full: bool) {
        self.full.set(full);
    }

    fn next_fault(&self, op: Op, at: u64, len: usize) -> Option<(Fault, Range<u64>)> {
        let mut planted = self.planted.borrow_mut();
        let mut due = None;
        planted.retain_mut(|plan| {
            let inside = at >= plan.within.start && at + len as u64 <= plan.within.end;
            if plan.op != op || !inside || due.is_some() {
                return true;
            }
            if plan.countdown == 0 {
                due = Some((plan.fault, plan.within.clone()));
                return false;
            }
            plan.countdown -= 1;
            true
        });
        due
    }

    fn refuse(&self, op: &'static str, at: u64, len: usize) -> DriveError {
        DriveError::Io { op, at, len: len as u64, why: "injected fault".into() }
    }
}

impl Drive for FaultyDrive {
    fn size_bytes(&self) -> u64 {
        self.inner.size_bytes()
    }

    fn read(&self, at: u64, buf: BufMut, io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        Box::pin(async move {
            let len = buf.len();
            let fault = self.next_fault(Op::Read, at, len).map(|(fault, _)| fault);
            if self.gone.get() || fault == Some(Fault::Fail) {
                return Err(self.refuse("read", at, len));
            }
            if fault == Some(Fault::Silent) {
                std::future::pending().await
            }
            if let Some(delay) = self.delay(fault) {
                self.env.sleep(delay).await;
            }
            let end = at + len as u64;
            let touched = |bad: &&BadBytes| bad.bytes.start < end && at < bad.bytes.end;
            let bad: Vec<BadBytes> = self.bad.borrow().iter().filter(touched).cloned().collect();
            if bad.iter().any(|bad| bad.how == Bad::Unreadable) {
                return Err(DriveError::Io { op: "read", at, len: len as u64, why: "medium error".into() });
            }
            let mut buf = self.inner.read(at, buf, io).await?;
            if fault == Some(Fault::Rotten) {
                buf.as_mut()[len / 2] ^= 0x40;
            }
            for BadBytes { bytes, .. } in bad {
                let (from, until) = (bytes.start.max(at) - at, bytes.end.min(end) - at);
                buf.as_mut()[to_usize(from)..to_usize(until)].iter_mut().for_each(|byte| *byte = !*byte);
            }
            Ok(buf)
        })
    }

    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let durable = io.durable.then(|| self.next_fault(Op::DurableWrite, at, data.len())).flatten();
            let (fault, within) = durable.or_else(|| self.next_fault(Op::Write, at, data.len())).unzip();
            let end = at + data.len() as u64;
            let written = |bad: &BadBytes| at <= bad.bytes.start && bad.bytes.end <= end;
            match fault {
                _ if self.gone.get() => return Err(self.refuse("write", at, data.len())),
                Some(Fault::Fail | Fault::FailToldLate(_)) if !io.durable => {
                    return Err(self.refuse("write", at, data.len()));
                }
                Some(Fault::Fail | Fault::SlowFail(_) | Fault::FailToldLate(_)) => {
                    return self.fail_flush(fault, self.refuse("write", at, data.len())).await;
                }
                Some(Fault::HostFull) => return Err(DriveError::HostFull),
                _ if self.full.get() => return Err(DriveError::HostFull),
                Some(Fault::Silent) => std::future::pending().await,
                Some(Fault::Dropped) => return Ok(()),
                Some(Fault::Misdirected { blocks }) => {
                    let elsewhere = self.misdirect(at, blocks, data.len(), within.unwrap_or_default());
                    return self.inner.write(elsewhere, data, io).await;
                }
                Some(Fault::Torn { sectors }) => return self.write_torn(at, data, sectors, io).await,
                Some(Fault::Rotten) => {
                    let mut rotten = BufMut::zeroed(data.len());
                    rotten.as_mut().copy_from_slice(&data);
                    rotten.as_mut()[data.len() / 2] ^= 0x40;
                    return self.inner.write(at, rotten.freeze(), io).await;
                }
                Some(Fault::Slow(_)) | None => {}
            }
            self.bad.borrow_mut().retain(|bad| !written(bad));
            let inner = self.inner.clone();
            self.late(self.delay(fault), async move { inner.write(at, data, io).await }).await
        })
    }

    fn flush(&self, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let fault = self.next_fault(Op::Flush, 0, 0).map(|(fault, _)| fault);
            let fails = matches!(fault, Some(Fault::Fail | Fault::SlowFail(_) | Fault::FailToldLate(_)));
            if self.gone.get() || fails {
                return self.fail_flush(fault, self.refuse("flush", 0, 0)).await;
            }
            if fault == Some(Fault::Silent) {
                std::future::pending().await
            }
            let inner = self.inner.clone();
            self.late(self.delay(fault), async move { inner.flush(io).await }).await
        })
    }

    fn discard(&self, at: u64, len: u64, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let fault = self.next_fault(Op::Discard, at, to_usize(len)).map(|(fault, _)| fault);
            if self.gone.get() || fault == Some(Fault::Fail) {
                return Err(self.refuse("discard", at, to_usize(len)));
            }
            if fault == Some(Fault::Silent) {
                std::future::pending().await
            }
            let inner = self.inner.clone();
            self.late(self.delay(fault), async move { inner.discard(at, len, io).await }).await
        })
    }
}

impl FaultyDrive {
    /// The offset to which a write of `len` bytes at `at` is misdirected.
    fn misdirect(&self, at: u64, blocks: u64, len: usize, within: Range<u64>) -> u64 {
        let end = within.end.min(self.size_bytes());
        let room = (end - within.start).saturating_sub(len as u64).max(1);
        let offset = (at - within.start + blocks * BLOCK_BYTES as u64) % room;
        within.start + offset / BLOCK_BYTES as u64 * BLOCK_BYTES as u64
    }

    async fn write_torn(&self, at: u64, data: Buf, sectors: usize, io: Io) -> Result<(), DriveError> {
        let arrived = (sectors * SECTOR_BYTES).min(data.len());
        let mut whole = self.inner.read(at, BufMut::zeroed(data.len()), io).await?;
        whole.as_mut()[..arrived].copy_from_slice(&data[..arrived]);
        self.inner.write(at, whole.freeze(), io).await
    }
}
