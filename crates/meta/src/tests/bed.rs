//! A file system in memory, and short ways to call its operations.

use super::memory::{CHUNK_BLOCKS, MemChunks};
use super::others::MemOther;
use crate::fsck::diagnosis::Diagnosis;
use crate::rows::{
    FsRow, Home, all_entries, all_inodes, all_queued, all_removed, all_xattrs, fs_key, unknown_keys,
};
use crate::store::NewStore;
use crate::{Elsewhere, Inode, MetaError, MetaTarget, OtherTarget, ROOT, ops};
use penstock_base::env::random_id;
use penstock_base::num::to_u32;
use penstock_base::{Gate, Ino, TargetId};
use penstock_kv::{Kv, MemKv, Range, Row};
use penstock_session::Request;
use penstock_session::rows::{all_results, all_sessions};
use penstock_sim::World;
use penstock_wire::metadata::{
    AttrReply, HelloReply, HelloRequest, LinkRequest, MakeRequest, NameRequest, ReadDirReply, ReadDirRequest,
    RenameRequest,
};
use penstock_wire::{Header, Kind};
use prost::Message;
use rustix::io::Errno;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

pub(super) const FILE: u32 = 0o100_644;
pub(super) const DIR: u32 = 0o040_755;

/// A file system in memory, with one client.
pub(super) struct Bed {
    pub(super) world: World,
    pub(super) kv: Rc<MemKv>,
    pub(super) chunks: Rc<MemChunks>,
    pub(super) meta: Rc<MetaTarget>,
    pub(super) who: Request,
    starts: u64,
    others: Vec<Rc<MemOther>>,
}

/// No target but that of the names' own stack.
pub(super) fn alone() -> Elsewhere {
    Elsewhere::new(TargetId(0), 1, Vec::new())
}

/// Runs a test on an empty file system of a store with these targets besides that of the names' stack.
pub(super) fn run_with_others<T>(others: &[Rc<MemOther>], test: impl AsyncFnOnce(&mut Bed) -> T) -> T {
    let world = World::new(1);
    let done = world.run(async {
        let mut bed = Bed::start(&world, MemKv::new(1 << 20), 1, others.to_vec()).await;
        let value = test(&mut bed).await;
        bed.meta.stop();
        value
    });
    done.unwrap()
}

/// Runs a test on an empty file system.
pub(super) fn run<T>(test: impl AsyncFnOnce(&mut Bed) -> T) -> T {
    run_with(1, 64 << 20, test)
}

/// Runs a test on an empty file system, in a world of a seed, with a budget in bytes of rows.
pub(super) fn run_with<T>(seed: u64, budget_bytes: u64, test: impl AsyncFnOnce(&mut Bed) -> T) -> T {
    let world = World::new(seed);
    let done = world.run(async {
        let mut bed = Bed::start(&world, MemKv::new(budget_bytes), 1, Vec::new()).await;
        let value = test(&mut bed).await;
        bed.meta.stop();
        value
    });
    done.unwrap()
}

/// The errno of a failed operation.
pub(super) fn errno<T>(result: Result<T, MetaError>) -> Option<Errno> {
    match result {
        Ok(_) => None,
        Err(MetaError::Posix(errno)) => Some(errno),
        Err(error) => panic!("{error}"),
    }
}

