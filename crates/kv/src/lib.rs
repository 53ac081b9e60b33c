//! The ordered transactional key-value store under maps and names.
//!
//! Owns the [`Kv`] trait and its engine, redb on a volume. A transaction is a write set: it is applied whole, seen by
//! every later read, and durable after a later [`Kv::flush`]. After a crash the store holds a prefix of the write
//! sets that contains every flushed one.
//!
//! Commits go to memory first and to redb in batches ([`AheadKv`]); a flush writes what is new to a journal
//! ([`journal`]). redb blocks, so it runs on threads of its own ([`lane`]); what it reads and writes comes back as
//! requests to the worker that owns the volume ([`backend`]).
#![forbid(unsafe_code)]

mod ahead;
mod backend;
mod engine;
pub mod header;
pub mod journal;
mod lane;
mod pieces;
mod scan;
mod volume;

pub use ahead::{AheadKv, KvLatency};
pub use engine::RedbKv;
pub use lane::Mode;
pub use scan::{Pages, Range, for_each, for_each_key};

use penstock_base::{Kind, LocalBoxFuture};
use std::collections::BTreeMap;

/// A row.
pub type Row = (Vec<u8>, Vec<u8>);

/// What a scan reads of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Columns {
    Keys,
    KeysAndValues,
}

/// How much of what a store keeps beyond its budget a transaction may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
enum Reserve {
    #[default]
    Nothing,
    Part,
    All,
}

/// A transaction: rows to put and keys to delete, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WriteSet {
    changes: Vec<(Vec<u8>, Option<Vec<u8>>)>,
    reserve: Reserve,
}

impl WriteSet {
    /// A transaction without changes.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts a row.
    pub fn put(&mut self, key: Vec<u8>, value: Vec<u8>) -> &mut Self {
        self.changes.push((key, Some(value)));
        self
    }

    /// Deletes a row; one that does not exist is no error.
    pub fn delete(&mut self, key: Vec<u8>) -> &mut Self {
        self.changes.push((key, None));
        self
    }

    /// Says that the transaction gives space back, so that it may use the reserve. Nothing bounds it: what it adds must be
    /// bounded by its kind.
    pub fn reclaims(&mut self) -> &mut Self {
        self.reserve = Reserve::All;
        self
    }

    /// Says that the transaction adds nothing new: it changes what there is, or gives back what is kept elsewhere, and its rows
    /// may get longer for that. It may use a part of the reserve.
    pub fn changes_what_is_there(&mut self) -> &mut Self {
        self.reserve = self.reserve.max(Reserve::Part);
        self
    }

    /// Adds the changes of another transaction behind these.
    pub fn append(&mut self, other: Self) -> &mut Self {
        self.changes.extend(other.changes);
        self.reserve = self.reserve.max(other.reserve);
        self
    }

    /// The changes, in order: keys with the values put, or without one where they are deleted.
    pub fn changes(&self) -> impl Iterator<Item = (&[u8], Option<&[u8]>)> {
        self.changes.iter().map(|(key, value)| (&key[..], value.as_deref()))
    }

    /// Whether there are no changes.
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The last change of each key.
    fn newest(&self) -> BTreeMap<&[u8], Option<&[u8]>> {
        self.changes().collect()
    }

    fn bytes(&self) -> u64 {
        let row = |(key, value): &(Vec<u8>, Option<Vec<u8>>)| {
            value.as_ref().map_or(key.len() as u64, |value| pieces::row_bytes(key, value.len()))
        };
        self.changes.iter().map(row).sum()
    }
}

/// Rows that every store takes in one transaction, of up to 4 KiB each.
pub const ROWS_AT_ONCE: usize = 256;

/// Commits changes of rows that need not change together, in transactions that every store takes.
pub async fn commit_apart(kv: &dyn Kv, writes: WriteSet) -> Result<(), KvError> {
    let WriteSet { changes, reserve } = writes;
    let mut left = changes.into_iter().peekable();
    while left.peek().is_some() {
        let changes = left.by_ref().take(ROWS_AT_ONCE).collect();
        kv.commit(WriteSet { changes, reserve }).await?;
    }
    Ok(())
}

/// An operation on a store did not happen.
#[derive(Clone, Debug, thiserror::Error)]
pub enum KvError {
    /// The rows would need more space than the store has, less its reserve.
    #[error("the key-value store is full: {used_bytes} of {budget_bytes} bytes of rows")]
    NoSpace {
        /// Bytes in rows.
        used_bytes: u64,
        /// Bytes there may be.
        budget_bytes: u64,
    },
    /// One transaction changes so much that a store of this size may have no room for it.
    #[error(
        "a transaction of {rows} rows and {bytes} bytes is too long for this key-value store: its pages may take \
         {longest_bytes} bytes"
    )]
    TooLong {
        /// Rows that it changes.
        rows: u64,
        /// Bytes in them.
        bytes: u64,
        /// Bytes that the pages it changes may take.
        longest_bytes: u64,
    },
    /// The engine failed or stopped; the store must be opened again.
    #[error("the key-value engine failed: {0}")]
    Engine(String),
    /// The store was closed, or the machine stops.
    #[error("the key-value store is closed")]
    Closed,
}

impl KvError {
    /// What the caller must do.
    pub fn kind(&self) -> Kind {
        match self {
            Self::NoSpace { .. } | Self::TooLong { .. } => Kind::NoSpace,
            Self::Engine(_) | Self::Closed => Kind::Internal,
        }
    }
}

/// How full a store is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes in rows.
    pub used_bytes: u64,
    /// Bytes there may be before only transactions that reclaim are taken.
    pub budget_bytes: u64,
    /// Transactions committed.
    pub commits: u64,
    /// Durable commits.
    pub flushes: u64,
}

/// An ordered transactional key-value store.
pub trait Kv {
    /// The value of a key.
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>>;

    /// The values of several keys, all of one moment.
    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>>;

    /// Up to `limit` rows with `from <= key < until`, in order of the keys.
    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>>;

    /// The keys of up to `limit` rows with `from <= key < until`, in order. Values that are long against a page are not read.
    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>>;

    /// Applies a transaction whole. Later reads see it; it is durable after a later flush.
    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>>;

    /// Applies a transaction and makes it and every one before it durable.
    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>>;

    /// Makes every committed transaction durable.
    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>>;

    /// How full the store is.
    fn usage(&self) -> Usage;
}
