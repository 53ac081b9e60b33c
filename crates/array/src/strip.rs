//! Strips: reading with proof, reconstruction, and writing with a trailer.
//!
//! Invariants: a block is handed on only if its CRC32C agrees with a trailer that is of this array, stripe and
//! position and of the version that the stripe table names; everything else is an erasure. All callers hold the
//! stripe's lock, so no write of the stripe is in flight when a mismatch is judged.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::trailer::Trailer;
use crate::member::WhenSuspended;
use futures_util::future::join_all;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, HashMap, StripeIndex, Version, crc32c};
use penstock_drive::{Io, Slice};
use penstock_raid::{Checksums, DecodePlan, Residency, SourceCrcs};
use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;

/// Verified columns of a strip.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) data: Buf,
    pub(crate) crcs: Vec<u32>,
}

/// Why columns of a strip cannot be used.
#[derive(Clone, Debug)]
pub(crate) enum Erased {
    /// The member is not there, or did not answer.
    Unreachable,
    /// The trailer is bad, or of another version: the whole strip counts as lost.
    Strip,
    /// The trailer is good and these columns are not what it says.
    Blocks {
        /// What was read, with the trailer's checksums.
        part: Part,
        /// The bad columns, relative to the part.
        bad: Vec<usize>,
    },
}

type CachedTrailer = (Version, Rc<Vec<u32>>);

/// Checksums of strips read lately, so that a small read is one I/O. Bounded, first in first out.
#[derive(Default)]
pub(crate) struct TrailerCache {
    entries: HashMap<(u64, usize), CachedTrailer>,
    order: VecDeque<(u64, usize)>,
}

/// Strips whose checksums are kept: 64 blocks each, 16 MiB in all.
const CACHED_TRAILERS: usize = 1 << 16;

impl TrailerCache {
    fn get(&self, stripe: u64, position: usize, version: Version) -> Option<Rc<Vec<u32>>> {
        let (cached, crcs) = self.entries.get(&(stripe, position))?;
        (*cached == version).then(|| crcs.clone())
    }

    pub(crate) fn put(&mut self, stripe: u64, position: usize, version: Version, crcs: Rc<Vec<u32>>) {
        if self.entries.insert((stripe, position), (version, crcs)).is_none() {
            self.order.push_back((stripe, position));
        }
        while self.order.len() > CACHED_TRAILERS {
            let oldest = self.order.pop_front().expect("the queue is longer than the bound");
            self.entries.remove(&oldest);
        }
    }

    pub(crate) fn forget(&mut self, stripe: u64, position: usize) {
        if let Some((version, _)) = self.entries.get_mut(&(stripe, position)) {
            // Its place in the queue stays; a version that is never given matches nothing.
            *version = Version(0);
        }
    }
}

fn bytes_of(columns: &Range<u32>) -> usize {
    columns.len() * BLOCK_BYTES
}

fn bad_columns(part: &Part) -> Vec<usize> {
    let blocks = part.data.chunks_exact(BLOCK_BYTES).zip(&part.crcs).enumerate();
    blocks.filter(|(_, (block, crc))| crc32c(block) != **crc).map(|(at, _)| at).collect()
}

/// Of parts that a pass did not find right as a whole: those that are, and those that could not be read. The others are
/// left out: who needs them reads them again, and notes what it finds.
pub(crate) fn parts_to_keep(
    positions: &[usize],
    parts: Vec<Result<Part, Erased>>,
) -> HashMap<usize, Result<Part, Erased>> {
    let keep = |part: &Result<Part, Erased>| match part {
        Ok(part) => bad_columns(part).is_empty(),
        Err(erased) => matches!(erased, Erased::Unreachable),
    };
    positions.iter().copied().zip(parts).filter(|(_, part)| keep(part)).collect()
}

