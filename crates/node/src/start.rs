//! Finding a store on its drives, and starting all its services.
//!
//! A drive that is missing, damaged, foreign or from a later release is reported and not used. The store
//! starts if the arrays of the first stack, which has the names, have enough members. Another stack that does
//! not open keeps its own data away.

use crate::backing::{ANSWER, Backing, read_superblock};
use crate::drive_set::DriveSet;
use crate::error::StartError;
use crate::event::{EventKind, Severity};
use crate::events::Events;
use crate::holding::Holding;
use crate::map_copies::{Opened, Restorable, Restore, Restores, Restoring};
use crate::memory::Memory;
use crate::node::{Assembly, Node};
use crate::scrubs::Scrubs;
use crate::stack::{HowToOpen, OpenedStack, RepairAfter, Stack};
use crate::stack_arrays::{Absent, StackArrays};
use crate::{leases, watch};
use futures_util::future::join_all;
use penstock_array::format::descriptor::{Descriptor, Role};
use penstock_array::ownership::Ownership;
use penstock_array::{Array, ArrayError, FoundLabel, Lacking, Opening, Roster, read_label};
use penstock_base::env::timeout;
use penstock_base::num::to_u16;
use penstock_base::{ArrayId, DecodeError, DriveId, Env, Epoch, PoolId, StackNo, StoreId};
use penstock_chunk::Target;
use penstock_drive::superblock::{SliceEntry, Superblock, SuperblockError};
use penstock_drive::{Drive, DriveError, DriveHandle, Slice};
use penstock_kv::{Engine, Mode};
use penstock_meta::{Elsewhere, MetaTarget, OtherTarget, forgotten_targets, open_store};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use tokio::sync::RwLock;

/// A path and the drive found there, or the reason why there is none.
pub struct Candidate {
    path: String,
    found: Result<FoundDrive, String>,
    is_blank: bool,
}

/// A drive with what says to whom it belongs.
struct FoundDrive {
    handle: Rc<DriveHandle>,
    superblock: Superblock,
    /// The label of each array that has a slice here, or why it cannot be read.
    labels: Vec<(ArrayId, Result<FoundLabel, DriveError>)>,
}

impl FoundDrive {
    async fn read(env: &Env, path: &str, drive: Rc<dyn Drive>) -> Option<Result<Self, SuperblockError>> {
        let superblock = match read_superblock(env, &*drive).await? {
            Ok(superblock) => superblock,
            Err(error) => return Some(Err(error)),
        };
        let handle = DriveHandle::online(env.clone(), path.to_owned(), drive, superblock.clone());
        let labelled = superblock.slices.iter().filter(|slice| slice.extent == 0);
        let read = async |entry: &SliceEntry| {
            let slice = Slice::new(handle.clone(), entry.offset, entry.len);
            (entry.array, read_label(&slice, entry.array).await)
        };
        let labels = timeout(env, ANSWER, join_all(labelled.map(read))).await?;
        assert!(labels.len() <= superblock.slices.len(), "a slice has one label");
        Some(Ok(Self { handle, superblock, labels }))
    }

    /// By array, the revision of its label here: 0 for a slice that was never used, none for a label that is
    /// damaged or cannot be read.
    fn revisions(&self) -> BTreeMap<ArrayId, Option<u64>> {
        let revision = |(array, found): &(ArrayId, Result<FoundLabel, DriveError>)| {
            let revision = match found {
                Ok(FoundLabel::Label(label)) => Some(label.revision),
                Ok(FoundLabel::Blank) => Some(0),
                Ok(FoundLabel::Damaged(_) | FoundLabel::Unknown(_)) | Err(_) => None,
            };
            (*array, revision)
        };
        self.labels.iter().map(revision).collect()
    }

    /// The drives that the labels name as members.
    fn members(&self) -> Vec<DriveId> {
        let descriptors = self.labels.iter().filter_map(|(_, found)| match found {
            Ok(FoundLabel::Label(label)) => label.descriptor().ok(),
            _ => None,
        });
        descriptors.flat_map(|found| found.members).map(|member| member.drive).collect()
    }

    /// True if no array was ever opened on the drive: all that its labels say is from its creation.
    fn is_unused(&self) -> bool {
        let is_first = |found: &Result<FoundLabel, DriveError>| match found {
            Ok(FoundLabel::Label(label)) => {
                label.descriptor().is_ok_and(|found| (found.epoch, found.revision) == (Epoch(0), 1))
            }
            _ => false,
        };
        !self.labels.is_empty() && self.labels.iter().all(|(_, found)| is_first(found))
    }
}

