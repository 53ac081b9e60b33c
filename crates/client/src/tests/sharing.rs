//! Leases with other clients, and the kernel's pages.

use super::service::{Service, rest, run};
use crate::{Attr, Client, KernelCache, Ownership, Purpose, Staged};
use penstock_base::{Env, ErrorKind, FileId, LocalBoxFuture};
use penstock_sim::World;
use penstock_wire::{Failure, Frame, Kind, Transport};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Semaphore;

const FILE: FileId = FileId::of_numbers(0, 5);
const OTHER: FileId = FileId::of_numbers(0, 6);
const PAGE: u64 = 4096;

/// A kernel that records which pages it dropped.
#[derive(Default)]
struct Kernel {
    dropped: RefCell<Vec<(FileId, Range<u64>)>>,
    expired: Cell<u32>,
    /// A file whose pages it drops only with a permit.
    slow: Option<(FileId, Semaphore)>,
    /// Time after which its names have expired.
    names: Option<(Env, Duration)>,
}

impl KernelCache for Kernel {
    fn drop_pages(&self, file: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            if let Some((_, permits)) = self.slow.as_ref().filter(|(slow, _)| *slow == file) {
                permits.acquire().await.unwrap().forget();
            }
            self.dropped.borrow_mut().push((file, bytes));
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        self.expired.set(self.expired.get() + 1);
        Box::pin(async {
            if let Some((env, time)) = &self.names {
                env.sleep(*time).await;
            }
        })
    }

    fn hide_pages<'a>(
        &'a self,
        _files: Vec<(FileId, u64)>,
        _within: Duration,
        _lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()> {
        Box::pin(async {})
    }
}

impl Kernel {
    /// A kernel that drops the pages of `file` only with a permit.
    fn slow(file: FileId) -> Rc<Self> {
        Rc::new(Self { slow: Some((file, Semaphore::new(0))), ..Self::default() })
    }

    /// Lets it drop the pages of the slow file from now on.
    fn go_on(&self) {
        self.slow.as_ref().unwrap().1.add_permits(100);
    }
}

async fn share(service: &Service, client: &Client) {
    service.others_arrive();
    rest(client).await;
    assert!(!client.is_alone());
}

async fn until_alone(client: &Client) {
    while !client.is_alone() {
        client.session.env().sleep(Duration::from_millis(1)).await;
    }
}

/// The client's mount ends and all other clients leave, then a program opens the file through the next mount.
async fn mount_again_alone(service: &Service, client: &Client) {
    client.set_kernel_cache(None);
    client.release(FILE).await.unwrap();
    client.leave().await.unwrap();
    service.become_alone();
    until_alone(client).await;
    client.open(FILE).await.unwrap();
}

/// Appends 20,000 times, with a pause between. Returns the size afterwards; `size` is that before.
async fn append_often(client: &Client, mut size: u64, pause: Duration) -> u64 {
    for number in 0..20_000 {
        let at = client.append(FILE, &[7; 100]).await.unwrap();
        assert_eq!(at, size, "append {number} found an earlier end");
        size = at + 100;
        client.session.env().sleep(pause).await;
    }
    size
}

#[test]
fn a_client_that_is_not_alone_any_more_syncs_and_drops_its_pages() {
    run(async |service, client| {
        let kernel = Rc::new(Kernel::default());
        client.set_kernel_cache(Some(kernel.clone()));
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.write(FILE, 0, b"new").await.unwrap();
        share(service, client).await;
        assert!(service.bytes(FILE).starts_with(b"new"), "the other client reads it");
        assert_eq!(*kernel.dropped.borrow(), [(FILE, 0..u64::MAX)]);
        assert_eq!((kernel.expired.get(), client.was_shared()), (1, true));
        assert_eq!(*service.answered.borrow(), [(1, true)]);
        // The state is fetched again: the other client has made the file longer.
        service.change(FILE, |attr| attr.size = 300);
        assert_eq!(client.hold(FILE, Purpose::Read).await.unwrap().size().await.unwrap(), 300);
    });
}

