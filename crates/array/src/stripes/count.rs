//! The count of the stripes of a table, page by page.
//!
//! A count goes through the pages in their order. A stripe of a page that it has come to is counted as it is
//! from then on; a change of any other is left to it.
//!
//! Invariant: the most strips that a stripe of a counted page lacks is known for each of these pages, and the
//! same for its stripes that can be read.
//!
//! Pure. Two bytes for each page of the table.

use super::census::{Census, StripeState};
use crate::layout::Layout;
use crate::place::MemberSet;
use penstock_base::Stripe;
use penstock_base::num::{to_u8, to_usize};
use std::rc::Rc;

/// The most strips that a stripe of a page lacks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Worst {
    of_all: u8,
    /// Among those that do not lack more than the code can make.
    of_readable: u8,
}

impl Worst {
    /// With one more stripe, which lacks so many strips; the code can make `redundancy` of them.
    fn with(self, lacking: usize, redundancy: usize) -> Self {
        let lacks = to_u8(lacking as u64);
        let of_readable = if lacking > redundancy { 0 } else { lacks };
        Self { of_all: self.of_all.max(lacks), of_readable: self.of_readable.max(of_readable) }
    }
}

/// The count of one table.
pub(super) struct Count {
    layout: Rc<Layout>,
    census: Census,
    /// Pages before this one are counted.
    next: u64,
    /// By page; of no meaning for one that is not counted.
    worst: Vec<Worst>,
}

impl Count {
    /// A count that has not begun, for a table of so many pages; the code can make so many strips.
    pub(super) fn new(layout: &Rc<Layout>, redundancy: usize, pages: u64) -> Self {
        let census = Census::new(layout, redundancy, MemberSet::NONE, MemberSet::NONE);
        Self { layout: layout.clone(), census, next: 0, worst: vec![Worst::default(); to_usize(pages)] }
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
        (page < self.next).then(|| self.worst[to_usize(page)].of_all.into())
    }

    /// The same of stripes that do not lack more strips than the code can make.
    pub(super) fn worst_of_readable(&self, page: u64) -> Option<usize> {
        (page < self.next).then(|| self.worst[to_usize(page)].of_readable.into())
    }

    /// Begins anew.
    pub(super) fn begin(&mut self, absent: MemberSet, watched: MemberSet) {
        self.census = Census::new(&self.layout, self.census.redundancy(), absent, watched);
        self.worst.fill(Worst::default());
        self.next = 0;
    }

    /// Counts a page with these written stripes. Those before it that are not counted have none.
    pub(super) fn add(&mut self, page: u64, stripes: impl Iterator<Item = (Stripe, StripeState)>) {
        self.go_to(page);
        let (mut worst, redundancy) = (Worst::default(), self.census.redundancy());
        for (stripe, state) in stripes {
            worst = worst.with(self.census.add(&self.layout, stripe, state), redundancy);
        }
        self.worst[to_usize(page)] = worst;
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
        if page >= self.next {
            return false;
        }
        let (worst, redundancy) = (self.worst[to_usize(page)], self.census.redundancy());
        let lacked = before.map_or(0, |state| self.census.remove(&self.layout, stripe, state));
        let lacks = after.map_or(0, |state| self.census.add(&self.layout, stripe, state));
        let (before, now) =
            (Worst::default().with(lacked, redundancy), Worst::default().with(lacks, redundancy));
        self.worst[to_usize(page)] = worst.with(lacks, redundancy);
        let was_worst = |of: fn(Worst) -> u8| of(before) == of(worst) && of(now) < of(worst);
        was_worst(|worst| worst.of_all) || was_worst(|worst| worst.of_readable)
    }

    /// The stripes of a counted page lack so many strips.
    pub(super) fn set_worst(&mut self, page: u64, lacking: impl Iterator<Item = usize>) {
        assert!(page < self.next, "page {page} is not counted");
        let redundancy = self.census.redundancy();
        self.worst[to_usize(page)] = lacking.fold(Worst::default(), |worst, one| worst.with(one, redundancy));
    }
}
