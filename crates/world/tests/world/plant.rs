//! Plants damage of every kind, by changing rows without the services.

use crate::machine::Machine;
use penstock_base::{Birth, Branch, FileId, FindingKind as Kind, TargetId};
use penstock_chunk::rows::{Lent, LentKey, Loan};
use penstock_chunk::{ChunkKey, Extent, FileRow, MapRow, Owner};
use penstock_kv::{Kv, WriteSet};
use std::ops::Range;
use std::rc::Rc;

/// Inodes of the store that is damaged.
#[derive(Clone, Copy)]
pub struct Known {
    pub root: FileId,
    pub keep: FileId,
    pub victim: FileId,
    pub dir: FileId,
    pub inner: FileId,
    pub other: FileId,
}

/// Access to rows by the keys that docs/format/kv.md defines.
pub struct Rows {
    kv: Rc<dyn Kv>,
}

fn key(tag: u8, words: &[u64]) -> Vec<u8> {
    let words = words.iter().flat_map(|word| word.to_be_bytes());
    std::iter::once(tag).chain(words).collect()
}

fn inode(id: FileId) -> Vec<u8> {
    key(0x10, &[id.branch.0, id.ino.0, Birth::FIRST.suffix()])
}

fn removed(id: FileId) -> Vec<u8> {
    key(0x13, &[0, id.ino.0])
}

fn file(id: FileId) -> Vec<u8> {
    FileRow::key(id, Birth::FIRST)
}

fn map(id: FileId, index: u64) -> Vec<u8> {
    ChunkKey { file: id, index }.row(Birth::FIRST)
}

fn entry_value(id: FileId, kind: u32, name: &[u8]) -> Vec<u8> {
    let len = name.len() as u32;
    [&[2, 0][..], &id.ino.0.to_le_bytes(), &kind.to_le_bytes(), &len.to_le_bytes(), name].concat()
}

const REGULAR: u32 = 0o100_000;
const NOWHERE: FileId = FileId::of_numbers(0, (1 << 40) + 3000);

impl Rows {
    pub fn of(machine: &Machine) -> Self {
        Self { kv: machine.node.kv() }
    }

    async fn get(&self, key: Vec<u8>) -> Vec<u8> {
        self.kv.get(key).await.unwrap().expect("the row exists")
    }

    async fn put(&self, key: Vec<u8>, value: Vec<u8>) {
        let mut writes = WriteSet::new();
        writes.put(key, value);
        self.kv.commit(writes).await.unwrap();
    }

    async fn delete(&self, key: Vec<u8>) {
        let mut writes = WriteSet::new();
        writes.delete(key);
        self.kv.commit(writes).await.unwrap();
    }

    async fn patch(&self, key: Vec<u8>, at: Range<usize>, bytes: &[u8]) {
        let mut value = self.get(key.clone()).await;
        value[at].copy_from_slice(bytes);
        self.put(key, value).await;
    }

    async fn cut(&self, key: Vec<u8>, len: usize) {
        let value = self.get(key.clone()).await;
        self.put(key, value[..len].to_vec()).await;
    }

    /// Cookie and value of a name's entry.
    async fn entry(&self, dir: FileId, name: &[u8]) -> (u64, Vec<u8>) {
        let (from, until) = (key(0x11, &[0, dir.ino.0]), key(0x11, &[0, dir.ino.0 + 1]));
        let rows = self.kv.scan(from, until, 1000).await.unwrap();
        let (key, value) =
            rows.into_iter().find(|(_, value)| value.ends_with(name)).expect("it has the name");
        (u64::from_be_bytes(key[17..25].try_into().unwrap()), value)
    }

    async fn put_entry(&self, dir: FileId, cookie: u64, value: Vec<u8>) {
        self.put(key(0x11, &[0, dir.ino.0, cookie, Birth::FIRST.suffix()]), value).await;
    }

    async fn delete_entry(&self, dir: FileId, name: &[u8]) {
        let (cookie, _) = self.entry(dir, name).await;
        self.delete(key(0x11, &[0, dir.ino.0, cookie, Birth::FIRST.suffix()])).await;
    }

    pub async fn extents(&self, id: FileId) -> Vec<Extent> {
        MapRow::decode(&self.get(map(id, 0)).await, Birth::FIRST).unwrap().extents
    }

    async fn put_extents(&self, id: FileId, extents: Vec<Extent>) {
        let truncations = MapRow::decode(&self.get(map(id, 0)).await, Birth::FIRST).unwrap().truncations;
        self.put(map(id, 0), MapRow { truncations, extents }.encode(Birth::FIRST)).await;
    }

    async fn add_extent(&self, id: FileId, count: u32, block: u64) {
        let mut extents = self.extents(id).await;
        let last = extents.last().unwrap();
        let first = last.first + last.count;
        extents.push(Extent { first, count, block, preallocated: false, birth: Birth::FIRST });
        self.put_extents(id, extents).await;
    }

