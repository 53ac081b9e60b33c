//! The structures that an array keeps on its slices, one file each. Byte maps: docs/format/.

pub mod descriptor;
pub mod index_page;
pub mod label;
pub mod record;
pub mod root;
pub mod segment;
pub mod table_page;
pub mod trailer;

use penstock_base::{Buf, BufMut, DecodeError, Enc, crc32c};

/// Most that a counter of one drive may be ahead of what the other drives say. An array that counts ten
/// million a second takes 14 years to get there, so a number that is further ahead is damage, and its
/// structure counts only if there is no other. Counted on from, it would bring numbers that no release can
/// decode to all drives.
pub(crate) const MOST_AHEAD: u64 = 1 << 52;

/// True if no number is more than [`MOST_AHEAD`] above the other one of its pair.
pub(crate) fn are_near(pairs: impl IntoIterator<Item = (u64, u64)>) -> bool {
    pairs.into_iter().all(|(mine, other)| mine <= other.saturating_add(MOST_AHEAD))
}

/// Returns those structures of one kind, each with the drive that it is from, that are near those of all
/// other drives; all of them if there would be none.
pub(crate) fn without_far<T>(found: Vec<(usize, T)>, is_near: impl Fn(&T, &T) -> bool) -> Vec<(usize, T)> {
    let is_far = |(drive, one): &(usize, T)| {
        // Far ahead of one other is enough: a damaged one may have been copied to a new carrier.
        found.iter().any(|(other, its)| other != drive && !is_near(one, its))
    };
    let far: Vec<bool> = found.iter().map(is_far).collect();
    let all_are = far.iter().all(|is_far| *is_far);
    found.into_iter().zip(far).filter(|(_, is_far)| all_are || !is_far).map(|(one, _)| one).collect()
}

/// Closes a structure of one block: stores the CRC32C of everything from byte 8 on in bytes 4 to 7.
pub(crate) fn seal_block(enc: &mut Enc) -> Buf {
    let mut block = BufMut::padded_from(enc.as_slice());
    assert_eq!(block.len(), penstock_base::BLOCK_BYTES, "the structure is one block");
    let crc = crc32c(&block.as_ref()[8..]);
    block.as_mut()[4..8].copy_from_slice(&crc.to_le_bytes());
    block.freeze()
}

/// Checks a block that [`seal_block`] closed: its length, its magic number and its CRC.
pub(crate) fn check_block(what: &'static str, magic: &[u8; 4], bytes: &[u8]) -> Result<(), DecodeError> {
    let bad = |why| DecodeError::Bad { what, why };
    if bytes.len() != penstock_base::BLOCK_BYTES {
        return Err(bad("not one block"));
    }
    if &bytes[..4] != magic {
        return Err(bad("wrong magic number"));
    }
    if crc32c(&bytes[8..]).to_le_bytes() != bytes[4..8] {
        return Err(bad("checksum"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
