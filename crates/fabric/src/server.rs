//! The server's end of connections: authenticates clients, serves their requests, and sends each reply when
//! it is ready.

use crate::frame::{Outbox, Receiver};
use crate::greeting::{Challenge, GREETING_BYTES, Greeting, PROOF_BYTES, Proof, Token, Welcome, nonce};
use crate::link::{Link, Lost, receive, receive_exact, send, send_all};
use crate::speakers::{Change, Newer, Speakers};
use crate::{
    BODY_BYTES, BYTES, CONNECTIONS, CONTROL, CONTROL_BYTES, HANDSHAKE, NEWCOMERS, REQUESTS, is_control,
};
use futures_util::future::{Either, select};
use penstock_base::env::timeout;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Env, ErrorKind, Newcomers, StoreId};
use penstock_wire::data::blocks_of_read;
use penstock_wire::{Failure, Frame, Header, Kind, Service, Version, session_of_hello};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// Time limit for sending the reason when a connection is closed.
const LAST_WORD: Duration = Duration::from_secs(1);
/// Bytes that count for a request for a part of a listing: its reply may have so many.
const LISTING_BYTES: usize = BODY_BYTES / 2;
/// Bytes that count for a request for news, and for one for an extended attribute or a list of their names:
/// their replies may have so many.
const NEWS_BYTES: usize = 256 << 10;
const XATTR_BYTES: usize = 256 << 10;
/// The bounds of a session are those of this many connections: the present one, and one that is lost.
const CONNECTIONS_OF_SESSION: usize = 2;
/// Shortest interval between log messages about connections that were refused, and about those closed.
const TOLD: Duration = Duration::from_secs(60);

/// The way in which a client connects, which decides how it is authenticated.
#[derive(Clone, Copy, Debug)]
pub enum Door {
    /// Through the socket in the store's folder: the kernel reported the client's user, and the caller has
    /// checked it.
    Local,
    /// Over TCP, at this address of the server: both ends prove that they know the token.
    Token(SocketAddr),
}

/// Serves connections. Those that have not completed the first exchange are counted apart, and so are those
/// that Hello has not bound to a session. A new one evicts the oldest of them, so that silent connections
/// keep nobody out.
pub struct Server {
    env: Env,
    service: Rc<dyn Service>,
    store: StoreId,
    token: Option<Token>,
    newcomers: RefCell<Newcomers<Rc<dyn Link>>>,
    /// Connections that have completed the first exchange and have no session.
    guests: RefCell<Newcomers<Rc<dyn Link>>>,
    /// Connections with their sessions.
    links: RefCell<BTreeMap<u64, Bound>>,
    speakers: Rc<Speakers>,
    /// The bounds of sessions that have a connection or requests in flight.
    bounds: RefCell<BTreeMap<u64, Weak<Bounds>>>,
    stopped: Cell<bool>,
    refused: Seldom,
    closed: Seldom,
}

/// A count for a log message that comes at most once in [`TOLD`], so that clients cannot fill the log.
#[derive(Default)]
struct Seldom {
    /// Since the last message.
    count: Cell<u64>,
    told: Cell<Option<Duration>>,
}

impl Seldom {
    /// Counts one more. Returns the count if the message is due.
    fn note(&self, now: Duration) -> Option<u64> {
        let count = self.count.get() + 1;
        let is_due = self.told.get().is_none_or(|told| now > told + TOLD);
        self.count.set(if is_due { 0 } else { count });
        if is_due {
            self.told.set(Some(now));
        }
        is_due.then_some(count)
    }
}

/// A connection with a session.
struct Bound {
    session: u64,
    link: Rc<dyn Link>,
}

/// The bounds of requests in flight: those of a connection, and those of a session, which its connections
/// share. So a client that connects again and again has no more of them, and one whose requests are still
/// being carried out over a connection that is lost can send them again.
struct Bounds {
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// For control traffic, and for the bytes of its bodies.
    control: Arc<Semaphore>,
    control_bytes: Arc<Semaphore>,
}

impl Bounds {
    /// The bounds of this many connections.
    fn new(connections: usize) -> Rc<Self> {
        let bound = |most: usize| Arc::new(Semaphore::new(most * connections));
        Rc::new(Self {
            requests: bound(REQUESTS),
            bytes: bound(BYTES),
            control: bound(CONTROL),
            control_bytes: bound(CONTROL_BYTES),
        })
    }

