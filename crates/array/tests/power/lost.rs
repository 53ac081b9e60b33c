//! Losses that come close together, beside stripes that are being written, rebuilt or brought back. Each test
//! is the regression of a loss of data, or of a rebuild that did not end.

use crate::bench::{
    DISK_BYTES, LABEL, Site, buf_of, log_of, metadata_of, row, slice_bytes, slice_of, spec, spread, tags,
    write_fresh,
};
use crate::outdated::life;
use penstock_array::place::{MemberNo, Position};
use penstock_array::{ArrayError, Discard, Geometry};
use penstock_base::env::timeout;
use penstock_base::{DriveId, Id128, Stripe};
use penstock_drive::superblock::Superblock;
use penstock_drive::{DriveHandle, Fault, FaultyDrive, Op};
use penstock_sim::{SimDisk, SimDrive};
use std::rc::Rc;
use std::time::Duration;

/// Acknowledged and flushed writes in the log are destaged into a new stripe that lacks more than m strips.
#[test]
fn destage_makes_no_stripe_that_lacks_too_much() {
    let site = Site::new(spec(4, 2));
    life(&site, 1, &[], async |machine| {
        // Nothing is written: these members are "empty".
        for lost in [4, 5] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
            machine.env.sleep(Duration::from_millis(50)).await;
        }
        let (data, crcs) = buf_of(&(1..=32).collect::<Vec<_>>());
        machine.volume.write(0, &data, &crcs).await?;
        machine.volume.flush().await?;
        assert_eq!(tags(&machine.volume, 0, 32).await?, (1..=32).collect::<Vec<_>>());
        // The destage writes the stripe; the third drive fails in its write.
        machine.drives[3].as_ref().unwrap().plant(Op::Write, 0, Fault::Fail);
        machine.array.destage_and_checkpoint().await?;
        assert!(!machine.latched(3), "no stripe can be written without it");
        assert_eq!(tags(&machine.volume, 0, 32).await?, (1..=32).collect::<Vec<_>>());
        Ok(())
    })
    .unwrap();
}

/// The same past the log: the flush says that the stripe is durable.
#[test]
fn a_fresh_stripe_keeps_the_drives_that_it_needs() {
    let site = Site::new(spec(4, 2));
    life(&site, 2, &[], async |machine| {
        for lost in [4, 5] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
            machine.env.sleep(Duration::from_millis(50)).await;
        }
        machine.drives[3].as_ref().unwrap().plant(Op::Write, 0, Fault::Fail);
        write_fresh(machine, 0, 1).await?;
        machine.volume.flush().await?;
        assert_eq!(tags(&machine.volume, 0, 32).await?, (1..=32).collect::<Vec<_>>());
        Ok(())
    })
    .unwrap();
}

/// Two members that were empty are replaced; new stripes lie on both; the array lets both go.
#[test]
fn members_that_were_empty_count_once_they_hold_strips() {
    let mut site = Site::new(spread(3, 1, 8, 2));
    life(&site, 5, &[], async |machine| {
        for stripe in 0..600 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.volume.flush().await?;
        for lost in [6, 7] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
        }
        machine.array.close().await
    })
    .unwrap();
    site.replace(6);
    site.replace(7);
    life(&site, 6, &[6, 7], async |machine| {
        machine.array.wait_rebuilt().await;
        let six = machine.replace(&site.disks[6], 6, 9);
        let (six, seven) = futures_util::future::join(six, machine.replace(&site.disks[7], 7, 10)).await;
        six.and(seven)?;
        for stripe in 700..712 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.volume.flush().await?;
        machine.array.fail_member(MemberNo::new(7), "a test").await?;
        let second = machine.array.fail_member(MemberNo::new(6), "a test").await;
        assert!(matches!(second, Err(ArrayError::Suspended(_))), "{second:?}");
        let blocks = machine.volume.stripe_blocks();
        for stripe in 700..712 {
            let found = tags(&machine.volume, stripe * blocks, 1).await;
            assert!(found.is_ok(), "stripe {stripe}: {found:?}");
        }
        Ok(())
    })
    .unwrap();
}

