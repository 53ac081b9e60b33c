//! Tests of replaced drives: replacements that fail half way, and drives that return in an old state.

use crate::machine::{Machine, Opened, Planned, Site};
use crate::model::make_file;
use penstock_base::DriveId;
use penstock_drive::copies::COPY_BYTES;
use penstock_drive::{Fault, Op};
use penstock_node::EventKind;
use penstock_sim::World;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

async fn write_durably(machine: &Machine, name: &str, bytes: usize) {
    let file = make_file(machine, name).await.unwrap();
    machine.client.write(file, 0, &vec![7; bytes]).await.unwrap();
    machine.client.fsync(file).await.unwrap();
}

/// Takes the drive at `disk0` out of service. Returns its id.
async fn fail_first_drive(machine: &Machine) -> DriveId {
    let drive = machine.node.drives().into_iter().find(|drive| drive.path() == "disk0").unwrap();
    machine.node.fail_drive(&drive.id().to_string()).await.unwrap();
    drive.id()
}

/// Bytes of the first copy of an array's label on a drive. Slices of an array lie at one place on all.
fn label_of(array: &penstock_array::Array, drive: DriveId) -> Range<u64> {
    let (offset, _) = array.slice_of(drive).unwrap();
    offset..offset + COPY_BYTES as u64
}

/// Waits until everything is rebuilt, and returns the health of the store.
async fn health_when_rebuilt(machine: &Machine) -> String {
    for array in machine.node.arrays() {
        let rebuilt =
            penstock_base::env::timeout(&machine.env, Duration::from_secs(60), array.wait_rebuilt());
        assert!(rebuilt.await.is_some(), "{} is never whole again", array.name());
    }
    let status = machine.node.status();
    println!("{} {:?}", status.health, status.reasons);
    status.health
}

/// Reads a file with as many drives lost as the code survives; the first drive is never lost.
fn read_without_others(site: &Site, m: usize, name: &str, bytes: usize) -> Result<(), String> {
    let lost: Vec<String> = (1..=m).map(|number| format!("disk{number}")).collect();
    let world = World::new(93);
    let run = world.run(async {
        let machine = site.start_without(&world, &lost).await.map_err(|error| error.to_string())?;
        let found = machine.client.lookup(machine.client.root(), name.as_bytes()).await;
        let id = found.map_err(|error| error.to_string())?.file();
        let read = machine.client.read(id, 0, bytes as u64).await;
        read.map(drop).map_err(|error| error.to_string())
    });
    world.destroy();
    run.unwrap()
}

/// Regression: the host is full when a drive replaces a lost one, and the administrator frees space and
/// repeats the request. The second attempt treated the first one's drive as unused and removed it, while an
/// array used it and the health was ok.
fn a_full_host_meets_a_replacement(k: usize, m: usize, full_after: Duration) {
    let (site, world) = (Site::of(k, m), World::new(77));
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        write_durably(&machine, "file", 100_000).await;
        let id = fail_first_drive(&machine).await.to_string();
        let before = site.disks.borrow()["disk0"].clone();
        let (disks, env) = (site.disks.clone(), world.env());
        let fill = async move {
            while Rc::ptr_eq(&disks.borrow()["disk0"], &before) {
                env.sleep(Duration::from_micros(1)).await;
            }
            env.sleep(full_after).await;
            disks.borrow()["disk0"].set_full(true);
            env.sleep(Duration::from_secs(1)).await;
            disks.borrow()["disk0"].set_full(false);
        };
        world.env().spawn("fill", Box::pin(fill));
        let first = machine.node.replace_drive(&id, None).await;
        machine.env.sleep(Duration::from_secs(2)).await;
        if let Err(error) = &first {
            let again = machine.node.replace_drive(&id, None).await;
            assert!(again.is_ok(), "{again:?} after {error}");
        }
        assert_eq!(
            (health_when_rebuilt(&machine).await.as_str(), machine.node.drives().len()),
            ("ok", k + m)
        );
        machine.stop().await;
        first.is_err()
    });
    let refused = run.unwrap();
    world.destroy();
    // As many drives are lost as the code allows, and the health was ok before.
    let lost: Vec<String> = (1..=m).map(|number| format!("disk{number}")).collect();
    let world = World::new(78);
    let run = world.run(async {
        let machine = site.start_without(&world, &lost).await;
        machine.map(|_| ()).map_err(|error| error.to_string())
    });
    assert_eq!(run.unwrap(), Ok(()), "refused at first: {refused}");
    world.destroy();
}

