//! Reads and appends to the results of campaigns, a file of JSON lines.
//!
//! A line records one run of one item: `campaign`, `item`, `commit`, `with` (other settings that determine
//! the result), `verdict` (`passed`, `failed`, `hung`), `ended_s` (seconds since 1970), `seconds`, and
//! `figures`, or `output` if the item did not pass. Lines are never changed or removed. The last line of an
//! item counts. A line that a crash cut short is skipped.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::SystemTime;

use anyhow::{Context, Result};
use serde_json::{Value, json};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Passed,
    Failed,
    /// The process ran out of time while this item was running.
    Hung,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Failed => "failed",
            Self::Hung => "hung",
        }
    }
}

/// The results of one campaign at one commit, and the file that they are appended to.
pub(super) struct Results {
    file: File,
    campaign: String,
    with: String,
    commit: String,
    items: BTreeMap<u64, bool>,
}

impl Results {
    /// Opens or creates the file and reads the results of this campaign with these settings at this commit.
    /// Results of a `-dirty` commit are ignored, because no commit identifies the tree that ran.
    pub(super) fn open(path: &Path, campaign: &str, with: &str, commit: &str) -> Result<Self> {
        let mut items = BTreeMap::new();
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        for line in text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok()) {
            let mine = line["campaign"] == campaign && line["with"] == with && line["commit"] == commit;
            if let (true, Some(item)) = (mine && !commit.ends_with("-dirty"), line["item"].as_u64()) {
                items.insert(item, line["verdict"] == Verdict::Passed.word());
            }
        }
        let mut file = File::options().create(true).append(true).open(path)?;
        if !text.is_empty() && !text.ends_with('\n') {
            file.write_all(b"\n")?;
        }
        let [campaign, with, commit] = [campaign, with, commit].map(str::to_owned);
        // An item that failed before runs again and counts only after that.
        items.retain(|_, passed| *passed);
        Ok(Self { file, campaign, with, commit, items })
    }

    pub(super) fn has_passed(&self, item: u64) -> bool {
        self.items.get(&item).copied().unwrap_or(false)
    }

    /// Appends a line. `what` is the figures if the item passed, otherwise the last lines of its output.
    pub(super) fn add(&mut self, item: u64, verdict: Verdict, seconds: f64, what: Value) -> Result<()> {
        let ended_s = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_secs();
        let mut line = json!({
            "campaign": self.campaign,
            "item": item,
            "commit": self.commit,
            "with": self.with,
            "verdict": verdict.word(),
            "ended_s": ended_s,
            "seconds": (seconds * 1000.0).round() / 1000.0,
        });
        let passed = verdict == Verdict::Passed;
        line[if passed { "figures" } else { "output" }] = what;
        self.file.write_all(format!("{line}\n").as_bytes()).context("cannot write the results")?;
        self.items.insert(item, passed);
        Ok(())
    }

    pub(super) fn passed(&self) -> usize {
        self.items.values().filter(|passed| **passed).count()
    }

    pub(super) fn has_failed(&self) -> bool {
        self.passed() < self.items.len()
    }

    /// Lists the failed items in words, or says that none failed.
    pub(super) fn failures(&self) -> String {
        let failed: Vec<String> =
            self.items.iter().filter(|(_, passed)| !**passed).map(|(item, _)| item.to_string()).collect();
        if failed.is_empty() { "none failed".to_owned() } else { format!("failed: {}", failed.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_passed_with_this_commit_is_known_again() {
        let path = std::env::temp_dir().join(format!("penstock-results-{}.jsonl", std::process::id()));
        let open = |with: &str, commit: &str| Results::open(&path, "cuts", with, commit).unwrap();
        let mut results = open("", "abc");
        for (item, verdict) in [(1, Verdict::Passed), (2, Verdict::Failed), (3, Verdict::Hung)] {
            results.add(item, verdict, 0.5, json!({})).unwrap();
        }
        assert_eq!((results.passed(), results.failures().as_str()), (1, "failed: 2, 3"));
        std::fs::write(&path, std::fs::read_to_string(&path).unwrap() + "{\"campaign\": \"cu").unwrap();
        let mut results = open("", "abc");
        assert!(results.has_passed(1) && !results.has_passed(2) && !results.has_failed());
        results.add(2, Verdict::Passed, 0.5, json!({})).unwrap();
        assert!(open("", "abc").has_passed(2), "a line that was cut off harms none after it");
        assert!(!open("", "abd").has_passed(1) && !open("9 s", "abc").has_passed(1));
        std::fs::remove_file(&path).unwrap();
    }
}