/// A member is replaced while another one is away and stripes are written all the time.
#[test]
fn a_rebuild_ends_beside_fresh_writes() {
    for lost in [&[4][..], &[4, 5]] {
        rebuild_beside(lost);
    }
}

fn rebuild_beside(lost: &[usize]) {
    let mut site = Site::new(spec(4, 2));
    life(&site, 7, &[], async |machine| {
        for stripe in 0..20 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.array.close().await
    })
    .unwrap();
    site.replace(4);
    life(&site, 8, lost, async |machine| {
        machine.replace(&site.disks[4], 4, 9).await?;
        let writer = |first: u64| async move {
            for round in 0..1200u64 {
                write_fresh(machine, first + round % 60, 1 + round).await?;
                if round % 60 == 59 {
                    machine.volume.discard(first, 60, Discard::InTable).await?;
                }
            }
            Ok::<_, ArrayError>(())
        };
        let began = machine.env.now();
        let watch = async {
            for _ in 0..2000 {
                machine.env.sleep(Duration::from_millis(2)).await;
                if machine.array.report().members[4].state == "active" {
                    return machine.env.now() - began;
                }
            }
            panic!("without {lost:?}: the rebuild does not end");
        };
        let writers = futures_util::future::join_all((0..6).map(|at| writer(100 + 60 * at)));
        let writers = async {
            writers.await.into_iter().collect::<Result<Vec<_>, _>>()?;
            Ok::<_, ArrayError>(machine.env.now() - began)
        };
        let (written, rebuilt) = futures_util::future::join(writers, watch).await;
        assert!(rebuilt < written? / 2, "without {lost:?}: rebuilt after {rebuilt:?}");
        Ok(())
    })
    .unwrap();
}

/// A member is replaced while strips of its stripes on another one are read back.
#[test]
fn a_member_is_replaced_while_another_reads_back() {
    let mut site = Site::new(spec(4, 2));
    life(&site, 9, &[4, 5], async |machine| {
        for stripe in 0..20 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.array.close().await
    })
    .unwrap();
    let strips = metadata_of(&Geometry::fit(&site.spec, slice_bytes()).unwrap()).end..DISK_BYTES - (1 << 20);
    site.prepare = Box::new(move |number, drive| {
        if number == 5 {
            let slow = Fault::Slow(Duration::from_millis(800));
            (0..6).for_each(|nth| drive.plant_within(Op::Read, nth, slow, strips.clone()));
        }
    });
    let new = SimDisk::new(DISK_BYTES);
    life(&site, 10, &[], async |machine| {
        machine.env.sleep(Duration::from_millis(300)).await;
        machine.replace(&new, 4, 22).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        for lost in [0, 1] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
        }
        for stripe in 0..20 {
            let found = tags(&machine.volume, 32 * stripe, 32).await;
            assert!(found.is_ok(), "stripe {stripe}: {found:?}");
        }
        Ok(())
    })
    .unwrap();
}

/// Lost strips without a place: each new stripe that lacks one begins the rebuild again.
#[test]
fn strips_without_a_place_begin_no_rebuild_over_and_over() {
    let site = Site::new(spread(4, 2, 8, 1));
    life(&site, 11, &[], async |machine| {
        for stripe in 0..100 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.volume.flush().await?;
        for lost in [0, 5] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
            machine.array.wait_rebuilt().await;
        }
        machine.env.sleep(Duration::from_secs(30)).await;
        machine.array.take_events();
        for stripe in 100..300 {
            write_fresh(machine, stripe, 7).await?;
            machine.volume.flush().await?;
            machine.env.sleep(Duration::from_millis(10)).await;
        }
        let events = machine.array.take_events();
        assert!(events.len() < 20, "{} events, the last {:?}", events.len(), events.last());
        Ok(())
    })
    .unwrap();
}

/// The first write of a strip on drive 0 takes 5 s, in each life.
fn slow_first_strip(site: &mut Site) {
    let geometry = Geometry::fit(&site.spec, slice_bytes()).unwrap();
    let strips = metadata_of(&geometry).end..DISK_BYTES - (2 << 20);
    site.prepare = Box::new(move |number, drive| {
        if number == 0 {
            drive.plant_within(Op::Write, 0, Fault::Slow(Duration::from_secs(5)), strips.clone());
        }
    });
}