/// Tells what the drives at `paths` hold. An array that coordination knows was opened.
pub async fn look_for_store(
    env: &Env,
    backing: &dyn Backing,
    paths: &[String],
    ownership: &dyn Ownership,
) -> Holding {
    let candidates = find_drives(env, backing, paths).await;
    let drives: Vec<&FoundDrive> =
        candidates.iter().filter_map(|candidate| candidate.found.as_ref().ok()).collect();
    let other = candidates.iter().find(|candidate| !candidate.is_blank && candidate.found.is_err());
    match (drives.is_empty(), other.and_then(Candidate::problem)) {
        (true, None) => Holding::Nothing,
        (true, Some(why)) => Holding::Other(why.to_owned()),
        (false, _) => {
            let named: BTreeSet<DriveId> = drives.iter().flat_map(|drive| drive.members()).collect();
            let is_lacking = named.iter().any(|id| drives.iter().all(|drive| drive.superblock.drive != *id));
            let arrays = drives.iter().flat_map(|drive| drive.labels.iter().map(|(array, _)| *array));
            let claims = join_all(arrays.map(|array| ownership.current(array))).await;
            let is_unknown = claims.iter().all(|claim| matches!(claim, Ok(claim) if claim.revision == 0));
            let is_unused = is_unknown && drives.iter().all(|drive| drive.is_unused());
            match is_lacking && is_unused && other.is_none() {
                true => Holding::Unfinished,
                false => Holding::Store,
            }
        }
    }
}

/// Opens the drives at `paths` and reads their superblocks and labels. A drive that does not answer counts as
/// unusable.
pub async fn find_drives(env: &Env, backing: &dyn Backing, paths: &[String]) -> Vec<Candidate> {
    let look = |path: &String| {
        let (path, opened) = (path.clone(), backing.open(path));
        async move {
            let mut is_blank = false;
            let found = match opened {
                Err(why) => Err(why),
                Ok(drive) => match FoundDrive::read(env, &path, drive).await {
                    None => Err(format!("{path}: no answer within {ANSWER:?}")),
                    Some(Ok(found)) => Ok(found),
                    Some(Err(error @ SuperblockError::Shrunk { found, .. })) => {
                        // The making of a store was cut before the file got its size.
                        is_blank = found == 0;
                        Err(format!("{path} is too small: {error}"))
                    }
                    Some(Err(error)) => {
                        is_blank = matches!(error, SuperblockError::Blank);
                        Err(format!("{path}: {error}"))
                    }
                },
            };
            Candidate { path, found, is_blank }
        }
    };
    join_all(paths.iter().map(look)).await
}

impl Candidate {
    /// The store to which the drive belongs; none if the drive cannot be used.
    pub fn store(&self) -> Option<StoreId> {
        self.found.as_ref().ok().map(|found| found.superblock.store)
    }

    /// True if nothing is on the drive.
    pub fn is_blank(&self) -> bool {
        self.is_blank
    }

    /// Reason why the drive cannot be used, if it cannot.
    pub fn problem(&self) -> Option<&str> {
        self.found.as_ref().err().map(String::as_str)
    }
}

/// A label of a later release.
struct UnknownLabel {
    array: ArrayId,
    drive: DriveId,
    /// `u64::MAX` if the label does not say which: it may be the newest.
    revision: u64,
    error: DecodeError,
}

/// Decodes the newest descriptor of each array, from all labels. A damaged or unreadable one is an error only
/// if there is no other one; the claim on record tells if what is left is too old.
fn newest_descriptors(candidates: &[Candidate]) -> Result<BTreeMap<ArrayId, Descriptor>, StartError> {
    let mut readable: BTreeMap<ArrayId, Vec<Descriptor>> = BTreeMap::new();
    let mut damaged: BTreeMap<ArrayId, DecodeError> = BTreeMap::new();
    let mut unread: BTreeMap<ArrayId, &DriveError> = BTreeMap::new();
    let mut unknown: Vec<UnknownLabel> = Vec::new();
    for found in candidates.iter().filter_map(|candidate| candidate.found.as_ref().ok()) {
        for (array, label) in &found.labels {
            let (revision, decoded) = match label {
                Ok(FoundLabel::Label(label)) => (label.revision, label.descriptor()),
                // It may be the newest of all.
                Ok(FoundLabel::Unknown(error)) => (u64::MAX, Err(error.clone())),
                Ok(FoundLabel::Damaged(error)) => (0, Err(error.clone())),
                // The slice was never used: it was about to take a member's place.
                Ok(FoundLabel::Blank) => continue,
                Err(error) => {
                    unread.insert(*array, error);
                    continue;
                }
            };
            match decoded {
                Ok(descriptor) => readable.entry(*array).or_default().push(descriptor),
                Err(error @ DecodeError::Unknown { .. }) => {
                    let drive = found.superblock.drive;
                    unknown.push(UnknownLabel { array: *array, drive, revision, error });
                }
                Err(error) => {
                    tracing::error!(%array, path = found.handle.path(), %error, "the label of a slice is damaged");
                    damaged.insert(*array, error);
                }
            }
        }
    }
    let newest = readable.into_iter().filter_map(|(array, found)| Some((array, Descriptor::newest(found)?)));
    let newest: BTreeMap<ArrayId, Descriptor> = newest.collect();
    // Of a later release: an older one must not be used instead. A drive that is no member says nothing.
    let counts = |unknown: &UnknownLabel| {
        newest.get(&unknown.array).is_none_or(|found| {
            let is_member = found.members.iter().any(|member| member.drive == unknown.drive);
            is_member && found.revision <= unknown.revision
        })
    };
    if let Some(unknown) = unknown.into_iter().find(counts) {
        return Err(ArrayError::from(unknown.error).into());
    }
    if let Some((array, error)) = unread.into_iter().find(|(array, _)| !newest.contains_key(array)) {
        return Err(StartError::Refused(format!(
            "no label of array {array} can be read now ({error}); nothing was changed: try again, or bring the missing drives back"
        )));
    }
    if let Some((_, error)) = damaged.into_iter().find(|(array, _)| !newest.contains_key(array)) {
        return Err(ArrayError::from(error).into());
    }
    Ok(newest)
}

