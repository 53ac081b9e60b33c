//! Asks the process behind a mount within a time limit: whether it answers, and to make everything durable.
//!
//! A request that waits in that process, because its instance is down, ends only when the process answers it.
//! Neither a signal nor the end of the asking process ends it earlier: the asking process would remain, and
//! the shell that waits for it. So a child process asks, and is left behind if it gets no answer.

use crate::guard::{ENDS, GUARD, stat_of};
use crate::mounts::{KIND, MountEntry, is_mounted, shown};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// The argument before the mount point, for a program that then exits with [`probe_directly`].
pub const PROBE: &str = "mount-probe";
/// The argument before the mount point, for a program that then exits with [`sync_directly`].
pub const SYNC: &str = "mount-sync";
/// Exit code for an error without a number.
const EIO: u8 = 5;
/// Exit code of a child that found the mount stale.
const STALE: u8 = 3;
/// Time limit for an answer.
const LIMIT: Duration = Duration::from_secs(5);

/// The answer of the process behind a mount.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// It answers.
    Serves,
    /// It was killed, and its mount is still there.
    Stale,
    /// It does not answer within 5 seconds: it waits for its instance, or is stopped.
    Silent,
}

/// Asks the process behind the mount at `path`, through a child process. None if no file system of Penstock
/// is mounted there. The program must pass its argument after [`PROBE`] to [`probe_directly`].
pub fn probe(path: &Path) -> io::Result<Option<Answer>> {
    if shown(path)?.is_none_or(|shown| shown.kind != KIND) {
        return Ok(None);
    }
    Ok(Some(match wait(start(PROBE, path)?, LIMIT)? {
        None => Answer::Silent,
        Some(code) if code == STALE.into() => Answer::Stale,
        Some(_) => Answer::Serves,
    }))
}

/// Makes everything durable that was written through the mount at `path`, through a child process. Returns
/// false if that takes longer than `limit`. The program must pass its argument after [`SYNC`] to
/// [`sync_directly`].
pub fn sync(path: &Path, limit: Duration) -> io::Result<bool> {
    match wait(start(SYNC, path)?, limit)? {
        None => Ok(false),
        Some(0) => Ok(true),
        Some(errno) => Err(io::Error::from_raw_os_error(errno)),
    }
}

fn start(argument: &str, path: &Path) -> io::Result<Child> {
    assert!(path.is_absolute(), "the child has another working directory");
    let mut command = Command::new("/proc/self/exe");
    command.arg0("penstock").arg(argument).arg(path).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn()
}

/// Returns the exit code of a child; none if it has not ended after `limit`.
fn wait(mut child: Child, limit: Duration) -> io::Result<Option<i32>> {
    let process = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
    if !ends_within(&process, limit)? {
        child.kill()?;
        reap_later(child)?;
        return Ok(None);
    }
    let killed = || io::Error::other("the process that asks was killed");
    child.wait()?.code().ok_or_else(killed).map(Some)
}

/// Waits for the end of a process. Returns false if it has not ended after `limit`.
fn ends_within(process: &OwnedFd, limit: Duration) -> io::Result<bool> {
    let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
    let mut ended = [PollFd::new(process, PollFlags::IN)];
    Ok(retry_on_intr(|| poll(&mut ended, Some(&limit)))? > 0)
}

/// Reaps a child that ends when the mount's process answers, if this process lives for so long.
#[allow(clippy::disallowed_methods, reason = "the thread waits for a process and touches nothing else")]
fn reap_later(mut child: Child) -> io::Result<()> {
    std::thread::Builder::new().name("probe".to_owned()).spawn(move || child.wait()).map(drop)
}

/// Asks on this thread, which may block for as long as the mount's process lives. Returns the exit code for
/// [`probe`].
pub fn probe_directly(path: &Path) -> u8 {
    if look(path).is_err_and(|error| is_gone(&error)) { STALE } else { 0 }
}

/// Syncs the mount at `path` on this thread, which may block for as long as the mount's process lives.
/// Returns the exit code for [`sync`], the number of the error.
pub fn sync_directly(path: &Path) -> u8 {
    let synced = std::fs::File::open(path).and_then(|root| root.sync_all());
    let errno = |error: io::Error| error.raw_os_error().and_then(|errno| u8::try_from(errno).ok());
    synced.map_or_else(|error| errno(error).unwrap_or(EIO), |()| 0)
}

/// Returns the process that serves the mount at `path`. None if nothing is mounted there, or if its guard,
/// which knows the process, is not found.
pub fn process_behind(path: &Path) -> io::Result<Option<u32>> {
    Ok(server_of(path)?.map(|(_, process, _)| process))
}

/// Returns the connection of the mount at `path`, the process that serves it, and true if that ends with it.
fn server_of(path: &Path) -> io::Result<Option<(u32, u32, bool)>> {
    let Some(MountEntry { connection, owner: Some(owner), .. }) = shown(path)? else { return Ok(None) };
    Ok(process_of(connection, owner)?.map(|(process, ends)| (connection, process, ends)))
}

/// The process that serves a mount, as it is before the mount is unmounted.
pub struct Server {
    connection: u32,
    /// None if it has ended.
    process: Option<OwnedFd>,
    /// It ends when the file system is unmounted; the process of an instance goes on.
    ends: bool,
}

