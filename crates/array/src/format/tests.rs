//! Golden bytes, damage and noise for every structure: old images must open, and no input may cause a panic.

use super::descriptor::{Descriptor, MemberEntry, Role};
use super::index_page::{IndexPage, PageRef};
use super::label::Label;
use super::record::{Entry, RecordHead, StripPatch};
use super::root::Root;
use super::segment::SegmentHeader;
use super::table_page::TablePage;
use super::trailer::Trailer;
use crate::geometry::Geometry;
use crate::layout::Layout;
use crate::moves::Moves;
use crate::place::{MemberNo, MemberSet, Position, Positions};
use penstock_base::{
    ArrayId, BLOCK_BYTES, Buf, DriveId, Epoch, Features, Id128, LogSeq, PoolId, SECTOR_BYTES, StackNo,
    Stripe, Version, crc32c, crc32c_blocks,
};
use penstock_drive::copies::{MOST_BODY_BYTES, TwoCopies};
use penstock_layout::Shape;
use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;

const ARRAY: ArrayId = ArrayId(Id128([0xa7; 16]));
/// Random inputs for each decoder.
const NOISE_ROUNDS: usize = 10_000;

fn root() -> Root {
    Root {
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
        table: top(),
        epoch: Epoch(6),
        behind: MemberSet::one(MemberNo::new(2)),
        applied: LogSeq(43),
        resets: BTreeMap::from([(MemberNo::new(1), 2)]),
        stale_on: MemberSet::one(MemberNo::new(1)),
        unreadable: vec![Stripe(3), Stripe(70)],
    }
}

fn segment() -> SegmentHeader {
    SegmentHeader { array: ARRAY, number: 5, first_seq: LogSeq(33), chain: 0x0102_0304, incarnation: 2 }
}

fn page() -> TablePage {
    TablePage { array: ARRAY, index: 1, checkpoint: 3, strips: 2, words: vec![0, 0, 0, 7, 7, 2, 1, 3, 9, 8] }
}

fn top() -> PageRef {
    PageRef { checkpoint: 3, written: 500, crc: 0x0506_0708, place: 1, most_stale: 2, has_moves: true }
}

fn index_page() -> IndexPage {
    IndexPage { array: ARRAY, index: 8, checkpoint: 3, level: 1, refs: vec![PageRef::NONE, top()] }
}

fn trailer() -> Trailer {
    Trailer { array: ARRAY, stripe: Stripe(6), position: 2, version: Version(11), crcs: vec![1, 2, 3, 4] }
}

fn descriptor() -> Descriptor {
    let member = |number: u8| MemberEntry {
        drive: DriveId(Id128([number; 16])),
        offset: 1 << 20,
        len: 5 << 20,
        generation: u64::from(number),
        stale: number == 2,
        epoch: Epoch(u64::from(number)),
    };
    Descriptor {
        array: ARRAY,
        pool: PoolId(Id128([0xb8; 16])),
        stack: StackNo::FIRST,
        name: "golden".into(),
        role: Role::Data,
        k: 2,
        m: 1,
        layout: Layout::one_group(3).unwrap(),
        strip_blocks: 64,
        log_bytes: 64 << 20,
        segment_bytes: 2 << 20,
        rows: 1000,
        epoch: Epoch(4),
        root_epoch: Epoch(3),
        revision: 12,
        carriers_epoch: 9,
        carriers: vec![0, 2],
        members: (1..=3).map(member).collect(),
    }
}

