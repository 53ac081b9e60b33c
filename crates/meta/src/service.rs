//! The metadata service: dispatches requests by kind, from an encoded request to an encoded reply.

use crate::access::Asker;
use crate::error::MetaError;
use crate::names::Turn;
use crate::parts::Parts;
use crate::target::MetaTarget;
use crate::{ROOT, ops};
use futures_util::future::join;
use penstock_base::env::{timeout, yield_now};
use penstock_base::features::GATEWAYS;
use penstock_base::num::to_u32;
use penstock_base::rank::scoped;
use penstock_base::{Branch, ErrorKind, FileId, Id128, Ino, TargetId};
use penstock_kv::WriteSet;
use penstock_session::rows::SessionRow;
use penstock_session::{Changing, Repeat, Request, Role, SessionInfo, Slot, grants, joins};
use penstock_wire::data::Right;
use penstock_wire::metadata::{
    ACCESS_READ, ACCESS_WRITE, AttrReply, EmptyReply, GetAttrRequest, HelloReply, HelloRequest, LockChange,
    LockRequest, MakeRequest, OpenRequest, PingReply, PingRequest, ROLE_GATEWAY, ROLE_MOUNT, RepeatRequest,
    TargetPlace, UserReply, set_id_bits,
};
use penstock_wire::{Failure, Header, Kind, SESSIONS};
use prost::Message;
use rustix::io::Errno;
use std::rc::Rc;
use std::time::Duration;

/// Time for the last writes of a session before its end is reported. Its leases and locks go when they have
/// ended.
const LAST_WRITES: Duration = Duration::from_secs(1);
/// Attempts to make the last writes of a session durable.
const LAST_COMMITS: u32 = 5;
/// Delay before another one.
const COMMIT_AGAIN: Duration = Duration::from_secs(1);
/// The least bound on the number of a change that a client may repeat, and on a truncate generation that one
/// may leave.
const LAST_CHANGE: u64 = 1 << 52;
/// Longest client name, and below longest mount path, that a client may send, in bytes.
const NAME_BYTES: usize = 256;
const PATH_BYTES: usize = 4096;
/// Most opens, and most locks, that are taken over before others proceed.
const RECLAIMED_AT_ONCE: usize = 64;
/// Most opens and locks in one request. Clients send 4,096.
const RECLAIMED_MOST: usize = 1 << 13;

impl MetaTarget {
    /// Executes a request. A repeat of a request that was executed is answered with its stored result.
    pub async fn serve(&self, header: &Header, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let who = self.parts.clients.request(header)?;
        self.parts.clients.check_user(header)?;
        if header.kind == Kind::Repeat {
            // The largest are boxed: each request is kept and moved with room for the largest that is not.
            return Box::pin(self.repeat(who, body)).await;
        }
        if who.sequence == 0 {
            let _changing = self.check_others(who, header, body).await?;
            return Ok(self.dispatch(header.kind, who, body).await?);
        }
        match self.parts.clients.slot(who).await? {
            Slot::Done(outcome) => {
                self.open_again(header.kind, who, body, &outcome).await?;
                outcome
            }
            Slot::Execute(slot) => {
                // In the slot: a repeat of a request that was carried out must get its outcome, and not be
                // asked to be sent again, which the client does in another slot.
                let _changing = self.check_others(who, header, body).await?;
                let outcome = self.dispatch(header.kind, who, body).await.map_err(Failure::from);
                if !outcome.as_ref().is_err_and(Failure::is_ask_again) {
                    slot.keep(&outcome);
                }
                outcome
            }
        }
    }

    /// Counts the open of a file that was made by an earlier start, whose reply has not arrived: the client
    /// could not report it. ESTALE if it is gone.
    async fn open_again(
        &self,
        kind: Kind,
        who: Request,
        body: &[u8],
        outcome: &Result<Vec<u8>, Failure>,
    ) -> Result<(), Failure> {
        let Ok(reply) = outcome else { return Ok(()) };
        if kind != Kind::Make || who.user != 0 || !MakeRequest::decode(body).map_err(MetaError::from)?.open {
            return Ok(());
        }
        if self.parts.clients.owes_opens(who.session) || !self.parts.clients.take_read_back(who) {
            return Ok(());
        }
        let attr = AttrReply::decode(&reply[..]).map_err(MetaError::from)?.attr.unwrap_or_default();
        let ino = Ino(attr.ino);
        self.parts.open(who.session, ino)?;
        let found = self.parts.names.inode(ino).await;
        if found.is_err() {
            self.parts.close(who.session, ino);
        }
        Ok(found.map(drop)?)
    }

