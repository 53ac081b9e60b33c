//! Advisory locks, which the service keeps for all clients.

use crate::client::Client;
use penstock_base::FileId;
use penstock_wire::Failure;
use penstock_wire::metadata::{LockChange, LockReply, LockRequest};
use std::time::Duration;
use tokio::sync::Notify;

/// Pause before a request is repeated while the service does not know all locks yet.
const EARLY: Duration = Duration::from_millis(50);
/// A request that waits for a lock is repeated after this, in case the client is not notified of a release.
const ASK_AGAIN: Duration = Duration::from_secs(1);

/// The answer to one request for a lock.
enum Answer {
    /// The service does not know all locks yet.
    Early,
    /// Another lock is in the way.
    Conflict(LockRequest),
    /// It is set, released, or could be set.
    Done,
}

impl Client {
    /// Sets, tests or releases a lock. Returns the lock that conflicts, or `None`.
    pub async fn lock(&self, request: &LockRequest) -> Result<Option<LockRequest>, Failure> {
        loop {
            match self.try_lock(request).await? {
                Answer::Early => self.session.env().sleep(EARLY).await,
                Answer::Conflict(lock) => return Ok(Some(lock)),
                Answer::Done => return Ok(None),
            }
        }
    }

    async fn try_lock(&self, request: &LockRequest) -> Result<Answer, Failure> {
        let (locks, unlocks) = (self.session.locks(), request.change() == LockChange::Unlock);
        let begin = async || {
            let changing = locks.change().await;
            (changing, if unlocks { locks.give_up(request) } else { Vec::new() })
        };
        let ((_changing, before), reply) = self.session.change_lock(request, begin).await?;
        if reply.is_err() {
            // The service kept the locks, because it lacks space for the remaining parts.
            before.iter().for_each(|lock| locks.note(lock));
        }
        match reply {
            // After a restart: this client has not reported its locks, or another one has not.
            Ok(LockReply { early: true, .. }) => Ok(Answer::Early),
            Err(failure) if failure.is_ask_again() => Ok(Answer::Early),
            Err(failure) => Err(failure),
            Ok(LockReply { conflict: Some(lock), .. }) => Ok(Answer::Conflict(lock)),
            Ok(LockReply { conflict: None, .. }) => {
                if !request.test && !unlocks {
                    locks.note(request);
                }
                Ok(Answer::Done)
            }
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
        let news = locks.news_of(request.file());
        let mut first = true;
        loop {
            let told = news.changed();
            let again = {
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
                match self.try_lock(&request).await? {
                    Answer::Done => return Ok(true),
                    Answer::Conflict(_) => ASK_AGAIN,
                    Answer::Early => EARLY,
                }
            };
            tokio::select! {
                biased;
                () = told => {}
                () = self.session.env().sleep(again) => {}
                () = interrupted.notified() => return Ok(false),
            }
        }
    }

    /// Releases all locks of an owner on a file. Sends nothing if there are none.
    pub async fn unlock_all(&self, file: FileId, owner: u64, flock: bool) -> Result<(), Failure> {
        if !self.session.locks().has(file, owner, flock) {
            return Ok(());
        }
        let request = LockRequest {
            ino: file.ino.0,
            branch: file.branch.0,
            owner,
            last: u64::MAX,
            change: LockChange::Unlock.into(),
            flock,
            ..LockRequest::default()
        };
        self.lock(&request).await.map(drop)
    }
}
