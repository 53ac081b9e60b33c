//! Carriers of the log with bad sectors, without answers, and replaced: sequences from a review that broke an
//! array.

use crate::bench::{DISK_BYTES, LOG_AT, Machine, SLICE_AT, Site, metadata_of, plan, spec, tags, write};
use penstock_array::ArrayError;
use penstock_array::MemberNo;
use penstock_array::Site as WriteSite;
use penstock_array::place::SegmentNo;
use penstock_base::BLOCK_BYTES;
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, SimDisk, World};
use std::time::Duration;

/// Writes each tag to the block of the same number, each with a flush.
pub async fn write_flushed(machine: &Machine, tags: std::ops::RangeInclusive<u64>) -> Result<(), ArrayError> {
    for tag in tags {
        write(machine, tag, tag).await?;
        machine.volume.flush().await?;
    }
    Ok(())
}

/// Writes 100 blocks twice, each with a flush.
pub async fn write_twice(machine: &Machine) -> Result<(), ArrayError> {
    for tag in 1..=200 {
        write(machine, tag % 100, tag).await?;
        machine.volume.flush().await?;
    }
    Ok(())
}

/// Opens the array without the disks in `lost` and reads the tags of blocks 1 to `count`.
pub fn read_back(site: &Site, seed: u64, lost: &[usize], count: u64) -> Result<Vec<u64>, ArrayError> {
    let world = World::new(seed);
    let found = world.run(async {
        let machine = site.open(&world, lost).await?;
        let found = tags(&machine.volume, 1, count).await?;
        machine.array.stop();
        Ok::<_, ArrayError>(found)
    });
    world.destroy();
    found.unwrap()
}

/// The reason why no carrier that is left can read one record of the log. Later all contents of the record
/// are destaged and checkpointed, a scrub has run, the lost drive is replaced and rebuilt, and the report
/// shows full redundancy.
#[derive(Clone, Copy, PartialEq)]
enum How {
    /// m = 1: a drive is lost, and the other carrier has a bad sector.
    OneLostOneUnreadable,
    /// m = 1: both carriers have a bad sector, in the same record.
    TwoUnreadable,
    /// m = 0: the only carrier has a bad sector.
    TheOnlyOne,
}

fn whole_again(how: How, clean: bool) {
    let m = if how == How::TheOnlyOne { 0 } else { 1 };
    let mut spec = spec(4, m);
    spec.segment_bytes = 160 << 10;
    let mut site = Site::new(spec);
    let world = World::new(10_000);
    let new = SimDisk::new(DISK_BYTES);
    const BAD: u64 = 4;
    let carrier = usize::from(how == How::OneLostOneUnreadable);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=5).await?;
        let at = SLICE_AT + machine.array.geometry().segment_at(SegmentNo(1)) + BAD * BLOCK_BYTES as u64;
        machine.drives[carrier].as_ref().unwrap().set_unreadable(at..at + BLOCK_BYTES as u64);
        match how {
            How::OneLostOneUnreadable => machine.drives[0].as_ref().unwrap().set_gone(true),
            How::TwoUnreadable => {
                machine.drives[1].as_ref().unwrap().set_unreadable(at..at + BLOCK_BYTES as u64)
            }
            How::TheOnlyOne => {}
        }
        write(&machine, 6, 6).await?;
        machine.volume.flush().await?;
        machine.env.sleep(Duration::from_secs(60)).await;
        if how == How::OneLostOneUnreadable {
            machine.replace(&new, 0, 3).await?;
        }
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(60)).await;
        machine.array.scrub().await?;
        write_flushed(&machine, 7..=8).await?;
        machine.array.destage_and_checkpoint().await?;
        let report = machine.array.report();
        eprintln!(
            "before the end: {:?} debt {} missing carriers {} dirty {} members {:?}",
            report.state,
            report.redundancy_debt_stripes,
            report.missing_carriers,
            report.dirty_blocks,
            report.members.iter().map(|m| (m.state, m.carrier)).collect::<Vec<_>>()
        );
        if clean {
            machine.array.close().await?
        } else {
            machine.array.stop()
        }
        Ok::<_, ArrayError>(at)
    });
    let at = done.unwrap().unwrap();
    world.destroy();
    site.disks.iter().chain([&new]).for_each(|disk| disk.cut(&world, CutMode::Everything));
    if how == How::OneLostOneUnreadable {
        site.disks[0] = new;
    }
    site.prepare = Box::new(move |number, drive| {
        if number == carrier || how == How::TwoUnreadable && number == 1 {
            drive.set_unreadable(at..at + BLOCK_BYTES as u64);
        }
    });
    let found = read_back(&site, 10_001, &[], 8);
    eprintln!("{found:?}");
    assert_eq!(found.unwrap(), (1..=8).collect::<Vec<_>>());
}

