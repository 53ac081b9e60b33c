//! The restore of all rows of stacks from copies of the map, before the services of a store are opened.
//!
//! Each stack has copies of its own, and is planned for itself ([`Plan`]). Nothing is changed before every
//! copy that is needed was read and verified in full, and an administrator has agreed to all of them. Then
//! all of the key-value store of each such stack is discarded, and it is made anew, that of the names first.
//! If the restore is interrupted, the rows by which a start knows the store are missing; the start is refused
//! or goes on without that stack, and the restore can be made again.

use super::restore_report;
use crate::error::StartError;
use crate::stack_arrays::{Absent, StackArrays};
use penstock_array::{ArrayError, Discard, Volume};
use penstock_base::num::{to_u16, to_usize};
use penstock_base::rank::scoped;
use penstock_base::{BLOCK_BYTES, Class, DecodeError, Env, Ino, StackNo, TargetId};
use penstock_chunk::ChunkError;
use penstock_chunk::copies::{
    Anchor, Found, How, Names, Newer, Restored, anchor_stripes, find, newest, preview, restore, tried,
};
use penstock_drive::Io;
use penstock_kv::{AheadKv, Engine, Kv, KvError, for_each};
use penstock_meta::rows::{Home, StoreRow};
use penstock_meta::{
    MetaError, RestoredNames, check_store, forgotten_targets, number_of_newer, reserve_for_newer,
    reserved_inodes,
};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

const READS: Io = Io::new(Class::Meta, "restore.look");
/// Stripes that are looked for at a time.
const STRIPES: usize = 1024;

/// The consent of an administrator to a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consent {
    /// None yet.
    No,
    /// To a restore from the copies that make this number ([`StartError::Unconfirmed`]).
    To(u64),
    /// To one from any copies.
    ToAny,
}

/// A restore from a copy of the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restore {
    /// The treatment of blocks that may be newer.
    pub newer: Newer,
    /// Without it the start ends with [`StartError::Unconfirmed`], which says why the rows cannot be read and
    /// what the restore would do.
    pub consent: Consent,
    /// A newer copy that cannot be read may be given up.
    pub may_pass_over: bool,
    /// Also while drives are missing that may have the rows.
    pub may_lack: bool,
    /// Also if every row of all stacks can be read, or if it is not certain that they are lost.
    pub is_forced: bool,
}

/// The age of a copy, in words.
fn age_of(env: &Env, copy: &Anchor) -> String {
    let minutes = env.wall_ns().saturating_sub(copy.created_ns) / 60_000_000_000;
    match minutes {
        ..120 => format!("{minutes} minutes"),
        120..2880 => format!("{} hours", minutes / 60),
        _ => format!("{} days", minutes / 1440),
    }
}

/// The error of a start whose rows cannot be read, with what can be done.
pub(crate) async fn with_copy(error: StartError, arrays: &StackArrays) -> StartError {
    let Ok((_, anchors)) = arrays.parts() else { return error };
    let copy = scoped(newest(&anchors)).await;
    match copy {
        Some(copy) if !is_to_be_kept(&error) => StartError::Refused(format!(
            "{error}\nnames and maps cannot be read; copy {} of them may be whole: bring back missing drives first, then `penstock fs check --repair --map` makes the store anew from it",
            copy.serial
        )),
        _ => error,
    }
}

/// The contents of rows that can be read, as far as a restore needs them.
struct Rows {
    store: StoreRow,
    /// Inode numbers are reserved up to this one; 0 in a stack without names.
    reserved: u64,
    /// Targets that are forgotten; none in a stack without names.
    forgotten: BTreeSet<TargetId>,
}

/// Fails if some row cannot be read, or if those are missing by which a start knows the store.
async fn read_all(env: &Env, arrays: &StackArrays, engine: Engine, home: Home) -> Result<Rows, StartError> {
    let kv = arrays.open_kv(env, engine).await?;
    let read = async {
        let missing = || StartError::Refused("it has no rows".into());
        let store = check_store(&*kv, home, || true).await?.ok_or_else(missing)?;
        for_each(&*kv, (Vec::new(), vec![0xff; 256]), |_, _| Ok::<_, KvError>(())).await?;
        let (reserved, forgotten) = match home.has_names() {
            true => (reserved_inodes(&*kv).await?, forgotten_targets(&*kv).await?),
            false => (0, BTreeSet::new()),
        };
        Ok(Rows { store, reserved, forgotten })
    };
    let read = read.await;
    kv.retire();
    read
}

