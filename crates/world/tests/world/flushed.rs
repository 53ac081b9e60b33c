//! An fsync that asserts that the drives were flushed for it.

use crate::machine::Machine;
use penstock_array::Array;
use penstock_array::format::descriptor::Role;
use penstock_base::{DriveId, FileId, StackNo};
use penstock_client::Failure;
use penstock_sim::SimDisk;
use std::rc::Rc;

/// Drives on which every array has an active member, each with its number of writes so far.
fn active_disks(machine: &Machine) -> Vec<(DriveId, Rc<SimDisk>, u64)> {
    let reports: Vec<_> = machine.node.arrays().iter().map(|array| array.report()).collect();
    let active = |drive: &DriveId| {
        let mut members = reports.iter().flat_map(|report| &report.members);
        members.all(|member| member.drive != *drive || member.state == "active")
    };
    let disks = machine.disks.borrow();
    let drives = machine.node.drives();
    let online = drives.iter().filter(|drive| drive.is_online() && active(&drive.id()));
    let with_disk = online.filter_map(|drive| Some((drive.id(), disks.get(drive.path())?)));
    with_disk.map(|(drive, disk)| (drive, disk.clone(), disk.order())).collect()
}

/// The arrays that an fsync of a file flushes for certain: those with the data of the targets that commit
/// it, and the one with the names. The rows of another target may be durable already.
fn arrays_to_flush(machine: &Machine, file: FileId) -> Vec<Rc<Array>> {
    let targets = machine.client.targets_to_commit(file);
    let is_owed = |array: &&Rc<Array>| match array.role() {
        Role::Metadata => array.stack() == StackNo::FIRST,
        Role::Data => targets.contains(&array.stack().target()),
    };
    machine.node.arrays().iter().filter(is_owed).cloned().collect()
}

/// Calls fsync, and asserts that the drives were flushed for it.
///
/// The fsync covers every write that returned before it began: log records (`log.append`) and the headers
/// of their segments (`log.segment`), strips of fresh stripes (`fresh.strip`) and their trailers
/// (`fresh.trailer`). It does not cover destage, checkpoints, rebuild and repair, for which the log is
/// the durable copy until they are flushed themselves; strips of a chunk that another task is writing
/// (`others`); and anything on a member that is recorded as stale.
pub async fn fsync(machine: &Machine, file: FileId, others: bool) -> Result<(), Failure> {
    // A file without unsynced writes needs no flush.
    let marks = if machine.client.is_unsynced(file) { active_disks(machine) } else { Vec::new() };
    let arrays = arrays_to_flush(machine, file);
    machine.client.fsync(file).await?;
    let after = active_disks(machine);
    for (drive, disk, mark) in marks {
        if !after.iter().any(|(_, other, _)| Rc::ptr_eq(other, &disk)) {
            continue;
        }
        let is_owed = |site: &&str| match *site {
            "log.append" | "log.segment" => true,
            "fresh.strip" | "fresh.trailer" => !others,
            _ => false,
        };
        let slices = arrays.iter().filter_map(|array| array.slice_of(drive));
        let pending = slices.flat_map(|(offset, len)| disk.unflushed_within(mark, &(offset..offset + len)));
        let owed: Vec<_> = pending.filter(is_owed).collect();
        assert!(owed.is_empty(), "an fsync returned and a drive has not flushed {owed:?}");
    }
    Ok(())
}
