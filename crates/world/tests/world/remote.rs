//! Tests of clients in other processes: connections that break, sessions that end, restarts of the service.

use crate::machine::{Machine, Site};
use penstock_base::env::{random_id, timeout};
use penstock_base::{BLOCK_BYTES, Branch, Buf, ErrorKind, FileId, Id128, Ino, LocalBoxFuture, crc32c_blocks};
use penstock_client::{Client, Failure};
use penstock_fabric::greeting::{Greeting, NONCE_BYTES};
use penstock_fabric::{Credential, Dial, Dialled, Door, Link, Outbox, Receiver, Remote, Server, Token};
use penstock_node::{ForOthers, WantedLayout};
use penstock_sim::{SimLink, World};
use penstock_wire::data::{ChunkRef, SpaceChange, encode_read, encode_write};
use penstock_wire::metadata::{
    HelloReply, HelloRequest, InodeRequest, LeaseReply, LeaseRequest, LockChange, LockReply, LockRequest,
    MakeRequest, NameRequest, OpenCount, PingRequest, ROLE_MOUNT, ReleasedLease, RenameRequest,
    SetAttrRequest, WatchRequest, XattrRequest,
};
use penstock_wire::{Frame, Kind, SLOTS, Service, Transport, Version, session_of_hello};
use prost::Message;
use std::cell::{Cell, RefCell};
use std::io::IoSlice;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

const EIO: u16 = 5;
const ESTALE: u16 = 116;

fn token() -> Token {
    Token::new(&"0123456789abcdef".repeat(4)).unwrap()
}

fn address() -> SocketAddr {
    "127.0.0.1:7000".parse().unwrap()
}

fn greeting() -> Vec<u8> {
    Greeting::new([7; NONCE_BYTES]).encode()
}

/// Sends bytes for which the link has room.
fn says(link: &SimLink, bytes: &[u8]) {
    let mut rest = bytes;
    while !rest.is_empty() {
        rest = &rest[link.try_write(&[IoSlice::new(rest)]).unwrap()..];
    }
}

/// The path to a server, which a restart of the service replaces.
pub struct Way {
    pub world: World,
    pub server: RefCell<Option<Rc<Server>>>,
    credential: RefCell<Credential>,
    pub links: RefCell<Vec<Rc<SimLink>>>,
}

impl Way {
    pub fn new(machine: &Machine) -> Rc<Self> {
        let way = Self {
            world: machine.world.clone(),
            server: RefCell::default(),
            credential: RefCell::new(Credential::Local),
            links: RefCell::default(),
        };
        way.lead_to(machine);
        Rc::new(way)
    }

    pub fn lead_to(&self, machine: &Machine) {
        let others = ForOthers::new(machine.node.clone());
        let server = Server::new(&machine.env, others, machine.node.store(), Some(token()));
        *self.server.borrow_mut() = Some(server);
    }

    fn open(&self) -> Result<Rc<SimLink>, String> {
        let server = self.server.borrow().clone().ok_or("nobody listens")?;
        let (mine, theirs) = SimLink::pair(&self.world);
        let door = match &*self.credential.borrow() {
            Credential::Local => Door::Local,
            Credential::Token(..) => Door::Token(address()),
        };
        server.accept(theirs, "the test".into(), door);
        self.links.borrow_mut().push(mine.clone());
        Ok(mine)
    }

    /// Breaks connections from time to time, until the result is dropped. Sometimes data that was sent on a
    /// broken connection arrives later.
    pub fn breaks(self: &Rc<Self>) -> Breaks {
        let over = Rc::new(Cell::new(false));
        let (way, env, ends) = (self.clone(), self.world.env(), over.clone());
        let breaker = async move {
            let below = |most| Duration::from_micros(way.world.below(most));
            while !ends.get() {
                env.sleep(Duration::from_millis(1) + below(20_000)).await;
                let link = {
                    let links = way.links.borrow();
                    let late = links.len() - 1 - way.world.below(links.len().min(3) as u64) as usize;
                    links[late].clone()
                };
                if way.world.below(4) == 0 {
                    link.cut();
                    continue;
                }
                link.stall();
                env.sleep(below(5000)).await;
                link.cut_late(below(100_000));
            }
        };
        self.world.env().spawn("breaker", Box::pin(breaker));
        Breaks(over)
    }

    pub fn last(&self) -> Rc<SimLink> {
        self.links.borrow().last().unwrap().clone()
    }
}

/// Connections break until this is dropped.
pub struct Breaks(Rc<Cell<bool>>);

impl Drop for Breaks {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

impl Dial for Way {
    fn dial(&self) -> LocalBoxFuture<'_, Dialled> {
        Box::pin(async { Ok((self.open()? as Rc<dyn Link>, self.credential.borrow().clone())) })
    }
}

pub async fn mount(machine: &Machine, way: &Rc<Way>) -> (Rc<Client>, Rc<Remote>) {
    let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
    let client = Client::connect_to_mount(&machine.env, remote.clone(), "the test", "/mnt").await.unwrap();
    (client, remote)
}

/// Sends a request over a connection, and returns it as it arrives.
pub fn carried(request: Frame) -> Frame {
    let (mut outbox, mut receiver) = (Outbox::new(Version::NEWEST), Receiver::new(Version::NEWEST));
    outbox.push(request, ());
    let sent: Vec<u8> = outbox.slices().iter().flat_map(|part| part.to_vec()).collect();
    let mut left = &sent[..];
    loop {
        let mut count = 0;
        for space in &mut receiver.spaces() {
            let part = space.len().min(left.len());
            space[..part].copy_from_slice(&left[..part]);
            (left, count) = (&left[part..], count + part);
        }
        if let Some(frame) = receiver.filled(count).unwrap() {
            assert!(left.is_empty(), "one message was sent");
            return frame;
        }
    }
}

pub fn on_machine(seed: u64, test: impl AsyncFnOnce(&Site, Machine)) {
    let site = Site::new();
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        test(&site, machine).await;
    });
    run.unwrap();
    world.destroy();
}

/// Starts the service again on the same drives, without making anything durable before. No server listens for
/// `down`.
pub async fn restart(site: &Site, machine: Machine, way: &Rc<Way>, down: Duration) -> Machine {
    way.server.borrow_mut().take().unwrap().stop();
    machine.node.abandon();
    drop(machine);
    if !down.is_zero() {
        way.world.env().sleep(down).await;
    }
    let machine = site.start(&way.world, &[]).await.unwrap();
    way.lead_to(&machine);
    machine
}

pub async fn make(client: &Client, name: &str) -> Result<FileId, Failure> {
    let (dir, mode) = (client.root().ino.0, 0o100_644);
    let request = MakeRequest { dir, name: name.into(), mode, open: true, ..MakeRequest::default() };
    Ok(client.make(Branch::MAIN, request).await?.file())
}

