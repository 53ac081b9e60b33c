//! Tests of Hello on a store whose flushes take their time.

use super::memory::MemChunks;
use crate::MetaTarget;
use crate::store::NewStore;
use penstock_base::env::random_id;
use penstock_base::{Env, Gate, LocalBoxFuture};
use penstock_kv::{Kv, KvError, KvRead, MemKv, Row, Usage, WriteSet};
use penstock_sim::World;
use penstock_wire::metadata::{HelloReply, HelloRequest};
use penstock_wire::{Header, Kind};
use prost::Message;
use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

/// A store in memory whose flushes take a while, as those of a suspended array do.
struct SlowKv {
    kv: Rc<MemKv>,
    env: Env,
    flush_takes: Cell<Duration>,
}

impl KvRead for SlowKv {
    fn get(&self, key: Vec<u8>) -> LocalBoxFuture<'_, Result<Option<Vec<u8>>, KvError>> {
        self.kv.get(key)
    }

    fn get_many(&self, keys: Vec<Vec<u8>>) -> LocalBoxFuture<'_, Result<Vec<Option<Vec<u8>>>, KvError>> {
        self.kv.get_many(keys)
    }

    fn scan(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        most: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Row>, KvError>> {
        self.kv.scan(from, until, most)
    }

    fn keys(
        &self,
        from: Vec<u8>,
        until: Vec<u8>,
        most: usize,
    ) -> LocalBoxFuture<'_, Result<Vec<Vec<u8>>, KvError>> {
        self.kv.keys(from, until, most)
    }
}

impl Kv for SlowKv {
    fn snapshot(&self) -> LocalBoxFuture<'_, Result<Rc<dyn KvRead>, KvError>> {
        self.kv.snapshot()
    }

    fn commit(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.kv.commit(writes)
    }

    fn commit_durable(&self, writes: WriteSet) -> LocalBoxFuture<'_, Result<(), KvError>> {
        self.kv.commit_durable(writes)
    }

    fn flush(&self) -> LocalBoxFuture<'_, Result<(), KvError>> {
        Box::pin(async move {
            self.env.sleep(self.flush_takes.get()).await;
            self.kv.flush().await
        })
    }

    fn usage(&self) -> Usage {
        self.kv.usage()
    }
}

/// Regression: the lease time of a session began before the flush that makes it durable. If that took longer,
/// the session had ended when its client got the reply.
#[test]
fn a_session_whose_hello_waits_for_its_flush_is_not_silent() {
    let world = World::new(1);
    let run = world.run(async {
        let env = world.env();
        let mem = MemKv::new(64 << 20);
        let kv = Rc::new(SlowKv { kv: mem.clone(), env: env.clone(), flush_takes: Cell::default() });
        let (chunks, gate) = (MemChunks::new(&mem, 1), Rc::new(Gate::default()));
        let meta = MetaTarget::open(
            &env,
            kv.clone(),
            chunks,
            super::bed::alone(),
            gate,
            NewStore { name: "test", ..NewStore::default() },
        )
        .await
        .unwrap();
        let (looks, clock) = (meta.clone(), env.clone());
        let end_silent = async move {
            while !looks.is_stopped() {
                clock.sleep(Duration::from_secs(6)).await;
                let all = looks.clients().sessions().into_iter();
                let silent: Vec<u64> = all.filter(|info| info.is_silent()).map(|info| info.id).collect();
                for session in silent {
                    looks.end_if_silent(session).await.unwrap();
                }
            }
        };
        env.spawn("session leases", Box::pin(end_silent));
        kv.flush_takes.set(Duration::from_secs(40));
        let hello = HelloRequest::of_mount(random_id(&env)).encode_to_vec();
        let reply = meta.hello(0, &hello, true).await.unwrap();
        kv.flush_takes.set(Duration::ZERO);
        let session = HelloReply::decode(&reply[..]).unwrap().session;
        // The reply reaches the client, which pings at once.
        env.sleep(Duration::from_millis(1)).await;
        let ping = Header { session, ..Header::request(Kind::Ping) };
        meta.clients().hear(&ping).expect("the session lives: its client has waited until now");
        meta.stop();
    });
    run.unwrap();
    world.destroy();
}
