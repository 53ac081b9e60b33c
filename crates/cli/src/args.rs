//! The command line's definition; its comments are the help texts and the man pages.

use crate::given::GivenDrives;
use clap::{Args as ClapArgs, Parser, Subcommand};
use penstock_base::text::{parse_code, parse_size};
use penstock_node::{Level, RateText, RebuildRate};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Parallel storage that keeps GPUs fed: drives protected by erasure code, files on top.
#[derive(Debug, Parser)]
#[command(name = "penstock", version, arg_required_else_help = true)]
pub struct Args {
    /// Folder of the store [default: ./penstock-data]
    #[arg(long, global = true, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// URL of a running instance, instead of --dir (the token is read from PENSTOCK_TOKEN)
    #[arg(long, global = true, value_name = "URL")]
    pub api: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start a store on this machine, in the foreground; creates the store if there is none
    Up(Up),
    /// Stop the running instance: unmount, make everything durable, exit
    Down {
        /// Folder of the store, instead of --dir
        dir: Option<PathBuf>,
    },
    /// Show health, drives, arrays and mounts
    Status {
        /// Show latencies since the start instead, layer by layer
        #[arg(long)]
        latency: bool,
    },
    /// Show events, oldest first; if no instance runs, reads them from the store's folder
    Events {
        /// Only events with a number above this one
        #[arg(long, default_value_t = 0, value_name = "SEQ")]
        since: u64,
        /// Wait for new events and print them as they occur
        #[arg(long)]
        follow: bool,
    },
    /// Commands for drives
    #[command(subcommand)]
    Drive(Drive),
    /// Commands for pools
    #[command(subcommand)]
    Pool(Pool),
    /// Commands for stacks: each has a target, which keeps parts of files
    #[command(subcommand)]
    Stack(Stack),
    /// Commands for targets
    #[command(subcommand)]
    Target(Target),
    /// Commands for arrays
    #[command(subcommand)]
    Array(Array),
    /// Commands for file systems
    #[command(subcommand)]
    Fs(Fs),
    /// Commands for sessions: the clients of an instance
    #[command(subcommand)]
    Session(Session),
    /// Mount a file system of a running instance, in a separate process
    ///
    /// The process reaches the instance through the socket in its folder, and reconnects after a restart of
    /// the instance. It ends when the file system is unmounted, or at SIGTERM. A file system can be mounted
    /// any number of times, and all mounts show the same files. For /etc/fstab and mount -t fuse.penstock,
    /// install mount.fuse.penstock.
    Mount(Mount),
    /// Aborts a mount's FUSE connection when the process of the mount dies (started by that process)
    #[command(name = penstock_fuse::GUARD, hide = true)]
    MountGuard {
        /// Number of the FUSE connection
        connection: u32,
        /// Thread that started this process, as a path below /proc
        thread: PathBuf,
        /// The process of that thread ends when the file system is unmounted
        #[arg(long = penstock_fuse::ENDS.trim_start_matches('-'))]
        ends: bool,
    },
    /// Finds out whether the process of a mount answers (started by other commands)
    #[command(name = penstock_fuse::PROBE, hide = true)]
    MountProbe {
        /// Mount point
        path: PathBuf,
    },
    /// Makes everything written through a mount durable (started by other commands)
    #[command(name = penstock_fuse::SYNC, hide = true)]
    MountSync {
        /// Mount point
        path: PathBuf,
    },
    /// Unmount a file system
    ///
    /// First everything that was written through the mount is made durable. If that fails it stays mounted.
    Umount {
        /// Mount point [default: the only mount of the instance]
        path: Option<PathBuf>,
    },
    /// Print a completion script for a shell
    Completion {
        /// Shell to print it for
        shell: Shell,
    },
    /// Write man pages: penstock.1 and one for each command
    Man {
        /// Directory to write into
        #[arg(default_value = ".")]
        dir: PathBuf,
    },
    /// Commands for finding faults
    #[command(subcommand)]
    Debug(Debug),
    /// Run benchmarks
    #[command(subcommand)]
    Bench(Bench),
}

