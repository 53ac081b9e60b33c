//! The count of stripes, where pages of the table must be read for it.
//!
//! It waits for nothing but these reads: whoever judges if a drive may be given up waits for it, and anything
//! else may wait for the drive.

use super::RETRY;
use crate::context::Context;
use crate::stripes::Stripes;
use penstock_base::env::timeout;
use std::rc::Rc;

/// The count of one array's stripes.
pub(crate) struct StripeCount {
    pub(crate) context: Rc<Context>,
    pub(crate) stripes: Rc<Stripes>,
}

impl StripeCount {
    /// Counts until the array is closed.
    pub(crate) async fn run(self: Rc<Self>) {
        while !self.context.is_closed() {
            let woken = self.context.signals.count.notified();
            match self.stripes.count_some().await {
                Ok(true) if self.stripes.read_again().await => woken.await,
                Ok(true) => drop(timeout(&self.context.env, RETRY, woken).await),
                Ok(false) => {}
                Err(error) => {
                    tracing::warn!(array = self.context.name, %error, "stripes cannot be counted");
                    self.context.env.sleep(RETRY).await;
                }
            }
        }
    }
}
