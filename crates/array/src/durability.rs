//! Durability: strips of fresh stripes flushed, then their records, then everything else in the log.
//!
//! Invariant: the record of a fresh stripe is queued only after a flush of all members that began after its
//! strips were written. A power cut before the record is durable leaves the stripe unwritten.

use crate::context::Context;
use crate::error::ArrayError;
use crate::members::Members;
use crate::queue::EntryQueue;
use crate::ranks;
use crate::stripes::Stripes;
use penstock_base::rank::RankedMutex;
use penstock_base::{Stripe, Version};
use penstock_drive::Io;
use std::rc::Rc;

/// Makes writes of one array durable.
pub(crate) struct Durability {
    context: Rc<Context>,
    queue: Rc<EntryQueue>,
    members: Rc<Members>,
    stripes: Rc<Stripes>,
    one_round: RankedMutex<()>,
}

impl Durability {
    pub(crate) fn new(
        context: &Rc<Context>,
        queue: &Rc<EntryQueue>,
        members: &Rc<Members>,
        stripes: &Rc<Stripes>,
    ) -> Rc<Self> {
        Rc::new(Self {
            context: context.clone(),
            queue: queue.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            one_round: RankedMutex::new(ranks::FRESH, ()),
        })
    }

    /// Makes everything durable that was written before.
    pub(crate) async fn flush(&self, io: Io) -> Result<(), ArrayError> {
        self.context.check_open()?;
        self.flush_fresh(io).await?;
        self.queue.flush().await
    }

    /// Makes the fresh stripes durable that were written before, and waits for nothing else: holders of
    /// stripe locks call it.
    pub(crate) async fn flush_fresh(&self, io: Io) -> Result<(), ArrayError> {
        let mine: Vec<(Stripe, Version)> = self.stripes.map().pending().collect();
        if mine.is_empty() {
            return Ok(());
        }
        let _one_round = self.one_round.lock().await;
        let is_left = mine.iter().any(|(stripe, _)| self.stripes.map().is_pending(*stripe));
        if !is_left {
            return Ok(());
        }
        let covered: Vec<(Stripe, Version)> = self.stripes.map().pending().collect();
        self.members.flush_all(io.at("fresh.flush")).await?;
        self.record(&covered).await
    }

    /// Records fresh stripes whose strips are flushed, and waits until the records are durable. A stripe that
    /// was discarded and written again meanwhile was not flushed: it has another version.
    pub(crate) async fn record(&self, flushed: &[(Stripe, Version)]) -> Result<(), ArrayError> {
        let (mut records, mut refused) = (Vec::new(), None);
        for (stripe, version) in flushed {
            match self.stripes.pending_entry(*stripe, *version) {
                Ok(entry) => records.extend(entry.map(|entry| self.queue.push_control(entry, Vec::new()))),
                Err(error) => refused = Some(error),
            }
        }
        self.queue.wait_for(records).await?;
        refused.map_or(Ok(()), Err)
    }
}
