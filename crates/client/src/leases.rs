//! Leases: the right to cache a file, here and in the kernel, while other clients use it too.
//!
//! Every operation on a file's contents uses the file's lease, shared or exclusive. It does so from before it
//! looks at the file's state until after its reply has gone to the kernel, which puts pages of the reply into
//! its cache. When the service revokes a lease, the kernel drops its pages, the file is synced, and then the
//! lease is released.
//!
//! The sole client of a service needs no leases. Then the kernel may cache names and attributes for a moment
//! ([`KernelCache::names_expire`]); with other clients present it may not.
//!
//! The kernel locks a page while it waits for a read of it, or for a write of a part of it, and dropping a
//! page waits for that lock. Three rules keep this from ending in a deadlock:
//! - While pages are dropped, the lease still serves the requests that block the drop ([`crate::pages`]).
//! - A file that this client has open for writing through its pages gets no shared lease, because a write
//!   would have to wait for the exclusive one.
//! - A read under a shared lease that is being revoked does not wait for the exclusive lease that it would
//!   request otherwise. Neither do the write-back of a page and a change of size, during which the kernel
//!   keeps changed pages back ([`Purpose`]); the service makes other clients drop all that the new size makes
//!   wrong.
//!
//! Invariants:
//! - A lease is released only if no operation uses it, the kernel has no page of the file, and the file is
//!   synced.
//! - Once grant n has been revoked, a grant numbered n or lower that arrives late is ignored.
//! - The state of a file that no lease covers is stale: it is fetched before it is used. Under a shared lease
//!   that is being revoked, others may change the size. A write carries the truncate generation that it
//!   knows, and is repeated if that is out of date.

use crate::file::FileState;
use crate::lease_clock::LeaseClock;
use crate::page_set::PageSet;
use crate::pages::Waiting;
use crate::session::Client;
use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};
use penstock_base::{BoundedSet, HashMap, Ino, LocalBoxFuture};
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

/// Files whose leases are given up at the same time.
const MOST_GIVEN_UP: usize = 64;
/// Other files whose pages are dropped at the same time. Each of these drops may wait for a lease, so they
/// must not use up the turns of those that give up leases.
const MOST_SOON: usize = 32;
/// Most leases that are kept for files that are not open, in case they are opened again.
const MOST_IDLE: usize = 4096;
/// Pause between attempts to sync a file or to reach the service.
const PAUSE: Duration = Duration::from_millis(200);
/// Attempts to sync a file before its lease is released and its writes count as lost: 10 s.
const ATTEMPTS: u32 = 50;

/// Control over the kernel's caches, for a client that is a mount.
pub trait KernelCache {
    /// Drops the pages of these bytes of a file; pages that programs have changed are written back first.
    /// Waits for requests that have such a page locked.
    fn drop_pages(&self, ino: Ino, bytes: Range<u64>) -> LocalBoxFuture<'_, ()>;
    /// Completes when the kernel no longer uses a name or an attribute that it got before this call.
    fn names_expire(&self) -> LocalBoxFuture<'_, ()>;
    /// Drops the pages that programs see, of files with these sizes, while no request is answered. Pages that
    /// requests have locked stay and are not waited for. If that has not succeeded `within` this time while
    /// the lapse still `lasts`, the mount serves nothing any more.
    fn hide_pages<'a>(
        &'a self,
        files: Vec<(Ino, u64)>,
        within: Duration,
        lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()>;
}

#[derive(Default)]
pub(crate) struct Lease {
    /// `None` without a lease, else true if it is exclusive.
    exclusive: Option<bool>,
    grant: u64,
    /// Grants up to this one are revoked.
    void: u64,
    pub(crate) users: u64,
    /// Requests that wait for the lease.
    pub(crate) waiting: Vec<Rc<Waiting>>,
    /// The lease is being revoked, and serves requests until it is closed.
    called: bool,
    /// Pages are being dropped: the lease serves only requests that block this.
    pub(crate) closed: bool,
    asking: bool,
    /// Number of FUSE notifications that are storing bytes into pages; like a drop, they wait for locked
    /// pages.
    pub(crate) stores: u64,
    /// Bytes that may have got into pages since the drop of pages began; `None` if none is running.
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

