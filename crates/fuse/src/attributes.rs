//! Requests on attributes, extended attributes and the file system as a whole.

use crate::abi::{GetxattrIn, GetxattrOut, SetattrIn, SetxattrExt, SetxattrIn, StatfsOut, fattr};
use crate::attr::{attributes, errno, extended, nanoseconds};
use crate::data::CAPABILITY;
use crate::device::{Answer, Request};
use crate::session::Session;
use penstock_base::env::timeout;
use penstock_base::{BLOCK_BYTES, Ino, LocalBoxFuture};
use penstock_client::{Hold, Purpose, SetAttrRequest};
use penstock_wire::Failure;
use penstock_wire::names::{Attr, XattrRequest};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::time::Duration;

/// A notice of a size that takes longer waits for a page.
const BEFORE_REPLY: Duration = Duration::from_millis(50);
/// Looks at a file's size that meet a write of it each.
const MOST_LOOKS: u32 = 1000;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
const SETXATTR_ACL_KILL_SGID: u32 = 1;
const NAME_BYTES: u32 = 255;
/// The class of extended attributes that only an administrator sees.
const TRUSTED: &[u8] = b"trusted.";

impl Session {
    /// Attributes of an inode, whose size the kernel goes by from here on.
    async fn attr_for_kernel(&self, request: &Request) -> Result<Attr, Failure> {
        let ino = self.ino(request);
        let attr = self.without_unseen(ino, async || self.client.get_attr(ino).await).await?;
        let is_file = FileType::from_raw_mode(attr.mode) == FileType::RegularFile;
        let by_reply = !self.cache.sizes.is_open_for_writing(ino) && !self.cache.may_ignore_size(ino);
        if !is_file || by_reply || !self.cache.sizes.may_be_told(ino, attr.size) {
            self.cache.is_answered(ino, attr.size);
            self.cache.none_told(ino).await;
            return Ok(attr);
        }
        self.tell_size(ino).await
    }

    /// What `look` finds, without the end of a direct write while the kernel has pages from before that: as soon as a program knows
    /// of the end it reads there, and stores there through a map.
    async fn without_unseen<T>(
        &self,
        ino: Ino,
        look: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        for _ in 1..MOST_LOOKS {
            self.client.direct_writes_seen(ino).await;
            let found = look().await?;
            if !self.client.has_unseen_writes(ino) {
                return Ok(found);
            }
        }
        look().await
    }

    /// Lets the kernel know a file's size by a notice, before anything else says it.
    async fn tell_size(&self, ino: Ino) -> Result<Attr, Failure> {
        let look = async || {
            let hold = self.client.hold(ino, Purpose::Read).await?;
            Ok((self.client.get_attr(ino).await?, hold))
        };
        let (attr, hold) = self.without_unseen(ino, look).await?;
        let told = self.begin_to_tell(&hold, ino, attr.size);
        // The lease goes only when nobody holds it.
        drop(hold);
        told.await;
        Ok(attr)
    }

