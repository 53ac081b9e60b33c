//! The diagnosis of damaged rows: each kind of damage is found, with the repair for it.

use super::bed::{Bed, alone, errno, run};
use crate::fsck::diagnosis::{Field, Fix};
use crate::rows::{
    Entry, FsRow, Home, RemovedFile, RemovedState, encode_xattr, entry_key, fs_key, inode_key, removed_key,
    store_key, xattr_key,
};
use crate::store::NewStore;
use crate::{Data, Inode, LAST_INO, MetaError, MetaTarget, ROOT, XATTR_MAX, ops};
use penstock_base::{ArrayId, FindingKind as Kind, Gate, Id128, Ino, MAX_FILE_BYTES};
use penstock_kv::{KvRead, MemKv};
use penstock_session::rows::{LAST_SESSION, ResultRow, SessionRow, result_key, session_key};
use penstock_wire::metadata::{ReadDirReply, ReadDirRequest, SetAttrRequest};
use prost::Message;
use rustix::io::Errno;
use std::rc::Rc;

/// The value of the row of a removed file.
fn queued(ino: Ino) -> Vec<u8> {
    RemovedFile { ino, state: RemovedState::Removed }.encode()
}

/// The inodes and rows that a case may damage: the tree `d/ d/e/ d/f g l`.
struct Rows {
    d: Ino,
    e: Ino,
    f: Ino,
    g: Ino,
    /// Cookies of `d`, `g` in the root, and of `e` in `d`.
    d_at: u64,
    g_at: u64,
    e_at: u64,
}

async fn plant(bed: &Bed) -> Rows {
    let d = bed.add("d/").await.unwrap();
    let e = bed.add("d/e/").await.unwrap();
    let f = bed.add("d/f").await.unwrap();
    let g = bed.add("g").await.unwrap();
    bed.chunks.write(f, 5).await;
    let at = async |dir: Ino, name: &str| {
        let entries = bed.list(dir, 0, 1024).await.0;
        entries.into_iter().find(|(found, _, _)| found == name).unwrap().2
    };
    Rows { d, e, f, g, d_at: at(ROOT, "d/").await, g_at: at(ROOT, "g").await, e_at: at(d, "e/").await }
}

type Damage = Vec<(Vec<u8>, Option<Vec<u8>>)>;

/// Damages rows and expects findings of exactly these kinds, and the fix of the first one.
fn check(
    name: &str,
    kinds: &[Kind],
    fix: impl Fn(&Rows) -> Option<Fix>,
    damage: impl AsyncFn(&Bed, &Rows) -> Damage,
) {
    run(async |bed| {
        let rows = plant(bed).await;
        bed.check("planting");
        for (key, value) in damage(bed, &rows).await {
            bed.put_row(key, value).await;
        }
        let diagnosis = bed.diagnose();
        let found: Vec<Kind> = diagnosis.findings.counts.keys().copied().collect();
        assert_eq!(found, kinds, "{name}: {:?}", diagnosis.findings);
        if let Some(fix) = fix(&rows) {
            let fixes = diagnosis.fixes.get(&kinds[0]).cloned().unwrap_or_default();
            assert!(fixes.contains(&fix), "{name}: {fixes:?}");
        }
    });
}

async fn changed(bed: &Bed, ino: Ino, change: impl Fn(&mut Inode)) -> Damage {
    let mut inode = bed.inode(ino).await.unwrap();
    change(&mut inode);
    vec![(inode_key(ino), Some(inode.encode()))]
}

fn entry(ino: Ino, kind: u32, name: &str) -> Option<Vec<u8>> {
    Some(Entry { ino, kind, name: name.into() }.encode())
}

const FILE: u32 = 0o100_000;
const DIR: u32 = 0o040_000;

