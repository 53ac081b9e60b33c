//! Files that are spread over targets of other stacks: what these are asked, and when.

use super::bed::{Bed, errno, run_with_others};
use crate::fsck::diagnosis::{Field, Fix};
use crate::queue::Entry;
use crate::rows::reserved::{Queued, Reserved, Work};
use crate::rows::{all_queued, decode_queued};
use crate::{HeldFile, MetaError, OtherTarget, ROOT, WantedLayout, ops, reaper};
use penstock_base::env::timeout;
use penstock_base::{Birth, Branch, DecodeError, FileId, FindingKind as Kind, Ino, LocalBoxFuture, TargetId};
use penstock_chunk::{ChunkError, Cut, FileRow, FileUse, Owned, Owner, SpaceUsage, TargetCheck};
use penstock_kv::{Kv, KvRead, MemKv};
use penstock_session::Repeat;
use penstock_wire::metadata::{AttrReply, Change, SetAttrRequest};
use prost::Message;
use rustix::io::Errno;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

/// Chunks have 4 blocks in these tests, and a turn has 4 chunks.
const TURN_BLOCKS: u64 = 16;

/// A target in memory: the blocks of each file, as they are and as they are durable.
#[derive(Default)]
pub(super) struct MemOther {
    id: TargetId,
    pub(super) is_away: Cell<bool>,
    fails: Cell<bool>,
    /// Fails with this file only.
    fails_at: Cell<Option<Ino>>,
    /// Does nothing with a file that is held, and removes none, before it is told to go on.
    is_slow: Cell<bool>,
    goes_on: Notify,
    /// The store of the names: everything that is asked must be durable there.
    names: RefCell<Option<Rc<MemKv>>>,
    files: RefCell<BTreeMap<Ino, Part>>,
    durable: RefCell<BTreeMap<Ino, Part>>,
    owed: RefCell<Vec<(Ino, Cut)>>,
    held: Cell<u32>,
    asked: RefCell<Vec<String>>,
    usage: Cell<SpaceUsage>,
}

/// The part of a file: its blocks, and the owner to whom they count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Part {
    blocks: BTreeSet<u64>,
    owner: Owner,
    number: u64,
    truncations: u64,
}

impl MemOther {
    fn new(id: u32) -> Rc<Self> {
        let usage = Cell::new(SpaceUsage { total_blocks: 1000, free_blocks: 600, headroom_blocks: 20 });
        Rc::new(Self { id: TargetId(id), usage, ..Self::default() })
    }

    /// Everything that is not durable is lost.
    pub(super) fn crash(&self) {
        *self.files.borrow_mut() = self.durable.borrow().clone();
        self.owed.borrow_mut().clear();
    }

    pub(super) fn check(&self) -> TargetCheck {
        let files = self.files.borrow();
        let owned = |part: &Part| Owned {
            chunks: part.blocks.len() as u64,
            blocks: part.blocks.len() as u64,
            end_block: part.blocks.last().map_or(0, |last| last + 1),
            held: part.blocks.len() as u64,
            file: Some(FileRow {
                truncations: part.truncations,
                blocks: part.blocks.len() as u64,
                owner: part.owner,
                owner_number: part.number,
            }),
            ..Owned::default()
        };
        let owners = files.iter().map(|(ino, part)| (*ino, owned(part))).collect();
        TargetCheck { owners, ..TargetCheck::default() }
    }

    /// Fails if what the names' store has in its queue is not durable there.
    fn ask(&self, ino: Ino, what: String) -> Result<(), ChunkError> {
        if let Some(kv) = &*self.names.borrow() {
            let queued = |rows: Vec<(Vec<u8>, Vec<u8>)>| {
                let (first, end) = all_queued();
                rows.into_iter().filter(|(key, _)| (&first..&end).contains(&key)).collect::<Vec<_>>()
            };
            let (live, durable) = (queued(kv.rows()), queued(kv.durable_rows()));
            assert!(live.iter().all(|row| durable.contains(row)), "{what} is not durable yet");
        }
        self.asked.borrow_mut().push(what);
        match self.fails.get() || self.fails_at.get() == Some(ino) {
            true => Err(DecodeError::Bad { what: "map row", why: "a test" }.into()),
            false => Ok(()),
        }
    }

    fn take_asked(&self) -> Vec<String> {
        self.asked.take()
    }

    fn cut_now(&self, ino: Ino, cut: Cut) -> Result<(), ChunkError> {
        self.ask(ino, format!("cut {} at {}, generation {}", ino.0 & 0xff, cut.from, cut.truncations))?;
        if let Some(part) = self.files.borrow_mut().get_mut(&ino) {
            if part.truncations < cut.truncations {
                part.blocks.retain(|block| *block < cut.from);
            }
            part.truncations = part.truncations.max(cut.truncations);
        }
        self.owed.borrow_mut().retain(|owed| *owed != (ino, cut));
        Ok(())
    }

    fn settle_now(&self, ino: Ino) -> Result<(), ChunkError> {
        let owed: Vec<(Ino, Cut)> = self.owed.borrow().iter().filter(|(of, _)| *of == ino).copied().collect();
        owed.into_iter().try_for_each(|(ino, cut)| self.cut_now(ino, cut))
    }

