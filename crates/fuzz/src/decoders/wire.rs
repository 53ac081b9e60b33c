//! Decoders of message headers, bodies of the data path, and the byte streams of connections.

use super::seal_crc;
use crate::check::{Decoder, SAME, Verdict, agrees, unsealed};
use penstock_base::{Id128, Ino, Share, StoreId, TargetId};
use penstock_fabric::greeting::{
    CHALLENGE_BYTES, CODE_BYTES, Challenge, GREETING_BYTES, Greeting, NONCE_BYTES, PROOF_BYTES, Proof,
    REASON_BYTES, WELCOME_HEAD_BYTES, Welcome,
};
use penstock_fabric::{BODY_BYTES, Outbox, PAYLOAD_BYTES, Receiver};
use penstock_wire::data::{
    ChunkRef, Replier, SeekRef, SpaceChange, SpaceRef, decode_commit, decode_found, decode_read,
    decode_reply, decode_seek, decode_space, decode_write, encode_commit, encode_found, encode_read,
    encode_reply, encode_seek, encode_space, encode_write,
};
use penstock_wire::{Failure, Frame, HEADER_BYTES, Header, Kind, Version};

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
    let failure = Failure { kind: penstock_base::ErrorKind::NoSpace, errno: 28, message: "full".into() };
    let frames = [
        Frame::request(Kind::Hello, Vec::new(), Vec::new()),
        Frame::reply(&request.header, Err(failure)),
        request,
    ];
    frames.map(|frame| [frame.header.encode(Version::NEWEST, &frame.body), frame.body].concat()).to_vec()
}

fn check_header(bytes: &[u8]) -> Result<Verdict, String> {
    let split = |bytes: &[u8]| {
        let (header, body) = bytes.split_at(bytes.len().min(HEADER_BYTES));
        Header::decode(Version::NEWEST, header, body).map(|header| (header, body.to_vec()))
    };
    let join =
        |(header, body): &(Header, Vec<u8>)| [header.encode(Version::NEWEST, body), body.clone()].concat();
    let verdict = agrees(bytes, &SAME, split, join)?;
    if let Ok((header, body)) = split(bytes) {
        let result = Frame { header, body, payload: Vec::new() }.into_result();
        if result.is_ok() != (header.status == 0) {
            return Err(format!("a reply of status {} gives {result:?}", header.status));
        }
    }
    Ok(verdict)
}

const REPLIER: Replier = Replier { target: TargetId(0), generation: 1 };
const CHUNK: ChunkRef = ChunkRef { ino: Ino((1 << 40) | 2), chunk: 3, block: 4, count: 2, truncations: 7 };

/// `read-body`: the body of a read request.
pub(super) const READ: Decoder = Decoder {
    name: "read-body",
    most_bytes: 256,
    seeds: || vec![encode_read(&CHUNK)],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_read, encode_read),
};

/// `write-body`: the body of a write request.
pub(super) const WRITE: Decoder = Decoder {
    name: "write-body",
    most_bytes: 2048,
    seeds: || {
        let whole = ChunkRef { block: 0, count: 256, ..CHUNK };
        vec![encode_write(&CHUNK, &[8, 9]), encode_write(&whole, &[1; 256])]
    },
    // Sets the count of checksums to the number of blocks, at most as many as fit in the input.
    seal: |bytes| {
        let most = bytes.len().saturating_sub(76) as u32 / 4;
        if let Some(field) = bytes.get(52..56) {
            let blocks = u32::from_le_bytes([field[0], field[1], field[2], field[3]]).min(most);
            let count = blocks.to_le_bytes();
            bytes[52..56].copy_from_slice(&count);
            if let Some(field) = bytes.get_mut(72..76) {
                field.copy_from_slice(&count);
            }
        }
    },
    check: |bytes| agrees(bytes, &SAME, decode_write, |(chunk, crcs)| encode_write(chunk, crcs)),
};

