//! The stripe table in memory: for each stripe its stale strips, those in spare places, and the version of
//! every strip.
//!
//! It is kept by pages, as on the drives. A page without a written stripe takes no memory, there and here. A
//! page whose stripes each have one version, no stale strip and all strips at their own places takes a word
//! per stripe; any other page takes 3 + strips words per stripe.
//!
//! Invariants:
//! - a change is applied only when its log record is durable, so a page written by a checkpoint never claims
//!   what the log could lose;
//! - an unwritten stripe has no stale strip, and none that has moved;
//! - the census counts every written stripe as it is in the table.

use super::census::{Census, StripeState};
use super::index::{Index, Update, agrees};
use crate::format::index_page::PageRef;
use crate::format::table_page::{TablePage, entry_words};
use crate::geometry::Geometry;
use crate::layout::Layout;
use crate::moves::Moves;
use crate::place::{MemberNo, MemberSet, Position, Positions};
use penstock_base::num::{to_u8, to_u16, to_usize};
use penstock_base::{ArrayId, Stripe, Version};
use penstock_raid::MAX_STRIPS;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

/// The entries of one page.
enum Page {
    /// The version of all strips of each stripe, none of them stale; 0 where it is unwritten.
    Uniform(Box<[u64]>),
    /// For each stripe the words of its entry, as on the drives.
    Full(Box<[u64]>),
}

const LONGEST_ENTRY: usize = entry_words(MAX_STRIPS);
/// The words of an entry before its versions.
const HEAD: usize = entry_words(0);

/// The table of one array.
pub(crate) struct StripeTable {
    layout: Rc<Layout>,
    strips: usize,
    stripes: u64,
    stripes_per_page: u64,
    /// Those with written stripes, and maybe some without.
    pages: BTreeMap<u64, Page>,
    /// Pages of the table or the index that the next checkpoint writes.
    dirty_pages: BTreeSet<u64>,
    index: Index,
    census: Census,
}

impl StripeTable {
    pub(crate) fn new(geometry: &Geometry, layout: &Rc<Layout>) -> Self {
        let strips = geometry.strips();
        Self {
            layout: layout.clone(),
            strips,
            stripes: geometry.stripes,
            stripes_per_page: geometry.stripes_per_page(),
            pages: BTreeMap::new(),
            dirty_pages: BTreeSet::new(),
            index: Index::new(geometry.page_tree()),
            census: Census::new(layout, MemberSet::NONE),
        }
    }

    /// A stripe's page, and its index there.
    fn place_of(&self, stripe: Stripe) -> (u64, usize) {
        assert!(stripe.0 < self.stripes, "stripe {stripe} of {}", self.stripes);
        (stripe.0 / self.stripes_per_page, to_usize(stripe.0 % self.stripes_per_page))
    }

    /// The words of the entry at an index of a full page.
    fn words_of(&self, at: usize) -> Range<usize> {
        at * entry_words(self.strips)..(at + 1) * entry_words(self.strips)
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
        match self.pages.get(&page) {
            None => false,
            Some(Page::Uniform(versions)) => versions[at] != 0,
            Some(Page::Full(words)) => words[self.words_of(at)][HEAD..].iter().any(|version| *version != 0),
        }
    }

    /// Strips recorded as stale; none of an unwritten stripe.
    pub(crate) fn stale(&self, stripe: Stripe) -> Positions {
        self.state(stripe).stale
    }

    /// Strips in spare places; none of an unwritten stripe.
    pub(crate) fn moves(&self, stripe: Stripe) -> Moves {
        self.state(stripe).moves
    }

    fn state(&self, stripe: Stripe) -> StripeState {
        let (page, at) = self.place_of(stripe);
        match self.pages.get(&page) {
            None | Some(Page::Uniform(_)) => StripeState::default(),
            Some(Page::Full(words)) => StripeState::of(&words[self.words_of(at)]),
        }
    }

    /// The version of a strip; 0 in an unwritten stripe.
    pub(crate) fn version(&self, stripe: Stripe, position: Position) -> Version {
        let (page, at) = self.place_of(stripe);
        Version(match self.pages.get(&page) {
            None => 0,
            Some(Page::Uniform(versions)) => versions[at],
            Some(Page::Full(words)) => words[self.words_of(at)][HEAD + position.index()],
        })
    }

    /// Copies a stripe's entry out.
    fn entry(&self, stripe: Stripe) -> [u64; LONGEST_ENTRY] {
        let (mut entry, len) = ([0; LONGEST_ENTRY], entry_words(self.strips));
        let (page, at) = self.place_of(stripe);
        match self.pages.get(&page) {
            None => {}
            Some(Page::Uniform(versions)) => entry[HEAD..len].fill(versions[at]),
            Some(Page::Full(words)) => entry[..len].copy_from_slice(&words[self.words_of(at)]),
        }
        entry
    }

