//! The executor: runs ready tasks in random order, lets time jump to the next timer, and cuts the power.

use penstock_base::env::{Env, LocalBoxFuture, Runtime};
use penstock_base::num::{to_i64, to_usize};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

/// The power was cut while a future ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut;

/// Plans a power cut at the `nth` write from a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CutPlan {
    /// Name of the write site.
    pub site: String,
    /// Number of the write among those of the site; 0 is the first.
    pub nth: u64,
}

type TaskId = u64;
/// The future given to [`World::run`] is woken under this id.
const MAIN: TaskId = 0;

struct Ready(Mutex<Vec<TaskId>>);

struct TaskWaker {
    id: TaskId,
    ready: Arc<Ready>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut ready = self.ready.0.lock().expect("no holder of this lock can panic");
        if !ready.contains(&self.id) {
            ready.push(self.id);
        }
    }
}

struct Inner {
    now: Cell<Duration>,
    random: Cell<u64>,
    next_id: Cell<u64>,
    tasks: RefCell<BTreeMap<TaskId, LocalBoxFuture<'static, ()>>>,
    ready: Arc<Ready>,
    timers: RefCell<BTreeMap<(Duration, u64), Waker>>,
    cut: Cell<bool>,
    plan: RefCell<Option<CutPlan>>,
    hits: RefCell<BTreeMap<&'static str, u64>>,
    steps: Cell<u64>,
}

/// A simulated machine. Clones are handles on the same one.
#[derive(Clone)]
pub struct World {
    inner: Rc<Inner>,
}

impl World {
    /// A world that draws every choice from `seed`. Its clock starts at one second.
    pub fn new(seed: u64) -> Self {
        let inner = Inner {
            now: Cell::new(Duration::from_secs(1)),
            random: Cell::new(seed ^ 0x5851_f42d_4c95_7f2d),
            next_id: Cell::new(MAIN + 1),
            tasks: RefCell::default(),
            ready: Arc::new(Ready(Mutex::default())),
            timers: RefCell::default(),
            cut: Cell::new(false),
            plan: RefCell::default(),
            hits: RefCell::default(),
            steps: Cell::new(0),
        };
        Self { inner: Rc::new(inner) }
    }

    /// The runtime to give to the code under test.
    pub fn env(&self) -> Env {
        Rc::new(self.clone())
    }

    /// Plans one power cut, in place of any earlier plan.
    pub fn plan_cut(&self, plan: CutPlan) {
        *self.inner.plan.borrow_mut() = Some(plan);
    }

    /// Cuts the power now.
    pub fn cut(&self) {
        self.inner.cut.set(true);
    }

    /// True if the power is cut.
    pub fn is_cut(&self) -> bool {
        self.inner.cut.get()
    }

