//! Leases: what this client, and the kernel behind it, may keep of a file while other clients use it too.
//!
//! Every operation on a file's contents holds its lease, shared or exclusive, from before the file's state is looked
//! at until after its reply has gone to the kernel, which puts pages of it into its cache. When the service calls a
//! lease back, the kernel drops its pages, what was written is settled, and then the lease goes.
//!
//! A client that is alone asks for no leases: it holds all. Names and attributes are then kept by the kernel for a
//! moment ([`KernelCache::names_expire`]), and not at all while there are others.
//!
//! The kernel locks a page while it waits for a read of it, or for a write of a part of it, and dropping a page waits
//! for that lock. So while pages are dropped the lease still serves who is in the way ([`crate::pages`]). For the same
//! reason a file that this client has open for writing through its pages is given no shared lease, from which a write
//! would have to wait for an exclusive one; and a read under a shared lease that is called does not wait for the
//! exclusive one that it would ask for otherwise. Nor do the writing back of a page and a change of size, during which
//! the kernel keeps changed pages back ([`Purpose`]): the service sees to it that others drop what the size makes wrong.
//!
//! Invariants:
//! - a lease goes only when nobody holds it, the kernel has no page of the file, and nothing written is unsettled;
//! - of a lease that the service called back, no later grant with a lower number counts;
//! - the state of a file that no lease covers is stale: it is asked for before it is used. Under a shared lease that is
//!   called others may change the size, so a write there is of the truncate generation that it knows, and is made again
//!   where that is an older one.

use crate::file::FileState;
use crate::lease_clock::LeaseClock;
use crate::page_set::PageSet;
use crate::pages::Waiting;
use crate::session::Client;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};
use penstock_base::{HashMap, Ino, LocalBoxFuture, Noted};
use penstock_wire::names::{
    FailedSettle, LeaseCall, LeaseReply, LeaseRequest, ReleasedLease, WatchReply, WatchRequest,
};
use penstock_wire::{Failure, Kind};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore};

/// Files given up at a time.
const MOST_GIVEN_UP: usize = 64;
/// Files at a time whose pages are dropped beside that. Each may wait for a lease, and those that give leases up must not wait
/// for it.
const MOST_SOON: usize = 32;
/// Leases of files that nobody has open, kept because they may be opened again.
const MOST_IDLE: usize = 4096;
/// Between attempts to settle or to reach the service.
const PAUSE: Duration = Duration::from_millis(200);
/// Attempts to settle a file before its lease goes and its writes count as lost: 10 s.
const ATTEMPTS: u32 = 50;

/// What a kernel keeps for a client that is a mount.
pub trait KernelCache {
    /// Drops pages of these bytes of a file; those that programs have changed in memory are written first. Waits for
    /// requests that have such a page locked.
    fn drop_pages(&self, ino: Ino, bytes: Range<u64>) -> LocalBoxFuture<'_, ()>;
    /// Completes when no name and no attribute that was given out before this call is used without asking.
    fn names_expire(&self) -> LocalBoxFuture<'_, ()>;
    /// Drops the pages of files of these sizes that programs see, while nobody answers requests: those that requests have locked stay,
    /// and are not waited for. Where that does not succeed within this time and the lapse `lasts` by then, nothing is served through
    /// the mount any more.
    fn hide_pages<'a>(
        &'a self,
        files: Vec<(Ino, u64)>,
        within: Duration,
        lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()>;
}

#[derive(Default)]
pub(crate) struct Lease {
    /// None, shared or exclusive.
    exclusive: Option<bool>,
    grant: u64,
    /// Grants up to this one are void.
    void: u64,
    pub(crate) users: u64,
    /// Requests that wait for it.
    pub(crate) waiting: Vec<Rc<Waiting>>,
    /// It is on its way back, and serves until it is closed.
    called: bool,
    /// While pages are dropped: nobody is served but who is in the way of that.
    pub(crate) closed: bool,
    asking: bool,
    /// Bytes that are on their way into pages by a notice, which waits for locked pages as dropping them does.
    pub(crate) stores: u64,
    /// Bytes that may be in pages since these began to be dropped.
    pub(crate) served: Option<PageSet>,
    /// The kernel has no page from before this lease.
    clean: bool,
}

