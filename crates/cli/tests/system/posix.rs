//! Tests system calls on a mount, through the kernel.

use crate::store::{Store, can_mount, shell};
use rustix::fs::{
    AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags, SeekFrom, StatxFlags, copy_file_range,
    fallocate, linkat, open, renameat_with, seek, statvfs, statx,
};
use rustix::io::Errno;
use std::fs::{File, Permissions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::process::Command;
use std::time::Duration;

const SMALL: [&str; 2] = ["--drive-size", "256M"];
const BLOCK: u64 = 4096;

/// Returns a mounted store, or None if this machine cannot mount.
fn mounted(test: &str) -> Option<Store> {
    can_mount(test).then(|| {
        let store = Store::new("posix", &SMALL);
        store.up();
        store
    })
}

fn new_file(store: &Store, name: &str) -> File {
    File::options().read(true).write(true).create_new(true).open(store.mount.join(name)).unwrap()
}

/// lseek(2): a write that is only in memory counts as data, and the end of the file is a hole.
#[test]
fn lseek_tells_data_from_holes() {
    let Some(store) = mounted("lseek_tells_data_from_holes") else { return };
    let file = new_file(&store, "sparse");
    file.write_all_at(&[7; 10], 5 * BLOCK + 1).unwrap();
    file.set_len(1 << 30).unwrap();
    file.write_all_at(b"end", (1 << 30) - 3).unwrap();
    let last = (1 << 30) - BLOCK;
    for synced in [false, true] {
        if synced {
            file.sync_all().unwrap();
        }
        assert_eq!(seek(&file, SeekFrom::Data(0)), Ok(5 * BLOCK), "synced {synced}");
        assert_eq!(seek(&file, SeekFrom::Data(5 * BLOCK + 9)), Ok(5 * BLOCK + 9));
        assert_eq!(seek(&file, SeekFrom::Hole(5 * BLOCK)), Ok(6 * BLOCK));
        assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(0));
        assert_eq!(seek(&file, SeekFrom::Data(6 * BLOCK)), Ok(last));
        assert_eq!(seek(&file, SeekFrom::Hole(last)), Ok(1 << 30));
        assert_eq!(seek(&file, SeekFrom::Data(1 << 30)), Err(Errno::NXIO));
    }
    drop(file);
    store.down_in_peace();
}

/// fallocate(2) in all its modes, together with the kernel's cached pages.
#[test]
fn fallocate_reserves_zeroes_and_punches() {
    let Some(store) = mounted("fallocate_reserves_zeroes_and_punches") else { return };
    let free = || statvfs(&store.mount).unwrap().f_bfree;
    let (keep, punch, zero) =
        (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE);
    let file = new_file(&store, "file");
    let before = free();
    fallocate(&file, keep, 0, 1 << 20).unwrap();
    assert_eq!((file.metadata().unwrap().len(), free()), (0, before - 256));
    fallocate(&file, FallocateFlags::empty(), 0, 2 << 20).unwrap();
    assert_eq!((file.metadata().unwrap().len(), free()), (2 << 20, before - 512));
    file.write_all_at(&[7; 1 << 20], 0).unwrap();
    fallocate(&file, punch | keep, 4096, 8192).unwrap();
    fallocate(&file, zero | keep, 100_000, 10).unwrap();
    fallocate(&file, zero, (2 << 20) - 1, 2).unwrap();
    assert_eq!(file.metadata().unwrap().len(), (2 << 20) + 1);
    let mut wanted = vec![7; 1 << 20];
    wanted[4096..12_288].fill(0);
    wanted[100_000..100_010].fill(0);
    wanted.resize((2 << 20) + 1, 0);
    let mut found = vec![1; wanted.len()];
    file.read_exact_at(&mut found, 0).unwrap();
    assert!(found == wanted);
    file.sync_all().unwrap();
    assert_eq!(free(), before - 512 + 2 - 1);
    for mode in [FallocateFlags::COLLAPSE_RANGE, FallocateFlags::INSERT_RANGE, punch] {
        assert_eq!(fallocate(&file, mode, 0, 4096), Err(Errno::OPNOTSUPP), "{mode:?}");
    }
    assert_eq!(fallocate(&file, keep, 0, 1 << 50), Err(Errno::NOSPC));
    drop(file);
    store.down();
}

