//! Lost drives, failing writes and rot while the array is in use.

use crate::bench::{IO, Load, SLICE_AT, Site, buf_of, spec, tags, write, write_fresh};
use crate::carriers::write_flushed;
use crate::outdated::life;
use crate::replaced::duplicate;
use penstock_array::MemberNo;
use penstock_array::{ArrayState, CreateSpec, Discard};
use penstock_base::{BLOCK_BYTES, env::timeout};
use penstock_drive::{Fault, Op};
use penstock_sim::World;
use std::time::Duration;

#[test]
fn two_drives_lost_one_after_the_other_and_rebuilt() {
    let mut site = Site::new(spec(4, 2));
    let load = Load::new(100);
    for (life, pair) in [[0, 1], [2, 3], [4, 5], [1, 4]].into_iter().enumerate() {
        let world = World::new(life as u64 + 50);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            load.check(&machine).await?;
            load.run_logged(&machine).await?;
            load.run_fresh(&machine).await?;
            machine.array.close().await
        });
        run.unwrap().unwrap();
        pair.iter().for_each(|number| site.replace(*number));
        let world = World::new(life as u64 + 90);
        let run = world.run(async {
            let machine = site.open(&world, &pair).await?;
            assert!(machine.array.redundancy_debt_stripes() > 0);
            load.check(&machine).await?;
            load.run_logged(&machine).await?;
            load.run_fresh(&machine).await?;
            for number in pair {
                machine.replace(&site.disks[number], number, life as u64 * 10 + 5).await?;
            }
            load.run_logged(&machine).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            machine.env.sleep(Duration::from_secs(10)).await;
            assert_eq!(machine.array.missing_carriers(), 0, "{:?}", machine.array.report());
            load.check(&machine).await?;
            let report = machine.array.scrub().await?;
            assert!(report.is_clean(), "{report:?}");
            machine.array.close().await
        });
        run.unwrap().unwrap();
    }
}

#[test]
fn a_failing_write_latches_the_drive_and_nothing_is_lost() {
    for position in 0..6 {
        let mut site = Site::new(spec(4, 2));
        let world = World::new(300 + position as u64);
        let load = Load::new(120);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            machine.drives[position].as_ref().unwrap().plant(Op::Write, 40, Fault::Fail);
            load.run_logged(&machine).await?;
            load.run_fresh(&machine).await?;
            machine.volume.flush().await?;
            load.check(&machine).await?;
            assert_eq!(machine.array.report().members[position].state, "missing");
            machine.array.close().await
        });
        run.unwrap().unwrap();
        site.replace(position);
        let world = World::new(400);
        let run = world.run(async {
            let machine = site.open(&world, &[position]).await?;
            load.check(&machine).await?;
            machine.replace(&site.disks[position], position, 3).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            let report = machine.array.scrub().await?;
            assert!(report.is_clean(), "{report:?}");
            machine.array.close().await
        });
        run.unwrap().unwrap();
    }
}

#[test]
fn a_drive_that_returns_with_old_contents_is_resynced() {
    let site = Site::new(spec(4, 2));
    let load = Load::new(100);
    for lost in [3, 0] {
        for (round, without) in [vec![], vec![lost], vec![]].into_iter().enumerate() {
            let world = World::new(500 + round as u64 + lost as u64 * 10);
            let run = world.run(async {
                let machine = site.open(&world, &without).await?;
                load.check(&machine).await?;
                load.run_logged(&machine).await?;
                load.run_fresh(&machine).await?;
                if without.is_empty() {
                    assert_eq!(machine.array.wait_rebuilt().await, 0);
                    machine.env.sleep(Duration::from_secs(10)).await;
                    let report = machine.array.scrub().await?;
                    assert!(report.is_clean(), "{report:?}");
                }
                machine.array.close().await
            });
            run.unwrap().unwrap();
        }
    }
}

const WRITE_FAULTS: [Fault; 5] = [
    Fault::Rotten,
    Fault::Torn { sectors: 3 },
    Fault::Dropped,
    Fault::Misdirected { blocks: 40 },
    Fault::Slow(Duration::from_secs(5)),
];

