//! Pages of the stripe table that are not in memory when something happens to their stripes.

use crate::bench::{Machine, Site, spec, spread, tags, write_fresh};
use penstock_array::{ArrayError, CreateSpec, MemberNo, Roster};
use penstock_base::Stripe;
use penstock_sim::World;

pub const STRIPES: u64 = 600;

/// Runs a test in a world in which no page stays in memory that can be read again.
pub fn run<R>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    test: impl AsyncFnOnce(&Machine) -> Result<R, ArrayError>,
) -> (World, R) {
    let (world, done) = attempt(site, seed, lost, test);
    (world, done.unwrap())
}

/// The same; an error if the array does not open, or from the test.
pub fn attempt<R>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    test: impl AsyncFnOnce(&Machine) -> Result<R, ArrayError>,
) -> (World, Result<R, ArrayError>) {
    let world = World::new(seed);
    let done = world.run(async {
        let roster = Roster::with_table_memory(&world.env(), Some(1));
        let machine = site.open_with(&world, lost, &roster).await?;
        test(&machine).await
    });
    (world, done.unwrap())
}

/// One such life, up to a power cut.
fn life(site: &Site, seed: u64, lost: &[usize], test: impl AsyncFnOnce(&Machine) -> Result<(), ArrayError>) {
    let (world, ()) = run(site, seed, lost, test);
    site.cut(&world);
}

/// Writes all stripes, in many pages of the table.
pub async fn write_all(machine: &Machine) -> Result<(), ArrayError> {
    assert!(STRIPES > 4 * machine.array.geometry().stripes_per_page());
    for stripe in 0..STRIPES {
        write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
    }
    machine.volume.flush().await
}

/// A site with written stripes in many pages of its table.
fn written(spec: CreateSpec) -> Site {
    let site = Site::new(spec);
    life(&site, 9700, &[], async |machine| write_all(machine).await);
    site
}

async fn check(machine: &Machine) -> Result<(), ArrayError> {
    let blocks = machine.volume.stripe_blocks();
    for stripe in 0..STRIPES {
        let tag = 1000 * (stripe + 1);
        let expected: Vec<u64> = (tag..tag + blocks).collect();
        assert_eq!(tags(&machine.volume, stripe * blocks, blocks).await?, expected, "stripe {stripe}");
    }
    Ok(())
}

/// Stripes with a strip on a member.
async fn stripes_on(machine: &Machine, member: usize) -> Result<u64, ArrayError> {
    let mut stripes = 0;
    for stripe in (0..STRIPES).map(Stripe) {
        let places = machine.array.places(stripe).await?;
        stripes += u64::from(places.iter().any(|place| place.member == MemberNo::new(member)));
    }
    Ok(stripes)
}

#[test]
fn a_reset_reaches_pages_that_are_not_in_memory() {
    for spec in [spec(3, 1), spread(3, 1, 9, 2)] {
        let mut site = written(spec);
        site.replace(3);
        // Once with the reset in the log, once with a checkpoint that has it.
        for (seed, checkpoint) in [(9702, false), (9703, true)] {
            life(&site, seed, &[3], async |machine| {
                machine.replace(&site.disks[3], 3, seed).await?;
                let debt = machine.array.redundancy_debt_stripes();
                assert!(site.spec.layout.spares() > 0 || debt > STRIPES / 2, "{debt} stripes");
                match checkpoint {
                    true => machine.array.destage_and_checkpoint().await,
                    false => Ok(()),
                }
            });
        }
        life(&site, 9704, &[], async |machine| {
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            let report = machine.array.scrub().await?;
            assert!(report.is_clean(), "no strip of the old drive counts: {report:?}");
            assert!(stripes_on(machine, 3).await? > 0, "they are back");
            check(machine).await
        });
    }
}

#[test]
fn changed_pages_do_not_fill_the_memory() {
    let site = Site::new(spec(3, 1));
    life(&site, 9710, &[], async |machine| {
        let per_page = machine.array.geometry().stripes_per_page();
        let pages = machine.array.geometry().stripes / per_page;
        for round in 0..20 {
            for page in 0..pages {
                write_fresh(machine, page * per_page + round, 7).await?;
                machine.volume.flush().await?;
                let resident = machine.array.report().table_pages.0;
                assert!(resident < 6, "{resident} of {pages} pages");
            }
        }
        assert!(machine.array.report().counts.checkpoints >= 20 * pages / 2);
        Ok(())
    });
    // Replay needs no more of them.
    life(&site, 9711, &[], async |machine| {
        let report = machine.array.report();
        assert!(report.table_pages.0 < 6 && report.counts.table_reads < 6, "{report:?}");
        let per_page = machine.array.geometry().stripes_per_page();
        for page in 0..machine.array.geometry().stripes / per_page {
            for round in 0..20 {
                let block = (page * per_page + round) * machine.volume.stripe_blocks();
                assert_eq!(tags(&machine.volume, block, 1).await?, [7]);
            }
        }
        Ok(())
    });
}

/// Two drives are away whose strips have no other place. A third one may not go, whether or not the pages
/// that tell so are in memory; once all stripes have m strips more than they need it may.
#[test]
fn a_drive_is_kept_if_pages_that_are_not_in_memory_need_it() {
    let site = written(spread(3, 2, 9, 0));
    life(&site, 9720, &[1, 2], async |machine| {
        // Only some stripes lie on all three.
        let third = machine.array.fail_member(MemberNo::new(3), "a test").await;
        assert!(matches!(third, Err(ArrayError::Suspended(_))), "{third:?}");
        assert!(!machine.latched(3));
        check(machine).await
    });
    life(&site, 9721, &[1], async |machine| {
        machine.array.wait_rebuilt().await;
        machine.array.fail_member(MemberNo::new(3), "a test").await?;
        check(machine).await
    });
}
