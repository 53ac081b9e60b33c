//! Carriers that are replaced under faults, cuts and full hosts, and then any set of drives that may be
//! missing.

use crate::bench::{
    DISK_BYTES, LABEL, LOG_AT, Load, Machine, SLICE_AT, Site, label_of, log_of, metadata_of, plan, spec,
    tags, write, write_fresh,
};
use crate::carriers::{read_back, write_flushed, write_twice};
use penstock_array::MemberNo;
use penstock_array::Site as WriteSite;
use penstock_array::ownership::{MemoryOwnership, Ownership};
use penstock_array::{ArrayError, CreateSpec};
use penstock_base::BLOCK_BYTES;
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op, Pace};
use penstock_sim::{CutMode, SimDisk, World};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

fn show(machine: &Machine, what: &str) {
    let report = machine.array.report();
    eprintln!(
        "{:?} {what}: {:?} suspended {:?} stopped {:?} debt {} missing carriers {} dirty {} log {}% {:?}",
        machine.env.now(),
        report.state,
        report.suspended,
        report.stopped,
        report.redundancy_debt_stripes,
        report.missing_carriers,
        report.dirty_blocks,
        report.log_used_percent,
        report.members.iter().map(|m| (m.state, m.carrier)).collect::<Vec<_>>()
    );
}

/// 4+1. The last carrier has one bad sector in a place that holds no current data: the other place of a table
/// page or of the root. The first carrier is lost, replaced, rebuilt and scrubbed; later the last one is
/// lost.
fn bad_spare_place(
    place_of: impl Fn(&penstock_array::Geometry, u64, u64) -> u64 + 'static,
    busy: bool,
    name: &str,
) {
    let mut spec = spec(4, 1);
    // Many stripes, so that the table has several pages.
    (spec.strip_blocks, spec.segment_bytes, spec.log_bytes) = (1, 64 << 10, 24 << 16);
    let mut site = Site::new(spec);
    let world = World::new(30_000);
    let new = SimDisk::new(DISK_BYTES);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=7).await?;
        machine.env.sleep(Duration::from_secs(60)).await;
        let geo = machine.array.geometry();
        let (mut bad, mut was_root, mut pages) = (0, 0, Vec::new());
        // Newest root so far, among those of the opening and of checkpoints.
        for seq in 0..2 {
            let at = SLICE_AT + geo.root_at(seq);
            let block = site.disks[1].peek(at / BLOCK);
            let found = penstock_array::format::root::Root::decode(&block).map(|root| root.seq).unwrap_or(0);
            was_root = was_root.max(found);
            let page = site.disks[1].peek((SLICE_AT + geo.page_at(0, seq)) / BLOCK);
            let page = penstock_array::format::table_page::TablePage::decode(&page);
            pages.push((page.map(|page| page.checkpoint).ok(), seq));
        }
        let (_, spare) = *pages.iter().min().expect("there are two places");
        bad += SLICE_AT + place_of(&geo, was_root, spare);
        eprintln!("{name}: pages {} root seq {was_root}, bad at {bad}", geo.pages());
        machine.drives[1].as_ref().unwrap().set_unreadable(bad..bad + BLOCK);
        // A careful administrator scrubs first.
        eprintln!("scrub before: {:?}", machine.array.scrub().await?);
        machine.drives[0].as_ref().unwrap().set_gone(true);
        machine.array.fail_member(MemberNo::new(0), "gone").await?;
        machine.env.sleep(Duration::from_secs(600)).await;
        show(&machine, "lost drive 0");
        machine.replace(&new, 0, 3).await?;
        for day in 0..3u64 {
            machine.env.sleep(Duration::from_secs(24 * 3600)).await;
            if busy {
                write_flushed(&machine, 1..=7).await?;
                machine.env.sleep(Duration::from_secs(60)).await;
            }
            let scrub = timeout(&machine.env, Duration::from_secs(3600), machine.array.scrub()).await;
            eprintln!("day {day}: scrub {scrub:?} checkpoints {}", machine.array.counts().checkpoints);
        }
        show(&machine, "three days after the replacement");
        let missing = machine.array.report().missing_carriers;
        let debt = machine.array.redundancy_debt_stripes();
        machine.array.stop();
        Ok::<_, ArrayError>((bad, missing, debt))
    });
    let (_, missing, debt) = done.unwrap().unwrap();
    world.destroy();
    site.disks.iter().chain([&new]).for_each(|disk| disk.cut(&world, CutMode::Everything));
    site.disks[0] = new;
    let found = read_back(&site, 30_001, &[1], 7);
    eprintln!("{name}: missing carriers {missing} debt {debt}; without drive 1: {found:?}");
    assert_eq!(missing, 0, "no carrier was ever made");
    assert_eq!(found.unwrap(), (1..=7).collect::<Vec<_>>());
}

#[test]
fn a_bad_sector_in_the_spare_place_of_a_table_page() {
    bad_spare_place(|geo, _, spare| geo.page_at(0, spare), false, "page, idle");
}

