//! Records that say what no array would: changed, and sealed again with checksums that are right.
//!
//! A checksum does not prove where bytes come from. Whatever a log says, an opening returns an array or an
//! error, and what it returns can be read, scrubbed and closed. `PENSTOCK_SEEDS=A..B` replaces the default
//! seeds.

use crate::bench::{DISK_BYTES, IO, SLICE_AT, Site, buf_of, label_of, slice_of, spec, write, write_fresh};
use crate::replaced::duplicate;
use penstock_array::format::descriptor::Descriptor;
use penstock_array::format::index_page::IndexPage;
use penstock_array::format::label::Label;
use penstock_array::format::record::{Entry, RecordHead};
use penstock_array::format::root::Root;
use penstock_array::format::table_page::TablePage;
use penstock_array::moves::Moves;
use penstock_array::place::SegmentNo;
use penstock_array::{ArrayError, Discard, MemberNo, Pace, Position, Positions, ScrubProgress, ScrubReport};
use penstock_base::{BLOCK_BYTES, Buf, BufMut, Stripe, Version};
use penstock_drive::copies::{self, TwoCopies};
use penstock_drive::superblock::{self, Superblock};
use penstock_drive::{Class, Drive, DriveHandle, Io};
use penstock_sim::{SimDisk, SimDrive, World};
use std::cell::RefCell;
use std::rc::Rc;

/// A record on a disk: its first block, its blocks with the rest of the segment, and its head.
struct Found {
    block: u64,
    head: RecordHead,
    payload: Vec<Buf>,
    blocks: usize,
}

/// A log in which all kinds of entries stand, on the disks of an array that was stopped.
fn site_with_log() -> (Site, u64, usize) {
    let site = Site::new(spec(4, 2));
    let world = World::new(1);
    let (at, segment_bytes) = world
        .run(async {
            let machine = site.open(&world, &[]).await?;
            let geo = machine.array.geometry();
            for stripe in 0..4 {
                write_fresh(&machine, stripe, 1000 * stripe + 1).await?;
            }
            machine.volume.flush().await?;
            for block in 0..8 {
                write(&machine, block * 30, 5000 + block).await?;
            }
            machine.array.destage_and_checkpoint().await?;
            machine.volume.discard(2, 1, Discard::InTable).await?;
            for block in 0..8 {
                write(&machine, block * 30 + 1, 6000 + block).await?;
            }
            machine.array.fail_member(MemberNo::new(3), "a test").await?;
            let (data, crcs) = buf_of(&[1, 2, 3, 4]);
            machine.volume.write(machine.volume.stripe_blocks() - 2, &data, &crcs).await?;
            write_fresh(&machine, 8, 9000).await?;
            machine.volume.flush().await?;
            machine.array.stop();
            Ok::<_, ArrayError>((SLICE_AT + geo.segment_at(SegmentNo(0)), geo.segment_bytes as usize))
        })
        .unwrap()
        .unwrap();
    world.destroy();
    (site, at / BLOCK_BYTES as u64, segment_bytes / BLOCK_BYTES)
}

/// All records of the log of one disk, in the order of the disk.
fn records(disk: &SimDisk, first: u64, segment_blocks: usize) -> Vec<Found> {
    let last = disk.used_blocks().into_iter().max().unwrap_or(0);
    let mut found = Vec::new();
    for block in first..=last {
        let left = segment_blocks - ((block - first) as usize % segment_blocks);
        let head = disk.peek(block);
        let Some(head_blocks) = RecordHead::claimed_head_blocks(&head) else { continue };
        if head_blocks == 0 || head_blocks > left {
            continue;
        }
        let mut bytes = BufMut::zeroed(left * BLOCK_BYTES);
        for (n, part) in bytes.as_mut().chunks_exact_mut(BLOCK_BYTES).enumerate() {
            part.copy_from_slice(&disk.peek(block + n as u64));
        }
        let bytes = bytes.freeze();
        let Ok((head, shape)) = RecordHead::decode(&bytes) else { continue };
        let first_payload = shape.head_blocks as usize;
        let at = |n: usize| n * BLOCK_BYTES..(n + 1) * BLOCK_BYTES;
        let payload = (0..shape.payload_blocks as usize).map(|n| bytes.slice(at(first_payload + n)));
        let blocks = (shape.head_blocks + shape.payload_blocks) as usize;
        found.push(Found { block, head, payload: payload.collect(), blocks });
    }
    found
}

/// A number that stands somewhere in the records, a limit, or a neighbour of one.
fn draw(world: &World, known: &[u64]) -> u64 {
    let random = world.env().random();
    let limits = [0, 1, 2, 6, 63, 64, (1 << 63) - 1, u64::MAX];
    let some = match random % 3 {
        0 => limits[(random >> 8) as usize % limits.len()],
        _ => known[(random >> 8) as usize % known.len()],
    };
    match random >> 40 & 3 {
        0 => some.wrapping_add(1),
        1 => some.wrapping_sub(1),
        _ => some,
    }
}