impl Lease {
    fn is_used(&self) -> bool {
        self.users > 0 || self.stores > 0 || !self.waiting.is_empty()
    }

    fn covers(&self, exclusive: bool) -> bool {
        self.exclusive.is_some_and(|has| has || !exclusive)
    }

    /// Whether a request is served under a lease that is on its way back, although it would ask for another one otherwise:
    /// the kernel may keep a page for it that must be dropped first.
    fn suffices(&self, purpose: Purpose, let_in: bool) -> bool {
        self.called && self.covers(false) && self.serves(purpose, let_in) && purpose != Purpose::Write
    }

    /// Pages that are being dropped do not stand against a request.
    fn serves(&self, purpose: Purpose, let_in: bool) -> bool {
        !self.closed || let_in || purpose == Purpose::Page
    }
}

/// A time in which nobody else may change a file, or any file, and the service is not started again, which may take back
/// what this client changed. What is seen in it holds until it is over; it never comes again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// While this client is alone.
    Alone {
        /// The start of the service.
        start: u64,
        /// Times that it has become alone.
        time: u64,
    },
    /// While an exclusive lease lasts.
    Lease {
        /// The start of the service, which numbers grants anew.
        start: u64,
        /// The lease's number.
        grant: u64,
    },
}

/// What a lease is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To read.
    Read,
    /// To change contents or attributes.
    Write,
    /// To write back a page that a program has changed in memory, for which the lease may be waiting to go.
    Page,
    /// To change the size. The kernel sends no changed page of the file before it has the answer, and drops none.
    Resize,
}

/// All leases of a client.
#[derive(Default)]
pub(crate) struct Leases {
    pub(crate) clock: LeaseClock,
    alone: Cell<bool>,
    /// Times that it became alone.
    times_alone: Cell<u64>,
    /// It was, and the kernel may have pages of files that no lease is held of.
    unleased: Cell<bool>,
    /// Holds without a lease.
    busy: Cell<u64>,
    table: RefCell<HashMap<Ino, Lease>>,
    void: Cell<u64>,
    pub(crate) changed: Notify,
    seen: Cell<u64>,
    released: RefCell<Vec<ReleasedLease>>,
    /// While alone: the kernel may have pages from a time with others, but for those of these files.
    soiled: Cell<bool>,
    kept: Noted<Ino>,
    cache: RefCell<Option<Rc<dyn KernelCache>>>,
    soon: Soon,
}

/// Turns of [`Client::drop_pages_soon`].
struct Soon(Semaphore);

impl Default for Soon {
    fn default() -> Self {
        Self(Semaphore::new(MOST_SOON))
    }
}

/// The right to work on a file, while it lives.
pub struct Hold {
    leases: Rc<Leases>,
    ino: Option<Ino>,
}

impl Hold {
    /// Says which bytes the kernel may have in pages as soon as its reply has gone out. Call right before that.
    pub fn serves(&self, bytes: Range<u64>) {
        let Some(ino) = self.ino else { return };
        if let Some(lease) = self.leases.table.borrow_mut().get_mut(&ino)
            && let Some(served) = &mut lease.served
        {
            served.add(bytes);
        }
    }
}

/// Bytes that go into the kernel's pages, or out of them, by a notice, while it lives. Unlike a [`Hold`] it may wait for a page
/// that a request has locked which waits for the lease, so the lease serves until the notice has been taken.
pub struct Store {
    leases: Rc<Leases>,
    ino: Option<Ino>,
    bytes: Range<u64>,
}

