//! Reading pages of the stripe table and its index from carriers.

use crate::context::Context;
use crate::error::ArrayError;
use crate::format::index_page::PageRef;
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, crc32c};
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
            Ok(block) if is_named(named, &block) => return Ok(ReadPage { block, bad }),
            Ok(_) => {}
            Err(_) => is_unreadable = true,
        }
        bad += 1;
    }
    let what = format!("stripe table page {page}");
    Err(if is_unreadable { context.cannot_read(what) } else { context.damaged(what) })
}

/// True if a block is the named copy of a page.
pub(crate) fn is_named(named: PageRef, block: &[u8]) -> bool {
    named.names(block) && crc32c(&block[8..]) == named.crc
}