    /// Makes a change again that an earlier start of the service had acknowledged. The caller has the turn of
    /// the session to repeat it ([`penstock_session::Clients::turn_to_repeat`]). If the change is not lost,
    /// its stored result is the reply.
    async fn repeat(&self, who: Request, body: &[u8]) -> Result<Vec<u8>, Failure> {
        let refused = |why: &str| Failure::from(MetaError::Request(why.into()));
        let RepeatRequest { kind, body, change, made, .. } =
            Message::decode(body).map_err(MetaError::from)?;
        if kind == 0 && who.sequence == 0 {
            // The client only waited for its turn.
            return Ok(Vec::new());
        }
        let kind = u16::try_from(kind).ok().and_then(Kind::from_u16).filter(|kind| kind.changes_names());
        // No service makes a change in each nanosecond. The bound rises faster than changes are made, so it
        // is above the numbers of all changes after one that was repeated, also for the next start.
        let bound = LAST_CHANGE.max(self.parts.names.now_ns());
        let is_made = change.number.max(change.truncations) <= bound && change.time.is_valid();
        let kind = kind.filter(|_| who.user == 0 && who.sequence != 0 && is_made);
        let Some(kind) = kind else {
            self.parts.clients.note_refused_repeat();
            return Err(refused("a change of names is repeated by a mount, as it was made"));
        };
        let repeats = Some(Repeat { change, made: (made > 0).then_some(Ino(made)) });
        match self.parts.clients.slot(Request { repeats, ..who }).await? {
            Slot::Done(outcome) => outcome,
            Slot::Execute(_) if !self.parts.clients.owes_opens(who.session) => {
                Err(refused("the session has reported that it repeats nothing more"))
            }
            Slot::Execute(slot) => {
                let outcome = self.dispatch(kind, Request { repeats, ..who }, &body).await;
                let outcome = outcome.map_err(Failure::from);
                if outcome.is_err() {
                    self.parts.clients.note_refused_repeat();
                }
                slot.keep(&outcome);
                outcome
            }
        }
    }

    /// Fails if other clients have yet to give up something that the request concerns. Nothing is kept then:
    /// the client asks again. The result lasts while the request is executed.
    async fn check_others(
        &self,
        who: Request,
        header: &Header,
        body: &[u8],
    ) -> Result<Option<Changing>, Failure> {
        let Header { kind, session, branch, .. } = *header;
        if joins(kind) {
            self.parts.clients.join_for(header, body)?;
        }
        if kind != Kind::SetAttr {
            // A change of attributes may be a part of what a client does to give something up.
            if kind.changes_names() {
                self.parts.clients.may_change_names(session)?;
            }
            return Ok(None);
        }
        if who.user > 0 {
            // Nobody gives up anything for a user who may not make the change.
            ops::may_set(&self.parts, who, Message::decode(body).map_err(MetaError::from)?).await?;
        }
        self.parts.clients.may_resize(session, Branch(branch), body)
    }

