//! Rules for Rust sources and crates: size, module header, unfinished code, `unsafe`, shared lints.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::{Findings, code};
use crate::workspace;

/// Most lines of a source. A longer file has more than one purpose.
const LINES_MAX: usize = 1000;

/// Crates with a module of kernels, io_uring or FFI. They deny `unsafe` and allow it in that module, with a
/// SAFETY note on each block. Every other crate forbids it.
const UNSAFE_CRATES: [&str; 6] = ["bench", "cli", "drive", "fuse", "gpu", "raid"];

/// Macros that mark work as unfinished.
const UNFINISHED: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];

/// Checks every source in crates/*/src, bench/*/src and xtask/src, and the manifest of every crate.
pub(super) fn check(files: &[PathBuf], findings: &mut Findings) -> Result<()> {
    for file in files {
        let Some((name, inside)) = place(file) else { continue };
        if inside == Path::new("Cargo.toml") {
            check_manifest(file, &workspace::read(file)?, findings);
        } else if inside.starts_with("src") && file.extension().is_some_and(|extension| extension == "rs") {
            let source = workspace::read(file)?;
            check_source(file, &source, findings);
            if is_crate_root(&inside) {
                check_crate_root(file, &name, &source, findings);
            }
        }
    }
    Ok(())
}

/// The crate's folder name, and the path inside the crate.
pub(super) fn place(file: &Path) -> Option<(String, PathBuf)> {
    let inside = match file.strip_prefix("crates").or_else(|_| file.strip_prefix("bench")) {
        Ok(inside) => inside,
        Err(_) if file.starts_with("xtask") => file,
        Err(_) => return None,
    };
    let mut parts = inside.components();
    let name = parts.next()?.as_os_str().to_string_lossy().into_owned();
    Some((name, parts.as_path().to_path_buf()))
}

fn is_crate_root(inside: &Path) -> bool {
    inside == Path::new("src/lib.rs")
        || inside == Path::new("src/main.rs")
        || inside.parent() == Some(Path::new("src/bin"))
}

/// True for `foo/tests.rs` and files in a folder `tests`. They need no header: the module under test has it.
pub(super) fn is_test(file: &Path) -> bool {
    file.file_name().is_some_and(|name| name == "tests.rs")
        || file.components().any(|part| part.as_os_str() == "tests")
}

fn check_source(file: &Path, source: &str, findings: &mut Findings) {
    let lines = source.lines().count();
    if lines > LINES_MAX {
        findings.add(file, LINES_MAX + 1, format_args!("{lines} lines; split it below {LINES_MAX}"));
    }
    if !is_test(file) && !source.lines().find(|line| !line.trim().is_empty()).is_some_and(is_header) {
        findings.add(file, 1, "no module header: open with `//!` and the purpose in one sentence");
    }
    for (index, line) in code::only(source).lines().enumerate() {
        for word in UNFINISHED {
            if calls(line, word) {
                findings.add(file, index + 1, format_args!("`{word}` is unfinished work"));
            }
        }
    }
}

fn is_header(line: &str) -> bool {
    line.strip_prefix("//!").is_some_and(|text| !text.trim().is_empty())
}

