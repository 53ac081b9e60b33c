//! Making an array, and opening one: claim, root, table, log, redo, new incarnation.
//!
//! Nothing is written before the claim is recorded. Nothing is appended before a root with a raised
//! incarnation is durable, so leftovers of the last opening never join the chain. The log up to its end is
//! durable on every carrier before that root. What is not known to be durable is written again for that
//! ([`mends`]).
//!
//! The order is: root and log on all carriers, flush, places that may hide another root, flush, new root. The
//! pages that the root names were durable before it was written. The next checkpoint may write over those of
//! another root, so the root that was found is durable first, and no newer one may come back.
//!
//! An opening goes on without a drive only if every stripe can do without it: going on makes the drive's
//! contents out of date, so that bringing it back later would not help.

mod checkpoint;
mod outdated;

use crate::array::Array;
use crate::context::Context;
use crate::error::ArrayError;
use crate::events::ArrayEvent;
use crate::format::descriptor::{Descriptor, FIRST_GENERATION, MemberEntry};
use crate::format::index_page::PageRef;
use crate::format::root::Root;
use crate::geometry::{CreateSpec, Geometry};
use crate::log::chain::{Head, LogSegment};
use crate::log::fold::{Folded, Redo, fold};
use crate::log::mends::{self, Mend};
use crate::log::replay::read_log;
use crate::members::labels;
use crate::members::ownership::{AcceptedLoss, Claim, Lacking, Ownership};
use crate::members::{FoundLabels, Members, Roster};
use crate::place::{MemberNo, MemberSet, SegmentNo};
use crate::site::Site;
use crate::stripes::load::OpenedFrom;
use checkpoint::{read_index, read_root};
use outdated::{LeftOut, check_loss, leave_out_outdated, take_back};
use penstock_base::num::to_u16;
use penstock_base::rank::scoped;
use penstock_base::{ArrayId, BLOCK_BYTES, BufMut, Env, Epoch, LogSeq, Version, env::random_id};
use penstock_drive::{Io, Slice};
use penstock_raid::Code;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::rc::Rc;

const IO: Io = Site::Create.io();

/// A member's slice; none while its drive is missing.
pub type MemberSlice = Option<Slice>;

/// Writes an empty array into `slices`, with their labels last, and returns its descriptor. The array exists
/// once the caller has put the slices into the superblocks of their drives.
pub async fn create(env: &Env, spec: &CreateSpec, slices: &[Slice]) -> Result<Descriptor, ArrayError> {
    let slice_bytes = slices.iter().map(Slice::len).min().unwrap_or(0);
    let geometry = Geometry::fit(spec, slice_bytes)?;
    if slices.len() != geometry.members {
        return Err(ArrayError::Invalid(format!("{} slices for {} members", slices.len(), geometry.members)));
    }
    let array = ArrayId(random_id(env));
    let carriers = first_carriers(spec, &geometry);
    for carrier in &carriers {
        let slice = &slices[usize::from(*carrier)];
        slice.write(geometry.root_at(0), first_root(array).encode(), IO).await?;
        slice.flush(IO).await?;
    }
    let members = slices.iter().map(|slice| MemberEntry {
        drive: slice.drive().id(),
        offset: slice.offset(),
        len: slice.len(),
        generation: FIRST_GENERATION,
        stale: false,
        epoch: Epoch(0),
    });
    let descriptor = Descriptor {
        array,
        pool: spec.pool,
        stack: spec.stack,
        name: spec.name.clone(),
        role: spec.role,
        k: to_u16(spec.k),
        m: to_u16(spec.m),
        layout: spec.layout.clone(),
        strip_blocks: spec.strip_blocks,
        log_bytes: spec.log_bytes,
        segment_bytes: spec.segment_bytes,
        rows: geometry.rows,
        epoch: Epoch(0),
        root_epoch: Epoch(0),
        revision: 1,
        carriers_epoch: 1,
        carriers,
        members: members.collect(),
    };
    for (at, slice) in slices.iter().enumerate() {
        labels::write_first(slice, &descriptor, MemberNo::new(at)).await?;
    }
    Ok(descriptor)
}

