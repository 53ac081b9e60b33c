//! The blocks of all files by owner, as their rows have them.
//!
//! Invariant: the sum of the rows of all files of an owner in a branch is its account. Both change in one
//! transaction; the caller lets one transaction at a time change them, and undoes one that failed.

use crate::ChunkError;
use crate::rows::{
    FileRow, MOST_BLOCKS, Owner, all_accounts, decode_account, decode_account_key, encode_account,
};
use penstock_base::Branch;
use penstock_kv::{Kv, WriteSet, for_each};
use std::cell::RefCell;
use std::collections::BTreeMap;

type Key = (Branch, Owner);

/// The accounts of one target.
#[derive(Default)]
pub(crate) struct Accounts(RefCell<BTreeMap<Key, u64>>);

/// The accounts that a transaction changes, as they were before it.
#[must_use]
pub(crate) struct AccountChange(Vec<(Key, u64)>);

impl Accounts {
    /// Reads all accounts; false if a row cannot be read. That counts as none until a repair counts again.
    pub(crate) async fn load(kv: &dyn Kv) -> Result<(BTreeMap<Key, u64>, bool), ChunkError> {
        let (mut all, mut is_whole) = (BTreeMap::new(), true);
        for_each(kv, all_accounts(), |key, value| {
            match decode_account_key(key).and_then(|key| Ok((key, decode_account(value)?))) {
                Ok((key, blocks)) => drop(all.insert(key, blocks)),
                Err(error) => {
                    is_whole = false;
                    tracing::error!(%error, "an account cannot be read: `penstock fs check --repair` counts again");
                }
            }
            Ok::<_, ChunkError>(())
        })
        .await?;
        Ok((all, is_whole))
    }

    /// Replaces all accounts by those that were read.
    pub(crate) fn set(&self, all: BTreeMap<Key, u64>) {
        *self.0.borrow_mut() = all;
    }

    /// All accounts with blocks.
    pub(crate) fn all(&self) -> BTreeMap<Key, u64> {
        self.0.borrow().clone()
    }

    /// Counts a file of a branch by its new row in place of the old one, and puts the rows of accounts that
    /// change into `writes`.
    pub(crate) fn change(
        &self,
        branch: Branch,
        old: Option<FileRow>,
        new: Option<FileRow>,
        writes: &mut WriteSet,
    ) -> AccountChange {
        let mut all = self.0.borrow_mut();
        let of = |row: Option<FileRow>| row.filter(|row| row.blocks > 0).map(|row| (row.owner, row.blocks));
        let mut before: Vec<(Key, u64)> = Vec::new();
        let mut note = |all: &BTreeMap<Key, u64>, key: Key| {
            if before.iter().all(|(known, _)| *known != key) {
                before.push((key, all.get(&key).copied().unwrap_or(0)));
            }
        };
        if let Some((owner, blocks)) = of(old) {
            note(&all, (branch, owner));
            let account = all.entry((branch, owner)).or_default();
            if *account < blocks {
                tracing::error!(account, blocks, "an account has too few blocks: `penstock fs check`");
            }
            *account = account.saturating_sub(blocks);
        }
        if let Some((owner, blocks)) = of(new) {
            note(&all, (branch, owner));
            let account = all.entry((branch, owner)).or_default();
            *account = account.saturating_add(blocks).min(MOST_BLOCKS);
        }
        for ((branch, owner), was) in &before {
            match all.get(&(*branch, *owner)).copied().unwrap_or(0) {
                // Also if there was none: its row may be one that cannot be read.
                0 => {
                    all.remove(&(*branch, *owner));
                    writes.delete(owner.account(*branch));
                }
                now if now == *was => {}
                now => drop(writes.put(owner.account(*branch), encode_account(now))),
            }
        }
        assert!(
            before.iter().all(|(key, _)| all.get(key).is_none_or(|blocks| *blocks > 0)),
            "an account without blocks is none"
        );
        assert!(before.len() <= 2, "a file has one owner before and one after");
        AccountChange(before)
    }

    /// Undoes the last [`Accounts::change`].
    pub(crate) fn undo(&self, change: AccountChange) {
        let mut all = self.0.borrow_mut();
        for (key, blocks) in change.0 {
            match blocks {
                0 => drop(all.remove(&key)),
                blocks => drop(all.insert(key, blocks)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(uid: u32, blocks: u64) -> Option<FileRow> {
        Some(FileRow { truncations: 0, blocks, owner: Owner { uid, gid: 1, project: 0 }, owner_number: 0 })
    }

    fn of(uid: u32) -> Key {
        (Branch::MAIN, Owner { uid, gid: 1, project: 0 })
    }

    /// Regression: an account that was lacking or too low stopped the process when the last blocks of its
    /// owner were freed, again after each start.
    #[test]
    fn an_account_that_is_lacking_or_too_low_ends_without_a_row() {
        for (has, old, new, expected) in [
            (None, row(1, 5), None, vec![]),
            (None, row(1, 5), row(1, 2), vec![(of(1), 2)]),
            (None, row(1, 5), row(2, 5), vec![(of(2), 5)]),
            (Some(3), row(1, 5), None, vec![]),
            (Some(3), row(1, 3), None, vec![]),
            (Some(MOST_BLOCKS), None, row(1, 9), vec![(of(1), MOST_BLOCKS)]),
        ] {
            let accounts = Accounts::default();
            accounts.set(has.into_iter().map(|blocks| (of(1), blocks)).collect());
            let mut writes = WriteSet::new();
            let _ = accounts.change(Branch::MAIN, old, new, &mut writes);
            assert_eq!(accounts.all(), expected.iter().copied().collect(), "{has:?}, {old:?} to {new:?}");
            let account = of(1).1.account(Branch::MAIN);
            let is_deleted = writes.changes().any(|(key, value)| key == account && value.is_none());
            assert_eq!(is_deleted, !expected.contains(&(of(1), 2)) && has != Some(MOST_BLOCKS));
        }
    }

    #[test]
    fn blocks_move_between_accounts_and_back() {
        let accounts = Accounts::default();
        let change = |old, new| {
            let mut writes = WriteSet::new();
            let change = accounts.change(Branch::MAIN, old, new, &mut writes);
            (change, writes.changes().count())
        };
        assert_eq!(change(None, row(1, 5)).1, 1);
        assert_eq!(change(row(1, 5), row(1, 5)).1, 0, "nothing changes");
        assert_eq!(change(None, row(2, 0)).1, 0, "no block is no account");
        assert_eq!(change(None, row(2, 3)).1, 1);
        let (undone, written) = change(row(1, 5), row(2, 9));
        assert_eq!((written, accounts.all()), (2, BTreeMap::from([(of(2), 12)])));
        accounts.undo(undone);
        assert_eq!(accounts.all(), BTreeMap::from([(of(1), 5), (of(2), 3)]));
        let (_, written) = change(row(1, 5), None);
        assert_eq!((written, accounts.all()), (1, BTreeMap::from([(of(2), 3)])));
    }
}
