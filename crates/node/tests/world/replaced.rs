//! Replacements of drives that fail half way and are asked for again.

use crate::machine::Site;
use crate::model::make_file;
use penstock_sim::World;
use std::rc::Rc;
use std::time::Duration;

/// The host is full when a drive takes the place of a lost one, and the administrator makes room and asks again. The second attempt
/// took the first one's drive for nobody's and removed it, while an array used it and everything was said to be well.
fn a_full_host_meets_a_replacement(k: usize, m: usize, full_after: Duration) {
    let (site, world) = (Site::of(k, m), World::new(77));
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let file = make_file(&machine, "file").await.unwrap();
        machine.client.write(file, 0, &[7; 100_000]).await.unwrap();
        machine.client.fsync(file).await.unwrap();
        let lost = machine.node.drives().into_iter().find(|drive| drive.path() == "disk0").unwrap();
        let id = lost.id().to_string();
        machine.node.fail_drive(&id).await.unwrap();
        let before = site.disks.borrow()["disk0"].clone();
        let (disks, env) = (site.disks.clone(), world.env());
        let fill = async move {
            while Rc::ptr_eq(&disks.borrow()["disk0"], &before) {
                env.sleep(Duration::from_micros(1)).await;
            }
            env.sleep(full_after).await;
            disks.borrow()["disk0"].set_full(true);
            env.sleep(Duration::from_secs(1)).await;
            disks.borrow()["disk0"].set_full(false);
        };
        world.env().spawn("fill", Box::pin(fill));
        let first = machine.node.replace_drive(&id, None).await;
        machine.env.sleep(Duration::from_secs(2)).await;
        if let Err(error) = &first {
            let again = machine.node.replace_drive(&id, None).await;
            assert!(again.is_ok(), "{again:?} after {error}");
        }
        for array in machine.node.arrays() {
            let rebuilt =
                penstock_base::env::timeout(&machine.env, Duration::from_secs(60), array.wait_rebuilt());
            assert!(rebuilt.await.is_some(), "{} is never whole again", array.name());
        }
        let status = machine.node.status();
        assert_eq!(
            (status.health.as_str(), machine.node.drives().len()),
            ("ok", k + m),
            "{:?}",
            status.reasons
        );
        machine.stop().await;
        first.is_err()
    });
    let refused = run.unwrap();
    world.destroy();
    // As many drives are lost as the code allows; all was healthy before.
    let lost: Vec<String> = (1..=m).map(|number| format!("disk{number}")).collect();
    let world = World::new(78);
    let run = world.run(async {
        let machine = site.start_without(&world, &lost).await;
        machine.map(|_| ()).map_err(|error| error.to_string())
    });
    assert_eq!(run.unwrap(), Ok(()), "refused at first: {refused}");
    world.destroy();
}

#[test]
fn a_replacement_that_met_a_full_host_is_asked_for_again() {
    for (k, m) in [(4, 2), (1, 1)] {
        for step in 0..25 {
            a_full_host_meets_a_replacement(k, m, Duration::from_micros(step * 40));
        }
    }
}
