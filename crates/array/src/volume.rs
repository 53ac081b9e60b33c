//! Volumes: a range of an array's stripes as a block address space of verified 4 KiB blocks.
//!
//! Contract:
//! - `write` of up to 512 KiB within the log's record bound is atomic. It returns when the array's memory
//!   holds it in order, and is durable after a later `flush`.
//! - After a crash, the blocks written through `write` are a prefix of the calls, so a barrier needs no work.
//! - `write_fresh` writes a full stripe that is unwritten, and bypasses the log. It counts after a later
//!   `flush`; a crash before that leaves the stripe unwritten.
//! - `read` returns blocks that verified, with their CRC32C, or an error. Unwritten stripes read as zeros.

use crate::array::Array;
use crate::block_io::{Blocks, Discard};
use crate::error::ArrayError;
use crate::stripes::changes::BlockChanges;
use crate::stripes::load::Unread;
use futures_util::future::join_all;
use penstock_base::rank::scoped;
use penstock_base::{BLOCK_BYTES, Buf, Piece, Span, Stripe, Version};
use penstock_drive::{Class, Io};
use std::ops::Range;
use std::rc::Rc;

/// A range of an array's stripes.
#[derive(Clone)]
pub struct Volume {
    array: Rc<Array>,
    stripes: Range<u64>,
}

impl Volume {
    /// The whole array as one volume.
    pub fn whole(array: &Rc<Array>) -> Self {
        Self { array: array.clone(), stripes: 0..array.geometry().stripes }
    }

    /// The last `stripes` stripes of the volume as a volume of their own, and the rest before them.
    ///
    /// # Panics
    /// If the volume has not more stripes than that.
    pub fn split_end(&self, stripes: u64) -> (Self, Self) {
        let Range { start, end } = self.stripes;
        assert!(stripes < end - start, "{stripes} of {} stripes are cut off", end - start);
        let part = |stripes| Self { array: self.array.clone(), stripes };
        (part(start..end - stripes), part(end - stripes..end))
    }

    /// The array below.
    pub fn array(&self) -> &Rc<Array> {
        &self.array
    }

    /// Blocks in the volume.
    pub fn blocks(&self) -> u64 {
        (self.stripes.end - self.stripes.start) * self.stripe_blocks()
    }

    /// Blocks in a stripe: the unit of `write_fresh` and `discard`.
    pub fn stripe_blocks(&self) -> u64 {
        u64::from(self.array.geometry().stripe_blocks())
    }

    /// The stripe of the array that is stripe `stripe` of the volume.
    fn stripe(&self, stripe: u64) -> Result<Stripe, ArrayError> {
        let inner = self.stripes.start.checked_add(stripe).filter(|inner| self.stripes.contains(inner));
        match inner {
            Some(inner) => Ok(Stripe(inner)),
            None => Err(ArrayError::Invalid(format!("stripe {stripe} is beyond the volume"))),
        }
    }

    /// Splits a range of blocks by stripe of the array: each stripe with its part of the range.
    fn pieces(&self, block: u64, count: u64) -> Result<Vec<(Stripe, Range<u32>)>, ArrayError> {
        let span = Span { first: block, count };
        if span.end().is_none_or(|end| end > self.blocks()) {
            return Err(ArrayError::Invalid(format!("blocks {block}+{count} are beyond the volume")));
        }
        let of_array = |Piece { unit, blocks }: Piece| (Stripe(self.stripes.start + unit), blocks);
        Ok(span.pieces(self.array.geometry().stripe_blocks()).into_iter().map(of_array).collect())
    }

    /// Writes whole blocks through the log. `crcs` has the CRC32C of each block.
    pub async fn write(&self, block: u64, data: &Buf, crcs: &[u32]) -> Result<(), ArrayError> {
        let latency = &self.array.context().latency.write;
        latency.time(&self.array.context().env, scoped(self.write_parts(block, data, crcs))).await
    }

    async fn write_parts(&self, block: u64, data: &Buf, crcs: &[u32]) -> Result<(), ArrayError> {
        if data.len() != crcs.len() * BLOCK_BYTES {
            return Err(ArrayError::Invalid(format!("{} checksums for {} bytes", crcs.len(), data.len())));
        }
        // Check the complete range before the first part is written: a rejected write changes nothing.
        self.pieces(block, crcs.len() as u64)?;
        let most = self.array.geometry().max_payload_blocks();
        for start in (0..crcs.len()).step_by(most) {
            let range = start..crcs.len().min(start + most);
            assert!(!range.is_empty() && range.len() <= most, "a record holds a part");
            let pieces = self.pieces(block + start as u64, range.len() as u64)?;
            let part = data.slice(range.start * BLOCK_BYTES..range.end * BLOCK_BYTES);
            self.array.blocks().write(&pieces, &part, &crcs[range]).await?;
        }
        Ok(())
    }