pub async fn read(client: &Client, id: FileId) -> Vec<u8> {
    read_at(client, id, 0, 1 << 20).await
}

async fn read_at(client: &Client, id: FileId, at: u64, len: u64) -> Vec<u8> {
    let parts = client.read(id, at, len).await.unwrap();
    parts.iter().flat_map(|part| part.to_vec()).collect()
}

/// The operations of one writer. Each step fails if it is executed twice or not at all.
async fn live(client: &Client, number: usize) {
    let root = client.root();
    for round in 0..8 {
        let (name, moved) = (format!("new-{number}"), format!("kept-{number}-{round}"));
        let id = make(client, &name).await.unwrap();
        let bytes = vec![(number * 16 + round) as u8; 5000 + number * 4001];
        client.write(id, 0, &bytes).await.unwrap();
        let request = RenameRequest {
            dir: root.ino.0,
            name: name.into(),
            new_dir: root.ino.0,
            new_name: moved.clone().into(),
            no_replace: true,
            ..RenameRequest::default()
        };
        client.rename(Branch::MAIN, request).await.unwrap();
        client.fsync(id).await.unwrap();
        assert_eq!(read(client, id).await, bytes);
        client.release(id).await.unwrap();
        if round % 2 == 1 {
            client.unlink(root, moved.as_bytes(), false).await.unwrap();
        }
    }
}

#[test]
fn every_request_is_done_once_over_connections_that_break() {
    on_machine(80, async |_, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let done = Rc::new(Cell::new(false));
        let (env, breaks, world, over) =
            (machine.env.clone(), way.clone(), machine.world.clone(), done.clone());
        let breaker = async move {
            while !over.get() {
                env.sleep(Duration::from_micros(100 + world.below(1500))).await;
                match world.below(3) {
                    0 => breaks.last().damage(world.below(9000) as usize),
                    _ => breaks.last().cut(),
                }
            }
        };
        machine.env.spawn("breaker", Box::pin(breaker));
        futures_util::future::join_all((0..12).map(|number| live(&client, number))).await;
        done.set(true);
        assert!(way.links.borrow().len() > 10, "{} connections", way.links.borrow().len());
        client.close().await.unwrap();
        assert_eq!(machine.node.session_reports().len(), 1, "the machine's own client is left");
        remote.close();
        machine.audit().await;
        machine.stop().await;
    });
}

/// Regression: connections break at the client's end. Requests that it had sent reach the service later,
/// after the client has sent them again on another connection and continued. An old write then overwrote a
/// later one that had been acknowledged.
#[test]
fn what_comes_late_over_a_connection_that_broke_is_not_done() {
    for seed in 0..6 {
        on_machine(800 + seed, async |_, machine| {
            let way = Way::new(&machine);
            let (client, remote) = mount(&machine, &way).await;
            let breaks = way.breaks();
            let write = async |number: u8| {
                let id = make(&client, &format!("file-{number}")).await.unwrap();
                for round in 0..250 {
                    machine.env.sleep(Duration::from_micros(machine.world.below(4000))).await;
                    client.write(id, 0, &[round; 4096]).await.unwrap();
                    if round % 8 == number {
                        client.change_space(id, 0, 4096, SpaceChange::Zero, true).await.unwrap();
                        client.write(id, 0, &[round; 4096]).await.unwrap();
                    }
                    assert_eq!(read(&client, id).await[0], round, "at once");
                }
                id
            };
            let files = futures_util::future::join_all((0..8).map(write)).await;
            drop(breaks);
            machine.env.sleep(Duration::from_secs(1)).await;
            for id in files {
                assert_eq!(read(&client, id).await[0], 249, "later");
            }
            assert!(way.links.borrow().len() > 5, "{} connections", way.links.borrow().len());
            client.close().await.unwrap();
            remote.close();
            machine.audit().await;
            machine.stop().await;
        });
    }
}

#[test]
fn strangers_are_told_why_and_cost_nothing() {
    on_machine(81, async |_, machine| {
        let way = Way::new(&machine);
        // A wrong token, and the right token from another address.
        let other = Token::new(&"f".repeat(64)).unwrap();
        let elsewhere = "127.0.0.1:7001".parse().unwrap();
        for credential in [Credential::Token(other, address()), Credential::Token(token(), elsewhere)] {
            *way.credential.borrow_mut() = credential;
            let refused = Remote::connect(&machine.env, way.clone()).await.map(|_| ()).unwrap_err();
            assert!(refused.message.contains("does not know the token"), "{refused}");
        }
        *way.credential.borrow_mut() = Credential::Token(token(), address());
        let (client, remote) = mount(&machine, &way).await;
        client.close().await.unwrap();
        remote.close();
        way.last().cut();
        machine.env.sleep(Duration::from_millis(1)).await;
        *way.credential.borrow_mut() = Credential::Local;
        let greeting = greeting();
        let frame = Frame::request(Kind::Write, vec![1; 100], Vec::new());
        let head = |body: u32, payload: u32| {
            let mut bytes = frame.header.encode(Version::NEWEST, &frame.body);
            bytes[12..16].copy_from_slice(&body.to_le_bytes());
            bytes[16..20].copy_from_slice(&payload.to_le_bytes());
            bytes
        };
        let server = way.server.borrow().clone().unwrap();
        for bytes in [
            b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec(),
            [&greeting[..], &[7; 500]].concat(),
            [&greeting[..], &head(u32::MAX, 0)].concat(),
            [&greeting[..], &head(100, u32::MAX)].concat(),
            // A request without a session, and half of another one.
            [&greeting[..], &frame.header.encode(Version::NEWEST, &frame.body)[..50]].concat(),
            greeting[..20].to_vec(),
        ] {
            let link = way.open().unwrap();
            assert_eq!(server.connections(), 1);
            says(&link, &bytes);
            machine.env.sleep(Duration::from_millis(1)).await;
            link.close();
            machine.env.sleep(Duration::from_secs(10)).await;
            assert_eq!(server.connections(), 0);
        }
        // A connection that sends nothing is closed after a short time.
        let _silent = way.open().unwrap();
        machine.env.sleep(penstock_fabric::HANDSHAKE * 2).await;
        assert_eq!(server.connections(), 0);
        machine.stop().await;
    });
}

