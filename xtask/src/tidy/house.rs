//! Measures of the house: the distance of each crate from its aims, held as a ratchet in `xtask/house.txt`.
//!
//! A measure may get better and never worse; `cargo xtask tidy --record` writes the better values. The
//! measures:
//! - `files`: the most files that hold an `impl` of one struct (aim: 4);
//! - `circles`: modules that import each other, directly or through others, among the children of one module
//!   (aim: 0). A module counts with everything below it;
//! - `asserts`: assertions per 1,000 lines outside tests (aim in the engine crates: 8);
//! - `tests`: lines of tests per line outside tests (aim in the engine crates: 0.3);
//! - `words`: comment lines that begin with What, Whether, How, Who or Where, per 1,000 (aim: 3);
//! - `long`: comment lines over 110 characters (aim: 0).
//!
//! For the documents, only `words` and `long` are counted.

use super::code;
use crate::workspace;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::{Path, PathBuf};

/// The file that holds the ratchet.
const RATCHET: &str = "xtask/house.txt";
/// Most characters of a comment line or a line of text.
const LONG: usize = 110;
/// Words that may not begin a line: the subject of a sentence is a thing with a name.
const WORDS: [&str; 5] = ["What", "Whether", "How", "Who", "Where"];

/// The measures of one crate, or of the documents.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Measures {
    files: f64,
    circles: f64,
    asserts: f64,
    tests: f64,
    words: f64,
    long: f64,
}

/// Name, value, and true if a greater value is better.
type Named = (&'static str, f64, bool);

impl Measures {
    fn named(&self) -> [Named; 6] {
        [
            ("files", self.files, false),
            ("circles", self.circles, false),
            ("asserts", self.asserts, true),
            ("tests", self.tests, true),
            ("words", self.words, false),
            ("long", self.long, false),
        ]
    }

    fn set(&mut self, name: &str, value: f64) -> bool {
        let field = match name {
            "files" => &mut self.files,
            "circles" => &mut self.circles,
            "asserts" => &mut self.asserts,
            "tests" => &mut self.tests,
            "words" => &mut self.words,
            "long" => &mut self.long,
            _ => return false,
        };
        *field = value;
        true
    }

    /// The better value of each measure.
    fn best(&self, other: &Self) -> Self {
        let mut best = *self;
        for ((name, mine, more), (_, theirs, _)) in self.named().into_iter().zip(other.named()) {
            best.set(name, if (theirs > mine) == more { theirs } else { mine });
        }
        best
    }
}

impl fmt::Display for Measures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let all = self.named().map(|(name, value, _)| format!("{name} {value:>6.2}"));
        f.write_str(&all.join("  "))
    }
}

/// Prints the measures of every crate and of the documents.
pub(super) fn print() -> Result<()> {
    for (name, measures) in measure(&workspace::files()?)? {
        println!("{name:<16} {measures}");
    }
    Ok(())
}

/// Writes the better of the recorded and the present measures to the ratchet.
pub(super) fn record() -> Result<()> {
    let recorded = read()?;
    let mut text = String::new();
    for (name, now) in measure(&workspace::files()?)? {
        let best = recorded.get(&name).map_or(now, |before| before.best(&now));
        text += &format!("{name:<16} {best}\n");
    }
    std::fs::write(workspace::root().join(RATCHET), text).with_context(|| RATCHET.to_owned())
}

/// Compares the measures with the ratchet, and adds a finding for each that is worse.
pub(super) fn check(files: &[PathBuf], findings: &mut super::Findings) -> Result<()> {
    let recorded = read()?;
    for (name, now) in measure(files)? {
        let Some(before) = recorded.get(&name) else {
            findings.add(
                Path::new(RATCHET),
                1,
                format_args!("{name} is missing: `cargo xtask tidy --record`"),
            );
            continue;
        };
        for why in worse(before, &now) {
            findings.add(Path::new(RATCHET), 1, format_args!("{name}: {why}"));
        }
    }
    Ok(())
}

