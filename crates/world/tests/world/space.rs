//! Tests of the space of files: data and holes, reservations, and freed blocks.

use crate::flushed::fsync;
use crate::machine::{Machine, Site, on_machine, with_a_cut_between};
use crate::model::{make_file, pattern, read_all};
use penstock_base::{Branch, ErrorKind, FileId};
use penstock_client::SetAttrRequest;
use penstock_sim::World;
use penstock_wire::data::SpaceChange::{self, Punch, Reserve, Zero};
use penstock_wire::metadata::XattrRequest;
use std::time::Duration;

const ENXIO: u16 = 6;
const EFBIG: u16 = 27;
const BLOCK: u64 = 4096;

/// Results of SEEK_DATA and SEEK_HOLE from an offset; an error is its errno as a negative number.
async fn seek(machine: &Machine, file: FileId, offset: u64) -> [i64; 2] {
    let found = |result: Result<u64, penstock_client::Failure>| match result {
        Ok(offset) => offset as i64,
        Err(failure) => -i64::from(failure.errno),
    };
    let client = &machine.client;
    [found(client.seek(file, offset, false).await), found(client.seek(file, offset, true).await)]
}

/// Checks the data and holes of the file that the next test makes.
async fn check_seeks(machine: &Machine, file: FileId, far: u64) {
    let none = -i64::from(ENXIO);
    let (data, hole, size) = (2 * BLOCK as i64, 4 * BLOCK as i64, far as i64 + 3);
    for (offset, wanted) in [
        (0, [data, 0]),
        (2 * BLOCK + 7, [data + 7, hole]),
        (4 * BLOCK, [far as i64, hole]),
        (far - 1, [far as i64, far as i64 - 1]),
        (far + 2, [far as i64 + 2, size]),
        (far + 3, [none, none]),
        (u64::MAX, [none, none]),
    ] {
        assert_eq!(seek(machine, file, offset).await, wanted, "from {offset}");
    }
}

