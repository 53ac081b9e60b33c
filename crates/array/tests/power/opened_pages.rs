//! Openings that find the carriers with different copies of a table page.
//!
//! A checkpoint was cut, and an opening has written over its pages on the carriers that had them. After each
//! opening every carrier has the committed copy at the same place, because the next checkpoint writes the
//! other place on all of them.

use crate::bench::{Machine, Site, plan, spec, tags, write_fresh};
use crate::hostile::roots;
use penstock_array::ArrayError;
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

/// One carrier has the committed page in both places, the other in one, and that place cannot be read on the
/// first. A checkpoint is cut, and the first carrier fails.
#[test]
fn a_checkpoint_leaves_each_carrier_the_committed_page() {
    let mut site = Site::new(spec(1, 1));
    let world = cut_checkpoint(&site, &[], SECOND_PAGE, 1);
    site.disks[0].cut(&world, CutMode::Everything);
    site.disks[1].cut(&world, CutMode::Nothing);
    let world = World::new(2);
    open_once(&site, &[], &world).unwrap().unwrap();
    cut_all(&site, &world, CutMode::Nothing);
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
    cut_all(&site, &world, CutMode::Nothing);

    site.prepare = Box::new(|_, _| ());
    assert_eq!(first_tag(&site, &[0], 4), Ok(vec![1000]));
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
        cuts += u64::from(open_once(&site, &lost, &world).is_err());
        cut_all(&site, &world, CutMode::Writes);
        site.prepare = Box::new(|_, _| ());
        assert_eq!(first_tag(&site, &lost, seed + 2), Ok(vec![1000]), "seed {seed}");
    }
    assert!(cuts > 0, "an opening has written a page");
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

/// An opening writes over a page without a root, into a cache alone. For a moment the place takes no write of
/// the next opening.
#[test]
fn a_place_that_refuses_a_page_once_gets_it_all_the_same() {
    for seed in (0..24).map(|seed| 9000 + 10 * seed) {
        let (mut site, lost) = (Site::new(spec(2, 1)), [2]);
        let block = cut_on_all(&site, &lost, seed);
        site.prepare = Box::new(move |number, drive| {
            if number == 0 {
                drive.plant(Op::Flush, 4, Fault::Fail);
            }
        });
        let world = World::new(seed + 1);
        open_once(&site, &lost, &world).unwrap().expect_err("the flush of the pages fails");
        site.prepare = Box::new(move |number, drive| {
            if number == 0 {
                drive.plant_within(Op::Write, 0, Fault::Fail, bytes_of(block));
            }
        });
        open_and_cut(&site, &lost, seed + 2);
        site.prepare = Box::new(|_, _| ());
        assert_eq!(first_tag(&site, &lost, seed + 3), Ok(vec![1000]), "seed {seed}");
    }
}

/// One carrier has a page wrong, and the other fails during the opening. For a moment the place of the page
/// takes no write.
#[test]
fn a_page_whose_good_copy_is_lost_meanwhile_is_waited_for() {
    let mut site = Site::new(spec(1, 1));
    let world = World::new(1);
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        checkpoint(&machine, 4, 1000).await?;
        machine.array.stop();
        Ok::<_, ArrayError>(())
    });
    run.unwrap().unwrap();
    world.destroy();
    site.cut(&world);
    let (page, _) = copies(&site.disks[1]).into_iter().max_by_key(|(_, checkpoint)| *checkpoint).unwrap();
    site.disks[1].corrupt(page, &[0x55; BLOCK_BYTES]);
    let (root, _) = roots(&site.disks[0]).pop().expect("a carrier has a root");
    site.prepare = Box::new(move |number, drive| {
        let place = if number == 0 { root } else { page };
        drive.plant_within(Op::Write, 0, Fault::Fail, bytes_of(place));
    });
    open_and_cut(&site, &[], 2);
    site.prepare = Box::new(|_, _| ());
    assert_eq!(first_tag(&site, &[0], 3), Ok(vec![1000]));
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
        for at in [("replay.page", 0), ("replay.page", 1), ("replay.page", 3), ("checkpoint.root", 0)] {
            for mode in [CutMode::Nothing, CutMode::Everything, CutMode::Writes, CutMode::Sectors] {
                hide_root(code, at, mode);
            }
        }
    }
}
