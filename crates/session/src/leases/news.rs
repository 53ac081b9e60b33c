//! News for a session: the reply to its next Watch, besides the calls that it must answer.
//!
//! Every item has a number of the one counter of the leases, and stays until the session has reported a
//! number as high: a reply may be lost with its connection. So an item may be told twice.

use penstock_base::{FileId, HashMap};
use penstock_wire::metadata::{Granted, Synced, Unlocked, WatchReply};
use std::collections::BTreeMap;

/// News for one session.
#[derive(Debug, Default)]
pub(super) struct News {
    /// Leases that it waited for, by grant.
    granted: BTreeMap<u64, (FileId, bool)>,
    /// Tickets that are done, by number, each with an errno; 0 if all have synced.
    synced: BTreeMap<u64, (u64, u16)>,
    /// The files on which it may try again to get a lock, by number, and the number of each.
    unlocked: BTreeMap<u64, FileId>,
    unlocks: HashMap<FileId, u64>,
    /// Requests that were refused before this number may succeed now.
    again: Option<u64>,
}

impl News {
    /// It gets a lease that it waited for.
    pub(super) fn grant(&mut self, grant: u64, file: FileId, exclusive: bool) {
        self.granted.insert(grant, (file, exclusive));
    }

    /// Others have synced the file for which it waited under this ticket, or failed with an errno.
    pub(super) fn sync(&mut self, number: u64, ticket: u64, errno: u16) {
        self.synced.insert(number, (ticket, errno));
    }

    /// A lock of the file may be free.
    pub(super) fn unlock(&mut self, number: u64, file: FileId) {
        if let Some(before) = self.unlocks.insert(file, number) {
            self.unlocked.remove(&before);
        }
        self.unlocked.insert(number, file);
    }

    /// Requests that were refused may succeed now.
    pub(super) fn again(&mut self, number: u64) {
        self.again = Some(number);
    }

    /// The session has received everything up to this number.
    pub(super) fn seen(&mut self, upto: u64) {
        self.granted = self.granted.split_off(&upto.saturating_add(1));
        self.synced = self.synced.split_off(&upto.saturating_add(1));
        let later = self.unlocked.split_off(&upto.saturating_add(1));
        for file in std::mem::replace(&mut self.unlocked, later).into_values() {
            self.unlocks.remove(&file);
        }
        self.again = self.again.filter(|number| *number > upto);
    }

    /// The number of items.
    pub(super) fn len(&self) -> usize {
        self.granted.len() + self.synced.len() + self.unlocked.len()
    }

    /// The numbers of the first items, `most` of each kind.
    pub(super) fn numbers(&self, most: usize) -> impl Iterator<Item = u64> {
        let kinds = self.granted.keys().take(most).chain(self.synced.keys().take(most));
        kinds.chain(self.unlocked.keys().take(most)).copied().chain(self.again)
    }

    /// True if there is nothing to tell.
    pub(super) fn is_empty(&self) -> bool {
        self.granted.is_empty() && self.synced.is_empty() && self.unlocked.is_empty() && self.again.is_none()
    }

    /// The reply with everything up to this number.
    pub(super) fn reply(&self, upto: u64) -> WatchReply {
        let granted = self.granted.range(..=upto).map(|(grant, (file, exclusive))| Granted {
            grant: *grant,
            ino: file.ino.0,
            branch: file.branch.0,
            exclusive: *exclusive,
        });
        let synced = self.synced.range(..=upto).map(|(number, (ticket, errno))| Synced {
            number: *number,
            ticket: *ticket,
            errno: (*errno).into(),
        });
        let unlocked = self.unlocked.range(..=upto).map(|(number, file)| Unlocked {
            ino: file.ino.0,
            branch: file.branch.0,
            number: *number,
        });
        WatchReply {
            granted: granted.collect(),
            synced: synced.collect(),
            unlocked: unlocked.collect(),
            again: self.again.filter(|number| *number <= upto).unwrap_or_default(),
            ..WatchReply::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn news_stay_until_they_are_seen() {
        let file = |ino| FileId::of_numbers(0, ino);
        let mut news = News::default();
        news.grant(3, file(7), true);
        news.sync(4, 9, 28);
        news.unlock(5, file(8));
        news.unlock(6, file(8));
        news.again(7);
        news.again(8);
        let told = |news: &News| {
            let reply = news.reply(u64::MAX);
            let unlocked: Vec<u64> = reply.unlocked.iter().map(|unlocked| unlocked.number).collect();
            (reply.granted.len(), reply.synced.len(), unlocked, reply.again)
        };
        // Columns: the number that the session reports, and what is left.
        for (seen, left) in [
            (0, (1, 1, vec![6], 8)),
            (2, (1, 1, vec![6], 8)),
            (3, (0, 1, vec![6], 8)),
            (4, (0, 0, vec![6], 8)),
            (6, (0, 0, vec![], 8)),
            (7, (0, 0, vec![], 8)),
        ] {
            news.seen(seen);
            assert_eq!(told(&news), left, "{seen} is seen");
            assert!(news.numbers(9).all(|number| number > seen) && news.reply(seen) == WatchReply::default());
            assert_eq!(news.unlocked.len(), news.unlocks.len());
            assert!(!news.is_empty());
        }
        news.seen(u64::MAX);
        assert!(news.is_empty() && told(&news) == (0, 0, vec![], 0));
    }
}
