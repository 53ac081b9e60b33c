//! Serves requests on attributes, on extended attributes and on the file system (statfs).

use crate::abi::{GetxattrIn, GetxattrOut, SetattrIn, SetxattrExt, SetxattrIn, StatfsOut, fattr};
use crate::attr::{VALID, attributes, errno, extended, time_of};
use crate::device::{Answer, Request};
use crate::looks::Due;
use crate::nodes::is_directory;
use crate::session::Session;
use futures_util::{StreamExt, stream};
use penstock_base::env::timeout;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Env, ErrorKind, FileId, LocalBoxFuture};
use penstock_client::{Hold, Purpose, SetAttrRequest};
use penstock_wire::Failure;
use penstock_wire::metadata::{Attr, CAPABILITY, Time, XattrRequest, set_id_bits};
use rustix::fs::FileType;
use rustix::io::Errno;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

/// Time between two rounds of checks of sizes: as long as names and attributes may be stale.
const EVERY: Duration = VALID;
/// The most checks at the same time. A check may wait for another mount's lease.
const AT_A_TIME: usize = 8;
/// Time limit for a size notice before a reply. A notice that takes longer waits for a locked page.
const BEFORE_REPLY: Duration = Duration::from_millis(50);
/// The most attempts to read a file's size at a moment when the kernel has no page from before a direct
/// write.
const MOST_LOOKS: u32 = 1000;
const XATTR_CREATE: u32 = 1;
const XATTR_REPLACE: u32 = 2;
const SETXATTR_ACL_KILL_SGID: u32 = 1;
const NAME_BYTES: u32 = 255;
/// The class of extended attributes that only an administrator sees.
const TRUSTED: &[u8] = b"trusted.";

impl Session {
    /// Returns the attributes for a reply. An inode that this mount has removed, and the service has dropped,
    /// has its last ones.
    async fn attr_for_kernel(&self, request: &Request) -> Result<Attr, Errno> {
        let file = request.file;
        if let Some(attr) = self.just_found(file) {
            return Ok(attr);
        }
        match self.attr_of(file).await {
            Ok(attr) => {
                self.nodes.note(&attr);
                Ok(attr)
            }
            Err(failure) => self.nameless(request, &failure).ok_or_else(|| errno(&failure)),
        }
    }

    /// The attributes of an inode that the request before this one has looked up, if they are those of now.
    fn just_found(&self, file: FileId) -> Option<Attr> {
        let (attr, owned) = self.cache.last_found.take(file, self.cache.env().now())?;
        // No other client has changed anything since the service read them.
        let is_owned = match owned {
            Some(_) => owned == self.client.owns_all(),
            None => self.client.caches_attributes(&attr),
        };
        let is_settled =
            self.client.is_settled(file) && !self.cache.may_ignore_size(file) && !self.cache.is_telling(file);
        (is_owned && is_settled).then_some(attr)
    }

    /// The last descriptor of an inode may be closed now: if it has no name, its state then is kept.
    pub(crate) async fn note_at_close(&self, request: &Request) {
        if self.nodes.nameless(request.header.nodeid).is_some()
            && let Ok(attr) = self.client.get_attr(request.file).await
        {
            self.nodes.note(&attr);
        }
    }

    /// The last attributes of an inode for which a request failed because it is gone.
    fn nameless(&self, request: &Request, failure: &Failure) -> Option<Attr> {
        let stale = i32::from(failure.errno) == Errno::STALE.raw_os_error();
        self.nodes.nameless(request.header.nodeid).filter(|_| stale && failure.kind != ErrorKind::Ended)
    }

    /// Returns the attributes by whose size the kernel goes from here on.
    async fn attr_of(&self, file: FileId) -> Result<Attr, Failure> {
        let attr = self.without_unseen(file, async || self.client.get_attr(file).await).await?;
        let is_file = FileType::from_raw_mode(attr.mode) == FileType::RegularFile;
        let by_reply = !self.cache.sizes.is_open_for_writing(file) && !self.cache.may_ignore_size(file);
        if !is_file || by_reply || !self.cache.sizes.may_be_told(file, attr.size) {
            self.cache.is_answered(file, attr.size);
            self.cache.none_told(file).await;
            return Ok(attr);
        }
        self.tell_size(file).await
    }

