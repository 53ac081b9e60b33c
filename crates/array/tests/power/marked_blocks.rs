//! Blocks that are marked as lost: everything else goes on as if they were not there, and they are made as
//! soon as that can be done. Each test is a regression.

use crate::bench::{Machine, NOISE, Site, spec, spread, tags, write};
use crate::lost_blocks::{at, fill};
use crate::lost_pages::lose_page;
use crate::outdated::life;
use crate::paging::write_all;
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, Lacking};
use penstock_base::{BLOCK_BYTES, Stripe};
use std::ops::Range;
use std::time::Duration;

pub async fn rot(machine: &Machine, stripe: u64, position: usize, column: u32) {
    let (member, bytes) = at(machine, stripe, position, column).await;
    machine.disks[member].corrupt(bytes.start / BLOCK_BYTES as u64, &NOISE);
}

/// The member with a strip, and the bytes of its trailer, behind the last column.
pub async fn trailer_at(machine: &Machine, stripe: u64, position: usize) -> (usize, Range<u64>) {
    let (member, last) = at(machine, stripe, position, machine.array.geometry().strip_blocks - 1).await;
    (member, last.end..last.end + BLOCK_BYTES as u64)
}

async fn rot_trailer(machine: &Machine, stripe: u64, position: usize) {
    let (member, bytes) = trailer_at(machine, stripe, position).await;
    machine.disks[member].corrupt(bytes.start / BLOCK_BYTES as u64, &NOISE);
}

/// The first life of a site: stripes are written, `rots` before it is closed. Returns the members of the
/// first one's strips.
pub fn filled(site: &Site, stripes: u64, rots: impl AsyncFn(&Machine)) -> Vec<usize> {
    let first = life(site, 1, &[], async |machine| {
        fill(machine, stripes).await?;
        let on = members_of(machine, 0).await;
        rots(machine).await;
        machine.array.close().await?;
        Ok(on)
    });
    first.unwrap()
}

pub async fn members_of(machine: &Machine, stripe: u64) -> Vec<usize> {
    machine.array.places(Stripe(stripe)).await.unwrap().iter().map(|place| place.member.index()).collect()
}

/// 4+2 with four stripes, the members of the first one's strips, and blank drives for positions 1 and 4.
/// `rots` before they are lost.
pub fn two_replaced(rots: impl AsyncFn(&Machine)) -> (Site, Vec<usize>) {
    let mut site = Site::new(spec(4, 2));
    let on = filled(&site, 4, rots);
    site.replace(on[1]);
    site.replace(on[4]);
    (site, on)
}

/// A spread array on whose first stripe strip 1 lies in a spare place, the members that had its strips, and a
/// blank drive for that one. `rots` before the array is closed.
pub fn one_in_a_spare_place<T>(rots: impl AsyncFnOnce(&Machine) -> T) -> (Site, Vec<usize>, T) {
    let mut site = Site::new(spread(4, 2, 9, 2));
    let (on, rotten) = life(&site, 1, &[], async |machine| {
        fill(machine, 40).await?;
        let on = members_of(machine, 0).await;
        machine.array.fail_member(MemberNo::new(on[1]), "a test").await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        let rotten = rots(machine).await;
        machine.array.close().await?;
        Ok((on, rotten))
    })
    .unwrap();
    site.replace(on[1]);
    (site, on, rotten)
}

/// One block of three strips rots, which nobody can make then.
pub async fn rot_three(machine: &Machine) {
    for position in [0, 1, 2] {
        rot(machine, 0, position, 3).await;
    }
}

/// Strips in spare places.
pub fn moved_strips(machine: &Machine) -> u64 {
    machine.array.report().members.iter().map(|member| member.moved_strips).sum()
}

/// Puts the blank drives of [`two_replaced`] into their places.
pub async fn replace_two(machine: &Machine, site: &Site, on: &[usize]) -> Result<(), ArrayError> {
    machine.replace(&site.disks[on[1]], on[1], 77).await?;
    machine.replace(&site.disks[on[4]], on[4], 78).await
}

/// Rebuilds what [`two_replaced`] lost.
pub async fn rebuild_two(machine: &Machine, site: &Site, on: &[usize]) -> Result<(), ArrayError> {
    replace_two(machine, site, on).await?;
    assert_eq!(machine.array.wait_rebuilt().await, 0);
    Ok(())
}

