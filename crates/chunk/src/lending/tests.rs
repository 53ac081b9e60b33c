mod neighbours;

use super::*;
use crate::free::Groups;
use crate::rows::group_key;
use crate::target::Target;
use crate::tests::{Bench, CHUNK, CLIENT, Random, STRIPE, Seed, blocks_of, fills, known, on_volumes};
use crate::{Behind, ChunkKey};
use penstock_base::env::timeout;
use penstock_base::{FileId, FindingKind, Quiet};
use penstock_kv::KvRead;
use penstock_sim::seeds;

/// Smaller numbers are those of copies of the map.
fn file(ino: u64) -> FileId {
    crate::tests::file((1 << 40) | ino)
}

fn chunk_key(ino: u64, index: u64) -> ChunkKey {
    ChunkKey { file: file(ino), index }
}

fn meet(targets: &[Rc<Target>]) {
    for target in targets {
        let others: Vec<Rc<Target>> =
            targets.iter().filter(|other| !Rc::ptr_eq(other, target)).cloned().collect();
        target.meet(&others);
    }
}

/// Opens all targets and has them meet.
async fn open(benches: &[Bench]) -> Vec<Rc<Target>> {
    let mut targets = Vec::new();
    for (id, bench) in (0..).zip(benches) {
        targets.push(bench.target_of(TargetId(id)).await);
    }
    meet(&targets);
    for target in &targets {
        target.end_unknown_loans().await.unwrap();
    }
    targets
}

fn stop(targets: Vec<Rc<Target>>) {
    targets.iter().for_each(|target| target.stop());
}

async fn reopen(benches: &[Bench], targets: Vec<Rc<Target>>) -> Vec<Rc<Target>> {
    stop(targets);
    open(benches).await
}

async fn remove(target: &Target, ino: u64) {
    let known = known(crate::REMOVED);
    target.truncate(file(ino), 0..u64::MAX, Behind::Dropped, known, WriteSet::new()).await.unwrap();
}

async fn try_write(target: &Target, ino: u64, index: u64, fill: u8) -> Result<(), ChunkError> {
    let (data, crcs) = blocks_of(&[fill; CHUNK as usize]);
    target.write(chunk_key(ino, index), 0, &data, &crcs, known(0), CLIENT).await
}

/// Commits everything. Panics unless checks find nothing, loans are known alike on both sides, and exactly
/// the blocks that have an owner count as used in memory.
async fn assert_all_clean(benches: &[Bench], targets: &[Rc<Target>]) {
    for target in targets {
        target.commit_all().await.unwrap();
    }
    let quiet: Quiet<'_> = benches[0].gate.quiesce().await;
    let (mut loans, mut lent, mut free, mut owned) = (BTreeMap::new(), BTreeMap::new(), 0, 0);
    for target in targets {
        let check = target.fsck(&quiet).check().await.unwrap();
        assert!(check.findings.is_clean(), "{}: {:?}", target.config().id, check.findings.kept);
        let id = target.config().id;
        for (group, borrowed) in check.loans.borrowed {
            let Borrowed { lender, number, loan } = borrowed.unwrap();
            loans
                .insert((lender, LentKey { borrower: id, number }), Lent { group, loan, is_restored: false });
        }
        lent.extend(check.loans.lent.into_iter().map(|(key, lent)| ((id, key), lent)));
        free += target.usage().free_blocks;
        owned += check.blocks;
    }
    // Loans of which no block is committed have no row at the borrower.
    assert!(loans.iter().all(|(key, loan)| lent.get(key) == Some(loan)), "{loans:?}\n{lent:?}");
    let all: u64 = benches.iter().map(|bench| bench.volume.blocks()).sum();
    assert_eq!(all - free, owned, "every used block belongs to a file");
}

/// Fills a target with files of one chunk until nothing is free anywhere. Returns the number of files.
async fn fill(target: &Target) -> u64 {
    for ino in 2.. {
        match try_write(target, ino, 0, ino as u8).await {
            Ok(()) => {}
            Err(ChunkError::NoSpace { .. }) => return ino - 2,
            Err(error) => panic!("{error}"),
        }
        target.commit(file(ino), true).await.unwrap();
    }
    unreachable!("it is full some time")
}

/// Of so many files of one chunk those that cannot be read because a lender is away. Panics if one cannot be
/// read for another reason.
async fn away_of(target: &Target, files: u64, lender: TargetId) -> Vec<u64> {
    let mut away = Vec::new();
    for ino in 2..files + 2 {
        match target.read(chunk_key(ino, 0), 0, CHUNK, CLIENT).await {
            Ok(_) => {}
            Err(ChunkError::LenderAway { lender: found }) if found == lender => away.push(ino),
            Err(error) => panic!("{error}"),
        }
    }
    away
}