    /// The number of writes and discards from each site so far.
    pub fn hits(&self) -> BTreeMap<&'static str, u64> {
        self.inner.hits.borrow().clone()
    }

    /// The number of polls so far. Two runs of one seed have the same.
    pub fn steps(&self) -> u64 {
        self.inner.steps.get()
    }

    /// Advances the clock while no task runs, as when the process is stopped or its virtual machine is
    /// migrated.
    pub fn pause(&self, period: Duration) {
        self.inner.now.set(self.inner.now.get() + period);
    }

    /// A random number below `bound`, which is at least 1.
    pub fn below(&self, bound: u64) -> u64 {
        assert!(bound > 0, "there is no number below 0");
        self.random() % bound
    }

    /// Counts a write or discard at `site`, and cuts the power if it is the planned one.
    pub(crate) fn pass(&self, site: &'static str) {
        let mut hits = self.inner.hits.borrow_mut();
        let count = hits.entry(site).or_default();
        let planned = self.inner.plan.borrow();
        if planned.as_ref().is_some_and(|plan| plan.site == site && plan.nth == *count) {
            self.inner.cut.set(true);
        }
        *count += 1;
    }

    /// Runs `main` and everything it spawned until `main` is done or the power is cut. Panics if no task is
    /// ready and no timer is set.
    pub fn run<T>(&self, main: impl Future<Output = T>) -> Result<T, Cut> {
        let mut main = pin!(main);
        self.push_ready(MAIN);
        loop {
            if self.is_cut() {
                return Err(Cut);
            }
            let Some(id) = self.pop_ready() else {
                self.advance();
                continue;
            };
            self.inner.steps.set(self.inner.steps.get() + 1);
            let waker = self.waker(id);
            let mut context = Context::from_waker(&waker);
            if id == MAIN {
                if let Poll::Ready(value) = main.as_mut().poll(&mut context) {
                    return if self.is_cut() { Err(Cut) } else { Ok(value) };
                }
                continue;
            }
            let task = self.inner.tasks.borrow_mut().remove(&id);
            if let Some(mut task) = task
                && Pin::new(&mut task).poll(&mut context).is_pending()
            {
                self.inner.tasks.borrow_mut().insert(id, task);
            }
        }
    }

    /// Drops every task and timer, as a power cut does. Call it before another world uses the same media.
    pub fn destroy(&self) {
        self.inner.cut.set(true);
        // Dropping a task may drop the last handle on an object that spawns tasks, so this repeats until none
        // are left.
        loop {
            let tasks = std::mem::take(&mut *self.inner.tasks.borrow_mut());
            if tasks.is_empty() {
                break;
            }
        }
        self.inner.timers.borrow_mut().clear();
    }

    fn waker(&self, id: TaskId) -> Waker {
        Waker::from(Arc::new(TaskWaker { id, ready: self.inner.ready.clone() }))
    }

    fn push_ready(&self, id: TaskId) {
        self.waker(id).wake();
    }

    fn pop_ready(&self) -> Option<TaskId> {
        let mut ready = self.inner.ready.0.lock().expect("no holder of this lock can panic");
        if ready.is_empty() {
            return None;
        }
        let pick = self.random() % ready.len() as u64;
        Some(ready.remove(to_usize(pick)))
    }

    fn advance(&self) {
        let first = self.inner.timers.borrow_mut().pop_first();
        let Some(((when, _), waker)) = first else {
            panic!("the world stands still: {} tasks wait for nothing", self.inner.tasks.borrow().len());
        };
        self.inner.now.set(when.max(self.inner.now.get()));
        waker.wake();
    }

    fn fresh_id(&self) -> u64 {
        let id = self.inner.next_id.get();
        self.inner.next_id.set(id + 1);
        id
    }
}

struct Sleep {
    world: World,
    until: Duration,
    id: u64,
}

impl Future for Sleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.world.inner.now.get() >= self.until {
            return Poll::Ready(());
        }
        let key = (self.until, self.id);
        self.world.inner.timers.borrow_mut().insert(key, context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let key = (self.until, self.id);
        // The borrow must end before the waker is dropped.
        let _waker = self.world.inner.timers.try_borrow_mut().ok().and_then(|mut timers| timers.remove(&key));
    }
}

impl Runtime for World {
    fn now(&self) -> Duration {
        self.inner.now.get()
    }

    fn wall_ns(&self) -> i64 {
        1_700_000_000_000_000_000 + to_i64(self.inner.now.get().as_nanos())
    }

    fn sleep(&self, period: Duration) -> LocalBoxFuture<'static, ()> {
        let until = self.inner.now.get() + period.max(Duration::from_nanos(1));
        Box::pin(Sleep { world: self.clone(), until, id: self.fresh_id() })
    }

    fn spawn(&self, _name: &'static str, task: LocalBoxFuture<'static, ()>) {
        let id = self.fresh_id();
        self.inner.tasks.borrow_mut().insert(id, task);
        self.push_ready(id);
    }

    fn random(&self) -> u64 {
        // The generator is xorshift64*.
        let mut x = self.inner.random.get().max(1);
        x ^= x >> 12;
        x ^= x << 25;
        x ^= x >> 27;
        self.inner.random.set(x);
        x.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(seed: u64) -> (Vec<u64>, u64) {
        let world = World::new(seed);
        let log = Rc::new(RefCell::new(Vec::new()));
        let env = world.env();
        let done = world.run(async {
            for task in 0..8 {
                let (log, env2) = (log.clone(), env.clone());
                env.spawn(
                    "test",
                    Box::pin(async move {
                        env2.sleep(Duration::from_micros(env2.random() % 50)).await;
                        log.borrow_mut().push(task);
                    }),
                );
            }
            env.sleep(Duration::from_millis(1)).await;
        });
        assert_eq!(done, Ok(()));
        let log = log.borrow().clone();
        (log, world.steps())
    }

    #[test]
    fn one_seed_gives_one_run() {
        assert_eq!(trace(7), trace(7));
        assert!((0..20).any(|seed| trace(seed).0 != trace(7).0), "seeds differ in order");
    }

    #[test]
    #[should_panic(expected = "stands still")]
    fn a_deadlock_is_a_panic() {
        let _ = World::new(1).run(std::future::pending::<()>());
    }
}
