//! POSIX access control lists (POSIX.1e draft 17, acl(5)), stored as extended attributes.
//!
//! The attributes' values are those that the kernel sends and receives.
//!
//! The kernel of a mount checks permissions by them, and [`crate::access`] those of other users. A list and
//! the permission bits of a mode agree: each sets the other.

use penstock_session::User;
use rustix::io::Errno;

/// Name of the list by which access is checked.
pub(crate) const ACCESS: &[u8] = b"system.posix_acl_access";
/// Name of the list that new inodes in a directory inherit.
pub(crate) const DEFAULT: &[u8] = b"system.posix_acl_default";

const VERSION: [u8; 4] = 2u32.to_le_bytes();
const ENTRY_BYTES: usize = 8;
const USER_OBJ: u16 = 1;
const USER: u16 = 2;
const GROUP_OBJ: u16 = 4;
const GROUP: u16 = 8;
const MASK: u16 = 16;
const OTHER: u16 = 32;

/// True if an extended attribute of this name is a list.
pub(crate) fn is_acl(name: &[u8]) -> bool {
    name == ACCESS || name == DEFAULT
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    tag: u16,
    perm: u16,
    id: u32,
}

/// A valid list: entries sorted by tag, each tag without an id at most once, and a mask wherever users or
/// groups are named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Acl(Vec<Entry>);

impl Acl {
    /// Decodes a list as the kernel sends it: a version and entries of tag (2 bytes), permissions (2) and id
    /// (4), all little-endian. EINVAL if the list is not valid.
    pub(crate) fn decode(value: &[u8]) -> Result<Self, Errno> {
        let entries = value.strip_prefix(&VERSION).ok_or(Errno::INVAL)?;
        if !entries.len().is_multiple_of(ENTRY_BYTES) {
            return Err(Errno::INVAL);
        }
        let entry = |bytes: &[u8]| Entry {
            tag: u16::from_le_bytes([bytes[0], bytes[1]]),
            perm: u16::from_le_bytes([bytes[2], bytes[3]]),
            id: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
        };
        let acl = Self(entries.chunks_exact(ENTRY_BYTES).map(entry).collect());
        if acl.is_valid() { Ok(acl) } else { Err(Errno::INVAL) }
    }

    fn is_valid(&self) -> bool {
        let count = |tag: u16| self.0.iter().filter(|entry| entry.tag == tag).count();
        let known = |entry: &Entry| {
            [USER_OBJ, USER, GROUP_OBJ, GROUP, MASK, OTHER].contains(&entry.tag) && entry.perm <= 7
        };
        let named = count(USER) + count(GROUP) > 0;
        self.0.iter().all(known)
            && self.0.is_sorted_by_key(|entry| entry.tag)
            && [USER_OBJ, GROUP_OBJ, OTHER].iter().all(|tag| count(*tag) == 1)
            && count(MASK) <= 1
            && (!named || count(MASK) == 1)
    }

    /// True if the list gives this access to a user who does not own the inode, whose group is `gid`. The
    /// first entry that fits the user decides, limited by the mask; of its groups any that gives the access.
    pub(crate) fn allows(&self, user: &User, gid: u32, wanted: u32) -> bool {
        let gives = |perm: u16| u32::from(perm) & wanted == wanted;
        let mask = self.0.iter().find(|entry| entry.tag == MASK).map_or(7, |entry| entry.perm);
        if let Some(named) = self.0.iter().find(|entry| entry.tag == USER && entry.id == user.uid) {
            return gives(named.perm & mask);
        }
        let is_own = |entry: &&Entry| match entry.tag {
            GROUP_OBJ => user.is_in(gid),
            GROUP => user.is_in(entry.id),
            _ => false,
        };
        let mut groups = self.0.iter().filter(is_own).peekable();
        if groups.peek().is_some() {
            return groups.any(|entry| gives(entry.perm) && gives(entry.perm & mask));
        }
        self.0.iter().any(|entry| entry.tag == OTHER && gives(entry.perm))
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut value = VERSION.to_vec();
        for Entry { tag, perm, id } in &self.0 {
            value.extend_from_slice(&tag.to_le_bytes());
            value.extend_from_slice(&perm.to_le_bytes());
            value.extend_from_slice(&id.to_le_bytes());
        }
        value
    }

