//! Tests a store of several targets: what commands say of it, where files lie, and kill -9.

use crate::fs_check::lose_metadata;
use crate::store::{Random, Store, can_mount, refused, shell, wait_until};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

/// The layout of a file or directory, by the command.
fn layout(store: &Store, path: &Path) -> Value {
    store.json(&["fs", "layout", "show", path.to_str().unwrap()])
}

fn write(path: &Path, mib: usize, byte: u8) -> Vec<u8> {
    let contents: Vec<u8> = (0..mib << 20).map(|at| (at >> 12) as u8 ^ byte).collect();
    std::fs::write(path, &contents).unwrap();
    File::open(path).unwrap().sync_all().unwrap();
    contents
}

#[test]
fn long_files_are_spread_over_targets_as_their_directory_says() {
    if !can_mount("long_files_are_spread_over_targets_as_their_directory_says") {
        return;
    }
    let store = Store::new("targets", &["--drive-size", "1G", "--targets", "3"]);
    store.up();
    let free = store.free_bytes();
    let status = store.json(&["status"]);
    let stacks = status["stacks"].as_array().unwrap();
    let targets: Vec<&Value> = stacks.iter().map(|stack| &stack["target"]).collect();
    assert_eq!(targets, [&json!(0), &json!(1), &json!(2)], "{status}");
    assert_eq!(store.json(&["stack", "list"]).as_array().unwrap().len(), 3);
    assert!(store.ok(&["stack", "show", "1"]).contains("data.1, meta.1"));
    refused(&store.run(&["stack", "show", "3"]), &["no stack 3"]);

    // A short file lies with its name; a long one on all targets, 4 MiB in a row on each.
    let (short, long) = (store.mount.join("short"), store.mount.join("long"));
    let (of_short, of_long) = (write(&short, 4, 1), write(&long, 30, 2));
    assert_eq!(layout(&store, &short)["is_spread"], false);
    let shown = layout(&store, &long);
    assert_eq!((&shown["is_spread"], &shown["targets"]), (&json!(true), &json!([0, 1, 2])), "{shown}");
    let written = |target: usize| {
        let stacks = store.json(&["stack", "list"]);
        stacks[target]["written_bytes"].as_u64().unwrap()
    };
    assert_eq!([written(0), written(1), written(2)], [(4 + 12) << 20, 10 << 20, 8 << 20]);

    // New files in a directory, and in those made later in it, have its layout.
    let folder = store.mount.join("folder");
    std::fs::create_dir(&folder).unwrap();
    let path = folder.to_str().unwrap();
    let said = store.ok(&["fs", "layout", "set", path, "--targets", "2", "--turn", "1M"]);
    assert_eq!(said, "/folder: new files lie on 2 targets, 1.0 MiB in a row on each\n");
    let below = folder.join("below");
    std::fs::create_dir(&below).unwrap();
    assert_eq!((&layout(&store, &below)["count"], &layout(&store, &below)["turn"]), (&json!(2), &json!(1)));
    let narrow = below.join("narrow");
    let of_narrow = write(&narrow, 7, 3);
    assert_eq!(layout(&store, &narrow)["targets"], json!([0, 1]));
    let set = |path: &Path, targets| {
        store.run(&["fs", "layout", "set", path.to_str().unwrap(), "--targets", targets])
    };
    refused(&set(&narrow, "all"), &["while it is empty"]);
    refused(&set(Path::new("/etc"), "2"), &["/etc is not in a mount"]);
    refused(&set(&folder.join("nosuch"), "2"), &["No such file"]);

    let all = [(&short, &of_short), (&long, &of_long), (&narrow, &of_narrow)];
    store.kill();
    let other = Store::program().arg("up").arg(&store.dir).args(["--targets", "2"]).output().unwrap();
    refused(&other, &["it has 3 targets, not 2"]);
    store.up();
    for (path, contents) in all {
        assert!(std::fs::read(path).unwrap() == *contents, "{}", path.display());
    }
    store.check_empty(free);

    // A copy for each stack.
    assert_eq!(store.json(&["fs", "copy-map"]).as_array().unwrap().len(), 3);
    store.ok(&["umount"]);
    store.down();
    refused(
        &store.run(&["fs", "check", "--repair", "--map", "--yes"]),
        &["every row of this store can be read", "nothing was changed"],
    );
}

