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
use penstock_drive::{Class, DriveError, Io, Slice};
use std::collections::BTreeSet;
use std::ops::Range;

const IO: Io = Io::new(Class::Scrub, "metascrub.read");

/// The outcome of a look at metadata.
#[derive(Default)]
struct Found {
    /// A record of the log is bad on every carrier.
    unmended: bool,
    /// Copies of the root and of table pages that are bad, and of which pages.
    bad_copies: u64,
    bad_pages: BTreeSet<u64>,
    /// A carrier did not answer, or did not take what mends it: its copies are unknown or bad.
    unanswered: bool,
}

impl Found {
    fn is_whole(&self) -> bool {
        !self.unmended && self.bad_copies == 0 && !self.unanswered
    }
}

impl Array {
    /// Verifies the metadata of the array on all carriers and mends it. It stays known as bad while a copy is.
    pub async fn scrub_metadata(&self) -> Result<(), ArrayError> {
        let carriers_epoch = self.desc.borrow().carriers_epoch;
        let mut found = self.look_at_metadata().await?;
        if found.bad_copies > 0 || found.unmended {
            if found.unmended {
                // A record that no carrier has whole leaves the chain: what comes from here on lies in another segment,
                // and with what came before in the strips nobody needs the one that it is in.
                self.begin_another_segment().await?;
                self.destage_all().await?;
            }
            // Two checkpoints: both places of the root, and of every bad page, hold good copies afterwards. Without a changed
            // page there might be none.
            let pages: BTreeSet<u64> = found.bad_pages.into_iter().chain([0]).collect();
            for _ in 0..2 {
                self.table.borrow_mut().put_dirty(pages.clone());
                self.write_checkpoint().await?;
            }
            self.count(|counts| counts.repaired_blocks += found.bad_copies);
            found = self.look_at_metadata().await?;
        }
        if self.desc.borrow().carriers_epoch == carriers_epoch {
            self.set_metadata_bad(!found.is_whole());
        }
        Ok(())
    }

    /// Notes whether a copy of metadata is bad, which the repair task mends.
    pub(crate) fn set_metadata_bad(&self, bad: bool) {
        self.metadata_bad.set(bad);
        self.repair_wake.notify_one();
    }

    async fn look_at_metadata(&self) -> Result<Found, ArrayError> {
        let mut found = Found::default();
        self.scrub_log(&mut found).await?;
        self.look_at_checkpoint(&mut found).await;
        Ok(found)
    }

    fn note_bad_metadata(&self, carrier: usize, what: &str) {
        self.count(|counts| counts.checksum_errors += 1);
        if let Some(slice) = &self.members.borrow()[carrier].slice {
            slice.drive().count_checksum_error();
        }
        tracing::warn!(array = self.name, carrier, what, "a copy of metadata is damaged");
    }

    /// Looks at the copies of the root and of table pages that count.
    ///
    /// A log that is full waits for the next checkpoint, so none is held up while a drive reads, but where a copy looks bad: a
    /// checkpoint may have moved it meanwhile.
    async fn look_at_checkpoint(&self, found: &mut Found) {
        for carrier in self.live_carriers() {
            let Some(slice) = self.member_slice(carrier) else { continue };
            let seq = self.checkpoint.lock().await.root.seq;
            let root = salvage::read(&slice, self.geo.root_at(seq), BLOCK_BYTES, IO).await;
            let state = self.checkpoint.lock().await;
            // Another root lies elsewhere, and was written just now.
            let is_root = Root::decode(root.bytes()).is_ok_and(|root| root == state.root);
            if !root.answered() {
                found.unanswered = true;
                continue;
            }
            if state.root.seq == seq && !is_root {
                self.note_bad_metadata(carrier, "root");
                found.bad_copies += 1;
            }
            drop(state);
            for first in (0..self.geo.pages()).step_by(PAGES_IN_A_PIECE as usize) {
                let piece = first..self.geo.pages().min(first + PAGES_IN_A_PIECE);
                let mut bad = self.bad_pages(&slice, piece.clone()).await;
                if bad.as_ref().is_some_and(|bad| !bad.is_empty()) {
                    let _still = self.checkpoint.lock().await;
                    bad = self.bad_pages(&slice, piece).await;
                }
                let Some(bad) = bad else {
                    found.unanswered = true;
                    break;
                };
                for page in bad {
                    self.note_bad_metadata(carrier, "stripe table page");
                    found.bad_copies += 1;
                    found.bad_pages.insert(page);
                }
            }
        }
    }

    /// The pages of a piece whose copy on a carrier is bad; none at all if it does not answer.
    async fn bad_pages(&self, slice: &Slice, piece: Range<u64>) -> Option<Vec<u64>> {
        let (first, len) = (piece.start, (piece.end - piece.start) as usize * BLOCK_BYTES);
        let read = |place| salvage::read(slice, self.geo.page_at(first, place), len, IO);
        let places = [read(0).await, read(1).await];
        if !places.iter().all(Salvaged::answered) {
            return None;
        }
        let is_bad = |page: &u64| {
            let (place, checkpoint) = self.table.borrow().place(*page);
            let at = (page - first) as usize * BLOCK_BYTES;
            let bytes = &places[usize::from(place)].bytes()[at..at + BLOCK_BYTES];
            !TablePage::decode(bytes).is_ok_and(|found| {
                found.array == self.id && found.index == *page && found.checkpoint == checkpoint
            })
        };
        Some(piece.filter(is_bad).collect())
    }

