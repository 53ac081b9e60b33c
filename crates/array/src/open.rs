//! Making an array, and opening one: claim, root, table, log, redo, new incarnation.
//!
//! Nothing is written before the claim is recorded; nothing is appended before a root with a raised incarnation is
//! durable, so leftovers of the last opening never join the chain. What that root says is durable on every carrier
//! before it: the log up to its end, and that table pages of a checkpoint without a root do not count.
//!
//! An opening goes on without a drive only where every stripe can do without it: going on makes what the drive has out of date, so
//! that bringing it back later would not help.

use crate::carriers::Mending;
use crate::checkpoint::CheckpointState;
use crate::engine::{Array, ArrayLatency};
use crate::error::ArrayError;
use crate::format::descriptor::{Descriptor, FIRST_GENERATION, MemberEntry};
use crate::format::root::Root;
use crate::format::table_page::TablePage;
use crate::geometry::{CreateSpec, Geometry};
use crate::log::{Head, Log, Segment};
use crate::member::Member;
use crate::notes::Note;
use crate::outdated::LeftOut;
use crate::overlay::Overlay;
use crate::ownership::{AcceptedLoss, Claim, ClaimError, Ownership};
use crate::replay::Redo;
use crate::roster::Roster;
use crate::salvage::{self, Salvaged};
use crate::table::StripeTable;
use futures_util::future::{join, join_all};
use futures_util::{StreamExt, stream};
use penstock_base::{ArrayId, BLOCK_BYTES, Buf, Env, Epoch, LogSeq, Version, env::random_id};
use penstock_drive::{Class, Io, Slice};
use penstock_raid::Code;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use tokio::sync::{Mutex, Notify};

const IO: Io = Io::new(Class::Meta, "array.create");
/// Pages of the stripe table that are read or made with one I/O of 1 MiB.
pub(crate) const PAGES_IN_A_PIECE: u64 = 256;
/// Pieces of the table that are read at a time from each place of each carrier.
const PIECES_AT_A_TIME: usize = 4;

/// A member's slice; none while its drive is missing.
pub type MemberSlice = Option<Slice>;

/// Writes an empty array into `slices` and returns its descriptor. The slices' drives carry no word of it yet: it
/// exists once the caller has put the descriptor into their superblocks.
pub async fn create(env: &Env, spec: &CreateSpec, slices: &[Slice]) -> Result<Descriptor, ArrayError> {
    let slice_bytes = slices.iter().map(Slice::len).min().unwrap_or(0);
    let geometry = Geometry::fit(spec, slice_bytes)?;
    if slices.len() != geometry.strips() {
        return Err(ArrayError::Invalid(format!("{} slices for {} strips", slices.len(), geometry.strips())));
    }
    let array = ArrayId(random_id(env));
    let carriers: Vec<u16> = (0..geometry.carriers().min(slices.len()) as u16).collect();
    let table = StripeTable::new(&geometry);
    for carrier in &carriers {
        let slice = &slices[usize::from(*carrier)];
        for first in (0..geometry.pages()).step_by(PAGES_IN_A_PIECE as usize) {
            let pages = first..geometry.pages().min(first + PAGES_IN_A_PIECE);
            let blocks: Vec<Buf> = pages
                .map(|page| {
                    let (words, strips) = (table.page_words(page), geometry.strips() as u16);
                    TablePage { array, index: page, checkpoint: 0, strips, words }.encode()
                })
                .collect();
            slice.write(geometry.page_at(first, 0), penstock_base::buf::gather(&blocks), IO).await?;
        }
        let root = Root { table_sum: table.sum(), ..first_root(array) };
        slice.write(geometry.root_at(0), root.encode(), IO).await?;
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
    Ok(Descriptor {
        array,
        name: spec.name.clone(),
        k: spec.k as u16,
        m: spec.m as u16,
        strip_blocks: spec.strip_blocks,
        log_bytes: spec.log_bytes,
        segment_bytes: spec.segment_bytes,
        stripes: geometry.stripes,
        epoch: Epoch(0),
        root_epoch: Epoch(0),
        revision: 1,
        carriers_epoch: 1,
        carriers,
        members: members.collect(),
    })
}

fn first_root(array: ArrayId) -> Root {
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
        table_sum: 0,
        epoch: Epoch(0),
        behind: 0,
    }
}

