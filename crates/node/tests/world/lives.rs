//! Random lives of a whole machine: seeds choose load, power cuts and lost drives; nothing that was synced may be lost.
//!
//! `PENSTOCK_SEEDS=A..B` runs other seeds than the default few. In one seed drives are missing only of a set of at
//! most m that is chosen first, or of those that took their place, so every failure is a defect.

use crate::load::{Load, TASKS};
use crate::machine::{Machine, Site, path};
use penstock_base::env::{Runtime, timeout};
use penstock_sim::{CutPlan, World};
use std::collections::BTreeMap;
use std::time::Duration;

/// Sites where the power is cut, besides at any time.
const SITES: [&str; 16] = [
    "log.append",
    "log.append",
    "log.append",
    "log.segment",
    "fresh.strip",
    "fresh.trailer",
    "destage.strip",
    "destage.trailer",
    "checkpoint.page",
    "checkpoint.root",
    "discard.punch",
    "replay.redo",
    "replay.mend",
    "rebuild.strip",
    "superblock.copy0",
    "superblock.copy1",
];
/// No life takes that long: one that does waits for nothing.
const LONG: Duration = Duration::from_secs(3600);

/// What a seed decides, and what its lives remember.
struct Fate {
    dice: World,
    seed: u64,
    unlucky: Vec<String>,
    steps: u64,
    lives: u64,
    prepared: bool,
    cuts: BTreeMap<&'static str, u64>,
}

impl Fate {
    fn chance(&self, one_in: u64) -> bool {
        self.dice.below(one_in) == 0
    }

    async fn live(&mut self, site: &Site, world: &World, load: &Load, lost: &[String]) -> Machine {
        let seed = self.seed;
        let machine = site.start_without(world, lost).await;
        let machine = machine.unwrap_or_else(|error| panic!("seed {seed}, without {lost:?}: {error}"));
        if self.prepared {
            load.settle(&machine).await;
        } else {
            load.prepare(&machine).await.unwrap();
            self.prepared = true;
        }
        if self.chance(3) {
            let replaced = machine.replace_missing().await;
            // The drives that they replace may come back, and are nothing to the store any more.
            self.unlucky.extend(replaced);
        }
        let tasks = (0..TASKS).map(|task| {
            let (machine, steps) = (&machine, self.steps);
            async move {
                for _ in 0..steps {
                    if let Err(failure) = load.step(machine, task).await {
                        panic!("seed {seed}: {failure}");
                    }
                    if world.below(10) == 0 {
                        machine.env.sleep(Duration::from_millis(world.below(3000))).await;
                    }
                }
            }
        });
        futures_util::future::join_all(tasks).await;
        machine
    }

    fn run_life(&mut self, site: &Site, load: &Load) {
        self.lives += 1;
        let world = World::new(self.dice.random());
        let lost: Vec<String> = self.unlucky.iter().filter(|_| self.chance(3)).cloned().collect();
        let name = SITES[self.dice.below(SITES.len() as u64) as usize];
        let nth = self.dice.below([2, 10, 60, 200][self.dice.below(4) as usize]);
        let timed = self.chance(4).then(|| Duration::from_micros(self.dice.below(20_000_000)));
        if timed.is_none() && self.prepared {
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
        }
        eprintln!("  life {}: {name} {nth} {timed:?}, without {lost:?}", self.lives);
        let clean = self.chance(2);
        let result = world.run(async {
            let env = world.env();
            if let Some(period) = timed.filter(|_| self.prepared) {
                let (world, pause) = (world.clone(), env.sleep(period));
                let cut = async move {
                    pause.await;
                    world.cut();
                };
                env.spawn("cut", Box::pin(cut));
            }
            let work = async {
                let machine = self.live(site, &world, load, &lost).await;
                if clean {
                    load.release_all(&machine).await.unwrap();
                    machine.stop().await;
                }
            };
            timeout(&env, LONG, work).await
        });
        let cut_at = match result {
            Err(_) if timed.is_some() => "any time",
            Err(_) => name,
            Ok(None) => panic!("seed {} life {}: it hangs", self.seed, self.lives),
            Ok(Some(())) => "the end",
        };
        *self.cuts.entry(cut_at).or_default() += 1;
        site.cut(&world);
    }

    /// The last life: everything is mended, proven clean, and still there without any two drives.
    fn run_last(&mut self, site: &Site, load: &Load) {
        let world = World::new(self.dice.random());
        let (first, other) = (self.dice.below(6), 1 + self.dice.below(5));
        let result = world.run(async {
            let work = async {
                let machine = site.start(&world, &[]).await.unwrap();
                load.settle(&machine).await;
                machine.rebuild().await;
                machine.audit().await;
                for _ in 0..self.steps {
                    load.step(&machine, 0).await.unwrap();
                }
                load.release_all(&machine).await.unwrap();
                machine.audit().await;
                for array in machine.node.arrays() {
                    assert_eq!(array.missing_carriers(), 0, "{:?}", array.report());
                }
                let paths: Vec<String> =
                    machine.node.drives().iter().map(|drive| drive.path().to_owned()).collect();
                machine.stop().await;
                let lost = [first, (first + other) % 6].map(|number| paths[number as usize].clone());
                let machine = site.start_without(&world, &lost).await.unwrap();
                load.settle(&machine).await;
                machine.stop().await;
            };
            timeout(&world.env(), LONG, work).await
        });
        let done = result.expect("nobody cuts this life");
        assert!(done.is_some(), "seed {}: the last life hangs", self.seed);
        world.destroy();
    }
}

fn run_seed(seed: u64) -> Fate {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut unlucky: Vec<String> = (0..dice.below(3)).map(|_| path(dice.below(6) as usize)).collect();
    unlucky.dedup();
    eprintln!("seed {seed}: unlucky {unlucky:?}");
    let (lives, steps) = (1 + dice.below(4), 10 + dice.below(60));
    let site = Site::new();
    let load = Load::default();
    let cuts = BTreeMap::new();
    let mut fate = Fate { dice, seed, unlucky, steps, lives: 0, prepared: false, cuts };
    fate.run_life(&site, &load);
    for _ in 0..lives {
        fate.run_life(&site, &load);
    }
    fate.run_last(&site, &load);
    fate
}

#[test]
fn campaign_of_seeds() {
    let given = std::env::var("PENSTOCK_SEEDS").ok();
    let seeds = match given.as_deref().and_then(|range| range.split_once("..")) {
        Some((from, to)) => from.parse().unwrap()..to.parse().unwrap(),
        None => 1..9,
    };
    let (mut cuts, mut lives) = (BTreeMap::<&str, u64>::new(), 0);
    for seed in seeds.clone() {
        let fate = run_seed(seed);
        lives += fate.lives;
        fate.cuts.iter().for_each(|(site, count)| *cuts.entry(site).or_default() += count);
    }
    eprintln!("seeds {seeds:?}: {lives} lives, cut at {cuts:?}");
}