#[test]
fn an_array_that_was_whole_again_and_closed_can_be_opened() {
    whole_again(How::OneLostOneUnreadable, true);
}

#[test]
fn an_array_that_was_whole_again_can_be_opened() {
    whole_again(How::OneLostOneUnreadable, false);
}

#[test]
fn two_bad_sectors_of_a_destaged_record_closed() {
    whole_again(How::TwoUnreadable, true);
}

#[test]
fn one_bad_sector_of_a_destaged_record_without_redundancy_closed() {
    whole_again(How::TheOnlyOne, true);
}

/// m = 1: a drive is lost, the other carrier cannot read one block, and the power is cut right after the new
/// carrier is recorded.
#[test]
fn zeros_of_a_copy_do_not_say_that_a_record_never_was() {
    let mut results = Vec::new();
    for (site_name, nth) in (9..13)
        .map(|nth| ("label.copy1", nth))
        .chain([(WriteSite::DestageStrip.name(), 0), (WriteSite::DestageStrip.name(), 3)])
    {
        let mut site = Site::new(spec(4, 1));
        let world = World::new(10_100 + nth);
        let place = std::cell::Cell::new(0);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            write_flushed(&machine, 1..=10).await?;
            let first = (SLICE_AT + machine.array.geometry().segment_at(SegmentNo(1))) / BLOCK_BYTES as u64;
            let used = site.disks[1].used_blocks();
            let last = used.into_iter().rfind(|block| (first..first + 32).contains(block)).unwrap();
            let at = last * BLOCK_BYTES as u64;
            place.set(at);
            machine.drives[1].as_ref().unwrap().set_unreadable(at..at + BLOCK_BYTES as u64);
            machine.drives[0].as_ref().unwrap().set_gone(true);
            world.plan_cut(plan(site_name, nth));
            machine.array.fail_member(MemberNo::new(0), "gone").await?;
            machine.env.sleep(Duration::from_secs(60)).await;
            Ok::<_, ArrayError>(())
        });
        if run.is_ok() {
            eprintln!("{site_name} {nth}: no cut");
            continue;
        }
        world.destroy();
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
        let at = place.get();
        site.prepare = Box::new(move |number, drive| {
            if number == 1 {
                drive.set_unreadable(at..at + BLOCK_BYTES as u64);
            }
        });
        let found = read_back(&site, 10_200 + nth, &[0], 10);
        eprintln!("{site_name} {nth}: {found:?}");
        if let Ok(found) = found {
            results.push((site_name, nth, found == (1..=10).collect::<Vec<_>>()));
        }
    }
    assert!(
        results.iter().all(|(.., right)| *right),
        "acknowledged data is gone and nothing was said: {results:?}"
    );
}

/// 4+2: one carrier is lost. The carriers in `slow` answer no reads of their log, but take writes.
fn slow_reads(slow: &[usize]) {
    let site = Site::new(spec(4, 2));
    let world = World::new(10_300);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_twice(&machine).await?;
        let reserved = metadata_of(&machine.array.geometry());
        for number in slow {
            let slow = machine.drives[*number].as_ref().unwrap();
            (0..20_000).for_each(|_| slow.plant_within(Op::Read, 0, Fault::Silent, reserved.clone()));
        }
        machine.drives[0].as_ref().unwrap().set_gone(true);
        let mut longest = Duration::ZERO;
        for tag in 0..20 {
            let began = machine.env.now();
            let one = async {
                write(&machine, 0, 1000 + tag).await?;
                machine.volume.flush().await
            };
            let done = timeout(&machine.env, Duration::from_secs(30 * 24 * 3600), one).await;
            longest = longest.max(machine.env.now() - began);
            assert!(matches!(done, Some(Ok(()))), "{done:?}");
        }
        machine.array.stop();
        Ok::<_, ArrayError>(longest)
    });
    let longest = done.unwrap().unwrap();
    world.destroy();
    eprintln!("carriers without reads {slow:?}: a write and its flush took up to {longest:?}");
    assert!(longest < Duration::from_secs(65), "{longest:?}");
}