    fn has(&self, ino: Ino) -> Vec<u64> {
        self.files.borrow().get(&ino).map_or(Vec::new(), |part| part.blocks.iter().copied().collect())
    }
}

struct HeldMem(Rc<MemOther>, Ino);

impl HeldFile for HeldMem {
    fn owe(&self, cut: Cut) {
        self.0.owed.borrow_mut().push((self.1, cut));
    }

    fn settle(&self) -> LocalBoxFuture<'_, Result<(), ChunkError>> {
        Box::pin(async {
            if self.0.is_slow.get() {
                self.0.goes_on.notified().await;
            }
            self.0.settle_now(self.1)
        })
    }
}

impl Drop for HeldMem {
    fn drop(&mut self) {
        self.0.held.set(self.0.held.get() - 1);
    }
}

type Done<'a> = LocalBoxFuture<'a, Result<(), ChunkError>>;

impl OtherTarget for MemOther {
    fn id(&self) -> TargetId {
        self.id
    }

    fn usage(&self) -> SpaceUsage {
        self.usage.get()
    }

    fn hold(self: Rc<Self>, file: FileId) -> LocalBoxFuture<'static, Box<dyn HeldFile>> {
        self.held.set(self.held.get() + 1);
        Box::pin(async move { Box::new(HeldMem(self, file.ino)) as Box<dyn HeldFile> })
    }

    fn owe(&self, file: FileId, cut: Cut) {
        self.owed.borrow_mut().push((file.ino, cut));
    }

    fn finish(&self, file: FileId) -> Done<'_> {
        let result = self.settle_now(file.ino);
        Box::pin(async move { result })
    }

    fn remove(&self, file: FileId) -> Done<'_> {
        Box::pin(async move {
            if self.is_slow.get() {
                self.goes_on.notified().await;
            }
            let result = self.ask(file.ino, format!("remove {}", file.ino.0 & 0xff));
            if result.is_ok() {
                self.files.borrow_mut().remove(&file.ino);
            }
            result
        })
    }

    fn set_owner(&self, file: FileId, owner: Owner, number: u64) -> Done<'_> {
        let result = self.ask(file.ino, format!("give {} to {}", file.ino.0 & 0xff, owner.uid));
        if let (Ok(()), Some(part)) = (&result, self.files.borrow_mut().get_mut(&file.ino))
            && part.number < number
        {
            (part.owner, part.number) = (owner, number);
        }
        Box::pin(async move { result })
    }

    fn held_blocks(&self, files: Vec<FileId>) -> LocalBoxFuture<'_, Result<Vec<u64>, ChunkError>> {
        let held = files.into_iter().map(|file| self.has(file.ino).len() as u64).collect();
        Box::pin(async move { Ok(held) })
    }

    fn inodes_from(&self, first: Ino, end: Ino) -> LocalBoxFuture<'_, Result<BTreeSet<Ino>, ChunkError>> {
        let found = self.files.borrow().range(first..end).map(|(ino, _)| *ino).collect();
        let result = match self.fails.get() {
            true => Err(DecodeError::Bad { what: "file row", why: "a test" }.into()),
            false => Ok(found),
        };
        Box::pin(async move { result })
    }

    fn commit_all(&self) -> Done<'_> {
        self.sync()
    }

    fn sync(&self) -> Done<'_> {
        *self.durable.borrow_mut() = self.files.borrow().clone();
        Box::pin(async { Ok(()) })
    }
}

async fn set(bed: &Bed, ino: Ino, request: SetAttrRequest) -> Result<u64, MetaError> {
    let request = SetAttrRequest { ino: ino.0, ..request };
    let reply = ops::set_attr(&bed.meta.parts, bed.who, request).await?;
    Ok(AttrReply::decode(&reply[..]).unwrap().attr.unwrap().blocks)
}

fn size(size: u64) -> SetAttrRequest {
    SetAttrRequest { size: Some(size), ..SetAttrRequest::default() }
}

/// Writes a block of a file where its layout says, as the service of a target does.
async fn write(bed: &Bed, others: &[Rc<MemOther>], ino: Ino, block: u64) -> Result<(), MetaError> {
    let inode = bed.inode(ino).await?;
    let spread = bed.meta.parts.elsewhere.spread_of(&inode.layout).unwrap();
    let target = spread.target_of(block / 4);
    let of = bed.meta.change_contents(target, ino).await?;
    assert!(of.share().has(block / 4), "the target has the chunk");
    match others.iter().find(|other| other.id == target) {
        None => bed.chunks.write(ino, block).await,
        Some(other) => {
            let mut files = other.files.borrow_mut();
            let part = files.entry(ino).or_default();
            if part.blocks.is_empty() {
                (part.owner, part.number) = (of.owner(), of.as_of().queued);
            }
            part.truncations = part.truncations.max(of.as_of().truncations);
            part.blocks.insert(block);
        }
    }
    Ok(())
}

