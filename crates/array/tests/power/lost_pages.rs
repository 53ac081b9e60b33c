//! Pages of the stripe table that are lost or cannot be read: their own stripes are concerned, and nothing
//! else. Each test is a regression.

use crate::bench::{Machine, NOISE, SLICE_AT, Site, spec, spread, tags, write_fresh};
use crate::paging::{self, STRIPES, write_all};
use penstock_array::format::table_page::TablePage;
use penstock_array::place::MemberNo;
use penstock_array::{ArrayError, ArrayEvent, CreateSpec, Discard, Geometry, Lacking};
use penstock_base::BLOCK_BYTES;
use penstock_base::env::timeout;
use penstock_sim::{CutMode, SimDisk};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// One life as in [`paging`], at whose end every write lands.
pub fn life<R>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    test: impl AsyncFnOnce(&Machine) -> Result<R, ArrayError>,
) -> R {
    attempt(site, seed, lost, test).unwrap()
}

/// The same; an error if the array does not open, or from the test.
fn attempt<R>(
    site: &Site,
    seed: u64,
    lost: &[usize],
    test: impl AsyncFnOnce(&Machine) -> Result<R, ArrayError>,
) -> Result<R, ArrayError> {
    let (world, done) = paging::attempt(site, seed, lost, test);
    world.destroy();
    site.disks.iter().for_each(|disk| disk.cut(&world, CutMode::Everything));
    done
}

/// No carrier has a page any more.
pub fn lose_page(disks: &[Rc<SimDisk>], geo: &Geometry, page: u64) {
    for disk in disks {
        for place in 0..2 {
            let at = (SLICE_AT + geo.page_at(page, place)) / BLOCK_BYTES as u64;
            if TablePage::decode(&disk.peek(at)).is_ok() {
                disk.corrupt(at, &NOISE);
            }
        }
    }
}

/// Page 2 cannot be read on drive 1 from the next opening on.
fn make_unreadable(site: &mut Site, geo: Geometry) {
    make_unreadable_on(site, geo, |number| number == 1);
}

/// Page 2 cannot be read on any drive from the next opening on.
fn make_unreadable_everywhere(site: &mut Site, geo: Geometry) {
    make_unreadable_on(site, geo, |_| true);
}

fn make_unreadable_on(site: &mut Site, geo: Geometry, is_meant: impl Fn(usize) -> bool + 'static) {
    site.prepare = Box::new(move |number, drive| {
        for place in (0..2).filter(|_| is_meant(number)) {
            let at = SLICE_AT + geo.page_at(2, place);
            drive.set_unreadable(at..at + BLOCK_BYTES as u64);
        }
    });
}

fn written(spec: CreateSpec) -> (Site, Geometry) {
    let site = Site::new(spec);
    let geo = life(&site, 9800, &[], async |machine| {
        write_all(machine).await?;
        let geo = machine.array.geometry();
        machine.array.close().await?;
        Ok(geo)
    });
    (site, geo)
}

/// A page of the table is lost. A drive is replaced. All stripes of other pages must get their redundancy
/// back, and the rebuild must not spin.
#[test]
fn a_lost_page_keeps_no_other_from_being_rebuilt() {
    let (mut site, geo) = written(spread(3, 1, 9, 2));
    lose_page(&site.disks, &geo, 3);
    site.replace(3);
    life(&site, 9801, &[3], async |machine| {
        machine.replace(&site.disks[3], 3, 9801).await?;
        machine.env.sleep(Duration::from_secs(30)).await;
        let report = machine.array.report();
        machine.array.stop();
        assert_eq!(report.redundancy_debt_stripes, geo.stripes_per_page(), "only those of the page");
        Ok(())
    });
}

