//! Random lives with more damage than the code survives: rot, unreadable blocks, lost and replaced drives and
//! power cuts, in stripes that are written, destaged, discarded and repaired meanwhile.
//!
//! `PENSTOCK_SEEDS=A..B` replaces the few default seeds.
//!
//! A block may be unreadable. One that is read is what somebody wrote there since the last flush, or the
//! flushed contents, and is whole.
//!
//! In other lives nothing rots: blocks cannot be read, or are read wrong, for some time only, also while
//! drives are lost. Then every block can be read in the end, and again without as many drives as the code
//! survives. A drive is lost only after a clean scrub: one that could not make a block has no redundancy
//! there.

use crate::bench::{DISK_BYTES, IO, Machine, NOISE, SLICE_AT, Site, block_of, buf_of, spec, spread};
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, ArrayState, Discard, Lacking};
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Stripe};
use penstock_sim::{CutMode, SimDisk, World};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

const STRIPES: u64 = 6;
const LIVES: u64 = 6;
/// Time limit of a call; what it would have done may happen later.
const LIMIT: Duration = Duration::from_secs(120);
/// The longest time for which something is bad for a moment.
const MOMENT: Duration = Duration::from_secs(100);
/// Longer than any read takes.
const LONG: Duration = Duration::from_secs(300);
/// No tag: nobody knows what a block has.
const UNKNOWN: u64 = u64::MAX;

/// The tags that each block may have, and the one that was written last.
struct Model {
    may: Vec<BTreeSet<u64>>,
    last: Vec<u64>,
    next_tag: u64,
}

impl Model {
    fn new(blocks: u64) -> Self {
        let blocks = blocks as usize;
        Self { may: vec![BTreeSet::from([0]); blocks], last: vec![0; blocks], next_tag: 1 }
    }

    /// Tags for so many blocks from `block` on, which may have them from now on.
    fn begin(&mut self, block: u64, count: u64) -> Vec<u64> {
        let tags: Vec<u64> = (self.next_tag..self.next_tag + count).collect();
        self.next_tag += count;
        for (at, tag) in (block as usize..).zip(&tags) {
            self.may[at].insert(*tag);
            self.last[at] = *tag;
        }
        tags
    }

    /// A write of these blocks was refused, or did not end.
    fn lose_track(&mut self, block: u64, count: u64) {
        (block as usize..).take(count as usize).for_each(|at| self.last[at] = UNKNOWN);
    }

    fn flushed(&mut self) {
        for (may, last) in self.may.iter_mut().zip(&self.last) {
            if may.contains(last) {
                *may = BTreeSet::from([*last]);
            }
        }
    }

    /// Reads a block. Returns its tag if it can be read.
    async fn read(&self, machine: &Machine, block: u64, what: &str) -> Option<u64> {
        let read = timeout(&machine.env, LONG, machine.volume.read(block, 1, IO)).await;
        let read = read.unwrap_or_else(|| panic!("{what}: a read of block {block} does not end"));
        let bytes = read.ok()?.gather();
        let tag = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let may = &self.may[block as usize];
        assert!(bytes[..] == block_of(tag)[..], "{what}: block {block} is not whole");
        assert!(may.contains(&tag), "{what}: block {block} is {tag}, not one of {may:?}");
        Some(tag)
    }

    /// Reads all blocks after a start. Returns how many can be read.
    async fn read_all(&mut self, machine: &Machine, what: &str) -> u64 {
        let mut good = 0;
        for block in 0..self.may.len() as u64 {
            let at = block as usize;
            self.last[at] = match self.read(machine, block, what).await {
                Some(tag) => {
                    self.may[at] = BTreeSet::from([tag]);
                    good += 1;
                    tag
                }
                None => UNKNOWN,
            };
        }
        good
    }
}

/// The damage that a life suffers, beside lost drives and power cuts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Damage {
    /// Blocks rot, or cannot be read.
    Lasting,
    /// Blocks cannot be read, or are read wrong, until that passes.
    Momentary,
}

/// One life of the drives of a site.
struct Life<'a> {
    machine: &'a Machine,
    dice: &'a World,
    model: &'a mut Model,
    damage: Damage,
    /// Drives that may be lost at the same time.
    m: u64,
    /// Blocks of a stripe.
    per: u64,
    /// Drives that were put in this life.
    new: Vec<(usize, Rc<SimDisk>)>,
    /// The time since which something is bad for a moment.
    bad_since: Option<Duration>,
}

