//! Reading the last checkpoint: the newest root, and the table pages that it names.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::root::Root;
use crate::format::table_page::{PAGES_IN_A_PIECE, TablePage};
use crate::format::without_far;
use crate::log::mends::Mend;
use crate::salvage::{self, Salvaged};
use crate::stripes::Stripes;
use futures_util::future::{join, join_all};
use futures_util::{StreamExt, stream};
use penstock_base::BLOCK_BYTES;
use penstock_base::num::{to_u8, to_usize};
use penstock_drive::{Class, Io, Slice};

const IO: Io = Io::new(Class::Meta, "open.read");
/// Pieces of the table that are read at the same time from each place of each carrier.
const PIECES_IN_FLIGHT: usize = 4;

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

/// The result of [`read_table`].
#[derive(Default)]
pub(super) struct ReadTable {
    /// Copies that were bad.
    pub(super) bad: u64,
    /// Committed pages that carriers need.
    pub(super) mends: Vec<Mend>,
}

/// Loads every table page from the carrier that has its newest committed copy, and proves by the root's sum
/// that these are the pages that the root was written for. `in_doubt` says that what carriers have may lie in
/// caches alone.
pub(super) async fn read_table(
    context: &Context,
    stripes: &Stripes,
    root: &Root,
    carriers: &[Slice],
    in_doubt: bool,
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
            let loaded = PageCopies::decode(context, root, page, at, &copies).load(stripes, in_doubt)?;
            result.bad += loaded.bad;
            result.mends.extend(loaded.mends);
        }
    }
    let sum = stripes.table().sum();
    match sum == root.table_sum {
        true => Ok(result),
        false if is_unreadable => Err(context.cannot_read("the stripe table".into())),
        false => Err(context.damaged("the newest copy of a stripe table page".into())),
    }
}

/// A page as one carrier has it at one place.
enum PageCopy {
    /// Of a checkpoint up to the root.
    Committed(TablePage),
    /// Of a checkpoint without a root. The number of the next root would make it count.
    Rootless,
    /// Something else, or nothing.
    Bad,
    /// The drive did not return it. It may be any of the others.
    Unreadable,
}

/// The carriers that need a page at one of its places, as in [`Mend`].
#[derive(Default)]
struct Need {
    lacking: Vec<usize>,
    whole: Vec<usize>,
    durable: Vec<usize>,
}

/// All copies of one page.
struct PageCopies<'a> {
    context: &'a Context,
    page: u64,
    /// Its index in the piece that was read.
    at: usize,
    pieces: &'a [(Salvaged, Salvaged)],
    /// By carrier and place.
    copies: Vec<[PageCopy; 2]>,
    /// The checkpoint of the newest committed copy.
    newest: Option<u64>,
}

impl<'a> PageCopies<'a> {
    fn decode(
        context: &'a Context,
        root: &Root,
        page: u64,
        at: usize,
        pieces: &'a [(Salvaged, Salvaged)],
    ) -> Self {
        let decode = |piece: &Salvaged| {
            if !piece.has(at, 1) {
                return PageCopy::Unreadable;
            }
            let bytes = &piece.bytes()[at * BLOCK_BYTES..(at + 1) * BLOCK_BYTES];
            match TablePage::decode(bytes) {
                Ok(found) if found.array != context.id || found.index != page => PageCopy::Bad,
                Ok(found) if found.checkpoint > root.seq => PageCopy::Rootless,
                Ok(found) if usize::from(found.strips) == context.geo.strips() => PageCopy::Committed(found),
                _ => PageCopy::Bad,
            }
        };
        let copies: Vec<_> = pieces.iter().map(|(one, other)| [decode(one), decode(other)]).collect();
        let checkpoint = |copy: &PageCopy| match copy {
            PageCopy::Committed(page) => Some(page.checkpoint),
            _ => None,
        };
        let newest = copies.iter().flatten().filter_map(checkpoint).max();
        Self { context, page, at, pieces, copies, newest }
    }

