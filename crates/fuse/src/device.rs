//! The FUSE device of a mount: receives requests and sends replies through one non-blocking descriptor.
//!
//! A request is received into two buffers: its head, and a page-aligned buffer that the data of a WRITE fills
//! from its first byte on. Long data is handed on in that buffer, so only the kernel copies it, once. A reply
//! is sent from the buffers that its data lies in, without being assembled first.
//!
//! Invariant: a request that wants a reply gets exactly one. A request that is dropped unanswered gets EIO.

use crate::MAX_WRITE_BYTES;
use crate::abi::{InHeader, OutHeader, WRITE_HEAD_BYTES, op};
use crate::reads::InFlight;
use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, FileId};
use penstock_client::{Hold, Staged, Store};
use penstock_worker::Readiness;
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::rc::Rc;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Data shorter than this is copied out of the receiving buffer. Handing on the buffer would keep all of it
/// in memory for little data.
const HAND_ON_BYTES: usize = MAX_WRITE_BYTES as usize / 2;

/// The successful result of a request, as its reply contains it.
pub(crate) enum Answer {
    /// Success without a payload.
    Done,
    /// A structure, or bytes.
    Bytes(Vec<u8>),
    /// File data, in runs.
    Data(Vec<Buf>),
}

impl Answer {
    /// A reply that consists of one structure.
    pub(crate) fn of(value: &(impl IntoBytes + Immutable)) -> Self {
        Self::Bytes(value.as_bytes().to_vec())
    }
}

/// The `/dev/fuse` descriptor of one mount.
pub(crate) struct Device(Readiness<File>);

/// A request that was received.
pub(crate) struct Request {
    pub(crate) header: InHeader,
    /// The file of the node in the header. The session sets it; inode 0 if the request is about no node.
    pub(crate) file: FileId,
    /// The bytes after the header, without the data of a WRITE.
    pub(crate) body: Vec<u8>,
    /// The data of a WRITE.
    pub(crate) data: Option<Staged>,
    /// A lease guard that lasts until the reply is sent.
    pub(crate) hold: Option<Hold>,
    /// A lease guard that lasts until the reply is sent, for requests that drop pages before the reply.
    pub(crate) store: Option<Store>,
    /// The registration of a read, which also lasts until the reply is sent.
    pub(crate) in_flight: Option<InFlight>,
    reply: Reply,
}

/// The right to answer one request.
struct Reply {
    device: Rc<Device>,
    unique: u64,
    open: bool,
}

/// The result of reading the device.
pub(crate) enum Received {
    Request(Box<Request>),
    /// No request is there now.
    Empty,
    /// The file system is no longer mounted.
    Unmounted,
}

/// The buffers that requests are received into.
pub(crate) struct Inbox {
    head: [u8; WRITE_HEAD_BYTES],
    data: BufMut,
}

impl Inbox {
    pub(crate) fn new() -> Self {
        Self { head: [0; WRITE_HEAD_BYTES], data: BufMut::recycled(MAX_WRITE_BYTES as usize) }
    }

    /// Returns the data of a WRITE to `offset`.
    fn take_data(&mut self, offset: u64, len: usize) -> Staged {
        let aligned = offset.is_multiple_of(BLOCK_BYTES as u64);
        if !aligned || len < HAND_ON_BYTES {
            return Staged::of(offset, &self.data.as_ref()[..len]);
        }
        let mut data = std::mem::replace(&mut self.data, BufMut::recycled(MAX_WRITE_BYTES as usize));
        data.truncate(len.next_multiple_of(BLOCK_BYTES));
        data.as_mut()[len..].fill(0);
        Staged { blocks: data, len }
    }
}

impl Device {
    /// Takes a descriptor that must be non-blocking.
    pub(crate) fn new(file: File) -> io::Result<Rc<Self>> {
        Ok(Rc::new(Self(Readiness::new(file)?)))
    }

    /// Duplicates the descriptor.
    pub(crate) fn copy(&self) -> io::Result<File> {
        self.0.get().try_clone()
    }

    /// Waits until a request may be there.
    pub(crate) async fn readable(&self) -> io::Result<()> {
        self.0.readable().await
    }

