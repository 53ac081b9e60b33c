//! The watch: checks drives, arrays and space twice a second, and turns changes into events.
//!
//! It also reports a drive that one array lost to the other arrays.

use crate::event::{EventKind, Severity, array_object, drive_object};
use crate::events::Events;
use crate::node::Node;
use penstock_array::format::descriptor::Role;
use penstock_array::{Array, ArrayEvent, ArrayState, MemberNo, Report};
use penstock_base::DriveId;
use penstock_drive::DriveState;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// Interval of the checks of drives and arrays.
const WATCH: Duration = Duration::from_millis(500);
/// Repairs within this time become one event.
const REPAIRS: Duration = Duration::from_secs(60);
/// Most stripes that are named one by one; for more, events give a number.
const NAMED_MOST: usize = 20;

/// State of an array when it was last checked.
struct Seen {
    state: ArrayState,
    suspended: Option<String>,
    /// Repaired blocks and checksum errors that events have reported.
    repaired: (u64, u64),
    /// Time of the last event on repairs.
    repairs_at: Option<Duration>,
    unreadable: BTreeSet<u64>,
    /// Members whose last rebuild was not complete: retries every few seconds cause no further events.
    failing: BTreeSet<MemberNo>,
}

/// State that the watch remembers.
struct Watch {
    drives: Vec<(DriveId, DriveState)>,
    arrays: Vec<Seen>,
    health: &'static str,
}

impl Seen {
    fn of(array: &Array) -> Self {
        let report = array.report();
        Self {
            state: report.state,
            suspended: report.suspended,
            repaired: (report.counts.repaired_blocks, report.counts.checksum_errors),
            repairs_at: None,
            unreadable: BTreeSet::new(),
            failing: BTreeSet::new(),
        }
    }

    fn look(&mut self, array: &Array, replaced: &BTreeSet<DriveId>, events: &Events, now: Duration) {
        let report = array.report();
        for event in array.take_events() {
            self.rebuild(array, &report, event, replaced, events);
        }
        self.suspension(array, &report, events);
        if report.state != self.state {
            let severity = match report.state {
                ArrayState::Ok => Severity::Info,
                ArrayState::Spared | ArrayState::Degraded | ArrayState::Suspended => Severity::Warning,
                ArrayState::Critical | ArrayState::Failed => Severity::Error,
            };
            let text = format!("went from {} to {}", self.state.word(), report.state.word());
            events.add(severity, EventKind::ArrayState, array_object(array), text);
            self.state = report.state;
        }
        self.repairs(array, &report, events, now);
        self.unreadable(array, events);
    }

    fn suspension(&mut self, array: &Array, report: &Report, events: &Events) {
        match (&self.suspended, &report.suspended) {
            (before, Some(why)) if before.as_ref() != Some(why) => events.add(
                Severity::Error,
                EventKind::ArraySuspended,
                array_object(array),
                format!("writes wait: {why}"),
            ),
            (Some(_), None) => {
                events.add(Severity::Info, EventKind::ArrayResumed, array_object(array), "writes go on");
            }
            _ => {}
        }
        self.suspended.clone_from(&report.suspended);
    }

