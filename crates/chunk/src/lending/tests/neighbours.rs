//! Targets that cannot lend what they have: blocks that cannot be used, drives that wait, rows that wait,
//! writes that are refused.

use super::*;

/// A target on the first of these benches whose only free blocks are in stripes that cannot be read.
async fn without_usable_blocks(benches: &[Bench]) -> Vec<Rc<Target>> {
    let bench = &benches[0];
    let headroom = bench.volume.blocks() / 50;
    let stripes = headroom / (STRIPE - 1) + 8;
    for stripe in 0..stripes {
        bench.write_stripe(stripe, 5).await;
    }
    let per_chunk = u64::from(CHUNK);
    for index in 0..stripes.div_ceil(per_chunk) {
        let first = index * per_chunk;
        let of_chunk = first..stripes.min(first + per_chunk);
        let extents: Vec<_> =
            (0..).zip(of_chunk).map(|(at, stripe)| crate::tests::extent(at, 1, stripe * STRIPE)).collect();
        bench.put_map(chunk_key(1, index), &extents).await;
    }
    let used: Vec<_> = (0..stripes).map(|stripe| stripe * STRIPE..stripe * STRIPE + 1).collect();
    let rest = std::iter::once(stripes * STRIPE..bench.volume.blocks());
    bench.put_marks(&used.into_iter().chain(rest).collect::<Vec<_>>()).await;
    let targets = open(benches).await;
    for target in &targets {
        target.sweep().await.unwrap();
    }
    for stripe in 0..stripes {
        let block = stripe * STRIPE;
        bench.set_unreadable(block..block + 1).await;
        bench.volume.read(block, 1, IO_OF_TEST).await.unwrap_err();
    }
    targets
}

const IO_OF_TEST: penstock_drive::Io = penstock_drive::Io::new(penstock_drive::Class::Client, "test");

/// Regression: blocks in stripes that cannot be read counted as free, so nothing was borrowed in their place:
/// a preallocation tried for ever, and a commit of what had been written failed.
#[test]
fn blocks_that_cannot_be_allocated_are_borrowed_instead() {
    on_volumes(2, async |benches| {
        let targets = without_usable_blocks(benches).await;
        try_write(&targets[0], 3, 0, 3).await.unwrap();
        targets[0].commit(file(3), false).await.unwrap();
        targets[0].preallocate(file(2), 0..1, false, known(0)).await.unwrap();
        assert!(targets[0].loans().0 > 0);
        assert_eq!(fills(&targets[0], chunk_key(3, 0)).await, [3; CHUNK as usize]);
    });
    on_volumes(1, async |benches| {
        let targets = without_usable_blocks(benches).await;
        let error = targets[0].preallocate(file(2), 0..1, false, known(0)).await.unwrap_err();
        assert!(matches!(error, ChunkError::NoSpace { .. }), "{error}");
        let error = try_write(&targets[0], 3, 0, 3).await.unwrap_err();
        assert!(matches!(error, ChunkError::NoSpace { .. }), "nothing is promised: {error}");
        benches[0].set_readable();
        benches[0].env.sleep(2 * REST).await;
        try_write(&targets[0], 3, 0, 3).await.unwrap();
    });
}

/// Regression: a discard that waited for a suspended lender kept everybody from the own volume, and new
/// blocks were taken from that lender first.
#[test]
fn a_suspended_lender_stops_nobody_who_can_do_without_it() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[0], 12).await;
        assert_all_clean(benches, &targets).await;
        let lender = usize::from(first_loan(&targets[0]).1.lender.0 as u16);
        set_full(&benches[lender], true);
        let (env, array) = (&benches[0].env, benches[lender].volume.array());
        for ino in 500..900 {
            let write = async {
                try_write(&targets[lender], ino, 0, 9).await.unwrap();
                targets[lender].commit_all().await.unwrap();
            };
            if array.suspended().is_some() || timeout(env, REST, write).await.is_none() {
                break;
            }
        }
        env.sleep(REST).await;
        assert!(array.suspended().is_some(), "its host is full");
        // Stripes of the loan that wait for a discard.
        let patience = 20 * REST;
        for ino in files - 4..files + 2 {
            let removed = timeout(&benches[0].env, patience, remove(&targets[0], ino));
            removed.await.expect("a removal waits for nobody");
        }
        timeout(env, patience, targets[0].sync()).await.expect("nor does a sync").unwrap();
        env.sleep(4 * REST).await;
        for ino in 900..906 {
            let written = async {
                try_write(&targets[0], ino, 0, 0xbb).await.unwrap();
                targets[0].commit(file(ino), false).await.unwrap();
            };
            timeout(&benches[0].env, patience, written)
                .await
                .expect("another lender or the own volume has space");
        }
        // Stripes of the lender that become empty now are no findings.
        for ino in 2..files - 4 {
            remove(&targets[0], ino).await;
        }
        timeout(env, patience, targets[0].sync()).await.expect("it waits for nobody").unwrap();
        env.sleep(4 * REST).await;
        let check = async {
            let quiet = benches[0].gate.quiesce().await;
            targets[0].fsck(&quiet).check().await.unwrap()
        };
        let check = timeout(env, patience, check).await.expect("nor a check");
        assert!(check.findings.is_clean(), "stripes that wait for the lender: {:?}", check.findings.kept);
        set_full(&benches[lender], false);
        benches[0].env.sleep(4 * REST).await;
        assert_eq!(fills(&targets[0], chunk_key(905, 0)).await, [0xbb; CHUNK as usize]);
    });
}