/// Options of a start.
pub struct Start {
    /// The store to start, needed if several are found.
    pub wanted: Option<StoreId>,
    /// Paths at which drives were last seen, for drives that are not found.
    pub last_paths: BTreeMap<DriveId, String>,
    /// Mode of the key-value store.
    pub mode: Mode,
    /// Decides if the start may give up data that only missing drives have.
    pub lacking: Lacking,
    /// Bytes of memory that the machine has, of which the store uses a quarter at most for what it keeps
    /// there; none for as many as suit most stores.
    pub machine_bytes: Option<u64>,
    /// Bytes of memory for pages of stripe tables, in place of a share of those of the machine.
    pub table_memory: Option<usize>,
    /// Makes the key-value store anew from the last copy of the map. Refused if it can be read. The caller
    /// repairs the file system before it serves anything.
    pub restore: Option<Restore>,
}

impl Start {
    /// Starts the store whose drives are among `candidates`.
    pub async fn open(
        self,
        env: &Env,
        backing: Rc<dyn Backing>,
        mut candidates: Vec<Candidate>,
        ownership: Rc<dyn Ownership>,
    ) -> Result<Rc<Node>, StartError> {
        let Self { wanted, last_paths, mode, lacking, machine_bytes, table_memory, restore } = self;
        let events = Events::new(env);
        let store = wanted.or_else(|| candidates.iter().find_map(Candidate::store)).ok_or_else(|| {
            let problems: Vec<&str> = candidates.iter().filter_map(Candidate::problem).collect();
            StartError::NoStore(problems.join("; "))
        })?;
        for candidate in &mut candidates {
            if candidate.store().is_some_and(|found| found != store) {
                let why = format!("{} belongs to another store", candidate.path);
                candidate.found = Err(why);
            }
        }
        let unused = |why: &str| {
            tracing::warn!("drive not used: {why}");
            events.add(Severity::Warning, EventKind::DriveUnused, "node", format!("drive not used: {why}"));
        };
        candidates.iter().filter_map(Candidate::problem).for_each(unused);
        let descriptors = newest_descriptors(&candidates)?;
        let stacks = check_pool(&candidates, &descriptors)?;
        let problems: Vec<String> =
            candidates.iter().filter_map(Candidate::problem).map(str::to_owned).collect();
        let drives = handles(env, candidates, &descriptors, &last_paths, unused)?;
        let memory = Memory::of(machine_bytes, stacks);
        let table_bytes = table_memory.unwrap_or(memory.table_bytes);
        let roster = Roster::with_table_memory(env, Some(table_bytes));
        // All arrays are read before one is changed, so a refusal for the first stack leaves all unchanged.
        let mut read = Vec::new();
        for number in (0..stacks).map(StackNo) {
            let of_stack = descriptors.values().filter(|array| array.stack == number);
            let openings = read_stack(env, of_stack, &drives, &ownership, &roster, lacking).await;
            read.push((number, openings));
        }
        let missing = |why: String| StartError::NoStore([&[why], &problems[..]].concat().join("; "));
        let (mut opened, mut absent) = (Vec::new(), Vec::new());
        for (number, openings) in read {
            let arrays = match openings {
                Ok(Some(openings)) => openings.take_over(number).await,
                Ok(None) => {
                    let why = format!("no drive that can be used has the arrays of stack {number}");
                    Err(if number == StackNo::FIRST { missing(why) } else { StartError::Refused(why) })
                }
                Err(error) => Err(error),
            };
            match arrays {
                Ok(arrays) => opened.push(arrays),
                Err(error) if number == StackNo::FIRST => return Err(error),
                Err(error) => absent.push(Absent::new(number, error.to_string())),
            }
        }
        for drive in drives.iter().filter(|drive| drive.is_online()) {
            if let Err(error) = drive.note_size().await {
                tracing::warn!(path = drive.path(), %error, "the drive has grown and does not take its superblock");
            }
        }
        let serving = Rc::new(RwLock::new(()));
        let how = HowToOpen {
            env,
            events: &events,
            engine: Engine { mode, cache_bytes: memory.kv_cache_bytes },
            memory: memory.target,
            repair: restore.map(|restore| RepairAfter { may_lack: restore.may_lack }),
            generation: env.random(),
            stacks,
            serving: &serving,
            gate: &Rc::default(),
        };
        let services = async {
            let restored = match restore {
                Some(restore) => Box::pin(restore_rows(&how, restore, &opened, &mut absent)).await?,
                None => Opened::new(),
            };
            Box::pin(open_services(&how, &opened, restored, &mut absent)).await
        };
        // Nothing goes on with them: another start may follow.
        let stop = |_: &StartError| opened.iter().for_each(StackArrays::stop);
        let Services { stacks: serving_stacks, restores, meta } = services.await.inspect_err(stop)?;
        for Absent { number, why, .. } in absent.iter().filter(|absent| !absent.is_forgotten) {
            tracing::error!(%number, why, "a stack does not open, and its data is not there");
            let text =
                format!("it does not open: files with data on target {} lack it: {why}", number.target());
            events.add(Severity::Error, EventKind::StackAbsent, format!("stack {number}"), text);
        }
        let arrays: Vec<Rc<Array>> =
            serving_stacks.iter().flat_map(|stack| stack.arrays.both()).cloned().collect();
        // Nobody waits for those of forgotten targets.
        let is_absent = |array: &Descriptor| {
            absent.iter().any(|absent| absent.number == array.stack && !absent.is_forgotten)
        };
        let absent_arrays = descriptors.into_values().filter(is_absent).collect();
        let drives = DriveSet::new(env, backing, (store, stacks), (&arrays, absent_arrays), &events, drives);
        let scrubs = Scrubs::new(env, &drives, &events, meta.info().created_ns);
        for (target, restored) in &restores.now {
            let text = format!(
                "target {target}: {} rows come from copy {} of the map",
                restored.rows, restored.copy.serial
            );
            events.add(Severity::Error, EventKind::MapRestored, "node", text);
        }
        let parts =
            Assembly { drives, stacks: serving_stacks, absent, serving, restores, meta, events, scrubs };
        let node = Node::new(env, parts);
        env.spawn("node watch", Box::pin(watch::run(node.clone())));
        env.spawn("session leases", Box::pin(leases::run(node.clone())));
        Ok(node)
    }
}

