//! Drive faults that a seed of the campaign causes, within what m redundant strips survive.
//!
//! There are two ways, which share a budget of m. *Unlucky* drives are chosen first, and anything may happen
//! to them: they are missing, fail, are silent, lose, tear, misdirect or damage writes, rot, return blank or
//! in an old state. *Spread* damage may happen to all other drives, but is counted in stripes: the drives are
//! divided into zones, at the same places on each, and in each zone only some drives are damaged. A zone
//! begins with a margin that is never damaged. The margin is longer than a strip with its trailer, a log
//! record or a copy of a superblock, so none of these is damaged in two zones. Any drive may have a full
//! host, be slow or stand still with a pause of the whole machine. Unlucky drives may be so slow that their
//! writes reach the drive after the caller gave up.

use crate::machine::{Opened, Planned, Site, path};
use penstock_array::ArrayError;
use penstock_base::BLOCK_BYTES;
use penstock_base::env::Runtime;
use penstock_drive::{Fault, FaultyDrive, Op, Pace};
use penstock_node::StartError;
use penstock_sim::{SimDisk, World};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
const ZONE_BLOCKS: u64 = 64;
const MARGIN_BLOCKS: u64 = 20;
/// Faults begin within this time of a life, in microseconds.
const SOON_US: u64 = 20_000_000;

/// The drive faults of one seed.
pub struct Mischief {
    dice: World,
    seed: u64,
    drives: u64,
    /// Paths of the drives to which anything may happen, and of the drives that replaced them.
    pub unlucky: Vec<String>,
    /// True if worse can happen to them than to be missing.
    vicious: bool,
    /// True if they may also return or store other contents than were written, without an error. If false,
    /// scrubs and checks must find nothing wrong in the end.
    lies: bool,
    /// Number of other drives that may be damaged in each zone.
    spread: u64,
    full_hosts: bool,
    /// Copies of unlucky drives in an older state.
    old: BTreeMap<String, Rc<SimDisk>>,
    /// True if contents may be wrong without an error.
    pub silent: bool,
    /// Number of times that each fault occurred, for the statistics of the seed.
    pub done: BTreeMap<&'static str, u64>,
}

/// The blocks of a zone that may be damaged.
fn core(zone: u64) -> Range<u64> {
    let start = zone * ZONE_BLOCKS;
    start + MARGIN_BLOCKS..start + ZONE_BLOCKS
}

fn bytes(blocks: Range<u64>) -> Range<u64> {
    blocks.start * BLOCK..blocks.end * BLOCK
}

impl Mischief {
    /// Draws the faults for a store of `drives` drives, of which `most` may be faulty at a time without any
    /// loss.
    pub fn new(seed: u64, drives: u64, most: u64) -> Self {
        let dice = World::new(seed.wrapping_mul(0x6c62_272e_07bb_0142) ^ 0x55);
        // A quarter of the seeds has power cuts and missing drives only.
        let (vicious, spreads) = (dice.below(4) > 0, dice.below(4) > 1);
        let mut unlucky: Vec<String> =
            (0..dice.below(most + 1)).map(|_| path(dice.below(drives) as usize)).collect();
        unlucky.sort();
        unlucky.dedup();
        let lies = World::new(seed.wrapping_mul(0x2545_f491_4f6c_dd1d) ^ 0x11e5).below(3) > 0;
        let left = most - unlucky.len() as u64;
        let spread = if vicious && spreads && lies { left } else { 0 };
        let full_hosts = vicious && dice.below(2) == 0;
        let done = BTreeMap::new();
        let (old, silent) = (BTreeMap::new(), false);
        Self { dice, seed, drives, unlucky, vicious, lies, spread, full_hosts, old, silent, done }
    }

    fn chance(&self, one_in: u64) -> bool {
        self.dice.below(one_in) == 0
    }

    /// From a microsecond to beyond every deadline, each doubling as likely as the next.
    fn long_or_short(&self) -> Duration {
        Duration::from_micros(1 << self.dice.below(27))
    }

    fn did(&mut self, what: &'static str) {
        *self.done.entry(what).or_default() += 1;
    }

    /// Drives that may be damaged in a zone.
    fn victims(&self, zone: u64) -> BTreeSet<String> {
        let dice = World::new(self.seed.wrapping_mul(0x9e37_79b9).wrapping_add(zone << 32 | 1));
        let mut victims = BTreeSet::new();
        let sound: Vec<String> =
            (0..self.drives as usize).map(path).filter(|path| !self.unlucky.contains(path)).collect();
        while (victims.len() as u64) < self.spread {
            victims.insert(sound[dice.below(sound.len() as u64) as usize].clone());
        }
        victims
    }

