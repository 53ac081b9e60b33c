//! Reading pages of the stripe table and its index from carriers.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::index_page::PageRef;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf};
use penstock_drive::{Class, Io, Slice};

const IO: Io = Io::new(Class::Meta, "table.read");

/// A page that was read.
pub(crate) struct ReadPage {
    /// The block that is named.
    pub(crate) block: Buf,
    /// Carriers that were asked and did not have it.
    pub(crate) bad: u64,
}

/// Reads the committed copy of a page from a carrier that has it.
///
/// # Errors
/// None has it; if one cannot be read, it might.
pub(crate) async fn read(
    context: &Context,
    carriers: &[Slice],
    page: u64,
    named: PageRef,
) -> Result<ReadPage, ArrayError> {
    let (at, mut is_unreadable, mut bad) = (context.geo.page_at(page, named.place.into()), false, 0);
    // Another one first for each page: they share the work.
    let first = to_usize(page % carriers.len().max(1) as u64);
    for carrier in carriers[first..].iter().chain(&carriers[..first]) {
        match carrier.read(at, BLOCK_BYTES, IO).await {
            Ok(block) if named.names(&block) => return Ok(ReadPage { block, bad }),
            Ok(_) => {}
            Err(_) => is_unreadable = true,
        }
        bad += 1;
    }
    let what = format!("stripe table page {page}");
    Err(if is_unreadable { context.cannot_read(what) } else { context.damaged(what) })
}

/// Reads the committed copies of pages that one index page names, in ascending order, with few I/Os. The
/// result has one for each of them.
pub(crate) async fn read_run(
    context: &Context,
    carriers: &[Slice],
    run: &[(u64, PageRef)],
) -> Vec<Result<ReadPage, ArrayError>> {
    let (Some((first, _)), Some((last, _))) = (run.first(), run.last()) else { return Vec::new() };
    let (len, carrier) = (to_usize(last - first + 1), to_usize(first % carriers.len().max(1) as u64));
    let mut pieces = [None, None];
    for (place, piece) in pieces.iter_mut().enumerate() {
        if run.iter().any(|(_, named)| usize::from(named.place) == place)
            && let Some(carrier) = carriers.get(carrier)
        {
            let at = context.geo.page_at(*first, place as u64);
            *piece = carrier.read(at, len * BLOCK_BYTES, IO).await.ok();
        }
    }
    let mut pages = Vec::with_capacity(run.len());
    for (page, named) in run {
        let at = to_usize(page - first) * BLOCK_BYTES;
        let piece: &Option<Buf> = &pieces[usize::from(named.place)];
        let block = piece.as_ref().map(|piece| piece.slice(at..at + BLOCK_BYTES));
        let is_bad = block.as_ref().is_some_and(|block| !named.names(block));
        let found = match block.filter(|_| !is_bad) {
            Some(block) => Ok(ReadPage { block, bad: 0 }),
            None => {
                let found = read(context, carriers, *page, *named).await;
                found.map(|found| ReadPage { bad: found.bad.max(is_bad.into()), ..found })
            }
        };
        pages.push(found);
    }
    pages
}
