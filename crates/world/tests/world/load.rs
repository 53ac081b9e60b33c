//! A load of every kind of operation by several tasks, and the model of the state that a crash may leave.
//!
//! Each task has a directory of its own, in which it alone changes names. So the names found there after a
//! crash must be those after some prefix of its operations that contains all synced ones. All tasks write to
//! the files of one more directory. The images of each file since its last sync are kept. After a crash,
//! every block must be as in one of them, or zeros if it has changed.

use crate::flushed::fsync;
use crate::machine::Machine;
use crate::model::{pattern, read_all};
use penstock_base::{Branch, FileId};
use penstock_client::{Failure, SetAttrRequest};
use penstock_wire::metadata::{MakeRequest, ReadDirRequest, RenameRequest};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

pub const TASKS: usize = 3;
const SHARED: usize = TASKS;
const BLOCK: usize = 4096;
const DIRECTORY: u32 = 0o040_755;
const REGULAR: u32 = 0o100_644;
/// Largest file in bytes, so that all of them fit.
const MOST_BYTES: u64 = 1_500_000;

/// The file of a name. The number of an inode that is being made is not known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    ino: u64,
    directory: bool,
}

type Names = BTreeMap<String, Node>;

/// The names in a task's directory after each of its operations since the last sync.
#[derive(Default)]
struct Tree {
    root: u64,
    /// Number of the first of `states`.
    first: u64,
    states: Vec<Names>,
    /// Number of the newest state whose operation returned.
    acknowledged: u64,
    /// A file (by inode) is at least as new as an image, if this state or a later one is found.
    promises: Vec<(u64, u64, u64)>,
}

impl Tree {
    fn now(&self) -> &Names {
        self.states.last().expect("there is always a state")
    }

    fn begin(&mut self, change: impl FnOnce(&mut Names)) -> u64 {
        let mut names = self.now().clone();
        change(&mut names);
        self.states.push(names);
        self.first + self.states.len() as u64 - 1
    }

    fn sync(&mut self, state: u64) {
        if state > self.first {
            self.states.drain(..(state - self.first) as usize);
            self.first = state;
        }
    }
}

/// The images of a file since its last sync; the first is the synced one.
#[derive(Clone, Default)]
struct File {
    first: u64,
    /// Number of the newest image whose operation returned. Operations on one file return in order.
    acknowledged: u64,
    images: Vec<Rc<Vec<u8>>>,
}

impl File {
    fn of(image: Vec<u8>) -> Self {
        Self { first: 0, acknowledged: 0, images: vec![Rc::new(image)] }
    }

    fn now(&self) -> Rc<Vec<u8>> {
        self.images.last().expect("there is always an image").clone()
    }

    fn newest(&self) -> u64 {
        self.first + self.images.len() as u64 - 1
    }

    fn sync(&mut self, image: u64) {
        if image > self.first {
            self.images.drain(..(image - self.first) as usize);
            self.first = image;
        }
    }

    fn check(&self, what: &str, found: &[u8]) {
        let sizes: Vec<usize> = self.images.iter().map(|image| image.len()).collect();
        assert!(sizes.contains(&found.len()), "{what}: {} bytes, it had {sizes:?}", found.len());
        for (index, block) in found.chunks(BLOCK).enumerate() {
            let is = |image: &Vec<u8>| {
                let rest = image.get(index * BLOCK..).unwrap_or(&[]);
                block.iter().enumerate().all(|(at, byte)| rest.get(at).copied().unwrap_or(0) == *byte)
            };
            let changed = || self.images.iter().any(|image| !same_block(image, &self.images[0], index));
            let allowed = self.images.iter().any(|image| is(image))
                || (block.iter().all(|byte| *byte == 0) && changed());
            assert!(allowed, "{what}: block {index} of {} bytes is of no image of {sizes:?}", found.len());
        }
    }
}

fn same_block(a: &[u8], b: &[u8], index: usize) -> bool {
    let block = |image: &[u8]| {
        let start = (index * BLOCK).min(image.len());
        image[start..(start + BLOCK).min(image.len())].to_vec()
    };
    block(a) == block(b)
}

/// Operations and state of all tasks.
#[derive(Default)]
pub struct Load {
    trees: RefCell<Vec<Tree>>,
    files: RefCell<BTreeMap<u64, File>>,
    open: RefCell<BTreeSet<u64>>,
    /// Open files without a name, by task.
    orphans: RefCell<BTreeSet<(usize, u64)>>,
    /// Number of operations that have not returned.
    running: Cell<u64>,
}

fn split(path: &str) -> (Option<&str>, &str) {
    path.split_once('/').map_or((None, path), |(dir, name)| (Some(dir), name))
}

