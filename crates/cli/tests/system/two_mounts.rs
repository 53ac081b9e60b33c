//! Tests two mounts of one file system by two processes, used at the same time.

use crate::python::Python;
use crate::remote_mount::{OPTIONS, kill, mount_at, send};
use crate::store::{Store, can_mount, wait_until};
use rustix::fs::{FlockOperation, fcntl_lock};
use rustix::process::Signal;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

const RECORD: usize = 32;

/// Creates a store with the instance's own mount and a second one in its own process. Returns that process's
/// id too.
pub(crate) fn two(name: &str) -> (Store, [PathBuf; 2], u32) {
    let store = Store::new(name, &OPTIONS);
    store.up();
    let other = store.home.join("other");
    let pid = mount_at(&store, &other);
    let mounts = [store.mount.clone(), other];
    (store, mounts, pid)
}

pub(crate) fn end(store: &Store, mounts: &[PathBuf; 2]) {
    store.ok(&["umount", mounts[1].to_str().unwrap()]);
    store.audit();
    store.down();
}

fn write_new(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn two_mounts_show_one_file_system() {
    if !can_mount("two_mounts_show_one_file_system") {
        return;
    }
    let (store, mounts, other) = two("two");
    appends_from_both(&mounts);
    renames_against_opens(&mounts);
    locks_keep_others_out(&mounts);
    mapped_files(&mounts);
    writes_beside_stores(&mounts);
    appends_beside_stores(&mounts);
    growth_is_seen_without_a_look(&mounts);
    programs_with_maps_take_turns(&mounts);
    growth_is_known_before_it_matters(&mounts);
    appends_under_locks_are_at_the_end(&mounts);
    cached_names_are_never_old(&store, &mounts);
    listings_are_never_old(&mounts);
    moved_names_are_never_old(&store, &mounts);
    // A mount that is killed loses its leases and locks.
    let path = |at: usize| mounts[at].join("held");
    write_new(&path(0), &[1; 100_000]);
    let theirs = OpenOptions::new().read(true).write(true).open(path(1)).unwrap();
    fcntl_lock(&theirs, FlockOperation::LockExclusive).unwrap();
    theirs.write_all_at(&[2; 5000], 0).unwrap();
    theirs.sync_all().unwrap();
    theirs.write_all_at(&[3; 5000], 50_000).unwrap();
    kill("-9", other);
    let mine = OpenOptions::new().read(true).write(true).open(path(0)).unwrap();
    fcntl_lock(&mine, FlockOperation::LockExclusive).unwrap();
    let mut found = vec![0; 100_000];
    mine.read_exact_at(&mut found, 0).unwrap();
    assert!(found[..5000] == [2; 5000] && found[5000..50_000] == [1; 45_000]);
    mine.write_all_at(&[4; 10], 0).unwrap();
    drop((mine, theirs));
    let third = mount_at(&store, &mounts[1]);
    assert_eq!(std::fs::read(path(1)).unwrap()[..11], [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 2]);
    assert!(third > 0);
    capabilities_that_another_gave_go(&store, &mounts);
    store.audit();
    store.down();
}

/// A write removes a program's capabilities from a file, even if another mount set them between two periods
/// in which this mount was alone.
fn capabilities_that_another_gave_go(store: &Store, mounts: &[PathBuf; 2]) {
    let name = "program";
    let append = || {
        let mut file = OpenOptions::new().create(true).append(true).open(mounts[0].join(name)).unwrap();
        file.write_all(b"more").unwrap();
    };
    let leaves = || {
        store.ok(&["umount", mounts[1].to_str().unwrap()]);
        // Waits until the remaining mount knows that it is alone. If it learns this later, it checks the
        // capabilities anyway.
        std::thread::sleep(Duration::from_secs(2));
    };
    leaves();
    append();
    append();
    mount_at(store, &mounts[1]);
    let mut capability = [0; 20];
    (capability[0], capability[3], capability[5]) = (1, 2, 0x20);
    let (there, flags) = (mounts[1].join(name), rustix::fs::XattrFlags::empty());
    rustix::fs::setxattr(&there, "security.capability", &capability, flags).unwrap();
    leaves();
    append();
    let left = rustix::fs::getxattr(mounts[0].join(name), "security.capability", &mut [0; 64][..]);
    assert_eq!(left, Err(rustix::io::Errno::NODATA));
}

/// The kernel of a mount caches names and attributes beside another mount, and what that one changes is seen
/// from its reply on.
fn cached_names_are_never_old(store: &Store, mounts: &[PathBuf; 2]) {
    for round in 0..28u32 {
        // A directory of its own: one that another mount has changed is not cached for a while.
        let dir = format!("names-{round}");
        let [here, there] = [0, 1].map(|at| mounts[(at + round as usize / 7) % 2].join(&dir));
        std::fs::create_dir(&here).unwrap();
        for name in ["gone", "moved", "changed", "linked"] {
            write_new(&here.join(name), name.as_bytes());
        }
        let look = |name: &str| std::fs::metadata(here.join(name)).ok();
        for _ in 0..3 {
            assert!(["gone", "moved", "changed", "linked"].into_iter().all(|name| look(name).is_some()));
            assert!(look("new").is_none());
        }
        if round == 0 {
            let sessions: Vec<serde_json::Value> =
                serde_json::from_str(&store.ok(&["session", "list", "--json"])).unwrap();
            let cached = |session: &serde_json::Value| session["attribute_leases"].as_u64().unwrap();
            assert!(sessions.iter().map(cached).sum::<u64>() > 0, "nothing is cached: {sessions:?}");
        }
        // The kernel goes on using a name that it has where it is renamed to.
        let inner = here.join("inner");
        std::fs::create_dir(&inner).unwrap();
        write_new(&inner.join("far"), b"far");
        assert!(std::fs::metadata(inner.join("far")).is_ok());
        std::fs::rename(inner.join("far"), here.join("near")).unwrap();
        let (links, before) = (look("linked").unwrap().nlink(), std::fs::metadata(&here).unwrap());
        match round % 7 {
            6 => std::fs::remove_file(there.join("near")).unwrap(),
            0 => std::fs::remove_file(there.join("gone")).unwrap(),
            1 => std::fs::rename(there.join("moved"), there.join("gone")).unwrap(),
            2 => std::fs::set_permissions(there.join("changed"), PermissionsExt::from_mode(0o611)).unwrap(),
            3 => std::fs::hard_link(there.join("linked"), there.join("new")).unwrap(),
            4 => std::fs::write(there.join("changed"), [1; 12345]).unwrap(),
            _ => std::fs::create_dir(there.join("new")).unwrap(),
        }
        let (after, changed) = (std::fs::metadata(&here).unwrap(), look("changed").unwrap());
        match round % 7 {
            6 => assert!(look("near").is_none()),
            0 => assert!(look("gone").is_none()),
            1 => assert!(look("moved").is_none() && std::fs::read(here.join("gone")).unwrap() == b"moved"),
            2 => assert_eq!(changed.mode() & 0o777, 0o611),
            3 => assert!(look("linked").unwrap().nlink() == links + 1 && look("new").is_some()),
            4 => assert_eq!(changed.len(), 12345),
            _ => assert!(after.nlink() == before.nlink() + 1 && look("new").is_some()),
        }
        assert!(matches!(round % 7, 2 | 4) || after.modified().unwrap() > before.modified().unwrap());
    }
}

/// Regression: the kernel showed a listing that it had cached as long as the time of the directory was the
/// same. A user may set that back. A program that has the directory open, and begins anew, shows the kernel
/// no newer time.
fn listings_are_never_old(mounts: &[PathBuf; 2]) {
    for round in 0..3 {
        let [here, there] = [0, 1].map(|at| mounts[at].join(format!("listed-{round}")));
        std::fs::create_dir(&there).unwrap();
        ["stays", "goes"].into_iter().for_each(|name| write_new(&there.join(name), b""));
        let time = std::fs::metadata(&there).unwrap().modified().unwrap();
        let mut open = rustix::fs::Dir::read_from(File::open(&here).unwrap()).unwrap();
        let mut again = || {
            open.rewind();
            let name = |entry: rustix::io::Result<rustix::fs::DirEntry>| {
                entry.unwrap().file_name().to_str().unwrap().to_owned()
            };
            let mut names: Vec<String> =
                open.by_ref().map(name).filter(|name| !name.starts_with('.')).collect();
            names.sort();
            names
        };
        let mut wanted = ["goes", "stays"].map(String::from).to_vec();
        (0..3).for_each(|_| assert_eq!(again(), wanted));
        for number in 0..3 {
            let new = format!("new-{number}");
            write_new(&there.join(&new), b"");
            if number == 0 {
                std::fs::remove_file(there.join("goes")).unwrap();
                wanted.remove(0);
            }
            File::open(&there).unwrap().set_modified(time).unwrap();
            wanted.push(new);
            wanted.sort();
            assert_eq!(again(), wanted, "in a directory that is open, change {number}");
            let by_path = std::fs::read_dir(&here).unwrap().map(|entry| entry.unwrap().file_name());
            let mut by_path: Vec<String> = by_path.map(|name| name.into_string().unwrap()).collect();
            by_path.sort();
            assert_eq!(by_path, wanted, "by path, change {number}");
        }
    }
}

/// Regression: a rename waited for another mount while a program looked at the old name. The kernel used the
/// new name for as long as the last look allowed, and nobody knew.
fn moved_names_are_never_old(store: &Store, mounts: &[PathBuf; 2]) {
    let third = store.home.join("third");
    let pid = mount_at(store, &third);
    let [here, there, slow] = [&mounts[0], &mounts[1], &third].map(|mount| mount.join("moves"));
    std::fs::create_dir(&here).unwrap();
    for round in 0..3 {
        write_new(&here.join("old"), b"moves");
        assert!(std::fs::metadata(slow.join("old")).is_ok() && std::fs::metadata(there.join("old")).is_ok());
        // It has a lease on the directory, and does not answer.
        send(Signal::STOP, pid);
        let is_renamed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_renamed.load(Relaxed) {
                    // It is there, or has just gone.
                    let _ = std::fs::metadata(there.join("old"));
                }
            });
            scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(1800));
                send(Signal::CONT, pid);
            });
            std::fs::rename(there.join("old"), there.join("new")).unwrap();
            is_renamed.store(true, Relaxed);
        });
        assert!(std::fs::metadata(there.join("new")).is_ok());
        std::fs::remove_file(here.join("new")).unwrap();
        assert!(std::fs::metadata(there.join("new")).is_err(), "round {round}: it was removed");
    }
    store.ok(&["umount", third.to_str().unwrap()]);
}

