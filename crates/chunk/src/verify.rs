//! Checking a target: each block is owned once, and map and bits agree.

use crate::ChunkError;
use crate::rows::{ChunkKey, all_maps, decode_map};
use crate::target::{SCAN_ROWS, Target};
use penstock_base::{HashMap, Ino};

/// What a check of a target found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TargetCheck {
    /// Map rows.
    pub chunks: u64,
    /// Blocks that rows point to.
    pub blocks: u64,
    /// What is wrong, a line each.
    pub problems: Vec<String>,
    /// Files that have chunks, with the number of their blocks.
    pub owners: HashMap<(u64, Ino), u64>,
}

impl Target {
    /// Checks all rows. The caller holds the gate exclusively and has made everything durable.
    pub async fn check(&self) -> Result<TargetCheck, ChunkError> {
        let mut check = TargetCheck::default();
        let mut owner: HashMap<u64, ChunkKey> = HashMap::default();
        let (mut from, until) = all_maps();
        loop {
            let rows = self.kv.scan(from, until.clone(), SCAN_ROWS).await?;
            let Some((last, _)) = rows.last() else { break };
            from = [&last[..], &[0]].concat();
            for (key, value) in &rows {
                self.check_row(key, value, &mut owner, &mut check);
            }
        }
        let space = self.space.borrow();
        for block in 0..space.usage().total_blocks {
            match (owner.get(&block), space.is_committed(block)) {
                (Some(key), false) => {
                    check.problems.push(format!("block {block} of {key:?} is marked as free"))
                }
                (None, true) => {
                    check.problems.push(format!("block {block} is marked as used and belongs to no file"))
                }
                _ => {}
            }
        }
        Ok(check)
    }

    fn check_row(
        &self,
        key: &[u8],
        value: &[u8],
        owner: &mut HashMap<u64, ChunkKey>,
        check: &mut TargetCheck,
    ) {
        let (key, extents) = match ChunkKey::decode(key).and_then(|(key, _)| Ok((key, decode_map(value)?))) {
            Ok(row) => row,
            Err(error) => return check.problems.push(format!("map row {key:02x?}: {error}")),
        };
        check.chunks += 1;
        for extent in extents {
            if extent.first + extent.count > self.config.chunk_blocks {
                check.problems.push(format!("{key:?}: {extent:?} is beyond the chunk"));
            }
            let (end, blocks) = (extent.block + u64::from(extent.count), self.volume.blocks());
            if end > blocks {
                check.problems.push(format!("{key:?}: {extent:?} is beyond the volume"));
            }
            for block in extent.block..end.min(blocks) {
                if let Some(other) = owner.insert(block, key) {
                    check.problems.push(format!("block {block} belongs to {key:?} and to {other:?}"));
                }
                check.blocks += 1;
                *check.owners.entry((key.branch, key.ino)).or_default() += 1;
            }
        }
    }
}