#[test]
fn a_carrier_that_answers_no_reads_keeps_nobody() {
    slow_reads(&[1]);
}

#[test]
fn two_carriers_that_answer_no_reads_keep_nobody() {
    slow_reads(&[1, 2]);
}

/// 4+2: two of the three carriers are lost. Two of the three members that could replace them take no copy;
/// member 3 does.
#[test]
fn a_member_that_takes_a_copy_gets_it_although_another_takes_none() {
    let site = Site::new(spec(4, 2));
    let world = World::new(10_500);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write(&machine, 1, 1).await?;
        machine.volume.flush().await?;
        let reserved = metadata_of(&machine.array.geometry());
        for number in [4, 5] {
            let bad = machine.drives[number].as_ref().unwrap();
            (0..100_000).for_each(|_| bad.plant_within(Op::Write, 0, Fault::Fail, reserved.clone()));
        }
        machine.array.fail_member(MemberNo::new(0), "gone").await?;
        machine.array.fail_member(MemberNo::new(1), "gone").await?;
        for tag in 2..=40 {
            write(&machine, tag % 8, tag).await?;
            machine.volume.flush().await?;
            machine.env.sleep(Duration::from_secs(60)).await;
        }
        let report = machine.array.report();
        machine.array.stop();
        Ok::<_, ArrayError>((
            report.missing_carriers,
            report.members.iter().map(|m| (m.state, m.carrier)).collect::<Vec<_>>(),
        ))
    });
    let (missing, members) = done.unwrap().unwrap();
    world.destroy();
    eprintln!("missing {missing} {members:?}");
    assert!(missing <= 1, "member 3 takes a copy and never got one: {members:?}");
}

/// m = 1: each of the two carriers cannot read one record, two different ones of the same segment. As each
/// record is readable on one carrier, a scrub must repair both. Afterwards one drive is lost.
fn scrub_mends_each(lose: usize) {
    let mut spec = spec(4, 1);
    spec.segment_bytes = 160 << 10;
    let mut site = Site::new(spec);
    let world = World::new(10_600);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=5).await?;
        let first = SLICE_AT + machine.array.geometry().segment_at(SegmentNo(1));
        // The payloads of the second and of the fourth record.
        let rotten = first / BLOCK_BYTES as u64 + 4;
        let at = first + 8 * BLOCK_BYTES as u64;
        let bad = rotten * BLOCK_BYTES as u64;
        machine.drives[0].as_ref().unwrap().set_unreadable(bad..bad + BLOCK_BYTES as u64);
        machine.drives[1].as_ref().unwrap().set_unreadable(at..at + BLOCK_BYTES as u64);
        let one = machine.array.scrub().await?;
        machine.env.sleep(Duration::from_secs(60)).await;
        let two = machine.array.scrub().await?;
        let io = penstock_drive::Io::new(penstock_drive::Class::Client, "test");
        let readable = machine.handles[1].as_ref().unwrap().read(at, BLOCK_BYTES, io).await.is_ok();
        let mended = machine.handles[0].as_ref().unwrap().read(bad, BLOCK_BYTES, io).await.is_ok();
        eprintln!(
            "block of carrier 0 mended {mended}, of carrier 1 mended {readable}; {one:?} {two:?} state {:?}",
            machine.array.report().state
        );
        machine.drives[lose].as_ref().unwrap().set_gone(true);
        write_flushed(&machine, 6..=7).await?;
        machine.env.sleep(Duration::from_secs(60)).await;
        let closed = machine.array.close().await;
        Ok::<_, ArrayError>((at, bad, mended, readable, closed))
    });
    let (at, bad, mended, readable, closed) = done.unwrap().unwrap();
    eprintln!("closed {closed:?}");
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    site.prepare = Box::new(move |number, drive| {
        if number == 1 && !readable {
            drive.set_unreadable(at..at + BLOCK_BYTES as u64);
        }
        if number == 0 && !mended {
            drive.set_unreadable(bad..bad + BLOCK_BYTES as u64);
        }
    });
    let found = read_back(&site, 10_601, &[lose], 7);
    eprintln!("{found:?}");
    assert_eq!(found.unwrap(), (1..=7).collect::<Vec<_>>());
}

