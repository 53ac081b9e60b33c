//! Waits that must end: for log space in a full log, in a closed array, and for flushes that overlap.

use crate::bench::{IO, Machine, Site, buf_of, spec, tags};
use penstock_array::{ArrayError, Discard};
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use penstock_sim::World;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(600);

/// Runs `work` on a new array, and fails if it takes ten minutes.
fn in_time(seed: u64, (k, m): (usize, usize), work: impl AsyncFnOnce(&Machine) -> Result<(), ArrayError>) {
    let site = Site::new(spec(k, m));
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let env = machine.env.clone();
        timeout(&env, LONG, work(&machine)).await.expect("it waits for nothing")
    });
    run.unwrap().unwrap();
    world.destroy();
}

async fn write(machine: &Machine, block: u64, tag: u64) -> Result<(), ArrayError> {
    let (data, crcs) = buf_of(&[tag]);
    machine.volume.write(block, &data, &crcs).await
}

async fn write_fresh(machine: &Machine, stripe: u64) -> Result<(), ArrayError> {
    let (data, crcs) = buf_of(&(1..=machine.volume.stripe_blocks()).collect::<Vec<_>>());
    machine.volume.write_fresh(stripe, &data, &crcs, IO).await
}

#[test]
fn small_writes_over_all_stripes_never_fill_the_log_with_destage_records() {
    for code in [(4, 2), (1, 2), (8, 1)] {
        in_time(2000, code, async |machine| {
            let blocks = machine.volume.blocks();
            for stripe in 0..blocks / machine.volume.stripe_blocks() {
                write_fresh(machine, stripe).await?;
            }
            for tag in 1..4000 {
                write(machine, machine.world.below(blocks), tag).await?;
            }
            machine.array.close().await
        });
    }
}

#[test]
fn blocks_written_again_without_a_flush_never_fill_the_log() {
    in_time(2001, (4, 2), async |machine| {
        for tag in 1..3000 {
            write(machine, tag % 100, tag).await?;
        }
        machine.array.close().await
    });
}

#[test]
fn fresh_stripes_and_discards_never_fill_the_log_while_data_waits_in_it() {
    in_time(2002, (4, 2), async |machine| {
        let data = async {
            for tag in 1..2000 {
                write(machine, machine.world.below(200), tag).await?;
            }
            Ok::<_, ArrayError>(())
        };
        let fresh = async {
            for _ in 0..300 {
                write_fresh(machine, 20).await?;
                machine.volume.flush().await?;
                machine.volume.discard(20, 1, penstock_array::Discard::OnDrives).await?;
            }
            Ok::<_, ArrayError>(())
        };
        let (data, fresh) = futures_util::future::join(data, fresh).await;
        data.and(fresh)?;
        machine.array.close().await
    });
}

#[test]
fn a_fresh_stripe_written_again_through_a_full_log_is_destaged() {
    in_time(2003, (4, 2), async |machine| {
        for round in 0..40 {
            let stripe = round % 12;
            if machine.volume.is_unwritten(stripe).await? {
                write_fresh(machine, stripe).await?;
            }
            for at in 0..60 {
                write(machine, (stripe * 32 + at * 7) % 384, round * 100 + at + 1).await?;
            }
            if round % 3 == 0 {
                machine.volume.discard((round * 5) % 12, 1, penstock_array::Discard::OnDrives).await?;
            }
        }
        machine.array.close().await
    });
}

#[test]
fn who_waits_for_room_in_a_log_learns_that_it_was_closed() {
    in_time(2004, (4, 2), async |machine| {
        machine.drives[0].as_ref().unwrap().set_full(true);
        let writer = async {
            loop {
                if let Err(error) = write(machine, machine.world.below(300), 1).await {
                    return error;
                }
            }
        };
        let closer = async {
            machine.env.sleep(Duration::from_secs(5)).await;
            machine.array.stop();
        };
        let (error, ()) = futures_util::future::join(writer, closer).await;
        assert!(matches!(error, ArrayError::Closed), "{error}");
        assert!(machine.volume.flush().await.is_err());
        Ok(())
    });
}

#[test]
fn a_close_of_a_suspended_array_ends_and_says_why() {
    in_time(2005, (4, 2), async |machine| {
        write(machine, 0, 1).await?;
        machine.volume.flush().await?;
        machine.drives[2].as_ref().unwrap().set_full(true);
        let error = machine.array.close().await.unwrap_err();
        assert!(matches!(error, ArrayError::Suspended(_)), "{error}");
        Ok(())
    });
}

#[test]
fn a_stripe_is_recorded_only_after_the_flush_that_another_began() {
    for seed in 0..40 {
        in_time(3000 + seed, (4, 2), async |machine| {
            write(machine, 0, 1).await?;
            machine.volume.flush().await?;
            for number in 3..6 {
                let slow = Fault::Slow(Duration::from_millis(50));
                machine.drives[number].as_ref().unwrap().plant(Op::Flush, 0, slow);
            }
            let flush = async {
                machine.env.sleep(Duration::from_micros(100 * seed)).await;
                machine.volume.flush().await?;
                let recorded = machine.array.report().stripes.1 > 0;
                for number in 3..6 {
                    let disk = &machine.disks[number];
                    let owed = disk.unflushed_before(disk.order());
                    assert!(!recorded || owed.is_empty(), "seed {seed}: member {number} owes {owed:?}");
                }
                Ok::<_, ArrayError>(())
            };
            let (flushed, destaged) =
                futures_util::future::join(flush, machine.array.destage_and_checkpoint()).await;
            flushed.and(destaged)
        });
    }
}

/// Regression: the parts of a long write before the end of the volume were written although the write was
/// rejected.
#[test]
fn a_long_write_beyond_the_volume_changes_nothing() {
    in_time(2010, (4, 2), async |machine| {
        let blocks = machine.volume.blocks();
        let (data, crcs) = buf_of(&vec![7; blocks as usize + 1]);
        for block in [0, 1, blocks, u64::MAX] {
            let refused = machine.volume.write(block, &data, &crcs).await;
            assert!(matches!(refused, Err(ArrayError::Invalid(_))), "{block}");
        }
        let found = tags(&machine.volume, 0, blocks).await?;
        assert!(found.iter().all(|tag| *tag == 0));
        assert!(machine.volume.discard(0, u64::MAX, Discard::OnDrives).await.is_err());
        assert!(machine.volume.discard(u64::MAX, 2, Discard::OnDrives).await.is_err());
        machine.array.close().await
    });
}