impl Hold {
    /// The time that a notice with these bytes of the file takes, which are known under the hold. Unlike the hold it may last
    /// while a page is locked.
    pub fn store(&self, bytes: Range<u64>) -> Store {
        if let Some(ino) = self.ino {
            let mut table = self.leases.table.borrow_mut();
            table.get_mut(&ino).expect("a lease stays while it is held").stores += 1;
        }
        Store { leases: self.leases.clone(), ino: self.ino, bytes }
    }
}

impl Store {
    /// Where in the file they are.
    pub fn bytes(&self) -> Range<u64> {
        self.bytes.clone()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let Some(ino) = self.ino else { return };
        let mut table = self.leases.table.borrow_mut();
        let lease = table.get_mut(&ino).expect("a lease stays while bytes of it are stored");
        lease.stores -= 1;
        if let Some(served) = &mut lease.served {
            served.add(self.bytes.clone());
        }
        drop(table);
        self.leases.changed.notify_waiters();
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let left = match self.ino {
            None => {
                self.leases.busy.set(self.leases.busy.get() - 1);
                self.leases.busy.get()
            }
            Some(ino) => {
                let mut table = self.leases.table.borrow_mut();
                let lease = table.get_mut(&ino).expect("a lease stays while it is held");
                lease.users -= 1;
                if lease.called { lease.users } else { 1 }
            }
        };
        if left == 0 {
            self.leases.changed.notify_waiters();
        }
    }
}

/// A request that waits for a lease is known while this lives.
struct Waits<'a>(&'a Leases, Ino, &'a Rc<Waiting>);

impl<'a> Waits<'a> {
    fn begin(leases: &'a Leases, ino: Ino, waiting: &'a Rc<Waiting>) -> Self {
        leases.table.borrow_mut().entry(ino).or_default().waiting.push(waiting.clone());
        Self(leases, ino, waiting)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        let Self(leases, ino, waiting) = self;
        leases.change(*ino, |lease| {
            let lease = lease.expect("a lease stays while it is waited for");
            lease.waiting.retain(|other| !Rc::ptr_eq(other, waiting));
        });
    }
}

/// Ends the asking for a lease, also when nobody waits for it any more.
struct Asking<'a>(&'a Leases, Ino);

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        if let Some(lease) = self.0.table.borrow_mut().get_mut(&self.1) {
            lease.asking = false;
        }
        self.0.changed.notify_waiters();
    }
}

impl Leases {
    pub(crate) fn is_alone(&self) -> bool {
        self.alone.get() && self.clock.runs()
    }

    /// Whether nobody else may change a file.
    pub(crate) fn is_exclusive(&self, ino: Ino) -> bool {
        self.clock.runs() && (self.alone.get() || self.has_lease(ino, true))
    }

    /// Whether the state of a file is this client's to know.
    pub(crate) fn covers(&self, ino: Ino) -> bool {
        self.clock.runs() && (self.alone.get() || self.has_lease(ino, false))
    }

    fn has_lease(&self, ino: Ino, exclusive: bool) -> bool {
        self.table.borrow().get(&ino).is_some_and(|lease| lease.covers(exclusive))
    }

    /// The kernel behind the client, if it is a mount.
    pub(crate) fn kernel_cache(&self) -> Option<Rc<dyn KernelCache>> {
        self.cache.borrow().clone()
    }

    /// Changes what is known of a lease.
    pub(crate) fn change<T>(&self, ino: Ino, change: impl FnOnce(Option<&mut Lease>) -> T) -> T {
        change(self.table.borrow_mut().get_mut(&ino))
    }

    /// A number of a lease, zero of none.
    pub(crate) fn number(&self, ino: Ino, of: impl FnOnce(&Lease) -> u64) -> u64 {
        self.table.borrow().get(&ino).map_or(0, of)
    }

