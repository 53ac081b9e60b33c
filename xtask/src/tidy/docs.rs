//! Rules for Markdown: links that resolve, a line for each dependency, an index of formats, a short README.

use std::path::{Component, Path, PathBuf};

use anyhow::Result;

use super::Findings;
use crate::workspace;

/// Most lines of the README: a newcomer reads all of it.
const README_LINES_MAX: usize = 120;

/// Checks every Markdown file, and docs/dependencies.md against the root manifest.
pub(super) fn check(files: &[PathBuf], findings: &mut Findings) -> Result<()> {
    let mut format_links = Vec::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "md")) {
        let text = workspace::read(file)?;
        for (line, target) in links(&text) {
            let Some(path) = resolve(file, &target) else { continue };
            // the target must be a file or folder of the tree, not an untracked one that happens to lie there
            let known = path.as_os_str().is_empty() || files.iter().any(|known| known.starts_with(&path));
            if !known {
                findings.add(file, line, format_args!("the link `{target}` leads nowhere"));
            }
            if file == Path::new("docs/format/README.md") {
                format_links.push(path);
            }
        }
        for (line, path) in named_paths(&text) {
            if !files.iter().any(|known| known.starts_with(&path)) {
                findings.add(file, line, format_args!("`{path}` does not exist"));
            }
        }
        if file == Path::new("README.md") && text.lines().count() > README_LINES_MAX {
            findings.add(file, README_LINES_MAX + 1, format_args!("longer than {README_LINES_MAX} lines"));
        }
    }
    let index = Path::new("docs/format/README.md");
    for file in files.iter().filter(|file| is_format_page(file)) {
        if file != index && !format_links.contains(file) {
            findings.add(file, 1, format_args!("not linked from {}", index.display()));
        }
    }
    check_crate_order(findings)?;
    check_named_tests(files, findings)?;
    check_dependencies(files, findings)
}

/// Checks that the tests exist that the table of fields for later work names.
fn check_named_tests(files: &[PathBuf], findings: &mut Findings) -> Result<()> {
    let page = Path::new("docs/format/later.md");
    let mut code = String::new();
    for file in files.iter().filter(|file| file.extension().is_some_and(|extension| extension == "rs")) {
        code.push_str(&workspace::read(file)?);
    }
    for (index, line) in workspace::read(page)?.lines().enumerate() {
        for name in named_tests(line).filter(|name| !code.contains(&format!("fn {name}("))) {
            findings.add(page, index + 1, format_args!("there is no test `{name}`"));
        }
    }
    Ok(())
}

/// Code spans in the last column of a table that are names of functions.
fn named_tests(line: &str) -> impl Iterator<Item = &str> {
    let column = line.strip_suffix(" |").and_then(|row| row.rsplit_once("| ")).map_or("", |(_, last)| last);
    column.split('`').skip(1).step_by(2)
}

/// Line numbers and paths below crates/ in code spans, such as `crates/array/src/lib.rs`.
fn named_paths(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let spans = line.split('`').skip(1).step_by(2);
        let is_path = |span: &&str| span.starts_with("crates/") && !span.contains([' ', '*', '{', '<', '…']);
        found.extend(spans.filter(is_path).map(|span| (index + 1, span.trim_end_matches('/').to_owned())));
    }
    found
}

/// Checks that each crate of the code map depends only on crates before it.
fn check_crate_order(findings: &mut Findings) -> Result<()> {
    let page = Path::new("ARCHITECTURE.md");
    let mut before: Vec<String> = Vec::new();
    for (line, name) in mapped_crates(&workspace::read(page)?) {
        let manifest = workspace::read(&Path::new("crates").join(&name).join("Cargo.toml"))?;
        for needed in own_dependencies(&manifest).into_iter().filter(|needed| !before.contains(needed)) {
            findings.add(
                page,
                line,
                format_args!("`{name}` depends on `{needed}`, which does not stand before it"),
            );
        }
        before.push(name);
    }
    Ok(())
}

