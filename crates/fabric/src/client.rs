//! The client's end of a connection: many requests in flight, with automatic reconnection.
//!
//! A request waits until its reply comes, across reconnections if necessary. It is sent again unchanged, with
//! the same session and sequence, so that the service answers a repeat of a completed request with the stored
//! result. Before that, the Hello that began the session is sent over the new connection, with the number of
//! the session, which binds the session to it.

use crate::frame::{Outbox, Receiver};
use crate::greeting::{
    CHALLENGE_BYTES, Challenge, Greeting, Proof, Token, WELCOME_HEAD_BYTES, Welcome, nonce,
};
use crate::link::{Link, Lost, receive, receive_exact, send, send_all};
use crate::{BODY_BYTES, CONTROL, HANDSHAKE, REQUESTS, is_control};
use futures_util::future::{Either, select};
use penstock_base::env::timeout;
use penstock_base::{Env, ErrorKind, LocalBoxFuture};
use penstock_wire::{Failure, Frame, Kind, Transport, Version, session_of_hello};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Notify, Semaphore, oneshot};

/// Pauses between attempts to connect: the first, doubled after each failure up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// A request whose payload arrived damaged this often fails: the damage is then likely at the source.
const DAMAGED_MOST: u32 = 3;

/// The means by which both ends of a stream authenticate.
#[derive(Clone, Debug)]
pub enum Credential {
    /// The kernel reported the user of each end to the other.
    Local,
    /// Both ends prove that they know the token. The proofs cover the address that was dialled.
    Token(Token, SocketAddr),
}

/// A stream to the server and its credential, or an error message.
pub type Dialled = Result<(Rc<dyn Link>, Credential), String>;

/// Connects to a server. It looks up the address for each connection, since the server may listen elsewhere
/// after a restart.
pub trait Dial {
    /// Opens a stream to the server.
    fn dial(&self) -> LocalBoxFuture<'_, Dialled>;
}

/// A server in another process.
pub struct Remote {
    env: Env,
    dial: Rc<dyn Dial>,
    waiting: RefCell<BTreeMap<u64, Waiting>>,
    next: Cell<u64>,
    permits: Semaphore,
    /// Separate permits for control traffic.
    control_permits: Semaphore,
    outbox: RefCell<Outbox<()>>,
    wake: Notify,
    /// The request that began the session, with its number: it binds the session to the next connection.
    hello: RefCell<Option<Frame>>,
    connected: Cell<bool>,
    closed: Cell<bool>,
    closing: Notify,
}

struct Waiting {
    request: Frame,
    reply: oneshot::Sender<Result<Frame, Failure>>,
    damaged: u32,
}

impl Remote {
    /// Connects to the server. Fails if this first attempt fails; later losses of the connection lead to
    /// reconnection without limit.
    pub async fn connect(env: &Env, dial: Rc<dyn Dial>) -> Result<Rc<Self>, Failure> {
        let first = open(env, &*dial).await.map_err(|why| Failure::new(ErrorKind::Denied, why))?;
        let remote = Rc::new(Self {
            env: env.clone(),
            dial,
            waiting: RefCell::default(),
            next: Cell::new(1),
            permits: Semaphore::new(REQUESTS),
            control_permits: Semaphore::new(CONTROL),
            outbox: RefCell::new(Outbox::new(first.1)),
            wake: Notify::new(),
            hello: RefCell::default(),
            connected: Cell::new(false),
            closed: Cell::new(false),
            closing: Notify::new(),
        });
        env.spawn("connection", Box::pin(remote.clone().keep(first)));
        Ok(remote)
    }

    /// True while there is a connection.
    pub fn is_connected(&self) -> bool {
        self.connected.get()
    }

    /// The number of the next request.
    fn next_number(&self) -> u64 {
        let number = self.next.get();
        self.next.set(number + 1);
        number
    }

    /// Closes the connection for good. Requests in flight fail.
    pub fn close(&self) {
        self.closed.set(true);
        self.closing.notify_one();
    }

    /// Maintains a connection until [`Remote::close`].
    async fn keep(self: Rc<Self>, first: Opened) {
        {
            let run = pin!(self.reconnect(first));
            let closing = pin!(self.closing.notified());
            select(run, closing).await;
        }
        self.connected.set(false);
        self.waiting.take();
    }