/// Injects a fault into the `nth` write of a drive. The data must be right, be repaired, and stay so. Returns
/// true if there were that many writes, and the number of repaired blocks.
fn one_bad_write(fault: Fault, drive: usize, nth: u64) -> (bool, u64) {
    let site = Site::new(spec(4, 2));
    let world = World::new(700);
    let load = Load::new(100);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let faulty = machine.drives[drive].as_ref().unwrap().clone();
        faulty.plant(Op::Write, nth, fault);
        load.run_logged(&machine).await?;
        load.run_fresh(&machine).await?;
        load.check(&machine).await?;
        machine.array.destage_and_checkpoint().await?;
        let first = machine.array.scrub().await?;
        assert_eq!(first.parity_defects, 0, "{fault:?} {drive} {nth}: {first:?}");
        assert!(first.unreadable.is_empty(), "{fault:?} {drive} {nth}: {first:?}");
        let second = machine.array.scrub().await?;
        assert!(second.is_clean(), "{fault:?} {drive} {nth}: {second:?}");
        load.check(&machine).await?;
        let repaired = machine.array.counts().repaired_blocks;
        machine.array.close().await?;
        let machine = site.open(&world, &[]).await?;
        load.check(&machine).await?;
        machine.array.close().await?;
        Ok::<_, penstock_array::ArrayError>((!faulty.has_planted(), repaired))
    });
    let result = run.unwrap().unwrap_or_else(|error| panic!("{fault:?} {drive} {nth}: {error}"));
    world.destroy();
    result
}

#[test]
fn rot_torn_dropped_and_misdirected_writes_are_found_and_repaired() {
    for fault in WRITE_FAULTS {
        for nth in [20, 41, 60, 75] {
            assert!(one_bad_write(fault, 1, nth).0, "there are that many writes");
        }
    }
}

#[test]
#[ignore = "full form: cargo xtask show 01.4"]
fn show_rot() {
    for fault in WRITE_FAULTS {
        let (mut writes, mut mattered) = (0, 0);
        // A carrier, and a member that holds only strips.
        for drive in [1, 5] {
            for nth in 0.. {
                let (came, repaired) = one_bad_write(fault, drive, nth);
                if !came {
                    break;
                }
                writes += 1;
                mattered += u64::from(repaired > 0);
            }
        }
        println!("{fault:?}: {writes} writes in turn, {mattered} needed repair, nothing was wrong");
    }
}

#[test]
fn every_block_overwritten_in_turn_is_found_and_repaired() {
    let site = Site::new(spec(4, 2));
    let world = World::new(900);
    let load = Load::new(60);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        load.run_logged(&machine).await?;
        load.run_fresh(&machine).await?;
        machine.volume.flush().await?;
        machine.array.stop();
        Ok::<_, penstock_array::ArrayError>(())
    });
    run.unwrap().unwrap();
    world.destroy();
    let noise: Vec<u8> = (0..BLOCK_BYTES).map(|at| (at * 31 + 7) as u8).collect();
    let mut repaired = 0;
    for number in 0..6 {
        for block in site.disks[number].used_blocks() {
            let copy = duplicate(&site, None);
            copy.disks[number].corrupt(block, &noise);
            let world = World::new(block);
            let run = world.run(async {
                let machine = copy.open(&world, &[]).await?;
                load.check(&machine).await?;
                machine.array.destage_and_checkpoint().await?;
                machine.array.scrub().await?;
                let second = machine.array.scrub().await?;
                assert!(second.is_clean(), "disk {number} block {block}: {second:?}");
                load.check(&machine).await?;
                let counts = machine.array.counts();
                machine.array.stop();
                Ok::<_, penstock_array::ArrayError>(counts.repaired_blocks)
            });
            repaired += run.unwrap().unwrap_or_else(|error| panic!("disk {number} block {block}: {error}"));
            world.destroy();
        }
    }
    assert!(repaired > 100, "rot was repaired and counted: {repaired}");
}