/// Regression: a program that had a directory open, or was in it, got ESTALE for it after rmdir. A local file
/// system answers until the last one leaves it.
#[test]
fn a_directory_in_use_outlives_its_name() {
    let Some(store) = mounted("a_directory_in_use_outlives_its_name") else { return };
    let at = |name: &str| store.mount.join(name);
    for name in ["open", "replaced", "other", "cwd"] {
        std::fs::create_dir(at(name)).unwrap();
    }
    let [open, replaced] = ["open", "replaced"].map(|name| File::open(at(name)).unwrap());
    let before = open.metadata().unwrap();
    std::fs::remove_dir(at("open")).unwrap();
    std::fs::rename(at("other"), at("replaced")).unwrap();
    // Removed inodes are dropped in the background.
    std::thread::sleep(Duration::from_millis(500));
    for dir in [&open, &replaced] {
        let now = dir.metadata().unwrap();
        assert!(now.is_dir() && now.nlink() == 0, "{now:?}");
        let inside = format!("/proc/self/fd/{}", dir.as_raw_fd());
        assert!(std::fs::read_dir(&inside).unwrap().all(|entry| entry.is_err()), "it is empty");
        let made = File::create(format!("{inside}/new")).unwrap_err();
        assert_eq!(made.kind(), ErrorKind::NotFound, "{made}");
        dir.sync_all().unwrap();
    }
    assert_eq!(open.metadata().unwrap().ino(), before.ino());
    open.set_permissions(Permissions::from_mode(0o700)).unwrap();
    assert_eq!(open.metadata().unwrap().mode() & 0o7777, 0o700);
    // A program is in a directory that is removed, and a file is held by a descriptor that opens nothing.
    std::fs::write(at("held"), "7").unwrap();
    let script = format!(
        "import os, time\nos.chdir('{0}/cwd')\nheld = os.open('{0}/held', os.O_PATH)\nos.rmdir('{0}/cwd')\n\
         file = os.open('{0}/held', os.O_RDWR)\nos.unlink('{0}/held')\nos.write(file, bytes(10000))\n\
         os.fchmod(file, 0o600)\nos.close(file)\ntime.sleep(0.5)\nheld = os.fstat(held)\n\
         print(os.stat('.').st_nlink, held.st_nlink, oct(held.st_mode), held.st_size)",
        store.mount.display()
    );
    let python = Command::new("python3").args(["-c", &script]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&python.stdout).trim(), "0 0 0o100600 10000", "{python:?}");
    drop((open, replaced));
    store.down_in_peace();
}

/// `st_blocks` is the space that a file takes, at once and as `du` sums it up.
#[test]
fn st_blocks_counts_what_a_file_takes() {
    let Some(store) = mounted("st_blocks_counts_what_a_file_takes") else { return };
    let file = new_file(&store, "file");
    let blocks = || file.metadata().unwrap().blocks();
    assert_eq!(blocks(), 0);
    file.set_len(1 << 30).unwrap();
    assert_eq!(blocks(), 0, "a hole takes nothing");
    file.write_all_at(&[7; 4096], 1 << 29).unwrap();
    assert_eq!(blocks(), 8);
    file.write_all_at(&[8; 4096], 1 << 29).unwrap();
    assert_eq!(blocks(), 8, "the same block again");
    file.write_all_at(&[8; 10_000], 5).unwrap();
    assert_eq!(blocks(), 4 * 8);
    fallocate(&file, FallocateFlags::KEEP_SIZE, 0, 1 << 20).unwrap();
    assert_eq!(blocks(), 257 * 8);
    file.sync_all().unwrap();
    assert_eq!(blocks(), 257 * 8);
    fallocate(&file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 1 << 19).unwrap();
    assert_eq!(blocks(), 129 * 8);
    std::fs::create_dir(store.mount.join("dir")).unwrap();
    std::os::unix::fs::symlink("file", store.mount.join("link")).unwrap();
    let of = |name: &str| std::fs::symlink_metadata(store.mount.join(name)).unwrap().blocks();
    assert_eq!((of("dir"), of("link")), (0, 0));
    let listed = shell(&format!("du -k --apparent-size {0}/file; du -k {0}/file", store.mount.display()));
    assert!(listed.starts_with("1048576") && listed.lines().nth(1).unwrap().starts_with("516"), "{listed}");
    file.set_len(1 << 29).unwrap();
    assert_eq!(blocks(), 128 * 8);
    file.set_len(0).unwrap();
    assert_eq!(blocks(), 0);
    drop(file);
    store.down_in_peace();
}

/// copy_file_range(2) from unsynced writes, and into cached pages.
#[test]
fn copy_file_range_copies_what_was_written() {
    let Some(store) = mounted("copy_file_range_copies_what_was_written") else { return };
    let (from, to) = (new_file(&store, "from"), new_file(&store, "to"));
    let bytes: Vec<u8> = (0..3_000_000u32).map(|at| (at / 7) as u8).collect();
    from.write_all_at(&bytes, 0).unwrap();
    to.write_all_at(&[9; 200_000], 0).unwrap();
    let (mut at, mut end, mut copied) = (5, 100_000, 0);
    loop {
        match copy_file_range(&from, Some(&mut at), &to, Some(&mut end), 1 << 30).unwrap() {
            0 => break,
            part => copied += part,
        }
    }
    assert_eq!(copied, bytes.len() - 5);
    let mut found = vec![0; 100_000 + copied];
    to.read_exact_at(&mut found, 0).unwrap();
    assert!(found[..100_000].iter().all(|byte| *byte == 9) && found[100_000..] == bytes[5..]);
    assert_eq!(to.metadata().unwrap().len(), found.len() as u64);
    drop((from, to));
    store.down();
}

