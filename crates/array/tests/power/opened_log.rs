//! Openings that do not see a record behind the end of the log.
//!
//! One carrier alone has the record, and an opening goes on without it. The next record does not fit behind
//! the end, so that it goes into another segment and the first one stays where it is.

use crate::bench::{Machine, SLICE_AT, Site, buf_of, spec, tags, write};
use penstock_array::ArrayError;
use penstock_array::format::record::RecordHead;
use penstock_array::place::SegmentNo;
use penstock_base::BLOCK_BYTES;
use penstock_sim::{CutMode, SimDisk, World};
use std::time::Duration;

const BLOCK: u64 = BLOCK_BYTES as u64;
/// Blocks of a log segment.
const SEGMENT: u64 = (128 << 10) / BLOCK;
/// Writes that are flushed before the record that is not seen.
const WRITES: u64 = 12;
/// Blocks of a write that does not fit behind them.
const LONG: u64 = 10;
/// The first block of the long writes.
const FIRST: u64 = 20;
/// All blocks that are looked at, from the first on.
const BLOCKS: u64 = 60;

/// The reason why something is not seen in one life.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Hidden {
    /// Its place on the first disk cannot be read.
    Place,
    /// The first disk is away.
    Drive,
}

/// A life without the disks in `lost`. Then the power is cut, and only the disks that `keeps` names keep what
/// was not flushed.
fn life<T>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    keeps: impl Fn(usize) -> bool,
    work: impl AsyncFnOnce(&Machine) -> Result<T, ArrayError>,
) -> T {
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.open(&world, lost).await?;
        let done = work(&machine).await?;
        machine.array.stop();
        Ok::<_, ArrayError>(done)
    });
    world.destroy();
    for (number, disk) in site.disks.iter().enumerate() {
        disk.cut(&world, if keeps(number) { CutMode::Everything } else { CutMode::Nothing });
    }
    run.unwrap().unwrap_or_else(|error| panic!("life {seed}: {error}"))
}

fn is_first(number: usize) -> bool {
    number == 0
}

/// Lets the log be written.
async fn rest(machine: &Machine) {
    machine.env.sleep(Duration::from_millis(100)).await;
}

/// Fills most of the first segment. Returns the first block of the second one on a disk.
async fn fill_segment(machine: &Machine) -> Result<u64, ArrayError> {
    for tag in 1..=WRITES {
        write(machine, tag, tag).await?;
        machine.volume.flush().await?;
    }
    Ok((SLICE_AT + machine.array.geometry().segment_at(SegmentNo(2))) / BLOCK)
}

fn tag_of(number: u64, block: u64) -> u64 {
    100 * (number + 1) + block
}

async fn long_write(machine: &Machine, number: u64) -> Result<(), ArrayError> {
    let (data, crcs) = buf_of(&(0..LONG).map(|block| tag_of(number, block)).collect::<Vec<_>>());
    machine.volume.write(FIRST + LONG * number, &data, &crcs).await
}

async fn flushed_long_writes(machine: &Machine, count: u64) -> Result<(), ArrayError> {
    for number in 0..count {
        long_write(machine, number).await?;
        machine.volume.flush().await?;
    }
    Ok(())
}

/// The block of the record that the first disk has in the first segment and the second one has not.
fn record_left(site: &Site, second_segment: u64) -> u64 {
    let heads = |disk: &SimDisk| {
        let is_head = |block: &u64| RecordHead::claimed_head_blocks(&disk.peek(*block)).is_some();
        let in_segment = second_segment - SEGMENT..second_segment;
        let blocks = disk.used_blocks().into_iter().filter(|block| in_segment.contains(block));
        blocks.filter(is_head).collect::<Vec<u64>>()
    };
    let others = heads(&site.disks[1]);
    let left: Vec<u64> = heads(&site.disks[0]).into_iter().filter(|block| !others.contains(block)).collect();
    let [block] = left[..] else { panic!("the first disk has one record more: {left:?}") };
    assert!(block + 2 + LONG > second_segment, "no long write fits in its place");
    block
}

/// Makes a block of the first disk unreadable from the next life on.
fn hide(site: &mut Site, block: u64) {
    site.prepare = Box::new(move |number, drive| {
        if number == 0 {
            drive.set_unreadable(block * BLOCK..(block + 1) * BLOCK);
        }
    });
}

/// Waits until every drive is up to date and carries the log if it has to.
async fn until_whole(machine: &Machine) {
    while machine.array.report().members.iter().any(|member| member.state != "active")
        || machine.array.missing_carriers() > 0
    {
        machine.env.sleep(Duration::from_millis(10)).await;
    }
}

