//! A volume as the file that redb expects. Format: docs/format/kv.md.
//!
//! Block 0 holds the lengths. The journal's ring begins at block 1, and the file lies behind it. redb grows
//! its file by doubling, so the store's budget depends on the longest length that fits in the volume
//! ([`crate::engine`]). A write beyond the volume returns an error.
//!
//! Invariant: the bytes between the end of the file and its longest length ever are zeroed before the file
//! grows over them again, so that new space reads as zeros.

use crate::header::VolumeHeader;
use penstock_array::{ArrayError, Volume};
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, ErrorKind, crc32c_blocks};
use penstock_drive::{Class, Io};
use std::cell::Cell;

const IO: Io = Io::new(Class::Meta, "kv.read");
const BLOCK: u64 = BLOCK_BYTES as u64;
/// Adjacent writes are joined until they have this many blocks, and zeros are written in runs of this many.
/// One atomic record holds them.
const WRITE_BLOCKS: usize = 128;

/// The length of the magic number at the beginning of a redb file.
const MAGIC_BYTES: usize = 9;

/// The journal takes one part in this many of a new volume, within bounds in blocks. It then holds some
/// batches of transactions, and an opening still reads it quickly.
const JOURNAL_PART: u64 = 64;
const JOURNAL_BLOCKS: std::ops::RangeInclusive<u64> = 16..=2048;

/// The file on a volume, and the journal before it.
pub(crate) struct VolumeFile {
    volume: Volume,
    len: Cell<u64>,
    longest: Cell<u64>,
    journal_blocks: u64,
    /// Bytes of the file written since this opening.
    written_bytes: Cell<u64>,
    /// Another store may be made on the volume: nothing is written any more.
    retired: Cell<bool>,
}

/// A write: offset in the file, and bytes.
pub(crate) type Extent = (u64, Vec<u8>);

impl VolumeFile {
    /// Opens the file. An empty volume holds an empty file.
    pub(crate) async fn open(volume: Volume) -> Result<Self, ArrayError> {
        let block = volume.read(0, 1, IO).await?.gather();
        let VolumeHeader { len, longest, journal_blocks } = VolumeHeader::decode(&block)?;
        let journal_blocks = match journal_blocks {
            0 => (volume.blocks() / JOURNAL_PART).clamp(*JOURNAL_BLOCKS.start(), *JOURNAL_BLOCKS.end()),
            known => known,
        };
        if journal_blocks >= volume.blocks() {
            let why = format!("a volume of {} blocks with a journal of {journal_blocks}", volume.blocks());
            return Err(ArrayError::Invalid(why));
        }
        let (len, longest, retired) = (Cell::new(len), Cell::new(longest), Cell::new(false));
        let written_bytes = Cell::new(0);
        let file = Self { volume, len, longest, journal_blocks, written_bytes, retired };
        assert!(file.len.get() <= file.longest.get(), "a header says so");
        if file.len.get() > 0 && !file.is_begun().await? {
            file.len.set(0);
        }
        Ok(file)
    }

    /// False if the power was cut while redb made the file. It sets the length first and writes the magic
    /// number last, before anything in the file counts. Nothing was acknowledged then, and the file is made
    /// again. A file that ever had another length, or whose journal was ever used, was finished: redb refuses
    /// it if its magic number is gone.
    async fn is_begun(&self) -> Result<bool, ArrayError> {
        if self.len.get() != self.longest.get() {
            return Ok(true);
        }
        let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
        let magic = self.read(0, MAGIC_BYTES).await?;
        Ok(!is_zero(&magic) || !is_zero(&self.volume.read(1, 1, IO).await?.gather()))
    }

    /// Every later write fails.
    pub(crate) fn retire(&self) {
        self.retired.set(true);
    }

    fn check_in_use(&self) -> Result<(), ArrayError> {
        if self.retired.get() { Err(ArrayError::Closed) } else { Ok(()) }
    }

    /// Number of blocks of the journal's ring.
    pub(crate) fn journal_blocks(&self) -> u64 {
        self.journal_blocks
    }

    /// Reads the blocks of the ring. One that is damaged beyond repair keeps no other one from being read.
    pub(crate) async fn read_journal(&self) -> Result<Vec<Result<Buf, ArrayError>>, ArrayError> {
        match self.volume.read(1, self.journal_blocks, IO).await {
            Ok(blocks) => {
                let ring = blocks.gather();
                let blocks = (0..ring.len()).step_by(BLOCK_BYTES);
                Ok(blocks.map(|at| Ok(ring.slice(at..at + BLOCK_BYTES))).collect())
            }
            Err(error) if error.kind() == ErrorKind::Corrupt => {
                let mut blocks = Vec::new();
                for number in 0..self.journal_blocks {
                    match self.volume.read(1 + number, 1, IO).await {
                        Err(error) if error.kind() != ErrorKind::Corrupt => return Err(error),
                        block => blocks.push(block.map(|block| block.gather())),
                    }
                }
                assert_eq!(blocks.len() as u64, self.journal_blocks, "every block was tried");
                Ok(blocks)
            }
            Err(error) => Err(error),
        }
    }

    /// Writes full blocks of the ring, from `block` on.
    pub(crate) async fn write_journal(&self, block: u64, data: &Buf) -> Result<(), ArrayError> {
        let end = block + (data.len() / BLOCK_BYTES) as u64;
        assert!(end <= self.journal_blocks, "a record lies in the ring");
        assert!(data.len().is_multiple_of(BLOCK_BYTES), "a record is written in full blocks");
        self.check_in_use()?;
        self.volume.write(1 + block, data, &crc32c_blocks(data)).await
    }