#[test]
fn data_and_holes_are_found_in_memory_and_on_the_volume() {
    let site = Site::new();
    let far = 1 << 40;
    let world = World::new(61);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let client = &machine.client;
        let file = make_file(&machine, "sparse").await.unwrap();
        let none = -i64::from(ENXIO);
        assert_eq!(seek(&machine, file, 0).await, [none, none], "an empty file has nothing");
        // Two blocks in the first chunk, one far away, and a size in the middle of a block.
        client.write(file, 2 * BLOCK + 5, &pattern(&world, 5000)).await.unwrap();
        client.write(file, far, b"far").await.unwrap();
        check_seeks(&machine, file, far).await;
        fsync(&machine, file, false).await.unwrap();
        check_seeks(&machine, file, far).await;
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    // After the restart no chunk is in memory.
    let world = World::new(62);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let file = machine.client.lookup(machine.client.root(), b"sparse").await.unwrap().file();
        check_seeks(&machine, file, far).await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

async fn change(machine: &Machine, file: FileId, offset: u64, len: u64, change: SpaceChange) {
    machine.client.change_space(file, offset, len, change, true).await.unwrap();
}

fn free_bytes(machine: &Machine) -> u64 {
    machine.node.fs_report().free_bytes
}

/// Writes to a file until nothing fits any more.
async fn fill(machine: &Machine, file: FileId) {
    let mut offset = 0;
    for len in [1 << 20, 4096] {
        let data = pattern(&machine.world, len);
        let failure = loop {
            match machine.client.write(file, offset, &data).await {
                Ok(()) => offset += len as u64,
                Err(failure) => break failure,
            }
        };
        assert_eq!(failure.kind, ErrorKind::NoSpace, "{failure}");
    }
    machine.client.fsync(file).await.unwrap();
}

/// A reservation survives growing, a full volume and a power cut.
#[test]
fn what_is_reserved_can_be_written_on_a_full_volume_after_a_power_cut() {
    const LEN: u64 = 3 << 20;
    let before = async |machine: &Machine| {
        let client = &machine.client;
        let kept = make_file(machine, "kept").await.unwrap();
        let free = free_bytes(machine);
        change(machine, kept, BLOCK, LEN - BLOCK - 5, Reserve).await;
        assert_eq!(free_bytes(machine), free - (LEN - BLOCK), "whole blocks are taken at once");
        assert_eq!(client.get_attr(kept).await.unwrap().size, 0);
        // Behind the end, and then within the file: the size does not change the reservation.
        let request = SetAttrRequest { ino: kept.ino.0, size: Some(BLOCK), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, request).await.unwrap();
        client.write(kept, 2 << 20, b"in the middle").await.unwrap();
        let none = -i64::from(ENXIO);
        assert_eq!(seek(machine, kept, 0).await, [2 << 20, 0], "what is reserved is a hole");
        assert_eq!(seek(machine, kept, (2 << 20) + 13).await, [none, none]);
        fsync(machine, kept, false).await.unwrap();
        assert_eq!(free_bytes(machine), free - (LEN - BLOCK), "the write took nothing");
        let big = make_file(machine, "big").await.unwrap();
        fill(machine, big).await;
        let failure = client.change_space(kept, LEN, 1 << 20, Reserve, true).await.unwrap_err();
        assert_eq!(failure.kind, ErrorKind::NoSpace);
    };
    let after = async |machine: &Machine| {
        let client = &machine.client;
        let file = client.lookup(client.root(), b"kept").await.unwrap().file();
        let bytes = read_all(machine, file).await;
        assert_eq!(bytes.len(), (2 << 20) + 13);
        assert!(bytes[..2 << 20].iter().all(|byte| *byte == 0) && &bytes[2 << 20..] == b"in the middle");
        let data = pattern(&machine.world, (LEN - BLOCK) as usize);
        client.write(file, BLOCK, &data).await.unwrap();
        fsync(machine, file, false).await.unwrap();
        assert!(read_all(machine, file).await[BLOCK as usize..] == data);
    };
    with_a_cut_between(63, before, after);
}

#[test]
fn punched_space_comes_back_and_zeroed_space_stays() {
    on_machine(65, async |machine| {
        let client = &machine.client;
        let file = make_file(machine, "file").await.unwrap();
        let mut bytes = pattern(&machine.world, 3 << 20);
        let mut free = free_bytes(machine) - bytes.len() as u64;
        client.write(file, 0, &bytes).await.unwrap();
        for settled in [false, true] {
            if settled {
                fsync(machine, file, false).await.unwrap();
            }
            let at = u64::from(settled) << 20;
            // 16 blocks and a part at each end; then as many that are zeroed, which keep their blocks.
            change(machine, file, at + 100, 17 * BLOCK, Punch).await;
            bytes[at as usize + 100..][..17 * BLOCK as usize].fill(0);
            change(machine, file, at + 40 * BLOCK + 1, 17 * BLOCK, Zero).await;
            bytes[(at + 40 * BLOCK) as usize + 1..][..17 * BLOCK as usize].fill(0);
            assert!(read_all(machine, file).await == bytes, "settled {settled}");
            assert_eq!(
                seek(machine, file, at + BLOCK).await,
                [(at + 17 * BLOCK) as i64, (at + BLOCK) as i64]
            );
            fsync(machine, file, false).await.unwrap();
            free += 16 * BLOCK;
            assert_eq!(free_bytes(machine), free, "settled {settled}");
        }
        // The last block is freed as a whole, and with it the blocks that are reserved behind it.
        client.write(file, 3 << 20, b"tail").await.unwrap();
        change(machine, file, (3 << 20) + BLOCK, 8 * BLOCK, Reserve).await;
        change(machine, file, 3 << 20, 20 * BLOCK, Punch).await;
        fsync(machine, file, false).await.unwrap();
        assert_eq!(free_bytes(machine), free);
        bytes.extend([0; 4]);
        assert!(read_all(machine, file).await == bytes);
        // More than the space that exists: nothing is allocated.
        let failure = client.change_space(file, 0, 1 << 40, Reserve, false).await.unwrap_err();
        assert_eq!(failure.kind, ErrorKind::NoSpace);
        assert_eq!(free_bytes(machine), free);
        assert_eq!(client.get_attr(file).await.unwrap().size, (3 << 20) + 4);
        // Behind the end and never written; freed with the file.
        change(machine, file, 1 << 50, 5 << 20, Reserve).await;
        client.unlink(client.root(), b"file", false).await.unwrap();
        client.release(file).await.unwrap();
        assert_eq!(machine.node.check_fs().await.unwrap().blocks, 0);
    });
}

#[test]
fn a_copy_is_exact_at_any_offset_and_ends_with_its_source() {
    on_machine(66, async |machine| {
        let client = &machine.client;
        let from = make_file(machine, "from").await.unwrap();
        let to = make_file(machine, "to").await.unwrap();
        let data = pattern(&machine.world, (2 << 20) + 77);
        client.write(from, 0, &data).await.unwrap();
        let mut wanted = vec![0; 5000];
        wanted.extend(&data[123..]);
        let len = data.len() as u64 - 123;
        assert_eq!(client.copy((from, 123), (to, 5000), u64::MAX).await.unwrap(), len);
        assert!(read_all(machine, to).await == wanted);
        assert_eq!(client.copy((from, data.len() as u64), (to, 0), 1).await.unwrap(), 0, "at the end");
        // Within one file, and with a bounded length.
        assert_eq!(client.copy((to, 5000), (to, 4 << 20), 100_000).await.unwrap(), 100_000);
        assert!(read_all(machine, to).await[4 << 20..] == wanted[5000..105_000]);
        client.write(from, 20 << 20, b"end").await.unwrap();
        assert_eq!(client.copy((from, 0), (to, 0), 20 << 20).await.unwrap(), 16 << 20);
        let failure = client.copy((from, 0), (to, 1 << 62), 1).await.unwrap_err();
        assert_eq!(failure.errno, EFBIG);
    });
}

/// More chunks behind the end than one transaction can change: everything there reads as zeros and is freed,
/// in steps.
#[test]
fn files_with_many_chunks_are_cut_in_steps() {
    on_machine(66, async |machine| {
        const CHUNKS: u64 = 9000;
        let client = machine.client.clone();
        let free = client.stat_fs().await.unwrap().free_blocks;
        let file = make_file(machine, "long").await.unwrap();
        let resize = async |size: u64| {
            let change = SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
            assert_eq!(client.set_attr(Branch::MAIN, change).await.unwrap().size, size);
        };
        let at = |chunk: u64| chunk << 20;
        client.write(file, 0, &[1; 100]).await.unwrap();
        for chunk in 1..CHUNKS {
            client.change_space(file, at(chunk), BLOCK, Reserve, true).await.unwrap();
        }
        assert!(client.stat_fs().await.unwrap().free_blocks + CHUNKS <= free);
        // The blocks stay reserved, and read as zeros.
        for size in [at(CHUNKS), 200, at(CHUNKS)] {
            resize(size).await;
            for chunk in [1, 4000, CHUNKS - 1].into_iter().filter(|chunk| at(*chunk) < size) {
                let found = client.read(file, at(chunk), BLOCK).await.unwrap();
                assert_eq!(penstock_base::buf::gather(&found)[..], [0; BLOCK as usize], "chunk {chunk}");
                client.write(file, at(chunk), &[2; BLOCK as usize]).await.unwrap();
            }
        }
        // A second client makes names meanwhile.
        let names = async {
            for number in 0..20 {
                machine.env.sleep(std::time::Duration::from_millis(1)).await;
                make_file(machine, &format!("other-{number}")).await.unwrap();
            }
        };
        futures_util::future::join(resize(50), names).await;
        resize(at(CHUNKS)).await;
        for chunk in [1, 4000, CHUNKS - 1] {
            let found = client.read(file, at(chunk), BLOCK).await.unwrap();
            assert_eq!(penstock_base::buf::gather(&found)[..], [0; BLOCK as usize], "chunk {chunk}");
        }
    });
}

/// A request that changes very many rows needs more than one transaction: a file that was written in very
/// many chunks and has very many attributes is synced and removed.
#[test]
fn files_of_many_rows_are_synced_and_removed_in_steps() {
    on_machine(67, async |machine| {
        const MANY: u64 = 1500;
        let client = machine.client.clone();
        let rows = || machine.node.fs_report().meta_used_bytes;
        let file = make_file(machine, "sparse").await.unwrap();
        for chunk in 0..MANY {
            client.write(file, chunk << 20, &[1; BLOCK as usize]).await.unwrap();
        }
        client.fsync(file).await.unwrap();
        for number in 0..1000 {
            let name = format!("user.{number}").into_bytes();
            let request =
                XattrRequest { ino: file.ino.0, name, value: vec![1; 20], ..XattrRequest::default() };
            client.set_xattr(Branch::MAIN, request).await.unwrap();
        }
        client.sync().await.unwrap();
        let full = rows();
        assert!(full > MANY * 100);
        client.unlink(client.root(), b"sparse", false).await.unwrap();
        client.release(file).await.unwrap();
        let long_enough = Duration::from_secs(10);
        machine.env.sleep(long_enough).await;
        client.sync().await.unwrap();
        // Results that the session keeps are rows too.
        assert!(rows() < full / 4, "{full} bytes of rows before, {} after", rows());
    });
}

fn long_name(number: u64) -> String {
    format!("{number}{}", "x".repeat(200))
}

/// Makes files until there is no space for another row. Returns the number of files.
async fn fill_with_names(machine: &Machine) -> u64 {
    let mut names = 0;
    loop {
        match make_file(machine, &long_name(names)).await {
            Ok(file) => machine.client.release(file).await.unwrap(),
            Err(failure) => {
                assert_eq!(failure.kind, ErrorKind::NoSpace, "{failure}");
                return names;
            }
        }
        names += 1;
    }
}

/// On a store full of names, a file is truncated that has writes for whose rows there is no space.
#[test]
fn a_store_full_of_names_lets_files_be_made_shorter() {
    on_machine(69, async |machine| {
        let client = machine.client.clone();
        let log = make_file(machine, "log").await.unwrap();
        let contents = vec![3; 1 << 20];
        client.write(log, 0, &contents).await.unwrap();
        client.fsync(log).await.unwrap();
        let names = fill_with_names(machine).await;
        for size in [1_000_000u64, 4096, 100, 0] {
            client.write(log, 0, &vec![4; size as usize]).await.unwrap();
            // The row of a chunk is shorter than that of a name.
            let mut chunks = 5..1000;
            let full = loop {
                client.write(log, chunks.next().unwrap() << 20, &[1; 4096]).await.unwrap();
                if let Err(failure) = client.fsync(log).await {
                    break failure;
                }
            };
            assert_eq!(full.kind, ErrorKind::NoSpace, "{full}");
            let request = SetAttrRequest { ino: log.ino.0, size: Some(size), ..SetAttrRequest::default() };
            machine.env.sleep(Duration::from_millis(1)).await;
            let attr = client.set_attr(Branch::MAIN, request).await.unwrap();
            assert_eq!(attr.size, size);
            let found = penstock_base::buf::gather(&client.read(log, 0, 1 << 21).await.unwrap());
            assert_eq!(found[..], vec![4; size as usize]);
            client.fsync(log).await.unwrap();
            assert!(client.get_attr(log).await.unwrap().mtime >= attr.mtime, "cut to {size}");
        }
        for number in 0..names {
            client.unlink(client.root(), long_name(number).as_bytes(), false).await.unwrap();
        }
        client.write(log, 5 << 20, &contents).await.unwrap();
        client.fsync(log).await.unwrap();
        client.release(log).await.unwrap();
    });
}

/// A store that is full of names accepts writes to blocks that exist. Each hole makes the row of its chunk
/// longer. Punching may use no more than the headroom beyond the budget of rows; then fsync returns an error,
/// and removing files frees space again.
#[test]
fn a_store_full_of_names_takes_overwrites_and_holes_within_its_reserve() {
    let site = Site::with_data(4, 2, 640 << 20);
    let world = World::new(68);
    let run = world.run(async {
        const CHUNKS: u64 = 400;
        let machine = site.start(&world, &[]).await.unwrap();
        let client = machine.client.clone();
        let database = make_file(&machine, "database").await.unwrap();
        client.write(database, 0, &pattern(&world, 1 << 20)).await.unwrap();
        change(&machine, database, 1 << 20, 2 << 20, Reserve).await;
        client.fsync(database).await.unwrap();
        let file = make_file(&machine, "holes").await.unwrap();
        for chunk in 0..CHUNKS {
            change(&machine, file, chunk << 20, 1 << 20, Reserve).await;
        }
        client.fsync(file).await.unwrap();
        let names = fill_with_names(&machine).await;
        let space = || machine.node.fs_report();
        let (mut refused, budget) = (0, space().meta_budget_bytes);
        let mut overwrites = [5, 40_000, (1 << 20) + 5 * BLOCK, 100_000, (1 << 20) + 10 * BLOCK].into_iter();
        for chunk in 0..CHUNKS {
            for block in (0..256).step_by(2) {
                change(&machine, file, (chunk << 20) + block * BLOCK, BLOCK, Punch).await;
            }
            match client.fsync(file).await {
                Ok(()) => {}
                Err(failure) if failure.kind == ErrorKind::NoSpace => refused += 1,
                Err(failure) => panic!("{failure}"),
            }
            // Rows that the engine does not have yet count in full.
            machine.env.sleep(Duration::from_secs(1)).await;
            assert!(space().meta_used_bytes <= budget * 9 / 8, "{:?}", space());
            if space().meta_used_bytes > budget
                && let Some(offset) = overwrites.next()
            {
                client.write(database, offset, &pattern(&world, 9000)).await.unwrap();
                client.fsync(database).await.unwrap_or_else(|failure| panic!("at {offset}: {failure}"));
                // A full chunk is written to another place.
                for chunk in [0, 2] {
                    client.write(database, chunk << 20, &pattern(&world, 1 << 20)).await.unwrap();
                    client.fsync(database).await.unwrap_or_else(|failure| panic!("chunk {chunk}: {failure}"));
                }
            }
        }
        assert!(refused > 0 && overwrites.next().is_none(), "{refused} refused, {:?}", space());
        // Removing files frees space for the waiting rows; the bound does not apply to removals.
        let free = free_bytes(&machine);
        for number in 0..names {
            client.unlink(client.root(), long_name(number).as_bytes(), false).await.unwrap();
        }
        client.fsync(file).await.unwrap();
        assert!(free_bytes(&machine) > free, "{:?}", space());
        client.unlink(client.root(), b"holes", false).await.unwrap();
        client.release(file).await.unwrap();
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}