    fn rebuild(
        &mut self,
        array: &Array,
        report: &Report,
        event: ArrayEvent,
        replaced: &BTreeSet<DriveId>,
        events: &Events,
    ) {
        let drive = |member: MemberNo| report.members[member.index()].drive;
        let is_gone = |member: MemberNo| report.members[member.index()].state == "missing";
        let is_rebuild =
            |member: MemberNo, whole: bool| whole || replaced.contains(&drive(member)) || is_gone(member);
        let word = |rebuild: bool| if rebuild { "rebuild" } else { "resync" };
        let into = |member: MemberNo| if is_gone(member) { " into spare space" } else { "" };
        match event {
            ArrayEvent::Outdated { member } => {
                let text = format!(
                    "drive {} has contents from before the last start: nothing on it counts, and it is rebuilt",
                    drive(member)
                );
                events.add(Severity::Warning, EventKind::DriveOutdated, array_object(array), text);
            }
            ArrayEvent::LabelUnreadable { member, why } => {
                let text = format!(
                    "the label of the slice on drive {} cannot be read, so the drive is not used: {why}",
                    drive(member)
                );
                events.add(Severity::Error, EventKind::DriveUnused, array_object(array), text);
            }
            ArrayEvent::LossAccepted { why } => {
                let text = format!("started by an administrator's word all the same: {why}");
                events.add(Severity::Error, EventKind::LossAccepted, array_object(array), text);
            }
            ArrayEvent::RebuildBegun { member, .. } if self.failing.contains(&member) => {}
            ArrayEvent::RebuildBegun { member, stripes, whole } => {
                let rebuild = is_rebuild(member, whole);
                let kind = if rebuild { EventKind::RebuildBegun } else { EventKind::ResyncBegun };
                let text = format!(
                    "{} of drive {}{} begun: {stripes} stripes",
                    word(rebuild),
                    drive(member),
                    into(member)
                );
                events.add(Severity::Info, kind, array_object(array), text);
            }
            ArrayEvent::RebuildEnded { member, stripes, failed, whole, complete } => {
                let failed_before = match complete {
                    true => self.failing.remove(&member),
                    false => !self.failing.insert(member),
                };
                if failed_before && !complete && stripes == 0 {
                    return;
                }
                let severity = if complete { Severity::Info } else { Severity::Warning };
                let rebuild = is_rebuild(member, whole);
                let kind = if rebuild { EventKind::RebuildEnded } else { EventKind::ResyncEnded };
                let how = match (complete, failed) {
                    (true, _) => "all its strips are valid".to_owned(),
                    (false, 0) => "some stripes are left; it continues".to_owned(),
                    (false, failed) => format!("{failed} stripes could not be done; they are tried again"),
                };
                let what = format!("{} of drive {}{}", word(rebuild), drive(member), into(member));
                let text = format!("{what} ended: {stripes} stripes; {how}");
                events.add(severity, kind, array_object(array), text);
            }
        }
    }

    /// Adds an event for the first repair, and one a minute for further ones.
    fn repairs(&mut self, array: &Array, report: &Report, events: &Events, now: Duration) {
        let found = (report.counts.repaired_blocks, report.counts.checksum_errors);
        let soon = self.repairs_at.is_some_and(|at| now < at + REPAIRS);
        if found == self.repaired || soon {
            return;
        }
        let (repaired, errors) = (found.0 - self.repaired.0, found.1 - self.repaired.1);
        let text = format!("{errors} contents did not verify, {repaired} blocks were written again");
        events.add(Severity::Warning, EventKind::BlocksRepaired, array_object(array), text);
        (self.repaired, self.repairs_at) = (found, Some(now));
    }

    fn unreadable(&mut self, array: &Array, events: &Events) {
        let now: BTreeSet<u64> = array.unreadable_stripes().into_iter().collect();
        let new: Vec<u64> = now.difference(&self.unreadable).copied().collect();
        let text = match new.as_slice() {
            [] => None,
            new if new.len() <= NAMED_MOST => Some(format!("stripes {new:?} cannot be read")),
            new => Some(format!("{} stripes cannot be read, the first is {}", new.len(), new[0])),
        };
        if let Some(text) = text {
            events.add(Severity::Error, EventKind::StripeUnreadable, array_object(array), text);
        }
        self.unreadable = now;
    }
}

fn drive_states(node: &Node) -> Vec<(DriveId, DriveState)> {
    node.drives().iter().map(|drive| (drive.id(), drive.state())).collect()
}

