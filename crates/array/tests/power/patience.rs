//! Blocks and trailers that a drive does not return, or returns wrong: for a moment, they cost nothing; for
//! good, they are as lost as rotten ones, and keep nothing from going on. Each test is a regression.

use crate::bench::{NOISE, SLICE_AT, Site, block_of, spec, spread, tags, write};
use crate::lost_blocks::{at, fill};
use crate::marked_blocks::{
    filled, members_of, moved_strips, one_in_a_spare_place, rebuild_two, replace_two, rot, rot_three,
    trailer_at, two_replaced,
};
use crate::outdated::life;
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, ArrayState, Discard};
use penstock_base::BLOCK_BYTES;
use penstock_drive::{Fault, Op};
use penstock_sim::World;
use std::ops::Range;
use std::time::Duration;

fn block_no(bytes: &Range<u64>) -> u64 {
    bytes.start / BLOCK_BYTES as u64
}

/// A stripe has a lost block; the trailer of another strip becomes a bad block, until it is written.
#[test]
fn a_bad_sector_of_a_trailer_is_repaired_beside_a_lost_block() {
    let (site, on) = two_replaced(async |machine| rot(machine, 0, 0, 3).await);
    life(&site, 2, &[on[1], on[4]], async |machine| {
        rebuild_two(machine, &site, &on).await?;
        let (member, bytes) = trailer_at(machine, 0, 2).await;
        machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        for _ in 0..3 {
            machine.array.scrub().await?;
            machine.env.sleep(Duration::from_secs(700)).await;
        }
        machine.array.fail_member(MemberNo::new(on[0]), "a test").await?;
        machine.array.fail_member(MemberNo::new(on[3]), "a test").await?;
        let mut lost = Vec::new();
        for column in [0, 1, 2, 4, 5, 6, 7] {
            for position in 0..4 {
                if tags(&machine.volume, position * 8 + column, 1).await.is_err() {
                    lost.push(position * 8 + column);
                }
            }
        }
        machine.array.stop();
        assert!(lost.is_empty(), "lost {lost:?}");
        Ok(())
    })
    .unwrap();
}

/// A strip has an unreadable block that nobody can make, and another bad sector that can be made.
#[test]
fn a_bad_sector_is_repaired_beside_one_that_cannot_be() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = at(machine, 0, 0, 3).await;
        let drive = machine.drives[member].as_ref().unwrap();
        drive.set_unreadable(bytes);
        rebuild_two(machine, &site, &on).await?;
        let (_, bytes) = at(machine, 0, 0, 5).await;
        drive.set_unreadable(bytes);
        for _ in 0..3 {
            machine.array.scrub().await?;
            machine.env.sleep(Duration::from_secs(700)).await;
        }
        machine.array.fail_member(MemberNo::new(on[2]), "a test").await?;
        machine.array.fail_member(MemberNo::new(on[3]), "a test").await?;
        let found = tags(&machine.volume, 5, 1).await;
        machine.array.stop();
        assert_eq!(found.expect("a scrub could make it"), [1005]);
        Ok(())
    })
    .unwrap();
}

/// Like `one_bad_trailer_keeps_no_member_from_counting`, with a bad sector in the place of rot.
#[test]
fn one_bad_sector_of_a_trailer_keeps_no_member_from_counting() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = trailer_at(machine, 0, 0).await;
        machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        replace_two(machine, &site, &on).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(3400)).await;
        let states: Vec<_> = machine.array.report().members.iter().map(|member| member.state).collect();
        let next = machine.array.fail_member(MemberNo::new(on[2]), "a test").await;
        machine.array.stop();
        assert!(states.iter().all(|state| *state == "active"), "{states:?} {next:?}");
        Ok(())
    })
    .unwrap();
}

/// The same, and a write to the stripe, whose parity has the bad trailer.
#[test]
fn a_bad_sector_of_a_trailer_keeps_nothing_in_the_log() {
    let (site, on) = two_replaced(async |machine| rot(machine, 0, 0, 3).await);
    life(&site, 2, &[on[1], on[4]], async |machine| {
        rebuild_two(machine, &site, &on).await?;
        let (member, bytes) = trailer_at(machine, 0, 5).await;
        machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        machine.array.scrub().await?;
        for column in [0, 1, 2, 4, 5, 6, 7] {
            write(machine, 16 + column, 4711).await?;
        }
        machine.volume.flush().await?;
        machine.array.destage_and_checkpoint().await?;
        machine.env.sleep(Duration::from_secs(3000)).await;
        machine.array.scrub().await?;
        machine.array.destage_and_checkpoint().await?;
        let dirty = machine.array.report().dirty_blocks;
        machine.array.stop();
        assert_eq!(dirty, 0, "columns beside the lost one");
        Ok(())
    })
    .unwrap();
}

