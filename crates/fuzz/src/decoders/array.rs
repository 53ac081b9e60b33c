//! Decoders of the structures that an array stores on its slices.

use super::drive::{contents_of, seal};
use super::{number, seal_crc};
use crate::check::{Decoder, Form, SAME, agrees, unsealed};
use penstock_array::format::descriptor::{Descriptor, MemberEntry, Role};
use penstock_array::format::index_page::{IndexPage, PageRef};
use penstock_array::format::label::Label;
use penstock_array::format::record::{Entry, RecordHead, StripPatch};
use penstock_array::format::root::Root;
use penstock_array::format::segment::SegmentHeader;
use penstock_array::format::table_page::TablePage;
use penstock_array::format::trailer::Trailer;
use penstock_array::moves::Moves;
use penstock_array::{Geometry, Layout, MemberNo, MemberSet, Position, Positions};
use penstock_base::{
    ArrayId, BLOCK_BYTES, Buf, DriveId, Epoch, Id128, LogSeq, PoolId, StackNo, Stripe, Version, crc32c_blocks,
};
use penstock_drive::copies::{COPY_BYTES, TwoCopies};
use penstock_layout::Shape;
use std::collections::BTreeMap;

const ARRAY: ArrayId = ArrayId(Id128([0xa7; 16]));
/// `descriptor`: covered by the label's checksum. An accepted one must also give a geometry or an error.
pub(super) const DESCRIPTOR: Decoder = Decoder {
    name: "descriptor",
    most_bytes: 4096,
    seeds: || descriptors().iter().map(Descriptor::encode).collect(),
    seal: unsealed,
    check: |bytes| {
        let verdict = agrees(bytes, &SAME, Descriptor::decode, Descriptor::encode)?;
        if let Ok(descriptor) = Descriptor::decode(bytes) {
            let _ = Geometry::of(&descriptor);
        }
        Ok(verdict)
    },
};

fn descriptors() -> Vec<Descriptor> {
    let descriptor = |k: u16, m: u16, name: &str| Descriptor {
        array: ARRAY,
        pool: PoolId(Id128([0xb8; 16])),
        stack: StackNo(k - 1),
        name: name.into(),
        role: Role::Data,
        k,
        m,
        layout: Layout::one_group(usize::from(k + m)).expect("a group of few members"),
        strip_blocks: 64,
        log_bytes: 64 << 20,
        segment_bytes: 2 << 20,
        rows: 1000,
        epoch: Epoch(4),
        root_epoch: Epoch(3),
        revision: 12,
        carriers_epoch: 9,
        carriers: (0..=m).collect(),
        members: (0..k + m)
            .map(|number| MemberEntry {
                drive: DriveId(Id128([number as u8; 16])),
                offset: 1 << 20,
                len: 4 << 30,
                generation: 1,
                stale: number == 1,
                epoch: Epoch(3),
            })
            .collect(),
    };
    let shape = Shape { members: 6, strips: 4, redundancy: 1, spares: 1, domains: 6 };
    let layout = Layout::declustered(shape, &[vec![2, 0, 5, 3, 1, 4], vec![5, 4, 3, 2, 1, 0]]);
    let layout = layout.expect("permutations of six members");
    // The members of another code on as many drives.
    let spread = Descriptor { k: 3, m: 1, layout, ..descriptor(4, 2, "spread") };
    vec![descriptor(4, 2, "data"), descriptor(1, 2, "meta"), descriptor(3, 0, ""), spread]
}

/// `label`: one copy of it, with an encoded descriptor.
pub(super) const LABEL: Decoder = Decoder {
    name: "label",
    most_bytes: COPY_BYTES + 4096,
    seeds: || {
        let label = |descriptor: &Descriptor| contents_of(&Label::new(descriptor, MemberNo::new(1)).encode());
        descriptors().iter().map(label).collect()
    },
    seal: |bytes| seal(bytes),
    check: |bytes| {
        if let Ok(label) = Label::decode(bytes) {
            let _ = label.descriptor();
        }
        // Bytes behind the body are not looked at.
        agrees(bytes, &Form::Value, Label::decode, |label| contents_of(&label.encode()))
    },
};

/// `trailer`: the last block of a strip.
pub(super) const TRAILER: Decoder = Decoder {
    name: "trailer",
    most_bytes: BLOCK_BYTES,
    seeds: || {
        let trailer = |blocks: u32| Trailer {
            array: ARRAY,
            stripe: Stripe(6),
            position: 2,
            version: Version(11),
            crcs: (0..blocks).collect(),
        };
        [trailer(4), trailer(64), trailer(0)].map(|trailer| trailer.encode().to_vec()).to_vec()
    },
    seal: |bytes| {
        let end = 48usize.saturating_add(number(bytes, 40).saturating_mul(4));
        seal_crc(bytes, 44, &[0..44, 48..end]);
    },
    check: |bytes| {
        let encode = |trailer: &Trailer| trailer.encode()[..48 + 4 * trailer.crcs.len()].to_vec();
        agrees(bytes, &SAME, Trailer::decode, encode)
    },
};