#[test]
fn a_full_target_goes_on_with_the_space_of_others_and_gives_it_back() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let empty: Vec<_> = targets.iter().map(|target| target.usage()).collect();
        let files = fill(&targets[0]).await;
        // All of the others but their headroom, and less than a stripe.
        let most: u64 = empty.iter().map(|usage| usage.available_blocks()).sum();
        let used = files * u64::from(CHUNK);
        assert!(used <= most && most - used < u64::from(CHUNK) + 3 * STRIPE, "{used} of {most} blocks");
        let (borrowed, _) = targets[0].loans();
        assert_eq!(borrowed, targets[1..].iter().map(|target| target.loans().1).sum::<u64>());
        assert!(targets.iter().all(|target| target.usage().available_blocks() < u64::from(CHUNK)));
        assert_all_clean(benches, &targets).await;
        let targets = reopen(benches, targets).await;
        assert!(targets[0].loans().0 <= borrowed, "one of which nothing was used has ended");
        for ino in 2..files + 2 {
            assert_eq!(fills(&targets[0], chunk_key(ino, 0)).await, [ino as u8; CHUNK as usize]);
        }
        assert_all_clean(benches, &targets).await;
        for ino in 2..files + 2 {
            remove(&targets[0], ino).await;
            targets[0].file_removed(file(ino));
        }
        targets[0].sync().await.unwrap();
        benches[0].env.sleep(4 * REST).await;
        for (target, empty) in targets.iter().zip(&empty) {
            assert_eq!((target.loans(), target.usage()), ((0, 0), *empty), "all is given back");
        }
        assert_all_clean(benches, &targets).await;
        let rows = |bench: &Bench| {
            let (from, until) = all_loans();
            bench.kv.rows().into_iter().filter(|(key, _)| (&from..&until).contains(&key)).count()
        };
        assert_eq!(rows(&benches[0]), 0);
    });
}

#[test]
fn a_loan_that_was_never_used_ends_at_the_next_start() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let free = targets[1].usage();
        let key = LentKey { borrower: TargetId(0), number: 7 };
        let loan = targets[1].lending.clone().lend(key, 9, (3 * STRIPE, 3 * STRIPE)).await.unwrap().unwrap();
        assert_eq!((loan.stripes, loan.gaps.len()), (3, 0));
        assert_eq!(targets[1].usage().free_blocks, free.free_blocks - 3 * STRIPE);
        let targets = reopen(benches, targets).await;
        assert_eq!((targets[1].usage(), targets[1].loans()), (free, (0, 0)));
        targets[1].lending.clone().take_back(key).await.unwrap();
        assert_eq!(targets[1].usage(), free, "it has ended before");
    });
}

/// Without an empty stripe, single blocks of used ones are lent.
#[test]
fn free_blocks_of_used_stripes_are_lent_too() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        // One block in each stripe of the second target.
        for stripe in 0..benches[1].stripes() {
            let (data, crcs) = blocks_of(&[1]);
            for (first, ino) in [(0, 2), (STRIPE as u32, 3)] {
                let key = chunk_key(ino + 2 * stripe, 0);
                targets[1].write(key, first, &data, &crcs, known(0), CLIENT).await.unwrap();
            }
        }
        targets[1].commit_all().await.unwrap();
        let lender = targets[1].usage().available_blocks();
        let own = targets[0].usage().available_blocks();
        let files = fill(&targets[0]).await;
        let used = files * u64::from(CHUNK);
        assert!(used + u64::from(CHUNK) > own + lender - 2 * STRIPE, "{used} of {own} and {lender} blocks");
        assert_all_clean(benches, &targets).await;
        let targets = reopen(benches, targets).await;
        for ino in 2..files + 2 {
            assert_eq!(fills(&targets[0], chunk_key(ino, 0)).await, [ino as u8; CHUNK as usize]);
        }
        assert_all_clean(benches, &targets).await;
    });
}

/// Blocks of a lender that is away cannot be read; all else can, and new blocks can be written over it.
#[test]
fn a_lender_that_is_away_keeps_only_its_own_blocks() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let files = fill(&targets[0]).await;
        stop(targets);
        let target = benches[0].target_of(TargetId(0)).await;
        target.meet(&[]);
        let away = away_of(&target, files, TargetId(1)).await;
        let mut there: Vec<u64> = (2..files + 2).filter(|ino| !away.contains(ino)).collect();
        assert!(!away.is_empty() && !there.is_empty());
        let usage = target.usage();
        let available = usage.available_blocks();
        assert!(available < CHUNK.into(), "free blocks of the lender are no free blocks: {usage:?}");
        for ino in there.drain(..4) {
            remove(&target, ino).await;
        }
        target.sync().await.unwrap();
        try_write(&target, away[0], 0, 0xee).await.unwrap();
        target.commit_all().await.unwrap();
        assert_eq!(fills(&target, chunk_key(away[0], 0)).await, [0xee; CHUNK as usize]);
        target.stop();
        let targets = open(benches).await;
        assert_eq!(fills(&targets[0], chunk_key(away[0], 0)).await, [0xee; CHUNK as usize]);
        assert_eq!(fills(&targets[0], chunk_key(away[1], 0)).await, [away[1] as u8; CHUNK as usize]);
        assert_all_clean(benches, &targets).await;
    });
}