fn numbers(entry: &Entry) -> Vec<u64> {
    match entry {
        Entry::Data { stripe, order, block, .. } => vec![stripe.0, *order, u64::from(*block)],
        Entry::Fresh { stripe, upto, version, .. } => vec![stripe.0, *upto, version.0],
        Entry::Destage { stripe, contained, .. } => contained
            .iter()
            .flat_map(|(block, order)| [u64::from(*block), *order])
            .chain([stripe.0])
            .collect(),
        Entry::Discard { stripe, count, upto } => vec![stripe.0, *count, *upto],
        Entry::Versions { reserved } => vec![reserved.0],
        Entry::Strips { stripe, set, clear, version, .. } => {
            vec![stripe.0, set.bits(), clear.bits(), version.0]
        }
        Entry::MemberReset { member } => vec![member.index() as u64],
    }
}

/// Changes one field of an entry.
fn change(entry: &mut Entry, which: u64, number: u64) {
    let set = Positions::from_bits(number);
    let moved = Moves::NONE.with(Position::new(number as usize % 64), Some(number as usize % 8));
    match entry {
        Entry::Data { stripe, order, block, .. } => match which % 3 {
            0 => *stripe = Stripe(number),
            1 => *order = number,
            _ => *block = number as u32,
        },
        Entry::Fresh { stripe, upto, version, stale, moves, contained } => match which % 6 {
            0 => *stripe = Stripe(number),
            1 => *upto = number,
            2 => *version = Version(number),
            3 => *stale = set,
            4 => *moves = moved,
            _ => contained.iter_mut().for_each(|(_, order)| *order = number),
        },
        Entry::Destage { stripe, stale, contained, patches } => match which % 6 {
            0 => *stripe = Stripe(number),
            1 => *stale = set,
            2 => contained.iter_mut().take(1).for_each(|(block, _)| *block = number as u32),
            3 => contained.iter_mut().for_each(|(_, order)| *order = number),
            4 => patches.iter_mut().take(1).for_each(|patch| patch.version = Version(number)),
            _ => patches.iter_mut().for_each(|patch| patch.position = Position::new(number as usize % 64)),
        },
        Entry::Discard { stripe, count, upto } => match which % 3 {
            0 => *stripe = Stripe(number),
            1 => *count = number,
            _ => *upto = number,
        },
        Entry::Versions { reserved } => *reserved = Version(number),
        Entry::Strips { stripe, set: stale, clear, version, moves } => match which % 5 {
            0 => *stripe = Stripe(number),
            1 => *stale = set,
            2 => *clear = set,
            3 => *moves = moved,
            _ => *version = Version(number),
        },
        Entry::MemberReset { member } => *member = MemberNo::new(number as usize % 64),
    }
}

/// Changes a record of the log on every disk that has it, and seals it and those behind it again. False if it
/// has no such record, or if the changed one has another length.
fn reseal(disk: &SimDisk, log: (u64, usize), nth: usize, edit: impl Fn(&mut RecordHead)) -> bool {
    let mut found = records(disk, log.0, log.1);
    found.sort_by_key(|record| record.head.seq);
    if found.is_empty() {
        return false;
    }
    let nth = nth % found.len();
    let mut chain = None;
    for record in &mut found[nth..] {
        match chain {
            None => edit(&mut record.head),
            Some(chain) => record.head.chain = chain,
        }
        let (bytes, shape) = record.head.encode(&record.payload);
        if bytes.len() != record.blocks * BLOCK_BYTES {
            return false;
        }
        for (n, part) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
            disk.corrupt(record.block + n as u64, part);
        }
        chain = Some(shape.chain);
    }
    true
}

/// Opens, reads, scrubs and closes. True if the array opened.
fn use_it(site: &Site, seed: u64) -> bool {
    let world = World::new(seed);
    let opened = world.run(async {
        let machine = site.open(&world, &[]).await?;
        for block in (0..machine.volume.stripe_blocks() * 8).step_by(64) {
            // Blocks may be damaged: their redundancy is where the log did not put it.
            let _ = machine.volume.read(block, 1, IO).await;
        }
        let _ = write(&machine, 3, 77).await;
        let _ = machine.array.scrub().await;
        let _ = machine.array.close().await;
        machine.array.stop();
        Ok::<_, ArrayError>(())
    });
    world.destroy();
    opened.is_ok_and(|opened| opened.is_ok())
}