/// Regression: a mount went on to use attributes for seconds after its session had been ended.
#[test]
fn nothing_is_cached_once_the_session_has_ended() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        share(service, client).await;
        let leased = Attr { ino: FILE.ino.0, lease: 5, ..Attr::default() };
        client.session.leases().take_attributes(&leased, client.session.env().now());
        assert!(client.caches_attributes(&leased) && client.caches_names(FILE, Some(5)));
        service.fail(Kind::GetAttr, ErrorKind::Ended, 1);
        assert_eq!(client.get_attr(FILE).await.unwrap_err().kind, ErrorKind::Ended);
        assert!(!client.caches_attributes(&leased) && !client.caches_names(FILE, Some(5)));
    });
}

#[test]
fn a_lease_that_is_revoked_goes_after_its_users() {
    run(async |service, client| {
        let kernel = Rc::new(Kernel::default());
        client.set_kernel_cache(Some(kernel.clone()));
        service.add(FILE, &[1; 100]);
        share(service, client).await;
        let hold = client.hold(FILE, Purpose::Write).await.unwrap();
        hold.writer().await.write(0, Staged::of(0, b"new")).await.unwrap();
        assert!(client.owns(FILE).is_some() && client.owns_all().is_none());
        let number = service.call(FILE.ino.0);
        rest(client).await;
        let is_answered = || service.answered.borrow().iter().any(|(answered, _)| *answered == number);
        assert!(!is_answered() && client.owns(FILE).is_none(), "an operation uses it");
        hold.serves(0..PAGE);
        drop(hold);
        rest(client).await;
        assert!(is_answered() && service.bytes(FILE).starts_with(b"new"));
        // All pages once, and then those that were served meanwhile.
        assert_eq!(*kernel.dropped.borrow(), [(FILE, 0..u64::MAX), (FILE, 0..PAGE)]);
        // The next operation asks for another lease.
        client.read(FILE, 0, 3).await.unwrap();
    });
}

#[test]
fn writes_that_cannot_be_synced_are_lost_with_the_lease() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        share(service, client).await;
        client.write(FILE, 0, b"new").await.unwrap();
        service.fail(Kind::Commit, ErrorKind::NoSpace, 1000);
        let number = service.call(FILE.ino.0);
        client.session.env().sleep(Duration::from_secs(11)).await;
        rest(client).await;
        assert!(service.answered.borrow().contains(&(number, false)), "the other client hears of it");
        service.fail(Kind::Commit, ErrorKind::NoSpace, 0);
        assert_eq!(client.fsync(FILE).await.unwrap_err().errno, 5);
        client.fsync(FILE).await.unwrap();
    });
}

#[test]
fn a_direct_write_is_acknowledged_after_older_pages_are_gone() {
    run(async |service, client| {
        let kernel = Rc::new(Kernel::default());
        client.set_kernel_cache(Some(kernel.clone()));
        service.add(FILE, &[1; 8192]);
        client.open(FILE).await.unwrap();
        client.note_open_for_writing(FILE, true);
        let hold = client.hold(FILE, Purpose::Write).await.unwrap();
        let unseen = hold.writer().await.write_direct(0, Staged::of(0, b"one")).await.unwrap();
        assert!(unseen.is_none(), "the kernel has read nothing");
        hold.reader().await.read_pages(0, PAGE).await.unwrap();
        let unseen = hold.writer().await.write_direct(1, Staged::of(1, b"two")).await.unwrap();
        assert!(client.has_unseen_writes(FILE));
        // The kernel writes an older page back, which must not undo the write.
        let page = client.hold(FILE, Purpose::Page).await.unwrap();
        page.writer().await.write_page(0, Staged::of(0, &[9; 4096])).await.unwrap();
        let store = hold.drop_old_pages(unseen.unwrap()).await;
        assert_eq!((store.bytes(), &kernel.dropped.borrow()[..]), (1..4, &[(FILE, 1..4)][..]));
        assert!(!client.has_unseen_writes(FILE));
        let found = penstock_base::buf::gather(&client.read(FILE, 0, 5).await.unwrap());
        assert_eq!(found[..], [9, b't', b'w', b'o', 9]);
    });
}