/// A record with an entry of every kind, and its payload.
fn record() -> (RecordHead, Vec<Buf>) {
    let payload = vec![Buf::copy_from(&[0x5a; BLOCK_BYTES]), Buf::copy_from(&[0xc3; BLOCK_BYTES])];
    let crcs: Vec<u32> = payload.iter().flat_map(|block| crc32c_blocks(block)).collect();
    let patch = StripPatch {
        position: Position::new(2),
        version: Version(13),
        columns: vec![1],
        crcs: vec![5, crcs[1]],
    };
    let entries = vec![
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
            moves: Moves::NONE.with(Position::new(1), Some(0)),
        },
        Entry::MemberReset { member: MemberNo::new(200) },
    ];
    let (seq, durable) = (LogSeq(45), LogSeq(44));
    (RecordHead { array: ARRAY, incarnation: 2, seq, chain: 0x0a0b_0c0d, durable, entries }, payload)
}

/// Checks that `bytes` have the checksum `golden` and decode to `wanted`. Every flipped bit in `covered` must
/// be detected, one elsewhere in the first sector must be harmless, and noise must never cause a panic.
fn check<T: Debug + PartialEq>(
    bytes: &[u8],
    golden: u32,
    covered: Range<usize>,
    wanted: &T,
    decode: impl Fn(&[u8]) -> Option<T>,
) {
    assert_eq!(decode(bytes).as_ref(), Some(wanted));
    assert_eq!(crc32c(bytes), golden, "the bytes are those of the first release: {:#010x}", crc32c(bytes));
    let mut damaged = bytes.to_vec();
    for bit in 0..8 * SECTOR_BYTES.min(bytes.len()) {
        damaged[bit / 8] ^= 1 << (bit % 8);
        let found = decode(&damaged);
        match covered.contains(&(bit / 8)) {
            true => assert_eq!(found, None, "bit {bit}"),
            false => assert_eq!(found.as_ref(), Some(wanted), "bit {bit}"),
        }
        damaged[bit / 8] ^= 1 << (bit % 8);
    }
    never_panics(bytes, decode);
}

/// Decodes noise behind a valid prefix of random length, so that every field meets it. A quarter of the
/// inputs are truncated at a random length.
fn never_panics<T>(bytes: &[u8], decode: impl Fn(&[u8]) -> T) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..NOISE_ROUNDS {
        let mut noise = bytes.to_vec();
        let from = random() as usize % (SECTOR_BYTES.min(bytes.len()) + 1);
        let upto = (from + 1 + random() as usize % 64).min(noise.len());
        noise[from..upto].iter_mut().for_each(|byte| *byte = random() as u8);
        if random() % 4 == 0 {
            noise.truncate(random() as usize % (noise.len() + 1));
        }
        decode(&noise);
    }
}

#[test]
fn root_is_as_in_the_first_release() {
    check(&root().encode(), 0xe42d_0a3d, 0..SECTOR_BYTES, &root(), |bytes| Root::decode(bytes).ok());
}

#[test]
fn segment_header_is_as_in_the_first_release() {
    let decode = |bytes: &[u8]| SegmentHeader::decode(bytes).ok();
    check(&segment().encode(), 0xbb08_e59d, 0..SECTOR_BYTES, &segment(), decode);
}

#[test]
fn table_page_is_as_in_the_first_release() {
    check(&page().encode(), 0x563c_9b19, 0..SECTOR_BYTES, &page(), |bytes| TablePage::decode(bytes).ok());
}

#[test]
fn index_page_is_as_in_the_first_release() {
    let page = index_page();
    check(&page.encode(), 0x184c_34b2, 0..SECTOR_BYTES, &page, |bytes| IndexPage::decode(bytes).ok());
}

#[test]
fn trailer_is_as_in_the_first_release() {
    // 48 bytes and a checksum for each of four blocks; the rest of the block is not covered.
    check(&trailer().encode(), 0xaea6_1a69, 0..64, &trailer(), |bytes| Trailer::decode(bytes).ok());
}

#[test]
fn record_is_as_in_the_first_release() {
    let (head, payload) = record();
    let (bytes, shape) = head.encode(&payload);
    assert_eq!((shape.head_blocks, shape.payload_blocks), (1, 2));
    let entry_bytes: usize = head.entries.iter().map(Entry::encoded_bytes).sum();
    let decode = |bytes: &[u8]| RecordHead::decode(bytes).ok().map(|(head, _)| head);
    check(&bytes, 0xb8fb_1585, 0..64 + entry_bytes, &head, decode);
}

