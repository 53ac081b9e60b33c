//! Golden bytes of every message. These bytes stay readable for ever; a new field at the end of a message
//! gets golden bytes beside them.

use crate::data::{
    ChunkRef, Replier, decode_commit, decode_read, decode_reply, decode_write, encode_commit, encode_read,
    encode_reply, encode_write,
};
use crate::metadata::*;
use crate::{Failure, Frame, Header, Kind, Object, Version};
use penstock_base::{Id128, Ino, TargetId};
use prost::Message;
use std::fmt::Debug;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn headers_are_as_in_the_first_release() {
    let request = Header {
        session: 0x0102_0304_0506_0708,
        sequence: 4,
        tenant: 5,
        object: Object::Fileset(6),
        branch: 9,
        user: 10,
        epoch: 7,
        deadline_ms: 8,
        body_bytes: 3,
        payload_bytes: 4096,
        ..Header::request(Kind::Rename)
    };
    let asked = Header { session: 3, ..Header::request(Kind::Write) };
    let failure = Failure { kind: penstock_base::ErrorKind::NoSpace, errno: 28, message: "full".into() };
    let reply = Frame::reply(&asked, Err(failure.clone()));
    let golden = [
        (
            Header::request(Kind::Hello),
            &b""[..],
            "504e534b030001000000000000000000000000000000000000000000000000000000000000000000\
             01000000000000000000000000000000000000000000000000000000000000000000000000000000\
             000000000000000000000000000000000000000073125781",
        ),
        (
            request,
            b"abc",
            "504e534b030026000000000003000000001000000807060504030201040000000000000005000000\
             01000000060000000000000307000000000000000800000000000000000000000000000000000000\
             0000000009000000000000000a000000000000000cdd67c3",
        ),
        (
            reply.header,
            b"full",
            "504e534b030011000100000004000000000000000300000000000000000000000000000000000000\
             01000000000000000000000200000000000000000000000004001c00000000000000000000000000\
             0000000000000000000000000000000000000000579ab97a",
        ),
    ];
    for (header, body, wanted) in golden {
        let bytes = header.encode(Version::NEWEST, body);
        assert_eq!(hex(&bytes), wanted);
        assert_eq!(Header::decode(Version::NEWEST, &bytes, body), Ok(header));
    }
    assert_eq!(reply.into_result().unwrap_err(), failure);
    let numbered = Header { reply: true, request: 9, generation: 10, ..Header::request(Kind::Ping) };
    let bytes = numbered.encode(Version::NEWEST, b"");
    let wanted = "0900000000000000 0a00000000000000 0000000000000000 00000000 00000000".replace(' ', "");
    assert_eq!(hex(&bytes[68..100]), wanted);
    assert_eq!(Header::decode(Version::NEWEST, &bytes, b""), Ok(numbered));
}

#[test]
fn bodies_of_the_data_path_are_as_in_the_first_release() {
    let chunk = ChunkRef { ino: Ino((1 << 40) | 2), chunk: 3, block: 4, count: 2, truncations: 7 };
    let file = format!("0200000000010000{}", "00".repeat(32));
    let range = "0300000000000000 04000000 02000000 0700000000000000".replace(' ', "");
    let head = format!("{file}{range}");
    assert_eq!(hex(&encode_read(&chunk)), head);
    assert_eq!(decode_read(&encode_read(&chunk)), Ok(chunk));
    let write = encode_write(&chunk, &[0x0102_0304, 9]);
    assert_eq!(hex(&write), head + "0100000000000000" + "020000000403020109000000");
    assert_eq!(decode_write(&write), Ok((chunk, vec![0x0102_0304, 9])));
    let commit = encode_commit(chunk.ino, true);
    assert_eq!(hex(&commit), format!("{file}0100000000000000"));
    assert_eq!(decode_commit(&commit), Ok((chunk.ino, true)));
    let replier = Replier { target: TargetId(0), generation: 5 };
    let reply = encode_reply(replier, &[1, 2]);
    let of_target = "01000000 00000000 0500000000000000 0100000000000000".replace(' ', "");
    assert_eq!(hex(&reply), format!("{of_target}020000000100000002000000"));
    assert_eq!(decode_reply(&reply), Ok((replier, vec![1, 2])));
}

#[track_caller]
fn golden<M: Message + Default + PartialEq + Debug>(message: &M, wanted: &str) {
    let bytes = message.encode_to_vec();
    assert_eq!(hex(&bytes), wanted);
    assert_eq!(M::decode(&bytes[..]).as_ref(), Ok(message));
}

const ATTR: &str = "080710a48302180220e80728643009388080808080204208080110ff93ebdc034a021001520210025a09088080808080401003600668800270ac02";

