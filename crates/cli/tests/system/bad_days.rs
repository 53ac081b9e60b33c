//! Tests of bad input and faults: messages name failure, object, reason and remedy; nothing is damaged.

use crate::store::{Store, can_mount, refused, shell, wait_until};
use rustix::fs::XattrFlags;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Stdio;

const SMALL: [&str; 2] = ["--drive-size", "256M"];

fn started(name: &str) -> Option<Store> {
    can_mount(name).then(|| {
        let store = Store::new(name, &SMALL);
        store.up();
        std::fs::write(store.mount.join("kept"), b"kept").unwrap();
        store
    })
}

fn still_there(store: &Store) {
    assert_eq!(std::fs::read(store.mount.join("kept")).unwrap(), b"kept");
}

#[test]
fn a_drive_missing_small_foreign_future_or_noise_is_named_and_left_alone() {
    let Some(store) = started("bad-drive") else { return };
    let path = store.drives()[3].1.clone();
    store.down();
    let good = std::fs::read(&path).unwrap();
    let mut future = good.clone();
    for copy in [0, good.len() - 64 * 1024] {
        // A later format version with a valid checksum.
        future[copy + 8] = 9;
        let crc = penstock_base::crc32c(&future[copy..copy + 52]);
        future[copy + 52..copy + 56].copy_from_slice(&crc.to_le_bytes());
    }
    let mut foreign = good.clone();
    for copy in [0, good.len() - 64 * 1024] {
        foreign[copy + 64] ^= 0xff;
        let body_bytes = u32::from_le_bytes(foreign[copy + 12..copy + 16].try_into().unwrap()) as usize;
        let body_crc = penstock_base::crc32c(&foreign[copy + 64..copy + 64 + body_bytes]);
        foreign[copy + 48..copy + 52].copy_from_slice(&body_crc.to_le_bytes());
        let crc = penstock_base::crc32c(&foreign[copy..copy + 52]);
        foreign[copy + 52..copy + 56].copy_from_slice(&crc.to_le_bytes());
    }
    let noise: Vec<u8> = (0..good.len()).map(|at| (at * 31 % 251) as u8).collect();
    let cases: [(&str, Option<&[u8]>, &str); 5] = [
        ("missing", None, "No such file"),
        ("too small", Some(&good[..good.len() / 2]), "too small"),
        ("from another store", Some(&foreign), "another store"),
        ("from a later release", Some(&future), "later release"),
        ("full of noise", Some(&noise), "something else or was damaged"),
    ];
    for (what, contents, word) in cases {
        match contents {
            None => std::fs::remove_file(&path).unwrap(),
            Some(bytes) => std::fs::write(&path, bytes).unwrap(),
        }
        store.up();
        let status = store.json(&["status"]);
        assert_eq!(status["health"], "degraded", "{what}: {status}");
        let reasons = status["reasons"].to_string();
        assert!(reasons.contains(word), "{what}: {reasons}");
        // Nothing says the size of a drive that was not found.
        let sizes = status["drives"].as_array().unwrap().iter().map(|drive| drive["size_bytes"].as_u64());
        assert_eq!(sizes.filter(Option::is_none).count(), 1, "{what}: {status}");
        still_there(&store);
        store.down();
        if let Some(bytes) = contents {
            assert!(std::fs::read(&path).unwrap() == bytes, "{what}: the file is left alone");
        }
    }
    std::fs::write(&path, &good).unwrap();
    store.up();
    // The drive returns with old contents and is brought up to date.
    store.ok(&["array", "rebuild", "--wait"]);
    wait_until("the store is whole", || store.json(&["status"])["health"] == "ok");
    store.audit();
    still_there(&store);
    store.down();
}

