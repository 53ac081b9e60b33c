//! Records with perf the calls that are open on each processor, at regular intervals.
//!
//! perf samples processors instead of processes. A timer per process is set anew whenever one of its threads
//! starts to run. That costs more than the work of the threads in a small read, and misses the work before
//! the timer is set.
//!
//! A pipe tells perf when the work begins and ends, so that neither its start nor the preparation is
//! recorded.

use crate::guard::Guard;
use anyhow::{Context, Result, bail, ensure};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Time between two samples of a processor. A sample costs tens of microseconds. The value keeps out of step
/// with the kernel's clocks.
pub(crate) const STEP: Duration = Duration::from_micros(997);
/// Time limit for an answer of perf.
const ANSWER: Duration = Duration::from_secs(30);

/// One open call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    /// An address if it is in the kernel, otherwise an offset in the file `object`.
    pub(crate) at: u64,
    pub(crate) symbol: String,
    pub(crate) object: String,
}

impl Frame {
    pub(crate) fn is_kernel(&self) -> bool {
        self.at >> 63 == 1
    }
}

/// The calls that were open on one processor at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) process: u32,
    /// The innermost call is first.
    pub(crate) frames: Vec<Frame>,
}

/// Checks that perf runs. The error says which package to install.
pub(crate) fn ensure_there() -> Result<()> {
    let found = Command::new("perf").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    ensure!(
        found.is_ok_and(|status| status.success()),
        "perf is missing or does not run: install it (Debian: linux-perf, Ubuntu: linux-tools-generic, Fedora: perf)"
    );
    Ok(())
}

/// A recording that is in progress.
#[derive(Debug)]
pub(crate) struct Recording {
    child: Child,
    _guard: Guard,
    data: PathBuf,
    orders: File,
    answers: File,
}

impl Recording {
    /// Starts to record all processors. perf's files are put into `folder`.
    pub(crate) fn start(folder: &Path) -> Result<Self> {
        let [data, orders, answers] = ["perf.data", "orders", "answers"].map(|name| folder.join(name));
        for pipe in [&orders, &answers] {
            if !pipe.exists() {
                use rustix::fs::{CWD, FileType, Mode, mknodat};
                mknodat(CWD, pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)
                    .context("a pipe cannot be made")?;
            }
        }
        let log = File::create(folder.join("perf.log"))?;
        let mut command = Command::new("perf");
        command.args(["record", "--quiet", "-e", "cpu-clock", "-c", &STEP.as_nanos().to_string()]);
        command.args(["--call-graph", "fp", "-m", "8M", "--delay", "-1", "-a", "-o"]).arg(&data);
        command.arg(format!("--control=fifo:{},{}", orders.display(), answers.display()));
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        // Open for reading and writing, so that opening does not wait for perf and reading does not end.
        let open = |path| {
            OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(rustix::fs::OFlags::NONBLOCK.bits() as i32)
                .open(path)
        };
        let (orders, answers) = (open(&orders)?, open(&answers)?);
        let (child, guard) = Guard::process(&mut command)?;
        let mut recording = Self { child, _guard: guard, data, orders, answers };
        recording.order("enable").with_context(|| {
            let log = std::fs::read_to_string(folder.join("perf.log")).unwrap_or_default();
            format!("perf does not record: {}", log.trim())
        })?;
        Ok(recording)
    }

    /// Sends an order to perf and waits until perf acknowledges it.
    fn order(&mut self, order: &str) -> Result<()> {
        self.orders.write_all(format!("{order}\n").as_bytes())?;
        let (start, mut answer) = (Instant::now(), String::new());
        while !answer.contains('\n') {
            let mut bytes = [0; 64];
            match self.answers.read(&mut bytes) {
                Ok(len) => answer.push_str(&String::from_utf8_lossy(&bytes[..len])),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if let Some(status) = self.child.try_wait()? {
                        bail!("it has ended: {status}");
                    }
                    ensure!(start.elapsed() < ANSWER, "it does not answer");
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error.into()),
            }
        }
        ensure!(answer.starts_with("ack"), "it answers {answer:?}");
        Ok(())
    }

    /// Ends the recording and returns the file with the samples.
    pub(crate) fn stop(mut self) -> Result<PathBuf> {
        self.order("disable")?;
        self.orders.write_all(b"stop\n")?;
        let start = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(start.elapsed() < ANSWER, "perf does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(self.data.clone())
    }
}

/// Passes on every sample of these processes in a recording.
pub(crate) fn read(data: &Path, processes: &[u32], mut on_sample: impl FnMut(&Sample)) -> Result<()> {
    let mut command = Command::new("perf");
    let ids = processes.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    command.args(["script", "--no-inline", "-F", "pid,ip,sym,dso", "--pid", &ids, "-i"]).arg(data);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    let (mut child, _guard) = Guard::process(&mut command)?;
    let output = BufReader::new(child.stdout.take().context("its output is a pipe")?);
    let mut sample: Option<Sample> = None;
    for line in output.split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        match (parse(&line), &mut sample) {
            (Line::Process(process), sample) => {
                sample.take().iter().for_each(&mut on_sample);
                *sample = Some(Sample { process, frames: Vec::new() });
            }
            (Line::Frame(frame), Some(sample)) => sample.frames.push(frame),
            (Line::Empty, _) => {}
            _ => bail!("perf script prints a line that is not understood: {line}"),
        }
    }
    sample.iter().for_each(on_sample);
    let status = child.wait()?;
    ensure!(status.success(), "perf script: {status}");
    Ok(())
}

enum Line {
    Process(u32),
    Frame(Frame),
    Empty,
    Other,
}

/// Parses a line of `perf script`. A sample is a line with its process, then `address symbol (object)` for
/// each open call, then an empty line.
fn parse(line: &str) -> Line {
    let text = line.trim();
    if text.is_empty() {
        return Line::Empty;
    }
    if !line.starts_with('\t') {
        return text.parse().map_or(Line::Other, Line::Process);
    }
    let parts = text.split_once(' ').and_then(|(at, rest)| {
        let (symbol, object) = rest.trim_end().strip_suffix(')')?.rsplit_once(" (")?;
        Some(Frame { at: u64::from_str_radix(at, 16).ok()?, symbol: symbol.into(), object: object.into() })
    });
    parts.map_or(Line::Other, Line::Frame)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_perf_are_read() {
        let frame = |line: &str| match parse(line) {
            Line::Frame(frame) => frame,
            _ => panic!("{line} is a frame"),
        };
        let kernel = frame("\tffffffff816baa95 vfs_read ([kernel.kallsyms])");
        assert!(kernel.is_kernel() && kernel.symbol == "vfs_read");
        let ours = frame("\t          1ba07 <a::B<C> as d::E>::f (inlined) x (/a b/penstock)");
        assert!(!ours.is_kernel() && ours.at == 0x1ba07);
        assert_eq!(
            (ours.symbol.as_str(), ours.object.as_str()),
            ("<a::B<C> as d::E>::f (inlined) x", "/a b/penstock")
        );
        assert_eq!(frame("\t    1e00000000 [unknown] ([unknown])").object, "[unknown]");
        assert!(matches!(parse("  22866 "), Line::Process(22866)));
        assert!(matches!(parse(""), Line::Empty));
        assert!(matches!(parse("something else"), Line::Other) && matches!(parse("\tzz"), Line::Other));
    }
}
