//! Watches the session: receives the calls of the service, keeps the session alive, and reacts to a lapse of
//! its lease time.

use crate::lease::Right;
use crate::revoke::{give_up, give_up_everything, sync_for_others};
use crate::session::{Era, PAUSE, Session};
use penstock_base::Branch;
use penstock_wire::metadata::{FailedSync, LeaseCall, PingReply, PingRequest, WatchReply, WatchRequest};
use penstock_wire::{Failure, Kind};
use std::rc::Rc;
use std::time::Duration;

/// Pings in one lease time.
const PINGS: u32 = 4;

/// Receives calls of the service until the session is over: revocations, requests to sync, and released
/// locks.
pub(crate) async fn watch_task(session: Rc<Session>) {
    let leases = session.leases();
    while !session.is_over() {
        leases.release_idle_attributes(session.env().now());
        let (released, resigned) = (leases.take_released(), leases.take_resigned());
        let (era, left) = (session.era(), leases.times_left());
        let wait = !leases.has_more_to_report();
        let request = WatchRequest { wait, released, resigned, ..watch_request(&session) };
        let reply: WatchReply = match session.ask(Kind::Watch, Branch::MAIN, &request).await {
            Ok(reply) => reply,
            Err(failure) => {
                tracing::debug!(%failure, "a watch request failed; it is repeated");
                session.env().sleep(PAUSE).await;
                continue;
            }
        };
        reply.unlocked.iter().for_each(|unlocked| session.locks().note_unlocked(unlocked.file()));
        if session.era() != era {
            // The reply may be about the time before. The service tells what is so now to the next request.
            continue;
        }
        take_news(&session, &reply);
        for call in reply.calls {
            leases.saw(call.number);
            if call.ino == 0 && !call.is_sync {
                // Before the next request, because that reports this flag to the service.
                leases.become_shared();
            }
            let answered = session.clone();
            session.env().spawn("lease call", Box::pin(async move { answer(&answered, call, era).await }));
        }
        match reply.alone {
            // The reply may be about the time before this client has left.
            _ if leases.times_left() != left => {}
            true => leases.become_alone(),
            false if leases.says_alone() => {
                tracing::error!(
                    "the service names this client the sole one no more and has not asked it first"
                );
                leases.become_shared();
                let (asked, grant) = (session.clone(), leases.seen());
                let give_up = async move {
                    if let Err(failure) = give_up_everything(&asked, grant, era).await {
                        tracing::error!(%failure, "not everything could be given up");
                    }
                };
                session.env().spawn("not alone", Box::pin(give_up));
            }
            // Also a client that uses only names, and never asks for a lease, may be beside others.
            false => leases.meet_others(),
        }
    }
}

/// Takes in the outcomes that requests of this client wait for. Before calls: one may be about a lease that
/// was just granted.
fn take_news(session: &Session, reply: &WatchReply) {
    let leases = session.leases();
    for granted in &reply.granted {
        leases.granted(granted.file(), Right::to_be(granted.exclusive), granted.grant);
        leases.saw(granted.grant);
    }
    for synced in &reply.synced {
        session.tickets().end(synced.ticket, synced.errno);
        leases.saw(synced.number);
    }
    reply.unlocked.iter().for_each(|unlocked| leases.saw(unlocked.number));
    if reply.again > 0 {
        leases.note_again();
        leases.saw(reply.again);
    }
}

/// Does what the service asks for in this era, and answers, unless the era has ended meanwhile: then it may
/// not have been done. Each start of the service numbers calls and grants anew, and the present one asks for
/// everything once more.
async fn answer(session: &Session, call: LeaseCall, era: Era) {
    let file = call.file();
    let result = match (call.is_sync, call.ino) {
        (true, _) => sync_for_others(session, file).await,
        (false, 0) => {
            let given_up = give_up_everything(session, call.grant, era).await;
            // The service may be about to stop.
            given_up.and(session.sync_names().await)
        }
        (false, _) if call.attributes => {
            session.leases().revoke_attributes(file, call.grant);
            if let Some(cache) = session.kernel().cache() {
                cache.forget_attributes(file).await;
            }
            Ok(())
        }
        (false, _) => give_up(session, file, call.grant, era).await,
    };
    if session.era() != era {
        return;
    }
    let failed = |failure: Failure| {
        tracing::debug!(%failure, "a call of the service is answered with an error");
        FailedSync { number: call.number, errno: failure.errno.into() }
    };
    let failed = result.err().map(failed).into_iter().collect();
    let generation = era.generation();
    let answered = WatchRequest { answered: vec![call.number], failed, generation, ..watch_request(session) };
    if let Err(failure) = session.ask::<WatchReply>(Kind::Watch, Branch::MAIN, &answered).await {
        tracing::debug!(%failure, "a call was not answered: the session has ended");
    }
}

fn watch_request(session: &Session) -> WatchRequest {
    WatchRequest {
        seen: session.leases().seen(),
        alone: session.leases().says_alone(),
        generation: session.restarts().generation().unwrap_or_default(),
        ..WatchRequest::default()
    }
}

/// Makes everything durable and gives up all leases, so that the next client need not wait for this one. The
/// kernel behind this client is gone, or has nothing cached.
/// Reports all losses, after that. If something cannot be made durable the leases are kept.
pub(crate) async fn leave(session: &Session) -> Result<(), Failure> {
    session.sync_rest().await?;
    let reported = session.report_all();
    session.leases().leave();
    session.end_waits();
    session.files().for_each(|_, state| state.make_stale());
    let leaving = WatchRequest { leaves: true, ..watch_request(session) };
    session.ask::<WatchReply>(Kind::Watch, Branch::MAIN, &leaving).await?;
    reported
}

/// Keeps the session alive with [`PINGS`] pings in each lease time.
pub(crate) async fn lease_task(session: Rc<Session>, lease: Duration) {
    while !session.is_over() {
        let due = session.env().now() + lease / PINGS;
        if let Err(failure) = ping(&session).await {
            tracing::debug!(%failure, "the service was not told that this client lives");
            session.env().sleep(lease / PINGS).await;
        }
        // A late answer is only as recent as its request.
        session.env().sleep(due.saturating_sub(session.env().now())).await;
    }
}

async fn ping(session: &Session) -> Result<(), Failure> {
    session.ask::<PingReply>(Kind::Ping, Branch::MAIN, &PingRequest::default()).await.map(drop)
}

/// Makes the kernel drop its pages of files once the service has not answered for so long that others may
/// change them.
pub(crate) async fn lapse_task(session: Rc<Session>) {
    let clock = session.leases().clock();
    let is_over = || session.is_over();
    loop {
        let (until, within) = clock.run_out(is_over).await;
        if is_over() {
            return;
        }
        tracing::warn!(
            "the service does not answer: programs wait until it does, for others may change what this mount has"
        );
        if let Some(cache) = session.kernel().cache() {
            let size = |file| session.files().with(file, |state| state.size()).unwrap_or(0);
            let files = session.open_files().into_iter().map(|file| (file, size(file))).collect();
            cache.hide_pages(files, within, &|| !clock.ran_since(until)).await;
        }
        if clock.ran_since(until) {
            // The time ran on meanwhile. If it has run out again, pages that the kernel got in between are
            // still there.
            continue;
        }
        clock.running(is_over).await;
        if is_over() {
            return;
        }
        tracing::warn!("the service answers again");
    }
}