#[test]
fn too_many_lost_drives_are_refused_and_a_store_is_never_made_over_one() {
    let Some(store) = started("too-many") else { return };
    let paths: Vec<_> = store.drives().into_iter().map(|(_, path)| path).collect();
    store.down();
    for path in &paths[..3] {
        std::fs::rename(path, store.home.join(path.file_name().unwrap())).unwrap();
    }
    refused(&store.up_output(&[]), &["3 of", "members are missing"]);
    for path in &paths[..3] {
        std::fs::rename(store.home.join(path.file_name().unwrap()), path).unwrap();
    }
    // Without `store.json` the folder is searched for drives.
    std::fs::remove_file(store.dir.join("store.json")).unwrap();
    store.up();
    still_there(&store);
    store.down();
    for path in &paths {
        let file = File::options().write(true).open(path).unwrap();
        file.write_all_at(&[7; 65536], 0).unwrap();
        file.write_all_at(&[7; 65536], file.metadata().unwrap().len() - 65536).unwrap();
    }
    std::fs::remove_file(store.dir.join("store.json")).unwrap();
    refused(&store.up_output(&[]), &["not made over files", "another folder"]);
}

#[test]
fn drives_from_the_past_that_are_needed_are_used_only_by_an_administrators_word() {
    let Some(store) = started("past") else { return };
    // One carrier of the data array's log stays: its carriers begin after the members of the metadata array.
    let paths: Vec<_> = store.drives().into_iter().map(|(_, path)| path).skip(2).take(3).collect();
    let (past, right) = (store.home.join("past"), store.home.join("right"));
    let copy = |to: &Path| {
        std::fs::create_dir(to).unwrap();
        for path in &paths {
            shell(&format!("cp --sparse=always {} {}", path.display(), to.display()));
        }
    };
    let put_back = |from: &Path| {
        for path in &paths {
            let copy = from.join(path.file_name().unwrap());
            shell(&format!("cp --sparse=always {} {}", copy.display(), path.display()));
        }
    };
    store.down();
    copy(&past);
    store.up();
    let new = vec![9; 8 << 20];
    std::fs::write(store.mount.join("new"), &new).unwrap();
    store.down();
    copy(&right);
    put_back(&past);
    for _ in 0..2 {
        refused(&store.up_output(&[]), &["cannot be read without", "as it was in the past", "--accept-loss"]);
    }
    put_back(&right);
    store.up();
    still_there(&store);
    assert_eq!(std::fs::read(store.mount.join("new")).unwrap(), new, "refusing lost nothing");
    store.down();
    put_back(&past);
    assert!(store.up_output(&["--accept-loss"]).status.success());
    still_there(&store);
    std::fs::read(store.mount.join("new")).unwrap_err();
    wait_until("it is kept what was given up", || {
        store.ok(&["events"]).contains("by an administrator's word")
    });
    store.down();
    // The loss was accepted once; later starts do not ask again.
    store.up();
    still_there(&store);
}

#[test]
fn mount_point_port_second_instance_and_other_parameters() {
    let Some(store) = started("refusals") else { return };
    refused(&store.up_output(&[]), &["in use by another instance", "penstock down"]);
    refused(&store.run(&["drive", "fail", "nonsense"]), &["no drive nonsense", "drive list"]);
    let drives = store.drives();
    refused(&store.run(&["drive", "replace", &drives[0].0, "--yes"]), &["is online", "drive fail"]);
    for (id, _) in &drives[..2] {
        store.ok(&["drive", "fail", id]);
    }
    refused(&store.run(&["drive", "fail", &drives[2].0]), &["can lose no further member"]);
    store.replace_missing();
    store.down();
    refused(&store.up_output(&["--code", "8+2"]), &["holds a store already", "4+2", "another folder"]);
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    refused(&store.up_output(&["--port", &port]), &["port", "in use", "--port"]);
    std::fs::write(store.mount.join("something"), b"here").unwrap();
    refused(&store.up_output(&[]), &["not empty", "another directory"]);
    std::fs::remove_file(store.mount.join("something")).unwrap();
    refused(&store.run(&["status"]), &["no instance runs", "penstock up"]);
    let other = store.home.join("other");
    refused(&store.up_output(&["--dir", other.to_str().unwrap()]), &["two folders", "name one"]);
    refused(&store.run(&["up", "--read-only"]), &["--mount"]);
    let fresh = Store::new("refusals-new", &[]);
    refused(&fresh.up_output(&["--drive-size", "1M"]), &["too small", "256 MiB"]);
    refused(&fresh.up_output(&["--drives", "5", "--code", "4+2"]), &["at least 6 drives, not 5"]);
    refused(&fresh.up_output(&["--drives", "300"]), &["at most 256 drives, not 300"]);
    store.up();
    still_there(&store);
    store.audit();
    store.down();
}

