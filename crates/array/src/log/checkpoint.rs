//! Checkpoints: changed table pages, then a root, so that the log before it can be used again.
//!
//! Order on every carrier: pages into the place that does not hold their committed copy, flush, root into the
//! place of its number, flush. A power cut before the root is complete leaves the old root, and pages with a
//! number above it do not count. The log segments that the old root needs are free only after the new root is
//! durable.

use super::chain::Chain;
use crate::context::Context;
use crate::error::ArrayError;
use crate::format::root::Root;
use crate::format::table_page::TablePage;
use crate::members::Members;
use crate::place::SegmentNo;
use crate::ranks;
use crate::site::Site;
use crate::stripes::Stripes;
use futures_util::StreamExt;
use futures_util::stream;
use penstock_base::Buf;
use penstock_base::num::to_u16;
use penstock_base::rank::{RankedGuard, RankedMutex, scoped};
use std::collections::BTreeSet;
use std::rc::Rc;

/// Pages written at the same time.
const PAGES_IN_FLIGHT: usize = 32;

/// Checkpoints of one array.
pub(crate) struct Checkpoints {
    context: Rc<Context>,
    members: Rc<Members>,
    stripes: Rc<Stripes>,
    chain: Rc<Chain>,
    /// The newest durable root; none before the opening wrote one. One checkpoint runs at a time.
    root: RankedMutex<Option<Root>>,
}

impl Checkpoints {
    pub(crate) fn new(
        context: &Rc<Context>,
        members: &Rc<Members>,
        stripes: &Rc<Stripes>,
        chain: &Rc<Chain>,
    ) -> Rc<Self> {
        Rc::new(Self {
            context: context.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
            root: RankedMutex::new(ranks::CHECKPOINT, None),
        })
    }

    /// The newest durable root. No checkpoint is written while the guard lives.
    ///
    /// # Panics
    /// Before the opening wrote the first one.
    pub(crate) async fn pause(&self) -> Paused<'_> {
        Paused(self.root.lock().await)
    }

    /// The first root of this opening is durable.
    pub(crate) async fn set_root(&self, root: Root) {
        *self.root.lock().await = Some(root);
    }

    /// Writes a checkpoint if anything changed since the last one.
    pub(crate) async fn write(&self) -> Result<(), ArrayError> {
        let mut root = self.root.lock().await;
        let is_changed = {
            let segments = self.chain.segments();
            self.stripes.table().has_dirty() || segments.has_applied() || segments.used() > 1
        };
        if !is_changed {
            return Ok(());
        }
        let last = root.as_ref().expect("an opened array has a root");
        let released = self.chain.segments_mut().take_applied();
        let pages = self.stripes.table_mut().take_dirty();
        match self.try_write(last, &released, &pages).await {
            Ok(new) => {
                let mut segments = self.chain.segments_mut();
                released.into_iter().for_each(|segment| segments.unpin(segment));
                drop(segments);
                self.chain.drop_before(SegmentNo(new.replay_segment));
                *root = Some(new);
                self.context.count(|counts| counts.checkpoints += 1);
                Ok(())
            }
            Err(error) => {
                self.chain.segments_mut().put_applied(released);
                self.stripes.table_mut().put_dirty(pages);
                Err(error)
            }
        }
    }

    fn encode_page(&self, page: u64, checkpoint: u64) -> Buf {
        let words = self.stripes.table().page_words(page);
        let strips = to_u16(self.context.geo.strips());
        TablePage { array: self.context.id, index: page, checkpoint, strips, words }.encode()
    }

    async fn try_write(
        &self,
        last: &Root,
        released: &[SegmentNo],
        pages: &BTreeSet<u64>,
    ) -> Result<Root, ArrayError> {
        let seq = last.seq + 1;
        // All pages are encoded before the first wait: they are one state of the table.
        let blocks: Vec<(u64, Buf)> =
            pages.iter().map(|page| (*page, self.encode_page(*page, seq))).collect();
        let tail = self.chain.segments().tail_without(released).clone();
        let table_sum = self.stripes.table().sum_with(pages.iter().copied(), seq);
        let root = Root {
            seq,
            replay_segment: tail.number.0,
            replay_seq: tail.first_seq,
            replay_chain: tail.chain,
            table_sum,
            ..self.root_of_now()
        };
        let write = |(page, block): &(u64, Buf)| {
            let place = u64::from(self.stripes.table().place(*page).0 ^ 1);
            let (at, block) = (self.context.geo.page_at(*page, place), block.clone());
            scoped(async move { self.members.write_carriers(at, &block, Site::CheckpointPage.io()).await })
        };
        // Every write that began ends before an error is returned: none may land after the next checkpoint's.
        let written: Vec<_> =
            stream::iter(blocks.iter().map(write)).buffer_unordered(PAGES_IN_FLIGHT).collect().await;
        written.into_iter().collect::<Result<(), _>>()?;
        self.members.flush_carriers().await?;
        self.write_root(&root).await?;
        let mut table = self.stripes.table_mut();
        blocks.iter().for_each(|(page, _)| table.commit_page(*page, seq));
        assert_eq!(table.sum(), root.table_sum, "the root stands for the table that was written");
        Ok(root)
    }

    /// A root with the counters of now. Number, replay member and table sum are the caller's.
    pub(crate) fn root_of_now(&self) -> Root {
        let head = self.chain.head();
        Root {
            array: self.context.id,
            seq: 0,
            incarnation: head.incarnation,
            incarnation_start: head.incarnation_start,
            replay_segment: 0,
            replay_seq: penstock_base::LogSeq(0),
            replay_chain: 0,
            durable: self.chain.durable(),
            versions_reserved: self.stripes.versions.reserved(),
            order: self.stripes.overlay().order(),
            table_sum: self.stripes.table().sum(),
            epoch: self.members.claim().epoch,
            behind: self.members.owed_labels(),
        }
    }

    /// Writes a root on all carriers and makes it durable.
    pub(crate) async fn write_root(&self, root: &Root) -> Result<(), ArrayError> {
        assert!(root.is_sound(), "the next opening believes a root that is written");
        let (at, bytes) = (self.context.geo.root_at(root.seq), root.encode());
        // A damaged root of one carrier may have brought numbers near the end of what can be read. Written to
        // all carriers, they would make the array unreadable.
        Root::decode(&bytes)?;
        self.members.write_carriers(at, &bytes, Site::CheckpointRoot.io()).await?;
        self.members.flush_carriers().await
    }
}

/// While it lives no checkpoint is written: root and committed pages stay at their places.
pub(crate) struct Paused<'a>(RankedGuard<'a, Option<Root>>);

impl Paused<'_> {
    /// The newest durable root.
    pub(crate) fn root(&self) -> &Root {
        self.0.as_ref().expect("an opened array has a root")
    }
}
