//! All roles of one machine, assembled: drives, stacks with their arrays, key-value stores and targets, the
//! metadata target and sessions.

use crate::damage::Damage;
use crate::drive_set::DriveSet;
use crate::error::{AdminError, StartError};
use crate::event::{Event, EventKind, Severity};
use crate::event_files::EventFiles;
use crate::events::Events;
use crate::fullness::Warnings;
use crate::keeper::Keeper;
use crate::latency::{ServiceLatency, SlowDrives};
use crate::map_copies::{MapCopies, Restores};
use crate::pool_settings::{AllSettings, PoolChange};
use crate::report::{FileReport, MapCopyReport, PoolReport, ScrubSummary, SpaceReport, TargetFilesReport};
use crate::scrubs::Scrubs;
use crate::stack::Stack;
use crate::stack_arrays::Absent;
use futures_util::future::join_all;
use penstock_array::format::descriptor::Role;
use penstock_array::{Array, ArrayState};
use penstock_base::rank::scoped;
use penstock_base::{Env, Ino, StackNo, StoreId, TargetId};
use penstock_chunk::SpaceUsage;
use penstock_drive::DriveHandle;
use penstock_kv::{Kv, Usage};
use penstock_meta::{MetaError, MetaTarget};
use penstock_session::{Clients, SessionInfo};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::{Notify, RwLock};

/// Files that a report of a target names.
const LISTED_FILES: usize = 1000;
/// Interval of the checks while a stop waits.
const STUCK_LOOK: Duration = Duration::from_millis(500);

/// All roles of one machine.
pub struct Node {
    pub(crate) env: Env,
    pub(crate) drives: Rc<DriveSet>,
    /// The stacks that serve, in their order. The first one has the names.
    pub(crate) stacks: Vec<Stack>,
    /// The stacks that do not.
    absent: RefCell<Vec<Absent>>,
    /// The restores that this start has made or found.
    pub(crate) restores: Restores,
    /// The sessions of all clients.
    pub(crate) clients: Rc<Clients>,
    pub(crate) meta: Rc<MetaTarget>,
    pub(crate) events: Rc<Events>,
    pub(crate) scrubs: Rc<Scrubs>,
    pub(crate) settings: AllSettings,
    pub(crate) warnings: Warnings,
    pub(crate) latency: ServiceLatency,
    pub(crate) slow: RefCell<SlowDrives>,
    pub(crate) damage: Damage,
    pub(crate) started_ns: i64,
    /// Locked shared by each request and each copy of the map, and exclusively by a repair.
    pub(crate) serving: Rc<RwLock<()>>,
    /// True if it is being closed or was abandoned.
    is_closing: Cell<bool>,
    /// Notified when the store cannot continue.
    pub(crate) failed: Notify,
}

/// The parts of a store that a start has opened.
pub(crate) struct Assembly {
    pub(crate) drives: Rc<DriveSet>,
    pub(crate) stacks: Vec<Stack>,
    pub(crate) absent: Vec<Absent>,
    pub(crate) serving: Rc<RwLock<()>>,
    pub(crate) restores: Restores,
    pub(crate) meta: Rc<MetaTarget>,
    pub(crate) events: Rc<Events>,
    pub(crate) scrubs: Rc<Scrubs>,
}

impl Node {
    pub(crate) fn new(env: &Env, parts: Assembly) -> Rc<Self> {
        let Assembly { drives, stacks, absent, serving, restores, meta, events, scrubs } = parts;
        let numbers = || stacks.iter().map(Stack::number);
        assert_eq!(numbers().next(), Some(StackNo::FIRST), "the stack with the names serves");
        assert!(
            numbers().is_sorted() && numbers().all(|number| absent.iter().all(|gone| gone.number != number))
        );
        Rc::new(Self {
            env: env.clone(),
            drives,
            stacks,
            absent: RefCell::new(absent),
            clients: meta.clients().clone(),
            restores,
            meta,
            events,
            scrubs,
            settings: AllSettings::default(),
            warnings: Warnings::default(),
            latency: ServiceLatency::default(),
            slow: RefCell::default(),
            damage: Damage::default(),
            started_ns: env.wall_ns(),
            serving,
            is_closing: Cell::new(false),
            failed: Notify::new(),
        })
    }

    /// Identifier of the store.
    pub fn store(&self) -> StoreId {
        self.drives.store()
    }

    /// The arrays.
    pub fn arrays(&self) -> &[Rc<Array>] {
        self.drives.arrays()
    }

    /// The stack with the names of the file system.
    pub(crate) fn home(&self) -> &Stack {
        &self.stacks[0]
    }

    /// The target with this number, if it serves.
    pub(crate) fn stack_of(&self, target: TargetId) -> Option<&Stack> {
        self.stacks.iter().find(|stack| stack.target_id() == target)
    }

