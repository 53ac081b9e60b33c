//! A gateway: a session that asks for several users, whose permissions the service checks.

use crate::machine::Machine;
use crate::remote::{Way, carried, make, on_machine, request_of, restart};
use penstock_base::{BLOCK_BYTES, Buf, ErrorKind, FileId, Id128, Ino, Share, crc32c_blocks};
use penstock_wire::data::{
    ChunkRef, PROOF_BYTES, Right, SpaceChange, SpaceRef, encode_commit, encode_read, encode_space,
    encode_write,
};
use penstock_wire::metadata::{
    ACCESS_READ, ACCESS_WRITE, AttrReply, EmptyReply, GrantReply, HelloRequest, InodeRequest, LeaseRequest,
    LinkRequest, LockChange, LockReply, LockRequest, MakeRequest, NameRequest, OpenRequest, PingRequest,
    ROLE_GATEWAY, SetAttrRequest, Time, UserReply, UserRequest, XattrRequest,
};
use penstock_wire::{Failure, Frame, Kind, SLOTS, session_of_hello};
use prost::Message;
use std::cell::Cell;
use std::time::Duration;

const EACCES: u16 = 13;
const EBADF: u16 = 9;
const ESTALE: u16 = 116;
const BLOCK: usize = BLOCK_BYTES;

/// A gateway's session.
struct Gateway {
    session: u64,
    sequence: Cell<u64>,
}

impl Gateway {
    async fn begin(machine: &Machine) -> Self {
        let hello = HelloRequest { role: ROLE_GATEWAY, ..HelloRequest::of_mount(Id128([9; 16])) };
        let hello = Frame::request(Kind::Hello, hello.encode_to_vec(), Vec::new());
        let reply = machine.node.serve(hello, true).await;
        Self { session: session_of_hello(&reply).unwrap(), sequence: Cell::new(SLOTS) }
    }

    /// Reports after a restart that it had nothing open.
    async fn report(&self, machine: &Machine) {
        let ping = request_of(self.session, 0, Kind::Ping, PingRequest::default().encode_to_vec());
        let start = machine.node.serve(ping, true).await.header.generation;
        let ping = PingRequest { reclaimed: true, start, ..PingRequest::default() };
        self.send(machine, 0, Kind::Ping, ping.encode_to_vec(), Vec::new()).await.unwrap();
    }

    async fn name(&self, machine: &Machine, uid: u32) -> u32 {
        let user = UserRequest { uid, gid: 100, groups: vec![] };
        let reply = self.send(machine, 0, Kind::User, user.encode_to_vec(), Vec::new()).await.unwrap();
        UserReply::decode(&reply.0[..]).unwrap().user
    }

    async fn send(
        &self,
        machine: &Machine,
        user: u32,
        kind: Kind,
        body: Vec<u8>,
        payload: Vec<Buf>,
    ) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        loop {
            let is_change = matches!(
                kind,
                Kind::Make | Kind::Open | Kind::SetAttr | Kind::Close | Kind::Lock | Kind::Link
            );
            self.sequence.set(self.sequence.get() + 1);
            let sequence = if is_change { self.sequence.get() } else { 0 };
            let mut frame = request_of(self.session, sequence, kind, body.clone());
            frame.header.user = user;
            let frame = Frame {
                header: penstock_wire::Header {
                    payload_bytes: payload.iter().map(|part| part.len() as u32).sum(),
                    ..frame.header
                },
                payload: payload.clone(),
                ..frame
            };
            match machine.node.serve(carried(frame), true).await.into_result() {
                Err(failure) if failure.is_ask_again() => {
                    machine.env.sleep(Duration::from_millis(10)).await;
                }
                done => return done,
            }
        }
    }

    async fn ask<T: Message + Default>(
        &self,
        machine: &Machine,
        user: u32,
        kind: Kind,
        body: &impl Message,
    ) -> Result<T, Failure> {
        let (body, _) = self.send(machine, user, kind, body.encode_to_vec(), Vec::new()).await?;
        Ok(T::decode(&body[..]).unwrap())
    }

    async fn lookup(&self, machine: &Machine, user: u32, name: &str) -> Result<FileId, Failure> {
        let dir = machine.client.root().ino.0;
        let request = NameRequest { dir, name: name.into(), directory: false, lease: false };
        let reply: AttrReply = self.ask(machine, user, Kind::Lookup, &request).await?;
        Ok(reply.attr.unwrap().file())
    }

    async fn open(&self, machine: &Machine, user: u32, ino: Ino, access: u32) -> Result<Right, Failure> {
        let request = OpenRequest { ino: ino.0, access };
        Ok(right_of(self.ask::<AttrReply>(machine, user, Kind::Open, &request).await?.grant.unwrap()))
    }

    /// Sends a data request with a right.
    async fn data(
        &self,
        machine: &Machine,
        user: u32,
        kind: Kind,
        mut body: Vec<u8>,
        right: Right,
    ) -> Result<Vec<Buf>, Failure> {
        right.put(&mut body);
        let payload = if kind == Kind::Write { vec![block(7)] } else { Vec::new() };
        Ok(self.send(machine, user, kind, body, payload).await?.1)
    }
}

