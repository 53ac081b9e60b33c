//! Little-endian encoding of structures on drives and in messages.
//!
//! [`Dec`] reads bytes that come from a drive, the network or a user. It never panics: it returns a
//! [`DecodeError`] that names the structure and the reason.

use crate::ids::Id128;

/// The highest counter that is counted on from.
pub const MOST_WITH_ROOM: u64 = 1 << 62;

/// The reason why bytes could not be decoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes end too early.
    #[error("{what}: {wanted} more bytes wanted, {left} left")]
    Short {
        /// The structure being read.
        what: &'static str,
        /// The number of bytes that the next field needs.
        wanted: usize,
        /// The number of bytes left.
        left: usize,
    },
    /// A field has a value that this release does not know.
    #[error("{what}: {field} is {found}, which this release does not know")]
    Unknown {
        /// The structure being read.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
    },
    /// A checksum, magic number or bound is wrong.
    #[error("{what}: {why}")]
    Bad {
        /// The structure being read.
        what: &'static str,
        /// The rule that is violated.
        why: &'static str,
    },
}

/// Bytes as hexadecimal digits, for messages and names.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The key of a row: a tag, and numbers in big-endian order, by which keys of one tag sort.
pub fn row_key(tag: u8, words: &[u64]) -> Vec<u8> {
    let mut key = Vec::with_capacity(1 + 8 * words.len());
    key.push(tag);
    words.iter().for_each(|word| key.extend_from_slice(&word.to_be_bytes()));
    key
}

/// The numbers of a row's key. Fails if it has another tag or another length; `what` names the key.
pub fn row_words<const N: usize>(what: &'static str, tag: u8, key: &[u8]) -> Result<[u64; N], DecodeError> {
    let rest = key.strip_prefix(&[tag]).filter(|rest| rest.len() == 8 * N);
    let rest = rest.ok_or(DecodeError::Bad { what, why: "wrong tag or length" })?;
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(rest.chunks_exact(8)) {
        *word = u64::from_be_bytes(bytes.try_into().expect("eight bytes"));
    }
    Ok(words)
}

/// Space for most rows and headers, so that they need one allocation.
const USUAL_BYTES: usize = 160;

/// Appends little-endian fields to a byte vector.
pub struct Enc {
    bytes: Vec<u8>,
}

impl Default for Enc {
    fn default() -> Self {
        Self::new()
    }
}

impl Enc {
    /// An empty encoder.
    pub fn new() -> Self {
        Self::with_capacity(USUAL_BYTES)
    }

    /// An empty encoder with space for `len` bytes.
    pub fn with_capacity(len: usize) -> Self {
        Self { bytes: Vec::with_capacity(len) }
    }

    /// Appends one byte.
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.bytes.push(value);
        self
    }

    /// Appends 16 bits.
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends 32 bits.
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends 64 bits.
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends 64 signed bits.
    pub fn i64(&mut self, value: i64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends an identifier.
    pub fn id(&mut self, value: Id128) -> &mut Self {
        self.raw(&value.0)
    }

    /// Appends bytes as they are.
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    /// Appends a 32-bit length and the bytes.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        let len = u32::try_from(bytes.len()).expect("an encoded field is shorter than 4 GiB");
        self.u32(len).raw(bytes)
    }

    /// Appends zeros until there are `len` bytes in all. Panics if there are more already.
    pub fn pad_to(&mut self, len: usize) -> &mut Self {
        assert!(self.bytes.len() <= len, "{} bytes do not fit in {len}", self.bytes.len());
        self.bytes.resize(len, 0);
        self
    }

    /// The number of bytes so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True if nothing was appended yet.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Overwrites 32 bits at `at`, for lengths and checksums known at the end.
    pub fn set_u32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    /// The bytes so far.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the encoded bytes and empties the encoder.
    pub fn finish(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.bytes)
    }
}

/// Takes little-endian fields from the front of a byte slice.
pub struct Dec<'a> {
    what: &'static str,
    rest: &'a [u8],
}

impl<'a> Dec<'a> {
    /// Reads `bytes` as the structure named `what`.
    pub fn new(what: &'static str, bytes: &'a [u8]) -> Self {
        Self { what, rest: bytes }
    }