/// `commit-body`: the body of a commit request.
pub(super) const COMMIT: Decoder = Decoder {
    name: "commit-body",
    most_bytes: 128,
    seeds: || [true, false].map(|deferred| encode_commit(CHUNK.ino, deferred)).to_vec(),
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_commit, |(ino, deferred)| encode_commit(*ino, *deferred)),
};

/// `reply-body`: the body of a reply of the data path.
pub(super) const REPLY: Decoder = Decoder {
    name: "reply-body",
    most_bytes: 2048,
    seeds: || {
        vec![encode_reply(REPLIER, &[]), encode_reply(Replier { generation: u64::MAX, ..REPLIER }, &[3; 256])]
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_reply, |(replier, crcs)| encode_reply(*replier, crcs)),
};

/// `greeting`: the first message of a client.
pub(super) const GREETING: Decoder = Decoder {
    name: "greeting",
    most_bytes: 128,
    seeds: || vec![Greeting::new([7; NONCE_BYTES]).encode()],
    seal: |bytes| seal_crc(bytes, GREETING_BYTES - 4, &[0..GREETING_BYTES - 4]),
    check: |bytes| agrees(bytes, &SAME, Greeting::decode, Greeting::encode),
};

/// `challenge`: the answer of a server over TCP.
pub(super) const CHALLENGE: Decoder = Decoder {
    name: "challenge",
    most_bytes: 128,
    seeds: || {
        let (nonce, code) = ([9; NONCE_BYTES], [3; CODE_BYTES]);
        vec![Challenge { version: Version::NEWEST, store: StoreId(Id128([5; 16])), nonce, code }.encode()]
    },
    seal: |bytes| seal_crc(bytes, CHALLENGE_BYTES - 4, &[0..CHALLENGE_BYTES - 4]),
    check: |bytes| agrees(bytes, &SAME, Challenge::decode, Challenge::encode),
};

/// `proof`: the answer of a client to a challenge.
pub(super) const PROOF: Decoder = Decoder {
    name: "proof",
    most_bytes: 64,
    seeds: || vec![Proof { code: [3; CODE_BYTES] }.encode()],
    seal: |bytes| seal_crc(bytes, PROOF_BYTES - 4, &[0..PROOF_BYTES - 4]),
    check: |bytes| agrees(bytes, &SAME, Proof::decode, Proof::encode),
};

/// `welcome`: the last message of a server in the exchange.
pub(super) const WELCOME: Decoder = Decoder {
    name: "welcome",
    most_bytes: WELCOME_HEAD_BYTES + REASON_BYTES + 16,
    seeds: || {
        [Ok(Version::NEWEST), Err("the token is another one".to_owned())]
            .map(|end| Welcome::new(end).encode())
            .to_vec()
    },
    seal: |bytes| {
        let Some(reason) = bytes.len().checked_sub(WELCOME_HEAD_BYTES) else { return };
        bytes[6..8].copy_from_slice(&(reason as u16).to_le_bytes());
        let end = bytes.len();
        seal_crc(bytes, 8, &[0..8, WELCOME_HEAD_BYTES..end]);
    },
    check: |bytes| agrees(bytes, &SAME, Welcome::decode, Welcome::encode),
};

/// `frames`: a stream of frames as a connection receives it, in parts. Length fields are bounded before
/// memory is allocated for them, and an accepted frame is sent again as it came.
pub(super) const FRAMES: Decoder = Decoder {
    name: "frames",
    most_bytes: 3 * penstock_base::BLOCK_BYTES,
    seeds: streams,
    seal: |bytes| {
        // The checksum of the first frame, if its lengths leave its body inside the input.
        let body = super::number(bytes, 12);
        seal_crc(
            bytes,
            HEADER_BYTES - 4,
            &[0..HEADER_BYTES - 4, HEADER_BYTES..HEADER_BYTES.saturating_add(body)],
        );
    },
    check: check_frames,
};

