//! Computes the medians of the rounds for each layer, and formats them as tables.

use super::layer::Layer;
use super::{Round, Seconds, Subject};
use crate::proc::Host;
use crate::report::table;
use crate::rounds::median;
use serde::Serialize;

/// All results of a run.
#[derive(Serialize)]
pub(super) struct Outcome {
    pub(super) host: Host,
    pub(super) rounds: u64,
    /// Share (0 to 1) of all processor time that went neither to the store nor to the work: perf and others.
    pub(super) other_work: f64,
    pub(super) step_us: u128,
    pub(super) lines: Vec<Column>,
}

/// One workload. Figures are medians of the rounds, in `unit`.
#[derive(Serialize)]
pub(super) struct Column {
    id: &'static str,
    label: &'static str,
    unit: &'static str,
    rows: Vec<Row>,
    /// The sum of all samples of the process.
    sum: f64,
    /// Processor time of the process as in /proc.
    process: f64,
    /// The same in runs without perf.
    unlooked: f64,
    /// The sum of the samples over the time in /proc: median, lowest and highest.
    covered: [f64; 3],
    /// Share (0 to 1) of the samples that is attributed to a layer.
    attributed: f64,
    /// The kernel's part of the caller's time, which is not in the sum.
    caller: f64,
    functions: Vec<Function>,
}

#[derive(Serialize)]
struct Row {
    layer: Layer,
    own: f64,
    behalf: f64,
}

#[derive(Serialize)]
struct Function {
    layer: Layer,
    name: String,
    cost: f64,
}

impl Column {
    pub(super) fn new(subject: Subject, rounds: &[Round], top: usize) -> Self {
        let scale = subject.scale;
        let cost = |of: &dyn Fn(&Round) -> f64| {
            median(rounds.iter().map(|round| of(round) * scale / round.units).collect())
        };
        let share = |of: &dyn Fn(&Round) -> f64| rounds.iter().map(of).collect::<Vec<f64>>();
        let at = |seconds: &Seconds, layer: Layer| seconds.get(&layer).copied().unwrap_or(0.0);
        let rows = Layer::ALL.into_iter().map(|(layer, _)| Row {
            layer,
            own: cost(&|round| at(&round.own, layer)),
            behalf: cost(&|round| at(&round.behalf, layer)),
        });
        let covered = share(&|round| round.sum() / round.process);
        let [low, high] =
            covered.iter().fold([f64::INFINITY, 0.0], |[low, high], one| [one.min(low), one.max(high)]);
        let mut functions: Vec<Function> = rounds
            .iter()
            .flat_map(|round| round.functions.keys())
            .collect::<std::collections::BTreeSet<_>>()
            .into_iter()
            .map(|key| Function {
                layer: key.0,
                name: key.1.clone(),
                cost: cost(&|round| round.functions.get(key).copied().unwrap_or(0.0)),
            })
            .collect();
        functions.sort_by(|a, b| b.cost.total_cmp(&a.cost));
        functions.truncate(top);
        Self {
            id: subject.id,
            label: subject.label,
            unit: subject.unit,
            rows: rows.collect(),
            sum: cost(&Round::sum),
            process: cost(&|round| round.process),
            unlooked: cost(&|round| round.unlooked * round.units),
            covered: [median(covered), low, high],
            attributed: median(share(&|round| 1.0 - at(&round.own, Layer::Unknown) / round.sum())),
            caller: cost(&|round| round.caller),
            functions,
        }
    }

    fn cell(&self, cost: f64) -> String {
        match self.unit {
            "us" => format!("{cost:.2}"),
            _ => format!("{cost:.3}"),
        }
    }
}

impl Outcome {
    /// Formats the results as Markdown tables.
    pub(super) fn text(&self) -> String {
        let mut out = format!(
            "{}\nother work, perf among it, took {:.0} % of the processors; medians of {} rounds; a sample every {} us\n",
            self.host,
            self.other_work * 100.0,
            self.rounds,
            self.step_us
        );
        let head: Vec<String> =
            self.lines.iter().map(|line| format!("{}, {}", line.label, line.unit)).collect();
        let head: Vec<&str> = std::iter::once("").chain(head.iter().map(String::as_str)).collect();
        let row = |name: &str, cell: &dyn Fn(&Column) -> String| {
            std::iter::once(name.to_owned()).chain(self.lines.iter().map(cell)).collect::<Vec<String>>()
        };
        let layers = |pick: &dyn Fn(&Row) -> f64| -> Vec<Vec<String>> {
            let named = Layer::ALL.into_iter().enumerate();
            // A layer without samples has no row. The row of unattributed samples is always there.
            let named = named.filter(|(index, (layer, _))| {
                *layer == Layer::Unknown || self.lines.iter().any(|line| pick(&line.rows[*index]) > 0.0)
            });
            named.map(|(index, (_, name))| row(name, &|line| line.cell(pick(&line.rows[index])))).collect()
        };
        let mut own = layers(&|row| row.own);
        own.push(row("all samples", &|line| line.cell(line.sum)));
        own.push(row("the process by /proc", &|line| line.cell(line.process)));
        own.push(row("covered", &|line| {
            let [median, low, high] = line.covered.map(|share| share * 100.0);
            format!("{median:.0} % ({low:.0} to {high:.0})")
        }));
        own.push(row("the process by /proc, without perf", &|line| line.cell(line.unlooked)));
        own.push(row("not sampled", &|line| line.cell(line.process - line.sum)));
        own.push(row("beside it, the kernel for the caller", &|line| line.cell(line.caller)));
        table(&mut out, "Processor time, by the layer whose code ran", &head, own);
        table(
            &mut out,
            "The same, with the kernel and the C library given to the layer that called them, where that is known",
            &head,
            layers(&|row| row.behalf),
        );
        for line in self.lines.iter().filter(|line| !line.functions.is_empty()) {
            let rows = line.functions.iter().map(|function| {
                let layer = Layer::ALL[function.layer as usize].1;
                vec![line.cell(function.cost), layer.to_owned(), format!("`{}`", function.name)]
            });
            table(&mut out, line.label, &[line.unit, "layer", "function"], rows.collect());
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(units: f64, own: &[(Layer, f64)]) -> Round {
        let own: Seconds = own.iter().copied().collect();
        let process = own.values().sum::<f64>() * 2.0;
        Round { units, process, behalf: own.clone(), own, ..Round::default() }
    }

    #[test]
    fn a_column_holds_medians_in_its_unit() {
        let subject = Subject::chosen(&["write".into()]).unwrap()[0];
        let rounds =
            [1.0, 3.0, 2.0].map(|seconds| round(1e9, &[(Layer::Array, seconds), (Layer::Unknown, seconds)]));
        let column = Column::new(subject, &rounds, 0);
        assert_eq!((column.unit, column.sum, column.process), ("s/GB", 4.0, 8.0));
        assert_eq!((column.covered, column.attributed), ([0.5; 3], 0.5));
        assert_eq!(column.rows[Layer::Array as usize].own, 2.0);
        let subject = Subject::chosen(&["randread".into()]).unwrap()[0];
        let column = Column::new(subject, &[round(1000.0, &[(Layer::Kv, 0.5)])], 0);
        assert_eq!((column.unit, column.cell(column.sum)), ("us", "500.00".to_owned()));
    }
}
