//! Reading the last checkpoint: the newest root, and the index of the table that it names. Pages of the table
//! are read when they are needed.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::index_page::IndexPage;
use crate::format::root::Root;
use crate::format::without_far;
use crate::stripes::{Stripes, pages};
use futures_util::{StreamExt, stream};
use penstock_base::BLOCK_BYTES;
use penstock_drive::{Class, Io, Slice};

const IO: Io = Io::new(Class::Meta, "open.read");
/// Index pages of which all pages are read at the same time.
const RUNS_IN_FLIGHT: usize = 8;

/// The newest root. A durable root is on every carrier, so one carrier that can be read decides. A place that
/// no carrier can read might hold it, and then nothing is decided. Numbers are given again after a start
/// whose root was not durable, and such a root may come back with a drive that has contents of the past.
/// Epochs are never given again. A root far ahead of another carrier's counts only if there is no other.
///
/// Returns the places that a carrier did not return as well, each with the carrier's index: they may hide a
/// root that must not count.
pub(super) async fn read_root(
    context: &Context,
    carriers: &[Slice],
) -> Result<(Root, Vec<(usize, u64)>), ArrayError> {
    let mut roots: Vec<(usize, Root)> = Vec::new();
    let mut hidden = Vec::new();
    for place in 0..2 {
        let mut is_known = false;
        for (number, carrier) in carriers.iter().enumerate() {
            let Ok(block) = carrier.read(context.geo.root_at(place), BLOCK_BYTES, IO).await else {
                hidden.push((number, place));
                continue;
            };
            is_known = true;
            if let Ok(root) = Root::decode(&block)
                && root.array == context.id
                && root.is_sound()
            {
                roots.push((number, root));
            }
        }
        if !is_known {
            return Err(context.cannot_read("the checkpoint's root".into()));
        }
    }
    let roots = without_far(roots, Root::is_near);
    let newest = newest_of(&roots).ok_or_else(|| context.damaged("the checkpoint's root".into()))?;
    Ok((newest, hidden))
}

/// The newest of the roots. Carriers that name the same checkpoint in different ways are outvoted: each got
/// the same bytes, and one has rotted.
fn newest_of(roots: &[(usize, Root)]) -> Option<Root> {
    let number = |root: &Root| (root.epoch, root.seq);
    let newest = roots.iter().map(|(_, root)| number(root)).max()?;
    let copies: Vec<&Root> =
        roots.iter().map(|(_, root)| root).filter(|root| number(root) == newest).collect();
    let votes = |root: &Root| copies.iter().filter(|copy| **copy == root).count();
    copies.iter().rev().max_by_key(|root| votes(root)).map(|root| (*root).clone())
}

/// Loads the index of the table that a root names, each page from a carrier that has it. Returns the number
/// of copies that were asked for and are bad. A scrub of metadata asks for all.
pub(super) async fn read_index(
    context: &Context,
    stripes: &Stripes,
    root: &Root,
    carriers: &[Slice],
) -> Result<u64, ArrayError> {
    stripes.table_mut().load_root(root);
    let within = root.unreadable.iter().filter(|stripe| stripe.0 < context.geo.stripes);
    within.for_each(|stripe| stripes.list(*stripe));
    let (tree, mut bad) = (stripes.table().index().tree().clone(), 0);
    // From the top down: each level is proved by the one above.
    let mut level: Vec<u64> = Some(tree.top()).filter(|_| !root.table.is_none()).into_iter().collect();
    while !level.is_empty() {
        let mut below = Vec::new();
        let read = |run: &[u64]| {
            let table = stripes.table();
            let run: Vec<_> = run.iter().map(|page| (*page, table.index().page(*page))).collect();
            async move {
                let found = pages::read_run(context, carriers, &run).await;
                run.into_iter().map(|(page, _)| page).zip(found).collect::<Vec<_>>()
            }
        };
        let parent = |page: &u64| tree.parent(*page).map(|(parent, _)| parent);
        let runs = level.chunk_by(|one, next| parent(one) == parent(next)).map(read);
        let mut found = stream::iter(runs).buffered(RUNS_IN_FLIGHT);
        while let Some(run) = found.next().await {
            for (page, read) in run {
                let read = read.map_err(|not_read| not_read.error)?;
                bad += read.bad;
                let mut table = stripes.table_mut();
                let loaded = IndexPage::decode(&read.block)
                    .is_ok_and(|found| found.array == context.id && table.index_mut().load(page, found));
                if !loaded {
                    return Err(context.damaged(format!("stripe table page {page}")));
                }
                let is_of_index =
                    |child: &u64| !tree.is_leaf(*child) && !table.index().page(*child).is_none();
                below.extend(tree.children(page).filter(is_of_index));
            }
        }
        drop(found);
        level = below;
    }
    Ok(bad)
}
