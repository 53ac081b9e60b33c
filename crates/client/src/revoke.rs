//! Gives up leases that the service revokes: drops the kernel's pages, then syncs the file.
//!
//! The kernel must lock a page to drop it, but a request that waits for the lease may have it locked. So all
//! pages are dropped once while the lease still serves requests. Then the lease is closed, and the pages that
//! were served meanwhile are dropped, piece by piece. A piece is skipped while a waiting request reads it
//! into pages: these pages are locked and contain nothing. If the kernel still blocks at a piece, the
//! requests that may have it locked are admitted, and the pages that they fill are dropped in the next round.
//!
//! Invariants:
//! - The lease goes in one step, at which nothing uses it and no page is left to drop. An admitted request
//!   that is not served by then waits on.
//! - A revocation that outlasts its era, because the service was started again or this client left, takes no
//!   lease and loses no write: whoever waited for the lease is gone, or asks the present start for it. So it
//!   is taken back at its end.
//! - Each round drops the pages of the requests admitted during the round before, and only requests that
//!   block the drop are admitted. So programs that fault pages in as fast as they can do not keep the lease.

use crate::lease::{Lease, Revocation, Right};
use crate::leases::Leases;
use crate::restarts::lost;
use crate::session::{Era, Session};
use futures_util::{StreamExt, stream};
use penstock_base::FileId;
use penstock_base::env::timeout;
use penstock_wire::Failure;
use std::ops::Range;
use std::pin::pin;
use std::time::Duration;

/// Files whose leases are given up at the same time.
const MOST_GIVEN_UP: usize = 64;
/// Pause between attempts to sync a file.
const PAUSE: Duration = Duration::from_millis(200);
/// Attempts to sync a file before its lease is released and its writes count as lost: 10 s.
const ATTEMPTS: u32 = 50;
/// Dropping a piece takes longer than this only if a request has a page of it locked, or if the machine is
/// busy.
const DROP_LIMIT: Duration = Duration::from_millis(5);
/// The same limit for a FUSE notification that stores bytes into pages.
const STORE_LIMIT: Duration = Duration::from_millis(100);

/// Changes the lease of a file that is being revoked.
fn with<T>(leases: &Leases, file: FileId, act: impl FnOnce(&mut Lease) -> T) -> T {
    leases.with(file, act).expect("a lease stays while it is being revoked")
}

/// Releases a lease whose grant is not later than `grant`, in this era. Does nothing once it is over: the
/// next start of the service numbers grants anew. Fails if writes under the lease are lost.
pub(crate) async fn give_up(session: &Session, file: FileId, grant: u64, era: Era) -> Result<(), Failure> {
    let leases = session.leases();
    let listener = leases.listen(file);
    loop {
        let changed = listener.changed();
        if session.era() != era {
            return Ok(());
        }
        match leases.begin_to_revoke(file, grant) {
            Revocation::Busy => changed.await,
            Revocation::Nothing => return Ok(()),
            Revocation::Begun => break,
        }
    }
    leases.notify(file);
    drop_kernel_pages(session, file).await;
    let synced = sync_at_last(session, file, era).await;
    match session.era() == era {
        true => {
            session.files().with(file, |state| state.make_stale());
            leases.with(file, Lease::revoked);
        }
        false => drop(leases.with(file, Lease::keep)),
    }
    leases.notify(file);
    synced
}

/// Drops the kernel's pages of a file whose lease is revoked, and closes the lease.
async fn drop_kernel_pages(session: &Session, file: FileId) {
    let (leases, cache) = (session.leases(), session.kernel().cache());
    if let Some(cache) = &cache {
        with(leases, file, Lease::begin_to_drop);
        cache.drop_pages(file, 0..u64::MAX).await;
    }
    with(leases, file, Lease::close);
    leases.notify(file);
    loop {
        leases.until(file, || with(leases, file, |lease| lease.users()) == 0).await;
        let stored = leases.until(file, || with(leases, file, |lease| lease.stores()) == 0);
        let_in_while(session, file, &(0..u64::MAX), STORE_LIMIT, stored).await;
        let Some(served) = with(leases, file, Lease::left_to_drop) else { return };
        let Some(cache) = &cache else { continue };
        for piece in served.pieces() {
            if !with(leases, file, |lease| lease.is_filled(&piece)) {
                let dropped = cache.drop_pages(file, piece.clone());
                let_in_while(session, file, &piece, DROP_LIMIT, dropped).await;
            }
        }
    }
}