fn seal_block(bytes: &mut Vec<u8>) {
    // A block of another length is refused before anything else. Most inputs must get further.
    if !bytes.len().is_multiple_of(7) {
        bytes.resize(BLOCK_BYTES, 0);
    }
    seal_crc(bytes, 4, &[8..BLOCK_BYTES]);
}

/// `table-page`: a page of the stripe table.
pub(super) const TABLE_PAGE: Decoder = Decoder {
    name: "table-page",
    most_bytes: BLOCK_BYTES,
    seeds: || {
        let page =
            |strips: u16, words: Vec<u64>| TablePage { array: ARRAY, index: 1, checkpoint: 3, strips, words };
        [
            page(2, vec![0, 0, 0, 7, 7, 2, 1, 3, 9, 8]),
            page(6, [[0; 3], [5; 3], [5; 3]].concat().repeat(54)),
            page(3, Vec::new()),
        ]
        .map(|page| page.encode().to_vec())
        .to_vec()
    },
    seal: seal_block,
    check: |bytes| agrees(bytes, &Form::Value, TablePage::decode, |page| page.encode().to_vec()),
};

const TOP: PageRef =
    PageRef { checkpoint: 3, written: 500, crc: 0x0506_0708, place: 1, most_stale: 2, has_moves: true };

/// `index-page`: a page of the index of the stripe table.
pub(super) const INDEX_PAGE: Decoder = Decoder {
    name: "index-page",
    most_bytes: BLOCK_BYTES,
    seeds: || {
        let page = |level, refs| IndexPage { array: ARRAY, index: 9, checkpoint: 3, level, refs };
        [page(1, vec![TOP; 168]), page(3, vec![TOP, PageRef::NONE, TOP]), page(2, Vec::new())]
            .map(|page| page.encode().to_vec())
            .to_vec()
    },
    seal: seal_block,
    check: |bytes| agrees(bytes, &SAME, IndexPage::decode, |page| page.encode().to_vec()),
};

/// `root`: the root of a checkpoint.
pub(super) const ROOT: Decoder = Decoder {
    name: "root",
    most_bytes: BLOCK_BYTES,
    seeds: || {
        let root = Root {
            array: ARRAY,
            seq: 3,
            incarnation: 2,
            incarnation_start: LogSeq(40),
            replay_segment: 5,
            replay_seq: LogSeq(33),
            replay_chain: 0x0102_0304,
            durable: LogSeq(44),
            versions_reserved: Version(1 << 20),
            order: 77,
            table: TOP,
            epoch: Epoch(6),
            behind: MemberSet::one(MemberNo::new(200)),
            applied: LogSeq(43),
            resets: BTreeMap::from([(MemberNo::new(0), 1), (MemberNo::new(255), 3)]),
            stale_on: MemberSet::first(256),
            unreadable: (0..40).map(|stripe| Stripe(stripe * 1000)).collect(),
        };
        vec![root.encode().to_vec()]
    },
    seal: seal_block,
    check: |bytes| {
        let verdict = agrees(bytes, &SAME, Root::decode, |root| root.encode().to_vec())?;
        if let Ok(root) = Root::decode(bytes) {
            // An opening increments these counters. None of them may overflow.
            let _ = (root.seq + 1, root.incarnation + 1, root.durable.next(), root.order + 1);
            let _ = (root.versions_reserved.0 + 1, root.replay_segment + 1, root.replay_seq.next());
        }
        Ok(verdict)
    },
};

/// `segment-header`: the header of a log segment.
pub(super) const SEGMENT_HEADER: Decoder = Decoder {
    name: "segment-header",
    most_bytes: BLOCK_BYTES,
    seeds: || {
        let header = |number| SegmentHeader {
            array: ARRAY,
            number,
            first_seq: LogSeq(33),
            chain: 0x0102_0304,
            incarnation: 2,
        };
        [header(5), header(0)].map(|header| header.encode().to_vec()).to_vec()
    },
    seal: seal_block,
    check: |bytes| {
        let verdict = agrees(bytes, &SAME, SegmentHeader::decode, |header| header.encode().to_vec())?;
        if let Ok(header) = SegmentHeader::decode(bytes) {
            let _ = (header.number + 1, header.first_seq.next());
        }
        Ok(verdict)
    },
};