/// A page of the table is lost: others are served as before.
#[test]
fn a_lost_page_takes_its_own_stripes_alone() {
    let (site, geo) = written(spread(3, 1, 9, 2));
    lose_page(&site.disks, &geo, 3);
    life(&site, 9811, &[], async |machine| {
        let page = 3 * geo.stripes_per_page()..4 * geo.stripes_per_page();
        let listed: BTreeSet<u64> = machine.volume.written(0, usize::MAX).await?.into_iter().collect();
        let unlisted: Vec<u64> =
            (0..STRIPES).filter(|stripe| !page.contains(stripe) && !listed.contains(stripe)).collect();
        machine.array.scrub().await?;
        let mut refused = Vec::new();
        for stripe in (0..STRIPES).filter(|stripe| !page.contains(stripe)) {
            if machine.volume.discard(stripe, 1, Discard::InTable).await.is_err() {
                refused.push(stripe);
            }
        }
        machine.array.stop();
        assert!(refused.is_empty() && unlisted.is_empty(), "refused {refused:?}, unlisted {unlisted:?}");
        Ok(())
    });
}

/// A full stripe was written and not flushed. Its page leaves the memory, and then no carrier has it.
#[test]
fn a_lost_page_stops_no_array() {
    let (site, geo) = written(spec(3, 1));
    life(&site, 9821, &[], async |machine| {
        let per_page = geo.stripes_per_page();
        let (block, stripe) = (machine.volume.stripe_blocks(), per_page + 5);
        machine.volume.discard(stripe, 1, Discard::InTable).await?;
        machine.array.destage_and_checkpoint().await?;
        write_fresh(machine, stripe, 77).await?;
        for _ in 0..3 {
            for page in [0, 2, 3, 4] {
                tags(&machine.volume, page * per_page * block, 1).await?;
            }
        }
        lose_page(&site.disks, &geo, 1);
        let flushed = timeout(&machine.env, Duration::from_secs(600), machine.volume.flush()).await;
        let stopped = machine.array.stopped().map(str::to_owned);
        machine.array.stop();
        assert!(stopped.is_none(), "one lost page stops the array: {stopped:?}, {flushed:?}");
        Ok(())
    });
}

/// A page of the table is lost, and readers use the memory. The count of stripes ends all the same.
#[test]
fn a_lost_page_does_not_stop_the_count() {
    for busy in [false, true] {
        let (mut site, geo) = written(spec(3, 1));
        lose_page(&site.disks, &geo, 2);
        site.replace(3);
        life(&site, 9831, &[3], async |machine| {
            let per_page = geo.stripes_per_page() * machine.volume.stripe_blocks();
            machine.replace(&site.disks[3], 3, 9831).await?;
            for _ in 0..600 {
                if machine.array.report().is_counted {
                    break;
                }
                for _ in 0..10 {
                    machine.env.sleep(Duration::from_millis(100)).await;
                    for page in [5, 6, 7].into_iter().filter(|_| busy) {
                        tags(&machine.volume, page * per_page, 1).await?;
                    }
                }
            }
            let report = machine.array.report();
            machine.array.stop();
            assert!(report.is_counted, "busy {busy}");
            Ok(())
        });
    }
}

/// The repair of metadata must not go on for ever at full speed, nor say that it repaired something.
#[test]
fn a_lost_page_is_not_scrubbed_for_ever() {
    let (site, geo) = written(spec(3, 1));
    lose_page(&site.disks, &geo, 2);
    life(&site, 9851, &[], async |machine| {
        assert!(
            tags(&machine.volume, 2 * geo.stripes_per_page() * machine.volume.stripe_blocks(), 1)
                .await
                .is_err()
        );
        machine.env.sleep(Duration::from_secs(60)).await;
        let before = machine.array.report().counts;
        machine.env.sleep(Duration::from_secs(600)).await;
        let after = machine.array.report().counts;
        machine.array.stop();
        assert_eq!(after.repaired_blocks, before.repaired_blocks);
        Ok(())
    });
}

