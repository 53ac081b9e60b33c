//! Tests of direct writes beside programs that store into mapped pages of the same file, on one mount or two.

use crate::remote::{Way, make, on_machine};
use crate::shared::{end, hides_all, open, several};
use penstock_base::{Env, FileId, LocalBoxFuture};
use penstock_client::{Client, KernelCache, Purpose, Staged};
use penstock_wire::data::SpaceChange;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::Notify;

const PAGE: usize = 4096;
const PAGES: usize = 2;
/// Number of programs that store. Each owns eight bytes of every page.
const STORERS: usize = 2;
const WRITERS: usize = 2;

#[derive(Clone)]
enum Page {
    Absent,
    /// Locked for a request, or to be dropped.
    Locked,
    Present {
        bytes: Vec<u8>,
        changed: bool,
    },
}

/// Model of a kernel with one file that programs have mapped and write to.
struct Kernel {
    env: Env,
    client: Weak<Client>,
    file: FileId,
    pages: RefCell<[Page; PAGES]>,
    unlocked: Notify,
    ended: Cell<usize>,
}

/// The bytes of a page that belong to one program.
fn place(who: usize) -> Range<usize> {
    who * 8..who * 8 + 8
}

impl Kernel {
    fn set(&self, page: usize, to: Page) {
        self.pages.borrow_mut()[page] = to;
        self.unlocked.notify_waiters();
    }

    /// Locks a page, and returns its state before.
    async fn lock(&self, page: usize) -> Page {
        loop {
            let unlocked = self.unlocked.notified();
            let found = std::mem::replace(&mut self.pages.borrow_mut()[page], Page::Locked);
            if !matches!(found, Page::Locked) {
                return found;
            }
            unlocked.await;
        }
    }

    /// Returns the page as a program that touches it finds it, and leaves it locked.
    async fn fault(&self, client: &Client, page: usize) -> (Vec<u8>, bool) {
        match self.lock(page).await {
            Page::Present { bytes, changed } => (bytes, changed),
            _ => {
                let at = (page * PAGE) as u64;
                let hold = client.hold_to_fill(self.file, at..at + PAGE as u64).await.unwrap();
                let parts = hold.reader().await.read_pages(at, PAGE as u64).await.unwrap();
                self.env.sleep(Duration::from_micros(30)).await;
                hold.serves(at..at + PAGE as u64);
                (parts.iter().flat_map(|part| part.to_vec()).collect(), false)
            }
        }
    }

    async fn write_back(&self, client: &Client, page: usize, bytes: &[u8]) {
        let at = (page * PAGE) as u64;
        let hold = client.hold(self.file, Purpose::Page).await.unwrap();
        hold.writer().await.write_page(at, Staged::of(at, bytes)).await.unwrap();
        drop(hold);
    }

    async fn drop_page(&self, client: &Client, page: usize) {
        if let Page::Present { bytes, changed: true } = self.lock(page).await {
            self.write_back(client, page, &bytes).await;
        }
        self.set(page, Page::Absent);
    }

    /// A program stores its number into its bytes again and again. It must always find them as it left them.
    async fn stores(self: Rc<Self>, client: Rc<Client>, who: usize, rounds: u64) {
        let mut last = [0; PAGES];
        for round in 1..=rounds {
            let page = (round as usize / 3 + who) % PAGES;
            self.env.sleep(Duration::from_micros(round * 7 % 40)).await;
            let (mut bytes, mut changed) = self.fault(&client, page).await;
            assert_eq!(bytes[place(who)], u64::to_le_bytes(last[page]), "store {round} of {who}");
            if round % 5 == 0 && changed {
                self.write_back(&client, page, &bytes).await;
                changed = false;
            } else {
                (last[page], changed) = (round, true);
                bytes[place(who)].copy_from_slice(&round.to_le_bytes());
            }
            self.set(page, Page::Present { bytes, changed });
        }
        self.ended.set(self.ended.get() + 1);
    }

