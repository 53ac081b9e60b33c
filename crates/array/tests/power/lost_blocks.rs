//! Blocks of which too little is left, in stripes that are otherwise whole: they keep nothing else from being
//! redundant, readable or listed as what it is. Each test is a regression.

use crate::bench::{IO, Machine, NOISE, SLICE_AT, Site, buf_of, spec, spread, tags, write_fresh};
use crate::outdated::life;
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, CreateSpec, Lacking, Layout};
use penstock_base::{BLOCK_BYTES, Buf, Stripe, crc32c};
use penstock_drive::{Fault, Op};
use penstock_layout::Shape;
use std::ops::Range;
use std::time::Duration;

/// The member with a strip, and the bytes of a column on its drive.
pub async fn at(machine: &Machine, stripe: u64, position: usize, column: u32) -> (usize, Range<u64>) {
    let place = machine.array.places(Stripe(stripe)).await.unwrap()[position];
    let at = SLICE_AT + machine.array.geometry().block_at(place.row, column);
    (place.member.index(), at..at + BLOCK_BYTES as u64)
}

/// The same of a stripe's first data strip.
async fn bytes_of(machine: &Machine, stripe: u64, column: u32) -> (usize, Range<u64>) {
    at(machine, stripe, 0, column).await
}

pub async fn fill(machine: &Machine, stripes: u64) -> Result<(), ArrayError> {
    for stripe in 0..stripes {
        write_fresh(machine, stripe, 1000 * (stripe + 1)).await?;
    }
    machine.volume.flush().await
}

/// The blocks of the first stripes that cannot be read; the others must be as they were written.
async fn unreadable(machine: &Machine, stripes: u64) -> Vec<u64> {
    let per = machine.volume.stripe_blocks();
    let mut found = Vec::new();
    for block in 0..stripes * per {
        match tags(&machine.volume, block, 1).await {
            Ok(tag) => assert_eq!(tag, [1000 * (block / per + 1) + block % per]),
            Err(ArrayError::Unreadable { .. }) => found.push(block),
            Err(error) => panic!("block {block}: {error}"),
        }
    }
    found
}

/// Two members are replaced, and a third one has a block that is rotten or gives an error. The members were
/// never active again, and the next drive that failed was kept, with all its errors.
#[test]
fn one_bad_block_keeps_no_other_from_being_redundant() {
    for is_rotten in [true, false] {
        let mut site = Site::new(spec(4, 2));
        let (bad, lost) = life(&site, 1, &[], async |machine| {
            fill(machine, 20).await?;
            let (bad, bytes) = bytes_of(machine, 0, 3).await;
            if is_rotten {
                machine.disks[bad].corrupt(bytes.start / BLOCK_BYTES as u64, &NOISE);
            }
            machine.array.close().await?;
            let others: Vec<usize> = (0..6).filter(|at| *at != bad).collect();
            Ok((bad, others))
        })
        .unwrap();
        site.replace(lost[0]);
        site.replace(lost[1]);
        life(&site, 2, &lost[..2], async |machine| {
            let (_, bytes) = bytes_of(machine, 0, 3).await;
            let drive = machine.drives[bad].as_ref().unwrap();
            if !is_rotten {
                drive.set_unreadable(bytes);
            }
            for (at, number) in lost[..2].iter().zip(77..) {
                machine.replace(&site.disks[*at], *at, number).await?;
            }
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            machine.env.sleep(Duration::from_secs(10)).await;
            assert!(machine.array.report().members.iter().all(|member| member.state == "active"));
            assert_eq!(machine.array.unreadable_stripes(), [0]);
            // Any two others may go, and only the one column is lost.
            for at in &lost[2..4] {
                machine.array.fail_member(MemberNo::new(*at), "a test").await?;
            }
            let lost_blocks = unreadable(machine, 20).await;
            assert!(
                lost_blocks.contains(&3) && lost_blocks.iter().all(|block| block % 8 == 3),
                "{lost_blocks:?}"
            );
            if is_rotten {
                machine.array.stop();
                return Ok(());
            }
            // The block can be read again. Too little else is left of its column to make the others.
            drive.set_readable();
            let lost_blocks = unreadable(machine, 20).await;
            assert!(!lost_blocks.contains(&3), "{lost_blocks:?}");
            machine.array.stop();
            Ok(())
        })
        .unwrap();
    }
}

