//! Tests a mount in its own process, with kills of the mount and of the service.

use crate::store::{Store, can_mount, is_alive, refused, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};

pub const OPTIONS: [&str; 4] = ["--drive-size", "256M", "--lease", "3"];

/// Starts the store without a mount.
pub fn up_alone(store: &Store, more: &[&str]) {
    let mut up = Store::program();
    up.arg("up").arg(&store.dir).args(OPTIONS).args(more).arg("--detach").stdin(Stdio::null());
    let output = up.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Mounts in a separate process. Returns its process id.
fn mount(store: &Store) -> u32 {
    mount_at(store, &store.mount)
}

pub fn mount_at(store: &Store, path: &Path) -> u32 {
    mount_in(&store.dir, path)
}

/// Mounts what is served in a folder.
pub fn mount_in(folder: &Path, path: &Path) -> u32 {
    let mut command = Store::program();
    let output = command.arg("--dir").arg(folder).arg("mount").arg(path).arg("--detach").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    mounted(&String::from_utf8_lossy(&output.stdout))
}

/// Returns the process id in the output of `mount --detach`.
pub fn mounted(said: &str) -> u32 {
    let words: Vec<&str> = said.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let at = words.iter().position(|word| *word == "process").unwrap();
    words[at + 1].parse().unwrap()
}

/// Sends a signal without another process. What this one has open in a mount would be flushed when that
/// begins, which a stopped mount does not do.
pub fn send(signal: Signal, pid: u32) {
    kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), signal).unwrap();
}

pub fn kill(signal: &str, pid: u32) {
    assert!(Command::new("kill").arg(signal).arg(pid.to_string()).status().unwrap().success());
    wait_until("the process is gone", || !is_alive(pid));
}

pub fn remote_sessions(store: &Store) -> usize {
    let status = store.json(&["status"]);
    status["sessions"].as_array().unwrap().iter().filter(|session| session["remote"] == true).count()
}

#[test]
fn a_mount_of_its_own_process_over_kills_of_both() {
    if !can_mount("a_mount_of_its_own_process_over_kills_of_both") {
        return;
    }
    let store = Store::new("remote", &OPTIONS);
    up_alone(&store, &[]);
    let first = mount(&store);
    let contents: Vec<u8> = (0..3 << 20).map(|at: u32| (at >> 7) as u8).collect();
    std::fs::create_dir(store.mount.join("folder")).unwrap();
    std::fs::write(store.mount.join("folder/new"), &contents).unwrap();
    std::fs::rename(store.mount.join("folder/new"), store.mount.join("file")).unwrap();
    assert_eq!(std::fs::read(store.mount.join("file")).unwrap(), contents);
    assert!(store.ok(&["status"]).contains(&format!("process {first}")));

    // The service is killed and restarted: the mount continues.
    File::open(store.mount.join("file")).unwrap().sync_all().unwrap();
    let mut open = File::options().read(true).append(true).open(store.mount.join("file")).unwrap();
    open.write_all(b"not synced").unwrap();
    store.kill();
    up_alone(&store, &[]);
    // A request lets the mount notice the restart. A close that ignores errors must not consume the report of
    // lost writes, which the next fsync returns.
    std::fs::read_dir(&store.mount).unwrap().for_each(|entry| drop(entry.unwrap()));
    drop(open.try_clone().unwrap());
    // The periodic sync may have run before the kill.
    let kept = match open.sync_all() {
        Ok(()) => &b"not synced"[..],
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(5), "what was written last is lost, and told");
            open.sync_all().unwrap();
            b""
        }
    };
    open.write_all(b"again").unwrap();
    open.sync_all().unwrap();
    assert!(std::fs::metadata(store.mount.join("folder")).unwrap().is_dir());

    // An open file without a name; the mount's process is killed while it is open.
    let doomed = store.mount.join("doomed");
    std::fs::write(&doomed, &contents).unwrap();
    let mut held = File::open(&doomed).unwrap();
    held.sync_all().unwrap();
    std::fs::remove_file(&doomed).unwrap();
    let mut bytes = [0; 4];
    held.read_exact(&mut bytes).unwrap();
    let inodes = || store.json(&["fs", "check"])["inodes"].as_u64().unwrap();
    assert_eq!(inodes(), 4, "root, folder, file, and the one without a name");
    kill("-9", first);
    wait_until("the session ends with its lease", || remote_sessions(&store) == 0);
    wait_until("what it had open is gone", || inodes() == 3);
    drop((open, held));

    // The next mount removes the stale one, and ends in order.
    let third = mount(&store);
    let found = std::fs::read(store.mount.join("file")).unwrap();
    assert!(found.starts_with(&[&contents, kept].concat()) && found.ends_with(b"again"), "{}", found.len());
    std::fs::write(store.mount.join("last"), b"word").unwrap();
    kill("-TERM", third);
    assert_eq!(remote_sessions(&store), 0, "a mount that ends in order ends its session");
    let fourth = mount(&store);
    assert_eq!(std::fs::read(store.mount.join("last")).unwrap(), b"word");
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    wait_until("the process ends", || !is_alive(fourth));
    store.audit();
    store.down();
}

