//! Extended attributes and access control lists.

use super::bed::{Bed, DIR, FILE, errno, run};
use crate::{MetaError, NAME_MAX, ROOT, XATTR_MAX, ops};
use penstock_base::Ino;
use penstock_wire::metadata::{
    BytesReply, InodeRequest, MakeRequest, NamesReply, SetAttrRequest, XattrRequest,
};
use prost::Message;
use rustix::io::Errno;

async fn set(bed: &Bed, ino: Ino, name: &str, value: &[u8]) -> Result<(), MetaError> {
    let request = XattrRequest { ino: ino.0, name: name.into(), value: value.into(), ..Default::default() };
    ops::set_xattr(&bed.meta.parts, bed.who, request).await.map(drop)
}

async fn get(bed: &Bed, ino: Ino, name: &str) -> Result<Vec<u8>, MetaError> {
    let request = XattrRequest { ino: ino.0, name: name.into(), ..Default::default() };
    let reply = ops::get_xattr(&bed.meta.parts, bed.who, request).await?;
    Ok(BytesReply::decode(&reply[..]).unwrap().bytes)
}

async fn list(bed: &Bed, ino: Ino) -> Vec<String> {
    let reply = ops::list_xattr(&bed.meta.parts, bed.who, InodeRequest { ino: ino.0 }).await.unwrap();
    let names = NamesReply::decode(&reply[..]).unwrap().names;
    names.into_iter().map(|name| String::from_utf8(name).unwrap()).collect()
}

#[test]
fn values_come_back_until_they_are_removed() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        // Absence is remembered, and forgotten when an attribute is set.
        assert_eq!(errno(get(bed, ino, "user.a").await), Some(Errno::NODATA));
        assert!(list(bed, ino).await.is_empty());
        for (name, value) in
            [("user.a", &b"1"[..]), ("user.b", b""), ("user.a", b"22"), ("user.c", &[7; XATTR_MAX])]
        {
            set(bed, ino, name, value).await.unwrap();
            assert_eq!(get(bed, ino, name).await.unwrap(), value, "{name}");
        }
        assert_eq!(list(bed, ino).await, ["user.a", "user.b", "user.c"]);
        let remove = |name: &str| XattrRequest { ino: ino.0, name: name.into(), ..Default::default() };
        for (name, expect) in [("user.b", None), ("user.b", Some(Errno::NODATA))] {
            assert_eq!(errno(ops::remove_xattr(&bed.meta.parts, bed.who, remove(name)).await), expect);
        }
        assert_eq!(list(bed, ino).await, ["user.a", "user.c"]);
        bed.check("the changes");
        bed.remove("f").await.unwrap();
        bed.meta.wait_reaped().await;
        bed.check("the removal");
    });
}

#[test]
fn bounds_and_flags_are_obeyed() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        set(bed, ino, "user.here", b"").await.unwrap();
        let long = "n".repeat(NAME_MAX + 1);
        let request = |name: &str, value: usize, create, replace| XattrRequest {
            ino: ino.0,
            name: name.into(),
            value: vec![0; value],
            create,
            replace,
            ..Default::default()
        };
        for (request, expect) in [
            (request("", 0, false, false), Some(Errno::RANGE)),
            (request(&long, 0, false, false), Some(Errno::RANGE)),
            (request(&long[1..], 0, false, false), None),
            (request("a\0b", 0, false, false), Some(Errno::INVAL)),
            (request("user.x", XATTR_MAX + 1, false, false), Some(Errno::TOOBIG)),
            (request("user.here", 1, true, false), Some(Errno::EXIST)),
            (request("user.new", 1, true, false), None),
            (request("user.gone", 1, false, true), Some(Errno::NODATA)),
            (request("user.here", 1, false, true), None),
        ] {
            let case = format!("{request:.60?}");
            assert_eq!(errno(ops::set_xattr(&bed.meta.parts, bed.who, request).await), expect, "{case}");
        }
        for number in list(bed, ino).await.len()..1024 {
            set(bed, ino, &format!("user.n{number}"), b"").await.unwrap();
        }
        assert_eq!(errno(set(bed, ino, "user.more", b"").await), Some(Errno::NOSPC));
        set(bed, ino, "user.here", b"again").await.unwrap();
        assert_eq!(list(bed, ino).await.len(), 1024);
    });
}