/// A stranger at the server's address receives nothing that the token authenticates, and nothing that it
/// could pass on.
#[test]
fn who_took_the_address_of_a_server_learns_nothing_and_serves_nobody() {
    on_machine(86, async |_, machine| {
        /// A stranger that has taken the address. It passes everything to the server, which now listens
        /// elsewhere.
        struct Thief {
            world: World,
            server: Rc<Server>,
            heard: RefCell<Vec<u8>>,
            said: RefCell<Vec<u8>>,
        }
        impl Thief {
            async fn pass(self: Rc<Self>, from: Rc<SimLink>, to: Rc<SimLink>, back: bool) {
                let mut bytes = [0; 4096];
                loop {
                    match from.try_read(&mut [std::io::IoSliceMut::new(&mut bytes)]) {
                        Ok(0) => break to.close(),
                        Ok(count) => {
                            let noted = if back { &self.said } else { &self.heard };
                            noted.borrow_mut().extend(&bytes[..count]);
                            let mut rest = &bytes[..count];
                            while let Ok(count) = to.try_write(&[IoSlice::new(rest)])
                                && count < rest.len()
                            {
                                rest = &rest[count..];
                            }
                        }
                        Err(_) => self.world.env().sleep(Duration::from_millis(1)).await,
                    }
                }
            }
        }
        struct ToThief(Rc<Thief>);
        impl Dial for ToThief {
            fn dial(&self) -> LocalBoxFuture<'_, Dialled> {
                Box::pin(async {
                    let thief = self.0.clone();
                    let (mine, at_thief) = SimLink::pair(&thief.world);
                    let (onward, at_server) = SimLink::pair(&thief.world);
                    let elsewhere = "127.0.0.1:7001".parse().unwrap();
                    thief.server.accept(at_server, "the thief".into(), Door::Token(elsewhere));
                    let env = thief.world.env();
                    let there = thief.clone().pass(at_thief.clone(), onward.clone(), false);
                    env.spawn("there", Box::pin(there));
                    env.spawn("back", Box::pin(thief.clone().pass(onward, at_thief, true)));
                    Ok((mine as Rc<dyn Link>, Credential::Token(token(), address())))
                })
            }
        }
        let server = Way::new(&machine).server.borrow().clone().unwrap();
        let (heard, said) = Default::default();
        let thief = Rc::new(Thief { world: machine.world.clone(), server, heard, said });
        let dial: Rc<dyn Dial> = Rc::new(ToThief(thief.clone()));
        let refused = Remote::connect(&machine.env, dial).await.map(|_| ()).unwrap_err();
        assert!(refused.message.contains("does not know the token"), "{refused}");
        machine.env.sleep(Duration::from_secs(1)).await;
        assert!(!thief.said.borrow().is_empty(), "the server answered what was passed on");
        let heard = thief.heard.borrow().len();
        assert_eq!(heard, greeting().len(), "the client said nothing behind its greeting");
        machine.stop().await;
    });
}

#[test]
fn the_silent_keep_nobody_out() {
    on_machine(87, async |_, machine| {
        let way = Way::new(&machine);
        *way.credential.borrow_mut() = Credential::Token(token(), address());
        let silent: Vec<_> = (0..penstock_fabric::NEWCOMERS * 2).map(|_| way.open().unwrap()).collect();
        let server = way.server.borrow().clone().unwrap();
        assert_eq!(server.connections(), penstock_fabric::NEWCOMERS);
        // Each of these mounts takes the place of one of the stranger's connections.
        let mut mounts = Vec::new();
        for _ in 0..penstock_fabric::CONNECTIONS {
            mounts.push(mount(&machine, &way).await);
        }
        assert_no_session(&machine, &way).await;
        for (client, remote) in mounts {
            client.close().await.unwrap();
            remote.close();
        }
        way.links.borrow().iter().for_each(|link| link.cut());
        machine.env.sleep(penstock_fabric::HANDSHAKE * 2).await;
        assert_eq!(server.connections(), 0);
        drop(silent);
        machine.stop().await;
    });
}

#[test]
fn who_takes_no_replies_is_not_listened_to_and_then_closed() {
    on_machine(85, async |_, machine| {
        let way = Way::new(&machine);
        let id = make(&machine.client, "file").await.unwrap();
        machine.client.write(id, 0, &[7; 100_000]).await.unwrap();
        machine.client.release(id).await.unwrap();
        let hello = hello(&machine).await;
        let session = hello.header.session;
        let join = request_of(session, 0, Kind::ListXattr, InodeRequest { ino: id.ino.0 }.encode_to_vec());
        serve(&machine, join).await.into_result().unwrap();
        let link = way.open().unwrap();
        let mut stream = greeting();
        stream.extend(hello.header.encode(Version::NEWEST, &hello.body));
        stream.extend(hello.body);
        let blocks = ChunkRef { ino: id.ino, chunk: 0, block: 0, count: 20, truncations: 0 };
        let body = encode_read(&blocks);
        let len = penstock_wire::HEADER_BYTES + body.len();
        for number in 1..2000 {
            let mut read = Frame::request(Kind::Read, body.clone(), Vec::new());
            (read.header.session, read.header.request) = (session, number);
            stream.extend(read.header.encode(Version::NEWEST, &read.body));
            stream.extend(read.body);
        }
        let server = way.server.borrow().clone().unwrap();
        let (mut sent, mut waits) = (0, 0);
        while waits < 20 {
            match link.try_write(&[IoSlice::new(&stream[sent..])]) {
                Ok(count) => (sent, waits) = (sent + count, 0),
                Err(_) => waits += 1,
            }
            machine.env.sleep(Duration::from_millis(5)).await;
        }
        // Only the bytes that fit into the stream itself and the requests that are executed at the same time
        // were taken.
        let most = (64 << 10) + (penstock_fabric::REQUESTS + 2) * len + 100;
        assert!(sent > 64 << 10 && sent < most, "{sent} bytes were taken");
        assert_eq!(server.connections(), 1);
        machine.env.sleep(penstock_fabric::SEND_PATIENCE * 2).await;
        assert_eq!(server.connections(), 0);
        machine.stop().await;
    });
}

async fn session(machine: &Machine) -> u64 {
    hello(machine).await.header.session
}

/// Begins a session. Returns the request that goes on with it.
async fn hello(machine: &Machine) -> Frame {
    let hello = HelloRequest::of_mount(random_id(&machine.env));
    let mut request = Frame::request(Kind::Hello, hello.encode_to_vec(), Vec::new());
    let reply = machine.node.serve(request.clone(), true).await;
    request.header.session = session_of_hello(&reply).unwrap();
    request
}

/// A request of a session, as its client sends it.
pub(crate) fn request_of(session: u64, sequence: u64, kind: Kind, body: Vec<u8>) -> Frame {
    let mut frame = Frame::request(kind, body, Vec::new());
    (frame.header.session, frame.header.sequence) = (session, sequence);
    frame
}

/// Sends a request until it need not wait for another client any more.
async fn serve(machine: &Machine, request: Frame) -> Frame {
    loop {
        let reply = machine.node.serve(request.clone(), true).await;
        match reply.clone().into_result() {
            Err(failure) if failure.is_ask_again() => {}
            Ok((body, _))
                if request.header.kind == Kind::Lease && LeaseReply::decode(&body[..]).unwrap().wait => {}
            _ => return reply,
        }
        machine.env.sleep(Duration::from_millis(10)).await;
    }
}

