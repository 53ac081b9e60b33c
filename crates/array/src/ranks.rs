//! The order in which locks of an array are acquired, after those of a target. Debug builds assert it
//! ([`penstock_base::rank`]).
//!
//! | rank | lock | taken by |
//! |---|---|---|
//! | replacement | one replacement of a member at a time | whoever puts a slice in a member's place |
//! | destage | one round of destage at a time | destage, close, repair of metadata |
//! | stripe | shared or exclusive, several in ascending order | everything that reads or writes strips |
//! | fresh | one round that flushes and records fresh stripes | flush, and holders of stripes |
//! | versions | one reservation of versions at a time | everything that writes a strip |
//! | log record | no lock: the wait until a log record is durable | holders of all of the above |
//! | member flush | one flush of a member's strips at a time | fresh, destage, rebuild, redo |
//! | checkpoint | one checkpoint at a time; root and pages stay in place | the log writer, destage, scrub |
//! | reconfiguration | one change of the claim at a time | everything that loses, adds or replaces a member |
//! | label | one write of a member's label at a time | whoever records a change, scrub |
//! | carrier write | shared by writes on carriers, exclusive for a copy's end | the log writer, checkpoints |
//!
//! The log writer takes *checkpoint* and what is below it. So nothing may wait for a log record while it
//! holds a lock of a rank below *log record*.

use penstock_base::rank::Rank;

pub(crate) const REPLACEMENT: Rank = Rank::new(105, "replacement");
pub(crate) const DESTAGE: Rank = Rank::new(110, "destage");
pub(crate) const STRIPE: Rank = Rank::new(120, "stripe");
pub(crate) const FRESH: Rank = Rank::new(130, "fresh");
pub(crate) const VERSIONS: Rank = Rank::new(140, "versions");
pub(crate) const LOG_RECORD: Rank = Rank::new(150, "log record");
pub(crate) const MEMBER_FLUSH: Rank = Rank::new(160, "member flush");
pub(crate) const CHECKPOINT: Rank = Rank::new(170, "checkpoint");
pub(crate) const RECONFIGURATION: Rank = Rank::new(180, "reconfiguration");
pub(crate) const LABEL: Rank = Rank::new(185, "label");
pub(crate) const CARRIER_WRITE: Rank = Rank::new(190, "carrier write");
