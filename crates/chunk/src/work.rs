//! Work that comes from the metadata target of another stack: truncations, removals, changes of owners.
//!
//! The metadata target makes a change of names durable in its own store, together with a row that says what
//! each target has to do for it, and gives the work here after that. It may give it again, in another life of
//! the target too, as long as it has no durable answer.
//!
//! Invariants:
//! - work is carried out only after it is durable at its metadata target, so that a crash never leaves a file
//!   that lacks blocks which no change took from it;
//! - a truncation of generation c changes only rows of generations below c, so that one which comes again
//!   takes nothing that was written since;
//! - as long as a truncation of a file is owed, nothing else is done with that file.

use crate::ChunkError;
use crate::files::{Known, REMOVED};
use crate::ranks;
use crate::rows::{ChunkKey, FileRow, MapRow, Owner, decode_file_key};
use crate::target::Target;
use crate::truncate::{Behind, Chunks, Doomed};
use penstock_base::locks::{Exclusive, Shared};
use penstock_base::rank::{LockKey, RankedKey, RankedLocks};
use penstock_base::{Birth, FileId, Ino, TargetId};
use penstock_kv::{WriteSet, for_each_key};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

/// Chunks that one transaction changes at most, beside a few other rows.
const STEP_CHUNKS: usize = penstock_kv::ROWS_AT_ONCE - 16;

/// A truncation: a file reads as zeros from a block on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The truncate generation that begins with it.
    pub truncations: u64,
    /// The first block, counted from the start of the file.
    pub from: u64,
    /// The treatment of the blocks from there on.
    pub behind: Behind,
}

/// A file on a target. Whoever holds a file on several targets acquires them in ascending order.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct OnTarget {
    target: TargetId,
    file: FileId,
}

impl LockKey for OnTarget {
    fn order(&self) -> u64 {
        self.target.0.into()
    }
}

/// Keeps all requests about a file from a target, until it is dropped.
pub struct Hold {
    key: OnTarget,
    _one: RankedKey<Exclusive<OnTarget>>,
}

/// Keeps truncations of a file waiting, while a request about it is executed.
pub(crate) struct Turn {
    _shared: RankedKey<Shared<OnTarget>>,
}

/// The work that another stack has for a target, and the requests that wait for it.
pub struct TargetWork {
    target: Rc<Target>,
    turns: RankedLocks<OnTarget>,
    /// Truncations that are not carried out, in the order of their generations.
    cuts: RefCell<BTreeMap<FileId, Vec<Cut>>>,
}

impl TargetWork {
    /// No work for a target.
    pub fn new(target: &Rc<Target>) -> Rc<Self> {
        let turns = RankedLocks::new(ranks::TURN);
        Rc::new(Self { target: target.clone(), turns, cuts: RefCell::default() })
    }

    /// The target.
    pub fn target(&self) -> &Rc<Target> {
        &self.target
    }

    fn key(&self, file: FileId) -> OnTarget {
        OnTarget { target: self.target.config.id, file }
    }

    fn owes(&self, file: FileId) -> bool {
        self.cuts.borrow().contains_key(&file)
    }

    fn first(&self, file: FileId) -> Option<Cut> {
        self.cuts.borrow().get(&file)?.first().copied()
    }

    fn done(&self, file: FileId, cut: Cut) {
        let mut cuts = self.cuts.borrow_mut();
        let of_file = cuts.get_mut(&file).expect("a truncation that was carried out was owed");
        let before = of_file.len();
        of_file.retain(|other| *other != cut);
        assert_eq!(of_file.len() + 1, before, "{cut:?} was owed once");
        if of_file.is_empty() {
            cuts.remove(&file);
        }
    }

    /// Waits for the requests about a file that are executed, and keeps others away until the result is
    /// dropped.
    pub async fn hold(&self, file: FileId) -> Hold {
        let key = self.key(file);
        Hold { key, _one: self.turns.exclusive(key).await }
    }

    /// Waits for the turn of a request about a file. What the file owes is carried out before.
    pub(crate) async fn turn(&self, file: FileId) -> Result<Turn, ChunkError> {
        loop {
            let shared = self.turns.shared(self.key(file)).await;
            if !self.owes(file) {
                return Ok(Turn { _shared: shared });
            }
            drop(shared);
            let hold = self.hold(file).await;
            self.settle(file, &hold).await?;
        }
    }

    /// Notes a truncation that is durable at its metadata target. It is carried out before anything else is
    /// done with the file.
    pub fn owe(&self, file: FileId, cut: Cut) {
        assert!(cut.truncations > 0 && cut.truncations < REMOVED, "{cut:?} begins a truncate generation");
        let mut cuts = self.cuts.borrow_mut();
        let of_file = cuts.entry(file).or_default();
        if !of_file.contains(&cut) {
            of_file.push(cut);
            of_file.sort_by_key(|cut| cut.truncations);
        }
    }

    /// Carries out what a file owes, if it owes anything.
    pub async fn finish(&self, file: FileId) -> Result<(), ChunkError> {
        match self.owes(file) {
            true => self.settle(file, &self.hold(file).await).await,
            false => Ok(()),
        }
    }

