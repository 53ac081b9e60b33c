//! Permissions of users without a kernel, compared with those that the kernel gives on a mount: the same
//! operations by the same users on two equal trees of one file system, through the mount and through a
//! gateway that speaks the protocol by hand.

use crate::store::{Store, can_mount, is_root};
use penstock_base::Id128;
use penstock_fabric::greeting::{Greeting, NONCE_BYTES, WELCOME_HEAD_BYTES, Welcome};
use penstock_fabric::local;
use penstock_sim::seeds;
use penstock_wire::metadata::{
    ACCESS_READ, AttrReply, GetAttrRequest, HelloRequest, InodeRequest, LinkRequest, MakeRequest,
    NameRequest, OpenRequest, ROLE_GATEWAY, ReadDirRequest, RenameRequest, SetAttrRequest, Time, UserReply,
    UserRequest, XattrRequest,
};
use penstock_wire::{Frame, HEADER_BYTES, Header, Kind, SLOTS, Version, session_of_hello};
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const EACCES: u16 = 13;

/// User id, group id, and further groups.
type User = (u32, u32, Vec<u32>);

/// A client without a kernel, which asks for any user.
struct Gateway {
    stream: UnixStream,
    session: u64,
    requests: u64,
    sequence: u64,
    users: BTreeMap<User, u32>,
    root: u64,
}

impl Gateway {
    fn connect(dir: &Path) -> Self {
        let mut stream = local::connect(dir, local::DATA).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(&Greeting::new([7; NONCE_BYTES]).encode()).unwrap();
        let mut head = [0; WELCOME_HEAD_BYTES];
        stream.read_exact(&mut head).unwrap();
        assert!(matches!(Welcome::decode(&head), Ok(Welcome::Accepted(_))));
        let (requests, sequence, users) = Default::default();
        let mut gateway = Self { stream, session: 0, requests, sequence, users, root: 0 };
        let name = Id128([9; 16]);
        let hello = HelloRequest { role: ROLE_GATEWAY, ..HelloRequest::of_mount(name) };
        let reply = gateway.send(Frame::request(Kind::Hello, hello.encode_to_vec(), Vec::new()));
        gateway.session = session_of_hello(&reply).unwrap();
        let reply = penstock_wire::metadata::HelloReply::decode(&reply.body[..]).unwrap();
        gateway.root = reply.root;
        gateway
    }

    fn send(&mut self, mut request: Frame) -> Frame {
        self.requests += 1;
        request.header.request = self.requests;
        request.header.session = self.session;
        let header = request.header.encode(Version::NEWEST, &request.body);
        self.stream.write_all(&[header, request.body].concat()).unwrap();
        let mut head = [0; HEADER_BYTES];
        self.stream.read_exact(&mut head).unwrap();
        let (body, payload) = Header::lengths(&head).unwrap();
        assert_eq!(payload, 0);
        let mut body = vec![0; body];
        self.stream.read_exact(&mut body).unwrap();
        let header = Header::decode(Version::NEWEST, &head, &body).unwrap();
        assert_eq!(header.request, self.requests);
        Frame { header, body, payload: Vec::new() }
    }

    fn user(&mut self, user: &User) -> u32 {
        if let Some(number) = self.users.get(user) {
            return *number;
        }
        let request = UserRequest { uid: user.0, gid: user.1, groups: user.2.clone() };
        let reply = self.send(Frame::request(Kind::User, request.encode_to_vec(), Vec::new()));
        let number = UserReply::decode(&reply.into_result().unwrap().0[..]).unwrap().user;
        self.users.insert(user.clone(), number);
        number
    }