fn three() -> Vec<Rc<MemOther>> {
    (1..=3).map(MemOther::new).collect()
}

fn queued(bed: &Bed) -> Vec<Queued> {
    let (first, end) = all_queued();
    let rows = bed.kv.rows().into_iter().filter(|(key, _)| (&first..&end).contains(&key));
    rows.map(|(key, value)| decode_queued(&key, &value).unwrap().1).collect()
}

#[test]
fn a_file_asks_other_targets_for_nothing_until_it_is_spread() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        let layout = bed.inode(ino).await.unwrap().layout;
        assert_eq!((layout.first, layout.count, layout.turn), (0, 4, 4));
        write(bed, &others, ino, TURN_BLOCKS - 1).await.unwrap();
        set(bed, ino, size(9)).await.unwrap();
        set(bed, ino, SetAttrRequest { uid: Some(7), ..size(0) }).await.unwrap();
        assert!(!bed.inode(ino).await.unwrap().is_spread);
        write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
        assert!(bed.inode(ino).await.unwrap().is_spread);
        let small = bed.add("small").await.unwrap();
        bed.remove("small").await.unwrap();
        bed.meta.wait_reaped().await;
        assert_eq!(errno(bed.inode(small).await), Some(Errno::STALE));
        assert!(others.iter().all(|other| other.take_asked().is_empty()) && queued(bed).is_empty());
        bed.check("a spread file");
    });
}

#[test]
fn a_truncation_is_durable_before_a_target_cuts_and_done_before_the_reply() {
    let others = three();
    run_with_others(&others, async |bed| {
        others.iter().for_each(|other| *other.names.borrow_mut() = Some(bed.kv.clone()));
        let ino = bed.add("f").await.unwrap();
        for block in [0, TURN_BLOCKS, 2 * TURN_BLOCKS + 3, 6 * TURN_BLOCKS] {
            write(bed, &others, ino, block).await.unwrap();
        }
        set(bed, ino, SetAttrRequest { grow: true, ..size(4096 * 7 * TURN_BLOCKS) }).await.unwrap();
        let held = set(bed, ino, size(4096 * (2 * TURN_BLOCKS + 4))).await.unwrap();
        assert_eq!(held, 3, "the reply counts all targets");
        let has: Vec<Vec<u64>> = others.iter().map(|other| other.has(ino)).collect();
        assert_eq!(has, [vec![TURN_BLOCKS], vec![2 * TURN_BLOCKS + 3], vec![]]);
        assert!(others.iter().all(|other| other.held.get() == 0), "others may go on");
        let asked: Vec<usize> = others.iter().map(|other| other.take_asked().len()).collect();
        assert_eq!(asked, [1, 1, 1], "each target of the file, once");
        assert_eq!(queued(bed).len(), 1, "until all have answered durably");
        bed.meta.wait_reaped().await;
        bed.world.env().sleep(Duration::from_secs(1)).await;
        assert_eq!(queued(bed), []);
        assert!(others.iter().all(|other| *other.durable.borrow() == *other.files.borrow()));
        bed.check("a truncation");
    });
}

#[test]
fn work_that_fails_is_owed_and_tried_again() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        for block in [TURN_BLOCKS, 2 * TURN_BLOCKS] {
            write(bed, &others, ino, block).await.unwrap();
        }
        others[1].fails.set(true);
        assert!(set(bed, ino, size(0)).await.is_err(), "one target could not");
        assert_eq!((others[0].has(ino), others[1].has(ino)), (vec![], vec![2 * TURN_BLOCKS]));
        assert_eq!(others[1].owed.borrow().len(), 1, "nothing else is done with the file there");
        bed.world.env().sleep(Duration::from_secs(5)).await;
        let left = queued(bed);
        assert_eq!(left.iter().map(|queued| queued.targets.clone()).collect::<Vec<_>>(), [[2]]);
        bed.check("a target that fails");
        others[1].fails.set(false);
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert_eq!((others[1].has(ino), queued(bed)), (vec![], vec![]));
        bed.check("another attempt");
    });
}

#[test]
fn a_removed_file_is_gone_everywhere_after_its_row_is_durable() {
    let others = three();
    run_with_others(&others, async |bed| {
        others.iter().for_each(|other| *other.names.borrow_mut() = Some(bed.kv.clone()));
        let ino = bed.add("f").await.unwrap();
        for turn in 0..8 {
            write(bed, &others, ino, turn * TURN_BLOCKS).await.unwrap();
        }
        bed.remove("f").await.unwrap();
        bed.meta.wait_reaped().await;
        assert!(others.iter().all(|other| other.files.borrow().is_empty()));
        bed.world.env().sleep(Duration::from_secs(1)).await;
        assert_eq!(queued(bed), []);
        bed.check("a removal");
    });
}

