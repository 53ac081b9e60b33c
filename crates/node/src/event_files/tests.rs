//! Tests of event files: appending, rotation, torn ends and numbers after an unclean end.

use super::*;
use std::sync::atomic::{AtomicU32, Ordering};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A folder that is removed when this is dropped.
struct Dir(PathBuf);

impl Dir {
    fn new() -> Self {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("penstock-events-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn event(seq: u64, kind: EventKind) -> Event {
    Event {
        seq,
        time_ns: 5,
        severity: Severity::Info,
        kind,
        object: "node".into(),
        text: "a \"text\"\nhere".into(),
    }
}

fn numbers(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.seq).collect()
}

#[test]
fn numbers_go_on_and_an_end_without_stop_is_known() {
    let dir = Dir::new();
    let mut kept = EventFiles::open(&dir.0).unwrap();
    assert_eq!((kept.next_seq, kept.unclean, kept.torn_lines), (1, false, 0));
    kept.files.append(&[event(1, EventKind::Started), event(2, EventKind::Stopped)]).unwrap();
    // A start that failed does not hide whether the instance before it ended in order.
    let mut kept = EventFiles::open(&dir.0).unwrap();
    assert_eq!((kept.next_seq, kept.unclean), (3, false));
    kept.files.append(&[event(3, EventKind::StartFailed)]).unwrap();
    let mut kept = EventFiles::open(&dir.0).unwrap();
    assert_eq!((kept.next_seq, kept.unclean), (4, false));
    kept.files.append(&[event(4, EventKind::Started)]).unwrap();
    let kept = EventFiles::open(&dir.0).unwrap();
    assert_eq!((kept.next_seq, kept.unclean), (5 + SKIPPED_NUMBERS, true));
    assert_eq!(numbers(&kept.recent), [1, 2, 3, 4]);
    assert_eq!(kept.recent[0], event(1, EventKind::Started));
    assert_eq!(numbers(&EventFiles::read_after(&dir.0, 1, 2).unwrap()), [2, 3]);
}

#[test]
fn every_cut_of_the_file_opens_and_keeps_the_whole_lines() {
    let dir = Dir::new();
    let mut kept = EventFiles::open(&dir.0).unwrap();
    kept.files.append(&[event(1, EventKind::Started), event(2, EventKind::Health)]).unwrap();
    let path = dir.0.join(NEW);
    let whole = std::fs::read(&path).unwrap();
    for len in 0..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        let lines = whole[..len].iter().filter(|byte| **byte == b'\n').count();
        let mut kept = EventFiles::open(&dir.0).unwrap();
        assert_eq!(kept.recent.len(), lines.saturating_sub(1), "cut at {len}");
        let torn = len > 0 && whole[len - 1] != b'\n';
        assert_eq!(kept.torn_lines, u64::from(torn), "cut at {len}");
        // Events that are appended behind a torn end are found again.
        kept.files.append(&[event(9, EventKind::Started)]).unwrap();
        let again = EventFiles::open(&dir.0).unwrap();
        assert_eq!((again.torn_lines, numbers(&again.recent).last()), (0, Some(&9)), "cut at {len}");
    }
}

#[test]
fn a_line_of_noise_is_skipped_and_counted_and_foreign_files_are_refused() {
    let dir = Dir::new();
    let mut kept = EventFiles::open(&dir.0).unwrap();
    kept.files.append(&[event(1, EventKind::Started)]).unwrap();
    let path = dir.0.join(NEW);
    let mut bytes = std::fs::read(&path).unwrap();
    bytes.extend(b"{\"seq\":\xff\n");
    let later = String::from_utf8(serde_json::to_vec(&event(2, EventKind::Stopped)).unwrap()).unwrap();
    bytes.extend(later.replace("\"stopped\"", "\"invented_later\"").bytes().chain([b'\n']));
    std::fs::write(&path, &bytes).unwrap();
    let kept = EventFiles::open(&dir.0).unwrap();
    assert_eq!((kept.torn_lines, numbers(&kept.recent)), (1, vec![1, 2]));
    assert_eq!(kept.recent[1].kind, EventKind::Unknown);
    std::fs::write(&path, "{\"penstock_events\":2}\n").unwrap();
    assert!(EventFiles::open(&dir.0).err().unwrap().contains("later release"));
    std::fs::write(&path, "something else\n").unwrap();
    assert!(EventFiles::open(&dir.0).err().unwrap().contains("move it away"));
}

#[test]
fn two_files_hold_the_newest_and_no_more_than_their_bound() {
    let dir = Dir::new();
    let mut kept = EventFiles::open(&dir.0).unwrap();
    kept.files.most_bytes = 4096;
    for seq in 1..=200 {
        kept.files.append(&[event(seq, EventKind::Health)]).unwrap();
    }
    for name in [OLD, NEW] {
        assert!(std::fs::metadata(dir.0.join(name)).unwrap().len() <= 4096, "{name}");
    }
    let found = EventFiles::read_after(&dir.0, 0, 1000).unwrap();
    assert!(found.len() > 20 && found.len() < 200, "{}", found.len());
    assert_eq!(numbers(&found), (201 - found.len() as u64..=200).collect::<Vec<_>>());
    // A power cut between the two renames of a rotation.
    std::fs::rename(dir.0.join(NEW), dir.0.join(OLD)).unwrap();
    let kept = EventFiles::open(&dir.0).unwrap();
    assert_eq!(kept.next_seq, 201 + SKIPPED_NUMBERS);
}

#[test]
fn the_line_of_an_event_is_as_documented() {
    let mut event = event(7, EventKind::DriveFailed);
    (event.severity, event.text) = (Severity::Warning, "why".into());
    let line = serde_json::to_string(&event).unwrap();
    assert_eq!(
        line,
        r#"{"seq":7,"time_ns":5,"severity":"warning","kind":"drive_failed","object":"node","text":"why"}"#
    );
}
