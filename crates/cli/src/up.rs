//! `up`: starts the folder, store, node, API and mount, and stops them in order.

use crate::args::Up;
use crate::folder::{ADMIN_TOKEN, DATA_TOKEN, ENDING, Folder, LOGS, METRICS_TOKEN, Run, named};
use crate::given::Given;
use crate::machine;
use crate::show::{note, say};
use crate::wanted::{self, Wanted, level, why};
use anyhow::{Context, Result, anyhow, bail};
use penstock_api::{Instance, Server, Tokens, check_mount_point};
use penstock_base::{Env, StoreId};
use penstock_client::Client;
use penstock_drive::FileDrive;
use penstock_fabric::{Door, Listener, LocalListener, Token, local};
use penstock_kv::Mode;
use penstock_node::{
    Arrangement, Backing, Candidate, DataLayout, DriveSet, Event, EventFiles, EventKind, FileBacking,
    FileOwnership, ForOthers, Holding, InProcess, KeptFile, Lacking, Level, Node, POOLS_FILE, Restore,
    SCRUBS_FILE, Severity, Start, StoreFile, create_store, find_drives, look_for_store,
};
use penstock_worker::{Worker, block_on};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use sd_notify::NotifyState;
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Number of threads that read the key-value store.
const KV_READERS: usize = 2;
/// Time limit of `--detach` for the store to become ready.
const READY: Duration = Duration::from_secs(120);
/// Pause after accepting a client failed.
const LISTEN_PAUSE: Duration = Duration::from_secs(1);
/// Pause after each accepted client while many have not authenticated yet.
const CROWD_PAUSE: Duration = Duration::from_millis(1);

/// Starts an instance and returns when it has stopped.
pub fn up(options: Up, dir: Option<PathBuf>, json: bool) -> Result<ExitCode> {
    if options.dry_run {
        return wanted::dry_run(&options, json);
    }
    let dir = named(options.folder.clone(), dir)?;
    if options.mount.is_none() && (options.mount_as.read_only || options.mount_as.source.is_some()) {
        bail!("--read-only and --source are options of a mount: give --mount too");
    }
    if options.detach {
        return detach(&dir);
    }
    if options.detached {
        rustix::process::setsid().context("setsid failed")?;
    }
    let folder = Folder::lock(&dir)?;
    raise_descriptors();
    let server = Server::bind(&folder.path, options.port)?;
    if let Some(mount) = &options.mount {
        check_mount_point(mount)?;
    }
    let env = Worker::env()?;
    let ran = block_on(run(&env, &folder, server, &options)).map_err(|error| anyhow!("no worker: {error}"));
    for name in [local::API, local::DATA] {
        local::remove(&folder.path, name);
    }
    ran??;
    Ok(ExitCode::SUCCESS)
}