/// A lender that lost its rows may have given the blocks to others.
#[test]
fn a_loan_that_the_lender_does_not_know_is_not_touched() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let files = fill(&targets[0]).await;
        stop(targets);
        for (key, _) in benches[1].kv.rows() {
            let mut writes = WriteSet::new();
            writes.delete(key);
            benches[1].kv.commit(writes).await.unwrap();
        }
        let targets = open(benches).await;
        let last = chunk_key(files + 1, 0);
        let error = targets[0].read(last, 0, CHUNK, CLIENT).await.unwrap_err();
        assert!(matches!(error, ChunkError::LenderAway { .. }), "{error}");
        let (data, crcs) = blocks_of(&[1]);
        let error = targets[0].write(last, 0, &data, &crcs, known(0), CLIENT).await;
        assert!(error.is_ok(), "it has another place: {error:?}");
        targets[0].commit(last.file, false).await.unwrap();
        let read = async |first| targets[0].read(last, first, 1, CLIENT).await.is_ok();
        assert!(read(0).await && !read(1).await);
    });
}

/// Damage in rows of loans is found, each kind by its name.
#[test]
fn checks_see_damaged_loans() {
    for (what, kind) in [
        ("loan", FindingKind::BadLoanRow),
        ("lent", FindingKind::BadLoanRow),
        ("bits", FindingKind::BadGroupRow),
        ("stray bits", FindingKind::BadGroupRow),
        ("far", FindingKind::BadGroupRow),
        ("counter", FindingKind::BadLoanRow),
    ] {
        on_volumes(2, async |benches| {
            let targets = open(benches).await;
            fill(&targets[0]).await;
            assert_all_clean(benches, &targets).await;
            let group =
                benches[0].kv.rows().iter().find_map(|(key, _)| Borrowed::group_of(key).ok()).unwrap();
            stop(targets);
            match what {
                "loan" => benches[0].put_row(Borrowed::key(group), vec![1, 2]).await,
                "lent" => {
                    let lent = benches[1].kv.rows().into_iter().find(|(key, _)| LentKey::decode(key).is_ok());
                    benches[1].put_row(lent.unwrap().0, vec![7]).await;
                }
                "bits" => {
                    let row = benches[0].kv.get(Borrowed::key(group)).await.unwrap().unwrap();
                    let (borrowed, _) = Borrowed::decode(&row).unwrap();
                    let bits = [vec![0; GROUP_WORDS - 1], vec![1]].concat();
                    benches[0].put_row(Borrowed::key(group), borrowed.encode(&bits)).await;
                }
                "stray bits" => {
                    benches[0].put_row(group_key(group + 1000), benches[0].kv.rows()[0].1.clone()).await
                }
                "far" => {
                    let loan = Loan { stripe: 1, stripes: 1, gaps: Vec::new() };
                    let row = Borrowed { lender: TargetId(1), number: 9, loan }.encode(&[]);
                    benches[0].put_row(Borrowed::key(u64::MAX), row).await;
                }
                _ => {
                    benches[0]
                        .put_row(
                            Counter::Loans { last: 0, forgotten: 0, has_dropped: false }.encode().0,
                            vec![1],
                        )
                        .await
                }
            }
            let targets = open(benches).await;
            let quiet = benches[0].gate.quiesce().await;
            let mut found = BTreeSet::new();
            for target in &targets {
                found.extend(target.fsck(&quiet).check().await.unwrap().findings.counts.into_keys());
            }
            assert!(found.contains(&kind), "{what} of {group}: {found:?}");
        });
    }
}

fn set_full(bench: &Bench, is_full: bool) {
    bench.drives.iter().for_each(|drive| drive.set_full(is_full));
}

/// Does something that may wait for a host that is full. Then it ends once all have room.
async fn in_time<T>(benches: &[Bench], act: impl Future<Output = T>) -> T {
    let (env, mut act) = (&benches[0].env, std::pin::pin!(act));
    match timeout(env, 3 * REST, &mut act).await {
        Some(done) => done,
        None => {
            benches.iter().for_each(|bench| set_full(bench, false));
            timeout(env, 100 * REST, act).await.expect("it goes on")
        }
    }
}