    async fn dispatch(&self, kind: Kind, who: Request, body: &[u8]) -> Result<Vec<u8>, MetaError> {
        let parts = &*self.parts;
        match kind {
            Kind::Ping => {
                let refused_locks = self.reclaim(who.session, PingRequest::decode(body)?).await?;
                Ok(PingReply { unreported: parts.clients.unreported(), refused_locks }.encode_to_vec())
            }
            Kind::User => {
                let user = parts.clients.add_user(who.session, Message::decode(body)?);
                let user = user.map_err(|failure| MetaError::Request(failure.message))?;
                Ok(UserReply { user }.encode_to_vec())
            }
            Kind::End => {
                self.parts.clients.done(who.session);
                self.end_session(who.session).await?;
                Ok(EmptyReply {}.encode_to_vec())
            }
            Kind::Lookup => ops::lookup(parts, who, Message::decode(body)?).await,
            Kind::GetAttr => {
                let GetAttrRequest { ino, lease, .. } = Message::decode(body)?;
                ops::get_attr(parts, who, Ino(ino), lease).await
            }
            Kind::SetAttr => Box::pin(ops::set_attr(parts, who, Message::decode(body)?)).await,
            Kind::Make => ops::make(parts, who, Message::decode(body)?).await,
            Kind::Link => ops::link(parts, who, Message::decode(body)?).await,
            Kind::Unlink => ops::unlink(parts, who, Message::decode(body)?).await,
            Kind::Rename => Box::pin(ops::rename(parts, who, Message::decode(body)?)).await,
            Kind::ReadDir => ops::read_dir(parts, who, Message::decode(body)?).await,
            Kind::ReadLink => ops::read_link(parts, who, Message::decode(body)?).await,
            Kind::Open | Kind::Close => self.open_or_close(kind, who, Message::decode(body)?).await,
            Kind::GetXattr => ops::get_xattr(parts, who, Message::decode(body)?).await,
            Kind::SetXattr => ops::set_xattr(parts, who, Message::decode(body)?).await,
            Kind::ListXattr => ops::list_xattr(parts, who, Message::decode(body)?).await,
            Kind::RemoveXattr => ops::remove_xattr(parts, who, Message::decode(body)?).await,
            Kind::Lock => {
                let mut lock: LockRequest = Message::decode(body)?;
                let asker = Asker::of(parts, who)?;
                if let Some(user) = asker.user() {
                    // A user locks what it has open, and on its own account.
                    asker.has_open(Ino(lock.ino), access_to_lock(&lock))?;
                    lock.uid = user.uid;
                }
                if lock.branch != 0 {
                    // The header has it; the node has checked that.
                    return Err(MetaError::Request(format!("a lock of branch {}", lock.branch)));
                }
                Ok(self.parts.clients.lock(who.session, who.user, &lock)?.encode_to_vec())
            }
            Kind::StatFs => Ok(ops::stat_fs(parts)),
            Kind::Sync => {
                self.sync().await?;
                Ok(EmptyReply {}.encode_to_vec())
            }
            Kind::Hello
            | Kind::Watch
            | Kind::Lease
            | Kind::Closing
            | Kind::Read
            | Kind::Write
            | Kind::Commit
            | Kind::Seek
            | Kind::Space
            | Kind::Repeat
            | Kind::FetchStrip
            | Kind::PlaceStrip => Err(MetaError::Request(format!("{kind:?} is not for a metadata target"))),
        }
    }

    /// Fails unless the user who asks for a lease or for attributes has reached the inode. A lease also needs
    /// the inode open: others wait for it.
    pub fn check_names(&self, header: &Header, body: &[u8]) -> Result<(), Failure> {
        self.parts.clients.check_user(header)?;
        let asker = Asker::of(&self.parts, self.parts.clients.request(header)?)?;
        // Both bodies begin with the inode.
        let GetAttrRequest { ino, .. } = Message::decode(body).map_err(MetaError::from)?;
        match header.kind {
            Kind::Lease => asker.has_open(Ino(ino), 0)?,
            _ => asker.names(Ino(ino))?,
        }
        Ok(())
    }

    /// Fails with EACCES unless a data request has a grant of its user. A user who is not privileged changes
    /// no file that has set-id bits: they go first (RefreshMap).
    pub async fn check_right(&self, header: &Header, body: &[u8]) -> Result<(), Failure> {
        let who = self.parts.clients.request(header)?;
        let asker = Asker::of(&self.parts, who)?;
        let (ino, right) = Right::of_request(body)?;
        let changes = matches!(header.kind, Kind::Write | Kind::Space);
        let wanted = match header.kind {
            Kind::Read | Kind::Seek => grants::READ,
            Kind::Write | Kind::Space => grants::WRITE,
            // To make durable what others wrote harms nobody.
            _ => 0,
        };
        if !asker.has_right(ino, &right, wanted) {
            return Err(MetaError::from(Errno::ACCESS).into());
        }
        let inode = self.parts.names.inode(ino).await?;
        if inode.nlink == 0 && !self.parts.is_used(ino) {
            // The rest of it reads as zeros.
            return Err(MetaError::from(Errno::STALE).into());
        }
        if changes
            && !asker.is_privileged()
            && (set_id_bits(inode.mode) != 0 || ops::has_capabilities(&self.parts, ino).await?)
        {
            let why = "the file has set-id bits or capabilities, which must go first";
            return Err(Failure::new(ErrorKind::RefreshMap, why));
        }
        Ok(())
    }