#[test]
fn whatever_a_log_says_an_opening_ends() {
    let (site, first, segment_blocks) = site_with_log();
    let disks: Vec<Rc<SimDisk>> = site.disks.iter().map(|disk| disk.duplicate()).collect();
    let all: Vec<Found> = disks.iter().flat_map(|disk| records(disk, first, segment_blocks)).collect();
    let entries: Vec<Entry> = all.iter().flat_map(|record| record.head.entries.clone()).collect();
    let known: Vec<u64> = entries.iter().flat_map(numbers).collect();
    let controls: Vec<Entry> = entries.into_iter().filter(|entry| entry.payload_crcs().is_empty()).collect();
    assert!(all.len() > 10 && controls.len() > 5, "{} records, {} others", all.len(), controls.len());
    let (mut changed, mut opened) = (0, 0);
    for seed in penstock_sim::seeds(0..300) {
        let copy = duplicate(&site, None);
        let draws = World::new(seed);
        let (nth, which) = (draws.env().random() as usize, draws.env().random());
        let (number, entry) = (draw(&draws, &known), draws.env().random() as usize);
        let edit = |head: &mut RecordHead| {
            if which.is_multiple_of(4) {
                head.entries.push(controls[entry % controls.len()].clone());
            }
            let at =
                if which.is_multiple_of(4) { head.entries.len() - 1 } else { entry % head.entries.len() };
            change(&mut head.entries[at], which >> 8, number);
        };
        changed += copy.disks.iter().filter(|disk| reseal(disk, (first, segment_blocks), nth, edit)).count();
        opened += u64::from(use_it(&copy, seed));
        draws.destroy();
    }
    assert!(changed > 0 && opened > 0, "{changed} changed, {opened} opened");
    eprintln!("{changed} copies changed, {opened} arrays opened");
}

/// Regression: two stripes of one order made the counts of dirty stripes disagree, and every opening panic.
#[test]
fn two_stripes_of_one_order_are_destaged() {
    let (site, first, segment_blocks) = site_with_log();
    let same_order = |head: &mut RecordHead| {
        let mut orders = head.entries.iter_mut().filter_map(|entry| match entry {
            Entry::Data { order, .. } => Some(order),
            _ => None,
        });
        if let (Some(one), Some(other)) = (orders.next(), orders.next()) {
            *other = *one;
        }
    };
    let mut changed = 0;
    for disk in &site.disks {
        let mut found = records(disk, first, segment_blocks);
        found.sort_by_key(|record| record.head.seq);
        let data = |record: &Found| {
            record.head.entries.iter().filter(|entry| matches!(entry, Entry::Data { .. })).count()
        };
        let Some(nth) = found.iter().position(|record| data(record) == 2) else { continue };
        changed += usize::from(reseal(disk, (first, segment_blocks), nth, same_order));
    }
    assert!(changed > 0);
    assert!(use_it(&site, 2));
}

/// Drives whose label can be read, with a descriptor that can.
fn readable(site: &Site) -> usize {
    let is_readable =
        |disk: &&Rc<SimDisk>| label_of(disk).is_some_and(|(_, label)| label.descriptor().is_ok());
    site.disks.iter().filter(is_readable).count()
}

/// Changes the descriptor in a disk's label.
fn change_descriptor(disk: &Rc<SimDisk>, change: impl Fn(&mut Descriptor)) {
    let (superblock, label) = label_of(disk).unwrap();
    let mut descriptor = label.descriptor().unwrap();
    change(&mut descriptor);
    let label = Label { revision: descriptor.revision, descriptor: descriptor.encode(), ..label };
    let world = World::new(1);
    let changed = world.run(async {
        let drive = SimDrive::new(&world, disk.clone());
        let handle = DriveHandle::online(world.env(), "d".into(), drive, superblock);
        // Past the checks of a record.
        let (slice, io) = (slice_of(&handle), Io::new(Class::Meta, "hostile"));
        for place in copies::places(slice.len()) {
            slice.write(place, label.encode(), io).await.unwrap();
        }
        slice.flush(io).await.unwrap();
    });
    world.destroy();
    changed.unwrap();
}

/// The roots on a disk with their blocks, the newest last.
pub fn roots(disk: &SimDisk) -> Vec<(u64, Root)> {
    let blocks = disk.used_blocks().into_iter();
    let found = blocks.filter_map(|block| Some((block, Root::decode(&disk.peek(block)).ok()?)));
    let mut found: Vec<_> = found.collect();
    found.sort_by_key(|(_, root)| root.seq);
    found
}

