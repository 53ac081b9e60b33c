//! Stripes that are spread over more members than they have strips, with spare places.

use crate::bench::{self, Machine, Site, buf_of, plan, spec, tags, write_fresh};
use crate::outdated::life;
use penstock_array::place::{MemberNo, Position};
use penstock_array::{ArrayError, ArrayState, CreateSpec, Discard, Lacking, Layout, Site as WriteSite};
use penstock_base::Stripe;
use penstock_drive::{Fault, Op};
use penstock_layout::Shape;
use penstock_sim::World;
use std::collections::BTreeSet;
use std::time::Duration;

const STRIPES: u64 = 40;

/// 4+2 on so many members, with so many spare places in a row.
fn spread(members: usize, spares: usize) -> CreateSpec {
    bench::spread(4, 2, members, spares)
}

/// Writes every second stripe in full, and some blocks of the others through the log.
async fn fill(machine: &Machine) -> Result<(), ArrayError> {
    let blocks = machine.volume.stripe_blocks();
    for stripe in 0..STRIPES {
        if stripe % 2 == 0 {
            write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
        } else {
            let (data, crcs) = buf_of(&[1000 * (stripe + 1)]);
            machine.volume.write(stripe * blocks + stripe % blocks, &data, &crcs).await?;
        }
    }
    machine.volume.flush().await?;
    machine.array.destage_and_checkpoint().await
}

/// Asserts that everything that [`fill`] wrote is there.
async fn check(machine: &Machine) -> Result<(), ArrayError> {
    let blocks = machine.volume.stripe_blocks();
    for stripe in 0..STRIPES {
        let found = tags(&machine.volume, stripe * blocks, blocks).await?;
        let first = 1000 * (stripe + 1);
        let wanted = |block: u64| match stripe % 2 {
            0 => first + block,
            _ if block == stripe % blocks => first,
            _ => 0,
        };
        assert_eq!(found, (0..blocks).map(wanted).collect::<Vec<_>>(), "stripe {stripe}");
    }
    Ok(())
}

/// Asserts that no two strips are at one place, and no two of a stripe on one member. Returns the members of
/// all strips.
async fn places(machine: &Machine) -> BTreeSet<usize> {
    let mut all = BTreeSet::new();
    for stripe in (0..STRIPES).map(Stripe) {
        let places = machine.array.places(stripe).await.unwrap();
        assert_eq!(places.iter().map(|place| place.member).collect::<BTreeSet<_>>().len(), 6, "{stripe}");
        places.iter().for_each(|place| assert!(all.insert(*place), "{stripe} at {place:?}"));
    }
    all.into_iter().map(|place| place.member.index()).collect()
}

fn moved(machine: &Machine) -> Vec<u64> {
    machine.array.report().members.iter().map(|member| member.moved_strips).collect()
}

#[test]
fn lost_strips_move_to_spare_places_and_come_back() {
    let mut site = Site::new(spread(10, 2));
    life(&site, 1, &[], async |machine| {
        fill(machine).await?;
        assert_eq!(machine.array.report().state, ArrayState::Ok);
        machine.array.fail_member(MemberNo::new(3), "a test").await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        let report = machine.array.report();
        assert_eq!(report.state, ArrayState::Spared, "{report:?}");
        assert!(moved(machine)[3] > 0 && moved(machine).iter().sum::<u64>() == moved(machine)[3]);
        assert!(!places(machine).await.contains(&3));
        check(machine).await?;
        assert!(machine.array.scrub().await?.is_clean());
        machine.array.close().await
    })
    .unwrap();
    // All redundancy is there again: two more may be away.
    life(&site, 2, &[3, 0, 7], async |machine| {
        check(machine).await?;
        machine.array.stop();
        Ok(())
    })
    .unwrap();
    site.replace(3);
    let new = site.disks[3].clone();
    life(&site, 3, &[3], async |machine| {
        check(machine).await?;
        machine.replace(&new, 3, 9).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert_eq!(moved(machine).iter().sum::<u64>(), 0, "all strips are back");
        assert_eq!(machine.array.report().state, ArrayState::Ok);
        assert!(places(machine).await.contains(&3));
        check(machine).await?;
        assert!(machine.array.scrub().await?.is_clean());
        machine.array.close().await
    })
    .unwrap();
    life(&site, 4, &[1, 2], async |machine| check(machine).await).unwrap();
}

