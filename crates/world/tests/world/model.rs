//! A load of file operations, and a model of the state that must be left of it.

use crate::flushed::fsync;
use crate::machine::Machine;
use penstock_base::env::Runtime;
use penstock_base::{Branch, FileId};
use penstock_client::{Failure, SetAttrRequest};
use penstock_wire::data::SpaceChange;
use penstock_wire::metadata::{MakeRequest, ReadDirRequest, RenameRequest};
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// Model of one file: its bytes as last synced, and the images since then.
#[derive(Clone, Debug, Default)]
pub struct FileModel {
    pub ino: u64,
    pub synced: Vec<u8>,
    pub now: Vec<u8>,
    /// Every value that a byte had since the sync is in one of these images of the full file.
    pub images: Vec<Vec<u8>>,
}

/// Files by name, and names that may or may not exist after a crash.
#[derive(Default)]
pub struct Model {
    pub files: RefCell<BTreeMap<String, FileModel>>,
    /// Names that were made, renamed or removed since the last sync of the name space.
    pub unsure: RefCell<BTreeSet<String>>,
}

pub async fn make_file(machine: &Machine, name: &str) -> Result<FileId, Failure> {
    let request = MakeRequest {
        dir: machine.client.root().ino.0,
        name: name.as_bytes().to_vec(),
        mode: 0o100_644,
        open: true,
        ..MakeRequest::default()
    };
    Ok(machine.client.make(Branch::MAIN, request).await?.file())
}

pub fn pattern(world: &penstock_sim::World, len: usize) -> Vec<u8> {
    let seed = world.random() | 1;
    (0..len).map(|at| (seed.wrapping_mul(at as u64 / 8 + 1) >> 32) as u8 | 1).collect()
}

impl Model {
    /// Executes one random operation on the files of `task`.
    pub async fn step(&self, machine: &Machine, task: u64) -> Result<(), Failure> {
        let world = &machine.world;
        let name = format!("t{task}-{}", world.below(4));
        let known = self.files.borrow().get(&name).cloned();
        let Some(file) = known else {
            self.unsure.borrow_mut().insert(name.clone());
            let id = make_file(machine, &name).await?;
            let file = FileModel { ino: id.ino.0, ..FileModel::default() };
            self.files.borrow_mut().insert(name, file);
            return Ok(());
        };
        let id = FileId::of_numbers(0, file.ino);
        match world.below(14) {
            0..=5 => self.write(machine, &name, id, file.now.len()).await,
            6 => self.truncate(machine, &name, id, file.now.len()).await,
            7..=8 => self.fsync(machine, &name, id).await,
            9 => self.rename(machine, task, &name).await,
            11..=12 => self.change_space(machine, &name, id, file.now.len()).await,
            10 => {
                self.unsure.borrow_mut().insert(name.clone());
                self.files.borrow_mut().remove(&name);
                machine.client.unlink(machine.client.root(), name.as_bytes(), false).await?;
                machine.client.release(id).await
            }
            _ => {
                let read = machine.client.read(id, 0, 1 << 30).await?;
                let bytes: Vec<u8> = read.iter().flat_map(|part| part.to_vec()).collect();
                assert!(
                    bytes == file.now,
                    "{name} reads as it was written ({} of {} bytes)",
                    bytes.len(),
                    file.now.len()
                );
                Ok(())
            }
        }
    }

    fn change(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let mut files = self.files.borrow_mut();
        let file = files.get_mut(name).unwrap();
        let before = file.now.clone();
        file.images.push(before);
        change(&mut file.now);
    }

    async fn write(&self, machine: &Machine, name: &str, id: FileId, size: usize) -> Result<(), Failure> {
        let world = &machine.world;
        let offset = match world.below(3) {
            0 => size,
            1 => world.below(size as u64 + 1) as usize,
            _ => world.below(200_000) as usize,
        };
        let len = [100, 4096, 10_000, 70_000, 1 << 20][world.below(5) as usize]
            .min(1 + world.below(1 << 20) as usize);
        // Writes of full chunks bypass the log.
        let (offset, len) =
            if world.below(5) == 0 { ((world.below(2) << 20) as usize, 1 << 20) } else { (offset, len) };
        let data = pattern(world, len);
        self.change(name, |now| {
            if now.len() < offset + len {
                now.resize(offset + len, 0);
            }
            now[offset..offset + len].copy_from_slice(&data);
        });
        machine.client.write(id, offset as u64, &data).await
    }

    async fn change_space(
        &self,
        machine: &Machine,
        name: &str,
        id: FileId,
        size: usize,
    ) -> Result<(), Failure> {
        let world = &machine.world;
        let offset = world.below(size as u64 + 10_000) as usize;
        let len = 1 + world.below([5000, 50_000, 1 << 20][world.below(3) as usize]) as usize;
        let (end, keep_size) = (offset + len, world.below(2) == 0);
        let change = [SpaceChange::Reserve, SpaceChange::Zero, SpaceChange::Punch][world.below(3) as usize];
        self.change(name, |now| {
            if change != SpaceChange::Punch && !keep_size && now.len() < end {
                now.resize(end, 0);
            }
            let end = end.min(now.len());
            if change != SpaceChange::Reserve && offset < end {
                now[offset..end].fill(0);
            }
        });
        machine.client.change_space(id, offset as u64, len as u64, change, keep_size).await
    }

