//! Watches SIGINT and SIGTERM, the signals that stop a process in order.
#![allow(clippy::disallowed_methods)]

use crate::error::ServerError;

/// Starts a thread that calls `on_signal` for each SIGINT and SIGTERM. Fails if the thread cannot start.
pub fn on_signals(on_signal: impl Fn() + Send + 'static) -> Result<(), ServerError> {
    let fail = |error: std::io::Error| ServerError(format!("no thread for signals: {error}"));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
    let watch = move || runtime.block_on(watch(on_signal));
    std::thread::Builder::new().name("signals".into()).spawn(watch).map(|_| ()).map_err(fail)
}

pub(crate) async fn watch(on_signal: impl Fn()) {
    use tokio::signal::unix::{SignalKind, signal};
    let both = signal(SignalKind::interrupt()).and_then(|int| Ok((int, signal(SignalKind::terminate())?)));
    let (mut interrupt, mut terminate) = match both {
        Ok(both) => both,
        Err(error) => return tracing::error!(%error, "signals cannot be watched"),
    };
    loop {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        on_signal();
    }
}
