//! The worker thread of a real machine: [`penstock_base::env::Runtime`] on compio.
//!
//! Owns the executor, its clock and its waits. Does not own drives, sockets or the kernel's requests: their
//! crates do their I/O on it.
//!
//! It uses io_uring if the kernel allows it, and compio's polling driver otherwise. A panic in any task
//! aborts the process, so that the process never continues without one of its tasks.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]
// The worker is the edge to the real clock.
#![allow(clippy::disallowed_methods)]

pub mod polling;

pub use polling::Polling;

use compio_runtime::fd::PollFd;
use penstock_base::LocalBoxFuture;
use penstock_base::env::{Env, Runtime};
use penstock_base::num::to_u32;
use std::cell::RefCell;
use std::os::fd::AsFd;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The runtime of one worker thread.
pub struct Worker {
    /// Random bytes of the system that were not given yet.
    random: RefCell<Vec<u8>>,
}

/// Bytes that are drawn from the system at a time. It gives as many at once, without an interruption.
const RANDOM_BYTES: usize = 256;

fn draw_random() -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; RANDOM_BYTES];
    let drawn = rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty())?;
    bytes.truncate(drawn / size_of::<u64>() * size_of::<u64>());
    match bytes.is_empty() {
        true => Err(std::io::Error::other("the system gives no random numbers")),
        false => Ok(bytes),
    }
}

impl Worker {
    /// Creates the runtime of the calling worker thread.
    pub fn env() -> std::io::Result<Env> {
        Ok(Rc::new(Self { random: RefCell::new(draw_random()?) }))
    }
}

/// Runs `main` on this thread as a worker until it completes.
pub fn block_on<T>(main: impl Future<Output = T>) -> std::io::Result<T> {
    let runtime = compio_runtime::Runtime::new()?;
    let mut main = std::pin::pin!(main);
    // While tasks are runnable, compio's own loop waits for the kernel with a timeout of zero. The kernel
    // then sets a timer and sleeps until it fires, 20 us. With the waker already woken compio does not wait
    // at all.
    let waker = runtime.waker();
    let mut context = Context::from_waker(&waker);
    Ok(runtime.enter(|| {
        loop {
            if let Poll::Ready(result) = main.as_mut().poll(&mut context) {
                runtime.run();
                return result;
            }
            let timeout = if runtime.run() { Some(Duration::ZERO) } else { runtime.current_timeout() };
            if timeout == Some(Duration::ZERO) {
                waker.wake_by_ref();
            }
            runtime.poll_with(timeout);
        }
    }))
}

/// Runs `work`, which blocks, on a helper thread.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match compio_runtime::spawn_blocking(work).await {
        Ok(value) => value,
        Err(error) => panic!("blocking work was stopped: {error:?}"),
    }
}

/// A non-blocking file descriptor with waits for readiness on the worker that owns it.
pub struct Readiness<T: AsFd + 'static>(PollFd<T>);

impl<T: AsFd + 'static> Readiness<T> {
    /// Wraps a descriptor, which must be non-blocking. Must be called on a worker thread.
    pub fn new(descriptor: T) -> std::io::Result<Self> {
        Ok(Self(PollFd::new(descriptor)?))
    }

    /// Waits until a read may return data. An error means that it never will.
    pub async fn readable(&self) -> std::io::Result<()> {
        self.0.read_ready().await
    }

    /// Waits until a write may accept data. An error means that it never will.
    pub async fn writable(&self) -> std::io::Result<()> {
        self.0.write_ready().await
    }

    /// The descriptor.
    pub fn get(&self) -> &T {
        &self.0
    }
}

/// The driver that does the I/O of this worker: `io_uring` or `polling`; `none` if the thread is not a
/// worker.
pub fn io_path() -> &'static str {
    compio_runtime::Runtime::try_with_current(|runtime| match runtime.driver_type() {
        compio_driver::DriverType::IoUring => "io_uring",
        _ => "polling",
    })
    .unwrap_or("none")
}

impl Runtime for Worker {
    fn now(&self) -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
        Duration::new(time.tv_sec.cast_unsigned(), to_u32(time.tv_nsec))
    }

    fn wall_ns(&self) -> i64 {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    }

    fn sleep(&self, period: Duration) -> LocalBoxFuture<'static, ()> {
        Box::pin(compio_runtime::time::sleep(period))
    }

    fn spawn(&self, name: &'static str, task: LocalBoxFuture<'static, ()>) {
        let guard = AbortOnPanic(name);
        compio_runtime::spawn(async move {
            task.await;
            std::mem::forget(guard);
        })
        .detach();
    }

    fn random(&self) -> u64 {
        let mut left = self.random.borrow_mut();
        if left.is_empty() {
            *left = draw_random().expect("the system gave random numbers at the start");
        }
        let rest = left.len() - size_of::<u64>();
        let word = left.split_off(rest).try_into().expect("8 bytes were split off");
        u64::from_le_bytes(word)
    }
}

struct AbortOnPanic(&'static str);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(
                task = self.0,
                "a task panicked: the process stops here rather than run on without it"
            );
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_of_several_draws_are_distinct() {
        let env = Worker::env().unwrap();
        let drawn: std::collections::BTreeSet<u64> = (0..1000).map(|_| env.random()).collect();
        assert_eq!(drawn.len(), 1000);
    }
}
