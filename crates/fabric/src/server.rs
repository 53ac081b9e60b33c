//! The server's end: lets clients in, does their requests, and sends the replies as they are ready.

use crate::frame::{Outbox, Receiver};
use crate::greeting::{GREETING_BYTES, Greeting, Welcome};
use crate::link::{Link, Lost, receive, receive_exact, send, send_all};
use crate::{BYTES, CONNECTIONS, HANDSHAKE, REQUESTS};
use futures_util::future::{Either, select};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Env};
use penstock_wire::data::decode_read;
use penstock_wire::{Frame, Kind, Service};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

/// How long a reason for closing may take to be sent.
const LAST_WORD: Duration = Duration::from_secs(1);

/// Serves connections.
pub struct Server {
    env: Env,
    service: Rc<dyn Service>,
    token: String,
    links: RefCell<BTreeMap<u64, Rc<dyn Link>>>,
    next: Cell<u64>,
    stopped: Cell<bool>,
}

/// What a request holds until its reply is sent.
type Held = Option<(OwnedSemaphorePermit, OwnedSemaphorePermit)>;

struct Connection {
    link: Rc<dyn Link>,
    outbox: RefCell<Outbox<Held>>,
    wake: Notify,
    requests: Arc<Semaphore>,
    bytes: Arc<Semaphore>,
}

impl Server {
    /// A server of `service` for clients that have the token.
    pub fn new(env: &Env, service: Rc<dyn Service>, token: &str) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            service,
            token: token.to_owned(),
            links: RefCell::default(),
            next: Cell::new(1),
            stopped: Cell::new(false),
        })
    }

    /// Serves a connection in a task of its own. `from` says where it comes from, for people.
    pub fn accept(self: &Rc<Self>, link: Rc<dyn Link>, from: String) {
        if self.stopped.get() || self.links.borrow().len() >= CONNECTIONS {
            tracing::warn!(from, "a connection is refused: there are {CONNECTIONS}");
            link.close();
            return;
        }
        let id = self.next.get();
        self.next.set(id + 1);
        self.links.borrow_mut().insert(id, link.clone());
        let server = self.clone();
        let task = async move {
            let why = server.clone().serve(link.clone()).await;
            link.close();
            server.links.borrow_mut().remove(&id);
            match why {
                Lost::End => tracing::debug!(from, "a connection ended"),
                why => tracing::warn!(from, %why, "a connection was closed"),
            }
        };
        self.env.spawn("connection", Box::pin(task));
    }

    /// Connections.
    pub fn connections(&self) -> usize {
        self.links.borrow().len()
    }

    /// Closes all connections and takes no more.
    pub fn stop(&self) {
        self.stopped.set(true);
        self.links.borrow().values().for_each(|link| link.close());
    }

    async fn serve(self: Rc<Self>, link: Rc<dyn Link>) -> Lost {
        match timeout(&self.env, HANDSHAKE, self.greet(&*link)).await {
            Some(Ok(())) => {}
            Some(Err(why)) => return why,
            None => return Lost::Said(format!("no greeting within {} s", HANDSHAKE.as_secs())),
        }
        let connection = Rc::new(Connection {
            link,
            outbox: RefCell::default(),
            wake: Notify::new(),
            requests: Arc::new(Semaphore::new(REQUESTS)),
            bytes: Arc::new(Semaphore::new(BYTES)),
        });
        let Connection { link, outbox, wake, .. } = &*connection;
        let why = {
            let receiving = pin!(self.receive_all(&connection));
            let sending = pin!(send(&self.env, &**link, outbox, wake, false));
            match select(receiving, sending).await {
                Either::Left((why, _)) | Either::Right((why, _)) => why,
            }
        };
        if let Lost::Frame(error) = &why {
            let mut last = Frame::request(Kind::Closing, error.to_string().into_bytes(), Vec::new());
            last.header.request = error.damaged_request();
            outbox.borrow_mut().push(last, None);
            timeout(&self.env, LAST_WORD, send(&self.env, &**link, outbox, wake, true)).await;
        }
        why
    }

    async fn greet(&self, link: &dyn Link) -> Result<(), Lost> {
        let mut bytes = [0; GREETING_BYTES];
        // Its first bytes tell what is no greeting at all.
        receive_exact(link, &mut bytes[..8]).await?;
        if !bytes.starts_with(b"PNSG") {
            return Err(Lost::Said("what connects does not speak Penstock's messages".into()));
        }
        receive_exact(link, &mut bytes[8..]).await?;
        let refusal = match Greeting::decode(&bytes) {
            Ok(greeting) => greeting.refusal(&self.token),
            Err(error) => Some(error.to_string()),
        };
        let welcome = Welcome::new(refusal);
        send_all(link, &welcome.encode()).await?;
        match welcome.version {
            0 => Err(Lost::Said(welcome.reason)),
            _ => Ok(()),
        }
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
            let cost = cost_bytes(&frame).clamp(1, BYTES) as u32;
            let request = connection.requests.clone().acquire_owned().await;
            let bytes = connection.bytes.clone().acquire_many_owned(cost).await;
            let (Ok(request), Ok(bytes)) = (request, bytes) else {
                unreachable!("the semaphores of a connection are never closed")
            };
            let (service, connection) = (self.service.clone(), connection.clone());
            // To its end, whatever becomes of the connection.
            let task = async move {
                let reply = service.serve(frame).await;
                connection.outbox.borrow_mut().push(reply, Some((request, bytes)));
                connection.wake.notify_one();
            };
            self.env.spawn("request", Box::pin(task));
        }
    }
}

/// Payload that a request brings or its reply takes.
fn cost_bytes(frame: &Frame) -> usize {
    let asked = match frame.header.kind {
        Kind::Read => decode_read(&frame.body).map_or(0, |chunk| chunk.count as usize * BLOCK_BYTES),
        _ => 0,
    };
    asked.max(frame.header.payload_bytes as usize)
}
