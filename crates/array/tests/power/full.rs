//! Hosts that are full for some strips: the operations that wait, those that go on, and the state of the
//! drives.

use crate::bench::{
    DISK_BYTES, Machine, NOISE, SLICE_AT, Site, buf_of, metadata_of, spec, tags, write, write_fresh,
};
use crate::outdated::life;
use penstock_array::MemberNo;
use penstock_array::place::SegmentNo;
use penstock_array::{ArrayError, ArrayEvent, ArrayState, CreateSpec, Discard};
use penstock_base::{BLOCK_BYTES, env::timeout};
use penstock_drive::{Fault, Op};
use penstock_sim::SimDisk;
use std::time::Duration;

async fn write_stripe(machine: &Machine, stripe: u64, tag: u64) -> Result<(), ArrayError> {
    let per = machine.volume.stripe_blocks();
    let (data, crcs) = buf_of(&(tag..tag + per).collect::<Vec<_>>());
    machine.volume.write(stripe * per, &data, &crcs).await
}

pub async fn write_new(machine: &Machine, stripes: std::ops::Range<u64>) -> Result<(), ArrayError> {
    for stripe in stripes {
        write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
    }
    machine.volume.flush().await
}

/// A batch of a rebuild is abandoned while the record of one of its strips is in flight, and the strip is
/// then written again with another version. Regression: the record marked the first version as valid, so the
/// array reported full redundancy and lost data with m drives.
#[test]
fn a_rebuilt_strip_is_recorded_as_it_is_on_the_drive() {
    for slow in [Duration::ZERO, Duration::from_millis(1500)] {
        let mut site = Site::new(spec(4, 2));
        let first = async |machine: &Machine| {
            write_new(machine, 0..4).await?;
            machine.array.close().await?;
            Ok(machine.array.geometry())
        };
        let geometry = life(&site, 1, &[], first).unwrap();
        let without = async |machine: &Machine| {
            write_new(machine, 4..8).await?;
            machine.array.close().await
        };
        life(&site, 2, &[5], without).unwrap();
        site.prepare = Box::new(move |number, drive| {
            let log = metadata_of(&geometry);
            for _ in 0..if number < 3 && !slow.is_zero() { 300 } else { 0 } {
                drive.plant_within(Op::Write, 0, Fault::Slow(slow), log.clone());
            }
        });
        // One strip of the batch has space, the next one has none.
        site.disks[5].set_full(true);
        let let_go = async |machine: &Machine| {
            machine.env.sleep(Duration::from_secs(20)).await;
            site.disks[5].allocate(SLICE_AT + geometry.block_at(4, 0)..SLICE_AT + geometry.block_at(5, 0));
            for _ in 0..60_000 {
                machine.env.sleep(Duration::from_millis(1)).await;
                if machine.array.report().members[5].stale_strips == 3 {
                    break;
                }
            }
            machine.array.stop();
            Ok(())
        };
        life(&site, 3, &[], let_go).unwrap();
        site.prepare = Box::new(|_, _| ());
        site.disks[5].set_full(false);
        let whole = async |machine: &Machine| {
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            let report = machine.array.report();
            assert_eq!((report.state, report.missing_carriers), (ArrayState::Ok, 0));
            machine.array.close().await
        };
        life(&site, 4, &[], whole).unwrap();
        let read = async |machine: &Machine| {
            let per = machine.volume.stripe_blocks();
            for stripe in 0..8 {
                assert_eq!(tags(&machine.volume, stripe * per, per).await?[0], 1000 * (stripe + 1));
            }
            Ok(())
        };
        life(&site, 5, &[3, 4], read).unwrap();
    }
}

