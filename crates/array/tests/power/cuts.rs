//! Power cuts at every named write site.

use crate::bench::{Load, Machine, Site, plan, spec};
use penstock_array::ArrayError;
use penstock_array::Site as WriteSite;
use penstock_sim::World;
use std::collections::BTreeMap;

async fn work(site: &Site, world: &World, load: &Load, lost: &[usize]) -> Result<Machine, ArrayError> {
    let machine = site.open(world, lost).await?;
    let (logged, fresh) =
        futures_util::future::join(load.run_logged(&machine), load.run_fresh(&machine)).await;
    logged?;
    fresh?;
    machine.array.close().await?;
    Ok(machine)
}

/// One run of the load; returns the number of writes at each site.
fn survey(seed: u64, k: usize, m: usize, rounds: u64) -> BTreeMap<&'static str, u64> {
    let site = Site::new(spec(k, m));
    let world = World::new(seed);
    let load = Load::new(rounds);
    world.run(work(&site, &world, &load, &[])).unwrap().unwrap();
    world.hits()
}

/// Cuts the power at one write, reopens without the disks in `lost`, and checks all contents.
fn cut_once(seed: u64, (k, m): (usize, usize), rounds: u64, at: (&str, u64), lost: &[usize]) {
    eprintln!("cut at {at:?}, lost {lost:?}");
    let mut site = Site::new(spec(k, m));
    let world = World::new(seed);
    world.plan_cut(plan(at.0, at.1));
    let load = Load::new(rounds);
    let result = world.run(work(&site, &world, &load, &[]));
    assert!(result.is_err(), "the planned cut at {at:?} came");
    site.cut(&world);
    for number in lost {
        site.replace(*number);
    }
    let after = World::new(seed ^ 0xabcdef);
    let checked = after.run(async {
        let machine = site.open(&after, lost).await?;
        load.check(&machine).await?;
        // The same contents must be found again after the rebuild and the destage.
        for (life, number) in lost.iter().enumerate() {
            machine.replace(&site.disks[*number], *number, life as u64 + 1).await?;
        }
        let debt = machine.array.wait_rebuilt().await;
        assert_eq!(debt, 0, "after the rebuild nothing is owed");
        machine.array.close().await?;
        let machine = site.open(&after, &[]).await?;
        load.check(&machine).await?;
        let report = machine.array.scrub().await?;
        assert!(report.is_clean(), "{report:?}");
        machine.array.close().await
    });
    checked
        .unwrap_or_else(|_| panic!("cut"))
        .unwrap_or_else(|error| panic!("seed {seed} {at:?} lost {lost:?}: {error}"));
    after.destroy();
}

/// Cuts the power at evenly spread writes of each site of one run. Returns the number of cuts at each site.
fn campaign(
    seed: u64,
    code: (usize, usize),
    rounds: u64,
    per_site: u64,
    lose: bool,
) -> BTreeMap<&'static str, u64> {
    let mut cuts = BTreeMap::new();
    let hits = survey(seed, code.0, code.1, rounds);
    eprintln!("write sites passed: {hits:?}");
    for expected in [
        WriteSite::LogAppend.name(),
        WriteSite::LogSegment.name(),
        WriteSite::FreshStrip.name(),
        WriteSite::FreshTrailer.name(),
        WriteSite::DestageStrip.name(),
        WriteSite::CheckpointPage.name(),
    ] {
        assert!(hits.contains_key(expected), "the load passes {expected}");
    }
    for (name, count) in hits {
        for cut in 0..per_site.min(count) {
            let nth = cut * count / per_site.min(count);
            let lost: Vec<usize> =
                if lose { vec![(nth as usize + cut as usize) % (code.0 + code.1)] } else { vec![] };
            cut_once(seed, code, rounds, (name, nth), &lost);
            *cuts.entry(name).or_default() += 1;
        }
    }
    cuts
}

#[test]
fn cuts_at_every_write_site_lose_nothing() {
    campaign(11, (4, 2), 150, 10, false);
}

#[test]
fn cuts_with_a_lost_drive_lose_nothing() {
    campaign(12, (4, 2), 150, 10, true);
}

#[test]
fn cuts_of_a_mirror_lose_nothing() {
    campaign(13, (1, 2), 150, 10, true);
}

#[test]
#[ignore = "full form: cargo xtask show 01.3"]
fn show_power_cuts() {
    for (code, lose) in [((4, 2), false), ((4, 2), true), ((1, 2), false), ((1, 2), true)] {
        let mut total: BTreeMap<&'static str, u64> = BTreeMap::new();
        let mut seed = 100;
        // A site with few writes in one run is cut in as many runs as are needed.
        while seed < 103 || total.values().any(|cuts| *cuts < 10) {
            for (site, cuts) in campaign(seed, code, 150, 10, lose) {
                *total.entry(site).or_default() += cuts;
            }
            seed += 1;
        }
        let sum: u64 = total.values().sum();
        println!(
            "volumes on {}+{}, a drive lost at the cut: {lose}: {sum} cuts, nothing lost: {total:?}",
            code.0, code.1
        );
    }
}

#[test]
fn one_seed_reproduces_one_run() {
    let run = |seed| {
        let site = Site::new(spec(4, 2));
        let world = World::new(seed);
        let load = Load::new(60);
        world.run(work(&site, &world, &load, &[])).unwrap().unwrap();
        (world.steps(), world.hits())
    };
    assert_eq!(run(5), run(5));
}
