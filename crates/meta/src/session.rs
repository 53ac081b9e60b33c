//! Sessions: a request that changes something has a sequence, and its result is kept until the client has used its
//! slot again, so that a repeat after a lost reply is answered and not done twice.

use crate::error::MetaError;
use crate::rows::{ResultRow, all_results, result_key};
use penstock_base::{DecodeError, HashMap};
use penstock_kv::{Kv, WriteSet, for_each};

/// Requests of one session whose results are kept.
pub(crate) const SLOTS: u64 = 64;

/// Results by session and slot: the sequence and the reply's body.
#[derive(Default)]
pub(crate) struct Sessions {
    results: HashMap<(u64, u64), (u64, Vec<u8>)>,
}

impl Sessions {
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

    /// Drops the results that the last start left: their clients are gone with it. Whether a row can be read does not
    /// matter for that.
    pub(crate) async fn drop_stored(kv: &dyn Kv) -> Result<(), MetaError> {
        let mut writes = WriteSet::new();
        for_each(kv, all_results(), |key, _| {
            writes.delete(key.to_vec());
            Ok::<_, MetaError>(())
        })
        .await?;
        match writes.is_empty() {
            true => Ok(()),
            false => Ok(kv.commit(std::mem::take(writes.reclaims())).await?),
        }
    }
}

/// Session and sequence of a stored result, if it is one and stands in its place.
pub(crate) fn read_result(key: &[u8], value: &[u8]) -> Result<(u64, u64), DecodeError> {
    let ResultRow { session, slot, sequence, .. } = ResultRow::decode(value)?;
    match key == result_key(session, slot) && sequence % SLOTS == slot {
        true => Ok((session, sequence)),
        false => Err(DecodeError::Bad { what: "session result", why: "it is in another one's place" }),
    }
}
