//! Scrub of an array's metadata: log segments, roots and table pages on every carrier.
//!
//! Memory has the truth of the root and the index, and a page of the table that is not there is read from a
//! carrier that has it. So bad copies of those are repaired by a new checkpoint, which writes them again. A
//! bad log record is copied from a carrier that has it complete. If a carrier refused a part of the log or
//! the root, what it returns proves nothing: then everything in the log is destaged, and roots are written at
//! both places.

use super::destage::Destage;
use crate::context::Context;
use crate::error::ArrayError;
use crate::format::record::{Entry, RecordHead};
use crate::format::root::Root;
use crate::format::segment::SegmentHeader;
use crate::format::table_page::PAGES_IN_A_PIECE;
use crate::log::chain::{Chain, LogSegment};
use crate::log::checkpoint::Checkpoints;
use crate::log::writer::LogWriter;
use crate::members::{Life, Members, MetadataState};
use crate::place::{MemberNo, SegmentNo};
use crate::salvage::{self, Salvaged};
use crate::site::Site;
use crate::stripes::{Pin, Stripes};
use futures_util::future::join_all;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, crc32c};
use penstock_drive::{Class, DriveError, Io, Slice};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

const IO: Io = Io::new(Class::Scrub, "metascrub.read");

/// Bad pages that are repaired with the same checkpoints.
const PAGES_AT_A_TIME: usize = 64;

/// The findings of a scrub of metadata.
#[derive(Default)]
struct Found {
    /// A record of the log is bad on every carrier.
    lost_record: bool,
    /// Bad copies of the root and of table pages.
    bad_copies: u64,
    /// The pages with a bad copy.
    bad_pages: BTreeSet<u64>,
    /// Bad copies of pages of which there is no other.
    lost_copies: u64,
    /// A carrier did not answer, or did not take a repair: its copies are unknown or bad.
    unanswered: bool,
}

impl Found {
    fn state(&self) -> MetadataState {
        let is_clean = !self.lost_record && self.bad_copies == 0 && !self.unanswered;
        if is_clean { MetadataState::Good } else { MetadataState::Bad }
    }
}

/// A carrier that did not take the repair of its log, or did not flush it.
struct Refused {
    carrier: MemberNo,
    life: Life,
    /// Why its drive is to be judged; none for a full host.
    why: Option<String>,
}

/// The scrub of one array's metadata.
pub(crate) struct MetadataScrub {
    pub(crate) context: Rc<Context>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) chain: Rc<Chain>,
    pub(crate) checkpoints: Rc<Checkpoints>,
    pub(crate) log: Rc<LogWriter>,
    pub(crate) destage: Rc<Destage>,
}

impl MetadataScrub {
    /// Verifies the metadata of the array on all carriers and repairs it. It stays known as bad while a copy
    /// is.
    pub(crate) async fn scrub(&self) -> Result<(), ArrayError> {
        let carriers_epoch = || self.members.descriptor().carriers_epoch;
        let began_in = carriers_epoch();
        let mut found = self.verify().await?;
        let refused = self.members.metadata() == MetadataState::Refused;
        if found.bad_copies > 0 || found.lost_record || refused {
            if found.lost_record || refused {
                // A record that no carrier has complete, or that may lie in a cache alone, must leave the
                // chain. New records go into another segment, and once everything before them is in the
                // strips nobody needs the segments before.
                self.log.begin_another_segment().await?;
                self.destage.destage_all().await?;
            }
            // After two checkpoints both places of the root, and of every bad page, hold good copies. The
            // topmost page counts as changed in any case: without a changed page there might be no
            // checkpoint.
            let top = self.context.geo.page_tree().top();
            let bad_pages: Vec<u64> = found.bad_pages.into_iter().collect();
            let portions = bad_pages.chunks(PAGES_AT_A_TIME).chain(bad_pages.is_empty().then_some(&[][..]));
            for portion in portions {
                let (mut pages, mut pins) = (BTreeSet::from([top]), Vec::new());
                for page in portion {
                    match self.pin(*page).await {
                        Ok(pin) => pins.extend(pin),
                        Err(error) => {
                            let array = &self.context.name;
                            tracing::error!(array, page, %error, "a page cannot be repaired");
                            continue;
                        }
                    }
                    pages.insert(*page);
                }
                for _ in 0..2 {
                    self.stripes.table_mut().put_dirty(pages.clone());
                    self.checkpoints.write().await?;
                }
            }
            let bad_before = found.bad_copies;
            found = self.verify().await?;
            let repaired = bad_before.saturating_sub(found.bad_copies + found.lost_copies);
            self.context.count(|counts| counts.repaired_blocks += repaired);
        }
        // A carrier that was made meanwhile is verified by the next scrub.
        if carriers_epoch() == began_in {
            self.members.set_metadata(found.state());
        }
        Ok(())
    }