#[test]
fn wrong_fields_of_inodes_are_corrected() {
    check(
        "links of a file",
        &[Kind::WrongLinkCount],
        |rows| Some(Fix::Inode(rows.g, Field::Links(1))),
        async |bed, rows| changed(bed, rows.g, |inode| inode.nlink = 4).await,
    );
    check(
        "links of a directory",
        &[Kind::WrongLinkCount],
        |rows| Some(Fix::Inode(rows.d, Field::Links(3))),
        async |bed, rows| changed(bed, rows.d, |inode| inode.nlink = 2).await,
    );
    check(
        "entries",
        &[Kind::WrongEntryCount],
        |rows| Some(Fix::Inode(rows.d, Field::Entries(2))),
        async |bed, rows| changed(bed, rows.d, |inode| inode.entries = 9).await,
    );
    check(
        "parent",
        &[Kind::WrongParent],
        |rows| Some(Fix::Inode(rows.e, Field::Parent(rows.d))),
        async |bed, rows| changed(bed, rows.e, |inode| inode.parent = ROOT).await,
    );
    check(
        "size",
        &[Kind::WrongSize],
        |rows| Some(Fix::Inode(rows.f, Field::Size(6 * 4096))),
        async |bed, rows| changed(bed, rows.f, |inode| inode.size = MAX_FILE_BYTES + 1).await,
    );
    check(
        "data",
        &[Kind::WrongInodeData],
        |rows| Some(Fix::Inode(rows.g, Field::Data)),
        async |bed, rows| changed(bed, rows.g, |inode| inode.data = Data::None).await,
    );
    check(
        "layout",
        &[Kind::WrongLayout],
        |rows| Some(Fix::Inode(rows.g, Field::ChunkBlocks(4))),
        async |bed, rows| changed(bed, rows.g, |inode| inode.layout.chunk_blocks = 8).await,
    );
    check(
        "chunks of a directory",
        &[Kind::ChunksOfNonFile],
        |rows| Some(Fix::MoveChunks(rows.e, false)),
        async |bed, rows| {
            bed.chunks.write(rows.e, 0).await;
            vec![]
        },
    );
    check(
        "number",
        &[Kind::WrongInodeNumber],
        |_| None,
        async |bed, rows| {
            let inode = Inode { ino: Ino(7), ..bed.inode(rows.g).await.unwrap() };
            vec![(inode_key(rows.g), Some(inode.encode()))]
        },
    );
}

#[test]
fn inodes_without_rows_or_names_are_found() {
    check(
        "a row that cannot be read",
        &[Kind::BadInodeRow],
        |rows| Some(Fix::Keep(inode_key(rows.g))),
        async |_, rows| vec![(inode_key(rows.g), Some(vec![2, 2, 3]))],
    );
    check(
        "a row of a later release",
        &[Kind::UnknownRow],
        |_| None,
        async |_, rows| vec![(inode_key(rows.g), Some(vec![99, 2, 3]))],
    );
    check(
        "a file with chunks is gone",
        &[Kind::MissingInode],
        |rows| Some(Fix::Remake(rows.f)),
        async |_, rows| vec![(inode_key(rows.f), None)],
    );
    check(
        "an empty file is gone",
        &[Kind::DanglingEntry],
        |rows| Some(Fix::Drop(entry_key(ROOT, rows.g_at))),
        async |_, rows| vec![(inode_key(rows.g), None)],
    );
    check(
        "a name is gone",
        &[Kind::OrphanInode, Kind::WrongEntryCount],
        |rows| Some(Fix::Reconnect(rows.g)),
        async |_, rows| vec![(entry_key(ROOT, rows.g_at), None)],
    );
    check(
        "the root is gone",
        &[Kind::MissingRoot],
        |_| Some(Fix::MakeRoot),
        async |_, _| vec![(inode_key(ROOT), None)],
    );
    check(
        "a named file is queued",
        &[Kind::NamedAndQueued],
        |rows| Some(Fix::Drop(removed_key(rows.g))),
        async |_, rows| vec![(removed_key(rows.g), Some(queued(rows.g)))],
    );
    check(
        "a missing file is queued",
        &[Kind::QueuedWithoutInode],
        |rows| Some(Fix::Drop(removed_key(Ino(rows.g.0 + 9)))),
        async |_, rows| vec![(removed_key(Ino(rows.g.0 + 9)), Some(queued(rows.g)))],
    );
    check(
        "a bad row of the queue",
        &[Kind::BadQueueRow],
        |_| None,
        async |_, rows| vec![(removed_key(rows.g), Some(Vec::new()))],
    );
    check(
        "a number beyond the reserved ones",
        &[Kind::InodeReservationTooLow],
        |_| None,
        async |bed, rows| {
            let mut fs = FsRow::decode(&bed.kv.get(fs_key()).await.unwrap().unwrap()).unwrap();
            fs.reserved_ino = rows.g.0 - 1;
            vec![(fs_key(), Some(fs.encode()))]
        },
    );
    check(
        "an attribute that is too long",
        &[Kind::BadXattrRow],
        |_| None,
        async |_, rows| vec![(xattr_key(rows.g, b"user.x"), Some(encode_xattr(&vec![0; XATTR_MAX + 1])))],
    );
    check(
        "a bad row of a session",
        &[Kind::BadSessionRow],
        |_| None,
        async |_, _| vec![(session_key(Id128([1; 16])), Some(vec![]))],
    );
    check(
        "a key of no kind",
        &[Kind::UnknownRow],
        |_| None,
        async |_, _| vec![(vec![0x77, 1], Some(vec![]))],
    );
}

