//! Loans between targets. A target that is full uses stripes on the volume of another one, the lender, like
//! its own: the blocks of a loan are an allocation group of the borrower, and only the borrower's rows say
//! which file has them. The lender has them marked as used, and knows the borrower and the number of the
//! loan.
//!
//! Invariants:
//! - a loan that the borrower's rows name is durable in the lender's rows: it is lent durably before the
//!   borrower uses it, and taken back after the borrower's row is gone durably;
//! - a number is never given twice, so a repeated or late request concerns no other loan;
//! - the volume of a lender is read and written only for loans that both sides know alike;
//! - nobody waits for a lender for ever: it may never answer, or refuse writes, while others have space.
//!
//! Power cut: a loan that only the lender has ends when both have opened again
//! ([`Lending::end_unknown_loans`]). So does one whose lender answered too late.

use crate::ChunkError;
use crate::allocator::{Allocator, Source};
use crate::between::Between;
use crate::commit::Commits;
use crate::free::{Run, Space, blocks_of, fits, is_on, may_be_borrowed, runs_of};
use crate::ranks;
use crate::rows::{Borrowed, Counter, GROUP_WORDS, Lent, LentKey, Loan, all_counters, all_lent, all_loans};
use crate::volumes::Volumes;
use penstock_base::env::timeout;
use penstock_base::num::to_u32;
use penstock_base::rank::{RankedMutex, scoped};
use penstock_base::{Env, TargetId};
use penstock_kv::{Kv, WriteSet, for_each};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};
use std::time::Duration;

/// Numbers of loans that are recorded at the same time.
const NUMBERS: u64 = 1024;
/// A loan has at most this part of what its lender has free, unless that is too little for a write.
const PART: u64 = 16;
/// Shortest time for which a loan is kept of which no block is used. The longest is twice that.
const REST: Duration = Duration::from_secs(5);
/// Delay before another look at lenders that are suspended.
const RETRY: Duration = Duration::from_secs(1);
/// Time in which another target does its part of a loan. It goes on after that, and nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(5);

/// The loans of a target in both directions.
pub(crate) struct Lending {
    id: TargetId,
    env: Env,
    kv: Rc<dyn Kv>,
    volumes: Rc<Volumes>,
    allocator: Rc<Allocator>,
    commits: Rc<Commits>,
    /// Loans that others have from this target.
    lent: RefCell<BTreeMap<LentKey, Lent>>,
    /// The other targets.
    others: RefCell<BTreeMap<TargetId, Weak<Self>>>,
    /// None if the row cannot be read.
    numbers: Cell<Option<Numbers>>,
    /// All rows of loans that this target has can be read.
    knows_all: Cell<bool>,
    /// Loans that this target does not have are to be ended once all of its rows were compared.
    ends_later: Cell<bool>,
    /// Groups of loans whose lender is suspended.
    waits: RefCell<BTreeSet<u64>>,
    /// Locked while a loan begins or ends.
    changing: RankedMutex<()>,
    /// Loans from others of which one side has done its part.
    between: Rc<Between>,
    /// The groups of loans that were unused at the last look.
    unused: RefCell<BTreeSet<u64>>,
}

/// The outcome of an attempt to borrow.
enum Attempt {
    /// There is more space now.
    Taken,
    /// Targets that may have enough are suspended.
    Later,
    /// Nobody has enough.
    Refused,
}

/// The numbers of the loans of a target.
#[derive(Clone, Copy, Default)]
struct Numbers {
    /// The last one that was given.
    last: u64,
    /// The last one that is recorded.
    recorded: u64,
    /// Unknown loans up to this one may have been forgotten by a restore.
    forgotten: u64,
    /// Rows may name blocks of loans that were dropped, and nobody has looked.
    has_dropped: bool,
}

impl Numbers {
    /// The row.
    fn put(self, writes: &mut WriteSet) {
        let Self { recorded: last, forgotten, has_dropped, .. } = self;
        let (key, value) = Counter::Loans { last, forgotten, has_dropped }.encode();
        writes.put(key, value);
    }
}

