//! `cargo xtask show LINE`: runs the full form of an acceptance line, on real input and at full length.
//!
//! `make test` runs a short form of each line. The full form is the same test code with `PENSTOCK_SHOW=full`.

use anyhow::{Result, bail, ensure};

use crate::process;
use crate::test::Tally;
use crate::workspace::cargo;

struct Line {
    id: &'static str,
    what: &'static str,
    /// Package, test binary and the ignored test in it. Without a binary, all tests of the package run.
    runs: &'static [(&'static str, Option<(&'static str, &'static str)>)],
    /// True for a release build, where speed is shown.
    release: bool,
}

const LINES: [Line; 8] = [
    Line::new(
        "01.1",
        "real input through the mount",
        &[("penstock-cli", Some(("system", "show_real_input")))],
    ),
    Line::new(
        "01.2",
        "kill -9 at any moment loses nothing that was synced",
        &[("penstock-cli", Some(("system", "show_kill")))],
    ),
    Line::new(
        "01.3",
        "power cuts at every write",
        &[
            ("penstock-array", Some(("power", "show_power_cuts"))),
            ("penstock-kv", Some(("power", "show_power_cuts"))),
            ("penstock-world", Some(("world", "show_power_cuts"))),
        ],
    ),
    Line::new(
        "01.4",
        "rot is found and repaired",
        &[("penstock-array", Some(("power", "show_rot"))), ("penstock-world", Some(("world", "show_rot")))],
    ),
    Line::new(
        "01.5",
        "kernels equal the reference, every erasure pattern is decoded",
        &[("penstock-raid", None)],
    ),
    Line {
        release: true,
        ..Line::new("01.6", "speed beside its ceiling", &[("penstock-cli", Some(("system", "show_speed")))])
    },
    Line {
        release: true,
        ..Line::new(
            "14.5",
            "rates beside an idle mount, and beside silent and hostile connections",
            &[("penstock-cli", Some(("system", "show_beside")))],
        )
    },
    Line {
        release: true,
        ..Line::new(
            "16.2",
            "the cost of several stacks",
            &[("penstock-cli", Some(("system", "show_stacks_cost")))],
        )
    },
];

impl Line {
    const fn new(
        id: &'static str,
        what: &'static str,
        runs: &'static [(&'static str, Option<(&'static str, &'static str)>)],
    ) -> Line {
        Line { id, what, runs, release: false }
    }

    fn arguments(&self) -> Vec<Vec<&'static str>> {
        let one = |(package, test): &(&'static str, Option<(&'static str, &'static str)>)| {
            let mut arguments = vec!["test", "--locked", "-p", package];
            if self.release {
                arguments.push("--release");
            }
            if let Some((binary, _)) = test {
                arguments.extend(["--test", binary]);
            }
            arguments.push("--");
            if let Some((_, filter)) = test {
                arguments.extend(["--ignored", filter]);
            }
            arguments.push("--nocapture");
            arguments
        };
        self.runs.iter().map(one).collect()
    }
}

/// Runs one acceptance line, or lists all of them without an id.
pub(crate) fn run(id: Option<&str>) -> Result<()> {
    let Some(id) = id else {
        println!("{}", known());
        return Ok(());
    };
    let Some(line) = LINES.iter().find(|line| line.id == id) else {
        bail!("there is no line {id}; known are\n{}", known());
    };
    let mut tally = Tally::default();
    for arguments in line.arguments() {
        println!("{}: {}\nPENSTOCK_SHOW=full cargo {}", line.id, line.what, arguments.join(" "));
        let mut command = cargo();
        command.args(arguments).env("PENSTOCK_SHOW", "full");
        if let Some(python) = crate::tools::python_or_warn() {
            command.env("PENSTOCK_PYTHON", python);
        }
        let status = process::stream(&mut command, &mut |line| {
            tally.feed(line);
            println!("{line}");
        })?;
        tally.end(status);
    }
    for (pid, line) in process::kill_all() {
        println!("warning: process {pid} was left running ({line}); killed");
    }
    println!("\n{tally}");
    ensure!(!tally.has_failed(), "line {id} does not hold");
    ensure!(tally.passed() > 0, "line {id} was not shown: no test ran to its end");
    Ok(())
}

fn known() -> String {
    LINES.map(|line| format!("  {}  {}", line.id, line.what)).join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_line_lists_the_known_ones() {
        let error = run(Some("99.9")).unwrap_err().to_string();
        assert!(error.contains("no line 99.9") && error.contains("01.1") && error.contains("01.6"));
    }

    #[test]
    fn lines_become_commands() {
        let of = |id: &str| {
            let line = LINES.iter().find(|line| line.id == id).unwrap();
            line.arguments().iter().map(|words| words.join(" ")).collect::<Vec<_>>()
        };
        assert_eq!(
            of("01.4"),
            [
                "test --locked -p penstock-array --test power -- --ignored show_rot --nocapture",
                "test --locked -p penstock-world --test world -- --ignored show_rot --nocapture",
            ]
        );
        assert_eq!(of("01.3").len(), 3);
        assert_eq!(of("01.5"), ["test --locked -p penstock-raid -- --nocapture"]);
        assert!(of("01.6")[0].contains("-p penstock-cli --release --test system"));
    }
}
