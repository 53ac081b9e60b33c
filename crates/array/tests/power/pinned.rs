//! A log whose tail is pinned by data that cannot be destaged: other work goes on, and the log drains
//! afterwards.

use crate::bench::{DISK_BYTES, Machine, NOISE, SLICE_AT, Site, buf_of, spec, tags, write, write_fresh};
use crate::full::{stale_strips, write_new};
use crate::outdated::life;
use penstock_array::{ArrayError, CreateSpec, Discard, Pace};
use penstock_base::{BLOCK_BYTES, env::timeout};
use penstock_sim::SimDisk;
use std::time::Duration;

const LONG: Duration = Duration::from_secs(1200);

async fn goes_on(machine: &Machine) -> Result<(), ArrayError> {
    let work = async {
        write(machine, 5, 6).await?;
        machine.volume.flush().await
    };
    timeout(&machine.env, LONG, work).await.expect("a write ends")
}

/// Regression: the records of rebuilt strips took the log space that destage needed, and the log stayed full
/// for ever after the host had space again.
#[test]
fn a_rebuild_leaves_room_for_the_destage() {
    for (k, m, put_off) in [(4, 4, true), (4, 4, false), (6, 6, true), (4, 2, true), (8, 3, true)] {
        let segments = 28 + 4 * (m as u64).saturating_sub(4);
        let (full, new) = (k + m - 2, k + m - 1);
        let site = Site::new(CreateSpec { strip_blocks: 1, log_bytes: segments * (128 << 10), ..spec(k, m) });
        let stripes = 3000;
        let first = async |machine: &Machine| {
            write_new(machine, 0..stripes).await?;
            machine.array.close().await
        };
        life(&site, 1, &[], first).unwrap();
        let beside = async |machine: &Machine| {
            let per = machine.volume.stripe_blocks();
            // As on a host that copies on every write: no write finds space.
            let host = machine.drives[full].as_ref().unwrap();
            host.set_full(true);
            if put_off {
                write(machine, (stripes + 2) * per, 1).await?;
                machine.volume.flush().await?;
                machine.env.sleep(Duration::from_secs(20)).await;
            }
            let fill = async {
                for stripe in (stripes - 400..stripes).rev() {
                    write(machine, stripe * per, stripe).await?;
                    if stripe % 12 == 0 {
                        machine.volume.flush().await?;
                    }
                }
                Ok::<_, ArrayError>(())
            };
            timeout(&machine.env, Duration::from_secs(60), fill).await.unwrap_or(Ok(()))?;
            machine.replace(&SimDisk::new(DISK_BYTES), new, 9).await?;
            for _ in 0..12_000 {
                tags(&machine.volume, 0, 1).await?;
                machine.env.sleep(Duration::from_millis(20)).await;
            }
            host.set_full(false);
            goes_on(machine).await?;
            timeout(&machine.env, LONG, machine.array.wait_rebuilt()).await.expect("it is rebuilt");
            machine.array.close().await
        };
        life(&site, 2, &[new], beside).unwrap();
    }
}

/// Regression: writes to damaged stripes filled their share of the log, and no healthy stripe was rebuilt.
#[test]
fn damaged_stripes_keep_no_other_from_being_rebuilt() {
    for most in [20, u64::MAX] {
        let site = Site::new(spec(4, 1));
        let first = async |machine: &Machine| {
            write_new(machine, 0..120).await?;
            machine.array.close().await
        };
        life(&site, 1, &[], first).unwrap();
        let beside = async |machine: &Machine| {
            let (geo, per) = (machine.array.geometry(), machine.volume.stripe_blocks());
            for stripe in 0..40 {
                for column in 0..geo.strip_blocks {
                    let at = SLICE_AT + geo.block_at(stripe, column);
                    site.disks[1].corrupt(at / BLOCK_BYTES as u64, &NOISE);
                }
            }
            let mut taken = Vec::new();
            let fill = async {
                for number in 0..most.min(40 * u64::from(geo.strip_blocks)) {
                    let block = number % 40 * per + number / 40;
                    match write(machine, block, 7).await {
                        Ok(()) => taken.push(block),
                        Err(ArrayError::TooDamaged { .. }) => return Ok(()),
                        Err(error) => return Err(error),
                    }
                    machine.volume.flush().await?;
                }
                Ok(())
            };
            timeout(&machine.env, LONG, fill).await.expect("writes end")?;
            machine.replace(&SimDisk::new(DISK_BYTES), 4, 9).await?;
            machine.env.sleep(LONG).await;
            assert_eq!(stale_strips(machine)[4], 0, "all are whole, but for what is lost");
            // Give up the damaged stripes.
            for stripe in 0..40 {
                machine.volume.discard(stripe, 1, Discard::OnDrives).await?;
            }
            goes_on(machine).await?;
            machine.array.close().await
        };
        life(&site, 2, &[4], beside).unwrap();
    }
}

