//! Encoding and decoding of frames in a stream of bytes, without I/O.

use crate::{BODY_BYTES, PAYLOAD_BYTES};
use penstock_base::{BLOCK_BYTES, BufMut, DecodeError, crc32c};
use penstock_wire::data::{crcs_of_write, decode_reply};
use penstock_wire::{Frame, HEADER_BYTES, Header, Kind, Version};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

/// The most buffers in one vectored write.
const SLICES: usize = 64;

/// The reason why received bytes are not a valid frame. The connection must be closed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The header or the body is damaged, or of a version that this release does not know.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A length exceeds its limit.
    #[error("a {part} of {bytes} bytes exceeds the limit of {most}")]
    TooLong {
        /// `body` or `payload`.
        part: &'static str,
        /// Its length in bytes.
        bytes: usize,
        /// Its limit in bytes.
        most: usize,
    },
    /// The length of the payload does not match the number of checksums in the body.
    #[error("request {request}: a payload of {bytes} bytes for {blocks} checksums")]
    Payload {
        /// The request's number.
        request: u64,
        /// Length of the payload in bytes.
        bytes: usize,
        /// Number of checksums in the body.
        blocks: usize,
    },
    /// A block of the payload does not match its checksum.
    #[error("request {request}: block {block} of the payload was damaged on its way")]
    Damaged {
        /// The request's number.
        request: u64,
        /// Index of the block in the payload.
        block: usize,
    },
}

impl FrameError {
    /// The request whose payload was damaged; 0 for every other error.
    pub fn damaged_request(&self) -> u64 {
        match self {
            Self::Damaged { request, .. } => *request,
            _ => 0,
        }
    }
}

/// Assembles frames from received bytes.
pub struct Receiver {
    head: [u8; HEADER_BYTES],
    body: Vec<u8>,
    payload: BufMut,
    /// The number of bytes received of the current frame.
    at: usize,
    version: Version,
}

impl Receiver {
    /// For a connection of this version.
    pub fn new(version: Version) -> Self {
        Self { head: [0; HEADER_BYTES], body: Vec::new(), payload: BufMut::recycled(0), at: 0, version }
    }

    /// True if a part of a frame was received.
    pub fn is_inside(&self) -> bool {
        self.at > 0
    }

    /// Returns the memory for the next bytes, in order. There is always space for at least one byte.
    pub fn spaces(&mut self) -> [IoSliceMut<'_>; 2] {
        let Some(behind) = self.at.checked_sub(HEADER_BYTES) else {
            return [IoSliceMut::new(&mut self.head[self.at..]), IoSliceMut::new(&mut [])];
        };
        let in_body = behind.min(self.body.len());
        let (body, payload) = (&mut self.body[in_body..], &mut self.payload.as_mut()[behind - in_body..]);
        [IoSliceMut::new(body), IoSliceMut::new(payload)]
    }

    /// Notes that `count` bytes were received into the spaces. Returns the frame when it is complete and
    /// verified.
    pub fn filled(&mut self, count: usize) -> Result<Option<Frame>, FrameError> {
        let header_was_open = self.at < HEADER_BYTES;
        self.at += count;
        if self.at < HEADER_BYTES {
            return Ok(None);
        }
        if header_was_open {
            assert_eq!(self.at, HEADER_BYTES, "only the header was asked for");
            let (body, payload) = Header::lengths(&self.head)?;
            for (part, bytes, most) in [("body", body, BODY_BYTES), ("payload", payload, PAYLOAD_BYTES)] {
                if bytes > most {
                    return Err(FrameError::TooLong { part, bytes, most });
                }
            }
            self.body = vec![0; body];
            self.payload = BufMut::recycled(payload);
        }
        if self.at < HEADER_BYTES + self.body.len() + self.payload.len() {
            return Ok(None);
        }
        let Self { head, body, payload, version, .. } = std::mem::replace(self, Self::new(self.version));
        let header = Header::decode(version, &head, &body)?;
        verify(&header, &body, payload.as_ref())?;
        let payload = if payload.is_empty() { Vec::new() } else { vec![payload.freeze()] };
        Ok(Some(Frame { header, body, payload }))
    }
}

