//! Simulated drives, each with a live and a durable image.

use crate::World;
use penstock_base::env::Runtime;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, IoContext, LocalBoxFuture, SECTOR_BYTES};
use penstock_drive::{Drive, DriveError, Io};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::oneshot;

type Image = BTreeMap<u64, Buf>;

struct Pending {
    order: u64,
    block: u64,
    data: Buf,
    site: &'static str,
}

/// The unflushed writes that survive a power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutMode {
    /// None of them.
    Nothing,
    /// All of them.
    Everything,
    /// A random subset of the writes.
    Writes,
    /// A random subset of the sectors of each write.
    Sectors,
}

impl CutMode {
    /// A random mode, drawn from `world`.
    pub fn draw(world: &World) -> Self {
        [Self::Nothing, Self::Everything, Self::Writes, Self::Sectors][to_usize(world.below(4))]
    }
}

/// The medium of a drive. It survives power cuts and worlds.
pub struct SimDisk {
    size_bytes: u64,
    live: RefCell<Image>,
    durable: RefCell<Image>,
    pending: RefCell<Vec<Pending>>,
    order: Cell<u64>,
    /// Blocks that have space on the host although they were never written.
    allocated: RefCell<Vec<Range<u64>>>,
    full: Cell<bool>,
    /// By site: the context of its last read or write.
    contexts: RefCell<BTreeMap<&'static str, IoContext>>,
}

impl SimDisk {
    /// A medium full of zeros. `size_bytes` is a multiple of 4096.
    pub fn new(size_bytes: u64) -> Rc<Self> {
        assert!(size_bytes.is_multiple_of(BLOCK_BYTES as u64), "a disk is whole blocks");
        Rc::new(Self {
            size_bytes,
            live: RefCell::default(),
            durable: RefCell::default(),
            pending: RefCell::default(),
            order: Cell::new(0),
            allocated: RefCell::default(),
            full: Cell::new(false),
            contexts: RefCell::default(),
        })
    }

    fn note_context(&self, io: Io) {
        self.contexts.borrow_mut().insert(io.site, io.context);
    }

    /// The context of the last read or write from a site; none if there was none.
    pub fn last_context(&self, site: &str) -> Option<IoContext> {
        self.contexts.borrow().get(site).copied()
    }

    /// Allocates space on the host for a range of bytes, as a file's allocation does.
    pub fn allocate(&self, bytes: Range<u64>) {
        let block = BLOCK_BYTES as u64;
        self.allocated.borrow_mut().push(bytes.start / block..bytes.end.div_ceil(block));
    }

    /// Sets whether the host is full. While it is, writes to blocks that were neither written nor allocated
    /// before fail with [`DriveError::HostFull`]. Discarded blocks keep their space.
    pub fn set_full(&self, full: bool) {
        self.full.set(full);
    }

    fn lacks_room(&self, block: u64, count: u64) -> bool {
        let (live, allocated) = (self.live.borrow(), self.allocated.borrow());
        let has_space = |at: &u64| live.contains_key(at) || allocated.iter().any(|range| range.contains(at));
        self.full.get() && !(block..block + count).all(|at| has_space(&at))
    }

    /// Cuts the power: the contents become the durable image, with the unflushed writes that `mode` keeps.
    pub fn cut(&self, world: &World, mode: CutMode) {
        let pending = std::mem::take(&mut *self.pending.borrow_mut());
        let mut durable = self.durable.borrow_mut();
        for write in pending {
            let whole = match mode {
                CutMode::Nothing => continue,
                CutMode::Everything => true,
                CutMode::Writes if world.below(2) == 0 => continue,
                CutMode::Writes => true,
                CutMode::Sectors => false,
            };
            for (index, block) in (write.block..).zip(split(&write.data)) {
                let kept = if whole { block } else { mix_sectors(world, durable.get(&index), &block) };
                durable.insert(index, kept);
            }
        }
        *self.live.borrow_mut() = durable.clone();
    }

