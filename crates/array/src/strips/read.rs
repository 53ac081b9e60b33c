//! Reads of strips, each column proved by the strip's trailer.

use super::part::bytes_of;
use super::patience::Bad;
use super::{Erased, Found, Part, Strips};
use crate::format::trailer::Trailer;
use crate::layout::StripPlace;
use crate::place::{Position, Positions};
use crate::salvage;
use futures_util::future::{join, join_all};
use penstock_base::{BLOCK_BYTES, Stripe, Version};
use penstock_drive::{DriveError, Io, Slice};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;

impl Strips {
    /// True if a trailer is that of a strip of this version.
    fn is_trailer_of(&self, trailer: &Trailer, stripe: Stripe, position: Position, version: Version) -> bool {
        trailer.array == self.context.id
            && trailer.stripe == stripe
            && trailer.position == position.number()
            && trailer.version == version
            && trailer.crcs.len() == self.context.geo.strip_blocks as usize
    }

    async fn read_trailer(
        &self,
        (slice, row): (&Slice, u64),
        stripe: Stripe,
        position: Position,
        io: Io,
    ) -> Result<Rc<Vec<u32>>, Erased> {
        let version = self.stripes.version(stripe, position);
        if let Some(crcs) = self.trailers.borrow().get(stripe, position, version) {
            return Ok(crcs);
        }
        let at = self.context.geo.trailer_at(row);
        let block = match slice.read(at, BLOCK_BYTES, io).await {
            Ok(block) => block,
            Err(error) => {
                // A bad block that stays so is as lost as one that is wrong.
                let is_bad = matches!(error, DriveError::Io { .. });
                return Err(match is_bad && self.found_unread(stripe, position, Bad::Trailer, io).await {
                    true => Erased::Strip,
                    false => self.unreachable(stripe, &error),
                });
            }
        };
        match Trailer::decode(&block) {
            Ok(trailer) if self.is_trailer_of(&trailer, stripe, position, version) => {
                self.found_good(stripe, position, Bad::Trailer);
                let crcs = Rc::new(trailer.crcs);
                self.trailers.borrow_mut().put(stripe, position, version, crcs.clone());
                Ok(crcs)
            }
            _ => {
                self.found_bad(stripe, position, Bad::Trailer);
                Err(Erased::Strip)
            }
        }
    }

    /// A drive did not return a block. If it gave an error the stripe is scrubbed soon: a bad block is good
    /// once it is written again.
    fn unreachable(&self, stripe: Stripe, error: &DriveError) -> Erased {
        if matches!(error, DriveError::Io { .. }) {
            self.stripes.want_another_try(stripe);
        }
        Erased::Unreachable
    }

    /// The checksums in a strip's trailer; none if the strip is stale, away, or its trailer is bad.
    pub(crate) async fn trailer_crcs(&self, stripe: Stripe, position: Position, io: Io) -> Option<Vec<u32>> {
        if self.stripes.stale(stripe).contains(position) {
            return None;
        }
        let place = self.stripes.place(stripe, position);
        let slice = self.members.slice(place.member)?;
        self.read_trailer((&slice, place.row), stripe, position, io).await.ok().map(|crcs| crcs.to_vec())
    }

    pub(super) fn is_whole_strip(&self, columns: &Range<u32>) -> bool {
        columns.len() == self.context.geo.strip_blocks as usize
    }