fn some_name(machine: &Machine) -> String {
    let number = machine.world.below(4);
    match machine.world.below(4) {
        0..=1 => format!("n{number}"),
        dir => format!("d{}/n{number}", dir - 2),
    }
}

impl Load {
    /// Makes the directories of the tasks and the shared files, and syncs them.
    pub async fn prepare(&self, machine: &Machine) -> Result<(), Failure> {
        for task in 0..=TASKS {
            let root = make(machine, machine.client.root().ino.0, &format!("t{task}"), DIRECTORY).await?;
            let mut names = Names::new();
            if task == SHARED {
                for name in ["s0", "s1"] {
                    let ino = make(machine, root, name, REGULAR).await?;
                    names.insert(name.into(), Node { ino, directory: false });
                    self.files.borrow_mut().insert(ino, File::of(Vec::new()));
                }
            }
            self.trees.borrow_mut().push(Tree { root, states: vec![names], ..Tree::default() });
        }
        machine.client.sync_all().await
    }

    fn names(&self, task: usize) -> Names {
        self.trees.borrow()[task].now().clone()
    }

    fn dir_of(&self, task: usize, path: &str) -> Option<u64> {
        let trees = self.trees.borrow();
        match split(path).0 {
            None => Some(trees[task].root),
            Some(dir) => trees[task].now().get(dir).map(|node| node.ino),
        }
    }

    fn acknowledge(&self, task: usize, state: u64) {
        self.trees.borrow_mut()[task].acknowledged = state;
    }

    /// Executes one random operation of `task`.
    pub async fn step(&self, machine: &Machine, task: usize) -> Result<(), Failure> {
        self.running.set(self.running.get() + 1);
        let result = self.try_step(machine, task).await;
        self.running.set(self.running.get() - 1);
        result
    }

    async fn try_step(&self, machine: &Machine, task: usize) -> Result<(), Failure> {
        let path = some_name(machine);
        let found = self.names(task).get(&path).copied();
        match (machine.world.below(18), found) {
            (0, _) => self.toggle_dir(machine, task).await,
            (1, _) => self.rename_dir(machine, task).await,
            (2..=4, _) => {
                let shared: Vec<u64> = self.names(SHARED).values().map(|node| node.ino).collect();
                self.use_file(machine, shared[machine.world.below(2) as usize]).await
            }
            (5, _) => self.use_orphan(machine, task).await,
            (_, None) => self.make(machine, task, &path).await,
            (6, Some(node)) => self.link(machine, task, node).await,
            (7, Some(node)) => self.unlink(machine, task, &path, node).await,
            (8..=9, Some(node)) => self.rename(machine, task, &path, node).await,
            (10, Some(node)) if self.open.borrow_mut().remove(&node.ino) => {
                machine.client.release(FileId::of_numbers(0, node.ino)).await
            }
            (_, Some(node)) => self.use_file(machine, node.ino).await,
        }
    }

    async fn use_file(&self, machine: &Machine, ino: u64) -> Result<(), Failure> {
        if self.open.borrow_mut().insert(ino) {
            machine.client.open(FileId::of_numbers(0, ino)).await?;
        }
        match machine.world.below(12) {
            0..=5 => self.write(machine, ino).await,
            6 => self.truncate(machine, ino).await,
            7..=9 => self.fsync(machine, ino).await,
            _ => {
                let now = self.files.borrow()[&ino].now();
                let parts = machine.client.read(FileId::of_numbers(0, ino), 0, 1 << 40).await?;
                let bytes: Vec<u8> = parts.iter().flat_map(|part| part.to_vec()).collect();
                assert!(bytes == *now, "{ino} reads as written ({} of {} bytes)", bytes.len(), now.len());
                Ok(())
            }
        }
    }

    fn written(&self, ino: u64, image: u64) {
        if let Some(file) = self.files.borrow_mut().get_mut(&ino) {
            file.acknowledged = image;
        }
    }

    /// Adds an image of a file. Returns its number.
    fn change(&self, ino: u64, change: impl FnOnce(&mut Vec<u8>)) -> u64 {
        let mut files = self.files.borrow_mut();
        let file = files.get_mut(&ino).expect("a file that is used is known");
        let mut image = (*file.now()).clone();
        change(&mut image);
        file.images.push(Rc::new(image));
        file.newest()
    }

