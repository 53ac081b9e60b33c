//! Rows of counters: of loans, and of what snapshots will need, which this release only decodes, so that a
//! check names what a later release wrote.

use super::{LOANS, SEQUENCE};
use penstock_base::codec::{row_key, row_words};
use penstock_base::{Dec, DecodeError, Enc};

const FORMAT: u8 = 1;

/// A counter, with its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counter {
    /// The sequence of a family.
    Sequence {
        /// The family.
        family: u32,
        /// The birth of what is written now. The target takes no part in an older cut.
        sequence: u64,
        /// Rows of births up to this one do not change any more; below the sequence.
        closed: u64,
    },
    /// Numbers of loans.
    Loans {
        /// The highest number under which this target may have asked another one for a loan. It is recorded
        /// durably before a number is used.
        last: u64,
        /// Loans up to this number that the target does not have may have been forgotten by a restore. Only a
        /// repair ends them.
        forgotten: u64,
        /// A repair has dropped loans, and rows of files may still name their blocks: no loan begins until
        /// somebody has looked.
        has_dropped: bool,
    },
}

impl Counter {
    /// Key and value of the row.
    pub fn encode(&self) -> (Vec<u8>, Vec<u8>) {
        let mut enc = Enc::new();
        enc.u8(FORMAT);
        let key = match *self {
            Self::Sequence { family, sequence, closed } => {
                enc.u64(sequence).u64(closed);
                row_key(SEQUENCE, &[family.into()])
            }
            Self::Loans { last, forgotten, has_dropped } => {
                enc.u64(last).u64(forgotten).u8(has_dropped.into());
                row_key(LOANS, &[])
            }
        };
        (key, enc.finish())
    }

    /// Decodes a row. Fails with [`DecodeError::Unknown`] if it is no counter.
    pub fn decode(key: &[u8], value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("counter of a target", value);
        let tag = key.first().copied().unwrap_or_default();
        if ![SEQUENCE, LOANS].contains(&tag) {
            return Err(dec.unknown("kind", tag.into()));
        }
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let counter = match tag {
            SEQUENCE => {
                let [family] = row_words("key of a sequence", tag, key)?;
                let family = u32::try_from(family).map_err(|_| dec.bad("a family above 2^32"))?;
                let (sequence, closed) = (dec.counter()?, dec.counter()?);
                if closed >= sequence {
                    return Err(dec.bad("what is written now is closed"));
                }
                Self::Sequence { family, sequence, closed }
            }
            _ => {
                let [] = row_words("key of a counter", tag, key)?;
                let (last, forgotten) = (dec.counter()?, dec.counter()?);
                if forgotten > last {
                    return Err(dec.bad("loans that were never given"));
                }
                let has_dropped = dec.boolean("dropped loans")?;
                Self::Loans { last, forgotten, has_dropped }
            }
        };
        dec.end()?;
        Ok(counter)
    }
}
