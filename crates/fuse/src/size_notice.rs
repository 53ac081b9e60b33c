//! The notice that tells the kernel how long a file is.
//!
//! There is none for that alone. NOTIFY_STORE puts bytes into pages, and makes the file longer before that where they lie
//! behind its end (`fuse_notify_store` in fs/fuse/dev.c). But a program may have a newer byte in every place that a byte could go
//! to, in a page that it has mapped, which nobody else knows of. So the byte that comes with the notice is one that cannot
//! be read: the kernel takes the size, locks the page of the byte, and gives up with EFAULT.
//!
//! Invariant: a notice from here changes no byte of any page.
#![allow(unsafe_code)]

use crate::abi::{NOTIFY_STORE, OutHeader, StoreOut};
use crate::cache::is_needless;
use rustix::io::Errno;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use zerocopy::IntoBytes;

/// Memory that nobody may read.
struct Unreadable {
    at: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: it is an address whose memory no thread can touch.
unsafe impl Send for Unreadable {}
// SAFETY: as above.
unsafe impl Sync for Unreadable {}

impl Unreadable {
    fn new() -> io::Result<Self> {
        let bytes = rustix::param::page_size();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping, wherever there is room.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        match NonNull::new(at).filter(|_| at != libc::MAP_FAILED) {
            Some(at) => Ok(Self { at, bytes }),
            None => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Unreadable {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, and nothing refers to it any more.
        unsafe { libc::munmap(self.at.as_ptr(), self.bytes) };
    }
}

/// Sends such notices.
pub(crate) struct SizeNotice(Unreadable);

impl SizeNotice {
    pub(crate) fn new() -> io::Result<Self> {
        Unreadable::new().map(Self)
    }

    /// Tells the kernel that an inode has `size` bytes at least, which are more than none. Waits for the file's last page where a
    /// request has it locked; the kernel knows the size by then.
    pub(crate) fn send(&self, device: &File, nodeid: u64, size: u64) -> io::Result<()> {
        let notice = StoreOut { nodeid, offset: size - 1, size: 1, padding: 0 };
        let len = size_of::<OutHeader>() + size_of::<StoreOut>() + 1;
        let header = OutHeader { len: len as u32, error: NOTIFY_STORE, unique: 0 };
        let part =
            |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let byte = libc::iovec { iov_base: self.0.at.as_ptr(), iov_len: 1 };
        let parts = [part(header.as_bytes()), part(notice.as_bytes()), byte];
        // SAFETY: the kernel reads what the parts name: two values that outlive the call, and memory that nobody can read,
        // which it is told by its fault.
        let sent = unsafe { libc::writev(device.as_raw_fd(), parts.as_ptr(), parts.len() as i32) };
        let error = io::Error::last_os_error();
        match error.raw_os_error().map(Errno::from_raw_os_error) {
            _ if sent != -1 => Err(io::Error::other("the kernel took a byte that cannot be read")),
            Some(error) if error == Errno::FAULT || is_needless(error) => Ok(()),
            _ => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn the_byte_cannot_be_read() {
        let (_reader, writer) = rustix::pipe::pipe().unwrap();
        let mut writer = File::from(writer);
        writer.write_all(b"a byte of a notice can").unwrap();
        let unreadable = Unreadable::new().unwrap();
        // SAFETY: the kernel reads from there, and nobody else.
        let sent = unsafe { libc::write(writer.as_raw_fd(), unreadable.at.as_ptr(), 1) };
        assert_eq!((sent, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    }
}
