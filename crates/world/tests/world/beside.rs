//! Checks beside changes: they see one moment, and changes go on.

use crate::load::{Load, TASKS};
use crate::machine::{Machine, Site};
use penstock_array::Volume;
use penstock_base::rank::scoped;
use penstock_base::{Gate, LocalBoxFuture, TargetId};
use penstock_chunk::{Target, TargetConfig};
use penstock_kv::{Kv, KvError, KvRead, MemKv, Row, Usage, WriteSet};
use penstock_meta::{Elsewhere, MetaTarget, NewStore, Targets};
use penstock_sim::World;
use std::cell::Cell;
use std::rc::Rc;

/// Checks until `is_done`, and finds nothing wrong. Returns the number of checks, and how often `count` went
/// on during one.
pub async fn check_until(machine: &Machine, is_done: &Cell<bool>, count: &Cell<u64>) -> (u64, u64) {
    let (mut checks, mut went_on) = (0, 0);
    while !is_done.get() {
        let before = count.get();
        let check = machine.node.check_fs().await.unwrap();
        assert!(check.clean, "beside changes: {:?}", check.now);
        checks += 1;
        went_on += count.get() - before;
    }
    (checks, went_on)
}

#[test]
fn changes_go_on_beside_checks_that_see_one_moment() {
    let (mut checks, mut went_on) = (0, 0);
    for seed in 0..6 {
        let (stacks, count) = [(1, 1), (2, 2), (3, 2)][seed as usize % 3];
        let (site, world) = (Site::spread((4, 2), stacks, count), World::new(4400 + seed));
        let run = world.run(async {
            let (machine, load) = (site.start(&world, &[]).await.unwrap(), Load::default());
            load.prepare(&machine).await.unwrap();
            let (is_done, steps) = (Cell::new(false), Cell::new(0));
            let work = async {
                let tasks = (0..TASKS).map(|task| {
                    let (machine, load, steps) = (&machine, &load, &steps);
                    scoped(async move {
                        for _ in 0..60 {
                            load.step(machine, task).await.unwrap();
                            steps.set(steps.get() + 1);
                        }
                    })
                });
                futures_util::future::join_all(tasks).await;
                is_done.set(true);
            };
            let checked = scoped(check_until(&machine, &is_done, &steps));
            let ((), seen) = futures_util::future::join(work, checked).await;
            load.release_all(&machine).await.unwrap();
            machine.audit().await;
            machine.stop().await;
            seen
        });
        let seen = run.unwrap();
        checks += seen.0;
        went_on += seen.1;
        world.destroy();
    }
    eprintln!("{checks} checks, {went_on} operations during them");
    assert!(checks >= 12 && went_on >= 10 * checks, "{checks} checks, {went_on} operations");
}

/// A store whose snapshots are given up after so many reads.
struct Fleeting {
    kv: Rc<MemKv>,
    reads: Cell<u64>,
    snapshots: Cell<u64>,
}

struct Given {
    rows: Rc<dyn KvRead>,
    left: Cell<u64>,
}

impl Given {
    fn rows(&self) -> Result<&dyn KvRead, KvError> {
        let left = self.left.get().checked_sub(1).ok_or(KvError::SnapshotGone)?;
        self.left.set(left);
        Ok(&*self.rows)
    }
}

impl KvRead for Given {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        Box::pin(async { self.rows()?.get(key).await })
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        Box::pin(async { self.rows()?.get_many(keys).await })
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        Box::pin(async move { self.rows()?.scan(from, until, limit).await })
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        Box::pin(async move { self.rows()?.keys(from, until, limit).await })
    }
}

impl KvRead for Fleeting {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        self.kv.get(key)
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        self.kv.get_many(keys)
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        self.kv.scan(from, until, limit)
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        limit: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        self.kv.keys(from, until, limit)
    }
}

impl Kv for Fleeting {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        Box::pin(async {
            self.snapshots.set(self.snapshots.get() + 1);
            let given: Rc<dyn KvRead> =
                Rc::new(Given { rows: self.kv.snapshot().await?, left: self.reads.clone() });
            Ok(given)
        })
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.kv.commit(writes)
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.kv.commit_durable(writes)
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.kv.flush()
    }

    fn usage(&self) -> Usage {
        Kv::usage(&*self.kv)
    }
}

/// Wherever the snapshots of a check are given up, it begins again and finds the same.
#[test]
fn a_check_whose_snapshot_is_given_up_lets_changes_wait() {
    let (site, world) = (Site::new(), World::new(4500));
    let run = world.run(async {
        let env = world.env();
        let machine = site.start(&world, &[]).await.unwrap();
        let array = machine.node.arrays().iter().find(|array| array.name() == "data").unwrap().clone();
        let volume = Volume::whole(&array);
        let kv = Rc::new(Fleeting { kv: MemKv::new(1 << 24), reads: Cell::new(0), snapshots: Cell::new(0) });
        let (shared, gate): (Rc<dyn Kv>, _) = (kv.clone(), Rc::new(Gate::default()));
        let config = TargetConfig::for_volume(&volume, TargetId(0), 1);
        let target = Target::open(&env, volume, shared.clone(), gate.clone(), config).await.unwrap();
        let elsewhere = Elsewhere::new(TargetId(0), 1, Vec::new());
        let new = NewStore { name: "fs", ..NewStore::default() };
        let meta = MetaTarget::open(&env, shared, target.clone(), elsewhere, gate, new).await.unwrap();
        let targets = Targets { home: &target, others: &[] };
        kv.reads.set(u64::MAX);
        let whole = meta.check(targets).await.unwrap();
        assert!(whole.findings.is_clean() && whole.inodes == 1, "{whole:?}");
        assert_eq!(kv.snapshots.get(), 2, "of names and of chunks");
        for reads in 0..40 {
            kv.reads.set(reads);
            assert_eq!(meta.check(targets).await.unwrap(), whole, "after {reads} reads");
            assert!(meta.check_progress().is_none(), "it is over");
        }
        meta.stop();
        target.stop();
    });
    run.unwrap();
    world.destroy();
}