/// The checksum of the label covers the descriptor, so a flipped bit here may decode. It must only not
/// panic.
#[test]
fn descriptor_is_as_in_the_first_release() {
    let bytes = descriptor().encode();
    assert_eq!(Descriptor::decode(&bytes).as_ref(), Ok(&descriptor()));
    assert_eq!(crc32c(&bytes), 0xcc05_0132, "{:#010x}", crc32c(&bytes));
    never_panics(&bytes, Descriptor::decode);
}

/// A descriptor of stripes that are spread over four members.
fn spread() -> Descriptor {
    let shape = Shape { members: 4, strips: 3, redundancy: 1, spares: 1, domains: 4 };
    let layout = Layout::declustered(shape, &[vec![2, 0, 3, 1], vec![1, 3, 0, 2]]).unwrap();
    let more = MemberEntry { drive: DriveId(Id128([7; 16])), ..descriptor().members[0].clone() };
    Descriptor { layout, members: [descriptor().members, vec![more]].concat(), ..descriptor() }
}

#[test]
fn descriptor_of_spread_stripes_is_as_in_the_first_release() {
    let bytes = spread().encode();
    assert_eq!(Descriptor::decode(&bytes).as_ref(), Ok(&spread()));
    assert_eq!(crc32c(&bytes), 0x155b_4fa0, "{:#010x}", crc32c(&bytes));
    never_panics(&bytes, Descriptor::decode);
}

#[test]
fn layouts_that_do_not_fit_are_refused() {
    let ranges = 104 + 4 + "golden".len() + 2 + 2 * descriptor().carriers.len();
    for (descriptor, at, value) in [
        // Groups, code, spare places, domains, bases, a base.
        (descriptor(), 4, 2),
        (descriptor(), 6, 3),
        (descriptor(), 10, 1),
        (descriptor(), ranges + 6, 3),
        (descriptor(), ranges + 8, 1),
        (spread(), 4, 2),
        (spread(), 10, 2),
        (spread(), ranges + 6, 3),
        (spread(), ranges + 8, 0),
        (spread(), ranges + 26, 0),
    ] {
        let mut bytes = descriptor.encode();
        bytes[at] = value;
        assert!(Descriptor::decode(&bytes).is_err(), "{value} at {at}");
    }
}

#[test]
fn label_is_as_in_the_first_release() {
    let label = Label::new(&descriptor(), MemberNo::new(1));
    let bytes = label.encode();
    // The header, array, drive and position, and the descriptor with its length.
    let covered = 64 + 40 + 4 + descriptor().encode().len();
    check(&bytes, 0x4c22_007c, 0..covered, &label, |bytes| Label::decode(bytes).ok());
    assert_eq!(label.descriptor(), Ok(descriptor()));
    let other = Label { revision: label.revision + 1, ..label };
    assert!(other.descriptor().is_err(), "a descriptor of another revision");
}

/// Fields that this release writes with one value are refused by name if they have another.
#[test]
fn fields_of_later_releases_are_refused_by_name() {
    let bytes = descriptor().encode();
    let ranges = 104 + 4 + "golden".len() + 2 + 2 * descriptor().carriers.len();
    let member = ranges + 2 + 22 + 2;
    let extents = member + 3 * 48;
    for (at, field) in [
        (0, "format"),
        (2, "role"),
        (3, "integrity"),
        (49, "stack"),
        (50, "padding of the stack"),
        (68, "padding of segments"),
        (ranges, "ranges of stripes"),
        (ranges + 2, "layout"),
        (ranges + 3, "place of table pages"),
        (ranges + 4, "layout version"),
        (ranges + 10, "padding of a layout"),
        (member + 24, "life of a member"),
        (member + 40, "state of a member"),
        (member + 41, "padding of a member"),
        (member + 44, "failure domain"),
        (extents, "extents of members"),
        (extents + 2, "member of an extent"),
        (extents + 4, "range of an extent"),
        (extents + 6, "padding of an extent"),
    ] {
        let mut later = bytes.clone();
        later[at] += 7;
        let error = Descriptor::decode(&later).unwrap_err().to_string();
        assert!(error.contains(&format!("{field} is ")), "byte {at}: {error}");
    }
}

