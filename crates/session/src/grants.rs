//! Grants: the right of a user to read or write the data of a file, which a target checks without asking the
//! metadata target.
//!
//! A grant is a number, the rights, and a proof: a part of an HMAC-SHA256 under a key of the store over the
//! session, the user, the file and the number. A grant is valid for as long as its session. It says what the
//! user could do when it opened the file, like a file descriptor.

use crate::users::User;
use hmac::{Hmac, Mac};
use penstock_base::{FileId, Id128};
use penstock_wire::data::{PROOF_BYTES, Right};
use sha2::Sha256;

/// The right to read, and below to write.
pub const READ: u64 = 1;
/// The right to write.
pub const WRITE: u64 = 2;
const PURPOSE: &[u8] = b"penstock grant 1";

/// The key of the store's grants.
pub struct GrantKey(Hmac<Sha256>);

impl GrantKey {
    /// The key that follows from the secret of a file system.
    pub fn new(secret: Id128) -> Self {
        let keyed = |key: &[u8]| Hmac::<Sha256>::new_from_slice(key).expect("every length is a key");
        // The secret itself is the key of something else.
        let mut derived = keyed(&secret.0);
        derived.update(PURPOSE);
        Self(keyed(&derived.finalize().into_bytes()))
    }

    fn code(&self, (session, user): (Id128, &User), file: FileId, rights: u64) -> Hmac<Sha256> {
        let mut code = self.0.clone();
        code.update(&session.0);
        for number in [file.branch.0, file.ino.0, rights] {
            code.update(&number.to_le_bytes());
        }
        // The last part, because its length is not fixed.
        code.update(&user.id());
        code
    }

    /// Makes a grant.
    pub fn grant(&self, who: (Id128, &User), file: FileId, rights: u64) -> Right {
        let code = self.code(who, file, rights).finalize().into_bytes();
        let mut proof = [0; PROOF_BYTES];
        proof.copy_from_slice(&code[..PROOF_BYTES]);
        Right { grant: rights, proof }
    }

    /// True if this is a grant of this user with these rights.
    pub fn allows(&self, who: (Id128, &User), file: FileId, right: &Right, wanted: u64) -> bool {
        let is_enough = right.grant & wanted == wanted;
        is_enough && self.code(who, file, right.grant).verify_truncated_left(&right.proof).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_grant_is_of_one_session_user_file_and_right() {
        let key = GrantKey::new(Id128([1; 16]));
        let (session, user, file) = (Id128([2; 16]), User::new(7, 100, vec![5]), FileId::of_numbers(0, 9));
        let right = key.grant((session, &user), file, READ);
        assert!(key.allows((session, &user), file, &right, READ));
        let others = [User::new(8, 100, vec![5]), User::new(7, 5, vec![]), User::new(7, 100, vec![])];
        assert!(others.iter().all(|other| !key.allows((session, other), file, &right, READ)));
        assert!(!key.allows((Id128([3; 16]), &user), file, &right, READ));
        for other in [FileId::of_numbers(0, 8), FileId::of_numbers(1, 9)] {
            assert!(!key.allows((session, &user), other, &right, READ));
        }
        assert!(!GrantKey::new(Id128([4; 16])).allows((session, &user), file, &right, READ));
        assert!(!key.allows((session, &user), file, &right, READ | WRITE), "it is no right to write");
        let forged = Right { grant: READ | WRITE, ..right };
        assert!(!key.allows((session, &user), file, &forged, WRITE));
        for bit in 0..8 * PROOF_BYTES {
            let mut changed = right;
            changed.proof[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.allows((session, &user), file, &changed, READ), "bit {bit}");
        }
        assert!(!key.allows((session, &user), file, &Right::default(), 0));
    }
}