    /// Waits until a request is within the bounds.
    async fn admit(self: &Rc<Self>, frame: &Frame) -> Permits {
        let (requests, bytes, cost) = match is_control(frame.header.kind) {
            true => (&self.control, &self.control_bytes, cost_bytes(frame).min(CONTROL_BYTES)),
            false => (&self.requests, &self.bytes, cost_bytes(frame).clamp(1, BYTES)),
        };
        let request = requests.clone().acquire_owned().await;
        let bytes = bytes.clone().acquire_many_owned(to_u32(cost)).await;
        let (Ok(request), Ok(bytes)) = (request, bytes) else {
            unreachable!("these semaphores are never closed")
        };
        Permits { _request: request, _bytes: bytes, _of: self.clone() }
    }
}

/// Permits of a request, which it keeps until its reply is sent: of its connection, and of its session.
type Held = (Permits, Option<Permits>);

struct Permits {
    _request: OwnedSemaphorePermit,
    _bytes: OwnedSemaphorePermit,
    _of: Rc<Bounds>,
}

struct Connection {
    number: u64,
    /// Its number among the connections without a session.
    guest: u64,
    /// The session that Hello has bound to this connection; 0 before that.
    session: Cell<u64>,
    /// Signalled when the client has switched to a newer connection.
    over: Rc<Notify>,
    link: Rc<dyn Link>,
    /// The version of all messages.
    version: Version,
    outbox: RefCell<Outbox<Option<Held>>>,
    wake: Notify,
    bounds: Rc<Bounds>,
    of_session: RefCell<Option<Rc<Bounds>>>,
    /// True while Hello is served.
    is_greeting: Cell<bool>,
    /// True once it is closed: no reply is sent any more.
    is_closed: Cell<bool>,
}