/// New strips of `columns` blocks each, with the checksums that `code` makes beside them.
fn make_parts(count: usize, columns: usize, code: impl FnOnce(&mut [&mut [u8]], &mut [u32])) -> Vec<Part> {
    let mut made: Vec<BufMut> = (0..count).map(|_| BufMut::recycled(columns * BLOCK_BYTES)).collect();
    let mut crcs = vec![0; count * columns];
    code(&mut made.iter_mut().map(AsMut::as_mut).collect::<Vec<_>>(), &mut crcs);
    let parts = made.into_iter().zip(crcs.chunks(columns.max(1)));
    parts.map(|(data, crcs)| Part { data: data.freeze(), crcs: crcs.to_vec() }).collect()
}

/// What a plan makes of its sources, `columns` blocks of each, with checksums.
fn make(plan: &DecodePlan, sources: &[&[u8]], columns: usize, source_crcs: SourceCrcs<'_>) -> Vec<Part> {
    make_parts(plan.lost().len(), columns, |made, crcs| {
        let checksums = Checksums { sources: source_crcs, outputs: crcs };
        plan.decode_with(sources, made, Residency::Warm, Some(checksums));
    })
}

/// The one life under which all writes of a strip landed; none when one was missed, or the member failed between them.
pub(crate) fn one_life(landed: impl IntoIterator<Item = Option<u64>>) -> Option<u64> {
    landed.into_iter().reduce(|first, other| first.filter(|_| first == other)).flatten()
}

impl Array {
    async fn read_trailer(
        &self,
        slice: &Slice,
        stripe: u64,
        position: usize,
        io: Io,
    ) -> Result<Rc<Vec<u32>>, Erased> {
        let version = self.expected_version(stripe, position);
        if let Some(crcs) = self.trailers.borrow().get(stripe, position, version) {
            return Ok(crcs);
        }
        let block = slice
            .read(self.geo.trailer_at(stripe), BLOCK_BYTES, io)
            .await
            .map_err(|_| Erased::Unreachable)?;
        match Trailer::decode(&block) {
            Ok(trailer)
                if trailer.array == self.id
                    && trailer.stripe == StripeIndex(stripe)
                    && usize::from(trailer.position) == position
                    && trailer.version == version
                    && trailer.crcs.len() == self.geo.strip_blocks as usize =>
            {
                let crcs = Rc::new(trailer.crcs);
                self.trailers.borrow_mut().put(stripe, position, version, crcs.clone());
                Ok(crcs)
            }
            _ => Err(Erased::Strip),
        }
    }

    /// The checksums that a strip's trailer holds, if the trailer is good.
    pub(crate) async fn trailer_crcs(&self, stripe: u64, position: usize, io: Io) -> Option<Vec<u32>> {
        if self.stale_strips(stripe) & (1 << position) != 0 {
            return None;
        }
        let slice = self.member_slice(position)?;
        self.read_trailer(&slice, stripe, position, io).await.ok().map(|crcs| crcs.to_vec())
    }

