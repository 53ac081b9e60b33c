//! Serves each request of the kernel as a future on the worker.
//!
//! The worker that owns the client reads the device itself, so that no request changes threads. The kernel
//! bounds the requests in flight: [`MAX_BACKGROUND`](crate::MAX_BACKGROUND), and one for each waiting thread.

use crate::abi::{WRITE_CACHE, WriteIn, op};
use crate::device::{Answer, Inbox, Received, Request};
use crate::latency::Op;
use crate::session::Session;
use crate::{dead, listing, locks};
use futures_util::future::{Either, select};
use penstock_base::Env;
use penstock_base::env::yield_now;
use rustix::io::Errno;
use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

/// Serves requests until the file system is unmounted.
pub(crate) async fn run(session: Rc<Session>, env: Env) -> io::Result<()> {
    let mut inbox = Inbox::new();
    loop {
        match session.device.receive(&mut inbox)? {
            Received::Request(request) => {
                session.polling.called();
                match request.header.opcode {
                    op::INIT => session.init(*request),
                    _ => {
                        session.cache.serving.set(session.cache.serving.get() + 1);
                        if !matches!(request.header.opcode, op::FORGET | op::BATCH_FORGET) {
                            session.cache.last_found.received();
                        }
                        let mut work = Box::pin(serve(session.clone(), env.clone(), *request));
                        // Most requests end in the first poll. Only those that wait become tasks.
                        if poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await.is_pending() {
                            env.spawn("file request", work);
                        }
                    }
                }
                // Work that the request left to other tasks runs before the next request is received.
                yield_now().await;
            }
            Received::Empty => rest(&session, &env).await?,
            Received::Unmounted => return Ok(()),
        }
    }
}

/// Waits for a request. Returns early while polling for the next one pays.
async fn rest(session: &Session, env: &Env) -> io::Result<()> {
    if session.cache.serving.get() == 0 && session.polling.continues(env.now()) {
        yield_now().await;
        return Ok(());
    }
    let readable = pin!(session.device.readable());
    match select(readable, pin!(session.served.notified())).await {
        Either::Left((readable, _)) => readable,
        Either::Right(_) => Ok(()),
    }
}

/// Waits until the file of a request has no deferred pages, unless the request must not wait for them.
async fn let_in(session: &Session, request: &Request) {
    let file = request.file;
    match request.header.opcode {
        op::RELEASE | op::INTERRUPT | op::FORGET | op::BATCH_FORGET | op::DESTROY => {}
        // A write-back waits only for its own pages, in `write_page`.
        op::WRITE if is_write_back(request) => {}
        _ => session.cache.deferred.none(file, 0..u64::MAX).await,
    }
}

