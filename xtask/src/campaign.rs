//! `cargo xtask campaign`: runs tests that are too long for `make test` and records the results in a file.
//!
//! A campaign is a test that runs the items of `PENSTOCK_SEEDS=A..B` one after the other and prints
//! `campaign begin N` and `campaign end N FIGURES` for each. The head of the test describes what it verifies.
//! This module runs the test and keeps the results. An item that passed at this commit is not run again. An
//! item that fails ends its process, and the next process continues with the item after it.

mod results;

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Mutex;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use clap::Subcommand;

use self::results::{Results, Verdict};
use crate::workspace::{cargo, root, target_dir};
use crate::{posix, process, tools};

/// The number of kills in an item of `kills`, one after the other on one store.
const KILLS_OF_ITEM: u64 = 10;
/// The number of pairs of six drives.
const PAIRS: u64 = 15;
/// The number of output lines of a failed item that are kept.
const KEPT_LINES: usize = 60;

#[derive(Subcommand)]
pub(crate) enum Which {
    /// Power cuts with every fault of a drive, in the simulated world; a seed is a machine's life story
    Cuts {
        #[arg(long, value_parser = range, value_name = "A..B", default_value = "0..10000")]
        seeds: Range<u64>,
    },
    /// kill -9 of the real process under load
    Kills {
        /// Number of kills, rounded up to a multiple of ten: each store takes ten
        #[arg(long, default_value_t = 200)]
        count: u64,
    },
    /// Loss and rebuild of every pair of drives, on the real process
    Pairs,
    /// A long life of a store at 90 % full
    Churn {
        #[arg(long, default_value_t = 3600)]
        seconds: u64,
    },
    /// fsx on a mount while drives fail and are rebuilt
    Fsx {
        /// Number of operations, divided among four seeds
        #[arg(long, default_value_t = 100_000)]
        operations: u64,
    },
}

/// A test that runs items, and the settings that it needs.
struct Campaign {
    name: &'static str,
    package: &'static str,
    binary: &'static str,
    test: &'static str,
    items: Range<u64>,
    /// The highest number of items that one process runs.
    batch: u64,
    /// Time limit in seconds. A process gets this time for each of its items. The item that is running when
    /// it is over counts as hung.
    item_limit_s: u64,
    /// Other settings that determine the result. Recorded with it.
    with: String,
    env: Vec<(&'static str, String)>,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let parse = || {
        let (from, to) = text.split_once("..")?;
        Some(from.parse().ok()?..to.parse().ok()?)
    };
    match parse() {
        Some(range) if !range.is_empty() => Ok(range),
        _ => Err("a range is A..B with A below B".to_owned()),
    }
}

impl Which {
    /// The campaign. Real stores have `targets`.
    fn campaign(&self, targets: u16) -> Result<Campaign> {
        let real = |name, test, items| Campaign {
            name,
            package: "penstock-cli",
            binary: "system",
            test,
            items,
            batch: 1,
            item_limit_s: 1800,
            with: String::new(),
            env: Vec::new(),
        };
        let mut campaign = match self {
            Self::Cuts { seeds } => Campaign {
                name: "cuts",
                package: "penstock-world",
                binary: "world",
                test: "campaign::campaign_of_seeds",
                batch: 50,
                item_limit_s: 120,
                ..real("", "", seeds.clone())
            },
            Self::Kills { count } => Campaign {
                with: format!("{KILLS_OF_ITEM} kills"),
                env: vec![("PENSTOCK_KILLS", KILLS_OF_ITEM.to_string())],
                ..real("kills", "kill::campaign_of_kills", 0..count.div_ceil(KILLS_OF_ITEM))
            },
            Self::Pairs => real("pairs", "pairs::campaign_of_pairs", 0..PAIRS),
            Self::Churn { seconds } => Campaign {
                item_limit_s: seconds + 1800,
                with: format!("{seconds} s"),
                env: vec![("PENSTOCK_CHURN_S", seconds.to_string())],
                ..real("churn", "churn::campaign_of_churn", 0..1)
            },
            Self::Fsx { operations } => {
                let (program, file) = (tools::program("fsx", "0.3.2")?, folder()?.join("fsx.toml"));
                std::fs::write(&file, posix::fsx_configuration())?;
                let each = operations.div_ceil(posix::SEEDS);
                let env = vec![
                    ("PENSTOCK_FSX", program.display().to_string()),
                    ("PENSTOCK_FSX_FILE", file.display().to_string()),
                    ("PENSTOCK_FSX_OPERATIONS", each.to_string()),
                ];
                let with = format!("{each} operations");
                Campaign { with, env, ..real("fsx", "fsx::campaign_of_fsx", 1..posix::SEEDS + 1) }
            }
        };
        if targets > 1 {
            // A seed of `cuts` determines the number of targets.
            ensure!(campaign.binary == "system", "{} is not run with a number of targets", campaign.name);
            campaign.with = format!("{}, {targets} targets", campaign.with).trim_start_matches(", ").into();
            campaign.env.push(("PENSTOCK_TEST_TARGETS", targets.to_string()));
        }
        Ok(campaign)
    }
}

