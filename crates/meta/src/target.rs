//! The metadata target: its parts put together.

use crate::chunks::ChunkStore;
use crate::error::MetaError;
use crate::fsck::{CheckProgress, Fsck, MetaCheck, Progress, Repair, paths};
use crate::inode::{Data, Inode, Layout};
use crate::names::{INO_RUN, Names};
use crate::parts::{InUse, Parts};
use crate::reaper;
use crate::rows::{FsRow, Home, StoreRow, fs_key, inode_key, owner_of, store_key};
use crate::{LAST_INO, ROOT};
use penstock_base::env::random_id;
use penstock_base::rank::scoped;
use penstock_base::{DecodeError, Env, ErrorKind, Features, FileId, Gate, Id128, Ino};
use penstock_chunk::{Target, map_range};
use penstock_kv::{Kv, WriteSet, for_each};
use penstock_session::Clients;
use penstock_wire::metadata::Time;
use std::collections::{BTreeMap, BTreeSet};
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

/// The parameters of a store that is made, if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NewStore<'a> {
    /// Name of the file system.
    pub name: &'a str,
    /// The arrays that it belongs to.
    pub home: Home,
    /// [`StoreRow::kept_stripes`].
    pub kept_stripes: u16,
}

/// The metadata target of one fileset.
pub struct MetaTarget {
    pub(crate) parts: Rc<Parts>,
    progress: Progress,
}

impl MetaTarget {
    /// Opens the name space in `kv`, which `chunks` shares and which belongs to the arrays in `new`. An empty
    /// store gets an empty file system.
    pub async fn open(
        env: &Env,
        kv: Rc<dyn Kv>,
        chunks: Rc<dyn ChunkStore>,
        gate: Rc<Gate>,
        new: NewStore<'_>,
    ) -> Result<Rc<Self>, MetaError> {
        let fs = match (kv.get(store_key()).await?, kv.get(fs_key()).await?) {
            (Some(store), Some(fs)) => {
                keep_store(&*kv, &StoreRow::decode(&store)?, new.home).await?;
                FsRow::decode(&fs)?
            }
            (None, None) if !has_rows(&*kv).await? => make_fs(env, &*kv, new, chunks.chunk_blocks()).await?,
            _ => return Err(LACKING.into()),
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
        let parts = Parts::new(env, names, chunks, clients);
        reaper::queue_removed(&parts).await?;
        env.spawn("meta reap", Box::pin(scoped(reaper::run(parts.clone()))));
        Ok(Rc::new(Self { parts, progress: Progress::default() }))
    }

    /// Fails if the store has features that forbid this release to change it, or rows of something else, or
    /// none although `has_data` says that the data array was written: what no row names would be discarded.
    /// Nothing else may be opened on it before. Returns its row, if it has one.
    pub async fn check_store(
        kv: &dyn Kv,
        home: Home,
        has_data: impl Fn() -> bool,
    ) -> Result<Option<StoreRow>, MetaError> {
        match (kv.get(store_key()).await?, kv.get(fs_key()).await?) {
            (Some(store), Some(fs)) => {
                let store = StoreRow::decode(&store)?;
                check_home(&store, home)?;
                FsRow::decode(&fs)?;
                Ok(Some(store))
            }
            (None, None) if !has_rows(kv).await? => match has_data() {
                true => {
                    let why = "it is missing, and the data array has data";
                    Err(DecodeError::Bad { what: "row of the store", why }.into())
                }
                false => Ok(None),
            },
            _ => Err(LACKING.into()),
        }
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

    /// Keeps a regular file from being reaped while its contents are being changed, and fails if it does not
    /// exist.
    pub async fn change_contents(&self, ino: Ino) -> Result<InUse<'_>, MetaError> {
        self.parts.change_contents(ino).await
    }

    /// Waits until all removed files without users have been dropped.
    pub async fn wait_reaped(&self) {
        reaper::wait_reaped(&self.parts).await;
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

    /// Checks everything as of one moment: changes wait until it has finished. `target` stores the chunks.
    pub async fn check(&self, target: &Target) -> Result<MetaCheck, MetaError> {
        // Before changes must wait for it.
        target.sweep().await?;
        let turn = self.parts.names.turn().await;
        match target.commit_all().await {
            // These are in no row yet.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                tracing::warn!(%error, "some writes have no space, and are not checked");
            }
            committed => committed?,
        }
        let quiet = turn.gate().quiesce().await;
        Fsck::begin(&turn, target, &quiet, &self.progress, false).check().await
    }

    /// Repairs the file system. The caller must serve no request meanwhile, and nobody may have files open,
    /// except files in the queue of removed files. `target` stores the chunks.
    pub async fn repair(&self, target: &Target) -> Result<Repair, MetaError> {
        target.sweep().await?;
        let turn = self.parts.names.turn().await;
        match target.commit_all().await {
            // There may be space for them in groups of which bits are lost.
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                let quiet = turn.gate().quiesce().await;
                target.fsck(&quiet).mark_owned().await?;
                drop(quiet);
                target.commit_all().await?;
            }
            committed => committed?,
        }
        let quiet = turn.gate().quiesce().await;
        let result = Fsck::begin(&turn, target, &quiet, &self.progress, true).repair().await;
        reaper::queue_removed(&self.parts).await?;
        self.parts.removed.borrow_mut().retry_all();
        self.parts.wake_reaper();
        result
    }