fn appends_from_both(mounts: &[PathBuf; 2]) {
    write_new(&mounts[0].join("log"), b"");
    let count = 300u64;
    std::thread::scope(|scope| {
        for (who, mount) in mounts.iter().enumerate() {
            scope.spawn(move || {
                let mut file = OpenOptions::new().append(true).open(mount.join("log")).unwrap();
                for number in 0..count {
                    file.write_all(format!("{who} {number:>29}\n").as_bytes()).unwrap();
                }
            });
        }
    });
    let all = std::fs::read_to_string(mounts[1].join("log")).unwrap();
    assert_eq!(all, std::fs::read_to_string(mounts[0].join("log")).unwrap());
    assert_eq!(all.len(), 2 * count as usize * RECORD);
    let mut next = [0u64; 2];
    for line in all.lines() {
        let (who, number) = line.split_once(' ').unwrap();
        let next = &mut next[who.parse::<usize>().unwrap()];
        assert_eq!(number.trim().parse::<u64>().unwrap(), *next);
        *next += 1;
    }
}

/// A name that another mount replaces by rename always opens to one complete version, never to an older one
/// than before.
fn renames_against_opens(mounts: &[PathBuf; 2]) {
    let version = |number: u64| number.to_le_bytes().repeat(3000);
    write_new(&mounts[0].join("name"), &version(0));
    let last = 60u64;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=last {
                write_new(&mounts[0].join("name.new"), &version(number));
                std::fs::rename(mounts[0].join("name.new"), mounts[0].join("name")).unwrap();
            }
        });
        scope.spawn(|| {
            let (mut seen, start) = (0, Instant::now());
            while seen < last && start.elapsed() < Duration::from_secs(120) {
                let mut bytes = Vec::new();
                File::open(mounts[1].join("name")).unwrap().read_to_end(&mut bytes).unwrap();
                let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert!(bytes == version(number) && number >= seen, "{number} after {seen}");
                seen = number;
            }
            assert_eq!(seen, last);
        });
    });
}

