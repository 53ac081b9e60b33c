//! A runtime for tests of parts that never wait: its clock stands still and its tasks never run.

use penstock_base::env::Runtime;
use penstock_base::{Env, LocalBoxFuture};
use std::rc::Rc;
use std::time::Duration;

struct Still;

impl Runtime for Still {
    fn now(&self) -> Duration {
        Duration::ZERO
    }

    fn wall_ns(&self) -> i64 {
        0
    }

    fn sleep(&self, _: Duration) -> LocalBoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    fn spawn(&self, _: &'static str, _: LocalBoxFuture<'static, ()>) {}

    fn random(&self) -> u64 {
        7
    }
}

pub(crate) fn env() -> Env {
    Rc::new(Still)
}
