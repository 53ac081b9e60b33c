//! Openings that find the carriers with different copies of a table page.
//!
//! A checkpoint was cut, and an opening has written over its pages on the carriers that had them. After each
//! opening every carrier has the committed copy at the same place, because the next checkpoint writes the
//! other place on all of them.

use crate::bench::{Machine, Site, plan, spec, tags, write_fresh};
use penstock_array::ArrayError;
use penstock_array::format::table_page::TablePage;
use penstock_base::BLOCK_BYTES;
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, SimDisk, World};
use std::ops::Range;
use std::time::Duration;

/// The blocks of the first table page on a disk, each with its checkpoint.
fn copies(disk: &SimDisk) -> Vec<(u64, u64)> {
    let pages = disk.used_blocks().into_iter().filter_map(|block| {
        TablePage::decode(&disk.peek(block))
            .ok()
            .filter(|page| page.index == 0)
            .map(|page| (block, page.checkpoint))
    });
    pages.collect()
}

fn bytes_of(block: u64) -> Range<u64> {
    block * BLOCK_BYTES as u64..(block + 1) * BLOCK_BYTES as u64
}

/// Writes a stripe and makes it part of a checkpoint.
async fn checkpoint(machine: &Machine, stripe: u64, tag: u64) -> Result<(), ArrayError> {
    write_fresh(machine, stripe, tag).await?;
    machine.volume.flush().await?;
    machine.array.destage_and_checkpoint().await
}

/// A committed checkpoint, and one that is cut when its first page was written on `carriers` carriers.
fn cut_checkpoint(site: &Site, lost: &[usize], carriers: u64, seed: u64) -> World {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        checkpoint(&machine, 4, 1000).await?;
        let hits = world.hits().get("checkpoint.page").copied().unwrap_or(0);
        world.plan_cut(plan("checkpoint.page", hits + carriers - 1));
        checkpoint(&machine, 5, 2000).await
    });
    assert!(run.is_err(), "it is cut");
    world.destroy();
    world
}

/// An opening that ends without a power cut.
fn open_once(site: &Site, lost: &[usize], seed: u64) {
    let world = World::new(seed);
    let run = world.run(async { site.open(&world, lost).await.map(|machine| machine.array.stop()) });
    run.unwrap().unwrap();
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
}

/// One carrier has the committed page in both places, the other in one, and that place cannot be read on the
/// first. A checkpoint is cut, and the first carrier fails.
#[test]
fn a_checkpoint_leaves_each_carrier_the_committed_page() {
    let mut site = Site::new(spec(1, 1));
    let world = cut_checkpoint(&site, &[], 2, 1);
    site.disks[0].cut(&world, CutMode::Everything);
    site.disks[1].cut(&world, CutMode::Nothing);
    open_once(&site, &[], 2);
    assert!(copies(&site.disks[0]).iter().all(|(_, checkpoint)| *checkpoint == copies(&site.disks[0])[0].1));
    let (block, _) = copies(&site.disks[1]).into_iter().max_by_key(|(_, checkpoint)| *checkpoint).unwrap();
    site.prepare = Box::new(move |number, drive| {
        if number == 0 {
            drive.set_unreadable(bytes_of(block));
        }
    });
    let world = World::new(3);
    // The opening writes its root on two carriers. The next root is that of the checkpoint after it.
    world.plan_cut(plan("checkpoint.root", 2));
    let run = world.run(async { checkpoint(&site.open(&world, &[]).await?, 6, 3000).await });
    assert!(run.is_err(), "it is cut at the root");
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));

    site.prepare = Box::new(|_, _| ());
    let world = World::new(4);
    let opened = world.run(async {
        let machine = site.open(&world, &[0]).await?;
        tags(&machine.volume, 4 * machine.volume.stripe_blocks(), 1).await
    });
    world.destroy();
    assert_eq!(opened.unwrap().map_err(|error| error.to_string()), Ok(vec![1000]));
}

/// The newest root lies in the cache of the only carrier alone, and the place of the page that the root
/// before needs cannot be read for a moment. The next opening is cut when it has written over that place.
#[test]
fn pages_are_written_over_only_for_a_durable_root() {
    let mut cuts = 0;
    for seed in (0..60).map(|seed| 70_000 + 10 * seed) {
        let (mut site, lost) = (Site::new(spec(1, 1)), [1]);
        let world = World::new(seed);
        let run = world.run(async {
            let machine = site.open(&world, &lost).await?;
            checkpoint(&machine, 4, 1000).await?;
            write_fresh(&machine, 5, 2000).await?;
            machine.volume.flush().await?;
            let drive = machine.drives[0].as_ref().expect("the carrier is here");
            // The flush of the pages succeeds, that of the root fails.
            drive.plant(Op::Flush, 1, Fault::Fail);
            machine.array.destage_and_checkpoint().await.expect_err("a flush fails");
            machine.array.stop();
            Ok::<_, ArrayError>(())
        });
        run.unwrap().unwrap();
        world.destroy();
        let (older, _) =
            copies(&site.disks[0]).into_iter().min_by_key(|(_, checkpoint)| *checkpoint).unwrap();
        site.prepare = Box::new(move |_, drive| {
            // All pages of the table are read at once, and then one by one.
            for _ in 0..2 {
                drive.plant_within(Op::Read, 0, Fault::Fail, bytes_of(older).start..bytes_of(older + 4).end);
            }
        });
        let world = World::new(seed + 1);
        world.plan_cut(plan("replay.page", 0));
        let run = world.run(async { site.open(&world, &lost).await.map(|machine| machine.array.stop()) });
        world.destroy();
        cuts += u64::from(run.is_err());
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Writes));
        site.prepare = Box::new(|_, _| ());
        let world = World::new(seed + 2);
        let opened = world.run(async {
            let machine = site.open(&world, &lost).await?;
            tags(&machine.volume, 4 * machine.volume.stripe_blocks(), 1).await
        });
        world.destroy();
        assert_eq!(opened.unwrap().map_err(|error| error.to_string()), Ok(vec![1000]), "seed {seed}");
    }
    assert!(cuts > 0, "an opening has written a page");
}

/// As for a root: no drive may be lost, and a place that has a committed page takes no write.
#[test]
fn a_page_whose_place_takes_no_write_does_not_keep_the_array_from_opening() {
    let (mut site, lost) = (Site::new(spec(2, 1)), [2]);
    let world = cut_checkpoint(&site, &lost, 2, 1);
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    open_once(&site, &lost, 2);
    let (block, _) = copies(&site.disks[0]).pop().unwrap();
    site.prepare = Box::new(move |number, drive| {
        if number == 0 {
            (0..10_000).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, bytes_of(block)));
        }
    });
    let world = World::new(4);
    let opened = world.run(async {
        let opening = async {
            let machine = site.open(&world, &lost).await?;
            tags(&machine.volume, 4 * machine.volume.stripe_blocks(), 1).await
        };
        timeout(&world.env(), Duration::from_secs(3600), opening).await.expect("it opens within an hour")
    });
    world.destroy();
    assert_eq!(opened.unwrap().map_err(|error| error.to_string()), Ok(vec![1000]));
}