/// Sets the mode of an inode through the mount.
async fn set_mode(machine: &Machine, ino: u64, mode: u32) {
    let set = SetAttrRequest { ino, mode: Some(mode), ..SetAttrRequest::default() };
    machine.client.set_attr(penstock_base::Branch::MAIN, set).await.unwrap();
}

fn right_of(grant: GrantReply) -> Right {
    Right { grant: grant.grant, proof: grant.proof[..].try_into().unwrap() }
}

fn block(byte: u8) -> Buf {
    Buf::copy_from(&[byte; BLOCK])
}

fn first_block(ino: Ino, truncations: u64) -> ChunkRef {
    ChunkRef { ino, chunk: 0, block: 0, count: 1, truncations }
}

fn write_of(ino: Ino, truncations: u64) -> Vec<u8> {
    encode_write(&first_block(ino, truncations), &crc32c_blocks(&block(7)))
}

#[test]
fn a_user_reads_and_writes_with_the_grant_of_an_open_file_only() {
    on_machine(99, async |site, machine| {
        let way = Way::new(&machine);
        let gateway = Gateway::begin(&machine).await;
        let [own, other] = [gateway.name(&machine, 1000).await, gateway.name(&machine, 1001).await];
        let root = machine.client.root().ino.0;
        set_mode(&machine, root, 0o777).await;
        let make = MakeRequest {
            dir: root,
            name: "mine".into(),
            mode: 0o100_600,
            uid: 0,
            open: true,
            ..MakeRequest::default()
        };
        let made: AttrReply = gateway.ask(&machine, own, Kind::Make, &make).await.unwrap();
        let (attr, right) = (made.attr.unwrap(), right_of(made.grant.unwrap()));
        assert_eq!((attr.uid, attr.gid), (1000, 100), "whatever owner it names");
        let ino = Ino(attr.ino);
        gateway.data(&machine, own, Kind::Write, write_of(ino, 0), right).await.unwrap();
        let grow = SetAttrRequest {
            ino: ino.0,
            size: Some(BLOCK as u64),
            grow: true,
            grant: Some(GrantReply { grant: right.grant, proof: right.proof.to_vec() }),
            ..SetAttrRequest::default()
        };
        gateway.ask::<AttrReply>(&machine, own, Kind::SetAttr, &grow).await.unwrap();
        let read = || encode_read(&first_block(ino, 0));
        let found = gateway.data(&machine, own, Kind::Read, read(), right).await.unwrap();
        assert_eq!(found[0].to_vec(), [7; BLOCK]);
        gateway.data(&machine, own, Kind::Commit, encode_commit(ino, false), right).await.unwrap();

        // Another user has found the name, and nothing else.
        assert_eq!(gateway.lookup(&machine, other, "mine").await.unwrap().ino, ino);
        let refused = gateway.open(&machine, other, ino, ACCESS_READ).await.unwrap_err();
        assert_eq!(refused.errno, EACCES, "{refused}");
        let forged = Right { grant: 3, proof: [0; PROOF_BYTES] };
        let read_only = gateway.open(&machine, own, ino, ACCESS_READ).await.unwrap();
        let more = Right { grant: 3, ..read_only };
        let change = SpaceChange::Punch;
        let punch =
            || encode_space(&SpaceRef { ino, change, from: 0, until: 1, truncations: 0, share: Share::ALL });
        // Columns: user, kind, body, and the right that it uses.
        for (user, kind, body, right) in [
            (other, Kind::Read, read(), right),
            (other, Kind::Write, write_of(ino, 0), right),
            (other, Kind::Read, read(), Right::default()),
            (own, Kind::Read, read(), Right::default()),
            (own, Kind::Read, read(), forged),
            (own, Kind::Write, write_of(ino, 0), read_only),
            (own, Kind::Space, punch(), read_only),
            (own, Kind::Write, write_of(ino, 0), more),
            (own, Kind::Read, encode_read(&first_block(Ino(ino.0 + 1), 0)), right),
        ] {
            let refused = gateway.data(&machine, user, kind, body, right).await.unwrap_err();
            assert_eq!(refused.errno, EACCES, "{user} {kind:?}: {refused}");
        }

        // The service is started again: users are named anew, and what they had opened they have.
        gateway.send(&machine, 0, Kind::Sync, Vec::new(), Vec::new()).await.unwrap();
        let machine = restart(site, machine, &way, Duration::ZERO).await;
        // Regression: it was answered before all had sent again what it covers.
        let sync = request_of(gateway.session, 0, Kind::Sync, Vec::new());
        assert!(machine.node.serve(sync, true).await.into_result().unwrap_err().is_ask_again());
        gateway.report(&machine).await;
        let unknown = gateway.data(&machine, own, Kind::Read, read(), right).await.unwrap_err();
        assert_eq!(unknown.kind, ErrorKind::RefreshMap, "{unknown}");
        gateway.name(&machine, 1001).await;
        assert_eq!(gateway.name(&machine, 1000).await, own, "in whatever order they are named");
        let found = gateway.data(&machine, own, Kind::Read, read(), right).await.unwrap();
        assert_eq!(found[0].to_vec(), [7; BLOCK]);
        gateway.send(&machine, 0, Kind::End, Vec::new(), Vec::new()).await.unwrap();
        let ended = gateway.data(&machine, own, Kind::Read, read(), right).await.unwrap_err();
        assert_eq!(ended.kind, ErrorKind::Ended);
        machine.stop().await;
    });
}

