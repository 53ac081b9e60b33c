//! Serves requests that list directories.
//!
//! The kernel caches no listing. It would show one again for as long as it knows no other time of the
//! directory, which a user may set back, and a program that begins anew in a directory asks for no time. A
//! listing that is cached cannot be dropped safely either: the kernel has its pages locked while it copies
//! them into a program's memory, which may wait for that program as long as it likes.

use crate::abi::{Dirent, EntryOut, OpenOut, ReadIn};
use crate::attr::{entry, errno};
use crate::device::{Answer, Request};
use crate::session::Session;
use penstock_base::num::to_u32;
use penstock_base::{ErrorKind, FileId};
use penstock_client::{Attr, Failure};
use penstock_wire::metadata::{DirEntry, ReadDirReply, ReadDirRequest};
use rustix::io::Errno;
use zerocopy::IntoBytes;

/// Most entries that are asked for at once.
const MOST: u32 = 1024;
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

/// Most entries that fit in the kernel's buffer, each after a prefix of this size.
fn limit(room: u32, prefix: usize) -> u32 {
    let shortest = (prefix + size_of::<Dirent>() + 1).next_multiple_of(RECORD_BYTES);
    (room / to_u32(shortest)).clamp(1, MOST)
}

async fn read_dir(
    session: &Session,
    dir: FileId,
    (offset, limit): (u64, u32),
    attributes: bool,
) -> Result<ReadDirReply, Failure> {
    let request = ReadDirRequest { dir: dir.ino.0, after: offset, limit, attributes, lease: false };
    session.client.read_dir(dir.branch, request).await
}

/// Builds the reply to OPENDIR. Without a flag in it the kernel caches no listing; without OPENDIR, every
/// one.
pub(crate) fn open() -> Answer {
    Answer::of(&OpenOut { fh: 0, open_flags: 0, padding: 0 })
}

/// The entries of a directory that the service does not list, behind an offset.
fn dots(
    dir: FileId,
    found: &ReadDirReply,
    offset: u64,
) -> impl Iterator<Item = (u64, FileId, &'static [u8])> {
    let dots = [(DOT, dir, &b"."[..]), (DOT_DOT, found.parent(), b"..")];
    dots.into_iter().filter(move |(cookie, ..)| offset < *cookie)
}

pub(crate) async fn readdir(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let ReadIn { offset, size, .. } = request.argument()?;
    let part = (offset, limit(size, 0));
    let found = read_dir(session, request.file, part, false).await.map_err(|failure| errno(&failure))?;
    let mut listing = Listing::new(size);
    let mut room = true;
    for (cookie, file, name) in dots(request.file, &found, offset) {
        room = room && listing.add(&[], session.nodes.shown(file), cookie, DIRECTORY, name);
    }
    for found in found.entries {
        let shown = session.nodes.shown(found.file());
        room = room && listing.add(&[], shown, found.cookie, found.kind, &found.name);
    }
    Ok(Answer::Bytes(listing.bytes))
}

pub(crate) async fn readdirplus(session: &Session, request: &Request) -> Result<Answer, Errno> {
    let ReadIn { offset, size, .. } = request.argument()?;
    let names = session.names_of(request.file);
    let mut after = offset;
    let (found, entries) = loop {
        let part = (after, limit(size, size_of::<EntryOut>()));
        let mut found =
            read_dir(session, request.file, part, true).await.map_err(|failure| errno(&failure))?;
        let last = found.entries.last().map(|entry| entry.cookie);
        let mut entries = Vec::with_capacity(found.entries.len());
        for entry in std::mem::take(&mut found.entries) {
            entries.extend(listed(session, entry).await?);
        }
        match last {
            // All were removed meanwhile. An empty reply would end the listing.
            Some(last) if entries.is_empty() && !found.end => after = last,
            _ => break (found, entries),
        }
    };
    // From here on nothing fails: the kernel gets every lookup that is counted.
    let mut listing = Listing::new(size);
    let mut room = true;
    let nothing = EntryOut::default();
    for (cookie, file, name) in dots(request.file, &found, offset) {
        let shown = session.nodes.shown(file);
        // The kernel takes no attributes from these two.
        room = room && listing.add(nothing.as_bytes(), shown, cookie, DIRECTORY, name);
    }
    for Listed { entry: found, attr } in entries {
        // Without attributes the kernel asks for them by name when a program does.
        let prefix = match &attr {
            Some(attr) => {
                let valid = (session.valid_name(names, &found.name), session.valid(attr));
                entry(&session.nodes, attr, valid)
            }
            None => EntryOut::default(),
        };
        let shown = session.nodes.shown(found.file());
        if !room || !listing.add(prefix.as_bytes(), shown, found.cookie, found.kind, &found.name) {
            // The kernel does not get this entry, and so neither its node nor its size.
            session.nodes.forget(prefix.nodeid, 1);
            break;
        }
        if let Some(attr) = attr {
            session.cache.is_answered(attr.file(), attr.size);
        }
    }
    Ok(Answer::Bytes(listing.bytes))
}

/// A name with the attributes of its file; none if they cannot be read.
struct Listed {
    entry: DirEntry,
    attr: Option<Attr>,
}

/// Adds the attributes to an entry. `None` if it is gone.
async fn listed(session: &Session, mut entry: DirEntry) -> Result<Option<Listed>, Errno> {
    let attr = match entry.attr.take() {
        Some(attr) => Ok(attr),
        None => session.client.get_attr(entry.file()).await,
    };
    match attr.map_err(|failure| (errno(&failure), failure)) {
        Ok(attr) => Ok(Some(Listed { entry, attr: Some(attr) })),
        // The inode was removed meanwhile, so the entry is gone too.
        Err((Errno::STALE, failure)) if failure.kind != ErrorKind::Ended => Ok(None),
        // Damage of one inode hides no other one.
        Err((Errno::IO, _)) => Ok(Some(Listed { entry, attr: None })),
        Err((error, _)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::{Listing, MOST, limit};
    use crate::abi::EntryOut;
    use zerocopy::IntoBytes;

    #[test]
    fn no_entry_is_asked_for_that_cannot_fit() {
        for room in [160, 1000, 4096, 32_768, 131_072] {
            for prefix in [&b""[..], EntryOut::default().as_bytes()] {
                let most = limit(room, prefix.len());
                let mut listing = Listing::new(room);
                let added = (1..).take_while(|ino| listing.add(prefix, *ino, *ino, 0, b"n")).count();
                assert_eq!(most, (added as u32).min(MOST), "{room} {}", prefix.len());
            }
        }
        assert_eq!(limit(10, 0), 1, "a buffer that holds none gets one, which is left out");
    }
}
