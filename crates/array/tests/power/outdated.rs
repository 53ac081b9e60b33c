//! Drives that come back with old contents, several at a time, and replacements beside a drive without
//! label.

use crate::bench::{
    DISK_BYTES, LABEL, Load, Machine, NOISE, SLICE_AT, Site, plan, spec, tags, write, write_fresh,
};
use crate::carriers::write_flushed;
use crate::replaced::duplicate;
use penstock_array::MemberNo;
use penstock_array::Site as WriteSite;
use penstock_array::format::root::Root;
use penstock_array::{ArrayError, ArrayEvent, Lacking};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Epoch};
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, CutPlan, SimDisk, World};
use std::collections::BTreeSet;
use std::ops::Range;
use std::time::Duration;

/// Opens the array of the site without the disks in `lost`, and runs `work` on it.
pub fn life<T>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    work: impl AsyncFnOnce(&Machine) -> Result<T, ArrayError>,
) -> Result<T, ArrayError> {
    let world = World::new(seed);
    let run = world.run(async {
        let all = async {
            let machine = site.open(&world, lost).await?;
            work(&machine).await
        };
        timeout(&world.env(), Duration::from_secs(3600), all).await.expect("it ends")
    });
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    run.unwrap()
}

async fn write_some_and_close(machine: &Machine) -> Result<(), ArrayError> {
    write_flushed(machine, 1..=20).await?;
    machine.array.close().await
}

/// As many drives as the code survives have the contents of before the last opening. Regression: an opening
/// with more than k of them waited for ever for labels on the drives that it had left out.
fn come_back_as_they_were(k: usize, m: usize, outdated: &[usize]) {
    let mut site = Site::new(spec(k, m));
    let mut past = Vec::new();
    for turn in 0..2 {
        let store = async |machine: &Machine| {
            write_flushed(machine, 1..=20).await?;
            for at in 1..=20 {
                write(machine, at, at + 100 * turn).await?;
            }
            machine.volume.flush().await?;
            machine.array.close().await
        };
        life(&site, 60_000 + turn, &[], store).unwrap();
        if turn == 0 {
            past = site.disks.iter().map(|disk| disk.duplicate()).collect();
        }
    }
    for at in outdated {
        site.disks[*at] = past[*at].clone();
    }
    let rebuild_and_read = async |machine: &Machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        let found = tags(&machine.volume, 1, 20).await?;
        machine.array.close().await?;
        Ok(found)
    };
    let found = life(&site, 60_010, &[], rebuild_and_read).unwrap();
    assert_eq!(found, (101..=120).collect::<Vec<_>>(), "{k}+{m} {outdated:?}");
}

#[test]
fn as_many_drives_as_may_be_lost_come_back_from_the_past() {
    for (k, m, outdated) in [
        (4, 2, &[0, 1][..]),
        (1, 1, &[0]),
        (1, 2, &[0, 1]),
        (1, 2, &[1, 2]),
        (1, 3, &[1, 2, 3]),
        (2, 3, &[0, 1, 2]),
    ] {
        come_back_as_they_were(k, m, outdated);
    }
}

/// m drives are lost, and one that is left takes no label, although it takes all other writes.
/// Regression: a replacement went on for ever, and blocked every later failure or replacement of a drive.
#[test]
fn a_replacement_beside_a_drive_that_takes_no_label_ends() {
    for (k, m) in [(1, 1), (4, 1)] {
        let site = Site::new(spec(k, m));
        let world = World::new(80_000);
        let new = SimDisk::new(DISK_BYTES);
        let run = world.run(async {
            let machine = site.open(&world, &[]).await?;
            write_flushed(&machine, 1..=5).await?;
            machine.array.fail_member(MemberNo::new(1), "gone").await?;
            machine.env.sleep(Duration::from_secs(60)).await;
            let drive = machine.drives[0].as_ref().unwrap();
            (0..10_000).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, LABEL));
            let work = machine.replace(&new, 1, 3);
            let replaced = timeout(&machine.env, Duration::from_secs(600), work).await.expect("it ends");
            eprintln!("{k}+{m}: {replaced:?}");
            write_flushed(&machine, 6..=9).await?;
            assert_eq!(tags(&machine.volume, 1, 9).await?, (1..=9).collect::<Vec<_>>());
            machine.array.stop();
            Ok::<_, ArrayError>(())
        });
        run.unwrap().unwrap();
        world.destroy();
    }
}

