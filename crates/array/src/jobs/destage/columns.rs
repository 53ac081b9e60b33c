//! Destage in place: one range of columns of a written stripe.
//!
//! Read-modify-write reads the old contents of the changed strips and the old parity; reconstruct-write reads
//! the data strips that do not change. The way that reads less is taken.

use super::{Destage, DirtyColumns, IO};
use crate::error::ArrayError;
use crate::format::record::{Entry, StripPatch};
use crate::geometry::Geometry;
use crate::members::WhenSuspended;
use crate::place::{Position, Positions, SegmentNo};
use crate::site::Site;
use crate::strips::{Part, StripWrite};
use futures_util::future::join_all;
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Stripe, ZERO_BLOCK_CRC};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const IN_PLACE: StripWrite = StripWrite::new(Site::DestageStrip, Site::DestageTrailer, WhenSuspended::Wait);

/// Joins the touched columns into ranges whose blocks of all strips fit in a record.
pub(super) fn column_ranges(geo: &Geometry, columns: &BTreeSet<u32>) -> Vec<Range<u32>> {
    let most = to_u32(geo.destage_payload_blocks() / geo.strips()).max(1);
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for column in columns {
        match ranges.last_mut() {
            Some(range) if column + 1 - range.start <= most && column - range.end <= most / 4 => {
                range.end = column + 1
            }
            _ => ranges.push(*column..column + 1),
        }
    }
    assert!(ranges.iter().all(|range| to_u32(range.len()) <= most), "{ranges:?} of at most {most}");
    ranges
}

impl Destage {
    /// Logs and writes one range of columns in place. Returns the segment of its record.
    pub(super) async fn destage_columns(
        &self,
        stripe: Stripe,
        range: Range<u32>,
        dirty: &DirtyColumns,
    ) -> Result<SegmentNo, ArrayError> {
        let geo = &self.context.geo;
        let patched = self.new_columns(stripe, &range, dirty).await?;
        let version = self.stripes.versions.next().await?;
        // A strip that changes and cannot be written now is stale from this record on. Others are still good
        // on a drive that is away.
        let readable = self.stripes.readable(stripe);
        let changed: Positions = patched.iter().map(|(position, _)| *position).collect();
        let stale = self.stripes.stale(stripe).with(changed.without(readable));
        // Nobody could make them again. They stay in the log.
        if stale.len() > geo.m && dirty.keys().any(|(position, _)| stale.contains(*position)) {
            let (array, good) = (self.context.id, readable.len());
            return Err(ArrayError::Unreadable { array, stripe: stripe.0, good, wanted: geo.k });
        }
        let mut patches = Vec::new();
        let mut payload = Vec::new();
        for (position, new) in patched.into_iter().filter(|(position, _)| !stale.contains(*position)) {
            let is_touched = |column: &u32| match position.index() < geo.k {
                true => dirty.contains_key(&(position, *column)),
                false => dirty.keys().any(|(_, dirty)| dirty == column),
            };
            let touched: Vec<u16> = range.clone().filter(is_touched).map(|column| to_u16(column)).collect();
            let crcs = self.strip_crcs_with(stripe, position, &range, &touched, &new.crcs).await?;
            for column in &touched {
                let at = (u32::from(*column) - range.start) as usize * BLOCK_BYTES;
                payload.push(new.data.slice(at..at + BLOCK_BYTES));
            }
            patches.push(StripPatch { position, version, columns: touched, crcs });
        }
        // Blocks that no strip can take stay in the log; replay would refuse an entry that makes them void.
        if patches.is_empty() {
            let (array, good) = (self.context.id, readable.len());
            return Err(ArrayError::Unreadable { array, stripe: stripe.0, good, wanted: geo.k });
        }
        let contained = dirty.iter();
        let contained =
            contained.map(|((position, column), block)| (geo.block_of(*position, *column), block.order));
        let entry =
            Entry::Destage { stripe, stale, contained: contained.collect(), patches: patches.clone() };
        let segment = self.queue.append(entry, payload.clone()).await?;
        let missed = self.strips.write_patches(stripe, stale, &patches, &payload, IN_PLACE).await?;
        if missed != Positions::NONE {
            self.members.record_missed(stripe, missed);
        }
        Ok(segment)
    }

