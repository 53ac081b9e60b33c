//! Storms: drives are given up, replaced and cut off at any time, as far as the array lets them go, beside
//! writers. Every stripe can be read at any moment, and what was flushed is there after each power cut.
//!
//! The campaign of random lives harms as many drives as the code survives. Here it is the array that decides,
//! so the rule is tried by which a drive may be given up.

use crate::bench::{DISK_BYTES, Machine, Site, buf_of, log_of, spec, spread, tags, write_fresh};
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, CreateSpec, Discard, Layout};
use penstock_base::env::timeout;
use penstock_drive::{Fault, Op, Pace};
use penstock_sim::{CutMode, SimDisk, World};
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

const WRITERS: u64 = 4;

/// By block of a stripe, the tags that it may hold after a power cut; the last one is what it holds.
type Tags = Vec<Vec<u64>>;

/// The events of a storm.
#[derive(Default)]
struct Tally {
    given_up: Cell<u64>,
    refused: Cell<u64>,
    replaced: Cell<u64>,
}

struct Storm {
    seed: u64,
    blocks: u64,
    stripes: Vec<RefCell<Tags>>,
    next_tag: Cell<u64>,
    is_over: Cell<bool>,
    disks: RefCell<Vec<Rc<SimDisk>>>,
    tally: Tally,
}