/// True if the line calls the macro `word`, not one whose name only ends with it.
fn calls(line: &str, word: &str) -> bool {
    line.match_indices(word)
        .any(|(at, _)| !line[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_'))
}

fn check_crate_root(file: &Path, name: &str, source: &str, findings: &mut Findings) {
    let wanted =
        if UNSAFE_CRATES.contains(&name) { "#![deny(unsafe_code)]" } else { "#![forbid(unsafe_code)]" };
    // `forbid` is stronger than `deny`, and a crate on the list may use it
    let forbidden = "#![forbid(unsafe_code)]";
    if !code::only(source).lines().any(|line| line.trim() == wanted || line.trim() == forbidden) {
        findings.add(file, 1, format_args!("`{wanted}` is missing at the crate's root"));
    }
}

fn check_manifest(file: &Path, manifest: &str, findings: &mut Findings) {
    let mut lines = manifest.lines().map(str::trim).skip_while(|line| *line != "[lints]").skip(1);
    if !lines.by_ref().take_while(|line| !line.starts_with('[')).any(|line| line == "workspace = true") {
        findings.add(file, 1, "the workspace's lints are not taken: add `[lints]` with `workspace = true`");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(check: impl FnOnce(&mut Findings)) -> Vec<String> {
        let mut findings = Findings::default();
        check(&mut findings);
        findings.0
    }

    fn source(file: &str, text: &str) -> Vec<String> {
        findings(|findings| check_source(Path::new(file), text, findings))
    }

    #[test]
    fn a_source_is_short_has_a_header_and_is_finished() {
        assert_eq!(source("crates/a/src/b.rs", "//! Does b.\nfn b() {}\n"), [""; 0]);
        assert_eq!(source("crates/a/src/b.rs", "\n//! Does b.\n"), [""; 0]);
        assert_eq!(source("crates/a/src/b.rs", "fn b() {}\n").len(), 1);
        assert_eq!(source("crates/a/src/b.rs", "//!\nfn b() {}\n").len(), 1);
        assert_eq!(source("crates/a/src/b/tests.rs", "fn b() {}\n"), [""; 0]);
        assert_eq!(source("crates/a/src/tests/b.rs", "fn b() {}\n"), [""; 0]);

        let long = format!("//! Does b.\n{}", "\n".repeat(1000));
        let found = source("crates/a/src/b.rs", &long);
        assert_eq!(found, ["crates/a/src/b.rs:1001: 1001 lines; split it below 1000"]);

        let unfinished = "//! Does b.\n// todo!()\nfn b() {\n    todo!(\"x\")\n}\nmy_dbg!(1);\n";
        let found = source("crates/a/src/b.rs", unfinished);
        assert_eq!(found, ["crates/a/src/b.rs:4: `todo!` is unfinished work"]);
    }

    #[test]
    fn unsafe_is_forbidden_or_on_the_list_denied() {
        let root = |name: &str, text: &str| {
            findings(|findings| check_crate_root(Path::new("src/lib.rs"), name, text, findings))
        };
        assert_eq!(root("base", "#![forbid(unsafe_code)]"), [""; 0]);
        assert_eq!(root("base", "#![deny(unsafe_code)]").len(), 1);
        assert_eq!(root("base", "// #![forbid(unsafe_code)]").len(), 1);
        assert_eq!(root("raid", "#![deny(unsafe_code)]"), [""; 0]);
        assert_eq!(root("raid", "#![forbid(unsafe_code)]"), [""; 0]);
        assert_eq!(root("raid", "").len(), 1);
    }

    #[test]
    fn a_file_is_placed_in_its_crate() {
        let of =
            |file: &str| place(Path::new(file)).map(|(name, inside)| (name, inside.display().to_string()));
        assert_eq!(of("crates/raid/src/lib.rs"), Some(("raid".into(), "src/lib.rs".into())));
        assert_eq!(of("xtask/src/main.rs"), Some(("xtask".into(), "src/main.rs".into())));
        assert_eq!(of("bench/peers/src/main.rs"), Some(("peers".into(), "src/main.rs".into())));
        assert_eq!(of("docs/a.rs"), None);
        assert!(is_crate_root(Path::new("src/bin/tool.rs")));
        assert!(!is_crate_root(Path::new("src/a/main.rs")));
    }

    #[test]
    fn a_manifest_takes_the_shared_lints() {
        let of =
            |text: &str| findings(|findings| check_manifest(Path::new("Cargo.toml"), text, findings)).len();
        assert_eq!(of("[package]\n[lints]\nworkspace = true\n"), 0);
        assert_eq!(of("[package]\nworkspace = true\n"), 1);
        assert_eq!(of("[lints]\n[package]\nworkspace = true\n"), 1);
    }
}