#[test]
fn a_replacement_that_met_a_full_host_is_asked_for_again() {
    for (k, m) in [(4, 2), (1, 1)] {
        for step in 0..25 {
            a_full_host_meets_a_replacement(k, m, Duration::from_micros(step * 40));
        }
    }
}

/// Regression: the power is cut when coordination has a replacement that no label contains yet. Strips
/// that the new drive had received were recorded as valid at its position. After the cut the position
/// belonged to the old drive again, which was taken as up to date, and synced data could not be read with m
/// other drives lost.
fn cut_while_a_replacement_is_recorded(k: usize, m: usize, slow: Duration) {
    let (site, world, opened) = (Site::of(k, m), World::new(91), Opened::default());
    let run = world.run(async {
        let machine = site.start_recording(&world, &[], &opened).await.unwrap();
        write_durably(&machine, "file", 100_000).await;
        let old = fail_first_drive(&machine).await;
        machine.env.sleep(Duration::from_secs(30)).await;
        let data = machine.node.arrays().iter().find(|array| array.name() == "data").unwrap().clone();
        let label = label_of(&data, old);
        let slow = |nth| Planned { op: Op::Write, nth, fault: Fault::Slow(slow), within: label.clone() };
        for (drive, nth) in opened.borrow().values().flat_map(|drive| (0..8).map(move |nth| (drive, nth))) {
            let plan = slow(nth);
            drive.plant_within(plan.op, plan.nth, plan.fault, plan.within);
        }
        site.plans.borrow_mut().insert("new".to_owned(), (1..8).map(slow).collect());
        let (node, asked) = (machine.node.clone(), old.to_string());
        let replace = async move { drop(node.replace_drive(&asked, Some("new")).await) };
        world.env().spawn("replace", Box::pin(replace));
        while data.member_on(old).is_some() {
            machine.env.sleep(Duration::from_millis(1)).await;
        }
        write_durably(&machine, "fresh", 4 << 20).await;
        world.cut();
        machine.env.sleep(Duration::from_secs(1)).await;
    });
    assert!(run.is_err(), "the power is cut");
    site.cut(&world);
    let world = World::new(92);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let health = health_when_rebuilt(&machine).await;
        machine.stop().await;
        health
    });
    assert_eq!(run.unwrap(), "ok");
    world.destroy();
    assert_eq!(read_without_others(&site, m, "fresh", 4 << 20), Ok(()), "all was said to be well");
}

#[test]
fn a_cut_while_a_replacement_is_recorded_loses_nothing() {
    for slow in [6, 3_000].map(Duration::from_millis) {
        cut_while_a_replacement_is_recorded(1, 1, slow);
        cut_while_a_replacement_is_recorded(4, 2, slow);
    }
}

