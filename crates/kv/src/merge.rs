//! Rows of an engine together with changes that it does not have.

use crate::{KvError, Row};
use std::collections::BTreeMap;
use std::ops::Bound;

/// Changed rows; `None` is a deleted row.
pub(crate) type Rows = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// The changes in a range.
pub(crate) fn range_of(rows: &Rows, from: &[u8], until: &[u8]) -> Rows {
    let bounds = (Bound::Included(from), Bound::Excluded(until));
    rows.range::<[u8], _>(bounds).map(|(key, value)| (key.clone(), value.clone())).collect()
}

/// Up to `limit` rows of a range: those that `scan` has, but for these changes of rows in it.
pub(crate) async fn merge(
    mut changed: Rows,
    scan: impl AsyncFn(Vec<u8>, Vec<u8>) -> Result<Vec<Row>, KvError>,
    mut from: Vec<u8>,
    until: Vec<u8>,
    limit: usize,
) -> Result<Vec<Row>, KvError> {
    let mut rows = Vec::new();
    assert!(changed.keys().all(|key| *key >= from && *key < until), "the changes are of the range");
    loop {
        let stored = scan(from, until.clone()).await?;
        let last = stored.len() < limit;
        let end = stored.last().map(|(key, _)| key.clone());
        let mut stored = stored.into_iter().peekable();
        // Both are in order. A changed row replaces the stored one with the same key.
        loop {
            let next = match (changed.first_key_value(), stored.peek()) {
                (Some((mine, _)), Some((theirs, _))) if mine <= theirs => {
                    if mine == theirs {
                        stored.next();
                    }
                    changed.pop_first()
                }
                (_, Some(_)) => stored.next().map(|(key, value)| (key, Some(value))),
                // Stored rows that follow a full page may come before the changed ones.
                (Some(_), None) if last => changed.pop_first(),
                (_, None) => None,
            };
            let Some((key, value)) = next else { break };
            assert!(rows.last().is_none_or(|(before, _)| *before < key), "rows are in order, each once");
            rows.extend(value.map(|value| (key, value)));
            if rows.len() == limit {
                return Ok(rows);
            }
        }
        match end {
            Some(end) if !last => from = [&end[..], &[0]].concat(),
            _ => return Ok(rows),
        }
    }
}
