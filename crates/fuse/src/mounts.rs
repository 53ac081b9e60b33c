//! Reads the mounts of this mount name space from /proc/self/mountinfo (proc_pid_mountinfo(5)).

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

const TABLE: &str = "/proc/self/mountinfo";
/// The file system type of these mounts, as findmnt(8) shows it.
pub const KIND: &str = "fuse.penstock";

/// One line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountEntry {
    id: u64,
    /// The device number of the file system, which is the connection number if it is FUSE.
    pub(crate) connection: u32,
    /// The directory of the file system that is mounted, `/` for all of it.
    root: Vec<u8>,
    /// The mount point. Another mount may cover it.
    pub(crate) place: PathBuf,
    pub(crate) kind: String,
    /// The user who mounted it, if it is FUSE.
    pub(crate) owner: Option<u32>,
}

impl MountEntry {
    /// Parses a line. None if it is not in the kernel's format.
    fn read(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|byte| *byte == b' ');
        let mut next = || std::str::from_utf8(words.next()?).ok();
        let id = next()?.parse().ok()?;
        next()?;
        let (major, minor) = next()?.split_once(':')?;
        let connection = major.parse::<u32>().ok()? << 20 | minor.parse::<u32>().ok()?;
        let root = unescape(words.next()?);
        let place = OsString::from_vec(unescape(words.next()?)).into();
        // Skips the mount options and a variable number of optional fields.
        words.find(|word| *word == b"-")?;
        let kind = String::from_utf8(unescape(words.next()?)).ok()?;
        let mut options = words.nth(1).unwrap_or_default().split(|byte| *byte == b',');
        let owner = options.find_map(|option| option.strip_prefix(b"user_id="));
        let owner = owner.and_then(|user| std::str::from_utf8(user).ok()?.parse().ok());
        Some(Self { id, connection, root, place, kind, owner })
    }
}

/// Decodes the octal escapes of spaces and similar characters.
fn unescape(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((first, behind)) = rest.split_first() {
        let digits = behind.get(..3).filter(|digits| digits.iter().all(|digit| (b'0'..b'8').contains(digit)));
        match digits {
            Some(digits) if *first == b'\\' => {
                bytes.push(digits.iter().fold(0u8, |value, digit| value << 3 | (digit - b'0')));
                rest = &behind[3..];
            }
            _ => {
                bytes.push(*first);
                rest = behind;
            }
        }
    }
    bytes
}

fn table() -> io::Result<Vec<MountEntry>> {
    let lines = std::fs::read(TABLE)?;
    Ok(lines.split(|byte| *byte == b'\n').filter_map(MountEntry::read).collect())
}

/// Returns the mount that `path` shows. None if `path` is not a mount point.
pub(crate) fn shown_at(path: &Path) -> io::Result<Option<MountEntry>> {
    // Without DONT_SYNC the kernel would ask the process of a FUSE mount, which may be dead.
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID)?;
    if !StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID) {
        return Err(io::Error::other("the kernel does not tell mounts apart: it is older than 5.8"));
    }
    let is_it = |entry: &MountEntry| {
        entry.id == found.stx_mnt_id && entry.place.as_os_str().as_bytes() == path.as_os_str().as_bytes()
    };
    Ok(table()?.into_iter().find(is_it))
}

/// Returns the type of the file system mounted at `path`, as findmnt(8) shows it. None if nothing is mounted
/// there.
pub fn kind_at(path: &Path) -> io::Result<Option<String>> {
    Ok(shown_at(path)?.map(|shown| shown.kind))
}

/// Returns the mount that `path` shows. None if it is no mount point, or does not exist.
pub(crate) fn shown(path: &Path) -> io::Result<Option<MountEntry>> {
    shown_at(path).or_else(|error| match error.kind() {
        io::ErrorKind::NotFound => Ok(None),
        _ => Err(error),
    })
}

/// True if some place shows a connection's file system, or a directory of it.
pub(crate) fn is_mounted(connection: u32) -> io::Result<bool> {
    Ok(table()?.iter().any(|entry| entry.connection == connection))
}

/// Returns the mount points at which the root of a connection's file system is mounted.
pub(crate) fn places_of(connection: u32) -> io::Result<Vec<PathBuf>> {
    let is_one = |entry: &MountEntry| entry.connection == connection && entry.root == b"/";
    Ok(table()?.into_iter().filter(is_one).map(|entry| entry.place).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_as_the_kernel_writes_it() {
        let line =
            br"36 35 0:53 / /mnt/with\040space\134 rw,noatime master:1 shared:2 - fuse.penstock a\040b rw";
        let entry = MountEntry::read(line).unwrap();
        assert_eq!((entry.id, entry.connection), (36, 53));
        assert_eq!((entry.place.to_str(), &*entry.root), (Some(r"/mnt/with space\"), &b"/"[..]));
        assert_eq!((entry.kind.as_str(), entry.owner), ("fuse.penstock", None));
        let line = b"36 35 0:53 / /mnt rw - fuse.penstock a rw,user_id=1000,group_id=7,allow_other";
        assert_eq!(MountEntry::read(line).unwrap().owner, Some(1000));
        for cut in [&b""[..], b"36 35", b"36 35 053 / /mnt rw - ext4 a rw", b"36 35 0:53 / /mnt rw ext4"] {
            assert_eq!(MountEntry::read(cut), None, "{:?}", String::from_utf8_lossy(cut));
        }
        assert_eq!(unescape(br"a\04\9\1234"), b"a\\04\\9S4");
    }

    #[test]
    fn a_path_shows_the_mount_on_it() {
        let shown = shown_at(Path::new("/proc")).unwrap().expect("/proc is a mount point");
        assert_eq!((&*shown.kind, shown.place.as_path()), ("proc", Path::new("/proc")));
        assert_eq!(shown_at(Path::new("/proc/self/fd")).unwrap(), None);
    }
}
