//! Drives with contents of the past: a snapshot that was restored, or an old copy in the place of the drive.
//!
//! They lack everything that was written since, and the table says that it is there. So the descriptor has,
//! for each member, stale or not, a lower bound of the epoch in that member's label, and the root has
//! one for all members that count: every opening writes the labels of all members before its root. A
//! member whose label is below its bound is such a drive. A copy from within the present opening is not
//! recognised: its strips do not verify, which reads and scrubs find.
//!
//! If stripes would be lost without such drives and those that are away, the opening ends before it writes:
//! its redo would make the contents of the right drives out of date, and bringing them back would not help.
//! An administrator may give up the data that only they have.
//!
//! Invariant: such a drive is recorded as stale before anything is written past it, and is neither read nor
//! written before the log says that nothing on it counts. A power cut before that leaves its label as it
//! is, and the next opening finds the same; the right drive, if it is there then, is resynced like one that
//! was away.

use crate::context::Context;
use crate::error::ArrayError;
use crate::events::ArrayEvent;
use crate::format::root::Root;
use crate::log::fold::Redo;
use crate::members::ownership::{AcceptedLoss, Claim, Lacking};
use crate::members::{FoundLabels, Members};
use crate::place::{MemberNo, MemberSet, Position};
use crate::stripes::Stripes;
use crate::stripes::census::StripeState;
use crate::stripes::load::{END, Unread};
use crate::stripes::table::StripeTable;
use crate::strips::{Erased, Part, Strips};
use penstock_base::Stripe;
use penstock_drive::{Class, Io, Slice};
use std::time::Duration;

/// A member that is left out, with its slice.
pub(super) type LeftOut = (MemberNo, Slice);

/// Stripes that an opening reads to see whether they are lost in any case. If there are more it does not go
/// on.
const MOST_READ: u64 = 1024;
/// Lost stripes that are found with one look at the table.
const FOUND_AT_A_TIME: usize = 4096;
/// So often that is seen, with a pause between: a strip may read wrong for a moment.
const LOOKS: u32 = 3;
const PAUSE: Duration = Duration::from_secs(5);
/// No further stripe is read after this time.
const LONGEST_LOOK: Duration = Duration::from_secs(60);
const IO: Io = Io::new(Class::Meta, "open.stripe");

/// Takes the slices of outdated members away, and returns them. If the loss of their contents is accepted and
/// more would be missing than the array survives, all stay: old strips do not verify. Returns also the drives
/// that the claim must name as used. Members whose labels cannot be read are here only if their
/// loss is accepted: they stay in any case.
pub(super) fn leave_out_outdated(
    context: &Context,
    members: &Members,
    root: &Root,
    claim: &Claim,
    stale: MemberSet,
    labels: &FoundLabels,
    lacking: Lacking,
) -> (Vec<LeftOut>, AcceptedLoss) {
    let mut accepted = claim.accepted.clone();
    if root.epoch >= claim.epoch {
        accepted.has_root(root.epoch);
    }
    let (mut found, mut missing, mut used) = (Vec::new(), MemberSet::NONE, MemberSet::NONE);
    for member in context.layout.all_members().iter() {
        let is_stale = stale.contains(member);
        let least = root.least_epoch(member, &members.descriptor().members[member.index()], is_stale);
        let (mut is_missing, slice) = (is_stale, members.slice(member));
        if let Some(slice) = slice {
            let may_be_old = |epoch| epoch < least || accepted.may_be_old(member, epoch);
            if labels.unread.contains(member) {
                assert_eq!(lacking, Lacking::Accept, "else it is away");
                used.insert(member);
                is_missing = true;
            } else if labels.epochs[member.index()].is_none_or(may_be_old) {
                tracing::warn!(
                    array = context.name,
                    %member,
                    drive = %slice.drive().id(),
                    path = slice.drive().path(),
                    "the drive is as it was before an earlier start of the array"
                );
                found.push((member, slice));
                is_missing = true;
            } else {
                // The right drive is back, or it was never away.
                accepted.is_found(member, members.next_epoch(claim));
            }
        } else {
            is_missing = true;
        }
        if is_missing {
            missing.insert(member);
        }
    }
    if lacking == Lacking::Accept && context.layout.most_lost(missing) > context.geo.m {
        used = used.with(found.drain(..).map(|(member, _)| member).collect());
    }
    accepted.uses(used, members.next_epoch(claim));
    found.iter().for_each(|(member, _)| members.leave_out(*member));
    (found, accepted)
}