    /// Writes a full stripe that is unwritten. `crcs` has the CRC32C of each block.
    pub async fn write_fresh(&self, stripe: u64, data: &Buf, crcs: &[u32], io: Io) -> Result<(), ArrayError> {
        let stripe = self.stripe(stripe)?;
        scoped(self.array.blocks().wait_for_space()).await?;
        if crcs.len() as u64 != self.stripe_blocks() || data.len() != crcs.len() * BLOCK_BYTES {
            return Err(ArrayError::Invalid(format!(
                "a fresh write of {} bytes is not one stripe",
                data.len()
            )));
        }
        let context = self.array.context();
        context
            .latency
            .fresh
            .time(&context.env, scoped(self.array.blocks().write_fresh(stripe, data, crcs, io)))
            .await
    }

    /// Reads `count` blocks from `block` on.
    pub async fn read(&self, block: u64, count: u64, io: Io) -> Result<Blocks, ArrayError> {
        let pieces = self.pieces(block, count)?;
        let read =
            |(stripe, blocks): (Stripe, Range<u32>)| scoped(self.array.blocks().read(stripe, blocks, io));
        let reads = join_all(pieces.into_iter().map(read));
        let context = self.array.context();
        let mut all = Blocks::default();
        for piece in context.latency.read.time(&context.env, reads).await {
            let piece = piece?;
            all.parts.extend(piece.parts);
            all.crcs.extend(piece.crcs);
        }
        assert_eq!(all.crcs.len() as u64, count, "every block was read");
        Ok(all)
    }

    /// Orders writes: those before it are durable before those after it. The log keeps that order anyway.
    pub fn barrier(&self) {}

    /// Makes every write durable that returned before this call.
    pub async fn flush(&self) -> Result<(), ArrayError> {
        scoped(self.array.durability().flush(Io::new(Class::Client, "volume.flush"))).await
    }

    /// Makes full stripes unwritten again, durably. `how` decides if their space goes back to the drives.
    /// Returns those that stay as they are and cannot be used: their page of the stripe table is lost.
    pub async fn discard(&self, stripe: u64, count: u64, how: Discard) -> Result<Vec<u64>, ArrayError> {
        if count == 0 {
            return Ok(Vec::new());
        }
        let first = self.stripe(stripe)?;
        self.stripe(stripe.saturating_add(count - 1))?;
        let left = scoped(self.array.blocks().discard(first, count, how)).await?;
        Ok(left.into_iter().map(|stripe| stripe.0 - self.stripes.start).collect())
    }

    /// Stripes of the volume that could not be read when last tried.
    pub fn unreadable_stripes(&self) -> Vec<u64> {
        let map = self.array.stripes().map();
        let range = Stripe(self.stripes.start)..Stripe(self.stripes.end);
        map.unreadable().range(range).map(|stripe| stripe.0 - self.stripes.start).collect()
    }

    /// True if some stripe may lack more strips than the code can make.
    pub fn lacks_too_much(&self) -> bool {
        self.array.stripes().lacks_too_much()
    }

    /// True if a stripe could not be read when last tried, or if it lacks too many strips; none if that would
    /// have to be read. [`Self::look_at`] does that.
    pub fn knows_unreadable(&self, stripe: u64) -> Option<bool> {
        let (stripe, stripes) = (Stripe(self.stripes.start + stripe), self.array.stripes());
        let is_known = !stripes.lacks_too_much() || stripes.has_page_of(stripe);
        match stripes.map().is_unreadable(stripe) || stripes.is_lost(stripe) {
            true => Some(true),
            false => is_known.then_some(false),
        }
    }

