//! Rows of sessions and of the results of their requests. Format: docs/format/kv.md.
//!
//! They belong to no snapshot. A session is named by a random key. Its number, which requests carry today, is
//! in its row. Public for the fuzzer and for tools that inspect a store.

use crate::users::Role;
use penstock_base::{Dec, DecodeError, Enc, Id128};
use penstock_kv::Range;

const RESULT: u8 = 0x14;
const SESSION: u8 = 0x15;
const FORMAT: u8 = 2;
/// The roles of sessions: a mount, and a gateway.
const MOUNT: u8 = 1;
const GATEWAY: u8 = 3;
/// The fileset whose results these are: the first, the only one today.
const FILESET: u64 = 0;

/// Key of the stored result in one slot of a session.
pub fn result_key(session: Id128, slot: u64) -> Vec<u8> {
    [&[RESULT][..], &FILESET.to_be_bytes(), &session.0, &slot.to_be_bytes()].concat()
}

/// Range of all stored results.
pub fn all_results() -> Range {
    (vec![RESULT], vec![RESULT + 1])
}

/// Key of a session whose client is another process.
pub fn session_key(session: Id128) -> Vec<u8> {
    [&[SESSION][..], &session.0].concat()
}

/// Range of all such sessions.
pub fn all_sessions() -> Range {
    (vec![SESSION], vec![SESSION + 1])
}

/// Longest lease time of a session: a day.
const MOST_LEASE_MS: u32 = 24 * 60 * 60 * 1000;

/// The highest session number.
pub const LAST_SESSION: u64 = u64::MAX >> 1;

/// Returns the session from its key.
pub fn decode_session_key(key: &[u8]) -> Result<Id128, DecodeError> {
    let dec = Dec::new("session key", key);
    let id = key.strip_prefix(&[SESSION]).and_then(|rest| rest.try_into().ok());
    let id = Id128(id.ok_or(dec.bad("wrong tag or length"))?);
    if id.is_nil() {
        return Err(dec.bad("the name of no session"));
    }
    Ok(id)
}

/// Row of a session whose client is another process and outlives this one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SessionRow {
    /// The number by which requests name the session.
    pub number: u64,
    /// Name of the client, for people.
    pub client: String,
    /// Path at which the client mounts, for people.
    pub mount: String,
    /// Lease time of the session in milliseconds. 0 for a client of the service's own process: it ends with
    /// that, and its row says to the next start that there was one.
    pub lease_ms: u32,
    /// Its role, which says where the permissions of its requests are checked.
    pub role: Role,
}

impl SessionRow {
    /// Encodes the row's value.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        let role = match self.role {
            Role::Mount => MOUNT,
            Role::Gateway => GATEWAY,
        };
        enc.u8(FORMAT).u64(self.number).u32(self.lease_ms).u8(role).u32(0);
        enc.bytes(self.client.as_bytes()).bytes(self.mount.as_bytes());
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("session row", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (number, lease_ms, role, uid) = (dec.counter()?, dec.u32()?, dec.u8()?, dec.u32()?);
        let role = match role {
            MOUNT => Role::Mount,
            GATEWAY => Role::Gateway,
            other => return Err(dec.unknown("role", other.into())),
        };
        dec.check_known("user", uid, 0)?;
        if number == 0 {
            return Err(dec.bad("the number of no session"));
        }
        if lease_ms > MOST_LEASE_MS {
            // Its session would hold everybody up for days.
            return Err(dec.bad("a lease time that no session has"));
        }
        let row = Self { number, client: dec.text()?, mount: dec.text()?, lease_ms, role };
        dec.end()?;
        Ok(row)
    }
}