/// The arrays of a stack, read and not yet taken over.
struct Openings {
    data: Opening,
    meta: Opening,
}

impl Openings {
    /// Takes both arrays over.
    async fn take_over(self, number: StackNo) -> Result<StackArrays, StartError> {
        let meta = self.meta.take_over().await?;
        let data = self.data.take_over().await.inspect_err(|_| meta.stop())?;
        Ok(StackArrays { number, data, meta })
    }
}

/// Reads the arrays of a stack, and changes nothing. None if one of them is missing.
async fn read_stack(
    env: &Env,
    descriptors: impl Iterator<Item = &Descriptor>,
    drives: &[Rc<DriveHandle>],
    ownership: &Rc<dyn Ownership>,
    roster: &Rc<Roster>,
    lacking: Lacking,
) -> Result<Option<Openings>, StartError> {
    let (mut data, mut meta) = (None, None);
    for descriptor in descriptors {
        let role = descriptor.role;
        let opening = read_array(env, descriptor.clone(), drives, ownership.clone(), roster, lacking).await?;
        match role {
            Role::Data => data = Some(opening),
            Role::Metadata => meta = Some(opening),
        }
    }
    Ok(data.zip(meta).map(|(data, meta)| Openings { data, meta }))
}

/// Makes key-value stores anew from copies of the map.
async fn restore_rows(
    how: &HowToOpen<'_>,
    restore: Restore,
    arrays: &[StackArrays],
    absent: &mut Vec<Absent>,
) -> Result<Opened, StartError> {
    let restorable = |arrays| Restorable { arrays, home: how.home(arrays) };
    let all: Vec<Restorable<'_>> = arrays.iter().map(restorable).collect();
    let restoring = Restoring { env: how.env, engine: how.engine, how: restore, stacks: how.stacks };
    restoring.restore(&all, absent).await
}

/// The services of a store.
struct Services {
    stacks: Vec<Stack>,
    restores: Restores,
    meta: Rc<MetaTarget>,
}

