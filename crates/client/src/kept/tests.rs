use super::*;
use crate::sent::SentChanges;
use futures_util::FutureExt;
use penstock_base::ErrorKind;
use penstock_wire::metadata::{FoundNames, Time};

const FILE: FileId = FileId::of_numbers(0, 5);
const OTHER: FileId = FileId::of_numbers(0, 6);

fn kept() -> Kept {
    let kept = Kept::default();
    kept.begin();
    kept
}

/// Blocks that are filled with a byte each.
fn blocks(bytes: &[u8]) -> Buf {
    Buf::copy_from(&bytes.iter().flat_map(|byte| [*byte; BLOCK_BYTES]).collect::<Vec<_>>())
}

/// First block and first byte of each block that is kept of a file, without changes of space.
fn contents(kept: &Kept, file: FileId) -> Vec<(u64, u8)> {
    let mut found = Vec::new();
    for write in kept.writes(file) {
        if let KeptWrite::Blocks(first, data) = write {
            found.extend((first..).zip(data.chunks(BLOCK_BYTES).map(|block| block[0])));
        }
    }
    found
}

#[test]
fn the_last_contents_of_each_block_are_kept() {
    let kept = kept();
    kept.add_blocks((FILE, 3), 10, &blocks(&[1, 2, 3, 4, 5]));
    kept.add_blocks((FILE, 3), 12, &blocks(&[9]));
    assert_eq!(contents(&kept, FILE), [(10, 1), (11, 2), (12, 9), (13, 4), (14, 5)]);
    kept.add_blocks((FILE, 3), 8, &blocks(&[6, 7, 8]));
    assert_eq!(contents(&kept, FILE)[..4], [(8, 6), (9, 7), (10, 8), (11, 2)]);
    kept.add_space((FILE, 3), SpaceChange::Zero, 9..12);
    kept.add_space((FILE, 3), SpaceChange::Reserve, 12..14);
    assert_eq!(contents(&kept, FILE), [(8, 6), (12, 9), (13, 4), (14, 5)]);
    // Changes of space come before all blocks.
    let kinds: Vec<bool> =
        kept.writes(FILE).iter().map(|write| matches!(write, KeptWrite::Space(..))).collect();
    assert!(kinds.is_sorted_by(|one, other| one >= other), "{kinds:?}");
    kept.truncate(FILE, 13, true);
    assert_eq!(contents(&kept, FILE), [(8, 6), (12, 9)]);
    let spaces = kept.writes(FILE).iter().filter(|write| matches!(write, KeptWrite::Space(..))).count();
    assert_eq!(spaces, 2, "both begin before the new end");
    kept.truncate(FILE, 0, true);
    assert!(kept.writes(FILE).is_empty() && kept.files().is_empty());
    assert_eq!(kept.bytes.get(), 0);
    assert!(kept.files.borrow().is_empty(), "nothing is left of the file");
}

/// Regression: the space that fallocate reserved behind the end of a file was forgotten when it then set the
/// size.
#[test]
fn a_larger_size_leaves_reserved_space() {
    let kept = kept();
    kept.add_blocks((FILE, 3), 0, &blocks(&[1, 2]));
    kept.add_space((FILE, 3), SpaceChange::Reserve, 0..100);
    let reserved = || {
        kept.writes(FILE).into_iter().find_map(|write| match write {
            KeptWrite::Space(SpaceChange::Reserve, blocks) => Some(blocks),
            _ => None,
        })
    };
    kept.truncate(FILE, 1, false);
    assert_eq!((reserved(), contents(&kept, FILE)), (Some(0..100), vec![(0, 1)]));
    kept.truncate(FILE, 1, true);
    assert_eq!(reserved(), Some(0..1));
}

#[test]
fn what_is_kept_of_a_file_knows_its_generation() {
    let kept = kept();
    assert_eq!(kept.truncations(FILE), 0, "nothing is kept of it");
    kept.add_blocks((FILE, 3), 0, &blocks(&[1]));
    kept.add_space((FILE, 2), SpaceChange::Reserve, 0..2);
    assert_eq!(kept.truncations(FILE), 3);
}

#[test]
fn blocks_are_forgotten_once_a_sync_covers_their_commit() {
    let (kept, sent) = (kept(), SentChanges::default());
    kept.add_blocks((FILE, 3), 0, &blocks(&[1, 1, 1]));
    let mark = kept.mark(FILE);
    assert!(kept.is_uncommitted(FILE));
    kept.add_blocks((FILE, 3), 1, &blocks(&[2]));
    kept.committed(FILE, mark, sent.file(FILE));
    assert!(kept.is_uncommitted(FILE), "a write came after the mark");
    let covered = sent.cover();
    // This commit comes after the sync has begun.
    kept.committed(FILE, kept.mark(FILE), sent.file(FILE));
    assert!(!kept.is_uncommitted(FILE));
    kept.are_durable(covered.are_durable().1);
    assert_eq!(contents(&kept, FILE), [(1, 2)]);
    kept.are_durable(sent.cover().are_durable().1);
    assert!(kept.files().is_empty() && kept.bytes.get() == 0);
    // A mark from before means nothing to what is written now.
    kept.add_blocks((FILE, 3), 0, &blocks(&[3]));
    kept.committed(FILE, mark, sent.file(FILE));
    assert!(kept.is_uncommitted(FILE));
}

