//! Carries HTTP of `ureq` over the Unix socket in a store's folder.

use penstock_fabric::local;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use ureq::Error;
use ureq::config::Config;
use ureq::unversioned::resolver::DefaultResolver;
use ureq::unversioned::transport::{
    Buffers, ConnectionDetails, Connector, LazyBuffers, NextTimeout, Transport,
};

/// Base URL of requests. The address in it is not used.
pub const URL: &str = "http://127.0.0.1";

/// Returns an agent that always connects to the instance of the store in `dir`.
pub fn agent(config: Config, dir: PathBuf) -> ureq::Agent {
    ureq::Agent::with_parts(config, Door { dir }, DefaultResolver::default())
}

#[derive(Debug)]
struct Door {
    dir: PathBuf,
}

impl Connector for Door {
    type Out = Connection;

    fn connect(&self, details: &ConnectionDetails, _: Option<()>) -> Result<Option<Connection>, Error> {
        let stream = local::connect(&self.dir, local::API)?;
        let config = details.config;
        let buffers = LazyBuffers::new(config.input_buffer_size(), config.output_buffer_size());
        Ok(Some(Connection { stream, buffers }))
    }
}

struct Connection {
    stream: UnixStream,
    buffers: LazyBuffers,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Connection")
    }
}

impl Connection {
    /// Applies the request's time limit to reads and writes of the socket.
    fn limit(&self, timeout: NextTimeout) -> Result<(), Error> {
        let most = timeout.not_zero().map(|period| *period);
        self.stream.set_read_timeout(most)?;
        Ok(self.stream.set_write_timeout(most)?)
    }
}

fn fail(error: std::io::Error, timeout: NextTimeout) -> Error {
    match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => Error::Timeout(timeout.reason),
        _ => error.into(),
    }
}

impl Transport for Connection {
    fn buffers(&mut self) -> &mut dyn Buffers {
        &mut self.buffers
    }

    fn transmit_output(&mut self, amount: usize, timeout: NextTimeout) -> Result<(), Error> {
        self.limit(timeout)?;
        let output = &self.buffers.output()[..amount];
        self.stream.write_all(output).map_err(|error| fail(error, timeout))
    }

    fn await_input(&mut self, timeout: NextTimeout) -> Result<bool, Error> {
        self.limit(timeout)?;
        let count = loop {
            match self.stream.read(self.buffers.input_append_buf()) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                other => break other.map_err(|error| fail(error, timeout))?,
            }
        };
        self.buffers.input_appended(count);
        Ok(count > 0)
    }

    fn is_open(&mut self) -> bool {
        // Detects a pooled connection that the peer has closed: a read returns end of file there, and would
        // block on an open one.
        let asked = self.stream.set_nonblocking(true).map(|()| self.stream.read(&mut [0]));
        let open = matches!(asked, Ok(Err(error)) if error.kind() == ErrorKind::WouldBlock);
        open && self.stream.set_nonblocking(false).is_ok()
    }
}