/// Opens key-value stores, targets and the metadata target. Stacks without names that do not open are added
/// to those that are absent.
async fn open_services(
    how: &HowToOpen<'_>,
    arrays: &[StackArrays],
    mut restored: Opened,
    absent: &mut Vec<Absent>,
) -> Result<Services, StartError> {
    let may_lack = how.repair.is_some_and(|repair| repair.may_lack);
    let mut restores = Restores { may_lack, ..Restores::default() };
    let (mut stacks, mut names, mut forgotten) = (Vec::new(), None, BTreeSet::new());
    let is_absent = |absent: &[Absent], number| absent.iter().any(|absent| absent.number == number);
    for of_stack in arrays {
        let number = of_stack.number;
        if is_absent(absent, number) || forgotten.contains(&number.target()) {
            restored.remove(&number).into_iter().for_each(|(kv, _)| kv.retire());
            of_stack.stop();
            continue;
        }
        let is_first = number == StackNo::FIRST;
        let (kv, of_restore) = restored.remove(&number).unzip();
        let opened = async {
            let opened = how.open(of_stack, kv).await?;
            let first = async {
                match is_first {
                    true => forgotten = forgotten_targets(&*opened.stack.kv).await?,
                    false => open_store(&*opened.stack.kv, opened.new).await?,
                }
                Ok::<_, StartError>(())
            };
            first.await.inspect_err(|_| opened.stack.kv.retire())?;
            Ok::<_, StartError>(opened)
        };
        match opened.await {
            Ok(OpenedStack { stack, is_unrepaired, new }) => {
                if is_first {
                    names = Some(new);
                }
                restores.add(number.target(), of_restore.flatten(), is_unrepaired);
                stacks.push(stack);
            }
            Err(error) if is_first => {
                restored.values().for_each(|(kv, _)| kv.retire());
                return Err(error);
            }
            Err(error) => {
                of_stack.stop();
                absent.push(Absent::new(number, error.to_string()));
            }
        }
    }
    absent.retain(|absent| !forgotten.contains(&absent.number.target()));
    absent.extend(forgotten.iter().map(|target| Absent::forgotten(StackNo(to_u16(target.0)))));
    meet(&stacks, restores.are_none()).await;
    let new = names.expect("a start without the first stack has failed");
    let home = &stacks[0];
    let others =
        stacks[1..].iter().filter_map(|stack| Some(stack.work.clone()? as Rc<dyn OtherTarget>)).collect();
    let elsewhere = Elsewhere::new(home.target_id(), how.stacks.into(), others);
    let (kv, target) = (home.kv.clone(), home.target.clone());
    let meta = MetaTarget::open(how.env, kv, target, elsewhere, how.gate.clone(), new).await?;
    for (target, why) in meta.away() {
        let at = stacks.iter().position(|stack| stack.target_id() == *target).expect("it was given to open");
        let stack = stacks.remove(at);
        stack.stop();
        stacks.iter().for_each(|other| other.target.part(*target));
        absent.push(Absent::new(stack.number(), why.clone()));
    }
    Ok(Services { stacks, restores, meta })
}

/// Has targets get to know each other, and ends the loans that a crash has left to a lender alone. What one
/// that is not repaired after a restore has forgotten stays: the repair sees to it.
async fn meet(stacks: &[Stack], are_repaired: bool) {
    let targets: Vec<&Rc<Target>> = stacks.iter().map(|stack| &stack.target).collect();
    for target in &targets {
        let others: Vec<Rc<Target>> =
            targets.iter().filter(|other| !Rc::ptr_eq(other, target)).map(|other| (*other).clone()).collect();
        target.meet(&others);
    }
    if !are_repaired {
        return;
    }
    for target in targets {
        if let Err(error) = target.end_unknown_loans().await {
            tracing::warn!(%error, "unused loans could not be ended; the next start tries again");
        }
    }
}

/// Fails if the drives have arrays of several pools, several of one role and stack, or arrays of stacks that
/// the store does not have: this release would join the data of one with the rows of another. Returns the
/// number of stacks.
fn check_pool(
    candidates: &[Candidate],
    descriptors: &BTreeMap<ArrayId, Descriptor>,
) -> Result<u16, StartError> {
    let superblocks = || {
        candidates
            .iter()
            .filter_map(|candidate| Some((&candidate.path, &candidate.found.as_ref().ok()?.superblock)))
    };
    let stacks = superblocks().map(|(_, superblock)| superblock.stacks).max().unwrap_or(1);
    if let Some((path, superblock)) = superblocks().find(|(_, superblock)| superblock.stacks != stacks) {
        return Err(StartError::Refused(format!(
            "{path} is a drive of a store with {} targets, and others are of one with {stacks}",
            superblock.stacks
        )));
    }
    let pools: BTreeSet<PoolId> = descriptors.values().map(|array| array.pool).collect();
    let mut places = BTreeSet::new();
    let is_double = |array: &&Descriptor| !places.insert((array.stack, array.role));
    let doubles = descriptors.values().filter(is_double).count();
    if doubles > 0 || pools.len() > 1 {
        let of_role = |role| descriptors.values().filter(|array| array.role == role).count();
        return Err(StartError::Refused(format!(
            "the drives have {} data arrays and {} metadata arrays of {} pools; this release opens stores with \
             one of each for each of {stacks} targets, in one pool",
            of_role(Role::Data),
            of_role(Role::Metadata),
            pools.len()
        )));
    }
    if let Some(array) = descriptors.values().find(|array| array.stack.0 >= stacks) {
        return Err(StartError::Refused(format!(
            "array {} is of stack {}, and the store has {stacks}",
            array.name, array.stack
        )));
    }
    let members: BTreeSet<DriveId> =
        descriptors.values().flat_map(|array| array.members.iter().map(|member| member.drive)).collect();
    for (path, Superblock { drive, pool, .. }) in superblocks() {
        if members.contains(drive) && !pools.contains(pool) {
            return Err(StartError::Refused(format!(
                "{path} is a drive of pool {pool}, and its arrays are of another one"
            )));
        }
    }
    Ok(stacks)
}

