//! Coordination of one node: the claims of its arrays in a file of the store's folder.
//!
//! Byte map: docs/format/README.md.

use penstock_array::ownership::{AcceptedLoss, Claim, ClaimError, Generations, Ownership, Since};
use penstock_array::{MemberNo, MemberSet};
use penstock_base::num::to_u32;
use penstock_base::{ArrayId, Dec, DecodeError, Enc, Epoch, LocalBoxFuture, crc32c};
use penstock_worker::blocking;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::Mutex;

/// The claim of one array. States of members are lists, so that they hold for any number of members.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    epoch: u64,
    revision: u64,
    /// Members recorded as stale.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    stale: Vec<u16>,
    /// By member, the openings that used a drive with contents of the past.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    accepted: BTreeMap<u16, (u64, u64)>,
    /// Members for which the last opening uses such a drive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    accepted_used: Vec<u16>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    generations: BTreeMap<u16, u64>,
    #[serde(default, skip_serializing_if = "is_zero")]
    root_epoch: u64,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

fn numbers(members: MemberSet) -> Vec<u16> {
    members.iter().map(MemberNo::number).collect()
}

/// The members with these numbers; none if one of them is out of range.
fn members(numbers: &[u16]) -> Option<MemberSet> {
    numbers.iter().map(|number| MemberNo::of_number(*number)).collect()
}

/// The claim of each array.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Claims(pub BTreeMap<ArrayId, Claim>);

impl Claims {
    /// Encodes the claims as JSON.
    pub fn encode(&self) -> Result<Vec<u8>, serde_json::Error> {
        let row = |(array, claim): (&ArrayId, &Claim)| {
            let row = Row {
                epoch: claim.epoch.0,
                revision: claim.revision,
                stale: numbers(claim.stale),
                accepted: claim
                    .accepted
                    .members()
                    .map(|(at, since)| (at.number(), (since.first.0, since.until.0)))
                    .collect(),
                accepted_used: numbers(claim.accepted.used()),
                generations: claim
                    .generations
                    .replaced()
                    .map(|(at, generation)| (at.number(), generation))
                    .collect(),
                root_epoch: claim.root_epoch.0,
            };
            (array.to_string(), row)
        };
        serde_json::to_vec(&self.0.iter().map(row).collect::<BTreeMap<_, _>>())
    }

    /// Decodes the claims. The error is the reason why they cannot be decoded.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let rows: BTreeMap<String, Row> = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let claim = |(array, row): (String, Row)| {
            let id = array.parse().map_err(|error| format!("{array}: {error}"))?;
            let accepted = row.accepted.values().flat_map(|(first, until)| [*first, *until]);
            let generations = row.generations.values().copied();
            if accepted
                .chain(generations)
                .chain([row.epoch, row.revision, row.root_epoch])
                .any(|counter| counter >> 63 != 0)
            {
                return Err(format!("{array}: a counter above 2^63"));
            }
            let since = |(first, until)| Since { first: Epoch(first), until: Epoch(until) };
            let since = row.accepted.into_iter().map(|(member, epochs)| (member, since(epochs)));
            let accepted = members(&row.accepted_used)
                .and_then(|used| AcceptedLoss::new(since, used))
                .ok_or_else(|| format!("{array}: a member number out of range, or an epoch of 0"))?;
            let generations = Generations::new(row.generations).ok_or_else(|| {
                format!("{array}: a member number out of range, or a drive that replaced no other")
            })?;
            let (epoch, revision) = (Epoch(row.epoch), row.revision);
            let stale =
                members(&row.stale).ok_or_else(|| format!("{array}: a member number out of range"))?;
            let root_epoch = Epoch(row.root_epoch);
            let claim = Claim { epoch, revision, stale, accepted, generations, root_epoch };
            Ok((ArrayId(id), claim))
        };
        rows.into_iter().map(claim).collect::<Result<_, String>>().map(Self)
    }
}

