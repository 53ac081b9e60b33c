//! Tests `fs check --repair` and `fs damaged` from the command line: exit statuses and output.
//!
//! The tests of `penstock-node` plant damage and test its repairs.

use crate::store::{Store, can_mount, refused};
use serde_json::{Value, json};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// Runs a command that must end with this exit status. Returns its standard output and standard error.
fn exits(store: &Store, words: &[&str], status: i32) -> (String, String) {
    let output = store.run(words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{words:?}: {out}{err}");
    (out, err)
}

fn json_of(store: &Store, words: &[&str]) -> Value {
    serde_json::from_str(&exits(store, words, 0).0).unwrap()
}

#[test]
fn a_repair_needs_an_unmounted_store_and_leaves_a_healthy_one_as_it_is() {
    if !can_mount("a_repair_needs_an_unmounted_store_and_leaves_a_healthy_one_as_it_is") {
        return;
    }
    let store = Store::new("fs-check", &["--drive-size", "256M"]);
    store.up();
    std::fs::create_dir(store.mount.join("folder")).unwrap();
    let contents = vec![7; 3 << 20];
    std::fs::write(store.mount.join("folder/file"), &contents).unwrap();
    // Freed blocks that wait to be discarded are no finding.
    std::fs::write(store.mount.join("gone"), &contents).unwrap();
    std::fs::File::open(store.mount.join("gone")).unwrap().sync_all().unwrap();
    std::fs::remove_file(store.mount.join("gone")).unwrap();

    let (out, err) = exits(&store, &["fs", "check", "--repair", "--yes", "--json"], 8);
    assert!(out.is_empty(), "{out}");
    let mount = store.mount.display();
    let message = format!("nothing was repaired: the file system is mounted at {mount} by process ");
    assert!(err.contains(&message), "{err}");
    let (_, err) = exits(&store, &["fs", "check", "nosuch", "--repair", "--yes"], 8);
    assert!(err.contains("nosuch"), "{err}");

    store.ok(&["umount"]);
    // Standard input is no terminal, so the question cannot be answered.
    let (_, err) = exits(&store, &["fs", "check", "--repair"], 8);
    assert!(err.contains("--yes"), "{err}");
    let check = json_of(&store, &["fs", "check", "--repair", "--yes", "--json"]);
    assert_eq!((&check["result"], &check["clean"]), (&json!("clean"), &json!(true)), "{check}");
    assert_eq!((&check["inodes"], &check["names"]), (&json!(3), &json!(2)), "{check}");
    assert_eq!((&check["findings"], &check["counts"]), (&json!([]), &json!({})), "{check}");
    assert_eq!(check["repair"]["mended"], json!({}), "{check}");
    let damaged = json_of(&store, &["fs", "damaged", "--json"]);
    assert_eq!((&damaged["files"], &damaged["damaged_bytes"]), (&json!([]), &json!(0)), "{damaged}");
    assert_eq!(damaged["unreadable_metadata_stripes"], json!([]), "{damaged}");

    store.ok(&["mount", store.mount.to_str().unwrap(), "--detach"]);
    assert_eq!(std::fs::read(store.mount.join("folder/file")).unwrap(), contents);
    let (_, err) = exits(&store, &["fs", "check", "--repair", "--yes"], 8);
    assert!(err.contains("nothing was repaired"), "{err}");
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.down();
}

/// Overwrites the trailers of all strips of the metadata array: nothing of it can be read any more.
pub fn lose_metadata(store: &Store, array: &str) {
    let id: Vec<u8> = (0..16).map(|at| u8::from_str_radix(&array[2 * at..2 * at + 2], 16).unwrap()).collect();
    let mut lost = 0;
    for entry in std::fs::read_dir(store.dir.join("drives")).unwrap() {
        let file = File::options().read(true).write(true).open(entry.unwrap().path()).unwrap();
        let mut block = [0; 4096];
        for at in (0..file.metadata().unwrap().len()).step_by(4096) {
            file.read_exact_at(&mut block, at).unwrap();
            if block.starts_with(b"PTRL") && block[8..24] == id {
                file.write_all_at(&[0x5a; 4096], at).unwrap();
                lost += 1;
            }
        }
    }
    assert!(lost > 0, "there are strips of the metadata array");
}

#[test]
fn a_store_that_lost_its_metadata_comes_back_from_a_copy() {
    if !can_mount("a_store_that_lost_its_metadata_comes_back_from_a_copy") {
        return;
    }
    let store = Store::new("fs-map", &["--drive-size", "256M"]);
    store.up();
    assert_eq!(store.json(&["fs", "show"])["map_copy"], Value::Null);
    let contents: Vec<u8> = (0..5u32 << 20).map(|at| (at / 3) as u8).collect();
    std::fs::create_dir(store.mount.join("folder")).unwrap();
    let path = store.mount.join("folder/kept");
    std::fs::write(&path, &contents).unwrap();
    File::open(&path).unwrap().sync_all().unwrap();
    // More than a strip of other data lies between it and what follows.
    std::fs::write(store.mount.join("between"), vec![7; 1 << 20]).unwrap();
    File::open(store.mount.join("between")).unwrap().sync_all().unwrap();
    let copies = json_of(&store, &["fs", "copy-map", "--json"]);
    assert_eq!(copies[0]["serial"], json!(1));
    assert_eq!(json!([store.json(&["fs", "show"])["map_copy"]]), copies);
    let newer: Vec<u8> = (0..3u32 << 20).map(|at| (at / 5) as u8 ^ 0x80).collect();
    std::fs::write(store.mount.join("newer"), &newer).unwrap();
    File::open(store.mount.join("newer")).unwrap().sync_all().unwrap();
    store.ok(&["umount"]);

    // A running instance is not set back, and one whose names and maps can be read neither.
    let restore = ["fs", "check", "--repair", "--map", "--yes", "--json"];
    let (_, err) = exits(&store, &restore, 8);
    assert!(err.contains("in use"), "{err}");
    let arrays = store.json(&["array", "list"]);
    let meta = arrays.as_array().unwrap().iter().find(|array| array["name"] == "meta").unwrap();
    let meta = meta["id"].as_str().unwrap().to_owned();
    store.down();
    let (_, err) = exits(&store, &restore, 8);
    assert!(err.contains("every row of this store can be read"), "{err}");

    lose_metadata(&store, &meta);
    let output = store.up_output(&[]);
    refused(&output, &["copy 1 of them may be whole", "fs check --repair --map"]);
    let (_, err) = exits(&store, &["fs", "check"], 8);
    assert!(err.contains("no instance runs"), "{err}");
    let (_, err) = exits(&store, &restore[..4], 8);
    assert!(err.contains("names and maps cannot be read: ") && err.contains("copy 1 of them is"), "{err}");
    assert!(err.contains("in 0 of its files 0 KiB may have been written since"), "{err}");
    assert!(err.contains("nothing was restored; --yes"), "{err}");
    let (out, _) = exits(&store, &restore, 1);
    let check: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&check["result"], &check["restored"][0]["copy"]), (&json!("mended"), &copies[0]), "{check}");
    let kept = std::fs::read_to_string(store.dir.join("restored.json")).unwrap();
    assert_eq!(serde_json::from_str::<Value>(&kept).unwrap(), check);
    let lost_found = check["restored"][0]["newer_file"]["paths"][0].as_str().unwrap();
    assert!(lost_found.starts_with("/lost+found/inode-"), "{check}");

    store.up();
    assert!(std::fs::read(&path).unwrap() == contents, "it was there at the time of the copy");
    assert!(!store.mount.join("newer").exists(), "its name was given later");
    let found = std::fs::read(store.mount.join(&lost_found[1..])).unwrap();
    let has = |block: &[u8]| found.chunks(4096).any(|found| found == block);
    assert!(newer.chunks(4096).all(has), "all of its contents are there");
    let events = store.json(&["events"]);
    let kinds: Vec<&str> =
        events.as_array().unwrap().iter().filter_map(|event| event["kind"].as_str()).collect();
    assert!(kinds.contains(&"map_copied"), "{kinds:?}");
    store.ok(&["umount"]);
    assert_eq!(json_of(&store, &["fs", "copy-map", "--json"])[0]["serial"], json!(2));
    store.audit();
    store.down();

    // Made anew of a copy that is up to date, nothing is lost.
    let (out, _) = exits(&store, &[&restore[..], &["--force"]].concat(), 1);
    let check: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(check["restored"][0]["changed_files"], json!(0), "{check}");
    store.up();
    assert!(std::fs::read(&path).unwrap() == contents);
    store.ok(&["umount"]);
    store.audit();
    store.down();
}