    /// Reads what is recorded of a stripe. It stays in memory for a while.
    pub async fn look_at(&self, stripe: u64) -> Result<(), ArrayError> {
        let stripe = self.stripe(stripe)?;
        match scoped(self.array.stripes().pin_stripe(stripe)).await {
            // A record that is lost is known too.
            Ok(_) | Err(ArrayError::Damaged { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// True if nothing is written in a stripe, not even in the log; none if that would have to be read. Then
    /// [`Self::is_unwritten`] tells.
    pub fn knows_unwritten(&self, stripe: u64) -> Option<bool> {
        let (stripe, stripes) = (Stripe(self.stripes.start + stripe), self.array.stripes());
        match stripes.overlay().has_stripe(stripe) {
            true => Some(false),
            false => stripes.map().knows_written(stripe).map(|is_written| !is_written),
        }
    }

    /// True if nothing is written in a stripe, not even in the log.
    pub async fn is_unwritten(&self, stripe: u64) -> Result<bool, ArrayError> {
        let stripes = self.array.stripes();
        loop {
            if let Some(is_unwritten) = self.knows_unwritten(stripe) {
                return Ok(is_unwritten);
            }
            let _pages = scoped(stripes.pin_stripe(Stripe(self.stripes.start + stripe))).await?;
            if let Some(is_unwritten) = self.knows_unwritten(stripe) {
                return Ok(is_unwritten);
            }
        }
    }

    /// All strips that are written from now on get versions above this one.
    pub fn version(&self) -> Version {
        self.array.stripes().versions.last()
    }

    /// The blocks of a stripe with what was written before the array gave versions above `version`, and those
    /// with what may have been written later. Whole strips count, so the second may have some that were
    /// not. A block in neither has no contents.
    pub async fn changes_since(&self, stripe: u64, version: Version) -> Result<BlockChanges, ArrayError> {
        let (stripe, stripes) = (self.stripe(stripe)?, self.array.stripes());
        let _page = scoped(stripes.pin_stripe(stripe)).await?;
        Ok(stripes.changes_since(stripe, version))
    }

    /// True if nothing is written in the whole volume, not even in the log. It must be the whole array.
    pub fn is_blank(&self) -> bool {
        let stripes = self.array.stripes();
        assert_eq!(self.stripes, 0..self.array.geometry().stripes, "the whole array");
        stripes.table().written() == 0
            && stripes.map().pending_count() == 0
            && stripes.overlay().stripes().next().is_none()
    }

    /// The first stripes from `from` on, at most `most`, in which something is written, be it in the log. In
    /// ascending order.
    pub async fn written(&self, from: u64, most: usize) -> Result<Vec<u64>, ArrayError> {
        self.written_in(from..self.stripes.end - self.stripes.start, most).await
    }

    /// The same. It fails for a page of the stripe table that counts as lost, instead of passing it over.
    pub async fn all_written(&self, from: u64, most: usize) -> Result<Vec<u64>, ArrayError> {
        self.find_written(from..self.stripes.end - self.stripes.start, most, Unread::FailsIfLost).await
    }

    /// Fails if the page of the stripe table of some of these stripes cannot be read, or counts as lost.
    pub async fn look_at_table(&self, stripes: Range<u64>) -> Result<(), ArrayError> {
        let first = self.stripes.start;
        scoped(self.array.stripes().look_at(Stripe(first + stripes.start)..Stripe(first + stripes.end))).await
    }

    /// Gives up the lost pages of the stripe table that have stripes of the volume, durably: one that comes
    /// back later does not count. All stripes of these pages can be discarded and written again. Fails for
    /// one that may be readable another time.
    pub async fn give_up_lost_pages(&self) -> Result<(), ArrayError> {
        let (Range { start, end }, array) = (self.stripes.clone(), &self.array);
        scoped(async {
            array.stripes().give_up_pages_of(Stripe(start)..Stripe(end)).await?;
            // Also if none is lost now: an earlier checkpoint may have failed.
            array.checkpoints.write().await
        })
        .await
    }

    /// The result of [`Self::written`] for the stripes of a range. Nothing else is read for them.
    pub async fn written_in(&self, range: Range<u64>, most: usize) -> Result<Vec<u64>, ArrayError> {
        self.find_written(range, most, Unread::Fails).await
    }

    async fn find_written(
        &self,
        range: Range<u64>,
        most: usize,
        unread: Unread,
    ) -> Result<Vec<u64>, ArrayError> {
        let (start, end) = (self.stripes.start, self.stripes.end);
        let range = Stripe(start + range.start)..Stripe(end.min(start.saturating_add(range.end)));
        let found = scoped(self.array.stripes().written(range, most, unread)).await?;
        Ok(found.into_iter().map(|stripe| stripe.0 - start).collect())
    }
}
