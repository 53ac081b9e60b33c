//! A client dies with the service, and another one has built on what it had not made durable.
//!
//! Nothing durable may be destroyed by what the living one sends again, and if something of it cannot be made
//! again, somebody is told.

use crate::machine::{Machine, Site};
use crate::remote::{Way, make, on_machine, read, restart};
use crate::shared::{end, open, several};
use penstock_base::{Branch, FileId};
use penstock_client::Client;
use penstock_fabric::Remote;
use penstock_wire::metadata::{MakeRequest, ReadDirRequest, RenameRequest, SetAttrRequest};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

/// The two clients: the first is of the service's process.
struct Both<'a> {
    site: &'a Site,
    way: Rc<Way>,
    machine: Option<Machine>,
    dies: Rc<Client>,
    lives: Rc<Client>,
    remotes: Vec<Rc<Remote>>,
}

impl<'a> Both<'a> {
    async fn begin(site: &'a Site, machine: Machine) -> Self {
        let way = Way::new(&machine);
        let (clients, remotes) = several(&machine, &way, 2).await;
        let (dies, lives) = (clients[0].clone(), clients[1].clone());
        Self { site, way, machine: Some(machine), dies, lives, remotes }
    }

    async fn crash(&mut self) {
        let machine = self.machine.take().unwrap();
        self.machine = Some(restart(self.site, machine, &self.way, Duration::ZERO).await);
    }

    async fn end(self) {
        let clients = vec![self.lives.clone(), self.lives];
        end(self.machine.unwrap(), clients, self.remotes).await;
    }
}

async fn rename(client: &Client, from: &str, to: &str, exchange: bool) {
    let root = client.root().ino.0;
    let request = RenameRequest {
        dir: root,
        name: from.into(),
        new_dir: root,
        new_name: to.into(),
        exchange,
        ..RenameRequest::default()
    };
    client.rename(Branch::MAIN, request).await.unwrap();
}

async fn unlink(client: &Client, name: &str) {
    client.unlink(client.root(), name.as_bytes(), false).await.unwrap();
}

async fn truncate(client: &Client, file: FileId, size: u64) {
    let request = SetAttrRequest { ino: file.ino.0, size: Some(size), ..SetAttrRequest::default() };
    client.set_attr(Branch::MAIN, request).await.unwrap();
}

/// The inodes that have a name in the root directory.
async fn named(client: &Client) -> BTreeSet<FileId> {
    let listing = ReadDirRequest { dir: client.root().ino.0, limit: 100, ..ReadDirRequest::default() };
    let entries = client.read_dir(Branch::MAIN, listing).await.unwrap().entries;
    entries.iter().map(|entry| entry.file()).collect()
}

/// Regression: a removal or a rename that was sent again took whatever had the name by then. It removed, or
/// put out of place, files that had been durable all the time, in three of these cases without an error.
#[test]
fn a_repeated_change_of_names_harms_no_other_inode() {
    for case in ["rotate", "exchange", "which", "remove", "link", "back", "roles"] {
        on_machine(7, async |site, machine| {
            let mut both = Both::begin(site, machine).await;
            let (dies, lives) = (both.dies.clone(), both.lives.clone());
            let mut files = Vec::new();
            for name in ["x", "y"] {
                let file = make(&lives, name).await.unwrap();
                lives.write(file, 0, name.repeat(5000).as_bytes()).await.unwrap();
                lives.release(file).await.unwrap();
                files.push(file);
            }
            lives.sync_all().await.unwrap();
            match case {
                "rotate" => {
                    rename(&dies, "y", "y.bak", false).await;
                    let new = make(&lives, "t").await.unwrap();
                    lives.release(new).await.unwrap();
                    rename(&lives, "t", "y", false).await;
                }
                "exchange" => {
                    rename(&dies, "x", "y", true).await;
                    unlink(&lives, "y").await;
                }
                "which" => {
                    rename(&dies, "x", "z", false).await;
                    rename(&dies, "y", "x", false).await;
                    rename(&lives, "x", "w", false).await;
                }
                "remove" => {
                    rename(&dies, "y", "y.bak", false).await;
                    let new = make(&lives, "y").await.unwrap();
                    lives.release(new).await.unwrap();
                    unlink(&lives, "y").await;
                }
                // The same inodes, and each where the other one was.
                "back" => {
                    rename(&dies, "x", "y", true).await;
                    rename(&lives, "x", "y", true).await;
                }
                "roles" => {
                    for (file, name) in files.iter().zip(["x2", "y2"]) {
                        lives.link(*file, lives.root(), name.as_bytes()).await.unwrap();
                    }
                    lives.sync_all().await.unwrap();
                    rename(&dies, "x", "y", true).await;
                    rename(&lives, "x", "y", false).await;
                }
                _ => {
                    let (dir, mode) = (dies.root().ino.0, 0o040_755);
                    let request = MakeRequest { dir, name: b"n".to_vec(), mode, ..MakeRequest::default() };
                    let dir = dies.make(Branch::MAIN, request).await.unwrap().file();
                    lives.link(files[0], dir, b"x").await.unwrap();
                    unlink(&lives, "x").await;
                }
            }
            both.crash().await;
            let there = named(&lives).await;
            // The living client has removed this one itself, under the name that it had then.
            let removed = (case == "exchange").then_some(files[0]);
            for (file, name) in files.iter().zip(["x", "y"]).filter(|(file, _)| Some(**file) != removed) {
                assert!(there.contains(file), "{case}: {name} is gone from {there:?}");
                let bytes = read(&lives, *file).await;
                assert!(bytes == name.repeat(5000).as_bytes(), "{case}: {name}");
            }
            for (file, name) in files.iter().zip(["x", "y"]).filter(|_| matches!(case, "back" | "roles")) {
                let found = lives.lookup(lives.root(), name.as_bytes()).await.unwrap().file();
                assert_eq!(found, *file, "{case}: {name}, as it was durable");
            }
            assert!(lives.fsync(lives.root()).await.is_err(), "{case}: nobody is told");
            lives.sync_all().await.unwrap();
            both.end().await;
        });
    }
}