/// Blocks beside those that were written since the copy stay with their files, if that is asked for.
#[test]
fn changed_blocks_stay_in_their_files_if_that_is_asked_for() {
    if !can_mount("changed_blocks_stay_in_their_files_if_that_is_asked_for") {
        return;
    }
    let store = Store::new("fs-map-keep", &["--drive-size", "256M"]);
    store.up();
    let small = |number: usize| store.mount.join(format!("small{number}"));
    let contents = |number: usize| vec![number as u8 + 1; 5000];
    let write = |path: &Path, contents: &[u8]| {
        std::fs::write(path, contents).unwrap();
        File::open(path).unwrap().sync_all().unwrap();
    };
    for number in 0..8 {
        write(&small(number), &contents(number));
    }
    store.ok(&["fs", "copy-map"]);
    let shown = store.ok(&["fs", "show"]);
    assert!(shown.contains("copy 1 of names and maps"), "{shown}");
    // It shares its strip with the others.
    write(&store.mount.join("newer"), &[99; 5000]);
    store.ok(&["umount"]);
    let arrays = store.json(&["array", "list"]);
    let meta = arrays.as_array().unwrap().iter().find(|array| array["name"] == "meta").unwrap();
    let meta = meta["id"].as_str().unwrap().to_owned();
    store.down();
    let unmade = store.home.join("unmade");
    let output = Store::program()
        .arg("--dir")
        .arg(&unmade)
        .args(["fs", "check", "--repair", "--map", "--yes"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(8), "there is no store");
    assert!(!unmade.exists(), "and no folder is made");
    for words in [&["fs", "check", "--map"][..], &["fs", "check", "--repair", "--keep-changed"]] {
        exits(&store, words, 2);
    }

    lose_metadata(&store, &meta);
    // The record of the store is lost too; its drives are in the folder.
    std::fs::remove_file(store.dir.join("store.json")).unwrap();
    let words = ["fs", "check", "--repair", "--map", "--keep-changed", "--yes"];
    // A drive of another store is not taken into this one, nor this one's into it.
    let other = Store::new("fs-map-other", &["--drive-size", "256M"]);
    other.up();
    other.down();
    let drive = std::fs::read_dir(other.dir.join("drives")).unwrap().next().unwrap().unwrap().path();
    let (_, err) = exits(&store, &[&words[..], &["--drive", drive.to_str().unwrap()]].concat(), 8);
    assert!(err.contains("belong to 2 stores: name the drives of one"), "{err}");
    let (out, err) = exits(&store, &words, 1);
    let mode = std::fs::metadata(store.dir.join("restored.json")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it names files of all users");
    assert!(out.contains("RESTORED") && out.contains("as of "), "{out}");
    assert!(out.contains("CHANGED  /small0: may show data that was written since"), "{out}");
    assert!(out.contains("NEWER    /lost+found/inode-") && out.contains("mended; a second check"), "{out}");
    assert!(!out.contains("FOUND"), "all that only counts is always lacking: {out}");
    assert!(err.contains("reading the copy of the map"), "{err}");
    let event = |kind: &str| {
        let events = std::fs::read_to_string(store.dir.join("events.jsonl")).unwrap();
        events.lines().any(|line| line.contains(kind))
    };
    assert!(event("map_copied") && event("map_restored") && event("fs_repaired"));

    store.up();
    for number in 0..8 {
        assert!(std::fs::read(small(number)).unwrap() == contents(number), "small{number}");
    }
    store.ok(&["umount"]);
    store.audit();
    store.down();
}
