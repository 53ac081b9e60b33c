//! CRC32C (Castagnoli), the only checksum on drives and on the wire.

use crate::BLOCK_BYTES;
use crate::num::to_u32;
use crc_fast::{CrcAlgorithm, Digest, checksum};

/// CRC32C of a block of zeros.
pub const ZERO_BLOCK_CRC: u32 = 0x98f9_4189;

/// CRC32C of `bytes` (RFC 3720 B.4: init and final xor all ones, reflected).
pub fn crc32c(bytes: &[u8]) -> u32 {
    to_u32(checksum(CrcAlgorithm::Crc32Iscsi, bytes))
}

/// CRC32C of the concatenation of several byte strings.
pub fn crc32c_append<'a>(runs: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut digest = Digest::new(CrcAlgorithm::Crc32Iscsi);
    runs.into_iter().for_each(|run| digest.update(run));
    to_u32(digest.finalize())
}

/// CRC32C of each 4 KiB block of `bytes`. Panics unless the length is a multiple of 4 KiB.
pub fn crc32c_blocks(bytes: &[u8]) -> Vec<u32> {
    assert!(bytes.len().is_multiple_of(BLOCK_BYTES), "a checksum covers whole blocks");
    bytes.chunks_exact(BLOCK_BYTES).map(crc32c).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 3720 B.4.
    #[test]
    fn agrees_with_the_vectors_of_rfc_3720() {
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let rising: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&rising), 0x46dd_794e);
        assert_eq!(crc32c_append([&rising[..7], &rising[7..]]), 0x46dd_794e);
    }

    #[test]
    fn the_checksum_of_a_block_of_zeros_is_right() {
        assert_eq!(crc32c_blocks(&[0; BLOCK_BYTES]), [ZERO_BLOCK_CRC]);
    }
}
