//! Fold and redo: the records that replay found, applied to memory in order, and the strips that they
//! describe.
//!
//! Fold writes nothing. Redo writes strips again that destage records describe: a power cut may have left
//! them half written. It never computes parity from strips that it finds.
//!
//! Invariant: no entry is left out of a page that may come back, but for discards. Where a page is lost that
//! an entry changes, the opening is refused, or all stripes of the page are given up for good.

use super::chain::Chain;
use super::replay::FoundRecord;
use super::writer::pin_applied;
use crate::context::Context;
use crate::error::ArrayError;
use crate::format::record::{Entry, StripPatch};
use crate::members::{Members, WhenSuspended};
use crate::place::{Positions, SegmentNo};
use crate::site::Site;
use crate::stripes::overlay::{DirtyBlock, Overlay};
use crate::stripes::{Pin, Stripes};
use crate::strips::{StripWrite, Strips};
use penstock_base::{Buf, HashMap, LogSeq, Stripe};
use std::collections::{BTreeMap, BTreeSet};

const REDO: StripWrite = StripWrite::new(Site::ReplayRedo, Site::ReplayRedo, WhenSuspended::Wait);

/// Strip contents that must be written again.
#[derive(Default)]
pub(crate) struct Redo {
    changes: BTreeMap<Stripe, Vec<(StripPatch, Vec<Buf>)>>,
    /// Segments of the records that describe them: pinned until the strips are flushed.
    segments: Vec<SegmentNo>,
    /// The pages of the stripes.
    pages: Vec<Pin>,
}

impl Redo {
    /// True if strips of a stripe are written again: they may be torn on the drives.
    pub(crate) fn contains(&self, stripe: Stripe) -> bool {
        self.changes.contains_key(&stripe)
    }

    /// Writes the strips and flushes them.
    pub(crate) async fn run(
        self,
        context: &Context,
        members: &Members,
        stripes: &Stripes,
        strips: &Strips,
        chain: &Chain,
    ) -> Result<(), ArrayError> {
        for (stripe, changes) in self.changes {
            let away = context.geo.all_strips().without(stripes.readable(stripe));
            let (mut missed, mut changed) = (away, Positions::NONE);
            for (patch, blocks) in changes {
                changed = changed.with(Positions::one(patch.position));
                missed = missed.with(strips.write_patches(stripe, missed, &[patch], &blocks, REDO).await?);
            }
            // Others that are away are as they were.
            let new = missed.common(changed).without(stripes.stale(stripe));
            // The record may have been carried out long ago. If nobody could make these strips again, they
            // may be whole where they are, and their versions tell if they are.
            let can_be_made = stripes.stale(stripe).with(new).len() <= context.geo.m;
            if !new.is_empty() && can_be_made {
                stripes.table_mut().set_stale(stripe, new);
                members.record_missed(stripe, new);
            }
        }
        members.flush_all(Site::ReplayRedo.io()).await?;
        let mut segments = chain.segments_mut();
        self.segments.into_iter().for_each(|segment| segments.unpin_at_checkpoint(segment));
        drop(self.pages);
        Ok(())
    }
}

/// The result of folding the log.
pub(crate) struct Folded {
    /// The strips to write again.
    pub(crate) redo: Redo,
    /// Lost pages of the stripe table whose stripes are given up.
    pub(crate) given_up: BTreeSet<u64>,
}

/// Applies records to the stripes in order; those up to `applied` changed the table before. If a loss is
/// accepted, lost pages that records change are given up, and so are these ones if they are lost.
pub(crate) async fn fold(
    stripes: &Stripes,
    chain: &Chain,
    applied: LogSeq,
    found: Vec<FoundRecord>,
    accepted: Option<&BTreeSet<u64>>,
) -> Result<Folded, ArrayError> {
    // Those of records that are not in the table yet were not many when they were written.
    let is_needed = |seq: LogSeq, entry: &Entry| seq > applied || matches!(entry, Entry::Destage { .. });
    let entries = found.iter().flat_map(|record| record.entries.iter().map(|entry| (record.seq, entry)));
    let needed = entries.clone().filter(|(seq, entry)| is_needed(*seq, entry)).map(|(_, entry)| entry);
    let mut pages = stripes.pin_entries(needed.clone()).await?;
    let given_up: BTreeSet<u64> = match accepted {
        None => {
            let new = entries.filter(|(seq, _)| *seq > applied).map(|(_, entry)| entry);
            let lost: BTreeSet<u64> = new.flat_map(|entry| stripes.lost_pages_of(entry)).collect();
            if !lost.is_empty() {
                return Err(stripes.pages_lost(&lost));
            }
            lost
        }
        Some(accepted) => {
            for page in accepted {
                // It tells if it is lost. An error that may end is one for whoever needs the page.
                drop(stripes.pin(*page..page + 1).await);
            }
            let accepted = accepted.iter().copied().filter(|page| stripes.table().is_lost(*page));
            needed.flat_map(|entry| stripes.lost_pages_of(entry)).chain(accepted).collect()
        }
    };
    for page in &given_up {
        stripes.give_up_lost(*page);
        pages.push(stripes.pin(*page..page + 1).await?);
    }
    let redo = Redo { pages, ..Redo::default() };
    let mut fold = Fold { stripes, chain, redo, void: HashMap::default() };
    for record in found {
        let mut rest = &record.payload[..];
        for entry in &record.entries {
            let (payload, others) = rest.split_at(entry.payload_crcs().len());
            rest = others;
            fold.entry(entry, payload, record.segment, record.seq > applied);
        }
        assert!(rest.is_empty(), "entries and payload of a record agree");
    }
    Ok(Folded { redo: fold.redo, given_up })
}

