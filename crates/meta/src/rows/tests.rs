//! Tests of the name space's rows: golden bytes of every row and key, and values that decoding must refuse.

use super::*;
use crate::inode::{Data, Inode, Layout};
use penstock_wire::metadata::Time;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn keys_are_as_in_the_first_release() {
    let (zero, dir, first) = ("0000000000000000", "0000010000000007", "fffffffffffffffe");
    let ino = Ino((1 << 40) | 7);
    for (key, wanted) in [
        (store_key(), "00".into()),
        (fs_key(), format!("01{zero}")),
        (gone_key(), format!("06{zero}")),
        (inode_key(ino), format!("10{zero}{dir}{first}")),
        (entry_key(ino, 0x0102_0304), format!("11{zero}{dir}0000000001020304{first}")),
        (xattr_key(ino, b"user.a"), format!("12{zero}{dir}757365722e6100{first}")),
        (removed_key(ino), format!("13{zero}{dir}")),
    ] {
        assert_eq!(hex(&key), wanted);
    }
    assert_eq!(decode_entry_key(&entry_key(ino, 0x0102_0304)), Ok((ino, 0x0102_0304)));
    assert_eq!(xattr_name(&xattr_key(ino, b"user.a")), b"user.a");
}

#[test]
fn the_row_of_forgotten_targets_is_as_in_the_first_release() {
    let targets: BTreeSet<TargetId> = [TargetId(2), TargetId(40)].into();
    let row = encode_gone(&targets);
    assert_eq!(hex(&row), "01020000000200000028000000");
    assert_eq!(decode_gone(&row), Ok(targets));
    assert_eq!(decode_gone(&encode_gone(&BTreeSet::new())), Ok(BTreeSet::new()));
    for len in 0..row.len() {
        assert!(decode_gone(&row[..len]).is_err(), "the first {len} bytes");
    }
    for wrong in
        ["02020000000200000028000000", "01020000002800000002000000", "010100000040000000", "0100000000ff"]
    {
        let bytes: Vec<u8> = (0..wrong.len() / 2)
            .map(|at| u8::from_str_radix(&wrong[2 * at..2 * at + 2], 16).unwrap())
            .collect();
        assert!(decode_gone(&bytes).is_err(), "{wrong}");
    }
}

#[test]
fn rows_are_as_in_the_first_release() {
    let fs = FsRow {
        id: Id128([3; 16]),
        name: "main".into(),
        created_ns: -2,
        secret: Id128([4; 16]),
        reserved_ino: (1 << 40) | 4097,
        last_session: 6,
        chunk_blocks: 256,
        last_queued: 0,
    };
    let (id, secret) = ("03".repeat(16), "04".repeat(16));
    let rest = "0110000000010000 0600000000000000 00010000 04000000 6d61696e".replace(' ', "");
    let numbers = format!("{}0100000000000000{}", "00".repeat(12), "00".repeat(8));
    let head = format!("0201000000{numbers}");
    assert_eq!(hex(&fs.encode()), format!("{head}{id}feffffffffffffff{secret}{rest}"));
    assert_eq!(FsRow::decode(&fs.encode()).as_ref(), Ok(&fs));
    for (at, field) in [(0, "format"), (1, "family"), (5, "metadata target"), (9, "epoch"), (17, "sequence")]
    {
        let mut later = fs.encode();
        later[at] += 1;
        let error = FsRow::decode(&later).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("does not know"), "byte {at}: {error}");
    }

    let asked = FsRow { last_queued: 9, ..fs.clone() };
    assert_eq!(FsRow::decode(&asked.encode()), Ok(asked));

    let entry = Entry { ino: Ino((1 << 40) | 7), kind: 0o100_000, name: b"name".to_vec() };
    assert_eq!(hex(&entry.encode()), "0200 0700000000010000 00800000 04000000 6e616d65".replace(' ', ""));
    assert_eq!(Entry::decode(&entry.encode()), Ok(entry));

    for (state, bytes) in [
        (RemovedState::Removed, [1, 0]),
        (RemovedState::PartlyGone, [1, 1]),
        (RemovedState::Nameless, [1, 2]),
    ] {
        let removed = RemovedFile { ino: Ino((1 << 40) | 7), state };
        assert_eq!(removed.encode(), bytes);
        assert_eq!(decode_removed(&removed_key(removed.ino), &bytes), Ok(removed));
    }
}