/// Random writes, truncations, removals and starts on three targets that are nearly full and whose hosts are
/// full at times, against a model.
#[test]
fn targets_with_loans_are_as_a_model() {
    for seed in seeds(1..4) {
        let _seed = Seed(seed);
        on_volumes(3, async |benches| {
            let mut targets = open(benches).await;
            let mut random = Random::new(seed);
            let mut model: BTreeMap<(usize, u64), [u8; CHUNK as usize]> = BTreeMap::new();
            let mut truncations: BTreeMap<(usize, u64), u64> = BTreeMap::new();
            let weights = [random.below(10), random.below(10), random.below(10)];
            for _ in 0..600 {
                let all: u64 = weights.iter().sum::<u64>().max(1);
                let mut at = random.below(all);
                let of = (0..2).find(|target| {
                    let is_it = at < weights[*target];
                    at = at.saturating_sub(weights[*target]);
                    is_it
                });
                let of = of.unwrap_or(2);
                let (ino, target) = (2 + random.below(300), &targets[of]);
                let generation = truncations.entry((of, ino)).or_default();
                match random.below(12) {
                    0..8 => {
                        let first = if random.below(2) == 0 { 0 } else { random.below(CHUNK.into()) as u32 };
                        let most = u64::from(CHUNK - first);
                        let count = if first == 0 { most } else { 1 + random.below(most) } as usize;
                        let fill = 1 + random.below(250) as u8;
                        let (data, crcs) = blocks_of(&vec![fill; count]);
                        let known = known(*generation);
                        let write = target.write(chunk_key(ino, 0), first, &data, &crcs, known, CLIENT);
                        match in_time(benches, write).await {
                            Ok(()) => {
                                let chunk = model.entry((of, ino)).or_insert([0; CHUNK as usize]);
                                chunk[first as usize..first as usize + count].fill(fill);
                            }
                            Err(ChunkError::NoSpace { .. }) => {
                                let left: u64 =
                                    targets.iter().map(|one| one.usage().available_blocks()).sum();
                                assert!(left < 3 * u64::from(CHUNK), "{left} blocks are free");
                            }
                            Err(error) => panic!("{error}"),
                        }
                    }
                    8 => {
                        let from = random.below(CHUNK.into());
                        *generation += 1;
                        let (known, rows) = (known(*generation), WriteSet::new());
                        let cut = target.truncate(file(ino), from..u64::MAX, Behind::Dropped, known, rows);
                        in_time(benches, cut).await.unwrap();
                        if let Some(chunk) = model.get_mut(&(of, ino)) {
                            chunk[from as usize..].fill(0);
                        }
                    }
                    9 => {
                        for _ in 0..20 {
                            let next = model.keys().find(|(target, _)| *target == of).copied();
                            let Some(key) = next else { break };
                            let generation = truncations.entry(key).or_default();
                            *generation += 1;
                            let (known, rows) = (known(*generation), WriteSet::new());
                            let all = 0..u64::MAX;
                            let cut = target.truncate(file(key.1), all, Behind::Dropped, known, rows);
                            in_time(benches, cut).await.unwrap();
                            model.remove(&key);
                        }
                    }
                    10 => match random.below(6) {
                        0 => in_time(benches, assert_all_clean(benches, &targets)).await,
                        1 => benches[0].env.sleep(REST).await,
                        2 => set_full(&benches[random.below(3) as usize], true),
                        3 => benches.iter().for_each(|bench| set_full(bench, false)),
                        _ => in_time(benches, target.commit(file(ino), false)).await.unwrap(),
                    },
                    _ if random.below(4) == 0 => {
                        for target in &targets {
                            in_time(benches, target.commit_all()).await.unwrap();
                        }
                        targets = in_time(benches, reopen(benches, targets)).await;
                    }
                    _ => {
                        let wanted = model.get(&(of, ino)).copied().unwrap_or_default();
                        let read = in_time(benches, fills(target, chunk_key(ino, 0))).await;
                        assert_eq!(read, wanted, "target {of}, inode {ino}");
                    }
                }
            }
            benches.iter().for_each(|bench| set_full(bench, false));
            benches[0].env.sleep(4 * REST).await;
            assert_all_clean(benches, &targets).await;
            for ((of, ino), wanted) in &model {
                assert_eq!(
                    fills(&targets[*of], chunk_key(*ino, 0)).await,
                    *wanted,
                    "target {of}, inode {ino}"
                );
            }
        });
    }
}