#[test]
fn a_bad_sector_in_the_spare_place_of_a_table_page_of_a_busy_array() {
    bad_spare_place(|geo, _, spare| geo.page_at(0, spare), true, "page, busy");
}

#[test]
fn a_bad_sector_in_the_spare_place_of_the_root() {
    bad_spare_place(|geo, seq, _| geo.root_at(seq + 1), false, "root, idle");
}

/// 4+1: drive 0 is lost. While a new carrier is filled on a slow drive, drive 0 is replaced and rebuilt. Then
/// writes to the log of drive 1 fail for good, and reads do not: one drive of five fails, and the code
/// survives one.
#[test]
fn a_copy_waits_for_the_turn_of_a_write_that_never_lands() {
    let mut site = Site::new(spec(4, 1));
    let world = World::new(31_000);
    let new = SimDisk::new(DISK_BYTES);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=20).await?;
        machine.array.destage_and_checkpoint().await?;
        write_flushed(&machine, 1..=20).await?;
        let slow = machine.drives[2].as_ref().unwrap();
        let reserved = metadata_of(&machine.array.geometry());
        (0..3).for_each(|nth| {
            slow.plant_within(Op::Write, nth, Fault::Slow(Duration::from_secs(25)), reserved.clone())
        });
        machine.drives[0].as_ref().unwrap().set_gone(true);
        machine.array.fail_member(MemberNo::new(0), "gone").await?;
        machine.replace(&new, 0, 3).await?;
        while machine.array.report().members[0].state != "active" {
            machine.env.sleep(Duration::from_millis(100)).await;
            write(&machine, 3, 3).await?;
        }
        show(&machine, "rebuilt");
        let bad = machine.drives[1].as_ref().unwrap();
        (0..200_000).for_each(|_| bad.plant_within(Op::Write, 0, Fault::Fail, reserved.clone()));
        let work = write_flushed(&machine, 21..=25);
        let done = timeout(&machine.env, Duration::from_secs(3600), work).await;
        show(&machine, "an hour later");
        machine.array.stop();
        Ok::<_, ArrayError>(done)
    });
    let done = done.unwrap().unwrap();
    world.destroy();
    site.disks.iter().chain([&new]).for_each(|disk| disk.cut(&world, CutMode::Everything));
    site.disks[0] = new;
    site.prepare = Box::new(|number, drive| {
        if number == 1 {
            let log = LOG_AT..LOG_AT + (3 << 20) + (1 << 16);
            (0..200_000).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, log.clone()));
        }
    });
    let again = World::new(31_005);
    let opened = again.run(async {
        let env = again.env();
        let work = async {
            let machine = site.open(&again, &[]).await?;
            let found = tags(&machine.volume, 1, 20).await;
            machine.array.stop();
            found
        };
        timeout(&env, Duration::from_secs(3600), work).await
    });
    again.destroy();
    eprintln!("all drives there, drive 1 read-only, opened: {opened:?}");
    site.prepare = Box::new(|_, _| ());
    eprintln!("{done:?}; without drive 1: {:?}", read_back(&site, 31_001, &[1], 20));
    assert!(matches!(done, Some(Ok(()))), "it stands still: {done:?}");
}

/// A copy of the site's disks, and of the claim of array `id`.
pub fn duplicate(site: &Site, id: Option<penstock_base::ArrayId>) -> Site {
    let copy = Site::of(site.disks.iter().map(|disk| disk.duplicate()).collect(), site.spec.clone());
    if let Some(id) = id {
        let (from, to): (Rc<MemoryOwnership>, Rc<MemoryOwnership>) =
            (site.ownership.clone(), copy.ownership.clone());
        World::new(1)
            .run(async move {
                let claim = from.current(id).await.unwrap();
                to.swap(id, Default::default(), claim).await.unwrap();
            })
            .unwrap();
    }
    copy
}

fn subsets(of: usize, most: usize) -> Vec<Vec<usize>> {
    (0u32..1 << of)
        .filter(|mask| mask.count_ones() as usize <= most)
        .map(|mask| (0..of).filter(|at| mask & (1 << at) != 0).collect())
        .collect()
}

struct Sweep {
    spec: CreateSpec,
    /// Drives that fail, each with the milliseconds after the failure before it.
    fail: Vec<(usize, u64)>,
    rounds: u64,
    pace: u64,
    scrub: bool,
    replace: bool,
    forget: bool,
}

