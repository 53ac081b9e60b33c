//! Tests of programs that fault pages in as fast as they can, while other clients want the file.

use crate::remote::{Way, make, on_machine};
use crate::shared::{end, hides_all, open, several};
use penstock_base::{Env, FileId, LocalBoxFuture};
use penstock_client::{Client, KernelCache, Purpose};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::sync::Notify;

const PAGE: u64 = 4096;
const PAGES: usize = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Absent,
    /// Locked for a request, or to be dropped.
    Locked,
    Present(u8),
}

/// Model of a kernel with one file that a program has mapped.
struct Mapped {
    env: Env,
    client: Weak<Client>,
    file: FileId,
    pages: RefCell<[Page; PAGES]>,
    unlocked: Notify,
    /// Time that it takes to send a changed page before it is dropped.
    sending: Duration,
    /// End of the file after the program's own writes.
    end: Cell<u64>,
    ends: Cell<bool>,
}

impl Mapped {
    fn set(&self, pages: Range<usize>, to: Page) {
        self.pages.borrow_mut()[pages].fill(to);
        self.unlocked.notify_waiters();
    }

    async fn until_unlocked(&self, page: usize) -> Page {
        loop {
            let unlocked = self.unlocked.notified();
            match self.pages.borrow()[page] {
                Page::Locked => {}
                state => return state,
            }
            unlocked.await;
        }
    }

    /// Stores into one page after another. Missing pages are read, together with those ahead.
    async fn stores(self: Rc<Self>, client: Rc<Client>) {
        for page in (0..PAGES).cycle().take_while(|_| !self.ends.get()) {
            self.env.sleep(Duration::from_micros(10)).await;
            if self.until_unlocked(page).await != Page::Absent {
                continue;
            }
            let ahead = self.pages.borrow()[page..].iter().take_while(|page| **page == Page::Absent).count();
            self.set(page..page + ahead, Page::Locked);
            let bytes = page as u64 * PAGE..(page + ahead) as u64 * PAGE;
            let hold = client.hold_to_fill(self.file, bytes.clone()).await.unwrap();
            let parts = hold.reader().await.read(bytes.start, bytes.end - bytes.start).await.unwrap();
            let found: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
            hold.serves(bytes);
            for (at, contents) in found.chunks(PAGE as usize).enumerate() {
                self.set(page + at..page + at + 1, Page::Present(contents[0]));
            }
            drop(hold);
        }
    }

    /// Makes the file longer.
    async fn grows(self: Rc<Self>, client: Rc<Client>) {
        while !self.ends.get() {
            self.env.sleep(Duration::from_micros(700)).await;
            client.write(self.file, self.end.get(), b"grown").await.unwrap();
            self.end.set(self.end.get() + 5);
        }
    }
}

impl KernelCache for Mapped {
    fn drop_pages(&self, _ino: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        let client = self.client.upgrade().unwrap();
        let pages = (bytes.start / PAGE) as usize..PAGES.min(bytes.end.div_ceil(PAGE) as usize);
        Box::pin(async move {
            for page in pages {
                if self.until_unlocked(page).await == Page::Absent {
                    continue;
                }
                self.set(page..page + 1, Page::Locked);
                let hold = client.hold(self.file, Purpose::Page).await.unwrap();
                self.env.sleep(self.sending).await;
                drop(hold);
                self.set(page..page + 1, Page::Absent);
            }
        })
    }

    hides_all!();

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// One program stores into a file through pages and another makes the file longer, while a second client
/// writes the file again and again.
fn others_have_their_turn(seed: u64, sending: Duration) {
    on_machine(330 + seed, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let file = make(&clients[1], "file").await.unwrap();
        let other = open(&clients[2], "file").await;
        let mapped = Rc::new(Mapped {
            env: machine.env.clone(),
            client: Rc::downgrade(&clients[1]),
            file,
            pages: RefCell::new([Page::Absent; PAGES]),
            unlocked: Notify::new(),
            sending,
            end: Cell::new(PAGES as u64 * PAGE),
            ends: Cell::new(false),
        });
        let contents = |round: u8| vec![round; PAGES * PAGE as usize];
        clients[2].write(other, 0, &contents(0)).await.unwrap();
        clients[1].set_kernel_cache(Some(mapped.clone()));
        machine.env.spawn("stores", Box::pin(mapped.clone().stores(clients[1].clone())));
        machine.env.spawn("grows", Box::pin(mapped.clone().grows(clients[1].clone())));
        for round in 1..30 {
            machine.env.sleep(Duration::from_millis(20)).await;
            let asked = machine.env.now();
            clients[2].write(other, 0, &contents(round)).await.unwrap();
            let took = machine.env.now() - asked;
            // Each page is sent once before the lease is closed and once after it, and a few once more. All
            // of it, and the size, is made durable before the lease goes.
            assert!(took < 9 * PAGES as u32 * sending, "round {round}: {took:?}");
            let old = |page: &Page| matches!(page, Page::Present(seen) if *seen < round);
            assert!(!mapped.pages.borrow().iter().any(old), "round {round}: {:?}", mapped.pages.borrow());
            let end = mapped.end.get();
            assert!(
                clients[2].get_attr(other).await.unwrap().size >= end,
                "round {round}: it was {end} long"
            );
        }
        machine.env.sleep(Duration::from_secs(1)).await;
        assert_eq!(*mapped.pages.borrow(), [Page::Present(29); PAGES], "the program reads what was written");
        mapped.ends.set(true);
        machine.env.sleep(Duration::from_secs(1)).await;
        clients[1].set_kernel_cache(None);
        clients[1].release(file).await.unwrap();
        clients[2].release(other).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

#[test]
fn programs_that_fault_pages_in_keep_no_lease() {
    // Some take as long as the client, when it drops pages, waits before it lets requests in.
    for (seed, micros) in [8000, 5000, 5000, 4990, 2500].into_iter().enumerate() {
        others_have_their_turn(seed as u64, Duration::from_micros(micros));
    }
}

/// Model of a kernel that takes some time to drop all pages, and completes a piece as soon as a request was
/// let in.
struct Slow {
    env: Env,
    drops: Cell<u32>,
    begun: Notify,
}

impl KernelCache for Slow {
    fn drop_pages(&self, _ino: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            self.drops.set(self.drops.get() + 1);
            self.begun.notify_waiters();
            if bytes == (0..u64::MAX) {
                return self.env.sleep(Duration::from_millis(20)).await;
            }
            // Completes when it is polled once more after the time in which no request is let in.
            let mut looks = 0;
            let done = |_: &mut Context<'_>| {
                looks += 1;
                if looks < 3 { Poll::Pending } else { Poll::Ready(()) }
            };
            poll_fn(done).await;
        })
    }

