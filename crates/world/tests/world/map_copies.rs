//! Stores that lose their key-value store, and get it back from a copy of the map.

use crate::machine::{DISK_BYTES, Machine, Planned, Site, path};
use crate::model::{make_file, read_all};
use crate::plant::{Known, Rows};
use crate::repair::walk;
use penstock_array::format::descriptor::Role;
use penstock_array::format::table_page::TablePage;
use penstock_array::{Array, Volume};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Branch, Buf, FileId, FindingKind, Stripe, crc32c_blocks};
use penstock_drive::{Fault, Op};
use penstock_node::{Consent, FsCheckReport, MapCopyReport, MapRestoreReport, Newer, Restore, StartError};
use penstock_sim::{CutPlan, SimDisk, World};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::MakeRequest;
use penstock_world::Opened;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Bytes of each file: several stripes, so that strips of few files are shared.
const LEN: usize = 300_000;

fn bytes(seed: u8) -> Vec<u8> {
    (0..LEN).map(|at| (at / 7) as u8 ^ seed.wrapping_mul(37) | 1).collect()
}

pub async fn write(machine: &Machine, file: FileId, at: u64, contents: &[u8]) {
    machine.client.write(file, at, contents).await.unwrap();
    machine.client.fsync(file).await.unwrap();
}

async fn add(machine: &Machine, name: &str, seed: u8) -> FileId {
    let file = make_file(machine, name).await.unwrap();
    write(machine, file, 0, &bytes(seed)).await;
    machine.client.release(file).await.unwrap();
    file
}

fn meta_of(machine: &Machine) -> Rc<Array> {
    machine.node.arrays().iter().find(|array| array.role() == Role::Metadata).unwrap().clone()
}

/// A page of a stripe table: disk, block, contents.
type Page = (Rc<SimDisk>, u64, Vec<u8>);

/// Writes other bytes over pages.
fn spoil(pages: &[Page]) {
    pages.iter().for_each(|(disk, at, _)| disk.corrupt(*at, &[0x5a; BLOCK_BYTES]));
}

/// The pages of an array's stripe table on all disks, which are its members in order.
fn pages_of(site: &Site, array: &Array) -> Vec<Page> {
    let (geo, mut found) = (array.geometry(), Vec::new());
    for (number, member) in array.report().members.iter().enumerate() {
        let disk = site.disks.borrow()[&path(number)].clone();
        let (at, _) = array.slice_of(member.drive).unwrap();
        for page in 0..geo.table_pages() {
            for place in 0..2 {
                let block = (at + geo.page_at(page, place)) / BLOCK_BYTES as u64;
                let bytes = disk.peek(block);
                if TablePage::decode(&bytes).is_ok() {
                    found.push((disk.clone(), block, bytes.to_vec()));
                }
            }
        }
    }
    found
}

/// Overwrites the beginning of the key-value store, and ends the life.
async fn lose_rows(machine: &Machine) {
    lose_rows_on(&meta_of(machine)).await;
}

/// The same for any metadata array.
pub async fn lose_rows_on(meta: &Rc<Array>) {
    let noise = Buf::copy_from(&[0x5a; 64 * BLOCK_BYTES]);
    let volume = Volume::whole(meta);
    for at in 0..16 {
        volume.write(at * 64, &noise, &crc32c_blocks(&noise)).await.unwrap();
    }
    volume.flush().await.unwrap();
}

/// A store with a copy of the map and changes since, whose rows are lost. `change` is called between.
fn lost(seed: u64, change: impl AsyncFnOnce(&Machine, &BTreeMap<&str, FileId>)) -> Site {
    let site = Site::new();
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let root = machine.client.root().ino.0;
        let request =
            MakeRequest { dir: root, name: "dir".into(), mode: 0o040_755, ..MakeRequest::default() };
        let dir = machine.client.make(Branch::MAIN, request).await.unwrap().file();
        let mut files = BTreeMap::new();
        for (name, seed) in [("keep", 1), ("change", 2), ("remove", 3)] {
            files.insert(name, add(&machine, name, seed).await);
        }
        machine.client.link(files["keep"], dir, b"second").await.unwrap();
        machine.client.sync_all().await.unwrap();
        let copy = machine.node.map_copies().make().await.unwrap();
        assert!(copy.rows > 10, "{copy:?}");
        change(&machine, &files).await;
        machine.client.sync_all().await.unwrap();
        lose_rows(&machine).await;
    });
    run.unwrap();
    site.cut(&world);
    site
}

