//! Labels of an array's slices: reading and writing them, and those that a drive did not take yet.

use crate::format::descriptor::Descriptor;
use crate::format::label::Label;
use crate::place::{MemberNo, MemberSet};
use crate::ranks;
use crate::site::Site;
use penstock_base::rank::RankedMutex;
use penstock_base::{ArrayId, BufMut, DecodeError, Epoch};
use penstock_drive::copies::{self, COPY_BYTES, FoundCopies, Scrubbed};
use penstock_drive::{DriveError, Slice};
use std::cell::Cell;

/// The contents of the places of a label.
#[derive(Clone, Debug)]
pub enum FoundLabel {
    /// The label of the array on this drive.
    Label(Label),
    /// No label, or one that another array or another drive left there.
    Blank,
    /// No copy of it is whole.
    Damaged(DecodeError),
    /// A label that this release does not understand.
    Unknown(DecodeError),
}

impl FoundLabel {
    /// The epoch of the owner that wrote it; none if nothing says that the slice is of the array as it is. An
    /// error if this release does not understand the label or its descriptor.
    pub(crate) fn epoch(&self) -> Result<Option<Epoch>, DecodeError> {
        match self {
            Self::Label(label) => match label.descriptor() {
                Ok(descriptor) => Ok(Some(descriptor.epoch)),
                Err(error @ DecodeError::Unknown { .. }) => Err(error),
                Err(_) => Ok(None),
            },
            Self::Blank | Self::Damaged(_) => Ok(None),
            Self::Unknown(error) => Err(error.clone()),
        }
    }
}

/// Reads the label of a slice. An error if what can be read is not whole and the rest cannot be read.
pub async fn read_label(slice: &Slice, array: ArrayId) -> Result<FoundLabel, DriveError> {
    let drive = slice.drive().id();
    let is_wanted = |label: &Label| (label.array, label.drive) == (array, drive);
    match copies::read(slice, copies::places(slice.len()), is_wanted).await {
        FoundCopies { unknown: Some(error), .. } => Ok(FoundLabel::Unknown(error)),
        FoundCopies { best: Some(label), .. } => Ok(FoundLabel::Label(label)),
        FoundCopies { unread: Some(error), .. } => Err(error),
        FoundCopies { damaged: Some(error), .. } => Ok(FoundLabel::Damaged(error)),
        FoundCopies { .. } => Ok(FoundLabel::Blank),
    }
}

/// Writes both labels of a member's slice with this descriptor.
pub(crate) async fn write_first(
    slice: &Slice,
    descriptor: &Descriptor,
    member: MemberNo,
) -> Result<(), DriveError> {
    write(slice, &Label::new(descriptor, member)).await
}

/// Writes both copies of a label.
async fn write(slice: &Slice, label: &Label) -> Result<(), DriveError> {
    assert_eq!(label.drive, slice.drive().id(), "a label names the drive on which it lies");
    copies::write(slice, copies::places(slice.len()), label).await
}

/// Writes zeros over both places of the label: nothing on the slice counts. It proves that the drive takes
/// writes there.
pub async fn clear_label(slice: &Slice) -> Result<(), DriveError> {
    let io = Site::LabelClear.io();
    for place in copies::places(slice.len()) {
        slice.write(place, BufMut::zeroed(COPY_BYTES).freeze(), io).await?;
    }
    slice.flush(io).await
}

/// The labels of one slice since it is in its place. One task at a time writes them.
pub(crate) struct Labelling(RankedMutex<Option<Label>>);

impl Labelling {
    pub(crate) fn new() -> Self {
        Self(RankedMutex::new(ranks::LABEL, None))
    }

    /// Writes the label that `make` returns once no other one is being written. Returns false if it returns
    /// none: the slice was replaced meanwhile.
    pub(crate) async fn write(
        &self,
        slice: &Slice,
        make: impl FnOnce() -> Option<Label>,
    ) -> Result<bool, DriveError> {
        let mut last = self.0.lock().await;
        let Some(label) = make() else { return Ok(false) };
        let is_newer = |last: &Label| last.revision <= label.revision;
        assert!(last.as_ref().is_none_or(is_newer), "a label goes forwards");
        // Before it is written: after an error the drive may have it in one of the places.
        write(slice, last.insert(label)).await?;
        Ok(true)
    }

    /// Verifies both copies of the label that was last written, and rewrites both if one is bad.
    pub(crate) async fn scrub(&self, slice: &Slice) -> Scrubbed {
        match &*self.0.lock().await {
            Some(label) => copies::scrub(slice, copies::places(slice.len()), label).await,
            None => Scrubbed::default(),
        }
    }
}

/// Members that count, or may count, and did not take their label. Each is owed one until it takes it, or its
/// drive is gone.
#[derive(Default)]
pub(crate) struct OwedLabels(Cell<MemberSet>);

impl OwedLabels {
    /// Adds a member. Returns false if it was owed one before.
    pub(crate) fn add(&self, member: MemberNo) -> bool {
        let owed = self.0.get();
        self.0.set(owed.with(MemberSet::one(member)));
        !owed.contains(member)
    }

    /// A member took its label.
    pub(crate) fn remove(&self, member: MemberNo) {
        self.0.set(self.0.get().without(MemberSet::one(member)));
    }

    /// The members.
    pub(crate) fn all(&self) -> MemberSet {
        self.0.get()
    }
}
