//! Block-aligned memory buffers that drives read into and write from without a copy.
//!
//! A buffer is a memory kind, a handle and a range. Host memory is the only kind today; GPU memory will be a
//! second kind. Code that moves data passes buffers on; only kernels (`encode`, `crc`, `copy`) look inside.
//!
//! Invariants: the memory starts on a 4 KiB boundary, so any block-aligned range suits O_DIRECT. A [`Buf`] is
//! immutable and shared. A [`BufMut`] has one owner, and becomes a [`Buf`] when it is complete.
//!
//! The first touch of a page from a fresh mapping is a page fault, which costs more than copying the page.
//! Each thread therefore keeps the memory of dropped buffers for its next ones, up to [`KEPT_BYTES`]. Short
//! buffers have a smaller limit of their own, [`KEPT_SHORT_BYTES`]: they are kept because an aligned
//! allocation makes the allocator search.

use crate::BLOCK_BYTES;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

#[derive(Clone, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C, align(4096))]
struct Page([u8; BLOCK_BYTES]);

/// The most memory in bytes that a thread keeps for its next long buffers.
pub const KEPT_BYTES: usize = 32 << 20;
/// The same for short buffers. The limits are separate, so that neither kind displaces the other.
pub const KEPT_SHORT_BYTES: usize = 8 << 20;
/// Buffers of fewer pages are short.
const LONG_PAGES: usize = 8;

/// Pages that return to the pool of the thread that drops them.
struct Pages(Vec<Page>);

/// The memory that a thread keeps, by length in pages.
#[derive(Default)]
struct Pool {
    free: BTreeMap<usize, Vec<Vec<Page>>>,
    /// The number of pages kept in short buffers (0) and in long buffers (1).
    pages: [usize; 2],
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::default();
}

impl Pool {
    /// Takes kept memory of at least `pages` and at most an eighth more; none if there is none.
    fn take(&mut self, pages: usize) -> Option<Vec<Page>> {
        let (_, kept) = self.free.range_mut(pages..=pages + pages / 8).find(|(_, kept)| !kept.is_empty())?;
        let kept = kept.pop()?;
        self.pages[usize::from(kept.len() >= LONG_PAGES)] -= kept.len();
        Some(kept)
    }

    fn keep(&mut self, memory: Vec<Page>) {
        let long = memory.len() >= LONG_PAGES;
        let pages = &mut self.pages[usize::from(long)];
        if (*pages + memory.len()) * BLOCK_BYTES > if long { KEPT_BYTES } else { KEPT_SHORT_BYTES } {
            return;
        }
        *pages += memory.len();
        self.free.entry(memory.len()).or_default().push(memory);
    }
}

impl Pages {
    fn zeroed(pages: usize) -> Self {
        // An allocation failure aborts, like every other allocation of this process.
        Self(Page::new_vec_zeroed(pages).unwrap_or_else(|_| {
            std::alloc::handle_alloc_error(std::alloc::Layout::new::<Page>());
        }))
    }

    /// Pages from the pool, with their old contents; none if the pool has none of this size.
    fn kept(pages: usize) -> Option<Self> {
        POOL.with_borrow_mut(|pool| pool.take(pages)).map(Self)
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if !self.0.is_empty() {
            let memory = std::mem::take(&mut self.0);
            // A thread that is ending has no pool any more; the memory is then freed.
            let _ = POOL.try_with(|pool| pool.borrow_mut().keep(memory));
        }
    }
}

#[derive(Clone)]
enum Memory {
    Host(Arc<Pages>),
}

/// An immutable, shared range of memory.
#[derive(Clone)]
pub struct Buf {
    memory: Memory,
    start: usize,
    len: usize,
}

impl Buf {
    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        BufMut::zeroed(len).freeze()
    }

    /// A copy of `bytes`.
    pub fn copy_from(bytes: &[u8]) -> Self {
        let mut buf = BufMut::recycled(bytes.len());
        buf.as_mut().copy_from_slice(bytes);
        buf.freeze()
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns a part of this buffer; both share the memory.
    pub fn slice(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "slice {range:?} of {} bytes", self.len);
        Self { memory: self.memory.clone(), start: self.start + range.start, len: range.end - range.start }
    }

    /// Joins this buffer and `next` without a copy; none unless `next` directly follows it in the same
    /// memory.
    pub fn try_join(&self, next: &Self) -> Option<Self> {
        let (Memory::Host(mine), Memory::Host(theirs)) = (&self.memory, &next.memory);
        let adjacent = Arc::ptr_eq(mine, theirs) && self.start + self.len == next.start;
        adjacent.then(|| Self { memory: self.memory.clone(), start: self.start, len: self.len + next.len })
    }
}

