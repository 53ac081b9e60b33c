//! Evaluates licence expressions as annex D of the SPDX specification 2.3 defines them.
//!
//! The older form with slashes that crates once used is accepted too: `MIT/Apache-2.0` is a choice.
//!
//! ```text
//! or   = and *( ("OR" / "/") and )
//! and  = with *( "AND" with )
//! with = id [ "WITH" id ] / "(" or ")"
//! ```

use std::iter::Peekable;
use std::vec::IntoIter;

use anyhow::{Result, bail, ensure};

/// Parentheses nested deeper than this are rejected, because the parser recurses.
const DEPTH_MAX: usize = 32;

/// Returns true if allowed licences alone satisfy the expression. `allowed` is called with an id, or with
/// `ID WITH EXCEPTION` as one string.
pub(super) fn allows(expression: &str, allowed: &dyn Fn(&str) -> bool) -> Result<bool> {
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<String> = spaced.split_whitespace().map(str::to_owned).collect();
    let mut parser = Parser { words: words.into_iter().peekable(), allowed, depth: 0 };
    let verdict = parser.or()?;
    if let Some(word) = parser.words.next() {
        bail!("`{word}` was not expected");
    }
    Ok(verdict)
}

struct Parser<'a> {
    words: Peekable<IntoIter<String>>,
    allowed: &'a dyn Fn(&str) -> bool,
    depth: usize,
}

impl Parser<'_> {
    fn or(&mut self) -> Result<bool> {
        let mut verdict = self.and()?;
        while self.take("OR") {
            verdict |= self.and()?;
        }
        Ok(verdict)
    }

    fn and(&mut self) -> Result<bool> {
        let mut verdict = self.with()?;
        while self.take("AND") {
            verdict &= self.with()?;
        }
        Ok(verdict)
    }

    fn with(&mut self) -> Result<bool> {
        if self.take("(") {
            self.depth += 1;
            ensure!(self.depth <= DEPTH_MAX, "too many parentheses");
            let verdict = self.or()?;
            self.depth -= 1;
            ensure!(self.take(")"), "a `)` is missing");
            return Ok(verdict);
        }
        let id = self.id()?;
        if self.take("WITH") {
            let exception = self.id()?;
            return Ok((self.allowed)(&format!("{id} WITH {exception}")));
        }
        Ok((self.allowed)(&id))
    }

    fn id(&mut self) -> Result<String> {
        match self.words.next() {
            Some(word) if !["OR", "AND", "WITH", "(", ")"].contains(&word.as_str()) => Ok(word),
            Some(word) => bail!("a licence was expected, `{word}` was found"),
            None => bail!("a licence was expected at the end"),
        }
    }

    fn take(&mut self, word: &str) -> bool {
        self.words.next_if(|next| next == word).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::allows;

    fn check(expression: &str) -> Option<bool> {
        let allowed = ["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0", "Zlib"];
        allows(expression, &|id| allowed.contains(&id)).ok()
    }

    #[test]
    fn expressions_are_evaluated() {
        let table = [
            ("MIT", true),
            ("GPL-3.0-only", false),
            ("mit", false),
            ("MIT OR GPL-3.0-only", true),
            ("GPL-3.0-only OR MIT", true),
            ("MIT AND GPL-3.0-only", false),
            ("MIT AND Zlib", true),
            ("MIT/Apache-2.0", true),
            ("GPL-2.0 / MIT", true),
            ("GPL-2.0/LGPL-2.1", false),
            ("(MIT OR Apache-2.0) AND Unicode-3.0", true),
            ("(MIT OR Apache-2.0) AND MPL-2.0", false),
            // AND binds closer than OR.
            ("MIT OR Apache-2.0 AND MPL-2.0", true),
            ("MPL-2.0 AND Apache-2.0 OR MIT", true),
            ("(MPL-2.0 OR MIT) AND MPL-2.0", false),
            ("Apache-2.0 WITH LLVM-exception OR Apache-2.0 OR MIT", true),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("GPL-2.0 WITH Classpath-exception-2.0", false),
            // An exception changes the licence: this is not plain MIT.
            ("MIT WITH LLVM-exception", false),
            ("((MIT))", true),
        ];
        for (expression, expected) in table {
            assert_eq!(check(expression), Some(expected), "{expression}");
        }
    }

    #[test]
    fn what_is_no_expression_is_refused() {
        let deep = format!("{}MIT{}", "(".repeat(40), ")".repeat(40));
        for expression in ["", "MIT OR", "OR MIT", "(MIT", "MIT)", "MIT Zlib", "MIT WITH", "()", &deep] {
            assert_eq!(check(expression), None, "{expression}");
        }
    }
}