async fn dispatch(session: &Session, request: &mut Request) -> Result<Answer, Errno> {
    if request.header.opcode != op::LOOKUP {
        session.cache.last_lookups.asks(request.header.pid);
    }
    match session.nodes.file(request.header.nodeid) {
        Some(file) => request.file = file,
        None if is_about_no_node(request.header.opcode) => {}
        None => return Err(Errno::STALE),
    }
    if let Some(attr) = session.nodes.dead(request.header.nodeid) {
        return dead::serve(session, request, &attr).await;
    }
    let _locked = session.note_locked(request);
    let_in(session, request).await;
    match request.header.opcode {
        op::LOOKUP => session.lookup(request).await,
        op::GETATTR => session.getattr(request).await,
        // The largest are boxed: each request is kept and moved with room for the largest that is not.
        op::SETATTR => Box::pin(session.setattr(request)).await,
        op::READLINK => session.readlink(request).await,
        op::SYMLINK => session.symlink(request).await,
        op::MKNOD => session.mknod(request).await,
        op::MKDIR => session.mkdir(request).await,
        op::UNLINK => session.unlink(request, false).await,
        op::RMDIR => session.unlink(request, true).await,
        op::RENAME => Box::pin(session.rename(request)).await,
        op::RENAME2 => Box::pin(session.rename2(request)).await,
        op::LINK => session.link(request).await,
        op::OPEN => session.open(request).await,
        op::CREATE => session.create(request, false).await,
        op::TMPFILE => session.create(request, true).await,
        op::STATX => session.statx(request).await,
        op::RELEASE => locks::release(session, request).await,
        op::FLUSH => locks::flush(session, request).await,
        op::GETLK => locks::getlk(session, request).await,
        op::SETLK => locks::setlk(session, request, false).await,
        op::SETLKW => locks::setlk(session, request, true).await,
        op::INTERRUPT => locks::interrupt(session, request),
        op::READ => session.read(request).await,
        op::WRITE => session.write(request).await,
        op::FALLOCATE => Box::pin(session.fallocate(request)).await,
        op::COPY_FILE_RANGE => Box::pin(session.copy_file_range(request)).await,
        op::LSEEK => session.lseek(request).await,
        op::FSYNC => session.fsync(request).await,
        op::FSYNCDIR => session.fsyncdir().await,
        op::OPENDIR => Ok(listing::open()),
        op::RELEASEDIR => Ok(Answer::Done),
        op::READDIR => listing::readdir(session, request).await,
        op::READDIRPLUS => listing::readdirplus(session, request).await,
        op::STATFS => session.statfs().await,
        op::SETXATTR => session.setxattr(request).await,
        op::GETXATTR => session.getxattr(request).await,
        op::LISTXATTR => session.listxattr(request).await,
        op::REMOVEXATTR => session.removexattr(request).await,
        op::FORGET | op::BATCH_FORGET => session.forget(request),
        op::DESTROY => Ok(Answer::Done),
        // After ENOSYS the kernel does not ask again, and does without or does the work itself.
        _ => Err(Errno::NOSYS),
    }
}

/// True for a request that needs no node. The kernel sends 0 for its number, or in FORGET one that may be
/// unknown.
fn is_about_no_node(opcode: u32) -> bool {
    matches!(opcode, op::INTERRUPT | op::FORGET | op::BATCH_FORGET | op::DESTROY)
}

/// True for a WRITE by which the kernel writes back pages.
fn is_write_back(request: &Request) -> bool {
    request.argument::<WriteIn>().is_ok_and(|write| write.write_flags & WRITE_CACHE != 0)
}

async fn serve(session: Rc<Session>, env: Env, mut request: Request) {
    let op = operation(request.header.opcode);
    let work = async {
        let result = dispatch(&session, &mut request).await;
        request.answer(result);
    };
    match op {
        Some(op) => session.latency.of(op).time(&env, work).await,
        None => work.await,
    }
    session.cache.serving.set(session.cache.serving.get() - 1);
    if session.cache.serving.get() == 0 && session.polling.is_due() {
        session.served.notify_one();
    }
}

/// Returns the operation that an opcode is counted as, or None if its time is not recorded.
fn operation(opcode: u32) -> Option<Op> {
    Some(match opcode {
        op::LOOKUP => Op::Lookup,
        op::GETATTR | op::STATX => Op::GetAttr,
        op::SETATTR => Op::SetAttr,
        op::READLINK => Op::ReadLink,
        op::SYMLINK | op::MKNOD | op::MKDIR => Op::Make,
        op::UNLINK | op::RMDIR => Op::Unlink,
        op::RENAME | op::RENAME2 => Op::Rename,
        op::LINK => Op::Link,
        op::OPEN | op::OPENDIR => Op::Open,
        op::CREATE | op::TMPFILE => Op::Create,
        op::READ => Op::Read,
        op::WRITE => Op::Write,
        op::LSEEK => Op::Seek,
        op::COPY_FILE_RANGE => Op::Copy,
        op::FALLOCATE => Op::Fallocate,
        op::RELEASE | op::RELEASEDIR | op::FLUSH => Op::Release,
        op::GETLK | op::SETLK => Op::Lock,
        op::FSYNC | op::FSYNCDIR => Op::Fsync,
        op::READDIR | op::READDIRPLUS => Op::ReadDir,
        op::STATFS => Op::StatFs,
        op::SETXATTR | op::GETXATTR | op::LISTXATTR | op::REMOVEXATTR => Op::Xattr,
        _ => return None,
    })
}