/// Another block, or a trailer, rots in a stripe with a lost block. No scrub repaired it, and the loss of two
/// drives took it.
#[test]
fn a_lost_block_keeps_no_other_from_being_repaired() {
    for is_trailer in [false, true] {
        let (site, on) = two_replaced(async |machine| rot(machine, 0, 0, 3).await);
        life(&site, 2, &[on[1], on[4]], async |machine| {
            rebuild_two(machine, &site, &on).await?;
            assert_eq!(machine.array.unreadable_stripes(), [0]);
            match is_trailer {
                true => rot_trailer(machine, 0, 2).await,
                false => rot(machine, 0, 2, 5).await,
            }
            // A trailer may be right in a moment.
            for _ in 0..4 {
                machine.array.scrub().await?;
                machine.env.sleep(Duration::from_secs(100)).await;
            }
            assert_eq!(machine.array.scrub().await?.unreadable, [0], "the lost block stays lost");
            machine.array.close().await
        })
        .unwrap();
        life(&site, 3, &[on[0], on[3]], async |machine| {
            for column in [0, 1, 2, 4, 5, 6, 7] {
                let found = tags(&machine.volume, 2 * 8 + column, 1).await;
                assert_eq!(found.expect("a scrub repaired it"), [1000 + 16 + column]);
            }
            machine.array.stop();
            Ok(())
        })
        .unwrap();
    }
}

/// The redo of a record that had been carried out long ago marked strips as stale that absent drives had
/// whole, more than the code can make.
#[test]
fn a_redo_without_drives_gives_up_no_strip_that_they_have() {
    let mut site = Site::new(spread(3, 1, 9, 2));
    let on = life(&site, 1, &[], async |machine| {
        fill(machine, 40).await?;
        write(machine, 5, 4711).await?;
        machine.volume.flush().await?;
        machine.array.destage_and_checkpoint().await?;
        machine.env.sleep(Duration::from_secs(600)).await;
        machine.array.destage_and_checkpoint().await?;
        let on = members_of(machine, 0).await;
        machine.array.stop();
        Ok(on)
    })
    .unwrap();
    site.lacking = Lacking::Accept;
    life(&site, 2, &[on[0], on[1], on[3]], async |machine| {
        machine.env.sleep(Duration::from_secs(60)).await;
        machine.array.close().await
    })
    .unwrap();
    life(&site, 3, &[], async |machine| {
        machine.array.wait_rebuilt().await;
        let others = tags(&machine.volume, 24, 39 * 24).await;
        let found = tags(&machine.volume, 0, 24).await;
        machine.array.stop();
        assert_eq!(others.unwrap().len(), 39 * 24);
        assert_eq!(found.expect("all drives are here, with all strips")[5], 4711);
        Ok(())
    })
    .unwrap();
}

/// A stripe lacks a strip on a blank drive and one on a drive that is away, and has a rotten block. Neither
/// was made, the blank drive never counted, and the next one that failed was kept.
#[test]
fn a_strip_that_is_away_keeps_no_stale_one_from_being_made() {
    let mut site = Site::new(spread(4, 2, 9, 2));
    let on = filled(&site, 40, async |machine| rot(machine, 0, 0, 3).await);
    let (blank, away) = (on[1], on[4]);
    site.replace(blank);
    life(&site, 2, &[blank, away], async |machine| {
        machine.replace(&site.disks[blank], blank, 77).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(600)).await;
        machine.array.wait_rebuilt().await;
        assert_eq!(machine.array.report().members[blank].state, "active");
        let next = machine.array.fail_member(MemberNo::new(on[2]), "a test").await;
        machine.array.stop();
        next
    })
    .unwrap();
}

/// Three blocks of a column are rotten, and the drive with a good one is away for a while. The strip came to
/// a spare place with that block marked as lost, and the drive had it for nothing.
#[test]
fn a_rebuild_gives_up_no_block_of_a_drive_that_is_away() {
    let mut site = Site::new(spread(4, 2, 10, 2));
    let on = filled(&site, 40, async |machine| {
        for position in [0, 1, 2] {
            rot(machine, 0, position, 3).await;
        }
    });
    life(&site, 2, &[on[3]], async |machine| {
        machine.env.sleep(Duration::from_secs(2400)).await;
        machine.array.wait_rebuilt().await;
        machine.array.close().await
    })
    .unwrap();
    life(&site, 3, &[], async |machine| {
        machine.array.wait_rebuilt().await;
        let found = tags(&machine.volume, 3 * 8 + 3, 1).await;
        machine.array.close().await?;
        assert_eq!(found.expect("its drive is back, and has it"), [1027]);
        Ok(())
    })
    .unwrap();
    // Blank drives in the place of two have it no more, and the next one that fails is given up.
    site.replace(on[3]);
    site.replace(on[5]);
    life(&site, 4, &[on[3], on[5]], async |machine| {
        machine.replace(&site.disks[on[3]], on[3], 77).await?;
        machine.replace(&site.disks[on[5]], on[5], 78).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(300)).await;
        let next = machine.array.fail_member(MemberNo::new(on[4]), "a test").await;
        machine.array.stop();
        next
    })
    .unwrap();
}