/// Puts other bytes in the place of a page, and has the index and the roots name them.
fn put_page(disk: &SimDisk, block: u64, bytes: &[u8]) {
    let crc = |bytes: &[u8]| u32::from_le_bytes(bytes[4..8].try_into().unwrap());
    let (before, after) = (crc(&disk.peek(block)), crc(bytes));
    disk.corrupt(block, bytes);
    for above in disk.used_blocks() {
        let found = disk.peek(above);
        if let Ok(mut root) = Root::decode(&found)
            && root.table.crc == before
        {
            root.table.crc = after;
            disk.corrupt(above, &root.encode());
        }
        if let Ok(mut index) = IndexPage::decode(&found)
            && let Some(page) = index.refs.iter_mut().find(|page| page.crc == before && !page.is_none())
        {
            page.crc = after;
            put_page(disk, above, &index.encode());
        }
    }
}

/// Changes one number of an index page.
fn change_index(page: &mut IndexPage, field: u64, at: usize, number: u64) {
    let at = at % page.refs.len();
    match field % 8 {
        0 => page.checkpoint = number >> 1,
        1 => page.index = number >> 1,
        2 => drop(page.refs.pop()),
        3 => page.level = number as u8,
        4 => page.refs[at].place ^= 1,
        5 => page.refs[at].written = number >> 1,
        6 => page.refs[at].crc = number as u32,
        _ => page.refs.swap(0, at),
    }
}

/// Changes one number of a root.
fn change_root(root: &mut Root, field: u64, number: u64) {
    let counter = number >> 1;
    match field % 11 {
        0 => root.seq = counter,
        1 => root.incarnation = counter,
        2 => root.incarnation_start.0 = counter,
        3 => root.replay_segment = counter,
        4 => root.replay_seq.0 = counter,
        5 => root.durable.0 = counter,
        6 => root.versions_reserved = Version(counter),
        7 => root.order = counter,
        8 => root.epoch.0 = counter,
        9 => root.behind = (0..64).filter(|at| number & 1 << at != 0).map(MemberNo::new).collect(),
        _ => root.replay_chain = number as u32,
    }
}

/// Changes one number of a table page.
fn change_page(page: &mut TablePage, field: u64, at: usize, number: u64) {
    let of_stripe = 1 + usize::from(page.strips);
    match field % 6 {
        0 => page.checkpoint = number >> 1,
        1 => page.index = number >> 1,
        2 => drop(page.words.pop()),
        3 => page.strips = number as u16,
        4 => page.words[at % 10 * of_stripe] = number,
        _ => page.words[at % 10 * of_stripe + (at >> 8) % of_stripe] = number,
    }
}

/// A root or a page says something else, sealed and named again on one disk or on all. An opening ends, and
/// so does the next one.
#[test]
fn whatever_metadata_says_an_opening_ends() {
    let (site, first, segment_blocks) = site_with_log();
    let all: Vec<Found> = site.disks.iter().flat_map(|disk| records(disk, first, segment_blocks)).collect();
    let known: Vec<u64> = all.iter().flat_map(|record| &record.head.entries).flat_map(numbers).collect();
    let mut changed = [0; 3];
    for seed in penstock_sim::seeds(0..60) {
        let copy = duplicate(&site, None);
        let draws = World::new(seed);
        let (field, at, number) = (draws.env().random(), draws.env().random() as usize, draw(&draws, &known));
        draws.destroy();
        let disks = if seed % 4 < 2 { &copy.disks[..1] } else { &copy.disks[..] };
        for disk in disks {
            for block in disk.used_blocks() {
                let bytes = disk.peek(block);
                let other = match seed % 3 {
                    0 => Root::decode(&bytes).ok().map(|mut root| {
                        change_root(&mut root, field, number);
                        root.encode()
                    }),
                    1 => TablePage::decode(&bytes).ok().map(|mut page| {
                        change_page(&mut page, field, at, number);
                        page.encode()
                    }),
                    _ => IndexPage::decode(&bytes).ok().map(|mut page| {
                        change_index(&mut page, field, at, number);
                        page.encode()
                    }),
                };
                if let Some(other) = other {
                    put_page(disk, block, &other);
                    changed[(seed % 3) as usize] += 1;
                }
            }
        }
        use_it(&copy, seed);
        use_it(&copy, seed + 1);
        assert_eq!(readable(&copy), copy.disks.len(), "seed {seed}");
    }
    assert!(changed.iter().all(|count| *count > 0), "{changed:?}");
}

