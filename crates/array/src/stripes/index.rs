//! The index of the stripe table in memory: where the committed copy of each page lies, and the changes that
//! the next checkpoint makes.
//!
//! Invariants:
//! - the index is that of the last durable root, until a checkpoint is committed;
//! - a checkpoint writes a page to the place that does not hold its committed copy.
//!
//! An index page without a named page takes no memory. Pure.

use crate::format::index_page::{IndexPage, PageRef, other_place, sum};
use crate::page_tree::PageTree;
use penstock_base::{ArrayId, Buf};
use std::collections::{BTreeMap, BTreeSet};

type Node = Box<[PageRef]>;

/// The bytes of a page of the table, and what the index says of it; none if no stripe of it is written.
pub(crate) type Made = Option<(PageRef, Buf)>;

/// The pages that a checkpoint writes, and the index with them.
#[derive(Debug)]
pub(crate) struct Update {
    /// Pages with the places where they go.
    blocks: Vec<(u64, u8, Buf)>,
    /// Pages of the table without a written stripe.
    unwritten: Vec<u64>,
    nodes: BTreeMap<u64, Node>,
    top: PageRef,
}

impl Update {
    /// Pages with the places where they go, and their bytes.
    pub(crate) fn blocks(&self) -> &[(u64, u8, Buf)] {
        &self.blocks
    }

    /// Pages of the table that were changed and have no written stripe any more.
    pub(crate) fn unwritten(&self) -> &[u64] {
        &self.unwritten
    }

    /// The topmost page, for the root.
    pub(crate) fn top(&self) -> PageRef {
        self.top
    }
}

/// The index of one table.
pub(crate) struct Index {
    tree: PageTree,
    nodes: BTreeMap<u64, Node>,
    top: PageRef,
    /// Pages that a checkpoint is writing.
    writing: BTreeSet<u64>,
}

impl Index {
    /// The index of a table without a written stripe.
    pub(crate) fn new(tree: PageTree) -> Self {
        Self { tree, nodes: BTreeMap::new(), top: PageRef::NONE, writing: BTreeSet::new() }
    }

    /// The numbers of the pages.
    pub(crate) fn tree(&self) -> &PageTree {
        &self.tree
    }

    /// The committed copy of the topmost page.
    pub(crate) fn top(&self) -> PageRef {
        self.top
    }

    /// The committed copy of a page.
    pub(crate) fn page(&self, page: u64) -> PageRef {
        match self.tree.parent(page) {
            Some((parent, slot)) => self.nodes.get(&parent).map_or(PageRef::NONE, |node| node[slot]),
            None => self.top,
        }
    }

    /// The pages of which there are committed copies, those of the index among them.
    pub(crate) fn named(&self) -> impl Iterator<Item = u64> {
        let top = (!self.top.is_none()).then(|| self.tree.top());
        let of_node = |(page, node): (&u64, &Node)| {
            let named = self.tree.children(*page).zip(node.to_vec()).filter(|(_, page)| !page.is_none());
            named.map(|(page, _)| page)
        };
        self.nodes.iter().flat_map(of_node).chain(top)
    }

    /// The first page of the table at or after `from` of which there is a committed copy.
    pub(crate) fn next_named(&self, from: u64) -> Option<u64> {
        let (first, slot) = self.tree.parent(from).filter(|_| self.tree.is_leaf(from))?;
        let nodes = self.nodes.range(first..).take_while(|(page, _)| self.tree.level(**page) == 1);
        let mut named = nodes.flat_map(|(page, node)| {
            let slots = if *page == first { slot } else { 0 }..node.len();
            slots
                .filter(|slot| !node[*slot].is_none())
                .map(|slot| self.tree.children(*page).start + slot as u64)
        });
        named.next()
    }

    /// True for a page of which there is a committed copy, or which a checkpoint is writing.
    pub(crate) fn is_in_use(&self, page: u64) -> bool {
        !self.page(page).is_none() || self.writing.contains(&page)
    }

    /// The pages that a checkpoint is writing.
    pub(crate) fn writing(&self) -> impl Iterator<Item = u64> {
        self.writing.iter().copied()
    }

    /// The topmost page is this one, says the root.
    pub(crate) fn load_top(&mut self, top: PageRef) {
        assert!(self.nodes.is_empty(), "an index is loaded once");
        self.top = top;
    }

    /// Loads an index page that the index names. Returns false, and changes nothing, if it is not of this
    /// tree, or disagrees with what is named.
    pub(crate) fn load(&mut self, page: u64, found: IndexPage) -> bool {
        let children = self.tree.children(page);
        let is_here = found.index == page
            && found.level == self.tree.level(page)
            && found.refs.len() as u64 == children.end - children.start;
        if !is_here || !agrees(self.page(page), sum(&found.refs)) {
            return false;
        }
        self.nodes.insert(page, found.refs.into());
        true
    }

    /// The pages that checkpoint `seq` writes if these pages of the table have changed, and these of the
    /// index are to be written anew.
    pub(crate) fn update(
        &mut self,
        array: ArrayId,
        seq: u64,
        changed: Vec<(u64, Made)>,
        mut index_pages: BTreeSet<u64>,
    ) -> Update {
        assert!(self.writing.is_empty(), "one checkpoint at a time");
        let nodes = BTreeMap::new();
        let mut update = Update { blocks: Vec::new(), unwritten: Vec::new(), nodes, top: self.top };
        for (page, made) in changed {
            if made.is_none() {
                update.unwritten.push(page);
            }
            index_pages.extend(self.name(&mut update, page, seq, made));
        }
        // Pages come before those that name them.
        while let Some(page) = index_pages.pop_first() {
            let refs = self.node(&mut update, page).to_vec();
            let (known, level) = (sum(&refs), self.tree.level(page));
            let block = || IndexPage { array, index: page, checkpoint: seq, level, refs }.encode();
            let made = (!known.is_none()).then(|| (known, block()));
            index_pages.extend(self.name(&mut update, page, seq, made));
        }
        self.writing = update.blocks.iter().map(|(page, _, _)| *page).collect();
        update
    }