/// Name of the file in the store's folder.
pub const NAME: &str = "coordination";
/// Size of each of the two places of the file, in bytes.
const PLACE_BYTES: usize = 4 * 1024 * 1024;
const MAGIC: &[u8; 8] = b"PENCLAM3";
/// Magic numbers from before the first release, and the sizes of a place then.
const PAST: [(&[u8; 8], usize); 2] = [(b"PENCLAIM", 64 * 1024), (b"PENCLAM2", 1024 * 1024)];
const HEADER_BYTES: usize = 28;

/// Version of the file.
const VERSION: u32 = 1;

/// The contents of one place of the file.
#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// No complete record.
    Nothing,
    /// The claims, with their sequence number.
    Claims(u64, Claims),
    /// A complete record that this release does not understand: why.
    Unknown(String),
}

/// Encodes one place of the file: the claims with their sequence number, under a checksum.
fn encode_place(seq: u64, claims: &Claims) -> Result<Vec<u8>, String> {
    let body = claims.encode().map_err(|error| error.to_string())?;
    if HEADER_BYTES + body.len() > PLACE_BYTES {
        return Err(format!("claims of {} arrays take more than {PLACE_BYTES} bytes", claims.0.len()));
    }
    let mut covered = Enc::new();
    covered.u32(VERSION).u64(seq).u32(to_u32(body.len())).raw(&body);
    let mut place = Enc::new();
    place.raw(MAGIC).u32(crc32c(covered.as_slice())).raw(covered.as_slice());
    Ok(place.finish())
}

/// Decodes one place.
fn decode_place(bytes: &[u8]) -> Place {
    let header = |dec: &mut Dec<'_>| {
        let is_place = dec.raw(8)? == MAGIC;
        let (crc, version, seq, len) = (dec.u32()?, dec.u32()?, dec.counter()?, dec.u32()?);
        Ok::<_, DecodeError>(is_place.then_some((crc, version, seq, len as usize)))
    };
    let mut dec = Dec::new("claims", bytes);
    let Ok(Some((crc, version, seq, len))) = header(&mut dec) else { return Place::Nothing };
    let Some(body) = dec.raw(len).ok().filter(|_| crc32c(&bytes[12..HEADER_BYTES + len]) == crc) else {
        return Place::Nothing;
    };
    match Claims::decode(body) {
        _ if version != VERSION => Place::Unknown(format!("version {version}")),
        Ok(claims) => Place::Claims(seq, claims),
        Err(why) => Place::Unknown(why),
    }
}

/// Claims in the file [`NAME`]. The folder's lock keeps other processes away.
///
/// The file is allocated when it is made, and written in place after that. Each change is written to the
/// place that does not contain the newest claims, so a full host cannot prevent a change, and a power cut
/// leaves the claims from before or after it. Writes block, and are executed outside the worker.
pub struct FileOwnership {
    path: PathBuf,
    file: Arc<File>,
    claims: RefCell<Claims>,
    /// Sequence number of the last change; locked while a change is written.
    seq: Mutex<u64>,
}