/// The measures that got worse, each with its old and new value.
fn worse(before: &Measures, now: &Measures) -> Vec<String> {
    let pairs = before.named().into_iter().zip(now.named());
    // Ratios change a little with every line, so up to 3 % and a hundredth are ignored.
    let is_worse = |before: f64, now: f64, more: bool| {
        if more { now < before * 0.97 - 0.01 } else { now > before * 1.03 + 0.01 }
    };
    pairs
        .filter(|((_, before, more), (_, now, _))| is_worse(*before, *now, *more))
        .map(|((name, before, _), (_, now, _))| format!("{name} went from {before:.2} to {now:.2}"))
        .collect()
}

fn read() -> Result<BTreeMap<String, Measures>> {
    let path = workspace::root().join(RATCHET);
    if !path.exists() {
        return Ok(BTreeMap::new());
    }
    let text = std::fs::read_to_string(&path).with_context(|| RATCHET.to_owned())?;
    text.lines().map(parse).collect()
}

fn parse(line: &str) -> Result<(String, Measures)> {
    let mut words = line.split_whitespace();
    let name = words.next().context("an empty line")?.to_owned();
    let mut measures = Measures::default();
    while let (Some(measure), Some(value)) = (words.next(), words.next()) {
        let is_known = measures.set(measure, value.parse().with_context(|| line.to_owned())?);
        anyhow::ensure!(is_known, "{RATCHET}: there is no measure {measure}");
    }
    Ok((name, measures))
}

/// Counts of one crate.
#[derive(Default)]
struct Counts {
    lines: usize,
    tests: usize,
    asserts: usize,
    comments: Comments,
    /// By struct, the files that hold an `impl` of it.
    impls: BTreeMap<String, BTreeSet<String>>,
    /// By module path inside the crate, the module paths that it imports.
    imports: BTreeMap<String, BTreeSet<String>>,
}

#[derive(Clone, Copy, Default)]
struct Comments {
    lines: usize,
    words: usize,
    long: usize,
}

impl Comments {
    fn add(&mut self, line: &str, text: &str) {
        self.lines += 1;
        let first = text.split(|c: char| !c.is_alphanumeric()).next().unwrap_or_default();
        self.words += usize::from(WORDS.contains(&first));
        self.long += usize::from(line.chars().count() > LONG && !line.contains("://"));
    }

    fn measures(self) -> Measures {
        let words = 1000.0 * self.words as f64 / self.lines.max(1) as f64;
        Measures { words, long: self.long as f64, ..Measures::default() }
    }
}

fn measure(files: &[PathBuf]) -> Result<BTreeMap<String, Measures>> {
    let mut crates: BTreeMap<String, Counts> = BTreeMap::new();
    let mut documents = Comments::default();
    for file in files {
        let extension = file.extension().and_then(|extension| extension.to_str());
        match extension {
            Some("md") => count_text(&workspace::read(file)?, &mut documents),
            Some("rs") => {
                let Some((name, inside)) = super::sources::place(file) else { continue };
                count_source(&inside, &workspace::read(file)?, crates.entry(name).or_default());
            }
            _ => {}
        }
    }
    let mut all: BTreeMap<String, Measures> =
        crates.iter().map(|(name, counts)| (name.clone(), counts.measures())).collect();
    all.insert("documents".to_owned(), documents.measures());
    Ok(all)
}

impl Counts {
    fn measures(&self) -> Measures {
        let lines = self.lines.max(1) as f64;
        Measures {
            files: self.impls.values().map(BTreeSet::len).max().unwrap_or(0) as f64,
            circles: circles(&self.imports) as f64,
            asserts: 1000.0 * self.asserts as f64 / lines,
            tests: self.tests as f64 / lines,
            ..self.comments.measures()
        }
    }
}

/// Counts the text lines of a Markdown file, without tables, headings, code and lines with links.
fn count_text(text: &str, comments: &mut Comments) {
    let mut is_code = false;
    for line in text.lines() {
        let start = line.trim_start();
        if start.starts_with("```") {
            is_code = !is_code;
        }
        let is_text = !is_code
            && !line.starts_with("    ")
            && !start.is_empty()
            && !start.starts_with(['|', '#', '`', '<']);
        if is_text && !line.contains("](") {
            comments.add(line, start.trim_start_matches(['-', '*', '>', ' ']));
        }
    }
}