/// Only what a file needs is flushed for it, and a lender that cannot be flushed keeps others from nothing.
#[test]
fn a_commit_flushes_the_lenders_of_its_file() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let files = fill(&targets[0]).await;
        assert_all_clean(benches, &targets).await;
        let (first, last) = (chunk_key(2, 0), chunk_key(files + 1, 0));
        let (data, crcs) = blocks_of(&[0xaa]);
        for key in [first, last] {
            targets[0].write(key, 0, &data, &crcs, known(0), CLIENT).await.unwrap();
        }
        let volumes = &targets[0].volumes;
        targets[0].write_back(last).await;
        let waits = |file: FileId| volumes.has_unflushed(file);
        assert!(waits(last.file) && !waits(first.file));
        targets[0].commit(first.file, false).await.unwrap();
        assert!(waits(last.file), "only the other file is flushed");
        targets[0].commit(last.file, false).await.unwrap();
        assert!(!waits(last.file));
    });
}

/// A lender that ends while others serve takes its blocks away, and nothing else.
#[test]
fn a_lender_that_ends_is_parted_with() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill(&targets[0]).await;
        assert_all_clean(benches, &targets).await;
        targets[1].stop();
        targets[0].part(TargetId(1));
        let away = away_of(&targets[0], files, TargetId(1)).await;
        assert!(!away.is_empty());
        // Space of such a file is freed, and none of it is used or discarded meanwhile.
        for ino in [away[0], 2, 3] {
            remove(&targets[0], ino).await;
        }
        targets[0].commit_all().await.unwrap();
        benches[0].env.sleep(4 * REST).await;
        try_write(&targets[0], 1000, 0, 0xee).await.unwrap();
        targets[0].commit_all().await.unwrap();
        assert_eq!(fills(&targets[0], chunk_key(1000, 0)).await, [0xee; CHUNK as usize]);
    });
}

/// The group of a loan that cannot be read is not given to another one.
#[test]
fn nothing_is_borrowed_beside_a_loan_that_cannot_be_read() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let files = fill(&targets[0]).await;
        assert_all_clean(benches, &targets).await;
        let group = benches[0].kv.rows().iter().find_map(|(key, _)| Borrowed::group_of(key).ok()).unwrap();
        stop(targets);
        benches[0].put_row(Borrowed::key(group), vec![1, 2]).await;
        let targets = open(benches).await;
        let lent = targets[1].loans().1;
        assert!(lent > 0, "nothing was taken back");
        assert!(!targets[0].allocator.space().loans().contains_key(&group));
        let error = try_write(&targets[0], files + 100, 0, 1).await.unwrap_err();
        assert!(matches!(error, ChunkError::NoSpace { .. }), "{error}");
        assert_eq!(targets[1].loans().1, lent);
    });
}

/// Rows of loans with impossible places are findings, and nothing else.
#[test]
fn impossible_loans_are_refused() {
    on_volumes(2, async |benches| {
        let blocks = benches[1].volume.blocks();
        for (stripe, stripes, gaps) in [
            (u64::MAX - 9, 1, vec![]),
            (u64::MAX / STRIPE, 1, vec![]),
            (blocks / STRIPE, 1, vec![]),
            (blocks / STRIPE - 1, 2, vec![]),
            (0, u32::MAX, vec![]),
            (0, 1, vec![(0, STRIPE as u32)]),
            (0, 1, vec![(3, 100)]),
        ] {
            let loan = Loan { stripe, stripes, gaps };
            let key = LentKey { borrower: TargetId(0), number: 5 };
            benches[1]
                .put_row(key.row(), Lent { group: 9, loan: loan.clone(), is_restored: false }.encode())
                .await;
            let row = Borrowed { lender: TargetId(1), number: 5, loan: loan.clone() };
            benches[0].put_row(Borrowed::key(9), row.encode(&[1])).await;
            let targets = open(benches).await;
            assert_eq!(targets[1].loans(), (0, 0), "{loan:?}");
            let quiet = benches[0].gate.quiesce().await;
            let check = targets[1].fsck(&quiet).check().await.unwrap();
            assert_eq!(check.findings.count(FindingKind::BadLoanRow), 1, "{loan:?}");
            let may_lend = targets[1]
                .fsck(&quiet)
                .may_lend(key, &Lent { group: 9, loan: loan.clone(), is_restored: false })
                .await;
            assert!(!may_lend.unwrap(), "{loan:?}");
            drop(quiet);
            stop(targets);
        }
    });
}

/// Loans that a restore may have forgotten are left to a repair.
#[test]
fn forgotten_loans_are_not_ended_by_a_start() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        for number in [7, 20] {
            let key = LentKey { borrower: TargetId(0), number };
            targets[1].lending.clone().lend(key, number, (STRIPE, STRIPE)).await.unwrap().unwrap();
        }
        let (key, value) = Counter::Loans { last: 30, forgotten: 10, has_dropped: false }.encode();
        benches[0].put_row(key, value).await;
        let targets = reopen(benches, targets).await;
        let left: Vec<u64> = targets[1].lending.lent.borrow().keys().map(|key| key.number).collect();
        assert_eq!(left, [7]);
        fill(&targets[0]).await;
        let numbers: BTreeSet<u64> =
            targets[0].allocator.space().loans().values().map(|loan| loan.number).collect();
        assert!(numbers.iter().all(|number| *number > 30), "{numbers:?}");
    });
}