/// Regression: a batch that had waited for a full host, or for another task that waited for one, left the
/// drives to others for the same time again.
#[test]
fn a_rebuild_and_a_scrub_pause_no_longer_than_they_work() {
    let site = Site::new(CreateSpec { strip_blocks: 1, ..spec(4, 2) });
    let first = async |machine: &Machine| {
        write_new(machine, 0..400).await?;
        machine.array.close().await
    };
    life(&site, 1, &[], first).unwrap();
    let rebuild = async |machine: &Machine| {
        let per = machine.volume.stripe_blocks();
        let host = machine.drives[4].as_ref().unwrap();
        host.set_full(true);
        // A written stripe stays locked, and the first batch waits for it.
        write(machine, 0, 7).await?;
        machine.volume.flush().await?;
        machine.env.sleep(Duration::from_secs(20)).await;
        machine.replace(&SimDisk::new(DISK_BYTES), 5, 9).await?;
        for _ in 0..20 {
            tags(&machine.volume, per, 1).await?;
            machine.env.sleep(Duration::from_millis(20)).await;
        }
        machine.env.sleep(LONG).await;
        host.set_full(false);
        machine.env.sleep(Duration::from_secs(60)).await;
        assert_eq!(stale_strips(machine)[5], 0);
        // The same with a scrub that is asked to stop while it pauses.
        host.set_full(true);
        write(machine, 3 * per, 7).await?;
        machine.volume.flush().await?;
        machine.env.sleep(Duration::from_secs(20)).await;
        let progress = Default::default();
        let scrub = machine.array.scrub_from(&progress, Pace::Gentle);
        let stop = async {
            machine.env.sleep(LONG).await;
            host.set_full(false);
            machine.env.sleep(Duration::from_secs(1)).await;
            machine.array.stop_scrub();
            machine.env.now()
        };
        let ended = async { (scrub.await, machine.env.now()) };
        let ((scrubbed, ended), asked) = futures_util::future::join(ended, stop).await;
        scrubbed?;
        assert!(ended < asked + Duration::from_secs(30), "{:?} after it was asked to stop", ended - asked);
        Ok(())
    };
    life(&site, 2, &[5], rebuild).unwrap();
}

/// Each discard writes a record. Regression: it waited for log space that is freed only when the host has
/// space again, although files are removed to make space.
#[test]
fn discards_go_on_while_a_host_is_full() {
    for (k, m, blocks) in [(4, 2, 12), (4, 2, 1), (3, 1, 12), (8, 2, 14), (3, 0, 14), (8, 1, 16)] {
        let site = Site::new(spec(k, m));
        let full = if m == 0 { k - 1 } else { k + m - 2 };
        let old = 400;
        let first = async |machine: &Machine| {
            write_new(machine, 0..old).await?;
            machine.array.close().await
        };
        life(&site, 1, &[], first).unwrap();
        site.disks[full].set_full(true);
        let fill = async |machine: &Machine| {
            let first = old * machine.volume.stripe_blocks();
            let fill = async {
                for number in 0..(machine.volume.blocks() - first) / blocks {
                    let at = first + number * blocks;
                    let (data, crcs) = buf_of(&(at + 1..at + 1 + blocks).collect::<Vec<_>>());
                    machine.volume.write(at, &data, &crcs).await?;
                    machine.volume.flush().await?;
                }
                Ok::<_, ArrayError>(())
            };
            timeout(&machine.env, Duration::from_secs(30), fill).await.unwrap_or(Ok(()))?;
            machine.array.close().await
        };
        life(&site, 2, &[], fill).unwrap();
        let discard = async |machine: &Machine| {
            let mut done = 0;
            let all = async {
                for stripe in 0..old {
                    machine.volume.discard(stripe, 1, Discard::OnDrives).await?;
                    done += 1;
                }
                Ok::<_, ArrayError>(())
            };
            let ended = timeout(&machine.env, 3 * LONG, all).await;
            let used = machine.array.report().log_used_percent;
            ended.unwrap_or_else(|| panic!("{k}+{m}: {done} are done, and the log is {used} % used"))?;
            site.disks[full].set_full(false);
            goes_on(machine).await?;
            machine.array.close().await
        };
        life(&site, 3, &[], discard).unwrap();
    }
}