    /// Has a page written, and its reference changed. Returns the page with the reference.
    fn name(&self, update: &mut Update, page: u64, seq: u64, made: Made) -> Option<u64> {
        let named = made.map_or(PageRef::NONE, |(known, block)| {
            let crc = u32::from_le_bytes(block[4..8].try_into().expect("four bytes"));
            let place = other_place(self.page(page));
            update.blocks.push((page, place, block));
            PageRef { checkpoint: seq, crc, place, ..known }
        });
        let parent = self.tree.parent(page);
        match parent {
            None => update.top = named,
            Some((parent, slot)) => self.node(update, parent)[slot] = named,
        }
        parent.map(|(parent, _)| parent)
    }

    /// The references of an index page as they will be.
    fn node<'a>(&self, update: &'a mut Update, page: u64) -> &'a mut Node {
        update.nodes.entry(page).or_insert_with(|| match self.nodes.get(&page) {
            Some(node) => node.clone(),
            None => self.tree.children(page).map(|_| PageRef::NONE).collect(),
        })
    }

    /// The root with this update is durable.
    pub(crate) fn commit(&mut self, update: Update) {
        self.writing.clear();
        self.top = update.top;
        for (page, node) in update.nodes {
            match node.iter().all(PageRef::is_none) {
                true => drop(self.nodes.remove(&page)),
                false => drop(self.nodes.insert(page, node)),
            }
        }
    }
}

/// True if a page has what is said of it.
pub(crate) fn agrees(named: PageRef, found: PageRef) -> bool {
    let known = |page: PageRef| (page.written, page.most_stale, page.has_moves);
    known(named) == known(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::index_page::REFS_PER_PAGE;
    use crate::format::table_page::TablePage;

    const ARRAY: ArrayId = ArrayId(penstock_base::Id128([0xa7; 16]));

    fn made(page: u64) -> (u64, Made) {
        let words = vec![0, 0, 0, 1, 1, page];
        let block = TablePage { array: ARRAY, index: page, checkpoint: 1, strips: 3, words }.encode();
        (page, Some((PageRef { written: 1, most_stale: 1, ..PageRef::NONE }, block)))
    }

    fn update(index: &mut Index, seq: u64, pages: &[u64]) -> Vec<(u64, u8)> {
        let update = index.update(ARRAY, seq, pages.iter().copied().map(made).collect(), BTreeSet::new());
        let written = update.blocks().iter().map(|(page, place, _)| (*page, *place)).collect();
        index.commit(update);
        written
    }

    #[test]
    fn a_checkpoint_writes_changed_pages_and_all_above_to_their_other_places() {
        let last = 2 * REFS_PER_PAGE;
        let (below, top) = (last + 1, last + 4);
        let mut index = Index::new(PageTree::new(last + 1));
        assert_eq!(
            update(&mut index, 1, &[0, last]),
            [(0, 0), (last, 0), (below, 0), (top - 1, 0), (top, 0)]
        );
        assert_eq!(update(&mut index, 2, &[0, 1]), [(0, 1), (1, 0), (below, 1), (top, 1)]);
        assert_eq!((index.top().written, index.page(0).place, index.page(last).place), (3, 1, 0));
        let named: BTreeSet<u64> = index.named().collect();
        assert_eq!(named, BTreeSet::from([0, 1, last, below, top - 1, top]));
        let next = [0, 1, 2, last, last + 1].map(|from| index.next_named(from));
        assert_eq!(next, [Some(0), Some(1), Some(last), Some(last), None]);
        // Without a written stripe there is no page.
        let none = index.update(ARRAY, 3, vec![(last, None)], BTreeSet::new());
        assert!(index.is_in_use(top - 1) && !index.is_in_use(2));
        index.commit(none);
        assert_eq!((index.top().written, index.page(top - 1)), (2, PageRef::NONE));
    }

    #[test]
    fn what_was_written_is_loaded_and_nothing_else() {
        let tree = PageTree::new(REFS_PER_PAGE + 1);
        let mut index = Index::new(tree.clone());
        let update = index.update(ARRAY, 4, vec![made(3), made(REFS_PER_PAGE)], BTreeSet::new());
        let mut loaded = Index::new(tree.clone());
        loaded.load_top(update.top());
        let pages = update.blocks().iter().rev().filter(|(page, _, _)| !tree.is_leaf(*page));
        for (page, _, block) in pages {
            let found = IndexPage::decode(block).unwrap();
            assert!(loaded.page(*page).names(block));
            let wrong = PageRef { written: 1, ..PageRef::NONE };
            let refs = [found.refs.clone(), vec![wrong]].concat();
            assert!(!loaded.load(*page, IndexPage { refs, ..found.clone() }));
            assert!(!loaded.load(*page, IndexPage { level: 7, ..found.clone() }));
            assert!(!loaded.load(*page, IndexPage { index: 0, ..found.clone() }));
            let mut other = found.clone();
            other.refs[0].written += 1;
            assert!(!loaded.load(*page, other));
            assert!(loaded.load(*page, found));
        }
        index.commit(update);
        assert_eq!((loaded.top(), &loaded.nodes), (index.top(), &index.nodes));
    }
}