/// Regression: the blocks of a loan whose row cannot be read were freed while the borrower was away, and lent
/// again after others had had them.
#[test]
fn blocks_of_a_loan_that_cannot_be_read_stay_until_the_borrower_is_there() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        fill(&targets[0]).await;
        assert_all_clean(benches, &targets).await;
        stop(targets);
        let rows = benches[1].kv.rows();
        let (key, row) = rows.into_iter().find(|(key, _)| LentKey::decode(key).is_ok()).unwrap();
        let (key, lent) = (LentKey::decode(&key).unwrap(), Lent::decode(&row).unwrap());
        benches[1].put_row(key.row(), vec![7]).await;
        let lender = benches[1].target_of(TargetId(1)).await;
        lender.sweep().await.unwrap();
        let first = runs_of(&lent.loan, STRIPE)[0].0;
        let is_marked = async || {
            let groups = lender.allocator.space().groups();
            lender.allocator.load(groups.of_block(first)).await.unwrap();
            let at = first - groups.range(groups.of_block(first)).start;
            lender.allocator.space().free_in(groups.of_block(first), (at, 1)).is_empty()
        };
        let quiet = benches[1].gate.quiesce().await;
        lender.fsck(&quiet).clear_unowned().await.unwrap();
        assert!(is_marked().await, "its borrower may need it");
        assert!(lender.fsck(&quiet).may_lend(key, &lent).await.unwrap());
        // Without the row they are nobody's, and nothing that was free is lent again.
        lender.fsck(&quiet).drop_lent(key.row(), WriteSet::new()).await.unwrap();
        lender.fsck(&quiet).clear_unowned().await.unwrap();
        assert!(!is_marked().await);
        assert!(!lender.fsck(&quiet).may_lend(key, &lent).await.unwrap());
    });
}

/// Lost bits of blocks that others have on loan are found like those of files.
#[test]
fn lost_bits_of_loans_are_found_at_a_start() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let files = fill(&targets[0]).await;
        assert_all_clean(benches, &targets).await;
        stop(targets);
        // The lender's bits and counts are as if nothing was lent.
        benches[1].put_marks(&[]).await;
        let targets = open(benches).await;
        targets[1].allocator.compare().await.unwrap();
        targets[1].sweep().await.unwrap();
        benches[1].env.sleep(4 * REST).await;
        assert!(targets[1].suspect_groups() > 0);
        for ino in 2..files + 2 {
            assert_eq!(fills(&targets[0], chunk_key(ino, 0)).await, [ino as u8; CHUNK as usize]);
        }
    });
}

/// The first loan of a target, by its group.
fn first_loan(target: &Target) -> (u64, Borrowed) {
    let space = target.allocator.space();
    let (group, borrowed) = space.loans().iter().next().expect("it has a loan");
    (*group, borrowed.clone())
}

/// Fills a target until it has loans, and then with `more` files. Returns the number of files.
async fn fill_beyond(target: &Target, more: u64) -> u64 {
    let mut last = u64::MAX;
    for ino in 2.. {
        if ino == last {
            return ino - 2;
        }
        try_write(target, ino, 0, ino as u8).await.unwrap();
        target.commit(file(ino), true).await.unwrap();
        if last == u64::MAX && target.loans().0 > 0 {
            last = ino + more;
        }
    }
    unreachable!("it is full some time")
}

/// Regression: the group of a loan that a repair had dropped was the next one's, while map rows named its
/// blocks until the repair went on: two files had one block.
#[test]
fn the_group_of_a_dropped_loan_is_given_again_once_no_row_names_it() {
    on_volumes(2, async |benches| {
        let mut targets = open(benches).await;
        let files = fill_beyond(&targets[0], 1).await;
        assert_all_clean(benches, &targets).await;
        let (group, _) = first_loan(&targets[0]);
        let quiet = benches[0].gate.quiesce().await;
        targets[0].fsck(&quiet).drop_loan(group).await.unwrap();
        drop(quiet);
        // Here in the process that repairs, and after it was cut off.
        for number in [1000, 2000] {
            let failed = async |number| try_write(&targets[0], number, 0, 0xee).await.err();
            let error = match failed(number).await {
                Some(error) => error,
                None => failed(number + 1).await.expect("no space is left"),
            };
            assert!(matches!(error, ChunkError::NoSpace { .. }), "{error}");
            assert!(!targets[0].allocator.space().loans().contains_key(&group));
            assert!(targets[1].loans().1 > 0, "what files may have was not taken back");
            targets = reopen(benches, targets).await;
        }
        let quiet = benches[0].gate.quiesce().await;
        let fsck = targets[0].fsck(&quiet);
        assert!(fsck.check().await.unwrap().findings.count(FindingKind::ExtentBeyondVolume) > 0);
        fsck.settle_loans().await.unwrap();
        assert!(!targets[0].lending.is_settled(), "rows name its blocks");
        fsck.trim_extents().await.unwrap();
        fsck.settle_loans().await.unwrap();
        assert!(targets[0].lending.is_settled());
        drop(quiet);
        let targets = reopen(benches, targets).await;
        for number in 3000..3003 {
            try_write(&targets[0], number, 0, 0xdd).await.unwrap();
        }
        assert!(targets[0].loans().0 > 0);
        targets[0].commit_all().await.unwrap();
        for ino in 3..files {
            let found = fills(&targets[0], chunk_key(ino, 0)).await;
            assert!(found.iter().all(|fill| [ino as u8, 0].contains(fill)), "file {ino}: {found:?}");
        }
    });
}

