//! Stores of several stacks: they open together, and one that does not open keeps its own data away.

use crate::machine::{Machine, Site};
use crate::model::{make_file, pattern, read_all};
use penstock_base::{Branch, Buf, BufMut, FileId};
use penstock_client::{Failure, SetAttrRequest};
use penstock_drive::copies::{COPY_BYTES, places};
use penstock_drive::{Class, Drive, Io};
use penstock_node::EventKind;
use penstock_sim::{CutPlan, SimDrive, World};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::RenameRequest;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

const IO: Io = Io::new(Class::Meta, "test");

/// Copies of labels: path of the drive, offset, and bytes.
type Labels = Vec<(String, u64, Buf)>;

/// Writes zeros over both copies of the labels of an array, on all drives. Returns what was there.
pub async fn wipe_labels(site: &Site, machine: &Machine, name: &str) -> Labels {
    let array = machine.node.find_arrays(Some(name)).unwrap().remove(0);
    let mut labels = Labels::new();
    for drive in machine.node.drives() {
        let Some((offset, len)) = array.slice_of(drive.id()) else { continue };
        let path = drive.path().to_owned();
        let disk = SimDrive::new(&machine.world, site.disks.borrow()[&path].clone());
        for at in places(len) {
            let before = disk.read(offset + at, BufMut::zeroed(COPY_BYTES), IO).await.unwrap();
            labels.push((path.clone(), offset + at, before.freeze()));
            disk.write(offset + at, BufMut::zeroed(COPY_BYTES).freeze(), IO).await.unwrap();
        }
        disk.flush(IO).await.unwrap();
    }
    labels
}

/// Writes labels that were wiped.
async fn put_labels(site: &Site, world: &World, labels: Labels) {
    for (path, at, bytes) in labels {
        let disk = SimDrive::new(world, site.disks.borrow()[&path].clone());
        disk.write(at, bytes, IO).await.unwrap();
        disk.flush(IO).await.unwrap();
    }
}

#[test]
fn stores_of_one_to_sixteen_stacks_open_after_power_cuts() {
    for (seed, stacks) in [(900, 1), (910, 2), (920, 3), (930, 16)] {
        let (site, mut files) = (Site::of_stacks(stacks), BTreeMap::new());
        for life in 0..3 {
            let world = World::new(seed + life);
            let run = world.run(async {
                let machine = site.start(&world, &[]).await.unwrap();
                let names: Vec<String> =
                    machine.node.arrays().iter().map(|array| array.name().to_owned()).collect();
                assert_eq!(names.len(), 2 * usize::from(stacks), "{names:?}");
                let name = format!("file {life}");
                let file = make_file(&machine, &name).await.unwrap();
                let data = pattern(&world, 3_500_000);
                machine.client.write(file, 0, &data).await.unwrap();
                machine.client.fsync(file).await.unwrap();
                files.insert(name, data);
                for (name, data) in &files {
                    let root = machine.client.root();
                    let file = machine.client.lookup(root, name.as_bytes()).await.unwrap().file();
                    assert!(read_all(&machine, file).await == *data, "{name}, {stacks} stacks");
                }
                if life == 2 {
                    machine.audit().await;
                }
                machine.node.fs_report().total_bytes
            });
            assert!(run.unwrap() > u64::from(stacks) * (30 << 20), "the space of all targets");
            site.cut(&world);
        }
    }
}

#[test]
fn a_stack_that_does_not_open_keeps_no_other_one_from_serving() {
    let site = Site::of_stacks(3);
    let world = World::new(940);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let file = make_file(&machine, "file").await.unwrap();
        machine.client.write(file, 0, b"here").await.unwrap();
        machine.stop().await;
        wipe_labels(&site, &machine, "meta.1").await;
    });
    run.unwrap();
    world.destroy();
    let world = World::new(941);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let file = machine.client.lookup(machine.client.root(), b"file").await.unwrap().file();
        assert_eq!(read_all(&machine, file).await, b"here");
        let status = machine.node.status();
        assert_eq!(status.health, "failed");
        assert!(status.reasons.iter().any(|why| why.contains("stack 1 does not serve")), "{status:?}");
        assert_eq!(machine.node.arrays().len(), 4, "those of the others");
        let events = machine.node.events().after(0, 100).unwrap();
        let told = events.iter().find(|event| event.kind == EventKind::StackAbsent);
        assert_eq!(told.unwrap().object, "stack 1");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// A target that is forgotten is not waited for, and does not serve when its stack could open again.