#[test]
fn wrong_entries_are_found() {
    check(
        "an entry of another type",
        &[Kind::WrongEntryKind],
        |rows| Some(Fix::Put(entry_key(ROOT, rows.g_at), entry(rows.g, FILE, "g").unwrap())),
        async |_, rows| vec![(entry_key(ROOT, rows.g_at), entry(rows.g, DIR, "g"))],
    );
    check(
        "an entry in another bucket",
        &[Kind::MisplacedEntry],
        |rows| Some(Fix::Rehome(ROOT, rows.g_at + 256)),
        async |_, rows| {
            vec![
                (entry_key(ROOT, rows.g_at), None),
                (entry_key(ROOT, rows.g_at + 256), entry(rows.g, FILE, "g")),
            ]
        },
    );
    check(
        "a name twice",
        &[Kind::DuplicateName, Kind::WrongEntryCount],
        |rows| Some(Fix::Drop(entry_key(ROOT, rows.g_at + 1))),
        async |_, rows| vec![(entry_key(ROOT, rows.g_at + 1), entry(rows.g, FILE, "g"))],
    );
    check(
        "a name that can be none",
        &[Kind::BadEntryName, Kind::OrphanInode],
        |_| None,
        async |_, rows| vec![(entry_key(ROOT, rows.g_at), entry(rows.g, FILE, "g/h"))],
    );
    check(
        "an entry of a file",
        &[Kind::EntryWithoutDirectory],
        |rows| Some(Fix::Drop(entry_key(rows.g, 256))),
        async |_, rows| vec![(entry_key(rows.g, 256), entry(rows.f, FILE, "x"))],
    );
    check(
        "an entry that cannot be read",
        &[Kind::BadEntryRow, Kind::OrphanInode],
        |_| None,
        async |_, rows| vec![(entry_key(ROOT, rows.g_at), Some(vec![]))],
    );
}

#[test]
fn directories_have_one_name_and_no_circle() {
    check(
        "a second name",
        &[Kind::DirectoryExtraName, Kind::WrongLinkCount, Kind::WrongEntryCount],
        |rows| Some(Fix::Drop(entry_key(ROOT, rows.e_at))),
        async |_, rows| vec![(entry_key(ROOT, rows.e_at), entry(rows.e, DIR, "e"))],
    );
    check(
        "a directory in its own directory",
        &[Kind::DirectoryCycle, Kind::WrongLinkCount, Kind::WrongEntryCount],
        |rows| Some(Fix::Drop(entry_key(rows.e, rows.d_at))),
        async |bed, rows| {
            let mut damage = changed(bed, rows.d, |inode| inode.parent = rows.e).await;
            damage.extend([
                (entry_key(ROOT, rows.d_at), None),
                (entry_key(rows.e, rows.d_at), entry(rows.d, DIR, "d")),
            ]);
            damage
        },
    );
}

