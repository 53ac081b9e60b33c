//! The entry points of a tier, made for all SIMD tiers by one macro.
//!
//! They lead from a group of outputs to the loop for its number of rows, its shape and its kind of stores,
//! which becomes one function compiled with the tier's features.

use super::SourceCrcs;
use super::group::Group;

/// `Kernel::dot` of a group with the checksums of its sources and outputs.
pub(super) type DotChecked = fn(&mut Group<'_, '_>, &mut SourceCrcs<'_>, &mut [u32]);

/// `Kernel::multiply_add` with coefficients, old, new and outputs, over the first bytes of the strips: the
/// last argument, a whole number of vectors.
pub(super) type MultiplyAdd = fn(&[u8], &[u8], &[u8], &mut [&mut [u8]], usize);

/// The functions of a tier.
pub(super) struct Tier {
    /// True if the processor and the operating system support the tier. The other functions may run only
    /// then.
    pub(super) is_available: fn() -> bool,
    /// Size of a vector in bytes. A pass handles multiples of it; the portable tier handles the tail.
    pub(super) vector_bytes: usize,
    /// Makes the range of a group, a whole number of vectors.
    pub(super) dot: fn(&mut Group<'_, '_>),
    /// The same in one pass with checksums; `None` if the tier cannot do that.
    pub(super) dot_checked: Option<DotChecked>,
    /// Adds the change of one strip to other strips.
    pub(super) multiply_add: MultiplyAdd,
    /// See `Kernel::read`; the flag is true for cold bytes.
    pub(super) read: fn(&[u8], bool) -> u8,
    /// See `Kernel::fill`; the flag is true for cold bytes.
    pub(super) fill: fn(&mut [u8], bool),
}

/// Makes the `TIER` of a SIMD tier in the module that defines its `is_available`; with `dot_checked` if
/// `checked` is true.
///
/// `columns` are the numbers of vectors in a column for one to four outputs, as many as fit the registers.
#[cfg_attr(not(any(target_arch = "x86_64", target_arch = "aarch64")), allow(unused_macros))]
macro_rules! tier {
    (
        vector: $vector:ty,
        features: $features:literal,
        columns: $one:literal, $two:literal, $three:literal, $four:literal,
        checked: $checked:tt,
    ) => {
        const VECTOR_BYTES: usize = <$vector as Vector>::BYTES;

        pub(in crate::kernel) const TIER: Tier = Tier {
            is_available,
            vector_bytes: VECTOR_BYTES,
            dot,
            dot_checked: DOT_CHECKED,
            multiply_add,
            read,
            fill,
        };

        fn dot(group: &mut Group<'_, '_>) {
            match group.outputs.len() {
                1 => dot_rows::<1, $one>(group),
                2 => dot_rows::<2, $two>(group),
                3 => dot_rows::<3, $three>(group),
                4 => dot_rows::<4, $four>(group),
                rows => unreachable!("a group of {rows} outputs"),
            }
        }

        fn dot_rows<const ROWS: usize, const VECTORS: usize>(group: &mut Group<'_, '_>) {
            use crate::matrix::Shape;
            use columns::{GENERAL, ONES, POWERS, XOR_FIRST};
            assert!(is_available(), "a code never holds a kernel that the processor lacks");
            let shape = group.shape();
            let dot = columns::Dot::<$vector, ROWS>::new(group);
            // SAFETY: the processor has the features; the group borrows its outputs exclusively, and streams
            // only to aligned ones.
            unsafe {
                match (shape, group.cold && dot.can_stream()) {
                    (Shape::Powers, false) => strips::<ROWS, VECTORS, POWERS, false>(&dot),
                    (Shape::Powers, true) => strips::<ROWS, VECTORS, POWERS, true>(&dot),
                    (Shape::OnesRow(_), false) => strips::<ROWS, VECTORS, XOR_FIRST, false>(&dot),
                    (Shape::OnesRow(_), true) => strips::<ROWS, VECTORS, XOR_FIRST, true>(&dot),
                    (Shape::Ones, false) => strips::<ROWS, VECTORS, ONES, false>(&dot),
                    (Shape::Ones, true) => strips::<ROWS, VECTORS, ONES, true>(&dot),
                    (Shape::General, false) => strips::<ROWS, VECTORS, GENERAL, false>(&dot),
                    (Shape::General, true) => strips::<ROWS, VECTORS, GENERAL, true>(&dot),
                }
            }
        }

        /// # Safety
        ///
        /// As for `columns::dot`.
        #[target_feature(enable = $features)]
        unsafe fn strips<const ROWS: usize, const VECTORS: usize, const SHAPE: u8, const COLD: bool>(
            dot: &columns::Dot<$vector, ROWS>,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { columns::dot::<$vector, ROWS, VECTORS, SHAPE, COLD>(dot) }
        }

        fn multiply_add(
            coefficients: &[u8],
            old: &[u8],
            new: &[u8],
            outputs: &mut [&mut [u8]],
            bytes: usize,
        ) {
            match outputs.len() {
                1 => multiply_add_rows::<1>(coefficients, old, new, outputs, bytes),
                2 => multiply_add_rows::<2>(coefficients, old, new, outputs, bytes),
                3 => multiply_add_rows::<3>(coefficients, old, new, outputs, bytes),
                4 => multiply_add_rows::<4>(coefficients, old, new, outputs, bytes),
                rows => unreachable!("a group of {rows} outputs"),
            }
        }

        fn multiply_add_rows<const ROWS: usize>(
            coefficients: &[u8],
            old: &[u8],
            new: &[u8],
            outputs: &mut [&mut [u8]],
            bytes: usize,
        ) {
            assert!(is_available(), "a code never holds a kernel that the processor lacks");
            assert!(coefficients.len() == ROWS && outputs.len() == ROWS, "one coefficient for each output");
            assert!(bytes.is_multiple_of(VECTOR_BYTES), "whole vectors");
            assert!(old.len() >= bytes && new.len() >= bytes, "a source is too short");
            assert!(outputs.iter().all(|strip| strip.len() >= bytes), "an output is too short");
            let products: [_; ROWS] = std::array::from_fn(|row| <$vector>::product(coefficients[row]));
            let outputs: [*mut u8; ROWS] = std::array::from_fn(|row| outputs[row].as_mut_ptr());
            // SAFETY: the processor has the features and all strips have `bytes` bytes, both asserted above;
            // the outputs are borrowed exclusively until this function returns.
            unsafe { multiply_add_strips(&products, old.as_ptr(), new.as_ptr(), &outputs, bytes) };
        }

        /// # Safety
        ///
        /// As for `columns::multiply_add`.
        #[target_feature(enable = $features)]
        unsafe fn multiply_add_strips<const ROWS: usize>(
            products: &[<$vector as Vector>::Product; ROWS],
            old: *const u8,
            new: *const u8,
            outputs: &[*mut u8; ROWS],
            bytes: usize,
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe { columns::multiply_add::<$vector, ROWS, 4>(products, old, new, outputs, bytes) }
        }

        fn read(bytes: &[u8], cold: bool) -> u8 {
            assert!(is_available(), "the processor has the kernel");
            // SAFETY: the processor has the features, and the bytes are borrowed.
            unsafe { read_bytes(bytes, cold) }
        }

        /// # Safety
        ///
        /// The processor has the features.
        #[target_feature(enable = $features)]
        unsafe fn read_bytes(bytes: &[u8], cold: bool) -> u8 {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match cold {
                    true => columns::read::<$vector, true>(bytes.as_ptr(), bytes.len()),
                    false => columns::read::<$vector, false>(bytes.as_ptr(), bytes.len()),
                }
            }
        }

        fn fill(bytes: &mut [u8], cold: bool) {
            assert!(is_available(), "the processor has the kernel");
            // SAFETY: the processor has the features, the bytes are borrowed exclusively, and only aligned
            // ones are streamed to.
            unsafe { fill_bytes(bytes, cold && bytes.as_ptr().addr().is_multiple_of(VECTOR_BYTES)) }
        }

        /// # Safety
        ///
        /// The processor has the features; if `cold`, the bytes are aligned for streaming stores.
        #[target_feature(enable = $features)]
        unsafe fn fill_bytes(bytes: &mut [u8], cold: bool) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                match cold {
                    true => columns::fill::<$vector, true>(bytes.as_mut_ptr(), bytes.len()),
                    false => columns::fill::<$vector, false>(bytes.as_mut_ptr(), bytes.len()),
                }
            }
        }

        tier! { @checked $checked, $vector, $features }
    };

    (@checked false, $vector:ty, $features:literal) => {
        const DOT_CHECKED: Option<crate::kernel::tier::DotChecked> = None;
    };

    (@checked true, $vector:ty, $features:literal) => {
        const DOT_CHECKED: Option<crate::kernel::tier::DotChecked> = Some(dot_checked);

        fn dot_checked(group: &mut Group<'_, '_>, source_crcs: &mut SourceCrcs<'_>, output_crcs: &mut [u32]) {
            match group.outputs.len() {
                1 => checked_rows::<1>(group, source_crcs, output_crcs),
                2 => checked_rows::<2>(group, source_crcs, output_crcs),
                3 => checked_rows::<3>(group, source_crcs, output_crcs),
                4 => checked_rows::<4>(group, source_crcs, output_crcs),
                rows => unreachable!("a group of {rows} outputs"),
            }
        }

        fn checked_rows<const ROWS: usize>(
            group: &mut Group<'_, '_>,
            source_crcs: &mut SourceCrcs<'_>,
            output_crcs: &mut [u32],
        ) {
            use crate::matrix::Shape;
            use columns::{GENERAL, POWERS, XOR_FIRST};
            assert!(is_available(), "a code never holds a kernel that the processor lacks");
            let shape = group.shape();
            let dot = columns::Dot::<$vector, ROWS>::new(group);
            let cold = group.cold && dot.can_stream();
            // SAFETY: the processor has the features; the group borrows its outputs exclusively, and streams
            // only to aligned ones.
            unsafe {
                match shape {
                    Shape::Powers => checked::<ROWS, POWERS>(&dot, cold, source_crcs, output_crcs),
                    Shape::OnesRow(_) => checked::<ROWS, XOR_FIRST>(&dot, cold, source_crcs, output_crcs),
                    Shape::General | Shape::Ones => {
                        checked::<ROWS, GENERAL>(&dot, cold, source_crcs, output_crcs)
                    }
                }
            }
        }

        /// # Safety
        ///
        /// As for `folding::dot_checked`; if `cold`, the outputs are aligned for streaming stores.
        unsafe fn checked<const ROWS: usize, const SHAPE: u8>(
            dot: &columns::Dot<$vector, ROWS>,
            cold: bool,
            source_crcs: &mut SourceCrcs<'_>,
            output_crcs: &mut [u32],
        ) {
            let wanted = matches!(source_crcs, SourceCrcs::Wanted(_));
            // SAFETY: guaranteed by the caller.
            unsafe {
                match (cold, wanted) {
                    (false, false) => {
                        checked_strips::<ROWS, SHAPE, false, false>(dot, source_crcs, output_crcs)
                    }
                    (false, true) => {
                        checked_strips::<ROWS, SHAPE, false, true>(dot, source_crcs, output_crcs)
                    }
                    (true, false) => {
                        checked_strips::<ROWS, SHAPE, true, false>(dot, source_crcs, output_crcs)
                    }
                    (true, true) => checked_strips::<ROWS, SHAPE, true, true>(dot, source_crcs, output_crcs),
                }
            }
        }

        /// # Safety
        ///
        /// As for `folding::dot_checked`.
        #[target_feature(enable = $features)]
        unsafe fn checked_strips<const ROWS: usize, const SHAPE: u8, const COLD: bool, const WANTED: bool>(
            dot: &columns::Dot<$vector, ROWS>,
            source_crcs: &mut SourceCrcs<'_>,
            output_crcs: &mut [u32],
        ) {
            // SAFETY: guaranteed by the caller.
            unsafe {
                folding::dot_checked::<$vector, ROWS, SHAPE, COLD, WANTED>(dot, source_crcs, output_crcs);
            }
        }
    };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use tier;
