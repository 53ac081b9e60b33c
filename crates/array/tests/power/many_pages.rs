//! Tables of many pages: what goes through all of them keeps few in memory, and waits for none of them.

use crate::bench::{Machine, SLICE_AT, Site, spec, write_fresh};
use crate::lost_pages::{life, lose_page};
use penstock_array::{CreateSpec, Geometry};
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use std::cell::Cell;
use std::time::Duration;

/// Pages of the table that a pass over all of it may have in memory.
const MOST_IN_MEMORY: u64 = 140;

/// A site with a written stripe in each page of a table of many, as it is without the `lost` drives.
fn written(seed: u64, lost: &[usize]) -> (Site, Geometry) {
    let site = Site::new(CreateSpec {
        strip_blocks: 1,
        log_bytes: 6 << 20,
        segment_bytes: 256 << 10,
        ..spec(24, 2)
    });
    let geo = life(&site, seed, lost, async |machine| {
        let geo = machine.array.geometry();
        for page in 0..geo.stripes / geo.stripes_per_page() {
            write_fresh(machine, page * geo.stripes_per_page(), 7).await?;
        }
        machine.volume.flush().await?;
        machine.array.close().await?;
        Ok(geo)
    });
    assert!(pages(&geo) > MOST_IN_MEMORY + 10, "{} pages", pages(&geo));
    (site, geo)
}

/// Full pages of the table.
fn pages(geo: &Geometry) -> u64 {
    geo.stripes / geo.stripes_per_page()
}

/// The most pages of the table that are in memory until something is over.
async fn most_in_memory<R>(machine: &Machine, over: impl Future<Output = R>) -> (u64, R) {
    let (most, is_over) = (Cell::new(0), Cell::new(false));
    let watch = async {
        while !is_over.get() {
            most.set(most.get().max(machine.array.report().table_pages.0));
            machine.env.sleep(Duration::from_micros(100)).await;
        }
    };
    let over = async {
        let result = over.await;
        is_over.set(true);
        result
    };
    let ((), result) = futures_util::future::join(watch, over).await;
    (most.get(), result)
}

/// A drive is away. The count reads all pages, a few at a time.
#[test]
fn a_count_keeps_few_pages_in_memory() {
    let (site, geo) = written(9930, &[]);
    life(&site, 9931, &[3], async |machine| {
        let counted = async {
            while !machine.array.report().is_counted {
                machine.env.sleep(Duration::from_micros(100)).await;
            }
        };
        let (most, ()) = most_in_memory(machine, counted).await;
        let read = machine.array.report().counts.table_reads;
        machine.array.stop();
        assert!(read >= pages(&geo), "{read} pages read");
        assert!(most < MOST_IN_MEMORY, "{most} pages");
        Ok(())
    });
}

/// All copies of pages on one carrier are bad. A scrub of metadata repairs them.
#[test]
fn a_scrub_of_many_bad_pages_keeps_few_in_memory() {
    let (site, geo) = written(9940, &[]);
    (0..pages(&geo)).for_each(|page| lose_page(&site.disks[1..2], &geo, page));
    life(&site, 9941, &[], async |machine| {
        let (most, report) = most_in_memory(machine, machine.array.scrub_metadata()).await;
        machine.array.stop();
        report?;
        assert!(most < MOST_IN_MEMORY, "{most} pages");
        Ok(())
    });
}

/// One drive of two that may be lost is away, for long. A carrier does not answer any more while stripes are
/// counted. The array can do without it, and gives it up.
#[test]
fn a_carrier_that_hangs_is_given_up_before_stripes_are_counted() {
    let away = 5;
    let (mut site, geo) = written(9950, &[away]);
    site.prepare = Box::new(move |number, drive| {
        for _ in (0..1000).filter(|_| number == 0) {
            for place in 0..2 {
                let leaves = SLICE_AT + geo.page_at(0, place)..SLICE_AT + geo.page_at(pages(&geo), place);
                drive.plant_within(Op::Read, 0, Fault::Silent, leaves);
            }
        }
    });
    life(&site, 9951, &[away], async |machine| {
        for _ in 0..200 {
            machine.drives[0].as_ref().unwrap().plant(Op::Write, 0, Fault::Silent);
        }
        write_fresh(machine, 1, 5).await?;
        let flushed = timeout(&machine.env, Duration::from_secs(180), machine.volume.flush()).await;
        let is_counted = machine.array.report().is_counted;
        machine.array.stop();
        assert!(flushed.is_some(), "counted: {is_counted}");
        assert!(machine.latched(0));
        Ok(())
    });
}