    /// Carries out what a file owes. What fails is owed further.
    pub async fn settle(&self, file: FileId, hold: &Hold) -> Result<(), ChunkError> {
        assert!(hold.key == self.key(file), "nothing else is done with the file meanwhile");
        while let Some(cut) = self.first(file) {
            self.cut(file, cut).await?;
            self.done(file, cut);
        }
        assert!(!self.owes(file), "it is held");
        Ok(())
    }

    /// Carries out one truncation, in steps from the end of the file.
    async fn cut(&self, file: FileId, cut: Cut) -> Result<(), ChunkError> {
        let per_chunk = u64::from(self.target.config.chunk_blocks);
        let state = self.target.cache.file(file).await?;
        let mut stale = Vec::new();
        for key in self.target.cache.keys_within(file, cut.from / per_chunk..u64::MAX).await? {
            // One that was changed in this life was changed before the truncation: nothing else is done with
            // the file while that is owed.
            let is_changed = self.target.cache.peek(key).is_some_and(|chunk| !chunk.borrow().is_clean());
            let is_older = match self.generation_of(key).await? {
                Some(generation) => generation < cut.truncations,
                // Its first row may be on its way. A hole that was only read has none, and nothing to cut.
                None => self.target.cache.peek(key).is_some_and(|chunk| !chunk.borrow().map().is_empty()),
            };
            if is_changed || is_older {
                stale.push(key);
            }
        }
        let begins = |key: &ChunkKey| key.index >= cut.from / per_chunk;
        assert!(stale.iter().all(begins), "chunks behind block {} are cut", cut.from);
        if stale.is_empty() && state.row().is_none() {
            // Nothing of the file is here. Whoever writes to it next brings the generation along.
            state.truncate(cut.truncations);
            return Ok(());
        }
        loop {
            let rest = stale.len().saturating_sub(STEP_CHUNKS);
            let step: BTreeSet<ChunkKey> = stale.split_off(rest).into_iter().collect();
            assert!(step.len() <= STEP_CHUNKS && stale.len() == rest, "a step fits into a transaction");
            // Rows that are written before the last step are of the generation before: this cut, if it comes
            // again after a crash, finds them.
            let truncations = if stale.is_empty() { cut.truncations } else { state.truncations() };
            let known = Known { truncations, owner: state.owner().unwrap_or_default() };
            let doomed = Doomed { from: cut.from, chunks: Chunks::These(step) };
            self.target.truncate_doomed(file, doomed, cut.behind, known, WriteSet::new()).await?;
            if stale.is_empty() {
                assert!(state.truncations() >= cut.truncations, "writes of earlier generations are rejected");
                return Ok(());
            }
        }
    }

    /// The truncate generation of the row of a chunk; none if it has none.
    async fn generation_of(&self, key: ChunkKey) -> Result<Option<u64>, ChunkError> {
        let row = self.target.kv.get(key.row(Birth::FIRST)).await?;
        Ok(row.map(|row| MapRow::decode(&row, Birth::FIRST)).transpose()?.map(|row| row.truncations))
    }

    /// Drops all that the target has of a file whose inode is gone. Nobody uses it, and nobody will.
    pub async fn remove(&self, file: FileId) -> Result<(), ChunkError> {
        let _hold = self.hold(file).await;
        let state = self.target.cache.file(file).await?;
        let owner = state.owner().unwrap_or_default();
        let known = Known { truncations: REMOVED, owner };
        for stop in self.target.truncate_steps(file, 0, STEP_CHUNKS).await? {
            self.target.truncate(file, stop..u64::MAX, Behind::Dropped, known, WriteSet::new()).await?;
        }
        self.target.truncate(file, 0..u64::MAX, Behind::Dropped, known, WriteSet::new()).await?;
        self.cuts.borrow_mut().remove(&file);
        self.target.file_removed(file);
        assert!(!self.owes(file), "a file that is gone owes nothing");
        Ok(())
    }

    /// Counts what the target has of a file to another owner, unless it knows of a later change.
    pub async fn set_owner_as_of(&self, file: FileId, owner: Owner, number: u64) -> Result<(), ChunkError> {
        // A truncation carries the owner along.
        let hold = self.hold(file).await;
        self.settle(file, &hold).await?;
        let _changing = self.target.gate.change().await;
        let _lock = self.target.commits.lock(file).await;
        let state = self.target.cache.file(file).await?;
        let Some(before) = state.set_owner_as_of(owner, number) else { return Ok(()) };
        let result = self.target.commits.commit_rows(file, &state, Vec::new(), WriteSet::new()).await;
        if result.is_err() {
            state.undo_owner_as_of(before);
        }
        result
    }

    /// Inodes from the first one on of which rows say that something is here.
    pub async fn inodes_from(&self, first: Ino, end: Ino) -> Result<BTreeSet<Ino>, ChunkError> {
        let key = |ino| FileRow::key(FileId::main(ino), Birth::FIRST);
        let mut found = BTreeSet::new();
        for_each_key(&*self.target.kv, (key(first), key(end)), |key| {
            found.extend(decode_file_key(key).map(|(file, _)| file.ino));
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok(found)
    }
}

#[cfg(test)]
mod tests;
