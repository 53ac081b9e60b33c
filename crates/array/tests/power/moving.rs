//! Faults that move: at most m drives at a time are absent, old, replaced, failing, silent or slow, with
//! power cuts.
//!
//! The set of these drives changes whenever the array has full redundancy, and then any m drives may be lost.

use crate::bench::{DISK_BYTES, Load, Machine, Site, plan, spec};
use crate::replaced::duplicate;
use penstock_array::ArrayError;
use penstock_array::Site as WriteSite;
use penstock_base::ArrayId;
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, SimDisk, World};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const SITES: [&str; 14] = [
    WriteSite::LogAppend.name(),
    WriteSite::LogSegment.name(),
    WriteSite::FreshStrip.name(),
    WriteSite::DestageStrip.name(),
    WriteSite::DestageTrailer.name(),
    WriteSite::CheckpointPage.name(),
    WriteSite::CheckpointRoot.name(),
    WriteSite::ReplayRedo.name(),
    WriteSite::ReplayMend.name(),
    WriteSite::RebuildStrip.name(),
    "label.copy0",
    "label.copy0",
    "label.copy1",
    WriteSite::CarrierCopy.name(),
];
const CODES: [(usize, usize); 7] = [(4, 1), (4, 2), (2, 1), (1, 1), (2, 2), (1, 2), (2, 3)];
const MOST_KEPT: usize = 6;

/// A disk with an earlier state of a position.
struct Kept {
    disk: Rc<SimDisk>,
    /// True if it was copied while a life ran. It is an old state only after the drive of this position has
    /// taken part in a later opening.
    within: bool,
    /// The number of openings in which the drive of this position had taken part when it was copied.
    served: u64,
}

/// The plan of a life.
struct Life<'a> {
    unlucky: &'a [usize],
    lost: &'a [usize],
    cut: bool,
    /// Drives that are missing are replaced, and all is rebuilt.
    heals: bool,
    faults: bool,
}

struct Story {
    seed: u64,
    dice: World,
    site: Site,
    load: Load,
    /// Disks with earlier states, by position.
    kept: Vec<Vec<Kept>>,
    served: Vec<u64>,
    lives: u64,
    new_drives: Cell<u64>,
    id: Cell<Option<ArrayId>>,
    told: Vec<String>,
}

/// The state that a life leaves.
#[derive(Default)]
struct Left {
    /// Positions whose drives took part in an opening.
    served: RefCell<Vec<usize>>,
    within: RefCell<Vec<(usize, Rc<SimDisk>)>>,
    new: RefCell<Vec<(usize, Rc<SimDisk>)>>,
}

fn state(machine: &Machine, at: usize) -> &'static str {
    machine.array.report().members[at].state
}

impl Story {
    fn chance(&self, one_in: u64) -> bool {
        self.dice.below(one_in) == 0
    }

    async fn replace_missing(
        &self,
        machine: &Machine,
        left: &Left,
        unlucky: &[usize],
        one_in: u64,
    ) -> Result<(), ArrayError> {
        for at in unlucky {
            if state(machine, *at) == "missing" && self.chance(one_in) {
                let disk = SimDisk::new(DISK_BYTES);
                self.new_drives.set(self.new_drives.get() + 1);
                left.new.borrow_mut().push((*at, disk.clone()));
                machine.replace(&disk, *at, 50 + self.new_drives.get()).await?;
            }
        }
        Ok(())
    }

    fn plant(&self, machine: &Machine, unlucky: &[usize]) {
        for at in unlucky.iter().filter(|_| self.chance(3)) {
            let (what, nth) = (self.dice.below(6), self.dice.below(100));
            let Some(drive) = &machine.drives[*at] else { continue };
            match what {
                0 => drive.plant(Op::Write, nth, Fault::Fail),
                1 => drive.plant(Op::Flush, nth / 4, Fault::Fail),
                2 => drive.plant(Op::Write, nth, Fault::Silent),
                3 => drive.plant(Op::Flush, nth / 4, Fault::Silent),
                4 => drive.set_gone(true),
                _ => drive.plant(Op::Write, nth, Fault::Slow(Duration::from_secs(40))),
            }
        }
    }