async fn run(env: &Env, folder: &Folder, server: Server, options: &Up) -> Result<()> {
    let doors = Doors::open(folder, options)?;
    let mut kept = EventFiles::open(&folder.path).map_err(|why| anyhow!(why))?;
    let node = match open_or_create(env, folder, options).await {
        Ok(node) => node,
        Err(error) => {
            let event = Event {
                seq: kept.next_seq,
                time_ns: env.wall_ns(),
                severity: Severity::Error,
                kind: EventKind::StartFailed,
                object: "node".into(),
                text: format!("not started: {error:#}"),
            };
            if let Err(error) = kept.files.append(&[event]) {
                tracing::warn!(%error, "the event start_failed cannot be written");
            }
            return Err(error);
        }
    };
    let version = env!("CARGO_PKG_VERSION");
    let text = format!("version {version} started as process {}", std::process::id());
    node.events().add(Severity::Info, EventKind::Started, "node", text);
    node.keep_events(kept);
    let scrub_period = Duration::from_secs(u64::from(options.scrub_days) * 24 * 3600);
    let keeper = KeptFile::new(&folder.path, SCRUBS_FILE);
    node.schedule_scrubs((!scrub_period.is_zero()).then_some(scrub_period), keeper);
    node.keep_pool_settings(KeptFile::new(&folder.path, POOLS_FILE));
    if options.map_copy_hours > 0 {
        node.schedule_map_copies(Duration::from_secs(u64::from(options.map_copy_hours) * 3600));
    }
    node.set_lease(Duration::from_secs(options.lease.into()));
    let client =
        Client::connect(env, InProcess::new(node.clone()), &format!("process {}", std::process::id()))
            .await?;
    let (api_url, tcp_address) = (server.url(), doors.address().map(|address| address.to_string()));
    let others = ForOthers::new(node.clone());
    let clients = penstock_fabric::Server::new(env, others, node.store(), doors.token.clone());
    let instance = Instance::new(env, node, client, &folder.path, api_url.clone(), tcp_address.clone());
    let (worker, mut tasks) = tokio::sync::mpsc::unbounded_channel();
    let signals = worker.clone();
    server.serve(doors.rest.clone(), worker, move || {
        let stop: penstock_api::Task = Box::new(|instance| Box::pin(async move { instance.stop() }));
        // An instance that is already stopping accepts no more tasks.
        let _ = signals.send(stop);
    })?;
    let mounted = match &options.mount {
        Some(path) => instance
            .mount(&crate::mount::place(path)?, &options.mount_as.options())
            .await
            .map_err(anyhow::Error::from),
        None => Ok(()),
    };
    let mut ran = Ok(());
    if mounted.is_ok() {
        let mounts = instance.status().mounts;
        doors.serve(env, &clients);
        folder.write_run(&Run { pid: std::process::id(), api_url, tcp_address, mounts, stop: None })?;
        greet(&instance, folder);
        tell_manager(&[
            NotifyState::Ready,
            NotifyState::Status(&format!("health {}", instance.status().health)),
        ]);
        ran = instance.run(&mut tasks).await;
        tell_manager(&[NotifyState::Stopping]);
        // The terminal may be gone by now, which `note!` tolerates.
        note!("stopping");
    }
    let closed = instance.shut_down(&clients, ran.is_ok()).await;
    folder.end_run(closed.as_ref().map(|_| ()).map_err(String::as_str));
    let closed = closed.map_err(|why| anyhow!("not everything could be made durable: {why}"));
    ran.map_err(|why| anyhow!("the store cannot go on: {why}; start it again"))?;
    mounted.and(closed)?;
    note!("stopped; everything is durable");
    Ok(())
}

/// Listeners for clients in other processes, and the tokens of those over TCP.
struct Doors {
    local: LocalListener,
    tcp: Option<Listener>,
    token: Option<Token>,
    rest: Option<Tokens>,
}

impl Doors {
    fn open(folder: &Folder, options: &Up) -> Result<Self> {
        let tcp = options.tcp.map(Listener::bind).transpose().map_err(|why| anyhow!(why))?;
        let token = match &tcp {
            Some(_) => Token::new(&folder.token(DATA_TOKEN)?),
            None => None,
        };
        let rest = match options.port {
            Some(_) => Some(Tokens {
                administration: folder.token(ADMIN_TOKEN)?,
                metrics: folder.token(METRICS_TOKEN)?,
            }),
            None => None,
        };
        let local = LocalListener::bind(&folder.path).map_err(|why| anyhow!(why))?;
        Ok(Self { local, tcp, token, rest })
    }

    fn address(&self) -> Option<SocketAddr> {
        self.tcp.as_ref().map(Listener::address)
    }

    /// Starts accepting clients.
    fn serve(self, env: &Env, clients: &Rc<penstock_fabric::Server>) {
        let (local, to) = (self.local, clients.clone());
        let accept = async move || {
            local.accept().await.map(|(link, peer)| to.accept(link, peer.to_string(), Door::Local))
        };
        env.spawn("clients", Box::pin(listen(env.clone(), clients.clone(), accept)));
        let Some(tcp) = self.tcp else { return };
        let to = clients.clone();
        let accept = async move || {
            let door = Door::Token(tcp.address());
            tcp.accept().await.map(|(link, from)| to.accept(link, from.to_string(), door))
        };
        env.spawn("clients over TCP", Box::pin(listen(env.clone(), clients.clone(), accept)));
    }
}