fn streams() -> Vec<Vec<u8>> {
    let block = penstock_base::Buf::copy_from(&[7; penstock_base::BLOCK_BYTES]);
    let body = encode_write(&ChunkRef { count: 1, ..CHUNK }, &penstock_base::crc32c_blocks(&block));
    let write = Frame::request(Kind::Write, body, vec![block.clone()]);
    let read = Frame::reply(
        &Header::request(Kind::Read),
        Ok((encode_reply(REPLIER, &penstock_base::crc32c_blocks(&block)), vec![block])),
    );
    let sync = || Frame::request(Kind::Sync, Vec::new(), Vec::new());
    [vec![write], vec![read, sync()], vec![sync(), sync()]].map(|frames| bytes_of(&frames)).to_vec()
}

fn bytes_of(frames: &[Frame]) -> Vec<u8> {
    let mut outbox = Outbox::new(Version::NEWEST);
    frames.iter().for_each(|frame| outbox.push(frame.clone(), ()));
    let mut bytes = Vec::new();
    while !outbox.is_empty() {
        let part: Vec<u8> = outbox.slices().iter().flat_map(|part| part.iter().copied()).collect();
        outbox.sent(part.len());
        bytes.extend(part);
    }
    bytes
}

/// Accepts only a stream of complete frames.
fn check_frames(bytes: &[u8]) -> Result<Verdict, String> {
    let step = 1 + bytes.first().map_or(0, |byte| usize::from(*byte));
    let (mut receiver, mut frames, mut rest) = (Receiver::new(Version::NEWEST), Vec::new(), bytes);
    while !rest.is_empty() {
        let mut count = 0;
        let (mut longest, mut at) = (0, 0);
        for space in &mut receiver.spaces() {
            longest += space.len();
            let part = space.len().min(rest.len() - at).min(step - count);
            space[..part].copy_from_slice(&rest[at..at + part]);
            (count, at) = (count + part, at + part);
        }
        if longest > BODY_BYTES + PAYLOAD_BYTES || longest == 0 {
            return Err(format!("room for {longest} bytes"));
        }
        rest = &rest[at..];
        match receiver.filled(count) {
            Ok(frame) => frames.extend(frame),
            Err(_) => return Ok(Verdict::Refused),
        }
    }
    if receiver.is_inside() || frames.is_empty() {
        return Ok(Verdict::Refused);
    }
    // Frames do not keep reserved bytes and the checksums over them, so only the lengths are compared.
    let again = bytes_of(&frames);
    match again.len() == bytes.len() {
        true => Ok(Verdict::Accepted),
        false => Err(format!("{} bytes go out as {}", bytes.len(), again.len())),
    }
}
/// `seek-body`: the body of a seek request.
pub(super) const SEEK: Decoder = Decoder {
    name: "seek-body",
    most_bytes: 128,
    seeds: || {
        let last = Share::new(4, 3, 2).expect("the last of three");
        let seek = SeekRef { ino: CHUNK.ino, hole: false, from: 0, until: 1 << 50, share: Share::ALL };
        vec![encode_seek(&seek), encode_seek(&SeekRef { hole: true, from: 7, until: 9, share: last, ..seek })]
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_seek, encode_seek),
};

/// `found-body`: the body of a reply to a seek.
pub(super) const FOUND: Decoder = Decoder {
    name: "found-body",
    most_bytes: 64,
    seeds: || vec![encode_found(0), encode_found(u64::MAX)],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_found, |block| encode_found(*block)),
};

/// `space-body`: the body of a request that changes a file's space.
pub(super) const SPACE: Decoder = Decoder {
    name: "space-body",
    most_bytes: 128,
    seeds: || {
        let last = Share::new(4, 3, 2).expect("the last of three");
        let space = |change, from, share| {
            let ino = CHUNK.ino;
            encode_space(&SpaceRef { ino, change, from, until: 1 << 50, truncations: 7, share })
        };
        vec![
            space(SpaceChange::Reserve, 0, Share::ALL),
            space(SpaceChange::Zero, 1, last),
            space(SpaceChange::Punch, 1 << 50, Share::ALL),
        ]
    },
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_space, encode_space),
};