#[test]
fn a_user_reaches_inodes_by_names_and_takes_nothing_from_others() {
    on_machine(100, async |_, machine| {
        let hidden = make(&machine.client, "hidden").await.unwrap();
        let branch = penstock_base::Branch::MAIN;
        set_mode(&machine, hidden.ino.0, 0o666).await;
        let root = machine.client.root().ino.0;
        let closed =
            SetAttrRequest { ino: root, mode: Some(0o700), uid: Some(5), ..SetAttrRequest::default() };
        machine.client.set_attr(branch, closed).await.unwrap();
        machine.client.sync_all().await.unwrap();
        let gateway = Gateway::begin(&machine).await;
        let user = gateway.name(&machine, 1000).await;
        assert_eq!(gateway.lookup(&machine, user, "hidden").await.unwrap_err().errno, EACCES);
        // It guesses the number of the inode.
        let ino = hidden.ino.0;
        let open = OpenRequest { ino, access: ACCESS_READ };
        let guess = gateway.ask::<AttrReply>(&machine, user, Kind::Open, &open).await.unwrap_err();
        assert_eq!(guess.errno, ESTALE, "{guess}");
        let body = InodeRequest { ino };
        for (kind, errno) in [
            (Kind::GetAttr, ESTALE),
            (Kind::ListXattr, ESTALE),
            (Kind::ReadLink, ESTALE),
            (Kind::Lease, EBADF),
        ] {
            let guess = gateway.ask::<AttrReply>(&machine, user, kind, &body).await.unwrap_err();
            assert_eq!(guess.errno, errno, "{kind:?}: {guess}");
        }
        // Once the directory is open to it, the file is too. It takes no lease of a file before it opens it.
        set_mode(&machine, root, 0o711).await;
        gateway.lookup(&machine, user, "hidden").await.unwrap();
        let lease = LeaseRequest { ino, exclusive: true, first: 0, last: u64::MAX };
        let refused = gateway.send(&machine, user, Kind::Lease, lease.encode_to_vec(), Vec::new()).await;
        assert_eq!(refused.unwrap_err().errno, EBADF);
        gateway.open(&machine, user, hidden.ino, ACCESS_WRITE).await.unwrap();
        assert!(gateway.send(&machine, user, Kind::Lease, lease.encode_to_vec(), Vec::new()).await.is_ok());
        // A gateway asks for a user, and a mount for none.
        for user in [0, 9] {
            assert!(gateway.lookup(&machine, user, "hidden").await.is_err(), "user {user}");
        }
        gateway.send(&machine, 0, Kind::End, Vec::new(), Vec::new()).await.unwrap();
        machine.stop().await;
    });
}