    /// The service was started again: its numbers begin again. What is held was granted by another start, and any call
    /// of this one takes it back.
    pub(crate) fn restarted(&self) {
        self.seen.set(0);
        self.void.set(0);
        self.released.borrow_mut().clear();
        self.table.borrow_mut().values_mut().for_each(|lease| (lease.void, lease.grant) = (0, 0));
    }
}

/// Does something with all items, so many at a time. Fails with the first failure, once all are done.
async fn in_turns<T, F>(items: Vec<T>, work: impl Fn(T) -> F) -> Result<(), Failure>
where
    F: Future<Output = Result<(), Failure>>,
{
    // Side by side: each waits for programs that may fault pages in meanwhile.
    let results = stream::iter(items).map(work).buffer_unordered(MOST_GIVEN_UP);
    results.fold(Ok(()), async |all: Result<(), Failure>, one| all.and(one)).await
}

impl Client {
    /// The kernel behind this client, from now on.
    pub fn set_kernel_cache(&self, cache: Option<Rc<dyn KernelCache>>) {
        *self.leases.cache.borrow_mut() = cache;
    }

    /// Whether nobody else uses the file system, so that the kernel may keep names and attributes for a moment.
    pub fn is_alone(&self) -> bool {
        self.leases.is_alone()
    }

    /// Waits until this client may not go by what it was granted: the service does not answer, and others may change the files.
    pub async fn lapsed(&self) {
        self.leases.clock.not_running().await;
    }

    /// Writes of a file that were acknowledged are gone.
    pub fn note_lost(&self, ino: Ino) {
        if let Some(state) = self.files.borrow().get(&ino) {
            state.borrow_mut().lose();
        }
    }

    /// Time for which the kernel may keep names and attributes that it is given now, if nobody else uses the file system.
    pub fn left_of_lease(&self) -> Duration {
        self.leases.clock.left()
    }

    /// The time alone that this is, if nobody else uses the file system.
    pub fn owns_all(&self) -> Option<Ownership> {
        let (start, time) = (self.restarts.generation()?, self.leases.times_alone.get());
        self.is_alone().then_some(Ownership::Alone { start, time })
    }

    /// The time in which nobody else may change a file that this is, if it is one.
    pub fn owns(&self, ino: Ino) -> Option<Ownership> {
        let of_lease = || {
            let table = self.leases.table.borrow();
            let runs = self.leases.clock.runs();
            let lease = table.get(&ino).filter(|lease| runs && lease.covers(true) && !lease.called)?;
            let (start, grant) = (self.restarts.generation()?, lease.grant);
            Some(Ownership::Lease { start, grant })
        };
        self.owns_all().or_else(of_lease)
    }

    /// Whether others use the file system, or did: the kernel may believe in sizes that they have changed.
    pub fn was_shared(&self) -> bool {
        !self.leases.alone.get() || self.leases.soiled.get()
    }

    /// Whether the kernel may keep the pages that it has of a file that it is opening.
    pub fn keeps_pages(&self, ino: Ino) -> bool {
        if !self.leases.clock.runs() {
            return false;
        }
        if self.leases.alone.get() {
            if !self.leases.soiled.get() || self.leases.kept.contains(&ino) {
                return true;
            }
            self.leases.kept.note(ino);
            return false;
        }
        match self.leases.table.borrow_mut().get_mut(&ino) {
            Some(lease) if lease.covers(false) && !lease.called => std::mem::replace(&mut lease.clean, true),
            _ => false,
        }
    }

    /// Waits for a file's lease.
    pub async fn hold(&self, ino: Ino, purpose: Purpose) -> Result<Hold, Failure> {
        let locked = match purpose {
            Purpose::Read | Purpose::Page => 0..0,
            // A write may have a page locked that it fills in part, and a change of size keeps all changed pages back.
            Purpose::Write | Purpose::Resize => 0..u64::MAX,
        };
        self.hold_for(ino, purpose, Waiting::new(locked, false)).await
    }

