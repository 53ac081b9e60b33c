//! The root of a checkpoint: the start of log replay, and the stripe table. Byte map: docs/format/log.md.

use super::descriptor::MemberEntry;
use super::index_page::PageRef;
use super::{are_near, check_block, seal_block};
use crate::place::{MemberNo, MemberSet};
use penstock_base::num::to_u16;
use penstock_base::{ArrayId, Buf, Dec, DecodeError, Enc, Epoch, LogSeq, Stripe, Version};
use std::collections::BTreeMap;

const MAGIC: &[u8; 4] = b"PROT";
const FORMAT: u32 = 8;
/// Stripes that a root lists: as many as have room beside 256 members.
pub(crate) const LISTED: usize = 40;

/// A checkpoint's root. Each carrier has two places for it; checkpoint `seq` goes to place `seq % 2`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Root {
    /// The array.
    pub array: ArrayId,
    /// Number of the checkpoint.
    pub seq: u64,
    /// Raised at every opening, before the first append.
    pub incarnation: u64,
    /// Records from this sequence on count only if they carry `incarnation`.
    pub incarnation_start: LogSeq,
    /// The segment where replay starts.
    pub replay_segment: u64,
    /// Sequence of the first record in that segment.
    pub replay_seq: LogSeq,
    /// Chain value before that record.
    pub replay_chain: u32,
    /// Records up to this sequence were durable when the root was written.
    pub durable: LogSeq,
    /// The table has every change of records up to this sequence.
    pub applied: LogSeq,
    /// Versions up to this one may have been given.
    pub versions_reserved: Version,
    /// Data entries may have orders up to this one.
    pub order: u64,
    /// The topmost page of the stripe table's index, which proves all others.
    pub table: PageRef,
    /// The owner's epoch. Labels of valid members are of this epoch or a later one, except those in
    /// `behind`.
    pub epoch: Epoch,
    /// Valid members whose labels did not take the owner's epoch.
    pub behind: MemberSet,
    /// By member, the checkpoint from which on every page of the table has its last reset. Pages of earlier
    /// ones lack it: every strip on the member is stale.
    pub resets: BTreeMap<MemberNo, u64>,
    /// Every member on which a strip is stale by the table. There may be none on some of them.
    pub stale_on: MemberSet,
    /// The first stripes of which something could not be read when last tried, ascending. At most 40: all
    /// others are found by a scrub.
    pub unreadable: Vec<Stripe>,
}

impl Root {
    /// The least epoch that the member's own label must have. The root's epoch counts for a member that
    /// was valid when the root was written; a member that is stale in coordination alone was valid then.
    pub(crate) fn least_epoch(&self, member: MemberNo, entry: &MemberEntry, is_stale: bool) -> Epoch {
        let is_behind = self.behind.contains(member);
        match is_behind || is_stale && entry.stale {
            true => entry.epoch,
            false => entry.epoch.max(self.epoch),
        }
    }

    /// Encodes the root as one block.
    pub fn encode(&self) -> Buf {
        let mut enc = Enc::new();
        enc.raw(MAGIC).u32(0).u32(FORMAT).u32(self.replay_chain).id(self.array.0).u64(self.seq);
        enc.u64(self.incarnation)
            .u64(self.incarnation_start.0)
            .u64(self.replay_segment)
            .u64(self.replay_seq.0);
        enc.u64(self.durable.0).u64(self.applied.0).u64(self.versions_reserved.0).u64(self.order);
        self.table.encode(&mut enc);
        enc.u64(self.epoch.0);
        encode_members(&mut enc, self.behind);
        enc.u16(to_u16(self.resets.len()));
        self.resets.iter().for_each(|(member, checkpoint)| {
            enc.u16(member.number()).u64(*checkpoint);
        });
        encode_members(&mut enc, self.stale_on);
        assert!(self.unreadable.len() <= LISTED, "the list has room");
        enc.u16(to_u16(self.unreadable.len()));
        self.unreadable.iter().for_each(|stripe| {
            enc.u64(stripe.0);
        });
        seal_block(&mut enc)
    }