/// Drives that an opening finds as they were in the past, or not at all, although the array cannot miss them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// Nothing is changed, and an error says which drives those are: with them nothing is lost.
    Refuse,
    /// The word of an administrator: the array is opened with what there is. What only those drives have is lost.
    Accept,
}

/// Opens an array: `members` by position, with their slices where their drives are here.
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

/// An array that was read and can be opened. Nothing was written: whoever opens several that stand and fall together reads all of
/// them first.
pub struct Opening {
    array: Rc<Array>,
    claim: Claim,
    stale: u64,
    root: Root,
    lacking: Lacking,
    accepted_loss: AcceptedLoss,
    /// Members that were gone when it was proved that nothing is lost without them, as a bit mask.
    gone: u64,
    /// Why an administrator had to give something up.
    accepted: Option<String>,
    outdated: Vec<LeftOut>,
    /// By position, what the log lacks on carriers; and places of table pages that do not count.
    mends: Vec<(usize, u64, Buf)>,
    voids: Vec<(usize, u64)>,
    redo: Redo,
    redone: Vec<u64>,
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
        let opening = match Self::read_as(prepared()?, Lacking::Refuse).await {
            Err(refused @ ArrayError::WouldLose { .. }) if lacking == Lacking::Accept => {
                tracing::error!(error = %refused, "the loss is accepted");
                let opening = Self::read_as(prepared()?, lacking).await?;
                Self { accepted: Some(refused.to_string()), ..opening }
            }
            opening => opening?,
        };
        roster.enter(&opening.array);
        Ok(opening)
    }

    async fn read_as(mut array: Array, lacking: Lacking) -> Result<Self, ArrayError> {
        let (claim, stale) = array.recorded().await?;
        check_members(&array, stale)?;
        let root = array.read_root(&array.carriers_of(stale)).await?;
        array.check_root(&root, &claim)?;
        let (outdated, accepted_loss) = array.leave_out_outdated(&root, &claim, stale, lacking).await;
        let (positions, carriers) = (array.trusted_carriers(stale), array.carriers_of(stale));
        if carriers.is_empty() {
            return Err(array.lacks_carriers("the log as it was last"));
        }
        let (bad_pages, voids) = array.read_table(&root, &carriers).await?;
        array.reserved_version.set(root.versions_reserved.0);
        array.order.set(root.order);
        let found = array.read_log(&root, &carriers).await?;
        let head = Head {
            incarnation: root.incarnation + 1,
            incarnation_start: found.head.seq.next(),
            ..found.head
        };
        let segments = match found.segments.is_empty() {
            false => found.segments,
            // An array that never logged anything: its first segment is begun when it is taken over.
            true => VecDeque::from([Segment {
                number: root.replay_segment - 1,
                first_seq: root.replay_seq,
                chain: root.replay_chain,
                records: Vec::new(),
            }]),
        };
        let started = segments.back().is_some_and(|segment| segment.number >= root.replay_segment);
        array.log = Log::new(array.geo, head, segments);
        let (redo, redone) = array.fold(found.records);
        if lacking == Lacking::Refuse {
            array.check_loss(&outdated, &redo).await?;
        }
        array.next_version.set(array.reserved_version.get());
        let bad = bad_pages + found.bad_copies;
        array.count(|counts| counts.checksum_errors += bad);
        array.set_metadata_bad(bad > 0);
        let mends =
            found.mends.into_iter().map(|mend| (positions[mend.carrier], mend.at, mend.bytes)).collect();
        let voids = voids.into_iter().map(|(carrier, at)| (positions[carrier], at)).collect();
        let (gone, array, accepted) = (array.gone(), Rc::new(array), None);
        Ok(Self {
            array,
            claim,
            stale,
            root,
            lacking,
            accepted_loss,
            gone,
            accepted,
            outdated,
            mends,
            voids,
            redo,
            redone,
            started,
        })
    }

    /// Takes the array over and opens it.
    pub async fn take_over(self) -> Result<Rc<Array>, ArrayError> {
        let Self { array, claim, stale, root, outdated, .. } = self;
        // A drive may have failed since.
        check_members(&array, stale)?;
        if self.lacking == Lacking::Refuse && array.gone() != self.gone {
            array.check_loss(&outdated, &self.redo).await?;
        }
        array.claim_ownership(claim, stale, &root, self.accepted_loss).await?;
        // The chain must be whole on every carrier before anything rests on it.
        if !self.mends.is_empty() || !self.voids.is_empty() {
            for (position, at, bytes) in self.mends {
                array.write_member(position, at, bytes, IO.at("replay.mend")).await?;
            }
            for (position, at) in self.voids {
                let zeros = Buf::zeroed(BLOCK_BYTES);
                array.write_member(position, at, zeros, IO.at("replay.void")).await?;
            }
            array.flush_carriers().await?;
        }
        // What follows writes on carriers, and may have to wait until there is another one.
        array.start_carriers();
        let begun = async {
            array.redo(self.redo).await?;
            self.redone.into_iter().for_each(|segment| array.log.release_at_checkpoint(segment));
            array.begin_incarnation(root, self.started).await
        };
        begun.await.inspect_err(|_| array.stop())?;
        array.start();
        array.take_back_outdated(outdated).await.inspect_err(|_| array.stop())?;
        array.record_root().await.inspect_err(|_| array.stop())?;
        array.want_mending();
        if let Some(why) = self.accepted {
            array.note(Note::LossAccepted { why });
        }
        Ok(array)
    }
}

