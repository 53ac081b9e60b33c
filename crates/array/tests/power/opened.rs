//! Openings after a process ended, on drives that still have its unflushed writes.
//!
//! A flush of a drive fails and loses some of them, before the process ends or after. What the next process
//! calls durable must be there after a power cut, and the array must open.

use crate::bench::{LOG_AT, Site, label_of, plan, spec, tags, write, write_fresh};
use crate::hostile::roots;
use penstock_array::ArrayError;
use penstock_array::format::record::RecordHead;
use penstock_base::BLOCK_BYTES;
use penstock_base::env::timeout;
use penstock_drive::{Fault, FaultyDrive, Op};
use penstock_sim::{CutMode, World};
use std::ops::Range;
use std::time::Duration;

const WRITES: u64 = 40;

/// Code, the disks whose flush fails, and those that are away.
type Case = (usize, usize, &'static [usize], &'static [usize]);

/// The moment at which the flushes fail.
#[derive(Clone, Copy, PartialEq)]
enum Fails {
    /// At the end of the first life, which then ends.
    Last,
    /// At the beginning of the second life.
    First,
}

/// A life that reads all blocks, and flushes if `flush` is true. Then the process is gone, and the machine
/// goes on.
fn life(site: &Site, lost: &[usize], seed: u64, flush: bool) -> (Result<Vec<u64>, ArrayError>, World) {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        let found = tags(&machine.volume, 1, WRITES).await?;
        if flush {
            machine.volume.flush().await?;
        }
        machine.array.stop();
        Ok::<_, ArrayError>(found)
    });
    world.destroy();
    (run.expect("nobody cuts it"), world)
}

/// Two lives: one that flushes and ends without a power cut, and after the cut one that finds the same.
fn last_lives(site: &mut Site, lost: &[usize], seed: u64) -> Result<Option<Vec<u64>>, String> {
    let (flushed, world) = life(site, lost, seed, true);
    site.prepare = Box::new(|_, _| ());
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
    match (flushed, life(site, lost, seed + 1, false).0) {
        (Ok(before), Ok(after)) if before != after => Err(format!("flushed {before:?}, found {after:?}")),
        (before, Err(error)) => Err(format!("second opening {:?}; the next: {error}", before.map(|_| ()))),
        (before, Ok(_)) => Ok(before.ok()),
    }
}

/// Flush number `nth` of each of these disks fails in the next life.
fn fail_flushes(site: &mut Site, failing: &'static [usize], nth: u64) {
    site.prepare = Box::new(move |number, drive| {
        if failing.contains(&number) {
            drive.plant(Op::Flush, nth, Fault::Fail);
        }
    });
}

/// A life with [`WRITES`] writes that are not flushed. With `fails`, a flush fails on these disks.
fn first_life(site: &mut Site, lost: &[usize], failing: &[usize], fails: bool, seed: u64) {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        for tag in 1..=WRITES {
            write(&machine, tag, tag).await?;
        }
        machine.env.sleep(Duration::from_millis(100)).await;
        if fails {
            for number in failing {
                let drive = machine.drives[*number].as_ref().expect("a disk that is here");
                drive.plant(Op::Flush, 0, Fault::Fail);
                drive.plant(Op::DurableWrite, 0, Fault::Fail);
            }
            machine.volume.flush().await.expect_err("more flushes fail than may");
        }
        machine.array.stop();
        Ok::<_, ArrayError>(())
    });
    run.unwrap().unwrap();
    world.destroy();
}

/// A life with [`WRITES`] writes, flushed at its end or, with `each`, one by one. Then the power is cut.
fn synced_life(site: &Site, lost: &[usize], seed: u64, each: bool) {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        for tag in 1..=WRITES {
            write(&machine, tag, tag).await?;
            if each || tag == WRITES {
                machine.volume.flush().await?;
            }
        }
        machine.array.stop();
        Ok::<_, ArrayError>(())
    });
    run.unwrap().unwrap();
    site.cut(&world);
}

/// A life with unflushed writes, one that opens after it without a power cut, and one after a power cut.
fn lives((k, m, failing, lost): Case, fails: Fails, seed: u64) -> Result<(), String> {
    let mut site = Site::new(spec(k, m));
    first_life(&mut site, lost, failing, fails == Fails::Last, seed);
    if fails == Fails::First {
        fail_flushes(&mut site, failing, 0);
    }
    last_lives(&mut site, lost, seed + 1).map(|_| ())
}

fn check(cases: &[Case], fails: Fails) {
    for case in cases {
        for seed in 0..10 {
            lives(*case, fails, 7000 + seed * 10)
                .unwrap_or_else(|why| panic!("{case:?}, seed {seed}: {why}"));
        }
    }
}

