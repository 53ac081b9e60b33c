//! The restore of all rows from a copy of the map, before the services of a store are opened.
//!
//! Nothing is changed before a copy was read and verified in full. Then all of the key-value store is
//! discarded, and it is made anew. If the restore is interrupted, the rows by which a start knows the store
//! are missing; the start is refused, and the restore can be made again.

use super::restore_report;
use crate::error::StartError;
use crate::stack_arrays::StackArrays;
use penstock_array::{ArrayError, Discard, Volume};
use penstock_base::num::{to_u16, to_usize};
use penstock_base::rank::scoped;
use penstock_base::{BLOCK_BYTES, Class, DecodeError, Env};
use penstock_chunk::ChunkError;
use penstock_chunk::copies::{
    Anchor, Found, How, Newer, Restored, anchor_stripes, find, newest, preview, restore, tried,
};
use penstock_drive::Io;
use penstock_kv::{AheadKv, Kv, KvError, Mode, for_each};
use penstock_meta::rows::{Home, StoreRow};
use penstock_meta::{MetaError, RestoredNames, check_store};
use std::collections::BTreeMap;
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
    /// To a restore from the copy with this random number.
    To(u64),
    /// To one from any copy.
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
    /// Also if every row can be read, or if it is not certain that they are lost.
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

/// Fails if some row cannot be read, or if those are missing by which a start knows the store.
async fn read_all(
    env: &Env,
    arrays: &StackArrays,
    mode: Mode,
    home: Home,
) -> Result<(Rc<AheadKv>, StoreRow), StartError> {
    let kv = arrays.open_kv(env, mode).await?;
    let read = async {
        let missing = || StartError::Refused("it has no rows".into());
        let row = check_store(&*kv, home, || true).await?.ok_or_else(missing)?;
        for_each(&*kv, (Vec::new(), vec![0xff; 256]), |_, _| Ok::<_, KvError>(())).await?;
        Ok(row)
    };
    match read.await {
        Ok(row) => Ok((kv, row)),
        Err(error) => {
            kv.retire();
            Err(error)
        }
    }
}

