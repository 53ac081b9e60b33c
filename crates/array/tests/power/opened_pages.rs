//! Openings that find pages of the stripe table that no root names, or lack some that the root names.
//!
//! A checkpoint was cut. Its pages lie beside those that the root names, and the next checkpoint writes over
//! them.

use crate::bench::{Machine, Site, plan, spec, tags, write_fresh};
use crate::hostile::roots;
use crate::replaced::duplicate;
use penstock_array::ArrayError;
use penstock_array::format::index_page::IndexPage;
use penstock_array::format::table_page::TablePage;
use penstock_base::BLOCK_BYTES;
use penstock_drive::{Fault, Op};
use penstock_sim::{Cut, CutMode, SimDisk, World};
use std::ops::Range;

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

/// A committed checkpoint, and one that is cut at its write number `nth` at a write site.
fn cut_checkpoint(site: &Site, lost: &[usize], (at, nth): (&'static str, u64), seed: u64) -> World {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        checkpoint(&machine, 4, 1000).await?;
        let hits = world.hits().get(at).copied().unwrap_or(0);
        world.plan_cut(plan(at, hits + nth));
        checkpoint(&machine, 5, 2000).await
    });
    assert!(run.is_err(), "it is cut");
    world.destroy();
    world
}

/// The first page of the second checkpoint, on the second carrier.
const SECOND_PAGE: (&str, u64) = ("checkpoint.page", 1);

/// An opening that ends its array at once, in a world that may have a cut planned.
fn open_once(site: &Site, lost: &[usize], world: &World) -> Result<Result<(), ArrayError>, Cut> {
    let run = world.run(async { site.open(world, lost).await.map(|machine| machine.array.stop()) });
    world.destroy();
    run
}

/// An opening that may be cut.
fn open_or_cut(site: &Site, lost: &[usize], (at, nth): (&'static str, u64), seed: u64) -> World {
    let world = World::new(seed);
    world.plan_cut(plan(at, nth));
    if let Ok(opened) = open_once(site, lost, &world) {
        opened.unwrap();
    }
    world
}

fn cut_all(site: &Site, world: &World, mode: CutMode) {
    site.disks.iter().for_each(|disk| disk.cut(world, mode));
}

/// A checkpoint is cut at each of its writes, the next one of the next opening too, and then carriers are
/// lost in turn.
#[test]
fn whatever_a_cut_checkpoint_leaves_the_root_has_its_pages() {
    let cuts =
        [("checkpoint.page", 0), ("checkpoint.page", 1), ("checkpoint.page", 3), ("checkpoint.root", 0)];
    let modes = [CutMode::Nothing, CutMode::Everything, CutMode::Writes, CutMode::Sectors];
    for (number, (cut, again)) in cuts.iter().flat_map(|cut| cuts.map(|again| (*cut, again))).enumerate() {
        let seed = 1000 * (number as u64 + 1);
        let site = Site::new(spec(1, 1));
        let world = cut_checkpoint(&site, &[], cut, seed);
        for (which, disk) in site.disks.iter().enumerate() {
            disk.cut(&world, modes[(number + which) % 4]);
        }
        let world = World::new(seed + 1);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            let hits = world.hits().get(again.0).copied().unwrap_or(0);
            world.plan_cut(plan(again.0, hits + again.1));
            checkpoint(&machine, 6, 3000).await
        });
        assert!(run.is_err(), "it is cut");
        world.destroy();
        for (which, disk) in site.disks.iter().enumerate() {
            disk.cut(&world, modes[(number / 4 + which) % 4]);
        }
        for lost in [&[][..], &[0], &[1]] {
            let copy = duplicate(&site, None);
            assert_eq!(first_tag(&copy, lost, seed + 2), Ok(vec![1000]), "{cut:?}, {again:?}, {lost:?}");
        }
    }
}

/// The newest root lies in the cache of the only carrier alone, and the place of the page that the root
/// before needs cannot be read for a moment. The next opening is cut when its checkpoint writes over that
/// place.
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
        world.plan_cut(plan("checkpoint.page", 1));
        let run = world.run(async {
            let machine = site.open(&world, &lost).await?;
            checkpoint(&machine, 6, 3000).await
        });
        world.destroy();
        cuts += u64::from(run.is_err());
        cut_all(&site, &world, CutMode::Writes);
        site.prepare = Box::new(|_, _| ());
        assert_eq!(first_tag(&site, &lost, seed + 2), Ok(vec![1000]), "seed {seed}");
    }
    assert!(cuts > 0, "a checkpoint was cut");
}

/// A checkpoint of an array that may lose no drive, cut before its root. Returns the block of a carrier that
/// has a page of it.
fn cut_on_all(site: &Site, lost: &[usize], seed: u64) -> u64 {
    let world = cut_checkpoint(site, lost, SECOND_PAGE, seed);
    cut_all(site, &world, CutMode::Everything);
    copies(&site.disks[0]).into_iter().max_by_key(|(_, checkpoint)| *checkpoint).unwrap().0
}

/// An opening that is cut at the first page of the checkpoint after it, if that comes.
fn open_and_cut(site: &Site, lost: &[usize], seed: u64) {
    let world = open_or_cut(site, lost, ("checkpoint.page", 0), seed);
    cut_all(site, &world, CutMode::Nothing);
}

