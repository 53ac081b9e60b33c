//! Tests of files and names on a healthy machine.

use crate::flushed::fsync;
use crate::machine::{Machine, Site, on_machine};
use crate::model::{Model, list, make_file, pattern, read_all};
use penstock_base::{Branch, FileId};
use penstock_client::{Failure, Purpose, SetAttrRequest};
use penstock_sim::World;
use penstock_wire::metadata::{MakeRequest, RenameRequest, Time, XattrRequest};

async fn make(machine: &Machine, dir: FileId, name: &str, mode: u32) -> Result<FileId, Failure> {
    let request = MakeRequest { dir: dir.ino.0, name: name.into(), mode, ..MakeRequest::default() };
    Ok(machine.client.make(Branch::MAIN, request).await?.file())
}

async fn rename(machine: &Machine, from: (FileId, &str), to: (FileId, &str), flags: &str) -> u16 {
    let request = RenameRequest {
        dir: from.0.ino.0,
        name: from.1.into(),
        new_dir: to.0.ino.0,
        new_name: to.1.into(),
        no_replace: flags == "noreplace",
        exchange: flags == "exchange",
        whiteout: flags == "whiteout",
        ..RenameRequest::default()
    };
    machine.client.rename(Branch::MAIN, request).await.map_or_else(|failure| failure.errno, |_| 0)
}

const DIR: u32 = 0o040_755;
const FILE: u32 = 0o100_644;
const ENOENT: u16 = 2;
const EACCES: u16 = 13;
const EEXIST: u16 = 17;
const ENOTDIR: u16 = 20;
const EISDIR: u16 = 21;
const EINVAL: u16 = 22;
const ENOTEMPTY: u16 = 39;
const ENODATA: u16 = 61;
const ESTALE: u16 = 116;

#[test]
fn every_case_of_rename() {
    on_machine(1, async |machine| {
        let root = machine.client.root();
        let a = make(machine, root, "a", DIR).await.unwrap();
        let b = make(machine, root, "b", DIR).await.unwrap();
        let inner = make(machine, a, "inner", DIR).await.unwrap();
        make(machine, root, "f", FILE).await.unwrap();
        make(machine, root, "g", FILE).await.unwrap();
        assert_eq!(rename(machine, (root, "none"), (root, "x"), "").await, ENOENT);
        assert_eq!(rename(machine, (root, "a"), (inner, "x"), "").await, EINVAL);
        assert_eq!(rename(machine, (root, "a"), (a, "x"), "").await, EINVAL);
        assert_eq!(rename(machine, (root, "a"), (root, "f"), "").await, ENOTDIR);
        assert_eq!(rename(machine, (root, "f"), (root, "a"), "").await, EISDIR);
        assert_eq!(rename(machine, (root, "b"), (root, "a"), "").await, ENOTEMPTY);
        assert_eq!(rename(machine, (root, "f"), (root, "g"), "noreplace").await, EEXIST);
        assert_eq!(rename(machine, (root, "f"), (root, "h"), "exchange").await, ENOENT);
        assert_eq!(rename(machine, (root, "f"), (root, "h"), "noreplace").await, 0);
        assert_eq!(rename(machine, (root, "h"), (root, "g"), "").await, 0);
        assert_eq!(rename(machine, (a, "inner"), (b, "moved"), "").await, 0);
        assert_eq!(rename(machine, (b, "moved"), (root, "a"), "").await, 0, "over an empty directory");
        assert_eq!(rename(machine, (root, "a"), (root, "g"), "exchange").await, 0);
        assert_eq!(machine.client.get_attr(root).await.unwrap().nlink, 4);
        let names: Vec<String> = list(machine).await.into_keys().collect();
        assert_eq!(names, ["a", "b", "g"]);
        machine
            .client
            .link(machine.client.lookup(root, b"a").await.map(|attr| attr.file()).unwrap(), root, b"l")
            .await
            .unwrap();
        assert_eq!(rename(machine, (root, "a"), (root, "l"), "").await, 0, "two names of one file");
        assert!(list(machine).await.contains_key("a"));
    });
}

/// Encodes an access control list as the kernel sends it: tag, permissions, id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend([tag.to_le_bytes(), perm.to_le_bytes()].concat());
        value.extend(id.to_le_bytes());
    }
    value
}

