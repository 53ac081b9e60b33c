//! Operations of an administrator: show state, fail and replace drives, keep events.

use crate::assemble::Node;
use crate::backing::{ANSWER, Found, read_superblock};
use crate::event_files::{EventFiles, Kept};
use crate::events::{Event, EventKind, Events, Severity};
use crate::report::{ArrayReport, DriveReport, FsReport, JobReport, MemberReport, StatusReport};
use crate::watch::drive_object;
use penstock_array::{Array, ArrayError, ArrayState, JobProgress, Position};
use penstock_base::env::random_id;
use penstock_base::{BLOCK_BYTES, DriveId};
use penstock_drive::superblock::{Superblock, SuperblockError, slices_end};
use penstock_drive::{DriveHandle, Slice};
use std::path::Path;
use std::rc::Rc;

const BLOCK: u64 = BLOCK_BYTES as u64;

/// Reason why an administrator's request was not done.
#[derive(Clone, Debug, thiserror::Error)]
pub enum AdminError {
    /// The named object does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The request is refused; the store was not changed.
    #[error("{0}")]
    Refused(String),
    /// An array failed.
    #[error(transparent)]
    Array(#[from] ArrayError),
    /// The file system failed.
    #[error(transparent)]
    Meta(#[from] penstock_meta::MetaError),
}

impl Node {
    /// Finds a drive by its id, the beginning of its id, or its path.
    fn find_drive(&self, id: &str) -> Result<Rc<DriveHandle>, AdminError> {
        let drives = self.drives.borrow();
        let mut matching =
            drives.iter().filter(|drive| drive.id().to_string().starts_with(id) || drive.path() == id);
        match (matching.next(), matching.next()) {
            (Some(drive), None) if !id.is_empty() => Ok(drive.clone()),
            (Some(_), Some(_)) => {
                Err(AdminError::Refused(format!("several drives have ids that begin with {id}")))
            }
            _ => Err(AdminError::NotFound(format!("no drive {id}; `penstock drive list` shows them"))),
        }
    }

    /// Finds arrays by name, id or the beginning of an id; all arrays for none.
    pub fn find_arrays(&self, which: Option<&str>) -> Result<Vec<Rc<Array>>, AdminError> {
        let Some(which) = which else { return Ok(self.arrays.clone()) };
        let fits = |array: &&Rc<Array>| array.name() == which || array.id().to_string().starts_with(which);
        let found: Vec<Rc<Array>> = self.arrays.iter().filter(fits).cloned().collect();
        match found.is_empty() || which.is_empty() {
            true => Err(AdminError::NotFound(format!("no array {which}; `penstock array list` shows them"))),
            false => Ok(found),
        }
    }

    /// Takes a drive out of service. Refused if an array could not survive that.
    pub async fn fail_drive(&self, id: &str) -> Result<DriveReport, AdminError> {
        let _one_at_a_time = self.changing_drives.lock().await;
        let drive = self.find_drive(id)?;
        let members: Vec<(Rc<Array>, Position)> = self
            .arrays
            .iter()
            .filter_map(|array| Some((array.clone(), array.position_of(drive.id())?)))
            .collect();
        for (array, _) in &members {
            if !array.survives(&[drive.id()]) {
                return Err(AdminError::Refused(format!(
                    "drive {} is not failed: array {} can lose no further member; replace or rebuild the lost ones first",
                    drive.id(),
                    array.name()
                )));
            }
        }
        for (array, position) in &members {
            array.fail_member(*position, "failed by an administrator").await?;
        }
        drive.latch("failed by an administrator".into());
        Ok(self.drive_report(&drive))
    }

    /// Replaces a failed or missing drive by a blank one at `path`, or else at the old drive's path. If that
    /// failed for some arrays, another request continues with the same drive.
    pub async fn replace_drive(&self, id: &str, path: Option<&str>) -> Result<DriveReport, AdminError> {
        let _one_at_a_time = self.changing_drives.lock().await;
        let old = self.find_drive(id)?;
        let begun = self.replacing.borrow().get(&old.id()).filter(|new| new.is_online()).cloned();
        let new = match begun.or_else(|| self.half_in_place(&old, path)) {
            Some(new) if path.is_none_or(|path| path == new.path()) => new,
            Some(new) => {
                return Err(AdminError::Refused(format!(
                    "drive {} is being replaced by the one at {}: ask for that again, or take that one out of service first",
                    old.id(),
                    new.path()
                )));
            }
            None => self.new_drive(&old, path).await?,
        };
        self.put_in_place(&old, &new).await?;
        // Until this succeeds, the file names the old drive beside the new one.
        if let Err(why) = self.note_places() {
            let text = format!("the paths of the drives could not be saved: {why}");
            self.events.add(Severity::Warning, EventKind::DriveReplaced, drive_object(new.id()), text);
        }
        let text = format!("replaced by drive {} at {}", new.id(), new.path());
        self.events.add(Severity::Info, EventKind::DriveReplaced, drive_object(old.id()), text);
        Ok(self.drive_report(&new))
    }

    /// The drive of this store that is in use at a path.
    fn online_at(&self, path: &str) -> Option<Rc<DriveHandle>> {
        self.drives.borrow().iter().find(|drive| drive.is_online() && drive.path() == path).cloned()
    }

    /// Returns a drive of this store that replaced the lost one in some arrays and can replace it in the
    /// others: the replacement continues that a restart interrupted.
    fn half_in_place(&self, old: &DriveHandle, path: Option<&str>) -> Option<Rc<DriveHandle>> {
        let path = path.unwrap_or(old.path());
        let new = self.online_at(path)?;
        let slices = |id: DriveId| self.arrays.iter().filter_map(move |array| array.slice_of(id));
        let apart = |(offset, len): (u64, u64)| {
            slices(new.id()).all(|(other, other_len)| offset + len <= other || other + other_len <= offset)
        };
        let with_both = |array: &Rc<Array>| {
            array.position_of(old.id()).is_some() && array.position_of(new.id()).is_some()
        };
        let fits = !old.is_online()
            && !self.arrays.iter().any(with_both)
            && slices(old.id()).all(apart)
            && self.needed_bytes(old.id()) <= slices_end(new.size_bytes());
        fits.then_some(new)
    }

    /// Makes a blank drive that can replace a lost one.
    async fn new_drive(&self, old: &DriveHandle, path: Option<&str>) -> Result<Rc<DriveHandle>, AdminError> {
        if old.is_online() {
            return Err(AdminError::Refused(format!(
                "drive {} is online; `penstock drive fail` takes it out of service first",
                old.id()
            )));
        }
        let path = path.unwrap_or(old.path()).to_owned();
        if path.is_empty() {
            return Err(AdminError::Refused(format!(
                "it is not known where drive {} was: give a path",
                old.id()
            )));
        }
        if self.online_at(&path).is_some() {
            return Err(AdminError::Refused(format!("{path} is a drive of this store in use")));
        }
        self.refuse_what_is_wanted(&path, old).await?;
        let wanted = self.needed_bytes(old.id());
        // As large as the largest drive of the store, because the size of a lost drive is not known.
        let largest = self.drives.borrow().iter().map(|drive| drive.size_bytes()).max().unwrap_or(0);
        self.backing.create(&path, largest.max(wanted)).map_err(AdminError::Refused)?;
        let drive = self.backing.open(&path).map_err(AdminError::Refused)?;
        if slices_end(drive.size_bytes().max(4 << 20)) < wanted {
            return Err(AdminError::Refused(format!(
                "{path} has {} bytes and {wanted} are needed behind the superblock",
                drive.size_bytes()
            )));
        }
        let superblock = Superblock {
            store: self.store,
            drive: DriveId(random_id(&self.env)),
            size_bytes: drive.size_bytes(),
            created_ns: self.env.wall_ns(),
            ..Superblock::default()
        };
        Ok(DriveHandle::online(self.env.clone(), path, drive, superblock))
    }

    /// Refuses a path with contents that somebody may need. Overwritten are only blank drives and drives of
    /// this store that are not in use.
    async fn refuse_what_is_wanted(&self, path: &str, old: &DriveHandle) -> Result<(), AdminError> {
        let refuse = |why: String| {
            Err(AdminError::Refused(format!(
                "{why}; it is not written over. Remove or wipe it yourself if nobody wants it, or name another path"
            )))
        };
        let found = self.backing.look(path).map_err(AdminError::Refused)?;
        let failed_here = found == Found::File && path == old.path() && old.is_open();
        if matches!(found, Found::Nothing | Found::EmptyFile) || failed_here {
            return Ok(());
        }
        let drive = match self.backing.open(path) {
            Ok(drive) => drive,
            Err(why) => return refuse(why),
        };
        // A file at the path where this store had the drive is that drive, even if it is damaged.
        let is_its_file = found == Found::File && path == old.path();
        let Some(read) = read_superblock(&self.env, &*drive).await else {
            return refuse(format!("{path}: no answer within {ANSWER:?}"));
        };
        match read {
            Err(SuperblockError::Blank) if found == Found::Device => Ok(()),
            Ok(known) if known.store == self.store => {
                let in_use = |drive: &Rc<DriveHandle>| drive.id() == known.drive && drive.is_online();
                match self.drives.borrow().iter().any(in_use) {
                    true => refuse(format!("{path} is drive {} of this store, which is in use", known.drive)),
                    false => Ok(()),
                }
            }
            Ok(known) => refuse(format!("{path} is drive {} of another store, {}", known.drive, known.store)),
            Err(SuperblockError::Foreign | SuperblockError::Blank | SuperblockError::Drive(_))
                if is_its_file =>
            {
                Ok(())
            }
            Err(SuperblockError::Blank) => refuse(format!("{path} is a file with contents")),
            Err(error) => refuse(format!("{path}: {error}")),
        }
    }

    /// Bytes from the start of a drive to the end of its last slice.
    fn needed_bytes(&self, drive: DriveId) -> u64 {
        let slices = self.arrays.iter().filter_map(|array| array.slice_of(drive));
        slices.map(|(offset, len)| offset + len).max().unwrap_or(0)
    }

    /// Gives a new drive the slices of an old one in all arrays that have not done that yet. The new drive is
    /// listed from the first change on, so that nothing takes it for something else, even after a failure.
    async fn put_in_place(&self, old: &Rc<DriveHandle>, new: &Rc<DriveHandle>) -> Result<(), AdminError> {
        // Also if a member is recorded as replaced but does not use the new drive yet.
        let place = |array: &Rc<Array>| {
            let of = |drive: DriveId| Some((array.position_of(drive)?, array.slice_of(drive)?));
            of(old.id()).or_else(|| of(new.id()).filter(|(position, _)| !array.is_in_place(*position)))
        };
        self.replaced.borrow_mut().insert(new.id());
        self.replacing.borrow_mut().insert(old.id(), new.clone());
        let is_known = self.drives.borrow().iter().any(|drive| drive.id() == new.id());
        if !is_known {
            self.drives.borrow_mut().push(new.clone());
        }
        let replace = async {
            // The next start must find the drive before it can be the only one that has some data.
            if !is_known {
                self.note_places().map_err(AdminError::Refused)?;
            }
            for array in &self.arrays {
                let Some((_, (offset, _))) = place(array) else { continue };
                let reserved = array.geometry().reserved();
                let bytes = offset + reserved.start..offset + reserved.end;
                self.backing.allocate(new.path(), bytes).map_err(AdminError::Refused)?;
            }
            for array in &self.arrays {
                let Some((position, (offset, len))) = place(array) else { continue };
                array.replace_member(position, new, Slice::new(new.clone(), offset, len)).await?;
            }
            Ok(())
        };
        let result: Result<(), AdminError> = replace.await;
        let is_done = !self.arrays.iter().any(|array| place(array).is_some());
        if !is_done && self.arrays.iter().any(|array| array.position_of(new.id()).is_some()) {
            // The list keeps both drives, and the administrator has to repeat the request.
            return result;
        }
        let mut drives = self.drives.borrow_mut();
        drives.retain(|drive| drive.id() != new.id());
        if is_done {
            let listed = drives.iter_mut().find(|drive| drive.id() == old.id());
            *listed.expect("it was found there") = new.clone();
        }
        self.replacing.borrow_mut().remove(&old.id());
        result
    }

    /// Sets the function that saves the paths of the drives. It is called when a drive replaces another:
    /// before the new one gets any data, and again when it is complete.
    pub fn keep_places(&self, keep: impl Fn(&Self) -> Result<(), String> + 'static) {
        *self.keep_places.borrow_mut() = Some(Rc::new(keep));
    }

    fn note_places(&self) -> Result<(), String> {
        let keep = self.keep_places.borrow().clone();
        keep.map_or(Ok(()), |keep| keep(self))
    }

    /// Report of the file system.
    pub fn fs_report(&self) -> FsReport {
        let (info, space, rows, counts) =
            (self.meta.info(), self.target.usage(), self.usage(), self.target.counts());
        FsReport {
            id: info.id.to_string(),
            name: info.name,
            filesets: vec!["root".into()],
            created_ns: info.created_ns,
            chunk_bytes: u64::from(info.chunk_blocks) * BLOCK,
            total_bytes: space.total_blocks * BLOCK,
            free_bytes: space.free_blocks * BLOCK,
            available_bytes: space.free_blocks.saturating_sub(space.headroom_blocks) * BLOCK,
            meta_used_bytes: rows.used_bytes,
            meta_budget_bytes: rows.budget_bytes,
            written_bytes: counts.written_blocks * BLOCK,
            read_bytes: counts.read_blocks * BLOCK,
            whole_chunks: counts.whole_chunks,
            rewritten_chunks: counts.rewritten_chunks,
            logged_chunks: counts.logged_chunks,
            commits: counts.commits,
            check: self.check_progress(),
        }
    }

    fn usage(&self) -> penstock_kv::Usage {
        penstock_kv::Kv::usage(&*self.kv)
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
        self.greet_drives();
    }

    /// Reports of all drives.
    pub fn drive_reports(&self) -> Vec<DriveReport> {
        self.drives.borrow().iter().map(|drive| self.drive_report(drive)).collect()
    }

    /// Report of one drive, by its id, the beginning of its id, or its path.
    pub fn show_drive(&self, id: &str) -> Result<DriveReport, AdminError> {
        Ok(self.drive_report(&*self.find_drive(id)?))
    }

    fn drive_report(&self, drive: &DriveHandle) -> DriveReport {
        let (state, counters) = (drive.state(), drive.counters());
        let of = self.arrays.iter().filter(|array| array.position_of(drive.id()).is_some());
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
            next_scrub_ns: self.next_scrub_ns(array.id()),
            ..array_report(array, now_ns)
        };
        arrays.iter().map(report).collect()
    }

    /// Report of everything. The caller adds folder, process-wide addresses and mounts, which only the
    /// process knows.
    pub fn status(&self) -> StatusReport {
        let arrays = self.array_reports(&self.arrays);
        let drives = self.drive_reports();
        let mut reasons = Vec::new();
        for drive in drives.iter().filter(|drive| drive.state != "online") {
            reasons.push(format!("drive {} ({}) is {}: {}", drive.id, drive.path, drive.state, drive.reason));
        }
        for array in arrays.iter().filter(|array| array.state != "ok") {
            let debt = (array.redundancy_debt_stripes, array.redundancy_debt_carriers);
            let why = array.stopped.clone().or(array.suspended.clone()).unwrap_or_else(|| {
                format!("{} stripes and {} copies of its log lack redundancy", debt.0, debt.1)
            });
            reasons.push(format!("array {} is {}: {why}", array.name, array.state));
        }
        reasons.extend(self.damage_reasons());
        reasons.extend(self.failure().map(|why| format!("the store has stopped: {why}; start it again")));
        let health = match self.failure() {
            Some(_) => "failed".to_owned(),
            None => health(&self.arrays, reasons.is_empty()).to_owned(),
        };
        let spaces = self.spaces();
        for space in spaces.iter().filter(|space| space.warning_percent > 0) {
            reasons.push(format!("{} is {} % full", space.name, space.used_percent));
        }
        for drive in self.drives.borrow().iter().filter(|drive| self.slow.borrow().is_slow(drive.id())) {
            reasons.push(format!("drive {} ({}) is much slower than the others", drive.id(), drive.path()));
        }
        let fs = self.fs_report();
        StatusReport {
            health,
            reasons,
            redundancy_debt_stripes: arrays.iter().map(|array| array.redundancy_debt_stripes).sum(),
            redundancy_debt_carriers: arrays.iter().map(|array| array.redundancy_debt_carriers).sum(),
            store: self.store.to_string(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            dir: String::new(),
            api_url: None,
            tcp_address: None,
            mounts: Vec::new(),
            sessions: self.session_reports(),
            started_ns: self.started_ns,
            io_path: penstock_worker::io_path().to_owned(),
            code_path: self.arrays.first().map_or("", |array| array.code_path()).to_owned(),
            total_bytes: fs.total_bytes,
            free_bytes: fs.free_bytes,
            spaces,
            drives,
            arrays,
        }
    }
}

/// Health of the store: that of its worst array. A suspended array counts as degraded: it waits for the host
/// or for drives, and loses nothing meanwhile.
pub(crate) fn health(arrays: &[Rc<Array>], all_well: bool) -> &'static str {
    let rank = |state: ArrayState| match state {
        ArrayState::Ok => 0,
        ArrayState::Degraded | ArrayState::Suspended => 1,
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

fn job_report(job: &JobProgress, now_ns: i64) -> JobReport {
    let elapsed_s = (now_ns - job.started_ns).max(0) as u64 / 1_000_000_000;
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
    });
    ArrayReport {
        id: report.id.to_string(),
        name: report.name.clone(),
        code: format!("{}+{}", report.code.0, report.code.1),
        state: report.state.word().to_owned(),
        suspended: report.suspended.clone(),
        stopped: report.stopped.clone(),
        redundancy_debt_stripes: report.redundancy_debt_stripes,
        redundancy_debt_carriers: report.missing_carriers,
        unreadable_stripes: report.unreadable_stripes,
        stripes: report.stripes.0,
        written_stripes: report.stripes.1,
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