/// A drive is lost, and comes back with the contents of before an opening in which it took part. Regression:
/// only the writes since its loss were rebuilt, and the rest was lost with m other drives.
fn lost_and_back_as_it_was_earlier(k: usize, m: usize, away_at_a_start: bool) {
    let mut site = Site::new(spec(k, m));
    life(&site, 60_020, &[], write_some_and_close).unwrap();
    let past = site.disks[0].duplicate();
    let stripe_blocks = (k * 8) as u64;
    let serve = async |machine: &Machine| {
        for stripe in 6..12 {
            write_fresh(machine, stripe, stripe * 1000).await?;
        }
        machine.volume.flush().await?;
        if !away_at_a_start {
            machine.array.fail_member(MemberNo::new(0), "gone").await?;
            write_fresh(machine, 12, 12_000).await?;
        }
        machine.array.close().await
    };
    life(&site, 60_021, &[], serve).unwrap();
    if away_at_a_start {
        let without = async |machine: &Machine| {
            write_fresh(machine, 12, 12_000).await?;
            machine.array.close().await
        };
        life(&site, 60_022, &[0], without).unwrap();
    }
    site.disks[0] = past;
    let rebuild = async |machine: &Machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.close().await
    };
    life(&site, 60_023, &[], rebuild).unwrap();
    let lost: Vec<usize> = (1..=m).collect();
    let read = async |machine: &Machine| {
        for stripe in 6..13 {
            let found = tags(&machine.volume, stripe * stripe_blocks, stripe_blocks).await?;
            assert_eq!(found[0], stripe * 1000, "{k}+{m} {away_at_a_start}");
        }
        machine.array.stop();
        Ok(())
    };
    life(&site, 60_024, &lost, read).unwrap();
}

#[test]
fn a_lost_drive_that_comes_back_as_it_was_earlier_is_made_again() {
    for (k, m, away_at_a_start) in
        [(4, 1, true), (4, 1, false), (4, 2, true), (1, 1, true), (1, 1, false), (2, 3, true)]
    {
        lost_and_back_as_it_was_earlier(k, m, away_at_a_start);
    }
}

/// One carrier has the contents of before the last opening, and the others are absent. The labels of the
/// other members prove it. Regression: the array showed its old contents, and reverted to them for good.
#[test]
fn an_old_carrier_alone_is_refused() {
    for (k, m) in [(4, 1), (4, 2)] {
        let mut site = Site::new(spec(k, m));
        life(&site, 60_030, &[], write_some_and_close).unwrap();
        let past = site.disks[0].duplicate();
        let change = async |machine: &Machine| {
            for at in 1..=20 {
                write(machine, at, at + 100).await?;
            }
            machine.volume.flush().await?;
            machine.array.stop();
            Ok(())
        };
        life(&site, 60_031, &[], change).unwrap();
        let right = std::mem::replace(&mut site.disks[0], past);
        let lost: Vec<usize> = (1..=m).collect();
        let refused = life(&site, 60_032, &lost, async |_| Ok(())).unwrap_err();
        assert!(matches!(refused, ArrayError::CannotRead { .. }), "{refused}");
        site.disks[0] = right;
        let found = life(&site, 60_033, &[], async |machine| {
            let found = tags(&machine.volume, 1, 20).await?;
            machine.array.close().await?;
            Ok(found)
        });
        assert_eq!(found.unwrap(), (101..=120).collect::<Vec<_>>(), "{k}+{m}");
    }
}

