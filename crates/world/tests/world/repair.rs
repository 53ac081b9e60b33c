//! Tests of repair: each kind of damage is planted, found and repaired, also with power cuts in between.

use crate::machine::{Machine, Site};
use crate::model::{make_file, read_all};
use crate::plant::{Known, Rows};
use penstock_array::Volume;
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Branch, Buf, ErrorKind, FileId, FindingKind as Kind, crc32c_blocks};
use penstock_chunk::Owner;
use penstock_chunk::copies::anchor_stripes;
use penstock_node::FsCheckReport;
use penstock_sim::{CutPlan, World};
use penstock_wire::metadata::{
    LinkRequest, MakeRequest, NameRequest, ReadDirRequest, SetAttrRequest, XattrRequest,
};
use penstock_wire::{Frame, Kind as WireKind};
use prost::Message;
use std::collections::BTreeMap;
use std::time::Duration;

const DIRECTORY: u32 = 0o040_755;

fn bytes(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at / 7) as u8 ^ seed.wrapping_mul(31) | 1).collect()
}

async fn make_dir(machine: &Machine, dir: FileId, name: &str) -> FileId {
    let request =
        MakeRequest { dir: dir.ino.0, name: name.into(), mode: DIRECTORY, ..MakeRequest::default() };
    machine.client.make(Branch::MAIN, request).await.unwrap().file()
}

async fn fill(machine: &Machine) -> Known {
    let client = &machine.client;
    let root = client.root();
    let dir = make_dir(machine, root, "dir").await;
    let inner = make_dir(machine, dir, "inner").await;
    let other = make_dir(machine, root, "other").await;
    let keep = make_file(machine, "keep").await.unwrap();
    let victim = make_file(machine, "victim").await.unwrap();
    for (id, seed) in [(keep, 1), (victim, 2)] {
        client.write(id, 0, &bytes(seed, 20_000)).await.unwrap();
        client.fsync(id).await.unwrap();
    }
    client.link(keep, inner, b"second").await.unwrap();
    let xattr =
        XattrRequest { ino: keep.ino.0, name: "user.a".into(), value: "1".into(), ..XattrRequest::default() };
    client.set_xattr(Branch::MAIN, xattr).await.unwrap();
    for id in [keep, victim] {
        client.release(id).await.unwrap();
    }
    client.sync_all().await.unwrap();
    Known { root, keep, victim, dir, inner, other }
}

fn store() -> (Site, Known) {
    let site = Site::new();
    let world = World::new(80);
    let known = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let known = fill(&machine).await;
        machine.stop().await;
        known
    });
    world.destroy();
    (site, known.unwrap())
}

/// Every path with its inode, and the contents of files.
pub async fn walk(machine: &Machine) -> BTreeMap<String, (u64, Option<Vec<u8>>)> {
    let mut found = BTreeMap::new();
    let mut waiting = vec![(machine.client.root(), String::new())];
    while let Some((dir, path)) = waiting.pop() {
        let request =
            ReadDirRequest { dir: dir.ino.0, after: 0, limit: 1000, attributes: false, lease: false };
        for entry in machine.client.read_dir(Branch::MAIN, request).await.unwrap().entries {
            let name = String::from_utf8(entry.name.clone()).unwrap();
            // The name must also be found by a lookup, not only in the listing.
            let attr = machine.client.lookup(dir, &entry.name).await.unwrap();
            assert_eq!(attr.ino, entry.ino);
            let path = format!("{path}/{name}");
            let contents = match entry.kind {
                0o040_000 => {
                    waiting.push((entry.file(), path.clone()));
                    None
                }
                _ => Some(read_all(machine, entry.file()).await),
            };
            found.insert(path, (entry.ino, contents));
        }
    }
    found
}

fn has(report: &BTreeMap<String, u64>, kind: Kind) -> bool {
    report.contains_key(kind.word())
}