/// As above, and the rebuild rests when it can do no more.
#[test]
fn a_rebuild_beside_a_lost_page_does_not_spin() {
    let (mut site, geo) = written(spread(3, 1, 9, 2));
    lose_page(&site.disks, &geo, 3);
    site.replace(3);
    life(&site, 9861, &[3], async |machine| {
        machine.replace(&site.disks[3], 3, 9861).await?;
        machine.env.sleep(Duration::from_secs(30)).await;
        machine.array.take_events();
        let mut begun = 0;
        for _ in 0..1000 {
            machine.env.sleep(Duration::from_millis(1)).await;
            let events = machine.array.take_events();
            begun += events
                .iter()
                .filter(|event| matches!(event, penstock_array::ArrayEvent::RebuildBegun { .. }))
                .count();
        }
        machine.array.stop();
        assert!(begun < 5);
        Ok(())
    });
}

/// A block in the log all the time, or in its stripe: the stripe is written throughout.
#[test]
fn a_written_stripe_is_listed_while_it_is_destaged() {
    let (site, _) = written(spec(3, 1));
    life(&site, 9880, &[], async |machine| {
        machine.volume.discard(5, 1, Discard::InTable).await?;
        machine.array.destage_and_checkpoint().await?;
        crate::bench::write(machine, 5 * machine.volume.stripe_blocks(), 4).await?;
        machine.volume.flush().await?;
        for drive in machine.drives.iter().flatten() {
            for page in 2..6 {
                let at = SLICE_AT + machine.array.geometry().page_at(page, 0);
                let far = SLICE_AT + machine.array.geometry().page_at(page, 1);
                for at in [at, far] {
                    let fault = penstock_drive::Fault::Slow(Duration::from_secs(3));
                    drive.plant_within(penstock_drive::Op::Read, 0, fault, at..at + BLOCK_BYTES as u64);
                }
            }
        }
        let list = machine.volume.written(0, usize::MAX);
        let destage = async {
            machine.env.sleep(Duration::from_millis(300)).await;
            machine.array.destage_and_checkpoint().await
        };
        let (listed, destaged) = futures_util::future::join(list, destage).await;
        destaged?;
        machine.array.stop();
        let listed = listed?;
        assert!(listed.contains(&5), "{} stripes", listed.len());
        Ok(())
    });
}

/// One of two carriers was lost and is replaced. The other one cannot read one block: a page of the table.
/// The stripes of that page are lost at most; all others are rebuilt, and there are two carriers again.
#[test]
fn an_unreadable_page_does_not_stop_the_rebuild() {
    let (mut site, geo) = written(spec(3, 1));
    make_unreadable(&mut site, geo);
    site.replace(0);
    life(&site, 9891, &[0], async |machine| {
        machine.replace(&site.disks[0], 0, 9891).await?;
        machine.env.sleep(Duration::from_secs(3600)).await;
        let (report, missing) = (machine.array.report(), machine.array.missing_carriers());
        machine.array.stop();
        assert!(report.redundancy_debt_stripes <= geo.stripes_per_page());
        assert_eq!(missing, 0, "copies of the log");
        Ok(())
    });
}

/// A batch of stripes is discarded, one of which is in a lost page.
#[test]
fn a_discard_beside_a_lost_page() {
    let (site, geo) = written(spec(3, 1));
    lose_page(&site.disks, &geo, 2);
    life(&site, 9911, &[], async |machine| {
        let first = 2 * geo.stripes_per_page() - 63;
        let left_out = machine.volume.discard(first, 64, Discard::OnDrives).await?;
        assert_eq!(left_out, [first + 63]);
        let left = machine
            .volume
            .written(first, usize::MAX)
            .await?
            .into_iter()
            .filter(|at| *at < first + 64)
            .count();
        machine.array.stop();
        assert_eq!(left, 0);
        Ok(())
    });
}

/// One of two carriers is away, and the other one cannot read one block: a page of the table. A block was
/// written to a stripe of that page. All others can be written on and on.
#[test]
fn an_unreadable_page_does_not_fill_the_log() {
    let (mut site, geo) = written(spec(3, 1));
    make_unreadable(&mut site, geo);
    life(&site, 9921, &[0], async |machine| {
        let block = machine.volume.stripe_blocks();
        crate::bench::write(machine, 2 * geo.stripes_per_page() * block, 4).await?;
        machine.volume.flush().await?;
        let mut done = 0;
        for at in 0..3000 {
            let write = crate::bench::write(machine, at % (50 * block), 5);
            match timeout(&machine.env, Duration::from_secs(3600), write).await {
                Some(written) => written?,
                None => break,
            }
            done += 1;
        }
        machine.array.stop();
        assert_eq!(done, 3000);
        Ok(())
    });
}

