//! Files whose data cannot be read any more: the events about them, and the reasons for the health `failed`.

use crate::event::{EventKind, Severity};
use crate::events::Events;
use crate::stack::Stack;
use penstock_base::StackNo;
use std::cell::RefCell;
use std::collections::BTreeSet;

/// Most files that events name one by one.
const NAMED_MOST: usize = 20;
/// Most damaged files that the status names.
const NAMED_FILES: usize = 5;

/// Damaged files as last looked up, and the unreadable stripes from which they were derived.
#[derive(Default)]
struct Found {
    stripes: Vec<(StackNo, u64)>,
    /// They could not be looked up in some stack.
    is_incomplete: bool,
    /// Inode numbers only: names are shown on request, and not in events and reports that may be passed on.
    inodes: Vec<u64>,
}

/// The damaged files that are known.
#[derive(Default)]
pub(crate) struct Damage {
    found: RefCell<Found>,
    /// Inodes of files that reads found damaged and that got an event.
    noted: RefCell<BTreeSet<u64>>,
}

impl Damage {
    /// Looks up the damaged files again if the set of unreadable stripes has changed, and adds an event about
    /// the file system `object` for each new one.
    pub(crate) async fn watch(
        &self,
        stripes: Vec<(StackNo, u64)>,
        stacks: &[Stack],
        object: &str,
        events: &Events,
    ) {
        if self.found.borrow().stripes == stripes && !self.found.borrow().is_incomplete {
            return;
        }
        let (mut inodes, mut is_incomplete) = (BTreeSet::new(), false);
        for stack in stacks {
            match stack.target.damaged().await {
                Ok(runs) => inodes.extend(runs.keys().map(|ino| ino.0)),
                Err(error) => {
                    tracing::error!(%error, stack = %stack.number(), "the files that are damaged cannot be found");
                    is_incomplete = true;
                }
            }
        }
        let known: BTreeSet<u64> = self.found.borrow().inodes.iter().copied().collect();
        if is_incomplete {
            inodes.extend(&known);
        }
        let inodes: Vec<u64> = inodes.into_iter().collect();
        for inode in inodes.iter().filter(|inode| !known.contains(*inode)).take(NAMED_MOST) {
            let text = format!("data of inode {inode} cannot be read; `penstock fs damaged` names it");
            events.add(Severity::Error, EventKind::FileDamaged, object, text);
        }
        *self.found.borrow_mut() = Found { stripes, is_incomplete, inodes };
    }

    /// Reasons for the health `failed`, with the inode numbers of the first files. So many stripes of the
    /// metadata volume cannot be read.
    pub(crate) fn reasons(&self, metadata_stripes: usize) -> Vec<String> {
        let found = self.found.borrow();
        let mut reasons = Vec::new();
        if !found.inodes.is_empty() {
            let first: Vec<String> = found.inodes.iter().take(NAMED_FILES).map(u64::to_string).collect();
            let more = found.inodes.len().saturating_sub(NAMED_FILES);
            let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
            reasons.push(format!(
                "data cannot be read of inodes {}{rest}; `penstock fs damaged` names the files",
                first.join(", ")
            ));
        }
        if metadata_stripes > 0 {
            reasons.push(format!(
                "{metadata_stripes} stripes of the metadata volume cannot be read: names, maps or attributes may be lost"
            ));
        }
        reasons
    }

    /// Adds one event for each file that a read found damaged, for 20 files (`NAMED_MOST`) at most.
    pub(crate) fn note(&self, ino: u64, chunk: u64, why: &str, events: &Events) {
        let mut noted = self.noted.borrow_mut();
        if noted.len() >= NAMED_MOST || !noted.insert(ino) {
            return;
        }
        let more = if noted.len() == NAMED_MOST { "; further files are not named" } else { "" };
        let text = format!("chunk {chunk} of the file cannot be read: {why}{more}");
        events.add(Severity::Error, EventKind::FileDamaged, format!("inode {ino}"), text);
    }
}