    hides_all!();

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// A write is let in because a page that is being dropped may be locked for it, and the page is dropped at
/// the same moment. The write must be served before the lease is given back, or after it has been acquired
/// again.
#[test]
fn a_lease_does_not_go_under_a_request_that_was_let_in() {
    on_machine(340, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let file = make(&clients[1], "file").await.unwrap();
        let other = open(&clients[2], "file").await;
        let slow = Rc::new(Slow { env: machine.env.clone(), drops: Cell::new(0), begun: Notify::new() });
        clients[1].set_kernel_cache(Some(slow.clone()));
        let inside = Rc::new(Cell::new(false));
        let mut met = 0;
        for round in 0..10 {
            // The client must sync this write before it gives its lease back.
            clients[1].write(file, 0, &[1; 100]).await.unwrap();
            let (client, is_inside, kernel) = (clients[1].clone(), inside.clone(), slow.clone());
            let env = machine.env.clone();
            let work = async move {
                kernel.begun.notified().await;
                let hold = client.hold_to_fill(file, 0..PAGE).await.unwrap();
                hold.serves(0..PAGE);
                drop(hold);
                kernel.begun.notified().await;
                let hold = client.hold(file, Purpose::Write).await.unwrap();
                is_inside.set(true);
                env.sleep(Duration::from_millis(50)).await;
                is_inside.set(false);
                drop(hold);
            };
            machine.env.spawn("work", Box::pin(work));
            let drops = slow.drops.get();
            let hold = clients[2].hold(other, Purpose::Write).await.unwrap();
            // A page was served meanwhile, and dropped.
            met += u64::from(slow.drops.get() > drops + 1);
            assert!(!inside.get(), "round {round}: two have the right to write");
            drop(hold);
            machine.env.sleep(Duration::from_secs(1)).await;
        }
        assert!(met > 5, "{met} rounds met the moment");
        clients[1].set_kernel_cache(None);
        clients[1].release(file).await.unwrap();
        clients[2].release(other).await.unwrap();
        end(machine, clients, remotes).await;
    });
}

/// Model of a kernel that does not drop its pages within the time that it gets.
struct Stubborn {
    env: Env,
    /// For each lapse: true if it still lasted when that time was over.
    lasted: RefCell<Vec<bool>>,
}

impl KernelCache for Stubborn {
    fn drop_pages(&self, _ino: FileId, _bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }

    fn hide_pages<'a>(
        &'a self,
        _files: Vec<(FileId, u64)>,
        within: Duration,
        lasts: &'a dyn Fn() -> bool,
    ) -> LocalBoxFuture<'a, ()> {
        Box::pin(async move {
            self.env.sleep(within).await;
            self.lasted.borrow_mut().push(lasts());
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// The service answers again while a kernel cannot drop its pages, or it does not answer. Only in the second
/// case the mount has to end.
#[test]
fn a_lapse_that_is_over_ends_no_mount() {
    on_machine(341, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let file = make(&clients[1], "file").await.unwrap();
        let kernel = Rc::new(Stubborn { env: machine.env.clone(), lasted: RefCell::default() });
        clients[1].set_kernel_cache(Some(kernel.clone()));
        let lease = penstock_session::LEASE;
        // Half of the lease time is used up, and the next quarter is for the kernel.
        for (away, lasted) in [(lease * 5 / 8, false), (lease * 7 / 8, true)] {
            clients[1].get_attr(file).await.unwrap();
            let server = way.server.borrow_mut().take();
            way.links.borrow().iter().for_each(|link| link.cut());
            machine.env.sleep(away).await;
            *way.server.borrow_mut() = server;
            machine.env.sleep(lease).await;
            assert_eq!(kernel.lasted.take(), [lasted], "away for {away:?}");
        }
        clients[1].get_attr(file).await.unwrap();
        clients[1].set_kernel_cache(None);
        clients[1].release(file).await.unwrap();
        end(machine, clients, remotes).await;
    });
}