    fn is_newest(&self, carrier: usize, place: usize) -> bool {
        matches!(&self.copies[carrier][place], PageCopy::Committed(page) if Some(page.checkpoint) == self.newest)
    }

    /// The carriers that have the newest copy at a place.
    fn in_place(&self, place: usize) -> impl Iterator<Item = usize> {
        (0..self.copies.len()).filter(move |carrier| self.is_newest(*carrier, place))
    }

    /// Loads the newest copy into the table. Returns the number of bad copies, and what carriers need.
    fn load(&self, stripes: &Stripes, in_doubt: bool) -> Result<ReadTable, ArrayError> {
        // The place where most carriers have it. The other has it too if a page there was written over.
        let place = usize::from(self.in_place(1).count() > self.in_place(0).count());
        let best = self.in_place(place).next().map(|carrier| (carrier, &self.copies[carrier][place]));
        let what = || format!("stripe table page {}", self.page);
        let Some((carrier, PageCopy::Committed(page))) = best else {
            let is_readable = !self.copies.iter().flatten().any(|copy| matches!(copy, PageCopy::Unreadable));
            let context = self.context;
            return Err(if is_readable { context.damaged(what()) } else { context.cannot_read(what()) });
        };
        if !stripes.table_mut().load_page(self.page, to_u8(place), page.checkpoint, &page.words) {
            return Err(self.context.damaged(what()));
        }
        let bytes = [&self.pieces[carrier].0, &self.pieces[carrier].1][place].bytes();
        let bytes = bytes.slice(self.at * BLOCK_BYTES..(self.at + 1) * BLOCK_BYTES);
        let mend = |at: usize, to: Need| Mend {
            at: self.context.geo.page_at(self.page, at as u64),
            bytes: bytes.clone(),
            lacking: to.lacking,
            whole: to.whole,
            durable: to.durable,
            is_needed: at == place,
        };
        let (here, there) = (self.needed_here(place, in_doubt), self.needed_there(1 - place));
        let mends = [mend(place, here), mend(1 - place, there)];
        Ok(ReadTable {
            bad: (self.copies.len() - self.in_place(place).count()) as u64,
            mends: mends
                .into_iter()
                .filter(|mend| !mend.lacking.is_empty() || !mend.whole.is_empty())
                .collect(),
        })
    }

    /// The carriers that need the page at the place of the committed copy.
    fn needed_here(&self, place: usize, in_doubt: bool) -> Need {
        let mut need = Need::default();
        for (carrier, copies) in self.copies.iter().enumerate() {
            let is_newest_there = self.is_newest(carrier, 1 - place);
            match &copies[place] {
                PageCopy::Committed(_) if self.is_newest(carrier, place) => {
                    match in_doubt || is_newest_there {
                        false => need.durable.push(carrier),
                        // An opening has written it, maybe into a cache alone, and over a page of a
                        // checkpoint without a root. If it is in both places, which of them that was is
                        // unknown.
                        true => need.lacking.push(carrier),
                    }
                }
                // The carrier has no copy, and this place cannot become one that must not count.
                PageCopy::Committed(_) | PageCopy::Bad if !is_newest_there => need.whole.push(carrier),
                // It may hide a page that must not count, or the next checkpoint writes over the only copy
                // that this carrier has.
                _ => need.lacking.push(carrier),
            }
        }
        need
    }

    /// The carriers that need it at the other place, so that no page there counts that must not.
    fn needed_there(&self, place: usize) -> Need {
        let mut need = Need::default();
        for (carrier, copies) in self.copies.iter().enumerate() {
            match &copies[place] {
                // The second may hide such a page.
                PageCopy::Rootless | PageCopy::Unreadable => need.lacking.push(carrier),
                PageCopy::Committed(_) if self.is_newest(carrier, place) => need.lacking.push(carrier),
                PageCopy::Committed(_) | PageCopy::Bad => {}
            }
        }
        need
    }
}