/// Runs `work`, which waits for pages. Each time it has not ended after `limit`, admits the requests that may
/// have these pages locked.
async fn let_in_while(
    session: &Session,
    file: FileId,
    bytes: &Range<u64>,
    limit: Duration,
    work: impl Future<Output = ()>,
) {
    let mut work = pin!(work);
    while timeout(session.env(), limit, &mut work).await.is_none() {
        session.leases().with(file, |lease| lease.let_in(bytes));
        session.leases().notify(file);
    }
}

/// Syncs a file whose lease is being released. Writes that cannot be synced are lost, and every descriptor
/// reports that. Ends early once the era is over.
async fn sync_at_last(session: &Session, file: FileId, era: Era) -> Result<(), Failure> {
    let mut attempts = 1;
    let failure = loop {
        let mut synced = session.sync_file(file).await;
        // Another client may build on the file from now on: then nothing of it may be lost, or be sent again
        // here.
        while synced.is_ok() && session.is_owed(file) && session.era() == era {
            synced = session.sync_file(file).await.and(session.sync_names().await);
        }
        if session.era() != era {
            return Ok(());
        }
        match synced {
            Ok(()) => return Ok(()),
            Err(failure) if session.is_over() => {
                tracing::debug!(%failure, %file, "a lease ends with its session");
                return Err(failure);
            }
            Err(failure) if attempts == ATTEMPTS => break failure,
            Err(_) => session.env().sleep(PAUSE).await,
        }
        attempts += 1;
    };
    let is_unsent = session.files().with(file, |state| state.has_unsynced_writes()) == Some(true);
    if is_unsent || session.kept().is_uncommitted(file) {
        tracing::error!(%failure, %file, "writes are lost: another client wants the file");
        session.lose(file);
    } else {
        tracing::error!(%failure, %file, "another client gets a file that is not durable yet");
    }
    Err(failure)
}

/// Syncs a file for another client that waits for it. The failure is for that client too, and so is a loss
/// while this waited: what was lost may be what that client wants.
pub(crate) async fn sync_for_others(session: &Session, file: FileId) -> Result<(), Failure> {
    let state = session.files().get(file);
    let losses = || state.as_ref().map(|state| state.borrow().losses());
    let before = losses();
    let synced = session.sync_file(file).await.inspect_err(
        |failure| tracing::error!(%failure, %file, "a file could not be synced for another client yet"),
    );
    let is_lost = losses() != before;
    drop(state);
    session.files().forget_idle(file);
    if is_lost { synced.and(Err(lost(&format!("data written to inode {file}")))) } else { synced }
}

/// Gives up all leases, because another client arrives or the service no longer knows the grants. New
/// operations request leases from now on. Fails if writes are lost. `grant` is the last one that
/// the service had given in this era.
pub(crate) async fn give_up_everything(session: &Session, grant: u64, era: Era) -> Result<(), Failure> {
    let leases = session.leases();
    let is_over = || session.era() != era;
    if is_over() {
        return Ok(());
    }
    let (was_unleased, times_alone) = (leases.was_unleased(), leases.times_alone());
    leases.void_all(grant);
    let cache = session.kernel().cache();
    let names_expire = cache.as_ref().map(|cache| cache.names_expire());
    leases.no_unleased_use().await;
    let held = leases.grants().into_iter().map(|(file, held)| (file, held.min(grant))).collect();
    let given_up = in_turns(held, |(file, grant)| give_up(session, file, grant, era)).await;
    let sync = async |file: FileId| {
        // From now on the kernel reads pages with a lease. Do not wait for a page that it has locked for a
        // request which waits for a lease: other clients may be in the same situation and wait for this one.
        if let Some(cache) = cache.as_ref().filter(|_| was_unleased) {
            cache.drop_pages(file, 0..u64::MAX).await;
        }
        sync_at_last(session, file, era).await
    };
    let synced = in_turns(session.files_with_kept(|_| true, |_| true), sync).await;
    if !is_over() {
        leases.all_leased(times_alone);
    }
    if let Some(names_expire) = names_expire {
        names_expire.await;
    }
    if !is_over() {
        session.files().for_each(|file, state| {
            if !leases.has(file, Right::Shared) {
                state.make_stale();
            }
        });
    }
    given_up.and(synced)
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