fn check_members(array: &Array, stale: u64) -> Result<(), ArrayError> {
    let members = array.members.borrow();
    let absent: Vec<usize> = (0..members.len()).filter(|at| members[*at].reachable().is_none()).collect();
    if absent.len() > array.geo.m {
        let drives = array.desc.borrow();
        let which: Vec<String> = absent.iter().map(|at| drives.members[*at].drive.to_string()).collect();
        return Err(ArrayError::TooManyMissing {
            name: array.name.clone(),
            missing: absent.len(),
            members: members.len(),
            allowed: array.geo.m,
            which: which.join(", "),
        });
    }
    drop(members);
    if !array.trusted_carriers(stale).is_empty() {
        return Ok(());
    }
    let desc = array.desc.borrow();
    let away = desc.carriers.iter().filter(|at| stale & 1 << **at == 0);
    let away: Vec<String> = away.map(|at| desc.members[usize::from(*at)].drive.to_string()).collect();
    Err(match away.is_empty() {
        true => ArrayError::Damaged { name: array.name.clone(), what: "every copy of the log".into() },
        false => array.cannot_read(format!("the log, of which drive {} has the only copy,", away.join(", "))),
    })
}

fn prepare(
    env: &Env,
    descriptor: Descriptor,
    members: Vec<MemberSlice>,
    ownership: Rc<dyn Ownership>,
    roster: &Rc<Roster>,
) -> Result<Array, ArrayError> {
    let geo = Geometry::of(&descriptor)?;
    if members.len() != geo.strips() {
        return Err(ArrayError::Invalid(format!(
            "array {}: {} slices for {} strips",
            descriptor.name,
            members.len(),
            geo.strips()
        )));
    }
    let code = Code::new(geo.k, geo.m).map_err(|error| ArrayError::Invalid(error.to_string()))?;
    let members = members
        .into_iter()
        .zip(&descriptor.members)
        .map(|(slice, entry)| Member::new(slice, entry.stale))
        .collect();
    let head =
        Head { seq: LogSeq(0), chain: 0, offset_blocks: 1, incarnation: 0, incarnation_start: LogSeq(1) };
    Ok(Array {
        env: env.clone(),
        id: descriptor.array,
        name: descriptor.name.clone(),
        code,
        geo,
        desc: RefCell::new(descriptor),
        members: RefCell::new(members),
        table: RefCell::new(StripeTable::new(&geo)),
        fresh: RefCell::default(),
        overlay: RefCell::new(Overlay::new(geo.strip_blocks)),
        order: Cell::new(0),
        log: Log::new(geo, head, VecDeque::new()),
        locks: Default::default(),
        trailers: RefCell::default(),
        ownership,
        roster: roster.clone(),
        claim: Cell::default(),
        accepted: Cell::default(),
        owned: Cell::default(),
        written: Cell::default(),
        reconfig: Mutex::default(),
        checkpoint: Mutex::new(CheckpointState { root: first_root(ArrayId::default()) }),
        flush_lock: Mutex::default(),
        destage_lock: Mutex::default(),
        version_lock: Mutex::default(),
        next_version: Cell::new(0),
        reserved_version: Cell::new(0),
        counts: Cell::default(),
        latency: ArrayLatency::default(),
        suspended: RefCell::default(),
        put_off: RefCell::default(),
        stopped: OnceCell::new(),
        closed: Cell::new(false),
        destage_wake: Notify::new(),
        resync_wake: Notify::new(),
        repair_queue: RefCell::default(),
        repair_wake: Notify::new(),
        unreadable: RefCell::default(),
        rebuild: RefCell::default(),
        scrub: RefCell::default(),
        scrub_stop: Cell::new(false),
        notes: RefCell::default(),
        metadata_bad: Cell::new(false),
        mending: Mending::default(),
        log_short: Cell::new(false),
        destaging: Cell::new(0),
    })
}