fn count_source(inside: &Path, source: &str, counts: &mut Counts) {
    let only = code::only(source);
    for line in source.lines().filter(|line| line.trim_start().starts_with("//")) {
        counts.comments.add(line, line.trim_start().trim_start_matches(['/', '!', ' ']));
    }
    let is_test = super::sources::is_test(inside);
    let tests_at = only.find("#[cfg(test)]\nmod tests {").unwrap_or(only.len());
    let (outside, tests) = if is_test { ("", &only[..]) } else { only.split_at(tests_at) };
    counts.lines += outside.lines().count();
    counts.tests += tests.lines().count();
    counts.asserts += ["assert!(", "assert_eq!(", "assert_ne!(", "unreachable!("]
        .iter()
        .map(|call| outside.matches(call).count())
        .sum::<usize>();
    let Some(module) = module_of(inside).filter(|_| !is_test) else { return };
    for name in outside.lines().filter_map(inherent_impl) {
        counts.impls.entry(name).or_default().insert(inside.display().to_string());
    }
    let imports = imports(outside, &module);
    counts.imports.entry(module).or_default().extend(imports);
}

/// The struct of a line that opens an inherent `impl`; `None` for other lines.
fn inherent_impl(line: &str) -> Option<String> {
    let rest = line.strip_prefix("impl")?;
    let rest = match rest.strip_prefix('<') {
        Some(generics) => generics.split_once("> ")?.1,
        None => rest.strip_prefix(' ')?,
    };
    let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    (!rest.contains(" for ") && !name.is_empty()).then_some(name)
}

/// The path of the module that a file holds, for example `log::chain`; `None` for the crate's root.
fn module_of(inside: &Path) -> Option<String> {
    let path = inside.strip_prefix("src").ok()?.with_extension("");
    let parts: Vec<&str> = path.iter().filter_map(|part| part.to_str()).collect();
    let is_root = matches!(parts[..], ["lib" | "main"]) || parts.first() == Some(&"bin");
    (!is_root).then(|| parts.join("::"))
}

/// The paths of this crate that a module's code names with `crate::` or `super::`, made absolute.
fn imports(code: &str, module: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for (start, prefix) in ["crate::", "super::"]
        .iter()
        .flat_map(|prefix| code.match_indices(prefix).map(move |(at, _)| (at, *prefix)).collect::<Vec<_>>())
    {
        if code[..start].ends_with("super::") {
            continue;
        }
        let mut base: Vec<&str> = module.split("::").collect();
        let mut rest = &code[start + prefix.len()..];
        if prefix == "super::" {
            base.pop();
            while let Some(further) = rest.strip_prefix("super::") {
                base.pop();
                rest = further;
            }
        } else {
            base.clear();
        }
        for path in paths(rest) {
            let all: Vec<&str> = base.iter().copied().chain(path.split("::")).collect();
            found.insert(all.join("::"));
        }
    }
    found
}

/// The paths at the start of `rest`: one, or the members of a group in braces.
fn paths(rest: &str) -> Vec<String> {
    let is_path = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    match rest.strip_prefix('{') {
        Some(group) => {
            let group = group.split_once(';').map_or(group, |(group, _)| group);
            group
                .split([',', '}'])
                .map(|path| path.trim().chars().take_while(|c| is_path(*c)).collect())
                .collect()
        }
        None => vec![rest.chars().take_while(|c| is_path(*c)).collect()],
    }
}

