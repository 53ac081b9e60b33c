//! Rows of a full target of any size, made when they are read.
//!
//! Every block is used, but for one stripe in each hundredth allocation group. These stripes are written and
//! hold nothing, as a crash leaves them.

use penstock_base::LocalBoxFuture;
use penstock_chunk::rows::{
    Counts, GROUP_WORDS, GROUPS_IN_A_ROW, all_counts, counts_key, decode_counts_key, decode_group_key,
    encode_counts, encode_group,
};
use penstock_kv::{Kv, KvError, KvRead, MemKv, Row, Usage, WriteSet};
use std::rc::Rc;

/// The budget of the rows that are written.
const BUDGET_BYTES: u64 = 1 << 30;
/// Of so many groups one has an empty stripe.
const GROUPS_WITH_AN_EMPTY_STRIPE: u64 = 100;

/// The rows of a target.
pub(crate) struct MadeKv {
    blocks: u64,
    stripe_blocks: u64,
    /// Rows that were written: they count, and not those that are made.
    written: Rc<MemKv>,
}

impl MadeKv {
    pub(crate) fn new(blocks: u64, stripe_blocks: u64) -> Self {
        Self { blocks, stripe_blocks, written: MemKv::new(BUDGET_BYTES) }
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

    /// A row as it was written, or as it is made.
    fn row(&self, key: &[u8], written: Option<Vec<u8>>) -> Option<Vec<u8>> {
        let group = || decode_group_key(key).filter(|group| *group < self.groups());
        written.or_else(|| group().map(|group| self.group_row(group)))
    }
}

impl KvRead for MadeKv {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async move {
            let written = self.written.get(key.clone()).await?;
            Ok(self.row(&key, written))
        })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(async move {
            let written = self.written.get_many(keys.clone()).await?;
            Ok(keys.iter().zip(written).map(|(key, written)| self.row(key, written)).collect())
        })
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
}

impl Kv for MadeKv {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        self.written.snapshot()
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.written.commit(writes)
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.written.commit_durable(writes)
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.written.flush()
    }

    fn usage(&self) -> Usage {
        self.written.usage()
    }
}
