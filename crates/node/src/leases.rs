//! Session leases: ends the session of a remote client that has been silent for too long.

use crate::admin::AdminError;
use crate::assemble::Node;
use crate::events::{EventKind, Severity};
use crate::report::SessionReport;
use penstock_session::SessionInfo;
use std::rc::Rc;
use std::time::Duration;

/// Checks in one lease time: a session ends late by at most one part in this many of its lease time.
const LOOKS: u32 = 5;

impl Node {
    /// Sets the lease time of remote clients' sessions. Called at the start, before there are any.
    pub fn set_lease(&self, lease: Duration) {
        self.clients.set_lease(lease);
    }

    /// Makes clients in other processes sync their changes and stop changing anything, before the service
    /// stops. Returns the sessions that have not finished within `limit` although they are connected.
    pub async fn call_everything_back(
        &self,
        limit: Duration,
        is_connected: impl Fn(u64) -> bool,
    ) -> Vec<SessionInfo> {
        self.clients.revoke_everything(limit, is_connected).await
    }

    /// Reports of all sessions.
    pub fn session_reports(&self) -> Vec<SessionReport> {
        let report = |session: SessionInfo| SessionReport {
            id: session.id,
            client: session.client,
            mount: session.mount,
            remote: session.lease.is_some(),
            silent_ms: u64::try_from(session.silent.as_millis()).unwrap_or(u64::MAX),
            open_inodes: session.open_inodes,
        };
        self.clients.sessions().into_iter().map(report).collect()
    }

    /// Sets the path at which a client of this process mounts; empty if it does not.
    pub fn note_mount(&self, session: u64, path: &str) {
        self.clients.set_mount(session, path);
    }

    /// Refuses a repair while the file system is mounted: kernels cache names and attributes of a mount, and
    /// a repair may change them without notice.
    pub fn refuse_while_mounted(&self) -> Result<(), AdminError> {
        let holds = |session: &SessionInfo| session.lease.is_some() || !session.mount.is_empty();
        match self.clients.sessions().into_iter().find(holds) {
            None => Ok(()),
            Some(session) => Err(AdminError::Refused(format!(
                "nothing was repaired: the file system is mounted at {} by {}; `penstock umount` takes it away",
                session.mount, session.client
            ))),
        }
    }

    pub(crate) async fn lease_task(self: Rc<Self>) {
        while !self.clients.is_stopped() {
            let (lease, before) = (self.clients.lease(), self.env.now());
            self.env.sleep(lease / LOOKS).await;
            // This process was suspended or overloaded, and could not receive requests: no client counts as
            // silent.
            if self.env.now() - before > lease / LOOKS * 2 {
                self.clients.renew_leases();
                continue;
            }
            let silent = |session: &SessionInfo| session.lease.is_some_and(|lease| session.silent > lease);
            for session in self.clients.sessions().into_iter().filter(silent) {
                let text = format!("{session} was silent for {} s and has ended", session.silent.as_secs());
                self.events.add(Severity::Warning, EventKind::SessionEnded, "fs main", text);
                if let Err(error) = self.meta.end_session(session.id).await {
                    tracing::warn!(%error, session = session.id, "rows of a session stay until the next start");
                }
            }
        }
    }
}
