//! The outcome of a comparison: tables for people, JSON for programs.

use crate::lines::{Aim, BUILDS, JUICEFS, LINES, Line, PEERS, PeerId};
use crate::proc::Host;
use crate::rounds::{Figure, Samples};
use serde::Serialize;
use std::fmt::Write;

/// All results of a run.
#[derive(Debug, Serialize)]
pub(crate) struct Outcome {
    pub(crate) host: Host,
    /// Share (0 to 1) of all processor time during the run that went neither to the peers nor to the work.
    pub(crate) other_work: f64,
    pub(crate) rounds: usize,
    pub(crate) seconds: f64,
    pub(crate) versions: Vec<(PeerId, String)>,
    /// Peers that did not start or failed in a round, with the reason.
    pub(crate) skipped: Vec<(PeerId, String)>,
    pub(crate) lines: Vec<Row>,
    /// Figures that were recorded elsewhere and not measured: workload and figure.
    pub(crate) juicefs_recorded: [(&'static str, f64); JUICEFS.len()],
}

/// The results of one workload.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    id: &'static str,
    label: &'static str,
    unit: &'static str,
    figures: Vec<(PeerId, Figure)>,
    aims: Vec<Verdict>,
}

/// An aim, and the ratio that was reached.
#[derive(Debug, Serialize)]
struct Verdict {
    #[serde(flatten)]
    aim: Aim,
    reached: f64,
    met: bool,
}

impl Row {
    pub(crate) fn new(line: &Line, samples: &Samples) -> Self {
        let figure = |(peer, _)| samples.figure(line, peer).map(|figure| (peer, figure));
        let figures: Vec<(PeerId, Figure)> = PEERS.into_iter().filter_map(figure).collect();
        let mut row = Self { id: line.id, label: line.label, unit: line.unit().0, figures, aims: Vec::new() };
        for aim in line.aims {
            if let Some(reached) = row.ratio(aim.of, aim.against) {
                row.aims.push(Verdict { aim: *aim, reached, met: reached >= aim.ratio });
            }
        }
        row
    }

    fn figure(&self, peer: PeerId) -> Option<&Figure> {
        self.figures.iter().find(|(found, _)| *found == peer).map(|(_, figure)| figure)
    }

    fn ratio(&self, of: PeerId, against: PeerId) -> Option<f64> {
        Some(self.figure(of)?.median / self.figure(against)?.median)
    }

    /// Formats the ratio of two peers, with the aim if there is one.
    fn against(&self, of: PeerId, against: PeerId) -> String {
        let Some(ratio) = self.ratio(of, against) else { return "-".into() };
        let aim = self.aims.iter().find(|verdict| verdict.aim.of == of && verdict.aim.against == against);
        let as_times = against == PeerId::GlusterFs;
        let text = |ratio: f64| match as_times {
            true => format!("{ratio:.1}x"),
            false => format!("{:.0} %", ratio * 100.0),
        };
        match aim {
            None => text(ratio),
            Some(verdict) => {
                let sign = if verdict.met { "met" } else { "below" };
                format!("{} (aim {}: {sign})", text(ratio), text(verdict.aim.ratio).replace(".0x", "x"))
            }
        }
    }

    fn cell(&self, peer: PeerId) -> String {
        match self.figure(peer) {
            None => "-".into(),
            Some(figure) if figure.runs.len() == 1 => number(figure.median),
            Some(figure) => {
                format!("{} ({} to {})", number(figure.median), number(figure.lowest), number(figure.highest))
            }
        }
    }

    fn cpu(&self, peer: PeerId) -> String {
        self.figure(peer).map_or("-".into(), |figure| format!("{:.1}", figure.cpu_us_per_unit))
    }