/// Line numbers and names of the crates in the code map, in order.
fn mapped_crates(text: &str) -> Vec<(usize, String)> {
    let name = |line: &str| Some(line.strip_prefix("**`crates/")?.split_once('`')?.0.to_owned());
    text.lines().enumerate().filter_map(|(index, line)| Some((index + 1, name(line)?))).collect()
}

/// Crates of this workspace, without the prefix, that a manifest has as dependencies.
fn own_dependencies(manifest: &str) -> Vec<String> {
    let mut inside = false;
    let mut found = Vec::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            inside = line == "[dependencies]";
        } else if inside && let Some(rest) = line.strip_prefix("penstock-") {
            found.extend(rest.split(['.', ' ', '=']).next().map(str::to_owned));
        }
    }
    found
}

fn is_format_page(file: &Path) -> bool {
    file.parent() == Some(Path::new("docs/format"))
        && file.extension().is_some_and(|extension| extension == "md")
}

fn check_dependencies(files: &[PathBuf], findings: &mut Findings) -> Result<()> {
    let page = Path::new("docs/dependencies.md");
    let manifest = Path::new("Cargo.toml");
    let text = if files.iter().any(|file| file == page) { workspace::read(page)? } else { String::new() };
    for (line, name) in dependencies(&workspace::read(manifest)?) {
        if !text.contains(&format!("`{name}`")) {
            findings.add(manifest, line, format_args!("`{name}` has no line in {}", page.display()));
        }
    }
    Ok(())
}

/// Line numbers and names in `[workspace.dependencies]` that are not paths of this workspace.
fn dependencies(manifest: &str) -> Vec<(usize, String)> {
    let mut inside = false;
    let mut found = Vec::new();
    for (index, line) in manifest.lines().enumerate() {
        let line = line.trim();
        if line.starts_with('[') {
            inside = line == "[workspace.dependencies]";
        } else if inside && !line.starts_with('#') {
            let Some((name, value)) = line.split_once('=') else { continue };
            let is_path = value.split(['{', ',']).any(|field| field.trim_start().starts_with("path"));
            if !is_path {
                found.push((index + 1, name.trim().trim_matches('"').to_owned()));
            }
        }
    }
    found
}

/// Line numbers and targets of inline links, images and link definitions, outside code.
fn links(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut fence: Option<&str> = None;
    for (index, line) in text.lines().enumerate() {
        let start = line.trim_start();
        if let Some(open) = fence {
            if start.starts_with(open) {
                fence = None;
            }
            continue;
        }
        if let Some(mark) = ["```", "~~~"].into_iter().find(|mark| start.starts_with(mark)) {
            fence = Some(mark);
            continue;
        }
        let line = without_code(line);
        for (at, _) in line.match_indices("](") {
            if let Some(target) = target(&line[at + 2..]) {
                found.push((index + 1, target));
            }
        }
        if let Some((label, rest)) = line.split_once("]: ")
            && label.starts_with('[')
            && !label.starts_with("[^")
        {
            found.extend(rest.split_whitespace().next().map(|target| (index + 1, target.to_owned())));
        }
    }
    found
}

/// The line without its `code spans`.
fn without_code(line: &str) -> String {
    let parts: Vec<&str> = line.split('`').collect();
    // an odd count of backticks leaves the last one as text
    let closed = parts.len() - usize::from(parts.len().is_multiple_of(2));
    let outside = |(index, _): &(usize, &&str)| index % 2 == 0 || *index >= closed;
    parts.iter().enumerate().filter(outside).map(|(_, part)| *part).collect()
}

/// The target of a link, before the closing parenthesis and without the title.
fn target(rest: &str) -> Option<String> {
    let mut depth = 0_usize;
    let end = rest.find(|character: char| {
        match character {
            '(' => depth += 1,
            ')' if depth == 0 => return true,
            ')' => depth -= 1,
            _ => {}
        }
        false
    })?;
    let inside = rest[..end].trim();
    let inside = match inside.strip_prefix('<').and_then(|inside| inside.split_once('>')) {
        Some((angled, _)) => angled,
        None => inside.split_whitespace().next().unwrap_or_default(),
    };
    Some(inside.to_owned())
}