#[test]
fn a_page_behind_the_end_is_not_written_back() {
    run(async |service, client| {
        service.add(FILE, &[1; 5000]);
        let hold = client.hold(FILE, Purpose::Page).await.unwrap();
        for offset in [4096, 8192] {
            hold.writer().await.write_page(offset, Staged::of(offset, &[7; 4096])).await.unwrap();
        }
        drop(hold);
        client.fsync(FILE).await.unwrap();
        let expected = [vec![1; 4096], vec![7; 904]].concat();
        assert_eq!(service.bytes(FILE), expected, "the file does not grow");
    });
}

/// The service starts again while the client gives up everything for a call of the start before.
#[test]
fn an_answer_to_an_earlier_start_is_none_to_the_present_one() {
    const LATE: FileId = FileId::of_numbers(0, 6);
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        service.add(LATE, &[1; 100]);
        client.open(FILE).await.unwrap();
        client.open(LATE).await.unwrap();
        client.write(FILE, 0, b"new").await.unwrap();
        service.fail(Kind::Commit, ErrorKind::NoSpace, 5);
        // Number 1: as the first call that a restart makes to the first session.
        service.others_arrive();
        rest(client).await;
        // It still gets leases, until it has answered.
        client.write(LATE, 0, b"late").await.unwrap();
        assert!(client.owns(LATE).is_some());
        service.restart();
        client.session.env().sleep(Duration::from_secs(5)).await;
        assert_eq!(
            *service.answered.borrow(),
            [],
            "the present start has asked nothing; owns {:?}",
            client.owns(LATE)
        );
    });
}

/// A call of an earlier start of the service voids no grant of the present one, which counts anew.
#[test]
fn a_call_of_an_earlier_start_voids_no_grant_of_the_present_one() {
    run(async |service, client| {
        let files: Vec<FileId> = (100..180).map(|ino| FileId::of_numbers(0, ino)).collect();
        files.iter().for_each(|file| service.add(*file, &[1; 100]));
        share(service, client).await;
        service.next_grant.set(10_000);
        for file in &files {
            client.open(*file).await.unwrap();
            client.write(*file, 0, b"new").await.unwrap();
        }
        // All are given up, 64 at a time, and the first ones take a while.
        service.fail(Kind::Commit, ErrorKind::NoSpace, 64 * 3);
        service.call(0);
        rest(client).await;
        service.restart();
        service.next_grant.set(1);
        client.session.env().sleep(Duration::from_secs(20)).await;
        for file in &files {
            let before = service.next_grant.get();
            client.write(*file, 0, b"again").await.unwrap();
            let asked = service.next_grant.get() - before;
            assert!(asked <= 1, "inode {file}: the service was asked {asked} times for a lease");
        }
    });
}

/// A lease is being revoked for another client when the service starts again, and this client is the only
/// one at the next start: what it writes from then on is not lost.
#[test]
fn a_revocation_of_an_earlier_start_loses_no_write_of_the_present_one() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        share(service, client).await;
        client.write(FILE, 0, b"new").await.unwrap();
        // The first attempt at a sync fails, and the next one follows after 200 ms.
        service.fail(Kind::Commit, ErrorKind::NoSpace, 1);
        service.call(FILE.ino.0);
        rest(client).await;
        service.restart_alone();
        until_alone(client).await;
        // The restart loses the write that was not synced, and that is told.
        client.fsync(FILE).await.unwrap_err();
        client.fsync(FILE).await.unwrap();
        // A program appends all the time.
        let size = client.hold(FILE, Purpose::Read).await.unwrap().size().await.unwrap();
        let size = append_often(client, size, Duration::ZERO).await;
        let synced = client.fsync(FILE).await;
        let zeros = service.bytes(FILE)[100..].iter().filter(|byte| **byte != 7).count();
        assert_eq!((zeros, synced), (0, Ok(())), "bytes that are not what was appended, and the fsync");
        assert_eq!(service.attr(FILE).size, size);
    });
}

