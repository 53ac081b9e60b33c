//! Shows the contents of a drive, structure by structure, for people who look for a fault.
//!
//! Nothing is written, and nothing has to fit together: each structure is shown as it is, or with the reason
//! why it does not decode. A drive that is in use may be inspected; what is shown may change meanwhile.

use penstock_array::format::descriptor::Descriptor;
use penstock_array::format::index_page::{IndexPage, PageRef};
use penstock_array::format::label::Label;
use penstock_array::format::record::{Entry, RecordHead};
use penstock_array::format::root::Root;
use penstock_array::format::segment::SegmentHeader;
use penstock_array::format::table_page::TablePage;
use penstock_array::format::trailer::Trailer;
use penstock_array::moves::Moves;
use penstock_array::place::SegmentNo;
use penstock_array::{Geometry, Layout, MemberNo, Positions};
use penstock_base::num::to_usize;
use penstock_base::{BLOCK_BYTES, Buf, BufMut, DecodeError, Stripe};
use penstock_drive::copies::{self, COPY_BYTES, TwoCopies};
use penstock_drive::superblock::{SliceEntry, Superblock};
use penstock_drive::{Class, Drive, DriveError, Io};
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::collections::BTreeMap;

const IO: Io = Io::new(Class::Scrub, "inspect");
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Contents that are shown beside the structures that every drive has.
#[derive(Clone, Debug, Default)]
pub struct Detail {
    /// Every record of the logs with its entries.
    pub log: bool,
    /// The entry of this stripe in each place of the table, and the trailer of its strip, in all arrays.
    pub stripe: Option<u64>,
}

/// Reads the structures of a drive. The result has an entry for each, with its fields under the names that
/// docs/format/ has, or with `problem`.
pub async fn inspect(drive: &dyn Drive, detail: &Detail) -> Value {
    let size = drive.size_bytes();
    let mut found = Map::new();
    found.insert("size_bytes".into(), size.into());
    if size < 4 * COPY_BYTES as u64 {
        found.insert("problem".into(), "too small for a superblock".into());
        return found.into();
    }
    let (superblock, shown) = both::<Superblock>(drive, 0, size, superblock_fields).await;
    found.insert("superblock".into(), shown);
    let mut slices = Vec::new();
    for entry in superblock.map(|superblock| superblock.slices).unwrap_or_default() {
        slices.push(slice(drive, &entry, detail).await);
    }
    found.insert("slices".into(), slices.into());
    found.into()
}

async fn read(drive: &dyn Drive, at: u64, len: usize) -> Result<Buf, DriveError> {
    drive.read(at, BufMut::zeroed(len), IO).await.map(BufMut::freeze)
}

/// The reason why a structure is not shown. Zeros are no damage.
fn problem(bytes: &[u8], error: &DecodeError) -> Value {
    match bytes.iter().all(|byte| *byte == 0) {
        true => json!({ "problem": "blank" }),
        false => json!({ "problem": error.to_string() }),
    }
}

/// Both copies of a structure: the one that counts, and what is shown.
async fn both<T: TwoCopies>(
    drive: &dyn Drive,
    at: u64,
    len: u64,
    fields: impl Fn(&T) -> Value,
) -> (Option<T>, Value) {
    let mut best: Option<T> = None;
    let mut shown = Map::new();
    for (number, place) in copies::places(len).into_iter().enumerate() {
        let value = match read(drive, at + place, COPY_BYTES).await {
            Err(error) => json!({ "at": at + place, "problem": error.to_string() }),
            Ok(bytes) => match T::decode(&bytes) {
                Ok(found) => {
                    let value = merged(json!({ "at": at + place, "seq": found.seq() }), fields(&found));
                    if best.as_ref().is_none_or(|best| best.seq() < found.seq()) {
                        best = Some(found);
                    }
                    value
                }
                Err(error) => merged(json!({ "at": at + place }), problem(&bytes, &error)),
            },
        };
        shown.insert(format!("copy {number}"), value);
    }
    (best, shown.into())
}

fn merged(first: Value, second: Value) -> Value {
    match (first, second) {
        (Value::Object(mut first), Value::Object(second)) => {
            first.extend(second);
            first.into()
        }
        (first, _) => first,
    }
}

