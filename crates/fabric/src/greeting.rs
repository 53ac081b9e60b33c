//! The first bytes of a connection: the client's greeting with versions and token, and the server's answer. Pure.

use penstock_base::{Dec, DecodeError, Enc, crc32c};
use penstock_wire::VERSION;

const GREETING: &[u8; 4] = b"PNSG";
const WELCOME: &[u8; 4] = b"PNSW";
/// Characters of a token.
pub const TOKEN_BYTES: usize = 64;
/// Bytes of a greeting.
pub const GREETING_BYTES: usize = 8 + TOKEN_BYTES + 4;
/// Bytes of an answer before its reason.
pub const WELCOME_HEAD_BYTES: usize = 12;
/// Longest reason.
pub const REASON_BYTES: usize = 512;

/// What a client says first.
#[derive(Clone, PartialEq, Eq)]
pub struct Greeting {
    /// Oldest version of messages that it speaks.
    pub oldest: u16,
    /// Newest version.
    pub newest: u16,
    /// The instance's token.
    pub token: [u8; TOKEN_BYTES],
}

impl std::fmt::Debug for Greeting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Greeting(versions {} to {})", self.oldest, self.newest)
    }
}

impl Greeting {
    /// The greeting of this release with a token. A token of another length is none.
    pub fn new(token: &str) -> Option<Self> {
        Some(Self { oldest: VERSION, newest: VERSION, token: token.as_bytes().try_into().ok()? })
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(GREETING).u16(self.oldest).u16(self.newest).raw(&self.token);
        let crc = crc32c(enc.as_slice());
        enc.u32(crc).finish()
    }

    /// Reads a greeting.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("greeting", bytes);
        if dec.raw(4)? != GREETING {
            return Err(dec.bad("wrong magic number: this port speaks Penstock's messages"));
        }
        let (oldest, newest) = (dec.u16()?, dec.u16()?);
        let mut token = [0; TOKEN_BYTES];
        token.copy_from_slice(dec.raw(TOKEN_BYTES)?);
        match dec.u32()? == crc32c(&bytes[..GREETING_BYTES - 4]) && bytes.len() == GREETING_BYTES {
            true => Ok(Self { oldest, newest, token }),
            false => Err(dec.bad("checksum or length")),
        }
    }

    /// Why this client may not connect, if it may not.
    pub fn refusal(&self, token: &str) -> Option<String> {
        // Every byte is compared, whatever came before.
        let differ = self.token.iter().zip(token.bytes()).fold(0, |differ, (a, b)| differ | (a ^ b));
        if differ != 0 || token.len() != TOKEN_BYTES {
            return Some("the token is not this instance's: take the file `token` of its folder".into());
        }
        if self.oldest > VERSION || self.newest < VERSION {
            let (oldest, newest) = (self.oldest, self.newest);
            return Some(format!(
                "the client speaks versions {oldest} to {newest} of the messages, this is {VERSION}"
            ));
        }
        None
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The version to be spoken; 0 when the client is refused.
    pub version: u16,
    /// Why it is refused; empty when it is not.
    pub reason: String,
}

impl Welcome {
    /// The client may go on, or is refused for a reason.
    pub fn new(refusal: Option<String>) -> Self {
        match refusal {
            None => Self { version: VERSION, reason: String::new() },
            Some(mut reason) => {
                reason.truncate(reason.floor_char_boundary(REASON_BYTES));
                Self { version: 0, reason }
            }
        }
    }

    /// Its bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(WELCOME).u16(self.version).u16(self.reason.len() as u16);
        let crc = penstock_base::crc32c_append([enc.as_slice(), self.reason.as_bytes()]);
        enc.u32(crc).raw(self.reason.as_bytes()).finish()
    }

    /// Bytes of the reason behind a head.
    pub fn reason_bytes(head: &[u8; WELCOME_HEAD_BYTES]) -> Result<usize, DecodeError> {
        let mut dec = Dec::new("answer to the greeting", head);
        if dec.raw(4)? != WELCOME {
            return Err(dec.bad("wrong magic number: no Penstock listens there"));
        }
        dec.u16()?;
        match usize::from(dec.u16()?) {
            bytes if bytes <= REASON_BYTES => Ok(bytes),
            _ => Err(dec.bad("a reason that is too long")),
        }
    }

    /// Reads an answer: head and reason.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("answer to the greeting", bytes);
        let head = dec.raw(WELCOME_HEAD_BYTES)?;
        let len = Self::reason_bytes(head.try_into().map_err(|_| dec.bad("no head"))?)?;
        let reason = dec.raw(len)?;
        let crc = penstock_base::crc32c_append([&head[..8], reason]);
        if crc.to_le_bytes() != head[8..] || dec.left() > 0 {
            return Err(dec.bad("checksum or length"));
        }
        let version = u16::from_le_bytes([head[4], head[5]]);
        let reason = std::str::from_utf8(reason).map_err(|_| dec.bad("a reason that is not UTF-8"))?;
        if version > VERSION || (version == 0) == reason.is_empty() {
            return Err(dec.unknown("version", version.into()));
        }
        Ok(Self { version, reason: reason.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::hex;

    #[test]
    fn the_first_exchange_is_as_in_the_first_release() {
        let token = "0123456789abcdef".repeat(4);
        let greeting = Greeting::new(&token).unwrap();
        let bytes = greeting.encode();
        assert_eq!(hex(&bytes[..16]), "504e534701000100".to_owned() + "3031323334353637");
        assert_eq!((bytes.len(), Greeting::decode(&bytes)), (GREETING_BYTES, Ok(greeting)));
        let welcome = Welcome::new(None);
        assert_eq!(hex(&welcome.encode()[..8]), "504e535701000000");
        let refused = Welcome::new(Some("no".into()));
        assert_eq!(hex(&refused.encode()[..8]), "504e535700000200");
        for answer in [welcome, refused] {
            assert_eq!(Welcome::decode(&answer.encode()), Ok(answer));
        }
    }

    #[test]
    fn every_bit_counts_and_only_the_token_lets_in() {
        let token = "a".repeat(TOKEN_BYTES);
        let greeting = Greeting::new(&token).unwrap();
        assert_eq!(greeting.refusal(&token), None);
        assert!(greeting.refusal(&"b".repeat(TOKEN_BYTES)).unwrap().contains("token"));
        assert!(greeting.refusal("").unwrap().contains("token"));
        assert!(greeting.refusal(&token[1..]).unwrap().contains("token"));
        let later = Greeting { oldest: VERSION + 1, newest: VERSION + 2, ..greeting.clone() };
        assert!(later.refusal(&token).unwrap().contains("versions"));
        for bytes in [greeting.encode(), Welcome::new(Some("no".into())).encode()] {
            for bit in 0..bytes.len() * 8 {
                let mut flipped = bytes.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    Greeting::decode(&flipped).is_err() && Welcome::decode(&flipped).is_err(),
                    "bit {bit}"
                );
            }
        }
        assert!(Greeting::new("short").is_none());
        assert_eq!(Welcome::new(Some("ä".repeat(400))).reason.len(), REASON_BYTES);
    }
}
