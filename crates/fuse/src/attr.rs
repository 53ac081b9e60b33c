//! Converts attributes, times and failures into the kernel's structures and error numbers.

use crate::abi::{AttrFields, AttrOut, EntryOut, StatxOut, StatxTime};
use crate::nodes::Nodes;
use penstock_base::num::{to_u16, to_u32};
use penstock_base::{BLOCK_BYTES, ErrorKind};
use penstock_client::{Attr, Failure};
use penstock_wire::metadata::Time;
use rustix::fs::StatxFlags;
use rustix::io::Errno;
use std::time::Duration;

/// The longest time for which the kernel may keep names and attributes. The first other client waits that
/// long.
pub(crate) const VALID: Duration = Duration::from_secs(1);
/// The kernel counts expiry in ticks, and may be one late.
pub(crate) const TICKS: Duration = Duration::from_millis(50);

/// A time as the kernel has it.
fn time(time: Time) -> (u64, u32) {
    (time.sec.cast_unsigned(), time.nsec)
}

/// A time from the kernel.
pub(crate) fn time_of(seconds: u64, nsec: u32) -> Time {
    Time { sec: seconds.cast_signed(), nsec }
}

pub(crate) fn fields(nodes: &Nodes, attr: &Attr) -> AttrFields {
    let ((atime, atimensec), (mtime, mtimensec), (ctime, ctimensec)) =
        (time(attr.atime), time(attr.mtime), time(attr.ctime));
    AttrFields {
        ino: nodes.shown(attr.file()),
        size: attr.size,
        blocks: attr.blocks.saturating_mul(BLOCK_BYTES as u64 / 512),
        atime,
        mtime,
        ctime,
        atimensec,
        mtimensec,
        ctimensec,
        mode: attr.mode,
        nlink: attr.nlink,
        uid: attr.uid,
        gid: attr.gid,
        rdev: attr.rdev,
        blksize: to_u32(BLOCK_BYTES),
        flags: 0,
    }
}

/// Builds the reply to GETATTR and SETATTR.
pub(crate) fn attributes(nodes: &Nodes, attr: &Attr, valid: Duration) -> AttrOut {
    AttrOut { attr_valid: valid.as_secs(), attr_valid_nsec: 0, dummy: 0, attr: fields(nodes, attr) }
}

/// Builds the reply to STATX: the fields of GETATTR and the birth time.
pub(crate) fn extended(nodes: &Nodes, attr: &Attr, valid: Duration) -> StatxOut {
    let plain = fields(nodes, attr);
    let time = |Time { sec, nsec }| StatxTime { sec, nsec, reserved: 0 };
    StatxOut {
        attr_valid: valid.as_secs(),
        mask: (StatxFlags::BASIC_STATS | StatxFlags::BTIME).bits(),
        blksize: plain.blksize,
        nlink: plain.nlink,
        uid: plain.uid,
        gid: plain.gid,
        // A mode consists of type and permissions only, which fit 16 bits.
        mode: to_u16(plain.mode & 0xffff),
        ino: plain.ino,
        size: plain.size,
        blocks: plain.blocks,
        atime: time(attr.atime),
        btime: time(attr.btime),
        ctime: time(attr.ctime),
        mtime: time(attr.mtime),
        // As the kernel packs them into 32 bits.
        rdev_major: plain.rdev >> 8 & 0xfff,
        rdev_minor: plain.rdev & 0xff | plain.rdev >> 12 & 0xf_ff00,
        ..StatxOut::default()
    }
}

/// Builds the reply to every request that finds or creates a name, with the times for which the kernel may
/// keep the name and the attributes. Counts it as a lookup.
pub(crate) fn entry(nodes: &Nodes, attr: &Attr, valid: (Duration, Duration)) -> EntryOut {
    entry_of(nodes.looked_up(attr), nodes, attr, valid)
}

/// Builds the reply to a lookup that must not name the file it has found: with a number that no node has.
pub(crate) fn stranger(nodes: &Nodes, attr: &Attr) -> EntryOut {
    entry_of(nodes.stranger(), nodes, attr, (Duration::ZERO, Duration::ZERO))
}

fn entry_of(nodeid: u64, nodes: &Nodes, attr: &Attr, (name, valid): (Duration, Duration)) -> EntryOut {
    EntryOut {
        nodeid,
        generation: 0,
        entry_valid: name.as_secs(),
        attr_valid: valid.as_secs(),
        entry_valid_nsec: 0,
        attr_valid_nsec: 0,
        attr: fields(nodes, attr),
    }
}

/// Returns the error number of a failure: its own, or the one that fits its kind.
pub(crate) fn errno(failure: &Failure) -> Errno {
    if failure.errno != 0 {
        return Errno::from_raw_os_error(failure.errno.into());
    }
    match failure.kind {
        ErrorKind::NoSpace => Errno::NOSPC,
        ErrorKind::Invalid => Errno::INVAL,
        ErrorKind::Denied => Errno::ACCESS,
        ErrorKind::Ended => Errno::STALE,
        ErrorKind::Retry
        | ErrorKind::RefreshMap
        | ErrorKind::Fenced
        | ErrorKind::Corrupt
        | ErrorKind::Internal => {
            tracing::error!(kind = ?failure.kind, %failure, "a file operation failed");
            Errno::IO
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_far_from_it_come_back() {
        for sec in [0, 1, -1, 1 << 40, i64::MIN, i64::MAX] {
            let at = Time { sec, nsec: 999_999_999 };
            let (seconds, rest) = time(at);
            assert_eq!(time_of(seconds, rest), at);
        }
        let before = Time::from_ns(-1);
        assert_eq!((before.sec, before.nsec, before.is_valid()), (-1, 999_999_999, true));
    }
}