/// Puts the loans of a target into its space. Returns false if some row of one cannot be read.
pub(crate) async fn load_loans(kv: &dyn Kv, space: &mut Space) -> Result<bool, ChunkError> {
    let (groups, mut knows_all) = (space.groups(), true);
    for_each(kv, all_loans(), |key, value| {
        match (Borrowed::group_of(key), Borrowed::decode(value)) {
            (Ok(group), Ok((borrowed, bits)))
                if may_be_borrowed(group, groups) && fits(&borrowed.loan, groups) =>
            {
                space.add_loan(group, borrowed, &bits);
            }
            // A check reports it.
            (group, borrowed) => {
                knows_all = false;
                tracing::error!(?group, ?borrowed, "a loan cannot be read: `penstock fs check`");
            }
        }
        Ok::<_, ChunkError>(())
    })
    .await?;
    Ok(knows_all)
}

impl Lending {
    /// The loans of a target, which has its own in its space: all of them, or those that can be read.
    pub(crate) async fn load(
        id: TargetId,
        commits: &Rc<Commits>,
        knows_all: bool,
    ) -> Result<Rc<Self>, ChunkError> {
        let Commits { env, kv, volumes, allocator, .. } = &**commits;
        let loans = allocator.space().loans().clone();
        for (group, borrowed) in loans {
            volumes.add_loan(group, &borrowed);
            allocator.space_mut().set_away(group);
        }
        let (mut lent, mut numbers) = (BTreeMap::new(), Some(Numbers::default()));
        let groups = allocator.space().groups();
        for_each(&**kv, all_lent(), |key, value| {
            match (LentKey::decode(key), Lent::decode(value)) {
                (Ok(key), Ok(value)) if is_on(&value.loan, groups) => drop(lent.insert(key, value)),
                (key, value) => {
                    tracing::error!(
                        ?key,
                        ?value,
                        "a loan to another target cannot be read: `penstock fs check`"
                    );
                }
            }
            Ok::<_, ChunkError>(())
        })
        .await?;
        for_each(&**kv, all_counters(), |key, value| {
            numbers = match Counter::decode(key, value) {
                Ok(Counter::Loans { last, forgotten, has_dropped }) => {
                    Some(Numbers { last, recorded: last, forgotten, has_dropped })
                }
                other => {
                    tracing::error!(?other, "the number of the last loan cannot be read: none is taken");
                    None
                }
            };
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok(Rc::new(Self {
            id,
            env: env.clone(),
            kv: kv.clone(),
            volumes: volumes.clone(),
            allocator: allocator.clone(),
            commits: commits.clone(),
            lent: RefCell::new(lent),
            others: RefCell::default(),
            numbers: Cell::new(numbers),
            knows_all: Cell::new(knows_all),
            ends_later: Cell::new(false),
            waits: RefCell::default(),
            changing: RankedMutex::new(ranks::LOAN, ()),
            between: Rc::default(),
            unused: RefCell::default(),
        }))
    }

    /// The other targets that serve.
    fn others(&self) -> Vec<Rc<Self>> {
        let all = self.others.borrow();
        all.values().filter_map(Weak::upgrade).filter(|other| !other.commits.is_stopped()).collect()
    }

    /// Another target, if it serves.
    fn other(&self, id: TargetId) -> Option<Rc<Self>> {
        let other = self.others.borrow().get(&id).and_then(Weak::upgrade);
        other.filter(|other| !other.commits.is_stopped())
    }

    /// The free blocks of the own volume beside its headroom.
    fn may_lend_blocks(&self) -> u64 {
        let (usage, space) = (self.allocator.usage(), self.allocator.space());
        let blocks =
            usage.available_blocks().min(space.free_of_volume().saturating_sub(usage.headroom_blocks));
        assert!(blocks <= self.volumes.own().blocks(), "{blocks} blocks are of the own volume");
        blocks
    }

    /// True if whoever asks this target for something would wait for its drives.
    fn is_suspended(&self) -> bool {
        self.volumes.own().array().suspended().is_some()
    }

    /// True if its volume takes no data, and nobody can say when it will.
    fn refuses_data(&self) -> bool {
        self.volumes.own().array().refuses_data()
    }

    /// Lender and number of the loans from others that may have no row here: those in memory, and those of
    /// which one side has done its part.
    pub(crate) fn may_lack_rows(&self) -> BTreeSet<(TargetId, u64)> {
        let space = self.allocator.space();
        let in_memory = space.loans().values().map(|loan| (loan.lender, loan.number));
        in_memory.chain(self.between.all()).collect()
    }

    /// Has another target do its part of a loan with this number, in a task that goes on if nobody waits for
    /// it any more. None if it has not done it in time, or failed: then what it has ends later.
    async fn ask<T: 'static>(
        &self,
        other: TargetId,
        number: u64,
        part: impl Future<Output = Result<T, ChunkError>> + 'static,
    ) -> Option<T> {
        let (sender, answer) = tokio::sync::oneshot::channel();
        let asked = self.between.ask(other, number);
        let part = async move {
            let result = part.await;
            // It is known before somebody who has waited goes on.
            drop(asked);
            _ = sender.send(result);
        };
        self.env.spawn("target loan", Box::pin(scoped(part)));
        match timeout(&self.env, PATIENCE, answer).await {
            Some(Ok(Ok(done))) => {
                self.between.agreed(other, number);
                return Some(done);
            }
            Some(Ok(Err(error))) => tracing::warn!(lender = %other, %error, "a lender could not do its part"),
            Some(Err(_)) | None => tracing::warn!(lender = %other, "a lender does not answer"),
        }
        self.ends_later.set(true);
        None
    }

    /// True if rows may name blocks of loans that a repair has dropped, and nobody has looked since.
    pub(crate) fn has_dropped(&self) -> bool {
        self.numbers.get().is_none_or(|numbers| numbers.has_dropped)
    }

    /// True if all loans of this target are known, and no row names blocks of a group without one, which the
    /// next loan would give to others.
    pub(crate) fn is_settled(&self) -> bool {
        self.knows_all.get() && !self.has_dropped() && !self.allocator.has_strays()
    }

    /// The same, once all rows were compared, if they must be.
    async fn settle(&self) -> Result<bool, ChunkError> {
        self.allocator.compare().await?;
        if self.has_dropped() {
            let _changing = self.changing.lock().await;
            let _change = self.commits.gate.change().await;
            self.clear_dropped().await?;
        }
        Ok(self.is_settled())
    }

    /// Records that no row names blocks of a loan that was dropped, if that is so. Nothing else changes loans
    /// meanwhile.
    async fn clear_dropped(&self) -> Result<(), ChunkError> {
        if self.knows_all.get()
            && !self.allocator.has_strays()
            && let Some(numbers) = self.numbers.get().filter(|numbers| numbers.has_dropped)
        {
            let (now, mut writes) = (Numbers { has_dropped: false, ..numbers }, WriteSet::new());
            writes.changes_what_is_there();
            now.put(&mut writes);
            self.kv.commit_durable(writes).await?;
            self.numbers.set(Some(now));
        }
        Ok(())
    }

    /// A repair, which has the gate for itself, has looked at all rows: it can read those of all loans, and
    /// no other names blocks of a group without one.
    pub(crate) async fn set_settled(&self) -> Result<(), ChunkError> {
        self.knows_all.set(true);
        self.allocator.set_strays(false);
        self.clear_dropped().await
    }

    /// The row that says that rows may name blocks of a loan that is dropped with it.
    pub(crate) fn put_dropped(&self, writes: &mut WriteSet) {
        // Without numbers that can be read no loan begins.
        if let Some(numbers) = self.numbers.get() {
            Numbers { has_dropped: true, ..numbers }.put(writes);
        }
    }

    /// The same in memory.
    pub(crate) fn set_dropped(&self) {
        self.allocator.set_strays(true);
        self.numbers.set(self.numbers.get().map(|numbers| Numbers { has_dropped: true, ..numbers }));
    }

    /// The row with the numbers is made again: these up to `last` may have been given.
    pub(crate) async fn set_numbers(&self, last: u64) -> Result<(), ChunkError> {
        let numbers = Numbers { last, recorded: last, forgotten: last, has_dropped: true };
        let mut writes = WriteSet::new();
        writes.reclaims();
        numbers.put(&mut writes);
        self.kv.commit_durable(writes).await?;
        self.allocator.set_strays(true);
        self.numbers.set(Some(numbers));
        Ok(())
    }

    /// A repair has changed the row of a loan to another target; none if it was deleted.
    pub(crate) fn put(&self, key: LentKey, lent: Option<Lent>) {
        let mut all = self.lent.borrow_mut();
        match lent {
            Some(lent) => drop(all.insert(key, lent)),
            None => drop(all.remove(&key)),
        }
    }

    /// A number for a loan, recorded durably.
    async fn number(&self) -> Result<u64, ChunkError> {
        let Some(mut numbers) = self.numbers.get() else {
            return Err(ChunkError::Invalid("the number of the last loan cannot be read".into()));
        };
        numbers.last += 1;
        if numbers.last > numbers.recorded {
            numbers.recorded = numbers.last + NUMBERS;
            assert!(!numbers.has_dropped, "no loan begins before somebody has looked");
            let mut writes = WriteSet::new();
            // A loan is what makes space.
            writes.changes_what_is_there();
            numbers.put(&mut writes);
            self.kv.commit_durable(writes).await?;
        }
        self.numbers.set(Some(numbers));
        Ok(numbers.last)
    }

    /// The numbers of the loans that another target has.
    fn numbers_of(&self, borrower: TargetId) -> Vec<u64> {
        let lent = self.lent.borrow();
        lent.keys().filter(|key| key.borrower == borrower).map(|key| key.number).collect()
    }

    /// True if another target has exactly this loan.
    fn has_lent(&self, borrower: TargetId, group: u64, borrowed: &Borrowed) -> bool {
        let key = LentKey { borrower, number: borrowed.number };
        self.lent.borrow().get(&key).is_some_and(|lent| lent.is(group, &borrowed.loan))
    }

    /// Gets to know the other targets of the pool that serve: those that may lend to this one. Loans of
    /// others cannot be used, nor loans that the lender does not have.
    pub(crate) fn meet(self: &Rc<Self>, others: &[Rc<Self>]) {
        let own = self.id;
        assert!(others.iter().all(|other| other.id != own), "{own} is no other target");
        for other in others {
            self.volumes.add_lender(other.id, other.volumes.own());
            self.others.borrow_mut().insert(other.id, Rc::downgrade(other));
        }
        // A restore may have forgotten some.
        let lent: Vec<u64> = others.iter().flat_map(|other| other.numbers_of(own)).collect();
        if let Some(numbers) = self.numbers.get() {
            let last = lent.into_iter().fold(numbers.last, u64::max);
            self.numbers.set(Some(Numbers { last, ..numbers }));
        }
        let loans = self.allocator.space().loans().clone();
        for (group, borrowed) in &loans {
            let lender = others.iter().find(|other| other.id == borrowed.lender);
            match lender.map(|lender| lender.has_lent(own, *group, borrowed)) {
                Some(true) => assert!(self.lender_has(*group), "its lender serves"),
                Some(false) => {
                    tracing::error!(target = %own, ?borrowed, "the lender does not know of a loan: `penstock fs check`");
                }
                None => {
                    tracing::error!(target = %own, lender = %borrowed.lender, "the lender of a loan is away")
                }
            }
        }
        if !loans.is_empty() {
            self.allocator.sweep_loans();
        }
        if !others.is_empty() {
            let (env, lending) = (self.env.clone(), Rc::downgrade(self));
            self.env.spawn("target loans", Box::pin(scoped(look_after(env, lending))));
        }
    }

    /// The lender of a loan knows of it. Returns true if it serves too: then the blocks can be used.
    pub(crate) fn lender_has(&self, group: u64) -> bool {
        let is_there = self.volumes.lender_has(group);
        if is_there {
            self.allocator.space_mut().set_there(group);
        }
        is_there
    }

    /// Another target does not serve any more.
    pub(crate) fn part(&self, other: TargetId) {
        self.others.borrow_mut().remove(&other);
        self.volumes.remove_lender(other);
        let loans = self.allocator.space().loans().clone();
        for (group, _) in loans.iter().filter(|(_, borrowed)| borrowed.lender == other) {
            self.allocator.loan_is_away(*group);
        }
    }

    /// Has other targets end the loans that this one does not have: a crash has kept it from using them, or
    /// them from taking them back. That waits if rows are to be compared first, which may name their blocks.
    pub(crate) async fn end_unknown_loans(&self) -> Result<(), ChunkError> {
        let own = self.id;
        self.ends_later.set(!self.allocator.is_compared());
        if self.ends_later.get() {
            return Ok(());
        }
        let Some(numbers) = self.numbers.get().filter(|_| self.is_settled()) else {
            tracing::warn!(target = %own, "some loans cannot be read, so none is ended: `penstock fs check --repair`");
            return Ok(());
        };
        let _changing = self.changing.lock().await;
        let has: BTreeSet<(TargetId, u64)> =
            self.allocator.space().loans().values().map(|loan| (loan.lender, loan.number)).collect();
        for other in self.others() {
            if other.is_suspended() || self.between.is_asked(other.id) {
                self.ends_later.set(true);
                continue;
            }
            let may_end = |(key, lent): &(&LentKey, &Lent)| {
                key.borrower == own && key.number > numbers.forgotten && !lent.is_restored
            };
            let lent: Vec<LentKey> =
                other.lent.borrow().iter().filter(may_end).map(|(key, _)| *key).collect();
            for key in lent {
                if !has.contains(&(other.id, key.number)) {
                    tracing::info!(lender = %other.id, ?key, "a loan ends that a crash has kept from being used");
                    if self.ask(other.id, key.number, other.clone().take_back(key)).await.is_none() {
                        break;
                    }
                }
            }
            let ended = |number| {
                let key = LentKey { borrower: own, number };
                !other.lent.borrow().contains_key(&key)
            };
            self.between.forget_ended(other.id, ended);
        }
        Ok(())
    }

    /// Blocks that this target has on loan, and blocks that others have from it.
    pub(crate) fn blocks(&self) -> (u64, u64) {
        let per_stripe = self.volumes.stripe_blocks();
        let lent = self.lent.borrow();
        let lent = lent.values().map(|lent| blocks_of(&lent.loan, per_stripe)).sum();
        (self.allocator.space().borrowed_blocks(), lent)
    }

    /// Does something that needs space. If there is too little, freed blocks are made available, then others
    /// are asked for loans. Waits for those that are suspended, if the others have too little: it would wait
    /// for the own drives too.
    pub(crate) async fn with_space<T>(
        &self,
        mut act: impl AsyncFnMut() -> Result<T, ChunkError>,
    ) -> Result<T, ChunkError> {
        let (mut result, mut has_waited) = (self.with_own_space(&mut act).await, false);
        while let Err(ChunkError::NoSpace { wanted_blocks, .. }) = result {
            let attempt = self.borrow(wanted_blocks).await.unwrap_or_else(|error| {
                tracing::error!(target = %self.id, %error, "nothing can be borrowed");
                Attempt::Refused
            });
            result = match attempt {
                Attempt::Taken => act().await,
                Attempt::Later if !self.commits.is_stopped() => {
                    if !std::mem::replace(&mut has_waited, true) {
                        tracing::warn!(target = %self.id, "a write waits for the space of suspended targets");
                    }
                    self.env.sleep(RETRY).await;
                    self.with_own_space(&mut act).await
                }
                Attempt::Later | Attempt::Refused => break,
            };
        }
        result
    }

    /// The same without loans.
    pub(crate) async fn with_own_space<T>(
        &self,
        mut act: impl AsyncFnMut() -> Result<T, ChunkError>,
    ) -> Result<T, ChunkError> {
        match act().await {
            Err(ChunkError::NoSpace { .. }) => {
                if let Err(error) = self.commits.make_space().await {
                    if self.others.borrow().is_empty() {
                        return Err(error);
                    }
                    tracing::warn!(%error, "a commit of all files for their freed blocks failed");
                }
                act().await
            }
            result => result,
        }
    }

    /// Takes a loan, or finds that so many blocks can be reserved now.
    async fn borrow(&self, wanted: u64) -> Result<Attempt, ChunkError> {
        let may_lend = self.others().into_iter().filter(|other| !other.refuses_data());
        let waits = |other: &Rc<Self>| other.is_suspended() || self.between.is_asked(other.id);
        let (suspended, others): (Vec<_>, Vec<_>) = may_lend.partition(waits);
        // The group of a loan that is not known may be the next one.
        if suspended.is_empty() && others.is_empty() || !self.settle().await? {
            return Ok(Attempt::Refused);
        }
        let _changing = self.changing.lock().await;
        // Others may have borrowed meanwhile. What cannot be allocated is not promised again, so this ends.
        if self.allocator.reserve(wanted).is_ok() {
            self.allocator.release(wanted);
            return Ok(Attempt::Taken);
        }
        let usage = self.allocator.usage();
        let lacking = (wanted + usage.headroom_blocks).saturating_sub(usage.free_blocks).max(1);
        let mut lenders: Vec<(u64, Rc<Self>)> =
            others.into_iter().map(|other| (other.may_lend_blocks(), other)).collect();
        let (there, later) = (
            lenders.iter().map(|(available, _)| available).sum::<u64>(),
            suspended.iter().map(|other| other.may_lend_blocks()).sum::<u64>(),
        );
        let unless_there_is_later = |enough: bool| match enough || self.has_loans_that_go_on() {
            true => Ok(Attempt::Later),
            false => Ok(Attempt::Refused),
        };
        if there < lacking {
            return unless_there_is_later(there + later >= lacking);
        }
        lenders.sort_by_key(|(available, _)| std::cmp::Reverse(*available));
        // Larger and larger ones, so that they stay few.
        let aim = lacking.max(self.allocator.space().borrowed_blocks() / 8);
        for (_, lender) in lenders {
            let number = self.number().await?;
            let (key, group) = (LentKey { borrower: self.id, number }, self.group_for_loan());
            if !may_be_borrowed(group, self.volumes.groups()) {
                tracing::warn!(target = %self.id, group, "no more loans are taken");
                return Ok(Attempt::Refused);
            }
            let lend = lender.clone().lend(key, group, (lacking, aim));
            if let Some(Some(loan)) = self.ask(lender.id, number, lend).await {
                self.add_loan(group, Borrowed { lender: lender.id, number, loan });
                return Ok(Attempt::Taken);
            }
        }
        unless_there_is_later(later >= lacking)
    }

    fn group_for_loan(&self) -> u64 {
        self.allocator.space().group_for_loan()
    }

    fn add_loan(&self, group: u64, borrowed: Borrowed) {
        tracing::info!(target = %self.id, group, ?borrowed, "blocks were borrowed");
        self.volumes.add_loan(group, &borrowed);
        self.allocator.space_mut().add_loan(group, borrowed, &[0; GROUP_WORDS]);
        assert!(self.lender_has(group), "its lender serves");
    }

    /// True if a loan waits for a lender that goes on some time.
    fn has_loans_that_go_on(&self) -> bool {
        let (waits, space) = (self.waits.borrow(), self.allocator.space());
        let lender_of = |group| self.other(space.loans().get(group)?.lender);
        waits.iter().filter_map(lender_of).any(|lender| !lender.refuses_data())
    }

    /// Lends up to `aim` blocks and if possible `wanted` ones, durably; none if nothing can be lent.
    async fn lend(
        self: Rc<Self>,
        key: LentKey,
        group: u64,
        (wanted, aim): (u64, u64),
    ) -> Result<Option<Loan>, ChunkError> {
        if self.lent.borrow().contains_key(&key) {
            return Err(ChunkError::Invalid(format!("{key:?} is another loan")));
        }
        let change = self.commits.gate.change().await;
        let (groups, per_stripe) = (self.allocator.space().groups(), self.volumes.stripe_blocks());
        let available = self.may_lend_blocks();
        let blocks = aim.min((available / PART).max(wanted)).min(available).min(groups.blocks_each());
        let stripes = match blocks < per_stripe && available >= per_stripe {
            true => 1,
            false => blocks / per_stripe,
        };
        let (loan, run) = match self.take_stripes(stripes).await? {
            Some((stripe, count)) => {
                let loan = Loan { stripe, stripes: to_u32(count), gaps: Vec::new() };
                (loan, (stripe * per_stripe, count * per_stripe))
            }
            None => match self.take_rest(blocks.min(per_stripe)).await? {
                Some((block, count)) => {
                    let stripe = block / per_stripe;
                    let (at, end) = (to_u32(block % per_stripe), to_u32(block % per_stripe + count));
                    let gaps = [(0, at), (end, to_u32(per_stripe) - end)];
                    let gaps = gaps.into_iter().filter(|(_, count)| *count > 0).collect();
                    (Loan { stripe, stripes: 1, gaps }, (block, count))
                }
                None => return Ok(None),
            },
        };
        assert_eq!(runs_of(&loan, per_stripe), [run], "{loan:?}");
        let mut writes = WriteSet::new();
        let lent = Lent { group, loan: loan.clone(), is_restored: false };
        writes.put(key.row(), lent.encode());
        self.commits.commit_runs(vec![run], &[], writes).await?;
        // If this fails, it is known here, and ends at the next start.
        self.lent.borrow_mut().insert(key, lent);
        drop(change);
        self.kv.flush().await?;
        Ok(Some(loan))
    }

    /// Takes empty stripes that follow each other, at most `most`: the first one and their number.
    async fn take_stripes(&self, most: u64) -> Result<Option<Run>, ChunkError> {
        let per_stripe = self.volumes.stripe_blocks();
        let mut taken: Option<Run> = None;
        while taken.map_or(0, |(_, count)| count) < most && self.may_lend_blocks() >= per_stripe {
            let stripe = match self.allocator.take_empty_stripe(0, Source::Own).await {
                Ok(Some(stripe)) => stripe,
                Err(error) if taken.is_none() => return Err(error),
                _ => break,
            };
            taken = match taken {
                None => Some((stripe, 1)),
                Some((first, count)) if stripe + 1 == first => Some((stripe, count + 1)),
                Some((first, count)) if first + count == stripe => Some((first, count + 1)),
                _ => {
                    self.allocator.give_back_uncommitted(vec![(stripe * per_stripe, per_stripe)]);
                    break;
                }
            };
        }
        Ok(taken)
    }

    /// Takes free blocks of a stripe that has some, at most `most`.
    async fn take_rest(&self, most: u64) -> Result<Option<Run>, ChunkError> {
        if most == 0 || self.allocator.reserve(most).is_err() {
            return Ok(None);
        }
        let taken = self.allocator.allocate_reserved(most, Source::Own).await;
        self.allocator.release(most);
        match taken {
            Err(ChunkError::NoSpace { .. }) => Ok(None),
            taken => taken.map(Some),
        }
    }

    /// Ends a loan that its borrower does not have any more. One that is not known has ended before. The
    /// caller has passed the gate.
    async fn take_back(self: Rc<Self>, key: LentKey) -> Result<(), ChunkError> {
        let change = self.commits.gate.change().await;
        let lent = self.lent.borrow().get(&key).cloned();
        let Some(Lent { loan, .. }) = lent else { return Ok(()) };
        let mut writes = WriteSet::new();
        writes.changes_what_is_there();
        writes.delete(key.row());
        self.commits.commit_runs(Vec::new(), &runs_of(&loan, self.volumes.stripe_blocks()), writes).await?;
        self.lent.borrow_mut().remove(&key);
        drop(change);
        self.commits.sync().await
    }

    /// The work of every few seconds.
    async fn look(&self) -> Result<(), ChunkError> {
        for lender in self.volumes.take_lost() {
            tracing::error!(target = %self.id, %lender, "a lender does not serve any more");
            self.part(lender);
        }
        self.see_suspended();
        // A block that files have may be marked as free before.
        if !self.allocator.is_compared() || !self.allocator.is_swept() {
            return Ok(());
        }
        if self.has_dropped() {
            self.settle().await?;
        }
        if self.ends_later.get() {
            self.end_unknown_loans().await?;
        }
        self.return_unused_loans().await
    }

    /// Free blocks of a lender that is suspended or refuses data count as used until it goes on: others may
    /// have space.
    fn see_suspended(&self) {
        let mut goes_on = false;
        let loans = self.allocator.space().loans().clone();
        self.waits.borrow_mut().retain(|group| loans.contains_key(group));
        for (group, Borrowed { lender, .. }) in loans {
            let is_suspended =
                self.other(lender).is_some_and(|other| other.is_suspended() || other.refuses_data());
            if !self.volumes.is_there(group) {
                // Its lender is away, or does not know of it.
                self.waits.borrow_mut().remove(&group);
            } else if is_suspended && self.waits.borrow_mut().insert(group) {
                self.allocator.loan_is_away(group);
            } else if !is_suspended && self.waits.borrow_mut().remove(&group) {
                self.allocator.space_mut().set_there(group);
                goes_on = true;
            }
        }
        if goes_on {
            self.allocator.sweep_loans();
        }
    }

    /// Gives loans back of which no block was used for a while.
    async fn return_unused_loans(&self) -> Result<(), ChunkError> {
        let unused: BTreeSet<u64> = self.allocator.space().idle_loans().into_iter().collect();
        let before = self.unused.replace(unused.clone());
        for group in unused.intersection(&before) {
            self.return_loan(*group).await?;
        }
        Ok(())
    }

    /// Gives a loan back, if no block of it is used.
    async fn return_loan(&self, group: u64) -> Result<(), ChunkError> {
        let _changing = self.changing.lock().await;
        let change = self.commits.gate.change().await;
        if !self.allocator.space().idle_loans().contains(&group) {
            return Ok(());
        }
        let lender_of = |group| self.allocator.space().loans().get(&group).map(|borrowed| borrowed.lender);
        let lender = lender_of(group).and_then(|id| self.other(id));
        if lender.as_ref().is_some_and(|lender| lender.is_suspended() || self.between.is_asked(lender.id)) {
            return Ok(());
        }
        let borrowed = self.allocator.end_loan(group);
        let mut writes = WriteSet::new();
        writes.changes_what_is_there();
        writes.delete(Borrowed::key(group));
        if let Err(error) = self.kv.commit_durable(writes).await {
            self.allocator.space_mut().add_loan(group, borrowed, &[0; GROUP_WORDS]);
            return Err(error.into());
        }
        self.volumes.end_loan(group);
        tracing::info!(target = %self.id, ?borrowed, "borrowed blocks are given back");
        let key = LentKey { borrower: self.id, number: borrowed.number };
        // Without its lender it ends when both have opened again.
        if let Some(lender) = lender {
            let part = lender.clone().take_back(key);
            // A check that begins then knows that the lender's row is about to go: nothing waits in between.
            drop(change);
            self.ask(lender.id, key.number, part).await;
        }
        Ok(())
    }
}

/// Looks after the loans until the target is gone.
async fn look_after(env: Env, lending: Weak<Lending>) {
    loop {
        env.sleep(REST).await;
        let Some(lending) = lending.upgrade().filter(|lending| !lending.commits.is_stopped()) else { return };
        if let Err(error) = lending.look().await {
            tracing::warn!(%error, "borrowed blocks could not be given back; it will be tried again");
        }
    }
}

#[cfg(test)]
mod tests;