/// A release that does not know several stacks refuses the label by its feature.
#[test]
fn a_label_of_a_further_stack_has_its_feature() {
    let of_stack = Descriptor { stack: StackNo(63), ..descriptor() };
    let label = Label::new(&of_stack, MemberNo::new(1));
    assert_eq!(label.features, Features::of_stacks(true));
    let read = Label::decode(&label.encode()).unwrap();
    assert_eq!(read.descriptor(), Ok(of_stack));
    let without = Label { features: Features::default(), ..label };
    let error = Label::decode(&without.encode()).unwrap().descriptor().unwrap_err().to_string();
    assert!(error.contains("without their feature"), "{error}");
    assert_eq!(Label::new(&descriptor(), MemberNo::new(1)).features, Features::default());
}

#[test]
fn the_longest_descriptor_fits_in_a_label() {
    let member = MemberEntry {
        drive: DriveId(Id128([9; 16])),
        offset: 1 << 20,
        len: 5 << 20,
        generation: 1,
        stale: false,
        epoch: Epoch(1),
    };
    let shape = Shape { members: 256, strips: 64, redundancy: 8, spares: 8, domains: 256 };
    let base: Vec<u8> = (0..=255).collect();
    let longest = Descriptor {
        name: "n".repeat(255),
        k: 56,
        m: 8,
        layout: Layout::declustered(shape, &vec![base; 64]).unwrap(),
        carriers: (0..64).collect(),
        members: vec![member; 256],
        ..descriptor()
    };
    let bytes = longest.encode();
    assert!(bytes.len() + 64 < MOST_BODY_BYTES, "{} bytes", bytes.len());
    assert_eq!(Descriptor::decode(&bytes), Ok(longest));
}

/// Entries are decoded only after the checksum of the head verified. So the noise gets a valid one, and their
/// decoder meets it.
#[test]
fn entries_of_noise_under_a_good_checksum_are_refused() {
    let (head, payload) = record();
    let (bytes, _) = head.encode(&payload);
    never_panics(&bytes, |noise| {
        let mut sealed = noise.to_vec();
        let Some(len) = sealed.get(60..64) else { return };
        let end = 64usize.saturating_add(u32::from_le_bytes([len[0], len[1], len[2], len[3]]) as usize);
        if end <= sealed.len() {
            let chain = crc32c(&sealed[8..end]);
            sealed[4..8].copy_from_slice(&chain.to_le_bytes());
        }
        let _ = RecordHead::decode(&sealed);
    });
}

/// The same for the structures of one block.
#[test]
fn blocks_of_noise_under_a_good_checksum_are_refused() {
    for whole in [root().encode(), segment().encode(), page().encode(), index_page().encode()] {
        never_panics(&whole, |noise| {
            let mut sealed = noise.to_vec();
            if sealed.len() == BLOCK_BYTES {
                let crc = crc32c(&sealed[8..]);
                sealed[4..8].copy_from_slice(&crc.to_le_bytes());
            }
            let _ = (Root::decode(&sealed), SegmentHeader::decode(&sealed));
            let _ = (TablePage::decode(&sealed), IndexPage::decode(&sealed));
        });
    }
}

