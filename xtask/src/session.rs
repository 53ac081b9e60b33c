//! `cargo xtask session`: the session that README shows, run on a store of its own.
//!
//! Prints each command with its output, and draws them as an animated picture. Nothing is written into the
//! picture that a command did not print. Its pauses are those of the run, the long ones shortened.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

use crate::mounted::Mounted;
use crate::process;

/// The commands, with `ID` for the drive that fails.
const COMMANDS: [&str; 8] = [
    "dd if=/dev/urandom of=mnt/model.bin bs=1M count=512 status=none && sync mnt/model.bin && sha256sum mnt/model.bin",
    "penstock drive list | head -3",
    "penstock drive fail ID",
    "penstock status | head -4",
    "sha256sum mnt/model.bin",
    "penstock drive replace ID --yes",
    "penstock array rebuild --wait",
    "penstock array scrub --wait",
];
/// Hexadecimal digits of an identifier that are enough to name a drive.
const ID_DIGITS: usize = 8;
/// Longest pause in the picture, and the pause before a command is typed.
const LONGEST: Duration = Duration::from_secs(3);
const READING: Duration = Duration::from_millis(1200);

/// One command of the session.
struct Step {
    command: String,
    output: Vec<String>,
    took: Duration,
}

/// Runs the session; writes the picture to `svg` if there is one.
pub(crate) fn run(svg: Option<&Path>) -> Result<()> {
    let mounted = Mounted::start(true, "4G")?;
    let id = first_drive(&mounted)?;
    let mut steps = Vec::new();
    for command in COMMANDS {
        let command = command.replace("ID", &id);
        println!("    $ {command}");
        let step = step(&mounted, command)?;
        step.output.iter().for_each(|line| println!("    {line}"));
        steps.push(step);
    }
    match svg {
        Some(path) => {
            std::fs::write(path, picture(&steps)).with_context(|| format!("cannot write {}", path.display()))
        }
        None => Ok(()),
    }
}

/// The first digits of the first drive's identifier.
fn first_drive(mounted: &Mounted) -> Result<String> {
    let mut list = Command::new(mounted.program());
    list.args(["drive", "list", "--json"]).current_dir(mounted.home());
    let output = list.output()?;
    let drives: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let id = drives[0]["id"].as_str().context("`penstock drive list` names no drive")?;
    Ok(id.chars().take(ID_DIGITS).collect())
}

fn step(mounted: &Mounted, command: String) -> Result<Step> {
    let programs = mounted.program().parent().context("the program is in a folder")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut shell = Command::new("sh");
    shell.args(["-c", &command]).current_dir(mounted.home());
    shell.env("PATH", format!("{}:{path}", programs.display())).env("LC_ALL", "C");
    let mut output = Vec::new();
    let started = Instant::now();
    let status = process::stream(&mut shell, &mut |line| output.push(line.to_owned()))?;
    ensure!(status.success(), "`{command}` failed: {status}\n{}", output.join("\n"));
    Ok(Step { command, output, took: started.elapsed() })
}

/// Draws the session. Each line appears after a delay; without animations all of them are there.
fn picture(steps: &[Step]) -> String {
    let mut lines: Vec<(Duration, &str, String)> = Vec::new();
    let mut at = Duration::ZERO;
    for step in steps {
        lines.push((at, "command", format!("$ {}", step.command)));
        at += step.took.min(LONGEST);
        lines.extend(step.output.iter().map(|line| (at, "output", line.clone())));
        at += READING;
    }
    let columns = lines.iter().map(|(_, _, line)| line.chars().count()).max().unwrap_or(0);
    let (width, height) = (columns as f64 * 7.25 + 32.0, lines.len() as f64 * 18.0 + 32.0);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" \
         aria-label=\"A drive fails, is replaced, and is rebuilt\">\n<style>\n\
         text {{ font: 12px ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace; white-space: pre; \
         animation: appear 1ms both }}\n\
         .command {{ fill: #8fd18f }}\n.output {{ fill: #d8dee9 }}\n\
         @keyframes appear {{ from {{ visibility: hidden }} }}\n\
         @media (prefers-reduced-motion: reduce) {{ text {{ animation: none }} }}\n</style>\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#1e2229\"/>\n"
    );
    for (row, (at, class, line)) in lines.iter().enumerate() {
        let (y, delay) = (row * 18 + 28, at.as_secs_f64());
        let line = line.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
        let _ = writeln!(
            svg,
            "<text class=\"{class}\" x=\"16\" y=\"{y}\" style=\"animation-delay: {delay:.1}s\">{line}</text>"
        );
    }
    svg + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_has_every_line_at_its_time() {
        let step = |command: &str, output: &[&str], seconds| Step {
            command: command.into(),
            output: output.iter().map(|line| (*line).to_owned()).collect(),
            took: Duration::from_secs(seconds),
        };
        let svg = picture(&[step("a && b", &["1 < 2"], 1), step("c", &["x", "y"], 60)]);
        let line = |y: u32, class: &str, delay: &str, text: &str| {
            format!(
                "<text class=\"{class}\" x=\"16\" y=\"{y}\" style=\"animation-delay: {delay}s\">{text}</text>"
            )
        };
        for wanted in [
            line(28, "command", "0.0", "$ a &amp;&amp; b"),
            line(46, "output", "1.0", "1 &lt; 2"),
            line(64, "command", "2.2", "$ c"),
            line(82, "output", "5.2", "x"),
            line(100, "output", "5.2", "y"),
        ] {
            assert!(svg.contains(&wanted), "{wanted} is missing in {svg}");
        }
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
    }
}
