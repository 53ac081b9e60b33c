//! Decoders of the key-value volume, and of the rows and keys of the target and of the name space.

use super::{number, seal_crc};
use crate::check::{Decoder, SAME, Verdict, agrees, unsealed};
use penstock_base::{
    ArrayId, Birth, Branch, Dec, DecodeError, Features, FileId, Id128, Ino, PoolId, StackNo, TargetId,
};
use penstock_chunk::rows as chunk;
use penstock_chunk::rows::{Borrowed, Lent, LentKey, Loan};
use penstock_chunk::{ChunkKey, Extent, FileRow, MapRow, Owner};
use penstock_kv::WriteSet;
use penstock_kv::header::VolumeHeader;
use penstock_kv::journal::{Mark, Record};
use penstock_meta::rows as meta;
use penstock_meta::rows::reserved::{self, Counted, Queued, Reserved, Work};
use penstock_meta::{Data, Inode, Layout};
use penstock_session::{Role, rows as session};
use penstock_wire::metadata::Time;

/// `kv-volume`: the header of the key-value volume.
pub(super) const VOLUME_HEADER: Decoder = Decoder {
    name: "kv-volume",
    most_bytes: 4096,
    seeds: || {
        let header = |(len, longest, journal_blocks)| VolumeHeader { len, longest, journal_blocks }.encode();
        [(0, 0, 0), (1 << 20, 4 << 20, 60)].map(header).to_vec()
    },
    seal: |bytes| seal_crc(bytes, 8, &[12..40]),
    check: |bytes| agrees(bytes, &SAME, VolumeHeader::decode, VolumeHeader::encode),
};

/// `journal-record`: a record of its journal.
pub(super) const JOURNAL_RECORD: Decoder = Decoder {
    name: "journal-record",
    most_bytes: 4096,
    seeds: || {
        let mut changes = WriteSet::new();
        changes.put(b"key".to_vec(), b"value".to_vec()).delete(b"gone".to_vec());
        [WriteSet::new(), changes]
            .map(|changes| Record { incarnation: Id128([7; 16]), sequence: 9, changes }.encode())
            .to_vec()
    },
    seal: |bytes| {
        // The length of the body decides which bytes the checksum covers.
        let end = number(bytes, 40).saturating_add(48).min(bytes.len()).max(12);
        seal_crc(bytes, 8, &[12..end]);
    },
    check: |bytes| agrees(bytes, &SAME, Record::decode, Record::encode),
};

/// `journal-mark`: the value of the mark's row.
pub(super) const JOURNAL_MARK: Decoder = Decoder {
    name: "journal-mark",
    most_bytes: 64,
    seeds: || vec![Mark { incarnation: Id128([7; 16]), sequence: 9, next_block: 3 }.encode()],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, Mark::decode, Mark::encode),
};

/// The birth of the map rows.
const BIRTH: Birth = Birth(5);

/// `map-row`: the map of a chunk. The end of every extent of an accepted row can be computed, and none is
/// younger than the row.
pub(super) const MAP: Decoder = Decoder {
    name: "map-row",
    most_bytes: 4096,
    seeds: || {
        let extents = [
            Extent { first: 0, count: 2, block: 9, preallocated: false, birth: BIRTH },
            Extent { first: 5, count: 1, block: 77, preallocated: true, birth: Birth(2) },
            Extent { first: 6, count: 250, block: 1 << 40, preallocated: false, birth: Birth(4) },
        ];
        let row = |count: usize| MapRow { truncations: 7, extents: extents[..count].to_vec() };
        (0..=3).map(|count| row(count).encode(BIRTH)).collect()
    },
    seal: unsealed,
    check: |bytes| {
        let decode = |bytes: &[u8]| MapRow::decode(bytes, BIRTH);
        let verdict = agrees(bytes, &SAME, decode, |row| row.encode(BIRTH))?;
        for extent in decode(bytes).map_or_else(|_| Vec::new(), |row| row.extents) {
            let _ = (extent.first + extent.count, extent.block + u64::from(extent.count));
        }
        Ok(verdict)
    },
};

fn loan() -> Loan {
    Loan { stripe: 1 << 40, stripes: 3, gaps: vec![(0, 1), (5, 2)] }
}