/// `log-record`: the head of a record with its entries. The payload behind it is ignored.
pub(super) const LOG_RECORD: Decoder = Decoder {
    name: "log-record",
    most_bytes: 4 * BLOCK_BYTES,
    seeds: records,
    seal: |bytes| seal_record(bytes),
    check: |bytes| {
        let decode = |bytes: &[u8]| RecordHead::decode(bytes).map(|(head, _)| head);
        let encode = |head: &RecordHead| {
            let payload = head.entries.iter().map(|entry| entry.payload_crcs().len()).sum::<usize>();
            head.encode(&[Buf::zeroed(payload * BLOCK_BYTES)]).0.to_vec()
        };
        let verdict = agrees(bytes, &Form::Value, decode, encode)?;
        if let Ok(head) = decode(bytes) {
            let entry_bytes: usize = head.entries.iter().map(Entry::encoded_bytes).sum();
            if bytes[..64 + entry_bytes] != encode(&head)[..64 + entry_bytes] {
                return Err(format!("{head:?} encodes to other bytes"));
            }
            let _ = (head.seq.next(), head.durable.next(), head.incarnation + 1);
        }
        Ok(verdict)
    },
};

fn records() -> Vec<Vec<u8>> {
    let payload = vec![Buf::copy_from(&[0x5a; BLOCK_BYTES]), Buf::copy_from(&[0xc3; BLOCK_BYTES])];
    let crcs: Vec<u32> = payload.iter().flat_map(|block| crc32c_blocks(block)).collect();
    let patch = StripPatch {
        position: Position::new(2),
        version: Version(13),
        columns: vec![1],
        crcs: vec![5, crcs[1]],
    };
    let head = |entries: Vec<Entry>| RecordHead {
        array: ARRAY,
        incarnation: 2,
        seq: LogSeq(45),
        chain: 0x0a0b_0c0d,
        durable: LogSeq(44),
        entries,
    };
    let every = head(vec![
        Entry::Data { stripe: Stripe(1), order: 7, block: 3, crcs: vec![crcs[0]] },
        Entry::Fresh {
            stripe: Stripe(2),
            upto: 6,
            version: Version(12),
            stale: Positions::from_bits(1),
            moves: Moves::NONE.with(Position::new(2), Some(1)),
            contained: vec![(0, 5)],
        },
        Entry::Destage {
            stripe: Stripe(3),
            stale: Positions::from_bits(2),
            contained: vec![(1, 4)],
            patches: vec![patch],
        },
        Entry::Discard { stripe: Stripe(4), count: 2, upto: 7 },
        Entry::Versions { reserved: Version(2 << 20) },
        Entry::Strips {
            stripe: Stripe(5),
            set: Positions::from_bits(1),
            clear: Positions::from_bits(2),
            version: Version(14),
            moves: Moves::NONE.with(Position::new(1), Some(7)),
        },
        Entry::MemberReset { member: MemberNo::new(1) },
    ]);
    let control = head(vec![
        Entry::MemberReset { member: MemberNo::new(255) },
        Entry::Fresh {
            stripe: Stripe(9),
            upto: 0,
            version: Version(1),
            stale: Positions::from_bits(0),
            moves: Moves::NONE,
            contained: Vec::new(),
        },
    ]);
    vec![
        every.encode(&payload).0.to_vec(),
        control.encode(&[]).0.to_vec(),
        head(Vec::new()).encode(&[]).0.to_vec(),
    ]
}

/// Recomputes the checksum, and finds a number of payload blocks with which the entries are accepted. Random
/// numbers would almost never agree with the entries, and would test nothing.
fn seal_record(bytes: &mut [u8]) {
    let end = 64usize.saturating_add(number(bytes, 60));
    let Some(fields) = bytes.get(44..60).filter(|_| end <= bytes.len()) else { return };
    let (head_blocks, payload) = (end.div_ceil(BLOCK_BYTES) as u16, fields[12..].to_vec());
    bytes[44..46].copy_from_slice(&head_blocks.to_le_bytes());
    for blocks in 0..(bytes.len() / BLOCK_BYTES) as u32 {
        bytes[56..60].copy_from_slice(&blocks.to_le_bytes());
        seal_crc(bytes, 4, &[8..end]);
        if RecordHead::decode(bytes).is_ok() {
            return;
        }
    }
    bytes[56..60].copy_from_slice(&payload);
    seal_crc(bytes, 4, &[8..end]);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A fuzzer that begins with arrays which cannot be opened finds little.
    #[test]
    fn every_descriptor_has_a_geometry() {
        let mut layouts = Vec::new();
        for descriptor in descriptors() {
            let geometry = Geometry::of(&descriptor).unwrap();
            assert_eq!(geometry.members, descriptor.members.len(), "{}", descriptor.name);
            assert_eq!(geometry.stripes, descriptor.layout.stripes(descriptor.rows), "{}", descriptor.name);
            layouts.push(matches!(descriptor.layout, Layout::Declustered(_)));
        }
        assert!(layouts.contains(&true) && layouts.contains(&false), "every kind of layout");
    }
}
