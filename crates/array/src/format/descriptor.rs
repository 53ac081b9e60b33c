//! The array's descriptor, which every superblock of its drives carries. Byte map: docs/format/superblock.md.

use super::{are_near, without_far};
use crate::place::{Position, Positions};
use penstock_base::num::to_u16;
use penstock_base::{ArrayId, Dec, DecodeError, DriveId, Enc, Epoch};
use penstock_raid::MAX_STRIPS;
use std::collections::BTreeSet;

const FORMAT: u16 = 2;

/// The generation of a member's slice when the array is created. A replacement raises it.
pub(crate) const FIRST_GENERATION: u64 = 1;

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
    /// The member's own superblock is of this epoch or a later one; an earlier one shows older contents.
    pub epoch: Epoch,
}

/// The description of an array and its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// The array.
    pub array: ArrayId,
    /// Name for people; `data` and `meta` today.
    pub name: String,
    /// Data strips in a stripe.
    pub k: u16,
    /// Redundancy strips in a stripe.
    pub m: u16,
    /// Data blocks in a strip.
    pub strip_blocks: u32,
    /// Bytes of each slice that are reserved for the log.
    pub log_bytes: u64,
    /// Bytes of a log segment.
    pub segment_bytes: u32,
    /// Stripes in the array.
    pub stripes: u64,
    /// Revision of ownership: raised by every opening.
    pub epoch: Epoch,
    /// Raised with every change of this descriptor.
    pub revision: u64,
    /// The roots of an owner of this epoch or a later one are durable on every carrier. An older root is not
    /// the last.
    pub root_epoch: Epoch,
    /// Raised with every change of the carriers.
    pub carriers_epoch: u64,
    /// Positions of the members that carry the log, the checkpoints and the roots; no two alike.
    pub carriers: Vec<u16>,
    /// The members by position.
    pub members: Vec<MemberEntry>,
}

impl Descriptor {
    /// Members that are stale.
    pub(crate) fn stale(&self) -> Positions {
        let stale = self.members.iter().enumerate().filter(|(_, member)| member.stale);
        stale.map(|(at, _)| Position::new(at)).collect()
    }

    /// Members that carry the log, in their order.
    pub(crate) fn carriers(&self) -> impl Iterator<Item = Position> {
        self.carriers.iter().copied().map(Position::from)
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
        // Layout: 0 is fixed. Integrity: 1 is a trailer in each strip. One group.
        enc.u16(FORMAT).u8(0).u8(1).u16(1).u16(self.k).u16(self.m).u16(0).u32(self.strip_blocks);
        enc.id(self.array.0).u64(self.log_bytes).u32(self.segment_bytes).u32(0).u64(self.stripes);
        enc.u64(self.epoch.0).u64(self.root_epoch.0).u64(self.revision).u64(self.carriers_epoch);
        enc.bytes(self.name.as_bytes());
        enc.u16(to_u16(self.carriers.len()));
        self.carriers.iter().for_each(|carrier| {
            enc.u16(*carrier);
        });
        enc.u16(to_u16(self.members.len()));
        for member in &self.members {
            enc.id(member.drive.0).u64(member.offset).u64(member.len).u64(member.generation);
            enc.u8(u8::from(member.stale)).u64(member.epoch.0);
        }
        enc.finish()
    }

    /// Decodes a descriptor; an error if a field is unknown or the fields contradict each other.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("array descriptor", bytes);
        let format = dec.u16()?;
        dec.check_format(format, FORMAT)?;
        let (layout, integrity, groups) = (dec.u8()?, dec.u8()?, dec.u16()?);
        for (field, found, known) in
            [("layout", layout.into(), 0), ("integrity", integrity.into(), 1), ("groups", groups, 1)]
        {
            if found != known {
                return Err(dec.unknown(field, u64::from(found)));
            }
        }
        let (k, m, _, strip_blocks) = (dec.u16()?, dec.u16()?, dec.u16()?, dec.u32()?);
        let (array, log_bytes, segment_bytes, _) = (ArrayId(dec.id()?), dec.u64()?, dec.u32()?, dec.u32()?);
        let (stripes, epoch, root_epoch) =
            (dec.u64()?, Epoch(dec.counter_with_room()?), Epoch(dec.counter_with_room()?));
        let (revision, carriers_epoch) = (dec.counter_with_room()?, dec.counter_with_room()?);
        let name = dec.text()?;
        let carrier_count = dec.u16()?;
        let carriers = (0..carrier_count).map(|_| dec.u16()).collect::<Result<Vec<_>, _>>()?;
        let member_count = dec.u16()?;
        let mut members = Vec::new();
        for _ in 0..member_count {
            members.push(Self::decode_member(&mut dec)?);
        }
        let distinct = carriers.iter().collect::<BTreeSet<_>>().len() == carriers.len();
        let sound = members.len() == usize::from(k) + usize::from(m)
            && members.len() <= MAX_STRIPS
            && distinct
            && carriers.iter().all(|carrier| usize::from(*carrier) < members.len());
        if !sound {
            return Err(dec.bad("members, carriers and code do not agree"));
        }
        Ok(Self {
            array,
            name,
            k,
            m,
            strip_blocks,
            log_bytes,
            segment_bytes,
            stripes,
            epoch,
            root_epoch,
            revision,
            carriers_epoch,
            carriers,
            members,
        })
    }

    fn decode_member(dec: &mut Dec<'_>) -> Result<MemberEntry, DecodeError> {
        let (drive, offset, len) = (DriveId(dec.id()?), dec.u64()?, dec.u64()?);
        let (generation, stale, epoch) =
            (dec.counter_with_room()?, dec.u8()?, Epoch(dec.counter_with_room()?));
        if offset.checked_add(len).is_none() {
            return Err(dec.bad("a slice that wraps around"));
        }
        match stale {
            0 | 1 => Ok(MemberEntry { drive, offset, len, generation, stale: stale == 1, epoch }),
            other => Err(dec.unknown("stale", other.into())),
        }
    }
}