    async fn open_or_close(
        &self,
        kind: Kind,
        who: Request,
        request: OpenRequest,
    ) -> Result<Vec<u8>, MetaError> {
        let ino = Ino(request.ino);
        let asker = Asker::of(&self.parts, who)?;
        if kind == Kind::Close {
            asker.close(ino)?;
            self.parts.close(who.session, ino);
            return Ok(EmptyReply {}.encode_to_vec());
        }
        self.parts.settle(who.session, ino).await?;
        let mut grant = None;
        if !asker.is_trusted() {
            asker.names(ino)?;
            let inode = self.parts.names.inode(ino).await?;
            asker.may_open(&inode, request.access).await?;
            grant = asker.grant(&inode, request.access);
        }
        // Counted before the inode is read, so that a removal from here on sees the user.
        self.parts.open(who.session, ino)?;
        if let Err(error) = asker.open(ino, request.access) {
            self.parts.close(who.session, ino);
            return Err(error);
        }
        match self.parts.attr_now(ino).await {
            Ok(attr) => {
                let may_be_unsynced =
                    self.parts.clients.is_unsynced_elsewhere(who.session, FileId::main(ino));
                Ok(AttrReply { attr: Some(attr), may_be_unsynced, grant, ..AttrReply::default() }
                    .encode_to_vec())
            }
            Err(error) => {
                self.parts.close(who.session, ino);
                asker.close(ino).and(Err(error))
            }
        }
    }

    /// Serves the first exchange of a connection. It starts a session; with the number of one it goes on with
    /// that. With `remote` (a client of another process) the session has a lease time.
    pub async fn hello(&self, number: u64, body: &[u8], remote: bool) -> Result<Vec<u8>, Failure> {
        let request: HelloRequest = Message::decode(body).map_err(MetaError::from)?;
        let (name, role) = Self::check_hello(&request)?;
        match number {
            0 => Ok(self.begin_session((name, role), request, remote).await?),
            _ => Ok(self.greeted(number, self.parts.clients.goes_on(name, number, remote)?)),
        }
    }

    /// Returns the name and the role of the session that is asked for. Fails if the request asks for anything
    /// that this release does not have.
    fn check_hello(request: &HelloRequest) -> Result<(Id128, Role), MetaError> {
        let name = <[u8; 16]>::try_from(&request.name[..]).map(Id128).unwrap_or_default();
        if name.is_nil() {
            return Err(MetaError::Request("the name of a session is 16 random bytes".into()));
        }
        let role = role_of(request.role)?;
        if !request.fileset.is_empty() {
            return Err(MetaError::Request(format!("there is no fileset {:?}", request.fileset)));
        }
        if request.lane != 0 {
            return Err(MetaError::Request(format!("lane {}: a session has one connection", request.lane)));
        }
        if request.client.len() > NAME_BYTES || request.mount.len() > PATH_BYTES {
            return Err(MetaError::Request("the name of a client or of its mount is too long".into()));
        }
        Ok((name, role))
    }

    async fn begin_session(
        &self,
        (name, role): (Id128, Role),
        request: HelloRequest,
        remote: bool,
    ) -> Result<Vec<u8>, MetaError> {
        let mut turn = self.parts.names.turn().await;
        // In the turn: one that comes back meanwhile has a connection, or waits for the turn.
        while let Some(idle) = self.parts.clients.in_the_way_of(name).filter(|_| remote) {
            self.end_in_turn(idle, turn).await?;
            turn = self.parts.names.turn().await;
        }
        // The reply to an earlier Hello was lost.
        if let Some((session, lease_ms)) = self.parts.clients.greeted_again(name, role, remote)? {
            // Removed files may have waited for a report of this session.
            self.parts.wake_reaper();
            return Ok(self.greeted(session, lease_ms));
        }
        if remote && self.parts.clients.remote_count() >= SESSIONS {
            return Err(MetaError::Request(format!("there are {SESSIONS} sessions, which is the most")));
        }
        let mut writes = WriteSet::new();
        let session = turn.new_session(&mut writes, |session| self.parts.clients.is_in_use(session));
        let lease_ms = if remote { to_u32(self.parts.clients.lease().as_millis()) } else { 0 };
        let (client, mount) = (request.client, request.mount);
        let who = SessionRow { number: session, client, mount, lease_ms, role };
        if who.role == Role::Gateway {
            self.parts.names.note_feature(GATEWAYS, &mut writes).await?;
        }
        // Dropped before the turn, so that nobody who waits for the turn finds the session silent.
        let _serving = self.parts.clients.begin_session(name, who, &mut writes);
        let committed = turn.commit(Request::default(), writes, Vec::new(), &[]).await;
        // If a crash lost the number, it would be given to a second client while the first one still uses it.
        let durable = async || if remote { Ok(self.parts.names.kv().flush().await?) } else { Ok(()) };
        let begun = match committed {
            Ok(()) => durable().await,
            failed => failed,
        };
        if let Err(error) = begun {
            // Its row may be there, and a start would bring it back. Session numbers follow each other, so
            // somebody may also have used this one already.
            if let Err(again) = self.end_in_turn(session, turn).await {
                tracing::warn!(session, %again, "a session that did not begin cannot be ended yet");
            }
            return Err(error);
        }
        Ok(self.greeted(session, lease_ms))
    }