#[test]
fn a_full_host_suspends_writes_and_loses_nothing() {
    let site = Site::new(spec(4, 2));
    let world = World::new(1000);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let volume = machine.volume.clone();
        let (data, crcs) = buf_of(&(1..=volume.stripe_blocks()).collect::<Vec<_>>());
        machine.drives[2].as_ref().unwrap().set_full(true);
        let write = volume.write_fresh(0, &data, &crcs, IO);
        let later = async {
            machine.env.sleep(Duration::from_secs(20)).await;
            assert_eq!(machine.array.report().suspended.as_deref(), Some("host full"));
            machine.drives[2].as_ref().unwrap().set_full(false);
        };
        let (written, ()) = futures_util::future::join(write, later).await;
        written?;
        volume.flush().await?;
        assert_eq!(machine.array.report().suspended, None);
        assert_eq!(tags(&volume, 0, 2).await?, [1, 2]);
        assert_eq!(machine.array.redundancy_debt_stripes(), 0);
        machine.array.close().await
    });
    run.unwrap().unwrap();
}

/// Regression: a stripe that was never written stayed locked until a full host had space again, and so did
/// all reads of it.
#[test]
fn reads_go_on_while_a_host_is_full() {
    let site = Site::new(spec(4, 2));
    life(&site, 1001, &[], async |machine| {
        write_flushed(machine, 1..=20).await?;
        let full = machine.drives[4].as_ref().unwrap();
        full.set_full(true);
        machine.env.sleep(Duration::from_secs(30)).await;
        let report = machine.array.report();
        assert_eq!((report.state, report.suspended.as_deref()), (ArrayState::Suspended, Some("host full")));
        let read = timeout(&machine.env, Duration::from_secs(5), tags(&machine.volume, 1, 20)).await;
        assert_eq!(read.expect("a read waits for the host")?, Vec::from_iter(1..=20));
        // A discard, which drops the data that waits for the host, does not wait either.
        let discard = machine.volume.discard(0, 1, Discard::OnDrives);
        timeout(&machine.env, Duration::from_secs(60), discard)
            .await
            .expect("a discard waits for the host")?;
        machine.env.sleep(Duration::from_secs(10)).await;
        assert_eq!(machine.array.report().suspended, None);
        write_flushed(machine, 21..=40).await?;
        machine.env.sleep(Duration::from_secs(30)).await;
        assert_eq!(machine.array.report().suspended.as_deref(), Some("host full"));
        full.set_full(false);
        machine.env.sleep(Duration::from_secs(30)).await;
        assert_eq!(machine.array.report().suspended, None);
        assert!(machine.array.counts().destaged_stripes > 0);
        assert_eq!(tags(&machine.volume, 21, 20).await?, Vec::from_iter(21..=40));
        machine.array.close().await
    })
    .unwrap();
}

/// More data than the log has space for is written through it while a host is full. The writes wait, and all
/// data is there afterwards.
#[test]
fn a_log_full_of_new_stripes_waits_for_a_full_host() {
    let site = Site::new(spec(4, 2));
    life(&site, 1002, &[], async |machine| {
        let full = machine.drives[4].as_ref().unwrap();
        full.set_full(true);
        let blocks = machine.volume.blocks();
        let write_all = async {
            for block in 0..blocks {
                write(machine, block, block + 1).await?;
            }
            machine.volume.flush().await
        };
        let later = async {
            machine.env.sleep(Duration::from_secs(600)).await;
            assert_eq!(machine.array.report().suspended.as_deref(), Some("host full"));
            full.set_full(false);
        };
        let (written, ()) = futures_util::future::join(write_all, later).await;
        written?;
        assert_eq!(tags(&machine.volume, 0, blocks).await?, Vec::from_iter(1..=blocks));
        machine.array.close().await
    })
    .unwrap();
}

/// Regression: a stripe of which a strip was rebuilt on a full host stayed locked until that host had space
/// again.
#[test]
fn reads_go_on_while_a_drive_is_made_again_on_a_full_host() {
    let site = Site::new(spec(4, 2));
    life(&site, 1003, &[], async |machine| {
        for stripe in 0..4 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.volume.flush().await
    })
    .unwrap();
    let count = 4 * life(&site, 1004, &[2], async |machine| {
        for stripe in 4..8 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.array.close().await?;
        Ok(machine.volume.stripe_blocks())
    })
    .unwrap();
    let world = World::new(1005);
    site.disks[2].set_full(true);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        machine.env.sleep(Duration::from_secs(30)).await;
        let report = machine.array.report();
        assert_eq!(report.suspended.as_deref(), Some("host full"));
        let read = timeout(&machine.env, Duration::from_secs(5), tags(&machine.volume, count, count)).await;
        assert_eq!(read.expect("a read waits for the host")?[0], 5000);
        site.disks[2].set_full(false);
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert_eq!(machine.array.report().suspended, None);
        machine.array.close().await
    });
    run.unwrap().unwrap();
}

