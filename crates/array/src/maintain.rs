//! Background work that restores redundancy: rebuild and resync of a member, and repair of single stripes.
//!
//! Rebuild and resync are one thing: every strip of the member that the table marks stale is reconstructed from
//! verified strips, written under a new version, flushed, read back and verified, and only then recorded as valid.
//! The table holds the progress, so a restart goes on where it was.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::record::Entry;
use crate::format::trailer::Trailer;
use crate::member::WhenSuspended;
use crate::notes::Note;
use crate::strip::Part;
use futures_util::StreamExt;
use futures_util::future::{join_all, select};
use futures_util::stream::FuturesUnordered;
use penstock_base::{BLOCK_BYTES, Version, crc32c};
use penstock_drive::{Class, Io};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

const IO: Io = Io::new(Class::Rebuild, "rebuild.strip");
/// Stripes rebuilt between two flushes, and how many such batches at a time: some read while others write and verify.
const ALONE: (usize, usize) = (4, 4);
/// The same beside others, who wait for a stripe as long as its batch takes.
const BESIDE: (usize, usize) = (2, 1);
/// Nobody else is there when nobody was served for so long.
const CALM: Duration = Duration::from_millis(100);
/// The longest pause for others: what took longer has waited itself, as for a full host.
pub(crate) const MOST_PAUSE: Duration = Duration::from_secs(5);
/// Pause before what failed is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// How far a long job is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct JobProgress {
    /// Stripes done.
    pub done_stripes: u64,
    /// Of these, the ones that were done before this start.
    pub done_before: u64,
    /// Stripes to do in all.
    pub total_stripes: u64,
    /// Stripes that could not be done.
    pub failed_stripes: u64,
    /// Nanoseconds since 1970 when it began, or went on.
    pub started_ns: i64,
}

impl Array {
    /// Rebuilds members that are back or were replaced.
    pub(crate) async fn resync_task(self: Rc<Self>) {
        // Behind the one that was tried last, so that a stripe which cannot be made keeps no other member waiting.
        let mut from = 0;
        // By member, behind the stripes that a full host had no room for: they keep no other stripe waiting.
        let mut behind = BTreeMap::new();
        while !self.closed.get() {
            let Some(position) = self.member_to_mend(from) else {
                self.resync_wake.notified().await;
                continue;
            };
            from = position + 1;
            match self.rebuild_member(position, behind.entry(position).or_default()).await {
                Ok(true) => {}
                Ok(false) => self.env.sleep(RETRY).await,
                Err(ArrayError::Closed) => break,
                Err(error) => {
                    if let ArrayError::Suspended(why) = &error {
                        self.note_suspended(why);
                    }
                    tracing::warn!(array = self.name, position, %error, "rebuild interrupted; it will go on");
                    self.env.sleep(RETRY).await;
                }
            }
        }
    }

    /// A reachable member that is stale, or that missed single strips: the first from a position on, or before it.
    fn member_to_mend(&self, from: usize) -> Option<usize> {
        let members = self.members.borrow();
        let table = self.table.borrow();
        let missed = |position: usize| table.counts().1 > 0 && table.count_stale(1 << position) > 0;
        let wanted = |position: &usize| members[*position].stale || missed(*position);
        let all = members.len();
        let mut in_turn = (from..all).chain(0..from.min(all));
        in_turn.find(|position| members[*position].reachable().is_some() && wanted(position))
    }

    /// Rebuilds one member, from a stripe on that it moves. Returns whether it is whole now.
    async fn rebuild_member(&self, position: usize, from: &mut u64) -> Result<bool, ArrayError> {
        let (bit, life) = (1u64 << position, self.life(position));
        let total = self.table.borrow().count_stale(bit);
        let mut progress =
            JobProgress { total_stripes: total, started_ns: self.env.wall_ns(), ..JobProgress::default() };
        *self.rebuild.borrow_mut() = Some(progress);
        let whole = total > 0 && total == self.table.borrow().counts().0;
        self.note(Note::RebuildBegun { position, stripes: total, whole });
        let result = self.rebuild_stale(position, from, &mut progress).await;
        *self.rebuild.borrow_mut() = None;
        // Stripes written meanwhile may have missed it again.
        let complete = matches!(result, Ok(true)) && self.table.borrow().count_stale(bit) == 0;
        let (stripes, failed) = (progress.done_stripes, progress.failed_stripes);
        self.note(Note::RebuildEnded { position, stripes, failed, whole, complete });
        result?;
        if complete && self.members.borrow()[position].stale {
            // It counts when a start would know it by its superblock.
            if self.mending.owes_superblock(position)
                && let Err(error) = self.write_superblock(position).await
            {
                tracing::warn!(array = self.name, position, %error, "a rebuilt member waits for its superblock");
                return Ok(false);
            }
            self.activate_member(position, life).await?;
        }
        Ok(complete)
    }

