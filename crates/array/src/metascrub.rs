//! Scrub of what an array keeps for itself: log segments, roots and table pages on every carrier.
//!
//! Memory has the truth of roots and pages, so a bad copy of those is mended by a new checkpoint, which writes all
//! of them again. A log record is mended from a carrier that has it whole.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::record::{Entry, RecordHead};
use crate::format::root::Root;
use crate::format::segment::SegmentHeader;
use crate::format::table_page::TablePage;
use crate::log::Segment;
use crate::open::PAGES_IN_A_PIECE;
use crate::salvage::{self, Salvaged};
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, crc32c};
use penstock_drive::{Class, Io};
use std::collections::BTreeSet;
use std::ops::Range;

const IO: Io = Io::new(Class::Scrub, "metascrub.read");

impl Array {
    /// Verifies the metadata of the array on all carriers and mends it. It stays known as bad while a copy is.
    pub async fn scrub_metadata(&self) -> Result<(), ArrayError> {
        let carriers_epoch = self.desc.borrow().carriers_epoch;
        let unmended = self.scrub_log().await?;
        let (bad_copies, mut pages) = self.bad_checkpoint_copies().await;
        let mut whole = true;
        if bad_copies > 0 || unmended {
            if unmended {
                // A record that no carrier has whole leaves the chain: what comes from here on lies in another segment,
                // and with what came before in the strips nobody needs the one that it is in.
                self.begin_another_segment().await?;
                self.destage_all().await?;
            }
            // Two checkpoints: both places of the root, and of every bad page, hold good copies afterwards. Without a changed
            // page there might be none.
            pages.insert(0);
            for _ in 0..2 {
                self.table.borrow_mut().put_dirty(pages.clone());
                self.write_checkpoint().await?;
            }
            self.count(|counts| counts.repaired_blocks += bad_copies);
            whole = !self.scrub_log().await? && self.bad_checkpoint_copies().await.0 == 0;
        }
        if self.desc.borrow().carriers_epoch == carriers_epoch {
            self.metadata_bad.set(!whole);
        }
        Ok(())
    }

    fn note_bad_metadata(&self, carrier: usize, what: &str) {
        self.count(|counts| counts.checksum_errors += 1);
        if let Some(slice) = &self.members.borrow()[carrier].slice {
            slice.drive().count_checksum_error();
        }
        tracing::warn!(array = self.name, carrier, what, "a copy of metadata is damaged");
    }

    /// Counts bad copies of the root and of table pages; returns the pages.
    async fn bad_checkpoint_copies(&self) -> (u64, BTreeSet<u64>) {
        let (mut bad, mut pages) = (0, BTreeSet::new());
        for carrier in self.live_carriers() {
            let Some(slice) = self.member_slice(carrier) else { continue };
            let state = self.checkpoint.lock().await;
            let root = slice.read(self.geo.root_at(state.root.seq), BLOCK_BYTES, IO).await;
            if !root.is_ok_and(|block| Root::decode(&block).is_ok_and(|root| root == state.root)) {
                self.note_bad_metadata(carrier, "root");
                bad += 1;
            }
            drop(state);
            for first in (0..self.geo.pages()).step_by(PAGES_IN_A_PIECE as usize) {
                let piece = first..self.geo.pages().min(first + PAGES_IN_A_PIECE);
                let len = (piece.end - piece.start) as usize * BLOCK_BYTES;
                // No checkpoint moves a page meanwhile. A log that is full waits for the next one, so it is kept for a piece only.
                let _still = self.checkpoint.lock().await;
                let read = |place| salvage::read(&slice, self.geo.page_at(first, place), len, IO);
                let places = [read(0).await, read(1).await];
                for page in piece {
                    let (place, checkpoint) = self.table.borrow().place(page);
                    let at = (page - first) as usize * BLOCK_BYTES;
                    let bytes = &places[usize::from(place)].bytes()[at..at + BLOCK_BYTES];
                    let good = TablePage::decode(bytes).is_ok_and(|found| {
                        found.array == self.id && found.index == page && found.checkpoint == checkpoint
                    });
                    if !good {
                        self.note_bad_metadata(carrier, "stripe table page");
                        bad += 1;
                        pages.insert(page);
                    }
                }
            }
        }
        (bad, pages)
    }