#[test]
fn a_scrub_mends_two_records_of_a_segment_and_then_the_first_drive_goes() {
    scrub_mends_each(0);
}

#[test]
fn a_scrub_mends_two_records_of_a_segment_and_then_the_second_drive_goes() {
    scrub_mends_each(1);
}

/// m = 1 and used up: a carrier cannot read a record, and its place takes no write. The scrub tries a few
/// times at most and reports it, and the log goes on.
#[test]
fn a_place_of_the_log_that_takes_no_write_keeps_nobody() {
    let mut spec = spec(4, 1);
    spec.segment_bytes = 160 << 10;
    let site = Site::new(spec);
    let world = World::new(10_650);
    let done = world.run(async {
        let machine = site.open(&world, &[4]).await?;
        write_flushed(&machine, 1..=5).await?;
        let record = SLICE_AT + machine.array.geometry().segment_at(SegmentNo(1)) + 3 * BLOCK_BYTES as u64;
        let rotten = record..record + 3 * BLOCK_BYTES as u64;
        let drive = machine.drives[0].as_ref().unwrap();
        drive.set_unreadable(rotten.clone());
        (0..10_000).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, rotten.clone()));
        let began = machine.env.now();
        machine.array.scrub_metadata().await?;
        let scrub = machine.env.now() - began;
        let tried = 10_000 - drive.waiting();
        write_flushed(&machine, 6..=9).await?;
        Ok::<_, ArrayError>((scrub, tried, machine.array.report().missing_carriers > 0))
    });
    let (scrub, tried, bad) = done.unwrap().unwrap();
    eprintln!("scrub took {scrub:?}, {tried} writes tried, metadata bad {bad}");
    assert!((1..=8).contains(&tried) && bad);
    assert!(scrub < Duration::from_secs(60));
}

/// m = 1: one drive is lost at a time, and rebuilt before the next is lost. While the new carrier is filled,
/// the drive that is left fails reads of its log for `blip`; nothing on it is damaged.
fn blip(blip: Duration, scrub: bool) {
    let mut spec = spec(4, 1);
    spec.segment_bytes = 160 << 10;
    let mut site = Site::new(spec);
    let world = World::new(10_700);
    let new = SimDisk::new(DISK_BYTES);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=5).await?;
        let left = machine.drives[1].as_ref().unwrap();
        left.set_unreadable(metadata_of(&machine.array.geometry()));
        machine.drives[0].as_ref().unwrap().set_gone(true);
        write(&machine, 6, 6).await?;
        machine.volume.flush().await?;
        machine.env.sleep(blip).await;
        left.set_readable();
        machine.env.sleep(Duration::from_secs(600)).await;
        machine.replace(&new, 0, 3).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(600)).await;
        if scrub {
            eprintln!("{:?}", machine.array.scrub().await?);
        }
        let report = machine.array.report();
        eprintln!(
            "whole again: {:?} debt {} missing carriers {} dirty {} members {:?}",
            report.state,
            report.redundancy_debt_stripes,
            report.missing_carriers,
            report.dirty_blocks,
            report.members.iter().map(|m| (m.state, m.carrier)).collect::<Vec<_>>()
        );
        left.set_gone(true);
        write(&machine, 7, 7).await?;
        machine.volume.flush().await?;
        machine.env.sleep(Duration::from_secs(600)).await;
        let report = machine.array.report();
        eprintln!(
            "second drive lost: {:?} missing carriers {} dirty {} members {:?}",
            report.state,
            report.missing_carriers,
            report.dirty_blocks,
            report.members.iter().map(|m| (m.state, m.carrier)).collect::<Vec<_>>()
        );
        machine.array.close().await
    });
    eprintln!("closed {:?}", done.unwrap());
    world.destroy();
    site.disks.iter().chain([&new]).for_each(|disk| disk.cut(&world, CutMode::Everything));
    site.disks[0] = new;
    let found = read_back(&site, 10_701, &[1], 7);
    eprintln!("{found:?}");
    assert_eq!(found.unwrap(), (1..=7).collect::<Vec<_>>());
}

