//! Programs in Python that a test starts, hears line by line and tells to go on.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

/// A program, killed when it is dropped.
pub struct Python {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Python {
    /// Starts one; says SKIPPED where there is no Python.
    pub fn start(test: &str, script: &str, args: &[impl AsRef<OsStr>]) -> Option<Self> {
        let mut python = Command::new("python3");
        python.args(["-c", script]).args(args).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = match python.spawn() {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("SKIPPED {test}: no python3");
                return None;
            }
            spawned => spawned.unwrap(),
        };
        let output = BufReader::new(child.stdout.take().unwrap());
        Some(Self { child, output })
    }

    /// The next line that it says; empty if it has ended.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn says(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    /// Ends a `sys.stdin.readline()` of it.
    pub fn tell(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Ends a `sys.stdin.read()` of it.
    pub fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Its status, once it has ended by itself.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may have ended.
        let _ = (self.child.kill(), self.child.wait());
    }
}
