//! Reading the last checkpoint: the newest root, and the table pages that it names.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::root::Root;
use crate::format::table_page::{PAGES_IN_A_PIECE, TablePage};
use crate::format::without_far;
use crate::salvage::{self, Salvaged};
use crate::stripes::Stripes;
use futures_util::future::{join, join_all};
use futures_util::{StreamExt, stream};
use penstock_base::num::{to_u8, to_usize};
use penstock_base::{BLOCK_BYTES, Buf};
use penstock_drive::{Class, Io, Slice};

const IO: Io = Io::new(Class::Meta, "open.read");
/// Pieces of the table that are read at the same time from each place of each carrier.
const PIECES_IN_FLIGHT: usize = 4;

/// The newest root. A durable root is on every carrier, so one carrier that can be read decides. A place that
/// no carrier can read might hold it, and then nothing is decided. Numbers are given again after a start
/// whose root was not durable, and such a root may come back with a drive that has contents of the past.
/// Epochs are never given again. A root far ahead of another carrier's counts only if there is no other.
pub(super) async fn read_root(context: &Context, carriers: &[Slice]) -> Result<Root, ArrayError> {
    let mut roots: Vec<(usize, Root)> = Vec::new();
    for place in 0..2 {
        let mut is_known = false;
        for (number, carrier) in carriers.iter().enumerate() {
            let Ok(block) = carrier.read(context.geo.root_at(place), BLOCK_BYTES, IO).await else {
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
    newest_of(&roots).ok_or_else(|| context.damaged("the checkpoint's root".into()))
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

/// The result of [`read_table`].
#[derive(Default)]
pub(super) struct ReadTable {
    /// Copies that were bad.
    pub(super) bad: u64,
    /// Pages to write over those whose checkpoint has no root.
    pub(super) voids: Vec<Void>,
}

/// The newest committed copy of a page, for a place where a page of a checkpoint without a root may lie: the
/// next root's number would make that one count.
pub(super) struct Void {
    /// The carrier, by its index.
    pub(super) carrier: usize,
    /// Offset on its slice.
    pub(super) at: u64,
    pub(super) page: Buf,
}

/// Loads every table page from the carrier that has its newest committed copy, and proves by the root's sum
/// that these are the pages that the root was written for.
pub(super) async fn read_table(
    context: &Context,
    stripes: &Stripes,
    root: &Root,
    carriers: &[Slice],
) -> Result<ReadTable, ArrayError> {
    let (mut result, mut is_unreadable) = (ReadTable::default(), false);
    let firsts = (0..context.geo.pages()).step_by(to_usize(PAGES_IN_A_PIECE));
    let mut pieces = stream::iter(firsts.map(|first| async move {
        let pages = first..context.geo.pages().min(first + PAGES_IN_A_PIECE);
        let len = to_usize(pages.end - pages.start) * BLOCK_BYTES;
        let read = |carrier, place| salvage::read(carrier, context.geo.page_at(first, place), len, IO);
        let reads = carriers.iter().map(|carrier| join(read(carrier, 0), read(carrier, 1)));
        (pages, join_all(reads).await)
    }))
    .buffered(PIECES_IN_FLIGHT);
    while let Some((pages, copies)) = pieces.next().await {
        is_unreadable |= copies.iter().any(|(one, other)| one.lacks_some() || other.lacks_some());
        for page in pages.clone() {
            let at = to_usize(page - pages.start);
            result.bad += load_page(context, stripes, root, page, at, &copies, &mut result.voids)?;
        }
    }
    let sum = stripes.table().sum();
    match sum == root.table_sum {
        true => Ok(result),
        false if is_unreadable => Err(context.cannot_read("the stripe table".into())),
        false => Err(context.damaged("the newest copy of a stripe table page".into())),
    }
}

/// Loads one page from the copies of its piece, in which it has index `at`. Returns the number of bad copies.
fn load_page(
    context: &Context,
    stripes: &Stripes,
    root: &Root,
    page: u64,
    at: usize,
    copies: &[(Salvaged, Salvaged)],
    voids: &mut Vec<Void>,
) -> Result<u64, ArrayError> {
    let mut rootless = Vec::new();
    let mut decode = |carrier: usize, place: u64| {
        let (one, other) = &copies[carrier];
        let bytes = if place == 0 { one.bytes() } else { other.bytes() };
        let found = TablePage::decode(&bytes[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES]).ok()?;
        if found.array != context.id || found.index != page {
            return None;
        }
        if found.checkpoint > root.seq {
            rootless.push((carrier, place));
            return None;
        }
        (usize::from(found.strips) == context.geo.strips()).then_some(found)
    };
    let found: Vec<[Option<TablePage>; 2]> =
        (0..copies.len()).map(|carrier| [decode(carrier, 0), decode(carrier, 1)]).collect();
    let newest = found.iter().flatten().flatten().map(|copy| copy.checkpoint).max();
    let in_place = |place: usize| {
        let copies = found.iter().filter_map(move |places| places[place].as_ref());
        copies.filter(move |copy| Some(copy.checkpoint) == newest)
    };
    // The place where most carriers have it. The other has it too if a page there was written over.
    let place = usize::from(in_place(1).count() > in_place(0).count());
    let Some(best) = in_place(place).next() else {
        let readable = copies.iter().all(|(one, other)| one.has(at, 1) && other.has(at, 1));
        let what = format!("stripe table page {page}");
        return Err(if readable { context.damaged(what) } else { context.cannot_read(what) });
    };
    for (carrier, (one, other)) in copies.iter().enumerate() {
        // A page of a checkpoint without a root may hide in the other place.
        let hidden = if place == 0 { other } else { one };
        if !hidden.has(at, 1) {
            rootless.push((carrier, 1 - place as u64));
        }
        // An opening has written over such a page, maybe into a cache alone: which of the two places that was
        // is unknown.
        let is_newest = |copy: &Option<TablePage>| copy.as_ref().map(|copy| copy.checkpoint) == newest;
        if found[carrier].iter().all(is_newest) {
            rootless.extend([(carrier, 0), (carrier, 1)]);
        }
    }
    voids.extend(rootless.into_iter().map(|(carrier, place)| Void {
        carrier,
        at: context.geo.page_at(page, place),
        page: best.encode(),
    }));
    let is_loaded = stripes.table_mut().load_page(page, to_u8(place), best.checkpoint, &best.words);
    if !is_loaded {
        return Err(context.damaged(format!("stripe table page {page}")));
    }
    Ok((found.len() - in_place(place).count()) as u64)
}
