//! Tests of power cuts at every named write site, alone and with a lost drive.

use crate::machine::{Machine, Planned, Site, path};
use crate::model::Model;
use futures_util::future::join_all;
use penstock_array::{FoundLabel, read_label};
use penstock_base::env::timeout;
use penstock_drive::superblock::{self, SliceEntry};
use penstock_drive::{DriveHandle, Fault, Op, Slice};
use penstock_node::StartError;
use penstock_sim::{CutMode, CutPlan, SimDrive, World};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

async fn work(site: &Site, world: &World, model: &Model, steps: u64) -> Result<Machine, String> {
    let machine = site.start(world, &[]).await.map_err(|error: StartError| error.to_string())?;
    let tasks = (0..3).map(|task| {
        let machine = &machine;
        async move {
            for _ in 0..steps {
                model.step(machine, task).await.map_err(|failure| failure.to_string())?;
                if machine.world.below(10) == 0 {
                    let pause = std::time::Duration::from_millis(machine.world.below(3000));
                    machine.env.sleep(pause).await;
                }
            }
            Ok::<_, String>(())
        }
    });
    futures_util::future::try_join_all(tasks).await?;
    machine.client.close().await.map_err(|failure| failure.to_string())?;
    machine.node.close().await.map_err(|error| error.to_string())?;
    Ok(machine)
}

fn survey(seed: u64, steps: u64) -> BTreeMap<&'static str, u64> {
    let site = Site::new();
    let world = World::new(seed);
    let model = Model::default();
    world.run(work(&site, &world, &model, steps)).unwrap().unwrap();
    let hits = world.hits();
    world.destroy();
    let after = World::new(seed + 1);
    let checked = after.run(async {
        let machine = site.start(&after, &[]).await.unwrap();
        model.check_stopped(&machine).await;
        machine.audit().await;
        machine.stop().await;
    });
    checked.unwrap();
    after.destroy();
    hits
}

fn cut_once(seed: u64, steps: u64, site_name: &str, nth: u64, lost: &[usize]) {
    let site = Site::new();
    let world = World::new(seed);
    world.plan_cut(CutPlan { site: site_name.to_owned(), nth });
    let model = Model::default();
    assert!(world.run(work(&site, &world, &model, steps)).is_err(), "the cut at {site_name} {nth} came");
    site.cut(&world);
    let after = World::new(seed ^ nth ^ 0x5555);
    let checked = after.run(async {
        let machine = match site.start(&after, lost).await {
            Ok(machine) => machine,
            Err(error) => panic!("seed {seed}, {site_name} {nth}, lost {lost:?}: {error}"),
        };
        model.check_crashed(&machine).await;
        machine.rebuild().await;
        machine.audit().await;
        model.check_crashed(&machine).await;
        machine.stop().await;
    });
    assert!(checked.is_ok(), "no second cut");
    after.destroy();
}

/// Cuts the power at evenly spread passes of each site. Returns the number of passes of each site.
pub fn campaign(seed: u64, steps: u64, per_site: u64, lose: usize) -> BTreeMap<&'static str, u64> {
    let hits = survey(seed, steps);
    eprintln!("write sites passed: {hits:?}");
    for expected in ["log.append", "fresh.strip", "destage.strip", "checkpoint.root"] {
        assert!(hits.contains_key(expected), "the load passes {expected}");
    }
    let mut cuts = BTreeMap::new();
    for (name, count) in hits {
        for cut in 0..per_site.min(count) {
            let nth = cut * count / per_site.min(count);
            let lost: Vec<usize> = (0..lose).map(|drive| (nth as usize + drive * 2) % 6).collect();
            eprintln!("cut at {name} {nth}, lost {lost:?}");
            cut_once(seed, steps, name, nth, &lost);
            *cuts.entry(name).or_default() += 1;
        }
    }
    cuts
}

