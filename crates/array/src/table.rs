//! The stripe table in memory: for each stripe its stale strips and the version of every strip.
//!
//! Invariant: a change is applied only when the log record that says it is durable, so a page written by a
//! checkpoint never claims what the log could lose. All pages are held (8 bytes × (1 + strips) per stripe).

use crate::format::root::page_mark;
use crate::geometry::Geometry;
use penstock_base::Version;
use std::collections::{BTreeMap, BTreeSet};

/// The table of one array.
pub(crate) struct StripeTable {
    strips: usize,
    stripes_per_page: u64,
    words: Vec<u64>,
    dirty_pages: BTreeSet<u64>,
    /// The place (0 or 1) that holds each page's newest committed copy, and the checkpoint that wrote it.
    places: Vec<(u8, u64)>,
    /// The XOR of the marks of all pages with these checkpoints.
    sum: u64,
    written: u64,
    /// Written stripes with stale strips, by the mask of these. Masks differ by which drives failed, so they are few.
    with_stale: BTreeMap<u64, u64>,
}

impl StripeTable {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let strips = geometry.strips();
        Self {
            strips,
            stripes_per_page: geometry.stripes_per_page(),
            words: vec![0; (1 + strips) * geometry.stripes as usize],
            dirty_pages: BTreeSet::new(),
            places: vec![(0, 0); geometry.pages() as usize],
            sum: (0..geometry.pages()).fold(0, |sum, page| sum ^ page_mark(page, 0)),
            written: 0,
            with_stale: BTreeMap::new(),
        }
    }

    fn entry(&self, stripe: u64) -> &[u64] {
        let start = stripe as usize * (1 + self.strips);
        &self.words[start..=start + self.strips]
    }

    pub(crate) fn is_written(&self, stripe: u64) -> bool {
        self.entry(stripe)[1..].iter().any(|version| *version != 0)
    }

    /// Strips recorded as stale; meaningless for unwritten stripes.
    pub(crate) fn stale(&self, stripe: u64) -> u64 {
        self.entry(stripe)[0]
    }

    pub(crate) fn version(&self, stripe: u64, position: usize) -> Version {
        Version(self.entry(stripe)[1 + position])
    }

    /// Stripes with data, and among them those with a stale strip.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.written, self.with_stale.values().sum())
    }

    /// The most strips that a written stripe lacks when those of `absent` members are gone as well.
    pub(crate) fn worst(&self, absent: u64) -> u32 {
        let healthy = self.written > self.counts().1;
        let without_stale = healthy.then_some(0);
        self.with_stale
            .keys()
            .copied()
            .chain(without_stale)
            .map(|mask| (mask | absent).count_ones())
            .max()
            .unwrap_or(0)
    }

    fn change(&mut self, stripe: u64, change: impl FnOnce(&mut [u64])) {
        let (was_written, was_stale) = (self.is_written(stripe), self.stale(stripe));
        let start = stripe as usize * (1 + self.strips);
        change(&mut self.words[start..=start + self.strips]);
        let (is_written, is_stale) = (self.is_written(stripe), self.stale(stripe));
        assert!(is_written || is_stale == 0, "stripe {stripe} has stale strips and holds nothing");
        self.written = self.written + u64::from(is_written) - u64::from(was_written);
        if was_stale != is_stale {
            self.count_mask(was_stale, false);
            self.count_mask(is_stale, true);
        }
        self.dirty_pages.insert(stripe / self.stripes_per_page);
    }

    fn count_mask(&mut self, mask: u64, more: bool) {
        if mask == 0 {
            return;
        }
        let count = self.with_stale.entry(mask).or_default();
        *count = if more { *count + 1 } else { *count - 1 };
        if *count == 0 {
            self.with_stale.remove(&mask);
        }
    }

    pub(crate) fn set_fresh(&mut self, stripe: u64, version: Version, stale: u64) {
        self.change(stripe, |entry| {
            entry[0] = stale;
            entry[1..].fill(version.0);
        });
    }

    pub(crate) fn set_versions(&mut self, stripe: u64, stale: u64, versions: &[(usize, Version)]) {
        self.change(stripe, |entry| {
            entry[0] |= stale;
            versions.iter().for_each(|(position, version)| entry[1 + position] = version.0);
        });
    }

    pub(crate) fn set_unwritten(&mut self, stripe: u64) {
        self.change(stripe, |entry| entry.fill(0));
    }

    /// Marks strips of a written stripe as stale; of an unwritten one nothing is said.
    pub(crate) fn set_stale(&mut self, stripe: u64, set: u64) {
        if self.is_written(stripe) {
            self.change(stripe, |entry| entry[0] |= set);
        }
    }

    /// Marks strips of a written stripe as valid under a new version.
    pub(crate) fn set_valid(&mut self, stripe: u64, clear: u64, version: Version) {
        if self.is_written(stripe) {
            self.change(stripe, |entry| {
                entry[0] &= !clear;
                let cleared = (0..).zip(&mut entry[1..]).filter(|(at, _)| clear & (1 << at) != 0);
                cleared.for_each(|(_, word)| *word = version.0);
            });
        }
    }

    /// Marks the strip of `position` stale in every written stripe.
    pub(crate) fn reset_member(&mut self, position: usize) {
        for stripe in 0..self.stripes() {
            self.set_stale(stripe, 1 << position);
        }
    }

    pub(crate) fn stripes(&self) -> u64 {
        self.words.len() as u64 / (1 + self.strips as u64)
    }

    /// The first written stripe at or after `from` for which `wanted` holds.
    pub(crate) fn find_written(&self, from: u64, wanted: impl Fn(u64) -> bool) -> Option<u64> {
        (from..self.stripes()).find(|stripe| self.is_written(*stripe) && wanted(self.stale(*stripe)))
    }

    /// How many written stripes have one of the strips in `mask` marked stale.
    pub(crate) fn count_stale(&self, mask: u64) -> u64 {
        self.with_stale.iter().filter(|(stale, _)| *stale & mask != 0).map(|(_, count)| count).sum()
    }

    /// Takes the pages that changed since the last call.
    pub(crate) fn take_dirty(&mut self) -> BTreeSet<u64> {
        std::mem::take(&mut self.dirty_pages)
    }

    /// Gives pages back that could not be written.
    pub(crate) fn put_dirty(&mut self, pages: BTreeSet<u64>) {
        self.dirty_pages.extend(pages);
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty_pages.is_empty()
    }

    pub(crate) fn page_words(&self, page: u64) -> Vec<u64> {
        let first = (page * self.stripes_per_page) as usize * (1 + self.strips);
        let len = self.stripes_per_page as usize * (1 + self.strips);
        self.words[first..(first + len).min(self.words.len())].to_vec()
    }

    /// Fills a page from a checkpoint. Returns whether its length is right.
    pub(crate) fn load_page(&mut self, page: u64, place: u8, checkpoint: u64, words: &[u64]) -> bool {
        if words.len() != self.page_words(page).len() {
            return false;
        }
        let first = page * self.stripes_per_page;
        for (stripe, entry) in (first..).zip(words.chunks_exact(1 + self.strips)) {
            self.change(stripe, |target| {
                target.copy_from_slice(entry);
                if target[1..].iter().all(|version| *version == 0) {
                    target[0] = 0;
                }
            });
        }
        self.dirty_pages.remove(&page);
        self.set_place(page, place, checkpoint);
        true
    }

    /// The place of a page's committed copy and the checkpoint that wrote it.
    pub(crate) fn place(&self, page: u64) -> (u8, u64) {
        self.places[page as usize]
    }

    /// The copy that `checkpoint` wrote in the other place is the committed one from now on.
    pub(crate) fn commit_page(&mut self, page: u64, checkpoint: u64) {
        let (place, _) = self.places[page as usize];
        self.set_place(page, place ^ 1, checkpoint);
    }

    fn set_place(&mut self, page: u64, place: u8, checkpoint: u64) {
        let (_, before) = std::mem::replace(&mut self.places[page as usize], (place, checkpoint));
        self.sum ^= page_mark(page, before) ^ page_mark(page, checkpoint);
    }

    /// The sum for a root: what it is now.
    pub(crate) fn sum(&self) -> u64 {
        self.sum
    }

    /// The sum once `checkpoint` has written these pages.
    pub(crate) fn sum_with(&self, pages: impl Iterator<Item = u64>, checkpoint: u64) -> u64 {
        pages.fold(self.sum, |sum, page| {
            sum ^ page_mark(page, self.places[page as usize].1) ^ page_mark(page, checkpoint)
        })
    }
}