/// A connection has the session that Hello has bound to it, and no other: a number alone is worth nothing.
#[test]
fn a_connection_speaks_for_its_own_session_only() {
    on_machine(98, async |_, machine| {
        let way = Way::new(&machine);
        let (client, victim) = mount(&machine, &way).await;
        let file = make(&client, "file").await.unwrap();
        let number = client.session();
        let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
        let ask = async |session: u64, kind: Kind, body: Vec<u8>| {
            remote.call(request_of(session, 0, kind, body)).await.unwrap().into_result()
        };
        for session in [0, number, 99] {
            for kind in [Kind::End, Kind::Ping, Kind::Watch, Kind::StatFs] {
                let failure = ask(session, kind, Vec::new()).await.unwrap_err();
                assert_eq!(failure.kind, ErrorKind::Ended, "{session} {kind:?}: {failure}");
            }
        }
        // Somebody who guesses the number does not know the name.
        let guess = HelloRequest::of_mount(Id128([3; 16])).encode_to_vec();
        assert_eq!(ask(number, Kind::Hello, guess.clone()).await.unwrap_err().kind, ErrorKind::Ended);
        assert_eq!(ask(number, Kind::End, Vec::new()).await.unwrap_err().kind, ErrorKind::Ended);
        let own = ask(0, Kind::Hello, guess.clone()).await.unwrap().0;
        let own = HelloReply::decode(&own[..]).unwrap().session;
        assert!(own != number && ask(own, Kind::Ping, Vec::new()).await.is_ok());
        // A connection that has a session begins no other one, and speaks for no other.
        let another = HelloRequest::of_mount(Id128([4; 16])).encode_to_vec();
        assert_eq!(ask(0, Kind::Hello, another).await.unwrap_err().kind, ErrorKind::Denied);
        assert_eq!(ask(number, Kind::End, Vec::new()).await.unwrap_err().kind, ErrorKind::Ended);
        assert_eq!(machine.node.session_reports().len(), 3);
        client.write(file, 0, b"there").await.unwrap();
        assert_eq!(read(&client, file).await, b"there");
        // It goes on over the next connection, by its name.
        way.links.borrow()[0].cut();
        assert_eq!(read(&client, file).await, b"there");
        // A session that has ended goes on over none.
        machine.node.end_session(own).await.unwrap();
        way.links.borrow()[1].cut();
        assert_eq!(ask(own, Kind::Ping, Vec::new()).await.unwrap_err().kind, ErrorKind::Ended);
        client.close().await.unwrap();
        [remote, victim].iter().for_each(|remote| remote.close());
        machine.stop().await;
    });
}

#[test]
fn a_repeat_is_answered_and_not_done_again() {
    on_machine(82, async |_, machine| {
        let session = session(&machine).await;
        let root = machine.client.root().ino.0;
        let request = |kind: Kind, sequence: u64, body: Vec<u8>| {
            let frame = request_of(session, sequence, kind, body);
            async { serve(&machine, frame).await.into_result().map(|(body, _)| body) }
        };
        let name = |name: &str| {
            NameRequest { dir: root, name: name.into(), directory: false, lease: false }.encode_to_vec()
        };
        let file = |name: &str| {
            let (name, mode) = (name.into(), 0o100_644);
            MakeRequest { dir: root, name, mode, ..MakeRequest::default() }.encode_to_vec()
        };
        // The same request twice at the same time, as after a connection that broke while it was executed.
        let twice = (request(Kind::Make, SLOTS + 5, file("a")), request(Kind::Make, SLOTS + 5, file("a")));
        let (one, other) = futures_util::future::join(twice.0, twice.1).await;
        assert_eq!((one.is_ok(), one), (true, other));
        request(Kind::Unlink, SLOTS + 6, name("a")).await.unwrap();
        request(Kind::Make, SLOTS + 5, file("a")).await.unwrap();
        let missing = request(Kind::Unlink, SLOTS + 7, name("a")).await.unwrap_err();
        assert_eq!(missing.errno, 2, "the repeat made nothing");
        // A failure is a stored result too.
        request(Kind::Make, SLOTS + 8, file("a")).await.unwrap();
        assert_eq!(request(Kind::Unlink, SLOTS + 7, name("a")).await.unwrap_err(), missing);
        // A request whose slot was used again is too late to be executed.
        request(Kind::Unlink, 2 * SLOTS + 6, name("a")).await.unwrap();
        request(Kind::Make, 2 * SLOTS + 5, file("a")).await.unwrap();
        let late = request(Kind::Unlink, SLOTS + 6, name("a")).await.unwrap_err();
        assert!(late.message.contains("slot"), "{late}");
        machine
            .node
            .serve(Frame::request(Kind::Sync, Vec::new(), Vec::new()), true)
            .await
            .into_result()
            .unwrap_err();
        machine.stop().await;
    });
}

#[test]
fn a_silent_client_loses_its_session_and_what_it_had_open() {
    on_machine(83, async |_, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let id = make(&client, "gone").await.unwrap();
        client.write(id, 0, &[7; 50_000]).await.unwrap();
        client.fsync(id).await.unwrap();
        client.unlink(client.root(), b"gone", false).await.unwrap();
        let lease = penstock_session::LEASE;
        machine.env.sleep(lease * 4).await;
        assert_eq!(read(&client, id).await, [7; 50_000], "a client that lives keeps its session");
        // The client is cut off. Other clients wait for its lease until its session ends.
        let kept = make(&client, "kept").await.unwrap();
        client.write(kept, 0, &[8; 50_000]).await.unwrap();
        client.fsync(kept).await.unwrap();
        client.write(kept, 0, &[9; 9000]).await.unwrap();
        let server = way.server.borrow_mut().take();
        way.last().cut();
        way.links.borrow().iter().for_each(|link| link.cut());
        let cut = machine.env.now();
        machine.client.write(kept, 9000, &[3; 1000]).await.unwrap();
        assert!(machine.env.now() - cut > lease / 2, "not before the lease of the other one is over");
        let found = read(&machine.client, kept).await;
        assert!(found[9000..10_000] == [3; 1000] && found[10_000..] == [8; 40_000]);
        let silent = machine.node.session_reports();
        assert!(silent.iter().all(|session| !session.remote), "{silent:?}");
        *way.server.borrow_mut() = server;
        assert_eq!(client.get_attr(id).await.unwrap_err().errno, ESTALE);
        assert_eq!(client.get_attr(client.root()).await.unwrap_err().kind, ErrorKind::Ended);
        assert!(client.has_ended());
        remote.close();
        machine.audit().await;
        let gone = machine.client.get_attr(id).await.unwrap_err();
        assert_eq!(gone.errno, ESTALE, "the file that it had open is reaped");
        machine.stop().await;
    });
}

