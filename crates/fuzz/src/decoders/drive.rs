//! Decoder of the superblock.

use super::{number, seal_crc};
use crate::check::{Decoder, Form, Verdict, agrees};
use penstock_base::{ArrayId, DriveId, Id128, StoreId};
use penstock_drive::copies::COPY_BYTES;
use penstock_drive::superblock::{SliceEntry, Superblock};

const HEADER_BYTES: usize = 64;

/// `superblock`: one copy of it.
pub(super) const SUPERBLOCK: Decoder = Decoder {
    name: "superblock",
    // A little longer than a copy.
    most_bytes: COPY_BYTES + 4096,
    seeds,
    seal: |bytes| seal(bytes),
    check,
};

fn seeds() -> Vec<Vec<u8>> {
    let array = |number: u8| ArrayId(Id128([number; 16]));
    let slice = |number: u8| SliceEntry {
        array: array(number),
        member: number.into(),
        extent: 0,
        offset: u64::from(number) << 20,
        len: 1 << 20,
    };
    let blank = Superblock {
        store: StoreId(Id128([1; 16])),
        drive: DriveId(Id128([2; 16])),
        seq: 5,
        size_bytes: 64 << 20,
        created_ns: 1_700_000_000_000_000_000,
        ..Superblock::default()
    };
    let full = Superblock { slices: (1..=3).map(slice).collect(), ..blank.clone() };
    [blank, full].map(|superblock| contents(&superblock)).to_vec()
}

fn contents(superblock: &Superblock) -> Vec<u8> {
    contents_of(&superblock.encode())
}

/// The bytes of one of two copies without the zeros behind its body.
pub(super) fn contents_of(copy: &[u8]) -> Vec<u8> {
    copy[..HEADER_BYTES + number(copy, 12)].to_vec()
}

pub(super) fn seal(bytes: &mut [u8]) {
    let body_end = HEADER_BYTES.saturating_add(number(bytes, 12));
    seal_crc(bytes, 48, &[HEADER_BYTES..body_end]);
    seal_crc(bytes, 52, &[0..52]);
}

fn check(bytes: &[u8]) -> Result<Verdict, String> {
    // Bytes behind the body are not looked at.
    agrees(bytes, &Form::Value, Superblock::decode, contents)
}