    fn cpu_seconds(&self, peer: PeerId) -> String {
        self.figure(peer).map_or("-".into(), |figure| format!("{:.2}", figure.cpu_seconds))
    }
}

/// Formats a figure with its thousands separated, and with one decimal below 10.
pub(crate) fn number(value: f64) -> String {
    if value < 10.0 {
        return format!("{value:.1}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Appends a Markdown table, or nothing if there are no rows.
pub(crate) fn table(out: &mut String, title: &str, head: &[&str], rows: Vec<Vec<String>>) {
    if rows.is_empty() {
        return;
    }
    let line = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    let _ = write!(out, "\n{title}\n\n");
    out.push_str(&line(head.iter().map(|cell| (*cell).to_owned()).collect()));
    out.push_str(&format!("{}|\n", "|---".repeat(head.len())));
    rows.into_iter().for_each(|row| out.push_str(&line(row)));
}

impl Outcome {
    /// Formats the results as Markdown tables.
    pub(crate) fn text(&self) -> String {
        use PeerId::{Degraded, Disk, GlusterFs, Nothing, Penstock, PenstockOnDisk};
        let mut out = format!(
            "{}\nother work took {:.0} % of the processors; {} rounds in {:.0} s\n",
            self.host,
            self.other_work * 100.0,
            self.rounds,
            self.seconds
        );
        for (peer, version) in &self.versions {
            let _ = writeln!(out, "{}: {version}", name(*peer));
        }
        for (peer, why) in &self.skipped {
            let _ = writeln!(out, "SKIPPED {}: {why}", name(*peer));
        }
        let rows = |pick: &dyn Fn(&Row) -> bool, cells: &dyn Fn(&Row) -> Vec<String>| -> Vec<Vec<String>> {
            self.lines.iter().filter(|row| pick(row)).map(cells).collect()
        };
        let has = |peer: PeerId| move |row: &Row| row.figure(peer).is_some();
        let label = |row: &Row| format!("{}, {}", row.label, row.unit);
        let juicefs = |row: &Row| {
            JUICEFS.iter().find(|(id, _)| *id == row.id).map_or("-".into(), |(_, figure)| number(*figure))
        };
        table(
            &mut out,
            "Drives in memory: median (lowest to highest). JuiceFS was recorded elsewhere and is not measured here.",
            &["", "Penstock", "GlusterFS", "Penstock is", "does nothing", "Penstock is", "JuiceFS, recorded"],
            rows(&has(Penstock), &|row| {
                let [of_gluster, of_nothing] = [GlusterFs, Nothing].map(|peer| row.against(Penstock, peer));
                let cells = [Penstock, GlusterFs, Nothing].map(|peer| row.cell(peer));
                let [mine, gluster, nothing] = cells;
                vec![label(row), mine, gluster, of_gluster, nothing, of_nothing, juicefs(row)]
            }),
        );
        table(
            &mut out,
            "Two data drives of six lost",
            &["", "healthy", "degraded", "degraded is", "CPU us per unit, healthy", "degraded"],
            rows(&has(Degraded), &|row| {
                let mut cells = vec![label(row), row.cell(Penstock), row.cell(Degraded)];
                cells.extend([row.against(Degraded, Penstock), row.cpu(Penstock), row.cpu(Degraded)]);
                cells
            }),
        );
        table(
            &mut out,
            "On the disk",
            &["", "the disk's own", "Penstock on the same disk", "Penstock is", "CPU us per unit"],
            rows(&has(PenstockOnDisk), &|row| {
                let mut cells = vec![label(row), row.cell(Disk), row.cell(PenstockOnDisk)];
                cells.extend([row.against(PenstockOnDisk, Disk), row.cpu(PenstockOnDisk)]);
                cells
            }),
        );
        for (today, before) in BUILDS {
            table(
                &mut out,
                &format!("This build beside the one before: {}", name(today)),
                &["", "now", "before", "now is", "CPU us per unit, now", "before"],
                rows(&has(before), &|row| {
                    let mut cells = vec![label(row), row.cell(today), row.cell(before)];
                    cells.extend([row.against(today, before), row.cpu(today), row.cpu(before)]);
                    cells
                }),
            );
        }
        table(
            &mut out,
            "Processor time of the peer's processes: seconds for the workload, and microseconds per operation or MB",
            &["", "Penstock s", "GlusterFS s", "nothing s", "Penstock us", "GlusterFS us", "nothing us"],
            rows(&|_| true, &|row| {
                let seconds = [Penstock, GlusterFs, Nothing].map(|peer| row.cpu_seconds(peer));
                let each = [Penstock, GlusterFs, Nothing].map(|peer| row.cpu(peer));
                [vec![label(row)], seconds.to_vec(), each.to_vec()].concat()
            }),
        );
        let verdicts = || self.lines.iter().flat_map(|row| &row.aims);
        let met = verdicts().filter(|verdict| verdict.met).count();
        let _ = writeln!(out, "\n{met} of {} aims met", verdicts().count());
        out
    }
}

/// Returns the name of a peer in the tables.
pub(crate) fn name(peer: PeerId) -> &'static str {
    PEERS.iter().find(|(found, _)| *found == peer).map_or("unknown", |(_, name)| name)
}

/// Returns the workloads that `only` names, or all if it is empty. An unknown name is an error.
pub(crate) fn chosen(only: &[String]) -> Result<Vec<Line>, String> {
    if let Some(unknown) = only.iter().find(|id| !LINES.iter().any(|line| line.id == *id)) {
        let known = LINES.map(|line| line.id).join(", ");
        return Err(format!("there is no workload {unknown}; known are {known}, files"));
    }
    Ok(LINES.into_iter().filter(|line| only.is_empty() || only.iter().any(|id| id == line.id)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_at_a_glance() {
        let table = [(0.25, "0.2"), (9.96, "10.0"), (10.4, "10"), (999.6, "1,000"), (1234567.0, "1,234,567")];
        for (value, text) in table {
            assert_eq!(number(value), text);
        }
    }

    #[test]
    fn lines_are_chosen_by_name() {
        assert_eq!(chosen(&[]).unwrap().len(), LINES.len());
        let two = chosen(&["stat".into(), "read".into()]).unwrap();
        assert_eq!(two.iter().map(|line| line.id).collect::<Vec<_>>(), ["read", "stat"]);
        assert!(chosen(&["nonsense".into()]).unwrap_err().contains("known are write, read"));
    }
}