#[test]
fn reads_that_fail_for_a_moment_while_a_carrier_is_made_leave_a_whole_one() {
    blip(Duration::from_secs(3), false);
}

#[test]
fn reads_that_fail_for_a_minute_while_a_carrier_is_made_leave_a_whole_one() {
    blip(Duration::from_secs(60), false);
}

#[test]
fn a_scrub_after_the_moment_makes_the_carrier_whole() {
    blip(Duration::from_secs(3), true);
}

/// The header of a segment is rotten on every carrier that is left, and records behind it prove that they
/// were durable. So this is damage, not the end of the log.
fn rotten_header(lost: &[usize], unreadable: bool) {
    let mut site = Site::new(spec(4, 1));
    let world = World::new(10_800);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=25).await?;
        let geo = machine.array.geometry();
        machine.array.stop();
        Ok::<_, ArrayError>(SLICE_AT + geo.segment_at(SegmentNo(2)))
    });
    let at = done.unwrap().unwrap();
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
    for number in [0, 1] {
        if number == 1 && unreadable {
            continue;
        }
        site.disks[number].corrupt(at / BLOCK_BYTES as u64, &crate::bench::NOISE);
    }
    site.prepare = Box::new(move |number, drive| {
        if number == 1 && unreadable {
            drive.set_unreadable(at..at + BLOCK_BYTES as u64);
        }
    });
    let found = read_back(&site, 10_801, lost, 25);
    eprintln!("lost {lost:?} unreadable {unreadable}: {found:?}");
    assert!(found.is_err(), "acknowledged records are gone and nothing was said: {found:?}");
}

#[test]
fn a_rotten_header_on_the_last_carrier_is_damage() {
    rotten_header(&[1], false);
}

#[test]
fn a_rotten_header_and_an_unreadable_one_are_damage() {
    rotten_header(&[], true);
}