/// The members that carry the log of a new array: from the first one that the spec names on, each in another
/// failure domain as long as there is one.
fn first_carriers(spec: &CreateSpec, geometry: &Geometry) -> Vec<u16> {
    let (members, wanted) = (geometry.members, geometry.carriers().min(geometry.members));
    let in_turn = (0..members).map(|turn| MemberNo::new((spec.first_carrier + turn) % members));
    let mut carriers: Vec<MemberNo> = Vec::new();
    spec.layout.choose(&mut carriers, in_turn, wanted);
    carriers.into_iter().map(MemberNo::number).collect()
}

/// The root of an array that never logged anything.
pub(crate) fn first_root(array: ArrayId) -> Root {
    Root {
        array,
        seq: 0,
        incarnation: 0,
        incarnation_start: LogSeq(1),
        replay_segment: 1,
        replay_seq: LogSeq(1),
        replay_chain: 0,
        durable: LogSeq(0),
        versions_reserved: Version(0),
        order: 0,
        table: PageRef::NONE,
        epoch: Epoch(0),
        behind: MemberSet::NONE,
        applied: LogSeq(0),
        resets: BTreeMap::new(),
        stale_on: MemberSet::NONE,
        unreadable: Vec::new(),
    }
}

/// Opens an array: `members` by member, with the slices of drives that are here.
pub async fn open(
    env: &Env,
    descriptor: Descriptor,
    members: Vec<MemberSlice>,
    ownership: Rc<dyn Ownership>,
    roster: &Rc<Roster>,
    lacking: Lacking,
) -> Result<Rc<Array>, ArrayError> {
    Opening::read(env, descriptor, members, ownership, roster, lacking).await?.take_over().await
}

/// An array that was read and can be opened. Nothing was written: a caller that opens several arrays which
/// stand and fall together reads all of them first.
pub struct Opening {
    array: Array,
    claim: Claim,
    stale: MemberSet,
    root: Root,
    lacking: Lacking,
    accepted_loss: AcceptedLoss,
    /// Members that were gone when it was proved that nothing is lost without them.
    gone: MemberSet,
    /// The data that an administrator had to give up.
    accepted: Option<String>,
    outdated: Vec<LeftOut>,
    /// Parts of the log, and the root, that carriers lack or may have in a cache alone.
    mends: Vec<Mend>,
    /// Blocks for places that may hide a newer root. Its pages are written over later, so it must not return.
    hidden: Vec<Mend>,
    /// The carriers that were read.
    carriers: Vec<MemberNo>,
    redo: Redo,
    /// Lost pages of the stripe table whose stripes are given up.
    given_up: BTreeSet<u64>,
    /// The log has a segment.
    started: bool,
}

impl Opening {
    /// Reads an array, and proves that it can be opened. Members as for [`open`].
    pub async fn read(
        env: &Env,
        descriptor: Descriptor,
        members: Vec<MemberSlice>,
        ownership: Rc<dyn Ownership>,
        roster: &Rc<Roster>,
        lacking: Lacking,
    ) -> Result<Self, ArrayError> {
        let prepared = || prepare(env, descriptor.clone(), members.clone(), ownership.clone(), roster);
        let first = match Self::read_as(prepared()?, None).await {
            Err(refused @ ArrayError::PagesLost { .. }) => {
                Err(Self::with_other_loss(refused, prepared()?).await)
            }
            other => other,
        };
        let opening = match first {
            Err(
                refused @ (ArrayError::WouldLose { .. }
                | ArrayError::PagesLost { .. }
                | ArrayError::LabelsUnread { .. }),
            ) if lacking == Lacking::Accept => {
                tracing::error!(error = %refused, "the loss is accepted");
                let opening = Self::read_as(prepared()?, Some(&refused_pages(&refused))).await?;
                let given_up: Vec<String> = opening.given_up.iter().map(u64::to_string).collect();
                let given_up = match given_up.is_empty() {
                    true => String::new(),
                    false => format!("; lost pages of the stripe table given up: {}", given_up.join(", ")),
                };
                Self { accepted: Some(format!("{refused}{given_up}")), ..opening }
            }
            opening => opening?,
        };
        roster.enter(&opening.array.members);
        Ok(opening)
    }