/// A member counts again while a stripe that missed it is still being written. Regression: then one loss too
/// many was allowed, and the flush said that the stripe is durable.
#[test]
fn a_member_counts_once_no_stripe_in_flight_has_missed_it() {
    for fails in [false, true] {
        let mut site = Site::new(spec(3, 1));
        slow_first_strip(&mut site);
        let new = SimDisk::new(DISK_BYTES);
        life(&site, 12, &[3], async |machine| {
            let write = write_fresh(machine, 0, 1);
            let replace = async {
                machine.env.sleep(Duration::from_millis(20)).await;
                machine.replace(&new, 3, 9).await
            };
            let (written, replaced) = futures_util::future::join(write, replace).await;
            replaced?;
            written?;
            assert_eq!(machine.array.report().members[3].state, "rebuilding");
            if fails {
                machine.drives[0].as_ref().unwrap().plant(Op::Flush, 0, Fault::Fail);
                assert!(machine.volume.flush().await.is_err(), "the stripe cannot be read without the drive");
                assert!(!machine.latched(0));
                return Ok(());
            }
            machine.volume.flush().await?;
            machine.env.sleep(Duration::from_secs(60)).await;
            assert_eq!(machine.array.report().members[3].state, "active");
            assert_eq!(tags(&machine.volume, 0, 24).await?, (1..=24).collect::<Vec<_>>());
            Ok(())
        })
        .unwrap();
    }
}

/// A strip is being brought back, and its record is on its way, when the member fails to which it goes.
/// Regression: the strip counted at its old place alone, and the loss was allowed.
#[test]
fn a_strip_that_is_brought_back_counts_at_both_places() {
    let spec = spread(4, 2, 10, 2);
    let own = |stripe: u64| -> Vec<usize> {
        let at = |at| spec.layout.own_place(Stripe(stripe), Position::new(at)).member.index();
        (0..6).map(at).collect()
    };
    let first = own(0);
    let (back, lost) = (first[0], [first[1], first[2]]);
    let other = (0..10).find(|at| !first.contains(at) && (0..4).any(|stripe| own(stripe).contains(at)));
    for wait_ms in [5, 10, 20, 40, 80, 160, 320] {
        let site = Site::new(spec.clone());
        let log = log_of(&Geometry::fit(&site.spec, slice_bytes()).unwrap());
        let new = SimDisk::new(DISK_BYTES);
        life(&site, 100 + wait_ms, &[], async |machine| {
            for stripe in 0..4 {
                write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
            }
            machine.volume.flush().await?;
            for lost in [back, other.expect("a member has no strip of the first stripe"), lost[0], lost[1]] {
                machine.array.fail_member(MemberNo::new(lost), "a test").await?;
                machine.array.wait_rebuilt().await;
            }
            machine.array.destage_and_checkpoint().await?;
            machine.replace(&new, back, 9).await?;
            for drive in machine.drives.iter().flatten() {
                let slow = Fault::Slow(Duration::from_millis(400));
                for nth in 0..4 {
                    drive.plant_within(Op::Write, nth, slow, log.clone());
                    drive.plant_within(Op::DurableWrite, nth, slow, log.clone());
                }
            }
            machine.env.sleep(Duration::from_millis(wait_ms)).await;
            // It may be refused.
            drop(machine.array.fail_member(MemberNo::new(back), "fails again").await);
            machine.env.sleep(Duration::from_secs(5)).await;
            for stripe in 0..4 {
                let found = tags(&machine.volume, 32 * stripe, 32).await;
                assert!(found.is_ok(), "after {wait_ms} ms, stripe {stripe}: {found:?}");
            }
            Ok(())
        })
        .unwrap();
    }
}

