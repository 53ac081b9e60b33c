//! Stores that were made once and are kept here: every later release opens them, reads all of them, finds no
//! fault, and changes them.
//!
//! `golden/NAME.gz` has the blocks of the drives that are not zeros and the claims of the arrays.
//! `golden/NAME.txt` says what is in the store, a line for each name. A store is never made again once a
//! release has been published: a format that changes gets a further store.
//!
//! `cargo test -p penstock-world -- --ignored make_the_golden_stores` makes them.

use crate::machine::{Machine, Site};
use crate::model::read_all;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use penstock_array::ownership::Ownership;
use penstock_base::env::random_id;
use penstock_base::num::to_u32;
use penstock_base::{ArrayId, BLOCK_BYTES, Branch, Dec, Enc, ErrorKind, FileId, crc32c};
use penstock_client::SetAttrRequest;
use penstock_kv::{KvError, for_each};
use penstock_node::Claims;
use penstock_sim::{SimDisk, World};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{
    AttrReply, HelloReply, HelloRequest, LockChange, LockReply, LockRequest, MakeRequest, ReadDirRequest,
    Time, XattrRequest,
};
use penstock_wire::{Frame, Kind, SLOTS};
use prost::Message;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::time::Duration;

/// The stores: name, and true if the power was cut while a drive was away.
const STORES: [(&str, bool); 2] = [("at-rest", false), ("cut", true)];

/// First bytes of the keys of all rows.
const KINDS: [u8; 12] = [0x00, 0x01, 0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x20, 0x21, 0x22, 0x23];

fn file(name: &str, ending: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/world/golden/{name}.{ending}"))
}

/// The drives and claims of a site as bytes.
async fn pack(site: &Site, arrays: &[ArrayId]) -> Vec<u8> {
    let mut claims = Claims::default();
    for array in arrays {
        claims.0.insert(*array, site.ownership.current(*array).await.unwrap());
    }
    let mut enc = Enc::new();
    enc.bytes(&claims.encode().unwrap());
    let disks = site.disks.borrow();
    enc.u32(to_u32(disks.len()));
    for (path, disk) in disks.iter() {
        let blocks = disk.used_blocks();
        enc.bytes(path.as_bytes()).u64(site.disk_bytes()).u32(to_u32(blocks.len()));
        for block in blocks {
            enc.u64(block).raw(&disk.peek(block));
        }
    }
    enc.finish()
}

/// A site with what [`pack`] gave.
async fn unpack(bytes: &[u8]) -> Site {
    let site = Site::without_store(4, 2, 80 << 20);
    let mut dec = Dec::new("golden store", bytes);
    for (array, claim) in Claims::decode(dec.bytes().unwrap()).unwrap().0 {
        let none = site.ownership.current(array).await.unwrap();
        site.ownership.swap(array, none, claim).await.unwrap();
    }
    for _ in 0..dec.u32().unwrap() {
        let path = dec.text().unwrap();
        let disk = SimDisk::new(dec.u64().unwrap());
        for _ in 0..dec.u32().unwrap() {
            let block = dec.u64().unwrap();
            disk.corrupt(block, dec.raw(BLOCK_BYTES).unwrap());
        }
        site.disks.borrow_mut().insert(path, disk);
    }
    dec.end().unwrap();
    site
}

/// The kinds of rows that a store has, and how many of each.
async fn rows(machine: &Machine) -> BTreeMap<u8, u64> {
    let mut counts = BTreeMap::new();
    let range = (vec![], vec![0xff; 16]);
    for_each(&*machine.node.kv(), range, |key, _| {
        *counts.entry(key[0]).or_default() += 1;
        Ok::<_, KvError>(())
    })
    .await
    .unwrap();
    counts
}

/// Everything that a store shows, a line for each name.
async fn contents(machine: &Machine) -> String {
    let client = &machine.client;
    let mut text = String::new();
    let mut todo = vec![(String::new(), client.root())];
    while let Some((path, id)) = todo.pop() {
        let attr = client.get_attr(id).await.unwrap();
        let Time { sec, nsec } = attr.mtime;
        let shown = if path.is_empty() { "/" } else { &path };
        write!(text, "{shown} {:o} links {} owner {}:{}", attr.mode, attr.nlink, attr.uid, attr.gid).unwrap();
        write!(text, " size {} blocks {} changed {sec}.{nsec:09}", attr.size, attr.blocks).unwrap();
        if attr.rdev != 0 {
            write!(text, " device {}", attr.rdev).unwrap();
        }
        match attr.mode & 0o170_000 {
            0o040_000 => {
                let request = ReadDirRequest { dir: id.ino.0, limit: 1000, ..ReadDirRequest::default() };
                let mut listed = client.read_dir(Branch::MAIN, request).await.unwrap().entries;
                listed.sort_by(|one, other| other.name.cmp(&one.name));
                for entry in listed {
                    let (id, name) = (entry.file(), String::from_utf8(entry.name).unwrap());
                    todo.push((format!("{path}/{name}"), id));
                }
            }
            0o100_000 => write!(text, " sum {:08x}", crc32c(&read_all(machine, id).await)).unwrap(),
            0o120_000 => {
                let target = String::from_utf8(client.read_link(id).await.unwrap()).unwrap();
                write!(text, " to {target}").unwrap();
            }
            _ => {}
        }
        let mut names = client.list_xattr(id).await.unwrap();
        names.sort();
        for name in names {
            let sum = crc32c(&client.get_xattr(id, &name).await.unwrap());
            write!(text, " {}={sum:08x}", String::from_utf8(name).unwrap()).unwrap();
        }
        text.push('\n');
    }
    text
}

