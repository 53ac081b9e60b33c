//! The stripe table: for each stripe its stale strips, those in spare places, and the version of every strip.
//!
//! It is kept by pages, as on the drives. A page without a written stripe takes no memory, there and here. A
//! page whose stripes each have one version, no stale strip and all strips at their own places takes a word
//! per stripe; any other page takes 3 + strips words per stripe.
//!
//! Pages are in memory as far as they are needed. Whoever looks at a stripe, or changes it, pins its page
//! before ([`super::pins`]). A page that nobody pins and that the committed copy has as it is may leave the
//! memory, those first that nobody has pinned since the last look.
//!
//! A member that is reset has every strip on it stale. Pages in memory are changed at once. Those that are
//! not are changed when they are loaded: the table keeps, for each member, the first checkpoint that has its
//! last reset, and a copy of an earlier checkpoint lacks it.
//!
//! Invariants:
//! - a change is applied only when its log record is durable, so a page written by a checkpoint never claims
//!   what the log could lose;
//! - a page that was changed since the last committed checkpoint is in memory;
//! - an unwritten stripe has no stale strip, and none that has moved;
//! - `stale_on` has every member on which a strip is stale, by pages in memory or not, lost or not;
//! - the count has every written stripe of the pages that it has come to, as it is in the table.

use super::census::{Census, StripeState};
use super::count::Count;
use super::index::{Index, Update, agrees};
use crate::format::index_page::PageRef;
use crate::format::root::Root;
use crate::format::table_page::{TablePage, entry_words};
use crate::geometry::Geometry;
use crate::layout::Layout;
use crate::moves::Moves;
use crate::place::{MemberNo, MemberSet, Position, Positions};
use crate::table_memory::TableMemory;
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

impl Page {
    fn bytes(&self) -> usize {
        let (Self::Uniform(words) | Self::Full(words)) = self;
        size_of::<Resident>() + size_of_val::<[u64]>(words)
    }
}

/// A page in memory.
struct Resident {
    page: Page,
    /// It was pinned since the last look for pages that may go.
    is_used: bool,
}

/// The next step of a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counting {
    /// All stripes are counted.
    Done,
    /// There are more.
    More,
    /// This page is needed, which is not in memory.
    Wants(u64),
}

/// Pages looked at to find some that may leave the memory.
const LOOK: usize = 1024;
/// Of the strips of stripes that were given up: any would do, they are all stale.
const LOST_VERSION: Version = Version(1);
const LONGEST_ENTRY: usize = entry_words(MAX_STRIPS);
/// The words of an entry before its versions.
const HEAD: usize = entry_words(0);

/// The table of one array.
pub(crate) struct StripeTable {
    layout: Rc<Layout>,
    strips: usize,
    stripes: u64,
    stripes_per_page: u64,
    /// Those in memory: with written stripes, and maybe some without.
    pages: BTreeMap<u64, Resident>,
    /// Pages of the table or the index that the next checkpoint writes.
    dirty_pages: BTreeSet<u64>,
    /// Pages of the table that changed before the checkpoint that is being written began.
    begun: BTreeSet<u64>,
    index: Index,
    /// Written stripes.
    written: u64,
    count: Count,
    /// By member, the first checkpoint that has its last reset.
    resets: BTreeMap<MemberNo, u64>,
    stale_on: MemberSet,
    /// The last checkpoint that began.
    checkpoint: u64,
    memory: Rc<TableMemory>,
    /// The page at which the next look for pages that may go begins.
    hand: u64,
    /// Pages that could not be loaded when last tried, each with true if no carrier has it any more. Their
    /// stripes count as lacking redundancy, whatever they lack.
    absent: BTreeMap<u64, bool>,
}

impl StripeTable {
    pub(crate) fn new(geometry: &Geometry, layout: &Rc<Layout>, memory: &Rc<TableMemory>) -> Self {
        Self {
            layout: layout.clone(),
            strips: geometry.strips(),
            stripes: geometry.stripes,
            stripes_per_page: geometry.stripes_per_page(),
            pages: BTreeMap::new(),
            dirty_pages: BTreeSet::new(),
            begun: BTreeSet::new(),
            index: Index::new(geometry.page_tree()),
            written: 0,
            count: Count::new(layout, geometry.m, geometry.table_pages()),
            resets: BTreeMap::new(),
            stale_on: MemberSet::NONE,
            checkpoint: 0,
            memory: memory.clone(),
            hand: 0,
            absent: BTreeMap::new(),
        }
    }