    async fn write(&self, machine: &Machine, ino: u64) -> Result<(), Failure> {
        let world = &machine.world;
        let size = self.files.borrow()[&ino].now().len() as u64;
        let offset = match world.below(5) {
            0..=1 => size,
            2 => world.below(size + 1),
            3 => world.below(MOST_BYTES),
            _ => world.below(8) * 131_072,
        };
        let most = [100, 4096, 10_000, 131_072, 700_000][world.below(5) as usize];
        let len = if world.below(2) == 0 { most } else { 1 + world.below(most) };
        let offset = offset.min(MOST_BYTES) as usize;
        let data = pattern(world, len as usize);
        let image = self.change(ino, |image| {
            image.resize(image.len().max(offset + data.len()), 0);
            image[offset..offset + data.len()].copy_from_slice(&data);
        });
        machine.client.write(FileId::of_numbers(0, ino), offset as u64, &data).await?;
        self.written(ino, image);
        Ok(())
    }

    async fn truncate(&self, machine: &Machine, ino: u64) -> Result<(), Failure> {
        let size = self.files.borrow()[&ino].now().len() as u64;
        let to = machine.world.below((size * 2).clamp(10, MOST_BYTES));
        let image = self.change(ino, |image| image.resize(to as usize, 0));
        let request = SetAttrRequest { ino, size: Some(to), ..SetAttrRequest::default() };
        machine.client.set_attr(Branch::MAIN, request).await?;
        self.written(ino, image);
        Ok(())
    }

    async fn fsync(&self, machine: &Machine, ino: u64) -> Result<(), Failure> {
        let image = self.files.borrow()[&ino].acknowledged;
        let states: Vec<u64> = self.trees.borrow().iter().map(|tree| tree.acknowledged).collect();
        // Chunks of other files may be written at this time, even if no task waits for them.
        let waits = |other: &u64| *other != ino && machine.client.is_unsynced(FileId::of_numbers(0, *other));
        let others = self.running.get() > 1 || self.files.borrow().keys().any(waits);
        fsync(machine, FileId::of_numbers(0, ino), others).await?;
        if let Some(file) = self.files.borrow_mut().get_mut(&ino) {
            file.sync(image);
        }
        for (tree, state) in self.trees.borrow_mut().iter_mut().zip(states) {
            tree.sync(state);
        }
        self.keep_promises();
        Ok(())
    }

    /// Drops the images from before a rename that has become durable: they may not be found any more.
    fn keep_promises(&self) {
        let mut files = self.files.borrow_mut();
        for tree in self.trees.borrow_mut().iter_mut() {
            let durable = tree.first;
            tree.promises.retain(|(state, ino, image)| {
                if *state <= durable
                    && let Some(file) = files.get_mut(ino)
                {
                    file.sync(*image);
                }
                *state > durable
            });
        }
    }

    async fn make(&self, machine: &Machine, task: usize, path: &str) -> Result<(), Failure> {
        let Some(dir) = self.dir_of(task, path) else { return Ok(()) };
        self.make_node(machine, task, path, dir, false).await
    }

    async fn make_node(
        &self,
        machine: &Machine,
        task: usize,
        path: &str,
        dir: u64,
        directory: bool,
    ) -> Result<(), Failure> {
        let put = |ino| {
            move |names: &mut Names| {
                names.insert(path.to_owned(), Node { ino, directory });
            }
        };
        let state = self.trees.borrow_mut()[task].begin(put(0));
        let mode = if directory { DIRECTORY } else { REGULAR };
        let ino = make(machine, dir, split(path).1, mode).await?;
        put(ino)(self.trees.borrow_mut()[task].states.last_mut().expect("it was pushed"));
        if !directory {
            self.files.borrow_mut().insert(ino, File::of(Vec::new()));
        }
        self.acknowledge(task, state);
        Ok(())
    }

    async fn toggle_dir(&self, machine: &Machine, task: usize) -> Result<(), Failure> {
        let path = format!("d{}", machine.world.below(2));
        let (names, root) = (self.names(task), self.trees.borrow()[task].root);
        if !names.contains_key(&path) {
            return self.make_node(machine, task, &path, root, true).await;
        }
        let full = names.keys().any(|name| name.starts_with(&format!("{path}/")));
        if full {
            let failure =
                machine.client.unlink(FileId::of_numbers(0, root), path.as_bytes(), true).await.unwrap_err();
            assert_eq!(failure.errno, 39, "{path} has entries");
            return Ok(());
        }
        let state = self.trees.borrow_mut()[task].begin(|names| {
            names.remove(&path);
        });
        machine.client.unlink(FileId::of_numbers(0, root), path.as_bytes(), true).await?;
        self.acknowledge(task, state);
        Ok(())
    }