/// A log entry of a kind that this release does not know is not the end of the log.
#[test]
fn a_record_of_a_later_release_is_refused_by_name() {
    let (site, first, segment_blocks) = site_with_log();
    let mut changed = 0;
    for disk in &site.disks {
        let found = records(disk, first, segment_blocks);
        let Some(last) = found.into_iter().max_by_key(|record| record.head.seq) else { continue };
        let mut bytes = last.head.encode(&last.payload).0.to_vec();
        bytes[64] = 8;
        let entry_bytes = u32::from_le_bytes(bytes[60..64].try_into().unwrap()) as usize;
        let crc = penstock_base::crc32c(&bytes[8..64 + entry_bytes]);
        bytes[4..8].copy_from_slice(&crc.to_le_bytes());
        (last.block..)
            .zip(bytes.chunks_exact(BLOCK_BYTES))
            .for_each(|(block, bytes)| disk.corrupt(block, bytes));
        changed += 1;
    }
    assert!(changed > 1, "the record has copies");
    let world = World::new(3);
    let opened = world.run(async { site.open(&world, &[]).await.map(drop) });
    world.destroy();
    let error = opened.unwrap().unwrap_err().to_string();
    assert!(error.contains("entry kind is 8"), "{error}");
}

/// Regression: the next change of the array wrote a number that cannot be read to every drive.
#[test]
fn one_label_does_not_make_the_others_unreadable() {
    let changes: [fn(&mut Descriptor, u64); 4] = [
        |descriptor, number| descriptor.revision = number,
        |descriptor, number| descriptor.epoch.0 = number,
        |descriptor, number| descriptor.root_epoch.0 = number,
        |descriptor, number| descriptor.members[1].generation = number,
    ];
    let (site, _, _) = site_with_log();
    for change in changes {
        for number in [1 << 62, (1 << 62) + 1, (1 << 63) - 1] {
            let copy = duplicate(&site, None);
            change_descriptor(&copy.disks[0], |descriptor| change(descriptor, number));
            let before = readable(&copy);
            assert!(before >= copy.disks.len() - 1);
            for seed in 2..4 {
                use_it(&copy, seed);
                assert!(readable(&copy) >= before, "{number:x}");
            }
        }
    }
}

/// Regression: a record of a scrub that counts every stripe that can be stopped the process.
#[test]
fn a_scrub_goes_on_from_any_record() {
    let (site, _, _) = site_with_log();
    let world = World::new(1);
    let done = world.run(async {
        let machine = site.open(&world, &[]).await.unwrap();
        machine.array.destage_and_checkpoint().await.unwrap();
        let report = ScrubReport { stripes: u64::MAX, ..ScrubReport::default() };
        let progress = RefCell::new(ScrubProgress { report, ..ScrubProgress::default() });
        machine.array.scrub_from(&progress, Pace::Full).await.unwrap();
        machine.array.stop();
    });
    world.destroy();
    done.unwrap();
}

/// Regression: the root of one drive with a number near the end of what can be read brought that number to
/// all carriers, and then no opening could read a root.
#[test]
fn one_root_does_not_make_the_others_unreadable() {
    let (site, _, _) = site_with_log();
    for field in 0..9 {
        for number in [u64::MAX, 1 << 63, 1 << 62] {
            let copy = duplicate(&site, None);
            let disk = &copy.disks[0];
            for (block, mut root) in roots(disk) {
                change_root(&mut root, field, number);
                disk.corrupt(block, &root.encode());
            }
            let life = |seed: u64, tag: u64, lost: &[usize]| {
                let world = World::new(seed);
                let known = world.run(async {
                    let machine = copy.open(&world, lost).await?;
                    let before = crate::bench::tags(&machine.volume, 3, 1).await?;
                    // Both may fail, as long as nothing is lost.
                    let written =
                        write(&machine, 3, tag).await.is_ok() && machine.volume.flush().await.is_ok();
                    let _ = machine.array.destage_and_checkpoint().await;
                    let _ = machine.array.close().await;
                    machine.array.stop();
                    Ok::<_, ArrayError>(if written { vec![tag] } else { before })
                });
                world.destroy();
                known.unwrap()
            };
            let first = life(2, 7001, &[]);
            let second = life(3, 7002, &[]);
            let third = life(4, 7003, &[0]);
            assert!(
                third.is_ok(),
                "field {field}, {number:x}: {first:?}, {second:?}, without disk 0: {third:?}"
            );
        }
    }
}

/// One life: opens without `lost`, reads block 3, writes and flushes once for each item of `rounds`, with a
/// checkpoint after it where the item says so, and ends by a power cut. Returns what was read.
fn cut_life(
    site: &Site,
    seed: u64,
    tag: u64,
    lost: &[usize],
    rounds: &[bool],
) -> Result<Vec<u64>, ArrayError> {
    let world = World::new(seed);
    let known = world.run(async {
        let machine = site.open(&world, lost).await?;
        let before = crate::bench::tags(&machine.volume, 3, 1).await?;
        for (round, checkpoint) in rounds.iter().enumerate() {
            let tags: Vec<u64> = (0..8).map(|at| tag * 1000 + round as u64 * 10 + at).collect();
            let (data, crcs) = buf_of(&tags);
            machine.volume.write(0, &data, &crcs).await?;
            machine.volume.flush().await?;
            if *checkpoint {
                machine.array.destage_and_checkpoint().await?;
            }
        }
        machine.array.stop();
        Ok::<_, ArrayError>(before)
    });
    site.cut(&world);
    known.unwrap()
}

