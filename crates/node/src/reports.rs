//! Reports of a node, and an administrator's requests for its drives.

use crate::error::AdminError;
use crate::event::{EventKind, Severity};
use crate::event_files::Kept;
use crate::latency::latencies;
use crate::node::{Node, health};
use crate::pools;
use crate::report::{
    ArrayReport, DriveReport, FsReport, JobReport, LatencyReport, LayoutReport, MemberReport, PoolReport,
    SessionDetails, SessionReport, StackReport, StatusReport,
};
use crate::stack::Stack;
use crate::stack_arrays::Absent;
use crate::watch;
use penstock_array::format::descriptor::Role;
use penstock_array::{Array, ArrayState, JobProgress};
use penstock_base::BLOCK_BYTES;
use penstock_base::rank::scoped;
use penstock_chunk::TargetCounts;
use penstock_drive::DriveHandle;
use penstock_kv::Kv;
use penstock_meta::{LayoutInfo, WantedLayout};
use penstock_session::SessionInfo;
use std::rc::Rc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

impl Node {
    /// Takes a drive out of service. Refused if an array could not survive that.
    pub async fn fail_drive(&self, id: &str) -> Result<DriveReport, AdminError> {
        Ok(self.drive_report(&*self.drives.fail(id).await?))
    }

    /// Replaces a failed or missing drive by a blank one at `path`, or else at the old drive's path. If that
    /// failed for some arrays, another request continues with the same drive.
    pub async fn replace_drive(&self, id: &str, path: Option<&str>) -> Result<DriveReport, AdminError> {
        Ok(self.drive_report(&*self.drives.replace(id, path).await?))
    }

    /// Writes events to files from now on, and adds events on the state at the start.
    pub fn keep_events(&self, found: Kept) {
        let (unclean, torn_lines) = (found.unclean, found.torn_lines);
        self.events.keep_in(found);
        if unclean {
            let text = "the instance before this one ended without stopping in order";
            self.events.add(Severity::Warning, EventKind::UncleanEnd, "node", text);
        }
        if torn_lines > 0 {
            let text = format!("{torn_lines} lines of the event files were no events and are skipped");
            self.events.add(Severity::Warning, EventKind::EventsTorn, "node", text);
        }
        watch::greet_drives(self);
    }

    /// Latencies of the services, the key-value store, the arrays and the drives.
    pub fn latencies(&self) -> Vec<LatencyReport> {
        latencies(&self.latency, &self.stacks, self.arrays(), &self.drives())
    }

    /// Reports of all sessions.
    pub fn session_reports(&self) -> Vec<SessionReport> {
        self.clients.sessions().into_iter().map(session_report).collect()
    }

    /// Reports of all sessions, with what they have and owe.
    pub fn session_details(&self) -> Vec<SessionDetails> {
        let holdings = self.clients.holdings();
        let details = |session: SessionInfo| {
            let held = holdings.get(&session.id).copied().unwrap_or_default();
            SessionDetails {
                lease_ms: session.lease.map_or(0, millis),
                session: session_report(session),
                shared_leases: held.shared_leases,
                exclusive_leases: held.exclusive_leases,
                attribute_leases: held.attribute_leases,
                locks: held.locks,
                unanswered_calls: held.unanswered_calls,
                requests: held.requests,
            }
        };
        self.clients.sessions().into_iter().map(details).collect()
    }

    /// Report of one session.
    pub fn show_session(&self, id: u64) -> Result<SessionDetails, AdminError> {
        let found = self.session_details().into_iter().find(|details| details.session.id == id);
        found.ok_or_else(|| {
            AdminError::NotFound(format!("no session {id}; `penstock session list` shows them"))
        })
    }

    /// Ends the session of another process, as if its client had been silent: others get its leases and
    /// locks, and every operation of the client fails from now on. Returns the report from before.
    pub async fn end_session(&self, id: u64) -> Result<SessionDetails, AdminError> {
        let details = self.show_session(id)?;
        if !details.session.remote {
            let why =
                format!("session {id} is that of the instance itself: `penstock umount` ends its mount");
            return Err(AdminError::Refused(why));
        }
        scoped(self.meta.end_session(id)).await?;
        let SessionReport { client, mount, .. } = &details.session;
        let text = format!("session {id} ({client}, mounted at {mount:?}) was ended by an administrator");
        self.events.add(Severity::Warning, EventKind::SessionEnded, "fs main", text);
        Ok(details)
    }

