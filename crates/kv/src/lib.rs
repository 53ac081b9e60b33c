//! The ordered transactional key-value store that holds the maps and the name space.
//!
//! Owns the [`Kv`] trait and its engine, redb on a volume. A transaction is a write set. It is applied in
//! full, every later read sees it, and it is durable after a later [`Kv::flush`]. After a crash the store
//! holds a prefix of the write sets, and that prefix contains every flushed one.
//!
//! Commits go to memory first and to redb in batches ([`AheadKv`]). A flush writes the new changes to a
//! journal ([`journal`]). redb blocks, so it runs on threads of its own ([`lane`]). Its reads and writes
//! return as requests to the worker that owns the volume ([`backend`]).
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod ahead;
mod backend;
mod damage;
mod engine;
pub mod header;
pub mod journal;
mod lane;
mod memory;
mod merge;
mod moment;
mod pieces;
mod scan;
mod snapshot;
mod volume;

pub use ahead::{AheadKv, KvLatency};
pub use engine::RedbKv;
pub use lane::{CACHE_BYTES, Engine, Mode};
pub use memory::MemKv;
pub use scan::{Pages, Range, for_each, for_each_key};

use penstock_base::{ErrorKind, LocalBoxFuture};
use std::collections::BTreeMap;
use std::rc::Rc;

/// A row: its key and its value.
pub type Row = (Vec<u8>, Vec<u8>);

/// The columns of rows that a scan reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    Keys,
    KeysAndValues,
}

/// The share of the headroom that a transaction may use. The headroom is the space of a store beyond its
/// budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Reserve {
    #[default]
    Nothing,
    Part,
    All,
}

/// A transaction that adds nothing new may exceed the budget by one part in this many of it. Rows take at
/// most three times the bytes that they count for, so at most 27/32 of the volume is in use then (`budget` in
/// [`engine`]).
const PART_OF_BUDGET: u64 = 8;

impl Reserve {
    /// The most bytes of rows that a store with a budget of `budget_bytes` may hold after a transaction.
    fn most_bytes(self, budget_bytes: u64) -> u64 {
        match self {
            Reserve::Nothing => budget_bytes,
            Reserve::Part => budget_bytes + budget_bytes / PART_OF_BUDGET,
            Reserve::All => u64::MAX,
        }
    }
}

/// A transaction: rows to put and keys to delete, applied in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriteSet {
    changes: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    reserve: Reserve,
}

impl WriteSet {
    /// A transaction without changes, which may not use the headroom.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a row, in place of any row with the same key.
    pub fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> &mut Self {
        self.changes.push((key, Some(value)));
        self
    }

    /// Deletes a row. Deleting a row that does not exist is no error.
    pub fn delete(&mut self, key: Vec<u8>) -> &mut Self {
        self.changes.push((key, None));
        self
    }

    /// Marks the transaction as one that frees space, so that it may use all of the headroom. The store does
    /// not bound what it adds: the caller must.
    pub fn reclaims(&mut self) -> &mut Self {
        self.reserve = Reserve::All;
        self
    }

    /// Marks the transaction as one that adds nothing new: it changes existing rows, or frees space that is
    /// kept elsewhere, and its rows may get longer by that. It may use a part of the headroom: an eighth of
    /// the budget.
    pub fn changes_what_is_there(&mut self) -> &mut Self {
        self.reserve = self.reserve.max(Reserve::Part);
        self
    }

    /// Appends the changes of another transaction. The result may use the larger headroom of the two.
    pub fn append(&mut self, other: Self) -> &mut Self {
        self.changes.extend(other.changes);
        self.reserve = self.reserve.max(other.reserve);
        self
    }

    /// The changes, in order: each key with the value that is put, or `None` if the key is deleted.
    pub fn changes(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        self.changes.iter().map(|(key, value)| (&key[..], value.as_deref()))
    }

    /// True if there are no changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The last change of each key.
    fn newest(&self) -> BTreeMap<&[u8], Option<&[u8]>> {
        self.changes().collect()
    }

    /// Bytes that its rows count for after it, and before it. `before` holds the lengths of the values before
    /// it, one for each key of [`WriteSet::newest`].
    fn newest_bytes(&self, before: impl IntoIterator<Item = Option<usize>>) -> (u64, u64) {
        let bytes = |key: &[u8], len: Option<usize>| len.map_or(0, |len| pieces::row_bytes(key, len));
        let newest = self.newest();
        let new = newest.iter().map(|(key, value)| bytes(key, value.map(<[u8]>::len))).sum();
        let old = newest.keys().zip(before).map(|(key, len)| bytes(key, len)).sum();
        (new, old)
    }