/// The targets that are forgotten by the names' own rows, as far as that row can be read though others may
/// not.
async fn read_forgotten(env: &Env, arrays: &StackArrays, engine: Engine, home: Home) -> BTreeSet<TargetId> {
    if !home.has_names() {
        return BTreeSet::new();
    }
    let read = async {
        let kv = arrays.open_kv(env, engine).await?;
        let read = forgotten_targets(&*kv).await;
        kv.retire();
        Ok::<_, StartError>(read?)
    };
    read.await.unwrap_or_else(|error| {
        tracing::warn!(%error, "only the copy of the map says which targets are forgotten");
        BTreeSet::new()
    })
}

/// Reads all rows as [`read_all`], and again after an error of the contents: it may have been of the moment.
async fn read_all_patiently(
    env: &Env,
    arrays: &StackArrays,
    engine: Engine,
    home: Home,
) -> Result<Rows, StartError> {
    let is_kept = |read: &Result<_, StartError>| match read {
        Err(error) if !is_to_be_kept(error) => {
            tracing::warn!(%error, "names and maps cannot be read; they are tried again");
            false
        }
        _ => true,
    };
    tried(env, is_kept, async || read_all(env, arrays, engine, home).await).await
}

/// True if nothing is wrong with a store that cannot be opened, or if it is another array's.
fn is_to_be_kept(error: &StartError) -> bool {
    let is_later = |error: &KvError| matches!(error, KvError::Later(_));
    match error {
        StartError::Kv(error) | StartError::Meta(MetaError::Kv(error)) => is_later(error),
        StartError::Meta(MetaError::Row(error)) => matches!(error, DecodeError::Unknown { .. }),
        StartError::Meta(MetaError::Foreign { .. }) => true,
        _ => false,
    }
}

/// True if the rows are not what was written, or cannot be read. Else the machine, a drive's answer to a
/// write or something else may be the reason, and nothing says that they are lost.
fn is_lost(error: &StartError) -> bool {
    match error {
        StartError::Kv(error) | StartError::Meta(MetaError::Kv(error)) => {
            matches!(error, KvError::Corrupt(_))
        }
        StartError::Meta(MetaError::Row(_)) | StartError::Refused(_) => !is_to_be_kept(error),
        _ => false,
    }
}

/// All stripes of a volume.
fn all_of(volume: &Volume) -> Range<u64> {
    0..volume.blocks() / volume.stripe_blocks()
}

/// Fails if drives of the metadata array are missing, and something that is written on it, all of which is
/// this volume, cannot be read: they may have it.
async fn refuse_lacking(env: &Env, volume: &Volume) -> Result<(), StartError> {
    let missing = || {
        let members = volume.array().report().members;
        let missing = members.iter().filter(|member| member.state == "missing");
        missing.map(|member| member.drive.to_string()).collect::<Vec<_>>().join(", ")
    };
    if missing().is_empty() {
        return Ok(());
    }
    tracing::info!(missing = missing(), "drives are missing: all that the metadata array has is read");
    match tried(env, Result::is_ok, async || read_written(volume).await).await {
        Ok(()) => Ok(()),
        Err(error) => Err(StartError::Refused(format!(
            "{error}\nnothing was changed: missing drives may have names and maps that others lack; bring back {}; --accept-loss gives up what only they have",
            missing()
        ))),
    }
}

/// Reads all stripes in which something is written.
async fn read_written(volume: &Volume) -> Result<(), ArrayError> {
    let (mut from, per_stripe) = (0, volume.stripe_blocks());
    loop {
        let written = volume.all_written(from, STRIPES).await?;
        let Some(last) = written.last() else { return Ok(()) };
        from = last + 1;
        for stripe in written {
            volume.read(stripe * per_stripe, per_stripe, READS).await?;
        }
    }
}

