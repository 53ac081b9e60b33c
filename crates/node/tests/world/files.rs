//! Files and names on a healthy machine.

use crate::machine::{Machine, Site};
use crate::model::{Model, list, make_file, pattern, read_all};
use penstock_base::Ino;
use penstock_client::{Failure, SetAttrRequest};
use penstock_sim::World;
use penstock_wire::names::{MakeRequest, RenameRequest, XattrRequest};

fn on_machine(seed: u64, test: impl AsyncFnOnce(&Machine)) {
    let site = Site::new();
    let world = World::new(seed);
    let run = world.run(async {
        let machine = site.start(&world, &[]).await.unwrap();
        test(&machine).await;
        machine.audit().await;
        machine.stop().await;
    });
    run.unwrap();
    world.destroy();
}

async fn make(machine: &Machine, dir: Ino, name: &str, mode: u32) -> Result<Ino, Failure> {
    let request = MakeRequest { dir: dir.0, name: name.into(), mode, ..MakeRequest::default() };
    Ok(Ino(machine.client.make(request).await?.ino))
}

async fn rename(machine: &Machine, from: (Ino, &str), to: (Ino, &str), flags: &str) -> u16 {
    let request = RenameRequest {
        dir: from.0.0,
        name: from.1.into(),
        new_dir: to.0.0,
        new_name: to.1.into(),
        no_replace: flags == "noreplace",
        exchange: flags == "exchange",
    };
    machine.client.rename(request).await.map_or_else(|failure| failure.errno, |()| 0)
}

const DIR: u32 = 0o040_755;
const FILE: u32 = 0o100_644;
const ENOENT: u16 = 2;
const EEXIST: u16 = 17;
const ENOTDIR: u16 = 20;
const EISDIR: u16 = 21;
const EINVAL: u16 = 22;
const ENOTEMPTY: u16 = 39;
const ENODATA: u16 = 61;

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
            .link(machine.client.lookup(root, b"a").await.map(|attr| Ino(attr.ino)).unwrap(), root, b"l")
            .await
            .unwrap();
        assert_eq!(rename(machine, (root, "a"), (root, "l"), "").await, 0, "two names of one file");
        assert!(list(machine).await.contains_key("a"));
    });
}

#[test]
fn links_keep_a_file_and_open_files_outlive_their_names() {
    on_machine(2, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let ino = make_file(machine, "one").await.unwrap();
        let data = pattern(&machine.world, 300_000);
        client.write(ino, 0, &data).await.unwrap();
        assert_eq!(client.link(ino, root, b"two").await.unwrap().nlink, 2);
        client.unlink(root, b"one", false).await.unwrap();
        assert_eq!(read_all(machine, ino).await, data);
        client.unlink(root, b"two", false).await.unwrap();
        assert_eq!(read_all(machine, ino).await, data, "open and without a name");
        client.write(ino, 300_000, b"more").await.unwrap();
        let used = machine.node.fs_report().free_bytes;
        client.release(ino).await.unwrap();
        assert_eq!(machine.node.check_fs().await.unwrap().inodes, 1);
        assert!(machine.node.fs_report().free_bytes > used, "space comes back");
    });
}