    /// True if a request is served under a lease that is being revoked, although it would request another one
    /// otherwise: the kernel may keep a page locked for it that must be dropped first.
    fn suffices(&self, purpose: Purpose, let_in: bool) -> bool {
        self.called && self.covers(false) && self.serves(purpose, let_in) && purpose != Purpose::Write
    }

    /// True if a running drop of pages permits the request.
    fn serves(&self, purpose: Purpose, let_in: bool) -> bool {
        !self.closed || let_in || purpose == Purpose::Page
    }
}

/// A period in which no other client may change a file, or any file, and the service does not restart, which
/// could undo this client's changes. Facts observed in it are valid until its end. No period occurs twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ownership {
    /// While this is the sole client.
    Alone {
        /// Generation of the service's start.
        start: u64,
        /// Number of times that this client has become the sole one.
        time: u64,
    },
    /// While an exclusive lease lasts.
    Lease {
        /// Generation of the service's start; each start numbers grants anew.
        start: u64,
        /// The number of the lease's grant.
        grant: u64,
    },
}

/// The operation that a lease is acquired for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// To read.
    Read,
    /// To change contents or attributes.
    Write,
    /// To write back a page that a program has changed in memory. The release of the lease may be waiting for
    /// this.
    Page,
    /// To change the size. Until it has the answer, the kernel neither sends nor drops a changed page of the
    /// file.
    Resize,
}

/// All leases of a client.
#[derive(Default)]
pub(crate) struct Leases {
    pub(crate) clock: LeaseClock,
    alone: Cell<bool>,
    /// Number of times that this client became the sole one.
    times_alone: Cell<u64>,
    /// It was the sole client, and the kernel may have pages of files without a lease.
    unleased: Cell<bool>,
    /// Operations in progress without a lease.
    busy: Cell<u64>,
    table: RefCell<HashMap<Ino, Lease>>,
    void: Cell<u64>,
    pub(crate) changed: Notify,
    seen: Cell<u64>,
    released: RefCell<Vec<ReleasedLease>>,
    /// While this is the sole client: the kernel may have pages from a time with others, except of the files
    /// in `kept`.
    soiled: Cell<bool>,
    kept: BoundedSet<Ino>,
    cache: RefCell<Option<Rc<dyn KernelCache>>>,
    soon: Soon,
}

/// Limits the concurrent drops of [`Client::drop_pages_soon`].
struct Soon(Semaphore);

impl Default for Soon {
    fn default() -> Self {
        Self(Semaphore::new(MOST_SOON))
    }
}

/// Use of a file's lease by an operation; the lease is kept until this is dropped.
pub struct Hold {
    leases: Rc<Leases>,
    ino: Option<Ino>,
}

impl Hold {
    /// Records the bytes that the kernel may have in pages once the operation's reply is sent. Call right
    /// before that.
    pub fn serves(&self, bytes: Range<u64>) {
        let Some(ino) = self.ino else { return };
        if let Some(lease) = self.leases.table.borrow_mut().get_mut(&ino)
            && let Some(served) = &mut lease.served
        {
            served.add(bytes);
        }
    }
}

/// A FUSE notification that puts bytes into the kernel's pages or removes them. Unlike a [`Hold`] it may wait
/// for a page that is locked for a request which waits for the lease. So the lease serves such requests until
/// the notification ends.
pub struct Store {
    leases: Rc<Leases>,
    ino: Option<Ino>,
    bytes: Range<u64>,
}

