//! A store of the real program in a temporary folder, with its mount.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::process;
use crate::workspace::{cargo, target_dir};

/// Name of the store's folder, which the program looks for where it is started.
const STORE: &str = "penstock-data";

/// A store with its mount. Both are removed when it is dropped.
pub(crate) struct Mounted {
    program: PathBuf,
    home: PathBuf,
}

impl Mounted {
    /// Builds the program, optimised with `release`, and starts a store of six drives.
    pub(crate) fn start(release: bool, drive_size: &str) -> Result<Self> {
        let mut build = cargo();
        build.args(["build", "--locked", "-p", "penstock-cli"]);
        let built = build.args(release.then_some("--release")).status()?;
        ensure!(built.success(), "the build failed");
        let home = std::env::temp_dir().join(format!("penstock-mounted-{}", std::process::id()));
        fs::create_dir_all(home.join("other")).context("cannot make a temporary folder")?;
        fs::set_permissions(&home, Permissions::from_mode(0o755))?;
        let program = target_dir().join(if release { "release/penstock" } else { "debug/penstock" });
        let mounted = Self { program, home };
        let mut up = Command::new(&mounted.program);
        up.arg("up").arg(mounted.home.join(STORE)).arg("--mount").arg(mounted.path());
        let status = process::mark(up.args(["--drive-size", drive_size, "--detach"])).status()?;
        ensure!(status.success(), "the store does not start");
        fs::set_permissions(mounted.path(), Permissions::from_mode(0o777))?;
        Ok(mounted)
    }

    /// The program.
    pub(crate) fn program(&self) -> &PathBuf {
        &self.program
    }

    /// The temporary folder.
    pub(crate) fn home(&self) -> &PathBuf {
        &self.home
    }

    /// The mount.
    pub(crate) fn path(&self) -> PathBuf {
        self.home.join("mnt")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // A store that does not stop is killed, and its mount is detached. Errors are ignored: they show as a
        // folder that remains.
        let _ = Command::new(&self.program).arg("down").arg(self.home.join(STORE)).status();
        process::kill_all();
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        if mounts.contains(&*self.path().to_string_lossy()) {
            let _ = Command::new("umount").arg("-l").arg(self.path()).status();
        }
        let _ = fs::remove_dir_all(&self.home);
    }
}
