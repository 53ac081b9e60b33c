//! The metadata target: its parts put together.

use crate::chunks::ChunkStore;
use crate::elsewhere::Elsewhere;
use crate::error::MetaError;
use crate::fsck::{CheckProgress, Checking, MetaCheck, Progress, Repair, Targets, paths};
use crate::inode::{Data, FileKind, Inode, Layout};
use crate::names::{INO_RUN, Names, first_looked_for};
use crate::ops::forget::{self, FilesOn, forgotten_targets};
use crate::ops::layout::{LayoutInfo, WantedLayout};
use crate::other_target::OtherTarget;
use crate::parts::{InUse, Parts};
use crate::queue_work;
use crate::reaper;
use crate::rows::{FsRow, StoreRow, fs_key, inode_key, owner_of, store_key};
use crate::store::{self, NewStore};
use crate::{LAST_INO, ROOT, ops};
use penstock_base::env::random_id;
use penstock_base::rank::scoped;
use penstock_base::{Env, ErrorKind, FileId, Gate, Id128, Ino, TargetId};
use penstock_chunk::{ChunkError, map_range};
use penstock_kv::{Kv, WriteSet, for_each};
use penstock_session::{Clients, Request};
use penstock_wire::metadata::Time;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

/// Properties of a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FsInfo {
    /// Identifier of the file system.
    pub id: Id128,
    /// Name of the file system.
    pub name: String,
    /// Time of creation in nanoseconds since 1970.
    pub created_ns: i64,
    /// Blocks in a chunk of new files.
    pub chunk_blocks: u32,
}

/// The metadata target of one fileset.
pub struct MetaTarget {
    pub(crate) parts: Rc<Parts>,
    progress: Progress,
    away: Vec<(TargetId, String)>,
}

impl MetaTarget {
    /// Opens the name space in `kv`, which `chunks` shares and which belongs to the arrays in `new`. An empty
    /// store gets an empty file system. The other targets serve nothing before.
    pub async fn open(
        env: &Env,
        kv: Rc<dyn Kv>,
        chunks: Rc<dyn ChunkStore>,
        elsewhere: Elsewhere,
        gate: Rc<Gate>,
        new: NewStore<'_>,
    ) -> Result<Rc<Self>, MetaError> {
        let (fs, is_unrepaired) = match (kv.get(store_key()).await?, kv.get(fs_key()).await?) {
            (Some(store), Some(fs)) => {
                let store = StoreRow::decode(&store)?;
                store::keep(&*kv, &store, new.home).await?;
                (FsRow::decode(&fs)?, store.is_unrepaired)
            }
            (None, None) if !store::has_rows(&*kv).await? => {
                (make_fs(env, &*kv, new, chunks.chunk_blocks()).await?, false)
            }
            _ => return Err(store::LACKING.into()),
        };
        // Only now: rows of a format that this release does not know stay as they are.
        let clients = Clients::load(env, &*kv, chunks.generation()).await?;
        let is_reserved = (ROOT.0..=LAST_INO.0).contains(&fs.reserved_ino);
        let last_ino = highest_in_use(&*kv, if is_reserved { fs.reserved_ino } else { ROOT.0 }).await?;
        // Damage: a reservation outside the fileset, or chunks of another size than the target has. Files
        // would be mapped wrongly.
        let sound = FsRow {
            reserved_ino: if is_reserved { fs.reserved_ino } else { last_ino },
            chunk_blocks: chunks.chunk_blocks(),
            ..fs.clone()
        };
        if sound != fs {
            tracing::error!(?fs, ?sound, "the row of the file system is damaged and is corrected");
            let mut writes = WriteSet::new();
            writes.put(fs_key(), sound.encode()).reclaims();
            kv.commit_durable(writes).await?;
        }
        let fs = sound;
        let names = Names::new(env, kv, gate, fs, last_ino);
        for target in forgotten_targets(names.kv()).await? {
            elsewhere.forget(target);
        }
        // Names of the past do not say which files a crash has lost: a repair keeps what targets have.
        let away = match is_unrepaired {
            true => Vec::new(),
            false => drop_lost(&names, &elsewhere).await?,
        };
        let parts = Parts::new(env, names, (chunks, elsewhere), clients);
        reaper::queue_removed(&parts).await?;
        if parts.elsewhere.are_several() {
            queue_work::load(&parts).await?;
            for target in parts.elsewhere.others() {
                env.spawn("meta queue", Box::pin(scoped(queue_work::run(parts.clone(), target))));
            }
        }
        env.spawn("meta reap", Box::pin(scoped(reaper::run(parts.clone()))));
        Ok(Rc::new(Self { parts, progress: Progress::default(), away }))
    }

    /// Targets of other stacks of which the opening could not learn what it must know, with the reasons. They
    /// are not used, and must not serve.
    pub fn away(&self) -> &[(TargetId, String)] {
        &self.away
    }

    /// The sessions of this file system.
    pub fn clients(&self) -> &Rc<Clients> {
        &self.parts.clients
    }