#[test]
fn levels_are_planned_without_a_store_and_made_as_planned() {
    let plan = |words: &[&str]| {
        let mut command = Store::program();
        command.args(["up", "--dry-run"]).args(words).current_dir(std::env::temp_dir());
        command.output().unwrap()
    };
    let told = |words: &[&str]| {
        let output = plan(words);
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let usable = |words: &[&str]| -> f64 {
        let report: serde_json::Value =
            serde_json::from_str(&told(&[&["--json", "--drive-size", "15T"], words].concat())).unwrap();
        assert!(report["overhead"].as_f64().unwrap() >= 1.0 && report["rebuild_seconds"].is_number());
        report["usable_percent"].as_f64().unwrap()
    };
    // Columns: options, and the share that the code alone leaves.
    for (words, share) in [
        (&["--level", "1+2", "--drives", "128", "--spares", "0"][..], 100.0 / 3.0),
        (&["--level", "4+2", "--drives", "128", "--spares", "0"], 200.0 / 3.0),
        (&["--level", "8+2", "--drives", "128", "--spares", "0"], 80.0),
        (&["--level", "16+2", "--drives", "126", "--spares", "0"], 1600.0 / 18.0),
        (&["--level", "8+2", "--drives", "128", "--spares", "4"], 77.5),
        (&["--level", "60", "--drives", "20"], 80.0),
        (&["--level", "10", "--drives", "8"], 50.0),
    ] {
        // Trailers, metadata and rows that fill no band take the rest.
        let found = usable(words);
        assert!((share * 0.94..share).contains(&found), "{words:?}: {found} of {share} %");
    }
    let text = told(&["--level", "60", "--drives", "20", "--drive-size", "1T"]);
    for word in ["8+2 in 2 groups of 10 drives", "as asked for", "of 1.0 TiB", "nothing was made"] {
        assert!(text.contains(word), "{word}: {text}");
    }
    assert!(told(&["--level", "0"]).contains("none: what a lost drive had is lost"));
    refused(&plan(&["--level", "9"]), &["no level", "7.3", "8+2"]);
    refused(&plan(&["--level", "60", "--drives", "7"]), &["do not divide into groups"]);
    refused(&plan(&["--level", "6", "--strip", "12K"]), &["power of two"]);
    refused(&plan(&["--level", "6", "--spares", "1"]), &["groups have no spare space"]);

    if !can_mount("levels_are_planned_without_a_store_and_made_as_planned") {
        return;
    }
    let level = ["--level", "10", "--drives", "4", "--strip", "16K"];
    let store = Store::new("levels", &SMALL);
    assert!(store.up_output(&level).status.success());
    std::fs::write(store.mount.join("file"), vec![7; 3 << 20]).unwrap();
    let data = store.json(&["array", "show", "data"]);
    assert_eq!((&data["code"], &data["stripe_bytes"]), (&"1+1".into(), &(16 << 10).into()));
    let pools = store.json(&["pool", "list"]);
    assert_eq!((&pools[0]["name"], &pools[0]["code"]), (&"main".into(), &"1+1".into()));
    assert_eq!(store.json(&["pool", "show"])["may_be_lost"], 4, "{pools}");
    assert!(store.ok(&["pool", "show", "main"]).contains("any one of them may be lost now"));
    let unknown = store.run(&["pool", "show", "other"]);
    refused(&unknown, &["no pool other", "pool list"]);
    let set = store.json(&["pool", "set", "--rebuild-rate", "500M"]);
    assert_eq!(set["settings"]["rebuild_rate"], "524288000");
    refused(&store.run(&["pool", "set", "--rebuild-rate", "fast"]), &["auto, max, or a size"]);
    refused(&store.run(&["pool", "set", "other", "--rebuild-rate", "max"]), &["no pool other"]);
    store.down();
    for (words, why) in [
        (["--level", "6"], "level 6 on its drives is 2+2"),
        (["--strip", "64K"], "16384 bytes, not 65536"),
        (["--spares", "1"], "spare space for 0 drives, not 1"),
    ] {
        refused(&store.up_output(&words), &["holds a store already", why]);
    }
    // The same options again, as a service manager gives them at each start.
    assert!(store.up_output(&level).status.success());
    assert!(store.ok(&["pool", "show"]).contains("at most 500.0 MiB a second"), "the start keeps it");
    store.ok(&["pool", "set", "--rebuild-rate", "max"]);
    let members = store.json(&["array", "show", "data"])["members"].clone();
    for member in [0, 2] {
        store.ok(&["drive", "fail", members[member]["drive"].as_str().unwrap()]);
    }
    let pool = store.json(&["pool", "show"]);
    assert_eq!((&pool["drives_online"], &pool["may_be_lost"]), (&2.into(), &0.into()), "{pool}");
    let found = std::fs::read(store.mount.join("file")).unwrap();
    assert_eq!(found, vec![7; 3 << 20], "one of each pair is left");
    store.down();
}

#[test]
fn the_api_asks_for_token_host_and_origin() {
    if !can_mount("the_api_asks_for_token_host_and_origin") {
        return;
    }
    let store = Store::new("api", &SMALL);
    assert!(store.up_output(&["--port", "0"]).status.success());
    let url = store.json(&["status"])["api_url"].as_str().unwrap().to_owned();
    let token = std::fs::read_to_string(store.dir.join("token")).unwrap();
    let mode = shell(&format!("stat -c %a {}", store.dir.join("token").display()));
    assert_eq!(mode.trim(), "600");
    let status = |headers: &[&str]| {
        let mut command = std::process::Command::new("curl");
        command.args(["-s", "-o", "/dev/null", "-w", "%{http_code}"]);
        headers.iter().for_each(|header| {
            command.arg("-H").arg(header);
        });
        String::from_utf8(command.arg(format!("{url}/v1/status")).output().unwrap().stdout).unwrap()
    };
    let bearer = format!("Authorization: Bearer {}", token.trim());
    assert_eq!(status(&[]), "401");
    assert_eq!(status(&["Authorization: Bearer wrong"]), "401");
    assert_eq!(status(&[&bearer]), "200");
    assert_eq!(status(&[&bearer, "Host: evil.example"]), "403");
    assert_eq!(status(&[&bearer, "Origin: http://evil.example"]), "403");
    a_late_body_costs_no_connection(url.strip_prefix("http://").unwrap(), &bearer);
    let metrics = shell(&format!("curl -s -H '{bearer}' {url}/metrics"));
    assert!(metrics.contains("penstock_health 0") && metrics.contains("penstock_drive_online"), "{metrics}");
    store.down();
}

/// Sends a body after its header, as a busy client does, then a second request on the same connection.
fn a_late_body_costs_no_connection(address: &str, bearer: &str) {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
    let answer = |stream: &mut std::net::TcpStream| {
        let mut bytes = vec![0; 4096];
        let len = stream.read(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..len]).into_owned()
    };
    let header = |method: &str, len: usize| {
        format!(
            "{method} /v1/arrays/all/rebuild HTTP/1.1\r\nHost: {address}\r\n{bearer}\r\nContent-Length: {len}\r\n\r\n"
        )
    };
    stream.write_all(header("POST", 2).as_bytes()).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(100));
    stream.write_all(b"{}").unwrap();
    assert!(answer(&mut stream).starts_with("HTTP/1.1 20"));
    stream.write_all(header("GET", 0).as_bytes()).unwrap();
    assert!(answer(&mut stream).starts_with("HTTP/1.1 405"), "the connection is still there");
}

