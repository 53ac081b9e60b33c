//! The interface for time, randomness and tasks, implemented by the real machine and by the simulated world.
//!
//! Code above this trait is plain `async` on one thread. It reads the clock, draws random numbers and starts
//! tasks only through this trait, so that a seed reproduces a run.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

/// A boxed future that stays on one worker thread.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// The services of a worker thread, real or simulated, for the code that runs on it.
pub trait Runtime {
    /// Monotonic time since an arbitrary start (CLOCK_BOOTTIME on a real machine).
    fn now(&self) -> Duration;
    /// Nanoseconds since 1970-01-01 UTC.
    fn wall_ns(&self) -> i64;
    /// Completes after `period`.
    fn sleep(&self, period: Duration) -> LocalBoxFuture<'static, ()>;
    /// Starts `task` on this worker. `name` appears in the log if it panics.
    fn spawn(&self, name: &'static str, task: LocalBoxFuture<'static, ()>);
    /// 64 random bits that nobody can predict, except in a simulation.
    fn random(&self) -> u64;
}

/// A shared handle to the worker's runtime.
pub type Env = Rc<dyn Runtime>;

/// A fresh random identifier, which may be a secret.
pub fn random_id(env: &Env) -> crate::Id128 {
    crate::Id128::from_words(env.random(), env.random())
}

/// Runs `future` for at most `limit`. Returns `None`, and drops the future, if it does not complete in that
/// time.
pub async fn timeout<T>(env: &Env, limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let future = std::pin::pin!(future);
    match futures_util::future::select(future, env.sleep(limit)).await {
        futures_util::future::Either::Left((value, _)) => Some(value),
        futures_util::future::Either::Right(((), _)) => None,
    }
}

/// Lets the other tasks of the worker run once.
pub async fn yield_now() {
    let mut has_yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut has_yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
