//! rename(2) and renameat2(2): every case on one small tree.

use super::bed::{Bed, errno, run};
use crate::MetaError;
use penstock_wire::metadata::{FoundNames, RenameRequest};
use rustix::io::Errno;
use std::collections::BTreeMap;

const TREE: &str = "a b d/ d/x e/";

/// The tree before a case, and the path that each inode has in it. `h` is a hard link to `a`.
async fn plant(bed: &Bed) -> BTreeMap<u64, String> {
    for path in TREE.split(' ') {
        bed.add(path).await.unwrap();
    }
    bed.link(bed.find("a").await.unwrap(), "h").await.unwrap();
    let tree = bed.tree().await;
    tree.into_iter().filter(|(path, _)| path != "h").map(|(path, ino)| (ino.0, path)).collect()
}

/// The tree now: paths, each with the path that its inode had before if that was another one.
async fn show(bed: &Bed, before: &BTreeMap<u64, String>) -> String {
    let shown = bed.tree().await.into_iter().map(|(path, ino)| match before.get(&ino.0) {
        Some(old) if *old == path => path,
        Some(old) => format!("{path}={old}"),
        None => format!("{path}=new"),
    });
    shown.collect::<Vec<_>>().join(" ")
}

fn check(from: &str, to: &str, flags: RenameRequest, expect: Result<&str, Errno>) {
    run(async |bed| {
        let before = plant(bed).await;
        let result = bed.rename(from, to, flags.clone()).await;
        let case = format!("{from} -> {to} {flags:?}");
        assert_eq!(errno(result), expect.err(), "{case}");
        let unchanged = "a b d/ d/x e/ h=a";
        assert_eq!(show(bed, &before).await, expect.unwrap_or(unchanged), "{case}");
        bed.meta.wait_reaped().await;
        bed.check(&case);
    });
}

fn plain() -> RenameRequest {
    RenameRequest::default()
}

#[test]
fn a_name_moves_or_replaces_another_one() {
    let long = "n".repeat(256);
    for (from, to, expect) in [
        ("a", "c", Ok("b c=a d/ d/x e/ h=a")),
        ("a", "e/a", Ok("b d/ d/x e/ e/a=a h=a")),
        ("a", "b", Ok("b=a d/ d/x e/ h=a")),
        ("b", "a", Ok("a=b d/ d/x e/ h=a")),
        ("d/x", "b", Ok("a b=d/x d/ e/ h=a")),
        ("d", "c", Ok("a b c/=d/ c/x=d/x e/ h=a")),
        ("d", "e", Ok("a b e/=d/ e/x=d/x h=a")),
        ("e", "d/e", Ok("a b d/ d/e/=e/ d/x h=a")),
        // Two names of one inode, or one name.
        ("a", "h", Ok("a b d/ d/x e/ h=a")),
        ("a", "a", Ok("a b d/ d/x e/ h=a")),
        ("d", "d", Ok("a b d/ d/x e/ h=a")),
        ("a", "d", Err(Errno::ISDIR)),
        ("d", "a", Err(Errno::NOTDIR)),
        ("e", "d", Err(Errno::NOTEMPTY)),
        ("d", "d/y", Err(Errno::INVAL)),
        ("d", "a/y", Err(Errno::NOTDIR)),
        ("c", "b", Err(Errno::NOENT)),
        ("a", "", Err(Errno::INVAL)),
        ("a", ".", Err(Errno::INVAL)),
        ("a", "..", Err(Errno::INVAL)),
        ("a", &long, Err(Errno::NAMETOOLONG)),
        (&long, "a", Err(Errno::NAMETOOLONG)),
    ] {
        check(from, to, plain(), expect);
    }
}