/// The copies of a page of the table, on each disk at both places, as they are now.
fn copies_of(disks: &[Rc<SimDisk>], geo: &Geometry, page: u64) -> Vec<(usize, u64, Vec<u8>)> {
    let places = (0..disks.len()).flat_map(|disk| [(disk, 0), (disk, 1)]);
    let at = |place| (SLICE_AT + geo.page_at(page, place)) / BLOCK_BYTES as u64;
    let copies = places.map(|(disk, place)| (disk, at(place), disks[disk].peek(at(place)).to_vec()));
    copies.filter(|(_, _, block)| TablePage::decode(block).is_ok()).collect()
}

/// The tag of each stripe of a page; none of one that cannot be read.
async fn tags_of(machine: &Machine, page: u64) -> Result<Vec<Option<u64>>, ArrayError> {
    let (per_page, blocks) = (machine.array.geometry().stripes_per_page(), machine.volume.stripe_blocks());
    let mut found = Vec::new();
    for stripe in page * per_page..(page + 1) * per_page {
        found.push(match tags(&machine.volume, stripe * blocks, blocks).await {
            Ok(tags) => Some(tags[0]),
            Err(ArrayError::Unreadable { .. } | ArrayError::Damaged { .. }) => None,
            Err(error) => return Err(error),
        });
    }
    Ok(found)
}

fn first_tags(geo: &Geometry, page: u64) -> Vec<Option<u64>> {
    let per_page = geo.stripes_per_page();
    (page * per_page..(page + 1) * per_page).map(|stripe| Some(1000 * (stripe + 1))).collect()
}

/// A site where one stripe of page 2 was written anew, which the log alone has.
fn with_a_record_of_page_two(spec: CreateSpec) -> (Site, Geometry, u64) {
    let (site, geo) = written(spec);
    let stripe = 2 * geo.stripes_per_page() + 7;
    life(&site, 9931, &[], async |machine| {
        machine.volume.discard(stripe, 1, Discard::InTable).await?;
        machine.array.destage_and_checkpoint().await?;
        write_fresh(machine, stripe, 77).await?;
        machine.volume.flush().await?;
        machine.array.stop();
        Ok(())
    });
    (site, geo, stripe)
}

