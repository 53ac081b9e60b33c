//! The volume of a target together with the loans that it has on volumes of others, as one row of blocks and
//! stripes ([`Groups`]).
//!
//! Invariant: what was written to the volume of a lender for a file is known here until it was flushed there.
//! So a commit of the file flushes exactly the lenders that it needs, and one that fails keeps no other file
//! from being committed.

use crate::ChunkError;
use crate::free::{Groups, Run};
use crate::rows::Borrowed;
use penstock_array::{Array, ArrayError, Blocks, Discard, Volume};
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, FileId, TargetId};
use penstock_drive::Io;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

/// The place of a loan.
struct Place {
    lender: TargetId,
    /// The first stripe on the lender's volume.
    stripe: u64,
    stripes: u64,
    /// The lender serves, and knows of the loan.
    is_there: bool,
}

/// The volume of a target, and its loans.
pub(crate) struct Volumes {
    own: Volume,
    groups: Rc<Cell<Groups>>,
    loans: RefCell<BTreeMap<u64, Place>>,
    /// The volumes of lenders that serve.
    lenders: RefCell<BTreeMap<TargetId, Volume>>,
    /// Lenders whose arrays were found closed.
    lost: RefCell<BTreeSet<TargetId>>,
    /// By file, the lenders to whose volumes was written for it, each with the number of the last write. Only
    /// a flush that began after that write takes it out, when it is done.
    written: RefCell<BTreeMap<FileId, BTreeMap<TargetId, u64>>>,
    writes: Cell<u64>,
}

impl Volumes {
    pub(crate) fn new(own: Volume) -> Rc<Self> {
        let groups = Groups::new(own.blocks(), own.stripe_blocks());
        Rc::new(Self {
            own,
            groups: Rc::new(Cell::new(groups)),
            loans: RefCell::default(),
            lenders: RefCell::default(),
            lost: RefCell::default(),
            written: RefCell::default(),
            writes: Cell::new(0),
        })
    }

    /// The target's own volume.
    pub(crate) fn own(&self) -> &Volume {
        &self.own
    }

    /// The allocation groups of the volume and of loans.
    pub(crate) fn groups(&self) -> Groups {
        self.groups.get()
    }

    /// The same, as they change.
    pub(crate) fn shared_groups(&self) -> Rc<Cell<Groups>> {
        self.groups.clone()
    }

    pub(crate) fn stripe_blocks(&self) -> u64 {
        self.own.stripe_blocks()
    }

    /// A lender serves.
    pub(crate) fn add_lender(&self, lender: TargetId, volume: &Volume) {
        assert_eq!(volume.stripe_blocks(), self.stripe_blocks(), "stripes are lent");
        self.lenders.borrow_mut().insert(lender, volume.clone());
    }

    /// A lender does not serve any more.
    pub(crate) fn remove_lender(&self, lender: TargetId) {
        self.lenders.borrow_mut().remove(&lender);
        let mut loans = self.loans.borrow_mut();
        loans.values_mut().filter(|place| place.lender == lender).for_each(|place| place.is_there = false);
    }

    /// Lenders whose arrays were found closed since the last call.
    pub(crate) fn take_lost(&self) -> BTreeSet<TargetId> {
        self.lost.take()
    }

    /// The error of an operation on a volume. If a lender's array is closed, nothing more is read or written
    /// there: the own one is not.
    fn error(&self, volume: &Volume, error: ArrayError) -> ChunkError {
        let is_it = |(_, other): &(&TargetId, &Volume)| Rc::ptr_eq(other.array(), volume.array());
        let lender = self.lenders.borrow().iter().find(is_it).map(|(lender, _)| *lender);
        match (lender, error) {
            (Some(lender), ArrayError::Closed) => {
                self.lost.borrow_mut().insert(lender);
                ChunkError::LenderAway { lender }
            }
            (_, error) => error.into(),
        }
    }

    /// The lender of a loan knows of it. Returns true if it serves too: then the blocks can be used.
    pub(crate) fn lender_has(&self, group: u64) -> bool {
        let mut loans = self.loans.borrow_mut();
        let place = loans.get_mut(&group).expect("the group has a loan");
        place.is_there = self.lenders.borrow().contains_key(&place.lender);
        place.is_there
    }

    /// True if the lender of a loan serves and knows of it.
    pub(crate) fn is_there(&self, group: u64) -> bool {
        self.loans.borrow().get(&group).is_some_and(|place| place.is_there)
    }

