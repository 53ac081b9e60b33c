//! Random operations and crashes, compared with a model: after a crash the names are those after one of the
//! operations since the last sync.

use super::bed::{Bed, errno, run_with};
use penstock_base::Ino;
use penstock_wire::metadata::RenameRequest;
use rustix::io::Errno;
use std::collections::BTreeMap;

/// Every path with its inode. Directories end in a slash.
type Tree = BTreeMap<String, Ino>;

/// The names that operations choose from.
const NAMES: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Clone, Debug)]
enum Op {
    Add(String),
    Link(String, String),
    Remove(String),
    Rename(String, String, bool, bool),
}

/// The tree's key of a path without a slash at its end.
fn key(tree: &Tree, path: &str) -> Option<String> {
    let dir = format!("{path}/");
    if tree.contains_key(path) { Some(path.to_owned()) } else { tree.contains_key(&dir).then_some(dir) }
}

/// The key of the directory part of a path; none for the root.
fn parent(tree: &Tree, path: &str) -> Result<Option<String>, Errno> {
    let Some((parent, _)) = path.trim_end_matches('/').rsplit_once('/') else { return Ok(None) };
    parent_is_dir(tree, parent)?;
    key(tree, parent).map(Some).ok_or(Errno::NOENT)
}

fn is_dir(key: Option<String>) -> Result<(), Errno> {
    if key.is_none_or(|key| key.ends_with('/')) { Ok(()) } else { Err(Errno::NOTDIR) }
}

fn parent_is_dir(tree: &Tree, path: &str) -> Result<(), Errno> {
    is_dir(parent(tree, path)?)
}

fn is_empty(tree: &Tree, dir: &str) -> bool {
    !tree.keys().any(|path| path.len() > dir.len() && path.starts_with(dir))
}

/// Moves a key and everything below it to `to`, which has no slash at its end.
fn take(tree: &mut Tree, key: &str, to: &str) -> Tree {
    let moved: Vec<String> = tree
        .keys()
        .filter(|path| *path == key || key.ends_with('/') && path.starts_with(key))
        .cloned()
        .collect();
    let old = key.trim_end_matches('/').len();
    moved.into_iter().map(|path| (format!("{to}{}", &path[old..]), tree.remove(&path).unwrap())).collect()
}

fn rename(tree: &mut Tree, from: &str, to: &str, no_replace: bool, exchange: bool) -> Result<(), Errno> {
    let (from_dir, to_dir) = (parent(tree, from)?, parent(tree, to)?);
    is_dir(from_dir)?;
    is_dir(to_dir)?;
    let source = key(tree, from).ok_or(Errno::NOENT)?;
    if source.ends_with('/') && to.starts_with(&source) {
        return Err(Errno::INVAL);
    }
    let target = key(tree, to);
    match &target {
        Some(_) if no_replace => return Err(Errno::EXIST),
        None if exchange => return Err(Errno::NOENT),
        Some(target) if tree[target] == tree[&source] => return Ok(()),
        Some(target) if exchange => {
            if target.ends_with('/') && from.starts_with(target.as_str()) {
                return Err(Errno::INVAL);
            }
            let (one, other) = (take(tree, &source, to), take(tree, target, from));
            tree.extend(one.into_iter().chain(other));
            return Ok(());
        }
        Some(target) => match (source.ends_with('/'), target.ends_with('/')) {
            (true, false) => return Err(Errno::NOTDIR),
            (false, true) => return Err(Errno::ISDIR),
            (true, true) if !is_empty(tree, target) => return Err(Errno::NOTEMPTY),
            _ => drop(tree.remove(target)),
        },
        None => {}
    }
    let moved = take(tree, &source, to);
    tree.extend(moved);
    Ok(())
}