/// Regression: the instance restarts when one array has taken a new drive and the other has not. The new
/// drive was refused as a drive in use, and only one more drive could have completed the replacement.
fn a_restart_amid_a_replacement(k: usize, m: usize) {
    let (site, world) = (Site::of(k, m), World::new(77));
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        write_durably(&machine, "file", 100_000).await;
        let drive = fail_first_drive(&machine).await;
        let id = drive.to_string();
        // The host becomes full when the drive takes the label of the second array, whose place was cleared
        // before.
        let within = label_of(&machine.node.arrays()[1], drive);
        let full = Planned { op: Op::Write, nth: 1, fault: Fault::HostFull, within };
        site.plans.borrow_mut().insert("disk0".to_owned(), vec![full]);
        machine.node.replace_drive(&id, None).await.unwrap_err();
        let names = |array: &&Rc<penstock_array::Array>| {
            let report = array.report();
            report.members.iter().any(|member| member.drive.to_string() == id)
        };
        assert_eq!(machine.node.arrays().iter().filter(names).count(), 1, "half done");
        machine.env.sleep(Duration::from_secs(20)).await;
        machine.stop().await;
        id
    });
    let id = run.unwrap();
    world.destroy();
    let world = World::new(78);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        machine.node.replace_drive(&id, Some("disk0")).await.unwrap();
        assert_eq!(
            (health_when_rebuilt(&machine).await.as_str(), machine.node.drives().len()),
            ("ok", k + m)
        );
        // The replacement is complete: the drive belongs to the store and is in use.
        machine.node.replace_drive(&id, Some("disk0")).await.unwrap_err();
        let other = machine.node.drives().into_iter().find(|drive| drive.path() == "disk1").unwrap();
        let other = other.id().to_string();
        machine.node.fail_drive(&other).await.unwrap();
        machine.node.replace_drive(&other, Some("disk0")).await.unwrap_err();
        machine.node.replace_drive(&other, None).await.unwrap();
        assert_eq!(health_when_rebuilt(&machine).await, "ok");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
    assert_eq!(read_without_others(&site, m, "file", 100_000), Ok(()));
}

#[test]
fn a_replacement_goes_on_after_a_restart() {
    a_restart_amid_a_replacement(1, 1);
    a_restart_amid_a_replacement(4, 2);
}

/// Regression: while a drive replaces a lost one, the only other drive accepts no label for a while, so
/// the replacement fails. A repeated request was answered with "no such drive", and one array had no
/// redundancy until the next start.
fn a_replacement_that_nobody_named(k: usize, m: usize, attempts: u64) {
    let (site, world, opened) = (Site::of(k, m), World::new(79), Opened::default());
    let run = world.run(async {
        let machine = site.start_recording(&world, &[], &opened).await.unwrap();
        write_durably(&machine, "file", 100_000).await;
        let drive = fail_first_drive(&machine).await;
        let id = drive.to_string();
        machine.env.sleep(Duration::from_secs(30)).await;
        let label = label_of(&machine.node.arrays()[0], drive);
        for (_, drive) in opened.borrow().iter().filter(|(path, _)| *path != "disk0") {
            (0..attempts).for_each(|_| drive.plant_within(Op::Write, 0, Fault::Fail, label.clone()));
        }
        let mut refused = 0;
        while let Err(error) = machine.node.replace_drive(&id, None).await {
            println!("{error}");
            refused += 1;
            assert!(refused < 10, "{error}");
        }
        assert_eq!(
            (health_when_rebuilt(&machine).await.as_str(), machine.node.drives().len()),
            ("ok", k + m)
        );
        machine.stop().await;
        refused
    });
    assert!(run.unwrap() > 0, "the test asks once only");
    world.destroy();
    assert_eq!(read_without_others(&site, m, "file", 100_000), Ok(()));
}

#[test]
fn a_replacement_that_nobody_named_is_asked_for_again() {
    a_replacement_that_nobody_named(1, 1, 24);
    a_replacement_that_nobody_named(1, 1, 50);
}

/// Regression: after a stop or a power cut a drive returns in an older state. It was used as it was, and data
/// that had been synced since could not be read with m other drives lost.
fn a_drive_comes_back_from_the_past(k: usize, m: usize, beside: bool, cut: bool) {
    let site = Site::of(k, m);
    let mut past = None;
    for turn in 0..2 {
        let world = World::new(101 + turn);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            write_durably(&machine, &format!("file{turn}"), 4 << 20).await;
            if cut {
                world.cut();
            }
            machine.stop().await;
        });
        assert_eq!(run.is_err(), cut);
        site.cut(&world);
        past.get_or_insert_with(|| site.disks.borrow()["disk0"].duplicate());
    }
    // A copy at a path before all others, or in the place of the drive.
    let path = if beside { "copy" } else { "disk0" };
    site.disks.borrow_mut().insert(path.to_owned(), past.unwrap());
    for life in 0..2 {
        let world = World::new(111 + life);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            // The power is cut again during this life.
            if life == 0 && cut {
                machine.env.sleep(Duration::from_millis(20)).await;
                world.cut();
            }
            let health = health_when_rebuilt(&machine).await;
            machine.env.sleep(Duration::from_secs(2)).await;
            let events = machine.node.events().after(0, 1000).unwrap();
            let told = events.iter().any(|event| event.kind == EventKind::DriveOutdated);
            assert_eq!(told, life == 0 && !beside);
            machine.stop().await;
            health
        });
        match run {
            Ok(health) => assert_eq!(health, "ok"),
            Err(_) => assert!(life == 0 && cut),
        }
        site.cut(&world);
    }
    assert_eq!(read_without_others(&site, m, "file1", 4 << 20), Ok(()), "{k}+{m}, {path}, cut {cut}");
}

