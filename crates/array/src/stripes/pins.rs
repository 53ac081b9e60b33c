//! Pinned pages: while a pin lives its pages stay in memory.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

/// The pinned pages of one table, each with the number of its pins.
#[derive(Clone, Default)]
pub(super) struct Pins(Rc<RefCell<BTreeMap<u64, u32>>>);

impl Pins {
    pub(super) fn pin(&self, pages: Range<u64>) -> Pin {
        let mut pinned = self.0.borrow_mut();
        pages.clone().for_each(|page| *pinned.entry(page).or_default() += 1);
        Pin { pages, all: self.clone() }
    }

    pub(super) fn contains(&self, page: u64) -> bool {
        self.0.borrow().contains_key(&page)
    }
}

/// Pages that stay in memory.
pub(crate) struct Pin {
    pages: Range<u64>,
    all: Pins,
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut pinned = self.all.0.borrow_mut();
        for page in self.pages.clone() {
            let pins = pinned.get_mut(&page).expect("it is pinned");
            *pins -= 1;
            if *pins == 0 {
                pinned.remove(&page);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_pinned_as_long_as_one_of_its_pins_lives() {
        let pins = Pins::default();
        let (one, other) = (pins.pin(2..4), pins.pin(3..4));
        let pinned = |pins: &Pins| (0..5).filter(|page| pins.contains(*page)).collect::<Vec<_>>();
        assert_eq!(pinned(&pins), [2, 3]);
        drop(one);
        assert_eq!(pinned(&pins), [3]);
        drop(other);
        assert!(pinned(&pins).is_empty());
    }
}