    /// The key-value store of the stack with the names. After changing rows without the services, the caller
    /// must start the node again.
    pub fn kv(&self) -> Rc<dyn Kv> {
        self.home().kv.clone()
    }

    /// The same of a stack that serves.
    pub fn kv_of(&self, target: TargetId) -> Option<Rc<dyn Kv>> {
        Some(self.stack_of(target)?.kv.clone())
    }

    /// Handles of all drives, online or not.
    pub fn drives(&self) -> Vec<Rc<DriveHandle>> {
        self.drives.drives()
    }

    /// Makes everything durable and stops.
    pub async fn close(&self) -> Result<(), StartError> {
        self.is_closing.set(true);
        let committed = join_all(self.stacks.iter().map(|stack| scoped(stack.target.commit_all()))).await;
        self.stacks.iter().for_each(|stack| stack.target.stop());
        self.meta.stop();
        // A stack that cannot be closed keeps no other one from it.
        let mut closed: Result<(), StartError> =
            committed.into_iter().collect::<Result<(), _>>().map_err(Into::into);
        for stack in &self.stacks {
            closed = closed.and(stack.kv.flush().await.map_err(Into::into));
            stack.kv.stop();
        }
        // Data first: rows of the key-value store must never refer to data that is not durable.
        let mut failed = BTreeSet::new();
        for role in [Role::Data, Role::Metadata] {
            for array in self.arrays().iter().filter(|array| array.role() == role) {
                if failed.contains(&array.stack()) {
                    continue;
                }
                if let Err(error) = array.close().await {
                    failed.insert(array.stack());
                    closed = closed.and(Err(error.into()));
                }
            }
        }
        closed
    }

    /// Stops without making anything durable.
    pub fn abandon(&self) {
        self.is_closing.set(true);
        self.meta.stop();
        self.stacks.iter().for_each(Stack::stop);
    }

    /// True if it is being closed or was abandoned.
    pub(crate) fn is_closing(&self) -> bool {
        self.is_closing.get()
    }

    /// The drives as a set, with the arrays on them.
    pub fn drive_set(&self) -> &Rc<DriveSet> {
        &self.drives
    }

    /// The file system's name as the object of an event.
    pub(crate) fn fs_object(&self) -> String {
        format!("fs {}", self.meta.info().name)
    }

    /// Stripes that reads or scrubs found unreadable, of all arrays of a role.
    pub(crate) fn unreadable(&self, role: Role) -> Vec<(StackNo, u64)> {
        let arrays = self.arrays().iter().filter(|array| array.role() == role);
        let of_array = |array: &Rc<Array>| {
            let stack = array.stack();
            array.unreadable_stripes().into_iter().map(move |stripe| (stack, stripe))
        };
        arrays.flat_map(of_array).collect()
    }

    /// Space of all targets.
    pub(crate) fn usage(&self) -> SpaceUsage {
        self.stacks.iter().map(|stack| stack.target.usage()).sum()
    }

    /// Usage of data and metadata, with the current warnings. Of several key-value stores the fullest counts.
    pub(crate) fn spaces(&self) -> Vec<SpaceReport> {
        let rows = self.stacks.iter().map(|stack| Kv::usage(&*stack.kv));
        let share = |rows: &Usage| u128::from(rows.used_bytes) * 1000 / u128::from(rows.budget_bytes.max(1));
        let fullest = rows.max_by_key(share);
        self.warnings.report(self.usage(), fullest.unwrap_or_default())
    }

    /// Finds arrays by name, id or the beginning of an id; all arrays for none.
    pub fn find_arrays(&self, which: Option<&str>) -> Result<Vec<Rc<Array>>, AdminError> {
        let Some(which) = which else { return Ok(self.arrays().to_vec()) };
        let fits = |array: &&Rc<Array>| array.name() == which || array.id().to_string().starts_with(which);
        let found: Vec<Rc<Array>> = self.arrays().iter().filter(fits).cloned().collect();
        match found.is_empty() || which.is_empty() {
            true => Err(AdminError::NotFound(format!("no array {which}; `penstock array list` shows them"))),
            false => Ok(found),
        }
    }

    /// Sets the function that saves the paths of the drives. It is called when a drive replaces another:
    /// before the new one gets any data, and again when it is complete.
    pub fn keep_places(&self, keep: impl Fn(&DriveSet) -> Result<(), String> + 'static) {
        self.drives.keep_places(keep);
    }

    /// The copies of the map of the stack with the names.
    pub fn map_copies(&self) -> &Rc<MapCopies> {
        &self.home().copies
    }

    /// Makes copies of the maps of all stacks from now on, when `period` has passed since the last one.
    pub fn schedule_map_copies(&self, period: Duration) {
        self.stacks.iter().for_each(|stack| stack.copies.schedule(period));
    }

