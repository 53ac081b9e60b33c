//! Stores of several stacks of which some lose their key-value store, and get it back from a copy of the map.

use crate::machine::{Machine, Site};
use crate::map_copies::{confirmed, cut_restores, lose_rows_on, restore, write};
use crate::model::make_file;
use crate::repair::walk;
use crate::stacks::{resize, wipe_labels};
use penstock_base::BLOCK_BYTES;
use penstock_node::{Consent, Newer, Restore, StartError};
use penstock_sim::World;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const CHUNK: u64 = 1 << 20;
/// Whole strips: files share none.
const LEN: usize = 1 << 16;
const STACKS: u16 = 3;

/// The contents of a chunk. No block is zeros, and no two files or chunks share one.
fn bytes(seed: u8, chunk: u64) -> Vec<u8> {
    (0..LEN).map(|at| (at / 7) as u8 ^ seed.wrapping_mul(37) ^ (chunk as u8).wrapping_mul(101) | 1).collect()
}

/// A file with something in a chunk on each target.
async fn add(machine: &Machine, name: &str, seed: u8) {
    let file = make_file(machine, name).await.unwrap();
    for chunk in 0..STACKS.into() {
        write(machine, file, chunk * CHUNK, &bytes(seed, chunk)).await;
    }
    machine.client.release(file).await.unwrap();
}

/// A store with copies of the map and changes since, of which these stacks have lost their rows.
fn lost(seed: u64, stacks: &[u16]) -> Site {
    let site = Site::of_stacks(STACKS);
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for (name, seed) in [("keep", 1), ("cut", 2), ("remove", 3)] {
            add(&machine, name, seed).await;
        }
        machine.client.sync_all().await.unwrap();
        assert_eq!(machine.node.copy_maps().await.unwrap().len(), usize::from(STACKS));
        let root = machine.client.root();
        let cut = machine.client.lookup(root, b"cut").await.unwrap().file();
        resize(&machine, cut, CHUNK + 4096).await.unwrap();
        machine.client.unlink(root, b"remove", false).await.unwrap();
        machine.client.sync_all().await.unwrap();
        // Long enough that the space of the removed file is given to others.
        machine.env.sleep(Duration::from_secs(60)).await;
        for number in 0..4 {
            add(&machine, &format!("new{number}"), 100 + number).await;
        }
        machine.client.sync_all().await.unwrap();
        // Nothing is written any more that would take the place of what is lost.
        machine.env.sleep(Duration::from_secs(60)).await;
        for stack in stacks {
            let name = format!("meta.{stack}");
            lose_rows_on(&machine.node.find_arrays(Some(&name)).unwrap()[0]).await;
        }
    });
    run.unwrap();
    site.cut(&world);
    site
}

/// Asserts all that must hold after the restore of these stacks. Each block of a file is of that file, or
/// zeros.
async fn check(machine: &Machine, stacks: &[u16]) {
    machine.audit().await;
    let has_names = stacks.contains(&0);
    let found = walk(machine).await;
    let of_chunk = |name: &str, chunk: u64| {
        let contents = found[name].1.as_ref().unwrap();
        let from = contents.len().min((chunk * CHUNK) as usize);
        contents[from..contents.len().min(from + LEN)].to_vec()
    };
    for chunk in 0..STACKS.into() {
        assert!(of_chunk("/keep", chunk) == bytes(1, chunk), "{stacks:?}: chunk {chunk}");
    }
    let mut seeds = BTreeMap::from([("/cut".to_owned(), 2)]);
    match has_names {
        true => drop(seeds.insert("/remove".to_owned(), 3)),
        false => seeds.extend((0..4).map(|number| (format!("/new{number}"), 100 + number))),
    }
    let mut whole = BTreeSet::new();
    for (name, seed) in &seeds {
        for chunk in 0..STACKS.into() {
            let (now, then) = (of_chunk(name, chunk), bytes(*seed, chunk));
            for (now, then) in now.chunks(BLOCK_BYTES).zip(then.chunks(BLOCK_BYTES)) {
                let is_zeros = now.iter().all(|byte| *byte == 0);
                assert!(now == &then[..now.len()] || is_zeros, "{name} shows what is not its own");
            }
            if now == then {
                whole.insert((name.clone(), chunk));
            }
        }
    }
    // Everything that was written since on a stack with its rows is there.
    for (name, _) in seeds.iter().filter(|(name, _)| name.starts_with("/new")) {
        for chunk in (0..STACKS).filter(|stack| !stacks.contains(stack)) {
            assert!(whole.contains(&(name.clone(), chunk.into())), "{name}: chunk {chunk}");
        }
    }
    // All that was written since on the others has a name.
    let kept: Vec<&Vec<u8>> = found
        .iter()
        .filter(|(path, _)| path.starts_with("/lost+found/"))
        .filter_map(|(_, (_, contents))| contents.as_ref())
        .collect();
    for stack in stacks {
        for number in 0..4 {
            let block = &bytes(100 + number, (*stack).into())[..BLOCK_BYTES];
            let has = |contents: &&Vec<u8>| contents.chunks(BLOCK_BYTES).any(|found| found == block);
            assert!(kept.iter().any(has), "chunk {stack} of new{number} is in no file: {:?}", found.keys());
        }
    }
}

