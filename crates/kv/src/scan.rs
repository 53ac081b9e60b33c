//! Reading a range of rows page by page: the one loop over [`Kv::scan`].
//!
//! Rows that change while a range is read are seen in their old or their new form. Whoever needs one moment keeps
//! others from changing them meanwhile.

use crate::{Kv, KvError, Row};

/// Rows fetched at once.
const PAGE_ROWS: usize = 1024;

/// Rows with `from <= key < until`.
pub type Range = (Vec<u8>, Vec<u8>);

/// A range that is read page by page.
pub struct Pages<'a> {
    kv: &'a dyn Kv,
    rest: Range,
}

impl<'a> Pages<'a> {
    /// Begins at the start of `range`.
    pub fn new(kv: &'a dyn Kv, range: Range) -> Self {
        Self { kv, rest: range }
    }

    /// The next rows in order of their keys; none at the end.
    pub async fn next(&mut self) -> Result<Vec<Row>, KvError> {
        let (from, until) = &self.rest;
        let rows = self.kv.scan(from.clone(), until.clone(), PAGE_ROWS).await?;
        if let Some((last, _)) = rows.last() {
            // The smallest key behind the last one.
            self.rest.0 = [&last[..], &[0]].concat();
        }
        Ok(rows)
    }
}

/// Shows every row of `range` to `visit`, in order of the keys, until one is refused.
pub async fn for_each<E: From<KvError>>(
    kv: &dyn Kv,
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