#[test]
fn the_row_of_the_store_is_as_in_the_first_release() {
    let home = Home { pool: PoolId(Id128([7; 16])), data: ArrayId(Id128([8; 16])), ..Home::default() };
    let features = Features { compatible: 4, ..Features::default() };
    let store = StoreRow { features, home, kept_stripes: 0, is_unrepaired: false };
    let row = store.encode();
    let ids = format!("{}{}", "07".repeat(16), "08".repeat(16));
    assert_eq!(hex(&row), format!("010400000000000000{}{ids}000000000000", "00".repeat(16)));
    assert_eq!(StoreRow::decode(&row), Ok(store.clone()));
    let keeps = StoreRow { kept_stripes: 0x0102, is_unrepaired: true, ..store };
    let kept = keeps.encode();
    assert_eq!(hex(&kept), format!("020400000000000000{}{ids}000000000000020101", "00".repeat(16)));
    assert_eq!(StoreRow::decode(&kept), Ok(keeps));
    assert!(StoreRow::decode(&[&kept[..63], &[0; 3]].concat()).is_err(), "it keeps none");
    assert!(
        StoreRow::decode(&kept[..63]).is_err() && StoreRow::decode(&[&row[..], &[1, 0]].concat()).is_err()
    );
    for len in 0..row.len() {
        assert!(StoreRow::decode(&row[..len]).is_err(), "the first {len} bytes");
    }
    for (at, field) in
        [(0, "format"), (9, "feature bits"), (17, "feature bits"), (58, "stack"), (59, "target")]
    {
        let mut later = row.clone();
        later[at] += 2;
        let error = StoreRow::decode(&later).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("does not know"), "byte {at}: {error}");
    }
}

#[test]
fn the_row_of_a_store_of_several_stacks_has_their_feature() {
    let stack = StackNo(3);
    let home = Home { stack, target: stack.target(), is_one_of_several: true, ..Home::default() };
    let store = StoreRow { features: home.features(), home, kept_stripes: 2, is_unrepaired: false };
    let row = store.encode();
    assert_eq!(StoreRow::decode(&row), Ok(store.clone()));
    let first = Home { is_one_of_several: true, ..Home::default() };
    let of_first = StoreRow { home: first, ..store.clone() };
    assert_eq!(StoreRow::decode(&of_first.encode()), Ok(of_first));
    let without = StoreRow { features: Features::default(), ..store }.encode();
    let error = StoreRow::decode(&without).unwrap_err().to_string();
    assert!(error.contains("without their feature"), "{error}");
    let mut elsewhere = row;
    elsewhere[59] = 2;
    let error = StoreRow::decode(&elsewhere).unwrap_err().to_string();
    assert!(error.contains("target is 2"), "{error}");
}

fn inode(data: Data) -> Inode {
    Inode {
        ino: Ino((1 << 40) | 7),
        mode: 0o120_777,
        nlink: 1,
        uid: 2,
        gid: 3,
        rdev: 4,
        size: 5,
        times: [1, -2, 3, 4].map(Time::from_ns),
        truncations: 6,
        parent: Ino(8),
        entries: 9,
        layout: Layout::of_one_target(256),
        data,
        is_spread: false,
    }
}