impl Server {
    /// A server for `service` of a store. Without a token it refuses connections by [`Door::Token`].
    pub fn new(env: &Env, service: Rc<dyn Service>, store: StoreId, token: Option<Token>) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            service,
            store,
            token,
            newcomers: RefCell::new(Newcomers::new(NEWCOMERS)),
            guests: RefCell::new(Newcomers::new(NEWCOMERS)),
            links: RefCell::default(),
            speakers: Rc::default(),
            bounds: RefCell::default(),
            stopped: Cell::new(false),
            refused: Seldom::default(),
            closed: Seldom::default(),
        })
    }

    /// Serves a connection in a task of its own. `from` names the client in log messages.
    pub fn accept(self: &Rc<Self>, link: Rc<dyn Link>, from: String, door: Door) {
        if self.stopped.get() {
            link.close();
            return;
        }
        let (number, out) = self.newcomers.borrow_mut().enter(link.clone());
        if let Some(out) = out {
            self.note_refused(|| format!("the oldest of {NEWCOMERS} that wait to be let in was closed"));
            out.close();
        }
        let server = self.clone();
        let task = async move {
            let why = server.clone().serve(link.clone(), number, door).await;
            link.close();
            server.newcomers.borrow_mut().leave(number);
            let was_in = server.links.borrow_mut().remove(&number).is_some();
            match why {
                Lost::End => tracing::debug!(from, "a connection ended"),
                why if was_in => match server.closed.note(server.env.now()) {
                    Some(count) => tracing::warn!(from, %why, "{count} connections were closed"),
                    None => tracing::debug!(from, %why, "a connection was closed"),
                },
                why => server.note_refused(|| format!("{from}: {why}")),
            }
        };
        self.env.spawn("connection", Box::pin(task));
    }

    /// Counts a refused connection, and logs the count now and then.
    fn note_refused(&self, why: impl FnOnce() -> String) {
        if let Some(refused) = self.refused.note(self.env.now()) {
            tracing::warn!(why = why(), "{refused} connections were not let in");
        }
    }

    /// True if at least half of the places for connections in the first exchange are taken.
    pub fn is_crowded(&self) -> bool {
        self.newcomers.borrow().len() >= NEWCOMERS / 2
    }

    /// The number of connections, including those without a session.
    pub fn connections(&self) -> usize {
        self.links.borrow().len() + self.guests.borrow().len() + self.newcomers.borrow().len()
    }

    /// True if a session has an open connection.
    pub fn speaks(&self, session: u64) -> bool {
        self.speakers.speaks(session)
    }

    /// Closes all connections and accepts no more.
    pub fn stop(&self) {
        self.stopped.set(true);
        self.newcomers.borrow().iter().for_each(|link| link.close());
        self.guests.borrow().iter().for_each(|link| link.close());
        self.links.borrow().values().for_each(|bound| bound.link.close());
    }

    async fn serve(self: Rc<Self>, link: Rc<dyn Link>, number: u64, door: Door) -> Lost {
        let guest = Cell::new(None);
        let greeted = timeout(&self.env, HANDSHAKE, self.greet(&link, number, door, &guest)).await;
        let late = || Err(Lost::Said(format!("no greeting within {} s", HANDSHAKE.as_secs())));
        let why = match greeted.unwrap_or_else(late) {
            Ok(version) => self.serve_guest(link, number, (guest.get(), version)).await,
            Err(why) => why,
        };
        guest.get().into_iter().for_each(|guest| drop(self.guests.borrow_mut().leave(guest)));
        why
    }

    /// Serves a connection after the first exchange.
    async fn serve_guest(
        self: &Rc<Self>,
        link: Rc<dyn Link>,
        number: u64,
        (guest, version): (Option<u64>, Version),
    ) -> Lost {
        let guest = guest.expect("who is let in has a place");
        let connection = Rc::new(Connection {
            number,
            guest,
            session: Cell::new(0),
            over: Rc::default(),
            link,
            version,
            outbox: RefCell::new(Outbox::new(version)),
            wake: Notify::new(),
            bounds: Bounds::new(1),
            of_session: RefCell::default(),
            is_greeting: Cell::new(false),
            is_closed: Cell::new(false),
        });
        let Connection { link, outbox, wake, over, session, .. } = &*connection;
        let why = {
            let receiving = pin!(self.receive_all(&connection));
            let sending = pin!(send(&self.env, &**link, outbox, wake, false));
            let silent = pin!(self.silent(&connection));
            match select(select(receiving, sending), select(pin!(over.notified()), silent)).await {
                Either::Left((Either::Left((why, _)) | Either::Right((why, _)), _)) => why,
                Either::Right((Either::Left(_), _)) => over_a_newer_one(),
                Either::Right((Either::Right(_), _)) => {
                    Lost::Said(format!("no Hello within {} s", HANDSHAKE.as_secs()))
                }
            }
        };
        if self.speakers.leave(session.get(), number) {
            self.service.hung_up(session.get(), false);
        }
        self.bounds.borrow_mut().retain(|_, bounds| bounds.strong_count() > 0);
        if let Lost::Frame(error) = &why {
            let mut last = Frame::request(Kind::Closing, error.to_string().into_bytes(), Vec::new());
            last.header.request = error.damaged_request();
            outbox.borrow_mut().push(last, None);
            timeout(&self.env, LAST_WORD, send(&self.env, &**link, outbox, wake, true)).await;
        }
        connection.is_closed.set(true);
        // The replies in it keep permits. The last word has come behind them.
        outbox.replace(Outbox::new(version));
        why
    }

    /// Completes if no Hello has bound a connection to a session in time: connections are few.
    async fn silent(&self, connection: &Connection) {
        loop {
            self.env.sleep(HANDSHAKE).await;
            match connection.session.get() {
                0 if connection.is_greeting.get() => {}
                0 => return,
                _ => std::future::pending().await,
            }
        }
    }

    /// The first exchange. Returns the version of the messages after it. Sets `guest` to the number of the
    /// connection among those without a session, once it has one.
    async fn greet(
        &self,
        link: &Rc<dyn Link>,
        number: u64,
        door: Door,
        guest: &Cell<Option<u64>>,
    ) -> Result<Version, Lost> {
        let mut bytes = [0; GREETING_BYTES];
        // The first bytes suffice to reject a client of another protocol.
        receive_exact(&**link, &mut bytes[..8]).await?;
        if !bytes.starts_with(b"PNSG") {
            return Err(Lost::Said("the client does not speak Penstock's protocol".into()));
        }
        receive_exact(&**link, &mut bytes[8..]).await?;
        let settled = match Greeting::decode(&bytes) {
            Err(error) => Err(error.to_string()),
            Ok(greeting) => match (greeting.settle(), door) {
                (Ok(version), Door::Token(address)) => {
                    self.prove(&**link, (&greeting, version), address).await?.map(|()| version)
                }
                (settled, _) => settled,
            },
        };
        let settled = settled.and_then(|version| {
            guest.set(Some(self.let_in(link, number)?));
            Ok(version)
        });
        let welcome = Welcome::new(settled);
        send_all(&**link, &welcome.encode()).await?;
        match welcome {
            Welcome::Accepted(version) => Ok(version),
            Welcome::Refused(why) => Err(Lost::Said(why)),
        }
    }

    /// Proves that this server knows the token, and verifies the client's proof. The inner error is the
    /// reason why the client is refused.
    async fn prove(
        &self,
        link: &dyn Link,
        (greeting, version): (&Greeting, Version),
        dialled: SocketAddr,
    ) -> Result<Result<(), String>, Lost> {
        let Some(token) = &self.token else { return Ok(Err("this server accepts no TCP clients".into())) };
        let challenge = Challenge::new(token, (greeting, version), self.store, nonce()?, dialled);
        send_all(link, &challenge.encode()).await?;
        let mut bytes = [0; PROOF_BYTES];
        receive_exact(link, &mut bytes).await?;
        Ok(match Proof::decode(&bytes) {
            Err(error) => Err(error.to_string()),
            Ok(proof) if proof.is_proved(token, greeting, &challenge, dialled) => Ok(()),
            Ok(_) => Err("the token is not this instance's: take the file `token.data` of its folder".into()),
        })
    }

    /// Moves a connection from the first exchange to those without a session. Returns its number among them.
    /// The error is the reason if it is refused.
    fn let_in(&self, link: &Rc<dyn Link>, number: u64) -> Result<u64, String> {
        if self.newcomers.borrow_mut().leave(number).is_none() {
            return Err("too many connections wait to be let in".into());
        }
        let (guest, out) = self.guests.borrow_mut().enter(link.clone());
        if let Some(out) = out {
            self.note_refused(|| format!("the oldest of {NEWCOMERS} that have no session was closed"));
            out.close();
        }
        Ok(guest)
    }

    /// Gives a connection the place of its session. It may take that of the session's older connection, of
    /// one whose session has ended, or of one whose session has a newer one: there are no more sessions than
    /// places.
    fn bind(&self, connection: &Connection, session: u64) -> Result<(), Lost> {
        if self.guests.borrow_mut().leave(connection.guest).is_none() {
            return Err(Lost::Said("too many connections have no session".into()));
        }
        let mut links = self.links.borrow_mut();
        if links.len() >= CONNECTIONS {
            // By number and session.
            let first = |is: &dyn Fn(u64, u64) -> bool| {
                let found = links.iter().find(|(number, bound)| is(**number, bound.session));
                found.map(|(number, _)| *number)
            };
            let own = first(&|_, of| of == session);
            let ended = || first(&|_, of| !self.service.has_session(of));
            let has_newer = |number, of| links.range(number + 1..).any(|(_, bound)| bound.session == of);
            let older = || first(&has_newer);
            let Some(out) = own.or_else(ended).or_else(older) else { return Err(Lost::Said(no_place())) };
            links.remove(&out).into_iter().for_each(|bound| bound.link.close());
        }
        links.insert(connection.number, Bound { session, link: connection.link.clone() });
        assert!(links.len() <= CONNECTIONS, "connections are bounded");
        Ok(())
    }

    /// Registers a change of data. Fails if the session has a newer connection.
    fn hear(&self, connection: &Connection, header: &Header) -> Result<Option<Change>, Newer> {
        let Header { session, kind, .. } = *header;
        assert!(session > 0 && session == connection.session.get(), "a request of the connection's session");
        self.speakers.hear(session, (connection.number, &connection.over), kind)
    }

    /// Serves Hello, which binds its session to the connection. Nothing is received meanwhile. A connection
    /// has one session.
    async fn greeted(&self, connection: &Connection, hello: Frame) -> Result<Frame, Lost> {
        let bound = connection.session.get();
        if bound > 0 && bound != hello.header.session {
            let why = format!("Hello: the connection is that of session {bound}");
            return Ok(Frame::reply(&hello.header, Err(Failure::new(ErrorKind::Denied, why))));
        }
        // In a task, because a connection that breaks must not stop the service in the middle of it.
        let (done, answer) = tokio::sync::oneshot::channel();
        let service = self.service.clone();
        let header = hello.header;
        let serve = async move {
            if let Err(reply) = done.send(service.serve(hello).await)
                && let Some(session) = session_of_hello(&reply)
            {
                // The connection is gone.
                service.hung_up(session, false);
            }
        };
        self.env.spawn("hello", Box::pin(serve));
        let stopped =
            |_| Frame::reply(&header, Err(Failure::new(ErrorKind::Internal, "the service stopped")));
        let reply = answer.await.unwrap_or_else(stopped);
        if let Some(session) = session_of_hello(&reply) {
            assert!(bound == 0 || bound == session, "Hello with a session is about that one");
            if bound == 0 {
                self.bind(connection, session).inspect_err(|_| self.service.hung_up(session, false))?;
            }
            connection.session.set(session);
            self.speakers
                .hear(session, (connection.number, &connection.over), Kind::Hello)
                .map_err(|Newer| over_a_newer_one())?;
            connection.of_session.replace(Some(self.bounds_of(session)));
            if bound == 0 {
                // Requests that wait have come over older connections, and come again.
                self.service.hung_up(session, true);
            }
        }
        Ok(reply)
    }

    /// The bounds of a session's requests.
    fn bounds_of(&self, session: u64) -> Rc<Bounds> {
        let mut all = self.bounds.borrow_mut();
        let bounds =
            all.get(&session).and_then(Weak::upgrade).unwrap_or_else(|| Bounds::new(CONNECTIONS_OF_SESSION));
        all.insert(session, Rc::downgrade(&bounds));
        bounds
    }

    /// Receives requests and serves each in a task of its own. Waits while the limits of the connection are
    /// reached.
    async fn receive_all(&self, connection: &Rc<Connection>) -> Lost {
        let mut receiver = Receiver::new(connection.version);
        loop {
            let frame = match receive(&*connection.link, &mut receiver).await {
                Ok(frame) => frame,
                Err(why) => return why,
            };
            match (frame.header.kind, frame.header.reply) {
                (Kind::Closing, _) => return Lost::Said(String::from_utf8_lossy(&frame.body).into_owned()),
                (_, true) => return Lost::Said("a reply where a request is due".into()),
                _ => {}
            }
            let of_session = connection.of_session.borrow().clone();
            let own = connection.bounds.admit(&frame).await;
            let held = match of_session {
                Some(bounds) => (own, Some(bounds.admit(&frame).await)),
                None => (own, None),
            };
            if frame.header.kind == Kind::Hello {
                connection.is_greeting.set(true);
                let greeted = self.greeted(connection, frame).await;
                connection.is_greeting.set(false);
                match greeted {
                    Ok(reply) => connection.send(reply, held),
                    Err(why) => return why,
                }
                continue;
            }
            if frame.header.session == 0 || frame.header.session != connection.session.get() {
                let refused = Frame::reply(&frame.header, Err(not_bound(frame.header.session)));
                connection.send(refused, held);
                continue;
            }
            let Ok(change) = self.hear(connection, &frame.header) else { return over_a_newer_one() };
            if let Some(change) = &change {
                // Nothing is received meanwhile, so a client that reconnects again and again cannot fill the
                // memory.
                change.turn().await;
            }
            let (service, connection) = (self.service.clone(), connection.clone());
            // The task runs to its end even if the connection is lost.
            let task = async move {
                let reply = service.serve(frame).await;
                drop(change);
                connection.send(reply, held);
            };
            self.env.spawn("request", Box::pin(task));
        }
    }
}

