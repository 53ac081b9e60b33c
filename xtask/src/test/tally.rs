//! Reads what `cargo test` prints and counts.
//!
//! The format is that of Rust's own test harness: a header per test binary from cargo, then `running N tests`,
//! a line per test, the output of passed tests (with `--show-output`) and their names, the output of failed
//! tests and their names, and one result line. A run that began and has no result line has died; it counts
//! as failed, whatever cargo's exit status says.

use std::collections::BTreeSet;
use std::fmt;
use std::process::ExitStatus;

/// Where in the harness's output we are.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Part {
    /// Between runs: cargo speaks.
    #[default]
    Cargo,
    Tests,
    PassedOutput,
    PassedNames,
    FailedOutput,
    FailedNames,
}

/// Counts over all checks and test binaries.
#[derive(Default)]
pub(crate) struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
    failures: Vec<String>,
    skips: Vec<String>,
    ignored: Vec<String>,

    part: Part,
    /// What cargo said it runs, and how many result lines came since.
    binary: Option<(String, usize)>,
    /// The passed test whose output is being read.
    current: Option<String>,
    skips_of_run: BTreeSet<String>,
    failures_of_run: Vec<String>,
}

impl Tally {
    /// Counts a check.
    pub(crate) fn pass(&mut self) {
        self.passed += 1;
    }

    /// Counts a failure that is no test's.
    pub(crate) fn fail(&mut self, what: String) {
        self.failed += 1;
        self.failures.push(what);
    }

    /// Whether the whole is a failure.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed > 0
    }

    /// Tests and checks that passed.
    pub(crate) fn passed(&self) -> usize {
        self.passed
    }

    /// Takes one line; says whether a person wants to see it.
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
                    // a failed test had printed such a line itself: what followed it were no names
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
                    // not captured: a child process wrote it, or the run asked for bare output
                    let name = line[at..].split_once(':').map_or(&line[at..], |(name, _)| name);
                    self.skip(name.trim_start_matches("SKIPPED ").to_owned(), &line[at..]);
                } else {
                    self.feed_result(line);
                }
            }
        }
        true
    }

    /// Only a SKIPPED line is shown, once per test.
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

    /// Counts a result line; says whether it was one.
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

    /// Counts a run that has not come to its result line.
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

    /// Counts what is open when cargo has ended.
    pub(crate) fn end(&mut self, status: ExitStatus) {
        self.close_binary();
        // a failed test explains the status; without one the build failed, or cargo itself
        if !status.success() && self.failures.iter().all(|failure| failure.starts_with("check ")) {
            self.fail(format!("cargo test: {status}; what it says is above"));
        }
    }

    fn binary_name(&self) -> String {
        self.binary.as_ref().map_or_else(|| "a test binary".to_owned(), |(name, _)| name.clone())
    }
}

/// What a person wants at the end: names of what failed, reasons of what was skipped, the counts.
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

/// The name of the test binary in cargo's header, indented as cargo does it.
fn header(line: &str) -> Option<&str> {
    if let Some(name) = line.strip_prefix("   Doc-tests ") {
        return Some(name);
    }
    let rest = line.strip_prefix("     Running ")?;
    let (source, path) = rest.rsplit_once(" (")?;
    let path = path.strip_suffix(')')?;
    let file = path.rsplit('/').next().unwrap_or(path);
    // `unittests src/lib.rs` is the same in every crate; the binary has the crate's name, then a hash
    Some(file.rsplit_once('-').map_or(source, |(name, _)| name))
}

fn is_running(line: &str) -> bool {
    let count = line
        .strip_prefix("running ")
        .and_then(|rest| rest.strip_suffix(" tests").or_else(|| rest.strip_suffix(" test")));
    count.is_some_and(|count| count.parse::<usize>().is_ok())
}

/// Name and reason of an ignored test.
fn ignored(line: &str) -> Option<(&str, &str)> {
    let (name, verdict) = line.strip_prefix("test ")?.rsplit_once(" ... ")?;
    let reason = verdict.strip_prefix("ignored")?;
    (reason.is_empty() || reason.starts_with(',')).then_some((name, reason))
}

/// A SKIPPED line begins a line, or follows the harness's `test name ... `, which has no line end yet.
fn is_skip_place(before: &str) -> bool {
    before.is_empty() || (before.starts_with("test ") && before.ends_with(" ... "))
}

/// Passed, failed and ignored of a result line.
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

/// Drops terminal colours.
fn without_escapes(line: &str) -> String {
    let mut plain = String::with_capacity(line.len());
    let mut characters = line.chars();
    while let Some(character) = characters.next() {
        if character != '\u{1b}' {
            plain.push(character);
            continue;
        }
        // ESC [ parameters letter; ESC ( letter resets the character set
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
