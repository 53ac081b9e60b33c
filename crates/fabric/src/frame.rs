//! Frames in a stream of bytes, both ways. Pure.

use crate::{BODY_BYTES, PAYLOAD_BYTES};
use penstock_base::{BLOCK_BYTES, BufMut, DecodeError, crc32c};
use penstock_wire::data::{decode_reply, decode_write};
use penstock_wire::{Frame, HEADER_BYTES, Header, Kind};
use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};

/// Parts of memory handed to one write.
const SLICES: usize = 64;

/// What comes is no frame: the connection cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Header or body is not what was sent, or not of this release.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A length is beyond its bound.
    #[error("a {part} of {bytes} bytes, and the most is {most}")]
    TooLong {
        /// Body or payload.
        part: &'static str,
        /// Its length.
        bytes: usize,
        /// Its bound.
        most: usize,
    },
    /// A payload is not the blocks that the body has checksums for.
    #[error("request {request}: a payload of {bytes} bytes for {blocks} checksums")]
    Payload {
        /// The request's number.
        request: u64,
        /// Bytes of the payload.
        bytes: usize,
        /// Checksums in the body.
        blocks: usize,
    },
    /// A block is not what its checksum says.
    #[error("request {request}: block {block} of the payload was damaged on its way")]
    Damaged {
        /// The request's number.
        request: u64,
        /// Which block of the payload.
        block: usize,
    },
}

impl FrameError {
    /// The request whose payload was damaged; 0 for everything else.
    pub fn damaged_request(&self) -> u64 {
        match self {
            Self::Damaged { request, .. } => *request,
            _ => 0,
        }
    }
}

/// Puts frames together from bytes as they come.
pub struct Receiver {
    head: [u8; HEADER_BYTES],
    body: Vec<u8>,
    payload: BufMut,
    /// Bytes received of this frame.
    at: usize,
}

impl Default for Receiver {
    fn default() -> Self {
        Self { head: [0; HEADER_BYTES], body: Vec::new(), payload: BufMut::recycled(0), at: 0 }
    }
}

impl Receiver {
    /// Whether a frame has begun and not ended.
    pub fn is_inside(&self) -> bool {
        self.at > 0
    }

    /// Where the next bytes belong, in order; never empty.
    pub fn spaces(&mut self) -> [IoSliceMut<'_>; 2] {
        let Some(behind) = self.at.checked_sub(HEADER_BYTES) else {
            return [IoSliceMut::new(&mut self.head[self.at..]), IoSliceMut::new(&mut [])];
        };
        let in_body = behind.min(self.body.len());
        let (body, payload) = (&mut self.body[in_body..], &mut self.payload.as_mut()[behind - in_body..]);
        [IoSliceMut::new(body), IoSliceMut::new(payload)]
    }

    /// Takes note of `count` bytes that came into the spaces. Gives the frame when it is whole.
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
        let Self { head, body, payload, .. } = std::mem::take(self);
        let header = Header::decode(&head, &body)?;
        verify(&header, &body, payload.as_ref())?;
        let payload = if payload.is_empty() { Vec::new() } else { vec![payload.freeze()] };
        Ok(Some(Frame { header, body, payload }))
    }
}

/// Checks a payload that comes from another memory: it is the blocks that the body has checksums for, and nothing else.
fn verify(header: &Header, body: &[u8], payload: &[u8]) -> Result<(), FrameError> {
    let crcs = match (header.kind, header.reply) {
        (Kind::Write, false) => decode_write(body)?.1,
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

/// Frames on their way out. What a frame holds (`H`) is let go when its last byte is gone.
pub struct Outbox<H> {
    queue: VecDeque<(Vec<u8>, Frame, H)>,
    /// Bytes of the first frame that are gone.
    at: usize,
}

impl<H> Default for Outbox<H> {
    fn default() -> Self {
        Self { queue: VecDeque::new(), at: 0 }
    }
}

impl<H> Outbox<H> {
    /// Adds a frame.
    pub fn push(&mut self, frame: Frame, held: H) {
        let mut head = frame.header.encode(&frame.body);
        head.extend_from_slice(&frame.body);
        self.queue.push_back((head, frame, held));
    }

    /// Whether nothing is to be sent.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The next bytes, from where they lie.
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

    /// Takes note of `count` bytes that are gone.
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
    use penstock_wire::data::{ChunkRef, encode_write};

    fn write(request: u64) -> Frame {
        let mut payload = BufMut::zeroed(3 * BLOCK_BYTES);
        payload.as_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = (at % 251) as u8);
        let payload = payload.freeze();
        let chunk = ChunkRef { branch: 0, ino: Ino(2), chunk: 3, block: 4, count: 3, snapshot: 0, cut: 7 };
        let body = encode_write(&chunk, &crc32c_blocks(&payload));
        let parts = vec![payload.slice(0..BLOCK_BYTES), payload.slice(BLOCK_BYTES..3 * BLOCK_BYTES)];
        let mut frame = Frame::request(Kind::Write, body, parts);
        frame.header.request = request;
        frame
    }

    fn stream(frames: impl IntoIterator<Item = Frame>) -> Vec<u8> {
        let mut outbox = Outbox::default();
        frames.into_iter().for_each(|frame| outbox.push(frame, ()));
        let mut bytes = Vec::new();
        while !outbox.is_empty() {
            let slices = outbox.slices();
            // Some of the first part only, as a full socket takes it.
            let count = slices[0].len().div_ceil(2);
            bytes.extend_from_slice(&slices[0][..count]);
            drop(slices);
            outbox.sent(count);
        }
        bytes
    }

    fn receive(mut bytes: &[u8], step: usize) -> Result<Vec<Frame>, FrameError> {
        let (mut receiver, mut frames) = (Receiver::default(), Vec::new());
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