/// Regression: `umount` waited for ever, and could not be killed, while the instance was down.
#[test]
fn umount_says_what_a_mount_without_its_instance_waits_for() {
    if !can_mount("umount_says_what_a_mount_without_its_instance_waits_for") {
        return;
    }
    let store = Store::new("umount-down", &OPTIONS);
    up_alone(&store, &[]);
    let process = mount(&store);
    let place = store.mount.to_str().unwrap();
    std::fs::write(store.mount.join("file"), b"contents").unwrap();
    refused(&store.run(&["mount", place, "--detach"]), &["is mounted at", "already"]);
    let output = store.run(&["down"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains(&format!("process {process}")) && said.contains(place), "{said}");

    refused(&store.run(&["umount", place]), &["does not answer", &format!("`kill {process}`")]);
    refused(&store.run(&["mount", place, "--detach"]), &["does not answer"]);
    kill("-TERM", process);
    refused(&store.run(&["umount", place]), &["no file system of Penstock is mounted"]);

    // A process that is killed leaves its mount, which `umount` removes without the instance.
    up_alone(&store, &[]);
    let process = mount(&store);
    store.down();
    kill("-9", process);
    store.ok(&["umount", place]);
    assert!(!store.mount.join("file").exists());
    up_alone(&store, &[]);
    mount(&store);
    store.ok(&["umount", place]);
    store.down();
}

/// Two hosts mount at the same path, here in two mount name spaces. Regression: `umount` on one waited for
/// the other's session and failed.
#[test]
fn umount_waits_for_no_other_host_with_the_same_path() {
    let test = "umount_waits_for_no_other_host_with_the_same_path";
    let elsewhere = |script: &str| {
        let script = format!("set -e; {script}");
        Command::new("unshare").args(["-m", "--propagation", "private", "sh", "-c", &script]).output()
    };
    if !can_mount(test) || !elsewhere("true").is_ok_and(|output| output.status.success()) {
        eprintln!("SKIPPED {test}: not root, or no unshare");
        return;
    }
    let store = Store::new("same-path", &OPTIONS);
    up_alone(&store, &[]);
    mount(&store);
    let (program, dir, place) = (Store::program(), store.dir.display(), store.mount.display());
    let program = program.get_program().to_str().unwrap();
    let output =
        elsewhere(&format!("umount -l {place}; {program} --dir {dir} mount {place} --detach")).unwrap();
    assert!(output.status.success(), "{output:?}");
    let other = mounted(&String::from_utf8_lossy(&output.stdout));
    assert_eq!(remote_sessions(&store), 2);
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    assert_eq!(remote_sessions(&store), 1, "the other host's mount is still there");
    kill("-TERM", other);
    store.down();
}

/// Regression: `umount` that did not find the instance returned before everything was durable.
#[test]
fn what_was_written_is_durable_when_umount_returns() {
    if !can_mount("what_was_written_is_durable_when_umount_returns") {
        return;
    }
    let store = Store::new("umount-durable", &OPTIONS);
    up_alone(&store, &[]);
    mount(&store);
    let names: Vec<String> = (0..300).map(|number| format!("file-{number}")).collect();
    for name in &names {
        std::fs::write(store.mount.join(name), name).unwrap();
    }
    let mut umount = Store::program();
    let output = umount.arg("umount").arg(&store.mount).current_dir("/").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    store.kill();
    up_alone(&store, &[]);
    mount(&store);
    for name in &names {
        assert_eq!(std::fs::read(store.mount.join(name)).unwrap(), name.as_bytes(), "{name}");
    }
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.down();
}

/// Neither a crash nor the end of the mount loses what programs have written and not synced.
#[test]
fn a_mount_that_ends_after_a_crash_has_lost_nothing() {
    if !can_mount("a_mount_that_ends_after_a_crash_has_lost_nothing") {
        return;
    }
    let store = Store::new("umount-kept", &OPTIONS);
    let place = store.mount.to_str().unwrap().to_owned();
    for round in 0..3 {
        up_alone(&store, &[]);
        mount(&store);
        let file = store.mount.join(format!("file-{round}"));
        std::fs::write(&file, "contents").unwrap();
        store.kill();
        up_alone(&store, &[]);
        let output = store.run(&["umount", &place]);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !said.contains("lost"), "{said}");
        mount(&store);
        assert_eq!(std::fs::read(&file).unwrap(), b"contents");
        store.ok(&["umount", &place]);
        store.down();
    }
}