/// Makes a handle for every drive that some array names: online if it was found, missing if not. Of two
/// copies of one drive the newer one is used.
fn handles(
    env: &Env,
    candidates: Vec<Candidate>,
    descriptors: &BTreeMap<ArrayId, Descriptor>,
    last_paths: &BTreeMap<DriveId, String>,
    unused: impl Fn(&str),
) -> Result<Vec<Rc<DriveHandle>>, StartError> {
    let mut copies: BTreeMap<DriveId, Vec<FoundDrive>> = BTreeMap::new();
    let mut problems: BTreeMap<String, String> = BTreeMap::new();
    for Candidate { path, found: drive, .. } in candidates {
        match drive {
            Ok(drive) => copies.entry(drive.superblock.drive).or_default().push(drive),
            Err(why) => drop(problems.insert(path, why)),
        }
    }
    let mut found: BTreeMap<DriveId, Rc<DriveHandle>> = BTreeMap::new();
    for (id, copies) in copies {
        let (newest, others) = newest_copy(copies)?;
        for other in others {
            let used = newest.path();
            unused(&format!("{} is a copy of the drive at {used}, and not newer", other.path()));
        }
        found.insert(id, newest);
    }
    let mut handles: Vec<Rc<DriveHandle>> = Vec::new();
    // In the order in which a store is made of drives: the array with the fewest members comes first, because
    // the members of the data array begin behind those of `meta`.
    let mut ordered: Vec<&Descriptor> = descriptors.values().collect();
    ordered.sort_by_key(|descriptor| descriptor.members.len());
    for member in ordered.into_iter().flat_map(|descriptor| &descriptor.members) {
        if handles.iter().any(|handle| handle.id() == member.drive) {
            continue;
        }
        handles.push(found.get(&member.drive).cloned().unwrap_or_else(|| {
            let path = last_paths.get(&member.drive).cloned().unwrap_or_default();
            let why = problems.get(&path).cloned().unwrap_or_else(|| "not found".to_owned());
            DriveHandle::missing(env.clone(), path, member.drive, why)
        }));
    }
    Ok(handles)
}

/// The one of these copies of one drive that is newer than all others, and the others.
fn newest_copy(mut copies: Vec<FoundDrive>) -> Result<(Rc<DriveHandle>, Vec<Rc<DriveHandle>>), StartError> {
    let is_newest = |at: usize| {
        let others = copies.iter().enumerate().filter(|(other, _)| *other != at);
        others.into_iter().all(|(_, other)| is_newer(&copies[at], other) == Some(true))
    };
    let Some(newest) = (0..copies.len()).find(|at| is_newest(*at)) else {
        let paths: Vec<&str> = copies.iter().map(|copy| copy.handle.path()).collect();
        return Err(StartError::Refused(format!(
            "{} are copies of one drive, and their labels do not say which is newest: take away those that are not to be used",
            paths.join(" and ")
        )));
    };
    let newest = copies.remove(newest).handle;
    Ok((newest, copies.into_iter().map(|copy| copy.handle).collect()))
}

/// True if `one` is newer than `other`, a copy of the same drive, by the revisions in their labels. None if
/// nothing says so: each is newer for some array, a label of one of them cannot be read, or both are alike.
/// The number of updates of the superblock decides only between equals, because a copy's own updates do not
/// show that it contains the changes of the other.
fn is_newer(one: &FoundDrive, other: &FoundDrive) -> Option<bool> {
    let (one_has, other_has) = (one.revisions(), other.revisions());
    let (mut leads, mut trails) = (false, false);
    for array in one_has.keys().chain(other_has.keys()) {
        let of =
            |revisions: &BTreeMap<ArrayId, Option<u64>>| revisions.get(array).copied().unwrap_or(Some(0));
        let (mine, its) = (of(&one_has)?, of(&other_has)?);
        leads |= mine > its;
        trails |= mine < its;
    }
    let (mine, its) = (one.superblock.seq, other.superblock.seq);
    match (leads, trails) {
        (true, true) => None,
        (false, false) => (mine != its).then_some(mine > its),
        (newer, _) => Some(newer),
    }
}

