//! The trait of a byte stream to another process, and sending and receiving over it.

use crate::SEND_PATIENCE;
use crate::frame::{FrameError, Outbox, Receiver};
use penstock_base::env::timeout;
use penstock_base::{Env, LocalBoxFuture};
use penstock_wire::Frame;
use std::cell::RefCell;
use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use tokio::sync::Notify;

/// A byte stream with non-blocking reads and writes, and separate waits for readiness. At most one reader and
/// one writer at a time.
pub trait Link {
    /// Reads available bytes. Returns `WouldBlock` if there are none, and 0 at the end of the stream.
    fn try_read(&self, spaces: &mut [IoSliceMut<'_>]) -> io::Result<usize>;
    /// Writes as many bytes as fit. Returns `WouldBlock` if none fit.
    fn try_write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Waits until a read may return data.
    fn readable(&self) -> LocalBoxFuture<'_, io::Result<()>>;
    /// Waits until a write may accept data.
    fn writable(&self) -> LocalBoxFuture<'_, io::Result<()>>;
    /// Closes both directions. Waits for readiness at both ends return.
    fn close(&self);
}

/// The reason why a connection ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Lost {
    #[error("the other end closed it")]
    End,
    #[error("the other end closed it in the middle of a message")]
    Torn,
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the other end accepted no data for {} s", SEND_PATIENCE.as_secs())]
    Slow,
    #[error("{0}")]
    Said(String),
}

async fn read_some(link: &dyn Link, spaces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    loop {
        match link.try_read(spaces) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => link.readable().await?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Receives the next frame.
pub(crate) async fn receive(link: &dyn Link, receiver: &mut Receiver) -> Result<Frame, Lost> {
    loop {
        let count = read_some(link, &mut receiver.spaces()).await?;
        if count == 0 {
            return Err(if receiver.is_inside() { Lost::Torn } else { Lost::End });
        }
        if let Some(frame) = receiver.filled(count)? {
            return Ok(frame);
        }
    }
}

/// Receives until `bytes` is full. Bytes behind them stay in the stream.
pub(crate) async fn receive_exact(link: &dyn Link, bytes: &mut [u8]) -> Result<(), Lost> {
    let mut at = 0;
    while at < bytes.len() {
        match read_some(link, &mut [IoSliceMut::new(&mut bytes[at..])]).await? {
            0 => return Err(Lost::End),
            count => at += count,
        }
    }
    Ok(())
}

/// Sends all of `bytes`.
pub(crate) async fn send_all(link: &dyn Link, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match link.try_write(&[IoSlice::new(bytes)]) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => link.writable().await?,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Sends the frames of the outbox until the connection is lost. `wake` reports that a frame was added. With
/// `rest` it returns when the outbox is empty.
pub(crate) async fn send<H>(
    env: &Env,
    link: &dyn Link,
    outbox: &RefCell<Outbox<H>>,
    wake: &Notify,
    rest: bool,
) -> Lost {
    loop {
        if outbox.borrow().is_empty() {
            if rest {
                return Lost::End;
            }
            wake.notified().await;
            continue;
        }
        let sent = link.try_write(&outbox.borrow().slices());
        match sent {
            Ok(count) => outbox.borrow_mut().sent(count),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                match timeout(env, SEND_PATIENCE, link.writable()).await {
                    Some(Ok(())) => {}
                    Some(Err(error)) => return error.into(),
                    None => return Lost::Slow,
                }
            }
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return error.into(),
        }
    }
}