/// Runs a load, loses and replaces carriers, cuts the power, and then opens with every set of drives that may
/// be missing. Returns the number of openings, and true if the power was cut.
fn sweep(seed: u64, how: &Sweep, cut: Option<(&str, u64)>) -> Result<(usize, bool), String> {
    let (k, m) = (how.spec.k, how.spec.m);
    let mut site = Site::new(how.spec.clone());
    let world = World::new(seed);
    let load = Load::new(how.rounds);
    let news: Vec<_> = (0..k + m).map(|_| SimDisk::new(DISK_BYTES)).collect();
    let used = RefCell::new(vec![false; k + m]);
    let id = Cell::new(None);
    // The array, for a report of its members after the cut.
    let array = RefCell::new(None);
    if let Some((name, nth)) = cut {
        world.plan_cut(plan(name, nth));
    }
    let run = world.run(async {
        let machine = site.open(&world, &[]).await?;
        id.set(Some(machine.array.id()));
        *array.borrow_mut() = Some(machine.array.clone());
        let events = async {
            let env = &machine.env;
            if how.pace > 0 {
                for at in 0..k + m {
                    if world.below(2) == 0 {
                        let most = Duration::from_millis(how.pace);
                        machine.drives[at]
                            .as_ref()
                            .unwrap()
                            .set_pace(Some(Pace { one_in: 1 + world.below(4), most }));
                    }
                }
            }
            for (at, after) in &how.fail {
                env.sleep(Duration::from_millis(*after)).await;
                let drive = machine.drives[*at].as_ref().unwrap();
                if how.forget && world.below(2) == 0 {
                    drive.plant(Op::Flush, 0, Fault::Fail);
                } else {
                    drive.set_gone(true);
                    machine.array.fail_member(MemberNo::new(*at), "gone").await?;
                }
                if how.replace && world.below(2) == 0 {
                    env.sleep(Duration::from_millis(world.below(200))).await;
                    if machine.latched(*at) {
                        used.borrow_mut()[*at] = true;
                        site.disks[*at].cut(&world, CutMode::Everything);
                        machine.replace(&news[*at], *at, seed).await?;
                    }
                }
            }
            if how.scrub {
                machine.array.scrub().await?;
            }
            env.sleep(Duration::from_secs(20)).await;
            Ok::<_, ArrayError>(())
        };
        let (one, two, three) =
            futures_util::future::join3(load.run_logged(&machine), load.run_fresh(&machine), events).await;
        one.and(two).and(three)?;
        load.check(&machine).await?;
        Ok::<_, ArrayError>(())
    });
    if let Ok(Err(error)) = &run {
        return Err(format!("the load: {error}"));
    }
    let was_cut = run.is_err();
    let report = array.borrow().as_ref().map(|array| array.report());
    array.borrow_mut().take();
    site.cut(&world);
    for (at, new) in news.iter().enumerate().filter(|(at, _)| used.borrow()[*at]) {
        new.cut(&world, CutMode::draw(&world));
        if !new.used_blocks().is_empty() {
            site.disks[at] = new.clone();
        }
    }
    let Some(report) = report else { return Ok((0, was_cut)) };
    // Stale members do not count. A set of lost drives and the stale ones must not exceed m together.
    let bad: Vec<usize> = (0..k + m).filter(|at| report.members[*at].state != "active").collect();
    let behind: Vec<usize> =
        (0..k + m).filter(|at| report.members[*at].stale_strips > 0 || bad.contains(at)).collect();
    let mut tried = 0;
    // A change of the carriers that was cut has not taken effect. So a carrier must be named by all
    // labels.
    let mut on_disk: Vec<Vec<usize>> = Vec::new();
    for (_, disk) in site.disks.iter().enumerate().filter(|(at, _)| !bad.contains(at)) {
        if let Some((_, label)) = label_of(disk) {
            let desc = label.descriptor().unwrap();
            on_disk.push(desc.carriers.iter().map(|at| usize::from(*at)).collect());
        }
    }
    for lost in subsets(k + m, m) {
        let all: std::collections::BTreeSet<_> = lost.iter().chain(&behind).chain(&bad).copied().collect();
        if all.len() > m {
            continue;
        }
        // While carriers are missing, too few copies may be left.
        let carriers: Vec<usize> = (0..k + m)
            .filter(|at| {
                report.members[*at].carrier && !bad.contains(at) && on_disk.iter().all(|of| of.contains(at))
            })
            .collect();
        if carriers.iter().all(|at| lost.contains(at)) {
            continue;
        }
        tried += 1;
        let copy = duplicate(&site, id.get());
        let world = World::new(seed * 1000 + tried as u64);
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            world.run(async {
                let env = world.env();
                let work = async {
                    let machine = copy.open(&world, &lost).await?;
                    load.check(&machine).await?;
                    write(&machine, 1, 1 << 40).await?;
                    machine.volume.flush().await?;
                    write(&machine, 1, tags(&machine.volume, 1, 1).await?[0]).await?;
                    machine.array.close().await?;
                    Ok::<_, ArrayError>(())
                };
                timeout(&env, Duration::from_secs(3600), work).await
            })
        }));
        world.destroy();
        match result {
            Ok(Ok(Some(Ok(())))) => {}
            Ok(other) => {
                return Err(format!(
                    "without {lost:?} (behind {behind:?}, carriers {carriers:?}): {other:?}"
                ));
            }
            Err(panic) => {
                let why = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                return Err(format!(
                    "without {lost:?} (behind {behind:?}, carriers {carriers:?}) panic: {why}"
                ));
            }
        }
    }
    Ok((tried, was_cut))
}