/// Regression: an fsync by another client did not cover what a client had written whose session had ended.
#[test]
fn what_an_ended_session_has_written_is_durable_for_others() {
    const FAR: u64 = 1 << 20;
    for stacks in [1, 3] {
        let site = Site::spread((4, 2), stacks, stacks);
        let world = World::new(87);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            if stacks > 1 {
                let wanted = WantedLayout { count: Some(stacks), turn: Some(1) };
                machine.node.set_layout("/", wanted).await.unwrap();
            }
            let way = Way::new(&machine);
            let (client, remote) = mount(&machine, &way).await;
            let file = make(&client, "file").await.unwrap();
            for fill in [1, 2] {
                for at in 0..3 {
                    client.write(file, at * FAR, &[fill; 50_000]).await.unwrap();
                }
                if fill == 1 {
                    client.fsync(file).await.unwrap();
                }
            }
            let reports = machine.node.session_reports();
            let session = reports.iter().find(|session| session.remote).unwrap().id;
            machine.node.end_session(session).await.unwrap();
            let found = read_at(&machine.client, file, 2 * FAR, 50_000).await;
            assert!(found == [2; 50_000]);
            machine.client.fsync(file).await.unwrap();
            remote.close();
        });
        run.unwrap();
        site.cut(&world);
        let world = World::new(88);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let file = machine.client.lookup(machine.client.root(), b"file").await.unwrap().file();
            for at in 0..3 {
                let found = read_at(&machine.client, file, at * FAR, 50_000).await;
                assert!(found == [2; 50_000], "{stacks} stacks, part {at}");
            }
            machine.audit().await;
            machine.stop().await;
        });
        run.unwrap();
    }
}

/// Regression: a client that only pings, and never answers a call, stopped all others for good.
#[test]
fn a_client_that_pings_and_never_answers_loses_its_session() {
    on_machine(85, async |_, machine| {
        let file = make(&machine.client, "file").await.unwrap();
        machine.client.write(file, 0, &[1; 10]).await.unwrap();
        machine.client.sync_all().await.unwrap();
        let lease = penstock_session::LEASE;
        let silent = session(&machine).await;
        let ask = async |kind: Kind, body: Vec<u8>| {
            serve(&machine, request_of(silent, 0, kind, body)).await.into_result()
        };
        let request = LeaseRequest { ino: file.ino.0, exclusive: true, first: 0, last: u64::MAX };
        ask(Kind::Lease, request.encode_to_vec()).await.unwrap();
        let begun = machine.env.now();
        let pings = async {
            while ask(Kind::Ping, Vec::new()).await.is_ok() {
                machine.env.sleep(lease / 4).await;
            }
        };
        let another = async {
            machine.client.write(file, 0, &[2; 10]).await.unwrap();
            machine.env.now() - begun
        };
        let (waited, ()) = tokio::join!(another, pings);
        assert!(waited > lease && waited < lease * 2, "{waited:?}");
        assert_eq!(machine.node.session_reports().len(), 1, "its session has ended");
        machine.stop().await;
    });
}

/// Regression: a session gave back more leases than one message can name, sent them over one connection after
/// the other, and was not heard any more.
#[test]
fn a_message_that_is_too_long_fails_and_breaks_no_connection() {
    on_machine(94, async |_, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let released = (0..110_000)
            .map(|ino| ReleasedLease { ino: 1_000_000 + ino, branch: 0, grant: ino, attributes: false })
            .collect();
        let watch = WatchRequest { released, ..WatchRequest::default() }.encode_to_vec();
        let watched = remote.call(request_of(client.session(), 0, Kind::Watch, watch)).await;
        assert_eq!(watched.unwrap_err().kind, ErrorKind::Invalid);
        assert_eq!(way.links.borrow().len(), 1, "the connection lives");
        client.close().await.unwrap();
        remote.close();
        machine.stop().await;
    });
}

/// Regression: a request of the data path with a sequence was carried out before its session took part.
#[test]
fn only_requests_that_have_one_may_have_a_sequence() {
    on_machine(95, async |_, machine| {
        let file = make(&machine.client, "file").await.unwrap();
        machine.client.write(file, 0, &[1; 4096]).await.unwrap();
        machine.env.sleep(Duration::from_secs(1)).await;
        let session = session(&machine).await;
        let block = Buf::copy_from(&[2; BLOCK_BYTES]);
        let at = ChunkRef { ino: file.ino, chunk: 0, block: 0, count: 1, truncations: 0 };
        let body = encode_write(&at, &crc32c_blocks(&block));
        let mut write = Frame::request(Kind::Write, body, vec![block]);
        (write.header.session, write.header.sequence) = (session, SLOTS);
        let refused = machine.node.serve(write, true).await.into_result().unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Invalid, "{refused}");
        assert_eq!(read(&machine.client, file).await, [1; 4096]);
        machine.node.end_session(session).await.unwrap();
        machine.stop().await;
    });
}

#[test]
fn a_client_lives_over_a_restart_and_loses_nothing() {
    on_machine(84, async |site, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let root = client.root();
        let id = make(&client, "file").await.unwrap();
        let open = make(&client, "open").await.unwrap();
        for file in [id, open] {
            client.write(file, 0, &[1; 10_000]).await.unwrap();
            client.fsync(file).await.unwrap();
        }
        client.unlink(root, b"open", false).await.unwrap();
        client.sync().await.unwrap();
        client.write(id, 10_000, &[2; 10_000]).await.unwrap();
        // The process of the service is killed and restarted.
        let machine = restart(site, machine, &way, Duration::from_secs(3)).await;
        let found = read(&machine.client, id).await;
        assert!(found.len() == 20_000 && found[..10_000] == [1; 10_000] && found[10_000..] == [2; 10_000]);
        client.fsync(id).await.unwrap();
        client.write(id, 10_000, &[3; 10_000]).await.unwrap();
        client.fsync(id).await.unwrap();
        assert_eq!(read(&client, id).await[10_000..], [3; 10_000]);
        machine.env.sleep(penstock_session::LEASE * 2).await;
        assert_eq!(read(&client, open).await, [1; 10_000], "what was open is open");
        client.release(open).await.unwrap();
        client.release(id).await.unwrap();
        client.close().await.unwrap();
        remote.close();
        machine.audit().await;
        assert_eq!(machine.client.get_attr(open).await.unwrap_err().errno, ESTALE);
        machine.stop().await;
    });
}