    /// True if there is a log, which starts no later than behind what was durable, as the incarnation did,
    /// and the table has neither changes that may be lost nor resets that it cannot have, nor stale strips on
    /// members of which nothing is said.
    pub(crate) fn is_sound(&self) -> bool {
        let behind = self.durable.next();
        let begins = self.replay_segment > 0 && self.replay_seq.0 > 0 && self.replay_seq <= behind;
        let has_no_more = self.applied <= self.durable && self.resets.values().all(|at| *at <= self.seq);
        let says_where = self.table.most_stale == 0 || !self.stale_on.is_empty();
        begins && self.incarnation_start <= behind && has_no_more && says_where
    }

    /// True if none of its numbers is far ahead of that of `other`.
    pub(crate) fn is_near(&self, other: &Self) -> bool {
        let numbers = |root: &Self| {
            [
                root.seq,
                root.incarnation,
                root.incarnation_start.0,
                root.replay_segment,
                root.replay_seq.0,
                root.durable.0,
                root.applied.0,
                root.versions_reserved.0,
                root.order,
                root.epoch.0,
            ]
        };
        are_near(numbers(self).into_iter().zip(numbers(other)))
    }

    /// Decodes a root block.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        check_block("checkpoint root", MAGIC, bytes)?;
        let mut dec = Dec::new("checkpoint root", &bytes[8..]);
        let format = dec.u32()?;
        dec.check_format(format, FORMAT)?;
        let replay_chain = dec.u32()?;
        let root = Self {
            array: ArrayId(dec.id()?),
            seq: dec.counter_with_room()?,
            incarnation: dec.counter_with_room()?,
            incarnation_start: LogSeq(dec.counter_with_room()?),
            replay_segment: dec.counter_with_room()?,
            replay_seq: LogSeq(dec.counter_with_room()?),
            replay_chain,
            durable: LogSeq(dec.counter_with_room()?),
            applied: LogSeq(dec.counter_with_room()?),
            versions_reserved: Version(dec.counter_with_room()?),
            order: dec.counter_with_room()?,
            table: PageRef::decode(&mut dec)?,
            epoch: Epoch(dec.counter_with_room()?),
            behind: decode_members(&mut dec)?,
            resets: decode_resets(&mut dec)?,
            stale_on: decode_members(&mut dec)?,
            unreadable: decode_stripes(&mut dec)?,
        };
        dec.zeros("the rest of the block", dec.left())?;
        Ok(root)
    }
}

/// Decodes the checkpoints of the last resets, by member in ascending order.
fn decode_resets(dec: &mut Dec<'_>) -> Result<BTreeMap<MemberNo, u64>, DecodeError> {
    let (count, mut resets) = (dec.u16()?, BTreeMap::new());
    for _ in 0..count {
        let (member, checkpoint) = (decode_member(dec)?, dec.counter_with_room()?);
        if resets.last_key_value().is_some_and(|(last, _)| *last >= member) {
            return Err(dec.bad("members out of order"));
        }
        resets.insert(member, checkpoint);
    }
    Ok(resets)
}

/// Decodes a list of stripes in ascending order.
fn decode_stripes(dec: &mut Dec<'_>) -> Result<Vec<Stripe>, DecodeError> {
    let count = usize::from(dec.u16()?);
    if count > LISTED {
        return Err(dec.bad("too many stripes"));
    }
    let mut stripes = Vec::with_capacity(count);
    for _ in 0..count {
        let stripe = Stripe(dec.counter_with_room()?);
        if stripes.last().is_some_and(|last| *last >= stripe) {
            return Err(dec.bad("stripes out of order"));
        }
        stripes.push(stripe);
    }
    Ok(stripes)
}

/// Encodes a list of members.
fn encode_members(enc: &mut Enc, members: MemberSet) {
    enc.u16(to_u16(members.len()));
    members.iter().for_each(|member| {
        enc.u16(member.number());
    });
}

fn decode_member(dec: &mut Dec<'_>) -> Result<MemberNo, DecodeError> {
    let number = dec.u16()?;
    MemberNo::of_number(number).ok_or(dec.unknown("member", number.into()))
}

/// Decodes a list of members in ascending order.
fn decode_members(dec: &mut Dec<'_>) -> Result<MemberSet, DecodeError> {
    let (count, mut members) = (dec.u16()?, MemberSet::NONE);
    for _ in 0..count {
        let member = decode_member(dec)?;
        if members.iter().last().is_some_and(|last| last >= member) {
            return Err(dec.bad("members out of order"));
        }
        members.insert(member);
    }
    Ok(members)
}
