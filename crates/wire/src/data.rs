//! Message bodies of the data path: fixed layout, little-endian.
//!
//! Every request begins with the inode, whose branch is in the header, and with the right to ask for it: a
//! grant, which the metadata target gives to users of sessions that are not trusted, and the project to which
//! blocks are counted. The node checks grants and takes them out ([`Right`]), so the decoders of requests
//! reject them, as they do projects, of which there are none.
//!
//! Later releases may add fields at the end of a body; a reader ignores bytes behind the fields that it
//! knows.

use penstock_base::num::to_u32;
use penstock_base::{BLOCK_BYTES, Birth, Dec, DecodeError, Enc, Ino, MAX_FILE_BYTES, Share, TargetId};

/// Blocks of the longest file. A chunk has at least one block, so no chunk index is greater.
const MOST_BLOCKS: u64 = MAX_FILE_BYTES / BLOCK_BYTES as u64;

/// A range of blocks of a chunk, and the file's state as the sender knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkRef {
    /// The inode.
    pub ino: Ino,
    /// Index of the chunk in the file.
    pub chunk: u64,
    /// First block, counted from the start of the chunk.
    pub block: u32,
    /// Number of blocks.
    pub count: u32,
    /// The truncate generation of the inode, as the sender knows it.
    pub truncations: u64,
}

impl ChunkRef {
    fn put(&self, enc: &mut Enc) {
        put_file(enc, self.ino);
        enc.u64(self.chunk).u32(self.block).u32(self.count).u64(self.truncations);
    }

    fn take(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let ino = take_file(dec)?;
        Self::take_of(ino, dec)
    }

    /// Takes a reference with whatever right.
    fn take_with_right(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (ino, _) = take_file_and_right(dec)?;
        Self::take_of(ino, dec)
    }

    /// Takes what follows the file.
    fn take_of(ino: Ino, dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (chunk, block, count) = (dec.u64()?, dec.u32()?, dec.u32()?);
        let found = Self { ino, chunk, block, count, truncations: dec.u64()? };
        if found.chunk > MOST_BLOCKS {
            return Err(dec.bad("a chunk beyond the largest file"));
        }
        Ok(found)
    }
}

/// The sequence of the fileset: the birth of what is written. No snapshot has raised it.
const SEQUENCE: u64 = Birth::FIRST.0;

fn take_sequence(dec: &mut Dec<'_>) -> Result<(), DecodeError> {
    let sequence = dec.u64()?;
    dec.check_known("sequence", sequence, SEQUENCE)
}

/// Puts the file of a request, without a grant and a project.
fn put_file(enc: &mut Enc, ino: Ino) {
    enc.u64(ino.0).u64(0).raw(&[0; 16]).u32(0).u32(0);
}

/// Takes the file of a request without a right.
fn take_file(dec: &mut Dec<'_>) -> Result<Ino, DecodeError> {
    let (ino, right) = take_file_and_right(dec)?;
    dec.check_known("grant", right.grant, 0)?;
    for half in right.proof.chunks_exact(8) {
        dec.check_known("proof of a grant", u64::from_le_bytes(half.try_into().expect("8 bytes")), 0)?;
    }
    Ok(ino)
}

fn take_file_and_right(dec: &mut Dec<'_>) -> Result<(Ino, Right), DecodeError> {
    let (ino, right) = (Ino(dec.u64()?), Right::take(dec)?);
    let project = dec.u32()?;
    dec.check_known("project", project, 0)?;
    dec.zeros("padding of a file", 4)?;
    Ok((ino, right))
}

/// Length of the proof of a grant.
pub const PROOF_BYTES: usize = 16;
/// Place of the grant in a request; the proof follows it.
const RIGHT_AT: usize = 8;
const RIGHT_END: usize = RIGHT_AT + 8 + PROOF_BYTES;

/// The right to ask for the data of a file: the number of a grant, and its proof. Zeros from a session that
/// is trusted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Right {
    /// The number of the grant; 0 for none.
    pub grant: u64,
    /// Its proof.
    pub proof: [u8; PROOF_BYTES],
}

impl Right {
    /// The inode of a data request, and the right that it has.
    pub fn of_request(body: &[u8]) -> Result<(Ino, Self), DecodeError> {
        let mut dec = Dec::new("data request", body);
        Ok((Ino(dec.u64()?), Self::take(&mut dec)?))
    }

    fn take(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (grant, mut proof) = (dec.u64()?, [0; PROOF_BYTES]);
        proof.copy_from_slice(dec.raw(PROOF_BYTES)?);
        Ok(Self { grant, proof })
    }

    /// Puts the right into a data request.
    ///
    /// # Panics
    /// If the body is that of no data request.
    pub fn put(&self, body: &mut [u8]) {
        let place = &mut body[RIGHT_AT..RIGHT_END];
        place[..8].copy_from_slice(&self.grant.to_le_bytes());
        place[8..].copy_from_slice(&self.proof);
    }
}

