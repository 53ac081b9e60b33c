//! Reading pages of the stripe table and its index from carriers.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::index_page::PageRef;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf};
use penstock_drive::{Class, DriveError, Io, Slice};

const IO: Io = Io::new(Class::Meta, "table.read");

/// A page that was read.
pub(crate) struct ReadPage {
    /// The block that is named.
    pub(crate) block: Buf,
    /// Carriers that were asked and did not have it.
    pub(crate) bad: u64,
}

/// Why a page is not read.
pub(crate) struct NotRead {
    pub(crate) error: ArrayError,
    /// Every carrier answered: none can read its copy any more, or has another one there.
    pub(crate) is_lost: bool,
}

/// Reads the committed copy of a page from a carrier that has it.
pub(crate) async fn read(
    context: &Context,
    carriers: &[Slice],
    page: u64,
    named: PageRef,
) -> Result<ReadPage, NotRead> {
    let (at, mut bad) = (context.geo.page_at(page, named.place.into()), 0);
    let (mut is_silent, mut is_unreadable) = (carriers.is_empty(), false);
    // Another one first for each page: they share the work.
    let first = to_usize(page % carriers.len().max(1) as u64);
    for carrier in carriers[first..].iter().chain(&carriers[..first]) {
        match carrier.read(at, BLOCK_BYTES, IO).await {
            Ok(block) if named.names(&block) => return Ok(ReadPage { block, bad }),
            Ok(_) => {}
            Err(DriveError::Io { .. }) => is_unreadable = true,
            Err(_) => is_silent = true,
        }
        bad += 1;
    }
    let what = format!("stripe table page {page}");
    let error = if is_silent || is_unreadable { context.cannot_read(what) } else { context.damaged(what) };
    Err(NotRead { error, is_lost: !is_silent })
}

/// Reads the committed copies of pages that one index page names, in ascending order, with few I/Os. The
/// result has one for each of them.
pub(crate) async fn read_run(
    context: &Context,
    carriers: &[Slice],
    run: &[(u64, PageRef)],
) -> Vec<Result<ReadPage, NotRead>> {
    let (Some((first, _)), Some((last, _))) = (run.first(), run.last()) else { return Vec::new() };
    let (len, asked) = (to_usize(last - first + 1), to_usize(first % carriers.len().max(1) as u64));
    let (mut pieces, mut others) = ([None, None], carriers.to_vec());
    for (place, piece) in pieces.iter_mut().enumerate() {
        let Some(carrier) = carriers.get(asked).filter(|_| others.len() == carriers.len()) else { break };
        if run.iter().any(|(_, named)| usize::from(named.place) == place) {
            let at = context.geo.page_at(*first, place as u64);
            match carrier.read(at, len * BLOCK_BYTES, IO).await {
                Ok(found) => *piece = Some(found),
                Err(DriveError::Io { .. }) => {}
                // It is not asked for each page again.
                Err(_) => drop(others.remove(asked)),
            }
        }
    }
    let is_silent = others.len() < carriers.len();
    let mut pages = Vec::with_capacity(run.len());
    for (page, named) in run {
        let at = to_usize(page - first) * BLOCK_BYTES;
        let piece: &Option<Buf> = &pieces[usize::from(named.place)];
        let block = piece.as_ref().map(|piece| piece.slice(at..at + BLOCK_BYTES));
        let is_bad = block.as_ref().is_some_and(|block| !named.names(block));
        let found = match block.filter(|_| !is_bad) {
            Some(block) => Ok(ReadPage { block, bad: 0 }),
            None => match read(context, &others, *page, *named).await {
                Ok(found) => Ok(ReadPage { bad: found.bad.max(is_bad.into()), ..found }),
                Err(_) if is_silent => {
                    let error = context.cannot_read(format!("stripe table page {page}"));
                    Err(NotRead { error, is_lost: false })
                }
                Err(not_read) => Err(not_read),
            },
        };
        pages.push(found);
    }
    assert_eq!(pages.len(), run.len(), "one for each page");
    pages
}