/// A crash takes the removal of a directory back, and the mount that had removed it removes it again.
/// Regression: there was a directory that the kernel of that mount knew as dead.
#[test]
fn a_directory_whose_removal_a_crash_took_back_is_removed_again() {
    if !can_mount("a_directory_whose_removal_a_crash_took_back_is_removed_again") {
        return;
    }
    let store = Store::new("revived", &OPTIONS);
    up_alone(&store, &[]);
    let process = mount(&store);
    for round in 0..3 {
        let dir = store.mount.join(format!("dir-{round}"));
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("x"), "contents").unwrap();
        File::open(&store.mount).unwrap().sync_all().unwrap();
        let held = File::open(&dir).unwrap();
        std::fs::remove_file(dir.join("x")).unwrap();
        std::fs::remove_dir(&dir).unwrap();
        store.kill();
        up_alone(&store, &[]);
        assert!(!dir.exists(), "round {round}");
        // Whoever is in the removed directory does not reach one that gets its name.
        std::fs::create_dir(&dir).unwrap();
        held.set_permissions(Permissions::from_mode(0o700)).unwrap();
        let seen = held.metadata().unwrap();
        assert_eq!((seen.nlink(), seen.mode() & 0o777), (0, 0o700));
        assert_ne!(std::fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        std::fs::write(dir.join("new"), "contents").unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        drop(held);
    }
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    wait_until("the process ends", || !is_alive(process));
    store.audit();
    store.down();
}

#[test]
fn an_administrator_lists_shows_and_ends_sessions() {
    if !can_mount("an_administrator_lists_shows_and_ends_sessions") {
        return;
    }
    let store = Store::new("sessions", &OPTIONS);
    up_alone(&store, &[]);
    let process = mount(&store);
    let file = File::create(store.mount.join("file")).unwrap();
    file.lock().unwrap();
    let sessions = store.json(&["session", "list"]);
    let sessions = sessions.as_array().unwrap();
    let find = |remote: bool| sessions.iter().find(|session| session["remote"] == remote).unwrap();
    let (own, remote) = (find(false)["id"].to_string(), find(true));
    let id = remote["id"].to_string();
    assert_eq!(
        (&remote["open_inodes"], &remote["locks"], &remote["lease_ms"]),
        (&1.into(), &1.into(), &3000.into())
    );
    let place = store.mount.to_str().unwrap();
    for words in [&["session", "list"][..], &["session", "show", &id]] {
        let said = store.ok(words);
        assert!(said.contains(&format!("process {process}")) && said.contains(place), "{said}");
    }
    refused(&store.run(&["session", "show", "999"]), &["no session 999", "session list"]);
    refused(&store.run(&["session", "end", &own, "--yes"]), &["the instance itself", "umount"]);
    refused(&store.run(&["session", "end", &id]), &["nothing was changed", "--yes"]);
    std::fs::write(store.mount.join("more"), "contents").unwrap();
    let said = store.ok(&["session", "end", &id, "--yes"]);
    assert!(
        said.contains(&format!("session {id} (process {process}")) && said.contains("has ended"),
        "{said}"
    );
    let failed = std::fs::write(store.mount.join("more"), "contents").unwrap_err();
    assert_eq!(failed.raw_os_error(), Some(116), "{failed}");
    assert_eq!(remote_sessions(&store), 0);
    let events = store.ok(&["events"]);
    assert!(events.contains("was ended by an administrator"), "{events}");
    drop(file);
    drop(store.run(&["umount", place]));
    wait_until("the process ends", || !is_alive(process));
    // Its lock went with the session.
    let process = mount(&store);
    File::open(store.mount.join("file")).unwrap().try_lock().unwrap();
    store.ok(&["umount", place]);
    wait_until("the process ends", || !is_alive(process));
    store.audit();
    store.down();
}