    /// The volume's block at which the file begins.
    fn file_at(&self) -> u64 {
        1 + self.journal_blocks
    }

    /// Bytes of the file that the volume can hold.
    pub(crate) fn capacity_bytes(&self) -> u64 {
        (self.volume.blocks() - self.file_at()) * BLOCK
    }

    pub(crate) fn len(&self) -> u64 {
        self.len.get()
    }

    /// Bytes of the file written since this opening: redb has used so many for new pages at most.
    pub(crate) fn written_bytes(&self) -> u64 {
        self.written_bytes.get()
    }

    pub(crate) async fn set_len(&self, len: u64) -> Result<(), ArrayError> {
        self.check_in_use()?;
        let old = self.len.get();
        let dirty_end = self.longest.get().min(len);
        if len > old && dirty_end > old {
            self.zero(old, dirty_end.min(self.capacity_bytes())).await?;
        }
        self.len.set(len);
        self.longest.set(self.longest.get().max(len));
        assert!(self.len.get() <= self.longest.get(), "no length is above the longest");
        let header = VolumeHeader { len, longest: self.longest.get(), journal_blocks: self.journal_blocks };
        let block = BufMut::padded_from(&header.encode()).freeze();
        self.volume.write(0, &block, &crc32c_blocks(&block)).await
    }

    async fn zero(&self, from: u64, until: u64) -> Result<(), ArrayError> {
        let mut at = from;
        while at < until {
            let run = (until - at).min(WRITE_BLOCKS as u64 * BLOCK);
            // The file has not grown yet, so this lies beyond its end.
            self.put(at, &vec![0; to_usize(run)]).await?;
            at += run;
        }
        Ok(())
    }

    pub(crate) async fn read(&self, at: u64, len: usize) -> Result<Vec<u8>, ArrayError> {
        self.check(at, len)?;
        if len == 0 {
            return Ok(Vec::new());
        }
        let first = at / BLOCK;
        let last = (at + len as u64 - 1) / BLOCK;
        // The part of the file beyond the volume was never written and reads as zeros.
        let inside = last.min(self.volume.blocks().saturating_sub(self.file_at() + 1));
        let mut bytes = Vec::with_capacity(to_usize((last - first + 1) * BLOCK));
        if first <= inside {
            for part in self.volume.read(self.file_at() + first, inside - first + 1, IO).await?.parts {
                bytes.extend_from_slice(&part);
            }
        }
        bytes.resize(to_usize((last - first + 1) * BLOCK), 0);
        let skip = (at % BLOCK) as usize;
        assert!(skip + len <= bytes.len(), "the blocks hold the bytes");
        bytes.truncate(skip + len);
        Ok(bytes.split_off(skip))
    }

    fn check(&self, at: u64, len: usize) -> Result<(), ArrayError> {
        match at.checked_add(len as u64).is_some_and(|end| end <= self.len.get()) {
            true => Ok(()),
            false => {
                Err(ArrayError::Invalid(format!("{at}+{len} is beyond the file of {} bytes", self.len.get())))
            }
        }
    }

    /// Writes extents in order. Joins adjacent ones up to [`WRITE_BLOCKS`].
    pub(crate) async fn write_all(&self, extents: Vec<Extent>) -> Result<(), ArrayError> {
        let mut joined: Option<Extent> = None;
        for (at, bytes) in extents {
            match &mut joined {
                Some((start, run))
                    if *start + run.len() as u64 == at && run.len() < WRITE_BLOCKS * BLOCK_BYTES =>
                {
                    run.extend_from_slice(&bytes);
                }
                _ => {
                    if let Some((start, run)) = joined.replace((at, bytes)) {
                        self.write(start, &run).await?;
                    }
                }
            }
        }
        match joined {
            Some((start, run)) => self.write(start, &run).await,
            None => Ok(()),
        }
    }

    async fn write(&self, at: u64, bytes: &[u8]) -> Result<(), ArrayError> {
        self.check(at, bytes.len())?;
        self.put(at, bytes).await
    }

    async fn put(&self, at: u64, bytes: &[u8]) -> Result<(), ArrayError> {
        self.check_in_use()?;
        if at + bytes.len() as u64 > self.capacity_bytes() {
            return Err(ArrayError::Invalid(format!(
                "the key-value volume of {} bytes is full",
                self.capacity_bytes()
            )));
        }
        let end = at + bytes.len() as u64;
        let (first, last) = (at / BLOCK, end.div_ceil(BLOCK));
        let mut whole = BufMut::zeroed(to_usize((last - first) * BLOCK));
        for edge in
            [(!at.is_multiple_of(BLOCK)).then_some(first), (!end.is_multiple_of(BLOCK)).then_some(last - 1)]
                .into_iter()
                .flatten()
        {
            let old = self.volume.read(self.file_at() + edge, 1, IO).await?.gather();
            let place = to_usize((edge - first) * BLOCK);
            whole.as_mut()[place..place + BLOCK_BYTES].copy_from_slice(&old);
        }
        let skip = (at % BLOCK) as usize;
        assert!(first < last && skip + bytes.len() <= whole.len(), "the blocks hold the bytes");
        whole.as_mut()[skip..skip + bytes.len()].copy_from_slice(bytes);
        let whole: Buf = whole.freeze();
        self.check_in_use()?;
        self.written_bytes.set(self.written_bytes.get() + whole.len() as u64);
        self.volume.write(self.file_at() + first, &whole, &crc32c_blocks(&whole)).await
    }

    /// Makes all earlier writes durable.
    pub(crate) async fn flush(&self) -> Result<(), ArrayError> {
        self.volume.flush().await
    }
}