/// Asserts everything that must hold after a repair, whatever damage was planted.
async fn check_mended(machine: &Machine, kind: Kind, report: &FsCheckReport) {
    let again = machine.node.check_fs().await.unwrap();
    assert!(again.clean && again.now.counts.is_empty(), "{kind}: left {:?}", again.now);
    let found = walk(machine).await;
    let keep = |path: &str| found.get(path).and_then(|(_, contents)| contents.clone());
    let moved = matches!(kind, Kind::DirectoryCycle);
    assert_eq!(keep("/keep"), Some(bytes(1, 20_000)), "{kind}: {:?}", found.keys());
    assert!(moved || keep("/dir/inner/second") == Some(bytes(1, 20_000)), "{kind}: {:?}", found.keys());
    assert!(found.contains_key("/other"), "{kind}");
    let seed = if kind == Kind::DoubleOwnedBlock { 1 } else { 2 };
    let victim = bytes(seed, 20_000);
    let holds = |contents: &Option<Vec<u8>>| contents.as_ref().is_some_and(|c| c.starts_with(&victim));
    assert!(
        found
            .iter()
            .any(|(path, (_, contents))| path != "/keep" && !path.ends_with("second") && holds(contents)),
        "{kind}: the data is somewhere: {:?}, {report:?}",
        found.keys()
    );
    let repair = report.repair.as_ref().unwrap();
    // After a power cut the next repair may find that the copies have been made; then only the first repair
    // named them.
    if kind == Kind::DoubleOwnedBlock && has(&repair.before.counts, kind) {
        let suspects = &repair.suspect_files;
        let paths: Vec<&String> = suspects.iter().flat_map(|file| &file.paths).collect();
        assert!(paths.iter().any(|path| *path == "/keep") && paths.iter().any(|path| *path == "/victim"));
    }
}