#[test]
fn a_drive_from_the_past_is_made_again() {
    for (beside, cut) in [(false, false), (false, true), (true, false)] {
        a_drive_comes_back_from_the_past(1, 1, beside, cut);
        a_drive_comes_back_from_the_past(4, 2, beside, cut);
    }
}

/// Regression: two drives of a store of 4+2 are in the state from before its last start, which ended with a
/// stop. The start never ended.
#[test]
fn two_drives_from_the_past_are_made_again() {
    let site = Site::of(4, 2);
    let mut past = None;
    for turn in 0..2 {
        one_life(&site, 201 + turn, &format!("file{turn}"));
        past.get_or_insert_with(|| ["disk0", "disk1"].map(|name| site.disks.borrow()[name].duplicate()));
    }
    for (name, disk) in ["disk0", "disk1"].into_iter().zip(past.unwrap()) {
        site.disks.borrow_mut().insert(name.to_owned(), disk);
    }
    one_life(&site, 211, "file2");
    assert_eq!(read_without_others(&site, 2, "file1", 4 << 20), Ok(()));
}

/// Runs a life that adds a file and ends with a stop, with everything up to date.
fn one_life(site: &Site, seed: u64, name: &str) {
    let world = World::new(seed);
    let run = world.run(async {
        let env = world.env();
        let starts = penstock_base::env::timeout(&env, Duration::from_secs(600), site.start(&world, &[]));
        let machine = starts.await.expect("it starts").unwrap();
        assert_eq!(health_when_rebuilt(&machine).await, "ok");
        write_durably(&machine, name, 4 << 20).await;
        machine.stop().await;
    });
    run.unwrap();
    site.cut(&world);
}

/// Regression: an old copy takes the place of a drive that is away, is rebuilt and used. Then the drive
/// returns beside the copy. Its labels had more updates, so it was used, and with the other drives away
/// the store was in a state from long before.
fn both_copies_are_there(k: usize, m: usize, without: bool) {
    let site = Site::of(k, m);
    one_life(&site, 301, "a");
    let past = site.disks.borrow()["disk0"].duplicate();
    (302..307).for_each(|seed| one_life(&site, seed, &format!("b{seed}")));
    let drive = site.disks.borrow()["disk0"].duplicate();
    site.disks.borrow_mut().insert("disk0".to_owned(), past);
    one_life(&site, 307, "c");
    site.disks.borrow_mut().insert("copy".to_owned(), drive);
    if without {
        assert_eq!(read_without_others(&site, m, "c", 4 << 20), Ok(()));
    }
    one_life(&site, 308, "d");
    for name in ["a", "b306", "c", "d"] {
        assert_eq!(read_without_others(&site, m, name, 4 << 20), Ok(()), "{name}");
    }
}

#[test]
fn of_two_copies_of_a_drive_the_one_that_served_last_is_used() {
    for (k, m, without) in [(1, 1, false), (1, 1, true), (4, 2, true)] {
        both_copies_are_there(k, m, without);
    }
}

/// A copy of the site with only some of its drives.
fn with_only(site: &Site, there: &[&String]) -> Site {
    let copy = site.duplicate();
    copy.disks.borrow_mut().retain(|path, _| there.contains(&path));
    copy
}