    /// New contents of the range for every strip that changes: dirty data strips, and all parity.
    async fn new_columns(
        &self,
        stripe: Stripe,
        range: &Range<u32>,
        dirty: &DirtyColumns,
    ) -> Result<Vec<(Position, Part)>, ArrayError> {
        let geo = &self.context.geo;
        let touched: BTreeSet<Position> = dirty.keys().map(|(position, _)| *position).collect();
        let is_full =
            |position: &Position| range.clone().all(|column| dirty.contains_key(&(*position, column)));
        let not_full: Vec<Position> = geo.data_strips().filter(|position| !is_full(position)).collect();
        let modify = touched.len() + geo.m < not_full.len();
        let needed: Vec<Position> = match modify {
            // Without parity nothing depends on the old contents.
            _ if geo.m == 0 => Vec::new(),
            true => touched.iter().copied().chain(geo.parity_strips()).collect(),
            false => not_full,
        };
        let read = |position: &Position| {
            self.strips.read_or_recover(stripe, *position, range, IO.at("destage.read"))
        };
        let parts = join_all(needed.iter().map(read)).await.into_iter().collect::<Result<Vec<_>, _>>()?;
        let is_complete = needed.is_empty();
        let old: BTreeMap<Position, Part> = needed.into_iter().zip(parts).collect();
        let blank =
            Part { data: Buf::zeroed(range.len() * BLOCK_BYTES), crcs: vec![ZERO_BLOCK_CRC; range.len()] };
        let new_data =
            |position: Position| overlaid(old.get(&position).unwrap_or(&blank), position, range, dirty);
        let mut result: Vec<(Position, Part)> = touched.iter().map(|at| (*at, new_data(*at))).collect();
        let parity = if modify && geo.m > 0 {
            self.context.count(|counts| counts.read_modify_writes += 1);
            let old_parity: Vec<&Part> = geo.parity_strips().map(|position| &old[&position]).collect();
            let changes: Vec<_> = result.iter().map(|(at, new)| (*at, &old[at], new)).collect();
            self.strips.update_parity(&old_parity, &changes)
        } else {
            self.context.count(|counts| {
                if is_complete { counts.full_writes += 1 } else { counts.reconstruct_writes += 1 }
            });
            self.strips.encode(&geo.data_strips().map(new_data).collect::<Vec<_>>())
        };
        assert_eq!(parity.len(), geo.m, "all parity changes");
        result.extend(geo.parity_strips().zip(parity));
        Ok(result)
    }

    /// The checksums of the whole strip once the touched columns of the range hold `new`.
    async fn strip_crcs_with(
        &self,
        stripe: Stripe,
        position: Position,
        range: &Range<u32>,
        touched: &[u16],
        new: &[u32],
    ) -> Result<Vec<u32>, ArrayError> {
        let all = self.context.geo.strip_blocks as usize;
        // With parity all of the range was read or made, also the columns that are not touched.
        if range.len() == all && self.context.geo.m > 0 {
            return Ok(new.to_vec());
        }
        let mut crcs = match touched.len() == all {
            true => vec![0; all],
            false => self.strip_crcs(stripe, position).await?,
        };
        for column in touched {
            crcs[usize::from(*column)] = new[usize::from(*column) - range.start as usize];
        }
        Ok(crcs)
    }

    /// The checksums of a strip's blocks: from its trailer, or from its reconstruction.
    async fn strip_crcs(&self, stripe: Stripe, position: Position) -> Result<Vec<u32>, ArrayError> {
        let io = IO.at("destage.read");
        if let Some(crcs) = self.strips.trailer_crcs(stripe, position, io).await {
            return Ok(crcs);
        }
        let all = 0..self.context.geo.strip_blocks;
        Ok(self.strips.recover_one(stripe, position, &all, io).await?.crcs)
    }
}

/// `old` with the dirty blocks of its strip put in.
fn overlaid(old: &Part, position: Position, range: &Range<u32>, dirty: &DirtyColumns) -> Part {
    let mut data = BufMut::zeroed(old.data.len());
    data.as_mut().copy_from_slice(&old.data);
    let mut crcs = old.crcs.clone();
    for (index, column) in range.clone().enumerate() {
        if let Some(block) = dirty.get(&(position, column)) {
            data.as_mut()[index * BLOCK_BYTES..(index + 1) * BLOCK_BYTES].copy_from_slice(&block.data);
            crcs[index] = block.crc;
        }
    }
    Part { data: data.freeze(), crcs }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::CreateSpec;

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "the ranges are the expected value")]
    fn near_columns_are_destaged_together() {
        // Records of at most 127 blocks, so ranges of at most 21 columns for 4+2.
        let geo = Geometry::fit(&CreateSpec::new("t", 4, 2).unwrap(), 1 << 30).unwrap();
        for (columns, expected) in [
            (vec![], vec![]),
            (vec![5], vec![5..6]),
            (vec![0, 1, 2, 3], vec![0..4]),
            // A gap of up to a quarter of a range is written again with it.
            (vec![0, 6], vec![0..7]),
            (vec![0, 7], vec![0..1, 7..8]),
            ((0..64).collect(), vec![0..21, 21..42, 42..63, 63..64]),
        ] {
            let columns: BTreeSet<u32> = columns.into_iter().collect();
            assert_eq!(column_ranges(&geo, &columns), expected, "{columns:?}");
        }
    }
}