#[test]
fn a_first_flush_that_fails_after_a_kill_loses_nothing_that_counts() {
    let all = &[0, 1, 2, 3, 4, 5];
    let cases: [Case; 5] = [
        (1, 1, &[0, 1], &[]),
        (4, 2, all, &[]),
        (4, 2, &[0, 1, 2], &[]),
        (1, 1, &[0], &[1]),
        (3, 0, &[0], &[]),
    ];
    check(&cases, Fails::First);
}

#[test]
fn a_restart_after_a_failed_flush_calls_nothing_durable_that_is_lost() {
    let cases: [Case; 4] =
        [(1, 1, &[0, 1], &[]), (4, 2, &[0, 1, 2], &[]), (1, 1, &[0], &[1]), (3, 0, &[0], &[])];
    check(&cases, Fails::Last);
}

/// A checkpoint is cut between its pages and its root. A flush of the next opening fails, and the one after
/// it finds in a cache what it wrote.
#[test]
fn pages_of_a_cut_checkpoint_do_not_come_back() {
    let cases: [Case; 3] = [(3, 0, &[0], &[]), (1, 1, &[0, 1], &[]), (4, 2, &[0, 1, 2], &[])];
    for (k, m, failing, lost) in cases {
        for (seed, nth) in (0..8).map(|seed| 9000 + 10 * seed).zip([1, 2, 3, 4, 5, 6, 7].into_iter().cycle())
        {
            let mut site = Site::new(spec(k, m));
            let world = World::new(seed);
            let run = world.run(async {
                let machine = site.open(&world, lost).await?;
                write_fresh(&machine, 4, 1000).await?;
                machine.volume.flush().await?;
                machine.array.destage_and_checkpoint().await?;
                write_fresh(&machine, 5, 2000).await?;
                for tag in 1..=WRITES {
                    write(&machine, tag, tag).await?;
                }
                machine.volume.flush().await?;
                let hits = world.hits().get("checkpoint.root").copied().unwrap_or(0);
                world.plan_cut(plan("checkpoint.root", hits));
                machine.array.destage_and_checkpoint().await
            });
            assert!(run.is_err(), "it is cut at the root");
            world.destroy();
            site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
            fail_flushes(&mut site, failing, nth);
            // It ends, or fails with the flush.
            drop(life(&site, lost, seed + 1, false));
            site.prepare = Box::new(|_, _| ());
            let read = last_lives(&mut site, lost, seed + 2);
            assert_eq!(read, Ok(Some((1..=WRITES).collect())), "{k}+{m}, seed {seed}, flush {nth}");
        }
    }
}

/// No drive may be lost, and a carrier takes no write at the place of the newest root. Waiting for it would
/// keep the array closed, also if the others take none for a moment.
#[test]
fn a_root_whose_place_takes_no_write_does_not_keep_the_array_from_opening() {
    for refusals_of_others in [0, 1] {
        open_with_a_bad_place_of_the_root(refusals_of_others);
    }
}

fn open_with_a_bad_place_of_the_root(refusals_of_others: u32) {
    let mut site = Site::new(spec(4, 1));
    synced_life(&site, &[4], 3, false);
    let (block, _) = roots(&site.disks[0]).pop().expect("a carrier has a root");
    let at = block * BLOCK_BYTES as u64;
    site.prepare = Box::new(move |number, drive| {
        let place = at..at + BLOCK_BYTES as u64;
        let refusals = if number == 0 { 10_000 } else { refusals_of_others };
        (0..refusals).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, place.clone()));
    });
    let world = World::new(4);
    let opened = world.run(async {
        let opening = async { tags(&site.open(&world, &[4]).await?.volume, 1, WRITES).await };
        timeout(&world.env(), Duration::from_secs(3600), opening).await.expect("it opens within an hour")
    });
    world.destroy();
    assert_eq!(opened.unwrap().unwrap(), (1..=WRITES).collect::<Vec<_>>());
}

/// A life after one whose flushes failed on both carriers, while `prepare` holds for its drives. It syncs one
/// more block, and metadata is scrubbed. After a power cut, without the disks `lost`, all of it must be
/// there.
fn synced_life_after_failed_flushes(
    seed: u64,
    prepare: impl Fn(usize, &FaultyDrive) + 'static,
    lost: &[usize],
) -> Result<(), String> {
    let mut site = Site::new(spec(1, 1));
    first_life(&mut site, &[], &[0, 1], true, seed);
    site.prepare = Box::new(move |number, drive| prepare(number, drive));
    let world = World::new(seed + 1);
    let synced = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write(&machine, 60, 60).await?;
        machine.volume.flush().await?;
        machine.array.scrub_metadata().await?;
        let found = tags(&machine.volume, 1, 60).await?;
        let missing = machine.array.missing_carriers();
        machine.array.stop();
        Ok::<_, ArrayError>((found, missing))
    });
    world.destroy();
    site.prepare = Box::new(|_, _| ());
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
    // A life that could not sync has promised nothing, but the array must open.
    let synced = synced.unwrap().ok();
    if lost.iter().any(|_| synced.as_ref().is_none_or(|(_, missing)| *missing > 0)) {
        return Ok(());
    }
    let world = World::new(seed + 2);
    let found = world.run(async { tags(&site.open(&world, lost).await?.volume, 1, 60).await });
    world.destroy();
    match (found.unwrap(), synced) {
        (Ok(found), Some((synced, _))) if found != synced => {
            Err(format!("synced {synced:?}, found {found:?}"))
        }
        (Ok(_), _) => Ok(()),
        (Err(error), _) => Err(error.to_string()),
    }
}

