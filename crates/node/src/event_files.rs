//! Event files in the store's folder: JSON lines in `events.jsonl` and, with older events, `events.1.jsonl`.
//!
//! Format: docs/format/events.md. After a power cut the newest file may end in a partial line, and may lack
//! events that were not important enough to be flushed. A partial line is removed when the files are opened.
//! A rotation makes the next file completely, renames the full file to the old name, and then the next file
//! to the new name. A power cut between the two renames leaves only the renamed full file, and nothing is
//! lost.

use crate::event::{Event, EventKind, IN_MEMORY, Severity};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

const NEW: &str = "events.jsonl";
const OLD: &str = "events.1.jsonl";
/// Name of a file that is being made.
const MAKING: &str = "events.new";
/// A file is rotated before it grows beyond this size.
const MOST_BYTES: u64 = 4 << 20;
/// A longer file is not an event file.
const READ_MOST_BYTES: u64 = 4 * MOST_BYTES;
/// Most events that may wait for one flush.
const UNSYNCED_MOST: u64 = 100;
/// Numbers that are skipped after an unclean end: more than the events that can have been shown and not
/// flushed.
const SKIPPED_NUMBERS: u64 = IN_MEMORY as u64;
const FORMAT: u32 = 1;

/// First line of each file.
#[derive(Serialize, Deserialize)]
struct Head {
    penstock_events: u32,
}

/// The open event files of a folder.
pub struct EventFiles {
    dir: PathBuf,
    file: File,
    len: u64,
    unsynced: u64,
    most_bytes: u64,
}

/// Contents of a folder's event files when they are opened.
pub struct Kept {
    /// The open files, to append to.
    pub files: EventFiles,
    /// The last events, oldest first.
    pub recent: Vec<Event>,
    /// Number of the next event.
    pub next_seq: u64,
    /// True if the instance that wrote last did not stop in order.
    pub unclean: bool,
    /// Number of lines that are no valid events.
    pub torn_lines: u64,
}

/// Contents of one file.
struct Read {
    events: Vec<Event>,
    torn_lines: u64,
    /// Number of bytes up to the end of the last complete line.
    whole_bytes: u64,
}

fn read(path: &Path) -> Result<Option<Read>, String> {
    let bad = |why: String| format!("{} cannot be read ({why}); move it away to begin anew", path.display());
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(bad(error.to_string())),
        Ok(found) if found.len() > READ_MOST_BYTES => return Err(bad(format!("{} bytes", found.len()))),
        Ok(_) => {}
    }
    let bytes = std::fs::read(path).map_err(|error| bad(error.to_string()))?;
    let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    let mut lines = bytes[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    let mut found = Read { events: Vec::new(), torn_lines: 0, whole_bytes: whole as u64 };
    found.torn_lines += u64::from(whole < bytes.len());
    match lines.next().map(serde_json::from_slice::<Head>) {
        Some(Ok(head)) if head.penstock_events == FORMAT => {}
        Some(Ok(head)) => return Err(bad(format!("format {}, from a later release", head.penstock_events))),
        Some(Err(_)) => return Err(bad("its first line is not that of an event file".into())),
        None => return Ok(Some(found)),
    }
    for line in lines {
        match serde_json::from_slice::<Event>(line) {
            Ok(event) => found.events.push(event),
            Err(_) => found.torn_lines += 1,
        }
    }
    Ok(Some(found))
}

/// Makes a file that contains only its first line, durable under the name [`MAKING`].
fn make(dir: &Path) -> io::Result<(File, u64)> {
    let mut options = OpenOptions::new();
    options.create(true).truncate(true).read(true).write(true).mode(0o600);
    let mut file = options.open(dir.join(MAKING))?;
    let mut line = serde_json::to_vec(&Head { penstock_events: FORMAT }).map_err(io::Error::other)?;
    line.push(b'\n');
    file.write_all(&line)?;
    file.sync_all()?;
    Ok((file, line.len() as u64))
}

fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

/// True if an event, as the last one, shows how the previous instance ended. A failed start does not.
fn says_end(event: &&Event) -> bool {
    event.kind != EventKind::StartFailed
}

impl EventFiles {
    /// Opens the files in `dir`, makes them if necessary, and removes a torn end.
    pub fn open(dir: &Path) -> Result<Kept, String> {
        let (mut events, mut torn_lines) = (Vec::new(), 0);
        for name in [OLD, NEW] {
            if let Some(found) = read(&dir.join(name))? {
                events.extend(found.events);
                torn_lines += found.torn_lines;
            }
        }
        let unclean = events.iter().rev().find(says_end).is_some_and(|last| last.kind != EventKind::Stopped);
        let last = events.iter().map(|event| event.seq).max().unwrap_or(0);
        let next_seq = last + 1 + if unclean { SKIPPED_NUMBERS } else { 0 };
        let recent = events.split_off(events.len().saturating_sub(IN_MEMORY));
        let files = Self::begin(dir, MOST_BYTES)
            .map_err(|error| format!("{} cannot be written: {error}", dir.join(NEW).display()))?;
        Ok(Kept { files, recent, next_seq, unclean, torn_lines })
    }

    fn begin(dir: &Path, most_bytes: u64) -> io::Result<Self> {
        let path = dir.join(NEW);
        let whole_bytes = read(&path).map_err(io::Error::other)?.map_or(0, |found| found.whole_bytes);
        if whole_bytes == 0 {
            let (file, len) = make(dir)?;
            std::fs::rename(dir.join(MAKING), path)?;
            sync_dir(dir)?;
            return Ok(Self { dir: dir.to_owned(), file, len, unsynced: 0, most_bytes });
        }
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        file.set_len(whole_bytes)?;
        Ok(Self { dir: dir.to_owned(), file, len: whole_bytes, unsynced: 0, most_bytes })
    }

    /// Appends events. They are durable on return if one of them is important; otherwise groups are flushed.
    pub fn append(&mut self, events: &[Event]) -> io::Result<()> {
        let mut bytes = Vec::new();
        for event in events {
            serde_json::to_writer(&mut bytes, event).map_err(io::Error::other)?;
            bytes.write_all(b"\n")?;
        }
        if self.len + bytes.len() as u64 > self.most_bytes {
            self.rotate()?;
        }
        // Bytes that a failed attempt left behind the end must not follow this batch.
        self.file.set_len(self.len)?;
        self.file.write_all_at(&bytes, self.len)?;
        self.unsynced += events.len() as u64;
        if events.iter().any(matters) || self.unsynced >= UNSYNCED_MOST {
            self.file.sync_data()?;
            self.unsynced = 0;
        }
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn rotate(&mut self) -> io::Result<()> {
        self.file.set_len(self.len)?;
        self.file.sync_all()?;
        let (file, len) = make(&self.dir)?;
        std::fs::rename(self.dir.join(NEW), self.dir.join(OLD))?;
        std::fs::rename(self.dir.join(MAKING), self.dir.join(NEW))?;
        (self.file, self.len, self.unsynced) = (file, len, 0);
        sync_dir(&self.dir)
    }

    /// Returns up to `limit` events with numbers above `seq`, oldest first, from the files in `dir`.
    pub fn read_after(dir: &Path, seq: u64, limit: usize) -> Result<Vec<Event>, String> {
        let mut found = Vec::new();
        for name in [OLD, NEW] {
            let events = read(&dir.join(name))?.map(|found| found.events).unwrap_or_default();
            found.extend(events.into_iter().filter(|event| event.seq > seq));
        }
        found.truncate(limit);
        Ok(found)
    }
}

/// True if an event must survive a power cut that follows immediately.
fn matters(event: &Event) -> bool {
    event.severity > Severity::Info || matches!(event.kind, EventKind::Started | EventKind::Stopped)
}

#[cfg(test)]
mod tests;
