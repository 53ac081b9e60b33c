//! `mount`, a separate process between the kernel and an instance; and `umount`.
//!
//! The process finds the instance through the socket in its folder or over TCP, again for each connection. It
//! ends its session when it exits; if it is killed, the session ends after its lease.

use crate::args::Mount as Options;
use crate::folder::DEFAULT;
use crate::remote::Remote as Rest;
use crate::show::{note, print, say};
use anyhow::{Context, Result, anyhow, bail};
use penstock_api::{check_mount_point, on_signals, unmount_stale};
use penstock_base::env::timeout;
use penstock_base::num::to_usize;
use penstock_base::{Env, LocalBoxFuture};
use penstock_client::Client;
use penstock_fabric::greeting::TOKEN_BYTES;
use penstock_fabric::{Credential, Dial, Dialled, Remote, Token, dial, dial_local};
use penstock_fuse::{
    Answer, FuseLatency, KIND, Mount, MountOptions, Server, kind_at, mount_point, probe, process_behind, sync,
};
use penstock_node::StatusReport;
use penstock_worker::{Worker, block_on};
use rustix::fs::OFlags;
use serde_json::json;
use std::fs::{File, OpenOptions};
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Name of an instance's only file system.
const FS: &str = "main";
/// Time limit of `--detach` for the mount to appear, and of `umount` for its process to end the session.
const PATIENCE: Duration = Duration::from_secs(60);
/// A longer log, in bytes, is truncated by the next mount.
const LOG_BYTES: u64 = 1 << 20;
/// Time that the process waits at its end until the instance has made everything durable.
const LAST_WORD: Duration = Duration::from_secs(20);

/// The way to reach the instance.
enum Way {
    /// Through the socket in the folder.
    Folder(PathBuf),
    /// Over TCP. Both ends prove that they know the token.
    Address(SocketAddr, Token),
}

impl Way {
    fn find(options: &Options, dir: Option<PathBuf>, api: bool) -> Result<Self> {
        if let (Some(address), Some(file)) = (options.tcp, &options.token_file) {
            let text = std::fs::read_to_string(file)
                .with_context(|| format!("the token in {} cannot be read", file.display()))?;
            let token = Token::new(&text).with_context(|| {
                format!("{} holds no token: one has {TOKEN_BYTES} characters", file.display())
            })?;
            return Ok(Self::Address(address, token));
        }
        if api {
            bail!("`mount` finds the instance by --dir, or by --tcp with --token-file, not by --api");
        }
        Ok(Self::Folder(std::path::absolute(dir.unwrap_or_else(|| DEFAULT.into()))?))
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Folder(dir) => write!(f, "the instance of {}", dir.display()),
            Self::Address(address, _) => write!(f, "the instance at {address}"),
        }
    }
}

impl Dial for Way {
    fn dial(&self) -> LocalBoxFuture<'_, Dialled> {
        Box::pin(async {
            match self {
                Self::Folder(dir) => Ok((dial_local(dir).await?, Credential::Local)),
                Self::Address(address, token) => {
                    Ok((dial(*address).await?, Credential::Token(token.clone(), *address)))
                }
            }
        })
    }
}

/// Returns a mount point under the name that the kernel gives it.
pub fn place(path: &Path) -> Result<PathBuf> {
    mount_point(path).with_context(|| format!("the mount point {} cannot be used", path.display()))
}

/// Mounts, and returns when the file system is unmounted.
pub fn mount(options: Options, dir: Option<PathBuf>, api: Option<String>) -> Result<ExitCode> {
    let (fs, path) = match &options.words[..] {
        [fs, path] => (fs.to_str().unwrap_or_default(), path),
        words => (FS, &words[0]),
    };
    if fs != FS {
        bail!("no file system {fs}; `penstock fs list` shows them");
    }
    let path = place(path)?;
    if options.detach {
        return detach(&options, dir, api.is_some(), &path);
    }
    if options.detached {
        rustix::process::setsid().context("setsid failed")?;
    }
    let way = Way::find(&options, dir, api.is_some())?;
    check_mount_point(&path)?;
    let env = Worker::env()?;
    let options = MountOptions { ends: true, ..options.mount_as.options() };
    block_on(run(&env, Rc::new(way), &path, &options)).map_err(|error| anyhow!("no worker: {error}"))??;
    Ok(ExitCode::SUCCESS)
}

async fn run(env: &Env, way: Rc<Way>, path: &Path, options: &MountOptions) -> Result<()> {
    let transport = Remote::connect(env, way.clone()).await.map_err(|failure| anyhow!("{way}: {failure}"))?;
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = format!("process {} on {host}", std::process::id());
    let at = path.display().to_string();
    let client = Client::connect_to_mount(env, transport.clone(), &name, &at).await?;
    let mounted = serve(env, &client, path, options).await;
    let closed = timeout(env, LAST_WORD, client.close()).await;
    transport.close();
    mounted?;
    match closed {
        Some(result) => result.context("not everything could be made durable")?,
        None => bail!(
            "the instance did not answer within {} s: what was not synced may be lost",
            LAST_WORD.as_secs()
        ),
    }
    note!("unmounted; everything is durable");
    Ok(())
}