impl FileOwnership {
    /// Opens the claims in `dir`. A missing file is no error, since labels have epochs of their own.
    pub fn open(dir: &Path) -> Result<Self, String> {
        let path = dir.join(NAME);
        let fail = |error: std::io::Error| format!("{}: {error}", path.display());
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.open(&path).map_err(fail)?;
        let mut bytes = Vec::new();
        (&file).take(2 * PLACE_BYTES as u64).read_to_end(&mut bytes).map_err(fail)?;
        let is_at = |at: usize, magic: &[u8]| bytes.get(at..).is_some_and(|rest| rest.starts_with(magic));
        if PAST.iter().any(|(magic, place)| is_at(0, *magic) || is_at(*place, *magic)) {
            let why = "made before the first release: such a store is not read any more";
            return Err(format!("{}: {why}", path.display()));
        }
        let mut newest: Option<(usize, u64, Claims)> = None;
        for (number, place) in bytes.chunks(PLACE_BYTES).map(decode_place).enumerate() {
            match place {
                Place::Nothing => {}
                Place::Claims(seq, claims) if newest.as_ref().is_none_or(|(_, best, _)| *best < seq) => {
                    newest = Some((number * PLACE_BYTES, seq, claims));
                }
                Place::Claims(..) => {}
                // It may be the newest.
                Place::Unknown(why) => {
                    return Err(format!(
                        "{} is of a later release ({why}): start the store with that one",
                        path.display()
                    ));
                }
            }
        }
        let (newest_at, seq, claims) = match newest {
            Some((at, seq, claims)) => (Some(at), seq, claims),
            None if bytes.iter().all(|byte| *byte == 0) => (None, 0, Claims::default()),
            None => {
                return Err(format!(
                    "{} is damaged in both places; remove it to rely on the drives alone",
                    path.display()
                ));
            }
        };
        if bytes.len() < 2 * PLACE_BYTES {
            bytes.resize(2 * PLACE_BYTES, 0);
            file.write_all_at(&bytes, 0).and_then(|()| file.sync_all()).map_err(fail)?;
            File::open(dir).and_then(|dir| dir.sync_all()).map_err(fail)?;
        }
        // A process may have written the newest place whose sync failed or did not begin: it may lie in a
        // cache alone. It must be durable before the next claim overwrites the other place.
        if let Some(at) = newest_at {
            file.write_all_at(&bytes[at..at + PLACE_BYTES], at as u64).map_err(fail)?;
        }
        file.sync_data().map_err(fail)?;
        Ok(Self { path, file: Arc::new(file), claims: RefCell::new(claims), seq: Mutex::new(seq) })
    }

    fn claim(&self, array: ArrayId) -> Claim {
        self.claims.borrow().0.get(&array).cloned().unwrap_or_default()
    }

    async fn try_swap(&self, array: ArrayId, expected: Claim, next: Claim) -> Result<(), ClaimError> {
        let mut seq = self.seq.lock().await;
        let found = self.claim(array);
        if found != expected {
            return Err(ClaimError::Changed(Box::new(found)));
        }
        let mut claims = self.claims.borrow().clone();
        claims.0.insert(array, next);
        let unavailable =
            |error: String| ClaimError::Unavailable(format!("{}: {error}", self.path.display()));
        let bytes = encode_place(*seq + 1, &claims).map_err(unavailable)?;
        if !matches!(decode_place(&bytes), Place::Claims(..)) {
            return Err(unavailable("what would be written could not be read back".into()));
        }
        let at = (*seq + 1) % 2 * PLACE_BYTES as u64;
        let file = self.file.clone();
        let write = move || file.write_all_at(&bytes, at).and_then(|()| file.sync_data());
        blocking(write).await.map_err(|error| unavailable(error.to_string()))?;
        *seq += 1;
        *self.claims.borrow_mut() = claims;
        Ok(())
    }
}

