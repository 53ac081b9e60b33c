//! Rows of sessions and of the results of their requests. Format: docs/format/kv.md.
//!
//! They belong to no snapshot. Public for the fuzzer and for tools that inspect a store.

use penstock_base::{Dec, DecodeError, Enc};
use penstock_kv::Range;

const RESULT: u8 = 0x14;
const SESSION: u8 = 0x15;
const FORMAT: u8 = 1;

fn key(tag: u8, words: &[u64]) -> Vec<u8> {
    let mut key = vec![tag];
    words.iter().for_each(|word| key.extend_from_slice(&word.to_be_bytes()));
    key
}

/// Key of the stored result in one slot of a session.
pub fn result_key(session: u64, slot: u64) -> Vec<u8> {
    key(RESULT, &[session, slot])
}

/// Range of all stored results.
pub fn all_results() -> Range {
    (vec![RESULT], vec![RESULT + 1])
}

/// Key of a session whose client is another process.
pub fn session_key(session: u64) -> Vec<u8> {
    key(SESSION, &[session])
}

/// Range of all such sessions.
pub fn all_sessions() -> Range {
    (vec![SESSION], vec![SESSION + 1])
}

/// Longest lease time of a session: a day.
const MOST_LEASE_MS: u32 = 24 * 60 * 60 * 1000;

/// The highest session number.
pub const LAST_SESSION: u64 = u64::MAX >> 1;

/// Returns the session number from a session's key.
pub fn decode_session_key(key: &[u8]) -> Result<u64, DecodeError> {
    let dec = Dec::new("session key", key);
    let word = key.strip_prefix(&[SESSION]).and_then(|rest| rest.try_into().ok());
    let number = u64::from_be_bytes(word.ok_or(dec.bad("wrong tag or length"))?);
    if number <= LAST_SESSION { Ok(number) } else { Err(dec.bad("a session number above 2^63")) }
}

/// Row of a session whose client is another process and outlives this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionRow {
    /// Name of the client, for people.
    pub client: String,
    /// Path at which the client mounts, for people.
    pub mount: String,
    /// Lease time of the session in milliseconds; 0 for none, as for a client of this process.
    pub lease_ms: u32,
}

impl SessionRow {
    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT).u32(self.lease_ms).bytes(self.client.as_bytes()).bytes(self.mount.as_bytes());
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("session row", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let lease_ms = dec.u32()?;
        if lease_ms == 0 || lease_ms > MOST_LEASE_MS {
            // Its session would never end, or hold everybody up for days.
            return Err(dec.bad("a lease time that no session has"));
        }
        Ok(Self { client: dec.text()?, mount: dec.text()?, lease_ms })
    }
}

/// The stored result of a session's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultRow {
    /// The session.
    pub session: u64,
    /// Slot of the request: its sequence number modulo the number of slots.
    pub slot: u64,
    /// Sequence number of the request in its session.
    pub sequence: u64,
    /// Body of the reply.
    pub body: Vec<u8>,
}

impl ResultRow {
    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.u8(FORMAT).u64(self.session).u64(self.slot).u64(self.sequence).bytes(&self.body);
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("session result", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (session, slot, sequence) = (dec.counter()?, dec.u64()?, dec.u64()?);
        Ok(Self { session, slot, sequence, body: dec.bytes()?.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn rows_are_as_in_the_first_release() {
        assert_eq!(hex(&result_key(5, 63)), "140000000000000005000000000000003f");
        assert_eq!(hex(&session_key(5)), "150000000000000005");
        let result = ResultRow { session: 5, slot: 2, sequence: 66, body: vec![8, 7] };
        let wanted = "01 0500000000000000 0200000000000000 4200000000000000 02000000 0807".replace(' ', "");
        assert_eq!(hex(&result.encode()), wanted);
        assert_eq!(ResultRow::decode(&result.encode()), Ok(result));

        let session = SessionRow { client: "host".into(), mount: "/m".into(), lease_ms: 300 };
        assert_eq!(hex(&session.encode()), "01 2c010000 04000000 686f7374 02000000 2f6d".replace(' ', ""));
        assert_eq!(SessionRow::decode(&session.encode()), Ok(session));
        assert_eq!(decode_session_key(&session_key(5)), Ok(5));
    }

    #[test]
    fn bytes_that_are_no_row_are_refused() {
        let session = SessionRow { client: "host".into(), mount: "/m".into(), lease_ms: 300 };
        let result = ResultRow { session: 5, slot: 2, sequence: 66, body: vec![8, 7] };
        let (session, result) = (session.encode(), result.encode());
        for len in 0..session.len() {
            assert!(SessionRow::decode(&session[..len]).is_err(), "the first {len} bytes of a session");
        }
        for len in 0..result.len() {
            assert!(ResultRow::decode(&result[..len]).is_err(), "the first {len} bytes of a result");
        }
        // Offsets: the format in 0; the length of the name in 5..9, and of a result's body in 25..29.
        for (at, byte) in [(0, 2), (8, 0xff), (9, 0xff), (5, 12)] {
            let mut changed = session.clone();
            changed[at] = byte;
            assert!(SessionRow::decode(&changed).is_err(), "byte {at} is {byte:#x}");
        }
        for (at, byte) in [(0, 2), (25, 3), (28, 0xff)] {
            let mut changed = result.clone();
            changed[at] = byte;
            assert!(ResultRow::decode(&changed).is_err(), "byte {at} is {byte:#x}");
        }
        let key = session_key(5);
        for bad in [&key[..8], &[&key[..], &[0]].concat(), &result_key(5, 0), &[], &result_key(5, 0)[..9]] {
            assert!(decode_session_key(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn ranges_have_all_rows_of_their_kind_and_no_others() {
        let (results, sessions) = (all_results(), all_sessions());
        for number in [0, 1, 255, u64::MAX] {
            let (result, session) = (result_key(number, number), session_key(number));
            assert!(results.0 <= result && result < results.1, "{number}");
            assert!(sessions.0 <= session && session < sessions.1, "{number}");
        }
        assert!(results.1 <= sessions.0);
    }
}
