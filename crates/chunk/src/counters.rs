//! Counters of a target.

/// Counters of a target since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TargetCounts {
    /// Blocks that clients wrote.
    pub written_blocks: u64,
    /// Blocks that clients read.
    pub read_blocks: u64,
    /// Chunks that were written as full stripes, past the log.
    pub whole_chunks: u64,
    /// Chunks among `whole_chunks` that were only partly dirty; their other blocks were read first.
    pub rewritten_chunks: u64,
    /// Full chunks that went through the log, because too few full stripes were free.
    pub logged_chunks: u64,
    /// Commits of single files; commits of everything do not count.
    pub commits: u64,
    /// Stripes that were discarded, in the stripe table only or on the drives as well.
    pub discarded_stripes: u64,
    /// Allocation groups that were read from the key-value store.
    pub group_reads: u64,
}

impl std::iter::Sum for TargetCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, more| Self {
            written_blocks: sum.written_blocks + more.written_blocks,
            read_blocks: sum.read_blocks + more.read_blocks,
            whole_chunks: sum.whole_chunks + more.whole_chunks,
            rewritten_chunks: sum.rewritten_chunks + more.rewritten_chunks,
            logged_chunks: sum.logged_chunks + more.logged_chunks,
            commits: sum.commits + more.commits,
            discarded_stripes: sum.discarded_stripes + more.discarded_stripes,
            group_reads: sum.group_reads + more.group_reads,
        })
    }
}