/// Regression: counts that are too low, links beyond the limit and directories that contain each other
/// stopped the process or kept it busy for ever.
#[test]
fn operations_on_damaged_inodes_end() {
    type Change = fn(&mut Inode, &Rows);
    let fields: [(&str, Change); 9] = [
        ("the last truncate generation", |inode, _| inode.truncations = u64::MAX / 2),
        ("no links", |inode, _| inode.nlink = 0),
        ("one link", |inode, _| inode.nlink = 1),
        ("too many links", |inode, _| inode.nlink = u32::MAX / 2),
        ("no entries", |inode, _| inode.entries = 0),
        ("too many entries", |inode, _| inode.entries = u64::MAX / 2),
        ("the largest size", |inode, _| inode.size = u64::MAX),
        ("another parent", |inode, _| inode.parent = Ino(77)),
        ("a parent below it", |inode, rows| inode.parent = rows.e),
    ];
    for (what, damage) in fields {
        for victim in 0..5 {
            run(async |bed| {
                let rows = plant(bed).await;
                let ino = [ROOT, rows.d, rows.e, rows.f, rows.g][victim];
                let mut damaged = changed(bed, ino, |inode| damage(inode, &rows)).await;
                for (key, value) in damaged.drain(..) {
                    bed.put_row(key, value).await;
                }
                bed.meta.parts.names.forget();
                let _ = serve_all(bed, &rows).await;
                bed.meta.wait_reaped().await;
                let unreadable = bed.diagnose().findings.counts.get(&Kind::BadInodeRow).copied();
                assert_eq!(unreadable, None, "{what} of {ino}: no row became worse");
                assert!(bed.add("other").await.is_ok() || victim == 0, "{what} of {ino}: others are served");
            });
        }
    }
}

/// Operations of every kind around the tree, whose failures do not matter.
async fn serve_all(bed: &Bed, rows: &Rows) -> usize {
    let plain = penstock_wire::metadata::RenameRequest::default;
    let chmod = |ino: Ino| SetAttrRequest { ino: ino.0, mode: Some(0o700), ..Default::default() };
    let truncate = |ino: Ino| SetAttrRequest { ino: ino.0, size: Some(1), ..Default::default() };
    let mut done = 0;
    for ino in [ROOT, rows.d, rows.e, rows.f, rows.g] {
        for request in [chmod(ino), truncate(ino)] {
            done += usize::from(ops::set_attr(&bed.meta.parts, bed.who, request).await.is_ok());
        }
    }
    done += usize::from(bed.link(rows.g, "d/e/h").await.is_ok());
    done += usize::from(bed.add("d/e/x/").await.is_ok());
    for (from, to) in [("d/e", "e"), ("e", "d/e"), ("d/e/x", "d/x"), ("g", "d/g"), ("d", "e"), ("d/g", "g")] {
        done += usize::from(bed.rename(from, to, plain()).await.is_ok());
    }
    for path in ["d/e/h", "d/f", "d/e/x/", "d/x/", "d/e/", "g", "d/", "e/"] {
        done += usize::from(bed.remove(path).await.is_ok());
    }
    done
}

/// Changes the file system's own row, and starts again.
async fn restart_with(bed: &mut Bed, change: impl Fn(&mut FsRow)) {
    let mut row = FsRow::decode(&bed.kv.get(fs_key()).await.unwrap().unwrap()).unwrap();
    change(&mut row);
    bed.put_row(fs_key(), Some(row.encode())).await;
    bed.meta.sync().await.unwrap();
    bed.crash().await;
}

