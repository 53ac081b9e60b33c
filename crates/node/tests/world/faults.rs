//! Programs that fault pages in as fast as they can, while other clients want the file.

use crate::remote::{Way, make, on_machine};
use crate::shared::{end, open, several};
use penstock_base::{Env, Ino, LocalBoxFuture};
use penstock_client::{Client, KernelCache, Purpose};
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::Notify;

const PAGE: u64 = 4096;
const PAGES: usize = 16;
/// Sending a changed page before it is dropped.
const SENDING: Duration = Duration::from_millis(8);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Absent,
    /// For a request, or to be dropped.
    Locked,
    Present(u8),
}

/// What a kernel has of a file that a program has mapped.
struct Mapped {
    env: Env,
    client: Weak<Client>,
    ino: Ino,
    pages: RefCell<[Page; PAGES]>,
    unlocked: Notify,
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

    /// Stores into one page after another. Missing ones are read, with those ahead.
    async fn stores(self: Rc<Self>, client: Rc<Client>) {
        for page in (0..PAGES).cycle().take_while(|_| !self.ends.get()) {
            self.env.sleep(Duration::from_micros(10)).await;
            if self.until_unlocked(page).await != Page::Absent {
                continue;
            }
            let ahead = self.pages.borrow()[page..].iter().take_while(|page| **page == Page::Absent).count();
            self.set(page..page + ahead, Page::Locked);
            let bytes = page as u64 * PAGE..(page + ahead) as u64 * PAGE;
            let hold = client.hold_to_fill(self.ino, bytes.clone()).await.unwrap();
            let parts = client.read_held(self.ino, bytes.start, bytes.end - bytes.start).await.unwrap();
            let found: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
            hold.serves(bytes);
            for (at, contents) in found.chunks(PAGE as usize).enumerate() {
                self.set(page + at..page + at + 1, Page::Present(contents[0]));
            }
            drop(hold);
        }
    }
}

impl KernelCache for Mapped {
    fn drop_pages(&self, _ino: Ino, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        let client = self.client.upgrade().unwrap();
        let pages = (bytes.start / PAGE) as usize..PAGES.min(bytes.end.div_ceil(PAGE) as usize);
        Box::pin(async move {
            for page in pages {
                if self.until_unlocked(page).await == Page::Absent {
                    continue;
                }
                self.set(page..page + 1, Page::Locked);
                let hold = client.hold(self.ino, Purpose::Page).await.unwrap();
                self.env.sleep(SENDING).await;
                drop(hold);
                self.set(page..page + 1, Page::Absent);
            }
        })
    }

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

#[test]
fn a_program_that_faults_pages_in_keeps_no_lease() {
    on_machine(330, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 3).await;
        let ino = make(&clients[1], "file").await.unwrap();
        let other = open(&clients[2], "file").await;
        let mapped = Rc::new(Mapped {
            env: machine.env.clone(),
            client: Rc::downgrade(&clients[1]),
            ino,
            pages: RefCell::new([Page::Absent; PAGES]),
            unlocked: Notify::new(),
            ends: Cell::new(false),
        });
        let contents = |round: u8| vec![round; PAGES * PAGE as usize];
        clients[2].write(other, 0, &contents(0)).await.unwrap();
        clients[1].set_kernel_cache(Some(mapped.clone()));
        machine.env.spawn("program", Box::pin(mapped.clone().stores(clients[1].clone())));
        for round in 1..30 {
            machine.env.sleep(Duration::from_millis(20)).await;
            let asked = machine.env.now();
            clients[2].write(other, 0, &contents(round)).await.unwrap();
            let took = machine.env.now() - asked;
            // Each page is sent once before the lease is closed and once after it, and a few once more.
            assert!(took < 4 * PAGES as u32 * SENDING, "round {round}: {took:?}");
            let old = |page: &Page| matches!(page, Page::Present(seen) if *seen < round);
            assert!(!mapped.pages.borrow().iter().any(old), "round {round}: {:?}", mapped.pages.borrow());
        }
        machine.env.sleep(Duration::from_secs(1)).await;
        assert_eq!(*mapped.pages.borrow(), [Page::Present(29); PAGES], "the program reads what was written");
        mapped.ends.set(true);
        machine.env.sleep(Duration::from_secs(1)).await;
        clients[1].set_kernel_cache(None);
        clients[1].release(ino).await.unwrap();
        clients[2].release(other).await.unwrap();
        end(machine, clients, remotes).await;
    });
}
