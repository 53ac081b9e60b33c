//! Repair of stripes in which a read found something wrong, and of metadata while a copy of it is bad.

use super::RETRY;
use super::metadata::MetadataScrub;
use super::scrub::Scrub;
use crate::context::Context;
use crate::error::ArrayError;
use crate::members::Members;
use crate::stripes::Stripes;
use futures_util::future::select;
use penstock_base::Stripe;
use std::collections::{BTreeMap, BTreeSet};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Time before a stripe that was just listed as unreadable is tried again. It is twice as long each time.
const SOON: Duration = Duration::from_secs(10);
/// Time before all stripes that are listed are tried again.
const LISTED: Duration = Duration::from_secs(600);
/// Listed stripes that are tried at a time.
const AT_A_TIME: usize = 512;

/// Stripes that were listed a short time ago, with the time of their next try and the pause after that.
#[derive(Default)]
struct NewlyListed(BTreeMap<Stripe, (Duration, Duration)>);

impl NewlyListed {
    /// Those beyond a bound are tried when all are.
    fn add(&mut self, stripe: Stripe, now: Duration) {
        if self.0.len() < AT_A_TIME {
            self.0.insert(stripe, (now + SOON, 2 * SOON));
        }
    }

    /// Hands over those that are due, and forgets those that are not listed any more or were tried for long.
    fn try_due(&mut self, now: Duration, stripes: &Stripes) {
        self.0.retain(|stripe, (at, pause)| {
            if now >= *at {
                stripes.want_repair(*stripe);
                (*at, *pause) = (now + *pause, *pause * 2);
            }
            *pause < LISTED && stripes.map().is_unreadable(*stripe)
        });
    }

    /// The time of the next try.
    fn next(&self) -> Option<Duration> {
        self.0.values().map(|(at, _)| *at).min()
    }
}

/// The repair task of one array.
pub(crate) struct Repair {
    pub(crate) context: Rc<Context>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) scrub: Rc<Scrub>,
    pub(crate) metadata: Rc<MetadataScrub>,
}

impl Repair {
    /// Repairs until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        let env = &self.context.env;
        let mut metadata_at = env.now();
        let (mut listed_at, mut listed_from) = (env.now() + LISTED, Stripe(0));
        let mut newly_listed = NewlyListed::default();
        // Stripes that wait until writes are not suspended any more.
        let mut later = BTreeSet::new();
        while !self.context.is_closed() {
            // Metadata that cannot be repaired yet delays no stripe.
            if self.members.is_metadata_bad() && env.now() >= metadata_at {
                if let Err(error) = self.metadata.scrub().await {
                    tracing::warn!(array = self.context.name, %error, "damaged metadata not repaired yet");
                }
                metadata_at = env.now() + RETRY;
            }
            for stripe in self.stripes.take_newly_listed() {
                newly_listed.add(stripe, env.now());
            }
            newly_listed.try_due(env.now(), &self.stripes);
            // Blocks that could not be read for a moment are read some time, and lost ones are made.
            if env.now() >= listed_at {
                let listed = self.stripes.listed_from(listed_from, AT_A_TIME);
                listed_from = listed.last().map_or(Stripe(0), |last| last.next());
                listed.into_iter().for_each(|stripe| self.stripes.want_repair(stripe));
                listed_at = env.now() + LISTED;
            }
            let next = self.stripes.next_to_repair();
            if next.is_none() && !later.is_empty() {
                env.sleep(RETRY).await;
                self.stripes.repair_later(std::mem::take(&mut later));
                continue;
            }
            let Some(stripe) = next else {
                let woken = pin!(self.context.signals.repair.notified());
                let longest = if self.members.is_metadata_bad() { RETRY } else { LISTED };
                let next = newly_listed.next().map_or(listed_at, |at| at.min(listed_at));
                select(woken, env.sleep(longest.min(next.saturating_sub(env.now())))).await;
                continue;
            };
            let was_listed = self.stripes.map().is_unreadable(stripe);
            match self.scrub.scrub_stripe(stripe).await {
                Ok(_) | Err(ArrayError::Closed) => {}
                Err(ArrayError::Suspended(why)) => {
                    self.context.report_suspended(&why);
                    later.insert(stripe);
                }
                Err(error) if was_listed => {
                    tracing::debug!(array = self.context.name, %stripe, %error, "a stripe cannot be repaired yet")
                }
                Err(error) => {
                    tracing::error!(array = self.context.name, %stripe, %error, "a stripe could not be repaired")
                }
            }
            // Strips that the repair itself found bad are repaired already.
            self.stripes.repaired(stripe);
        }
    }
}
