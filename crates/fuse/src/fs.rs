//! FUSE requests, each handed to the worker as a task on the client.
//!
//! One mount exists at a time and everything goes through it, so the kernel may keep names, attributes and pages.

use crate::attr::{Root, errno, file_attr, file_type, nanoseconds};
use crate::{MAX_BACKGROUND, MAX_WRITE_BYTES};
use fuser::{
    BsdFileFlags, Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use penstock_base::{Ino, LocalBoxFuture};
use penstock_client::{Attr, Client, Failure, SetAttrRequest, stage};
use penstock_wire::names::{MakeRequest, ReadDirRequest, RenameRequest, XattrRequest};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::rc::Rc;
use std::time::{Duration, SystemTime};
use tokio::sync::mpsc::UnboundedSender;

/// How long the kernel may keep names and attributes. Only this mount changes them.
const TTL: Duration = Duration::from_secs(60);
const GENERATION: Generation = Generation(0);
/// No file handle has state of its own.
const HANDLE: FileHandle = FileHandle(0);
const DIR_LIMIT: u32 = 256;
/// Cookies of `.` and `..`; those of names are larger.
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;
const ESTALE: u16 = 116;
const XATTR_CREATE: i32 = 1;
const XATTR_REPLACE: i32 = 2;

/// Work for the worker that owns the client.
pub(crate) type Job = Box<dyn FnOnce(Rc<Client>) -> LocalBoxFuture<'static, ()> + Send>;

/// The file system as fuser calls it.
pub(crate) struct PenstockFs {
    pub(crate) jobs: UnboundedSender<Job>,
    pub(crate) root: Root,
}

impl PenstockFs {
    /// Runs `job` on the worker. When the worker is gone its reply is dropped, which answers EIO.
    fn run<F>(&self, job: impl FnOnce(Rc<Client>) -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        let job: Job = Box::new(move |client| Box::pin(job(client)));
        if self.jobs.send(job).is_err() {
            tracing::warn!("a request came after the file system was stopped");
        }
    }

    fn entry<F>(&self, reply: ReplyEntry, job: impl FnOnce(Rc<Client>) -> F + Send + 'static)
    where
        F: Future<Output = Result<Attr, Failure>> + 'static,
    {
        let root = self.root;
        self.run(move |client| async move {
            match job(client).await {
                Ok(attr) => reply.entry(&TTL, &file_attr(root, &attr), GENERATION),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn attr<F>(&self, reply: ReplyAttr, job: impl FnOnce(Rc<Client>) -> F + Send + 'static)
    where
        F: Future<Output = Result<Attr, Failure>> + 'static,
    {
        let root = self.root;
        self.run(move |client| async move {
            match job(client).await {
                Ok(attr) => reply.attr(&TTL, &file_attr(root, &attr)),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn empty<F>(&self, reply: ReplyEmpty, job: impl FnOnce(Rc<Client>) -> F + Send + 'static)
    where
        F: Future<Output = Result<(), Failure>> + 'static,
    {
        self.run(move |client| async move {
            match job(client).await {
                Ok(()) => reply.ok(),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn make(&self, request: &Request, parent: INodeNo, name: &OsStr, mode: u32) -> MakeRequest {
        MakeRequest {
            dir: self.root.inner(parent).0,
            name: name.as_bytes().to_vec(),
            mode,
            uid: request.uid(),
            gid: request.gid(),
            ..MakeRequest::default()
        }
    }
}

fn xattr_reply(reply: ReplyXattr, size: u32, value: &[u8]) {
    match size {
        0 => reply.size(value.len() as u32),
        size if value.len() > size as usize => reply.error(Errno::ERANGE),
        _ => reply.data(value),
    }
}

/// Extended attributes that are kept. The others have a meaning that this release does not give them.
fn xattr_is_kept(name: &OsStr) -> bool {
    [&b"user."[..], b"trusted.", b"security."].iter().any(|prefix| name.as_bytes().starts_with(prefix))
}

impl Filesystem for PenstockFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config
            .set_max_write(MAX_WRITE_BYTES)
            .map_err(|most| io::Error::other(format!("max_write is at most {most}")))?;
        // The kernel's own bound is taken when it is smaller.
        if let Err(most) = config.set_max_readahead(MAX_WRITE_BYTES) {
            config.set_max_readahead(most).map_err(|_| io::Error::other("no read-ahead can be set"))?;
        }
        config
            .set_max_background(MAX_BACKGROUND)
            .map_err(|_| io::Error::other("max_background is refused"))?;
        for wanted in [
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_ASYNC_DIO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
        ] {
            // Each only makes things faster; an older kernel does without.
            let _ = config.add_capabilities(wanted);
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let (dir, name) = (self.root.inner(parent), name.as_bytes().to_vec());
        self.entry(reply, move |client| async move { client.lookup(dir, &name).await });
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        let ino = self.root.inner(ino);
        self.attr(reply, move |client| async move { client.get_attr(ino).await });
    }

    fn setattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        ctime: Option<SystemTime>,
        _handle: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let ino = self.root.inner(ino).0;
        self.attr(reply, move |client| async move {
            let now = client.now_ns();
            let when = |time: TimeOrNow| match time {
                TimeOrNow::SpecificTime(time) => nanoseconds(time),
                TimeOrNow::Now => now,
            };
            let request = SetAttrRequest {
                ino,
                mode,
                uid,
                gid,
                size,
                atime_ns: atime.map(when),
                mtime_ns: mtime.map(when),
                ctime_ns: ctime.map(nanoseconds),
                ..SetAttrRequest::default()
            };
            client.set_attr(request).await
        });
    }

    fn readlink(&self, _request: &Request, ino: INodeNo, reply: ReplyData) {
        let ino = self.root.inner(ino);
        self.run(move |client| async move {
            match client.read_link(ino).await {
                Ok(target) => reply.data(&target),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn mknod(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        rdev: u32,
        reply: ReplyEntry,
    ) {
        let make = MakeRequest { rdev, ..self.make(request, parent, name, mode) };
        self.entry(reply, move |client| async move { client.make(make).await });
    }

    fn mkdir(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        reply: ReplyEntry,
    ) {
        let make = self.make(request, parent, name, 0o040_000 | (mode & 0o7777));
        self.entry(reply, move |client| async move { client.make(make).await });
    }

    fn unlink(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (dir, name) = (self.root.inner(parent), name.as_bytes().to_vec());
        self.empty(reply, move |client| async move { client.unlink(dir, &name, false).await });
    }

    fn rmdir(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (dir, name) = (self.root.inner(parent), name.as_bytes().to_vec());
        self.empty(reply, move |client| async move { client.unlink(dir, &name, true).await });
    }

    fn symlink(&self, request: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let target = target.as_os_str().as_bytes().to_vec();
        let make = MakeRequest { target, ..self.make(request, parent, name, 0o120_777) };
        self.entry(reply, move |client| async move { client.make(make).await });
    }

    fn rename(
        &self,
        _request: &Request,
        parent: INodeNo,
        name: &OsStr,
        new_parent: INodeNo,
        new_name: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if flags.contains(RenameFlags::RENAME_WHITEOUT) {
            return reply.error(Errno::EINVAL);
        }
        let request = RenameRequest {
            dir: self.root.inner(parent).0,
            name: name.as_bytes().to_vec(),
            new_dir: self.root.inner(new_parent).0,
            new_name: new_name.as_bytes().to_vec(),
            no_replace: flags.contains(RenameFlags::RENAME_NOREPLACE),
            exchange: flags.contains(RenameFlags::RENAME_EXCHANGE),
        };
        self.empty(reply, move |client| async move { client.rename(request).await });
    }

    fn link(
        &self,
        _request: &Request,
        ino: INodeNo,
        new_parent: INodeNo,
        new_name: &OsStr,
        reply: ReplyEntry,
    ) {
        let (ino, dir, name) =
            (self.root.inner(ino), self.root.inner(new_parent), new_name.as_bytes().to_vec());
        self.entry(reply, move |client| async move { client.link(ino, dir, &name).await });
    }

    fn open(&self, _request: &Request, ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let ino = self.root.inner(ino);
        self.run(move |client| async move {
            match client.open(ino).await {
                Ok(()) => reply.opened(HANDLE, FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn create(
        &self,
        request: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let make =
            MakeRequest { open: true, ..self.make(request, parent, name, 0o100_000 | (mode & 0o7777)) };
        let root = self.root;
        self.run(move |client| async move {
            let flags = FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH;
            match client.make(make).await {
                Ok(attr) => reply.created(&TTL, &file_attr(root, &attr), GENERATION, HANDLE, flags),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn read(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let ino = self.root.inner(ino);
        self.run(move |client| async move {
            match client.read(ino, offset, size.into()).await {
                Ok(parts) => reply.data(&penstock_base::buf::gather(&parts)),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn write(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // The one copy of the data: from the buffer of the request into whole, aligned blocks.
        let (staged, len) = (stage(offset, data), data.len());
        let ino = self.root.inner(ino);
        self.run(move |client| async move {
            match client.write_staged(ino, offset, staged, len).await {
                Ok(()) => reply.written(len as u32),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn release(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        let ino = self.root.inner(ino);
        self.empty(reply, move |client| async move { client.release(ino).await });
    }

    fn fsync(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        let ino = self.root.inner(ino);
        self.empty(reply, move |client| async move { client.fsync(ino).await });
    }

    fn fsyncdir(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        // What this client wrote before comes first: a name never outlives the data it was made for.
        self.empty(reply, move |client| async move { client.sync_all().await });
    }

    fn readdir(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let (dir, root) = (self.root.inner(ino), self.root);
        self.run(move |client| async move {
            let request = read_dir(dir, offset, false);
            match client.read_dir(request).await {
                Ok(found) => {
                    let dots = [(DOT, dir.0, "."), (DOT_DOT, found.parent, "..")];
                    let dots = dots.into_iter().filter(|(cookie, ..)| offset < *cookie);
                    let mut full = dots.fold(false, |full, (cookie, ino, name)| {
                        full || reply.add(root.outer(ino), cookie, file_type(0o040_000), name)
                    });
                    for entry in found.entries {
                        let name = OsStr::from_bytes(&entry.name);
                        full = full
                            || reply.add(root.outer(entry.ino), entry.cookie, file_type(entry.kind), name);
                    }
                    reply.ok();
                }
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn readdirplus(
        &self,
        _request: &Request,
        ino: INodeNo,
        _handle: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let (dir, root) = (self.root.inner(ino), self.root);
        self.run(move |client| async move {
            match list_plus(&client, dir, offset).await {
                Ok(entries) => {
                    for (name, cookie, attr) in entries {
                        let attr = file_attr(root, &attr);
                        if reply.add(attr.ino, cookie, OsStr::from_bytes(&name), &TTL, &attr, GENERATION) {
                            break;
                        }
                    }
                    reply.ok();
                }
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn statfs(&self, _request: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        self.run(move |client| async move {
            match client.stat_fs().await {
                Ok(found) => {
                    let block = penstock_base::BLOCK_BYTES as u32;
                    let (total, free, available) =
                        (found.total_blocks, found.free_blocks, found.available_blocks);
                    reply.statfs(total, free, available, found.inodes, found.free_inodes, block, 255, block);
                }
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn setxattr(
        &self,
        _request: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        if !xattr_is_kept(name) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let request = XattrRequest {
            ino: self.root.inner(ino).0,
            name: name.as_bytes().to_vec(),
            value: value.to_vec(),
            create: flags & XATTR_CREATE != 0,
            replace: flags & XATTR_REPLACE != 0,
        };
        self.empty(reply, move |client| async move { client.set_xattr(request).await });
    }

    fn getxattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if !xattr_is_kept(name) {
            return reply.error(Errno::EOPNOTSUPP);
        }
        let (ino, name) = (self.root.inner(ino), name.as_bytes().to_vec());
        self.run(move |client| async move {
            match client.get_xattr(ino, &name).await {
                Ok(value) => xattr_reply(reply, size, &value),
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn listxattr(&self, _request: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let ino = self.root.inner(ino);
        self.run(move |client| async move {
            match client.list_xattr(ino).await {
                Ok(names) => {
                    let joined: Vec<u8> =
                        names.iter().flat_map(|name| name.iter().copied().chain([0])).collect();
                    xattr_reply(reply, size, &joined);
                }
                Err(failure) => reply.error(errno(&failure)),
            }
        });
    }

    fn removexattr(&self, _request: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let (ino, name) = (self.root.inner(ino), name.as_bytes().to_vec());
        self.empty(reply, move |client| async move { client.remove_xattr(ino, &name).await });
    }
}

fn read_dir(dir: Ino, offset: u64, attributes: bool) -> ReadDirRequest {
    ReadDirRequest { dir: dir.0, after: offset, limit: DIR_LIMIT, attributes }
}

/// Entries behind an offset with their attributes, `.` and `..` first.
async fn list_plus(client: &Client, dir: Ino, offset: u64) -> Result<Vec<(Vec<u8>, u64, Attr)>, Failure> {
    let found = client.read_dir(read_dir(dir, offset, true)).await?;
    let mut entries = Vec::new();
    for (cookie, ino, name) in [(DOT, dir.0, "."), (DOT_DOT, found.parent, "..")] {
        if offset < cookie {
            entries.push((name.as_bytes().to_vec(), cookie, client.get_attr(Ino(ino)).await?));
        }
    }
    for entry in found.entries {
        let attr = match entry.attr {
            Some(attr) => Ok(attr),
            None => client.get_attr(Ino(entry.ino)).await,
        };
        match attr {
            Ok(attr) => entries.push((entry.name, entry.cookie, attr)),
            // An entry whose inode went meanwhile is no entry any more.
            Err(failure) if failure.errno == ESTALE => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(entries)
}