/// Regression: a loan was given back while rows were still compared with bits, which may have been lost.
#[test]
fn nothing_is_given_back_before_all_rows_were_compared() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[0], 1).await;
        for ino in 2..files + 2 {
            remove(&targets[0], ino).await;
        }
        targets[0].commit_all().await.unwrap();
        let look = async || {
            targets[0].lending.look().await.unwrap();
            targets[0].lending.look().await.unwrap();
            targets[0].loans().0
        };
        targets[0].allocator.must_compare();
        assert!(look().await > 0);
        targets[0].allocator.compare().await.unwrap();
        assert_eq!(look().await, 0);
        assert_all_clean(benches, &targets).await;
    });
}

/// Regression: a full target used up its own headroom, gave the loans back that stood for it, and had to
/// borrow as much again for its next write.
#[test]
fn a_target_with_loans_keeps_its_headroom() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[0], 20).await;
        targets[0].commit_all().await.unwrap();
        let headroom = targets[0].usage().headroom_blocks;
        assert!(headroom > 0);
        let own = |target: &Target| target.allocator.space().free_of_volume();
        let chunk = u64::from(CHUNK);
        assert!(own(&targets[0]) + chunk > headroom, "{} of {headroom} blocks", own(&targets[0]));
        benches[0].env.sleep(4 * REST).await;
        let before = targets[0].allocator.space().loans().len();
        try_write(&targets[0], files + 2, 0, 7).await.unwrap();
        targets[0].commit_all().await.unwrap();
        let after = targets[0].allocator.space().loans().len();
        assert!(after <= before + 1, "{before} loans, then {after}");
        assert!(own(&targets[0]) + chunk > headroom, "{} of {headroom} blocks", own(&targets[0]));
    });
}

/// Regression: blocks that a file has on a lender that is away were written anew without a reservation, so
/// that every commit failed although another target had space.
#[test]
fn overwritten_blocks_of_a_lender_that_is_away_get_space_of_another_one() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[0], 6).await;
        assert_all_clean(benches, &targets).await;
        let lender = first_loan(&targets[0]).1.lender;
        targets[0].part(lender);
        let away = away_of(&targets[0], files, lender).await;
        assert!(away.len() > 2, "{away:?}");
        for ino in &away {
            try_write(&targets[0], *ino, 0, 0xcc).await.unwrap();
            targets[0].commit(file(*ino), false).await.unwrap();
        }
        for ino in &away {
            assert_eq!(fills(&targets[0], chunk_key(*ino, 0)).await, [0xcc; CHUNK as usize]);
        }
        let reserved = targets[0].usage();
        targets[0].commit_all().await.unwrap();
        assert_eq!(targets[0].usage(), reserved, "no reservation is left");
    });
}

/// Regression: the free blocks of a lender whose array had stopped were taken again and again, and the
/// borrower's own tasks took its end for their own.
#[test]
fn a_lender_whose_array_stops_is_parted_with() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[0], 2).await;
        assert_all_clean(benches, &targets).await;
        let lender = first_loan(&targets[0]).1.lender;
        benches[lender.0 as usize].volume.array().stop();
        for ino in 2000..2010 {
            let written = try_write(&targets[0], ino, 0, 0xbb).await;
            let done = match written {
                Ok(()) => targets[0].commit(file(ino), false).await,
                failed => failed,
            };
            if done.is_err() {
                benches[0].env.sleep(2 * REST).await;
            }
        }
        targets[0].commit(file(2000), false).await.unwrap();
        assert_eq!(fills(&targets[0], chunk_key(2009, 0)).await, [0xbb; CHUNK as usize]);
        let lenders: BTreeSet<TargetId> =
            targets[0].allocator.space().loans().values().map(|loan| loan.lender).collect();
        assert!(lenders.len() == 2, "another one lends: {lenders:?}");
        // Space still comes back.
        for ino in 2..files + 2 {
            remove(&targets[0], ino).await;
        }
        targets[0].sync().await.unwrap();
        let before = targets[0].counts().discarded_stripes;
        benches[0].env.sleep(4 * REST).await;
        assert!(targets[0].counts().discarded_stripes > before);
    });
}