    /// The most that all its changes together count for.
    fn bytes(&self) -> u64 {
        let row = |(key, value): &(Vec<u8>, Option<Vec<u8>>)| {
            value.as_ref().map_or(key.len() as u64, |value| pieces::row_bytes(key, value.len()))
        };
        self.changes.iter().map(row).sum()
    }
}

/// Every store accepts a transaction of this many rows, if each has at most 4 KiB.
pub const ROWS_AT_ONCE: usize = 256;

/// Commits changes that need not be applied together, in transactions of at most [`ROWS_AT_ONCE`] changes. An
/// error leaves the transactions before it committed.
pub async fn commit_apart(kv: &dyn Kv, writes: WriteSet) -> Result<(), KvError> {
    let WriteSet { changes, reserve } = writes;
    let mut left = changes.into_iter().peekable();
    while left.peek().is_some() {
        let changes = left.by_ref().take(ROWS_AT_ONCE).collect();
        kv.commit(WriteSet { changes, reserve }).await?;
    }
    Ok(())
}

/// Error of a store: the operation was not carried out.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KvError {
    /// The rows would need more space than the budget and the headroom that the transaction may use.
    #[error("the key-value store is full: {used_bytes} of {budget_bytes} bytes of rows")]
    NoSpace {
        /// Bytes that all rows count for.
        used_bytes: u64,
        /// The budget of the store in bytes, without headroom.
        budget_bytes: u64,
    },
    /// One transaction changes so many pages that a store of this size may have no free ones for them.
    #[error(
        "a transaction of {rows} rows and {bytes} bytes is too long for this key-value store: its pages may take \
         {longest_bytes} bytes"
    )]
    TooLong {
        /// Rows that the transaction changes.
        rows: u64,
        /// Bytes in these rows.
        bytes: u64,
        /// Bytes that the pages changed by one transaction may take.
        longest_bytes: u64,
    },
    /// The engine failed or stopped. The store must be opened again.
    #[error("the key-value engine failed: {0}")]
    Engine(String),
    /// The contents of the store cannot be read, or are not what was written. The engine must be opened
    /// again.
    #[error("the key-value store is damaged: {0}")]
    Corrupt(String),
    /// The store has a structure of a later release: nothing is wrong with it.
    #[error("the key-value store is of a later release: {0}")]
    Later(penstock_base::DecodeError),
    /// The snapshot was given up. Nothing is wrong with the store.
    #[error("the snapshot of the key-value store was given up: changes needed its space")]
    SnapshotGone,
    /// The store was closed, or the machine stops.
    #[error("the key-value store is closed")]
    Closed,
}

impl From<penstock_base::DecodeError> for KvError {
    fn from(error: penstock_base::DecodeError) -> Self {
        match error {
            penstock_base::DecodeError::Unknown { .. } => Self::Later(error),
            error => Self::Corrupt(error.to_string()),
        }
    }
}

impl KvError {
    /// The class of the error, by which the caller decides how to react.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoSpace { .. } | Self::TooLong { .. } => ErrorKind::NoSpace,
            Self::Engine(_) | Self::Corrupt(_) | Self::Later(_) | Self::SnapshotGone | Self::Closed => {
                ErrorKind::Internal
            }
        }
    }
}

/// Space used and operations done by a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that all rows count for.
    pub used_bytes: u64,
    /// The budget in bytes. Beyond it the store only accepts transactions that may use the headroom.
    pub budget_bytes: u64,
    /// Transactions committed since the store was opened.
    pub commits: u64,
    /// Flushes since the store was opened that had something to make durable.
    pub flushes: u64,
}

/// Rows of a store that can be read: as they are, or as they were at one moment.
pub trait KvRead {
    /// Returns the value of a key, or `None` if there is no such row.
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>>;

    /// Returns the values of several keys, as they were at one moment.
    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>>;

    /// Returns up to `limit` rows with `from <= key < until`, in order of the keys.
    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>>;

    /// Returns the keys of up to `limit` rows with `from <= key < until`, in order. Values of more than 1000
    /// bytes are not read.
    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>>;
}

/// An ordered transactional key-value store.
pub trait Kv: KvRead {
    /// Returns the rows of this moment, for a long read beside changes. It takes memory for the newest
    /// changes, and keeps pages of the store from being used again. If the store needs these, the snapshot is
    /// given up, and its reads fail with [`KvError::SnapshotGone`].
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>>;

    /// Applies all changes of a transaction or none. Later reads see them. They are durable after a later
    /// flush.
    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>>;

    /// Applies a transaction, then makes it and all earlier ones durable.
    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>>;

    /// Makes every committed transaction durable.
    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>>;

    /// Returns the space used and the operations done.
    fn usage(&self) -> Usage;
}