    /// Properties of the file system.
    pub fn info(&self) -> FsInfo {
        let fs = self.parts.names.fs();
        FsInfo { id: fs.id, name: fs.name.clone(), created_ns: fs.created_ns, chunk_blocks: fs.chunk_blocks }
    }

    /// Stops the background task and wakes all requests that wait, which then fail.
    pub fn stop(&self) {
        self.parts.stop();
    }

    /// True once the target has been stopped.
    pub fn is_stopped(&self) -> bool {
        self.parts.is_stopped()
    }

    /// Keeps a regular file from being reaped while a target changes its part of the contents, and fails if
    /// the file does not exist.
    pub async fn change_contents(&self, target: TargetId, ino: Ino) -> Result<InUse<'_>, MetaError> {
        self.parts.change_contents(target, ino).await
    }

    /// The layout of a file, or that of new files in a directory, at a path from the root.
    pub async fn layout(&self, path: &[u8]) -> Result<LayoutInfo, MetaError> {
        ops::layout::show(&self.parts, path).await
    }

    /// Changes the layout that new files in a directory get, or that of a file without data.
    pub async fn set_layout(&self, path: &[u8], wanted: WantedLayout) -> Result<LayoutInfo, MetaError> {
        ops::layout::set(&self.parts, path, wanted).await
    }

    /// Forgets a target of another stack that does not serve, durably: its data is lost, work that waits for
    /// it is dropped, and it must never serve again.
    pub async fn forget(&self, target: TargetId) -> Result<(), MetaError> {
        forget::forget(&self.parts, target).await
    }

    /// Files that may have something on a target of another stack, of which `most` are listed. Other targets
    /// have `on_loan` from it: so many blocks of each file.
    pub async fn files_on(
        &self,
        target: TargetId,
        on_loan: &BTreeMap<Ino, u64>,
        most: usize,
    ) -> Result<FilesOn, MetaError> {
        forget::files_on(&self.parts, target, on_loan, most).await
    }

    /// Entries of work that a target has yet to carry out.
    pub fn queued_for(&self, target: TargetId) -> u64 {
        self.parts.queue.entries_of(target)
    }

    /// Has the work carried out that waits for a target. Returns false if there was none, or it failed.
    pub async fn make_space(&self, target: TargetId) -> bool {
        let done = queue_work::carry_out(&self.parts, target).await;
        done.unwrap_or_else(|error| {
            tracing::warn!(%target, %error, "work that would free space could not be carried out");
            false
        })
    }

    /// Waits until all files without users have been dropped that are removed now, on all targets that serve.
    pub async fn wait_reaped(&self) {
        reaper::wait_reaped(&self.parts).await;
        queue_work::wait_idle(&self.parts).await;
    }

    /// Makes every acknowledged operation durable.
    pub async fn sync(&self) -> Result<(), MetaError> {
        self.parts.durably(self.parts.chunks.sync()).await
    }

    /// Paths of inodes, from the root. An inode without a name has none. A path that cannot be followed up to
    /// the root begins with the number of the last directory that was found.
    pub async fn find_paths(&self, inos: &BTreeSet<Ino>) -> Result<BTreeMap<Ino, Vec<String>>, MetaError> {
        paths::find(self.parts.names.kv(), inos).await
    }

    /// Waits until no other check or repair runs.
    pub async fn begin_check(&self) -> Checking<'_> {
        Checking::new(&self.parts, self.progress.begin().await)
    }

    /// Checks everything as of one moment, as [`Checking::check`].
    pub async fn check(&self, targets: Targets<'_>) -> Result<MetaCheck, MetaError> {
        self.begin_check().await.check(targets).await
    }

    /// Repairs the file system, as [`Checking::repair`].
    pub async fn repair(&self, targets: Targets<'_>) -> Result<Repair, MetaError> {
        self.begin_check().await.repair(targets).await
    }

    /// Progress of a running check or repair; none if none runs.
    pub fn check_progress(&self) -> Option<CheckProgress> {
        self.progress.get()
    }
}

/// Drops what other targets have of files that a crash of the names has lost, and marks those that it has not
/// lost as spread. Nobody is served before: a client may make a lost file again, under its number. Targets at
/// which this fails do not serve; they are returned with the reasons.
async fn drop_lost(names: &Names, elsewhere: &Elsewhere) -> Result<Vec<(TargetId, String)>, MetaError> {
    let (mut spread, mut away) = (BTreeSet::new(), Vec::new());
    if !elsewhere.are_several() {
        return Ok(away);
    }
    let first = Ino(first_looked_for(names.fs().reserved_ino).0 + 1);
    let inos = first.max(ROOT)..Ino(LAST_INO.0 + 1);
    let serving = elsewhere.serving();
    for target in serving {
        match drop_lost_of(names, &*target, inos.clone()).await? {
            Ok(found) => spread.extend(found),
            Err(error) => {
                tracing::error!(target = %target.id(), %error, "a target does not serve");
                elsewhere.retire(target.id());
                away.push((target.id(), format!("what it has of the newest files is unknown: {error}")));
            }
        }
    }
    spread.extend(unseen(names, elsewhere, inos).await?);
    for ino in spread {
        let turn = names.turn().await;
        let inode = Inode { is_spread: true, ..turn.stored_inode(ino).await? };
        let mut writes = WriteSet::new();
        writes.changes_what_is_there();
        turn.commit(Request::default(), writes, vec![inode], &[]).await?;
    }
    Ok(away)
}