/// m drives have very old contents at a start that is cut. At the next start they have their right contents,
/// and one more drive is absent. Regression: with too many strips missing, data on the right drives and the
/// absent one was recorded as out of date. The array must be refused until all drives are there. Returns true
/// if it was refused.
fn wrong_drives_then_the_right_ones(seed: u64) -> bool {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let draw = |among: &[&'static str]| among[dice.below(among.len() as u64) as usize];
    let (k, m) = [(4, 1), (4, 2), (2, 1), (1, 1), (2, 2), (3, 0)][dice.below(6) as usize];
    let mut site = Site::new(spec(k, m));
    let load = Load::new(40 + dice.below(60));
    let past: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
    let one_life = |site: &Site, number: u64, cut: Option<CutPlan>, lost: &[usize], heals: bool| {
        let world = World::new(seed * 10 + number);
        if let Some(cut) = cut {
            world.plan_cut(cut);
        }
        let run = world.run(async {
            let work = async {
                let machine = site.open(&world, lost).await?;
                if heals {
                    machine.array.wait_rebuilt().await;
                } else if number < 2 {
                    load.settle(&machine).await?;
                    let (logged, fresh) =
                        futures_util::future::join(load.run_logged(&machine), load.run_fresh(&machine)).await;
                    logged.and(fresh)?;
                }
                load.check(&machine).await.expect("all that is durable can be read");
                machine.array.stop();
                Ok::<_, ArrayError>(())
            };
            timeout(&world.env(), Duration::from_secs(7200), work).await.expect("it ends")
        });
        site.cut(&world);
        run
    };
    for number in 0..2 {
        let place = draw(&[
            WriteSite::LogAppend.name(),
            WriteSite::DestageStrip.name(),
            WriteSite::CheckpointRoot.name(),
            WriteSite::DestageTrailer.name(),
        ]);
        let cut = (dice.below(3) > 0).then(|| plan(place, 10 + dice.below(60)));
        if let Ok(ended) = one_life(&site, number, cut, &[], false) {
            ended.unwrap();
        }
    }
    let right: Vec<_> = site.disks[..m].to_vec();
    site.disks[..m].clone_from_slice(&past[..m]);
    let places = [
        WriteSite::ReplayRedo.name(),
        WriteSite::CheckpointRoot.name(),
        WriteSite::DestageStrip.name(),
        WriteSite::DestageTrailer.name(),
        WriteSite::LogAppend.name(),
        "label.copy0",
        WriteSite::CarrierCopy.name(),
        WriteSite::RebuildStrip.name(),
    ];
    let cut = Some(plan(draw(&places), dice.below(12)));
    // Without a cut, the drives with old contents have been rebuilt and are right.
    if one_life(&site, 5, cut, &[], true).is_ok() {
        return false;
    }
    site.disks[..m].clone_from_slice(&right);
    let refused = match one_life(&site, 6, None, &[m], false).expect("nobody cuts it") {
        Ok(()) => false,
        Err(
            ArrayError::WouldLose { .. }
            | ArrayError::TooManyMissing { .. }
            | ArrayError::CannotRead { .. }
            | ArrayError::Replaced { .. },
        ) => true,
        Err(error) => panic!("seed {seed}: {error}"),
    };
    one_life(&site, 7, None, &[], false).expect("nobody cuts it").expect("all are there");
    refused
}

#[test]
fn campaign_of_wrong_drives() {
    let seeds = penstock_sim::seeds(1..60);
    let refused = seeds.clone().filter(|seed| wrong_drives_then_the_right_ones(*seed)).count();
    eprintln!("seeds {seeds:?}: {refused} refused");
    assert!(refused > 0);
}

/// More drives than may be missing have the contents of an earlier start. Nothing is changed until an
/// administrator accepts the loss. Then the drives are used, and their old contents do not count as data.
fn too_many_from_the_past(k: usize, m: usize) {
    let mut site = Site::new(spec(k, m));
    life(&site, 60_040, &[], write_some_and_close).unwrap();
    let past: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
    let per = (k * 8) as u64;
    let serve = async |machine: &Machine| {
        write_fresh(machine, 6, 6000).await?;
        machine.array.close().await
    };
    life(&site, 60_041, &[], serve).unwrap();
    // One carrier is always left, and one drive that has the stripe.
    let outdated = 1..2 + m;
    let right: Vec<_> =
        outdated.clone().map(|at| std::mem::replace(&mut site.disks[at], past[at].clone())).collect();
    for _ in 0..2 {
        let refused = life(&site, 60_042, &[], async |_| Ok(())).unwrap_err();
        let text = refused.to_string();
        assert!(matches!(refused, ArrayError::WouldLose { .. }), "{text}");
        assert!(outdated.clone().all(|at| text.contains(&format!("at disk{at}"))), "{text}");
    }
    let copy = duplicate(&site, None);
    for (at, disk) in outdated.clone().zip(right) {
        site.disks[at] = disk;
    }
    let found = life(&site, 60_043, &[], async |machine| tags(&machine.volume, 6 * per, 1).await);
    assert_eq!(found.unwrap(), [6000], "{k}+{m}: nothing was lost by refusing");
    let site = Site { lacking: Lacking::Accept, ..copy };
    let accept = async |machine: &Machine| {
        let notes = machine.array.take_events();
        assert!(notes.iter().any(|note| matches!(note, ArrayEvent::LossAccepted { .. })), "{notes:?}");
        assert_eq!(tags(&machine.volume, 1, 20).await?, (1..=20).collect::<Vec<_>>());
        let lost = tags(&machine.volume, 6 * per, per).await.unwrap_err();
        assert!(matches!(lost, ArrayError::Unreadable { .. }), "{lost}");
        machine.array.close().await
    };
    life(&site, 60_044, &[], accept).unwrap();
    // The acceptance is needed only once.
    let site = Site { lacking: Lacking::Refuse, ..site };
    let found = life(&site, 60_045, &[], async |machine| tags(&machine.volume, 1, 20).await);
    assert_eq!(found.unwrap(), (1..=20).collect::<Vec<_>>(), "{k}+{m}");
}

#[test]
fn more_drives_from_the_past_than_may_be_missed_are_refused() {
    for (k, m) in [(4, 1), (4, 2), (3, 2), (3, 0)] {
        too_many_from_the_past(k, m);
    }
}

/// A drive was absent at a start in which nothing was written, and is back beside one with old contents.
/// Regression: it counted as missing although it lacks nothing, so the old contents of the other one were
/// used.
#[test]
fn a_stale_member_that_lacks_nothing_is_no_missing_one() {
    let (k, m) = (4, 1);
    let mut site = Site::new(spec(k, m));
    life(&site, 60_050, &[], write_some_and_close).unwrap();
    let past = site.disks[2].duplicate();
    let serve = async |machine: &Machine| {
        for stripe in 6..12 {
            write_fresh(machine, stripe, stripe * 1000).await?;
        }
        machine.array.close().await
    };
    life(&site, 60_051, &[], serve).unwrap();
    life(&site, 60_052, &[3], async |machine| machine.array.close().await).unwrap();
    site.disks[2] = past;
    let rebuild = async |machine: &Machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.close().await
    };
    life(&site, 60_053, &[], rebuild).unwrap();
    let read = async |machine: &Machine| {
        for stripe in 6..12 {
            assert_eq!(tags(&machine.volume, stripe * 32, 1).await?, [stripe * 1000]);
        }
        Ok(())
    };
    life(&site, 60_054, &[4], read).unwrap();
}

