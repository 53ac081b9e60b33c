//! What an array did by itself and people want to know: a short list that its owner takes away from time to time.

use crate::engine::Array;

/// Notes kept until they are taken; the oldest go first.
const MOST: usize = 64;

/// Something that an array did by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Note {
    /// A member's drive was as it had been before the last opening: all of it is made again.
    Outdated {
        /// The member.
        position: usize,
    },
    /// It was opened although stripes are lost by that: an administrator said so.
    LossAccepted {
        /// The drives, and how many stripes.
        why: String,
    },
    /// A member's stale strips are being made again.
    RebuildBegun {
        /// The member.
        position: usize,
        /// Stripes to do.
        stripes: u64,
        /// Every written stripe is to be done: the member lost all, or was replaced.
        whole: bool,
    },
    /// They are, or not all of them could be.
    RebuildEnded {
        /// The member.
        position: usize,
        /// Stripes done.
        stripes: u64,
        /// Stripes that could not be done.
        failed: u64,
        /// The member had lost all, or was replaced.
        whole: bool,
        /// The member lacks nothing now.
        complete: bool,
    },
}

impl Array {
    pub(crate) fn note(&self, note: Note) {
        let mut notes = self.notes.borrow_mut();
        if notes.len() >= MOST {
            notes.pop_front();
        }
        notes.push_back(note);
    }

    /// What it did since the last call, oldest first.
    pub fn take_notes(&self) -> Vec<Note> {
        self.notes.borrow_mut().drain(..).collect()
    }
}
