//! Pages of the stripe table that are needed, and stripes with their pages.
//!
//! Invariant: a page is put into memory from the copy that the index names at that moment. While it was read,
//! another caller may have loaded it, and changed it, and a checkpoint may have written it.

use super::census::StripeState;
use super::pages::{self, NotRead, ReadPage};
use super::pins::Pin;
use super::table::Counting;
use super::{StripeTable, Stripes};
use crate::error::ArrayError;
use crate::format::index_page::PageRef;
use crate::format::record::Entry;
use crate::format::table_page::TablePage;
use crate::members::ownership::Lacking;
use crate::place::MemberNo;
use crate::table_memory::PagesInMemory;
use penstock_base::Stripe;
use penstock_base::env::yield_now;
use penstock_base::locks::{Exclusive, Shared};
use penstock_base::rank::RankedKey;
use penstock_drive::Slice;
use std::collections::BTreeSet;
use std::ops::Range;

/// Behind the last stripe of any array.
pub(crate) const END: Stripe = Stripe(u64::MAX);

/// Pages that are looked at before other tasks run.
const PAGES_AT_A_TIME: usize = 64;

impl PagesInMemory for Stripes {
    fn give_up_pages(&self) {
        self.table_mut().give_up_pages(|page| self.pins.contains(page));
    }
}

/// The treatment of a page that cannot be read now. One that counts as lost is passed over, if it is not said
/// otherwise.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unread {
    /// It fails the call.
    Fails,
    /// It fails the call, and so does one that counts as lost: that may be for a moment.
    FailsIfLost,
    /// It is passed over: the caller comes again.
    Waits,
}

/// An array that is being opened.
pub(crate) struct OpenedFrom {
    /// The carriers that have the pages of the table.
    pub(crate) carriers: Vec<MemberNo>,
    /// Refuse: a page that no carrier returns is not lost yet, if it may be readable another time.
    pub(crate) lacking: Lacking,
}

/// A locked stripe. Its page is in memory, and so are those of the stripes that share a row with it if it is
/// locked exclusively, but for pages that cannot be loaded.
pub(crate) struct LockedStripe<G> {
    _lock: RankedKey<G>,
    _pages: (Pin, Vec<Pin>),
}

impl Stripes {
    /// Locks a stripe for readers.
    pub(crate) async fn shared(&self, stripe: Stripe) -> Result<LockedStripe<Shared<u64>>, ArrayError> {
        let _lock = self.locks.shared(stripe.0).await;
        Ok(LockedStripe { _lock, _pages: (self.pin_stripe(stripe).await?, Vec::new()) })
    }

    /// Locks a stripe for whoever writes strips of it. Several are locked in ascending order.
    pub(crate) async fn exclusive(&self, stripe: Stripe) -> Result<LockedStripe<Exclusive<u64>>, ArrayError> {
        let _lock = self.locks.exclusive(stripe.0).await;
        let own = self.pin_stripe(stripe).await?;
        // Without spare places nobody asks for others.
        let beside = match self.context.layout.spares() {
            0 => Vec::new(),
            _ => self.pin_beside(self.context.layout.stripes_of_rows(stripe)).await,
        };
        Ok(LockedStripe { _lock, _pages: (own, beside) })
    }

    /// The pages of stripes that share rows, as far as they can be loaded.
    async fn pin_beside(&self, stripes: Range<Stripe>) -> Vec<Pin> {
        let mut pins = Vec::new();
        for page in self.pages_of(stripes) {
            if let Ok(pin) = self.pin(page..page + 1).await {
                pins.push(pin);
            }
        }
        pins
    }

    /// A stripe's page.
    pub(crate) async fn pin_stripe(&self, stripe: Stripe) -> Result<Pin, ArrayError> {
        let page = self.table().page_of(stripe);
        self.pin(page..page + 1).await
    }

    /// The pages of a range of stripes, of which there is one.
    fn pages_of(&self, stripes: Range<Stripe>) -> Range<u64> {
        assert!(stripes.start < stripes.end, "{stripes:?}");
        let table = self.table();
        table.page_of(stripes.start)..table.page_of(Stripe(stripes.end.0 - 1)) + 1
    }

    /// Pages for as long as the pin lives.
    pub(crate) async fn pin(&self, pages: Range<u64>) -> Result<Pin, ArrayError> {
        let pin = self.pins.pin(pages.clone());
        let lacks_some = {
            let mut table = self.table_mut();
            pages.clone().fold(false, |lacks, page| lacks | table.lacks_used_page(page))
        };
        self.memory.make_room();
        if lacks_some {
            self.load(pages).await?;
        }
        Ok(pin)
    }