    /// Report of the file system.
    pub fn fs_report(&self) -> FsReport {
        let targets = || self.stacks.iter().map(|stack| &stack.target);
        let (info, space, rows) = (self.meta.info(), self.usage(), Kv::usage(&*self.home().kv));
        let counts: TargetCounts = targets().map(|target| target.counts()).sum();
        FsReport {
            id: info.id.to_string(),
            name: info.name,
            filesets: vec!["root".into()],
            created_ns: info.created_ns,
            chunk_bytes: u64::from(info.chunk_blocks) * BLOCK,
            total_bytes: space.total_blocks * BLOCK,
            free_bytes: space.free_blocks * BLOCK,
            available_bytes: space.available_blocks() * BLOCK,
            meta_used_bytes: rows.used_bytes,
            meta_budget_bytes: rows.budget_bytes,
            written_bytes: counts.written_blocks * BLOCK,
            read_bytes: counts.read_blocks * BLOCK,
            whole_chunks: counts.whole_chunks,
            rewritten_chunks: counts.rewritten_chunks,
            logged_chunks: counts.logged_chunks,
            commits: counts.commits,
            group_reads: counts.group_reads,
            swept: targets().all(|target| target.is_swept()),
            suspect_groups: targets().map(|target| target.suspect_groups()).sum(),
            map_copy: self.home().copies.newest(),
            check: self.check_progress(),
        }
    }

    /// Reports of all drives.
    pub fn drive_reports(&self) -> Vec<DriveReport> {
        self.drives().iter().map(|drive| self.drive_report(drive)).collect()
    }

    /// Report of one drive, by its id, the beginning of its id, or its path.
    pub fn show_drive(&self, id: &str) -> Result<DriveReport, AdminError> {
        Ok(self.drive_report(&*self.drives.find(id)?))
    }

    fn drive_report(&self, drive: &DriveHandle) -> DriveReport {
        let (state, counters) = (drive.state(), drive.counters());
        let of = self.arrays().iter().filter(|array| array.member_on(drive.id()).is_some());
        DriveReport {
            id: drive.id().to_string(),
            state: state.word().to_owned(),
            reason: state.reason().to_owned(),
            path: drive.path().to_owned(),
            size_bytes: drive.size_bytes(),
            checksum_errors: counters.checksum_errors,
            io_errors: counters.io_errors,
            timeouts: counters.timeouts,
            repaired_blocks: counters.repaired_blocks,
            reads: counters.reads,
            writes: counters.writes,
            flushes: counters.flushes,
            read_bytes: counters.read_bytes,
            write_bytes: counters.write_bytes,
            arrays: of.map(|array| array.name().to_owned()).collect(),
        }
    }

    /// Reports of the given arrays.
    pub fn array_reports(&self, arrays: &[Rc<Array>]) -> Vec<ArrayReport> {
        let now_ns = self.env.wall_ns();
        let report = |array: &Rc<Array>| ArrayReport {
            last_scrub: self.scrubs.last(array.id()),
            next_scrub_ns: self.scrubs.next_ns(array.id()),
            ..array_report(array, now_ns)
        };
        arrays.iter().map(report).collect()
    }

    /// Reports of all pools.
    pub fn pool_reports(&self) -> Vec<PoolReport> {
        pools::reports(self)
    }

    /// Report of one pool, by its name.
    pub fn show_pool(&self, name: &str) -> Result<PoolReport, AdminError> {
        let found = self.pool_reports().into_iter().find(|pool| pool.name == name);
        found.ok_or_else(|| AdminError::NotFound(format!("no pool {name}; `penstock pool list` shows them")))
    }

