//! The drives of a store: finding, failing and replacing them.
//!
//! Invariant: from the first change of a replacement on, both drives are listed, so that nothing takes the
//! new one for something else. Only a complete replacement, or one that changed nothing, leaves one of them.

use crate::backing::{ANSWER, Backing, Found, check_blank, read_superblock};
use crate::error::AdminError;
use crate::event::{EventKind, Severity, drive_object};
use crate::events::Events;
use crate::layout::allocate;
use penstock_array::format::descriptor::Descriptor;
use penstock_array::{Array, MemberNo, clear_label};
use penstock_base::env::random_id;
use penstock_base::{DriveId, Env, Features, StackNo, StoreId};
use penstock_drive::superblock::{SliceEntry, Superblock, SuperblockError, slices_end};
use penstock_drive::{DriveHandle, Slice};
use std::cell::{Ref, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use tokio::sync::Mutex;

/// Function that durably saves the paths of the drives; the error is the reason why it could not.
type KeepPlaces = Rc<dyn Fn(&DriveSet) -> Result<(), String>>;

/// The drives of a store, and the arrays on them.
pub struct DriveSet {
    env: Env,
    backing: Rc<dyn Backing>,
    store: StoreId,
    /// Stacks of the store.
    stacks: u16,
    arrays: Vec<Rc<Array>>,
    /// The arrays of stacks that do not serve: what drives have of them stays.
    absent: RefCell<Vec<Descriptor>>,
    events: Rc<Events>,
    list: RefCell<Vec<Rc<DriveHandle>>>,
    /// Blank drives that replaced others since the start: their strips are rebuilt, not brought up to date.
    replaced: RefCell<BTreeSet<DriveId>>,
    /// Replacements that have begun and not ended: the new drive, by lost drive.
    replacing: RefCell<BTreeMap<DriveId, Rc<DriveHandle>>>,
    /// Serialises failing and replacing drives.
    changing: Mutex<()>,
    /// Saves the paths of the drives for the next start.
    keep_places: RefCell<Option<KeepPlaces>>,
}

impl DriveSet {
    pub(crate) fn new(
        env: &Env,
        backing: Rc<dyn Backing>,
        (store, stacks): (StoreId, u16),
        (arrays, absent): (&[Rc<Array>], Vec<Descriptor>),
        events: &Rc<Events>,
        drives: Vec<Rc<DriveHandle>>,
    ) -> Rc<Self> {
        let set = Self {
            env: env.clone(),
            backing,
            store,
            stacks,
            arrays: arrays.to_vec(),
            absent: RefCell::new(absent),
            events: events.clone(),
            list: RefCell::new(drives),
            replaced: RefCell::default(),
            replacing: RefCell::default(),
            changing: Mutex::default(),
            keep_places: RefCell::default(),
        };
        set.keep(|_| false);
        Rc::new(set)
    }

    /// Identifier of the store.
    pub fn store(&self) -> StoreId {
        self.store
    }

    /// Stacks of the store.
    pub fn stacks(&self) -> u16 {
        self.stacks
    }

    /// The arrays on the drives.
    pub fn arrays(&self) -> &[Rc<Array>] {
        &self.arrays
    }

    /// Handles of all drives, online or not.
    pub fn drives(&self) -> Vec<Rc<DriveHandle>> {
        self.list.borrow().clone()
    }

    /// Blank drives that replaced others since the start.
    pub(crate) fn replaced(&self) -> Ref<'_, BTreeSet<DriveId>> {
        self.replaced.borrow()
    }

    /// Finds a drive by its id, the beginning of its id, or its path.
    pub(crate) fn find(&self, id: &str) -> Result<Rc<DriveHandle>, AdminError> {
        let drives = self.list.borrow();
        let mut matching =
            drives.iter().filter(|drive| drive.id().to_string().starts_with(id) || drive.path() == id);
        match (matching.next(), matching.next()) {
            (Some(drive), None) if !id.is_empty() => Ok(drive.clone()),
            (Some(_), Some(_)) => {
                Err(AdminError::Refused(format!("several drives have ids that begin with {id}")))
            }
            _ => Err(AdminError::NotFound(format!("no drive {id}; `penstock drive list` shows them"))),
        }
    }

    /// The array of a stack that does not serve of which a drive has a part.
    fn absent_on(&self, drive: DriveId) -> Option<Descriptor> {
        let has_drive = |array: &&Descriptor| array.members.iter().any(|member| member.drive == drive);
        self.absent.borrow().iter().find(has_drive).cloned()
    }

    /// Nobody waits for the arrays of a stack any more that does not serve, nor for drives that only it
    /// needed.
    pub(crate) fn forget(&self, stack: StackNo) {
        self.absent.borrow_mut().retain(|array| array.stack != stack);
        // One that is there may be about to replace another.
        self.keep(|drive| drive.is_online());
        if let Err(why) = self.note_places() {
            tracing::warn!(why, "the paths of the drives could not be saved");
        }
    }

    /// Drives stay in the list that have a part of an array that is not forgotten, and these others.
    fn keep(&self, others: impl Fn(&DriveHandle) -> bool) {
        let is_needed = |drive: &Rc<DriveHandle>| {
            let id = drive.id();
            others(drive)
                || self.replacing.borrow().contains_key(&id)
                || self.arrays.iter().any(|array| array.member_on(id).is_some())
                || self.absent_on(id).is_some()
        };
        self.list.borrow_mut().retain(is_needed);
    }

    /// Takes a drive out of service. Refused if an array could not survive that, or if nobody knows, because
    /// the array does not serve.
    pub(crate) async fn fail(&self, id: &str) -> Result<Rc<DriveHandle>, AdminError> {
        let _one_at_a_time = self.changing.lock().await;
        let drive = self.find(id)?;
        let members: Vec<(Rc<Array>, MemberNo)> = self
            .arrays
            .iter()
            .filter_map(|array| Some((array.clone(), array.member_on(drive.id())?)))
            .collect();
        for (array, _) in &members {
            if !array.survives(&[drive.id()]) {
                return Err(AdminError::Refused(format!(
                    "drive {} is not failed: array {} can lose no further member; replace or rebuild the lost ones first",
                    drive.id(),
                    array.name()
                )));
            }
        }
        if let Some(array) = self.absent_on(drive.id()) {
            return Err(AdminError::Refused(format!(
                "drive {} is not failed: it has a part of array {}, which does not open; `penstock stack show {}` says why",
                drive.id(),
                array.name,
                array.stack
            )));
        }
        for (array, member) in &members {
            array.fail_member(*member, "failed by an administrator").await?;
        }
        drive.latch("failed by an administrator".into());
        Ok(drive)
    }

    /// Replaces a failed or missing drive by a blank one at `path`, or else at the old drive's path. If that
    /// failed for some arrays, another request continues with the same drive.
    pub(crate) async fn replace(&self, id: &str, path: Option<&str>) -> Result<Rc<DriveHandle>, AdminError> {
        let _one_at_a_time = self.changing.lock().await;
        let old = self.find(id)?;
        let begun = self.replacing.borrow().get(&old.id()).filter(|new| new.is_online()).cloned();
        let has_part = self.arrays.iter().any(|array| array.member_on(old.id()).is_some());
        if let Some(array) = self.absent_on(old.id()).filter(|_| !has_part && begun.is_none()) {
            return Err(AdminError::Refused(format!(
                "drive {} was replaced in all arrays but those of stack {}, which does not open; once it does, ask again",
                old.id(),
                array.stack
            )));
        }
        let new = match begun.or_else(|| self.half_in_place(&old, path)) {
            Some(new) if path.is_none_or(|path| path == new.path()) => new,
            Some(new) => {
                return Err(AdminError::Refused(format!(
                    "drive {} is being replaced by the one at {}: ask for that again, or take that one out of service first",
                    old.id(),
                    new.path()
                )));
            }
            None => self.new_drive(&old, path).await?,
        };
        self.put_in_place(&old, &new).await?;
        // Until this succeeds, the file names the old drive beside the new one.
        if let Err(why) = self.note_places() {
            let text = format!("the paths of the drives could not be saved: {why}");
            self.events.add(Severity::Warning, EventKind::DriveReplaced, drive_object(new.id()), text);
        }
        let text = format!("replaced by drive {} at {}", new.id(), new.path());
        self.events.add(Severity::Info, EventKind::DriveReplaced, drive_object(old.id()), text);
        Ok(new)
    }

    /// The drive of this store that is in use at a path.
    fn online_at(&self, path: &str) -> Option<Rc<DriveHandle>> {
        self.list.borrow().iter().find(|drive| drive.is_online() && drive.path() == path).cloned()
    }

    /// Returns a drive of this store that replaced the lost one in some arrays and can replace it in the
    /// others: the replacement continues that a restart interrupted.
    fn half_in_place(&self, old: &DriveHandle, path: Option<&str>) -> Option<Rc<DriveHandle>> {
        let path = path.unwrap_or(old.path());
        let new = self.online_at(path)?;
        let slices = |id: DriveId| self.slices_of(id);
        let apart = |(offset, len): (u64, u64)| {
            slices(new.id()).all(|(other, other_len)| offset + len <= other || other + other_len <= offset)
        };
        let with_both =
            |array: &Rc<Array>| array.member_on(old.id()).is_some() && array.member_on(new.id()).is_some();
        let fits = !old.is_online()
            && !self.arrays.iter().any(with_both)
            && slices(old.id()).all(apart)
            && new.size_bytes().is_some_and(|size| self.needed_bytes(old.id()) <= slices_end(size));
        fits.then_some(new)
    }

    /// Makes a blank drive that can replace a lost one.
    async fn new_drive(&self, old: &DriveHandle, path: Option<&str>) -> Result<Rc<DriveHandle>, AdminError> {
        if old.is_online() {
            return Err(AdminError::Refused(format!(
                "drive {} is online; `penstock drive fail` takes it out of service first",
                old.id()
            )));
        }
        let path = path.unwrap_or(old.path()).to_owned();
        if path.is_empty() {
            return Err(AdminError::Refused(format!(
                "it is not known where drive {} was: give a path",
                old.id()
            )));
        }
        if self.online_at(&path).is_some() {
            return Err(AdminError::Refused(format!("{path} is a drive of this store in use")));
        }
        self.refuse_what_is_wanted(&path, old).await?;
        let wanted = self.needed_bytes(old.id());
        // As large as the largest drive of the store: the size of one that the start did not find is unknown.
        let largest = self.list.borrow().iter().filter_map(|drive| drive.size_bytes()).max().unwrap_or(0);
        self.backing.create(&path, largest.max(wanted)).map_err(AdminError::Refused)?;
        let drive = self.backing.open(&path).map_err(AdminError::Refused)?;
        if slices_end(drive.size_bytes().max(4 << 20)) < wanted {
            return Err(AdminError::Refused(format!(
                "{path} has {} bytes and {wanted} are needed behind the superblock",
                drive.size_bytes()
            )));
        }
        let superblock = Superblock {
            store: self.store,
            drive: DriveId(random_id(&self.env)),
            pool: self.arrays.first().map(|array| array.pool()).unwrap_or_default(),
            size_bytes: drive.size_bytes(),
            created_ns: self.env.wall_ns(),
            stacks: self.stacks,
            features: Features::of_stacks(self.stacks > 1),
            ..Superblock::default()
        };
        Ok(DriveHandle::online(self.env.clone(), path, drive, superblock))
    }

    /// Refuses a path with contents that somebody may need. Overwritten are only blank drives and drives of
    /// this store that are not in use.
    async fn refuse_what_is_wanted(&self, path: &str, old: &DriveHandle) -> Result<(), AdminError> {
        let refuse = |why: String| {
            Err(AdminError::Refused(format!(
                "{why}; it is not written over. Remove or wipe it yourself if nobody wants it, or name another path"
            )))
        };
        let found = self.backing.look(path).map_err(AdminError::Refused)?;
        let is_anything = !matches!(found, Found::Nothing | Found::EmptyFile);
        if let Some(array) = self.absent_on(old.id()).filter(|_| is_anything && path == old.path()) {
            return refuse(format!("{path} may have a part of array {}, which does not open", array.name));
        }
        let failed_here = found == Found::File && path == old.path() && old.is_open();
        if !is_anything || failed_here {
            return Ok(());
        }
        let drive = match self.backing.open(path) {
            Ok(drive) => drive,
            Err(why) => return refuse(why),
        };
        // A file at the path where this store had the drive is that drive, even if it is damaged.
        let is_its_file = found == Found::File && path == old.path();
        let Some(read) = read_superblock(&self.env, &*drive).await else {
            return refuse(format!("{path}: no answer within {ANSWER:?}"));
        };
        match read {
            Err(SuperblockError::Blank) if found == Found::Device => {
                check_blank(&self.env, path, &*drive).await.or_else(refuse)
            }
            Ok(known) if known.store == self.store => {
                if let Some(array) = self.absent_on(known.drive) {
                    let name = &array.name;
                    return refuse(format!("{path} has a part of array {name}, which does not open"));
                }
                let in_use = |drive: &Rc<DriveHandle>| drive.id() == known.drive && drive.is_online();
                match self.list.borrow().iter().any(in_use) {
                    true => refuse(format!("{path} is drive {} of this store, which is in use", known.drive)),
                    false => Ok(()),
                }
            }
            Ok(known) => refuse(format!("{path} is drive {} of another store, {}", known.drive, known.store)),
            Err(SuperblockError::Foreign | SuperblockError::Blank | SuperblockError::Drive(_))
                if is_its_file =>
            {
                Ok(())
            }
            Err(SuperblockError::Blank) => refuse(format!("{path} is a file with contents")),
            Err(error) => refuse(format!("{path}: {error}")),
        }
    }

    /// Bytes from the start of a drive to the end of its last slice.
    fn needed_bytes(&self, drive: DriveId) -> u64 {
        self.slices_of(drive).map(|(offset, len)| offset + len).max().unwrap_or(0)
    }

    /// Offsets and lengths of a drive's slices, in bytes; also of those in stacks that do not serve.
    fn slices_of(&self, drive: DriveId) -> impl Iterator<Item = (u64, u64)> {
        let absent = self.absent.borrow();
        let absent = absent.iter().flat_map(|array| &array.members).filter(|member| member.drive == drive);
        let absent: Vec<(u64, u64)> = absent.map(|member| (member.offset, member.len)).collect();
        let serving = self.arrays.iter().filter_map(move |array| array.slice_of(drive));
        serving.chain(absent)
    }

    /// Gives a new drive the slices of an old one in all arrays that have not done that yet. The new drive is
    /// listed from the first change on, so that nothing takes it for something else, even after a failure.
    async fn put_in_place(&self, old: &Rc<DriveHandle>, new: &Rc<DriveHandle>) -> Result<(), AdminError> {
        // Also if a member is recorded as replaced but does not use the new drive yet.
        let place = |array: &Rc<Array>| {
            let of = |drive: DriveId| Some((array.member_on(drive)?, array.slice_of(drive)?));
            of(old.id()).or_else(|| of(new.id()).filter(|(member, _)| !array.is_in_place(*member)))
        };
        self.replaced.borrow_mut().insert(new.id());
        self.replacing.borrow_mut().insert(old.id(), new.clone());
        let is_known = self.list.borrow().iter().any(|drive| drive.id() == new.id());
        if !is_known {
            self.list.borrow_mut().push(new.clone());
        }
        let replace = async {
            // The next start must find the drive before it can be the only one that has some data.
            if !is_known {
                self.note_places().map_err(AdminError::Refused)?;
            }
            for array in &self.arrays {
                let Some((_, (offset, len))) = place(array) else { continue };
                allocate(&*self.backing, new.path(), &array.geometry(), offset, len)
                    .map_err(AdminError::Refused)?;
            }
            let row = |array: &Rc<Array>| {
                let (member, (offset, len)) = place(array)?;
                Some(SliceEntry { array: array.id(), member: member.number(), extent: 0, offset, len })
            };
            // Leftovers of a former use in the places of labels must not be read as one.
            for array in &self.arrays {
                let Some((_, (offset, len))) = place(array) else { continue };
                clear_label(&Slice::new(new.clone(), offset, len)).await.map_err(|error| {
                    AdminError::Refused(format!("drive {} does not take its label: {error}", new.id()))
                })?;
            }
            // A start must find the labels that the arrays write next.
            let rows: Vec<SliceEntry> = self.arrays.iter().filter_map(row).collect();
            if rows.is_empty() {
                let why = format!("drive {} is not replaced: no array has a part on it", old.id());
                return Err(AdminError::Refused(why));
            }
            new.put_slices(&rows).await.map_err(|error| {
                AdminError::Refused(format!("drive {} does not take its superblock: {error}", new.id()))
            })?;
            for array in &self.arrays {
                let Some((member, (offset, len))) = place(array) else { continue };
                array.replace_member(member, Slice::new(new.clone(), offset, len)).await?;
            }
            Ok(())
        };
        let result: Result<(), AdminError> = replace.await;
        let is_done = !self.arrays.iter().any(|array| place(array).is_some());
        if !is_done && self.arrays.iter().any(|array| array.member_on(new.id()).is_some()) {
            // The list keeps both drives, and the administrator has to repeat the request.
            return result;
        }
        let mut drives = self.list.borrow_mut();
        drives.retain(|drive| drive.id() != new.id());
        if is_done {
            let at = drives.iter().position(|drive| drive.id() == old.id()).expect("it was found there");
            match self.absent_on(old.id()) {
                None => drives[at] = new.clone(),
                // Its path is wanted by the start at which those arrays are there again.
                Some(_) => drives.insert(at + 1, new.clone()),
            }
        }
        self.replacing.borrow_mut().remove(&old.id());
        result
    }

    /// Sets the function that saves the paths of the drives. It is called when a drive replaces another:
    /// before the new one gets any data, and again when it is complete.
    pub(crate) fn keep_places(&self, keep: impl Fn(&Self) -> Result<(), String> + 'static) {
        *self.keep_places.borrow_mut() = Some(Rc::new(keep));
    }

    fn note_places(&self) -> Result<(), String> {
        let keep = self.keep_places.borrow().clone();
        keep.map_or(Ok(()), |keep| keep(self))
    }
}