/// Three lives after disk 0 was changed; the second and the third are without it.
fn lives_after(site: &Site, rounds: &[bool]) -> [Result<Vec<u64>, ArrayError>; 3] {
    [cut_life(site, 2, 71, &[], rounds), cut_life(site, 3, 72, &[0], &[]), cut_life(site, 4, 73, &[0], &[])]
}

/// Changes the last record of disk 0 that has an entry for which `is_it` holds.
fn change_last(site: &(Site, u64, usize), copy: &Site, is_it: fn(&Entry) -> bool, edit: impl Fn(&mut Entry)) {
    let mut found = records(&copy.disks[0], site.1, site.2);
    found.sort_by_key(|record| record.head.seq);
    let nth = found.iter().rposition(|record| record.head.entries.iter().any(is_it)).unwrap();
    assert!(reseal(&copy.disks[0], (site.1, site.2), nth, |head| {
        head.entries.iter_mut().filter(|entry| is_it(entry)).for_each(&edit);
    }));
}

/// Regression: the descriptor on one drive with a revision or epoch just below 2^62 was copied to all drives
/// and to coordination, and then no start succeeded any more, with or without that drive.
#[test]
fn one_label_near_the_limit_does_not_end_the_array() {
    let site = site_with_log();
    for (is_epoch, below) in [(false, 4), (false, 1), (true, 2), (true, 1)] {
        let copy = duplicate(&site.0, None);
        change_descriptor(&copy.disks[0], |descriptor| match is_epoch {
            true => (descriptor.epoch.0, descriptor.revision) = ((1 << 62) - below, descriptor.revision + 1),
            false => descriptor.revision = (1 << 62) - below,
        });
        for (lost, seed) in [&[][..], &[], &[0], &[0]].into_iter().zip(2..) {
            let life = cut_life(&copy, seed, 70 + seed, lost, &[false, true, false, true]);
            assert!(life.is_ok(), "epoch {is_epoch}, 2^62 - {below}, without {lost:?}: {life:?}");
        }
    }
}

/// Regression: a root above 2^61 counted as damaged. A number of one drive just below that grew above it, and
/// then no start succeeded any more.
#[test]
fn an_array_opens_whatever_number_one_root_had() {
    let site = site_with_log();
    for limit in [1 << 61, 1 << 62] {
        for (field, below, rounds) in [
            (0, 1, &[][..]),
            (0, 1, &[false]),
            (0, 2, &[]),
            (7, 1, &[false, true]),
            (7, 1, &[true]),
            (100, 1, &[]),
            (100, 2, &[false]),
        ] {
            let (copy, number) = (duplicate(&site.0, None), limit - below);
            let disk = &copy.disks[0];
            if field == 100 {
                change_descriptor(disk, |descriptor| {
                    (descriptor.epoch.0, descriptor.revision) = (number, descriptor.revision + 1);
                });
            } else {
                let (block, mut root) = roots(disk).pop().unwrap();
                change_root(&mut root, field, number << 1);
                disk.corrupt(block, &root.encode());
            }
            let lives = lives_after(&copy, rounds);
            let opened = lives.iter().all(Result::is_ok);
            assert!(opened, "field {field}, {limit} - {below}, {rounds:?}: {lives:?}");
        }
    }
}

/// Regression: the order of one record on one carrier lay just below 2^62. Every later write got an order
/// above it, which no opening decodes: the log ended before writes that were flushed, without an error.
#[test]
fn flushed_writes_stay_whatever_order_one_record_names() {
    let site = site_with_log();
    for below in [8, 12, 16] {
        let copy = duplicate(&site.0, None);
        change_last(
            &site,
            &copy,
            |entry| matches!(entry, Entry::Data { .. }),
            |entry| {
                if let Entry::Data { order, .. } = entry {
                    *order = (1 << 62) - below;
                }
            },
        );
        let mut rounds = vec![false, true, false, true];
        rounds.extend([false; 14]);
        cut_life(&copy, 2, 71, &[], &rounds).expect("all writes were flushed");
        let wanted = 71_003 + (rounds.len() as u64 - 1) * 10;
        assert_eq!(cut_life(&copy, 3, 72, &[0], &[]).unwrap(), [wanted], "2^62 - {below}");
    }
}

