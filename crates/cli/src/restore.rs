//! `fs check --repair --map`: makes the key-value store of a stopped instance anew from its last copy of the
//! map, and repairs the file system.

use crate::folder::{Folder, named};
use crate::show::{self, note, print};
use crate::up::{Found, open_store, raise_descriptors, wait_for_locks};
use anyhow::{Result, anyhow, bail};
use penstock_base::Env;
use penstock_node::{
    EventFiles, EventKind, FileOwnership, FsCheckReport, Lacking, Newer, Severity, StoreFile,
};
use penstock_worker::{Worker, block_on};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// Time that is left for events to be written.
const EVENTS: Duration = Duration::from_secs(5);

/// Restores and repairs the store of this folder, which nobody may serve meanwhile.
pub fn restore(
    dir: Option<PathBuf>,
    (accept_loss, keep_changed): (bool, bool),
    json: bool,
) -> Result<FsCheckReport> {
    let folder = Folder::lock(&named(None, dir)?)?;
    raise_descriptors();
    let env = Worker::env()?;
    let lacking = if accept_loss { Lacking::Accept } else { Lacking::Refuse };
    let newer = if keep_changed { Newer::Stay } else { Newer::AreCollected };
    let ran = block_on(run(&env, &folder, (lacking, newer))).map_err(|error| anyhow!("no worker: {error}"));
    let report = ran??;
    print(json, &report, show::check)?;
    Ok(report)
}

async fn run(env: &Env, folder: &Folder, (lacking, newer): (Lacking, Newer)) -> Result<FsCheckReport> {
    let Some(file) = StoreFile::load(&folder.path).map_err(|why| anyhow!(why))? else {
        bail!("this folder has no store: `penstock up` starts one from its drives first");
    };
    let ownership = Rc::new(FileOwnership::open(&folder.path).map_err(|why| anyhow!(why))?);
    let found = Found::of(folder, Some(file));
    wait_for_locks(&found.paths);
    note!("reading the copy of the map");
    let kept = EventFiles::open(&folder.path).map_err(|why| anyhow!(why))?;
    let node = open_store(env, found, ownership, (lacking, Some(newer))).await?;
    node.keep_events(kept);
    note!("the rows are restored; repairing the file system");
    let repaired = node.repair_fs().await;
    let closed = node.close().await;
    if closed.is_ok() {
        node.events().add(Severity::Info, EventKind::Stopped, "node", "stopped after a restore");
    }
    node.events().wait_kept(EVENTS).await;
    let report = repaired?;
    closed.map_err(|why| anyhow!("not everything could be made durable: {why}"))?;
    Ok(report)
}
