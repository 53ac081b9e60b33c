//! The store that `up` is asked to make: its drives, its plan, and `--dry-run`.

use crate::args::Up;
use crate::folder::Folder;
use crate::given::Given;
use crate::machine;
use anyhow::{Context, Result, bail};
use penstock_node::{FileBacking, Level, NewDrives, Plan, StoreSpec, check_new_drives, default_stacks};
use penstock_worker::{Worker, block_on};
use std::process::ExitCode;

/// Drives of a new store if nothing is said of them.
const DRIVES: usize = 6;

/// Size of a drive of a new store if nothing is said of it.
const DRIVE_BYTES: u64 = 4 << 30;

/// The level that is asked for.
pub fn level(options: &Up) -> Option<Level> {
    options.level.or(options.code.map(|(k, m)| Level::Code(k, m)))
}

/// A store to be made.
pub struct Wanted {
    pub plan: Plan,
    pub spec: StoreSpec,
    given: Option<Given>,
    /// Bytes that the largest drive has more than the smallest one.
    unused_bytes: u64,
}

impl Wanted {
    /// The plan and the parameters that are asked for.
    pub fn of(options: &Up) -> Result<Self> {
        let given = Given::of(&options.drive)?;
        let drives = given.as_ref().map(|given| given.paths().len()).or(options.drives);
        let domains = options.domains.or(given.as_ref().and_then(Given::domains));
        let of_level = |level: Level| level.plan(drives.unwrap_or(level.default_drives()), options.groups);
        let plan = match (level(options), domains) {
            (Some(level), Some(domains)) => of_level(level)?.in_domains(domains)?,
            (Some(level), None) => of_level(level)?,
            (None, Some(domains)) => Plan::for_domains(drives.unwrap_or(DRIVES), domains)?,
            (None, None) => Plan::for_drives(drives.unwrap_or(DRIVES))?,
        };
        let plan = match options.spares {
            Some(spares) => plan.with_spares(spares)?,
            None => plan,
        };
        let (drive_bytes, unused_bytes) = match &given {
            None => (options.drive_size.unwrap_or(DRIVE_BYTES), 0),
            Some(given) => {
                let sizes = given.sizes()?;
                let (least, most) = (sizes.iter().min().copied(), sizes.iter().max().copied());
                let (least, most) = (least.unwrap_or(0), most.unwrap_or(0));
                (least, most - least)
            }
        };
        let stacks = options.targets.unwrap_or_else(|| default_stacks(machine::cores(), drive_bytes));
        let spec = StoreSpec::with_stacks(&plan, drive_bytes, options.strip, stacks)?;
        assert_eq!(spec.drives(), plan.drives(), "{plan:?}");
        Ok(Self { plan, spec, given, unused_bytes })
    }

    /// The drives: the given ones, or files that are made in the store's folder.
    pub fn drives(&self, folder: &Folder) -> Result<NewDrives> {
        if let Some(given) = &self.given {
            return Ok(NewDrives::Given(given.paths().to_vec()));
        }
        let drives = folder.path.join("drives");
        std::fs::create_dir_all(&drives).with_context(|| format!("{} cannot be made", drives.display()))?;
        let paths = (0..self.spec.drives())
            .map(|number| drives.join(format!("drive-{number}")).display().to_string());
        Ok(NewDrives::Files(paths.collect()))
    }

    /// The space of drives of different sizes that stays unused, for people.
    pub fn unused(&self) -> Option<String> {
        let [least, more] = [self.spec.drive_bytes, self.unused_bytes].map(crate::show::size);
        (self.unused_bytes > 0).then(|| {
            format!(
                "the smallest drive has {least}, and each drive is used as far as that: the largest has {more} more"
            )
        })
    }
}

/// The reason for the plan of a new store.
pub fn why(options: &Up) -> &'static str {
    match (options.drives.is_some() || !options.drive.is_empty(), level(options)) {
        (_, Some(_)) => "as asked for",
        (true, None) => "chosen for that number of drives; --level or --code ask for another code",
        (false, None) => "the default; --drives, --drive, --level and --code ask for others",
    }
}

/// Says how a store would be made, and makes nothing.
pub fn dry_run(options: &Up, json: bool) -> Result<ExitCode> {
    let wanted = Wanted::of(options)?;
    let [read, write] = options.rates[..] else { bail!("--rates takes two rates") };
    if read == 0 || write == 0 {
        bail!("--rates: a drive reads and writes something");
    }
    if let Some(given) = &wanted.given {
        let drives = NewDrives::Given(given.paths().to_vec());
        block_on(check_new_drives(&Worker::env()?, &FileBacking, &drives))??;
    }
    let report = wanted.spec.report(&wanted.plan, read, write)?;
    assert!(report.usable_bytes < report.raw_bytes, "{report:?}");
    match json {
        true => println!("{}", serde_json::to_string_pretty(&report)?),
        false => crate::show::plan(&report, why(options), wanted.unused().as_deref()),
    }
    Ok(ExitCode::SUCCESS)
}
