//! Arrays in the simulated world: power cuts at every write site, lost drives, rot.
#![allow(clippy::unwrap_used, missing_docs)]

mod any_drives;
mod bench;
mod campaign;
mod carriers;
mod cuts;
mod faults;
mod full;
mod harsh;
mod hostile;
mod labels;
mod lost;
mod moving;
mod opened;
mod opened_log;
mod opened_pages;
mod orders;
mod outages;
mod outdated;
mod paging;
mod pinned;
mod replaced;
mod room;
mod seldom;
mod spread;
mod storm;