    /// Report of everything. The caller adds folder, process-wide addresses and mounts, which only the
    /// process knows.
    pub fn status(&self) -> StatusReport {
        let arrays = self.array_reports(self.arrays());
        let drives = self.drive_reports();
        let mut reasons = Vec::new();
        for drive in drives.iter().filter(|drive| drive.state != "online") {
            reasons.push(format!("drive {} ({}) is {}: {}", drive.id, drive.path, drive.state, drive.reason));
        }
        for array in arrays.iter().filter(|array| array.state != "ok") {
            let debt = (array.redundancy_debt_stripes, array.redundancy_debt_carriers);
            let lacking = || match (array.state.as_str(), debt) {
                ("spared", (0, 0)) => {
                    "all stripes are whole, some in spare space: replace the drives that are gone".to_owned()
                }
                _ => format!("{} stripes and {} copies of its log lack redundancy", debt.0, debt.1),
            };
            let why = array.stopped.clone().or(array.suspended.clone()).unwrap_or_else(lacking);
            reasons.push(format!("array {} is {}: {why}", array.name, array.state));
        }
        reasons.extend(self.damage.reasons(self.unreadable(Role::Metadata).len()));
        if let groups @ 1.. = self.stacks.iter().map(|stack| stack.target.suspect_groups()).sum::<u64>() {
            reasons.push(format!(
                "marks of used blocks may be lost in {groups} groups: nothing is written to what is free there \
                 until `penstock fs check --repair`"
            ));
        }
        if !self.stacks.iter().all(|stack| stack.target.is_compared()) {
            reasons.push(
                "writes wait until all blocks of files are looked up: some may be marked as free".to_owned(),
            );
        }
        reasons.extend(self.away().iter().map(|absent| {
            format!(
                "stack {} does not serve, and files with data on target {} lack it (`penstock fs damaged` names them): {}",
                absent.number,
                absent.number.target(),
                absent.why
            )
        }));
        reasons.extend(self.failure().map(|why| format!("the store has stopped: {why}; start it again")));
        let health = match self.failure().is_some() || self.is_incomplete() {
            true => "failed".to_owned(),
            false => health(self.arrays(), reasons.is_empty()).to_owned(),
        };
        let spaces = self.spaces();
        for space in spaces.iter().filter(|space| space.warning_percent > 0) {
            reasons.push(format!("{} is {} % full", space.name, space.used_percent));
        }
        for drive in self.drives().iter().filter(|drive| self.slow.borrow().is_slow(drive.id())) {
            reasons.push(format!("drive {} ({}) is much slower than the others", drive.id(), drive.path()));
        }
        let fs = self.fs_report();
        StatusReport {
            health,
            reasons,
            redundancy_debt_stripes: arrays.iter().map(|array| array.redundancy_debt_stripes).sum(),
            redundancy_debt_carriers: arrays.iter().map(|array| array.redundancy_debt_carriers).sum(),
            store: self.store().to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            dir: String::new(),
            api_url: None,
            tcp_address: None,
            mounts: Vec::new(),
            sessions: self.session_reports(),
            started_ns: self.started_ns,
            io_path: penstock_worker::io_path().to_owned(),
            code_path: self.arrays().first().map_or("", |array| array.code_path()).to_owned(),
            total_bytes: fs.total_bytes,
            free_bytes: fs.free_bytes,
            spaces,
            stacks: self.stack_reports(),
            drives,
            arrays,
        }
    }

    /// Reports of all stacks, in their order.
    pub fn stack_reports(&self) -> Vec<StackReport> {
        let serving = self.stacks.iter().map(|stack| self.stack_report(stack));
        let mut reports: Vec<StackReport> =
            serving.chain(self.absent().iter().map(|absent| self.absent_report(absent))).collect();
        reports.sort_by_key(|report| report.stack);
        reports
    }

    /// Report of one stack, by its number.
    pub fn show_stack(&self, number: u16) -> Result<StackReport, AdminError> {
        let found = self.stack_reports().into_iter().find(|report| report.stack == number);
        found.ok_or_else(|| {
            AdminError::NotFound(format!("no stack {number}; `penstock stack list` shows them"))
        })
    }

    fn stack_report(&self, stack: &Stack) -> StackReport {
        let (space, rows, counts) = (stack.target.usage(), Kv::usage(&*stack.kv), stack.target.counts());
        let states = stack.arrays.both().map(|array| array.report().state);
        let worst = states.into_iter().max().unwrap_or(ArrayState::Ok);
        let (borrowed, lent) = stack.target.loans();
        StackReport {
            stack: stack.number().0,
            target: stack.target_id().0,
            state: worst.word().to_owned(),
            reason: None,
            has_names: stack.work.is_none(),
            arrays: stack.arrays.both().map(|array| array.name().to_owned()).to_vec(),
            total_bytes: space.total_blocks * BLOCK,
            free_bytes: space.free_blocks * BLOCK,
            available_bytes: space.available_blocks() * BLOCK,
            borrowed_bytes: borrowed * BLOCK,
            lent_bytes: lent * BLOCK,
            meta_used_bytes: rows.used_bytes,
            meta_budget_bytes: rows.budget_bytes,
            written_bytes: counts.written_blocks * BLOCK,
            read_bytes: counts.read_blocks * BLOCK,
            commits: counts.commits,
            queued_work: self.meta.queued_for(stack.target_id()),
            suspect_groups: stack.target.suspect_groups(),
            map_copy: stack.copies.newest(),
        }
    }