/// `lent-row`: the lender's row of a loan.
pub(super) const LENT: Decoder = Decoder {
    name: "lent-row",
    most_bytes: 128,
    seeds: || vec![Lent { group: 7, loan: loan(), is_restored: false }.encode()],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, Lent::decode, Lent::encode),
};

/// `loan-row`: the borrower's row of a loan.
pub(super) const LOAN: Decoder = Decoder {
    name: "loan-row",
    most_bytes: 128,
    seeds: || vec![Borrowed { lender: TargetId(3), number: 1 << 40, loan: loan() }.encode(&[9, 0, 3])],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, Borrowed::decode, |(borrowed, bits)| borrowed.encode(bits)),
};

/// `reserved-row`: a row of a kind that this release does not make: the length of its key, key and value.
pub(super) const RESERVED: Decoder = Decoder {
    name: "reserved-row",
    most_bytes: 512,
    seeds: || {
        let targets = vec![1, 3];
        let limit = |soft| reserved::Limit { soft, hard: None, grace_s: 60, passed_ns: soft.map(|_| 5) };
        let queued = |work| {
            Reserved::Queued(0, 7, Queued { branch: Branch(0), sequence: 1, work, targets: targets.clone() })
        };
        let rows = [
            Reserved::Fileset(
                1,
                reserved::Fileset {
                    id: Id128([3; 16]),
                    state: reserved::FilesetState::Live,
                    revision: 3,
                    target: 0,
                    epoch: 4,
                    created_ns: -1,
                    branch: Branch(5),
                    root: Ino((2 << 40) | 1),
                    parent: Some((0, Branch(0), Ino((1 << 40) | 1))),
                    families: vec![2, 9],
                    name: "home".into(),
                },
            ),
            Reserved::Branch(
                Branch(6),
                reserved::Lineage {
                    fileset: 1,
                    kind: reserved::BranchKind::Snapshot,
                    state: reserved::BranchState::Whole,
                    revision: 3,
                    epoch: 4,
                    parent: Branch(5),
                    sequence: 3,
                    group: Id128::NIL,
                    created_ns: 1,
                    uid: 0,
                    labels: vec![("by".into(), "me".into())],
                    name: "monday".into(),
                },
            ),
            Reserved::Map(
                0,
                1,
                reserved::PoolMap {
                    pool: PoolId::default(),
                    targets: vec![reserved::MapTarget { target: 1, domain: 2 }],
                },
            ),
            Reserved::Run(0, Ino((1 << 40) | 5), 64),
            queued(Work::Truncate { ino: Ino(7), truncations: 2, from: 3, keeps: false }),
            queued(Work::Remove { ino: Ino(7), truncations: 2 }),
            queued(Work::Own { ino: Ino(7), number: 2, owner: OWNER }),
            queued(Work::DropBranch),
            Reserved::Quota(
                0,
                Counted::Project(3),
                reserved::Quota { blocks: limit(Some(9)), inodes: limit(None), used_inodes: 5 },
            ),
            Reserved::Credit(0, Counted::All, 2, reserved::Credit { blocks: 64, number: 1 }),
            Reserved::Junction(Ino(7), 256, 1, b"home".to_vec()),
        ];
        rows.iter().map(|row| joined(&row.encode())).collect()
    },
    seal: unsealed,
    check: |bytes| {
        let decode = |bytes: &[u8]| with_row(bytes, Reserved::decode);
        agrees(bytes, &SAME, decode, |row| joined(&row.encode()))
    },
};

/// `forgotten-row`: the targets of a store that are forgotten.
pub(super) const FORGOTTEN: Decoder = Decoder {
    name: "forgotten-row",
    most_bytes: 512,
    seeds: || vec![meta::encode_gone(&[TargetId(1), TargetId(9)].into())],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, meta::decode_gone, meta::encode_gone),
};

/// `counter-row`: a counter of a target: the length of its key, key and value.
pub(super) const COUNTER: Decoder = Decoder {
    name: "counter-row",
    most_bytes: 64,
    seeds: || {
        let sequence = chunk::Counter::Sequence { family: 1, sequence: 7, closed: 6 };
        [sequence, chunk::Counter::Loans { last: 9, forgotten: 2, has_dropped: true }]
            .map(|counter| joined(&counter.encode()))
            .to_vec()
    },
    seal: unsealed,
    check: |bytes| {
        let decode = |bytes: &[u8]| with_row(bytes, chunk::Counter::decode);
        agrees(bytes, &SAME, decode, |counter| joined(&counter.encode()))
    },
};

