//! `fs check --repair --map`: makes the key-value store of a stopped instance anew from its last copy of the
//! map, and repairs the file system.

use crate::folder::{Folder, named};
use crate::show::{self, note, print};
use crate::up::{Found, open_store, raise_descriptors, wait_for_locks};
use anyhow::{Context, Result, anyhow, bail};
use penstock_base::Env;
use penstock_node::{
    EventFiles, EventKind, FileOwnership, FsCheckReport, Lacking, Newer, Restore, Severity, StartError,
    StoreFile,
};
use penstock_worker::{Worker, block_on};
use std::io::Write;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// The file in the folder with the last report.
const KEPT: &str = "restored.json";
/// Time that is left for events to be written.
const EVENTS: Duration = Duration::from_secs(5);

/// Options of a restore.
#[derive(Clone, Copy)]
pub struct How {
    pub accept_loss: bool,
    pub keep_changed: bool,
    pub force: bool,
    pub yes: bool,
}

/// Restores and repairs the store of this folder, which nobody may serve meanwhile. Without `yes`, `confirm`
/// is asked first, and told why it is necessary.
pub fn restore(
    dir: Option<PathBuf>,
    how: How,
    confirm: impl Fn(&str) -> Result<bool>,
    json: bool,
) -> Result<FsCheckReport> {
    let How { accept_loss, keep_changed, force, yes } = how;
    let dir = named(None, dir)?;
    if !dir.join("drives").exists() && !dir.join("store.json").exists() {
        bail!("there is no store in {}", dir.display());
    }
    let folder = Folder::lock(&dir)?;
    raise_descriptors();
    let env = Worker::env()?;
    let lacking = if accept_loss { Lacking::Accept } else { Lacking::Refuse };
    let newer = if keep_changed { Newer::Stay } else { Newer::AreCollected };
    let go = |is_confirmed| {
        let how = (lacking, Restore { newer, is_confirmed, is_forced: force });
        block_on(run(&env, &folder, how)).map_err(|error| anyhow!("no worker: {error}"))?
    };
    if accept_loss && !yes && !confirm("--accept-loss gives up for good what only drives have that are away")?
    {
        bail!("nothing was changed; --yes goes on without a question");
    }
    let report = match go(yes) {
        Err(error) => match error.downcast_ref() {
            Some(StartError::Unconfirmed(why)) => {
                let back = "they are set back to that copy, and the file system is repaired";
                match confirm(&format!("{why}\n{back}"))? {
                    true => go(true)?,
                    false => bail!("nothing was restored; --yes goes on without a question"),
                }
            }
            _ => return Err(error),
        },
        report => report?,
    };
    print(json, &report, show::check)?;
    if report.restored.is_some() {
        keep(&folder, &report)?;
    }
    note!("the list of files is in {}", folder.path.join(KEPT).display());
    Ok(report)
}

/// Writes a report to the folder, durably. If the repair is interrupted, it is the only one with the files.
fn keep(folder: &Folder, report: &impl serde::Serialize) -> Result<()> {
    let path = folder.path.join(KEPT);
    let write = || {
        let mut file = std::fs::File::create(&path)?;
        file.write_all(&serde_json::to_vec_pretty(report)?)?;
        file.sync_all()
    };
    write().with_context(|| format!("{} cannot be written", path.display()))
}

async fn run(env: &Env, folder: &Folder, (lacking, restore): (Lacking, Restore)) -> Result<FsCheckReport> {
    let Some(file) = StoreFile::load(&folder.path).map_err(|why| anyhow!(why))? else {
        bail!("this folder has no store: `penstock up` starts one from its drives first");
    };
    let ownership = Rc::new(FileOwnership::open(&folder.path).map_err(|why| anyhow!(why))?);
    let found = Found::of(folder, Some(file));
    wait_for_locks(&found.paths);
    note!("reading the copy of the map");
    let kept = EventFiles::open(&folder.path).map_err(|why| anyhow!(why))?;
    let node = open_store(env, found, ownership, (lacking, Some(restore))).await?;
    node.keep_events(kept);
    if let Some(restored) = node.restored().await? {
        keep(folder, &serde_json::json!({ "restored": restored }))?;
    }
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
