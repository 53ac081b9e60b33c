//! Strips on drives: reads with proof, reconstruction, and writes with a trailer.
//!
//! Invariants:
//! - a block is handed on only if its CRC32C agrees with a trailer of this array, stripe, position and of the
//!   version that the stripe map names. Everything else is an erasure;
//! - all callers hold the stripe's lock, so no write of the stripe is in flight when a mismatch is judged.

mod part;
mod patience;
mod read;
mod recover;
mod trailers;
mod write;

pub(crate) use part::{Erased, Found, Part, parts_to_keep};
pub(crate) use write::StripWrite;

use crate::context::Context;
use crate::members::Members;
use crate::place::Position;
use crate::stripes::Stripes;
use futures_util::future::join_all;
use patience::{Bad, Look, Patience};
use penstock_base::{BLOCK_BYTES, Stripe};
use penstock_drive::Io;
use penstock_raid::{Code, Fault};
use std::cell::RefCell;
use std::rc::Rc;
use trailers::TrailerCache;

/// The strips of one array.
pub(crate) struct Strips {
    context: Rc<Context>,
    members: Rc<Members>,
    stripes: Rc<Stripes>,
    code: Code,
    trailers: RefCell<TrailerCache>,
    patience: RefCell<Patience>,
}

impl Strips {
    pub(crate) fn new(
        context: &Rc<Context>,
        members: &Rc<Members>,
        stripes: &Rc<Stripes>,
        code: Code,
    ) -> Rc<Self> {
        Rc::new(Self {
            context: context.clone(),
            members: members.clone(),
            stripes: stripes.clone(),
            code,
            trailers: RefCell::default(),
            patience: RefCell::default(),
        })
    }

    fn look_at(&self, stripe: Stripe, position: Position) -> Look {
        let life = self.members.life(self.stripes.member(stripe, position));
        Look { at: self.context.env.now(), life }
    }

    /// Something was read that is not right, and may be in a moment. Returns true if it was so for long
    /// enough to be lost.
    fn found_bad(&self, stripe: Stripe, position: Position, bad: Bad) -> bool {
        let look = self.look_at(stripe, position);
        self.patience.borrow_mut().found_bad((stripe, position, bad), look)
    }

    /// The same of something for which a drive gives an error. That says nothing of a drive which gives
    /// errors for other things too.
    async fn found_unread(&self, stripe: Stripe, position: Position, bad: Bad, io: Io) -> bool {
        let (key, look) = ((stripe, position, bad), self.look_at(stripe, position));
        let counts = self.patience.borrow().counts(key, look);
        (!counts || self.answers(stripe, position, io).await)
            && self.patience.borrow_mut().found_bad(key, look)
    }

    /// True if the drive of a strip answers reads all over its slice, but for one: the place may be as bad.
    async fn answers(&self, stripe: Stripe, position: Position, io: Io) -> bool {
        let place = self.stripes.place(stripe, position);
        let Some(slice) = self.members.slice(place.member) else { return false };
        let geo = &self.context.geo;
        // Rows elsewhere, others for each stripe, and the label.
        let far = |eighths: u64| geo.trailer_at((place.row + geo.rows * eighths / 8) % geo.rows);
        let places = [0, far(1), far(3), far(4), far(6)];
        let reads = join_all(places.map(|at| slice.read(at, BLOCK_BYTES, io))).await;
        reads.iter().filter(|read| read.is_ok()).count() + 1 >= places.len()
    }

    fn found_good(&self, stripe: Stripe, position: Position, bad: Bad) {
        self.patience.borrow_mut().found_good((stripe, position, bad));
    }

    /// All blocks of a strip are good.
    fn found_whole(&self, stripe: Stripe, position: Position) {
        self.patience.borrow_mut().found_whole(stripe, position);
    }

    /// True if a trailer was bad for long enough to be lost.
    pub(crate) fn is_trailer_lost(&self, stripe: Stripe, position: Position) -> bool {
        self.patience.borrow().is_lasting((stripe, position, Bad::Trailer))
    }

    /// The name of the kernel that codes stripes.
    pub(crate) fn kernel(&self) -> &'static str {
        self.code.kernel().name()
    }

    /// Computes parity over data strips and compares. Returns false if a strip is odd, and reports which.
    pub(crate) fn check_parity(&self, stripe: Stripe, strips: &[&[u8]]) -> bool {
        let (data, parity) = strips.split_at(self.context.geo.k);
        let agrees = self.code.verify(data, parity);
        if !agrees {
            self.report_parity_defect(stripe, data, parity);
        }
        agrees
    }

    fn report_parity_defect(&self, stripe: Stripe, data: &[&[u8]], parity: &[&[u8]]) {
        self.context.count(|counts| counts.parity_defects += 1);
        // All trailers agree, so the odd strip only hints at where to look for the defect.
        let odd = match self.code.locate(data, parity) {
            Fault::Strip(position) => {
                format!("strip {position} is the one that the others do not agree with")
            }
            Fault::Unlocated | Fault::None => "no single strip explains it".to_owned(),
        };
        tracing::error!(
            array = self.context.name,
            %stripe,
            "parity disagrees with data that verifies, and {odd}: a defect, kept as it is"
        );
    }
}