impl Hold {
    /// Begins a notification with these bytes of the file, which are known through the hold. Unlike the hold,
    /// the result may be kept while it waits for a locked page.
    pub fn store(&self, bytes: Range<u64>) -> Store {
        if let Some(ino) = self.ino {
            let mut table = self.leases.table.borrow_mut();
            table.get_mut(&ino).expect("a lease stays while it is held").stores += 1;
        }
        Store { leases: self.leases.clone(), ino: self.ino, bytes }
    }
}

impl Store {
    /// Returns the range of bytes of the file.
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

/// Registers a request that waits for a lease, until this is dropped.
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

/// Marks that a lease is being requested, until this is dropped, also if no request waits for the lease any
/// more.
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

    /// True if no other client may change the file.
    pub(crate) fn is_exclusive(&self, ino: Ino) -> bool {
        self.clock.runs() && (self.alone.get() || self.has_lease(ino, true))
    }

    /// True if this client may use its state of the file.
    pub(crate) fn covers(&self, ino: Ino) -> bool {
        self.clock.runs() && (self.alone.get() || self.has_lease(ino, false))
    }

    fn has_lease(&self, ino: Ino, exclusive: bool) -> bool {
        self.table.borrow().get(&ino).is_some_and(|lease| lease.covers(exclusive))
    }

    /// Returns the kernel behind the client, if it is a mount.
    pub(crate) fn kernel_cache(&self) -> Option<Rc<dyn KernelCache>> {
        self.cache.borrow().clone()
    }

    /// Applies a change to the state of a lease; the argument is `None` if there is none.
    pub(crate) fn change<T>(&self, ino: Ino, change: impl FnOnce(Option<&mut Lease>) -> T) -> T {
        change(self.table.borrow_mut().get_mut(&ino))
    }

    /// Returns a number of a lease's state, or 0 if there is none.
    pub(crate) fn number(&self, ino: Ino, of: impl FnOnce(&Lease) -> u64) -> u64 {
        self.table.borrow().get(&ino).map_or(0, of)
    }

    /// Resets the numbers after a restart of the service, which counts anew. Leases owned now were granted by
    /// another start, and any revocation of the new one applies to them.
    pub(crate) fn restarted(&self) {
        self.seen.set(0);
        self.void.set(0);
        self.released.borrow_mut().clear();
        self.table.borrow_mut().values_mut().for_each(|lease| (lease.void, lease.grant) = (0, 0));
    }
}

/// Runs `work` for all items, at most [`MOST_GIVEN_UP`] at the same time. Returns the first failure once all
/// are done.
async fn in_turns<T, F>(items: Vec<T>, work: impl Fn(T) -> F) -> Result<(), Failure>
where
    F: Future<Output = Result<(), Failure>>,
{
    // Concurrently, because each waits for programs that may fault pages in meanwhile.
    let results = stream::iter(items).map(work).buffer_unordered(MOST_GIVEN_UP);
    results.fold(Ok(()), async |all: Result<(), Failure>, one| all.and(one)).await
}

impl Client {
    /// Sets the kernel behind this client.
    pub fn set_kernel_cache(&self, cache: Option<Rc<dyn KernelCache>>) {
        *self.leases.cache.borrow_mut() = cache;
    }

    /// True if no other client uses the file system, so that the kernel may cache names and attributes for a
    /// moment.
    pub fn is_alone(&self) -> bool {
        self.leases.is_alone()
    }

    /// Waits until the lease time has run out: the service does not answer, and others may change the files.
    pub async fn lapsed(&self) {
        self.leases.clock.not_running().await;
    }

    /// Records that acknowledged writes of a file are lost.
    pub fn note_lost(&self, ino: Ino) {
        if let Some(state) = self.files.borrow().get(&ino) {
            state.borrow_mut().lose();
        }
    }

    /// Time for which the kernel may cache names and attributes that it gets now, if no other client uses the
    /// file system.
    pub fn left_of_lease(&self) -> Duration {
        self.leases.clock.left()
    }