    /// Makes copies of the maps of all stacks now, in the order of the stacks.
    pub async fn copy_maps(&self) -> Result<Vec<MapCopyReport>, AdminError> {
        let mut copies = Vec::new();
        for stack in &self.stacks {
            copies.push(stack.copies.make().await?);
        }
        Ok(copies)
    }

    /// Saves the state of scrubs with `keeper`, and scrubs each array when `period` has passed since its last
    /// scrub; none for never.
    pub fn schedule_scrubs(&self, period: Option<Duration>, keeper: Rc<dyn Keeper>) {
        self.scrubs.schedule(period, keeper);
    }

    /// Reads the settings of pools from `keeper`, which saves changes of them.
    pub fn keep_pool_settings(&self, keeper: Rc<dyn Keeper>) {
        self.settings.load(keeper, self.arrays());
    }

    /// Changes the settings of a pool, durably.
    pub async fn set_pool(&self, name: &str, change: PoolChange) -> Result<PoolReport, AdminError> {
        self.show_pool(name)?;
        if change == PoolChange::default() {
            return Err(AdminError::Refused("no setting is given".into()));
        }
        let data = self.arrays().iter().find(|array| array.role() == Role::Data);
        let pool = data.expect("a pool has an array for data").pool();
        let saved = self.settings.change(pool, change, self.arrays()).await;
        saved.map_err(|why| {
            AdminError::Refused(format!("the settings hold until the next start, and are not saved: {why}"))
        })?;
        self.show_pool(name)
    }

    /// Scrubs an array, its labels and the superblocks of its drives, from the beginning and without pauses.
    pub async fn scrub(&self, array: &Rc<Array>) -> Result<ScrubSummary, AdminError> {
        self.scrubs.scrub(array).await
    }

    /// Returns up to `limit` events with numbers above `seq`, oldest first. `dir` is the folder with the
    /// event files.
    pub async fn events_after(&self, dir: &Path, seq: u64, limit: usize) -> Result<Vec<Event>, AdminError> {
        if let Some(events) = self.events.after(seq, limit) {
            return Ok(events);
        }
        let dir = dir.to_owned();
        let read = move || EventFiles::read_after(&dir, seq, limit);
        penstock_worker::blocking(read).await.map_err(AdminError::Refused)
    }

    /// The list of events.
    pub fn events(&self) -> &Rc<Events> {
        &self.events
    }

    /// Sets the lease time of remote clients' sessions. Called at the start, before there are any.
    pub fn set_lease(&self, lease: Duration) {
        self.clients.set_lease(lease);
    }

    /// Makes clients in other processes sync their changes and stop changing anything, before the service
    /// stops. Returns the sessions that have not finished within `limit` although they are connected.
    pub async fn revoke_everything(
        &self,
        limit: Duration,
        is_connected: impl Fn(u64) -> bool,
    ) -> Vec<SessionInfo> {
        self.clients.revoke_everything(limit, is_connected).await
    }

    /// Sets the path at which a client of this process mounts; empty if it does not.
    pub fn note_mount(&self, session: u64, path: &str) {
        self.clients.set_mount(session, path);
    }

    /// Refuses a repair while the file system is mounted: kernels cache names and attributes of a mount, and
    /// a repair may change them without notice.
    pub fn refuse_while_mounted(&self) -> Result<(), AdminError> {
        let holds = |session: &SessionInfo| session.lease.is_some() || !session.mount.is_empty();
        match self.clients.sessions().into_iter().find(holds) {
            None => Ok(()),
            Some(session) => Err(AdminError::Refused(format!(
                "nothing was repaired: the file system is mounted at {} by {}; `penstock umount` takes it away",
                session.mount, session.client
            ))),
        }
    }

    /// Reason why the store cannot continue by itself: an array or the key-value store stopped. A new start
    /// may succeed.
    pub fn failure(&self) -> Option<String> {
        let stopped = |array: &Rc<Array>| Some(format!("array {}: {}", array.name(), array.stopped()?));
        let of_rows = || self.stacks.iter().find_map(|stack| stack.kv.failure());
        self.arrays().iter().find_map(stopped).or_else(of_rows)
    }

    /// Waits until the store cannot continue by itself. Returns the reason.
    pub async fn fails(&self) -> String {
        loop {
            self.failed.notified().await;
            if let Some(why) = self.failure() {
                return why;
            }
        }
    }