const SITES: [&str; 12] = [
    WriteSite::CarrierCopy.name(),
    "label.copy0",
    "label.copy1",
    WriteSite::LogAppend.name(),
    WriteSite::LogSegment.name(),
    WriteSite::CheckpointPage.name(),
    WriteSite::CheckpointRoot.name(),
    WriteSite::DestageStrip.name(),
    WriteSite::RebuildStrip.name(),
    WriteSite::MetadataRepair.name(),
    WriteSite::FreshStrip.name(),
    "discard.punch",
];

fn sweeps(base: u64, make: impl Fn(&World) -> Sweep) {
    let (mut bad, mut tried, mut cuts) = (Vec::new(), 0, 0);
    let seeds = std::env::var("PENSTOCK_STORMS").map_or(100, |count| count.parse().unwrap());
    for number in 0..seeds {
        let seed = base + number;
        let dice = World::new(seed);
        let how = make(&dice);
        let site = SITES[(number % SITES.len() as u64) as usize];
        let nth = dice.below([4, 20, 80, 400][dice.below(4) as usize]);
        match sweep(seed, &how, Some((site, nth))) {
            Ok((sets, cut)) => {
                tried += sets;
                cuts += usize::from(cut);
            }
            Err(why) => {
                eprintln!(
                    "seed {seed} {}+{} fail {:?} cut {site} {nth}: {why}",
                    how.spec.k, how.spec.m, how.fail
                );
                bad.push(seed);
            }
        }
    }
    eprintln!("{seeds} seeds, {cuts} cut, {tried} openings, bad {bad:?}");
    assert!(bad.is_empty(), "{} bad", bad.len());
}

fn drawn_spec(dice: &World) -> CreateSpec {
    let (k, m) = [(4, 2), (4, 1), (2, 1), (1, 2), (5, 3), (4, 2)][dice.below(6) as usize];
    let (strip_blocks, segment_bytes) = if k == 2 { (5, 64 << 10) } else { (8, 128 << 10) };
    let log_bytes = (24 + dice.below(4)) * segment_bytes as u64;
    CreateSpec { strip_blocks, segment_bytes, log_bytes, ..spec(k, m) }
}

#[test]
fn cuts_while_carriers_are_made_and_every_set_of_lost_drives() {
    sweeps(400_000, |dice| {
        let spec = drawn_spec(dice);
        let count = 1 + dice.below(spec.m as u64);
        let mut fail: Vec<(usize, u64)> = Vec::new();
        for _ in 0..count {
            let at = dice.below(spec.m as u64 + 1) as usize;
            if fail.iter().all(|(other, _)| *other != at) {
                fail.push((at, dice.below(800)));
            }
        }
        Sweep {
            fail,
            rounds: 60 + dice.below(300),
            pace: [0, 20, 200, 3000][dice.below(4) as usize],
            scrub: dice.below(2) == 0,
            replace: dice.below(2) == 0,
            forget: dice.below(2) == 0,
            spec,
        }
    });
}

/// A full host rejects a label once when the new carrier is recorded, and nothing is written afterwards.
/// The array must not stay suspended.
#[test]
fn suspended_stays_said_although_nothing_waits() {
    for nth in 0..4 {
        let site = Site::new(spec(4, 1));
        let world = World::new(32_000);
        let done = world.run(async {
            let machine = site.open(&world, &[]).await?;
            write_flushed(&machine, 1..=5).await?;
            machine.array.destage_and_checkpoint().await?;
            machine.env.sleep(Duration::from_secs(60)).await;
            machine.drives[4].as_ref().unwrap().plant_within(Op::Write, nth, Fault::HostFull, LABEL);
            machine.drives[0].as_ref().unwrap().set_gone(true);
            machine.array.fail_member(MemberNo::new(0), "gone").await?;
            machine.env.sleep(Duration::from_secs(24 * 3600)).await;
            show(&machine, "a day later");
            let report = machine.array.report();
            let left = machine.drives[4].as_ref().unwrap().waiting();
            machine.array.stop();
            Ok::<_, ArrayError>((report.suspended, left))
        });
        world.destroy();
        let (suspended, left) = done.unwrap().unwrap();
        eprintln!("nth {nth}: suspended {suspended:?}, faults not met {left}");
        assert_eq!(suspended, None);
    }
}