/// A trailer reads wrong for a moment, and one column of two others is rotten. It reads wrong until it is
/// restored, which is only done if nobody wrote over it.
#[test]
fn a_trailer_that_reads_wrong_for_a_moment_is_not_written_over() {
    let site = Site::new(spec(4, 2));
    life(&site, 1, &[], async |machine| {
        fill(machine, 4).await?;
        machine.array.destage_and_checkpoint().await?;
        rot(machine, 0, 1, 3).await;
        rot(machine, 0, 2, 3).await;
        let (member, bytes) = trailer_at(machine, 0, 0).await;
        let block = block_no(&bytes);
        let saved = machine.disks[member].peek(block);
        machine.disks[member].corrupt(block, &NOISE);
        machine.array.scrub().await?;
        if machine.disks[member].peek(block)[..] == NOISE[..] {
            machine.disks[member].corrupt(block, &saved);
        }
        let (member, bytes) = at(machine, 0, 0, 3).await;
        assert_eq!(
            machine.disks[member].peek(block_no(&bytes))[..],
            block_of(1003)[..],
            "it is on the drive"
        );
        machine.array.scrub().await?;
        let found = [tags(&machine.volume, 3, 1).await, tags(&machine.volume, 11, 1).await];
        machine.array.stop();
        for found in found {
            found.expect("strips 0, 3, 4 and 5 are right");
        }
        Ok(())
    })
    .unwrap();
}

/// A strip in a spare place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spare {
    /// A block of it reads wrong for a moment.
    IsWrong,
    /// A block of it cannot be read.
    IsBad,
    /// Its drive does not answer for a while.
    Hangs,
}

