//! Reads and writes through compio: the one module that passes memory to the kernel.
#![allow(unsafe_code)]

use compio_buf::{BufResult, IntoInner, IoBuf, IoBufMut, SetLen};
use compio_driver::ToSharedFd;
use compio_driver::op::{ReadAt, Sync, WriteAt};
use compio_runtime::fd::AsyncFd;
use penstock_base::{Buf, BufMut};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;

struct WriteBuf(Buf);

impl IoBuf for WriteBuf {
    fn as_init(&self) -> &[u8] {
        &self.0
    }
}

/// All of a [`BufMut`] as space to read into. Its bytes are initialised from the start.
struct ReadBuf {
    buf: BufMut,
    filled: usize,
}

impl IoBuf for ReadBuf {
    fn as_init(&self) -> &[u8] {
        &self.buf.as_ref()[..self.filled]
    }
}

impl SetLen for ReadBuf {
    // SAFETY: the caller must uphold the contract of `SetLen`. Any `len` up to the capacity is initialised
    // memory here, and a greater one panics.
    unsafe fn set_len(&mut self, len: usize) {
        assert!(len <= self.buf.len(), "the kernel filled no more than the buffer");
        self.filled = len;
    }
}

impl IoBufMut for ReadBuf {
    fn as_uninit(&mut self) -> &mut [MaybeUninit<u8>] {
        let bytes = self.buf.as_mut();
        // SAFETY: u8 and MaybeUninit<u8> have the same layout, and the kernel writes only initialised bytes.
        unsafe { std::slice::from_raw_parts_mut(bytes.as_mut_ptr().cast(), bytes.len()) }
    }
}

/// Fills `buf` from offset `at` with one read. A short read is an error.
pub(crate) async fn read_exact_at(file: &AsyncFd<File>, buf: BufMut, at: u64) -> io::Result<BufMut> {
    let wanted = buf.len();
    let op = ReadAt::new(file.to_shared_fd(), at, ReadBuf { buf, filled: 0 });
    let BufResult(result, op) = compio_runtime::submit(op).await;
    match result? {
        got if got == wanted => Ok(op.into_inner().buf),
        got => Err(io::Error::other(format!("{got} of {wanted} bytes read"))),
    }
}

/// Writes all of `data` at offset `at` with one write. A short write is an error.
pub(crate) async fn write_all_at(file: &AsyncFd<File>, data: Buf, at: u64) -> io::Result<()> {
    let wanted = data.len();
    let op = WriteAt::new(file.to_shared_fd(), at, WriteBuf(data));
    let BufResult(result, _op) = compio_runtime::submit(op).await;
    match result? {
        done if done == wanted => Ok(()),
        // A full file system may write a part first and report the error only at the next write.
        done if done < wanted => Err(io::Error::from(rustix::io::Errno::NOSPC)),
        done => Err(io::Error::other(format!("{done} of {wanted} bytes written"))),
    }
}

/// Makes written data durable (fdatasync).
pub(crate) async fn sync_data(file: &AsyncFd<File>) -> io::Result<()> {
    let op = Sync::new(file.to_shared_fd(), true);
    compio_runtime::submit(op).await.0.map(|_| ())
}