/// A crash takes back what is not durable, in the names' store and on targets apart. The work is done after
/// it, and nothing is left.
#[test]
fn work_survives_crashes_of_the_names_and_of_targets() {
    for (names_first, is_synced) in [(true, true), (true, false), (false, true), (false, false)] {
        let others = three();
        run_with_others(&others, async |bed| {
            let (ino, other) = (bed.add("f").await.unwrap(), bed.add("g").await.unwrap());
            for ino in [ino, other] {
                write(bed, &others, ino, 0).await.unwrap();
                write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
                set(bed, ino, SetAttrRequest { grow: true, ..size(4096 * 2 * TURN_BLOCKS) }).await.unwrap();
            }
            bed.kv.flush().await.unwrap();
            others.iter().for_each(|other| drop(other.sync()));
            others[0].fails.set(names_first);
            let cut = set(bed, ino, size(1)).await;
            assert_eq!(cut.is_err(), names_first);
            bed.remove("g").await.unwrap();
            if is_synced {
                bed.world.env().sleep(Duration::from_secs(1)).await;
                bed.meta.sync().await.unwrap();
            }
            others[0].fails.set(false);
            bed.crash().await;
            let owed = others[0].owed.borrow().len();
            assert!(owed <= 1 && (owed == 1 || !names_first), "a target knows what it owes before it serves");
            bed.meta.wait_reaped().await;
            bed.world.env().sleep(Duration::from_secs(10)).await;
            bed.meta.wait_reaped().await;
            assert_eq!(others[0].has(ino), [], "{names_first} {is_synced}");
            let is_there = bed.find("g").await.is_ok();
            assert_eq!(others[0].has(other).is_empty(), !is_there, "{names_first} {is_synced}");
            // The chunks in memory forget generations in a crash.
            let findings = bed.diagnose().findings;
            assert!(findings.kept.iter().all(|found| !found.text.contains("target ")), "{findings:?}");
        });
    }
}

#[test]
fn an_opening_drops_what_a_crash_has_lost_and_marks_what_it_has_not() {
    let others = three();
    run_with_others(&others, async |bed| {
        let kept = bed.add("kept").await.unwrap();
        bed.kv.flush().await.unwrap();
        // Neither the mark nor the second inode is durable. What the targets have is.
        write(bed, &others, kept, TURN_BLOCKS).await.unwrap();
        let lost = bed.add("lost").await.unwrap();
        write(bed, &others, lost, TURN_BLOCKS).await.unwrap();
        write(bed, &others, lost, 2 * TURN_BLOCKS).await.unwrap();
        others.iter().for_each(|other| drop(other.sync()));
        bed.crash().await;
        assert_eq!(errno(bed.find("lost").await), Some(Errno::NOENT));
        assert!(others[0].has(lost).is_empty() && others[1].has(lost).is_empty());
        assert!(others[0].durable.borrow().get(&lost).is_none(), "before anybody is served");
        assert!(bed.inode(kept).await.unwrap().is_spread && others[0].has(kept) == [TURN_BLOCKS]);
        bed.check("a crash");
    });
}

/// A file that an opening does not look for must be marked durably before a target gets something of it.
#[test]
fn an_old_or_truncated_file_is_marked_durably() {
    for is_truncated in [false, true] {
        let others = three();
        run_with_others(&others, async |bed| {
            let ino = bed.add("f").await.unwrap();
            match is_truncated {
                true => drop(set(bed, ino, size(0)).await.unwrap()),
                // As many numbers as are looked for are given.
                false => {
                    let turn = bed.meta.parts.names.turn().await;
                    turn.reserve_inodes(ino.0 + 3 * 4096).await.unwrap();
                }
            }
            write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
            others.iter().for_each(|other| drop(other.sync()));
            bed.crash().await;
            let inode = bed.inode(ino).await.unwrap();
            assert!(inode.is_spread, "truncated: {is_truncated}");
            assert_eq!(inode.truncations, u64::from(is_truncated), "no target knows a later generation");
        });
    }
}

#[test]
fn changes_of_the_owner_reach_targets_in_their_order() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
        let uid = |uid| SetAttrRequest { uid: Some(uid), ..SetAttrRequest::default() };
        set(bed, ino, uid(5)).await.unwrap();
        let first = bed.meta.parts.queue.committed();
        // A target that gets its first block now hears of the owner as of that change.
        write(bed, &others, ino, 2 * TURN_BLOCKS).await.unwrap();
        set(bed, ino, uid(6)).await.unwrap();
        set(bed, ino, uid(7)).await.unwrap();
        let number = others[1].files.borrow()[&ino].number;
        assert_eq!((others[1].files.borrow()[&ino].owner.uid, number), (5, first));
        bed.check("work that is owed");
        bed.meta.wait_reaped().await;
        for other in &others[..2] {
            assert_eq!(other.files.borrow()[&ino].owner.uid, 7, "target {}", other.id);
        }
        bed.check("all changes");
    });
}