    /// A program writes its bytes directly, or punches them out. It must always find its last write.
    async fn writes(self: Rc<Self>, client: Rc<Client>, who: usize, rounds: u64) {
        for round in 1..=rounds {
            let page = (round as usize / 2 + who) % PAGES;
            self.env.sleep(Duration::from_micros(round * 11 % 50)).await;
            let at = (page * PAGE + place(who).start) as u64;
            self.drop_page(&client, page).await;
            self.env.sleep(Duration::from_micros(round % 3 * 20)).await;
            let written = if round % 4 == 0 { 0 } else { round };
            if written == 0 {
                client.change_space(self.file, at, 8, SpaceChange::Punch, true).await.unwrap();
            } else {
                let hold = client.hold(self.file, Purpose::Write).await.unwrap();
                let bytes = Staged::of(at, &written.to_le_bytes());
                let unseen = hold.writer().await.write_direct(at, bytes).await.unwrap();
                if let Some(unseen) = unseen {
                    hold.drop_old_pages(unseen).await;
                }
            }
            let (bytes, changed) = self.fault(&client, page).await;
            assert_eq!(bytes[place(who)], written.to_le_bytes(), "write {round} of {who}");
            self.set(page, Page::Present { bytes, changed });
        }
        self.ended.set(self.ended.get() + 1);
    }
}

impl KernelCache for Kernel {
    fn drop_pages(&self, _ino: FileId, bytes: Range<u64>) -> LocalBoxFuture<'_, ()> {
        let client = self.client.upgrade().unwrap();
        let pages = bytes.start as usize / PAGE..PAGES.min(bytes.end.div_ceil(PAGE as u64) as usize);
        Box::pin(async move {
            for page in pages {
                self.drop_page(&client, page).await;
            }
        })
    }

    hides_all!();

    fn names_expire(&self) -> LocalBoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

fn stores_and_writes(seed: u64, clients: usize) {
    on_machine(seed, async |_, machine| {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, clients).await;
        let mine = clients[clients.len().min(2) - 1].clone();
        let file = make(&mine, "file").await.unwrap();
        mine.write(file, 0, &[0; PAGES * PAGE]).await.unwrap();
        let kernel = Rc::new(Kernel {
            env: machine.env.clone(),
            client: Rc::downgrade(&mine),
            file,
            pages: RefCell::new([const { Page::Absent }; PAGES]),
            unlocked: Notify::new(),
            ended: Cell::new(0),
        });
        mine.set_kernel_cache(Some(kernel.clone()));
        mine.note_open_for_writing(file, true);
        for who in 0..STORERS {
            machine.env.spawn("stores", Box::pin(kernel.clone().stores(mine.clone(), who, 2000)));
        }
        for who in STORERS..STORERS + WRITERS {
            machine.env.spawn("writes", Box::pin(kernel.clone().writes(mine.clone(), who, 300)));
        }
        let other = match clients.get(2) {
            Some(theirs) => Some((theirs, open(theirs, "file").await)),
            None => None,
        };
        let begun = machine.env.now();
        while kernel.ended.get() < STORERS + WRITERS {
            assert!(machine.env.now() - begun < Duration::from_secs(600), "they come to an end");
            machine.env.sleep(Duration::from_millis(7)).await;
            if let Some((theirs, other)) = &other {
                theirs.read(*other, 0, 100).await.unwrap();
            }
        }
        mine.note_open_for_writing(file, false);
        mine.set_kernel_cache(None);
        mine.release(file).await.unwrap();
        if let Some((theirs, other)) = &other {
            theirs.release(*other).await.unwrap();
        }
        end(machine, clients, remotes).await;
    });
}

#[test]
fn a_direct_write_and_a_store_into_one_page_are_both_kept() {
    for seed in 350..356 {
        stores_and_writes(seed, 1 + seed as usize % 2 * 2);
    }
}