/// Regression: drives are replaced one after the other, and then any of the drives that the store has and had
/// are found. If coordination recorded a position as up to date, the drive that had been there earlier was
/// used. Data written since was lost, and nothing reported it.
#[test]
fn whatever_disks_are_found_after_replacements_a_store_starts_with_all_or_not_at_all() {
    for (k, m, replacements) in [(1, 1, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2)] {
        let (site, world) = (Site::of(k, m), World::new(94));
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            write_durably(&machine, "before", 100_000).await;
            for number in 0..replacements {
                let path = format!("disk{number}");
                let old = machine.node.drives().into_iter().find(|drive| drive.path() == path).unwrap();
                let id = old.id().to_string();
                machine.node.fail_drive(&id).await.unwrap();
                write_durably(&machine, &format!("without{number}"), 50_000).await;
                machine.node.replace_drive(&id, Some(&format!("new{number}"))).await.unwrap();
                health_when_rebuilt(&machine).await;
            }
            write_durably(&machine, "after", 100_000).await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
        let paths: Vec<String> = site.disks.borrow().keys().cloned().collect();
        let now =
            |path: &&String| path.starts_with("new") || path[4..].parse::<usize>().unwrap() >= replacements;
        let (mut started, mut refused) = (0, 0);
        for chosen in 1u32..1 << paths.len() {
            let there: Vec<&String> = paths
                .iter()
                .enumerate()
                .filter(|(at, _)| chosen & 1 << at != 0)
                .map(|(_, path)| path)
                .collect();
            let world = World::new(95);
            let some = with_only(&site, &there);
            let run = world.run(async {
                let machine = some.start(&world, &[]).await.map_err(|error| error.to_string())?;
                let found = machine.client.lookup(machine.client.root(), b"after").await;
                let id = found.unwrap_or_else(|failure| panic!("{k}+{m} of {there:?}: {failure}")).file();
                let bytes = machine.client.read(id, 0, 100_000).await.unwrap();
                assert!(penstock_base::buf::gather(&bytes).iter().all(|byte| *byte == 7), "{there:?}");
                Ok::<_, String>(())
            });
            let outcome = run.unwrap();
            world.destroy();
            match &outcome {
                Ok(()) => started += 1,
                Err(_) => refused += 1,
            }
            let enough = there.iter().filter(|path| now(path)).count() >= k;
            assert_eq!(
                outcome.is_ok(),
                enough,
                "{k}+{m} with {replacements} replaced, of {there:?}: {outcome:?}"
            );
        }
        println!("{k}+{m}: {started} starts, {refused} refused");
    }
}

/// The path of the new drive must be saved for the next start before the drive has anything that no other
/// drive has.
#[test]
fn nothing_changes_for_a_replacement_whose_place_cannot_be_noted() {
    crate::machine::on_machine(96, async |machine| {
        let old = fail_first_drive(machine).await;
        let noted: Rc<RefCell<Vec<bool>>> = Rc::default();
        let (full, notes) = (Rc::new(Cell::new(true)), noted.clone());
        let is_full = full.clone();
        machine.node.keep_places(move |node| {
            if is_full.get() {
                return Err("no space left on the host".to_owned());
            }
            let new = node.drives().into_iter().find(|drive| drive.path() == "new").expect("it is noted");
            notes.borrow_mut().push(node.arrays().iter().any(|array| array.member_on(new.id()).is_some()));
            Ok(())
        });
        let refused = machine.node.replace_drive(&old.to_string(), Some("new")).await.unwrap_err();
        assert!(refused.to_string().contains("no space left on the host"), "{refused}");
        assert!(machine.node.arrays().iter().all(|array| array.member_on(old).is_some()));
        assert!(machine.node.drives().iter().all(|drive| drive.path() != "new"));
        full.set(false);
        machine.node.replace_drive(&old.to_string(), Some("new")).await.unwrap();
        assert_eq!(*noted.borrow(), [false, true], "noted before it has anything, and at the end");
        assert_eq!(health_when_rebuilt(machine).await, "ok");
    });
}

