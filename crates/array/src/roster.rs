//! One place decides for all arrays of a store which drives are latched.
//!
//! Invariants:
//! - A drive is latched only if no array of the store then misses more members than its code survives, nor its last copy
//!   of the log. Otherwise nothing is recorded against the drive, and whoever wrote to it waits.
//! - Drives that fail within one moment are judged together: when they are too many for an array, the cause is taken to be a
//!   common one (a controller, a host, a cable), and none of the array's drives is latched.
//! - When a drive is latched, every array that uses it ends the life of that member before anything else runs.
//!
//! What bounds it: a drive is listed once, and each moment empties the list.

use crate::engine::Array;
use penstock_base::{DriveId, Env};
use penstock_drive::DriveHandle;
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// Drives that fail within this time are judged together.
const MOMENT: Duration = Duration::from_millis(100);

/// A drive that failed and those who wait to hear what becomes of it.
struct Failing {
    drive: Rc<DriveHandle>,
    why: String,
    waiting: Vec<oneshot::Sender<Result<(), String>>>,
}

impl Failing {
    fn tell(self, verdict: Result<(), String>) {
        for waiting in self.waiting {
            // Who gave up waiting learns it from the drive.
            let _ = waiting.send(verdict.clone());
        }
    }
}

/// The arrays of a store, as far as they share drives.
pub struct Roster {
    env: Env,
    arrays: RefCell<Vec<Weak<Array>>>,
    failing: RefCell<Vec<Failing>>,
}

impl Roster {
    /// A roster without arrays; they enter it when they are opened.
    pub fn new(env: &Env) -> Rc<Self> {
        Rc::new(Self { env: env.clone(), arrays: RefCell::default(), failing: RefCell::default() })
    }

    pub(crate) fn enter(&self, array: &Rc<Array>) {
        let mut arrays = self.arrays.borrow_mut();
        arrays.retain(|array| array.strong_count() > 0);
        arrays.push(Rc::downgrade(array));
    }

    fn open_arrays(&self) -> Vec<Rc<Array>> {
        let arrays = self.arrays.borrow();
        arrays.iter().filter_map(Weak::upgrade).filter(|array| !array.is_closed()).collect()
    }

    /// A write or flush of `drive` failed. Returns when it is latched, or why it must not be.
    pub(crate) async fn failed(self: &Rc<Self>, drive: &Rc<DriveHandle>, why: &str) -> Result<(), String> {
        if !drive.is_online() {
            return Ok(());
        }
        let (tell, verdict) = oneshot::channel();
        let first = {
            let mut failing = self.failing.borrow_mut();
            let first = failing.is_empty();
            match failing.iter_mut().find(|other| Rc::ptr_eq(&other.drive, drive)) {
                Some(known) => known.waiting.push(tell),
                None => {
                    let (drive, why) = (drive.clone(), why.to_owned());
                    failing.push(Failing { drive, why, waiting: vec![tell] });
                }
            }
            first
        };
        if first {
            let (this, moment) = (self.clone(), self.env.sleep(MOMENT));
            self.env.spawn(
                "roster",
                Box::pin(async move {
                    moment.await;
                    this.judge();
                }),
            );
        }
        verdict.await.unwrap_or_else(|_| Err("the machine stops".to_owned()))
    }

    /// Latches a drive that an administrator takes out of service, at once.
    pub(crate) fn take_out(&self, drive: &Rc<DriveHandle>, why: &str) -> Result<(), String> {
        match self.refusal(&[drive.id()]) {
            Some(array) => Err(format!("array {} can lose no further member", array.name())),
            None => {
                self.latch(drive, why);
                Ok(())
            }
        }
    }

    /// An array that cannot do without these drives as well.
    fn refusal(&self, drives: &[DriveId]) -> Option<Rc<Array>> {
        let needs =
            |array: &Rc<Array>| drives.iter().any(|drive| array.uses(*drive)) && !array.survives(drives);
        self.open_arrays().into_iter().find(needs)
    }

    fn judge(&self) {
        let mut failing = std::mem::take(&mut *self.failing.borrow_mut());
        failing.retain_mut(|one| {
            let online = one.drive.is_online();
            if !online {
                one.waiting.drain(..).for_each(|waiting| drop(waiting.send(Ok(()))));
            }
            online
        });
        // Who cannot do without some of them keeps these; what is left is judged again, for others.
        while let Some(array) = self.refusing(&failing) {
            let (kept, others): (Vec<_>, Vec<_>) =
                failing.into_iter().partition(|one| array.uses(one.drive.id()));
            let names: Vec<String> =
                kept.iter().map(|one| format!("drive {} ({})", one.drive.id(), one.why)).collect();
            let name = array.name();
            let why = match names.len() {
                1 => format!("{} fails and array {name} can lose no further member", names[0]),
                count => format!(
                    "{count} drives fail together, more than array {name} can lose; taken as a common cause: {}",
                    names.join(", ")
                ),
            };
            kept.into_iter().for_each(|one| one.tell(Err(why.clone())));
            failing = others;
        }
        for one in failing {
            self.latch(&one.drive, &one.why);
            one.tell(Ok(()));
        }
    }

    fn refusing(&self, failing: &[Failing]) -> Option<Rc<Array>> {
        let drives: Vec<DriveId> = failing.iter().map(|one| one.drive.id()).collect();
        self.refusal(&drives)
    }

    /// Latches a drive, ends its life in every array, and lets each record that.
    fn latch(&self, drive: &Rc<DriveHandle>, why: &str) {
        drive.latch(why.to_owned());
        for array in self.open_arrays() {
            let Some(position) = array.position_of(drive.id()) else { continue };
            array.note_latched(position);
            self.env.spawn(
                "array lost",
                Box::pin(async move {
                    if let Err(error) = array.record_lost().await {
                        tracing::error!(array = array.name(), %error, "a lost member is not recorded yet");
                    }
                }),
            );
        }
    }
}
