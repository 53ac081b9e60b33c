use super::*;
use futures_util::FutureExt;

const FILE: FileId = FileId::of_numbers(0, 5);

fn waiting() -> Rc<Waiting> {
    Rc::new(Waiting::new(0..0, false))
}

/// Leases of a client beside others.
fn shared() -> Rc<Leases> {
    Rc::default()
}

fn grant(leases: &Rc<Leases>, file: FileId, right: Right, grant: u64) {
    match leases.admit(file, right, Purpose::Write, &waiting()) {
        Admission::Ask(asking) => asking.granted(grant),
        _ => panic!("there is no lease yet"),
    }
}

fn uses(leases: &Rc<Leases>, file: FileId, purpose: Purpose) -> Option<LeaseUse> {
    let right = Right::to_be(purpose != Purpose::Read);
    match leases.admit(file, right, purpose, &waiting()) {
        Admission::Use(lease) => Some(lease),
        Admission::Ask(_) | Admission::Wait => None,
    }
}

#[test]
fn the_sole_client_needs_no_lease() {
    let leases = shared();
    assert!(uses(&leases, FILE, Purpose::Read).is_none());
    leases.become_alone();
    let used = uses(&leases, FILE, Purpose::Write).unwrap();
    assert!(leases.is_alone() && leases.covers(FILE) && leases.is_exclusive(FILE));
    assert!(leases.no_unleased_use().now_or_never().is_none(), "it is used");
    leases.become_shared();
    assert!(uses(&leases, FILE, Purpose::Read).is_none(), "new operations need leases");
    drop(used);
    assert!(leases.no_unleased_use().now_or_never().is_some());
    assert!(leases.was_unleased());
    leases.all_leased(leases.times_alone());
    assert!(!leases.was_unleased() && !leases.covers(FILE));
}

#[test]
fn one_operation_asks_and_the_others_wait() {
    let leases = shared();
    let Admission::Ask(asking) = leases.admit(FILE, Right::Shared, Purpose::Read, &waiting()) else {
        panic!("nobody asks yet");
    };
    assert!(matches!(leases.admit(FILE, Right::Shared, Purpose::Read, &waiting()), Admission::Wait));
    // The answer is lost with the operation that asked.
    drop(asking);
    grant(&leases, FILE, Right::Shared, 3);
    assert!(leases.covers(FILE) && !leases.is_exclusive(FILE));
    let read = uses(&leases, FILE, Purpose::Read);
    assert!(read.is_some() && uses(&leases, FILE, Purpose::Write).is_none());
    grant(&leases, FILE, Right::Exclusive, 4);
    assert!(leases.is_exclusive(FILE) && uses(&leases, FILE, Purpose::Write).is_some());
}

#[test]
fn what_is_owned_differs_in_every_period() {
    let leases = shared();
    let mut periods = penstock_base::HashSet::default();
    let mut own = |leases: &Leases, start| periods.insert(leases.owns(FILE, start).unwrap());
    leases.become_alone();
    assert!(own(&leases, 1) && !own(&leases, 1), "the same period");
    assert!(own(&leases, 2), "another start of the service");
    leases.become_shared();
    assert_eq!(leases.owns(FILE, 2), None);
    leases.become_alone();
    assert!(own(&leases, 2), "alone for the second time");
    leases.become_shared();
    grant(&leases, FILE, Right::Shared, 3);
    assert_eq!(leases.owns(FILE, 2), None, "a shared lease owns nothing");
    grant(&leases, FILE, Right::Exclusive, 4);
    assert!(own(&leases, 2));
    assert_eq!(leases.owns_all(2), None);
    assert_eq!(leases.begin_to_revoke(FILE, 4), Revocation::Begun);
    assert_eq!(leases.owns(FILE, 2), None, "it is being revoked");
}