    /// Loses unflushed writes, as a drive or a kernel may after a flush failed. Each write randomly becomes
    /// durable, disappears from the contents, or disappears at the next power cut.
    pub fn forget_unflushed(&self, world: &World) {
        let pending = std::mem::take(&mut *self.pending.borrow_mut());
        let (mut live, mut durable) = (self.live.borrow_mut(), self.durable.borrow_mut());
        for write in pending {
            let fate = world.below(3);
            for (index, block) in (write.block..).zip(split(&write.data)) {
                match fate {
                    0 => drop(durable.insert(index, block)),
                    1 => match durable.get(&index) {
                        Some(old) => drop(live.insert(index, old.clone())),
                        None => drop(live.remove(&index)),
                    },
                    _ => {}
                }
            }
        }
    }

    /// A count that grows with every write: a mark for [`SimDisk::unflushed_before`].
    pub fn order(&self) -> u64 {
        self.order.get()
    }

    /// Sites of the unflushed writes that are older than `mark`.
    pub fn unflushed_before(&self, mark: u64) -> Vec<&'static str> {
        self.pending.borrow().iter().filter(|write| write.order < mark).map(|write| write.site).collect()
    }

    /// The same for writes within these bytes.
    pub fn unflushed_within(&self, mark: u64, bytes: &Range<u64>) -> Vec<&'static str> {
        assert!(mark <= self.order() && bytes.end <= self.size_bytes, "{bytes:?} of the disk, before {mark}");
        let pending = self.pending.borrow();
        let is_owed =
            |write: &&Pending| write.order < mark && bytes.contains(&(write.block * BLOCK_BYTES as u64));
        pending.iter().filter(is_owed).map(|write| write.site).collect()
    }

    /// Overwrites a block in both images without a write. `bytes` has 4096 bytes.
    pub fn corrupt(&self, block: u64, bytes: &[u8]) {
        let data = Buf::copy_from(bytes);
        assert_eq!(data.len(), BLOCK_BYTES);
        self.durable.borrow_mut().insert(block, data.clone());
        self.live.borrow_mut().insert(block, data);
    }

    /// The live contents of a block.
    pub fn peek(&self, block: u64) -> Buf {
        self.live.borrow().get(&block).cloned().unwrap_or_else(|| Buf::zeroed(BLOCK_BYTES))
    }

    /// Numbers of the blocks that are not all zeros.
    pub fn used_blocks(&self) -> Vec<u64> {
        let live = self.live.borrow();
        live.iter().filter(|(_, data)| data.iter().any(|byte| *byte != 0)).map(|(block, _)| *block).collect()
    }

    /// A copy of the medium with its live contents, all of them durable.
    pub fn duplicate(&self) -> Rc<Self> {
        let copy = Self::new(self.size_bytes);
        *copy.live.borrow_mut() = self.live.borrow().clone();
        *copy.durable.borrow_mut() = self.live.borrow().clone();
        *copy.allocated.borrow_mut() = self.allocated.borrow().clone();
        copy
    }
}

fn split(data: &Buf) -> impl Iterator<Item = Buf> + '_ {
    (0..data.len() / BLOCK_BYTES).map(|index| data.slice(index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES))
}

fn mix_sectors(world: &World, old: Option<&Buf>, new: &Buf) -> Buf {
    let mut mixed = BufMut::zeroed(BLOCK_BYTES);
    if let Some(old) = old {
        mixed.as_mut().copy_from_slice(old);
    }
    for start in (0..BLOCK_BYTES).step_by(SECTOR_BYTES) {
        if world.below(2) == 0 {
            let range = start..start + SECTOR_BYTES;
            mixed.as_mut()[range.clone()].copy_from_slice(&new[range]);
        }
    }
    mixed.freeze()
}

/// A medium connected to a world as a drive. A write, flush or discard runs in a task of its own, so it
/// completes even if its caller gives up.
#[derive(Clone)]
pub struct SimDrive {
    world: World,
    disk: Rc<SimDisk>,
}

impl SimDrive {
    /// Connects `disk` to `world`.
    pub fn new(world: &World, disk: Rc<SimDisk>) -> Rc<Self> {
        Rc::new(Self { world: world.clone(), disk })
    }

