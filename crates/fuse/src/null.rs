//! Mounts a FUSE file system that does nothing, to measure the most that a mount can reach on a machine.
//!
//! It has one directory in which every name can be created. Writes are dropped, and reads return zeros.

use crate::MAX_WRITE_BYTES;
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty,
    ReplyEntry, ReplyOpen, ReplyWrite, Request, SessionACL, WriteFlags,
};
use penstock_base::num::to_u32;
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

const TTL: Duration = Duration::from_secs(60);
/// The number of threads that read requests.
const THREADS: usize = 4;
/// The size of every file in bytes, so large that any read returns data.
const SIZE_BYTES: u64 = 1 << 40;

struct NullFs {
    zeros: Vec<u8>,
    next: AtomicU64,
    names: Mutex<BTreeMap<OsString, u64>>,
}

/// Mounts this file system. It is unmounted when the session is dropped or stopped.
pub fn mount_null(path: &Path) -> io::Result<fuser::BackgroundSession> {
    let zeros = vec![0; MAX_WRITE_BYTES as usize];
    let fs = NullFs { zeros, next: AtomicU64::new(2), names: Mutex::default() };
    let mut config = Config::default();
    let name = || "penstock-null".to_owned();
    config.mount_options = vec![
        MountOption::FSName(name()),
        MountOption::Subtype(name()),
        MountOption::DefaultPermissions,
        MountOption::NoAtime,
    ];
    config.acl = if rustix::process::geteuid().is_root() { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(THREADS);
    config.clone_fd = true;
    fuser::spawn_mount(fs, path, &config)
}

fn attr(ino: INodeNo) -> FileAttr {
    let root = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: if root { 0 } else { SIZE_BYTES },
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if root { FileType::Directory } else { FileType::RegularFile },
        perm: if root { 0o777 } else { 0o666 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for NullFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        config
            .set_max_write(MAX_WRITE_BYTES)
            .map_err(|most| io::Error::other(format!("max_write is at most {most}")))?;
        // For speed only: an older kernel works without them.
        let _ = config.add_capabilities(InitFlags::FUSE_PARALLEL_DIROPS | InitFlags::FUSE_ASYNC_DIO);
        Ok(())
    }

    fn lookup(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match self.names.lock().expect("no holder can panic").get(name) {
            Some(ino) => reply.entry(&TTL, &attr(INodeNo(*ino)), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _request: &Request, ino: INodeNo, _handle: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attr(ino));
    }

    fn unlink(&self, _request: &Request, _parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        self.names.lock().expect("no holder can panic").remove(name);
        reply.ok();
    }

    fn open(&self, _request: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }

    fn create(
        &self,
        _request: &Request,
        _parent: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _flags: i32,
        reply: ReplyCreate,
    ) {
        let ino = self.next.fetch_add(1, Ordering::Relaxed);
        self.names.lock().expect("no holder can panic").insert(name.to_owned(), ino);
        reply.created(&TTL, &attr(INodeNo(ino)), Generation(0), FileHandle(0), FopenFlags::empty());
    }

    fn read(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        size: u32,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(&self.zeros[..size as usize]);
    }

    fn write(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.written(to_u32(data.len()));
    }

    fn fsync(
        &self,
        _request: &Request,
        _ino: INodeNo,
        _handle: FileHandle,
        _datasync: bool,
        reply: ReplyEmpty,
    ) {
        reply.ok();
    }
}