/// Options of `mount`.
#[derive(Debug, ClapArgs)]
pub struct Mount {
    /// The file system [default: main] and an empty directory to mount it at
    #[arg(required = true, num_args = 1..=2, value_name = "[FS] PATH")]
    pub words: Vec<PathBuf>,
    /// Address of the instance's listener for clients (`up --tcp`), instead of --dir
    #[arg(long, value_name = "ADDRESS:PORT", requires = "token_file")]
    pub tcp: Option<SocketAddr>,
    /// File with the instance's token for clients (`token.data` in its folder), for --tcp
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub mount_as: MountAs,
    /// Return when the file system is mounted and continue in the background
    #[arg(long)]
    pub detach: bool,
    /// Log file of the background process [default: mount-PATH.log in the store's folder; with --tcp, in the
    /// current directory]
    #[arg(long, value_name = "FILE", requires = "detach")]
    pub log: Option<PathBuf>,
    /// Marks the process that --detach starts
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// Mount options of `mount` and `up`.
#[derive(Debug, ClapArgs)]
pub struct MountAs {
    /// Mount read-only: the kernel refuses every change
    #[arg(long)]
    pub read_only: bool,
    /// Source of the mount, as findmnt and df show it and umount accepts it [default: penstock]
    #[arg(long, value_name = "NAME")]
    pub source: Option<String>,
}

impl MountAs {
    /// Converts to the options of the FUSE mount, with a guard process.
    pub fn options(&self) -> penstock_fuse::MountOptions {
        let default = penstock_fuse::MountOptions::default();
        penstock_fuse::MountOptions {
            source: self.source.clone().unwrap_or(default.source),
            read_only: self.read_only,
            guarded: true,
            ends: false,
        }
    }
}

/// Options of `up`.
#[derive(Debug, ClapArgs)]
pub struct Up {
    /// Folder of the store, instead of --dir [default: ./penstock-data]
    pub folder: Option<PathBuf>,
    /// Number of drives of a new store, 1 to 256 [default: as many as the code has strips, or 6]
    #[arg(long)]
    pub drives: Option<usize>,
    /// Drives of a new store instead: blank block devices, or empty files. Drives with the same name before
    /// `=` share a failure domain, as a shelf or a controller is: of each stripe no more lies in one than may
    /// be lost. For a store that is there already, more places to look for its drives
    #[arg(long, value_name = "[DOMAIN=]PATH,…", conflicts_with_all = ["drives", "drive_size", "domains"])]
    pub drive: Vec<GivenDrives>,
    /// Failure domains of equal size of the drives of a new store: drive n is in domain n modulo N
    /// [default: each drive fails alone]
    #[arg(long, value_name = "N")]
    pub domains: Option<usize>,
    /// Size of each drive of a new store, as in 4G or 512M [default: 4G]
    #[arg(long, value_parser = parse_size)]
    pub drive_size: Option<u64>,
    /// Code of the data array of a new store: data+parity strips [default: chosen for the number of drives]
    #[arg(long, value_parser = parse_code)]
    pub code: Option<(usize, usize)>,
    /// Level of a new store instead: 0, 1, 5, 6, 7.3, 10, 50, 60, 70, or a code as in 8+2
    #[arg(long, conflicts_with = "code")]
    pub level: Option<Level>,
    /// Number of groups of drives of a new store, for levels 50, 60, 70 and codes [default: chosen]
    #[arg(long, value_name = "N", requires = "level")]
    pub groups: Option<usize>,
    /// Drives of a new store whose contents have room on the others [default: chosen]
    #[arg(long, value_name = "N")]
    pub spares: Option<usize>,
    /// Data in each strip of a new store, 4K to 1M, a power of two [default: chosen for the code]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    pub strip: Option<u64>,
    /// Targets of a new store, 1 to 64; long files are spread over them [default: chosen]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=64))]
    pub targets: Option<u16>,
    /// Say how a new store would be made, and make nothing
    #[arg(long, conflicts_with_all = ["mount", "detach", "port", "tcp"])]
    pub dry_run: bool,
    /// Rates of a drive that a rebuild is reckoned with by --dry-run, a second
    #[arg(long, value_names = ["READ", "WRITE"], num_args = 2, value_parser = parse_size, requires = "dry_run", default_values = ["2G", "1G"])]
    pub rates: Vec<u64>,
    /// Mount the file system at this empty directory
    #[arg(long)]
    pub mount: Option<PathBuf>,
    #[command(flatten)]
    pub mount_as: MountAs,
    /// Serve REST on this loopback port too, with the token in the file `token`; 0 takes any free port
    /// [default: the socket in the folder only]
    #[arg(long)]
    pub port: Option<u16>,
    /// Serve clients on this loopback address too, with the token in the file `token.data`; port 0 takes any
    /// free port [default: the socket in the folder only]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp: Option<SocketAddr>,
    /// Seconds after which the session of a silent client ends, with its locks and open files
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub lease: u32,
    /// Days from the end of one scrub of an array to the start of the next; 0 turns automatic scrubs off
    #[arg(long, default_value_t = 14, value_name = "N")]
    pub scrub_days: u32,
    /// Hours between copies of names and maps to the data drives; 0 makes none by itself
    #[arg(long, default_value_t = 24, value_name = "N")]
    pub map_copy_hours: u32,
    /// Start although some data needs drives that are absent or outdated; that data is lost for good
    #[arg(long)]
    pub accept_loss: bool,
    /// Return when the store is ready and continue in the background
    #[arg(long)]
    pub detach: bool,
    /// Marks the process that --detach starts
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// Commands for drives.
#[derive(Debug, Subcommand)]
pub enum Drive {
    /// List all drives
    List,
    /// Show one drive
    Show {
        /// Id of the drive, or the beginning of it
        id: String,
    },
    /// Take a drive out of service
    Fail {
        /// Id of the drive, or the beginning of it
        id: String,
    },
    /// Replace a failed or missing drive by a blank one and rebuild onto it
    Replace {
        /// Id of the old drive, or the beginning of it
        id: String,
        /// Path of the new drive [default: the path of the old one]
        path: Option<PathBuf>,
        /// Do not ask before the path is overwritten
        #[arg(long)]
        yes: bool,
    },
}

/// Commands for arrays.
#[derive(Debug, Subcommand)]
pub enum Pool {
    /// List all pools
    List,
    /// Show one pool: code, layout, space, and the drives that may be lost now
    Show {
        /// Name of the pool
        #[arg(default_value = "main")]
        pool: String,
    },
    /// Change the settings of a pool; they hold from now on, also after a start
    Set {
        /// Name of the pool
        #[arg(default_value = "main")]
        pool: String,
        /// Rate of rebuilds: `auto` follows the latency of clients, `max` takes all it can, and a size as in
        /// `500M` is the most bytes of strips a second
        #[arg(long, value_name = "RATE", value_parser = parse_rate)]
        rebuild_rate: RateText,
    },
}

/// Reads a rebuild rate.
fn parse_rate(text: &str) -> Result<RateText, String> {
    match text {
        "auto" | "max" => RateText::try_from(text.to_owned()),
        size => match parse_size(size) {
            Ok(bytes @ 1..) => Ok(RateText(RebuildRate::AtMost(bytes))),
            _ => Err("it is auto, max, or a size above 0 as in 500M".into()),
        },
    }
}

/// Commands for stacks.
#[derive(Debug, Subcommand)]
pub enum Stack {
    /// List all stacks
    List,
    /// Show one stack: its arrays, its space, and the work that its target has yet to do
    Show {
        /// Number of the stack
        stack: u16,
    },
}

/// Commands for targets.
#[derive(Debug, Subcommand)]
pub enum Target {
    /// Give up a target that does not serve and will not come back, with its data
    ///
    /// Nothing waits for it any more: files are removed and cut without it, and drives that only it needed
    /// can be replaced. It never serves again, even if its drives return. Parts of files that lie there read
    /// as errors; `penstock fs damaged` names these files.
    Forget {
        /// Number of the target, as `penstock stack list` shows it
        target: u32,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

/// Commands for layouts.
#[derive(Debug, Subcommand)]
pub enum FsLayout {
    /// Show the targets of a file, or the layout that new files in a directory get
    Show {
        /// Path in a mount of the file system
        path: PathBuf,
    },
    /// Change the layout that new files in a directory get, or that of an empty file
    ///
    /// Files and directories that are made later inherit it. Files that have data stay where they are.
    Set {
        /// Path in a mount of the file system
        path: PathBuf,
        /// Number of targets, or `all`: those that there are when a file is made
        #[arg(long, value_name = "N", value_parser = parse_count, required_unless_present = "turn")]
        targets: Option<u16>,
        /// Data in a row on one target, a multiple of the chunk: 1M, unless a stripe is longer
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        turn: Option<u64>,
    },
}

/// Reads a number of targets; 0 for all.
fn parse_count(text: &str) -> Result<u16, String> {
    match (text, text.parse()) {
        ("all", _) => Ok(0),
        (_, Ok(count @ 1..=64)) => Ok(count),
        _ => Err("it is 1 to 64, or all".into()),
    }
}

#[derive(Debug, Subcommand)]
pub enum Array {
    /// List all arrays
    List,
    /// Show one array
    Show {
        /// Name of the array, its id, or the beginning of the id
        array: String,
    },
    /// Show rebuilds, or wait for them; rebuilds start by themselves
    Rebuild {
        /// Name or id of the array [default: all arrays]
        array: Option<String>,
        /// Wait until all rebuilds are done; fails if redundancy is still missing
        #[arg(long)]
        wait: bool,
    },
    /// Read and verify everything, and repair errors
    Scrub {
        /// Name or id of the array [default: all arrays]
        array: Option<String>,
        /// Wait until the scrub is done; fails if something could not be repaired
        #[arg(long)]
        wait: bool,
    },
}

/// Commands for file systems.
#[derive(Debug, Subcommand)]
pub enum Fs {
    /// List all file systems
    List,
    /// Show one file system
    Show {
        /// Name of the file system
        #[arg(default_value = "main")]
        name: String,
    },
    /// Check names, links, chunks, extents and bitmaps against each other; with --repair, repair what is
    /// wrong
    ///
    /// Without --repair, nothing is changed and the file system may be in use; operations that change it wait
    /// during the check. With --repair, the file system must not be mounted, and requests wait until the
    /// repair ends. The next repair finishes one that was interrupted. A repair discards no data: files that
    /// have lost their names are in /lost+found afterwards.
    ///
    /// docs/fs-check.md lists every kind of finding, its meaning and its repair.
    ///
    /// With --map, names and maps come from their last copy on the data drives: for a store that does not
    /// start because they cannot be read. The instance must be stopped. Data that was written since the copy
    /// is in one file in /lost+found; the files that lack it read as zeros there and are listed. A write
    /// counts for all of its strip, so files beside it may lack data too: with --keep-changed it stays in the
    /// files that had it, which may then show newer data of others. A store whose names and maps can be read
    /// is left as it is.
    #[command(
        after_help = "Exit status: 0 clean; 1 everything that was wrong is repaired; 4 something is still wrong; 8 the check failed."
    )]
    Check {
        /// Name of the file system
        #[arg(default_value = "main")]
        name: String,
        /// Repair the findings that can be repaired
        #[arg(long)]
        repair: bool,
        /// Take names and maps from their last copy first
        #[arg(long, requires = "repair")]
        map: bool,
        /// Leave blocks in their files that may have been written since the copy, perhaps by others
        #[arg(long, requires = "map")]
        keep_changed: bool,
        /// Like `penstock up --accept-loss`
        #[arg(long, requires = "map")]
        accept_loss: bool,
        /// Also if names and maps can be read, if it is not certain that they are lost, or if a newer copy
        /// cannot be read
        #[arg(long, requires = "map")]
        force: bool,
        /// Drives of the store, as for `penstock up`, if they are not where they were
        #[arg(long, requires = "map", value_name = "PATH,…")]
        drive: Vec<GivenDrives>,
        /// Repair without asking
        #[arg(long, requires = "repair")]
        yes: bool,
    },
    /// Commands for layouts: the targets over which files are spread
    #[command(subcommand)]
    Layout(FsLayout),
    /// Copy names and maps to the data drives now
    ///
    /// `penstock up` does it once a day (--map-copy-hours). `penstock fs show` tells the last copy, and
    /// `penstock fs check --repair --map` uses it.
    CopyMap {
        /// Name of the file system
        #[arg(default_value = "main")]
        name: String,
    },
    /// List files with data that cannot be read any more, with the damaged byte ranges
    ///
    /// The list covers stripes in which a read or a scrub found fewer valid strips than the code needs. Run
    /// `penstock array scrub --wait` first to examine every stripe. A file leaves the list when its damaged
    /// bytes are overwritten or the file is removed.
    #[command(
        after_help = "Exit status: 0 no file is damaged; 4 some files are damaged, or metadata is; 8 the command failed."
    )]
    Damaged {
        /// Name of the file system
        #[arg(default_value = "main")]
        name: String,
    },
}

