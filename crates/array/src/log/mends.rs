//! Mends: parts of log and checkpoint that an opening writes again before anything rests on them.
//!
//! A part that an opening has read may lie in the cache of a drive alone: a flush of an earlier process may
//! have failed and lost it, and a drive tells a failure only once. Reading it again proves nothing.
//!
//! Invariant: after [`write`] each part is durable on every carrier that lacked it and still serves, and on
//! one carrier at least if the array needs it. A carrier that refused a part is not taken for one that has
//! it: metadata counts as bad until everything was written by new checkpoints.

use crate::context::Context;
use crate::error::ArrayError;
use crate::members::{Members, MetadataState, WhenSuspended};
use crate::place::{Position, Positions};
use crate::site::Site;
use futures_util::{StreamExt, stream};
use penstock_base::Buf;
use penstock_base::rank::scoped;
use std::cell::Cell;

/// Parts written at the same time.
const IN_FLIGHT: usize = 32;

/// A part of what all carriers have. Carriers have numbers by the list that was read.
pub(crate) struct Mend {
    pub(crate) at: u64,
    pub(crate) bytes: Buf,
    /// Carriers that lack it. Nothing can be done before they have it.
    pub(crate) lacking: Vec<usize>,
    /// Carriers that have it, maybe in a cache alone, or where something worse than nothing cannot lie. One
    /// may refuse it while no drive may be lost: waiting for a bad place would keep the array closed, and
    /// nobody could replace the drive.
    pub(crate) whole: Vec<usize>,
    /// No carrier is known to have it durable: one must take it.
    pub(crate) is_needed: bool,
}

/// Writes parts on `carriers` and makes them durable. Without parts it does nothing.
pub(crate) async fn write(
    context: &Context,
    members: &Members,
    parts: &[Mend],
    carriers: &[Position],
    site: Site,
) -> Result<(), ArrayError> {
    let mut rest: Vec<&Mend> = parts.iter().collect();
    if rest.is_empty() {
        return Ok(());
    }
    let mut when = WhenSuspended::Fail;
    let refused = Cell::new(Positions::NONE);
    // Each further round waits for a carrier of every part that is left, so it is due to a carrier that was
    // lost.
    for _ in 0..=carriers.len() + 1 {
        let written = rest.iter().map(|part| {
            let to = part.write(context, members, carriers, site, when, &refused);
            scoped(async move { Ok::<_, ArrayError>((*part, to.await?)) })
        });
        // Every write that began ends before an error is returned.
        let written: Vec<_> = stream::iter(written).buffer_unordered(IN_FLIGHT).collect().await;
        let written = written.into_iter().collect::<Result<Vec<_>, _>>()?;
        members.flush_carriers().await?;
        let serving = members.live_carriers();
        let is_left = |(part, to): &(&Mend, Vec<Position>)| {
            part.is_needed && !to.iter().any(|carrier| serving.contains(carrier))
        };
        rest = written.into_iter().filter(is_left).map(|(part, _)| part).collect();
        if rest.is_empty() {
            return Ok(());
        }
        when = WhenSuspended::Wait;
    }
    unreachable!("a round without a lost carrier writes everything")
}

impl Mend {
    /// Returns the carriers that took the part. If it must wait for one, it does not ask others. A carrier
    /// that has refused a part is asked no more for those that another may take.
    async fn write(
        &self,
        context: &Context,
        members: &Members,
        carriers: &[Position],
        site: Site,
        when: WhenSuspended,
        refused: &Cell<Positions>,
    ) -> Result<Vec<Position>, ArrayError> {
        let mut taken = Vec::new();
        let lacking = self.lacking.iter().map(|carrier| (*carrier, WhenSuspended::Wait));
        for (carrier, when) in lacking.chain(self.whole.iter().map(|carrier| (*carrier, when))) {
            let position = carriers[carrier];
            let is_enough = when == WhenSuspended::Wait && !taken.is_empty() && self.whole.contains(&carrier);
            let has_refused = when == WhenSuspended::Fail && refused.get().contains(position);
            if is_enough || has_refused || !members.live_carriers().contains(&position) {
                continue;
            }
            match members.write(position, (self.at, self.bytes.clone()), site.io(), when).await {
                Ok(Some(_)) => taken.push(position),
                Ok(None) => {}
                Err(ArrayError::Suspended(why)) if when == WhenSuspended::Fail => {
                    refused.set(refused.get().with(Positions::one(position)));
                    tracing::warn!(array = context.name, %position, why, "metadata cannot be written again");
                    members.set_metadata(MetadataState::Refused);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(taken)
    }
}