    /// Returns the result of `look` when it does not contain the end of a direct write that the kernel still
    /// has older pages of. As soon as a program knows that end it reads there, and stores there through a
    /// map. After 1000 attempts (`MOST_LOOKS`) it returns the result as it is.
    async fn without_unseen<T>(
        &self,
        file: FileId,
        look: impl AsyncFn() -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        for _ in 1..MOST_LOOKS {
            self.client.direct_writes_seen(file).await;
            let found = look().await?;
            if !self.client.has_unseen_writes(file) {
                return Ok(found);
            }
        }
        look().await
    }

    /// Sends a file's size to the kernel by a notice, before anything else reports it.
    async fn tell_size(&self, file: FileId) -> Result<Attr, Failure> {
        let look = async || {
            let hold = self.client.hold(file, Purpose::Read).await?;
            Ok((self.client.get_attr(file).await?, hold))
        };
        let (attr, hold) = self.without_unseen(file, look).await?;
        let told = self.begin_to_tell(&hold, file, attr.size);
        // The lease can be given up only when no guard of it is left.
        drop(hold);
        told.await;
        Ok(attr)
    }

    /// Begins to send the kernel a size that was read under a lease guard. The result completes when no size
    /// of the file is being sent.
    fn begin_to_tell(&self, hold: &Hold, file: FileId, size: u64) -> LocalBoxFuture<'static, ()> {
        match size.checked_sub(1) {
            Some(last) => self.cache.grow(file, hold.store(last..size)),
            None => self.cache.none_told(file),
        }
    }

    /// Sends the kernel a size that was read under a lease guard, which lasts until the reply. Another
    /// request may have locked the page that the last byte lies in while it waits for the lease. Then this
    /// stops waiting after 50 ms, and the notice completes after the reply.
    pub(crate) async fn tell_before_reply(&self, hold: &Hold, file: FileId, size: u64) {
        let _ = timeout(self.cache.env(), BEFORE_REPLY, self.begin_to_tell(hold, file, size)).await;
    }

    /// Sends the kernel a size that was read under a lease guard, during a read of a page that the kernel has
    /// locked. Returns when the kernel knows the size, or should know it.
    pub(crate) async fn tell_before_read(&self, hold: &Hold, file: FileId, size: u64) {
        if self.cache.sizes.may_be_told(file, size) {
            // Not awaited: the notice completes only after the page has been read.
            drop(self.begin_to_tell(hold, file, size));
        }
        if self.cache.is_telling(file)
            && let Some(nodeid) = self.nodes.node(file)
        {
            self.cache.asker.until_known(nodeid, size).await;
        }
    }

    /// Sends the kernel the size of an open file that is due, if it is larger. On failure the file stays due.
    async fn look_at_size(&self, due: &Due) {
        match self.tell_size(due.file).await {
            Ok(_) => self.cache.looks.is_checked(due),
            Err(failure) => {
                tracing::debug!(%failure, file = %due.file, "the size of an open file is looked at later");
            }
        }
    }

    /// Makes the kernel know the size of a file on which a program just got a lock, if it may have changed.
    /// Programs under locks rely on what others wrote and cut off.
    pub(crate) async fn look_under_lock(&self, file: FileId) {
        if self.client.was_shared()
            && let Some(due) = self.cache.looks.one_due_under_lock(file)
        {
            self.look_at_size(&due).await;
            let is_asked = match self.nodes.node(file) {
                Some(nodeid) => self.cache.asker.until_asked(nodeid).await,
                None => true,
            };
            if is_asked {
                self.cache.looks.is_checked_under_lock(&due);
            }
        }
    }

    pub(crate) async fn getattr(&self, request: &Request) -> Result<Answer, Errno> {
        let attr = self.attr_for_kernel(request).await?;
        Ok(Answer::of(&attributes(&self.nodes, &attr, self.valid(&attr))))
    }

    pub(crate) async fn statx(&self, request: &Request) -> Result<Answer, Errno> {
        let attr = self.attr_for_kernel(request).await?;
        Ok(Answer::of(&extended(&self.nodes, &attr, self.valid(&attr))))
    }

    /// The change of attributes that a SETATTR asks for.
    pub(crate) fn change_of(&self, request: &Request) -> Result<SetAttrRequest, Errno> {
        let new: SetattrIn = request.argument()?;
        let valid = |flag: u32| new.valid & flag != 0;
        let time = |flag: u32, now: u32, seconds: u64, rest: u32| match (valid(flag), valid(now)) {
            (true, true) => Some(self.client.now()),
            (true, false) => Some(time_of(seconds, rest)),
            (false, _) => None,
        };
        Ok(SetAttrRequest {
            ino: request.file.ino.0,
            mode: valid(fattr::MODE).then_some(new.mode),
            uid: valid(fattr::UID).then_some(new.uid),
            gid: valid(fattr::GID).then_some(new.gid),
            size: valid(fattr::SIZE).then_some(new.size),
            atime: time(fattr::ATIME, fattr::ATIME_NOW, new.atime, new.atimensec),
            mtime: time(fattr::MTIME, fattr::MTIME_NOW, new.mtime, new.mtimensec),
            ctime: valid(fattr::CTIME).then(|| time_of(new.ctime, new.ctimensec)),
            drop_set_id: valid(fattr::KILL_SUIDGID),
            ..SetAttrRequest::default()
        })
    }

    pub(crate) async fn setattr(&self, request: &mut Request) -> Result<Answer, Errno> {
        let change = self.change_of(request)?;
        let (file, sizes) = (request.file, change.size.is_some());
        let set = async {
            // The guard lasts until the reply is sent.
            let hold = request.hold.insert(self.client.hold_to_set(file.branch, &change).await?);
            hold.set_attr(change.clone()).await
        };
        let attr = match set.await {
            Ok(attr) => attr,
            Err(failure) => {
                let kept = self.nameless(request, &failure).filter(|_| !sizes);
                let attr = changed(kept.ok_or_else(|| errno(&failure))?, &change, self.client.now());
                self.nodes.keep(request.header.nodeid, &attr);
                return Ok(Answer::of(&attributes(&self.nodes, &attr, Duration::ZERO)));
            }
        };
        self.nodes.note(&attr);
        match sizes {
            true => self.cache.sizes.is_cut(attr.file(), attr.size),
            false => self.cache.is_answered(attr.file(), attr.size),
        }
        Ok(Answer::of(&attributes(&self.nodes, &attr, self.valid(&attr))))
    }

    pub(crate) async fn readlink(&self, request: &Request) -> Result<Answer, Errno> {
        self.client.read_link(request.file).await.map(Answer::Bytes).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn statfs(&self) -> Result<Answer, Errno> {
        let found = self.client.stat_fs().await.map_err(|failure| errno(&failure))?;
        Ok(Answer::of(&StatfsOut {
            blocks: found.total_blocks,
            bfree: found.free_blocks,
            bavail: found.available_blocks,
            files: found.inodes,
            ffree: found.free_inodes,
            bsize: to_u32(BLOCK_BYTES),
            namelen: NAME_BYTES,
            frsize: to_u32(BLOCK_BYTES),
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
            ino: request.file.ino.0,
            name: name.to_vec(),
            value: value.ok_or(Errno::IO)?.to_vec(),
            create: flags & XATTR_CREATE != 0,
            replace: flags & XATTR_REPLACE != 0,
            kill_set_group_id: more & SETXATTR_ACL_KILL_SGID != 0,
        };
        let gives_capability = change.name == CAPABILITY;
        let mut hold = None;
        if gives_capability {
            // Others may know that the file has no capabilities while they own its lease.
            let held = self.client.hold(request.file, Purpose::Write).await;
            hold = Some(held.map_err(|failure| errno(&failure))?);
        }
        let result = self.client.set_xattr(request.file.branch, change).await;
        if gives_capability {
            self.capabilities.given();
        }
        drop(hold);
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn getxattr(&self, request: &Request) -> Result<Answer, Errno> {
        let GetxattrIn { size, .. } = request.argument()?;
        let name = kept(request.name(size_of::<GetxattrIn>(), 0)?)?;
        let value = self.client.get_xattr(request.file, name).await.map_err(|failure| {
            match self.nameless(request, &failure).filter(|_| is_of_the_kernel(name)) {
                Some(_) => Errno::NODATA,
                None => errno(&failure),
            }
        });
        sized(size, value?)
    }

    pub(crate) async fn listxattr(&self, request: &Request) -> Result<Answer, Errno> {
        let GetxattrIn { size, .. } = request.argument()?;
        let names = self.client.list_xattr(request.file).await.map_err(|failure| errno(&failure))?;
        let shown = names.into_iter().filter(|name| is_shown(name, request.header.uid));
        sized(size, shown.flat_map(|name| name.into_iter().chain([0])).collect())
    }

    pub(crate) async fn removexattr(&self, request: &Request) -> Result<Answer, Errno> {
        let result = self.client.remove_xattr(request.file, kept(request.name(0, 0)?)?).await;
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }
}

/// True for the name of an extended attribute that the kernel looks for itself.
pub(crate) fn is_of_the_kernel(name: &[u8]) -> bool {
    is_acl(name) || name == CAPABILITY
}

/// The attributes of a removed inode after a change of them. Nobody else sees it.
pub(crate) fn changed(mut attr: Attr, change: &SetAttrRequest, now: Time) -> Attr {
    attr.mode = change.mode.map_or(attr.mode, |mode| attr.mode & !0o7777 | mode & 0o7777);
    if change.drop_set_id && !is_directory(&attr) {
        attr.mode &= !set_id_bits(attr.mode);
    }
    attr.uid = change.uid.unwrap_or(attr.uid);
    attr.gid = change.gid.unwrap_or(attr.gid);
    attr.atime = change.atime.unwrap_or(attr.atime);
    attr.mtime = change.mtime.unwrap_or(attr.mtime);
    attr.ctime = change.ctime.unwrap_or(now);
    attr
}

/// Checks the files that are due, each [`EVERY`], while the mount lives.
pub(crate) async fn look_at_sizes(session: Rc<Session>, env: Env) -> Infallible {
    loop {
        env.sleep(EVERY).await;
        if !session.client.was_shared() {
            continue;
        }
        let due = session.cache.looks.all_due();
        stream::iter(due).for_each_concurrent(AT_A_TIME, async |due| session.look_at_size(&due).await).await;
    }
}

/// Checks that an extended attribute of this name can be stored. EINVAL for a class without a name,
/// EOPNOTSUPP for a class that this release gives no meaning.
fn kept(name: &[u8]) -> Result<&[u8], Errno> {
    let of_a_class =
        [&b"user."[..], TRUSTED, b"security."].iter().find_map(|class| name.strip_prefix(*class));
    match of_a_class {
        Some([]) => Err(Errno::INVAL),
        None if !is_acl(name) => Err(Errno::OPNOTSUPP),
        _ => Ok(name),
    }
}

/// True for the name of an access control list.
fn is_acl(name: &[u8]) -> bool {
    [&b"system.posix_acl_access"[..], b"system.posix_acl_default"].contains(&name)
}

/// True if a user's listing contains the name. The kernel does not check who gets a listing.
fn is_shown(name: &[u8], uid: u32) -> bool {
    uid == 0 || !name.starts_with(TRUSTED)
}

/// Returns a value for a caller with `size` bytes of space, or the value's length if `size` is 0. ERANGE if
/// it does not fit.
fn sized(size: u32, value: Vec<u8>) -> Result<Answer, Errno> {
    match size {
        0 => Ok(Answer::of(&GetxattrOut { size: to_u32(value.len()), padding: 0 })),
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