/// Some stripes have space on the host, others have none. Regression: writes were rejected as if the others
/// were damaged.
#[test]
fn a_host_that_is_full_for_some_stripes_refuses_no_write() {
    let site = Site::new(spec(4, 2));
    life(&site, 13_001, &[], async |machine| {
        write_new(machine, 0..8).await?;
        site.disks[4].set_full(true);
        let work = async {
            for round in 0..400u64 {
                // A stripe with space is written, discarded in the table and written again, as the key-value
                // store does.
                if round % 4 == 0 {
                    machine.volume.discard(round % 8, 1, Discard::InTable).await?;
                    write_stripe(machine, round % 8, 1000 * (round + 100)).await?;
                }
                let per = machine.volume.stripe_blocks();
                let others = machine.volume.blocks() / per - 8;
                let block = (8 + round % others) * per + round / others;
                write(machine, block, round + 1).await?;
                machine.volume.flush().await?;
                machine.env.sleep(Duration::from_millis(300)).await;
            }
            Ok::<_, ArrayError>(())
        };
        if let Some(ended) = timeout(&machine.env, Duration::from_secs(1200), work).await {
            ended?;
        }
        assert_eq!(machine.array.report().suspended.as_deref(), Some("host full"));
        site.disks[4].set_full(false);
        machine.env.sleep(Duration::from_secs(100)).await;
        assert_eq!(machine.array.report().suspended, None);
        machine.array.close().await
    })
    .unwrap();
}

/// Regression: writers that waited for log space and the task that writes checkpoints woke each other without
/// a pause, and wrote gigabytes to each carrier.
#[test]
fn waiting_for_a_full_host_writes_little() {
    let site = Site::new(spec(4, 2));
    life(&site, 13_002, &[], async |machine| {
        site.disks[4].set_full(true);
        let blocks = machine.volume.blocks();
        let write_all = async {
            for block in 0..blocks {
                write(machine, block * 37 % blocks, block + 1).await?;
            }
            machine.volume.flush().await
        };
        let later = async {
            let written = || machine.handles.iter().flatten().map(|drive| drive.counters().write_bytes).max();
            machine.env.sleep(Duration::from_secs(60)).await;
            let before = written();
            machine.env.sleep(Duration::from_secs(60)).await;
            assert!(written() < before.map(|bytes| bytes + (100 << 20)), "{before:?} {:?}", written());
            site.disks[4].set_full(false);
        };
        let (written, ()) = futures_util::future::join(write_all, later).await;
        written?;
        machine.array.close().await
    })
    .unwrap();
}

/// Two members are rebuilt, and the host of one is full. Regression: the other one waited for it.
#[test]
fn a_full_host_keeps_no_other_member_from_being_rebuilt() {
    for full in [1usize, 3] {
        let site = Site::new(spec(4, 2));
        life(&site, 1, &[], async |machine| write_new(machine, 0..4).await).unwrap();
        let without = async |machine: &Machine| {
            write_new(machine, 4..12).await?;
            machine.array.close().await
        };
        life(&site, 2, &[1, 3], without).unwrap();
        site.disks[full].set_full(true);
        let rebuild = async |machine: &Machine| {
            machine.env.sleep(Duration::from_secs(600)).await;
            let lacking = stale_strips(machine);
            assert!(lacking[full] > 0 && lacking[4 - full] == 0, "{lacking:?}");
            site.disks[full].set_full(false);
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            Ok(())
        };
        life(&site, 3, &[], rebuild).unwrap();
    }
}

/// Regression: a strip that could not be repaired on a full host kept strips of other drives from being
/// repaired, and a scrub from being stopped.
#[test]
fn a_full_host_keeps_no_other_strip_from_being_repaired() {
    let site = Site::new(spec(4, 2));
    let first = async |machine: &Machine| {
        write_new(machine, 0..8).await?;
        machine.array.close().await
    };
    life(&site, 1, &[], first).unwrap();
    life(&site, 2, &[], async |machine| {
        for (stripe, position) in [(0, 3), (5, 2)] {
            let block = (SLICE_AT + machine.array.geometry().block_at(stripe, 0)) / BLOCK_BYTES as u64;
            site.disks[position].corrupt(block, &[0x5a; BLOCK_BYTES]);
        }
        // As on a host that copies on every write: no write finds space.
        machine.drives[3].as_ref().unwrap().set_full(true);
        tags(&machine.volume, 0, 8 * machine.volume.stripe_blocks()).await?;
        machine.env.sleep(Duration::from_secs(60)).await;
        let repaired = |at: usize| machine.handles[at].as_ref().unwrap().counters().repaired_blocks;
        assert_eq!((repaired(3), repaired(2)), (0, 1));
        let stop = async {
            machine.env.sleep(Duration::from_secs(5)).await;
            machine.array.stop_scrub();
        };
        let progress = Default::default();
        let scrub = machine.array.scrub_from(&progress, penstock_array::Pace::Full);
        let both = futures_util::future::join(scrub, stop);
        let (scrubbed, ()) =
            timeout(&machine.env, Duration::from_secs(60), both).await.expect("it is stopped");
        assert_eq!(scrubbed?, None);
        machine.drives[3].as_ref().unwrap().set_full(false);
        machine.env.sleep(Duration::from_secs(30)).await;
        assert_eq!((repaired(3), repaired(2)), (1, 1));
        Ok(())
    })
    .unwrap();
}