/// The orders of all carriers lie near the end of what can be read. The log stops before it writes a record
/// that no opening could read: what was acknowledged is there at the next opening.
#[test]
fn a_log_whose_numbers_end_keeps_what_it_acknowledged() {
    let site = site_with_log();
    for below in [2, 30, 100] {
        let copy = duplicate(&site.0, None);
        for disk in &copy.disks {
            for (block, mut root) in roots(disk) {
                root.order = (1 << 62) - below;
                disk.corrupt(block, &root.encode());
            }
        }
        let world = World::new(2);
        let kept = world.run(async {
            let machine = copy.open(&world, &[]).await?;
            let mut kept = crate::bench::tags(&machine.volume, 3, 1).await?;
            for round in 0..200 {
                let (data, crcs) = buf_of(&[7000 + round; 8]);
                let written = machine.volume.write(0, &data, &crcs).await;
                if written.is_err() || machine.volume.flush().await.is_err() {
                    return Ok::<_, ArrayError>(kept);
                }
                kept = vec![7000 + round];
            }
            panic!("2^62 - {below}: the log went on, up to {kept:?}");
        });
        copy.cut(&world);
        let kept = kept.unwrap().unwrap();
        assert_eq!(cut_life(&copy, 3, 72, &[], &[]).unwrap(), kept, "2^62 - {below}");
    }
}

/// The newest root of one carrier is a little wrong. Two other carriers have the right one, so the array
/// opens and nothing is lost.
#[test]
fn a_root_that_other_carriers_contradict_is_outvoted() {
    let site = site_with_log();
    let good = reads_after(&duplicate(&site.0, None))[0].clone().unwrap();
    for field in [1, 2, 3, 4, 5, 6, 7, 9, 10] {
        for disk in 0..3 {
            let copy = duplicate(&site.0, None);
            let disk = &copy.disks[disk];
            let (block, mut root) = roots(disk).pop().unwrap();
            let before = root.clone();
            change_root(&mut root, field, 2 * before.durable.0 + 7);
            assert_ne!(root, before);
            disk.corrupt(block, &root.encode());
            let lives = reads_after(&copy);
            let right = lives.iter().all(|life| life.as_ref().is_ok_and(|read| *read == good));
            assert!(right, "field {field}: {lives:?}");
        }
    }
}

/// Each kind of record of one carrier with a number near the limits; the array opens, with and without it.
#[test]
fn one_record_does_not_end_the_array() {
    let site = site_with_log();
    type Is = fn(&Entry) -> bool;
    let kinds: [(&str, Is); 4] = [
        ("data", |entry| matches!(entry, Entry::Data { .. })),
        ("versions", |entry| matches!(entry, Entry::Versions { .. })),
        ("fresh", |entry| matches!(entry, Entry::Fresh { .. })),
        ("discard", |entry| matches!(entry, Entry::Discard { .. })),
    ];
    for (name, is_it) in kinds {
        for number in [1 << 62, (1 << 62) - 1, 1 << 61, (1 << 61) - 2] {
            for rounds in [&[false][..], &[false, false, false, true, false, false]] {
                let copy = duplicate(&site.0, None);
                change_last(&site, &copy, is_it, |entry| match entry {
                    Entry::Data { order, .. } => *order = number,
                    Entry::Versions { reserved } => reserved.0 = number,
                    Entry::Fresh { upto, .. } | Entry::Discard { upto, .. } => *upto = number,
                    _ => {}
                });
                let lives = lives_after(&copy, rounds);
                assert!(lives[1..].iter().all(Result::is_ok), "{name} {number:x} {rounds:?}: {lives:?}");
            }
        }
    }
}

/// Regression: an update of a superblock with the highest sequence number that can be read wrote both copies
/// so that neither could be read, and succeeded.
#[test]
fn an_update_of_a_superblock_leaves_it_readable() {
    let (site, _, _) = site_with_log();
    let disk = &site.disks[0];
    let world = World::new(1);
    let done = world.run(async {
        let drive = SimDrive::new(&world, disk.clone());
        let found = superblock::read(&*drive).await.unwrap();
        let last = Superblock { seq: (1 << 63) - 1, ..found };
        for place in copies::places(DISK_BYTES) {
            drive.write(place, last.encode(), Io::new(Class::Meta, "hostile")).await.unwrap();
        }
        let handle = DriveHandle::online(world.env(), "d".into(), drive, last.clone());
        handle.put_slices(&last.slices).await.unwrap_err();
    });
    world.destroy();
    done.unwrap();
    assert_eq!(readable(&site), site.disks.len());
    cut_life(&site, 2, 71, &[], &[]).unwrap();
    assert_eq!(readable(&site), site.disks.len());
}

