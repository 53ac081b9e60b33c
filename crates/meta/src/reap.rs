//! Reaping: removes files that have no name and no user any more.
//!
//! The queue is in rows, so a crash leaks nothing. After a start a queued file has no user, except clients of
//! other processes; they report their open files again before anything is removed. A file with many chunks is
//! dropped in steps from its end. The last step deletes its inode, its extended attributes and its row in the
//! queue.

use crate::error::MetaError;
use crate::rows::{all_removed, removed_ino, removed_key, xattr_range};
use crate::target::MetaTarget;
use penstock_base::{FileKey, Ino};
use penstock_chunk::Behind;
use penstock_kv::{ROWS_AT_ONCE, WriteSet, commit_apart, for_each_key};
use std::rc::Rc;
use std::time::Duration;

/// Most chunks dropped in one transaction, beside a few other rows.
pub(crate) const STEP_CHUNKS: usize = ROWS_AT_ONCE - 16;
const RETRY: Duration = Duration::from_secs(2);
/// Delay before a removed file is dropped, if several clients use the file system.
const GRACE: Duration = Duration::from_secs(2);

impl MetaTarget {
    /// Queues the files that the last start left.
    pub(crate) async fn queue_removed(&self) -> Result<(), MetaError> {
        for_each_key(&*self.kv, all_removed(), |key| {
            self.reap_queue.borrow_mut().extend(removed_ino(key).map(|ino| (Duration::ZERO, ino)));
            Ok(())
        })
        .await
    }

    /// Queues a file if it has no name and no user.
    pub(crate) fn reap_if_removed(&self, ino: Ino) {
        let nameless = self.cache.borrow().get(ino).is_none_or(|inode| inode.nlink == 0);
        if nameless && !self.in_use.borrow().contains_key(&ino) {
            // Another client may have looked up its name just before the removal, and be about to open it.
            let due = if self.clients.are_shared() { self.env.now() + GRACE } else { Duration::ZERO };
            self.reap_queue.borrow_mut().insert((due, ino));
            self.reap_wake.notify_one();
        }
    }

    pub(crate) async fn reap_task(self: Rc<Self>) {
        while !self.closed.get() {
            let waits = self.clients.owe_opens();
            let next = if waits { None } else { self.reap_queue.borrow().first().copied() };
            let Some((due, ino)) = next else {
                self.reap_wake.notified().await;
                continue;
            };
            let rest = due.saturating_sub(self.env.now());
            if !rest.is_zero() {
                // A newly queued file may be due earlier, so the queue is looked at again.
                let _ = penstock_base::env::timeout(&self.env, rest, self.reap_wake.notified()).await;
                continue;
            }
            self.reap_queue.borrow_mut().remove(&(due, ino));
            self.reaping.set(true);
            let result = self.reap(ino).await;
            self.reaping.set(false);
            if let Err(error) = result {
                tracing::warn!(%ino, %error, "a removed file could not be dropped yet");
                self.reap_queue.borrow_mut().insert((due, ino));
                self.env.sleep(RETRY).await;
            }
        }
    }

    /// Waits until all removed files without users have been dropped.
    pub async fn wait_reaped(&self) {
        while (!self.reap_queue.borrow().is_empty() || self.reaping.get()) && !self.closed.get() {
            self.env.sleep(Duration::from_millis(5)).await;
        }
    }

    async fn reap(&self, ino: Ino) -> Result<(), MetaError> {
        let inode = match self.inode(ino).await {
            Ok(inode) => inode,
            // Already gone: a file can be queued both by its last close and by the removal of its last name.
            Err(MetaError::Posix(_)) => return Ok(()),
            Err(error) => return Err(error),
        };
        if inode.nlink > 0 || self.in_use.borrow().contains_key(&ino) {
            return Ok(());
        }
        let file = FileKey::main(ino);
        // Steps follow from the chunks that exist: the size does not give their number.
        for stop in self.target.truncate_steps(file, 0, STEP_CHUNKS).await? {
            let mut writes = WriteSet::new();
            writes.reclaims();
            self.target.truncate(file, stop..u64::MAX, Behind::Dropped, u64::MAX, writes).await?;
        }
        let _one = self.changing.lock().await;
        // Checked again: a repair may have given the file a name while this waited.
        if self.in_use.borrow().contains_key(&ino) || self.inode(ino).await?.nlink > 0 {
            return Ok(());
        }
        if !self.without_xattrs.contains(&ino) {
            let mut attributes = WriteSet::new();
            for_each_key(&*self.kv, xattr_range(ino), |key| {
                attributes.delete(key.to_vec());
                Ok::<_, MetaError>(())
            })
            .await?;
            let _open = self.gate.change().await;
            self.transactions.set(self.transactions.get() + 1);
            let gone = commit_apart(&*self.kv, std::mem::take(attributes.reclaims())).await;
            self.transactions.set(self.transactions.get() + 1);
            gone?;
        }
        let mut writes = WriteSet::new();
        writes.reclaims().delete(removed_key(ino));
        self.delete_inode(ino, &mut writes);
        self.transactions.set(self.transactions.get() + 1);
        let result = self.target.truncate(file, 0..u64::MAX, Behind::Dropped, u64::MAX, writes).await;
        self.transactions.set(self.transactions.get() + 1);
        result?;
        self.cache.borrow_mut().remove(ino);
        self.target.file_removed(file);
        Ok(())
    }
}
