//! Starts with any set of drives absent or with old contents; each may be cut, and some accept a loss and are
//! cut.
//!
//! A start that is refused changes nothing. A start that goes on without accepted loss loses nothing: with
//! the drives that took part, and the right contents of those that were absent, all data is there, and then
//! any m drives may be lost.

use crate::bench::{Load, SLICE_AT, Site, label_of, plan, spec};
use crate::replaced::duplicate;
use penstock_array::MemberNo;
use penstock_array::Site as WriteSite;
use penstock_array::format::root::Root;
use penstock_array::ownership::{Claim, Ownership};
use penstock_array::{ArrayError, Geometry, Lacking};
use penstock_base::env::timeout;
use penstock_base::{ArrayId, BLOCK_BYTES, Epoch};
use penstock_drive::{Fault, Op};
use penstock_sim::{CutMode, SimDisk, World};
use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::time::Duration;

const PLACES: [&str; 14] = [
    "label.copy0",
    "label.copy0",
    "label.copy1",
    WriteSite::ReplayMend.name(),
    WriteSite::ReplayRedo.name(),
    WriteSite::CheckpointRoot.name(),
    WriteSite::CheckpointRoot.name(),
    WriteSite::LogAppend.name(),
    WriteSite::LogAppend.name(),
    WriteSite::DestageStrip.name(),
    WriteSite::CheckpointPage.name(),
    WriteSite::RebuildStrip.name(),
    WriteSite::CarrierCopy.name(),
    WriteSite::FreshStrip.name(),
];
/// The places that a start passes before its root is durable.
const BEFORE_A_ROOT: [&str; 5] = [
    "label.copy0",
    "label.copy1",
    WriteSite::ReplayRedo.name(),
    WriteSite::ReplayMend.name(),
    WriteSite::CheckpointRoot.name(),
];
const CODES: [(usize, usize); 7] = [(4, 1), (4, 2), (2, 1), (1, 1), (2, 2), (3, 0), (1, 2)];
/// The most old states that are kept of a drive.
const KEPT: usize = 5;

/// Events of a story in addition to cuts and drives that are absent or have old contents.
#[derive(Clone, Copy, Default)]
struct Also {
    /// Starts that accept a loss and are cut.
    words: bool,
    /// One failing write.
    faults: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Work {
    Load,
    /// Waits until all is rebuilt.
    Heal,
    /// Opens the array and stops it.
    Open,
}

#[derive(Debug, PartialEq)]
enum End {
    Done,
    Cut,
    Refused(String),
    /// An error that the absence of drives does not explain.
    Failed(String),
}

/// One start of the machine.
struct Life<'a> {
    lost: &'a [usize],
    cut: Option<(&'static str, u64)>,
    mode: Option<CutMode>,
    faulty: Option<(usize, u64)>,
    work: Work,
}

struct Story {
    seed: u64,
    dice: World,
    site: Site,
    load: Load,
    /// The disk of each member as of the last start in which it took part.
    right: Vec<Rc<SimDisk>>,
    past: Vec<Vec<Rc<SimDisk>>>,
    /// True for members that took part in the last start that was not refused.
    latest: Vec<bool>,
    id: Cell<Option<ArrayId>>,
    lives: Cell<u64>,
    refused: Cell<u64>,
    also: Also,
    told: RefCell<Vec<String>>,
}

impl Story {
    fn new(seed: u64, also: Also) -> Self {
        let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 99);
        let (k, m) = CODES[dice.below(CODES.len() as u64) as usize];
        let load = Load::new(10 + dice.below(60));
        let site = Site::new(spec(k, m));
        Self {
            seed,
            dice,
            load,
            right: site.disks.clone(),
            site,
            past: vec![Vec::new(); k + m],
            latest: vec![true; k + m],
            id: Cell::new(None),
            lives: Cell::new(0),
            refused: Cell::new(0),
            also,
            told: RefCell::default(),
        }
    }

    fn one_in(&self, count: u64) -> bool {
        self.dice.below(count) == 0
    }