fn superblock_fields(found: &Superblock) -> Value {
    let row = |slice: &SliceEntry| {
        json!({
            "array": slice.array.to_string(),
            "member": slice.member,
            "extent": slice.extent,
            "offset": slice.offset,
            "len": slice.len,
        })
    };
    json!({
        "store": found.store.to_string(),
        "drive": found.drive.to_string(),
        "pool": found.pool.to_string(),
        "size_bytes": found.size_bytes,
        "created_ns": found.created_ns,
        "compatible": found.features.compatible,
        "read_only_compatible": found.features.read_only_compatible,
        "incompatible": found.features.incompatible,
        "slices": found.slices.iter().map(row).collect::<Vec<_>>(),
    })
}

fn label_fields(found: &Label) -> Value {
    let descriptor = match found.descriptor() {
        Ok(descriptor) => descriptor_fields(&descriptor),
        Err(error) => json!({ "problem": error.to_string() }),
    };
    json!({
        "array": found.array.to_string(),
        "drive": found.drive.to_string(),
        "member": found.member,
        "compatible": found.features.compatible,
        "read_only_compatible": found.features.read_only_compatible,
        "incompatible": found.features.incompatible,
        "descriptor": descriptor,
    })
}

fn descriptor_fields(found: &Descriptor) -> Value {
    let members = found.members.iter().map(|member| {
        json!({
            "drive": member.drive.to_string(),
            "generation": member.generation,
            "epoch": member.epoch.0,
            "state": if member.stale { "stale" } else { "counts" },
            "offset": member.offset,
            "len": member.len,
        })
    });
    json!({
        "name": found.name,
        "pool": found.pool.to_string(),
        "k": found.k,
        "m": found.m,
        "strip_blocks": found.strip_blocks,
        "log_bytes": found.log_bytes,
        "segment_bytes": found.segment_bytes,
        "layout": layout_fields(&found.layout),
        "rows": found.rows,
        "epoch": found.epoch.0,
        "root_epoch": found.root_epoch.0,
        "revision": found.revision,
        "carriers_epoch": found.carriers_epoch,
        "carriers": found.carriers,
        "members": members.collect::<Vec<_>>(),
    })
}

async fn slice(drive: &dyn Drive, entry: &SliceEntry, detail: &Detail) -> Value {
    let mut shown = Map::new();
    shown.insert("array".into(), entry.array.to_string().into());
    shown.insert("offset".into(), entry.offset.into());
    let (label, value) = both::<Label>(drive, entry.offset, entry.len, label_fields).await;
    shown.insert("label".into(), value);
    let descriptor = label.and_then(|label| label.descriptor().ok());
    let found = descriptor.and_then(|found| Some((Geometry::of(&found).ok()?, found.layout)));
    let Some((geometry, layout)) = found else {
        shown.insert("problem".into(), "without a label nothing else is found".into());
        return shown.into();
    };
    let mut roots = Map::new();
    for place in 0..2 {
        let at = entry.offset + geometry.root_at(place);
        let value = block(drive, at, |bytes| Root::decode(bytes).map(|root| root_fields(&root))).await;
        roots.insert(format!("place {place}"), value);
    }
    shown.insert("roots".into(), roots.into());
    shown.insert("table".into(), table(drive, entry, &geometry).await);
    shown.insert("log".into(), log(drive, entry, &geometry, detail.log).await);
    if let Some(number) = detail.stripe {
        shown.insert(
            format!("stripe {number}"),
            stripe(drive, entry, (&geometry, &layout), Stripe(number)).await,
        );
    }
    shown.into()
}

/// A structure of one block at an offset of the drive.
async fn block(drive: &dyn Drive, at: u64, fields: impl Fn(&[u8]) -> Result<Value, DecodeError>) -> Value {
    let value = match read(drive, at, BLOCK_BYTES).await {
        Err(error) => json!({ "problem": error.to_string() }),
        Ok(bytes) => fields(&bytes).unwrap_or_else(|error| problem(&bytes, &error)),
    };
    merged(json!({ "at": at }), value)
}

fn root_fields(root: &Root) -> Value {
    json!({
        "array": root.array.to_string(),
        "seq": root.seq,
        "incarnation": root.incarnation,
        "incarnation_start": root.incarnation_start.0,
        "replay_segment": root.replay_segment,
        "replay_seq": root.replay_seq.0,
        "replay_chain": root.replay_chain,
        "durable": root.durable.0,
        "versions_reserved": root.versions_reserved.0,
        "order": root.order,
        "table": page_fields(&root.table),
        "epoch": root.epoch.0,
        "behind": root.behind.iter().map(MemberNo::number).collect::<Vec<_>>(),
    })
}