    /// Rebuilds every strip of a member that is stale, from a stripe on. Returns whether none failed. Where writes are suspended the next
    /// round begins behind those that were tried.
    async fn rebuild_stale(
        &self,
        position: usize,
        begin: &mut u64,
        progress: &mut JobProgress,
    ) -> Result<bool, ArrayError> {
        let bit = 1u64 << position;
        let mut from = std::mem::take(begin);
        let (mut served, mut disturbed) = (self.latency.served(), None);
        // Each to its end, whatever becomes of the others: they hold locks of stripes.
        let mut running = FuturesUnordered::new();
        let mut result = Ok(true);
        loop {
            if self.closed.get() || self.member_slice(position).is_none() {
                result = result.and(Ok(false));
            }
            if self.latency.served() != served {
                (served, disturbed) = (self.latency.served(), Some(self.env.now()));
            }
            let beside = disturbed.is_some_and(|at| self.env.now().saturating_sub(at) < CALM);
            let (stripes, batches) = if beside { BESIDE } else { ALONE };
            while running.len() < batches && matches!(result, Ok(true)) {
                let found = self.find_stale(from, bit, stripes);
                let Some(last) = found.last() else { break };
                from = last + 1;
                running.push(async move {
                    let began = self.env.now();
                    let done = self.rebuild_batch(position, &found).await;
                    (done, found.len() as u64, self.env.now().saturating_sub(began))
                });
            }
            let Some((done, of, took)) = running.next().await else {
                // Stripes whose record is on its way may have missed it too: they show in the table after a flush.
                let missed = self.fresh_misses(bit);
                if missed && matches!(result, Ok(true)) {
                    self.flush(IO.at("rebuild.flush")).await?;
                    from = 0;
                    continue;
                }
                if matches!(result, Err(ArrayError::Suspended(_))) {
                    *begin = from;
                }
                return result.map(|whole| whole && progress.failed_stripes == 0);
            };
            match done {
                Ok(done) => {
                    progress.done_stripes += done;
                    progress.failed_stripes += of - done;
                    *self.rebuild.borrow_mut() = Some(*progress);
                }
                Err(error) => result = result.and(Err(error)),
            }
            if beside && running.is_empty() && result.is_ok() {
                // Somebody waits for the same drives: they get them for as long.
                self.env.sleep(took.min(MOST_PAUSE)).await;
            }
        }
    }

    /// Whether a stripe whose record is on its way lacks one of these strips.
    fn fresh_misses(&self, strips: u64) -> bool {
        let members = self.members.borrow();
        self.fresh.borrow().values().any(|pending| pending.stale(&members) & strips != 0)
    }

    /// The first stripes from `from` on, at most `most`, that lack the strip of a member.
    fn find_stale(&self, from: u64, bit: u64, most: usize) -> Vec<u64> {
        let table = self.table.borrow();
        let next = |at| table.find_written(at, |stale| stale & bit != 0);
        std::iter::successors(next(from), |stripe| next(stripe + 1)).take(most).collect()
    }

