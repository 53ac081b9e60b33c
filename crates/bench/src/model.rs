//! Model drives: drives in memory that take as long as a data sheet says, with time stretched by a factor so
//! that this machine keeps up with many of them.
//!
//! Reads and writes have a queue each, as in drives whose flash serves both at the same time. A queue serves
//! one I/O after the other, each for as long as its bytes take at full bandwidth, or as long as one I/O takes
//! at the highest rate, whichever is longer. The latency comes on top and keeps nobody else waiting.

use penstock_base::{Buf, BufMut, Env, LocalBoxFuture};
use penstock_drive::{Drive, DriveError, Io, MemoryDrive};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

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
    memory: RefCell<Rc<MemoryDrive>>,
    /// The moments at which the queues of reads and writes are empty.
    free_at: [Cell<Duration>; 2],
}

impl ModelDrive {
    /// An empty drive.
    pub fn new(env: &Env, sheet: Sheet, size_bytes: usize) -> Self {
        let free_at = [Cell::new(env.now()), Cell::new(env.now())];
        let memory = RefCell::new(Rc::new(MemoryDrive::new(size_bytes)));
        Self { env: env.clone(), sheet, memory, free_at }
    }

    /// Gives the memory back. Nobody may use the drive any more.
    pub fn give_up(&self) {
        assert!(self.memory().size_bytes() > 0, "it is given up once");
        self.memory.replace(Rc::new(MemoryDrive::new(0)));
    }

    fn memory(&self) -> Rc<MemoryDrive> {
        self.memory.borrow().clone()
    }

    async fn take(&self, which: Direction, bytes: usize) {
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
        self.memory().size_bytes()
    }

    fn read(&self, at: u64, buf: BufMut, io: Io) -> LocalBoxFuture<'_, Result<BufMut, DriveError>> {
        Box::pin(async move {
            self.take(Direction::Read, buf.len()).await;
            self.memory().read(at, buf, io).await
        })
    }

    fn write(&self, at: u64, data: Buf, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            self.take(Direction::Write, data.len()).await;
            self.memory().write(at, data, io).await
        })
    }

    /// Takes the latency of a write: the drive's cache is safe from power cuts.
    fn flush(&self, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move {
            self.env.sleep(Duration::from_secs_f64(self.sheet.us[1] / 1e6)).await;
            self.memory().flush(io).await
        })
    }

    fn discard(&self, at: u64, len: u64, io: Io) -> LocalBoxFuture<'_, Result<(), DriveError>> {
        Box::pin(async move { self.memory().discard(at, len, io).await })
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