/// Verifies a payload against the checksums in the body: the length must match their number, and every block
/// its checksum. Messages other than writes and replies to reads must have no payload.
fn verify(header: &Header, body: &[u8], payload: &[u8]) -> Result<(), FrameError> {
    let crcs = match (header.kind, header.reply) {
        (Kind::Write, false) => crcs_of_write(body)?,
        (Kind::Read, true) if header.status == 0 => decode_reply(body)?.1,
        _ => Vec::new(),
    };
    let request = header.request;
    if payload.len() != crcs.len() * BLOCK_BYTES {
        return Err(FrameError::Payload { request, bytes: payload.len(), blocks: crcs.len() });
    }
    let damaged = |(block, crc): &(&[u8], &u32)| crc32c(block) != **crc;
    match payload.chunks_exact(BLOCK_BYTES).zip(&crcs).position(|pair| damaged(&pair)) {
        Some(block) => Err(FrameError::Damaged { request, block }),
        None => Ok(()),
    }
}

/// The queue of frames to send. Each has a guard (`H`) that is dropped when its last byte was sent.
pub struct Outbox<H> {
    queue: VecDeque<(Vec<u8>, Frame, H)>,
    /// The number of bytes of the first frame that were sent.
    at: usize,
    version: Version,
}

impl<H> Outbox<H> {
    /// For a connection of this version.
    pub fn new(version: Version) -> Self {
        Self { queue: VecDeque::new(), at: 0, version }
    }

    /// Adds a frame at the end of the queue.
    pub fn push(&mut self, mut frame: Frame, held: H) {
        let body = std::mem::take(&mut frame.body);
        let mut head = frame.header.encode(self.version, &body);
        head.extend_from_slice(&body);
        self.queue.push_back((head, frame, held));
    }