/// Bytes that no two files share.
fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 97) as u8 ^ seed).collect()
}

async fn make(machine: &Machine, dir: FileId, name: &str, mode: u32) -> FileId {
    let (uid, gid) = (1000, 100);
    let rdev = if mode & 0o120_000 == 0o020_000 { 259 } else { 0 };
    let target = if mode & 0o170_000 == 0o120_000 { b"dir/small".to_vec() } else { Vec::new() };
    let name = name.into();
    let request =
        MakeRequest { dir: dir.ino.0, name, mode, uid, gid, rdev, target, ..MakeRequest::default() };
    machine.client.make(Branch::MAIN, request).await.unwrap().file()
}

/// A request of a session of another process. It is sent again until the client of the machine has given back
/// what it calls for.
async fn ask<R: Message + Default>(machine: &Machine, of: (u64, u64), kind: Kind, body: Vec<u8>) -> R {
    for _ in 0..100 {
        let mut frame = Frame::request(kind, body.clone(), Vec::new());
        (frame.header.session, frame.header.sequence) = of;
        match machine.node.serve(frame, true).await.into_result() {
            Ok((reply, ..)) => return R::decode(&reply[..]).unwrap(),
            Err(refused) if refused.kind == ErrorKind::Retry => {
                machine.env.sleep(Duration::from_millis(100)).await;
            }
            Err(error) => panic!("{error:?}"),
        }
    }
    panic!("the client of the machine keeps what is called for");
}

/// Makes something of every kind.
async fn fill(machine: &Machine) {
    let client = &machine.client;
    let root = client.root();
    let dir = make(machine, root, "dir", 0o040_750).await;
    let small = make(machine, dir, "small", 0o100_644).await;
    client.write(small, 0, &bytes(1, 100)).await.unwrap();
    client.link(small, root, b"second-name").await.unwrap();
    let large = make(machine, dir, "large", 0o100_600).await;
    client.write(large, 0, &bytes(2, (2 << 20) + 12_345)).await.unwrap();
    let sparse = make(machine, dir, "sparse", 0o100_644).await;
    client.write(sparse, 5 << 20, &bytes(3, 9000)).await.unwrap();
    let reserved = make(machine, dir, "reserved", 0o100_644).await;
    client.write(reserved, 0, &bytes(4, 20_000)).await.unwrap();
    client.change_space(reserved, 8192, 300_000, SpaceChange::Reserve, true).await.unwrap();
    client.change_space(reserved, 4096, 4096, SpaceChange::Punch, true).await.unwrap();
    client.change_space(reserved, 12_288, 4096, SpaceChange::Zero, true).await.unwrap();
    let cut = make(machine, dir, "cut", 0o100_644).await;
    client.write(cut, 0, &bytes(5, 70_000)).await.unwrap();
    client.fsync(cut).await.unwrap();
    let shorter = SetAttrRequest { ino: cut.ino.0, size: Some(5000), ..SetAttrRequest::default() };
    client.set_attr(Branch::MAIN, shorter).await.unwrap();
    let given = SetAttrRequest {
        ino: cut.ino.0,
        uid: Some(7),
        mtime: Some(Time { sec: 1 << 33, nsec: 5 }),
        ..SetAttrRequest::default()
    };
    client.set_attr(Branch::MAIN, given).await.unwrap();
    for (name, mode) in [
        ("fifo", 0o010_644),
        ("terminal", 0o020_620),
        ("disk", 0o060_660),
        ("link", 0o120_777),
        ("socket", 0o140_755),
        ("emptied", 0o100_444),
    ] {
        make(machine, root, name, mode).await;
    }
    let acl = [(1u16, 6u16, u32::MAX), (2, 6, 1000), (4, 4, u32::MAX), (16, 6, u32::MAX), (32, 0, u32::MAX)];
    let mut list = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in acl {
        list.extend(tag.to_le_bytes().into_iter().chain(rights.to_le_bytes()).chain(id.to_le_bytes()));
    }
    for (id, name, value) in [
        (small, "user.short", b"value".to_vec()),
        (small, "user.long", bytes(6, 5000)),
        (dir, "system.posix_acl_default", list.clone()),
        (large, "system.posix_acl_access", list),
    ] {
        let request = XattrRequest { ino: id.ino.0, name: name.into(), value, ..XattrRequest::default() };
        client.set_xattr(Branch::MAIN, request).await.unwrap();
    }
    // A session of another process, with a file without a name, a result and a lock.
    let hello = HelloRequest {
        client: "far".into(),
        mount: "/mnt".into(),
        ..HelloRequest::of_mount(random_id(&machine.env))
    };
    let far: HelloReply = ask(machine, (0, 0), Kind::Hello, hello.encode_to_vec()).await;
    let nameless = MakeRequest {
        dir: root.ino.0,
        mode: 0o100_600,
        nameless: true,
        open: true,
        ..MakeRequest::default()
    };
    let made: AttrReply = ask(machine, (far.session, SLOTS + 3), Kind::Make, nameless.encode_to_vec()).await;
    let change = LockChange::Exclusive.into();
    let lock = LockRequest { ino: made.attr.unwrap().ino, last: 9, change, ..LockRequest::default() };
    let locked: LockReply = ask(machine, (far.session, 0), Kind::Lock, lock.encode_to_vec()).await;
    assert_eq!(locked.conflict, None);
    client.sync_all().await.unwrap();
}