/// Reads blocks that only the log has in three lives: with the changed disk, again, and without it.
fn reads_after(copy: &Site) -> [Result<Vec<u64>, String>; 3] {
    let life = |seed: u64, lost: &[usize]| {
        let world = World::new(seed);
        let known = world.run(async {
            let machine = copy.open(&world, lost).await?;
            let mut read = Vec::new();
            for block in [1, 211, machine.volume.stripe_blocks() - 1, machine.volume.stripe_blocks() * 8] {
                read.extend(crate::bench::tags(&machine.volume, block, 1).await?);
            }
            write(&machine, 400, seed).await?;
            machine.volume.flush().await?;
            machine.array.stop();
            Ok::<_, ArrayError>(read)
        });
        copy.cut(&world);
        known.unwrap().map_err(|error| error.to_string())
    };
    [life(2, &[]), life(3, &[]), life(4, &[0])]
}

/// One carrier's root says that the log starts behind its end, by a number that is near. The opening must not
/// take the log for empty: two other carriers have the right root, and all of these writes were flushed.
#[test]
fn one_root_that_starts_the_log_behind_its_end_loses_no_flushed_write() {
    let site = site_with_log();
    let good = reads_after(&duplicate(&site.0, None))[0].clone().unwrap();
    for (newer, ahead) in [(0, 1000), (2, 1000), (0, 1 << 40)] {
        let copy = duplicate(&site.0, None);
        let disk = &copy.disks[0];
        let (block, mut root) = roots(disk).pop().unwrap();
        root.seq += newer;
        root.replay_seq.0 += ahead;
        disk.corrupt(block, &root.encode());
        let lives = reads_after(&copy);
        let is_right = |life: &Result<Vec<u64>, String>| life.as_ref().is_ok_and(|read| *read == good);
        let kept = lives[..2].iter().all(|life| life.is_err() || is_right(life)) && is_right(&lives[2]);
        assert!(kept, "seq + {newer}, replay_seq + {ahead}: {lives:?}");
    }
}

/// A record of one carrier says that later records were durable when it was written, which none can say. Two
/// other carriers have the right one.
#[test]
fn one_record_that_says_what_none_can_does_not_keep_the_array_from_opening() {
    let site = site_with_log();
    let good = reads_after(&duplicate(&site.0, None))[0].clone().unwrap();
    for (back, ahead) in [(0, 1), (0, 1 << 61), (1, 1000)] {
        let copy = duplicate(&site.0, None);
        let nth = records(&copy.disks[0], site.1, site.2).len() - 1 - back;
        assert!(reseal(&copy.disks[0], (site.1, site.2), nth, |head| head.durable.0 = head.seq.0 + ahead));
        let lives = reads_after(&copy);
        let right = lives.iter().all(|life| life.as_ref().is_ok_and(|read| *read == good));
        assert!(right, "{back} from the end, {ahead} ahead: {lives:?}");
    }
}

/// The root of disk 0 is far ahead of all others, and would be ignored. But a carrier is lost, and the new
/// one is copied from disk 0: it gets the same root, and now the two vouch for each other.
#[test]
fn a_far_root_is_not_believed_because_it_was_copied_to_a_new_carrier() {
    let site = site_with_log();
    for (is_other_place, field, below) in
        [(true, 7, 9), (true, 7, 1), (true, 0, 2), (true, 6, 9), (false, 7, 9), (false, 7, 1)]
    {
        let copy = duplicate(&site.0, None);
        let world = World::new(2);
        let known = world.run(async {
            let machine = copy.open(&world, &[]).await?;
            let before = crate::bench::tags(&machine.volume, 3, 1).await?;
            // The drive of position 0 goes bad.
            let disk = &copy.disks[0];
            let mut roots = roots(disk);
            let (mut block, mut root) = roots.pop().unwrap();
            if is_other_place {
                block = roots.pop().unwrap().0;
                root.seq += 1;
            }
            change_root(&mut root, field, ((1 << 62) - below) << 1);
            disk.corrupt(block, &root.encode());
            machine.array.fail_member(MemberNo::new(2), "a test").await?;
            while machine.array.report().members.iter().filter(|member| member.carrier).count() < 3
                || machine.array.report().members[2].carrier
            {
                machine.env.sleep(std::time::Duration::from_millis(1)).await;
            }
            machine.array.stop();
            Ok::<_, ArrayError>(before)
        });
        copy.cut(&world);
        let before = known.unwrap().unwrap();
        let mut rounds = vec![false, true, false, true];
        rounds.extend([false; 14]);
        let wanted = 71_003 + (rounds.len() as u64 - 1) * 10;
        let second = cut_life(&copy, 3, 71, &[], &rounds);
        let third = cut_life(&copy, 4, 72, &[0], &[]);
        let fourth = cut_life(&copy, 5, 73, &[0], &[]);
        let right = if second.is_ok() { vec![wanted] } else { before };
        let is_right = third.as_ref().ok() == Some(&right) && fourth.is_ok();
        assert!(
            is_right,
            "other place {is_other_place}, field {field}, 2^62 - {below}: {second:?}, {third:?}, {fourth:?}"
        );
    }
}
