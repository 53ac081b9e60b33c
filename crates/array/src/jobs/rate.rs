//! The rate of a rebuild: how many stripes it works on at the same time, and how long it rests.
//!
//! Alone it works on as many as it may. Beside reads and writes of clients it follows their latency: it works
//! on more stripes while the latency stays below [`MOST_EXCESS`] times the *calm* one, and on fewer while it
//! does not. The calm latency is what they have while the rebuild rests. It rests for that when it begins to
//! follow, and every 5 s for a moment, since clients change what they do.
//!
//! There is a floor, which rises with the share of a stripe's redundancy that is lost: data that is in danger
//! is worth more than the latency of others.
//!
//! An administrator may set another rule ([`RebuildRate`]).

use crate::counters::{ArrayLatency, CLIENT_KINDS};
use std::time::Duration;

/// Latency of clients beside a rebuild, as a multiple of the calm one, above which the rebuild slows down.
const MOST_EXCESS: f64 = 1.5;
/// Far below it, the rebuild doubles what it works on.
const LITTLE_EXCESS: f64 = 1.1;
/// Time over which it is judged whether there are clients, and operations in progress, on average, above
/// which there are.
const SLOT: Duration = Duration::from_millis(100);
const LOAD: f64 = 0.05;
/// Shortest time, and least number of reads and writes, by which a latency is judged, and the times after
/// which fewer are enough.
const SHORTEST: Duration = REST;
const LEAST: u64 = 32;
const LONGEST: Duration = Duration::from_secs(1);
const LONGEST_PROBE: Duration = Duration::from_millis(250);
/// Time between two looks while it rests.
pub(super) const REST: Duration = Duration::from_millis(10);
/// Time after which the calm latency is measured again.
const PROBE_AGAIN: Duration = Duration::from_secs(5);
/// The fewest stripes at a time. Less than one is a share of the time.
const LEAST_STRIPES: f64 = 0.1;
/// The floor in the worst case: this part of what a rebuild alone works on.
const FLOOR_PART: f64 = 8.0;

/// The rule that a rebuild follows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RebuildRate {
    /// As fast as the latency of clients allows, and faster the more redundancy is lost.
    #[default]
    Auto,
    /// As fast as it can, whatever clients feel.
    Max,
    /// Like [`Self::Auto`], but at most so many bytes of strips a second, whatever is lost.
    AtMost(u64),
}

/// The bounds of a rebuild.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// Stripes at a time alone.
    pub(super) most: usize,
    /// The lost share of the redundancy of the stripes at hand, from 0 to 1.
    pub(super) danger: f64,
}

impl Bounds {
    fn most(&self) -> f64 {
        self.most.max(1) as f64
    }

    fn floor(&self) -> f64 {
        (self.most() * self.danger * self.danger / FLOOR_PART).max(LEAST_STRIPES)
    }
}

/// The present size of the work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Step {
    /// Stripes at a time. With 0 it rests for 10 ms ([`REST`]).
    pub(super) stripes: usize,
    /// The rest after a batch, as a multiple of the time that the batch took.
    pub(super) rest: f64,
}

/// Reads and writes of clients of each kind: their number, and the sum of their latencies.
type Served = [(u64, Duration); CLIENT_KINDS];

/// A time in which latencies are observed.
#[derive(Clone, Copy, Default)]
struct Interval {
    began: Duration,
    before: Served,
    /// Reads and writes that were begun before, and tell nothing about it.
    skipped: u64,
}

/// The way in which the rate is found.
#[derive(Clone, Copy, Default, PartialEq)]
enum Phase {
    /// There are no clients.
    #[default]
    Alone,
    /// It rests, to learn the calm latency.
    Probing,
    /// It follows the latency, until this moment.
    Following(Duration),
}

/// The rate of one array's rebuilds.
#[derive(Default)]
pub(super) struct Rate {
    rule: RebuildRate,
    /// Stripes at a time while it follows.
    window: f64,
    phase: Phase,
    /// By which it is judged whether there are clients.
    slot: Interval,
    /// By which their latency is judged.
    interval: Interval,
    /// Mean latencies in seconds while the rebuild rests.
    calm: [Option<f64>; CLIENT_KINDS],
    /// No read or write ended while the rebuild rested last.
    are_stuck: bool,
    /// Under a rule with a bound, the moment before which nothing more is begun.
    next: Duration,
}

impl Interval {
    /// The number of operations in it, and the sum of their latencies in seconds.
    fn seen(&self, served: &Served) -> [(u64, f64); CLIENT_KINDS] {
        std::array::from_fn(|kind| {
            let (before, now) = (self.before[kind], served[kind]);
            (now.0 - before.0, now.1.saturating_sub(before.1).as_secs_f64())
        })
    }

