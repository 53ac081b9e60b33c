//! The offsets of all structures of an array on each of its slices. Byte map: docs/format/slice.md.
//!
//! A slice has one strip in each *row*. Which strip that is says the layout.
//!
//! slice = label | log region | two roots | pages of the stripe table and its index, two places each |
//! strips, each with its trailer | free | label

use crate::error::ArrayError;
use crate::format::descriptor::{Descriptor, MOST_NAME_BYTES, Role};
use crate::format::table_page::entries_per_page;
use crate::format::trailer::MAX_STRIP_BLOCKS;
use crate::layout::Layout;
use crate::page_tree::{PageTree, pages_with_index};
use crate::place::{Position, Positions, SegmentNo};
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, PoolId, SECTOR_BYTES, StackNo};
use penstock_drive::copies::{self, COPY_BYTES};
use penstock_raid::Code;
use std::ops::Range;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Largest slice in bytes. Sums of offsets in it do not overflow.
const MAX_SLICE_BYTES: u64 = 1 << 60;

/// Parameters for the creation of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateSpec {
    /// The pool that it belongs to.
    pub pool: PoolId,
    /// The stack that it belongs to.
    pub stack: StackNo,
    /// Name for people: `data` and `meta`, with the number of the stack behind them if there are several.
    pub name: String,
    /// The use of it.
    pub role: Role,
    /// Data strips in a stripe.
    pub k: usize,
    /// Redundancy strips in a stripe.
    pub m: usize,
    /// The place of every strip.
    pub layout: Layout,
    /// The first of the members that carry the log at the creation. Those of a store's arrays are spread.
    pub first_carrier: usize,
    /// Data blocks in a strip.
    pub strip_blocks: u32,
    /// Bytes of each slice that are kept for the log.
    pub log_bytes: u64,
    /// Bytes of a log segment.
    pub segment_bytes: u32,
}

impl CreateSpec {
    /// A code on as many members as it has strips, with strips of 256 KiB and a log of 64 MiB in segments of
    /// 2 MiB.
    pub fn new(name: &str, k: usize, m: usize) -> Result<Self, ArrayError> {
        let layout = Layout::one_group(k.saturating_add(m))?;
        let (strip_blocks, log_bytes, segment_bytes) = (64, 64 << 20, 2 << 20);
        let name = name.to_owned();
        Ok(Self {
            pool: PoolId::default(),
            stack: StackNo::FIRST,
            name,
            role: Role::Data,
            k,
            m,
            layout,
            first_carrier: 0,
            strip_blocks,
            log_bytes,
            segment_bytes,
        })
    }
}

/// The layout of a slice. All offsets are in bytes from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Data strips in a stripe.
    pub k: usize,
    /// Redundancy strips in a stripe.
    pub m: usize,
    /// Data blocks in a strip.
    pub strip_blocks: u32,
    /// Bytes of a log segment.
    pub segment_bytes: u32,
    /// Segments in the log region.
    pub segments: u64,
    /// Members of the array.
    pub members: usize,
    /// Strips on each member.
    pub rows: u64,
    /// Stripes in the array.
    pub stripes: u64,
}

impl Geometry {
    /// The geometry with the most rows that fit in slices of `slice_bytes`.
    pub fn fit(spec: &CreateSpec, slice_bytes: u64) -> Result<Self, ArrayError> {
        let invalid = |why: String| Err(ArrayError::Invalid(format!("array {}: {why}", spec.name)));
        if spec.name.len() > MOST_NAME_BYTES {
            return invalid(format!("its name has more than {MOST_NAME_BYTES} bytes"));
        }
        // Behind the strips is the second copy of the label.
        match slice_bytes.checked_sub(COPY_BYTES as u64) {
            Some(bytes) => Self::fit_in(spec, bytes / BLOCK * BLOCK),
            None => invalid(format!("slices of {slice_bytes} bytes have no room for a label")),
        }
    }

