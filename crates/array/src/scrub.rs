//! Scrub: every strip of every written stripe is read and verified, parity is computed and compared, and what is
//! wrong is written again from what is right.
//!
//! A repair keeps the strip's version: the bytes are those that the version names. Parity that disagrees while all
//! strips verify is a defect of ours: it is reported and kept.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::maintain::JobProgress;
use crate::strip::{Erased, Part};
use futures_util::future::join_all;
use penstock_base::BLOCK_BYTES;
use penstock_drive::{Class, Io};

const IO: Io = Io::new(Class::Scrub, "scrub.repair");

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Stripes verified.
    pub stripes: u64,
    /// Blocks, trailers and metadata blocks that were not what was written.
    pub checksum_errors: u64,
    /// Blocks and metadata blocks written again.
    pub repaired_blocks: u64,
    /// Stripes whose parity disagreed while all strips verified.
    pub parity_defects: u64,
    /// Stripes that cannot be read.
    pub unreadable: Vec<u64>,
}

impl ScrubReport {
    /// Whether nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.checksum_errors == 0 && self.parity_defects == 0 && self.unreadable.is_empty()
    }
}

impl Array {
    /// Scrubs the whole array: metadata first, then every written stripe.
    pub async fn scrub(&self) -> Result<ScrubReport, ArrayError> {
        let before = self.counts();
        let mut progress = JobProgress {
            total_stripes: self.table.borrow().counts().0,
            started_ns: self.env.wall_ns(),
            ..JobProgress::default()
        };
        *self.scrub.borrow_mut() = Some(progress);
        let result = self.scrub_all(&mut progress).await;
        *self.scrub.borrow_mut() = None;
        let unreadable = result?;
        let after = self.counts();
        Ok(ScrubReport {
            stripes: progress.done_stripes,
            checksum_errors: after.checksum_errors - before.checksum_errors,
            repaired_blocks: after.repaired_blocks - before.repaired_blocks,
            parity_defects: after.parity_defects - before.parity_defects,
            unreadable,
        })
    }

    async fn scrub_all(&self, progress: &mut JobProgress) -> Result<Vec<u64>, ArrayError> {
        self.scrub_metadata().await?;
        let mut unreadable = Vec::new();
        let mut from = 0;
        loop {
            let next = self.table.borrow().find_written(from, |_| true);
            let Some(stripe) = next else { return Ok(unreadable) };
            from = stripe + 1;
            match self.scrub_stripe(stripe).await {
                Ok(()) => {}
                Err(ArrayError::Unreadable { .. } | ArrayError::Disagrees { .. }) => {
                    progress.failed_stripes += 1;
                    unreadable.push(stripe);
                }
                Err(error) => return Err(error),
            }
            progress.done_stripes += 1;
            *self.scrub.borrow_mut() = Some(*progress);
            if self.closed.get() {
                return Err(ArrayError::Closed);
            }
        }
    }

    /// Verifies one stripe and repairs it.
    pub(crate) async fn scrub_stripe(&self, stripe: u64) -> Result<(), ArrayError> {
        let _lock = self.locks.exclusive(stripe).await;
        if self.is_unwritten(stripe) {
            return Ok(());
        }
        let whole = 0..self.geo.strip_blocks;
        let positions = self.readable(stripe);
        for position in &positions {
            self.trailers.borrow_mut().forget(stripe, *position);
        }
        let reads = positions.iter().map(|at| self.read_part(stripe, *at, &whole, IO.at("scrub.read")));
        let found: Vec<(usize, Result<Part, Erased>)> =
            positions.iter().copied().zip(join_all(reads).await).collect();
        let bad: Vec<usize> = found.iter().filter(|(_, part)| part.is_err()).map(|(at, _)| *at).collect();
        if bad.is_empty() {
            self.unreadable.borrow_mut().remove(&stripe);
            self.check_parity(stripe, &found);
            return Ok(());
        }
        let made = self.recover(stripe, &bad, &whole, IO.at("scrub.read")).await.inspect_err(|_| {
            self.unreadable.borrow_mut().insert(stripe);
        })?;
        for (position, part) in bad.iter().zip(&made) {
            let erased =
                found.iter().find(|(at, _)| at == position).and_then(|(_, part)| part.as_ref().err());
            self.repair_strip(stripe, *position, erased.expect("it is bad"), part).await?;
        }
        self.flush_members(IO.at("scrub.flush")).await?;
        self.unreadable.borrow_mut().remove(&stripe);
        Ok(())
    }

    async fn repair_strip(
        &self,
        stripe: u64,
        position: usize,
        erased: &Erased,
        part: &Part,
    ) -> Result<(), ArrayError> {
        let repaired = match erased {
            Erased::Unreachable | Erased::Strip => {
                let version = self.expected_version(stripe, position);
                match self.write_strip(stripe, position, part, version, IO).await? {
                    true => u64::from(self.geo.strip_blocks) + 1,
                    false => 0,
                }
            }
            Erased::Blocks { part: rotten, bad } => {
                if rotten.crcs != part.crcs {
                    return Err(ArrayError::Disagrees { array: self.id, stripe, position });
                }
                let mut repaired = 0;
                for column in bad {
                    let bytes = column * BLOCK_BYTES..(column + 1) * BLOCK_BYTES;
                    let at = self.geo.block_at(stripe, *column as u32);
                    let block = part.data.slice(bytes);
                    repaired += u64::from(self.write_member(position, at, block, Some(stripe), IO).await?);
                }
                repaired
            }
        };
        self.count(|counts| counts.repaired_blocks += repaired);
        if let Some(slice) = &self.members.borrow()[position].slice {
            slice.drive().count_repaired(repaired);
        }
        tracing::info!(array = self.name, stripe, position, repaired, "strip repaired");
        Ok(())
    }

    fn check_parity(&self, stripe: u64, found: &[(usize, Result<Part, Erased>)]) {
        if found.len() < self.geo.strips() {
            return;
        }
        let strips: Vec<&[u8]> =
            found.iter().filter_map(|(_, part)| Some(&part.as_ref().ok()?.data[..])).collect();
        let (data, parity) = strips.split_at(self.geo.k);
        if !self.code.verify(data, parity) {
            self.count(|counts| counts.parity_defects += 1);
            tracing::error!(
                array = self.name,
                stripe,
                "parity disagrees with data that verifies: a defect, kept as it is"
            );
        }
    }
}