#[test]
fn a_revocation_of_everything_voids_grants_on_their_way() {
    let leases = shared();
    let Admission::Ask(asking) = leases.admit(FILE, Right::Shared, Purpose::Read, &waiting()) else {
        panic!("nobody asks yet");
    };
    leases.void_all(7);
    asking.granted(7);
    assert!(!leases.covers(FILE) && leases.was_shared());
    grant(&leases, FILE, Right::Shared, 8);
    assert!(leases.covers(FILE));
    assert_eq!(leases.grants(), [(FILE, 8)]);
    // A new start counts from the beginning.
    leases.saw(9);
    leases.saw(4);
    assert_eq!(leases.seen(), 9);
    leases.restarted();
    assert_eq!((leases.seen(), leases.grants()), (0, vec![(FILE, 0)]));
    assert_eq!(leases.begin_to_revoke(FILE, 0), Revocation::Begun);
}

#[test]
fn many_leases_of_files_without_a_state_are_released() {
    let leases = shared();
    let most = MOST_IDLE as u64;
    for ino in 0..most {
        grant(&leases, FileId::of_numbers(0, ino), Right::Shared, ino + 1);
    }
    leases.trim(|_| false);
    assert!(leases.take_released().is_empty(), "they are not too many yet");
    let used = uses(&leases, FileId::of_numbers(0, 3), Purpose::Read);
    grant(&leases, FileId::of_numbers(0, most), Right::Shared, most + 1);
    leases.trim(|file| file == FileId::of_numbers(0, 9));
    let mut released: Vec<u64> = leases.take_released().iter().map(|released| released.ino).collect();
    released.sort_unstable();
    let expected: Vec<u64> = (0..=most).filter(|ino| ![3, 9].contains(ino)).collect();
    assert_eq!(released, expected);
    assert!(
        leases.covers(FileId::of_numbers(0, 3))
            && leases.covers(FileId::of_numbers(0, 9))
            && !leases.covers(FileId::of_numbers(0, 4))
    );
    assert!(leases.take_released().is_empty() && used.is_some());
}

#[test]
fn the_kernel_keeps_the_pages_of_a_time_alone() {
    let leases = shared();
    leases.become_alone();
    assert!(leases.keeps_pages(FILE), "there were no others");
    leases.void_all(0);
    leases.become_shared();
    leases.become_alone();
    assert!(!leases.keeps_pages(FILE), "the pages are from a time with others");
    assert!(leases.keeps_pages(FILE), "they were dropped at the first opening");
    assert!(!leases.keeps_pages(FileId::of_numbers(0, 6)));
}

#[test]
fn a_store_keeps_a_lease_that_no_operation_uses() {
    let leases = shared();
    grant(&leases, FILE, Right::Exclusive, 1);
    let used = uses(&leases, FILE, Purpose::Write).unwrap();
    used.serves(0..10);
    let store = used.store(4096..8192);
    assert_eq!(store.bytes(), 4096..8192);
    drop(used);
    let stores = |leases: &Leases| leases.with(FILE, |lease| lease.stores()) == Some(1);
    assert!(stores(&leases));
    leases.leave();
    assert!(stores(&leases), "the entry stays");
    drop(store);
    leases.leave();
    assert_eq!(leases.with(FILE, |_| ()), None);
}

#[test]
fn one_waits_until_it_is_dropped() {
    let leases = shared();
    let waiting = waiting();
    let waits = leases.wait(FILE, &waiting);
    leases.leave();
    assert_eq!(leases.with(FILE, |lease| lease.is_idle()), Some(false));
    drop(waits);
    leases.leave();
    assert_eq!(leases.with(FILE, |_| ()), None);
}

/// Regression: a revocation of everything that ended after a restart, which had made this client the sole one
/// again, hid that the kernel had pages without a lease.
#[test]
fn pages_of_a_later_time_alone_are_not_forgotten() {
    let leases = Leases::default();
    leases.become_alone();
    leases.become_shared();
    let times = leases.times_alone();
    leases.become_alone();
    leases.all_leased(times);
    assert!(leases.was_unleased(), "from the second time");
    leases.become_shared();
    leases.all_leased(leases.times_alone());
    assert!(!leases.was_unleased());
}
