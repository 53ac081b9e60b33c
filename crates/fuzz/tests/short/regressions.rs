//! Inputs that once broke a decoder, each with its defect. Decoders handle all of them correctly today.

use penstock_fuzz::{Verdict, campaign, find, hex};

/// The defect, the decoder, and an input that must be refused.
const REGRESSIONS: [(&str, &str, &str); 13] = [
    (
        "a counter of a root was counted on from its last value",
        "root",
        "50524f543e7176760100000004030207a7a7a7a7a7a7a7a7a7a7ada7a7a7a7a7d100000000000000020000000000\
         00002800000000000000ffffffffffffffff21000000000000002c0000000000000000001000000000004d0000ff\
         ffff7f0000000004 *3996",
    ),
    (
        "the number of a segment was counted on from its last value",
        "segment-header",
        "50534547e508218a01000000040302010008000000000000a7a7a7a7a7a7a7a7ffffffffffffffff210000000000\
         0000020004000000000009 *4039",
    ),
    (
        "the sequence of a record was counted on from its last value",
        "log-record",
        "50524543afeb2712a7a7a7ffffffffffffffffa7a7a7a7a70200000000000000fffffffffffffffffffa0b0a0100\
         01002c000000000000000000000028000000070000020900000000000000000000000000000001 *4011",
    ),
    (
        "the end of an extent in its chunk overflowed",
        "map-row",
        "01f5ffffffffffffff020000000000007fff000000000200000005000000010000004d0000000000000000010000\
         0006000000fa000000000002000001000000fa0000a99ce87ddad4f1fb89e7d68364d6ed8d5173b899e5bc291732\
         f7daf9541af53d3ef2",
    ),
    (
        "the end of an extent on the volume overflowed",
        "map-row",
        "02000000000000000000 01000000 00000000 02000000 ffffffffffffffff 00",
    ),
    (
        "a key with the tag of another row was read as an allocation group's",
        "chunk-keys",
        "200000000000000001",
    ),
    (
        "a name that is not UTF-8 was read as another name",
        "fs-row",
        "0103030303030303030303030303030303ffffffffffffffff040404040904040404040404040404040110000000\
         000100020000000000000000010000080000006772b4b6c39f6572000000006772b4b6c39f6572 *66",
    ),
    (
        "the size of a file was divided by chunks of no blocks",
        "inode-row",
        "010700000000000100ffa100000100000002000000030000000400000005000000000000000100000000000000fe\
         ffffffffffffff030000000000000004000000000000000600000000000000080000000000000009000000000000\
         0000000000000000000101060000006f0072676574",
    ),
    (
        "a commit of a branch was not refused by name",
        "commit-body",
        "0700000000000000 0200000000000100 *32 0100000000000000",
    ),
    (
        "a chunk index was multiplied by the blocks of a chunk",
        "read-body",
        "0000000000000000 0200000000000100 *32 ffffffffffffffff 00000000 01000000 0000000000000000",
    ),
    (
        "a sign passed for a digit of an id",
        "id",
        "2b30303030303030303761376137613761372b37613730303030303030303030",
    ),
    ("a sign passed for a digit of a size", "size", "2b31"),
    ("a sign passed for a digit of a code", "code", "382b2b33"),
];

/// The defect, the decoder, and an input that must be accepted.
const ACCEPTED: [(&str, &str, &str); 2] = [
    (
        "the range of the last inode's chunks overflowed",
        "chunk-keys",
        "200000000000000000ffffffffffffffff00000000000000030000000000000001",
    ),
    (
        "the range of the last inode's attributes overflowed",
        "name-keys",
        "110000000000000000fffffffffffffffffffffffffffffffffffffffffffffffe",
    ),
];

#[test]
fn what_once_broke_a_decoder_does_not_any_more() {
    for (verdict, cases) in [(Verdict::Refused, &REGRESSIONS[..]), (Verdict::Accepted, &ACCEPTED[..])] {
        for (what, name, text) in cases {
            let decoder = find(name).expect("the decoder is in the table");
            let input = hex::decode(text).expect("the input is written in hexadecimal digits");
            let found =
                campaign::execute(decoder, &input).unwrap_or_else(|failure| panic!("{what}: {failure}"));
            assert_eq!(found, verdict, "{what}");
        }
    }
}
