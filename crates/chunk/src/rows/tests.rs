use super::*;
use crate::tests::{chunk_key, extent, map_row};
use penstock_base::{Branch, Ino, TargetId};

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn rows_come_back() {
    let key = ChunkKey { file: FileId { branch: Branch(1), ino: Ino(2) }, index: 3 };
    assert_eq!(ChunkKey::decode(&key.row(Birth(4))), Ok((key, Birth(4))));
    let extents = [extent(0, 2, 9), Extent { preallocated: true, ..extent(5, 1, 77) }];
    assert_eq!(decode(&map_row(&extents)).as_deref(), Ok(&extents[..]));
    assert!(decode(&map_row(&[extents[1], extents[0]])).is_err());
    assert!(decode(&[2]).is_err());
    let older = Extent { birth: Birth(2), ..extents[0] };
    let row = MapRow { truncations: 7, extents: vec![older, Extent { birth: Birth(4), ..extents[1] }] };
    assert_eq!(MapRow::decode(&row.encode(Birth(4)), Birth(4)), Ok(row.clone()));
    let error = MapRow::decode(&row.encode(Birth(4)), Birth(2)).unwrap_err().to_string();
    assert!(error.contains("not older than its row"), "{error}");
}

/// The rows of a loan, which are refused if they name no blocks. A chunk whose blocks are somewhere else is
/// refused by name, and damage in its row is told from that.
#[test]
fn loans_are_as_in_the_first_release() {
    let loan = Loan { stripe: 9, stripes: 3, gaps: vec![(0, 1), (4, 2)] };
    let gaps = "02000000000000000100000004000000020000 00".replace(' ', "");
    let bits = "0500000000000000".to_owned() + "00000000000000000100000000000000";
    let key = LentKey { borrower: TargetId(5), number: 77 };
    let lent = Lent { group: 6, loan: loan.clone(), is_restored: true };
    assert_eq!(hex(&key.row()), "240000000000000005000000000000004d");
    assert_eq!(hex(&lent.encode()), format!("01010600000000000000090000000000000003000000{gaps}"));
    assert_eq!((LentKey::decode(&key.row()), Lent::decode(&lent.encode())), (Ok(key), Ok(lent.clone())));
    let borrowed = Borrowed { lender: TargetId(4), number: 77, loan };
    assert_eq!(hex(&Borrowed::key(6)), "280000000000000006");
    assert_eq!(
        hex(&borrowed.encode(&[5, 0, 1, 0])),
        format!("01040000004d00000000000000090000000000000003000000{gaps}03000000{bits}")
    );
    assert_eq!(Borrowed::group_of(&Borrowed::key(6)), Ok(6));
    let words = [vec![5, 0, 1], vec![0; GROUP_WORDS - 3]].concat();
    assert_eq!(Borrowed::decode(&borrowed.encode(&[5, 0, 1, 0])), Ok((borrowed.clone(), words)));
    let (of_lender, of_borrower) = (lent.encode(), borrowed.encode(&[5]));
    for len in 0..of_lender.len() {
        assert!(Lent::decode(&of_lender[..len]).is_err(), "the first {len} bytes");
    }
    for len in 0..of_borrower.len() {
        assert!(Borrowed::decode(&of_borrower[..len]).is_err(), "the first {len} bytes");
    }
    let with = |loan: Loan| Lent::decode(&Lent { group: 6, loan, is_restored: false }.encode());
    for (stripe, stripes, gaps) in [
        (9, 0, vec![]),
        (u64::MAX, 1, vec![]),
        (9, 3, vec![(4, 2), (0, 1)]),
        (9, 3, vec![(0, 2), (2, 1)]),
        (9, 3, vec![(1, 0)]),
        (9, 3, vec![(u32::MAX, 1)]),
    ] {
        let loan = Loan { stripe, stripes, gaps };
        assert!(with(loan.clone()).is_err(), "{loan:?}");
    }
    let mut elsewhere = map_row(&[]);
    elsewhere[1] = 1;
    let error = decode(&elsewhere).unwrap_err();
    assert!(matches!(error, DecodeError::Unknown { field: "place of a chunk", found: 1, .. }), "{error}");
    assert!(!matches!(decode(&elsewhere[..9]), Err(DecodeError::Unknown { .. }) | Ok(_)), "it is damaged");
}