/// Random failures while carriers are replaced, then a power cut: all flushed data must be there. A seed
/// whose failures go beyond m is abandoned once the array has stopped.
#[test]
fn carriers_under_random_failures() {
    let mut bad = Vec::new();
    for seed in 0..40 {
        let mut site = Site::new(spec(4, 2));
        let load = crate::bench::Load::new(150);
        let beyond = std::cell::Cell::new(false);
        for life in 0..3u64 {
            let world = World::new(20_000 + seed * 10 + life);
            let news: Vec<_> = (0..6).map(|_| SimDisk::new(DISK_BYTES)).collect();
            let used = std::cell::RefCell::new(vec![false; 6]);
            if world.below(2) == 0 {
                let sites = [
                    "label.copy0",
                    "label.copy1",
                    WriteSite::CarrierCopy.name(),
                    WriteSite::LogAppend.name(),
                    WriteSite::LogSegment.name(),
                    WriteSite::CheckpointRoot.name(),
                    WriteSite::CheckpointPage.name(),
                    WriteSite::RebuildStrip.name(),
                    WriteSite::DestageStrip.name(),
                    WriteSite::MetadataRepair.name(),
                ];
                world.plan_cut(plan(sites[world.below(10) as usize], world.below(30)));
            }
            let run = world.run(async {
                let machine = site.open(&world, &[]).await?;
                load.settle(&machine).await?;
                let events = async {
                    let reserved = metadata_of(&machine.array.geometry());
                    for _ in 0..6 {
                        machine.env.sleep(Duration::from_millis(world.below(3000))).await;
                        let number = world.below(6) as usize;
                        let drive = machine.drives[number].as_ref().unwrap();
                        match world.below(6) {
                            0 => drive.plant_within(Op::Write, world.below(8), Fault::Fail, reserved.clone()),
                            1 => drive.plant_within(
                                Op::Write,
                                world.below(8),
                                Fault::HostFull,
                                reserved.clone(),
                            ),
                            2 => drive.plant_within(
                                Op::Write,
                                world.below(8),
                                Fault::Slow(Duration::from_secs(35)),
                                reserved.clone(),
                            ),
                            3 => drive.plant_within(Op::Read, world.below(8), Fault::Fail, reserved.clone()),
                            4 => drive.plant(
                                Op::Flush,
                                world.below(8),
                                Fault::Slow(Duration::from_secs(world.below(40))),
                            ),
                            _ => drive.plant_within(
                                Op::Read,
                                world.below(3),
                                Fault::Slow(Duration::from_secs(20)),
                                reserved.clone(),
                            ),
                        }
                        let latched = (0..6)
                            .filter(|at| machine.array.report().members[*at].state == "missing")
                            .collect::<Vec<_>>();
                        for at in latched {
                            if world.below(2) == 0 && !used.borrow()[at] {
                                used.borrow_mut()[at] = true;
                                // The old disk is no longer in use, so none of its writes is missed.
                                site.disks[at].cut(&world, CutMode::Everything);
                                if let Err(error) =
                                    machine.replace(&news[at], at, 1000 + seed * 10 + life).await
                                {
                                    eprintln!("seed {seed} life {life}: replace {error}");
                                }
                            }
                        }
                    }
                    Ok::<_, ArrayError>(())
                };
                let (one, two, three) =
                    futures_util::future::join3(load.run_logged(&machine), load.run_fresh(&machine), events)
                        .await;
                machine.env.sleep(Duration::from_secs(30)).await;
                let has_stopped = || {
                    let Some(why) = machine.array.stopped() else { return false };
                    let report = machine.array.report();
                    let lacking = report.members.iter().filter(|member| member.state != "active").count();
                    // Flushes failed, and the drives lost more unflushed writes than the code survives.
                    beyond.set(lacking > 2);
                    eprintln!(
                        "seed {seed} life {life} stopped: {why} {:?}",
                        report.members.iter().map(|m| (m.state, m.carrier)).collect::<Vec<_>>()
                    );
                    true
                };
                if has_stopped() {
                    return Ok(());
                }
                one.and(two).and(three)?;
                load.check(&machine).await?;
                if world.below(2) == 0 {
                    let closed = machine.array.close().await;
                    // The array may stop while it closes.
                    if has_stopped() { Ok(()) } else { closed }
                } else {
                    machine.array.stop();
                    Ok(())
                }
            });
            if let Ok(Err(error)) = &run {
                bad.push(format!("seed {seed} life {life}: {error}"));
            }
            site.cut(&world);
            for (at, new) in news.iter().enumerate().filter(|(at, _)| used.borrow()[*at]) {
                new.cut(&world, CutMode::draw(&world));
                // A replacement that was not recorded has no label. Keep the old disk then.
                if !new.used_blocks().is_empty() {
                    site.disks[at] = new.clone();
                }
            }
            if matches!(run, Ok(Err(_))) || beyond.get() {
                break;
            }
        }
        if beyond.get() {
            continue;
        }
        let world = World::new(29_999_999 + seed);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            load.check(&machine).await?;
            machine.array.wait_rebuilt().await;
            machine.env.sleep(Duration::from_secs(30)).await;
            load.check(&machine).await?;
            machine.array.close().await
        });
        world.destroy();
        match run {
            Ok(Ok(())) => {}
            other => bad.push(format!("seed {seed} at last: {other:?}")),
        }
    }
    bad.iter().for_each(|bad| eprintln!("{bad}"));
    assert!(bad.is_empty(), "{} bad", bad.len());
}

/// 4+2: one carrier answers no reads of its log when the array opens; the other two are healthy.
#[test]
fn an_opening_asks_a_carrier_that_does_not_answer_once() {
    let mut site = Site::new(spec(4, 2));
    let world = World::new(10_900);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        write_flushed(&machine, 1..=20).await?;
        let reserved = metadata_of(&machine.array.geometry());
        machine.array.close().await?;
        Ok::<_, ArrayError>(reserved)
    });
    let reserved = done.unwrap().unwrap();
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    site.prepare = Box::new(move |number, drive| {
        if number == 1 {
            (0..5000).for_each(|_| drive.plant_within(Op::Read, 0, Fault::Silent, reserved.clone()));
        }
    });
    let world = World::new(10_901);
    let took = world.run(async {
        let env = world.env();
        let began = env.now();
        let machine = site.open(&world, &[]).await?;
        let took = env.now() - began;
        machine.array.stop();
        Ok::<_, ArrayError>(took)
    });
    world.destroy();
    let took = took.unwrap().unwrap();
    eprintln!("the opening took {took:?}");
    // Roots, pages, the log, and the part behind its end: one deadline each, regardless of the length of the
    // log.
    assert!(took < Duration::from_secs(150), "{took:?}");
}