fn locks_keep_others_out(mounts: &[PathBuf; 2]) {
    // In each round, increments a counter in the file under a lock. One file is used with fcntl locks,
    // another with flock.
    for kind in ["fcntl", "flock"] {
        write_new(&mounts[0].join(kind), &0u64.to_le_bytes());
        let rounds = 40;
        std::thread::scope(|scope| {
            for mount in mounts.iter().chain(mounts) {
                scope.spawn(move || {
                    for _ in 0..rounds {
                        // POSIX locks belong to the process, so threads of this one would not exclude each
                        // other.
                        let _turn = (kind == "fcntl").then(|| turn_of(mount));
                        let file = OpenOptions::new().read(true).write(true).open(mount.join(kind)).unwrap();
                        match kind {
                            "fcntl" => fcntl_lock(&file, FlockOperation::LockExclusive).unwrap(),
                            _ => file.lock().unwrap(),
                        }
                        let mut bytes = [0; 8];
                        file.read_exact_at(&mut bytes, 0).unwrap();
                        file.write_all_at(&(u64::from_le_bytes(bytes) + 1).to_le_bytes(), 0).unwrap();
                        // close() releases the lock.
                    }
                });
            }
        });
        let found = std::fs::read(mounts[1].join(kind)).unwrap();
        assert_eq!(u64::from_le_bytes(found.try_into().unwrap()), 4 * rounds, "{kind}");
    }
    // A lock that conflicts with the other mount's, and a wait for it that a signal ends.
    let held = File::open(mounts[0].join("flock")).unwrap();
    held.lock().unwrap();
    let tried = File::open(mounts[1].join("flock")).unwrap();
    assert!(matches!(tried.try_lock(), Err(std::fs::TryLockError::WouldBlock)));
    let mut waits = Command::new("flock");
    waits.arg(mounts[1].join("flock")).arg("true");
    let mut waits = waits.spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    assert!(waits.try_wait().unwrap().is_none(), "it waits for the lock of the other mount");
    assert!(Command::new("kill").arg(waits.id().to_string()).status().unwrap().success());
    assert!(!waits.wait().unwrap().success());
    held.unlock().unwrap();
    tried.lock().unwrap();
}

/// Runs programs on both mounts that read a file and then write part of a page of it.
///
/// Regression: the kernel had the page locked until the write had its lease, which each mount needed from the
/// page of the other.
fn read_then_write(mounts: &[PathBuf; 2], period: Duration) {
    write_new(&mounts[0].join("turns"), &[1; 50_000]);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for mount in mounts.iter().chain(mounts) {
            scope.spawn(move || {
                while start.elapsed() < period {
                    let mut bytes = [0; 100];
                    File::open(mount.join("turns")).unwrap().read_exact_at(&mut bytes, 0).unwrap();
                    let file = OpenOptions::new().read(true).write(true).open(mount.join("turns")).unwrap();
                    file.write_all_at(&[2; 100], 10).unwrap();
                    file.read_exact_at(&mut bytes, 40_000).unwrap();
                }
            });
        }
    });
}

/// Returns one mutex for each mount, within this process.
fn turn_of(mount: &Path) -> std::sync::MutexGuard<'static, ()> {
    static TURNS: [Mutex<()>; 2] = [Mutex::new(()), Mutex::new(())];
    TURNS[usize::from(mount.ends_with("other"))].lock().unwrap()
}