#[test]
fn one_seed_reproduces_one_run() {
    let run = |seed| {
        let site = Site::new();
        let world = World::new(seed);
        world.run(work(&site, &world, &Model::default(), 12)).unwrap().unwrap();
        let trace = (world.steps(), world.hits());
        world.destroy();
        trace
    };
    assert_eq!(run(4), run(4));
}

#[test]
fn cuts_lose_nothing_that_was_synced() {
    campaign(21, 25, 3, 0);
}

#[test]
fn cuts_with_a_lost_drive_lose_nothing_that_was_synced() {
    campaign(22, 25, 2, 1);
}

#[test]
#[ignore = "full form: cargo xtask show 01.3"]
fn show_power_cuts() {
    for (seed, lose) in [(31, 0), (32, 1), (33, 2), (34, 0), (35, 1)] {
        let cuts = campaign(seed, 40, 10, lose);
        println!("client library to drives, seed {seed}, {lose} drives lost with the power:");
        cuts.iter().for_each(|(site, count)| println!("{site:20} {count:4} cuts"));
    }
}

/// Starts and closes a store, with the power cut where planned. Returns the result of the start, or none if
/// the power was cut.
fn start_once(site: &Site, seed: u64, cut: Option<CutPlan>) -> Option<Result<(), String>> {
    let world = World::new(seed);
    let has_cut = cut.is_some();
    cut.into_iter().for_each(|cut| world.plan_cut(cut));
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.map_err(|error| error.to_string())?;
        if has_cut {
            machine.node.abandon();
            return Ok(());
        }
        machine.node.close().await.map_err(|error| error.to_string())
    });
    world.destroy();
    site.disks.borrow().values().for_each(|disk| disk.cut(&world, CutMode::Sectors));
    run.ok()
}

/// Regression: the power was cut while second copies of labels were written, and at the next start while
/// first copies were written. That overwrote the only valid copy.
#[test]
fn two_cuts_in_starts_leave_a_whole_label_everywhere() {
    let mut cut_twice = 0;
    for (k, m) in [(4, 2), (3, 0)] {
        let (all, of_meta) = ((k + m) as u64, (1 + m) as u64);
        for (first, second) in
            (0..2 * (all + of_meta)).flat_map(|first| (0..all + of_meta).map(move |second| (first, second)))
        {
            let site = Site::of(k, m);
            assert_eq!(start_once(&site, 1, None), Some(Ok(())));
            let cuts = [("label.copy1", first), ("label.copy0", second)];
            let plans = cuts.map(|(place, nth)| CutPlan { site: place.to_owned(), nth });
            if plans.into_iter().any(|plan| start_once(&site, first * 100 + second, Some(plan)).is_some()) {
                continue;
            }
            cut_twice += 1;
            let world = World::new(1);
            for (path, disk) in &*site.disks.borrow() {
                let drive = SimDrive::new(&world, disk.clone());
                let labels = world.run(async {
                    let found = superblock::read(&*drive).await.unwrap();
                    let (env, rows) = (world.env(), found.slices.clone());
                    let handle = DriveHandle::online(env, path.clone(), drive, found);
                    let read = async |row: SliceEntry| {
                        let slice = Slice::new(handle.clone(), row.offset, row.len);
                        read_label(&slice, row.array).await.unwrap()
                    };
                    join_all(rows.into_iter().map(read)).await
                });
                let labels = labels.unwrap();
                let are_whole = labels.iter().all(|label| matches!(label, FoundLabel::Label(_)));
                assert!(are_whole, "{path} of {k}+{m}, cuts at {first} and {second}: {labels:?}");
            }
            world.destroy();
            assert_eq!(start_once(&site, 7, None), Some(Ok(())), "{k}+{m}, cuts at {first} and {second}");
        }
    }
    assert!(cut_twice > 100, "{cut_twice}");
}