    /// The refusal for lost pages, with the stripes that would be lost for other reasons.
    async fn with_other_loss(refused: ArrayError, array: Array) -> ArrayError {
        let opening = Self::read_as(array, Some(&refused_pages(&refused))).await;
        let ArrayError::PagesLost { name, pages, stripes, .. } = refused else { return refused };
        let other = match &opening {
            Ok(opening) => opening.check_loss().await.err(),
            Err(_) => None,
        };
        let also = match other {
            Some(ArrayError::WouldLose { stripes, which, .. }) => {
                format!(", and beside these {stripes} stripes without {which}")
            }
            _ => String::new(),
        };
        ArrayError::PagesLost { name, pages, stripes, also }
    }

    async fn check_loss(&self) -> Result<(), ArrayError> {
        let Array { context, members, stripes, strips, .. } = &self.array;
        check_loss(context, members, stripes, strips, &self.outdated, &self.redo).await
    }

    /// Reads an array; `accepted` if a loss is, with the pages that made an opening refuse.
    async fn read_as(array: Array, accepted: Option<&BTreeSet<u64>>) -> Result<Self, ArrayError> {
        let lacking = lacking_by(accepted);
        let (claim, stale) = array.members.recorded().await?;
        let labels = array.members.read_labels(lacking).await?;
        let (name, unread) = (array.context.name.clone(), array.members.drives(labels.unread));
        let read = Self::read_labelled(array, (claim, stale), &labels, accepted).await;
        match lacking {
            Lacking::Refuse => read.map_err(|error| without_labels(error, name, unread)),
            Lacking::Accept => read,
        }
    }

    async fn read_labelled(
        array: Array,
        (claim, stale): (Claim, MemberSet),
        labels: &FoundLabels,
        accepted_pages: Option<&BTreeSet<u64>>,
    ) -> Result<Self, ArrayError> {
        let lacking = lacking_by(accepted_pages);
        let (context, members, stripes) = (&array.context, &array.members, &array.stripes);
        check_members(context, members, stale)?;
        let slices = |carriers: &[MemberNo]| -> Vec<Slice> {
            carriers.iter().filter_map(|at| members.slice(*at)).collect()
        };
        let read_from = members.trusted_carriers(stale);
        let (root, hidden) = read_root(context, &slices(&read_from)).await?;
        check_root(context, members, &root, &claim)?;
        let (outdated, accepted_loss) =
            leave_out_outdated(context, members, &root, &claim, stale, labels, lacking);
        let positions = members.trusted_carriers(stale);
        let carriers = slices(&positions);
        if carriers.is_empty() {
            return Err(lacks_carriers(context, members, "the log as it was last"));
        }
        let bad_pages = read_index(context, stripes, &root, &carriers).await?;
        stripes.set_opened_from(Some(OpenedFrom { carriers: positions.clone(), lacking }));
        stripes.versions.set_reserved(root.versions_reserved);
        stripes.overlay_mut().skip_order(root.order);
        let found = read_log(context, &root, &carriers).await?;
        if found.segments.is_empty() && root.replay_seq > LogSeq(1) {
            // The segment where replay starts was durable before the root was.
            return Err(context.damaged("the segment where the log starts".into()));
        }
        let head = Head {
            incarnation: root.incarnation + 1,
            incarnation_start: found.head.seq.next(),
            ..found.head
        };
        let segments = match found.segments.is_empty() {
            false => found.segments,
            // An array that never logged anything: its first segment is begun when it is taken over.
            true => VecDeque::from([LogSegment {
                number: SegmentNo(root.replay_segment - 1),
                first_seq: root.replay_seq,
                chain: root.replay_chain,
                records: Vec::new(),
            }]),
        };
        let started = segments.back().is_some_and(|segment| segment.number.0 >= root.replay_segment);
        array.chain.found(head, segments);
        let Folded { redo, given_up } =
            fold(stripes, &array.chain, root.applied, found.records, accepted_pages).await?;
        if lacking == Lacking::Refuse {
            check_loss(context, members, stripes, &array.strips, &outdated, &redo).await?;
        }
        stripes.versions.skip_reserved();
        let bad = bad_pages + found.bad_copies;
        context.count(|counts| counts.checksum_errors += bad);
        if bad > 0 {
            members.suspect_metadata();
        }
        let mut mends = found.mends;
        // The root may lie in a cache alone, and the next one goes to the place of the one before it.
        mends.push(Mend {
            at: context.geo.root_at(root.seq),
            bytes: root.encode(),
            lacking: Vec::new(),
            whole: (0..positions.len()).collect(),
            durable: Vec::new(),
            is_needed: true,
        });
        let hidden = hidden.into_iter().filter_map(|(number, place)| {
            let carrier = positions.iter().position(|at| *at == read_from[number])?;
            let is_found = place == root.seq % 2;
            Some(Mend {
                at: context.geo.root_at(place),
                bytes: if is_found { root.encode() } else { BufMut::zeroed(BLOCK_BYTES).freeze() },
                lacking: vec![carrier],
                whole: Vec::new(),
                durable: Vec::new(),
                is_needed: false,
            })
        });
        let hidden = hidden.collect();
        let gone = members.gone();
        Ok(Self {
            array,
            claim,
            stale,
            root,
            lacking,
            accepted_loss,
            gone,
            accepted: None,
            outdated,
            mends,
            hidden,
            carriers: positions,
            redo,
            given_up,
            started,
        })
    }

