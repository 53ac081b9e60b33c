//! Checkpoints: changed table pages, then a root, so that the log before it can be used again.
//!
//! Order on every carrier: pages into the place that does not hold their committed copy, flush, root into the place
//! of its number, flush. A cut before the root is whole leaves the old root, and pages with a number above it do
//! not count. The log segments that the old root needs are free only after the new root is durable.

use crate::engine::Array;
use crate::error::ArrayError;
use crate::format::root::Root;
use crate::format::table_page::TablePage;
use futures_util::StreamExt;
use futures_util::stream;
use penstock_base::{Buf, Version};
use penstock_drive::{Class, Io};

const IO: Io = Io::new(Class::Destage, "checkpoint.page");
/// Pages written at a time.
const PAGES_AT_A_TIME: usize = 32;

/// What the next checkpoint builds on; the lock around it lets one checkpoint run at a time.
#[derive(Clone, Debug)]
pub(crate) struct CheckpointState {
    /// The newest durable root.
    pub(crate) root: Root,
}

impl Array {
    pub(crate) fn encode_page(&self, page: u64, checkpoint: u64) -> Buf {
        let words = self.table.borrow().page_words(page);
        let strips = self.geo.strips() as u16;
        TablePage { array: self.id, index: page, checkpoint, strips, words }.encode()
    }

    /// Writes a checkpoint if anything changed since the last one.
    pub(crate) async fn write_checkpoint(&self) -> Result<(), ArrayError> {
        let mut state = self.checkpoint.lock().await;
        if !self.table.borrow().has_dirty() && !self.log.has_applied() && self.log.used_segments() <= 1 {
            return Ok(());
        }
        let released = self.log.take_applied();
        let pages = self.table.borrow_mut().take_dirty();
        match self.try_checkpoint(&state.root, &released, &pages).await {
            Ok(root) => {
                released.iter().for_each(|segment| self.log.release(*segment));
                self.log.drop_before(root.replay_segment);
                state.root = root;
                self.count(|counts| counts.checkpoints += 1);
                Ok(())
            }
            Err(error) => {
                self.log.put_applied(released);
                self.table.borrow_mut().put_dirty(pages);
                Err(error)
            }
        }
    }

    async fn try_checkpoint(
        &self,
        last: &Root,
        released: &[u64],
        pages: &std::collections::BTreeSet<u64>,
    ) -> Result<Root, ArrayError> {
        let seq = last.seq + 1;
        // All pages are encoded before the first wait: they are one state of the table.
        let blocks: Vec<(u64, Buf)> =
            pages.iter().map(|page| (*page, self.encode_page(*page, seq))).collect();
        let tail = self.log.tail_without(released);
        let head = *self.log.head.borrow();
        let root = Root {
            array: self.id,
            seq,
            incarnation: head.incarnation,
            incarnation_start: head.incarnation_start,
            replay_segment: tail.number,
            replay_seq: tail.first_seq,
            replay_chain: tail.chain,
            durable: *self.log.durable.borrow(),
            versions_reserved: Version(self.reserved_version.get()),
            order: self.order.get(),
            table_sum: self.table.borrow().sum_with(pages.iter().copied(), seq),
            epoch: self.claim.get().epoch,
            behind: self.mending.owed_superblocks(),
        };
        let write = |(page, block): &(u64, Buf)| {
            let place = u64::from(self.table.borrow().place(*page).0 ^ 1);
            let (at, block) = (self.geo.page_at(*page, place), block.clone());
            async move { self.write_carriers(at, &block, IO).await }
        };
        // All that were begun are ended before an error is told: none may land after the next checkpoint's.
        let written: Vec<_> =
            stream::iter(blocks.iter().map(write)).buffer_unordered(PAGES_AT_A_TIME).collect().await;
        written.into_iter().collect::<Result<(), _>>()?;
        self.flush_carriers().await?;
        self.write_root(&root).await?;
        let mut table = self.table.borrow_mut();
        blocks.iter().for_each(|(page, _)| table.commit_page(*page, seq));
        assert_eq!(table.sum(), root.table_sum, "the root stands for the table that was written");
        Ok(root)
    }

    pub(crate) async fn write_root(&self, root: &Root) -> Result<(), ArrayError> {
        self.write_carriers(self.geo.root_at(root.seq), &root.encode(), IO.at("checkpoint.root")).await?;
        self.flush_carriers().await
    }
}
