//! Allocation: reserves and allocates blocks, and gives space back: freed blocks to the allocator without
//! delay, empty stripes to the drives later.
//!
//! No operation waits for the drives. A stripe that lost its last block first rests. A write of a full chunk
//! takes such stripes first, after a discard in the stripe table alone; the drives keep their space, and a
//! drive file its memory or blocks. A background task discards the stripes that have rested long enough on
//! the drives, one batch at a time with a pause after each.
//!
//! Invariants:
//! - a stripe in a discard is marked in *used*, so that nothing is written there before the discard is done;
//! - a discard never takes blocks that are reserved;
//! - at most one batch is in flight, so a write that lacks space waits for that batch and no longer;
//! - every empty stripe that is not yet discarded on the drives is in [`Idle`], or the sweep ([`sweep`]) has
//!   not come to it; a written stripe that it has not come to is neither allocated nor discarded.
//!
//! Power cut: a written stripe that nothing owns stays written until the sweep of the next start finds it. A
//! stripe that is unwritten in the table but was not discarded on the drives keeps its space there until it
//! is written and freed again.

mod compare;
mod groups;
mod sweep;

use crate::ChunkError;
use crate::free::{Kind, Run, Space, SpaceUsage, Use};
use crate::idle::Idle;
use crate::ranks;
use crate::rows::Borrowed;
use crate::volumes::Volumes;
use penstock_array::{ArrayError, Discard};
use penstock_base::Env;
use penstock_base::rank::{RankedGuard, RankedMutex};
use penstock_kv::Kv;
use std::cell::{Cell, Ref, RefCell, RefMut};
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
pub(crate) use sweep::STRIPES_AT_A_TIME;
use tokio::sync::Notify;

/// Most stripes in one batch.
const BATCH: u64 = 64;
/// Pause after a batch: with full batches of 1 MiB stripes, about 3 GB are discarded per second.
const PAUSE: Duration = Duration::from_millis(20);
/// Shortest time that a stripe rests before it is discarded on the drives. The longest is about twice that.
const REST: Duration = Duration::from_secs(5);

/// The stripes that blocks may come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Those of the target's own volume.
    Own,
    /// Also those of loans, if nothing else is free but the headroom.
    Any,
}

/// The lenders from whose loans blocks may come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lenders {
    /// Those that answer at once.
    Ready,
    /// Also those that are suspended: the write waits.
    All,
}

/// The free space of one target.
pub(crate) struct Allocator {
    env: Env,
    volumes: Rc<Volumes>,
    kv: Rc<dyn Kv>,
    chunk_blocks: u32,
    space: RefCell<Space>,
    /// The time at which no block could be allocated although some counted as free.
    barred_at: Cell<Duration>,
    /// Locked while a group is read.
    loading: RankedMutex<()>,
    group_reads: Cell<u64>,
    /// No block of a file counts as free, as far as counts can tell.
    is_compared: Cell<bool>,
    /// Rows of files may name blocks of a borrowed group without a loan.
    has_strays: Cell<bool>,
    /// Locked while written stripes without an owner, or owners without bits, are looked for.
    sweeping: RankedMutex<()>,
    /// The sweep has come to the stripes before this one.
    swept: Cell<u64>,
    /// The number of times that the loans were to be swept again.
    loan_sweeps: Cell<u64>,
    idle: RefCell<Idle>,
    has_idle: Notify,
    /// Locked while a batch of idle stripes is discarded.
    discarding: RankedMutex<()>,
    discarded_stripes: Cell<u64>,
    closed: Cell<bool>,
}