impl Life<'_> {
    async fn within<T>(&self, work: impl Future<Output = Result<T, ArrayError>>) -> Option<T> {
        timeout(&self.machine.env, LIMIT, work).await?.ok()
    }

    /// Returns false if a write does not end: the life is over.
    async fn step(&mut self, next_drive: &mut u64, what: &str) -> bool {
        let (machine, dice) = (self.machine, self.dice);
        self.end_moment();
        match dice.below(20) {
            0..=6 => {
                let count = 1 + dice.below(5);
                let block = dice.below(STRIPES * self.per - count + 1);
                let (data, crcs) = buf_of(&self.model.begin(block, count));
                match timeout(&machine.env, LIMIT, machine.volume.write(block, &data, &crcs)).await {
                    Some(Ok(())) => {}
                    Some(Err(_)) => self.model.lose_track(block, count),
                    None => {
                        self.model.lose_track(block, count);
                        return false;
                    }
                }
            }
            7 => {
                if self.within(machine.volume.flush()).await.is_some() {
                    self.model.flushed();
                }
            }
            8 | 9 => drop(self.within(machine.array.destage_and_checkpoint()).await),
            10 => drop(self.within(machine.array.scrub()).await),
            11 if self.may_lose_drives().await => {
                let member = MemberNo::new(dice.below(machine.disks.len() as u64) as usize);
                self.within(machine.array.fail_member(member, "a test")).await;
            }
            12 => return self.replace(next_drive).await,
            13 => {
                let longest = if self.damage == Damage::Momentary { MOMENT / 2 } else { 2 * MOMENT };
                let sleep = dice.below(longest.as_millis() as u64);
                machine.env.sleep(Duration::from_millis(sleep)).await;
            }
            14..=16 => self.rot().await,
            17 => self.set_readable(),
            18 => self.write_anew().await,
            11 => {}
            _ => drop(self.model.read(machine, dice.below(STRIPES * self.per), what).await),
        }
        true
    }

    /// True if the loss of a drive costs nothing.
    async fn may_lose_drives(&self) -> bool {
        match self.damage {
            Damage::Lasting => true,
            Damage::Momentary => {
                let found = self.within(self.machine.array.scrub()).await;
                let members = self.machine.array.report().members;
                let lost = members.iter().filter(|member| member.state != "active").count();
                found.is_some_and(|found| found.is_clean()) && (lost as u64) < self.m
            }
        }
    }

    /// Puts a blank drive into the place of a lost one. Returns false if that does not end.
    async fn replace(&mut self, next_drive: &mut u64) -> bool {
        let members = self.machine.array.report().members;
        let gone: Vec<usize> = (0..members.len()).filter(|at| members[*at].state == "missing").collect();
        if gone.is_empty() {
            return true;
        }
        let (at, new) = (gone[self.dice.below(gone.len() as u64) as usize], SimDisk::new(DISK_BYTES));
        *next_drive += 1;
        match timeout(&self.machine.env, LIMIT, self.machine.replace(&new, at, *next_drive)).await {
            Some(Ok(())) => self.new.push((at, new)),
            Some(Err(_)) => {}
            // Nobody knows which of the two is the member.
            None => return false,
        }
        true
    }

    fn set_readable(&mut self) {
        self.machine.drives.iter().flatten().for_each(|drive| drive.set_readable());
        self.bad_since = None;
    }

    /// Makes all that is bad for a moment good again before it counts as lost, after three minutes.
    fn end_moment(&mut self) {
        let is_over = |since| self.machine.env.now() > since + MOMENT;
        if self.damage == Damage::Momentary && self.bad_since.is_some_and(is_over) {
            self.set_readable();
        }
    }

    /// A block or a trailer of a stripe rots, cannot be read, or is read wrong.
    async fn rot(&mut self) {
        let (machine, dice) = (self.machine, self.dice);
        let stripe = Stripe(dice.below(STRIPES));
        let Some(places) = self.within(machine.array.places(stripe)).await else { return };
        let place = places[dice.below(places.len() as u64) as usize];
        let (at, geometry) = (place.member.index(), machine.array.geometry());
        let column = dice.below(u64::from(geometry.strip_blocks) + 1);
        let byte = SLICE_AT + geometry.block_at(place.row, 0) + column * BLOCK_BYTES as u64;
        let bytes = byte..byte + BLOCK_BYTES as u64;
        self.bad_since.get_or_insert(machine.env.now());
        match (dice.below(2), self.damage, &machine.drives[at]) {
            (0, Damage::Lasting, _) => {
                let new = self.new.iter().rev().find(|new| new.0 == at).map(|new| &new.1);
                new.unwrap_or(&machine.disks[at]).corrupt(byte / BLOCK_BYTES as u64, &NOISE);
            }
            (0, Damage::Momentary, Some(drive)) => drive.set_wrong(bytes),
            (_, _, Some(drive)) => drive.set_unreadable(bytes),
            (_, _, None) => {}
        }
    }

    /// Discards a stripe, and writes all of it, past the log or through it.
    async fn write_anew(&mut self) {
        let (volume, stripe) = (&self.machine.volume, self.dice.below(STRIPES));
        let first = stripe * self.per;
        for at in first..first + self.per {
            self.model.may[at as usize].insert(0);
        }
        self.model.lose_track(first, self.per);
        match self.within(volume.discard(stripe, 1, Discard::InTable)).await {
            Some(left) if left.is_empty() => {}
            _ => return,
        }
        for at in first..first + self.per {
            self.model.may[at as usize] = BTreeSet::from([0]);
        }
        let (data, crcs) = buf_of(&self.model.begin(first, self.per));
        let written = match self.dice.below(2) {
            0 => self.within(volume.write_fresh(stripe, &data, &crcs, IO)).await,
            _ => self.within(volume.write(first, &data, &crcs)).await,
        };
        if written.is_none() {
            self.model.lose_track(first, self.per);
        }
    }
}