impl Array {
    /// The claim on record, and the members that are stale by it or, where superblocks are newer, by them.
    async fn recorded(&self) -> Result<(Claim, u64), ArrayError> {
        let claim = self.ownership.current(self.id).await.map_err(|error| self.unclaimed(&error))?;
        let desc = self.desc.borrow();
        let valid = claim.generations.replaced().filter(|(at, _)| claim.stale & 1 << at == 0);
        for (at, generation) in valid {
            if desc.members.get(at).is_some_and(|member| member.generation < generation) {
                return Err(ArrayError::Replaced { name: self.name.clone(), position: at });
            }
        }
        if claim.revision >= desc.revision {
            return Ok((claim, claim.stale));
        }
        Ok((claim, desc.stale()))
    }

    fn unclaimed(&self, error: &ClaimError) -> ArrayError {
        ArrayError::Ownership { array: self.id, why: error.to_string() }
    }

    /// That of an opening that finds `claim`.
    pub(crate) fn next_epoch(&self, claim: &Claim) -> Epoch {
        Epoch(self.desc.borrow().epoch.0.max(claim.epoch.0) + 1)
    }

    /// Takes the array over: a new epoch, and members that are not here recorded as stale.
    async fn claim_ownership(
        &self,
        found: Claim,
        stale: u64,
        root: &Root,
        accepted: AcceptedLoss,
    ) -> Result<(), ArrayError> {
        self.claim.set(found);
        self.accepted.set(accepted);
        let absent: Vec<bool> =
            self.members.borrow().iter().map(|member| member.reachable().is_none()).collect();
        let _one_at_a_time = self.reconfig.lock().await;
        let failed = self
            .record(|next| {
                next.epoch = self.next_epoch(&found);
                // Where no superblock that is here says so any more.
                next.root_epoch = next.root_epoch.max(found.root_epoch);
                for (position, member) in next.members.iter_mut().enumerate() {
                    let is_stale = stale & 1 << position != 0;
                    member.epoch = root.least_epoch(position, member, is_stale);
                    member.stale = is_stale || absent[position];
                }
            })
            .await?;
        self.owned.set(true);
        drop(_one_at_a_time);
        self.fail_unwritten(failed).await?;
        // Another may have failed since it was looked at.
        self.record_lost().await
    }

    /// Records that the roots of this epoch are durable, and who has a superblock of it.
    async fn record_root(&self) -> Result<(), ArrayError> {
        let _one_at_a_time = self.reconfig.lock().await;
        let failed = self.record(|next| next.root_epoch = next.epoch).await?;
        drop(_one_at_a_time);
        self.fail_unwritten(failed).await
    }

