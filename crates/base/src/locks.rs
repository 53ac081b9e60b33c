//! One lock per key, made when it is wanted and dropped with its last user.

use crate::HashMap;
use std::cell::RefCell;
use std::hash::Hash;
use std::rc::Rc;
use std::sync::Arc;
use tokio::sync::{OwnedRwLockReadGuard, OwnedRwLockWriteGuard, RwLock};

type Held<K> = Rc<RefCell<HashMap<K, (Arc<RwLock<()>>, usize)>>>;

/// Locks by key; first come, first served.
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

/// While it lives nobody changes what the key stands for.
pub struct Shared<K: Eq + Hash + Clone> {
    _guard: OwnedRwLockReadGuard<()>,
    _ticket: Ticket<K>,
}

/// While it lives nobody else reads or changes what the key stands for.
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

    /// Waits until nobody changes what the key stands for.
    pub async fn shared(&self, key: K) -> Shared<K> {
        let (lock, ticket) = self.ticket(key);
        Shared { _guard: lock.read_owned().await, _ticket: ticket }
    }

    /// Waits until nobody else uses what the key stands for.
    pub async fn exclusive(&self, key: K) -> Exclusive<K> {
        let (lock, ticket) = self.ticket(key);
        Exclusive { _guard: lock.write_owned().await, _ticket: ticket }
    }
}
