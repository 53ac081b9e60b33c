//! Random appends, syncs and crashes, against a model of what fsync promises.

use super::service::{Service, rest};
use crate::{Client, Reported};
use penstock_base::{ErrorKind, FileId};
use penstock_sim::World;
use penstock_wire::Kind;
use penstock_wire::data::SpaceChange;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

const FILES: [FileId; 2] = [FileId::of_numbers(0, 5), FileId::of_numbers(0, 6)];
const SEEDS: u64 = 200;
const WORKERS: usize = 4;
const STEPS: usize = 60;

/// A descriptor of a file.
struct Descriptor {
    reported: Reported,
    /// Acknowledged appends were lost, and this descriptor has not reported it.
    owes: Cell<bool>,
}

/// A file as its programs know it.
struct File {
    id: FileId,
    /// The end of the appends that were acknowledged and are not lost.
    end: Cell<u64>,
    descriptors: [Descriptor; 2],
}

#[derive(Default)]
struct Counts {
    crashes: Cell<u64>,
    synced: Cell<u64>,
    failed: Cell<u64>,
}

struct Model {
    world: World,
    service: Rc<Service>,
    client: Rc<Client>,
    files: [File; 2],
    counts: Counts,
}

fn add_one(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

impl Model {
    async fn step(&self, may_crash: bool) {
        self.world.env().sleep(Duration::from_micros(self.world.below(3_000))).await;
        let file = &self.files[usize::from(self.world.below(2) == 0)];
        match self.world.below(12) {
            0..4 => self.append(file).await,
            4..8 => self.fsync(file, &file.descriptors[usize::from(self.world.below(2) == 0)]).await,
            8 => _ = self.service.call(file.id.ino.0),
            // These may fail over a crash, and report nothing that a descriptor must.
            9 => _ = self.client.session.sync_file(file.id).await,
            10 => _ = self.client.sync().await,
            _ if may_crash => self.crash(),
            _ => {}
        }
    }

    async fn append(&self, file: &File) {
        let crashes = self.counts.crashes.get();
        // After a crash meanwhile it may have been repeated, or lost: nothing is known about it.
        if let Ok(at) = self.client.append(file.id, &[7; 10]).await
            && crashes == self.counts.crashes.get()
        {
            file.end.set(file.end.get().max(at + 10));
        }
    }

    /// If no crash came meanwhile: success means that everything acknowledged before is durable, and that the
    /// descriptor owes no report.
    async fn fsync(&self, file: &File, descriptor: &Descriptor) {
        let (end, owed, crashes) = (file.end.get(), descriptor.owes.get(), self.counts.crashes.get());
        match self.client.fsync_through(file.id, &descriptor.reported).await {
            Ok(()) => {
                add_one(&self.counts.synced);
                if crashes == self.counts.crashes.get() {
                    let durable = self.service.durable_size(file.id);
                    assert!(durable >= end, "{}: {durable} of {end} bytes are durable", file.id);
                    assert!(!owed || !descriptor.owes.get(), "{}: a loss is not reported", file.id);
                }
            }
            Err(_) => {
                add_one(&self.counts.failed);
                descriptor.owes.set(false);
            }
        }
    }

    fn crash(&self) {
        self.service.crash();
        add_one(&self.counts.crashes);
        for file in &self.files {
            let left = self.service.durable_size(file.id);
            if file.end.get() > left {
                file.end.set(left);
                file.descriptors.iter().for_each(|descriptor| descriptor.owes.set(true));
            }
        }
    }
}

async fn append_sync_and_crash(world: World) -> Counts {
    let service = Service::new(&world);
    let client = Client::connect(&world.env(), service.clone(), "test").await.unwrap();
    rest(&client).await;
    for file in FILES {
        service.add(file, &[]);
        client.open(file).await.unwrap();
        client.open(file).await.unwrap();
    }
    service.make_durable();
    service.delay_most.set(Duration::from_millis(2));
    if world.below(2) == 0 {
        service.others_arrive();
    }
    let files = FILES.map(|file| {
        let descriptor = || Descriptor { reported: client.reported(file), owes: Cell::new(false) };
        File { id: file, end: Cell::new(0), descriptors: [descriptor(), descriptor()] }
    });
    let model = Model { world, service, client, files, counts: Counts::default() };
    let worker = async |number| {
        for _ in 0..STEPS {
            model.step(number == 0 || model.world.below(4) == 0).await;
        }
    };
    futures_util::future::join_all((0..WORKERS).map(worker)).await;
    model.counts
}

#[test]
fn no_fsync_succeeds_over_a_loss() {
    let [mut crashes, mut synced, mut failed] = [0; 3];
    for seed in 0..SEEDS {
        let world = World::new(seed);
        let counts = world.run(append_sync_and_crash(world.clone())).unwrap();
        crashes += counts.crashes.get();
        synced += counts.synced.get();
        failed += counts.failed.get();
        world.destroy();
    }
    assert!(crashes > SEEDS && failed > SEEDS && synced > 10 * SEEDS, "{crashes}, {failed}, {synced}");
}

/// A change fails after a part of it was done, and the file is closed. Regression: that part was kept for
/// ever, and would have been sent again over the data of another client that had got the file since.
#[test]
fn a_part_of_a_change_that_failed_is_committed_and_forgotten() {
    super::service::run(async |service, client| {
        let file = FILES[0];
        service.add(file, &[1; 20_000]);
        client.session.kept().begin();
        client.open(file).await.unwrap();
        // Whole blocks are punched, and then the ends cannot be zeroed.
        service.fail(Kind::Write, ErrorKind::NoSpace, 1);
        client.change_space(file, 100, 9_000, SpaceChange::Punch, true).await.unwrap_err();
        client.release(file).await.unwrap();
        assert!(!client.session.kept().files().is_empty() && client.session.files().is_empty());
        client.session.sync_rest().await.unwrap();
        assert_eq!(client.session.kept().files(), []);
    });
}

/// A sync is on its way when another client wants the file. Regression: the lease went while the blocks were
/// still kept, because the sync in flight had taken them over.
#[test]
fn a_lease_goes_only_when_nothing_of_the_file_is_kept() {
    super::service::run(async |service, client| {
        let file = FILES[0];
        service.add(file, &[1; 100]);
        client.session.kept().begin();
        client.open(file).await.unwrap();
        service.others_arrive();
        rest(client).await;
        client.write(file, 0, &[2; 5_000]).await.unwrap();
        client.session.sync_file(file).await.unwrap();
        service.sync_reply.set(Duration::from_secs(1));
        let other = client.clone();
        client.session.env().spawn("sync", Box::pin(async move { drop(other.sync().await) }));
        rest(client).await;
        let call = service.call(file.ino.0);
        while !service.answered.borrow().iter().any(|(number, _)| *number == call) {
            rest(client).await;
        }
        assert_eq!(client.session.kept().files(), []);
    });
}
