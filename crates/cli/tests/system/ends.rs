//! Tests of the end of a mount: bind mounts of it, mounts over it, the next mount, and a lapsed lease.

use crate::python::Python;
use crate::remote_mount::{OPTIONS, mount_at, up_alone};
use crate::store::{Store, can_mount, is_alive, is_root, shell, signal, wait_until};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

/// Reasons why a mount point and its mount are not the same thing.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Kind {
    /// A bind mount shows the same file system.
    Bound,
    /// The mount was unmounted lazily while a file was open.
    Lazy,
    /// Another file system is mounted over it.
    Over,
}

impl Kind {
    fn make(self, mount: &Path, other: &Path) {
        let (mount, other) = (mount.display(), other.display());
        std::fs::create_dir_all(other.to_string()).unwrap();
        shell(&match self {
            Self::Bound => format!("mount --bind {mount} {other}"),
            Self::Lazy => format!("umount -l {mount}"),
            Self::Over => format!("mount -t tmpfs over {mount} && echo theirs > {mount}/theirs"),
        });
    }

    fn unmake(self, mount: &Path, other: &Path) {
        match self {
            Self::Bound => drop(shell(&format!("umount {}", other.display()))),
            Self::Lazy => {}
            Self::Over => {
                // The other file system must still be there: Penstock may not unmount it.
                assert_eq!(std::fs::read_to_string(mount.join("theirs")).unwrap(), "theirs\n");
                shell(&format!("umount {}", mount.display()));
            }
        }
    }
}

fn may_mount_at_will(test: &str) -> bool {
    let is_root = is_root();
    if !is_root {
        eprintln!("SKIPPED {test}: only root may mount and unmount at will");
    }
    is_root
}

/// Regression: a stop waited forever for users of the mount elsewhere, and unmounted a foreign file system
/// over it.
#[test]
fn a_stop_ends_its_mount_and_nothing_else() {
    let test = "a_stop_ends_its_mount_and_nothing_else";
    if !can_mount(test) || !may_mount_at_will(test) {
        return;
    }
    let store = Store::new("elsewhere", &OPTIONS);
    let other = store.home.join("other");
    for kind in [Kind::Bound, Kind::Lazy, Kind::Over] {
        for own in [true, false] {
            let pid = match own {
                true => {
                    store.up();
                    store.pid().unwrap()
                }
                false => {
                    up_alone(&store, &[]);
                    mount_at(&store, &store.mount)
                }
            };
            let file = OpenOptions::new().create(true).append(true).open(store.mount.join("file")).unwrap();
            std::io::Write::write_all(&mut &file, b"not synced, ").unwrap();
            kind.make(&store.mount, &other);
            std::io::Write::write_all(&mut &file, b"nor this; ").unwrap();
            match own {
                true => store.down(),
                false => {
                    signal("-TERM", pid);
                    wait_until("the mount's process to end", || !is_alive(pid));
                    store.down();
                }
            }
            file.sync_all().expect_err("its mount has ended");
            kind.unmake(&store.mount, &other);
        }
    }
    store.up();
    let found = std::fs::read_to_string(store.mount.join("file")).unwrap();
    assert_eq!(found, "not synced, nor this; ".repeat(6));
    store.down_in_peace();
}

/// Without force, an unmount takes the mount from no user: it reports the reason, and the mount ends with its
/// last user.
#[test]
fn an_unmount_says_why_the_mount_goes_on() {
    let test = "an_unmount_says_why_the_mount_goes_on";
    if !can_mount(test) || !may_mount_at_will(test) {
        return;
    }
    let store = Store::new("goes-on-elsewhere", &OPTIONS);
    let other = store.home.join("other");
    store.up();
    for (kind, says) in [
        (Kind::Bound, "a bind mount"),
        (Kind::Lazy, "detached while in use"),
        (Kind::Over, "mounted over it"),
    ] {
        if store.json(&["status"])["mounts"].as_array().unwrap().is_empty() {
            store.mount_by_rest(&store.mount).unwrap();
        }
        let file = File::create(store.mount.join("file")).unwrap();
        kind.make(&store.mount, &other);
        let file = (kind == Kind::Lazy).then_some(file);
        let output = store.run(&["umount", store.mount.to_str().unwrap()]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(says), "{kind:?}: {said}");
        if let Some(file) = &file {
            file.write_all_at(b"goes on", 0).unwrap();
            file.sync_all().unwrap();
        }
        drop(file);
        kind.unmake(&store.mount, &other);
        if kind == Kind::Over {
            store.ok(&["umount", store.mount.to_str().unwrap()]);
        }
        wait_until("the mount to end", || store.json(&["status"])["mounts"].as_array().unwrap().is_empty());
    }
    store.down_in_peace();
}

