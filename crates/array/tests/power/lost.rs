//! Losses that come close together, beside stripes that are being written, rebuilt or brought back. Each test
//! is the regression of a loss of data, or of a rebuild that did not end.

use crate::bench::{DISK_BYTES, Site, buf_of, metadata_of, slice_bytes, spec, tags, write_fresh};
use crate::outdated::life;
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, CreateSpec, Discard, Geometry, Layout};
use penstock_drive::{Fault, Op};
use penstock_layout::{Shape, search};
use penstock_sim::SimDisk;
use std::time::Duration;

/// So many members with so many spare places in a row, for stripes of k+m strips.
fn spread(k: usize, m: usize, members: usize, spares: usize) -> CreateSpec {
    let shape = Shape { members, strips: k + m, redundancy: m, spares, domains: members };
    let bases = search(shape, 1).unwrap();
    CreateSpec { layout: Layout::declustered(shape, &bases).unwrap(), ..spec(k, m) }
}

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
