//! The first exchange on a connection: version negotiation and mutual authentication, without I/O.
//!
//! Through the socket in the store's folder the client sends a greeting and the server a welcome: the kernel
//! has already reported the user of each end. Over TCP both ends first prove that they know the token, the
//! server before the client. The token itself is never sent, so a program that took the server's port or
//! reads the traffic learns nothing that lets it in. Each proof covers all earlier messages, a nonce of each
//! end, and the address that was dialled, so the answer of one server cannot be passed on as that of another.

use hmac::{Hmac, Mac};
use penstock_base::num::to_u16;
use penstock_base::{Dec, DecodeError, Enc, Id128, StoreId, crc32c};
use penstock_wire::Version;
use sha2::Sha256;
use std::io;
use std::net::{IpAddr, SocketAddr};

const GREETING: &[u8; 4] = b"PNSG";
const CHALLENGE: &[u8; 4] = b"PNSC";
const PROOF: &[u8; 4] = b"PNSP";
const WELCOME: &[u8; 4] = b"PNSW";
/// Length of a token in characters, each one byte.
pub const TOKEN_BYTES: usize = 64;
/// Length of a nonce in bytes.
pub const NONCE_BYTES: usize = 32;
/// Length of an authentication code (HMAC-SHA256) in bytes.
pub const CODE_BYTES: usize = 32;
/// Length of a greeting in bytes.
pub const GREETING_BYTES: usize = 8 + NONCE_BYTES + 4;
/// Length in bytes of the head of a challenge, the part before code and checksum. The codes cover the head.
const CHALLENGE_HEAD_BYTES: usize = 8 + 16 + NONCE_BYTES;
/// Length of a challenge in bytes.
pub const CHALLENGE_BYTES: usize = CHALLENGE_HEAD_BYTES + CODE_BYTES + 4;
/// Length of the client's proof message in bytes.
pub const PROOF_BYTES: usize = 4 + CODE_BYTES + 4;
/// Length in bytes of the head of a welcome, the part before the reason.
pub const WELCOME_HEAD_BYTES: usize = 12;
/// Longest reason in bytes.
pub const REASON_BYTES: usize = 512;

/// Returns a cryptographically random nonce from the operating system.
pub fn nonce() -> io::Result<[u8; NONCE_BYTES]> {
    let mut bytes = [0; NONCE_BYTES];
    let mut at = 0;
    while at < NONCE_BYTES {
        match rustix::rand::getrandom(&mut bytes[at..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => at += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(bytes)
}

/// The secret that both ends of a TCP connection share. It is never sent, and its debug output hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Token([u8; TOKEN_BYTES]);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token")
    }
}

impl Token {
    /// Reads a token from a file's text, without surrounding white space. None unless it has [`TOKEN_BYTES`]
    /// bytes.
    pub fn new(text: &str) -> Option<Self> {
        text.trim().as_bytes().try_into().ok().map(Self)
    }

    /// The authentication code of one end over the messages so far and the dialled address.
    fn code(&self, end: &[u8], greeting: &Greeting, head: &[u8], dialled: SocketAddr) -> Hmac<Sha256> {
        let mut code = Hmac::<Sha256>::new_from_slice(&self.0).expect("HMAC takes keys of any length");
        let ip = match dialled.ip() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        code.update(end);
        code.update(&greeting.encode());
        code.update(head);
        code.update(&ip.octets());
        code.update(&dialled.port().to_le_bytes());
        code
    }
}

/// Labels of the two ends in the codes, so that a code sent back to its sender is not valid.
const BY_SERVER: &[u8] = b"penstock server 1";
const BY_CLIENT: &[u8] = b"penstock client 1";

/// The first message of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Oldest message version that the client supports.
    pub oldest: u16,
    /// Newest message version that the client supports.
    pub newest: u16,
    /// Random bytes; codes over TCP cover them.
    pub nonce: [u8; NONCE_BYTES],
}

impl Greeting {
    /// The greeting of a client of this release.
    pub fn new(nonce: [u8; NONCE_BYTES]) -> Self {
        Self { oldest: Version::OLDEST.number(), newest: Version::NEWEST.number(), nonce }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(GREETING).u16(self.oldest).u16(self.newest).raw(&self.nonce);
        sealed(enc)
    }