/// Writes until there is no space, each block to another stripe, or runs of `blocks` blocks. Returns the
/// first block of each write.
async fn fill(machine: &Machine, blocks: u64) -> Result<Vec<u64>, ArrayError> {
    let all = machine.volume.blocks();
    let place = |at: u64| if blocks == 1 { at * 37 % all } else { at * blocks };
    let mut written = Vec::new();
    let write_all = async {
        for at in (0..all / blocks).map(place) {
            let (data, crcs) = buf_of(&(at + 1..at + 1 + blocks).collect::<Vec<_>>());
            machine.volume.write(at, &data, &crcs).await?;
            machine.volume.flush().await?;
            written.push(at);
        }
        Ok::<_, ArrayError>(())
    };
    if let Some(ended) = timeout(&machine.env, Duration::from_secs(30), write_all).await {
        ended?;
    }
    Ok(written)
}

/// Regression: each stop began a segment of the log that was never freed, until a stop, or each later start,
/// waited for log space for ever.
#[test]
fn stops_on_a_full_host_do_not_fill_the_log() {
    for (k, m, full, blocks) in [(4, 2, 4, 1), (3, 0, 2, 1), (8, 1, 7, 16)] {
        let site = Site::new(spec(k, m));
        site.disks[full].set_full(true);
        let filled = life(&site, 1, &[], async |machine| {
            let written = fill(machine, blocks).await?;
            machine.array.close().await?;
            Ok(written)
        });
        let written = filled.unwrap();
        for stop in 0..50 {
            life(&site, 100 + stop, &[], async |machine| {
                let used = machine.array.report().log_used_percent;
                assert!(used <= 75, "{k}+{m}: {used} % after {stop} stops");
                let closed = timeout(&machine.env, Duration::from_secs(600), machine.array.close()).await;
                closed.unwrap_or_else(|| panic!("{k}+{m}: stop {stop} does not end"))
            })
            .unwrap();
        }
        life(&site, 200, &[], async |machine| {
            machine.env.sleep(Duration::from_secs(60)).await;
            site.disks[full].set_full(false);
            machine.env.sleep(Duration::from_secs(100)).await;
            for at in &written {
                assert_eq!(tags(&machine.volume, *at, 1).await?, [at + 1]);
            }
            write(machine, 5, 6).await?;
            machine.volume.flush().await?;
            machine.array.close().await
        })
        .unwrap();
    }
}

pub fn stale_strips(machine: &Machine) -> Vec<u64> {
    machine.array.report().members.iter().map(|member| member.stale_strips).collect()
}

/// Regression: data for which another member's host had no space filled the log, and the rebuild waited for
/// log space.
#[test]
fn a_rebuild_waits_for_no_other_members_host() {
    let site = Site::new(spec(4, 2));
    let first = async |machine: &Machine| {
        write_new(machine, 0..4).await?;
        machine.array.close().await
    };
    life(&site, 1, &[], first).unwrap();
    let without = async |machine: &Machine| {
        write_new(machine, 4..8).await?;
        machine.array.close().await
    };
    life(&site, 2, &[5], without).unwrap();
    site.disks[4].set_full(true);
    life(&site, 3, &[5], async |machine| fill(machine, 1).await.map(drop)).unwrap();
    let rebuild = async |machine: &Machine| {
        machine.env.sleep(Duration::from_secs(1200)).await;
        assert_eq!(stale_strips(machine)[5], 0);
        Ok(())
    };
    life(&site, 4, &[], rebuild).unwrap();
}