    /// Columns of a strip as they are on the drive, with the checksums of its trailer.
    async fn read_unproved(
        &self,
        stripe: Stripe,
        position: Position,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, Erased> {
        let place = self.stripes.place(stripe, position);
        let Some(slice) = self.members.slice(place.member) else { return Err(Erased::Unreachable) };
        let at = self.context.geo.block_at(place.row, columns.start);
        let data = slice.read(at, bytes_of(columns), io);
        let trailer = self.read_trailer((&slice, place.row), stripe, position, io);
        let (data, crcs) = join(data, trailer).await;
        let crcs = crcs?;
        let data = data.map_err(|error| self.unreachable(stripe, &error))?;
        assert!(!columns.is_empty() && columns.end <= self.context.geo.strip_blocks, "columns of a strip");
        let crcs = crcs[columns.start as usize..columns.end as usize].to_vec();
        Ok(Part { data, crcs })
    }

    /// Columns of strips for a combined pass that codes and proves them. If that pass fails,
    /// [`super::parts_to_keep`] tells the good ones.
    pub(crate) async fn read_unproved_parts(
        &self,
        stripe: Stripe,
        positions: &[Position],
        columns: &Range<u32>,
        io: Io,
    ) -> Vec<Result<Part, Erased>> {
        let reads = positions.iter().map(|position| self.read_unproved(stripe, *position, columns, io));
        join_all(reads).await
    }

    /// Reads columns of a strip. Columns that do not verify are read once more before they are counted as
    /// bad.
    pub(crate) async fn read(
        &self,
        stripe: Stripe,
        position: Position,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, Erased> {
        if self.stripes.stale(stripe).contains(position) {
            return Err(Erased::Unreachable);
        }
        let try_read = async || self.read_unproved(stripe, position, columns, io).await?.prove();
        let mut read = try_read().await;
        if matches!(read, Err(Erased::Strip | Erased::Blocks { .. })) {
            self.forget_trailer(stripe, position);
            read = try_read().await.inspect_err(|erased| self.report_bad(stripe, position, erased));
        }
        if read.is_ok() && self.is_whole_strip(columns) {
            self.found_whole(stripe, position);
        }
        read
    }

    /// Columns of a strip read one by one. Those that cannot be read are zeros and bad. None if no column can
    /// be read, or if the trailer cannot, until that has lasted: they may be right.
    pub(super) async fn read_blockwise(
        &self,
        stripe: Stripe,
        position: Position,
        columns: &Range<u32>,
        io: Io,
    ) -> Option<Result<Part, Erased>> {
        if self.stripes.stale(stripe).contains(position) {
            return None;
        }
        let place = self.stripes.place(stripe, position);
        let slice = self.members.slice(place.member)?;
        let crcs = match self.read_trailer((&slice, place.row), stripe, position, io).await {
            Ok(crcs) => crcs,
            Err(Erased::Unreachable) => return None,
            Err(bad) => return Some(Err(bad)),
        };
        let at = self.context.geo.block_at(place.row, columns.start);
        let read = salvage::read(&slice, at, bytes_of(columns), io).await;
        match (0..columns.len()).any(|column| read.has(column, 1)) {
            true => self.found_good(stripe, position, Bad::AllBlocks),
            false => {
                let may_last = self.is_whole_strip(columns) && read.answered();
                if !may_last || !self.found_unread(stripe, position, Bad::AllBlocks, io).await {
                    return None;
                }
            }
        }
        let crcs = crcs[columns.start as usize..columns.end as usize].to_vec();
        let part = Part { data: read.bytes().clone(), crcs };
        let missing = (0..columns.len()).filter(|column| !read.has(*column, 1));
        let bad: BTreeSet<usize> = part.bad_columns().into_iter().chain(missing).collect();
        match bad.is_empty() {
            true => Some(Ok(part)),
            false => Some(Err(Erased::Blocks { part, bad: bad.into_iter().collect() })),
        }
    }

    /// Columns of several strips.
    pub(crate) async fn read_parts(
        &self,
        stripe: Stripe,
        positions: &[Position],
        columns: &Range<u32>,
        io: Io,
    ) -> Found {
        let reads = positions.iter().map(|at| async { (*at, self.read(stripe, *at, columns, io).await) });
        join_all(reads).await.into_iter().collect()
    }

    /// The next read of a strip takes its trailer from the drive.
    pub(crate) fn forget_trailer(&self, stripe: Stripe, position: Position) {
        self.trailers.borrow_mut().forget(stripe, position);
    }

    fn report_bad(&self, stripe: Stripe, position: Position, erased: &Erased) {
        let bad = match erased {
            Erased::Unreachable => return,
            Erased::Strip => 1,
            // A block that is known to be lost is no new error. Its stripe is listed, and tried again at
            // times.
            Erased::Blocks { part, bad } if part.lost_columns().len() == bad.len() => {
                self.stripes.list(stripe);
                self.stripes.want_another_try(stripe);
                return;
            }
            Erased::Blocks { part, bad } => (bad.len() - part.lost_columns().len()) as u64,
        };
        self.forget_trailer(stripe, position);
        self.context.count(|counts| counts.checksum_errors += bad);
        self.members.count_checksum_errors(self.stripes.member(stripe, position), bad);
        tracing::warn!(array = self.context.name, %stripe, %position, "contents are not what was written");
        match self.stripes.map().is_unreadable(stripe) {
            true => self.stripes.want_another_try(stripe),
            false => self.stripes.want_repair(stripe),
        }
    }

    /// True if a full strip at a place is this part, in this version. Nothing is taken from a cache.
    pub(crate) async fn reads_back(
        &self,
        (stripe, position): (Stripe, Position),
        place: StripPlace,
        version: Version,
        part: &Part,
        io: Io,
    ) -> bool {
        let Some(slice) = self.members.slice(place.member) else { return false };
        let geo = &self.context.geo;
        let data = slice.read(geo.strip_at(place.row), geo.strip_bytes(), io);
        let trailer = slice.read(geo.trailer_at(place.row), BLOCK_BYTES, io);
        let (Ok(data), Ok(trailer)) = join(data, trailer).await else { return false };
        let bad = Part { data, crcs: part.crcs.clone() }.bad_columns();
        // Blocks that are lost do not verify.
        let is_data = bad.is_empty() || bad == part.bad_columns();
        let is_trailer = Trailer::decode(&trailer).is_ok_and(|found| {
            self.is_trailer_of(&found, stripe, position, version) && found.crcs == part.crcs
        });
        is_data && is_trailer
    }

    /// Proves all strips of a stripe in the one pass that also computes parity. The error holds the strips
    /// that need no second read: some strips are away or do not verify.
    pub(crate) async fn prove_stripe(
        &self,
        stripe: Stripe,
        readable: Positions,
        io: Io,
    ) -> Result<(), Found> {
        let geo = &self.context.geo;
        if readable != geo.all_strips() {
            return Err(Found::default());
        }
        let (positions, all): (Vec<Position>, _) = (readable.iter().collect(), 0..geo.strip_blocks);
        let found = self.read_unproved_parts(stripe, &positions, &all, io).await;
        let Some(parts) = found.iter().map(|part| part.as_ref().ok()).collect::<Option<Vec<&Part>>>() else {
            return Err(super::parts_to_keep(&positions, found));
        };
        let strips: Vec<&[u8]> = parts.iter().map(|part| &part.data[..]).collect();
        assert!(strips.len() == geo.k + geo.m && strips.iter().all(|strip| strip.len() == geo.strip_bytes()));
        let (data, parity) = strips.split_at(geo.k);
        let mut crcs = vec![0; parts.len() * all.len()];
        let agrees = self.code.verify_checked(data, parity, &mut crcs);
        if !parts.iter().flat_map(|part| &part.crcs).eq(&crcs) {
            return Err(super::parts_to_keep(&positions, found));
        }
        positions.iter().for_each(|position| self.found_whole(stripe, *position));
        if !agrees {
            self.report_parity_defect(stripe, data, parity);
        }
        Ok(())
    }
}
