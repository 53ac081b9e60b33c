//! Stores of several stacks of which one target is full and others have space.

use crate::machine::{Machine, Site};
use crate::map_copies::{lose_rows_on, restore};
use crate::model::{make_file, read_all};
use crate::repair::walk;
use crate::stacks::{resize, wipe_labels};
use penstock_base::rank::scoped;
use penstock_base::{ErrorKind, FileId, TargetId};
use penstock_chunk::rows::{all_lent, all_loans};
use penstock_client::Failure;
use penstock_kv::WriteSet;
use penstock_node::WantedLayout;
use penstock_sim::{CutPlan, World};
use penstock_wire::data::SpaceChange::Reserve;
use std::cell::Cell;
use std::time::Duration;

const CHUNK: u64 = 1 << 20;
const BLOCK: usize = 4096;

/// A chunk of which each block is its own, with a number of the write.
fn chunk(number: u64, write: u8) -> Vec<u8> {
    (0..CHUNK as usize)
        .map(|at| (number as u8).wrapping_mul(31) ^ (at / BLOCK) as u8 ^ write.wrapping_mul(67) | 1)
        .collect()
}

/// Free bytes of the target of the names.
fn free_of_first(machine: &Machine) -> u64 {
    machine.node.stack_reports()[0].available_bytes
}

/// Bytes that the first target has on loan.
fn borrowed(machine: &Machine) -> u64 {
    machine.node.stack_reports()[0].borrowed_bytes
}

/// Leaves the first target so many bytes: a file has reserved the others.
pub async fn leave(machine: &Machine, bytes: u64) -> Result<(), Failure> {
    let ballast = make_file(machine, "ballast").await?;
    let len = free_of_first(machine).saturating_sub(bytes) / CHUNK * CHUNK;
    machine.client.change_space(ballast, 0, len, Reserve, true).await?;
    machine.client.fsync(ballast).await
}

/// Leaves each target but the last one so many bytes: a file on all of them has reserved the others.
pub async fn leave_on_all_but_one(machine: &Machine, bytes: u64) -> Result<(), Failure> {
    let before = machine.node.layout("/").await.unwrap();
    let reports = machine.node.stack_reports();
    let others = &reports[..reports.len() - 1];
    let set = async |count: usize, turn| {
        let wanted = WantedLayout { count: Some(count as u16), turn: Some(turn) };
        machine.node.set_layout("/", wanted).await.unwrap();
    };
    set(others.len(), 1).await;
    let ballast = make_file(machine, "ballast").await?;
    let targets = machine.node.layout("/ballast").await.unwrap().targets;
    assert!(targets.iter().copied().eq(others.iter().map(|stack| stack.target)), "{targets:?}");
    let least = others.iter().map(|stack| stack.available_bytes).min().unwrap_or(0);
    let each = least.saturating_sub(bytes) / CHUNK * CHUNK;
    machine.client.change_space(ballast, 0, each * others.len() as u64, Reserve, true).await?;
    machine.client.fsync(ballast).await?;
    set(before.count.into(), before.turn).await;
    Ok(())
}

async fn write(
    machine: &Machine,
    file: FileId,
    chunks: std::ops::Range<u64>,
    nth: u8,
) -> Result<(), Failure> {
    for number in chunks {
        machine.client.write(file, number * CHUNK, &chunk(number, nth)).await?;
    }
    machine.client.fsync(file).await
}

/// Chunks that can be written to a file, until nothing fits.
async fn fill(machine: &Machine, file: FileId) -> u64 {
    for number in 0.. {
        if let Err(failure) = machine.client.write(file, number * CHUNK, &chunk(number, 0)).await {
            assert_eq!(failure.kind, ErrorKind::NoSpace, "{failure}");
            machine.client.fsync(file).await.unwrap();
            return number;
        }
    }
    unreachable!("it is full some time")
}

