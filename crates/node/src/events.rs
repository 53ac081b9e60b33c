//! What happened, for people: a bounded list in memory. Events are lost at a restart; the log on stderr keeps them.

use penstock_base::Env;
use serde::Serialize;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

const MOST: usize = 1000;

/// How much an event matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    /// Good to know.
    Info,
    /// Redundancy or speed is less than it should be.
    Warning,
    /// A person must act.
    Error,
}

/// One event.
#[derive(Clone, Debug, Serialize)]
pub struct Event {
    /// Its number since the start.
    pub seq: u64,
    /// Nanoseconds since 1970.
    pub time_ns: i64,
    /// How much it matters.
    pub level: Level,
    /// What it is about: `drive`, `array`, `fs` or `node`.
    pub subject: String,
    /// One sentence.
    pub message: String,
}

/// The list of events.
pub struct Events {
    env: Env,
    seq: Cell<u64>,
    events: RefCell<VecDeque<Event>>,
}

impl Events {
    /// An empty list.
    pub fn new(env: &Env) -> Self {
        Self { env: env.clone(), seq: Cell::new(0), events: RefCell::default() }
    }

    /// Adds an event.
    pub fn add(&self, level: Level, subject: impl Into<String>, message: impl Into<String>) {
        let seq = self.seq.get() + 1;
        self.seq.set(seq);
        let event = Event {
            seq,
            time_ns: self.env.wall_ns(),
            level,
            subject: subject.into(),
            message: message.into(),
        };
        let mut events = self.events.borrow_mut();
        if events.len() >= MOST {
            events.pop_front();
        }
        events.push_back(event);
    }

    /// Events behind a number, oldest first.
    pub fn after(&self, seq: u64) -> Vec<Event> {
        self.events.borrow().iter().filter(|event| event.seq > seq).cloned().collect()
    }
}