fn attr() -> Attr {
    Attr {
        ino: 7,
        mode: 0o100_644,
        nlink: 2,
        uid: 1000,
        gid: 100,
        rdev: 9,
        size: 1 << 40,
        atime: Time { sec: -1, nsec: 999_999_999 },
        mtime: Time { sec: 0, nsec: 1 },
        ctime: Time { sec: 0, nsec: 2 },
        btime: Time { sec: 1 << 40, nsec: 3 },
        truncations: 6,
        chunk_blocks: 256,
        blocks: 300,
        branch: 0,
        layout: None,
        lease: 0,
    }
}

#[test]
fn requests_of_the_name_space_are_as_in_the_first_release() {
    let name = b"name".to_vec();
    golden(
        &HelloRequest {
            client: "host".into(),
            mount: "/m".into(),
            fileset: "f".into(),
            ..HelloRequest::of_mount(Id128([0xab; 16]))
        },
        &format!("0a10{}1204686f73741a022f6d20012a0166", "ab".repeat(16)),
    );
    let opens = vec![OpenCount { ino: 7, count: 2, branch: 0, user: 0 }];
    golden(&PingRequest { opens, reclaimed: true, locks: Vec::new(), start: 9 }, "0a040807100210012009");
    let lock = LockRequest {
        ino: 7,
        owner: 8,
        first: 1,
        last: 9,
        change: LockChange::Exclusive.into(),
        pid: 5,
        flock: true,
        test: true,
        wait: true,
        uid: 1000,
        branch: 0,
        user: 0,
    };
    golden(&lock, "08071008180120092802300538014001480150e807");
    golden(
        &LockReply { conflict: Some(lock), early: true },
        "0a1508071008180120092802300538014001480150e8071001",
    );
    golden(
        &LeaseRequest { ino: 7, exclusive: true, first: 0, last: u64::MAX },
        "0807100120ffffffffffffffffff01",
    );
    golden(&LeaseReply { grant: 3, wait: false }, "0803");
    golden(&LeaseReply { grant: 0, wait: true }, "1001");
    let call = LeaseCall { number: 4, ino: 7, is_sync: true, grant: 3, branch: 0, attributes: false };
    golden(&LeaseCall { attributes: true, ..call.clone() }, "08041007180120033001");
    golden(
        &WatchReply {
            alone: true,
            calls: vec![call],
            unlocked: vec![Unlocked { ino: 7, branch: 9, number: 5 }],
            granted: vec![Granted { grant: 6, ino: 7, branch: 9, exclusive: true }],
            synced: vec![Synced { number: 8, ticket: 9, errno: 28 }],
            again: 10,
        },
        "0801120808041007180120031a0608071009180522080806100718092001 2a060808100918 1c 300a"
            .replace(' ', "")
            .as_str(),
    );
    let watch = WatchRequest {
        seen: 4,
        answered: vec![3],
        released: vec![ReleasedLease { ino: 7, grant: 3, branch: 0, attributes: false }],
        wait: true,
        alone: true,
        leaves: true,
        generation: 9,
        failed: vec![FailedSync { number: 3, errno: 28 }],
        resigned: vec![FileRef { ino: 7, branch: 0 }],
    };
    golden(&watch, "08041201031a0408071003200128013001380942040803101c4a020807");
    golden(&ReleasedLease { ino: 7, grant: 3, branch: 0, attributes: true }, "080710032001");
    golden(
        &NameRequest { dir: 1, name: name.clone(), directory: true, lease: false },
        "080112046e616d651801",
    );
    golden(&NameRequest { lease: true, ..NameRequest::default() }, "2001");
    golden(&ReadDirRequest { lease: true, ..ReadDirRequest::default() }, "2801");
    golden(&InodeRequest { ino: u64::MAX }, "08ffffffffffffffffff01");
    golden(&GetAttrRequest { ino: 7, ticket: 9, lease: false }, "08071009");
    golden(&GetAttrRequest { lease: true, ..GetAttrRequest::default() }, "1801");
    let set = SetAttrRequest {
        ino: 7,
        mode: Some(0),
        uid: Some(1),
        gid: Some(2),
        size: Some(0),
        atime: Some(Time::from_ns(-1)),
        mtime: Some(Time::from_ns(3)),
        ctime: Some(Time::from_ns(4)),
        grow: true,
        truncations: 6,
        drop_set_id: true,
        known_truncations: Some(7),
        ..SetAttrRequest::default()
    };
    golden(&set, "080710001801200228003208080110ff93ebdc033a021003420210044801500658016007");
    let make = MakeRequest {
        dir: 1,
        name: name.clone(),
        mode: 0o100_644,
        uid: 1000,
        gid: 100,
        rdev: 9,
        target: b"to".to_vec(),
        open: true,
        ..MakeRequest::default()
    };
    golden(&make, "080112046e616d6518a4830220e807286430093a02746f4001");
    golden(&LinkRequest { ino: 7, dir: 1, name: name.clone() }, "080710011a046e616d65");
    let rename = RenameRequest {
        dir: 1,
        name,
        new_dir: 2,
        new_name: b"new".to_vec(),
        no_replace: true,
        exchange: true,
        ..RenameRequest::default()
    };
    golden(&rename, "080112046e616d65180222036e657728013001");
    golden(&RenameRequest { start: 300, ..RenameRequest::default() }, "50ac02");
    golden(
        &ReadDirRequest { dir: 1, after: 300, limit: 64, attributes: true, lease: false },
        "080110ac0218402001",
    );
    let xattr = XattrRequest {
        ino: 7,
        name: b"user.a".to_vec(),
        value: vec![0xff],
        create: true,
        replace: true,
        ..XattrRequest::default()
    };
    golden(&xattr, "08071206757365722e611a01ff20012801");
}