struct Fold<'a> {
    stripes: &'a Stripes,
    chain: &'a Chain,
    redo: Redo,
    /// By stripe, the order up to which data entries are void.
    void: HashMap<Stripe, u64>,
}

impl Fold<'_> {
    fn entry(&mut self, entry: &Entry, payload: &[Buf], segment: SegmentNo, is_new: bool) {
        match entry {
            Entry::Data { stripe, order, block, crcs } => {
                self.skip_order(*order);
                if self.void.get(stripe).is_none_or(|upto| order > upto) {
                    let blocks = (*block..).zip(crcs).zip(payload);
                    blocks
                        .for_each(|((at, crc), data)| self.data(*stripe, at, *order, (*crc, data), segment));
                }
                return;
            }
            Entry::Fresh { stripe, upto, contained, .. } => {
                self.redo.changes.remove(stripe);
                self.make_void(*stripe, *upto);
                self.contained(*stripe, contained);
            }
            Entry::Discard { stripe, count, upto } => {
                for stripe in stripe.run(*count) {
                    self.redo.changes.remove(&stripe);
                    self.make_void(stripe, *upto);
                }
            }
            // It is in the table, whose page is damaged on all carriers: it does not come back.
            Entry::Destage { stripe, contained, .. } if !self.stripes.lost_pages_of(entry).is_empty() => {
                assert!(!is_new, "an opening that may not give up a page has ended before");
                self.contained(*stripe, contained);
            }
            Entry::Destage { stripe, contained, patches, .. } => {
                let changes = self.redo.changes.entry(*stripe).or_default();
                let mut rest = payload;
                for patch in patches {
                    let (blocks, others) = rest.split_at(patch.columns.len());
                    rest = others;
                    changes.push((patch.clone(), blocks.to_vec()));
                }
                self.redo.segments.push(segment);
                self.contained(*stripe, contained);
            }
            // A rebuilt strip contains what earlier records wrote into it, under a newer version.
            Entry::Strips { stripe, clear, .. } => {
                if let Some(changes) = self.redo.changes.get_mut(stripe) {
                    changes.retain(|(patch, _)| !clear.contains(patch.position));
                }
            }
            Entry::MemberReset { member } => {
                let stripes = self.stripes;
                self.redo.changes.iter_mut().for_each(|(stripe, changes)| {
                    changes.retain(|(patch, _)| stripes.member(*stripe, patch.position) != *member);
                });
            }
            Entry::Versions { .. } => {}
        }
        if is_new {
            self.stripes.apply(entry);
        }
        pin_applied(self.chain, entry, segment);
    }

    fn data(&self, stripe: Stripe, block: u32, order: u64, (crc, data): (u32, &Buf), segment: SegmentNo) {
        let dirty = DirtyBlock { data: data.clone(), crc, order, segment: Some(segment) };
        self.chain.segments_mut().pin(segment);
        self.remove(|overlay| overlay.insert(stripe, block, dirty).into_iter().collect());
    }

    fn contained(&self, stripe: Stripe, contained: &[(u32, u64)]) {
        for (block, order) in contained {
            self.skip_order(*order);
            self.remove(|overlay| overlay.remove(stripe, *block, *order).into_iter().collect());
        }
    }

    fn skip_order(&self, order: u64) {
        self.stripes.overlay_mut().skip_order(order);
    }

    fn make_void(&mut self, stripe: Stripe, upto: u64) {
        self.skip_order(upto);
        let void = self.void.entry(stripe).or_default();
        *void = upto.max(*void);
        self.remove(|overlay| overlay.remove_upto(stripe, upto));
    }

    /// Changes the overlay by `change`, which returns the blocks that leave it.
    fn remove(&self, change: impl FnOnce(&mut Overlay) -> Vec<DirtyBlock>) {
        for removed in change(&mut self.stripes.overlay_mut()) {
            let segment = removed.segment.expect("a replayed block has a segment");
            self.chain.segments_mut().unpin(segment);
        }
    }
}
