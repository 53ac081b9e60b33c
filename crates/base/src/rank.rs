//! Lock ranks: an order in which locks are acquired, checked at run time in builds with debug assertions.
//!
//! A task acquires a lock only while every lock that it holds is of a lower rank, or of the same rank with a
//! lower key. Two tasks that follow the rule cannot wait for each other. The simulator runs such builds, so a
//! seed that takes the wrong path panics in the line that breaks the order, whether or not another task was
//! in the way.
//!
//! Levels of a node, from requests down to drives:
//!
//! | level | locks | where |
//! |---|---|---|
//! | 10 | slot of a session: one request of it runs | `session` |
//! | 12 | turn at an inode's next lease | `session` |
//! | 15 | turn at a file on a target of another stack | `chunk` |
//! | 20 | turn at the name space, for changes | `meta` |
//! | 30 | gate of the rows, shared for changes, exclusive for checks and repairs | `gate` |
//! | 40 to 49 | files, chunks, commits, discards | `chunk`, its table of ranks |
//! | 100 and above | everything of an array | `array`, its table of ranks |
//!
//! Locks belong to a *scope*: [`scoped`] opens one for a task, or for one of several futures that a task
//! polls side by side. A scope sees the locks of the scope around it and not those of its siblings. Code
//! outside any scope is not checked. Release builds keep nothing and check nothing.

use crate::locks::{Exclusive, Shared};
use crate::{FileId, Ino, KeyedLocks};
use std::cell::RefCell;
use std::future::Future;
#[cfg(debug_assertions)]
use std::future::poll_fn;
use std::hash::Hash;
#[cfg(debug_assertions)]
use std::pin::pin;
use std::rc::Rc;
use tokio::sync::{Mutex, MutexGuard};

/// A level of a lock order. Locks with a lower level are acquired first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Rank {
    level: u8,
    name: &'static str,
}

impl Rank {
    /// A rank; `name` appears in the panic of an acquisition in the wrong order.
    pub const fn new(level: u8, name: &'static str) -> Self {
        Self { level, name }
    }
}

/// The locks that one task, or one branch of it, holds.
#[derive(Default)]
struct Scope {
    held: RefCell<Vec<(Rank, u64)>>,
    around: Option<Rc<Scope>>,
}

impl Scope {
    /// The highest lock held here or around.
    fn highest(&self) -> Option<(Rank, u64)> {
        let here = self.held.borrow().iter().max().copied();
        here.max(self.around.as_ref().and_then(|around| around.highest()))
    }
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Scope>>> = const { RefCell::new(None) };
}

fn current() -> Option<Rc<Scope>> {
    CURRENT.with(|current| current.borrow().clone())
}

/// Makes a scope current while it lives.
#[cfg(debug_assertions)]
struct Entered(Option<Rc<Scope>>);

#[cfg(debug_assertions)]
impl Entered {
    fn new(scope: Rc<Scope>) -> Self {
        Self(CURRENT.with(|current| current.replace(Some(scope))))
    }
}

#[cfg(debug_assertions)]
impl Drop for Entered {
    fn drop(&mut self) {
        CURRENT.with(|current| *current.borrow_mut() = self.0.take());
    }
}

/// Runs `future` in a scope of its own, inside the one that is current when it is first polled.
#[cfg(not(debug_assertions))]
pub fn scoped<F: Future>(future: F) -> F {
    // As it is: an async function would keep it twice, as its argument and while it runs, and copy all of its
    // state.
    future
}

/// Runs `future` in a scope of its own, inside the one that is current when it is first polled.
#[cfg(debug_assertions)]
pub async fn scoped<F: Future>(future: F) -> F::Output {
    let scope = Rc::new(Scope { held: RefCell::default(), around: current() });
    let mut future = pin!(future);
    poll_fn(move |context| {
        let _entered = Entered::new(scope.clone());
        future.as_mut().poll(context)
    })
    .await
}

/// Asserts that the current scope may acquire a lock of `rank`, or wait for whoever acquires one.
///
/// # Panics
/// If it holds a lock of the same or a higher rank.
pub fn check(rank: Rank) {
    check_key(rank, 0);
}

fn check_key(rank: Rank, key: u64) {
    if !cfg!(debug_assertions) {
        return;
    }
    if let Some((held, held_key)) = current().and_then(|scope| scope.highest()) {
        assert!(
            (held.level, held_key) < (rank.level, key) || held.level < rank.level,
            "lock order: {} {key} is wanted while {} {held_key} is held",
            rank.name,
            held.name
        );
    }
}

/// The record that a lock is held. The lock's own guard lies beside it.
#[must_use = "the lock counts as held while this lives"]
pub struct Held(Option<(Rc<Scope>, (Rank, u64))>);

impl Held {
    /// Records that the current scope holds the lock `key` of `rank`.
    pub fn new(rank: Rank, key: u64) -> Self {
        if !cfg!(debug_assertions) {
            return Self(None);
        }
        Self(current().map(|scope| {
            scope.held.borrow_mut().push((rank, key));
            (scope, (rank, key))
        }))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((scope, lock)) = self.0.take() {
            let mut held = scope.held.borrow_mut();
            let at = held.iter().rposition(|other| *other == lock).expect("a held lock is listed");
            held.swap_remove(at);
        }
    }
}