/// The log, without the header of its first segment.
const LOG: Range<u64> = LOG_AT..LOG_AT + (3 << 20);

/// One carrier refuses a part of the log and is lost, the other refuses another part and may not be lost.
#[test]
fn a_part_of_the_log_that_no_carrier_took_is_not_passed_over() {
    for seed in (0..40).map(|seed| 50_000 + 10 * seed) {
        let refuse = |number: usize, drive: &FaultyDrive| {
            drive.plant_within(Op::Write, number as u64, Fault::Fail, LOG);
        };
        synced_life_after_failed_flushes(seed, refuse, &[]).unwrap_or_else(|why| panic!("{seed}: {why}"));
    }
}

/// The host of one carrier is full for the time of one write. What a scrub then reads from that carrier may
/// lie in its cache alone.
#[test]
fn a_carrier_that_refused_a_part_of_the_log_does_not_count_as_whole() {
    for seed in (0..40).map(|seed| 80_000 + 10 * seed) {
        let refuse = |number: usize, drive: &FaultyDrive| {
            if number == 0 {
                drive.plant_within(Op::Write, 1, Fault::HostFull, LOG);
            }
        };
        synced_life_after_failed_flushes(seed, refuse, &[1]).unwrap_or_else(|why| panic!("{seed}: {why}"));
    }
}

/// Flushes fail on both carriers. Each refuses one part of the log in the next life, which ends before
/// metadata is written again. The life after that finds everything good.
#[test]
fn a_refusal_is_not_forgotten_by_a_restart() {
    let mut read = 0;
    for (seed, nth) in (0..24).map(|seed| (9000 + 10 * seed, seed % 4)) {
        let mut site = Site::new(spec(1, 1));
        first_life(&mut site, &[], &[0, 1], true, seed);
        site.prepare = Box::new(move |_, drive| drive.plant_within(Op::Write, nth, Fault::Fail, LOG));
        life(&site, &[], seed + 1, false).0.unwrap();
        site.prepare = Box::new(|_, _| ());
        let synced = life(&site, &[], seed + 2, true);
        site.disks.iter().for_each(|disk| disk.cut(&synced.1, CutMode::Nothing));
        let lost = [usize::from(seed % 20 == 0)];
        // If the other drive was given up for its refusal, this one has the only copy.
        let (_, label) = label_of(&site.disks[lost[0]]).unwrap();
        if label.descriptor().unwrap().members[1 - lost[0]].stale {
            continue;
        }
        let found = life(&site, &lost, seed + 3, false).0;
        assert_eq!(found.map_err(|error| error.to_string()).unwrap(), synced.0.unwrap(), "seed {seed}");
        read += 1;
    }
    assert!(read > 12, "{read}");
}

/// An opening writes a durable record again that has rotted on one carrier, and its flush fails. What the
/// next opening finds there lies in a cache alone.
#[test]
fn a_durable_record_that_an_unfinished_opening_wrote_is_written_again() {
    let mut was_written = false;
    for seed in (0..20).map(|seed| 90_000 + 10 * seed) {
        let (mut site, lost) = (Site::new(spec(2, 1)), [2]);
        synced_life(&site, &lost, seed, true);
        let disk = site.disks[0].clone();
        let records = || {
            let is_record = |block: &u64| RecordHead::claimed_head_blocks(&disk.peek(*block)).is_some();
            disk.used_blocks().into_iter().filter(is_record).collect::<Vec<_>>()
        };
        let block = records()[3];
        let bytes = disk.peek(block).to_vec();
        disk.corrupt(block, &[0; BLOCK_BYTES]);
        fail_flushes(&mut site, &[0], 3);
        let (opened, world) = life(&site, &lost, seed + 1, false);
        opened.expect_err("the flush fails");
        assert!(world.hits().contains_key("replay.mend") && !world.hits().contains_key("checkpoint.root"));
        was_written |= disk.peek(block)[..] == bytes[..];
        site.prepare = Box::new(|_, _| ());
        let (opened, world) = life(&site, &lost, seed + 2, true);
        assert_eq!(opened.unwrap(), (1..=WRITES).collect::<Vec<_>>());
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
        assert_eq!(disk.peek(block)[..], bytes[..], "seed {seed}: the record is rotten again");
    }
    assert!(was_written, "the record was in a cache");
}
