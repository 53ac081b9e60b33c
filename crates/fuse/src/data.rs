//! Requests on the contents of files.

use crate::abi::{ReadIn, WRITE_KILL_SUIDGID, WriteIn, WriteOut};
use crate::attr::errno;
use crate::device::{Answer, Request};
use crate::names::opened;
use crate::session::Session;
use rustix::io::Errno;

impl Session {
    pub(crate) async fn open(&self, request: &Request) -> Result<Answer, Errno> {
        let result = self.client.open(self.ino(request)).await;
        result.map(|()| Answer::of(&opened())).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn release(&self, request: &Request) -> Result<Answer, Errno> {
        let result = self.client.release(self.ino(request)).await;
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn read(&self, request: &Request) -> Result<Answer, Errno> {
        let ReadIn { offset, size, .. } = request.argument()?;
        let result = self.client.read(self.ino(request), offset, size.into()).await;
        result.map(Answer::Data).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn write(&self, request: &mut Request) -> Result<Answer, Errno> {
        let WriteIn { offset, write_flags, .. } = request.argument()?;
        let (data, len) = request.data.take().ok_or(Errno::IO)?;
        let ino = self.ino(request);
        if write_flags & WRITE_KILL_SUIDGID != 0 {
            self.client.drop_set_id(ino).await.map_err(|failure| errno(&failure))?;
        }
        let result = self.client.write_staged(ino, offset, data, len).await;
        let written = WriteOut { size: len as u32, padding: 0 };
        result.map(|()| Answer::of(&written)).map_err(|failure| errno(&failure))
    }

    pub(crate) async fn fsync(&self, request: &Request) -> Result<Answer, Errno> {
        let result = self.client.fsync(self.ino(request)).await;
        result.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }

    /// What this client wrote before comes first: a name never outlives the data it was made for.
    pub(crate) async fn fsyncdir(&self) -> Result<Answer, Errno> {
        self.client.sync_all().await.map(|()| Answer::Done).map_err(|failure| errno(&failure))
    }
}
