use super::super::{Entry, unknown_keys};
use super::*;
use penstock_base::hex;

const INO: Ino = Ino((1 << 40) | 7);

fn limit(soft: Option<u64>) -> Limit {
    Limit { soft, hard: Some(9), grace_s: 60, passed_ns: soft.map(|_| 8) }
}

/// One row of each kind, with its key and its value in hexadecimal digits.
fn rows() -> Vec<(Reserved, String, String)> {
    let fileset = Fileset {
        id: Id128([3; 16]),
        state: FilesetState::Live,
        revision: 6,
        target: 2,
        epoch: 5,
        created_ns: -2,
        branch: Branch(8),
        root: INO,
        parent: Some((0, Branch(7), Ino(6))),
        families: vec![9, 10],
        name: "home".into(),
    };
    let lineage = Lineage {
        fileset: 4,
        kind: BranchKind::Snapshot,
        state: BranchState::Provisional,
        revision: 6,
        epoch: 5,
        parent: Branch(8),
        sequence: 6,
        group: Id128([7; 16]),
        created_ns: 1,
        uid: 1000,
        labels: vec![("by".into(), "me".into())],
        name: "monday".into(),
    };
    let queued = |work| Queued { branch: Branch(8), sequence: 6, work, targets: vec![1, 3] };
    let owner = Owner { uid: 1, gid: 2, project: 3 };
    let quota = Quota { blocks: limit(Some(8)), inodes: limit(None), used_inodes: 5 };
    let targets = vec![MapTarget { target: 1, domain: 2 }, MapTarget { target: 3, domain: 4 }];
    let map = PoolMap { pool: PoolId(Id128([5; 16])), targets };
    let (word, ino) = (|number: u64| hex(&number.to_be_bytes()), "0700000000010000");
    let [ids, pools, groups] = ["03", "05", "07"].map(|byte| byte.repeat(16));
    let head = "08000000000000000600000000000000";
    let targets = "020000000100000003000000";
    let none = "ff".repeat(8);
    [
        (
            Reserved::Fileset(4, fileset),
            format!("02{}", word(4)),
            format!(
                "0100 0600000000000000 {ids} 02000000 0500000000000000 feffffffffffffff \
                 0800000000000000 {ino} 01 0000000000000000 0700000000000000 0600000000000000 02000000 09000000 0a000000 04000000 686f6d65"
            ),
        ),
        (
            Reserved::Branch(Branch(11), lineage),
            format!("03{}", word(11)),
            format!(
                "01 0400000000000000 01 02 0600000000000000 0500000000000000 {head} {groups} 0100000000000000 e8030000 \
                 01000000 02000000 6279 02000000 6d65 06000000 6d6f6e646179"
            ),
        ),
        (
            Reserved::Map(2, 3, map),
            format!("04{}{}", word(2), word(3)),
            format!("01 {pools} 02000000 01000000 02000000 03000000 04000000"),
        ),
        (Reserved::Run(4, INO, 64), format!("05{}{}", word(4), word(INO.0)), "01 40000000".into()),
        (
            Reserved::Queued(4, 5, queued(Work::Truncate { ino: INO, truncations: 2, from: 3, keeps: true })),
            format!("16{}{}", word(4), word(5)),
            format!("01{head} 00 {ino} 0200000000000000 0300000000000000 01 {targets}"),
        ),
        (
            Reserved::Queued(4, 6, queued(Work::Remove { ino: INO, truncations: 2 })),
            format!("16{}{}", word(4), word(6)),
            format!("01{head} 01 {ino} 0200000000000000 {targets}"),
        ),
        (
            Reserved::Queued(4, 7, queued(Work::Own { ino: INO, number: 2, owner })),
            format!("16{}{}", word(4), word(7)),
            format!("01{head} 02 {ino} 0200000000000000 01000000 02000000 03000000 {targets}"),
        ),
        (
            Reserved::Queued(4, 8, queued(Work::DropBranch)),
            format!("16{}{}", word(4), word(8)),
            format!("01{head} 03 {targets}"),
        ),
        (
            Reserved::Quota(4, Counted::User(1000), quota),
            format!("17{}{}{}", word(4), word(1), word(1000)),
            format!(
                "01 0800000000000000 0900000000000000 3c000000 01 0800000000000000 \
                 {none} 0900000000000000 3c000000 00 0000000000000000 0500000000000000"
            ),
        ),
        (
            Reserved::Credit(4, Counted::All, 3, Credit { blocks: 64, number: 2 }),
            format!("18{}{}{}{}", word(4), word(0), word(0), word(3)),
            "01 4000000000000000 0200000000000000".into(),
        ),
        (
            Reserved::Junction(INO, 256, 4, b"home".to_vec()),
            format!("11{}{}{}fffffffffffffffe", word(0), word(INO.0), word(256)),
            "02 01 0400000000000000 00400000 04000000 686f6d65".into(),
        ),
    ]
    .map(|(row, key, value)| (row, key, value.replace(' ', "")))
    .into()
}