/// 4+2: one carrier is lost, and one of the two that are left answers no reads. No flush waits for it.
#[test]
fn a_source_that_does_not_answer_keeps_no_flush() {
    let site = Site::new(spec(4, 2));
    let world = World::new(33_000);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_twice(&machine).await?;
        let reserved = metadata_of(&machine.array.geometry());
        let silent = machine.drives[1].as_ref().unwrap();
        (0..20_000).for_each(|_| silent.plant_within(Op::Read, 0, Fault::Silent, reserved.clone()));
        machine.drives[0].as_ref().unwrap().set_gone(true);
        machine.array.fail_member(MemberNo::new(0), "gone").await?;
        let (mut longest, mut slow) = (Duration::ZERO, 0);
        for tag in 0..4000u64 {
            let began = machine.env.now();
            write(&machine, tag % 50, 1000 + tag).await?;
            machine.volume.flush().await?;
            let took = machine.env.now() - began;
            slow += u64::from(took > Duration::from_secs(5));
            longest = longest.max(took);
            machine.env.sleep(Duration::from_millis(500)).await;
        }
        show(&machine, "after the load");
        machine.array.stop();
        Ok::<_, ArrayError>((longest, slow))
    });
    world.destroy();
    let (longest, slow) = done.unwrap().unwrap();
    assert_eq!(slow, 0, "the longest flush took {longest:?}");
}

/// A parked stripe, beyond repair, has a dirty block whose log record no carrier can read. Writes to others
/// go on.
fn parked_and_unreadable(k: usize, m: usize, busy: bool) {
    let site = Site::new(spec(k, m));
    let world = World::new(35_000);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        let geo = machine.array.geometry();
        crate::bench::write_fresh(&machine, 0, 5000).await?;
        crate::bench::write_fresh(&machine, 1, 6000).await?;
        machine.volume.flush().await?;
        machine.array.destage_and_checkpoint().await?;
        machine.env.sleep(Duration::from_secs(10)).await;
        for strip in 0..=m {
            site.disks[strip].corrupt((SLICE_AT + geo.block_at(0, 0)) / BLOCK, &crate::bench::NOISE);
        }
        let before: Vec<_> = (0..=m).map(|at| site.disks[at].used_blocks()).collect();
        write(&machine, 0, 77).await?;
        machine.volume.flush().await?;
        let log = log_of(&geo).start / BLOCK..log_of(&geo).end / BLOCK;
        for (at, before) in before.iter().enumerate() {
            let now = site.disks[at].used_blocks();
            let new: Vec<u64> = now.into_iter().filter(|b| log.contains(b) && !before.contains(b)).collect();
            eprintln!("drive {at}: record in blocks {new:?}");
            for block in new {
                machine.drives[at].as_ref().unwrap().set_unreadable(block * BLOCK..(block + 1) * BLOCK);
            }
        }
        machine.env.sleep(Duration::from_secs(120)).await;
        show(&machine, "parked");
        let first = timeout(&machine.env, Duration::from_secs(3600), machine.array.scrub()).await;
        eprintln!("scrub: {first:?}");
        let mut longest = Duration::ZERO;
        for round in 0..600u64 {
            let began = machine.env.now();
            let work = async {
                if busy {
                    write(&machine, geo.stripe_blocks() as u64 * 2 + round % 30, 100 + round).await?;
                }
                machine.volume.flush().await
            };
            let done = timeout(&machine.env, Duration::from_secs(1800), work).await;
            if !matches!(done, Some(Ok(()))) {
                show(&machine, "STOOD");
                return Ok(Some(format!("round {round}: {done:?}")));
            }
            longest = longest.max(machine.env.now() - began);
            machine.env.sleep(Duration::from_secs(2)).await;
            if round % 100 == 0 {
                show(&machine, "goes on");
            }
        }
        eprintln!("longest {longest:?}");
        let closed = timeout(&machine.env, Duration::from_secs(3600), machine.array.close()).await;
        eprintln!("closed {closed:?}");
        Ok::<_, ArrayError>(None)
    });
    world.destroy();
    let stood = done.unwrap().unwrap();
    assert_eq!(stood, None);
}

#[test]
fn parked_and_unreadable_1() {
    parked_and_unreadable(4, 1, true);
}

#[test]
fn parked_and_unreadable_0() {
    parked_and_unreadable(3, 0, true);
}

#[test]
fn parked_and_unreadable_idle() {
    parked_and_unreadable(4, 1, false);
}

/// 4+2: the host of drive 5 rejects its label; then one carrier fails. m = 2 is not used up.
#[test]
fn one_label_on_a_full_host_and_one_failing_drive() {
    let site = Site::new(spec(4, 2));
    let world = World::new(36_000);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=5).await?;
        let five = machine.drives[5].as_ref().unwrap();
        (0..100_000).for_each(|_| five.plant_within(Op::Write, 0, Fault::HostFull, LABEL));
        machine.drives[1].as_ref().unwrap().set_gone(true);
        let work = write_flushed(&machine, 6..=10);
        let done = timeout(&machine.env, Duration::from_secs(3600), work).await;
        show(&machine, "an hour later");
        let out = timeout(
            &machine.env,
            Duration::from_secs(3600),
            machine.array.fail_member(MemberNo::new(5), "by hand"),
        )
        .await;
        let flushed = timeout(&machine.env, Duration::from_secs(3600), machine.volume.flush()).await;
        eprintln!("taken out by hand: {out:?}, then a flush {flushed:?}");
        show(&machine, "taken out");
        machine.array.stop();
        Ok::<_, ArrayError>(done)
    });
    world.destroy();
    let done = done.unwrap().unwrap();
    eprintln!("{done:?}");
    assert!(matches!(done, Some(Ok(()))), "it stands");
}

