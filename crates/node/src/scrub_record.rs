//! The record of a scrub.

use serde::{Deserialize, Serialize};

/// Saved state of a scrub: of one that is running, or of the last one that ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScrubRecord {
    /// Time at which it began, in nanoseconds since 1970.
    pub started_ns: i64,
    /// Time at which it ended, in nanoseconds since 1970; 0 while it runs.
    pub ended_ns: i64,
    /// Stripe at which a running one continues.
    pub next_stripe: u64,
    /// Number of stripes verified.
    pub stripes: u64,
    /// Number of contents that did not verify.
    pub checksum_errors: u64,
    /// Number of blocks that were written again.
    pub repaired_blocks: u64,
    /// Number of stripes whose parity disagreed although all strips verified.
    pub parity_defects: u64,
    /// Stripes that cannot be read; the first thousand.
    pub unreadable_stripes: Vec<u64>,
}

impl ScrubRecord {
    /// True if nothing was wrong.
    pub fn is_clean(&self) -> bool {
        self.checksum_errors == 0 && self.parity_defects == 0 && self.unreadable_stripes.is_empty()
    }

    /// The record in one sentence.
    pub(crate) fn text(&self) -> String {
        format!(
            "scrub ended: {} stripes, {} errors, {} blocks repaired, {} parity defects, {} unreadable",
            self.stripes,
            self.checksum_errors,
            self.repaired_blocks,
            self.parity_defects,
            self.unreadable_stripes.len()
        )
    }
}