/// The drive of a strip in a spare place is replaced. Nobody can make one column of it meanwhile.
fn brought_back(spare_is: Spare) {
    let (site, on, (spare, bytes)) = one_in_a_spare_place(async |machine| {
        rot(machine, 0, 0, 3).await;
        rot(machine, 0, 2, 3).await;
        at(machine, 0, 1, 3).await
    });
    assert_ne!(spare, on[1]);
    let right = site.disks[spare].peek(block_no(&bytes));
    if spare_is == Spare::IsWrong {
        site.disks[spare].corrupt(block_no(&bytes), &NOISE);
    }
    life(&site, 2, &[on[1]], async |machine| {
        let drive = machine.drives[spare].as_ref().unwrap();
        match spare_is {
            Spare::IsWrong => {}
            Spare::IsBad => drive.set_unreadable(bytes.clone()),
            Spare::Hangs => {
                let strip = bytes.start - 3 * BLOCK_BYTES as u64..bytes.end + 6 * BLOCK_BYTES as u64;
                (0..25).for_each(|_| drive.plant_within(Op::Read, 0, Fault::Silent, strip.clone()));
            }
        }
        machine.replace(&site.disks[on[1]], on[1], 77).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(if spare_is == Spare::IsWrong { 100 } else { 1000 })).await;
        if spare_is == Spare::IsBad {
            let moved = moved_strips(machine);
            machine.array.stop();
            assert_eq!(moved, 0, "as with a rotten block");
            return Ok(());
        }
        // It reads right again, if it is still there.
        if spare_is == Spare::IsWrong && site.disks[spare].peek(block_no(&bytes))[..] == NOISE[..] {
            site.disks[spare].corrupt(block_no(&bytes), &right);
        }
        machine.env.sleep(Duration::from_secs(1500)).await;
        machine.array.scrub().await?;
        let found = tags(&machine.volume, 8 + 3, 1).await;
        machine.array.stop();
        assert_eq!(found.expect("strips 1, 3, 4 and 5 were right"), [1011]);
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_block_that_reads_wrong_for_a_moment_is_not_left_behind() {
    brought_back(Spare::IsWrong);
}

#[test]
fn a_strip_with_a_bad_sector_comes_back_from_a_spare_place() {
    brought_back(Spare::IsBad);
}

#[test]
fn a_strip_of_a_drive_that_does_not_answer_is_not_left_behind() {
    brought_back(Spare::Hangs);
}

/// Of a strip in a spare place one block cannot be read for minutes, and then another one for a moment, which
/// nobody else has.
#[test]
fn a_block_that_is_bad_for_a_moment_is_not_left_behind_for_another_one() {
    let (site, on, (spare, blocks)) = one_in_a_spare_place(async |machine| {
        rot(machine, 0, 0, 3).await;
        rot(machine, 0, 2, 3).await;
        let (spare, first) = at(machine, 0, 1, 3).await;
        let (_, second) = at(machine, 0, 1, 5).await;
        (spare, [first, second])
    });
    life(&site, 2, &[on[1]], async |machine| {
        let drive = machine.drives[spare].as_ref().unwrap();
        drive.set_unreadable(blocks[0].clone());
        machine.replace(&site.disks[on[1]], on[1], 77).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(170)).await;
        drive.set_readable();
        rot(machine, 0, 0, 5).await;
        rot(machine, 0, 2, 5).await;
        drive.set_unreadable(blocks[1].clone());
        machine.env.sleep(Duration::from_secs(70)).await;
        drive.set_readable();
        machine.env.sleep(Duration::from_secs(600)).await;
        let moved = moved_strips(machine);
        let found = tags(&machine.volume, 8 + 5, 1).await;
        machine.array.stop();
        assert_eq!(found.expect("it was bad for a moment"), [1013]);
        assert_eq!(moved, 0);
        Ok(())
    })
    .unwrap();
}

/// A drive is away, two others have a bad sector each, in different columns.
#[test]
fn bad_sectors_in_different_columns_keep_nothing_from_being_read() {
    let site = Site::new(spec(4, 2));
    let on = filled(&site, 4, async |_| {});
    life(&site, 2, &[on[0]], async |machine| {
        for (position, column) in [(1, 3), (2, 5)] {
            let (member, bytes) = at(machine, 0, position, column).await;
            machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        }
        for block in 0..8 {
            assert_eq!(tags(&machine.volume, block, 1).await?, [1000 + block], "alone");
        }
        let found = tags(&machine.volume, 0, 8).await;
        machine.array.stop();
        found.expect("each of them can be made");
        Ok(())
    })
    .unwrap();
}

/// The same while a drive that failed is rebuilt to spare places.
#[test]
fn bad_sectors_in_different_columns_keep_no_strip_from_a_spare_place() {
    for pause in [1500, 300] {
        let site = Site::new(spread(4, 2, 10, 2));
        life(&site, 2, &[], async |machine| {
            fill(machine, 40).await?;
            machine.array.destage_and_checkpoint().await?;
            let on = members_of(machine, 0).await;
            for (position, column) in [(1, 3), (2, 5)] {
                let (member, bytes) = at(machine, 0, position, column).await;
                machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
            }
            machine.array.fail_member(MemberNo::new(on[0]), "a test").await?;
            machine.array.wait_rebuilt().await;
            machine.env.sleep(Duration::from_secs(pause)).await;
            let listed = machine.array.unreadable_stripes();
            machine.array.fail_member(MemberNo::new(on[3]), "a test").await?;
            let found = tags(&machine.volume, 3, 1).await;
            machine.array.stop();
            found.unwrap_or_else(|error| panic!("after {pause}: {error}, listed {listed:?}"));
            Ok(())
        })
        .unwrap();
    }
}

/// The same with a blank drive in place of the one that is away.
#[test]
fn bad_sectors_keep_a_replaced_drive_from_nothing() {
    let mut site = Site::new(spec(4, 2));
    let on = filled(&site, 4, async |_| {});
    site.replace(on[0]);
    life(&site, 2, &[on[0]], async |machine| {
        for (position, column) in [(1, 3), (2, 5), (3, 6), (4, 7)] {
            let (member, bytes) = at(machine, 0, position, column).await;
            machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        }
        machine.replace(&site.disks[on[0]], on[0], 77).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.env.sleep(Duration::from_secs(10)).await;
        let found = tags(&machine.volume, 0, 32).await;
        machine.array.stop();
        found.expect("each column lacks two strips at most");
        Ok(())
    })
    .unwrap();
}

/// A read makes a block whose sector is bad of the others, each time, and the sector is never written.
#[test]
fn a_read_has_a_bad_sector_repaired() {
    let site = Site::new(spec(4, 2));
    let on = filled(&site, 4, async |_| {});
    life(&site, 2, &[], async |machine| {
        let (member, bytes) = at(machine, 0, 0, 3).await;
        machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        for _ in 0..20 {
            tags(&machine.volume, 3, 1).await?;
            machine.env.sleep(Duration::from_secs(100)).await;
        }
        machine.array.fail_member(MemberNo::new(on[1]), "a test").await?;
        machine.array.fail_member(MemberNo::new(on[2]), "a test").await?;
        let found = tags(&machine.volume, 3, 1).await;
        machine.array.stop();
        found.expect("it was read twenty times");
        Ok(())
    })
    .unwrap();
}

/// Like `a_trailer_that_cannot_be_read_for_a_moment_costs_nothing`, with one that reads wrong for a moment.
#[test]
fn a_trailer_that_reads_wrong_for_a_moment_costs_nothing() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = trailer_at(machine, 0, 0).await;
        let block = block_no(&bytes);
        let saved = machine.disks[member].peek(block);
        machine.disks[member].corrupt(block, &NOISE);
        replace_two(machine, &site, &on).await?;
        machine.env.sleep(Duration::from_secs(100)).await;
        assert_eq!(machine.disks[member].peek(block)[..], NOISE[..], "nobody wrote it");
        machine.disks[member].corrupt(block, &saved);
        machine.env.sleep(Duration::from_secs(100)).await;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.fail_member(MemberNo::new(on[2]), "a test").await?;
        let found = tags(&machine.volume, 0, 32).await;
        machine.array.stop();
        found.expect("one drive is away, all others are whole");
        Ok(())
    })
    .unwrap();
}