/// Regression: the highest numbers that decoding accepts stopped the process.
#[test]
fn numbers_at_their_end_stop_nothing() {
    run(async |bed| {
        restart_with(bed, |row| row.last_session = LAST_SESSION).await;
        assert_eq!(bed.who.session, 1, "session numbers begin again");
        restart_with(bed, |_| {}).await;
        assert_eq!(bed.who.session, 2);
        bed.check("sessions");
    });
    for reserved in [0, 1, ROOT.0 - 1, LAST_INO.0 + 1, u64::MAX >> 1] {
        run(async |bed| {
            let before = bed.add("before").await.unwrap();
            restart_with(bed, |row| row.reserved_ino = reserved).await;
            let after = bed.add("after").await.unwrap();
            assert!(after > before && after <= LAST_INO, "{reserved}: {after}");
            bed.check("inodes");
        });
    }
    run(async |bed| {
        restart_with(bed, |row| row.reserved_ino = LAST_INO.0).await;
        assert_eq!(errno(bed.add("f").await), Some(Errno::NOSPC));
        bed.check("the last inode");
    });
}

/// Regression: a start that did not find the row of the file system made another one over the root directory.
/// And rows of another array pass for nobody's.
#[test]
fn a_store_of_other_arrays_or_without_its_first_rows_is_not_opened() {
    let elsewhere = Home { data: ArrayId(Id128([9; 16])), ..Home::default() };
    for (lost, home, why) in [
        (Some(fs_key()), Home::default(), "it is missing"),
        (Some(store_key()), Home::default(), "it is missing"),
        (None, elsewhere, "the data is that of array 0909"),
    ] {
        run(async |bed| {
            bed.add("f").await.unwrap();
            if let Some(lost) = &lost {
                bed.put_row(lost.clone(), None).await;
            }
            bed.meta.stop();
            let (env, gate) = (bed.world.env(), Rc::new(Gate::default()));
            let opened = MetaTarget::open(
                &env,
                bed.kv.clone(),
                bed.chunks.clone(),
                alone(),
                gate,
                NewStore { name: "test", home, ..NewStore::default() },
            )
            .await;
            let error = opened.err().expect("rows would be lost").to_string();
            assert!(error.contains(why), "{error}");
            let checked = crate::check_store(&*bed.kv, home, || true).await;
            assert_eq!(
                checked.map_err(|error| error.to_string()),
                Err(error),
                "before anything else is opened"
            );
        });
    }
    run(async |bed| {
        let empty = MemKv::new(1 << 20);
        for has_data in [false, true] {
            let checked = crate::check_store(&*empty, Home::default(), || has_data).await;
            assert_eq!(checked.is_err(), has_data, "what no row names would be discarded");
        }
        bed.check("nothing happened");
    });
}

/// Requests name a session by its number.
#[test]
fn of_two_sessions_with_one_number_one_is_dropped() {
    run(async |bed| {
        let row = SessionRow { number: 1, lease_ms: 30_000, ..SessionRow::default() }.encode();
        let keys = [4, 5].map(|byte| session_key(Id128([byte; 16])));
        for key in &keys {
            bed.put_row(key.clone(), Some(row.clone())).await;
        }
        let diagnosis = bed.diagnose();
        assert_eq!(diagnosis.findings.counts.keys().copied().collect::<Vec<_>>(), [Kind::BadSessionRow]);
        assert_eq!(diagnosis.fixes[&Kind::BadSessionRow], [Fix::Drop(keys[1].clone())]);
    });
}

