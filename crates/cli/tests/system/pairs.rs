//! Loses each pair of drives: failed under load, and deleted while the store is stopped.

use crate::campaign;
use crate::store::{Random, Store, can_mount, manifest, shell, wait_until};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const DRIVES: usize = 6;

/// Returns a pair by number: 0 is drives 0 and 1, 14 is drives 4 and 5.
fn pair(number: u64) -> [usize; 2] {
    let mut pairs = (0..DRIVES).flat_map(|a| (a + 1..DRIVES).map(move |b| [a, b]));
    pairs.nth(number as usize).expect("six drives have 15 pairs")
}

/// Writes files of many sizes.
fn fill(folder: &Path, random: &mut Random, files: usize) {
    for number in 0..files {
        let dir = folder.join(format!("d{}", number % 7));
        std::fs::create_dir_all(&dir).unwrap();
        let most = [1, 5000, 70_000, 1 << 20][random.below(4) as usize];
        let mut bytes = vec![0; 1 + random.below(most) as usize];
        random.fill(&mut bytes);
        std::fs::write(dir.join(format!("f{number}")), &bytes).unwrap();
    }
}

/// Writes files repeatedly until it is stopped; every file must be complete at the end.
struct Writer {
    stop: Arc<AtomicBool>,
    written: Arc<AtomicU64>,
    thread: std::thread::JoinHandle<()>,
}

impl Writer {
    fn start(folder: &Path) -> Self {
        std::fs::create_dir(folder).unwrap();
        let (stop, written) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (folder, until, count) = (folder.to_owned(), stop.clone(), written.clone());
        let thread = std::thread::spawn(move || {
            for number in 0u64.. {
                if until.load(Ordering::Relaxed) {
                    break;
                }
                let path = folder.join(format!("w{}", number % 20));
                let words = 1 + (number as usize * 997) % 30_000;
                std::fs::write(&path, number.to_le_bytes().repeat(words)).unwrap();
                if number.is_multiple_of(4) {
                    std::fs::File::open(&path).unwrap().sync_all().unwrap();
                }
                count.store(number, Ordering::Relaxed);
            }
        });
        Self { stop, written, thread }
    }

    fn wait(&self, more: u64) {
        let target = self.written.load(Ordering::Relaxed) + more;
        wait_until("the load goes on", || self.written.load(Ordering::Relaxed) >= target);
    }

    fn end(self, folder: &Path) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        for entry in std::fs::read_dir(folder).unwrap() {
            let bytes = std::fs::read(entry.unwrap().path()).unwrap();
            assert!(bytes.chunks(8).all(|chunk| chunk == &bytes[..8]), "a file of the load is whole");
        }
        self.written.load(Ordering::Relaxed)
    }
}

fn lose(number: u64, files: usize) -> Value {
    let lost = pair(number);
    let store = Store::new("pairs", &["--drive-size", "256M"]);
    store.up();
    let free_bytes = store.free_bytes();
    let mut random = Random(number + 1);
    fill(&store.mount.join("tree"), &mut random, files);
    shell(&format!("sync -f {}", store.mount.display()));
    let wanted = manifest(&store.mount.join("tree"));
    let check = |when: &str| {
        assert!(manifest(&store.mount.join("tree")) == wanted, "pair {lost:?}, {when}: files differ");
    };

    let folder = store.mount.join("load");
    let writer = Writer::start(&folder);
    let drives = store.drives();
    for at in lost {
        writer.wait(10);
        store.ok(&["drive", "fail", &drives[at].0]);
    }
    writer.wait(10);
    check("failed under load");
    store.replace_missing();
    writer.wait(10);
    let written = writer.end(&folder);
    store.audit();
    check("rebuilt under load");

    let drives = store.drives();
    store.down();
    lost.iter().for_each(|at| std::fs::remove_file(&drives[*at].1).unwrap());
    store.up();
    let status = store.json(&["status"]);
    assert_eq!(status["health"], "critical", "{status}");
    let debt = status["redundancy_debt_stripes"].as_u64().unwrap();
    check("deleted while it was stopped");
    store.replace_missing();
    store.audit();
    store.down();
    store.up();
    check("rebuilt, and started again");
    store.check_empty(free_bytes);
    store.down();
    json!({ "drives": lost, "files_of_load": written, "debt_stripes": debt })
}

#[test]
fn a_lost_pair_of_drives_loses_nothing() {
    if can_mount("a_lost_pair_of_drives_loses_nothing") {
        lose(6, 30);
    }
}

#[test]
#[ignore = "full form: cargo xtask campaign pairs"]
fn campaign_of_pairs() {
    if can_mount("campaign_of_pairs") {
        campaign::run(0..15, |number| lose(number, 400));
    }
}
