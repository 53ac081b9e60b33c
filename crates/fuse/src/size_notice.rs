//! Sends the kernel a file's size by a notice that changes no page.
//!
//! FUSE has no notice for a size alone. NOTIFY_STORE puts bytes into pages, and first makes the file longer
//! if they lie behind its end (`fuse_notify_store` in fs/fuse/dev.c). But at each place that a byte could go
//! to, a program may have stored a newer byte through a map, which nobody else knows yet. So the byte that
//! the notice contains cannot be read: the kernel takes the size, locks the byte's page, and fails with
//! EFAULT.
//!
//! Invariant: a notice from here changes no byte of any page.
#![allow(unsafe_code)]

use crate::abi::{NOTIFY_STORE, OutHeader, StoreOut};
use crate::notices::is_needless;
use penstock_base::num::{to_i32, to_u32};
use rustix::io::Errno;
use std::ffi::c_void;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use zerocopy::IntoBytes;

/// A mapping that no access can read.
struct Unreadable {
    at: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: it is an address of memory that no thread can access.
unsafe impl Send for Unreadable {}
// SAFETY: as above.
unsafe impl Sync for Unreadable {}

impl Unreadable {
    fn new() -> io::Result<Self> {
        let bytes = rustix::param::page_size();
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0) };
        match NonNull::new(at).filter(|_| at != libc::MAP_FAILED) {
            Some(at) => Ok(Self { at, bytes }),
            None => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Unreadable {
    fn drop(&mut self) {
        // SAFETY: this owns the mapping, and nothing refers to it any more.
        unsafe { libc::munmap(self.at.as_ptr(), self.bytes) };
    }
}

/// Sends size notices.
pub(crate) struct SizeNotice(Unreadable);

impl SizeNotice {
    pub(crate) fn new() -> io::Result<Self> {
        Unreadable::new().map(Self)
    }

    /// Sends the kernel the message that an inode has at least `size` bytes, which must not be 0. Blocks
    /// while a request has the file's last page locked; the kernel knows the size by then.
    pub(crate) fn send(&self, device: &File, nodeid: u64, size: u64) -> io::Result<()> {
        let notice = StoreOut { nodeid, offset: size - 1, size: 1, padding: 0 };
        let len = size_of::<OutHeader>() + size_of::<StoreOut>() + 1;
        let header = OutHeader { len: to_u32(len), error: NOTIFY_STORE, unique: 0 };
        let part =
            |bytes: &[u8]| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
        let byte = libc::iovec { iov_base: self.0.at.as_ptr(), iov_len: 1 };
        let parts = [part(header.as_bytes()), part(notice.as_bytes()), byte];
        // SAFETY: the kernel reads the memory of the parts: two values that outlive the call, and memory that
        // cannot be read, for which it returns EFAULT.
        let sent = unsafe { libc::writev(device.as_raw_fd(), parts.as_ptr(), to_i32(parts.len())) };
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
        // SAFETY: only the kernel reads from there.
        let sent = unsafe { libc::write(writer.as_raw_fd(), unreadable.at.as_ptr(), 1) };
        assert_eq!((sent, io::Error::last_os_error().raw_os_error()), (-1, Some(libc::EFAULT)));
    }
}