    /// Takes the array over and opens it.
    pub async fn take_over(self) -> Result<Rc<Array>, ArrayError> {
        scoped(self.open()).await
    }

    async fn open(self) -> Result<Rc<Array>, ArrayError> {
        let (array, stale, root) = (Rc::new(self.array), self.stale, self.root);
        let (context, members) = (&array.context, &array.members);
        // A drive may have failed since the array was read.
        check_members(context, members, stale)?;
        if self.lacking == Lacking::Refuse && members.gone() != self.gone {
            check_loss(context, members, &array.stripes, &array.strips, &self.outdated, &self.redo).await?;
        }
        members.take_over(self.claim, stale, &root, self.accepted_loss).await?;
        array.stripes.set_opened_from(None);
        // The chain must be complete on every carrier before anything rests on it.
        mends::write(context, members, &self.mends, &self.carriers, Site::ReplayMend).await?;
        mends::write(context, members, &self.hidden, &self.carriers, Site::ReplayMend).await?;
        // The writes on carriers from here on may have to wait until a lost one is replaced.
        array.start_carriers();
        let begun = async {
            let (strips, chain) = (&array.strips, &array.chain);
            self.redo.run(context, members, &array.stripes, strips, chain).await?;
            begin_incarnation(&array, &root, self.started).await?;
            match self.given_up.is_empty() {
                true => Ok(()),
                // They are given up once.
                false => array.checkpoints.write().await,
            }
        };
        begun.await.inspect_err(|_| array.stop())?;
        array.start();
        take_back(context, members, self.outdated).await.inspect_err(|_| array.stop())?;
        members.record_root().await.inspect_err(|_| array.stop())?;
        members.changed();
        if let Some(why) = self.accepted {
            context.events.push(ArrayEvent::LossAccepted { why });
        }
        Ok(array)
    }
}

/// The pages of the stripe table that made an opening refuse.
fn refused_pages(refused: &ArrayError) -> BTreeSet<u64> {
    match refused {
        ArrayError::PagesLost { pages, .. } => pages.clone(),
        _ => BTreeSet::new(),
    }
}

/// The rule of an opening for which a loss is accepted, with these pages, or none is.
fn lacking_by(accepted: Option<&BTreeSet<u64>>) -> Lacking {
    if accepted.is_some() { Lacking::Accept } else { Lacking::Refuse }
}