/// A restart loses the creation of a file that a client has open, and a write is sent before the client has
/// made the file again. Regression: such a write allocated blocks that nothing could ever free.
#[test]
fn a_file_whose_creation_was_lost_is_made_again() {
    on_machine(91, async |site, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        make(&client, "kept").await.unwrap();
        client.sync().await.unwrap();
        let id = make(&client, "again").await.unwrap();
        let made = client.get_attr(id).await.unwrap();
        client.write(id, 0, &[1; 8192]).await.unwrap();
        let machine = restart(site, machine, &way, Duration::from_secs(3)).await;
        // The request is sent while no server listens, and sent again as soon as one does.
        let block = Buf::copy_from(&[2; BLOCK_BYTES]);
        let at = ChunkRef { ino: id.ino, chunk: 0, block: 1, count: 1, truncations: 0 };
        let body = encode_write(&at, &crc32c_blocks(&block));
        let mut late = Frame::request(Kind::Write, body, vec![block]);
        late.header.session = client.session();
        let late = remote.call(late).await.unwrap().into_result();
        assert_eq!(late.unwrap_err().errno, ESTALE);
        let attr = client.get_attr(id).await.unwrap();
        assert_eq!((attr.ino, attr.size, attr.btime), (made.ino, 8192, made.btime));
        client.write(id, 0, &[3; 4096]).await.unwrap();
        client.fsync(id).await.unwrap();
        let root = machine.client.root();
        assert_eq!(machine.client.lookup(root, b"again").await.unwrap().ino, id.ino.0);
        assert_eq!(read(&machine.client, id).await, [[3; 4096], [1; 4096]].concat());
        client.release(id).await.unwrap();
        client.close().await.unwrap();
        remote.close();
        machine.audit().await;
        machine.stop().await;
    });
}

/// Regression: a restart lost a session with the last number that was given, and the next client got the same
/// number. One client received a reply to the other's request.
#[test]
fn no_session_number_is_given_twice() {
    on_machine(93, async |site, machine| {
        let way = Way::new(&machine);
        let (one, first) = mount(&machine, &way).await;
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        let (other, second) = mount(&machine, &way).await;
        assert_ne!(one.session(), other.session());
        make(&one, "one").await.unwrap();
        make(&other, "other").await.unwrap();
        for (client, remote) in [(one, first), (other, second)] {
            client.close().await.unwrap();
            remote.close();
        }
        machine.audit().await;
        machine.stop().await;
    });
}

/// Regression: the numbers of files whose creation was lost were given to other files, to which the clients
/// with the old files open then wrote.
#[test]
fn no_inode_number_is_given_twice() {
    on_machine(92, async |site, mut machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        make(&client, "kept").await.unwrap();
        client.sync().await.unwrap();
        let mut highest = 0;
        for life in 0..2 {
            // Numbers are reserved in runs.
            let run = (highest.max(client.root().ino.0) | 4095) + 1;
            for number in 0.. {
                let id = make(&client, &format!("{life}-{number}")).await.unwrap();
                assert!(id.ino.0 > highest, "{id} was given before");
                highest = id.ino.0;
                if highest == run + 10 {
                    break;
                }
            }
            machine = restart(site, machine, &way, Duration::ZERO).await;
        }
        drop(client.close().await);
        remote.close();
        machine.audit().await;
        machine.stop().await;
    });
}

#[test]
fn a_size_that_was_not_durable_is_set_again() {
    on_machine(88, async |site, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let (cut, other) = (make(&client, "cut").await.unwrap(), make(&client, "other").await.unwrap());
        for file in [cut, other] {
            client.write(file, 0, &[1; 10_000]).await.unwrap();
            client.fsync(file).await.unwrap();
        }
        let size = SetAttrRequest { ino: cut.ino.0, size: Some(5), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, size).await.unwrap();
        let machine = restart(site, machine, &way, Duration::from_secs(3)).await;
        for (file, bytes) in [(other, 10_000), (cut, 5)] {
            assert_eq!(read(&machine.client, file).await, vec![1; bytes]);
            client.fsync(file).await.unwrap();
        }
        client.close().await.unwrap();
        remote.close();
        machine.audit().await;
        machine.stop().await;
    });
}

/// Regression: if a client cannot sync a size, everyone who asks for the size gets an error. They got an old
/// size, and a successful fsync.
#[test]
fn a_size_that_cannot_be_settled_is_an_error_of_who_asks_for_it() {
    on_machine(89, async |_, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let id = make(&client, "file").await.unwrap();
        client.fsync(id).await.unwrap();
        fill_rows(&machine).await;
        client.write(id, 0, b"these").await.unwrap();
        let asked = machine.client.get_attr(id).await.map(|attr| attr.size);
        let synced = machine.client.fsync(id).await;
        match asked {
            Ok(size) => assert_eq!((size, synced.is_ok()), (5, true)),
            Err(failure) => assert!(failure.message.contains("cannot sync") && synced.is_err(), "{failure}"),
        }
        remote.close();
    });
}

/// Makes names and attributes until there is no space for another row.
async fn fill_rows(machine: &Machine) {
    let mut full = None;
    for number in 0..5000 {
        let file = make(&machine.client, &format!("full {number}")).await;
        let Ok(file) = file.map_err(|failure| full = Some(failure)) else { break };
        let request = XattrRequest {
            ino: file.ino.0,
            name: b"user.v".into(),
            value: vec![7; 60_000],
            ..XattrRequest::default()
        };
        if let Err(failure) = machine.client.set_xattr(Branch::MAIN, request).await {
            full = Some(failure);
            break;
        }
    }
    let full = full.expect("rows have an end");
    assert_eq!(full.kind, ErrorKind::NoSpace, "{full}");
    while make(&machine.client, &format!("more {}", machine.world.below(1 << 40))).await.is_ok() {}
}

/// Regression: a client that could not sync its writes kept its lease for ever, and everyone who wanted the
/// file waited as long. Now the writes are lost after 10 s, and its fsync reports that once.
#[test]
fn what_cannot_be_settled_is_lost_and_told() {
    on_machine(92, async |_, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let id = make(&client, "file").await.unwrap();
        client.write(id, 0, &[1; 100]).await.unwrap();
        client.fsync(id).await.unwrap();
        fill_rows(&machine).await;
        // Each block is in a chunk of its own, which needs a row.
        for chunk in 0..64u64 {
            client.write(id, chunk << 20, &[2; 4096]).await.unwrap();
        }
        let read = machine.client.read(id, 0, 100);
        let read = timeout(&machine.env, Duration::from_secs(60), read).await.expect("the lease comes");
        assert!(read.is_ok());
        let synced = client.fsync(id).await;
        assert!(!client.is_unsynced(id));
        assert_eq!(synced.unwrap_err().errno, EIO);
        assert!(client.fsync(id).await.is_ok(), "it is told once");
        remote.close();
    });
}

/// A service that counts the requests that it begins, and completes none.
#[derive(Default)]
struct Endless(Cell<usize>);