/// A file on one target takes the space of all. After its removal, all of it is where it was.
#[test]
fn a_file_on_a_full_target_takes_the_space_of_all() {
    let site = Site::spread((4, 2), 3, 1);
    let world = World::new(7000);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let before = machine.node.fs_report();
        let own = free_of_first(&machine);
        let file = make_file(&machine, "file").await.unwrap();
        let chunks = fill(&machine, file).await;
        let least = before.available_bytes / CHUNK - 4;
        assert!(
            chunks > own / CHUNK + 1 && chunks >= least,
            "{chunks} of {least} chunks, {own} bytes on one"
        );
        assert!(machine.node.fs_report().available_bytes < 4 * CHUNK, "df says so");
        machine.audit().await;
        machine.client.release(file).await.unwrap();
        (before.free_bytes, chunks)
    });
    let (free, chunks) = run.unwrap();
    site.cut(&world);
    let world = World::new(7001);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let root = machine.client.root();
        let file = machine.client.lookup(root, b"file").await.unwrap().file();
        let bytes = read_all(&machine, file).await;
        for number in 0..chunks {
            let at = (number * CHUNK) as usize;
            assert!(bytes[at..at + CHUNK as usize] == chunk(number, 0), "chunk {number}");
        }
        machine.audit().await;
        machine.client.unlink(root, b"file", false).await.unwrap();
        machine.env.sleep(Duration::from_secs(60)).await;
        machine.check_empty(free).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: of a target that was lost, only files in whose layout it was were named, and the question of