/// Bytes of a file at an offset.
fn read_at(path: &Path, offset: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    file.seek(SeekFrom::Start(offset))?;
    let mut bytes = vec![0; len];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[test]
fn a_stack_that_does_not_open_keeps_only_its_own_data_away() {
    if !can_mount("a_stack_that_does_not_open_keeps_only_its_own_data_away") {
        return;
    }
    let store = Store::new("absent", &["--drive-size", "512M", "--targets", "2"]);
    store.up();
    let (short, long) = (store.mount.join("short"), store.mount.join("long"));
    let (of_short, of_long) = (write(&short, 3, 1), write(&long, 12, 2));
    let arrays = store.json(&["array", "list"]);
    let meta = arrays.as_array().unwrap().iter().find(|array| array["name"] == "meta.1").unwrap();
    let meta = meta["id"].as_str().unwrap().to_owned();
    store.down();
    lose_metadata(&store, &meta);

    store.up();
    let status = store.json(&["status"]);
    assert_eq!(status["health"], "failed", "{status}");
    let stack = store.json(&["stack", "show", "1"]);
    assert_eq!(stack["state"], "absent", "{stack}");
    assert!(stack["reason"].as_str().is_some_and(|why| !why.is_empty()), "{stack}");
    assert!(store.ok(&["stack", "show", "1"]).contains("it does not serve: "));
    assert!(store.ok(&["stack", "list"]).contains("absent"));
    let events = store.json(&["events"]);
    assert!(events.as_array().unwrap().iter().any(|event| event["kind"] == "stack_absent"), "{events}");

    // All that lies on the other target is there, and changes.
    assert!(std::fs::read(&short).unwrap() == of_short);
    assert!(read_at(&long, 0, 4 << 20).unwrap() == of_long[..4 << 20]);
    let missing = read_at(&long, 5 << 20, 4096).unwrap_err();
    assert_eq!(missing.raw_os_error(), Some(rustix::io::Errno::IO.raw_os_error()), "{missing}");
    let new = store.mount.join("new");
    let of_new = write(&new, 9, 3);
    assert_eq!(layout(&store, &new)["targets"], json!([0]));
    assert!(std::fs::read(&new).unwrap() == of_new);

    // A part of it that cannot be written keeps the rest of the file, and all directories, from nothing.
    let mut file = File::options().write(true).open(&long).unwrap();
    file.write_all(&[9; 4096]).unwrap();
    file.sync_all().unwrap();
    file.seek(SeekFrom::Start(5 << 20)).unwrap();
    assert!(file.write_all(&[9; 4096]).and_then(|()| file.sync_all()).is_err());
    let _ = file.sync_all();
    drop(file);
    File::open(&store.mount).unwrap().sync_all().unwrap();
    assert!(read_at(&long, 0, 4096).unwrap() == [9; 4096]);

    // No drive is given up while nobody knows if its part is needed.
    let (drive, _) = store.drives().remove(0);
    refused(&store.run(&["drive", "fail", &drive]), &["has a part of array", "which does not open"]);
    let shown = store.run(&["fs", "damaged"]);
    assert_eq!(shown.status.code(), Some(4), "{shown:?}");
    let text = String::from_utf8(shown.stdout).unwrap();
    assert!(text.contains("target 1 does not serve") && text.contains("    /long\n"), "{text}");
    assert!(text.ends_with("1 files have up to 4.0 MiB there\n"), "{text}");

    // An administrator gives the target up: what is left changes without it, also after a start.
    refused(&store.run(&["target", "forget", "0"]), &["target 0 serves"]);
    refused(&store.run(&["target", "forget", "7"]), &["no target 7"]);
    let unasked = store.run(&["target", "forget", "1"]);
    refused(&unasked, &["--yes"]);
    assert_eq!(store.json(&["stack", "show", "1"])["state"], "absent");
    let said = store.ok(&["target", "forget", "1", "--yes"]);
    assert!(said.contains("target 1 is forgotten; 1 files had up to 4.0 MiB there"), "{said}");
    let events = store.json(&["events"]);
    assert!(events.as_array().unwrap().iter().any(|event| event["kind"] == "target_forgotten"), "{events}");
    File::options().write(true).open(&long).unwrap().set_len(1 << 20).unwrap();
    assert!(std::fs::read(&long).unwrap()[4096..] == of_long[4096..1 << 20]);
    store.down();
    store.up();
    let status = store.json(&["status"]);
    assert!(status["health"] != "failed" && status["stacks"][1]["state"] == "forgotten", "{status}");
    store.ok(&["fs", "damaged"]);
    store.ok(&["drive", "fail", &drive]);
    std::fs::remove_file(&long).unwrap();
    store.ok(&["fs", "check"]);
    store.ok(&["down"]);
}

/// Reads and writes at random places of spread files, beside what they should be, over kills of the service.
#[test]
fn spread_files_are_as_they_were_written_over_kills() {
    if !can_mount("spread_files_are_as_they_were_written_over_kills") {
        return;
    }
    const BYTES: u64 = 24 << 20;
    let store = Store::new("spread-kills", &["--drive-size", "1G", "--targets", "4"]);
    store.up();
    let free = store.free_bytes();
    let mut random = Random(7);
    let path = store.mount.join("file");
    let mut wanted = Vec::new();
    for round in 0..3 {
        let mut file =
            File::options().create(true).truncate(false).read(true).write(true).open(&path).unwrap();
        for _ in 0..30 {
            let offset = random.below(BYTES);
            match random.below(8) {
                0 => {
                    file.set_len(offset).unwrap();
                    wanted.resize(offset as usize, 0);
                }
                1 if !wanted.is_empty() => {
                    let (from, len) = (random.below(wanted.len() as u64), 1 + random.below(5 << 20));
                    let to = wanted.len().min((from + len) as usize);
                    shell(&format!("fallocate -p -o {from} -l {len} {}", path.display()));
                    wanted[from as usize..to].fill(0);
                }
                _ => {
                    let mut bytes = vec![0; [100, 4096, 70_000, 3 << 20][random.below(4) as usize]];
                    random.fill(&mut bytes);
                    file.seek(SeekFrom::Start(offset)).unwrap();
                    file.write_all(&bytes).unwrap();
                    let end = offset as usize + bytes.len();
                    wanted.resize(wanted.len().max(end), 0);
                    wanted[offset as usize..end].copy_from_slice(&bytes);
                }
            }
        }
        file.sync_all().unwrap();
        // Later writes may be lost, and nothing before them.
        let last = wanted.len() as u64;
        file.seek(SeekFrom::Start(last)).unwrap();
        let _ = file.write_all(&vec![round; 5 << 20]);
        store.kill();
        drop(file);
        store.up();
        let found = std::fs::read(&path).unwrap();
        assert!(found.len() >= wanted.len() && found[..wanted.len()] == wanted, "round {round}");
        let rest = &found[wanted.len()..];
        assert!(rest.iter().all(|byte| *byte == round || *byte == 0), "round {round}");
        wanted = found;
        let check = store.json(&["fs", "check"]);
        assert_eq!(check["clean"], true, "round {round}: {check}");
    }
    let held = rustix::fs::stat(&path).unwrap().st_blocks as u64 * 512;
    assert!(held <= wanted.len() as u64 + (4 << 20), "{held} for {}", wanted.len());
    std::fs::remove_file(&path).unwrap();
    let idle = || {
        let stacks = store.json(&["stack", "list"]);
        stacks.as_array().unwrap().iter().all(|stack| stack["queued_work"] == 0)
    };
    wait_until("all targets have done their work", idle);
    store.check_empty(free);
    store.down_in_peace();
}