/// More members than the code survives are lost, but one after the other.
#[test]
fn as_many_members_as_there_are_spare_places_may_be_lost_in_turn_and_m_more() {
    let site = Site::new(spread(10, 2));
    life(&site, 11, &[], async |machine| {
        fill(machine).await?;
        for lost in [9, 4] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0, "without {lost}");
            places(machine).await;
            check(machine).await?;
        }
        machine.array.fail_member(MemberNo::new(0), "a test").await?;
        machine.array.wait_rebuilt().await;
        machine.array.fail_member(MemberNo::new(1), "a test").await?;
        machine.array.wait_rebuilt().await;
        check(machine).await?;
        let refused = machine.array.fail_member(MemberNo::new(2), "a test").await;
        assert!(matches!(refused, Err(ArrayError::Suspended(_))), "{refused:?}");
        machine.array.close().await
    })
    .unwrap();
    life(&site, 12, &[9, 4, 0, 1], async |machine| check(machine).await).unwrap();
    let refused = life(&site, 13, &[9, 4, 0, 1, 2], async |_| Ok(()));
    assert!(matches!(refused, Err(ArrayError::WouldLose { .. })), "{:?}", refused.err());
}

#[test]
fn new_stripes_are_written_to_spare_places_at_once() {
    let site = Site::new(spread(9, 1));
    life(&site, 21, &[4], async |machine| {
        fill(machine).await?;
        machine.volume.flush().await?;
        assert_eq!(machine.array.redundancy_debt_stripes(), 0);
        assert!(!places(machine).await.contains(&4) && moved(machine)[4] > 0);
        machine.array.close().await
    })
    .unwrap();
    life(&site, 22, &[4, 0, 1], async |machine| check(machine).await).unwrap();
    life(&site, 23, &[], async |machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert_eq!(moved(machine).iter().sum::<u64>(), 0);
        check(machine).await
    })
    .unwrap();
}

/// A stripe that is discarded gives its spare places back.
#[test]
fn spare_places_are_used_again() {
    let site = Site::new(spread(8, 1));
    life(&site, 31, &[2], async |machine| {
        for round in 0..20 {
            fill(machine).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0, "round {round}");
            places(machine).await;
            check(machine).await?;
            machine.volume.discard(0, STRIPES, Discard::OnDrives).await?;
            assert_eq!(moved(machine)[2], 0);
        }
        Ok(())
    })
    .unwrap();
}

/// Groups lose m members each.
#[test]
fn groups_survive_the_loss_of_m_members_each() {
    let site = Site::new(CreateSpec { layout: Layout::groups(2, 6).unwrap(), ..spec(4, 2) });
    life(&site, 41, &[], async |machine| {
        fill(machine).await?;
        for lost in [0, 5, 6, 11] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
        }
        let refused = machine.array.fail_member(MemberNo::new(1), "a test").await;
        assert!(matches!(refused, Err(ArrayError::Suspended(_))), "{refused:?}");
        assert_eq!(machine.array.report().state, ArrayState::Critical);
        check(machine).await
    })
    .unwrap();
    life(&site, 42, &[0, 5, 6, 11], async |machine| check(machine).await).unwrap();
    let refused = life(&site, 43, &[0, 5, 1], async |_| Ok(()));
    assert!(matches!(refused, Err(ArrayError::TooManyMissing { .. })), "{:?}", refused.err());
}