/// `target forget` said that nothing would be lost.
#[test]
fn what_a_lost_target_has_lent_is_lost_too() {
    let site = Site::spread((4, 2), 2, 1);
    let world = World::new(7010);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        leave(&machine, 0).await.unwrap();
        let file = make_file(&machine, "lent").await.unwrap();
        write(&machine, file, 0..3, 1).await.unwrap();
        assert!(borrowed(&machine) >= 3 * CHUNK);
        machine.client.release(file).await.unwrap();
        machine.stop().await;
        wipe_labels(&site, &machine, "meta.1").await;
        let mut bytes = 0;
        for is_first in [true, false] {
            let machine = site.start(&world, &[]).await.unwrap();
            let damaged = machine.node.damaged_fs().await.unwrap();
            bytes = if is_first { damaged.damaged_bytes } else { bytes };
            assert!(bytes > 2 * CHUNK, "most of it: {damaged:?}");
            assert_eq!((damaged.files.len(), damaged.damaged_bytes), (1, bytes), "{damaged:?}");
            assert_eq!(damaged.files[0].paths, ["/lent"]);
            let lost = &damaged.absent_targets[0];
            assert_eq!((lost.files, lost.most_bytes), (1, bytes), "{lost:?}");
            assert_eq!(lost.listed_files[0].paths, ["/lent"]);
            let lost = machine.node.forget_target(1).await.unwrap();
            assert_eq!((lost.files, lost.most_bytes), (1, bytes), "first: {is_first}");
            assert_eq!(machine.node.damaged_fs().await.unwrap().damaged_bytes, bytes);
            machine.stop().await;
        }
        let machine = site.start(&world, &[]).await.unwrap();
        let root = machine.client.root();
        let file = machine.client.lookup(root, b"lent").await.unwrap().file();
        assert!(machine.client.read(file, 0, CHUNK).await.is_err(), "it is no hole");
        machine.client.unlink(root, b"lent", false).await.unwrap();
        machine.env.sleep(Duration::from_secs(20)).await;
        assert_eq!(machine.node.damaged_fs().await.unwrap().damaged_bytes, 0);
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// The life of a file that begins on its target and goes on elsewhere. Counts the steps that are durable.
async fn life_of_a_file(world: &World, site: &Site, step: &Cell<u32>) -> Result<(), String> {
    let machine = site.start(world, &[]).await.map_err(|error| error.to_string())?;
    let text = |failure: Failure| failure.to_string();
    let next = || step.set(step.get() + 1);
    // A file that is made later begins on another target.
    let file = make_file(&machine, "file").await.map_err(text)?;
    leave(&machine, 3 * CHUNK).await.map_err(text)?;
    write(&machine, file, 0..6, 1).await.map_err(text)?;
    assert!(borrowed(&machine) > 0, "the first target is full");
    next();
    write(&machine, file, 4..5, 2).await.map_err(text)?;
    for number in [0, 2, 5] {
        machine
            .client
            .write(file, number * CHUNK + 40_960, &chunk(number, 3)[40_960..49_152])
            .await
            .map_err(text)?;
    }
    machine.client.fsync(file).await.map_err(text)?;
    next();
    resize(&machine, file, CHUNK + 10).await.map_err(text)?;
    machine.client.sync_all().await.map_err(text)?;
    next();
    // Loans are given back meanwhile.
    machine.env.sleep(Duration::from_secs(20)).await;
    write(&machine, file, 3..7, 4).await.map_err(text)?;
    next();
    machine.client.unlink(machine.client.root(), b"file", false).await.map_err(text)?;
    machine.client.release(file).await.map_err(text)?;
    machine.client.sync_all().await.map_err(text)?;
    next();
    machine.env.sleep(Duration::from_secs(20)).await;
    machine.node.abandon();
    Ok(())
}

/// True if each block is of this file, or zeros.
fn is_its_own(bytes: &[u8]) -> bool {
    let mut blocks = (0..).zip(bytes.chunks(BLOCK));
    blocks.all(|(at, block)| {
        let (number, from) = (at / (CHUNK as usize / BLOCK), at % (CHUNK as usize / BLOCK) * BLOCK);
        let is_zeros = block.iter().all(|byte| *byte == 0);
        is_zeros
            || (1..5).any(|write| {
                let written = &chunk(number as u64, write)[from..from + BLOCK];
                // The last block may end early, and be zeros behind an earlier end.
                let same = block.iter().zip(written).take_while(|(found, written)| found == written).count();
                same > 0 && block[same..].iter().all(|byte| *byte == 0)
            })
    })
}

/// Cuts the power at each named write of that life. Nothing that was synced is lost, nobody shows what is not
/// its own, and nothing leaks.
#[test]
fn a_cut_at_every_write_of_a_loan_loses_nothing() {
    let survey = World::new(7010);
    survey.run(life_of_a_file(&survey, &Site::spread((4, 2), 3, 1), &Cell::new(0))).unwrap().unwrap();
    let hits = survey.hits();
    survey.destroy();
    for (name, count) in hits {
        for nth in (0..count).step_by((count / 8).max(1) as usize) {
            let (site, world, step) = (Site::spread((4, 2), 3, 1), World::new(7010), Cell::new(0));
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
            let cut = world.run(life_of_a_file(&world, &site, &step));
            assert!(cut.is_err(), "the cut at {name} {nth} came");
            site.cut(&world);
            let after = World::new(7010 ^ nth);
            let run = after.run(async {
                let machine = site.start(&after, &[]).await.unwrap();
                let root = machine.client.root();
                let at = format!("cut at {name} {nth}, step {}", step.get());
                let found = machine.client.lookup(root, b"file").await;
                let bytes = match &found {
                    Ok(attr) => read_all(&machine, attr.file()).await,
                    Err(_) => Vec::new(),
                };
                assert!(is_its_own(&bytes), "{at}");
                let is = |number: u64, write| {
                    let from = (number * CHUNK) as usize;
                    bytes.get(from..from + CHUNK as usize).is_some_and(|found| found == chunk(number, write))
                };
                let is_right = match step.get() {
                    1 => {
                        bytes.len() <= 2 * CHUNK as usize
                            || (is(1, 1) && is(3, 1) && (is(4, 1) || is(4, 2)))
                            || !is(4, 0)
                    }
                    2 => bytes.len() == CHUNK as usize + 10 || is(4, 2) && is(1, 1),
                    3 => bytes.len() >= CHUNK as usize + 10,
                    4 => found.is_err() || [3, 4, 5, 6].iter().all(|number| is(*number, 4)),
                    5 => found.is_err(),
                    _ => true,
                };
                assert!(is_right, "{at}");
                machine.audit().await;
                for name in [&b"file"[..], b"ballast"] {
                    let _ = machine.client.unlink(root, name, false).await;
                }
                machine.env.sleep(Duration::from_secs(60)).await;
                machine.audit().await;
                let reports = machine.node.stack_reports();
                let loans: u64 = reports.iter().map(|stack| stack.borrowed_bytes + stack.lent_bytes).sum();
                assert_eq!(loans, 0, "{at}");
                machine.stop().await;
            });
            run.unwrap();
            after.destroy();
        }
    }
}

/// A store in which a target has loans, and stacks lose their rows: what was not written since the copy is
/// there on a lender that comes back; what the borrower had on loan gets names when it comes back itself.
#[test]
fn loans_survive_a_restore_of_the_lender_and_are_collected_after_that_of_the_borrower() {
    const CHUNKS: u64 = 14;
    for (seed, lost) in [(7020, &[1u16, 2][..]), (7030, &[0]), (7040, &[0, 1, 2])] {
        let site = Site::spread((4, 2), 3, 1);
        let world = World::new(seed);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let file = make_file(&machine, "file").await.unwrap();
            let spare = make_file(&machine, "spare").await.unwrap();
            write(&machine, spare, 0..6, 4).await.unwrap();
            leave(&machine, 3 * CHUNK).await.unwrap();
            write(&machine, file, 0..6, 1).await.unwrap();
            let before = borrowed(&machine);
            assert!(before > 0, "the first target is full");
            // Copies of its map are on its own volume.
            machine.client.unlink(machine.client.root(), b"spare", false).await.unwrap();
            machine.client.release(spare).await.unwrap();
            machine.client.sync_all().await.unwrap();
            machine.env.sleep(Duration::from_secs(60)).await;
            machine.node.copy_maps().await.unwrap();
            write(&machine, file, 6..CHUNKS, 1).await.unwrap();
            assert!(borrowed(&machine) > before, "it is full again");
            machine.client.release(file).await.unwrap();
            machine.client.sync_all().await.unwrap();
            machine.env.sleep(Duration::from_secs(60)).await;
            for stack in lost {
                lose_rows_on(&machine.node.find_arrays(Some(&format!("meta.{stack}"))).unwrap()[0]).await;
            }
        });
        run.unwrap();
        site.cut(&world);
        let world = World::new(seed + 1);
        let run = world.run(async {
            restore(&site, &world).await.unwrap();
            let machine = site.start(&world, &[]).await.unwrap();
            machine.audit().await;
            let found = walk(&machine).await;
            let bytes = found["/file"].1.as_ref().unwrap();
            assert!(is_its_own(bytes), "{lost:?}");
            let is = |number: u64| {
                let from = (number * CHUNK) as usize;
                bytes.get(from..from + CHUNK as usize).is_some_and(|found| found == chunk(number, 1))
            };
            if !lost.contains(&0) {
                assert!((0..6).all(is), "{lost:?}: older than the copy");
            }
            // Everything is in some file, in whole stripes.
            let all: Vec<&Vec<u8>> = found.values().filter_map(|(_, contents)| contents.as_ref()).collect();
            for number in 0..CHUNKS {
                for block in chunk(number, 1).chunks(BLOCK) {
                    let has = |contents: &&&Vec<u8>| contents.chunks(BLOCK).any(|found| found == block);
                    assert!(
                        all.iter().find(has).is_some(),
                        "{lost:?}: a block of chunk {number} is in no file"
                    );
                }
            }
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// The rows of one side of each loan are damaged, and made again from the other side. Without either, files
/// lose their blocks there, and show nothing else.
#[test]
fn rows_of_loans_are_repaired_from_the_other_side() {
    const CHUNKS: u64 = 8;
    for (what, keeps_all) in [
        ("borrower", true),
        ("lender", true),
        ("lender is gone", true),
        ("both", false),
        ("borrower is gone", false),
    ] {
        let site = Site::spread((4, 2), 2, 1);
        let world = World::new(7050);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let file = make_file(&machine, "file").await.unwrap();
            leave(&machine, 3 * CHUNK).await.unwrap();
            write(&machine, file, 0..CHUNKS, 1).await.unwrap();
            machine.client.release(file).await.unwrap();
            machine.client.sync_all().await.unwrap();
            assert!(borrowed(&machine) > 0, "the first target is full");
            let (of_borrower, of_lender) = match what {
                "borrower" => (Some(vec![1, 2, 3]), None),
                "lender" => (None, Some(vec![1, 2, 3])),
                "both" => (Some(vec![1]), Some(vec![1])),
                "borrower is gone" => (Some(Vec::new()), None),
                _ => (None, Some(Vec::new())),
            };
            for (target, range, row) in [(0, all_loans(), of_borrower), (1, all_lent(), of_lender)] {
                let (Some(row), Some(kv)) = (row, machine.node.kv_of(TargetId(target))) else { continue };
                let rows = kv.scan(range.0, range.1, 1000).await.unwrap();
                assert!(!rows.is_empty(), "{what}");
                let mut writes = WriteSet::new();
                for (key, _) in rows {
                    match row.is_empty() {
                        true => writes.delete(key),
                        false => writes.put(key, row.clone()),
                    };
                }
                kv.commit_durable(writes).await.unwrap();
            }
        });
        run.unwrap();
        site.cut(&world);
        let world = World::new(7051);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            let report = machine.node.repair_fs().await.unwrap();
            assert!(report.clean, "{what}: {:?}", report.now);
            machine.stop().await;
            let machine = site.start(&world, &[]).await.unwrap();
            let root = machine.client.root();
            let file = machine.client.lookup(root, b"file").await.unwrap().file();
            let bytes = read_all(&machine, file).await;
            assert!(is_its_own(&bytes), "{what}");
            let has = |number: u64| {
                let from = (number * CHUNK) as usize;
                bytes.get(from..from + CHUNK as usize).is_some_and(|found| found == chunk(number, 1))
            };
            assert_eq!((0..CHUNKS).all(has), keeps_all, "{what}");
            machine.audit().await;
            // The space of loans that nobody has any more is free again.
            for name in [&b"file"[..], b"ballast"] {
                machine.client.unlink(root, name, false).await.unwrap();
            }
            machine.env.sleep(Duration::from_secs(60)).await;
            machine.audit().await;
            let loans: Vec<(u64, u64)> = machine
                .node
                .stack_reports()
                .iter()
                .map(|stack| (stack.borrowed_bytes, stack.lent_bytes))
                .collect();
            assert_eq!(loans, [(0, 0), (0, 0)], "{what}");
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: a write was refused while others had space that could not be had before their hosts had room.
#[test]
fn a_write_waits_for_the_space_of_a_lender_that_is_suspended() {
    let site = Site::spread((4, 2), 2, 1);
    let world = World::new(7070);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let set = async |count| {
            let wanted = WantedLayout { count: Some(count), turn: Some(1) };
            machine.node.set_layout("/", wanted).await.unwrap();
        };
        set(2).await;
        let far = make_file(&machine, "far").await.unwrap();
        set(1).await;
        let near = make_file(&machine, "near").await.unwrap();
        leave(&machine, CHUNK).await.unwrap();
        let is_full = |full| site.disks.borrow().values().for_each(|disk| disk.set_full(full));
        is_full(true);
        let waits = |stack: usize| {
            let arrays = machine.node.arrays();
            arrays[2 * stack..2 * stack + 2].iter().any(|array| array.suspended().is_some())
        };
        // These are on the other target.
        for number in 0..8 {
            machine.client.write(far, (2 * number + 1) * CHUNK, &chunk(number, 1)).await.unwrap();
        }
        let mut looks = 0;
        while !waits(1) {
            looks += 1;
            assert!(looks < 1000, "{:?}", machine.node.status().reasons);
            machine.env.sleep(Duration::from_millis(20)).await;
        }
        assert!(!waits(0), "{:?}", machine.node.status().reasons);
        let writes = scoped(write(&machine, near, 0..3, 1));
        let has_room = async {
            machine.env.sleep(Duration::from_secs(30)).await;
            is_full(false);
        };
        let (written, ()) = futures_util::future::join(writes, has_room).await;
        written.unwrap();
        assert!(borrowed(&machine) > 0, "the first target is full");
        machine.client.release(far).await.unwrap();
        machine.client.release(near).await.unwrap();
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
}