impl Bed {
    async fn start(world: &World, kv: Rc<MemKv>, starts: u64, others: Vec<Rc<MemOther>>) -> Self {
        let chunks = MemChunks::new(&kv, starts);
        let gate = Rc::new(Gate::default());
        let is_one_of_several = !others.is_empty();
        let serving = others.iter().filter(|other| !other.is_away.get());
        let serving = serving.map(|other| other.clone() as Rc<dyn OtherTarget>).collect();
        let elsewhere = Elsewhere::new(TargetId(0), 1 + to_u32(others.len()), serving);
        let new = NewStore {
            name: "test",
            home: Home { is_one_of_several, ..Home::default() },
            ..NewStore::default()
        };
        let meta =
            MetaTarget::open(&world.env(), kv.clone(), chunks.clone(), elsewhere, gate, new).await.unwrap();
        let hello = HelloRequest::of_mount(random_id(&world.env()));
        let reply = meta.hello(0, &hello.encode_to_vec(), false).await.unwrap();
        let session = HelloReply::decode(&reply[..]).unwrap().session;
        let header = Header { session, ..Header::request(Kind::SetAttr) };
        let who = meta.clients().request(&header).unwrap();
        Self { world: world.clone(), kv, chunks, meta, who, starts, others }
    }

    /// Stops the file system, forgets everything that is not durable, and opens it again.
    pub(super) async fn crash(&mut self) {
        self.meta.stop();
        self.kv.crash();
        self.others.iter().for_each(|other| other.crash());
        *self = Self::start(&self.world, self.kv.clone(), self.starts + 1, self.others.clone()).await;
    }

    pub(super) async fn make(&self, request: MakeRequest) -> Result<Ino, MetaError> {
        let reply = ops::make(&self.meta.parts, self.who, request).await?;
        Ok(Ino(AttrReply::decode(&reply[..]).unwrap().attr.unwrap().ino))
    }

    /// Makes a file, or with a slash at the end of `path` a directory.
    pub(super) async fn add(&self, path: &str) -> Result<Ino, MetaError> {
        let mode = if path.ends_with('/') { DIR } else { FILE };
        let (dir, name) = self.split(path).await?;
        self.make(MakeRequest { dir: dir.0, name, mode, ..Default::default() }).await
    }

    pub(super) async fn link(&self, ino: Ino, path: &str) -> Result<(), MetaError> {
        let (dir, name) = self.split(path).await?;
        let request = LinkRequest { ino: ino.0, dir: dir.0, name };
        ops::link(&self.meta.parts, self.who, request).await.map(drop)
    }

    /// Removes a file, or with a slash at the end of `path` a directory.
    pub(super) async fn remove(&self, path: &str) -> Result<(), MetaError> {
        let (dir, name) = self.split(path).await?;
        let request = NameRequest { dir: dir.0, name, directory: path.ends_with('/'), lease: false };
        ops::unlink(&self.meta.parts, self.who, request).await.map(drop)
    }

    /// Renames a path. `flags` has the flags of the request.
    pub(super) async fn rename(&self, from: &str, to: &str, flags: RenameRequest) -> Result<(), MetaError> {
        let ((dir, name), (new_dir, new_name)) = (self.split(from).await?, self.split(to).await?);
        let request = RenameRequest { dir: dir.0, name, new_dir: new_dir.0, new_name, ..flags };
        ops::rename(&self.meta.parts, self.who, request).await.map(drop)
    }

    /// The directory of a path, and the last name in it.
    async fn split(&self, path: &str) -> Result<(Ino, Vec<u8>), MetaError> {
        let (dir, name) =
            path.trim_end_matches('/').rsplit_once('/').unwrap_or(("", path.trim_end_matches('/')));
        Ok((self.find(dir).await?, name.as_bytes().to_vec()))
    }

