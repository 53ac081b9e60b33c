//! The services of a node behind one transport.

use crate::node::Node;
use crate::stack::Stack;
use crate::stack_arrays::Absent;
use penstock_base::rank::scoped;
use penstock_base::{Branch, Class, ErrorKind, Ino, IoContext, LocalBoxFuture, TargetId};
use penstock_chunk::{FileUse, FileUses};
use penstock_session::joins;
use penstock_wire::data::Right;
use penstock_wire::{Failure, Frame, HEADER_BYTES, Header, Kind, Object, Service, Transport, Version};
use std::borrow::Cow;
use std::rc::Rc;
use std::time::Duration;

/// Body and payload of a reply, or the error reply.
type Outcome = Result<(Vec<u8>, Vec<penstock_base::Buf>), Failure>;

/// Transport within a process: bodies are encoded and decoded, payload is passed by reference.
pub struct InProcess {
    node: Rc<Node>,
}

impl InProcess {
    /// Makes a transport to the services of `node`.
    pub fn new(node: Rc<Node>) -> Rc<Self> {
        Rc::new(Self { node })
    }
}

impl Transport for InProcess {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            let bytes = request.header.encode(Version::NEWEST, &request.body);
            assert_eq!(bytes.len(), HEADER_BYTES, "a header has one length");
            let header = Header::decode(Version::NEWEST, &bytes, &request.body)?;
            let (reply, answer) = tokio::sync::oneshot::channel();
            let node = self.node.clone();
            // In a task of its own, because a client that stops waiting must not stop a service in the middle
            // of a transaction.
            let serve = async move {
                let _ = reply.send(node.serve(Frame { header, ..request }, false).await);
            };
            self.node.env.spawn("service request", Box::pin(serve));
            answer.await.map_err(|_| Failure::new(ErrorKind::Internal, "the service stopped"))
        })
    }
}

/// The services for clients in other processes, whose sessions have a lease time.
pub struct ForOthers {
    node: Rc<Node>,
}

impl ForOthers {
    /// Makes the services of `node` available to other processes.
    pub fn new(node: Rc<Node>) -> Rc<Self> {
        Rc::new(Self { node })
    }
}

impl Service for ForOthers {
    fn serve(&self, request: Frame) -> LocalBoxFuture<'_, Frame> {
        Box::pin(self.node.serve(request, true))
    }

    fn hung_up(&self, session: u64, has_another: bool) {
        self.node.clients.hung_up(session, has_another);
    }

    fn has_session(&self, session: u64) -> bool {
        self.node.clients.is_live(session)
    }
}

/// Fails unless a request addresses what this release has: a target, one fileset with one branch, each in its
/// first epoch, and one tenant; and unless it is of class client.
fn check_object(header: &Header) -> Result<(), Failure> {
    let Header { kind, object, epoch, branch, user, tenant, class, sequence, .. } = *header;
    let is_served = object == kind.object()
        || matches!((kind.object(), object), (Object::FIRST_TARGET, Object::Target(_)));
    let why = if !is_served {
        format!("there is no {object}")
    } else if epoch != 0 {
        format!("{object} has no epoch {epoch}")
    } else if branch != 0 {
        format!("{object} has no branch {branch}")
    } else if tenant != 0 {
        format!("there is no tenant {tenant}")
    } else if class != Class::Client {
        format!("requests of class {class:?} are those of nodes")
    } else if sequence != 0 && !kind.has_sequence() {
        "it is no request that has a sequence".into()
    } else if user != 0 && kind.object() == Object::Session {
        "a request about the session is of no user".into()
    } else {
        return Ok(());
    };
    Err(Failure::new(ErrorKind::Invalid, format!("{kind:?}: {why}")))
}

impl Node {
    /// Executes a request and returns the reply. `remote` is true for a request from another process.
    pub async fn serve(&self, request: Frame, remote: bool) -> Frame {
        let result = scoped(self.serve_request(&request, remote)).await;
        let mut reply = Frame::reply(&request.header, result);
        reply.header.generation = self.home().target.config().generation;
        reply
    }

    /// For whom and for what a request that arrives now is executed, and until when.
    fn io_context(&self, header: &Header) -> IoContext {
        let Header { tenant, class, deadline_ms, .. } = *header;
        let limit = (deadline_ms > 0).then(|| Duration::from_millis(deadline_ms.into()));
        IoContext { tenant, class, wanted_by: limit.map(|limit| self.env.now() + limit) }
    }

