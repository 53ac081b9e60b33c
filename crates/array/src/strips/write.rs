//! Writes of strips with their trailers, and of the parity that belongs to them.

use super::part::make_parts;
use super::patience::Bad;
use super::{Part, Strips};
use crate::error::ArrayError;
use crate::format::record::StripPatch;
use crate::format::trailer::Trailer;
use crate::layout::StripPlace;
use crate::members::{Life, StripOf, WhenSuspended};
use crate::moves::Moves;
use crate::place::{Position, Positions};
use crate::site::Site;
use crate::stripes::map::Landed;
use futures_util::future::{join, join_all};
use penstock_base::rank::scoped;
use penstock_base::{Buf, BufMut, Stripe, Version, crc32c_blocks};
use penstock_drive::Io;
use penstock_raid::{Checksums, Residency, SourceCrcs};
use std::rc::Rc;

/// The way in which strips are written.
#[derive(Clone, Copy)]
pub(crate) struct StripWrite {
    data: Io,
    trailer: Io,
    when: WhenSuspended,
}

impl StripWrite {
    /// Blocks from one site and trailers from another, or from the same one.
    pub(crate) const fn new(data: Site, trailer: Site, when: WhenSuspended) -> Self {
        Self { data: data.io(), trailer: trailer.io(), when }
    }

    /// A fresh stripe, charged to the tenant and class of `io`. Its writer begins again.
    pub(crate) const fn fresh(io: Io) -> Self {
        let (data, trailer) = (Site::FreshStrip.name(), Site::FreshTrailer.name());
        Self { data: io.at(data), trailer: io.at(trailer), when: WhenSuspended::Fail }
    }
}

/// The one life in which all writes of a strip landed; none if one was missed, or the member failed between
/// them.
fn one_life(landed: impl IntoIterator<Item = Option<Life>>) -> Option<Life> {
    landed.into_iter().reduce(|first, other| first.filter(|_| first == other)).flatten()
}

impl Strips {
    /// Parity strips for full data strips (or the same columns of each), with their checksums. The same pass
    /// over the data proves that it still agrees with its checksums: corruption in memory goes no further.
    pub(crate) fn encode(&self, data: &[Part]) -> Vec<Part> {
        assert_eq!(data.len(), self.context.geo.k, "all data strips are encoded");
        let columns = data[0].crcs.len();
        let sources: Vec<&[u8]> = data.iter().map(|part| &part.data[..]).collect();
        let mut of_data = vec![0; data.len() * columns];
        let parity = make_parts(self.context.geo.m, columns, |parity, crcs| {
            let checksums = Checksums { sources: SourceCrcs::Wanted(&mut of_data), outputs: crcs };
            self.code.encode_with(&sources, parity, Residency::Warm, Some(checksums));
        });
        let known = data.iter().flat_map(|part| &part.crcs);
        assert!(known.eq(&of_data), "memory holds what was written");
        parity
    }

    /// Parity strips after a change of data strips, from the old parity. `changes` holds the position, the
    /// old and the new contents of each changed strip: the same columns of all.
    pub(crate) fn update_parity(
        &self,
        old_parity: &[&Part],
        changes: &[(Position, &Part, &Part)],
    ) -> Vec<Part> {
        let copy = |part: &&Part| {
            let mut buf = BufMut::zeroed(part.data.len());
            buf.as_mut().copy_from_slice(&part.data);
            buf
        };
        let mut parity: Vec<BufMut> = old_parity.iter().map(copy).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(AsMut::as_mut).collect();
        for (position, old, new) in changes {
            // As `encode` does; the old parts were proved when they were read.
            assert_eq!(crc32c_blocks(&new.data), new.crcs, "memory holds what was written");
            self.code.update(position.index(), &old.data, &new.data, &mut outputs);
        }
        let parts = parity.into_iter().map(|buf| {
            let data = buf.freeze();
            let crcs = crc32c_blocks(&data);
            Part { data, crcs }
        });
        parts.collect()
    }

    /// Writes a full strip and its trailer to its place. Returns the life of the member in which both landed;
    /// none if it missed them.
    pub(crate) async fn write_strip(
        &self,
        stripe: Stripe,
        position: Position,
        part: &Part,
        version: Version,
        how: StripWrite,
    ) -> Result<Option<Life>, ArrayError> {
        let strip = StripOf { stripe, position, counts: true };
        self.write_full(strip, self.stripes.place(stripe, position), part, version, how).await
    }

    /// Writes a full strip to a place where it will be once that is recorded. Returns as
    /// [`Self::write_strip`] does.
    pub(crate) async fn write_moved(
        &self,
        (stripe, position): (Stripe, Position),
        place: StripPlace,
        part: &Part,
        version: Version,
        how: StripWrite,
    ) -> Result<Option<Life>, ArrayError> {
        self.write_full(StripOf { stripe, position, counts: false }, place, part, version, how).await
    }

    async fn write_full(
        &self,
        strip: StripOf,
        place: StripPlace,
        part: &Part,
        version: Version,
        how: StripWrite,
    ) -> Result<Option<Life>, ArrayError> {
        assert_eq!(part.data.len(), self.context.geo.strip_bytes(), "a full strip is written");
        let data = self.write_blocks(strip, place, 0, part.data.clone(), how);
        let trailer = self.write_trailer(strip, place, &part.crcs, version, how);
        let (data, trailer) = join(scoped(data), scoped(trailer)).await;
        let landed = one_life([data?, trailer?]);
        if landed.is_some() {
            self.patience.borrow_mut().written(strip.stripe, strip.position);
        }
        Ok(landed)
    }

