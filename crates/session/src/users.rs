//! Users for whom a session asks, if no kernel has checked permissions before it.
//!
//! A session of role *gateway* speaks for several users. It names each one once, with its groups, and
//! requests carry the number that it got. The service checks what that user may do.
//!
//! A user reaches inodes by their names, from the root directory. A request about an inode that its user has
//! not reached is refused: inode numbers can be guessed, and a directory that others may not enter protects
//! everything below it. The memory of what was reached is bounded; who is refused walks from the root again.

use penstock_base::{FileId, HashMap, HashSet, Ino};
use penstock_wire::metadata::UserRequest;
use sha2::{Digest, Sha256};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Most users of a session.
const MOST_USERS: usize = 4096;
/// Most further groups of a user, as Linux has it, and below of all users of a session.
const MOST_GROUPS: usize = 1 << 16;
const MOST_GROUPS_OF_ALL: usize = 1 << 20;
/// Most inodes that are remembered as reached by a user, and below by all users of a session.
const MOST_REACHED: usize = 1 << 14;
const MOST_REACHED_BY_ALL: usize = 1 << 20;
/// Most inodes that the users of a session have open, each counted for each user.
const MOST_OPEN: usize = 1 << 20;
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
    reached: RefCell<Reached>,
    /// The number of times that each user has a file open, and the access with which it was opened.
    opens: BTreeMap<(FileId, u32), (u64, u32)>,
    /// The sum of these numbers for each file.
    sums: BTreeMap<FileId, u64>,
}

/// The inodes that each user has reached.
#[derive(Default)]
struct Reached {
    by_user: HashMap<u32, HashSet<FileId>>,
    count: usize,
}

impl Reached {
    fn insert(&mut self, user: u32, file: FileId) {
        let own = self.by_user.get(&user).map_or(0, HashSet::len);
        let forgets = match own >= MOST_REACHED {
            true => Some(user),
            // Of all users the one with the most.
            false if self.count >= MOST_REACHED_BY_ALL => {
                self.by_user.iter().max_by_key(|(_, files)| files.len()).map(|(user, _)| *user)
            }
            false => None,
        };
        if let Some(user) = forgets {
            self.count -= self.by_user.remove(&user).map_or(0, |files| files.len());
        }
        self.count += usize::from(self.by_user.entry(user).or_default().insert(file));
        assert!(self.count <= MOST_REACHED_BY_ALL, "what is reached is bounded");
    }
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
        self.reached.borrow_mut().insert(number, file);
    }

    /// A user opens a file with this access. Returns false if the session has too many open.
    pub(crate) fn open(&mut self, number: u32, file: FileId, access: u32) -> bool {
        if !self.may_open(number, file) {
            return false;
        }
        let (count, all) = self.opens.entry((file, number)).or_default();
        (*count, *all) = (*count + 1, *all | access);
        self.add_to_sum(file, 0, 1);
        true
    }

    /// False if the session has too many open, and the user does not have this file open already.
    fn may_open(&self, number: u32, file: FileId) -> bool {
        self.opens.len() < MOST_OPEN || self.opens.contains_key(&(file, number))
    }

    /// A user closes a file once. Returns false if it has not opened it.
    pub(crate) fn close(&mut self, number: u32, file: FileId) -> bool {
        let Some((count, _)) = self.opens.get_mut(&(file, number)) else { return false };
        *count -= 1;
        if *count == 0 {
            self.opens.remove(&(file, number));
        }
        self.add_to_sum(file, 1, 0);
        true
    }

    /// The gateway says after a restart how often a user has a file open, with whatever access. Returns how
    /// often all users have; none if the session has too many open.
    pub(crate) fn set_opens(&mut self, number: u32, file: FileId, count: u64) -> Option<u64> {
        if !self.may_open(number, file) {
            return None;
        }
        let before = match count {
            0 => self.opens.remove(&(file, number)),
            _ => self.opens.insert((file, number), (count, u32::MAX)),
        };
        Some(self.add_to_sum(file, before.map_or(0, |(count, _)| count), count))
    }

    /// Puts one number in the place of another in the sum of a file. Returns the sum.
    fn add_to_sum(&mut self, file: FileId, before: u64, count: u64) -> u64 {
        let sum = self.sums.get(&file).copied().unwrap_or(0);
        let sum = sum.checked_sub(before).expect("the sum has each number") + count;
        assert!(self.sums.len() <= MOST_OPEN, "a file with a sum is open");
        match sum {
            0 => drop(self.sums.remove(&file)),
            _ => drop(self.sums.insert(file, sum)),
        }
        sum
    }

    /// The access with which a user has a file open; none if it has not.
    pub(crate) fn access(&self, number: u32, file: FileId) -> Option<u32> {
        self.opens.get(&(file, number)).map(|(_, access)| *access)
    }

    /// True if a user has reached an inode.
    pub(crate) fn has_reached(&self, number: u32, file: FileId) -> bool {
        let reached = self.reached.borrow();
        file == FileId::main(ROOT)
            || reached.by_user.get(&number).is_some_and(|files| files.contains(&file))
            || self.access(number, file).is_some()
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

    /// Regression: one user made all others forget what they had reached.
    #[test]
    fn a_user_who_reaches_much_makes_no_other_forget() {
        let mut users = Users::default();
        let [one, other] = [7, 8].map(|uid| users.add(request(uid, &[])).unwrap());
        users.reach(one, FileId::main(Ino(9)));
        (0..1 << 16).for_each(|ino| users.reach(other, FileId::main(Ino(100 + ino))));
        assert!(users.has_reached(one, FileId::main(Ino(9))));
        assert!(users.reached.borrow().count <= 1 + MOST_REACHED);
    }

    #[test]
    fn a_user_closes_what_it_has_opened() {
        let mut users = Users::default();
        let [one, other] = [7, 8].map(|uid| users.add(request(uid, &[])).unwrap());
        let file = FileId::main(Ino(9));
        assert!(users.open(one, file, 1) && users.open(one, file, 2) && users.access(one, file) == Some(3));
        assert!(!users.close(other, file) && users.access(other, file).is_none());
        assert!(!users.has_reached(other, file) && users.has_reached(one, file));
        assert!(users.close(one, file) && users.close(one, file) && !users.close(one, file));
        assert!(users.access(one, file).is_none());
        assert!(users.sums.is_empty());
        assert_eq!(users.set_opens(one, file, 2), Some(2));
        assert_eq!(users.set_opens(other, file, 1), Some(3));
        assert_eq!(users.set_opens(one, file, 0), Some(1));
        assert!(users.open(one, file, 1) && users.close(other, file) && users.close(one, file));
        assert!(users.sums.is_empty() && users.opens.is_empty());
    }

    /// Regression: what a gateway reported after a restart had no bound, and took a time that grew with its
    /// square.
    #[test]
    fn what_is_reported_as_open_is_bounded_and_summed_at_once() {
        let (mut users, file) = (Users::default(), FileId::main(Ino(9)));
        for number in 0..MOST_OPEN as u32 {
            assert_eq!(users.set_opens(number, file, 1), Some(u64::from(number) + 1));
        }
        assert_eq!(users.set_opens(u32::MAX, file, 1), None);
        assert_eq!(users.set_opens(7, file, 0), Some(MOST_OPEN as u64 - 1));
        assert_eq!(users.set_opens(u32::MAX, file, 1), Some(MOST_OPEN as u64));
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
