//! Intel's ISA-L, the peer of the kernels, loaded at run time if it is installed.
//!
//! The functions and their types are those of ISA-L's headers `erasure_code.h`, `raid.h` and `crc.h` (2.30).
//! The library stays loaded until the process ends, so its functions may be called at any time.
//!
//! Safety invariant: every call passes pointers to as many strips as the function reads or writes. Each strip
//! has the length that is passed, and its slice is borrowed for the duration of the call.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uchar, c_uint, c_void};

type InitTables = unsafe extern "C" fn(c_int, c_int, *mut c_uchar, *mut c_uchar);
type EncodeData =
    unsafe extern "C" fn(c_int, c_int, c_int, *mut c_uchar, *mut *mut c_uchar, *mut *mut c_uchar);
type EncodeDataUpdate =
    unsafe extern "C" fn(c_int, c_int, c_int, c_int, *mut c_uchar, *mut c_uchar, *mut *mut c_uchar);
type Gen = unsafe extern "C" fn(c_int, c_int, *mut *mut c_void) -> c_int;
type Crc32Iscsi = unsafe extern "C" fn(*mut c_uchar, c_int, c_uint) -> c_uint;

/// The functions of the library.
#[derive(Clone, Copy)]
pub(crate) struct Isal {
    init_tables: InitTables,
    encode_data: EncodeData,
    encode_data_update: EncodeDataUpdate,
    xor_gen: Gen,
    pq_gen: Gen,
    crc32_iscsi: Crc32Iscsi,
}

/// Coefficients in ISA-L's form, 32 bytes for each.
pub(super) struct Tables {
    bytes: Vec<u8>,
    rows: usize,
}

/// Maximum number of strips in a call.
const MAX_STRIPS: usize = 32;

impl Isal {
    /// Loads the library; `None` if it is not installed.
    pub(crate) fn load() -> Option<Self> {
        // SAFETY: ISA-L's initialisers only detect the processor.
        let library = unsafe { libloading::Library::new("libisal.so.2") }.ok()?;
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        // SAFETY: the types are those of ISA-L's headers.
        unsafe {
            Some(Self {
                init_tables: *library.get(b"ec_init_tables\0").ok()?,
                encode_data: *library.get(b"ec_encode_data\0").ok()?,
                encode_data_update: *library.get(b"ec_encode_data_update\0").ok()?,
                xor_gen: *library.get(b"xor_gen\0").ok()?,
                pq_gen: *library.get(b"pq_gen\0").ok()?,
                crc32_iscsi: *library.get(b"crc32_iscsi\0").ok()?,
            })
        }
    }

    pub(super) fn tables(&self, k: usize, rows: usize, cell: impl Fn(usize, usize) -> u8) -> Tables {
        let mut cells: Vec<u8> = (0..rows * k).map(|at| cell(at / k, at % k)).collect();
        let mut bytes = vec![0; 32 * rows * k];
        // SAFETY: there are `rows` x `k` cells, and 32 bytes for each of them.
        unsafe { (self.init_tables)(k as c_int, rows as c_int, cells.as_mut_ptr(), bytes.as_mut_ptr()) };
        Tables { bytes, rows }
    }

    /// Sets `made[i]` to the sum of the sources times the coefficients of row i.
    pub(super) fn encode(&self, tables: &Tables, sources: &[&[u8]], made: &mut [&mut [u8]]) {
        let len = sources[0].len();
        assert!(sources.iter().all(|strip| strip.len() == len) && sources.len() <= MAX_STRIPS, "shape");
        assert!(made.iter().all(|strip| strip.len() == len) && made.len() == tables.rows, "shape");
        assert_eq!(tables.bytes.len(), 32 * tables.rows * sources.len(), "tables of this shape");
        let mut from = [std::ptr::null_mut(); MAX_STRIPS];
        let mut to = [std::ptr::null_mut(); MAX_STRIPS];
        from.iter_mut().zip(sources).for_each(|(at, strip)| *at = strip.as_ptr().cast_mut());
        to.iter_mut().zip(made.iter_mut()).for_each(|(at, strip)| *at = strip.as_mut_ptr());
        let (k, rows, tables) =
            (sources.len() as c_int, made.len() as c_int, tables.bytes.as_ptr().cast_mut());
        // SAFETY: by the invariant of this file; tables and sources are only read.
        unsafe { (self.encode_data)(len as c_int, k, rows, tables, from.as_mut_ptr(), to.as_mut_ptr()) };
    }