/// Regression: a target with free blocks on loan gave its own headroom away.
#[test]
fn nobody_lends_the_headroom() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        let files = fill_beyond(&targets[1], 10).await;
        for ino in files - 6..files + 2 {
            remove(&targets[1], ino).await;
        }
        targets[1].sync().await.unwrap();
        let own = |target: &Target| target.allocator.space().free_of_volume();
        let headroom = targets[1].usage().headroom_blocks;
        assert!(targets[1].usage().available_blocks() > 0, "it has free blocks on loan");
        let before = own(&targets[1]);
        fill(&targets[0]).await;
        assert!(own(&targets[1]) >= before.min(headroom), "{} of {before} blocks", own(&targets[1]));
    });
}

/// Regression: a commit was tried for ever, because blocks that a copy may not use counted as space.
#[test]
fn a_copy_without_usable_blocks_of_its_own_is_refused() {
    on_volumes(2, async |benches| {
        let targets = without_usable_blocks(benches).await;
        let copy = ChunkKey { file: crate::tests::file(5), index: 0 };
        assert!(crate::rows::is_copy(copy.file.ino));
        let (data, crcs) = blocks_of(&[7; CHUNK as usize]);
        targets[0].write(copy, 0, &data, &crcs, known(0), CLIENT).await.unwrap();
        let refused = targets[0].commit(copy.file, false).await;
        assert!(matches!(refused, Err(ChunkError::NoSpace { .. })), "{refused:?}");
    });
}

type Rows = Vec<penstock_kv::Row>;
type Answer<'a, T> = penstock_base::LocalBoxFuture<'a, Result<T, penstock_kv::KvError>>;

/// A store whose flushes wait as long as it is told.
struct Waiting {
    kv: Rc<penstock_kv::MemKv>,
    env: Env,
    waits: Rc<Cell<bool>>,
}

impl KvRead for Waiting {
    fn get(&self, key: Vec<u8>) -> Answer<'_, Option<Vec<u8>>> {
        self.kv.get(key)
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> Answer<'_, Vec<Option<Vec<u8>>>> {
        self.kv.get_many(keys)
    }

    fn scan(&self, from: Vec<u8>, until: Vec<u8>, most: usize) -> Answer<'_, Rows> {
        self.kv.scan(from, until, most)
    }

    fn keys(&self, from: Vec<u8>, until: Vec<u8>, most: usize) -> Answer<'_, Vec<Vec<u8>>> {
        self.kv.keys(from, until, most)
    }
}

impl Kv for Waiting {
    fn snapshot(&self) -> Answer<'_, Rc<dyn KvRead>> {
        self.kv.snapshot()
    }

    fn commit(&self, writes: WriteSet) -> Answer<'_, ()> {
        self.kv.commit(writes)
    }

    fn commit_durable(&self, writes: WriteSet) -> Answer<'_, ()> {
        Box::pin(async move {
            self.kv.commit(writes).await?;
            self.flush().await
        })
    }

    fn flush(&self) -> Answer<'_, ()> {
        Box::pin(async move {
            while self.waits.get() {
                self.env.sleep(REST).await;
            }
            self.kv.flush().await
        })
    }

    fn usage(&self) -> penstock_kv::Usage {
        self.kv.usage()
    }
}

