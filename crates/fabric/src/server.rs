//! The server's end: lets clients in, does their requests, and sends the replies as they are ready.

use crate::frame::{Outbox, Receiver};
use crate::greeting::{Challenge, GREETING_BYTES, Greeting, PROOF_BYTES, Proof, Token, Welcome, nonce};
use crate::link::{Link, Lost, receive, receive_exact, send, send_all};
use crate::speakers::{Change, Newer, Speakers};
use crate::{BYTES, CONNECTIONS, HANDSHAKE, NEWCOMERS, REQUESTS, WAITING, WAITING_BYTES, may_wait};
use futures_util::future::{Either, select};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Env, Newcomers, StoreId};
use penstock_wire::data::decode_read;
use penstock_wire::{Frame, Header, Kind, Service};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How long a reason for closing may take to be sent.
const LAST_WORD: Duration = Duration::from_secs(1);
/// How often the log says that connections are not let in.
const REFUSED_TOLD: Duration = Duration::from_secs(60);

/// The way in that a client takes, which says how it is let in.
#[derive(Clone, Copy, Debug)]
pub enum Door {
    /// The socket in the store's folder: the kernel named the client's user, who may.
    Local,
    /// TCP, at this address of the server: both ends prove that they know the token.
    Token(SocketAddr),
}

/// Serves connections. Those that have not come in yet are counted apart and give way to newer ones, so that whoever
/// says nothing keeps nobody out.
pub struct Server {
    env: Env,
    service: Rc<dyn Service>,
    store: StoreId,
    token: Option<Token>,
    newcomers: RefCell<Newcomers<Rc<dyn Link>>>,
    /// Connections that were let in.
    links: RefCell<BTreeMap<u64, Rc<dyn Link>>>,
    speakers: Rc<Speakers>,
    stopped: Cell<bool>,
    /// Connections that were not let in since that was last told, and when it was.
    refused: Cell<u64>,
    refused_told: Cell<Option<Duration>>,
}

/// What a request holds until its reply is sent.
type Held = Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)>;

struct Connection {
    number: u64,
    /// The session that was heard last over it; 0 before.
    session: Cell<u64>,
    /// Its client goes on over a newer one.
    over: Rc<Notify>,
    link: Rc<dyn Link>,
    outbox: RefCell<Outbox<Held>>,
    wake: Notify,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
    /// The same for requests that may wait for other clients.
    waiting: Arc<Semaphore>,
    waiting_bytes: Arc<Semaphore>,
}