    /// Writes columns of a strip to its place, from `column` on.
    pub(crate) async fn write_columns(
        &self,
        stripe: Stripe,
        position: Position,
        column: u32,
        data: Buf,
        how: StripWrite,
    ) -> Result<Option<Life>, ArrayError> {
        let strip = StripOf { stripe, position, counts: true };
        self.write_blocks(strip, self.stripes.place(stripe, position), column, data, how).await
    }

    async fn write_blocks(
        &self,
        strip: StripOf,
        place: StripPlace,
        column: u32,
        data: Buf,
        how: StripWrite,
    ) -> Result<Option<Life>, ArrayError> {
        let at = self.context.geo.block_at(place.row, column);
        self.members.write_strip(strip, place.member, (at, data), how.data, how.when).await
    }

    async fn write_trailer(
        &self,
        strip: StripOf,
        place: StripPlace,
        crcs: &[u32],
        version: Version,
        how: StripWrite,
    ) -> Result<Option<Life>, ArrayError> {
        let StripOf { stripe, position, .. } = strip;
        let (array, number) = (self.context.id, position.number());
        let trailer = Trailer { array, stripe, position: number, version, crcs: crcs.to_vec() };
        let block = (self.context.geo.trailer_at(place.row), trailer.encode());
        let landed = self.members.write_strip(strip, place.member, block, how.trailer, how.when).await?;
        if landed.is_some() {
            self.trailers.borrow_mut().put(stripe, position, version, Rc::new(trailer.crcs));
            self.found_good(stripe, position, Bad::Trailer);
        }
        Ok(landed)
    }

    /// Writes all strips of a stripe that was unwritten, those of `moves` to spare places. Returns by
    /// position where and in which life its strip landed.
    pub(crate) async fn write_stripe(
        &self,
        stripe: Stripe,
        parts: &[Part],
        moves: Moves,
        version: Version,
        how: StripWrite,
    ) -> Result<Vec<Option<Landed>>, ArrayError> {
        assert_eq!(parts.len(), self.context.geo.strips(), "all strips are written");
        let places = self.context.layout.places(stripe, moves);
        let (places, mut writes) = (places.collect::<Vec<_>>(), Vec::new());
        for (at, (part, place)) in parts.iter().zip(&places).enumerate() {
            let strip = StripOf { stripe, position: Position::new(at), counts: true };
            writes.push(scoped(self.write_full(strip, *place, part, version, how)));
        }
        let landed = join_all(writes).await.into_iter().zip(places);
        landed.map(|(life, place)| Ok(life?.map(|life| (place.member, life)))).collect()
    }

    /// Writes patches into the strips that are not stale. `payload` holds the blocks of all patches in order.
    /// Returns the strips that missed theirs.
    pub(crate) async fn write_patches(
        &self,
        stripe: Stripe,
        stale: Positions,
        patches: &[StripPatch],
        payload: &[Buf],
        how: StripWrite,
    ) -> Result<Positions, ArrayError> {
        let mut writes = Vec::new();
        let mut rest = payload;
        for patch in patches {
            let (blocks, others) = rest.split_at(patch.columns.len());
            rest = others;
            if !stale.contains(patch.position) {
                writes.push(scoped(self.write_patch(stripe, patch, blocks, how)));
            }
        }
        let results = join_all(writes).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Writes a patch. Returns its position if the member missed it.
    async fn write_patch(
        &self,
        stripe: Stripe,
        patch: &StripPatch,
        blocks: &[Buf],
        how: StripWrite,
    ) -> Result<Option<Position>, ArrayError> {
        let strip = StripOf { stripe, position: patch.position, counts: true };
        let place = self.stripes.place(stripe, patch.position);
        let mut writes = Vec::new();
        let mut at = 0;
        while at < blocks.len() {
            let run = run_length(&patch.columns[at..]);
            let data = penstock_base::buf::gather(&blocks[at..at + run]);
            let column = u32::from(patch.columns[at]);
            writes.push(scoped(self.write_blocks(strip, place, column, data, how)));
            at += run;
        }
        let trailer = self.write_trailer(strip, place, &patch.crcs, patch.version, how);
        let (blocks, trailer) = join(join_all(writes), scoped(trailer)).await;
        let landed = blocks.into_iter().collect::<Result<Vec<_>, _>>()?;
        let is_missed = one_life(landed.into_iter().chain([trailer?])).is_none();
        Ok(is_missed.then_some(patch.position))
    }
}

/// The number of consecutive columns at the start of `columns`, which ascend.
fn run_length(columns: &[u16]) -> usize {
    let first = columns[0];
    columns.iter().zip(first..).take_while(|(column, expected)| *column == expected).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_strip_landed_if_all_of_it_landed_in_one_life() {
        for (landed, expected) in [
            (vec![Some(1)], Some(1)),
            (vec![Some(1), Some(1), Some(1)], Some(1)),
            (vec![Some(1), Some(2)], None),
            (vec![Some(1), None], None),
            (vec![None, Some(1)], None),
            (vec![], None),
        ] {
            assert_eq!(one_life(landed.clone()), expected, "{landed:?}");
        }
    }

    #[test]
    fn consecutive_columns_are_one_write() {
        for (columns, expected) in [(&[3][..], 1), (&[3, 4, 5, 7], 3), (&[0, 2], 1)] {
            assert_eq!(run_length(columns), expected, "{columns:?}");
        }
    }
}