    /// Waits for a file's lease for a read of these bytes into pages, which the kernel has locked for it.
    pub async fn hold_to_fill(&self, ino: Ino, bytes: Range<u64>) -> Result<Hold, Failure> {
        self.hold_for(ino, Purpose::Read, Waiting::new(bytes, true)).await
    }

    async fn hold_for(&self, ino: Ino, purpose: Purpose, waiting: Waiting) -> Result<Hold, Failure> {
        let waiting = Rc::new(waiting);
        let mut waits = None;
        loop {
            self.in_lease().await?;
            let changed = self.leases.changed.notified();
            if self.leases.alone.get() {
                self.leases.busy.set(self.leases.busy.get() + 1);
                return Ok(Hold { leases: self.leases.clone(), ino: None });
            }
            let exclusive = purpose != Purpose::Read || self.is_written(ino);
            let ask = {
                let mut table = self.leases.table.borrow_mut();
                let lease = table.entry(ino).or_default();
                let let_in = waiting.is_let_in();
                let covers = lease.covers(exclusive) && lease.serves(purpose, let_in);
                if covers || lease.suffices(purpose, let_in) {
                    lease.users += 1;
                    return Ok(Hold { leases: self.leases.clone(), ino: Some(ino) });
                }
                let ask = !lease.asking && !lease.called;
                lease.asking |= ask;
                ask
            };
            waits.get_or_insert_with(|| Waits::begin(&self.leases, ino, &waiting));
            if !ask {
                changed.await;
                continue;
            }
            // Its answer may wait for others, who wait for the lease that this client has until then.
            let asked = pin!(self.ask_for_lease(ino, exclusive));
            let called = pin!(self.until(|leases| {
                let suffices = |lease: &Lease| lease.suffices(purpose, waiting.is_let_in());
                leases.table.borrow().get(&ino).is_some_and(suffices)
            }));
            if let Either::Left((asked, _)) = select(asked, called).await {
                asked?;
            }
        }
    }

    /// Gives leases back that nobody needs when there are many: of files that are not open and have nothing to settle.
    fn trim(&self) {
        let mut table = self.leases.table.borrow_mut();
        if table.len() <= MOST_IDLE {
            return;
        }
        let files = self.files.borrow();
        let mut released = self.leases.released.borrow_mut();
        table.retain(|ino, lease| {
            let idle = !lease.is_used() && !lease.called && !lease.asking && !files.contains_key(ino);
            if idle && lease.exclusive.is_some() {
                released.push(ReleasedLease { ino: ino.0, grant: lease.grant });
            }
            !idle
        });
        // The kernel may have pages of them, which it drops when it opens them again.
        self.leases.soiled.set(true);
    }

    async fn ask_for_lease(&self, ino: Ino, exclusive: bool) -> Result<(), Failure> {
        self.trim();
        let asking = Asking(&self.leases, ino);
        let request = LeaseRequest { ino: ino.0, exclusive, first: 0, last: u64::MAX };
        let LeaseReply { grant } = self.ask(Kind::Lease, &request).await?;
        if let Some(lease) = self.leases.table.borrow_mut().get_mut(&ino)
            && grant > lease.void.max(self.leases.void.get())
        {
            if lease.exclusive.is_none() {
                lease.clean = false;
            }
            (lease.exclusive, lease.grant) = (Some(exclusive), grant);
        }
        drop(asking);
        Ok(())
    }

    fn is_written(&self, ino: Ino) -> bool {
        let written = |state: &FileState| state.writers > 0 || state.mapped;
        self.files.borrow().get(&ino).is_some_and(|state| written(&state.borrow()))
    }

