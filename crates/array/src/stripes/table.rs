//! The stripe table in memory: for each stripe its stale strips and the version of every strip.
//!
//! It is kept by pages, as on the drives. A page without a written stripe takes no memory. A page whose
//! stripes each have one version and no stale strip takes a word per stripe; any other page takes 1 + strips
//! words per stripe.
//!
//! Invariants:
//! - a change is applied only when its log record is durable, so a page written by a checkpoint never claims
//!   what the log could lose;
//! - an unwritten stripe has no stale strip.

use crate::format::root::page_mark;
use crate::geometry::Geometry;
use crate::place::{Position, Positions};
use penstock_base::num::to_usize;
use penstock_base::{Stripe, Version};
use penstock_raid::MAX_STRIPS;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// The entries of one page.
enum Page {
    /// No stripe is written.
    Unwritten,
    /// The version of all strips of each stripe, none of them stale; 0 where it is unwritten.
    Uniform(Box<[u64]>),
    /// For each stripe the stale mask and the version of each strip.
    Full(Box<[u64]>),
}

/// Longest entry: mask and versions.
const ENTRY_WORDS: usize = 1 + MAX_STRIPS;

/// The table of one array.
pub(crate) struct StripeTable {
    strips: usize,
    stripes: u64,
    stripes_per_page: u64,
    pages: Vec<Page>,
    dirty_pages: BTreeSet<u64>,
    /// By page, the place (0 or 1) of its newest committed copy, and the checkpoint that wrote that.
    places: Vec<(u8, u64)>,
    /// The XOR of the marks of all pages with these checkpoints.
    sum: u64,
    written: u64,
    /// The number of written stripes by their stale strips, where there are any. The sets follow from failed
    /// drives, so they are few.
    with_stale: BTreeMap<Positions, u64>,
}

/// True if no more than `most` strips are stale, and more are without those of the `absent` members.
fn is_lost_without(stale: Positions, absent: Positions, most: usize) -> bool {
    stale.len() <= most && stale.with(absent).len() > most
}

