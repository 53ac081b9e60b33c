//! Model drives: drives in memory that take as long as a data sheet says, with time stretched by a factor so
//! that this machine keeps up with many of them.
//!
//! Reads and writes have a queue each, as in drives whose flash serves both at the same time. A queue serves
//! one I/O after the other, each for as long as its bytes take at full bandwidth, or as long as one I/O takes
//! at the highest rate, whichever is longer. The latency comes on top and keeps nobody else waiting.

use penstock_base::{BLOCK_BYTES, Buf, BufMut, Env, HashMap, LocalBoxFuture};
use penstock_drive::{Drive, DriveError, Io};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::time::Duration;

const ZEROS: &[u8] = &[0; BLOCK_BYTES];

/// A drive as its data sheet describes it.
#[derive(Clone, Copy, Debug)]
pub struct Sheet {
    /// Sequential reads and writes, in GB/s.
    pub gbps: [f64; 2],
    /// Random reads and writes of 4 KiB, in thousands a second.
    pub kiops: [f64; 2],
    /// Latency of reads and writes, in microseconds.
    pub us: [f64; 2],
}

impl Sheet {
    /// A drive of 15.36 TB on PCIe 5.0 x4, as in the sources' tables. Latencies are typical ones.
    pub const GEN5: Self = Self { gbps: [14.5, 9.3], kiops: [1021.0, 485.0], us: [60.0, 10.0] };

    /// The same drive with every time this many times as long.
    pub fn slower(self, factor: f64) -> Self {
        assert!(factor >= 1.0, "time is stretched, by {factor}");
        let each = |values: [f64; 2], by: f64| values.map(|value| value * by);
        Self {
            gbps: each(self.gbps, 1.0 / factor),
            kiops: each(self.kiops, 1.0 / factor),
            us: each(self.us, factor),
        }
    }

    fn cost(&self, which: Direction, bytes: usize) -> Duration {
        let which = which as usize;
        let by_bytes = bytes as f64 / (self.gbps[which] * 1e9);
        Duration::from_secs_f64(by_bytes.max(1e-3 / self.kiops[which]))
    }
}

/// The queue of an I/O.
#[derive(Clone, Copy)]
enum Direction {
    Read = 0,
    Write = 1,
}

/// A drive that takes as long as its sheet says.
pub struct ModelDrive {
    env: Env,
    sheet: Sheet,
    size_bytes: Cell<u64>,
    /// Blocks by their number, without those of zeros.
    blocks: RefCell<HashMap<u64, Buf>>,
    /// False while it takes no time.
    takes_time: Cell<bool>,
    /// The moments at which the queues of reads and writes are empty.
    free_at: [Cell<Duration>; 2],
}

impl ModelDrive {
    /// An empty drive.
    pub fn new(env: &Env, sheet: Sheet, size_bytes: usize) -> Self {
        let free_at = [Cell::new(env.now()), Cell::new(env.now())];
        assert!(size_bytes.is_multiple_of(BLOCK_BYTES), "a drive has whole blocks, not {size_bytes} bytes");
        let (size_bytes, blocks) = (Cell::new(size_bytes as u64), RefCell::default());
        Self { env: env.clone(), sheet, size_bytes, blocks, takes_time: Cell::new(true), free_at }
    }

    /// Has it take no time, to fill it, or as long as its sheet says again.
    pub fn set_takes_time(&self, takes_time: bool) {
        self.takes_time.set(takes_time);
    }

    /// Gives the memory back. Nobody may use the drive any more.
    pub fn give_up(&self) {
        assert!(self.size_bytes.replace(0) > 0, "it is given up once");
        self.blocks.take();
    }

    /// The numbers of the blocks of a range.
    fn blocks_of(&self, op: &'static str, at: u64, len: u64) -> Result<Range<u64>, DriveError> {
        let (block, size) = (BLOCK_BYTES as u64, self.size_bytes.get());
        if at + len > size || !at.is_multiple_of(block) || !len.is_multiple_of(block) {
            let why = format!("no blocks of a drive of {size} bytes");
            return Err(DriveError::Io { op, at, len, why });
        }
        Ok(at / block..(at + len) / block)
    }

    async fn take(&self, which: Direction, bytes: usize) {
        if !self.takes_time.get() {
            return;
        }
        let (now, queue) = (self.env.now(), &self.free_at[which as usize]);
        let end = now.max(queue.get()) + self.sheet.cost(which, bytes);
        assert!(end > now, "an I/O takes time");
        queue.set(end);
        let latency = Duration::from_secs_f64(self.sheet.us[which as usize] / 1e6);
        self.env.sleep((end + latency).saturating_sub(now)).await;
    }
}

impl Drive for ModelDrive {
    fn size_bytes(&self) -> u64 {
        self.size_bytes.get()
    }

    fn read(&self, at: u64, mut buf: BufMut, _io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        Box::pin(async move {
            self.take(Direction::Read, buf.len()).await;
            let (numbers, blocks) = (self.blocks_of("read", at, buf.len() as u64)?, self.blocks.borrow());
            for (number, place) in numbers.zip(buf.as_mut().chunks_exact_mut(BLOCK_BYTES)) {
                match blocks.get(&number) {
                    Some(block) => place.copy_from_slice(block),
                    None => place.fill(0),
                }
            }
            Ok(buf)
        })
    }

    fn write(&self, at: u64, data: Buf, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            self.take(Direction::Write, data.len()).await;
            let numbers = self.blocks_of("write", at, data.len() as u64)?;
            let mut blocks = self.blocks.borrow_mut();
            for (number, block) in numbers.zip(data.chunks_exact(BLOCK_BYTES)) {
                match block == ZEROS {
                    true => drop(blocks.remove(&number)),
                    false => drop(blocks.insert(number, Buf::copy_from(block))),
                }
            }
            Ok(())
        })
    }

    /// Takes the latency of a write: the drive's cache is safe from power cuts.
    fn flush(&self, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            if self.takes_time.get() {
                self.env.sleep(Duration::from_secs_f64(self.sheet.us[1] / 1e6)).await;
            }
            Ok(())
        })
    }

    fn discard(&self, at: u64, len: u64, _io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            let (numbers, mut blocks) = (self.blocks_of("discard", at, len)?, self.blocks.borrow_mut());
            numbers.for_each(|number| drop(blocks.remove(&number)));
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_io_takes_as_long_as_its_bytes_or_its_turn() {
        let sheet = Sheet::GEN5.slower(1000.0);
        let cost = |which, bytes| sheet.cost(which, bytes).as_secs_f64();
        let near = |found: f64, wanted: f64| (found - wanted).abs() < wanted / 1000.0;
        assert!(near(cost(Direction::Read, 14_500_000), 1.0));
        assert!(near(cost(Direction::Write, 9_300_000), 1.0));
        assert!(near(cost(Direction::Read, 4096), 1.0 / 1021.0));
        assert!(near(cost(Direction::Write, 4096), 1.0 / 485.0));
        assert_eq!(sheet.us, [60_000.0, 10_000.0]);
    }
}