    /// The pages of the stripes that an entry changes; none if it changes no page.
    fn pages_of_entry(&self, entry: &Entry) -> Option<Range<u64>> {
        let stripes = match entry {
            Entry::Data { .. } | Entry::Versions { .. } | Entry::MemberReset { .. } => return None,
            Entry::Fresh { stripe, .. } | Entry::Destage { stripe, .. } | Entry::Strips { stripe, .. } => {
                *stripe..stripe.next()
            }
            Entry::Discard { stripe, count, .. } => *stripe..Stripe(stripe.0 + count),
        };
        (stripes.start < stripes.end).then(|| self.pages_of(stripes))
    }

    /// The pages that these entries change. Pages that are lost are left out.
    pub(crate) async fn pin_entries(
        &self,
        entries: impl Iterator<Item = &Entry>,
    ) -> Result<Vec<Pin>, ArrayError> {
        let (mut pins, mut refused) = (Vec::new(), BTreeSet::new());
        for page in entries.filter_map(|entry| self.pages_of_entry(entry)).flatten() {
            match self.pin(page..page + 1).await {
                Err(ArrayError::Damaged { .. }) if self.table().is_lost(page) => {}
                Err(ArrayError::PagesLost { .. }) => drop(refused.insert(page)),
                pinned => pins.push(pinned?),
            }
        }
        if refused.is_empty() { Ok(pins) } else { Err(self.pages_lost(&refused)) }
    }

    /// The error of an opening that needs these pages, which no carrier returns.
    pub(crate) fn pages_lost(&self, pages: &BTreeSet<u64>) -> ArrayError {
        let table = self.table();
        ArrayError::PagesLost {
            name: self.context.name.clone(),
            pages: pages.clone(),
            stripes: pages.iter().map(|page| table.index().page(*page).written).sum(),
            also: String::new(),
        }
    }

    /// The lost pages whose stripes must not be believed without this entry, should the pages come back. A
    /// discard may be left out: without it the stripes have contents that nobody owns.
    pub(crate) fn lost_pages_of(&self, entry: &Entry) -> Vec<u64> {
        let pages = match entry {
            Entry::Discard { .. } => None,
            _ => self.pages_of_entry(entry),
        };
        pages.into_iter().flatten().filter(|page| self.table().is_lost(*page)).collect()
    }

    /// Gives up all stripes of a lost page, for good.
    pub(crate) fn give_up_lost(&self, page: u64) {
        tracing::error!(array = self.context.name, page, "all stripes of a lost page are given up");
        self.table_mut().give_up_lost(page);
    }

    /// Fails if some page of these stripes cannot be read, or counts as lost.
    pub(crate) async fn look_at(&self, stripes: Range<Stripe>) -> Result<(), ArrayError> {
        let pages = self.pages_of(stripes);
        for page in pages.clone().step_by(PAGES_AT_A_TIME) {
            self.pin(page..pages.end.min(page + PAGES_AT_A_TIME as u64)).await?;
            yield_now().await;
        }
        Ok(())
    }

