//! TCP on the worker. Loopback only: there is no TLS yet, and tokens and data go as they are.

use crate::link::Link;
use penstock_base::LocalBoxFuture;
use penstock_drive::runtime::{Readiness, blocking};
use std::io::{self, IoSlice, IoSliceMut};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::rc::Rc;
use std::time::Duration;

/// How long a connection may take to come about.
const PATIENCE: Duration = Duration::from_secs(5);

/// Refuses an address that is not on loopback.
pub fn check_address(address: SocketAddr) -> Result<(), String> {
    match address.ip().is_loopback() {
        true => Ok(()),
        false => Err(format!(
            "{address} is not a loopback address: there is no TLS yet, so nothing but loopback is served"
        )),
    }
}

struct TcpLink(Readiness<TcpStream>);

impl TcpLink {
    fn link(stream: TcpStream) -> io::Result<Rc<dyn Link>> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        Ok(Rc::new(Self(Readiness::new(stream)?)))
    }
}

impl Link for TcpLink {
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
        let _ = self.0.get().shutdown(Shutdown::Both);
    }
}

/// A listener.
pub struct Listener {
    socket: Readiness<TcpListener>,
    address: SocketAddr,
}

impl Listener {
    /// Binds an address on loopback; port 0 takes any that is free. Must be called on a worker thread.
    pub fn bind(address: SocketAddr) -> Result<Self, String> {
        check_address(address)?;
        let fail = |error: io::Error| format!("listening on {address}: {error}");
        let socket = TcpListener::bind(address).map_err(fail)?;
        socket.set_nonblocking(true).map_err(fail)?;
        let address = socket.local_addr().map_err(fail)?;
        Ok(Self { socket: Readiness::new(socket).map_err(fail)?, address })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The next connection, and where it comes from.
    pub async fn accept(&self) -> io::Result<(Rc<dyn Link>, SocketAddr)> {
        loop {
            match self.socket.get().accept() {
                Ok((stream, from)) => return Ok((TcpLink::link(stream)?, from)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.socket.readable().await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Connects to an address on loopback.
pub async fn dial(address: SocketAddr) -> Result<Rc<dyn Link>, String> {
    check_address(address)?;
    let stream = blocking(move || TcpStream::connect_timeout(&address, PATIENCE)).await;
    stream.and_then(TcpLink::link).map_err(|error| format!("{address} is not reached: {error}"))
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