/// Regression: whatever one user had open, all users of the session could name, close, lock and unlock.
#[test]
fn nobody_uses_closes_or_unlocks_what_another_user_has_open() {
    on_machine(102, async |_, machine| {
        let gateway = Gateway::begin(&machine).await;
        let [one, other] = [gateway.name(&machine, 1000).await, gateway.name(&machine, 1001).await];
        let root = machine.client.root().ino.0;
        set_mode(&machine, root, 0o777).await;
        machine.client.sync_all().await.unwrap();
        let make = async |dir, name: &str, mode| {
            let make = MakeRequest { dir, name: name.into(), mode, ..MakeRequest::default() };
            gateway.ask::<AttrReply>(&machine, one, Kind::Make, &make).await.unwrap().attr.unwrap().ino
        };
        let private = make(root, "private", 0o040_700).await;
        let below = make(private, "below", 0o040_755).await;
        make(below, "secret", 0o100_666).await;
        let open = OpenRequest { ino: below, access: ACCESS_READ };
        gateway.ask::<AttrReply>(&machine, one, Kind::Open, &open).await.unwrap();
        let look = NameRequest { dir: below, name: "secret".into(), directory: false, lease: false };
        let guess = gateway.ask::<AttrReply>(&machine, other, Kind::Lookup, &look).await.unwrap_err();
        assert_eq!(guess.errno, ESTALE, "{guess}");

        let nameless =
            MakeRequest { dir: root, mode: 0o100_600, open: true, nameless: true, ..MakeRequest::default() };
        let made: AttrReply = gateway.ask(&machine, one, Kind::Make, &nameless).await.unwrap();
        let (ino, right) = (made.attr.unwrap().ino, right_of(made.grant.unwrap()));
        gateway.data(&machine, one, Kind::Write, write_of(Ino(ino), 0), right).await.unwrap();
        let lock = |change: LockChange| LockRequest {
            ino,
            owner: 1,
            last: u64::MAX,
            change: change.into(),
            ..LockRequest::default()
        };
        let ask = async |user, change| {
            let reply = gateway.ask::<LockReply>(&machine, user, Kind::Lock, &lock(change)).await;
            reply.map(|reply| reply.conflict.is_some()).map_err(|failure| failure.errno)
        };
        assert_eq!(ask(one, LockChange::Exclusive).await, Ok(false));
        for change in [LockChange::Unlock, LockChange::Exclusive, LockChange::Shared] {
            assert_eq!(ask(other, change).await, Err(EBADF), "{change:?}");
        }
        let close = InodeRequest { ino };
        let closed = gateway.ask::<EmptyReply>(&machine, other, Kind::Close, &close).await;
        assert_eq!(closed.unwrap_err().errno, EBADF);
        machine.env.sleep(Duration::from_secs(10)).await;
        let read = encode_read(&first_block(Ino(ino), 0));
        let found = gateway.data(&machine, one, Kind::Read, read.clone(), right).await.unwrap();
        assert_eq!(found[0].to_vec(), [7; BLOCK]);
        // Its own close drops it, and a read says so.
        gateway.ask::<EmptyReply>(&machine, one, Kind::Close, &close).await.unwrap();
        machine.env.sleep(Duration::from_secs(10)).await;
        let gone = gateway.data(&machine, one, Kind::Read, read, right).await.unwrap_err();
        assert_eq!(gone.errno, ESTALE, "{gone}");
        gateway.send(&machine, 0, Kind::End, Vec::new(), Vec::new()).await.unwrap();
        machine.stop().await;
    });
}

/// Regression: a user gave a name to a file of another one whose names were removed.
#[test]
fn a_removed_file_gets_no_name_from_a_user() {
    on_machine(103, async |_, machine| {
        let file = make(&machine.client, "file").await.unwrap();
        let root = machine.client.root();
        for (ino, mode) in [(file.ino.0, 0o666), (root.ino.0, 0o777)] {
            set_mode(&machine, ino, mode).await;
        }
        let gateway = Gateway::begin(&machine).await;
        let user = gateway.name(&machine, 1000).await;
        gateway.lookup(&machine, user, "file").await.unwrap();
        gateway.open(&machine, user, file.ino, ACCESS_READ | ACCESS_WRITE).await.unwrap();
        machine.client.unlink(root, b"file", false).await.unwrap();
        let link = LinkRequest { ino: file.ino.0, dir: root.ino.0, name: b"kept".to_vec() };
        let refused = gateway.ask::<AttrReply>(&machine, user, Kind::Link, &link).await.unwrap_err();
        assert_eq!(refused.errno, 2, "{refused}");
        gateway.send(&machine, 0, Kind::End, Vec::new(), Vec::new()).await.unwrap();
        machine.client.release(file).await.unwrap();
        machine.stop().await;
    });
}

