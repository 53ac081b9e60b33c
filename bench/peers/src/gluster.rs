//! Installs and starts GlusterFS from Debian's packages as a peer.
//!
//! One volume, disperse 6 with redundancy 2, on six bricks, with the FUSE client. All settings are defaults.
//!
//! The daemon, its bricks and the client run in a network namespace of their own, because bricks insist on
//! the daemon's standard port. The namespace has an address of its own, because GlusterFS does not accept
//! 127.0.0.1. So the peer affects nothing else on the machine, and all its processes are known: those in that
//! namespace. Logs and sockets of daemon and bricks go to a tmpfs over their usual folders, in a mount
//! namespace that ends with them.

use crate::guard::{Guard, network_of};
use crate::lines::PeerId;
use crate::peer::{Held, Peer, READY};
use crate::proc::Processes;
use anyhow::{Context, Result, bail, ensure};
use penstock_bench::files::{Amount, Folder};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const PACKAGES: [&str; 3] = ["glusterfs-server", "glusterfs-client", "iproute2"];
/// From the range for benchmarks between networks (RFC 2544). It exists in the namespace only.
const ADDRESS: &str = "198.18.0.1";
const VOLUME: &str = "peers";

/// Starts GlusterFS with its bricks in `home`. The error says why it cannot run here.
pub(crate) fn start(home: &Path, amount: Amount) -> Result<Peer> {
    install()?;
    let mut held = Held::default();
    let dir = home.join("gluster");
    held.keep(Guard::folder(&dir)?);
    let mount = home.join("gluster-mount");
    std::fs::create_dir_all(&mount)?;
    held.keep(Guard::mount(&mount)?);
    let (daemon, network) = daemon(&dir, &mut held)?;
    let mut create: Vec<String> =
        ["volume", "create", VOLUME, "disperse", "6", "redundancy", "2"].map(String::from).to_vec();
    create.extend((0..6).map(|brick| format!("{ADDRESS}:{}/brick{brick}", dir.display())));
    create.push("force".into());
    gluster(&dir, &create.iter().map(String::as_str).collect::<Vec<_>>())?;
    gluster(&dir, &["volume", "start", VOLUME])?;
    // The client joins the daemon's network, but not its mounts: this process uses the mount.
    let mut client = Command::new("nsenter");
    client.args(["-t", &daemon.to_string(), "-n", "glusterfs"]);
    client.args([&format!("--volfile-server={ADDRESS}"), &format!("--volfile-id={VOLUME}")]);
    client.arg("-l").arg(dir.join("client.log")).arg(&mount);
    succeed(&mut client)?;
    wait("the mount", || Ok(crate::proc::filesystem_of(&mount)? == "fuse.glusterfs"))?;
    let version = succeed(Command::new("glusterd").arg("--version"))?;
    Ok(Peer {
        id: PeerId::GlusterFs,
        version: version.lines().next().unwrap_or_default().to_owned(),
        folder: Folder::new(&mount, amount, true),
        is_mount: true,
        processes: Processes::Network(network),
        _held: held,
    })
}