#[test]
fn a_forgotten_target_stays_away() {
    const CHUNK: u64 = 1 << 20;
    let site = Site::spread((4, 2), 3, 3);
    let world = World::new(960);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let refused = machine.node.forget_target(1).await.unwrap_err();
        assert!(refused.to_string().contains("target 1 serves"), "{refused}");
        for name in ["file", "gone"] {
            let file = make_file(&machine, name).await.unwrap();
            for chunk in 0..6 {
                machine.client.write(file, chunk * CHUNK, &[7; 4096]).await.unwrap();
            }
            machine.client.fsync(file).await.unwrap();
            machine.client.release(file).await.unwrap();
        }
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    // The stack is as it was in another copy of the site.
    let whole = site.duplicate();
    let world = World::new(961);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.stop().await;
        wipe_labels(&site, &machine, "meta.1").await;
        let machine = site.start(&world, &[]).await.unwrap();
        let root = machine.client.root();
        machine.client.unlink(root, b"gone", false).await.unwrap();
        machine.env.sleep(Duration::from_secs(1)).await;
        let lost = machine.node.damaged_fs().await.unwrap().absent_targets.remove(0);
        assert_eq!((lost.target, lost.state.as_str(), lost.files), (1, "absent", 1), "{lost:?}");
        assert_eq!(lost.listed_files[0].paths, ["/file"]);
        let first = machine.node.drives()[0].id().to_string();
        assert!(machine.node.fail_drive(&first).await.is_err(), "it may be wanted");
        let lost = machine.node.forget_target(1).await.unwrap();
        assert_eq!((lost.state.as_str(), lost.files, lost.queued_work), ("forgotten", 1, 0));
        machine.node.fail_drive(&first).await.unwrap();
        machine.node.replace_drive(&first, Some("another")).await.unwrap();
        let file = machine.client.lookup(root, b"file").await.unwrap().file();
        assert!(machine.client.read(file, CHUNK, 4096).await.is_err(), "what it had is lost");
        assert!(machine.client.read(file, 2 * CHUNK, 4096).await.is_ok(), "others have the rest");
        resize(&machine, file, 10).await.unwrap();
        machine.client.sync_all().await.unwrap();
        let status = machine.node.status();
        assert!(!status.reasons.iter().any(|why| why.contains("does not serve")), "{status:?}");
        assert_ne!(status.health, "failed");
        assert_eq!(status.stacks[1].state, "forgotten");
        machine.audit().await;
        machine.node.abandon();
    });
    run.unwrap();
    site.cut(&world);
    for (site, is_forgotten) in [(site, true), (whole, false)] {
        let world = World::new(962);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let state = machine.node.stack_reports()[1].state.clone();
            assert_eq!(state == "forgotten", is_forgotten, "{state}");
            let drives = machine.node.status().drives;
            let are_there = drives.iter().filter(|drive| drive.state == "online").count();
            assert_eq!((drives.len(), are_there), (6, 6), "no other one is needed: {drives:?}");
            let status = machine.node.status();
            assert_ne!(status.health, "failed", "{status:?}");
            machine.audit().await;
            let root = machine.client.root();
            machine.client.unlink(root, b"file", false).await.unwrap();
            machine.client.sync_all().await.unwrap();
            machine.env.sleep(Duration::from_secs(20)).await;
            machine.audit().await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// The labels of a forgotten stack are there again: it does not serve all the same.
#[test]
fn a_forgotten_target_does_not_serve_again() {
    let site = Site::of_stacks(2);
    let world = World::new(970);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.stop().await;
        let labels = wipe_labels(&site, &machine, "meta.1").await;
        let machine = site.start(&world, &[]).await.unwrap();
        machine.node.forget_target(1).await.unwrap();
        machine.stop().await;
        put_labels(&site, &world, labels).await;
        let machine = site.start(&world, &[]).await.unwrap();
        assert_eq!(machine.node.stack_reports()[1].state, "forgotten");
        assert_eq!(machine.node.arrays().len(), 2);
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// The first stack has the names: nothing is there without it, and nothing is changed.
#[test]
fn without_the_first_stack_nothing_starts() {
    let site = Site::of_stacks(2);
    let world = World::new(950);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.stop().await;
        wipe_labels(&site, &machine, "data.0").await;
    });
    run.unwrap();
    world.destroy();
    let world = World::new(951);
    let started = world.run(async { site.start(&world, &[]).await.err().map(|error| error.to_string()) });
    let why = started.unwrap().expect("there are no names");
    assert!(why.contains("stack 0"), "{why}");
    world.destroy();
}

const CHUNK: u64 = 1 << 20;

