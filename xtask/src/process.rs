//! Runs programs whose output people watch, and ends everything they started.
//!
//! Each program started here carries a mark in its environment, which its descendants inherit, also those
//! that left the process group. So a run that hangs is ended as a whole, while Ctrl-C still reaches every
//! program of the terminal's group.

use std::io::{BufRead, BufReader, PipeReader};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, LazyLock};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result};

const MARK: &str = "PENSTOCK_XTASK_RUN";

/// How long output may be held open by descendants of a program that has ended.
const GRACE: Duration = Duration::from_secs(2);

static RUN: LazyLock<String> = LazyLock::new(|| {
    let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
    format!("{}-{}", std::process::id(), since.as_nanos())
});

/// Marks a program as part of this run.
pub(crate) fn mark(command: &mut Command) -> &mut Command {
    command.env(MARK, RUN.as_str())
}

/// Marked processes that are alive: process id and command line.
pub(crate) fn alive() -> Vec<(u32, String)> {
    let mark = format!("{MARK}={}", RUN.as_str());
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut found = Vec::new();
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        // a process of another user, or one that is ending, has nothing to read
        let Ok(environment) = std::fs::read(entry.path().join("environ")) else { continue };
        if environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes()) {
            let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
            found.push((pid, String::from_utf8_lossy(&line).replace('\0', " ").trim().to_owned()));
        }
    }
    found
}

/// Kills every marked process; gives those it found.
pub(crate) fn kill_all() -> Vec<(u32, String)> {
    let found = alive();
    if !found.is_empty() {
        // the shell's own kill: a small system has no other
        let mut shell = Command::new("sh");
        shell.args(["-c", "kill -KILL \"$@\" 2>/dev/null", "kill"]);
        shell.args(found.iter().map(|(pid, _)| pid.to_string()));
        // a process that ended by itself meanwhile is no failure
        let _ = shell.status();
    }
    found
}

/// Ends the run when its time is over, and whatever it starts after that.
pub(crate) struct Watchdog {
    fired: Arc<AtomicBool>,
}

impl Watchdog {
    /// Starts to count.
    pub(crate) fn start(limit: Duration) -> Watchdog {
        let fired = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&fired);
        thread::spawn(move || {
            thread::sleep(limit);
            flag.store(true, Ordering::SeqCst);
            // A dying build may start one more program: this goes on until the process ends.
            loop {
                kill_all();
                thread::sleep(Duration::from_millis(200));
            }
        });
        Watchdog { fired }
    }

    /// Whether the time was over.
    pub(crate) fn fired(&self) -> bool {
        self.fired.load(Ordering::SeqCst)
    }
}

/// Runs a program and hands on each line of its output and error output, in the order they were written.
///
/// Descendants that outlive it and hold its output open are not waited for.
pub(crate) fn stream(command: &mut Command, on_line: &mut dyn FnMut(&str)) -> Result<ExitStatus> {
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let error_writer = writer.try_clone().context("cannot duplicate a pipe")?;
    mark(command).stdin(Stdio::null()).stdout(writer).stderr(error_writer);
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command.spawn().with_context(|| format!("cannot start {program}"))?;
    // The command still holds the writing ends: without this the pipe would never end.
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

    /// One test, as what kills all marked processes would kill those of another.
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
