//! Parses the output of `cargo test` and counts passed, failed and skipped tests.
//!
//! The format is that of Rust's own test harness: a header per test binary from cargo, then
//! `running N tests`, a line per test, the output of passed tests (with `--show-output`) and their names, the
//! output of failed tests and their names, and one result line. A run that began but has no result line has
//! died. It counts as failed, whatever cargo's exit status is.

use std::collections::BTreeSet;
use std::fmt;
use std::process::ExitStatus;

/// The part of the harness's output that the parser is in.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Part {
    /// Between runs: output of cargo itself.
    #[default]
    Cargo,
    Tests,
    PassedOutput,
    PassedNames,
    FailedOutput,
    FailedNames,
}

/// Counts over all checks and test binaries, and the state of the parser.
#[derive(Default)]
pub(crate) struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
    failures: Vec<String>,
    skips: Vec<String>,
    ignored: Vec<String>,

    part: Part,
    /// The test binary that cargo announced, and the number of result lines since then.
    binary: Option<(String, usize)>,
    /// The passed test whose output is being read.
    current: Option<String>,
    skips_of_run: BTreeSet<String>,
    failures_of_run: Vec<String>,
}

impl Tally {
    /// Counts a check that passed.
    pub(crate) fn pass(&mut self) {
        self.passed += 1;
    }

    /// Counts a failure that belongs to no test.
    pub(crate) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// True if anything failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed > 0
    }

    /// The number of tests and checks that passed, without those that printed SKIPPED.
    pub(crate) fn passed(&self) -> usize {
        self.passed
    }

    /// Parses one line. Returns true if the line is to be shown.
    pub(crate) fn feed(&mut self, line: &str) -> bool {
        let plain = without_escapes(line);
        let plain = plain.as_str();
        if let Some(binary) = header(plain) {
            self.close_binary();
            self.binary = Some((binary.to_owned(), 0));
            return true;
        }
        if is_running(plain) && matches!(self.part, Part::Cargo | Part::Tests) {
            self.close_run();
            self.part = Part::Tests;
            return true;
        }
        match self.part {
            Part::Cargo => true,
            Part::Tests => self.feed_test(plain),
            Part::PassedOutput => self.feed_passed_output(plain),
            Part::PassedNames => match plain {
                "failures:" => {
                    self.part = Part::FailedOutput;
                    true
                }
                _ => self.feed_result(plain),
            },
            Part::FailedOutput => {
                if plain == "failures:" {
                    self.part = Part::FailedNames;
                }
                true
            }
            Part::FailedNames => {
                match plain.strip_prefix("    ") {
                    Some(name) => self.failures_of_run.push(name.to_owned()),
                    // A failed test itself printed the earlier line, so the lines after that were not names.
                    None if plain == "failures:" => self.failures_of_run.clear(),
                    None => {
                        self.feed_result(plain);
                    }
                }
                true
            }
        }
    }

    fn feed_test(&mut self, line: &str) -> bool {
        match line {
            "successes:" => {
                self.part = Part::PassedOutput;
                return false;
            }
            "failures:" => self.part = Part::FailedOutput,
            _ => {
                if let Some((name, reason)) = ignored(line) {
                    let binary = self.binary_name();
                    self.ignored.push(format!("ignored {name} in {binary}{reason}"));
                } else if let Some(at) = line.find("SKIPPED ").filter(|at| is_skip_place(&line[..*at])) {
                    // The line was not captured: a child process wrote it, or the run used `--nocapture`.
                    let name = line[at..].split_once(':').map_or(&line[at..], |(name, _)| name);
                    self.skip(name.trim_start_matches("SKIPPED ").to_owned(), &line[at..]);
                } else {
                    self.feed_result(line);
                }
            }
        }
        true
    }

    /// Parses a line of the output of passed tests. Only SKIPPED lines are shown, one per test.
    fn feed_passed_output(&mut self, line: &str) -> bool {
        if line == "successes:" {
            self.part = Part::PassedNames;
            self.current = None;
        } else if let Some(name) =
            line.strip_prefix("---- ").and_then(|rest| rest.strip_suffix(" stdout ----"))
        {
            self.current = Some(name.to_owned());
        } else if line.starts_with("SKIPPED ")
            && let Some(name) = self.current.clone()
        {
            return self.skip(name, line);
        }
        false
    }

    fn skip(&mut self, name: String, line: &str) -> bool {
        let is_new = self.skips_of_run.insert(name);
        if is_new {
            self.skips.push(line.to_owned());
        }
        is_new
    }

    /// Counts a result line. Returns false if the line is not one.
    fn feed_result(&mut self, line: &str) -> bool {
        let Some([passed, failed, ignored]) = result(line) else { return false };
        let skips = self.skips_of_run.len();
        let binary = self.binary_name();
        if skips > passed {
            self.fail(format!("{binary}: {skips} tests say SKIPPED and only {passed} passed"));
        }
        self.passed += passed.saturating_sub(skips);
        self.skipped += skips + ignored;
        self.failed += failed;
        self.failures.extend(self.failures_of_run.drain(..).map(|name| format!("{name} in {binary}")));
        self.skips_of_run.clear();
        self.part = Part::Cargo;
        if let Some((_, results)) = &mut self.binary {
            *results += 1;
        }
        true
    }

    /// Counts the current run as failed if it has not reached its result line.
    fn close_run(&mut self) {
        if self.part != Part::Cargo {
            let binary = self.binary_name();
            self.fail(format!("{binary}: died before its result line"));
            self.part = Part::Cargo;
            self.skips_of_run.clear();
            self.failures_of_run.clear();
            if let Some((_, results)) = &mut self.binary {
                *results += 1;
            }
        }
    }

    fn close_binary(&mut self) {
        self.close_run();
        if let Some((binary, 0)) = self.binary.take() {
            self.fail(format!("{binary}: ended before it ran its tests"));
        }
    }

    /// Ends the count when cargo has ended. A run or a binary that is still open counts as failed.
    pub(crate) fn end(&mut self, status: ExitStatus) {
        self.close_binary();
        // A failed test explains a non-zero exit status. Without one, the build failed or cargo itself did.
        if !status.success() && self.failures.iter().all(|failure| failure.starts_with("check ")) {
            self.fail(format!("cargo test: {status}; its output is above"));
        }
    }

    fn binary_name(&self) -> String {
        self.binary.as_ref().map_or_else(|| "a test binary".to_owned(), |(name, _)| name.clone())
    }
}