/// A trailer could not be read for a moment while others were made from its strip: all of the stripe was
/// marked as lost, and another drive was given up before it was tried again.
#[test]
fn a_trailer_that_cannot_be_read_for_a_moment_costs_nothing() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = trailer_at(machine, 0, 0).await;
        let drive = machine.drives[member].as_ref().unwrap();
        drive.set_unreadable(bytes);
        replace_two(machine, &site, &on).await?;
        machine.env.sleep(Duration::from_secs(5)).await;
        drive.set_readable();
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(300)).await;
        machine.array.fail_member(MemberNo::new(on[2]), "a test").await?;
        let found = tags(&machine.volume, 0, 32).await;
        machine.array.stop();
        found.expect("one drive is away, all others are whole");
        Ok(())
    })
    .unwrap();
}

/// Three trailers read wrong for a moment: a scrub wrote marks over all three strips, of which it could make
/// nothing.
#[test]
fn a_scrub_writes_nothing_over_what_it_cannot_make() {
    let site = Site::new(spec(4, 2));
    life(&site, 1, &[], async |machine| {
        fill(machine, 4).await?;
        machine.array.destage_and_checkpoint().await?;
        let mut saved = Vec::new();
        for position in [0, 1, 2] {
            let (member, bytes) = trailer_at(machine, 0, position).await;
            let block = bytes.start / BLOCK_BYTES as u64;
            saved.push((member, block, machine.disks[member].peek(block)));
            machine.disks[member].corrupt(block, &NOISE);
        }
        machine.array.scrub().await?;
        for (member, block, bytes) in saved {
            machine.disks[member].corrupt(block, &bytes);
        }
        machine.array.scrub().await?;
        let found = tags(&machine.volume, 0, 32).await;
        machine.array.stop();
        found.expect("the trailers are right again");
        Ok(())
    })
    .unwrap();
}

/// Stripes of lost pages came first on the list, were passed over, and no other one was ever tried again.
#[test]
fn lost_stripes_keep_no_other_from_being_tried_again() {
    let site = Site::new(spread(3, 1, 9, 2));
    let geo = life(&site, 9800, &[], async |machine| {
        write_all(machine).await?;
        let geo = machine.array.geometry();
        machine.array.close().await?;
        Ok(geo)
    })
    .unwrap();
    let lost = [0, 1];
    lost.iter().for_each(|page| lose_page(&site.disks, &geo, *page));
    life(&site, 9801, &[], async |machine| {
        for page in lost {
            let _ = tags(&machine.volume, page * geo.stripes_per_page() * 24, 1).await;
        }
        let stripe = 2 * geo.stripes_per_page() + 3;
        let mut drives = Vec::new();
        for position in [0, 1] {
            let (member, bytes) = at(machine, stripe, position, 3).await;
            let drive = machine.drives[member].as_ref().unwrap();
            drive.set_unreadable(bytes);
            drives.push(drive);
        }
        assert!(tags(&machine.volume, stripe * 24 + 3, 1).await.is_err());
        machine.env.sleep(Duration::from_secs(30)).await;
        drives.iter().for_each(|drive| drive.set_readable());
        assert!(machine.array.unreadable_stripes().contains(&stripe));
        machine.env.sleep(Duration::from_secs(3000)).await;
        let listed = machine.array.unreadable_stripes();
        machine.array.stop();
        assert!(listed.len() > 64 && !listed.contains(&stripe), "{} are listed", listed.len());
        Ok(())
    })
    .unwrap();
}

/// Two drives are blank, and the trailer of a third strip is rotten: all of the stripe is lost. Neither drive
/// ever counted again.
#[test]
fn one_bad_trailer_keeps_no_member_from_counting() {
    let (site, on) = two_replaced(async |machine| rot_trailer(machine, 0, 0).await);
    life(&site, 2, &[on[1], on[4]], async |machine| {
        replace_two(machine, &site, &on).await?;
        // It may be right in a moment.
        machine.env.sleep(Duration::from_secs(600)).await;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert!(machine.array.report().members.iter().all(|member| member.state == "active"));
        // The rest of it, and the others.
        assert_eq!(tags(&machine.volume, 2 * 8, 16).await?[0], 1016);
        assert_eq!(tags(&machine.volume, 32, 3 * 32).await?[0], 2000);
        assert!(tags(&machine.volume, 0, 1).await.is_err());
        let next = machine.array.fail_member(MemberNo::new(on[2]), "a test").await;
        machine.array.stop();
        next
    })
    .unwrap();
}