impl Service for Endless {
    fn serve(&self, request: Frame) -> LocalBoxFuture<'_, Frame> {
        if request.header.kind == Kind::Hello {
            let reply = HelloReply { session: ENDLESS, ..HelloReply::default() };
            return Box::pin(async move {
                Frame::reply(&request.header, Ok((reply.encode_to_vec(), Vec::new())))
            });
        }
        self.0.set(self.0.get() + 1);
        Box::pin(std::future::pending())
    }

    fn hung_up(&self, _session: u64, _has_another: bool) {}

    fn has_session(&self, session: u64) -> bool {
        session == ENDLESS
    }
}

/// The session of every client of an endless service.
const ENDLESS: u64 = 7;

/// A client of an endless service, with its connections and the server.
async fn with_endless(machine: &Machine) -> (Rc<Way>, Rc<Endless>, Rc<Server>, Rc<Remote>) {
    let (way, endless) = (Way::new(machine), Rc::new(Endless::default()));
    let server = Server::new(&machine.env, endless.clone(), machine.node.store(), Some(token()));
    *way.server.borrow_mut() = Some(server.clone());
    let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
    remote.call(Frame::request(Kind::Hello, Vec::new(), Vec::new())).await.unwrap();
    (way, endless, server, remote)
}

/// Regression: many requests may wait for other clients, and each may have the largest size, so one
/// connection used all memory. Regression: so did a client that connected again and again, and one that did
/// not take the replies to small requests for news.
#[test]
fn requests_that_wait_are_bounded_however_often_their_client_connects() {
    let largest = penstock_fabric::BODY_BYTES;
    let of_control = penstock_fabric::CONTROL_BYTES / largest;
    for (kind, bytes, most) in [
        (Kind::Watch, largest, of_control),
        (Kind::Watch, 0, 4 * of_control),
        (Kind::Repeat, largest, penstock_fabric::BYTES / largest),
        (Kind::Repeat, 0, penstock_fabric::REQUESTS),
        (Kind::ReadDir, 0, 2 * penstock_fabric::BYTES / largest),
    ] {
        on_machine(94, async |_, machine| {
            let (way, endless, _server, remote) = with_endless(&machine).await;
            for _ in 0..3 * most {
                let remote = remote.clone();
                let request = request_of(ENDLESS, 0, kind, vec![0; bytes]);
                let call = async move { drop(remote.call(request).await) };
                machine.env.spawn("call", Box::pin(call));
            }
            // Those over the connection that is lost do not keep their client from going on.
            for connections in [1, 2, 2, 2] {
                machine.env.sleep(Duration::from_secs(30)).await;
                assert_eq!(endless.0.get(), connections * most, "{kind:?} of {bytes} bytes");
                way.last().close();
            }
            remote.close();
            machine.stop().await;
        });
    }
}

/// Connects and says Hello. Returns the reply too.
async fn greets(machine: &Machine, way: &Rc<Way>, hello: HelloRequest) -> (Rc<Remote>, Frame) {
    let remote = Remote::connect(&machine.env, way.clone()).await.unwrap();
    let hello = Frame::request(Kind::Hello, hello.encode_to_vec(), Vec::new());
    let reply = remote.call(hello).await.unwrap();
    (remote, reply)
}

/// Asserts that a new client is refused because of the number of sessions.
async fn assert_no_session(machine: &Machine, way: &Rc<Way>) {
    let (remote, reply) = greets(machine, way, HelloRequest::of_mount(Id128([255; 16]))).await;
    let refused = reply.into_result().unwrap_err();
    assert!(refused.message.contains("64 sessions"), "{refused}");
    remote.close();
}

/// Regression: clients began more sessions than there are places for connections, and took all places after a
/// restart. A mount with a session found none, and its session ended.
#[test]
fn a_session_that_lives_has_a_place() {
    on_machine(101, async |_, machine| {
        let way = Way::new(&machine);
        let (client, remote) = mount(&machine, &way).await;
        let id = make(&client, "file").await.unwrap();
        let mut others = Vec::new();
        for number in 1..penstock_fabric::CONNECTIONS {
            let hello = HelloRequest::of_mount(Id128([number as u8; 16]));
            let (other, reply) = greets(&machine, &way, hello).await;
            assert!(session_of_hello(&reply).is_some());
            others.push(other);
        }
        assert_no_session(&machine, &way).await;
        way.links.borrow()[0].cut();
        client.write(id, 0, &[7; 100]).await.unwrap();
        client.fsync(id).await.unwrap();
        assert_no_session(&machine, &way).await;
        // One without a connection, and with nothing that it could lose, makes room.
        others[5].close();
        way.links.borrow()[6].cut();
        machine.env.sleep(Duration::from_secs(1)).await;
        let (newcomer, another) = mount(&machine, &way).await;
        assert_eq!(newcomer.lookup(machine.client.root(), b"file").await.unwrap().size, 100);
        for (client, remote) in [(client, remote), (newcomer, another)] {
            client.close().await.unwrap();
            remote.close();
        }
        others.iter().for_each(|other| other.close());
        machine.stop().await;
    });
}

/// Regression: connections that never said Hello took all places, and after a restart the clients that had
/// sessions could not come back.
#[test]
fn who_says_no_hello_keeps_nobody_out() {
    on_machine(99, async |_, machine| {
        let way = Way::new(&machine);
        let silent: Vec<_> = (0..penstock_fabric::CONNECTIONS).map(|_| way.open().unwrap()).collect();
        for link in &silent {
            says(link, &greeting());
        }
        let server = way.server.borrow().clone().unwrap();
        machine.env.sleep(Duration::from_secs(1)).await;
        assert_eq!(server.connections(), penstock_fabric::CONNECTIONS);
        let (client, remote) = mount(&machine, &way).await;
        machine.env.sleep(penstock_fabric::HANDSHAKE * 3).await;
        assert_eq!(server.connections(), 1, "who has said it stays");
        client.close().await.unwrap();
        remote.close();
        machine.stop().await;
    });
}

/// Regression: so did connections whose Hello was refused, and those whose sessions had ended.
#[test]
fn a_connection_without_a_session_that_lives_keeps_nobody_out() {
    on_machine(100, async |_, machine| {
        let way = Way::new(&machine);
        let server = way.server.borrow().clone().unwrap();
        for (role, others) in [(2, 0), (ROLE_MOUNT, penstock_fabric::CONNECTIONS)] {
            let mut remotes = Vec::new();
            for number in 0..penstock_fabric::CONNECTIONS {
                let hello = HelloRequest { role, ..HelloRequest::of_mount(Id128([1 + number as u8; 16])) };
                let (remote, reply) = greets(&machine, &way, hello).await;
                assert_eq!(session_of_hello(&reply).is_some(), others > 0);
                remotes.push(remote);
            }
            assert_eq!(server.connections(), penstock_fabric::CONNECTIONS);
            if others > 0 {
                assert_no_session(&machine, &way).await;
                machine.env.sleep(penstock_session::LEASE * 2).await;
                assert_eq!(server.connections(), penstock_fabric::CONNECTIONS);
            }
            let (client, remote) = mount(&machine, &way).await;
            client.close().await.unwrap();
            remote.close();
            remotes.iter().for_each(|remote| remote.close());
            way.links.borrow().iter().for_each(|link| link.cut());
            machine.env.sleep(Duration::from_secs(1)).await;
            assert_eq!(server.connections(), 0);
        }
        machine.stop().await;
    });
}

