//! Cutting a file short and removing it. The rows change in the caller's transaction, together with its size or with
//! the removal of its inode, so that a crash never shows one without the other.

use crate::ChunkError;
use crate::chunk::Chunk;
use crate::rows::{ChunkKey, map_range};
use crate::target::Target;
use penstock_base::Ino;
use penstock_kv::{WriteSet, for_each};
use std::collections::BTreeSet;

impl Target {
    /// Drops all blocks of a file from `first_block` on and commits that together with `writes`. Later writes of an
    /// older truncate generation than `cut` are refused.
    pub async fn cut(
        &self,
        branch: u64,
        ino: Ino,
        first_block: u64,
        cut: u64,
        mut writes: WriteSet,
    ) -> Result<(), ChunkError> {
        let _open = self.gate.read().await;
        let _lock = self.inode_locks.exclusive((branch, ino)).await;
        let per_chunk = u64::from(self.config.chunk_blocks);
        let first_chunk = first_block / per_chunk;
        let mut locks = Vec::new();
        let mut chunks = Vec::new();
        for key in self.keys_from(branch, ino, first_chunk).await? {
            locks.push(self.chunk_locks.exclusive(key).await);
            chunks.push((key, self.chunk(key).await?));
        }
        // A row that stays may point to blocks written since the last commit. Before anything is changed: a cut that
        // fails here did nothing.
        if chunks.iter().any(|(_, chunk)| !chunk.borrow().allocated.is_empty()) {
            self.volume.flush().await?;
        }
        self.cuts
            .borrow_mut()
            .entry((branch, ino))
            .and_modify(|known| *known = cut.max(*known))
            .or_insert(cut);
        let mut changes = Vec::new();
        let mut back = Vec::new();
        for (key, chunk) in &chunks {
            let from =
                (first_block.saturating_sub(key.index.saturating_mul(per_chunk))).min(per_chunk) as u32;
            self.drop_dirty(*key, from);
            back.extend(chunk.borrow_mut().cut(from, u32::MAX));
            changes.extend(Chunk::take_changes(chunk, *key));
        }
        writes.reclaims();
        let result = self.commit_rows(changes, writes).await;
        self.give_back(back);
        result
    }

    /// Forgets what is kept about a file that is gone.
    pub fn forget(&self, branch: u64, ino: Ino) {
        self.cuts.borrow_mut().remove(&(branch, ino));
        let keys = self.keys_of(branch, ino, |chunk| chunk.is_clean() && chunk.map.is_empty());
        keys.iter().for_each(|key| drop(self.chunks.borrow_mut().remove(key)));
    }

    /// Keys of the chunks from `index` on that have a row or are in memory.
    async fn keys_from(&self, branch: u64, ino: Ino, index: u64) -> Result<BTreeSet<ChunkKey>, ChunkError> {
        let mut keys: BTreeSet<ChunkKey> =
            self.keys_of(branch, ino, |_| true).into_iter().filter(|key| key.index >= index).collect();
        for_each(&*self.kv, map_range(branch, ino, index), |key, _| {
            keys.insert(ChunkKey::decode(key)?.0);
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok(keys)
    }

    fn drop_dirty(&self, key: ChunkKey, from: u32) {
        let Some(chunk) = self.chunks.borrow().get(&key).cloned() else { return };
        let mut chunk = chunk.borrow_mut();
        let dropped = chunk.dirty.split_off(&from);
        if dropped.is_empty() {
            return;
        }
        let promised = dropped.values().filter(|block| block.promised).count() as u64;
        self.space.borrow_mut().unpromise(promised);
        self.dirty_blocks.set(self.dirty_blocks.get() - dropped.len() as u64);
        if chunk.dirty.is_empty() {
            self.waiting.borrow_mut().remove(&chunk.since);
        }
    }
}
