//! Tests of rot: blocks of a small store are overwritten without a write by the store.

use crate::machine::{Site, path};
use crate::model::Model;
use penstock_sim::World;

fn store_with_files() -> (Site, Model) {
    let site = Site::new();
    let world = World::new(60);
    let model = Model::default();
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for _ in 0..25 {
            model.step(&machine, 1).await.unwrap();
        }
        machine.client.sync_all().await.unwrap();
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    (site, model)
}

/// Overwrites one block in a copy of the site. All files must be unchanged, and the block must be repaired.
fn damage(site: &Site, model: &Model, disk: usize, block: u64, noise: &[u8]) -> u64 {
    let copy = site.duplicate();
    copy.disks.borrow()[&path(disk)].corrupt(block, noise);
    let world = World::new(block);
    let run = world.run(async {
        let machine = copy
            .start(&world, &[])
            .await
            .unwrap_or_else(|error| panic!("disk {disk} block {block}: {error}"));
        model.check_stopped(&machine).await;
        let mut repaired = 0;
        for array in machine.node.arrays() {
            repaired += machine.node.scrub(array).await.unwrap().repaired_blocks;
            let again = machine.node.scrub(array).await.unwrap();
            assert!(again.clean, "disk {disk} block {block}: {again:?}");
            repaired += array.counts().repaired_blocks;
        }
        machine.audit().await;
        machine.stop().await;
        repaired
    });
    let repaired = run.unwrap();
    world.destroy();
    repaired
}

fn campaign(step: usize) -> (u64, u64) {
    let (site, model) = store_with_files();
    let noise: Vec<u8> = (0..4096).map(|at| (at * 37 + 11) as u8).collect();
    let (mut blocks, mut repaired) = (0, 0);
    for disk in 0..6 {
        let used = site.disks.borrow()[&path(disk)].used_blocks();
        for block in used.into_iter().skip(disk % step).step_by(step) {
            blocks += 1;
            repaired += u64::from(damage(&site, &model, disk, block, &noise) > 0);
        }
    }
    (blocks, repaired)
}

#[test]
fn rotten_blocks_are_repaired_and_nothing_is_wrong() {
    let (blocks, repaired) = campaign(97);
    assert!(repaired > blocks / 8, "{repaired} of {blocks} damaged blocks mattered and were repaired");
}

#[test]
#[ignore = "full form: cargo xtask show 01.4"]
fn show_rot() {
    let (blocks, repaired) = campaign(1);
    println!(
        "{blocks} blocks overwritten in turn, {repaired} of them mattered and were repaired, nothing was wrong"
    );
}
