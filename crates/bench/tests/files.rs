//! Tests of the workloads that file systems are compared by, on a plain folder.

use penstock_bench::files::{Amount, Folder, Phase, Work};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

const AMOUNT: Amount = Amount { file_mib: 4, ops: 64, files: 20, syncs: 32, limit: Duration::from_secs(300) };

/// A folder of the test's own, removed when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the target folder can be written");
        Self(path)
    }

    fn takes_direct(&self, test: &str) -> bool {
        let folder = Folder::new(&self.0, AMOUNT, true);
        let taken = folder.prepare(Work::ReadDirect);
        if let Err(error) = &taken {
            eprintln!("SKIPPED {test}: the target folder takes no O_DIRECT ({error})");
        }
        taken.is_ok()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn every_work_does_all_it_counts() {
    let scratch = Scratch::new("work");
    if !scratch.takes_direct("every_work_does_all_it_counts") {
        return;
    }
    let folder = Folder::new(&scratch.0, AMOUNT, true);
    let works = [
        (Work::WriteDirect, 4 << 20),
        (Work::ReadDirect, 4 << 20),
        (Work::ReadBuffered, 4 << 20),
        (Work::RandomWrite(1), 64),
        (Work::RandomWrite(16), 64),
        (Work::RandomRead(1), 64),
        (Work::RandomRead(16), 64),
        (Work::Create(4096), 20),
        (Work::Stat(3), 60),
        (Work::Unlink, 20),
        (Work::WriteSync(1), 32),
        (Work::WriteSync(16), 32),
    ];
    for round in 0..2 {
        for (work, units) in works {
            folder.prepare(work).unwrap();
            let done = folder.run(work).unwrap();
            assert_eq!(done.units as usize, units, "{work:?} in round {round}");
            assert!(done.rate() > 0.0);
        }
    }
    let names: Vec<_> = std::fs::read_dir(&scratch.0)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.starts_with('f'))
        .collect();
    assert_eq!(names, [""; 0], "what was created is removed");
}

#[test]
fn a_wrong_block_is_an_error() {
    let scratch = Scratch::new("wrong");
    if !scratch.takes_direct("a_wrong_block_is_an_error") {
        return;
    }
    let folder = Folder::new(&scratch.0, AMOUNT, true);
    let file = std::fs::File::options().write(true).open(scratch.0.join("big")).unwrap();
    file.write_all_at(&[0; 4096], 3 * 4096).unwrap();
    file.sync_all().unwrap();
    for work in [Work::ReadDirect, Work::ReadBuffered] {
        let error = folder.run(work).unwrap_err().to_string();
        assert!(error.contains("the block at 12288 is wrong"), "{error}");
    }
    assert!(Folder::new(&scratch.0, AMOUNT, false).run(Work::ReadDirect).is_ok(), "nobody asked");
}

#[test]
fn work_ends_when_its_time_is_over() {
    let scratch = Scratch::new("limit");
    let amount = Amount { limit: Duration::ZERO, ..AMOUNT };
    let folder = Folder::new(&scratch.0, amount, true);
    let done = folder.run(Work::Create(0)).unwrap();
    assert!((done.units as usize) < AMOUNT.files, "{done:?}");
    folder.prepare(Work::Unlink).unwrap();
    folder.prepare(Work::WriteSync(4)).unwrap();
    assert!((folder.run(Work::WriteSync(4)).unwrap().units as usize) < AMOUNT.syncs);
}

#[test]
fn timed_reads_go_on_until_they_are_ended_and_verify() {
    let scratch = Scratch::new("timed");
    if !scratch.takes_direct("timed_reads_go_on_until_they_are_ended_and_verify") {
        return;
    }
    let folder = Folder::new(&scratch.0, AMOUNT, true);
    let ended = Phase::default();
    ended.end();
    assert_eq!(folder.read_while(4096, 4, &ended).unwrap().count(), 0);
    let counting = Phase::default();
    counting.count();
    let file = std::fs::File::options().write(true).open(scratch.0.join("big")).unwrap();
    file.write_all_at(&[0; 4096], 1 << 20).unwrap();
    file.sync_all().unwrap();
    // These reads end without a call of `end`, because they reach the wrong block.
    for bytes in [4096, 1 << 20] {
        let error = folder.read_while(bytes, 1, &counting).unwrap_err().to_string();
        assert!(error.contains("the block at 1048576 is wrong"), "{error}");
    }
}