impl Ownership for FileOwnership {
    fn current(&self, array: ArrayId) -> LocalBoxFuture<'_, Result<Claim, ClaimError>> {
        let claim = self.claim(array);
        Box::pin(async move { Ok(claim) })
    }

    fn swap(
        &self,
        array: ArrayId,
        expected: Claim,
        next: Claim,
    ) -> LocalBoxFuture<'_, Result<(), ClaimError>> {
        Box::pin(self.try_swap(array, expected, next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::Id128;
    use penstock_worker::block_on;

    fn claim(revision: u64) -> Claim {
        Claim { epoch: Epoch(1), revision, ..Claim::default() }
    }

    fn swap(claims: &FileOwnership, from: u64, to: u64) -> Result<(), ClaimError> {
        let from = if from == 0 { Claim::default() } else { claim(from) };
        block_on(claims.swap(ARRAY, from, claim(to))).expect("a worker")
    }

    const ARRAY: ArrayId = ArrayId(Id128([5; 16]));

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("penstock-claims-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            Self(dir)
        }

        fn corrupt(&self, at: u64, bytes: &[u8]) {
            let file = OpenOptions::new().write(true).open(self.0.join(NAME)).unwrap();
            file.write_all_at(bytes, at).unwrap();
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            std::fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn a_change_that_was_cut_short_leaves_the_claims_before_it() {
        let folder = Folder::new("cut");
        {
            let claims = FileOwnership::open(&folder.0).unwrap();
            swap(&claims, 0, 1).unwrap();
            swap(&claims, 1, 2).unwrap();
            assert!(matches!(swap(&claims, 1, 3), Err(ClaimError::Changed(found)) if *found == claim(2)));
        }
        assert_eq!(FileOwnership::open(&folder.0).unwrap().claim(ARRAY), claim(2));
        // The change with sequence number 2 is in place 0. A record is shorter than 100 bytes.
        let inside = HEADER_BYTES as u64 + 10;
        folder.corrupt(inside, b"torn");
        let claims = FileOwnership::open(&folder.0).unwrap();
        assert_eq!(claims.claim(ARRAY), claim(1));
        swap(&claims, 1, 7).unwrap();
        assert_eq!(FileOwnership::open(&folder.0).unwrap().claim(ARRAY), claim(7));
        folder.corrupt(inside, b"torn");
        folder.corrupt(PLACE_BYTES as u64 + inside, b"torn");
        assert!(FileOwnership::open(&folder.0).is_err());
    }

    /// Regression: the file had room for the claims of few arrays.
    #[test]
    fn the_longest_claims_of_128_arrays_have_room() {
        let most = (1u64 << 62) - 1;
        let since = Since { first: Epoch(most), until: Epoch(most) };
        let claim = Claim {
            epoch: Epoch(most),
            revision: most,
            stale: MemberSet::first(256),
            accepted: AcceptedLoss::new((0..256).map(|at| (at, since)), MemberSet::first(256)).unwrap(),
            generations: Generations::new((0..256).map(|at| (at, most))).unwrap(),
            root_epoch: Epoch(most),
        };
        let claims = Claims((0..128).map(|at| (ArrayId(Id128::from_words(7, at)), claim.clone())).collect());
        let place = encode_place(9, &claims).unwrap();
        assert_eq!(decode_place(&place), Place::Claims(9, claims));
    }

    /// Regression: the advice for a file of a later release was to remove it, which gives up what it says.
    #[test]
    fn claims_of_a_later_release_are_refused_by_name() {
        let good = encode_place(9, &Claims::default()).unwrap();
        let seal = |mut place: Vec<u8>| {
            let crc = crc32c(&place[12..]);
            place[8..12].copy_from_slice(&crc.to_le_bytes());
            place
        };
        let mut version = good.clone();
        version[12] = 2;
        let field = br#"{"05050505050505050505050505050505":{"epoch":1,"revision":2,"new":3}}"#;
        let mut new = good[..HEADER_BYTES - 4].to_vec();
        new.extend_from_slice(&(field.len() as u32).to_le_bytes());
        new.extend_from_slice(field);
        for (name, place) in [("version", seal(version)), ("field", seal(new))] {
            let folder = Folder::new(&format!("later-{name}"));
            std::fs::write(folder.0.join(NAME), place).unwrap();
            let error = FileOwnership::open(&folder.0).err().unwrap();
            assert!(error.contains("of a later release") && !error.contains("remove"), "{error}");
        }
    }

    #[test]
    fn claims_from_before_the_first_release_are_refused_by_name() {
        for (magic, size, place) in
            PAST.into_iter().flat_map(|(magic, size)| [(magic, size, 0), (magic, size, size)])
        {
            let folder = Folder::new(&format!("past-{size}-{place}"));
            let mut bytes = vec![0; 2 * size];
            bytes[place..place + 8].copy_from_slice(magic);
            std::fs::write(folder.0.join(NAME), bytes).unwrap();
            let error = FileOwnership::open(&folder.0).err().unwrap();
            assert!(error.contains("before the first release"), "{error}");
        }
    }

    /// A file that was being made during a power cut contains no claims yet.
    #[test]
    fn a_file_that_was_not_finished_is_empty() {
        let folder = Folder::new("new");
        std::fs::write(folder.0.join(NAME), vec![0; 5000]).unwrap();
        let claims = FileOwnership::open(&folder.0).unwrap();
        assert_eq!(std::fs::metadata(folder.0.join(NAME)).unwrap().len(), 2 * PLACE_BYTES as u64);
        swap(&claims, 0, 1).unwrap();
    }
}