/// Regression: a drive that does not answer was waited for without a limit, and no other drive could be
/// failed or replaced.
#[test]
fn a_drive_that_does_not_answer_is_no_replacement() {
    let (site, world) = (Site::new(), World::new(99));
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let old = fail_first_drive(&machine).await.to_string();
        let disk = penstock_sim::SimDisk::new(site.disk_bytes());
        disk.corrupt(0, &[1; 4096]);
        site.disks.borrow_mut().insert("silent".to_owned(), disk);
        let silent = |nth| Planned { op: Op::Read, nth, fault: Fault::Silent, within: 0..1 << 20 };
        site.plans.borrow_mut().insert("silent".to_owned(), (0..8).map(silent).collect());
        let replace = machine.node.replace_drive(&old, Some("silent"));
        let refused = penstock_base::env::timeout(&machine.env, Duration::from_secs(60), replace).await;
        let refused = refused.expect("it ends").unwrap_err().to_string();
        assert!(refused.contains("no answer"), "{refused}");
        machine.node.replace_drive(&old, Some("new")).await.unwrap();
        assert_eq!(health_when_rebuilt(&machine).await, "ok");
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

/// Regression: as many drives as a start needs are in the state of an earlier stop, and no other drive is
/// there. They were used without the data that had been synced since, and when the right drives returned they
/// were rebuilt from the old ones.
#[test]
fn drives_that_are_all_from_the_past_start_nothing() {
    for (k, m) in [(1, 1), (1, 2), (2, 1), (4, 2)] {
        let site = Site::of(k, m);
        let one_life = |seed, name: &str| {
            let world = World::new(seed);
            let run = world.run(async {
                let machine = site.start(&world, &[]).await.unwrap();
                write_durably(&machine, name, 100_000).await;
                machine.stop().await;
            });
            run.unwrap();
            world.destroy();
        };
        one_life(100, "before");
        let past: Vec<_> =
            (m..k + m).map(|at| site.disks.borrow()[&format!("disk{at}")].duplicate()).collect();
        one_life(101, "after");
        let right: Vec<_> = (m..k + m)
            .zip(past)
            .map(|(at, old)| site.disks.borrow_mut().insert(format!("disk{at}"), old).expect("it was there"))
            .collect();
        let world = World::new(102);
        let away: Vec<usize> = (0..m).collect();
        let run =
            world.run(async { site.start(&world, &away).await.map(drop).map_err(|error| error.to_string()) });
        let refused = run.unwrap().unwrap_err();
        assert!(refused.contains("the checkpoint's root of the last start"), "{k}+{m}: {refused}");
        world.destroy();
        // Deleting the claims is the way to start with them all the same.
        let (forgetful, world) = (Site { ownership: Rc::default(), ..site.duplicate() }, World::new(104));
        let run = world.run(async {
            let machine = forgetful.start(&world, &away).await.unwrap();
            machine.client.lookup(machine.client.root(), b"before").await.unwrap();
        });
        run.unwrap();
        world.destroy();
        for (at, disk) in (m..k + m).zip(right) {
            site.disks.borrow_mut().insert(format!("disk{at}"), disk);
        }
        let world = World::new(103);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            machine.client.lookup(machine.client.root(), b"after").await.unwrap();
            machine.audit().await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}

/// Regression: after a replacement the power is cut as soon as the store reports that it is ok, and as many
/// of the other drives are lost as it survives. It had reported ok while the labels that name the new
/// copy of the log were still being written.
#[test]
fn a_store_that_says_it_is_well_survives_losses_at_once() {
    for (k, m) in [(1, 2), (2, 1), (4, 2)] {
        for seed in 900..902 {
            let (site, world) = (Site::of(k, m), World::new(seed));
            let run = world.run(async {
                let machine = site.start(&world, &[]).await.unwrap();
                write_durably(&machine, "file", 100_000).await;
                let id = fail_first_drive(&machine).await.to_string();
                machine.node.replace_drive(&id, Some("new")).await.unwrap();
                let lacks = || machine.node.arrays().iter().any(|array| array.missing_carriers() > 0);
                while lacks() || machine.node.status().health != "ok" {
                    machine.env.sleep(Duration::from_micros(10)).await;
                }
                world.cut();
                machine.env.sleep(Duration::from_secs(1)).await;
            });
            assert!(run.is_err());
            site.cut(&world);
            read_without_others(&site, m, "file", 100_000).unwrap_or_else(|why| panic!("{k}+{m}: {why}"));
        }
    }
}