    /// Receives one request, if one is there.
    pub(crate) fn receive(self: &Rc<Self>, inbox: &mut Inbox) -> io::Result<Received> {
        let Inbox { head, data } = inbox;
        let len = match rustix::io::readv(
            self.0.get(),
            &mut [IoSliceMut::new(head), IoSliceMut::new(data.as_mut())],
        ) {
            Ok(len) => len,
            // The kernel withdrew the request while it was read (ENOENT), a signal came, or there is no
            // request.
            Err(Errno::NOENT | Errno::INTR | Errno::AGAIN) => return Ok(Received::Empty),
            Err(Errno::NODEV) => return Ok(Received::Unmounted),
            Err(error) => return Err(error.into()),
        };
        let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, format!("a request {why}"));
        let header = InHeader::read_from_prefix(&inbox.head[..]).map_err(|_| invalid("is too short"))?.0;
        if header.len as usize != len || len < size_of::<InHeader>() {
            return Err(invalid("has another length than it says"));
        }
        let mut body = inbox.head[size_of::<InHeader>()..WRITE_HEAD_BYTES.min(len)].to_vec();
        let beyond = len.saturating_sub(WRITE_HEAD_BYTES);
        let data = if header.opcode == op::WRITE {
            let write = crate::abi::WriteIn::read_from_prefix(&body).map_err(|_| invalid("is too short"))?.0;
            if write.size as usize != beyond {
                return Err(invalid("has another data length than it says"));
            }
            Some(inbox.take_data(write.offset, beyond))
        } else {
            body.extend_from_slice(&inbox.data.as_ref()[..beyond]);
            None
        };
        // The kernel expects no reply to these.
        let open = !matches!(header.opcode, op::FORGET | op::BATCH_FORGET | op::INTERRUPT);
        let reply = Reply { device: self.clone(), unique: header.unique, open };
        Ok(Received::Request(Box::new(Request {
            header,
            file: FileId::of_numbers(0, 0),
            body,
            data,
            hold: None,
            store: None,
            in_flight: None,
            reply,
        })))
    }

    fn send(&self, unique: u64, error: i32, parts: &[&[u8]]) {
        let len = size_of::<OutHeader>() + parts.iter().map(|part| part.len()).sum::<usize>();
        let header = OutHeader { len: to_u32(len), error, unique };
        let mut slices = Vec::with_capacity(parts.len() + 1);
        slices.push(IoSlice::new(header.as_bytes()));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        match rustix::io::writev(self.0.get(), &slices) {
            // The request was aborted (ENOENT), or the file system is unmounted (ENODEV).
            Ok(_) | Err(Errno::NOENT | Errno::NODEV) => {}
            Err(error) => tracing::error!(%error, unique, len, "the kernel does not take a reply"),
        }
    }
}

impl Request {
    /// Returns the structure at the start of the body. Fails with EIO where the body is too short.
    pub(crate) fn argument<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, Errno> {
        T::read_from_prefix(&self.body).map(|(value, _)| value).map_err(|_| Errno::IO)
    }

    /// Returns the `index`-th of the zero-terminated names that follow `skip` bytes of the body.
    pub(crate) fn name(&self, skip: usize, index: usize) -> Result<&[u8], Errno> {
        let names = self.body.get(skip..).unwrap_or_default();
        let mut names = names.split_inclusive(|byte| *byte == 0);
        names.nth(index).and_then(|name| name.strip_suffix(&[0])).ok_or(Errno::IO)
    }

    /// Sends the reply before the work is done.
    pub(crate) fn answer_early(&mut self, answer: Answer) {
        self.reply.send(&Ok(answer));
    }

    /// Sends the reply, unless [`Self::answer_early`] did.
    pub(crate) fn answer(mut self, result: Result<Answer, Errno>) {
        self.reply.send(&result);
    }
}

impl Reply {
    fn send(&mut self, result: &Result<Answer, Errno>) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        match result {
            Ok(Answer::Done) => self.device.send(self.unique, 0, &[]),
            Ok(Answer::Bytes(bytes)) => self.device.send(self.unique, 0, &[bytes]),
            Ok(Answer::Data(data)) => {
                let parts: Vec<&[u8]> = data.iter().map(|part| &part[..]).collect();
                self.device.send(self.unique, 0, &parts);
            }
            Err(error) => self.device.send(self.unique, -error.raw_os_error(), &[]),
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.send(&Err(Errno::IO));
    }
}