/// Power cuts while strips move to spare places, and while they are brought back.
#[test]
fn a_power_cut_while_strips_move_loses_nothing() {
    for site_name in [WriteSite::RebuildStrip, WriteSite::LogAppend, WriteSite::CheckpointRoot] {
        for nth in (0..40).step_by(3) {
            let mut site = Site::new(spread(9, 2));
            life(&site, 51, &[], async |machine| {
                fill(machine).await?;
                machine.array.close().await
            })
            .unwrap();
            let mut replaced = false;
            for (seed, lost) in [(52, vec![5]), (53, vec![5]), (54, vec![]), (55, vec![])] {
                if lost.is_empty() && !replaced {
                    site.replace(5);
                    replaced = true;
                }
                let world = World::new(100 * seed + nth);
                world.plan_cut(plan(site_name.name(), nth));
                let new = site.disks[5].clone();
                let result = world.run(async {
                    let machine = site.open(&world, &lost).await?;
                    check(&machine).await?;
                    if replaced && machine.array.report().members[5].state == "missing" {
                        machine.replace(&new, 5, seed).await?;
                    }
                    assert_eq!(machine.array.wait_rebuilt().await, 0);
                    places(&machine).await;
                    check(&machine).await?;
                    machine.array.close().await
                });
                if let Ok(ended) = result {
                    ended.unwrap();
                }
                site.cut(&world);
            }
            life(&site, 56, &[], async |machine| {
                if machine.array.report().members[5].state == "missing" {
                    machine.replace(&site.disks[5], 5, 99).await?;
                }
                assert_eq!(machine.array.wait_rebuilt().await, 0, "{site_name:?} {nth}");
                assert_eq!(moved(machine).iter().sum::<u64>(), 0);
                check(machine).await?;
                assert!(machine.array.scrub().await?.is_clean());
                machine.array.close().await
            })
            .unwrap();
        }
    }
}

/// Two members are lost at the same time: the stripes that lack both are made again before any other.
#[test]
fn the_most_endangered_stripes_are_rebuilt_first() {
    for nth in [6, 20, 40, 60] {
        let site = Site::new(spread(12, 2));
        life(&site, 61, &[], async |machine| {
            fill(machine).await?;
            machine.array.close().await
        })
        .unwrap();
        let world = World::new(62);
        world.plan_cut(plan(WriteSite::RebuildStrip.name(), nth));
        let cut = world.run(async {
            let machine = site.open(&world, &[2, 8]).await?;
            machine.array.wait_rebuilt().await;
            Ok::<_, ArrayError>(())
        });
        assert!(cut.is_err(), "the power is cut during the rebuild");
        site.cut(&world);
        life(&site, 63, &[2, 8], async |machine| {
            let lost = [MemberNo::new(2), MemberNo::new(8)];
            let mut lacking = Vec::new();
            for stripe in (0..STRIPES).map(Stripe) {
                let places = machine.array.places(stripe).await?;
                lacking.push(places.iter().filter(|place| lost.contains(&place.member)).count());
            }
            let lacking = |stripe: u64| lacking[stripe as usize];
            let own = |stripe, at| machine.array.layout().own_place(Stripe(stripe), Position::new(at)).member;
            let lacked = |stripe| (0..6).filter(|at| lost.contains(&own(stripe, *at))).count();
            let begun = (0..STRIPES).filter(|stripe| lacked(*stripe) == 1 && lacking(*stripe) == 0).count();
            let endangered = (0..STRIPES).filter(|stripe| lacking(*stripe) == 2).count();
            assert!(begun == 0 || endangered == 0, "{begun} others before {endangered} endangered ones");
            check(machine).await
        })
        .unwrap();
    }
}