    /// Puts an entry in, in the smallest form that its page can have with it.
    fn put_entry(&mut self, stripe: Stripe, entry: &[u64]) {
        let (page, at) = self.place_of(stripe);
        let uniform =
            entry[..HEAD] == [0; HEAD] && entry[HEAD..].iter().all(|version| *version == entry[HEAD]);
        if !uniform && !matches!(self.pages.get(&page), Some(Page::Full(_))) {
            self.pages.insert(page, Page::Full(self.page_words(page).into()));
        }
        let (range, stripes) = (self.words_of(at), to_usize(self.stripes_in(page)));
        match self.pages.entry(page).or_insert_with(|| Page::Uniform(vec![0; stripes].into())) {
            Page::Uniform(versions) => versions[at] = entry[HEAD],
            Page::Full(words) => words[range].copy_from_slice(entry),
        }
    }

    /// Counts of the written stripes.
    pub(crate) fn census(&self) -> &Census {
        &self.census
    }

    /// Counts strips on these members as lacking from now on.
    pub(crate) fn set_absent(&mut self, absent: MemberSet) {
        if self.census.absent() == absent {
            return;
        }
        let mut census = Census::new(&self.layout, absent);
        for stripe in self.written_from(Stripe(0)) {
            census.add(&self.layout, stripe, self.state(stripe));
        }
        assert_eq!(census.written(), self.census.written(), "the same stripes are counted again");
        self.census = census;
    }

    /// The first stripe at or after `from` that [`Self::lost_without`] counts.
    pub(crate) fn find_lost_without(&self, from: Stripe, absent: MemberSet, most: usize) -> Option<Stripe> {
        self.find_written(from, |stripe, state| self.is_lost_without(stripe, state, absent, most))
    }

    /// The number of stripes with at most `most` stale strips that lack more without those of the `absent`
    /// members.
    pub(crate) fn lost_without(&self, absent: MemberSet, most: usize) -> u64 {
        let is_lost = |stripe: &Stripe| self.is_lost_without(*stripe, self.state(*stripe), absent, most);
        match absent.len() + self.census.most_stale() > most {
            true => self.written_from(Stripe(0)).filter(is_lost).count() as u64,
            // Every stripe has at most one strip on a member.
            false => 0,
        }
    }

    /// True if no more than `most` strips of a stripe are stale, and more are without those of the `absent`
    /// members.
    fn is_lost_without(&self, stripe: Stripe, state: StripeState, absent: MemberSet, most: usize) -> bool {
        // Most stripes are told without their places.
        state.stale.len() + absent.len() > most
            && state.is_lost_without(&self.layout, stripe, (MemberSet::NONE, absent), most)
    }

    fn change(&mut self, stripe: Stripe, change: impl FnOnce(&mut [u64])) {
        let (was_written, before) = (self.is_written(stripe), self.state(stripe));
        let (mut entry, len) = (self.entry(stripe), entry_words(self.strips));
        change(&mut entry[..len]);
        self.put_entry(stripe, &entry[..len]);
        let (is_written, after) = (self.is_written(stripe), self.state(stripe));
        assert!(
            is_written || after == StripeState::default(),
            "stripe {stripe} has stale or moved strips and holds nothing"
        );
        if (was_written, before) != (is_written, after) {
            if was_written {
                self.census.remove(&self.layout, stripe, before);
            }
            if is_written {
                self.census.add(&self.layout, stripe, after);
            }
        }
        self.dirty_pages.insert(stripe.0 / self.stripes_per_page);
    }