    async fn reconnect(&self, first: Opened) {
        let (mut link, mut version) = first;
        let mut pause = FIRST_PAUSE;
        loop {
            self.connected.set(true);
            let begun = self.env.now();
            let why = self.run(&*link, version).await;
            self.connected.set(false);
            link.close();
            tracing::warn!(%why, "the connection to the service was lost; reconnecting");
            if self.env.now() - begun > LONGEST_PAUSE {
                // It was of use. Otherwise the pauses grow, also if every attempt to connect succeeds.
                pause = FIRST_PAUSE;
            }
            let mut told = false;
            (link, version) = loop {
                // Random, so that the clients of a server do not reconnect all at the same time.
                let part = self.env.random() % 1000;
                self.env.sleep(pause / 2 + pause * part as u32 / 2000).await;
                let opened = open(&self.env, &*self.dial).await;
                pause = (pause * 2).min(LONGEST_PAUSE);
                match opened {
                    Ok(opened) => break opened,
                    Err(why) if !std::mem::replace(&mut told, true) => {
                        tracing::warn!(%why, "the service cannot be reached; retrying until it can");
                    }
                    Err(_) => {}
                }
            };
            tracing::info!("connected again");
        }
    }

    /// Sends all requests without a reply, and uses the connection until it is lost. Returns the reason.
    async fn run(&self, link: &dyn Link, version: Version) -> Lost {
        *self.outbox.borrow_mut() = Outbox::new(version);
        let hello = self.hello.borrow().clone().map(|mut hello| {
            hello.header.request = self.next_number();
            hello
        });
        let binds = hello.as_ref().map(|hello| hello.header.request);
        hello.into_iter().for_each(|hello| self.outbox.borrow_mut().push(hello, ()));
        for waiting in self.waiting.borrow().values() {
            self.outbox.borrow_mut().push(waiting.request.clone(), ());
        }
        let receiving = pin!(self.receive_all(link, version, binds));
        let sending = pin!(send(&self.env, link, &self.outbox, &self.wake, false));
        match select(receiving, sending).await {
            Either::Left((why, _)) | Either::Right((why, _)) => why,
        }
    }

    /// Receives replies. `binds` is the number of the Hello that binds the session to this connection. If
    /// the session has ended, each request learns that from its own reply.
    async fn receive_all(&self, link: &dyn Link, version: Version, binds: Option<u64>) -> Lost {
        let mut receiver = Receiver::new(version);
        loop {
            let frame = match receive(link, &mut receiver).await {
                Ok(frame) => frame,
                Err(Lost::Frame(error)) => {
                    self.note_damaged(error.damaged_request(), &error.to_string());
                    return error.into();
                }
                Err(why) => return why,
            };
            if frame.header.kind == Kind::Closing {
                let why = String::from_utf8_lossy(&frame.body).into_owned();
                self.note_damaged(frame.header.request, &why);
                return Lost::Said(why);
            }
            if !frame.header.reply {
                return Lost::Said("a request where a reply is due".into());
            }
            if binds == Some(frame.header.request) {
                match frame.into_result() {
                    Err(failure) if failure.kind != ErrorKind::Ended => {
                        return Lost::Said(format!("the session cannot use this connection: {failure}"));
                    }
                    _ => continue,
                }
            }
            // The caller may have given up.
            if let Some(mut waiting) = self.waiting.borrow_mut().remove(&frame.header.request) {
                if let Some(session) = session_of_hello(&frame) {
                    waiting.request.header.session = session;
                    self.hello.replace(Some(waiting.request));
                }
                let _ = waiting.reply.send(Ok(frame));
            }
        }
    }

    /// Counts a damaged payload of a request or of its reply. The request is sent again, and fails at the
    /// third time.
    fn note_damaged(&self, request: u64, why: &str) {
        let mut waiting = self.waiting.borrow_mut();
        let Some(found) = waiting.get_mut(&request) else { return };
        found.damaged += 1;
        if found.damaged >= DAMAGED_MOST
            && let Some(found) = waiting.remove(&request)
        {
            let _ = found.reply.send(Err(Failure::new(ErrorKind::Corrupt, why)));
        }
    }
}

/// A stream on which the first exchange is complete, and the version that it settled.
type Opened = (Rc<dyn Link>, Version);