/// Runs a script with both mounts as its arguments.
fn run_python(what: &str, script: &str, mounts: &[PathBuf; 2]) {
    let mut python = Command::new("python3");
    let done = python.args(["-c", script]).args(mounts).stdin(Stdio::null()).output();
    match done {
        Ok(done) => assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr)),
        Err(error) if error.kind() == ErrorKind::NotFound => eprintln!("SKIPPED {what}: no python3"),
        Err(error) => panic!("python3: {error}"),
    }
}

/// Changes through a map on one mount are visible on the other, both in its map and by read.
fn mapped_files(mounts: &[PathBuf; 2]) {
    let script = "
import mmap, os, sys
a, b = (os.open(os.path.join(m, 'mapped'), os.O_RDWR | os.O_CREAT) for m in sys.argv[1:])
os.pwrite(a, b'-' * 8192, 0)
ma, mb = mmap.mmap(a, 8192), mmap.mmap(b, 8192)
for n in range(100):
    word = b'%08d' % n
    os.pwrite(a, word, 4090)
    assert mb[4090:4098] == word, (n, mb[4090:4098])
    mb[100:108] = word
    mb.flush()
    assert ma[100:108] == word and os.pread(a, 8, 100) == word, n
    os.ftruncate(b, 8192 + n)
    assert os.fstat(a).st_size == 8192 + n
# The last byte that a program has stored, while the other mount reads and the kernel asks for the size.
os.ftruncate(a, 8192)
for n in range(2000):
    assert os.pread(b, 1, 0) == b'-'
    ma[8191] = n % 251
    os.fstat(a)
    assert ma[8191] == n % 251, n
    ma.flush()
    assert os.pread(b, 1, 8191)[0] == n % 251, n
# Each changes bytes of its own of one page, all the time.
children = []
for fd, at in ((a, 0), (b, 2048)):
    child = os.fork()
    if child == 0:
        os.close(fd)
        fd = os.open(os.path.join(sys.argv[1 if at == 0 else 2], 'mapped'), os.O_RDWR)
        pages = mmap.mmap(fd, 8192)
        for n in range(1, 400):
            pages[at:at + 8] = n.to_bytes(8, 'little')
            pages.flush()
            if int.from_bytes(pages[at:at + 8], 'little') != n:
                os._exit(1)
        os._exit(0)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0, 'a store that was synced is gone'
";
    run_python("mapped files", script, mounts);
}

/// Programs write, punch, zero and copy bytes of a page while others on the same mount store into other bytes
/// of it. All find their last values, with and without readers on the other mount.
fn writes_beside_stores(mounts: &[PathBuf; 2]) {
    let script = "
import ctypes, mmap, os, signal, sys, time
ROUNDS, STORERS = 60, 2
PUNCH, ZERO = 3, 17
libc = ctypes.CDLL(None, use_errno=True)
def change(fd, mode):
    long = ctypes.c_long
    assert libc.fallocate(fd, mode, long(0), long(64)) == 0, os.strerror(ctypes.get_errno())
def store(path, at, lost):
    pages = mmap.mmap(os.open(path, os.O_RDWR), 8192)
    last = 0
    while True:
        if pages[512 + at] != last:
            lost[at] = 1
        last = (last + 1) % 251
        pages[512 + at] = last
def read(path):
    fd = os.open(path, os.O_RDONLY)
    while True:
        os.pread(fd, 4096, 0)
def start(act, *args):
    child = os.fork()
    if child == 0:
        act(*args)
    return child
for readers in (0, 1):
    mine, theirs, source = (os.path.join(m, name) for m, name in
        ((sys.argv[1], 'beside'), (sys.argv[2], 'beside'), (sys.argv[1], 'source')))
    with open(mine, 'wb') as file:
        file.write(bytes(8192))
    lost = mmap.mmap(-1, 4096)
    children = [start(store, mine, at, lost) for at in range(STORERS)]
    children += [start(read, theirs) for _ in range(readers)]
    fd, source = os.open(mine, os.O_RDWR), os.open(source, os.O_RDWR | os.O_CREAT)
    try:
        for n in range(1, ROUNDS + 1):
            wanted = bytes([n % 251]) * 64
            if n % 4 == 3:
                assert os.pwrite(source, wanted, 0) == 64
                assert os.copy_file_range(source, fd, 64, 0, 0) == 64
            else:
                assert os.pwrite(fd, wanted, 0) == 64
            if n % 4 in (1, 2):
                wanted = bytes(64)
                change(fd, PUNCH if n % 4 == 1 else ZERO)
            for _ in range(2):
                assert os.pread(fd, 64, 0) == wanted, (n, readers)
                # A page from before may be written back.
                time.sleep(n % 3 * 0.005)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
    assert lost[:STORERS] == bytes(STORERS), (readers, 'a store was lost')
";
    run_python("writes beside stores", script, mounts);
}