/// Commands for sessions.
#[derive(Debug, Subcommand)]
pub enum Session {
    /// List all sessions
    List,
    /// Show one session: what its client has open, leased and locked, and which calls it has not answered
    Show {
        /// Number of the session
        id: u64,
    },
    /// End the session of a client in another process
    ///
    /// Others get its leases and locks. Every operation of the client fails from then on, and its changes
    /// that are not synced are lost; a mount must be unmounted and mounted again.
    End {
        /// Number of the session
        id: u64,
        /// Do not ask before the session is ended
        #[arg(long)]
        yes: bool,
    },
}

/// Shells with a completion script.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Shell {
    /// bash
    Bash,
    /// zsh
    Zsh,
    /// fish
    Fish,
}

/// Commands for finding faults.
#[derive(Debug, Subcommand)]
pub enum Debug {
    /// Write state, events, metrics and logs into one tar file; if no instance runs, the files of the store's
    /// folder
    Bundle {
        /// File to create [default: penstock-debug-TIME.tar in the current directory]
        file: Option<PathBuf>,
    },
    /// Show the structures on one drive: superblock, labels, roots, stripe table, log
    ///
    /// Nothing is written. The drive may be in use; then what is shown may change meanwhile. The fields have
    /// the names of docs/format.
    Inspect {
        /// The drive: a file or block device
        path: PathBuf,
        /// Show every record of the logs with its entries
        #[arg(long)]
        log: bool,
        /// Show this stripe of each array: its entry in the table and the trailer of its strip
        #[arg(long, value_name = "NUMBER")]
        stripe: Option<u64>,
    },
}

/// Benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Measure an array on drives in memory, or on drives that take as long as a data sheet says
    Array {
        /// Code, as in 4+2
        #[arg(long, value_parser = parse_code, default_value = "4+2")]
        code: (usize, usize),
        /// On model drives: rates and latencies of a data sheet, with all times stretched
        #[command(flatten)]
        model: Model,
    },
    /// Measure the stripe tables of large arrays, on simulated drives that generate the table when it is read
    Table {
        /// Code, as in 4+2
        #[arg(long, value_parser = parse_code, default_value = "4+2")]
        code: (usize, usize),
        /// Sizes of the array's data in TiB, separated by commas; one line of output each
        #[arg(long, value_name = "TIB", value_delimiter = ',', default_value = "1,16,64,256", value_parser = clap::value_parser!(u64).range(1..=4096))]
        tib: Vec<u64>,
    },
    /// Measure the erasure code and compare it with memory bandwidth, and with ISA-L if that is installed
    Codec {
        /// Kernel to use, as in avx2-gfni [default: the fastest one on this processor]
        #[arg(long, value_name = "NAME")]
        kernel: Option<String>,
        /// Rounds of measurement; the median is reported
        #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=99))]
        rounds: u32,
        /// Only measurements with this text in their names, as in "8+2 encode, cold"
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Write a roofline plot of the kernels to this SVG file
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Test run: little memory, and figures without meaning
        #[arg(long)]
        quick: bool,
    },
}