/// The host of a member has no space for new stripes. Regression: they kept stripes behind them, which have
/// their space, from being rebuilt.
#[test]
fn a_rebuild_passes_over_what_its_host_has_no_room_for() {
    let site = Site::new(CreateSpec { strip_blocks: 4, ..spec(4, 2) });
    let (new, old) = (0..20u64, 20..28u64);
    let first = async |machine: &Machine| {
        write_new(machine, old.clone()).await?;
        machine.array.close().await
    };
    life(&site, 1, &[], first).unwrap();
    let without = async |machine: &Machine| {
        write_new(machine, new.clone()).await?;
        for stripe in old.clone() {
            write(machine, stripe * machine.volume.stripe_blocks(), stripe).await?;
        }
        machine.volume.flush().await?;
        machine.array.close().await
    };
    life(&site, 2, &[5], without).unwrap();
    site.disks[5].set_full(true);
    let rebuild = async |machine: &Machine| {
        machine.env.sleep(Duration::from_secs(1)).await;
        let begun = machine.array.take_events().into_iter().find_map(|event| match event {
            ArrayEvent::RebuildBegun { member, stripes, .. } => Some((member, stripes)),
            _ => None,
        });
        // In five of the old stripes its strip is one that was not written.
        assert_eq!(begun, Some((MemberNo::new(5), 23)));
        machine.env.sleep(Duration::from_secs(1200)).await;
        assert_eq!(stale_strips(machine)[5], 20);
        site.disks[5].set_full(false);
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        Ok(())
    };
    life(&site, 3, &[], rebuild).unwrap();
}

/// A scrub finds a copy of the log bad while its carrier takes no writes for a moment. Regression: the copy
/// was never repaired.
#[test]
fn what_a_scrub_could_not_mend_is_mended_later() {
    let site = Site::new(spec(4, 2));
    life(&site, 1, &[], async |machine| {
        for block in 0..8 {
            write(machine, block, block + 1).await?;
        }
        machine.volume.flush().await?;
        let at = SLICE_AT + machine.array.geometry().segment_at(SegmentNo(1));
        site.disks[1].corrupt(at / BLOCK_BYTES as u64 + 2, &NOISE);
        let drive = machine.drives[1].as_ref().unwrap();
        drive.set_full(true);
        machine.array.scrub().await?;
        drive.set_full(false);
        let waited = timeout(&machine.env, Duration::from_secs(600), machine.array.wait_rebuilt()).await;
        let report = machine.array.report();
        assert!(waited.is_some(), "{:?}, {} carriers are missing", report.state, report.missing_carriers);
        Ok(())
    })
    .unwrap();
}

/// A stripe waits for a full host. Meanwhile a member that lacks its strip is replaced, and counts: the
/// stripe is written on it as well.
#[test]
fn a_strip_that_is_missed_while_its_member_is_made_whole_is_made_too() {
    let site = Site::new(spec(4, 2));
    let work = async |machine: &Machine| {
        write_fresh(machine, 1, 300).await?;
        machine.volume.flush().await?;
        machine.array.fail_member(MemberNo::new(5), "it is gone").await?;
        let host = machine.drives[4].as_ref().unwrap();
        host.set_full(true);
        let replace = async {
            machine.env.sleep(Duration::from_secs(2)).await;
            machine.replace(&SimDisk::new(DISK_BYTES), 5, 9).await?;
            machine.env.sleep(Duration::from_secs(20)).await;
            let report = machine.array.report();
            assert_eq!((report.members[5].state, report.members[5].stale_strips), ("active", 0));
            host.set_full(false);
            Ok::<_, ArrayError>(())
        };
        let (written, replaced) = futures_util::future::join(write_fresh(machine, 0, 500), replace).await;
        written.and(replaced)?;
        machine.volume.flush().await?;
        machine.env.sleep(Duration::from_secs(3000)).await;
        let report = machine.array.report();
        assert_eq!((report.members[5].stale_strips, report.state), (0, ArrayState::Ok));
        assert_eq!(report.members[5].state, "active");
        Ok(())
    };
    life(&site, 1, &[], work).unwrap();
}