pub async fn resize(machine: &Machine, file: FileId, size: u64) -> Result<(), Failure> {
    let request = SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
    machine.client.set_attr(Branch::MAIN, request).await.map(drop)
}

async fn unlink(machine: &Machine, name: &str) {
    machine.client.unlink(machine.client.root(), name.as_bytes(), false).await.unwrap();
}

/// Blocks of 4 KiB that a file has, as stat(2) shows them.
async fn held(machine: &Machine, file: FileId) -> u64 {
    machine.client.get_attr(file).await.unwrap().blocks
}

/// Runs a test on a store of so many stacks, whose files lie on all targets, chunk by chunk.
fn on_stacks(seed: u64, stacks: u16, test: impl AsyncFnOnce(&Machine)) {
    let (site, world) = (Site::of_stacks(stacks), World::new(seed));
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        test(&machine).await;
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

#[test]
fn a_spread_file_is_written_cut_punched_and_searched_as_a_whole() {
    for stacks in [1, 2, 3, 4] {
        on_stacks(960, stacks, async |machine| {
            let file = make_file(machine, "file").await.unwrap();
            let mut model = pattern(&machine.world, 6 * CHUNK as usize + 5000);
            machine.client.write(file, 0, &model).await.unwrap();
            assert_eq!(held(machine, file).await, 6 * 256 + 2, "reserved, and not yet committed");
            machine.client.fsync(file).await.unwrap();
            assert_eq!(held(machine, file).await, 6 * 256 + 2, "{stacks} stacks");
            let (from, len) = (CHUNK + 8192, 3 * CHUNK);
            machine.client.change_space(file, from, len, SpaceChange::Punch, true).await.unwrap();
            model[from as usize..(from + len) as usize].fill(0);
            assert!(read_all(machine, file).await == model, "{stacks} stacks: punched");
            assert_eq!(held(machine, file).await, 3 * 256 + 2);
            for (at, hole, found) in [(0, true, from), (from, false, from + len), (from + 1, true, from + 1)]
            {
                assert_eq!(machine.client.seek(file, at, hole).await.unwrap(), found, "{stacks} stacks");
            }
            resize(machine, file, 2 * CHUNK + 7).await.unwrap();
            resize(machine, file, 5 * CHUNK).await.unwrap();
            model.truncate(2 * CHUNK as usize + 7);
            model.resize(5 * CHUNK as usize, 0);
            assert!(read_all(machine, file).await == model, "{stacks} stacks: cut and made longer");
            machine.client.change_space(file, 0, 5 * CHUNK, SpaceChange::Reserve, true).await.unwrap();
            assert_eq!(held(machine, file).await, 5 * 256, "all of it is reserved, wherever it lies");
            assert!(read_all(machine, file).await == model, "{stacks} stacks: reserved");
            machine.client.change_space(file, CHUNK / 2, 4 * CHUNK, SpaceChange::Zero, true).await.unwrap();
            model[CHUNK as usize / 2..9 * CHUNK as usize / 2].fill(0);
            assert!(read_all(machine, file).await == model, "{stacks} stacks: zeroed");
            machine.client.release(file).await.unwrap();
        });
    }
}

/// The space of all targets is that of the file system, and a removal gives all of it back.
#[test]
fn space_is_counted_and_given_back_over_all_targets() {
    on_stacks(970, 4, async |machine| {
        let before = machine.node.fs_report().free_bytes;
        let stat = machine.client.stat_fs().await.unwrap();
        assert_eq!(stat.free_blocks * 4096, before);
        let file = make_file(machine, "file").await.unwrap();
        let data = pattern(&machine.world, 9 * CHUNK as usize);
        machine.client.write(file, 0, &data).await.unwrap();
        machine.client.fsync(file).await.unwrap();
        assert_eq!(machine.node.fs_report().free_bytes, before - 9 * CHUNK);
        let layout = machine.node.layout("/file").await.unwrap();
        assert_eq!((layout.targets.len(), layout.is_spread), (4, true));
        unlink(machine, "file").await;
        machine.client.release(file).await.unwrap();
        machine.check_empty(before).await;
    });
}

/// A full target takes nothing more. Space that a removal is about to give back there is waited for.
#[test]
fn a_write_waits_for_a_removal_that_its_target_has_yet_to_carry_out() {
    on_stacks(980, 2, async |machine| {
        let free = machine.node.fs_report().available_bytes;
        let file = make_file(machine, "large").await.unwrap();
        let data = pattern(&machine.world, CHUNK as usize);
        let most = free / CHUNK - 2;
        for chunk in 0..most {
            machine.client.write(file, chunk * CHUNK, &data).await.unwrap();
        }
        machine.client.fsync(file).await.unwrap();
        unlink(machine, "large").await;
        machine.client.release(file).await.unwrap();
        let next = make_file(machine, "next").await.unwrap();
        for chunk in 0..most {
            let mut tries = 0;
            while machine.client.write(next, chunk * CHUNK, &data).await.is_err() {
                // The removal has not begun.
                machine.env.sleep(Duration::from_millis(20)).await;
                tries += 1;
                assert!(tries < 500, "chunk {chunk} of {most}");
            }
        }
        machine.client.fsync(next).await.unwrap();
        machine.client.release(next).await.unwrap();
    });
}

/// The life of a file: it is made, written, cut, replaced and removed. Counts the steps that are durable.
async fn life_of_a_file(world: &World, site: &Site, step: &Cell<u32>) -> Result<(), String> {
    let machine = site.start(world, &[]).await.map_err(|error| error.to_string())?;
    let text = |failure: Failure| failure.to_string();
    let next = || step.set(step.get() + 1);
    let file = make_file(&machine, "file").await.map_err(text)?;
    machine.client.write(file, 0, &vec![1; 3 * CHUNK as usize]).await.map_err(text)?;
    machine.client.fsync(file).await.map_err(text)?;
    next();
    resize(&machine, file, CHUNK + 10).await.map_err(text)?;
    machine.client.write(file, 2 * CHUNK, &vec![2; CHUNK as usize]).await.map_err(text)?;
    machine.client.fsync(file).await.map_err(text)?;
    next();
    let other = make_file(&machine, "other").await.map_err(text)?;
    machine.client.write(other, 0, &vec![3; 2 * CHUNK as usize]).await.map_err(text)?;
    machine.client.fsync(other).await.map_err(text)?;
    let root = machine.client.root().ino.0;
    let request = RenameRequest {
        dir: root,
        name: b"other".to_vec(),
        new_dir: root,
        new_name: b"file".to_vec(),
        ..RenameRequest::default()
    };
    machine.client.rename(Branch::MAIN, request).await.map_err(text)?;
    machine.client.release(file).await.map_err(text)?;
    machine.client.sync_all().await.map_err(text)?;
    next();
    machine.client.unlink(machine.client.root(), b"file", false).await.map_err(text)?;
    machine.client.release(other).await.map_err(text)?;
    machine.client.sync_all().await.map_err(text)?;
    next();
    machine.env.sleep(Duration::from_secs(20)).await;
    machine.node.abandon();
    Ok(())
}

/// Cuts the power at each named write of that life. The file is then as before or as after each step, and
/// nothing leaks.
#[test]
fn a_cut_at_every_write_of_the_life_of_a_file_leaves_nothing_behind() {
    for stacks in [1, 2, 4] {
        let survey = World::new(990);
        survey.run(life_of_a_file(&survey, &Site::of_stacks(stacks), &Cell::new(0))).unwrap().unwrap();
        let hits = survey.hits();
        survey.destroy();
        for (name, count) in hits {
            for nth in (0..count).step_by((count / 6).max(1) as usize) {
                let (site, world, step) = (Site::of_stacks(stacks), World::new(990), Cell::new(0));
                world.plan_cut(CutPlan { site: name.to_owned(), nth });
                let cut = world.run(life_of_a_file(&world, &site, &step));
                assert!(cut.is_err(), "the cut at {name} {nth} came");
                site.cut(&world);
                let after = World::new(990 ^ nth);
                let run = after.run(async {
                    let machine = site.start(&after, &[]).await.unwrap();
                    let found = machine.client.lookup(machine.client.root(), b"file").await;
                    let bytes = match &found {
                        Ok(attr) => read_all(&machine, attr.file()).await,
                        Err(_) => Vec::new(),
                    };
                    let chunks: Vec<u8> = bytes.chunks(CHUNK as usize).map(|chunk| chunk[0]).collect();
                    let is_right = match step.get() {
                        0 => true,
                        1 => matches!(chunks[..], [1, 1, 1] | [1, 1] | [1, 1, 0 | 2]),
                        2 => matches!(chunks[..], [1, 1, 2] | [3, 3]),
                        3 => found.is_err() || chunks == [3, 3],
                        _ => found.is_err(),
                    };
                    let at = format!("{stacks} stacks, cut at {name} {nth}, step {}: {chunks:?}", step.get());
                    assert!(is_right, "{at}");
                    machine.audit().await;
                    machine.stop().await;
                });
                run.unwrap();
                after.destroy();
            }
        }
    }
}