    /// Columns of a strip as they are on the drive, with what its trailer says of them.
    async fn read_unproved(
        &self,
        stripe: u64,
        position: usize,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, Erased> {
        let Some(slice) = self.member_slice(position) else { return Err(Erased::Unreachable) };
        let at = self.geo.block_at(stripe, columns.start);
        let data = slice.read(at, bytes_of(columns), io);
        let trailer = self.read_trailer(&slice, stripe, position, io);
        let (data, crcs) = futures_util::future::join(data, trailer).await;
        let crcs = crcs?;
        let data = data.map_err(|_| Erased::Unreachable)?;
        let crcs = crcs[columns.start as usize..columns.end as usize].to_vec();
        Ok(Part { data, crcs })
    }

    async fn try_part(
        &self,
        stripe: u64,
        position: usize,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, Erased> {
        let part = self.read_unproved(stripe, position, columns, io).await?;
        match bad_columns(&part) {
            bad if bad.is_empty() => Ok(part),
            bad => Err(Erased::Blocks { part, bad }),
        }
    }

    /// Reads columns of a strip. What does not verify is read once more before it is counted as bad.
    pub(crate) async fn read_part(
        &self,
        stripe: u64,
        position: usize,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, Erased> {
        if self.stale_strips(stripe) & (1 << position) != 0 {
            return Err(Erased::Unreachable);
        }
        match self.try_part(stripe, position, columns, io).await {
            Ok(part) => Ok(part),
            Err(Erased::Unreachable) => Err(Erased::Unreachable),
            Err(_) => {
                self.trailers.borrow_mut().forget(stripe, position);
                let again = self.try_part(stripe, position, columns, io).await;
                if let Err(erased) = &again {
                    self.note_bad(stripe, position, erased);
                }
                again
            }
        }
    }

    fn note_bad(&self, stripe: u64, position: usize, erased: &Erased) {
        let bad = match erased {
            Erased::Unreachable => return,
            Erased::Strip => 1,
            Erased::Blocks { bad, .. } => bad.len() as u64,
        };
        self.trailers.borrow_mut().forget(stripe, position);
        self.count(|counts| counts.checksum_errors += bad);
        if let Some(slice) = &self.members.borrow()[position].slice {
            (0..bad).for_each(|_| slice.drive().count_checksum_error());
        }
        tracing::warn!(array = self.name, stripe, position, "contents are not what was written");
        self.repair_queue.borrow_mut().insert(stripe);
        self.repair_wake.notify_one();
    }

    /// Makes columns of the wanted strips from the others.
    pub(crate) async fn recover(
        &self,
        stripe: u64,
        wanted: &[usize],
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Vec<Part>, ArrayError> {
        self.recover_with(stripe, wanted, columns, HashMap::default(), io).await
    }

    /// Makes columns of the wanted strips from the others, of which the caller has read some: the same columns.
    pub(crate) async fn recover_with(
        &self,
        stripe: u64,
        wanted: &[usize],
        columns: &Range<u32>,
        mut found: HashMap<usize, Result<Part, Erased>>,
        io: Io,
    ) -> Result<Vec<Part>, ArrayError> {
        self.count(|counts| counts.degraded_reads += 1);
        let mut available = self.readable(stripe);
        available.retain(|position| !wanted.contains(position) && !found.contains_key(position));
        if found.is_empty() && available.len() >= self.geo.k {
            let sources = &available[..self.geo.k];
            let parts = self.read_unproved_parts(stripe, sources, columns, io).await;
            if let Some(made) = self.make_proved(sources, wanted, &parts, columns.len()) {
                return Ok(made);
            }
            // The first of `available` are then those that are to be read again.
            found = parts_to_keep(sources, parts);
            available.retain(|position| !found.contains_key(position));
        }
        let lacking = self.geo.k.saturating_sub(found.len());
        let first: Vec<usize> = available.iter().copied().take(lacking).collect();
        found.extend(self.read_parts(stripe, &first, columns, io).await);
        let all_good = found.len() == self.geo.k && found.values().all(Result::is_ok);
        if !all_good {
            let rest: Vec<usize> =
                available.into_iter().skip(lacking).chain(wanted.iter().copied()).collect();
            found.extend(self.read_parts(stripe, &rest, columns, io).await);
        }
        self.decode_columns(stripe, wanted, columns, &found)
    }

    /// Columns of strips for a pass that codes and proves them. What that finds wrong is kept apart by
    /// [`parts_to_keep`].
    pub(crate) async fn read_unproved_parts(
        &self,
        stripe: u64,
        positions: &[usize],
        columns: &Range<u32>,
        io: Io,
    ) -> Vec<Result<Part, Erased>> {
        let reads = positions.iter().map(|position| self.read_unproved(stripe, *position, columns, io));
        join_all(reads).await
    }

    /// Makes the wanted strips in the pass that also proves what they are made from: `columns` blocks of k strips at
    /// these positions. None unless all of it is there and right.
    fn make_proved(
        &self,
        positions: &[usize],
        wanted: &[usize],
        parts: &[Result<Part, Erased>],
        columns: usize,
    ) -> Option<Vec<Part>> {
        let parts: Vec<&Part> = parts.iter().map(|part| part.as_ref().ok()).collect::<Option<_>>()?;
        let plan = self.code.plan_with(positions, wanted).ok()?;
        let sources: Vec<&[u8]> = parts.iter().map(|part| &part.data[..]).collect();
        let mut of_sources = vec![0; parts.len() * columns];
        let made = make(&plan, &sources, columns, SourceCrcs::Wanted(&mut of_sources));
        parts.iter().flat_map(|part| &part.crcs).eq(&of_sources).then_some(made)
    }

    /// Columns of strips, each proved, or why it is not.
    pub(crate) async fn read_parts(
        &self,
        stripe: u64,
        positions: &[usize],
        columns: &Range<u32>,
        io: Io,
    ) -> HashMap<usize, Result<Part, Erased>> {
        let reads =
            positions.iter().map(|at| async { (*at, self.read_part(stripe, *at, columns, io).await) });
        join_all(reads).await.into_iter().collect()
    }

    /// Decodes column by column, each from the strips whose block verified there; runs of columns with the same
    /// good strips are decoded together.
    fn decode_columns(
        &self,
        stripe: u64,
        wanted: &[usize],
        columns: &Range<u32>,
        found: &HashMap<usize, Result<Part, Erased>>,
    ) -> Result<Vec<Part>, ArrayError> {
        let count = columns.len();
        let good_at = |column: usize| -> Vec<usize> {
            let good = |part: &Result<Part, Erased>| match part {
                Ok(_) => true,
                Err(Erased::Blocks { bad, .. }) => !bad.contains(&column),
                Err(_) => false,
            };
            (0..self.geo.strips()).filter(|at| found.get(at).is_some_and(good)).collect()
        };
        // The runs of each wanted strip, in order.
        let mut runs: Vec<Vec<Part>> = vec![Vec::new(); wanted.len()];
        let mut start = 0;
        while start < count {
            let good = good_at(start);
            let end = (start + 1..count).find(|column| good_at(*column) != good).unwrap_or(count);
            let made = self.decode_run(stripe, wanted, start..end, &good, found)?;
            runs.iter_mut().zip(made).for_each(|(runs, made)| runs.push(made));
            start = end;
        }
        let parts = wanted.iter().zip(runs).map(|(position, runs)| {
            let data =
                penstock_base::buf::gather(&runs.iter().map(|run| run.data.clone()).collect::<Vec<_>>());
            let crcs: Vec<u32> = runs.into_iter().flat_map(|run| run.crcs).collect();
            let known = match found.get(position) {
                Some(Ok(part) | Err(Erased::Blocks { part, .. })) => Some(&part.crcs),
                _ => None,
            };
            match known {
                Some(known) if *known != crcs => {
                    Err(ArrayError::Disagrees { array: self.id, stripe, position: *position })
                }
                _ => Ok(Part { data, crcs }),
            }
        });
        parts.collect()
    }

    /// A run of columns of the wanted strips: those that are good as they are, and the others made.
    fn decode_run(
        &self,
        stripe: u64,
        wanted: &[usize],
        run: Range<usize>,
        good: &[usize],
        found: &HashMap<usize, Result<Part, Erased>>,
    ) -> Result<Vec<Part>, ArrayError> {
        let part_of = |position: usize| match &found[&position] {
            Ok(part) | Err(Erased::Blocks { part, .. }) => Part {
                data: part.data.slice(run.start * BLOCK_BYTES..run.end * BLOCK_BYTES),
                crcs: part.crcs[run.clone()].to_vec(),
            },
            Err(_) => unreachable!("only strips that were read are good"),
        };
        let need: Vec<usize> = wanted.iter().copied().filter(|at| !good.contains(at)).collect();
        // What is there needs no others, however few they are.
        if need.is_empty() {
            return Ok(wanted.iter().map(|at| part_of(*at)).collect());
        }
        let plan = self.code.plan_with(good, &need).map_err(|_| {
            self.unreadable.borrow_mut().insert(stripe);
            ArrayError::Unreadable { array: self.id, stripe, good: good.len(), wanted: self.geo.k }
        })?;
        let sources: Vec<Part> = plan.sources().iter().map(|at| part_of(*at)).collect();
        let crcs: Vec<u32> = sources.iter().flat_map(|part| part.crcs.iter().copied()).collect();
        let sources: Vec<&[u8]> = sources.iter().map(|part| &part.data[..]).collect();
        // The plan's order is that of `need`, which keeps the order of `wanted`.
        let mut made = make(&plan, &sources, run.len(), SourceCrcs::Known(&crcs)).into_iter();
        let part = |at: &usize| match good.contains(at) {
            true => part_of(*at),
            false => made.next().expect("a part for each that is needed"),
        };
        Ok(wanted.iter().map(part).collect())
    }

    /// Writes a whole strip and its trailer. Returns the life of the member under which both landed; none when it missed
    /// them.
    pub(crate) async fn write_strip(
        &self,
        stripe: u64,
        position: usize,
        part: &Part,
        version: Version,
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<u64>, ArrayError> {
        assert_eq!(part.data.len(), self.geo.strip_bytes(), "a whole strip is written");
        let data = (self.geo.strip_at(stripe), part.data.clone());
        let data = self.write_in_strip(stripe, position, data, io, when);
        let trailer = self.write_trailer(stripe, position, &part.crcs, version, io, when);
        let (data, trailer) = futures_util::future::join(data, trailer).await;
        Ok(one_life([data?, trailer?]))
    }

    pub(crate) async fn write_trailer(
        &self,
        stripe: u64,
        position: usize,
        crcs: &[u32],
        version: Version,
        io: Io,
        when: WhenSuspended,
    ) -> Result<Option<u64>, ArrayError> {
        let trailer = Trailer {
            array: self.id,
            stripe: StripeIndex(stripe),
            position: position as u16,
            version,
            crcs: crcs.to_vec(),
        };
        let site = match io.site {
            "fresh.strip" => "fresh.trailer",
            "destage.strip" => "destage.trailer",
            other => other,
        };
        let block = (self.geo.trailer_at(stripe), trailer.encode());
        let landed = self.write_in_strip(stripe, position, block, io.at(site), when).await?;
        if landed.is_some() {
            self.trailers.borrow_mut().put(stripe, position, version, Rc::new(trailer.crcs));
        }
        Ok(landed)
    }

    /// Parity strips for whole data strips (or the same columns of each), with their checksums. The same pass over the
    /// data proves that it still is what it was when its checksums were made: what memory has changed goes no further.
    pub(crate) fn encode(&self, data: &[Part]) -> Vec<Part> {
        let columns = data[0].crcs.len();
        let sources: Vec<&[u8]> = data.iter().map(|part| &part.data[..]).collect();
        let mut of_data = vec![0; data.len() * columns];
        let parity = make_parts(self.geo.m, columns, |parity, crcs| {
            let checksums = Checksums { sources: SourceCrcs::Wanted(&mut of_data), outputs: crcs };
            self.code.encode_with(&sources, parity, Residency::Warm, Some(checksums));
        });
        let known = data.iter().flat_map(|part| &part.crcs);
        assert!(known.eq(&of_data), "memory holds what was written");
        parity
    }

    /// Writes all strips of a stripe. Returns by position the life under which its strip landed.
    pub(crate) async fn write_stripe(
        &self,
        stripe: u64,
        parts: &[Part],
        version: Version,
        io: Io,
        when: WhenSuspended,
    ) -> Result<Vec<Option<u64>>, ArrayError> {
        let writes =
            parts.iter().enumerate().map(|(at, part)| self.write_strip(stripe, at, part, version, io, when));
        join_all(writes).await.into_iter().collect()
    }
}