    /// Sends a request for a user. The error is the errno.
    fn ask(&mut self, user: u32, kind: Kind, body: &impl Message) -> Result<Vec<u8>, u16> {
        let is_change = !matches!(
            kind,
            Kind::Lookup | Kind::GetAttr | Kind::ReadDir | Kind::ReadLink | Kind::GetXattr | Kind::ListXattr
        );
        loop {
            let mut frame = Frame::request(kind, body.encode_to_vec(), Vec::new());
            frame.header.user = user;
            if is_change {
                self.sequence += 1;
                frame.header.sequence = SLOTS + self.sequence;
            }
            match self.send(frame).into_result() {
                Err(failure) if failure.is_ask_again() => std::thread::sleep(Duration::from_millis(2)),
                Err(failure) if failure.errno == 0 => panic!("{kind:?}: {failure}"),
                Err(failure) => return Err(failure.errno),
                Ok((body, _)) => return Ok(body),
            }
        }
    }

    fn attr(&mut self, user: u32, kind: Kind, body: &impl Message) -> Result<u64, u16> {
        let reply = self.ask(user, kind, body)?;
        Ok(AttrReply::decode(&reply[..]).unwrap().attr.unwrap().ino)
    }

    /// Walks to a path. Returns the inode.
    fn walk(&mut self, user: u32, path: &str) -> Result<u64, u16> {
        let mut at = self.root;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let request = NameRequest { dir: at, name: name.into(), directory: false, lease: false };
            at = self.attr(user, Kind::Lookup, &request)?;
        }
        Ok(at)
    }

    /// Walks to the directory of a path. Returns its inode, and the last name.
    fn parent(&mut self, user: u32, path: &str) -> Result<(u64, Vec<u8>), u16> {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        Ok((self.walk(user, dir)?, name.into()))
    }

    fn set(&mut self, user: u32, path: &str, change: SetAttrRequest) -> Result<(), u16> {
        let ino = self.walk(user, path)?;
        self.ask(user, Kind::SetAttr, &SetAttrRequest { ino, ..change }).map(drop)
    }

    fn make(&mut self, user: u32, path: &str, make: MakeRequest) -> Result<(), u16> {
        let (dir, name) = self.parent(user, path)?;
        let request = MakeRequest { dir, name, ..make };
        self.ask(user, Kind::Make, &request).map(drop)
    }

    fn run(&mut self, user: &User, operation: &str, arguments: &[Value]) -> Result<(), u16> {
        let user = self.user(user);
        let text = |at: usize| arguments[at].as_str().unwrap();
        let number = |at: usize| arguments[at].as_i64().unwrap();
        let unsigned = |at: usize| u32::try_from(number(at)).unwrap();
        let path = text(0);
        let id = |at: usize| u32::try_from(number(at)).ok();
        let xattr = |ino: u64, name: &str, value: Vec<u8>| XattrRequest {
            ino,
            name: name.into(),
            value,
            ..XattrRequest::default()
        };
        match operation {
            "stat" => {
                let ino = self.walk(user, path)?;
                self.ask(user, Kind::GetAttr, &GetAttrRequest { ino, ..GetAttrRequest::default() }).map(drop)
            }
            "open" => {
                let ino = self.walk(user, path)?;
                self.ask(user, Kind::Open, &OpenRequest { ino, access: unsigned(1) })?;
                self.ask(user, Kind::Close, &InodeRequest { ino }).map(drop)
            }
            "create" | "mkdir" | "mknod" => {
                let kind = match operation {
                    "create" => 0o100_000,
                    "mkdir" => 0o040_000,
                    _ => 0,
                };
                let rdev = if operation == "mknod" { unsigned(2) } else { 0 };
                let mode = kind | unsigned(1);
                self.make(user, path, MakeRequest { mode, rdev, ..MakeRequest::default() })
            }
            "symlink" => {
                let target = text(1).into();
                self.make(user, path, MakeRequest { mode: 0o120_777, target, ..MakeRequest::default() })
            }
            "link" => {
                let ino = self.walk(user, path)?;
                let (dir, name) = self.parent(user, text(1))?;
                self.ask(user, Kind::Link, &LinkRequest { ino, dir, name }).map(drop)
            }
            "unlink" | "rmdir" => {
                let (dir, name) = self.parent(user, path)?;
                let request = NameRequest { dir, name, directory: operation == "rmdir", lease: false };
                self.ask(user, Kind::Unlink, &request).map(drop)
            }
            "rename" => {
                let (dir, name) = self.parent(user, path)?;
                // A path may be walked only as far as its directories permit, the last one too.
                let request = NameRequest { dir, name: name.clone(), directory: false, lease: false };
                if self.ask(user, Kind::Lookup, &request) == Err(EACCES) {
                    return Err(EACCES);
                }
                let (new_dir, new_name) = self.parent(user, text(1))?;
                let request = RenameRequest {
                    dir,
                    name,
                    new_dir,
                    new_name,
                    no_replace: number(2) == 1,
                    exchange: number(2) == 2,
                    ..RenameRequest::default()
                };
                self.ask(user, Kind::Rename, &request).map(drop)
            }
            "chmod" => {
                self.set(user, path, SetAttrRequest { mode: Some(unsigned(1)), ..SetAttrRequest::default() })
            }
            "chown" => {
                let (uid, gid) = (id(1), id(2));
                self.set(user, path, SetAttrRequest { uid, gid, ..SetAttrRequest::default() })
            }
            "truncate" => {
                let size = Some(u64::from(unsigned(1)));
                self.set(user, path, SetAttrRequest { size, ..SetAttrRequest::default() })
            }
            "touch" => self.set(user, path, SetAttrRequest { touch: true, ..SetAttrRequest::default() }),
            "utime" => {
                let time = Some(Time { sec: 1, nsec: 0 });
                self.set(user, path, SetAttrRequest { atime: time, mtime: time, ..SetAttrRequest::default() })
            }
            "list" => {
                // Like open(2) with O_DIRECTORY.
                let ino = self.walk(user, path)?;
                let request = ReadDirRequest { dir: ino, after: 0, limit: 9, attributes: true, lease: false };
                self.ask(user, Kind::ReadDir, &request)?;
                self.ask(user, Kind::Open, &OpenRequest { ino, access: ACCESS_READ })?;
                self.ask(user, Kind::Close, &InodeRequest { ino }).map(drop)
            }
            "getxattr" => {
                let ino = self.walk(user, path)?;
                self.ask(user, Kind::GetXattr, &xattr(ino, text(1), Vec::new())).map(drop)
            }
            "setxattr" => {
                let ino = self.walk(user, path)?;
                self.ask(user, Kind::SetXattr, &xattr(ino, text(1), unhex(text(2)))).map(drop)
            }
            "removexattr" => {
                let ino = self.walk(user, path)?;
                self.ask(user, Kind::RemoveXattr, &xattr(ino, text(1), Vec::new())).map(drop)
            }
            other => panic!("{other}"),
        }
    }
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).unwrap()).collect()
}