    /// Begins to tell the kernel a size that is known under a hold.
    fn begin_to_tell(&self, hold: &Hold, ino: Ino, size: u64) -> LocalBoxFuture<'static, ()> {
        match size.checked_sub(1) {
            Some(last) => self.cache.grow(ino, hold.store(last..size)),
            None => self.cache.none_told(ino),
        }
    }

    /// Tells the kernel a size that is known under a hold, which lasts until the reply. Somebody else may have the page
    /// locked that the last byte lies in, and wait for the lease: then the notice comes behind the reply.
    pub(crate) async fn tell_before_reply(&self, hold: &Hold, ino: Ino, size: u64) {
        let _ = timeout(self.cache.env(), BEFORE_REPLY, self.begin_to_tell(hold, ino, size)).await;
    }

    /// Lets the kernel know a size that is known under a hold, for a read of a page, which it has locked.
    pub(crate) async fn tell_before_read(&self, hold: &Hold, ino: Ino, size: u64) {
        if self.cache.sizes.may_be_told(ino, size) {
            // It is over when the page has been read.
            drop(self.begin_to_tell(hold, ino, size));
        }
        if self.cache.is_telling(ino) {
            self.cache.asker.until_known(self.root.outer(ino.0), size).await;
        }
    }

    /// Tells the kernel the size of an open file, later if that fails now.
    pub(crate) async fn look_at_size(&self, ino: Ino) {
        if let Err(failure) = self.tell_size(ino).await {
            tracing::debug!(%failure, %ino, "the size of an open file is looked at later");
            self.cache.looks.is_due(ino);
        }
    }

    /// The same for a program that has got a lock, if the size may have changed: under locks it goes by what others wrote.
    pub(crate) async fn look_under_lock(&self, ino: Ino) {
        if self.client.was_shared() && self.cache.looks.take_one(ino) {
            self.look_at_size(ino).await;
        }
    }

    pub(crate) async fn getattr(&self, request: &Request) -> Result<Answer, Errno> {
        let attr = self.attr_for_kernel(request).await.map_err(|failure| errno(&failure))?;
        Ok(Answer::of(&attributes(self.root, &attr, self.valid())))
    }

    pub(crate) async fn statx(&self, request: &Request) -> Result<Answer, Errno> {
        let attr = self.attr_for_kernel(request).await.map_err(|failure| errno(&failure))?;
        Ok(Answer::of(&extended(self.root, &attr, self.valid())))
    }

    pub(crate) async fn setattr(&self, request: &mut Request) -> Result<Answer, Errno> {
        let new: SetattrIn = request.argument()?;
        let valid = |flag: u32| new.valid & flag != 0;
        let time = |flag: u32, now: u32, seconds: u64, rest: u32| match (valid(flag), valid(now)) {
            (true, true) => Some(self.client.now_ns()),
            (true, false) => Some(nanoseconds(seconds, rest)),
            (false, _) => None,
        };
        let change = SetAttrRequest {
            ino: self.ino(request).0,
            mode: valid(fattr::MODE).then_some(new.mode),
            uid: valid(fattr::UID).then_some(new.uid),
            gid: valid(fattr::GID).then_some(new.gid),
            size: valid(fattr::SIZE).then_some(new.size),
            atime_ns: time(fattr::ATIME, fattr::ATIME_NOW, new.atime, new.atimensec),
            mtime_ns: time(fattr::MTIME, fattr::MTIME_NOW, new.mtime, new.mtimensec),
            ctime_ns: valid(fattr::CTIME).then(|| nanoseconds(new.ctime, new.ctimensec)),
            drop_set_id: valid(fattr::KILL_SUIDGID),
            ..SetAttrRequest::default()
        };
        let sizes = valid(fattr::SIZE);
        let fail = |failure| errno(&failure);
        // Until the kernel has the answer.
        request.hold = Some(self.client.hold_to_set(&change).await.map_err(fail)?);
        let attr = self.client.set_attr_held(change).await.map_err(fail)?;
        match sizes {
            true => self.cache.sizes.is_cut(Ino(attr.ino), attr.size),
            false => self.cache.is_answered(Ino(attr.ino), attr.size),
        }
        Ok(Answer::of(&attributes(self.root, &attr, self.valid())))
    }

    pub(crate) async fn readlink(&self, request: &Request) -> Result<Answer, Errno> {
        self.client.read_link(self.ino(request)).await.map(Answer::Bytes).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn statfs(&self) -> Result<Answer, Errno> {
        let found = self.client.stat_fs().await.map_err(|failure| errno(&failure))?;
        Ok(Answer::of(&StatfsOut {
            blocks: found.total_blocks,
            bfree: found.free_blocks,
            bavail: found.available_blocks,
            files: found.inodes,
            ffree: found.free_inodes,
            bsize: BLOCK_BYTES as u32,
            namelen: NAME_BYTES,
            frsize: BLOCK_BYTES as u32,
            ..StatfsOut::default()
        }))
    }

    pub(crate) async fn setxattr(&self, request: &Request) -> Result<Answer, Errno> {
        let SetxattrIn { size, flags } = request.argument()?;
        let (skip, more) = match self.setxattr_ext.get() {
            true => (size_of::<SetxattrExt>(), request.argument::<SetxattrExt>()?.setxattr_flags),
            false => (size_of::<SetxattrIn>(), 0),
        };
        let name = kept(request.name(skip, 0)?)?;
        let value = request.body.get(skip + name.len() + 1..).filter(|value| value.len() == size as usize);
        let change = XattrRequest {
            ino: self.ino(request).0,
            name: name.to_vec(),
            value: value.ok_or(Errno::IO)?.to_vec(),
            create: flags & XATTR_CREATE != 0,
            replace: flags & XATTR_REPLACE != 0,
            kill_set_group_id: more & SETXATTR_ACL_KILL_SGID != 0,
        };
        let gives_capability = change.name == CAPABILITY;
        let mut hold = None;
        if gives_capability {
            // Others may know that it has none, as long as they hold its lease.
            let held = self.client.hold(self.ino(request), Purpose::Write).await;
            hold = Some(held.map_err(|failure| errno(&failure))?);
        }
        let result = self.client.set_xattr(change).await;
        if gives_capability {
            self.capabilities.given();
        }
        drop(hold);
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn getxattr(&self, request: &Request) -> Result<Answer, Errno> {
        let GetxattrIn { size, .. } = request.argument()?;
        let name = kept(request.name(size_of::<GetxattrIn>(), 0)?)?;
        let value =
            self.client.get_xattr(self.ino(request), name).await.map_err(|failure| errno(&failure))?;
        sized(size, value)
    }

    pub(crate) async fn listxattr(&self, request: &Request) -> Result<Answer, Errno> {
        let GetxattrIn { size, .. } = request.argument()?;
        let names = self.client.list_xattr(self.ino(request)).await.map_err(|failure| errno(&failure))?;
        let shown = names.into_iter().filter(|name| is_shown(name, request.header.uid));
        sized(size, shown.flat_map(|name| name.into_iter().chain([0])).collect())
    }

    pub(crate) async fn removexattr(&self, request: &Request) -> Result<Answer, Errno> {
        let result = self.client.remove_xattr(self.ino(request), kept(request.name(0, 0)?)?).await;
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }
}

/// Passes a name whose extended attribute is kept. The others have a meaning that this release does not give them.
fn kept(name: &[u8]) -> Result<&[u8], Errno> {
    let of_a_class =
        [&b"user."[..], TRUSTED, b"security."].iter().find_map(|class| name.strip_prefix(*class));
    let acl = [&b"system.posix_acl_access"[..], b"system.posix_acl_default"].contains(&name);
    match of_a_class {
        Some([]) => Err(Errno::INVAL),
        None if !acl => Err(Errno::OPNOTSUPP),
        _ => Ok(name),
    }
}

/// True for a name that a user's listing has. The kernel asks for a listing without a look at who gets it.
fn is_shown(name: &[u8], uid: u32) -> bool {
    uid == 0 || !name.starts_with(TRUSTED)
}

/// A value for a caller with room for `size` bytes; its length for one that only asks for that.
fn sized(size: u32, value: Vec<u8>) -> Result<Answer, Errno> {
    match size {
        0 => Ok(Answer::of(&GetxattrOut { size: value.len() as u32, padding: 0 })),
        size if value.len() > size as usize => Err(Errno::RANGE),
        _ => Ok(Answer::Bytes(value)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_extended_attributes_are_passed_by_their_class() {
        for name in [&b"user.a"[..], b"trusted.a", b"security.capability", b"system.posix_acl_access"] {
            assert_eq!(kept(name), Ok(name));
        }
        for name in [&b"user."[..], b"trusted.", b"security."] {
            assert_eq!(kept(name), Err(Errno::INVAL));
        }
        for name in [&b"user"[..], b"system.posix_acl_accesses", b"system.", b""] {
            assert_eq!(kept(name), Err(Errno::OPNOTSUPP));
        }
    }

    #[test]
    fn trusted_names_are_listed_for_an_administrator_only() {
        assert!(is_shown(b"trusted.overlay.opaque", 0));
        assert!(!is_shown(b"trusted.overlay.opaque", 1000));
        assert!(is_shown(b"user.a", 1000));
    }
}