    async fn truncate(&self, machine: &Machine, name: &str, id: FileId, size: usize) -> Result<(), Failure> {
        let to = machine.world.below(size as u64 * 2 + 10) as usize;
        self.change(name, |now| now.resize(to, 0));
        let request = SetAttrRequest { ino: id.ino.0, size: Some(to as u64), ..SetAttrRequest::default() };
        machine.client.set_attr(Branch::MAIN, request).await.map(|_| ())
    }

    pub async fn fsync(&self, machine: &Machine, name: &str, id: FileId) -> Result<(), Failure> {
        let image = self.files.borrow()[name].now.clone();
        let done = self.files.borrow()[name].images.len();
        // The fsync also makes names durable that nobody is changing, that is, the names of this task only.
        let mine = name.split('-').next().unwrap().to_owned() + "-";
        fsync(machine, id, true).await?;
        let mut files = self.files.borrow_mut();
        let file = files.get_mut(name).unwrap();
        file.synced = image;
        file.images.drain(..done);
        self.unsure.borrow_mut().retain(|other| !other.starts_with(&mine));
        Ok(())
    }

    async fn rename(&self, machine: &Machine, task: u64, name: &str) -> Result<(), Failure> {
        let to = format!("t{task}-{}", machine.world.below(4));
        if to == name {
            return Ok(());
        }
        let replaced = self.files.borrow().get(&to).map(|file| file.ino);
        self.unsure.borrow_mut().extend([name.to_owned(), to.clone()]);
        let root = machine.client.root().ino.0;
        let request = RenameRequest {
            dir: root,
            name: name.as_bytes().to_vec(),
            new_dir: root,
            new_name: to.as_bytes().to_vec(),
            ..RenameRequest::default()
        };
        {
            let mut files = self.files.borrow_mut();
            let file = files.remove(name).unwrap();
            files.insert(to, file);
        }
        machine.client.rename(Branch::MAIN, request).await?;
        match replaced {
            Some(ino) => machine.client.release(FileId::of_numbers(0, ino)).await,
            None => Ok(()),
        }
    }

    /// Checks a store after a crash: names that were synced exist, and each byte of their files is as synced
    /// or as written since.
    pub async fn check_crashed(&self, machine: &Machine) {
        let names = list(machine).await;
        let files = self.files.borrow().clone();
        for (name, file) in &files {
            let unsure = self.unsure.borrow().contains(name);
            let Some(ino) = names.get(name) else {
                assert!(unsure, "{name} is gone");
                continue;
            };
            if unsure {
                // It is open which file has the name now, but it must be readable.
                read_all(machine, FileId::of_numbers(0, *ino)).await;
                continue;
            }
            assert_eq!(*ino, file.ino, "{name} is another file");
            let bytes = read_all(machine, FileId::of_numbers(0, *ino)).await;
            file.check(name, &bytes);
        }
    }

    /// Checks a store that was stopped in order: everything is in its last state.
    pub async fn check_stopped(&self, machine: &Machine) {
        let names = list(machine).await;
        let files = self.files.borrow().clone();
        assert_eq!(names.keys().collect::<Vec<_>>(), files.keys().collect::<Vec<_>>());
        for (name, file) in &files {
            let bytes = read_all(machine, FileId::of_numbers(0, names[name])).await;
            assert!(bytes == file.now, "{name} is as it was");
        }
    }
}

impl FileModel {
    fn check(&self, name: &str, found: &[u8]) {
        let images: Vec<&Vec<u8>> = [&self.synced, &self.now].into_iter().chain(&self.images).collect();
        let sizes: Vec<usize> = images.iter().map(|image| image.len()).collect();
        let smallest = sizes.iter().copied().min().unwrap();
        assert!(
            found.len() >= smallest && found.len() <= *sizes.iter().max().unwrap(),
            "{name}: {} of {sizes:?}",
            found.len()
        );
        for (at, byte) in found.iter().enumerate() {
            let allowed = images.iter().any(|image| image.get(at).copied().unwrap_or(0) == *byte)
                // Not synced: the byte may read as zero.
                || (*byte == 0 && images.iter().any(|image| image.get(at) != self.synced.get(at)));
            assert!(allowed, "{name}: byte {at} is {byte}, which was never there");
        }
    }
}

pub async fn read_all(machine: &Machine, id: FileId) -> Vec<u8> {
    let parts = machine.client.read(id, 0, 1 << 40).await.unwrap();
    parts.iter().flat_map(|part| part.to_vec()).collect()
}

pub async fn list(machine: &Machine) -> BTreeMap<String, u64> {
    let mut names = BTreeMap::new();
    let mut after = 0;
    loop {
        let request = ReadDirRequest {
            dir: machine.client.root().ino.0,
            after,
            limit: 7,
            attributes: true,
            lease: false,
        };
        let reply = machine.client.read_dir(Branch::MAIN, request).await.unwrap();
        for entry in &reply.entries {
            assert!(entry.cookie > after, "cookies rise");
            after = entry.cookie;
            names.insert(String::from_utf8(entry.name.clone()).unwrap(), entry.ino);
        }
        if reply.end {
            return names;
        }
    }
}
