//! Repairs of loans, in the rows of lender and borrower. Bits follow: [`super::Fsck::mark_owned`] comes
//! after.

use super::Fsck;
use crate::ChunkError;
use crate::free::{all_bits, is_on, runs_of};
use crate::rows::{Borrowed, Lent, LentKey};
use penstock_base::FindingKind;
use penstock_kv::WriteSet;

impl Fsck<'_> {
    /// True if no file and no other loan has a block of this one, so that it can be lent again.
    pub async fn may_lend(&self, key: LentKey, lent: &Lent) -> Result<bool, ChunkError> {
        let (survey, per_stripe) = (self.survey().await?, self.volumes.stripe_blocks());
        if !is_on(&lent.loan, self.volumes.groups()) {
            return Ok(false);
        }
        let runs = runs_of(&lent.loan, per_stripe);
        let others = survey.check.loans.lent.iter().filter(|(other, _)| **other != key);
        let of_others: Vec<(u64, u64)> =
            others.flat_map(|(_, other)| runs_of(&other.loan, per_stripe)).collect();
        let is_free = |(first, count): &(u64, u64)| {
            let is_of_another =
                of_others.iter().any(|(start, len)| *start < first + count && *first < start + len);
            // Blocks that were free since may have been written by others. Those of groups whose bits cannot
            // be read were never free: such a group is suspect.
            let is_bad = |block: u64| survey.bad_groups.contains(&survey.groups.of_block(block));
            let is_kept = |block: u64| (survey.marked.get(block) || is_bad(block)) && !survey.file_has(block);
            !is_of_another && (*first..first + count).all(is_kept)
        };
        Ok(runs.iter().all(is_free))
    }

    /// Another target has this loan from here again.
    pub async fn put_lent(&self, key: LentKey, lent: Lent) -> Result<(), ChunkError> {
        let mut writes = WriteSet::new();
        writes.put(key.row(), lent.encode());
        self.commit_repair(&mut writes).await?;
        self.lending.put(key, Some(lent));
        Ok(())
    }

    /// The runs of a loan in written stripes that no file has, each of at most one chunk: they may be what
    /// the borrower has forgotten.
    pub async fn written_of(&self, lent: &Lent) -> Result<Vec<(u64, u64)>, ChunkError> {
        let per_stripe = self.volumes.stripe_blocks();
        let (all, first) = (self.volumes.own().blocks() / per_stripe, lent.loan.stripe);
        let stripes = first.min(all)..(first + u64::from(lent.loan.stripes)).min(all);
        let written = self.volumes.written_in(stripes.clone(), usize::MAX).await?;
        let survey = self.survey().await?;
        let is_left =
            |block: u64| written.binary_search(&(block / per_stripe)).is_ok() && !survey.file_has(block);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        let blocks =
            runs_of(&lent.loan, per_stripe).into_iter().flat_map(|(first, count)| first..first + count);
        for block in blocks.filter(|block| is_left(*block)) {
            match runs.last_mut() {
                Some((start, count)) if *start + *count == block && *count < u64::from(self.chunk_blocks) => {
                    *count += 1
                }
                _ => runs.push((block, 1)),
            }
        }
        Ok(runs)
    }

    /// Drops the row of a loan to another target, and makes `writes` with it. Blocks that these give to no
    /// file have no owner then.
    pub async fn drop_lent(&self, key: Vec<u8>, mut writes: WriteSet) -> Result<(), ChunkError> {
        let named = LentKey::decode(&key);
        writes.delete(key);
        self.commit_repair(&mut writes).await?;
        if let Ok(key) = named {
            self.lending.put(key, None);
        }
        Ok(())
    }

    /// A loan that its lender has is here again. All of its blocks count as used until a repair has compared
    /// them with the files.
    pub async fn put_loan(&self, group: u64, borrowed: Borrowed) -> Result<(), ChunkError> {
        let mut writes = WriteSet::new();
        let bits = all_bits(&borrowed.loan, self.volumes.stripe_blocks());
        writes.put(Borrowed::key(group), borrowed.encode(&bits));
        self.commit_repair(&mut writes).await?;
        let has_it = self.allocator.space().loans().get(&group) == Some(&borrowed);
        if !has_it {
            self.drop_from_memory(group);
            self.volumes.add_loan(group, &borrowed);
            self.allocator.space_mut().add_loan(group, borrowed, &bits);
        }
        self.loan_is_there(group);
        Ok(())
    }

    /// Drops a loan that its lender does not have. What files have of it is cut from them next.
    pub async fn drop_loan(&self, group: u64) -> Result<(), ChunkError> {
        // A stripe of it may be in a discard, or a row on its way to the memory.
        let _no_discard = self.allocator.pause_discards().await;
        let _no_load = self.allocator.pause_loads().await;
        let mut writes = WriteSet::new();
        writes.delete(Borrowed::key(group));
        self.lending.put_dropped(&mut writes);
        self.commit_repair(&mut writes).await?;
        self.lending.set_dropped();
        self.drop_from_memory(group);
        Ok(())
    }

    /// The row with the numbers of loans cannot be read, and is made again: those up to `last` may have been
    /// given.
    pub async fn put_numbers(&self, last: u64) -> Result<(), ChunkError> {
        self.lending.set_numbers(last).await
    }

    /// A repair has failed: what it had not come to is looked at again before anything is borrowed.
    pub fn give_up_repair(&self) {
        if !self.lending.is_settled() {
            self.allocator.must_compare();
        }
    }

    /// The target can borrow again, if it could not and nothing is left that keeps it from that. A repair is
    /// over.
    pub async fn settle_loans(&self) -> Result<(), ChunkError> {
        if self.lending.is_settled() {
            return Ok(());
        }
        let check = self.survey().await?.check;
        let has_strays = check.findings.counts.contains_key(&FindingKind::ExtentBeyondVolume);
        if check.loans.borrowed.values().all(Option::is_some) && !has_strays {
            self.lending.set_settled().await?;
        }
        Ok(())
    }

    fn drop_from_memory(&self, group: u64) {
        if self.allocator.space().loans().contains_key(&group) {
            self.allocator.drop_loan(group);
            self.volumes.end_loan(group);
        }
    }

    /// The lender of a loan knows of it again.
    pub fn loan_is_there(&self, group: u64) {
        if self.allocator.space().loans().contains_key(&group) {
            _ = self.lending.lender_has(group);
        }
    }
}
