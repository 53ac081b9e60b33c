//! A mount that does not reach its service for longer than its lease, and lives.

use crate::remote_mount::{OPTIONS, mount_at, up_alone};
use crate::store::{Store, can_mount, is_alive, shell, wait_until};
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

const FILE_BYTES: usize = 1 << 20;
/// Longer than the lease of these stores, which is 3 s.
const LAPSE: Duration = Duration::from_secs(5);

/// Stands between a mount and its service, and forwards what they say.
struct Line {
    /// Whether it forwards.
    open: Arc<(Mutex<bool>, Condvar)>,
}

impl Line {
    /// Serves in `folder` as the instance in `service` does.
    fn new(folder: &Path, service: &Path) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let listener = UnixListener::bind(folder.join("data.sock")).unwrap();
        let open = Arc::new((Mutex::new(true), Condvar::new()));
        let (gate, to) = (open.clone(), service.join("data.sock"));
        std::thread::spawn(move || {
            for mount in listener.incoming().map_while(Result::ok) {
                Self::wait(&gate);
                let Ok(service) = UnixStream::connect(&to) else { continue };
                for (from, to) in [(&mount, &service), (&service, &mount)] {
                    let (from, to, gate) = (from.try_clone().unwrap(), to.try_clone().unwrap(), gate.clone());
                    std::thread::spawn(move || Self::forward(from, to, &gate));
                }
            }
        });
        Self { open }
    }

    fn wait(gate: &(Mutex<bool>, Condvar)) {
        drop(gate.1.wait_while(gate.0.lock().unwrap(), |open| !*open).unwrap());
    }

    fn forward(mut from: UnixStream, mut to: UnixStream, gate: &(Mutex<bool>, Condvar)) {
        let mut bytes = vec![0; 1 << 20];
        loop {
            let len = from.read(&mut bytes).unwrap_or(0);
            Self::wait(gate);
            if len == 0 || to.write_all(&bytes[..len]).is_err() {
                // The other direction ends by that too.
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                return;
            }
        }
    }

    fn set(&self, open: bool) {
        *self.open.0.lock().unwrap() = open;
        self.open.1.notify_all();
    }
}

/// Reads the middle of a file by a thread.
fn read_soon(file: &File) -> Receiver<std::io::Result<u8>> {
    let file = file.try_clone().unwrap();
    let (done, result) = channel();
    std::thread::spawn(move || {
        let mut byte = [0];
        // Who waited for it may have failed.
        let _ = done.send(file.read_exact_at(&mut byte, FILE_BYTES as u64 / 2).map(|()| byte[0]));
    });
    result
}

/// A program that has mapped a file and looks into it when it is told to.
struct Mapped(Child, BufReader<ChildStdout>);