/// The copy of a page that counts.
fn page_fields(page: &PageRef) -> Value {
    json!({
        "checkpoint": page.checkpoint,
        "place": page.place,
        "crc": page.crc,
        "written_stripes": page.written,
        "most_stale_strips": page.most_stale,
        "has_moved_strips": page.has_moves,
    })
}

fn layout_fields(layout: &Layout) -> Value {
    match layout {
        Layout::Fixed(fixed) => json!({ "kind": "fixed", "groups": fixed.members() / fixed.strips() }),
        Layout::Declustered(spread) => json!({
            "kind": "declustered",
            "spares": spread.shape().spares,
            "domains": spread.shape().domains,
            "bases": spread.bases(),
        }),
    }
}

/// The strips in spare places, each with the number of its place in the row.
fn moved(moves: Moves) -> BTreeMap<u16, usize> {
    moves.iter().map(|(position, spare)| (position.number(), spare)).collect()
}

fn positions(set: Positions) -> Vec<u16> {
    set.iter().map(|position| position.number()).collect()
}

/// For each place of pages of the table and its index, how many hold a page, the newest checkpoint of them,
/// and which are damaged.
async fn table(drive: &dyn Drive, entry: &SliceEntry, geometry: &Geometry) -> Value {
    let mut shown = Map::new();
    shown.insert("pages".into(), geometry.pages().into());
    let tree = geometry.page_tree();
    let checkpoint = |page: u64, bytes: &[u8]| match tree.is_leaf(page) {
        true => TablePage::decode(bytes).map(|found| found.checkpoint),
        false => IndexPage::decode(bytes).map(|found| found.checkpoint),
    };
    for place in 0..2 {
        let (mut pages, mut blank, mut newest, mut bad) = (0u64, 0u64, None, Map::new());
        for page in 0..geometry.pages() {
            match read(drive, entry.offset + geometry.page_at(page, place), BLOCK_BYTES).await {
                Err(error) => drop(bad.insert(page.to_string(), error.to_string().into())),
                Ok(bytes) => match checkpoint(page, &bytes) {
                    Ok(found) => {
                        pages += 1;
                        newest = newest.max(Some(found));
                    }
                    Err(_) if bytes.iter().all(|byte| *byte == 0) => blank += 1,
                    Err(error) => drop(bad.insert(page.to_string(), error.to_string().into())),
                },
            }
        }
        let value = json!({ "whole": pages, "blank": blank, "newest_checkpoint": newest, "damaged": bad });
        shown.insert(format!("place {place}"), value);
    }
    shown.into()
}

/// The segments of the log in the order of their numbers.
async fn log(drive: &dyn Drive, entry: &SliceEntry, geometry: &Geometry, entries: bool) -> Value {
    let (mut segments, mut problems) = (Vec::new(), Map::new());
    let mut blank = 0u64;
    for place in 0..geometry.segments {
        let at = entry.offset + geometry.segment_at(SegmentNo(place));
        let bytes = match read(drive, at, geometry.segment_bytes as usize).await {
            Ok(bytes) => bytes,
            Err(error) => {
                problems.insert(place.to_string(), error.to_string().into());
                continue;
            }
        };
        match SegmentHeader::decode(&bytes[..BLOCK_BYTES]) {
            Ok(header) => segments.push((header.number, segment(&header, place, &bytes, entries))),
            Err(_) if bytes[..BLOCK_BYTES].iter().all(|byte| *byte == 0) => blank += 1,
            Err(error) => drop(problems.insert(place.to_string(), error.to_string().into())),
        }
    }
    segments.sort_by_key(|(number, _)| *number);
    json!({
        "places": geometry.segments,
        "blank": blank,
        "problems": problems,
        "segments": segments.into_iter().map(|(_, shown)| shown).collect::<Vec<_>>(),
    })
}

fn segment(header: &SegmentHeader, place: u64, bytes: &[u8], entries: bool) -> Value {
    let (mut at, mut chain, mut count, mut last) = (BLOCK_BYTES, header.chain, 0u64, None);
    let mut records = Vec::new();
    // Those that belong together. What lies behind them is of the segment that had the place before.
    while let Ok((head, shape)) = RecordHead::decode(bytes.get(at..).unwrap_or_default()) {
        if head.chain != chain || head.array != header.array {
            break;
        }
        if entries {
            records.push(record(&head, at));
        }
        (chain, last, count) = (shape.chain, Some(head.seq.0), count + 1);
        at += (shape.head_blocks + shape.payload_blocks) as usize * BLOCK_BYTES;
    }
    let mut shown = json!({
        "number": header.number,
        "place": place,
        "incarnation": header.incarnation,
        "first_seq": header.first_seq.0,
        "last_seq": last,
        "records": count,
        "chain": header.chain,
        "used_bytes": at,
    });
    if entries {
        shown = merged(shown, json!({ "contents": records }));
    }
    shown
}