/// Encodes the body of a read.
pub fn encode_read(chunk: &ChunkRef) -> Vec<u8> {
    let mut enc = Enc::new();
    chunk.put(&mut enc);
    enc.finish()
}

/// Decodes the body of a read.
pub fn decode_read(body: &[u8]) -> Result<ChunkRef, DecodeError> {
    ChunkRef::take(&mut Dec::new("read request", body))
}

/// Encodes the body of a write: the range and the CRC32C of each block. The blocks are the payload.
pub fn encode_write(chunk: &ChunkRef, crcs: &[u32]) -> Vec<u8> {
    let mut enc = Enc::new();
    chunk.put(&mut enc);
    enc.u64(SEQUENCE);
    put_crcs(&mut enc, crcs);
    enc.finish()
}

/// Decodes the body of a write without a right. Fails unless there is a checksum for each block.
pub fn decode_write(body: &[u8]) -> Result<(ChunkRef, Vec<u32>), DecodeError> {
    let mut dec = Dec::new("write request", body);
    let chunk = ChunkRef::take(&mut dec)?;
    Ok((chunk, take_payload(&chunk, &mut dec)?))
}

/// The checksums of the blocks that are the payload of a write, whatever its right is.
pub fn crcs_of_write(body: &[u8]) -> Result<Vec<u32>, DecodeError> {
    let mut dec = Dec::new("write request", body);
    let chunk = ChunkRef::take_with_right(&mut dec)?;
    take_payload(&chunk, &mut dec)
}

/// The number of blocks that a read asks for, whatever its right is.
pub fn blocks_of_read(body: &[u8]) -> Result<u32, DecodeError> {
    Ok(ChunkRef::take_with_right(&mut Dec::new("read request", body))?.count)
}

fn take_payload(chunk: &ChunkRef, dec: &mut Dec<'_>) -> Result<Vec<u32>, DecodeError> {
    take_sequence(dec)?;
    let crcs = take_crcs(dec)?;
    match crcs.len() == chunk.count as usize {
        true => Ok(crcs),
        false => Err(dec.bad("the number of checksums is not the number of blocks")),
    }
}

/// The target that replies, and its generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replier {
    /// The target.
    pub target: TargetId,
    /// A number that changes with every start of it.
    pub generation: u64,
}

/// Encodes the body of the reply to a read, write, commit or change of space: the target with its generation,
/// and for a read the CRC32C of each block. A reply has a list of targets, each with its generation and
/// sequence; there is one, and no snapshot raises the sequence.
pub fn encode_reply(replier: Replier, crcs: &[u32]) -> Vec<u8> {
    let mut enc = Enc::new();
    enc.u32(1).u32(replier.target.0).u64(replier.generation).u64(SEQUENCE);
    put_crcs(&mut enc, crcs);
    enc.finish()
}

/// Decodes the body of the reply to a read, write, commit or change of space.
pub fn decode_reply(body: &[u8]) -> Result<(Replier, Vec<u32>), DecodeError> {
    let mut dec = Dec::new("data reply", body);
    let (targets, target) = (dec.u32()?, TargetId(dec.u32()?));
    dec.check_known("number of targets", targets, 1)?;
    let replier = Replier { target, generation: dec.u64()? };
    take_sequence(&mut dec)?;
    Ok((replier, take_crcs(&mut dec)?))
}

/// Puts the part of a file that a request is about; nothing for all of it.
fn put_share(enc: &mut Enc, share: Share) {
    if share != Share::ALL {
        let [turn, count, place] = share.numbers();
        enc.u16(turn).u16(count).u16(place).u16(0);
    }
}

/// Takes the part of a file that a request is about. Requests without this field are about all of it.
fn take_share(dec: &mut Dec<'_>) -> Result<Share, DecodeError> {
    if dec.left() == 0 {
        return Ok(Share::ALL);
    }
    let (turn, count, place) = (dec.u16()?, dec.u16()?, dec.u16()?);
    dec.zeros("padding of a share", 2)?;
    // All of a file has no field.
    let share = Share::new(turn, count, place).filter(|share| *share != Share::ALL);
    share.ok_or(dec.bad("a share that no target has"))
}

/// Encodes the body of a commit. With `deferred`, the target commits the map rows without making them
/// durable; the sender makes its key-value store durable next, which it shares with the metadata target. The
/// list of targets, with the generations and sequences of the writes, is empty: each gets a commit of its
/// own.
pub fn encode_commit(ino: Ino, deferred: bool) -> Vec<u8> {
    let mut enc = Enc::new();
    put_file(&mut enc, ino);
    enc.u32(u32::from(deferred)).u32(0);
    enc.finish()
}