/// A stripe is postponed, discarded, and written in full past the log, so it is destaged in place.
/// Regression: its log space was given to discards as if it were new. Returns false if the stripes could not
/// be discarded after `wait`.
fn put_off_and_rewritten((k, m): (usize, usize), wait: Duration) -> bool {
    let site = Site::new(CreateSpec { strip_blocks: 32, log_bytes: 112 * (128 << 10), ..spec(k, m) });
    let old = 90;
    let first = async |machine: &Machine| {
        write_new(machine, 0..old).await?;
        machine.array.close().await
    };
    life(&site, 1, &[], first).unwrap();
    let mut written = Vec::new();
    let beside = async |machine: &Machine| {
        let (env, per) = (&machine.env, machine.volume.stripe_blocks());
        let put_off = old + 2..old + 16;
        let host = machine.drives[k + m - 2].as_ref().unwrap();
        host.set_full(true);
        for stripe in put_off.clone() {
            write(machine, stripe * per, 1).await?;
        }
        machine.volume.flush().await?;
        while machine.array.report().suspended.is_none() {
            env.sleep(Duration::from_millis(10)).await;
        }
        env.sleep(wait).await;
        // Written stripes keep destage busy.
        for stripe in 0..17 {
            write(machine, stripe * per, 7).await?;
        }
        machine.volume.flush().await?;
        env.sleep(Duration::from_secs(20)).await;
        let give_up = async {
            for stripe in put_off.clone() {
                machine.volume.discard(stripe, 1, Discard::InTable).await?;
            }
            Ok::<_, ArrayError>(())
        };
        let Some(given_up) = timeout(env, Duration::from_secs(20), give_up).await else {
            machine.array.stop();
            return Ok(false);
        };
        given_up?;
        // The host has space for a moment.
        let whole = async {
            let all = put_off.clone().map(|stripe| write_fresh(machine, stripe, 1000 * (stripe + 1)));
            let results = futures_util::future::join_all(all).await;
            host.set_full(true);
            results.into_iter().collect::<Result<Vec<_>, _>>()
        };
        let room = async {
            env.sleep(Duration::from_secs(10)).await;
            host.set_full(false);
        };
        futures_util::future::join(whole, room).await.0?;
        machine.volume.flush().await?;
        env.sleep(Duration::from_secs(20)).await;
        let fill = async {
            for column in 0..32 {
                for stripe in put_off.clone() {
                    let block = stripe * per + column;
                    write(machine, block, 77_000 + block).await?;
                    written.push(block);
                    if written.len().is_multiple_of(12) {
                        machine.volume.flush().await?;
                    }
                }
            }
            Ok::<_, ArrayError>(())
        };
        timeout(env, Duration::from_secs(60), fill).await.unwrap_or(Ok(()))?;
        let discards = async {
            for number in 0..6000 {
                machine.volume.discard(30 + number % 50, 1, Discard::InTable).await?;
            }
            Ok::<_, ArrayError>(())
        };
        timeout(env, Duration::from_secs(900), discards).await.unwrap_or(Ok(()))?;
        host.set_full(false);
        let end = async {
            write(machine, 85 * per, 6).await?;
            machine.volume.flush().await
        };
        timeout(env, LONG, end).await.unwrap_or_else(|| {
            panic!(
                "{k}+{m}: no write ends, {} % of the log are used",
                machine.array.report().log_used_percent
            )
        })?;
        for block in &written {
            assert_eq!(tags(&machine.volume, *block, 1).await?, [77_000 + block]);
        }
        machine.array.close().await?;
        Ok(true)
    };
    life(&site, 2, &[], beside).unwrap()
}

#[test]
fn what_was_put_off_and_written_whole_keeps_its_room() {
    for code in [(4, 4), (8, 3)] {
        let mut waits = (0..12).map(|number| Duration::from_millis(500 * number));
        assert!(waits.any(|wait| put_off_and_rewritten(code, wait)), "no wait fits");
    }
}

/// More stripes are postponed than destage tries before it tries all again. Regression: stripes that were not
/// tried pinned the log's tail, and discards waited as long as the host was full.
#[test]
fn many_stripes_that_are_put_off_keep_no_discard_waiting() {
    let site = Site::new(CreateSpec { log_bytes: 8 << 20, ..spec(4, 2) });
    let work = async |machine: &Machine| {
        let per = machine.volume.stripe_blocks();
        let last = machine.volume.blocks() / per - 1;
        write_fresh(machine, last, 1 << 40).await?;
        machine.volume.flush().await?;
        let host = machine.drives[5].as_ref().unwrap();
        host.set_full(true);
        for stripe in 0..200 {
            write(machine, stripe * per, 1 + stripe).await?;
            machine.volume.flush().await?;
        }
        for number in 0..4000 {
            let discard = machine.volume.discard(last - 1, 1, Discard::InTable);
            let done = timeout(&machine.env, LONG, discard).await;
            let report = machine.array.report();
            done.unwrap_or_else(|| panic!("discard {number}, log {} %", report.log_used_percent))?;
            machine.env.sleep(Duration::from_millis(30)).await;
        }
        host.set_full(false);
        machine.env.sleep(Duration::from_secs(60)).await;
        assert_eq!(machine.array.report().dirty_blocks, 0);
        for stripe in 0..200 {
            assert_eq!(tags(&machine.volume, stripe * per, 1).await?, [1 + stripe]);
        }
        Ok(())
    };
    life(&site, 1, &[], work).unwrap();
}
