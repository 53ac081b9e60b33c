//! Runs Python programs for tests: reads their output line by line and sends them input.

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

/// A running program, which is killed when this is dropped.
pub struct Python {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Python {
    /// Starts a program. Prints SKIPPED and returns None if there is no Python.
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

    /// Returns the next line of output; empty if the program has ended.
    pub fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    pub fn says(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    /// Lets a `sys.stdin.readline()` in the program return.
    pub fn tell(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    }

    /// Lets a `sys.stdin.read()` in the program return.
    pub fn close_input(&mut self) {
        drop(self.child.stdin.take());
    }

    /// Returns the exit status. None while the program runs.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().unwrap()
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // The program may have ended already.
        let _ = (self.child.kill(), self.child.wait());
    }
}
