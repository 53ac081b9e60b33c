//! The command line's definition.

use clap::{Args as ClapArgs, Parser, Subcommand};
use penstock_base::text::{parse_code, parse_size};
use std::net::SocketAddr;
use std::path::PathBuf;

/// Parallel storage that keeps GPUs fed: drives protected by erasure code, files on top.
#[derive(Debug, Parser)]
#[command(name = "penstock", version, arg_required_else_help = true)]
pub struct Args {
    /// Folder of the store
    #[arg(long, global = true, value_name = "DIR")]
    pub dir: Option<PathBuf>,
    /// URL of a running instance, instead of --dir (its token is read from PENSTOCK_TOKEN)
    #[arg(long, global = true, value_name = "URL")]
    pub api: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start all roles on this machine, in the foreground; makes the store if there is none
    Up(Up),
    /// Stop the running instance: unmount, make everything durable, end
    Down {
        /// The store's folder
        dir: Option<PathBuf>,
    },
    /// Health, drives, arrays and mounts
    Status {
        /// How long operations took since the start, layer by layer
        #[arg(long)]
        latency: bool,
    },
    /// What happened, oldest first; without a running instance, from the folder's files
    Events {
        /// Only events behind this number
        #[arg(long, default_value_t = 0, value_name = "SEQ")]
        since: u64,
        /// Go on and print events as they come
        #[arg(long)]
        follow: bool,
    },
    /// Drives
    #[command(subcommand)]
    Drive(Drive),
    /// Arrays
    #[command(subcommand)]
    Array(Array),
    /// File systems
    #[command(subcommand)]
    Fs(Fs),
    /// Mount a file system of a running instance, by a process of its own
    ///
    /// The process reaches the instance through its folder, and connects again when the instance was started again.
    /// It ends when the file system is unmounted, or at SIGTERM. Several mounts show the same files.
    /// For /etc/fstab and mount -t fuse.penstock there is mount.fuse.penstock.
    Mount(Mount),
    /// Ends a mount's connection when the mount's process dies, which starts it beside itself
    #[command(name = penstock_fuse::GUARD, hide = true)]
    MountGuard {
        /// Number of the connection
        connection: u32,
        /// The thread that starts it, below /proc
        thread: PathBuf,
    },
    /// Unmount
    Umount {
        /// Where it is mounted [default: the only mount of the instance]
        path: Option<PathBuf>,
    },
    /// Print what a shell reads to complete these commands
    Completion {
        /// The shell
        shell: Shell,
    },
    /// Write man pages: penstock.1 and one for each verb
    Man {
        /// Where to
        #[arg(default_value = ".")]
        dir: PathBuf,
    },
    /// What helps whoever looks for a fault
    #[command(subcommand)]
    Debug(Debug),
    /// Benchmarks
    #[command(subcommand)]
    Bench(Bench),
}

