//! Labels of slices that are damaged, unreadable, or left by a former use of the place.

use crate::bench::{
    DISK_BYTES, Machine, NOISE, SLICE_AT, Site, label_of, plan, slice_bytes, slice_of, spec, tags, write,
};
use crate::carriers::write_flushed;
use crate::outdated::life;
use penstock_array::format::label::Label;
use penstock_array::{ArrayError, ArrayEvent, Geometry, Lacking, MemberNo};
use penstock_base::{BLOCK_BYTES, DriveId, Id128};
use penstock_drive::copies::{COPY_BYTES, TwoCopies, places};
use penstock_drive::superblock::Superblock;
use penstock_drive::{Class, DriveError, DriveHandle, Fault, Io, Op};
use penstock_sim::{SimDisk, SimDrive, World};
use std::rc::Rc;
use std::time::Duration;

/// Bytes of both copies of the label on a drive.
fn copies_of_label() -> [std::ops::Range<u64>; 2] {
    places(slice_bytes()).map(|at| SLICE_AT + at..SLICE_AT + at + COPY_BYTES as u64)
}

fn damage(disk: &SimDisk, copies: &[usize]) {
    for copy in copies {
        disk.corrupt(copies_of_label()[*copy].start / BLOCK_BYTES as u64, &NOISE);
    }
}

/// A site with 20 flushed blocks, tags 101 to 120.
fn written(k: usize, m: usize) -> Site {
    let site = Site::new(spec(k, m));
    let store = async |machine: &Machine| {
        write_flushed(machine, 1..=20).await?;
        for at in 1..=20 {
            write(machine, at, at + 100).await?;
        }
        machine.array.close().await
    };
    life(&site, 1, &[], store).unwrap();
    site
}

