//! The running instance on the worker: its client, its own mount, jobs, and the stop.

use penstock_base::{Env, LocalBoxFuture, env::timeout};
use penstock_client::Client;
use penstock_fabric::Server;
use penstock_fuse::{FuseLatency, Mount, MountOptions};
use penstock_node::{AdminError, Event, EventKind, LatencyReport, Node, Severity, StatusReport};
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// A task for the worker, sent by the HTTP thread.
pub type Task = Box<dyn FnOnce(Rc<Instance>) -> LocalBoxFuture<'static, ()> + Send>;

/// Maximum number of events in one answer.
const EVENTS_MOST: usize = 1000;
/// Time that a stop gives clients in other processes to write back their dirty data.
const CALLED_PATIENCE: Duration = Duration::from_secs(20);
/// Total time that a stop waits while writes of some array are suspended.
const STUCK_PATIENCE: Duration = Duration::from_secs(30);
/// Time that a stop waits for a mount or unmount in progress, whose mount point may not answer.
const MOUNTING_PATIENCE: Duration = Duration::from_secs(20);
/// Time that a stop waits until the last events are written.
const EVENTS_PATIENCE: Duration = Duration::from_secs(10);
/// When this many jobs are listed, the start of another drops the ended ones, except the newest 50.
const KEPT_JOBS: usize = 100;

/// State of a job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// The job has not ended.
    Running,
    /// The job ended without an error; its result is present.
    Done,
    /// The job ended with an error; its result is the message.
    Failed,
}

/// A background job that a request started.
#[derive(Clone, Debug, Serialize)]
pub struct Job {
    /// Number of the job. Numbers begin at a random value at each start of the instance.
    pub id: u64,
    /// Verb and object, such as `scrub data`.
    pub what: String,
    /// Running, done or failed.
    pub state: JobState,
    /// Result, or the error message as a string. Null while the job runs.
    pub result: serde_json::Value,
}

/// The node, its in-process client, the instance's own mount, and jobs. All of it runs on the worker.
pub struct Instance {
    env: Env,
    node: Rc<Node>,
    client: Rc<Client>,
    mount: RefCell<Option<Mount>>,
    /// Number of mounts started so far. Identifies the current one.
    mounts: Cell<u64>,
    fuse_latency: Rc<FuseLatency>,
    mounting: tokio::sync::Mutex<()>,
    dir: PathBuf,
    api_url: Option<String>,
    tcp_address: Option<String>,
    jobs: RefCell<Vec<Job>>,
    /// Number of the next job. The first one is random at each start, so that a number from an earlier start
    /// matches no job. Numbers stay below 2^51, because JSON numbers are exact up to 2^53.
    next_job: Cell<u64>,
    stopping: Notify,
}