impl Server {
    /// A server of `service` of a store. Without a token nobody comes in by [`Door::Token`].
    pub fn new(env: &Env, service: Rc<dyn Service>, store: StoreId, token: Option<Token>) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            service,
            store,
            token,
            newcomers: RefCell::new(Newcomers::new(NEWCOMERS)),
            links: RefCell::default(),
            speakers: Rc::default(),
            stopped: Cell::new(false),
            refused: Cell::default(),
            refused_told: Cell::default(),
        })
    }

    /// Serves a connection in a task of its own. `from` says where it comes from, for people.
    pub fn accept(self: &Rc<Self>, link: Rc<dyn Link>, from: String, door: Door) {
        if self.stopped.get() {
            link.close();
            return;
        }
        let (number, out) = self.newcomers.borrow_mut().enter(link.clone());
        if let Some(out) = out {
            self.note_refused(|| format!("one that was silent makes room: {NEWCOMERS} wait to be let in"));
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
                why if was_in => tracing::warn!(from, %why, "a connection was closed"),
                why => server.note_refused(|| format!("{from}: {why}")),
            }
        };
        self.env.spawn("connection", Box::pin(task));
    }

    /// Says that somebody was not let in, and how many since this was last said: whoever may connect may not fill the log.
    fn note_refused(&self, why: impl FnOnce() -> String) {
        let (refused, now) = (self.refused.get() + 1, self.env.now());
        match self.refused_told.get().is_none_or(|told| now > told + REFUSED_TOLD) {
            true => {
                tracing::warn!(why = why(), "{refused} connections were not let in");
                self.refused.set(0);
                self.refused_told.set(Some(now));
            }
            false => self.refused.set(refused),
        }
    }

    /// Whether many wait to be let in.
    pub fn is_crowded(&self) -> bool {
        self.newcomers.borrow().len() >= NEWCOMERS / 2
    }

    /// Connections, those included that wait to be let in.
    pub fn connections(&self) -> usize {
        self.links.borrow().len() + self.newcomers.borrow().len()
    }

    /// True if a session has a connection.
    pub fn speaks(&self, session: u64) -> bool {
        self.speakers.speaks(session)
    }

    /// Closes all connections and takes no more.
    pub fn stop(&self) {
        self.stopped.set(true);
        self.newcomers.borrow().iter().for_each(|link| link.close());
        self.links.borrow().values().for_each(|link| link.close());
    }

    async fn serve(self: Rc<Self>, link: Rc<dyn Link>, number: u64, door: Door) -> Lost {
        match timeout(&self.env, HANDSHAKE, self.greet(&link, number, door)).await {
            Some(Ok(())) => {}
            Some(Err(why)) => return why,
            None => return Lost::Said(format!("no greeting within {} s", HANDSHAKE.as_secs())),
        }
        let connection = Rc::new(Connection {
            number,
            session: Cell::new(0),
            over: Rc::default(),
            link,
            outbox: RefCell::default(),
            wake: Notify::new(),
            requests: Arc::new(Semaphore::new(REQUESTS)),
            bytes: Arc::new(Semaphore::new(BYTES)),
            waiting: Arc::new(Semaphore::new(WAITING)),
            waiting_bytes: Arc::new(Semaphore::new(WAITING_BYTES)),
        });
        let Connection { link, outbox, wake, over, .. } = &*connection;
        let why = {
            let receiving = pin!(self.receive_all(&connection));
            let sending = pin!(send(&self.env, &**link, outbox, wake, false));
            match select(select(receiving, sending), pin!(over.notified())).await {
                Either::Left((Either::Left((why, _)) | Either::Right((why, _)), _)) => why,
                Either::Right(_) => over_a_newer_one(),
            }
        };
        self.speakers.leave(connection.session.get(), number);
        if let Lost::Frame(error) = &why {
            let mut last = Frame::request(Kind::Closing, error.to_string().into_bytes(), Vec::new());
            last.header.request = error.damaged_request();
            outbox.borrow_mut().push(last, None);
            timeout(&self.env, LAST_WORD, send(&self.env, &**link, outbox, wake, true)).await;
        }
        why
    }

    async fn greet(&self, link: &Rc<dyn Link>, number: u64, door: Door) -> Result<(), Lost> {
        let mut bytes = [0; GREETING_BYTES];
        // Its first bytes tell what is no greeting at all.
        receive_exact(&**link, &mut bytes[..8]).await?;
        if !bytes.starts_with(b"PNSG") {
            return Err(Lost::Said("what connects does not speak Penstock's messages".into()));
        }
        receive_exact(&**link, &mut bytes[8..]).await?;
        let refusal = match Greeting::decode(&bytes) {
            Err(error) => Some(error.to_string()),
            Ok(greeting) => match (greeting.refusal(), door) {
                (Some(why), _) => Some(why),
                (None, Door::Local) => None,
                (None, Door::Token(address)) => self.prove(&**link, &greeting, address).await?,
            },
        };
        let refusal = refusal.or_else(|| self.let_in(link, number));
        let welcome = Welcome::new(refusal);
        send_all(&**link, &welcome.encode()).await?;
        match welcome.version {
            0 => Err(Lost::Said(welcome.reason)),
            _ => Ok(()),
        }
    }

    /// Proves that this server knows the token, and has the client prove it; why the client is refused, if it is.
    async fn prove(
        &self,
        link: &dyn Link,
        greeting: &Greeting,
        dialled: SocketAddr,
    ) -> Result<Option<String>, Lost> {
        let Some(token) = &self.token else { return Ok(Some("this server serves its folder only".into())) };
        let challenge = Challenge::new(token, greeting, self.store, nonce()?, dialled);
        send_all(link, &challenge.encode()).await?;
        let mut bytes = [0; PROOF_BYTES];
        receive_exact(link, &mut bytes).await?;
        Ok(match Proof::decode(&bytes) {
            Err(error) => Some(error.to_string()),
            Ok(proof) if proof.is_proved(token, greeting, &challenge, dialled) => None,
            Ok(_) => {
                Some("the token is not this instance's: take the file `token.data` of its folder".into())
            }
        })
    }

    /// Moves a newcomer to those who are in; why it is refused, if it is.
    fn let_in(&self, link: &Rc<dyn Link>, number: u64) -> Option<String> {
        let mut links = self.links.borrow_mut();
        if links.len() >= CONNECTIONS {
            return Some(format!("there are {CONNECTIONS} connections, which is the most"));
        }
        if self.newcomers.borrow_mut().leave(number).is_none() {
            return Some("too many connect at once".into());
        }
        links.insert(number, link.clone());
        None
    }

    /// Hears a request as one of its session. The first exchange has none.
    fn hear(&self, connection: &Connection, header: &Header) -> Result<Option<Change>, Newer> {
        let Header { session, kind, .. } = *header;
        if session == 0 {
            return Ok(None);
        }
        let before = connection.session.replace(session);
        if before != session {
            self.speakers.leave(before, connection.number);
        }
        self.speakers.hear(session, (connection.number, &connection.over), kind)
    }

    /// Takes requests and has each done in a task of its own, while there is room for its reply.
    async fn receive_all(&self, connection: &Rc<Connection>) -> Lost {
        let mut receiver = Receiver::default();
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
            let (requests, bytes, cost) = match may_wait(frame.header.kind) {
                true => (&connection.waiting, &connection.waiting_bytes, frame.body.len()),
                false => (&connection.requests, &connection.bytes, cost_bytes(&frame).clamp(1, BYTES)),
            };
            let request = requests.clone().acquire_owned().await;
            let bytes = bytes.clone().acquire_many_owned(cost as u32).await;
            let (Ok(request), Ok(bytes)) = (request, bytes) else {
                unreachable!("the semaphores of a connection are never closed")
            };
            let Ok(change) = self.hear(connection, &frame.header) else { return over_a_newer_one() };
            if let Some(change) = &change {
                // With nothing taken meanwhile, so that one client that connects again and again fills no memory.
                change.turn().await;
            }
            let (service, connection) = (self.service.clone(), connection.clone());
            // To its end, whatever becomes of the connection.
            let task = async move {
                let reply = service.serve(frame).await;
                drop(change);
                connection.outbox.borrow_mut().push(reply, Some((request, bytes)));
                connection.wake.notify_one();
            };
            self.env.spawn("request", Box::pin(task));
        }
    }
}

fn over_a_newer_one() -> Lost {
    Lost::Said("its client goes on over a newer connection".into())
}

/// Payload that a request brings or its reply takes.
fn cost_bytes(frame: &Frame) -> usize {
    let asked = match frame.header.kind {
        Kind::Read => decode_read(&frame.body).map_or(0, |chunk| chunk.count as usize * BLOCK_BYTES),
        _ => 0,
    };
    asked.max(frame.header.payload_bytes as usize)
}