#[test]
fn a_full_array_says_enospc_and_deletes_work() {
    let Some(store) = started("full") else { return };
    let filled = shell(&format!(
        "cd {} && dd if=/dev/urandom of=part bs=1M count=32 2>/dev/null; for n in $(seq 100); do cp part f$n 2>err || break; done; cat err; ls | wc -l",
        store.mount.display()
    ));
    assert!(filled.contains("No space left on device"), "{filled}");
    still_there(&store);
    wait_until("all warnings stand", || {
        let status = store.json(&["status"]);
        status["spaces"][0]["warning_percent"] == 95 && status["reasons"].to_string().contains("data is")
    });
    assert_eq!(store.json(&["status"])["health"], "ok", "a full store lacks no redundancy");
    shell(&format!(
        "cd {} && cmp part f1 && rm f* && sync . && cp part again && cmp part again",
        store.mount.display()
    ));
    wait_until("the warning is over", || store.json(&["status"])["spaces"][0]["warning_percent"] == 0);
    let events = store.json(&["events"]);
    let of = |kind: &str| events.as_array().unwrap().iter().filter(|event| event["kind"] == kind).count();
    assert!((1..=3).contains(&of("full")), "one event for each level that was passed: {events}");
    assert!((1..=3).contains(&of("full_over")), "{events}");
    store.audit();
    store.down();
    store.up();
    still_there(&store);
    store.down();
}