/// Connects and completes the first exchange, within [`HANDSHAKE`].
async fn open(env: &Env, dial: &dyn Dial) -> Result<Opened, String> {
    let (link, credential) = dial.dial().await?;
    let result = match timeout(env, HANDSHAKE, greet(&*link, &credential)).await {
        Some(Ok(version)) => Ok(version),
        Some(Err(why)) => Err(format!("the first exchange failed: {why}")),
        None => Err(format!("the server did not answer within {} s", HANDSHAKE.as_secs())),
    };
    match result {
        Ok(version) => Ok((link, version)),
        Err(why) => {
            link.close();
            Err(why)
        }
    }
}

/// The first exchange. Over TCP the client sends nothing derived from the token before the server has proved
/// that it knows it. Returns the version of the messages after it.
async fn greet(link: &dyn Link, credential: &Credential) -> Result<Version, Lost> {
    let greeting = Greeting::new(nonce()?);
    send_all(link, &greeting.encode()).await?;
    let mut head = [0; WELCOME_HEAD_BYTES];
    receive_exact(link, &mut head).await?;
    match (credential, Welcome::is_challenge(&head)) {
        (Credential::Local, false) => welcome(link, head).await,
        (Credential::Local, true) => Err(Lost::Said("the server asks for a token at its own socket".into())),
        (Credential::Token(token, dialled), true) => {
            let mut bytes = [0; CHALLENGE_BYTES];
            bytes[..WELCOME_HEAD_BYTES].copy_from_slice(&head);
            receive_exact(link, &mut bytes[WELCOME_HEAD_BYTES..]).await?;
            let challenge = Challenge::decode(&bytes).map_err(crate::FrameError::from)?;
            if !challenge.is_proved(token, &greeting, *dialled) {
                return Err(Lost::Said(
                    "the server does not know the token: the token is not this instance's, or another \
                     program has its port"
                        .into(),
                ));
            }
            let proof = Proof::new(token, &greeting, &challenge, *dialled);
            send_all(link, &proof.encode()).await?;
            receive_exact(link, &mut head).await?;
            let version = welcome(link, head).await?;
            // The proofs cover the version in the challenge, so nobody on the way can lower it.
            match version == challenge.version {
                true => Ok(version),
                false => Err(Lost::Said("the server settles on two versions".into())),
            }
        }
        (Credential::Token(..), false) => {
            // The server may refuse before the proofs. A welcome without proofs is an error.
            welcome(link, head).await?;
            Err(Lost::Said("the server does not prove that it knows the token".into()))
        }
    }
}

/// Receives the rest of a welcome. A refusal is an error.
async fn welcome(link: &dyn Link, head: [u8; WELCOME_HEAD_BYTES]) -> Result<Version, Lost> {
    let len = Welcome::reason_bytes(&head).map_err(crate::FrameError::from)?;
    let mut bytes = head.to_vec();
    bytes.resize(WELCOME_HEAD_BYTES + len, 0);
    receive_exact(link, &mut bytes[WELCOME_HEAD_BYTES..]).await?;
    match Welcome::decode(&bytes).map_err(crate::FrameError::from)? {
        Welcome::Refused(reason) => Err(Lost::Said(format!("the server refuses: {reason}"))),
        Welcome::Accepted(version) => Ok(version),
    }
}

/// Removes a request when its caller drops it.
struct Forget<'a>(&'a Remote, u64);

impl Drop for Forget<'_> {
    fn drop(&mut self) {
        self.0.waiting.borrow_mut().remove(&self.1);
    }
}

impl Transport for Remote {
    fn call(&self, mut request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            let closed = || Failure::new(ErrorKind::Internal, "the connection to the service was closed");
            let permits = if is_control(request.header.kind) { &self.control_permits } else { &self.permits };
            let _permit = permits.acquire().await.map_err(|_| closed())?;
            if self.closed.get() {
                return Err(closed());
            }
            if request.body.len() > BODY_BYTES {
                // The server would close every connection over which it is sent.
                let why =
                    format!("the request has {} bytes, and at most {BODY_BYTES} fit", request.body.len());
                return Err(Failure::new(ErrorKind::Invalid, why));
            }
            let number = self.next_number();
            request.header.request = number;
            let (reply, answer) = oneshot::channel();
            if self.connected.get() {
                self.outbox.borrow_mut().push(request.clone(), ());
                self.wake.notify_one();
            }
            self.waiting.borrow_mut().insert(number, Waiting { request, reply, damaged: 0 });
            let _forget = Forget(self, number);
            answer.await.map_err(|_| closed())?
        })
    }
}
