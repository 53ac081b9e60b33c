//! Runs fsx on a mount while drives fail and are rebuilt. `cargo xtask campaign fsx` installs the program and
//! names it.

use crate::campaign;
use crate::store::{Random, Store, can_mount};
use serde_json::{Value, json};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A child process that is killed when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Fails if the child has ended, which is fine.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Takes one or two drives out of service and replaces them by blank ones. Returns their number.
fn fail_and_rebuild(store: &Store, random: &mut Random) -> u64 {
    let drives = store.drives();
    let first = random.below(6) as usize;
    let second = (first + 1 + random.below(5) as usize) % 6;
    let count = 1 + random.below(2) as usize;
    for at in &[first, second][..count] {
        store.ok(&["drive", "fail", &drives[*at].0]);
        std::thread::sleep(Duration::from_millis(random.below(500)));
    }
    store.replace_missing();
    count as u64
}

fn exercise(program: &str, seed: u64) -> Value {
    let operations = campaign::number("PENSTOCK_FSX_OPERATIONS", 1000);
    let file = std::env::var("PENSTOCK_FSX_FILE").unwrap();
    let store = Store::new("fsx", &["--drive-size", "256M"]);
    store.up();
    let free_bytes = store.free_bytes();
    let log = store.home.join("fsx.log");
    let output = std::fs::File::create(&log).unwrap();
    let mut command = Command::new(program);
    command.args(["-q", "-N", &operations.to_string(), "-S", &seed.to_string(), "-f", &file, "-P"]);
    command.arg(&store.home).arg(store.mount.join("fsx")).stdin(Stdio::null());
    command.stdout(output.try_clone().unwrap()).stderr(output);
    let mut fsx = Running(command.spawn().unwrap());
    let mut random = Random(seed);
    let (mut rounds, mut lost) = (0, 0);
    let status = loop {
        lost += fail_and_rebuild(&store, &mut random);
        if let Some(status) = fsx.0.try_wait().unwrap() {
            break status;
        }
        // Counts only rebuilds that ended while fsx was running.
        rounds += 1;
    };
    assert!(status.success(), "fsx: {status}\n{}", std::fs::read_to_string(&log).unwrap());
    assert!(rounds > 0, "fsx ended before a drive was rebuilt: give it more operations");
    store.audit();
    store.check_empty(free_bytes);
    store.down();
    json!({ "operations": operations, "rebuilds": rounds, "drives_lost": lost })
}

#[test]
#[ignore = "full form: cargo xtask campaign fsx"]
fn campaign_of_fsx() {
    match std::env::var("PENSTOCK_FSX") {
        Ok(program) if can_mount("campaign_of_fsx") => campaign::run(1..2, |seed| exercise(&program, seed)),
        Ok(_) => {}
        Err(_) => eprintln!("SKIPPED campaign_of_fsx: cargo xtask campaign fsx names the program"),
    }
}
