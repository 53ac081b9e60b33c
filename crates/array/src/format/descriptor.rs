//! The array's descriptor, which the label of each of its slices carries. Byte map: docs/format/label.md.
//!
//! Fields that this release writes with one value only are refused by name if they have another.

use super::{are_near, without_far};
use crate::layout::Layout;
use crate::place::{MemberNo, MemberSet};
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{
    ArrayId, BLOCK_BYTES, Dec, DecodeError, DriveId, Enc, Epoch, MOST_STACKS, PoolId, StackNo,
};
use penstock_drive::copies::COPY_BYTES;
use penstock_layout::{MOST_MEMBERS, Shape};
use std::collections::BTreeSet;

const FORMAT: u16 = 6;
/// An array is one range of stripes, with an extent on each member.
const RANGES: u16 = 1;
/// The rules by which a layout's numbers are read.
const LAYOUT_VERSION: u16 = 1;
const FIXED: u8 = 0;
const DECLUSTERED: u8 = 1;

/// Longest name of an array in bytes. With it, a descriptor of any code fits in a label.
pub(crate) const MOST_NAME_BYTES: usize = 255;

/// The generation of a member's slice when the array is created. A replacement raises it.
pub(crate) const FIRST_GENERATION: u64 = 1;

/// The use of an array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// It holds the chunks of files.
    #[default]
    Data,
    /// It holds the key-value store of its stack.
    Metadata,
}

impl Role {
    fn encode(self) -> u8 {
        match self {
            Self::Data => 1,
            Self::Metadata => 2,
        }
    }

    fn decode(dec: &Dec<'_>, byte: u8) -> Result<Self, DecodeError> {
        match byte {
            1 => Ok(Self::Data),
            2 => Ok(Self::Metadata),
            other => Err(dec.unknown("role", other.into())),
        }
    }
}

/// One member of an array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberEntry {
    /// The drive that holds the slice.
    pub drive: DriveId,
    /// First byte of the slice on the drive.
    pub offset: u64,
    /// Length of the slice in bytes.
    pub len: u64,
    /// Raised whenever the slice starts blank, as after a replacement.
    pub generation: u64,
    /// Recorded as missing writes: it is not trusted as a carrier, and its stale strips do not count.
    pub stale: bool,
    /// The member's own label is of this epoch or a later one; an earlier one shows older contents.
    pub epoch: Epoch,
}

/// The description of an array and its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The array.
    pub array: ArrayId,
    /// The pool that it belongs to.
    pub pool: PoolId,
    /// The stack that it belongs to.
    pub stack: StackNo,
    /// Name for people, as in the spec by which it was made.
    pub name: String,
    /// The use of it.
    pub role: Role,
    /// Data strips in a stripe.
    pub k: u16,
    /// Redundancy strips in a stripe.
    pub m: u16,
    /// The place of every strip.
    pub layout: Layout,
    /// Data blocks in a strip.
    pub strip_blocks: u32,
    /// Bytes of each slice that are reserved for the log.
    pub log_bytes: u64,
    /// Bytes of a log segment.
    pub segment_bytes: u32,
    /// Strips on each member.
    pub rows: u64,
    /// Revision of ownership: raised by every opening.
    pub epoch: Epoch,
    /// Raised with every change of this descriptor.
    pub revision: u64,
    /// The roots of an owner of this epoch or a later one are durable on every carrier. An older root is not
    /// the last.
    pub root_epoch: Epoch,
    /// Raised with every change of the carriers.
    pub carriers_epoch: u64,
    /// The members that carry the log, the checkpoints and the roots; no two alike.
    pub carriers: Vec<u16>,
    /// The members by number.
    pub members: Vec<MemberEntry>,
}

impl Descriptor {
    /// Members that are stale.
    pub(crate) fn stale(&self) -> MemberSet {
        let stale = self.members.iter().enumerate().filter(|(_, member)| member.stale);
        stale.map(|(at, _)| MemberNo::new(at)).collect()
    }

    /// Members that carry the log, in their order.
    pub(crate) fn carriers(&self) -> impl Iterator<Item = MemberNo> {
        self.carriers.iter().copied().map(MemberNo::from)
    }