/// Regression: a borrower waited for a lender's rows, with the gate of all changes, while others had space.
#[test]
fn a_lender_that_does_not_answer_keeps_nobody_waiting() {
    on_volumes(3, async |benches| {
        let env = &benches[0].env;
        let waits = Rc::new(Cell::new(false));
        let mut targets = Vec::new();
        for (id, bench) in (0..).zip(benches) {
            let waiting = Waiting { kv: bench.kv.clone(), env: env.clone(), waits: waits.clone() };
            let kv: Rc<dyn Kv> = if id == 1 { Rc::new(waiting) } else { bench.kv.clone() };
            targets.push(bench.target_over(TargetId(id), kv).await);
        }
        meet(&targets);
        // The third one has less than the second, and far more than is wanted.
        for ino in 2..12 {
            try_write(&targets[2], ino, 0, 1).await.unwrap();
        }
        while targets[0].usage().available_blocks() >= u64::from(CHUNK) {
            let ino = 1000 + targets[0].usage().free_blocks;
            try_write(&targets[0], ino, 0, 2).await.unwrap();
            targets[0].commit(file(ino), true).await.unwrap();
        }
        assert_all_clean(benches, &targets).await;
        assert_eq!(targets[0].loans().0, 0);
        waits.set(true);
        let written = timeout(env, 4 * PATIENCE, try_write(&targets[0], 500, 0, 5)).await;
        written.expect("another one lends").unwrap();
        let quiet = timeout(env, PATIENCE, async { drop(benches[0].gate.quiesce().await) }).await;
        assert!(quiet.is_some(), "a check begins");
        timeout(env, PATIENCE, try_write(&targets[0], 501, 0, 5))
            .await
            .expect("nor is it asked again")
            .unwrap();
        let (_, lent) = targets[1].loans();
        assert!(lent > 0, "it has lent something, and nobody has it");
        // Both sides disagree about the loan, and nothing is wrong.
        let quiet = benches[0].gate.quiesce().await;
        let check = targets[0].fsck(&quiet).check().await.unwrap();
        assert!(check.loans.unrecorded.contains(&(TargetId(1), 1)), "{:?}", check.loans);
        drop(quiet);
        waits.set(false);
        env.sleep(6 * REST).await;
        assert_eq!(targets[1].loans(), (0, 0), "its loan has ended");
        assert_all_clean(benches, &targets).await;
        assert_eq!(fills(&targets[0], chunk_key(500, 0)).await, [5; CHUNK as usize]);
    });
}

/// Regression: every commit failed of a target with a loan from one that took no data any more.
#[test]
fn a_lender_that_refuses_data_stops_nobody_while_others_have_space() {
    on_volumes(3, async |benches| {
        let targets = open(benches).await;
        for (target, count) in [(1usize, 40u64), (2, 50)] {
            for ino in 2..2 + count {
                try_write(&targets[target], ino, 0, ino as u8).await.unwrap();
            }
        }
        fill_beyond(&targets[0], 4).await;
        assert_all_clean(benches, &targets).await;
        let lender = first_loan(&targets[0]).1.lender.0 as usize;
        let array = benches[lender].volume.array().clone();
        array.destage_and_checkpoint().await.unwrap();
        // The lender's own files cannot be read, and are overwritten in part.
        let mut stripes = BTreeSet::new();
        for (key, value) in benches[lender].kv.rows() {
            if let Ok((_, row)) = crate::rows::read_row(&key, &value) {
                let of = |extent: &crate::rows::Extent| {
                    extent.block / STRIPE..(extent.block + u64::from(extent.count)).div_ceil(STRIPE)
                };
                stripes.extend(row.extents.iter().flat_map(of));
            }
        }
        for stripe in &stripes {
            benches[lender].set_unreadable(stripe * STRIPE..stripe * STRIPE + STRIPE / 2).await;
        }
        let env = &benches[0].env;
        let overwrite = async |ino, first| {
            let (data, crcs) = blocks_of(&[9]);
            targets[lender].write(chunk_key(ino, 0), first, &data, &crcs, known(0), CLIENT).await?;
            targets[lender].commit(file(ino), false).await
        };
        for (first, ino) in
            [0, STRIPE as u32].into_iter().flat_map(|first| (2..42).map(move |ino| (first, ino)))
        {
            if !matches!(timeout(env, 4 * REST, overwrite(ino, first)).await, Some(Ok(()))) {
                break;
            }
        }
        assert!(array.refuses_data() && array.suspended().is_none());
        for ino in 900..904 {
            try_write(&targets[0], ino, 0, 0xbb).await.unwrap();
            targets[0].commit(file(ino), false).await.unwrap();
            assert_eq!(fills(&targets[0], chunk_key(ino, 0)).await, [0xbb; CHUNK as usize]);
            env.sleep(2 * REST).await;
        }
        assert!(targets[0].loans().0 > 0);
        targets[0].commit_all().await.unwrap();
    });
}