    /// Verifies all live records on all carriers.
    async fn scrub_log(&self, found: &mut Found) -> Result<(), ArrayError> {
        let last = self.log.segments.borrow().back().expect("there is always a segment").number;
        let mut silent = BTreeSet::new();
        for number in self.log.first_segment()..=last {
            let listed =
                || self.log.segments.borrow().iter().find(|segment| segment.number == number).cloned();
            let Some(segment) = listed() else { continue };
            let (at, len) = (self.geo.segment_at(segment.number), self.geo.segment_bytes as usize);
            let read = |carrier: usize| async move {
                let slice = self.member_slice(carrier)?;
                Some((carrier, salvage::read(&slice, at, len, IO).await))
            };
            let asked = self.live_carriers().into_iter().filter(|carrier| !silent.contains(carrier));
            let copies = join_all(asked.map(read)).await;
            let (mut copies, unanswered): (Vec<_>, Vec<_>) =
                copies.into_iter().flatten().partition(|(_, copy): &(usize, Salvaged)| copy.answered());
            silent.extend(unanswered.into_iter().map(|(carrier, _)| carrier));
            let refused = {
                // No checkpoint, so the segment is not used again meanwhile; records already appended never change.
                let _still = self.checkpoint.lock().await;
                if listed().is_none() {
                    continue;
                }
                self.mend_segment(&segment, &mut copies, found).await
            };
            for Refused { carrier, life, why } in refused {
                silent.insert(carrier);
                let Some(why) = why else { continue };
                match self.fail_life(carrier, life, &why).await {
                    // The array can lose no other drive: this one stays, and what it did not take stays bad.
                    Ok(()) | Err(ArrayError::Suspended(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        found.unanswered |= !silent.is_empty();
        Ok(())
    }

    /// Mends the header and the live records of a segment, of which these are the copies. A carrier that refuses a write is
    /// not asked again: checkpoints wait for this.
    async fn mend_segment(
        &self,
        segment: &Segment,
        copies: &mut Vec<(usize, Salvaged)>,
        found: &mut Found,
    ) -> Vec<Refused> {
        let header = |bytes: &Buf| {
            SegmentHeader::decode(&bytes[..BLOCK_BYTES])
                .is_ok_and(|found| found.array == self.id && found.number == segment.number)
        };
        let mut refused = self.mend_range(segment, copies, 0..BLOCK_BYTES, &header, found).await;
        for place in &segment.records {
            let start = place.offset_blocks as usize * BLOCK_BYTES;
            let blocks = (place.shape.head_blocks + place.shape.payload_blocks) as usize;
            let range = start..start + blocks * BLOCK_BYTES;
            let record = |bytes: &Buf| record_is_good(&bytes[range.clone()], place.shape.chain);
            refused.extend(self.mend_range(segment, copies, range.clone(), &record, found).await);
        }
        refused
    }

    /// Writes a part of a segment on the carriers that do not have it, from one that has it: once, whatever comes of it.
    /// Those that refuse it are taken out of the copies.
    async fn mend_range(
        &self,
        segment: &Segment,
        copies: &mut Vec<(usize, Salvaged)>,
        range: Range<usize>,
        good: &dyn Fn(&Buf) -> bool,
        found: &mut Found,
    ) -> Vec<Refused> {
        let (first, blocks) = (range.start / BLOCK_BYTES, range.len() / BLOCK_BYTES);
        let is_good = |copy: &Salvaged| copy.has(first, blocks) && good(copy.bytes());
        let whole = copies.iter().find(|(_, copy)| is_good(copy)).map(|(_, copy)| copy.bytes().clone());
        let bad: Vec<usize> =
            copies.iter().filter(|(_, copy)| !is_good(copy)).map(|(carrier, _)| *carrier).collect();
        let mut refused = Vec::new();
        for carrier in bad {
            self.note_bad_metadata(carrier, "log");
            let Some(whole) = &whole else {
                found.unmended = true;
                break;
            };
            let life = self.life(carrier);
            // One that is gone has no copy to mend.
            let Some(slice) = self.member_slice(carrier) else { continue };
            let at = self.geo.segment_at(segment.number) + range.start as u64;
            let written = match slice.write(at, whole.slice(range.clone()), IO.at("metascrub.log")).await {
                Ok(()) => slice.flush(IO.at("metascrub.flush")).await,
                Err(error) => Err(error),
            };
            match written {
                Ok(()) => self.count(|counts| counts.repaired_blocks += blocks as u64),
                Err(error) => {
                    copies.retain(|(other, _)| *other != carrier);
                    // A full host says nothing about the drive.
                    let why = (!matches!(error, DriveError::HostFull)).then(|| error.to_string());
                    refused.push(Refused { carrier, life, why });
                }
            }
        }
        refused
    }
}

/// A carrier that did not take what mends its log, or did not flush it.
struct Refused {
    carrier: usize,
    life: u64,
    /// Why its drive is to be judged; none for a full host.
    why: Option<String>,
}

fn record_is_good(bytes: &[u8], chain: u32) -> bool {
    let Ok((head, shape)) = RecordHead::decode(bytes) else { return false };
    let payload = &bytes[shape.head_blocks as usize * BLOCK_BYTES..];
    let crcs = head.entries.iter().flat_map(Entry::payload_crcs);
    shape.chain == chain && payload.chunks_exact(BLOCK_BYTES).map(crc32c).eq(crcs)
}
