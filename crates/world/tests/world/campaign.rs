//! Random lives of a whole machine: seeds choose load, power cuts and drive faults; synced data must survive.
//!
//! `PENSTOCK_SEEDS=A..B` runs other seeds than the default few; `cargo xtask campaign cuts` does so and keeps
//! the results. The drive faults of a seed ([`crate::mischief`]) are within what the code survives, so every
//! failure is a defect.

use crate::beside::check_until;
use crate::load::{Load, TASKS};
use crate::loans::{leave, leave_on_all_but_one};
use crate::machine::{Machine, Opened, Site};
use crate::mischief::Mischief;
use penstock_base::env::{Runtime, timeout};
use penstock_base::rank::scoped;
use penstock_sim::{CutPlan, World};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Duration;

/// Codes from which a seed draws.
const CODES: [(usize, usize); 6] = [(4, 2), (4, 2), (3, 0), (1, 1), (1, 2), (8, 3)];
/// Numbers of stacks from which a seed draws.
const STACKS: [u16; 8] = [1, 1, 1, 2, 2, 3, 4, 16];
/// Sites where the power is cut, in addition to cuts at any time.
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
    "label.copy0",
    "label.copy1",
];
/// Time that no life takes, unless it waits for something that never comes.
const LONG: Duration = Duration::from_secs(3600);

/// The decisions of a seed, and the state that it keeps from life to life.
struct Fate {
    dice: World,
    seed: u64,
    code: (usize, usize),
    mischief: Mischief,
    steps: u64,
    lives: u64,
    prepared: bool,
    cuts: BTreeMap<&'static str, u64>,
    /// Free bytes of the empty store.
    free_bytes: u64,
    /// Bytes that files leave free on the target of the names, or on all but one, if others must lend space.
    leaves: Option<u64>,
    /// On all but one.
    all_but_one: bool,
    repaired_blocks: u64,
    /// Most bytes that a target had on loan.
    borrowed: u64,
}

/// Prints the command that runs a seed alone, if the test panics during it.
struct Alone(u64);

impl Drop for Alone {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self(seed) = self;
            eprintln!("seed {seed} failed; alone: PENSTOCK_SEEDS={seed}..{} {COMMAND}", *seed + 1);
        }
    }
}

const COMMAND: &str = "cargo test -p penstock-world --test world campaign_of_seeds -- --nocapture";

impl Fate {
    fn chance(&self, one_in: u64) -> bool {
        self.dice.below(one_in) == 0
    }