    /// The inode of a path; the root for an empty one.
    pub(super) async fn find(&self, path: &str) -> Result<Ino, MetaError> {
        let mut at = ROOT;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            let request = NameRequest { dir: at.0, name: name.into(), directory: false, lease: false };
            let reply = ops::lookup(&self.meta.parts, self.who, request).await?;
            at = Ino(AttrReply::decode(&reply[..]).unwrap().attr.unwrap().ino);
        }
        Ok(at)
    }

    pub(super) async fn inode(&self, ino: Ino) -> Result<Inode, MetaError> {
        self.meta.parts.names.inode(ino).await
    }

    /// Entries of a directory after a cookie, at most `limit`; then true if these are the last ones.
    pub(super) async fn list(&self, dir: Ino, after: u64, limit: u32) -> (Vec<(String, Ino, u64)>, bool) {
        let request = ReadDirRequest { dir: dir.0, after, limit, attributes: false, lease: false };
        let reply = ops::read_dir(&self.meta.parts, self.who, request).await.unwrap();
        let ReadDirReply { entries, end, .. } = ReadDirReply::decode(&reply[..]).unwrap();
        let entry = |entry: penstock_wire::metadata::DirEntry| {
            let slash = if entry.kind == 0o040_000 { "/" } else { "" };
            (format!("{}{slash}", String::from_utf8(entry.name).unwrap()), Ino(entry.ino), entry.cookie)
        };
        (entries.into_iter().map(entry).collect(), end)
    }

    /// Every path with its inode. Directories end in a slash.
    pub(super) async fn tree(&self) -> BTreeMap<String, Ino> {
        let (mut tree, mut left) = (BTreeMap::new(), vec![(String::new(), ROOT)]);
        while let Some((path, dir)) = left.pop() {
            for (name, ino, _) in self.list(dir, 0, 1024).await.0 {
                let path = format!("{path}{name}");
                if path.ends_with('/') {
                    left.push((path.clone(), ino));
                }
                tree.insert(path, ino);
            }
        }
        tree
    }

    fn rows(&self, range: &Range) -> Vec<Row> {
        self.kv.rows().into_iter().filter(|(key, _)| (&range.0..&range.1).contains(&key)).collect()
    }

    /// Diagnoses all rows.
    pub(super) fn diagnose(&self) -> Diagnosis {
        let fs = self.kv.rows().into_iter().find(|(key, _)| *key == fs_key()).unwrap().1;
        let mut diagnosis =
            Diagnosis::new(&FsRow::decode(&fs).unwrap(), CHUNK_BLOCKS, 1 + to_u32(self.others.len()));
        diagnosis.see_target(TargetId(0), self.chunks.check());
        for other in self.others.iter().filter(|other| !other.is_away.get()) {
            diagnosis.see_other(other.id(), other.check());
        }
        diagnosis.check_loans(&BTreeSet::new());
        self.rows(&all_queued()).iter().for_each(|(key, value)| diagnosis.see_queued(key, value));
        self.rows(&all_inodes()).iter().for_each(|(key, value)| diagnosis.see_inode(key, value));
        self.rows(&all_removed()).iter().for_each(|(key, value)| diagnosis.see_removed(key, value));
        self.rows(&all_xattrs()).iter().for_each(|(key, value)| diagnosis.see_xattr(key, value));
        self.rows(&all_entries()).iter().for_each(|(key, _)| diagnosis.count_entry(key));
        self.rows(&all_entries()).iter().for_each(|(key, value)| diagnosis.see_entry(key, value));
        diagnosis.check_inodes();
        diagnosis.check_reservations();
        self.rows(&all_results()).iter().for_each(|(key, value)| diagnosis.see_result(key, value));
        self.rows(&all_sessions()).iter().for_each(|(key, value)| diagnosis.see_session(key, value));
        for range in unknown_keys() {
            self.rows(&range).iter().for_each(|(key, value)| diagnosis.see_unknown(key, value));
        }
        diagnosis
    }

    /// Fails the test if the rows contradict each other.
    pub(super) fn check(&self, after: &str) {
        let diagnosis = self.diagnose();
        assert!(diagnosis.findings.is_clean(), "after {after}: {:?}", diagnosis.findings);
    }

    /// Changes rows behind the back of the file system.
    pub(super) async fn put_row(&self, key: Vec<u8>, value: Option<Vec<u8>>) {
        let mut writes = penstock_kv::WriteSet::new();
        match value {
            Some(value) => writes.put(key, value),
            None => writes.delete(key),
        };
        self.kv.commit(writes).await.unwrap();
    }
}