/// The stored result of a session's request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultRow {
    /// The session.
    pub session: Id128,
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
        enc.u8(FORMAT).id(self.session).u64(self.slot).u64(self.sequence).bytes(&self.body);
        enc.finish()
    }

    /// Decodes the row's value.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("session result", value);
        let format = dec.u8()?;
        dec.check_format(format, FORMAT)?;
        let (session, slot, sequence) = (dec.id()?, dec.u64()?, dec.u64()?);
        let row = Self { session, slot, sequence, body: dec.bytes()?.to_vec() };
        dec.end()?;
        Ok(row)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    const KEY: Id128 = Id128([0xab; 16]);

    fn row_of(role: Role, mount: &str) -> SessionRow {
        SessionRow { number: 5, client: "host".into(), mount: mount.into(), lease_ms: 300, role }
    }

    #[test]
    fn rows_are_as_in_the_first_release() {
        let (zero, id) = ("0000000000000000", "ab".repeat(16));
        assert_eq!(hex(&result_key(KEY, 63)), format!("14{zero}{id}000000000000003f"));
        assert_eq!(hex(&session_key(KEY)), format!("15{id}"));
        let result = ResultRow { session: KEY, slot: 2, sequence: 66, body: vec![8, 7] };
        let wanted = "0200000000000000 4200000000000000 02000000 0807".replace(' ', "");
        assert_eq!(hex(&result.encode()), format!("02{id}{wanted}"));
        assert_eq!(ResultRow::decode(&result.encode()), Ok(result));

        let session = row_of(Role::Mount, "/m");
        let wanted =
            "02 0500000000000000 2c010000 01 00000000 04000000 686f7374 02000000 2f6d".replace(' ', "");
        assert_eq!(hex(&session.encode()), wanted);
        assert_eq!(SessionRow::decode(&session.encode()), Ok(session));
        assert_eq!(decode_session_key(&session_key(KEY)), Ok(KEY));
        let gateway = row_of(Role::Gateway, "");
        let wanted = "02 0500000000000000 2c010000 03 00000000 04000000 686f7374 00000000".replace(' ', "");
        assert_eq!(hex(&gateway.encode()), wanted);
        assert_eq!(SessionRow::decode(&gateway.encode()), Ok(gateway));
    }

    #[test]
    fn bytes_that_are_no_row_are_refused() {
        assert!(decode_session_key(&session_key(Id128::NIL)).is_err(), "the name of no session");
        assert!(decode_session_key(&session_key(KEY)[1..]).is_err());
        let session = row_of(Role::Mount, "/m");
        let result = ResultRow { session: KEY, slot: 2, sequence: 66, body: vec![8, 7] };
        let (session, result) = (session.encode(), result.encode());
        for len in 0..session.len() {
            assert!(SessionRow::decode(&session[..len]).is_err(), "the first {len} bytes of a session");
        }
        for len in 0..result.len() {
            assert!(ResultRow::decode(&result[..len]).is_err(), "the first {len} bytes of a result");
        }
        // Offsets: the format in 0; the number in 1..9, the role in 13, the user in 14..18, the length of the
        // name in 18..22, and of a result's body in 33..37.
        let changes =
            [(0, 1), (1, 0), (8, 0xff), (12, 0xff), (13, 0), (13, 2), (14, 1), (21, 0xff), (18, 12)];
        for (at, byte) in changes.into_iter().chain([(18, 3)]) {
            let mut changed = session.clone();
            changed[at] = byte;
            assert!(SessionRow::decode(&changed).is_err(), "byte {at} is {byte:#x}");
        }
        for (at, byte) in [(0, 1), (33, 3), (33, 1), (36, 0xff)] {
            let mut changed = result.clone();
            changed[at] = byte;
            assert!(ResultRow::decode(&changed).is_err(), "byte {at} is {byte:#x}");
        }
        let (key, other) = (session_key(KEY), result_key(KEY, 0));
        for bad in [&key[..16], &[&key[..], &[0]].concat(), &other, &[], &other[..17]] {
            assert!(decode_session_key(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn ranges_have_all_rows_of_their_kind_and_no_others() {
        let (results, sessions) = (all_results(), all_sessions());
        for byte in [0, 1, 254, 255] {
            let id = Id128([byte; 16]);
            let (result, session) = (result_key(id, u64::MAX / 255 * u64::from(byte)), session_key(id));
            assert!(results.0 <= result && result < results.1, "{byte}");
            assert!(sessions.0 <= session && session < sessions.1, "{byte}");
        }
        assert!(results.1 <= sessions.0);
    }
}
