//! Tests `fs check --repair` and `fs damaged` from the command line: exit statuses and output.
//!
//! The tests of `penstock-node` plant damage and test its repairs.

use crate::store::{Store, can_mount};
use serde_json::{Value, json};

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