    fn fit_in(spec: &CreateSpec, slice_bytes: u64) -> Result<Self, ArrayError> {
        let invalid = |why: String| Err(ArrayError::Invalid(format!("array {}: {why}", spec.name)));
        if slice_bytes > MAX_SLICE_BYTES || spec.log_bytes > slice_bytes {
            return invalid(format!("a log of {} bytes in slices of {slice_bytes}", spec.log_bytes));
        }
        let strips = spec.k.saturating_add(spec.m);
        if let Err(error) = Code::new(spec.k, spec.m) {
            return invalid(error.to_string());
        }
        if spec.layout.strips() != strips {
            return invalid(format!("a layout of {} strips for {strips}", spec.layout.strips()));
        }
        if spec.strip_blocks == 0 || spec.strip_blocks > MAX_STRIP_BLOCKS {
            return invalid(format!("a strip has 1 to {MAX_STRIP_BLOCKS} blocks, not {}", spec.strip_blocks));
        }
        let segments = spec.log_bytes / u64::from(spec.segment_bytes.max(1));
        let fewest = Self::fewest_segments(spec);
        if u64::from(spec.segment_bytes) % BLOCK != 0 || segments < fewest {
            return invalid(format!("the log wants at least {fewest} segments of whole blocks"));
        }
        let mut geometry = Self {
            k: spec.k,
            m: spec.m,
            strip_blocks: spec.strip_blocks,
            segment_bytes: spec.segment_bytes,
            segments,
            members: spec.layout.members(),
            rows: 0,
            stripes: 0,
        };
        let too_long = 2 * geometry.longest_entry_blocks() * BLOCK_BYTES > spec.segment_bytes as usize;
        if geometry.max_payload_blocks() < strips + 1 || too_long {
            return invalid(format!(
                "segments of {} bytes are too small for {strips} strips",
                spec.segment_bytes
            ));
        }
        let upper = slice_bytes.saturating_sub(geometry.roots_at() + 2 * BLOCK) / geometry.strip_slot_bytes();
        // Table pages take a small share. So start from the bound without them, and reduce rows until all
        // fits.
        geometry = geometry.with_rows(&spec.layout, upper);
        while geometry.rows > 0 && geometry.end() > slice_bytes {
            let excess = (geometry.end() - slice_bytes).div_ceil(geometry.strip_slot_bytes());
            geometry = geometry.with_rows(&spec.layout, geometry.rows - excess.min(geometry.rows));
        }
        if geometry.stripes == 0 {
            return invalid(format!("slices of {slice_bytes} bytes are too small"));
        }
        Ok(geometry)
    }

    fn with_rows(self, layout: &Layout, rows: u64) -> Self {
        Self { rows, stripes: layout.stripes(rows), ..self }
    }

    /// The geometry that a descriptor states.
    pub fn of(descriptor: &Descriptor) -> Result<Self, ArrayError> {
        let spec = CreateSpec {
            pool: descriptor.pool,
            stack: descriptor.stack,
            name: descriptor.name.clone(),
            role: descriptor.role,
            k: descriptor.k.into(),
            m: descriptor.m.into(),
            layout: descriptor.layout.clone(),
            first_carrier: 0,
            strip_blocks: descriptor.strip_blocks,
            log_bytes: descriptor.log_bytes,
            segment_bytes: descriptor.segment_bytes,
        };
        let slice_bytes = descriptor.members.iter().map(|member| member.len).min().unwrap_or(0);
        let most = Self::fit(&spec, slice_bytes)?;
        // The number of rows is checked first: that of stripes may be too large for a number.
        let rows = Some(descriptor.rows).filter(|rows| (1..=most.rows).contains(rows));
        match rows.map(|rows| most.with_rows(&spec.layout, rows)) {
            Some(fits) if fits.stripes > 0 => Ok(fits),
            _ => Err(ArrayError::Invalid(format!("array {}: descriptor and slices do not agree", spec.name))),
        }
    }

    /// The fewest segments with which a log full of data can still be destaged. To destage one segment of
    /// single blocks, the log takes each block again with its parity and trailers. A quarter of the log is
    /// kept free for that.
    pub fn fewest_segments(spec: &CreateSpec) -> u64 {
        let patched = 1 + spec.m as u64;
        let trailer_blocks = (patched * u64::from(spec.strip_blocks) * 4).div_ceil(BLOCK);
        4 * (patched + trailer_blocks + 1)
    }