    fn live(&self, site: &Site, life: &Life<'_>) -> End {
        let Life { lost, cut, mode, faulty, work } = *life;
        let number = self.lives.get() + 1;
        self.lives.set(number);
        let world = World::new(self.seed * 1000 + number);
        if let Some((place, nth)) = cut {
            world.plan_cut(plan(place, nth));
        }
        let opened = Cell::new(false);
        let run = world.run(async {
            let live = async {
                let machine = site.open(&world, lost).await?;
                opened.set(true);
                self.id.set(Some(machine.array.id()));
                if work == Work::Open {
                    machine.array.stop();
                    return Ok(());
                }
                if let Some((at, nth)) = faulty
                    && let Some(drive) = &machine.drives[at]
                {
                    drive.plant(Op::Write, nth, Fault::Fail);
                }
                self.load.settle(&machine).await?;
                if work == Work::Heal {
                    assert_eq!(machine.array.wait_rebuilt().await, 0, "it can be rebuilt");
                    let report = machine.array.report();
                    assert!(report.members.iter().all(|member| member.state == "active"), "{report:?}");
                } else {
                    if self.one_in(2) {
                        machine.array.wait_rebuilt().await;
                    }
                    let load = (self.load.run_logged(&machine), self.load.run_fresh(&machine));
                    let (logged, fresh) = futures_util::future::join(load.0, load.1).await;
                    logged.and(fresh)?;
                }
                self.load.check(&machine).await?;
                if self.one_in(2) {
                    return machine.array.close().await;
                }
                machine.array.stop();
                Ok::<_, ArrayError>(())
            };
            timeout(&world.env(), Duration::from_secs(20_000), live).await
        });
        world.destroy();
        site.disks.iter().for_each(|disk| disk.cut(&world, mode.unwrap_or_else(|| CutMode::draw(&world))));
        let end = match run {
            Err(_) => End::Cut,
            Ok(None) => End::Failed("it hangs".into()),
            Ok(Some(Ok(()))) => End::Done,
            Ok(Some(Err(
                error @ (ArrayError::WouldLose { .. }
                | ArrayError::TooManyMissing { .. }
                | ArrayError::CannotRead { .. }
                | ArrayError::Damaged { .. }),
            ))) if !opened.get() => End::Refused(error.to_string()),
            Ok(Some(Err(ArrayError::Suspended(_) | ArrayError::Closed))) if faulty.is_some() => End::Cut,
            Ok(Some(Err(error))) => End::Failed(error.to_string()),
        };
        self.told
            .borrow_mut()
            .push(format!("life {number} lost {lost:?} cut {cut:?} faulty {faulty:?}: {end:?}"));
        end
    }

    fn claim(&self) -> Claim {
        let id = self.id.get().expect("it was opened once");
        World::new(1).run(self.site.ownership.current(id)).unwrap().unwrap()
    }

    /// The epoch of the newest root on the disks that are present.
    fn newest_root(&self, lost: &[usize]) -> Option<Epoch> {
        let here = self.site.disks.iter().enumerate().filter(|(at, _)| !lost.contains(at));
        let newest = here.filter_map(|(_, disk)| {
            let (_, label) = label_of(disk)?;
            let geo = Geometry::of(&label.descriptor().ok()?).ok()?;
            let root =
                |seq| Root::decode(&disk.peek((SLICE_AT + geo.root_at(seq)) / BLOCK_BYTES as u64)).ok();
            (0..2).filter_map(root).map(|root| root.epoch).max()
        });
        newest.max()
    }

    /// Makes the present disk, which took part, the right one; the one before it is an old state from here
    /// on.
    fn took_part(&mut self, at: usize) {
        let before = std::mem::replace(&mut self.right[at], self.site.disks[at].clone());
        self.past[at].push(before);
    }

    /// A start that accepts the loss and is cut. Returns false if the story ends because the acceptance took
    /// effect.
    fn word(&mut self, lost: &[usize], wrong: &[usize]) -> Result<bool, String> {
        let accepting = Site {
            lacking: Lacking::Accept,
            ownership: self.site.ownership.clone(),
            ..Site::of(self.site.disks.clone(), self.site.spec.clone())
        };
        let place = BEFORE_A_ROOT[self.dice.below(BEFORE_A_ROOT.len() as u64) as usize];
        let cut = Some((place, self.dice.below(10)));
        match self.live(&accepting, &Life { lost, cut, mode: None, faulty: None, work: Work::Open }) {
            End::Cut => {}
            End::Done => return Ok(false),
            End::Refused(_) => return Ok(true),
            End::Failed(why) => return Err(why),
        }
        let again = Life { lost, cut: None, mode: Some(CutMode::Everything), faulty: None, work: Work::Open };
        let asks_again = matches!(self.live(&duplicate(&self.site, self.id.get()), &again), End::Refused(_));
        let claim = self.claim();
        if !asks_again || self.newest_root(lost) >= Some(claim.epoch) {
            return Ok(false);
        }
        for at in wrong.iter().copied() {
            if claim.accepted.members().any(|(member, _)| member == MemberNo::new(at)) || lost.contains(&at) {
                let disk = self.site.disks[at].duplicate();
                self.past[at].push(disk);
            } else {
                self.took_part(at);
            }
        }
        Ok(true)
    }