fn first_tag(site: &Site, lost: &[usize], seed: u64) -> Result<Vec<u64>, String> {
    let world = World::new(seed);
    let opened = world.run(async {
        let machine = site.open(&world, lost).await?;
        tags(&machine.volume, 4 * machine.volume.stripe_blocks(), 1).await
    });
    world.destroy();
    opened.unwrap().map_err(|error| error.to_string())
}

/// For a moment, the place of a page without a root cannot be read and takes no write. The number of the next
/// root would make it count.
#[test]
fn a_page_without_a_root_that_cannot_be_seen_does_not_come_back() {
    let (mut site, lost) = (Site::new(spec(2, 1)), [2]);
    let block = cut_on_all(&site, &lost, 1);
    site.prepare = Box::new(move |number, drive| {
        if number == 0 {
            // All pages of the table are read at once, and then one by one.
            drive.plant_within(Op::Read, 0, Fault::Fail, bytes_of(block).start..bytes_of(block + 6).end);
            drive.plant_within(Op::Read, 0, Fault::Fail, bytes_of(block));
            drive.plant_within(Op::Write, 0, Fault::Fail, bytes_of(block));
        }
    });
    open_and_cut(&site, &lost, 2);
    site.prepare = Box::new(|_, _| ());
    assert_eq!(first_tag(&site, &lost, 3), Ok(vec![1000]));
}

/// A page is wrong on one carrier. A scrub mends it before the other is lost.
#[test]
fn a_page_that_one_carrier_has_wrong_is_mended() {
    for leaf in [true, false] {
        let site = Site::new(spec(1, 1));
        let world = World::new(1);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            checkpoint(&machine, 4, 1000).await?;
            machine.array.close().await
        });
        run.unwrap().unwrap();
        world.destroy();
        let disk = &site.disks[1];
        let is_page = |block: &u64| match leaf {
            true => TablePage::decode(&disk.peek(*block)).is_ok(),
            false => IndexPage::decode(&disk.peek(*block)).is_ok(),
        };
        let pages: Vec<u64> = disk.used_blocks().into_iter().filter(is_page).collect();
        assert!(!pages.is_empty());
        pages.iter().for_each(|page| disk.corrupt(*page, &[0x55; BLOCK_BYTES]));
        let world = World::new(2);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            let report = machine.array.scrub().await?;
            assert!(machine.array.counts().repaired_blocks > 0, "{report:?}");
            machine.array.stop();
            Ok::<_, ArrayError>(())
        });
        run.unwrap().unwrap();
        world.destroy();
        cut_all(&site, &world, CutMode::Nothing);
        assert_eq!(first_tag(&site, &[0], 3), Ok(vec![1000]));
    }
}

/// The page that a root names is wrong on all carriers: nothing older passes for it.
#[test]
fn a_page_that_no_carrier_has_is_damage() {
    let site = Site::new(spec(1, 1));
    let world = World::new(1);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        checkpoint(&machine, 4, 1000).await?;
        checkpoint(&machine, 5, 2000).await?;
        machine.array.close().await
    });
    run.unwrap().unwrap();
    world.destroy();
    for disk in &site.disks {
        if let Some((newest, _)) = copies(disk).into_iter().max_by_key(|(_, checkpoint)| *checkpoint) {
            disk.corrupt(newest, &[0x55; BLOCK_BYTES]);
        }
    }
    let error = first_tag(&site, &[], 2).unwrap_err();
    assert!(error.contains("stripe table page 0"), "{error}");
}

/// A checkpoint is cut when one carrier has its root. That carrier cannot read the place of the root for a
/// moment at the next opening, which takes the root before, writes over the pages, and is cut as well.
fn hide_root((k, m): (usize, usize), (at, nth): (&'static str, u64), mode: CutMode) {
    let mut site = Site::new(spec(k, m));
    let world = cut_checkpoint(&site, &[], ("checkpoint.root", 0), 500);
    cut_all(&site, &world, CutMode::Everything);
    let newest =
        site.disks.iter().enumerate().filter_map(|(number, disk)| Some((number, roots(disk).pop()?)));
    let (who, (block, _)) = newest.max_by_key(|(_, (_, root))| root.seq).expect("a carrier has a root");
    site.prepare = Box::new(move |number, drive| {
        if number == who {
            drive.plant_within(Op::Read, 0, Fault::Fail, bytes_of(block));
        }
    });
    let world = open_or_cut(&site, &[], (at, nth), 501);
    cut_all(&site, &world, mode);
    site.prepare = Box::new(|_, _| ());
    assert_eq!(first_tag(&site, &[], 502), Ok(vec![1000]), "{k}+{m} {at} {nth} {mode:?}");
}

#[test]
fn a_root_that_could_not_be_read_once_does_not_come_back() {
    for code in [(1, 1), (4, 2)] {
        for at in [("replay.mend", 0), ("replay.mend", 1), ("replay.mend", 3), ("checkpoint.root", 0)] {
            for mode in [CutMode::Nothing, CutMode::Everything, CutMode::Writes, CutMode::Sectors] {
                hide_root(code, at, mode);
            }
        }
    }
}
