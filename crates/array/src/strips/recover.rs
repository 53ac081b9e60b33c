//! Reconstruction of strips from the others, column by column.

use super::part::make;
use super::patience::Bad;
use super::{Erased, Found, Part, Strips};
use crate::error::ArrayError;
use crate::place::Position;
use futures_util::future::join_all;
use penstock_base::num::{to_u32, to_usize};
use penstock_base::{BLOCK_BYTES, Stripe};
use penstock_drive::Io;
use penstock_raid::SourceCrcs;
use std::ops::Range;

/// The treatment of columns of which too few strips are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hopeless {
    /// Nothing is made.
    Fails,
    /// They are marked as lost ([`Part::lost`]). If nothing can be made all are, unless drives do not answer.
    IsMarked,
}

fn numbers(positions: &[Position]) -> Vec<usize> {
    positions.iter().map(|position| position.index()).collect()
}

impl Strips {
    /// Reads columns of a strip, or makes them from the others.
    pub(crate) async fn read_or_recover(
        &self,
        stripe: Stripe,
        position: Position,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, ArrayError> {
        match self.read(stripe, position, columns, io).await {
            Ok(part) => Ok(part),
            Err(_) => self.recover_one(stripe, position, columns, io).await,
        }
    }

    /// Makes columns of a strip from the others.
    pub(crate) async fn recover_one(
        &self,
        stripe: Stripe,
        position: Position,
        columns: &Range<u32>,
        io: Io,
    ) -> Result<Part, ArrayError> {
        Ok(self.recover(stripe, &[position], columns, Found::default(), io).await?.remove(0))
    }

    /// Makes columns of the wanted strips from the others, of which the caller has read some: the same
    /// columns.
    pub(crate) async fn recover(
        &self,
        stripe: Stripe,
        wanted: &[Position],
        columns: &Range<u32>,
        found: Found,
        io: Io,
    ) -> Result<Vec<Part>, ArrayError> {
        self.recover_columns(stripe, wanted, columns, found, (Hopeless::Fails, io)).await
    }

    /// Makes full strips from the others. Blocks that cannot be made are marked as lost, so that the others
    /// are redundant again. Fails if none can be made and drives do not answer.
    pub(crate) async fn remake(
        &self,
        stripe: Stripe,
        wanted: &[Position],
        io: Io,
    ) -> Result<Vec<Part>, ArrayError> {
        let all = 0..self.context.geo.strip_blocks;
        self.recover_columns(stripe, wanted, &all, Found::default(), (Hopeless::IsMarked, io)).await
    }

    /// Makes full strips that were found bad. What was found of the stripe is read again block by block where
    /// a drive gave errors. Blocks that cannot be made are marked as lost.
    pub(crate) async fn make_bad(
        &self,
        stripe: Stripe,
        bad: &[Position],
        found: &mut Found,
        io: Io,
    ) -> Result<Vec<Part>, ArrayError> {
        let all = 0..self.context.geo.strip_blocks;
        self.read_single_blocks(stripe, &all, found, io).await;
        self.decode_columns(stripe, bad, all.len(), found, Hopeless::IsMarked)
    }

    /// A strip as it is, for another place: bad blocks that cannot be made stay bad, with their checksums.
    /// Fails while they may be good in a moment: they would be left behind.
    pub(crate) async fn read_as_it_is(
        &self,
        stripe: Stripe,
        position: Position,
        io: Io,
    ) -> Result<Part, ArrayError> {
        let all = 0..self.context.geo.strip_blocks;
        let erased = match self.read(stripe, position, &all, io).await {
            Ok(part) => return Ok(part),
            Err(erased) => erased,
        };
        let made = self.remake(stripe, &[position], io).await?.remove(0);
        let hopeless = made.lost_columns();
        if hopeless.is_empty() {
            return Ok(made);
        }
        let later = || Err(self.stripes.list_unreadable(stripe, self.context.geo.k - 1));
        let has_errors = matches!(erased, Erased::Unreachable);
        let own = match erased {
            Erased::Unreachable => match self.read_blockwise(stripe, position, &all, io).await {
                // Nobody could look.
                None => return later(),
                Some(Ok(part) | Err(Erased::Blocks { part, .. })) => Some(part),
                Some(Err(_)) => None,
            },
            Erased::Blocks { part, .. } => Some(part),
            Erased::Strip => None,
        };
        if own.is_none() && !self.is_trailer_lost(stripe, position) {
            return later();
        }
        let marked = own.as_ref().map(Part::lost_columns).unwrap_or_default();
        let mut are_lost = !has_errors || self.answers(stripe, position, io).await;
        if are_lost {
            for column in hopeless.iter().filter(|column| !marked.contains(column)) {
                are_lost &= self.found_bad(stripe, position, Bad::Block(to_u32(*column)));
            }
        }
        if !are_lost {
            return later();
        }
        Ok(match own {
            Some(own) => made.with_columns_of(&own, &hopeless),
            None => made,
        })
    }

    async fn recover_columns(
        &self,
        stripe: Stripe,
        wanted: &[Position],
        columns: &Range<u32>,
        mut found: Found,
        (hopeless, io): (Hopeless, Io),
    ) -> Result<Vec<Part>, ArrayError> {
        let k = self.context.geo.k;
        self.context.count(|counts| counts.degraded_reads += 1);
        let mut available: Vec<Position> = self.stripes.readable(stripe).iter().collect();
        available.retain(|position| !wanted.contains(position) && !found.contains_key(position));
        self.take_redundancy_in_turn(stripe, &mut available);
        if found.is_empty() && available.len() >= k {
            let mut sources = available[..k].to_vec();
            sources.sort_unstable();
            let parts = self.read_unproved_parts(stripe, &sources, columns, io).await;
            if let Some(made) = self.make_proved(&sources, wanted, &parts, columns.len()) {
                if self.is_whole_strip(columns) {
                    sources.iter().for_each(|position| self.found_whole(stripe, *position));
                }
                return Ok(made);
            }
            // Strips that are to be read again are now the first ones of `available`.
            found = super::parts_to_keep(&sources, parts);
            available.retain(|position| !found.contains_key(position));
        }
        assert!(
            available.iter().all(|at| !found.contains_key(at) && !wanted.contains(at)),
            "a strip is read once"
        );
        let lacking = k.saturating_sub(found.len());
        let first: Vec<Position> = available.iter().copied().take(lacking).collect();
        found.extend(self.read_parts(stripe, &first, columns, io).await);
        let all_good = found.len() == k && found.values().all(Result::is_ok);
        if !all_good {
            let rest: Vec<Position> =
                available.into_iter().skip(lacking).chain(wanted.iter().copied()).collect();
            found.extend(self.read_parts(stripe, &rest, columns, io).await);
        }
        let whole = found.values().filter(|part| part.is_ok()).count();
        if hopeless == Hopeless::IsMarked || whole < k {
            self.read_single_blocks(stripe, columns, &mut found, io).await;
        }
        self.decode_columns(stripe, wanted, columns.len(), &found, hopeless)
    }

    /// Reads strips that gave an error once more, block by block: some blocks may be readable.
    async fn read_single_blocks(&self, stripe: Stripe, columns: &Range<u32>, found: &mut Found, io: Io) {
        let unread = found.iter().filter(|(_, part)| matches!(part, Err(Erased::Unreachable)));
        let reads = unread.map(|(position, _)| {
            let position = *position;
            async move { (position, self.read_blockwise(stripe, position, columns, io).await) }
        });
        for (position, read) in join_all(reads.collect::<Vec<_>>()).await {
            if let Some(read) = read {
                found.insert(position, read);
            }
        }
    }

    /// Puts another redundancy strip first from stripe to stripe, behind the data strips: the members that
    /// have them share the reads.
    fn take_redundancy_in_turn(&self, stripe: Stripe, positions: &mut [Position]) {
        let geo = &self.context.geo;
        let data = positions.partition_point(|position| position.index() < geo.k);
        let redundancy = &mut positions[data..];
        if !redundancy.is_empty() {
            let turn = stripe.0 / geo.strips() as u64 % redundancy.len() as u64;
            redundancy.rotate_left(to_usize(turn));
        }
    }

    /// Makes the wanted strips in the pass that also proves their sources: `columns` blocks of k strips at
    /// these positions. None unless all sources are there and right.
    fn make_proved(
        &self,
        positions: &[Position],
        wanted: &[Position],
        parts: &[Result<Part, Erased>],
        columns: usize,
    ) -> Option<Vec<Part>> {
        let parts: Vec<&Part> = parts.iter().map(|part| part.as_ref().ok()).collect::<Option<_>>()?;
        let plan = self.code.plan_with(&numbers(positions), &numbers(wanted)).ok()?;
        let sources: Vec<&[u8]> = parts.iter().map(|part| &part.data[..]).collect();
        let mut of_sources = vec![0; parts.len() * columns];
        let made = make(&plan, &sources, columns, SourceCrcs::Wanted(&mut of_sources));
        parts.iter().flat_map(|part| &part.crcs).eq(&of_sources).then_some(made)
    }

    /// Decodes column by column, each from the strips whose block verified there. Runs of columns with the
    /// same good strips are decoded together.
    fn decode_columns(
        &self,
        stripe: Stripe,
        wanted: &[Position],
        count: usize,
        found: &Found,
        hopeless: Hopeless,
    ) -> Result<Vec<Part>, ArrayError> {
        let good_at = |column: usize| -> Vec<Position> {
            let good = |part: &Result<Part, Erased>| match part {
                Ok(_) => true,
                Err(Erased::Blocks { bad, .. }) => !bad.contains(&column),
                Err(_) => false,
            };
            let all = self.context.geo.all_strips();
            all.iter().filter(|at| found.get(at).is_some_and(good)).collect()
        };
        // The runs of each wanted strip, in order.
        let mut runs: Vec<Vec<Part>> = vec![Vec::new(); wanted.len()];
        let (mut start, mut lost, mut has_some) = (0, None, false);
        while start < count {
            let good = good_at(start);
            let end = (start + 1..count).find(|column| good_at(*column) != good).unwrap_or(count);
            let made = match self.decode_run(stripe, wanted, start..end, &good, found) {
                Err(error @ ArrayError::Unreadable { .. }) if hopeless == Hopeless::IsMarked => {
                    lost = Some(error);
                    vec![Part::lost(end - start); wanted.len()]
                }
                made => {
                    has_some = true;
                    made?
                }
            };
            assert_eq!(made.len(), wanted.len(), "every wanted strip has the run");
            runs.iter_mut().zip(made).for_each(|(runs, made)| runs.push(made));
            start = end;
        }
        // All of the stripe is lost, unless that is for drives that will answer.
        let readable = self.stripes.readable(stripe);
        let answers = |at: &Position| match found.get(at) {
            Some(Err(Erased::Unreachable)) => false,
            Some(Err(Erased::Strip)) => self.is_trailer_lost(stripe, *at),
            _ => true,
        };
        if let Some(error) = lost.filter(|_| !has_some && !readable.iter().all(|at| answers(&at))) {
            return Err(error);
        }
        let parts = wanted.iter().zip(runs).map(|(position, runs)| {
            let data =
                penstock_base::buf::gather(&runs.iter().map(|run| run.data.clone()).collect::<Vec<_>>());
            let crcs: Vec<u32> = runs.into_iter().flat_map(|run| run.crcs).collect();
            assert_eq!(data.len(), count * BLOCK_BYTES, "every column was made");
            let made = Part { data, crcs };
            let known = match found.get(position) {
                Some(Ok(part) | Err(Erased::Blocks { part, .. })) => Some(part),
                _ => None,
            };
            match known {
                Some(known) if !known.agrees_with(&made) => {
                    let position = position.index();
                    Err(ArrayError::Disagrees { array: self.context.id, stripe: stripe.0, position })
                }
                _ => Ok(made),
            }
        });
        parts.collect()
    }

    /// A run of columns of the wanted strips: the good ones as they are, and the others made.
    fn decode_run(
        &self,
        stripe: Stripe,
        wanted: &[Position],
        run: Range<usize>,
        good: &[Position],
        found: &Found,
    ) -> Result<Vec<Part>, ArrayError> {
        let part_of = |position: Position| match &found[&position] {
            Ok(part) | Err(Erased::Blocks { part, .. }) => part.columns(run.clone()),
            Err(_) => unreachable!("only strips that were read are good"),
        };
        let need: Vec<Position> = wanted.iter().copied().filter(|at| !good.contains(at)).collect();
        // Good strips need no others, however few there are.
        if need.is_empty() {
            return Ok(wanted.iter().map(|at| part_of(*at)).collect());
        }
        let plan = self.code.plan_with(&numbers(good), &numbers(&need));
        let plan = plan.map_err(|_| self.stripes.list_unreadable(stripe, good.len()))?;
        let sources: Vec<Part> = plan.sources().iter().map(|at| part_of(Position::new(*at))).collect();
        let crcs: Vec<u32> = sources.iter().flat_map(|part| part.crcs.iter().copied()).collect();
        let sources: Vec<&[u8]> = sources.iter().map(|part| &part.data[..]).collect();
        // The plan's order is that of `need`, which keeps the order of `wanted`.
        let mut made = make(&plan, &sources, run.len(), SourceCrcs::Known(&crcs)).into_iter();
        let part = |at: &Position| match good.contains(at) {
            true => part_of(*at),
            false => made.next().expect("a part for each that is needed"),
        };
        Ok(wanted.iter().map(part).collect())
    }
}