    /// Gives a lease back, if its grant is none later than `grant`. Fails where what was written under it is lost.
    async fn give_up(&self, ino: Ino, grant: u64) -> Result<(), Failure> {
        loop {
            let changed = self.leases.changed.notified();
            {
                let mut table = self.leases.table.borrow_mut();
                let lease = table.entry(ino).or_default();
                if !lease.called {
                    lease.void = lease.void.max(grant);
                    if lease.exclusive.is_none() || lease.grant > grant {
                        return Ok(());
                    }
                    lease.called = true;
                    break;
                }
            }
            changed.await;
        }
        self.leases.changed.notify_waiters();
        self.drop_kernel_pages(ino).await;
        let settled = self.settle_at_last(ino).await;
        self.note_stale(ino);
        if let Some(lease) = self.leases.table.borrow_mut().get_mut(&ino) {
            lease.exclusive = None;
            (lease.called, lease.closed, lease.served) = (false, false, None);
        }
        self.leases.changed.notify_waiters();
        settled
    }

    /// Settles a file whose lease goes. What cannot be settled by then is lost, and every descriptor hears of it.
    async fn settle_at_last(&self, ino: Ino) -> Result<(), Failure> {
        let mut attempts = 1;
        let failure = loop {
            match self.settle_quietly(ino).await {
                Ok(()) => return Ok(()),
                Err(failure) if self.has_ended() || self.closed.get() => {
                    tracing::debug!(%failure, %ino, "a lease ends with its session");
                    return Err(failure);
                }
                Err(failure) if attempts == ATTEMPTS => break failure,
                Err(_) => self.env.sleep(PAUSE).await,
            }
            attempts += 1;
        };
        tracing::error!(%failure, %ino, "writes are lost: another client wants the file");
        if let Some(state) = self.files.borrow().get(&ino) {
            state.borrow_mut().lose();
        }
        Err(failure)
    }

    pub(crate) async fn until(&self, done: impl Fn(&Leases) -> bool) {
        loop {
            let changed = self.leases.changed.notified();
            if done(&self.leases) {
                return;
            }
            changed.await;
        }
    }

    /// Settles a file for somebody who waits for that; the error is his too.
    async fn settle_for_others(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_quietly(ino).await.inspect_err(
            |failure| tracing::error!(%failure, %ino, "what was written is not known to others yet"),
        )
    }

    /// Somebody else comes, or the service does not know any more who has what. From here on new operations ask. Fails where
    /// something that was written is lost.
    async fn give_up_everything(&self, grant: u64) -> Result<(), Failure> {
        let leases = &self.leases;
        leases.soiled.set(true);
        leases.void.set(leases.void.get().max(grant));
        leases.changed.notify_waiters();
        let cache = leases.kernel_cache();
        let names_expire = cache.as_ref().map(|cache| cache.names_expire());
        self.until(|leases| leases.busy.get() == 0).await;
        let held: Vec<(Ino, u64)> =
            leases.table.borrow().iter().map(|(ino, lease)| (*ino, lease.grant.min(grant))).collect();
        let given_up = in_turns(held, |(ino, grant)| self.give_up(ino, grant)).await;
        let unleased = leases.unleased.get();
        let settle = async |ino: Ino| {
            // What the kernel reads from here on it reads with a lease. A page that it has locked for a request which waits
            // for one must not be waited for: others may be as far as this client, and wait for it.
            if let Some(cache) = cache.as_ref().filter(|_| unleased) {
                cache.drop_pages(ino, 0..u64::MAX).await;
            }
            self.settle_at_last(ino).await
        };
        let settled = in_turns(self.files_where(|_| true), settle).await;
        leases.unleased.set(false);
        if let Some(names_expire) = names_expire {
            names_expire.await;
        }
        for (ino, state) in &*self.files.borrow() {
            if !leases.covers(*ino) {
                state.borrow_mut().stale = true;
            }
        }
        given_up.and(settled)
    }