impl StripeTable {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let strips = geometry.strips();
        Self {
            strips,
            stripes: geometry.stripes,
            stripes_per_page: geometry.stripes_per_page(),
            pages: (0..geometry.pages()).map(|_| Page::Unwritten).collect(),
            dirty_pages: BTreeSet::new(),
            places: vec![(0, 0); to_usize(geometry.pages())],
            sum: (0..geometry.pages()).fold(0, |sum, page| sum ^ page_mark(page, 0)),
            written: 0,
            with_stale: BTreeMap::new(),
        }
    }

    /// A stripe's page, and its index there.
    fn place_of(&self, stripe: Stripe) -> (usize, usize) {
        assert!(stripe.0 < self.stripes, "stripe {stripe} of {}", self.stripes);
        (to_usize(stripe.0 / self.stripes_per_page), to_usize(stripe.0 % self.stripes_per_page))
    }

    /// The words of the entry at an index of a full page.
    fn words_of(&self, at: usize) -> Range<usize> {
        at * (1 + self.strips)..(at + 1) * (1 + self.strips)
    }

    /// The number of stripes of a page: the last page may have fewer than others.
    fn stripes_in(&self, page: u64) -> u64 {
        self.stripes.min((page + 1) * self.stripes_per_page) - page * self.stripes_per_page
    }

    /// The stripes of a page.
    fn stripes_of(&self, page: u64) -> impl Iterator<Item = Stripe> + use<> {
        Stripe(page * self.stripes_per_page).run(self.stripes_in(page))
    }

    pub(crate) fn is_written(&self, stripe: Stripe) -> bool {
        let (page, at) = self.place_of(stripe);
        match &self.pages[page] {
            Page::Unwritten => false,
            Page::Uniform(versions) => versions[at] != 0,
            Page::Full(words) => words[self.words_of(at)][1..].iter().any(|version| *version != 0),
        }
    }

    /// Strips recorded as stale; none of an unwritten stripe.
    pub(crate) fn stale(&self, stripe: Stripe) -> Positions {
        let (page, at) = self.place_of(stripe);
        match &self.pages[page] {
            Page::Unwritten | Page::Uniform(_) => Positions::NONE,
            Page::Full(words) => Positions::from_bits(words[self.words_of(at)][0]),
        }
    }

    /// The version of a strip; 0 in an unwritten stripe.
    pub(crate) fn version(&self, stripe: Stripe, position: Position) -> Version {
        let (page, at) = self.place_of(stripe);
        Version(match &self.pages[page] {
            Page::Unwritten => 0,
            Page::Uniform(versions) => versions[at],
            Page::Full(words) => words[self.words_of(at)][1 + position.index()],
        })
    }

    /// Copies a stripe's entry out.
    fn entry(&self, stripe: Stripe) -> [u64; ENTRY_WORDS] {
        let mut entry = [0; ENTRY_WORDS];
        let (page, at) = self.place_of(stripe);
        match &self.pages[page] {
            Page::Unwritten => {}
            Page::Uniform(versions) => entry[1..=self.strips].fill(versions[at]),
            Page::Full(words) => entry[..=self.strips].copy_from_slice(&words[self.words_of(at)]),
        }
        entry
    }

    /// Puts an entry in, in the smallest form that its page can have with it.
    fn put_entry(&mut self, stripe: Stripe, entry: &[u64]) {
        let (page, at) = self.place_of(stripe);
        let uniform = entry[0] == 0 && entry[1..].iter().all(|version| *version == entry[1]);
        if let Page::Unwritten = self.pages[page]
            && uniform
        {
            self.pages[page] = Page::Uniform(vec![0; to_usize(self.stripes_in(page as u64))].into());
        }
        if !uniform && !matches!(self.pages[page], Page::Full(_)) {
            self.pages[page] = Page::Full(self.page_words(page as u64).into());
        }
        let range = self.words_of(at);
        match &mut self.pages[page] {
            Page::Unwritten => unreachable!("it was given words above"),
            Page::Uniform(versions) => versions[at] = entry[1],
            Page::Full(words) => words[range].copy_from_slice(entry),
        }
    }

    /// The number of written stripes, and of those among them with a stale strip.
    pub(crate) fn counts(&self) -> (u64, u64) {
        (self.written, self.with_stale.values().sum())
    }

    /// The most strips that any written stripe lacks without those of the `absent` members.
    pub(crate) fn worst(&self, absent: Positions) -> usize {
        let healthy = self.written > self.counts().1;
        let without_stale = healthy.then_some(Positions::NONE);
        let sets = self.with_stale.keys().copied().chain(without_stale);
        sets.map(|stale| stale.with(absent).len()).max().unwrap_or(0)
    }

    /// The first stripe at or after `from` that [`Self::lost_without`] counts.
    pub(crate) fn find_lost_without(&self, from: Stripe, absent: Positions, most: usize) -> Option<Stripe> {
        self.find_written(from, |stale| is_lost_without(stale, absent, most))
    }

    /// The number of stripes with at most `most` stale strips that lack more without those of the `absent`
    /// members.
    pub(crate) fn lost_without(&self, absent: Positions, most: usize) -> u64 {
        let (written, with_stale) = self.counts();
        let sets = self.with_stale.iter().map(|(stale, count)| (*stale, *count));
        let all = sets.chain([(Positions::NONE, written - with_stale)]);
        all.filter(|(stale, _)| is_lost_without(*stale, absent, most)).map(|(_, count)| count).sum()
    }

    fn change(&mut self, stripe: Stripe, change: impl FnOnce(&mut [u64])) {
        let (was_written, was_stale) = (self.is_written(stripe), self.stale(stripe));
        let mut entry = self.entry(stripe);
        change(&mut entry[..=self.strips]);
        self.put_entry(stripe, &entry[..=self.strips]);
        let (is_written, is_stale) = (self.is_written(stripe), self.stale(stripe));
        assert!(is_written || is_stale.is_empty(), "stripe {stripe} has stale strips and holds nothing");
        self.written = self.written + u64::from(is_written) - u64::from(was_written);
        if was_stale != is_stale {
            self.count_set(was_stale, false);
            self.count_set(is_stale, true);
        }
        assert!(
            self.counts().1 <= self.written,
            "{:?} stripes with stale strips of those written",
            self.counts()
        );
        self.dirty_pages.insert(stripe.0 / self.stripes_per_page);
    }

    fn count_set(&mut self, stale: Positions, more: bool) {
        if stale.is_empty() {
            return;
        }
        let count = self.with_stale.entry(stale).or_default();
        assert!(more || *count > 0, "a stripe leaves a set that has none");
        *count = if more { *count + 1 } else { *count - 1 };
        if *count == 0 {
            self.with_stale.remove(&stale);
        }
    }

    /// All strips of an unwritten stripe were written under one version, but for the stale ones.
    pub(crate) fn set_fresh(&mut self, stripe: Stripe, version: Version, stale: Positions) {
        assert!(version.0 != 0, "version 0 is never given");
        self.change(stripe, |entry| {
            entry[0] = stale.bits();
            entry[1..].fill(version.0);
        });
    }

    /// Strips of a stripe were written under new versions, and others became stale.
    pub(crate) fn set_versions(
        &mut self,
        stripe: Stripe,
        stale: Positions,
        versions: &[(Position, Version)],
    ) {
        self.change(stripe, |entry| {
            entry[0] |= stale.bits();
            versions.iter().for_each(|(position, version)| entry[1 + position.index()] = version.0);
        });
    }

    pub(crate) fn set_unwritten(&mut self, stripe: Stripe) {
        self.change(stripe, |entry| entry.fill(0));
    }

    /// Marks strips of a written stripe as stale; changes nothing of an unwritten one.
    pub(crate) fn set_stale(&mut self, stripe: Stripe, set: Positions) {
        if self.is_written(stripe) {
            self.change(stripe, |entry| entry[0] |= set.bits());
        }
    }

    /// Marks strips of a written stripe as valid under a new version.
    pub(crate) fn set_valid(&mut self, stripe: Stripe, clear: Positions, version: Version) {
        if self.is_written(stripe) {
            self.change(stripe, |entry| {
                entry[0] &= !clear.bits();
                clear.iter().for_each(|position| entry[1 + position.index()] = version.0);
            });
        }
    }

    /// Marks the strip of `position` stale in every written stripe.
    pub(crate) fn reset_member(&mut self, position: Position) {
        for stripe in Stripe(0).run(self.stripes) {
            self.set_stale(stripe, Positions::one(position));
        }
    }

    /// The first written stripe at or after `from` for whose stale strips `wanted` holds.
    pub(crate) fn find_written(&self, from: Stripe, wanted: impl Fn(Positions) -> bool) -> Option<Stripe> {
        let mut stripes = from.run(self.stripes.saturating_sub(from.0));
        stripes.find(|stripe| self.is_written(*stripe) && wanted(self.stale(*stripe)))
    }

    /// The number of written stripes of which one of these strips is stale.
    pub(crate) fn count_stale(&self, strips: Positions) -> u64 {
        self.with_stale.iter().filter(|(stale, _)| stale.meets(strips)).map(|(_, count)| count).sum()
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
        self.stripes_of(page)
            .flat_map(|stripe| self.entry(stripe).into_iter().take(1 + self.strips))
            .collect()
    }

    /// Fills a page from a checkpoint. Returns false, and changes nothing, if its length is wrong.
    pub(crate) fn load_page(&mut self, page: u64, place: u8, checkpoint: u64, words: &[u64]) -> bool {
        if words.len() as u64 != self.stripes_in(page) * (1 + self.strips as u64) {
            return false;
        }
        for (stripe, entry) in self.stripes_of(page).zip(words.chunks_exact(1 + self.strips)) {
            // Most of a large table is unwritten.
            if entry.iter().any(|word| *word != 0) || self.is_written(stripe) {
                self.change(stripe, |target| {
                    target.copy_from_slice(entry);
                    if target[1..].iter().all(|version| *version == 0) {
                        target[0] = 0;
                    }
                });
            }
        }
        self.dirty_pages.remove(&page);
        self.set_place(page, place, checkpoint);
        true
    }

    /// The place of a page's committed copy and the checkpoint that wrote it.
    pub(crate) fn place(&self, page: u64) -> (u8, u64) {
        self.places[to_usize(page)]
    }

    /// The copy that `checkpoint` wrote in the other place is the committed one from now on.
    pub(crate) fn commit_page(&mut self, page: u64, checkpoint: u64) {
        let (place, _) = self.places[to_usize(page)];
        self.set_place(page, place ^ 1, checkpoint);
    }

    fn set_place(&mut self, page: u64, place: u8, checkpoint: u64) {
        let (_, before) = std::mem::replace(&mut self.places[to_usize(page)], (place, checkpoint));
        self.sum ^= page_mark(page, before) ^ page_mark(page, checkpoint);
    }

    /// The sum that a root stores, for the committed copies of all pages.
    pub(crate) fn sum(&self) -> u64 {
        self.sum
    }

    /// The sum once `checkpoint` has written these pages.
    pub(crate) fn sum_with(&self, pages: impl Iterator<Item = u64>, checkpoint: u64) -> u64 {
        pages.fold(self.sum, |sum, page| {
            sum ^ page_mark(page, self.places[to_usize(page)].1) ^ page_mark(page, checkpoint)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::geometry::CreateSpec;

    const SECOND: Positions = Positions::from_bits(0b10);

    /// Random changes, each compared with a plain list of entries.
    #[test]
    fn every_form_of_a_page_gives_the_same_entries() {
        let geometry = Geometry::fit(&CreateSpec::new("test", 4, 2), 400 << 20).unwrap();
        let (stripes, per_page) = (geometry.stripes, geometry.stripes_per_page());
        assert!(stripes > 2 * per_page && !stripes.is_multiple_of(per_page));
        let mut state = 11u64;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        };
        let mut table = StripeTable::new(&geometry);
        let mut plain = vec![[0u64; 7]; stripes as usize];
        for round in 1..4000u64 {
            let number = below(stripes);
            let stripe = Stripe(number);
            let entry = &mut plain[number as usize];
            let written = entry[1..].iter().any(|version| *version != 0);
            match below(10) {
                0..4 => {
                    table.set_fresh(stripe, Version(round), Positions::NONE);
                    *entry = [0, round, round, round, round, round, round];
                }
                4 => {
                    table.set_unwritten(stripe);
                    *entry = [0; 7];
                }
                5 if round > 2000 => {
                    table.set_stale(stripe, SECOND);
                    entry[0] |= if written { 0b10 } else { 0 };
                }
                6 if round > 2000 && written => {
                    table.set_versions(stripe, Positions::NONE, &[(Position::new(3), Version(round))]);
                    entry[4] = round;
                }
                7 if written => {
                    table.set_valid(stripe, SECOND, Version(round));
                    (entry[0], entry[2]) = (entry[0] & !0b10, round);
                }
                _ => {}
            }
            if round % 500 == 0 {
                let mut loaded = StripeTable::new(&geometry);
                for page in 0..geometry.pages() {
                    let words = table.page_words(page);
                    let of_page = plain.chunks(per_page as usize).nth(page as usize).unwrap();
                    assert_eq!(words, of_page.concat());
                    assert!(loaded.load_page(page, 0, 0, &words));
                    assert!(!loaded.load_page(page, 0, 0, &words[1..]));
                }
                assert!(!loaded.has_dirty());
                for table in [&table, &loaded] {
                    for (stripe, entry) in Stripe(0).run(stripes).zip(&plain) {
                        assert_eq!(table.is_written(stripe), entry[1..].iter().any(|version| *version != 0));
                        assert_eq!(table.stale(stripe).bits(), entry[0]);
                        let versions =
                            (0..6).map(|position| table.version(stripe, Position::new(position)).0);
                        assert!(versions.eq(entry[1..].iter().copied()));
                    }
                    let stale = plain.iter().filter(|entry| entry[0] != 0).count() as u64;
                    let written = plain.iter().filter(|entry| entry[1..].iter().any(|version| *version != 0));
                    assert_eq!(table.counts(), (written.count() as u64, stale));
                }
            }
        }
    }
}