/// An array forgot at a stop that blocks were lost: nobody tried them again, though they could be made, and a
/// drive that failed took them.
#[test]
fn lost_blocks_are_known_after_a_restart() {
    for stops in [false, true] {
        let (site, on) = two_replaced(async |_| {});
        life(&site, 2, &[on[1], on[4]], async |machine| {
            let (member, bytes) = at(machine, 0, 0, 3).await;
            machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
            rebuild_two(machine, &site, &on).await?;
            machine.array.destage_and_checkpoint().await?;
            assert_eq!(machine.array.unreadable_stripes(), [0]);
            match stops {
                true => {
                    machine.array.stop();
                    Ok(())
                }
                false => machine.array.close().await,
            }
        })
        .unwrap();
        life(&site, 3, &[], async |machine| {
            assert_eq!(machine.array.unreadable_stripes(), [0]);
            assert_eq!(machine.array.report().state, ArrayState::Failed);
            machine.env.sleep(Duration::from_secs(60)).await;
            assert_eq!(machine.array.report().state, ArrayState::Ok, "it could be made");
            machine.array.fail_member(MemberNo::new(on[0]), "a test").await?;
            assert_eq!(tags(&machine.volume, 3, 1).await?, [1003]);
            machine.array.stop();
            Ok(())
        })
        .unwrap();
    }
}

/// Behind a loose cable every read of a drive failed for a few minutes: all of it counted as lost, stale
/// strips beside it were marked, and it lost its protection.
#[test]
fn a_drive_that_answers_no_read_does_not_count_as_lost() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let drive = machine.drives[on[0]].as_ref().unwrap();
        drive.set_unreadable(0..1 << 40);
        replace_two(machine, &site, &on).await?;
        machine.env.sleep(Duration::from_secs(1200)).await;
        let given_up = machine.array.fail_member(MemberNo::new(on[0]), "a test").await;
        assert!(given_up.is_err(), "it has the only copy of everything");
        drive.set_readable();
        machine.env.sleep(Duration::from_secs(300)).await;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.array.fail_member(MemberNo::new(on[0]), "a test").await?;
        machine.array.fail_member(MemberNo::new(on[2]), "a test").await?;
        let found = tags(&machine.volume, 0, 32).await;
        machine.array.stop();
        found.expect("all of it was read in the end");
        Ok(())
    })
    .unwrap();
}

/// The same of a drive that answers some reads: it fails those of trailers, and others all over it.
#[test]
fn a_drive_that_answers_some_reads_does_not_count_as_lost() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let drive = machine.drives[on[0]].as_ref().unwrap();
        let geo = machine.array.geometry();
        drive.set_unreadable(0..SLICE_AT + geo.strip_at(0));
        for row in 0..geo.rows {
            let trailer = SLICE_AT + geo.trailer_at(row);
            drive.set_unreadable(trailer..trailer + BLOCK_BYTES as u64);
        }
        replace_two(machine, &site, &on).await?;
        machine.env.sleep(Duration::from_secs(1200)).await;
        let given_up = machine.array.fail_member(MemberNo::new(on[0]), "a test").await;
        machine.array.stop();
        assert!(given_up.is_err(), "it has the only copy of everything");
        Ok(())
    })
    .unwrap();
}