/// The tags that a life reads once everything is rebuilt, its events, and its members' states at the start.
type Seen = (Vec<u64>, Vec<ArrayEvent>, Vec<&'static str>);

async fn see(machine: &Machine) -> Result<Seen, ArrayError> {
    let states = machine.array.report().members.iter().map(|member| member.state).collect();
    assert_eq!(machine.array.wait_rebuilt().await, 0);
    let found = tags(&machine.volume, 1, 20).await?;
    let events = machine.array.take_events();
    machine.array.close().await?;
    Ok((found, events, states))
}

fn is_outdated(events: &[ArrayEvent], at: usize) -> bool {
    events.contains(&ArrayEvent::Outdated { member: MemberNo::new(at) })
}

#[test]
fn one_good_copy_of_a_label_is_enough() {
    for copy in [0, 1] {
        let site = written(4, 2);
        site.disks.iter().for_each(|disk| damage(disk, &[copy]));
        let (found, events, states) = life(&site, 2, &[], see).unwrap();
        assert_eq!(found, (101..=120).collect::<Vec<_>>());
        assert!((0..6).all(|at| !is_outdated(&events, at)), "{events:?}");
        assert_eq!(states, ["active"; 6]);
        // The opening has written both again.
        site.disks.iter().for_each(|disk| damage(disk, &[1 - copy]));
        assert_eq!(life(&site, 3, &[], see).unwrap().2, ["active"; 6]);
    }
}

#[test]
fn a_member_without_a_label_is_rebuilt_from_nothing() {
    for (k, m, damaged) in [(4, 2, vec![0, 5]), (1, 2, vec![1, 2]), (4, 1, vec![4])] {
        let site = written(k, m);
        damaged.iter().for_each(|at| damage(&site.disks[*at], &[0, 1]));
        let (found, events, _) = life(&site, 2, &[], see).unwrap();
        assert_eq!(found, (101..=120).collect::<Vec<_>>(), "{k}+{m} {damaged:?}");
        assert!((0..k + m).all(|at| is_outdated(&events, at) == damaged.contains(&at)), "{events:?}");
        let (found, events, states) = life(&site, 3, &[], see).unwrap();
        assert_eq!((found, states), ((101..=120).collect::<Vec<_>>(), vec!["active"; k + m]));
        assert!((0..k + m).all(|at| !is_outdated(&events, at)), "{events:?}");
    }
}

/// More labels than the code survives: nothing is lost without a word, and nothing is changed.
#[test]
fn labels_that_are_missing_everywhere_refuse_the_opening() {
    for (k, m) in [(4, 2), (1, 1)] {
        let site = written(k, m);
        let before: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
        (0..=m).for_each(|at| damage(&site.disks[at], &[0, 1]));
        if k > 1 {
            life(&site, 2, &[], see).unwrap_err();
        }
        // Their copies, brought back, have everything.
        for (at, disk) in before.iter().enumerate().take(m + 1) {
            for copy in copies_of_label() {
                let block = copy.start / BLOCK_BYTES as u64;
                site.disks[at].corrupt(block, &disk.peek(block));
            }
        }
        assert_eq!(life(&site, 3, &[], see).unwrap().0, (101..=120).collect::<Vec<_>>());
    }
}

/// An error of the drive says nothing of the contents: the member is away, and comes back with the next
/// opening.
#[test]
fn a_member_whose_label_cannot_be_read_is_away() {
    let mut site = written(4, 2);
    site.prepare = Box::new(|number, drive| {
        if number == 1 {
            copies_of_label().into_iter().for_each(|copy| drive.set_unreadable(copy));
        }
    });
    let write_more = async |machine: &Machine| {
        let states: Vec<_> = machine.array.report().members.iter().map(|member| member.state).collect();
        assert_eq!(states, ["active", "missing", "active", "active", "active", "active"]);
        let events = machine.array.take_events();
        let is_told = |event: &ArrayEvent| matches!(event, ArrayEvent::LabelUnreadable { member, .. } if member.index() == 1);
        assert!(events.iter().any(is_told) && !is_outdated(&events, 1), "{events:?}");
        write(machine, 3, 777).await?;
        machine.array.close().await
    };
    // The descriptor comes from another drive.
    life(&site, 2, &[], write_more).unwrap();
    site.prepare = Box::new(|_, _| ());
    let (found, events, _) = life(&site, 3, &[], see).unwrap();
    assert_eq!(found[..4], [101, 102, 777, 104]);
    assert!(!is_outdated(&events, 1), "it is brought up to date, not rebuilt: {events:?}");
}

#[test]
fn a_scrub_repairs_labels() {
    let site = written(4, 2);
    let scrub = async |machine: &Machine| {
        damage(&machine.disks[2], &[0]);
        damage(&machine.disks[3], &[1]);
        for bad in [2, 0] {
            let found = machine.array.scrub_labels().await;
            assert_eq!((found.bad, found.repaired), (bad, bad));
        }
        machine.array.close().await
    };
    life(&site, 2, &[], scrub).unwrap();
    assert!(site.disks.iter().all(|disk| label_of(disk).is_some()));
}

/// Regression: one label that was bad and could not be written again ended every scrub before its first
/// stripe.
#[test]
fn a_label_that_takes_no_repair_keeps_no_other_from_its_scrub() {
    let site = written(4, 2);
    let scrub = async |machine: &Machine| {
        damage(&machine.disks[1], &[0]);
        damage(&machine.disks[4], &[1]);
        machine.drives[1].as_ref().unwrap().plant_within(
            Op::Write,
            0,
            Fault::HostFull,
            copies_of_label()[0].clone(),
        );
        let found = machine.array.scrub_labels().await;
        assert_eq!((found.bad, found.repaired), (2, 1));
        assert!(matches!(found.failed, Some(DriveError::HostFull)), "{found:?}");
        assert!(machine.array.scrub().await?.is_clean());
        // The label is owed until the drive takes it.
        machine.env.sleep(Duration::from_secs(30)).await;
        let found = machine.array.scrub_labels().await;
        assert_eq!((found.bad, found.failed.is_none()), (0, true));
        machine.array.close().await
    };
    life(&site, 2, &[], scrub).unwrap();
}

/// Regression: a label counted as unreadable although only blocks behind it were.
#[test]
fn blocks_behind_a_label_may_be_unreadable() {
    let mut site = written(4, 2);
    site.prepare = Box::new(|_, drive| {
        copies_of_label().into_iter().for_each(|copy| drive.set_unreadable(copy.start + 8192..copy.end));
    });
    let (found, events, states) = life(&site, 2, &[], see).unwrap();
    assert_eq!((found, states), ((101..=120).collect::<Vec<_>>(), vec!["active"; 6]));
    assert!((0..6).all(|at| !is_outdated(&events, at)), "{events:?}");
}

/// Regression: no word of an administrator had an array use drives whose labels cannot be read.
#[test]
fn labels_that_cannot_be_read_on_too_many_drives_are_given_up_by_name() {
    for unreadable in [0..3, 0..5] {
        let mut site = written(4, 2);
        site.prepare = Box::new(move |number, drive| {
            if unreadable.contains(&number) {
                copies_of_label().into_iter().for_each(|copy| drive.set_unreadable(copy));
            }
        });
        let before: Vec<_> = site.disks.iter().map(|disk| disk.duplicate()).collect();
        let error = life(&site, 2, &[], see).unwrap_err();
        assert!(matches!(error, ArrayError::LabelsUnread { .. }), "{error}");
        let contents = |disk: &Rc<SimDisk>| -> Vec<_> {
            disk.used_blocks().into_iter().map(|block| (block, disk.peek(block).to_vec())).collect()
        };
        for (disk, before) in site.disks.iter().zip(&before) {
            assert!(contents(disk) == contents(before), "nothing was changed");
        }
        site.lacking = Lacking::Accept;
        let (found, _, _) = life(&site, 3, &[], see).unwrap();
        assert_eq!(found, (101..=120).collect::<Vec<_>>());
        site.lacking = Lacking::Refuse;
        site.prepare = Box::new(|_, _| ());
        let (found, _, states) = life(&site, 4, &[], see).unwrap();
        assert_eq!(
            (found, states),
            ((101..=120).collect::<Vec<_>>(), vec!["active"; 6]),
            "their labels are written"
        );
    }
}

/// Regression: a drive whose label cannot be read was left out even by an administrator's word, as long as
/// the array could miss it. But the other carrier of the log had a damaged page.
#[test]
fn a_drive_whose_label_cannot_be_read_is_used_if_its_loss_is_accepted() {
    let mut site = written(4, 1);
    let geometry = Geometry::fit(&site.spec, slice_bytes()).unwrap();
    let pages = SLICE_AT + geometry.roots().start..SLICE_AT + geometry.metadata().end;
    for block in pages.start / BLOCK_BYTES as u64..pages.end / BLOCK_BYTES as u64 {
        // Roots and pages, of which the other carrier has good copies.
        site.disks[1].corrupt(block, &NOISE);
    }
    site.prepare = Box::new(|number, drive| {
        if number == 0 {
            copies_of_label().into_iter().for_each(|copy| drive.set_unreadable(copy));
        }
    });
    let error = life(&site, 2, &[], see).unwrap_err();
    assert!(matches!(error, ArrayError::LabelsUnread { .. }), "{error}");
    site.lacking = Lacking::Accept;
    let (found, events, _) = life(&site, 3, &[], see).unwrap();
    assert_eq!(found, (101..=120).collect::<Vec<_>>());
    assert!(!is_outdated(&events, 0), "{events:?}");
    let site = Site { lacking: Lacking::Refuse, prepare: Box::new(|_, _| ()), ..site };
    let (found, _, states) = life(&site, 4, &[], see).unwrap();
    assert_eq!((found, states), ((101..=120).collect::<Vec<_>>(), vec!["active"; 5]));
}

/// A disk that takes a member's place has the label of a former use, of a higher revision than that of the
/// array. The power is cut while the new label is written.
#[test]
fn a_label_of_a_former_use_never_counts() {
    for (place, nth) in ["label.clear", "label.copy0", "label.copy1", "label.again"]
        .into_iter()
        .flat_map(|place| (0..14).map(move |nth| (place, nth)))
    {
        let mut site = written(4, 2);
        let new = SimDisk::new(DISK_BYTES);
        write_former_label(&site, &new);
        let world = World::new(50 + nth);
        world.plan_cut(plan(place, nth));
        let replaced = world.run(async {
            let machine = site.open(&world, &[]).await?;
            machine.array.fail_member(MemberNo::new(2), "test").await?;
            machine.replace(&new, 2, 9).await?;
            assert_eq!(machine.array.wait_rebuilt().await, 0);
            machine.array.close().await
        });
        site.cut(&world);
        let old = std::mem::replace(&mut site.disks[2], new.clone());
        new.cut(&world, penstock_sim::CutMode::Nothing);
        match replaced {
            Ok(done) => done.unwrap(),
            // Without the new disk, or with it, there is the same.
            Err(_) => {
                let copy = Site { disks: site.disks.clone(), ..Site::of(Vec::new(), spec(4, 2)) };
                let copy = Site { ownership: site.ownership.clone(), ..copy };
                let found = life(&copy, 60, &[], async |machine| tags(&machine.volume, 1, 20).await);
                let found = found.unwrap_or_else(|error| panic!("{place} {nth}: {error}"));
                assert_eq!(found, (101..=120).collect::<Vec<_>>(), "{place} {nth}");
                continue;
            }
        }
        drop(old);
        let (found, _, states) = life(&site, 61, &[], see).unwrap();
        assert_eq!((found, states), ((101..=120).collect::<Vec<_>>(), vec!["active"; 6]), "{place} {nth}");
    }
}

/// Puts a whole label of this array on a disk, with the id of a drive that once stood there.
fn write_former_label(site: &Site, disk: &Rc<SimDisk>) {
    let (_, label) = label_of(&site.disks[2]).unwrap();
    let mut descriptor = label.descriptor().unwrap();
    descriptor.revision += 1000;
    descriptor.members[2].drive = DriveId(Id128([0x77; 16]));
    let former = Label::new(&descriptor, MemberNo::new(2));
    let world = World::new(1);
    let done = world.run(async {
        let superblock = Superblock { size_bytes: DISK_BYTES, ..Superblock::default() };
        let drive = SimDrive::new(&world, disk.clone());
        let handle = DriveHandle::online(world.env(), "former".into(), drive, superblock);
        let (slice, io) = (slice_of(&handle), Io::new(Class::Meta, "former"));
        for place in places(slice.len()) {
            slice.write(place, former.encode(), io).await.unwrap();
        }
        slice.flush(io).await.unwrap();
    });
    world.destroy();
    done.unwrap();
}