    /// Makes the row of a session of this process durable, before its first request about files.
    pub async fn note_session(&self, id: u64) -> Result<(), MetaError> {
        let turn = self.parts.names.turn().await;
        if let Some(writes) = self.parts.clients.missing_row(id) {
            turn.commit(Request::default(), writes, Vec::new(), &[]).await?;
            self.parts.names.kv().flush().await?;
            self.parts.clients.note_row(id);
        }
        Ok(())
    }

    /// The reply to a client that has this session.
    fn greeted(&self, session: u64, lease_ms: u32) -> Vec<u8> {
        assert!(session > 0, "0 is the number of no session");
        let chunk_blocks = self.parts.names.fs().chunk_blocks;
        let place = |target: TargetId| TargetPlace { target: target.0, addresses: Vec::new() };
        let targets = self.parts.elsewhere.all().map(place).collect();
        HelloReply { session, root: ROOT.0, branch: 0, chunk_blocks, lease_ms, targets, fileset: 0 }
            .encode_to_vec()
    }

    /// Ends a session: its rows are deleted, and then its opens, leases and locks end. If the rows cannot be
    /// deleted, a session that a start would bring back keeps those, and has ended only for its client.
    pub async fn end_session(&self, id: u64) -> Result<(), MetaError> {
        // A request of this session that is changing something records its result before the session's rows
        // are deleted.
        let turn = self.parts.names.turn().await;
        self.end_in_turn(id, turn).await
    }

    /// Ends a session whose client is silent, as [`Self::end_session`] does, and returns true. Waits before,
    /// as for a check to end. A client that is heard meanwhile keeps its session.
    pub async fn end_if_silent(&self, id: u64) -> Result<bool, MetaError> {
        let turn = self.parts.names.turn().await;
        match self.parts.clients.is_silent(id) {
            true => self.end_in_turn(id, turn).await.map(|()| true),
            false => Ok(false),
        }
    }

    /// Ends a session that survived a restart if it still does nothing to recover. Returns true if it did.
    pub async fn end_if_stuck(&self, session: &SessionInfo) -> Result<bool, MetaError> {
        let turn = self.parts.names.turn().await;
        match self.parts.clients.is_stuck_in_recovery(session) {
            true => self.end_in_turn(session.id, turn).await.map(|()| true),
            false => Ok(false),
        }
    }

    /// Ends a session if its client still owes the answer to this call. Returns true if it did.
    pub async fn end_if_unanswered(&self, id: u64, call: u64) -> Result<bool, MetaError> {
        let turn = self.parts.names.turn().await;
        match self.parts.clients.owes_answer(id, call) {
            true => self.end_in_turn(id, turn).await.map(|()| true),
            false => Ok(false),
        }
    }

    async fn end_in_turn(&self, id: u64, turn: Turn<'_>) -> Result<(), MetaError> {
        let Some(writes) = self.parts.clients.bar_session(id) else { return Ok(()) };
        let committed = turn.commit(Request::default(), writes, Vec::new(), &[]).await;
        let deleted = match committed {
            Ok(()) => self.parts.names.kv().flush().await.map_err(MetaError::from),
            failed => failed,
        };
        // The writes that are waited for below may need the turn.
        drop(turn);
        // Another end of the session may wait already.
        if (deleted.is_ok() || !self.parts.clients.comes_back(id)) && self.parts.clients.begin_to_leave(id) {
            let parts = self.parts.clone();
            let forget = async move {
                parts.clients.quiet(id).await;
                cut_tails(&parts, id).await;
                make_durable(&parts, id).await;
                forget_session(&parts, id);
            };
            // In a task, because a drive that hangs may keep its last write for long: other sessions that
            // must end do not wait for that.
            let (done, ended) = tokio::sync::oneshot::channel();
            self.parts.env.spawn(
                "end of a session",
                Box::pin(async move {
                    scoped(forget).await;
                    // Nobody may wait any more.
                    let _ = done.send(());
                }),
            );
            if timeout(&self.parts.env, LAST_WRITES, ended).await.is_none() {
                tracing::warn!(session = id, "its leases and locks stay until its last writes have ended");
            }
        }
        deleted
    }