/// Numbers for reads and for writes.
#[derive(Clone, Copy, Debug)]
pub struct Pair(pub [f64; 2]);

fn parse_pair(text: &str) -> Result<Pair, String> {
    let numbers: Option<Vec<f64>> = text.split(',').map(|number| number.trim().parse().ok()).collect();
    match numbers.as_deref() {
        Some([read, write]) if *read > 0.0 && *write > 0.0 => Ok(Pair([*read, *write])),
        _ => Err("it takes two numbers above 0: for reads and for writes".into()),
    }
}

/// Model drives for a benchmark.
#[derive(Debug, clap::Args)]
pub struct Model {
    /// Measure on model drives, and compare with what theory leaves of them
    #[arg(long)]
    pub model: bool,
    /// Measure rebuilds instead of I/O
    #[arg(long, requires = "model")]
    pub rebuild: bool,
    /// Number of drives [default: as many as the code has strips]
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u64).range(1..=256))]
    pub drives: Option<u64>,
    /// Spread stripes over all drives, with spare places for so many of them, instead of groups
    #[arg(long, value_name = "N", requires = "model", value_parser = clap::value_parser!(u64).range(0..=8))]
    pub spares: Option<u64>,
    /// Bytes of a strip
    #[arg(long, value_name = "SIZE", requires = "model", value_parser = parse_size, default_value = "256K")]
    pub strip: u64,
    /// Sequential rates of a drive in GB/s: reads, writes
    #[arg(long, value_name = "R,W", requires = "model", value_parser = parse_pair, default_value = "14.5,9.3")]
    pub gbps: Pair,
    /// Random 4 KiB I/O of a drive in thousands a second: reads, writes
    #[arg(long, value_name = "R,W", requires = "model", value_parser = parse_pair, default_value = "1021,485")]
    pub kiops: Pair,
    /// Latency of a drive in microseconds: reads, writes
    #[arg(long, value_name = "R,W", requires = "model", value_parser = parse_pair, default_value = "60,10")]
    pub us: Pair,
    /// Factor by which all times are stretched, so that this machine keeps up
    #[arg(long, value_name = "FACTOR", requires = "model", default_value_t = 200.0)]
    pub slower: f64,
    /// Bytes of each drive that are filled
    #[arg(long, value_name = "SIZE", requires = "model", value_parser = parse_size, default_value = "256M")]
    pub fill: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_unit_starts_what_the_command_line_knows() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/systemd/penstock@.service");
        let unit = std::fs::read_to_string(path).unwrap();
        let start = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).unwrap();
        let start = start.replace("%i", "main").replace("$PENSTOCK_OPTIONS", "--drive-size 8G --code 8+2");
        let args = Args::try_parse_from(start.split_whitespace()).unwrap();
        let Command::Up(up) = args.command else { panic!("it is `up`") };
        assert_eq!(up.folder.unwrap().to_str(), Some("/var/lib/penstock/main"));
        assert!(!up.detach, "systemd watches the process itself");
    }

    #[test]
    fn the_definition_is_sound() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