    /// The table is that of a checkpoint.
    pub(crate) fn load_root(&mut self, root: &Root) {
        assert!(self.pages.is_empty(), "a table is loaded once");
        self.index.load_top(root.table);
        (self.checkpoint, self.written) = (root.seq, root.table.written);
        (self.resets, self.stale_on) = (root.resets.clone(), root.stale_on);
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

    /// The range of the stripes of a page.
    pub(crate) fn range_of(&self, page: u64) -> Range<Stripe> {
        let first = page * self.stripes_per_page;
        Stripe(first)..Stripe(first + self.stripes_in(page))
    }

    /// The stripes of a page.
    fn stripes_of(&self, page: u64) -> impl Iterator<Item = Stripe> + use<> {
        Stripe(page * self.stripes_per_page).run(self.stripes_in(page))
    }

    /// The page of a stripe.
    pub(crate) fn page_of(&self, stripe: Stripe) -> u64 {
        self.place_of(stripe).0
    }

    /// True if a page is not in memory and has written stripes.
    pub(crate) fn lacks_page(&self, page: u64) -> bool {
        !self.pages.contains_key(&page) && !self.index.page(page).is_none()
    }

    /// A page; none if no stripe of it is written.
    ///
    /// # Panics
    /// If it is not in memory.
    fn page(&self, page: u64) -> Option<&Page> {
        let found = self.pages.get(&page);
        assert!(
            found.is_some() || !self.lacks_page(page),
            "page {page} of the stripe table is not in memory"
        );
        found.map(|found| &found.page)
    }

    fn set_page(&mut self, page: u64, new: Page) {
        let bytes = new.bytes();
        let before = self.pages.insert(page, Resident { page: new, is_used: true });
        self.memory.add(bytes);
        self.memory.remove(before.map_or(0, |before| before.page.bytes()));
    }

    fn remove_page(&mut self, page: u64) {
        if let Some(removed) = self.pages.remove(&page) {
            self.memory.remove(removed.page.bytes());
        }
    }

    /// Like [`Self::lacks_page`], for a page that is about to be used.
    pub(crate) fn lacks_used_page(&mut self, page: u64) -> bool {
        match self.pages.get_mut(&page) {
            Some(page) => page.is_used = true,
            None => return !self.index.page(page).is_none(),
        }
        false
    }

    /// Looks at some pages, and lets those leave the memory that are not needed, while there are too many.
    pub(crate) fn give_up_pages(&mut self, is_pinned: impl Fn(u64) -> bool) {
        for _ in 0..LOOK.min(self.pages.len()) {
            if !self.memory.is_exceeded() {
                return;
            }
            let next = self.pages.range(self.hand..).next().or_else(|| self.pages.first_key_value());
            let Some(page) = next.map(|(page, _)| *page) else { return };
            self.hand = page + 1;
            let is_committed = !self.dirty_pages.contains(&page)
                && !self.begun.contains(&page)
                && !self.index.page(page).is_none();
            if !is_committed || is_pinned(page) {
                continue;
            }
            let resident = self.pages.get_mut(&page).expect("it was found");
            match std::mem::take(&mut resident.is_used) {
                true => {}
                false => self.remove_page(page),
            }
        }
    }

    /// Pages in memory.
    pub(crate) fn resident(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Changed pages that no committed checkpoint has: they cannot leave the memory.
    pub(crate) fn unsaved(&self) -> usize {
        self.dirty_pages.len() + self.begun.len()
    }

    /// A page could not be loaded; `is_lost` if no carrier has it any more.
    pub(crate) fn set_absent(&mut self, page: u64, is_lost: bool) {
        assert!(self.lacks_page(page), "page {page} is in memory");
        let is_new = self.absent.insert(page, is_lost) != Some(is_lost);
        // One that is only not readable now is as it was counted.
        if is_new && is_lost && page < self.count.next() {
            self.count_anew();
        }
    }

    /// The first page at or after `from` that could not be loaded when last tried, and may be now.
    pub(crate) fn next_unread(&self, from: u64) -> Option<u64> {
        self.absent.range(from..).find(|(_, is_lost)| !**is_lost).map(|(page, _)| *page)
    }

    /// True if no carrier has a page any more, which is not in memory.
    pub(crate) fn is_lost(&self, page: u64) -> bool {
        self.absent.get(&page) == Some(&true)
    }

    /// True if a page is known to be lost.
    pub(crate) fn has_lost_pages(&self) -> bool {
        self.absent.values().any(|is_lost| *is_lost)
    }

    /// All stripes of a lost page count as written from here on, and lack every strip. The next checkpoint
    /// writes the page so: a copy that comes back later counts no more.
    pub(crate) fn give_up_lost(&mut self, page: u64) {
        assert!(self.is_lost(page) && self.lacks_page(page), "page {page} is not lost");
        self.absent.remove(&page);
        // A lost page was counted as one without stripes.
        self.written -= self.index.page(page).written;
        self.set_page(page, Page::Uniform(vec![0; to_usize(self.stripes_in(page))].into()));
        let all: Positions = (0..self.strips).map(Position::new).collect();
        self.stripes_of(page).for_each(|stripe| self.set_fresh(stripe, LOST_VERSION, all, Moves::NONE));
        assert!(self.dirty_pages.contains(&page), "a checkpoint writes it");
    }

    /// Pages that no carrier has any more.
    pub(crate) fn lost(&self) -> u64 {
        self.absent.values().filter(|is_lost| **is_lost).count() as u64
    }

    /// True if it is known that a stripe is written, or that it is not: by its page, or by all of it.
    pub(crate) fn knows_written(&self, stripe: Stripe) -> Option<bool> {
        let page = self.page_of(stripe);
        if !self.lacks_page(page) {
            return Some(self.is_written(stripe));
        }
        (self.index.page(page).written == self.stripes_in(page)).then_some(true)
    }

    /// # Panics
    /// Like all that asks for a stripe: if its page is not in memory.
    pub(crate) fn is_written(&self, stripe: Stripe) -> bool {
        let (page, at) = self.place_of(stripe);
        match self.page(page) {
            None => false,
            Some(Page::Uniform(versions)) => versions[at] != 0,
            Some(Page::Full(words)) => is_written(&words[self.words_of(at)]),
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

    /// The state of a stripe; nothing lacks in an unwritten one.
    pub(crate) fn state(&self, stripe: Stripe) -> StripeState {
        let (page, at) = self.place_of(stripe);
        match self.page(page) {
            None | Some(Page::Uniform(_)) => StripeState::default(),
            Some(Page::Full(words)) => StripeState::of(&words[self.words_of(at)]),
        }
    }

    /// The version of a strip; 0 in an unwritten stripe.
    pub(crate) fn version(&self, stripe: Stripe, position: Position) -> Version {
        let (page, at) = self.place_of(stripe);
        Version(match self.page(page) {
            None => 0,
            Some(Page::Uniform(versions)) => versions[at],
            Some(Page::Full(words)) => words[self.words_of(at)][HEAD + position.index()],
        })
    }

    /// Copies a stripe's entry out.
    fn entry(&self, stripe: Stripe) -> [u64; LONGEST_ENTRY] {
        let (mut entry, len) = ([0; LONGEST_ENTRY], entry_words(self.strips));
        let (page, at) = self.place_of(stripe);
        match self.page(page) {
            None => {}
            Some(Page::Uniform(versions)) => entry[HEAD..len].fill(versions[at]),
            Some(Page::Full(words)) => entry[..len].copy_from_slice(&words[self.words_of(at)]),
        }
        entry
    }

    /// Puts an entry in, in the smallest form that its page can have with it.
    fn put_entry(&mut self, stripe: Stripe, entry: &[u64]) {
        let (page, at) = self.place_of(stripe);
        if self.page(page).is_none() {
            self.set_page(page, Page::Uniform(vec![0; to_usize(self.stripes_in(page))].into()));
        }
        if !is_uniform(entry) && matches!(self.page(page), Some(Page::Uniform(_))) {
            self.set_page(page, Page::Full(self.page_words(page).into()));
        }
        let range = self.words_of(at);
        match &mut self.pages.get_mut(&page).expect("it was put in").page {
            Page::Uniform(versions) => versions[at] = entry[HEAD],
            Page::Full(words) => words[range].copy_from_slice(entry),
        }
    }

    /// Counts of the written stripes, as far as [`Self::count_on`] has come.
    pub(crate) fn census(&self) -> &Census {
        self.count.census()
    }

    /// True if all written stripes are counted.
    pub(crate) fn is_counted(&self) -> bool {
        self.count.is_complete()
    }

    /// Written stripes.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Begins a count in which strips on the `absent` members are lacking, and strips on the `watched` ones
    /// are counted.
    pub(crate) fn begin_count(&mut self, absent: MemberSet, watched: MemberSet) {
        self.settle_stale_on();
        self.count.begin(absent, watched);
    }

    /// Takes members out on which no strip is stale, if that is known.
    fn settle_stale_on(&mut self) {
        if self.is_counted() && self.absent.is_empty() {
            let census = self.count.census();
            let of_now: MemberSet =
                self.layout.all_members().iter().filter(|member| census.on(*member).stale > 0).collect();
            assert!(of_now.without(self.stale_on).is_empty(), "{of_now:?} of {:?}", self.stale_on);
            self.stale_on = of_now;
        }
    }

    /// Every member on which a strip is stale; maybe others.
    pub(crate) fn stale_on(&self) -> MemberSet {
        self.stale_on
    }

    /// The counts so far do not hold any more.
    fn count_anew(&mut self) {
        let (absent, watched) = (self.census().absent(), self.census().watched());
        self.count.begin(absent, watched);
    }

    /// Counts the stripes of at most `most` more pages.
    pub(crate) fn count_on(&mut self, most: usize) -> Counting {
        for _ in 0..most {
            let Some(page) = self.next_page(self.count.next()) else {
                self.count.end();
                break;
            };
            if let Some(is_lost) = self.absent.get(&page) {
                // Stripes that are lost already keep no drive. Others may lack anything.
                self.count.add(page, std::iter::empty());
                if !*is_lost {
                    self.count.set_worst(page, [self.strips, self.census().redundancy()].into_iter());
                }
            } else if self.lacks_page(page) {
                let (written, all) = (self.index.page(page).written, self.stripes_in(page));
                let is_clean = self.most_stale_of(page) == 0 && !self.may_have_moved(page);
                if is_clean && !self.count.looks_at_places() {
                    self.count.add_clean(page, written);
                } else if is_clean && written == all {
                    let stripes = Stripe(page * self.stripes_per_page).run(all);
                    self.count.add(page, stripes.map(|stripe| (stripe, StripeState::default())));
                } else {
                    return Counting::Wants(page);
                }
            } else {
                let stripes: Vec<_> = self.written_in(page).collect();
                self.count.add(page, stripes.into_iter());
            }
        }
        if self.is_counted() { Counting::Done } else { Counting::More }
    }

    /// The first page at or after `from` that has written stripes, or is in memory.
    pub(crate) fn next_page(&self, from: u64) -> Option<u64> {
        let resident = self.pages.range(from..).next().map(|(page, _)| *page);
        let named = self.index.next_named(from);
        resident.into_iter().chain(named).min()
    }

    /// The most strips that may be stale in a stripe of a page that is not in memory.
    fn most_stale_of(&self, page: u64) -> usize {
        let named = self.index.page(page);
        // A stripe has at most one strip on a member.
        usize::from(named.most_stale) + self.resets_after(named).len()
    }

    /// Members whose last reset a copy of a page lacks.
    fn resets_after(&self, named: PageRef) -> MemberSet {
        let lacks = |(_, reset): &(&MemberNo, &u64)| named.checkpoint < **reset;
        self.resets.iter().filter(lacks).map(|(member, _)| *member).collect()
    }

    /// False if all strips of a page are at their own places.
    pub(crate) fn may_have_moved(&self, page: u64) -> bool {
        match self.pages.get(&page) {
            Some(Resident { page: Page::Uniform(_), .. }) => false,
            Some(Resident { page: Page::Full(_), .. }) => true,
            None => self.index.page(page).has_moves,
        }
    }

    /// The most strips that a stripe of a page may lack without the `absent` members.
    pub(crate) fn most_lacking_of(&self, page: u64, absent: MemberSet) -> usize {
        match self.count.worst_of(page).filter(|_| self.census().absent() == absent) {
            Some(worst) => worst,
            None if self.lacks_page(page) => self.most_stale_of(page) + absent.len(),
            None => self.strips,
        }
    }

    /// True if a stripe may lack a strip on another member than these. It does not, if this is false.
    pub(crate) fn may_lack_beyond(&self, members: MemberSet) -> bool {
        let others = self.layout.all_members().without(members);
        if !self.stale_on.meets(others) {
            return false;
        }
        let census = self.census();
        // Pages that could not be read were counted as if they had no stripe.
        let unread = self.absent.iter().filter(|(_, is_lost)| !**is_lost).map(|(page, _)| *page);
        let mut not_counted = self.pages_from(self.count.next()).chain(unread);
        others.iter().any(|member| census.on(member).stale > 0)
            || not_counted.any(|page| match self.lacks_page(page) {
                true => {
                    let named = self.index.page(page);
                    named.most_stale > 0 || self.resets_after(named).meets(others)
                }
                false => {
                    self.written_in(page).any(|(stripe, state)| state.misses_on(&self.layout, stripe, others))
                }
            })
    }

    /// True if a stripe may be lost that has no more than `most` lacking strips without the `gone` members,
    /// if the `others` go too. None is, if this is false.
    pub(crate) fn may_lose(&self, gone: MemberSet, others: MemberSet, most: usize) -> bool {
        let more = others.without(gone).len();
        let is_counted = self.census().absent() == gone && self.census().redundancy() == most;
        let lacking = |page: u64| {
            let of_readable = self.count.worst_of_readable(page).filter(|_| is_counted);
            of_readable.unwrap_or_else(|| self.most_lacking_of(page, gone))
        };
        self.pages_from(0).filter(|page| lacking(*page) + more > most).any(|page| {
            let is_lost = |(stripe, state): (Stripe, StripeState)| {
                state.is_lost_without(&self.layout, stripe, (gone, others), most)
            };
            self.lacks_page(page) || self.written_in(page).any(is_lost)
        })
    }

    /// Pages from `from` on that have written stripes, or are in memory.
    pub(crate) fn pages_from(&self, from: u64) -> impl Iterator<Item = u64> {
        std::iter::successors(self.next_page(from), |page| self.next_page(page + 1))
    }

    /// The written stripes of a page, which is in memory.
    pub(crate) fn written_in(&self, page: u64) -> impl Iterator<Item = (Stripe, StripeState)> {
        let stripes = self.page(page).map(|_| self.stripes_of(page)).into_iter().flatten();
        let written = stripes.filter(|stripe| self.is_written(*stripe));
        written.map(|stripe| (stripe, self.state(stripe)))
    }

    fn change(&mut self, stripe: Stripe, change: impl FnOnce(&mut [u64])) {
        let page = self.page_of(stripe);
        let before = self.is_written(stripe).then(|| self.state(stripe));
        let (mut entry, len) = (self.entry(stripe), entry_words(self.strips));
        change(&mut entry[..len]);
        self.put_entry(stripe, &entry[..len]);
        let after = self.is_written(stripe).then(|| self.state(stripe));
        assert!(
            after.is_some() || self.state(stripe) == StripeState::default(),
            "stripe {stripe} has stale or moved strips and holds nothing"
        );
        if before != after {
            let StripeState { stale, moves } = after.unwrap_or_default();
            for position in stale.iter() {
                self.stale_on.insert(self.layout.place(stripe, position, moves).member);
            }
            self.written = self.written + u64::from(after.is_some()) - u64::from(before.is_some());
            if self.count.changed(page, stripe, (before, after)) {
                let absent = self.census().absent();
                let lacking =
                    |(stripe, state): (_, StripeState)| state.lacking(&self.layout, stripe, absent).len();
                let lacking: Vec<usize> = self.written_in(page).map(lacking).collect();
                self.count.set_worst(page, lacking.into_iter());
            }
        }
        self.dirty_pages.insert(page);
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

    /// Marks the strips on a member stale in every written stripe. Those of pages that are not in memory are
    /// when these are loaded, and what was counted does not count any more.
    pub(crate) fn reset_member(&mut self, member: MemberNo) {
        let resident: Vec<u64> = self.pages.keys().copied().collect();
        let stripes: Vec<_> = resident.iter().flat_map(|page| self.written_in(*page)).collect();
        for (stripe, state) in stripes {
            let lost = self.layout.strips_on(stripe, state.moves, |on| on == member);
            if !lost.is_empty() {
                self.set_stale(stripe, lost);
            }
        }
        self.resets.insert(member, self.checkpoint + 1);
        if self.pages_from(0).any(|page| self.lacks_page(page)) {
            self.stale_on.insert(member);
            self.count_anew();
        }
    }

    /// By member, the first checkpoint that has its last reset.
    pub(crate) fn resets(&self) -> &BTreeMap<MemberNo, u64> {
        &self.resets
    }

    /// Has pages of the table, which are in memory, or of the index written by the next checkpoint, although
    /// they did not change.
    pub(crate) fn put_dirty(&mut self, pages: BTreeSet<u64>) {
        let is_here = |page: &u64| !self.index.tree().is_leaf(*page) || !self.lacks_page(*page);
        assert!(pages.iter().all(is_here), "{pages:?}");
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
        assert!(seq > self.checkpoint && self.begun.is_empty(), "checkpoint {seq} after {}", self.checkpoint);
        self.settle_stale_on();
        let dirty = std::mem::take(&mut self.dirty_pages).into_iter();
        let (pages, of_index): (BTreeSet<u64>, BTreeSet<u64>) =
            dirty.partition(|page| self.index.tree().is_leaf(*page));
        let made = |index: u64| {
            let (words, strips) = (self.page_words(index), to_u16(self.strips));
            let known = summary(self.strips, &words);
            let block = || TablePage { array, index, checkpoint: seq, strips, words }.encode();
            (index, (!known.is_none()).then(|| (known, block())))
        };
        let changed = pages.iter().copied().map(made).collect();
        (self.begun, self.checkpoint) = (pages, seq);
        self.index.update(array, seq, changed, of_index)
    }

    /// The root with this update is durable.
    pub(crate) fn commit(&mut self, update: Update) {
        self.begun.clear();
        let unwritten = update.unwritten().iter().filter(|page| !self.dirty_pages.contains(page));
        for page in unwritten.copied().collect::<Vec<_>>() {
            self.remove_page(page);
        }
        self.index.commit(update);
    }

    /// Puts a page into memory that the index names, with these words of its committed copy. Returns false,
    /// and changes nothing, if its length is wrong, it disagrees with what is said of it, or an entry names a
    /// spare place that there is not.
    pub(crate) fn load_page(&mut self, page: u64, mut words: Vec<u64>) -> bool {
        assert!(!self.pages.contains_key(&page), "page {page} is in memory, and may be newer there");
        let len = entry_words(self.strips);
        let is_sound = |entry: &[u64]| {
            let state = StripeState::of(entry);
            state.moves.iter().all(|(_, spare)| spare < self.layout.spares())
                && (is_written(entry) || state == StripeState::default())
        };
        let named = self.index.page(page);
        if words.len() as u64 != self.stripes_in(page) * len as u64
            || !words.chunks_exact(len).all(is_sound)
            || !agrees(named, summary(self.strips, &words))
        {
            return false;
        }
        let reset = self.resets_after(named);
        if !reset.is_empty() {
            let entries = self.stripes_of(page).zip(words.chunks_exact_mut(len));
            for (stripe, entry) in entries.filter(|(_, entry)| is_written(entry)) {
                let moves = StripeState::of(entry).moves;
                let lost = self.layout.strips_on(stripe, moves, |member| reset.contains(member));
                entry[0] |= lost.bits();
            }
        }
        let page_words = match words.chunks_exact(len).all(is_uniform) {
            true => Page::Uniform(words.chunks_exact(len).map(|entry| entry[HEAD]).collect()),
            false => Page::Full(words.into()),
        };
        self.set_page(page, page_words);
        if self.absent.remove(&page).is_some() && page < self.count.next() {
            self.count_anew();
        }
        true
    }
}

impl Drop for StripeTable {
    fn drop(&mut self) {
        self.memory.remove(self.pages.values().map(|resident| resident.page.bytes()).sum());
    }
}

/// True if the stripe of an entry is written.
fn is_written(entry: &[u64]) -> bool {
    entry[HEAD..].iter().any(|version| *version != 0)
}

/// True if all strips of an entry have one version and are valid at their own places.
fn is_uniform(entry: &[u64]) -> bool {
    entry[..HEAD] == [0; HEAD] && entry[HEAD..].iter().all(|version| *version == entry[HEAD])
}

/// The facts that the index keeps of a table page with these words.
fn summary(strips: usize, words: &[u64]) -> PageRef {
    let entries = words.chunks_exact(entry_words(strips));
    let written = entries.filter(|entry| is_written(entry));
    written.map(StripeState::of).fold(PageRef::NONE, |all, state| PageRef {
        written: all.written + 1,
        most_stale: all.most_stale.max(to_u8(state.stale.len())),
        has_moves: all.has_moves || !state.moves.moved().is_empty(),
        ..all
    })
}

#[cfg(test)]
mod tests;