/// Members fail one after the other while the strips of those before are being rebuilt, as soon as the array
/// lets them.
#[test]
fn members_that_fail_during_a_rebuild_are_rebuilt_too() {
    for pause_ms in [0, 1, 3, 10, 40] {
        let site = Site::new(spread(14, 3));
        life(&site, 71 + pause_ms, &[], async |machine| {
            fill(machine).await?;
            for lost in [13, 2, 7] {
                loop {
                    match machine.array.fail_member(MemberNo::new(lost), "a test").await {
                        Ok(()) => break,
                        // It can lose no further one before some stripes are rebuilt.
                        Err(ArrayError::Suspended(_)) => {
                            machine.env.sleep(Duration::from_millis(5)).await;
                        }
                        Err(error) => return Err(error),
                    }
                }
                machine.env.sleep(Duration::from_millis(pause_ms)).await;
                check(machine).await?;
            }
            assert_eq!(machine.array.wait_rebuilt().await, 0, "{:?}", machine.array.report());
            let used = places(machine).await;
            assert!([13, 2, 7].iter().all(|lost| !used.contains(lost)), "{used:?}");
            check(machine).await?;
            assert!(machine.array.scrub().await?.is_clean());
            machine.array.close().await
        })
        .unwrap();
        life(&site, 81, &[13, 2, 7, 0, 1], async |machine| check(machine).await).unwrap();
    }
}

/// A drive comes back with its old contents when half of its strips have moved: those that have not count,
/// and the others are brought back.
#[test]
fn a_drive_that_comes_back_in_the_middle_keeps_what_did_not_move() {
    for nth in [8, 24, 40] {
        let site = Site::new(spread(9, 1));
        life(&site, 91, &[], async |machine| {
            fill(machine).await?;
            machine.array.close().await
        })
        .unwrap();
        let world = World::new(92);
        world.plan_cut(plan(WriteSite::RebuildStrip.name(), nth));
        let cut = world.run(async {
            let machine = site.open(&world, &[6]).await?;
            // The other half of a stripe that the drive has is written again without it.
            let (data, crcs) = buf_of(&[1000]);
            machine.volume.write(0, &data, &crcs).await?;
            machine.volume.flush().await?;
            machine.array.wait_rebuilt().await;
            Ok::<_, ArrayError>(())
        });
        assert!(cut.is_err(), "the power is cut during the rebuild");
        site.cut(&world);
        life(&site, 93, &[], async |machine| {
            check(machine).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            assert_eq!(moved(machine).iter().sum::<u64>(), 0);
            assert_eq!(machine.array.report().state, ArrayState::Ok);
            check(machine).await?;
            assert!(machine.array.scrub().await?.is_clean());
            machine.array.close().await
        })
        .unwrap();
    }
}

/// Without spare places a lost member leaves its stripes degraded, and new ones too.
#[test]
fn without_spare_places_stripes_wait_for_a_new_drive() {
    let mut site = Site::new(spread(9, 0));
    life(&site, 101, &[3], async |machine| {
        fill(machine).await?;
        let lacking = machine.array.wait_rebuilt().await;
        assert!(lacking > 0 && lacking < STRIPES, "{lacking} of {STRIPES} stripes have a strip on it");
        assert_eq!(machine.array.report().state, ArrayState::Degraded);
        check(machine).await?;
        machine.array.close().await
    })
    .unwrap();
    site.replace(3);
    life(&site, 102, &[3], async |machine| {
        machine.replace(&site.disks[3], 3, 7).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert_eq!(machine.array.report().state, ArrayState::Ok);
        check(machine).await?;
        assert!(machine.array.scrub().await?.is_clean());
        machine.array.close().await
    })
    .unwrap();
    life(&site, 103, &[0, 8], async |machine| check(machine).await).unwrap();
}

