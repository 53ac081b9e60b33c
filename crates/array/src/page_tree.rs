//! The numbers of the pages of a stripe table and of its index, which is a tree over them.
//!
//! Level 0 is the table. Each page of a higher level stands for [`REFS_PER_PAGE`] pages of the level below.
//! Numbers go on from level to level, so the last page is the top. There is an index page in any case.
//!
//! Pure.

use crate::format::index_page::REFS_PER_PAGE;
use penstock_base::num::{to_u8, to_usize};
use std::iter;
use std::ops::Range;

/// The pages of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageTree {
    levels: Vec<Range<u64>>,
}

impl PageTree {
    /// The tree over so many table pages.
    pub fn new(table_pages: u64) -> Self {
        Self { levels: levels(table_pages).collect() }
    }

    /// The pages of the table and of its index.
    pub fn pages(&self) -> u64 {
        self.levels[self.levels.len() - 1].end
    }

    /// The page that the root names.
    pub fn top(&self) -> u64 {
        self.pages() - 1
    }

    /// The level of a page: 0 in the table.
    pub fn level(&self, page: u64) -> u8 {
        let level = self.levels.iter().position(|level| level.contains(&page));
        to_u8(level.unwrap_or_else(|| panic!("page {page} of {}", self.pages())) as u64)
    }

    /// True for a page of the table.
    pub fn is_leaf(&self, page: u64) -> bool {
        self.levels[0].contains(&page)
    }

    /// The index page that names a page, and the number of its reference there; none for the top.
    pub fn parent(&self, page: u64) -> Option<(u64, usize)> {
        let level = usize::from(self.level(page));
        let (at, above) = (page - self.levels[level].start, self.levels.get(level + 1)?);
        Some((above.start + at / REFS_PER_PAGE, to_usize(at % REFS_PER_PAGE)))
    }

    /// The pages that an index page names.
    ///
    /// # Panics
    /// For a page of the table.
    pub fn children(&self, page: u64) -> Range<u64> {
        let level = usize::from(self.level(page));
        let below = &self.levels[level.checked_sub(1).expect("a page of the table names none")];
        let first = below.start + (page - self.levels[level].start) * REFS_PER_PAGE;
        first..below.end.min(first + REFS_PER_PAGE)
    }
}

/// The levels of the tree over so many table pages, from the table up.
fn levels(table_pages: u64) -> impl Iterator<Item = Range<u64>> {
    let above = |below: &Range<u64>| {
        let pages = below.end - below.start;
        let is_top = below.start > 0 && pages <= 1;
        (!is_top).then(|| below.end..below.end + pages.div_ceil(REFS_PER_PAGE).max(1))
    };
    iter::successors(Some(0..table_pages.max(1)), above)
}

/// The pages of the table and of its index, for so many table pages.
pub(crate) fn pages_with_index(table_pages: u64) -> u64 {
    levels(table_pages).last().map_or(0, |top| top.end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_but_the_top_is_named_once() {
        for table_pages in [1, 2, REFS_PER_PAGE, REFS_PER_PAGE + 1, REFS_PER_PAGE * REFS_PER_PAGE + 3] {
            let tree = PageTree::new(table_pages);
            assert_eq!(tree.pages(), pages_with_index(table_pages), "{table_pages}");
            let mut named = 0;
            for page in table_pages..tree.pages() {
                for (slot, child) in tree.children(page).enumerate() {
                    assert_eq!(child, named, "{table_pages}");
                    assert_eq!(tree.parent(child), Some((page, slot)));
                    assert_eq!(tree.level(child) + 1, tree.level(page));
                    named += 1;
                }
            }
            assert_eq!((named, tree.parent(tree.top())), (tree.top(), None));
            assert!(tree.is_leaf(0) && !tree.is_leaf(tree.top()));
        }
    }
}
