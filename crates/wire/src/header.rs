//! The header of every message, and frames of header, body and payload.

use crate::{Object, Version};
use penstock_base::num::to_u32;
use penstock_base::{Buf, Class, Dec, DecodeError, Enc, crc32c_append};

const MAGIC: &[u8; 4] = b"PNSK";
/// The length of a header in bytes.
pub const HEADER_BYTES: usize = 104;
const CRC_AT: usize = 100;
const REPLY: u16 = 1;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $value:literal,)*) => {
        /// The kind of a message. The numbers travel on the wire.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Kind {
            $($(#[$doc])* $name = $value,)*
        }

        impl Kind {
            /// Decodes the number on the wire; none if this release does not know it.
            pub fn from_u16(raw: u16) -> Option<Self> {
                match raw {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

kinds! {
    /// Begins a session: agrees on the version and identifies the client.
    Hello = 0x01,
    /// Renews the lease of the session.
    Ping = 0x02,
    /// Ends the session and closes its open files.
    End = 0x03,
    /// The sender closes the connection; the body contains the reason. Has no reply.
    Closing = 0x04,
    /// Names a user for whom a session of several users asks.
    User = 0x06,
    /// Answers revocations of leases, and waits for news: further revocations, and locks that may be free.
    Watch = 0x05,
    /// Reads blocks of a chunk.
    Read = 0x10,
    /// Writes blocks of a chunk.
    Write = 0x11,
    /// Makes a file's data durable.
    Commit = 0x12,
    /// Reserved: a client that has a plan reads a strip.
    FetchStrip = 0x13,
    /// Reserved: a client that has a reservation writes a strip.
    PlaceStrip = 0x14,
    /// Finds the next data or hole in a file.
    Seek = 0x15,
    /// Reserves space of a file, or gives it back.
    Space = 0x16,
    /// Looks up a name in a directory.
    Lookup = 0x20,
    /// Reads the attributes of an inode.
    GetAttr = 0x21,
    /// Changes attributes; truncates or extends a file.
    SetAttr = 0x22,
    /// Creates a file, directory, symbolic link or special file.
    Make = 0x23,
    /// Adds a name to an inode.
    Link = 0x24,
    /// Removes a name.
    Unlink = 0x25,
    /// Renames an entry, or exchanges two.
    Rename = 0x26,
    /// Lists entries of a directory.
    ReadDir = 0x27,
    /// Reads the target of a symbolic link.
    ReadLink = 0x28,
    /// Opens an inode: counts a user of it.
    Open = 0x29,
    /// Closes an inode: ends one use of it.
    Close = 0x2a,
    /// Reads an extended attribute.
    GetXattr = 0x2b,
    /// Sets an extended attribute.
    SetXattr = 0x2c,
    /// Lists the names of extended attributes.
    ListXattr = 0x2d,
    /// Removes an extended attribute.
    RemoveXattr = 0x2e,
    /// Reads the total and free space of the file system.
    StatFs = 0x2f,
    /// Makes the name space durable.
    Sync = 0x30,
    /// Acquires a lease on an inode.
    Lease = 0x31,
    /// Sets, tests or releases a lock on bytes of a file.
    Lock = 0x32,
    /// Sends a change again that a restart of the service may have lost.
    Repeat = 0x33,
}

impl Kind {
    /// The kind of object that a message addresses, with the number of the one that there is today.
    pub fn object(self) -> Object {
        match self {
            Self::Hello | Self::Ping | Self::End | Self::Closing | Self::Watch | Self::User => {
                Object::Session
            }
            Self::FetchStrip | Self::PlaceStrip => Object::Array(0),
            Self::Read | Self::Write | Self::Commit | Self::Seek | Self::Space => Object::FIRST_TARGET,
            Self::Lookup
            | Self::GetAttr
            | Self::SetAttr
            | Self::Make
            | Self::Link
            | Self::Unlink
            | Self::Rename
            | Self::ReadDir
            | Self::ReadLink
            | Self::Open
            | Self::Close
            | Self::GetXattr
            | Self::SetXattr
            | Self::ListXattr
            | Self::RemoveXattr
            | Self::StatFs
            | Self::Sync
            | Self::Lease
            | Self::Lock
            | Self::Repeat => Object::FIRST_FILESET,
        }
    }

    /// True for a kind whose requests must be executed once, and have a sequence.
    pub fn has_sequence(self) -> bool {
        self.changes_names() || matches!(self, Self::Open | Self::Close | Self::Lock | Self::Repeat)
    }

    /// True for a kind of request whose change is in a transaction of the name space.
    pub fn changes_names(self) -> bool {
        matches!(
            self,
            Self::SetAttr
                | Self::Make
                | Self::Link
                | Self::Unlink
                | Self::Rename
                | Self::SetXattr
                | Self::RemoveXattr
        )
    }

    /// True for a kind that has a number and no meaning yet. Services reject it with an error that names it.
    pub fn is_reserved(self) -> bool {
        matches!(self, Self::FetchStrip | Self::PlaceStrip)
    }
}

/// The header's fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The kind of the request, also in its reply.
    pub kind: Kind,
    /// True in a reply.
    pub reply: bool,
    /// Length of the body in bytes.
    pub body_bytes: u32,
    /// Length of the payload in bytes.
    pub payload_bytes: u32,
    /// The client's session; 0 before Hello was answered.
    pub session: u64,
    /// Number of the request in the session ([`crate::SLOTS`]); 0 for idempotent requests.
    pub sequence: u64,
    /// The tenant the request is charged to; 0 is the system.
    pub tenant: u32,
    /// The I/O class of the request.
    pub class: Class,
    /// The addressed object: of the kind that this kind of message takes.
    pub object: Object,
    /// The object's epoch, as the sender knows it.
    pub epoch: u64,
    /// Time in milliseconds from arrival within which the sender wants the reply; 0 is no limit.
    pub deadline_ms: u32,
    /// In a reply: 0 for success, or the action that the caller must take ([`penstock_base::ErrorKind`]).
    pub status: u16,
    /// In a reply: the POSIX error number that belongs to the status, or 0.
    pub errno: u16,
    /// The request's number on its connection, repeated in the reply; 0 within a process.
    pub request: u64,
    /// In a reply: the target's generation, which changes with each start of the service.
    pub generation: u64,
    /// The branch of the files that a request names; 0 is the file system itself. Lists of files have their
    /// own branches.
    pub branch: u64,
    /// The user for whom a session of several users asks: a number that it has agreed on with the service.
    /// 0 is the session's own user.
    pub user: u32,
}

impl Header {
    /// The header of a request of `kind`, with all other fields 0, except the class.
    pub fn request(kind: Kind) -> Self {
        Self {
            kind,
            reply: false,
            body_bytes: 0,
            payload_bytes: 0,
            session: 0,
            sequence: 0,
            tenant: 0,
            class: Class::Client,
            object: kind.object(),
            epoch: 0,
            deadline_ms: 0,
            status: 0,
            errno: 0,
            request: 0,
            generation: 0,
            branch: 0,
            user: 0,
        }
    }

    /// Encodes the header for a connection of this version. Its CRC covers header and body.
    pub fn encode(&self, version: Version, body: &[u8]) -> Vec<u8> {
        assert!(self.object.is_like(self.kind.object()), "{:?} does not take {:?}", self.kind, self.object);
        let mut enc = Enc::new();
        enc.raw(MAGIC)
            .u16(version.number())
            .u16(self.kind as u16)
            .u16(if self.reply { REPLY } else { 0 })
            .u16(0);
        enc.u32(self.body_bytes)
            .u32(self.payload_bytes)
            .u64(self.session)
            .u64(self.sequence)
            .u32(self.tenant);
        enc.u8(self.class as u8).u8(0).u16(0).u64(self.object.to_u64()).u64(self.epoch).u32(self.deadline_ms);
        enc.u16(self.status)
            .u16(self.errno)
            .u64(self.request)
            .u64(self.generation)
            .u64(self.branch)
            .u32(self.user)
            .pad_to(CRC_AT);
        let crc = crc32c_append([enc.as_slice(), body]);
        enc.u32(crc);
        enc.finish()
    }

    /// Returns the lengths of body and payload. The checksum cannot be verified before the body is received,
    /// so the caller must check both lengths against a bound.
    pub fn lengths(bytes: &[u8; HEADER_BYTES]) -> Result<(usize, usize), DecodeError> {
        let mut dec = Dec::new("message header", bytes);
        if dec.raw(4)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        dec.raw(8)?;
        Ok((dec.u32()? as usize, dec.u32()? as usize))
    }

    /// Decodes a header of a connection of this version, and verifies the checksum over header and body.
    pub fn decode(version: Version, bytes: &[u8], body: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("message header", bytes);
        if bytes.len() != HEADER_BYTES {
            return Err(dec.bad("wrong length of the header"));
        }
        if dec.raw(4)? != MAGIC {
            return Err(dec.bad("wrong magic number"));
        }
        if crc32c_append([&bytes[..CRC_AT], body]).to_le_bytes() != bytes[CRC_AT..] {
            return Err(dec.bad("checksum"));
        }
        let (found, kind, flags) = (dec.u16()?, dec.u16()?, dec.u16()?);
        dec.check_known("version", found, version.number())?;
        dec.zeros("field behind the flags", 2)?;
        if flags & !REPLY != 0 {
            return Err(dec.unknown("flags", flags.into()));
        }
        let kind = Kind::from_u16(kind).ok_or_else(|| dec.unknown("kind", kind.into()))?;
        let (body_bytes, payload_bytes) = (dec.u32()?, dec.u32()?);
        let (session, sequence, tenant, class) = (dec.u64()?, dec.u64()?, dec.u32()?, dec.u8()?);
        let class = Class::from_u8(class).ok_or_else(|| dec.unknown("class", class.into()))?;
        dec.zeros("field behind the class", 3)?;
        let object = dec.u64()?;
        let object = Object::of_u64(&dec, object)?;
        if !object.is_like(kind.object()) {
            return Err(dec.bad("this kind of message takes another kind of object"));
        }
        let header = Self {
            kind,
            reply: flags & REPLY != 0,
            body_bytes,
            payload_bytes,
            session,
            sequence,
            tenant,
            class,
            object,
            epoch: dec.u64()?,
            deadline_ms: dec.u32()?,
            status: dec.u16()?,
            errno: dec.u16()?,
            request: dec.u64()?,
            generation: dec.u64()?,
            branch: dec.u64()?,
            user: dec.u32()?,
        };
        dec.zeros("field behind the user", 4)?;
        if header.branch != 0 && header.object == Object::Session {
            return Err(dec.bad("a branch of a message that names no file"));
        }
        if header.body_bytes as usize != body.len() {
            return Err(dec.bad("wrong length of the body"));
        }
        Ok(header)
    }
}

/// A message: header, body, payload.
#[derive(Clone, Debug)]
pub struct Frame {
    /// The header.
    pub header: Header,
    /// The encoded body.
    pub body: Vec<u8>,
    /// The payload: buffers of whole blocks, by reference.
    pub payload: Vec<Buf>,
}

impl Frame {
    /// A request with the default header of its kind.
    pub fn request(kind: Kind, body: Vec<u8>, payload: Vec<Buf>) -> Self {
        let header = Header {
            body_bytes: to_u32(body.len()),
            payload_bytes: to_u32(payload.iter().map(Buf::len).sum::<usize>()),
            ..Header::request(kind)
        };
        Self { header, body, payload }
    }

    /// The reply to `request`. A failure becomes a status, an error number and a message in the body.
    pub fn reply(request: &Header, result: Result<(Vec<u8>, Vec<Buf>), Failure>) -> Self {
        let (status, errno, body, payload) = match result {
            Ok((body, payload)) => (0, 0, body, payload),
            Err(failure) => (failure.kind as u16, failure.errno, failure.message.into_bytes(), Vec::new()),
        };
        let mut frame = Self::request(request.kind, body, payload);
        let lengths = (frame.header.body_bytes, frame.header.payload_bytes);
        frame.header = Header {
            reply: true,
            body_bytes: lengths.0,
            payload_bytes: lengths.1,
            status,
            errno,
            ..*request
        };
        frame
    }

    /// Returns body and payload of a reply, or the failure that it reports.
    pub fn into_result(self) -> Result<(Vec<u8>, Vec<Buf>), Failure> {
        if self.header.status == 0 {
            return Ok((self.body, self.payload));
        }
        let kind = penstock_base::ErrorKind::from_u16(self.header.status)
            .unwrap_or(penstock_base::ErrorKind::Internal);
        let message = String::from_utf8_lossy(&self.body).into_owned();
        Err(Failure { kind, errno: self.header.errno, message })
    }
}

/// The failure of a request: reported by the service, or of the transport.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// The action that the caller must take.
    pub kind: penstock_base::ErrorKind,
    /// The POSIX error number; 0 if the caller derives it from the kind.
    pub errno: u16,
    /// The cause, for people.
    pub message: String,
}

const EAGAIN: u16 = 11;

impl Failure {
    /// A failure without a POSIX error number.
    pub fn new(kind: penstock_base::ErrorKind, message: impl ToString) -> Self {
        Self { kind, errno: 0, message: message.to_string() }
    }

    /// A failure that asks the client to repeat the same request without delay. The service did nothing: it
    /// still waits for another client.
    pub fn ask_again() -> Self {
        let message = "the service waits for another client".into();
        Self { kind: penstock_base::ErrorKind::Retry, errno: EAGAIN, message }
    }

    /// True for [`Failure::ask_again`].
    pub fn is_ask_again(&self) -> bool {
        self.kind == penstock_base::ErrorKind::Retry && self.errno == EAGAIN
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Self {
        Self::new(penstock_base::ErrorKind::Invalid, error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_comes_back_and_every_bit_is_covered() {
        let decode = |bytes: &[u8], body: &[u8]| Header::decode(Version::NEWEST, bytes, body);
        let header = Header {
            session: 3,
            sequence: 4,
            object: Object::Fileset(5),
            branch: 7,
            user: 6,
            body_bytes: 3,
            ..Header::request(Kind::Rename)
        };
        let bytes = header.encode(Version::NEWEST, b"abc");
        assert_eq!(bytes.len(), HEADER_BYTES);
        assert_eq!(decode(&bytes, b"abc"), Ok(header));
        for bit in 0..HEADER_BYTES * 8 {
            let mut flipped = bytes.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&flipped, b"abc").is_err(), "bit {bit}");
        }
        assert!(decode(&bytes, b"abd").is_err());
    }

    #[test]
    fn fields_of_later_releases_are_refused_by_name() {
        let bytes = Header::request(Kind::Read).encode(Version::NEWEST, b"");
        for (at, byte, field) in [
            (4, 9, "version is 9"),
            (6, 0xee, "kind is 238"),
            (8, 2, "flags is 2"),
            (10, 1, "field behind the flags is 1"),
            (40, 0, "class is 0"),
            (40, 8, "class is 8"),
            (43, 1, "field behind the class is 1"),
            (51, 3, "takes another kind of object"),
            (51, 4, "kind of object is 4"),
            (96, 1, "field behind the user is 1"),
        ] {
            let mut later = bytes.clone();
            later[at] = byte;
            let crc = crc32c_append([&later[..CRC_AT]]);
            later[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
            let error = Header::decode(Version::NEWEST, &later, b"").unwrap_err().to_string();
            assert!(error.contains(field), "byte {at} is {byte}: {error}");
        }
    }
}