    /// The blocks of a loan are a group from now on. They cannot be read or written before
    /// [`Self::lender_has`].
    pub(crate) fn add_loan(&self, group: u64, borrowed: &Borrowed) {
        let groups = self.groups();
        assert!(group >= groups.own(), "group {group} is a borrowed one");
        let with = groups.with_borrowed(groups.count().max(group + 1) - groups.own());
        self.groups.set(with);
        let Borrowed { lender, loan, .. } = borrowed;
        let (stripe, stripes) = (loan.stripe, loan.stripes.into());
        let place = Place { lender: *lender, stripe, stripes, is_there: false };
        let before = self.loans.borrow_mut().insert(group, place);
        assert!(before.is_none(), "group {group} has one loan");
    }

    /// A loan ends.
    pub(crate) fn end_loan(&self, group: u64) {
        let ended = self.loans.borrow_mut().remove(&group);
        assert!(ended.is_some(), "group {group} has a loan");
    }

    /// The volume that has a stripe, and the number of the stripe there.
    fn at(&self, stripe: u64) -> Result<(Volume, u64), ChunkError> {
        let groups = self.groups();
        let group = groups.of_stripe(stripe);
        if group < groups.own() {
            return Ok((self.own.clone(), stripe));
        }
        let loans = self.loans.borrow();
        let Some(place) = loans.get(&group) else {
            return Err(ChunkError::Invalid(format!("stripe {stripe} is in no loan")));
        };
        let at = stripe - group * groups.blocks_each() / groups.stripe_blocks();
        let lenders = self.lenders.borrow();
        match lenders.get(&place.lender).filter(|_| place.is_there) {
            Some(volume) if at < place.stripes => Ok((volume.clone(), place.stripe + at)),
            Some(_) => Err(ChunkError::Invalid(format!("stripe {stripe} is beyond its loan"))),
            None => Err(ChunkError::LenderAway { lender: place.lender }),
        }
    }

    /// The parts of a run by volume: each volume, its first block there, and the number of blocks.
    fn parts(&self, (block, count): Run) -> Result<Vec<(Volume, u64, u64)>, ChunkError> {
        let (groups, per_stripe) = (self.groups(), self.stripe_blocks());
        if groups.have_of((block, count)) != count {
            return Err(ChunkError::Invalid(format!("blocks {block}+{count} are beyond the volume")));
        }
        let place = |(group, (at, count)): (u64, Run)| {
            let first = groups.range(group).start + at;
            let (volume, stripe) = self.at(first / per_stripe)?;
            // It must not end behind its loan either.
            self.at((first + count - 1) / per_stripe)?;
            Ok::<_, ChunkError>((volume, stripe * per_stripe + first % per_stripe, count))
        };
        let own = count.min(self.own.blocks().saturating_sub(block));
        let of_own = (own > 0).then(|| Ok((self.own.clone(), block, own)));
        of_own.into_iter().chain(groups.parts((block + own, count - own)).map(place)).collect()
    }

    /// Reads blocks, as [`Volume::read`].
    pub(crate) async fn read(&self, block: u64, count: u64, io: Io) -> Result<Blocks, ChunkError> {
        let parts = self.parts((block, count))?;
        if let [(volume, first, count)] = &parts[..] {
            return volume.read(*first, *count, io).await.map_err(|error| self.error(volume, error));
        }
        let mut all = Blocks::default();
        for (volume, first, count) in parts {
            let part = volume.read(first, count, io).await.map_err(|error| self.error(&volume, error))?;
            all.parts.extend(part.parts);
            all.crcs.extend(part.crcs);
        }
        assert_eq!(all.crcs.len() as u64, count, "every block was read");
        Ok(all)
    }

    /// Writes blocks of a file through a log, as [`Volume::write`].
    pub(crate) async fn write(
        &self,
        file: FileId,
        block: u64,
        data: &Buf,
        crcs: &[u32],
    ) -> Result<(), ChunkError> {
        let parts = self.parts((block, crcs.len() as u64))?;
        let mut done = 0;
        for (volume, first, count) in parts {
            let next = done + to_usize(count);
            let written = volume
                .write(first, &data.slice(done * BLOCK_BYTES..next * BLOCK_BYTES), &crcs[done..next])
                .await;
            written.map_err(|error| self.error(&volume, error))?;
            self.note(file, block + done as u64);
            done = next;
        }
        assert_eq!(done, crcs.len(), "every block was written");
        Ok(())
    }