/// A mutex with a rank.
pub struct RankedMutex<T> {
    rank: Rank,
    inner: Mutex<T>,
}

/// Access to what a [`RankedMutex`] protects.
pub struct RankedGuard<'a, T> {
    inner: MutexGuard<'a, T>,
    _held: Held,
}

impl<T> RankedMutex<T> {
    /// A mutex around `value`.
    pub const fn new(rank: Rank, value: T) -> Self {
        Self { rank, inner: Mutex::const_new(value) }
    }

    /// Waits for the lock. First come, first served.
    ///
    /// # Panics
    /// In debug builds, if the caller holds a lock of the same or a higher rank.
    pub async fn lock(&self) -> RankedGuard<'_, T> {
        check(self.rank);
        let inner = self.inner.lock().await;
        RankedGuard { inner, _held: Held::new(self.rank, 0) }
    }
}

impl<T> std::ops::Deref for RankedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T> std::ops::DerefMut for RankedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.inner
    }
}

/// A key of locks of one rank.
pub trait LockKey: Eq + Hash + Clone {
    /// The number by which a task that takes several locks takes them in ascending order.
    fn order(&self) -> u64;
}

impl LockKey for u64 {
    fn order(&self) -> u64 {
        *self
    }
}

impl LockKey for Ino {
    fn order(&self) -> u64 {
        self.0
    }
}

impl LockKey for FileId {
    fn order(&self) -> u64 {
        self.ino.0
    }
}

/// Locks by a key, with a rank. A task that takes several takes them in ascending order.
pub struct RankedLocks<K: LockKey = u64> {
    rank: Rank,
    inner: KeyedLocks<K>,
}

/// A lock of [`RankedLocks`], shared or exclusive.
pub struct RankedKey<G> {
    _guard: G,
    _held: Held,
}

impl<K: LockKey> RankedLocks<K> {
    /// Locks of one rank.
    pub fn new(rank: Rank) -> Self {
        Self { rank, inner: KeyedLocks::default() }
    }

    /// The keys on which somebody has a lock or waits for one, in no order.
    pub fn keys(&self) -> Vec<K> {
        self.inner.keys()
    }

    /// Waits until nobody holds the lock exclusively.
    pub async fn shared(&self, key: K) -> RankedKey<Shared<K>> {
        let order = key.order();
        check_key(self.rank, order);
        let guard = self.inner.shared(key).await;
        RankedKey { _guard: guard, _held: Held::new(self.rank, order) }
    }

    /// Waits until nobody else holds the lock.
    pub async fn exclusive(&self, key: K) -> RankedKey<Exclusive<K>> {
        let order = key.order();
        check_key(self.rank, order);
        let guard = self.inner.exclusive(key).await;
        RankedKey { _guard: guard, _held: Held::new(self.rank, order) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    const OUTER: Rank = Rank::new(1, "outer");
    const INNER: Rank = Rank::new(2, "inner");

    /// Polls a future that waits for its own branches at most.
    fn run(future: impl Future<Output = ()>) {
        let mut future = pin!(scoped(future));
        assert!(
            (0..3).any(|_| future.as_mut().now_or_never().is_some()),
            "no lock of these tests is contended"
        );
    }

    fn panics(future: impl Future<Output = ()>) -> bool {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(future))).is_err()
    }

    #[test]
    fn locks_are_acquired_in_ascending_order_only() {
        let (outer, inner) = (RankedMutex::new(OUTER, ()), RankedMutex::new(INNER, ()));
        run(async {
            let _first = outer.lock().await;
            drop(inner.lock().await);
            let _again = inner.lock().await;
        });
        assert!(panics(async {
            let _first = inner.lock().await;
            let _second = outer.lock().await;
        }));
        // The panic released what it held.
        run(async { drop(outer.lock().await) });
    }

    #[test]
    fn keys_of_one_rank_ascend() {
        let locks = RankedLocks::new(OUTER);
        run(async {
            let _first = locks.exclusive(3).await;
            let _second = locks.shared(4).await;
        });
        assert!(panics(async {
            let _first = locks.shared(4).await;
            let _second = locks.exclusive(3).await;
        }));
    }

    #[test]
    fn a_branch_sees_the_locks_around_it_and_not_those_beside_it() {
        let (outer, inner) = (RankedMutex::new(OUTER, ()), RankedMutex::new(INNER, ()));
        run(async {
            let (beside, done) = tokio::sync::oneshot::channel::<()>();
            let holds = scoped(async {
                let _held = inner.lock().await;
                let _ = done.await;
            });
            let takes = scoped(async {
                drop(outer.lock().await);
                let _ = beside.send(());
            });
            futures_util::future::join(holds, takes).await;
        });
        assert!(panics(async {
            let _held = inner.lock().await;
            scoped(async { drop(outer.lock().await) }).await;
        }));
    }

    #[test]
    fn a_wait_is_checked_like_a_lock() {
        let inner = RankedMutex::new(INNER, ());
        assert!(panics(async {
            let _held = inner.lock().await;
            check(INNER);
        }));
    }
}