    /// Plans the faults of one life.
    pub fn plan(&mut self, site: &Site) {
        site.plans.borrow_mut().clear();
        if !self.vicious {
            return;
        }
        for path in self.unlucky.clone() {
            for _ in 0..self.dice.below(4) {
                self.plan_one(site, &path, 0..site.disk_bytes(), true);
            }
        }
        for _ in 0..self.dice.below(8) * self.spread {
            let zone = self.some_used_zone(site);
            for path in self.victims(zone) {
                self.plan_one(site, &path, bytes(core(zone)), false);
            }
        }
        // Slow, but within the deadline: no damage, for any number of drives.
        let slow = path(self.dice.below(self.drives) as usize);
        let period = Fault::Slow(Duration::from_millis(self.dice.below(8000)));
        self.add(site, &slow, Op::Write, period, 0..u64::MAX);
    }

    fn plan_one(&mut self, site: &Site, path: &str, within: Range<u64>, whole: bool) {
        let sectors = 1 + self.dice.below(12) as usize;
        let blocks = 1 + self.dice.below(200);
        let drawn = match (whole, self.lies) {
            (true, true) => self.dice.below(16),
            (true, false) => 5 + self.dice.below(11),
            (false, _) => self.dice.below(5),
        };
        let (op, fault) = match drawn {
            0 => (Op::Write, Fault::Torn { sectors }),
            1 => (Op::Write, Fault::Misdirected { blocks }),
            2 => (Op::Write, Fault::Dropped),
            3 => (Op::Write, Fault::Rotten),
            4 => (Op::Read, Fault::Rotten),
            5 => (Op::Read, Fault::Fail),
            6 => (Op::Write, Fault::Fail),
            7 => (Op::Flush, Fault::Fail),
            8 => (Op::Read, Fault::Silent),
            9 => (Op::Write, Fault::Silent),
            10 => (Op::Flush, Fault::Silent),
            12 => (Op::Flush, Fault::FailToldLate(self.long_or_short())),
            13 => (Op::DurableWrite, Fault::FailToldLate(self.long_or_short())),
            14 => (Op::DurableWrite, Fault::SlowFail(self.long_or_short())),
            // Some take longer than their deadline: their writes reach the drive after the caller gave up.
            11 => (Op::Write, Fault::Slow(Duration::from_millis(self.dice.below(60_000)))),
            _ => (Op::Flush, Fault::Slow(Duration::from_millis(self.dice.below(60_000)))),
        };
        self.add(site, path, op, fault, within);
    }

    fn add(&mut self, site: &Site, path: &str, op: Op, fault: Fault, within: Range<u64>) {
        use Fault::{Dropped, Misdirected, Rotten, Torn};
        self.silent |= matches!(fault, Torn { .. } | Misdirected { .. } | Dropped | Rotten);
        // A zone sees few I/Os.
        let few = within.end - within.start < site.disk_bytes();
        let most = match op {
            Op::Write if !few => [20, 300][self.dice.below(2) as usize],
            Op::Read | Op::Flush if !few => [5, 70][self.dice.below(2) as usize],
            _ => 4,
        };
        let plan = Planned { op, nth: self.dice.below(most), fault, within };
        site.plans.borrow_mut().entry(path.to_owned()).or_default().push(plan);
    }

    /// A zone with contents: others have nothing to lose.
    fn some_used_zone(&self, site: &Site) -> u64 {
        let disks = site.disks.borrow();
        let used = disks[&path(self.dice.below(self.drives) as usize)].used_blocks();
        let blocks = site.disk_bytes() / BLOCK;
        let block = match used.is_empty() || self.chance(4) {
            true => self.dice.below(blocks),
            false => used[self.dice.below(used.len() as u64) as usize],
        };
        block / ZONE_BLOCKS
    }