    /// Strips in a stripe.
    pub fn strips(&self) -> usize {
        self.k + self.m
    }

    /// The number of copies of the log and of checkpoints.
    pub fn carriers(&self) -> usize {
        1 + self.m
    }

    /// Data blocks in a stripe.
    pub fn stripe_blocks(&self) -> u32 {
        to_u32(self.k) * self.strip_blocks
    }

    /// Data bytes in a strip.
    pub fn strip_bytes(&self) -> usize {
        self.strip_blocks as usize * BLOCK_BYTES
    }

    /// Bytes of a strip with its trailer.
    pub fn strip_slot_bytes(&self) -> u64 {
        (u64::from(self.strip_blocks) + 1) * BLOCK
    }

    /// Most payload blocks in a log record: two records always fit in a segment, and none is longer than 1
    /// MiB.
    pub fn max_payload_blocks(&self) -> usize {
        ((self.segment_bytes as usize / BLOCK_BYTES).saturating_sub(4) / 2).min(256)
    }

    /// Most payload blocks in a destage record, unless one column alone has more. It is small, so that little
    /// of a segment is wasted when a record does not fit.
    pub fn destage_payload_blocks(&self) -> usize {
        (self.max_payload_blocks() / 2).max(self.strips())
    }

    /// Most blocks of a destage entry, with the record's head.
    pub fn longest_entry_blocks(&self) -> usize {
        let trailers = self.strips() * (4 * self.strip_blocks as usize + 40);
        self.destage_payload_blocks() + (trailers + 12 * self.max_payload_blocks()).div_ceil(BLOCK_BYTES) + 1
    }

    /// Start of segment `number` of the log.
    pub fn segment_at(&self, number: SegmentNo) -> u64 {
        self.log_at() + (number.0 % self.segments) * u64::from(self.segment_bytes)
    }

    /// Blocks of a log segment, its header included.
    pub fn segment_blocks(&self) -> u32 {
        self.segment_bytes / to_u32(BLOCK_BYTES)
    }

    /// The first label lies before the log.
    fn log_at(&self) -> u64 {
        COPY_BYTES as u64
    }

    /// The range of the log.
    pub fn log(&self) -> Range<u64> {
        let start = self.log_at();
        start..start + self.segments * u64::from(self.segment_bytes)
    }

    fn roots_at(&self) -> u64 {
        self.log().end
    }

    /// Offset of the root of checkpoint `seq`.
    pub fn root_at(&self, seq: u64) -> u64 {
        self.roots_at() + (seq % 2) * BLOCK
    }

    /// Stripes in one table page.
    pub fn stripes_per_page(&self) -> u64 {
        entries_per_page(self.strips()) as u64
    }

    /// Pages of the stripe table.
    pub fn table_pages(&self) -> u64 {
        self.stripes.div_ceil(self.stripes_per_page())
    }

    /// Pages of the stripe table and of its index.
    pub fn pages(&self) -> u64 {
        pages_with_index(self.table_pages())
    }

    /// The numbers of these pages.
    pub fn page_tree(&self) -> PageTree {
        PageTree::new(self.table_pages())
    }

    /// Offset of place 0 or 1 of a page of the table or its index. All pages with the same place number are
    /// contiguous.
    pub fn page_at(&self, page: u64, place: u64) -> u64 {
        assert!(page < self.pages() && place < 2, "page {page} place {place}");
        self.roots_at() + 2 * BLOCK + (place * self.pages() + page) * BLOCK
    }

    /// The page of the table or its index, and the place number, of the block at offset `at`; none if no page
    /// lies there.
    pub fn page_of(&self, at: u64) -> Option<(u64, u64)> {
        let (block, pages) = (at.checked_sub(self.page_at(0, 0))? / BLOCK, self.pages());
        (block < 2 * pages).then(|| (block % pages, block / pages))
    }

    fn strips_at(&self) -> u64 {
        self.roots_at() + 2 * BLOCK + 2 * self.pages() * BLOCK
    }

    /// The range of the roots.
    pub fn roots(&self) -> Range<u64> {
        self.roots_at()..self.roots_at() + 2 * BLOCK
    }

