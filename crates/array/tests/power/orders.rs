//! Orders of data entries that a crash lost, although a durable record refers to them.

use crate::bench::{Machine, Site, log_of, spec, tags, write, write_fresh};
use crate::outdated::life;
use penstock_array::{ArrayError, ArrayState, Discard};
use penstock_drive::{Fault, Op};
use std::pin::pin;
use std::time::Duration;

/// Writes blocks of later stripes, which stay in the queue of the log.
async fn queue_others(machine: &Machine) -> Result<(), ArrayError> {
    let per = machine.volume.stripe_blocks();
    for number in 0..60 {
        write(machine, 4 * per + number, 1000 + number).await?;
    }
    Ok(())
}

/// Overwrites the first block after a crash, crashes again, and reads it.
fn overwrite_survives(site: &Site, before: u64) {
    let overwrite = async |machine: &Machine| {
        assert_eq!(tags(&machine.volume, 0, 1).await?, [before], "the record counts");
        write(machine, 0, 7).await?;
        machine.volume.flush().await
    };
    life(site, 2, &[], overwrite).unwrap();
    let read = async |machine: &Machine| {
        assert_eq!(machine.array.report().state, ArrayState::Ok);
        assert_eq!(tags(&machine.volume, 0, 1).await?, [7]);
        Ok(())
    };
    life(site, 3, &[], read).unwrap();
}

/// The record of a discard overtakes queued data entries and contains the order of the last one. Regression:
/// the next start gave that order again, and the start after it took a write with that order for one that the
/// discard voids.
#[test]
fn a_block_written_after_a_discard_and_a_crash_survives_the_next_one() {
    for how in [Discard::InTable, Discard::OnDrives] {
        let site = Site::new(spec(4, 2));
        let discard = async |machine: &Machine| {
            write(machine, 0, 1).await?;
            machine.volume.flush().await?;
            queue_others(machine).await?;
            machine.volume.discard(0, 1, how).await
        };
        life(&site, 1, &[], discard).unwrap();
        overwrite_survives(&site, 0);
    }
}

/// The same with the record of a stripe that was written in full, past the log.
#[test]
fn a_block_written_over_a_fresh_stripe_after_a_crash_survives_the_next_one() {
    let site = Site::new(spec(4, 2));
    let fresh = async |machine: &Machine| {
        write_fresh(machine, 1, 300).await?;
        machine.volume.flush().await?;
        for drive in machine.drives.iter().flatten() {
            let log = log_of(&machine.array.geometry());
            for _ in 0..100 {
                drive.plant_within(Op::Write, 0, Fault::Slow(Duration::from_millis(20)), log.clone());
            }
        }
        queue_others(machine).await?;
        write_fresh(machine, 0, 500).await?;
        let recorded = async {
            while machine.array.report().stripes.1 < 2 {
                machine.env.sleep(Duration::from_millis(1)).await;
            }
        };
        // The crash comes between the record and the data that was queued before it.
        let flush = machine.volume.flush();
        futures_util::future::select(pin!(flush), pin!(recorded)).await;
        Ok(())
    };
    life(&site, 1, &[], fresh).unwrap();
    overwrite_survives(&site, 500);
}
