//! Decoders of copies of the map.

use super::{number, seal_crc};
use crate::check::{Decoder, Form, SAME, agrees, unsealed};
use penstock_base::{ArrayId, Enc, Id128, Version};
use penstock_chunk::copies::format::{
    Anchor, SegmentHead, decode_index, encode_index, put_row, row_bytes, take_rows,
};

fn pieces() -> Vec<Vec<(u64, u64)>> {
    vec![vec![(5, 1), (9, 2)], vec![(1 << 40, 256)]]
}

/// Writes the checksum of an anchor or a segment, whose length says what it covers.
fn seal(bytes: &mut [u8]) {
    let end = number(bytes, 16).saturating_add(20).min(bytes.len()).max(12);
    seal_crc(bytes, 8, &[12..end]);
}

/// `map-copy-anchor`: the place of a copy.
pub(super) const ANCHOR: Decoder = Decoder {
    name: "map-copy-anchor",
    most_bytes: 4096,
    seeds: || {
        let anchor = |index| Anchor {
            array: ArrayId(Id128([8; 16])),
            serial: 3,
            id: 7,
            version: Version(77),
            created_ns: -5,
            rows: 9,
            bytes: 1000,
            chunk_blocks: 256,
            segments: 2,
            index,
        };
        [pieces(), Vec::new()].map(|index| anchor(index).encode()).to_vec()
    },
    seal: |bytes| seal(bytes),
    check: |bytes| agrees(bytes, &SAME, Anchor::decode, Anchor::encode),
};

/// `map-copy-segment`: a segment with its contents. It is encoded in full blocks.
pub(super) const SEGMENT: Decoder = Decoder {
    name: "map-copy-segment",
    most_bytes: 4096,
    seeds: || {
        let head = |is_index| SegmentHead { id: 7, number: 2, is_index };
        vec![head(false).seal(b"contents", 1), head(true).seal(&[], 1)]
    },
    seal: |bytes| seal(bytes),
    check: |bytes| {
        let decode =
            |bytes: &[u8]| SegmentHead::open(bytes).map(|(head, contents)| (head, contents.to_vec()));
        agrees(bytes, &Form::Value, decode, |(head, contents)| head.seal(contents, 1))
    },
};

/// `map-copy-rows`: the rows in a segment.
pub(super) const ROWS: Decoder = Decoder {
    name: "map-copy-rows",
    most_bytes: 4096,
    seeds: || {
        let mut rows = Enc::new();
        put_row(&mut rows, b"key", b"value");
        put_row(&mut rows, b"other", b"");
        vec![rows.finish(), Vec::new()]
    },
    seal: unsealed,
    check: |bytes| {
        let decode = |bytes: &[u8]| {
            let rows = take_rows(bytes)?;
            let len: usize = rows.iter().map(|(key, value)| row_bytes(key, value)).sum();
            assert_eq!(len, bytes.len(), "rows are all of it");
            let owned = rows.into_iter().map(|(key, value)| (key.to_vec(), value.to_vec()));
            Ok::<Vec<_>, penstock_base::DecodeError>(owned.collect())
        };
        agrees(bytes, &SAME, decode, |rows| {
            let mut enc = Enc::new();
            rows.iter().for_each(|(key, value)| put_row(&mut enc, key, value));
            enc.finish()
        })
    },
};

/// `map-copy-index`: the blocks of segments.
pub(super) const INDEX: Decoder = Decoder {
    name: "map-copy-index",
    most_bytes: 4096,
    seeds: || vec![encode_index(&pieces()), encode_index(&[])],
    seal: unsealed,
    check: |bytes| agrees(bytes, &SAME, decode_index, |pieces| encode_index(pieces)),
};