/// The log has a record of a page that no carrier has any more. The array opens when that loss is accepted,
/// and never believes a copy of the page that comes back.
#[test]
fn a_page_that_the_log_needs_is_given_up_for_good() {
    for (spec, is_unreadable) in
        [(spec(3, 1), false), (spec(3, 1), true), (spread(3, 1, 9, 2), false), (spread(3, 1, 9, 2), true)]
    {
        let (mut site, geo, stripe) = with_a_record_of_page_two(spec);
        let before = copies_of(&site.disks, &geo, 2);
        match is_unreadable {
            true => make_unreadable_everywhere(&mut site, geo),
            false => lose_page(&site.disks, &geo, 2),
        }
        for _ in 0..2 {
            let refused = attempt(&site, 9932, &[], async |_| Ok(())).unwrap_err();
            assert!(refused.to_string().contains("page 2 of the stripe table"), "{refused}");
            assert!(matches!(refused, ArrayError::PagesLost { .. }), "{refused}");
        }
        site.lacking = Lacking::Accept;
        let mut wanted = vec![None; geo.stripes_per_page() as usize];
        wanted[7] = Some(77);
        life(&site, 9933, &[], async |machine| {
            let events = machine.array.take_events();
            let is_told = |event: &ArrayEvent| match event {
                ArrayEvent::LossAccepted { why } => why.contains("given up: 2"),
                _ => false,
            };
            assert!(events.iter().any(is_told), "{events:?}");
            assert_eq!(tags_of(machine, 1).await?, first_tags(&geo, 1));
            assert_eq!(tags_of(machine, 2).await?, wanted, "the log has one of them whole");
            machine.array.stop();
            Ok(())
        });
        // The page comes back, and nobody accepts anything any more.
        site.lacking = Lacking::Refuse;
        site.prepare = Box::new(|_, _| ());
        for (disk, at, block) in &before {
            if TablePage::decode(&site.disks[*disk].peek(*at)).is_err() {
                site.disks[*disk].corrupt(*at, block);
            }
        }
        life(&site, 9934, &[], async |machine| {
            assert_eq!(tags_of(machine, 2).await?, wanted);
            assert_eq!(tags_of(machine, 3).await?, first_tags(&geo, 3));
            let report = machine.array.scrub().await?;
            let lost: Vec<u64> = (2 * geo.stripes_per_page()..3 * geo.stripes_per_page())
                .filter(|lost| *lost != stripe)
                .collect();
            assert_eq!(report.unreadable, lost);
            // Nobody needs two of them any more: they are written anew.
            machine.volume.discard(lost[0], 2, Discard::OnDrives).await?;
            write_fresh(machine, lost[0], 78).await?;
            machine.volume.flush().await?;
            (wanted[0], wanted[1]) = (Some(78), Some(0));
            assert_eq!(tags_of(machine, 2).await?, wanted);
            assert_eq!(machine.array.redundancy_debt_stripes(), lost.len() as u64 - 2);
            machine.array.close().await
        });
        life(&site, 9935, &[], async |machine| {
            assert_eq!(tags_of(machine, 2).await?, wanted);
            machine.array.stop();
            Ok(())
        });
    }
}

/// Page 2 was given up.
fn with_page_two_given_up(spec: CreateSpec) -> (Site, Geometry) {
    let (mut site, geo, _) = with_a_record_of_page_two(spec);
    lose_page(&site.disks, &geo, 2);
    site.lacking = Lacking::Accept;
    life(&site, 9936, &[], async |machine| machine.array.close().await);
    site.lacking = Lacking::Refuse;
    (site, geo)
}

/// Each stripe of a page that was given up lacks all strips for good: a drive that was replaced later never
/// counted, and the array could not do without any other one.
#[test]
fn a_page_that_was_given_up_keeps_no_member_from_counting() {
    for spec in [spec(3, 1), spread(3, 1, 9, 2)] {
        let (mut site, geo) = with_page_two_given_up(spec);
        site.replace(1);
        life(&site, 9937, &[1], async |machine| {
            machine.replace(&site.disks[1], 1, 77).await?;
            machine.array.wait_rebuilt().await;
            machine.env.sleep(Duration::from_secs(300)).await;
            let states: Vec<_> = machine.array.report().members.iter().map(|member| member.state).collect();
            assert!(states.iter().all(|state| *state == "active"), "{states:?}");
            // Other pages take the memory of that one.
            for page in [1, 3, 1, 3] {
                tags_of(machine, page).await?;
            }
            machine.array.fail_member(MemberNo::new(2), "a test").await?;
            assert_eq!(tags_of(machine, 1).await?, first_tags(&geo, 1));
            machine.array.close().await
        });
        life(&site, 9938, &[2], async |machine| {
            assert_eq!(tags_of(machine, 3).await?, first_tags(&geo, 3));
            machine.array.wait_rebuilt().await;
            // The log had one of them.
            assert_eq!(machine.array.unreadable_stripes().len() as u64, geo.stripes_per_page() - 1);
            machine.array.stop();
            Ok(())
        });
    }
}

/// Lost stripes were not listed after a start if nothing else was left to do.
#[test]
fn stripes_of_a_page_that_was_given_up_are_listed_after_a_start() {
    for spec in [spec(3, 1), spread(3, 1, 9, 2)] {
        let (site, geo) = with_page_two_given_up(spec);
        life(&site, 9940, &[], async |machine| {
            machine.env.sleep(Duration::from_secs(5)).await;
            assert_eq!(machine.array.unreadable_stripes().len() as u64, geo.stripes_per_page() - 1);
            machine.array.stop();
            Ok(())
        });
    }
}

