//! Destage in place: columns of a written stripe, as many as fit in a record, so that a strip gets one
//! trailer for all of them.
//!
//! Near columns are read and coded together, as a range. Read-modify-write reads the old contents of the
//! changed strips and the old parity; reconstruct-write reads the data strips that do not change. The way
//! that reads less is taken, for each range.

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
use penstock_base::rank::scoped;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Stripe, ZERO_BLOCK_CRC};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

const IN_PLACE: StripWrite = StripWrite::new(Site::DestageStrip, Site::DestageTrailer, WhenSuspended::Wait);

/// Ranges of columns that are destaged with one record.
pub(super) type Group = Vec<Range<u32>>;

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

/// The ranges that the dirty columns make, in groups whose blocks fit in a record: the dirty ones, and the
/// parity of their columns.
pub(super) fn column_groups(geo: &Geometry, dirty: &DirtyColumns) -> Vec<Group> {
    let mut blocks_of: BTreeMap<u32, usize> = BTreeMap::new();
    for (_, column) in dirty.keys() {
        *blocks_of.entry(*column).or_insert(geo.m) += 1;
    }
    let most = geo.destage_payload_blocks();
    let mut groups: Vec<Group> = Vec::new();
    let mut blocks = 0;
    for range in column_ranges(geo, &blocks_of.keys().copied().collect()) {
        let more: usize = blocks_of.range(range.clone()).map(|(_, blocks)| blocks).sum();
        assert!(more <= most, "{more} blocks of {range:?} in a record of {most}");
        match groups.last_mut() {
            Some(group) if blocks + more <= most => {
                group.push(range);
                blocks += more;
            }
            _ => {
                groups.push(vec![range]);
                blocks = more;
            }
        }
    }
    groups
}

/// The dirty blocks in these columns.
pub(super) fn within(dirty: &DirtyColumns, ranges: &[Range<u32>]) -> DirtyColumns {
    let is_within = |column: &u32| ranges.iter().any(|range| range.contains(column));
    let blocks = dirty.iter().filter(|((_, column), _)| is_within(column));
    blocks.map(|(place, block)| (*place, block.clone())).collect()
}

/// The parts of a group to try after it could not be destaged as a whole: its ranges, or the dirty columns of
/// the only one. None if it is one column.
pub(super) fn parts_of(group: &[Range<u32>], dirty: &DirtyColumns) -> Option<Vec<Group>> {
    match group {
        [range] if range.len() <= 1 => None,
        [range] => {
            let columns = dirty.keys().map(|(_, column)| *column).filter(|column| range.contains(column));
            let columns: BTreeSet<u32> = columns.collect();
            Some(columns.into_iter().map(|column| std::iter::once(column..column + 1).collect()).collect())
        }
        ranges => Some(ranges.iter().map(|range| vec![range.clone()]).collect()),
    }
}

/// New contents of columns of a strip.
struct Change {
    range: Range<u32>,
    new: Part,
}

impl Change {
    fn at(&self, column: u16) -> Option<usize> {
        let column = u32::from(column);
        self.range.contains(&column).then(|| (column - self.range.start) as usize)
    }
}

/// The new contents of a column.
fn changed(changes: &[Change], column: u16) -> Part {
    let found = changes.iter().find_map(|change| Some((change, change.at(column)?)));
    let (Change { new, .. }, at) = found.expect("a touched column is in one of the ranges");
    new.columns(at..at + 1)
}

