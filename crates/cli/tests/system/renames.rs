//! Tests renames of one name by programs on several mounts.

use crate::store::can_mount;
use crate::two_mounts::{end, two};
use std::fs::{create_dir, hard_link, metadata, read, remove_dir, remove_file, rename, write};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Programs that rename, half of them on each mount.
const PROGRAMS: usize = 4;
const ROUNDS: u64 = 40;
/// Renames of each program in [`to_and_fro`].
const TRIES: u64 = 600;

/// A kind of file to rename.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    File,
    /// A file with a name that stays.
    Linked,
    Directory,
}

impl Kind {
    fn make(self, at: &Path) {
        match self {
            Self::Directory => create_dir(at).unwrap(),
            Self::File => write(at, b"job").unwrap(),
            Self::Linked => {
                write(at, b"job").unwrap();
                hard_link(at, at.with_extension("kept")).unwrap();
            }
        }
    }

    fn remove(self, at: &Path, kept: &Path) {
        match self {
            Self::Directory => remove_dir(at).unwrap(),
            Self::File => remove_file(at).unwrap(),
            Self::Linked => {
                [at, &kept.with_extension("kept")].into_iter().for_each(|at| remove_file(at).unwrap())
            }
        }
    }
}

/// Regression: several programs were told that they had renamed a name, if all renamed it to the same new
/// name. The kernel looked up one after the other, and found one file behind both.
#[test]
fn a_name_is_moved_by_one_program_only() {
    if !can_mount("a_name_is_moved_by_one_program_only") {
        return;
    }
    let (store, mounts, _) = two("renames");
    for kind in [Kind::File, Kind::Linked, Kind::Directory] {
        for places in [["busy/new", "busy/done"], ["queue/job", "taken/job"]] {
            let twice = (0..ROUNDS).filter(|_| claim(&mounts, kind, places) != 1).count();
            assert_eq!(twice, 0, "of {ROUNDS} names, {kind:?} {places:?}");
        }
    }
    names_of_one_file_stay(&mounts[0]);
    to_and_fro(&mounts);
    end(&store, &mounts);
}

/// All programs rename a new name to the same other name. Returns how many were told that they did.
fn claim(mounts: &[PathBuf; 2], kind: Kind, places: [&str; 2]) -> u64 {
    for place in places {
        std::fs::create_dir_all(mounts[0].join(place).parent().unwrap()).unwrap();
    }
    let [old, new] = places.map(|place| mounts.clone().map(|mount| mount.join(place)));
    kind.make(&old[0]);
    let (moved, ready, done) = (AtomicU64::new(0), Barrier::new(PROGRAMS), Barrier::new(PROGRAMS));
    std::thread::scope(|scope| {
        for program in 0..PROGRAMS {
            let (old, new, moved, ready, done) =
                (&old[program % 2], &new[program % 2], &moved, &ready, &done);
            scope.spawn(move || {
                // Others change the directories too, so that no mount may cache their names for long.
                let token = old.with_file_name(format!("token {program}"));
                write(&token, b"").unwrap();
                remove_file(&token).unwrap();
                ready.wait();
                match rename(old, new) {
                    Ok(()) => drop(moved.fetch_add(1, Relaxed)),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
                }
                // It is there for whoever was too late.
                match kind {
                    Kind::Directory => assert!(metadata(new).unwrap().is_dir()),
                    Kind::File | Kind::Linked => assert_eq!(read(new).unwrap(), b"job"),
                }
                done.wait();
            });
        }
    });
    kind.remove(&new[1], &old[1]);
    moved.into_inner()
}

/// Regression: the same, if the name was back by the time at which the mount looked if the file still had it.
fn to_and_fro(mounts: &[PathBuf; 2]) {
    let places = mounts.clone().map(|mount| ["busy/here", "busy/there"].map(|name| mount.join(name)));
    Kind::Linked.make(&places[0][0]);
    let moves = [(); 2].map(|()| AtomicU64::new(0));
    let ways = [[0, 1], [1, 0]].map(|way| (way, &moves[way[0]]));
    std::thread::scope(|scope| {
        for (names, (way, moves)) in places.iter().flat_map(|names| ways.map(|way| (names, way))) {
            scope.spawn(move || {
                for _ in 0..TRIES {
                    match rename(&names[way[0]], &names[way[1]]) {
                        Ok(()) => drop(moves.fetch_add(1, Relaxed)),
                        Err(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
                    }
                }
            });
        }
    });
    let [there, back] = moves.map(AtomicU64::into_inner);
    let is_there = places[1].each_ref().map(|name| name.exists());
    assert_eq!(is_there, [there == back, there == back + 1], "{there} and {back}");
}

/// Two names of one file are two names after a rename of the one to the other, as POSIX says.
fn names_of_one_file_stay(mount: &Path) {
    let [one, other] = ["busy/one", "busy/other"].map(|name| mount.join(name));
    write(&one, b"job").unwrap();
    hard_link(&one, &other).unwrap();
    for _ in 0..20 {
        rename(&one, &other).unwrap();
        assert_eq!([&one, &other].map(|name| read(name).unwrap()), [b"job", b"job"]);
    }
}
