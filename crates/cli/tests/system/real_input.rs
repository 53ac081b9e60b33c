//! Compares real files by SHA-256 after restarts, lost drives, rebuilds and noise (`cargo xtask show 01.1`).

use crate::store::{Random, Store, can_mount, manifest, shell, wait_until};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

struct Size {
    files: usize,
    big_mib: u64,
    drive: &'static str,
}

const SHORT: Size = Size { files: 2_000, big_mib: 256, drive: "640M" };
const FULL: Size = Size { files: 20_000, big_mib: 1024, drive: "4G" };

/// Returns a Python that has pyarrow and sqlite3, if there is one.
fn python() -> Option<PathBuf> {
    let beside = Path::new(env!("CARGO_TARGET_TMPDIR")).parent()?.join("tools/venv/bin/python");
    let found = std::env::var_os("PENSTOCK_PYTHON").map_or(beside, PathBuf::from);
    let works = Command::new(&found)
        .args(["-c", "import pyarrow, sqlite3"])
        .output()
        .is_ok_and(|out| out.status.success());
    works.then_some(found)
}

/// Copies `count` real files of this machine below `to`.
fn copy_tree(to: &Path, count: usize) {
    let roots = "/usr/lib/python3* /usr/local/lib/python3* \"$HOME\"/.pyenv/versions/*/lib \"$HOME\"/.cargo/registry/src \"$HOME\"/.rustup/toolchains/*/share /usr/share /usr/include";
    shell(&format!(
        "mkdir -p {to}; set +o pipefail; for root in {roots}; do [ -d \"$root\" ] && find \"$root\" -type f -size -2048k -print0; done \
         | head -z -n {count} | tar -c --null -T - -P --transform='s,^/,,' -f - | tar -x -C {to} -f -",
        to = to.display()
    ));
    let copied: usize = shell(&format!("find {} -type f | wc -l", to.display())).trim().parse().unwrap();
    assert!(copied >= count * 9 / 10, "{copied} of {count} real files were found");
    println!("{copied} real files, {}", shell(&format!("du -sh {} | cut -f1", to.display())).trim());
}

fn write_big(path: &Path, mib: u64) {
    let mut random = Random(77);
    let mut block = vec![0; 1 << 20];
    random.fill(&mut block);
    let mut file = std::fs::File::create(path).unwrap();
    for index in 0..mib {
        block[..8].copy_from_slice(&index.to_le_bytes());
        file.write_all(&block).unwrap();
    }
    file.sync_all().unwrap();
}

const PARQUET: &str = "
import sys, pyarrow as pa, pyarrow.parquet as pq
path, verb = sys.argv[1], sys.argv[2]
table = pa.table({'id': list(range(100000)), 'text': ['row %d' % n for n in range(100000)]})
if verb == 'write': pq.write_table(table, path, row_group_size=10000)
assert pq.read_table(path).equals(table)
";

const SQLITE: &str = "
import sys, sqlite3
path, verb = sys.argv[1], sys.argv[2]
db = sqlite3.connect(path)
if verb == 'write':
    db.execute('create table rows (id integer primary key, text text)')
    for batch in range(20):
        with db: db.executemany('insert into rows values (?, ?)', [(batch * 500 + n, 'text %d' % n) for n in range(500)])
    with db: db.execute('update rows set text = text || text where id % 7 = 0')
    with db: db.execute('delete from rows where id % 11 = 0')
assert db.execute('pragma integrity_check').fetchone() == ('ok',)
assert db.execute('select count(*) from rows').fetchone()[0] == 10000 - 910
";

struct Input {
    store: Store,
    wanted: String,
    python: Option<PathBuf>,
}

impl Input {
    fn tree(&self) -> PathBuf {
        self.store.mount.join("tree")
    }