/// The path that a relative link points to, from the root; `None` for an external link and for the page
/// itself.
fn resolve(file: &Path, target: &str) -> Option<PathBuf> {
    let (path, _) = target.split_once('#').unwrap_or((target, ""));
    let scheme = path.split_once(':').is_some_and(|(scheme, _)| !scheme.contains('/'));
    if scheme || path.starts_with("//") || (path.is_empty() && !target.is_empty()) {
        return None;
    }
    let mut resolved = if path.starts_with('/') {
        PathBuf::new()
    } else {
        file.parent().map(Path::to_path_buf).unwrap_or_default()
    };
    for part in Path::new(path).components() {
        match part {
            // a link above the root leaves the tree: return a name that no file has
            Component::ParentDir if !resolved.pop() => return Some(PathBuf::from("..")),
            Component::Normal(name) => resolved.push(name),
            _ => {}
        }
    }
    Some(resolved)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_outside_code() {
        let text = "[a](a.md) and ![b](<b c.png> \"title\")\n`[c](c.md)` [d](d.md#part)\n```\n[e](e.md)\n```\n\
                    [f]: f.md\n[^1]: note\n[g](g_(1).md) ` [h](h.md)\n";
        let found: Vec<(usize, String)> = links(text);
        let found: Vec<(usize, &str)> = found.iter().map(|(line, target)| (*line, target.as_str())).collect();
        let expected =
            [(1, "a.md"), (1, "b c.png"), (2, "d.md#part"), (6, "f.md"), (8, "g_(1).md"), (8, "h.md")];
        assert_eq!(found, expected);
    }

    #[test]
    fn tests_are_named_in_the_last_column() {
        let names = |line| named_tests(line).collect::<Vec<_>>();
        assert_eq!(names("| 26 | `row` | 1 | `one_test`, `another` (rows) |"), ["one_test", "another"]);
        assert!(names("text with `code`").is_empty() && names("| a | the same |").is_empty());
    }

    #[test]
    fn paths_in_code_spans_are_found() {
        let text =
            "`crates/a/src/lib.rs` and `crates/b/` but `crates/{c,d}`\n`cargo test -p x` `crates/*/src`\n";
        let expected = [(1, "crates/a/src/lib.rs".to_owned()), (1, "crates/b".to_owned())];
        assert_eq!(named_paths(text), expected);
    }

    #[test]
    fn crates_are_read_from_map_and_manifest() {
        let text = "**`crates/base`** (start in `env.rs`): x\nmore\n\n**`crates/raid`** (`code.rs`): y\n";
        assert_eq!(mapped_crates(text), [(1, "base".to_owned()), (4, "raid".to_owned())]);
        let manifest = "[package]\nname = \"penstock-raid\"\n[dependencies]\npenstock-base.workspace = true\n\
                        penstock-kv = { workspace = true }\n[dev-dependencies]\npenstock-sim.workspace = true\n";
        assert_eq!(own_dependencies(manifest), ["base", "kv"]);
    }

    #[test]
    fn relative_links_are_resolved_from_their_page() {
        let table = [
            ("docs/a.md", "b.md", Some("docs/b.md")),
            ("docs/a.md", "./format/", Some("docs/format")),
            ("docs/a.md", "../README.md#x", Some("README.md")),
            ("docs/a.md", "..", Some("")),
            ("docs/a.md", "../../out.md", Some("..")),
            ("docs/a.md", "/README.md", Some("README.md")),
            ("docs/a.md", "#here", None),
            ("docs/a.md", "https://example.org/x.md", None),
            ("docs/a.md", "mailto:a@example.org", None),
        ];
        for (file, target, expected) in table {
            let found = resolve(Path::new(file), target);
            assert_eq!(found.as_deref(), expected.map(Path::new), "{target}");
        }
    }

    #[test]
    fn dependencies_are_listed_without_paths() {
        let manifest = "[workspace]\nx = 1\n[workspace.dependencies]\na = { path = \"crates/a\" }\n\
                        # note = 1\nb = \"1\"\nc = { version = \"1\", features = [\"path\"] }\n\n[profile.dev]\nd = 2\n";
        assert_eq!(dependencies(manifest), [(6, "b".to_owned()), (7, "c".to_owned())]);
    }
}