/// A list as the kernel sends it, from tag, permissions and id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in entries {
        value.extend_from_slice(&tag.to_le_bytes());
        value.extend_from_slice(&perm.to_le_bytes());
        value.extend_from_slice(&id.to_le_bytes());
    }
    value
}

const NONE: u32 = u32::MAX;
const ACCESS: &str = "system.posix_acl_access";
const DEFAULT: &str = "system.posix_acl_default";

#[test]
fn a_list_and_the_mode_agree() {
    run(async |bed| {
        let ino = bed.add("f").await.unwrap();
        let named = acl(&[(1, 7, NONE), (2, 6, 1000), (4, 5, NONE), (16, 4, NONE), (32, 1, NONE)]);
        set(bed, ino, ACCESS, &named).await.unwrap();
        assert_eq!(bed.inode(ino).await.unwrap().mode, 0o100_741, "the mask is the group");
        let chmod = SetAttrRequest { ino: ino.0, mode: Some(0o620), ..Default::default() };
        ops::set_attr(&bed.meta.parts, bed.who, chmod).await.unwrap();
        let changed = acl(&[(1, 6, NONE), (2, 6, 1000), (4, 5, NONE), (16, 2, NONE), (32, 0, NONE)]);
        assert_eq!(get(bed, ino, ACCESS).await.unwrap(), changed);
        // A list that says no more than a mode is not stored.
        let plain = acl(&[(1, 6, NONE), (4, 4, NONE), (32, 4, NONE)]);
        set(bed, ino, ACCESS, &plain).await.unwrap();
        assert_eq!(errno(get(bed, ino, ACCESS).await), Some(Errno::NODATA));
        assert_eq!(bed.inode(ino).await.unwrap().mode, 0o100_644);
        assert_eq!(errno(set(bed, ino, DEFAULT, &plain).await), Some(Errno::ACCESS), "of a file");
        assert_eq!(errno(set(bed, ino, ACCESS, &plain[..9]).await), Some(Errno::INVAL));
    });
}

#[test]
fn a_default_list_is_inherited_in_place_of_the_umask() {
    run(async |bed| {
        let dir = bed.add("d/").await.unwrap();
        let default = acl(&[(1, 7, NONE), (2, 7, 1000), (4, 5, NONE), (16, 7, NONE), (32, 0, NONE)]);
        set(bed, dir, DEFAULT, &default).await.unwrap();
        let make = |dir: Ino, name: &str, mode| MakeRequest {
            dir: dir.0,
            name: name.into(),
            mode,
            umask: 0o077,
            ..Default::default()
        };
        for (parent, name, mode, expect, inherits) in [
            (ROOT, "f", FILE | 0o666, 0o100_600, false),
            (dir, "f", FILE | 0o666, 0o100_660, true),
            (dir, "e", DIR | 0o777, 0o040_770, true),
        ] {
            let ino = bed.make(make(parent, name, mode)).await.unwrap();
            assert_eq!(bed.inode(ino).await.unwrap().mode, expect, "{name} in {parent}");
            assert_eq!(get(bed, ino, ACCESS).await.is_ok(), inherits, "{name} in {parent}");
            let passes_on = inherits && mode & DIR == DIR;
            assert_eq!(get(bed, ino, DEFAULT).await.ok(), passes_on.then(|| default.clone()), "{name}");
        }
        let link = MakeRequest { target: b"f".to_vec(), ..make(dir, "l", 0o120_777) };
        let link = bed.make(link).await.unwrap();
        assert!(list(bed, link).await.is_empty(), "a symbolic link has no list");
        bed.check("the inheritance");
    });
}
