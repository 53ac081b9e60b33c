//! Sockets on the worker: UNIX sockets in the store's folder, and TCP on loopback.
//!
//! Other addresses are refused: there is no TLS yet, and data travels unencrypted.

use crate::link::Link;
use crate::local::{self, Peer};
use penstock_base::LocalBoxFuture;
use penstock_worker::{Readiness, blocking};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

/// Time limit for connecting.
const PATIENCE: Duration = Duration::from_secs(5);

/// Returns an error message for an address that is not on loopback.
pub fn check_address(address: SocketAddr) -> Result<(), String> {
    match address.ip().is_loopback() {
        true => Ok(()),
        false => Err(format!(
            "{address} is not a loopback address: there is no TLS yet, so nothing but loopback is served"
        )),
    }
}

/// A connected non-blocking socket.
struct SocketLink<T: AsFd + 'static>(Readiness<T>);

impl<T: AsFd + 'static> Link for SocketLink<T> {
    fn try_read(&self, spaces: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        Ok(rustix::io::readv(self.0.get(), spaces)?)
    }

    fn try_write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(self.0.get(), parts)?)
    }

    fn readable(&self) -> LocalBoxFuture<'_, io::Result<()>> {
        Box::pin(self.0.readable())
    }

    fn writable(&self) -> LocalBoxFuture<'_, io::Result<()>> {
        Box::pin(self.0.writable())
    }

    fn close(&self) {
        // The other end may have closed it before.
        let _ = rustix::net::shutdown(self.0.get(), rustix::net::Shutdown::Both);
    }
}

fn tcp_link(stream: TcpStream) -> io::Result<Rc<dyn Link>> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
    Ok(Rc::new(SocketLink(Readiness::new(stream)?)))
}

fn local_link(stream: UnixStream) -> io::Result<Rc<dyn Link>> {
    stream.set_nonblocking(true)?;
    Ok(Rc::new(SocketLink(Readiness::new(stream)?)))
}

/// Accepts the next connection of a non-blocking listener.
async fn next<L: AsFd + 'static, C>(
    listener: &Readiness<L>,
    accept: impl Fn(&L) -> io::Result<C>,
) -> io::Result<C> {
    loop {
        match accept(listener.get()) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => listener.readable().await?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// A listener on the data path's socket in a store's folder.
pub struct LocalListener(Readiness<UnixListener>);

impl LocalListener {
    /// Listens in `dir`. The caller has the folder's lock. Must be called on a worker thread.
    pub fn bind(dir: &Path) -> Result<Self, String> {
        let socket = local::listen(dir, local::DATA)?;
        let ready = socket.set_nonblocking(true).and_then(|()| Readiness::new(socket));
        ready.map(Self).map_err(|error| format!("listening at {}: {error}", dir.join(local::DATA).display()))
    }

    /// Accepts the next connection of a permitted user, and returns it with the process at its other end.
    /// Closes connections of other users.
    pub async fn accept(&self) -> io::Result<(Rc<dyn Link>, Peer)> {
        loop {
            let (stream, _) = next(&self.0, |listener| listener.accept()).await?;
            let peer = Peer::of(&stream)?;
            if peer.may_enter() {
                return Ok((local_link(stream)?, peer));
            }
            tracing::debug!(%peer, "a connection is refused: it is another user's");
        }
    }
}

/// A listener on TCP.
pub struct Listener {
    socket: Readiness<TcpListener>,
    address: SocketAddr,
}

impl Listener {
    /// Binds an address on loopback; port 0 takes any free port. Must be called on a worker thread.
    pub fn bind(address: SocketAddr) -> Result<Self, String> {
        check_address(address)?;
        let fail = |error: io::Error| format!("listening on {address}: {error}");
        let socket = TcpListener::bind(address).map_err(fail)?;
        socket.set_nonblocking(true).map_err(fail)?;
        let address = socket.local_addr().map_err(fail)?;
        Ok(Self { socket: Readiness::new(socket).map_err(fail)?, address })
    }

    /// The address on which it listens, with the actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Accepts the next connection, and returns it with the client's address.
    pub async fn accept(&self) -> io::Result<(Rc<dyn Link>, SocketAddr)> {
        let (stream, from) = next(&self.socket, |listener| listener.accept()).await?;
        Ok((tcp_link(stream)?, from))
    }
}

/// Connects to an address on loopback, within 5 s.
pub async fn dial(address: SocketAddr) -> Result<Rc<dyn Link>, String> {
    check_address(address)?;
    let stream = blocking(move || TcpStream::connect_timeout(&address, PATIENCE)).await;
    stream.and_then(tcp_link).map_err(|error| format!("{address} is not reached: {error}"))
}

/// Connects to the instance of the store in `dir`.
pub async fn dial_local(dir: &Path) -> Result<Rc<dyn Link>, String> {
    let folder = dir.to_owned();
    // Connecting blocks while the listener's queue is full.
    let stream = blocking(move || local::connect(&folder, local::DATA)).await;
    stream.and_then(local_link).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            format!("no instance runs on {}; `penstock up {}` starts one", dir.display(), dir.display())
        }
        _ => format!("{} is not reached: {error}", dir.join(local::DATA).display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_but_loopback_is_served() {
        for address in ["127.0.0.1:1", "[::1]:1", "127.9.9.9:1"] {
            assert_eq!(check_address(address.parse().unwrap()), Ok(()));
        }
        for address in ["0.0.0.0:1", "[::]:1", "192.0.2.1:1"] {
            assert!(check_address(address.parse().unwrap()).unwrap_err().contains("no TLS"));
        }
    }
}