    /// Writes a full stripe of a file that is unwritten, as [`Volume::write_fresh`].
    pub(crate) async fn write_fresh(
        &self,
        file: FileId,
        stripe: u64,
        data: &Buf,
        crcs: &[u32],
        io: Io,
    ) -> Result<(), ChunkError> {
        let (volume, at) = self.at(stripe)?;
        volume.write_fresh(at, data, crcs, io).await.map_err(|error| self.error(&volume, error))?;
        self.note(file, stripe * self.stripe_blocks());
        Ok(())
    }

    /// Something was written for a file.
    fn note(&self, file: FileId, block: u64) {
        let group = self.groups().of_block(block);
        if let Some(place) = self.loans.borrow().get(&group) {
            self.writes.set(self.writes.get() + 1);
            self.written.borrow_mut().entry(file).or_default().insert(place.lender, self.writes.get());
        }
    }

    /// Makes all writes of a file durable that returned before this call.
    pub(crate) async fn flush(&self, file: FileId) -> Result<(), ChunkError> {
        let upto = self.writes.get();
        let lenders =
            self.written.borrow().get(&file).into_iter().flat_map(BTreeMap::keys).copied().collect();
        self.own.flush().await?;
        self.flush_lenders(&lenders).await?;
        let mut written = self.written.borrow_mut();
        if let Some(of_file) = written.get_mut(&file) {
            of_file.retain(|_, write| *write > upto);
            if of_file.is_empty() {
                written.remove(&file);
            }
        }
        Ok(())
    }

    /// The same for all files.
    pub(crate) async fn flush_all(&self) -> Result<(), ChunkError> {
        let upto = self.writes.get();
        let lenders = self.written.borrow().values().flat_map(BTreeMap::keys).copied().collect();
        self.own.flush().await?;
        self.flush_lenders(&lenders).await?;
        self.written.borrow_mut().retain(|_, of_file| {
            of_file.retain(|_, write| *write > upto);
            !of_file.is_empty()
        });
        Ok(())
    }

    /// True if something that was written for a file to the volume of a lender waits to be flushed there.
    #[cfg(test)]
    pub(crate) fn has_unflushed(&self, file: FileId) -> bool {
        self.written.borrow().contains_key(&file)
    }

    async fn flush_lenders(&self, lenders: &BTreeSet<TargetId>) -> Result<(), ChunkError> {
        for lender in lenders {
            let volume = self.lenders.borrow().get(lender).cloned();
            let volume = volume.ok_or(ChunkError::LenderAway { lender: *lender })?;
            volume.flush().await.map_err(|error| self.error(&volume, error))?;
        }
        Ok(())
    }

    /// Makes full stripes unwritten again, as [`Volume::discard`].
    pub(crate) async fn discard(
        &self,
        stripe: u64,
        count: u64,
        how: Discard,
    ) -> Result<Vec<u64>, ChunkError> {
        let per_stripe = self.stripe_blocks();
        let (mut left, mut first) = (Vec::new(), stripe);
        for (volume, block, blocks) in self.parts((stripe * per_stripe, count * per_stripe))? {
            let (at, stripes) = (block / per_stripe, blocks / per_stripe);
            let of_part =
                volume.discard(at, stripes, how).await.map_err(|error| self.error(&volume, error))?;
            left.extend(of_part.into_iter().map(|stripe| stripe - at + first));
            first += stripes;
        }
        assert_eq!(first, stripe + count, "every stripe was discarded");
        Ok(left)
    }

    /// The loans with their volumes, by their groups, and their stripes there. Without those whose lender is
    /// away.
    fn places(&self) -> Vec<(u64, Volume, Range<u64>)> {
        let (loans, lenders) = (self.loans.borrow(), self.lenders.borrow());
        let place = |(group, place): (&u64, &Place)| {
            let volume = lenders.get(&place.lender).filter(|_| place.is_there)?.clone();
            Some((*group, volume, place.stripe..place.stripe + place.stripes))
        };
        loans.iter().filter_map(place).collect()
    }

    fn first_stripe(&self, group: u64) -> u64 {
        group * self.groups().blocks_each() / self.stripe_blocks()
    }

    /// Groups of loans whose lender is away, or does not know of them, with the lenders.
    pub(crate) fn away(&self) -> Vec<(u64, TargetId)> {
        let loans = self.loans.borrow();
        let away = loans.iter().filter(|(_, place)| !place.is_there);
        away.map(|(group, place)| (*group, place.lender)).collect()
    }