    /// A page of the table, from a carrier that has it; those of the index are in memory.
    async fn pin(&self, page: u64) -> Result<Option<Pin>, ArrayError> {
        match self.context.geo.page_tree().is_leaf(page) {
            true => self.stripes.pin(page..page + 1).await.map(Some),
            false => Ok(None),
        }
    }

    async fn verify(&self) -> Result<Found, ArrayError> {
        let mut found = Found::default();
        self.scrub_log(&mut found).await?;
        self.verify_checkpoint(&mut found).await;
        Ok(found)
    }

    fn report_bad(&self, carrier: MemberNo, what: &str) {
        self.context.count(|counts| counts.checksum_errors += 1);
        self.members.count_checksum_errors(carrier, 1);
        tracing::warn!(array = self.context.name, %carrier, what, "a copy of metadata is damaged");
    }

    /// Verifies the copies of the root and of table pages that count.
    ///
    /// A full log waits for the next checkpoint, so checkpoints go on while a drive reads. They pause only
    /// while a copy that looks bad is read again: a checkpoint may have moved it meanwhile.
    async fn verify_checkpoint(&self, found: &mut Found) {
        let geo = &self.context.geo;
        for carrier in self.members.live_carriers() {
            let Some(slice) = self.members.slice(carrier) else { continue };
            let seq = self.checkpoints.pause().await.root().seq;
            let root = salvage::read(&slice, geo.root_at(seq), BLOCK_BYTES, IO).await;
            let paused = self.checkpoints.pause().await;
            // A root that was written meanwhile lies at the other place.
            let is_root = Root::decode(root.bytes()).is_ok_and(|root| root == *paused.root());
            if !root.answered() {
                found.unanswered = true;
                continue;
            }
            if paused.root().seq == seq && !is_root {
                self.report_bad(carrier, "root");
                found.bad_copies += 1;
            }
            drop(paused);
            let pieces: BTreeSet<u64> =
                self.stripes.table().index().named().map(|page| page / PAGES_IN_A_PIECE).collect();
            for first in pieces.into_iter().map(|piece| piece * PAGES_IN_A_PIECE) {
                let piece = first..geo.pages().min(first + PAGES_IN_A_PIECE);
                let mut bad = self.bad_pages(&slice, piece.clone()).await;
                if bad.as_ref().is_some_and(|bad| !bad.is_empty()) {
                    let _paused = self.checkpoints.pause().await;
                    bad = self.bad_pages(&slice, piece).await;
                }
                let Some(bad) = bad else {
                    found.unanswered = true;
                    break;
                };
                for page in bad {
                    if self.stripes.table().is_lost(page) {
                        found.lost_copies += 1;
                        continue;
                    }
                    self.report_bad(carrier, "stripe table page");
                    found.bad_copies += 1;
                    found.bad_pages.insert(page);
                }
            }
        }
    }

    /// The pages of a piece whose copy on a carrier is bad. None if the carrier does not answer.
    async fn bad_pages(&self, slice: &Slice, piece: Range<u64>) -> Option<Vec<u64>> {
        let (first, len) = (piece.start, to_usize(piece.end - piece.start) * BLOCK_BYTES);
        let read = |place| salvage::read(slice, self.context.geo.page_at(first, place), len, IO);
        let places = [read(0).await, read(1).await];
        if !places.iter().all(Salvaged::answered) {
            return None;
        }
        let table = self.stripes.table();
        let is_bad = |page: &u64| {
            let (named, at) = (table.index().page(*page), to_usize(page - first) * BLOCK_BYTES);
            let bytes = &places[usize::from(named.place)].bytes()[at..at + BLOCK_BYTES];
            !named.is_none() && !named.names(bytes)
        };
        Some(piece.filter(is_bad).collect())
    }