#[test]
fn counters_are_as_in_the_first_release() {
    let sequence = Counter::Sequence { family: 9, sequence: 7, closed: 6 };
    for (counter, wanted_key, wanted) in [
        (sequence, "250000000000000009", "0107000000000000000600000000000000"),
        (
            Counter::Loans { last: 77, forgotten: 6, has_dropped: true },
            "26",
            "014d00000000000000060000000000000001",
        ),
    ] {
        let (key, value) = counter.encode();
        assert_eq!((hex(&key).as_str(), hex(&value).as_str()), (wanted_key, wanted));
        assert_eq!(Counter::decode(&key, &value), Ok(counter));
        let ranges = [all_reserved(), all_counters()];
        assert_eq!(ranges.iter().filter(|(from, until)| *from <= key && key < *until).count(), 1);
        for len in 0..value.len() {
            assert!(Counter::decode(&key, &value[..len]).is_err(), "the first {len} bytes");
        }
        let later = Counter::decode(&key, &[&value[..], &[0]].concat());
        assert!(matches!(later, Err(DecodeError::Unknown { .. })), "{later:?}");
        assert!(Counter::decode(&key[..key.len() - 1], &value).is_err());
    }
    let (key, value) = Counter::Sequence { family: 9, sequence: 7, closed: 7 }.encode();
    assert!(Counter::decode(&key, &value).is_err(), "what is written now is closed");
    let (key, value) = Counter::Loans { last: 6, forgotten: 7, has_dropped: false }.encode();
    assert!(Counter::decode(&key, &value).is_err(), "loans that were never given");
}

