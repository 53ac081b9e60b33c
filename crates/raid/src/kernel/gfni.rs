//! Coefficients as bit matrices, the operand of the GFNI affine instruction.
//!
//! The byte multiplication instruction of GFNI is fixed to another field (0x11b). The affine instruction
//! multiplies by any matrix over GF(2), so by a constant of any field of 256 elements.

use crate::field::multiply;

/// `AFFINE[a]` is the bit matrix of "times a".
pub(super) static AFFINE: [u64; 256] = affine_table();

/// Bit i of a product is the parity of the AND of the operand and byte 7 - i of the matrix. Bit j of that
/// byte is therefore bit i of a * 2^j.
const fn affine_table() -> [u64; 256] {
    let mut table = [0; 256];
    let mut a = 0;
    while a < 256 {
        let mut j = 0;
        while j < 8 {
            let product = multiply(a as u8, 1 << j) as u64;
            let mut i = 0;
            while i < 8 {
                table[a] |= (product >> i & 1) << (8 * (7 - i) + j);
                i += 1;
            }
            j += 1;
        }
        a += 1;
    }
    table
}