/// The same, tried again after an error of the contents: it may have been of the moment.
async fn read_all_patiently(
    env: &Env,
    arrays: &StackArrays,
    mode: Mode,
    home: Home,
) -> Result<(Rc<AheadKv>, StoreRow), StartError> {
    let is_kept = |read: &Result<_, StartError>| match read {
        Err(error) if !is_to_be_kept(error) => {
            tracing::warn!(%error, "names and maps cannot be read; they are tried again");
            false
        }
        _ => true,
    };
    tried(env, is_kept, async || read_all(env, arrays, mode, home).await).await
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

/// Makes a new key-value store of the last copy of the map.
pub(crate) async fn restore_rows(
    env: &Env,
    arrays: &StackArrays,
    mode: Mode,
    home: Home,
    Restore { newer, consent, may_pass_over, may_lack, is_forced }: Restore,
) -> Result<(Rc<AheadKv>, Option<Restored>), StartError> {
    let (volume, anchors) = arrays.parts()?;
    let old = Volume::whole(&arrays.meta);
    let may_lack_drives = may_lack || is_forced;
    // Before rows are read: that may write, and what only missing drives have would be out of date.
    if !may_lack_drives {
        refuse_lacking(env, &old).await?;
    }
    let why = match read_all_patiently(env, arrays, mode, home).await {
        // An earlier restore was interrupted: the repair is all that is left to do.
        Ok((kv, row)) if row.is_unrepaired && !is_forced => return Ok((kv, None)),
        Ok((kv, _)) if !is_forced => {
            kv.retire();
            return Err(StartError::Refused(
                "every row of this store can be read, so nothing was changed: `penstock up` starts it, and `penstock fs check --repair` repairs it".into(),
            ));
        }
        Ok((kv, _)) => {
            kv.retire();
            "names and maps can be read".to_owned()
        }
        Err(error) if is_to_be_kept(&error) => return Err(error),
        Err(error) if !is_lost(&error) && !is_forced => {
            return Err(StartError::Refused(format!(
                "{error}\nnothing says that names and maps are lost, so nothing was changed; if they are, --force goes on"
            )));
        }
        Err(error) => format!("names and maps cannot be read: {error}"),
    };
    // A newer copy may be readable in a moment.
    let is_newest =
        |found: &Result<Found, ChunkError>| found.as_ref().is_ok_and(|found| found.passed_over().is_empty());
    let found = tried(env, is_newest, async || scoped(find(&volume, &anchors)).await).await?;
    let kept = to_u16(to_usize(anchor_stripes(volume.stripe_blocks())));
    let names = || RestoredNames::new(home, kept);
    // All that a restore reads can be read, before anything is given up.
    let try_it =
        async |may_lack| scoped(preview(&found, &volume, &mut names(), How { newer, may_lack })).await;
    let mut gone = String::new();
    let (preview, how) = match tried(env, Result::is_ok, async || try_it(false).await).await {
        Ok(preview) => (preview, How { newer, may_lack: false }),
        Err(ChunkError::Array(error)) => {
            gone += &page_given_up(error, may_lack)?;
            (try_it(true).await?, How { newer, may_lack: true })
        }
        Err(error) => return Err(StartError::Refused(format!("{error}\nnothing was changed: try again"))),
    };
    // Their stripes are written again.
    let mut given_up = Vec::new();
    for written in [&old, &anchors] {
        let look = async || written.look_at_table(all_of(written)).await;
        if let Err(error) = tried(env, Result::is_ok, look).await {
            gone += &page_given_up(error, may_lack)?;
            given_up.push(written);
        }
    }
    let passed_over: String =
        found.passed_over().iter().map(|why| format!("not used, and lost for good then: {why}\n")).collect();
    // Another copy than the one that was agreed to needs a consent of its own.
    let is_confirmed = match consent {
        Consent::No => false,
        Consent::To(copy) => copy == found.anchor().id,
        Consent::ToAny => true,
    };
    if !is_confirmed {
        let age = age_of(env, found.anchor());
        let (serial, files) = (found.anchor().serial, preview.changed.files);
        let kib = preview.changed.blocks * BLOCK_BYTES as u64 / 1024;
        let why = format!(
            "{why}\n{passed_over}{gone}copy {serial} of them is {age} old; in {files} of its files {kib} KiB may have been written since: that reads as zeros, or stays as it is now with --keep-changed"
        );
        let preview = Box::new(restore_report(&preview, BTreeMap::new()));
        return Err(StartError::Unconfirmed { why, copy: found.anchor().id, preview });
    }
    if !passed_over.is_empty() && !may_pass_over {
        return Err(StartError::Refused(format!(
            "{passed_over}bring back missing drives, if any, and try again; --force goes on without it"
        )));
    }
    // Drives may have failed while rows were read.
    if !may_lack_drives {
        refuse_lacking(env, &old).await?;
    }
    tracing::error!(why, "the key-value store is made anew");
    for written in given_up {
        written.give_up_lost_pages().await?;
    }
    let left = old.discard(0, all_of(&old).end, Discard::InTable).await?;
    if !left.is_empty() {
        return Err(StartError::Refused(format!(
            "{} stripes of the metadata array cannot be used: their pages of the stripe table were lost just now; try again with --accept-loss, which gives them up",
            left.len()
        )));
    }
    let kv = arrays.open_kv(env, mode).await?;
    let shared: Rc<dyn Kv> = kv.clone();
    let restored = scoped(restore(&found, &volume, &*shared, &mut names(), how)).await;
    match restored {
        Ok(restored) => {
            found.passed_over().iter().for_each(|why| tracing::error!(why, "a copy of the map was given up"));
            Ok((kv, Some(restored)))
        }
        Err(error) => {
            kv.retire();
            Err(error.into())
        }
    }
}
