//! Checks of what targets of other stacks have against inodes and the queue of work.
//!
//! Work that a target has yet to do is no inconsistency: an inode with work in the queue is not compared with
//! the targets that owe it.

use super::trace::Trace;
use super::{Diagnosis, Field, Fix, Stage};
use crate::LAST_INO;
use crate::inode::FileKind;
use crate::rows::decode_queued;
use penstock_base::{BLOCK_BYTES, DecodeError, Finding, FindingKind as Kind, Ino, TargetId, hex};
use penstock_chunk::copies::is_copy;
use penstock_chunk::{Owned, TargetCheck};
use std::collections::{BTreeMap, BTreeSet};

/// A repair of rows that concern one target alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Local {
    /// Mark blocks that have an owner as used, and make group rows and free counts right.
    MarkOwned,
    /// Cut extents to the volume, and delete empty ones.
    Extents,
    /// Copy blocks that have several owners, so that each owner has its own.
    CopyDoubles,
    /// Make the rows of files and accounts right.
    CountFiles,
    /// Mark blocks without an owner as free.
    ClearUnowned,
}

/// The parts of files that other targets have, and the targets that owe work.
#[derive(Default)]
pub(super) struct Others {
    owned: BTreeMap<Ino, Vec<(TargetId, Owned)>>,
    owing: BTreeSet<(Ino, TargetId)>,
}

impl Diagnosis {
    /// Takes in the check of a target of another stack.
    pub(crate) fn see_other(&mut self, target: TargetId, check: TargetCheck) {
        self.enter(Stage::Inodes);
        self.loans.see(target, check.loans);
        self.chunks += check.chunks;
        self.blocks += check.blocks;
        for (ino, owned) in check.owners.into_iter().filter(|(ino, _)| !is_copy(*ino)) {
            if ino <= LAST_INO {
                self.highest_elsewhere = self.highest_elsewhere.max(ino.0);
            }
            self.others.owned.entry(ino).or_default().push((target, owned));
        }
        let mut fixed = BTreeSet::new();
        for finding in check.findings.kept {
            let local = match finding.kind {
                Kind::BlockNotMarked | Kind::BadGroupRow | Kind::WrongFreeCount => Some(Local::MarkOwned),
                Kind::EmptyExtent | Kind::ExtentBeyondVolume => Some(Local::Extents),
                Kind::DoubleOwnedBlock => Some(Local::CopyDoubles),
                Kind::BadFileRow | Kind::WrongFileRow | Kind::WrongAccount => Some(Local::CountFiles),
                Kind::BlockNotOwned | Kind::WrittenFreeStripe => Some(Local::ClearUnowned),
                _ => None,
            };
            if let Some(local) = local.filter(|_| finding.repairable && fixed.insert(finding.kind)) {
                self.fix(finding.kind, Fix::On(target, local));
            }
            let repairable = finding.repairable && local.is_some();
            self.findings.push(Finding {
                text: format!("target {target}: {}", finding.text),
                // Its repair needs the other side.
                repairable: repairable || finding.repairable && finding.kind == Kind::BadLoanRow,
                ..finding
            });
        }
    }

    /// Compares the loans of all targets that serve, after they were seen.
    pub(crate) fn check_loans(&mut self, forgotten: &BTreeSet<TargetId>) {
        for found in std::mem::take(&mut self.loans).check(self.targets, forgotten) {
            if let Some(text) = found.text {
                self.findings.add(found.kind, None, text);
            }
            self.fix(found.kind, Fix::Loan(found.fix));
        }
    }