fn add(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

fn settle(tags: &mut Tags) {
    tags.iter_mut().for_each(|may| *may = vec![*may.last().expect("a block has a tag")]);
}

fn put(tags: &mut Tags, at: usize, new: &[u64]) {
    tags[at..].iter_mut().zip(new).for_each(|(may, tag)| may.push(*tag));
}

impl Storm {
    async fn tags(&self, machine: &Machine, stripe: usize) -> Result<Vec<u64>, ArrayError> {
        tags(&machine.volume, stripe as u64 * self.blocks, self.blocks).await
    }

    /// Reads a stripe and compares it.
    async fn verify(&self, machine: &Machine, stripe: usize) {
        match self.tags(machine, stripe).await {
            Ok(found) => {
                let wanted: Vec<u64> =
                    self.stripes[stripe].borrow().iter().map(|may| *may.last().unwrap()).collect();
                assert_eq!(found, wanted, "seed {}, stripe {stripe}", self.seed);
            }
            Err(_) if machine.array.is_closed() => {}
            Err(error) => {
                panic!("seed {}, stripe {stripe}: {error}; {:?}", self.seed, machine.array.report())
            }
        }
    }

    /// One change of a stripe. False once the array takes no more.
    async fn change(&self, machine: &Machine, world: &World, stripe: usize) -> bool {
        let (model, number, tag) = (&self.stripes[stripe], stripe as u64, self.next_tag.get());
        self.next_tag.set(tag + 1000);
        match world.below(10) {
            0..5 if machine.volume.knows_unwritten(number) == Some(true) => {
                put(&mut model.borrow_mut(), 0, &(tag..tag + self.blocks).collect::<Vec<_>>());
                match write_fresh(machine, number, tag).await {
                    Ok(()) => true,
                    Err(ArrayError::Suspended(_)) => {
                        model.borrow_mut().iter_mut().for_each(|may| _ = may.pop());
                        true
                    }
                    Err(_) => false,
                }
            }
            0..2 => {
                put(&mut model.borrow_mut(), 0, &vec![0; self.blocks as usize]);
                let result = machine.volume.discard(number, 1, Discard::OnDrives).await;
                if result.is_ok() {
                    settle(&mut model.borrow_mut());
                }
                result.is_ok()
            }
            2..7 => {
                let first = world.below(self.blocks);
                let new: Vec<u64> = (tag..tag + 1 + world.below(self.blocks - first)).collect();
                let (data, crcs) = buf_of(&new);
                put(&mut model.borrow_mut(), first as usize, &new);
                machine.volume.write(number * self.blocks + first, &data, &crcs).await.is_ok()
            }
            _ => true,
        }
    }

    async fn writer(&self, machine: &Machine, world: &World, number: u64) {
        let mine: Vec<usize> =
            (0..self.stripes.len()).filter(|stripe| *stripe as u64 % WRITERS == number).collect();
        let one = || mine[world.below(mine.len() as u64) as usize];
        while !self.is_over.get() && !machine.array.is_closed() {
            if !self.change(machine, world, one()).await {
                return;
            }
            if world.below(3) == 0 {
                match timeout(&machine.env, Duration::from_secs(300), machine.volume.flush()).await {
                    Some(Ok(())) => {
                        mine.iter().for_each(|stripe| settle(&mut self.stripes[*stripe].borrow_mut()))
                    }
                    Some(Err(_)) => return,
                    None => panic!("seed {}: a flush hangs: {:?}", self.seed, machine.array.report()),
                }
            }
            if world.below(4) == 0 {
                self.verify(machine, one()).await;
            }
            if world.below(3) == 0 {
                machine.env.sleep(Duration::from_micros(1 << world.below(19))).await;
            }
        }
    }

    /// The member to which something happens: above all one that is being rebuilt or brought back.
    fn victim(&self, machine: &Machine, world: &World) -> usize {
        let report = machine.array.report();
        let is_at_work = |at: &usize| {
            let member = &report.members[*at];
            member.state == "rebuilding" || member.moved_strips > 0
        };
        let at_work: Vec<usize> = (0..report.members.len()).filter(is_at_work).collect();
        match self.seed.is_multiple_of(2) && !at_work.is_empty() && world.below(3) > 0 {
            true => at_work[world.below(at_work.len() as u64) as usize],
            false => world.below(report.members.len() as u64) as usize,
        }
    }

    async fn harm(&self, machine: &Machine, world: &World) {
        let at = self.victim(machine, world);
        let is_missing = machine.array.report().members[at].state == "missing";
        let drive = machine.drives[at].as_ref();
        match (world.below(10), drive) {
            (0..5, _) if !is_missing => match machine.array.fail_member(MemberNo::new(at), "a storm").await {
                Ok(()) => add(&self.tally.given_up),
                Err(_) => add(&self.tally.refused),
            },
            (5, Some(drive)) => drive.plant(Op::Write, world.below(20), Fault::Fail),
            (6, Some(drive)) => {
                let slow = |most| Fault::Slow(Duration::from_millis(world.below(most)));
                drive.plant(Op::Write, world.below(20), slow(4000));
                drive.plant(Op::DurableWrite, world.below(5), slow(400));
            }
            (7, Some(drive)) => {
                let most = Duration::from_millis(1 + world.below(300));
                drive.set_pace(Some(Pace { one_in: 2 + world.below(50), most }));
            }
            _ if is_missing => {
                add(&self.tally.replaced);
                let (disk, life) =
                    (SimDisk::new(DISK_BYTES), 1000 + 50 * self.seed + self.tally.replaced.get());
                // Refused or not, it may be recorded in its place.
                drop(machine.replace(&disk, at, life).await);
                self.disks.borrow_mut()[at] = disk;
            }
            _ if world.below(8) == 0 => drop(machine.array.scrub().await),
            _ => {}
        }
    }

    async fn harms(&self, machine: &Machine, world: &World, rounds: u64) {
        for _ in 0..rounds {
            let most = if self.seed.is_multiple_of(2) { 17 } else { 22 };
            machine.env.sleep(Duration::from_micros(1 << world.below(most))).await;
            if machine.array.is_closed() {
                break;
            }
            self.harm(machine, world).await;
        }
        self.is_over.set(true);
    }

    /// Takes what is found for what there is from now on, if that may be.
    async fn begin(&self, machine: &Machine) {
        for (stripe, model) in self.stripes.iter().enumerate() {
            let found = self.tags(machine, stripe).await;
            let found = found.unwrap_or_else(|error| panic!("seed {}, stripe {stripe}: {error}", self.seed));
            let mut model = model.borrow_mut();
            let is_allowed = model.iter().zip(&found).all(|(may, found)| may.contains(found));
            assert!(is_allowed, "seed {}, stripe {stripe}: {found:?} of {model:?}", self.seed);
            *model = found.into_iter().map(|tag| vec![tag]).collect();
        }
    }

    /// The storm is over: all is rebuilt as far as there are places, and clean.
    async fn end(&self, machine: &Machine) {
        machine.drives.iter().flatten().for_each(|drive| drive.set_pace(None));
        let rebuilt = timeout(&machine.env, Duration::from_secs(3000), machine.array.wait_rebuilt()).await;
        assert!(rebuilt.is_some(), "seed {}: no end: {:?}", self.seed, machine.array.report());
        for stripe in 0..self.stripes.len() {
            self.verify(machine, stripe).await;
        }
        if let Ok(report) = machine.array.scrub().await {
            assert!(report.is_clean(), "seed {}: {report:?}", self.seed);
        }
    }
}

fn missing(machine: &Machine) -> Vec<usize> {
    let members = machine.array.report().members.into_iter().enumerate();
    members.filter(|(_, member)| member.state == "missing").map(|(at, _)| at).collect()
}

fn draw_spec(dice: &World) -> CreateSpec {
    let (k, m) = [(4, 2), (3, 1), (2, 2), (1, 2), (1, 1), (4, 3)][dice.below(6) as usize];
    match dice.below(5) {
        0 => spec(k, m),
        1 => CreateSpec { layout: Layout::groups(2, k + m).unwrap(), ..spec(k, m) },
        _ => {
            let spares = 1 + dice.below(3) as usize;
            spread(k, m, k + m + spares + dice.below(4) as usize, spares)
        }
    }
}

/// One storm over up to four lives of an array. Returns its events.
fn storm(seed: u64) -> Tally {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut site = Site::new(draw_spec(&dice));
    let (blocks, stripes) = ((site.spec.k * 8) as u64, [8, 24, 60][dice.below(3) as usize]);
    let storm = Storm {
        seed,
        blocks,
        stripes: (0..stripes).map(|_| RefCell::new(vec![vec![0]; blocks as usize])).collect(),
        next_tag: Cell::new(1000),
        is_over: Cell::new(false),
        disks: RefCell::new(site.disks.clone()),
        tally: Tally::default(),
    };
    let mut away: Vec<usize> = Vec::new();
    for _ in 0..1 + dice.below(4) {
        let world = World::new(dice.below(u64::MAX));
        storm.is_over.set(false);
        let cut_at = (dice.below(2) == 0).then(|| Duration::from_micros(dice.below(20_000_000)));
        let gone = RefCell::new(away.clone());
        let run = world.run(async {
            let env = world.env();
            let opened = site.open(&world, &away).await;
            let machine = opened.unwrap_or_else(|error| panic!("seed {seed}, without {away:?}: {error}"));
            storm.begin(&machine).await;
            for drive in machine.drives.iter().flatten().filter(|_| seed.is_multiple_of(2)) {
                let log = log_of(&machine.array.geometry());
                for nth in 0..40 {
                    let slow = Fault::Slow(Duration::from_micros(1 << world.below(18)));
                    drive.plant_within(Op::DurableWrite, nth * world.below(20), slow, log.clone());
                }
            }
            if let Some(at) = cut_at {
                let (pause, world) = (env.sleep(at), world.clone());
                let cut = async move {
                    pause.await;
                    world.cut();
                };
                env.spawn("cut", Box::pin(cut));
            }
            let watch = async {
                while !storm.is_over.get() && !machine.array.is_closed() {
                    *gone.borrow_mut() = missing(&machine);
                    env.sleep(Duration::from_millis(1)).await;
                }
            };
            let writers =
                futures_util::future::join_all((0..WRITERS).map(|at| storm.writer(&machine, &world, at)));
            let harms = storm.harms(&machine, &world, 10 + dice.below(60));
            let all = futures_util::future::join3(writers, harms, watch);
            let ended = timeout(&env, Duration::from_secs(7200), all).await;
            assert!(ended.is_some(), "seed {seed} hangs: {:?}", machine.array.report());
            if !machine.array.is_closed() {
                storm.end(&machine).await;
            }
            if !machine.array.is_closed() {
                *gone.borrow_mut() = missing(&machine);
            }
        });
        assert!(run.is_ok() || cut_at.is_some(), "nothing else cuts the power");
        world.destroy();
        site.disks = storm.disks.borrow().clone();
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::draw(&world)));
        // Drives that were given up stay away, or some come back.
        away = gone.into_inner();
        if dice.below(3) == 0 {
            away.retain(|_| dice.below(2) == 0);
        }
    }
    storm.tally
}

#[test]
fn a_storm_loses_nothing() {
    let all = Tally::default();
    for seed in penstock_sim::seeds(400..430).chain(penstock_sim::seeds(458..459)) {
        let tally = storm(seed);
        let both =
            [(&all.given_up, tally.given_up), (&all.refused, tally.refused), (&all.replaced, tally.replaced)];
        both.into_iter().for_each(|(all, one)| all.set(all.get() + one.get()));
    }
    let counts = [all.given_up.get(), all.refused.get(), all.replaced.get()];
    assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
}