/// The store is full for longer than a client that wants the file would be kept waiting. That client is gone
/// with the earlier start, so nothing is given up for it.
#[test]
fn what_was_written_at_the_present_start_is_not_counted_as_lost() {
    for everything in [false, true] {
        run(async |service, client| {
            service.add(FILE, &[1; 100]);
            client.open(FILE).await.unwrap();
            share(service, client).await;
            client.write(FILE, 0, b"new").await.unwrap();
            service.fail(Kind::Commit, ErrorKind::NoSpace, 80);
            service.call(if everything { 0 } else { FILE.ino.0 });
            rest(client).await;
            service.restart_alone();
            until_alone(client).await;
            // The loss at the restart is told, and counts once.
            let told = client.reported(FILE);
            client.session.files().with(FILE, |state| state.reported());
            client.write(FILE, 200, b"newer").await.unwrap();
            client.session.env().sleep(Duration::from_secs(30)).await;
            service.heal();
            let synced = client.fsync(FILE).await;
            assert_eq!(synced, Ok(()), "everything: {everything}, told {told:?}");
            assert_eq!(&service.bytes(FILE)[200..205], b"newer");
        });
    }
}

/// A client gives up everything for a start of the service that ends meanwhile, and is the sole one at the
/// next: what the kernel reads from then on is dropped when another client arrives.
#[test]
fn pages_of_the_present_time_alone_outlive_no_call_of_an_earlier_start() {
    const LATE: FileId = FileId::of_numbers(0, 6);
    run(async |service, client| {
        let kernel = Kernel::slow(FILE);
        client.set_kernel_cache(Some(kernel.clone()));
        service.add(FILE, &[1; 100]);
        service.add(LATE, &[1; 100]);
        client.open(FILE).await.unwrap();
        // An operation runs while another client arrives.
        let operation = client.hold(FILE, Purpose::Read).await.unwrap();
        service.others_arrive();
        rest(client).await;
        assert!(!client.is_alone());
        service.restart_alone();
        rest(client).await;
        assert!(client.is_alone(), "the other client's session did not survive the restart");
        drop(operation);
        rest(client).await;
        // The kernel reads pages of a file without a lease.
        client.open(LATE).await.unwrap();
        let hold = client.hold(LATE, Purpose::Read).await.unwrap();
        hold.reader().await.read_pages(0, 100).await.unwrap();
        hold.serves(0..100);
        drop(hold);
        kernel.go_on();
        rest(client).await;
        kernel.dropped.borrow_mut().clear();
        service.others_arrive();
        rest(client).await;
        assert!(!client.is_alone() && !service.answered.borrow().is_empty());
        assert!(
            kernel.dropped.borrow().iter().any(|(file, _)| *file == LATE),
            "everything was given up, and the kernel kept pages of {LATE}: it dropped {:?}",
            kernel.dropped.borrow()
        );
    });
}

/// A lease was granted before this client left, and arrives after that: the service has forgotten it.
#[test]
fn a_grant_from_before_the_client_left_is_void() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        share(service, client).await;
        service.lease_reply.set(Duration::from_secs(1));
        // An operation of a mount that has ended waits for its lease.
        let operation = client.clone();
        let asking = async move { drop(operation.hold(FILE, Purpose::Write).await) };
        client.session.env().spawn("operation", Box::pin(asking));
        rest(client).await;
        client.leave().await.unwrap();
        let first = service.next_grant.get();
        client.session.env().sleep(Duration::from_secs(3)).await;
        client.hold(FILE, Purpose::Write).await.unwrap();
        let owned = client.owns(FILE);
        assert!(
            matches!(owned, Some(Ownership::Lease { grant, .. }) if grant >= first),
            "the service forgot the grants before {first}: {owned:?}"
        );
    });
}

