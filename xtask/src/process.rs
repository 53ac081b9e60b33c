//! Runs programs, passes on their output line by line, and kills every process that they started.
//!
//! Each program started here has a mark in its environment. Its descendants inherit the mark, including those
//! that left the process group. So a run that hangs is killed completely, and Ctrl-C still reaches every
//! program in the terminal's process group.

use std::io::{BufRead, BufReader, PipeReader};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};

const MARK: &str = "PENSTOCK_XTASK_RUN";

/// Time after the end of a program during which output that its descendants hold open is still read.
const GRACE: Duration = Duration::from_secs(2);

static RUN: LazyLock<String> = LazyLock::new(|| {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("{}-{}", std::process::id(), since.as_nanos())
});

/// Marks a program as part of this run, so that [`kill_all`] finds it and its descendants.
pub(crate) fn mark(command: &mut Command) -> &mut Command {
    command.env(MARK, RUN.as_str())
}

/// Returns the marked processes that are alive: process id and command line.
pub(crate) fn alive() -> Vec<(u32, String)> {
    let mark = format!("{MARK}={}", RUN.as_str());
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // The environment of another user's process, or of one that is ending, cannot be read.
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else { continue };
        if environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push((pid, String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned()));
        }
    }
    found
}

/// Kills every marked process and returns those that it found.
pub(crate) fn kill_all() -> Vec<(u32, String)> {
    let found = alive();
    if !found.is_empty() {
        // The kill that is built into the shell: a small system has no separate program.
        let mut shell = Command::new("sh");
        shell.args(["-c", "kill -KILL \"$@\" 2>/dev/null", "kill"]);
        shell.args(found.iter().map(|(pid, _)| pid.to_string()));
        // A process that ended by itself meanwhile is not an error.
        let _ = shell.status();
    }
    found
}

/// Kills every marked process once the time limit has passed, including those started after that.
pub(crate) struct Watchdog {
    fired: Arc<AtomicBool>,
}

impl Watchdog {
    /// Starts the timer.
    pub(crate) fn start(limit: Duration) -> Watchdog {
        let fired = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&fired);
        thread::spawn(move || {
            thread::sleep(limit);
            flag.store(true, Ordering::SeqCst);
            // A build that is being killed may start one more program, so this never stops.
            loop {
                kill_all();
                thread::sleep(Duration::from_millis(200));
            }
        });
        Watchdog { fired }
    }

    /// True if the time limit has passed.
    pub(crate) fn fired(&self) -> bool {
        self.fired.load(Ordering::SeqCst)
    }
}

/// Runs a program and passes on each line of its output and error output, in the order of writing.
///
/// Descendants that outlive the program and hold its output open are waited for at most `GRACE`.
pub(crate) fn stream(command: &mut Command, on_line: &mut dyn FnMut(&str)) -> Result<ExitStatus> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let error_writer = writer.try_clone().context("cannot duplicate a pipe")?;
    mark(command).stdin(Stdio::null()).stdout(writer).stderr(error_writer);
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    // The command still holds the writing ends: without this the reader would not reach the end.
    command.stdout(Stdio::null()).stderr(Stdio::null());

    let lines = read_lines(reader);
    let mut ended: Option<(ExitStatus, Instant)> = None;
    loop {
        match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(line) => on_line(&line),
            Err(RecvTimeoutError::Disconnected) => break,
            Err(RecvTimeoutError::Timeout) => {}
        }
        match ended {
            None => ended = child.try_wait()?.map(|status| (status, Instant::now())),
            Some((_, at)) if at.elapsed() > GRACE => break,
            Some(_) => {}
        }
    }
    match ended {
        Some((status, _)) => Ok(status),
        None => child.wait().with_context(|| format!("cannot wait for {program}")),
    }
}

fn read_lines(reader: PipeReader) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(reader);
        let mut line = Vec::new();
        while matches!(reader.read_until(b'\n', &mut line), Ok(length) if length > 0) {
            let text = String::from_utf8_lossy(&line);
            if sender.send(text.trim_end_matches(['\n', '\r']).to_owned()).is_err() {
                return;
            }
            line.clear();
        }
    });
    receiver
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> (ExitStatus, Vec<String>) {
        let mut lines = Vec::new();
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let status = stream(&mut command, &mut |line| lines.push(line.to_owned())).unwrap();
        (status, lines)
    }

    /// One test instead of two: `kill_all` would kill the processes of a test that runs beside it.
    #[test]
    fn output_comes_in_order_and_what_lives_on_is_killed() {
        let (status, lines) = shell("echo a; echo b >&2; echo c; printf d; exit 3");
        assert_eq!(lines, ["a", "b", "c", "d"]);
        assert_eq!(status.code(), Some(3));

        let started = Instant::now();
        let (status, lines) = shell("setsid sleep 61.25 & echo a");
        assert!(status.success());
        assert_eq!(lines, ["a"]);
        assert!(started.elapsed() < Duration::from_secs(30));
        let ours = |(_, line): &(u32, String)| line == "sleep 61.25";
        assert!(kill_all().iter().any(ours));
        let mut tries = 0;
        while alive().iter().any(ours) {
            tries += 1;
            assert!(tries < 100, "the process was not killed");
            thread::sleep(Duration::from_millis(50));
        }
    }
}
