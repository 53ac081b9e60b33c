//! The seam through which time, randomness and tasks come: the real machine or the simulated world.
//!
//! Code above this trait is plain `async` on one thread. It never reads a clock, draws randomness or starts a
//! task in another way, so that a seed reproduces a run.

use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

/// A future of one worker thread.
pub type LocalBoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// What a worker thread, real or simulated, offers to the code that runs on it.
pub trait Runtime {
    /// Time since an arbitrary start, never going back (CLOCK_BOOTTIME on a real machine).
    fn now(&self) -> Duration;
    /// Nanoseconds since 1970-01-01 UTC.
    fn wall_ns(&self) -> i64;
    /// Completes after `period`.
    fn sleep(&self, period: Duration) -> LocalBoxFuture<'static, ()>;
    /// Runs `task` on this worker; `name` appears when it panics.
    fn spawn(&self, name: &'static str, task: LocalBoxFuture<'static, ()>);
    /// A random word.
    fn random(&self) -> u64;
}

/// A handle on the worker's runtime.
pub type Env = Rc<dyn Runtime>;

/// A fresh random identifier.
pub fn random_id(env: &Env) -> crate::Id128 {
    crate::Id128::from_words(env.random(), env.random())
}

/// Runs `future` for at most `limit`; `None` when the time is over first.
pub async fn timeout<T>(env: &Env, limit: Duration, future: impl Future<Output = T>) -> Option<T> {
    let future = std::pin::pin!(future);
    match futures_util::future::select(future, env.sleep(limit)).await {
        futures_util::future::Either::Left((value, _)) => Some(value),
        futures_util::future::Either::Right(((), _)) => None,
    }
}