    /// True if the list is equivalent to permission bits.
    pub(crate) fn is_plain(&self) -> bool {
        self.0.len() == 3
    }

    /// The three entries that permission bits stand for, each with the shift of its bits in a mode. The mask,
    /// if there is one, takes the place of the group.
    fn classes(&mut self) -> [(&mut u16, u32); 3] {
        let group = if self.0.iter().any(|entry| entry.tag == MASK) { MASK } else { GROUP_OBJ };
        let mut found = self.0.iter_mut().filter_map(|entry| match entry.tag {
            USER_OBJ => Some((&mut entry.perm, 6)),
            OTHER => Some((&mut entry.perm, 0)),
            tag if tag == group => Some((&mut entry.perm, 3)),
            _ => None,
        });
        std::array::from_fn(|_| found.next().expect("a valid list has all three"))
    }

    /// Returns `mode` with its permission bits replaced by those of the list.
    pub(crate) fn mode(&mut self, mode: u32) -> u32 {
        let bits: u32 = self.classes().into_iter().map(|(perm, at)| u32::from(*perm) << at).sum();
        (mode & !0o777) | bits
    }

    /// Sets the list's permissions to those of a mode.
    pub(crate) fn set_mode(&mut self, mode: u32) {
        for (perm, at) in self.classes() {
            *perm = (mode >> at & 7) as u16;
        }
    }

    /// Removes permissions from the list that a mode does not have.
    pub(crate) fn limit(&mut self, mode: u32) {
        for (perm, at) in self.classes() {
            *perm &= (mode >> at & 7) as u16;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acl(entries: &[(u16, u16, u32)]) -> Acl {
        Acl(entries.iter().map(|(tag, perm, id)| Entry { tag: *tag, perm: *perm, id: *id }).collect())
    }

    #[test]
    fn a_list_comes_back_and_bad_ones_are_refused() {
        let none = u32::MAX;
        let plain = [(USER_OBJ, 7, none), (GROUP_OBJ, 5, none), (OTHER, 1, none)];
        let named = [plain[0], (USER, 6, 1000), plain[1], (GROUP, 4, 50), (MASK, 6, none), plain[2]];
        for good in [&plain[..], &named] {
            assert_eq!(Acl::decode(&acl(good).encode()), Ok(acl(good)));
        }
        let unmasked = [plain[0], named[1], plain[1], plain[2]];
        let twice = [plain[0], plain[0], plain[1], plain[2]];
        let unordered = [plain[1], plain[0], plain[2]];
        let unknown = [plain[0], plain[1], plain[2], (64, 7, none)];
        let too_much = [(USER_OBJ, 8, none), plain[1], plain[2]];
        for bad in [&[][..], &plain[..2], &unmasked, &twice, &unordered, &unknown, &too_much] {
            assert_eq!(Acl::decode(&acl(bad).encode()), Err(Errno::INVAL), "{bad:?}");
        }
        let value = acl(&plain).encode();
        assert_eq!(Acl::decode(&value[..value.len() - 1]), Err(Errno::INVAL));
        assert_eq!(Acl::decode(&[1, 0, 0, 0]), Err(Errno::INVAL), "another version");
    }

    #[test]
    fn the_mask_is_the_group_of_the_mode() {
        let none = u32::MAX;
        let mut list = acl(&[
            (USER_OBJ, 7, none),
            (USER, 6, 1000),
            (GROUP_OBJ, 5, none),
            (MASK, 6, none),
            (OTHER, 1, none),
        ]);
        assert_eq!(list.mode(0o104_000), 0o104_761);
        list.limit(0o100_640);
        assert_eq!(list.mode(0), 0o640);
        list.set_mode(0o070);
        assert_eq!(list.mode(0), 0o070);
        assert_eq!(list.0[2].perm, 5, "the owning group keeps its own");
        assert!(!list.is_plain());
    }
}
