//! Tests of the administrator's view: events over restarts and kills, and the commands that report them.

use crate::remote_mount::{OPTIONS, up_alone};
use crate::store::{Store, can_mount, shell, wait_until};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// Asserts that each of `wanted` occurs, in this order.
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
    let elsewhere = store.dir.join("elsewhere");
    store.ok(&["drive", "replace", &id, elsewhere.to_str().unwrap(), "--yes"]);
    let noted = std::fs::read_to_string(store.dir.join("store.json")).unwrap();
    let new = store.drives().into_iter().find(|(_, path)| path.as_path() == elsewhere).unwrap();
    assert!(noted.contains(&new.0) && !noted.contains(&id), "{noted}");
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

    // A follower prints new events and ends with the instance.
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

    // Without an instance the files are read. A torn last line is dropped, with an event.
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
    // This write makes the absent drive stale.
    std::fs::write(store.mount.join("meanwhile"), vec![8; 5 << 20]).unwrap();
    store.down();
    std::fs::rename(&away, &drive).unwrap();
    store.up();
    // The return may be handled as a rebuild, which is a resync of everything that is written.
    wait_until("the drive's return is whole", || {
        let events = events(&store, last_seq(&new));
        let whole = |event: &&Value| {
            let kind = event["kind"].as_str().unwrap();
            ["resync_ended", "rebuild_ended"].contains(&kind) && event["object"] == "array data"
        };
        events.iter().filter(whole).count() > 0
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

/// Of a drive that is in use, and of one that is damaged; neither is changed.
#[test]
fn inspect_shows_the_structures_of_one_drive() {
    if !can_mount("inspect_shows_the_structures_of_one_drive") {
        return;
    }
    let store = Store::new("inspect", &SMALL);
    assert!(store.up_output(&["--port", "0"]).status.success());
    std::fs::write(store.mount.join("file"), vec![7; 3 << 20]).unwrap();
    shell(&format!("sync -f {}", store.mount.display()));
    let drives = store.json(&["drive", "list"]);
    let (path, id) = (drives[0]["path"].as_str().unwrap().to_owned(), drives[0]["id"].clone());
    let shown = store.json(&["debug", "inspect", &path]);
    for copy in ["copy 0", "copy 1"] {
        assert_eq!(shown["superblock"][copy]["drive"], id, "{shown:#}");
    }
    let slices = shown["slices"].as_array().unwrap();
    let names: Vec<&str> =
        slices.iter().map(|slice| slice["label"]["copy 0"]["descriptor"]["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"data") && names.contains(&"meta"), "{names:?}");
    assert!(
        slices.iter().any(|slice| slice["log"]["segments"][0]["records"].as_u64() > Some(0)),
        "{shown:#}"
    );
    let text = store.ok(&["debug", "inspect", &path, "--log", "--stripe", "0"]);
    for part in ["superblock:", "root_epoch:", "kind: ", "trailer:", "stripe 0:"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    store.down();
    // The first copy of the superblock: the other one still says where the slices are.
    let before = std::fs::read(&path).unwrap();
    let mut damaged = before.clone();
    damaged[..4096].fill(0x5a);
    std::fs::write(&path, &damaged).unwrap();
    let shown = store.json(&["debug", "inspect", &path]);
    assert_eq!(shown["superblock"]["copy 0"]["problem"], "superblock: wrong magic number");
    assert_eq!(shown["slices"].as_array().unwrap().len(), slices.len());
    assert!(std::fs::read(&path).unwrap() == damaged, "nothing was written");
    std::fs::write(&path, &before).unwrap();
    let failed = store.run(&["debug", "inspect", "no-such-drive"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains("no-such-drive"), "{said}");
}

#[test]
fn a_debug_bundle_has_the_state_and_no_secrets() {
    if !can_mount("a_debug_bundle_has_the_state_and_no_secrets") {
        return;
    }
    let store = Store::new("bundle", &SMALL);
    assert!(store.up_output(&["--port", "0"]).status.success());
    std::fs::write(store.mount.join("a-name-that-nobody-sees"), b"contents that nobody sees").unwrap();
    wait_until("reads are counted", || {
        let _ = std::fs::read(store.mount.join("a-name-that-nobody-sees"));
        store.ok(&["status", "--latency"]).contains("fuse")
    });
    let latencies = store.json(&["status", "--latency"]);
    let drive =
        latencies.as_array().unwrap().iter().find(|row| row["layer"] == "drive" && row["op"] == "write");
    let drive = drive.unwrap();
    assert!(
        drive["count"].as_u64().unwrap() > 0 && drive["p50_ns"].as_u64() <= drive["max_ns"].as_u64(),
        "{drive}"
    );
    let token = std::fs::read_to_string(store.dir.join("token")).unwrap();
    for (name, wanted) in [
        (
            "running.tar",
            &["status.json", "metrics.txt", "events.jsonl", "latency.json", "penstock.log", "process/limits"]
                [..],
        ),
        (
            "stopped.tar",
            &["status.json", "events.jsonl", "penstock.log", "store.json", "system/proc/version"][..],
        ),
    ] {
        let file = store.home.join(name);
        let said = store.ok(&["debug", "bundle", file.to_str().unwrap()]);
        let list = shell(&format!("tar tf {0} && tar xOf {0} | wc -c", file.display()));
        for part in wanted {
            assert!(
                said.contains(part) && list.contains(&format!("penstock-debug/{part}")),
                "{part}: {said}{list}"
            );
        }
        let bytes = std::fs::read(&file).unwrap();
        for secret in [token.trim(), "a-name-that-nobody-sees", "contents that nobody sees"] {
            let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
            assert!(!found, "{name} has {secret}");
        }
        assert!(
            !store.run(&["debug", "bundle", file.to_str().unwrap()]).status.success(),
            "nothing is overwritten"
        );
        if name == "running.tar" {
            let metrics = shell(&format!("tar xOf {} penstock-debug/metrics.txt", file.display()));
            assert!(
                metrics.contains("penstock_latency_seconds_bucket{layer=\"drive\",op=\"flush\""),
                "{metrics}"
            );
            assert!(metrics.contains("penstock_space_warning_percent{space=\"data\"} 0"), "{metrics}");
            store.down();
        }
    }
}

#[test]
fn the_service_manager_is_told_of_start_and_stop() {
    let store = Store::new("notify", &SMALL);
    // A short path, because the path of a Unix socket is limited to about 100 bytes.
    let socket = std::env::temp_dir().join(format!("penstock-notify-{}", std::process::id()));
    let listener = std::os::unix::net::UnixDatagram::bind(&socket).unwrap();
    let mut up = Store::program();
    up.arg("up").arg(&store.dir).args(SMALL).arg("--detach").env("NOTIFY_SOCKET", &socket);
    assert!(up.stdin(std::process::Stdio::null()).output().unwrap().status.success());
    store.down();
    listener.set_nonblocking(true).unwrap();
    let mut said = String::new();
    let mut bytes = [0; 4096];
    while let Ok(len) = listener.recv(&mut bytes) {
        said += &String::from_utf8_lossy(&bytes[..len]);
        said.push('\n');
    }
    std::fs::remove_file(&socket).unwrap();
    let (ready, stopping) = (said.find("READY=1"), said.find("STOPPING=1"));
    assert!(ready.is_some() && ready < stopping, "{said}");
    assert!(said.contains("STATUS=health ok"), "{said}");
}

#[test]
fn systemd_takes_the_unit() {
    let store = Store::new("unit", &[]);
    let unit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd/penstock@.service");
    let unit = std::fs::read_to_string(unit)
        .unwrap()
        .replace("/usr/local/bin/penstock", env!("CARGO_BIN_EXE_penstock"));
    let path = store.home.join("penstock@.service");
    std::fs::write(&path, unit).unwrap();
    let verified =
        std::process::Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&path).output();
    match verified {
        Err(error) => eprintln!("SKIPPED systemd_takes_the_unit: no systemd-analyze ({error})"),
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            // Unknown keys and values are reported, but are no failure.
            assert!(output.status.success() && !said.contains("penstock@"), "{said}");
        }
    }
}

/// Installs the helper of mount(8) into `folder`, with the path of this program.
fn install_helper(folder: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/fstab/mount.fuse.penstock");
    let script = std::fs::read_to_string(source)
        .unwrap()
        .replace("/usr/local/bin/penstock", env!("CARGO_BIN_EXE_penstock"));
    std::fs::create_dir_all(folder).unwrap();
    let path = folder.join("mount.fuse.penstock");
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

#[test]
fn the_helper_of_mount_is_silent_and_makes_no_store() {
    if !can_mount("the_helper_of_mount_is_silent_and_makes_no_store") {
        return;
    }
    let store = Store::new("fstab", &SMALL);
    let helper = install_helper(&store.home.join("sbin"));
    let mount = |options: &str| {
        let mut call = std::process::Command::new("timeout");
        let output = call
            .arg("60")
            .arg(&helper)
            .arg(&store.dir)
            .arg(&store.mount)
            .args(["-o", options])
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
    };
    let (code, said) = mount("rw");
    assert!(code == Some(32) && said.contains("no store in") && !store.dir.exists(), "{code:?}: {said}");
    store.up();
    std::fs::write(store.mount.join("file"), b"kept").unwrap();
    store.down();
    let (code, said) = mount("noexec");
    assert!(code == Some(1) && said.contains("option noexec"), "{code:?}: {said}");
    for _ in 0..2 {
        // First with a stopped store, then with one that runs without a mount.
        assert_eq!(mount("rw,nofail,x-systemd.automount,scrub-days=7"), (Some(0), String::new()));
        assert_eq!(std::fs::read(store.mount.join("file")).unwrap(), b"kept");
        let at = store.mount.display().to_string();
        store.ok(&["umount", &at]);
    }
    store.down();
}

/// Runs mount(8) itself, with an overlay that puts the helper into /usr/sbin, in a separate mount namespace.
#[test]
fn mount_finds_the_helper() {
    let test = "mount_finds_the_helper";
    if !can_mount(test) {
        return;
    }
    let store = Store::new("fstab", &SMALL);
    let sbin = store.home.join("sbin");
    install_helper(&sbin);
    let overlay = format!("mount -t overlay overlay -o lowerdir={}:/usr/sbin /usr/sbin", sbin.display());
    let within = |script: String| {
        let script = format!("set -eu; {overlay}; {script}");
        std::process::Command::new("timeout").args(["60", "unshare", "-m", "sh", "-c", &script]).output()
    };
    if !within("test -x /sbin/mount.fuse.penstock".into()).is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED {test}: not root, or no unshare or overlay");
        return;
    }
    store.up();
    store.down();
    let (dir, at, program) = (store.dir.display(), store.mount.display(), env!("CARGO_BIN_EXE_penstock"));
    let script = format!(
        "mount -t fuse.penstock {dir} {at} -o scrub-days=3; echo x > {at}/file; umount {at}; \
         mount -t fuse.penstock {dir} {at}; cat {at}/file; umount {at}; \
         {program} down {dir} > {}",
        store.home.join("down").display()
    );
    let output = within(script).unwrap();
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && err.is_empty(), "{err}");
    assert_eq!(output.stdout, b"x\n", "nothing is said but by cat");
}

/// Regression: job numbers began at 1 after each start, so a command that waited took the result of another
/// job for its own.
#[test]
fn a_job_is_known_only_to_the_start_that_began_it() {
    let store = Store::new("jobs", &OPTIONS);
    up_alone(&store, &[]);
    let ask = |method: &str, path: &str| -> Value {
        let mut curl = Command::new("curl");
        curl.args([
            "-sS",
            "--max-time",
            "60",
            "-X",
            method,
            "-H",
            "Content-Type: application/json",
            "-d",
            "{}",
        ]);
        curl.arg("--unix-socket").arg(store.dir.join("api.sock")).arg(format!("http://localhost{path}"));
        serde_json::from_slice(&curl.output().unwrap().stdout).unwrap()
    };
    let scrub = || ask("POST", "/v1/arrays/all/scrub")["job"].as_u64().unwrap();
    let job = |number: u64| ask("GET", &format!("/v1/jobs/{number}"));
    let first = scrub();
    assert_eq!((job(first)["id"].as_u64(), scrub()), (Some(first), first + 1));
    store.kill();
    up_alone(&store, &[]);
    let second = scrub();
    assert_eq!(job(second)["id"].as_u64(), Some(second));
    assert!(job(first).to_string().contains("jobs end when"), "{}", job(first));
    let umount = store.run(&["umount"]);
    let said = String::from_utf8_lossy(&umount.stderr);
    assert!(!umount.status.success() && said.contains("not mounted"), "{said}");
    store.down();
}
