//! Events of an array: changes that it made by itself, kept in a short list until its owner takes them.

use crate::place::MemberNo;
use std::cell::RefCell;
use std::collections::VecDeque;

/// Events kept until they are taken; the oldest are dropped first.
const MOST: usize = 64;

/// Something that an array did by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArrayEvent {
    /// A member's drive held contents from before the last opening. The member is rebuilt from nothing.
    Outdated {
        /// The member.
        member: MemberNo,
    },
    /// The label of a member could not be read at the opening, so the member is away.
    LabelUnreadable {
        /// The member.
        member: MemberNo,
        /// The error of its drive.
        why: String,
    },
    /// The array was opened although stripes are lost by that, because an administrator accepted the loss.
    LossAccepted {
        /// The drives, and the number of stripes.
        why: String,
    },
    /// The rebuild of a member's stale strips began.
    RebuildBegun {
        /// The member.
        member: MemberNo,
        /// Stripes to rebuild.
        stripes: u64,
        /// Every written stripe is stale on it: the member lost all, or was replaced.
        whole: bool,
    },
    /// The rebuild of a member ended.
    RebuildEnded {
        /// The member.
        member: MemberNo,
        /// Stripes rebuilt.
        stripes: u64,
        /// Stripes that could not be rebuilt.
        failed: u64,
        /// The member had lost all, or was replaced.
        whole: bool,
        /// The member has no stale strip now.
        complete: bool,
    },
}

/// The list of events.
#[derive(Default)]
pub(crate) struct Events(RefCell<VecDeque<ArrayEvent>>);

impl Events {
    pub(crate) fn push(&self, event: ArrayEvent) {
        let mut events = self.0.borrow_mut();
        if events.len() >= MOST {
            events.pop_front();
        }
        events.push_back(event);
        assert!(events.len() <= MOST, "the list is bounded");
    }

    /// The events since the last call, oldest first.
    pub(crate) fn take(&self) -> Vec<ArrayEvent> {
        self.0.borrow_mut().drain(..).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_events_are_dropped() {
        let events = Events::default();
        let event = |number| ArrayEvent::LossAccepted { why: format!("{number}") };
        (0..MOST + 2).for_each(|number| events.push(event(number)));
        let kept = events.take();
        assert_eq!((kept.len(), kept.first(), kept.last()), (MOST, Some(&event(2)), Some(&event(MOST + 1))));
        assert!(events.take().is_empty());
    }
}