impl Server {
    /// Finds the process behind the mount at `path`, as [`process_behind`] does.
    pub fn behind(path: &Path) -> io::Result<Option<Self>> {
        let Some((connection, process, ends)) = server_of(path)? else { return Ok(None) };
        let pid = Pid::from_raw(process.cast_signed()).ok_or(Errno::SRCH);
        let process = match pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty())) {
            Ok(process) => Some(process),
            Err(Errno::SRCH) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Some(Self { connection, process, ends }))
    }

    /// Waits until the process has ended, unless it rightly goes on: it is an instance, or another place
    /// shows the mount. Returns false if it has not ended after `limit`.
    pub fn ends_within(&self, limit: Duration) -> io::Result<bool> {
        match &self.process {
            Some(process) if self.ends && !is_mounted(self.connection)? => ends_within(process, limit),
            _ => Ok(true),
        }
    }
}

/// Returns the process that serves a connection of a user, the parent of the connection's guard, and true if
/// it ends with the mount.
fn process_of(connection: u32, owner: u32) -> io::Result<Option<(u32, bool)>> {
    let connection = connection.to_string();
    // The kernel gives the number of a connection again while the guard of an earlier one may still be there.
    let mut newest: Option<(u64, (u32, bool))> = None;
    for entry in std::fs::read_dir("/proc")? {
        let place = entry?.path();
        // A process may end meanwhile.
        let Ok(words) = std::fs::read(place.join("cmdline")) else { continue };
        let words: Vec<&[u8]> = words.split(|byte| *byte == 0).collect();
        // The guard's arguments: its connection, and the thread PID/task/TID that serves it. Anybody can
        // start a process with such arguments, and let it become a child of process 1. But it runs as its
        // user, and so must the process that it names.
        if let [_, name, number, thread, ref rest @ ..] = words[..]
            && (name, number) == (GUARD.as_bytes(), connection.as_bytes())
            && let Some(pid) =
                std::str::from_utf8(thread).ok().and_then(|it| it.split_once('/')?.0.parse().ok())
            && let Some((parent, began)) = parent_and_start_of(&place)
            && parent == pid
            && [&place, &Path::new("/proc").join(pid.to_string())].into_iter().all(|it| runs_as(it, owner))
            && newest.is_none_or(|(newest, _)| newest <= began)
        {
            newest = Some((began, (pid, rest.contains(&ENDS.as_bytes()))));
        }
    }
    Ok(newest.map(|(_, process)| process))
}

/// Returns the parent of a process, a path below /proc, and the time at which it began, in ticks since the
/// machine started; none if it has ended.
fn parent_and_start_of(process: &Path) -> Option<(u32, u64)> {
    let stat = stat_of(process).ok()?;
    let number = |at| stat.split_whitespace().nth(at);
    Some((number(1)?.parse().ok()?, number(19)?.parse().ok()?))
}

/// True if a process, a path below /proc, runs as this user.
fn runs_as(process: &Path, user: u32) -> bool {
    std::fs::metadata(process).is_ok_and(|status| status.uid() == user)
}

/// The kinds of directory entry at a mount point.
pub(crate) enum Found {
    Empty,
    Full,
    NoDirectory,
}

/// Lists the mount point, because a listing reaches the process that serves a mount. The kernel may answer
/// attributes from its cache, and opens a directory by itself.
pub(crate) fn look(path: &Path) -> io::Result<Found> {
    if !std::fs::metadata(path)?.is_dir() {
        return Ok(Found::NoDirectory);
    }
    match std::fs::read_dir(path)?.next() {
        None => Ok(Found::Empty),
        Some(Ok(_)) => Ok(Found::Full),
        Some(Err(error)) => Err(error),
    }
}

/// True if the process behind a mount is dead, or died during the request.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotConnected | io::ErrorKind::ConnectionAborted)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Anybody may start a process with the arguments of a guard, and would name the process that an
    /// administrator is told to kill.
    #[test]
    fn a_process_that_only_looks_like_a_guard_names_no_process() {
        // No mount has this connection, and no other run of this test.
        let connection = u32::MAX - std::process::id();
        let dir = std::env::temp_dir().join(format!("penstock-probe-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join(GUARD), "read x").unwrap();
        let me = rustix::process::geteuid().as_raw();
        let mut named = Vec::new();
        for pid in [1, std::process::id()] {
            let mut command = Command::new("/bin/sh");
            command.current_dir(&dir).args([GUARD, &connection.to_string(), &format!("{pid}/task/1")]);
            let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
            // The kernel sets the arguments a moment after the parent goes on.
            let arguments = format!("/proc/{}/cmdline", child.id());
            let has_them = || std::fs::read(&arguments).is_ok_and(|words| !words.is_empty());
            assert!((0..10_000_000).any(|_| has_them()));
            named.push([me, me + 1].map(|owner| process_of(connection, owner).unwrap().map(|(pid, _)| pid)));
            child.kill().unwrap();
            child.wait().unwrap();
        }
        std::fs::remove_dir_all(&dir).unwrap();
        let own = Some(std::process::id());
        assert_eq!(named, [[None; 2], [own, None]], "only a child of the same user may name a process");
    }

    /// Regression: a child that got no answer stayed as a zombie of a process that lives long.
    #[test]
    fn a_child_that_was_left_behind_is_reaped() {
        let child = Command::new("/bin/sleep").arg("100").spawn().unwrap();
        let stat = format!("/proc/{}/stat", child.id());
        assert_eq!(wait(child, LIMIT).unwrap(), None);
        let is_reaped = || std::fs::metadata(&stat).is_err();
        assert!((0..10_000_000).any(|_| is_reaped()));
    }
}