/// Drops what one target has of files that a crash has lost. Returns those that are there and not marked as
/// spread.
async fn drop_lost_of(
    names: &Names,
    target: &dyn OtherTarget,
    inos: Range<Ino>,
) -> Result<Result<BTreeSet<Ino>, ChunkError>, MetaError> {
    let (mut spread, mut lost) = (BTreeSet::new(), Vec::new());
    let found = match target.inodes_from(inos.start, inos.end).await {
        Ok(found) => found,
        Err(error) => return Ok(Err(error)),
    };
    for ino in found {
        match names.stored_inode(ino).await {
            Ok(inode) if inode.is_spread => {}
            Ok(_) => drop(spread.insert(ino)),
            Err(MetaError::Posix(Errno::STALE)) => lost.push(ino),
            // A check reports it.
            Err(MetaError::Row(_)) => {}
            Err(error) => return Err(error),
        }
    }
    let drop_them = async {
        for ino in &lost {
            tracing::info!(%ino, target = %target.id(), "a file is dropped that a crash has lost");
            match target.remove(FileId::main(*ino)).await {
                // A check finds what it has. Nobody makes the file again under this number.
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::error!(%ino, %error, "it cannot be dropped");
                    names.never_make(*ino);
                }
                done => done?,
            }
        }
        if lost.is_empty() { Ok(()) } else { target.sync().await }
    };
    Ok(drop_them.await.map(|()| spread))
}

/// Files among these that may have something on a target that does not serve, and are not marked as spread:
/// once it serves again, they may be too old to be looked for.
async fn unseen(names: &Names, elsewhere: &Elsewhere, inos: Range<Ino>) -> Result<BTreeSet<Ino>, MetaError> {
    let mut unseen = BTreeSet::new();
    let is_absent = |target| elsewhere.is_absent(target);
    if !elsewhere.all().any(is_absent) {
        return Ok(unseen);
    }
    for_each(names.kv(), (inode_key(inos.start), inode_key(inos.end)), |key, row| {
        // A check reports what is no inode.
        if let Ok(ino) = owner_of(key, 3, true)
            && let Ok(inode) = Inode::decode(row)
            && inode.kind() == FileKind::Regular
            && !inode.is_spread
            && elsewhere.spread_of(&inode.layout).is_some_and(|spread| spread.all().any(is_absent))
        {
            unseen.insert(ino);
        }
        Ok::<_, MetaError>(())
    })
    .await?;
    Ok(unseen)
}

/// Returns the number behind which inode numbers are free: the highest reserved one, or a higher one that is
/// in use.
async fn highest_in_use(kv: &dyn Kv, reserved: u64) -> Result<u64, MetaError> {
    let mut highest = reserved;
    // Only numbers of this fileset.
    let (first, end) = (Ino(reserved + 1), Ino(LAST_INO.0 + 1));
    let inodes = (inode_key(first), inode_key(end));
    let chunks = (map_range(FileId::main(first), 0).0, map_range(FileId::main(end), 0).0);
    for range in [inodes, chunks] {
        for_each(kv, range, |key, _| {
            if let Ok(ino) = owner_of(key, 3, true) {
                highest = highest.max(ino.0);
            }
            Ok::<_, MetaError>(())
        })
        .await?;
    }
    if highest > reserved {
        tracing::error!(
            highest,
            reserved,
            "inode numbers beyond the reserved ones are in use: `penstock fs check --repair` corrects it"
        );
    }
    Ok(highest)
}

async fn make_fs(env: &Env, kv: &dyn Kv, new: NewStore<'_>, chunk_blocks: u32) -> Result<FsRow, MetaError> {
    let now = env.wall_ns();
    let fs = FsRow {
        id: random_id(env),
        name: new.name.to_owned(),
        created_ns: now,
        secret: random_id(env),
        reserved_ino: ROOT.0 + INO_RUN,
        last_session: 0,
        chunk_blocks,
        last_queued: 0,
    };
    let root = Inode {
        ino: ROOT,
        mode: 0o040_755,
        nlink: 2,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        rdev: 0,
        size: 0,
        times: [Time::from_ns(now); 4],
        truncations: 0,
        parent: ROOT,
        entries: 0,
        layout: match new.home.is_one_of_several {
            true => Layout::of_all_targets(chunk_blocks),
            false => Layout::of_one_target(chunk_blocks),
        },
        data: Data::None,
        is_spread: false,
    };
    let mut writes = WriteSet::new();
    new.put(&mut writes);
    writes.put(fs_key(), fs.encode()).put(inode_key(ROOT), root.encode());
    kv.commit(writes).await?;
    kv.flush().await?;
    Ok(fs)
}