/// A drive with old contents is found by a start that is cut after coordination has recorded it as stale and
/// before any label has. Regression: the next start rebuilt only the stale strips of the table, which
/// are none.
fn found_by_a_start_that_is_cut(k: usize, m: usize) {
    let mut site = Site::new(spec(k, m));
    let per = (k * 8) as u64;
    let mut past = None;
    let written = life(&site, 1, &[], async |machine| {
        write_flushed(machine, 1..=5).await?;
        past = Some(machine.disks[0].duplicate());
        for stripe in 6..12 {
            write_fresh(machine, stripe, stripe * 1000).await?;
        }
        machine.volume.flush().await?;
        machine.array.close().await
    });
    written.unwrap();
    let cut_at_label = |site: &Site, seed: u64, nth: u64| {
        let world = World::new(seed);
        world.plan_cut(plan("label.copy0", nth));
        assert!(world.run(site.open(&world, &[])).is_err(), "it is cut");
        world.destroy();
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
    };
    // After all labels of its claim, and after the root.
    cut_at_label(&site, 2, (k + m) as u64);
    site.disks[0] = past.unwrap();
    cut_at_label(&site, 3, 0);
    let whole = life(&site, 4, &[], async |machine| {
        machine.array.wait_rebuilt().await;
        assert!(
            machine
                .array
                .take_events()
                .iter()
                .any(|note| *note == ArrayEvent::Outdated { member: MemberNo::new(0) })
        );
        machine.array.close().await
    });
    whole.unwrap();
    let lost: Vec<usize> = (1..=m).collect();
    let read = life(&site, 5, &lost, async |machine| {
        for stripe in 6..12 {
            assert_eq!(tags(&machine.volume, stripe * per, per).await?[0], stripe * 1000);
        }
        machine.array.stop();
        Ok(())
    });
    read.unwrap();
}