impl Mapped {
    fn new(path: &Path) -> Self {
        let script = "
import mmap, os, sys
f = os.open(sys.argv[1], os.O_RDONLY)
m = mmap.mmap(f, 0, mmap.MAP_SHARED, mmap.PROT_READ)
while True:
    print(m[len(m) // 2], flush=True)
    sys.stdin.readline()
";
        let mut python = Command::new("python3");
        python
            .args(["-c", script])
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = python.spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self(child, output)
    }

    fn look(&mut self) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// What it saw next; none if it was killed by a signal.
    fn saw(&mut self) -> Option<u8> {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        line.trim().parse().ok()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // It may have ended.
        let _ = (self.0.kill(), self.0.wait());
    }
}

const DIRTY: usize = 100;

/// A program that has mapped files and stores into one page of each.
struct Storing(Child, BufReader<ChildStdout>);

impl Storing {
    fn new(folder: &Path) -> Self {
        let script = "
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
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(folder).arg(DIRTY.to_string());
        let mut child = python.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut storing = Self(child, output);
        storing.said("ready");
        storing
    }

    fn said(&mut self, word: &str) {
        let mut line = String::new();
        self.1.read_line(&mut line).unwrap();
        assert_eq!(line.trim(), word);
    }

    fn go_on(&mut self, word: &str) {
        self.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        self.said(word);
    }
}

impl Drop for Storing {
    fn drop(&mut self) {
        // It may have ended.
        let _ = (self.0.kill(), self.0.wait());
    }
}

fn mount_over(line: &Path, path: &Path) -> u32 {
    let output =
        Store::program().arg("--dir").arg(line).arg("mount").arg(path).arg("--detach").output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let words: Vec<&str> = said.split(|c: char| !c.is_ascii_alphanumeric()).collect();
    let at = words.iter().position(|word| *word == "process").unwrap();
    words[at + 1].parse().unwrap()
}

/// It showed its pages for ever, after another mount had changed the file, and said nothing.
#[test]
fn a_mount_that_is_cut_off_shows_nothing_old() {
    if !can_mount("a_mount_that_is_cut_off_shows_nothing_old") {
        return;
    }
    let store = Store::new("cut-off", &OPTIONS);
    up_alone(&store, &[]);
    let folder = store.home.join("line");
    let line = Line::new(&folder, &store.dir);
    let (cut_off, other) = (store.home.join("cut-off"), store.home.join("other"));
    let pid = mount_over(&folder, &cut_off);
    std::fs::write(cut_off.join("file"), vec![b'o'; FILE_BYTES]).unwrap();
    mount_at(&store, &other);
    let file = File::open(cut_off.join("file")).unwrap();
    let mut contents = Vec::new();
    (&file).read_to_end(&mut contents).unwrap();
    let mut mapped = Mapped::new(&cut_off.join("file"));
    assert_eq!((contents.len(), mapped.saw()), (FILE_BYTES, Some(b'o')));
    // One that is away from the pages of the file when the line is cut.
    std::fs::write(other.join("unread"), vec![b'o'; FILE_BYTES]).unwrap();
    let unread = File::open(cut_off.join("unread")).unwrap();
    line.set(false);
    let waits = read_soon(&unread);
    let new = OpenOptions::new().write(true).open(other.join("file")).unwrap();
    new.write_all_at(&vec![b'n'; FILE_BYTES], 0).unwrap();
    new.sync_all().unwrap();
    mapped.look();
    let late = read_soon(&file);
    std::thread::sleep(LAPSE);
    assert!(waits.try_recv().is_err() && late.try_recv().is_err(), "it is answered without the service");
    line.set(true);
    late.recv_timeout(Duration::from_secs(60)).unwrap().expect_err("its session has ended");
    waits.recv_timeout(Duration::from_secs(60)).unwrap().expect_err("its session has ended");
    assert_eq!(mapped.saw(), None, "what it saw in its map is old");
    drop((mapped, file, unread, new));
    let at = cut_off.display();
    shell(&format!("umount {at} || umount -l {at}"));
    wait_until("its process to end", || !is_alive(pid));
    store.ok(&["umount", other.to_str().unwrap()]);
    store.down();
}

/// Nobody else changes anything while the service is away, for however long: what waited goes on.
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
    let mut mapped = Mapped::new(&path);
    assert_eq!(mapped.saw(), Some(b'o'));
    assert_eq!(read_soon(&file).recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), b'o');
    store.kill();
    std::thread::sleep(LAPSE);
    mapped.look();
    let late = read_soon(&file);
    std::thread::sleep(Duration::from_secs(1));
    assert!(late.try_recv().is_err(), "it is answered without the service");
    up_alone(&store, &[]);
    assert_eq!(late.recv_timeout(Duration::from_secs(60)).unwrap().unwrap(), b'o');
    assert_eq!(mapped.saw(), Some(b'o'));
    file.write_all_at(b"w", FILE_BYTES as u64 / 2).unwrap();
    file.sync_all().unwrap();
    mapped.look();
    assert_eq!(mapped.saw(), Some(b'w'));
    drop((mapped, file));
    store.ok(&["umount", store.mount.to_str().unwrap()]);
    wait_until("its process to end", || !is_alive(pid));
    store.down();
}

/// Pages that wait to be written back, which nobody answers, kept the kernel from dropping those of other files.
#[test]
fn pages_to_be_written_keep_no_old_ones_in_a_mount_that_is_cut_off() {
    if !can_mount("pages_to_be_written_keep_no_old_ones_in_a_mount_that_is_cut_off") {
        return;
    }
    let store = Store::new("dirty-cut-off", &OPTIONS);
    up_alone(&store, &[]);
    let folder = store.home.join("line");
    let line = Line::new(&folder, &store.dir);
    let (cut_off, other) = (store.home.join("cut-off"), store.home.join("other"));
    let pid = mount_over(&folder, &cut_off);
    let mut storing = Storing::new(&cut_off);
    std::fs::write(cut_off.join("file"), vec![b'o'; FILE_BYTES]).unwrap();
    mount_at(&store, &other);
    let mut mapped = Mapped::new(&cut_off.join("file"));
    assert_eq!(mapped.saw(), Some(b'o'));
    storing.go_on("stored");
    line.set(false);
    let new = OpenOptions::new().write(true).open(other.join("file")).unwrap();
    new.write_all_at(&vec![b'n'; FILE_BYTES], 0).unwrap();
    new.sync_all().unwrap();
    mapped.look();
    std::thread::sleep(Duration::from_secs(1));
    line.set(true);
    assert_eq!(mapped.saw(), None, "what it saw in its map is old");
    drop((mapped, storing, new));
    let at = cut_off.display();
    shell(&format!("umount {at} || umount -l {at}"));
    wait_until("its process to end", || !is_alive(pid));
    store.ok(&["umount", other.to_str().unwrap()]);
    store.down();
}

/// What is taken for written while the service is away is written when it is back.
#[test]
fn pages_written_back_while_the_service_is_away_are_kept() {
    if !can_mount("pages_written_back_while_the_service_is_away_are_kept") {
        return;
    }
    let store = Store::new("dirty-away", &OPTIONS);
    up_alone(&store, &[]);
    let pid = mount_at(&store, &store.mount);
    let mut storing = Storing::new(&store.mount);
    storing.go_on("stored");
    store.kill();
    std::thread::sleep(LAPSE);
    up_alone(&store, &[]);
    storing.go_on("flushed");
    let other = store.home.join("other");
    mount_at(&store, &other);
    for number in 0..DIRTY {
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