    /// Takes `len` bytes.
    pub fn raw(&mut self, len: usize) -> Result<&'a [u8], DecodeError> {
        let Some((head, rest)) = self.rest.split_at_checked(len) else {
            return Err(DecodeError::Short { what: self.what, wanted: len, left: self.rest.len() });
        };
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let mut value = [0; N];
        value.copy_from_slice(self.raw(N)?);
        Ok(value)
    }

    /// Takes one byte.
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        Ok(self.array::<1>()?[0])
    }

    /// Takes a byte that is 0 (false) or 1 (true); it is called `field` in the error for another one.
    pub fn boolean(&mut self, field: &'static str) -> Result<bool, DecodeError> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.unknown(field, other.into())),
        }
    }

    /// Takes 16 bits.
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        self.array().map(u16::from_le_bytes)
    }

    /// Takes 32 bits.
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.array().map(u32::from_le_bytes)
    }

    /// Takes 64 bits.
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        self.array().map(u64::from_le_bytes)
    }

    /// Takes a 64-bit counter below 2^63. No counter reaches 2^63 in the life of a drive, so additions to it
    /// never overflow.
    pub fn counter(&mut self) -> Result<u64, DecodeError> {
        match self.u64()? {
            count if count >> 63 == 0 => Ok(count),
            _ => Err(self.bad("a counter above 2^63")),
        }
    }

    /// Takes a counter that is counted on from: at most [`MOST_WITH_ROOM`], so that what is counted from it
    /// is a counter.
    pub fn counter_with_room(&mut self) -> Result<u64, DecodeError> {
        match self.counter()? {
            count if count <= MOST_WITH_ROOM => Ok(count),
            _ => Err(self.bad("a counter above 2^62")),
        }
    }

    /// Takes a 32-bit length and that many bytes of UTF-8.
    pub fn text(&mut self) -> Result<String, DecodeError> {
        let bytes = self.bytes()?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| self.bad("a name that is not UTF-8"))
    }

    /// Takes 64 signed bits.
    pub fn i64(&mut self) -> Result<i64, DecodeError> {
        self.array().map(i64::from_le_bytes)
    }

    /// Takes an identifier.
    pub fn id(&mut self) -> Result<Id128, DecodeError> {
        self.array().map(Id128)
    }

    /// Takes a 32-bit length and that many bytes.
    pub fn bytes(&mut self) -> Result<&'a [u8], DecodeError> {
        let len = self.u32()?;
        self.raw(len as usize)
    }

    /// Takes `len` bytes that this release writes as zeros. Others are of a later one, which says something
    /// with them: the error names `field`.
    pub fn zeros(&mut self, field: &'static str, len: usize) -> Result<(), DecodeError> {
        match self.raw(len)?.iter().find(|byte| **byte != 0) {
            None => Ok(()),
            Some(byte) => Err(self.unknown(field, u64::from(*byte))),
        }
    }

    /// Fails with [`DecodeError::Unknown`] if there are bytes left: a later release appended a field.
    pub fn end(&self) -> Result<(), DecodeError> {
        self.check_known("length behind the last field", self.rest.len() as u64, 0)
    }

    /// The number of bytes not yet taken.
    pub fn left(&self) -> usize {
        self.rest.len()
    }

    /// The error [`DecodeError::Bad`] with the reason `why`.
    pub fn bad(&self, why: &'static str) -> DecodeError {
        DecodeError::Bad { what: self.what, why }
    }

    /// The error [`DecodeError::Unknown`]: `field` has a value that this release does not know.
    pub fn unknown(&self, field: &'static str, found: u64) -> DecodeError {
        DecodeError::Unknown { what: self.what, field, found }
    }

    /// Fails with [`DecodeError::Unknown`] unless the format is the one that this release knows.
    pub fn check_format<N: Into<u64> + Eq>(&self, found: N, known: N) -> Result<(), DecodeError> {
        self.check_known("format", found, known)
    }

    /// Fails with [`DecodeError::Unknown`] unless `field` has the one value that this release knows.
    pub fn check_known<N: Into<u64> + Eq>(
        &self,
        field: &'static str,
        found: N,
        known: N,
    ) -> Result<(), DecodeError> {
        match found == known {
            true => Ok(()),
            false => Err(self.unknown(field, found.into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_come_back_in_order_and_short_input_is_an_error() {
        let mut enc = Enc::new();
        enc.u8(1).u16(2).u32(3).u64(4).i64(-5).id(Id128([6; 16])).bytes(b"seven").pad_to(64);
        let bytes = enc.finish();
        let mut dec = Dec::new("test", &bytes);
        assert_eq!(dec.u8(), Ok(1));
        assert_eq!(dec.u16(), Ok(2));
        assert_eq!(dec.u32(), Ok(3));
        assert_eq!(dec.u64(), Ok(4));
        assert_eq!(dec.i64(), Ok(-5));
        assert_eq!(dec.id(), Ok(Id128([6; 16])));
        assert_eq!(dec.bytes(), Ok(&b"seven"[..]));
        let left = dec.left();
        assert_eq!(dec.raw(left + 1), Err(DecodeError::Short { what: "test", wanted: left + 1, left }));
    }

    #[test]
    fn keys_sort_by_their_numbers_and_come_back() {
        let key = row_key(9, &[1, 256]);
        assert!(row_key(9, &[1, 255]) < key && key < row_key(9, &[2, 0]) && key < row_key(10, &[]));
        assert_eq!(row_words("test", 9, &key), Ok([1, 256]));
        assert!(row_words::<2>("test", 8, &key).is_err() && row_words::<1>("test", 9, &key).is_err());
        assert!(row_words::<2>("test", 9, &key[..16]).is_err() && row_words::<0>("test", 9, &[]).is_err());
    }
}