    async fn live(
        &mut self,
        site: &Site,
        world: &World,
        load: &Load,
        lost: &[String],
        opened: &Opened,
    ) -> Machine {
        let seed = self.seed;
        let machine = site.start_recording(world, lost, opened).await;
        let machine = machine.unwrap_or_else(|error| panic!("seed {seed}, without {lost:?}: {error}"));
        if self.prepared {
            load.settle(&machine).await;
        } else {
            self.free_bytes = machine.node.fs_report().free_bytes;
            load.prepare(&machine).await.unwrap();
            match self.leaves {
                Some(bytes) if self.all_but_one => leave_on_all_but_one(&machine, bytes).await.unwrap(),
                Some(bytes) => leave(&machine, bytes).await.unwrap(),
                None => {}
            }
            self.prepared = true;
        }
        if self.chance(3) {
            let replaced = machine.replace_missing().await;
            // The drives that were replaced may come back, and no longer belong to the store.
            self.mischief.unlucky.extend(replaced);
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
        self.see_loans(&machine);
        machine
    }

    fn see_loans(&mut self, machine: &Machine) {
        let most = machine.node.stack_reports().iter().map(|stack| stack.borrowed_bytes).max();
        self.borrowed = self.borrowed.max(most.unwrap_or(0));
    }

    fn run_life(&mut self, site: &Site, load: &Load) {
        self.lives += 1;
        let world = World::new(self.dice.random());
        let lost: Vec<String> = self.mischief.unlucky.iter().filter(|_| self.chance(3)).cloned().collect();
        let name = SITES[self.dice.below(SITES.len() as u64) as usize];
        let nth = self.dice.below([2, 10, 60, 200][self.dice.below(4) as usize]);
        let timed = self.chance(4).then(|| Duration::from_micros(self.dice.below(20_000_000)));
        if timed.is_none() && self.prepared {
            world.plan_cut(CutPlan { site: name.to_owned(), nth });
        }
        eprintln!("  life {}: {name} {nth} {timed:?}, without {lost:?}", self.lives);
        let clean = self.chance(2);
        let opened = Opened::default();
        if self.prepared {
            self.mischief.plan(site);
            self.mischief.spawn(site, &world, &opened);
        }
        let planned = site.plans.borrow().values().map(Vec::len).sum();
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
                let machine = self.live(site, &world, load, &lost, &opened).await;
                if clean {
                    load.release_all(&machine).await.unwrap();
                    self.mischief.stopped(machine.try_stop().await);
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
        self.mischief.rest(site, &opened, planned);
        site.plans.borrow_mut().clear();
    }

    /// Replaces lost drives and repairs the rest by a scrub, so that the next scrub finds nothing.
    async fn mend(&mut self, machine: &Machine) {
        machine.rebuild().await;
        for array in machine.node.arrays() {
            let scrub = machine.node.scrub(array).await.unwrap();
            assert!(self.mischief.silent || scrub.clean, "first scrub: {scrub:?}");
            assert!(
                scrub.parity_defects == 0 && scrub.unreadable_stripes.is_empty(),
                "first scrub: {scrub:?}"
            );
            self.repaired_blocks += array.counts().repaired_blocks + scrub.superblocks_repaired;
            assert_eq!(array.wait_rebuilt().await, 0, "{:?}", array.report());
            let again = machine.node.scrub(array).await.unwrap();
            assert!(again.clean && again.superblocks_repaired == 0, "second scrub: {again:?}");
        }
    }

    /// Runs the last life. Everything is repaired, checked to be clean, and still readable without any m
    /// drives. After everything has been removed, its space is free again.
    fn run_last(&mut self, site: &Site, load: &Load) {
        let world = World::new(self.dice.random());
        let (k, m) = self.code;
        let mut order: Vec<usize> = (0..k + m).collect();
        order.sort_by_cached_key(|_| self.dice.random());
        let result = world.run(async {
            let work = async {
                let machine = site.start(&world, &[]).await.unwrap();
                load.settle(&machine).await;
                self.mend(&machine).await;
                machine.audit().await;
                let (is_done, steps) = (Cell::new(false), Cell::new(0));
                let work = async {
                    for _ in 0..self.steps {
                        load.step(&machine, 0).await.unwrap();
                        steps.set(steps.get() + 1);
                    }
                    is_done.set(true);
                };
                let checks = scoped(check_until(&machine, &is_done, &steps));
                futures_util::future::join(scoped(work), checks).await;
                self.see_loans(&machine);
                load.release_all(&machine).await.unwrap();
                machine.audit().await;
                for array in machine.node.arrays() {
                    assert_eq!(array.missing_carriers(), 0, "{:?}", array.report());
                }
                let paths: Vec<String> =
                    machine.node.drives().iter().map(|drive| drive.path().to_owned()).collect();
                machine.stop().await;
                let lost: Vec<String> = order[..m].iter().map(|number| paths[*number].clone()).collect();
                let machine = site.start_without(&world, &lost).await.unwrap();
                load.settle(&machine).await;
                machine.stop().await;
                let machine = site.start(&world, &[]).await.unwrap();
                for array in machine.node.arrays() {
                    assert_eq!(array.wait_rebuilt().await, 0, "{:?}", array.report());
                }
                load.settle(&machine).await;
                machine.audit().await;
                load.remove_all(&machine).await.unwrap();
                if self.leaves.is_some() {
                    machine.client.unlink(machine.client.root(), b"ballast", false).await.unwrap();
                }
                machine.check_empty(self.free_bytes).await;
                machine.audit().await;
                machine.stop().await;
            };
            timeout(&world.env(), LONG, work).await
        });
        let done = result.expect("nobody cuts this life");
        assert!(done.is_some(), "seed {}: the last life hangs", self.seed);
        world.destroy();
    }
}

impl Fate {
    fn figures(&self) -> serde_json::Value {
        let mut figures = serde_json::json!({
            "lives": self.lives,
            "cuts": self.cuts.iter().filter(|(site, _)| **site != "the end").map(|(_, count)| count).sum::<u64>(),
            "repaired_blocks": self.repaired_blocks,
            "borrowed_bytes": self.borrowed,
        });
        self.mischief.done.iter().for_each(|(what, count)| figures[*what] = (*count).into());
        figures
    }
}

fn run_seed(seed: u64) -> Fate {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let _alone = Alone(seed);
    let code = CODES[dice.below(CODES.len() as u64) as usize];
    let (k, m) = code;
    let mischief = Mischief::new(seed, (k + m) as u64, m as u64);
    eprintln!("seed {seed}: {k}+{m}, unlucky {:?}", mischief.unlucky);
    let (lives, steps) = (1 + dice.below(4), 10 + dice.below(60));
    let stacks = STACKS[dice.below(STACKS.len() as u64) as usize];
    let count = dice.below(5).min(stacks.into()) as u16;
    eprintln!("seed {seed}: {stacks} stacks, files on {count} targets");
    let site = Site::spread(code, stacks, count);
    let load = Load::default();
    // Of the bytes above the headroom, so that little is written before others lend.
    let leaves = (stacks > 1 && dice.below(3) == 0).then(|| dice.below(4) << 20);
    let all_but_one = leaves.is_some() && dice.below(2) == 0;
    if let Some(bytes) = leaves {
        let which = if all_but_one { "all targets but one" } else { "the first target" };
        eprintln!("seed {seed}: {bytes} bytes are left on {which}");
    }
    let mut fate = Fate {
        dice,
        seed,
        code,
        mischief,
        steps,
        lives: 0,
        prepared: false,
        cuts: BTreeMap::new(),
        free_bytes: 0,
        leaves,
        all_but_one,
        repaired_blocks: 0,
        borrowed: 0,
    };
    fate.run_life(&site, &load);
    for _ in 0..lives {
        fate.run_life(&site, &load);
    }
    fate.run_last(&site, &load);
    fate
}

#[test]
fn campaign_of_seeds() {
    let seeds = penstock_sim::seeds(1..9);
    let (mut cuts, mut lives) = (BTreeMap::<&str, u64>::new(), 0);
    for seed in seeds.clone() {
        println!("campaign begin {seed}");
        let fate = run_seed(seed);
        println!("campaign end {seed} {}", fate.figures());
        lives += fate.lives;
        fate.cuts.iter().for_each(|(site, count)| *cuts.entry(site).or_default() += count);
    }
    eprintln!("seeds {seeds:?}: {lives} lives, cut at {cuts:?}");
}