/// More spare places are wanted than there are: what has a place is rebuilt, the rest stays as it is and is
/// found again when a place is free.
#[test]
fn lost_strips_without_a_place_wait_until_one_is_free() {
    let site = Site::new(spread(8, 1));
    life(&site, 111, &[], async |machine| {
        fill(machine).await?;
        machine.array.fail_member(MemberNo::new(0), "a test").await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.fail_member(MemberNo::new(5), "a test").await?;
        let lacking = machine.array.wait_rebuilt().await;
        assert!(lacking > 0, "two members have no room in one spare place");
        check(machine).await?;
        // Half of the stripes go, and their places are free for others.
        machine.volume.discard(0, STRIPES / 2, Discard::InTable).await?;
        machine.env.sleep(Duration::from_secs(200)).await;
        let left = machine.array.wait_rebuilt().await;
        assert!(left < lacking, "{left} of {lacking}");
        places(machine).await;
        machine.array.close().await
    })
    .unwrap();
}

/// A member that was replaced fails again while its strips are brought back.
#[test]
fn strips_that_are_being_brought_back_count_where_they_are() {
    for nth in [2, 9, 20, 31] {
        let site = Site::new(spread(10, 2));
        life(&site, 121, &[4], async |machine| {
            fill(machine).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            machine.array.close().await
        })
        .unwrap();
        let is_lost = life(&site, 122, &[], async |machine| {
            machine.drives[4].as_ref().unwrap().plant(Op::Write, nth, Fault::Fail);
            // The array tells of the drive by itself when a write to it fails.
            for _ in 0..200 {
                machine.env.sleep(Duration::from_millis(100)).await;
                assert_eq!(machine.array.report().unreadable_stripes, 0);
            }
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            check(machine).await?;
            places(machine).await;
            assert!(machine.array.scrub().await?.is_clean());
            machine.array.close().await?;
            Ok(machine.latched(4))
        })
        .unwrap();
        // Once its strips are in spare places again two others may be away as well.
        let away: &[usize] = if is_lost { &[4, 0, 9] } else { &[4, 0] };
        life(&site, 123, away, async |machine| check(machine).await).unwrap();
    }
}

/// A stripe that would lack more strips than the code can make again is not written.
#[test]
fn no_stripe_is_written_that_could_not_be_read() {
    let site = Site::new(spread(8, 1));
    life(&site, 131, &[], async |machine| {
        fill(machine).await?;
        machine.array.close().await
    })
    .unwrap();
    life(&site, 132, &[1], async |machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        for lost in [6, 3] {
            machine.array.fail_member(MemberNo::new(lost), "a test").await?;
            machine.array.wait_rebuilt().await;
        }
        let (mut written, mut refused) = (0, 0);
        for stripe in STRIPES..2 * STRIPES {
            match write_fresh(machine, stripe, 7).await {
                Ok(()) => written += 1,
                Err(ArrayError::Suspended(why)) => {
                    assert!(why.contains("would lack 3 strips"), "{why}");
                    refused += 1;
                }
                Err(error) => return Err(error),
            }
        }
        assert!(written > 0, "{refused} refused");
        machine.volume.flush().await?;
        assert!(machine.array.report().state != ArrayState::Failed);
        check(machine).await
    })
    .unwrap();
}

