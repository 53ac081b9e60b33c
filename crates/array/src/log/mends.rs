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
use crate::place::{MemberNo, MemberSet};
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
    /// Carriers that have it, and not in a cache alone.
    pub(crate) durable: Vec<usize>,
    /// The array needs it: one carrier that serves must have it durable.
    pub(crate) is_needed: bool,
}

/// Writes parts on `carriers` and makes them durable. Without parts it does nothing.
pub(crate) async fn write(
    context: &Context,
    members: &Members,
    parts: &[Mend],
    carriers: &[MemberNo],
    site: Site,
) -> Result<(), ArrayError> {
    let mut rest: Vec<&Mend> = parts.iter().collect();
    if rest.is_empty() {
        return Ok(());
    }
    let mut when = WhenSuspended::Fail;
    let refused = Cell::new(MemberSet::NONE);
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
        let is_left = |(part, to): &(&Mend, Vec<MemberNo>)| {
            let durable = part.durable.iter().map(|carrier| &carriers[*carrier]);
            part.is_needed && !to.iter().chain(durable).any(|carrier| serving.contains(carrier))
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
    /// Returns the carriers that took the part. If it must wait for one of those that have it, the first that
    /// takes it is enough. Else a carrier that has refused a part is asked no more for any that another may
    /// take.
    async fn write(
        &self,
        context: &Context,
        members: &Members,
        carriers: &[MemberNo],
        site: Site,
        when: WhenSuspended,
        refused: &Cell<MemberSet>,
    ) -> Result<Vec<MemberNo>, ArrayError> {
        let serves = |member: &MemberNo| members.live_carriers().contains(member);
        let write =
            async |member, when| members.write(member, (self.at, self.bytes.clone()), site.io(), when).await;
        let mut taken = Vec::new();
        for member in self.lacking.iter().map(|carrier| carriers[*carrier]).filter(serves) {
            let written = write(member, WhenSuspended::Wait).await?;
            taken.extend(written.map(|_| member));
        }
        loop {
            let mut refusal = None;
            for member in self.whole.iter().map(|carrier| carriers[*carrier]).filter(serves) {
                let is_enough = when == WhenSuspended::Wait && !taken.is_empty();
                let has_refused = when == WhenSuspended::Fail && refused.get().contains(member);
                if is_enough || has_refused {
                    continue;
                }
                match write(member, WhenSuspended::Fail).await {
                    Ok(written) => taken.extend(written.map(|_| member)),
                    Err(ArrayError::Suspended(why)) => {
                        if !refused.get().contains(member) {
                            tracing::warn!(array = context.name, %member, why, "metadata cannot be written again");
                        }
                        refused.set(refused.get().with(MemberSet::one(member)));
                        members.set_metadata(MetadataState::Refused);
                        refusal = Some(why);
                    }
                    Err(error) => return Err(error),
                }
            }
            match refusal {
                Some(why) if when == WhenSuspended::Wait && taken.is_empty() => context.suspend(why).await?,
                _ => return Ok(taken),
            }
        }
    }
}