#[test]
fn what_came_to_requests_later_keeps_its_numbers() {
    golden(&MakeRequest { nameless: true, ..MakeRequest::default() }, "4801");
    golden(&RenameRequest { whiteout: true, uid: 1, gid: 2, ..RenameRequest::default() }, "380140014802");
    let found = Some(FoundNames { moved: 7, replaced: 0 });
    golden(&RenameRequest { found, ..RenameRequest::default() }, "5a020807");
    golden(&SetAttrRequest { touch: true, ..SetAttrRequest::default() }, "6801");
    let grant = Some(GrantReply { grant: 3, proof: vec![9, 8] });
    let granted = "09 0300000000000000 1202 0908".replace(' ', "");
    golden(&grant.clone().unwrap(), &granted);
    golden(&SetAttrRequest { grant: grant.clone(), ..SetAttrRequest::default() }, &format!("720d{granted}"));
    golden(&AttrReply { grant, ..AttrReply::default() }, &format!("220d{granted}"));
    golden(&OpenRequest { ino: 7, access: ACCESS_READ | ACCESS_WRITE }, "08071003");
    golden(&UserRequest { uid: 1000, gid: 100, groups: vec![1, 300] }, "08e80710641a0301ac02");
    golden(&UserReply { user: 5 }, "0805");
    golden(&MakeRequest { umask: 0o22, ..MakeRequest::default() }, "5012");
    golden(&XattrRequest { kill_set_group_id: true, ..XattrRequest::default() }, "3001");
    golden(&HelloRequest { lane: 9, ..HelloRequest::default() }, "3009");
    golden(&HelloReply { fileset: 9, ..HelloReply::default() }, "3809");
    golden(&DirEntry { branch: 9, ..DirEntry::default() }, "3009");
    golden(&ReadDirReply { parent_branch: 9, ..ReadDirReply::default() }, "2009");
    let layout = FileLayout { pool: 1, map_version: 2, first: 3, count: 4, turn: 5, replicas: 6 };
    golden(&layout, "080110021803200428053006");
    golden(&OpenCount { branch: 9, ..OpenCount::default() }, "1809");
    golden(&LeaseCall { branch: 9, ..LeaseCall::default() }, "2809");
    golden(&ReleasedLease { branch: 9, ..ReleasedLease::default() }, "1809");
    golden(&LockRequest { branch: 9, ..LockRequest::default() }, "5809");
    golden(&LockRequest { user: 9, ..LockRequest::default() }, "6009");
    golden(&OpenCount { user: 9, ..OpenCount::default() }, "2009");
    let change = Change { number: 300, time: Time::from_ns(3), ..Change::default() };
    golden(&Change { touched: 300, removed: 7, truncations: 4, ..change }, "08ac021202100318ac0220072804");
    let changed = "08ac02 12021003".replace(' ', "");
    golden(&change, &changed);
    golden(&AttrReply { change: Some(change), ..AttrReply::default() }, &format!("2a07{changed}"));
    golden(&RenameReply { change: Some(change), ..RenameReply::default() }, &format!("1207{changed}"));
    let kind = Kind::Make as u32;
    let repeat = RepeatRequest { kind, body: vec![9, 8], change, made: 7, start: 9 };
    golden(&repeat, &format!("0823 12020908 1a07{changed} 2007 2809").replace(' ', ""));
    golden(&PingReply { unreported: 2, refused_locks: 3 }, "08021003");
}