/// A scrub makes what was lost once its source can be read, and then it is redundant.
#[test]
fn a_lost_block_is_made_again_when_its_source_can_be_read() {
    let mut site = Site::new(spec(4, 2));
    let others = life(&site, 1, &[], async |machine| {
        fill(machine, 20).await?;
        let (bad, _) = bytes_of(machine, 0, 3).await;
        machine.array.close().await?;
        Ok((0..6).filter(|at| *at != bad).collect::<Vec<usize>>())
    })
    .unwrap();
    site.replace(others[0]);
    site.replace(others[1]);
    life(&site, 2, &others[..2], async |machine| {
        let (bad, bytes) = bytes_of(machine, 0, 3).await;
        machine.drives[bad].as_ref().unwrap().set_unreadable(bytes);
        for (at, number) in others[..2].iter().zip(77..) {
            machine.replace(&site.disks[*at], *at, number).await?;
        }
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        assert_eq!(machine.array.scrub().await?.unreadable, [0]);
        machine.drives[bad].as_ref().unwrap().set_readable();
        let report = machine.array.scrub().await?;
        assert!(report.unreadable.is_empty() && report.repaired_blocks > 0, "{report:?}");
        assert!(machine.array.scrub().await?.is_clean());
        machine.array.close().await
    })
    .unwrap();
    life(&site, 3, &[others[2], others[3]], async |machine| {
        assert_eq!(unreadable(machine, 20).await, [] as [u64; 0]);
        Ok(())
    })
    .unwrap();
}