impl Allocator {
    pub(crate) fn new(
        env: &Env,
        volumes: &Rc<Volumes>,
        kv: &Rc<dyn Kv>,
        space: Space,
        chunk_blocks: u32,
    ) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            volumes: volumes.clone(),
            kv: kv.clone(),
            chunk_blocks,
            space: RefCell::new(space),
            barred_at: Cell::default(),
            loading: RankedMutex::new(ranks::LOAD, ()),
            group_reads: Cell::new(0),
            is_compared: Cell::new(true),
            has_strays: Cell::new(false),
            sweeping: RankedMutex::new(ranks::SWEEP, ()),
            swept: Cell::new(0),
            loan_sweeps: Cell::new(0),
            idle: RefCell::default(),
            has_idle: Notify::new(),
            discarding: RankedMutex::new(ranks::DISCARD, ()),
            discarded_stripes: Cell::new(0),
            closed: Cell::new(false),
        })
    }

    /// Makes [`Self::run`] end.
    pub(crate) fn stop(&self) {
        self.closed.set(true);
        self.has_idle.notify_one();
    }

    /// Stripes discarded so far, in the stripe table only or on the drives as well.
    pub(crate) fn discarded_stripes(&self) -> u64 {
        self.discarded_stripes.get()
    }

    /// Allocation groups read so far.
    pub(crate) fn group_reads(&self) -> u64 {
        self.group_reads.get()
    }

    /// The bitmaps. Let go of them before the next wait.
    pub(crate) fn space(&self) -> Ref<'_, Space> {
        self.space.borrow()
    }

    /// The bitmaps, for commits and repairs.
    pub(crate) fn space_mut(&self) -> RefMut<'_, Space> {
        self.space.borrow_mut()
    }

    /// True if a stripe waits to be reused or discarded.
    pub(crate) fn is_idle(&self, stripe: u64) -> bool {
        self.idle.borrow().contains(stripe)
    }

    /// Waits until no batch of stripes is being discarded, and lets none begin.
    pub(crate) async fn pause_discards(&self) -> RankedGuard<'_, ()> {
        self.discarding.lock().await
    }

    /// Total, free and headroom blocks. Blocks in a running discard count as free.
    pub(crate) fn usage(&self) -> SpaceUsage {
        self.space.borrow().reported()
    }

    /// Reserves blocks of free space, or fails with [`ChunkError::NoSpace`].
    pub(crate) fn reserve(&self, wanted_blocks: u64) -> Result<(), ChunkError> {
        if self.env.now() >= self.barred_at.get() + REST {
            // Drives may be back, and that is not told.
            self.space.borrow_mut().clear_barred();
        }
        if self.space.borrow_mut().reserve(wanted_blocks) {
            return Ok(());
        }
        let usage = self.usage();
        let free_blocks = usage.available_blocks();
        Err(ChunkError::NoSpace { free_blocks, wanted_blocks })
    }

    /// Releases a reservation.
    pub(crate) fn release(&self, blocks: u64) {
        self.space.borrow_mut().release(blocks);
    }

    /// True if `blocks` are free beside all reservations except the caller's own of `mine` blocks.
    pub(crate) fn has_beside_reservations(&self, blocks: u64, mine: u64) -> bool {
        self.space.borrow().has_beside_reservations(blocks, mine)
    }

    /// Allocates one run of up to `wanted` blocks. The caller has reserved them, so they are free or in a
    /// discard.
    pub(crate) async fn allocate_reserved(&self, wanted: u64, source: Source) -> Result<Run, ChunkError> {
        assert!(wanted > 0, "a run has a block");
        self.compare().await?;
        let mut run = self.allocate(wanted, source, Lenders::Ready).await?;
        if run.is_none() {
            // The missing blocks are in a running discard.
            let _no_discard = self.discarding.lock().await;
            run = self.allocate(wanted, source, Lenders::Ready).await?;
        }
        while run.is_none() && !self.is_swept() {
            // Or in stripes that the sweep has not come to.
            self.sweep_on().await?;
            run = self.allocate(wanted, source, Lenders::Ready).await?;
        }
        if run.is_none() {
            // Some stripe may be usable again, and that is not told of each.
            self.space.borrow_mut().clear_unusable();
            run = self.allocate(wanted, source, Lenders::All).await?;
        }
        assert!(run.is_none_or(|(_, count)| (1..=wanted).contains(&count)), "{run:?} for {wanted} blocks");
        if run.is_none() && source == Source::Any {
            // Otherwise the same blocks would be promised to the next write.
            self.space.borrow_mut().bar_free();
            self.barred_at.set(self.env.now());
        }
        run.ok_or(ChunkError::NoSpace { free_blocks: 0, wanted_blocks: wanted })
    }

    /// Allocates one run of up to `wanted` blocks; none if no block is free that may be used.
    async fn allocate(
        &self,
        wanted: u64,
        source: Source,
        lenders: Lenders,
    ) -> Result<Option<Run>, ChunkError> {
        loop {
            let freed_before = self.space.borrow().freed();
            let kinds = |range: Range<u64>| [Kind::Partial, Kind::Empty].map(|kind| (range.clone(), kind));
            for (range, kind) in self.sources(source).flat_map(kinds) {
                let mut from = range.start;
                while let Some(group) = self.next_group(kind, from..range.end) {
                    self.load(group).await?;
                    if let Some(stripe) = self.usable_in(group, kind, lenders).await? {
                        assert!(self.is_loaded(stripe), "group {group} is in memory until the next wait");
                        return Ok(Some(self.space.borrow_mut().allocate(stripe, wanted)));
                    }
                    if kind == Kind::Empty {
                        self.space.borrow_mut().set_unusable(group, Use::Extents);
                    }
                    from = group + 1;
                }
            }
            // Blocks may have been freed in a group that was passed already.
            if self.space.borrow().freed() == freed_before {
                return Ok(None);
            }
        }
    }

    /// The groups from which blocks are taken, in this order. The volume keeps its headroom as long as loans
    /// have free blocks: it would have to borrow as much again for the next write.
    fn sources(&self, source: Source) -> impl Iterator<Item = Range<u64>> + use<> {
        let space = self.space.borrow();
        let (own, borrowed) = (0..space.groups().own(), space.groups().own()..space.groups().count());
        let all = match source {
            Source::Any if space.is_low() => [borrowed, own],
            Source::Any => [own, borrowed],
            Source::Own => [own, 0..0],
        };
        all.into_iter().filter(|groups| !groups.is_empty())
    }

    fn next_group(&self, kind: Kind, range: Range<u64>) -> Option<u64> {
        self.space.borrow().next_usable_group(kind, range)
    }

    /// The first stripe of a kind in a group from which blocks may be allocated. The group is in memory
    /// until the next wait.
    async fn usable_in(&self, group: u64, kind: Kind, lenders: Lenders) -> Result<Option<u64>, ChunkError> {
        let mut written = BTreeSet::new();
        loop {
            let is_usable = |stripe: u64| {
                let is_unreadable = self.volumes.knows_unreadable(stripe) == Some(true);
                let may_wait = lenders == Lenders::All;
                let is_ready =
                    !self.volumes.refuses_data(stripe) && (may_wait || !self.volumes.is_suspended(stripe));
                !is_unreadable && is_ready && (self.is_judged(stripe) || !written.contains(&stripe))
            };
            let found = self.space.borrow().first_in(group, kind, is_usable);
            let Some(stripe) = found else { return Ok(None) };
            if kind == Kind::Partial || self.is_judged(stripe) {
                if self.volumes.knows_unreadable(stripe).is_some() {
                    return Ok(Some(stripe));
                }
                self.volumes.look_at(stripe).await?;
                // Others may have taken its blocks.
                self.load(group).await?;
                continue;
            }
            match self.is_unwritten(stripe).await? {
                Some(true) if self.space.borrow().is_empty(stripe) => return Ok(Some(stripe)),
                // It is in use now.
                Some(true) => {}
                Some(false) | None => _ = written.insert(stripe),
            }
        }
    }

    /// True if nothing is written in a stripe; none if its page of the table is lost, so that nobody can use
    /// it. That is so, and its group is in memory, until the next wait.
    async fn is_unwritten(&self, stripe: u64) -> Result<Option<bool>, ChunkError> {
        loop {
            let is_unwritten = match self.volumes.knows_unwritten(stripe) {
                None => match self.volumes.is_unwritten(stripe).await {
                    Ok(_) => continue,
                    Err(ChunkError::Array(ArrayError::Damaged { .. })) => None,
                    Err(error) => return Err(error),
                },
                known => known,
            };
            if self.is_loaded(stripe) {
                return Ok(is_unwritten);
            }
            self.load_of(stripe).await?;
        }
    }

    /// Frees runs for allocation whose blocks a durable commit has given up, and adds the stripes that are
    /// empty now to the idle ones.
    pub(crate) fn give_back(&self, runs: Vec<Run>) {
        self.free_by(runs, Space::free);
    }

    /// The same for runs that were allocated and never committed.
    pub(crate) fn give_back_uncommitted(&self, runs: Vec<Run>) {
        self.free_by(runs, Space::free_uncommitted);
    }

    fn free_by(&self, runs: Vec<Run>, free: impl Fn(&mut Space, Run) -> Vec<u64>) {
        let empty: Vec<u64> = {
            let mut space = self.space.borrow_mut();
            let freed: Vec<u64> = runs.into_iter().flat_map(|run| free(&mut space, run)).collect();
            // A start after the return of the lender finds the others.
            freed.into_iter().filter(|stripe| !space.is_away(*stripe)).collect()
        };
        if self.idle.borrow_mut().add(empty) {
            self.has_idle.notify_one();
        }
    }

    /// A loan of which no block is used ends.
    pub(crate) fn end_loan(&self, group: u64) -> Borrowed {
        let borrowed = self.space.borrow_mut().end_loan(group);
        self.forget_stripes_of(group);
        borrowed
    }

    /// The lender of a loan is away: nothing is written or discarded there.
    pub(crate) fn loan_is_away(&self, group: u64) {
        self.space.borrow_mut().set_away(group);
        self.forget_stripes_of(group);
    }

    /// A loan ends, whatever was used of it: its lender does not have it.
    pub(crate) fn drop_loan(&self, group: u64) {
        _ = self.space.borrow_mut().drop_loan(group);
        self.forget_stripes_of(group);
    }

    /// None of the stripes of a group is idle any more.
    fn forget_stripes_of(&self, group: u64) {
        let stripes = self.space.borrow().groups().stripes_of(group..group + 1);
        self.idle.borrow_mut().forget(stripes);
    }

    /// Discards stripes that have rested, one batch at a time, until the target is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        loop {
            while self.idle.borrow().is_empty() && !self.closed.get() {
                self.has_idle.notified().await;
            }
            self.env.sleep(REST).await;
            while !self.closed.get() {
                match self.discard_some(Discard::OnDrives, 0..u64::MAX).await {
                    Ok(0) => break,
                    Ok(_) => self.env.sleep(PAUSE).await,
                    Err(ChunkError::Array(ArrayError::Closed)) => return,
                    // The stripes are still in [`Idle`].
                    Err(error) => {
                        tracing::warn!(%error, "free stripes could not be discarded; it will be tried again");
                        break;
                    }
                }
            }
            if self.closed.get() {
                return;
            }
            self.idle.borrow_mut().age();
        }
    }

    /// Takes an empty stripe for a write of a full chunk, preferably one that was written before. `None` if
    /// no stripe is empty, or if too few blocks are free beside the reservations of others; `mine` blocks are
    /// reserved for this write.
    pub(crate) async fn take_empty_stripe(
        &self,
        mine: u64,
        source: Source,
    ) -> Result<Option<u64>, ChunkError> {
        for range in self.sources(source) {
            let stripe = self.take_empty_within(mine, range).await?;
            if stripe.is_some() {
                return Ok(stripe);
            }
        }
        Ok(None)
    }

    /// The same for the stripes of some groups.
    async fn take_empty_within(&self, mine: u64, range: Range<u64>) -> Result<Option<u64>, ChunkError> {
        self.compare().await?;
        let within = self.space.borrow().groups().stripes_of(range.clone());
        // Nothing is awaited between this test and the allocation that relies on it.
        let has_space = || self.space.borrow().has_beside_reservations(self.volumes.stripe_blocks(), mine);
        let take = async |stripe: u64| {
            let is_unwritten = self.is_unwritten(stripe).await? == Some(true);
            Ok::<_, ChunkError>(is_unwritten && has_space() && self.space.borrow_mut().take_stripe(stripe))
        };
        let mut written = BTreeSet::new();
        while has_space() {
            let reusable =
                self.idle.borrow_mut().take_reusable(within.clone(), |stripe| self.is_ready(stripe));
            if let Some(stripe) = reusable {
                match take(stripe).await {
                    Ok(true) => return Ok(Some(stripe)),
                    Ok(false) if has_space() => continue,
                    not_taken => {
                        self.idle.borrow_mut().add_reusable(stripe..stripe + 1);
                        return not_taken.map(|_| None);
                    }
                }
            }
            if self.discard_some(Discard::InTable, within.clone()).await? == 0 {
                let may_be_unwritten = |stripe: u64| {
                    !written.contains(&stripe)
                        && self.is_ready(stripe)
                        && self.volumes.knows_unreadable(stripe) != Some(true)
                        && self.volumes.knows_unwritten(stripe) != Some(false)
                };
                let Some(stripe) = self.last_empty(may_be_unwritten, range.clone()).await? else { break };
                if take(stripe).await? {
                    return Ok(Some(stripe));
                }
                written.insert(stripe);
            }
        }
        Ok(None)
    }

    /// True if a write to a stripe or its discard does not wait for the lender.
    fn is_ready(&self, stripe: u64) -> bool {
        !self.volumes.is_suspended(stripe)
    }

    /// The last empty stripe of some groups for which `usable` is true.
    async fn last_empty(
        &self,
        usable: impl Fn(u64) -> bool,
        range: Range<u64>,
    ) -> Result<Option<u64>, ChunkError> {
        let mut until = range.end;
        loop {
            let last = self.space.borrow().last_usable_group(until);
            let Some(group) = last.filter(|group| range.contains(group)) else { return Ok(None) };
            self.load(group).await?;
            let found = self.space.borrow().last_empty_in(group, &usable);
            if found.is_some() {
                return Ok(found);
            }
            self.space.borrow_mut().set_unusable(group, Use::FullChunk);
            until = group;
        }
    }

    /// Discards one run of idle stripes of a range: any with [`Discard::InTable`], else only rested ones.
    /// Returns the number of stripes available or discarded; 0 if none may be discarded.
    async fn discard_some(&self, how: Discard, within: Range<u64>) -> Result<u64, ChunkError> {
        // A stripe without a bit may have blocks of a file.
        self.compare().await?;
        let _one = self.discarding.lock().await;
        let found = self.idle.borrow().reusable_count(within.clone(), |stripe| self.is_ready(stripe));
        if how == Discard::InTable && found > 0 {
            // A caller that had the lock before discarded these in the table.
            return Ok(found);
        }
        let per_stripe = self.volumes.stripe_blocks();
        let Some((first, count)) = self.take_idle(how, within).await? else { return Ok(0) };
        assert!((1..=BATCH).contains(&count), "a batch of {count} stripes");
        self.space.borrow_mut().set_discarding(count * per_stripe);
        let result = self.volumes.discard(first, count, how).await;
        self.space.borrow_mut().set_discarding(0);
        _ = self.space.borrow_mut().free_uncommitted((first * per_stripe, count * per_stripe));
        let mut idle = self.idle.borrow_mut();
        let left = match result {
            Ok(left) => left,
            Err(error) => {
                idle.put_back(first..first + count);
                return Err(error);
            }
        };
        if how == Discard::InTable {
            let done = (first..first + count).filter(|stripe| !left.contains(stripe));
            done.for_each(|stripe| idle.add_reusable(stripe..stripe + 1));
        }
        self.discarded_stripes.set(self.discarded_stripes.get() + count);
        Ok(count)
    }

    /// Takes the first run of idle stripes of a range that are still empty, as first stripe and count.
    async fn take_idle(&self, how: Discard, within: Range<u64>) -> Result<Option<(u64, u64)>, ChunkError> {
        let per_stripe = self.volumes.stripe_blocks();
        let mut run: Option<(u64, u64)> = None;
        loop {
            let mut next = None;
            if let Some(stripe) = self
                .idle
                .borrow_mut()
                .source(how)
                .range(within.clone())
                .find(|stripe| self.is_ready(**stripe))
            {
                next = Some(*stripe);
            }
            let Some(stripe) = next else { return Ok(run) };
            if run.is_some_and(|(first, count)| first + count != stripe || count == BATCH) {
                return Ok(run);
            }
            if !self.is_loaded(stripe) {
                match self.load_of(stripe).await {
                    Ok(()) => continue,
                    // The stripes that were taken are in no set any more.
                    Err(_) if run.is_some() => return Ok(run),
                    Err(error) => return Err(error),
                }
            }
            let mut space = self.space.borrow_mut();
            if space.usage().free_blocks < per_stripe {
                // All free blocks are reserved for writes.
                return Ok(run);
            }
            self.idle.borrow_mut().source(how).remove(&stripe);
            if space.take_stripe(stripe) {
                let taken = run.map_or((stripe, 1), |(first, count)| (first, count + 1));
                space.set_discarding(taken.1 * per_stripe);
                run = Some(taken);
            }
        }
    }
}

#[cfg(test)]
mod tests;