    /// Computes P, or P and Q, of the first k strips into the strips after them.
    pub(super) fn simple_parity(&self, k: usize, strips: &mut [&mut [u8]]) {
        let len = strips[0].len();
        let made = strips.len() - k;
        assert!(strips.iter().all(|strip| strip.len() == len) && strips.len() <= MAX_STRIPS, "shape");
        assert!(strips.iter().all(|strip| strip.as_ptr().addr().is_multiple_of(32)), "ISA-L wants 32 bytes");
        let mut all = [std::ptr::null_mut::<c_void>(); MAX_STRIPS];
        all.iter_mut().zip(strips.iter_mut()).for_each(|(at, strip)| *at = strip.as_mut_ptr().cast());
        let function = match made {
            1 => self.xor_gen,
            2 => self.pq_gen,
            made => unreachable!("{made} parity strips"),
        };
        // SAFETY: by the invariant of this file; only the strips after the first k are written.
        let result = unsafe { function((k + made) as c_int, len as c_int, all.as_mut_ptr()) };
        assert_eq!(result, 0, "ISA-L takes these strips");
    }

    /// Updates parity after data strip `column` changed from `old` to `new`.
    pub(super) fn update(
        &self,
        tables: &Tables,
        k: usize,
        column: usize,
        old: &[u8],
        new: &[u8],
        parity: &mut [&mut [u8]],
    ) {
        const BLOCK: usize = 4096;
        #[repr(align(64))]
        struct Delta([u8; BLOCK]);
        assert!(old.len() == BLOCK && new.len() == BLOCK, "one block");
        assert!(parity.iter().all(|strip| strip.len() == BLOCK) && parity.len() == tables.rows, "shape");
        let all = [old, new].into_iter().chain(parity.iter().map(|strip| &**strip));
        assert!(
            all.into_iter().all(|strip| strip.as_ptr().addr().is_multiple_of(32)),
            "ISA-L wants 32 bytes"
        );
        assert!(column < k && tables.bytes.len() == 32 * tables.rows * k, "tables of this shape");
        let mut delta = Delta([0; BLOCK]);
        let mut both: [*mut c_void; 3] =
            [old.as_ptr().cast_mut().cast(), new.as_ptr().cast_mut().cast(), delta.0.as_mut_ptr().cast()];
        let mut to = [std::ptr::null_mut(); MAX_STRIPS];
        to.iter_mut().zip(parity.iter_mut()).for_each(|(at, strip)| *at = strip.as_mut_ptr());
        let (len, rows) = (BLOCK as c_int, parity.len() as c_int);
        let (k, column, tables) = (k as c_int, column as c_int, tables.bytes.as_ptr().cast_mut());
        // SAFETY: by the invariant of this file; old and new are only read.
        unsafe {
            (self.xor_gen)(3, len, both.as_mut_ptr());
            (self.encode_data_update)(len, k, rows, column, tables, delta.0.as_mut_ptr(), to.as_mut_ptr());
        }
    }

    pub(super) fn crc32c(&self, bytes: &[u8]) -> u32 {
        // SAFETY: by the invariant of this file; the bytes are only read.
        !unsafe { (self.crc32_iscsi)(bytes.as_ptr().cast_mut(), bytes.len() as c_int, u32::MAX) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_raid::Code;
    use std::io::Write;

    #[derive(Clone, PartialEq)]
    #[repr(align(64))]
    struct Block([u8; 4096]);

    /// Both must make the same bytes, so that the benchmark compares the same work.
    #[test]
    fn isal_makes_the_same_bytes() {
        let Some(isal) = Isal::load() else {
            let note = "SKIPPED isal_makes_the_same_bytes: ISA-L (libisal.so.2) is not installed\n";
            std::io::stderr().write_all(note.as_bytes()).expect("stderr");
            return;
        };
        for (k, m) in [(4, 1), (4, 2), (8, 3), (10, 4)] {
            let code = Code::new(k, m).expect("a code");
            let byte = |strip: usize, at: usize| (strip * 31 + at * 7 + at / 256) as u8;
            let mut stripe: Vec<Block> =
                (0..k + m).map(|strip| Block(std::array::from_fn(|at| byte(strip, at)))).collect();
            let (data, parity) = stripe.split_at_mut(k);
            let data: Vec<&[u8]> = data.iter().map(|block| &block.0[..]).collect();
            let mut made: Vec<&mut [u8]> = parity.iter_mut().map(|block| &mut block.0[..]).collect();
            code.encode(&data, &mut made);
            let mut theirs = vec![Block([0; 4096]); m];
            let mut strips: Vec<&mut [u8]> = theirs.iter_mut().map(|block| &mut block.0[..]).collect();
            let tables = isal.tables(k, m, |row, column| code.coefficient(row, column));
            isal.encode(&tables, &data, &mut strips);
            assert!(theirs == parity, "{k}+{m}");
            let new = Block([0x3c; 4096]);
            let mut strips: Vec<&mut [u8]> = parity.iter_mut().map(|block| &mut block.0[..]).collect();
            code.update(1, data[1], &new.0, &mut strips);
            let mut strips: Vec<&mut [u8]> = theirs.iter_mut().map(|block| &mut block.0[..]).collect();
            isal.update(&tables, k, 1, data[1], &new.0, &mut strips);
            assert!(theirs == parity, "{k}+{m}, updated");
            assert_eq!(isal.crc32c(&new.0), penstock_base::crc32c(&new.0));
        }
    }
}