    /// Decodes a greeting and verifies its checksum.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("greeting", bytes);
        if dec.raw(4)? != GREETING {
            return Err(dec.bad("wrong magic number: this port speaks Penstock's messages"));
        }
        let (oldest, newest) = (dec.u16()?, dec.u16()?);
        let nonce = take(&mut dec)?;
        check_seal(&mut dec, bytes)?;
        Ok(Self { oldest, newest, nonce })
    }

    /// The version that both ends will use, or the reason why the client is refused: there is none.
    pub fn settle(&self) -> Result<Version, String> {
        let (oldest, newest) = (self.oldest, self.newest);
        Version::settle(oldest, newest).ok_or_else(|| {
            let (first, last) = (Version::OLDEST.number(), Version::NEWEST.number());
            format!(
                "the client speaks versions {oldest} to {newest} of the messages, this is {first} to {last}"
            )
        })
    }
}

/// The server's answer to a greeting over TCP: its own code, and the data that the client's code must cover.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Challenge {
    /// The message version to use.
    pub version: Version,
    /// The store that the server serves.
    pub store: StoreId,
    /// Random bytes; both codes cover them.
    pub nonce: [u8; NONCE_BYTES],
    /// The server's authentication code.
    pub code: [u8; CODE_BYTES],
}

impl Challenge {
    /// Answers a greeting that arrived at the address `dialled`, with the version that was settled.
    pub fn new(
        token: &Token,
        (greeting, version): (&Greeting, Version),
        store: StoreId,
        nonce: [u8; NONCE_BYTES],
        dialled: SocketAddr,
    ) -> Self {
        let mut challenge = Self { version, store, nonce, code: [0; CODE_BYTES] };
        let code = token.code(BY_SERVER, greeting, &challenge.head(), dialled);
        challenge.code = code.finalize().into_bytes().into();
        challenge
    }

    /// The part that the codes cover.
    fn head(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(CHALLENGE).u16(self.version.number()).u16(0).raw(&self.store.0.0).raw(&self.nonce);
        enc.finish()
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(&self.head()).raw(&self.code);
        sealed(enc)
    }

    /// Decodes a challenge and verifies its checksum. The code is verified by [`Challenge::is_proved`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("challenge", bytes);
        if dec.raw(4)? != CHALLENGE {
            return Err(dec.bad("wrong magic number: no Penstock listens there"));
        }
        let found = dec.u16()?;
        let version = Version::of_number(found).ok_or_else(|| dec.unknown("version", found.into()))?;
        dec.zeros("field behind the version", 2)?;
        let (store, nonce, code) = (take(&mut dec)?, take(&mut dec)?, take(&mut dec)?);
        check_seal(&mut dec, bytes)?;
        Ok(Self { version, store: StoreId(Id128(store)), nonce, code })
    }

    /// True if the server knows the token and received the greeting at the address `dialled`.
    pub fn is_proved(&self, token: &Token, greeting: &Greeting, dialled: SocketAddr) -> bool {
        let code = token.code(BY_SERVER, greeting, &self.head(), dialled);
        code.verify_slice(&self.code).is_ok()
    }
}

/// The client's answer to a challenge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    /// The client's authentication code.
    pub code: [u8; CODE_BYTES],
}

impl Proof {
    /// Answers a challenge from the server at the address `dialled`.
    pub fn new(token: &Token, greeting: &Greeting, challenge: &Challenge, dialled: SocketAddr) -> Self {
        let code = token.code(BY_CLIENT, greeting, &challenge.head(), dialled);
        Self { code: code.finalize().into_bytes().into() }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut enc = Enc::new();
        enc.raw(PROOF).raw(&self.code);
        sealed(enc)
    }

    /// Decodes a proof and verifies its checksum. The code is verified by [`Proof::is_proved`].
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut dec = Dec::new("proof", bytes);
        if dec.raw(4)? != PROOF {
            return Err(dec.bad("wrong magic number: a proof is due"));
        }
        let code = take(&mut dec)?;
        check_seal(&mut dec, bytes)?;
        Ok(Self { code })
    }

    /// True if the client knows the token and dialled the address `dialled`.
    pub fn is_proved(
        &self,
        token: &Token,
        greeting: &Greeting,
        challenge: &Challenge,
        dialled: SocketAddr,
    ) -> bool {
        let code = token.code(BY_CLIENT, greeting, &challenge.head(), dialled);
        code.verify_slice(&self.code).is_ok()
    }
}