#[test]
fn access_control_lists_and_modes_agree() {
    const NAMES: [&[u8]; 2] = [b"system.posix_acl_access", b"system.posix_acl_default"];
    const NONE: u32 = u32::MAX;
    on_machine(11, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let set = async |id: FileId, name: &[u8], value: Vec<u8>| {
            let request =
                XattrRequest { ino: id.ino.0, name: name.to_vec(), value, ..XattrRequest::default() };
            client.set_xattr(Branch::MAIN, request).await.map_err(|failure| failure.errno)
        };
        let mode = async |id: FileId| client.get_attr(id).await.unwrap().mode & 0o7777;
        let made = async |dir: FileId, name: &str, mode: u32| {
            let request =
                MakeRequest { dir: dir.ino.0, name: name.into(), mode, umask: 0o022, ..Default::default() };
            client.make(Branch::MAIN, request).await.unwrap().file()
        };
        let list = |user, mask, other| {
            acl(&[(1, 7, NONE), (2, user, 1000), (4, 5, NONE), (16, mask, NONE), (32, other, NONE)])
        };
        let dir = made(root, "dir", 0o040_777).await;
        assert_eq!(mode(dir).await, 0o755, "the umask counts where nothing is handed down");
        let file = made(dir, "file", 0o100_666).await;
        assert_eq!(set(file, NAMES[1], list(7, 7, 0)).await, Err(EACCES), "no default list on a file");
        assert_eq!(set(file, NAMES[0], vec![2, 0, 0, 0]).await, Err(EINVAL));
        // Setting a list changes the mode, and a chmod changes the list.
        set(file, NAMES[0], list(6, 6, 4)).await.unwrap();
        assert_eq!(mode(file).await, 0o764);
        let chmod = SetAttrRequest { ino: file.ino.0, mode: Some(0o640), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, chmod).await.unwrap();
        let wanted = acl(&[(1, 6, NONE), (2, 6, 1000), (4, 5, NONE), (16, 4, NONE), (32, 0, NONE)]);
        assert_eq!(client.get_xattr(file, NAMES[0]).await.unwrap(), wanted);
        // A list that is equivalent to the mode is not stored, and removing a list that does not exist
        // succeeds.
        set(file, NAMES[0], acl(&[(1, 7, NONE), (4, 4, NONE), (32, 1, NONE)])).await.unwrap();
        assert_eq!(mode(file).await, 0o741);
        assert_eq!(client.get_xattr(file, NAMES[0]).await.unwrap_err().errno, ENODATA);
        client.remove_xattr(file, NAMES[0]).await.unwrap();
        // An inherited list is limited by the requested mode and not by the umask.
        set(dir, NAMES[1], list(7, 7, 2)).await.unwrap();
        assert_eq!(mode(dir).await, 0o755);
        let inherits = made(dir, "inherits", 0o100_666).await;
        assert_eq!(mode(inherits).await, 0o662);
        let wanted = acl(&[(1, 6, NONE), (2, 7, 1000), (4, 5, NONE), (16, 6, NONE), (32, 2, NONE)]);
        assert_eq!(client.get_xattr(inherits, NAMES[0]).await.unwrap(), wanted);
        let inner = made(dir, "inner", 0o040_777).await;
        assert_eq!(client.get_xattr(inner, NAMES[1]).await.unwrap(), list(7, 7, 2));
        client.remove_xattr(dir, NAMES[1]).await.unwrap();
        let plain = made(dir, "plain", 0o100_666).await;
        assert_eq!((mode(plain).await, client.list_xattr(plain).await.unwrap().len()), (0o644, 0));
    });
}

#[test]
fn a_whiteout_takes_the_old_name() {
    on_machine(8, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let dir = make(machine, root, "dir", DIR).await.unwrap();
        for (name, to) in [("f", "moved"), ("g", "moved")] {
            let id = make(machine, root, name, FILE).await.unwrap();
            assert_eq!(rename(machine, (root, name), (dir, to), "whiteout").await, 0);
            assert_eq!(client.lookup(dir, to.as_bytes()).await.unwrap().ino, id.ino.0);
            let left = client.lookup(root, name.as_bytes()).await.unwrap();
            assert_eq!((left.mode, left.rdev, left.nlink), (0o020_000, 0, 1));
        }
        assert_eq!(
            rename(machine, (root, "f"), (root, "f"), "whiteout").await,
            0,
            "one name: nothing happens"
        );
        assert_eq!(rename(machine, (root, "dir"), (root, "d"), "whiteout").await, 0);
        assert_eq!(client.get_attr(root).await.unwrap().nlink, 3, "the whiteout is no directory");
        let both = RenameRequest {
            dir: root.ino.0,
            name: "d".into(),
            new_dir: root.ino.0,
            new_name: "f".into(),
            exchange: true,
            whiteout: true,
            ..RenameRequest::default()
        };
        assert_eq!(client.rename(Branch::MAIN, both).await.unwrap_err().errno, EINVAL);
        assert_eq!(list(machine).await.len(), 4);
    });
}

