//! Maps offsets in the program's file to source files, by its line tables.

use super::layer::{Layer, inside, of_file};
use addr2line::Loader;
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;

/// The source code at an offset.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// `None` if only code without a layer is open there, such as the standard library.
    pub(crate) layer: Option<Layer>,
    /// File and function that determine the layer. Without a layer, the outermost ones.
    pub(crate) function: Rc<str>,
}

/// A program with line tables.
pub(crate) struct Program {
    loader: Loader,
    segments: Vec<Segment>,
    known: BTreeMap<u64, Place>,
}

/// A part of the file that is loaded. Within it, offsets in the file and addresses differ by a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    offset: u64,
    address: u64,
    len: u64,
}

impl Program {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = std::fs::File::open(path).with_context(|| format!("no program {}", path.display()))?;
        let loader = Loader::new(path).map_err(|error| anyhow!("{}: {error}", path.display()))?;
        Ok(Self { loader, segments: segments(&file)?, known: BTreeMap::new() })
    }

    /// Returns the source code at an offset in the file. Each offset is looked up once.
    pub(crate) fn at(&mut self, offset: u64) -> Place {
        if let Some(place) = self.known.get(&offset) {
            return place.clone();
        }
        let place = self.look(offset);
        self.known.insert(offset, place.clone());
        place
    }

    fn look(&self, offset: u64) -> Place {
        let nothing = || Place { layer: None, function: "unknown".into() };
        let Some(address) = address(&self.segments, offset) else { return nothing() };
        let Ok(mut frames) = self.loader.find_frames(address) else { return nothing() };
        let mut place = nothing();
        // Inlined calls, innermost first. A call that cannot be read ends them.
        while let Ok(Some(frame)) = frames.next() {
            let file = frame.location.as_ref().and_then(|location| location.file).unwrap_or("unknown");
            if let Some(name) = frame.function.as_ref().and_then(|name| name.demangle().ok()) {
                // Type parameters are left out: they are long and add little.
                let name = without_hash(&name).split('<').next().unwrap_or_default();
                place.function = format!("{} {name}", inside(file).unwrap_or(file)).into();
            }
            if let Some(layer) = of_file(file) {
                return Place { layer: Some(layer), ..place };
            }
        }
        place
    }
}

fn address(segments: &[Segment], offset: u64) -> Option<u64> {
    let segment =
        segments.iter().find(|segment| (segment.offset..segment.offset + segment.len).contains(&offset))?;
    Some(offset - segment.offset + segment.address)
}

/// Returns the loaded parts of a 64-bit little-endian ELF file.
fn segments(file: &std::fs::File) -> Result<Vec<Segment>> {
    const PT_LOAD: u64 = 1;
    const HEADER_BYTES: usize = 64;
    const ENTRY_BYTES: usize = 56;
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)?;
    ensure!(header[..6] == *b"\x7fELF\x02\x01", "the program is no 64-bit little-endian ELF file");
    let (at, entries) = (number(&header, 0x20, 8), number(&header, 0x38, 2));
    ensure!(number(&header, 0x36, 2) == ENTRY_BYTES as u64, "its program headers are of another size");
    let mut segments = Vec::new();
    for index in 0..entries {
        let mut entry = [0; ENTRY_BYTES];
        file.read_exact_at(&mut entry, at + index * ENTRY_BYTES as u64)?;
        if number(&entry, 0, 4) == PT_LOAD {
            let [offset, address, len] = [0x08, 0x10, 0x20].map(|field| number(&entry, field, 8));
            segments.push(Segment { offset, address, len });
        }
    }
    Ok(segments)
}

fn number(bytes: &[u8], at: usize, len: usize) -> u64 {
    bytes[at..at + len].iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Returns a name without the hash that the compiler appends.
fn without_hash(name: &str) -> &str {
    match name.rsplit_once("::h") {
        Some((name, hash)) if hash.len() == 16 && hash.bytes().all(|byte| byte.is_ascii_hexdigit()) => name,
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_become_addresses() {
        let segments =
            [Segment { offset: 0, address: 0, len: 16 }, Segment { offset: 16, address: 4112, len: 16 }];
        let table = [(0, Some(0)), (15, Some(15)), (16, Some(4112)), (31, Some(4127)), (32, None)];
        for (offset, expected) in table {
            assert_eq!(address(&segments, offset), expected, "{offset}");
        }
    }

    /// The test's own program has line tables. The test uses an offset as perf reports it.
    #[test]
    fn a_program_is_read() {
        let mut program = Program::open(&std::env::current_exe().unwrap()).unwrap();
        let function = penstock_fuse::set_read_ahead as fn(&Path, u64) -> std::io::Result<u64>;
        let function = function as usize as u64;
        let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let offset = maps.lines().find_map(|line| {
            let words: Vec<&str> = line.split_whitespace().collect();
            let (start, end) = words[0].split_once('-').unwrap();
            let inside = (hex(start)..hex(end)).contains(&function);
            inside.then(|| function - hex(start) + hex(words[2]))
        });
        let place = program.at(offset.unwrap());
        assert_eq!(place.layer, Some(Layer::Fuse), "{place:?}");
        assert!(place.function.starts_with("fuse/src/"), "{place:?}");
        assert!(program.at(u64::MAX).layer.is_none());
    }

    #[test]
    fn hashes_are_left_out() {
        let table = [
            ("a::b::h0123456789abcdef", "a::b"),
            ("a::b::here", "a::b::here"),
            ("a::h0123456789abcdeg", "a::h0123456789abcdeg"),
        ];
        for (name, short) in table {
            assert_eq!(without_hash(name), short);
        }
    }
}
