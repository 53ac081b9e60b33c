//! Tests of files with data beyond repair: they are listed by name, and writing makes them readable again.

use crate::machine::{DISK_BYTES, Machine, Site, path};
use crate::model::{make_file, read_all};
use penstock_base::{BLOCK_BYTES, FileId};
use penstock_node::DamagedReport;
use penstock_sim::World;
use std::time::Duration;

const FILE_BYTES: usize = 1 << 20;

/// Contents of a file in which every block differs from every other block of every file.
fn contents(file: u8) -> Vec<u8> {
    let block = |at: usize| {
        let mut block = vec![file + 1; BLOCK_BYTES];
        block[..8].copy_from_slice(&((at as u64 + 1) * 1000 + u64::from(file)).to_le_bytes());
        block
    };
    (0..FILE_BYTES / BLOCK_BYTES).flat_map(block).collect()
}

/// Overwrites the column with a block of a file on three members of the 4+2 array, one of which has the block
/// itself.
fn corrupt(site: &Site, block: &[u8]) {
    let disks = site.disks.borrow();
    let holds = |number: &usize| {
        let disk = &disks[&path(*number)];
        (0..DISK_BYTES / BLOCK_BYTES as u64).find(|at| disk.peek(*at)[..] == *block)
    };
    let (number, at) = (0..6).find_map(|number| Some((number, holds(&number)?))).expect("a strip holds it");
    for offset in [0, 2, 4] {
        disks[&path((number + offset) % 6)].corrupt(at, &[0xee; BLOCK_BYTES]);
    }
}

fn names(report: &DamagedReport) -> Vec<&str> {
    report.files.iter().flat_map(|file| &file.paths).map(String::as_str).collect()
}

async fn ino_of(machine: &Machine, name: &str) -> FileId {
    machine.client.lookup(machine.client.root(), name.as_bytes()).await.unwrap().file()
}

fn store() -> Site {
    let site = Site::new();
    let world = World::new(90);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        for (number, name) in ["whole", "over", "gone"].iter().enumerate() {
            let id = make_file(&machine, name).await.unwrap();
            machine.client.write(id, 0, &contents(number as u8)).await.unwrap();
            machine.client.fsync(id).await.unwrap();
            machine.client.release(id).await.unwrap();
        }
        let over = ino_of(&machine, "over").await;
        machine.client.link(over, machine.client.root(), b"link").await.unwrap();
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    corrupt(&site, &contents(1)[40 * BLOCK_BYTES..41 * BLOCK_BYTES]);
    corrupt(&site, &contents(2)[200 * BLOCK_BYTES..201 * BLOCK_BYTES]);
    site
}

#[test]
fn damaged_files_are_named_until_they_are_overwritten_or_removed() {
    let site = store();
    let world = World::new(91);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let node = &machine.node;
        assert!(names(&node.damaged_fs().await.unwrap()).is_empty(), "nothing was looked at yet");
        let data = node.arrays().iter().find(|array| array.name() == "data").unwrap();
        assert_eq!(node.scrub(data).await.unwrap().unreadable_stripes.len(), 2);
        let report = node.damaged_fs().await.unwrap();
        let mut named = names(&report);
        named.sort_unstable();
        assert_eq!(named, ["/gone", "/link", "/over"]);
        let over = report.files.iter().find(|file| file.paths.contains(&"/over".to_owned())).unwrap();
        let damaged_at = |at: u64| {
            over.ranges
                .iter()
                .any(|range| (range.offset_bytes..range.offset_bytes + range.length_bytes).contains(&at))
        };
        assert!(damaged_at(40 * BLOCK_BYTES as u64));
        assert!(!damaged_at(0) && !damaged_at(41 * BLOCK_BYTES as u64), "{over:?}");
        machine.env.sleep(Duration::from_secs(2)).await;
        let status = node.status();
        assert_eq!(status.health, "failed");
        // Inode numbers only: reports are passed on, and must not contain names.
        let over_ino = ino_of(&machine, "over").await;
        let (inode, reasons) = (over_ino.ino.0.to_string(), &status.reasons);
        assert!(reasons.iter().any(|why| why.contains(&inode)), "{reasons:?}");
        assert!(!reasons.iter().any(|why| why.contains("/over")), "{reasons:?}");
        let id = ino_of(&machine, "over").await;
        assert!(machine.client.read(id, 40 * BLOCK_BYTES as u64, BLOCK_BYTES as u64).await.is_err());
        assert_eq!(read_all(&machine, ino_of(&machine, "whole").await).await, contents(0));
        // Only the damaged blocks are written again; the other blocks of their stripe stay.
        let mut whole = contents(1);
        for range in &over.ranges {
            let fresh = vec![9; range.length_bytes as usize];
            machine.client.write(id, range.offset_bytes, &fresh).await.unwrap();
            whole[range.offset_bytes as usize..][..fresh.len()].copy_from_slice(&fresh);
        }
        machine.client.fsync(id).await.unwrap();
        assert_eq!(names(&node.damaged_fs().await.unwrap()), ["/gone"]);
        assert!(read_all(&machine, id).await == whole);
        machine.client.unlink(machine.client.root(), b"gone", false).await.unwrap();
        assert!(node.check_fs().await.unwrap().clean);
        assert!(names(&node.damaged_fs().await.unwrap()).is_empty());
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}