/// A row as one input.
fn joined((key, value): &(Vec<u8>, Vec<u8>)) -> Vec<u8> {
    let len = u8::try_from(key.len()).expect("a short key");
    let joined = [&[len][..], key, value].concat();
    assert!(with_row(&joined, |found, rest| Ok(found == key && rest == value)) == Ok(true), "it comes back");
    joined
}

/// Decodes key and value of an input.
fn with_row<T>(
    bytes: &[u8],
    decode: impl Fn(&[u8], &[u8]) -> Result<T, DecodeError>,
) -> Result<T, DecodeError> {
    let mut dec = Dec::new("row", bytes);
    let len = dec.u8()?;
    let key = dec.raw(usize::from(len))?;
    decode(key, dec.raw(dec.left())?)
}

const OWNER: Owner = Owner { uid: 1000, gid: 100, project: 7 };

/// `file-row`: the row of a file on a target.
pub(super) const FILE: Decoder = Decoder {
    name: "file-row",
    most_bytes: 128,
    seeds: || {
        [(0, 5), (9, 0), (1 << 40, 1 << 50)]
            .map(|(truncations, blocks)| {
                FileRow { truncations, blocks, owner: OWNER, owner_number: 0 }.encode()
            })
            .to_vec()
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, FileRow::decode, FileRow::encode),
};

/// `account-row`: the blocks of an owner.
pub(super) const ACCOUNT: Decoder = Decoder {
    name: "account-row",
    most_bytes: 64,
    seeds: || [1, 1 << 50].map(chunk::encode_account).to_vec(),
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, chunk::decode_account, |blocks| chunk::encode_account(*blocks)),
};

/// `group-row`: the bits of an allocation group.
pub(super) const GROUP: Decoder = Decoder {
    name: "group-row",
    most_bytes: 5000,
    seeds: || {
        [vec![0; chunk::GROUP_WORDS], (0..chunk::GROUP_WORDS as u64).collect()]
            .map(|words| chunk::encode_group(&words))
            .to_vec()
    },
    seal: unsealed,
    check: |bytes| {
        agrees(
            bytes,
            &SAME,
            |bytes| chunk::decode_group(bytes, chunk::GROUP_WORDS),
            |words| chunk::encode_group(words),
        )
    },
};

/// `group-counts`: the counts of two allocation groups.
pub(super) const GROUP_COUNTS: Decoder = Decoder {
    name: "group-counts",
    most_bytes: 16,
    seeds: || {
        let counts = [chunk::Counts { used: 7, empty: 120 }, chunk::Counts { used: 0x8000, empty: 0 }];
        vec![chunk::encode_counts(&counts), chunk::encode_counts(&[chunk::Counts::default(); 2])]
    },
    seal: unsealed,
    check: |bytes| {
        agrees(bytes, &SAME, |bytes| chunk::decode_counts(bytes, 2), |counts| chunk::encode_counts(counts))
    },
};

