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
use std::rc::Rc;

/// Most users of a session.
const MOST_USERS: usize = 4096;
/// Most groups of a user, as Linux has it.
const MOST_GROUPS: usize = 1 << 16;
/// The root directory, which everybody reaches.
const ROOT: Ino = Ino((1 << 40) | 1);

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

    /// The bytes by which a grant names the user.
    pub(crate) fn id(&self) -> Vec<u8> {
        let all = [&[self.uid, self.gid][..], &self.groups].concat();
        all.iter().flat_map(|id| id.to_le_bytes()).collect()
    }
}

/// The users of one session.
#[derive(Default)]
pub(crate) struct Users {
    all: Vec<Rc<User>>,
    /// By number of the user.
    reached: BoundedSet<(u32, FileId)>,
}

impl Users {
    /// Adds a user, unless it is known. Returns its number, from 1. The error is the reason of a refusal.
    pub(crate) fn add(&mut self, request: UserRequest) -> Result<u32, String> {
        if request.groups.len() > MOST_GROUPS {
            return Err(format!("a user of more than {MOST_GROUPS} groups"));
        }
        let user = User::new(request.uid, request.gid, request.groups);
        let known = self.all.iter().position(|known| **known == user);
        if known.is_none() {
            if self.all.len() >= MOST_USERS {
                return Err(format!("there are {MOST_USERS} users of the session, which is the most"));
            }
            self.all.push(Rc::new(user));
        }
        let at = known.unwrap_or(self.all.len() - 1);
        Ok(u32::try_from(at).expect("users are few") + 1)
    }

    /// The number of users.
    pub(crate) fn count(&self) -> u64 {
        self.all.len() as u64
    }

    /// The user of this number.
    pub(crate) fn get(&self, number: u32) -> Option<&Rc<User>> {
        self.all.get(usize::try_from(number.checked_sub(1)?).ok()?)
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
    fn a_user_has_one_number_whatever_the_order_of_its_groups() {
        let mut users = Users::default();
        assert_eq!(users.add(request(7, &[3, 1, 3])), Ok(1));
        assert_eq!(users.add(request(7, &[3])), Ok(2));
        assert_eq!(users.add(request(7, &[1, 3])), Ok(1));
        let user = users.get(1).unwrap();
        assert!(user.is_in(100) && user.is_in(1) && user.is_in(3) && !user.is_in(2) && !user.is_root());
        assert!(users.get(0).is_none() && users.get(3).is_none() && users.get(u32::MAX).is_none());
        assert_ne!(users.get(1).unwrap().id(), users.get(2).unwrap().id());
    }

    #[test]
    fn users_and_groups_are_bounded() {
        let mut users = Users::default();
        for uid in 0..MOST_USERS as u32 {
            assert_eq!(users.add(request(uid, &[])), Ok(uid + 1));
        }
        assert!(users.add(request(MOST_USERS as u32, &[])).is_err());
        assert_eq!(users.add(request(5, &[])), Ok(6), "it is known");
        assert!(users.add(request(5, &vec![9; MOST_GROUPS + 1])).is_err());
    }

    #[test]
    fn who_has_not_reached_an_inode_does_not_know_it() {
        let mut users = Users::default();
        users.add(request(7, &[])).unwrap();
        let file = FileId::main(Ino(9));
        assert!(users.has_reached(1, FileId::main(ROOT)) && !users.has_reached(1, file));
        users.reach(1, file);
        assert!(users.has_reached(1, file) && !users.has_reached(2, file));
    }
}