/// Each block of the log, roots and pages in turn is unreadable on the last carrier, and the other one is
/// lost and replaced. Lists the blocks for which the array never gets two carriers again or does not close;
/// there must be none.
#[test]
fn every_block_of_the_last_carrier() {
    let mut bad: std::collections::BTreeMap<&str, Vec<u64>> = Default::default();
    let mut block = 0;
    loop {
        let mut spec = spec(4, 1);
        (spec.strip_blocks, spec.segment_bytes, spec.log_bytes) = (1, 128 << 10, 24 << 17);
        let site = Site::new(spec);
        let world = World::new(37_000);
        let new = SimDisk::new(DISK_BYTES);
        let done = world.run(async {
            let machine = site.open(&world, &[]).await?;
            let geo = machine.array.geometry();
            for tag in 1..=60 {
                write(&machine, tag * 3, tag).await?;
                machine.volume.flush().await?;
            }
            machine.array.destage_and_checkpoint().await?;
            write_flushed(&machine, 1..=40).await?;
            let at = SLICE_AT + block * BLOCK;
            machine.drives[1].as_ref().unwrap().set_unreadable(at..at + BLOCK);
            machine.drives[0].as_ref().unwrap().set_gone(true);
            machine.array.fail_member(MemberNo::new(0), "gone").await?;
            machine.env.sleep(Duration::from_secs(600)).await;
            machine.replace(&new, 0, 3).await?;
            machine.env.sleep(Duration::from_secs(600)).await;
            for tag in 1..=40 {
                write(&machine, tag, 100 + tag).await?;
                machine.volume.flush().await?;
                machine.env.sleep(Duration::from_secs(5)).await;
            }
            let missing = machine.array.report().missing_carriers;
            let found = tags(&machine.volume, 1, 40).await?;
            assert_eq!(found, (101..=140).collect::<Vec<_>>());
            let closed = machine.array.close().await;
            Ok::<_, ArrayError>((missing, closed, geo))
        });
        world.destroy();
        let (missing, closed, geo) = done.unwrap().unwrap();
        let at = block * BLOCK;
        let part = match at {
            _ if at < geo.log().end => "log",
            _ if at < geo.page_at(0, 0) => "roots",
            _ if at < geo.page_at(0, 1) => "pages place 0",
            _ => "pages place 1",
        };
        if missing > 0 || closed.is_err() {
            bad.entry(part).or_default().push(block);
            if bad[part].len() == 1 {
                eprintln!("block {block} ({part}): missing {missing} closed {closed:?}");
            }
        }
        // Every block of the first segments, and all blocks behind the log.
        block += 1;
        if block > 146 && at < geo.log().end {
            block = geo.log().end / BLOCK;
        }
        if block * BLOCK >= geo.metadata().end {
            break;
        }
    }
    eprintln!("{bad:?}");
    assert!(bad.is_empty());
}