    /// Verifies all live records on all carriers. Returns whether some record is bad on every carrier.
    async fn scrub_log(&self) -> Result<bool, ArrayError> {
        let last = self.log.segments.borrow().back().expect("there is always a segment").number;
        let mut unmended = false;
        for number in self.log.first_segment()..=last {
            // No checkpoint, so the segment is not used again meanwhile; records already appended never change.
            let _still = self.checkpoint.lock().await;
            let found = self.log.segments.borrow().iter().find(|segment| segment.number == number).cloned();
            let Some(segment) = found else { continue };
            let (at, len) = (self.geo.segment_at(segment.number), self.geo.segment_bytes as usize);
            let read = |carrier: usize| async move {
                let slice = self.member_slice(carrier)?;
                Some((carrier, salvage::read(&slice, at, len, IO).await))
            };
            let copies = join_all(self.live_carriers().into_iter().map(read)).await;
            let copies: Vec<(usize, Salvaged)> = copies.into_iter().flatten().collect();
            let header = |bytes: &Buf| {
                SegmentHeader::decode(&bytes[..BLOCK_BYTES])
                    .is_ok_and(|found| found.array == self.id && found.number == segment.number)
            };
            unmended |= self.mend_range(&segment, &copies, 0..BLOCK_BYTES, &header).await?;
            for place in &segment.records {
                let start = place.offset_blocks as usize * BLOCK_BYTES;
                let blocks = (place.shape.head_blocks + place.shape.payload_blocks) as usize;
                let range = start..start + blocks * BLOCK_BYTES;
                let chain = place.shape.chain;
                let record = |bytes: &Buf| record_is_good(&bytes[range.clone()], chain);
                unmended |= self.mend_range(&segment, &copies, range.clone(), &record).await?;
            }
        }
        Ok(unmended)
    }

    async fn mend_range(
        &self,
        segment: &Segment,
        copies: &[(usize, Salvaged)],
        range: Range<usize>,
        good: &dyn Fn(&Buf) -> bool,
    ) -> Result<bool, ArrayError> {
        let (first, blocks) = (range.start / BLOCK_BYTES, range.len() / BLOCK_BYTES);
        let is_good = |copy: &Salvaged| copy.has(first, blocks) && good(copy.bytes());
        let whole = copies.iter().find(|(_, copy)| is_good(copy)).map(|(_, copy)| copy.bytes().clone());
        for (carrier, _) in copies.iter().filter(|(_, copy)| !is_good(copy)) {
            self.note_bad_metadata(*carrier, "log");
            let Some(whole) = &whole else { return Ok(true) };
            let at = self.geo.segment_at(segment.number) + range.start as u64;
            self.write_member(*carrier, at, whole.slice(range.clone()), None, IO.at("metascrub.log")).await?;
            let life = self.life(*carrier);
            if let Some(slice) = self.member_slice(*carrier)
                && let Err(error) = slice.flush(IO.at("metascrub.flush")).await
            {
                self.fail_life(*carrier, life, &error.to_string()).await?;
            }
            self.count(|counts| counts.repaired_blocks += (range.len() / BLOCK_BYTES) as u64);
        }
        Ok(false)
    }
}

fn record_is_good(bytes: &[u8], chain: u32) -> bool {
    let Ok((head, shape)) = RecordHead::decode(bytes) else { return false };
    let payload = &bytes[shape.head_blocks as usize * BLOCK_BYTES..];
    let crcs = head.entries.iter().flat_map(Entry::payload_crcs);
    shape.chain == chain && payload.chunks_exact(BLOCK_BYTES).map(crc32c).eq(crcs)
}