/// 4+1: the one carrier that is left never answers reads of the first MiB of its log (a bad spot); all else
/// is healthy.
#[test]
fn a_bad_spot_on_the_last_carrier_keeps_nobody() {
    let site = Site::new(spec(4, 1));
    let world = World::new(11_000);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await?;
        for tag in 1..=200 {
            write(&machine, tag % 100, tag).await?;
            machine.volume.flush().await?;
        }
        let slow = machine.drives[1].as_ref().unwrap();
        let spot = LOG_AT..LOG_AT + (1 << 20);
        (0..5000).for_each(|_| slow.plant_within(Op::Read, 0, Fault::Silent, spot.clone()));
        machine.drives[0].as_ref().unwrap().set_gone(true);
        let mut longest = Duration::ZERO;
        for tag in 0..20 {
            let began = machine.env.now();
            write(&machine, 0, 1000 + tag).await?;
            machine.volume.flush().await?;
            longest = longest.max(machine.env.now() - began);
        }
        let report = machine.array.report();
        machine.array.stop();
        Ok::<_, ArrayError>((longest, report.suspended))
    });
    let (longest, suspended) = done.unwrap().unwrap();
    world.destroy();
    eprintln!("a write and its flush took up to {longest:?} (suspended: {suspended:?})");
    assert!(longest < Duration::from_secs(120), "{longest:?}");
}

/// A carrier is lost, and the member that replaces it is slow. Flushes do not wait until the complete log and
/// table are copied. Data written meanwhile is on the new carrier when the last old one is lost.
#[test]
fn flushes_go_on_while_a_carrier_is_made() {
    let mut spec = spec(4, 1);
    spec.log_bytes = 4 << 20;
    let mut site = Site::new(spec);
    let world = World::new(10_200);
    const FIRST: u64 = 1000;
    let (longest, took, written, reserved) = world
        .run(async {
            let machine = site.open(&world, &[]).await?;
            for tag in 1..=400 {
                write(&machine, tag, tag).await?;
            }
            machine.volume.flush().await?;
            // The first writes of the copy take a minute.
            let slow = Fault::Slow(Duration::from_secs(20));
            let at = metadata_of(&machine.array.geometry());
            let taker = machine.drives[2].as_ref().unwrap();
            (0..3).for_each(|_| taker.plant_within(Op::Write, 0, slow, at.clone()));
            machine.drives[0].as_ref().unwrap().set_gone(true);
            machine.array.fail_member(MemberNo::new(0), "gone").await?;
            let began = machine.env.now();
            let (mut longest, mut written) = (Duration::ZERO, 0);
            while machine.array.report().missing_carriers > 0 {
                let at = machine.env.now();
                write(&machine, 401 + written % 100, FIRST + written).await?;
                machine.volume.flush().await?;
                longest = longest.max(machine.env.now() - at);
                written += 1;
                machine.env.sleep(Duration::from_millis(500)).await;
            }
            machine.array.stop();
            let took = machine.env.now() - began;
            Ok::<_, ArrayError>((longest, took, written, machine.array.geometry().metadata()))
        })
        .unwrap()
        .unwrap();
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    eprintln!("{written} flushes in {took:?}, the longest {longest:?}");
    assert!(took > Duration::from_secs(60) && longest < Duration::from_secs(1), "{longest:?} of {took:?}");
    // On the old carrier that is left, only strips can be read.
    site.prepare = Box::new(move |number, drive| {
        if number == 1 {
            drive.set_unreadable(SLICE_AT + reserved.start..SLICE_AT + reserved.end);
        }
    });
    let found = read_back(&site, 10_201, &[0], 500).unwrap();
    let expected = |block: u64| match (0..written).rev().find(|tag| 401 + tag % 100 == block) {
        Some(tag) => FIRST + tag,
        None if block <= 400 => block,
        None => 0,
    };
    assert_eq!(found, (1..=500).map(expected).collect::<Vec<_>>());
}