impl Destage {
    /// Logs and writes the dirty blocks, all of which are in columns of this group. Returns the segment of
    /// the record.
    pub(super) async fn destage_columns(
        &self,
        stripe: Stripe,
        group: &[Range<u32>],
        dirty: &DirtyColumns,
    ) -> Result<SegmentNo, ArrayError> {
        let geo = &self.context.geo;
        let changes = self.changes(stripe, group, dirty).await?;
        let version = self.stripes.versions.next().await?;
        // A strip that changes and cannot be written now is stale from this record on. Others are still good
        // on a drive that is away.
        let readable = self.stripes.readable(stripe);
        let changing: Positions = changes.keys().copied().collect();
        let stale = self.stripes.stale(stripe).with(changing.without(readable));
        // Nobody could make them again. They stay in the log.
        if stale.len() > geo.m && dirty.keys().any(|(position, _)| stale.contains(*position)) {
            let (array, good) = (self.context.id, readable.len());
            return Err(ArrayError::Unreadable { array, stripe: stripe.0, good, wanted: geo.k });
        }
        let columns: BTreeSet<u16> = dirty.keys().map(|(_, column)| to_u16(*column)).collect();
        let mut patches = Vec::new();
        let mut payload = Vec::new();
        for (position, changes) in changes.into_iter().filter(|(position, _)| !stale.contains(*position)) {
            let is_touched = |column: &u16| {
                position.index() >= geo.k || dirty.contains_key(&(position, u32::from(*column)))
            };
            let columns: Vec<u16> = columns.iter().copied().filter(is_touched).collect();
            let crcs = self.strip_crcs_with(stripe, position, &changes, &columns).await?;
            payload.extend(columns.iter().map(|column| changed(&changes, *column).data));
            patches.push(StripPatch { position, version, columns, crcs });
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

    /// New contents of the ranges, by the strips that change.
    async fn changes(
        &self,
        stripe: Stripe,
        group: &[Range<u32>],
        dirty: &DirtyColumns,
    ) -> Result<BTreeMap<Position, Vec<Change>>, ArrayError> {
        let made = join_all(group.iter().map(|range| {
            scoped(async move {
                let dirty = within(dirty, std::slice::from_ref(range));
                self.new_columns(stripe, range, &dirty).await
            })
        }));
        let mut changes: BTreeMap<Position, Vec<Change>> = BTreeMap::new();
        for (range, made) in group.iter().zip(made.await) {
            for (position, new) in made? {
                changes.entry(position).or_default().push(Change { range: range.clone(), new });
            }
        }
        Ok(changes)
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

    /// The checksums of the whole strip once these columns have changed.
    async fn strip_crcs_with(
        &self,
        stripe: Stripe,
        position: Position,
        changes: &[Change],
        columns: &[u16],
    ) -> Result<Vec<u32>, ArrayError> {
        let all = self.context.geo.strip_blocks as usize;
        // With parity all of the range was read or made, also the columns that are not touched.
        if let [Change { range, new }] = changes
            && range.len() == all
            && self.context.geo.m > 0
        {
            return Ok(new.crcs.clone());
        }
        let mut crcs = match columns.len() == all {
            true => vec![0; all],
            false => self.strip_crcs(stripe, position).await?,
        };
        for column in columns {
            crcs[usize::from(*column)] = changed(changes, *column).crcs[0];
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
    use crate::stripes::overlay::DirtyBlock;

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

    fn blank() -> DirtyBlock {
        DirtyBlock { data: Buf::zeroed(BLOCK_BYTES), crc: ZERO_BLOCK_CRC, order: 1, segment: None }
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "groups are lists of ranges")]
    fn columns_are_destaged_with_as_few_records_as_they_fit_in() {
        // Records of at most 127 blocks.
        let geo = Geometry::fit(&CreateSpec::new("t", 4, 2).unwrap(), 1 << 30).unwrap();
        let dirty = |places: &mut dyn Iterator<Item = (usize, u32)>| -> DirtyColumns {
            places.map(|(at, column)| ((Position::new(at), column), blank())).collect()
        };
        for (name, dirty, expected) in [
            ("nothing", dirty(&mut std::iter::empty()), vec![]),
            // Three blocks each.
            (
                "far columns",
                dirty(&mut [(0, 0), (3, 9), (1, 60)].into_iter()),
                vec![vec![0..1, 9..10, 60..61]],
            ),
            // 64 columns of three blocks are 192: two ranges of 63 blocks, then one, then a single one.
            (
                "a full strip",
                dirty(&mut (0..64).map(|column| (2, column))),
                vec![vec![0..21, 21..42], vec![42..63, 63..64]],
            ),
            // Ranges of 126 blocks.
            (
                "full columns",
                dirty(&mut (0..42).flat_map(|column| (0..4).map(move |at| (at, column)))),
                vec![vec![0..21], vec![21..42]],
            ),
        ] {
            assert_eq!(column_groups(&geo, &dirty), expected, "{name}");
        }
    }

    #[test]
    #[allow(clippy::single_range_in_vec_init, reason = "groups are lists of ranges")]
    fn a_group_is_taken_apart_down_to_its_columns() {
        let places = [(0, 1), (2, 1), (1, 4), (0, 30)].map(|(at, column)| (Position::new(at), column));
        let dirty: DirtyColumns = places.into_iter().map(|place| (place, blank())).collect();
        assert_eq!(parts_of(&[1..5, 30..31], &dirty), Some(vec![vec![1..5], vec![30..31]]));
        // Column 2 has nothing to destage.
        assert_eq!(parts_of(&[1..5], &dirty), Some(vec![vec![1..2], vec![4..5]]));
        assert_eq!(parts_of(&[30..31], &dirty), None);
        assert_eq!(within(&dirty, &[1..2, 30..31]).len(), 3);
    }
}