/// Makes a store and returns its bytes. With `is_cut` the power was cut while a drive was away.
fn made(is_cut: bool) -> Vec<u8> {
    let site = Site::with_data(4, 2, 80 << 20);
    let world = World::new(20_260);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        fill(&machine).await;
        machine.stop().await;
        machine.node.arrays().iter().map(|array| array.id()).collect::<Vec<_>>()
    });
    let arrays = run.unwrap();
    world.destroy();
    if is_cut {
        let world = World::new(20_261);
        let run = world.run(async {
            let machine = site.start(&world, &[4]).await.unwrap();
            for number in 0..6u8 {
                let id = make(&machine, machine.client.root(), &format!("late-{number}"), 0o100_644).await;
                machine.client.write(id, 3000, &bytes(number, 40_000)).await.unwrap();
                if number % 2 == 0 {
                    machine.client.fsync(id).await.unwrap();
                }
            }
        });
        run.unwrap();
        site.cut(&world);
    }
    let world = World::new(20_262);
    let packed = world.run(pack(&site, &arrays)).unwrap();
    world.destroy();
    packed
}

/// Opens a store, and returns what it shows after everything in it was read and checked.
fn opened(packed: &[u8]) -> String {
    let world = World::new(20_263);
    let run = world.run(async {
        let site = unpack(packed).await;
        let machine = site.start(&world, &[]).await.unwrap();
        let counts = rows(&machine).await;
        let shown = format!("rows {counts:x?}\n{}", contents(&machine).await);
        for array in machine.node.arrays() {
            assert_eq!(array.wait_rebuilt().await, 0, "{:?}", array.report());
        }
        machine.audit().await;
        // It can be changed, and what was there is there still.
        let root = machine.client.root();
        let id = make(&machine, root, "new", 0o100_644).await;
        machine.client.write(id, 0, &bytes(9, 100_000)).await.unwrap();
        machine.client.sync_all().await.unwrap();
        assert_eq!(read_all(&machine, id).await, bytes(9, 100_000));
        machine.client.unlink(root, b"new", false).await.unwrap();
        let again = contents(&machine).await;
        let rest = |text: &str, lines| text.lines().skip(lines).map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(rest(&again, 1), rest(&shown, 2), "all but the root is as before");
        machine.stop().await;
        shown
    });
    let shown = run.unwrap();
    world.destroy();
    shown
}

#[test]
fn golden_stores_open_and_show_what_was_put_into_them() {
    for (name, is_cut) in STORES {
        let mut packed = Vec::new();
        let image = std::fs::File::open(file(name, "gz")).unwrap();
        GzDecoder::new(image).read_to_end(&mut packed).unwrap();
        let wanted = std::fs::read_to_string(file(name, "txt")).unwrap();
        assert_eq!(opened(&packed), wanted, "{name}");
        // The session of another process is over where the power was cut.
        let counts = wanted.lines().next().unwrap();
        let has = |kind: &u8| counts.contains(&format!("{kind:x}: "));
        assert!(is_cut || KINDS.iter().all(has), "{name} has every kind of row: {counts}");
    }
}

/// Every kind of row that this release makes is in the golden stores.
#[test]
#[ignore = "makes the files that are kept: only for a new format"]
fn make_the_golden_stores() {
    for (name, is_cut) in STORES {
        let packed = made(is_cut);
        std::fs::create_dir_all(file(name, "gz").parent().unwrap()).unwrap();
        let image = std::fs::File::create(file(name, "gz")).unwrap();
        let mut encoder = GzEncoder::new(image, Compression::best());
        encoder.write_all(&packed).unwrap();
        encoder.finish().unwrap();
        std::fs::write(file(name, "txt"), opened(&packed)).unwrap();
    }
}
