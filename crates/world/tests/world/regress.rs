//! Regression tests of defects in files, restarts and leases.

use crate::machine::{Machine, Planned, Site, path, with_a_cut_between};
use crate::model::{make_file, read_all};
use crate::remote::on_machine;
use penstock_base::{BLOCK_BYTES, Branch, FileId};
use penstock_client::SetAttrRequest;
use penstock_drive::copies::{COPY_BYTES, places};
use penstock_drive::{Fault, Op, superblock};
use penstock_node::EventKind;
use penstock_sim::{SimDrive, World};
use penstock_wire::metadata::MakeRequest;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;

async fn resize(machine: &Machine, file: FileId, size: u64) {
    let request = SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
    machine.client.set_attr(Branch::MAIN, request).await.unwrap();
}

async fn lookup(machine: &Machine, name: &str) -> FileId {
    machine.client.lookup(machine.client.root(), name.as_bytes()).await.unwrap().file()
}

#[test]
fn what_a_crash_left_behind_the_end_is_not_in_a_hole() {
    let before = async |machine: &Machine| {
        for name in ["resized", "written"] {
            let file = make_file(machine, name).await.unwrap();
            machine.client.write(file, 0, &[7; 200_000]).await.unwrap();
        }
        // Makes the blocks durable; the sizes are still only in the client.
        machine.node.check_fs().await.unwrap();
    };
    let after = async |machine: &Machine| {
        assert!(machine.node.check_fs().await.unwrap().blocks_beyond_end > 0);
        let resized = lookup(machine, "resized").await;
        resize(machine, resized, 200_000).await;
        assert!(read_all(machine, resized).await.iter().all(|byte| *byte == 0));
        let written = lookup(machine, "written").await;
        machine.client.open(written).await.unwrap();
        machine.client.write(written, 150_000, &[9; 10]).await.unwrap();
        let bytes = read_all(machine, written).await;
        assert_eq!(bytes.len(), 150_010);
        assert!(bytes[..150_000].iter().all(|byte| *byte == 0));
    };
    with_a_cut_between(70, before, after);
}

#[test]
fn bytes_that_were_cut_off_do_not_return_with_a_larger_size() {
    let before = async |machine: &Machine| {
        let file = make_file(machine, "file").await.unwrap();
        let other = make_file(machine, "other").await.unwrap();
        machine.client.write(file, 0, &[7; 8192]).await.unwrap();
        machine.client.fsync(file).await.unwrap();
        resize(machine, file, 5000).await;
        machine.client.fsync(file).await.unwrap();
        resize(machine, file, 8192).await;
        // Makes the new size durable.
        machine.client.fsync(other).await.unwrap();
    };
    let after = async |machine: &Machine| {
        let bytes = read_all(machine, lookup(machine, "file").await).await;
        assert_eq!(bytes.len(), 8192);
        assert!(bytes[..5000].iter().all(|byte| *byte == 7) && bytes[5000..].iter().all(|byte| *byte == 0));
    };
    with_a_cut_between(70, before, after);
}

#[test]
fn inode_numbers_are_reserved_again_when_the_transaction_that_did_failed() {
    let too_long = |machine: &Machine| MakeRequest {
        dir: machine.client.root().ino.0,
        name: "link".into(),
        mode: 0o120_777,
        target: vec![b'x'; 5000],
        ..MakeRequest::default()
    };
    let first = std::cell::Cell::new(FileId::of_numbers(0, 0));
    let before = async |machine: &Machine| {
        assert_eq!(machine.client.make(Branch::MAIN, too_long(machine)).await.unwrap_err().errno, 36);
        first.set(make_file(machine, "one").await.unwrap());
        machine.client.fsync(first.get()).await.unwrap();
    };
    let after = async |machine: &Machine| {
        assert_eq!(machine.client.make(Branch::MAIN, too_long(machine)).await.unwrap_err().errno, 36);
        assert_ne!(make_file(machine, "two").await.unwrap(), first.get());
    };
    with_a_cut_between(70, before, after);
}

/// Enough scattered writes cause a chunk to be rewritten in full. A power cut leaves the synced data, before
/// and after that.
#[test]
fn chunks_written_here_and_there_are_written_again_as_a_whole() {
    const MIB: usize = 1 << 20;
    let expected = |round: u8| -> Vec<u8> {
        let block = |at: usize| if at.is_multiple_of(3) && round > 0 { round } else { at as u8 };
        (0..4 * MIB).map(|at| block(at / 4096)).collect()
    };
    let write_round = async |machine: &Machine, file: FileId, round: u8| {
        for block in (0..4 * MIB / 4096).step_by(3) {
            machine.client.write(file, block as u64 * 4096, &[round; 4096]).await.unwrap();
        }
    };
    let before = async |machine: &Machine| {
        let file = make_file(machine, "f").await.unwrap();
        machine.client.write(file, 0, &expected(0)).await.unwrap();
        machine.client.fsync(file).await.unwrap();
        let old = machine.node.fs_report();
        assert_eq!((old.rewritten_chunks, old.logged_chunks), (0, 0));
        write_round(machine, file, 200).await;
        machine.client.fsync(file).await.unwrap();
        let new = machine.node.fs_report();
        assert_eq!(new.rewritten_chunks, new.whole_chunks - old.whole_chunks, "of {}", new.whole_chunks);
        assert!(new.rewritten_chunks > 0);
        assert!(read_all(machine, file).await == expected(200));
        // The last chunk ends with the file, and one further block is next to a hole: both are written block
        // by block.
        resize(machine, file, 8 << 20).await;
        machine.client.write(file, 6 << 20, &[9; 300_000]).await.unwrap();
        machine.client.fsync(file).await.unwrap();
        assert_eq!(machine.node.fs_report().rewritten_chunks, new.rewritten_chunks);
        resize(machine, file, 4 << 20).await;
        machine.client.fsync(file).await.unwrap();
    };
    let after = async |machine: &Machine| {
        let file = lookup(machine, "f").await;
        assert!(read_all(machine, file).await == expected(200));
    };
    with_a_cut_between(70, before, after);
}