    /// Stripes that could not be read when last tried.
    pub(crate) fn unreadable_stripes(&self) -> Vec<u64> {
        let mut all = self.own.unreadable_stripes();
        for (group, volume, stripes) in self.places() {
            let first = self.first_stripe(group);
            let unreadable =
                volume.unreadable_stripes().into_iter().filter(|stripe| stripes.contains(stripe));
            all.extend(unreadable.map(|stripe| stripe - stripes.start + first));
        }
        all
    }

    /// True if some stripe may lack more strips than the code can make.
    pub(crate) fn lacks_too_much(&self) -> bool {
        let is_away = || self.loans.borrow().values().any(|place| !place.is_there);
        let lacks = || self.lenders.borrow().values().any(Volume::lacks_too_much);
        self.own.lacks_too_much() || lacks() || is_away()
    }

    /// True if a stripe is one of a loan whose lender is suspended: a write there waits for its drives.
    pub(crate) fn is_suspended(&self, stripe: u64) -> bool {
        self.is_of_lender(stripe, |array| array.suspended().is_some())
    }

    /// True if a stripe is one of a loan whose lender refuses data.
    pub(crate) fn refuses_data(&self, stripe: u64) -> bool {
        self.is_of_lender(stripe, Array::refuses_data)
    }

    /// True if a stripe is one of a loan, and this is so for the array of its lender.
    fn is_of_lender(&self, stripe: u64, is_so: impl Fn(&Array) -> bool) -> bool {
        let is_borrowed = self.groups().of_stripe(stripe) >= self.groups().own();
        is_borrowed && self.at(stripe).is_ok_and(|(volume, _)| is_so(volume.array()))
    }

    /// As [`Volume::knows_unreadable`]. A stripe whose lender is away cannot be read.
    pub(crate) fn knows_unreadable(&self, stripe: u64) -> Option<bool> {
        self.at(stripe).map_or(Some(true), |(volume, at)| volume.knows_unreadable(at))
    }

    /// As [`Volume::look_at`].
    pub(crate) async fn look_at(&self, stripe: u64) -> Result<(), ChunkError> {
        match self.at(stripe) {
            Ok((volume, at)) => volume.look_at(at).await.map_err(|error| self.error(&volume, error)),
            // That is known.
            Err(_) => Ok(()),
        }
    }

    /// As [`Volume::knows_unwritten`]. Nothing new is written to a stripe whose lender is away.
    pub(crate) fn knows_unwritten(&self, stripe: u64) -> Option<bool> {
        self.at(stripe).map_or(Some(false), |(volume, at)| volume.knows_unwritten(at))
    }

    /// As [`Volume::is_unwritten`].
    pub(crate) async fn is_unwritten(&self, stripe: u64) -> Result<bool, ChunkError> {
        match self.at(stripe) {
            Ok((volume, at)) => volume.is_unwritten(at).await.map_err(|error| self.error(&volume, error)),
            Err(_) => Ok(false),
        }
    }

    /// As [`Volume::written_in`]. Stripes whose lender is away are left out.
    pub(crate) async fn written_in(&self, range: Range<u64>, most: usize) -> Result<Vec<u64>, ChunkError> {
        let own = self.own.blocks() / self.stripe_blocks();
        let mut written = match range.start < own {
            true => self.own.written_in(range.start..range.end.min(own), most).await?,
            false => Vec::new(),
        };
        for (group, volume, stripes) in self.places() {
            let first = self.first_stripe(group);
            let wanted = range.start.max(first)..range.end.min(first + (stripes.end - stripes.start));
            if wanted.is_empty() || written.len() >= most {
                continue;
            }
            let there = wanted.start - first + stripes.start..wanted.end - first + stripes.start;
            let found = volume.written_in(there, most - written.len()).await;
            let found = found.map_err(|error| self.error(&volume, error))?;
            written.extend(found.into_iter().map(|stripe| stripe - stripes.start + first));
        }
        assert!(written.len() <= most && written.is_sorted(), "the first {most} in order");
        Ok(written)
    }

    /// As [`Volume::written`].
    pub(crate) async fn written(&self, from: u64, most: usize) -> Result<Vec<u64>, ChunkError> {
        self.written_in(from..u64::MAX, most).await
    }
}

#[cfg(test)]
mod tests;