/// A file without a name gets one, or is removed with its last user or by a power cut.
#[test]
fn a_file_is_made_without_a_name() {
    let site = Site::new();
    let world = World::new(9);
    let nameless = |machine: &Machine, mode: u32, open: bool| MakeRequest {
        dir: machine.client.root().ino.0,
        mode,
        open,
        nameless: true,
        ..MakeRequest::default()
    };
    let first = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let client = &machine.client;
        let root = client.root();
        for request in [nameless(&machine, DIR, true), nameless(&machine, FILE, false)] {
            assert_eq!(client.make(Branch::MAIN, request).await.unwrap_err().errno, EINVAL);
        }
        let mut made = Vec::new();
        for bytes in ["kept", "closed", "lost"] {
            let attr = client.make(Branch::MAIN, nameless(&machine, FILE, true)).await.unwrap();
            assert_eq!(attr.nlink, 0);
            client.write(attr.file(), 0, bytes.as_bytes()).await.unwrap();
            made.push(attr.file());
        }
        assert!(list(&machine).await.is_empty());
        assert_eq!(client.link(made[0], root, b"name").await.unwrap().nlink, 1);
        client.release(made[1]).await.unwrap();
        machine.node.check_fs().await.unwrap();
        assert_eq!(client.link(made[1], root, b"late").await.unwrap_err().errno, ESTALE);
        fsync(&machine, made[0], false).await.unwrap();
        fsync(&machine, made[2], false).await.unwrap();
    });
    first.unwrap();
    site.cut(&world);
    let world = World::new(10);
    let second = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        let names = list(&machine).await;
        assert_eq!(names.keys().collect::<Vec<_>>(), ["name"]);
        assert_eq!(read_all(&machine, FileId::of_numbers(0, names["name"])).await, b"kept");
        assert_eq!(machine.node.check_fs().await.unwrap().inodes, 2, "the root and one file");
        machine.audit().await;
        machine.stop().await;
    });
    second.unwrap();
    world.destroy();
}

#[test]
fn links_keep_a_file_and_open_files_outlive_their_names() {
    on_machine(2, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let id = make_file(machine, "one").await.unwrap();
        let data = pattern(&machine.world, 300_000);
        client.write(id, 0, &data).await.unwrap();
        assert_eq!(client.link(id, root, b"two").await.unwrap().nlink, 2);
        client.unlink(root, b"one", false).await.unwrap();
        assert_eq!(read_all(machine, id).await, data);
        client.unlink(root, b"two", false).await.unwrap();
        assert_eq!(read_all(machine, id).await, data, "open and without a name");
        client.write(id, 300_000, b"more").await.unwrap();
        let used = machine.node.fs_report().free_bytes;
        client.release(id).await.unwrap();
        assert_eq!(machine.node.check_fs().await.unwrap().inodes, 1);
        assert!(machine.node.fs_report().free_bytes > used, "space comes back");
    });
}