#[test]
fn rows_are_as_in_the_first_release() {
    for (row, wanted_key, wanted) in rows() {
        let (key, value) = row.encode();
        assert_eq!((hex(&key), hex(&value)), (wanted_key, wanted), "{}", row.what());
        assert_eq!(Reserved::decode(&key, &value).as_ref(), Ok(&row));
        for len in 0..value.len() {
            assert!(Reserved::decode(&key, &value[..len]).is_err(), "the first {len} bytes: {}", row.what());
        }
        for len in 0..key.len() {
            assert!(Reserved::decode(&key[..len], &value).is_err(), "a key of {len} bytes: {}", row.what());
        }
        let mut later = value.clone();
        later[0] += 1;
        let error = Reserved::decode(&key, &later).unwrap_err();
        assert!(matches!(error, DecodeError::Unknown { field: "format", .. }), "{error}");
        assert!(Reserved::decode(&key, &[&value[..], &[0]].concat()).is_err(), "{}", row.what());
    }
}

/// Each kind is found by a check, and none is taken for a row of this release.
#[test]
fn a_check_sees_every_kind() {
    for (row, ..) in rows() {
        let (key, value) = row.encode();
        match row {
            Reserved::Junction(..) => {
                let error = Entry::decode(&value).unwrap_err().to_string();
                assert!(error.contains("target of a name is 1"), "{error}");
            }
            _ => {
                let ranges = unknown_keys().into_iter();
                let seen = ranges.filter(|(from, until)| *from <= key && key < *until).count();
                assert_eq!(seen, 1, "{}", row.what());
            }
        }
    }
}

#[test]
fn values_that_cannot_be_right_are_refused() {
    let rows = rows();
    // Row, byte of its value, and another one.
    for (row, at, byte) in [
        (0, 1, 3),      // a state
        (0, 37, 0x80),  // an epoch above 2^63
        (0, 62, 2),     // linked or not
        (0, 62, 0),     // not linked, with a parent
        (0, 87, 0),     // no family
        (0, 91, 0),     // family 0
        (0, 94, 1),     // a family above 24 bits
        (0, 91, 10),    // families that do not ascend
        (1, 9, 3),      // a kind
        (1, 9, 0),      // a main branch with a parent
        (1, 10, 5),     // a state
        (2, 17, 0),     // no target
        (2, 17, 3),     // more targets than bytes
        (3, 1, 0),      // no number
        (4, 17, 4),     // a kind of work
        (4, 26, 0),     // a truncation that begins no generation
        (4, 42, 2),     // a treatment of blocks
        (8, 17 + 4, 2), // a state of a limit
        (8, 9 + 12, 0), // a time of a limit that is not passed
        (8, 8, 0x80),   // a limit above 2^63
        (9, 8, 0x80),   // more blocks than there are
        (10, 1, 0),     // a name of an inode
        (10, 10, 1),    // a fileset that is no directory
    ] {
        let (key, mut value) = rows[row].0.encode();
        value[at] = byte;
        assert!(Reserved::decode(&key, &value).is_err(), "row {row}, byte {at} is {byte}");
    }
    // Row, byte of its key, and another one.
    for (row, at, byte) in
        [(2, 1, 1), (2, 9, 1), (4, 16, 0), (4, 9, 0x80), (8, 16, 4), (8, 17, 1), (9, 24, 1), (9, 25, 1)]
    {
        let (mut key, value) = rows[row].0.encode();
        key[at] = byte;
        assert!(Reserved::decode(&key, &value).is_err(), "row {row}, byte {at} of the key is {byte}");
    }
    // A run that ends behind its family.
    let (_, value) = Reserved::Run(4, INO, 64).encode();
    let key = row_key(RUN, &[4, (1 << 41) - 3]);
    assert!(Reserved::decode(&key, &value).is_err());
    // Regression: the end of a run without numbers was computed.
    assert!(Reserved::decode(&row_key(RUN, &[4, 0]), &[FORMAT, 0, 0, 0, 0]).is_err());
}
