//! Tests of a client that cannot reach its service for about its lease time, and stays alive.

use crate::model::make_file;
use crate::remote::{Way, mount, on_machine};
use crate::shared::Pages;
use penstock_base::FileId;
use penstock_client::{Client, Failure};
use std::cell::Cell;
use std::time::Duration;

const ESTALE: u16 = 116;
/// Longer than any wait for a lease.
const END: Duration = Duration::from_secs(200);

async fn read(client: &Client, pages: &Pages, file: FileId) -> Result<u64, Failure> {
    let bytes = pages.try_read(client, file, 8).await?;
    Ok(bytes.try_into().map_or(0, u64::from_le_bytes))
}

/// Regression: while a client received nothing, it kept using its leases, and its kernel its pages, although
/// others changed the file.
#[test]
fn a_client_that_is_cut_off_tells_nothing_old() {
    let (lost, kept) = (Cell::new(0), Cell::new(0));
    for seed in penstock_sim::seeds(700..740) {
        on_machine(seed, async |_, machine| {
            let way = Way::new(&machine);
            let (client, remote) = mount(&machine, &way).await;
            let (world, env, lease) = (&machine.world, &machine.env, penstock_session::LEASE);
            let pages = Pages::of(&client, world);
            let file = make_file(&machine, "register").await.unwrap();
            machine.client.write(file, 0, &0u64.to_le_bytes()).await.unwrap();
            machine.client.fsync(file).await.unwrap();
            client.open(file).await.unwrap();
            let acknowledged = Cell::new(0u64);
            let writer = async {
                while env.now() < END {
                    env.sleep(Duration::from_millis(world.below(3000))).await;
                    let value = acknowledged.get() + 1;
                    machine.client.write(file, 0, &value.to_le_bytes()).await.unwrap();
                    machine.client.write(file, 7 + value, b"!").await.unwrap();
                    acknowledged.set(value);
                }
            };
            let reader = async |of_size: bool| {
                while env.now() < END {
                    env.sleep(Duration::from_micros(world.below(200_000))).await;
                    let before = acknowledged.get();
                    let found = match of_size {
                        false => read(&client, &pages, file).await,
                        true => client.get_attr(file).await.map(|attr| attr.size - 8),
                    };
                    match found {
                        Ok(found) => assert!(found >= before, "seed {seed}: {found} after {before}"),
                        Err(failure) => {
                            assert_eq!(failure.errno, ESTALE, "{failure}");
                            return lost.set(lost.get() + 1);
                        }
                    }
                }
                kept.set(kept.get() + 1);
            };
            let line = async {
                env.sleep(Duration::from_millis(world.below(60_000))).await;
                let server = way.server.borrow_mut().take();
                match world.below(2) {
                    0 => way.last().stall(),
                    _ => way.last().silence(),
                }
                env.sleep(lease / 2 + Duration::from_millis(world.below(lease.as_millis() as u64))).await;
                *way.server.borrow_mut() = server;
                match world.below(2) {
                    0 => way.last().cut(),
                    _ => way.last().cut_late(Duration::from_millis(world.below(3000))),
                }
            };
            futures_util::future::join4(writer, reader(false), reader(true), line).await;
            client.set_kernel_cache(None);
            remote.close();
            machine.stop().await;
        });
    }
    assert!(lost.get() > 5 && kept.get() > 5, "{} sessions ended, {} went on", lost.get(), kept.get());
}