/// A program appends while others on both mounts read the file, and store into maps of the appended records,
/// in the last page too. Everything is kept, and readers find only appended records.
fn appends_beside_stores(mounts: &[PathBuf; 2]) {
    let script = "
import mmap, os, signal, sys, time
RECORD, ROUNDS = 128, 400
mine, theirs = (os.path.join(m, 'appended') for m in sys.argv[1:])
os.close(os.open(mine, os.O_RDWR | os.O_CREAT | os.O_TRUNC))
shared = mmap.mmap(-1, 4096)
def get(at):
    return int.from_bytes(shared[8 * at:8 * at + 8], 'little')
def put(at, value):
    shared[8 * at:8 * at + 8] = value.to_bytes(8, 'little')
ENDS, ALL = 0, 1
def record(n):
    return b'record %020d' % n
def store(path, at):
    # Into a part of its own of each record that is there by fstat.
    fd, done, pages = os.open(path, os.O_RDWR), 0, None
    while not get(ENDS) or done < get(ALL):
        there = os.fstat(fd).st_size // RECORD
        if there > done:
            pages = mmap.mmap(fd, there * RECORD)
        while done < there:
            assert pages[done * RECORD:done * RECORD + 27] == record(done), (at, done, 'an append is not seen')
            pages[done * RECORD + 32 * at:done * RECORD + 32 * at + 27] = record(done)
            done += 1
    pages.flush()
def follow(path):
    fd, done = os.open(path, os.O_RDONLY), 0
    while not get(ENDS):
        found = os.pread(fd, RECORD, done * RECORD)
        if len(found) == RECORD:
            assert found[:27] == record(done), (path, done, found[:27], 'what was appended reads as something else')
            done += 1
def read_direct(path):
    fd, pages = os.open(path, os.O_RDONLY | os.O_DIRECT), mmap.mmap(-1, 65536)
    while not get(ENDS):
        os.preadv(fd, [pages], 0)
def start(act, *args):
    child = os.fork()
    if child == 0:
        try:
            act(*args)
        except BaseException as error:
            print(act.__name__, args, repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return child
children = [start(store, mine, 1), start(store, mine, 2), start(store, theirs, 3), start(read_direct, mine)]
children += [start(follow, path) for path in (mine, theirs)]
fd = os.open(mine, os.O_WRONLY | os.O_APPEND)
begun = time.monotonic()
try:
    for n in range(ROUNDS):
        os.write(fd, record(n) + bytes(RECORD - 27))
        if time.monotonic() > begun + 8:
            break
finally:
    put(ALL, n + 1)
    put(ENDS, 1)
    failed = [child for child in children if os.waitpid(child, 0)[1]]
assert not failed
os.fsync(fd)
for path in (mine, theirs):
    with open(path, 'rb') as file:
        found = file.read()
    assert len(found) == (n + 1) * RECORD
    for at in range(n + 1):
        for part in range(4):
            begin = at * RECORD + 32 * part
            assert found[begin:begin + 27] == record(at), (path, at, part, found[begin:begin + 27])
";
    run_python("appends beside stores", script, mounts);
}

/// An instance mounts in a directory of another mount of its own store: examining that directory needs the
/// instance.
#[test]
fn an_instance_mounts_inside_another_mount() {
    if !can_mount("an_instance_mounts_inside_another_mount") {
        return;
    }
    let (store, mounts, _) = two("inside");
    store.ok(&["umount", mounts[0].to_str().unwrap()]);
    let inside = mounts[1].join("inside");
    store.mount_by_rest(&inside).unwrap();
    write_new(&inside.join("file"), &[1; 5000]);
    assert_eq!(std::fs::read(mounts[1].join("file")).unwrap(), [1; 5000]);
    wait_until("it to be unmounted", || store.run(&["umount", inside.to_str().unwrap()]).status.success());
    end(&store, &mounts);
}

/// Regression: a mount was in use for who unmounted it because somebody looked at it.
#[test]
fn a_mount_at_which_somebody_looks_is_unmounted() {
    if !can_mount("a_mount_at_which_somebody_looks_is_unmounted") {
        return;
    }
    let (store, mounts, _) = two("looks");
    let look = std::fs::File::open(&mounts[0]).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(500));
            drop(look);
        });
        store.ok(&["umount", mounts[0].to_str().unwrap()]);
    });
    store.mount_by_rest(&mounts[0]).unwrap();
    end(&store, &mounts);
}