    fn done(&self, served: &Served) -> u64 {
        self.seen(served).iter().map(|(count, _)| count).sum()
    }

    /// Operations in progress, on average.
    fn load(&self, now: Duration, served: &Served) -> f64 {
        let seconds: f64 = self.seen(served).iter().map(|(_, seconds)| seconds).sum();
        seconds / now.saturating_sub(self.began).as_secs_f64()
    }
}

impl Rate {
    /// Sets the rule.
    pub(super) fn set_rule(&mut self, rule: RebuildRate) {
        self.rule = rule;
        self.next = Duration::ZERO;
    }

    /// Looks at the latency of clients while `working` stripes are being rebuilt. Returns the size of the
    /// work from now on.
    pub(super) fn look(
        &mut self,
        now: Duration,
        latency: &ArrayLatency,
        working: usize,
        bounds: Bounds,
    ) -> Step {
        let window = self.window(now, latency, working, bounds);
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it has bounds")]
        let whole = window as usize;
        match window {
            0.0 => Step { stripes: 0, rest: 0.0 },
            part if part < 1.0 => Step { stripes: 1, rest: 1.0 / part - 1.0 },
            _ => Step { stripes: whole, rest: 0.0 },
        }
    }

    /// Stripes at a time from now on: zero, or [`LEAST_STRIPES`] and more.
    fn window(&mut self, now: Duration, latency: &ArrayLatency, working: usize, bounds: Bounds) -> f64 {
        let (served, running) = (latency.served(), latency.running());
        self.look_for_clients(now, served, running, bounds);
        self.follow(now, served, running, working, bounds);
        let window = match (self.rule, self.phase) {
            (RebuildRate::Max, _) | (_, Phase::Alone) => bounds.most(),
            (_, Phase::Probing) => 0.0,
            (_, Phase::Following(_)) => self.window.clamp(bounds.floor(), bounds.most()),
        };
        assert!(window == 0.0 || window >= LEAST_STRIPES, "{window} stripes at a time");
        window
    }

    fn look_for_clients(&mut self, now: Duration, served: Served, running: u64, bounds: Bounds) {
        let took = now.saturating_sub(self.slot.began);
        if took < SLOT {
            return;
        }
        // If nobody looked for long, it rested, or nothing was rebuilt.
        let waits = running > 0 && (took > 10 * SLOT || self.slot.done(&served) == 0);
        let has_clients = waits || self.slot.load(now, &served) > LOAD;
        let begin = Interval { began: now, before: served, skipped: 0 };
        self.slot = begin;
        match (has_clients, self.phase) {
            (false, _) => self.phase = Phase::Alone,
            (true, Phase::Alone) => {
                (self.phase, self.window) = (Phase::Probing, bounds.floor().max(1.0));
                self.calm = [None; CLIENT_KINDS];
                self.interval = Interval { skipped: running, ..begin };
            }
            (true, _) => {}
        }
    }

    fn follow(&mut self, now: Duration, served: Served, running: u64, working: usize, bounds: Bounds) {
        let begin = |skipped| Interval { began: now, before: served, skipped };
        let is_probing = self.phase == Phase::Probing;
        if is_probing && working > 0 {
            // Batches of before are still at work, and so are reads and writes that wait for them.
            self.interval = begin(running);
            return;
        }
        let (done, took) = (self.interval.done(&served), now.saturating_sub(self.interval.began));
        // Clients may wait for what is rebuilt, so nothing here waits for them.
        let is_late = took >= if is_probing { LONGEST_PROBE } else { LONGEST };
        if self.interval.skipped > 0 && !is_late {
            if done >= self.interval.skipped {
                self.interval = begin(0);
            }
            return;
        }
        if took < SHORTEST || (done < LEAST && !is_late) {
            return;
        }
        let seen = self.interval.seen(&served);
        match self.phase {
            Phase::Alone => return,
            Phase::Probing => {
                // Clients that get nowhere while it rests wait for something else, maybe for the rebuild.
                self.are_stuck = done == 0;
                for (calm, (count, seconds)) in self.calm.iter_mut().zip(seen) {
                    if count > 0 {
                        *calm = Some(seconds / count as f64);
                    }
                }
                self.phase = Phase::Following(now + PROBE_AGAIN);
            }
            Phase::Following(until) => {
                self.window = self.next_window(seen, bounds);
                if now >= until {
                    self.phase = Phase::Probing;
                }
            }
        }
        // As many as are under way began under the window of before.
        self.interval = begin(running);
    }