/// Regression: a change of nothing set the change time of any inode, for which no right was asked, and took
/// the leases on its attributes from everybody.
#[test]
fn who_may_change_nothing_changes_no_time() {
    on_machine(103, async |_, machine| {
        set_mode(&machine, machine.client.root().ino.0, 0o755).await;
        let gateway = Gateway::begin(&machine).await;
        let user = gateway.name(&machine, 1000).await;
        let ino = machine.client.root().ino.0;
        let ctime = async || machine.client.get_attr(machine.client.root()).await.unwrap().ctime;
        let before = ctime().await;
        machine.env.sleep(Duration::from_secs(1)).await;
        let ctime_only = Some(Time::from_ns(1));
        for set in [
            SetAttrRequest { ino, ..SetAttrRequest::default() },
            SetAttrRequest { ino, ctime: ctime_only, ..SetAttrRequest::default() },
            SetAttrRequest { ino, known_truncations: Some(0), ..SetAttrRequest::default() },
        ] {
            let attr = gateway.ask::<AttrReply>(&machine, user, Kind::SetAttr, &set).await.unwrap().attr;
            assert_eq!(attr.unwrap().ctime, before);
        }
        assert_eq!(ctime().await, before);
        gateway.send(&machine, 0, Kind::End, Vec::new(), Vec::new()).await.unwrap();
        machine.stop().await;
    });
}

#[test]
fn set_id_bits_go_before_a_user_changes_a_file() {
    on_machine(101, async |_, machine| {
        let file = make(&machine.client, "program").await.unwrap();
        let branch = penstock_base::Branch::MAIN;
        set_mode(&machine, file.ino.0, 0o6777).await;
        machine.client.sync_all().await.unwrap();
        let gateway = Gateway::begin(&machine).await;
        let user = gateway.name(&machine, 1000).await;
        gateway.lookup(&machine, user, "program").await.unwrap();
        let right = gateway.open(&machine, user, file.ino, ACCESS_READ | ACCESS_WRITE).await.unwrap();
        let write = async || gateway.data(&machine, user, Kind::Write, write_of(file.ino, 0), right).await;
        assert_eq!(write().await.unwrap_err().kind, ErrorKind::RefreshMap);
        let drop_them = SetAttrRequest { ino: file.ino.0, drop_set_id: true, ..SetAttrRequest::default() };
        let attr = gateway.ask::<AttrReply>(&machine, user, Kind::SetAttr, &drop_them).await.unwrap().attr;
        assert_eq!(attr.unwrap().mode & 0o7777, 0o777);
        write().await.unwrap();
        // Capabilities are the same in another form.
        let name = b"security.capability".to_vec();
        let capability =
            XattrRequest { ino: file.ino.0, name, value: vec![1; 20], ..XattrRequest::default() };
        machine.client.set_xattr(branch, capability).await.unwrap();
        assert_eq!(write().await.unwrap_err().kind, ErrorKind::RefreshMap);
        gateway.ask::<AttrReply>(&machine, user, Kind::SetAttr, &drop_them).await.unwrap();
        write().await.unwrap();
        assert!(machine.client.list_xattr(file).await.unwrap().is_empty());
        // A writer says that it has written, and not when.
        let grow = SetAttrRequest {
            ino: file.ino.0,
            size: Some(BLOCK as u64),
            grow: true,
            mtime: Some(Time::from_ns(1)),
            grant: Some(GrantReply { grant: right.grant, proof: right.proof.to_vec() }),
            ..SetAttrRequest::default()
        };
        let attr = gateway.ask::<AttrReply>(&machine, user, Kind::SetAttr, &grow).await.unwrap().attr;
        assert!(attr.unwrap().mtime > Time::from_ns(1));
        gateway.send(&machine, 0, Kind::End, Vec::new(), Vec::new()).await.unwrap();
        machine.stop().await;
    });
}