#[test]
fn a_drive_from_the_past_is_made_again_after_a_start_that_was_cut() {
    for (k, m) in [(4, 1), (4, 2)] {
        found_by_a_start_that_is_cut(k, m);
    }
}

/// The blocks of the first stripes that can be read; each must have its newest contents.
async fn blocks_left(machine: &Machine, expected: &[u64]) -> BTreeSet<u64> {
    let mut left = BTreeSet::new();
    for (block, expected) in (0..).zip(expected) {
        match tags(&machine.volume, block, 1).await {
            Ok(found) => {
                assert_eq!(found, [*expected], "block {block}");
                left.insert(block);
            }
            Err(error) => assert!(matches!(error, ArrayError::Unreadable { .. }), "{error}"),
        }
    }
    left
}

/// A start with accepted loss is cut anywhere. Regression: if only some of the old drives had their
/// label by then, the next start took only the others for outdated, went on without acceptance and
/// rebuilt them. Their right data was lost.
#[test]
fn a_start_with_an_accepted_loss_that_is_cut_asks_again_and_loses_no_more() {
    let (k, m, stripes) = (4, 1, 12);
    let mut site = Site::new(spec(k, m));
    let per = (k * 8) as u64;
    let mut expected: Vec<u64> = (0..stripes * per).map(|block| 1000 + block).collect();
    let mut id = None;
    let first = life(&site, 60_060, &[], async |machine| {
        for stripe in 0..stripes {
            write_fresh(machine, stripe, expected[(stripe * per) as usize]).await?;
        }
        id = Some(machine.array.id());
        machine.array.close().await
    });
    first.unwrap();
    let past: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
    let second = life(&site, 60_061, &[], async |machine| {
        for stripe in 0..stripes {
            let block = stripe * per + stripe * 11 % per;
            expected[block as usize] += 5000;
            write(machine, block, expected[block as usize]).await?;
        }
        machine.volume.flush().await?;
        machine.env.sleep(Duration::from_secs(60)).await;
        write_fresh(machine, stripes, 9000).await?;
        expected.extend(9000..9000 + per);
        machine.array.close().await
    });
    second.unwrap();
    for at in [1, 2] {
        site.disks[at] = past[at].clone();
    }
    let read = async |machine: &Machine| {
        let left = blocks_left(machine, &expected).await;
        machine.array.wait_rebuilt().await;
        assert_eq!(blocks_left(machine, &expected).await, left, "a rebuild loses nothing");
        machine.array.stop();
        Ok(left)
    };
    let accepting = || Site { lacking: Lacking::Accept, ..duplicate(&site, id) };
    let uncut = life(&accepting(), 60_062, &[], read).unwrap();
    assert!(uncut.len() < expected.len(), "something is lost");
    let (mut asked, mut went_on) = (0, 0);
    for place in [
        "label.copy0",
        "label.copy1",
        WriteSite::CheckpointRoot.name(),
        WriteSite::ReplayRedo.name(),
        WriteSite::LogAppend.name(),
    ] {
        for (nth, mode) in (0..14).flat_map(|nth| [(nth, CutMode::Nothing), (nth, CutMode::Everything)]) {
            let copy = accepting();
            let world = World::new(60_063);
            world.plan_cut(plan(place, nth));
            let cut = world.run(async { copy.open(&world, &[]).await.map(|machine| machine.array.stop()) });
            world.destroy();
            copy.disks.iter().for_each(|disk| disk.cut(&world, mode));
            if cut.is_ok() {
                continue;
            }
            let copy = Site { lacking: Lacking::Refuse, ..copy };
            let left = match life(&copy, 60_064, &[], read) {
                Err(ArrayError::WouldLose { .. }) => {
                    asked += 1;
                    life(&Site { lacking: Lacking::Accept, ..copy }, 60_065, &[], read)
                }
                left => {
                    went_on += 1;
                    left
                }
            };
            let more: Vec<_> = uncut.difference(left.as_ref().unwrap()).collect();
            assert!(more.is_empty(), "{place} {nth} {mode:?}: lost as well {more:?}");
        }
    }
    assert!(asked > 0 && went_on > 0, "{asked} asked, {went_on} went on");
}

