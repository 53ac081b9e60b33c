//! Conversions between integer types, in place of casts that may cut a number off.

// Numbers of blocks and bytes are 64 bits, and index memory.
const _: () = assert!(usize::BITS == u64::BITS, "Penstock runs on 64-bit machines");

/// A number as an index or a length in memory.
#[allow(clippy::cast_possible_truncation)]
#[must_use]
pub const fn to_usize(number: u64) -> usize {
    number as usize
}

macro_rules! narrow {
    ($($name:ident $type:ident)*) => {
        $(
            #[doc = concat!("A number as `", stringify!($type), "`, which its bounds make sure that it is.")]
            ///
            /// # Panics
            /// If it does not fit.
            #[must_use]
            #[track_caller]
            pub fn $name<N: TryInto<$type> + Copy + std::fmt::Display>(number: N) -> $type {
                number.try_into().unwrap_or_else(|_| panic!("{number} is no {}", stringify!($type)))
            }
        )*
    };
}

narrow! {
    to_u8 u8
    to_u16 u16
    to_u32 u32
    to_i32 i32
    to_i64 i64
}

/// A number behind all that a counter can have given by a moment, in seconds since 1970, if it gives fewer
/// than 2^32 a second: one that is lost goes on there. Below 2^60.
#[must_use]
pub const fn number_by_time(now_s: u32) -> u64 {
    const IN_2020: u32 = 1_577_836_800;
    let seconds = now_s.saturating_sub(IN_2020) as u64;
    if seconds < 1 << 28 { seconds << 32 } else { 1 << 60 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_fit_are_the_same() {
        assert_eq!(to_usize(u64::MAX), usize::MAX);
        assert_eq!((to_u8(255_u64), to_u16(65_535), to_u32(u64::from(u32::MAX))), (255, 65_535, u32::MAX));
        assert_eq!((to_u32(7_usize), to_i64(9_u128)), (7, 9));
    }

    #[test]
    #[should_panic(expected = "4294967296 is no u32")]
    fn a_number_that_does_not_fit_stops_the_process() {
        let _ = to_u32(1_u64 << 32);
    }
}