/// This client gives up everything for another one, and leaves meanwhile, because its mount ends. It takes
/// part again, alone, before the names of the mount that has ended have expired: what it writes then is not
/// lost.
#[test]
fn what_is_written_after_leaving_is_not_lost_to_a_revocation_from_before() {
    run(async |service, client| {
        let names = Some((client.session.env().clone(), Duration::from_secs(1)));
        client.set_kernel_cache(Some(Rc::new(Kernel { names, ..Kernel::default() })));
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        service.others_arrive();
        rest(client).await;
        mount_again_alone(service, client).await;
        append_often(client, 100, Duration::from_micros(100)).await;
        assert_eq!(client.fsync(FILE).await, Ok(()));
    });
}

/// The same, with a revocation of one file that waits for the kernel.
#[test]
fn what_is_written_after_leaving_is_not_lost_to_a_revocation_of_one_file() {
    run(async |service, client| {
        let kernel = Kernel::slow(FILE);
        service.add(FILE, &[1; 100]);
        share(service, client).await;
        client.set_kernel_cache(Some(kernel.clone()));
        client.open(FILE).await.unwrap();
        client.write(FILE, 0, b"new").await.unwrap();
        service.call(FILE.ino.0);
        rest(client).await;
        mount_again_alone(service, client).await;
        client.append(FILE, &[7; 100]).await.unwrap();
        kernel.go_on();
        append_often(client, 200, Duration::ZERO).await;
        assert_eq!(client.fsync(FILE).await, Ok(()));
    });
}

/// The store is full for so long that writes are lost with their lease. Regression: a request of another
/// client to sync the file, which waited meanwhile, was answered as done.
#[test]
fn a_sync_for_another_client_does_not_succeed_over_a_loss() {
    run(async |service, client| {
        service.add(FILE, &[1; 100]);
        client.open(FILE).await.unwrap();
        share(service, client).await;
        client.write(FILE, 50, &[7; 100]).await.unwrap();
        service.commit_takes.set(Duration::from_millis(150));
        service.fail(Kind::Commit, ErrorKind::NoSpace, 10_000);
        service.call(FILE.ino.0);
        let losses = || client.session.files().with(FILE, |state| state.losses()).unwrap_or(0);
        let mut asked = Vec::new();
        // One request at a time, so that one waits while the last attempt of the revocation fails.
        while losses() == 0 {
            let is_answered = |number: &u64| service.answered.borrow().iter().any(|(one, _)| one == number);
            if asked.last().is_none_or(is_answered) {
                asked.push(service.call_sync(FILE.ino.0));
            }
            client.session.env().sleep(Duration::from_millis(5)).await;
        }
        service.heal();
        client.session.env().sleep(Duration::from_secs(60)).await;
        let answered = service.answered.borrow().clone();
        let wrong: Vec<_> = asked.iter().filter(|number| !answered.contains(&(**number, false))).collect();
        assert!(asked.len() > 50 && wrong.is_empty(), "{wrong:?} of {} were answered as done", asked.len());
        // The next one finds nothing that could be lost.
        let number = service.call_sync(FILE.ino.0);
        rest(client).await;
        assert!(service.answered.borrow().contains(&(number, true)));
    });
}

/// A client that uses only names has no lease. Another one leaves it alone without having synced, and the
/// service starts again during its sync.
#[test]
fn a_client_without_leases_knows_that_it_was_not_alone() {
    run(async |service, client| {
        assert!(!client.session.leases().has_met_others());
        // As for one that joins second: it is told of the others, and asked for nothing.
        client.session.leases().leave();
        service.have_company();
        client.session.env().sleep(Duration::from_secs(1)).await;
        service.become_alone();
        until_alone(client).await;
        assert!(client.session.leases().has_met_others());
        service.restarts_at_sync.set(true);
        let error = client.sync_directory().await.unwrap_err();
        assert!(error.message.contains("other clients"), "{error}");
        assert_eq!(client.sync_directory().await, Ok(()), "it is told once");
    });
}