/// Serves the kernel until the file system is unmounted, or a signal arrives.
async fn serve(env: &Env, client: &Rc<Client>, path: &Path, options: &MountOptions) -> Result<()> {
    let (signal, mut signals) = tokio::sync::mpsc::unbounded_channel();
    on_signals(move || {
        // Fails if the process is ending already.
        let _ = signal.send(());
    })?;
    let mut mount = Mount::start(env, client, path, options, &Rc::new(FuseLatency::default()), || {}).await?;
    say!("mounted at {}", path.display());
    let signalled = tokio::select! {
        () = mount.ended() => false,
        _ = signals.recv() => true,
    };
    if signalled {
        mount.stop(env, true).await.0?;
    }
    Ok(())
}

/// Returns the name of a background mount's log. Each mount point has its own.
fn log_name(path: &Path) -> String {
    let at = path.display().to_string().trim_matches('/').replace('/', "-");
    // A file name has at most 255 bytes. Mount points differ at their ends, so the beginning is cut off.
    let skip =
        at.char_indices().map(|(skip, _)| skip).find(|skip| at.len() - skip <= 200).unwrap_or_default();
    format!("mount-{}.log", &at[skip..])
}

/// Starts the same command in the background and returns when it has mounted.
fn detach(options: &Options, dir: Option<PathBuf>, api: bool, path: &Path) -> Result<ExitCode> {
    check_mount_point(path)?;
    // A mount that a killed process left remains until the new one replaces it.
    let is_served = || probe(path).is_ok_and(|found| found == Some(Answer::Serves));
    let log_path = match &options.log {
        Some(file) => file.clone(),
        None if api || options.tcp.is_some() => log_name(path).into(),
        None => dir.unwrap_or_else(|| DEFAULT.into()).join(log_name(path)),
    };
    let log = open_log(&log_path)?;
    let log_start = log.metadata()?.len();
    let mut command = Command::new(std::env::current_exe()?);
    let words = std::env::args_os().skip(1).filter(|word| word != "--detach");
    // Drops `--log` as well: it is valid with `--detach` only.
    let mut skip = false;
    let words = words.filter(|word| {
        let is_value = std::mem::replace(&mut skip, word == "--log");
        !is_value && !skip && !word.to_string_lossy().starts_with("--log=")
    });
    command.args(words).arg("--detached");
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let mut child = command.spawn().context("the background process does not start")?;
    let start = Instant::now();
    while !is_served() {
        if child.try_wait()?.is_some() {
            let said = std::fs::read(&log_path)?;
            eprint!("{}", String::from_utf8_lossy(said.get(to_usize(log_start)..).unwrap_or_default()));
            return Ok(ExitCode::FAILURE);
        }
        if start.elapsed() > PATIENCE {
            bail!("not mounted after {} s; see {}", PATIENCE.as_secs(), log_path.display());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    say!("mounted at {}", path.display());
    say!("It runs in the background as process {}; its log is {}", child.id(), log_path.display());
    Ok(ExitCode::SUCCESS)
}

/// Opens the log of a background mount for appending. Refuses anything but a regular file of this user,
/// because another user can guess the name.
fn open_log(path: &Path) -> Result<File> {
    let cannot = || format!("{} cannot be written", path.display());
    let mut options = OpenOptions::new();
    options.append(true).create(true).mode(0o600);
    // Opening a FIFO without a reader would block.
    options.custom_flags((OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed());
    let log = options.open(path).with_context(cannot)?;
    let found = log.metadata().with_context(cannot)?;
    if !found.is_file() || found.uid() != rustix::process::geteuid().as_raw() {
        bail!("{} is no file of this user's; name another one with --log", path.display());
    }
    if found.len() > LOG_BYTES {
        log.set_len(0).with_context(cannot)?;
    }
    Ok(log)
}

/// Unmounts the file system at `path`, mounted by the instance or by a separate process.
pub fn umount(path: &Path, dir: Option<&PathBuf>, api: Option<&String>, json: bool) -> Result<ExitCode> {
    let path = place(path)?;
    // The instance need not run: a mount can be removed without it.
    let rest = Rest::find(dir, api).ok();
    let named = path.display().to_string();
    let own = rest.as_ref().and_then(|rest| rest.get::<Vec<String>>("/v1/mounts").ok());
    if let (Some(rest), true) = (&rest, own.iter().flatten().any(|mounted| *mounted == named)) {
        rest.delete::<Vec<String>>("/v1/mounts")?;
        return done(json, &named, Some(false));
    }
    match kind_at(&path).with_context(|| format!("{named} cannot be looked at"))?.as_deref() {
        Some(KIND) => {}
        Some(other) => bail!("{named} shows a file system of kind {other}, not of Penstock: it stays"),
        None => bail!("no file system of Penstock is mounted at {named}"),
    }
    match probe(&path)? {
        Some(Answer::Stale) => {
            unmount_stale(&path)?;
            return done(json, &named, None);
        }
        // Unmounting could wait for the instance as well.
        Some(Answer::Silent) => bail!(waits_for_instance(&path)?),
        // Somebody may have unmounted it meanwhile.
        Some(Answer::Serves) | None => {}
    }
    let loses = make_durable(&path)?;
    let server = Server::behind(&path)?;
    penstock_fuse::unmount(&path).map_err(|error| anyhow!("{named} is in use: {error}"))?;
    if server.is_some_and(|server| !server.ends_within(PATIENCE).unwrap_or(false)) {
        bail!(
            "{named} is unmounted; its process did not end within {} s: another mount name space has it too, or \
             the instance does not answer",
            PATIENCE.as_secs()
        );
    }
    done(json, &named, loses)
}

/// Makes everything durable that was written through the mount at `path`, and fails if that cannot be: the
/// mount is the only one that has it. Its process syncs once more at its end, but nobody would learn what
/// came of that. Returns true if something was lost before, and `None` if that is unknown.
fn make_durable(path: &Path) -> Result<Option<bool>> {
    let named = path.display();
    let is_late = || {
        format!(
            "{named} stays mounted: what was written is not durable after {} s; `penstock status` says what \
             the instance waits for",
            PATIENCE.as_secs()
        )
    };
    let failure = match sync(path, PATIENCE) {
        Ok(true) => return Ok(Some(false)),
        Ok(false) => bail!(is_late()),
        Err(error) => error,
    };
    match failure.kind() {
        // The session has ended, and what was not synced went with it.
        ErrorKind::StaleNetworkFileHandle => {
            note!("the session of the mount had ended: what was not synced by then is lost");
            return Ok(Some(true));
        }
        // A mount of another user, which the kernel shows to nobody else, or a root that nobody may read.
        ErrorKind::PermissionDenied => {
            note!("the mount cannot be synced from here; its log says whether everything is durable");
            return Ok(None);
        }
        _ => {}
    }
    // A loss is reported once, with the error that a sync which fails for a moment has as well.
    match sync(path, PATIENCE) {
        Ok(true) => {
            note!(
                "the first sync failed ({failure}), the second succeeded: a restart of the instance may have lost \
                 changes that were not synced; then the log of the mount lists them"
            );
            Ok(None)
        }
        Ok(false) => bail!(is_late()),
        Err(error) => bail!(
            "{named} stays mounted: what was written cannot be made durable ({error}); `penstock status` and \
             the log of the mount say why"
        ),
    }
}

/// Says what ends a mount whose process does not answer.
fn waits_for_instance(path: &Path) -> Result<String> {
    let (process, kill) = match process_behind(path)? {
        Some(pid) => (format!("process {pid}"), format!("`kill {pid}`")),
        None => ("its process".to_owned(), "a signal to that process".to_owned()),
    };
    Ok(format!(
        "{} stays mounted: {process} does not answer, because its instance does not. Start the instance and \
         nothing is lost; {kill} unmounts without it, and what was not synced is lost",
        path.display()
    ))
}

/// Unmounts the only mount of an instance.
pub fn umount_only(rest: &Rest, json: bool) -> Result<ExitCode> {
    let status: StatusReport = rest.get("/v1/status")?;
    let others = status.sessions.iter().find(|session| session.is_separate_mount());
    if let Some(other) = others {
        bail!("it is mounted by {}: name the place, `penstock umount {}`", other.client, other.mount);
    }
    let Some(mounted) = status.mounts.first() else { bail!("it is not mounted") };
    rest.delete::<Vec<String>>("/v1/mounts")?;
    done(json, mounted, Some(false))
}

/// `loses` says whether changes were lost, `None` if that is unknown.
fn done(json: bool, path: &str, loses: Option<bool>) -> Result<ExitCode> {
    print(json, &json!({ "unmounted": path, "lost": loses }), |_| say!("unmounted"))
}

#[cfg(test)]
mod tests {
    use super::open_log;
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    /// Regression: opening a FIFO under the log's name blocked forever, without a reader.
    #[test]
    fn a_log_is_no_fifo() {
        let path = std::env::temp_dir().join(format!("penstock-log-{}", std::process::id()));
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        open_log(&path).unwrap_err();
        std::fs::remove_file(&path).unwrap();
        assert!(open_log(&path).unwrap().metadata().unwrap().is_file());
        std::fs::remove_file(&path).unwrap();
    }
}
