//! Formats the results of a rebuild as tables.

use super::drives::Rebuilt;
use super::{AIM, Beside, DRIVES, Felt, Outcome, Round};
use crate::report::{number, table};
use crate::rounds::median;

impl Outcome {
    /// Formats the median of the rounds, with the lowest and the highest.
    fn cell(&self, text: impl Fn(f64) -> String, of: impl Fn(&Round) -> f64) -> String {
        let mut all: Vec<f64> = self.rounds.iter().map(of).collect();
        all.sort_by(f64::total_cmp);
        match all.as_slice() {
            [one] => text(*one),
            [first, .., last] => {
                format!("{} ({} to {})", text(median(all.clone())), text(*first), text(*last))
            }
            [] => "-".into(),
        }
    }

    /// Formats the results as Markdown tables.
    pub(super) fn text(&self) -> String {
        let mut out = format!(
            "{}\nother work took {:.0} % of the processors; {} rounds\n4+2 on {}, drives of {} MiB, {} MiB of data; {} drives one after the other\n",
            self.host,
            self.other_work * 100.0,
            self.rounds.len(),
            self.drives,
            self.drive_mib,
            self.data_mib,
            DRIVES.len()
        );
        self.made(&mut out);
        self.felt(&mut out);
        out
    }

    fn made(&self, out: &mut String) {
        let mega = |rate: f64| number(rate / 1e6);
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        let seconds = |seconds: f64| format!("{seconds:.2}");
        let mut rows = Vec::new();
        let mut row = |what: String, of: &dyn Fn(&Round) -> Rebuilt, share: String| {
            let [rate, took] =
                [self.cell(mega, |round| of(round).rate()), self.cell(seconds, |round| of(round).seconds)];
            let used = self.cell(seconds, |round| of(round).cpu_seconds);
            rows.push(vec![what, rate, took, used, share]);
        };
        let threads = self.rounds.first().map_or(0, |round| round.copies.len());
        for index in 0..threads {
            let count = self.rounds[0].copies[index].0;
            let share = self.cell(percent, |round| round.alone.rate() / round.copies[index].1.rate());
            row(
                match count {
                    1 => "copies by one thread".into(),
                    _ => format!("copies by {count} threads"),
                },
                &|round| round.copies[index].1,
                format!("the rebuild is {share}"),
            );
        }
        let best = |round: &Round| round.copies.iter().map(|(_, copied)| copied.rate()).fold(0.0, f64::max);
        let share = |rebuilt: &dyn Fn(&Round) -> Rebuilt| {
            self.cell(percent, |round| rebuilt(round).rate() / best(round))
        };
        let reached = median(self.rounds.iter().map(|round| round.alone.rate() / best(round)).collect());
        let verdict = format!("aim {}: {}", percent(AIM), if reached >= AIM { "met" } else { "below" });
        row(
            "rebuild alone".into(),
            &|round| round.alone,
            format!("{} of the fastest copies ({verdict})", share(&|round| round.alone)),
        );
        for (index, (name, ..)) in self.readers.iter().enumerate() {
            let of = move |round: &Round| round.beside[index].rebuilt;
            row(format!("rebuild beside {name}"), &of, format!("{} of the fastest copies", share(&of)));
        }
        table(out, "What is made again", &["", "strips, MB/s", "seconds", "processor seconds", ""], rows);
    }

    fn felt(&self, out: &mut String) {
        let mut rows = Vec::new();
        for (index, (name, ..)) in self.readers.iter().enumerate() {
            for during in [false, true] {
                let pick = |beside: &Beside| if during { beside.with } else { beside.without };
                let when = if during { "during the rebuild" } else { "without a rebuild" };
                let us = |of: fn(Felt) -> f64| self.cell(number, |round| of(pick(&round.beside[index])));
                let mut cells = vec![format!("{name}, {when}")];
                cells.extend([us(|felt| felt.per_second), us(|felt| felt.p50_us), us(|felt| felt.p99_us)]);
                cells.extend([us(|felt| felt.p999_us), us(|felt| felt.worst_us)]);
                rows.push(cells);
            }
        }
        let head = ["", "per second", "p50 us", "p99 us", "p99.9 us", "worst us"];
        table(out, "What readers feel", &head, rows);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proc::Host;
    use crate::rebuild::READERS;
    use penstock_bench::files::Timed;
    use std::time::Duration;

    #[test]
    fn shares_are_of_the_fastest_copies() {
        let at = |rate: f64| Rebuilt { strip_bytes: rate * 2e6, seconds: 2.0, cpu_seconds: 1.5 };
        let felt = Felt::new(&Timed::new(vec![Duration::from_micros(50); 10]), 2.0);
        let beside = Beside { without: felt, with: felt, rebuilt: at(100.0) };
        let round =
            Round { alone: at(450.0), copies: vec![(1, at(300.0)), (2, at(500.0))], beside: vec![beside; 2] };
        let outcome = Outcome {
            host: Host::look(),
            drives: "tmpfs".into(),
            drive_mib: 512,
            data_mib: 1024,
            other_work: 0.0,
            readers: READERS,
            rounds: vec![round],
        };
        let text = outcome.text();
        assert!(
            text.contains(
                "| rebuild alone | 450 | 2.00 | 1.50 | 90 % of the fastest copies (aim 80 %: met) |"
            ),
            "{text}"
        );
        assert!(
            text.contains("| copies by one thread | 300 | 2.00 | 1.50 | the rebuild is 150 % |"),
            "{text}"
        );
        assert!(text.contains("during the rebuild | 5.0 | 50 | 50 | 50 | 50 |"), "{text}");
    }
}
