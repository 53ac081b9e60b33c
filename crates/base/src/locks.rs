//! One lock per key, created on first use and dropped with its last user.

use crate::HashMap;
use std::cell::RefCell;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

type Held<K> = Rc<RefCell<HashMap<K, (Arc<RwLock<()>>, usize)>>>;

/// Reader-writer locks by key. Each is fair: first come, first served.
pub struct KeyedLocks<K: Eq + Hash + Clone> {
    held: Held<K>,
}

impl<K: Eq + Hash + Clone> Default for KeyedLocks<K> {
    fn default() -> Self {
        Self { held: Rc::default() }
    }
}

struct Ticket<K: Eq + Hash + Clone> {
    held: Held<K>,
    key: K,
}

impl<K: Eq + Hash + Clone> Drop for Ticket<K> {
    fn drop(&mut self) {
        let mut held = self.held.borrow_mut();
        let (_, users) = held.get_mut(&self.key).expect("a lock stays while it has users");
        *users -= 1;
        if *users == 0 {
            held.remove(&self.key);
        }
    }
}

/// A read lock on a key: nobody has the write lock while this guard lives.
pub struct Shared<K: Eq + Hash + Clone> {
    _guard: OwnedRwLockReadGuard<()>,
    _ticket: Ticket<K>,
}

/// The write lock on a key: nobody else has a lock on it while this guard lives.
pub struct Exclusive<K: Eq + Hash + Clone> {
    _guard: OwnedRwLockWriteGuard<()>,
    _ticket: Ticket<K>,
}

impl<K: Eq + Hash + Clone> KeyedLocks<K> {
    fn ticket(&self, key: K) -> (Arc<RwLock<()>>, Ticket<K>) {
        let mut held = self.held.borrow_mut();
        let (lock, users) = held.entry(key.clone()).or_default();
        *users += 1;
        (lock.clone(), Ticket { held: self.held.clone(), key })
    }

    /// The keys on which somebody has a lock or waits for one, in no order.
    pub fn keys(&self) -> Vec<K> {
        self.held.borrow().keys().cloned().collect()
    }

    /// Acquires a read lock on `key`.
    pub async fn shared(&self, key: K) -> Shared<K> {
        let (lock, ticket) = self.ticket(key);
        Shared { _guard: lock.read_owned().await, _ticket: ticket }
    }

    /// Acquires the write lock on `key`.
    pub async fn exclusive(&self, key: K) -> Exclusive<K> {
        let (lock, ticket) = self.ticket(key);
        Exclusive { _guard: lock.write_owned().await, _ticket: ticket }
    }
}