/// open(2) with `O_TMPFILE`, and linkat(2) of the resulting file.
#[test]
fn a_temporary_file_has_no_name_until_it_is_linked() {
    let Some(store) = mounted("a_temporary_file_has_no_name_until_it_is_linked") else { return };
    let make = |flags| open(&store.mount, OFlags::TMPFILE | OFlags::RDWR | flags, Mode::from(0o640));
    let file = match make(OFlags::empty()) {
        Ok(file) => File::from(file),
        Err(Errno::OPNOTSUPP) => {
            eprintln!(
                "SKIPPED a_temporary_file_has_no_name_until_it_is_linked: the kernel asks for none (6.1 does)"
            );
            return;
        }
        Err(error) => panic!("{error}"),
    };
    file.write_all_at(b"inside", 0).unwrap();
    assert_eq!((file.metadata().unwrap().nlink(), std::fs::read_dir(&store.mount).unwrap().count()), (0, 0));
    let path = |file: &File| format!("/proc/self/fd/{}", file.as_raw_fd());
    let named = store.mount.join("named");
    linkat(CWD, path(&file), CWD, &named, AtFlags::SYMLINK_FOLLOW).unwrap();
    assert_eq!(file.metadata().unwrap().nlink(), 1);
    drop(file);
    assert_eq!(std::fs::read(&named).unwrap(), b"inside");
    let exclusive = File::from(make(OFlags::EXCL).unwrap());
    let result = linkat(CWD, path(&exclusive), CWD, store.mount.join("no"), AtFlags::SYMLINK_FOLLOW);
    assert_eq!(result, Err(Errno::NOENT), "made with O_EXCL it never gets a name");
    drop(exclusive);
    store.audit();
    store.down();
}

/// renameat2(2) with `RENAME_WHITEOUT`, and statx(2) with the time of birth.
#[test]
fn a_whiteout_stays_and_birth_is_told() {
    let Some(store) = mounted("a_whiteout_stays_and_birth_is_told") else { return };
    let (old, new) = (store.mount.join("old"), store.mount.join("new"));
    let before = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs() as i64;
    std::fs::write(&old, b"x").unwrap();
    let result = renameat_with(CWD, &old, CWD, &new, RenameFlags::WHITEOUT);
    let born =
        |path| statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS | StatxFlags::BTIME).unwrap();
    if result == Err(Errno::PERM) {
        eprintln!("SKIPPED a whiteout: this user may make no devices");
        std::fs::rename(&old, &new).unwrap();
    } else {
        result.unwrap();
        let left = born(&old);
        assert_eq!(FileType::from_raw_mode(left.stx_mode.into()), FileType::CharacterDevice);
        assert_eq!((left.stx_rdev_major, left.stx_rdev_minor), (0, 0));
    }
    let found = born(&new);
    if found.stx_mask & StatxFlags::BTIME.bits() == 0 {
        eprintln!("SKIPPED the time of birth: the kernel asks for none (6.6 does)");
    } else {
        assert!((before..before + 120).contains(&found.stx_btime.tv_sec), "{}", found.stx_btime.tv_sec);
        assert_eq!(found.stx_size, 1);
    }
    store.down();
}

/// acl(5) with setfacl and getfacl: access, default, inheritance, chmod and the umask.
#[test]
fn access_control_lists_work() {
    let test = "access_control_lists_work";
    if !std::process::Command::new("setfacl").arg("--version").output().is_ok_and(|run| run.status.success())
    {
        eprintln!("SKIPPED {test}: no setfacl");
        return;
    }
    let Some(store) = mounted(test) else { return };
    let at = store.mount.display();
    let found = shell(&format!(
        "cd {at}; umask 027; mkdir plain; touch plain/file; stat -c %a plain plain/file
         setfacl -m u:7:rwx,g:8:r plain/file; stat -c %a plain/file; getfacl -cn plain/file
         chmod 640 plain/file; getfacl -cn plain/file
         setfacl -b plain/file; stat -c %a plain/file
         setfacl -d -m u:7:rwx plain; mkdir plain/dir; touch plain/made; stat -c %a plain/dir plain/made
         getfacl -cnd plain/dir; getfacl -cn plain/made"
    ));
    let lines: Vec<&str> = found.lines().filter(|line| !line.is_empty()).collect();
    let mut wanted = vec!["750", "640", "670"];
    wanted.extend(["user::rw-", "user:7:rwx", "group::r--", "group:8:r--", "mask::rwx", "other::---"]);
    wanted.extend(["user::rw-", "user:7:rwx\t#effective:r--", "group::r--", "group:8:r--", "mask::r--"]);
    wanted.extend(["other::---", "640", "770", "660"]);
    wanted.extend(["user::rwx", "user:7:rwx", "group::r-x", "mask::rwx", "other::---"]);
    wanted.extend(["user::rw-", "user:7:rwx\t#effective:rw-", "group::r-x\t#effective:r--", "mask::rw-"]);
    wanted.push("other::---");
    let words = |line: &&str| line.split_whitespace().collect::<Vec<_>>().join("\t");
    assert_eq!(lines.iter().map(words).collect::<Vec<_>>(), wanted);
    store.audit();
    store.down();
}