    /// The window after an interval with these reads and writes. The latency of a kind that was not seen
    /// while the rebuild rested counts as calm from now on: it is not to rise further.
    fn next_window(&mut self, all: [(u64, f64); CLIENT_KINDS], bounds: Bounds) -> f64 {
        let (mut seconds, mut calm_seconds) = (0.0, 0.0);
        for ((count, took), calm) in all.into_iter().zip(&mut self.calm).filter(|((count, _), _)| *count > 0)
        {
            seconds += took;
            calm_seconds += *calm.get_or_insert(took / count as f64) * count as f64;
        }
        let factor = match seconds / calm_seconds {
            excess if excess > MOST_EXCESS => 0.7,
            excess if excess > LITTLE_EXCESS => 1.25,
            excess if excess <= LITTLE_EXCESS => 2.0,
            // Nothing was done.
            _ if self.are_stuck => 2.0,
            _ => 0.7,
        };
        (self.window * factor).clamp(bounds.floor(), bounds.most())
    }

    /// The time until more may be begun, under a rule with a bound.
    pub(super) fn wait(&self, now: Duration) -> Duration {
        self.next.saturating_sub(now)
    }

    /// So many bytes of strips are being made from now on.
    pub(super) fn begun(&mut self, now: Duration, bytes: u64) {
        if let RebuildRate::AtMost(per_second) = self.rule {
            let took = Duration::from_secs_f64(bytes as f64 / per_second.max(1) as f64);
            self.next = self.next.max(now) + took;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    const BOUNDS: Bounds = Bounds { most: 256, danger: 0.0 };

    /// A rebuild beside four clients that never rest, on drives whose latency rises with the stripes at a
    /// time: by all of it for so many.
    struct Scene {
        rate: Rate,
        latency: Rc<ArrayLatency>,
        now: Duration,
        doubles_at: f64,
        calm: Duration,
        window: f64,
    }

    impl Scene {
        fn new(doubles_at: f64) -> Self {
            let (rate, latency) = (Rate::default(), Rc::<ArrayLatency>::default());
            let (now, calm, window) = (Duration::from_secs(1), Duration::from_millis(1), 256.0);
            Self { rate, latency, now, doubles_at, calm, window }
        }

        /// Lets some time pass beside so many clients. Returns the mean number of stripes at a time.
        fn pass(&mut self, time: Duration, bounds: Bounds, clients: usize) -> f64 {
            let (until, mut all) = (self.now + time, 0.0);
            let began = self.now;
            while self.now < until {
                let working = self.window.ceil() as usize;
                let took = self.calm.mul_f64(1.0 + self.window / self.doubles_at);
                let running: Vec<_> = (0..clients).map(|_| self.latency.read.run()).collect();
                self.now += took;
                all += self.window * took.as_secs_f64();
                self.window = self.rate.window(self.now, &self.latency, working, bounds);
                drop(running);
                (0..clients).for_each(|_| self.latency.read.record(took));
            }
            all / (self.now - began).as_secs_f64()
        }
    }

    const SECONDS: Duration = Duration::from_secs(20);

    fn is_all(window: f64) -> bool {
        (window - 256.0).abs() < 0.01
    }

    #[test]
    fn alone_it_works_on_as_many_as_it_may() {
        let mut scene = Scene::new(10.0);
        assert!(is_all(scene.pass(SECONDS, BOUNDS, 0)));
    }

    #[test]
    fn beside_clients_it_takes_what_their_latency_allows() {
        for doubles_at in [8.0, 40.0, 100.0] {
            let mut scene = Scene::new(doubles_at);
            scene.pass(SECONDS, BOUNDS, 4);
            let mean = scene.pass(SECONDS, BOUNDS, 4);
            let allowed = doubles_at / 2.0;
            assert!((allowed * 0.7..allowed * 1.4).contains(&mean), "{mean}, and {allowed} are allowed");
        }
    }

    #[test]
    fn it_goes_on_beside_clients_that_suffer_from_anything() {
        let mut scene = Scene::new(0.1);
        scene.pass(SECONDS, BOUNDS, 4);
        let mean = scene.pass(SECONDS, BOUNDS, 4);
        assert!((LEAST_STRIPES / 2.0..1.0).contains(&mean), "{mean}");
    }

    #[test]
    fn the_floor_rises_with_the_danger() {
        for (danger, floor) in [(1.0, 32.0), (0.5, 8.0)] {
            let bounds = Bounds { danger, ..BOUNDS };
            let mut scene = Scene::new(0.1);
            scene.pass(SECONDS, bounds, 4);
            let mean = scene.pass(SECONDS, bounds, 4);
            assert!((floor * 0.9..=floor).contains(&mean), "{mean} with a danger of {danger}");
        }
    }

    #[test]
    fn it_learns_that_clients_ask_for_more() {
        let mut scene = Scene::new(40.0);
        scene.pass(SECONDS, BOUNDS, 4);
        scene.calm = Duration::from_millis(3);
        scene.pass(SECONDS, BOUNDS, 4);
        let mean = scene.pass(SECONDS, BOUNDS, 4);
        assert!((14.0..28.0).contains(&mean), "{mean}");
    }

    #[test]
    fn it_takes_all_again_when_clients_are_gone() {
        let mut scene = Scene::new(0.1);
        scene.pass(SECONDS, BOUNDS, 4);
        scene.pass(Duration::from_secs(1), BOUNDS, 0);
        assert!(is_all(scene.pass(Duration::from_secs(1), BOUNDS, 0)));
    }

    #[test]
    fn a_read_now_and_then_does_not_hold_it_back() {
        let mut scene = Scene::new(100.0);
        for _ in 0..20 {
            scene.latency.read.record(Duration::from_millis(1));
            assert!(is_all(scene.pass(SLOT, BOUNDS, 0)));
        }
    }

    /// Clients may wait for the very stripes that are to be rebuilt.
    #[test]
    fn it_does_not_wait_for_a_client_that_waits() {
        let mut scene = Scene::new(10.0);
        scene.pass(Duration::from_secs(1), BOUNDS, 4);
        let latency = scene.latency.clone();
        let _waits = latency.read.run();
        for _ in 0..60 {
            let mean = scene.pass(Duration::from_secs(1), BOUNDS, 0);
            assert!(mean > LEAST_STRIPES / 2.0, "{mean}");
        }
        let mean = scene.pass(Duration::from_secs(10), BOUNDS, 0);
        assert!(mean > 100.0, "{mean}");
    }

    /// A client works with one operation at a time, and none is under way when the rebuild looks.
    #[test]
    fn its_own_rest_is_not_taken_for_a_calm() {
        let mut scene = Scene::new(0.1);
        scene.pass(SECONDS, BOUNDS, 4);
        for _ in 0..5 {
            (0..200).for_each(|_| scene.latency.read.record(Duration::from_millis(5)));
            scene.now += 20 * SLOT;
            let window = scene.rate.window(scene.now, &scene.latency, 0, BOUNDS);
            assert!(window < 1.0, "{window}");
        }
    }

    /// Reads are so many that no write ends while the rebuild rests.
    #[test]
    fn what_was_not_seen_while_it_rested_does_not_rise_either() {
        let mut rate = Rate { calm: [Some(0.001), None, None], window: 8.0, ..Rate::default() };
        let of = |write: f64| [(100, 0.1), (10, 10.0 * write), (0, 0.0)];
        rate.window = rate.next_window(of(0.02), BOUNDS);
        assert_eq!(rate.window, 16.0);
        rate.window = rate.next_window(of(0.06), BOUNDS);
        assert!(rate.window < 16.0, "{}", rate.window);
    }

    #[test]
    fn less_than_a_stripe_is_a_share_of_the_time() {
        let mut scene = Scene::new(0.1);
        scene.pass(SECONDS, BOUNDS, 4);
        scene.rate.phase = Phase::Following(scene.now + SECONDS);
        scene.rate.window = 0.25;
        let step = scene.rate.look(scene.now, &scene.latency, 0, BOUNDS);
        assert_eq!(step, Step { stripes: 1, rest: 3.0 });
        scene.rate.phase = Phase::Probing;
        let step = scene.rate.look(scene.now, &scene.latency, 0, BOUNDS);
        assert_eq!(step, Step { stripes: 0, rest: 0.0 });
    }

    #[test]
    fn the_rule_of_the_administrator_holds() {
        let mut scene = Scene::new(0.1);
        scene.rate.set_rule(RebuildRate::Max);
        assert!(scene.pass(SECONDS, BOUNDS, 4) > 255.0);
        scene.rate.set_rule(RebuildRate::AtMost(1 << 20));
        assert_eq!(scene.rate.wait(scene.now), Duration::ZERO);
        scene.rate.begun(scene.now, 1 << 20);
        scene.rate.begun(scene.now, 1 << 19);
        assert_eq!(scene.rate.wait(scene.now), Duration::from_millis(1500));
        scene.rate.set_rule(RebuildRate::Auto);
        assert_eq!(scene.rate.wait(scene.now), Duration::ZERO);
    }
}