#[test]
fn a_target_that_is_away_gets_its_work_later_and_refuses_truncations() {
    let others = three();
    run_with_others(&others, async |bed| {
        let (ino, gone) = (bed.add("f").await.unwrap(), bed.add("g").await.unwrap());
        for ino in [ino, gone] {
            for turn in 0..4 {
                write(bed, &others, ino, turn * TURN_BLOCKS).await.unwrap();
            }
        }
        bed.kv.flush().await.unwrap();
        others.iter().for_each(|other| drop(other.sync()));
        others[1].is_away.set(true);
        bed.crash().await;
        let error = set(bed, ino, size(1)).await.unwrap_err();
        assert!(error.to_string().contains("target 2"), "{error}");
        assert_eq!(bed.inode(ino).await.unwrap().size, 0, "nothing was changed");
        bed.remove("g").await.unwrap();
        set(bed, ino, SetAttrRequest { uid: Some(5), ..SetAttrRequest::default() }).await.unwrap();
        bed.meta.wait_reaped().await;
        bed.world.env().sleep(Duration::from_secs(1)).await;
        assert!(others[0].has(gone).is_empty() && !others[1].has(gone).is_empty());
        let left: Vec<Vec<u32>> = queued(bed).into_iter().map(|queued| queued.targets).collect();
        assert_eq!(left, [[2], [2]]);
        let new = bed.add("new").await.unwrap();
        assert_eq!(bed.inode(new).await.unwrap().layout.count, 2, "new files do without it");
        bed.check("a target that is away");
        bed.meta.sync().await.unwrap();
        others[1].is_away.set(false);
        bed.crash().await;
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert!(others[1].has(gone).is_empty() && others[1].files.borrow()[&ino].owner.uid == 5);
        assert_eq!(queued(bed), []);
        bed.check("its return");
    });
}

/// Work for a target that is forgotten is dropped, also after a crash, and files change without it.
#[test]
fn nobody_waits_for_a_target_that_is_forgotten() {
    let others = three();
    run_with_others(&others, async |bed| {
        let (ino, gone) = (bed.add("f").await.unwrap(), bed.add("g").await.unwrap());
        for ino in [ino, gone] {
            set(bed, ino, size(4 * TURN_BLOCKS * 4096)).await.unwrap();
            for turn in 0..4 {
                write(bed, &others, ino, turn * TURN_BLOCKS).await.unwrap();
            }
        }
        bed.kv.flush().await.unwrap();
        others.iter().for_each(|other| drop(other.sync()));
        others[1].is_away.set(true);
        bed.crash().await;
        bed.remove("g").await.unwrap();
        bed.meta.wait_reaped().await;
        let turn = TURN_BLOCKS * 4096;
        for (on_loan, bytes) in [(0, turn), (3, turn + 3 * 4096)] {
            let on_loan = [(ino, on_loan), (gone, 5)].into();
            let listed = bed.meta.files_on(TargetId(2), &on_loan, 10).await.unwrap();
            assert_eq!((listed.files, listed.most_bytes, &listed.listed), (1, bytes, &[ino].into()));
        }
        bed.meta.sync().await.unwrap();
        let before = bed.kv.clone();
        bed.meta.forget(TargetId(2)).await.unwrap();
        bed.meta.forget(TargetId(2)).await.unwrap();
        assert!(before.get(crate::rows::gone_key()).await.unwrap().is_some());
        set(bed, ino, size(1)).await.unwrap();
        bed.meta.wait_reaped().await;
        assert_eq!(queued(bed), []);
        assert!(others[0].has(gone).is_empty() && !others[1].has(gone).is_empty());
        let new = bed.add("new").await.unwrap();
        assert_eq!(bed.inode(new).await.unwrap().layout.count, 2, "new files do without it");
        bed.check("a target that is forgotten");
        assert_eq!(
            bed.meta.files_on(TargetId(2), &BTreeMap::new(), 10).await.unwrap().files,
            0,
            "it is short now"
        );
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        set(bed, ino, size(9 * TURN_BLOCKS * 4096)).await.unwrap();
        set(bed, ino, size(2)).await.unwrap();
        bed.remove("f").await.unwrap();
        bed.meta.wait_reaped().await;
        assert_eq!((queued(bed), bed.meta.queued_for(TargetId(2))), (vec![], 0));
        assert_eq!(errno(bed.inode(ino).await), Some(Errno::STALE));
        bed.check("after a crash");
    });
}

