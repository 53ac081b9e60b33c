use super::*;
use crate::rows::Loan;
use crate::tests::{Bench, STRIPE, blocks_of, file, on_volumes};
use penstock_drive::Class;

const IO: Io = Io::new(Class::Client, "test.volumes");
const FILE: u64 = 1 << 40;

/// The volume of the first bench with stripes of the second one as its first borrowed group, and the first
/// stripe of that.
fn with_a_loan(benches: &[Bench], stripe: u64, stripes: u32) -> (Rc<Volumes>, u64, u64) {
    let volumes = benches[0].volumes();
    let group = volumes.groups().own();
    let loan = Loan { stripe, stripes, gaps: Vec::new() };
    volumes.add_loan(group, &Borrowed { lender: TargetId(1), number: 1, loan });
    let first = group * volumes.groups().blocks_each() / STRIPE;
    (volumes, group, first)
}

/// The same with the lender there.
fn with_a_lender(benches: &[Bench], stripe: u64, stripes: u32) -> (Rc<Volumes>, u64, u64) {
    let (volumes, group, first) = with_a_loan(benches, stripe, stripes);
    volumes.add_lender(TargetId(1), &benches[1].volume);
    assert!(volumes.lender_has(group));
    (volumes, group, first)
}

#[test]
fn a_block_of_a_loan_is_on_the_volume_of_the_lender() {
    on_volumes(2, async |benches| {
        let (volumes, group, first) = with_a_loan(benches, 5, 3);
        let (data, crcs) = blocks_of(&[7; STRIPE as usize]);
        let away = volumes.read(first * STRIPE, 1, IO).await.unwrap_err();
        assert!(matches!(away, ChunkError::LenderAway { lender: TargetId(1) }), "{away}");
        assert!(volumes.lacks_too_much() && volumes.knows_unreadable(first) == Some(true));
        assert_eq!(volumes.knows_unwritten(first), Some(false), "nothing new is written there");
        assert_eq!(volumes.written(0, 100).await.unwrap(), Vec::<u64>::new());
        volumes.add_lender(TargetId(1), &benches[1].volume);
        assert!(volumes.lender_has(group));
        assert!(!volumes.lacks_too_much() && volumes.knows_unreadable(first) == Some(false));
        assert!(volumes.is_unwritten(first + 1).await.unwrap());
        volumes.write_fresh(file(FILE), first + 1, &data, &crcs, IO).await.unwrap();
        volumes.flush_all().await.unwrap();
        assert!(!volumes.is_unwritten(first + 1).await.unwrap());
        let there = benches[1].volume.read(6 * STRIPE, STRIPE, IO).await.unwrap();
        assert_eq!(there.crcs, crcs, "the second stripe of the loan is the seventh of the lender");
        assert_eq!(volumes.read((first + 1) * STRIPE, STRIPE, IO).await.unwrap().crcs, crcs);
        assert_eq!(volumes.written(0, 100).await.unwrap(), [first + 1]);
        assert_eq!(volumes.written_in(first + 2..u64::MAX, 100).await.unwrap(), Vec::<u64>::new());
        assert_eq!(volumes.discard(first, 3, Discard::OnDrives).await.unwrap(), Vec::<u64>::new());
        assert!(benches[1].volume.is_unwritten(6).await.unwrap());
    });
}

#[test]
fn nothing_behind_a_loan_or_a_volume_is_reached() {
    on_volumes(2, async |benches| {
        let (volumes, group, first) = with_a_lender(benches, 5, 3);
        let (data, crcs) = blocks_of(&[7; STRIPE as usize]);
        let own = volumes.own().blocks();
        for (block, count) in [
            (own, 1),
            (own - 1, 2),
            ((first + 3) * STRIPE, 1),
            ((first + 2) * STRIPE, STRIPE + 1),
            (u64::MAX - 5, 3),
            (volumes.groups().all_blocks() + 4096, 1),
        ] {
            let error = volumes.read(block, count, IO).await.unwrap_err();
            assert!(matches!(error, ChunkError::Invalid(_)), "{block}+{count}: {error}");
        }
        volumes.write_fresh(file(FILE), first + 3, &data, &crcs, IO).await.unwrap_err();
        volumes.write(file(FILE), (first + 3) * STRIPE, &data, &crcs).await.unwrap_err();
        volumes.discard(first + 2, 2, Discard::InTable).await.unwrap_err();
        assert!(benches[1].volume.is_unwritten(8).await.unwrap(), "it belongs to others");
        volumes.end_loan(group);
        volumes.read(first * STRIPE, 1, IO).await.unwrap_err();
    });
}

/// A write that comes while a flush is on its way is flushed by the next one.
#[test]
fn a_lender_is_flushed_until_nothing_waits() {
    on_volumes(2, async |benches| {
        let (volumes, _, first) = with_a_lender(benches, 5, 3);
        let (data, crcs) = blocks_of(&[3; 2]);
        let (one, other) = (file(FILE), file(FILE + 1));
        volumes.write(one, 3, &data, &crcs).await.unwrap();
        assert!(!volumes.has_unflushed(one), "it is on its own volume");
        volumes.write(one, first * STRIPE, &data, &crcs).await.unwrap();
        volumes.write(other, first * STRIPE + 2, &data, &crcs).await.unwrap();
        let flush = volumes.flush(one);
        let write = volumes.write(one, first * STRIPE + 4, &data, &crcs);
        let (flushed, written) = futures_util::future::join(flush, write).await;
        flushed.unwrap();
        written.unwrap();
        assert!(volumes.has_unflushed(one) && volumes.has_unflushed(other));
        volumes.flush(one).await.unwrap();
        assert!(!volumes.has_unflushed(one) && volumes.has_unflushed(other));
        volumes.flush_all().await.unwrap();
        assert!(!volumes.has_unflushed(other));
    });
}

/// Blocks that cannot be read on the lender are named by their numbers here.
#[test]
fn unreadable_stripes_of_loans_are_known() {
    on_volumes(2, async |benches| {
        let (volumes, _, first) = with_a_lender(benches, 5, 3);
        benches[1].write_stripe(6, 9).await;
        benches[1].write_stripe(9, 9).await;
        benches[1].volume.array().destage_and_checkpoint().await.unwrap();
        for stripe in [6, 9] {
            benches[1].set_unreadable(stripe * STRIPE..stripe * STRIPE + 1).await;
            benches[1].volume.read(stripe * STRIPE, 1, IO).await.unwrap_err();
        }
        assert_eq!(volumes.unreadable_stripes(), [first + 1], "the other one is not lent");
        assert_eq!(volumes.knows_unreadable(first + 1), Some(true));
        benches[1].set_readable();
    });
}
