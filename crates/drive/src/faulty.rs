//! A drive that wraps another and misbehaves as told.
//!
//! Faults act on the n-th matching I/O after they are planted, each once unless said otherwise.

use crate::{Drive, DriveError, Io};
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Env, LocalBoxFuture, SECTOR_BYTES};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// What a fault acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
}

/// One misbehaviour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The I/O fails.
    Fail,
    /// Only the first sectors of the write arrive; it reports success.
    Torn {
        /// Sectors that arrive.
        sectors: usize,
    },
    /// The write arrives this many blocks further on; it reports success.
    Misdirected {
        /// Distance in blocks.
        blocks: u64,
    },
    /// The write never arrives; it reports success.
    Dropped,
    /// One byte of the read or written data is flipped.
    Rotten,
    /// The I/O takes this much longer.
    Slow(Duration),
    /// The I/O never completes.
    Silent,
    /// The write reports that the host is full.
    HostFull,
}

struct Planted {
    op: Op,
    countdown: u64,
    fault: Fault,
    within: Range<u64>,
}

/// A drive with planted faults.
pub struct FaultyDrive {
    inner: Rc<dyn Drive>,
    env: Env,
    planted: RefCell<Vec<Planted>>,
    gone: Cell<bool>,
    full: Cell<bool>,
}

impl FaultyDrive {
    /// A drive that behaves until told otherwise.
    pub fn new(env: Env, inner: Rc<dyn Drive>) -> Self {
        Self { inner, env, planted: RefCell::default(), gone: Cell::new(false), full: Cell::new(false) }
    }

    /// Makes the `nth` matching I/O from now (0 is the next) suffer `fault`.
    pub fn plant(&self, op: Op, nth: u64, fault: Fault) {
        self.plant_within(op, nth, fault, 0..u64::MAX);
    }

    /// As [`FaultyDrive::plant`], but only I/Os wholly within these bytes match, and a misdirected write stays there.
    pub fn plant_within(&self, op: Op, nth: u64, fault: Fault, within: Range<u64>) {
        self.planted.borrow_mut().push(Planted { op, countdown: nth, fault, within });
    }

    /// Whether a planted fault has not come yet.
    pub fn has_planted(&self) -> bool {
        self.waiting() > 0
    }

    /// How many planted faults have not come yet.
    pub fn waiting(&self) -> usize {
        self.planted.borrow().len()
    }

    /// Makes every I/O fail from now on, or work again.
    pub fn set_gone(&self, gone: bool) {
        self.gone.set(gone);
    }

    /// Makes every write of space not yet allocated report a full host from now on, or work again.
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
            match fault {
                _ if self.gone.get() => return Err(self.refuse("read", at, len)),
                Some(Fault::Fail) => return Err(self.refuse("read", at, len)),
                Some(Fault::Slow(more)) => self.env.sleep(more).await,
                Some(Fault::Silent) => std::future::pending().await,
                _ => {}
            }
            let mut buf = self.inner.read(at, buf, io).await?;
            if fault == Some(Fault::Rotten) {
                buf.as_mut()[len / 2] ^= 0x40;
            }
            Ok(buf)
        })
    }

    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let (fault, within) = self.next_fault(Op::Write, at, data.len()).unzip();
            match fault {
                _ if self.gone.get() => Err(self.refuse("write", at, data.len())),
                Some(Fault::Fail) => Err(self.refuse("write", at, data.len())),
                Some(Fault::HostFull) => Err(DriveError::HostFull),
                _ if self.full.get() => Err(DriveError::HostFull),
                Some(Fault::Slow(more)) => {
                    self.env.sleep(more).await;
                    self.inner.write(at, data, io).await
                }
                Some(Fault::Silent) => std::future::pending().await,
                Some(Fault::Dropped) => Ok(()),
                Some(Fault::Misdirected { blocks }) => {
                    let elsewhere = self.misdirect(at, blocks, data.len(), within.unwrap_or_default());
                    self.inner.write(elsewhere, data, io).await
                }
                Some(Fault::Torn { sectors }) => self.write_torn(at, data, sectors, io).await,
                Some(Fault::Rotten) => {
                    let mut rotten = BufMut::zeroed(data.len());
                    rotten.as_mut().copy_from_slice(&data);
                    rotten.as_mut()[data.len() / 2] ^= 0x40;
                    self.inner.write(at, rotten.freeze(), io).await
                }
                None => self.inner.write(at, data, io).await,
            }
        })
    }

    fn flush(&self, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            match self.next_fault(Op::Flush, 0, 0).map(|(fault, _)| fault) {
                _ if self.gone.get() => Err(self.refuse("flush", 0, 0)),
                Some(Fault::Fail) => Err(self.refuse("flush", 0, 0)),
                Some(Fault::Silent) => std::future::pending().await,
                Some(Fault::Slow(more)) => {
                    self.env.sleep(more).await;
                    self.inner.flush(io).await
                }
                _ => self.inner.flush(io).await,
            }
        })
    }

    fn discard(&self, at: u64, len: u64, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        if self.gone.get() {
            return Box::pin(async move { Err(self.refuse("discard", at, len as usize)) });
        }
        self.inner.discard(at, len, io)
    }
}

impl FaultyDrive {
    /// Where a write of `len` bytes at `at` goes instead.
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