/// Says that a page of a stripe table is given up, if that may be done and the page counts as lost.
fn page_given_up(error: ArrayError, may_lack: bool) -> Result<String, StartError> {
    match error {
        ArrayError::Damaged { .. } if may_lack => {
            Ok(format!("{error}: what is written in its stripes is lost for good then\n"))
        }
        ArrayError::Damaged { .. } => Err(StartError::Refused(format!(
            "{error}\nnothing was changed: bring back missing drives, if any, and try again; --accept-loss goes on without pages of the stripe table that cannot be read"
        ))),
        error => Err(StartError::Refused(format!("{error}\nnothing was changed: try again"))),
    }
}

/// A stack that a restore may make anew.
#[derive(Clone, Copy)]
pub(crate) struct Restorable<'a> {
    pub(crate) arrays: &'a StackArrays,
    pub(crate) home: Home,
}

/// Stacks whose key-value stores a restore has opened, with what was restored.
pub(crate) type Opened = BTreeMap<StackNo, (Rc<AheadKv>, Option<Restored>)>;

/// The part of a stack in a restore.
enum Plan {
    /// Nothing: its rows can be read.
    Stay(Known),
    /// The repair is all that is left to do of an earlier restore.
    Repair(Known),
    /// Its key-value store is made anew.
    Anew(Box<Anew>),
}

/// Contents of the stack with the names when this is done; empty for others.
#[derive(Clone, Default)]
struct Known {
    /// Inode numbers are reserved up to this one.
    reserved: u64,
    forgotten: BTreeSet<TargetId>,
}

impl Plan {
    fn known(&self) -> &Known {
        match self {
            Self::Stay(known) | Self::Repair(known) => known,
            Self::Anew(anew) => &anew.known,
        }
    }
}

/// A key-value store that is made anew from a copy.
struct Anew {
    arrays: StackArrays,
    home: Home,
    volume: Volume,
    found: Found,
    how: How,
    /// Why it is necessary, and what else is given up.
    why: String,
    passed_over: String,
    gone: String,
    given_up: Vec<Volume>,
    preview: Restored,
    known: Known,
}

/// Stacks that do not serve and are wanted.
fn away_of(absent: &[Absent]) -> impl Iterator<Item = &Absent> {
    absent.iter().filter(|absent| !absent.is_forgotten)
}

/// The restore of the stacks of a store.
pub(crate) struct Restoring<'a> {
    pub(crate) env: &'a Env,
    pub(crate) engine: Engine,
    pub(crate) how: Restore,
    /// Stacks of the store.
    pub(crate) stacks: u16,
}

