use super::*;

const PAGE: u64 = 4096;

fn granted(right: Right) -> Lease {
    let mut lease = Lease::default();
    if right != Right::None {
        lease.granted(right, 5, 0);
    }
    lease
}

/// A lease in a phase of its revocation.
fn revoked(right: Right, phase: Phase) -> Lease {
    let mut lease = granted(right);
    if phase != Phase::Kept {
        assert_eq!(lease.begin_to_revoke(9), Revocation::Begun);
        lease.begin_to_drop();
    }
    if phase == Phase::Closed {
        lease.close();
    }
    lease
}

#[test]
fn an_operation_is_admitted_by_right_phase_and_purpose() {
    use Phase::{Closed, Kept, Serving};
    use Purpose::{Page, Read, Resize, Write};
    use Right::{Exclusive, None, Shared};
    // For each lease: reads, writes, write-backs of pages and changes of size, first of requests that wait as
    // usual, then of those that block a drop of pages.
    for (right, phase, admits) in [
        (None, Kept, [false, false, false, false, false, false, false, false]),
        (Shared, Kept, [true, false, false, false, true, false, false, false]),
        (Exclusive, Kept, [true, true, true, true, true, true, true, true]),
        (Shared, Serving, [true, false, true, true, true, false, true, true]),
        (Exclusive, Serving, [true, true, true, true, true, true, true, true]),
        (Shared, Closed, [false, false, true, false, true, false, true, true]),
        (Exclusive, Closed, [false, false, true, false, true, true, true, true]),
    ] {
        let lease = revoked(right, phase);
        let cases = [false, true].into_iter().flat_map(|let_in| {
            [(Read, Shared), (Write, Exclusive), (Page, Exclusive), (Resize, Exclusive)]
                .map(move |(purpose, needs)| (purpose, needs, let_in))
        });
        let found: Vec<bool> =
            cases.map(|(purpose, needs, let_in)| lease.admits(needs, purpose, let_in)).collect();
        assert_eq!(found, admits, "{right:?} {phase:?}");
    }
}

#[test]
fn a_read_of_a_file_that_is_written_by_pages_waits_for_the_exclusive_right() {
    let lease = granted(Right::Shared);
    assert!(!lease.admits(Right::Exclusive, Purpose::Read, false));
    // Under a revocation it does not wait: the page that it has locked must be dropped.
    let lease = revoked(Right::Shared, Phase::Serving);
    assert!(lease.admits(Right::Exclusive, Purpose::Read, false));
}

#[test]
fn a_grant_that_was_revoked_before_it_arrived_is_ignored() {
    for (revoked, void, grant, right) in [
        (0, 0, 1, Right::Shared),
        (4, 0, 4, Right::None),
        (4, 0, 3, Right::None),
        (4, 0, 5, Right::Shared),
        (0, 7, 7, Right::None),
        (9, 7, 8, Right::None),
        (9, 7, 10, Right::Shared),
    ] {
        let mut lease = Lease::default();
        assert_eq!(lease.begin_to_revoke(revoked), Revocation::Nothing);
        lease.granted(Right::Shared, grant, void);
        assert_eq!(lease.right, right, "grant {grant} after {revoked} and {void}");
    }
}

#[test]
fn a_revocation_begins_once_and_only_for_its_grant() {
    let mut lease = granted(Right::Exclusive);
    assert_eq!(lease.begin_to_revoke(4), Revocation::Nothing, "the grant is later");
    assert!(lease.owns());
    assert_eq!(lease.begin_to_revoke(5), Revocation::Begun);
    assert!(!lease.owns() && lease.covers(Right::Exclusive));
    assert_eq!(lease.begin_to_revoke(6), Revocation::Busy);
    assert!(!lease.begin_to_ask(), "nothing is asked for meanwhile");
    lease.close();
    assert!(lease.left_to_drop().is_none());
    lease.revoked();
    assert_eq!(lease.begin_to_revoke(6), Revocation::Nothing);
    assert!(!lease.covers(Right::Shared) && lease.begin_to_ask());
}