/// Nothing else is read from the drive of a strip whose trailer and last block are bad: no look counted, and
/// two replaced drives never did.
#[test]
fn a_bad_trailer_beside_a_bad_block_keeps_no_member_from_counting() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = trailer_at(machine, 0, 0).await;
        let drive = machine.drives[member].as_ref().unwrap();
        drive.set_unreadable(bytes.start - BLOCK_BYTES as u64..bytes.start);
        drive.set_unreadable(bytes);
        // And the first block of its label.
        drive.set_unreadable(SLICE_AT..SLICE_AT + BLOCK_BYTES as u64);
        replace_two(machine, &site, &on).await?;
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(1200)).await;
        let states: Vec<_> = machine.array.report().members.iter().map(|member| member.state).collect();
        machine.array.stop();
        assert!(states.iter().all(|state| *state == "active"), "{states:?}");
        Ok(())
    })
    .unwrap();
}

/// A block in the log over one that is lost: a read of the blocks beside it failed, for the old contents.
#[test]
fn a_read_across_a_block_in_the_log_does_not_need_the_one_below() {
    let site = Site::new(spec(4, 2));
    life(&site, 1, &[], async |machine| {
        fill(machine, 4).await?;
        machine.array.destage_and_checkpoint().await?;
        for position in [0, 1, 2] {
            rot(machine, 0, position, 3).await;
        }
        write(machine, 3, 4711).await?;
        machine.volume.flush().await?;
        machine.array.destage_and_checkpoint().await?;
        let found = tags(&machine.volume, 2, 3).await;
        machine.array.stop();
        assert_eq!(found.expect("all three are known"), [1002, 4711, 1004]);
        Ok(())
    })
    .unwrap();
}

/// A strip in a spare place has a lost block, and other columns of it are written again and again: it never
/// came back.
#[test]
fn a_strip_in_use_with_a_lost_block_comes_back_from_a_spare_place() {
    let (site, on, ()) = one_in_a_spare_place(rot_three);
    life(&site, 2, &[on[1]], async |machine| {
        machine.replace(&site.disks[on[1]], on[1], 77).await?;
        for turn in 0..15 {
            machine.env.sleep(Duration::from_secs(60)).await;
            write(machine, 8 + 5, 5000 + turn).await?;
            machine.volume.flush().await?;
            machine.array.destage_and_checkpoint().await?;
        }
        machine.array.wait_rebuilt().await;
        let moved = moved_strips(machine);
        let found = tags(&machine.volume, 8 + 5, 1).await?;
        machine.array.stop();
        assert_eq!((moved, found), (0, vec![5014]));
        Ok(())
    })
    .unwrap();
}

/// An opening without a drive took a stripe for lost in any case, for a trailer that read wrong for a moment.
#[test]
fn an_opening_looks_more_than_once_before_it_gives_a_drive_up() {
    let site = Site::new(spec(3, 1));
    let on = filled(&site, 4, async |_| {});
    let (member, bytes) = life(&site, 2, &[on[1]], async |machine| {
        // Strip 1 becomes stale.
        write(machine, 8, 4711).await?;
        machine.volume.flush().await?;
        machine.array.destage_and_checkpoint().await?;
        let trailer = trailer_at(machine, 0, 0).await;
        machine.array.close().await?;
        Ok(trailer)
    })
    .unwrap();
    let (disk, block) = (site.disks[member].clone(), block_no(&bytes));
    let saved = disk.peek(block);
    disk.corrupt(block, &NOISE);
    let world = World::new(3);
    let opened = world.run(async {
        let env = world.env();
        let moment = async move {
            env.sleep(Duration::from_secs(3)).await;
            disk.corrupt(block, &saved);
        };
        world.env().spawn("a moment", Box::pin(moment));
        site.open(&world, &[on[3]]).await.err()
    });
    world.destroy();
    let refused = opened.unwrap();
    assert!(matches!(refused, Some(ArrayError::WouldLose { .. })), "{refused:?}");
}

/// A stripe with a lost block was discarded after the last checkpoint: an array said after a start that it
/// cannot be read.
#[test]
fn a_stripe_that_was_discarded_is_not_listed_after_a_restart() {
    let (site, on) = two_replaced(async |_| {});
    life(&site, 2, &[on[1], on[4]], async |machine| {
        let (member, bytes) = at(machine, 0, 0, 3).await;
        machine.drives[member].as_ref().unwrap().set_unreadable(bytes);
        rebuild_two(machine, &site, &on).await?;
        machine.array.destage_and_checkpoint().await?;
        assert_eq!(machine.array.unreadable_stripes(), [0]);
        assert!(machine.volume.discard(0, 1, Discard::InTable).await?.is_empty());
        assert!(machine.array.unreadable_stripes().is_empty());
        machine.array.stop();
        Ok(())
    })
    .unwrap();
    life(&site, 3, &[], async |machine| {
        assert!(machine.array.unreadable_stripes().is_empty());
        assert_eq!(machine.array.report().state, ArrayState::Ok);
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}