    fn absent_report(&self, absent: &Absent) -> StackReport {
        let Absent { number, why, .. } = absent;
        StackReport {
            stack: number.0,
            target: number.target().0,
            state: absent.state().to_owned(),
            reason: Some(why.clone()),
            queued_work: self.meta.queued_for(number.target()),
            ..StackReport::default()
        }
    }

    /// The layout of a file, or that of new files in a directory, at a path from the root.
    pub async fn layout(&self, path: &str) -> Result<LayoutReport, AdminError> {
        Ok(layout_report(path, scoped(self.meta.layout(path.as_bytes())).await?))
    }

    /// Changes the layout that new files in a directory get, or that of a file without data.
    pub async fn set_layout(&self, path: &str, wanted: WantedLayout) -> Result<LayoutReport, AdminError> {
        Ok(layout_report(path, scoped(self.meta.set_layout(path.as_bytes(), wanted)).await?))
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn session_report(session: SessionInfo) -> SessionReport {
    SessionReport {
        id: session.id,
        client: session.client,
        mount: session.mount,
        remote: session.lease.is_some(),
        silent_ms: millis(session.silent),
        open_inodes: session.open_inodes,
        role: session.role.word().to_owned(),
        users: session.users,
        recovers: session.recovers,
    }
}

fn job_report(job: &JobProgress, now_ns: i64) -> JobReport {
    let elapsed_s = (now_ns - job.started_ns).max(0).cast_unsigned() / 1_000_000_000;
    let left = job.total_stripes.saturating_sub(job.done_stripes);
    let done = job.done_stripes.saturating_sub(job.done_before);
    JobReport {
        done_stripes: job.done_stripes,
        total_stripes: job.total_stripes,
        failed_stripes: job.failed_stripes,
        started_ns: job.started_ns,
        remaining_s: (elapsed_s > 0 && done > 0).then(|| left * elapsed_s / done),
    }
}

fn array_report(array: &Array, now_ns: i64) -> ArrayReport {
    let report = array.report();
    let counts = report.counts;
    let members = report.members.iter().map(|member| MemberReport {
        drive: member.drive.to_string(),
        state: member.state.to_owned(),
        carrier: member.carrier,
        stale_strips: member.stale_strips,
        moved_strips: member.moved_strips,
    });
    ArrayReport {
        id: report.id.to_string(),
        name: report.name.clone(),
        code: format!("{}+{}", report.code.0, report.code.1),
        layout: report.layout.clone(),
        state: report.state.word().to_owned(),
        suspended: report.suspended.clone(),
        stopped: report.stopped.clone(),
        redundancy_debt_stripes: report.redundancy_debt_stripes,
        redundancy_debt_carriers: report.missing_carriers,
        unreadable_stripes: report.unreadable_stripes,
        stripes: report.stripes.0,
        written_stripes: report.stripes.1,
        is_counted: report.is_counted,
        table_pages: report.table_pages.0,
        lost_table_pages: report.table_pages.1,
        table_reads: counts.table_reads,
        stripe_bytes: report.stripe_bytes,
        log_used_percent: report.log_used_percent,
        dirty_bytes: report.dirty_blocks * BLOCK,
        checksum_errors: counts.checksum_errors,
        repaired_blocks: counts.repaired_blocks,
        parity_defects: counts.parity_defects,
        degraded_reads: counts.degraded_reads,
        logged_bytes: counts.logged_blocks * BLOCK,
        fresh_stripes: counts.fresh_stripes,
        destaged_stripes: counts.destaged_stripes,
        read_modify_writes: counts.read_modify_writes,
        reconstruct_writes: counts.reconstruct_writes,
        full_writes: counts.full_writes,
        log_records: counts.log_records,
        log_flushes: counts.log_flushes,
        checkpoints: counts.checkpoints,
        members: members.collect(),
        rebuild: report.rebuild.map(|job| job_report(&job, now_ns)),
        scrub: report.scrub.map(|job| job_report(&job, now_ns)),
        last_scrub: None,
        next_scrub_ns: None,
    }
}

fn layout_report(path: &str, info: LayoutInfo) -> LayoutReport {
    LayoutReport {
        path: path.to_owned(),
        inode: info.ino.0,
        is_directory: info.is_directory,
        count: info.count,
        turn: info.turn,
        chunk_bytes: u64::from(info.chunk_blocks) * BLOCK,
        targets: info.targets.into_iter().map(|target| target.0).collect(),
        is_spread: info.is_spread,
    }
}