fn prepare(
    env: &Env,
    descriptor: Descriptor,
    members: Vec<MemberSlice>,
    ownership: Rc<dyn Ownership>,
    roster: &Rc<Roster>,
) -> Result<Array, ArrayError> {
    let geo = Geometry::of(&descriptor)?;
    if members.len() != geo.members {
        return Err(ArrayError::Invalid(format!(
            "array {}: {} slices for {} members",
            descriptor.name,
            members.len(),
            geo.members
        )));
    }
    let code = Code::new(geo.k, geo.m).map_err(|error| ArrayError::Invalid(error.to_string()))?;
    let layout = Rc::new(descriptor.layout.clone());
    let context = Context::new(env, descriptor.array, &descriptor.name, geo, layout);
    Ok(Array::assemble(context, code, descriptor, members, ownership, roster))
}

/// The error of an opening without drives whose labels cannot be read, which `unread` names.
fn without_labels(error: ArrayError, name: String, unread: String) -> ArrayError {
    match error {
        ArrayError::TooManyMissing { .. }
        | ArrayError::WouldLose { .. }
        | ArrayError::PagesLost { .. }
        | ArrayError::CannotRead { .. }
        | ArrayError::Damaged { .. }
            if !unread.is_empty() =>
        {
            ArrayError::LabelsUnread { name, which: unread, why: error.to_string() }
        }
        other => other,
    }
}

fn check_members(context: &Context, members: &Members, stale: MemberSet) -> Result<(), ArrayError> {
    let absent = members.gone();
    // With spare places all strips of a member that is away may have moved: the table tells later.
    if context.layout.spares() == 0 && context.layout.most_lost(absent) > context.geo.m {
        return Err(ArrayError::TooManyMissing {
            name: context.name.clone(),
            missing: absent.len(),
            members: context.geo.members,
            allowed: context.geo.m,
            which: members.drives(absent),
        });
    }
    if !members.trusted_carriers(stale).is_empty() {
        return Ok(());
    }
    let away = members.drives(members.descriptor().carriers().filter(|at| !stale.contains(*at)).collect());
    Err(match away.is_empty() {
        true => context.damaged("every copy of the log".into()),
        false => context.cannot_read(format!("the log, of which drive {away} has the only copy,")),
    })
}

/// Refuses a root of an earlier start than one whose root is on every carrier: the carriers that are here
/// have contents of the past. If all drives of the store have, only coordination tells.
fn check_root(context: &Context, members: &Members, root: &Root, claim: &Claim) -> Result<(), ArrayError> {
    if root.epoch >= members.descriptor().root_epoch.max(claim.root_epoch) {
        return Ok(());
    }
    Err(lacks_carriers(context, members, "the checkpoint's root of the last start"))
}

/// The error that only carriers have `what` that are away, or have contents of the past.
fn lacks_carriers(context: &Context, members: &Members, what: &str) -> ArrayError {
    let which = members.drives(members.descriptor().carriers().collect());
    context.cannot_read(format!("{what}, which only drives {which} have as they were last,"))
}

/// Makes a root with the new incarnation durable; begins the first segment of an array that has none.
async fn begin_incarnation(array: &Array, last: &Root, started: bool) -> Result<(), ArrayError> {
    let root = Root {
        seq: last.seq + 1,
        replay_segment: last.replay_segment,
        replay_seq: last.replay_seq,
        replay_chain: last.replay_chain,
        // The changes of replay are in memory alone.
        applied: last.applied,
        resets: last.resets.clone(),
        stale_on: last.stale_on,
        unreadable: last.unreadable.clone(),
        ..array.checkpoints.root_of_now()
    };
    assert!(root.incarnation > last.incarnation, "an opening raises the incarnation");
    if !started {
        let number = SegmentNo(root.replay_segment);
        array.log.write_segment_header(number, root.replay_seq, Site::LogAppend.io()).await?;
        array.chain.segments_mut().number_first(number);
    }
    // Everything that replay found counts from here on, durable before or not.
    array.checkpoints.write_root(&root).await?;
    array.checkpoints.set_root(root).await;
    Ok(())
}