/// The sum of what the lives of all seeds had.
#[derive(Default)]
struct Seen {
    /// Blocks that could be read at the starts.
    good: u64,
    /// Seeds of which every block was read in the end.
    whole: u64,
}

fn lives(seed: u64, damage: Damage, seen: &mut Seen) {
    let dice = World::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 5);
    let (mut site, m, per) = match dice.below(3) {
        0 => (Site::new(spec(4, 2)), 2, 32),
        1 => (Site::new(spread(4, 2, 9, 2)), 2, 32),
        _ => (Site::new(spread(2, 1, 6, 1)), 1, 16),
    };
    let mut model = Model::new(STRIPES * per);
    let (mut next_drive, mut away, mut is_known) = (100, Vec::new(), true);
    // Whatever was lost before is whole again.
    let mut may_be_away = true;
    for number in 0..LIVES {
        let world = World::new(seed * 100 + number);
        let what = format!("seed {seed}, life {number}, without {away:?}");
        let mut new = Vec::new();
        let opened = world.run(async {
            // A start may be refused for what is away or damaged.
            let Ok(machine) = site.open(&world, &away).await else { return false };
            seen.good += model.read_all(&machine, &what).await;
            let (machine, dice, model) = (&machine, &dice, &mut model);
            let mut life = Life { machine, dice, model, damage, m, per, new: Vec::new(), bad_since: None };
            for _ in 0..30 + dice.below(60) {
                if !life.step(&mut next_drive, &what).await {
                    is_known = false;
                    break;
                }
            }
            may_be_away = life.may_lose_drives().await && machine.array.report().state == ArrayState::Ok;
            new = std::mem::take(&mut life.new);
            if dice.below(3) == 0 {
                let _ = timeout(&machine.env, 60 * LIMIT, machine.array.close()).await;
            }
            true
        });
        world.destroy();
        new.into_iter().for_each(|(at, disk)| site.disks[at] = disk);
        site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::draw(&dice)));
        away = match opened.expect("nobody cuts the power before") && may_be_away {
            true => (0..dice.below(m + 1)).map(|_| dice.below(site.disks.len() as u64) as usize).collect(),
            false => Vec::new(),
        };
        match damage {
            Damage::Lasting if number == 2 && dice.below(2) == 0 => site.lacking = Lacking::Accept,
            Damage::Momentary if !is_known => return,
            _ => {}
        }
    }
    if damage == Damage::Momentary {
        ends_whole(seed, &site, &mut model, m as usize, &dice);
        seen.whole += 1;
    }
}

/// Every block can be read as soon as nothing is away or bad, and the array has all its redundancy again.
fn ends_whole(seed: u64, site: &Site, model: &mut Model, m: usize, dice: &World) {
    let members = site.disks.len();
    let first = dice.below(members as u64) as usize;
    let without: Vec<usize> = (0..m).map(|nth| (first + nth * 2) % members).collect();
    for (number, lost) in [(0, &[][..]), (1, &without)] {
        let what = format!("seed {seed}, in the end, without {lost:?}");
        let world = World::new(seed * 100 + 50 + number);
        let run = world.run(async {
            let machine = site.open(&world, lost).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            let good = model.read_all(&machine, &what).await;
            assert_eq!(good, model.may.len() as u64, "{what}: blocks that can be read");
            if lost.is_empty() {
                machine.array.scrub().await.unwrap();
                let rebuilt = timeout(&machine.env, 60 * LIMIT, machine.array.wait_rebuilt()).await;
                assert_eq!(rebuilt, Some(0), "{what}: stripes without redundancy after a rebuild");
                let (state, listed) = (machine.array.report().state, machine.array.unreadable_stripes());
                assert_eq!((state, listed), (ArrayState::Ok, vec![]), "{what}");
                machine.array.close().await.unwrap();
            }
        });
        run.unwrap_or_else(|error| panic!("{what}: {error:?}"));
        world.destroy();
    }
}

#[test]
fn campaign_of_rotten_lives() {
    let mut seen = Seen::default();
    penstock_sim::seeds(0..12).for_each(|seed| lives(seed, Damage::Lasting, &mut seen));
    assert!(seen.good > 0, "something can be read");
}

/// Regression: a rebuild marked good blocks of drives that were away, a trailer that could not be read for a
/// moment lost a stripe, and a scrub wrote zeros over what it could not judge.
#[test]
fn campaign_of_lives_with_momentary_errors() {
    let mut seen = Seen::default();
    penstock_sim::seeds(0..12).for_each(|seed| lives(seed, Damage::Momentary, &mut seen));
    assert!(seen.whole > 0, "most seeds come to their end");
}