/// Regression: a foreign file system that was moved over a mount was unmounted in its place.
#[test]
fn an_unmount_takes_nothing_off_that_was_moved_over_a_mount() {
    let test = "an_unmount_takes_nothing_off_that_was_moved_over_a_mount";
    if !can_mount(test) || !may_mount_at_will(test) {
        return;
    }
    let store = Store::new("moved-over", &OPTIONS);
    up_alone(&store, &[]);
    let area = store.home.join("area");
    let (ours, theirs) = (area.join("with space"), area.join("theirs"));
    let at = area.display();
    shell(&format!("mkdir {at} && mount -t tmpfs area {at} && mount --make-private {at}"));
    shell(&format!("cd {at} && mkdir theirs && mount -t tmpfs theirs theirs && echo precious > theirs/data"));
    let pid = mount_at(&store, &ours);
    shell(&format!("mount --move {} '{}'", theirs.display(), ours.display()));
    let output = store.run(&["umount", ours.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("of kind tmpfs"), "{said}");
    assert_eq!(std::fs::read_to_string(ours.join("data")).unwrap(), "precious\n");
    shell(&format!("umount '{}'", ours.display()));
    store.ok(&["umount", ours.to_str().unwrap()]);
    wait_until("the mount's process to end", || !is_alive(pid));
    shell(&format!("umount {at}"));
    store.down_in_peace();
}

/// Regression: a stop hung when the mount point lies below a mount that does not answer.
#[test]
fn a_stop_waits_for_no_mount_that_its_own_lies_in() {
    let test = "a_stop_waits_for_no_mount_that_its_own_lies_in";
    if !can_mount(test) || !may_mount_at_will(test) {
        return;
    }
    let store = Store::new("lies-in", &OPTIONS);
    let outer_store = Store::new("outer", &OPTIONS);
    up_alone(&outer_store, &[]);
    let outer = mount_at(&outer_store, &outer_store.mount);
    let inner = outer_store.mount.join("inner");
    std::fs::create_dir(&inner).unwrap();
    up_alone(&store, &[]);
    store.mount_by_rest(&inner).unwrap();
    std::fs::write(inner.join("file"), "written").unwrap();
    signal("-STOP", outer);
    // Waits until the kernel's cached entry of the directory above expires.
    std::thread::sleep(std::time::Duration::from_secs(2));
    store.down();
    signal("-CONT", outer);
    // The outer mount's lease has lapsed, so mounts inside it are unreachable.
    shell(&format!("umount -l {}", outer_store.mount.display()));
    store.up();
    assert_eq!(std::fs::read_to_string(store.mount.join("file")).unwrap(), "written");
    store.down_in_peace();
    wait_until("the mount's process to end", || !is_alive(outer));
    outer_store.down();
}

/// Regression: writes of an ended mount were synced while the next mount was running, whose own new writes
/// were lost.
#[test]
fn the_next_mount_keeps_what_it_takes_while_the_last_one_is_settled() {
    if !can_mount("the_next_mount_keeps_what_it_takes_while_the_last_one_is_settled") {
        return;
    }
    let store = Store::new("next", &OPTIONS);
    store.up();
    for round in 0..3 {
        for number in 0..1500 {
            std::fs::write(store.mount.join(format!("before-{round}-{number}")), [1; 20_000]).unwrap();
        }
        shell(&format!("umount {}", store.mount.display()));
        wait_until("the next mount", || store.mount_by_rest(&store.mount).is_ok());
        let names: Vec<_> = (0..20).map(|number| store.mount.join(format!("new-{round}-{number}"))).collect();
        let open = |name| OpenOptions::new().create(true).read(true).write(true).truncate(false).open(name);
        let files: Vec<File> = names.iter().map(|name| open(name).unwrap()).collect();
        let line = |number: u64| format!("{number:>15}\n").into_bytes();
        for number in 0..2000 {
            for file in &files {
                file.write_all_at(&line(number), 16 * number).unwrap();
            }
        }
        files.iter().for_each(|file| file.sync_all().unwrap());
        let all: Vec<u8> = (0..2000).flat_map(line).collect();
        for name in &names {
            assert!(std::fs::read(name).unwrap() == all, "{}", name.display());
        }
    }
    store.down_in_peace();
    store.up();
    for round in 0..3 {
        for number in 0..1500 {
            let found = std::fs::read(store.mount.join(format!("before-{round}-{number}"))).unwrap();
            assert!(found == [1; 20_000], "{round}, {number}: {} bytes", found.len());
        }
    }
    store.down_in_peace();
}

/// Regression: the kernel does not report an aborted connection. Locks and open files of the instance's own
/// mount stayed until the instance restarted.
#[test]
fn locks_and_open_files_go_with_a_mount_that_is_aborted() {
    let test = "locks_and_open_files_go_with_a_mount_that_is_aborted";
    if !can_mount(test) || !may_mount_at_will(test) {
        return;
    }
    let script = "
import fcntl, os, sys
def make(name):
    return os.open(os.path.join(sys.argv[1], name), os.O_CREAT | os.O_RDWR)
bytes, whole, removed = make('bytes'), make('whole'), make('removed')
fcntl.lockf(bytes, fcntl.LOCK_EX)
fcntl.flock(whole, fcntl.LOCK_EX)
os.write(removed, b'x' * (20 << 20))
os.fsync(removed)
os.unlink(os.path.join(sys.argv[1], 'removed'))
print('ready', flush=True)
sys.stdin.read()
";
    let store = Store::new("aborted", &OPTIONS);
    store.up();
    let other = store.home.join("other");
    mount_at(&store, &other);
    let free_bytes = store.free_bytes();
    let Some(mut holder) = Python::start(test, script, &[&store.mount]) else { return };
    holder.says("ready");
    // `umount -f` aborts the connection, and reports that the mount is in use.
    let aborted = Command::new("umount").arg("-f").arg(&store.mount).output().unwrap();
    assert!(!aborted.status.success(), "{aborted:?}");
    holder.close_input();
    wait_until("the holder to end", || holder.ended().is_some());
    let lock = |how: &str, name: &str| {
        let script =
            format!("import fcntl, sys; fcntl.{how}(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)");
        let mut python = Command::new("python3");
        python.args(["-c", &script]).arg(other.join(name)).stderr(Stdio::null());
        python.status().unwrap().success()
    };
    wait_until("the lock of bytes", || lock("lockf", "bytes"));
    wait_until("the lock of a file", || lock("flock", "whole"));
    wait_until("the space of the removed file", || store.free_bytes() + (10 << 20) > free_bytes);
    store.ok(&["umount", other.to_str().unwrap()]);
    store.down();
}

/// Regression: a mount that was stopped for longer than its lease served old pages forever.
#[test]
fn pages_go_with_the_lease() {
    if !can_mount("pages_go_with_the_lease") {
        return;
    }
    // Runs in a separate process: a child of this one would inherit its open files, and closing them waits
    // for their mount.
    let script = "
import os, sys, time
fd = os.open(sys.argv[1], os.O_RDONLY)
assert os.pread(fd, 1, 5000) == b'a'
print('ready', flush=True)
try:
    while os.pread(fd, 1, 5000) == b'a':
        time.sleep(.01)
except OSError as error:
    print(error)
";
    for others in [false, true] {
        let store = Store::new(&format!("lapse-{others}"), &OPTIONS);
        up_alone(&store, &[]);
        let other = store.home.join("other");
        if others {
            mount_at(&store, &other);
        }
        let pid = mount_at(&store, &store.mount);
        let path = store.mount.join("file");
        std::fs::write(&path, [b'a'; 12_288]).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let Some(mut reader) = Python::start("pages_go_with_the_lease", script, &[&path]) else { break };
        reader.says("ready");
        signal("-STOP", pid);
        if !others {
            mount_at(&store, &other);
        }
        let theirs = OpenOptions::new().write(true).open(other.join("file")).unwrap();
        theirs.write_all_at(&[b'b'; 12_288], 0).unwrap();
        theirs.sync_all().unwrap();
        drop(theirs);
        signal("-CONT", pid);
        // An error is acceptable too.
        wait_until("the read to show what was written", || reader.ended().is_some());
        assert!(reader.ended().is_some_and(|status| status.success()));
        // The session has ended, and every operation of this mount fails from now on.
        store.ok(&["umount", store.mount.to_str().unwrap()]);
        mount_at(&store, &store.mount);
        assert!(std::fs::read(&path).unwrap() == [b'b'; 12_288]);
        for mount in [&store.mount, &other] {
            store.ok(&["umount", mount.to_str().unwrap()]);
        }
        store.down();
    }
}

/// Regression: a program released locks while its mount was reporting all of them again after a restart. The
/// service processed the release before the report, and kept the locks forever.
#[test]
fn locks_that_are_given_up_over_a_restart_stay_so() {
    let test = "locks_that_are_given_up_over_a_restart_stay_so";
    if !can_mount(test) {
        return;
    }
    // Enough locks to fill several messages.
    const GIVES_UP: &str = "
import fcntl, random, sys, time
files = [open(f'{sys.argv[1]}/locked{number}', 'w+') for number in range(40)]
for f in files:
    for byte in range(400):
        fcntl.lockf(f, fcntl.LOCK_SH, 1, 2 * byte)
print('locked', flush=True)
sys.stdin.readline()
all = [(f, byte) for f in files for byte in range(400)]
random.shuffle(all)
for f, byte in all:
    fcntl.lockf(f, fcntl.LOCK_UN, 1, 2 * byte)
    time.sleep(0.0001)
print('given up', flush=True)
";
    const TAKES: &str = "
import fcntl, sys
for number in range(40):
    f = open(f'{sys.argv[1]}/locked{number}', 'r+')
    fcntl.lockf(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
print('free', flush=True)
";
    let store = Store::new("given-up", &OPTIONS);
    up_alone(&store, &[]);
    mount_at(&store, &store.mount);
    for _ in 0..2 {
        let Some(mut holds) = Python::start(test, GIVES_UP, &[&store.mount]) else { break };
        holds.says("locked");
        store.kill();
        holds.tell();
        up_alone(&store, &[]);
        holds.says("given up");
        Python::start(test, TAKES, &[&store.mount]).unwrap().says("free");
    }
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    store.down();
}
