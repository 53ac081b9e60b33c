//! The members of an array: who can be read and written, who carries the log, and the record of both.
//!
//! Invariants:
//! - a write that misses a member returns only after the member is recorded as stale under the array's epoch
//!   ([`record`]), so a take-over never trusts a member that missed an acknowledged write;
//! - when a life of a member ends, every strip that it wrote and did not flush is queued to be recorded as
//!   stale;
//! - a change of the claim is recorded by coordination first, then in labels, and only then acted on.
//!
//! Owns the slices, their labels, the descriptor, the claim, the set of carriers, and labels that are owed.
//! Stands on the queue of entries, and knows neither stripes nor the log: strips that a member lost become
//! entries.

pub(crate) mod carrier_writes;
pub(crate) mod carriers;
pub mod labels;
mod member;
pub mod ownership;
pub(crate) mod record;
mod roster;
mod write;

pub(crate) use member::{Life, Member};
pub use roster::Roster;
pub(crate) use write::{StripOf, WhenSuspended};

use crate::context::Context;
use crate::error::ArrayError;
use crate::events::ArrayEvent;
use crate::format::descriptor::Descriptor;
use crate::format::record::Entry;
use crate::place::{MemberNo, MemberSet, Positions};
use crate::queue::EntryQueue;
use crate::ranks;
use carrier_writes::CarrierWrites;
use carriers::CarrierSearch;
use futures_util::future::join_all;
use labels::{FoundLabel, Labelling, OwedLabels, read_label};
use ownership::{AcceptedLoss, Claim, Lacking, Ownership};
use penstock_base::rank::RankedMutex;
use penstock_base::{DriveId, Epoch, Stripe};
use penstock_drive::Slice;
use penstock_drive::copies::Scrubbed;
use std::cell::{Cell, OnceCell, Ref, RefCell};
use std::rc::Rc;

/// One member as it stands.
#[derive(Clone, Debug)]
pub struct MemberReport {
    /// Its drive.
    pub drive: DriveId,
    /// `active`, `rebuilding` or `missing`.
    pub state: &'static str,
    /// True if it carries the log and checkpoints.
    pub carrier: bool,
    /// Strips that are to be there, or were when its drive went away, and are not valid or cannot be read.
    pub stale_strips: u64,
    /// Strips that are to be there and are in spare places now.
    pub moved_strips: u64,
}

/// A loss of members that is to be judged.
pub(crate) struct Loss {
    /// Members whose drives take no I/O already.
    pub(crate) gone: MemberSet,
    /// Those that are to be lost, and those that a start would not know.
    pub(crate) taken: MemberSet,
    /// All that would not count then.
    pub(crate) lost: MemberSet,
    /// No stripe has more strips on the lost ones than it can do without.
    pub(crate) is_within_layout: bool,
}

/// True if a stripe would be lost.
pub(crate) type LossTest = Box<dyn Fn(&Loss) -> bool>;

/// Strips of written stripes on one member.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct StripsOn {
    /// Strips whose place is on it.
    pub(crate) strips: u64,
    /// Those among them that are stale.
    pub(crate) stale: u64,
    /// Those among these that nobody can make: more strips of their stripes are stale than the code can make.
    pub(crate) lost: u64,
    /// Strips whose own place is on it, and that have moved to a spare place.
    pub(crate) moved_away: u64,
}

/// The members of one array.
pub(crate) struct Members {
    context: Rc<Context>,
    queue: Rc<EntryQueue>,
    ownership: Rc<dyn Ownership>,
    roster: Rc<Roster>,
    members: RefCell<Vec<Member>>,
    desc: RefCell<Descriptor>,
    claim: RefCell<Claim>,
    /// The array was taken over. Before that it records nothing.
    owned: Cell<bool>,
    /// Drives with contents of the past that openings used as they were, as the claim names them.
    accepted: RefCell<AcceptedLoss>,
    /// Members whose label was written in this epoch.
    written: Cell<MemberSet>,
    /// Says if stripes would be lost without members. The owner of the stripes sets it.
    losses: OnceCell<LossTest>,
    reconfiguration: RankedMutex<()>,
    replacement: RankedMutex<()>,
    owed: OwedLabels,
    carrier_writes: CarrierWrites,
    search: CarrierSearch,
    metadata: Cell<MetadataState>,
}

