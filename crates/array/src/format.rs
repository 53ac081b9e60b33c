//! The structures that an array keeps on its slices, one file each. Byte maps: docs/format/.

pub mod descriptor;
pub mod record;
pub mod root;
pub mod segment;
pub mod table_page;
pub mod trailer;

use penstock_base::{Buf, BufMut, DecodeError, Enc, crc32c};

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