/// A process that does the same through the mount.
struct Kernel {
    process: Child,
    into: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Kernel {
    fn start(folder: &Path) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/system/permissions.py");
        let mut command = Command::new("python3");
        command.arg(script).arg(folder).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let (into, from) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Self { process, into, from: BufReader::new(from) }
    }

    /// Returns the errno, 0 for success, and the value.
    fn run(&mut self, user: &User, operation: &str, arguments: &[Value]) -> (u16, Value) {
        writeln!(self.into, "{}", json!([[user.0, user.1, user.2], operation, arguments])).unwrap();
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        let answer: Value = serde_json::from_str(&line).unwrap_or_else(|_| panic!("{operation}: {line:?}"));
        (answer[0].as_u64().unwrap() as u16, answer[1].clone())
    }

    fn ok(&mut self, operation: &str, arguments: &[Value]) -> Value {
        let (errno, value) = self.run(&(0, 0, vec![]), operation, arguments);
        assert_eq!(errno, 0, "{operation} {arguments:?} by root");
        value
    }

    fn stop(mut self) {
        drop(self.into);
        assert!(self.process.wait().unwrap().success());
    }
}

/// Numbers from a seed.
struct Chance(u64);

impl Chance {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }

    fn of<T: Clone>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u64) as usize].clone()
    }

    /// Permission bits, some of them the usual ones.
    fn mode(&mut self) -> u32 {
        let usual = self.of(&[0o777, 0o755, 0o700, 0o770, 0o644, 0o600, 0o711, 0o731]);
        let bits = if self.below(3) == 0 { self.below(0o1000) as u32 } else { usual };
        bits | if self.below(4) == 0 { (self.below(8) as u32) << 9 } else { 0 }
    }

    fn id(&mut self) -> u32 {
        self.of(&[0, 1000, 1001, 1002])
    }

    fn gid(&mut self) -> u32 {
        self.of(&[0, 100, 101, 102])
    }

    fn user(&mut self) -> User {
        let groups = (0..self.below(3)).map(|_| self.gid()).collect();
        (if self.below(10) == 0 { 0 } else { self.id() }, self.gid(), groups)
    }

    /// An access control list in the kernel's form.
    fn acl(&mut self) -> String {
        let none = u32::MAX;
        let mut entries = vec![(1u16, self.below(8) as u16, none)];
        let (mut users, mut groups) = ([1000, 1001, 1002].to_vec(), [100, 101, 102].to_vec());
        users.truncate(self.below(3) as usize);
        groups.truncate(self.below(3) as usize);
        entries.extend(users.iter().map(|uid| (2, self.below(8) as u16, *uid)));
        entries.push((4, self.below(8) as u16, none));
        entries.extend(groups.iter().map(|gid| (8, self.below(8) as u16, *gid)));
        if users.len() + groups.len() > 0 {
            entries.push((16, self.below(8) as u16, none));
        }
        entries.push((32, self.below(8) as u16, none));
        let mut bytes = 2u32.to_le_bytes().to_vec();
        for (tag, perm, id) in entries {
            bytes.extend(tag.to_le_bytes());
            bytes.extend(perm.to_le_bytes());
            bytes.extend(id.to_le_bytes());
        }
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

const DIRS: [&str; 4] = ["a", "b", "a/c", "b/e"];
const FILES: [&str; 8] = ["f", "a/f", "a/g", "b/f", "b/g", "a/c/f", "b/e/f", "b/e/g"];
const LINKS: [&str; 2] = ["a/l", "b/l"];
const FREE: [&str; 5] = ["n", "a/n", "b/n", "a/c/n", "b/e/n"];
const ACCESS_ACL: &str = "system.posix_acl_access";
const DEFAULT_ACL: &str = "system.posix_acl_default";

/// Makes both trees anew, with random owners, modes and lists, and returns the top folders.
fn plant(kernel: &mut Kernel, chance: &mut Chance, round: u64) -> [String; 2] {
    let tops = [format!("k{round}"), format!("g{round}")];
    for top in &tops {
        kernel.ok("mkdir", &[json!(top), json!(0o777)]);
        for dir in DIRS {
            kernel.ok("mkdir", &[json!(format!("{top}/{dir}")), json!(0o777)]);
        }
        for file in FILES {
            kernel.ok("create", &[json!(format!("{top}/{file}")), json!(0o666)]);
        }
        for link in LINKS {
            kernel.ok("symlink", &[json!(format!("{top}/{link}")), json!("f")]);
        }
    }
    for path in FILES.iter().chain(&LINKS).chain(&DIRS) {
        let (uid, gid, mode, acl) = (chance.id(), chance.gid(), chance.mode(), chance.acl());
        let (has_acl, is_default, has_xattr) =
            (chance.below(3) == 0, chance.below(2) == 0, chance.below(2) == 0);
        let (is_link, is_dir) = (LINKS.contains(path), DIRS.contains(path));
        for top in &tops {
            let path = json!(format!("{top}/{path}"));
            kernel.ok("chown", &[path.clone(), json!(uid), json!(gid)]);
            if is_link {
                continue;
            }
            if has_acl {
                let name = if is_default && is_dir { DEFAULT_ACL } else { ACCESS_ACL };
                kernel.ok("setxattr", &[path.clone(), json!(name), json!(acl)]);
            }
            if has_xattr {
                for name in ["user.a", "trusted.a"] {
                    kernel.ok("setxattr", &[path.clone(), json!(name), json!("01")]);
                }
            }
            kernel.ok("chmod", &[path.clone(), json!(mode)]);
        }
    }
    tops
}

/// An operation with its arguments; `@` stands for the top folder.
fn operation(chance: &mut Chance) -> (&'static str, Vec<Value>) {
    let any = |chance: &mut Chance| {
        let all = [&DIRS[..], &FILES, &FILES, &LINKS, &FREE].concat();
        json!(format!("@/{}", chance.of(&all)))
    };
    let open = |chance: &mut Chance| json!(format!("@/{}", chance.of(&[&DIRS[..], &FILES, &FREE].concat())));
    let free = |chance: &mut Chance| match chance.below(4) {
        0 => any(chance),
        _ => json!(format!("@/{}", chance.of(&FREE))),
    };
    let name = |chance: &mut Chance| json!(chance.of(&["user.a", "user.b", "trusted.a", "security.a"]));
    match chance.below(22) {
        0 => ("stat", vec![any(chance)]),
        1 | 2 => ("open", vec![any(chance), json!(1 + chance.below(3))]),
        3 => ("create", vec![free(chance), json!(chance.mode())]),
        4 => ("mkdir", vec![free(chance), json!(chance.mode() & 0o1777)]),
        5 => {
            let (kind, device) = chance.of(&[(0o010_000, 0), (0o020_000, 0x103), (0o060_000, 0x103)]);
            ("mknod", vec![free(chance), json!(kind | chance.mode() & 0o777), json!(device)])
        }
        6 => ("symlink", vec![free(chance), json!("f")]),
        7 | 8 => ("link", vec![any(chance), free(chance)]),
        9 => ("unlink", vec![any(chance)]),
        10 => ("rmdir", vec![any(chance)]),
        11 | 12 => ("rename", vec![any(chance), free(chance), json!(0)]),
        13 => ("rename", vec![any(chance), any(chance), json!(chance.below(3))]),
        14 => ("chmod", vec![open(chance), json!(chance.mode())]),
        15 => {
            let id = |chance: &mut Chance, id: u32| if chance.below(2) == 0 { -1 } else { i64::from(id) };
            let (uid, gid) = (chance.id(), chance.gid());
            ("chown", vec![any(chance), json!(id(chance, uid)), json!(id(chance, gid))])
        }
        16 => ("truncate", vec![open(chance), json!(chance.below(3) * 5000)]),
        17 => (chance.of(&["touch", "utime"]), vec![any(chance)]),
        18 => ("list", vec![json!(format!("@/{}", chance.of(&DIRS)))]),
        19 => ("getxattr", vec![any(chance), name(chance)]),
        20 => match chance.below(3) {
            0 => ("removexattr", vec![any(chance), name(chance)]),
            _ => ("setxattr", vec![any(chance), name(chance), json!("0203")]),
        },
        _ => {
            let list = json!(chance.of(&[ACCESS_ACL, DEFAULT_ACL]));
            match chance.below(4) {
                0 => ("removexattr", vec![open(chance), list]),
                _ => ("setxattr", vec![open(chance), list, json!(chance.acl())]),
            }
        }
    }
}

fn under(top: &str, arguments: &[Value]) -> Vec<Value> {
    let place = |argument: &Value| match argument.as_str() {
        Some(text) => json!(text.replace('@', top)),
        None => argument.clone(),
    };
    arguments.iter().map(place).collect()
}

/// Compares `rounds` times forty operations. Returns the number of cases, and of those that were permitted.
fn compare(store: &Store, first: u64, rounds: u64) -> (u64, u64) {
    let mut gateway = Gateway::connect(&store.dir);
    let mut kernel = Kernel::start(&store.mount);
    let (mut cases, mut permitted) = (0, 0);
    for round in first..first + rounds {
        let mut chance = Chance(round.wrapping_mul(0x9e37_79b9) + 1);
        let tops = plant(&mut kernel, &mut chance, round);
        let mut history: Vec<String> = Vec::new();
        for _ in 0..40 {
            let (user, (operation, arguments)) = (chance.user(), operation(&mut chance));
            if leads_elsewhere(&mut kernel, operation, &under(&tops[0], &arguments)) {
                continue;
            }
            history.push(format!("{user:?} {operation} {arguments:?}"));
            let (expected, _) = kernel.run(&user, operation, &under(&tops[0], &arguments));
            let found = gateway.run(&user, operation, &under(&tops[1], &arguments)).err().unwrap_or(0);
            let story =
                || format!("round {round}, kernel {expected}, gateway {found}:\n{}", history.join("\n"));
            assert_eq!(found, expected, "{}", story());
            (cases, permitted) = (cases + 1, permitted + u64::from(expected == 0));
            let paths = arguments.iter().filter_map(Value::as_str).filter(|text| text.starts_with('@'));
            for path in paths {
                let [kernels, gateways] = [&tops[0], &tops[1]].map(|top| {
                    let path = [json!(path.replace('@', top))];
                    let stat = kernel.run(&(0, 0, vec![]), "stat", &path);
                    let lists = [ACCESS_ACL, DEFAULT_ACL]
                        .map(|list| kernel.run(&(0, 0, vec![]), "getxattr", &[path[0].clone(), json!(list)]));
                    (stat, lists)
                });
                assert_eq!(gateways, kernels, "{path} after {}", story());
            }
        }
    }
    kernel.stop();
    (cases, permitted)
}

/// True for an operation that the kernel carries out on another inode than the one that is named, or that is
/// about a device: symbolic links are followed by the kernel, and a client without one does it itself.
fn leads_elsewhere(kernel: &mut Kernel, operation: &str, arguments: &[Value]) -> bool {
    let mut kind = |path: &str| {
        let (_, stat) = kernel.run(&(0, 0, vec![]), "stat", &[json!(path)]);
        stat[0].as_u64().map_or(0, |mode| mode & 0o170_000)
    };
    const LINK: u64 = 0o120_000;
    let paths = arguments.iter().filter_map(Value::as_str).filter(|text| text.contains('/'));
    let ends = |path: &str| path.match_indices('/').map(|(at, _)| at).collect::<Vec<_>>();
    let mut paths = paths.flat_map(|path| ends(path).into_iter().map(|end| &path[..end]));
    if paths.any(|prefix| kind(prefix) == LINK) {
        return true;
    }
    let last = kind(arguments[0].as_str().unwrap());
    let is_special = ![0, 0o040_000, 0o100_000, LINK].contains(&last);
    let is_list = arguments.get(1).and_then(Value::as_str).is_some_and(|name| name.starts_with("system."));
    match operation {
        "open" => is_special,
        "truncate" => is_special || last == LINK,
        "chmod" => last == LINK,
        "setxattr" | "removexattr" => is_list && last == LINK,
        _ => false,
    }
}

fn compare_rounds(name: &str, first: u64, rounds: u64) {
    if !can_mount(name) {
        return;
    }
    if !is_root() {
        eprintln!("SKIPPED {name}: acting as other users needs root");
        return;
    }
    if std::fs::read_to_string("/proc/sys/fs/protected_hardlinks").is_ok_and(|on| on.trim() != "1") {
        // Then the kernel lets everybody link every file, which a gateway never does.
        eprintln!("SKIPPED {name}: fs.protected_hardlinks is not 1 here");
        return;
    }
    let store = Store::new(name, &["--drive-size", "256M"]);
    store.up();
    let (cases, permitted) = compare(&store, first, rounds);
    println!("{cases} cases agree with the kernel, {permitted} of them permitted");
    assert!(permitted * 10 > cases && permitted * 10 < cases * 9, "{permitted} of {cases}");
    store.down_in_peace();
}

#[test]
fn a_gateway_permits_what_the_kernel_permits() {
    compare_rounds("permissions", 0, 30);
}

#[test]
#[ignore = "20,000 cases: with --ignored"]
fn campaign_of_permissions() {
    let rounds = seeds(0..520);
    compare_rounds("permission-campaign", rounds.start, rounds.end - rounds.start);
}
