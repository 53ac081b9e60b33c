//! Session leases: ends the session of a remote client that has been silent for too long, or that has owed an
//! answer to others for too long, or that does not recover after a restart.

use crate::event::{EventKind, Severity};
use crate::node::Node;
use penstock_base::rank::scoped;
use penstock_meta::MetaError;
use penstock_session::SessionInfo;
use std::rc::Rc;

/// Checks in one lease time: a session ends late by at most one part in this many of its lease time.
const LOOKS: u32 = 5;

/// Ends silent sessions, and those that do not answer, until the services stop.
pub(crate) async fn run(node: Rc<Node>) {
    while !node.clients.is_stopped() {
        let (lease, before) = (node.clients.lease(), node.env.now());
        node.env.sleep(lease / LOOKS).await;
        // This process was suspended or overloaded, and could not receive requests: no client counts as
        // silent.
        if node.env.now() - before > lease / LOOKS * 2 {
            node.clients.renew_leases();
            continue;
        }
        for (session, locks) in node.clients.take_lost_locks() {
            let text = format!(
                "session {session} lost {locks} locks over the restart: another one has said that they were its own, \
                 or there are too many"
            );
            node.events.add(Severity::Warning, EventKind::LocksLost, "fs main", text);
        }
        for session in node.clients.sessions().into_iter().filter(SessionInfo::is_silent) {
            let done = scoped(node.meta.end_if_silent(session.id)).await;
            report(&node, &session, done, || format!("was silent for {} s", session.silent.as_secs()));
        }
        for (session, call) in node.clients.unanswered() {
            let done = scoped(node.meta.end_if_unanswered(session.id, call)).await;
            report(&node, &session, done, || "did not answer a call while others waited for it".into());
        }
        for session in node.clients.stuck_in_recovery() {
            let done = scoped(node.meta.end_if_stuck(&session)).await;
            report(&node, &session, done, || "did not recover after a restart while others waited".into());
        }
    }
}

/// Reports a session that was ended, or that could not be.
fn report(node: &Node, session: &SessionInfo, done: Result<bool, MetaError>, why: impl FnOnce() -> String) {
    match done {
        Ok(false) => {}
        Ok(true) => {
            let text = format!("{session} {} and has ended", why());
            node.events.add(Severity::Warning, EventKind::SessionEnded, "fs main", text);
        }
        Err(error) => {
            let what = "a session that must end keeps its locks: its rows cannot be deleted";
            tracing::error!(%error, session = session.id, why = why(), "{what}");
        }
    }
}
