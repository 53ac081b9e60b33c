//! Rows of a full target of any size, made when they are read.
//!
//! Every block is used, but for one stripe in each hundredth allocation group. These stripes are written and
//! hold nothing, as a crash leaves them.

use penstock_base::LocalBoxFuture;
use penstock_chunk::rows::{
    Counts, GROUPS_IN_A_ROW, all_counts, counts_key, decode_counts_key, decode_group_key, encode_counts,
    encode_group,
};
use penstock_kv::{Kv, KvError, Row, Usage, WriteSet};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Words in a group's row.
const GROUP_WORDS: usize = 512;
/// Of so many groups one has an empty stripe.
const GROUPS_WITH_AN_EMPTY_STRIPE: u64 = 100;

/// The rows of a target.
pub(crate) struct MadeKv {
    blocks: u64,
    stripe_blocks: u64,
    written: RefCell<BTreeMap<Vec<u8>, Vec<u8>>>,
}

impl MadeKv {
    pub(crate) fn new(blocks: u64, stripe_blocks: u64) -> Self {
        Self { blocks, stripe_blocks, written: RefCell::default() }
    }

    fn blocks_each(&self) -> u64 {
        64 * GROUP_WORDS as u64 / self.stripe_blocks * self.stripe_blocks
    }

    /// Allocation groups.
    pub(crate) fn groups(&self) -> u64 {
        self.blocks.div_ceil(self.blocks_each())
    }

    /// Stripes without a used block.
    pub(crate) fn empty_stripes(&self) -> u64 {
        self.groups().div_ceil(GROUPS_WITH_AN_EMPTY_STRIPE)
    }

    /// The first block of a group that is used, and the block behind its last one, counted from its start.
    fn used(&self, group: u64) -> (u64, u64) {
        let end = self.blocks_each().min(self.blocks - group * self.blocks_each());
        (if group.is_multiple_of(GROUPS_WITH_AN_EMPTY_STRIPE) { self.stripe_blocks } else { 0 }, end)
    }

    fn counts_row(&self, row: u64) -> Vec<u8> {
        let groups = row * GROUPS_IN_A_ROW..self.groups().min((row + 1) * GROUPS_IN_A_ROW);
        let counts = groups.map(|group| {
            let (first, end) = self.used(group);
            Counts { used: (end - first) as u16, empty: u16::from(first > 0) }
        });
        encode_counts(&counts.collect::<Vec<_>>())
    }

    fn group_row(&self, group: u64) -> Vec<u8> {
        let mut words = [0u64; GROUP_WORDS];
        let (first, end) = self.used(group);
        (first..end).for_each(|bit| words[(bit / 64) as usize] |= 1 << (bit % 64));
        encode_group(&words)
    }

    fn row(&self, key: &[u8]) -> Option<Vec<u8>> {
        if let Some(written) = self.written.borrow().get(key) {
            return Some(written.clone());
        }
        decode_group_key(key).filter(|group| *group < self.groups()).map(|group| self.group_row(group))
    }
}

impl Kv for MadeKv {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move { Ok(self.row(&key)) })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(async move { Ok(keys.iter().map(|key| self.row(key)).collect()) })
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(async move {
            // Nothing else is looked for by range, and there are no files.
            let (first, end) = all_counts();
            if !(from >= first && until <= end) {
                return Ok(Vec::new());
            }
            // The key behind a row is that of the row with a byte more.
            let next = |key: &[u8]| decode_counts_key(key.strip_suffix(&[0])?).map(|row| row + 1);
            let rows = next(&from).unwrap_or(0)..self.groups().div_ceil(GROUPS_IN_A_ROW);
            Ok(rows.take(limit).map(|row| (counts_key(row), self.counts_row(row))).collect())
        })
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(
            async move { Ok(self.scan(from, until, limit).await?.into_iter().map(|(key, _)| key).collect()) },
        )
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            let mut written = self.written.borrow_mut();
            for (key, value) in writes.changes() {
                match value {
                    Some(value) => drop(written.insert(key.to_vec(), value.to_vec())),
                    None => drop(written.remove(key)),
                }
            }
            Ok(())
        })
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.commit(writes)
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async { Ok(()) })
    }

    fn usage(&self) -> Usage {
        Usage::default()
    }
}