/// Regression: writes wait in the service, for example for a full host. Their client, whose requests are not
/// accepted any more, reconnects again and again. Each time it sent all requests again, and all of them
/// waited.
#[test]
fn writes_that_wait_are_taken_once_however_often_their_client_connects() {
    on_machine(95, async |_, machine| {
        let (way, endless, server, remote) = with_endless(&machine).await;
        for block in 0..20 {
            let chunk = ChunkRef { ino: Ino(5), chunk: 0, block, count: 1, truncations: 0 };
            let payload = Buf::zeroed(BLOCK_BYTES);
            let mut frame =
                Frame::request(Kind::Write, encode_write(&chunk, &crc32c_blocks(&payload)), vec![payload]);
            frame.header.session = ENDLESS;
            let remote = remote.clone();
            machine.env.spawn("call", Box::pin(async move { drop(remote.call(frame).await) }));
        }
        for _ in 0..10 {
            machine.env.sleep(Duration::from_secs(5)).await;
            assert_eq!(endless.0.get(), 20);
            way.last().close();
        }
        machine.env.sleep(Duration::from_secs(5)).await;
        assert_eq!((endless.0.get(), server.connections()), (20, 1));
        remote.close();
        machine.stop().await;
    });
}

/// Regression: after a restart a client reports its state in parts, and repeats each part until it is
/// answered. The service restarted once more in between. The last part told the new start that nothing was
/// missing, and locks of the client were granted to others.
#[test]
fn a_start_believes_nothing_that_was_said_to_another() {
    on_machine(97, async |site, machine| {
        let way = Way::new(&machine);
        let [holder, other] = [session(&machine).await, session(&machine).await];
        let file = make(&machine.client, "file").await.unwrap();
        machine.client.sync_all().await.unwrap();
        let ask = async |machine: &Machine, session: u64, kind: Kind, body: Vec<u8>| {
            let reply = serve(machine, request_of(session, 0, kind, body)).await;
            let start = reply.header.generation;
            (start, reply.into_result().unwrap().0)
        };
        let exclusive = LockChange::Exclusive.into();
        let lock = LockRequest {
            ino: file.ino.0,
            owner: 1,
            last: u64::MAX,
            change: exclusive,
            ..LockRequest::default()
        };
        let try_lock = async |machine: &Machine, session: u64| {
            let (start, reply) = ask(machine, session, Kind::Lock, lock.encode_to_vec()).await;
            (start, LockReply::decode(&reply[..]).unwrap())
        };
        let (mut start, reply) = try_lock(&machine, holder).await;
        assert_eq!(reply, LockReply::default(), "it is granted");
        let mut machine = machine;
        for _ in 0..2 {
            let before = start;
            machine = restart(site, machine, &way, Duration::ZERO).await;
            let old = PingRequest { reclaimed: true, start: before, ..PingRequest::default() };
            for session in [holder, other] {
                ask(&machine, session, Kind::Ping, old.encode_to_vec()).await;
            }
            let (now, reply) = try_lock(&machine, other).await;
            assert!(now != before && reply.early, "it waits for the locks that the holder has: {reply:?}");
            start = now;
        }
        let locks = vec![lock.clone()];
        let all = PingRequest { locks, reclaimed: true, start, ..PingRequest::default() };
        ask(&machine, holder, Kind::Ping, all.encode_to_vec()).await;
        let none = PingRequest { reclaimed: true, start, ..PingRequest::default() };
        ask(&machine, other, Kind::Ping, none.encode_to_vec()).await;
        let (_, reply) = try_lock(&machine, other).await;
        assert!(!reply.early && reply.conflict.is_some(), "{reply:?}");
        for session in [holder, other] {
            ask(&machine, session, Kind::End, Vec::new()).await;
        }
        machine.stop().await;
    });
}

/// Counting opens costs the same for every number, and a mode without a valid file type makes no inode.
/// Regression: an entry with a type that no kernel accepts could not be removed.
#[test]
fn numbers_without_sense_are_refused_or_cost_nothing() {
    on_machine(96, async |_, machine| {
        let session = session(&machine).await;
        let ask = async |kind: Kind, sequence: u64, body: Vec<u8>| {
            serve(&machine, request_of(session, sequence, kind, body)).await.into_result()
        };
        let root = machine.client.root().ino.0;
        let ping = request_of(session, 0, Kind::Ping, Vec::new());
        let start = machine.node.serve(ping, true).await.header.generation;
        for count in [u32::MAX, 1, u32::MAX] {
            let opens = vec![OpenCount { ino: root, count, branch: 0, user: 0 }];
            let ping = PingRequest { opens, start, ..PingRequest::default() };
            ask(Kind::Ping, 0, ping.encode_to_vec()).await.unwrap();
        }
        for (at, mode) in (0..).zip([0, 0o644, 0o170_000, 0o160_644, 0o300_644, u32::MAX]) {
            let (dir, name) = (root, format!("odd-{at}").into());
            let request = MakeRequest { dir, name, mode, ..MakeRequest::default() };
            ask(Kind::Make, SLOTS + at, request.encode_to_vec()).await.unwrap_err();
        }
        let (dir, name, mode) = (root, "fifo".into(), 0o010_600);
        let fifo = MakeRequest { dir, name, mode, ..MakeRequest::default() };
        ask(Kind::Make, SLOTS + 10, fifo.encode_to_vec()).await.unwrap();
        // This is no valid attribute name either, and a check would not decode its row.
        let odd =
            XattrRequest { ino: root, name: b"user.\0".to_vec(), value: vec![1], ..XattrRequest::default() };
        ask(Kind::SetXattr, SLOTS + 11, odd.encode_to_vec()).await.unwrap_err();
        // The longest file is 2^62 bytes, in chunks of 1 MiB.
        for (chunk, is_in_a_file) in [((1 << 42) - 1, true), (1 << 42, false), (1 << 50, false)] {
            let at = ChunkRef { ino: Ino(root), chunk, block: 0, count: 1, truncations: 0 };
            assert_eq!(ask(Kind::Read, 0, encode_read(&at)).await.is_ok(), is_in_a_file, "chunk {chunk}");
        }
        let hello = HelloRequest { client: "x".repeat(300), ..HelloRequest::of_mount(Id128([5; 16])) };
        ask(Kind::Hello, 0, hello.encode_to_vec()).await.unwrap_err();
        ask(Kind::End, 0, Vec::new()).await.unwrap();
        machine.audit().await;
        machine.stop().await;
    });
}
