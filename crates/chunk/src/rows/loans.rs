//! Rows of loans. A *loan* is stripes on the volume of one target, the lender, of which another one, the
//! borrower, uses the blocks like its own. Byte map: docs/format/kv.md.
//!
//! The lender's row and the bits of the blocks are durable before the borrower uses the loan, and the
//! borrower's row is gone durably before the lender's is.

use super::{GROUP_WORDS, LENT, LOAN};
use penstock_base::codec::{row_key, row_words};
use penstock_base::num::to_u32;
use penstock_base::{Dec, DecodeError, Enc, TargetId};

const FORMAT: u8 = 1;

/// The blocks of a loan.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loan {
    /// The first stripe on the volume of the lender.
    pub stripe: u64,
    /// Number of stripes, at least one.
    pub stripes: u32,
    /// Blocks of these stripes that are not lent, since the lender uses them: runs in order, as first block
    /// and count, counted from the first block of the first stripe. None if the stripes were empty.
    pub gaps: Vec<(u32, u32)>,
}

/// A loan, as its lender names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LentKey {
    /// The target that has it.
    pub borrower: TargetId,
    /// Its number, from a counter of the borrower. It is never given again.
    pub number: u64,
}

/// A loan, as its lender has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lent {
    /// The allocation group that it is at the borrower.
    pub group: u64,
    /// The blocks.
    pub loan: Loan,
    /// The row was restored from a copy: the loan may have ended since, and its blocks may be of others. If
    /// the borrower does not have it, only a repair ends it.
    pub is_restored: bool,
}

impl Lent {
    /// True if the borrower's row agrees with it.
    pub fn is(&self, group: u64, loan: &Loan) -> bool {
        self.group == group && self.loan == *loan
    }
}

/// A loan, as its borrower has it. The row also has the bits of its blocks, in the place of an allocation
/// group's row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Borrowed {
    /// The target on whose volume the blocks are.
    pub lender: TargetId,
    /// The number of the loan.
    pub number: u64,
    /// The blocks.
    pub loan: Loan,
}

impl Loan {
    fn put(&self, enc: &mut Enc) {
        enc.u64(self.stripe).u32(self.stripes).u32(to_u32(self.gaps.len()));
        for (first, count) in &self.gaps {
            enc.u32(*first).u32(*count);
        }
    }

    fn take(dec: &mut Dec<'_>) -> Result<Self, DecodeError> {
        let (stripe, stripes, count) = (dec.u64()?, dec.u32()?, dec.u32()?);
        if stripes == 0 || stripe.checked_add(stripes.into()).is_none() {
            return Err(dec.bad("a loan without stripes, or without an end"));
        }
        let mut gaps: Vec<(u32, u32)> = Vec::new();
        for _ in 0..count {
            let (first, blocks) = (dec.u32()?, dec.u32()?);
            let is_behind = gaps.last().is_none_or(|(last, len)| last + len < first);
            if blocks == 0 || first.checked_add(blocks).is_none() || !is_behind {
                return Err(dec.bad("gaps that are empty, without an end or out of order"));
            }
            gaps.push((first, blocks));
        }
        Ok(Self { stripe, stripes, gaps })
    }
}

impl Lent {
    /// Encodes the value of the lender's row.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT).u8(self.is_restored.into()).u64(self.group);
        self.loan.put(&mut enc);
        enc.finish()
    }

    /// Decodes the value of the lender's row.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("row of a loan to another target", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (is_restored, group, loan) = (dec.boolean("restored row")?, dec.u64()?, Loan::take(&mut dec)?);
        dec.end()?;
        Ok(Self { group, loan, is_restored })
    }
}

impl LentKey {
    /// The key of the lender's row.
    pub fn row(&self) -> Vec<u8> {
        row_key(LENT, &[self.borrower.0.into(), self.number])
    }

    /// Decodes the key of the lender's row.
    pub fn decode(key: &[u8]) -> Result<Self, DecodeError> {
        let what = "key of a loan to another target";
        let [borrower, number] = row_words(what, LENT, key)?;
        let borrower =
            u32::try_from(borrower).map_err(|_| DecodeError::Bad { what, why: "a target above 2^32" })?;
        Ok(Self { borrower: TargetId(borrower), number })
    }
}

impl Borrowed {
    /// The key of the borrower's row: its blocks are an allocation group of this number.
    pub fn key(group: u64) -> Vec<u8> {
        row_key(LOAN, &[group])
    }

    /// The allocation group that the key of a borrower's row names.
    pub fn group_of(key: &[u8]) -> Result<u64, DecodeError> {
        let [group] = row_words("key of a loan of another target", LOAN, key)?;
        Ok(group)
    }

    /// Encodes the value of the borrower's row with the bits of its blocks: set for those that files have.
    pub fn encode(&self, bits: &[u64]) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT).u32(self.lender.0).u64(self.number);
        self.loan.put(&mut enc);
        let words = bits.iter().rposition(|word| *word != 0).map_or(0, |last| last + 1);
        assert!(words <= GROUP_WORDS, "the bits of one group");
        enc.u32(to_u32(words));
        bits[..words].iter().for_each(|word| _ = enc.u64(*word));
        enc.finish()
    }

    /// Decodes the value of the borrower's row, with the bits of a whole group.
    pub fn decode(value: &[u8]) -> Result<(Self, Vec<u64>), DecodeError> {
        let mut dec = Dec::new("row of a loan of another target", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (lender, number) = (TargetId(dec.u32()?), dec.counter()?);
        let (loan, words) = (Loan::take(&mut dec)?, dec.u32()? as usize);
        if words > GROUP_WORDS {
            return Err(dec.bad("more bits than a group has"));
        }
        let mut bits = (0..words).map(|_| dec.u64()).collect::<Result<Vec<u64>, _>>()?;
        dec.end()?;
        if bits.last() == Some(&0) {
            return Err(DecodeError::Bad { what: "row of a loan of another target", why: "needless words" });
        }
        bits.resize(GROUP_WORDS, 0);
        Ok((Self { lender, number, loan }, bits))
    }
}

/// The range of keys of all loans that a target has given; the second key is excluded.
pub fn all_lent() -> (Vec<u8>, Vec<u8>) {
    (vec![LENT], vec![LENT + 1])
}

/// The range of keys of all loans that a target has; the second key is excluded.
pub fn all_loans() -> (Vec<u8>, Vec<u8>) {
    (vec![LOAN], vec![LOAN + 1])
}