#[test]
fn the_queue_of_a_target_is_bounded_and_removals_wait() {
    let others = three();
    run_with_others(&others, async |bed| {
        let most = bed.kv.usage().budget_bytes / 64 / 128;
        for other in &others {
            other.fails.set(true);
        }
        let ino = bed.add("f").await.unwrap();
        write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
        let uid = |uid| SetAttrRequest { uid: Some(uid), ..SetAttrRequest::default() };
        let mut done = 0;
        let refused = loop {
            match set(bed, ino, uid(done + 1)).await {
                Ok(_) => done += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(u64::from(done), most);
        assert!(refused.to_string().contains(&format!("target 1 has {most} entries")), "{refused}");
        bed.remove("f").await.unwrap();
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert!(bed.inode(ino).await.is_ok(), "it waits, and its name is gone");
        others.iter().for_each(|other| other.fails.set(false));
        bed.world.env().sleep(Duration::from_secs(60)).await;
        assert_eq!(errno(bed.inode(ino).await), Some(Errno::STALE));
        assert!(queued(bed).is_empty() && others.iter().all(|other| other.files.borrow().is_empty()));
        bed.check("the end");
    });
}

#[test]
fn layouts_are_inherited_and_changed_while_a_file_has_nothing() {
    let others = three();
    run_with_others(&others, async |bed| {
        bed.add("d/").await.unwrap();
        let wanted = |count, turn| WantedLayout { count: Some(count), turn: Some(turn) };
        let shown = bed.meta.set_layout(b"d", wanted(2, 1)).await.unwrap();
        assert_eq!((shown.is_directory, shown.count, shown.turn, shown.targets.len()), (true, 2, 1, 0));
        bed.add("d/e/").await.unwrap();
        let ino = bed.add("d/e/f").await.unwrap();
        let shown = bed.meta.layout(b"/d/e/f").await.unwrap();
        assert_eq!((shown.ino, shown.count, shown.turn), (ino, 2, 1));
        assert_eq!(shown.targets, [TargetId(0), TargetId(1)]);
        for (count, turn) in [(5, 1), (1, 0)] {
            let refused = bed.meta.set_layout(b"d", wanted(count, turn)).await;
            assert!(matches!(refused, Err(MetaError::Request(_))), "{count} {turn}");
        }
        let shown = bed.meta.set_layout(b"d/e/f", wanted(0, 2)).await.unwrap();
        assert_eq!((shown.count, shown.turn), (4, 2));
        write(bed, &others, ino, 0).await.unwrap();
        assert!(bed.meta.set_layout(b"d/e/f", wanted(1, 1)).await.is_err(), "it has data");
        assert_eq!(errno(bed.meta.layout(b"d/none").await), Some(Errno::NOENT));
        assert_eq!(errno(bed.meta.layout(b"d/e/f/g").await), Some(Errno::NOTDIR));
        let late = bed.meta.change_contents(TargetId(9), ino).await.map(drop);
        assert!(matches!(late, Err(MetaError::Spread)), "the client must ask for the layout again");
        bed.check("layouts");
    });
}

#[test]
fn a_full_target_of_the_names_is_not_the_first_one() {
    let others = three();
    run_with_others(&others, async |bed| {
        // The target of the names in these tests has 600 of 1000 blocks free.
        let first = async |name: &str| {
            let ino = bed.add(name).await.unwrap();
            bed.inode(ino).await.unwrap().layout.first
        };
        assert_eq!(first("a").await, 0, "all are as full");
        let used = |free| SpaceUsage { total_blocks: 1000, free_blocks: free, headroom_blocks: 20 };
        others.iter().for_each(|other| other.usage.set(used(900)));
        others[0].usage.set(used(950));
        assert_eq!(first("b").await, 1, "it is twice as full as all together");
        others.iter().for_each(|other| other.usage.set(used(700)));
        assert_eq!(first("c").await, 0);
    });
}

#[test]
fn a_check_finds_what_targets_have_and_should_not() {
    let others = three();
    run_with_others(&others, async |bed| {
        let (ino, dir) = (bed.add("f").await.unwrap(), bed.add("d/").await.unwrap());
        let part = Part { blocks: [40].into(), ..Part::default() };
        for (at, ino, part, kind) in [
            (0, Ino(dir.0 + 50), part.clone(), Kind::MissingInode),
            (1, dir, part.clone(), Kind::ChunksOfNonFile),
            (2, ino, part.clone(), Kind::WrongLayout),
            (2, Ino(dir.0 + 60), Part::default(), Kind::WrongFileRow),
        ] {
            others[at].files.borrow_mut().insert(ino, part);
            let found = bed.diagnose().findings;
            assert_eq!(found.count(kind), 1, "{kind:?}: {found:?}");
            assert!(found.kept.iter().any(|found| found.text.contains(&format!("target {}", at + 1))));
            others[at].files.borrow_mut().clear();
        }
        write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
        others[0].files.borrow_mut().get_mut(&ino).unwrap().owner.uid = 9;
        assert_eq!(bed.diagnose().findings.count(Kind::WrongFileRow), 1);
        others[0].files.borrow_mut().get_mut(&ino).unwrap().truncations = 5;
        assert_eq!(bed.diagnose().findings.count(Kind::WrongFileRow), 2);
        // Not as long as the target has work for it.
        let work = Work::Own { ino, number: 9, owner: Owner::default() };
        let row = Queued { branch: Branch::MAIN, sequence: Birth::FIRST.0, work, targets: vec![1] };
        let (key, value) = Reserved::Queued(0, 9, row).encode();
        bed.put_row(key.clone(), Some(value)).await;
        bed.check("work that is owed");
        bed.put_row(key, Some(vec![1, 2])).await;
        assert_eq!(bed.diagnose().findings.count(Kind::BadQueueRow), 1);
    });
}

/// A missing inode whose chunks are all on one target gets its number back; other parts get files of their
/// own, as do chunks on a target that the layout of their inode does not have.
#[test]
fn a_repair_tells_whole_files_from_parts() {
    let others = three();
    run_with_others(&others, async |bed| {
        let (ino, gone) = (bed.add("f").await.unwrap(), Ino(ROOT.0 + 900));
        let part = Part { blocks: [40].into(), ..Part::default() };
        let fix = |bed: &Bed, kind| bed.diagnose().fixes[&kind].clone();
        others[1].files.borrow_mut().insert(gone, part.clone());
        let fixes = fix(bed, Kind::MissingInode);
        let [Fix::Adopt(TargetId(2), adopted, owned)] = fixes[..] else { panic!("{fixes:?}") };
        assert_eq!((adopted, owned.chunks), (gone, 1));
        others[2].files.borrow_mut().insert(gone, part.clone());
        assert_eq!(
            fix(bed, Kind::MissingInode),
            [Fix::Take(TargetId(2), gone), Fix::Take(TargetId(3), gone)]
        );
        others[1].files.borrow_mut().clear();
        others[2].files.borrow_mut().clear();
        let wanted = WantedLayout { count: Some(2), turn: None };
        bed.meta.set_layout(b"/f", wanted).await.unwrap();
        others[0].files.borrow_mut().insert(ino, part.clone());
        assert_eq!(fix(bed, Kind::WrongLayout), [Fix::Inode(ino, Field::Spread)], "a part on target 1");
        others[0].files.borrow_mut().clear();
        others[2].files.borrow_mut().insert(ino, part);
        assert_eq!(fix(bed, Kind::WrongLayout), [Fix::Take(TargetId(3), ino)]);
        others[2].files.borrow_mut().clear();
    });
}

/// A pass over the queue must not take a target for done that has not heard of a truncation yet.
#[test]
fn all_targets_owe_a_truncation_before_the_first_carries_it_out() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        for turn in 0..4 {
            write(bed, &others, ino, turn * TURN_BLOCKS).await.unwrap();
        }
        others[0].is_slow.set(true);
        let look = async {
            bed.world.env().sleep(Duration::from_millis(10)).await;
            let owed: Vec<usize> = others.iter().map(|other| other.owed.borrow().len()).collect();
            others[0].goes_on.notify_one();
            owed
        };
        let (cut, owed) = futures_util::future::join(set(bed, ino, size(1)), look).await;
        cut.unwrap();
        assert_eq!(owed, [1, 0, 0], "two have carried it out, and the slow one knows of it");
        let asked: Vec<usize> = others.iter().map(|other| other.has(ino).len()).collect();
        assert_eq!(asked, [0, 0, 0]);
    });
}

