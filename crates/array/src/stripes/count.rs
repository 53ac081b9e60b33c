//! The count of the stripes of a table, page by page.
//!
//! A count goes through the pages in their order. A stripe of a page that it has come to is counted as it is
//! from then on; a change of any other is left to it.
//!
//! Invariant: the most strips that a stripe of a counted page lacks is known for each of these pages.
//!
//! Pure. One byte for each page of the table.

use super::census::{Census, StripeState};
use crate::layout::Layout;
use crate::place::MemberSet;
use penstock_base::Stripe;
use penstock_base::num::{to_u8, to_usize};
use std::rc::Rc;

/// The count of one table.
pub(super) struct Count {
    layout: Rc<Layout>,
    census: Census,
    /// Pages before this one are counted.
    next: u64,
    /// By page, the most strips that a stripe of it lacks; of no meaning for a page that is not counted.
    worst: Vec<u8>,
}

impl Count {
    /// A count that has not begun, for a table of so many pages; the code can make so many strips.
    pub(super) fn new(layout: &Rc<Layout>, redundancy: usize, pages: u64) -> Self {
        let census = Census::new(layout, redundancy, MemberSet::NONE, MemberSet::NONE);
        Self { layout: layout.clone(), census, next: 0, worst: vec![0; to_usize(pages)] }
    }

    /// Counts of the stripes that were counted.
    pub(super) fn census(&self) -> &Census {
        &self.census
    }

    /// The first page that is not counted.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// True if all pages are counted.
    pub(super) fn is_complete(&self) -> bool {
        self.next == self.worst.len() as u64
    }

    /// True if the places of strips matter.
    pub(super) fn looks_at_places(&self) -> bool {
        !self.census.watched().is_empty()
    }

    /// The most strips that a stripe of a page lacks; none if the page is not counted.
    pub(super) fn worst_of(&self, page: u64) -> Option<usize> {
        (page < self.next).then(|| self.worst[to_usize(page)].into())
    }

    /// Begins anew.
    pub(super) fn begin(&mut self, absent: MemberSet, watched: MemberSet) {
        self.census = Census::new(&self.layout, self.census.redundancy(), absent, watched);
        self.worst.fill(0);
        self.next = 0;
    }

    /// Counts a page with these written stripes. Those before it that are not counted have none.
    pub(super) fn add(&mut self, page: u64, stripes: impl Iterator<Item = (Stripe, StripeState)>) {
        self.go_to(page);
        let worst = stripes.map(|(stripe, state)| self.census.add(&self.layout, stripe, state)).max();
        self.set_worst(page, worst.unwrap_or(0));
    }

    /// Counts a page with so many written stripes of which none lacks anything or has moved.
    pub(super) fn add_clean(&mut self, page: u64, written: u64) {
        self.go_to(page);
        self.census.add_clean(written);
    }

    fn go_to(&mut self, page: u64) {
        assert!(page >= self.next, "page {page} is counted");
        self.next = page + 1;
    }

    /// No page is left with a written stripe.
    pub(super) fn end(&mut self) {
        self.next = self.worst.len() as u64;
    }

    /// A stripe changed: none stands for unwritten. Returns true if the stripes of the page must be looked at
    /// for the most strips that one of them lacks.
    pub(super) fn changed(
        &mut self,
        page: u64,
        stripe: Stripe,
        (before, after): (Option<StripeState>, Option<StripeState>),
    ) -> bool {
        let Some(worst) = self.worst_of(page) else { return false };
        let lacked = before.map_or(0, |state| self.census.remove(&self.layout, stripe, state));
        let lacks = after.map_or(0, |state| self.census.add(&self.layout, stripe, state));
        if lacks >= worst {
            self.set_worst(page, lacks);
        }
        lacks < worst && lacked == worst
    }

    /// The most strips that a stripe of a counted page lacks.
    pub(super) fn set_worst(&mut self, page: u64, lacking: usize) {
        assert!(page < self.next, "page {page} is not counted");
        self.worst[to_usize(page)] = to_u8(lacking as u64);
    }
}