/// Decodes the body of a commit into inode and `deferred`.
pub fn decode_commit(body: &[u8]) -> Result<(Ino, bool), DecodeError> {
    let mut dec = Dec::new("commit request", body);
    let ino = take_file(&mut dec)?;
    let (flags, targets) = (dec.u32()?, dec.u32()?);
    dec.check_known("number of targets", targets, 0)?;
    match flags {
        0 | 1 => Ok((ino, flags == 1)),
        other => Err(dec.unknown("flags", other.into())),
    }
}

/// A search for data or a hole in a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeekRef {
    /// The inode.
    pub ino: Ino,
    /// True to search for a hole, false to search for data.
    pub hole: bool,
    /// First block of the search, counted from the start of the file.
    pub from: u64,
    /// End of the search (exclusive), counted from the start of the file.
    pub until: u64,
    /// The chunks that are looked at. Others are neither data nor hole.
    pub share: Share,
}

/// Encodes the body of a seek.
pub fn encode_seek(seek: &SeekRef) -> Vec<u8> {
    let mut enc = Enc::new();
    put_file(&mut enc, seek.ino);
    enc.u32(u32::from(seek.hole)).u32(0).u64(seek.from).u64(seek.until);
    put_share(&mut enc, seek.share);
    enc.finish()
}

/// Decodes the body of a seek.
pub fn decode_seek(body: &[u8]) -> Result<SeekRef, DecodeError> {
    let mut dec = Dec::new("seek request", body);
    let ino = take_file(&mut dec)?;
    let flags = dec.u32()?;
    dec.zeros("padding of a seek", 4)?;
    let (from, until) = (dec.u64()?, dec.u64()?);
    if flags > 1 {
        return Err(dec.unknown("flags", flags.into()));
    }
    if from > until || until > MOST_BLOCKS {
        return Err(dec.bad("blocks that no file has"));
    }
    Ok(SeekRef { ino, hole: flags == 1, from, until, share: take_share(&mut dec)? })
}

/// Encodes the body of the reply to a seek: the first block found, or the end of the search if none was
/// found.
pub fn encode_found(block: u64) -> Vec<u8> {
    let mut enc = Enc::new();
    enc.u64(block);
    enc.finish()
}

/// Decodes the body of the reply to a seek.
pub fn decode_found(body: &[u8]) -> Result<u64, DecodeError> {
    Dec::new("seek reply", body).u64()
}

/// A change of the allocation of a range of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpaceChange {
    /// Reserves space for blocks that have none. All blocks read as before.
    Reserve = 0,
    /// Makes all blocks reserved, so that they read as zeros.
    Zero = 1,
    /// Gives all space back, so that the blocks read as zeros.
    Punch = 2,
}

/// A change of the allocation of a range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceRef {
    /// The inode.
    pub ino: Ino,
    /// The change.
    pub change: SpaceChange,
    /// First block, counted from the start of the file.
    pub from: u64,
    /// End of the range (exclusive), counted from the start of the file.
    pub until: u64,
    /// The truncate generation of the inode, as the sender knows it.
    pub truncations: u64,
    /// The chunks that change. Others in the range stay as they are.
    pub share: Share,
}

/// Encodes the body of a change of space.
pub fn encode_space(space: &SpaceRef) -> Vec<u8> {
    let mut enc = Enc::new();
    put_file(&mut enc, space.ino);
    enc.u32(space.change as u32).u32(0).u64(space.from).u64(space.until).u64(space.truncations);
    enc.u64(SEQUENCE);
    put_share(&mut enc, space.share);
    enc.finish()
}

/// Decodes the body of a change of space.
pub fn decode_space(body: &[u8]) -> Result<SpaceRef, DecodeError> {
    let mut dec = Dec::new("space request", body);
    let ino = take_file(&mut dec)?;
    let change = dec.u32()?;
    dec.zeros("padding of a change", 4)?;
    let (from, until, truncations) = (dec.u64()?, dec.u64()?, dec.u64()?);
    take_sequence(&mut dec)?;
    let change = match change {
        0 => SpaceChange::Reserve,
        1 => SpaceChange::Zero,
        2 => SpaceChange::Punch,
        other => return Err(dec.unknown("change", other.into())),
    };
    if from > until || until > MOST_BLOCKS {
        return Err(dec.bad("blocks that no file has"));
    }
    let share = take_share(&mut dec)?;
    Ok(SpaceRef { ino, change, from, until, truncations, share })
}

fn put_crcs(enc: &mut Enc, crcs: &[u32]) {
    enc.u32(to_u32(crcs.len()));
    crcs.iter().for_each(|crc| {
        enc.u32(*crc);
    });
}