/// Regression: a client that keeps nothing gave a lease to another client before what it had written was
/// durable. That client had read the data, appended to it, and found zeros after a restart.
#[test]
fn what_another_client_has_read_under_a_lease_survives() {
    on_machine(8, async |site, machine| {
        let mut both = Both::begin(site, machine).await;
        let (dies, lives) = (both.dies.clone(), both.lives.clone());
        let file = make(&lives, "log").await.unwrap();
        lives.sync_all().await.unwrap();
        let theirs = open(&dies, "log").await;
        dies.write(theirs, 0, &[1; 20_480]).await.unwrap();
        dies.release(theirs).await.unwrap();
        assert_eq!(read(&lives, file).await, [1; 20_480]);
        assert_eq!(lives.append(file, &[2; 20_480]).await.unwrap(), 20_480);
        both.crash().await;
        assert_eq!(read(&lives, file).await, [[1; 20_480], [2; 20_480]].concat());
        lives.release(file).await.unwrap();
        both.end().await;
    });
}

/// Regression: a client wrote behind the end of a file that another one had truncated. After a restart that
/// lost the truncation the write was gone, or was put into the old contents, without an error.
#[test]
fn writes_after_a_truncation_by_another_client_survive() {
    for at in [0, 5000] {
        on_machine(9, async |site, machine| {
            let mut both = Both::begin(site, machine).await;
            let (dies, lives) = (both.dies.clone(), both.lives.clone());
            let file = make(&lives, "big").await.unwrap();
            lives.write(file, 0, &[7; 100_000]).await.unwrap();
            lives.fsync(file).await.unwrap();
            let theirs = open(&dies, "big").await;
            truncate(&dies, theirs, 0).await;
            dies.release(theirs).await.unwrap();
            lives.write(file, at, b"hello").await.unwrap();
            both.crash().await;
            let wanted = [&vec![0; at as usize][..], b"hello"].concat();
            assert_eq!(lives.get_attr(file).await.unwrap().size, wanted.len() as u64);
            assert_eq!(read(&lives, file).await, wanted);
            lives.fsync(file).await.unwrap();
            lives.release(file).await.unwrap();
            both.end().await;
        });
    }
}

/// Regression: what a client had written to a file was dropped without a report if the file had been made by
/// a client that died with the service. Now nobody opens such a file before its creation is durable.
#[test]
fn writes_to_a_file_that_another_client_has_made_survive() {
    for is_open in [false, true] {
        on_machine(10, async |site, machine| {
            let mut both = Both::begin(site, machine).await;
            let (dies, lives) = (both.dies.clone(), both.lives.clone());
            let theirs = make(&dies, "new").await.unwrap();
            dies.release(theirs).await.unwrap();
            let file = open(&lives, "new").await;
            lives.write(file, 0, &[3; 20_000]).await.unwrap();
            if !is_open {
                lives.release(file).await.unwrap();
            }
            both.crash().await;
            assert_eq!(lives.lookup(lives.root(), b"new").await.unwrap().file(), file);
            assert_eq!(read(&lives, file).await, [3; 20_000], "open: {is_open}");
            if is_open {
                lives.release(file).await.unwrap();
            }
            both.end().await;
        });
    }
}

/// Regression: the space that fallocate had reserved behind the end of a file was not reserved again.
#[test]
fn reserved_space_is_there_after_a_restart() {
    on_machine(11, async |site, machine| {
        let mut both = Both::begin(site, machine).await;
        let lives = both.lives.clone();
        let file = make(&lives, "reserved").await.unwrap();
        let change = penstock_wire::data::SpaceChange::Reserve;
        lives.change_space(file, 0, 1 << 20, change, false).await.unwrap();
        let before = lives.get_attr(file).await.unwrap();
        assert_eq!((before.size, before.blocks), (1 << 20, 256));
        both.crash().await;
        let after = lives.get_attr(file).await.unwrap();
        assert_eq!((after.size, after.blocks), (1 << 20, 256));
        lives.release(file).await.unwrap();
        both.end().await;
    });
}