    /// Refuses a root of an earlier start than one whose root is on every carrier: those that are here are from the past. Where
    /// all drives are, only coordination tells.
    fn check_root(&self, root: &Root, claim: &Claim) -> Result<(), ArrayError> {
        if root.epoch >= self.desc.borrow().root_epoch.max(claim.root_epoch) {
            return Ok(());
        }
        Err(self.lacks_carriers("the checkpoint's root of the last start"))
    }

    /// The error where only carriers have `what` that are not here as they were last.
    fn lacks_carriers(&self, what: &str) -> ArrayError {
        let desc = self.desc.borrow();
        let carriers = desc.carriers.iter().map(|at| desc.members[usize::from(*at)].drive.to_string());
        let which = carriers.collect::<Vec<_>>().join(", ");
        self.cannot_read(format!("{what}, which only drives {which} have as they were last,"))
    }

    fn carriers_of(&self, stale: u64) -> Vec<Slice> {
        self.trusted_carriers(stale).into_iter().filter_map(|at| self.member_slice(at)).collect()
    }

    fn trusted_carriers(&self, stale: u64) -> Vec<usize> {
        let desc = self.desc.borrow();
        let members = self.members.borrow();
        let good =
            desc.carriers.iter().map(|carrier| usize::from(*carrier)).filter(|at| stale & (1 << at) == 0);
        good.filter(|at| members[*at].reachable().is_some()).collect()
    }

    /// The newest root. A root that is durable is on every carrier, so one carrier that can be read tells; a place that no
    /// carrier can read might hold it, and then nothing is decided. Numbers are given again after a start whose root was not
    /// durable, and such a root may come back with a drive from the past; epochs are not.
    async fn read_root(&self, carriers: &[Slice]) -> Result<Root, ArrayError> {
        let mut best: Option<Root> = None;
        for place in 0..2 {
            let mut told = false;
            for carrier in carriers {
                let Ok(block) = carrier.read(self.geo.root_at(place), BLOCK_BYTES, IO.at("open.read")).await
                else {
                    continue;
                };
                told = true;
                if let Ok(root) = Root::decode(&block)
                    && root.array == self.id
                    && root.replay_seq.0 > 0
                    && root.replay_segment > 0
                {
                    let age = |root: &Root| (root.epoch, root.seq);
                    best = best.filter(|best| age(best) >= age(&root)).or(Some(root));
                }
            }
            if !told {
                return Err(self.cannot_read("the checkpoint's root".into()));
            }
        }
        best.ok_or_else(|| ArrayError::Damaged {
            name: self.name.clone(),
            what: "the checkpoint's root".into(),
        })
    }

    /// Loads every table page from the carrier that has its newest committed copy, and proves by the root's sum that
    /// these are the pages it was written for. Returns how many copies were bad, and the places (by carrier) of pages
    /// whose checkpoint has no root: the next root's number would make them count.
    async fn read_table(
        &self,
        root: &Root,
        carriers: &[Slice],
    ) -> Result<(u64, Vec<(usize, u64)>), ArrayError> {
        let (mut bad, mut voids, mut unreadable) = (0, Vec::new(), false);
        let firsts = (0..self.geo.pages()).step_by(PAGES_IN_A_PIECE as usize);
        let mut pieces = stream::iter(firsts.map(|first| async move {
            let pages = first..self.geo.pages().min(first + PAGES_IN_A_PIECE);
            let len = (pages.end - pages.start) as usize * BLOCK_BYTES;
            let read = |carrier, place| {
                salvage::read(carrier, self.geo.page_at(first, place), len, IO.at("open.read"))
            };
            let reads = carriers.iter().map(|carrier| join(read(carrier, 0), read(carrier, 1)));
            (pages, join_all(reads).await)
        }))
        .buffered(PIECES_AT_A_TIME);
        while let Some((pages, copies)) = pieces.next().await {
            unreadable |= copies.iter().any(|(one, other)| one.lacks_some() || other.lacks_some());
            for page in pages.clone() {
                let at = (page - pages.start) as usize;
                bad += self.load_page(root, page, at, &copies, &mut voids)?;
            }
        }
        let sum = self.table.borrow().sum();
        match sum == root.table_sum {
            true => Ok((bad, voids)),
            false if unreadable => Err(self.cannot_read("the stripe table".into())),
            false => Err(ArrayError::Damaged {
                name: self.name.clone(),
                what: "the newest copy of a stripe table page".into(),
            }),
        }
    }

