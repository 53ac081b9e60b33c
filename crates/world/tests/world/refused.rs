//! Tests of starts that are refused.

use crate::machine::Site;
use crate::model::make_file;
use penstock_base::Ino;
use penstock_node::StartError;
use penstock_sim::{CutMode, World};

/// Regression: the data array cannot start without the drives that are away, and the metadata array can. Then
/// all return and another drive is lost. The metadata was in the state in which the refused start had left
/// it.
fn refused_then_one_is_lost(k: usize, m: usize) {
    let site = Site::of(k, m);
    let life = |seed: u64, lost: &[usize]| -> Result<(), StartError> {
        let world = World::new(seed);
        let run = world.run(async {
            let machine = site.start(&world, lost).await?;
            let root = machine.client.root();
            if seed == 1 {
                let file = make_file(&machine, "file").await.unwrap();
                machine.client.write(file, 0, &[7; 100_000]).await.unwrap();
                machine.client.fsync(file).await.unwrap();
            } else {
                let file = Ino(machine.client.lookup(root, b"file").await.unwrap().ino);
                let found = machine.client.read(file, 0, 100_000).await.unwrap();
                assert!(found.iter().all(|part| part.iter().all(|byte| *byte == 7)));
            }
            machine.node.close().await
        });
        world.destroy();
        for disk in site.disks.borrow().values() {
            disk.cut(&world, CutMode::Everything);
        }
        run.unwrap()
    };
    life(1, &[]).unwrap();
    let away: Vec<usize> = (1..=m + 1).collect();
    assert!(life(2, &away).is_err());
    life(3, &[0]).unwrap_or_else(|error| panic!("{k}+{m}: {error}"));
}

#[test]
fn a_start_that_is_refused_changes_nothing() {
    for (k, m) in [(4, 1), (4, 2), (2, 1), (3, 1), (2, 2), (3, 2), (5, 1), (6, 2)] {
        refused_then_one_is_lost(k, m);
    }
}
