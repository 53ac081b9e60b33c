//! A decoder as the fuzzer sees it, and the properties that every decoder must have.

use std::fmt::Debug;
use std::ops::Range;

/// The memory that decoding may allocate. A length field alone never justifies more.
#[derive(Clone, Copy, Debug)]
pub struct Bound {
    /// Bytes for any input.
    pub base: u64,
    /// Bytes for each byte of the input.
    pub per_byte: u64,
}

/// The bound of all decoders. It suffices for errors, and for the largest value in memory that one byte of
/// input stands for: an entry of a log record, in a vector that doubles.
pub const BOUND: Bound = Bound { base: 4096, per_byte: 128 };

/// The result of decoding an input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The decoder returned an error.
    Refused,
    /// The decoder returned a value, and all properties hold for it.
    Accepted,
}

/// One decoder under test.
pub struct Decoder {
    /// Its name on the command line.
    pub name: &'static str,
    /// The longest input, in bytes.
    pub most_bytes: usize,
    /// Valid encodings to begin with. Each is accepted.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Recomputes lengths and checksums, if the input is long enough to have them.
    pub seal: fn(&mut Vec<u8>),
    /// Decodes an input and checks the properties. The error names the violated one.
    pub check: fn(&[u8]) -> Result<Verdict, String>,
}

/// The `seal` of a format without a checksum: changes nothing.
pub fn unsealed(_: &mut Vec<u8>) {}

/// The way in which an accepted input must agree with the encoding of its value.
pub enum Form {
    /// Only the values must agree.
    Value,
    /// The encoded bytes are the beginning of the input, except for these ranges: checksums that cover bytes
    /// which the value does not contain, and reserved bytes.
    Bytes(&'static [Range<usize>]),
}

/// The encoded bytes are the beginning of the input, without exception.
pub const SAME: Form = Form::Bytes(&[]);

/// Decodes `bytes` within the bound, encodes the value, and checks that both agree as `form` says.
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

/// Decodes `bytes` and checks the memory that this allocated. Returns `None` if they are refused.
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
        // A decoder that allocates as much as a length field asks for.
        let greedy = |bytes: &[u8]| byte(bytes).map(|len| vec![0u8; usize::from(len) << 16]);
        assert!(within(&[255], greedy).is_err_and(|why| why.contains("allocated")));
        // Two encodings of one value, and an encoder that loses a part of it.
        let loose = |bytes: &[u8]| byte(bytes).map(|byte| byte & 0x0f);
        assert_eq!(agrees(&[0x17], &Form::Value, loose, same), Ok(Verdict::Accepted));
        assert!(agrees(&[0x17], &SAME, loose, same).is_err_and(|why| why.contains("other bytes")));
        assert!(agrees(&[7], &SAME, byte, |_| vec![1]).is_err_and(|why| why.contains("decode to 1")));
        assert!(agrees(&[7], &SAME, byte, |_| Vec::new()).is_err_and(|why| why.contains("refused")));
    }
}