/// The number of modules in import circles, summed over the children of each module.
fn circles(imports: &BTreeMap<String, BTreeSet<String>>) -> usize {
    let modules: BTreeSet<&str> = imports.keys().map(String::as_str).collect();
    let mut edges: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (from, paths) in imports {
        for path in paths {
            // The longest prefix of the path that is a module.
            let parts: Vec<&str> = path.split("::").collect();
            let to =
                (1..=parts.len()).rev().map(|n| parts[..n].join("::")).find(|to| modules.contains(&to[..]));
            let Some((one, other)) = to.as_deref().and_then(|to| siblings(from, to)) else { continue };
            edges.entry(one).or_default().insert(other);
        }
    }
    let reaches_itself = |start: &String| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![start]);
        while let Some(at) = next.pop() {
            for to in edges.get(at).into_iter().flatten() {
                if to == start {
                    return true;
                }
                if seen.insert(to) {
                    next.push(to);
                }
            }
        }
        false
    };
    edges.keys().filter(|module| reaches_itself(module)).count()
}

/// The ancestors of two modules that are children of one module; none if one module is inside the other.
fn siblings(from: &str, to: &str) -> Option<(String, String)> {
    let (from, to): (Vec<&str>, Vec<&str>) = (from.split("::").collect(), to.split("::").collect());
    let common = from.iter().zip(&to).take_while(|(one, other)| one == other).count();
    (common < from.len() && common < to.len()).then(|| (from[..=common].join("::"), to[..=common].join("::")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impl_of_a_trait_is_not_counted() {
        for (line, expected) in [
            ("impl Array {", Some("Array")),
            ("impl<'a, T: Copy> Copy<'a, T> {", Some("Copy")),
            ("impl Drop for Array {", None),
            ("    impl Array {", None),
            ("implement", None),
        ] {
            assert_eq!(inherent_impl(line).as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn modules_that_import_each_other_are_a_circle() {
        let of = |files: &[(&str, &str)]| {
            let mut counts = Counts::default();
            files.iter().for_each(|(file, code)| count_source(Path::new(file), code, &mut counts));
            counts.measures().circles
        };
        // Two siblings, through a third.
        let three = [
            ("src/a.rs", "use crate::b::B;"),
            ("src/b.rs", "fn b() { crate::c::d::D }"),
            ("src/c/d.rs", "use super::super::a::{A, X};"),
        ];
        assert_eq!(of(&three), 3.0);
        assert_eq!(of(&three[..2]), 0.0);
        // A module and its child count as one.
        assert_eq!(of(&[("src/a.rs", "use b::B;"), ("src/a/b.rs", "use super::A;")]), 0.0);
        // Two children of one module.
        let children = [("src/a/b.rs", "use super::c::C;"), ("src/a/c.rs", "use crate::a::b::B;")];
        assert_eq!(of(&children), 2.0);
        // Tests may use anything.
        let tests = ("src/b.rs", "#[cfg(test)]\nmod tests {\n use crate::a::A;\n}\n");
        assert_eq!(of(&[("src/a.rs", "use crate::b::B;"), tests]), 0.0);
    }

    #[test]
    fn comments_and_text_are_counted_by_their_first_word() {
        let mut counts = Counts::default();
        let source = "//! What it is.\n/// Whatever.\nfn a() { assert!(true) } // Who?\n    // Where\n";
        count_source(Path::new("src/a.rs"), source, &mut counts);
        assert_eq!((counts.comments.lines, counts.comments.words, counts.asserts), (3, 2, 1));
        let mut text = Comments::default();
        count_text("How it\n- Who\n# What\n| Where |\n```\nWhat\n```\nThe end\n", &mut text);
        assert_eq!((text.lines, text.words), (3, 2));
    }

    #[test]
    fn a_measure_may_get_better_and_not_worse() {
        let before = Measures { files: 4.0, asserts: 8.0, ..Measures::default() };
        let now = Measures { files: 5.0, asserts: 9.0, ..Measures::default() };
        assert_eq!(worse(&before, &now), ["files went from 4.00 to 5.00"]);
        assert_eq!(worse(&now, &before), ["asserts went from 9.00 to 8.00"]);
        assert_eq!(worse(&before, &before), [""; 0]);
        let best = before.best(&now);
        assert_eq!((best.files, best.asserts), (4.0, 9.0));
        let (name, parsed) = parse(&format!("a {best}")).unwrap();
        assert_eq!((name.as_str(), parsed), ("a", best));
    }
}
