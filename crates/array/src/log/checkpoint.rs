//! Checkpoints: changed table pages, then a root, so that the log before it can be used again.
//!
//! Order on every carrier: pages into the place that does not hold their committed copy, flush, root into the
//! place of its number, flush. A power cut before the root is complete leaves the old root, which names the
//! old copies. The log segments that the old root needs are free only after the new root is durable.
//!
//! Invariant: a checkpoint that began is written with the same bytes until it is durable, before there is
//! another. Its root may be on a carrier already when an attempt fails, and names exactly these bytes.

use super::chain::Chain;
use crate::context::Context;
use crate::error::ArrayError;
use crate::format::root::{LISTED, Root};
use crate::members::Members;
use crate::place::MemberSet;
use crate::place::SegmentNo;
use crate::ranks;
use crate::site::Site;
use crate::stripes::Stripes;
use crate::stripes::index::Update;
use futures_util::StreamExt;
use futures_util::stream;
use penstock_base::rank::{RankedGuard, RankedMutex, scoped};
use penstock_base::{Buf, Stripe};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Pages written at the same time.
const PAGES_IN_FLIGHT: usize = 32;

/// A checkpoint that began.
struct Begun {
    root: Root,
    update: Update,
    /// Segments that it takes from the log.
    released: Vec<SegmentNo>,
}

/// The checkpoints of an array: the last one, and the one at hand.
#[derive(Default)]
struct State {
    /// The newest durable root; none before the opening wrote one.
    root: Option<Root>,
    /// The checkpoint that is not durable yet.
    begun: Option<Begun>,
}

/// Checkpoints of one array.
pub(crate) struct Checkpoints {
    context: Rc<Context>,
    members: Rc<Members>,
    stripes: Rc<Stripes>,
    chain: Rc<Chain>,
    /// One checkpoint runs at a time.
    state: RankedMutex<State>,
    /// The changes of the list of unreadable stripes that the newest root has.
    listed_changes: Cell<u64>,
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
            state: RankedMutex::new(ranks::CHECKPOINT, State::default()),
            listed_changes: Cell::new(0),
        })
    }

    /// The newest durable root. No checkpoint is written while the guard lives.
    ///
    /// # Panics
    /// Before the opening wrote the first one.
    pub(crate) async fn pause(&self) -> Paused<'_> {
        Paused(self.state.lock().await)
    }

    /// The first root of this opening is durable.
    pub(crate) async fn set_root(&self, root: Root) {
        self.state.lock().await.root = Some(root);
    }

    /// Writes a checkpoint if anything changed since the last one.
    pub(crate) async fn write(&self) -> Result<(), ArrayError> {
        let mut state = self.state.lock().await;
        // One that failed is not of now.
        self.end(&mut state).await?;
        let is_changed = {
            let segments = self.chain.segments();
            let is_listed = self.stripes.map().unreadable_changes() == self.listed_changes.get();
            self.stripes.table().has_dirty() || segments.has_applied() || segments.used() > 1 || !is_listed
        };
        if is_changed {
            let last = state.root.as_ref().expect("an opened array has a root");
            state.begun = Some(self.begin(last));
            self.end(&mut state).await?;
        }
        Ok(())
    }

    /// The checkpoint of now. All pages are encoded in one step: they are one state of the table.
    fn begin(&self, last: &Root) -> Begun {
        let seq = last.seq + 1;
        self.listed_changes.set(self.stripes.map().unreadable_changes());
        let released = self.chain.segments_mut().take_applied();
        let update = self.stripes.table_mut().update(self.context.id, seq);
        let tail = self.chain.segments().tail_without(&released).clone();
        let root = Root {
            seq,
            replay_segment: tail.number.0,
            replay_seq: tail.first_seq,
            replay_chain: tail.chain,
            // Whatever is durable was applied in the same step.
            applied: self.chain.durable(),
            table: update.top(),
            resets: self.stripes.table().resets().clone(),
            stale_on: self.stripes.table().stale_on(),
            unreadable: self.stripes.listed_from(Stripe(0), LISTED),
            ..self.root_of_now()
        };
        Begun { root, update, released }
    }

    /// Ends the checkpoint that began, if there is one. After an error it is to be ended later.
    async fn end(&self, state: &mut State) -> Result<(), ArrayError> {
        let Some(begun) = &state.begun else { return Ok(()) };
        self.write_pages(&begun.update).await?;
        self.write_root(&begun.root).await?;
        let Some(Begun { root, update, released }) = state.begun.take() else { return Ok(()) };
        self.stripes.table_mut().commit(update);
        let top = self.stripes.table().index().top();
        assert_eq!(top, root.table, "the root stands for the table that was written");
        let mut segments = self.chain.segments_mut();
        released.into_iter().for_each(|segment| segments.unpin(segment));
        drop(segments);
        self.chain.drop_before(SegmentNo(root.replay_segment));
        state.root = Some(root);
        self.context.count(|counts| counts.checkpoints += 1);
        Ok(())
    }

    async fn write_pages(&self, update: &Update) -> Result<(), ArrayError> {
        let write = |(page, place, block): &(u64, u8, Buf)| {
            let (at, block) = (self.context.geo.page_at(*page, (*place).into()), block.clone());
            scoped(async move { self.members.write_carriers(at, &block, Site::CheckpointPage.io()).await })
        };
        // Every write that began ends before an error is returned: none may land after the next checkpoint's.
        let written: Vec<_> =
            stream::iter(update.blocks().iter().map(write)).buffer_unordered(PAGES_IN_FLIGHT).collect().await;
        written.into_iter().collect::<Result<(), _>>()?;
        self.members.flush_carriers().await
    }

    /// A root with the counters of now. Number, place of replay, table and what it has are the caller's.
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
            applied: penstock_base::LogSeq(0),
            versions_reserved: self.stripes.versions.reserved(),
            order: self.stripes.overlay().order(),
            table: self.stripes.table().index().top(),
            epoch: self.members.claim().epoch,
            behind: self.members.owed_labels(),
            resets: BTreeMap::new(),
            stale_on: MemberSet::NONE,
            unreadable: Vec::new(),
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
pub(crate) struct Paused<'a>(RankedGuard<'a, State>);

impl Paused<'_> {
    /// The newest durable root.
    pub(crate) fn root(&self) -> &Root {
        self.0.root.as_ref().expect("an opened array has a root")
    }
}
