//! Drives that come back as they were, several at a time, and replacements beside drives that take no superblock.

use crate::bench::{Machine, Site, spec, tags, write, write_fresh};
use crate::carriers::write_flushed;
use penstock_array::ArrayError;
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, SimDisk, World};
use std::time::Duration;

/// One opening of the site, without the drives that are lost.
fn life<T>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    work: impl AsyncFnOnce(&Machine) -> Result<T, ArrayError>,
) -> Result<T, ArrayError> {
    let world = World::new(seed);
    let run = world.run(async {
        let all = async {
            let machine = site.open(&world, lost).await?;
            work(&machine).await
        };
        timeout(&world.env(), Duration::from_secs(3600), all).await.expect("it ends")
    });
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    run.unwrap()
}

async fn write_some_and_close(machine: &Machine) -> Result<(), ArrayError> {
    write_flushed(machine, 1..=20).await?;
    machine.array.close().await
}

/// Drives are as they were before the last opening, as many as the code survives. An opening with more of them than k waited for
/// ever for superblocks on the ones that it had left out.
fn come_back_as_they_were(k: usize, m: usize, outdated: &[usize]) {
    let mut site = Site::new(spec(k, m));
    let mut past = Vec::new();
    for turn in 0..2 {
        let store = async |machine: &Machine| {
            write_flushed(machine, 1..=20).await?;
            for at in 1..=20 {
                write(machine, at, at + 100 * turn).await?;
            }
            machine.volume.flush().await?;
            machine.array.close().await
        };
        life(&site, 60_000 + turn, &[], store).unwrap();
        if turn == 0 {
            past = site.disks.iter().map(|disk| disk.duplicate()).collect();
        }
    }
    for at in outdated {
        site.disks[*at] = past[*at].clone();
    }
    let rebuild_and_read = async |machine: &Machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        let found = tags(&machine.volume, 1, 20).await?;
        machine.array.close().await?;
        Ok(found)
    };
    let found = life(&site, 60_010, &[], rebuild_and_read).unwrap();
    assert_eq!(found, (101..=120).collect::<Vec<_>>(), "{k}+{m} {outdated:?}");
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

/// A drive is lost, and comes back as it was before an opening in which it served. Only what it had missed since its loss was made
/// again, and the rest was lost with m other drives.
fn lost_and_back_as_it_was_earlier(k: usize, m: usize, away_at_a_start: bool) {
    let mut site = Site::new(spec(k, m));
    life(&site, 60_020, &[], write_some_and_close).unwrap();
    let past = site.disks[0].duplicate();
    let stripe_blocks = (k * 8) as u64;
    let serve = async |machine: &Machine| {
        for stripe in 6..12 {
            write_fresh(machine, stripe, stripe * 1000).await?;
        }
        machine.volume.flush().await?;
        if !away_at_a_start {
            machine.array.fail_member(0, "gone").await?;
            write_fresh(machine, 12, 12_000).await?;
        }
        machine.array.close().await
    };
    life(&site, 60_021, &[], serve).unwrap();
    if away_at_a_start {
        let without = async |machine: &Machine| {
            write_fresh(machine, 12, 12_000).await?;
            machine.array.close().await
        };
        life(&site, 60_022, &[0], without).unwrap();
    }
    site.disks[0] = past;
    let rebuild = async |machine: &Machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.close().await
    };
    life(&site, 60_023, &[], rebuild).unwrap();
    let lost: Vec<usize> = (1..=m).collect();
    let read = async |machine: &Machine| {
        for stripe in 6..13 {
            let found = tags(&machine.volume, stripe * stripe_blocks, stripe_blocks).await?;
            assert_eq!(found[0], stripe * 1000, "{k}+{m} {away_at_a_start}");
        }
        machine.array.stop();
        Ok(())
    };
    life(&site, 60_024, &lost, read).unwrap();
}

#[test]
fn a_lost_drive_that_comes_back_as_it_was_earlier_is_made_again() {
    for (k, m, away_at_a_start) in
        [(4, 1, true), (4, 1, false), (4, 2, true), (1, 1, true), (1, 1, false), (2, 3, true)]
    {
        lost_and_back_as_it_was_earlier(k, m, away_at_a_start);
    }
}

/// Of the carriers one is as it was before the last opening, and the others are away. The members that carry no log say so: the array
/// showed its old contents, and reverted to them for good.
#[test]
fn an_old_carrier_alone_is_refused() {
    for (k, m) in [(4, 1), (4, 2)] {
        let mut site = Site::new(spec(k, m));
        life(&site, 60_030, &[], write_some_and_close).unwrap();
        let past = site.disks[0].duplicate();
        let change = async |machine: &Machine| {
            for at in 1..=20 {
                write(machine, at, at + 100).await?;
            }
            machine.volume.flush().await?;
            machine.array.stop();
            Ok(())
        };
        life(&site, 60_031, &[], change).unwrap();
        let right = std::mem::replace(&mut site.disks[0], past);
        let lost: Vec<usize> = (1..=m).collect();
        let refused = life(&site, 60_032, &lost, async |_| Ok(())).unwrap_err();
        assert!(matches!(refused, ArrayError::CannotRead { .. }), "{refused}");
        site.disks[0] = right;
        let found = life(&site, 60_033, &[], async |machine| {
            let found = tags(&machine.volume, 1, 20).await?;
            machine.array.close().await?;
            Ok(found)
        });
        assert_eq!(found.unwrap(), (101..=120).collect::<Vec<_>>(), "{k}+{m}");
    }
}