#[test]
fn a_full_host_suspends_and_goes_on() {
    let Some((store, small)) = on_a_host_of("330m", "a_full_host_suspends_and_goes_on") else { return };
    store.up();
    let ballast = small.0.join("ballast");
    let mount = store.mount.display().to_string();
    shell(&format!("dd if=/dev/zero of={} bs=1M count=400 2>/dev/null || true", ballast.display()));
    let writer = std::process::Command::new("bash")
        .arg("-c")
        .arg(format!("dd if=/dev/urandom of={mount}/data bs=1M count=24 conv=fsync 2>/dev/null && sha256sum < {mount}/data"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until("the array is suspended", || {
        store.json(&["status"])["reasons"].to_string().contains("host full")
    });
    std::fs::remove_file(&ballast).unwrap();
    let output = writer.wait_with_output().unwrap();
    assert!(output.status.success(), "the writer goes on by itself");
    wait_until("all is well", || store.json(&["status"])["health"] == "ok");
    let again = shell(&format!("sha256sum < {mount}/data"));
    assert_eq!(String::from_utf8(output.stdout).unwrap(), again);
    store.audit();
    store.down();
}

/// Regression: the stop waited forever for space on the host, without a message.
#[test]
fn a_stop_on_a_full_host_ends_and_says_why() {
    let Some((store, small)) = on_a_host_of("330m", "a_stop_on_a_full_host_ends_and_says_why") else {
        return;
    };
    store.up();
    let kept = vec![7; 3 << 20];
    std::fs::write(store.mount.join("kept"), &kept).unwrap();
    std::fs::File::open(store.mount.join("kept")).unwrap().sync_all().unwrap();
    let ballast = small.0.join("ballast");
    shell(&format!("dd if=/dev/zero of={} bs=1M count=400 2>/dev/null || true", ballast.display()));
    let mut writer = std::process::Command::new("dd")
        .args(["if=/dev/urandom", "bs=1M", "count=100", "conv=fsync"])
        .arg(format!("of={}/waits", store.mount.display()))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the array is suspended", || {
        store.json(&["status"])["reasons"].to_string().contains("host full")
    });
    let output = store.run(&["down"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("host full"), "{said}");
    assert!(!store.dir.join("run.json").exists(), "it has stopped");
    assert!(!writer.wait().unwrap().success());
    std::fs::remove_file(&ballast).unwrap();
    store.up();
    assert!(std::fs::read(store.mount.join("kept")).unwrap() == kept);
    store.audit();
    store.down();
}

/// An instance that was killed on a host with 1 MiB left starts again, serves its data, and allows further
/// mounts.
#[test]
fn a_store_starts_on_a_host_that_is_almost_full() {
    let test = "a_store_starts_on_a_host_that_is_almost_full";
    let Some((store, small)) = on_a_host_of("400m", test) else { return };
    store.up();
    std::fs::write(store.mount.join("file"), vec![7; 3 << 20]).unwrap();
    std::fs::File::open(store.mount.join("file")).unwrap().sync_all().unwrap();
    let ballast = small.0.join("ballast");
    let ballast_at = ballast.display();
    shell(&format!(
        "dd if=/dev/zero of={ballast_at} bs=1M 2>/dev/null || true; truncate -s -1M {ballast_at}"
    ));
    store.kill();
    std::thread::sleep(std::time::Duration::from_millis(300));
    store.up();
    assert!(std::fs::read(store.mount.join("file")).unwrap() == vec![7; 3 << 20]);
    let other = store.home.join("other");
    store.ok(&["mount", other.to_str().unwrap(), "--detach", "--read-only", "--source", "a,b"]);
    assert_eq!(shell(&format!("findmnt -n -o SOURCE {}", other.display())).trim(), "a,b");
    assert!(std::fs::read(other.join("file")).unwrap() == vec![7; 3 << 20]);
    let refused = std::fs::write(other.join("new"), b"").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    store.ok(&["umount", other.to_str().unwrap()]);
    std::fs::remove_file(&ballast).unwrap();
    store.audit();
    store.down();
}

/// An ordinary user cannot block others with extreme sizes or attributes; a write removes a program's
/// privileges.
#[test]
fn a_user_without_rights_stops_nobody_and_keeps_no_privileges() {
    let Some(store) = started("nobody") else { return };
    let mount = store.mount.display().to_string();
    let as_nobody = "setpriv --reuid 65534 --regid 65534 --clear-groups";
    if !std::process::Command::new("bash")
        .args(["-c", &format!("{as_nobody} true")])
        .status()
        .unwrap()
        .success()
    {
        eprintln!("SKIPPED a_user_without_rights_stops_nobody: another user needs root and setpriv");
        store.down();
        return;
    }
    shell(&format!("chmod 1777 {mount}"));
    // Files of 4 EiB without data, removed before and after their row is in the store.
    shell(&format!(
        "{as_nobody} bash -c 'cd {mount} && truncate -s 4E f && rm f && truncate -s 4E g && exec 3<g && rm g && sync -d . && exec 3<&-'"
    ));
    assert_eq!(store.json(&["fs", "check"])["clean"], true);
    // Attributes of 64 KiB until no space for rows is left: this returns ENOSPC, and the store continues.
    let set = |file: &str, name: &str, value: &[u8]| {
        rustix::fs::setxattr(store.mount.join(file), name, value, XattrFlags::empty())
    };
    let value = vec![b'v'; 65536];
    let full = (0..3000).find_map(|number: u32| {
        let file = format!("x{}", number / 100);
        let made = File::options().create(true).append(true).open(store.mount.join(&file));
        let done = made.map_err(|error| error.raw_os_error());
        let done = done.and_then(|_| {
            set(&file, &format!("user.{number}"), &value).map_err(|error| Some(error.raw_os_error()))
        });
        done.err()
    });
    assert_eq!(full, Some(Some(rustix::io::Errno::NOSPC.raw_os_error())));
    assert!(store.json(&["status"])["health"] != "failed");
    shell(&format!("rm -f {mount}/x* && echo still here > {mount}/after"));
    for how in ["fallocate -z -o 0 -l 4096 p", "sh -c \"echo >> p\""] {
        shell(&format!("cd {mount} && rm -f p && head -c 8192 /dev/zero > p && chmod 6777 p"));
        let mut capability = [0; 20];
        (capability[0], capability[3], capability[5]) = (1, 2, 0x20);
        set("p", "security.capability", &capability).unwrap();
        shell(&format!("cd {mount} && {as_nobody} {how}"));
        let found = shell(&format!("stat -c %a {mount}/p"));
        let left = rustix::fs::getxattr(store.mount.join("p"), "security.capability", &mut [0; 64][..]);
        assert_eq!(left, Err(rustix::io::Errno::NODATA), "{how}");
        assert_eq!(found.trim(), "777", "{how}");
    }
    store.audit();
    store.down();
}

/// Creates a store with its folder on a separate, small file system. None if this machine cannot do that.
fn on_a_host_of(size: &str, test: &str) -> Option<(Store, Unmount)> {
    if !can_mount(test) {
        return None;
    }
    let store = Store::new(test, &SMALL);
    let small = store.home.join("small");
    std::fs::create_dir(&small).unwrap();
    let mut mount = std::process::Command::new("mount");
    mount.args(["-t", "tmpfs", "-o", &format!("size={size}"), "none"]).arg(&small);
    if !mount.status().is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED {test}: a tmpfs of its own needs root");
        return None;
    }
    std::os::unix::fs::symlink(&small, &store.dir).unwrap();
    Some((store, Unmount(small)))
}