    async fn rename_dir(&self, machine: &Machine, task: usize) -> Result<(), Failure> {
        let (names, root) = (self.names(task), self.trees.borrow()[task].root);
        let (from, to) = if machine.world.below(2) == 0 { ("d0", "d1") } else { ("d1", "d0") };
        let full = names.keys().any(|name| name.starts_with(&format!("{to}/")));
        if !names.contains_key(from) || full {
            return Ok(());
        }
        let state = self.trees.borrow_mut()[task].begin(|names| {
            for (path, node) in std::mem::take(names) {
                let moved = path.strip_prefix(from).map(|rest| format!("{to}{rest}"));
                if path != to {
                    names.insert(moved.unwrap_or(path), node);
                }
            }
        });
        rename(machine, (root, from), (root, to)).await?;
        self.acknowledge(task, state);
        Ok(())
    }

    async fn link(&self, machine: &Machine, task: usize, node: Node) -> Result<(), Failure> {
        let to = some_name(machine);
        let Some(dir) = self.dir_of(task, &to) else { return Ok(()) };
        if self.names(task).contains_key(&to) {
            return Ok(());
        }
        let state = self.trees.borrow_mut()[task].begin(|names| {
            names.insert(to.clone(), node);
        });
        machine
            .client
            .link(FileId::of_numbers(0, node.ino), FileId::of_numbers(0, dir), split(&to).1.as_bytes())
            .await?;
        self.acknowledge(task, state);
        Ok(())
    }

    async fn unlink(&self, machine: &Machine, task: usize, path: &str, node: Node) -> Result<(), Failure> {
        let dir = self.dir_of(task, path).expect("what has a name is in a directory");
        let state = self.trees.borrow_mut()[task].begin(|names| {
            names.remove(path);
        });
        machine.client.unlink(FileId::of_numbers(0, dir), split(path).1.as_bytes(), false).await?;
        self.acknowledge(task, state);
        self.note_nameless(task, node.ino);
        Ok(())
    }

    fn note_nameless(&self, task: usize, ino: u64) {
        let named = self.trees.borrow()[task].now().values().any(|node| node.ino == ino);
        if !named && self.open.borrow().contains(&ino) {
            self.orphans.borrow_mut().insert((task, ino));
        }
    }

    async fn use_orphan(&self, machine: &Machine, task: usize) -> Result<(), Failure> {
        let mine = self.orphans.borrow().iter().find(|(owner, _)| *owner == task).copied();
        let Some((_, ino)) = mine else { return Ok(()) };
        if machine.world.below(2) == 0 {
            return self.use_file(machine, ino).await;
        }
        self.orphans.borrow_mut().remove(&(task, ino));
        self.open.borrow_mut().remove(&ino);
        machine.client.release(FileId::of_numbers(0, ino)).await
    }

    async fn rename(&self, machine: &Machine, task: usize, path: &str, node: Node) -> Result<(), Failure> {
        let to = some_name(machine);
        let from_dir = self.dir_of(task, path).expect("what has a name is in a directory");
        let Some(to_dir) = self.dir_of(task, &to) else { return Ok(()) };
        let replaced = self.names(task).get(&to).copied();
        // Two names of one file: nothing happens.
        let same = replaced.is_some_and(|other| other.ino == node.ino);
        let state = self.trees.borrow_mut()[task].begin(|names| {
            if !same {
                names.remove(path);
                names.insert(to.clone(), node);
            }
        });
        if replaced.is_some() && !same {
            let image = self.files.borrow()[&node.ino].acknowledged;
            self.trees.borrow_mut()[task].promises.push((state, node.ino, image));
        }
        rename(machine, (from_dir, split(path).1), (to_dir, split(&to).1)).await?;
        self.acknowledge(task, state);
        if let Some(other) = replaced.filter(|_| !same) {
            self.note_nameless(task, other.ino);
        }
        Ok(())
    }