    fn scripts(&self, verb: &str) {
        let Some(python) = &self.python else { return };
        for (script, name) in [(PARQUET, "table.parquet"), (SQLITE, "rows.sqlite")] {
            let path = self.store.mount.join(name);
            let output = Command::new(python).args(["-c", script]).arg(&path).arg(verb).output().unwrap();
            assert!(output.status.success(), "{name} {verb}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }

    fn check(&self, when: &str) {
        assert!(manifest(&self.tree()) == self.wanted, "{when}: files differ");
        self.scripts("read");
        println!("equal by SHA-256: {when}");
    }

    fn restart(&self) {
        self.store.down();
        self.store.up();
    }
}

fn real_input(size: &Size) {
    let store = Store::new("real-input", &["--drive-size", size.drive]);
    store.up();
    let source = store.home.join("source");
    copy_tree(&source, size.files);
    write_big(&source.join("big"), size.big_mib);
    let wanted = manifest(&source);
    shell(&format!("cp -r {} {}", source.display(), store.mount.join("tree").display()));
    let input = Input { store, wanted, python: python() };
    input.scripts("write");
    input.check("as written");
    input.restart();
    input.check("after unmount and restart");
    lose_two_while_stopped(&input);
    lose_two_under_load(&input);
    noise(&input);
    input.store.audit();
    input.store.down();
}

/// Deletes the first two drives, which contain metadata too, while the store is stopped; rebuilds; then loses
/// two others.
fn lose_two_while_stopped(input: &Input) {
    let drives = input.store.drives();
    input.store.down();
    for (_, path) in &drives[..2] {
        std::fs::remove_file(path).unwrap();
    }
    input.store.up();
    let status = input.store.json(&["status"]);
    assert_eq!(status["health"], "critical", "{status}");
    assert!(status["redundancy_debt_stripes"].as_u64().unwrap() > 0);
    input.check("without the first two drives, deleted while stopped");
    input.store.replace_missing();
    assert_eq!(input.store.json(&["status"])["redundancy_debt_stripes"], 0);
    input.store.down();
    for (_, path) in &drives[2..4] {
        std::fs::remove_file(path).unwrap();
    }
    input.store.up();
    input.check("after the rebuild onto blank drives, without two others");
    input.store.replace_missing();
}

fn lose_two_under_load(input: &Input) {
    let stop = Arc::new(AtomicBool::new(false));
    let written = Arc::new(AtomicU64::new(0));
    let folder = input.store.mount.join("load");
    std::fs::create_dir(&folder).unwrap();
    let load = {
        let (stop, written, folder) = (stop.clone(), written.clone(), folder.clone());
        std::thread::spawn(move || {
            let mut number = 0u64;
            while !stop.load(Ordering::Relaxed) {
                let mut file = std::fs::File::create(folder.join(format!("f{}", number % 50))).unwrap();
                file.write_all(&number.to_le_bytes().repeat(1 + (number as usize * 997) % 40_000)).unwrap();
                if number.is_multiple_of(4) {
                    file.sync_all().unwrap();
                }
                number += 1;
                written.store(number, Ordering::Relaxed);
            }
        })
    };
    let wait_for_load = |more: u64| {
        let target = written.load(Ordering::Relaxed) + more;
        wait_until("the load goes on", || written.load(Ordering::Relaxed) >= target);
    };
    let drives = input.store.drives();
    for (id, _) in [&drives[1], &drives[4]] {
        wait_for_load(100);
        input.store.ok(&["drive", "fail", id]);
    }
    wait_for_load(100);
    input.check("with two drives failed under load");
    input.store.replace_missing();
    wait_for_load(100);
    stop.store(true, Ordering::Relaxed);
    load.join().unwrap();
    for entry in std::fs::read_dir(&folder).unwrap() {
        let mut bytes = Vec::new();
        std::fs::File::open(entry.unwrap().path()).unwrap().read_to_end(&mut bytes).unwrap();
        assert!(bytes.chunks(8).all(|chunk| chunk == &bytes[..8]), "a file of the load is whole");
    }
    input.restart();
    input.check("after the rebuild under load and a restart");
}

/// Overwrites 1 % of one drive with noise while the store is stopped, including the first superblock.
fn noise(input: &Input) {
    let drives = input.store.drives();
    input.store.down();
    let mut file = std::fs::File::options().write(true).open(&drives[2].1).unwrap();
    let blocks = file.metadata().unwrap().len() / 4096;
    let mut random = Random(4242);
    let mut noise = vec![0; 4096];
    let hit = blocks / 100;
    for index in 0..hit {
        random.fill(&mut noise);
        let block = if index == 0 { 0 } else { random.below(blocks) };
        file.seek(SeekFrom::Start(block * 4096)).unwrap();
        file.write_all(&noise).unwrap();
    }
    file.sync_all().unwrap();
    println!("{hit} blocks of {blocks} of drive 2 overwritten with noise, its first superblock among them");
    input.store.up();
    input.check("with 1 % of one drive overwritten with noise");
    let scrubs = input.store.json(&["array", "scrub", "--wait"]);
    println!("scrub after noise: {scrubs}");
    if input.store.json(&["status"])["health"] != "ok" {
        input.store.replace_missing();
    }
    input.check("after scrub");
}

#[test]
fn real_files_survive_everything() {
    if can_mount("real_files_survive_everything") {
        real_input(&SHORT);
    }
}

#[test]
fn parquet_and_sqlite_are_used_in_place() {
    let python = python();
    if python.is_none() {
        eprintln!("SKIPPED parquet_and_sqlite_are_used_in_place: no Python with pyarrow (cargo xtask tools)");
        return;
    }
    if can_mount("parquet_and_sqlite_are_used_in_place") {
        let store = Store::new("in-place", &["--drive-size", "256M"]);
        store.up();
        let input = Input { store, wanted: String::new(), python };
        input.scripts("write");
        input.restart();
        input.scripts("read");
        input.store.audit();
        input.store.down();
    }
}

#[test]
#[ignore = "full form: cargo xtask show 01.1"]
fn show_real_input() {
    if can_mount("show_real_input") {
        real_input(&FULL);
    }
}
