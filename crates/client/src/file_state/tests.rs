use super::*;
use crate::sent::Change;

fn at(ns: i64) -> Time {
    Time::from_ns(ns)
}

fn attr(size: u64, truncations: u64, mode: u32) -> Attr {
    Attr { ino: 5, size, truncations, mode, chunk_blocks: 4, mtime: at(1), ctime: at(1), ..Attr::default() }
}

fn of(attr: &Attr) -> FileState {
    FileState::of(attr, Spread::of_one(penstock_base::TargetId(0), 1))
}

fn state() -> FileState {
    of(&attr(100, 3, 0o100_644))
}

/// Attributes from the service, as `overlay` changes them.
fn seen(state: &FileState) -> (u64, u32, u32) {
    let mut attr = attr(7, 3, 0);
    state.overlay(&mut attr);
    (attr.size, attr.mtime.nsec, attr.ctime.nsec)
}

#[test]
fn unsynced_writes_cover_the_attributes_of_the_service() {
    let mut state = state();
    assert_eq!(seen(&state), (100, 1, 1));
    state.wrote(50, at(9));
    assert_eq!(seen(&state), (100, 9, 9), "a write inside changes the time");
    state.wrote(150, at(11));
    assert_eq!(seen(&state), (150, 11, 11));
    state.make_stale();
    assert_eq!(seen(&state), (7, 1, 1), "a stale state says nothing");
}

#[test]
fn a_sync_covers_the_writes_before_it_and_no_later_one() {
    for (later, truncated, unsynced, sent_size) in
        [(false, false, false, 150), (true, false, true, 150), (false, true, true, 60)]
    {
        let mut state = state();
        state.wrote(150, at(9));
        let sent = state.clone();
        if later {
            state.wrote(200, at(10));
        }
        if truncated {
            state.resized(&attr(60, 4, 0), Some(at(10)));
        }
        state.synced(&sent);
        let found = (state.has_unsynced_writes(), state.sent_size());
        assert_eq!(found, (unsynced, sent_size), "later {later}, truncated {truncated}");
    }
}

#[test]
fn a_loss_is_reported_by_an_fsync_or_with_the_last_close() {
    enum Step {
        Fsync,
        Close,
        TellClose,
    }
    use Step::{Close, Fsync, TellClose};
    for (steps, is_lost) in [
        (&[][..], true),
        (&[Fsync], false),
        (&[Close], true),
        (&[Close, Close], true),
        (&[TellClose, Close], true),
        (&[TellClose, Close, Close], false),
        (&[Close, TellClose, Close], false),
        (&[TellClose, Fsync], false),
    ] {
        let mut state = state();
        state.open();
        state.open();
        state.wrote(200, at(9));
        state.lose();
        assert_eq!((state.losses(), state.losses_told(), state.lost_end()), (1, 0, 200));
        for step in steps {
            match step {
                Fsync => state.reported(),
                Close => state.close(),
                TellClose => state.reported_by_close(),
            }
        }
        assert_eq!(state.is_lost(), is_lost, "{} steps", steps.len());
        assert_eq!(state.losses_told(), u64::from(!is_lost));
    }
}

#[test]
fn a_stale_state_keeps_handles_and_losses() {
    let mut state = state();
    state.open();
    state.cleaned(3);
    state.wrote(300, at(9));
    state.lose();
    state.make_stale();
    state.refresh(&of(&attr(20, 8, 0o104_755)));
    assert_eq!((state.size(), state.sent_size(), state.truncations()), (20, 20, 8));
    assert_eq!((state.opens(), state.losses(), state.lost_end()), (1, 1, 300));
    assert!(state.has_set_id() && !state.has_clean_tail() && !state.is_stale() && state.is_lost());
}

#[test]
#[should_panic(expected = "a change is made to a state that is known")]
fn a_stale_state_takes_no_write() {
    let mut state = state();
    state.make_stale();
    state.wrote(1, at(1));
}

#[test]
fn set_id_bits_fall_only_by_the_request_that_drops_them() {
    for (before, mode, dropped, after) in [
        (0o104_755, 0o100_755, true, false),
        // The reply to an older request, which arrives late.
        (0o104_755, 0o100_755, false, true),
        (0o100_755, 0o104_755, false, true),
        (0o100_755, 0o104_755, true, true),
        (0o100_755, 0o100_755, false, false),
    ] {
        let mut state = of(&attr(0, 0, before));
        state.mode_set(mode, dropped);
        assert_eq!(state.has_set_id(), after, "{before:o} {mode:o} {dropped}");
    }
}

#[test]
fn a_state_is_kept_while_something_needs_it() {
    type Need = fn(&mut FileState);
    let needs: [(&str, Need, bool); 7] = [
        ("nothing", |_| {}, false),
        ("a handle", FileState::open, true),
        ("an unsynced write", |state| state.wrote(1, at(1)), true),
        ("a change that was sent", |state| state.sent(Change::default()), true),
        ("a loss", FileState::lose, true),
        ("a loss that was reported", |state| (state.lose(), state.reported()).1, false),
        ("a mapping alone", |state| state.set_mapped(true), false),
    ];
    for (what, need, is_kept) in needs {
        let files = Files::default();
        let held = files.get_or_make(FileId::of_numbers(0, 5), state);
        need(&mut held.borrow_mut());
        files.forget_idle(FileId::of_numbers(0, 5));
        assert!(files.contains(FileId::of_numbers(0, 5)), "{what}: an operation uses it");
        drop(held);
        files.forget_idle(FileId::of_numbers(0, 5));
        assert_eq!(files.contains(FileId::of_numbers(0, 5)), is_kept, "{what}");
    }
}

#[test]
fn files_are_found_in_order_and_forgotten_when_idle() {
    let files = Files::default();
    for ino in [9, 3, 7] {
        files.get_or_make(FileId::of_numbers(0, ino), state).borrow_mut().wrote(ino, at(1));
    }
    files.with(FileId::of_numbers(0, 7), FileState::open);
    assert_eq!(
        files.select(|state| state.has_unsynced_writes()),
        [FileId::of_numbers(0, 3), FileId::of_numbers(0, 7), FileId::of_numbers(0, 9)]
    );
    assert_eq!(files.select(|state| state.opens() > 0), [FileId::of_numbers(0, 7)]);
    let sent = files.with(FileId::of_numbers(0, 3), |state| state.clone()).unwrap();
    files.with(FileId::of_numbers(0, 3), |state| state.synced(&sent));
    [3, 7].into_iter().for_each(|ino| files.forget_idle(FileId::of_numbers(0, ino)));
    assert!(
        !files.contains(FileId::of_numbers(0, 3)) && files.contains(FileId::of_numbers(0, 7)),
        "an open file stays"
    );
    assert_eq!(files.with(FileId::of_numbers(0, 3), |_| ()), None);
    let mut seen = Vec::new();
    files.for_each(|ino, _| seen.push(ino));
    seen.sort_unstable();
    assert_eq!(seen, [FileId::of_numbers(0, 7), FileId::of_numbers(0, 9)]);
    assert!(!files.is_empty());
}

#[test]
fn counts_of_handles_do_not_go_below_zero() {
    let mut state = state();
    state.close();
    state.count_writer(false);
    assert_eq!((state.opens(), state.is_written_by_pages()), (0, false));
    state.open();
    state.count_writer(true);
    state.set_mapped(true);
    assert!(state.is_written_by_pages() && state.is_mapped());
    assert_eq!(state.kernel_is_gone(), 1);
    assert!(!state.is_written_by_pages(), "no kernel has pages any more");
}