impl Instance {
    /// Creates an instance on `node`. `dir` is the store's folder; `api_url` and `tcp_address` are its TCP
    /// listeners, if any.
    pub fn new(
        env: &Env,
        node: Rc<Node>,
        client: Rc<Client>,
        dir: &Path,
        api_url: Option<String>,
        tcp_address: Option<String>,
    ) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            node,
            client,
            mount: RefCell::default(),
            mounts: Cell::new(0),
            fuse_latency: Rc::default(),
            mounting: tokio::sync::Mutex::default(),
            dir: dir.to_owned(),
            api_url,
            tcp_address,
            jobs: RefCell::default(),
            next_job: Cell::new((env.random() >> 33) << 20 | 1),
            stopping: Notify::new(),
        })
    }

    /// The node that serves the store.
    pub fn node(&self) -> &Rc<Node> {
        &self.node
    }

    /// Health, drives, arrays, sessions and mounts in one report.
    pub fn status(&self) -> StatusReport {
        let mut status = self.node.status();
        status.dir = self.dir.display().to_string();
        status.api_url.clone_from(&self.api_url);
        status.tcp_address.clone_from(&self.tcp_address);
        status.mounts = self.mount.borrow().iter().map(|mount| mount.path().display().to_string()).collect();
        status
    }

    /// Latencies of all layers, from the kernel's requests down to the drives.
    pub fn latencies(&self) -> Vec<LatencyReport> {
        let client = self.client.latency();
        let mut reports: Vec<LatencyReport> =
            self.fuse_latency.all().map(|(op, found)| LatencyReport::new("fuse", op, "", found)).collect();
        for (op, found) in [
            ("read", &client.read),
            ("write", &client.write),
            ("commit", &client.commit),
            ("names", &client.names),
        ] {
            reports.push(LatencyReport::new("client", op, "", found));
        }
        reports.extend(self.node.latencies());
        reports
    }

    /// Mounts the file system in this process, which has at most one mount. Other mounts need their own
    /// process.
    pub async fn mount(self: &Rc<Self>, path: &Path, options: &MountOptions) -> Result<(), AdminError> {
        let _one = self.mounting.lock().await;
        if let Some(mount) = &*self.mount.borrow() {
            return Err(AdminError::Refused(format!(
                "this instance has mounted the file system at {}; `penstock mount` mounts it at another place too",
                mount.path().display()
            )));
        }
        let session = self.client.session();
        self.node.note_mount(session, &path.display().to_string());
        let number = self.mounts.get() + 1;
        self.mounts.set(number);
        let instance = Rc::downgrade(self);
        let on_end = move || {
            if let Some(instance) = instance.upgrade() {
                instance.mount_ended(number);
            }
        };
        let mount = Mount::start(&self.env, &self.client, path, options, &self.fuse_latency, on_end);
        let mount = mount.await.map_err(|error| {
            self.node.note_mount(session, "");
            AdminError::Refused(error.to_string())
        })?;
        *self.mount.borrow_mut() = Some(mount);
        self.event(Severity::Info, EventKind::Mounted, format!("mounted at {}", path.display()));
        Ok(())
    }

    /// Called when the kernel ends a mount. If this instance did not unmount it, umount(8) did.
    fn mount_ended(self: &Rc<Self>, number: u64) {
        // A mount that was detached earlier may end after the next one has begun.
        let ended = self.mount.borrow_mut().take_if(|_| self.mounts.get() == number);
        if let Some(mount) = ended {
            let instance = self.clone();
            let hand_over = async move {
                let _one = instance.mounting.lock().await;
                // A newer mount goes on using the client as it is.
                if instance.mount.borrow().is_none() {
                    // Logged there, and nobody waits for it here.
                    let _ = instance.hand_mount_over().await;
                }
            };
            self.env.spawn("mount hand-over", Box::pin(hand_over));
            let path = mount.path().display();
            self.event(Severity::Info, EventKind::Unmounted, format!("unmounted from {path}"));
        }
    }

    /// Syncs the writes made through a mount that has ended, and lets another client mount. Fails if
    /// something was lost, or is not durable yet; that is logged as well.
    async fn hand_mount_over(&self) -> Result<(), AdminError> {
        if let Err(error) = self.client.close_all().await {
            tracing::error!(%error, "locks or open files of the mount that has ended are still there");
        }
        let left = self.client.leave().await.map_err(|error| {
            tracing::error!(%error, "not everything that was written through the mount is durable");
            AdminError::Refused(format!(
                "it is unmounted; not everything that was written is durable: {error}"
            ))
        });
        self.node.note_mount(self.client.session(), "");
        left
    }

    /// Unmounts. A mount in use is an error; with `force` it is detached and its open files return errors.
    pub async fn unmount(&self, force: bool) -> Result<(), AdminError> {
        let _one = self.mounting.lock().await;
        let (removed, durable) = self.take_mount_off(force).await;
        durable.and(removed)
    }

    /// Fails first if the mount was not removed, and second if something that was written is not durable.
    async fn take_mount_off(&self, force: bool) -> (Result<(), AdminError>, Result<(), AdminError>) {
        let Some(mount) = self.mount.borrow_mut().take() else { return (Ok(()), Ok(())) };
        let path = mount.path().display().to_string();
        let (result, rest) = mount.stop(&self.env, force).await;
        match (&rest, &result) {
            (Some(_), _) => {}
            (None, Ok(())) => {
                self.event(Severity::Info, EventKind::Unmounted, format!("unmounted from {path}"))
            }
            (None, Err(error)) => {
                self.event(
                    Severity::Warning,
                    EventKind::Unmounted,
                    format!("unmounted from {path}: {error}"),
                );
            }
        }
        let durable = match &rest {
            Some(_) => Ok(()),
            None => self.hand_mount_over().await,
        };
        *self.mount.borrow_mut() = rest;
        (result.map_err(|error| AdminError::Refused(format!("{error}"))), durable)
    }

    /// Checks the file system, after the client's writes are synced; with `repair`, repairs it. A repair is
    /// refused while the file system is mounted, because kernels cache names and attributes that a repair may
    /// change.
    pub(crate) async fn check_fs(&self, repair: bool) -> Result<penstock_node::FsCheckReport, AdminError> {
        // Keeps this instance from mounting during a repair.
        let _one = if repair { Some(self.mounting.lock().await) } else { None };
        if repair {
            self.node.refuse_while_mounted()?;
        }
        // Losses are for those who fsync the files.
        self.client
            .sync_rest()
            .await
            .map_err(|failure| AdminError::Refused(format!("nothing was checked: {failure}")))?;
        match repair {
            true => self.node.repair_fs().await,
            false => self.node.check_fs().await,
        }
    }

    fn event(&self, severity: Severity, kind: EventKind, text: impl Into<String>) {
        self.node.events().add(severity, kind, "node", text);
    }

    /// Returns at most 1000 events with numbers above `seq`, oldest first.
    pub(crate) async fn events_after(&self, seq: u64) -> Result<Vec<Event>, AdminError> {
        self.node.events_after(&self.dir, seq, EVENTS_MOST).await
    }

    /// Starts a job and returns its number.
    pub(crate) fn start_job<F>(self: &Rc<Self>, what: String, work: F) -> u64
    where
        F: Future<Output = Result<serde_json::Value, AdminError>> + 'static,
    {
        let id = self.next_job.get();
        self.next_job.set(id + 1);
        let mut jobs = self.jobs.borrow_mut();
        if jobs.len() >= KEPT_JOBS {
            jobs.retain(|job| job.state == JobState::Running || job.id + KEPT_JOBS as u64 / 2 > id);
        }
        jobs.push(Job { id, what, state: JobState::Running, result: serde_json::Value::Null });
        let instance = self.clone();
        let task = async move {
            let (state, result) = match work.await {
                Ok(result) => (JobState::Done, result),
                Err(error) => (JobState::Failed, serde_json::Value::String(error.to_string())),
            };
            let mut jobs = instance.jobs.borrow_mut();
            if let Some(job) = jobs.iter_mut().find(|job| job.id == id) {
                (job.state, job.result) = (state, result);
            }
        };
        self.env.spawn("admin job", Box::pin(task));
        id
    }

    /// Returns a job. Fails with `NotFound` if its number is unknown, or was dropped.
    pub(crate) fn job(&self, id: u64) -> Result<Job, AdminError> {
        let job = self.jobs.borrow().iter().find(|job| job.id == id).cloned();
        job.ok_or_else(|| {
            AdminError::NotFound(format!(
                "no job {id}: jobs end when their instance ends, and only the newest of the ended ones are kept"
            ))
        })
    }

    async fn call_back(&self, others: &Server) -> Result<(), String> {
        let silent = self.node.revoke_everything(CALLED_PATIENCE, |session| others.speaks(session)).await;
        match silent.is_empty() {
            true => Ok(()),
            false => {
                let who = silent.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
                Err(format!(
                    "{who} did not write back its unsynced data within {} s",
                    CALLED_PATIENCE.as_secs()
                ))
            }
        }
    }

    /// Asks the instance to stop. Returns without waiting.
    pub fn stop(&self) {
        self.stopping.notify_one();
    }

    /// Runs `tasks` until the instance is asked to stop. Fails with the reason when the store cannot
    /// continue.
    pub async fn run(
        self: &Rc<Self>,
        tasks: &mut tokio::sync::mpsc::UnboundedReceiver<Task>,
    ) -> Result<(), String> {
        loop {
            tokio::select! {
                biased;
                () = self.stopping.notified() => return Ok(()),
                why = self.node.fails() => return Err(why),
                task = tasks.recv() => match task {
                    Some(task) => self.env.spawn("admin request", task(self.clone())),
                    None => return Ok(()),
                },
            }
        }
    }

    /// Unmounts, has the clients of `others` make everything durable, and closes the node. The programs of
    /// those clients wait, and continue after the next start. With `able` false, for a store that cannot
    /// continue, the clients are not asked.
    pub async fn shut_down(&self, others: &Server, able: bool) -> Result<(), String> {
        let work = async {
            let one = timeout(&self.env, MOUNTING_PATIENCE, self.mounting.lock()).await;
            if one.is_none() {
                tracing::warn!("the stop goes on although somebody is still mounting or unmounting");
            }
            let (removed, durable) = self.take_mount_off(true).await;
            if let Err(error) = removed {
                tracing::warn!(%error, "the mount cannot be removed");
            }
            let synced = self.client.close().await.map_err(|failure| failure.to_string());
            let called = match able {
                true => self.call_back(others).await,
                false => Ok(()),
            };
            others.stop();
            let closed = self.node.close().await.map_err(|error| error.to_string());
            durable.map_err(|error| error.to_string()).and(synced).and(called).and(closed)
        };
        let result = tokio::select! {
            result = work => result,
            why = self.node.stuck(STUCK_PATIENCE) => {
                others.stop();
                self.node.abandon();
                Err(format!("{why}; what was synced is safe"))
            }
        };
        match &result {
            Ok(()) => self.event(Severity::Info, EventKind::Stopped, "stopped; everything is durable"),
            Err(why) => self.event(
                Severity::Error,
                EventKind::StopFailed,
                format!("stopped; not everything could be made durable: {why}"),
            ),
        }
        if !self.node.events().wait_kept(EVENTS_PATIENCE).await {
            tracing::warn!("the last events could not be written");
        }
        result
    }
}