fn take_crcs(dec: &mut Dec<'_>) -> Result<Vec<u32>, DecodeError> {
    let count = dec.u32()? as usize;
    if count * 4 > dec.left() {
        return Err(dec.bad("more checksums than bytes"));
    }
    (0..count).map(|_| dec.u32()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_come_back_and_may_grow() {
        let chunk = ChunkRef { ino: Ino(2), chunk: 3, block: 4, count: 2, truncations: 7 };
        let mut body = encode_write(&chunk, &[8, 9]);
        body.extend_from_slice(b"of a later release");
        assert_eq!(decode_write(&body), Ok((chunk, vec![8, 9])));
        assert!(decode_write(&encode_write(&chunk, &[8])).is_err());
        assert_eq!(decode_commit(&encode_commit(Ino(5), true)), Ok((Ino(5), true)));
        let replier = Replier { target: TargetId(4), generation: 1 };
        assert_eq!(decode_reply(&encode_reply(replier, &[2])), Ok((replier, vec![2])));
        let share = Share::new(4, 3, 2).expect("the last of three");
        for share in [Share::ALL, share] {
            let seek = SeekRef { ino: Ino(2), hole: true, from: 3, until: 1 << 50, share };
            assert_eq!(decode_seek(&encode_seek(&seek)), Ok(seek));
        }
        assert_eq!(decode_found(&encode_found(9)), Ok(9));
        for change in [SpaceChange::Reserve, SpaceChange::Zero, SpaceChange::Punch] {
            let space = SpaceRef { ino: Ino(2), change, from: 3, until: 1 << 50, truncations: 4, share };
            assert_eq!(decode_space(&encode_space(&space)), Ok(space));
        }
        for len in 0..body.len() - 18 {
            assert!(decode_write(&body[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn a_right_is_put_into_every_request_and_taken_out() {
        let chunk = ChunkRef { ino: Ino(2), chunk: 3, block: 4, count: 1, truncations: 7 };
        let share = Share::ALL;
        let seek = SeekRef { ino: Ino(2), hole: true, from: 3, until: 4, share };
        let change = SpaceChange::Punch;
        let space = SpaceRef { ino: Ino(2), change, from: 3, until: 4, truncations: 4, share };
        let right = Right { grant: 3, proof: [9; PROOF_BYTES] };
        for good in [
            encode_read(&chunk),
            encode_write(&chunk, &[8]),
            encode_commit(Ino(2), true),
            encode_seek(&seek),
            encode_space(&space),
        ] {
            assert_eq!(Right::of_request(&good), Ok((Ino(2), Right::default())));
            let mut body = good.clone();
            right.put(&mut body);
            assert_eq!(Right::of_request(&body), Ok((Ino(2), right)));
            Right::default().put(&mut body);
            assert_eq!(body, good);
            assert!(Right::of_request(&body[..RIGHT_END - 1]).is_err());
        }
    }

    #[test]
    fn reserved_fields_are_refused_by_name() {
        let chunk = ChunkRef { ino: Ino(2), chunk: 3, block: 4, count: 0, truncations: 7 };
        let good = encode_read(&chunk);
        for (at, field) in [
            (8, "grant"),
            (16, "proof of a grant"),
            (31, "proof of a grant"),
            (32, "project"),
            (36, "padding"),
        ] {
            let mut later = good.clone();
            later[at] = 7;
            assert!(decode_read(&later).unwrap_err().to_string().contains(field), "byte {at}");
        }
        for (at, field) in [(0, "number of targets"), (16, "sequence")] {
            let mut later = encode_reply(Replier { target: TargetId(0), generation: 1 }, &[2]);
            later[at] = 7;
            assert!(decode_reply(&later).unwrap_err().to_string().contains(field), "byte {at}");
        }
        let mut commit = encode_commit(Ino(5), true);
        commit[44] = 1;
        assert!(decode_commit(&commit).unwrap_err().to_string().contains("number of targets"));
        let share = Share::ALL;
        let seek = SeekRef { ino: Ino(2), hole: false, from: 3, until: 2, share };
        assert!(decode_seek(&encode_seek(&seek)).is_err(), "it ends before it begins");
        assert!(decode_seek(&encode_seek(&SeekRef { until: (1 << 50) + 1, ..seek })).is_err());
        let change = SpaceChange::Punch;
        let space = SpaceRef { ino: Ino(2), change, from: 3, until: 4, truncations: 0, share };
        let mut body = encode_space(&space);
        body[40] = 3;
        assert!(decode_space(&body).unwrap_err().to_string().contains("change"));
        for numbers in [[0u16, 1, 0, 0], [1, 1, 0, 0], [4, 2, 2, 0], [4, 2, 1, 1]] {
            let mut body = encode_space(&space);
            numbers.iter().for_each(|number| body.extend_from_slice(&number.to_le_bytes()));
            assert!(decode_space(&body).is_err(), "{numbers:?}");
        }
    }
}