struct Unmount(std::path::PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn without_dev_fuse_the_store_starts_without_a_mount() {
    let Some(store) = started("no-fuse") else { return };
    store.down();
    let script = format!(
        "mount --bind /dev/null /dev/fuse 2>/dev/null && umount /dev/fuse; mount -t tmpfs none /dev && {} up {} --mount {}",
        env!("CARGO_BIN_EXE_penstock"),
        store.dir.display(),
        store.mount.display()
    );
    let output = std::process::Command::new("unshare").args(["-m", "bash", "-c", &script]).output();
    match output {
        Ok(output) if String::from_utf8_lossy(&output.stderr).contains("/dev/fuse") => {
            refused(&output, &["/dev/fuse is missing", "modprobe fuse"]);
        }
        other => {
            let why = other.map(|output| String::from_utf8_lossy(&output.stderr).into_owned());
            eprintln!(
                "SKIPPED without_dev_fuse_the_store_starts_without_a_mount: no mount namespace of its own ({why:?})"
            );
        }
    }
}

#[test]
fn signals_stop_it_in_order() {
    let Some(store) = started("signals") else { return };
    for signal in ["-TERM", "-INT"] {
        let pid = store.pid().unwrap().to_string();
        shell(&format!("kill {signal} {pid}"));
        wait_until("it ends", || !store.dir.join("run.json").exists());
        wait_until("it is gone", || !std::path::Path::new(&format!("/proc/{pid}")).exists());
        store.up();
        still_there(&store);
    }
    store.down();
}

/// Regression: a replacement took any file for a blank drive and removed it, even a drive in use by another
/// store.
#[test]
fn a_replacement_writes_over_nothing_that_somebody_may_want() {
    let Some(store) = started("wanted") else { return };
    let Some(other) = started("wanted-by-another") else { return };
    let drives = store.drives();
    let (failed, kept) = (&drives[0].0, &drives[1].1);
    store.ok(&["drive", "fail", failed]);
    let replaced = |path: &Path| store.run(&["drive", "replace", failed, path.to_str().unwrap(), "--yes"]);
    let photograph = store.home.join("photograph");
    std::fs::write(&photograph, [9; 100_000]).unwrap();
    let blank = store.home.join("zeros");
    std::fs::write(&blank, vec![0; 8 << 20]).unwrap();
    let theirs = &other.drives()[0].1;
    for (path, why) in [
        (photograph.as_path(), "not written over"),
        (blank.as_path(), "a file with contents"),
        (kept.as_path(), "in use"),
        (theirs.as_path(), "not written over"),
        (store.home.as_path(), ""),
    ] {
        refused(&replaced(path), &[why]);
    }
    assert_eq!(std::fs::read(&photograph).unwrap(), [9; 100_000]);
    // The other store's drive is also refused while that store is stopped.
    other.down();
    refused(&replaced(theirs), &["of another store"]);
    other.up();
    other.down();
    store.replace_missing();
    store.down();
}