    /// Starts the tasks that remove drives during a life, and that make hosts full for a while.
    pub fn spawn(&mut self, site: &Site, world: &World, opened: &Opened) {
        let soon = |dice: &World| Duration::from_micros(dice.below(SOON_US));
        let gone =
            self.unlucky.iter().filter(|_| self.vicious && self.chance(6)).cloned().collect::<Vec<_>>();
        for path in gone {
            self.did("gone");
            let (pause, opened) = (world.sleep(soon(&self.dice)), opened.clone());
            let leave = async move {
                pause.await;
                opened.borrow().get(&path).inspect(|drive| drive.set_gone(true));
            };
            world.spawn("gone", Box::pin(leave));
        }
        let uneven =
            self.unlucky.iter().filter(|_| self.vicious && self.chance(4)).cloned().collect::<Vec<_>>();
        for path in uneven {
            self.did("uneven");
            let (pause, opened) = (world.sleep(soon(&self.dice)), opened.clone());
            let one_in = 2 + self.dice.below(200);
            let pace = Pace { one_in, most: Duration::from_secs(1 + self.dice.below(90)) };
            let slow = async move {
                pause.await;
                opened.borrow().get(&path).inspect(|drive| drive.set_pace(Some(pace)));
            };
            world.spawn("uneven", Box::pin(slow));
        }
        if self.vicious && self.chance(6) {
            self.did("pause");
            let (pause, clock) = (world.sleep(soon(&self.dice)), world.clone());
            let long = Duration::from_secs(self.dice.below(120));
            let stand = async move {
                pause.await;
                clock.pause(long);
            };
            world.spawn("pause", Box::pin(stand));
        }
        if self.full_hosts && self.chance(2) {
            self.did("full");
            let disks: Vec<Rc<SimDisk>> = site.disks.borrow().values().cloned().collect();
            let (begin, period) = (soon(&self.dice), soon(&self.dice));
            let clock = world.clone();
            let fill = async move {
                clock.sleep(begin).await;
                disks.iter().for_each(|disk| disk.set_full(true));
                clock.sleep(period).await;
                disks.iter().for_each(|disk| disk.set_full(false));
            };
            world.spawn("full", Box::pin(fill));
        }
    }

    /// Checks the result of a stop. It must succeed, unless a host is full for too long: then the store
    /// reports that, and stops without making everything durable.
    pub fn stopped(&self, result: Result<(), StartError>) {
        match result {
            Err(StartError::Array(ArrayError::Suspended(why))) if self.full_hosts && why == "host full" => {}
            result => result.unwrap(),
        }
    }

    /// Between two lives: counts the faults that occurred, and damages contents of the drives.
    pub fn rest(&mut self, site: &Site, opened: &Opened, planned: usize) {
        let waiting: usize = opened.borrow().values().map(|drive: &Rc<FaultyDrive>| drive.waiting()).sum();
        let unopened: usize = site.plans.borrow().values().map(Vec::len).sum();
        *self.done.entry("faults").or_default() += planned.saturating_sub(waiting + unopened) as u64;
        site.disks.borrow().values().for_each(|disk| disk.set_full(false));
        if !self.vicious {
            return;
        }
        for path in self.unlucky.clone() {
            let disk = site.disks.borrow()[&path].clone();
            match self.dice.below(10) {
                0 => drop(self.old.insert(path, disk.duplicate())),
                1 if self.lies && self.old.contains_key(&path) => {
                    self.did("old");
                    self.silent = true;
                    let old = self.old[&path].duplicate();
                    site.disks.borrow_mut().insert(path, old);
                }
                2 => {
                    self.did("blank");
                    site.disks.borrow_mut().insert(path, SimDisk::new(site.disk_bytes()));
                }
                3..=4 if self.lies => self.rot(&disk, |_| true),
                _ => {}
            }
        }
        if self.spread > 0 && self.chance(2) {
            for number in 0..self.drives as usize {
                let disk = site.disks.borrow()[&path(number)].clone();
                let mine: BTreeSet<u64> = (0..site.disk_bytes() / BLOCK / ZONE_BLOCKS)
                    .filter(|zone| self.victims(*zone).contains(&path(number)))
                    .collect();
                self.rot(&disk, |block| {
                    let zone = block / ZONE_BLOCKS;
                    mine.contains(&zone) && core(zone).contains(&block)
                });
            }
        }
    }

    /// Overwrites or changes some blocks that have contents.
    fn rot(&mut self, disk: &SimDisk, may: impl Fn(u64) -> bool) {
        let blocks: Vec<u64> = disk.used_blocks().into_iter().filter(|block| may(*block)).collect();
        if blocks.is_empty() {
            return;
        }
        for _ in 0..1 + self.dice.below(12) {
            let block = blocks[self.dice.below(blocks.len() as u64) as usize];
            let mut contents = disk.peek(block).to_vec();
            match self.dice.below(3) {
                0 => contents[self.dice.below(BLOCK) as usize] ^= 1 << self.dice.below(8),
                1 => contents.fill(0),
                _ => contents.fill_with(|| self.dice.random() as u8),
            }
            disk.corrupt(block, &contents);
            self.silent = true;
            self.did("rot");
        }
    }
}