    /// Takes in a row of the queue of work for targets.
    pub(crate) fn see_queued(&mut self, key: &[u8], value: &[u8]) {
        self.enter(Stage::Inodes);
        match decode_queued(key, value) {
            Ok((_, queued)) => {
                let Some(ino) = queued.work.ino() else { return };
                let owing = queued.targets.iter().map(|target| (ino, TargetId(*target)));
                self.others.owing.extend(owing);
            }
            Err(DecodeError::Unknown { what, field, found }) => {
                let error = DecodeError::Unknown { what, field, found };
                self.unknown(None, format!("row {}: {error}", hex(key)));
            }
            Err(error) => drop(self.unreadable(Kind::BadQueueRow, key, &error, Fix::Drop(key.to_vec()))),
        }
    }

    /// Checks what other targets have, after all inodes were seen.
    pub(super) fn check_others(&mut self, traces: &BTreeMap<Ino, Trace>) {
        let Others { owned, owing } = std::mem::take(&mut self.others);
        for (ino, of_targets) in owned {
            let trace = traces.get(&ino);
            let elsewhere = of_targets.iter().filter(|(_, owned)| owned.chunks > 0).count();
            let is_whole = elsewhere == 1 && trace.is_none_or(Trace::has_only_names);
            for (target, owned) in of_targets {
                if !owing.contains(&(ino, target)) {
                    self.check_other(ino, trace, target, (&owned, is_whole));
                }
            }
        }
    }

    /// `is_whole` says that no other target has chunks of it, if its inode is missing.
    fn check_other(
        &mut self,
        ino: Ino,
        trace: Option<&Trace>,
        target: TargetId,
        (owned, is_whole): (&Owned, bool),
    ) {
        let row = match trace {
            Some(trace) if trace.opaque => return,
            trace => trace.and_then(|trace| trace.row),
        };
        let Some(row) = row else {
            match owned.chunks {
                0 => {
                    let text = format!("target {target}: inode {ino} does not exist and has a row of a file");
                    self.wrong(Kind::WrongFileRow, ino, text, Fix::On(target, Local::CountFiles));
                }
                chunks => {
                    let text = format!("target {target}: inode {ino} does not exist and has {chunks} chunks");
                    let fix = match is_whole && owned.far_chunks == 0 {
                        true => Fix::Adopt(target, ino, *owned),
                        false => Fix::Take(target, ino),
                    };
                    self.wrong(Kind::MissingInode, ino, text, fix);
                }
            }
            return;
        };
        if row.kind != FileKind::Regular {
            let text =
                format!("target {target}: inode {ino} is no regular file and has {} chunks", owned.chunks);
            self.wrong(Kind::ChunksOfNonFile, ino, text, Fix::Take(target, ino));
            return;
        }
        // A layout that fits no map is found by the check of the inode.
        if owned.chunks > 0 && row.spread.is_some_and(|spread| spread.all().all(|of| of != target)) {
            let text = format!(
                "target {target} has {} chunks of inode {ino}, whose layout does not have it",
                owned.chunks
            );
            self.wrong(Kind::WrongLayout, ino, text, Fix::Take(target, ino));
            return;
        }
        if !row.is_spread {
            let text = format!("target {target} has a part of inode {ino}, which is not marked as spread");
            self.wrong(Kind::WrongLayout, ino, text, Fix::Inode(ino, Field::Spread));
        }
        let known = owned.file.map_or(0, |file| file.truncations).max(owned.truncations);
        if row.known.truncations < known {
            let of_inode = row.known.truncations;
            let text =
                format!("inode {ino} was truncated {of_inode} times, and target {target} knows {known}");
            self.wrong(Kind::WrongFileRow, ino, text, Fix::Inode(ino, Field::Truncations(known)));
        }
        if let Some(file) = owned.file.filter(|file| file.owner != row.known.owner) {
            let text = format!(
                "target {target}: the row of file {ino} says owner {:?}, its inode {:?}",
                file.owner, row.known.owner
            );
            self.wrong(Kind::WrongFileRow, ino, text, Fix::On(target, Local::CountFiles));
        }
        let beyond = owned.end_block.saturating_sub(row.size.div_ceil(BLOCK_BYTES as u64));
        self.blocks_beyond_end += beyond.min(owned.blocks);
    }
}