/// A page of which the log has a record cannot be read for a while: nothing is lost.
#[test]
fn a_page_that_the_log_needs_and_that_comes_back() {
    let (mut site, geo, _) = with_a_record_of_page_two(spec(3, 1));
    make_unreadable_everywhere(&mut site, geo);
    let refused = attempt(&site, 9941, &[], async |_| Ok(())).unwrap_err();
    assert!(matches!(refused, ArrayError::PagesLost { .. }), "{refused}");
    site.prepare = Box::new(|_, _| ());
    life(&site, 9942, &[], async |machine| {
        let mut wanted = first_tags(&geo, 2);
        wanted[7] = Some(77);
        assert_eq!(tags_of(machine, 2).await?, wanted);
        machine.array.stop();
        Ok(())
    });
}

/// Stripes of two pages were discarded, and nothing else is in the log. One of the pages is lost.
#[test]
fn a_discard_of_a_lost_page_refuses_no_opening() {
    let (site, geo) = written(spec(3, 1));
    let first = 2 * geo.stripes_per_page() - 3;
    life(&site, 9951, &[], async |machine| {
        machine.volume.discard(first, 6, Discard::InTable).await?;
        machine.array.stop();
        Ok(())
    });
    lose_page(&site.disks, &geo, 2);
    life(&site, 9952, &[], async |machine| {
        let mut wanted = first_tags(&geo, 1);
        let len = wanted.len();
        wanted[len - 3..].fill(Some(0));
        assert_eq!(tags_of(machine, 1).await?, wanted, "those of the other page are discarded");
        machine.array.stop();
        Ok(())
    });
}

/// Regression: a page that cannot be read, and that the log does not need, made every opening refuse that had
/// to look for stripes that would be lost, also after that loss was accepted.
#[test]
fn a_page_is_accepted_as_lost_once() {
    let (mut site, geo) = written(spread(3, 1, 9, 2));
    for away in [vec![4], vec![4, 5]] {
        life(&site, 9961, &away, async |machine| {
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            machine.array.close().await
        });
    }
    let mut copies = copies_of(&site.disks, &geo, 2);
    // Later copies go to the other places.
    let checkpoint = |block: &[u8]| TablePage::decode(block).map(|page| page.checkpoint).unwrap_or(0);
    let last = copies.iter().map(|(_, _, block)| checkpoint(block)).max();
    copies.retain(|(_, _, block)| Some(checkpoint(block)) == last);
    site.prepare = Box::new(move |number, drive| {
        for (_, at, _) in copies.iter().filter(|(disk, _, _)| *disk == number) {
            let at = at * BLOCK_BYTES as u64;
            drive.set_unreadable(at..at + BLOCK_BYTES as u64);
        }
    });
    for (lacking, may_open) in [(Lacking::Refuse, false), (Lacking::Accept, true), (Lacking::Refuse, true)] {
        site.lacking = lacking;
        let opened = attempt(&site, 9962, &[4, 5], async |machine| {
            machine.env.sleep(Duration::from_secs(120)).await;
            assert_eq!(tags_of(machine, 1).await?, first_tags(&geo, 1));
            machine.array.close().await
        });
        assert_eq!(opened.is_ok(), may_open, "{opened:?}");
    }
}

/// Regression: an opening that was refused for a page did not say which stripes would be lost as well.
#[test]
fn a_lost_page_hides_no_other_loss() {
    let (mut site, geo, _) = with_a_record_of_page_two(spread(3, 1, 9, 2));
    let refused = attempt(&site, 9970, &[4, 5], async |_| Ok(())).unwrap_err();
    assert!(matches!(refused, ArrayError::WouldLose { .. }), "{refused}");
    make_unreadable_everywhere(&mut site, geo);
    let refused = attempt(&site, 9971, &[4, 5], async |_| Ok(())).unwrap_err().to_string();
    for word in ["page 2 of the stripe table", "and beside these", "stripes without drive"] {
        assert!(refused.contains(word), "{word}: {refused}");
    }
}