#[test]
fn an_inode_comes_back() {
    let inode = inode(Data::Inline(b"target".to_vec()));
    let row = inode.encode();
    assert_eq!(Inode::decode(&row), Ok(inode));
    for len in 0..row.len() {
        assert!(Inode::decode(&row[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn inodes_are_as_in_the_first_release() {
    let head = "02 0700000000010000 ffa10000 01000000 02000000 03000000 00000000 04000000 00000000 0500000000000000 \
                0000000000000000 01000000 ffffffffffffffff fec99a3b 0000000000000000 03000000 \
                0000000000000000 04000000 0600000000000000 0800000000000000 0900000000000000 \
                00000000 00000000 00000000 0100 0100 00010000 01"
        .replace(' ', "");
    for (data, wanted) in
        [(Data::None, "00"), (Data::Inline(b"to".to_vec()), "0102000000746f"), (Data::Chunks, "02")]
    {
        let inode = inode(data);
        assert_eq!(hex(&inode.encode()), format!("{head}{wanted}"));
        assert_eq!(Inode::decode(&inode.encode()), Ok(inode));
    }
}

/// Regression: the end of the range was computed as the inode number plus one, which overflowed here.
#[test]
fn the_last_inode_has_a_range_of_attributes() {
    let (from, until) = xattr_range(Ino(u64::MAX));
    let key = xattr_key(Ino(u64::MAX), b"user.a");
    assert!(from <= key && key < until);
    let (_, until) = xattr_range(Ino(6));
    assert!(until <= xattr_key(Ino(7), b""));
}

/// Code divides file sizes by the blocks of a chunk and increments the counters, so decoding refuses such
/// values.
#[test]
fn an_inode_that_breaks_arithmetic_is_refused() {
    let good = inode(Data::None);
    let layout = good.layout;
    for bad in [
        Inode { layout: Layout { chunk_blocks: 0, ..layout }, ..good.clone() },
        Inode { layout: Layout { turn: 0, ..layout }, ..good.clone() },
        Inode { nlink: u32::MAX, ..good.clone() },
        Inode { truncations: u64::MAX, ..good.clone() },
        Inode { entries: u64::MAX, ..good },
    ] {
        assert!(Inode::decode(&bad.encode()).is_err(), "{bad:?}");
    }
}

/// Fields that this release writes with one value are refused by name if they have another.
#[test]
fn rows_of_later_releases_are_refused_by_name() {
    let row = inode(Data::None).encode();
    for (at, field) in [
        (0, "format"),
        (25, "project"),
        (33, "flags"),
        (117, "pool of the layout"),
        (121, "map version of the layout"),
        (137, "replicas of the layout"),
        (138, "data"),
    ] {
        let mut later = row.clone();
        later[at] += 7;
        let error = Inode::decode(&later).unwrap_err().to_string();
        assert!(error.contains(&format!("inode: {field} is ")), "byte {at}: {error}");
    }
    let mut late = row;
    late[56] = 0xff;
    assert!(Inode::decode(&late).unwrap_err().to_string().contains("nanoseconds"));

    let entry = Entry { ino: Ino(7), kind: 0o100_000, name: b"n".to_vec() }.encode();
    for (at, field) in [(0, "format"), (1, "target of a name")] {
        let mut later = entry.clone();
        later[at] = 9;
        assert!(Entry::decode(&later).unwrap_err().to_string().contains(&format!("{field} is 9")));
    }
    // Reserved for what a snapshot hides.
    for removed in
        [Inode::decode(&[0]).map(drop), Entry::decode(&[0]).map(drop), decode_xattr(&[0]).map(drop)]
    {
        assert!(removed.unwrap_err().to_string().contains("format is 0"));
    }
}

#[test]
fn attributes_come_back() {
    for value in [&b""[..], b"value", &[0; 9]] {
        assert_eq!(decode_xattr(&encode_xattr(value)), Ok(value));
    }
    assert_eq!(encode_xattr(b"v"), [1, b'v']);
    assert!(decode_xattr(&[]).is_err());
}

#[test]
fn keys_of_branches_and_births_that_do_not_exist_yet_are_refused_by_name() {
    for (at, field) in [(8, "branch"), (32, "birth")] {
        let mut key = entry_key(Ino(7), 1);
        key[at] = 1;
        assert!(decode_entry_key(&key).unwrap_err().to_string().contains(field));
    }
    let mut key = removed_key(Ino(7));
    key[8] = 1;
    assert!(decode_removed(&key, &[1, 0]).unwrap_err().to_string().contains("branch"));
    // A later format is not damage.
    let later = decode_removed(&removed_key(Ino(7)), &[FORMAT + 1, 0]).unwrap_err();
    assert!(matches!(later, DecodeError::Unknown { .. }), "{later}");
}