    /// Rebuilds strips, and holds no stripe while writes are suspended. Returns how many of them are there.
    async fn rebuild_batch(&self, position: usize, stripes: &[u64]) -> Result<u64, ArrayError> {
        self.wait_for_rebuild_room().await?;
        let life = self.life(position);
        let mut locks = Vec::new();
        for stripe in stripes {
            locks.push(self.locks.exclusive(*stripe).await);
        }
        let written = join_all(stripes.iter().map(|stripe| self.rebuild_strip(*stripe, position))).await;
        self.flush_member(position, IO.at("rebuild.flush")).await?;
        let verify = stripes.iter().zip(&written).map(|(stripe, written)| async move {
            match written {
                Ok(Some((version, part))) => self.reads_back(*stripe, position, *version, part).await,
                _ => false,
            }
        });
        let verified = join_all(verify).await;
        let mut records = Vec::new();
        let (mut done, mut failed) = (0, None);
        for ((stripe, written), verified) in stripes.iter().zip(written).zip(verified) {
            match written {
                Ok(Some((version, _))) if verified => {
                    if self.life(position) != life {
                        failed =
                            failed.or(Some(ArrayError::Invalid(format!("member {position} was replaced"))));
                        continue;
                    }
                    let entry = Entry::Strips { stripe: *stripe, set: 0, clear: 1 << position, version };
                    records.push(self.log.queue_control(entry, Vec::new()));
                    done += 1;
                }
                Ok(None) => done += 1,
                Ok(Some(_)) => {
                    tracing::warn!(array = self.name, stripe, position, "a rebuilt strip does not read back")
                }
                Err(error @ (ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. })) => {
                    self.unreadable.borrow_mut().insert(*stripe);
                    tracing::error!(array = self.name, stripe, %error, "a stripe cannot be rebuilt");
                }
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // Until a record counts nobody may write its strip again: it says which version is there.
        for record in records {
            record.await.map_err(|_| ArrayError::Closed)?;
        }
        failed.map_or(Ok(done), Err)
    }

    async fn rebuild_strip(
        &self,
        stripe: u64,
        position: usize,
    ) -> Result<Option<(Version, Part)>, ArrayError> {
        let stale =
            self.table.borrow().is_written(stripe) && self.stale_strips(stripe) & (1 << position) != 0;
        if !stale {
            return Ok(None);
        }
        let whole = 0..self.geo.strip_blocks;
        let part = self.recover(stripe, &[position], &whole, IO.at("rebuild.read")).await?.remove(0);
        let version = self.new_version().await?;
        match self.write_strip(stripe, position, &part, version, IO, WhenSuspended::Fail).await? {
            Some(_) => Ok(Some((version, part))),
            None => Err(ArrayError::Invalid(format!("member {position} failed while it was rebuilt"))),
        }
    }

    /// Whether a strip on the drive is what was written.
    async fn reads_back(&self, stripe: u64, position: usize, version: Version, part: &Part) -> bool {
        let Some(slice) = self.member_slice(position) else { return false };
        let io = IO.at("rebuild.verify");
        let data = slice.read(self.geo.strip_at(stripe), self.geo.strip_bytes(), io);
        let trailer = slice.read(self.geo.trailer_at(stripe), BLOCK_BYTES, io);
        let (Ok(data), Ok(trailer)) = futures_util::future::join(data, trailer).await else { return false };
        let blocks_agree = data.chunks_exact(BLOCK_BYTES).map(crc32c).eq(part.crcs.iter().copied());
        let trailer_agrees = Trailer::decode(&trailer).is_ok_and(|found| {
            found.array == self.id
                && found.stripe.0 == stripe
                && usize::from(found.position) == position
                && found.version == version
                && found.crcs == part.crcs
        });
        blocks_agree && trailer_agrees
    }

    /// Repairs stripes in which a read found something wrong.
    pub(crate) async fn repair_task(self: Rc<Self>) {
        let mut metadata_at = self.env.now();
        // Stripes that wait until writes are not suspended any more.
        let mut later = BTreeSet::new();
        while !self.closed.get() {
            // Metadata that cannot be mended yet keeps no stripe from being repaired.
            if self.metadata_bad.get() && self.env.now() >= metadata_at {
                if let Err(error) = self.scrub_metadata().await {
                    tracing::warn!(array = self.name, %error, "damaged metadata not mended yet");
                }
                metadata_at = self.env.now() + RETRY;
            }
            let next = self.repair_queue.borrow_mut().pop_first();
            if next.is_none() && !later.is_empty() {
                self.env.sleep(RETRY).await;
                self.repair_queue.borrow_mut().append(&mut later);
                continue;
            }
            let Some(stripe) = next else {
                let woken = std::pin::pin!(self.repair_wake.notified());
                match self.metadata_bad.get() {
                    true => drop(select(woken, self.env.sleep(RETRY)).await),
                    false => woken.await,
                }
                continue;
            };
            match self.scrub_stripe(stripe).await {
                Ok(_) | Err(ArrayError::Closed) => {}
                Err(ArrayError::Suspended(why)) => {
                    self.note_suspended(&why);
                    later.insert(stripe);
                }
                Err(error) => {
                    tracing::error!(array = self.name, stripe, %error, "a stripe could not be repaired")
                }
            }
            // What the repair itself found bad is repaired already.
            self.repair_queue.borrow_mut().remove(&stripe);
        }
    }

    /// Waits until no member is being rebuilt or could be, and every copy of the log that can be there is. Returns the redundancy debt that is left.
    pub async fn wait_rebuilt(&self) -> u64 {
        loop {
            // What a fresh stripe misses shows in the table once its record is written.
            if self.fresh_misses(u64::MAX) {
                let _ = self.flush(IO.at("rebuild.flush")).await;
            }
            let carriers =
                self.mending.is_wanted() || self.carriers_need_mending() || self.metadata_bad.get();
            let busy = self.member_to_mend(0).is_some() || carriers;
            let stuck = !self.unreadable.borrow().is_empty();
            if !busy || stuck || self.closed.get() {
                return self.redundancy_debt_stripes();
            }
            self.env.sleep(Duration::from_millis(20)).await;
        }
    }
}
