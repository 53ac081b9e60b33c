//! Inputs as text, for reports and for the table of regressions: hexadecimal digits, and `*N` for N zeros.

/// Shortest run of zeros that is written as a count.
const RUN: usize = 16;

/// The text of `bytes`.
pub fn encode(bytes: &[u8]) -> String {
    let mut text = String::new();
    let mut rest = bytes;
    while let Some(byte) = rest.first() {
        let zeros = rest.iter().take_while(|byte| **byte == 0).count();
        if zeros >= RUN {
            text.push_str(&format!("*{zeros} "));
            rest = &rest[zeros..];
        } else {
            text.push_str(&format!("{byte:02x}"));
            rest = &rest[1..];
            if rest.iter().take_while(|byte| **byte == 0).count() >= RUN {
                text.push(' ');
            }
        }
    }
    text.trim_end().to_owned()
}

/// The bytes of a text; `None` if it is not of this form.
pub fn decode(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    for word in text.split_whitespace() {
        if let Some(zeros) = word.strip_prefix('*') {
            bytes.resize(bytes.len() + zeros.parse::<usize>().ok()?, 0);
            continue;
        }
        let digits: Option<Vec<u8>> =
            word.chars().map(|digit| digit.to_digit(16).map(|digit| digit as u8)).collect();
        let digits = digits.filter(|digits| digits.len().is_multiple_of(2))?;
        bytes.extend(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]));
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back_from_their_text() {
        let mut bytes = b"\x01\x00\xff".to_vec();
        bytes.extend([0; 4000]);
        bytes.extend([7, 0, 0]);
        assert_eq!(encode(&bytes), "0100ff *4000 070000");
        assert_eq!(decode(&encode(&bytes)), Some(bytes));
        assert_eq!(decode(""), Some(Vec::new()));
        for wrong in ["0", "0g", "*x", "+1"] {
            assert_eq!(decode(wrong), None, "{wrong}");
        }
    }
}
