//! The table of decoders: one line for each decoder, one file for each family.

mod array;
mod copies;
mod drive;
mod names;
mod rows;
mod text;
mod wire;

use crate::check::Decoder;

/// Decoders of bytes from drives, messages, files and users. docs/testing.md lists the ones that are not
/// fuzzed.
pub const DECODERS: [Decoder; 53] = [
    drive::SUPERBLOCK,
    array::DESCRIPTOR,
    array::LABEL,
    array::TRAILER,
    array::TABLE_PAGE,
    array::INDEX_PAGE,
    array::ROOT,
    array::SEGMENT_HEADER,
    array::LOG_RECORD,
    rows::VOLUME_HEADER,
    rows::JOURNAL_RECORD,
    rows::JOURNAL_MARK,
    rows::MAP,
    rows::LENT,
    rows::LOAN,
    rows::RESERVED,
    rows::FORGOTTEN,
    rows::COUNTER,
    rows::FILE,
    rows::ACCOUNT,
    rows::GROUP,
    rows::GROUP_COUNTS,
    rows::CHUNK_KEYS,
    copies::ANCHOR,
    copies::SEGMENT,
    copies::ROWS,
    copies::INDEX,
    rows::STORE,
    rows::FILE_SYSTEM,
    rows::INODE,
    rows::ENTRY,
    rows::RESULT,
    rows::SESSION,
    rows::NAME_KEYS,
    wire::HEADER,
    wire::READ,
    wire::WRITE,
    wire::COMMIT,
    wire::REPLY,
    wire::GREETING,
    wire::CHALLENGE,
    wire::PROOF,
    wire::WELCOME,
    wire::FRAMES,
    wire::SEEK,
    wire::FOUND,
    wire::SPACE,
    names::NAMES,
    text::CLAIMS,
    text::STORE_FILE,
    text::SIZE,
    text::CODE,
    text::ID,
];

/// Writes the CRC32C of `covered` to `at`, if the input is long enough.
fn seal_crc(bytes: &mut [u8], at: usize, covered: &[std::ops::Range<usize>]) {
    let runs: Option<Vec<&[u8]>> = covered.iter().map(|range| bytes.get(range.clone())).collect();
    let Some(crc) = runs.map(penstock_base::crc32c_append) else { return };
    if let Some(field) = bytes.get_mut(at..at + 4) {
        field.copy_from_slice(&crc.to_le_bytes());
    }
}

/// The 32-bit number at `at`; 0 if the input is too short.
fn number(bytes: &[u8], at: usize) -> usize {
    bytes
        .get(at..at + 4)
        .map_or(0, |field| field.iter().rev().fold(0, |number, byte| number << 8 | usize::from(*byte)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::campaign::execute;
    use crate::check::Verdict;
    use std::collections::BTreeSet;

    /// Valid encodings are accepted. Sealing does not change them, so every checksum that it computes is
    /// right.
    #[test]
    fn seeds_are_valid_and_sealed() {
        let names: BTreeSet<&str> = DECODERS.iter().map(|decoder| decoder.name).collect();
        assert_eq!(names.len(), DECODERS.len(), "two decoders have one name");
        for decoder in &DECODERS {
            for seed in (decoder.seeds)() {
                assert!(seed.len() <= decoder.most_bytes, "{}", decoder.name);
                assert_eq!(execute(decoder, &seed).unwrap(), Verdict::Accepted, "{}", decoder.name);
                let mut sealed = seed.clone();
                (decoder.seal)(&mut sealed);
                assert_eq!(sealed, seed, "{}: sealing changes a valid encoding", decoder.name);
            }
        }
    }
}