/// Opens the array three times without a fault. It has so many long writes.
fn check(site: &mut Site, long_writes: u64, what: &str) {
    site.prepare = Box::new(|_, _| ());
    let flushed = |block: u64| match block {
        1..=WRITES => block,
        FIRST.. if block < FIRST + LONG * long_writes => {
            tag_of((block - FIRST) / LONG, (block - FIRST) % LONG)
        }
        _ => 0,
    };
    let wanted: Vec<u64> = (1..=BLOCKS).map(flushed).collect();
    for seed in 30..33 {
        let look = async |machine: &Machine| {
            let found = tags(&machine.volume, 1, BLOCKS).await?;
            // The log is not destaged before that.
            until_whole(machine).await;
            Ok(found)
        };
        assert_eq!(life(site, seed, &[], |_| true, look), wanted, "{what}, life {seed}");
    }
}

/// Calls `test` with each of the codes and one to three long writes.
fn for_codes(codes: [(usize, usize); 2], test: impl Fn((usize, usize), u64)) {
    for code in codes {
        (1..=3).for_each(|records| test(code, records));
    }
}

fn open_without((k, m): (usize, usize), hidden: Hidden, records: u64) {
    let mut site = Site::new(spec(k, m));
    let second = life(&site, 10, &[], is_first, async |machine| {
        let second = fill_segment(machine).await?;
        write(machine, WRITES + 1, WRITES + 1).await?;
        rest(machine).await;
        Ok(second)
    });
    let record = record_left(&site, second);
    let lost: &[usize] = match hidden {
        Hidden::Drive => &[0],
        Hidden::Place => {
            hide(&mut site, record);
            &[]
        }
    };
    life(&site, 11, lost, |_| true, async |machine| flushed_long_writes(machine, records).await);
    check(&mut site, records, &format!("{k}+{m}, {hidden:?}, {records} records"));
}

/// Regression: two openings later the record joined the log in the place of a flushed one.
#[test]
fn a_record_that_could_not_be_read_once_does_not_come_back() {
    for_codes([(1, 1), (4, 2)], |code, records| open_without(code, Hidden::Place, records));
}

/// The same, for a drive that was away in one life.
#[test]
fn a_record_on_a_drive_that_was_away_does_not_come_back() {
    for_codes([(1, 1), (1, 2)], |code, records| open_without(code, Hidden::Drive, records));
}

/// First the header of the second segment is not seen, then the record in the first one. The header is older
/// than the record, and an opening puts flushed records behind it.
fn open_behind_an_older_header((k, m): (usize, usize), hidden: Hidden, records: u64) {
    let mut site = Site::new(spec(k, m));
    let second = life(&site, 10, &[], is_first, async |machine| {
        let second = fill_segment(machine).await?;
        long_write(machine, 3).await?;
        rest(machine).await;
        Ok(second)
    });
    let short = async |machine: &Machine| {
        until_whole(machine).await;
        write(machine, WRITES + 1, WRITES + 1).await?;
        rest(machine).await;
        Ok(())
    };
    match hidden {
        Hidden::Place => {
            hide(&mut site, second);
            life(&site, 11, &[], is_first, short);
            let record = record_left(&site, second);
            hide(&mut site, record);
        }
        Hidden::Drive => {
            let whole = async |machine: &Machine| {
                until_whole(machine).await;
                Ok(())
            };
            life(&site, 11, &[0], |_| true, async |_| Ok(()));
            life(&site, 12, &[], is_first, short);
            life(&site, 13, &[0], |_| true, async |_| Ok(()));
            life(&site, 14, &[], |_| true, whole);
        }
    }
    life(&site, 15, &[], |_| true, async |machine| flushed_long_writes(machine, records).await);
    check(&mut site, records, &format!("{k}+{m}, {hidden:?} twice, {records} records"));
}

/// Regression: the header was taken for a proof that the record counts.
#[test]
fn a_record_newer_than_the_header_behind_it_does_not_come_back() {
    for_codes([(1, 1), (4, 2)], |code, records| open_behind_an_older_header(code, Hidden::Place, records));
}

/// The same, for a drive that was away in two lives.
#[test]
fn a_record_on_a_drive_that_was_away_twice_does_not_come_back() {
    for_codes([(1, 1), (1, 2)], |code, records| open_behind_an_older_header(code, Hidden::Drive, records));
}