    /// True if there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The next bytes to send, without a copy, in at most 64 parts.
    pub fn slices(&self) -> Vec<IoSlice<'_>> {
        let mut skip = self.at;
        let mut slices = Vec::new();
        for (head, frame, _) in &self.queue {
            for part in std::iter::once(&head[..]).chain(frame.payload.iter().map(|part| &part[..])) {
                let gone = skip.min(part.len());
                skip -= gone;
                if gone < part.len() && slices.len() < SLICES {
                    slices.push(IoSlice::new(&part[gone..]));
                }
            }
            if slices.len() >= SLICES {
                break;
            }
        }
        slices
    }

    /// Notes that `count` bytes were sent. Panics if the queue has fewer.
    pub fn sent(&mut self, count: usize) {
        self.at += count;
        while let Some((head, frame, _)) = self.queue.front() {
            let len = head.len() + frame.header.payload_bytes as usize;
            if self.at < len {
                break;
            }
            self.at -= len;
            self.queue.pop_front();
        }
        assert!(!self.queue.is_empty() || self.at == 0, "no more is sent than there is");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::{Buf, Ino, crc32c_blocks};
    use penstock_wire::data::{ChunkRef, PROOF_BYTES, Right, encode_write};

    fn write(request: u64) -> Frame {
        let mut payload = BufMut::zeroed(3 * BLOCK_BYTES);
        payload.as_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
        let payload = payload.freeze();
        let chunk = ChunkRef { ino: Ino(2), chunk: 3, block: 4, count: 3, truncations: 7 };
        let body = encode_write(&chunk, &crc32c_blocks(&payload));
        let parts = vec![payload.slice(0..BLOCK_BYTES), payload.slice(BLOCK_BYTES..3 * BLOCK_BYTES)];
        let mut frame = Frame::request(Kind::Write, body, parts);
        frame.header.request = request;
        frame
    }

    fn stream(frames: impl IntoIterator<Item = Frame>) -> Vec<u8> {
        let mut outbox = Outbox::new(Version::NEWEST);
        frames.into_iter().for_each(|frame| outbox.push(frame, ()));
        let mut bytes = Vec::new();
        while !outbox.is_empty() {
            let slices = outbox.slices();
            // Takes half of the first part only, as a full socket does.
            let count = slices[0].len().div_ceil(2);
            bytes.extend_from_slice(&slices[0][..count]);
            drop(slices);
            outbox.sent(count);
        }
        bytes
    }

    fn receive(mut bytes: &[u8], step: usize) -> Result<Vec<Frame>, FrameError> {
        let (mut receiver, mut frames) = (Receiver::new(Version::NEWEST), Vec::new());
        while !bytes.is_empty() {
            let mut count = 0;
            for space in &mut receiver.spaces() {
                let part = space.len().min(bytes.len()).min(step - count);
                space[..part].copy_from_slice(&bytes[..part]);
                bytes = &bytes[part..];
                count += part;
            }
            frames.extend(receiver.filled(count)?);
        }
        Ok(frames)
    }

    #[test]
    fn frames_come_out_as_they_went_in_however_the_stream_is_cut() {
        let plain = Frame::request(Kind::Sync, Vec::new(), Vec::new());
        let bytes = stream([write(1), plain, write(2)]);
        for step in [1, 7, 96, 4096, 1 << 20] {
            let frames = receive(&bytes, step).unwrap();
            let numbers: Vec<u64> = frames.iter().map(|frame| frame.header.request).collect();
            assert_eq!(numbers, [1, 0, 2]);
            let (found, sent) = (&frames[2], write(2));
            assert_eq!((found.header, &found.body), (sent.header, &sent.body));
            assert_eq!(
                penstock_base::buf::gather(&found.payload)[..],
                penstock_base::buf::gather(&sent.payload)[..]
            );
            assert_eq!(found.payload[0].as_ptr() as usize % BLOCK_BYTES, 0, "blocks are aligned");
        }
    }

    /// Regression: a write with a right closed the connection of all users of a gateway.
    #[test]
    fn a_payload_is_verified_whatever_the_right_of_its_request_is() {
        let mut sent = write(1);
        Right { grant: 3, proof: [7; PROOF_BYTES] }.put(&mut sent.body);
        let frames = receive(&stream([sent.clone()]), 4096).unwrap();
        assert_eq!(frames[0].body, sent.body);
        let mut bytes = stream([sent]);
        *bytes.last_mut().unwrap() ^= 1;
        assert_eq!(receive(&bytes, 4096).unwrap_err(), FrameError::Damaged { request: 1, block: 2 });
    }

    #[test]
    fn what_is_wrong_is_refused_by_name_and_early() {
        let good = stream([write(9)]);
        let flipped = |at: usize| {
            let mut bytes = good.clone();
            bytes[at] ^= 1;
            receive(&bytes, 4096).unwrap_err()
        };
        let end = good.len();
        assert_eq!(flipped(end - 1), FrameError::Damaged { request: 9, block: 2 });
        assert_eq!(flipped(end - 1).damaged_request(), 9);
        assert!(matches!(flipped(0), FrameError::Decode(_)), "magic");
        assert!(matches!(flipped(100), FrameError::Decode(_)), "body");
        assert!(matches!(flipped(70), FrameError::Decode(_)), "request number");
        // Lengths are bounded before anything is allocated for them.
        for at in [12, 16] {
            let mut bytes = good[..HEADER_BYTES].to_vec();
            bytes[at..at + 4].fill(0xff);
            assert!(matches!(receive(&bytes, 96).unwrap_err(), FrameError::TooLong { .. }));
        }
        let stray = Frame::request(Kind::Sync, Vec::new(), vec![Buf::zeroed(BLOCK_BYTES)]);
        let why = receive(&stream([stray]), 4096).unwrap_err();
        assert_eq!(why, FrameError::Payload { request: 0, bytes: BLOCK_BYTES, blocks: 0 });
    }
}