#[test]
fn each_stack_comes_back_from_a_copy_of_its_own() {
    for (seed, stacks) in
        [(6000, &[1][..]), (6010, &[0]), (6020, &[0, 2]), (6030, &[0, 1, 2]), (6040, &[1, 2])]
    {
        let site = lost(seed, stacks);
        let world = World::new(seed + 1);
        let run = world.run(async {
            let started = site.start(&world, &[]).await;
            let hint = match started {
                Ok(machine) => {
                    assert!(!stacks.contains(&0), "{stacks:?}: the names are lost");
                    let reports = machine.node.stack_reports();
                    reports.into_iter().find_map(|stack| stack.reason).unwrap()
                }
                Err(error) => error.to_string(),
            };
            assert!(hint.contains("fs check --repair --map"), "{hint}");
        });
        run.unwrap();
        world.destroy();
        let world = World::new(seed + 2);
        let run = world.run(async {
            let report = restore(&site, &world).await.unwrap();
            assert_eq!(report.result, "mended", "{stacks:?}: {:?}", report.now);
            let targets: Vec<u32> = report.restored.iter().map(|restored| restored.target).collect();
            let wanted: Vec<u32> = stacks.iter().copied().map(u32::from).collect();
            assert_eq!(targets, wanted);
            for restored in &report.restored {
                let newer = restored.newer_file.as_ref().unwrap();
                assert_eq!(newer.paths, [format!("/lost+found/inode-{}", newer.inode)], "{stacks:?}");
            }
            let machine = site.start(&world, &[]).await.unwrap();
            check(&machine, stacks).await;
            add(&machine, "after", 7).await;
            machine.audit().await;
            machine.stop().await;
            let refused = restore(&site, &world).await.unwrap_err().to_string();
            assert!(refused.contains("every row of this store can be read"), "{refused}");
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: the second restore of the names from one copy gave inode numbers again, and the opening
/// dropped what other targets had under them.
#[test]
fn names_that_are_lost_twice_come_back_from_one_copy() {
    let site = lost(6050, &[0]);
    let world = World::new(6051);
    let run = world.run(async {
        restore(&site, &world).await.unwrap();
        let machine = site.start(&world, &[]).await.unwrap();
        add(&machine, "after", 7).await;
        machine.client.sync_all().await.unwrap();
        machine.env.sleep(Duration::from_secs(60)).await;
        lose_rows_on(&machine.node.find_arrays(Some("meta.0")).unwrap()[0]).await;
    });
    run.unwrap();
    site.cut(&world);
    let world = World::new(6052);
    let run = world.run(async {
        let report = restore(&site, &world).await.unwrap();
        assert_eq!(report.result, "mended", "{:?}", report.now);
        let machine = site.start(&world, &[]).await.unwrap();
        check(&machine, &[0]).await;
        let found = walk(&machine).await;
        for (seed, chunk) in [7, 100, 101, 102, 103].into_iter().flat_map(|seed| [(seed, 1), (seed, 2)]) {
            let wanted = bytes(seed, chunk);
            let has = |contents: &Vec<u8>| contents.chunks(LEN).any(|found| found == wanted);
            let mut files = found.values().filter_map(|(_, contents)| contents.as_ref());
            assert!(files.any(has), "chunk {chunk} of file {seed} is in no file: {:?}", found.keys());
        }
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Nothing is changed before an administrator has agreed to all copies.
#[test]
fn all_copies_are_asked_for_at_once() {
    let site = lost(6100, &[0, 2]);
    let world = World::new(6101);
    let run = world.run(async {
        let mut how = confirmed(Newer::AreCollected).unwrap();
        let mut agreed = None;
        for consent in [Consent::No, Consent::To(5)] {
            site.restore.set(Some(Restore { consent, ..how }));
            let error = site.start(&world, &[]).await.err().unwrap();
            let StartError::Unconfirmed { why, copies, previews } = error else { panic!("{error}") };
            assert!(why.contains("target 0: ") && why.contains("target 2: "), "{why}");
            assert!(!why.contains("target 1: "), "{why}");
            let targets: Vec<u32> = previews.iter().map(|preview| preview.target).collect();
            assert_eq!(targets, [0, 2]);
            agreed = Some(copies);
        }
        how.consent = Consent::To(agreed.unwrap());
        site.restore.set(Some(how));
        let machine = site.start(&world, &[]).await.unwrap();
        site.restore.set(None);
        machine.node.repair_fs().await.unwrap();
        check(&machine, &[0, 2]).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Names are not set back behind the back of a stack that is away.
#[test]
fn names_are_not_restored_without_all_stacks() {
    let site = Site::of_stacks(2);
    let world = World::new(6200);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.node.copy_maps().await.unwrap();
        lose_rows_on(&machine.node.find_arrays(Some("meta.0")).unwrap()[0]).await;
        wipe_labels(&site, &machine, "data.1").await;
    });
    run.unwrap();
    site.cut(&world);
    let world = World::new(6201);
    let run = world.run(async {
        let careful = confirmed(Newer::AreCollected).map(|how| Restore { may_lack: false, ..how });
        site.restore.set(careful);
        let refused = site.start(&world, &[]).await.err().unwrap().to_string();
        assert!(refused.contains("target 1 is away, and names are not set back without it"), "{refused}");
        // Force is no consent to that.
        site.restore.set(careful.map(|how| Restore { is_forced: true, ..how }));
        let refused = site.start(&world, &[]).await.err().unwrap().to_string();
        assert!(refused.contains("target 1 is away, and names are not set back without it"), "{refused}");
    });
    run.unwrap();
    world.destroy();
}

/// Nor are restored names repaired while a stack is away that was there when they were restored.
#[test]
fn restored_names_are_not_repaired_without_all_stacks() {
    let site = Site::of_stacks(2);
    let world = World::new(6210);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.node.copy_maps().await.unwrap();
        lose_rows_on(&machine.node.find_arrays(Some("meta.0")).unwrap()[0]).await;
    });
    run.unwrap();
    site.cut(&world);
    let careful = confirmed(Newer::AreCollected).map(|how| Restore { may_lack: false, ..how });
    site.restore.set(careful);
    let world = World::new(6211);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        assert_eq!(machine.node.restored().await.unwrap().len(), 1);
        // It is cut off before the repair.
        wipe_labels(&site, &machine, "data.1").await;
    });
    run.unwrap();
    site.cut(&world);
    for may_lack in [false, true] {
        site.restore.set(careful.map(|how| Restore { may_lack, ..how }));
        let world = World::new(6212);
        let run = world.run(async {
            let started = site.start(&world, &[]).await;
            if !may_lack {
                let refused = started.err().unwrap().to_string();
                assert!(
                    refused.contains("target 1 is away, and names are not set back without it"),
                    "{refused}"
                );
                return;
            }
            let machine = started.unwrap();
            machine.node.repair_fs().await.unwrap();
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// The power is cut at each kind of write of a restore of several stacks: it is made again, or goes on.
#[test]
fn a_restore_of_several_stacks_is_made_again_after_a_power_cut() {
    const LOST: &[u16] = &[0, 2];
    let (mut again, mut done) = (0, 0);
    cut_restores(&lost(6300, LOST), 6301, 4, |site, nth, name| {
        let world = World::new(6302 + nth);
        let run = world.run(async {
            let context = format!("cut at {name} {nth}");
            match restore(site, &world).await {
                Ok(_) => again += 1,
                // The repair was the last step.
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("every row of this store can be read"), "{context}: {error}");
                    done += 1;
                }
            }
            let machine = site.start(&world, &[]).await.unwrap_or_else(|error| panic!("{context}: {error}"));
            check(&machine, LOST).await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    });
    assert!(again > 10, "{again} restores were made again, {done} were done");
}

/// Regression: a target that was forgotten counted as one that is away, so names were restored only with
/// `--accept-loss`, and `--force` was refused.
#[test]
fn nobody_waits_for_a_forgotten_target_to_restore_names() {
    for (seed, is_lost) in [(6220, true), (6230, false)] {
        let site = Site::of_stacks(2);
        let world = World::new(seed);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            add(&machine, "keep", 1).await;
            machine.stop().await;
            wipe_labels(&site, &machine, "data.1").await;
            let machine = site.start(&world, &[]).await.unwrap();
            machine.node.forget_target(1).await.unwrap();
            machine.node.copy_maps().await.unwrap();
            if is_lost {
                lose_rows_on(&machine.node.find_arrays(Some("meta.0")).unwrap()[0]).await;
            } else {
                machine.stop().await;
            }
        });
        run.unwrap();
        site.cut(&world);
        let careful = confirmed(Newer::AreCollected).map(|how| Restore { may_lack: false, ..how });
        let world = World::new(seed + 1);
        let run = world.run(async {
            site.restore.set(careful.map(|how| Restore { is_forced: !is_lost, consent: Consent::No, ..how }));
            match site.start(&world, &[]).await.err().unwrap() {
                StartError::Unconfirmed { why, .. } => assert!(!why.contains("away"), "{why}"),
                error => panic!("{error}"),
            }
            site.restore.set(careful.map(|how| Restore { is_forced: !is_lost, ..how }));
            let machine = site.start(&world, &[]).await.unwrap();
            site.restore.set(None);
            assert_eq!(machine.node.restored().await.unwrap().len(), 1);
            assert!(machine.node.repair_fs().await.unwrap().clean);
            assert_eq!(machine.node.stack_reports()[1].state, "forgotten");
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}