/// `chunk-keys`: the key of a row of a target. A map key must lie in its range for scans.
pub(super) const CHUNK_KEYS: Decoder = Decoder {
    name: "chunk-keys",
    most_bytes: 64,
    seeds: || {
        let key = ChunkKey { file: FileId::main(Ino((1 << 40) | 7)), index: 3 };
        vec![
            key.row(Birth::FIRST),
            ChunkKey { file: FileId::main(Ino(u64::MAX)), ..key }.row(Birth(1)),
            chunk::group_key(12),
            chunk::counts_key(3),
            FileRow::key(key.file, Birth(3)),
            OWNER.account(Branch(4)),
            LentKey { borrower: TargetId(5), number: 77 }.row(),
            Borrowed::key(9),
        ]
    },
    seal: unsealed,
    check: |bytes| {
        if chunk::decode_group_key(bytes).is_some() {
            let decode = |key: &[u8]| chunk::decode_group_key(key).ok_or(());
            return agrees(bytes, &SAME, decode, |group| chunk::group_key(*group));
        }
        if chunk::decode_counts_key(bytes).is_some() {
            let decode = |key: &[u8]| chunk::decode_counts_key(key).ok_or(());
            return agrees(bytes, &SAME, decode, |row| chunk::counts_key(*row));
        }
        if chunk::decode_file_key(bytes).is_ok() {
            return agrees(bytes, &SAME, chunk::decode_file_key, |(file, birth)| FileRow::key(*file, *birth));
        }
        if chunk::decode_account_key(bytes).is_ok() {
            let encode = |(branch, owner): &(Branch, Owner)| owner.account(*branch);
            return agrees(bytes, &SAME, chunk::decode_account_key, encode);
        }
        if LentKey::decode(bytes).is_ok() {
            return agrees(bytes, &SAME, LentKey::decode, LentKey::row);
        }
        if Borrowed::group_of(bytes).is_ok() {
            return agrees(bytes, &SAME, Borrowed::group_of, |group| Borrowed::key(*group));
        }
        let verdict = agrees(bytes, &SAME, ChunkKey::decode, |(key, birth)| key.row(*birth))?;
        if let Ok((key, birth)) = ChunkKey::decode(bytes) {
            let (from, until) = chunk::map_range(key.file, key.index);
            ordered(&from, &key.row(birth), &until)?;
        }
        Ok(verdict)
    },
};

/// Checks that a key lies in its range.
fn ordered(from: &[u8], key: &[u8], until: &[u8]) -> Result<(), String> {
    match from <= key && key < until {
        true => Ok(()),
        false => Err(format!("{key:02x?} is not in {from:02x?} to {until:02x?}")),
    }
}

/// `fs-row`: the row of the file system.
pub(super) const FILE_SYSTEM: Decoder = Decoder {
    name: "fs-row",
    most_bytes: 512,
    seeds: || {
        let row = |name: &str| meta::FsRow {
            id: Id128([3; 16]),
            name: name.into(),
            created_ns: -1,
            secret: Id128([4; 16]),
            reserved_ino: (1 << 40) | 4097,
            last_session: 2,
            chunk_blocks: 256,
            last_queued: 5,
        };
        ["main", "", "größer"].map(|name| row(name).encode()).to_vec()
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, meta::FsRow::decode, meta::FsRow::encode),
};

/// `store-row`: the row of the key-value store.
pub(super) const STORE: Decoder = Decoder {
    name: "store-row",
    most_bytes: 128,
    seeds: || {
        let first = meta::Home {
            pool: PoolId(Id128([7; 16])),
            data: ArrayId(Id128([8; 16])),
            ..meta::Home::default()
        };
        let stack = StackNo(3);
        let fourth = meta::Home { stack, target: stack.target(), is_one_of_several: true, ..first };
        let features = Features { compatible: 8, ..Features::default() };
        let several = Features { compatible: 8, ..Features::of_stacks(true) };
        [(first, Features::default(), 0), (first, features, 0), (first, features, 2), (fourth, several, 2)]
            .map(|(home, features, kept_stripes)| {
                let is_unrepaired = kept_stripes > 0;
                meta::StoreRow { features, home, kept_stripes, is_unrepaired }.encode()
            })
            .to_vec()
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, meta::StoreRow::decode, meta::StoreRow::encode),
};

/// `inode-row`: an accepted one gives attributes, and its chunks have at least one block.
pub(super) const INODE: Decoder = Decoder {
    name: "inode-row",
    most_bytes: 1024,
    seeds: || {
        let inode = |mode: u32, data: Data| Inode {
            ino: Ino((1 << 40) | 7),
            mode,
            nlink: 1,
            uid: 2,
            gid: 3,
            rdev: 4,
            size: 5,
            times: [1, -2, 3, 4].map(Time::from_ns),
            truncations: 6,
            parent: Ino(8),
            entries: 9,
            is_spread: data == Data::Chunks,
            layout: Layout { first: 3, count: 4, turn: 2, ..Layout::of_one_target(256) },
            data,
        };
        [
            inode(0o040_755, Data::None),
            inode(0o120_777, Data::Inline(b"target".to_vec())),
            inode(0o100_644, Data::Chunks),
        ]
        .map(|inode| inode.encode())
        .to_vec()
    },
    seal: unsealed,
    check: |bytes| {
        let verdict = agrees(bytes, &SAME, Inode::decode, Inode::encode)?;
        if let Ok(inode) = Inode::decode(bytes) {
            let attr = inode.attr(7);
            let _ = attr.size.div_ceil(u64::from(attr.chunk_blocks) * 4096);
        }
        Ok(verdict)
    },
};

