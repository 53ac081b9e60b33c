//! Test helper: a connection between a mount and its service that can stop and break.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex};

/// A proxy between a mount and its service that can stop forwarding, and close its connections.
pub struct Line(Arc<Inner>);

struct Inner {
    /// True while it forwards.
    is_open: Mutex<bool>,
    opened: Condvar,
    /// The ends of the connections that were made since the last break.
    ends: Mutex<Vec<UnixStream>>,
}

impl Inner {
    fn wait(&self) {
        drop(self.opened.wait_while(self.is_open.lock().unwrap(), |open| !*open).unwrap());
    }

    fn forward(&self, mut from: UnixStream, mut to: UnixStream) {
        let mut bytes = vec![0; 1 << 20];
        loop {
            let len = from.read(&mut bytes).unwrap_or(0);
            self.wait();
            if len == 0 || to.write_all(&bytes[..len]).is_err() {
                // Closes the other direction as well.
                let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                return;
            }
        }
    }
}

impl Line {
    /// Listens in `folder` and forwards to the instance in `service`.
    pub fn new(folder: &Path, service: &Path) -> Self {
        std::fs::create_dir_all(folder).unwrap();
        let listener = UnixListener::bind(folder.join("data.sock")).unwrap();
        let inner =
            Arc::new(Inner { is_open: Mutex::new(true), opened: Condvar::new(), ends: Mutex::default() });
        let (shared, to) = (inner.clone(), service.join("data.sock"));
        std::thread::spawn(move || {
            for mount in listener.incoming().map_while(Result::ok) {
                shared.wait();
                let Ok(service) = UnixStream::connect(&to) else { continue };
                let copy = |end: &UnixStream| end.try_clone().unwrap();
                shared.ends.lock().unwrap().extend([copy(&mount), copy(&service)]);
                for (from, to) in [(&mount, &service), (&service, &mount)] {
                    let (from, to, shared) = (copy(from), copy(to), shared.clone());
                    std::thread::spawn(move || shared.forward(from, to));
                }
            }
        });
        Self(inner)
    }

    /// Forwards from now on, or stops to.
    pub fn set(&self, open: bool) {
        *self.0.is_open.lock().unwrap() = open;
        self.0.opened.notify_all();
    }

    /// Closes all connections. What is under way may be cut anywhere. The mount connects again.
    pub fn cut(&self) {
        for end in self.0.ends.lock().unwrap().drain(..) {
            // It may have ended by itself.
            let _ = end.shutdown(Shutdown::Both);
        }
    }
}
