//! The targets of other stacks, as the metadata target asks them.
//!
//! A file whose chunks are spread over several targets has some of its blocks in stores of their own, which
//! this one's transactions do not reach. What names and sizes change there is queued work ([`crate::queue`]).

use crate::error::MetaError;
use crate::forgotten::Forgotten;
use crate::inode::{FileKind, Inode, Layout};
use crate::other_target::{HeldFile, OtherTarget};
use futures_util::future::join_all;
use penstock_base::rank::scoped;
use penstock_base::{FileId, Spread, TargetId};
use penstock_chunk::{ChunkError, Cut, SpaceUsage};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// The targets of a store besides the one of the names' own stack.
pub struct Elsewhere {
    home: TargetId,
    /// Number of targets in the map of the file system.
    count: u32,
    /// Those that serve, and for each that is forgotten one in its place.
    serving: RefCell<BTreeMap<TargetId, Rc<dyn OtherTarget>>>,
    forgotten: RefCell<BTreeSet<TargetId>>,
}

/// A file that is held on targets, by whoever changes it.
pub(crate) struct Held(Vec<(TargetId, Box<dyn HeldFile>)>);

impl Held {
    /// The targets on which it is held.
    pub(crate) fn targets(&self) -> Vec<TargetId> {
        self.0.iter().map(|(target, _)| *target).collect()
    }

    /// Notes a truncation on all targets, in the step in which it is queued: whoever carries out the queue
    /// must not find a target that does not know of it.
    pub(crate) fn owe(&self, cut: Cut) {
        assert!(!self.0.is_empty(), "a file that nobody has elsewhere is not held");
        self.0.iter().for_each(|(_, held)| held.owe(cut));
    }

    /// Has truncations carried out that are durable here. Where that fails they are owed, and nothing else is
    /// done with the file there.
    pub(crate) async fn settle(&self) -> Result<(), ChunkError> {
        join_all(self.0.iter().map(|(_, held)| scoped(held.settle()))).await.into_iter().collect()
    }
}

impl Elsewhere {
    /// The targets that serve of a store with `count` targets, of which `home` is that of the names' stack.
    ///
    /// # Panics
    /// If there are more, or `home` is among them.
    pub fn new(home: TargetId, count: u32, serving: Vec<Rc<dyn OtherTarget>>) -> Self {
        let serving: BTreeMap<_, _> = serving.into_iter().map(|target| (target.id(), target)).collect();
        let is_other = |id: &TargetId| *id != home && id.0 < count;
        assert!(home.0 < count && serving.keys().all(is_other), "{count} targets, at home {home}");
        Self { home, count, serving: RefCell::new(serving), forgotten: RefCell::default() }
    }

    /// All numbers of targets, that of the names' own stack first.
    pub(crate) fn all(&self) -> impl Iterator<Item = TargetId> {
        std::iter::once(self.home).chain(self.others())
    }

    /// The numbers of the targets of other stacks.
    pub(crate) fn others(&self) -> impl Iterator<Item = TargetId> {
        (0..self.count).map(TargetId).filter(|id| *id != self.home)
    }

    /// The target of the names' own stack.
    pub(crate) fn home(&self) -> TargetId {
        self.home
    }

    /// Number of targets.
    pub(crate) fn count(&self) -> u32 {
        self.count
    }

    /// True if the store has several targets.
    pub(crate) fn are_several(&self) -> bool {
        self.count > 1
    }

    /// The other targets that serve, and those that are forgotten.
    pub(crate) fn serving(&self) -> Vec<Rc<dyn OtherTarget>> {
        self.serving.borrow().values().cloned().collect()
    }

    /// Makes everything durable that was written to the targets that serve. One that fails does not keep the
    /// others from it.
    pub(crate) async fn commit_all(&self) -> Result<(), ChunkError> {
        let serving = self.serving();
        join_all(serving.iter().map(|target| scoped(target.commit_all()))).await.into_iter().collect()
    }

    /// A target does not serve from here on.
    pub(crate) fn retire(&self, target: TargetId) {
        assert!(self.serving.borrow_mut().remove(&target).is_some(), "target {target} served");
    }

    /// A target that does not serve is forgotten: nobody waits for it any more.
    pub(crate) fn forget(&self, target: TargetId) {
        assert!(self.is_absent(target) && target.0 < self.count, "target {target} does not serve");
        self.serving.borrow_mut().insert(target, Rc::new(Forgotten(target)));
        self.forgotten.borrow_mut().insert(target);
    }

    /// The targets that are forgotten.
    pub(crate) fn forgotten(&self) -> BTreeSet<TargetId> {
        self.forgotten.borrow().clone()
    }

    /// True if a target of another stack does not serve.
    pub(crate) fn is_absent(&self, target: TargetId) -> bool {
        target != self.home && !self.serves(target)
    }

    /// True if it is a target of another stack, and serves or is forgotten.
    pub(crate) fn serves(&self, target: TargetId) -> bool {
        self.serving.borrow().contains_key(&target)
    }