async fn change_all(machine: &Machine, files: &BTreeMap<&str, FileId>) {
    write(machine, files["change"], 100_000, &[9; 8192]).await;
    machine.client.unlink(machine.client.root(), b"remove", false).await.unwrap();
    machine.client.sync_all().await.unwrap();
    // Long enough that the space of the removed file is given to others.
    machine.env.sleep(Duration::from_secs(60)).await;
    for number in 0..4 {
        add(machine, &format!("new{number}"), 100 + number).await;
    }
}

/// A restore by an administrator who gives up whatever has to be.
pub fn confirmed(newer: Newer) -> Option<Restore> {
    Some(Restore { newer, consent: Consent::ToAny, may_pass_over: true, may_lack: true, is_forced: false })
}

/// The same by one who gives up nothing that missing drives may have.
fn careful() -> Option<Restore> {
    confirmed(Newer::AreCollected).map(|how| Restore { may_lack: false, ..how })
}

/// The restore of a store with one target.
fn only(restored: Vec<MapRestoreReport>) -> MapRestoreReport {
    let [restored] = <[_; 1]>::try_from(restored).expect("one target was restored");
    restored
}

/// Starts with a restore, repairs, and stops.
pub async fn restore(site: &Site, world: &World) -> Result<FsCheckReport, StartError> {
    site.restore.set(confirmed(Newer::AreCollected));
    let started = site.start(world, &[]).await;
    site.restore.set(None);
    let machine = started?;
    let report = machine.node.repair_fs().await.unwrap();
    machine.stop().await;
    Ok(report)
}

/// Asserts everything that must hold after a restore.
async fn check(machine: &Machine) {
    machine.audit().await;
    let found = walk(machine).await;
    let contents = |path: &str| found[path].1.clone().unwrap();
    assert!(
        contents("/keep") == bytes(1) && contents("/dir/second") == bytes(1),
        "nothing was written there"
    );
    // Blocks that were written since read as zeros; all others are those of the copy.
    for (path, seed) in [("/change", 2), ("/remove", 3)] {
        let (now, then) = (contents(path), bytes(seed));
        assert_eq!(now.len(), then.len(), "{path}");
        for (now, then) in now.chunks(BLOCK_BYTES).zip(then.chunks(BLOCK_BYTES)) {
            assert!(now == then || now.iter().all(|byte| *byte == 0), "{path} shows what is not its own");
        }
    }
    let changed = contents("/change");
    assert!(changed[100_000..108_192].iter().all(|byte| *byte == 0));
    let then = bytes(2);
    let blocks = changed.chunks(BLOCK_BYTES).zip(then.chunks(BLOCK_BYTES));
    let same = blocks.filter(|(now, then)| now == then).count();
    assert!(same > 20, "{same} blocks of the copy are left");
    // Newer contents are in a file of their own.
    let newer: Vec<&Vec<u8>> = found
        .iter()
        .filter(|(path, _)| path.starts_with("/lost+found/"))
        .filter_map(|(_, (_, contents))| contents.as_ref())
        .collect();
    let has = |seed: u8| {
        let block = &bytes(seed)[..BLOCK_BYTES];
        newer.iter().any(|contents| contents.chunks(BLOCK_BYTES).any(|found| found == block))
    };
    assert!((100..104).all(has), "{:?}", found.keys());
    assert!(!found.keys().any(|path| path.starts_with("/new")), "their names are lost");
}

