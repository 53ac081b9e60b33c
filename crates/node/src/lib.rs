//! All roles of one machine assembled: drives, arrays, key-value store, target, metadata target and services.
//!
//! The crate makes arrays of drives, a key-value store, a target and a metadata target on the arrays, and one
//! transport to all of them.
//!
//! Owns the layout of a store over its drives, finding a store again, and the operations of an administrator.
//! There is one store today: a data array k+m over all drives, and a metadata array 1+m over the first 1+m of
//! them.
#![cfg_attr(
    not(test),
    warn(clippy::cast_possible_truncation, clippy::cast_possible_wrap, clippy::cast_sign_loss)
)]
#![forbid(unsafe_code)]

mod backing;
mod coordination;
mod damage;
mod data_layout;
mod drive_set;
mod error;
mod event;
mod event_files;
mod events;
mod fsck;
mod fullness;
mod holding;
mod inspect;
mod keeper;
mod latency;
mod layout;
mod leases;
mod level;
mod map_copies;
mod memory;
mod node;
mod plan;
mod pool_settings;
mod pools;
mod report;
mod reports;
mod scrub_record;
mod scrubs;
mod service;
mod stack;
mod stack_arrays;
mod start;
mod store_file;
mod watch;

pub use backing::{Backing, FileBacking, Found};
pub use coordination::{Claims, FileOwnership};
pub use data_layout::DataLayout;
pub use drive_set::DriveSet;
pub use error::{AdminError, StartError};
pub use event::{Event, EventKind, Severity};
pub use event_files::{EventFiles, Kept};
pub use events::Events;
pub use holding::Holding;
pub use inspect::{Detail, inspect};
pub use keeper::{Keeper, KeptFile, replace_private_file};
pub use layout::{NewDrives, StoreSpec, check_new_drives, create_store, default_stacks};
pub use level::Level;
pub use map_copies::{Consent, MapCopies, Restore};
pub use node::Node;
pub use penstock_array::{Lacking, RebuildRate};
pub use penstock_chunk::copies::Newer;
pub use penstock_meta::WantedLayout;
pub use plan::{Arrangement, Plan};
pub use pool_settings::{POOLS_FILE, PoolChange, PoolSettings, RateText};
pub use report::{
    ArrayReport, DamagedFile, DamagedRange, DamagedReport, DriveReport, FileReport, FindingReport,
    FindingsReport, FsCheckProgress, FsCheckReport, FsRepairReport, FsReport, JobReport, LatencyReport,
    LayoutReport, MapCopyReport, MapRestoreReport, MemberReport, PlanReport, PoolReport, ScrubSummary,
    SessionDetails, SessionReport, SpaceReport, StackReport, StatusReport, TargetFilesReport,
};
pub use scrub_record::ScrubRecord;
pub use scrubs::SCRUBS_FILE;
pub use service::{ForOthers, InProcess};
pub use start::{Candidate, Start, find_drives, look_for_store};
pub use store_file::StoreFile;