/// Refuses to go on if stripes would be lost without the drives that are away or left out.
pub(super) async fn check_loss(
    context: &Context,
    members: &Members,
    stripes: &Stripes,
    strips: &Strips,
    left_out: &[LeftOut],
    redo: &Redo,
) -> Result<(), ArrayError> {
    let gone = members.gone();
    let mut lost = 0;
    for look in 0..LOOKS {
        if look > 0 {
            context.env.sleep(PAUSE).await;
        }
        let all = lost_without(context, stripes, gone).await?;
        lost = match all {
            // A page that counted as lost until now may have some more.
            1..=MOST_READ => all.saturating_sub(lost_anyway(context, stripes, strips, gone, redo).await?),
            _ => all,
        };
        if all == 0 || lost > 0 {
            break;
        }
    }
    if lost == 0 {
        return Ok(());
    }
    let desc = members.descriptor();
    let name = |member: MemberNo| {
        let how = match left_out.iter().find(|(at, _)| *at == member) {
            Some((_, slice)) => format!("as it was in the past, at {}", slice.drive().path()),
            None => "not here".to_owned(),
        };
        format!("drive {} ({how})", desc.members[member.index()].drive)
    };
    let which = gone.iter().map(name).collect::<Vec<_>>().join(", ");
    Err(ArrayError::WouldLose { name: context.name.clone(), stripes: lost, which })
}

/// The first stripes from `from` on, at most `most`, with no more stale strips than the code can do without,
/// that lack more without those of the `gone` members.
async fn find_lost(
    context: &Context,
    stripes: &Stripes,
    gone: MemberSet,
    from: Stripe,
    most: usize,
) -> Result<Vec<Stripe>, ArrayError> {
    let (m, layout) = (context.geo.m, &context.layout);
    let may_have = |table: &StripeTable, page| table.most_lacking_of(page, gone) > m;
    let is_lost = |stripe, state: StripeState| {
        // Most stripes are told without their places.
        state.stale.len() + gone.len() > m
            && state.is_lost_without(layout, stripe, (MemberSet::NONE, gone), m)
    };
    stripes.find(from..END, most, Unread::Fails, may_have, is_lost).await
}

/// The number of stripes that [`find_lost`] finds.
async fn lost_without(context: &Context, stripes: &Stripes, gone: MemberSet) -> Result<u64, ArrayError> {
    let (mut lost, mut from) = (0, Stripe(0));
    loop {
        let found = find_lost(context, stripes, gone, from, FOUND_AT_A_TIME).await?;
        let Some(last) = found.last() else { return Ok(lost) };
        lost += found.len() as u64;
        from = last.next();
    }
}

/// The number of stripes among those lost without the `gone` members that cannot be read with them either.
async fn lost_anyway(
    context: &Context,
    stripes: &Stripes,
    strips: &Strips,
    gone: MemberSet,
    redo: &Redo,
) -> Result<u64, ArrayError> {
    let (mut lost, mut from, until) = (0, Stripe(0), context.env.now() + LONGEST_LOOK);
    while context.env.now() < until {
        let next = find_lost(context, stripes, gone, from, 1).await?;
        let Some(stripe) = next.first().copied() else { break };
        let _pages = stripes.shared(stripe).await?;
        // Strips that the log writes again may be torn on the drives.
        let is_lost = !redo.contains(stripe) && !may_be_read(context, stripes, strips, stripe, gone).await;
        lost += u64::from(is_lost);
        from = stripe.next();
    }
    Ok(lost)
}

/// True if some column of a stripe could be read with the `gone` members here, as they were last. A strip
/// that cannot be read now may be right; one that does not verify is not.
async fn may_be_read(
    context: &Context,
    stripes: &Stripes,
    strips: &Strips,
    stripe: Stripe,
    gone: MemberSet,
) -> bool {
    let columns = 0..context.geo.strip_blocks;
    let valid = context.geo.all_strips().without(stripes.stale(stripe));
    let lost = stripes.strips_on(stripe, gone);
    let (away, here): (Vec<Position>, Vec<Position>) = valid.iter().partition(|at| lost.contains(*at));
    let parts = strips.read_parts(stripe, &here, &columns, IO).await;
    columns.into_iter().any(|column| {
        let may_be_right = |part: &&Result<Part, Erased>| match part {
            Ok(_) | Err(Erased::Unreachable) => true,
            Err(Erased::Strip) => false,
            Err(Erased::Blocks { bad, .. }) => !bad.contains(&(column as usize)),
        };
        away.len() + parts.values().filter(may_be_right).count() >= context.geo.k
    })
}

/// Has members that were left out rebuilt from nothing.
pub(super) async fn take_back(
    context: &Context,
    members: &Members,
    left_out: Vec<LeftOut>,
) -> Result<(), ArrayError> {
    for (member, slice) in left_out {
        context.events.push(ArrayEvent::Outdated { member });
        members.put(member, slice).await?;
    }
    Ok(())
}
