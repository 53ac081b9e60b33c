//! Tests of full hosts: the start and the operations of a store whose drives' hosts have no space.

use crate::machine::{Machine, Site};
use crate::model::make_file;
use penstock_base::env::timeout;
use penstock_client::Failure;
use penstock_sim::{CutMode, World};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

async fn write(machine: &Machine, name: &str, contents: &[u8]) -> Result<(), Failure> {
    let file = make_file(machine, name).await?;
    machine.client.write(file, 0, contents).await?;
    machine.client.fsync(file).await
}

/// Reads and removes a file, neither of which may wait for space on a host. Returns false if the file does
/// not exist.
async fn read_and_remove(machine: &Machine, name: &str, contents: &[u8]) -> bool {
    let root = machine.client.root();
    let found = timeout(&machine.env, PATIENCE, machine.client.lookup(root, name.as_bytes())).await;
    let Ok(attr) = found.expect("a name is looked up") else { return false };
    let read = machine.client.read(attr.file(), 0, contents.len() as u64);
    let parts = timeout(&machine.env, PATIENCE, read).await.expect("a file is read").unwrap();
    let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
    assert!(bytes == contents, "{name}: {} of {} bytes", bytes.len(), contents.len());
    let removed = machine.client.unlink(root, name.as_bytes(), false);
    timeout(&machine.env, PATIENCE, removed).await.expect("a file is removed").unwrap();
    true
}

/// Regression: files could not be read if their stripes waited for space on the host, and the next start
/// waited too.
#[test]
fn a_store_on_a_full_host_starts_and_files_are_read_and_removed() {
    let site = Site::of(4, 2);
    let fill = |full| site.disks.borrow().values().for_each(|disk| disk.set_full(full));
    let old = |number: usize| (format!("old{number}"), vec![number as u8 + 1; 200_000]);
    let new = |number: usize| (format!("new{number}"), vec![number as u8 + 1; 20_000]);
    let mut acknowledged = 0;
    let world = World::new(5);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for (name, contents) in (0..20).map(old) {
            write(&machine, &name, &contents).await.unwrap();
        }
        machine.env.sleep(Duration::from_secs(20)).await;
        fill(true);
        let writes = async {
            for (name, contents) in (0..400).map(new) {
                write(&machine, &name, &contents).await.unwrap();
                acknowledged += 1;
            }
        };
        timeout(&machine.env, Duration::from_secs(120), writes).await;
        let status = machine.node.status();
        let says = |why: &String| why.contains("is suspended: host full");
        assert!(status.health == "degraded" && status.reasons.iter().any(says), "{:?}", status.reasons);
        for (name, contents) in (0..10).map(old) {
            assert!(read_and_remove(&machine, &name, &contents).await, "{name}");
        }
    });
    run.unwrap();
    world.destroy();
    site.disks.borrow().values().for_each(|disk| disk.cut(&world, CutMode::Everything));
    let world = World::new(6);
    let run = world.run(async {
        let start = timeout(&world.env(), Duration::from_secs(600), site.start(&world, &[])).await;
        let machine = start.expect("it starts").unwrap();
        machine.env.sleep(Duration::from_secs(20)).await;
        for (name, contents) in (10..20).map(old).chain((0..acknowledged / 2).map(new)) {
            assert!(read_and_remove(&machine, &name, &contents).await, "{name}");
        }
        fill(false);
        timeout(&machine.env, PATIENCE, machine.client.sync_all()).await.expect("it goes on").unwrap();
        for (name, contents) in (acknowledged / 2..acknowledged).map(new) {
            assert!(read_and_remove(&machine, &name, &contents).await, "{name}");
        }
        machine.env.sleep(Duration::from_secs(30)).await;
        let status = machine.node.status();
        assert_eq!(status.health, "ok", "{:?}", status.reasons);
        machine.stop().await;
    });
    world.destroy();
    run.unwrap();
    println!("{acknowledged} files were acknowledged on the full host");
}
