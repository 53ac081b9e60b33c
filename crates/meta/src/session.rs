//! Sessions: a request that changes something has a sequence, and its result is kept until the client has used its
//! slot again, so that a repeat after a lost reply is answered and not done twice.

use crate::error::MetaError;
use crate::rows::{ResultRow, all_results, result_key};
use penstock_base::HashMap;
use penstock_kv::{Kv, WriteSet};

/// Requests of one session whose results are kept.
pub(crate) const SLOTS: u64 = 64;

/// Results by session and slot: the sequence and the reply's body.
#[derive(Default)]
pub(crate) struct Sessions {
    results: HashMap<(u64, u64), (u64, Vec<u8>)>,
}

impl Sessions {
    pub(crate) async fn load(kv: &dyn Kv) -> Result<Self, MetaError> {
        let mut sessions = Self::default();
        let (mut from, until) = all_results();
        loop {
            let rows = kv.scan(from, until.clone(), 1024).await?;
            let Some((last, _)) = rows.last() else { return Ok(sessions) };
            from = [&last[..], &[0]].concat();
            for (_, value) in &rows {
                let ResultRow { session, slot, sequence, body } = ResultRow::decode(value)?;
                sessions.results.insert((session, slot), (sequence, body));
            }
        }
    }

    /// The result of a request that was done already.
    pub(crate) fn find(&self, session: u64, sequence: u64) -> Option<Vec<u8>> {
        let (stored, body) = self.results.get(&(session, sequence % SLOTS))?;
        (*stored == sequence).then(|| body.clone())
    }

    /// Adds the result's row to the transaction that does the request.
    pub(crate) fn record(session: u64, sequence: u64, body: &[u8], writes: &mut WriteSet) {
        let slot = sequence % SLOTS;
        let row = ResultRow { session, slot, sequence, body: body.to_vec() };
        writes.put(result_key(session, slot), row.encode());
    }

    /// Keeps a result whose transaction is committed.
    pub(crate) fn keep(&mut self, session: u64, sequence: u64, body: Vec<u8>) {
        self.results.insert((session, sequence % SLOTS), (sequence, body));
    }

    /// Drops the results of all sessions: their clients are gone with the last start.
    pub(crate) fn drop_all(&mut self, writes: &mut WriteSet) {
        for (session, slot) in self.results.keys() {
            writes.delete(result_key(*session, *slot));
        }
        self.results.clear();
    }
}
