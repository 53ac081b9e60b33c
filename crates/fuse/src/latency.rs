//! Histograms of the times of FUSE requests, by operation.
//!
//! A time runs from when the worker takes a request to its reply.

use penstock_base::latency::Histogram;

/// The operations whose times are recorded. Similar FUSE opcodes share one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Op {
    Lookup,
    GetAttr,
    SetAttr,
    ReadLink,
    Make,
    Unlink,
    Rename,
    Link,
    Open,
    Create,
    Read,
    Write,
    Release,
    Fsync,
    ReadDir,
    StatFs,
    Xattr,
    Seek,
    Fallocate,
    Copy,
    Lock,
}

/// The names of all operations, in the order of [`Op`].
const OPS: [(Op, &str); 21] = [
    (Op::Lookup, "lookup"),
    (Op::GetAttr, "getattr"),
    (Op::SetAttr, "setattr"),
    (Op::ReadLink, "readlink"),
    (Op::Make, "make"),
    (Op::Unlink, "unlink"),
    (Op::Rename, "rename"),
    (Op::Link, "link"),
    (Op::Open, "open"),
    (Op::Create, "create"),
    (Op::Read, "read"),
    (Op::Write, "write"),
    (Op::Release, "release"),
    (Op::Fsync, "fsync"),
    (Op::ReadDir, "readdir"),
    (Op::StatFs, "statfs"),
    (Op::Xattr, "xattr"),
    (Op::Seek, "seek"),
    (Op::Fallocate, "fallocate"),
    (Op::Copy, "copy"),
    (Op::Lock, "lock"),
];

/// A histogram of request times for each operation.
#[derive(Default)]
pub struct FuseLatency([Histogram; OPS.len()]);

impl FuseLatency {
    pub(crate) fn of(&self, op: Op) -> &Histogram {
        &self.0[op as usize]
    }

    /// Returns the operations by name, with their histograms.
    pub fn all(&self) -> impl Iterator<Item = (&'static str, &Histogram)> {
        OPS.iter().map(|(op, name)| (*name, self.of(*op)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_the_operations() {
        assert!(OPS.iter().enumerate().all(|(at, (op, _))| *op as usize == at));
    }
}
