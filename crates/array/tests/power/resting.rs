//! Rebuilds with nothing left that could be made: they rest, and who waits for them waits for all others.
//! Each test is a regression.

use crate::bench::{Machine, NOISE, SLICE_AT, Site, spec, spread, write_fresh};
use crate::outdated::life;
use penstock_array::{ArrayEvent, CreateSpec, Lacking};
use penstock_base::{BLOCK_BYTES, Stripe};
use std::time::Duration;

fn written(spec: CreateSpec, stripes: u64, rot: impl AsyncFn(&Machine)) -> Site {
    let site = Site::new(spec);
    life(&site, 1, &[], async |machine| {
        for stripe in 0..stripes {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        }
        machine.volume.flush().await?;
        rot(machine).await;
        machine.array.close().await
    })
    .unwrap();
    site
}

/// The rounds of rebuilds that begin within ten minutes.
async fn rounds(machine: &Machine) -> usize {
    machine.array.take_events();
    let mut begun = 0;
    for _ in 0..60 {
        machine.env.sleep(Duration::from_secs(10)).await;
        let events = machine.array.take_events();
        begun += events.iter().filter(|event| matches!(event, ArrayEvent::RebuildBegun { .. })).count();
    }
    begun
}

/// More stripes are known as damaged than lack a strip: that says nothing of those.
#[test]
fn a_wait_for_a_rebuild_does_not_end_for_stripes_that_are_damaged() {
    let mut site = written(spread(3, 1, 9, 0), 30, async |machine| {
        let geo = machine.array.geometry();
        for stripe in 0..20 {
            for place in &machine.array.places(Stripe(stripe)).await.unwrap()[..2] {
                let at = SLICE_AT + geo.block_at(place.row, 2);
                machine.disks[place.member.index()].corrupt(at / BLOCK_BYTES as u64, &NOISE);
            }
        }
    });
    site.replace(3);
    life(&site, 3, &[3], async |machine| {
        machine.array.scrub().await?;
        machine.replace(&site.disks[3], 3, 77).await?;
        let waited = machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(300)).await;
        assert_eq!(waited, machine.array.redundancy_debt_stripes());
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}

/// A strip is in a spare place on a lost drive, in a stripe that lacks too many: it cannot come back.
#[test]
fn a_rebuild_rests_though_a_strip_cannot_come_back() {
    let mut site = written(spread(3, 1, 9, 2), 40, async |_| ());
    let (x, y) = life(&site, 2, &[0], async |machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        let mut found = None;
        for stripe in (0..40).map(Stripe) {
            let now = machine.array.places(stripe).await?;
            let own: Vec<_> = site.spec.layout.places(stripe, Default::default()).collect();
            for at in (0..4).filter(|at| own[*at] != now[*at] && own[*at].member.index() == 0) {
                let x = now[at].member.index();
                let y = now.iter().map(|place| place.member.index()).find(|on| *on != x && *on > 3);
                found = y.filter(|_| x > 3).map(|y| (x, y)).or(found);
            }
        }
        machine.array.close().await?;
        Ok(found.unwrap())
    })
    .unwrap();
    site.lacking = Lacking::Accept;
    let new = penstock_sim::SimDisk::new(crate::bench::DISK_BYTES);
    life(&site, 3, &[0, x, y], async |machine| {
        machine.replace(&new, 0, 77).await?;
        machine.env.sleep(Duration::from_secs(300)).await;
        let rounds = rounds(machine).await;
        assert!(rounds < 60, "{rounds} in ten minutes");
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}

/// A stripe that lacks a strip has a bad block as well.
#[test]
fn a_rebuild_rests_though_a_block_is_damaged() {
    let mut site = written(spec(3, 1), 20, async |machine| {
        let at = SLICE_AT + machine.array.geometry().block_at(0, 3);
        machine.disks[2].corrupt(at / BLOCK_BYTES as u64, &NOISE);
    });
    site.replace(3);
    life(&site, 2, &[3], async |machine| {
        machine.replace(&site.disks[3], 3, 77).await?;
        machine.env.sleep(Duration::from_secs(120)).await;
        let rounds = rounds(machine).await;
        assert!(rounds < 60, "{rounds} in ten minutes");
        // The block is lost; the rest of its stripe is redundant.
        assert_eq!(machine.array.redundancy_debt_stripes(), 0);
        assert_eq!(machine.array.unreadable_stripes(), [0]);
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}
