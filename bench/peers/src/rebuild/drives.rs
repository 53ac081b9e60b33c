//! Fails and replaces drives of a store, and detects the begin and end of the rebuild.

use crate::peer::Store;
use crate::proc::Processes;
use crate::rest::Rest;
use anyhow::{Context, Result, ensure};
use penstock_bench::files::Phase;
use serde::Serialize;
use serde_json::Value;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The number of data strips of a stripe. The store has six drives.
pub(crate) const K: usize = 4;
/// The drives without metadata, by their places in the list of drives. Metadata is on the first three.
pub(crate) const DRIVES: [usize; 3] = [3, 4, 5];
/// Interval at which the instance is asked for its progress.
const POLL: Duration = Duration::from_millis(10);
/// Time limit of one rebuild.
const PATIENCE: Duration = Duration::from_secs(10 * 60);

/// One rebuild, or the sum of several.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Rebuilt {
    pub(crate) strip_bytes: f64,
    pub(crate) seconds: f64,
    /// Processor time in seconds of the process that did it, including its other work meanwhile.
    pub(crate) cpu_seconds: f64,
}

impl Rebuilt {
    pub(super) fn add(&mut self, more: Self) {
        self.strip_bytes += more.strip_bytes;
        self.seconds += more.seconds;
        self.cpu_seconds += more.cpu_seconds;
    }

    pub(super) fn rate(&self) -> f64 {
        self.strip_bytes / self.seconds
    }
}

/// The drives of a running store 4+2, and its process.
pub(crate) struct Drives {
    rest: Rest,
    process: Processes,
}

impl Drives {
    /// Connects to a running store.
    pub(crate) fn of(store: &Store) -> Result<Self> {
        Ok(Self { rest: Rest::of(&store.dir)?, process: Processes::One(store.process) })
    }

    /// Returns the path of a drive.
    pub(super) fn path(&self, index: usize) -> Result<PathBuf> {
        let drive = self.drive(index)?;
        Ok(PathBuf::from(drive["path"].as_str().context("a drive has a path")?))
    }

    /// Returns the number of strips that each drive holds.
    pub(super) fn strips(&self) -> Result<usize> {
        let array = self.array()?;
        Ok(array["written_stripes"].as_u64().context("an array counts stripes")? as usize)
    }

    fn array(&self) -> Result<Value> {
        self.rest.get("/v1/arrays/data")
    }

    fn drive(&self, index: usize) -> Result<Value> {
        Ok(self.rest.get("/v1/drives")?[index].clone())
    }

    /// Takes a drive out of service.
    pub(crate) fn fail(&self, index: usize) -> Result<()> {
        let drive = self.drive(index)?;
        self.rest.post(&format!("/v1/drives/{}/fail", id(&drive)?))?;
        Ok(())
    }

    /// Replaces a failed drive and waits until the array is healthy. Meanwhile `phase` counts times.
    pub(crate) fn rebuild(&self, index: usize, phase: &Phase) -> Result<Rebuilt> {
        let drive = self.drive(index)?;
        let begun = Instant::now();
        self.rest.post(&format!("/v1/drives/{}/replace", id(&drive)?))?;
        let mut seen: Option<(Instant, f64, Rebuilt)> = None;
        loop {
            let array = self.array()?;
            ensure!(begun.elapsed() < PATIENCE, "the rebuild does not end");
            let job = &array["rebuild"];
            match &mut seen {
                None if job.is_null() => {
                    ensure!(
                        array["state"] != "ok",
                        "the rebuild was over before it was seen: take larger drives"
                    );
                }
                None => {
                    phase.count();
                    let cpu_before = self.process.cpu_seconds();
                    let stripes = job["total_stripes"].as_f64().context("a rebuild counts stripes")?;
                    let stripe_bytes = array["stripe_bytes"].as_f64().context("an array has stripes")?;
                    let strip_bytes = stripes * stripe_bytes / K as f64;
                    seen = Some((Instant::now(), cpu_before, Rebuilt { strip_bytes, ..Rebuilt::default() }));
                }
                Some((start, cpu_before, rebuilt)) if job.is_null() => {
                    phase.wait();
                    rebuilt.seconds = start.elapsed().as_secs_f64();
                    rebuilt.cpu_seconds = self.process.cpu_seconds() - *cpu_before;
                    break;
                }
                Some(_) => {}
            }
            std::thread::sleep(POLL);
        }
        while self.array()?["state"] != "ok" {
            ensure!(begun.elapsed() < PATIENCE, "the array does not become whole");
            std::thread::sleep(POLL);
        }
        seen.map(|(.., rebuilt)| rebuilt).context("it was seen")
    }
}

fn id(drive: &Value) -> Result<&str> {
    drive["id"].as_str().context("a drive has an id")
}
