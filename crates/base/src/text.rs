//! Parsers for sizes and codes as people write them on the command line and in requests.

/// Parses a size with an optional suffix K, M, G or T (powers of 1024), also written as in `4GB` or `4GiB`.
/// Returns bytes, or an error message for the user.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text} is no size; write it as in 512M or 4G");
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 0,
        "K" | "KB" | "KIB" => 10,
        "M" | "MB" | "MIB" => 20,
        "G" | "GB" | "GIB" => 30,
        "T" | "TB" | "TIB" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number(digits).ok_or_else(wrong)?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Parses a code, data+redundancy strips, as in `4+2`. Returns both numbers, unchecked, or an error message
/// for the user.
pub fn parse_code(text: &str) -> Result<(usize, usize), String> {
    let wrong = || format!("{text} is no code; write data+redundancy strips, as in 4+2");
    let (k, m) = text.split_once('+').ok_or_else(wrong)?;
    Ok((number(k).ok_or_else(wrong)?, number(m).ok_or_else(wrong)?))
}

/// Parses digits only: the standard library would accept a plus sign too.
fn number<N: std::str::FromStr>(text: &str) -> Option<N> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_codes() {
        for (text, bytes) in [
            ("0", 0),
            ("5", 5),
            ("4K", 4096),
            ("512M", 512 << 20),
            ("4G", 4 << 30),
            ("1TiB", 1 << 40),
            ("7b", 7),
        ] {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for text in ["", "G", "4X", "-1", "+1", "4iB", "4KBB", "4KiBiB", "99999999999T"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
        assert_eq!(parse_code("8+3"), Ok((8, 3)));
        for text in ["8", "8+", "+3", "8++3", "8+3+1", "8+-3"] {
            assert!(parse_code(text).is_err(), "{text}");
        }
    }
}
