//! The report of an array: its state, its members, its counters.

use crate::array::Array;
use crate::counters::Counts;
use crate::jobs::JobProgress;
use crate::members::MemberReport;
use crate::place::MemberNo;
use penstock_base::{ArrayId, BLOCK_BYTES};

/// The condition of an array in one word, the best one first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ArrayState {
    /// Every stripe has all its strips.
    Ok,
    /// Every stripe has all its strips, some of them in spare places because members are gone.
    Spared,
    /// Some stripe lacks strips and has redundancy left.
    Degraded,
    /// Some stripe has no redundancy left.
    Critical,
    /// Some data cannot be read.
    Failed,
    /// Writes wait.
    Suspended,
}

impl ArrayState {
    /// The state as one word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Spared => "spared",
            Self::Degraded => "degraded",
            Self::Critical => "critical",
            Self::Failed => "failed",
            Self::Suspended => "suspended",
        }
    }

    /// The state of an array whose worst stripe lacks `lost` strips, of which `m` may be lost.
    fn of(lost: usize, m: usize) -> Self {
        match lost {
            0 => Self::Ok,
            lost if lost < m => Self::Degraded,
            lost if lost == m => Self::Critical,
            _ => Self::Failed,
        }
    }
}

/// An array as it stands.
#[derive(Clone, Debug)]
pub struct Report {
    /// The array.
    pub id: ArrayId,
    /// Its name.
    pub name: String,
    /// Data and parity strips.
    pub code: (usize, usize),
    /// Its condition.
    pub state: ArrayState,
    /// Why writes wait, if they do.
    pub suspended: Option<String>,
    /// Why the array stopped by itself, if it did. It serves nothing until it is opened again.
    pub stopped: Option<String>,
    /// Stripes with fewer valid strips than the code has.
    pub redundancy_debt_stripes: u64,
    /// Replicas of log and checkpoints that are missing.
    pub missing_carriers: u64,
    /// Stripes that could not be read when last tried.
    pub unreadable_stripes: u64,
    /// Stripes in the array, and written ones among them.
    pub stripes: (u64, u64),
    /// False while stripes are counted. Those that are not yet count as lacking redundancy.
    pub is_counted: bool,
    /// Pages of the stripe table in memory, and lost ones: no replica has them.
    pub table_pages: (u64, u64),
    /// The layout in a few words.
    pub layout: String,
    /// Bytes of data in a stripe.
    pub stripe_bytes: u64,
    /// Share of the log in use, in percent.
    pub log_used_percent: u64,
    /// Data blocks in the log that are not in their strips yet.
    pub dirty_blocks: u64,
    /// The members by number.
    pub members: Vec<MemberReport>,
    /// Its counters.
    pub counts: Counts,
    /// A running rebuild.
    pub rebuild: Option<JobProgress>,
    /// A running scrub.
    pub scrub: Option<JobProgress>,
}

impl Array {
    fn state(&self) -> ArrayState {
        if self.stopped().is_some() {
            return ArrayState::Failed;
        }
        if self.suspended().is_some() {
            return ArrayState::Suspended;
        }
        if !self.stripes.map().unreadable().is_empty() {
            return ArrayState::Failed;
        }
        let worst = self.stripes.census().worst();
        match ArrayState::of(worst, self.context.geo.m) {
            ArrayState::Ok if !self.stripes.table().is_counted() => ArrayState::Degraded,
            ArrayState::Ok if self.missing_carriers() > 0 => ArrayState::Degraded,
            // With spare places all strips of a member that is gone may be on others.
            ArrayState::Ok if !self.members.gone().is_empty() => match self.has_moved_all() {
                true => ArrayState::Spared,
                false => ArrayState::Degraded,
            },
            state => state,
        }
    }

    /// True if strips move, and none lies on a member that is gone.
    fn has_moved_all(&self) -> bool {
        let census = self.stripes.census();
        let mut gone = self.members.gone().iter();
        self.context.layout.spares() > 0 && gone.all(|member| census.on(member).strips == 0)
    }

    /// The array as it stands.
    pub fn report(&self) -> Report {
        let (context, state) = (&self.context, self.state());
        let redundancy_debt_stripes = self.redundancy_debt_stripes();
        let census = self.stripes.census();
        let strips = |member: MemberNo| census.on(member);
        Report {
            id: context.id,
            name: context.name.clone(),
            code: (context.geo.k, context.geo.m),
            state,
            suspended: self.suspended(),
            stopped: self.stopped().map(str::to_owned),
            redundancy_debt_stripes,
            missing_carriers: self.missing_carriers(),
            unreadable_stripes: self.stripes.map().unreadable().len() as u64,
            stripes: (context.geo.stripes, self.stripes.table().written()),
            is_counted: self.stripes.table().is_counted(),
            table_pages: (self.stripes.table().resident(), self.stripes.table().lost()),
            layout: context.layout.describe(),
            stripe_bytes: u64::from(context.geo.stripe_blocks()) * BLOCK_BYTES as u64,
            log_used_percent: self.chain.used_percent(),
            dirty_blocks: self.stripes.overlay().counts().blocks,
            members: self.members.report(strips),
            counts: context.counts(),
            rebuild: self.rebuild.progress(),
            scrub: self.scrub.progress(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_stripe_decides() {
        for (lost, m, expected) in [
            (0, 2, ArrayState::Ok),
            (1, 2, ArrayState::Degraded),
            (2, 2, ArrayState::Critical),
            (3, 2, ArrayState::Failed),
            (1, 1, ArrayState::Critical),
            (0, 0, ArrayState::Ok),
            (1, 0, ArrayState::Failed),
        ] {
            assert_eq!(ArrayState::of(lost, m), expected, "{lost} of {m}");
        }
    }
}