#[test]
fn three_drives_failing_at_once_suspend_the_array_and_latch_none_too_many() {
    let site = Site::new(spec(4, 2));
    let world = World::new(1100);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let (data, crcs) = buf_of(&(1..=machine.volume.stripe_blocks()).collect::<Vec<_>>());
        for number in 3..6 {
            machine.drives[number].as_ref().unwrap().set_gone(true);
        }
        let later = async {
            machine.env.sleep(Duration::from_secs(30)).await;
            assert_eq!(machine.array.report().state, ArrayState::Suspended);
            for number in 3..6 {
                machine.drives[number].as_ref().unwrap().set_gone(false);
            }
        };
        let write = machine.volume.write_fresh(0, &data, &crcs, IO);
        let (written, ()) = futures_util::future::join(write, later).await;
        written?;
        machine.volume.flush().await?;
        assert_eq!(tags(&machine.volume, 0, 2).await?, [1, 2]);
        let latched =
            machine.array.report().members.iter().filter(|member| member.state == "missing").count();
        assert!(latched <= 2, "{latched} members latched");
        machine.array.close().await
    });
    run.unwrap().unwrap();
}

#[test]
fn five_of_nine_drives_lost_at_once_and_rebuilt() {
    let mut site = Site::new(CreateSpec { segment_bytes: 96 << 10, ..spec(4, 5) });
    let load = Load::new(60);
    let run = |site: &Site, lost: &[usize], life: u64| {
        let world = World::new(life);
        let run = world.run(async {
            let machine = site.open(&world, lost).await?;
            load.check(&machine).await?;
            load.run_logged(&machine).await?;
            load.run_fresh(&machine).await?;
            for number in lost {
                machine.replace(&site.disks[*number], *number, life).await?;
            }
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            load.check(&machine).await?;
            let report = machine.array.scrub().await?;
            assert!(report.is_clean(), "{report:?}");
            machine.array.close().await
        });
        run.unwrap().unwrap();
    };
    run(&site, &[], 1);
    let lost = [0, 2, 4, 6, 8];
    lost.iter().for_each(|number| site.replace(*number));
    run(&site, &lost, 2);
    run(&site, &[], 3);
}

/// The pass that computes parity also verifies the data: data that changed in memory after its checksums were
/// computed is not stored.
#[test]
#[should_panic(expected = "memory holds what was written")]
fn data_that_is_not_what_its_checksums_say_goes_no_further() {
    let site = Site::new(spec(4, 2));
    let world = World::new(1);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let (data, mut crcs) = buf_of(&(0..machine.volume.stripe_blocks()).collect::<Vec<_>>());
        crcs[3] ^= 1;
        machine.volume.write_fresh(0, &data, &crcs, IO).await
    });
    run.unwrap().unwrap();
}

/// A rotten strip is read in its good columns, even where fewer than k strips are good in such a column.
#[test]
fn good_columns_of_a_rotten_strip_need_no_others() {
    let site = Site::new(spec(4, 2));
    let world = World::new(1);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let per_stripe = machine.volume.stripe_blocks();
        let (data, crcs) = buf_of(&(0..per_stripe).collect::<Vec<_>>());
        machine.volume.write_fresh(0, &data, &crcs, IO).await?;
        machine.volume.flush().await?;
        machine.array.fail_member(MemberNo::new(5), "gone").await?;
        // Strip 0 is rotten in column 3, strips 1 and 2 in column 7.
        let geometry = machine.array.geometry();
        for (position, column) in [(0, 3), (1, 7), (2, 7)] {
            let at = SLICE_AT + geometry.block_at(0, column);
            site.disks[position].corrupt(at / BLOCK_BYTES as u64, &[0x5a; BLOCK_BYTES]);
        }
        let read = tags(&machine.volume, 0, 8).await?;
        assert_eq!(read, (0..8).collect::<Vec<_>>());
        assert!(tags(&machine.volume, 8, 8).await.is_err(), "column 7 of strip 1 has three of six");
        machine.array.close().await
    });
    run.unwrap().unwrap();
}