    async fn serve_request(&self, request: &Frame, remote: bool) -> Outcome {
        check_object(&request.header)?;
        let io = self.io_context(&request.header);
        self.clients.hear(&request.header)?;
        let Header { kind, session, .. } = request.header;
        if joins(kind) && self.clients.missing_row(session).is_some() {
            Box::pin(self.meta.note_session(session)).await.map_err(Failure::from)?;
        }
        if let Some(outcome) = self.serve_lease(request).await {
            return outcome;
        }
        // Before it counts as being executed: its session may end while it waits for others.
        let _turn = match request.header.kind {
            Kind::Repeat => self.clients.turn_to_repeat(&request.header, &request.body).await?,
            _ => None,
        };
        let _active = self.clients.begin(&request.header)?;
        // While a repair runs, requests wait for its end.
        let _in_use = self.serving.read().await;
        // A repeat of a request with a sequence must get the outcome that is kept.
        let Header { sequence, deadline_ms, .. } = request.header;
        if sequence == 0 && io.wanted_by.is_some_and(|wanted_by| self.env.now() >= wanted_by) {
            let why = format!("it could not be begun within {deadline_ms} ms");
            return Err(Failure::new(ErrorKind::Retry, why));
        }
        let latency = self.latency.of(request.header.kind);
        latency.time(&self.env, self.dispatch(request, io, remote)).await
    }

    /// Executes the part of a request that concerns other clients, before anything is locked that they may
    /// need. Only Watch waits here. Returns the outcome if that completes the request.
    async fn serve_lease(&self, request: &Frame) -> Option<Outcome> {
        let Header { kind, session, branch, sequence, user, .. } = request.header;
        let (clients, branch) = (&self.clients, Branch(branch));
        let bytes = |result: Result<Vec<u8>, Failure>| Some(result.map(|body| (body, Vec::new())));
        if matches!(kind, Kind::Lease | Kind::GetAttr) {
            let checked = match user {
                0 => clients.check_user(&request.header),
                _ => self.meta.check_names(&request.header, &request.body),
            };
            if let Err(failure) = checked {
                return Some(Err(failure));
            }
        }
        if kind == Kind::Watch {
            return bytes(clients.watch(session, &request.body).await);
        }
        // It covers what other sessions have yet to make again.
        if kind == Kind::Sync
            && clients.owe_opens()
            && let Err(failure) = clients.join(session)
        {
            return Some(Err(failure));
        }
        if let Some(reply) = clients.early_lock(&request.header) {
            return bytes(Ok(reply));
        }
        // With a sequence, the metadata target decides this in the slot: a repeat must get the outcome that
        // is kept.
        if joins(kind)
            && sequence == 0
            && let Err(failure) = clients.join_for(&request.header, &request.body)
        {
            return Some(Err(failure));
        }
        match kind {
            Kind::Lease => bytes(clients.grant(session, branch, &request.body)),
            Kind::GetAttr => {
                clients.sync_elsewhere(session, branch, &request.body).transpose().and_then(bytes)
            }
            _ => None,
        }
    }

    /// Checks that the user for whom data is asked has a grant, and returns the request without it.
    async fn with_right<'a>(&self, request: &'a Frame) -> Result<Cow<'a, Frame>, Failure> {
        self.clients.check_user(&request.header)?;
        if request.header.user == 0 {
            return Ok(Cow::Borrowed(request));
        }
        self.meta.check_right(&request.header, &request.body).await?;
        let mut request = request.clone();
        Right::default().put(&mut request.body);
        Ok(Cow::Owned(request))
    }

    /// The stack whose target has this number. Fails if it does not serve.
    fn serving_target(&self, number: u64) -> Result<&Stack, Failure> {
        let target = u32::try_from(number).map(TargetId).ok();
        if let Some(stack) = target.and_then(|target| self.stack_of(target)) {
            return Ok(stack);
        }
        let absent = self.absent().into_iter().find(|absent| Some(absent.number.target()) == target);
        Err(match absent {
            Some(Absent { why, .. }) => {
                Failure::new(ErrorKind::Internal, format!("target {number} does not serve: {why}"))
            }
            // A file whose layout names it is damaged.
            None => Failure::new(ErrorKind::Internal, format!("there is no target {number}")),
        })
    }

    async fn dispatch(&self, request: &Frame, io: IoContext, remote: bool) -> Outcome {
        if let Object::Target(number) = request.header.object {
            let stack = self.serving_target(number)?;
            let request = self.with_right(request).await?;
            if let Some(outcome) = Box::pin(stack.service.serve(&request, io, self)).await {
                return outcome;
            }
        }
        match request.header.kind {
            Kind::Hello => {
                let hello = Box::pin(self.meta.hello(request.header.session, &request.body, remote));
                Ok((hello.await?, Vec::new()))
            }
            kind if kind.is_reserved() => Err(Failure::new(
                ErrorKind::Invalid,
                format!("{kind:?} is reserved and not served by this release"),
            )),
            _ => Ok((self.meta.serve(&request.header, &request.body).await?, Vec::new())),
        }
    }
}

impl FileUses for Node {
    fn change_contents(
        &self,
        target: TargetId,
        ino: Ino,
    ) -> LocalBoxFuture<'_, Result<Box<dyn FileUse + '_>, Failure>> {
        Box::pin(async move {
            let in_use = self.meta.change_contents(target, ino).await?;
            Ok(Box::new(in_use) as Box<dyn FileUse + '_>)
        })
    }

    fn make_space(&self, target: TargetId) -> LocalBoxFuture<'_, bool> {
        Box::pin(self.meta.make_space(target))
    }

    fn damaged(&self, ino: Ino, chunk: u64, why: &str) {
        self.damage.note(ino.0, chunk, why, &self.events);
    }
}