/// Options of `mount`.
#[derive(Debug, ClapArgs)]
pub struct Mount {
    /// The file system [default: main] and an empty directory
    #[arg(required = true, num_args = 1..=2, value_name = "[FS] PATH")]
    pub words: Vec<PathBuf>,
    /// Address of the instance's listener for clients (`up --tcp`), instead of --dir
    #[arg(long, value_name = "ADDRESS:PORT", requires = "token_file")]
    pub tcp: Option<SocketAddr>,
    /// File with the instance's token for clients (`token.data` of its folder), for --tcp
    #[arg(long, value_name = "FILE", requires = "tcp")]
    pub token_file: Option<PathBuf>,
    #[command(flatten)]
    pub mount_as: MountAs,
    /// Return when it is mounted and go on in the background
    #[arg(long)]
    pub detach: bool,
    /// What the background process prints [default: mount-PATH.log in the store's folder, or here]
    #[arg(long, value_name = "FILE", requires = "detach")]
    pub log: Option<PathBuf>,
    /// What --detach starts
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// How the kernel shows a mount.
#[derive(Debug, ClapArgs)]
pub struct MountAs {
    /// Mount read-only: the kernel refuses every change
    #[arg(long)]
    pub read_only: bool,
    /// Source of the mount, as findmnt and df show it and umount takes it [default: penstock]
    #[arg(long, value_name = "NAME")]
    pub source: Option<String>,
}

impl MountAs {
    /// The same for the mount.
    pub fn options(&self) -> penstock_fuse::MountOptions {
        let default = penstock_fuse::MountOptions::default();
        penstock_fuse::MountOptions {
            source: self.source.clone().unwrap_or(default.source),
            read_only: self.read_only,
            guarded: true,
        }
    }
}

/// Options of `up`.
#[derive(Debug, ClapArgs)]
pub struct Up {
    /// Folder of the store [default: ./penstock-data]
    pub folder: Option<PathBuf>,
    /// Number of drives, for a new store [default: as many as the code has strips]
    #[arg(long)]
    pub drives: Option<usize>,
    /// Size of each drive, for a new store, as in 4G or 512M [default: 4G]
    #[arg(long, value_parser = parse_size)]
    pub drive_size: Option<u64>,
    /// Code of the data array, for a new store: data+redundancy strips [default: 4+2]
    #[arg(long, value_parser = parse_code)]
    pub code: Option<(usize, usize)>,
    /// Where to mount the file system: an empty directory
    #[arg(long)]
    pub mount: Option<PathBuf>,
    #[command(flatten)]
    pub mount_as: MountAs,
    /// Serve REST on a loopback port too, with the token in `token`; 0 for any free one [default: the folder only]
    #[arg(long)]
    pub port: Option<u16>,
    /// Serve clients on a loopback address too, with the token in `token.data`; port 0 for any free one [default: the
    /// folder only]
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub tcp: Option<SocketAddr>,
    /// Seconds without a word after which a client's session ends, and with it what it has open
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub lease: u32,
    /// Days from the end of one scrub of an array to the next; 0 for none by itself
    #[arg(long, default_value_t = 14, value_name = "N")]
    pub scrub_days: u32,
    /// Start without drives that only together with lost ones have some data: what only they have is lost for good
    #[arg(long)]
    pub accept_loss: bool,
    /// Return when everything is ready and go on in the background
    #[arg(long)]
    pub detach: bool,
    /// What --detach starts
    #[arg(long, hide = true)]
    pub detached: bool,
}

/// Verbs of drives.
#[derive(Debug, Subcommand)]
pub enum Drive {
    /// All drives
    List,
    /// One drive
    Show {
        /// Its id, or the beginning of it
        id: String,
    },
    /// Take a drive out of service
    Fail {
        /// Its id, or the beginning of it
        id: String,
    },
    /// Put a blank drive in the place of a failed or missing one, and rebuild onto it
    Replace {
        /// The old drive's id, or the beginning of it
        id: String,
        /// Where the new one is [default: where the old one was]
        path: Option<PathBuf>,
        /// What is at that path is overwritten without a question
        #[arg(long)]
        yes: bool,
    },
}

/// Verbs of arrays.
#[derive(Debug, Subcommand)]
pub enum Array {
    /// All arrays
    List,
    /// One array
    Show {
        /// Its name, its id, or the beginning of it
        array: String,
    },
    /// Rebuild what can be rebuilt (it begins by itself; this shows it and waits for it)
    Rebuild {
        /// Its name or id; all arrays without
        array: Option<String>,
        /// Wait until it is done; fails when redundancy is still owed
        #[arg(long)]
        wait: bool,
    },
    /// Read and verify everything, and repair what is wrong
    Scrub {
        /// Its name or id; all arrays without
        array: Option<String>,
        /// Wait until it is done; fails when something could not be repaired
        #[arg(long)]
        wait: bool,
    },
}

/// Verbs of file systems.
#[derive(Debug, Subcommand)]
pub enum Fs {
    /// All file systems
    List,
    /// One file system
    Show {
        /// Its name
        #[arg(default_value = "main")]
        name: String,
    },
    /// Check names, links, chunks, extents and bitmaps against each other; with --repair, mend what is wrong
    ///
    /// Without --repair nothing is changed, and the file system may be in use: changes wait while it is looked at.
    /// With --repair it must not be mounted, and requests wait until the repair has ended. A repair that is
    /// interrupted is finished by the next one. Nothing that holds data is thrown away: what has lost its name is in
    /// /lost+found afterwards.
    ///
    /// docs/fs-check.md says of each kind of finding what it means and what a repair does.
    #[command(
        after_help = "Exit status: 0 clean; 1 everything that was wrong is mended; 4 something is wrong still; 8 it could not be checked."
    )]
    Check {
        /// Its name
        #[arg(default_value = "main")]
        name: String,
        /// Mend what is wrong
        #[arg(long)]
        repair: bool,
        /// Repair without a question
        #[arg(long, requires = "repair")]
        yes: bool,
    },
    /// Files whose data cannot be read any more, with the damaged bytes
    ///
    /// They are in stripes of which a read or a scrub found fewer good strips than the code needs; `penstock array
    /// scrub --wait` looks at every stripe. A file is off the list when the damaged bytes are overwritten, or when it is
    /// removed.
    #[command(
        after_help = "Exit status: 0 no file is damaged; 4 some are, or metadata is; 8 it could not be found out."
    )]
    Damaged {
        /// Its name
        #[arg(default_value = "main")]
        name: String,
    },
}

/// A shell.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
pub enum Shell {
    /// bash
    Bash,
    /// zsh
    Zsh,
    /// fish
    Fish,
}

/// Verbs for whoever looks for a fault.
#[derive(Debug, Subcommand)]
pub enum Debug {
    /// Write state, events, metrics and logs into one tar file; without a running instance, what the folder has
    Bundle {
        /// The file to make [default: penstock-debug-TIME.tar here]
        file: Option<PathBuf>,
    },
}

/// Benchmarks.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// An array on memory drives
    Array {
        /// Code, as in 4+2
        #[arg(long, value_parser = parse_code, default_value = "4+2")]
        code: (usize, usize),
    },
    /// The stripe table of large arrays, on drives that make their table as it is read
    Table {
        /// Code, as in 4+2
        #[arg(long, value_parser = parse_code, default_value = "4+2")]
        code: (usize, usize),
        /// TiB of data in the array, one line each
        #[arg(long, value_name = "TIB", value_delimiter = ',', default_value = "1,16,64,256", value_parser = clap::value_parser!(u64).range(1..=4096))]
        tib: Vec<u64>,
    },
    /// The erasure code, beside what memory allows and beside ISA-L where it is installed
    Codec {
        /// Kernel, as in avx2-gfni [default: the fastest of this processor]
        #[arg(long, value_name = "NAME")]
        kernel: Option<String>,
        /// Rounds of which the median is told
        #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=99))]
        rounds: u32,
        /// Only lines with this in their name, as in "8+2 encode, cold"
        #[arg(long, value_name = "TEXT")]
        only: Option<String>,
        /// Draw the kernels under their ceilings into this file, as SVG
        #[arg(long, value_name = "FILE")]
        svg: Option<PathBuf>,
        /// Only to see that it runs: little memory, and figures of no meaning
        #[arg(long)]
        quick: bool,
    },
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