/// Regression: a start or a repair that met a session above all numbers stopped the process.
#[test]
fn sessions_above_all_numbers_are_dropped() {
    for (session, kind) in
        [(1u64 << 63, Kind::BadSessionRow), ((1 << 63) - 1, Kind::SessionReservationTooLow)]
    {
        run(async |bed| {
            let key = Id128([9; 16]);
            let mut row = SessionRow { number: 1, lease_ms: 30_000, ..SessionRow::default() }.encode();
            row[1..9].copy_from_slice(&session.to_le_bytes());
            bed.put_row(session_key(key), Some(row.clone())).await;
            let result = ResultRow { session: key, slot: 0, sequence: 64, body: Vec::new() };
            bed.put_row(result_key(key, 0), Some(result.encode())).await;
            let diagnosis = bed.diagnose();
            assert_eq!(diagnosis.findings.counts.keys().copied().collect::<Vec<_>>(), [kind]);
            let fix = match kind {
                Kind::BadSessionRow => Fix::Drop(session_key(key)),
                _ => Fix::ReserveSessions(session),
            };
            assert!(diagnosis.fixes[&kind].contains(&fix), "{:?}", diagnosis.fixes);
            bed.meta.sync().await.unwrap();
            bed.crash().await;
            if kind == Kind::SessionReservationTooLow {
                bed.meta.parts.names.turn().await.reserve_sessions(session).await.unwrap();
                bed.crash().await;
            }
            bed.add("f").await.unwrap();
        });
    }
}

/// Regression: what was done to an inode whose row says that it is another one was done to the other one.
#[test]
fn a_row_that_says_another_number_changes_no_other_inode() {
    for change in ["look", "chmod", "truncate", "unlink"] {
        run(async |bed| {
            let (damaged, healthy) = (bed.add("damaged").await.unwrap(), bed.add("healthy").await.unwrap());
            for ino in [damaged, healthy] {
                bed.chunks.write(ino, 0).await;
            }
            let known = bed.inode(healthy).await.unwrap();
            let wrong = Inode { ino: healthy, size: 9, ..bed.inode(damaged).await.unwrap() };
            bed.put_row(inode_key(damaged), Some(wrong.encode())).await;
            bed.meta.sync().await.unwrap();
            bed.crash().await;
            let request = match change {
                "chmod" => SetAttrRequest { ino: damaged.0, mode: Some(0o600), ..Default::default() },
                _ => SetAttrRequest { ino: damaged.0, size: Some(0), ..Default::default() },
            };
            let done = match change {
                "look" => bed.inode(damaged).await.map(drop),
                "unlink" => bed.remove("damaged").await,
                _ => ops::set_attr(&bed.meta.parts, bed.who, request).await.map(drop),
            };
            assert!(matches!(done, Err(MetaError::Row(_))), "{change}: {done:?}");
            bed.meta.wait_reaped().await;
            assert_eq!(bed.inode(healthy).await.unwrap(), known, "{change}");
            assert_eq!(bed.chunks.blocks(healthy), [0], "{change}");
        });
    }
}

/// A row that names another inode is not that inode, in a listing with attributes either: the kernel opens
/// what the listing says.
#[test]
fn a_listing_gives_no_name_the_attributes_of_another_inode() {
    run(async |bed| {
        let rows = plant(bed).await;
        let inode = Inode { ino: rows.f, ..bed.inode(rows.g).await.unwrap() };
        bed.put_row(inode_key(rows.g), Some(inode.encode())).await;
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        assert!(matches!(bed.inode(rows.g).await, Err(MetaError::Row(_))), "by its number it is an error");
        let request = ReadDirRequest { dir: ROOT.0, after: 0, limit: 100, attributes: true, lease: false };
        let reply = ops::read_dir(&bed.meta.parts, bed.who, request).await.unwrap();
        for entry in ReadDirReply::decode(&reply[..]).unwrap().entries {
            if let Some(attr) = entry.attr {
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                assert_eq!(attr.ino, entry.ino, "the name {name:?} leads to another inode");
            }
        }
    });
}

/// One inode that cannot be read stops no listing of its directory.
#[test]
fn an_unreadable_inode_hides_no_other_name_of_its_directory() {
    run(async |bed| {
        let rows = plant(bed).await;
        let mut row = bed.inode(rows.g).await.unwrap().encode();
        row.truncate(20);
        bed.put_row(inode_key(rows.g), Some(row)).await;
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        let request = ReadDirRequest { dir: ROOT.0, after: 0, limit: 100, attributes: true, lease: false };
        let listed = ops::read_dir(&bed.meta.parts, bed.who, request).await;
        assert!(listed.is_ok(), "{listed:?}");
    });
}
