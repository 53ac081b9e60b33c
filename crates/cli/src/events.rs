//! `events`: prints events from the running instance, or from the folder's files if none runs.

use crate::folder::{DEFAULT, Run, is_free};
use crate::remote::Remote;
use crate::show::{self, print};
use anyhow::{Result, anyhow, bail};
use penstock_node::{Event, EventFiles};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Polling interval of `--follow`.
const POLL: Duration = Duration::from_millis(500);

/// Prints events with numbers above `since`. With `follow`, prints new ones too, until the instance ends.
pub fn events(
    dir: Option<&PathBuf>,
    api: Option<&String>,
    since: u64,
    follow: bool,
    json: bool,
) -> Result<ExitCode> {
    let folder = dir.map_or(Path::new(DEFAULT), PathBuf::as_path);
    if api.is_none() && !follow && !runs(folder) && is_free(folder) {
        let events = in_folder(folder, since)?;
        return print(json, &events, |events| show::events(events));
    }
    let remote = Remote::find(dir, api)?;
    if !follow {
        let mut all = Vec::new();
        next(&remote, since, |page| all.extend(page))?;
        return print(json, &all, |events| show::events(events));
    }
    let mut seq = since;
    loop {
        let mut failed = None;
        seq = next(&remote, seq, |page| match json {
            false => show::events(&page),
            true => page.iter().for_each(|event| match serde_json::to_string(event) {
                Ok(line) => println!("{line}"),
                Err(error) => failed = Some(error),
            }),
        })?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        std::thread::sleep(POLL);
    }
}

fn runs(folder: &Path) -> bool {
    Run::load(folder).is_ok_and(|run| run.is_alive())
}

/// Reads the events with numbers above `since` from a folder's files. Fails if there is no such folder.
pub fn in_folder(folder: &Path, since: u64) -> Result<Vec<Event>> {
    if !folder.is_dir() {
        bail!("there is no folder {}; --dir names one", folder.display());
    }
    EventFiles::read_after(folder, since, usize::MAX).map_err(|why| anyhow!(why))
}

/// Fetches all events with numbers above `seq`, page by page. Returns the number of the last one.
pub fn next(remote: &Remote, mut seq: u64, mut take: impl FnMut(Vec<Event>)) -> Result<u64> {
    loop {
        let page: Vec<Event> = remote.get(&format!("/v1/events?after={seq}"))?;
        let Some(last) = page.last() else { return Ok(seq) };
        seq = last.seq;
        take(page);
    }
}