/// Applies an operation to the model. `made` is the inode that it made.
fn apply(tree: &mut Tree, op: &Op, made: Option<Ino>) -> Result<(), Errno> {
    match op {
        Op::Add(path) => {
            parent_is_dir(tree, path)?;
            if key(tree, path.trim_end_matches('/')).is_some() {
                return Err(Errno::EXIST);
            }
            tree.insert(path.clone(), made.unwrap_or(Ino(0)));
        }
        Op::Link(from, to) => {
            parent_is_dir(tree, from)?;
            let source = key(tree, from).ok_or(Errno::NOENT)?;
            parent_is_dir(tree, to)?;
            if source.ends_with('/') {
                return Err(Errno::PERM);
            }
            if key(tree, to).is_some() {
                return Err(Errno::EXIST);
            }
            tree.insert(to.clone(), tree[&source]);
        }
        Op::Remove(path) => {
            parent_is_dir(tree, path)?;
            let found = key(tree, path.trim_end_matches('/')).ok_or(Errno::NOENT)?;
            match (path.ends_with('/'), found.ends_with('/')) {
                (true, false) => return Err(Errno::NOTDIR),
                (false, true) => return Err(Errno::ISDIR),
                (true, true) if !is_empty(tree, &found) => return Err(Errno::NOTEMPTY),
                _ => drop(tree.remove(&found)),
            }
        }
        Op::Rename(from, to, no_replace, exchange) => rename(tree, from, to, *no_replace, *exchange)?,
    }
    Ok(())
}

fn draw(bed: &Bed) -> Op {
    let below = |bound: u64| bed.world.below(bound);
    let path = || {
        let depth = 1 + below(3);
        let names: Vec<&str> = (0..depth).map(|_| NAMES[below(4) as usize]).collect();
        names.join("/")
    };
    let slash = |path: String| if below(2) == 0 { format!("{path}/") } else { path };
    match below(9) {
        0..3 => Op::Add(slash(path())),
        3 => Op::Link(path(), path()),
        4 | 5 => Op::Remove(slash(path())),
        7 => Op::Rename(path(), path(), false, true),
        _ => Op::Rename(path(), path(), below(4) == 0, false),
    }
}

async fn execute(bed: &Bed, op: &Op) -> (Option<Errno>, Option<Ino>) {
    match op {
        Op::Add(path) => {
            let made = bed.add(path).await;
            let ino = made.as_ref().ok().copied();
            (errno(made), ino)
        }
        Op::Link(from, to) => match bed.find(from).await {
            Ok(ino) => (errno(bed.link(ino, to).await), None),
            failed => (errno(failed), None),
        },
        Op::Remove(path) => (errno(bed.remove(path).await), None),
        Op::Rename(from, to, no_replace, exchange) => {
            let flags = RenameRequest { no_replace: *no_replace, exchange: *exchange, ..Default::default() };
            (errno(bed.rename(from, to, flags).await), None)
        }
    }
}

#[test]
fn random_operations_and_crashes_agree_with_a_model() {
    for seed in penstock_sim::seeds(0..40) {
        run_with(seed, 64 << 20, async |bed| {
            let mut tree = Tree::new();
            // The trees since the last sync, any of which a crash may leave.
            let mut since_sync = vec![tree.clone()];
            for step in 0..150 {
                let case = format!("seed {seed} step {step}");
                match bed.world.below(40) {
                    0 => {
                        bed.meta.sync().await.unwrap();
                        since_sync = vec![tree.clone()];
                    }
                    1 => {
                        bed.crash().await;
                        let left = bed.tree().await;
                        assert!(since_sync.contains(&left), "{case}: {left:?} is none of {since_sync:?}");
                        tree = left;
                        bed.meta.wait_reaped().await;
                        bed.check(&case);
                        // The new session is a change that a crash may lose, and not the only one.
                        since_sync = since_sync
                            .into_iter()
                            .take_while(|old| *old != tree)
                            .chain([tree.clone()])
                            .collect();
                    }
                    _ => {
                        let op = draw(bed);
                        let (failed, made) = execute(bed, &op).await;
                        assert_eq!(failed, apply(&mut tree, &op, made).err(), "{case}: {op:?} in {tree:?}");
                        assert_eq!(bed.tree().await, tree, "{case}: {op:?}");
                        since_sync.push(tree.clone());
                    }
                }
            }
            bed.meta.wait_reaped().await;
            bed.check(&format!("seed {seed}"));
            let inodes: std::collections::BTreeSet<&Ino> = tree.values().collect();
            assert_eq!(bed.diagnose().inodes, inodes.len() as u64 + 1, "seed {seed}: nothing leaks");
        });
    }
}