impl Connection {
    /// Sends a reply, and then gives the permits of its request back.
    fn send(&self, mut reply: Frame, permits: Held) {
        if self.is_closed.get() {
            return;
        }
        if reply.body.len() > BODY_BYTES {
            // The client would close the connection, and ask again over the next one.
            let why = format!("the reply has {} bytes, and at most {BODY_BYTES} fit", reply.body.len());
            let request = Header { reply: false, ..reply.header };
            reply = Frame::reply(&request, Err(Failure::new(ErrorKind::Internal, why)));
        }
        self.outbox.borrow_mut().push(reply, Some(permits));
        self.wake.notify_one();
    }
}

/// The failure of a request whose session is not that of its connection. Its client may have lost the session
/// meanwhile: then Hello could not bind it.
fn not_bound(session: u64) -> Failure {
    Failure::new(
        ErrorKind::Ended,
        format!("session {session} is not the one that Hello has bound to this connection"),
    )
}

fn no_place() -> String {
    format!("there are {CONNECTIONS} connections, which is the most")
}

fn over_a_newer_one() -> Lost {
    Lost::Said("its client has switched to a newer connection".into())
}

/// The bytes of a request or of its reply, whichever is larger.
fn cost_bytes(frame: &Frame) -> usize {
    let asked = match frame.header.kind {
        Kind::Read => blocks_of_read(&frame.body).map_or(0, |blocks| blocks as usize * BLOCK_BYTES),
        Kind::ReadDir => LISTING_BYTES,
        Kind::Watch => NEWS_BYTES,
        Kind::GetXattr | Kind::ListXattr => XATTR_BYTES,
        _ => 0,
    };
    asked.max(frame.header.payload_bytes as usize + frame.body.len())
}