/// At most m drives, mostly carriers, have any fault, are replaced while the machine runs, and have faults
/// again. Returns the number of writes of carrier copies.
fn storm(seed: u64, silent_faults: bool) -> Result<u64, String> {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let spec = drawn_spec(&dice);
    let (k, m) = (spec.k, spec.m);
    let mut unlucky: Vec<usize> = Vec::new();
    for _ in 0..1 + dice.below(m as u64) {
        let at = dice.below(if dice.below(3) == 0 { (k + m) as u64 } else { m as u64 + 1 }) as usize;
        if !unlucky.contains(&at) {
            unlucky.push(at);
        }
    }
    let mut site = Site::new(spec);
    let load = Load::new(40 + dice.below(200));
    let mut copies = 0;
    for life in 0..1 + dice.below(3) {
        let world = World::new(dice.below(u64::MAX));
        // New disks of this life, by position.
        let news: RefCell<std::collections::BTreeMap<usize, Rc<SimDisk>>> = RefCell::default();
        if dice.below(3) > 0 {
            let nth = dice.below([4, 20, 80, 400][dice.below(4) as usize]);
            world.plan_cut(plan(SITES[dice.below(SITES.len() as u64) as usize], nth));
        }
        let mut hidden = Vec::new();
        if life > 0 {
            for at in &unlucky {
                for _ in 0..dice.below(4) {
                    hidden.push((*at, SLICE_AT + dice.below(700) * BLOCK));
                }
            }
        }
        site.prepare = Box::new(move |number, drive| {
            hidden
                .iter()
                .filter(|(at, _)| *at == number)
                .for_each(|(_, at)| drive.set_unreadable(*at..*at + BLOCK));
        });
        let run = world.run(async {
            let env = world.env();
            let work = async {
                let machine = site.open(&world, &[]).await?;
                load.settle(&machine).await?;
                let reserved = metadata_of(&machine.array.geometry());
                let events = async {
                    for at in 0..k + m {
                        // Any drive may be slow, within its deadlines.
                        if dice.below(3) == 0 {
                            let most = Duration::from_millis([50, 500, 8000][dice.below(3) as usize]);
                            machine.drives[at]
                                .as_ref()
                                .unwrap()
                                .set_pace(Some(Pace { one_in: 1 + dice.below(50), most }));
                        }
                    }
                    for round in 0..2 + dice.below(8) {
                        env.sleep(Duration::from_millis(dice.below([50, 500, 5000][dice.below(3) as usize])))
                            .await;
                        if unlucky.is_empty() {
                            continue;
                        }
                        let at = unlucky[dice.below(unlucky.len() as u64) as usize];
                        if machine.array.report().members[at].state == "missing" {
                            let disk = SimDisk::new(DISK_BYTES);
                            let old = news.borrow().get(&at).cloned().unwrap_or(site.disks[at].clone());
                            old.cut(&world, CutMode::Everything);
                            news.borrow_mut().insert(at, disk.clone());
                            if let Err(error) =
                                machine.replace(&disk, at, 1000 + seed * 100 + life * 20 + round).await
                            {
                                eprintln!("seed {seed}: replace {at}: {error}");
                            }
                            continue;
                        }
                        if news.borrow().contains_key(&at) {
                            // The new drive takes no faults; an administrator may fail it.
                            if dice.below(2) == 0 {
                                let _ = machine.array.fail_member(MemberNo::new(at), "by hand").await;
                            }
                            continue;
                        }
                        let drive = machine.drives[at].as_ref().unwrap();
                        let within = if dice.below(2) == 0 { reserved.clone() } else { 0..u64::MAX };
                        let nth = dice.below([3, 30][dice.below(2) as usize]);
                        match dice.below(if silent_faults { 14 } else { 10 }) {
                            0 => drive.plant_within(Op::Write, nth, Fault::Fail, within),
                            1 => drive.plant_within(Op::Write, nth, Fault::HostFull, within),
                            2 => drive.plant_within(
                                Op::Write,
                                nth,
                                Fault::Slow(Duration::from_millis(dice.below(60_000))),
                                within,
                            ),
                            3 => drive.plant_within(Op::Read, nth, Fault::Fail, within),
                            4 => drive.plant(Op::Flush, nth / 4, Fault::Fail),
                            5 => drive.plant(
                                Op::Flush,
                                nth / 4,
                                Fault::Slow(Duration::from_millis(dice.below(60_000))),
                            ),
                            6 => drive.plant_within(Op::Read, nth, Fault::Silent, within),
                            7 => drive.plant_within(Op::Write, nth, Fault::Silent, within),
                            8 => drive.set_gone(true),
                            9 => {
                                let bad = SLICE_AT + dice.below(700) * BLOCK;
                                drive.set_unreadable(bad..bad + BLOCK);
                            }
                            10 => drive.plant_within(Op::Write, nth, Fault::Dropped, within),
                            11 => drive.plant_within(Op::Write, nth, Fault::Rotten, within),
                            12 => drive.plant_within(Op::Write, nth, Fault::Torn { sectors: 3 }, within),
                            _ => drive.plant_within(Op::Read, nth, Fault::Rotten, within),
                        }
                        if dice.below(6) == 0 {
                            machine.array.scrub().await?;
                        }
                    }
                    Ok::<_, ArrayError>(())
                };
                let (one, two, three) =
                    futures_util::future::join3(load.run_logged(&machine), load.run_fresh(&machine), events)
                        .await;
                one.and(two).and(three)?;
                load.check(&machine).await?;
                if dice.below(2) == 0 {
                    env.sleep(Duration::from_secs(dice.below(60))).await;
                    load.check(&machine).await?;
                }
                if dice.below(2) == 0 { machine.array.close().await } else { Ok(()) }
            };
            timeout(&env, Duration::from_secs(3600), work).await
        });
        copies += world.hits().get(WriteSite::CarrierCopy.name()).copied().unwrap_or(0);
        match run {
            Err(_) | Ok(Some(Ok(()))) => {}
            Ok(other) => return Err(format!("life {life} {k}+{m} unlucky {unlucky:?}: {other:?}")),
        }
        site.cut(&world);
        for (at, new) in news.into_inner() {
            new.cut(&world, CutMode::draw(&world));
            if !new.used_blocks().is_empty() {
                site.disks[at] = new;
            }
        }
    }
    site.prepare = Box::new(|_, _| ());
    // All is repaired, and then any m drives may be lost.
    let world = World::new(seed + 5);
    let run = world.run(async {
        let env = world.env();
        let work = async {
            let machine = site.open(&world, &[]).await?;
            load.settle(&machine).await?;
            for (position, member) in machine.array.report().members.iter().enumerate() {
                if member.state == "missing" {
                    machine.replace(&site.disks[position], position, 77_000 + seed).await?;
                }
            }
            let debt = machine.array.wait_rebuilt().await;
            assert_eq!(debt, 0, "{:?}", machine.array.report());
            machine.array.scrub().await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            assert_eq!(machine.array.missing_carriers(), 0, "{:?}", machine.array.report());
            load.check(&machine).await?;
            let id = machine.array.id();
            machine.array.stop();
            Ok::<_, ArrayError>(id)
        };
        timeout(&env, Duration::from_secs(7200), work).await
    });
    world.destroy();
    let id = match run {
        Ok(Some(Ok(id))) => id,
        other => return Err(format!("the last life {k}+{m} unlucky {unlucky:?}: {other:?}")),
    };
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::draw(&dice)));
    for lost in subsets(k + m, m).into_iter().filter(|lost| lost.len() == m) {
        let copy = duplicate(&site, Some(id));
        let world = World::new(seed + 6);
        let run = world.run(async {
            let machine = copy.open(&world, &lost).await?;
            load.check(&machine).await?;
            machine.array.stop();
            Ok::<_, ArrayError>(())
        });
        world.destroy();
        if !matches!(run, Ok(Ok(()))) {
            return Err(format!("{k}+{m} unlucky {unlucky:?}, at last without {lost:?}: {run:?}"));
        }
    }
    Ok(copies)
}