    /// Records that a restored file system was repaired.
    pub async fn set_repaired(&self) -> Result<(), MetaError> {
        let kv = self.parts.names.kv();
        let Some(row) = kv.get(store_key()).await? else { return Err(LACKING.into()) };
        let store = StoreRow::decode(&row)?;
        if !store.is_unrepaired {
            return Ok(());
        }
        let mut writes = WriteSet::new();
        let store = StoreRow { is_unrepaired: false, ..store };
        writes.put(store_key(), store.encode()).reclaims();
        Ok(kv.commit_durable(writes).await?)
    }

    /// Progress of a running check or repair; none if none runs.
    pub fn check_progress(&self) -> Option<CheckProgress> {
        self.progress.get()
    }
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

/// A store with rows and without the first ones. A new file system would take the place of the root
/// directory.
const LACKING: DecodeError = DecodeError::Bad {
    what: "row of the store",
    why: "it is missing, or that of the file system, and others are there",
};

/// True if a store has a row.
async fn has_rows(kv: &dyn Kv) -> Result<bool, MetaError> {
    Ok(!kv.keys(Vec::new(), vec![0xff; 16], 1).await?.is_empty())
}

/// Fails if the rows of a store are of other arrays: their blocks are there.
fn check_home(store: &StoreRow, home: Home) -> Result<(), MetaError> {
    let (Home { pool, data }, wanted) = (store.home, home);
    match store.home == home {
        true => Ok(()),
        false => Err(MetaError::Foreign { pool, data, wanted: wanted.data }),
    }
}

/// Checks the row of a store, and drops the features from it that this release does not maintain.
async fn keep_store(kv: &dyn Kv, store: &StoreRow, home: Home) -> Result<(), MetaError> {
    check_home(store, home)?;
    let features = store.features.maintained();
    if features == store.features {
        return Ok(());
    }
    tracing::warn!(features = ?store.features, "features that this release does not maintain are dropped");
    let mut writes = WriteSet::new();
    writes.put(store_key(), StoreRow { features, ..store.clone() }.encode()).reclaims();
    Ok(kv.commit_durable(writes).await?)
}

async fn make_fs(
    env: &Env,
    kv: &dyn Kv,
    NewStore { name, home, kept_stripes }: NewStore<'_>,
    chunk_blocks: u32,
) -> Result<FsRow, MetaError> {
    let now = env.wall_ns();
    let store = StoreRow { features: Features::default(), home, kept_stripes, is_unrepaired: false };
    let fs = FsRow {
        id: random_id(env),
        name: name.to_owned(),
        created_ns: now,
        secret: random_id(env),
        reserved_ino: ROOT.0 + INO_RUN,
        last_session: 0,
        chunk_blocks,
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
        layout: Layout::of_one_target(chunk_blocks),
        data: Data::None,
    };
    let mut writes = WriteSet::new();
    writes.put(store_key(), store.encode());
    writes.put(fs_key(), fs.encode()).put(inode_key(ROOT), root.encode());
    kv.commit(writes).await?;
    kv.flush().await?;
    Ok(fs)
}