/// A decoded counter is incremented later, so a value above 2^63 is rejected.
#[test]
fn counters_near_the_end_of_their_type_are_refused() {
    let end = u64::MAX;
    assert!(Root::decode(&Root { incarnation: end, ..root() }.encode()).is_err());
    assert!(Root::decode(&Root { durable: LogSeq(end), ..root() }.encode()).is_err());
    assert!(SegmentHeader::decode(&SegmentHeader { number: end, ..segment() }.encode()).is_err());
    let (head, payload) = record();
    let late = RecordHead { seq: LogSeq(end), ..head.clone() };
    assert!(RecordHead::decode(&late.encode(&payload).0).is_err());
    let entries = vec![Entry::Versions { reserved: Version(end) }];
    assert!(RecordHead::decode(&RecordHead { entries, ..head }.encode(&[]).0).is_err());
    assert!(Descriptor::decode(&Descriptor { epoch: Epoch(end), ..descriptor() }.encode()).is_err());
}

/// Slices that wrap around, duplicate carriers, and names with invalid bytes are rejected.
#[test]
fn a_descriptor_that_breaks_arithmetic_is_refused() {
    let mut wraps = descriptor();
    wraps.members[0].len = u64::MAX;
    assert!(Descriptor::decode(&wraps.encode()).is_err());
    assert!(Descriptor::decode(&Descriptor { carriers: vec![1, 1], ..descriptor() }.encode()).is_err());
    let mut odd_name = descriptor().encode();
    odd_name[108] = 0xff;
    assert!(Descriptor::decode(&odd_name).unwrap_err().to_string().contains("UTF-8"));
    // The geometry adds to `log_bytes`; a value at the end of its type must not overflow.
    let mut long = Descriptor { log_bytes: u64::MAX, segment_bytes: 1 << 31, ..descriptor() };
    long.members.iter_mut().for_each(|member| (member.offset, member.len) = (0, u64::MAX));
    assert!(Geometry::of(&Descriptor::decode(&long.encode()).unwrap()).is_err());
}

/// A page whose stale mask names strips that the array does not have is rejected.
#[test]
fn a_page_of_strips_that_do_not_exist_is_refused() {
    for (strips, words) in [(2, vec![4, 7, 7]), (2, vec![0, 7]), (0, vec![1]), (65, vec![0; 66])] {
        let bad = TablePage { strips, words, ..page() };
        assert!(TablePage::decode(&bad.encode()).is_err(), "{bad:?}");
    }
}

/// A reference to a page at a place that there is not, with more stale strips than a stripe has, or to no
/// page is rejected.
#[test]
fn a_reference_to_a_page_that_there_cannot_be_is_refused() {
    let bad = [
        PageRef { place: 2, ..top() },
        PageRef { most_stale: 65, ..top() },
        PageRef { written: 0, ..top() },
        PageRef { written: u64::MAX, ..top() },
    ];
    for bad in bad {
        assert!(Root::decode(&Root { table: bad, ..root() }.encode()).is_err(), "{bad:?}");
        let page = IndexPage { refs: vec![bad], ..index_page() };
        assert!(IndexPage::decode(&page.encode()).is_err(), "{bad:?}");
    }
    assert!(IndexPage::decode(&IndexPage { level: 0, ..index_page() }.encode()).is_err());
}

/// A patch whose columns do not ascend is rejected.
#[test]
fn columns_that_do_not_ascend_are_refused() {
    let (head, _) = record();
    for columns in [vec![1, 0], vec![1, 1]] {
        let patch =
            StripPatch { position: Position::new(2), version: Version(13), columns, crcs: vec![5, 6] };
        let entry = Entry::Destage {
            stripe: Stripe(3),
            stale: Positions::from_bits(2),
            contained: Vec::new(),
            patches: vec![patch],
        };
        let payload = vec![Buf::zeroed(BLOCK_BYTES), Buf::zeroed(BLOCK_BYTES)];
        let (bytes, _) = RecordHead { entries: vec![entry], ..head.clone() }.encode(&payload);
        assert!(RecordHead::decode(&bytes).unwrap_err().to_string().contains("ascend"));
    }
}