/// Three of ten members are lost for good with 4+2, at once. When that is accepted, stripes that have four
/// strips left can be read and are made whole, the others are listed, and new ones are written.
#[test]
fn more_members_than_the_code_survives_take_their_stripes_alone() {
    let mut site = Site::new(spread(10, 2));
    life(&site, 61, &[], async |machine| {
        fill(machine).await?;
        machine.array.close().await
    })
    .unwrap();
    let gone = [0, 4, 9];
    let refused = life(&site, 62, &gone, async |_| Ok(())).unwrap_err();
    let ArrayError::WouldLose { stripes, .. } = refused else { panic!("{refused:?}") };
    assert!(stripes > 0 && stripes < STRIPES / 2, "{stripes}");
    site.lacking = Lacking::Accept;
    let lost = life(&site, 63, &gone, async |machine| {
        let blocks = machine.volume.stripe_blocks();
        let (mut lost, mut kept) = (Vec::new(), 0);
        for stripe in 0..STRIPES {
            let places = machine.array.places(Stripe(stripe)).await?;
            let left = places.iter().filter(|place| !gone.contains(&place.member.index())).count();
            let read = tags(&machine.volume, stripe * blocks, blocks).await;
            match left >= 4 {
                true => kept += u64::from(read?.contains(&(1000 * (stripe + 1)))),
                false => {
                    assert!(matches!(read, Err(ArrayError::Unreadable { .. })), "{stripe}: {read:?}");
                    lost.push(stripe);
                }
            }
        }
        assert_eq!((kept, lost.len() as u64), (STRIPES - stripes, stripes));
        assert_eq!(machine.array.unreadable_stripes(), lost, "they are listed");
        machine.volume.discard(lost[0], 1, Discard::OnDrives).await?;
        write_fresh(machine, lost[0], 77).await?;
        machine.volume.flush().await?;
        machine.array.wait_rebuilt().await;
        // There are not enough spare places for all of the others.
        let debt = machine.array.redundancy_debt_stripes();
        assert!((stripes - 1..STRIPES).contains(&debt), "{debt}");
        machine.array.close().await?;
        Ok(lost)
    })
    .unwrap();
    // Until the drives are replaced each start asks.
    let ids = gone.map(|at| {
        site.replace(at);
        (at, site.disks[at].clone())
    });
    life(&site, 64, &gone, async |machine| {
        for (at, disk) in &ids {
            machine.replace(disk, *at, 64).await?;
        }
        assert_eq!(machine.array.wait_rebuilt().await, stripes - 1, "all others are whole");
        let blocks = machine.volume.stripe_blocks();
        assert_eq!(tags(&machine.volume, lost[0] * blocks, 1).await?, [77]);
        for stripe in (0..STRIPES).filter(|stripe| !lost.contains(stripe)) {
            let found = tags(&machine.volume, stripe * blocks, blocks).await?;
            assert!(found.contains(&(1000 * (stripe + 1))));
        }
        let report = machine.array.scrub().await?;
        assert_eq!(report.unreadable, lost[1..], "{report:?}");
        machine.array.close().await
    })
    .unwrap();
}

/// One of two failure domains is away for a while, and all carriers are in the other one then. Regression:
/// they stayed there, and nothing had the log when that domain was lost.
#[test]
fn carriers_are_in_several_failure_domains_again() {
    let shape = Shape { members: 6, strips: 2, redundancy: 1, spares: 0, domains: 2 };
    let site = Site::new(CreateSpec { layout: Layout::spread(shape, 1).unwrap(), ..spec(1, 1) });
    let domains = |machine: &Machine| -> BTreeSet<usize> {
        let members = machine.array.report().members;
        members.iter().enumerate().filter(|(_, member)| member.carrier).map(|(at, _)| at % 2).collect()
    };
    life(&site, 901, &[], async |machine| {
        assert_eq!(domains(machine).len(), 2, "at first");
        write_fresh(machine, 0, 1000).await?;
        machine.array.close().await
    })
    .unwrap();
    life(&site, 902, &[1, 3, 5], async |machine| {
        machine.array.wait_rebuilt().await;
        assert_eq!(domains(machine).len(), 1);
        write_fresh(machine, 1, 2000).await?;
        machine.array.close().await
    })
    .unwrap();
    life(&site, 903, &[], async |machine| {
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert_eq!(domains(machine).len(), 2, "they are apart again");
        machine.array.close().await
    })
    .unwrap();
    life(&site, 904, &[0, 2, 4], async |machine| {
        let block = machine.volume.stripe_blocks();
        assert_eq!(tags(&machine.volume, 0, 1).await?, [1000]);
        assert_eq!(tags(&machine.volume, block, 1).await?, [2000]);
        machine.array.close().await
    })
    .unwrap();
}