fn record(head: &RecordHead, at: usize) -> Value {
    json!({
        "at": at,
        "seq": head.seq.0,
        "incarnation": head.incarnation,
        "durable": head.durable.0,
        "chain": head.chain,
        "entries": head.entries.iter().map(entry).collect::<Vec<_>>(),
    })
}

fn entry(entry: &Entry) -> Value {
    match entry {
        Entry::Data { stripe, order, block, crcs } => json!({
            "kind": "data", "stripe": stripe.0, "order": order, "block": block, "blocks": crcs.len(),
        }),
        Entry::Fresh { stripe, upto, version, stale, moves, contained } => json!({
            "kind": "fresh", "stripe": stripe.0, "upto": upto, "version": version.0,
            "stale": positions(*stale), "moved": moved(*moves), "contained": contained,
        }),
        Entry::Destage { stripe, stale, contained, patches } => json!({
            "kind": "destage", "stripe": stripe.0, "stale": positions(*stale), "contained": contained,
            "patches": patches.iter().map(|patch| json!({
                "position": patch.position.number(), "version": patch.version.0, "columns": patch.columns,
            })).collect::<Vec<_>>(),
        }),
        Entry::Discard { stripe, count, upto } => json!({
            "kind": "discard", "stripe": stripe.0, "count": count, "upto": upto,
        }),
        Entry::Versions { reserved } => json!({ "kind": "versions", "reserved": reserved.0 }),
        Entry::Strips { stripe, set, clear, version, moves } => json!({
            "kind": "strips", "stripe": stripe.0, "set": positions(*set), "clear": positions(*clear),
            "version": version.0, "moved": moved(*moves),
        }),
        Entry::MemberReset { member } => json!({ "kind": "member reset", "member": member.number() }),
    }
}

/// The entry of a stripe in both places of the table, and the trailer of its strip on this drive.
async fn stripe(
    drive: &dyn Drive,
    entry: &SliceEntry,
    (geometry, layout): (&Geometry, &Layout),
    stripe: Stripe,
) -> Value {
    if stripe.0 >= geometry.stripes {
        return json!({ "problem": format!("the array has {} stripes", geometry.stripes) });
    }
    let mut shown = Map::new();
    let newest = Cell::new((0, Moves::NONE));
    let (page, index) = (stripe.0 / geometry.stripes_per_page(), stripe.0 % geometry.stripes_per_page());
    for place in 0..2 {
        let at = entry.offset + geometry.page_at(page, place);
        let fields = |bytes: &[u8]| {
            TablePage::decode(bytes).map(|found| {
                let Some(entry) = found.entry(to_usize(index)) else {
                    return json!({ "problem": "the page has no such entry" });
                };
                if found.checkpoint >= newest.get().0 {
                    newest.set((found.checkpoint, entry.moves));
                }
                json!({
                    "checkpoint": found.checkpoint,
                    "stale": positions(entry.stale),
                    "moved": moved(entry.moves),
                    "versions": entry.versions,
                })
            })
        };
        shown.insert(format!("table, place {place}"), block(drive, at, fields).await);
    }
    // A drive that does not carry the table has the strip at its own place, as far as can be seen from here.
    let mut places = layout.places(stripe, newest.get().1);
    let Some(place) = places.find(|place| place.member.number() == entry.member) else {
        shown.insert("problem".into(), "no strip of it is to be on this drive".into());
        return shown.into();
    };
    let trailer = |bytes: &[u8]| {
        Trailer::decode(bytes).map(|found| {
            json!({
                "array": found.array.to_string(),
                "stripe": found.stripe.0,
                "position": found.position,
                "version": found.version.0,
                "crcs": found.crcs,
            })
        })
    };
    let at = entry.offset + geometry.trailer_at(place.row);
    shown.insert("trailer".into(), block(drive, at, trailer).await);
    shown.insert("strip_at".into(), (at - u64::from(geometry.strip_blocks) * BLOCK).into());
    shown.into()
}