/// Adds events for changes of drives, arrays and the store, until the node is closed.
pub(crate) async fn run(node: Rc<Node>) {
    let mut watch = Watch {
        drives: drive_states(&node),
        arrays: node.arrays().iter().map(|array| Seen::of(array)).collect(),
        health: node.health(),
    };
    let mut told = false;
    while !node.is_closing() {
        node.env.sleep(WATCH).await;
        if let Some(why) = node.failure()
            && !std::mem::replace(&mut told, true)
        {
            node.events.add(
                Severity::Error,
                EventKind::StoreFailed,
                "node",
                format!("the store stops: {why}"),
            );
        }
        if told {
            node.failed.notify_one();
        }
        watch_drives(&node, &mut watch);
        let now = node.env.now();
        for (array, seen) in node.arrays().iter().zip(&mut watch.arrays) {
            seen.look(array, &node.drives.replaced(), &node.events, now);
        }
        watch_health(&node, &mut watch);
        node.warnings.watch(node.spaces(), &node.fs_object(), &node.events);
        node.slow.borrow_mut().watch(node.env.now(), &node.drives(), &node.events);
        node.damage.watch(node.unreadable(Role::Data), &node.stacks, &node.fs_object(), &node.events).await;
    }
}

fn watch_drives(node: &Node, watch: &mut Watch) {
    let now = drive_states(node);
    for (id, state) in now.iter().filter(|state| !watch.drives.contains(state)) {
        let (severity, kind) = match state {
            // A replacement, for which the replacing request adds the event.
            DriveState::Online => continue,
            DriveState::Failed(_) => (Severity::Warning, EventKind::DriveFailed),
            DriveState::Missing(_) => (Severity::Warning, EventKind::DriveMissing),
        };
        node.events.add(severity, kind, drive_object(*id), state.reason());
        tell_arrays(node, *id, state);
    }
    watch.drives = now;
}

fn watch_health(node: &Node, watch: &mut Watch) {
    let health = node.health();
    if health != watch.health {
        let severity = match health {
            "ok" => Severity::Info,
            "degraded" => Severity::Warning,
            _ => Severity::Error,
        };
        let text = format!("health went from {} to {health}", watch.health);
        node.events.add(severity, EventKind::Health, "node", text);
        watch.health = health;
    }
}

fn tell_arrays(node: &Node, drive: DriveId, state: &DriveState) {
    for array in node.arrays() {
        if let Some(member) = array.member_on(drive) {
            // In a task of its own: it may wait for coordination, and the watch must go on.
            let (array, events, why) = (array.clone(), node.events.clone(), state.reason().to_owned());
            let record = async move {
                if let Err(error) = array.fail_member(member, &why).await {
                    let text = format!("the loss of drive {drive} cannot be recorded: {error}");
                    events.add(Severity::Error, EventKind::ArrayState, array_object(&array), text);
                }
            };
            node.env.spawn("tell array", Box::pin(record));
        }
    }
}

/// Adds events for drives that are missing, for drives that were missing or failed under the previous
/// instance and are back, and for a health that is not ok.
pub(crate) fn greet_drives(node: &Node) {
    use EventKind::{DriveBack, DriveFailed, DriveMissing, DriveReplaced};
    for drive in node.drives().iter() {
        let object = drive_object(drive.id());
        let of_it = |kind: EventKind| matches!(kind, DriveBack | DriveFailed | DriveMissing | DriveReplaced);
        let before = node.events.newest(|event| event.object == object && of_it(event.kind));
        match (drive.state(), before) {
            (DriveState::Online, Some(event)) if event.kind == DriveFailed => {
                let text = format!("in use again at {}, and was failed before: {}", drive.path(), event.text);
                node.events.add(Severity::Warning, DriveBack, object, text);
            }
            (DriveState::Online, Some(event)) if event.kind == DriveMissing => {
                let text = format!("in use again at {}", drive.path());
                node.events.add(Severity::Info, DriveBack, object, text);
            }
            (DriveState::Online, _) => {}
            (state, _) => node.events.add(Severity::Warning, DriveMissing, object, state.reason()),
        }
    }
    let health = node.health();
    if health != "ok" {
        node.events.add(Severity::Warning, EventKind::Health, "node", format!("the store starts {health}"));
    }
}
