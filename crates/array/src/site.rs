//! Sites: the names of the places in this crate that write to a drive.
//!
//! A site travels with each I/O. Power-cut tests cut at each passage of a site, so every write has one.

use penstock_drive::{Class, Io};

macro_rules! sites {
    ($($(#[$doc:meta])* $site:ident($class:ident, $name:literal)),* $(,)?) => {
        /// A place that writes to a drive.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Site {
            $($(#[$doc])* $site,)*
        }

        impl Site {
            /// Every site.
            pub const ALL: &[Self] = &[$(Self::$site),*];

            /// The name that an I/O carries.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$site => $name,)*
                }
            }

            /// An I/O from this site, of the class that it has unless the caller knows a better one.
            pub const fn io(self) -> Io {
                match self {
                    $(Self::$site => Io::new(Class::$class, $name),)*
                }
            }
        }
    };
}

sites! {
    /// The first root of a new array.
    Create(Meta, "array.create"),
    /// Zeros over the label of a slice that takes a member's place.
    LabelClear(Meta, "label.clear"),
    /// Records of the log.
    LogAppend(Log, "log.append"),
    /// Headers of log segments.
    LogSegment(Log, "log.segment"),
    /// Table pages of a checkpoint.
    CheckpointPage(Destage, "checkpoint.page"),
    /// Roots.
    CheckpointRoot(Destage, "checkpoint.root"),
    /// Strips of a stripe that was unwritten, past the log.
    FreshStrip(Client, "fresh.strip"),
    /// Their trailers.
    FreshTrailer(Client, "fresh.trailer"),
    /// Strips that destage writes.
    DestageStrip(Destage, "destage.strip"),
    /// Their trailers.
    DestageTrailer(Destage, "destage.trailer"),
    /// Strips and trailers that a rebuild or resync makes.
    RebuildStrip(Rebuild, "rebuild.strip"),
    /// Strips and trailers that a scrub or a read found bad.
    ScrubRepair(Scrub, "scrub.repair"),
    /// Log records that a scrub found bad on one carrier.
    MetadataRepair(Scrub, "metascrub.log"),
    /// The copy of log, roots and pages on a new carrier.
    CarrierCopy(Rebuild, "carrier.copy"),
    /// At an opening: the root and records of the log that a carrier lacks or may have in a cache alone.
    ReplayMend(Meta, "replay.mend"),
    /// At an opening: strips that destage records describe.
    ReplayRedo(Destage, "replay.redo"),
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn names_of_sites_are_distinct() {
        let names: BTreeSet<&str> = Site::ALL.iter().map(|site| site.name()).collect();
        assert_eq!(names.len(), Site::ALL.len());
        assert!(Site::ALL.iter().all(|site| site.io().site == site.name()));
    }
}