fn folder() -> Result<PathBuf> {
    let folder = target_dir().join("campaign");
    std::fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    Ok(folder)
}

/// Runs the items that have not passed at this commit.
pub(crate) fn run(which: &Which, targets: u16, file: Option<PathBuf>, jobs: usize) -> Result<()> {
    let campaign = which.campaign(targets)?;
    let commit = commit()?;
    let file = file.map_or_else(|| folder().map(|folder| folder.join("results.jsonl")), Ok)?;
    let results = Results::open(&file, campaign.name, &campaign.with, &commit)?;
    let waiting: Vec<u64> = campaign.items.clone().filter(|item| !results.has_passed(*item)).collect();
    let before = (campaign.items.end - campaign.items.start) as usize - waiting.len();
    println!(
        "{} {:?} with {commit}: {before} passed before, {} to run; results in {}",
        campaign.name,
        campaign.items,
        waiting.len(),
        file.display()
    );
    let program = build(&campaign)?;
    let runner =
        Runner { campaign: &campaign, program, queue: Mutex::new(batches(&waiting, campaign.batch)) };
    let results = Mutex::new(results);
    let outcomes: Vec<Result<()>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..jobs.max(1)).map(|_| scope.spawn(|| runner.work(&results))).collect();
        workers.into_iter().map(|worker| worker.join().expect("a worker does not panic")).collect()
    });
    let _ = std::fs::remove_file(&runner.program);
    for (pid, line) in process::kill_all() {
        println!("warning: process {pid} was left running ({line}); killed");
    }
    outcomes.into_iter().collect::<Result<()>>()?;
    let results = results.into_inner().expect("no holder of this lock can panic");
    println!(
        "{}: {} passed, {} of them before; {}",
        campaign.name,
        results.passed(),
        before,
        results.failures()
    );
    ensure!(
        !results.has_failed(),
        "items of campaign {} failed; their output is in the results",
        campaign.name
    );
    Ok(())
}

/// Returns the abbreviated commit, with `-dirty` appended if the tree has changes.
fn commit() -> Result<String> {
    let output = Command::new("git")
        .current_dir(root())
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .output()
        .context("git does not run")?;
    ensure!(output.status.success(), "git finds no commit here to record the results for");
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

/// Builds the test and copies its program, so that a later build does not replace it.
fn build(campaign: &Campaign) -> Result<PathBuf> {
    let mut command = cargo();
    command.args(["test", "--locked", "--no-run", "-p", campaign.package, "--test", campaign.binary]);
    let output =
        command.args(["--message-format", "json"]).stderr(std::process::Stdio::inherit()).output()?;
    ensure!(output.status.success(), "the tests of {} do not build", campaign.package);
    let text = String::from_utf8_lossy(&output.stdout);
    let built = text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let found = built
        .filter(|message| {
            message["target"]["name"] == campaign.binary && message["target"]["kind"][0] == "test"
        })
        .find_map(|message| message["executable"].as_str().map(PathBuf::from))
        .context("cargo does not say where the test is")?;
    let copy = folder()?.join(format!("{}-{}", campaign.name, std::process::id()));
    std::fs::copy(&found, &copy).context("cannot copy the test")?;
    Ok(copy)
}

/// Groups consecutive items into ranges of at most `most` items, each for one process.
fn batches(items: &[u64], most: u64) -> VecDeque<Range<u64>> {
    let mut batches: VecDeque<Range<u64>> = VecDeque::new();
    for item in items {
        match batches.back_mut() {
            Some(last) if last.end == *item && last.end - last.start < most => last.end += 1,
            _ => batches.push_back(*item..item + 1),
        }
    }
    batches
}

struct Runner<'a> {
    campaign: &'a Campaign,
    program: PathBuf,
    queue: Mutex<VecDeque<Range<u64>>>,
}