    /// The range of log, roots and table pages: what carriers have.
    pub fn metadata(&self) -> Range<u64> {
        self.log_at()..self.strips_at()
    }

    /// The ranges of labels and metadata in a slice of `slice_bytes`, which are allocated in full at
    /// creation: a full host can never stop the log, a checkpoint or a change of members.
    pub fn reserved(&self, slice_bytes: u64) -> [Range<u64>; 2] {
        let [first, last] = copies::places(slice_bytes);
        assert!(self.end() <= last, "the strips end before the label at {last}");
        [first..self.strips_at(), last..last + COPY_BYTES as u64]
    }

    /// Offset of the strip in `row`.
    pub fn strip_at(&self, row: u64) -> u64 {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        self.strips_at() + row * self.strip_slot_bytes()
    }

    /// Offset of block `column` of the strip in `row`.
    pub fn block_at(&self, row: u64, column: u32) -> u64 {
        assert!(column < self.strip_blocks, "column {column} of {}", self.strip_blocks);
        self.strip_at(row) + u64::from(column) * BLOCK
    }

    /// Offset of the trailer of the strip in `row`.
    pub fn trailer_at(&self, row: u64) -> u64 {
        self.strip_at(row) + u64::from(self.strip_blocks) * BLOCK
    }

    /// First byte behind the last strip.
    pub fn end(&self) -> u64 {
        self.strips_at() + self.rows * self.strip_slot_bytes()
    }

    /// Position and column of a data block of a stripe.
    pub fn locate(&self, block: u32) -> (Position, u32) {
        assert!(block < self.stripe_blocks(), "block {block} of {}", self.stripe_blocks());
        (Position::new((block / self.strip_blocks) as usize), block % self.strip_blocks)
    }

    /// The data block of a stripe at a position and column: the inverse of [`Self::locate`].
    pub fn block_of(&self, position: Position, column: u32) -> u32 {
        assert!(position.index() < self.k && column < self.strip_blocks, "no data at {position}, {column}");
        to_u32(position.index()) * self.strip_blocks + column
    }

    /// Positions of all strips.
    pub fn all_strips(&self) -> Positions {
        Positions::first(self.strips())
    }

    /// Positions of the data strips, ascending.
    pub fn data_strips(&self) -> impl Iterator<Item = Position> + use<> {
        (0..self.k).map(Position::new)
    }

    /// Positions of the parity strips, ascending.
    pub fn parity_strips(&self) -> impl Iterator<Item = Position> + use<> {
        (self.k..self.strips()).map(Position::new)
    }
}

const _: () = assert!(
    48 + 4 * 116 <= SECTOR_BYTES,
    "the contents of a trailer for strips of up to 116 blocks (464 KiB) lie in one sector"
);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_fits_and_nothing_overlaps() {
        for (k, m, mib) in [(4, 2, 3500), (1, 2, 500), (10, 4, 2000), (8, 0, 300), (60, 4, 300)] {
            let spec = CreateSpec::new("t", k, m).unwrap();
            let geometry = Geometry::fit(&spec, mib << 20).unwrap();
            let [first, last] = geometry.reserved(mib << 20);
            assert_eq!((first.start, last.end), (0, mib << 20), "{k}+{m}");
            assert_eq!((geometry.log().start, geometry.log().end), (64 << 10, geometry.roots().start));
            assert!(geometry.end() <= last.start, "{k}+{m}");
            assert!(geometry.end() + 2 * geometry.strip_slot_bytes() > mib << 20, "{k}+{m} wastes space");
            assert!(geometry.page_at(geometry.pages() - 1, 1) + BLOCK == geometry.strip_at(0));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        assert!(Geometry::fit(&CreateSpec::new("t", 4, 2).unwrap(), 64 << 20).is_err());
        assert!(Geometry::fit(&CreateSpec::new("t", 0, 2).unwrap(), 1 << 30).is_err());
        assert!(CreateSpec::new("t", 63, 2).is_err());
        let narrow =
            CreateSpec { layout: Layout::one_group(5).unwrap(), ..CreateSpec::new("t", 4, 2).unwrap() };
        assert!(Geometry::fit(&narrow, 1 << 30).is_err());
    }
}