/// A stripe has more damage than redundancy, and a rebuilt member lacks its strip of it. Regression: each
/// start with other drives absent required an accepted loss, although no absent drive could help. `columns`
/// are damaged in strips 0 to 2, and marked as lost in the strip that is made again.
fn damaged_beyond_redundancy(columns: Range<u32>) -> Result<(), ArrayError> {
    let (k, m) = (4, 2);
    let mut site = Site::new(spec(k, m));
    let first = life(&site, 60_070, &[], async |machine| {
        for stripe in 0..6 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.array.close().await?;
        let geo = machine.array.geometry();
        for disk in &machine.disks[..3] {
            columns.clone().for_each(|column| {
                let block = (SLICE_AT + geo.block_at(2, column)) / BLOCK_BYTES as u64;
                disk.corrupt(block, &NOISE);
            });
        }
        Ok(())
    });
    first.unwrap();
    site.replace(5);
    let new = site.disks[5].clone();
    let rebuilt = life(&site, 60_071, &[5], async |machine| {
        machine.replace(&new, 5, 2).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.close().await
    });
    rebuilt.unwrap();
    life(&site, 60_072, &[3, 4], async |machine| {
        assert_eq!(tags(&machine.volume, 0, 1).await?, [1000]);
        machine.array.close().await
    })
}

#[test]
fn a_stripe_that_is_lost_anyway_refuses_no_start() {
    for columns in [0..1, 0..8] {
        damaged_beyond_redundancy(columns).unwrap();
    }
}

/// 4+1: drives 1 and 2 have old contents. A start with accepted loss is cut after its labels and before
/// its root. Then the right drive 1 is back. With `away`, the old drive 2 is absent at the next start, which
/// goes on without it, and back at the one after that. Otherwise it is there, and the next start is cut after
/// its root. Regression: the old drive counted as one that had merely been absent.
fn an_old_drive_after_a_word_that_was_cut(away: bool) {
    let (k, m) = (4, 1);
    let mut site = Site::new(spec(k, m));
    let per = (k * 8) as u64;
    life(&site, 1, &[], write_some_and_close).unwrap();
    let past: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
    let serve = async |machine: &Machine| {
        for stripe in 6..12 {
            write_fresh(machine, stripe, stripe * 1000).await?;
        }
        machine.array.close().await
    };
    life(&site, 2, &[], serve).unwrap();
    let right = std::mem::replace(&mut site.disks[1], past[1].clone());
    site.disks[2] = past[2].clone();
    let cut_at = |site: &Site, place: &str| {
        let world = World::new(4);
        world.plan_cut(plan(place, 0));
        assert!(world.run(site.open(&world, &[])).is_err(), "it is cut");
        world.destroy();
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Nothing));
    };
    let is_refused = |site: &Site| {
        let refused = life(site, 3, &[], async |_| Ok(())).unwrap_err();
        assert!(matches!(refused, ArrayError::WouldLose { .. }), "{refused}");
    };
    let read = async |machine: &Machine| {
        for stripe in 6..12 {
            assert_eq!(tags(&machine.volume, stripe * per, per).await?[0], stripe * 1000);
        }
        machine.array.close().await
    };
    is_refused(&site);
    let mut site = Site { lacking: Lacking::Accept, ..site };
    cut_at(&site, WriteSite::CheckpointRoot.name());
    site.lacking = Lacking::Refuse;
    is_refused(&site);
    site.disks[1] = right;
    match away {
        true => life(&site, 6, &[2], read).unwrap(),
        false => cut_at(&site, WriteSite::LogAppend.name()),
    }
    let rebuild = async |machine: &Machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.close().await
    };
    life(&site, 7, &[], rebuild).unwrap();
    life(&site, 8, &[3], read).unwrap();
}