impl Runner<'_> {
    fn next(&self) -> Option<Range<u64>> {
        self.queue.lock().expect("no holder of this lock can panic").pop_front()
    }

    fn work(&self, results: &Mutex<Results>) -> Result<()> {
        while let Some(batch) = self.next() {
            let begun = Instant::now();
            let mut from = batch.start;
            while from < batch.end {
                from = self.run_process(from..batch.end, results)?;
            }
            println!("{} {batch:?}: {} s", self.campaign.name, begun.elapsed().as_secs());
        }
        Ok(())
    }

    /// Runs items until all are done or one fails. Returns the item to continue with.
    fn run_process(&self, items: Range<u64>, results: &Mutex<Results>) -> Result<u64> {
        let limit_s = self.campaign.item_limit_s * (items.end - items.start);
        let mut command = Command::new("timeout");
        command.args(["--foreground", "--kill-after=10", &limit_s.to_string()]).arg(&self.program);
        command.args(["--exact", self.campaign.test, "--include-ignored", "--nocapture"]);
        command.current_dir(root()).env("PENSTOCK_SEEDS", format!("{}..{}", items.start, items.end));
        command.envs(self.campaign.env.iter().map(|(name, value)| (*name, value)));
        let mut watch = Watch::new(items.start, self.campaign.batch == 1);
        let mut written = Ok(());
        let add = |item, verdict, seconds, what| {
            results.lock().expect("no holder of this lock can panic").add(item, verdict, seconds, what)
        };
        let status = process::stream(&mut command, &mut |line| {
            if let Some((item, figures)) = watch.feed(line) {
                let seconds = watch.begun.elapsed().as_secs_f64();
                let done = add(item, Verdict::Passed, seconds, figures);
                if written.is_ok() {
                    written = done;
                }
            }
        })?;
        written?;
        if status.success() {
            let why = watch.lines.back().cloned().unwrap_or_default();
            ensure!(watch.next == items.end, "the test ended before item {}: {why}", watch.next);
            return Ok(items.end);
        }
        let Some(failed) = watch.running else {
            let text: Vec<String> = watch.lines.into();
            bail!("the test ended outside an item: {status}\n{}", text.join("\n"));
        };
        let verdict = if status.code() == Some(124) { Verdict::Hung } else { Verdict::Failed };
        let text: Vec<String> = watch.lines.into();
        println!("{} {failed} failed:\n{}", self.campaign.name, text.join("\n"));
        add(failed, verdict, watch.begun.elapsed().as_secs_f64(), text.join("\n").into())?;
        Ok(failed + 1)
    }
}

/// Parses the output of a campaign's test.
struct Watch {
    /// The item that is running.
    running: Option<u64>,
    /// The first item that has not ended.
    next: u64,
    begun: Instant,
    /// The last lines of output, at most `KEPT_LINES`, since the item began.
    lines: VecDeque<String>,
    shows: bool,
}

impl Watch {
    fn new(next: u64, shows: bool) -> Self {
        Self { running: None, next, begun: Instant::now(), lines: VecDeque::new(), shows }
    }

    /// Parses a line. Returns an item that has ended, with its figures.
    fn feed(&mut self, line: &str) -> Option<(u64, serde_json::Value)> {
        // The harness may have printed the name of the test at the beginning of the line.
        let said = line.find("campaign ").map(|at| line[at + 9..].split(' ').collect::<Vec<_>>());
        match said.as_deref() {
            Some(["begin", item]) => {
                self.running = item.parse().ok();
                self.begun = Instant::now();
                self.lines.clear();
                None
            }
            Some(["end", item, figures @ ..]) => {
                let item: u64 = item.parse().ok().filter(|item| self.running == Some(*item))?;
                self.running = None;
                self.next = item + 1;
                let figures = figures.join(" ");
                let parsed = serde_json::from_str(&figures);
                Some((item, parsed.unwrap_or(serde_json::Value::String(figures))))
            }
            _ => {
                if self.shows {
                    println!("{line}");
                }
                self.lines.push_back(line.to_owned());
                if self.lines.len() > KEPT_LINES {
                    self.lines.pop_front();
                }
                None
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_that_wait_become_batches() {
        assert_eq!(batches(&[1, 2, 3, 5, 6], 2), [1..3, 3..4, 5..7]);
        assert!(batches(&[], 2).is_empty());
        assert!(range("3..3").is_err() && range("3").is_err());
        assert_eq!(range("3..5"), Ok(3..5));
    }

    #[test]
    fn the_output_of_a_test_is_understood() {
        let mut watch = Watch::new(7, false);
        assert_eq!(watch.feed("running 1 test"), None);
        assert_eq!(watch.feed("test campaign::campaign_of_seeds ... campaign begin 7"), None);
        assert_eq!((watch.running, watch.lines.len()), (Some(7), 0));
        assert_eq!(watch.feed("seed 7: something"), None);
        assert_eq!(watch.feed("campaign end 7 {\"lives\": 3}"), Some((7, serde_json::json!({ "lives": 3 }))));
        assert_eq!((watch.running, watch.next), (None, 8));
        assert_eq!(watch.feed("campaign end 9 {}"), None, "it did not begin");
    }
}