    async fn serve(&self, machine: &Machine, left: &Left, life: &Life<'_>) -> Result<(), ArrayError> {
        let load = &self.load;
        if life.heals {
            self.replace_missing(machine, left, life.unlucky, 1).await?;
            load.check(machine).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0, "it can be rebuilt");
            let report = machine.array.report();
            assert!(report.members.iter().all(|member| member.state == "active"), "{report:?}");
            return load.check(machine).await;
        }
        if self.chance(6) {
            self.replace_missing(machine, left, life.unlucky, 2).await?;
        }
        load.settle(machine).await?;
        let (logged, fresh) =
            futures_util::future::join(load.run_logged(machine), load.run_fresh(machine)).await;
        logged.and(fresh)?;
        load.check(machine).await
    }

    /// Runs one life. Returns true if it was cut.
    fn live(&mut self, life: &Life<'_>) -> Result<bool, String> {
        self.lives += 1;
        let world = World::new(self.seed * 1000 + self.lives);
        let mut told = format!("life {}: {:?} lost of {:?}", self.lives, life.lost, life.unlucky);
        if life.cut {
            let place = SITES[self.dice.below(SITES.len() as u64) as usize];
            let nth = self.dice.below(if self.chance(2) { 8 } else { 60 });
            told += &format!(", cut at {place} {nth}");
            world.plan_cut(plan(place, nth));
        }
        let copied_at = self.chance(3).then(|| Duration::from_millis(self.dice.below(3000)));
        let left = Left::default();
        let run = world.run(async {
            let work = async {
                let machine = self.site.open(&world, life.lost).await?;
                self.id.set(Some(machine.array.id()));
                let here = (0..machine.handles.len())
                    .filter(|at| machine.handles[*at].is_some() && state(&machine, *at) != "missing");
                left.served.borrow_mut().extend(here);
                if life.faults {
                    self.plant(&machine, life.unlucky);
                }
                let copies = async {
                    if let Some(after) = copied_at {
                        machine.env.sleep(after).await;
                        let copy = |at: &usize| (*at, machine.disks[*at].duplicate());
                        left.within.borrow_mut().extend(life.unlucky.iter().map(copy));
                    }
                };
                let serves = self.serve(&machine, &left, life);
                futures_util::future::join(copies, serves).await.1?;
                if !life.faults && self.chance(2) {
                    return machine.array.close().await;
                }
                machine.array.stop();
                Ok::<_, ArrayError>(())
            };
            timeout(&world.env(), Duration::from_secs(20_000), work).await
        });
        self.site.cut(&world);
        left.new.borrow().iter().for_each(|(_, disk)| disk.cut(&world, CutMode::draw(&world)));
        for (at, disk) in left.within.take() {
            self.kept[at].push(Kept { disk, within: true, served: self.served[at] + 1 });
        }
        for (at, disk) in left.new.take() {
            let disk = std::mem::replace(&mut self.site.disks[at], disk);
            self.kept[at].push(Kept { disk, within: false, served: self.served[at] });
        }
        left.served.take().into_iter().for_each(|at| self.served[at] += 1);
        self.told.push(told);
        match run {
            Err(_) => Ok(true),
            Ok(None) => Err("it hangs".into()),
            Ok(Some(done)) => done.map(|()| false).map_err(|error| error.to_string()),
        }
    }

    fn copy_all(&mut self) {
        for (at, disk) in self.site.disks.iter().enumerate() {
            let kept = &mut self.kept[at];
            kept.push(Kept { disk: disk.duplicate(), within: false, served: self.served[at] });
            if kept.len() > MOST_KEPT {
                kept.remove(0);
            }
        }
    }

    /// Gives a disk the contents that it had some time ago.
    fn bring_back(&mut self, at: usize) {
        let served = self.served[at];
        let may: Vec<usize> = (0..self.kept[at].len())
            .filter(|kept| !self.kept[at][*kept].within || self.kept[at][*kept].served < served)
            .collect();
        if may.is_empty() {
            return;
        }
        let chosen = may[self.dice.below(may.len() as u64) as usize];
        let disk = self.kept[at][chosen].disk.duplicate();
        let disk = std::mem::replace(&mut self.site.disks[at], disk);
        self.kept[at].push(Kept { disk, within: false, served });
        self.told.push(format!("disk {at} as it was, {chosen} of {}", self.kept[at].len()));
    }

    fn draw(&self, count: usize) -> Vec<usize> {
        let mut drawn = Vec::new();
        while drawn.len() < count {
            let at = self.dice.below(self.site.disks.len() as u64) as usize;
            if !drawn.contains(&at) {
                drawn.push(at);
            }
        }
        drawn
    }

    /// From full redundancy, through some lives, to full redundancy again.
    fn phase(&mut self) -> Result<(), String> {
        let m = self.site.spec.m;
        let unlucky = self.draw(if self.chance(3) { self.dice.below(m as u64 + 1) as usize } else { m });
        for _ in 0..1 + self.dice.below(4) {
            if self.chance(2) {
                self.copy_all();
            }
            let mut lost = Vec::new();
            for at in &unlucky {
                match self.dice.below(4) {
                    0 => lost.push(*at),
                    1 | 2 => self.bring_back(*at),
                    _ => {}
                }
            }
            let (cut, faults) = (self.chance(2) || self.chance(2), self.chance(2));
            self.live(&Life { unlucky: &unlucky, lost: &lost, cut, heals: false, faults })?;
        }
        let lost: Vec<usize> = unlucky.iter().copied().filter(|_| self.chance(4)).collect();
        while self.live(&Life {
            unlucky: &unlucky,
            lost: &lost,
            cut: self.chance(3),
            heals: true,
            faults: false,
        })? {}
        let sets = (1_u32..1 << self.site.disks.len()).filter(|mask| mask.count_ones() as usize == m);
        for mask in sets {
            let set: Vec<usize> = (0..self.site.disks.len()).filter(|at| mask & 1 << at != 0).collect();
            self.check_without(&set).map_err(|why| format!("whole, and without {set:?}: {why}"))?;
        }
        Ok(())
    }

    fn check_without(&self, set: &[usize]) -> Result<(), String> {
        let copy = duplicate(&self.site, self.id.get());
        let world = World::new(self.seed);
        let run = world.run(async {
            let work = async {
                let machine = copy.open(&world, set).await?;
                self.load.check(&machine).await?;
                machine.array.stop();
                Ok::<_, ArrayError>(())
            };
            timeout(&world.env(), Duration::from_secs(7200), work).await
        });
        world.destroy();
        let done = run.expect("nobody cuts it").ok_or("it hangs")?;
        done.map_err(|error| error.to_string())
    }
}

fn story(seed: u64) {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 77);
    let (k, m) = CODES[dice.below(CODES.len() as u64) as usize];
    let load = Load::new(20 + dice.below(60));
    let mut story = Story {
        seed,
        dice,
        site: Site::new(spec(k, m)),
        load,
        kept: (0..k + m).map(|_| Vec::new()).collect(),
        served: vec![0; k + m],
        lives: 0,
        new_drives: Cell::new(0),
        id: Cell::new(None),
        told: Vec::new(),
    };
    for _ in 0..2 + story.dice.below(3) {
        if let Err(why) = story.phase() {
            panic!("seed {seed}, {k}+{m}: {why}\n{}", story.told.join("\n"));
        }
    }
}

#[test]
fn campaign_of_moving_faults() {
    penstock_sim::seeds(1..20).for_each(story);
}