#[test]
fn a_store_without_its_rows_comes_back_from_a_copy() {
    let site = lost(600, change_all);
    let world = World::new(601);
    let run = world.run(async {
        let refused = site.start(&world, &[]).await.err().expect("it has no rows").to_string();
        assert!(!refused.is_empty());
    });
    run.unwrap();
    world.destroy();
    let world = World::new(602);
    let run = world.run(async {
        let report = restore(&site, &world).await.unwrap();
        assert_eq!(report.result, "mended", "{:?}", report.now);
        let restored = only(report.restored);
        let newer = restored.newer_file.unwrap();
        assert!(newer.paths[0].starts_with("/lost+found/inode-"), "{newer:?}");
        let listed: Vec<&str> = restored.listed_files.iter().map(|file| file.paths[0].as_str()).collect();
        assert_eq!(listed, ["/change", "/remove"]);
        let machine = site.start(&world, &[]).await.unwrap();
        check(&machine).await;
        // Files go on to be made, under new numbers, and the next copy as well.
        let file = add(&machine, "after", 7).await;
        assert!(file.ino.0 > newer.inode);
        assert_eq!(machine.node.map_copies().make().await.unwrap().serial, 2);
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// A store whose rows are whole is not set back.
#[test]
fn a_store_with_its_rows_is_not_restored() {
    let site = Site::new();
    let world = World::new(610);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.stop().await;
        let refused = restore(&site, &world).await.unwrap_err().to_string();
        assert!(refused.contains("every row of this store can be read"), "{refused}");
        let machine = site.start(&world, &[]).await.unwrap();
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        machine.stop().await;
        let refused = restore(&site, &world).await.unwrap_err().to_string();
        assert!(refused.contains("every row of this store can be read"), "{refused}");
        let machine = site.start(&world, &[]).await.unwrap();
        let found = walk(&machine).await;
        assert_eq!(found.keys().collect::<Vec<_>>(), ["/keep", "/later"]);
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Cuts the power up to so many times at each kind of write of a restore of a damaged store. `after` each cut
/// gets the site, and a number and a name that say where it was.
pub fn cut_restores(damaged: &Site, seed: u64, cuts: u64, mut after: impl FnMut(&Site, u64, &str)) {
    let (site, world) = (damaged.duplicate(), World::new(seed));
    world.run(restore(&site, &world)).unwrap().unwrap();
    let hits = world.hits();
    world.destroy();
    for (name, count) in hits {
        for cut in 0..cuts.min(count) {
            let nth = cut * count / cuts.min(count);
            let (site, world) = (damaged.duplicate(), World::new(seed));
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
            let ended = world.run(restore(&site, &world));
            site.restore.set(None);
            if ended.is_ok() {
                world.destroy();
                continue;
            }
            site.cut(&world);
            after(&site, nth, name);
        }
    }
}

/// The power is cut at each kind of write of a restore: it is made again, or was done.
#[test]
fn a_restore_that_a_power_cut_interrupts_is_made_again() {
    let (mut again, mut done) = (0, 0);
    cut_restores(&lost(620, change_all), 621, 5, |site, nth, name| {
        let world = World::new(622 + nth);
        let run = world.run(async {
            let machine = match site.start(&world, &[]).await {
                Ok(machine) => {
                    done += 1;
                    machine
                }
                Err(_) => {
                    restore(site, &world).await.unwrap_or_else(|error| panic!("{name} {nth}: {error}"));
                    again += 1;
                    site.start(&world, &[]).await.unwrap()
                }
            };
            check(&machine).await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    });
    assert!(again > 10, "{again} made again, {done} were done");
}

/// Cuts the power up to four times at each kind of write of a life that makes `files` files, and a copy of
/// the map after each. `after` the cut gets the site, the number of copies that were made, and where it was;
/// it returns false if nothing can be said of that cut. Returns the number of the others.
fn cut_copies(seed: u64, files: u8, after: impl Fn(&Site, u64, u64, &str) -> bool) -> u64 {
    let life = async |site: &Site, world: &World, made: &Cell<u64>| {
        let machine = site.start(world, &[]).await.unwrap();
        for number in 0..files {
            add(&machine, &format!("file{number}"), number).await;
            machine.node.map_copies().make().await.unwrap();
            made.set(made.get() + 1);
        }
        machine.stop().await;
    };
    let (site, world, made) = (Site::new(), World::new(seed), Cell::new(0));
    world.run(life(&site, &world, &made)).unwrap();
    let hits = world.hits();
    world.destroy();
    let mut cuts = 0;
    for (name, count) in hits {
        for cut in 0..4.min(count) {
            let nth = (2 * cut + 1) * count / (2 * 4.min(count));
            let (site, world) = (Site::new(), World::new(seed));
            made.set(0);
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
            if world.run(life(&site, &world, &made)).is_ok() {
                world.destroy();
                continue;
            }
            site.cut(&world);
            cuts += u64::from(after(&site, made.get(), nth, name));
        }
    }
    cuts
}

/// The rows of the store are lost; it is restored, and whole again. Returns the copy.
fn restored_after_cut(site: &Site, seed: u64, what: &str) -> MapCopyReport {
    let world = World::new(seed);
    let run = world.run(async {
        let report = restore(site, &world).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let machine = site.start(&world, &[]).await.unwrap();
        machine.audit().await;
        machine.stop().await;
        only(report.restored).copy
    });
    let copy = run.unwrap();
    world.destroy();
    copy
}

/// The power is cut at each kind of write of a copy: the one before counts, or the new one. Nothing leaks.
#[test]
fn a_copy_that_a_power_cut_interrupts_is_made_anew() {
    let cuts = cut_copies(630, 3, |site, _, nth, name| {
        let world = World::new(631 + nth);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            machine.audit().await;
            machine.node.map_copies().make().await.unwrap();
            let newest = machine.node.map_copies().make().await.unwrap();
            machine.audit().await;
            lose_rows(&machine).await;
            newest
        });
        let newest = run.unwrap();
        site.cut(&world);
        let copy = restored_after_cut(site, 632 + nth, &format!("{name} {nth}"));
        assert_eq!(copy, newest);
        true
    });
    assert!(cuts > 20, "{cuts} cuts");
}

/// The power is cut at each kind of write of the later copies: one is there, at once and without a new one.
#[test]
fn a_copy_is_there_right_after_a_power_cut() {
    let cuts = cut_copies(2630, 4, |site, made, nth, name| {
        if made == 0 {
            return false;
        }
        let world = World::new(2631 + nth);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            lose_rows(&machine).await;
        });
        run.unwrap();
        site.cut(&world);
        let serial = restored_after_cut(site, 2632 + nth, &format!("{name} {nth}")).serial;
        assert!(serial >= made, "{name} {nth}: copy {serial} after {made}");
        true
    });
    assert!(cuts > 20, "{cuts} cuts");
}

/// The copy itself, or drives that are missing, make nothing newer: a file of which no strip was written is
/// as it was.
#[test]
fn files_that_were_not_written_since_are_as_they_were() {
    for (missing, writes) in
        [(&[][..], false), (&[2], false), (&[1, 4], false), (&[2], true), (&[1, 4], true)]
    {
        let site = Site::new();
        let world = World::new(640);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            for number in 0..40 {
                let file = make_file(&machine, &format!("small{number}")).await.unwrap();
                write(&machine, file, 0, &[number + 1; 5000]).await;
                machine.client.release(file).await.unwrap();
            }
            machine.node.map_copies().make().await.unwrap();
            if writes {
                add(&machine, "late", 9).await;
            }
            lose_rows(&machine).await;
        });
        run.unwrap();
        site.cut(&world);
        let world = World::new(641);
        let run = world.run(async {
            site.restore.set(confirmed(Newer::AreCollected));
            let machine = site.start(&world, missing).await.unwrap();
            site.restore.set(None);
            let report = machine.node.repair_fs().await.unwrap();
            let restored = only(report.restored);
            assert_eq!(restored.changed_files, 0, "without {missing:?}: {restored:?}");
            assert_eq!(restored.newer_blocks > 0, writes, "without {missing:?}: {restored:?}");
            let found = walk(&machine).await;
            for number in 0..40 {
                assert!(found[&format!("/small{number}")].1 == Some(vec![number + 1; 5000]), "{number}");
            }
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// A store that was made anew and not repaired may have blocks with two owners: nobody may use it.
#[test]
fn a_store_that_was_restored_and_not_repaired_is_not_served() {
    let site = lost(650, change_all);
    let world = World::new(651);
    let run = world.run(async {
        site.restore.set(confirmed(Newer::AreCollected));
        drop(site.start(&world, &[]).await.unwrap_or_else(|error| panic!("{error}")));
        site.restore.set(None);
    });
    run.unwrap();
    site.cut(&world);
    let world = World::new(652);
    let run = world.run(async {
        let refused = site.start(&world, &[]).await.err().expect("it is not repaired").to_string();
        assert!(refused.contains("not repaired yet"), "{refused}");
        restore(&site, &world).await.unwrap();
        let machine = site.start(&world, &[]).await.unwrap();
        check(&machine).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: the rows of a later release were taken for lost ones, and discarded.
#[test]
fn a_store_of_a_later_release_is_not_restored() {
    let site = Site::new();
    let world = World::new(910);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        Rows::of(&machine).put_feature(17).await;
        machine.stop().await;
        let refused = site.start(&world, &[]).await.err().unwrap().to_string();
        assert!(refused.contains("feature bits"), "{refused}");
        let refused = restore(&site, &world).await.unwrap_err().to_string();
        assert!(refused.contains("feature bits"), "{refused}");
    });
    run.unwrap();
    world.destroy();
}

/// Regression: rows that only missing drives have were taken for lost ones, and discarded.
#[test]
fn rows_that_missing_drives_have_are_not_given_up() {
    let (site, first) = (Site::new(), World::new(960));
    let rotten = first.run(async {
        let machine = site.start(&first, &[]).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        let meta = meta_of(&machine);
        meta.destage_and_checkpoint().await.unwrap();
        // The first strips of its first member.
        let places = meta.places(Stripe(0)).await.unwrap();
        let drive = meta.report().members[places[0].member.index()].drive;
        let (at, _) = meta.slice_of(drive).unwrap();
        let row = at + meta.geometry().block_at(places[0].row, 0);
        machine.stop().await;
        row / BLOCK_BYTES as u64..row / BLOCK_BYTES as u64 + 1000
    });
    first.destroy();
    let rotten = rotten.unwrap();
    let disk = site.disks.borrow()[&path(0)].clone();
    rotten.for_each(|block| disk.corrupt(block, &[0x5a; BLOCK_BYTES]));
    let world = World::new(961);
    let run = world.run(async {
        site.restore.set(careful());
        let refused = site.start(&world, &[1, 2]).await.err().expect("drives are missing").to_string();
        site.restore.set(None);
        assert!(refused.contains("missing drives may have names and maps that others lack"), "{refused}");
        assert!(refused.contains("bring back"), "{refused}");
    });
    run.unwrap();
    world.destroy();
}

/// Regression: drives that failed while rows were read were not missed, and rows that only they have were
/// discarded.
#[test]
fn rows_that_failing_drives_have_are_not_given_up() {
    let (whole, first) = (Site::new(), World::new(962));
    let rotten = first.run(async {
        let machine = whole.start(&first, &[]).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        let meta = meta_of(&machine);
        meta.destage_and_checkpoint().await.unwrap();
        machine.stop().await;
        // All strips of its first member.
        let drive = meta.report().members[0].drive;
        let (at, len) = meta.slice_of(drive).unwrap();
        (at + meta.geometry().strip_at(0)) / BLOCK_BYTES as u64..(at + len) / BLOCK_BYTES as u64
    });
    first.destroy();
    let disk = whole.disks.borrow()[&path(0)].clone();
    let used = disk.used_blocks();
    let strips = rotten.unwrap();
    used.into_iter().filter(|at| strips.contains(at)).for_each(|at| disk.corrupt(at, &[0x5a; BLOCK_BYTES]));
    for nth in (0..60).step_by(3) {
        let (site, world) = (whole.duplicate(), World::new(963));
        for disk in 1..3 {
            let plans = (nth..nth + 8)
                .map(|nth| Planned { op: Op::Write, nth, fault: Fault::Fail, within: 1 << 20..21 << 20 })
                .collect();
            site.plans.borrow_mut().insert(path(disk), plans);
        }
        let run = world.run(async {
            site.restore.set(careful());
            let started = site.start(&world, &[]).await;
            site.restore.set(None);
            assert!(started.is_err(), "discarded with errors from write {nth} on");
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: without a page of the metadata array's stripe table, all other rows were discarded, and then
/// no restore succeeded.
#[test]
fn a_lost_page_of_the_metadata_array_is_given_up_if_that_may_be() {
    let (site, first) = (Site::new(), World::new(964));
    let run = first.run(async {
        let machine = site.start(&first, &[]).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        let meta = meta_of(&machine);
        machine.stop().await;
        pages_of(&site, &meta)
    });
    first.destroy();
    let pages = run.unwrap();
    assert!(!pages.is_empty());
    spoil(&pages);
    let world = World::new(965);
    let run = world.run(async {
        site.restore.set(careful());
        let refused = site.start(&world, &[]).await.err().expect("a page is lost").to_string();
        assert!(refused.contains("nothing was changed") && refused.contains("--accept-loss"), "{refused}");
        site.restore.set(None);
        // The page is back.
        pages.iter().for_each(|(disk, at, bytes)| disk.corrupt(*at, bytes));
        let machine = site.start(&world, &[]).await.unwrap_or_else(|error| panic!("{error}"));
        assert!(walk(&machine).await.contains_key("/later"));
        let meta = meta_of(&machine);
        machine.stop().await;
        spoil(&pages_of(&site, &meta));
        restore(&site, &world).await.unwrap_or_else(|error| panic!("{error}"));
        let machine = site.start(&world, &[]).await.unwrap_or_else(|error| panic!("{error}"));
        let found = walk(&machine).await;
        assert!(found.contains_key("/keep") && !found.contains_key("/later"), "{:?}", found.keys());
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: a restore that was interrupted did not go on without a drive, unless a loss was accepted.
#[test]
fn an_interrupted_restore_goes_on_without_a_drive() {
    let site = lost(966, change_all);
    let world = World::new(967);
    let run = world.run(async {
        site.restore.set(confirmed(Newer::AreCollected));
        drop(site.start(&world, &[]).await.unwrap_or_else(|error| panic!("{error}")));
    });
    run.unwrap();
    site.cut(&world);
    let world = World::new(968);
    let run = world.run(async {
        site.restore.set(careful());
        let machine = site.start(&world, &[1]).await.unwrap_or_else(|error| panic!("{error}"));
        site.restore.set(None);
        machine.node.repair_fs().await.unwrap();
        check(&machine).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: rows that could not be read for a moment were taken for lost ones, and discarded.
#[test]
fn a_momentary_read_error_does_not_discard_a_store() {
    let whole = Site::new();
    let world = World::new(970);
    let run = world.run(async {
        let machine = whole.start(&world, &[]).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    for nth in 0..120 {
        let (site, world) = (whole.duplicate(), World::new(971));
        for disk in 0..3 {
            let plans = (nth..nth + 4)
                .map(|nth| Planned { op: Op::Read, nth, fault: Fault::Fail, within: 1 << 20..21 << 20 })
                .collect();
            site.plans.borrow_mut().insert(format!("disk{disk}"), plans);
        }
        let run = world.run(async {
            site.restore.set(confirmed(Newer::AreCollected));
            let started = site.start(&world, &[]).await;
            site.restore.set(None);
            assert!(started.is_err(), "discarded with errors from read {nth} on");
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: the newer blocks of all files went into a file that was made beside the copy.
#[test]
fn a_file_made_beside_a_copy_is_not_replaced_by_the_newer_blocks() {
    let filled = Site::new();
    let world = World::new(900);
    let run = world.run(async {
        let machine = filled.start(&world, &[]).await.unwrap();
        for number in 0..1100 {
            let request = MakeRequest {
                dir: machine.client.root().ino.0,
                name: format!("link{number}").into_bytes(),
                mode: 0o120_777,
                target: vec![b'x'; 1000],
                ..MakeRequest::default()
            };
            machine.client.make(Branch::MAIN, request).await.unwrap();
        }
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    let mut beside = 0;
    for delay in (0..9000).step_by(500) {
        let (site, world) = (filled.duplicate(), World::new(901));
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let copies = machine.node.map_copies().clone();
            let others = async {
                machine.env.sleep(Duration::from_micros(delay)).await;
                add(&machine, "beside", 8).await;
            };
            let (made, ()) = futures_util::future::join(copies.make(), others).await;
            made.unwrap();
            add(&machine, "secret", 99).await;
            machine.client.sync_all().await.unwrap();
            lose_rows(&machine).await;
        });
        run.unwrap();
        site.cut(&world);
        let world = World::new(902);
        let run = world.run(async {
            let report = restore(&site, &world).await.unwrap();
            let newer = only(report.restored).newer_file.unwrap();
            assert!(newer.paths[0].starts_with("/lost+found/"), "after {delay} us: {newer:?}");
            let machine = site.start(&world, &[]).await.unwrap();
            if let Ok(file) = machine.client.lookup(machine.client.root(), b"beside").await {
                beside += 1;
                let (contents, secret) = (read_all(&machine, file.file()).await, bytes(99));
                let shows = contents.chunks(BLOCK_BYTES).any(|block| block == &secret[..BLOCK_BYTES]);
                assert!(!shows, "after {delay} us: /beside shows /secret");
            }
            machine.audit().await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
    assert!(beside > 0, "some copy has the name");
}

/// Regression: preallocated files that were written since read as zeros and were not listed.
#[test]
fn a_preallocated_file_that_was_written_is_listed() {
    for how in [Newer::AreCollected, Newer::Stay] {
        let site = Site::new();
        let world = World::new(920);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let file = make_file(&machine, "image").await.unwrap();
            machine.client.change_space(file, 0, LEN as u64, SpaceChange::Reserve, false).await.unwrap();
            machine.client.fsync(file).await.unwrap();
            machine.client.sync_all().await.unwrap();
            machine.node.map_copies().make().await.unwrap();
            write(&machine, file, 0, &bytes(5)).await;
            machine.client.sync_all().await.unwrap();
            lose_rows(&machine).await;
        });
        run.unwrap();
        site.cut(&world);
        let world = World::new(921);
        let run = world.run(async {
            site.restore.set(confirmed(how));
            let machine = site.start(&world, &[]).await.unwrap();
            site.restore.set(None);
            let report = machine.node.repair_fs().await.unwrap();
            let restored = only(report.restored);
            let listed: Vec<_> = restored.listed_files.iter().flat_map(|file| file.paths.clone()).collect();
            assert_eq!(listed, ["/image"], "{} changed files", restored.changed_files);
            let contents = walk(&machine).await["/image"].1.clone().unwrap();
            match how {
                Newer::AreCollected => {
                    assert!(contents.iter().all(|byte| *byte == 0) && contents.len() == LEN);
                }
                Newer::Stay => assert!(contents == bytes(5), "it is as it was written"),
            }
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// Anchors that could not be read for a moment were made void, and both copies were given up before a new one
/// was made.
#[test]
fn copies_that_cannot_be_read_for_a_moment_are_not_given_up() {
    let site = Site::new();
    let world = World::new(980);
    let run = world.run(async {
        let opened = Opened::default();
        let machine = site.start_recording(&world, &[], &opened).await.unwrap();
        add(&machine, "keep", 1).await;
        machine.client.sync_all().await.unwrap();
        machine.node.map_copies().make().await.unwrap();
        machine.node.map_copies().make().await.unwrap();
        add(&machine, "later", 2).await;
        machine.client.sync_all().await.unwrap();
        for array in machine.node.arrays() {
            array.destage_and_checkpoint().await.unwrap();
        }
        // Reads of the data slices fail for a moment, on all drives; writes do not.
        opened.borrow().values().for_each(|drive| drive.set_unreadable(21 << 20..40 << 20));
        // The power is cut while the next one is made.
        let copies = machine.node.map_copies().clone();
        let _ = timeout(&machine.env, Duration::from_millis(6), copies.make()).await;
        opened.borrow().values().for_each(|drive| drive.set_readable());
        lose_rows(&machine).await;
    });
    run.unwrap();
    site.cut(&world);
    let world = World::new(981);
    let run = world.run(async { only(restore(&site, &world).await.unwrap().restored).copy });
    assert_eq!(run.unwrap().serial, 2);
    world.destroy();
}

/// A block with two owners cannot be read: the repair never ended, and the restored store was never served.
#[test]
fn a_double_block_that_cannot_be_read_keeps_no_store_from_being_served() {
    let site = Site::new();
    let world = World::new(990);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let keep = add(&machine, "keep", 1).await;
        let victim = add(&machine, "victim", 2).await;
        let other = add(&machine, "other", 3).await;
        machine.client.sync_all().await.unwrap();
        let root = machine.client.root();
        let known = Known { root, keep, victim, dir: other, inner: other, other };
        Rows::of(&machine).plant(FindingKind::DoubleOwnedBlock, &known).await;
        Rows::of(&machine).flush().await;
        for array in machine.node.arrays() {
            array.destage_and_checkpoint().await.unwrap();
        }
        machine.node.map_copies().make().await.unwrap();
        lose_rows(&machine).await;
    });
    run.unwrap();
    site.cut(&world);
    {
        // More strips than the code survives.
        let block = bytes(1)[8 * BLOCK_BYTES..9 * BLOCK_BYTES].to_vec();
        let disks = site.disks.borrow();
        let holds = |number: &usize| {
            let disk = &disks[&path(*number)];
            (0..DISK_BYTES / BLOCK_BYTES as u64).find(|at| disk.peek(*at)[..] == block[..])
        };
        let (number, at) =
            (0..6).find_map(|number| Some((number, holds(&number)?))).expect("a strip holds it");
        for offset in [0, 2, 4] {
            disks[&path((number + offset) % 6)].corrupt(at, &[0xee; BLOCK_BYTES]);
        }
    }
    let world = World::new(991);
    let run = world.run(async {
        let report = restore(&site, &world).await.unwrap();
        report.repair.unwrap().suspect_files.len()
    });
    assert!(run.unwrap() > 0, "the files are listed");
    world.destroy();
    let world = World::new(992);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}
