//! Headers of messages and bodies of the data path.

use super::seal_crc;
use crate::check::{Decoder, Form, SAME, Verdict, agrees, unsealed};
use penstock_base::Ino;
use penstock_wire::data::{
    ChunkRef, decode_commit, decode_read, decode_reply, decode_write, encode_commit, encode_read,
    encode_reply, encode_write,
};
use penstock_wire::{Failure, Frame, HEADER_BYTES, Header, Kind};

/// `header`: a header and the body behind it. An accepted reply gives its result.
pub(super) const HEADER: Decoder = Decoder {
    name: "header",
    most_bytes: 1024,
    seeds: headers,
    seal: |bytes| {
        let Some(body_bytes) = bytes.len().checked_sub(HEADER_BYTES) else { return };
        bytes[12..16].copy_from_slice(&(body_bytes as u32).to_le_bytes());
        let end = bytes.len();
        seal_crc(bytes, HEADER_BYTES - 4, &[0..HEADER_BYTES - 4, HEADER_BYTES..end]);
    },
    check: check_header,
};

fn headers() -> Vec<Vec<u8>> {
    let request = Frame::request(Kind::Rename, b"body".to_vec(), Vec::new());
    let failure = Failure { kind: penstock_base::Kind::NoSpace, errno: 28, message: "full".into() };
    let frames = [
        Frame::request(Kind::Hello, Vec::new(), Vec::new()),
        Frame::reply(&request.header, Err(failure)),
        request,
    ];
    frames.map(|frame| [frame.header.encode(&frame.body), frame.body].concat()).to_vec()
}

fn check_header(bytes: &[u8]) -> Result<Verdict, String> {
    let split = |bytes: &[u8]| {
        let (header, body) = bytes.split_at(bytes.len().min(HEADER_BYTES));
        Header::decode(header, body).map(|header| (header, body.to_vec()))
    };
    let join = |(header, body): &(Header, Vec<u8>)| [header.encode(body), body.clone()].concat();
    // Reserved bytes, which the checksum covers.
    let verdict = agrees(bytes, &Form::Bytes(&[10..12, 41..44, 68..96]), split, join)?;
    if let Ok((header, body)) = split(bytes) {
        let result = Frame { header, body, payload: Vec::new() }.into_result();
        if result.is_ok() != (header.status == 0) {
            return Err(format!("a reply of status {} gives {result:?}", header.status));
        }
    }
    Ok(verdict)
}

const CHUNK: ChunkRef =
    ChunkRef { branch: 0, ino: Ino((1 << 48) | 2), chunk: 3, block: 4, count: 2, snapshot: 0, cut: 7 };

/// `read-body`.
pub(super) const READ: Decoder = Decoder {
    name: "read-body",
    most_bytes: 256,
    seeds: || vec![encode_read(&CHUNK)],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_read, encode_read),
};

/// `write-body`.
pub(super) const WRITE: Decoder = Decoder {
    name: "write-body",
    most_bytes: 2048,
    seeds: || {
        let whole = ChunkRef { block: 0, count: 256, ..CHUNK };
        vec![encode_write(&CHUNK, &[8, 9]), encode_write(&whole, &[1; 256])]
    },
    // As many checksums as blocks, and not more than there are bytes.
    seal: |bytes| {
        let most = bytes.len().saturating_sub(52) as u32 / 4;
        if let Some(field) = bytes.get(28..32) {
            let blocks = u32::from_le_bytes([field[0], field[1], field[2], field[3]]).min(most);
            let count = blocks.to_le_bytes();
            bytes[28..32].copy_from_slice(&count);
            if let Some(field) = bytes.get_mut(48..52) {
                field.copy_from_slice(&count);
            }
        }
    },
    check: |bytes| agrees(bytes, &SAME, decode_write, |(chunk, crcs)| encode_write(chunk, crcs)),
};

/// `commit-body`.
pub(super) const COMMIT: Decoder = Decoder {
    name: "commit-body",
    most_bytes: 128,
    seeds: || [true, false].map(|deferred| encode_commit(0, CHUNK.ino, deferred)).to_vec(),
    seal: unsealed,
    check: |bytes| {
        agrees(bytes, &SAME, decode_commit, |(branch, ino, deferred)| encode_commit(*branch, *ino, *deferred))
    },
};

/// `reply-body`.
pub(super) const REPLY: Decoder = Decoder {
    name: "reply-body",
    most_bytes: 2048,
    seeds: || vec![encode_reply(1, &[]), encode_reply(u64::MAX, &[3; 256])],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_reply, |(generation, crcs)| encode_reply(*generation, crcs)),
};