#[test]
fn flags_of_renameat2_are_obeyed() {
    let no_replace = RenameRequest { no_replace: true, ..plain() };
    let exchange = RenameRequest { exchange: true, ..plain() };
    let whiteout = RenameRequest { whiteout: true, ..plain() };
    for (from, to, flags, expect) in [
        ("a", "c", &no_replace, Ok("b c=a d/ d/x e/ h=a")),
        ("a", "b", &no_replace, Err(Errno::EXIST)),
        ("a", "h", &no_replace, Err(Errno::EXIST)),
        ("a", "b", &exchange, Ok("a=b b=a d/ d/x e/ h=a")),
        ("a", "d", &exchange, Ok("a/=d/ a/x=d/x b d=a e/ h=a")),
        ("e", "d/x", &exchange, Ok("a b d/ d/x/=e/ e=d/x h=a")),
        ("d", "e", &exchange, Ok("a b d/=e/ e/=d/ e/x=d/x h=a")),
        ("a", "h", &exchange, Ok("a b d/ d/x e/ h=a")),
        ("a", "c", &exchange, Err(Errno::NOENT)),
        ("d", "d/x", &exchange, Err(Errno::INVAL)),
        ("d/x", "d", &exchange, Err(Errno::INVAL)),
        ("a", "c", &whiteout, Ok("a=new b c=a d/ d/x e/ h=a")),
        ("a", "b", &whiteout, Ok("a=new b=a d/ d/x e/ h=a")),
        ("a", "b", &RenameRequest { exchange: true, ..no_replace.clone() }, Err(Errno::INVAL)),
        ("a", "b", &RenameRequest { exchange: true, ..whiteout.clone() }, Err(Errno::INVAL)),
    ] {
        check(from, to, flags.clone(), expect);
    }
}

#[test]
fn a_rename_of_an_earlier_start_is_refused() {
    run(async |bed| {
        plant(bed).await;
        bed.meta.sync().await.unwrap();
        bed.crash().await;
        for (start, expect) in [(1, false), (0, true), (2, true)] {
            let (from, to) = if bed.find("a").await.is_ok() { ("a", "c") } else { ("c", "a") };
            let result = bed.rename(from, to, RenameRequest { start, ..plain() }).await;
            assert_eq!(result.is_ok(), expect, "start {start}");
            if let Err(error) = result {
                assert!(matches!(error, MetaError::Restarted), "{error}");
            }
        }
    });
}

/// Regression: another client made a file, and made it durable, after this one had looked for it. The rename
/// replaced it by a file that was not synced.
#[test]
fn a_rename_of_other_inodes_than_its_client_found_is_refused() {
    run(async |bed| {
        plant(bed).await;
        let (a, b) = (bed.find("a").await.unwrap().0, bed.find("b").await.unwrap().0);
        let c = b + 100;
        for (to, moved, replaced, exchange, expect) in [
            ("b", a, 0, false, false),
            ("b", a, c, true, false),
            ("b", b, b, false, false),
            ("new", 0, 0, false, false),
            ("b", a, b, true, true),
            ("b", b, 0, false, false),
            // Another file is replaced than the one that was found, or none: the moved one is synced.
            ("b", b, c, false, true),
        ] {
            let found = Some(FoundNames { moved, replaced });
            let result = bed.rename("a", to, RenameRequest { found, exchange, ..plain() }).await;
            assert_eq!(result.is_ok(), expect, "{to}: {moved} over {replaced}");
            if let Err(error) = result {
                assert!(matches!(error, MetaError::Renamed), "{error}");
            }
        }
    });
}

#[test]
fn a_replaced_file_that_is_open_stays_until_its_last_close() {
    run(async |bed| {
        let replaced = bed.add("b").await.unwrap();
        bed.add("a").await.unwrap();
        bed.meta.parts.open(bed.who.session, replaced).unwrap();
        bed.rename("a", "b", plain()).await.unwrap();
        bed.meta.wait_reaped().await;
        assert_eq!(bed.inode(replaced).await.unwrap().nlink, 0);
        bed.check("the rename");
        bed.meta.parts.close(bed.who.session, replaced);
        bed.meta.wait_reaped().await;
        assert_eq!(errno(bed.inode(replaced).await), Some(Errno::STALE));
        bed.check("the close");
    });
}

#[test]
fn a_failed_transaction_changes_no_name() {
    run(async |bed| {
        let before = plant(bed).await;
        bed.kv.fail_after(0);
        let result = bed.rename("a", "b", plain()).await;
        assert!(matches!(result, Err(MetaError::Kv(_))), "{result:?}");
        assert_eq!(show(bed, &before).await, "a b d/ d/x e/ h=a");
        bed.check("the failure");
    });
}
