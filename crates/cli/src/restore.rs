//! `fs check --repair --map`: makes lost key-value stores of a stopped instance anew from their last copies
//! of the map, and repairs the file system.

use crate::folder::{Folder, named};
use crate::given::{Given, GivenDrives};
use crate::show::{self, note, print};
use crate::up::{Found, open_store, raise_descriptors, wait_for_locks};
use anyhow::{Context, Result, anyhow, bail};
use penstock_base::Env;
use penstock_node::{
    Consent, EventFiles, EventKind, FileOwnership, FsCheckReport, Lacking, MapRestoreReport, Newer, Node,
    Restore, Severity, StartError, StoreFile, replace_private_file,
};
use penstock_worker::{Worker, block_on};
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

/// The file in the folder with the last report.
const KEPT: &str = "restored.json";
/// Copies that are asked for in turn, if one cannot be read any more when the question is answered.
const MOST_QUESTIONS: u32 = 4;
/// Time that is left for events to be written.
const EVENTS: Duration = Duration::from_secs(5);

/// Options of a restore.
#[derive(Clone)]
pub struct How {
    pub accept_loss: bool,
    pub keep_changed: bool,
    pub force: bool,
    pub yes: bool,
    pub drive: Vec<GivenDrives>,
}

/// Restores and repairs the store of this folder, which nobody may serve meanwhile. Without `yes`, `confirm`
/// is asked first, and told why it is necessary.
pub fn restore(
    dir: Option<PathBuf>,
    how: How,
    confirm: impl Fn(&str) -> Result<bool>,
    json: bool,
) -> Result<FsCheckReport> {
    let How { accept_loss, keep_changed, force, yes, drive } = how;
    let dir = named(None, dir)?;
    if !dir.join("drives").exists() && !dir.join("store.json").exists() && drive.is_empty() {
        bail!("there is no store in {}; --drive says where its drives are", dir.display());
    }
    let folder = Folder::lock(&dir)?;
    raise_descriptors();
    let env = Worker::env()?;
    let given = Given::of(&drive)?;
    let lacking = if accept_loss { Lacking::Accept } else { Lacking::Refuse };
    let newer = if keep_changed { Newer::Stay } else { Newer::AreCollected };
    let go = |consent, may_pass_over| {
        let how =
            (lacking, Restore { newer, consent, may_pass_over, may_lack: accept_loss, is_forced: force });
        block_on(run(&env, &folder, given.as_ref(), how)).map_err(|error| anyhow!("no worker: {error}"))?
    };
    if accept_loss && !yes && !confirm("--accept-loss gives up for good what only drives have that are away")?
    {
        bail!("nothing was changed; --yes goes on without a question");
    }
    // Whatever is answered, nothing is given up before the list of files is in the folder. A copy that is not
    // the one of the question, because that cannot be read any more, is asked for anew.
    let (mut tried, mut asked_for) = (go(Consent::No, force), 0);
    let report = loop {
        let error = match tried {
            Ok(report) => break report,
            Err(error) => error,
        };
        match error.downcast_ref() {
            Some(StartError::Unconfirmed { why, copies, previews }) if asked_for < MOST_QUESTIONS => {
                asked_for += 1;
                let back = format!(
                    "the store in {} is set back to {}, and the file system is repaired",
                    folder.path.display(),
                    if previews.len() == 1 { "that copy" } else { "these copies" }
                );
                let asked = !yes && confirm(&format!("{why}\n{back}"))?;
                if !yes && !asked {
                    bail!("nothing was restored; --yes goes on without a question");
                }
                if yes {
                    note!("{why}");
                }
                keep(&folder, &serde_json::json!({ "restored": with_earlier(&folder, previews) }))?;
                tried = go(Consent::To(*copies), asked || force);
            }
            _ => return Err(error),
        }
    };
    print(json, &report, show::check)?;
    if !report.restored.is_empty() {
        keep(&folder, &report)?;
        note!("the list of files is in {}", folder.path.join(KEPT).display());
    }
    Ok(report)
}

