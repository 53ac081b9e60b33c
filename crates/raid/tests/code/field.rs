//! GF(2^8) by shift and add, straight from the definition, so that no test trusts the crate's tables.

/// The product a * b modulo 0x11d.
pub(crate) fn multiply(mut a: u8, mut b: u8) -> u8 {
    let mut product = 0;
    while b != 0 {
        if b & 1 != 0 {
            product ^= a;
        }
        let carry = a & 0x80 != 0;
        a <<= 1;
        if carry {
            a ^= 0x1d;
        }
        b >>= 1;
    }
    product
}

/// The power a^exponent.
pub(crate) fn power(a: u8, exponent: usize) -> u8 {
    (0..exponent).fold(1, |product, _| multiply(product, a))
}

/// The inverse 1 / a, as a^254.
pub(crate) fn invert(a: u8) -> u8 {
    assert_ne!(a, 0);
    power(a, 254)
}
