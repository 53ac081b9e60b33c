//! Fetches attributes and states of files, updated with this client's unsynced size and time.

use crate::file_state::{FileState, SharedState};
use crate::session::{Era, Session};
use penstock_base::{ErrorKind, FileId};
use penstock_wire::metadata::{Attr, AttrReply, GetAttrRequest};
use penstock_wire::{Failure, Kind};

const EIO: u16 = 5;

impl Session {
    /// Returns the state of a file, fetched if it is unknown or stale. The caller owns the file's lease.
    pub(crate) async fn state(&self, file: FileId) -> Result<SharedState, Failure> {
        if let Some(state) = self.files().get(file).filter(|state| !state.borrow().is_stale()) {
            return Ok(state);
        }
        let reply = self.ask_attributes(file, false).await?;
        let attr = reply.attr.unwrap_or_default();
        let fetched = FileState::of(&attr, self.targets().spread_of(&attr));
        self.files().with(file, |known| {
            if known.is_stale() {
                if known.has_unsynced_writes()
                    && known.truncations() == fetched.truncations()
                    && known.size() > fetched.size()
                {
                    // They were written before a restart of the service, and were sent to it again.
                    known.resent(&fetched);
                    return;
                }
                known.refresh(&fetched);
            }
        });
        Ok(self.files().get_or_make(file, || fetched))
    }

    /// Asks the service for attributes, after all other clients have synced the file. With `lease` also for a
    /// lease on them, if there is a kernel.
    pub(crate) async fn ask_attributes(&self, file: FileId, lease: bool) -> Result<AttrReply, Failure> {
        let lease = lease && self.kernel().is_there();
        let ask = async |ticket| {
            let era = self.era();
            let request = GetAttrRequest { ino: file.ino.0, ticket, lease };
            let reply: AttrReply = self.ask(Kind::GetAttr, file.branch, &request).await?;
            self.take_leases(era, &reply.attr);
            Ok::<_, Failure>(reply)
        };
        loop {
            let _place = self.place_for_attributes().await;
            let era = self.era();
            let mut ticket = self.tickets().begin();
            let reply = ask(ticket.number()).await?;
            if !reply.wait {
                return Ok(reply);
            }
            match ticket.ended().await {
                Some(0) => {
                    let reply = ask(0).await?;
                    if self.era() == era {
                        return Ok(reply);
                    }
                }
                Some(errno) => {
                    let message = "another client cannot sync its changes of the file".into();
                    let errno = u16::try_from(errno).unwrap_or(EIO);
                    return Err(Failure { kind: ErrorKind::Internal, errno, message });
                }
                None => {}
            }
        }
    }

    /// Takes the leases on attributes in a reply to a request that was made in this era.
    pub(crate) fn take_leases<'a>(&self, era: Era, attrs: impl IntoIterator<Item = &'a Attr>) {
        if self.era() == era {
            let now = self.env().now();
            attrs.into_iter().for_each(|attr| self.leases().take_attributes(attr, now));
        }
    }

    /// Counts an open of a file with these attributes.
    pub(crate) fn note_open(&self, attr: &Attr) {
        let file = attr.file();
        let is_covered = self.leases().covers(file);
        let opened = FileState::of(attr, self.targets().spread_of(attr));
        let make = || {
            let mut state = opened.clone();
            if !is_covered {
                state.make_stale();
            }
            state
        };
        let state = self.files().get_or_make(file, make);
        state.borrow_mut().take_layout(&opened);
        state.borrow_mut().open();
    }

    /// Returns the attributes in a reply to a request made after `mark`, updated with this client's unsynced
    /// size and time.
    pub(crate) async fn newest(&self, mut mark: u64, reply: AttrReply) -> Result<Attr, Failure> {
        let mut attr = reply.attr.unwrap_or_default();
        while self.recent().since(mark, attr.file()) {
            mark = self.recent().mark();
            // Boxed: it is rare, and would make each request larger.
            attr = Box::pin(self.ask_attributes(attr.file(), true)).await?.attr.unwrap_or_default();
        }
        self.files().overlay(&mut attr);
        Ok(attr)
    }

    /// Returns the attributes of an inode.
    pub(crate) async fn attributes(&self, file: FileId) -> Result<Attr, Failure> {
        if let Some(dir) = self.last_dir().get(file, self.owns_all(), self.env().now()) {
            return Ok(dir);
        }
        let mark = self.recent().mark();
        self.newest(mark, self.ask_attributes(file, true).await?).await
    }
}