/// Accepts clients, one after the other.
async fn listen(env: Env, clients: Rc<penstock_fabric::Server>, accept: impl AsyncFn() -> io::Result<()>) {
    loop {
        if let Err(error) = accept().await {
            // An error such as too many open files loses no connection: those in the queue are accepted
            // later.
            tracing::warn!(%error, "a client could not be let in");
            env.sleep(LISTEN_PAUSE).await;
        }
        if clients.is_crowded() {
            // Gives the clients at hand time to authenticate before newer ones displace them.
            env.sleep(CROWD_PAUSE).await;
        }
    }
}

/// Raises the limit of open files to the hard limit, because the limit in a shell is often 1024.
pub fn raise_descriptors() {
    let found = getrlimit(Resource::Nofile);
    let most = Rlimit { current: found.maximum, ..found };
    if let Err(error) = setrlimit(Resource::Nofile, most) {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
}

/// Notifies the service manager that started this process, if one did (sd_notify(3)).
fn tell_manager(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(false, state) {
        tracing::warn!(%error, "the service manager cannot be told");
    }
}

fn greet(instance: &Instance, folder: &Folder) {
    let status = instance.status();
    let dir = folder.path.display();
    say!("Penstock {} is up: {}", status.version, status.health);
    status.reasons.iter().for_each(|reason| say!("  ! {reason}"));
    for array in &status.arrays {
        say!("  array   {:<5} {:<5} {}", array.name, array.code, array.state);
    }
    say!("  space   {} free", crate::show::size(status.free_bytes));
    say!("  folder  {dir}");
    if let Some(url) = &status.api_url {
        say!("  api     {url}  (token in {dir}/{ADMIN_TOKEN})");
    }
    if let Some(address) = &status.tcp_address {
        say!("  tcp     {address}  (token in {dir}/{DATA_TOKEN})");
    }
    let program = std::env::args().next().unwrap_or_else(|| "penstock".into());
    match status.mounts.first() {
        Some(mount) => {
            say!("  mount   {mount}");
            say!("Try it:   cp -r /usr/share/doc {mount}/ && ls {mount}");
        }
        None => say!("Try it:   {program} --dir {dir} mount DIR"),
    }
    say!("See it:   {program} --dir {dir} status");
    say!("Stop it:  Ctrl-C here, or {program} down {dir}");
}

/// Returns paths at which drives of the store may be: their last known places, and the files in the folder's
/// `drives`.
fn candidate_paths(folder: &Folder, file: Option<&StoreFile>) -> Vec<String> {
    let mut paths: BTreeSet<String> =
        file.map(|file| file.drives.values().cloned().collect()).unwrap_or_default();
    if let Ok(entries) = std::fs::read_dir(folder.path.join("drives")) {
        paths.extend(entries.flatten().map(|entry| entry.path().display().to_string()));
    }
    paths.into_iter().filter(|path| !path.is_empty()).collect()
}

/// Waits while a killed instance still finishes its I/O, because its locked drives would count as missing.
/// After [`ENDING`], another program holds the lock, and the drives are reported as in use.
pub fn wait_for_locks(paths: &[String]) {
    let start = Instant::now();
    while start.elapsed() < ENDING && paths.iter().any(|path| FileDrive::is_locked(Path::new(path))) {
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Drives that may be those of a store.
pub struct Found {
    pub paths: Vec<String>,
    store: Option<StoreId>,
    file: Option<StoreFile>,
    /// They were named, and belong to a store of which the folder has no record.
    is_found_on_given: bool,
}

impl Found {
    /// Those that the folder knows, with its record of the store.
    pub fn of(folder: &Folder, file: Option<StoreFile>) -> Self {
        let paths = candidate_paths(folder, file.as_ref());
        Self { paths, store: file.as_ref().and_then(StoreFile::store_id), file, is_found_on_given: false }
    }

    /// Those that were named too: a store that is there already may have moved to them.
    pub fn add_given(&mut self, given: Option<&Given>) {
        let given = given.into_iter().flat_map(Given::paths).filter(|path| !self.paths.contains(path));
        let given: Vec<String> = given.cloned().collect();
        self.paths.extend(given);
    }

    /// The folder has no record of a store: all drives that are found must be of one.
    pub fn refuse_several(&mut self) {
        self.is_found_on_given = self.file.is_none();
    }
}

/// Opens the store on these drives, or makes its key-value store anew from a copy of the map.
pub async fn open_store(
    env: &Env,
    found: Found,
    ownership: Rc<FileOwnership>,
    (lacking, restore): (Lacking, Option<Restore>),
) -> Result<Rc<Node>> {
    let backing: Rc<dyn Backing> = Rc::new(FileBacking);
    let last_paths = found.file.as_ref().map(StoreFile::paths).unwrap_or_default();
    let candidates = find_drives(env, &*backing, &found.paths).await;
    if found.is_found_on_given {
        refuse_part_of_a_store(&candidates)?;
    }
    let mode = Mode::Threads(KV_READERS);
    let machine_bytes = machine::memory_bytes();
    let how =
        Start { wanted: found.store, last_paths, mode, lacking, machine_bytes, table_memory: None, restore };
    Ok(how.open(env, backing, candidates, ownership).await?)
}

async fn open_or_create(env: &Env, folder: &Folder, options: &Up) -> Result<Rc<Node>> {
    let backing: Rc<dyn Backing> = Rc::new(FileBacking);
    let mut found = Found::of(folder, StoreFile::load(&folder.path).map_err(|why| anyhow!(why))?);
    found.add_given(Given::of(&options.drive)?.as_ref());
    wait_for_locks(&found.paths);
    let ownership = Rc::new(FileOwnership::open(&folder.path).map_err(|why| anyhow!(why))?);
    let holding = match &found.file {
        Some(_) => Holding::Store,
        None => look_for_store(env, &*backing, &found.paths, &*ownership).await,
    };
    found.is_found_on_given = found.file.is_none() && holding == Holding::Store && !options.drive.is_empty();
    if holding != Holding::Store {
        let wanted = Wanted::of(options)?;
        let drives = wanted.drives(folder)?;
        let size = crate::show::size(wanted.spec.drive_bytes);
        note!("making a store of {} drives of {size}", drives.paths().len());
        wanted.unused().into_iter().for_each(|unused| note!("{unused}"));
        let made: StoreId = create_store(env, &*backing, &wanted.spec, &drives, &holding).await?;
        found.paths = drives.paths().to_vec();
        found.store = Some(made);
        note!("{}", wanted.plan.describe());
        note!("this is {}", why(options));
    }
    if let Some(file) = &found.file {
        refuse_other_parameters(file, options)?;
    }
    let lacking = if options.accept_loss { Lacking::Accept } else { Lacking::Refuse };
    let node = open_store(env, found, ownership, (lacking, None)).await?;
    let found = StoreFile::of(node.drive_set());
    refuse_other_parameters(&found, options)?;
    refuse_other_layout(node.drive_set(), options)?;
    found.save(&folder.path).map_err(|why| anyhow!(why))?;
    let dir = folder.path.clone();
    node.keep_places(move |drives| StoreFile::of(drives).save(&dir));
    Ok(node)
}

/// Refuses given drives of which some belong to a store that this folder knows nothing of, and some are
/// blank or belong to another one.
fn refuse_part_of_a_store(candidates: &[Candidate]) -> Result<()> {
    let stores: BTreeSet<StoreId> = candidates.iter().filter_map(Candidate::store).collect();
    if stores.len() > 1 {
        bail!("these drives belong to {} stores: name the drives of one", stores.len());
    }
    let mut blank = candidates.iter().filter(|candidate| candidate.is_blank());
    match blank.find_map(|candidate| candidate.problem()) {
        Some(why) => bail!(
            "some of these drives belong to a store already, and others do not: {why}\nname all drives of that store to start it, or blank ones for a new store"
        ),
        None => Ok(()),
    }
}

fn refuse_other_parameters(file: &StoreFile, options: &Up) -> Result<()> {
    let mut wrong = Vec::new();
    if let Some(Level::Code(k, m)) = level(options)
        && file.code != format!("{k}+{m}")
    {
        wrong.push(format!("its code is {}, not {k}+{m}", file.code));
    } else if let Some(level) = level(options)
        && !matches!(level, Level::Code(..))
    {
        let (k, m) = level.plan(file.drives.len(), options.groups)?.code();
        if file.code != format!("{k}+{m}") {
            wrong.push(format!("its code is {}, and level {level} on its drives is {k}+{m}", file.code));
        }
    }
    if let Some(drives) = options.drives
        && file.drives.len() != drives
    {
        wrong.push(format!("it has {} drives, not {drives}", file.drives.len()));
    }
    if let Some(bytes) = options.drive_size
        && file.drive_bytes != bytes
    {
        wrong.push(format!("its drives have {} bytes, not {bytes}", file.drive_bytes));
    }
    refuse(&wrong)
}

fn refuse(wrong: &[String]) -> Result<()> {
    match wrong.is_empty() {
        true => Ok(()),
        false => bail!(
            "this folder holds a store already: {}\nleave the options out to start it as it is, or name another folder for a new one",
            wrong.join("; ")
        ),
    }
}

/// Refuses options that ask for another layout or other strips than the data array has.
fn refuse_other_layout(drives: &DriveSet, options: &Up) -> Result<()> {
    let Some(made) = DataLayout::of(drives) else { return Ok(()) };
    let mut wrong = Vec::new();
    let (groups, spares) = match made.arrangement {
        Arrangement::Groups(groups) => (groups, 0),
        Arrangement::Declustered { spares } => (0, spares),
    };
    if let Some(wanted) = options.spares
        && wanted != spares
    {
        wrong.push(format!("it has spare space for {spares} drives, not {wanted}"));
    }
    if let Some(wanted) = options.groups
        && wanted != groups
    {
        wrong.push(format!("its layout is {}, not {wanted} groups", made.layout));
    }
    if let Some(wanted) = options.domains
        && wanted != made.domains
    {
        wrong.push(format!("its drives are in {} failure domains, not {wanted}", made.domains));
    }
    if let Some(wanted) = options.targets
        && wanted != made.stacks
    {
        wrong.push(format!("it has {} targets, not {wanted}", made.stacks));
    }
    if let Some(wanted) = options.strip
        && wanted != made.strip_bytes
    {
        wrong.push(format!("its strips have {} bytes, not {wanted}", made.strip_bytes));
    }
    refuse(&wrong)
}

/// Starts the same command in the background and returns when it is ready.
fn detach(dir: &Path) -> Result<ExitCode> {
    // Locks the folder only to report early that it is in use. The child locks it again.
    let folder = Folder::lock(dir)?;
    folder.remove_run();
    let path = folder.path.clone();
    let log_path = path.join(LOGS[0]);
    if log_path.exists() {
        std::fs::rename(&log_path, path.join(LOGS[1]))?;
    }
    let log = std::fs::File::create(&log_path)?;
    drop(folder);
    let mut command = Command::new(std::env::current_exe()?);
    let words = std::env::args_os().skip(1).filter(|word| word != "--detach");
    command.args(words).arg("--detached");
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut child = command.spawn().context("the background process does not start")?;
    let start = Instant::now();
    loop {
        if let Ok(run) = Run::load(&path)
            && run.pid == child.id()
        {
            say!("{}", std::fs::read_to_string(&log_path)?.trim_end().replace("Ctrl-C here, or ", ""));
            say!("It runs in the background as process {}; its log is {}", run.pid, log_path.display());
            return Ok(ExitCode::SUCCESS);
        }
        if let Some(status) = child.try_wait()? {
            eprint!("{}", std::fs::read_to_string(&log_path)?);
            return Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        if start.elapsed() > READY {
            bail!("not ready after {} s; see {}", READY.as_secs(), log_path.display());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}
