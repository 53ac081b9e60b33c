//! The array: its parts, put together, and the operations on all of them.
//!
//! Owns nothing but the parts. Each stands on those before it: members, stripes, log, strips, jobs.

use crate::block_io::BlockIo;
use crate::context::Context;
use crate::counters::{ArrayLatency, Counts};
use crate::durability::Durability;
use crate::error::ArrayError;
use crate::events::ArrayEvent;
use crate::format::descriptor::{Descriptor, Role};
use crate::geometry::Geometry;
use crate::jobs::carriers::CarrierReplacement;
use crate::jobs::count::StripeCount;
use crate::jobs::destage::{self, Destage};
use crate::jobs::metadata::MetadataScrub;
use crate::jobs::rate::RebuildRate;
use crate::jobs::rebuild::{Rebuild, RebuildState};
use crate::jobs::repair::Repair;
use crate::jobs::scrub::{Pace, Scrub, ScrubProgress, ScrubReport};
use crate::layout::{Layout, StripPlace};
use crate::log::chain::Chain;
use crate::log::checkpoint::Checkpoints;
use crate::log::space::LogSpace;
use crate::log::writer::LogWriter;
use crate::members::ownership::Ownership;
use crate::members::{Members, Roster};
use crate::place::{MemberNo, Positions};
use crate::queue::EntryQueue;
use crate::stripes::Stripes;
use crate::strips::Strips;
use futures_util::future::{Either, select};
use penstock_base::rank::scoped;
use penstock_base::{ArrayId, DriveId, PoolId, StackNo, Stripe};
use penstock_drive::copies::Scrubbed;
use penstock_drive::{Class, Io, Slice};
use penstock_raid::Code;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

/// Time that a close waits for a suspended array.
const CLOSE_LIMIT: Duration = Duration::from_secs(10);

/// One array, owned by one worker thread.
pub struct Array {
    pub(crate) context: Rc<Context>,
    pub(crate) members: Rc<Members>,
    pub(crate) stripes: Rc<Stripes>,
    pub(crate) chain: Rc<Chain>,
    pub(crate) checkpoints: Rc<Checkpoints>,
    pub(crate) log: Rc<LogWriter>,
    pub(crate) strips: Rc<Strips>,
    pub(crate) rebuild: Rc<Rebuild>,
    pub(crate) scrub: Rc<Scrub>,
    space: Rc<LogSpace>,
    durability: Rc<Durability>,
    blocks: BlockIo,
    destage: Rc<Destage>,
    metadata: Rc<MetadataScrub>,
    repair: Rc<Repair>,
    carriers: Rc<CarrierReplacement>,
    count: Rc<StripeCount>,
}

impl Array {
    /// Puts the parts together. Nothing is read yet.
    pub(crate) fn assemble(
        context: Rc<Context>,
        code: Code,
        descriptor: Descriptor,
        slices: Vec<Option<Slice>>,
        ownership: Rc<dyn Ownership>,
        roster: &Rc<Roster>,
    ) -> Self {
        let queue = EntryQueue::new(&context);
        let members = Members::new(&context, &queue, descriptor, slices, ownership, roster);
        let stripes = Stripes::new(&context, &members, &queue, roster.table_memory());
        let chain = Chain::new(&context);
        let checkpoints = Checkpoints::new(&context, &members, &stripes, &chain);
        let log = LogWriter::new(&context, &queue, &members, &stripes, &chain, &checkpoints);
        let space = LogSpace::new(&context, &queue, &stripes, &chain);
        let strips = Strips::new(&context, &members, &stripes, code);
        let durability = Durability::new(&context, &queue, &members, &stripes);
        let blocks = BlockIo {
            context: context.clone(),
            queue: queue.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
            space: space.clone(),
            strips: strips.clone(),
            durability: durability.clone(),
        };
        let destage = Rc::new(Destage {
            context: context.clone(),
            queue: queue.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
            checkpoints: checkpoints.clone(),
            space: space.clone(),
            strips: strips.clone(),
            durability: durability.clone(),
            one_at_a_time: destage::one_at_a_time(),
        });
        let metadata = Rc::new(MetadataScrub {
            context: context.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
            checkpoints: checkpoints.clone(),
            log: log.clone(),
            destage: destage.clone(),
        });
        let scrub = Rc::new(Scrub {
            context: context.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            strips: strips.clone(),
            queue: queue.clone(),
            space: space.clone(),
            metadata: metadata.clone(),
            progress: Cell::default(),
            stop: Cell::new(false),
        });
        let repair = Rc::new(Repair {
            context: context.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            scrub: scrub.clone(),
            metadata: metadata.clone(),
        });
        let rebuild = Rc::new(Rebuild {
            context: context.clone(),
            queue,
            members: members.clone(),
            stripes: stripes.clone(),
            space: space.clone(),
            strips: strips.clone(),
            durability: durability.clone(),
            state: RebuildState::new(&context.geo),
        });
        let carriers = Rc::new(CarrierReplacement {
            context: context.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            chain: chain.clone(),
        });
        let count = Rc::new(StripeCount { context: context.clone(), stripes: stripes.clone() });
        Self {
            context,
            members,
            stripes,
            chain,
            checkpoints,
            log,
            strips,
            rebuild,
            scrub,
            space,
            durability,
            blocks,
            destage,
            metadata,
            repair,
            carriers,
            count,
        }
    }

    fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + 'static) {
        self.context.env.spawn(name, Box::pin(scoped(task)));
    }

    /// Starts the task that replaces lost carriers.
    pub(crate) fn start_carriers(&self) {
        self.spawn("array carriers", self.carriers.clone().run());
        self.members.changed();
    }

    /// Starts the array's other tasks.
    pub(crate) fn start(&self) {
        self.spawn("array log", self.log.clone().run());
        self.spawn("array destage", self.destage.clone().run());
        self.spawn("array count", self.count.clone().run());
        self.spawn("array repair", self.repair.clone().run());
        self.spawn("array resync", self.rebuild.clone().run());
    }

    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn stripes(&self) -> &Stripes {
        &self.stripes
    }

    pub(crate) fn blocks(&self) -> &BlockIo {
        &self.blocks
    }

    pub(crate) fn durability(&self) -> &Durability {
        &self.durability
    }

    /// Names the array for life.
    pub fn id(&self) -> ArrayId {
        self.context.id
    }

    /// The pool that it belongs to.
    pub fn pool(&self) -> PoolId {
        self.members.descriptor().pool
    }

    /// The stack that the array belongs to.
    pub fn stack(&self) -> StackNo {
        self.members.descriptor().stack
    }

    /// The use of the array.
    pub fn role(&self) -> Role {
        self.members.descriptor().role
    }

    /// The array's name for people.
    pub fn name(&self) -> &str {
        &self.context.name
    }

    /// The geometry of its slices.
    pub fn geometry(&self) -> Geometry {
        self.context.geo
    }

    /// The place of every strip that has not moved.
    pub fn layout(&self) -> &Layout {
        &self.context.layout
    }

    /// Latencies of its operations.
    pub fn latency(&self) -> &ArrayLatency {
        &self.context.latency
    }

    /// Its counters since it was opened.
    pub fn counts(&self) -> Counts {
        self.context.counts()
    }

    /// Changes that it made by itself since the last call, oldest first.
    pub fn take_events(&self) -> Vec<ArrayEvent> {
        self.context.events.take()
    }

    /// The number of stripes with fewer valid strips than the code has.
    pub fn redundancy_debt_stripes(&self) -> u64 {
        self.stripes.redundancy_debt()
    }

    /// The number of replicas of log and checkpoints that are missing. One is, while labels that name it
    /// may not be written.
    pub fn missing_carriers(&self) -> u64 {
        self.members.missing_carriers()
    }

    /// Why writes wait, or why destage of their data does.
    pub fn suspended(&self) -> Option<String> {
        self.context.suspended().or_else(|| self.space.why_postponed())
    }

    /// True if data writes fail because the log is full of what cannot be destaged.
    pub fn refuses_data(&self) -> bool {
        self.space.is_too_damaged()
    }

    /// Stripes that could not be read when last tried.
    pub fn unreadable_stripes(&self) -> Vec<u64> {
        self.stripes.map().unreadable().iter().map(|stripe| stripe.0).collect()
    }

    /// True if the array survives the loss of these drives as well: of their strips, and of their replicas of
    /// the log, which may be the last ones until carriers are replaced.
    pub fn survives(&self, drives: &[DriveId]) -> bool {
        self.members.survives(drives)
    }

    /// The member on a drive.
    pub fn member_on(&self, drive: DriveId) -> Option<MemberNo> {
        self.members.member_on(drive)
    }

    /// The places of all strips of a stripe as they are now, by position.
    pub async fn places(&self, stripe: Stripe) -> Result<Vec<StripPlace>, ArrayError> {
        let _lock = scoped(self.stripes.shared(stripe)).await?;
        let positions = self.context.geo.all_strips().iter();
        Ok(positions.map(|position| self.stripes.place(stripe, position)).collect())
    }

    /// Offset and length in bytes of the slice that a drive gives to the array.
    pub fn slice_of(&self, drive: DriveId) -> Option<(u64, u64)> {
        self.members.slice_of(drive)
    }

    /// True if the drive of a member is in its place, and not only recorded there.
    pub fn is_in_place(&self, member: MemberNo) -> bool {
        self.members.is_in_place(member)
    }

    /// The name of the kernel that codes its stripes.
    pub fn code_path(&self) -> &'static str {
        self.strips.kernel()
    }

    /// True once it was closed or stopped.
    pub fn is_closed(&self) -> bool {
        self.context.is_closed()
    }

    /// Why the array stopped by itself, if it did.
    pub fn stopped(&self) -> Option<&str> {
        self.context.stopped()
    }

    /// Takes the drive of a member out of service, for all arrays that use it. Returns when that is recorded.
    pub async fn fail_member(&self, member: MemberNo, why: &str) -> Result<(), ArrayError> {
        scoped(self.members.fail(member, why)).await
    }

    /// Puts a blank slice in a member's place. Everything on it counts as stale until it is rebuilt.
    pub async fn replace_member(&self, member: MemberNo, slice: Slice) -> Result<(), ArrayError> {
        scoped(self.members.replace(member, slice)).await
    }

    /// Verifies the labels of its slices on drives that take I/O, and repairs them.
    pub async fn scrub_labels(&self) -> Scrubbed {
        scoped(self.members.scrub_labels()).await
    }

    /// Verifies the metadata of the array on all carriers and repairs it. It stays known as bad while a copy
    /// is.
    pub async fn scrub_metadata(&self) -> Result<(), ArrayError> {
        scoped(self.metadata.scrub()).await
    }

    /// Scrubs the whole array: metadata first, then every written stripe.
    pub async fn scrub(&self) -> Result<ScrubReport, ArrayError> {
        let progress = RefCell::default();
        let report = self.scrub_from(&progress, Pace::Full).await?;
        Ok(report.expect("nobody else stops this scrub"))
    }

    /// Scrubs metadata and every written stripe from `progress` on, which moves along. None if it was stopped
    /// on the way ([`Array::stop_scrub`]). The caller sees to it that one scrub runs at a time.
    pub async fn scrub_from(
        &self,
        progress: &RefCell<ScrubProgress>,
        pace: Pace,
    ) -> Result<Option<ScrubReport>, ArrayError> {
        scoped(self.scrub.run_from(progress, pace)).await
    }

    /// Makes a running scrub end before its next stripe.
    pub fn stop_scrub(&self) {
        self.scrub.stop();
    }

    /// Sets the rule that rebuilds follow, until the array is closed.
    pub fn set_rebuild_rate(&self, rule: RebuildRate) {
        self.rebuild.set_rule(rule);
    }

    /// Waits until no member is being rebuilt or could be, and every replica of the log that can be there is.
    /// Returns the number of stripes that lack redundancy then.
    pub async fn wait_rebuilt(&self) -> u64 {
        loop {
            // The strips that a fresh stripe lacks show in the table once its record is durable.
            if self.stripes.pending_misses(Positions::ALL) {
                let _ = scoped(self.durability.flush(Io::new(Class::Rebuild, "rebuild.flush"))).await;
            }
            let members = &self.members;
            // A member that did not take a copy may never take one.
            let search = members.search().is_wanted() && !members.lacks_refused_carriers();
            let carriers = search || members.lacks_carriers() || members.is_metadata_bad();
            let busy = self.rebuild.has_work() || carriers;
            if !busy || self.is_closed() {
                return self.redundancy_debt_stripes();
            }
            self.context.env.sleep(Duration::from_millis(20)).await;
        }
    }

    /// Makes everything durable, empties the log into the strips and stops the array's tasks. An array that
    /// stays suspended is stopped as it is, and that is an error: flushed data is in the log.
    pub async fn close(&self) -> Result<(), ArrayError> {
        let work = scoped(async {
            // The next opening then needs no record from before, so a bad block among these does no harm.
            // That is worth a segment, but none of the reserve.
            if self.space.has_reserve() {
                self.log.begin_another_segment().await?;
            }
            self.destage_and_checkpoint().await?;
            self.checkpoints.write().await
        });
        let result = match select(pin!(work), pin!(self.stuck())).await {
            Either::Left((result, _)) => result,
            Either::Right((why, _)) => Err(ArrayError::Suspended(why)),
        };
        self.stop();
        result
    }

    /// Returns when writes have been suspended for as long as a close waits, with the reason.
    async fn stuck(&self) -> String {
        let mut since = None;
        loop {
            self.context.env.sleep(CLOSE_LIMIT / 20).await;
            let full = || self.chain.is_full().then(|| "the log is full".to_owned());
            let why = self.context.suspended().or_else(full);
            let now = self.context.env.now();
            match (why, since) {
                (None, _) => since = None,
                (Some(_), None) => since = Some(now),
                (Some(why), Some(began)) if now - began >= CLOSE_LIMIT => return why,
                _ => {}
            }
        }
    }

    /// Empties the log into the strips and writes a checkpoint.
    pub async fn destage_and_checkpoint(&self) -> Result<(), ArrayError> {
        scoped(async {
            self.durability.flush(Io::new(Class::Client, "array.close")).await?;
            self.destage.destage_all().await
        })
        .await
    }

    /// Stops the array's tasks as they are.
    pub fn stop(&self) {
        self.context.stop();
    }
}