    /// Gives up all stripes of the pages of these stripes that are lost, for good. Fails for a page that may
    /// be readable another time.
    pub(crate) async fn give_up_pages_of(&self, stripes: Range<Stripe>) -> Result<(), ArrayError> {
        for page in self.pages_of(stripes) {
            match self.pin(page..page + 1).await {
                Ok(_) => {}
                Err(ArrayError::Damaged { .. }) if self.table().is_lost(page) => self.give_up_lost(page),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    async fn load(&self, pages: Range<u64>) -> Result<(), ArrayError> {
        loop {
            let missing: Vec<(u64, PageRef)> = {
                let table = self.table();
                let missing = pages.clone().filter(|page| table.lacks_page(*page));
                missing.map(|page| (page, table.index().page(page))).collect()
            };
            if missing.is_empty() {
                return Ok(());
            }
            let carriers = self.carriers();
            let parent = |page: u64| self.table().index().tree().parent(page).map(|(parent, _)| parent);
            let mut failed = None;
            for run in missing.chunk_by(|(one, _), (next, _)| parent(*one) == parent(*next)) {
                for (of, read) in run.iter().zip(pages::read_run(&self.context, &carriers, run).await) {
                    if let Err(error) = self.put_page(*of, read) {
                        failed = Some(error);
                    }
                }
            }
            // All others are here.
            if let Some(error) = failed {
                return Err(error);
            }
        }
    }

    /// The carriers that have the pages of the table.
    fn carriers(&self) -> Vec<Slice> {
        let opening = self.opening.borrow();
        let carriers: Vec<MemberNo> = match &*opening {
            Some(opened_from) => opened_from.carriers.clone(),
            None => self.members.live_carriers(),
        };
        carriers.into_iter().filter_map(|at| self.members.slice(at)).collect()
    }

    /// The array is being opened from these carriers; none when it is open.
    pub(crate) fn set_opened_from(&self, opened_from: Option<OpenedFrom>) {
        self.opening.replace(opened_from);
    }

    /// True if a page is not in memory, and the index names this copy of it.
    fn is_as_named(&self, (page, named): (u64, PageRef)) -> bool {
        let table = self.table();
        table.lacks_page(page) && table.index().page(page) == named
    }

    fn put_page(
        &self,
        (page, named): (u64, PageRef),
        read: Result<ReadPage, NotRead>,
    ) -> Result<(), ArrayError> {
        if let Ok(read) = &read
            && read.bad > 0
        {
            self.context.count(|counts| counts.checksum_errors += read.bad);
            self.members.suspect_metadata();
        }
        // The copies may have been written over while they were read.
        if !self.is_as_named((page, named)) {
            return Ok(());
        }
        let was_lost = self.table().is_lost(page);
        let damaged = || self.context.damaged(format!("stripe table page {page}"));
        // An opening that cannot read a page ends, and may be tried again, or be told to give it up.
        let may_refuse =
            self.opening.borrow().as_ref().is_some_and(|opening| opening.lacking == Lacking::Refuse);
        let read = read.map_err(|NotRead { error, is_lost }| match error {
            ArrayError::CannotRead { .. } if is_lost && may_refuse => {
                self.pages_lost(&BTreeSet::from([page]))
            }
            _ if is_lost => damaged(),
            error => error,
        });
        let loaded = read.and_then(|read| {
            self.context.count(|counts| counts.table_reads += 1);
            let found = TablePage::decode(&read.block).ok();
            let found = found.filter(|found| found.array == self.context.id && found.index == page);
            match found.is_some_and(|found| self.table_mut().load_page(page, found.words)) {
                true => Ok(()),
                false => Err(damaged()),
            }
        });
        let stripes = self.table().range_of(page);
        let stripes = || stripes.start.run(stripes.end.0 - stripes.start.0);
        match &loaded {
            Ok(()) if was_lost => stripes().for_each(|stripe| self.list_readable(stripe)),
            Ok(()) => {}
            Err(error) => {
                let is_lost = matches!(error, ArrayError::Damaged { .. });
                if is_lost && !was_lost {
                    tracing::error!(array = self.context.name, page, "a page of the stripe table is lost");
                    self.members.suspect_metadata();
                    stripes().for_each(|stripe| self.map_mut().set_unreadable(stripe));
                }
                self.table_mut().set_absent(page, is_lost);
            }
        }
        loaded
    }

    /// True if more pages were changed since the last checkpoint than memory is meant for.
    pub(crate) fn has_too_many_unsaved(&self) -> bool {
        self.table().unsaved() >= self.memory.most_unsaved()
    }

    /// The first written stripes of a range, at most `most`, for which `wanted` holds. Only pages for which
    /// `may_have` holds are looked at. The pages of all stripes that share a row with one are in memory while
    /// that is asked for.
    pub(crate) async fn find(
        &self,
        range: Range<Stripe>,
        most: usize,
        unread: Unread,
        may_have: impl Fn(&StripeTable, u64) -> bool,
        wanted: impl Fn(Stripe, StripeState) -> bool,
    ) -> Result<Vec<Stripe>, ArrayError> {
        let (mut found, mut looked_at) = (Vec::new(), 0);
        let end = Stripe(range.end.0.min(self.context.geo.stripes));
        if range.start >= end || most == 0 {
            return Ok(found);
        }
        let pages = self.pages_of(range.start..end);
        let (mut page, last_page) = (pages.start, pages.end - 1);
        loop {
            looked_at += 1;
            if looked_at % PAGES_AT_A_TIME == 0 {
                yield_now().await;
            }
            let wanted_page = {
                let (table, mut last) = (self.table(), None);
                let mut pages =
                    table.pages_from(page).take(PAGES_AT_A_TIME).inspect(|page| last = Some(*page));
                let wanted_page = pages.find(|page| may_have(&table, *page));
                drop(pages);
                let Some(last) = last else { return Ok(found) };
                page = last + 1;
                wanted_page
            };
            if wanted_page.unwrap_or(page) > last_page {
                return Ok(found);
            }
            let Some(wanted_page) = wanted_page else { continue };
            let _page = match self.pin(wanted_page..wanted_page + 1).await {
                Ok(pin) => pin,
                Err(error) if unread == Unread::FailsIfLost => return Err(error),
                Err(error) if unread == Unread::Fails && !self.table().is_lost(wanted_page) => {
                    return Err(error);
                }
                Err(_) => continue,
            };
            let _beside = self.pin_beside(self.stripes_beside(wanted_page)).await;
            let written: Vec<_> = self.table().written_in(wanted_page).collect();
            let stripes = written.into_iter().filter(|(stripe, _)| (range.start..end).contains(stripe));
            let wanted = stripes.filter(|(stripe, state)| wanted(*stripe, *state));
            found.extend(wanted.map(|(stripe, _)| stripe).take(most - found.len()));
            if found.len() == most {
                return Ok(found);
            }
        }
    }

    /// The first stripes of a range, at most `most`, in which something is written: in their strips, or in
    /// the log. In ascending order.
    pub(crate) async fn written(
        &self,
        range: Range<Stripe>,
        most: usize,
        unread: Unread,
    ) -> Result<Vec<Stripe>, ArrayError> {
        // Stripes go from the log to the table: what is in neither is not written.
        let before: Vec<Stripe> = {
            let (map, overlay) = (self.map(), self.overlay());
            map.pending().map(|(stripe, _)| stripe).chain(overlay.stripes()).collect()
        };
        let in_table = self.find(range.clone(), most, unread, |_, _| true, |_, _| true).await?;
        let end = match in_table.last() {
            Some(last) if in_table.len() == most => last.next().min(range.end),
            _ => range.end,
        };
        let all = in_table.into_iter().chain(before);
        let all: BTreeSet<Stripe> = all.filter(|stripe| (range.start..end).contains(stripe)).collect();
        Ok(all.into_iter().take(most).collect())
    }

    /// The stripes of a page, and those that share rows with some of them.
    fn stripes_beside(&self, page: u64) -> Range<Stripe> {
        let (stripes, layout) = (self.table().range_of(page), &self.context.layout);
        let (first, last) = (stripes.start, Stripe(stripes.end.0 - 1));
        layout.stripes_of_rows(first).start..layout.stripes_of_rows(last).end
    }

    /// True if the moves of all stripes that share rows with this one are known.
    pub(super) fn knows_rows_of(&self, stripe: Stripe) -> bool {
        let pages = self.pages_of(self.context.layout.stripes_of_rows(stripe));
        let table = self.table();
        pages.into_iter().all(|page| !table.lacks_page(page))
    }

    /// Begins to count anew if other members are gone, or if strips on other members are to be counted.
    pub(super) fn refresh_count(&self) {
        let gone = self.members.gone();
        let watched = gone.with(self.members.stale());
        let is_of_now = {
            let table = self.table();
            let census = table.census();
            census.absent() == gone && watched.without(census.watched()).is_empty()
        };
        if is_of_now && self.table().is_counted() {
            return;
        }
        let mut table = self.table_mut();
        if !is_of_now {
            table.begin_count(gone, watched);
        }
        if !table.is_counted() && table.count_on(4 * PAGES_AT_A_TIME) != Counting::Done {
            self.context.signals.count.notify_one();
        }
    }

    /// True if all stripes are counted, with the members that are gone now.
    pub(crate) fn is_counted(&self) -> bool {
        self.refresh_count();
        self.table().is_counted()
    }

    /// Counts some more stripes. Returns true if all are counted.
    pub(crate) async fn count_some(&self) -> Result<bool, ArrayError> {
        if self.is_counted() {
            return Ok(true);
        }
        let counting = self.table_mut().count_on(PAGES_AT_A_TIME);
        match counting {
            Counting::Done => return Ok(true),
            Counting::More => {}
            Counting::Wants(page) => {
                let end = self.context.geo.table_pages().min(page + PAGES_AT_A_TIME as u64);
                let mut pins = Vec::new();
                match self.pin(page..end).await {
                    Ok(pin) => pins.push(pin),
                    // Those that can be loaded are here, and those that cannot are known.
                    Err(_) => {
                        let table = self.table();
                        let here = (page..end).filter(|page| !table.lacks_page(*page));
                        pins.extend(here.map(|page| self.pins.pin(page..page + 1)));
                    }
                }
                self.table_mut().count_on(PAGES_AT_A_TIME);
            }
        }
        yield_now().await;
        Ok(false)
    }

    /// Tries to load pages that could not be read when last tried. Returns true if there are none.
    pub(crate) async fn read_again(&self) -> bool {
        let mut next = self.table().next_unread(0);
        let is_over = next.is_none();
        while let Some(page) = next {
            // An error leaves it as it is.
            drop(self.pin(page..page + 1).await);
            next = self.table().next_unread(page + 1);
        }
        is_over
    }

    /// Waits until all stripes are counted.
    pub(crate) async fn counted(&self) -> Result<(), ArrayError> {
        while !self.count_some().await? {
            self.context.check_open()?;
        }
        Ok(())
    }
}
