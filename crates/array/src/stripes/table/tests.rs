use super::*;
use crate::format::index_page::IndexPage;
use crate::geometry::CreateSpec;
use crate::members::StripsOn;
use crate::open::first_root;
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

/// The table of an array, and the pages that its checkpoints wrote.
struct Bed {
    geometry: Geometry,
    layout: Rc<Layout>,
    table: StripeTable,
    disk: BTreeMap<u64, Buf>,
}

impl Bed {
    /// With memory for so many bytes of pages.
    fn new(memory: usize) -> Self {
        let (geometry, layout) = spread();
        let table = StripeTable::new(&geometry, &layout, &TableMemory::new(Some(memory)));
        Self { geometry, layout, table, disk: BTreeMap::new() }
    }

    /// Loads a page if it is not in memory.
    fn need(&mut self, page: u64) {
        if self.table.lacks_page(page) {
            let words = TablePage::decode(&self.disk[&page]).unwrap().words;
            assert!(!self.table.load_page(page, words[1..].to_vec()));
            assert!(self.table.load_page(page, words));
        }
    }

    fn need_of(&mut self, stripe: Stripe) {
        self.need(self.table.page_of(stripe));
    }

    fn checkpoint(&mut self, seq: u64, between: impl FnOnce(&mut Self)) {
        let update = self.table.update(ARRAY, seq);
        between(self);
        self.disk.extend(update.blocks().iter().map(|(page, _, block)| (*page, block.clone())));
        self.table.commit(update);
    }

    /// A root of this table.
    fn root(&self) -> Root {
        Root {
            seq: self.table.checkpoint,
            table: self.table.index().top(),
            resets: self.table.resets.clone(),
            stale_on: self.table.stale_on(),
            ..first_root(ARRAY)
        }
    }

    /// The same array after a start.
    fn opened(&self, memory: usize) -> Self {
        let mut opened = Self { disk: self.disk.clone(), ..Self::new(memory) };
        let tree = self.geometry.page_tree();
        opened.table.load_root(&self.root());
        for page in (0..tree.pages()).rev().filter(|page| !tree.is_leaf(*page)) {
            if !opened.table.index().page(page).is_none() {
                let found = IndexPage::decode(&self.disk[&page]).unwrap();
                assert!(opened.table.index_mut().load(page, found));
            }
        }
        assert!(!opened.table.has_dirty());
        opened
    }

    fn count(&mut self) {
        loop {
            match self.table.count_on(3) {
                Counting::Done => return,
                Counting::More => {}
                Counting::Wants(page) => self.need(page),
            }
        }
    }

    /// Compares the table with a plain list of its entries.
    fn check(&mut self, plain: &[[u64; WORDS]], gone: MemberSet) {
        let (mut on, mut by_lacking) = (vec![StripsOn::default(); 9], [0u64; 7]);
        for (number, entry) in plain.iter().enumerate() {
            let stripe = Stripe(number as u64);
            let known = self.table.knows_written(stripe);
            assert!(known.is_none_or(|known| known == is_written(entry)), "{stripe}");
            self.need_of(stripe);
            let table = &self.table;
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
                let is_lost = is_stale && entry[0].count_ones() as usize > self.geometry.m;
                let count = &mut on[place.member.index()];
                count.strips += 1;
                count.stale += u64::from(is_stale);
                count.lost += u64::from(is_lost);
                lacking += usize::from(is_stale || gone.contains(place.member));
            }
            by_lacking[lacking] += 1;
            assert!(lacking <= table.most_lacking_of(table.page_of(stripe), gone));
            for at in table.moves(stripe).moved().iter() {
                on[table.layout.own_place(stripe, at).member.index()].moved_away += 1;
            }
        }
        assert!(self.table.is_counted());
        let (census, written) = (self.table.census(), by_lacking.iter().sum());
        assert_eq!((census.written(), census.lacking()), (written, written - by_lacking[0]));
        assert_eq!(self.table.written(), written);
        assert_eq!(census.worst(), by_lacking.iter().rposition(|count| *count > 0).unwrap());
        assert!((0..7).all(|lacking| census.lacking_exactly(lacking) == by_lacking[lacking]));
        for (member, on) in on.into_iter().enumerate() {
            let member = MemberNo::new(member);
            assert!(on.stale == 0 || self.table.stale_on().contains(member));
            let strips = if census.watched().contains(member) { on.strips } else { 0 };
            assert_eq!(census.on(member), StripsOn { strips, ..on });
        }
    }
}

