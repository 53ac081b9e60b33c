//! A moment of an engine that is held: its tables of then, and the space that their pages keep.

use crate::KvError;
use crate::lane::Tables;
use std::cell::RefCell;
use std::sync::Arc;

/// The engine's tables of one moment, until they are given up.
pub(crate) struct Moment {
    tables: RefCell<Option<Arc<Tables>>>,
    /// Bytes that its rows count for.
    used_bytes: u64,
    /// Bytes of the file that were written before.
    written_before: u64,
}

impl Moment {
    pub(crate) fn new(tables: Arc<Tables>, used_bytes: u64, written_before: u64) -> Self {
        let moment = Self { tables: RefCell::new(Some(tables)), used_bytes, written_before };
        assert!(moment.is_held() && moment.most_bytes(written_before) == 3 * used_bytes);
        moment
    }

    /// Most bytes that pages of the file take when so many were written. Those of rows take three times what
    /// they count for ([`crate::engine`]).
    pub(crate) fn most_bytes(&self, written_bytes: u64) -> u64 {
        assert!(written_bytes >= self.written_before, "what is written is counted up");
        3 * self.used_bytes + (written_bytes - self.written_before)
    }

    /// Later reads fail. Reads that have begun have the tables until they end.
    pub(crate) fn give_up(&self) -> std::sync::Weak<Tables> {
        self.tables.take().as_ref().map(Arc::downgrade).unwrap_or_default()
    }

    /// True until it is given up.
    pub(crate) fn is_held(&self) -> bool {
        self.tables.borrow().is_some()
    }

    /// The tables, as long as they are held.
    pub(crate) fn tables(&self) -> Result<Arc<Tables>, KvError> {
        self.tables.borrow().clone().ok_or(KvError::SnapshotGone)
    }
}