    /// Checks a store after a crash or a stop. The state that is found becomes the model's state.
    pub async fn settle(&self, machine: &Machine) {
        for task in 0..=TASKS {
            let root = self.trees.borrow()[task].root;
            let found = list_tree(machine, root).await;
            let mut trees = self.trees.borrow_mut();
            let tree = &mut trees[task];
            let prefix = tree.states.iter().position(|state| same_names(state, &found));
            let Some(prefix) = prefix else {
                panic!("t{task} has {found:?}, after no prefix of {:?}", tree.states)
            };
            let state = tree.first + prefix as u64;
            tree.sync(state);
            tree.states = vec![found];
            (tree.first, tree.acknowledged) = (state, state);
        }
        self.keep_promises();
        let named: BTreeMap<u64, String> = {
            let trees = self.trees.borrow();
            let all = trees.iter().enumerate().flat_map(|(task, tree)| {
                tree.now().iter().map(move |(path, node)| (node, format!("t{task}/{path}")))
            });
            all.filter(|(node, _)| !node.directory).map(|(node, path)| (node.ino, path)).collect()
        };
        // The power may be cut in this life too, so the model is kept until all checks have passed.
        let known = self.files.borrow().clone();
        let mut files = BTreeMap::new();
        for (ino, path) in named {
            let bytes = read_all(machine, FileId::of_numbers(0, ino)).await;
            match known.get(&ino) {
                Some(file) => file.check(&path, &bytes),
                None => assert!(bytes.is_empty(), "{path} was only just made"),
            }
            files.insert(ino, File::of(bytes));
        }
        *self.files.borrow_mut() = files;
        self.trees.borrow_mut().iter_mut().for_each(|tree| tree.promises.clear());
        self.open.borrow_mut().clear();
        self.orphans.borrow_mut().clear();
        self.running.set(0);
    }

    /// Ends all uses, so that no file without a name stays in use.
    pub async fn release_all(&self, machine: &Machine) -> Result<(), Failure> {
        let open = std::mem::take(&mut *self.open.borrow_mut());
        self.orphans.borrow_mut().clear();
        for ino in open {
            machine.client.release(FileId::of_numbers(0, ino)).await?;
        }
        machine.client.sync_all().await?;
        let (now, newest): (Vec<u64>, BTreeMap<u64, u64>) = (
            self.trees.borrow().iter().map(|tree| tree.acknowledged).collect(),
            self.files.borrow().iter().map(|(ino, file)| (*ino, file.newest())).collect(),
        );
        self.trees.borrow_mut().iter_mut().zip(now).for_each(|(tree, state)| tree.sync(state));
        newest.iter().for_each(|(ino, image)| self.files.borrow_mut().get_mut(ino).unwrap().sync(*image));
        Ok(())
    }
}

impl Load {
    /// Removes every name, including the task directories, and ends all uses.
    pub async fn remove_all(&self, machine: &Machine) -> Result<(), Failure> {
        let client = &machine.client;
        for task in 0..=TASKS {
            let mut paths: Vec<(String, Node)> = self.names(task).into_iter().collect();
            // Contents of a directory come before the directory.
            paths.sort_by_key(|(path, _)| std::cmp::Reverse(path.matches('/').count()));
            for (path, node) in paths {
                let dir = self.dir_of(task, &path).expect("what has a name is in a directory");
                client.unlink(FileId::of_numbers(0, dir), split(&path).1.as_bytes(), node.directory).await?;
            }
            client.unlink(client.root(), format!("t{task}").as_bytes(), true).await?;
        }
        let open = std::mem::take(&mut *self.open.borrow_mut());
        for ino in open {
            client.release(FileId::of_numbers(0, ino)).await?;
        }
        self.orphans.borrow_mut().clear();
        client.sync_all().await
    }
}

fn same_names(state: &Names, found: &Names) -> bool {
    let same = |(a, b): ((&String, &Node), (&String, &Node))| {
        a.0 == b.0 && a.1.directory == b.1.directory && (a.1.ino == b.1.ino || a.1.ino == 0)
    };
    state.len() == found.len() && state.iter().zip(found).all(same)
}

async fn make(machine: &Machine, dir: u64, name: &str, mode: u32) -> Result<u64, Failure> {
    let request = MakeRequest { dir, name: name.into(), mode, ..MakeRequest::default() };
    Ok(machine.client.make(Branch::MAIN, request).await?.ino)
}

async fn rename(machine: &Machine, from: (u64, &str), to: (u64, &str)) -> Result<(), Failure> {
    let request = RenameRequest {
        dir: from.0,
        name: from.1.into(),
        new_dir: to.0,
        new_name: to.1.into(),
        ..RenameRequest::default()
    };
    machine.client.rename(Branch::MAIN, request).await.map(drop)
}

async fn list_tree(machine: &Machine, root: u64) -> Names {
    let mut names = Names::new();
    let mut queue = vec![(root, String::new())];
    while let Some((dir, prefix)) = queue.pop() {
        let request = ReadDirRequest { dir, after: 0, limit: 1000, attributes: true, lease: false };
        for entry in machine.client.read_dir(Branch::MAIN, request).await.unwrap().entries {
            let path = format!("{prefix}{}", String::from_utf8(entry.name).unwrap());
            let directory = entry.kind == 0o040_000;
            if directory {
                queue.push((entry.ino, format!("{path}/")));
            }
            names.insert(path, Node { ino: entry.ino, directory });
        }
    }
    names
}