impl AsRef<[u8]> for Buf {
    fn as_ref(&self) -> &[u8] {
        let Memory::Host(pages) = &self.memory;
        &pages.0.as_bytes()[self.start..self.start + self.len]
    }
}

impl std::ops::Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.as_ref()
    }
}

impl std::fmt::Debug for Buf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// A range of memory with one owner.
pub struct BufMut {
    pages: Pages,
    len: usize,
}

impl BufMut {
    /// A buffer of `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let count = len.div_ceil(BLOCK_BYTES);
        let pages = match Pages::kept(count) {
            Some(mut pages) => {
                pages.0.as_mut_bytes()[..len].fill(0);
                pages
            }
            None => Pages::zeroed(count),
        };
        Self { pages, len }
    }

    /// A buffer of `len` bytes with arbitrary contents, for a caller that overwrites all of them.
    pub fn recycled(len: usize) -> Self {
        let count = len.div_ceil(BLOCK_BYTES);
        let mut pages = Pages::kept(count).unwrap_or_else(|| Pages::zeroed(count));
        if cfg!(debug_assertions) {
            // Makes a read of bytes that were never written visible in tests.
            pages.0.as_mut_bytes().fill(0xa5);
        }
        Self { pages, len }
    }

    /// Shortens the buffer to its first `len` bytes. It keeps the memory behind them.
    pub fn truncate(&mut self, len: usize) {
        assert!(len <= self.len, "{len} of {} bytes", self.len);
        self.len = len;
    }

    /// A copy of `bytes`, padded with zeros to whole blocks.
    pub fn padded_from(bytes: &[u8]) -> Self {
        let mut buf = Self::zeroed(bytes.len().next_multiple_of(BLOCK_BYTES));
        buf.as_mut()[..bytes.len()].copy_from_slice(bytes);
        buf
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Makes the buffer immutable.
    pub fn freeze(self) -> Buf {
        Buf { memory: Memory::Host(Arc::new(self.pages)), start: 0, len: self.len }
    }
}

impl AsRef<[u8]> for BufMut {
    fn as_ref(&self) -> &[u8] {
        &self.pages.0.as_bytes()[..self.len]
    }
}

impl AsMut<[u8]> for BufMut {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.pages.0.as_mut_bytes()[..self.len]
    }
}

impl std::fmt::Debug for BufMut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BufMut({} bytes)", self.len)
    }
}

/// Joins `parts` into one buffer. Copies only if the parts are not consecutive ranges of the same memory.
pub fn gather(parts: &[Buf]) -> Buf {
    let mut joined = match parts.first() {
        Some(first) => first.clone(),
        None => return Buf::zeroed(0),
    };
    for part in &parts[1..] {
        match joined.try_join(part) {
            Some(longer) => joined = longer,
            None => return copy_all(parts),
        }
    }
    joined
}

fn copy_all(parts: &[Buf]) -> Buf {
    let mut whole = BufMut::recycled(parts.iter().map(Buf::len).sum());
    let mut at = 0;
    for part in parts {
        whole.as_mut()[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    }
    whole.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_page_aligned_and_slices_share_it() {
        let mut buf = BufMut::zeroed(10_000);
        assert_eq!(buf.as_ref().as_ptr() as usize % BLOCK_BYTES, 0);
        buf.as_mut()[5000] = 7;
        let buf = buf.freeze();
        let tail = buf.slice(5000..10_000);
        assert_eq!((tail[0], tail.len()), (7, 5000));
        assert_eq!(tail.as_ptr(), buf[5000..].as_ptr());
    }

    #[test]
    fn memory_comes_back_and_zeroed_means_zeros() {
        let mut buf = BufMut::recycled(100_000);
        buf.as_mut().fill(7);
        let at = buf.as_ref().as_ptr();
        drop(buf.freeze().slice(5..10));
        let again = BufMut::zeroed(99_000);
        assert_eq!(again.as_ref().as_ptr(), at);
        assert!(again.as_ref().iter().all(|byte| *byte == 0));
        assert_ne!(BufMut::recycled(99_000).as_ref().as_ptr(), at);
    }

    #[test]
    fn gather_copies_only_what_is_apart() {
        let whole = Buf::copy_from(&[1, 2, 3, 4]);
        let joined = gather(&[whole.slice(0..2), whole.slice(2..4)]);
        assert_eq!(joined.as_ptr(), whole.as_ptr());
        let swapped = gather(&[whole.slice(2..4), whole.slice(0..2)]);
        assert_eq!(&swapped[..], &[3, 4, 1, 2]);
    }
}