    /// Inserts an extent of no block at the start of the map.
    pub async fn put_empty_extent_first(&self, id: FileId) {
        let mut extents = self.extents(id).await;
        extents.insert(0, Extent { count: 0, ..extents[0] });
        self.put_extents(id, extents).await;
    }

    /// Rows of sessions of other processes with the numbers that are given next.
    pub async fn put_next_sessions(&self) {
        for id in 1..40 {
            self.put_session(id).await;
        }
    }

    /// A row of a session of another process.
    pub async fn put_session(&self, id: u64) {
        let (number, lease) = (id.to_le_bytes(), 30_000_u32.to_le_bytes());
        let (role, user) = ([1], 0_u32.to_le_bytes());
        let names = [&1_u32.to_le_bytes()[..], b"c", &0_u32.to_le_bytes()].concat();
        let who = [&[2][..], &number, &lease, &role, &user, &names];
        self.put(key(0x15, &[7, id]), who.concat()).await;
    }

    /// The inode of a file says an old truncate generation.
    pub async fn put_old_generation(&self, id: FileId) {
        self.patch(inode(id), 93..101, &1u64.to_le_bytes()).await;
    }

    /// One byte of a file's row on the target, and one of an account's, say what this release never says.
    pub async fn put_odd_counts(&self, id: FileId, owner: Owner) {
        self.patch(file(id), 10..11, &[4]).await;
        self.patch(owner.account(Branch::MAIN), 0..1, &[9]).await;
    }

    /// The root's row has contents of an unknown kind, and a file has no name.
    pub async fn put_odd_root(&self, root: FileId) {
        self.patch(inode(root), 138..139, &[9]).await;
        self.delete_entry(root, b"victim").await;
    }

    /// A map row without extents, of the last chunk that a key can name.
    pub async fn put_last_chunk(&self, id: FileId) {
        let row = MapRow { truncations: 0, extents: Vec::new() };
        self.put(map(id, u64::MAX), row.encode(Birth::FIRST)).await;
    }

    /// The root's row says that it is another inode, and another inode's row cannot be read.
    pub async fn put_wrong_root(&self, root: FileId, unreadable: FileId) {
        self.patch(inode(root), 1..9, &NOWHERE.ino.0.to_le_bytes()).await;
        self.cut(inode(unreadable), 20).await;
    }

    pub async fn set_bit(&self, block: u64, used: bool) {
        let group = key(0x21, &[block / 32768]);
        let mut value = self.get(group.clone()).await;
        let (byte, bit) = (1 + (block % 32768 / 8) as usize, 1u8 << (block % 8));
        value[byte] = if used { value[byte] | bit } else { value[byte] & !bit };
        self.put(group, value).await;
    }