    /// Picks the newest descriptor of an array among those of its drives. One with numbers far ahead of those
    /// of another drive counts only if there is no other. None if there is none at all.
    pub fn newest(found: Vec<Self>) -> Option<Self> {
        let found = without_far(found.into_iter().enumerate().collect(), Self::is_near);
        found.into_iter().rev().map(|(_, descriptor)| descriptor).max_by_key(|descriptor| descriptor.revision)
    }

    /// True if none of its numbers is far ahead of that of `other`.
    fn is_near(&self, other: &Self) -> bool {
        let members = self.members.iter().zip(&other.members);
        let of_members =
            members.flat_map(|(mine, its)| [(mine.generation, its.generation), (mine.epoch.0, its.epoch.0)]);
        let numbers = [
            (self.epoch.0, other.epoch.0),
            (self.root_epoch.0, other.root_epoch.0),
            (self.revision, other.revision),
            (self.carriers_epoch, other.carriers_epoch),
        ];
        are_near(numbers.into_iter().chain(of_members))
    }

    /// Encodes the descriptor.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        let (groups, spares) = match &self.layout {
            Layout::Fixed(fixed) => (fixed.members() / fixed.strips(), 0),
            Layout::Declustered(spread) => (1, spread.shape().spares),
        };
        // Integrity: 1 is a trailer in each strip.
        enc.u16(FORMAT).u8(self.role.encode()).u8(1).u16(to_u16(groups));
        enc.u16(self.k).u16(self.m).u16(to_u16(spares));
        enc.u32(self.strip_blocks);
        enc.id(self.array.0).id(self.pool.0).u16(self.stack.0).u16(0).u32(0);
        enc.u64(self.log_bytes).u32(self.segment_bytes).u32(0);
        enc.u64(self.epoch.0).u64(self.root_epoch.0).u64(self.revision).u64(self.carriers_epoch);
        enc.bytes(self.name.as_bytes());
        enc.u16(to_u16(self.carriers.len()));
        self.carriers.iter().for_each(|carrier| {
            enc.u16(*carrier);
        });
        // The table pages of the range are in the first extents of the carriers: 0.
        let (kind, domains, bases) = match &self.layout {
            Layout::Fixed(_) => (FIXED, 0, Vec::new()),
            Layout::Declustered(spread) => (DECLUSTERED, spread.shape().domains, spread.bases()),
        };
        enc.u16(RANGES).u8(kind).u8(0).u16(LAYOUT_VERSION).u16(to_u16(domains)).u16(to_u16(bases.len()));
        enc.raw(&[0; 6]).u64(self.rows);
        enc.u16(to_u16(self.members.len()));
        bases.iter().for_each(|base| {
            enc.raw(base);
        });
        for (at, member) in self.members.iter().enumerate() {
            // The life, which members on other nodes will need.
            enc.id(member.drive.0).u64(member.generation).u64(0).u64(member.epoch.0);
            let domain = self.layout.domain(MemberNo::new(at));
            enc.u8(u8::from(member.stale)).raw(&[0; 3]).u32(to_u32(domain));
        }
        // One extent of each member, in the only range.
        enc.u16(to_u16(self.members.len()));
        for (number, member) in (0..).zip(&self.members) {
            enc.u16(number).u16(0).u32(0).u64(member.offset).u64(member.len);
        }
        enc.finish()
    }

    /// Decodes a descriptor; an error if a field is unknown or the fields contradict each other.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("array descriptor", bytes);
        let format = dec.u16()?;
        dec.check_format(format, FORMAT)?;
        let role = dec.u8()?;
        let role = Role::decode(&dec, role)?;
        let (integrity, groups) = (dec.u8()?, dec.u16()?);
        let (k, m, spares, strip_blocks) = (dec.u16()?, dec.u16()?, dec.u16()?, dec.u32()?);
        let (array, pool, stack) = (ArrayId(dec.id()?), PoolId(dec.id()?), StackNo(dec.u16()?));
        dec.zeros("padding of the stack", 6)?;
        let (log_bytes, segment_bytes) = (dec.u64()?, dec.u32()?);
        dec.zeros("padding of segments", 4)?;
        let (epoch, root_epoch) = (Epoch(dec.counter_with_room()?), Epoch(dec.counter_with_room()?));
        let (revision, carriers_epoch) = (dec.counter_with_room()?, dec.counter_with_room()?);
        let name = dec.text()?;
        if name.len() > MOST_NAME_BYTES {
            return Err(dec.bad("a name that is too long"));
        }
        let carrier_count = dec.u16()?;
        let carriers = (0..carrier_count).map(|_| dec.u16()).collect::<Result<Vec<_>, _>>()?;
        let ranges = dec.u16()?;
        dec.check_known("integrity", integrity, 1)?;
        if stack.0 >= MOST_STACKS {
            return Err(dec.unknown("stack", stack.0.into()));
        }
        dec.check_known("ranges of stripes", ranges, RANGES)?;
        let (kind, table, version) = (dec.u8()?, dec.u8()?, dec.u16()?);
        dec.check_known("place of table pages", table, 0)?;
        dec.check_known("layout version", version, LAYOUT_VERSION)?;
        let (domains, base_count) = (dec.u16()?, dec.u16()?);
        dec.zeros("padding of a layout", 6)?;
        let (rows, member_count) = (dec.u64()?, dec.u16()?);
        let count = usize::from(member_count);
        if !(1..=MOST_MEMBERS).contains(&count) {
            return Err(dec.unknown("members", member_count.into()));
        }
        let bases = (0..base_count).map(|_| Ok(dec.raw(count)?.to_vec())).collect::<Result<Vec<_>, _>>()?;
        let (strips, groups) = (usize::from(k) + usize::from(m), usize::from(groups));
        let layout = match kind {
            FIXED => Layout::groups(groups, strips).ok().filter(|_| {
                (spares, domains, base_count) == (0, 0, 0) && count == groups.saturating_mul(strips)
            }),
            DECLUSTERED => {
                let (redundancy, spares) = (usize::from(m), usize::from(spares));
                let shape = Shape { members: count, strips, redundancy, spares, domains: domains.into() };
                Layout::declustered(shape, &bases).ok().filter(|_| groups == 1)
            }
            other => return Err(dec.unknown("layout", other.into())),
        };
        let Some(layout) = layout else { return Err(dec.bad("a layout that does not fit code and members")) };
        let mut members = Vec::new();
        for number in 0..count {
            members.push(Self::decode_member(&mut dec, layout.domain(MemberNo::new(number)))?);
        }
        let extents = dec.u16()?;
        dec.check_known("extents of members", extents, member_count)?;
        for (number, member) in (0..).zip(&mut members) {
            (member.offset, member.len) = Self::decode_extent(&mut dec, number)?;
        }
        dec.end()?;
        let distinct = carriers.iter().collect::<BTreeSet<_>>().len() == carriers.len();
        if !distinct || carriers.iter().any(|carrier| usize::from(*carrier) >= members.len()) {
            return Err(dec.bad("members and carriers do not agree"));
        }
        Ok(Self {
            array,
            pool,
            stack,
            name,
            role,
            k,
            m,
            layout,
            strip_blocks,
            log_bytes,
            segment_bytes,
            rows,
            epoch,
            root_epoch,
            revision,
            carriers_epoch,
            carriers,
            members,
        })
    }

    fn decode_member(dec: &mut Dec<'_>, domain: usize) -> Result<MemberEntry, DecodeError> {
        let (drive, generation) = (DriveId(dec.id()?), dec.counter_with_room()?);
        let life = dec.u64()?;
        dec.check_known("life of a member", life, 0)?;
        let epoch = Epoch(dec.counter_with_room()?);
        let stale = dec.boolean("state of a member")?;
        dec.zeros("padding of a member", 3)?;
        let found = dec.u32()?;
        dec.check_known("failure domain", found, to_u32(domain))?;
        Ok(MemberEntry { drive, offset: 0, len: 0, generation, stale, epoch })
    }

    /// Decodes the extent of the member with this number: offset and length.
    fn decode_extent(dec: &mut Dec<'_>, number: u16) -> Result<(u64, u64), DecodeError> {
        let (member, range) = (dec.u16()?, dec.u16()?);
        dec.check_known("member of an extent", member, number)?;
        dec.check_known("range of an extent", range, 0)?;
        dec.zeros("padding of an extent", 4)?;
        let (offset, len) = (dec.u64()?, dec.u64()?);
        let is_whole = offset.is_multiple_of(BLOCK_BYTES as u64) && len >= 2 * COPY_BYTES as u64;
        match offset.checked_add(len) {
            Some(_) if is_whole => Ok((offset, len)),
            Some(_) => Err(dec.bad("a slice that is not of blocks or has no room for its label")),
            None => Err(dec.bad("a slice that wraps around")),
        }
    }
}
