//! Reads a range of rows page by page: the loops over [`KvRead::scan`] and [`KvRead::keys`].
//!
//! A row that changes during the read is seen in its old or its new form. A caller that needs one moment must
//! keep others from changing the rows meanwhile.

use crate::{KvError, KvRead, Row};

/// Rows fetched with one request.
const PAGE_ROWS: usize = 1024;

/// A range of rows: the first key, and the first key after the range.
pub type Range = (Vec<u8>, Vec<u8>);

/// A range that is read page by page.
pub struct Pages<'a> {
    kv: &'a dyn KvRead,
    rest: Range,
}

impl<'a> Pages<'a> {
    /// Begins at the start of `range`.
    pub fn new(kv: &'a dyn KvRead, range: Range) -> Self {
        Self { kv, rest: range }
    }

    /// Returns the next rows in order of their keys; none at the end of the range.
    pub async fn next(&mut self) -> Result<Vec<Row>, KvError> {
        let (from, until) = &self.rest;
        let rows = self.kv.scan(from.clone(), until.clone(), PAGE_ROWS).await?;
        self.go_behind(rows.last().map(|(key, _)| key));
        Ok(rows)
    }

    /// Returns the keys of the next rows, in order; none at the end of the range.
    async fn next_keys(&mut self) -> Result<Vec<Vec<u8>>, KvError> {
        let (from, until) = &self.rest;
        let keys = self.kv.keys(from.clone(), until.clone(), PAGE_ROWS).await?;
        self.go_behind(keys.last());
        Ok(keys)
    }

    fn go_behind(&mut self, last: Option<&Vec<u8>>) {
        if let Some(last) = last {
            // The smallest key after the last one.
            self.rest.0 = [&last[..], &[0]].concat();
        }
    }
}

/// Passes every row of `range` to `visit`, in order of the keys. Stops at the first error.
pub async fn for_each<E: From<KvError>>(
    kv: &dyn KvRead,
    range: Range,
    mut visit: impl FnMut(&[u8], &[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut pages = Pages::new(kv, range);
    loop {
        let rows = pages.next().await?;
        if rows.is_empty() {
            return Ok(());
        }
        rows.iter().try_for_each(|(key, value)| visit(key, value))?;
    }
}

/// Passes every key of `range` to `visit`, in order. Stops at the first error. Values of more than 1000 bytes
/// are not read.
pub async fn for_each_key<E: From<KvError>>(
    kv: &dyn KvRead,
    range: Range,
    mut visit: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<(), E> {
    let mut pages = Pages::new(kv, range);
    loop {
        let keys = pages.next_keys().await?;
        if keys.is_empty() {
            return Ok(());
        }
        keys.iter().try_for_each(|key| visit(key))?;
    }
}
