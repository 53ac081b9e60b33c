//! The list of files: each source with the first sentence of its header, by crate.

use crate::workspace;
use anyhow::Result;
use std::path::Path;

/// Prints the files of every crate, or of the crates whose name or folder is given.
pub(crate) fn run(crates: &[String]) -> Result<()> {
    let mut last = String::new();
    for file in workspace::files()? {
        let Some((folder, inside)) = source_of(&file) else { continue };
        let name = folder.rsplit('/').next().unwrap_or_default();
        if !crates.is_empty() && !crates.iter().any(|wanted| wanted == name || *wanted == folder) {
            continue;
        }
        let Some(sentence) = first_sentence(&workspace::read(&file)?) else { continue };
        if folder != last {
            println!("\n{folder}");
            last = folder;
        }
        println!("  {inside:<32} {sentence}");
    }
    Ok(())
}

/// The crate's folder, and the path below its `src`; `None` for a file that is not a source.
fn source_of(file: &Path) -> Option<(String, String)> {
    let path = file.to_str()?;
    let (folder, inside) = path.strip_suffix(".rs").and(path.split_once("/src/"))?;
    Some((folder.to_owned(), inside.to_owned()))
}

/// The text of the header up to the first full stop, on one line.
fn first_sentence(source: &str) -> Option<String> {
    let header = source.lines().take_while(|line| line.starts_with("//!"));
    let words: Vec<&str> = header.map(|line| line[3..].trim()).take_while(|line| !line.is_empty()).collect();
    let text = words.join(" ");
    let end = text.find(". ").map_or(text.len(), |at| at + 1);
    let sentence = text[..end].trim();
    (!sentence.is_empty()).then(|| sentence.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_sentence_of_a_header_may_have_several_lines() {
        for (source, expected) in [
            ("//! Does a.\n//!\n//! And b.\n", Some("Does a.")),
            ("//! Does a\n//! and b. Not c.\n", Some("Does a and b.")),
            ("//! Format: docs/format/log.md\n", Some("Format: docs/format/log.md")),
            ("use a;\n", None),
        ] {
            assert_eq!(first_sentence(source).as_deref(), expected, "{source}");
        }
    }

    #[test]
    fn sources_are_found_in_every_crate() {
        let of = |path: &str| source_of(Path::new(path));
        assert_eq!(of("crates/a/src/b/c.rs"), Some(("crates/a".into(), "b/c.rs".into())));
        assert_eq!(of("xtask/src/main.rs"), Some(("xtask".into(), "main.rs".into())));
        assert_eq!(of("crates/a/tests/b.rs"), None);
        assert_eq!(of("crates/a/src/b.cu"), None);
    }
}