/// Random changes, each compared with a plain list of entries. Pages leave the memory and come back, and
/// stripes are counted while they change.
fn change_at_random(memory: usize) {
    let mut bed = Bed::new(memory);
    let (stripes, per_page) = (bed.geometry.stripes, bed.geometry.stripes_per_page());
    assert!(stripes > 2 * per_page && !stripes.is_multiple_of(per_page));
    let mut below = random();
    let mut plain = vec![[0u64; WORDS]; stripes as usize];
    let (mut gone, mut fewest) = (MemberSet::NONE, u64::MAX);
    for round in 1..6000u64 {
        let number = below(stripes);
        let stripe = Stripe(number);
        let entry = &mut plain[number as usize];
        let written = is_written(entry);
        bed.need_of(stripe);
        let table = &mut bed.table;
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
                for (number, entry) in plain.iter_mut().enumerate().filter(|(_, entry)| is_written(*entry)) {
                    let places = bed.layout.places(Stripe(number as u64), StripeState::of(entry).moves);
                    let on = places.enumerate().filter(|(_, place)| place.member == member);
                    on.for_each(|(at, _)| entry[0] |= 1 << at);
                }
                table.reset_member(member);
            }
            9 if round % 31 == 0 => {
                gone = (0..below(3)).map(|_| MemberNo::new(below(9) as usize)).collect();
                table.begin_count(gone, MemberSet::one(MemberNo::new(5)));
            }
            _ => {}
        }
        if let Counting::Wants(page) = bed.table.count_on(below(2) as usize) {
            bed.need(page);
        }
        bed.table.give_up_pages(|page| page == 1);
        fewest = if round > 1000 { fewest.min(bed.table.resident()) } else { fewest };
        if round % 250 == 0 {
            if memory > 1 << 20 {
                for page in 0..bed.geometry.table_pages() {
                    let of_page = plain.chunks(per_page as usize).nth(page as usize).unwrap();
                    assert_eq!(bed.table.page_words(page), of_page.concat());
                }
            }
            bed.checkpoint(round, |bed| bed.table.give_up_pages(|_| false));
            let mut opened = bed.opened(memory);
            opened.table.begin_count(gone, MemberSet::NONE);
            for bed in [&mut bed, &mut opened] {
                bed.count();
                bed.check(&plain, gone);
            }
        }
    }
    assert_eq!(fewest < bed.geometry.table_pages(), memory < 1 << 20, "{fewest} pages");
}

#[test]
fn every_form_of_a_page_gives_the_same_entries() {
    change_at_random(1 << 30);
}

#[test]
fn pages_that_left_the_memory_come_back_as_they_were() {
    change_at_random(6000);
}

/// Whoever judges a loss by pages that are not in memory never says that there is none where there is one.
#[test]
fn a_loss_is_not_overlooked_in_pages_that_are_not_in_memory() {
    let mut bed = Bed::new(1);
    let (layout, all) = (bed.layout.clone(), bed.geometry.stripes);
    for stripe in (0..all).map(Stripe) {
        bed.table.set_fresh(stripe, Version(1), Positions::NONE, Moves::NONE);
    }
    bed.checkpoint(1, |_| ());
    let [one, two, three] = [0, 1, 2].map(MemberNo::new);
    let holds = |stripe: &u64| layout.places(Stripe(*stripe), Moves::NONE).any(|place| place.member == three);
    let stripe = Stripe((0..all).rev().find(holds).unwrap());
    let on = |member: MemberNo| layout.strips_on(stripe, Moves::NONE, |on| on == member);
    let lost: Positions = [one, two].map(on).into_iter().fold(Positions::NONE, Positions::with);
    let more = |table: &StripeTable| table.may_lose(MemberSet::NONE, MemberSet::one(three), lost.len());
    bed.need_of(stripe);
    bed.table.set_stale(stripe, lost);
    bed.checkpoint(2, |_| ());
    // Once to see that no page is used, once to let it go.
    (0..bed.geometry.table_pages()).for_each(|_| bed.table.give_up_pages(|_| false));
    assert!(bed.table.lacks_page(bed.table.page_of(stripe)));
    assert!(more(&bed.table), "what is not known may be");
    assert!(bed.table.may_lack_beyond(MemberSet::one(three)) || lost.is_empty());
    bed.table.begin_count(MemberSet::NONE, MemberSet::NONE);
    assert!(more(&bed.table));
    bed.count();
    assert!(more(&bed.table));
    // It cannot be read when it is counted, and then no carrier has it any more.
    bed.table.begin_count(MemberSet::NONE, MemberSet::NONE);
    bed.table.give_up_pages(|_| false);
    bed.table.give_up_pages(|_| false);
    let page = bed.table.page_of(stripe);
    for is_lost in [false, true] {
        bed.table.set_absent(page, is_lost);
        bed.count();
        assert_eq!((more(&bed.table), bed.table.is_lost(page)), (!is_lost, is_lost));
        let lacks = bed.table.may_lack_beyond(MemberSet::one(three));
        assert_eq!(lacks, !is_lost, "stripes that are lost already keep no drive");
        assert!(bed.table.census().written() < bed.table.written(), "they are owed");
    }
    bed.need(page);
    bed.count();
    assert!(more(&bed.table));
    // One more may be lost.
    assert!(!bed.table.may_lose(MemberSet::NONE, MemberSet::one(three), lost.len() + 1));
    // A member that was reset lacks every strip.
    bed.table.reset_member(three);
    assert!(bed.table.may_lack_beyond(MemberSet::NONE) && !bed.table.is_counted());
    bed.count();
    assert!(bed.table.census().on(three).stale > 0);
}

#[test]
fn a_page_that_names_a_spare_place_that_there_is_not_is_refused() {
    let (geometry, layout) = spread();
    let mut table = StripeTable::new(&geometry, &layout, &TableMemory::new(None));
    let mut words = table.page_words(0);
    words[..3].copy_from_slice(&[0, 1, 2]);
    words[HEAD..WORDS].fill(5);
    let refs: Vec<PageRef> =
        geometry.page_tree().children(geometry.page_tree().top()).map(|_| PageRef::NONE).collect();
    let mut found =
        IndexPage { array: ARRAY, index: geometry.page_tree().top(), checkpoint: 1, level: 1, refs };
    found.refs[0] = PageRef { written: 1, has_moves: true, ..PageRef::NONE };
    table.load_root(&Root { seq: 1, table: found.refs[0], ..first_root(ARRAY) });
    assert!(table.index_mut().load(found.index, found.clone()));
    assert!(!table.load_page(0, words.clone()));
    words[2] = 1;
    assert!(table.load_page(0, words.clone()));
    // Neither does an unwritten stripe lack a strip.
    table.remove_page(0);
    words[WORDS] = 1;
    assert!(!table.load_page(0, words.clone()));
}
