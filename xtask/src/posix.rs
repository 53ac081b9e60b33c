//! `cargo xtask posix`: runs pjdfstest, and optionally fsx, on a mount of the real program.
//!
//! Makes a store in a temporary folder, mounts it, runs the suites, and removes what it made. pjdfstest runs
//! as root and switches to two ordinary users, so every user can enter the folder.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::mounted::Mounted;
use crate::{process, tools};

/// The highest number of cases that may be skipped: 13 remount read-only, and one needs a limit on links,
/// which the C library does not know for a FUSE mount.
const MOST_SKIPPED: u64 = 14;
/// The number of runs of fsx, with seeds from 1 on. A seed determines one sequence of operations.
pub(crate) const SEEDS: u64 = 4;

pub(crate) fn run(fsx: Option<u64>, cases: &[String]) -> Result<()> {
    let suite = tools::program("pjdfstest", "0.2.2")?;
    let exerciser = fsx.map(|count| Ok::<_, anyhow::Error>((tools::program("fsx", "0.3.2")?, count)));
    let exerciser = exerciser.transpose()?;
    let configuration = configuration()?;
    let mounted = Mounted::start(false, "512M")?;
    run_suite(&suite, &configuration, &mounted, cases)?;
    match exerciser {
        Some((program, count)) => run_fsx(&program, count, &mounted),
        None => Ok(()),
    }
}

/// Returns two users other than root with the names of their groups. pjdfstest takes exactly two.
fn users() -> Result<Vec<(String, String)>> {
    let (passwd, groups) = (fs::read_to_string("/etc/passwd")?, fs::read_to_string("/etc/group")?);
    let field = |line: &str, at: usize| line.split(':').nth(at).unwrap_or_default().to_owned();
    let user = |name: &&str| {
        let group = field(passwd.lines().find(|line| field(line, 0) == *name)?, 3);
        Some(((*name).to_owned(), field(groups.lines().find(|line| field(line, 2) == group)?, 0)))
    };
    let found: Vec<_> = ["nobody", "tests", "daemon", "bin"].iter().filter_map(user).take(2).collect();
    ensure!(found.len() == 2, "two of the users nobody, tests, daemon and bin are needed");
    Ok(found)
}

fn configuration() -> Result<String> {
    let users: Vec<String> =
        users()?.into_iter().map(|(user, group)| format!("[\"{user}\", \"{group}\"]")).collect();
    Ok(format!(
        "[features]\nposix_fallocate = {{}}\nrename_ctime = {{}}\nutimensat = {{}}\nutime_now = {{}}\n\
         stat_st_birthtime = {{}}\n[settings]\nnaptime = 0.05\n[dummy_auth]\nentries = [{}]\n",
        users.join(", ")
    ))
}

/// Prints the cases that did not pass, with their reasons. Fails if a case failed or too many were skipped.
fn run_suite(suite: &Path, configuration: &str, mounted: &Mounted, cases: &[String]) -> Result<()> {
    let file = mounted.home().join("pjdfstest.toml");
    fs::write(&file, configuration)?;
    let mut command = Command::new(suite);
    command.arg("-c").arg(&file).arg("-p").arg(mounted.path()).arg("-s").arg(mounted.home().join("other"));
    let mut summary = None;
    let status = process::stream(command.args(cases), &mut |line| {
        if !line.is_empty() && line.split_whitespace().last() != Some("ok") {
            println!("{line}");
        }
        if line.starts_with("Summary: ") {
            summary = Some(line.to_owned());
        }
    })?;
    let summary = summary.context("pjdfstest did not come to its end")?;
    let (failed, skipped) = (count(&summary, "failed")?, count(&summary, "skipped")?);
    ensure!(status.success() && failed == 0, "{failed} cases of pjdfstest failed");
    ensure!(
        skipped <= MOST_SKIPPED,
        "{skipped} cases of pjdfstest were skipped, at most {MOST_SKIPPED} may be"
    );
    Ok(())
}

/// Returns the number before a word in pjdfstest's last line.
fn count(summary: &str, word: &str) -> Result<u64> {
    let mut parts = summary.trim_start_matches("Summary: ").split(", ");
    let found = parts.find_map(|part| part.strip_suffix(word)?.trim().parse().ok());
    found.with_context(|| format!("pjdfstest does not say how many {word}: {summary}"))
}

/// Lists every operation that the mount supports. Reads, writes, mapped access, allocation, punched holes and
/// copies come ten times as often as the others.
pub(crate) fn fsx_configuration() -> String {
    let rare = ["close_open", "invalidate", "truncate", "fsync", "fdatasync", "sendfile", "posix_fadvise"];
    let often = ["read", "write", "mapread", "mapwrite", "posix_fallocate", "punch_hole", "copy_file_range"];
    let weights = rare.map(|name| format!("{name} = 1\n")).concat()
        + &often.map(|name| format!("{name} = 10\n")).concat();
    format!("flen = 4194304\n[weights]\n{weights}")
}

fn run_fsx(program: &Path, operations: u64, mounted: &Mounted) -> Result<()> {
    let file = mounted.home().join("fsx.toml");
    fs::write(&file, fsx_configuration())?;
    for seed in 1..=SEEDS {
        println!("fsx: seed {seed}, {} operations", operations.div_ceil(SEEDS));
        let mut command = Command::new(program);
        command.args(["-q", "-N", &operations.div_ceil(SEEDS).to_string(), "-S", &seed.to_string(), "-f"]);
        command.arg(&file).arg("-P").arg(mounted.home()).arg(mounted.path().join("fsx"));
        let mut lines = Vec::new();
        let status = process::stream(&mut command, &mut |line| lines.push(line.to_owned()))?;
        if !status.success() {
            bail!("fsx with seed {seed}: {status}\n{}", lines.join("\n"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_line_is_understood() {
        let line = "Summary: 3 failed, 14 skipped, 384 passed, 0 expected failures, 398 total";
        assert_eq!([count(line, "failed").unwrap(), count(line, "skipped").unwrap()], [3, 14]);
        assert!(count("Summary: none", "failed").is_err());
    }
}