/// A block could not be read for a moment while others were made from it. They stayed lost until somebody
/// asked for a scrub.
#[test]
fn a_block_that_could_not_be_read_for_a_moment_is_made_later() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = at(machine, 0, 0, 3).await;
        let drive = machine.drives[member].as_ref().unwrap();
        drive.set_unreadable(bytes);
        rebuild_two(machine, &site, &on).await?;
        assert_eq!(machine.array.unreadable_stripes(), [0]);
        drive.set_readable();
        machine.env.sleep(Duration::from_secs(1200)).await;
        assert_eq!(machine.array.unreadable_stripes(), []);
        machine.array.close().await
    })
    .unwrap();
    life(&site, 3, &[on[0]], async |machine| {
        let found = tags(&machine.volume, 8 + 3, 1).await;
        machine.array.stop();
        assert_eq!(found.expect("five drives are here"), [1011]);
        Ok(())
    })
    .unwrap();
}

/// A trailer of a record from before the repair was written again, with the marks.
#[test]
fn a_redo_does_not_undo_the_repair_of_a_lost_block() {
    for (is_closed, is_whole_strip) in [(true, false), (false, false), (false, true)] {
        let (site, on) = two_replaced(async |_| {});
        life(&site, 2, &[on[1], on[4]], async |machine| {
            let (member, bytes) = at(machine, 0, 0, 3).await;
            let drive = machine.drives[member].as_ref().unwrap();
            drive.set_unreadable(bytes);
            rebuild_two(machine, &site, &on).await?;
            write(machine, 8 + 5, 4711).await?;
            machine.volume.flush().await?;
            machine.array.destage_and_checkpoint().await?;
            drive.set_readable();
            if is_whole_strip {
                let (member, bytes) = trailer_at(machine, 0, 1).await;
                site.disks[member].corrupt(bytes.start / BLOCK_BYTES as u64, &NOISE);
            }
            machine.array.scrub().await?;
            assert!(machine.array.scrub().await?.is_clean());
            if is_closed {
                machine.array.close().await?;
            } else {
                machine.array.stop();
            }
            Ok(())
        })
        .unwrap();
        life(&site, 3, &[on[0], on[4]], async |machine| {
            let found = [tags(&machine.volume, 3, 1).await, tags(&machine.volume, 8 + 3, 3).await];
            machine.array.stop();
            let [one, others] = found.map(|found| found.expect("it was repaired"));
            assert_eq!((one, others), (vec![1003], vec![1011, 1012, 4711]));
            Ok(())
        })
        .unwrap();
    }
}

/// A strip with a rotten block that nobody can make stayed in its spare place, and was tried each minute.
#[test]
fn a_strip_with_a_lost_block_comes_back_from_a_spare_place() {
    let (site, on, ()) = one_in_a_spare_place(rot_three);
    life(&site, 2, &[on[1]], async |machine| {
        machine.replace(&site.disks[on[1]], on[1], 77).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(600)).await;
        machine.array.wait_rebuilt().await;
        assert_eq!(moved_strips(machine), 0);
        for block in (0..32).filter(|block| block % 8 != 3) {
            assert_eq!(tags(&machine.volume, block, 1).await?, [1000 + block]);
        }
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}

/// Each read of a good block had the whole stripe scrubbed, and counted the lost blocks as errors of drives
/// that have none.
#[test]
fn reads_beside_a_lost_block_count_no_errors() {
    let (site, on) = two_replaced(async |machine| rot(machine, 0, 0, 3).await);
    life(&site, 2, &[on[1], on[4]], async |machine| {
        rebuild_two(machine, &site, &on).await?;
        machine.env.sleep(Duration::from_secs(100)).await;
        let before = machine.array.report().counts.checksum_errors;
        for _ in 0..100 {
            tags(&machine.volume, 0, 1).await?;
            machine.env.sleep(Duration::from_secs(1)).await;
        }
        let errors = machine.array.report().counts.checksum_errors - before;
        machine.array.stop();
        // The rotten block itself, once for each scrub.
        assert!(errors < 5, "{errors} errors for 100 reads of a good block");
        Ok(())
    })
    .unwrap();
}