#[test]
fn sparse_files_read_as_zeros_and_cut_bytes_never_come_back() {
    on_machine(3, async |machine| {
        let client = &machine.client;
        let ino = make_file(machine, "sparse").await.unwrap();
        client.write(ino, 1_000_001, b"end").await.unwrap();
        let bytes = read_all(machine, ino).await;
        assert_eq!(bytes.len(), 1_000_004);
        assert!(bytes[..1_000_001].iter().all(|byte| *byte == 0));
        client.write(ino, 100, &[7; 9000]).await.unwrap();
        for (size, zeros_from) in [(5000, None), (20_000, Some(5000)), (50, None), (9000, Some(50))] {
            let request = SetAttrRequest { ino: ino.0, size: Some(size), ..SetAttrRequest::default() };
            assert_eq!(client.set_attr(request).await.unwrap().size, size);
            let bytes = read_all(machine, ino).await;
            assert_eq!(bytes.len() as u64, size);
            if let Some(from) = zeros_from {
                assert!(bytes[from..].iter().all(|byte| *byte == 0), "size {size}");
            }
        }
        // Growing over the end by a write must not show what was there before either.
        client.write(ino, 0, &[9; 4096]).await.unwrap();
        let request = SetAttrRequest { ino: ino.0, size: Some(10), ..SetAttrRequest::default() };
        client.set_attr(request).await.unwrap();
        client.write(ino, 8192, b"x").await.unwrap();
        let bytes = read_all(machine, ino).await;
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
            dir: root.0,
            name: "link".into(),
            mode: 0o120_777,
            target: "some/where".into(),
            ..Default::default()
        };
        let link = Ino(client.make(request).await.unwrap().ino);
        assert_eq!(client.read_link(link).await.unwrap(), b"some/where");
        let set = |create, replace| XattrRequest {
            ino: dir.0,
            name: "user.a".into(),
            value: "1".into(),
            create,
            replace,
        };
        assert_eq!(client.set_xattr(set(false, true)).await.unwrap_err().errno, ENODATA);
        client.set_xattr(set(true, false)).await.unwrap();
        assert_eq!(client.set_xattr(set(true, false)).await.unwrap_err().errno, EEXIST);
        assert_eq!(client.get_xattr(dir, b"user.a").await.unwrap(), b"1");
        assert_eq!(client.list_xattr(dir).await.unwrap(), [b"user.a".to_vec()]);
        client.remove_xattr(dir, b"user.a").await.unwrap();
        assert_eq!(client.remove_xattr(dir, b"user.a").await.unwrap_err().errno, ENODATA);
        assert_eq!(client.unlink(root, b"dir", true).await.unwrap_err().errno, ENOTEMPTY);
        assert_eq!(client.unlink(root, b"dir", false).await.unwrap_err().errno, EISDIR);
        assert_eq!(client.unlink(root, b"link", true).await.unwrap_err().errno, ENOTDIR);
        let times = SetAttrRequest {
            ino: dir.0,
            mode: Some(0o700),
            uid: Some(3),
            mtime_ns: Some(5),
            ..Default::default()
        };
        let attr = client.set_attr(times).await.unwrap();
        assert_eq!((attr.mode, attr.uid, attr.mtime_ns), (0o040_700, 3, 5));
    });
}

#[test]
fn set_id_bits_fall_where_they_mean_something() {
    on_machine(3, async |machine| {
        let client = &machine.client;
        let ino = make_file(machine, "tool").await.unwrap();
        for (before, after) in [(0o6755, 0o755), (0o4600, 0o600), (0o2644, 0o2644)] {
            let mode = SetAttrRequest { ino: ino.0, mode: Some(before), ..Default::default() };
            client.set_attr(mode).await.unwrap();
            client.drop_set_id(ino).await.unwrap();
            assert_eq!(client.get_attr(ino).await.unwrap().mode & 0o7777, after, "of {before:o}");
        }
        // What is given away in the same step keeps what is asked for.
        let given = SetAttrRequest {
            ino: ino.0,
            mode: Some(0o4755),
            uid: Some(7),
            drop_set_id: true,
            ..Default::default()
        };
        assert_eq!(client.set_attr(given).await.unwrap().mode & 0o7777, 0o4755);
    });
}

#[test]
fn a_full_array_says_no_space_and_deletes_work() {
    on_machine(5, async |machine| {
        let client = &machine.client;
        let root = client.root();
        let ino = make_file(machine, "big").await.unwrap();
        let keep = make_file(machine, "keep").await.unwrap();
        client.write(keep, 0, b"kept").await.unwrap();
        client.fsync(keep).await.unwrap();
        let data = pattern(&machine.world, 1 << 20);
        let mut offset = 0;
        let failure = loop {
            match client.write(ino, offset, &data).await {
                Ok(()) => offset += data.len() as u64,
                Err(failure) => break failure,
            }
        };
        assert_eq!(failure.kind, penstock_base::Kind::NoSpace, "{failure}");
        assert!(offset > 10 << 20, "{offset} bytes fit");
        client.fsync(ino).await.unwrap();
        assert_eq!(read_all(machine, keep).await, b"kept");
        assert_eq!(read_all(machine, ino).await.len() as u64, offset);
        client.unlink(root, b"big", false).await.unwrap();
        client.release(ino).await.unwrap();
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
