//! The layout of the data of a running store, in the terms in which it is asked for.

use crate::drive_set::DriveSet;
use crate::plan::Arrangement;
use penstock_array::Layout;
use penstock_array::format::descriptor::Role;

/// The layout of the data of a running store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DataLayout {
    /// The arrangement of stripes over the drives.
    pub arrangement: Arrangement,
    /// Failure domains: as many as drives if each one fails alone.
    pub domains: usize,
    /// Bytes of data in a strip.
    pub strip_bytes: u64,
    /// Stacks of the store, each with a target.
    pub stacks: u16,
    /// The layout in a few words.
    pub layout: String,
}

impl DataLayout {
    /// That of the data array; none if it has none.
    pub fn of(drives: &DriveSet) -> Option<Self> {
        let arrays = drives.arrays();
        let data = arrays.iter().find(|array| array.role() == Role::Data)?;
        let layout = data.layout();
        let (arrangement, domains) = match layout {
            Layout::Fixed(_) => (Arrangement::Groups(layout.members() / layout.strips()), layout.members()),
            Layout::Declustered(spread) => {
                (Arrangement::Declustered { spares: layout.spares() }, spread.shape().domains)
            }
        };
        let strip_bytes = data.geometry().strip_bytes() as u64;
        let stacks = drives.stacks();
        Some(Self { arrangement, domains, strip_bytes, stacks, layout: layout.describe() })
    }
}