    /// Plants one kind of damage. Returns true if the damage survives a start; else only a check before a
    /// start finds it.
    pub async fn plant(&self, kind: Kind, known: &Known) -> bool {
        let Known { root, keep, victim, dir, inner, other } = *known;
        match kind {
            Kind::BlockNotMarked => {
                let extent = self.extents(victim).await[0];
                for block in extent.block..extent.block + u64::from(extent.count) {
                    self.set_bit(block, false).await;
                }
            }
            Kind::BadGroupRow => self.cut(key(0x21, &[0]), 10).await,
            Kind::BadLoanRow => self.put(key(0x28, &[1000]), vec![1]).await,
            Kind::LoanDisagrees => {
                let key = LentKey { borrower: TargetId(0), number: 5 };
                let loan = Loan { stripe: 20, stripes: 1, gaps: Vec::new() };
                self.put(key.row(), Lent { group: 1000, loan, is_restored: false }.encode()).await;
            }
            Kind::InodeReservationTooLow => {
                self.patch(key(0x01, &[0]), 73..81, &(root.ino.0 + 1).to_le_bytes()).await;
            }
            Kind::SessionReservationTooLow => {
                self.put_session(1 << 40).await;
                return false;
            }
            Kind::BadSessionRow => {
                self.put(key(0x14, &[0, 1, 1, 1]), vec![2]).await;
                return false;
            }
            Kind::UnknownRow => self.put(vec![0x30, 1], vec![1]).await,
            Kind::MissingRoot => self.delete(inode(root)).await,
            Kind::BadInodeRow => self.cut(inode(victim), 50).await,
            Kind::WrongInodeNumber => self.patch(inode(victim), 1..9, &[9; 8]).await,
            Kind::BadEntryRow => {
                let (cookie, _) = self.entry(root, b"victim").await;
                self.cut(key(0x11, &[0, root.ino.0, cookie, Birth::FIRST.suffix()]), 5).await;
            }
            Kind::BadXattrRow => self.put(key(0x12, &[0, victim.ino.0]), b"value".to_vec()).await,
            Kind::BadQueueRow => self.put(vec![0x13, 7], vec![1, 0]).await,
            Kind::BadMapRow => self.cut(map(victim, 0), 9).await,
            Kind::ExtentBeyondChunk => {
                let extent = self.extents(victim).await[0];
                self.put_extents(victim, vec![Extent { first: 256, ..extent }]).await;
            }
            Kind::MissingInode => self.delete(inode(victim)).await,
            Kind::DanglingEntry => {
                self.put_entry(root, 77 << 8, entry_value(NOWHERE, REGULAR, b"ghost")).await
            }
            Kind::BadEntryName => self.put_entry(root, 78 << 8, entry_value(victim, REGULAR, b"a/b")).await,
            Kind::MisplacedEntry => {
                let (cookie, value) = self.entry(root, b"victim").await;
                self.delete_entry(root, b"victim").await;
                self.put_entry(root, cookie ^ (1 << 30), value).await;
            }
            Kind::DuplicateName => {
                let (cookie, value) = self.entry(root, b"victim").await;
                self.put_entry(root, cookie + 1, value).await;
            }
            Kind::WrongEntryKind => {
                let (cookie, _) = self.entry(root, b"victim").await;
                let at = key(0x11, &[0, root.ino.0, cookie, Birth::FIRST.suffix()]);
                self.patch(at, 10..14, &0o120_000u32.to_le_bytes()).await;
            }
            Kind::EntryWithoutDirectory => {
                let (cookie, value) = self.entry(root, b"victim").await;
                self.put_entry(keep, cookie, value).await;
            }
            Kind::DirectoryExtraName => {
                let (cookie, value) = self.entry(root, b"dir").await;
                self.put_entry(other, cookie, value).await;
            }
            Kind::DirectoryCycle => {
                let (cookie, value) = self.entry(root, b"dir").await;
                self.delete_entry(root, b"dir").await;
                self.put_entry(inner, cookie, value).await;
            }
            Kind::OrphanInode => self.delete_entry(root, b"victim").await,
            Kind::NamedAndQueued => self.put(removed(victim), vec![1, 0]).await,
            Kind::QueuedWithoutInode => self.put(removed(NOWHERE), vec![1, 0]).await,
            Kind::WrongInodeData => self.patch(inode(victim), 138..139, &[0]).await,
            Kind::WrongSize => self.patch(inode(victim), 37..45, &(u64::MAX / 2).to_le_bytes()).await,
            Kind::WrongLayout => self.patch(inode(victim), 133..137, &7u32.to_le_bytes()).await,
            Kind::WrongParent => self.patch(inode(dir), 101..109, &5u64.to_le_bytes()).await,
            Kind::WrongLinkCount => self.patch(inode(victim), 13..17, &9u32.to_le_bytes()).await,
            Kind::WrongEntryCount => self.patch(inode(dir), 109..117, &77u64.to_le_bytes()).await,
            Kind::EmptyExtent => self.add_extent(victim, 0, 5).await,
            Kind::ExtentBeyondVolume => self.add_extent(victim, 1, 1 << 40).await,
            Kind::DoubleOwnedBlock => {
                let row = self.get(map(keep, 0)).await;
                self.put(map(victim, 0), row).await;
            }
            Kind::ChunksOfNonFile => {
                let row = self.get(map(victim, 0)).await;
                self.delete(map(victim, 0)).await;
                self.put(map(dir, 0), row).await;
            }
            Kind::ChunkBeyondLimit => {
                let row = self.get(map(victim, 0)).await;
                self.delete(map(victim, 0)).await;
                self.put(map(victim, 1 << 45), row).await;
            }
            Kind::BadFileRow => self.cut(file(victim), 9).await,
            Kind::WrongFileRow => self.patch(file(victim), 25..33, &77u64.to_le_bytes()).await,
            Kind::WrongAccount => {
                let rows = self.kv.scan(vec![0x23], vec![0x24], 1).await.unwrap();
                self.patch(rows[0].0.clone(), 1..9, &77u64.to_le_bytes()).await;
            }
            Kind::BlockNotOwned => self.set_bit(3000, true).await,
            Kind::WrongFreeCount => {
                self.set_bit(3000, true).await;
                return false;
            }
            // Not in the rows: the test writes the stripe on the volume.
            Kind::WrittenFreeStripe => return false,
        }
        true
    }

    /// Sets a feature bit in the row of the store: in the set that begins at byte `at`.
    pub async fn put_feature(&self, at: usize) {
        self.patch(vec![0x00], at..at + 1, &[4]).await;
    }

    /// The feature bits in the row of the store.
    pub async fn features(&self) -> Vec<u8> {
        self.get(vec![0x00]).await[1..25].to_vec()
    }

    pub async fn flush(&self) {
        self.kv.flush().await.unwrap();
    }
}