#[test]
fn storms_of_faults_on_at_most_m_drives() {
    let seeds: u64 = std::env::var("PENSTOCK_STORMS").map_or(100, |count| count.parse().unwrap());
    let base = 500_000u64;
    let (mut bad, mut copies) = (Vec::new(), 0);
    for seed in base..base + seeds {
        let result = std::panic::catch_unwind(|| storm(seed, seed % 2 == 0));
        match result {
            Ok(Ok(done)) => copies += done,
            Ok(Err(why)) => {
                eprintln!("STORM {seed}: {why}");
                bad.push(seed);
            }
            Err(panic) => {
                let why = panic.downcast_ref::<String>().cloned().unwrap_or_default();
                eprintln!("STORM {seed} panic: {why}");
                bad.push(seed);
            }
        }
    }
    eprintln!("{seeds} storms, {copies} writes of copies, bad {bad:?}");
    assert!(bad.is_empty());
}

/// 4+2: a carrier fails and is recorded as failed; then the host of drive 5, which is no carrier, rejects the
/// label with the new carrier. Two good carriers are left and nothing else is wrong.
#[test]
fn a_full_host_of_another_drive_while_a_carrier_is_recorded() {
    let site = Site::new(spec(4, 2));
    let world = World::new(38_000);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=5).await?;
        let five = machine.drives[5].as_ref().unwrap();
        (0..100_000).for_each(|_| five.plant_within(Op::Write, 1, Fault::HostFull, LABEL));
        machine.drives[0].as_ref().unwrap().set_gone(true);
        machine.array.fail_member(MemberNo::new(0), "gone").await?;
        machine.env.sleep(Duration::from_secs(20)).await;
        show(&machine, "the carrier is being recorded");
        let work = write_flushed(&machine, 6..=10);
        let done = timeout(&machine.env, Duration::from_secs(3600), work).await;
        show(&machine, "an hour later");
        machine.array.stop();
        Ok::<_, ArrayError>(done)
    });
    world.destroy();
    let done = done.unwrap().unwrap();
    eprintln!("{done:?}");
    assert!(matches!(done, Some(Ok(()))), "it stands");
}

/// Regression: the second of two replacements of a member took strips of the first one's drive for its own.
#[test]
fn two_replacements_of_a_member_at_once_follow_each_other() {
    for seed in 0..20 {
        let site = Site::new(spec(4, 2));
        let world = World::new(9000 + seed);
        let (one, other) = (SimDisk::new(DISK_BYTES), SimDisk::new(DISK_BYTES));
        let report = world.run(async {
            let machine = site.open(&world, &[]).await?;
            machine.array.fail_member(MemberNo::new(5), "gone").await?;
            let second = async {
                machine.env.sleep(Duration::from_micros(seed * 100)).await;
                machine.replace(&other, 5, 4).await
            };
            let writes = async {
                for stripe in 0..10 {
                    write_fresh(&machine, stripe, 1000 * stripe + 1).await?;
                }
                Ok::<_, ArrayError>(())
            };
            let first = machine.replace(&one, 5, 3);
            let (first, second, written) = futures_util::future::join3(first, second, writes).await;
            first?;
            second?;
            written?;
            machine.array.wait_rebuilt().await;
            machine.array.scrub().await
        });
        let report = report.unwrap().unwrap();
        assert!(report.stripes > 0 && report.is_clean(), "seed {seed}: {report:?}");
        world.destroy();
    }
}