/// Installs missing packages with apt-get, on Debian and systems like it.
fn install() -> Result<()> {
    let is_there = |program: &str| {
        std::env::split_paths("/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .any(|folder| folder.join(program).exists())
    };
    let missing = |programs: &[&'static str]| programs.iter().copied().find(|program| !is_there(program));
    const PROGRAMS: [&str; 5] = ["glusterd", "gluster", "glusterfs", "ip", "nsenter"];
    if missing(&PROGRAMS).is_none() {
        return Ok(());
    }
    ensure!(is_there("apt-get"), "it is not installed, and there is no apt-get to do it");
    eprintln!("installing {}", PACKAGES.join(", "));
    let apt = |words: &[&str]| {
        let mut apt = Command::new("apt-get");
        succeed(apt.env("DEBIAN_FRONTEND", "noninteractive").args(words))
    };
    apt(&["update"])
        .and_then(|_| apt(&[&["install", "--yes", "--no-install-recommends"], &PACKAGES[..]].concat()))
        .context("it cannot be installed")?;
    match missing(&PROGRAMS) {
        Some(program) => bail!("its packages are installed and there is no {program}"),
        None => Ok(()),
    }
}

/// Starts the daemon in namespaces of its own. Returns its process id and its network namespace's inode.
fn daemon(dir: &Path, held: &mut Held) -> Result<(u32, u64)> {
    let home = dir.display();
    let options = [
        format!("working-directory {home}/state"),
        format!("run-directory {home}/run"),
        format!("glusterd-sockfile {home}/socket"),
        "transport-type socket".into(),
        "transport.address-family inet".into(),
        "ping-timeout 0".into(),
        "event-threads 1".into(),
        "max-port 60999".into(),
    ];
    let options: String = options.iter().map(|option| format!("    option {option}\n")).collect();
    let volfile = format!("volume management\n    type mgmt/glusterd\n{options}end-volume\n");
    std::fs::write(dir.join("glusterd.vol"), volfile)?;
    std::fs::create_dir_all(dir.join("state"))?;
    let script = format!(
        "set -e
         ip link set lo up
         ip address add {ADDRESS}/32 dev lo
         for folder in /var/log/glusterfs /var/run/gluster; do
             mkdir -p $folder
             mount -t tmpfs -o size=64m none $folder
         done
         mkdir /var/log/glusterfs/bricks
         exec glusterd -N -f {home}/glusterd.vol -p {home}/glusterd.pid -l {home}/glusterd.log"
    );
    let log = std::fs::File::create(dir.join("start.log"))?;
    let mut command = Command::new("unshare");
    command.args(["-n", "-m", "sh", "-c", &script]);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    let (mut child, guard) = Guard::process(&mut command)?;
    held.keep(guard);
    let own = network_of(std::process::id());
    let mut network = None;
    let ready = wait("its daemon", || {
        if let Some(status) = child.try_wait()? {
            bail!("its daemon ends ({status})");
        }
        network = network_of(child.id()).filter(|network| Some(*network) != own);
        Ok(network.is_some() && gluster(dir, &["volume", "info"]).is_ok())
    });
    ready.with_context(|| last_lines(&[dir.join("start.log"), dir.join("glusterd.log")]))?;
    let network = network.context("its daemon has no network of its own")?;
    held.keep(Guard::network(network)?);
    Ok((child.id(), network))
}

/// Runs a `gluster` command and returns its output.
fn gluster(dir: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new("gluster");
    command.arg(format!("--glusterd-sock={}", dir.join("socket").display()));
    command.arg("--mode=script").arg(format!("--log-file={}", dir.join("gluster.log").display()));
    succeed(command.args(words)).with_context(|| last_lines(&[dir.join("glusterd.log")]))
}

fn wait(what: &str, mut done: impl FnMut() -> Result<bool>) -> Result<()> {
    let start = Instant::now();
    while !done()? {
        ensure!(start.elapsed() < READY, "{what} is not there after {} s", READY.as_secs());
        std::thread::sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// Returns the last error of each log, on one line.
fn last_lines(logs: &[std::path::PathBuf]) -> String {
    let of = |log: &std::path::PathBuf| {
        let text = std::fs::read_to_string(log).unwrap_or_default();
        let errors: Vec<String> = text
            .lines()
            .filter(|line| line.contains(" E ") || !line.starts_with('['))
            .map(str::to_owned)
            .collect();
        errors.last().cloned().unwrap_or_default()
    };
    format!("its log says: {}", logs.iter().map(of).collect::<Vec<_>>().join("; "))
}

/// Runs a program and returns its output. A non-zero exit status is an error.
fn succeed(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output =
        command.stdin(Stdio::null()).output().with_context(|| format!("{name} cannot be started"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if !output.status.success() {
        let said = [text(&output.stdout), text(&output.stderr)].join(" ");
        let end: Vec<&str> = said.lines().rev().take(3).collect();
        bail!("{name}: {}: {}", output.status, end.into_iter().rev().collect::<Vec<_>>().join("; "));
    }
    Ok(text(&output.stdout))
}
