//! Advisory locks, which the service keeps for all clients.

use crate::client::Client;
use penstock_base::Ino;
use penstock_wire::metadata::{LockChange, LockReply, LockRequest};
use penstock_wire::{Failure, Kind};
use std::time::Duration;
use tokio::sync::Notify;

/// Pause before a request is repeated while the service does not know all locks yet.
const EARLY: Duration = Duration::from_millis(50);
/// A request that waits for a lock is repeated after this, in case the client is not notified of a release.
const ASK_AGAIN: Duration = Duration::from_secs(1);

impl Client {
    /// Sets, tests or releases a lock. Returns the lock that conflicts, or `None`.
    pub async fn lock(&self, request: &LockRequest) -> Result<Option<LockRequest>, Failure> {
        let (locks, unlocks) = (self.session.locks(), request.change() == LockChange::Unlock);
        loop {
            let changing = locks.change().await;
            let before = if unlocks { locks.give_up(request) } else { Vec::new() };
            let reply: Result<LockReply, Failure> = self.session.once(Kind::Lock, request).await;
            if reply.is_err() {
                // The service kept the locks, because it lacks space for the remaining parts.
                before.iter().for_each(|lock| locks.note(lock));
            }
            let reply = reply?;
            if reply.early {
                drop(changing);
                self.session.env().sleep(EARLY).await;
                continue;
            }
            if reply.conflict.is_none() && !request.test && !unlocks {
                locks.note(request);
            }
            return Ok(reply.conflict);
        }
    }

    /// Sets a lock once it is free. Returns false if `interrupted` is notified first.
    pub async fn lock_waiting(
        &self,
        mut request: LockRequest,
        interrupted: &Notify,
    ) -> Result<bool, Failure> {
        request.wait = true;
        let locks = self.session.locks();
        let news = locks.news_of(Ino(request.ino));
        let mut first = true;
        loop {
            let told = news.told();
            {
                let turn = locks.turn();
                let _turn = match first {
                    true => None,
                    false => tokio::select! {
                        biased;
                        () = interrupted.notified() => return Ok(false),
                        turn = turn => turn,
                    },
                };
                first = false;
                if self.lock(&request).await?.is_none() {
                    return Ok(true);
                }
            }
            tokio::select! {
                biased;
                () = told => {}
                () = self.session.env().sleep(ASK_AGAIN) => {}
                () = interrupted.notified() => return Ok(false),
            }
        }
    }

    /// Releases all locks of an owner on a file. Sends nothing if there are none.
    pub async fn unlock_all(&self, ino: Ino, owner: u64, flock: bool) -> Result<(), Failure> {
        if !self.session.locks().has(ino, owner, flock) {
            return Ok(());
        }
        let request = LockRequest {
            ino: ino.0,
            owner,
            last: u64::MAX,
            change: LockChange::Unlock.into(),
            flock,
            ..LockRequest::default()
        };
        self.lock(&request).await.map(drop)
    }
}