#[test]
fn an_old_drive_that_a_word_used_is_known_until_it_is_made_again() {
    an_old_drive_after_a_word_that_was_cut(true);
    an_old_drive_after_a_word_that_was_cut(false);
}

/// 4+1: drives 2 and 3 have old contents and a carrier is absent at a start with accepted loss, which is cut
/// before its root. Then all right drives are back: nothing is refused and nothing is lost. Regression: the
/// descriptor recorded the old drives with the new epoch.
#[test]
fn all_right_drives_are_back_after_a_word_that_was_cut() {
    let mut site = Site::new(spec(4, 1));
    let (load, mut found) = (Load::new(40), None);
    let first = life(&site, 1, &[], async |machine| {
        load.run_logged(machine).await?;
        machine.array.close().await
    });
    first.unwrap();
    let past: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
    let second = life(&site, 2, &[], async |machine| {
        load.settle(machine).await?;
        let (logged, fresh) =
            futures_util::future::join(load.run_logged(machine), load.run_fresh(machine)).await;
        logged.and(fresh)?;
        machine.volume.flush().await?;
        load.settle(machine).await?;
        found = Some((machine.array.id(), machine.array.geometry()));
        machine.array.stop();
        Ok(())
    });
    second.unwrap();
    let (id, geo) = found.unwrap();
    let right = site.disks.clone();
    (2..4).for_each(|at| site.disks[at] = past[at].clone());
    let mut opened = 0;
    for place in [
        "label.copy0",
        "label.copy1",
        WriteSite::CheckpointRoot.name(),
        WriteSite::CarrierCopy.name(),
        WriteSite::ReplayRedo.name(),
    ] {
        for (nth, mode) in (0..24).flat_map(|nth| [(nth, CutMode::Nothing), (nth, CutMode::Everything)]) {
            let mut copy = Site { lacking: Lacking::Accept, ..duplicate(&site, Some(id)) };
            let world = World::new(4);
            world.plan_cut(plan(place, nth));
            let cut = world.run(async { copy.open(&world, &[1]).await.map(|machine| machine.array.stop()) });
            world.destroy();
            copy.disks.iter().for_each(|disk| disk.cut(&world, mode));
            let roots = |disk: &SimDisk| {
                let root =
                    |seq| Root::decode(&disk.peek((SLICE_AT + geo.root_at(seq)) / BLOCK_BYTES as u64)).ok();
                (0..2).filter_map(root).map(|root| root.epoch).max()
            };
            // With a root, the acceptance took effect.
            if cut.is_ok() || copy.disks.iter().filter_map(|disk| roots(disk)).max() >= Some(Epoch(3)) {
                continue;
            }
            (1..4).for_each(|at| copy.disks[at] = right[at].duplicate());
            copy.lacking = Lacking::Refuse;
            let check = life(&copy, 5, &[], async |machine| {
                load.check(machine).await?;
                machine.array.stop();
                Ok(())
            });
            check.unwrap_or_else(|error| panic!("cut at {place} {nth} {mode:?}: {error}"));
            opened += 1;
        }
    }
    assert!(opened > 10, "{opened}");
}