    /// Takes over the opens and locks that a client reports after a restart, and lets others proceed
    /// meanwhile. Returns the number of locks that it does not get back.
    async fn reclaim(&self, session: u64, mut ping: PingRequest) -> Result<u64, MetaError> {
        if ping.opens.len() + ping.locks.len() > RECLAIMED_MOST {
            return Err(MetaError::Request(format!(
                "more than {RECLAIMED_MOST} opens and locks in one report"
            )));
        }
        let mut refused_locks = 0;
        while ping.opens.len() + ping.locks.len() > RECLAIMED_AT_ONCE {
            let opens = ping.opens.split_off(ping.opens.len().saturating_sub(RECLAIMED_AT_ONCE));
            let locks = ping.locks.split_off(ping.locks.len().saturating_sub(RECLAIMED_AT_ONCE));
            let part = PingRequest { opens, locks, reclaimed: false, ..ping };
            refused_locks += self.reclaim_part(session, &part)?;
            yield_now().await;
        }
        Ok(refused_locks + self.reclaim_part(session, &ping)?)
    }

    fn reclaim_part(&self, session: u64, ping: &PingRequest) -> Result<u64, MetaError> {
        let reclaimed = self.parts.clients.reclaim(session, ping).map_err(MetaError::Request)?;
        for (file, before, now) in reclaimed.opens {
            let ino = file.ino;
            if now > before && self.parts.begin_uses(ino, now - before).is_err() {
                // It is being deleted. The client learns it from its next request.
                assert_eq!(before, 0, "inode {ino} is open and being deleted");
                self.parts.clients.forget_opens(session, file);
            } else if now < before {
                self.parts.end_uses(ino, before - now);
            }
        }
        if ping.reclaimed {
            // Removed files may be dropped once all clients have reported.
            self.parts.wake_reaper();
        }
        Ok(reclaimed.refused_locks)
    }
}

/// The access with which a file must be open for a lock: for one of fcntl that of the lock, like Linux.
fn access_to_lock(lock: &LockRequest) -> u32 {
    match lock.change() {
        LockChange::Exclusive if !lock.flock => ACCESS_WRITE,
        LockChange::Shared if !lock.flock => ACCESS_READ,
        _ => 0,
    }
}

/// The role of a session that a client asks for.
fn role_of(role: u32) -> Result<Role, MetaError> {
    match role {
        ROLE_MOUNT => Ok(Role::Mount),
        ROLE_GATEWAY => Ok(Role::Gateway),
        other => Err(MetaError::Request(format!("role {other} is one that this release does not have"))),
    }
}

/// Cuts the files that a session that ends was writing at their sizes. Its client may have written behind
/// them and never sent the new size. A failure leaves a tail that nobody reads: whoever makes the file longer
/// cuts it before.
async fn cut_tails(parts: &Parts, session: u64) {
    for file in parts.clients.written_by(session) {
        if let Err(error) = ops::cut_tail(parts, file.ino).await {
            tracing::warn!(%error, %file, session, "the tail of a file stays that its session has not reported");
        }
    }
}

/// Makes durable what a session that ends has written, and the generations that its end has given: others
/// build on both, and their fsyncs cover it. A target that fails again and again keeps its files from
/// nobody: then what it has may be lost.
async fn make_durable(parts: &Parts, session: u64) {
    for attempt in 1..=LAST_COMMITS {
        match try_make_durable(parts).await {
            Ok(()) => return,
            Err(_) if parts.is_stopped() => return,
            Err(error) if attempt == LAST_COMMITS => {
                tracing::error!(%error, session, "its last writes may be lost with this instance");
            }
            Err(error) => {
                tracing::warn!(%error, session, "its last writes are not durable yet");
                parts.env.sleep(COMMIT_AGAIN).await;
            }
        }
    }
}

async fn try_make_durable(parts: &Parts) -> Result<(), MetaError> {
    let (home, others) = join(scoped(parts.chunks.commit_all()), scoped(parts.elsewhere.commit_all())).await;
    home.and(others)?;
    // Names and sizes too: the commit may have had nothing to do.
    parts.flush().await
}

/// Ends a session in memory, if there is one of this number.
fn forget_session(parts: &Rc<Parts>, id: u64) {
    for (file, count) in parts.clients.end_session(id).unwrap_or_default() {
        parts.end_uses(file.ino, count);
    }
    parts.wake_reaper();
}
