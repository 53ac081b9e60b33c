//! Making, finding, linking and removing names, and listing directories.

use super::bed::{DIR, FILE, errno, run};
use crate::{LINK_MAX, MetaError, PATH_MAX, ROOT};
use penstock_base::Ino;
use penstock_wire::metadata::MakeRequest;
use rustix::io::Errno;

fn request(name: &str, mode: u32) -> MakeRequest {
    MakeRequest { dir: ROOT.0, name: name.into(), mode, ..Default::default() }
}

#[test]
fn names_are_made_and_refused() {
    run(async |bed| {
        bed.add("f").await.unwrap();
        let nameless = MakeRequest { nameless: true, open: true, ..request("", FILE) };
        let long = "n".repeat(256);
        for (made, expect) in [
            (request("g", FILE), None),
            (request("f", FILE), Some(Errno::EXIST)),
            (request("f", DIR), Some(Errno::EXIST)),
            (request("d", DIR), None),
            (request("p", 0o010_600), None),
            (request("s", 0o140_600), None),
            (MakeRequest { target: vec![b'x'; PATH_MAX], ..request("l", 0o120_777) }, None),
            (
                MakeRequest { target: vec![b'x'; PATH_MAX + 1], ..request("m", 0o120_777) },
                Some(Errno::NAMETOOLONG),
            ),
            (MakeRequest { target: vec![], ..request("m", 0o120_777) }, Some(Errno::NOENT)),
            (MakeRequest { target: b"a\0b".to_vec(), ..request("m", 0o120_777) }, Some(Errno::INVAL)),
            (request("", FILE), Some(Errno::INVAL)),
            (request(".", DIR), Some(Errno::INVAL)),
            (request("..", DIR), Some(Errno::INVAL)),
            (request("a/b", FILE), Some(Errno::INVAL)),
            (request("a\0b", FILE), Some(Errno::INVAL)),
            (request(&long[1..], FILE), None),
            (request(&long, FILE), Some(Errno::NAMETOOLONG)),
            (nameless.clone(), None),
            (MakeRequest { open: false, ..nameless.clone() }, Some(Errno::INVAL)),
            (MakeRequest { mode: DIR, ..nameless }, Some(Errno::INVAL)),
            (MakeRequest { dir: 77, ..request("x", FILE) }, Some(Errno::STALE)),
        ] {
            let case = format!("{:?} {:o}", String::from_utf8_lossy(&made.name), made.mode);
            assert_eq!(errno(bed.make(made).await), expect, "{case}");
            bed.check(&case);
        }
        let untyped = bed.make(request("u", 0o644)).await;
        assert!(matches!(untyped, Err(MetaError::Request(_))), "{untyped:?}");
        let in_file = MakeRequest { dir: bed.find("f").await.unwrap().0, ..request("x", FILE) };
        assert_eq!(errno(bed.make(in_file).await), Some(Errno::NOTDIR));
    });
}

#[test]
fn a_directory_with_the_group_bit_gives_its_group() {
    run(async |bed| {
        let set = MakeRequest { gid: 7, ..request("d", DIR | 0o2000) };
        let dir = bed.make(set).await.unwrap();
        let inside = |name: &str, mode| MakeRequest { dir: dir.0, gid: 1, ..request(name, mode) };
        for (name, mode, expect) in [("f", FILE, FILE), ("e", DIR, DIR | 0o2000)] {
            let ino = bed.make(inside(name, mode)).await.unwrap();
            let inode = bed.inode(ino).await.unwrap();
            assert_eq!((inode.gid, inode.mode), (7, expect), "{name}");
        }
    });
}

#[test]
fn an_inode_lives_as_long_as_one_of_its_names() {
    run(async |bed| {
        let file = bed.add("f").await.unwrap();
        bed.add("d/").await.unwrap();
        for (path, expect) in
            [("g", None), ("d/g", None), ("g", Some(Errno::EXIST)), ("d", Some(Errno::EXIST))]
        {
            assert_eq!(errno(bed.link(file, path).await), expect, "{path}");
        }
        let dir = bed.find("d").await.unwrap();
        assert_eq!(errno(bed.link(dir, "e").await), Some(Errno::PERM));
        for (path, links, expect) in [
            ("f/", 3, Some(Errno::NOTDIR)),
            ("d", 3, Some(Errno::ISDIR)),
            ("d/", 3, Some(Errno::NOTEMPTY)),
            ("x", 3, Some(Errno::NOENT)),
            ("f", 2, None),
            ("d/g", 1, None),
            ("d/", 1, None),
        ] {
            assert_eq!(errno(bed.remove(path).await), expect, "{path}");
            assert_eq!(bed.inode(file).await.unwrap().nlink, links, "{path}");
            bed.meta.wait_reaped().await;
            bed.check(path);
        }
        bed.remove("g").await.unwrap();
        bed.meta.wait_reaped().await;
        assert_eq!(errno(bed.inode(file).await), Some(Errno::STALE));
        assert_eq!(errno(bed.link(file, "h").await), Some(Errno::STALE));
        assert!(!bed.chunks.made.borrow().contains(&file), "the chunk store was told");
        assert_eq!(bed.diagnose().inodes, 1, "the root is left");
    });
}

