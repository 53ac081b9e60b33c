//! The short form of fuzzing: every decoder for two seconds, and every input that once broke one.
//!
//! `PENSTOCK_FUZZ_SEED` selects other inputs. A failure prints the input: add it to `regressions.rs`.
#![allow(clippy::disallowed_methods)]

mod regressions;

use penstock_fuzz::campaign::{self, Limits};
use penstock_fuzz::{DECODERS, find};
use std::time::Duration;

/// Time for each decoder.
const TIME: Duration = Duration::from_secs(2);

fn short(name: &str) {
    let seed =
        std::env::var("PENSTOCK_FUZZ_SEED").map_or(1, |seed| seed.parse().expect("a seed is a number"));
    let decoder = find(name).expect("the decoder is in the table");
    let limits = Limits { executions: u64::MAX, time: TIME };
    let totals =
        campaign::run(decoder, seed, limits).unwrap_or_else(|failure| panic!("seed {seed}: {failure}"));
    println!("{name}: seed {seed}, {} executions, {} accepted", totals.executions, totals.accepted);
    assert!(totals.executions > 0, "not one input was tried");
}

macro_rules! short {
    ($($test:ident = $name:literal,)*) => {
        $(#[test]
        fn $test() {
            short($name);
        })*

        #[test]
        fn every_decoder_has_its_test() {
            let tested = [$($name),*];
            let missing = DECODERS.iter().map(|decoder| decoder.name).filter(|name| !tested.contains(name));
            assert_eq!(missing.collect::<Vec<_>>(), [""; 0]);
        }
    };
}

short! {
    superblock = "superblock",
    descriptor = "descriptor",
    label = "label",
    trailer = "trailer",
    table_page = "table-page",
    index_page = "index-page",
    root = "root",
    segment_header = "segment-header",
    log_record = "log-record",
    kv_volume = "kv-volume",
    journal_record = "journal-record",
    journal_mark = "journal-mark",
    map_row = "map-row",
    lent_row = "lent-row",
    loan_row = "loan-row",
    reserved_row = "reserved-row",
    forgotten_row = "forgotten-row",
    counter_row = "counter-row",
    file_row = "file-row",
    account_row = "account-row",
    group_row = "group-row",
    group_counts = "group-counts",
    chunk_keys = "chunk-keys",
    map_copy_anchor = "map-copy-anchor",
    map_copy_segment = "map-copy-segment",
    map_copy_rows = "map-copy-rows",
    map_copy_index = "map-copy-index",
    store_row = "store-row",
    fs_row = "fs-row",
    inode_row = "inode-row",
    entry_row = "entry-row",
    result_row = "result-row",
    session_row = "session-row",
    name_keys = "name-keys",
    header = "header",
    read_body = "read-body",
    write_body = "write-body",
    commit_body = "commit-body",
    reply_body = "reply-body",
    greeting = "greeting",
    challenge = "challenge",
    proof = "proof",
    welcome = "welcome",
    frames = "frames",
    seek_body = "seek-body",
    found_body = "found-body",
    space_body = "space-body",
    names_body = "names-body",
    coordination_json = "coordination-json",
    store_json = "store-json",
    size = "size",
    code = "code",
    id = "id",
}
