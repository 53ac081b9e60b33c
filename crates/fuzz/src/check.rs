//! What a decoder is to the fuzzer, and the properties that every one must have.

use std::fmt::Debug;
use std::ops::Range;

/// What decoding an input may allocate: never more because a length field says so.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Bytes whatever the input.
    pub base: u64,
    /// Bytes for each byte of the input.
    pub per_byte: u64,
}

/// Enough for errors, and for the largest value in memory that a byte of input stands for (an entry of a log record,
/// in a vector that doubles).
pub const BOUND: Bound = Bound { base: 4096, per_byte: 128 };

/// What a decoder did with an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It gave an error.
    Refused,
    /// It gave a value, for which everything holds.
    Accepted,
}

/// One decoder under test.
pub struct Decoder {
    /// Its name on the command line.
    pub name: &'static str,
    /// Longest input.
    pub most_bytes: usize,
    /// Valid encodings to begin with; each is accepted.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Makes lengths and checksums agree with the rest again, where the input is long enough to have them.
    pub seal: fn(&mut Vec<u8>),
    /// Decodes an input and checks what must hold; the error says what does not.
    pub check: fn(&[u8]) -> Result<Verdict, String>,
}

/// A format without a checksum.
pub fn unsealed(_: &mut Vec<u8>) {}

/// How the bytes of an accepted input and those of its value agree.
pub enum Form {
    /// Only the values do.
    Value,
    /// The encoded bytes are the beginning of the input, but for these ranges: checksums that cover bytes which the
    /// value does not have, and reserved bytes.
    Bytes(&'static [Range<usize>]),
}

/// The encoded bytes are the beginning of the input.
pub const SAME: Form = Form::Bytes(&[]);

/// Decodes `bytes` within the bound, and encodes the value again.
pub fn agrees<T: PartialEq + Debug, E>(
    bytes: &[u8],
    form: &Form,
    decode: impl Fn(&[u8]) -> Result<T, E>,
    encode: impl Fn(&T) -> Vec<u8>,
) -> Result<Verdict, String> {
    let Some(value) = within(bytes, &decode)? else { return Ok(Verdict::Refused) };
    let again = encode(&value);
    match decode(&again) {
        Ok(second) if second == value => {}
        Ok(second) => return Err(format!("{value:?} encodes to bytes that decode to {second:?}")),
        Err(_) => return Err(format!("{value:?} encodes to bytes that are refused")),
    }
    if let Form::Bytes(ignored) = form {
        let ignored = |at: usize| ignored.iter().any(|range| range.contains(&at));
        let differ = |at: &usize| !ignored(*at) && bytes.get(*at) != again.get(*at);
        if let Some(at) = (0..again.len()).find(differ) {
            return Err(format!("{value:?} encodes to other bytes, first at {at}"));
        }
    }
    Ok(Verdict::Accepted)
}

/// Decodes `bytes` and checks what that allocated. None when they are refused.
pub fn within<T, E>(bytes: &[u8], decode: impl Fn(&[u8]) -> Result<T, E>) -> Result<Option<T>, String> {
    let mut decoded = None;
    let info = allocation_counter::measure(|| decoded = Some(decode(bytes)));
    let most = BOUND.base + BOUND.per_byte * bytes.len() as u64;
    if info.bytes_max > most {
        return Err(format!("decoding {} bytes allocated {}, above {most}", bytes.len(), info.bytes_max));
    }
    Ok(decoded.and_then(Result::ok))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn byte(bytes: &[u8]) -> Result<u8, ()> {
        bytes.first().copied().ok_or(())
    }

    #[test]
    fn what_does_not_hold_is_said() {
        let same = |value: &u8| vec![*value];
        assert_eq!(agrees(&[7, 8], &SAME, byte, same), Ok(Verdict::Accepted));
        assert_eq!(agrees(&[], &SAME, byte, same), Ok(Verdict::Refused));
        // A decoder that allocates what a length says.
        let greedy = |bytes: &[u8]| byte(bytes).map(|len| vec![0u8; usize::from(len) << 16]);
        assert!(within(&[255], greedy).is_err_and(|why| why.contains("allocated")));
        // Two encodings of one value, and an encoder that loses some of it.
        let loose = |bytes: &[u8]| byte(bytes).map(|byte| byte & 0x0f);
        assert_eq!(agrees(&[0x17], &Form::Value, loose, same), Ok(Verdict::Accepted));
        assert!(agrees(&[0x17], &SAME, loose, same).is_err_and(|why| why.contains("other bytes")));
        assert!(agrees(&[7], &SAME, byte, |_| vec![1]).is_err_and(|why| why.contains("decode to 1")));
        assert!(agrees(&[7], &SAME, byte, |_| Vec::new()).is_err_and(|why| why.contains("refused")));
    }
}
