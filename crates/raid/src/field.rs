//! Scalar arithmetic in GF(2^8) modulo x^8 + x^4 + x^3 + x^2 + 1 (0x11d), the field of Linux md, ZFS and
//! ISA-L.
//!
//! Invariants: 2 generates the multiplicative group, so `EXP[i]` is 2^i and `LOG` is its inverse. Addition
//! and subtraction are both XOR. Only matrices and tables use this arithmetic; strips go through
//! `crate::kernel`.

/// The field polynomial. Bit 8 drops out when a product is reduced.
const POLYNOMIAL: u16 = 0x11d;

/// The order of the multiplicative group.
const ORDER: usize = 255;

/// `EXP[i]` is 2^i, over two periods so that a sum of two logarithms needs no reduction.
const EXP: [u8; 2 * ORDER] = exp_table();

/// `LOG[EXP[i]]` is i for i < 255. `LOG[0]` is never read.
const LOG: [u8; 256] = log_table();

const fn exp_table() -> [u8; 2 * ORDER] {
    let mut table = [0; 2 * ORDER];
    let mut power: u16 = 1;
    let mut i = 0;
    while i < 2 * ORDER {
        table[i] = power as u8;
        power <<= 1;
        if power > 0xff {
            power ^= POLYNOMIAL;
        }
        i += 1;
    }
    table
}

const fn log_table() -> [u8; 256] {
    let mut table = [0; 256];
    let mut i = 0;
    while i < ORDER {
        table[EXP[i] as usize] = i as u8;
        i += 1;
    }
    table
}

/// 2^exponent, for any exponent.
pub(crate) const fn power_of_two(exponent: usize) -> u8 {
    EXP[exponent % ORDER]
}

/// The product a * b.
pub(crate) const fn multiply(a: u8, b: u8) -> u8 {
    if a == 0 || b == 0 {
        return 0;
    }
    EXP[LOG[a as usize] as usize + LOG[b as usize] as usize]
}

/// The inverse 1 / a. Panics for zero, which has none.
pub(crate) const fn invert(a: u8) -> u8 {
    assert!(a != 0, "zero has no inverse");
    EXP[ORDER - LOG[a as usize] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Multiplies by shift and add, straight from the definition.
    fn multiply_by_definition(a: u8, b: u8) -> u8 {
        let mut product: u16 = 0;
        for bit in (0..8).rev() {
            product <<= 1;
            if product & 0x100 != 0 {
                product ^= POLYNOMIAL;
            }
            if b >> bit & 1 != 0 {
                product ^= u16::from(a);
            }
        }
        product as u8
    }

    #[test]
    fn multiply_agrees_with_the_definition_for_every_pair() {
        for a in 0..=255 {
            for b in 0..=255 {
                assert_eq!(multiply(a, b), multiply_by_definition(a, b), "{a} * {b}");
            }
        }
    }

    #[test]
    fn every_element_but_zero_has_its_inverse() {
        for a in 1..=255 {
            assert_eq!(multiply_by_definition(a, invert(a)), 1, "1 / {a}");
        }
    }

    #[test]
    fn two_generates_the_group() {
        let powers: std::collections::BTreeSet<u8> = (0..ORDER).map(power_of_two).collect();
        assert_eq!(powers.len(), ORDER);
        assert_eq!(power_of_two(8), 0x1d);
        assert_eq!(power_of_two(ORDER), 1);
    }
}