/// The server's last message of the first exchange: it accepts or refuses the client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Welcome {
    /// The client is let in; the message version to use.
    Accepted(Version),
    /// The client is refused, for this reason of at most [`REASON_BYTES`].
    Refused(String),
}

impl Welcome {
    /// Accepts the client, or refuses it for a reason, which is shortened to [`REASON_BYTES`].
    pub fn new(settled: Result<Version, String>) -> Self {
        match settled {
            Ok(version) => Self::Accepted(version),
            Err(mut reason) => {
                reason.truncate(reason.floor_char_boundary(REASON_BYTES));
                Self::Refused(reason)
            }
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let (version, reason) = match self {
            Self::Accepted(version) => (version.number(), ""),
            Self::Refused(reason) => (0, &reason[..]),
        };
        let mut enc = Enc::new();
        enc.raw(WELCOME).u16(version).u16(to_u16(reason.len()));
        let crc = penstock_base::crc32c_append([enc.as_slice(), reason.as_bytes()]);
        enc.u32(crc).raw(reason.as_bytes()).finish()
    }

    /// True if these first bytes of the server's answer begin a challenge.
    pub fn is_challenge(head: &[u8; WELCOME_HEAD_BYTES]) -> bool {
        head.starts_with(CHALLENGE)
    }

    /// Length in bytes of the reason that follows this head. Fails if it is over [`REASON_BYTES`].
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

    /// Decodes a welcome, head and reason, and verifies its checksum.
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
        match (version, reason.is_empty()) {
            (0, true) => Err(dec.bad("a refusal without a reason")),
            (0, false) => Ok(Self::Refused(reason.to_owned())),
            (_, false) => Err(dec.bad("a reason without a refusal")),
            (number, true) => match Version::of_number(number) {
                Some(version) => Ok(Self::Accepted(version)),
                None => Err(dec.unknown("version", number.into())),
            },
        }
    }
}

/// Appends the checksum of the bytes.
fn sealed(mut enc: Enc) -> Vec<u8> {
    let crc = crc32c(enc.as_slice());
    enc.u32(crc).finish()
}

/// Verifies the checksum at the end of `bytes`, of which `dec` has read everything else.
fn check_seal(dec: &mut Dec<'_>, bytes: &[u8]) -> Result<(), DecodeError> {
    match dec.u32()? == crc32c(&bytes[..bytes.len() - dec.left() - 4]) && dec.left() == 0 {
        true => Ok(()),
        false => Err(dec.bad("checksum or length")),
    }
}