    /// Returns the current period as the sole client; `None` if there are others.
    pub fn owns_all(&self) -> Option<Ownership> {
        let (start, time) = (self.restarts.generation()?, self.leases.times_alone.get());
        self.is_alone().then_some(Ownership::Alone { start, time })
    }

    /// Returns the current period in which no other client may change the file; `None` if others may.
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

    /// True if other clients use the file system, or did: the kernel may have sizes cached that they have
    /// changed.
    pub fn was_shared(&self) -> bool {
        !self.leases.alone.get() || self.leases.soiled.get()
    }

    /// True if the kernel may keep the pages that it has of a file which it is opening.
    pub fn keeps_pages(&self, ino: Ino) -> bool {
        if !self.leases.clock.runs() {
            return false;
        }
        if self.leases.alone.get() {
            if !self.leases.soiled.get() || self.leases.kept.contains(&ino) {
                return true;
            }
            self.leases.kept.insert(ino);
            return false;
        }
        match self.leases.table.borrow_mut().get_mut(&ino) {
            Some(lease) if lease.covers(false) && !lease.called => std::mem::replace(&mut lease.clean, true),
            _ => false,
        }
    }

    /// Acquires the lease of a file for an operation.
    pub async fn hold(&self, ino: Ino, purpose: Purpose) -> Result<Hold, Failure> {
        let locked = match purpose {
            Purpose::Read | Purpose::Page => 0..0,
            // A write may have a page locked that it fills in part, and a change of size keeps all changed
            // pages back.
            Purpose::Write | Purpose::Resize => 0..u64::MAX,
        };
        self.hold_for(ino, purpose, Waiting::new(locked, false)).await
    }

    /// Acquires the lease of a file for a read of these bytes into pages that the kernel has locked for it.
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
            // The answer may wait for others, which wait for this client's present lease.
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

    /// Releases leases that are not needed when there are many: those of files without any state here.
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
        // The kernel may have pages of these files; it drops them when it opens the files again.
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

    /// Releases a lease whose grant is not later than `grant`. Fails if writes under it are lost.
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

    /// Syncs a file whose lease is being released. Writes that cannot be synced are lost, and every
    /// descriptor reports that.
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

    /// Syncs a file for another client that waits for it. The failure is for that client too.
    async fn settle_for_others(&self, ino: Ino) -> Result<(), Failure> {
        self.settle_quietly(ino).await.inspect_err(
            |failure| tracing::error!(%failure, %ino, "a file could not be synced for another client yet"),
        )
    }

    /// Gives up all leases, because another client arrives or the service no longer knows the grants. New
    /// operations request leases from now on. Fails if writes are lost.
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
            // From now on the kernel reads pages with a lease. Do not wait for a page that it has locked for
            // a request which waits for a lease: other clients may be in the same situation and wait for this
            // one.
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

    /// Receives calls of the service until the session ends: revocations, requests to sync, and released
    /// locks.
    pub(crate) async fn watch_task(self: Rc<Self>) {
        while !self.closed.get() && !self.has_ended() {
            let released = self.leases.released.take();
            let request = WatchRequest { wait: true, released, ..self.watch_request() };
            let reply: WatchReply = match self.ask(Kind::Watch, &request).await {
                Ok(reply) => reply,
                Err(failure) => {
                    tracing::debug!(%failure, "a watch request failed; it is repeated");
                    self.env.sleep(PAUSE).await;
                    continue;
                }
            };
            for call in reply.calls {
                self.leases.seen.set(self.leases.seen.get().max(call.number));
                if call.ino == 0 && !call.settle {
                    // Before the next request, because that reports this flag to the service.
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

    /// Makes the kernel drop its pages of a file in the background, after the reply in progress has been
    /// sent.
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

    /// Releases all locks and closes all files. Call when the kernel that had them is gone: an aborted
    /// connection sends no unlocks and no closes.
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

    /// Makes everything durable and gives up all leases, so that the next client need not wait for this one.
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