impl Restoring<'_> {
    /// Makes the key-value stores anew that need it, and opens them and that of the names. A stack without
    /// names of which that cannot be done is added to those that are absent.
    pub(crate) async fn restore(
        &self,
        all: &[Restorable<'_>],
        absent: &mut Vec<Absent>,
    ) -> Result<Opened, StartError> {
        let mut planned = self.plan_all(all, false, absent).await?;
        let is_idle = |plans: &[Plan]| plans.iter().all(|plan| matches!(plan, Plan::Stay(_)));
        // Force may be meant for a stack that is away.
        if is_idle(&planned) && self.how.is_forced && away_of(absent).next().is_none() {
            planned = self.plan_all(all, true, absent).await?;
        }
        if is_idle(&planned) {
            return Err(self.nothing_to_do(absent));
        }
        let anew: Vec<&Anew> = planned
            .iter()
            .filter_map(|plan| match plan {
                Plan::Anew(anew) => Some(&**anew),
                Plan::Stay(_) | Plan::Repair(_) => None,
            })
            .collect();
        // Also if the restore of the names was interrupted: the repair is to compare all targets with them.
        let of_names = planned.first().expect("the stack with the names is planned");
        if !matches!(of_names, Plan::Stay(_)) {
            self.refuse_without_all(absent)?;
        }
        self.refuse_unconfirmed(&anew, absent)?;
        for anew in &anew {
            self.refuse_passed_over(anew)?;
            // Drives may have failed while rows were read.
            if !self.may_lack_drives() {
                refuse_lacking(self.env, &Volume::whole(&anew.arrays.meta)).await?;
            }
        }
        let mut opened = Opened::new();
        let done = self.carry_out(&anew, all, &mut opened, absent).await;
        match done {
            Ok(()) => Ok(opened),
            Err(error) => {
                opened.values().for_each(|(kv, _)| kv.retire());
                Err(error)
            }
        }
    }

    /// The rows of names on their way into a stack with this volume.
    fn names(
        &self,
        home: Home,
        volume: &Volume,
        newer_number: Ino,
        forgotten: &BTreeSet<TargetId>,
    ) -> RestoredNames {
        let kept = to_u16(to_usize(anchor_stripes(volume.stripe_blocks())));
        let now_s = u32::try_from(self.env.wall_ns() / 1_000_000_000).unwrap_or(0);
        RestoredNames::new(home, kept, newer_number, now_s).forget(forgotten)
    }

    fn may_lack_drives(&self) -> bool {
        self.how.may_lack || self.how.is_forced
    }

    /// The name of a stack in front of what is said of it, where there are several.
    fn prefix(&self, target: TargetId) -> String {
        if self.stacks > 1 { format!("target {target}: ") } else { String::new() }
    }

    /// The error of a restore that every stack can do without.
    fn nothing_to_do(&self, absent: &[Absent]) -> StartError {
        match away_of(absent).next() {
            None => StartError::Refused(
                "every row of this store can be read, so nothing was changed: `penstock up` starts it, and `penstock fs check --repair` repairs it".into(),
            ),
            Some(absent) => StartError::Refused(format!(
                "{}{}\nevery row of the other targets can be read, so nothing was changed",
                self.prefix(absent.number.target()),
                absent.why
            )),
        }
    }

    /// Fails if names would be made anew without a stack that may know better than they.
    fn refuse_without_all(&self, absent: &[Absent]) -> Result<(), StartError> {
        let Some(absent) = away_of(absent).next() else { return Ok(()) };
        if self.how.may_lack {
            return Ok(());
        }
        Err(StartError::Refused(format!(
            "target {} is away, and names are not set back without it: {}\nnothing was changed: bring back its drives; --accept-loss goes on without it",
            absent.number.target(),
            absent.why
        )))
    }

    /// Fails with all that the restore would do, if nobody has agreed to it.
    fn refuse_unconfirmed(&self, anew: &[&Anew], absent: &[Absent]) -> Result<(), StartError> {
        // Other copies than those that were agreed to need a consent of their own.
        let copies =
            anew.iter().fold(0, |all, anew| all ^ anew.found.anchor().id.rotate_left(anew.home.target.0));
        let is_confirmed = match self.how.consent {
            Consent::No => anew.is_empty(),
            Consent::To(agreed) => copies == agreed,
            Consent::ToAny => true,
        };
        if is_confirmed {
            return Ok(());
        }
        let away = away_of(absent).map(|Absent { number, why, .. }| {
            format!("target {} is away, and is not restored: {why}", number.target())
        });
        let why: Vec<String> = away.chain(anew.iter().map(|anew| self.question(anew))).collect();
        let preview = |anew: &&Anew| restore_report(anew.home.target, &anew.preview, BTreeMap::new());
        let previews = anew.iter().map(preview).collect();
        Err(StartError::Unconfirmed { why: why.join("\n"), copies, previews })
    }

    /// Says the effect of the restore of a stack.
    fn question(&self, anew: &Anew) -> String {
        let Anew { found, preview, why, passed_over, gone, .. } = anew;
        let age = age_of(self.env, found.anchor());
        let (serial, files) = (found.anchor().serial, preview.changed.files);
        let kib = preview.changed.blocks * BLOCK_BYTES as u64 / 1024;
        format!(
            "{}{why}\n{passed_over}{gone}copy {serial} of them is {age} old; in {files} of its files {kib} KiB may have been written since: that reads as zeros, or stays as it is now with --keep-changed",
            self.prefix(anew.home.target)
        )
    }

    fn refuse_passed_over(&self, anew: &Anew) -> Result<(), StartError> {
        match anew.passed_over.is_empty() || self.how.may_pass_over {
            true => Ok(()),
            false => Err(StartError::Refused(format!(
                "{}{}bring back missing drives, if any, and try again; --force goes on without it",
                self.prefix(anew.home.target),
                anew.passed_over
            ))),
        }
    }

    /// Plans all stacks that are not absent. With `is_set_back`, rows that can be read are given up.
    async fn plan_all(
        &self,
        all: &[Restorable<'_>],
        is_set_back: bool,
        absent: &mut Vec<Absent>,
    ) -> Result<Vec<Plan>, StartError> {
        let mut plans: Vec<Plan> = Vec::new();
        for stack in all {
            let number = stack.home.stack;
            if absent.iter().any(|absent| absent.number == number) {
                continue;
            }
            // The first one has the names, and is planned first.
            let Known { reserved, forgotten } = plans.first().map(Plan::known).cloned().unwrap_or_default();
            if forgotten.contains(&stack.home.target) {
                continue;
            }
            match self.plan(stack, is_set_back, number_of_newer(reserved, stack.home.target)).await {
                Ok(plan) => plans.push(plan),
                Err(error) if stack.home.has_names() => return Err(error),
                Err(error) => absent.push(Absent::new(number, error.to_string())),
            }
        }
        // Nobody waits for these, whether or not their drives are there.
        let forgotten = plans.first().map(|plan| plan.known().forgotten.clone()).unwrap_or_default();
        absent.retain(|absent| !forgotten.contains(&absent.number.target()));
        absent.extend(forgotten.iter().map(|target| Absent::forgotten(StackNo(to_u16(target.0)))));
        Ok(plans)
    }

    /// Reads all that the restore of a stack needs. Changes nothing.
    async fn plan(
        &self,
        &Restorable { arrays, home }: &Restorable<'_>,
        is_set_back: bool,
        newer_number: Ino,
    ) -> Result<Plan, StartError> {
        let (env, Restore { newer, may_lack, is_forced, .. }) = (self.env, self.how);
        let (volume, anchors) = arrays.parts()?;
        let old = Volume::whole(&arrays.meta);
        // Before rows are read: that may write, and what only missing drives have would be out of date.
        if !self.may_lack_drives() {
            refuse_lacking(env, &old).await?;
        }
        let why = match read_all_patiently(env, arrays, self.engine, home).await {
            // An earlier restore was interrupted.
            Ok(Rows { store, reserved, forgotten }) if store.is_unrepaired && !is_forced => {
                return Ok(Plan::Repair(Known { reserved, forgotten }));
            }
            Ok(Rows { store, reserved, forgotten }) if !store.is_unrepaired && !is_set_back => {
                return Ok(Plan::Stay(Known { reserved, forgotten }));
            }
            Ok(_) => "names and maps can be read".to_owned(),
            Err(error) if is_to_be_kept(&error) => return Err(error),
            Err(error) if !is_lost(&error) && !is_forced => {
                return Err(StartError::Refused(format!(
                    "{error}\nnothing says that names and maps are lost, so nothing was changed; if they are, --force goes on"
                )));
            }
            Err(error) => format!("names and maps cannot be read: {error}"),
        };
        let forgotten = read_forgotten(env, arrays, self.engine, home).await;
        // A newer copy may be readable in a moment.
        let is_newest = |found: &Result<Found, ChunkError>| {
            found.as_ref().is_ok_and(|found| found.passed_over().is_empty())
        };
        let found = tried(env, is_newest, async || scoped(find(&volume, &anchors)).await).await?;
        // All that a restore reads can be read, before anything is given up.
        let try_it = async |may_lack| {
            let mut names = self.names(home, &volume, newer_number, &forgotten);
            let how = How { newer, may_lack };
            let preview = scoped(preview(&found, &volume, &mut names, how)).await?;
            let known = Known { reserved: names.number()?.0, forgotten: names.forgotten().clone() };
            Ok::<_, ChunkError>((preview, known))
        };
        let mut gone = String::new();
        let ((preview, known), how) = match tried(env, Result::is_ok, async || try_it(false).await).await {
            Ok(preview) => (preview, How { newer, may_lack: false }),
            Err(ChunkError::Array(error)) => {
                gone += &page_given_up(error, may_lack)?;
                (try_it(true).await?, How { newer, may_lack: true })
            }
            Err(error) => {
                return Err(StartError::Refused(format!("{error}\nnothing was changed: try again")));
            }
        };
        // Their stripes are written again.
        let mut given_up = Vec::new();
        for written in [&old, &anchors] {
            let look = async || written.look_at_table(all_of(written)).await;
            if let Err(error) = tried(env, Result::is_ok, look).await {
                gone += &page_given_up(error, may_lack)?;
                given_up.push(written.clone());
            }
        }
        let passed_over: String = found
            .passed_over()
            .iter()
            .map(|why| format!("not used, and lost for good then: {why}\n"))
            .collect();
        let arrays = arrays.clone();
        Ok(Plan::Anew(Box::new(Anew {
            arrays,
            home,
            volume,
            found,
            how,
            why,
            passed_over,
            gone,
            given_up,
            preview,
            known,
        })))
    }

    /// Makes these stacks anew. Numbers for the files of newer blocks are reserved before they are given. A
    /// stack without names of which that fails is absent, and is made anew by another restore.
    async fn carry_out(
        &self,
        anew: &[&Anew],
        all: &[Restorable<'_>],
        opened: &mut Opened,
        absent: &mut Vec<Absent>,
    ) -> Result<(), StartError> {
        let of_names = anew.iter().find(|anew| anew.home.has_names());
        if let Some(anew) = of_names {
            let (kv, restored) = self.make_anew(anew, Ino(0)).await?;
            opened.insert(StackNo::FIRST, (kv, Some(restored)));
        }
        let others = || anew.iter().filter(|anew| !anew.home.has_names());
        if others().next().is_none() {
            return Ok(());
        }
        if of_names.is_none() {
            let names = all.first().expect("the stack with the names is planned");
            let kv = names.arrays.open_kv(self.env, self.engine).await?;
            opened.insert(StackNo::FIRST, (kv, None));
        }
        let (names, _) = &opened[&StackNo::FIRST];
        let reserved = reserve_for_newer(&**names).await?;
        for anew in others() {
            let number = number_of_newer(reserved, anew.home.target);
            match self.make_anew(anew, number).await {
                Ok((kv, restored)) => drop(opened.insert(anew.home.stack, (kv, Some(restored)))),
                Err(error) => absent.push(Absent::new(anew.home.stack, error.to_string())),
            }
        }
        Ok(())
    }

    /// Makes one key-value store anew.
    async fn make_anew(&self, anew: &Anew, newer_number: Ino) -> Result<(Rc<AheadKv>, Restored), StartError> {
        let (arrays, found) = (&anew.arrays, &anew.found);
        let old = Volume::whole(&arrays.meta);
        tracing::error!(stack = %anew.home.stack, why = anew.why, "the key-value store is made anew");
        for written in &anew.given_up {
            written.give_up_lost_pages().await?;
        }
        let left = old.discard(0, all_of(&old).end, Discard::InTable).await?;
        if !left.is_empty() {
            return Err(StartError::Refused(format!(
                "{} stripes of the metadata array cannot be used: their pages of the stripe table were lost just now; try again with --accept-loss, which gives them up",
                left.len()
            )));
        }
        let kv = arrays.open_kv(self.env, self.engine).await?;
        let shared: Rc<dyn Kv> = kv.clone();
        let mut names = self.names(anew.home, &anew.volume, newer_number, &anew.known.forgotten);
        match scoped(restore(found, &anew.volume, &*shared, &mut names, anew.how)).await {
            Ok(restored) => {
                found
                    .passed_over()
                    .iter()
                    .for_each(|why| tracing::error!(why, "a copy of the map was given up"));
                Ok((kv, restored))
            }
            Err(error) => {
                kv.retire();
                Err(error.into())
            }
        }
    }
}