#[test]
fn a_small_part_keeps_no_large_buffer_alive() {
    let kept = kept();
    for round in 0..100 {
        // Each write leaves one block of the one before.
        kept.add_blocks((FILE, 3), round, &blocks(&[round as u8; 64]));
    }
    assert_eq!(contents(&kept, FILE).len(), 163);
    assert!(kept.bytes.get() <= 2 * 163 * BLOCK, "{} bytes", kept.bytes.get());
    kept.forget_file(FILE);
    assert_eq!(kept.bytes.get(), 0);
}

fn change(number: u64) -> metadata::Change {
    metadata::Change { number, time: Time::from_ns(7), ..metadata::Change::default() }
}

#[test]
fn changes_are_repeated_in_the_order_of_the_service() {
    let (kept, sent) = (kept(), SentChanges::default());
    let ids = |sequence| (Kind::Make, Branch::MAIN, sequence);
    kept.add_change(ids(65), b"later", (change(9), 7), sent.names());
    kept.add_change(ids(66), b"first", (change(8), 6), sent.names());
    let all = kept.changes();
    let found: Vec<_> = all.iter().map(|kept| (kept.change.number, kept.made, &kept.body[..])).collect();
    assert_eq!(found, [(8, 6, &b"first"[..]), (9, 7, b"later")]);
    kept.forget_change(&all[0]);
    assert_eq!(kept.changes().len(), 1);
    let (_, upto) = sent.cover().are_durable();
    kept.are_durable(upto);
    assert!(kept.changes().is_empty() && kept.bytes.get() == 0);
}

/// The service compares some requests with the time before a restart, which are not those of the time after.
#[test]
fn a_repeat_needs_the_blocks_of_its_file_and_nothing_of_the_time_before() {
    let (kept, sent) = (kept(), SentChanges::default());
    let set = |size, grow| SetAttrRequest {
        ino: 5,
        size,
        grow,
        mode: Some(0o600),
        known_truncations: Some(3),
        ..SetAttrRequest::default()
    };
    let found = |moved, replaced| Some(FoundNames { moved, replaced });
    let rename = |found| RenameRequest { dir: 1, start: 3, found, ..RenameRequest::default() };
    // The file, if its blocks are needed, and if some of them go.
    for (kind, body, wanted) in [
        (Kind::SetAttr, set(None, false).encode_to_vec(), (Some(FILE), false, false)),
        (Kind::SetAttr, set(Some(9), true).encode_to_vec(), (Some(FILE), true, false)),
        (Kind::SetAttr, set(Some(9), false).encode_to_vec(), (Some(FILE), true, true)),
        (Kind::Rename, rename(found(6, 5)).encode_to_vec(), (Some(OTHER), true, false)),
        (Kind::Rename, rename(found(6, 0)).encode_to_vec(), (None, false, false)),
        (Kind::Rename, rename(None).encode_to_vec(), (None, false, false)),
        (
            Kind::SetXattr,
            XattrRequest { ino: 6, ..XattrRequest::default() }.encode_to_vec(),
            (Some(OTHER), false, false),
        ),
        (Kind::Unlink, Vec::new(), (None, false, false)),
    ] {
        kept.add_change((kind, Branch::MAIN, 64), &body, (change(1), 0), sent.names());
        let repeated = kept.changes().pop().unwrap();
        assert_eq!((repeated.file, repeated.needs_blocks, repeated.drops_blocks), wanted, "{kind:?}");
        match kind {
            Kind::SetAttr => {
                let request = SetAttrRequest::decode(&repeated.body[..]).unwrap();
                assert_eq!((request.known_truncations, request.mode), (None, Some(0o600)));
            }
            Kind::Rename => {
                let request = RenameRequest::decode(&repeated.body[..]).unwrap();
                assert_eq!((request.start, request.found, request.dir), (0, None, 1));
            }
            _ => assert_eq!(repeated.body, body),
        }
        kept.forget_change(&repeated);
    }
}

#[test]
fn a_full_memory_makes_writers_wait_for_a_sync() {
    let kept = kept();
    kept.set_most(2 * BLOCK);
    assert!(kept.pressed().now_or_never().is_none());
    kept.add_blocks((FILE, 3), 0, &blocks(&[1]));
    assert!(kept.pressed().now_or_never().is_some(), "at half of the bound");
    assert_eq!(kept.room().now_or_never(), Some(Ok(())));
    kept.add_blocks((FILE, 3), 1, &blocks(&[1]));
    let mut waits = Box::pin(kept.room());
    assert!((&mut waits).now_or_never().is_none());
    let full = Failure::new(ErrorKind::NoSpace, "full");
    kept.note_sync(Err(full.clone()));
    assert_eq!(waits.now_or_never(), Some(Err(full)), "the sync has made no room");
    let mut waits = Box::pin(kept.room());
    assert!((&mut waits).now_or_never().is_none());
    kept.forget_file(FILE);
    kept.note_sync(Ok(()));
    assert_eq!(waits.now_or_never(), Some(Ok(())));
}

#[test]
fn a_client_of_the_process_of_the_service_keeps_nothing() {
    let kept = Kept::default();
    kept.add_blocks((FILE, 3), 0, &blocks(&[1]));
    kept.add_space((FILE, 3), SpaceChange::Zero, 0..1);
    let sent = SentChanges::default();
    kept.add_change((Kind::Unlink, Branch::MAIN, 64), b"", (change(1), 0), sent.names());
    assert!(!kept.is_on() && kept.files().is_empty() && kept.changes().is_empty());
    assert_eq!((kept.mark(FILE), kept.bytes.get()), (None, 0));
}