#[test]
fn pages_are_dropped_until_no_request_has_got_any() {
    let mut lease = granted(Right::Shared);
    lease.begin_use();
    lease.serve(0..PAGE);
    assert_eq!(lease.begin_to_revoke(5), Revocation::Begun);
    lease.begin_to_drop();
    lease.serve(PAGE..PAGE + 1);
    lease.begin_store();
    lease.close();
    let pieces = |left: Option<PageSet>| {
        let left = left.unwrap();
        left.pieces().map(|piece| (piece.start / PAGE, piece.end / PAGE)).collect::<Vec<_>>()
    };
    assert_eq!(pieces(lease.left_to_drop()), [(1, 2)], "served since the drop began");
    assert!(lease.end_use(), "the revocation waits for the last user");
    assert!(pieces(lease.left_to_drop()).is_empty(), "a store is under way");
    lease.end_store(5 * PAGE..6 * PAGE);
    assert_eq!(pieces(lease.left_to_drop()), [(5, 6)]);
    assert!(lease.left_to_drop().is_none());
    lease.revoked();
    assert!(lease.is_idle());
}

#[test]
fn requests_that_lock_pages_of_a_piece_are_let_in() {
    let read = Rc::new(Waiting::new(PAGE..3 * PAGE, true));
    let write = Rc::new(Waiting::new(0..u64::MAX, false));
    let mut lease = revoked(Right::Shared, Phase::Closed);
    [&read, &write].into_iter().for_each(|waiting| lease.begin_waiting(waiting));
    for (piece, filled) in [
        (PAGE..2 * PAGE, true),
        (PAGE..3 * PAGE, true),
        (0..2 * PAGE, false),
        (2 * PAGE..4 * PAGE, false),
        (5 * PAGE..6 * PAGE, false),
    ] {
        assert_eq!(lease.is_filled(&piece), filled, "{piece:?}");
    }
    lease.let_in(&(5 * PAGE..6 * PAGE));
    assert!(write.is_let_in() && !read.is_let_in());
    lease.let_in(&(2 * PAGE..2 * PAGE + 1));
    assert!(read.is_let_in() && !lease.is_filled(&(PAGE..2 * PAGE)), "it is served, so its pages fill");
    // Too late, if nothing was served by the end.
    let _ = lease.left_to_drop();
    assert!(lease.left_to_drop().is_none());
    assert!(!write.is_let_in() && !read.is_let_in());
    lease.end_waiting(&read);
    lease.revoked();
    assert!(!lease.is_idle(), "one waits still");
    lease.end_waiting(&write);
    assert!(lease.is_idle());
}

#[test]
fn the_kernel_keeps_pages_from_the_second_opening_on() {
    let mut lease = granted(Right::Shared);
    assert!(!lease.keeps_pages() && lease.keeps_pages());
    lease.granted(Right::Exclusive, 6, 0);
    assert!(lease.keeps_pages(), "the right grew");
    let mut lease = revoked(Right::Shared, Phase::Serving);
    assert!(!lease.keeps_pages() && !lease.keeps_pages());
    assert!(!granted(Right::None).keeps_pages());
}

#[test]
fn one_request_asks_at_a_time() {
    let mut lease = Lease::default();
    assert!(lease.begin_to_ask() && !lease.begin_to_ask());
    assert!(!lease.is_idle());
    lease.end_asking();
    assert!(lease.is_idle() && lease.begin_to_ask());
}

#[test]
fn a_new_start_counts_grants_anew() {
    let mut lease = granted(Right::Exclusive);
    lease.restarted();
    assert!(lease.covers(Right::Exclusive), "until the new start revokes it");
    assert_eq!(lease.begin_to_revoke(0), Revocation::Begun);
}

#[test]
#[should_panic(expected = "every use ends once")]
fn a_use_cannot_end_twice() {
    let mut lease = granted(Right::Shared);
    lease.begin_use();
    lease.end_use();
    lease.end_use();
}