/// Loans that a restore has brought back, or that a target without numbers may have, are left to a repair.
#[test]
fn restored_loans_and_those_of_a_target_without_numbers_are_not_ended_by_a_start() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        let key = |number| LentKey { borrower: TargetId(0), number };
        for number in [7, 8] {
            targets[1].lending.clone().lend(key(number), number, (STRIPE, STRIPE)).await.unwrap().unwrap();
        }
        let lent = targets[1].lending.lent.borrow()[&key(7)].clone();
        let left = |targets: &[Rc<Target>]| -> Vec<u64> {
            targets[1].lending.lent.borrow().keys().map(|key| key.number).collect()
        };
        benches[1].put_row(key(7).row(), Lent { is_restored: true, ..lent }.encode()).await;
        let numbers = Counter::Loans { last: 0, forgotten: 0, has_dropped: false }.encode().0;
        benches[0].put_row(numbers.clone(), vec![1]).await;
        let targets = reopen(benches, targets).await;
        assert_eq!(left(&targets), [7, 8], "its numbers cannot be read");
        let mut writes = WriteSet::new();
        writes.delete(numbers.clone());
        benches[0].kv.commit_durable(writes).await.unwrap();
        let targets = reopen(benches, targets).await;
        assert_eq!(left(&targets), [7]);
        // Numbers that are made again.
        benches[0].put_row(numbers, vec![1]).await;
        let targets = reopen(benches, targets).await;
        fill(&targets[0]).await;
        assert_eq!(targets[0].loans().0, 0);
        let quiet = benches[0].gate.quiesce().await;
        targets[0].fsck(&quiet).put_numbers(5000).await.unwrap();
        targets[0].fsck(&quiet).settle_loans().await.unwrap();
        drop(quiet);
        try_write(&targets[0], 3000, 0, 1).await.unwrap();
        assert!(first_loan(&targets[0]).1.number > 5000);
        targets[0].commit_all().await.unwrap();
        let targets = reopen(benches, targets).await;
        assert!(targets[0].lending.is_settled() && first_loan(&targets[0]).1.number > 5000);
    });
}

/// Regression: a group whose bits cannot be read counted as free for the lender's files, and the loan was
/// dropped, although such a group is never allocated from.
#[test]
fn blocks_of_a_loan_in_a_group_whose_bits_cannot_be_read_are_kept() {
    on_volumes(2, async |benches| {
        let targets = open(benches).await;
        fill_beyond(&targets[0], 1).await;
        assert_all_clean(benches, &targets).await;
        let (group, borrowed) = first_loan(&targets[0]);
        stop(targets);
        let key = LentKey { borrower: TargetId(0), number: borrowed.number };
        let mut writes = WriteSet::new();
        writes.delete(key.row());
        let first = Groups::new(benches[1].volume.blocks(), STRIPE).of_stripe(borrowed.loan.stripe);
        writes.put(group_key(first), vec![9]);
        benches[1].kv.commit_durable(writes).await.unwrap();
        let targets = open(benches).await;
        let quiet = benches[1].gate.quiesce().await;
        let lent = Lent { group, loan: borrowed.loan, is_restored: false };
        assert!(targets[1].fsck(&quiet).may_lend(key, &lent).await.unwrap());
    });
}

/// Regression: blocks that were written over lost ones have a reservation too, and an assertion said that
/// they have none when they were made to read as zeros before they were written back.
#[test]
fn dirty_blocks_over_lost_ones_can_be_made_zeros() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[0], 4).await;
        assert_all_clean(benches, &targets).await;
        let lender = first_loan(&targets[0]).1.lender;
        targets[0].part(lender);
        let key = chunk_key(away_of(&targets[0], files, lender).await[0], 0);
        let (data, crcs) = blocks_of(&[9; 3]);
        targets[0].write(key, 0, &data, &crcs, known(0), CLIENT).await.unwrap();
        targets[0].preallocate(key.file, 1..2, true, known(0)).await.unwrap();
        targets[0].commit(key.file, false).await.unwrap();
        assert_eq!(targets[0].read(key, 0, 1, CLIENT).await.unwrap().gather().as_ref()[0], 9);
        let reserved = targets[0].allocator.space().free_of_volume();
        targets[0].commit_all().await.unwrap();
        assert_eq!(targets[0].allocator.space().free_of_volume(), reserved, "no reservation is left");
    });
}
