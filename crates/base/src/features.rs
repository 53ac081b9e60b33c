//! Feature bits of structures that outlive a release.
//!
//! Format: docs/format/README.md.

use crate::{Dec, DecodeError, Enc};

/// A compatible feature of a key-value store: rows of sessions may be those of gateways. A release that does
/// not know it takes such a session for one that has ended.
pub const GATEWAYS: u64 = 1;

/// An incompatible feature of superblocks, labels and key-value stores: the store has several stacks. A
/// release that does not know it would look for all data in one.
pub const STACKS: u64 = 1;

/// Features that this release understands, of all three classes.
const KNOWN: Features = Features { compatible: GATEWAYS, read_only_compatible: 0, incompatible: STACKS };

/// Feature bits. A release that does not know a bit may use the structure only as the class of the bit
/// permits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Features with which an older release may read and write. It drops the bit when it writes, because it
    /// did not maintain the feature.
    pub compatible: u64,
    /// Features with which an older release may only read. This release only opens for writing, and refuses
    /// them.
    pub read_only_compatible: u64,
    /// Features with which an older release must not use the structure.
    pub incompatible: u64,
}

impl Features {
    /// The features of a structure that says that there are several stacks, or that there is one.
    pub fn of_stacks(are_several: bool) -> Self {
        Self { incompatible: if are_several { STACKS } else { 0 }, ..Self::default() }
    }

    /// Fails if a structure says that there are several stacks and does not have their feature.
    pub fn check_stacks(&self, dec: &Dec<'_>, are_several: bool) -> Result<(), DecodeError> {
        match are_several && self.incompatible & STACKS == 0 {
            true => Err(dec.bad("several stacks without their feature")),
            false => Ok(()),
        }
    }

    /// Appends the three sets.
    pub fn encode(&self, enc: &mut Enc) {
        enc.u64(self.compatible).u64(self.read_only_compatible).u64(self.incompatible);
    }

    /// Decodes the three sets, whatever they are.
    pub fn decode(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (compatible, read_only_compatible, incompatible) = (dec.u64()?, dec.u64()?, dec.u64()?);
        Ok(Self { compatible, read_only_compatible, incompatible })
    }

    /// Fails with [`DecodeError::Unknown`] if a bit forbids this release to write.
    pub fn check(&self, dec: &Dec<'_>) -> Result<(), DecodeError> {
        let unknown = (self.incompatible & !KNOWN.incompatible)
            | (self.read_only_compatible & !KNOWN.read_only_compatible);
        dec.check_known("feature bits", unknown, 0)
    }

    /// The features after a change by this release.
    #[must_use]
    pub fn maintained(self) -> Self {
        Self { compatible: self.compatible & KNOWN.compatible, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_that_forbid_writing_are_refused_and_the_others_dropped_by_a_change() {
        let none = Features::default();
        for (features, is_refused) in [
            (none, false),
            (Features { compatible: 4 | GATEWAYS, ..none }, false),
            (Features { read_only_compatible: 4, ..none }, true),
            (Features { incompatible: 1 << 63, ..none }, true),
            (Features { incompatible: STACKS, ..none }, false),
        ] {
            let mut enc = Enc::new();
            features.encode(&mut enc);
            let bytes = enc.finish();
            let mut dec = Dec::new("a test", &bytes);
            assert_eq!((Features::decode(&mut dec), dec.left()), (Ok(features), 0));
            assert_eq!(features.check(&dec).is_err(), is_refused, "{features:?}");
            let kept = features.compatible & GATEWAYS;
            assert_eq!(features.maintained(), Features { compatible: kept, ..features });
        }
    }
}
