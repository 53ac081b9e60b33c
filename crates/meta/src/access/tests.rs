use super::*;
use crate::inode::{Data, Layout};
use penstock_wire::metadata::Time;

fn inode(mode: u32, uid: u32, gid: u32) -> Inode {
    let now = Time::from_ns(0);
    Inode {
        ino: Ino(9),
        mode,
        nlink: 1,
        uid,
        gid,
        rdev: 0,
        size: 0,
        times: [now; 4],
        truncations: 0,
        parent: Ino(0),
        entries: 0,
        layout: Layout::of_one_target(256),
        is_spread: false,
        data: Data::None,
    }
}

/// A list of the kernel's form: tag, permissions and id of each entry.
fn acl(entries: &[(u16, u16, u32)]) -> Acl {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(perm.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    Acl::decode(&value).unwrap()
}

const FILE: u32 = 0o100_000;
const DIR: u32 = 0o040_000;

#[test]
fn the_class_of_a_user_decides_and_no_other() {
    let user = User::new(7, 70, vec![71]);
    // Columns: mode, owner, group, and the accesses that are allowed.
    for (mode, uid, gid, allowed) in [
        (0o400, 7, 70, READ),
        (0o077, 7, 70, 0),
        (0o040, 8, 70, READ),
        (0o020, 8, 71, WRITE),
        (0o707, 8, 71, 0),
        (0o004, 8, 80, READ),
        (0o770, 8, 80, 0),
    ] {
        let inode = inode(FILE | mode, uid, gid);
        for wanted in 1..8 {
            let expected = wanted & allowed == wanted;
            assert_eq!(allows(&user, &inode, None, wanted), expected, "{mode:o} {uid} {gid} {wanted}");
        }
    }
}

#[test]
fn user_0_does_everything_but_execute_what_nobody_may() {
    let root = User::new(0, 0, vec![]);
    for (mode, wanted, expected) in [
        (FILE, READ | WRITE, true),
        (FILE | 0o666, EXECUTE, false),
        (FILE | 0o010, EXECUTE, true),
        (DIR, EXECUTE | WRITE | READ, true),
    ] {
        assert_eq!(allows(&root, &inode(mode, 7, 7), None, wanted), expected, "{mode:o} {wanted}");
    }
}

#[test]
fn the_first_entry_of_a_list_that_fits_decides() {
    const NONE: u32 = u32::MAX;
    let (owner, other) = ((1, 7, NONE), |perm| (32, perm, NONE));
    // Columns: the entries between owner and others, permissions of others, user, groups, and the accesses
    // that are allowed. The group of the inode is 50.
    for (entries, others, uid, groups, allowed) in [
        (&[(2, 4, 9), (4, 7, NONE), (16, 7, NONE)][..], 7, 9, &[50][..], 4),
        (&[(2, 7, 9), (4, 0, NONE), (16, 4, NONE)], 0, 9, &[], 4),
        (&[(4, 4, NONE), (8, 2, 60), (16, 7, NONE)], 7, 9, &[50, 60], 6),
        (&[(4, 4, NONE), (8, 2, 60), (16, 7, NONE)], 7, 9, &[60], 2),
        (&[(4, 4, NONE), (8, 2, 60), (16, 1, NONE)], 7, 9, &[60], 0),
        (&[(4, 4, NONE), (8, 2, 60), (16, 1, NONE)], 5, 9, &[61], 5),
    ] {
        let list = acl(&[&[owner][..], entries, &[other(others)]].concat());
        let user = User::new(uid, 1000, groups.to_vec());
        let inode = inode(FILE | 0o070, 1, 50);
        for wanted in [READ, WRITE, EXECUTE] {
            let expected = wanted & allowed == wanted;
            assert_eq!(allows(&user, &inode, Some(&list), wanted), expected, "{entries:?} {uid} {wanted}");
        }
        // One entry must give everything that is wanted at once.
        assert!(!allows(&user, &inode, Some(&list), READ | WRITE), "{entries:?}");
    }
}

#[test]
fn a_list_is_not_asked_if_the_mode_gives_the_group_nothing() {
    const NONE: u32 = u32::MAX;
    let list = acl(&[(1, 7, NONE), (2, 7, 9), (4, 7, NONE), (16, 0, NONE), (32, 4, NONE)]);
    let user = User::new(9, 9, vec![]);
    assert!(allows(&user, &inode(FILE | 0o704, 1, 50), Some(&list), READ), "as others, like Linux");
}
