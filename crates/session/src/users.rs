//! Users for whom a session asks, if no kernel has checked permissions before it.
//!
//! A session of role *gateway* speaks for several users. It names each one once, with its groups, and
//! requests carry the number that it got. The service checks what that user may do.
//!
//! A user reaches inodes by their names, from the root directory. A request about an inode that its user has
//! not reached is refused: inode numbers can be guessed, and a directory that others may not enter protects
//! everything below it. The memory of what was reached is bounded; who is refused walks from the root again.

use penstock_base::{BoundedSet, FileId, Ino};
use penstock_wire::metadata::UserRequest;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::rc::Rc;

/// Most users of a session.
const MOST_USERS: usize = 4096;
/// Most further groups of a user, as Linux has it, and below of all users of a session.
const MOST_GROUPS: usize = 1 << 16;
const MOST_GROUPS_OF_ALL: usize = 1 << 20;
/// The root directory, which everybody reaches.
const ROOT: Ino = Ino::of_family(1, 1);

/// The role of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// A mount, whose kernel checks permissions. It is trusted.
    #[default]
    Mount,
    /// It asks for users, whose permissions are checked here.
    Gateway,
}

/// A user, with all of its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The user id.
    pub uid: u32,
    /// The group of files that the user makes.
    pub gid: u32,
    /// Further groups, sorted.
    groups: Vec<u32>,
}

impl Role {
    /// The word for people.
    pub fn word(self) -> &'static str {
        match self {
            Self::Mount => "mount",
            Self::Gateway => "gateway",
        }
    }
}

impl User {
    /// A user with these further groups.
    pub fn new(uid: u32, gid: u32, mut groups: Vec<u32>) -> Self {
        groups.sort_unstable();
        groups.dedup();
        Self { uid, gid, groups }
    }

    /// True for the user that may do everything.
    pub fn is_root(&self) -> bool {
        self.uid == 0
    }

    /// True if the user is in a group.
    pub fn is_in(&self, gid: u32) -> bool {
        self.gid == gid || self.groups.binary_search(&gid).is_ok()
    }

    /// The number of the user in requests: a part of a hash of its ids, and never 0.
    fn number(&self) -> u32 {
        let hash = Sha256::digest(self.id());
        u32::from_le_bytes([hash[0], hash[1], hash[2], hash[3]]).max(1)
    }

    /// The bytes by which a grant names the user.
    pub(crate) fn id(&self) -> Vec<u8> {
        let all = [&[self.uid, self.gid][..], &self.groups].concat();
        all.iter().flat_map(|id| id.to_le_bytes()).collect()
    }
}

/// The users of one session, by number.
#[derive(Default)]
pub(crate) struct Users {
    all: BTreeMap<u32, Rc<User>>,
    /// The number of groups of all of them.
    groups: usize,
    /// By number of the user.
    reached: BoundedSet<(u32, FileId)>,
}

impl Users {
    /// Adds a user, unless it is known. Returns its number, which follows from its ids: a request that is
    /// sent again after a restart names the same user, or one that is not known. The error is the reason of
    /// a refusal.
    pub(crate) fn add(&mut self, request: UserRequest) -> Result<u32, String> {
        if request.groups.len() > MOST_GROUPS {
            return Err(format!("a user of more than {MOST_GROUPS} groups"));
        }
        let user = User::new(request.uid, request.gid, request.groups);
        let number = user.number();
        match self.all.get(&number) {
            Some(known) if **known == user => return Ok(number),
            Some(_) => {
                return Err("another user has the same number: name this one in another session".into());
            }
            None => {}
        }
        let groups = self.groups + user.groups.len();
        if self.all.len() >= MOST_USERS || groups > MOST_GROUPS_OF_ALL {
            return Err(format!(
                "a session has at most {MOST_USERS} users, with {MOST_GROUPS_OF_ALL} groups in all"
            ));
        }
        self.groups = groups;
        self.all.insert(number, Rc::new(user));
        Ok(number)
    }

    /// The number of users.
    pub(crate) fn count(&self) -> u64 {
        self.all.len() as u64
    }

    /// The user of this number.
    pub(crate) fn get(&self, number: u32) -> Option<&Rc<User>> {
        self.all.get(&number)
    }

    /// A user has reached an inode.
    pub(crate) fn reach(&self, number: u32, file: FileId) {
        assert!(self.get(number).is_some(), "user {number} is known");
        self.reached.insert((number, file));
    }

    /// True if a user has reached an inode.
    pub(crate) fn has_reached(&self, number: u32, file: FileId) -> bool {
        file == FileId::main(ROOT) || self.reached.contains(&(number, file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(uid: u32, groups: &[u32]) -> UserRequest {
        UserRequest { uid, gid: 100, groups: groups.to_vec() }
    }

    #[test]
    fn a_user_has_one_number_whatever_the_order_of_its_groups_or_of_users() {
        let mut users = Users::default();
        let first = users.add(request(7, &[3, 1, 3])).unwrap();
        let second = users.add(request(7, &[3])).unwrap();
        assert_ne!(first, second);
        assert_eq!(users.add(request(7, &[1, 3])), Ok(first));
        let user = users.get(first).unwrap();
        assert!(user.is_in(100) && user.is_in(1) && user.is_in(3) && !user.is_in(2) && !user.is_root());
        assert!([0, first ^ 1].iter().all(|number| users.get(*number).is_none()));
        assert_ne!(users.get(first).unwrap().id(), users.get(second).unwrap().id());
        // After a restart they are named in another order.
        let mut later = Users::default();
        assert_eq!(later.add(request(7, &[3])), Ok(second));
        assert!(later.get(first).is_none());
        assert_eq!(later.add(request(7, &[1, 3])), Ok(first));
    }

    #[test]
    fn users_and_groups_are_bounded() {
        let mut users = Users::default();
        for uid in 0..MOST_USERS as u32 {
            users.add(request(uid, &[])).unwrap();
        }
        assert!(users.add(request(MOST_USERS as u32, &[])).is_err());
        assert!(users.add(request(5, &[])).is_ok(), "it is known");
        let mut users = Users::default();
        let many: Vec<u32> = (0..MOST_GROUPS as u32).collect();
        for uid in 0..(MOST_GROUPS_OF_ALL / MOST_GROUPS) as u32 {
            users.add(request(uid, &many)).unwrap();
        }
        assert!(users.add(request(99, &[1])).is_err() && users.add(request(99, &[])).is_ok());
        assert!(Users::default().add(request(5, &vec![9; MOST_GROUPS + 1])).is_err());
    }

    #[test]
    fn who_has_not_reached_an_inode_does_not_know_it() {
        let mut users = Users::default();
        let [user, other] = [7, 8].map(|uid| users.add(request(uid, &[])).unwrap());
        let file = FileId::main(Ino(9));
        assert!(users.has_reached(user, FileId::main(ROOT)) && !users.has_reached(user, file));
        users.reach(user, file);
        assert!(users.has_reached(user, file) && !users.has_reached(other, file));
    }
}