/// The first start of a store and its end. Returns how often it passed each site.
fn first_start(site: &Site, world: &World) -> BTreeMap<&'static str, u64> {
    let run = world.run(async {
        let machine = site.start(world, &[]).await.map_err(|error| error.to_string())?;
        machine.node.close().await.map_err(|error| error.to_string())
    });
    run.into_iter().for_each(|started| started.unwrap());
    world.hits()
}

/// Regression: a store whose first start was cut while redb made its file was refused for ever.
#[test]
fn a_first_start_that_was_cut_anywhere_is_made_up_for_by_the_next() {
    let survey = World::new(1);
    let hits = first_start(&Site::new(), &survey);
    survey.destroy();
    for (name, count) in hits {
        for (nth, seed) in (0..count.min(12)).zip(0..) {
            let (site, world) = (Site::new(), World::new(seed));
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
            first_start(&site, &world);
            site.cut(&world);
            let again = World::new(seed + 1000);
            let run = again.run(async {
                let started = site.start(&again, &[]).await;
                let machine = started.unwrap_or_else(|error| panic!("{name} {nth}, seed {seed}: {error}"));
                machine.client.get_attr(machine.client.root()).await.unwrap();
                machine.audit().await;
                machine.stop().await;
            });
            run.unwrap();
            again.destroy();
        }
    }
}

/// Regression: a drive failed at the first start of a store, between taking over its two arrays. The array
/// that had only been read recorded the failure before it was claimed, and its own claim was then refused for
/// ever.
#[test]
fn a_drive_that_fails_at_the_first_start_does_not_hold_it_up() {
    for (op, nth) in [Op::Write, Op::Flush].into_iter().flat_map(|op| (0..16).map(move |nth| (op, nth))) {
        let (site, world) = (Site::of(2, 2), World::new(5));
        let plan = Planned { op, nth, fault: Fault::Fail, within: 0..u64::MAX };
        site.plans.borrow_mut().insert(path(2), vec![plan]);
        let run = world.run(async {
            let start = timeout(&world.env(), Duration::from_secs(600), site.start(&world, &[])).await;
            let machine = start.unwrap_or_else(|| panic!("{op:?} {nth}: the start does not end")).unwrap();
            let recorded = timeout(&world.env(), Duration::from_secs(600), machine.client.sync_all()).await;
            recorded.expect("it goes on").unwrap();
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
        // Nothing was recorded that a later start would refuse.
        assert_eq!(start_once(&site, 6, None), Some(Ok(())), "{op:?} {nth}");
    }
}

/// Regression: a power cut between the superblocks of a new store left a folder that could neither be started
/// nor made again.
#[test]
fn a_store_whose_making_was_cut_can_be_made() {
    let make = |seed: u64, cut: Option<CutPlan>| {
        let site = Site::without_store(2, 1, 24 << 20);
        let world = World::new(seed);
        cut.into_iter().for_each(|cut| world.plan_cut(cut));
        let made = world.run(site.make_store(&world));
        let hits = world.hits();
        site.cut(&world);
        (site, made.is_ok(), hits)
    };
    let mut found = BTreeSet::new();
    for (name, hits) in make(1, None).2 {
        for (nth, seed) in (0..hits).flat_map(|nth| (10..13).map(move |seed| (nth, seed))) {
            let (site, is_made, _) = make(seed, Some(CutPlan { site: name.to_owned(), nth }));
            assert!(!is_made, "the cut at {name} {nth} came");
            let world = World::new(seed + 100);
            let started = world.run(async {
                found.insert(format!("{:?}", site.make_store(&world).await?));
                let machine = site.start(&world, &[]).await?;
                assert!(machine.node.drives().iter().all(|drive| drive.is_online()), "{name} {nth}");
                machine.stop().await;
                Ok::<_, StartError>(())
            });
            started.unwrap().unwrap_or_else(|error| panic!("cut at {name} {nth}, seed {seed}: {error}"));
            world.destroy();
        }
    }
    assert_eq!(found.into_iter().collect::<Vec<_>>(), ["Nothing", "Store", "Unfinished"]);
}
