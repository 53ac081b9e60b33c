//! Snapshots: they stay as they were, and they never cost the store its space.

use super::site::Site;
use super::{Rows, Shared, commit, open};
use penstock_kv::{AheadKv, Kv, KvError, KvRead, WriteSet};
use penstock_sim::World;
use std::rc::Rc;
use std::time::Duration;

async fn all(rows: &dyn KvRead) -> Result<Rows, KvError> {
    Ok(rows.scan(vec![], vec![0xff; 9], usize::MAX).await?.into_iter().collect())
}

/// Changes before the snapshot are in the engine, on their way to it, or in memory. Those after it are not
/// seen, wherever they are.
#[test]
fn a_snapshot_stays_as_it_was() {
    let mut seen = 0;
    for seed in 0..12 {
        let (site, world, model) = (Site::of(96 << 20), World::new(7000 + seed), Shared::default());
        let run = world.run(async {
            let kv = open(&site, &world, &[]).await;
            let mut taken: Vec<(Rc<dyn KvRead>, Rows)> = Vec::new();
            for _ in 0..120 {
                commit(&kv, &world, &model).await.unwrap();
                match world.below(10) {
                    0 => world.env().sleep(Duration::from_millis(world.below(400))).await,
                    1 => kv.flush().await.unwrap(),
                    2 => {
                        let rows = model.borrow().states.last().unwrap().clone();
                        // Commits may come while it is being taken.
                        let other = {
                            let (kv, world, model) = (kv.clone(), world.clone(), model.clone());
                            async move { commit(&kv, &world, &model).await.unwrap() }
                        };
                        let (snapshot, ()) = futures_util::future::join(kv.snapshot(), other).await;
                        taken.push((snapshot.unwrap(), rows));
                    }
                    3 if taken.len() > 3 => drop(taken.remove(world.below(3) as usize)),
                    _ => {}
                }
                if let Some((snapshot, rows)) = taken.get(world.below(9) as usize) {
                    assert_eq!(all(&**snapshot).await.unwrap(), *rows, "seed {seed}");
                    let keys: Vec<Vec<u8>> = rows.keys().cloned().collect();
                    assert_eq!(snapshot.keys(vec![], vec![0xff], usize::MAX).await.unwrap(), keys);
                    let some: Vec<Vec<u8>> = (0..300).map(|key| format!("{key:04}").into_bytes()).collect();
                    let wanted: Vec<_> = some.iter().map(|key| rows.get(key).cloned()).collect();
                    assert_eq!(snapshot.get_many(some).await.unwrap(), wanted, "seed {seed}");
                    seen += 1;
                }
            }
        });
        run.unwrap();
        world.destroy();
    }
    assert!(seen > 100, "{seen} looks at snapshots");
}

fn key(number: u64) -> Vec<u8> {
    number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes().to_vec()
}

/// Fills a store. Returns the number of its rows.
async fn fill(kv: &AheadKv) -> u64 {
    let mut count = 0;
    loop {
        let mut writes = WriteSet::new();
        for number in count..count + 20 {
            writes.put(key(number), vec![1; 300]);
        }
        match kv.commit(writes).await {
            Ok(()) => count += 20,
            Err(KvError::NoSpace { .. }) => return count,
            Err(error) => panic!("{error}"),
        }
    }
}

/// A snapshot of a full store, all of whose rows are written over: it keeps all pages of its rows, so there
/// are none for the new ones.
#[test]
fn a_snapshot_is_given_up_before_the_store_lacks_space() {
    for (seed, share) in [(0, 1), (1, 1), (2, 3)] {
        let (site, world) = (Site::of(32 << 20), World::new(7100 + seed));
        let run = world.run(async {
            let kv = open(&site, &world, &[]).await;
            let count = fill(&kv).await;
            for number in (0..count).filter(|number| number % share > 0) {
                let mut writes = WriteSet::new();
                writes.delete(key(number)).reclaims();
                kv.commit(writes).await.unwrap();
            }
            world.env().sleep(Duration::from_secs(2)).await;
            let snapshot = kv.snapshot().await.unwrap();
            let before = all(&*snapshot).await.unwrap();
            let mut gone = false;
            for number in (0..count).filter(|number| number % share == 0).chain(0..count) {
                let mut writes = WriteSet::new();
                writes.put(key(number), vec![2; 300]).reclaims();
                kv.commit(writes).await.unwrap_or_else(|error| panic!("row {number} of {count}: {error}"));
                if number % 50 == 0 {
                    kv.flush().await.unwrap();
                    match all(&*snapshot).await {
                        Ok(rows) => assert!(!gone && rows == before, "it stays as it was"),
                        Err(KvError::SnapshotGone) => gone = true,
                        Err(error) => panic!("{error}"),
                    }
                }
            }
            assert!(gone, "the pages were needed");
            assert_eq!(kv.failure(), None);
            let next = kv.snapshot().await.unwrap();
            assert_eq!(all(&*next).await.unwrap().len() as u64, count, "another one is taken");
        });
        run.unwrap();
        world.destroy();
    }
}

/// Whoever has a snapshot keeps no store open.
#[test]
fn a_store_ends_beside_its_snapshot() {
    let (site, world) = (Site::new(), World::new(7200));
    let run = world.run(async {
        let kv = open(&site, &world, &[]).await;
        let mut writes = WriteSet::new();
        writes.put(key(1), vec![1; 30]);
        kv.commit_durable(writes).await.unwrap();
        let snapshot = kv.snapshot().await.unwrap();
        kv.stop();
        drop(kv);
        world.env().sleep(Duration::from_secs(1)).await;
        let read = snapshot.get(key(2)).await;
        assert!(matches!(read, Err(KvError::Closed)), "{read:?}");
    });
    run.unwrap();
    world.destroy();
}