/// A new drive takes strips before it has its label, and a power cut leaves nothing that says what it is.
/// Until it has its label nothing else is given up that is needed without it.
#[test]
fn a_drive_without_a_label_holds_nothing_that_counts() {
    let site = Site::new(spread(3, 1, 8, 2));
    let new = SimDisk::new(DISK_BYTES);
    life(&site, 13, &[4], async |machine| {
        let drive =
            Rc::new(FaultyDrive::new(machine.env.clone(), SimDrive::new(&machine.world, new.clone())));
        (1..3)
            .for_each(|nth| drive.plant_within(Op::Write, nth, Fault::Slow(Duration::from_secs(25)), LABEL));
        let id = DriveId(Id128::from_words(9, 104));
        let superblock = Superblock { drive: id, size_bytes: DISK_BYTES, ..Default::default() };
        let handle = DriveHandle::online(machine.env.clone(), "new".into(), drive, superblock);
        handle.put_slices(&[row(machine.array.id(), 4)]).await.unwrap();
        let replace = machine.array.replace_member(MemberNo::new(4), slice_of(&handle));
        let work = async {
            machine.env.sleep(Duration::from_secs(2)).await;
            for stripe in 0..60 {
                write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
            }
            machine.volume.flush().await?;
            assert!(machine.array.fail_member(MemberNo::new(0), "a test").await.is_err(), "it is needed");
            Ok::<_, ArrayError>(())
        };
        let (replaced, worked) = futures_util::future::join(replace, work).await;
        replaced?;
        worked?;
        machine.array.wait_rebuilt().await;
        machine.array.fail_member(MemberNo::new(0), "a test").await
    })
    .unwrap();
}

/// A stripe is being written past a lost member, and another member takes no strips any more: it may be given
/// up once the lost one is replaced and rebuilt. Regression: the stripe, the two members and the judgement of
/// the second waited for each other.
#[test]
fn a_stripe_that_waits_keeps_no_member_from_counting() {
    let site = Site::new(spec(3, 1));
    let strips = metadata_of(&Geometry::fit(&site.spec, slice_bytes()).unwrap()).end..DISK_BYTES - (2 << 20);
    let new = SimDisk::new(DISK_BYTES);
    life(&site, 14, &[3], async |machine| {
        write_fresh(machine, 1, 500).await?;
        machine.volume.flush().await?;
        let drive = machine.drives[2].as_ref().unwrap();
        (0..2000).for_each(|nth| drive.plant_within(Op::Write, nth, Fault::Fail, strips.clone()));
        let replace = async {
            machine.env.sleep(Duration::from_secs(20)).await;
            machine.replace(&new, 3, 9).await
        };
        let write = timeout(&machine.env, Duration::from_secs(1800), write_fresh(machine, 0, 1));
        let (written, replaced) = futures_util::future::join(write, replace).await;
        replaced?;
        written.expect("it does not wait for ever")?;
        machine.volume.flush().await?;
        assert!(machine.latched(2), "it takes no strips");
        assert_eq!(tags(&machine.volume, 0, 48).await?, (1..=24).chain(500..524).collect::<Vec<_>>());
        Ok(())
    })
    .unwrap();
}

/// A stripe is written past a lost member, which is replaced and rebuilt before the stripe's record is
/// durable. Regression: the strip stayed in its spare place until something else was lost, and a wait for the
/// rebuild did not end.
#[test]
fn a_strip_that_was_written_past_a_member_comes_back_to_it() {
    let mut site = Site::new(spread(4, 2, 10, 2));
    let on = |stripe| -> Vec<usize> {
        let places = site.spec.layout.places(Stripe(stripe), Default::default());
        places.map(|place| place.member.index()).collect()
    };
    let stripe = (0..).find(|stripe| on(*stripe).contains(&3) && on(*stripe).contains(&0)).unwrap();
    slow_first_strip(&mut site);
    let new = SimDisk::new(DISK_BYTES);
    life(&site, 15, &[3], async |machine| {
        let write = write_fresh(machine, stripe, 1);
        let replace = async {
            machine.env.sleep(Duration::from_millis(20)).await;
            machine.replace(&new, 3, 9).await?;
            machine.array.wait_rebuilt().await;
            Ok::<_, ArrayError>(())
        };
        let (written, replaced) = futures_util::future::join(write, replace).await;
        written.and(replaced)?;
        machine.volume.flush().await?;
        machine.array.wait_rebuilt().await;
        let moved: u64 = machine.array.report().members.iter().map(|member| member.moved_strips).sum();
        assert_eq!(moved, 0);
        assert_eq!(tags(&machine.volume, stripe * machine.volume.stripe_blocks(), 1).await?, [1]);
        Ok(())
    })
    .unwrap();
}