/// A service with a start, between the first and the second, that lived for one request, whose reply is late.
struct Late {
    service: Rc<Service>,
    arrives: Semaphore,
}

impl Transport for Late {
    fn call(&self, request: Frame) -> LocalBoxFuture<'_, Result<Frame, Failure>> {
        Box::pin(async move {
            let is_late = request.header.kind == Kind::ReadLink && self.arrives.available_permits() == 0;
            let mut reply = Transport::call(&*self.service, request).await?;
            if is_late {
                self.arrives.acquire().await.unwrap().forget();
                reply.header.generation = 77;
                self.arrives.add_permits(1);
            }
            Ok(reply)
        })
    }
}

/// Runs a test with a client at the second start of its service, not alone, while the late reply is on its
/// way.
fn run_with_late_reply(test: impl AsyncFnOnce(&Rc<Late>, &Rc<Client>)) {
    let world = World::new(1);
    let done = world.run(async {
        let service = Service::new(&world);
        let late = Rc::new(Late { service: service.clone(), arrives: Semaphore::new(0) });
        let client = Client::connect(&world.env(), late.clone(), "test").await.unwrap();
        rest(&client).await;
        service.add(FILE, &[1; 100]);
        service.add(OTHER, &[1; 100]);
        share(&service, &client).await;
        let (asks, env) = (client.clone(), world.env());
        // It is sent to the first start.
        env.spawn("late", Box::pin(async move { drop(asks.read_link(OTHER).await) }));
        rest(&client).await;
        service.restart();
        service.answered.borrow_mut().clear();
        // Longer than the interval of the periodic sync, so that the second start is seen.
        env.sleep(Duration::from_secs(6)).await;
        assert_eq!(client.session.restarts().generation(), Some(2));
        test(&late, &client).await;
        assert_eq!(client.session.restarts().generation(), Some(2));
    });
    done.unwrap();
    world.destroy();
}

/// Regression: a lease that the client kept counted as given up, or the revocation was forgotten for another
/// one that came after the late reply.
#[test]
fn a_revocation_that_a_late_reply_ends_is_asked_for_again() {
    for another_follows in [false, true] {
        run_with_late_reply(async |late, client| {
            let service = &late.service;
            let hold = client.hold(FILE, Purpose::Write).await.unwrap();
            assert!(client.owns(FILE).is_some(), "granted by the second start");
            let number = service.call(FILE.ino.0);
            let is_answered = || service.answered.borrow().iter().any(|(answered, _)| *answered == number);
            rest(client).await;
            assert!(!is_answered());
            // The late reply arrives, and the last user of the lease ends.
            late.arrives.add_permits(1);
            if another_follows {
                service.call(OTHER.ino.0);
            }
            drop(hold);
            client.session.env().sleep(Duration::from_secs(30)).await;
            let owned = client.owns(FILE);
            assert!(owned.is_none() && is_answered(), "another one: {another_follows}, owns {owned:?}");
        });
    }
}

/// Regression: a grant that had been revoked counted, because the client had forgotten that.
#[test]
fn a_grant_from_before_a_late_reply_is_void() {
    run_with_late_reply(async |late, client| {
        let service = &late.service;
        service.lease_reply.set(Duration::from_secs(2));
        let operation = client.clone();
        let asking = async move { drop(operation.hold(FILE, Purpose::Write).await) };
        client.session.env().spawn("operation", Box::pin(asking));
        rest(client).await;
        service.call(FILE.ino.0);
        let revoked = service.next_grant.get() - 1;
        rest(client).await;
        assert!(!service.answered.borrow().is_empty(), "it is revoked before it arrives");
        late.arrives.add_permits(1);
        client.session.env().sleep(Duration::from_secs(6)).await;
        let owned = client.owns(FILE);
        assert!(matches!(owned, Some(Ownership::Lease { grant, .. }) if grant > revoked), "{owned:?}");
    });
}