/// More drives are away than the code survives: a scrub, or a read of what is left of such a stripe, called
/// it good.
#[test]
fn a_stripe_that_lacks_too_much_stays_listed() {
    let mut site = Site::new(spread(3, 1, 9, 2));
    life(&site, 1, &[], async |machine| {
        fill(machine, 60).await?;
        machine.array.close().await
    })
    .unwrap();
    site.lacking = Lacking::Accept;
    life(&site, 2, &[3, 4, 5], async |machine| {
        machine.array.wait_rebuilt().await;
        machine.env.sleep(Duration::from_secs(100)).await;
        let listed = machine.array.unreadable_stripes();
        assert!(!listed.is_empty() && listed.len() < 60, "{listed:?}");
        let report = machine.array.scrub().await?;
        assert_eq!(report.unreadable, listed);
        unreadable(machine, 60).await;
        machine.env.sleep(Duration::from_secs(5)).await;
        assert_eq!(machine.array.unreadable_stripes(), listed);
        let knows = |stripe: u64| machine.volume.knows_unreadable(stripe) == Some(true);
        assert!(listed.iter().all(|stripe| knows(*stripe)));
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}

/// A drive in the other failure domain takes no copy of the log: the others of the carrier's own domain were
/// not tried, and a wait for the rebuild did not end.
#[test]
fn a_member_that_takes_no_copy_of_the_log_comes_last() {
    let shape = Shape { members: 8, strips: 2, redundancy: 1, spares: 2, domains: 2 };
    let site = Site::new(CreateSpec { layout: Layout::spread(shape, 1).unwrap(), ..spec(1, 1) });
    let carriers = |machine: &Machine| -> Vec<usize> {
        let members = machine.array.report().members;
        (0..8).filter(|at| members[*at].carrier && members[*at].state == "active").collect()
    };
    life(&site, 1, &[], async |machine| {
        fill(machine, 20).await?;
        let [one, other] = carriers(machine)[..] else { panic!("two carriers") };
        assert_ne!(one % 2, other % 2, "they are in two domains");
        for at in (0..8).filter(|at| at % 2 == other % 2 && *at != other) {
            for _ in 0..100 {
                let reserved = crate::bench::metadata_of(&machine.array.geometry());
                let drive = machine.drives[at].as_ref().unwrap();
                drive.plant_within(Op::Write, 0, Fault::HostFull, reserved);
            }
        }
        machine.array.fail_member(MemberNo::new(other), "a test").await?;
        machine.array.wait_rebuilt().await;
        let now = carriers(machine);
        assert!(now.len() >= 2 && now.iter().all(|at| at % 2 == one % 2), "{now:?}");
        // Later one of them takes it.
        machine.env.sleep(Duration::from_secs(1800)).await;
        assert!(carriers(machine).iter().any(|at| at % 2 == other % 2), "{:?}", carriers(machine));
        machine.array.stop();
        Ok(())
    })
    .unwrap();
}

/// A block whose checksum is the one that marks lost blocks.
fn with_the_checksum_of_lost_blocks() -> Vec<u8> {
    let mut block = vec![7; BLOCK_BYTES];
    let mut checksum_with = |word: u32| {
        block[BLOCK_BYTES - 4..].copy_from_slice(&word.to_le_bytes());
        crc32c(&block)
    };
    // A checksum is linear in the bits of the last word: they are solved for.
    let zero = checksum_with(0);
    let mut rows: Vec<(u32, u32)> = (0..32).map(|bit| (checksum_with(1 << bit) ^ zero, 1 << bit)).collect();
    let (mut want, mut word) = (0x6706_be76 ^ zero, 0);
    for bit in 0..32 {
        let at = rows.iter().position(|(crc, _)| crc >> bit & 1 == 1).unwrap();
        let (crc, input) = rows.swap_remove(at);
        for row in rows.iter_mut().filter(|row| row.0 >> bit & 1 == 1) {
            *row = (row.0 ^ crc, row.1 ^ input);
        }
        if want >> bit & 1 == 1 {
            want ^= crc;
            word ^= input;
        }
    }
    assert_eq!(checksum_with(word), 0x6706_be76);
    block
}

/// A good block with the checksum of lost ones kept its member from ever being rebuilt.
#[test]
fn a_block_with_the_checksum_of_lost_ones_can_be_rebuilt() {
    let mut site = Site::new(spec(4, 2));
    let member = life(&site, 1, &[], async |machine| {
        let per = machine.volume.stripe_blocks();
        let (data, mut crcs) = buf_of(&(1000..1000 + per).collect::<Vec<_>>());
        let mut bytes = data.to_vec();
        bytes[3 * BLOCK_BYTES..4 * BLOCK_BYTES].copy_from_slice(&with_the_checksum_of_lost_blocks());
        crcs[3] = 0x6706_be76;
        machine.volume.write_fresh(0, &Buf::copy_from(&bytes), &crcs, IO).await?;
        machine.volume.flush().await?;
        let (member, _) = bytes_of(machine, 0, 3).await;
        machine.array.close().await?;
        Ok(member)
    })
    .unwrap();
    site.replace(member);
    life(&site, 2, &[member], async |machine| {
        machine.replace(&site.disks[member], member, 77).await?;
        assert_eq!(machine.array.wait_rebuilt().await, 0);
        machine.env.sleep(Duration::from_secs(10)).await;
        assert!(machine.array.report().members.iter().all(|member| member.state == "active"));
        assert_eq!(machine.array.unreadable_stripes(), [] as [u64; 0]);
        assert!(machine.array.scrub().await?.is_clean());
        let found = machine.volume.read(3, 1, IO).await?.gather();
        assert!(found[..] == with_the_checksum_of_lost_blocks()[..]);
        machine.array.close().await
    })
    .unwrap();
}