#[test]
fn sparse_files_read_as_zeros_and_cut_bytes_never_come_back() {
    on_machine(3, async |machine| {
        let client = &machine.client;
        let id = make_file(machine, "sparse").await.unwrap();
        client.write(id, 1_000_001, b"end").await.unwrap();
        let bytes = read_all(machine, id).await;
        assert_eq!(bytes.len(), 1_000_004);
        assert!(bytes[..1_000_001].iter().all(|byte| *byte == 0));
        client.write(id, 100, &[7; 9000]).await.unwrap();
        for (size, zeros_from) in [(5000, None), (20_000, Some(5000)), (50, None), (9000, Some(50))] {
            let request = SetAttrRequest { ino: id.ino.0, size: Some(size), ..SetAttrRequest::default() };
            assert_eq!(client.set_attr(Branch::MAIN, request).await.unwrap().size, size);
            let bytes = read_all(machine, id).await;
            assert_eq!(bytes.len() as u64, size);
            if let Some(from) = zeros_from {
                assert!(bytes[from..].iter().all(|byte| *byte == 0), "size {size}");
            }
        }
        // Nor may a write that grows the file show the old bytes behind the end.
        client.write(id, 0, &[9; 4096]).await.unwrap();
        let request = SetAttrRequest { ino: id.ino.0, size: Some(10), ..SetAttrRequest::default() };
        client.set_attr(Branch::MAIN, request).await.unwrap();
        client.write(id, 8192, b"x").await.unwrap();
        let bytes = read_all(machine, id).await;
        assert!(bytes[10..8192].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn attributes_of_all_kinds() {
    on_machine(4, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let dir = make(machine, root, "dir", 0o042_775).await.unwrap();
        let inner = make(machine, dir, "inner", DIR).await.unwrap();
        assert_eq!(
            client.get_attr(inner).await.unwrap().mode,
            0o042_755,
            "a set-group-ID directory hands it down"
        );
        let request = MakeRequest {
            dir: root.ino.0,
            name: "link".into(),
            mode: 0o120_777,
            target: "some/where".into(),
            ..Default::default()
        };
        let link = client.make(Branch::MAIN, request).await.unwrap().file();
        assert_eq!(client.read_link(link).await.unwrap(), b"some/where");
        let set = |create, replace| XattrRequest {
            ino: dir.ino.0,
            name: "user.a".into(),
            value: "1".into(),
            create,
            replace,
            ..XattrRequest::default()
        };
        assert_eq!(client.set_xattr(Branch::MAIN, set(false, true)).await.unwrap_err().errno, ENODATA);
        client.set_xattr(Branch::MAIN, set(true, false)).await.unwrap();
        assert_eq!(client.set_xattr(Branch::MAIN, set(true, false)).await.unwrap_err().errno, EEXIST);
        assert_eq!(client.get_xattr(dir, b"user.a").await.unwrap(), b"1");
        assert_eq!(client.list_xattr(dir).await.unwrap(), [b"user.a".to_vec()]);
        client.remove_xattr(dir, b"user.a").await.unwrap();
        assert_eq!(client.remove_xattr(dir, b"user.a").await.unwrap_err().errno, ENODATA);
        assert_eq!(client.unlink(root, b"dir", true).await.unwrap_err().errno, ENOTEMPTY);
        assert_eq!(client.unlink(root, b"dir", false).await.unwrap_err().errno, EISDIR);
        assert_eq!(client.unlink(root, b"link", true).await.unwrap_err().errno, ENOTDIR);
        let times = SetAttrRequest {
            ino: dir.ino.0,
            mode: Some(0o700),
            uid: Some(3),
            mtime: Some(Time::from_ns(5)),
            ..Default::default()
        };
        let attr = client.set_attr(Branch::MAIN, times).await.unwrap();
        assert_eq!((attr.mode, attr.uid, attr.mtime), (0o040_700, 3, Time::from_ns(5)));
    });
}

#[test]
fn set_id_bits_fall_where_they_mean_something() {
    on_machine(3, async |machine| {
        let client = &machine.client;
        let id = make_file(machine, "tool").await.unwrap();
        for (before, after) in [(0o6755, 0o755), (0o4600, 0o600), (0o2644, 0o2644)] {
            let mode = SetAttrRequest { ino: id.ino.0, mode: Some(before), ..Default::default() };
            client.set_attr(Branch::MAIN, mode).await.unwrap();
            client.hold(id, Purpose::Write).await.unwrap().drop_set_id().await.unwrap();
            assert_eq!(client.get_attr(id).await.unwrap().mode & 0o7777, after, "of {before:o}");
        }
        // Bits that are requested in the same step as a new owner stay.
        let given = SetAttrRequest {
            ino: id.ino.0,
            mode: Some(0o4755),
            uid: Some(7),
            drop_set_id: true,
            ..Default::default()
        };
        assert_eq!(client.set_attr(Branch::MAIN, given).await.unwrap().mode & 0o7777, 0o4755);
    });
}

#[test]
fn a_full_array_says_no_space_and_deletes_work() {
    on_machine(5, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let id = make_file(machine, "big").await.unwrap();
        let keep = make_file(machine, "keep").await.unwrap();
        client.write(keep, 0, b"kept").await.unwrap();
        client.fsync(keep).await.unwrap();
        let data = pattern(&machine.world, 1 << 20);
        let mut offset = 0;
        let failure = loop {
            match client.write(id, offset, &data).await {
                Ok(()) => offset += data.len() as u64,
                Err(failure) => break failure,
            }
        };
        assert_eq!(failure.kind, penstock_base::ErrorKind::NoSpace, "{failure}");
        assert!(offset > 10 << 20, "{offset} bytes fit");
        client.fsync(id).await.unwrap();
        assert_eq!(read_all(machine, keep).await, b"kept");
        assert_eq!(read_all(machine, id).await.len() as u64, offset);
        client.unlink(root, b"big", false).await.unwrap();
        client.release(id).await.unwrap();
        machine.node.check_fs().await.unwrap();
        let again = make_file(machine, "again").await.unwrap();
        for at in 0..8 {
            client.write(again, at << 20, &data).await.unwrap();
        }
        client.fsync(again).await.unwrap();
    });
}

#[test]
fn what_three_tasks_do_is_there_after_a_restart() {
    let site = Site::new();
    let model = Model::default();
    for seed in [6, 7] {
        let world = World::new(seed);
        let run = world.run(async {
            let machine = site.start(&world, &[]).await.unwrap();
            if seed == 7 {
                model.check_stopped(&machine).await;
            }
            for _ in 0..80 {
                model.step(&machine, seed).await.unwrap();
            }
            machine.audit().await;
            machine.stop().await;
        });
        run.unwrap();
        world.destroy();
    }
}
