//! Decoders of message bodies of the name space. The first byte of an input selects the message.

use crate::check::{Decoder, Form, Verdict, agrees, unsealed};
use penstock_base::Id128;
use penstock_wire::metadata::Time;
use penstock_wire::metadata::*;
use prost::Message;
use std::fmt::Debug;

/// `names-body`: protobuf does not fix the order of fields and allows unknown ones, so only values are
/// compared.
pub(super) const NAMES: Decoder =
    Decoder { name: "names-body", most_bytes: 1024, seeds, seal: unsealed, check };

fn message<M: Message + Default + PartialEq + Debug>(body: &[u8]) -> Result<Verdict, String> {
    agrees(body, &Form::Value, |body| M::decode(body), M::encode_to_vec)
}

type Check = fn(&[u8]) -> Result<Verdict, String>;

const MESSAGES: [Check; 29] = [
    message::<HelloRequest>,
    message::<HelloReply>,
    message::<NameRequest>,
    message::<InodeRequest>,
    message::<AttrReply>,
    message::<SetAttrRequest>,
    message::<MakeRequest>,
    message::<LinkRequest>,
    message::<RenameRequest>,
    message::<ReadDirRequest>,
    message::<DirEntry>,
    message::<ReadDirReply>,
    message::<XattrRequest>,
    message::<BytesReply>,
    message::<NamesReply>,
    message::<StatFsReply>,
    message::<EmptyReply>,
    message::<Attr>,
    message::<PingRequest>,
    message::<WatchRequest>,
    message::<WatchReply>,
    message::<LeaseRequest>,
    message::<LeaseReply>,
    message::<LockReply>,
    message::<LockRequest>,
    message::<GetAttrRequest>,
    message::<OpenRequest>,
    message::<UserRequest>,
    message::<GrantReply>,
];

fn check(bytes: &[u8]) -> Result<Verdict, String> {
    match bytes.split_first() {
        Some((which, body)) => MESSAGES[usize::from(*which) % MESSAGES.len()](body),
        None => Ok(Verdict::Refused),
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let attr = Attr { ino: 7, mode: 0o100_644, size: 1 << 40, atime: Time::from_ns(-1), ..Attr::default() };
    let (name, value) = (b"name".to_vec(), vec![0xff; 20]);
    let entry = DirEntry {
        name: name.clone(),
        ino: 7,
        kind: 0o100_000,
        cookie: u64::MAX,
        attr: Some(attr.clone()),
        branch: 1,
    };
    let lock =
        LockRequest { ino: 7, owner: u64::MAX, last: u64::MAX, change: 2, pid: 5, ..Default::default() };
    let targets = vec![TargetPlace { target: 3, addresses: vec!["10.0.0.1:7000".into()] }];
    let released = vec![ReleasedLease { ino: 7, grant: 3, branch: 1, attributes: true }];
    let calls = vec![LeaseCall { number: 4, ino: 7, is_sync: true, grant: 3, branch: 2, attributes: true }];
    let bodies = [
        HelloRequest { client: "host".into(), mount: "/m".into(), ..HelloRequest::of_mount(Id128([7; 16])) }
            .encode_to_vec(),
        HelloReply {
            session: 2,
            root: 1 << 40,
            branch: 0,
            chunk_blocks: 256,
            lease_ms: 30_000,
            targets,
            fileset: 0,
        }
        .encode_to_vec(),
        NameRequest { dir: 1, name: name.clone(), directory: true, lease: true }.encode_to_vec(),
        InodeRequest { ino: u64::MAX }.encode_to_vec(),
        AttrReply { attr: Some(attr.clone()), may_be_unsynced: true, ..AttrReply::default() }.encode_to_vec(),
        SetAttrRequest { ino: 7, mode: Some(0), size: Some(0), grow: true, ..Default::default() }
            .encode_to_vec(),
        MakeRequest { dir: 1, name: name.clone(), target: value.clone(), open: true, ..Default::default() }
            .encode_to_vec(),
        LinkRequest { ino: 7, dir: 1, name: name.clone() }.encode_to_vec(),
        RenameRequest { dir: 1, new_dir: 2, new_name: name.clone(), exchange: true, ..Default::default() }
            .encode_to_vec(),
        ReadDirRequest { dir: 1, after: 2, limit: u32::MAX, attributes: true, lease: true }.encode_to_vec(),
        entry.encode_to_vec(),
        ReadDirReply { entries: vec![entry.clone(), entry], end: true, parent: 1, parent_branch: 2 }
            .encode_to_vec(),
        XattrRequest { ino: 7, name: name.clone(), value: value.clone(), create: true, ..Default::default() }
            .encode_to_vec(),
        BytesReply { bytes: value }.encode_to_vec(),
        NamesReply { names: vec![name, Vec::new()] }.encode_to_vec(),
        StatFsReply { total_blocks: 5, free_blocks: 4, available_blocks: 3, inodes: 2, free_inodes: 1 }
            .encode_to_vec(),
        EmptyReply {}.encode_to_vec(),
        attr.encode_to_vec(),
        PingRequest {
            opens: vec![OpenCount { ino: 7, count: 2, branch: 3, user: 0 }],
            reclaimed: true,
            locks: vec![lock.clone()],
            start: 9,
        }
        .encode_to_vec(),
        WatchRequest {
            seen: 4,
            answered: vec![3],
            released,
            wait: true,
            generation: 9,
            ..Default::default()
        }
        .encode_to_vec(),
        WatchReply {
            alone: true,
            calls,
            unlocked: vec![Unlocked { ino: 7, branch: 4, number: 5 }],
            granted: vec![Granted { grant: 6, ino: 7, branch: 8, exclusive: true }],
            synced: vec![Synced { number: 7, ticket: 9, errno: 28 }],
            again: 8,
        }
        .encode_to_vec(),
        LeaseRequest { ino: 7, exclusive: true, first: 0, last: u64::MAX }.encode_to_vec(),
        LeaseReply { grant: 3, wait: true }.encode_to_vec(),
        LockReply { conflict: Some(lock.clone()), early: true }.encode_to_vec(),
        lock.encode_to_vec(),
        GetAttrRequest { ino: 7, ticket: u64::MAX, lease: true }.encode_to_vec(),
        OpenRequest { ino: 7, access: ACCESS_READ }.encode_to_vec(),
        UserRequest { uid: 7, gid: u32::MAX, groups: vec![1, 1 << 20] }.encode_to_vec(),
        GrantReply { grant: u64::MAX, proof: vec![9; 16] }.encode_to_vec(),
    ];
    (0u8..).zip(bodies).map(|(which, body)| [vec![which], body].concat()).collect()
}