async fn read_array(
    env: &Env,
    descriptor: Descriptor,
    drives: &[Rc<DriveHandle>],
    ownership: Rc<dyn Ownership>,
    roster: &Rc<Roster>,
    lacking: Lacking,
) -> Result<Opening, StartError> {
    for (position, member) in (0..).zip(&descriptor.members) {
        let drive = drives.iter().find(|drive| drive.id() == member.drive && drive.is_online());
        let Some(drive) = drive else { continue };
        // Otherwise the array would write over what belongs to another one.
        let row = SliceEntry {
            array: descriptor.array,
            member: position,
            extent: 0,
            offset: member.offset,
            len: member.len,
        };
        if !drive.superblock().await.slices.contains(&row) {
            return Err(StartError::Refused(format!(
                "array {}: the slice table of {} does not have its slice {}+{}; nothing was changed",
                descriptor.name,
                drive.path(),
                member.offset,
                member.len
            )));
        }
    }
    let slice = |member: &penstock_array::format::descriptor::MemberEntry| {
        let drive = drives.iter().find(|drive| drive.id() == member.drive && drive.is_online())?;
        Some(Slice::new(drive.clone(), member.offset, member.len))
    };
    let members = descriptor.members.iter().map(slice).collect();
    Ok(Opening::read(env, descriptor, members, ownership, roster, lacking).await?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_array::format::descriptor::MemberEntry;
    use penstock_array::format::label::Label;
    use penstock_array::{Layout, MemberNo};
    use penstock_base::{Features, Id128, PoolId};
    use penstock_drive::MemoryDrive;

    const ARRAY: ArrayId = ArrayId(Id128([5; 16]));

    fn descriptor(revision: u64) -> Descriptor {
        let member = |number: u8| MemberEntry {
            drive: DriveId(Id128([number; 16])),
            offset: 1 << 20,
            len: 1 << 20,
            generation: 1,
            stale: false,
            epoch: Epoch(1),
        };
        Descriptor {
            array: ARRAY,
            pool: PoolId::default(),
            stack: StackNo::FIRST,
            name: "data".into(),
            role: Role::Data,
            k: 1,
            m: 2,
            layout: Layout::one_group(3).unwrap(),
            strip_blocks: 8,
            log_bytes: 4 << 20,
            segment_bytes: 128 << 10,
            rows: 8,
            epoch: Epoch(3),
            revision,
            root_epoch: Epoch(3),
            carriers_epoch: 1,
            carriers: vec![0, 1, 2],
            members: (0..3).map(member).collect(),
        }
    }

    fn candidate(path: &str, drive: u8, revision: u64) -> Candidate {
        let label = Label::new(&descriptor(revision), MemberNo::new(drive.into()));
        let superblock = Superblock {
            store: StoreId(Id128([9; 16])),
            drive: DriveId(Id128([drive; 16])),
            seq: 5,
            size_bytes: 8 << 20,
            features: Features::default(),
            ..Superblock::default()
        };
        let drive: Rc<dyn Drive> = Rc::new(MemoryDrive::new(4096));
        let handle =
            DriveHandle::online(penstock_sim::World::new(1).env(), path.into(), drive, superblock.clone());
        let labels = vec![(ARRAY, Ok(FoundLabel::Label(label)))];
        Candidate { path: path.into(), found: Ok(FoundDrive { handle, superblock, labels }), is_blank: false }
    }

    fn found(candidate: Candidate) -> FoundDrive {
        candidate.found.unwrap_or_else(|why| panic!("{why}"))
    }

    /// Regression: the first data array was joined with the first metadata array, whatever pools they were
    /// of.
    #[test]
    fn arrays_of_several_pools_or_stacks_are_refused() {
        let (pool, other) = (PoolId::default(), PoolId(Id128([7; 16])));
        let drive = |path| candidate(path, 1, 1);
        let of_stacks = |path, stacks| {
            let mut drive = drive(path);
            if let Ok(found) = &mut drive.found {
                found.superblock.stacks = stacks;
            }
            drive
        };
        for (arrays, drives, why) in [
            (vec![(5, Role::Data, pool, 0), (6, Role::Metadata, pool, 0)], vec![drive("a")], None),
            (vec![(5, Role::Data, pool, 0), (6, Role::Metadata, other, 0)], vec![], Some("2 pools")),
            (vec![(5, Role::Data, pool, 0), (6, Role::Data, pool, 0)], vec![], Some("2 data arrays")),
            (
                vec![(5, Role::Metadata, pool, 0), (6, Role::Metadata, pool, 0)],
                vec![],
                Some("2 metadata arrays"),
            ),
            (vec![(5, Role::Data, other, 0)], vec![drive("a")], Some("a is a drive of pool")),
            (vec![], vec![drive("a")], None),
            (vec![(5, Role::Data, pool, 0), (6, Role::Data, pool, 1)], vec![of_stacks("a", 2)], None),
            (
                vec![(5, Role::Data, pool, 1), (6, Role::Data, pool, 1)],
                vec![of_stacks("a", 2)],
                Some("2 data"),
            ),
            (vec![(5, Role::Data, pool, 2)], vec![of_stacks("a", 2)], Some("is of stack 2")),
            (vec![], vec![of_stacks("a", 2), of_stacks("b", 1)], Some("b is a drive of a store with 1")),
        ] {
            let arrays = arrays.into_iter().map(|(id, role, pool, stack)| {
                let array = ArrayId(Id128([id; 16]));
                (array, Descriptor { array, role, pool, stack: StackNo(stack), ..descriptor(1) })
            });
            let checked = check_pool(&drives, &arrays.collect());
            assert_eq!(checked.is_err(), why.is_some(), "{why:?}");
            if let (Err(error), Some(why)) = (checked, why) {
                assert!(error.to_string().contains(why), "{error}");
            }
        }
    }

    /// Regression: a copy was taken for newer than the drive whose label could not be read, and which of two
    /// equal copies was used depended on the order of their paths.
    #[test]
    fn of_two_copies_the_newer_one_is_used_if_that_is_known() {
        let (old, new) = (found(candidate("old", 0, 5)), found(candidate("new", 0, 7)));
        assert_eq!((is_newer(&new, &old), is_newer(&old, &new)), (Some(true), Some(false)));
        assert_eq!(is_newer(&old, &found(candidate("twin", 0, 5))), None);
        let label = |label: Result<FoundLabel, DriveError>| {
            let drive = found(candidate("bad", 0, 7));
            FoundDrive { labels: vec![(ARRAY, label)], ..drive }
        };
        let bad = DecodeError::Bad { what: "label", why: "a test" };
        for unknown in [Err(DriveError::Down("a test".into())), Ok(FoundLabel::Damaged(bad))] {
            let drive = label(unknown);
            assert_eq!((is_newer(&drive, &old), is_newer(&old, &drive)), (None, None));
        }
        let blank = label(Ok(FoundLabel::Blank));
        assert_eq!((is_newer(&blank, &old), is_newer(&old, &blank)), (Some(false), Some(true)));
    }

    /// Regression: which of three copies was used depended on the order of their paths.
    #[test]
    fn the_newest_of_several_copies_is_used_whatever_their_order() {
        let copies = |revisions: &[u64]| {
            revisions.iter().map(|revision| found(candidate(&revision.to_string(), 0, *revision))).collect()
        };
        for order in [[5, 5, 7], [5, 7, 5], [7, 5, 5]] {
            let (newest, others) = newest_copy(copies(&order)).unwrap_or_else(|error| panic!("{error}"));
            assert_eq!((newest.path(), others.len()), ("7", 2), "{order:?}");
        }
        let error = newest_copy(copies(&[7, 5, 7])).err().map(|error| error.to_string());
        assert!(error.is_some_and(|error| error.contains("7 and 5 and 7 are copies")));
        assert_eq!(
            newest_copy(copies(&[5])).ok().map(|(newest, _)| newest.path().to_owned()).as_deref(),
            Some("5")
        );
    }

    /// Regression: a label of a later release on a drive that is no member kept the array from starting.
    #[test]
    fn labels_of_a_later_release_count_on_members_only() {
        let unknown = || DecodeError::Unknown { what: "label", field: "version", found: 2 };
        let later = |number: u8| {
            let mut found = candidate("later", number, 7);
            if let Ok(drive) = &mut found.found {
                drive.labels = vec![(ARRAY, Ok(FoundLabel::Unknown(unknown())))];
            }
            found
        };
        let stranger = |mut found: Candidate| {
            if let Ok(drive) = &mut found.found {
                drive.superblock.drive = DriveId(Id128([77; 16]));
            }
            found
        };
        let drives = [candidate("a", 0, 7), stranger(later(1))];
        assert_eq!(newest_descriptors(&drives).unwrap()[&ARRAY].revision, 7);
        assert!(newest_descriptors(&[candidate("a", 0, 7), later(1)]).is_err());
        assert!(newest_descriptors(&[stranger(later(1))]).is_err(), "there is nothing older");
    }

    /// One drive is found at two paths: its descriptor vouches for itself.
    #[test]
    fn one_drive_at_two_paths_does_not_count_as_two_drives() {
        let far = (1 << 62) - 1;
        let drives = [
            candidate("a", 0, far),
            candidate("link to a", 0, far),
            candidate("b", 1, 7),
            candidate("c", 2, 7),
        ];
        assert_eq!(newest_descriptors(&drives).unwrap()[&ARRAY].revision, 7);
    }
}
