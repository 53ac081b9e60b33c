//! Tests a live mount that is cut off from its service for longer than its lease.

use crate::line::Line;
use crate::python::Python;
use crate::remote_mount::{OPTIONS, mount_at, mount_in, up_alone};
use crate::store::{Store, can_mount, is_alive, shell, wait_until};
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

const FILE_BYTES: usize = 1 << 20;
/// Longer than the lease of these stores, which is 3 s.
const LAPSE: Duration = Duration::from_secs(5);

/// Reads the byte in the middle of a file on another thread.
fn read_soon(file: &File) -> Receiver<std::io::Result<u8>> {
    let file = file.try_clone().unwrap();
    let (done, result) = channel();
    std::thread::spawn(move || {
        let mut byte = [0];
        // The receiver is gone if the test has failed meanwhile.
        let _ = done.send(file.read_exact_at(&mut byte, FILE_BYTES as u64 / 2).map(|()| byte[0]));
    });
    result
}

/// Prints a byte of a shared map, again on each line of input.
const LOOKS: &str = "
import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(f, 0, mmap.MAP_SHARED, mmap.PROT_READ)
while True:
    print(chr(m[len(m) // 2]), flush=True)
    sys.stdin.readline()
";
/// Prints the same byte, obtained by a read.
const READS: &str = "
import os, sys
f = os.open(sys.argv[1], os.O_RDONLY)
middle = os.fstat(f).st_size // 2
while True:
    print(chr(os.pread(f, 1, middle)[0]), flush=True)
    sys.stdin.readline()
";
/// Writes the whole file over and over after a line of input.
const WRITES: &str = "
import os, sys
f = os.open(sys.argv[1], os.O_WRONLY)
data = b'w' * os.fstat(f).st_size
print('ready', flush=True)
sys.stdin.readline()
while True:
    os.pwrite(f, data, 0)
";
/// Does the same, then requests as much read-ahead as the kernel sends at a time, and stores into a page that
/// a write has filled.
const WRITES_AND_STORES: &str = "
import mmap, os, sys, threading
f = os.open(sys.argv[1], os.O_RDWR)
m = mmap.mmap(f, 0)
big = os.open(sys.argv[1] + '-big', os.O_RDONLY)
data = b'w' * len(m)
print('ready', flush=True)
sys.stdin.readline()
def write():
    while True:
        os.pwrite(f, data, 0)
threading.Thread(target=write, daemon=True).start()
sys.stdin.readline()
for number in range(1024):
    os.posix_fadvise(big, 2 * number * 1048576, 4096, os.POSIX_FADV_WILLNEED)
m[len(m) // 2] = ord('m')
print('stored', flush=True)
sys.stdin.readline()
";
const STORED: usize = 100;
/// Stores into one page of each of [`STORED`] files through maps, and syncs them, each step after a line of
/// input.
const STORES: &str = "
import mmap, os, sys
maps = []
for number in range(int(sys.argv[2])):
    f = os.open(f'{sys.argv[1]}/stored{number}', os.O_CREAT | os.O_RDWR)
    os.ftruncate(f, 3 * 4096)
    os.fsync(f)
    maps.append(mmap.mmap(f, 3 * 4096))
    maps[-1][4096:4100] = b'none'
    maps[-1].flush()
print('ready', flush=True)
sys.stdin.readline()
for m in maps:
    m[4096:4100] = b'this'
print('stored', flush=True)
sys.stdin.readline()
for m in maps:
    m.flush()
print('flushed', flush=True)
sys.stdin.readline()
";

fn start_storing(test: &str, folder: &Path) -> Option<Python> {
    let mut storing = Python::start(test, STORES, &[folder.as_os_str(), STORED.to_string().as_ref()])?;
    storing.says("ready");
    Some(storing)
}

/// A store with one mount behind a [`Line`], and a place for another, direct mount.
struct CutOff {
    store: Store,
    line: Line,
    mount: PathBuf,
    other: PathBuf,
    pid: u32,
}

impl CutOff {
    fn new(name: &str) -> Self {
        let store = Store::new(name, &OPTIONS);
        up_alone(&store, &[]);
        let folder = store.home.join("line");
        let line = Line::new(&folder, &store.dir);
        let (mount, other) = (store.home.join("cut-off"), store.home.join("other"));
        let pid = mount_in(&folder, &mount);
        std::fs::write(mount.join("file"), vec![b'o'; FILE_BYTES]).unwrap();
        Self { store, line, mount, other, pid }
    }

    /// Mounts the second one. From here on the first is not alone.
    fn mount_other(&self) {
        mount_at(&self.store, &self.other);
    }

    /// Changes the file through the other mount while the line is cut.
    fn change_beside(&self) {
        let new = OpenOptions::new().write(true).open(self.other.join("file")).unwrap();
        new.write_all_at(&vec![b'n'; FILE_BYTES], 0).unwrap();
        new.sync_all().unwrap();
    }

    /// Unmounts and stops. The caller has closed everything in the mount that was cut off.
    fn end(self) {
        let at = self.mount.display();
        shell(&format!("umount {at} || umount -l {at}"));
        wait_until("its process to end", || !is_alive(self.pid));
        self.store.ok(&["umount", self.other.to_str().unwrap()]);
        self.store.down();
    }
}

/// Regression: a mount that was cut off served its cached pages forever, without an error, after another
/// mount changed the file.
#[test]
fn a_mount_that_is_cut_off_shows_nothing_old() {
    if !can_mount("a_mount_that_is_cut_off_shows_nothing_old") {
        return;
    }
    let cut_off = CutOff::new("cut-off");
    cut_off.mount_other();
    let file = File::open(cut_off.mount.join("file")).unwrap();
    let mut contents = Vec::new();
    (&file).read_to_end(&mut contents).unwrap();
    assert_eq!(contents.len(), FILE_BYTES);
    let mapped =
        Python::start("a_mount_that_is_cut_off_shows_nothing_old", LOOKS, &[cut_off.mount.join("file")]);
    let Some(mut mapped) = mapped else { return };
    mapped.says("o");
    // A file with no pages in the kernel's cache when the line is cut.
    std::fs::write(cut_off.other.join("unread"), vec![b'o'; FILE_BYTES]).unwrap();
    let unread = File::open(cut_off.mount.join("unread")).unwrap();
    cut_off.line.set(false);
    let waits = read_soon(&unread);
    cut_off.change_beside();
    mapped.tell();
    let late = read_soon(&file);
    std::thread::sleep(LAPSE);
    assert!(waits.try_recv().is_err() && late.try_recv().is_err(), "it is answered without the service");
    cut_off.line.set(true);
    late.recv_timeout(Duration::from_secs(60)).unwrap().expect_err("its session has ended");
    waits.recv_timeout(Duration::from_secs(60)).unwrap().expect_err("its session has ended");
    assert_eq!(mapped.line(), "", "what it saw in its map is old");
    drop((mapped, file, unread));
    cut_off.end();
}

/// Cuts the line while a program writes through cached pages. `beside` runs while the line is cut; `readers`
/// print the byte that they see after the other mount changed the file.
///
/// The store's name is short, because the path of a Unix socket is limited to about 100 bytes.
fn cut_off_while_writing(
    (test, name): (&str, &str),
    script: &str,
    readers: &[&str],
    beside: impl FnOnce(&mut Python),
) {
    if !can_mount(test) {
        return;
    }
    let cut_off = CutOff::new(name);
    let path = cut_off.mount.join("file");
    File::create(cut_off.mount.join("file-big")).unwrap().set_len(4 << 30).unwrap();
    // Opened while the mount is alone, so that all use cached pages.
    let start = |script: &str| Python::start(test, script, &[&path]);
    let Some(mut writing) = start(script) else { return };
    writing.says("ready");
    let mut readers: Vec<Python> = readers.iter().map(|script| start(script).unwrap()).collect();
    readers.iter_mut().for_each(|reader| reader.says("o"));
    cut_off.mount_other();
    std::fs::metadata(cut_off.other.join("file")).unwrap();
    writing.tell();
    std::thread::sleep(Duration::from_millis(500));
    cut_off.line.set(false);
    beside(&mut writing);
    cut_off.change_beside();
    readers.iter_mut().for_each(Python::tell);
    std::thread::sleep(Duration::from_secs(1));
    cut_off.line.set(true);
    for reader in &mut readers {
        assert_eq!(reader.line(), "", "what it saw is old");
    }
    drop((writing, readers));
    cut_off.end();
}

/// Regression: the kernel shows pages that a write has filled before the write is answered. The client took
/// such pages for locked and left them in the cache.
#[test]
fn a_write_in_flight_keeps_no_pages_in_a_mount_that_is_cut_off() {
    let test = "a_write_in_flight_keeps_no_pages_in_a_mount_that_is_cut_off";
    cut_off_while_writing((test, "writing-cut-off"), WRITES, &[LOOKS, READS], |_| ());
}

/// Regression: the kernel delayed the write-back of a page behind other requests, and the client assumed that
/// the write which had filled the page had it locked.
#[test]
fn a_write_back_that_never_reaches_a_mount_keeps_no_page_in_it() {
    let test = "a_write_back_that_never_reaches_a_mount_keeps_no_page_in_it";
    cut_off_while_writing((test, "held-back"), WRITES_AND_STORES, &[READS], |writing| {
        std::thread::sleep(Duration::from_millis(100));
        writing.tell();
        writing.says("stored");
    });
}

/// While the service is away and nothing else changes, waiting operations continue however long it takes.
#[test]
fn a_mount_goes_on_when_its_service_was_away_for_long() {
    if !can_mount("a_mount_goes_on_when_its_service_was_away_for_long") {
        return;
    }
    let store = Store::new("away", &OPTIONS);
    up_alone(&store, &[]);
    let pid = mount_at(&store, &store.mount);
    let path = store.mount.join("file");
    std::fs::write(&path, vec![b'o'; FILE_BYTES]).unwrap();
    let file = OpenOptions::new().read(true).write(true).open(&path).unwrap();
    file.sync_all().unwrap();
    let mapped = Python::start("a_mount_goes_on_when_its_service_was_away_for_long", LOOKS, &[&path]);
    let Some(mut mapped) = mapped else { return };
    mapped.says("o");
    assert_eq!(read_soon(&file).recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), b'o');
    store.kill();
    std::thread::sleep(LAPSE);
    mapped.tell();
    let late = read_soon(&file);
    std::thread::sleep(Duration::from_secs(1));
    assert!(late.try_recv().is_err(), "it is answered without the service");
    up_alone(&store, &[]);
    assert_eq!(late.recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), b'o');
    mapped.says("o");
    file.write_all_at(b"w", FILE_BYTES as u64 / 2).unwrap();
    file.sync_all().unwrap();
    mapped.tell();
    mapped.says("w");
    drop((mapped, file));
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    wait_until("its process to end", || !is_alive(pid));
    store.down();
}

/// Regression: dirty pages whose write-back was not answered kept the kernel from dropping pages of other
/// files.
#[test]
fn pages_to_be_written_keep_no_old_ones_in_a_mount_that_is_cut_off() {
    if !can_mount("pages_to_be_written_keep_no_old_ones_in_a_mount_that_is_cut_off") {
        return;
    }
    let test = "pages_to_be_written_keep_no_old_ones_in_a_mount_that_is_cut_off";
    let cut_off = CutOff::new("dirty-cut-off");
    let Some(mut storing) = start_storing(test, &cut_off.mount) else { return };
    cut_off.mount_other();
    let Some(mut mapped) = Python::start(test, LOOKS, &[cut_off.mount.join("file")]) else { return };
    mapped.says("o");
    storing.tell();
    storing.says("stored");
    cut_off.line.set(false);
    cut_off.change_beside();
    mapped.tell();
    std::thread::sleep(Duration::from_secs(1));
    cut_off.line.set(true);
    assert_eq!(mapped.line(), "", "what it saw in its map is old");
    drop((mapped, storing));
    cut_off.end();
}

/// Pages written back while the service is away are stored when it returns.
#[test]
fn pages_written_back_while_the_service_is_away_are_kept() {
    if !can_mount("pages_written_back_while_the_service_is_away_are_kept") {
        return;
    }
    let store = Store::new("dirty-away", &OPTIONS);
    up_alone(&store, &[]);
    let pid = mount_at(&store, &store.mount);
    let test = "pages_written_back_while_the_service_is_away_are_kept";
    let Some(mut storing) = start_storing(test, &store.mount) else { return };
    storing.tell();
    storing.says("stored");
    store.kill();
    std::thread::sleep(LAPSE);
    up_alone(&store, &[]);
    storing.tell();
    storing.says("flushed");
    let other = store.home.join("other");
    mount_at(&store, &other);
    for number in 0..STORED {
        let found = std::fs::read(other.join(format!("stored{number}"))).unwrap();
        assert_eq!((found.len(), &found[4096..4100]), (3 * 4096, &b"this"[..]), "{number}");
    }
    drop(storing);
    for mount in [&store.mount, &other] {
        store.ok(&["umount", mount.to_str().unwrap()]);
    }
    wait_until("its process to end", || !is_alive(pid));
    store.down();
}