#[test]
fn a_file_at_which_a_target_fails_keeps_no_others_waiting() {
    let others = three();
    run_with_others(&others, async |bed| {
        let bad = bed.add("bad").await.unwrap();
        write(bed, &others, bad, TURN_BLOCKS).await.unwrap();
        others[0].fails_at.set(Some(bad));
        bed.remove("bad").await.unwrap();
        bed.meta.wait_reaped().await;
        // More than one batch, all behind the entry that fails.
        for number in 0..300 {
            let ino = bed.add(&format!("f{number}")).await.unwrap();
            write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
            bed.remove(&format!("f{number}")).await.unwrap();
        }
        bed.meta.wait_reaped().await;
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert_eq!(others[0].files.borrow().keys().copied().collect::<Vec<_>>(), [bad]);
        let left: Vec<Vec<u32>> = queued(bed).into_iter().map(|queued| queued.targets).collect();
        assert_eq!(left, [[1]]);
        others[0].fails_at.set(None);
        bed.world.env().sleep(Duration::from_secs(5)).await;
        assert!(others[0].files.borrow().is_empty() && queued(bed).is_empty());
        bed.check("the end");
    });
}

#[test]
fn a_target_that_cannot_tell_of_the_newest_files_does_not_serve() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        bed.kv.flush().await.unwrap();
        others[1].fails.set(true);
        bed.crash().await;
        let away: Vec<u32> = bed.meta.away().iter().map(|(target, _)| target.0).collect();
        assert_eq!(away, [2]);
        // It may have a part of a file that was marked, and whose mark is lost.
        assert!(bed.inode(ino).await.unwrap().is_spread);
        let error = set(bed, ino, size(1)).await.unwrap_err();
        assert!(error.to_string().contains("target 2"), "{error}");
        others[1].fails.set(false);
        bed.crash().await;
        assert!(bed.meta.away().is_empty());
        set(bed, ino, size(1)).await.unwrap();
    });
}

/// A target may know the number of a change durably that a crash takes back.
#[test]
fn numbers_of_work_are_given_once_also_over_a_crash() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        write(bed, &others, ino, TURN_BLOCKS).await.unwrap();
        bed.kv.flush().await.unwrap();
        others.iter().for_each(|other| drop(other.sync()));
        let uid = |uid| SetAttrRequest { uid: Some(uid), ..SetAttrRequest::default() };
        for wanted in [5, 6] {
            set(bed, ino, uid(wanted)).await.unwrap();
        }
        // The first block on a target needs the owner as of a durable change.
        write(bed, &others, ino, 2 * TURN_BLOCKS).await.unwrap();
        others[1].sync().await.unwrap();
        let before = bed.meta.parts.queue.committed();
        bed.crash().await;
        let (now, known) = (bed.inode(ino).await.unwrap().uid, others[1].files.borrow()[&ino].owner.uid);
        assert_eq!((now, known), (6, 6));
        set(bed, ino, uid(7)).await.unwrap();
        assert!(bed.meta.parts.queue.committed() > before);
        bed.meta.wait_reaped().await;
        assert_eq!(others[1].files.borrow()[&ino].owner.uid, 7);
        bed.check("a change after the crash");
    });
}

