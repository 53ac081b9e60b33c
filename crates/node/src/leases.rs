//! Session leases: ends the session of a remote client that has been silent for too long.

use crate::event::{EventKind, Severity};
use crate::node::Node;
use penstock_base::rank::scoped;
use penstock_session::SessionInfo;
use std::rc::Rc;

/// Checks in one lease time: a session ends late by at most one part in this many of its lease time.
const LOOKS: u32 = 5;

/// Ends silent sessions until the services stop.
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
        for session in node.clients.sessions().into_iter().filter(SessionInfo::is_silent) {
            match scoped(node.meta.end_if_silent(session.id)).await {
                Ok(false) => {}
                Ok(true) => {
                    let silent = session.silent.as_secs();
                    let text = format!("{session} was silent for {silent} s and has ended");
                    node.events.add(Severity::Warning, EventKind::SessionEnded, "fs main", text);
                }
                Err(error) => {
                    let why = "a silent session keeps its locks: its rows cannot be deleted";
                    tracing::error!(%error, session = session.id, "{why}");
                }
            }
        }
    }
}