    async fn answer(&self, call: LeaseCall) {
        let ino = Ino(call.ino);
        let result = match (call.settle, call.ino) {
            (true, _) => self.settle_for_others(ino).await,
            (false, 0) => {
                let given_up = self.give_up_everything(call.grant).await;
                // The service may be about to stop.
                given_up.and(self.sync_names().await)
            }
            (false, _) => self.give_up(ino, call.grant).await,
        };
        let failed = |failure: Failure| {
            tracing::debug!(%failure, "a call of the service is answered with an error");
            FailedSettle { number: call.number, errno: failure.errno.into() }
        };
        let failed = result.err().map(failed).into_iter().collect();
        let answered = WatchRequest { answered: vec![call.number], failed, ..self.watch_request() };
        if let Err(failure) = self.ask::<WatchReply>(Kind::Watch, &answered).await {
            tracing::debug!(%failure, "a call was not answered: the session has ended");
        }
    }

    fn watch_request(&self) -> WatchRequest {
        WatchRequest {
            seen: self.leases.seen.get(),
            alone: self.leases.alone.get(),
            generation: self.restarts.generation().unwrap_or_default(),
            ..WatchRequest::default()
        }
    }

    /// Hears what the service has to say, for as long as the session lives.
    pub(crate) async fn watch_task(self: Rc<Self>) {
        while !self.closed.get() && !self.has_ended() {
            let released = self.leases.released.take();
            let request = WatchRequest { wait: true, released, ..self.watch_request() };
            let reply: WatchReply = match self.ask(Kind::Watch, &request).await {
                Ok(reply) => reply,
                Err(failure) => {
                    tracing::debug!(%failure, "the service says nothing");
                    self.env.sleep(PAUSE).await;
                    continue;
                }
            };
            for call in reply.calls {
                self.leases.seen.set(self.leases.seen.get().max(call.number));
                if call.ino == 0 && !call.settle {
                    // Before the next request to the service says otherwise.
                    self.leases.alone.set(false);
                }
                let client = self.clone();
                self.env.spawn("lease call", Box::pin(async move { client.answer(call).await }));
            }
            if reply.alone && !self.leases.alone.replace(true) {
                self.leases.times_alone.set(self.leases.times_alone.get() + 1);
                self.leases.unleased.set(true);
                self.leases.kept.clear();
                self.leases.changed.notify_waiters();
            }
            reply.unlocked.iter().for_each(|ino| self.locks.note_unlocked(Ino(*ino)));
        }
    }

    /// Has the kernel drop its pages of a file once the reply that is on its way has gone.
    pub fn drop_pages_soon(&self, ino: Ino) {
        if let Some(cache) = self.leases.kernel_cache() {
            let leases = self.leases.clone();
            let drop_them = async move {
                let _turn = leases.soon.0.acquire().await;
                cache.drop_pages(ino, 0..u64::MAX).await;
            };
            self.env.spawn("drop pages", Box::pin(drop_them));
        }
    }

    /// Gives up all locks and closes all files. Call when the kernel that had them has gone: of a connection that was aborted it says
    /// nothing of them.
    pub async fn close_all(&self) -> Result<(), Failure> {
        for lock in self.locks.all() {
            self.unlock_all(Ino(lock.ino), lock.owner, lock.flock).await?;
        }
        self.direct.close_all();
        let files = self.files.borrow().clone();
        for (ino, state) in files {
            let opens = {
                let mut state = state.borrow_mut();
                (state.writers, state.mapped) = (0, false);
                state.opens
            };
            drop(state);
            for _ in 0..opens {
                self.release(ino).await?;
            }
        }
        Ok(())
    }

    /// Keeps nothing any more: the next to come need not wait for this client.
    pub async fn leave(&self) -> Result<(), Failure> {
        self.sync_all().await?;
        self.leases.alone.set(false);
        self.leases.table.borrow_mut().retain(|_, lease| {
            lease.exclusive = None;
            lease.is_used() || lease.called || lease.asking
        });
        self.files.borrow().values().for_each(|state| state.borrow_mut().stale = true);
        let leaving = WatchRequest { leaves: true, ..self.watch_request() };
        self.ask::<WatchReply>(Kind::Watch, &leaving).await.map(drop)
    }
}
