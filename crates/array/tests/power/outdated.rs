//! Drives that come back as they were, several at a time, and replacements beside drives that take no superblock.

use crate::bench::{Site, spec, tags, write};
use crate::carriers::write_flushed;
use penstock_array::ArrayError;
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, SimDisk, World};
use std::time::Duration;

/// Drives are as they were before the last opening, as many as the code survives. An opening with more of them than k waited for
/// ever for superblocks on the ones that it had left out.
fn come_back_as_they_were(k: usize, m: usize, outdated: &[usize]) {
    let mut site = Site::new(spec(k, m));
    let mut past = Vec::new();
    for turn in 0..2 {
        let world = World::new(60_000 + turn);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            write_flushed(&machine, 1..=20).await?;
            for at in 1..=20 {
                write(&machine, at, at + 100 * turn).await?;
            }
            machine.volume.flush().await?;
            machine.array.close().await
        });
        run.unwrap().unwrap();
        world.destroy();
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
        if turn == 0 {
            past = site.disks.iter().map(|disk| disk.duplicate()).collect();
        }
    }
    for at in outdated {
        site.disks[*at] = past[*at].clone();
    }
    let world = World::new(60_010);
    let run = world.run(async {
        let work = async {
            let machine = site.open(&world, &[]).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            let found = tags(&machine.volume, 1, 20).await?;
            machine.array.close().await?;
            Ok::<_, ArrayError>(found)
        };
        timeout(&world.env(), Duration::from_secs(3600), work).await.expect("it opens")
    });
    world.destroy();
    assert_eq!(run.unwrap().unwrap(), (101..=120).collect::<Vec<_>>(), "{k}+{m} {outdated:?}");
}

#[test]
fn as_many_drives_as_may_be_lost_come_back_from_the_past() {
    for (k, m, outdated) in [
        (4, 2, &[0, 1][..]),
        (1, 1, &[0]),
        (1, 2, &[0, 1]),
        (1, 2, &[1, 2]),
        (1, 3, &[1, 2, 3]),
        (2, 3, &[0, 1, 2]),
    ] {
        come_back_as_they_were(k, m, outdated);
    }
}

/// m drives are lost, and one that is left takes no superblock, though all else. A replacement went on for ever, and kept everybody out
/// who would fail or replace a drive.
#[test]
fn a_replacement_beside_a_drive_that_takes_no_superblock_ends() {
    for (k, m) in [(1, 1), (4, 1)] {
        let site = Site::new(spec(k, m));
        let world = World::new(80_000);
        let new = SimDisk::new(7 << 20);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            write_flushed(&machine, 1..=5).await?;
            machine.array.fail_member(1, "gone").await?;
            machine.env.sleep(Duration::from_secs(60)).await;
            let drive = machine.drives[0].as_ref().unwrap();
            (0..10_000).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, 0..65_536));
            let work = machine.replace(&new, 1, 3);
            let replaced = timeout(&machine.env, Duration::from_secs(600), work).await.expect("it ends");
            eprintln!("{k}+{m}: {replaced:?}");
            write_flushed(&machine, 6..=9).await?;
            assert_eq!(tags(&machine.volume, 1, 9).await?, (1..=9).collect::<Vec<_>>());
            machine.array.stop();
            Ok::<_, ArrayError>(())
        });
        run.unwrap().unwrap();
        world.destroy();
    }
}