/// Regression: `umount` waited a minute for a process that rightly goes on, and failed.
#[test]
fn umount_waits_for_no_process_that_goes_on() {
    if !can_mount("umount_waits_for_no_process_that_goes_on") {
        return;
    }
    let (store, other) = (Store::new("goes-on", &OPTIONS), Store::new("goes-on-too", &OPTIONS));
    up_alone(&store, &[]);
    up_alone(&other, &["--mount", other.mount.to_str().unwrap()]);
    let bound = store.dir.with_extension("bound");
    std::fs::create_dir_all(&bound).unwrap();
    let process = mount(&store);
    let bind = Command::new("mount").arg("--bind").arg(&store.mount).arg(&bound).status();
    if bind.is_ok_and(|status| status.success()) {
        store.ok(&["umount", bound.to_str().unwrap()]);
        assert!(is_alive(process));
        // A directory of it, at another place.
        std::fs::create_dir(store.mount.join("part")).unwrap();
        let part = Command::new("mount").arg("--bind").arg(store.mount.join("part")).arg(&bound).status();
        assert!(part.unwrap().success());
        store.ok(&["umount", store.mount.to_str().unwrap()]);
        assert!(is_alive(process));
        assert!(Command::new("umount").arg(&bound).status().unwrap().success());
        wait_until("the process ends", || !is_alive(process));
        mount(&store);
        std::fs::write(store.mount.join("file"), "still mounted").unwrap();
    } else {
        eprintln!("SKIPPED a part of umount_waits_for_no_process_that_goes_on: no bind mounts");
    }
    std::fs::remove_dir(&bound).unwrap();
    // The instance of `store` does not know this mount.
    store.ok(&["umount", other.mount.to_str().unwrap()]);
    assert_eq!(other.json(&["status"])["mounts"].as_array().unwrap().len(), 0);
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.down();
    other.down();
}

#[test]
fn who_has_no_token_is_told_so() {
    let store = Store::new("token", &OPTIONS);
    if !can_mount("who_has_no_token_is_told_so") {
        return;
    }
    up_alone(&store, &["--tcp", "127.0.0.1:0"]);
    let address = store.json(&["status"])["tcp_address"].as_str().unwrap().to_owned();
    let wrong = store.home.join("wrong");
    std::fs::write(&wrong, "0".repeat(64)).unwrap();
    let try_with = |address: &str, token: &std::path::Path| {
        let mut mount = Store::program();
        mount.arg("mount").arg(&store.mount).args(["--tcp", address, "--token-file"]).arg(token);
        let output = mount.stdin(Stdio::null()).output().unwrap();
        assert!(!output.status.success());
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let said = try_with(&address, &wrong);
    assert!(said.contains("does not know the token"), "{said}");
    let said = try_with("192.0.2.1:9", &wrong);
    assert!(said.contains("no TLS"), "{said}");
    store.down();
    let said = try_with(&address, &wrong);
    assert!(said.contains(&address), "{said}");
    let mut up = Store::program();
    up.arg("up").arg(&store.dir).args(["--tcp", "0.0.0.0:0"]).stdin(Stdio::null());
    let output = up.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("no TLS"), "{said}");
}