/// First part of a script: programs on both mounts store into maps of the same files as fast as they can.
const STORES: &str = "
import mmap, os, signal, sys, time
FILES = 64
def start(name, after_round):
    for number in range(FILES):
        with open(os.path.join(sys.argv[1], name % number), 'wb') as file:
            file.write(b'-' * 65536)
    children = []
    for at in range(2 * FILES):
        child = os.fork()
        if child == 0:
            fd = os.open(os.path.join(sys.argv[1 + at % 2], name % (at // 2)), os.O_RDWR)
            pages = mmap.mmap(fd, 65536)
            for n in range(1, 1 << 40):
                for page in range(16):
                    pages[4096 * page + at % 2] = n % 251
                after_round(at, n, fd)
        children.append(child)
    return children
def end(children):
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        os.waitpid(child, 0)
";

/// Many programs on each mount store into maps of the same files as fast as they can: none waits until the
/// others end.
fn programs_with_maps_take_turns(mounts: &[PathBuf; 2]) {
    let script = "
ROUNDS = 3
rounds = mmap.mmap(-1, 8 * 2 * FILES)
count = lambda at: int.from_bytes(rounds[8 * at:8 * at + 8], 'little')
def grow_and_count(at, n, fd):
    if n % 7 == 0:
        os.pwrite(fd, b'x' * 8, 65536 + n % 100 * 8)
    rounds[8 * at:8 * at + 8] = n.to_bytes(8, 'little')
children = start('turns%d', grow_and_count)
try:
    time.sleep(1)
    begun, ends = [count(at) for at in range(2 * FILES)], time.monotonic() + 120
    waiting = list(range(2 * FILES))
    while waiting and time.monotonic() < ends:
        time.sleep(0.1)
        waiting = [at for at in waiting if count(at) < begun[at] + ROUNDS]
finally:
    end(children)
assert not waiting, 'these had no turn: %s' % waiting
for number in range(FILES):
    os.unlink(os.path.join(sys.argv[2], 'turns%d' % number))
";
    run_python("maps of many programs", &format!("{STORES}{script}"), mounts);
}

/// Regression: when a mount was killed while its kernel dropped pages for the other one, threads that waited
/// for pages kept the connection open, and programs on the mount hung forever.
#[test]
fn programs_end_when_their_mount_is_killed() {
    if !can_mount("programs_end_when_their_mount_is_killed") {
        return;
    }
    let (store, mounts, other) = two("killed");
    let script = "
children = start('file%d', lambda at, n, fd: None)
print('ready', flush=True)
sys.stdin.read()
end(children)
";
    let test = "programs_end_when_their_mount_is_killed";
    let Some(mut programs) = Python::start(test, &format!("{STORES}{script}"), &mounts) else {
        store.down();
        return;
    };
    programs.says("ready");
    std::thread::sleep(Duration::from_secs(3));
    // The same holds after the guard was killed, because another guard is started.
    let guard = || {
        let threads = std::fs::read_dir(format!("/proc/{other}/task")).unwrap().flatten();
        let children =
            threads.filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok());
        children.collect::<String>().trim().parse::<u32>().ok()
    };
    let first = guard().expect("a guard");
    kill("-9", first);
    // The mount may be killed before the next guard has asked for the signal of its end.
    let give_up = Instant::now() + Duration::from_secs(60);
    let next = loop {
        match guard().filter(|another| *another != first) {
            Some(next) => break next,
            None => assert!(Instant::now() < give_up, "another guard"),
        }
    };
    send(Signal::STOP, next);
    send(Signal::KILL, other);
    std::thread::sleep(Duration::from_millis(500));
    send(Signal::CONT, next);
    let is_gone = || {
        let threads = std::fs::read_dir(format!("/proc/{other}/task")).into_iter().flatten().flatten();
        let states = threads.map(|thread| std::fs::read_to_string(thread.path().join("stat")));
        states.flatten().all(|stat| stat.rsplit(')').next().unwrap_or_default().starts_with(" Z"))
    };
    wait_until("the killed mount's threads to end", is_gone);
    programs.close_input();
    wait_until("its programs to end", || programs.ended().is_some());
    mount_at(&store, &mounts[1]);
    assert_eq!(std::fs::metadata(mounts[1].join("file0")).unwrap().len(), 65_536);
    end(&store, &mounts);
}

/// Descriptors and a map from before another mount extended the file reach its new end without a read or a
/// request for attributes: for sendfile and page faults the kernel does not ask for the size.
fn growth_is_seen_without_a_look(mounts: &[PathBuf; 2]) {
    let script = "
import ctypes, mmap, os, sys, time
mine, theirs = (os.path.join(m, 'grows') for m in sys.argv[1:])
with open(mine, 'wb') as made:
    made.write(b'-' * 100)
out = os.memfd_create('out')
fresh, read = (os.open(theirs, os.O_RDONLY) for _ in range(2))
assert os.pread(read, 200, 0) == b'-' * 100
# Not as Python does it, which asks for the size.
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
pages = libc.mmap(None, ctypes.c_size_t(1 << 20), mmap.PROT_READ, mmap.MAP_SHARED, fresh, ctypes.c_long(0))
assert ctypes.string_at(pages + 99, 1) == b'-'
grower = os.open(mine, os.O_WRONLY)
for size in (200, 5000, 1000000):
    last = bytes([size % 251])
    os.pwrite(grower, last * (size - 100), 100)
    for fd in (fresh, read):
        for _ in range(600):
            got = os.sendfile(out, fd, size - 1, 1)
            if got:
                break
            time.sleep(0.05)
        assert got == 1, (size, 'sendfile ends where the file ended')
        assert os.pread(out, 1, os.lseek(out, 0, os.SEEK_CUR) - 1) == last, size
    child = os.fork()
    if child == 0:
        os._exit(ctypes.string_at(pages + size - 1, 1) != last)
    assert os.waitpid(child, 0)[1] == 0, (size, 'a map ends where the file ended')
";
    run_python("growth", script, mounts);
}

/// A program that changes a file just after another mount extended it loses and overwrites nothing. Stores
/// through a map beyond the old end are written back, the end after its own append is the true end, and under
/// a lock so is the end at which the kernel itself appends.
fn growth_is_known_before_it_matters(mounts: &[PathBuf; 2]) {
    let script = "
import ctypes, fcntl, mmap, os, sys
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for n in range(12):
    mine, theirs = (os.path.join(m, 'known-%d' % n) for m in sys.argv[1:])
    with open(mine, 'wb') as made:
        made.write(b'1' * 9000)
    a, end_of_a = os.open(mine, os.O_RDWR), os.open(mine, os.O_RDWR | os.O_APPEND)
    b = os.open(theirs, os.O_RDWR | os.O_APPEND)
    size = 9000
    def grows():
        global size
        os.write(b, b'2' * 2000)
        size += 2000
    # Not as Python does it, which asks for the size.
    pages = libc.mmap(None, 1 << 16, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, a, ctypes.c_long(0))
    if n % 2:
        ctypes.string_at(pages + 8999, 1)
    grows()
    last = n % 3 == 0
    at = size - 8 if last else 10500
    # An ordinary user's mount may not ask.
    if os.geteuid() == 0:
        ctypes.memmove(pages + at, b'stored!!', 8)
        assert libc.msync(pages, 12288, 4) == 0
        os.fsync(a)
        for fd in (a, b):
            assert os.pread(fd, 9, at - 1) == b'2stored!!', (n, os.pread(fd, 9, at - 1))
    for _ in range(3):
        grows()
        os.write(end_of_a, b'a' * 10)
        size += 10
        assert os.lseek(a, 0, os.SEEK_END) == size, (n, os.lseek(a, 0, os.SEEK_END), size)
        grows()
        fcntl.flock(a, fcntl.LOCK_EX)
        os.pwritev(a, [b'b' * 10], 0, os.RWF_APPEND)
        fcntl.flock(a, fcntl.LOCK_UN)
        assert os.pread(b, 20, size - 10) == b'2' * 10 + b'b' * 10, n
        size += 10
    libc.munmap(ctypes.c_void_p(pages), 1 << 16)
    for fd in (a, end_of_a, b):
        os.close(fd)
";
    run_python("sizes", script, mounts);
}

/// Regression: a program that got a lock appended over what another mount had just added, if the mount was
/// checking sizes at that moment, and always behind the old end of a file that another one had made shorter.
fn appends_under_locks_are_at_the_end(mounts: &[PathBuf; 2]) {
    let script = "
import fcntl, os, sys, time
until = time.monotonic() + 4
def appends(number):
    mine, theirs = (os.path.join(m, 'appended-%d' % number) for m in sys.argv[1:])
    a = os.open(mine, os.O_RDWR | os.O_CREAT)
    b = os.open(theirs, os.O_RDWR | os.O_APPEND)
    n = size = 0
    while time.monotonic() < until:
        n += 1
        if n % 3 == 0:
            os.ftruncate(b, size := 50)
        os.write(b, b'2' * 100)
        fcntl.flock(a, fcntl.LOCK_EX)
        os.pwritev(a, [b'b' * 10], 0, os.RWF_APPEND)
        fcntl.flock(a, fcntl.LOCK_UN)
        size += 110
        assert os.fstat(b).st_size == size, (os.fstat(b).st_size, size)
    return size > 0
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        os._exit(not appends(number))
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
";
    run_python("appends under locks", script, mounts);
}

/// A process loses its lock when it closes the file, not when a handle is released that it used earlier.
///
/// Regression: a child that had inherited an earlier handle released the lock that its parent had acquired
/// through a newer one.
fn locks_outlive_handles_of_others(mounts: &[PathBuf; 2]) {
    write_new(&mounts[0].join("posix"), b"");
    let open = |at: usize| OpenOptions::new().read(true).write(true).open(mounts[at].join("posix")).unwrap();
    let first = open(0);
    fcntl_lock(&first, FlockOperation::LockExclusive).unwrap();
    let mut child =
        Command::new("sleep").arg("0.5").stdin(Stdio::from(first.try_clone().unwrap())).spawn().unwrap();
    drop(first);
    let second = open(0);
    fcntl_lock(&second, FlockOperation::LockExclusive).unwrap();
    assert!(child.wait().unwrap().success());
    std::thread::sleep(Duration::from_millis(300));
    // To the service, the other mount is another process.
    let other = open(1);
    assert!(fcntl_lock(&other, FlockOperation::NonBlockingLockExclusive).is_err(), "the lock is held");
    drop(second);
    fcntl_lock(&other, FlockOperation::LockExclusive).unwrap();
}

/// Reads end where the file ends, whatever size the kernel has cached. Two programs on each mount append, and
/// with `locks` also truncate; readers know a size that was acknowledged before they began. Returns the
/// number of reads.
///
/// Regression: reads ended at an older size when a notice to drop pages crossed the kernel's request for the
/// size, and continued with zeros after another mount had truncated the file.
fn reads_reach_the_end(mounts: &[PathBuf; 2], locks: bool, wanted: u64, period: Duration) -> u64 {
    let name = format!("growing-{locks}");
    write_new(&mounts[0].join(&name), b"");
    // From here on each mount knows of the other.
    write_new(&mounts[1].join(format!("{name}.size")), &0u64.to_le_bytes());
    let (start, reads) = (Instant::now(), AtomicU64::new(0));
    let appends = Mutex::new(());
    std::thread::scope(|scope| {
        for (who, mount) in mounts.iter().chain(mounts).enumerate() {
            let (name, reads, appends) = (&name, &reads, &appends);
            scope.spawn(move || {
                let open =
                    |name: &str| OpenOptions::new().read(true).write(true).open(mount.join(name)).unwrap();
                let (file, size) = (open(name), open(&format!("{name}.size")));
                let only_read = File::open(mount.join(name)).unwrap();
                for round in 0u64.. {
                    if start.elapsed() >= period && reads.load(Relaxed) >= wanted {
                        break;
                    }
                    if round % 4 == who as u64 {
                        let _turn = (!locks).then(|| appends.lock().unwrap());
                        if locks {
                            file.lock().unwrap();
                        }
                        let mut end = file.metadata().unwrap().len();
                        if locks && round % 16 >= 8 || end > 4 << 20 {
                            end /= 3;
                            // Without locks, size 0 tells readers not to check during the truncation.
                            size.write_all_at(&0u64.to_le_bytes(), 0).unwrap();
                            file.set_len(if locks { end } else { 0 }).unwrap();
                            end = if locks { end } else { 0 };
                        }
                        let bytes = vec![who as u8 + 1; [100, 4096, 30_000][round as usize % 3]];
                        file.write_all_at(&bytes, end).unwrap();
                        size.write_all_at(&(end + bytes.len() as u64).to_le_bytes(), 0).unwrap();
                        if locks {
                            file.unlock().unwrap();
                        }
                        continue;
                    }
                    if locks {
                        file.lock_shared().unwrap();
                    }
                    let noted = || {
                        let mut noted = [0; 8];
                        size.read_exact_at(&mut noted, 0).unwrap();
                        u64::from_le_bytes(noted)
                    };
                    let wanted = noted();
                    let (mut bytes, mut found, mut zeros) = (vec![0; 1 << 14], 0, 0);
                    let reader = if round % 3 == 0 { &file } else { &only_read };
                    loop {
                        let count = reader.read_at(&mut bytes, found).unwrap();
                        reads.fetch_add(1, Relaxed);
                        if count == 0 {
                            break;
                        }
                        zeros += bytes[..count].iter().filter(|byte| **byte == 0).count();
                        found += count as u64;
                    }
                    let again = noted();
                    if locks {
                        file.unlock().unwrap();
                        assert_eq!((found, zeros), (wanted, 0), "round {round} of {who}");
                    }
                    // A file that was truncated and extended meanwhile proves nothing.
                    assert!(
                        locks || again < wanted || found >= wanted,
                        "round {round} of {who}: {found} < {wanted}"
                    );
                }
            });
        }
    });
    reads.load(Relaxed)
}

/// After a restart of the service, the mounts keep no data under leases that it does not know.
///
/// Regression: they overwrote each other's data, and each read its own cached pages.
fn files_shared_over_a_restart(store: &Store, mounts: &[PathBuf; 2]) {
    let open = |at: usize| OpenOptions::new().read(true).write(true).open(mounts[at].join("shared")).unwrap();
    write_new(&mounts[1].join("shared"), &[0; 8]);
    let files = [open(0), open(1)];
    let mut value = 0u64;
    let mut rounds = |files: &[File; 2], count: usize| {
        for round in 0..count {
            value += 1;
            files[round % 2].write_all_at(&value.to_le_bytes(), 0).unwrap();
            let mut found = [0; 8];
            files[1 - round % 2].read_exact_at(&mut found, 0).unwrap();
            assert_eq!(u64::from_le_bytes(found), value);
        }
    };
    rounds(&files, 40);
    // The instance's own mount ends with the instance, so both are separate processes from here on.
    drop(files);
    store.ok(&["umount", mounts[0].to_str().unwrap()]);
    mount_at(store, &mounts[0]);
    let files = [open(0), open(1)];
    rounds(&files, 40);
    files.iter().for_each(|file| file.sync_all().unwrap());
    store.kill();
    let mut up = Store::program();
    up.arg("up").arg(&store.dir).args(OPTIONS).arg("--detach").stdin(Stdio::null());
    assert!(up.output().unwrap().status.success());
    rounds(&files, 40);
}

#[test]
fn two_mounts_agree_under_locks_and_after_a_restart() {
    if !can_mount("two_mounts_agree_under_locks_and_after_a_restart") {
        return;
    }
    let (store, mounts, _) = two("agree");
    locks_outlive_handles_of_others(&mounts);
    read_then_write(&mounts, Duration::from_secs(3));
    reads_reach_the_end(&mounts, true, 0, Duration::from_secs(8));
    reads_reach_the_end(&mounts, false, 0, Duration::from_secs(4));
    files_shared_over_a_restart(&store, &mounts);
    for mount in &mounts {
        store.ok(&["umount", mount.to_str().unwrap()]);
    }
    store.ok(&["mount", mounts[0].to_str().unwrap(), "--detach"]);
    store.audit();
    store.ok(&["umount", mounts[0].to_str().unwrap()]);
    store.ok(&["down"]);
}

/// Full form: runs `PENSTOCK_READS` reads, half of them under locks.
#[test]
#[ignore = "many reads: with --ignored"]
fn campaign_of_reads() {
    let wanted = std::env::var("PENSTOCK_READS").map_or(100_000, |text| text.parse().unwrap());
    let (store, mounts, _) = two("reads");
    for locks in [true, false] {
        let start = Instant::now();
        let reads = reads_reach_the_end(&mounts, locks, wanted / 2, Duration::ZERO);
        println!("{reads} reads, locks {locks}, {:.0} s: none short", start.elapsed().as_secs_f64());
    }
    for mount in &mounts {
        store.ok(&["umount", mount.to_str().unwrap()]);
    }
    store.audit();
    store.down();
}