    /// Waits until writes of some array have been suspended for `patience` in total since the call. Returns
    /// the reason.
    pub async fn stuck(&self, patience: Duration) -> String {
        let mut waited = Duration::ZERO;
        loop {
            self.env.sleep(STUCK_LOOK).await;
            let suspended = |array: &Rc<Array>| {
                Some(format!("writes of array {} wait: {}", array.name(), array.suspended()?))
            };
            let Some(why) = self.arrays().iter().find_map(suspended) else { continue };
            if waited.is_zero() {
                let most = patience.as_secs();
                tracing::warn!(why, "the stop waits for the drives or the host, {most} s at most");
            }
            waited += STUCK_LOOK;
            if waited >= patience {
                return why;
            }
        }
    }

    /// The stacks that do not serve.
    pub(crate) fn absent(&self) -> Vec<Absent> {
        self.absent.borrow().clone()
    }

    /// The stacks that do not serve, and may serve another time.
    pub(crate) fn away(&self) -> Vec<Absent> {
        self.absent.borrow().iter().filter(|absent| !absent.is_forgotten).cloned().collect()
    }

    /// True if a stack does not serve that may serve another time.
    pub(crate) fn is_incomplete(&self) -> bool {
        !self.away().is_empty()
    }

    /// The stack of a target that does not serve.
    fn absent_target(&self, target: u32) -> Result<Absent, AdminError> {
        let absent = self.absent().into_iter().find(|absent| absent.number.target().0 == target);
        absent.ok_or_else(|| match self.stack_of(TargetId(target)) {
            Some(_) => AdminError::Refused(format!("target {target} serves: nothing of it is lost")),
            None => AdminError::NotFound(format!("no target {target}; `penstock stack list` shows them")),
        })
    }

    /// Files that may have a part on a target that does not serve.
    pub async fn files_on(&self, target: u32) -> Result<TargetFilesReport, AdminError> {
        let absent = self.absent_target(target)?;
        let lost = absent.number.target();
        let mut on_loan: BTreeMap<Ino, u64> = BTreeMap::new();
        for stack in &self.stacks {
            for (ino, blocks) in stack.target.lost_with(lost).await.map_err(MetaError::from)? {
                *on_loan.entry(ino).or_default() += blocks;
            }
        }
        let found = scoped(self.meta.files_on(lost, &on_loan, LISTED_FILES)).await?;
        let mut paths = self.meta.find_paths(&found.listed).await?;
        let file = |ino: &Ino| FileReport { inode: ino.0, paths: paths.remove(ino).unwrap_or_default() };
        Ok(TargetFilesReport {
            target,
            state: absent.state().to_owned(),
            reason: absent.why,
            queued_work: self.meta.queued_for(TargetId(target)),
            files: found.files,
            most_bytes: found.most_bytes,
            listed_files: found.listed.iter().map(file).collect(),
        })
    }

    /// Forgets a target that does not serve: it never serves again, its data is lost, and nothing waits for
    /// it any more. Returns what is lost.
    pub async fn forget_target(&self, target: u32) -> Result<TargetFilesReport, AdminError> {
        let lost = self.files_on(target).await?;
        let absent = self.absent_target(target)?;
        if absent.is_forgotten {
            return Ok(lost);
        }
        scoped(self.meta.forget(absent.number.target())).await?;
        for known in self.absent.borrow_mut().iter_mut().filter(|known| known.number == absent.number) {
            *known = Absent::forgotten(absent.number);
        }
        self.drives.forget(absent.number);
        self.events.add(
            Severity::Warning,
            EventKind::TargetForgotten,
            format!("stack {}", absent.number),
            format!(
                "target {target} is forgotten: {} files had up to {} bytes there, which are lost",
                lost.files, lost.most_bytes
            ),
        );
        // Names that are restored from an older copy would let the target serve again.
        if let Err(error) = self.home().copies.make().await {
            tracing::warn!(%error, "no copy of the map says yet that a target is forgotten");
            self.home().copies.want();
        }
        Ok(TargetFilesReport { state: "forgotten".to_owned(), queued_work: 0, ..lost })
    }

    /// Health of the store.
    pub(crate) fn health(&self) -> &'static str {
        if self.failure().is_some() || self.is_incomplete() {
            return "failed";
        }
        let all_online = self.drives().iter().all(|drive| drive.is_online());
        health(self.arrays(), all_online)
    }
}

/// Health of the store: that of its worst array. A suspended array counts as degraded: it waits for the host
/// or for drives, and loses nothing meanwhile.
pub(crate) fn health(arrays: &[Rc<Array>], all_well: bool) -> &'static str {
    let rank = |state: ArrayState| match state {
        ArrayState::Ok => 0,
        // With all its redundancy an array in spare places waits for a drive.
        ArrayState::Spared | ArrayState::Degraded | ArrayState::Suspended => 1,
        ArrayState::Critical => 2,
        ArrayState::Failed => 3,
    };
    match arrays.iter().map(|array| rank(array.report().state)).max().unwrap_or(0) {
        0 if all_well => "ok",
        0 | 1 => "degraded",
        2 => "critical",
        _ => "failed",
    }
}
