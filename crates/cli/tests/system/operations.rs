//! What an administrator sees: events over restarts and kills, and what the other commands say of them.

use crate::store::{Store, can_mount, wait_until};
use serde_json::Value;

const SMALL: [&str; 2] = ["--drive-size", "256M"];

fn events(store: &Store, since: u64) -> Vec<Value> {
    let since = since.to_string();
    store.json(&["events", "--since", &since]).as_array().unwrap().clone()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["kind"].as_str().unwrap()).collect()
}

fn last_seq(events: &[Value]) -> u64 {
    events.last().unwrap()["seq"].as_u64().unwrap()
}

/// Each of `wanted` occurs, in this order.
fn in_order(events: &[Value], wanted: &[&str]) {
    let mut found = kinds(events).into_iter();
    for kind in wanted {
        assert!(found.any(|found| found == *kind), "{kind} of {wanted:?} in {events:#?}");
    }
}

#[test]
fn events_tell_the_story_over_restarts_and_kills() {
    if !can_mount("events_tell_the_story_over_restarts_and_kills") {
        return;
    }
    let store = Store::new("events", &SMALL);
    store.up();
    std::fs::write(store.mount.join("file"), vec![7; 5 << 20]).unwrap();
    let (id, path) = store.drives()[1].clone();
    store.ok(&["drive", "fail", &id]);
    wait_until("the failure is an event", || kinds(&events(&store, 0)).contains(&"health"));
    store.ok(&["drive", "replace", &id, "--yes"]);
    store.ok(&["array", "rebuild", "--wait"]);
    store.ok(&["array", "scrub", "data", "--wait"]);
    wait_until("the store is whole", || {
        kinds(&events(&store, 0)).iter().filter(|kind| **kind == "health").count() == 2
    });
    let story = events(&store, 0);
    in_order(&story, &["started", "mounted", "drive_failed", "drive_replaced", "rebuild_ended", "health"]);
    in_order(&story, &["drive_replaced", "scrub_begun", "scrub_ended"]);
    assert!(!kinds(&story).contains(&"unclean_end"), "{story:#?}");
    let text = store.ok(&["events"]);
    assert!(
        text.contains(&format!("drive {}", &id[..8])) && text.contains("failed by an administrator"),
        "{text}"
    );

    // A follower sees what comes, and ends with the instance.
    let since = last_seq(&story);
    let follower = Store::program()
        .args([
            "--dir",
            store.dir.to_str().unwrap(),
            "--json",
            "events",
            "--follow",
            "--since",
            &since.to_string(),
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::null())
        .spawn()
        .unwrap();
    store.ok(&["umount"]);
    wait_until("the unmount is in the file", || {
        std::fs::read_to_string(store.dir.join("events.jsonl")).unwrap().contains("\"unmounted\"")
    });
    std::thread::sleep(std::time::Duration::from_secs(1));
    store.kill();
    let followed = String::from_utf8(follower.wait_with_output().unwrap().stdout).unwrap();
    let lines: Vec<Value> = followed.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(kinds(&lines), ["unmounted"], "{followed}");

    // Without an instance the files are read. A torn end is cut off and said.
    assert_eq!(events(&store, since), lines);
    let file = store.dir.join("events.jsonl");
    let mut torn = std::fs::read(&file).unwrap();
    torn.extend(b"{\"seq\":99999,\"time_n");
    std::fs::write(&file, torn).unwrap();
    let away = store.home.join("away");
    let drive = store.dir.join("drives/drive-2");
    std::fs::rename(&drive, &away).unwrap();
    store.up();
    let new = events(&store, last_seq(&lines));
    in_order(&new, &["started", "unclean_end", "events_torn", "drive_missing", "health", "mounted"]);
    store.down();
    std::fs::rename(&away, &drive).unwrap();
    store.up();
    wait_until("the drive's return is whole", || {
        kinds(&events(&store, last_seq(&new))).contains(&"resync_ended")
    });
    let newest = events(&store, last_seq(&new));
    in_order(&newest, &["unmounted", "stopped", "started", "drive_back"]);
    assert!(!kinds(&newest).contains(&"unclean_end"), "{newest:#?}");
    store.down();
    let all = events(&store, 0);
    assert_eq!(all.last().unwrap()["kind"], "stopped");
    let numbers: Vec<u64> = all.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "no number twice: {numbers:?}");
    assert!(path.exists());
}