    /// Loads one page from the copies of its piece, where it is the one at `at`. Returns how many copies are bad.
    fn load_page(
        &self,
        root: &Root,
        page: u64,
        at: usize,
        copies: &[(Salvaged, Salvaged)],
        voids: &mut Vec<(usize, u64)>,
    ) -> Result<u64, ArrayError> {
        let mut decode = |carrier: usize, place: u64| {
            let (one, other) = &copies[carrier];
            let bytes = if place == 0 { one.bytes() } else { other.bytes() };
            let found = TablePage::decode(&bytes[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES]).ok()?;
            if found.array != self.id || found.index != page {
                return None;
            }
            if found.checkpoint > root.seq {
                voids.push((carrier, self.geo.page_at(page, place)));
                return None;
            }
            (usize::from(found.strips) == self.geo.strips()).then_some(found)
        };
        let found: Vec<[Option<TablePage>; 2]> =
            (0..copies.len()).map(|carrier| [decode(carrier, 0), decode(carrier, 1)]).collect();
        let newest = found.iter().flatten().flatten().map(|copy| copy.checkpoint).max();
        let in_place = |place: usize| {
            let copies = found.iter().filter_map(move |places| places[place].as_ref());
            copies.filter(move |copy| Some(copy.checkpoint) == newest)
        };
        let Some((place, best)) = [0, 1].into_iter().find_map(|place| Some((place, in_place(place).next()?)))
        else {
            let readable = copies.iter().all(|(one, other)| one.has(at, 1) && other.has(at, 1));
            let what = format!("stripe table page {page}");
            return Err(if readable { self.page_damaged(page) } else { self.cannot_read(what) });
        };
        for (carrier, (one, other)) in copies.iter().enumerate() {
            // A page of a checkpoint without a root may hide in the other place, and count once the next root has its number.
            let hidden = if place == 0 { other } else { one };
            if !hidden.has(at, 1) {
                voids.push((carrier, self.geo.page_at(page, 1 - place as u64)));
            }
        }
        let loaded = self.table.borrow_mut().load_page(page, place as u8, best.checkpoint, &best.words);
        if !loaded {
            return Err(self.page_damaged(page));
        }
        Ok((found.len() - in_place(place).count()) as u64)
    }

    pub(crate) fn cannot_read(&self, what: String) -> ArrayError {
        ArrayError::CannotRead { name: self.name.clone(), what }
    }

    fn page_damaged(&self, page: u64) -> ArrayError {
        ArrayError::Damaged { name: self.name.clone(), what: format!("stripe table page {page}") }
    }

    /// Makes a root with the new incarnation durable; begins the first segment of an array that has none.
    async fn begin_incarnation(&self, last: Root, started: bool) -> Result<(), ArrayError> {
        let head = *self.log.head.borrow();
        let root = Root {
            seq: last.seq + 1,
            incarnation: head.incarnation,
            incarnation_start: head.incarnation_start,
            durable: head.seq,
            versions_reserved: Version(self.reserved_version.get()),
            order: self.order.get(),
            table_sum: self.table.borrow().sum(),
            epoch: self.claim.get().epoch,
            behind: self.mending.owed_superblocks(),
            ..last
        };
        if !started {
            let (number, seq) = (root.replay_segment, root.replay_seq);
            self.write_segment_header(number, seq, head.chain, head.incarnation, crate::log::IO).await?;
            let mut segments = self.log.segments.borrow_mut();
            let only = segments.back_mut().expect("there is always a segment");
            only.number = number;
        }
        // What replay found, durable or not, counts from here on.
        self.write_root(&root).await?;
        self.checkpoint.lock().await.root = root;
        Ok(())
    }
}