    /// Runs `work` to its end, even if the caller stops waiting for it.
    async fn to_its_end<T: 'static>(
        &self,
        work: impl Future<Output = Result<T, DriveError>> + 'static,
    ) -> Result<T, DriveError> {
        let (done, answer) = oneshot::channel();
        let task = async move {
            // The caller may have given up.
            let _ = done.send(work.await);
        };
        self.world.spawn("disk", Box::pin(task));
        match answer.await {
            Ok(result) => result,
            // The world is destroyed.
            Err(_) => std::future::pending().await,
        }
    }

    async fn pause(&self) {
        let period = Duration::from_micros(self.world.below(100));
        self.world.sleep(period).await;
        if self.world.is_cut() {
            std::future::pending().await
        }
    }

    fn check(&self, op: &'static str, at: u64, len: usize) -> Result<u64, DriveError> {
        let aligned = at.is_multiple_of(BLOCK_BYTES as u64) && len.is_multiple_of(BLOCK_BYTES);
        if !aligned || at + len as u64 > self.disk.size_bytes {
            return Err(DriveError::Io {
                op,
                at,
                len: len as u64,
                why: "unaligned or beyond the end".into(),
            });
        }
        Ok(at / BLOCK_BYTES as u64)
    }

    /// Writes into the live image. Returns the number of the write.
    fn apply(&self, block: u64, data: Buf, site: &'static str) -> u64 {
        let mut live = self.disk.live.borrow_mut();
        for (index, part) in (block..).zip(split(&data)) {
            live.insert(index, part);
        }
        let order = self.disk.order.get();
        self.disk.order.set(order + 1);
        self.disk.pending.borrow_mut().push(Pending { order, block, data, site });
        order
    }

    /// Makes one write durable, and with it the older unflushed writes that overlap it, since it must not
    /// overtake them.
    fn harden(&self, order: u64) {
        let mut pending = self.disk.pending.borrow_mut();
        let Some(mine) = pending.iter().find(|write| write.order == order) else { return };
        let range = mine.block..mine.block + (mine.data.len() / BLOCK_BYTES) as u64;
        let mut durable = self.disk.durable.borrow_mut();
        pending.retain(|write| {
            let end = write.block + (write.data.len() / BLOCK_BYTES) as u64;
            let kept = write.order > order || write.block >= range.end || end <= range.start;
            if !kept {
                durable.extend((write.block..).zip(split(&write.data)));
            }
            kept
        });
    }
}

impl Drive for SimDrive {
    fn size_bytes(&self) -> u64 {
        self.disk.size_bytes
    }

    fn read(&self, at: u64, mut buf: BufMut, io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        self.disk.note_context(io);
        Box::pin(async move {
            let first = self.check("read", at, buf.len())?;
            self.pause().await;
            let live = self.disk.live.borrow();
            for (index, part) in (first..).zip(buf.as_mut().chunks_exact_mut(BLOCK_BYTES)) {
                match live.get(&index) {
                    Some(data) => part.copy_from_slice(data),
                    None => part.fill(0),
                }
            }
            Ok(buf)
        })
    }

    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        self.disk.note_context(io);
        let this = self.clone();
        Box::pin(self.to_its_end(async move {
            let block = this.check("write", at, data.len())?;
            this.pause().await;
            if this.disk.lacks_room(block, (data.len() / BLOCK_BYTES) as u64) {
                return Err(DriveError::HostFull);
            }
            let order = this.apply(block, data, io.site);
            this.world.pass(io.site);
            this.pause().await;
            if io.durable {
                this.harden(order);
            }
            Ok(())
        }))
    }

    fn flush(&self, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        let this = self.clone();
        Box::pin(self.to_its_end(async move {
            this.pause().await;
            let mark = this.disk.order.get();
            this.pause().await;
            let mut durable = this.disk.durable.borrow_mut();
            this.disk.pending.borrow_mut().retain(|write| {
                if write.order >= mark {
                    return true;
                }
                for (index, part) in (write.block..).zip(split(&write.data)) {
                    durable.insert(index, part);
                }
                false
            });
            Ok(())
        }))
    }

    fn discard(&self, at: u64, len: u64, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        let this = self.clone();
        Box::pin(self.to_its_end(async move {
            let block = this.check("discard", at, to_usize(len))?;
            this.pause().await;
            // A drive may free the space now, or keep the contents until the next write.
            if this.world.below(2) == 0 {
                this.apply(block, Buf::zeroed(to_usize(len)), io.site);
            }
            this.world.pass(io.site);
            Ok(())
        }))
    }
}
