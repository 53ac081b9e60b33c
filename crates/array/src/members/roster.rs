//! The roster of a store's arrays: the one place that decides for all of them which drives are latched.
//!
//! Invariants:
//! - A drive is latched only if afterwards no array of the store misses more members than its code survives,
//!   nor its last replica of the log. Otherwise nothing is recorded against the drive, and its writers wait.
//! - Drives that fail within 100 ms are judged together. If they are too many for an array, the cause is
//!   taken to be a common one (a controller, a host, a cable), and none of the array's drives is latched.
//! - When a drive is latched, every array that uses it ends the life of that member before anything else
//!   runs.
//!
//! Bound: a drive is listed once, and each judgement empties the list.

use super::Members;
use crate::table_memory::TableMemory;
use penstock_base::rank::scoped;
use penstock_base::{DriveId, Env};
use penstock_drive::DriveHandle;
use std::cell::RefCell;
use std::rc::{Rc, Weak};
use std::time::Duration;
use tokio::sync::oneshot;

/// Drives that fail within this time are judged together.
const WINDOW: Duration = Duration::from_millis(100);

/// A drive that failed, and the callers that wait for the verdict.
struct Failing {
    drive: Rc<DriveHandle>,
    why: String,
    waiting: Vec<oneshot::Sender<Result<(), String>>>,
}

impl Failing {
    fn tell(self, verdict: Result<(), String>) {
        for waiting in self.waiting {
            // A caller that went away finds out from the drive.
            let _ = waiting.send(verdict.clone());
        }
    }
}

/// The arrays of a store, as far as they share drives.
pub struct Roster {
    env: Env,
    arrays: RefCell<Vec<Weak<Members>>>,
    failing: RefCell<Vec<Failing>>,
    table_memory: Rc<TableMemory>,
}

impl Roster {
    /// A roster without arrays; they enter it when they are opened.
    pub fn new(env: &Env) -> Rc<Self> {
        Self::with_table_memory(env, None)
    }

    /// The same, with so many bytes of memory for pages of stripe tables; as many as suit most stores if none
    /// is given.
    pub fn with_table_memory(env: &Env, bytes: Option<usize>) -> Rc<Self> {
        Rc::new(Self {
            env: env.clone(),
            arrays: RefCell::default(),
            failing: RefCell::default(),
            table_memory: TableMemory::new(bytes),
        })
    }

    pub(crate) fn table_memory(&self) -> &Rc<TableMemory> {
        &self.table_memory
    }

    pub(crate) fn enter(&self, array: &Rc<Members>) {
        let mut arrays = self.arrays.borrow_mut();
        arrays.retain(|array| array.strong_count() > 0);
        arrays.push(Rc::downgrade(array));
    }

    fn open_arrays(&self) -> Vec<Rc<Members>> {
        let arrays = self.arrays.borrow();
        arrays.iter().filter_map(Weak::upgrade).filter(|array| !array.is_closed()).collect()
    }

    /// A write or flush of `drive` failed. Returns once it is latched; the error says why it must not be.
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
            let (this, moment) = (self.clone(), self.env.sleep(WINDOW));
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

    /// Latches a drive that an administrator takes out of service, without waiting for others to fail.
    pub(crate) fn take_out(&self, drive: &Rc<DriveHandle>, why: &str) -> Result<(), String> {
        match self.refusal(&[drive.id()]) {
            Some(array) => Err(format!("array {} can lose no further member", array.name())),
            None => {
                self.latch(drive, why);
                Ok(())
            }
        }
    }

    /// An array that does not survive the loss of these drives as well.
    fn refusal(&self, drives: &[DriveId]) -> Option<Rc<Members>> {
        let needs =
            |array: &Rc<Members>| drives.iter().any(|drive| array.uses(*drive)) && !array.survives(drives);
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
        // An array that cannot do without some of these drives keeps them. The rest is judged again for other
        // arrays.
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

    fn refusing(&self, failing: &[Failing]) -> Option<Rc<Members>> {
        let drives: Vec<DriveId> = failing.iter().map(|one| one.drive.id()).collect();
        self.refusal(&drives)
    }

    /// Latches a drive, ends the life of its member in every array, and starts the records of that.
    fn latch(&self, drive: &Rc<DriveHandle>, why: &str) {
        drive.latch(why.to_owned());
        for array in self.open_arrays() {
            let Some(member) = array.member_on(drive.id()) else { continue };
            array.note_latched(member);
            self.env.spawn(
                "array lost",
                Box::pin(async move {
                    if let Err(error) = scoped(array.record_lost()).await {
                        tracing::error!(array = array.name(), %error, "a lost member is not recorded yet");
                    }
                }),
            );
        }
    }
}
