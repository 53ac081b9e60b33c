//! Bounds of memory.
//!
//! All stacks of a store together may take a quarter of what the machine has for caches, for written data
//! that waits, and for tables that are read when they are needed. Each of these parts has a size beyond which
//! more is of little use. If a quarter is less than all of them, each gets the same share of its size.

use penstock_base::num::to_usize;
use penstock_chunk::TargetMemory;
use penstock_kv::CACHE_BYTES;

/// Memory for pages of stripe tables, of all arrays of a store.
const TABLE_BYTES: u64 = penstock_array::TABLE_BYTES as u64;

/// The memory that the parts of a store may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Pages of stripe tables in bytes, of all arrays.
    pub(crate) table_bytes: usize,
    /// Cache of the key-value store of a stack in bytes.
    pub(crate) kv_cache_bytes: usize,
    /// The target of a stack.
    pub(crate) target: TargetMemory,
}

impl Memory {
    /// The bounds for a store of so many stacks on a machine with so many bytes; without a bound of the
    /// machine if that is none.
    pub(crate) fn of(machine_bytes: Option<u64>, stacks: u16) -> Self {
        let all = TargetMemory::default();
        let each = all.bytes() + CACHE_BYTES as u64;
        let wanted = TABLE_BYTES + u64::from(stacks) * each;
        let most = machine_bytes.map_or(u64::MAX, |bytes| bytes / 4);
        let parts = if wanted > most { most / wanted.div_ceil(1024) } else { 1024 };
        let share = |of: u64, least: u64| (of / 1024 * parts).max(least.min(of));
        Self {
            table_bytes: to_usize(share(TABLE_BYTES, 4 << 20)),
            kv_cache_bytes: to_usize(share(CACHE_BYTES as u64, 2 << 20)),
            target: TargetMemory {
                dirty_bytes: share(all.dirty_bytes, 4 << 20),
                chunks: to_usize(share(all.chunks as u64, 1 << 10)),
                groups: to_usize((all.groups as u64 * parts / 1024).max(64)),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(memory: Memory, stacks: u64) -> u64 {
        memory.table_bytes as u64 + stacks * (memory.kv_cache_bytes as u64 + memory.target.bytes())
    }

    #[test]
    fn a_store_uses_a_quarter_of_the_machine_at_most() {
        let all = Memory::of(None, 1);
        assert_eq!(all.target, TargetMemory::default());
        for stacks in [1_u16, 2, 16, 64] {
            for machine_mib in [512_u64, 1024, 4096, 24 << 10, 256 << 10, 4 << 20] {
                let memory = Memory::of(Some(machine_mib << 20), stacks);
                let used = bytes(memory, stacks.into());
                // Some of each is needed in any case.
                let least = (4 << 20) + u64::from(stacks) * (7 << 20);
                let most = (machine_mib << 18) + least;
                assert!(used <= most, "{stacks} stacks and {machine_mib} MiB: {used} bytes of {most}");
                let is_all = Memory { table_bytes: all.table_bytes, ..memory } == all;
                assert_eq!(is_all, bytes(all, stacks.into()) <= machine_mib << 18, "{memory:?}");
            }
        }
    }
}