    /// Another target, if it serves or is forgotten.
    pub(crate) fn get(&self, target: TargetId) -> Option<Rc<dyn OtherTarget>> {
        self.serving.borrow().get(&target).cloned()
    }

    /// The targets of a file; none if its layout fits no map, which a check finds.
    pub(crate) fn spread_of(&self, layout: &Layout) -> Option<Spread> {
        layout.spread(self.count)
    }

    /// The other targets that may have something of a file, ascending.
    pub(crate) fn reach(&self, inode: &Inode) -> Vec<TargetId> {
        let spread = self.spread_of(&inode.layout).filter(|_| inode.is_spread);
        let mut reach: Vec<TargetId> =
            spread.iter().flat_map(Spread::all).filter(|target| *target != self.home).collect();
        reach.sort_unstable();
        assert!(inode.is_spread || reach.is_empty(), "only a spread file reaches other targets");
        reach
    }

    /// Holds a file on targets, which are in ascending order. Fails if one of them does not serve.
    pub(crate) async fn hold(&self, file: FileId, targets: &[TargetId]) -> Result<Held, MetaError> {
        assert!(targets.is_sorted_by(|one, next| one < next), "{targets:?} are acquired in ascending order");
        let mut held = Vec::new();
        for id in targets {
            let target = self.get(*id).ok_or(MetaError::Absent { target: *id })?;
            held.push((*id, target.hold(file).await));
        }
        Ok(Held(held))
    }

    /// Blocks that files hold on other targets: a number for each. What a target has that does not serve is
    /// not counted.
    pub(crate) async fn held_blocks(&self, inodes: &[&Inode]) -> Result<Vec<u64>, MetaError> {
        let mut wanted: BTreeMap<TargetId, Vec<usize>> = BTreeMap::new();
        for (at, inode) in inodes.iter().enumerate() {
            self.reach(inode).into_iter().for_each(|target| wanted.entry(target).or_default().push(at));
        }
        let mut held = vec![0; inodes.len()];
        for (target, places) in wanted {
            let Some(target) = self.get(target) else { continue };
            let files = places.iter().map(|at| FileId::main(inodes[*at].ino)).collect();
            let of_target = target.held_blocks(files).await?;
            assert_eq!(of_target.len(), places.len(), "a number for each file");
            for (at, blocks) in places.into_iter().zip(of_target) {
                held[at] += blocks;
            }
        }
        Ok(held)
    }

    /// The layout of a new inode of this kind in a directory with this one. `home` is the space of the target
    /// of the names' own stack.
    pub(crate) fn layout_of_new(&self, of_dir: &Layout, kind: FileKind, home: SpaceUsage) -> Layout {
        match kind {
            FileKind::Directory => *of_dir,
            FileKind::Regular if self.are_several() => self.place(of_dir, home),
            _ => Layout { first: self.home.0, ..Layout::of_one_target(of_dir.chunk_blocks) },
        }
    }

    /// The layout of a new file: from the target of the names' own stack on, unless that is much fuller than
    /// the others, and without targets that do not serve.
    fn place(&self, of_dir: &Layout, home: SpaceUsage) -> Layout {
        let most = u16::try_from(self.count).unwrap_or(u16::MAX);
        let wanted = if of_dir.count == 0 { most } else { of_dir.count.min(most) };
        let (serving, forgotten) = (self.serving(), self.forgotten.borrow());
        let usages: BTreeMap<TargetId, SpaceUsage> = serving
            .iter()
            .map(|target| (target.id(), target.usage()))
            .filter(|(id, _)| !forgotten.contains(id))
            .chain([(self.home, home)])
            .collect();
        let first = if is_much_fuller(home, usages.values().copied().sum()) {
            let free = |id: &TargetId| usages[id].free_blocks;
            usages.keys().copied().max_by_key(free).unwrap_or(self.home)
        } else {
            self.home
        };
        let fits = |count: u16| {
            let spread = Spread::new(first, count, of_dir.turn.max(1), self.count)?;
            spread.all().all(|id| usages.contains_key(&id)).then_some(count)
        };
        let count = (1..=wanted).rev().find_map(fits).unwrap_or(1);
        assert!((1..=most).contains(&count) && first.0 < self.count, "{count} targets from {first} on");
        Layout { first: first.0, count, turn: of_dir.turn.max(1), ..*of_dir }
    }
}

/// True if a target is more than a quarter full, and twice as full as all together.
fn is_much_fuller(one: SpaceUsage, all: SpaceUsage) -> bool {
    let used = |usage: SpaceUsage| usage.total_blocks.saturating_sub(usage.free_blocks);
    let (mine, theirs) = (u128::from(used(one)), u128::from(used(all)));
    mine * 4 > one.total_blocks.into()
        && mine * u128::from(all.total_blocks) > 2 * theirs * u128::from(one.total_blocks)
}