/// The labels of all members.
#[derive(Default)]
pub(crate) struct FoundLabels {
    /// By member, the epoch of the owner that wrote its label; none without a label that can be read and is
    /// whole.
    pub(crate) epochs: Vec<Option<Epoch>>,
    /// Members that are here and whose label cannot be read.
    pub(crate) unread: MemberSet,
}

/// The copies of log, roots and pages on all carriers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum MetadataState {
    /// All are good.
    #[default]
    Good,
    /// One is bad, or was not verified yet.
    Bad,
    /// A carrier did not take a part of the log, or the root, at the opening. Reading it proves nothing, as
    /// it may lie in a cache alone: it must be written again.
    Refused,
}

impl Members {
    pub(crate) fn new(
        context: &Rc<Context>,
        queue: &Rc<EntryQueue>,
        desc: Descriptor,
        slices: Vec<Option<Slice>>,
        ownership: Rc<dyn Ownership>,
        roster: &Rc<Roster>,
    ) -> Rc<Self> {
        assert_eq!(slices.len(), context.layout.members(), "a slice for each member");
        let members = slices.into_iter().zip(&desc.members);
        let members = members.map(|(slice, entry)| Member::new(slice, entry.stale)).collect();
        Rc::new(Self {
            context: context.clone(),
            queue: queue.clone(),
            ownership,
            roster: roster.clone(),
            members: RefCell::new(members),
            desc: RefCell::new(desc),
            claim: RefCell::default(),
            owned: Cell::default(),
            accepted: RefCell::default(),
            written: Cell::default(),
            losses: OnceCell::new(),
            reconfiguration: RankedMutex::new(ranks::RECONFIGURATION, ()),
            replacement: RankedMutex::new(ranks::REPLACEMENT, ()),
            owed: OwedLabels::default(),
            carrier_writes: CarrierWrites::default(),
            search: CarrierSearch::default(),
            metadata: Cell::default(),
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.context.name
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.context.is_closed()
    }

    /// The descriptor as it is recorded.
    pub(crate) fn descriptor(&self) -> Ref<'_, Descriptor> {
        self.desc.borrow()
    }

    /// The claim as it is recorded.
    pub(crate) fn claim(&self) -> Claim {
        self.claim.borrow().clone()
    }

    /// The slice of a member, if its drive takes I/O.
    pub(crate) fn slice(&self, member: MemberNo) -> Option<Slice> {
        self.members.borrow()[member.index()].reachable()
    }

    /// The slice of a member with its labels, if its drive takes I/O.
    fn labelled(&self, member: MemberNo) -> Option<(Slice, Rc<Labelling>)> {
        let member = &self.members.borrow()[member.index()];
        Some((member.reachable()?, member.labelling()))
    }

    /// Reads the labels of all members that are here. A member whose label cannot be read is away, because
    /// nothing says what its slice is, unless its loss is accepted.
    pub(crate) async fn read_labels(&self, lacking: Lacking) -> Result<FoundLabels, ArrayError> {
        let read = async |member: MemberNo| match self.slice(member) {
            Some(slice) => Some(read_label(&slice, self.context.id).await),
            None => None,
        };
        let labels = join_all(self.context.layout.all_members().iter().map(read)).await;
        let mut found = FoundLabels::default();
        for (at, label) in labels.into_iter().enumerate() {
            let member = MemberNo::new(at);
            match label {
                Some(Ok(label)) => {
                    if let FoundLabel::Damaged(error) = &label {
                        tracing::error!(array = self.name(), %member, %error, "the label is damaged");
                        self.count_checksum_errors(member, 2);
                    }
                    found.epochs.push(label.epoch()?);
                    continue;
                }
                Some(Err(error)) => {
                    tracing::error!(array = self.name(), %member, %error, "the label cannot be read");
                    found.unread.insert(member);
                    if lacking == Lacking::Refuse {
                        self.members.borrow_mut()[at].remove_slice();
                    }
                    self.context.events.push(ArrayEvent::LabelUnreadable { member, why: error.to_string() });
                }
                None => {}
            }
            found.epochs.push(None);
        }
        assert_eq!(found.epochs.len(), self.context.layout.members(), "an epoch or none for each member");
        Ok(found)
    }

    /// Verifies the labels of all members that take I/O, and repairs them. One that cannot be repaired now is
    /// owed.
    pub(crate) async fn scrub_labels(&self) -> Scrubbed {
        let mut all = Scrubbed::default();
        for member in self.reachable().iter() {
            let Some((slice, labelling)) = self.labelled(member) else { continue };
            let found = labelling.scrub(&slice).await;
            self.count_checksum_errors(member, found.bad);
            self.count_repaired(member, found.repaired);
            all.bad += found.bad;
            all.repaired += found.repaired;
            if let Some(error) = found.failed {
                tracing::warn!(array = self.name(), %member, %error, "a label is not repaired yet");
                self.owe_label(member);
                all.failed = Some(error);
            }
        }
        all
    }

    /// The present life of a member.
    pub(crate) fn life(&self, member: MemberNo) -> Life {
        self.members.borrow()[member.index()].life()
    }

    /// True if the drive of a member takes I/O.
    pub(crate) fn is_reachable(&self, member: MemberNo) -> bool {
        self.members.borrow()[member.index()].is_reachable()
    }

    fn select(&self, wanted: impl Fn(&Member) -> bool) -> MemberSet {
        let members = self.members.borrow();
        let wanted = members.iter().enumerate().filter(|(_, member)| wanted(member));
        wanted.map(|(at, _)| MemberNo::new(at)).collect()
    }

    /// Members whose drives take I/O.
    pub(crate) fn reachable(&self) -> MemberSet {
        self.select(Member::is_reachable)
    }

    /// Members whose drives are away, take no I/O, or were left out at the opening.
    pub(crate) fn gone(&self) -> MemberSet {
        self.context.layout.all_members().without(self.reachable())
    }

    /// Sets the test that tells for certain if stripes would be lost.
    pub(crate) fn set_loss_test(&self, test: LossTest) {
        assert!(self.losses.set(test).is_ok(), "there is one owner of stripes");
    }

    /// Members recorded as stale.
    pub(crate) fn stale(&self) -> MemberSet {
        self.select(Member::is_stale)
    }

    /// Members that are not stale and whose drives take I/O.
    pub(crate) fn active(&self) -> MemberSet {
        self.reachable().without(self.stale())
    }

    /// The drives of members, as a list for people.
    pub(crate) fn drives(&self, members: MemberSet) -> String {
        let desc = self.desc.borrow();
        let drives = members.iter().map(|at| desc.members[at.index()].drive.to_string());
        drives.collect::<Vec<_>>().join(", ")
    }

    /// The member on a drive.
    pub(crate) fn member_on(&self, drive: DriveId) -> Option<MemberNo> {
        self.desc.borrow().members.iter().position(|member| member.drive == drive).map(MemberNo::new)
    }

    /// Offset and length of the slice that a drive gives to the array.
    pub(crate) fn slice_of(&self, drive: DriveId) -> Option<(u64, u64)> {
        let desc = self.desc.borrow();
        desc.members.iter().find(|member| member.drive == drive).map(|member| (member.offset, member.len))
    }

    /// True if the drive of a member is in its place, and not only recorded there.
    pub(crate) fn is_in_place(&self, member: MemberNo) -> bool {
        self.members.borrow()[member.index()].slice().is_some()
    }

    /// True if the array survives the loss of these drives as well: of their strips, and of their replicas of
    /// the log, which may be the last ones until carriers are replaced.
    pub(crate) fn survives(&self, drives: &[DriveId]) -> bool {
        let desc = self.desc.borrow();
        let taken = desc.members.iter().enumerate().filter(|(_, member)| drives.contains(&member.drive));
        let taken: MemberSet = taken.map(|(at, _)| MemberNo::new(at)).collect();
        let lost = self.gone().with(self.stale()).with(taken);
        if !desc.carriers().any(|carrier| !lost.contains(carrier)) {
            return false;
        }
        let (layout, m) = (&self.context.layout, self.context.geo.m);
        let is_within_layout = layout.most_lost(lost) <= m;
        // Members whose strips have moved are lost without harm, which only the stripes themselves tell. New
        // stripes need as many places as before, but for m of them.
        let has_room = layout.spares() > 0 && lost.len() <= m + layout.spares();
        if !is_within_layout && !has_room {
            return false;
        }
        let taken = taken.with(self.unlabelled());
        let loss = Loss { gone: self.gone(), taken, lost, is_within_layout };
        self.losses.get().is_some_and(|loses| !loses(&loss))
    }

    /// Members that are being rebuilt on drives that a start would not know.
    fn unlabelled(&self) -> MemberSet {
        let rebuilt = self.reachable().common(self.stale());
        rebuilt.without(self.written.get()).with(self.owed_labels().common(rebuilt))
    }

    /// True if a drive holds a member that is not lost already.
    pub(crate) fn uses(&self, drive: DriveId) -> bool {
        // One that is stale may hold strips that were written since it is back.
        self.member_on(drive).is_some_and(|at| !self.stale().contains(at) || self.is_reachable(at))
    }

    /// Counts a block that does not verify against the drive of a member.
    pub(crate) fn count_checksum_errors(&self, member: MemberNo, errors: u64) {
        if let Some(slice) = self.members.borrow()[member.index()].slice() {
            (0..errors).for_each(|_| slice.drive().count_checksum_error());
        }
    }

    /// Counts blocks that were written again on the drive of a member.
    pub(crate) fn count_repaired(&self, member: MemberNo, blocks: u64) {
        if let Some(slice) = self.members.borrow()[member.index()].slice() {
            slice.drive().count_repaired(blocks);
        }
    }

    /// Takes a member's slice away, and counts the member as stale: its drive has contents of the past.
    pub(crate) fn leave_out(&self, member: MemberNo) {
        let member = &mut self.members.borrow_mut()[member.index()];
        member.remove_slice();
        member.set_stale(true);
    }

    /// Has the tasks look at carriers and members: some were lost, added or replaced.
    pub(crate) fn changed(&self) {
        self.search.want();
        self.context.signals.carriers.notify_one();
        self.context.signals.resync.notify_one();
    }

    /// Ends the life of a member whose drive is latched. Strips that were not flushed in it are stale.
    pub(crate) fn note_latched(&self, member: MemberNo) {
        let Some(unflushed) = self.members.borrow_mut()[member.index()].latch() else { return };
        let strips = unflushed.into_iter();
        strips.for_each(|(stripe, position)| self.record_missed(stripe, Positions::one(position)));
        self.changed();
    }

    /// Queues the record that strips of a stripe are stale. Nobody waits for it: until it is durable the
    /// strip's version proves the same. It changes nothing of a stripe that is not written yet; there the
    /// fresh record, which is made from lives, does.
    pub(crate) fn record_missed(&self, stripe: Stripe, strips: Positions) {
        drop(self.queue.push_control(Entry::stale_strips(stripe, strips), Vec::new()));
    }

    /// The copies of metadata.
    pub(crate) fn metadata(&self) -> MetadataState {
        self.metadata.get()
    }

    /// True while a copy of metadata is known to be bad, or not verified yet.
    pub(crate) fn is_metadata_bad(&self) -> bool {
        self.metadata() != MetadataState::Good
    }

    /// A copy of metadata is bad or not verified: the repair task scrubs metadata.
    pub(crate) fn suspect_metadata(&self) {
        if self.metadata() == MetadataState::Good {
            self.set_metadata(MetadataState::Bad);
        }
    }

    /// Records the state of metadata. The repair task scrubs it unless all copies are good.
    pub(crate) fn set_metadata(&self, state: MetadataState) {
        self.metadata.set(state);
        self.context.signals.repair.notify_one();
    }

    /// The members as they stand; `strips` counts the strips on one.
    pub(crate) fn report(&self, strips: impl Fn(MemberNo) -> StripsOn) -> Vec<MemberReport> {
        let (members, desc) = (self.members.borrow(), self.desc.borrow());
        let report = |(at, one): (usize, &Member)| {
            let member = MemberNo::new(at);
            let (is_reachable, strips) = (one.is_reachable(), strips(member));
            MemberReport {
                drive: desc.members[at].drive,
                state: match (is_reachable, one.is_stale()) {
                    (false, _) => "missing",
                    (true, true) => "rebuilding",
                    (true, false) => "active",
                },
                carrier: desc.carriers().any(|carrier| carrier == member),
                stale_strips: if is_reachable { strips.stale } else { strips.strips },
                moved_strips: strips.moved_away,
            }
        };
        members.iter().enumerate().map(report).collect()
    }
}
