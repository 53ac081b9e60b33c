//! Openings after a process ended, on drives that still have its unflushed writes.
//!
//! A flush of a drive fails and loses some of them, before the process ends or after. What the next process
//! calls durable must be there after a power cut, and the array must open.

use crate::bench::{Site, spec, tags, write};
use penstock_array::ArrayError;
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, World};
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

/// A life with unflushed writes, one that opens after it without a power cut, and one after a power cut.
fn lives((k, m, failing, lost): Case, fails: Fails, seed: u64) -> Result<(), String> {
    let mut site = Site::new(spec(k, m));
    let life = |site: &Site, seed: u64, flush: bool| {
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
        // The process is gone, the machine is not.
        world.destroy();
        (run.expect("nobody cuts it"), world)
    };
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        for tag in 1..=WRITES {
            write(&machine, tag, tag).await?;
        }
        machine.env.sleep(Duration::from_millis(100)).await;
        if fails == Fails::Last {
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
    if fails == Fails::First {
        site.prepare = Box::new(|number, drive| {
            if failing.contains(&number) {
                drive.plant(Op::Flush, 0, Fault::Fail);
            }
        });
    }
    let (flushed, world) = life(&site, seed + 1, true);
    site.prepare = Box::new(|_, _| ());
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
    match (flushed, life(&site, seed + 2, false).0) {
        (Ok(before), Ok(after)) if before != after => Err(format!("flushed {before:?}, found {after:?}")),
        (before, Err(error)) => Err(format!("second opening {:?}; the next: {error}", before.map(|_| ()))),
        _ => Ok(()),
    }
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