#[test]
fn replies_of_the_name_space_are_as_in_the_first_release() {
    golden(&attr(), ATTR);
    golden(&AttrReply { attr: Some(attr()), ..AttrReply::default() }, &format!("0a3b{ATTR}"));
    golden(
        &AttrReply { attr: Some(attr()), may_be_unsynced: true, ..AttrReply::default() },
        &format!("0a3b{ATTR}1001"),
    );
    let address = "10.0.0.1:31".to_owned();
    let targets = vec![TargetPlace { target: 5, addresses: vec![address] }, TargetPlace::default()];
    golden(
        &HelloReply {
            session: 2,
            root: (1 << 40) | 1,
            branch: 9,
            chunk_blocks: 256,
            lease_ms: 300,
            targets,
            fileset: 0,
        },
        "0802108180808080201809208002 28ac02 320f0805120b31302e302e302e313a3331 3200"
            .replace(' ', "")
            .as_str(),
    );
    let entry = DirEntry {
        name: b"name".to_vec(),
        ino: 7,
        kind: 0o100_000,
        cookie: u64::MAX,
        attr: Some(attr()),
        branch: 0,
    };
    let entry_bytes = format!("0a046e616d6510071880800220ffffffffffffffffff012a3b{ATTR}");
    golden(&entry, &entry_bytes);
    let listing =
        ReadDirReply { entries: vec![entry, DirEntry::default()], end: true, parent: 1, parent_branch: 0 };
    golden(&listing, &format!("0a54{entry_bytes}0a0010011801"));
    golden(&BytesReply { bytes: vec![0xff, 0] }, "0a02ff00");
    golden(&NamesReply { names: vec![b"a".to_vec(), Vec::new()] }, "0a01610a00");
    golden(
        &StatFsReply { total_blocks: 5, free_blocks: 4, available_blocks: 3, inodes: 2, free_inodes: 1 },
        "08051004180320022801",
    );
    golden(&RenameReply { replaced: Some(attr()), change: None }, &format!("0a3b{ATTR}"));
    golden(&EmptyReply {}, "");
}

/// Regression: a truncation multiplied a chunk index from the wire by the blocks of a chunk, which
/// overflowed.
#[test]
fn a_chunk_beyond_the_largest_file_is_refused() {
    let chunk = ChunkRef { ino: Ino(2), chunk: 1 << 50, block: 0, count: 1, truncations: 0 };
    assert_eq!(decode_read(&encode_read(&chunk)), Ok(chunk));
    let beyond = ChunkRef { chunk: u64::MAX, ..chunk };
    assert!(decode_read(&encode_read(&beyond)).unwrap_err().to_string().contains("largest file"));
}

/// A later service may name other branches and targets: that is refused, not taken for something here.
#[test]
fn replies_about_what_this_release_does_not_know_are_refused() {
    let elsewhere = || Some(Attr { branch: 9, ..attr() });
    let spread = Some(Attr { layout: Some(FileLayout { pool: 1, ..FileLayout::default() }), ..attr() });
    let entry = || DirEntry { attr: Some(attr()), ..DirEntry::default() };
    let call = || LeaseCall { branch: 9, ..LeaseCall::default() };
    let hello = || HelloReply { targets: vec![TargetPlace::default()], ..HelloReply::default() };
    let unknown = [
        AttrReply { attr: elsewhere(), ..AttrReply::default() }.unknown(),
        AttrReply { attr: spread, ..AttrReply::default() }.unknown(),
        RenameReply { replaced: elsewhere(), change: None }.unknown(),
        ReadDirReply { parent_branch: 9, ..ReadDirReply::default() }.unknown(),
        ReadDirReply { entries: vec![DirEntry { branch: 9, ..entry() }], ..ReadDirReply::default() }
            .unknown(),
        ReadDirReply { entries: vec![DirEntry { attr: elsewhere(), ..entry() }], ..ReadDirReply::default() }
            .unknown(),
        WatchReply { calls: vec![call()], ..WatchReply::default() }.unknown(),
        WatchReply { unlocked: vec![Unlocked { ino: 7, branch: 9, number: 1 }], ..WatchReply::default() }
            .unknown(),
        WatchReply { granted: vec![Granted { branch: 9, ..Granted::default() }], ..WatchReply::default() }
            .unknown(),
        LockReply { conflict: Some(LockRequest { branch: 9, ..LockRequest::default() }), early: false }
            .unknown(),
        HelloReply { branch: 9, ..hello() }.unknown(),
        HelloReply { fileset: 9, ..hello() }.unknown(),
        HelloReply::default().unknown(),
    ];
    assert!(unknown.iter().all(Option::is_some), "{unknown:?}");
    let known = [
        AttrReply { attr: Some(attr()), may_be_unsynced: true, ..AttrReply::default() }.unknown(),
        RenameReply::default().unknown(),
        ReadDirReply { entries: vec![entry()], ..ReadDirReply::default() }.unknown(),
        WatchReply { calls: vec![LeaseCall::default()], ..WatchReply::default() }.unknown(),
        LockReply { conflict: Some(LockRequest::default()), early: false }.unknown(),
        hello().unknown(),
        EmptyReply {}.unknown(),
    ];
    assert_eq!(known, [None; 7]);
}