    /// All strips of an unwritten stripe were written under one version, but for the stale ones, and to these
    /// places.
    pub(crate) fn set_fresh(&mut self, stripe: Stripe, version: Version, stale: Positions, moves: Moves) {
        assert!(version.0 != 0, "version 0 is never given");
        self.change(stripe, |entry| {
            StripeState { stale, moves }.put(entry);
            entry[HEAD..].fill(version.0);
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
            versions.iter().for_each(|(position, version)| entry[HEAD + position.index()] = version.0);
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

    /// Marks strips of a written stripe as valid under a new version, at the places that `moves` names for
    /// them: their own ones where it names none.
    pub(crate) fn set_valid(&mut self, stripe: Stripe, clear: Positions, version: Version, moves: Moves) {
        if !self.is_written(stripe) {
            return;
        }
        assert!(version.0 != 0 || clear.is_empty(), "version 0 is never given");
        self.change(stripe, |entry| {
            let before = StripeState::of(entry);
            let all = clear.iter().try_fold(before.moves, |all, at| all.try_with(at, moves.spare_of(at)));
            // Nobody writes a record that moves more strips than a stripe may move.
            let Some(moves) = all else { return };
            StripeState { stale: before.stale.without(clear), moves }.put(entry);
            clear.iter().for_each(|position| entry[HEAD + position.index()] = version.0);
        });
    }

    /// Marks the strips on a member stale in every written stripe.
    pub(crate) fn reset_member(&mut self, member: MemberNo) {
        for stripe in self.written_from(Stripe(0)).collect::<Vec<_>>() {
            let lost = self.layout.strips_on(stripe, self.moves(stripe), |on| on == member);
            if !lost.is_empty() {
                self.set_stale(stripe, lost);
            }
        }
    }

    /// Written stripes from `from` on.
    fn written_from(&self, from: Stripe) -> impl Iterator<Item = Stripe> {
        let pages = self.pages.range(from.0 / self.stripes_per_page..);
        let stripes = pages.flat_map(|(page, _)| self.stripes_of(*page));
        stripes.filter(move |stripe| *stripe >= from && self.is_written(*stripe))
    }

    /// The first written stripe at or after `from` for which `wanted` holds.
    pub(crate) fn find_written(
        &self,
        from: Stripe,
        wanted: impl Fn(Stripe, StripeState) -> bool,
    ) -> Option<Stripe> {
        self.written_from(from).find(|stripe| wanted(*stripe, self.state(*stripe)))
    }

    /// Has pages of the table or the index written by the next checkpoint, although they did not change.
    pub(crate) fn put_dirty(&mut self, pages: BTreeSet<u64>) {
        self.dirty_pages.extend(pages);
    }

    pub(crate) fn has_dirty(&self) -> bool {
        !self.dirty_pages.is_empty()
    }

    fn page_words(&self, page: u64) -> Vec<u64> {
        self.stripes_of(page)
            .flat_map(|stripe| self.entry(stripe).into_iter().take(entry_words(self.strips)))
            .collect()
    }

    /// The index of the last checkpoint.
    pub(crate) fn index(&self) -> &Index {
        &self.index
    }

    /// The same, to load it.
    pub(crate) fn index_mut(&mut self) -> &mut Index {
        &mut self.index
    }

    /// The pages that checkpoint `seq` writes, as the table is now. It is the only one until
    /// [`Self::commit`].
    pub(crate) fn update(&mut self, array: ArrayId, seq: u64) -> Update {
        let dirty = std::mem::take(&mut self.dirty_pages).into_iter();
        let (pages, of_index): (BTreeSet<u64>, BTreeSet<u64>) =
            dirty.partition(|page| self.index.tree().is_leaf(*page));
        let made = |index: u64| {
            let (words, strips) = (self.page_words(index), to_u16(self.strips));
            let known = summary(self.strips, &words);
            let block = || TablePage { array, index, checkpoint: seq, strips, words }.encode();
            (index, (!known.is_none()).then(|| (known, block())))
        };
        let changed = pages.into_iter().map(made).collect();
        self.index.update(array, seq, changed, of_index)
    }

    /// The root with this update is durable.
    pub(crate) fn commit(&mut self, update: Update) {
        for page in update.unwritten().iter().filter(|page| !self.dirty_pages.contains(page)) {
            self.pages.remove(page);
        }
        self.index.commit(update);
    }

    /// Fills a page that the index names from a checkpoint. Returns false, and changes nothing, if its length
    /// is wrong, it disagrees with what is said of it, or an entry names a spare place that there is not.
    pub(crate) fn load_page(&mut self, page: u64, words: &[u64]) -> bool {
        let len = entry_words(self.strips);
        let is_sound = |entry: &[u64]| {
            let state = StripeState::of(entry);
            let is_written = entry[HEAD..].iter().any(|version| *version != 0);
            state.moves.iter().all(|(_, spare)| spare < self.layout.spares())
                && (is_written || state == StripeState::default())
        };
        if words.len() as u64 != self.stripes_in(page) * len as u64
            || !words.chunks_exact(len).all(is_sound)
            || !agrees(self.index.page(page), summary(self.strips, words))
        {
            return false;
        }
        for (stripe, entry) in self.stripes_of(page).zip(words.chunks_exact(len)) {
            // Many of a large table are unwritten.
            if entry.iter().any(|word| *word != 0) || self.is_written(stripe) {
                self.change(stripe, |target| target.copy_from_slice(entry));
            }
        }
        self.dirty_pages.remove(&page);
        true
    }
}

/// The facts that the index keeps of a table page with these words.
fn summary(strips: usize, words: &[u64]) -> PageRef {
    let entries = words.chunks_exact(entry_words(strips));
    let written = entries.filter(|entry| entry[HEAD..].iter().any(|version| *version != 0));
    written.map(StripeState::of).fold(PageRef::NONE, |all, state| PageRef {
        written: all.written + 1,
        most_stale: all.most_stale.max(to_u8(state.stale.len())),
        has_moves: all.has_moves || !state.moves.moved().is_empty(),
        ..all
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::index_page::IndexPage;
    use crate::geometry::CreateSpec;
    use penstock_base::{Buf, Id128};
    use penstock_layout::Shape;

    const ARRAY: ArrayId = ArrayId(Id128([0xa7; 16]));
    const SECOND: Positions = Positions::from_bits(0b10);
    const WORDS: usize = 3 + 6;

    fn spread() -> (Geometry, Rc<Layout>) {
        let shape = Shape { members: 9, strips: 6, redundancy: 2, spares: 2, domains: 9 };
        let bases = [vec![0, 1, 2, 3, 4, 5, 6, 7, 8], vec![4, 1, 8, 3, 0, 7, 6, 5, 2]];
        let layout = Layout::declustered(shape, &bases).unwrap();
        let spec = CreateSpec { layout: layout.clone(), ..CreateSpec::new("test", 4, 2).unwrap() };
        (Geometry::fit(&spec, 300 << 20).unwrap(), Rc::new(layout))
    }

    /// Numbers below a bound.
    fn random() -> impl FnMut(u64) -> u64 {
        let mut state = 11u64;
        move |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % bound
        }
    }

    fn is_written(entry: &[u64]) -> bool {
        entry[HEAD..].iter().any(|version| *version != 0)
    }

    /// Random changes, each compared with a plain list of entries.
    #[test]
    fn every_form_of_a_page_gives_the_same_entries() {
        let (geometry, layout) = spread();
        let (stripes, per_page) = (geometry.stripes, geometry.stripes_per_page());
        assert!(stripes > 2 * per_page && !stripes.is_multiple_of(per_page));
        let mut below = random();
        let mut table = StripeTable::new(&geometry, &layout);
        let mut plain = vec![[0u64; WORDS]; stripes as usize];
        let mut disk = BTreeMap::new();
        for round in 1..6000u64 {
            let number = below(stripes);
            let stripe = Stripe(number);
            let entry = &mut plain[number as usize];
            let written = is_written(entry);
            match below(10) {
                0..4 => {
                    table.set_fresh(stripe, Version(round), Positions::NONE, Moves::NONE);
                    *entry = [0, 0, 0, round, round, round, round, round, round];
                }
                4 => {
                    table.set_unwritten(stripe);
                    *entry = [0; WORDS];
                }
                5 if round > 2000 => {
                    table.set_stale(stripe, SECOND);
                    entry[0] |= if written { 0b10 } else { 0 };
                }
                6 if round > 2000 && written => {
                    table.set_versions(stripe, Positions::NONE, &[(Position::new(3), Version(round))]);
                    entry[HEAD + 3] = round;
                }
                7 if written => {
                    let spare = Some(below(2) as usize).filter(|_| round > 2000 && below(2) == 0);
                    let moves = Moves::NONE.with(Position::new(1), spare);
                    table.set_valid(stripe, SECOND, Version(round), moves);
                    (entry[0], entry[HEAD + 1]) = (entry[0] & !0b10, round);
                    entry[1..3].copy_from_slice(&moves.words());
                }
                8 if round % 97 == 0 => {
                    let member = MemberNo::new(below(9) as usize);
                    for (number, entry) in
                        plain.iter_mut().enumerate().filter(|(_, entry)| is_written(*entry))
                    {
                        let places = layout.places(Stripe(number as u64), StripeState::of(entry).moves);
                        let on = places.enumerate().filter(|(_, place)| place.member == member);
                        on.for_each(|(at, _)| entry[0] |= 1 << at);
                    }
                    table.reset_member(member);
                }
                _ => {}
            }
            if round % 500 == 0 {
                let gone: MemberSet = (0..below(3)).map(|_| MemberNo::new(below(9) as usize)).collect();
                table.set_absent(gone);
                for page in 0..geometry.table_pages() {
                    let of_page = plain.chunks(per_page as usize).nth(page as usize).unwrap();
                    assert_eq!(table.page_words(page), of_page.concat());
                }
                let update = table.update(ARRAY, round);
                disk.extend(update.blocks().iter().map(|(page, _, block)| (*page, block.clone())));
                table.commit(update);
                let mut loaded = load(&geometry, &layout, table.index().top(), &disk);
                loaded.set_absent(gone);
                for table in [&table, &loaded] {
                    check(table, &plain, gone);
                }
            }
        }
    }

    /// The table that lies in these pages.
    fn load(
        geometry: &Geometry,
        layout: &Rc<Layout>,
        top: PageRef,
        disk: &BTreeMap<u64, Buf>,
    ) -> StripeTable {
        let mut table = StripeTable::new(geometry, layout);
        table.index_mut().load_top(top);
        let tree = geometry.page_tree();
        for page in (0..tree.pages()).rev().filter(|page| !tree.is_leaf(*page)) {
            if !table.index().page(page).is_none() {
                assert!(table.index_mut().load(page, IndexPage::decode(&disk[&page]).unwrap()));
            }
        }
        for page in 0..geometry.table_pages() {
            let words = || TablePage::decode(&disk[&page]).unwrap().words;
            match table.index().page(page).is_none() {
                true => assert!(!table.load_page(page, &[])),
                false => {
                    assert!(!table.load_page(page, &words()[1..]));
                    assert!(table.load_page(page, &words()));
                }
            }
        }
        assert!(!table.has_dirty());
        table
    }

    /// Compares a table with a plain list of its entries.
    fn check(table: &StripeTable, plain: &[[u64; WORDS]], gone: MemberSet) {
        let (mut on, mut by_lacking) = (vec![(0, 0, 0); 9], [0u64; 7]);
        for (number, entry) in plain.iter().enumerate() {
            let stripe = Stripe(number as u64);
            assert_eq!(table.is_written(stripe), is_written(entry));
            assert_eq!(
                (table.stale(stripe).bits(), table.moves(stripe).words()),
                (entry[0], [entry[1], entry[2]])
            );
            let versions = (0..6).map(|position| table.version(stripe, Position::new(position)).0);
            assert!(versions.eq(entry[HEAD..].iter().copied()));
            if !is_written(entry) {
                continue;
            }
            let mut lacking = 0;
            for (at, place) in table.layout.places(stripe, table.moves(stripe)).enumerate() {
                let is_stale = entry[0] & 1 << at != 0;
                let count = &mut on[place.member.index()];
                (count.0, count.1) = (count.0 + 1, count.1 + u64::from(is_stale));
                lacking += usize::from(is_stale || gone.contains(place.member));
            }
            by_lacking[lacking] += 1;
            for at in table.moves(stripe).moved().iter() {
                on[table.layout.own_place(stripe, at).member.index()].2 += 1;
            }
        }
        let census = table.census();
        let written: u64 = by_lacking.iter().sum();
        assert_eq!((census.written(), census.lacking()), (written, written - by_lacking[0]));
        assert_eq!(census.worst(), by_lacking.iter().rposition(|count| *count > 0).unwrap());
        assert!((0..7).all(|lacking| census.lacking_exactly(lacking) == by_lacking[lacking]));
        for (member, expected) in on.into_iter().enumerate() {
            let found = census.on(MemberNo::new(member));
            assert_eq!((found.strips, found.stale, found.moved_away), expected);
        }
        let stale = |entry: &[u64; WORDS]| entry[0].count_ones() as usize;
        assert_eq!(census.most_stale(), plain.iter().map(stale).max().unwrap());
    }

    #[test]
    fn a_page_that_names_a_spare_place_that_there_is_not_is_refused() {
        let (geometry, layout) = spread();
        let mut table = StripeTable::new(&geometry, &layout);
        let mut words = table.page_words(0);
        words[..3].copy_from_slice(&[0, 1, 2]);
        words[HEAD..WORDS].fill(5);
        let refs: Vec<PageRef> =
            geometry.page_tree().children(geometry.page_tree().top()).map(|_| PageRef::NONE).collect();
        let mut found =
            IndexPage { array: ARRAY, index: geometry.page_tree().top(), checkpoint: 1, level: 1, refs };
        found.refs[0] = PageRef { written: 1, has_moves: true, ..PageRef::NONE };
        table.index_mut().load_top(found.refs[0]);
        assert!(table.index_mut().load(found.index, found.clone()));
        assert!(!table.load_page(0, &words));
        words[2] = 1;
        assert!(table.load_page(0, &words));
        // Neither does an unwritten stripe lack a strip.
        words[WORDS] = 1;
        assert!(!table.load_page(0, &words));
    }
}