    /// One start with any drives. Returns false if the story ends.
    fn step(&mut self) -> Result<bool, String> {
        if self.one_in(2) {
            for (past, disk) in self.past.iter_mut().zip(&self.right) {
                past.push(disk.duplicate());
                if past.len() > KEPT {
                    past.remove(0);
                }
            }
        }
        let (mut wrong, mut lost) = (Vec::new(), Vec::new());
        let (one_wrong_in, one_lost_in) = (2 + self.dice.below(6), 3 + self.dice.below(6));
        for at in 0..self.right.len() {
            if !self.past[at].is_empty() && self.one_in(one_wrong_in) {
                wrong.push(at);
            } else if self.one_in(one_lost_in) {
                lost.push(at);
            }
        }
        // At least one present drive must know the state of the others.
        if !(0..self.right.len()).any(|at| self.latest[at] && !wrong.contains(&at) && !lost.contains(&at)) {
            wrong.clear();
            lost.clear();
        }
        self.site.disks.clone_from(&self.right);
        for at in wrong.iter().copied() {
            let which = self.dice.below(self.past[at].len() as u64) as usize;
            self.site.disks[at] = self.past[at][which].duplicate();
            self.told.borrow_mut().push(format!("disk {at} is {which} of {}", self.past[at].len()));
        }
        let cut = (self.dice.below(4) != 0).then(|| {
            let place = PLACES[self.dice.below(PLACES.len() as u64) as usize];
            (place, self.dice.below(if self.one_in(3) { 60 } else { 12 }))
        });
        let faulty = (self.also.faults && self.one_in(3))
            .then(|| (self.dice.below(self.right.len() as u64) as usize, self.dice.below(60)));
        let end = self.live(&self.site, &Life { lost: &lost, cut, mode: None, faulty, work: Work::Load });
        match &end {
            End::Refused(why) if wrong.is_empty() && lost.is_empty() => {
                return Err(format!("refused although all are right: {why}"));
            }
            End::Refused(_) => {
                self.refused.set(self.refused.get() + 1);
                return if self.also.words && self.one_in(2) { self.word(&lost, &wrong) } else { Ok(true) };
            }
            End::Failed(why) => return Err(why.clone()),
            End::Done | End::Cut => {}
        }
        let was_cut = end == End::Cut;
        let takes_part =
            |at: usize| !lost.contains(&at) && (!was_cut || self.latest[at] && !wrong.contains(&at));
        self.latest = (0..self.right.len()).map(takes_part).collect();
        if was_cut && !self.latest.contains(&true) {
            return Ok(false);
        }
        wrong.into_iter().for_each(|at| self.took_part(at));
        if was_cut && self.one_in(2) {
            // The same drives again.
            let again = Life { lost: &lost, cut: None, mode: None, faulty: None, work: Work::Load };
            let again = self.live(&self.site, &again);
            if again != End::Done && faulty.is_none() {
                return Err(format!("the same drives again: {again:?}"));
            }
        }
        Ok(true)
    }

    /// With all right drives, full redundancy is restored; then any m drives may be lost.
    fn heal(&mut self) -> Result<(), String> {
        self.site.disks.clone_from(&self.right);
        let heal = Life { lost: &[], cut: None, mode: None, faulty: None, work: Work::Heal };
        match self.live(&self.site, &heal) {
            End::Done => {}
            other => return Err(format!("with all right drives: {other:?}")),
        }
        self.latest.fill(true);
        let (strips, m) = (self.right.len(), self.site.spec.m);
        for mask in (1_u32..1 << strips).filter(|mask| mask.count_ones() as usize == m) {
            let lost: Vec<usize> = (0..strips).filter(|at| mask & 1 << at != 0).collect();
            let copy = duplicate(&self.site, self.id.get());
            let world = World::new(self.seed);
            let run = world.run(async {
                let machine = copy.open(&world, &lost).await?;
                self.load.check(&machine).await?;
                machine.array.stop();
                Ok::<_, ArrayError>(())
            });
            world.destroy();
            run.unwrap().map_err(|error| format!("whole, without {lost:?}: {error}"))?;
        }
        Ok(())
    }

    fn tell(&mut self) -> Result<(), String> {
        let first = Life { lost: &[], cut: None, mode: None, faulty: None, work: Work::Load };
        assert_eq!(self.live(&self.site, &first), End::Done);
        for _ in 0..1 + self.dice.below(2) {
            for _ in 0..2 + self.dice.below(7) {
                if !self.step()? {
                    return Ok(());
                }
            }
            self.heal()?;
        }
        Ok(())
    }
}

fn stories(also: Also) {
    let (seeds, mut refused) = (penstock_sim::seeds(1..30), 0);
    for seed in seeds.clone() {
        let mut story = Story::new(seed, also);
        let told = catch_unwind(AssertUnwindSafe(|| story.tell()));
        let lives = story.told.borrow().join("\n");
        match told {
            Ok(Ok(())) => refused += story.refused.get(),
            Ok(Err(why)) => panic!("seed {seed} {:?}: {why}\n{lives}", story.site.spec),
            Err(panicked) => {
                eprintln!("seed {seed} {:?}\n{lives}", story.site.spec);
                resume_unwind(panicked);
            }
        }
    }
    eprintln!("seeds {seeds:?}: {refused} refused");
    assert!(refused > 0);
}

#[test]
fn campaign_of_any_drives() {
    stories(Also::default());
}

#[test]
fn campaign_of_any_drives_and_words_that_are_cut() {
    stories(Also { words: true, ..Also::default() });
}

#[test]
fn campaign_of_any_drives_and_faults() {
    stories(Also { faults: true, ..Also::default() });
}
