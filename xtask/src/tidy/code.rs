//! Rust source without its comments and literals, so that a search finds code only.

/// Replaces comments and string and character literals by spaces. Newlines and all other bytes stay in place.
pub(super) fn only(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = match bytes[at] {
            b'/' if bytes.get(at + 1) == Some(&b'/') => find(bytes, at, b"\n").unwrap_or(bytes.len()),
            b'/' if bytes.get(at + 1) == Some(&b'*') => block_comment_end(bytes, at),
            b'"' => string_end(bytes, at),
            b'r' if !follows_identifier(bytes, at) => match raw_string_end(bytes, at) {
                Some(end) => end,
                None => at,
            },
            b'\'' => char_end(bytes, at).unwrap_or(at),
            _ => at,
        };
        if end == at {
            at += 1;
            continue;
        }
        for byte in &mut out[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    // Blanked ranges end on ASCII bytes, so no character was split.
    String::from_utf8_lossy(&out).into_owned()
}

fn find(bytes: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    bytes[from..].windows(what.len()).position(|window| window == what).map(|offset| from + offset)
}

fn block_comment_end(bytes: &[u8], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while at < bytes.len() {
        match &bytes[at..bytes.len().min(at + 2)] {
            b"/*" => {
                depth += 1;
                at += 2;
            }
            b"*/" => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    bytes.len()
}

fn string_end(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// The end of `r"…"` or `r#"…"#`; `None` if an identifier begins with this r.
fn raw_string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let hashes = bytes[start + 1..].iter().take_while(|byte| **byte == b'#').count();
    let open = start + 1 + hashes;
    if bytes.get(open) != Some(&b'"') {
        return None;
    }
    let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
    Some(find(bytes, open + 1, &close).map_or(bytes.len(), |at| at + close.len()))
}

/// The end of a character literal; `None` for a lifetime.
fn char_end(bytes: &[u8], start: usize) -> Option<usize> {
    if bytes.get(start + 1) == Some(&b'\\') {
        return find(bytes, start + 3, b"'").map(|at| at + 1);
    }
    // one character of one to four bytes
    (2..=5)
        .map(|offset| start + offset)
        .find(|at| bytes.get(*at) == Some(&b'\''))
        .filter(|end| {
            std::str::from_utf8(&bytes[start + 1..*end]).is_ok_and(|inside| inside.chars().count() == 1)
        })
        .map(|at| at + 1)
}

/// True if the byte before `at` continues an identifier, so that an `r` here opens no literal. The `r` of
/// `br"…"` and `cr"…"` does open one, unless an identifier continues before the `b` or `c`.
fn follows_identifier(bytes: &[u8], at: usize) -> bool {
    let identifier = |byte: &u8| byte.is_ascii_alphanumeric() || *byte == b'_';
    match at.checked_sub(1).map(|before| bytes[before]) {
        Some(b'b' | b'c') => at >= 2 && identifier(&bytes[at - 2]),
        Some(byte) => identifier(&byte),
        None => false,
    }
}

#[cfg(test)]
mod tests {
    use super::only;

    #[test]
    fn comments_and_literals_are_blanked_and_code_stays() {
        let table = [
            ("a // dbg!\nb", "a        \nb"),
            ("a /* x /* y */ z */ b", "a                   b"),
            (r#"f("dbg!(", 1)"#, "f(       , 1)"),
            (r#"f("\"", x)"#, "f(    , x)"),
            ("f(r#\"a\"b\"#, x)", "f(        , x)"),
            ("f(br\"\\\", x)", "f(b    , x)"),
            ("r#type + for_r", "r#type + for_r"),
            ("fn f<'a>(x: &'a str)", "fn f<'a>(x: &'a str)"),
            ("('\"', '\\'', '\\n', 'ä')", "(   ,     ,     ,     )"),
            ("\"open", "     "),
            ("/* open", "       "),
            ("'", "'"),
            ("x\\", "x\\"),
        ];
        for (source, expected) in table {
            let found = only(source);
            assert_eq!(found, expected, "{source}");
            assert_eq!(found.len(), source.len(), "{source}");
        }
    }
}