#[test]
fn rows_of_files_and_accounts_are_as_in_the_first_release() {
    let owner = Owner { uid: 1000, gid: 100, project: 7 };
    let file = FileId::main(Ino((1 << 40) | 7));
    let (zero, first) = ("0000000000000000", "fffffffffffffffe");
    let key = FileRow::key(file, Birth::FIRST);
    assert_eq!(hex(&key), format!("22{zero}0000010000000007{first}"));
    assert_eq!(decode_file_key(&key), Ok((file, Birth::FIRST)));
    let row = FileRow { truncations: 3, blocks: 258, owner, owner_number: 0 };
    let ordered = FileRow { owner_number: 9, ..row };
    assert_eq!(FileRow::decode(&ordered.encode()), Ok(ordered));
    let wanted = "01 0300000000000000 0000000000000000 ffffffffffffffff 0201000000000000 \
                  0000000000000000 e8030000 64000000 07000000";
    assert_eq!(hex(&row.encode()), wanted.replace(' ', ""));
    assert_eq!(FileRow::decode(&row.encode()), Ok(row));
    for (at, field) in [(9, "void truncate generation"), (17, "first void block")] {
        let mut later = row.encode();
        later[at] ^= 1;
        let error = FileRow::decode(&later).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let most = FileRow { blocks: MOST_BLOCKS, ..row };
    assert_eq!(FileRow::decode(&most.encode()), Ok(most));
    let mut more = most.encode();
    more[25] = 1;
    assert!(FileRow::decode(&more).is_err(), "a sum of these would overflow");

    let account = owner.account(Branch(1));
    assert_eq!(hex(&account), "230000000000000001000003e80000006400000007");
    assert_eq!(decode_account_key(&account), Ok((Branch(1), owner)));
    assert_eq!(hex(&encode_account(258)), "010201000000000000");
    assert_eq!(decode_account(&encode_account(258)), Ok(258));
    for len in 0..account.len() {
        assert!(decode_account_key(&account[..len]).is_err() && decode_file_key(&key[..len]).is_err());
    }
    for len in 0..row.encode().len() {
        assert!(FileRow::decode(&row.encode()[..len]).is_err(), "the first {len} bytes");
    }
    assert!(all_files().0 <= key && key < all_files().1);
    assert!(all_accounts().0 <= account && account < all_accounts().1);
}

fn decode(value: &[u8]) -> Result<Vec<Extent>, DecodeError> {
    MapRow::decode(value, Birth::FIRST).map(|row| row.extents)
}

#[test]
fn keys_and_rows_are_as_in_the_first_release() {
    let key = ChunkKey { file: FileId::main(Ino((1 << 40) | 7)), index: 3 };
    let (zero, first) = ("0000000000000000", "fffffffffffffffe");
    assert_eq!(hex(&key.row(Birth::FIRST)), format!("20{zero}00000100000000070000000000000003{first}"));
    assert_eq!(hex(&group_key(0x0102)), "210000000000000102");
    assert_eq!(decode_group_key(&group_key(0x0102)), Some(0x0102));

    let extents = [extent(0, 2, 9), extent(5, 1, 1 << 40)];
    let wanted = "02 00 0000000000000000 02000000 00000000 02000000 0900000000000000 00 \
                  05000000 01000000 0000000000010000 00"
        .replace(' ', "");
    assert_eq!(hex(&map_row(&extents)), wanted);
    assert_eq!(decode(&map_row(&extents)).as_deref(), Ok(&extents[..]));
    assert_eq!(hex(&map_row(&[])), "0200000000000000000000000000");
    let preallocated = [Extent { preallocated: true, ..extent(5, 1, 9) }];
    let wanted = "02 00 0000000000000000 01000000 05000000 01000000 0900000000000000 01".replace(' ', "");
    assert_eq!(hex(&map_row(&preallocated)), wanted);
    let mut unknown = map_row(&preallocated);
    unknown[30] = 2;
    assert!(decode(&unknown).unwrap_err().to_string().contains("state of an extent"));

    let words = [1, 0x0102_0304_0506_0708];
    assert_eq!(hex(&encode_group(&words)), "0201000000000000000807060504030201");
    assert_eq!(decode_group(&encode_group(&words), 2).as_deref(), Ok(&words[..]));

    let counts = [Counts { used: 0x0102, empty: 3 }, Counts { used: 0, empty: 0x0405 }];
    assert_eq!(hex(&counts_key(0x0102)), "270000000000000102");
    assert_eq!(hex(&encode_counts(&counts)), "010201030000000504");
    assert_eq!(decode_counts(&encode_counts(&counts), 2).as_deref(), Ok(&counts[..]));
    for groups in [0, 1, 3] {
        assert!(decode_counts(&encode_counts(&counts), groups).is_err(), "{groups} groups");
    }
    assert_eq!(decode_counts_key(&counts_key(7)), Some(7));
    assert_eq!(decode_counts_key(&group_key(7)), None);
}

/// Regression test: the ends of extents were computed with sums that may overflow.
#[test]
fn extents_without_an_end_are_refused() {
    let good = extent(1, 1, 1);
    for bad in [
        Extent { first: u32::MAX, ..good },
        Extent { count: u32::MAX, ..good },
        Extent { block: u64::MAX, ..good },
    ] {
        assert!(decode(&map_row(&[bad, good])).is_err(), "{bad:?}");
        assert!(decode(&map_row(&[bad])).is_err(), "{bad:?}");
    }
}

/// Regression test: the end of a range of keys was computed as the inode number plus one, which
/// overflowed for the last.
#[test]
fn the_last_inode_has_a_range_of_chunks() {
    let last = ChunkKey { file: FileId::main(Ino(u64::MAX)), index: u64::MAX };
    let (from, until) = map_range(last.file, 7);
    assert!(from < last.row(Birth(u64::MAX)) && last.row(Birth(u64::MAX)) < until);
    assert!(
        until <= ChunkKey { file: FileId { branch: Branch(1), ino: Ino(0) }, index: 0 }.row(Birth::FIRST)
    );
    let (_, until) = map_range(FileId::main(Ino(6)), 0);
    assert!(until <= ChunkKey { file: FileId::main(Ino(7)), index: 0 }.row(Birth::FIRST));
    assert_eq!(decode_group_key(&[&[MAP], &group_key(1)[1..]].concat()), None);
}

#[test]
fn bytes_that_are_no_row_are_refused() {
    let map = map_row(&[extent(0, 2, 9), extent(5, 1, 77)]);
    let changed = |at: usize, byte: u8| {
        let mut row = map.clone();
        row[at] = byte;
        row
    };
    // Offsets in a row: 0 format, 1 place, 2 truncate generation, 10 count, then extents of 17 bytes with the
    // state in byte 16.
    for (what, row, unknown) in [
        ("nothing", vec![], false),
        ("another format", changed(0, 1), true),
        ("another place", changed(1, 2), true),
        ("a generation above 2^63", changed(9, 0xff), false),
        ("more extents than bytes", changed(10, 3), false),
        ("fewer extents than bytes", changed(10, 1), true),
        ("very many extents", changed(13, 0xff), false),
        ("an unknown state", changed(14 + 16, 2), true),
        ("extents in the wrong order", changed(14, 6), false),
        ("extents that overlap", changed(14 + 17, 1), false),
    ] {
        let error = decode(&row).expect_err(what);
        assert_eq!(matches!(error, DecodeError::Unknown { .. }), unknown, "{what}: {error}");
    }
    for len in 0..map.len() {
        assert!(decode(&map[..len]).is_err(), "the first {len} bytes");
    }
    let group = encode_group(&[1, 2]);
    for len in 0..group.len() {
        assert!(decode_group(&group[..len], 2).is_err(), "the first {len} bytes");
    }
    assert!(decode_group(&group, 3).is_err(), "a group has all its words");
}

#[test]
fn keys_of_other_rows_are_refused() {
    let key = chunk_key(2, 3).row(Birth(4));
    assert_eq!(ChunkKey::decode(&key), Ok((chunk_key(2, 3), Birth(4))));
    for len in 0..key.len() {
        assert!(ChunkKey::decode(&key[..len]).is_err(), "the first {len} bytes");
        assert_eq!(decode_group_key(&key[..len]), None, "the first {len} bytes");
    }
    let longer = [&key[..], &[0]].concat();
    let other_tag = [&[GROUP], &key[1..]].concat();
    for key in [longer, other_tag] {
        assert!(ChunkKey::decode(&key).is_err(), "{key:?}");
    }
    let group = group_key(5);
    for len in 0..group.len() {
        assert_eq!(decode_group_key(&group[..len]), None, "the first {len} bytes");
    }
    assert_eq!(decode_group_key(&[&group[..], &[0]].concat()), None);
}

#[test]
fn a_range_has_the_rows_of_its_file_from_its_chunk_on() {
    for (ino, index) in [(2, 0), (2, 7), (255, 1), (u64::MAX, 0), (2, u64::MAX)] {
        let (from, until) = map_range(FileId::main(Ino(ino)), index);
        let (first, end) = all_maps();
        assert!(first <= from && from < until && until <= end, "{ino} from {index} on");
        for (other, at, birth) in [(ino, index, 0), (ino, index, 9), (ino, u64::MAX, u64::MAX)] {
            let row = chunk_key(other, at).row(Birth(birth));
            assert!(from <= row && row < until, "chunk {at} of {other} is in the range");
        }
        let before = index.checked_sub(1).map(|index| chunk_key(ino, index).row(Birth(u64::MAX)));
        assert!(before.is_none_or(|row| row < from), "{ino} from {index} on");
        let next = ino.checked_add(1).map(|ino| chunk_key(ino, 0).row(Birth::FIRST));
        assert!(next.is_none_or(|row| until <= row), "{ino} from {index} on");
    }
}