/// Regression: superblocks were read without a deadline, so one silent drive prevented every start.
#[test]
fn a_drive_that_never_answers_is_missing_at_a_start() {
    let site = Site::new();
    let silent = Planned { op: Op::Read, nth: 0, fault: Fault::Silent, within: 0..u64::MAX };
    site.plans.borrow_mut().insert(path(4), vec![silent]);
    let world = World::new(71);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let states: Vec<&str> = machine.node.drives().iter().map(|drive| drive.state().word()).collect();
        assert_eq!(states, ["online", "online", "online", "online", "missing", "online"]);
        machine.rebuild().await;
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// A life of a store in which `work` runs.
fn live(site: &Site, seed: u64, work: impl AsyncFnOnce(&Machine)) {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        work(&machine).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// The labels of one drive are damaged, or cannot be read: its members are rebuilt or away, and the start
/// goes on.
#[test]
fn a_damaged_label_costs_the_member_and_not_the_start() {
    for unreadable in [false, true] {
        let site = Site::new();
        live(&site, 72, async |machine| {
            let file = make_file(machine, "f").await.unwrap();
            machine.client.write(file, 0, &[7; 200_000]).await.unwrap();
            machine.client.fsync(file).await.unwrap();
        });
        let (disk, world) = (site.disks.borrow()[&path(1)].clone(), World::new(1));
        let drive = SimDrive::new(&world, disk.clone());
        let slices = world.run(async { superblock::read(&*drive).await.unwrap().slices }).unwrap();
        world.destroy();
        assert_eq!(slices.len(), 2, "of both arrays");
        let copies = slices.iter().flat_map(|slice| places(slice.len).map(|at| slice.offset + at));
        for at in copies {
            if unreadable {
                // The search for drives reads it, and the opening: each the whole, then the first block.
                let within = at..at + COPY_BYTES as u64;
                let plan = Planned { op: Op::Read, nth: 0, fault: Fault::Fail, within };
                let mut plans = site.plans.borrow_mut();
                (0..4).for_each(|_| plans.entry(path(1)).or_default().push(plan.clone()));
            } else {
                disk.corrupt(at / BLOCK, &[0x5a; BLOCK_BYTES]);
            }
        }
        live(&site, 73, async |machine| {
            // The watch takes the events of arrays.
            machine.env.sleep(Duration::from_secs(5)).await;
            let events = machine.node.events().after(0, 1000).unwrap();
            let warned = events.iter().any(|event| match unreadable {
                true => event.text.contains("cannot be read, so the drive is not used"),
                false => event.kind == EventKind::DriveOutdated,
            });
            assert!(warned, "unreadable {unreadable}: {events:?}");
            if !unreadable {
                machine.rebuild().await;
            }
            let file = lookup(machine, "f").await;
            assert!(read_all(machine, file).await == [7; 200_000]);
            machine.audit().await;
        });
        live(&site, 74, async |machine| {
            machine.rebuild().await;
            assert_eq!(machine.node.status().health, "ok");
        });
    }
}

/// Regression: an open was answered before the file was truncated, and its client received the answer after
/// the truncation. The client kept the old truncate generation, and could not write to the file any more.
#[test]
fn a_file_that_is_opened_while_it_is_cut_can_be_written() {
    on_machine(9900, async |_, machine| {
        let client = &machine.client;
        for round in 0..200 {
            let file = make_file(&machine, &format!("file {round}")).await.unwrap();
            client.write(file, 0, &[1; 9000]).await.unwrap();
            client.fsync(file).await.unwrap();
            client.release(file).await.unwrap();
            let cut = SetAttrRequest { ino: file.ino.0, size: Some(3), ..SetAttrRequest::default() };
            let running = Rc::new(Cell::new(2));
            let (opens, cuts) = (client.clone(), client.clone());
            let (one, other) = (running.clone(), running.clone());
            let open = async move {
                opens.open(file).await.unwrap();
                one.set(one.get() - 1);
            };
            let cut = async move {
                cuts.set_attr(Branch::MAIN, cut).await.unwrap();
                other.set(other.get() - 1);
            };
            machine.env.spawn("open", Box::pin(open));
            machine.env.spawn("cut", Box::pin(cut));
            while running.get() > 0 {
                machine.env.sleep(Duration::from_nanos(1)).await;
            }
            client.write(file, 3, &[2; 9]).await.unwrap();
            assert_eq!(read_all(&machine, file).await, [&[1; 3][..], &[2; 9]].concat(), "round {round}");
            client.release(file).await.unwrap();
        }
        machine.stop().await;
    });
}