/// The summary at the end: reasons of skipped tests, names of failures, and the counts.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for line in self.skips.iter().chain(&self.ignored) {
            writeln!(f, "{line}")?;
        }
        for failure in &self.failures {
            writeln!(f, "FAILED {failure}")?;
        }
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// Returns the name of the test binary if the line is cargo's header, with cargo's indentation.
fn header(line: &str) -> Option<&str> {
    if let Some(name) = line.strip_prefix("   Doc-tests ") {
        return Some(name);
    }
    let rest = line.strip_prefix("     Running ")?;
    let (source, path) = rest.rsplit_once(" (")?;
    let path = path.strip_suffix(')')?;
    let file = path.rsplit('/').next().unwrap_or(path);
    // `unittests src/lib.rs` is the same in every crate. The file name is the name of the crate and a hash.
    Some(file.rsplit_once('-').map_or(source, |(name, _)| name))
}

fn is_running(line: &str) -> bool {
    let count = line
        .strip_prefix("running ")
        .and_then(|rest| rest.strip_suffix(" tests").or_else(|| rest.strip_suffix(" test")));
    count.is_some_and(|count| count.parse::<usize>().is_ok())
}

/// Returns the name and the reason if the line is that of an ignored test.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let reason = verdict.strip_prefix("ignored")?;
    (reason.is_empty() || reason.starts_with(',')).then_some((name, reason))
}

/// True if a SKIPPED line may begin after `before`: at the start of a line, or after the harness's
/// `test name ... `, which has no line end yet.
fn is_skip_place(before: &str) -> bool {
    before.is_empty() || (before.starts_with("test ") && before.ends_with(" ... "))
}

/// Returns the passed, failed and ignored counts if the line is a result line.
fn result(line: &str) -> Option<[usize; 3]> {
    let rest = line.strip_prefix("test result: ")?;
    let (_, counts) = rest.split_once(". ")?;
    let mut found = [None; 3];
    for field in counts.split("; ") {
        if let Some((count, what)) = field.split_once(' ')
            && let Some(index) = ["passed", "failed", "ignored"].iter().position(|known| *known == what)
        {
            found[index] = count.parse().ok();
        }
    }
    Some([found[0]?, found[1]?, found[2]?])
}

/// Removes terminal escape sequences, such as colours.
fn without_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character != '\u{1b}' {
            plain.push(character);
            continue;
        }
        // Either ESC [ parameters letter, or ESC ( letter, which resets the character set.
        match characters.next() {
            Some('[') => while characters.next().is_some_and(|inside| !inside.is_ascii_alphabetic()) {},
            Some('(') => drop(characters.next()),
            _ => {}
        }
    }
    plain
}

#[cfg(test)]
mod tests;
