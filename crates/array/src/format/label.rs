//! The label of a slice: what an array's owner changes. Two copies, one at each end of the slice.
//! Byte map: docs/format/label.md.

use super::descriptor::Descriptor;
use crate::place::MemberNo;
use penstock_base::{ArrayId, Buf, Dec, DecodeError, DriveId, Enc, Features, StackNo};
use penstock_drive::copies::{self, Kind, Sites, TwoCopies};

const KIND: Kind = Kind { what: "label", magic: b"PENLABEL", version: 1 };

/// The label of one slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Label {
    /// The array.
    pub array: ArrayId,
    /// The drive on which the slice lies. A label of another drive is what a former use of the place left, or
    /// a copy of that drive.
    pub drive: DriveId,
    /// The number of the slice among the array's members.
    pub member: u16,
    /// The revision of the descriptor, which is the sequence of the label.
    pub revision: u64,
    /// Feature bits.
    pub features: Features,
    /// The encoded descriptor.
    pub descriptor: Vec<u8>,
}

impl Label {
    /// The label of a member, with this descriptor.
    pub fn new(descriptor: &Descriptor, member: MemberNo) -> Self {
        Self {
            array: descriptor.array,
            drive: descriptor.members[member.index()].drive,
            member: member.number(),
            revision: descriptor.revision,
            features: Features::of_stacks(descriptor.stack != StackNo::FIRST),
            descriptor: descriptor.encode(),
        }
    }

    /// Decodes the descriptor. It must be of the label's array and revision.
    pub fn descriptor(&self) -> Result<Descriptor, DecodeError> {
        let found = Descriptor::decode(&self.descriptor)?;
        self.features.check_stacks(&Dec::new("label", &[]), found.stack != StackNo::FIRST)?;
        match (found.array, found.revision) == (self.array, self.revision) {
            true => Ok(found),
            false => {
                Err(DecodeError::Bad { what: "label", why: "a descriptor of another array or revision" })
            }
        }
    }
}

impl TwoCopies for Label {
    const SITES: Sites =
        Sites { read: "label.read", again: "label.again", copies: ["label.copy0", "label.copy1"] };

    fn seq(&self) -> u64 {
        self.revision
    }

    fn encode(&self) -> Buf {
        let mut body = Enc::new();
        body.id(self.array.0).id(self.drive.0).u16(self.member).raw(&[0; 6]).bytes(&self.descriptor);
        copies::seal(&KIND, self.revision, &self.features, body.as_slice())
    }

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let (revision, features, body) = copies::unseal(&KIND, bytes)?;
        let mut dec = Dec::new("label body", body);
        let (array, drive, member) = (ArrayId(dec.id()?), DriveId(dec.id()?), dec.u16()?);
        dec.zeros("padding", 6)?;
        let descriptor = dec.bytes()?.to_vec();
        dec.end()?;
        Ok(Self { array, drive, member, revision, features, descriptor })
    }

    fn is_same(&self, found: &Self) -> bool {
        (self.array, self.drive) == (found.array, found.drive)
    }
}