#[test]
fn a_full_queue_does_not_keep_a_check_waiting() {
    let others = three();
    run_with_others(&others, async |bed| {
        let ino = bed.add("f").await.unwrap();
        write(bed, &others, ino, 2 * TURN_BLOCKS).await.unwrap();
        bed.kv.flush().await.unwrap();
        others.iter().for_each(|other| drop(other.sync()));
        others[1].is_away.set(true);
        bed.crash().await;
        let most = bed.kv.usage().budget_bytes / 64 / 128;
        let last = bed.meta.parts.queue.committed();
        for number in 1..=most {
            bed.meta.parts.queue.note(Some(Entry::new(last + number, vec![TargetId(2)])));
        }
        bed.remove("f").await.unwrap();
        let env = bed.world.env();
        let waited = timeout(&env, Duration::from_secs(60), reaper::wait_reaped(&bed.meta.parts));
        assert!(waited.await.is_some(), "the file waits for the target, and nobody for the file");
        assert!(bed.inode(ino).await.is_ok());
    });
}

#[test]
fn a_lost_file_that_a_target_cannot_drop_is_not_made_again() {
    let others = three();
    run_with_others(&others, async |bed| {
        bed.kv.flush().await.unwrap();
        let lost = bed.add("lost").await.unwrap();
        write(bed, &others, lost, TURN_BLOCKS).await.unwrap();
        others.iter().for_each(|other| drop(other.sync()));
        others[0].fails_at.set(Some(lost));
        bed.crash().await;
        assert!(bed.meta.away().is_empty(), "one file takes no target away");
        assert_eq!(others[0].has(lost), [TURN_BLOCKS]);
        let change = Change { number: 5, ..Change::default() };
        let repeat = Repeat { change, made: Some(lost) };
        let turn = bed.meta.parts.names.turn_for(Some(repeat), None).await;
        let refused = turn.ino_to_make().await;
        assert!(matches!(refused, Err(MetaError::Request(_))), "{refused:?}");
        drop(turn);
        assert_eq!(bed.diagnose().findings.count(Kind::MissingInode), 1, "a check finds it");
    });
}

#[test]
fn work_behind_files_that_fail_makes_space() {
    let others = three();
    run_with_others(&others, async |bed| {
        let bad = bed.add("bad").await.unwrap();
        write(bed, &others, bad, TURN_BLOCKS).await.unwrap();
        let good = bed.add("good").await.unwrap();
        write(bed, &others, good, TURN_BLOCKS).await.unwrap();
        others[0].fails_at.set(Some(bad));
        for name in ["bad", "good"] {
            bed.remove(name).await.unwrap();
        }
        crate::reaper::wait_reaped(&bed.meta.parts).await;
        if bed.meta.queued_for(TargetId(1)) == 2 {
            assert!(bed.meta.make_space(TargetId(1)).await, "one of two is done");
        }
        assert_eq!((others[0].has(good).len(), others[0].has(bad).len()), (0, 1));
        assert!(!bed.meta.make_space(TargetId(1)).await, "the other one fails");
    });
}

#[test]
fn a_target_that_waits_for_its_drives_holds_up_no_other_one() {
    let others = three();
    run_with_others(&others, async |bed| {
        let (f, g) = (bed.add("f").await.unwrap(), bed.add("g").await.unwrap());
        for ino in [f, g] {
            for turn in 1..3 {
                write(bed, &others, ino, turn * TURN_BLOCKS).await.unwrap();
            }
        }
        let has = |ino: Ino| others.iter().map(|other| other.has(ino).len()).collect::<Vec<_>>();
        others[0].is_slow.set(true);
        bed.remove("f").await.unwrap();
        bed.meta.wait_reaped().await;
        assert_eq!(has(f), [1, 0, 0], "nobody waits for the slow one");
        bed.remove("g").await.unwrap();
        crate::reaper::wait_reaped(&bed.meta.parts).await;
        if bed.meta.queued_for(TargetId(2)) > 0 {
            assert!(bed.meta.make_space(TargetId(2)).await, "another one has work");
        }
        assert_eq!(has(g), [1, 0, 0]);
        assert_eq!([1, 2, 3].map(|id| bed.meta.queued_for(TargetId(id))), [2, 0, 0]);
        bed.check("work that one target owes");
        others[0].is_slow.set(false);
        others[0].goes_on.notify_one();
        bed.meta.wait_reaped().await;
        assert_eq!((has(f), has(g)), (vec![0; 3], vec![0; 3]));
        bed.check("all work is done");
    });
}