#[test]
fn links_are_bounded() {
    run(async |bed| {
        let file = bed.add("f").await.unwrap();
        let mut inode = bed.inode(file).await.unwrap();
        inode.nlink = LINK_MAX - 1;
        bed.put_row(crate::rows::inode_key(file), Some(inode.encode())).await;
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        bed.link(file, "g").await.unwrap();
        assert_eq!(errno(bed.link(file, "h").await), Some(Errno::MLINK));
    });
}

#[test]
fn a_file_without_a_name_gets_one_or_goes() {
    run(async |bed| {
        let nameless = MakeRequest { nameless: true, open: true, ..request("", FILE) };
        let (kept, gone) = (bed.make(nameless.clone()).await.unwrap(), bed.make(nameless).await.unwrap());
        assert_eq!(bed.diagnose().removed, 2, "both are in the queue from the beginning");
        bed.link(kept, "f").await.unwrap();
        for ino in [kept, gone] {
            bed.meta.parts.close(bed.who.session, ino);
        }
        bed.meta.wait_reaped().await;
        assert_eq!(bed.inode(kept).await.unwrap().nlink, 1);
        assert_eq!(errno(bed.inode(gone).await), Some(Errno::STALE));
        bed.check("the last close");
    });
}

/// Regression: a mount that had a file open gave it a name again after another one had removed its last one.
#[test]
fn a_file_whose_last_name_is_gone_gets_no_other() {
    run(async |bed| {
        let file = bed.make(MakeRequest { open: true, ..request("f", FILE) }).await.unwrap();
        bed.remove("f").await.unwrap();
        assert_eq!(errno(bed.link(file, "g").await), Some(Errno::NOENT));
        let nameless = MakeRequest { nameless: true, open: true, ..request("", FILE) };
        let nameless = bed.make(nameless).await.unwrap();
        bed.link(nameless, "h").await.unwrap();
        bed.remove("h").await.unwrap();
        assert_eq!(errno(bed.link(nameless, "g").await), Some(Errno::NOENT), "it has had one");
        for ino in [file, nameless] {
            bed.meta.parts.close(bed.who.session, ino);
        }
        bed.meta.wait_reaped().await;
        bed.check("links of removed files");
    });
}

#[test]
fn a_listing_goes_on_where_it_stopped() {
    run(async |bed| {
        for number in 0..60 {
            bed.add(&format!("f{number}")).await.unwrap();
        }
        let (mut seen, mut after, mut is_last) = (Vec::new(), 0, false);
        while !is_last {
            let (entries, end) = bed.list(ROOT, after, 7).await;
            assert!(entries.len() <= 7 && entries.iter().all(|(_, _, cookie)| *cookie > after));
            after = entries.last().map_or(after, |last| last.2);
            for (name, _, _) in entries {
                // Names are added and removed beside the listing.
                let number: u32 = name[1..].parse().unwrap();
                if number.is_multiple_of(3) && number < 60 {
                    bed.remove(&name).await.unwrap();
                    bed.add(&format!("f{}", number + 100)).await.unwrap();
                }
                seen.push(number);
            }
            is_last = end;
        }
        let mut old: Vec<u32> = seen.into_iter().filter(|number| *number < 60).collect();
        old.sort_unstable();
        assert_eq!(old, (0..60).collect::<Vec<_>>(), "each name that was there all the time, once");
        bed.meta.wait_reaped().await;
        bed.check("the listing");
    });
}

#[test]
fn numbers_of_inodes_are_given_once_whatever_a_crash_loses() {
    run(async |bed| {
        let mut given = std::collections::BTreeSet::new();
        for round in 0..3 {
            for number in 0..5 {
                let ino = bed.add(&format!("r{round}n{number}")).await.unwrap();
                assert!(given.insert(ino), "inode {ino} was given before");
            }
            bed.crash().await;
        }
        assert!(bed.tree().await.is_empty(), "nothing was made durable");
        assert_eq!(errno(bed.inode(Ino(given.first().unwrap().0)).await), Some(Errno::STALE));
    });
}
