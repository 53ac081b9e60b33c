//! Where a worker runs: on any processor it may use, or for a while where its only caller runs.
//!
//! A caller that waits for each answer takes turns with the worker. On two processors every turn wakes one that
//! sleeps, which costs more than a small request, most of all in a virtual machine; on one it is a switch of tasks.
//! [`Turns`] counts who calls, and binds the worker to the caller's processor while the calls of one thread come one
//! at a time.
//!
//! Where a caller runs is read by a thread beside the worker: the kernel takes locks of the caller's process for it, which
//! that one may hold while it waits for the worker.
//!
//! Invariant: the worker is bound only while the calls counted last were all in turns, and [`REST`] longer at most.

use penstock_base::Env;
use rustix::thread::CpuSet;
use std::cell::Cell;
use std::rc::Rc;
use std::sync::OnceLock;
use std::time::Duration;

/// Calls that are judged together.
const WINDOW: u32 = 64;
/// Judged no more often than this, since a thread must wake for it.
const PAUSE: Duration = Duration::from_millis(20);
/// A worker that is called less than [`WINDOW`] times in this time goes where the scheduler puts it.
const REST: Duration = Duration::from_millis(100);

/// What the process may use, as found when a worker was bound first.
static ALL: OnceLock<CpuSet> = OnceLock::new();

/// Lets the calling thread run everywhere. Threads inherit the processor of a worker that was bound when it started them.
pub(crate) fn everywhere() {
    if let Some(all) = ALL.get() {
        set(all);
    }
}

fn set(processors: &CpuSet) -> bool {
    let set = rustix::thread::sched_setaffinity(None, processors);
    if let Err(error) = &set {
        tracing::debug!(%error, "the worker stays on the processors that it has");
    }
    set.is_ok()
}

/// Who calls a worker, and where it runs because of that. Belongs to the thread that made it.
pub struct Turns {
    env: Env,
    caller: Cell<u32>,
    /// Calls since the last judgement, and those of them that came alone from the caller of the one before.
    calls: Cell<u32>,
    in_turn: Cell<u32>,
    judged: Cell<Duration>,
    /// Somebody looks where the caller runs.
    looking: Cell<bool>,
    bound: Cell<Option<usize>>,
}

impl Turns {
    /// For the worker of `env`, which calls this.
    pub fn new(env: &Env) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            caller: Cell::new(0),
            calls: Cell::new(0),
            in_turn: Cell::new(0),
            judged: Cell::new(Duration::ZERO),
            looking: Cell::new(false),
            bound: Cell::new(None),
        })
    }

    /// A call of thread `caller` (0 if that is not known); `alone` if none was waiting before it came.
    pub fn called(self: &Rc<Self>, caller: u32, alone: bool) {
        let same = self.caller.replace(caller) == caller && caller != 0;
        self.in_turn.set(self.in_turn.get() + u32::from(same && alone));
        self.calls.set(self.calls.get() + 1);
        if self.calls.get() < WINDOW {
            return;
        }
        let now = self.env.now();
        if now.saturating_sub(self.judged.get()) >= PAUSE {
            self.judged.set(now);
            self.judge();
            self.calls.set(0);
            self.in_turn.set(0);
        }
    }

    fn judge(self: &Rc<Self>) {
        // Others may look in now and then.
        let in_turns = self.in_turn.get() >= self.calls.get() / 8 * 7;
        if !in_turns {
            self.release();
        } else if !self.looking.replace(true) {
            self.env.spawn("worker's caller", Box::pin(self.clone().follow(self.caller.get())));
        }
    }

    async fn follow(self: Rc<Self>, caller: u32) {
        let asked = self.judged.get();
        let processor = crate::runtime::blocking(move || processor_of(caller)).await;
        self.looking.set(false);
        // Not when it took so long that something else may hold now.
        if self.judged.get() == asked {
            match processor {
                Some(processor) => self.bind(processor),
                None => self.release(),
            }
        }
    }

    fn bind(self: &Rc<Self>, processor: usize) {
        if self.bound.get() == Some(processor) || processor >= CpuSet::MAX_CPU {
            return;
        }
        let all = match ALL.get() {
            Some(all) => all,
            None => match rustix::thread::sched_getaffinity(None) {
                Ok(all) => ALL.get_or_init(|| all),
                Err(_) => return,
            },
        };
        let mut one = CpuSet::new();
        one.set(processor);
        if !all.is_set(processor) || !set(&one) {
            return self.release();
        }
        if self.bound.replace(Some(processor)).is_none() {
            self.env.spawn("worker's processor", Box::pin(self.clone().rest()));
        }
    }

    fn release(&self) {
        if self.bound.take().is_some() {
            everywhere();
        }
    }

    /// Releases the worker when the calls cease.
    async fn rest(self: Rc<Self>) {
        while self.bound.get().is_some() {
            let judged = self.judged.get();
            self.env.sleep(REST).await;
            if self.judged.get() == judged {
                self.release();
            }
        }
    }
}

/// Where a thread of this machine runs, or ran last.
fn processor_of(thread: u32) -> Option<usize> {
    let stat = std::fs::read_to_string(format!("/proc/{thread}/stat")).ok()?;
    // The name of the program, in parentheses, may hold spaces. After it the fields begin with the third.
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(39 - 3)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_processor_of_a_thread_is_found() {
        let here = std::process::id();
        let processor = processor_of(here).unwrap();
        assert!(rustix::thread::sched_getaffinity(None).unwrap().is_set(processor));
        assert_eq!(processor_of(u32::MAX), None);
    }
}