/// `entry-row`: a directory entry.
pub(super) const ENTRY: Decoder = Decoder {
    name: "entry-row",
    most_bytes: 512,
    seeds: || {
        let row = |name: &[u8]| meta::Entry { ino: Ino(7), kind: 0o100_000, name: name.to_vec() }.encode();
        vec![row(b"name"), row(&[0xff; 255]), row(b"")]
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, meta::Entry::decode, meta::Entry::encode),
};

/// `result-row`: the result of a request.
pub(super) const RESULT: Decoder = Decoder {
    name: "result-row",
    most_bytes: 512,
    seeds: || {
        let row = |body: &[u8]| session::ResultRow {
            session: Id128([7; 16]),
            slot: 2,
            sequence: 66,
            body: body.to_vec(),
        };
        vec![row(b"reply").encode(), row(b"").encode()]
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, session::ResultRow::decode, session::ResultRow::encode),
};

/// `session-row`: a client's session.
pub(super) const SESSION: Decoder = Decoder {
    name: "session-row",
    most_bytes: 512,
    seeds: || {
        let (client, mount) = ("host".into(), "/m".into());
        vec![session::SessionRow { number: 5, client, mount, lease_ms: 30_000, role: Role::Gateway }.encode()]
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, session::SessionRow::decode, session::SessionRow::encode),
};

/// `name-keys`: keys of directory entries, extended attributes and removed files, and the ranges of scans
/// over them.
pub(super) const NAME_KEYS: Decoder = Decoder {
    name: "name-keys",
    most_bytes: 400,
    seeds: || {
        vec![
            meta::entry_key(Ino(7), 0x1234_5678),
            meta::entry_key(Ino(u64::MAX), u64::MAX),
            meta::removed_key(Ino(9)),
        ]
    },
    seal: unsealed,
    check: name_keys,
};

fn name_keys(bytes: &[u8]) -> Result<Verdict, String> {
    // Any bytes except zeros may be the name of an attribute.
    let name: Vec<u8> = bytes.iter().copied().filter(|byte| *byte != 0).collect();
    let _ = meta::xattr_name(bytes);
    let removed = |bytes: &[u8]| meta::decode_removed(bytes, &[1, 0]).map(|removed| removed.ino);
    let ino = match meta::decode_entry_key(bytes) {
        Ok((dir, cookie)) => {
            agrees(bytes, &SAME, meta::decode_entry_key, |(dir, cookie)| meta::entry_key(*dir, *cookie))?;
            let (from, until) = meta::entry_range(dir, 0, u64::MAX);
            if cookie < u64::MAX {
                ordered(&from, bytes, &until)?;
            }
            dir
        }
        Err(_) => match agrees(bytes, &SAME, removed, |ino| meta::removed_key(*ino))? {
            Verdict::Refused => return Ok(Verdict::Refused),
            Verdict::Accepted => removed(bytes).unwrap_or_default(),
        },
    };
    let (from, until) = meta::xattr_range(ino);
    let key = meta::xattr_key(ino, &name);
    ordered(&from, &key, &until)?;
    match meta::xattr_name(&key) == name {
        true => Ok(Verdict::Accepted),
        false => Err(format!("the name {name:02x?} is read as another one")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of a store with several stacks must be among the seeds: mutations seldom find a feature bit.
    #[test]
    fn seeds_have_rows_of_several_stacks() {
        let stores = (STORE.seeds)();
        let stacks = stores.iter().map(|row| meta::StoreRow::decode(row).expect("a seed").home.stack.0);
        assert_eq!(stacks.collect::<Vec<_>>(), [0, 0, 0, 3]);
        let inodes = (INODE.seeds)();
        let spread = inodes.iter().filter(|row| Inode::decode(row).expect("a seed").is_spread);
        assert_eq!(spread.count(), 1);
        for decoder in [&STORE, &INODE, &FILE_SYSTEM] {
            let longest = (decoder.seeds)().iter().map(Vec::len).max().expect("a seed");
            assert!(longest <= decoder.most_bytes, "{}: {longest} bytes", decoder.name);
        }
    }
}