    /// Verifies all live records on all carriers.
    async fn scrub_log(&self, found: &mut Found) -> Result<(), ArrayError> {
        let geo = &self.context.geo;
        let (first, last) = {
            let segments = self.chain.segments();
            (segments.first().number, segments.last().number)
        };
        let mut silent = BTreeSet::new();
        for number in (first.0..=last.0).map(SegmentNo) {
            let listed = || self.chain.segments().get(number).cloned();
            let Some(segment) = listed() else { continue };
            let (at, len) = (geo.segment_at(number), geo.segment_bytes as usize);
            let read = |carrier: MemberNo| async move {
                let slice = self.members.slice(carrier)?;
                Some((carrier, salvage::read(&slice, at, len, IO).await))
            };
            let asked = self.members.live_carriers().into_iter().filter(|carrier| !silent.contains(carrier));
            let copies = join_all(asked.map(read)).await;
            let (mut copies, unanswered): (Vec<_>, Vec<_>) =
                copies.into_iter().flatten().partition(|(_, copy): &(MemberNo, Salvaged)| copy.answered());
            silent.extend(unanswered.into_iter().map(|(carrier, _)| carrier));
            let refused = {
                // Without a checkpoint the segment is not used again meanwhile; appended records never
                // change.
                let _paused = self.checkpoints.pause().await;
                if listed().is_none() {
                    continue;
                }
                self.repair_segment(&segment, &mut copies, found).await
            };
            for Refused { carrier, life, why } in refused {
                silent.insert(carrier);
                let Some(why) = why else { continue };
                match self.members.fail_life(carrier, life, &why).await {
                    // If the array can lose no other drive this one stays, and its copy stays bad.
                    Ok(()) | Err(ArrayError::Suspended(_)) => {}
                    Err(error) => return Err(error),
                }
            }
        }
        found.unanswered |= !silent.is_empty();
        Ok(())
    }

    /// Repairs the header and the live records of a segment, of which these are the copies. A carrier that
    /// refuses a write is not asked again: checkpoints wait for this.
    async fn repair_segment(
        &self,
        segment: &LogSegment,
        copies: &mut Vec<(MemberNo, Salvaged)>,
        found: &mut Found,
    ) -> Vec<Refused> {
        let header = |bytes: &Buf| {
            SegmentHeader::decode(&bytes[..BLOCK_BYTES])
                .is_ok_and(|found| found.array == self.context.id && found.number == segment.number.0)
        };
        let mut refused = self.repair_range(segment, copies, 0..BLOCK_BYTES, &header, found).await;
        for place in &segment.records {
            let start = place.offset_blocks as usize * BLOCK_BYTES;
            let blocks = (place.shape.head_blocks + place.shape.payload_blocks) as usize;
            let range = start..start + blocks * BLOCK_BYTES;
            let record = |bytes: &Buf| record_is_good(&bytes[range.clone()], place.shape.chain);
            refused.extend(self.repair_range(segment, copies, range.clone(), &record, found).await);
        }
        refused
    }

    /// Writes a part of a segment on the carriers whose copy is bad, from one that has it, and does not try
    /// again. Carriers that refuse it are taken out of the copies.
    async fn repair_range(
        &self,
        segment: &LogSegment,
        copies: &mut Vec<(MemberNo, Salvaged)>,
        range: Range<usize>,
        good: &dyn Fn(&Buf) -> bool,
        found: &mut Found,
    ) -> Vec<Refused> {
        let (first, blocks) = (range.start / BLOCK_BYTES, range.len() / BLOCK_BYTES);
        let is_good = |copy: &Salvaged| copy.has(first, blocks) && good(copy.bytes());
        let whole = copies.iter().find(|(_, copy)| is_good(copy)).map(|(_, copy)| copy.bytes().clone());
        let bad: Vec<MemberNo> =
            copies.iter().filter(|(_, copy)| !is_good(copy)).map(|(carrier, _)| *carrier).collect();
        let mut refused = Vec::new();
        for carrier in bad {
            self.report_bad(carrier, "log");
            let Some(whole) = &whole else {
                found.lost_record = true;
                break;
            };
            let life = self.members.life(carrier);
            // A carrier that is gone has no copy to repair.
            let Some(slice) = self.members.slice(carrier) else { continue };
            let at = self.context.geo.segment_at(segment.number) + range.start as u64;
            let written =
                match slice.write(at, whole.slice(range.clone()), IO.at(Site::MetadataRepair.name())).await {
                    Ok(()) => slice.flush(IO.at("metascrub.flush")).await,
                    Err(error) => Err(error),
                };
            match written {
                Ok(()) => self.context.count(|counts| counts.repaired_blocks += blocks as u64),
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

/// True if these bytes are the record with this chain value, with its payload.
fn record_is_good(bytes: &[u8], chain: u32) -> bool {
    let Ok((head, shape)) = RecordHead::decode(bytes) else { return false };
    let payload = &bytes[shape.head_blocks as usize * BLOCK_BYTES..];
    let crcs = head.entries.iter().flat_map(Entry::payload_crcs);
    shape.chain == chain && payload.chunks_exact(BLOCK_BYTES).map(crc32c).eq(crcs)
}
