//! Serves requests that list directories.

use crate::abi::{Dirent, EntryOut, ReadIn};
use crate::attr::{entry, errno};
use crate::device::{Answer, Request};
use crate::session::Session;
use penstock_base::num::to_u32;
use penstock_base::{ErrorKind, Ino};
use penstock_client::{Attr, Failure};
use penstock_wire::metadata::{DirEntry, ReadDirRequest};
use rustix::io::Errno;
use zerocopy::IntoBytes;

const LIMIT: u32 = 256;
/// Cookies of `.` and `..`. The cookies of names are larger.
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;
const DIRECTORY: u32 = 0o040_000;
const RECORD_BYTES: usize = 8;

/// Directory entries in the kernel's format, up to the size of its buffer.
struct Listing {
    bytes: Vec<u8>,
    room: usize,
}

impl Listing {
    fn new(room: u32) -> Self {
        Self { bytes: Vec::with_capacity(room as usize), room: room as usize }
    }

    /// Adds an entry after `prefix`. Returns false, and adds nothing, if it does not fit.
    fn add(&mut self, prefix: &[u8], ino: u64, cookie: u64, mode: u32, name: &[u8]) -> bool {
        let record = Dirent { ino, off: cookie, namelen: to_u32(name.len()), kind: mode >> 12 & 0o17 };
        let len = (prefix.len() + size_of::<Dirent>() + name.len()).next_multiple_of(RECORD_BYTES);
        let fits = self.bytes.len() + len <= self.room;
        if fits {
            let end = self.bytes.len() + len;
            self.bytes.extend_from_slice(prefix);
            self.bytes.extend_from_slice(record.as_bytes());
            self.bytes.extend_from_slice(name);
            self.bytes.resize(end, 0);
        }
        fits
    }
}

fn read_dir(dir: Ino, offset: u64, attributes: bool) -> ReadDirRequest {
    ReadDirRequest { dir: dir.0, after: offset, limit: LIMIT, attributes }
}

pub(crate) async fn readdir(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let ReadIn { offset, size, .. } = request.argument()?;
    let dir = session.ino(request);
    let found = session.client.read_dir(read_dir(dir, offset, false)).await.map_err(|f| errno(&f))?;
    let mut listing = Listing::new(size);
    let dots = [(DOT, dir.0, &b"."[..]), (DOT_DOT, found.parent, b"..")];
    let dots = dots.into_iter().filter(|(cookie, ..)| offset < *cookie);
    let mut room = true;
    for (cookie, ino, name) in dots {
        room = room && listing.add(&[], session.root.outer(ino), cookie, DIRECTORY, name);
    }
    for found in found.entries {
        room = room && listing.add(&[], session.root.outer(found.ino), found.cookie, found.kind, &found.name);
    }
    Ok(Answer::Bytes(listing.bytes))
}

pub(crate) async fn readdirplus(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let ReadIn { offset, size, .. } = request.argument()?;
    let entries =
        list_plus(session, session.ino(request), offset).await.map_err(|failure| errno(&failure))?;
    let mut listing = Listing::new(size);
    for Listed { entry: found, attr } in entries {
        // Without attributes the kernel asks for them by name when a program does.
        let prefix = attr.map_or_else(EntryOut::default, |attr| {
            session.cache.is_answered(Ino(attr.ino), attr.size);
            entry(session.root, &attr, session.valid())
        });
        let ino = session.root.outer(found.ino);
        if !listing.add(prefix.as_bytes(), ino, found.cookie, found.kind, &found.name) {
            break;
        }
        // The kernel takes no lookup from `.` and `..`.
        if prefix.nodeid != 0 && found.cookie > DOT_DOT {
            session.nodes.looked_up(Ino(found.ino));
        }
    }
    Ok(Answer::Bytes(listing.bytes))
}

/// A name with the attributes of its inode; none if they cannot be read.
struct Listed {
    entry: DirEntry,
    attr: Option<Attr>,
}

/// Returns the entries after an offset with their attributes, `.` and `..` first.
async fn list_plus(session: &Session, dir: Ino, offset: u64) -> Result<Vec<Listed>, Failure> {
    let found = session.client.read_dir(read_dir(dir, offset, true)).await?;
    let dot = |cookie, ino, name: &str| DirEntry {
        name: name.as_bytes().to_vec(),
        ino,
        kind: DIRECTORY,
        cookie,
        attr: None,
        branch: 0,
    };
    let dots = [dot(DOT, dir.0, "."), dot(DOT_DOT, found.parent, "..")];
    let dots = dots.into_iter().filter(|dot| offset < dot.cookie);
    let mut entries = Vec::new();
    for mut entry in dots.chain(found.entries) {
        let attr = match entry.attr.take() {
            Some(attr) => Ok(attr),
            None => session.client.get_attr(Ino(entry.ino)).await,
        };
        match attr.map_err(|failure| (errno(&failure), failure)) {
            Ok(attr) => entries.push(Listed { entry, attr: Some(attr) }),
            // The inode was removed meanwhile, so the entry is gone too.
            Err((Errno::STALE, failure)) if failure.kind != ErrorKind::Ended => {}
            // Damage of one inode hides no other one.
            Err((Errno::IO, _)) => entries.push(Listed { entry, attr: None }),
            Err((_, failure)) => return Err(failure),
        }
    }
    Ok(entries)
}
