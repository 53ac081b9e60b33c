//! Stores on drives that are given by their paths, and in failure domains.

use crate::store::{Store, can_mount, is_root, refused, shell};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

const BYTES: u64 = 300 << 20;

/// Empty files of this size, as drives.
fn files(home: &Path, count: u64) -> Vec<PathBuf> {
    let file = |number: u64| {
        let path = home.join(format!("disk{number}"));
        std::fs::File::create(&path).unwrap().set_len(BYTES + (number << 20)).unwrap();
        path
    };
    (0..count).map(file).collect()
}

fn text(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(",")
}

#[test]
fn a_store_on_given_drives_survives_the_loss_of_a_failure_domain() {
    if !can_mount("a_store_on_given_drives_survives_the_loss_of_a_failure_domain") {
        return;
    }
    let store = Store::new("given", &[]);
    let files = files(&store.home, 12);
    let domain = |name: &str, at: usize| format!("{name}={}", text(&files[at..at + 3]));
    let [one, two, three, four] =
        [("s1", 0), ("s2", 3), ("s3", 6), ("s4", 9)].map(|(name, at)| domain(name, at));
    // One of them by a link.
    std::os::unix::fs::symlink(&files[11], store.home.join("link")).unwrap();
    let four = four.replace("disk11", "link");
    let all = ["--drive", &one, "--drive", &two, "--drive", &three, "--drive", &four];
    let missing = store.home.join("nothing").display().to_string();
    let used = text(&files[..1]);
    for (words, why) in [
        (vec!["--drive", missing.as_str()], "is no drive that could be used"),
        (vec!["--drive", &used, "--drive", &used], "is given twice"),
        (vec!["--drive", &one, "--drive", &used], "is given twice"),
        (vec!["--drive", &one, "--drive", &format!("s2={}", files[4].display())], "equal numbers of drives"),
        (vec!["--drive", &one, "--drive", &text(&files[4..5])], "name one for all, or for none"),
        (vec!["--drive", "=/dev/null"], "a failure domain has a name"),
        (vec!["--drive", "/dev/null,/dev/zero"], "neither a regular file nor a block device"),
    ] {
        refused(&store.up_output(&words), &[why]);
    }
    // Something that the places of a superblock do not show.
    let other = std::fs::File::options().write(true).open(&files[7]).unwrap();
    other.write_all_at(b"somebody needs this", 100 << 20).unwrap();
    let planned = Store::program().args(["up", "--dry-run"]).args(all).current_dir(&store.home).output();
    for output in [store.up_output(&all), planned.unwrap()] {
        refused(&output, &["disk7 is a file with contents", "nothing was changed"]);
    }
    assert_eq!(std::fs::metadata(&files[7]).unwrap().len(), BYTES + (7 << 20), "it is left alone");
    other.set_len(0).unwrap();
    other.set_len(BYTES + (7 << 20)).unwrap();

    let made = store.up_output(&all);
    let said = [made.stdout, made.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    assert!(made.status.success(), "{said}");
    for word in ["6+2", "one of 4 failure domains", "the smallest drive has 300.0 MiB", "11.0 MiB more"] {
        assert!(said.contains(word), "{word}: {said}");
    }
    std::fs::write(store.mount.join("file"), vec![7; 20 << 20]).unwrap();
    let data = store.json(&["array", "show", "data"]);
    let members = data["members"].as_array().unwrap();
    let drives = store.json(&["drive", "list"]);
    let path_of = |id: &str| {
        let drive = drives.as_array().unwrap().iter().find(|drive| drive["id"] == id).unwrap();
        drive["path"].as_str().unwrap().to_owned()
    };
    // Domains take turns.
    for (at, member) in members.iter().enumerate() {
        let path = path_of(member["drive"].as_str().unwrap());
        let file = files[at % 4 * 3 + at / 4].display().to_string();
        assert_eq!(path, file.replace("disk11", "link"), "member {at}");
    }
    assert!(std::fs::symlink_metadata(store.home.join("link")).unwrap().is_symlink());
    let other = Store::new("part", &[]);
    let blank = other.home.join("blank");
    std::fs::File::create(&blank).unwrap().set_len(BYTES).unwrap();
    store.down();
    let part = format!("{},{}", text(&files[..2]), blank.display());
    refused(&other.up_output(&["--drive", &part]), &["belong to a store already", "blank"]);
    refused(&store.up_output(&["--domains", "3"]), &["in 4 failure domains, not 3"]);
    // A shelf is gone, which has more drives than the code has redundancy.
    for file in &files[3..6] {
        std::fs::rename(file, file.with_extension("away")).unwrap();
    }
    store.up();
    assert_eq!(std::fs::read(store.mount.join("file")).unwrap(), vec![7; 20 << 20]);
    std::fs::write(store.mount.join("more"), vec![8; 5 << 20]).unwrap();
    store.down();
    // It comes back at another place.
    let moved: Vec<PathBuf> = files[3..6].iter().map(|file| file.with_extension("moved")).collect();
    for (file, moved) in files[3..6].iter().zip(&moved) {
        std::fs::rename(file.with_extension("away"), moved).unwrap();
    }
    assert!(store.up_output(&["--drive", &text(&moved)]).status.success());
    store.ok(&["array", "rebuild", "--wait"]);
    assert_eq!(store.json(&["status"])["health"], "ok");
    assert_eq!(std::fs::read(store.mount.join("more")).unwrap(), vec![8; 5 << 20]);
    store.audit();
    store.down();
}

/// Loop devices, detached when this is dropped.
struct Loops(Vec<String>);

impl Loops {
    /// None, after a line that says why, if this machine has none.
    fn new(test: &str, files: &[PathBuf]) -> Option<Self> {
        let mut loops = Self(Vec::new());
        for file in files {
            let made = Command::new("losetup").args(["--find", "--show"]).arg(file).output();
            match made {
                Ok(made) if made.status.success() => {
                    loops.0.push(String::from_utf8(made.stdout).unwrap().trim().to_owned());
                }
                _ => {
                    eprintln!("SKIPPED {test}: no loop devices");
                    return None;
                }
            }
        }
        Some(loops)
    }
}

impl Drop for Loops {
    fn drop(&mut self) {
        for device in &self.0 {
            let _ = Command::new("losetup").args(["--detach", device]).status();
        }
    }
}

#[test]
fn a_store_on_block_devices_takes_blank_ones_alone() {
    let test = "a_store_on_block_devices_takes_blank_ones_alone";
    if !is_root() {
        eprintln!("SKIPPED {test}: loop devices take root");
        return;
    }
    if !can_mount(test) {
        return;
    }
    let store = Store::new("devices", &[]);
    let files = files(&store.home, 3);
    // Here btrfs begins: behind the place of a superblock.
    let other = std::fs::File::options().write(true).open(&files[1]).unwrap();
    other.write_all_at(b"_BHRfS_M", (64 << 10) + 64).unwrap();
    let Some(loops) = Loops::new(test, &files) else { return };
    let all = loops.0.join(",");
    refused(&store.up_output(&["--drive", &all]), &["is not blank", "the last 2 MiB"]);
    shell(&format!("dd if=/dev/zero of={} bs=64k seek=1 count=1 conv=fsync status=none", loops.0[1]));
    let made = store.up_output(&["--drive", &all]);
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    std::fs::write(store.mount.join("file"), vec![7; 5 << 20]).unwrap();
    // The kernel gives a drive in use to nobody else.
    let formatted = Command::new("mkfs.ext4").args(["-F", "-q", &loops.0[0]]).output();
    assert!(formatted.is_err() || !formatted.unwrap().status.success(), "a drive in use was formatted");
    store.down();
    store.up();
    assert_eq!(std::fs::read(store.mount.join("file")).unwrap(), vec![7; 5 << 20]);
    store.audit();
    store.down();
}
