//! Tests of starts that are refused.

use crate::machine::Site;
use crate::model::make_file;
use crate::plant::Rows;
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
                let file = machine.client.lookup(root, b"file").await.unwrap().file();
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

/// A store with a feature of a later release is not opened for writing; one that may be ignored is dropped.
#[test]
fn features_of_a_later_release_refuse_the_start_or_are_dropped() {
    // Bytes of the sets in the row of the file system.
    for (set, is_refused) in [(1, false), (9, true), (17, true)] {
        let site = Site::new();
        let start = |seed: u64| {
            let world = World::new(seed);
            let run = world.run(async {
                let machine = site.start(&world, &[]).await?;
                if seed == 1 {
                    make_file(&machine, "file").await.unwrap();
                    Rows::of(&machine).put_feature(set).await;
                } else {
                    machine.client.lookup(machine.client.root(), b"file").await.unwrap();
                    assert_eq!(Rows::of(&machine).features().await, [0; 24], "set {set}");
                }
                machine.stop().await;
                Ok::<_, StartError>(())
            });
            world.destroy();
            run.unwrap()
        };
        start(1).unwrap();
        match start(2) {
            Ok(()) => assert!(!is_refused, "set {set}"),
            Err(error) => assert!(is_refused && error.to_string().contains("feature bits"), "{error}"),
        }
    }
}