fn take<const N: usize>(dec: &mut Dec<'_>) -> Result<[u8; N], DecodeError> {
    let mut bytes = [0; N];
    bytes.copy_from_slice(dec.raw(N)?);
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_base::hex;

    fn token(digit: char) -> Token {
        Token::new(&digit.to_string().repeat(TOKEN_BYTES)).unwrap()
    }

    fn at(port: u16) -> SocketAddr {
        ([127, 0, 0, 1], port).into()
    }

    #[test]
    fn the_first_exchange_is_as_in_the_first_release() {
        let greeting = Greeting::new([7; NONCE_BYTES]);
        let bytes = greeting.encode();
        assert_eq!(hex(&bytes[..10]), "504e5347030003000707");
        assert_eq!((bytes.len(), Greeting::decode(&bytes)), (GREETING_BYTES, Ok(greeting.clone())));
        let store = StoreId(Id128([5; 16]));
        let challenge =
            Challenge::new(&token('a'), (&greeting, Version::NEWEST), store, [9; NONCE_BYTES], at(7000));
        let bytes = challenge.encode();
        assert_eq!(hex(&bytes[..10]), "504e5343030000000505");
        // Computed with Python's hmac.
        assert_eq!(hex(&challenge.code), "44b253000148ee78a654870148662535a6ff69ae07cadf48336e2a1bb1355ea8");
        assert_eq!((bytes.len(), Challenge::decode(&bytes)), (CHALLENGE_BYTES, Ok(challenge.clone())));
        let proof = Proof::new(&token('a'), &greeting, &challenge, at(7000));
        let bytes = proof.encode();
        assert_eq!(hex(&proof.code), "46056d2a147710c47055f1628cb41c98d041fda8ce0d4308bea7a2472b791bd9");
        assert_eq!((bytes.len(), Proof::decode(&bytes)), (PROOF_BYTES, Ok(proof)));
        let welcome = Welcome::new(Ok(Version::NEWEST));
        assert_eq!(hex(&welcome.encode()[..8]), "504e535703000000");
        let refused = Welcome::new(Err("no".into()));
        assert_eq!(hex(&refused.encode()[..8]), "504e535700000200");
        for answer in [welcome, refused] {
            assert_eq!(Welcome::decode(&answer.encode()), Ok(answer));
        }
    }

    #[test]
    fn every_bit_counts() {
        let greeting = Greeting::new([7; NONCE_BYTES]);
        let challenge = Challenge::new(
            &token('a'),
            (&greeting, Version::NEWEST),
            StoreId::default(),
            [9; NONCE_BYTES],
            at(7000),
        );
        let proof = Proof::new(&token('a'), &greeting, &challenge, at(7000));
        let refused = Welcome::new(Err("no".into()));
        for bytes in [greeting.encode(), challenge.encode(), proof.encode(), refused.encode()] {
            for bit in 0..bytes.len() * 8 {
                let mut flipped = bytes.clone();
                flipped[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    Greeting::decode(&flipped).is_err()
                        && Challenge::decode(&flipped).is_err()
                        && Proof::decode(&flipped).is_err()
                        && Welcome::decode(&flipped).is_err(),
                    "bit {bit}"
                );
            }
        }
        let newest = Version::NEWEST.number();
        let later = Greeting { oldest: newest + 1, newest: newest + 2, ..greeting.clone() };
        assert!(later.settle().unwrap_err().contains("versions"));
        assert_eq!(greeting.settle(), Ok(Version::NEWEST));
        assert!(
            matches!(Welcome::new(Err("ä".repeat(400))), Welcome::Refused(why) if why.len() == REASON_BYTES)
        );
        // A version of which nobody spoke.
        for version in [newest + 1, 1] {
            let mut bytes = Welcome::new(Ok(Version::NEWEST)).encode();
            bytes[4..6].copy_from_slice(&version.to_le_bytes());
            let crc = crc32c(&bytes[..8]);
            bytes[8..12].copy_from_slice(&crc.to_le_bytes());
            assert!(Welcome::decode(&bytes).unwrap_err().to_string().contains("version is"), "{version}");
        }
    }

    #[test]
    fn only_who_knows_the_token_and_was_dialled_proves_it() {
        let (key, store) = (token('a'), StoreId(Id128([5; 16])));
        let greeting = Greeting::new(nonce().unwrap());
        let challenge = Challenge::new(&key, (&greeting, Version::NEWEST), store, nonce().unwrap(), at(7000));
        let proof = Proof::new(&key, &greeting, &challenge, at(7000));
        assert!(challenge.is_proved(&key, &greeting, at(7000)));
        assert!(proof.is_proved(&key, &greeting, &challenge, at(7000)));
        // Rejected: another token, port, address, greeting, store or nonce.
        let other = Greeting::new(nonce().unwrap());
        let elsewhere = Challenge { store: StoreId(Id128([6; 16])), ..challenge.clone() };
        let again = Challenge { nonce: nonce().unwrap(), ..challenge.clone() };
        assert!(!challenge.is_proved(&token('b'), &greeting, at(7000)));
        assert!(!challenge.is_proved(&key, &greeting, at(7001)));
        assert!(!challenge.is_proved(&key, &greeting, "[::1]:7000".parse().unwrap()));
        assert!(!challenge.is_proved(&key, &other, at(7000)));
        assert!(!elsewhere.is_proved(&key, &greeting, at(7000)));
        assert!(!proof.is_proved(&token('b'), &greeting, &challenge, at(7000)));
        assert!(!proof.is_proved(&key, &greeting, &challenge, at(7001)));
        assert!(!proof.is_proved(&key, &other, &challenge, at(7000)));
        assert!(!proof.is_proved(&key, &greeting, &again, at(7000)));
        // A code sent back to its sender does not count as a proof of the other end.
        assert!(!Proof { code: challenge.code }.is_proved(&key, &greeting, &challenge, at(7000)));
        let mirrored = Challenge { code: proof.code, ..challenge.clone() };
        assert!(!mirrored.is_proved(&key, &greeting, at(7000)));
        assert!(
            Token::new("short").is_none() && !format!("{key:?}").contains('a'.to_string().repeat(9).as_str())
        );
    }
}
