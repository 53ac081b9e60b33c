//! The rows of a store as they were at one moment, for long reads beside changes.
//!
//! A snapshot has a copy of the changes that the engine did not have at its moment, and the engine's tables
//! of then. redb keeps the pages of these tables. So a snapshot is given up before the engine could lack free
//! pages ([`RedbKv::commit`]).

use crate::engine::RedbKv;
use crate::merge::{Rows, merge, range_of};
use crate::moment::Moment;
use crate::{Columns, KvError, KvRead, Row};
use penstock_base::LocalBoxFuture;
use std::rc::{Rc, Weak};

/// A store as it was at one moment.
pub(crate) struct Snapshot {
    /// Rows that the engine did not have yet; it may have them by now.
    changed: Rows,
    moment: Rc<Moment>,
    /// The engine ends without it.
    engine: Weak<RedbKv>,
}

impl Snapshot {
    pub(crate) fn new(changed: Rows, moment: Rc<Moment>, engine: &Rc<RedbKv>) -> Self {
        Self { changed, moment, engine: Rc::downgrade(engine) }
    }

    fn engine(&self) -> Result<Rc<RedbKv>, KvError> {
        self.engine.upgrade().ok_or(KvError::Closed)
    }

    async fn values(&self, keys: Vec<Vec<u8>>) -> Result<Vec<Option<Vec<u8>>>, KvError> {
        let missing = keys.iter().filter(|key| !self.changed.contains_key(*key)).cloned().collect();
        let found = self.engine()?.get_many(Some(self.moment.tables()?), missing).await?;
        let mut found = found.into_iter();
        let value = |key| match self.changed.get(key) {
            Some(changed) => changed.clone(),
            None => found.next().flatten(),
        };
        let values = keys.iter().map(value).collect();
        assert!(found.next().is_none(), "every value of the engine has its place");
        Ok(values)
    }

    async fn rows(
        &self,
        columns: Columns,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> Result<Vec<Row>, KvError> {
        let changed = range_of(&self.changed, &from, &until);
        let engine = self.engine()?;
        let scan =
            async |from, until| engine.scan(Some(self.moment.tables()?), columns, from, until, limit).await;
        merge(changed, scan, from, until, limit).await
    }
}

impl KvRead for Snapshot {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move { Ok(self.values(vec![key]).await?.pop().flatten()) })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(self.values(keys))
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(self.rows(Columns::KeysAndValues, from, until, limit))
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(async move {
            let rows = self.rows(Columns::Keys, from, until, limit).await?;
            Ok(rows.into_iter().map(|(key, _)| key).collect())
        })
    }
}