/// Writes a report with that of a restore to the folder, durably. It names files of all users.
fn keep(folder: &Folder, report: &impl serde::Serialize) -> Result<()> {
    let (path, bytes) = (folder.path.join(KEPT), serde_json::to_vec_pretty(report)?);
    replace_private_file(&path, &bytes).with_context(|| format!("{} cannot be written", path.display()))
}

/// The reports of restores that were interrupted before their repair, by target.
fn kept(folder: &Folder) -> Result<Vec<MapRestoreReport>> {
    #[derive(serde::Deserialize)]
    struct Kept {
        restored: Vec<MapRestoreReport>,
    }
    let path = folder.path.join(KEPT);
    match std::fs::read(&path) {
        Ok(bytes) => {
            let kept: Kept = serde_json::from_slice(&bytes)
                .with_context(|| format!("{} cannot be understood", path.display()))?;
            Ok(kept.restored)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(|| format!("{} cannot be read", path.display())),
    }
}

/// These reports, and those in the folder of other targets.
fn with_earlier(folder: &Folder, reports: &[MapRestoreReport]) -> Vec<MapRestoreReport> {
    let mut all = kept(folder).unwrap_or_else(|error| {
        note!("an earlier list of files is lost: {error:#}");
        Vec::new()
    });
    all.retain(|earlier| reports.iter().all(|report| report.target != earlier.target));
    all.extend_from_slice(reports);
    all.sort_by_key(|report| report.target);
    all
}

/// The reports in the folder of the restores that are to be repaired, and were made before this start.
fn earlier(folder: &Folder, node: &Node) -> Vec<MapRestoreReport> {
    let kept = with_earlier(folder, &[]);
    let mut earlier = Vec::new();
    for (target, newest) in node.restored_earlier() {
        let of_this =
            |report: &&MapRestoreReport| report.target == target.0 && newest.as_ref() == Some(&report.copy);
        match kept.iter().find(of_this) {
            Some(report) => earlier.push(report.clone()),
            None => note!("the list of changed files of target {target} is not in this folder"),
        }
    }
    earlier
}

async fn run(
    env: &Env,
    folder: &Folder,
    given: Option<&Given>,
    (lacking, restore): (Lacking, Restore),
) -> Result<FsCheckReport> {
    let file = StoreFile::load(&folder.path).map_err(|why| anyhow!(why))?;
    let ownership = Rc::new(FileOwnership::open(&folder.path).map_err(|why| anyhow!(why))?);
    let is_recorded = file.is_some();
    let mut found = Found::of(folder, file);
    found.add_given(given);
    found.refuse_several();
    wait_for_locks(&found.paths);
    note!("reading the copy of the map");
    let events = EventFiles::open(&folder.path).map_err(|why| anyhow!(why))?;
    let node = open_store(env, found, ownership, (lacking, Some(restore))).await?;
    node.keep_events(events);
    if !is_recorded {
        StoreFile::of(node.drive_set()).save(&folder.path).map_err(|why| anyhow!(why))?;
    }
    let earlier = earlier(folder, &node);
    let restored = node.restored().await?;
    if !restored.is_empty() {
        let reports: Vec<MapRestoreReport> = [&restored[..], &earlier].concat();
        keep(folder, &serde_json::json!({ "restored": reports }))?;
    }
    note!("the rows are restored; repairing the file system");
    let mut repaired = node.repair_fs().await;
    if let Ok(report) = &mut repaired {
        for earlier in earlier {
            report.restored.push(node.with_paths(earlier).await?);
        }
        report.restored.sort_by_key(|report| report.target);
    }
    let closed = node.close().await;
    if closed.is_ok() {
        node.events().add(Severity::Info, EventKind::Stopped, "node", "stopped after a restore");
    }
    node.events().wait_kept(EVENTS).await;
    let report = repaired?;
    closed.map_err(|why| anyhow!("not everything could be made durable: {why}"))?;
    Ok(report)
}