fn plant_and_mend(site: &Site, known: &Known, kind: Kind) {
    let site = site.duplicate();
    let world = World::new(kind as u64);
    let outlives = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let rows = Rows::of(&machine);
        let outlives = rows.plant(kind, known).await;
        rows.flush().await;
        if !outlives {
            if kind == Kind::WrittenFreeStripe {
                let data = machine.node.arrays().iter().find(|array| array.name() == "data").unwrap();
                let whole = Volume::whole(data);
                // The last stripes are not the target's.
                let (volume, _) = whole.split_end(anchor_stripes(whole.stripe_blocks()));
                let block = Buf::copy_from(&[7; BLOCK_BYTES]);
                volume.write(volume.blocks() - 1, &block, &crc32c_blocks(&block)).await.unwrap();
            }
            find_and_mend(&machine, kind).await;
        }
        machine.node.abandon();
        outlives
    });
    world.destroy();
    if outlives.unwrap() {
        let world = World::new(kind as u64 + 1000);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            find_and_mend(&machine, kind).await;
            machine.audit().await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

async fn find_and_mend(machine: &Machine, kind: Kind) {
    let found = machine.node.check_fs().await.unwrap();
    assert!(has(&found.now.counts, kind), "{kind} is found: {:?}", found.now);
    assert_eq!(found.clean, kind.is_waste(), "{kind}");
    let report = machine.node.repair_fs().await.unwrap();
    let repair = report.repair.as_ref().unwrap();
    // A wrong free count is also corrected by the repair of the damage that was planted with it.
    let mended = kind == Kind::WrongFreeCount || has(&repair.mended, kind);
    assert!(has(&repair.before.counts, kind) && mended, "{kind}: {report:?}");
    assert_eq!(report.result, "mended", "{kind}: left {:?}", report.now);
    check_mended(machine, kind, &report).await;
    let second = machine.node.repair_fs().await.unwrap();
    assert_eq!(second.result, "clean", "{kind}");
}

#[test]
fn every_kind_of_damage_is_found_and_mended() {
    let (site, known) = store();
    for kind in Kind::ALL.iter().filter(|kind| **kind != Kind::UnknownRow) {
        eprintln!("{kind}");
        plant_and_mend(&site, &known, *kind);
    }
}

#[test]
fn what_a_later_release_wrote_is_left_alone() {
    let (site, known) = store();
    let world = World::new(81);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        Rows::of(&machine).plant(Kind::UnknownRow, &known).await;
        let report = machine.node.repair_fs().await.unwrap();
        assert_eq!(report.result, "damaged");
        assert!(has(&report.now.counts, Kind::UnknownRow) && !report.now.findings[0].repairable);
        assert!(report.repair.unwrap().mended.is_empty());
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// A request whose time is over before it could be begun is refused, and changes nothing.
#[test]
fn a_request_that_a_repair_keeps_out_for_too_long_is_refused() {
    let (site, known) = store();
    let world = World::new(83);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for kind in [
            Kind::OrphanInode,
            Kind::BlockNotMarked,
            Kind::WrongLinkCount,
            Kind::BadXattrRow,
            Kind::WrongEntryCount,
            Kind::BadQueueRow,
        ] {
            Rows::of(&machine).plant(kind, &known).await;
        }
        let begun = machine.env.now();
        let repair = async {
            machine.node.repair_fs().await.unwrap();
            machine.env.now() - begun
        };
        let asked = |deadline_ms: u32| {
            let lookup =
                NameRequest { dir: known.root.ino.0, name: b"none".to_vec(), directory: false, lease: false };
            let mut frame = Frame::request(WireKind::Lookup, lookup.encode_to_vec(), Vec::new());
            (frame.header.session, frame.header.deadline_ms) = (machine.client.session(), deadline_ms);
            let node = machine.node.clone();
            async move { node.serve(frame, false).await.into_result().map(drop).unwrap_err() }
        };
        let (took, late, in_time, unlimited) = tokio::join!(repair, asked(1), asked(600_000), asked(0));
        assert!(took > Duration::from_millis(1), "the repair took {took:?}");
        assert_eq!((late.kind, &*late.message), (ErrorKind::Retry, "it could not be begun within 1 ms"));
        assert_eq!((in_time.errno, unlimited.errno), (2, 2), "it was looked up");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

#[test]
fn requests_wait_while_a_repair_runs() {
    let (site, known) = store();
    let world = World::new(82);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        Rows::of(&machine).plant(Kind::OrphanInode, &known).await;
        let repair = machine.node.repair_fs();
        let request = async {
            machine.env.sleep(std::time::Duration::from_micros(1)).await;
            machine.client.lookup(known.root, b"lost+found").await
        };
        let (report, found) = futures_util::future::join(repair, request).await;
        assert_eq!(report.unwrap().result, "mended");
        let lost = found.expect("it was answered after the repair");
        let name = format!("inode-{}", known.victim);
        machine.client.lookup(lost.file(), name.as_bytes()).await.unwrap();
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Several kinds of damage in one store.
const MIXED: [Kind; 7] = [
    Kind::BlockNotMarked,
    Kind::InodeReservationTooLow,
    Kind::BadXattrRow,
    Kind::DirectoryExtraName,
    Kind::WrongParent,
    Kind::OrphanInode,
    Kind::BlockNotOwned,
];

/// Damages rows of a store, and stops the machine at once.
fn damage(site: &Site, damage: impl AsyncFnOnce(&Rows)) {
    let world = World::new(83);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let rows = Rows::of(&machine);
        damage(&rows).await;
        rows.flush().await;
        machine.node.abandon();
    });
    run.unwrap();
    world.destroy();
}

fn damaged_store(kinds: &[Kind]) -> (Site, Known) {
    let (site, known) = store();
    damage(&site, async |rows| {
        for kind in kinds {
            assert!(rows.plant(*kind, &known).await);
        }
    });
    (site, known)
}

async fn start_and_repair(site: &Site, world: &World) -> (Machine, FsCheckReport) {
    let machine = site.start(world, &[]).await.unwrap();
    let report = machine.node.repair_fs().await.unwrap();
    (machine, report)
}

/// Cuts the power at evenly spread writes of a repair, and repairs again.
fn cut_repairs(kinds: &[Kind], seed: u64, per_site: u64) -> u64 {
    let (damaged, _) = damaged_store(kinds);
    let site = damaged.duplicate();
    let world = World::new(seed);
    world.run(start_and_repair(&site, &world)).map(|(_, report)| assert!(report.clean)).unwrap();
    let hits = world.hits();
    world.destroy();
    let mut cuts = 0;
    for (name, count) in hits.into_iter().filter(|(name, _)| !name.starts_with("label")) {
        for cut in 0..per_site.min(count) {
            let nth = cut * count / per_site.min(count);
            let site = damaged.duplicate();
            let world = World::new(seed);
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
            if world.run(start_and_repair(&site, &world)).is_ok() {
                // The last passes may come after the repair.
                world.destroy();
                continue;
            }
            cuts += 1;
            site.cut(&world);
            let world = World::new(seed + nth + 1);
            let run = world.run(async {
                let (machine, report) = start_and_repair(&site, &world).await;
                assert!(report.clean, "{name} {nth}: {:?}", report.now);
                check_mended(&machine, kinds[kinds.len() - 1], &report).await;
                machine.audit().await;
                machine.stop().await;
            });
            run.unwrap();
            world.destroy();
        }
    }
    cuts
}

#[test]
fn a_repair_that_a_power_cut_interrupts_is_finished_by_the_next() {
    for (kinds, seed) in [(&MIXED[..], 84), (&[Kind::DoubleOwnedBlock], 85), (&[Kind::BadMapRow], 86)] {
        let cuts = cut_repairs(kinds, seed, 3);
        assert!(cuts > 3, "{kinds:?}: {cuts} cuts");
    }
}

#[test]
fn link_requests_still_count_after_a_repair() {
    let (site, known) = damaged_store(&[Kind::WrongLinkCount]);
    let world = World::new(87);
    let run = world.run(async {
        let (machine, report) = start_and_repair(&site, &world).await;
        assert_eq!(report.result, "mended");
        let request = LinkRequest { ino: known.victim.ino.0, dir: known.root.ino.0, name: b"again".to_vec() };
        let attr = machine
            .client
            .link(FileId::of_numbers(0, request.ino), FileId::of_numbers(0, request.dir), &request.name)
            .await
            .unwrap();
        assert_eq!(attr.nlink, 2, "memory does not say what the row said before");
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Uses a damaged store without a repair: requests may fail, and nothing panics or hangs.
async fn use_damaged(machine: &Machine, known: &Known) {
    let client = &machine.client;
    for id in [known.victim, known.keep] {
        for at in [0, 40_960, 20_000] {
            let _ = client.write(id, at, &bytes(9, 8192)).await;
        }
        let _ = client.fsync(id).await;
        let _ = client.read(id, 0, 60_000).await;
    }
    for (dir, name) in [(known.root, "victim"), (known.inner, "second"), (known.root, "keep")] {
        let _ = client.lookup(dir, name.as_bytes()).await;
        let _ = client.unlink(dir, name.as_bytes(), false).await;
    }
    let _ = make_file(machine, "new").await;
    let _ = client.sync_all().await;
    machine.env.sleep(Duration::from_secs(120)).await;
}

/// Starts a damaged store and uses it.
fn serve_damaged(site: &Site, known: &Known) {
    let world = World::new(902);
    let run = world.run(async {
        // Some damage is such that no start succeeds; it says so.
        let Ok(machine) = site.start(&world, &[]).await else { return };
        let used = timeout(&machine.env, Duration::from_secs(3600), use_damaged(&machine, known)).await;
        assert!(used.is_some(), "a damaged store is used within an hour");
        machine.node.abandon();
    });
    run.unwrap();
    world.destroy();
}

/// Regression: a free of a block that counts as free stopped the process.
#[test]
fn a_damaged_store_serves_without_a_repair() {
    for kind in Kind::ALL {
        let (site, known) = store();
        damage(&site, async |rows| _ = rows.plant(*kind, &known).await);
        serve_damaged(&site, &known);
    }
}

/// Regression: an extent of no block, and a session above the last number, made a start panic.
#[test]
fn damage_that_no_check_has_mended_yet_makes_no_start_panic() {
    let (site, known) = store();
    damage(&site, async |rows| rows.put_empty_extent_first(known.victim).await);
    serve_damaged(&site, &known);
    let (site, known) = store();
    damage(&site, async |rows| rows.put_next_sessions().await);
    serve_damaged(&site, &known);
}

/// Regression: a file that was rewritten, or removed, with a block that counts as free kept every later
/// commit, check, repair and stop from succeeding.
#[test]
fn a_file_with_a_block_that_counts_as_free_is_rewritten_or_removed() {
    for remove in [false, true] {
        let (site, known) = store();
        let world = World::new(904);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let chunk_blocks = machine.client.get_attr(known.victim).await.unwrap().chunk_blocks;
            let len = chunk_blocks as usize * BLOCK_BYTES;
            machine.client.write(known.victim, 0, &bytes(3, len)).await.unwrap();
            machine.client.fsync(known.victim).await.unwrap();
            let rows = Rows::of(&machine);
            let extents = rows.extents(known.victim).await;
            let extent = extents.last().unwrap();
            rows.set_bit(extent.block + u64::from(extent.count) - 1, false).await;
            rows.flush().await;
            machine.node.abandon();
            len
        });
        let len = run.unwrap();
        world.destroy();
        let world = World::new(905);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let client = &machine.client;
            client.write(known.victim, 0, &bytes(9, len)).await.unwrap();
            client.fsync(known.victim).await.unwrap();
            if remove {
                client.unlink(known.root, b"victim", false).await.unwrap();
            }
            machine.env.sleep(Duration::from_secs(60)).await;
            client.fsync(known.keep).await.unwrap();
            // Nothing is allocated where a bit was lost, until a repair.
            let found = machine.node.check_fs().await.unwrap();
            assert!(has(&found.now.counts, Kind::WrongFreeCount), "removed: {remove}: {:?}", found.now);
            if !remove {
                let read = client.read(known.victim, 0, len as u64).await.unwrap();
                assert_eq!(penstock_base::buf::gather(&read)[..], bytes(9, len));
            }
            machine.node.repair_fs().await.unwrap();
            let report = machine.node.check_fs().await.unwrap();
            assert_eq!(report.result, "clean", "removed: {remove}: {:?}", report.now);
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: a repair gave up after the first of two repairs of one kind, and the next one finished it.
#[test]
fn a_file_whose_inode_is_behind_its_rows_is_mended_at_once() {
    let (site, known) = store();
    let world = World::new(909);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let (client, id) = (&machine.client, known.victim);
        let cut = async |size| {
            let request = SetAttrRequest { ino: id.ino.0, size: Some(size), ..SetAttrRequest::default() };
            client.set_attr(Branch::MAIN, request).await.unwrap();
        };
        cut(4 << 20).await;
        cut(3 << 20).await;
        client.write(id, 100_000, &bytes(3, 5000)).await.unwrap();
        client.fsync(id).await.unwrap();
        cut(2 << 20).await;
        client.sync_all().await.unwrap();
        let before = client.get_attr(id).await.unwrap().truncations;
        assert_eq!(machine.node.check_fs().await.unwrap().result, "clean");
        Rows::of(&machine).put_old_generation(id).await;
        assert_eq!(machine.node.repair_fs().await.unwrap().result, "mended");
        machine.stop().await;
        let machine = site.start(&world, &[]).await.unwrap();
        assert_eq!(machine.client.get_attr(id).await.unwrap().truncations, before);
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: such a row passed for one of a later release. Its file could not be read any more, and nothing
/// of the store was counted or freed by a repair.
#[test]
fn rows_that_only_count_are_counted_again_whatever_they_say() {
    let (site, known) = store();
    let world = World::new(910);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let owner = Owner { uid: 0, gid: 0, project: 0 };
        Rows::of(&machine).put_odd_counts(known.victim, owner).await;
        let found = machine.node.check_fs().await.unwrap();
        assert!(has(&found.now.counts, Kind::BadFileRow), "{:?}", found.now);
        assert_eq!(machine.node.repair_fs().await.unwrap().result, "mended");
        machine.stop().await;
        let machine = site.start(&world, &[]).await.unwrap();
        assert_eq!(read_all(&machine, known.victim).await, bytes(2, 20_000));
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: a repair ended with an error where it met a row of a later release.
#[test]
fn a_repair_that_cannot_be_made_keeps_no_other_one_from_being_made() {
    let (site, known) = store();
    let world = World::new(911);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        Rows::of(&machine).put_odd_root(known.root).await;
        Rows::of(&machine).put_odd_counts(known.keep, Owner::default()).await;
        let report = machine.node.repair_fs().await.unwrap();
        assert_eq!(report.result, "damaged");
        let left: Vec<_> = report.now.counts.keys().cloned().collect();
        assert_eq!(left, ["orphan_inode", "unknown_row"], "the rest is mended");
        machine.node.abandon();
    });
    run.unwrap();
    world.destroy();
}

/// Regression: a repair that met the session 2^63 stopped the process, and so did the next start after one
/// that met the number below.
#[test]
fn a_session_above_all_numbers_is_mended() {
    for session in [1_u64 << 63, (1 << 63) - 1] {
        let (site, known) = store();
        let world = World::new(908);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            Rows::of(&machine).put_session(session).await;
            assert_eq!(machine.node.repair_fs().await.unwrap().result, "mended", "{session:x}");
            machine.stop().await;
            let machine = site.start(&world, &[]).await.unwrap();
            machine.client.get_attr(known.victim).await.unwrap();
            assert_eq!(machine.node.check_fs().await.unwrap().result, "clean", "{session:x}");
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: a repair of a map row of the last chunk that a key can name, of an inode that has no contents,
/// stopped the process.
#[test]
fn a_chunk_above_all_numbers_is_mended() {
    for of_file in [true, false] {
        let (site, known) = store();
        let world = World::new(909);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            Rows::of(&machine).put_last_chunk(if of_file { known.victim } else { known.dir }).await;
            assert_eq!(machine.node.repair_fs().await.unwrap().result, "mended", "of a file: {of_file}");
            assert_eq!(machine.node.check_fs().await.unwrap().result, "clean", "of a file: {of_file}");
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// A root whose row names another inode, together with a row that cannot be read.
#[test]
fn a_root_with_a_wrong_number_is_mended() {
    let (site, known) = store();
    let world = World::new(910);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        Rows::of(&machine).put_wrong_root(known.root, known.victim).await;
        let first = machine.node.repair_fs().await;
        assert_eq!(first.unwrap().result, "mended");
        assert_eq!(machine.node.check_fs().await.unwrap().result, "clean");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}
