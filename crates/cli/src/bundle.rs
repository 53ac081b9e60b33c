//! `debug bundle`: writes one tar file with the state, logs and system facts that finding a fault needs.
//!
//! A bundle never contains tokens (their text is blanked wherever it occurs), nor names or contents of files
//! in the file system. Events identify files by inode number only, and none of the REST reports in it
//! contains file names.

use crate::events;
use crate::folder::{ADMIN_TOKEN, DATA_TOKEN, DEFAULT, LOGS, METRICS_TOKEN};
use crate::remote::Remote;
use crate::show;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes taken from the end of each log.
const LOG_BYTES: u64 = 1 << 20;
/// Maximum number of bytes taken from any other file.
const SYSTEM_BYTES: u64 = 1 << 20;
/// Files of the folder that are included; none is secret.
const FOLDER_FILES: [&str; 4] = ["store.json", "coordination", "scrubs.json", "run.json"];
const TOKENS: [&str; 3] = [ADMIN_TOKEN, DATA_TOKEN, METRICS_TOKEN];
const ASKED: [(&str, &str); 6] = [
    ("status.json", "/v1/status"),
    ("drives.json", "/v1/drives"),
    ("arrays.json", "/v1/arrays"),
    ("fs.json", "/v1/fs"),
    ("latency.json", "/v1/latency"),
    ("mounts.json", "/v1/mounts"),
];
const SYSTEM: [&str; 7] = [
    "/proc/version",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/loadavg",
    "/proc/self/mounts",
    "/proc/sys/kernel/io_uring_disabled",
    "/proc/partitions",
];

/// Parts of the bundle by name. A part that could not be read contains the reason instead.
struct Parts(Vec<(String, Vec<u8>)>);

impl Parts {
    fn add(&mut self, name: impl Into<String>, contents: Result<Vec<u8>>) {
        let contents = contents.unwrap_or_else(|error| format!("not available: {error:#}\n").into_bytes());
        self.0.push((name.into(), contents));
    }
}

/// Writes a bundle and lists its contents. Fails if the file exists.
pub fn bundle(
    dir: Option<&PathBuf>,
    api: Option<&String>,
    file: Option<PathBuf>,
    json: bool,
) -> Result<ExitCode> {
    let folder = api.is_none().then(|| dir.map_or(Path::new(DEFAULT), PathBuf::as_path));
    if let Some(folder) = folder
        && !folder.is_dir()
    {
        bail!("there is no folder {}; --dir names one", folder.display());
    }
    let now_ns = SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos();
    let now = show::time(i64::try_from(now_ns)?);
    let file = file.unwrap_or_else(|| format!("penstock-debug-{}.tar", now.replace([':', '-'], "")).into());
    let mut parts = Parts(Vec::new());
    let version = env!("CARGO_PKG_VERSION");
    parts.add("version.txt", Ok(format!("penstock {version}\nbundle of {now}\n").into_bytes()));
    let asked = Remote::find(dir, api);
    let mut tokens: Vec<String> =
        asked.as_ref().ok().and_then(|remote| remote.token().map(str::to_owned)).into_iter().collect();
    for (folder, name) in folder.iter().flat_map(|folder| TOKENS.map(|name| (folder, name))) {
        // A token that does not exist cannot occur in any part.
        tokens.extend(std::fs::read_to_string(folder.join(name)).ok());
    }
    ask(&mut parts, asked);
    if let Some(folder) = folder {
        take_folder(&mut parts, folder);
    }
    for path in SYSTEM {
        parts.add(format!("system{path}"), read_end(Path::new(path), SYSTEM_BYTES));
    }
    let parts = tokens.iter().fold(parts.0, |parts, token| without_token(parts, token.trim()));
    write(&file, &parts, SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs())?;
    if json {
        let names: Vec<&String> = parts.iter().map(|(name, _)| name).collect();
        println!("{}", serde_json::to_string_pretty(&serde_json::json!({ "file": file, "parts": names }))?);
        return Ok(ExitCode::SUCCESS);
    }
    println!("{} holds:", file.display());
    parts.iter().for_each(|(name, contents)| println!("  {:>10}  {name}", show::size(contents.len() as u64)));
    println!(
        "It holds no token, and no names or contents of files in the file system. It does hold paths of drives and"
    );
    println!("mounts of this machine: look into it before you hand it on.");
    Ok(ExitCode::SUCCESS)
}

/// Adds the reports and metrics of the running instance, and the limits of its process.
fn ask(parts: &mut Parts, remote: Result<Remote>) {
    let remote = match remote {
        Ok(remote) => remote,
        Err(error) => return parts.add("status.json", Err(error)),
    };
    for (name, path) in ASKED {
        let answer = remote.get::<Value>(path).and_then(|value| Ok(serde_json::to_vec_pretty(&value)?));
        parts.add(name, answer);
    }
    parts.add("metrics.txt", remote.get_text("/metrics").map(String::into_bytes));
    if let Some(pid) = remote.pid() {
        for name in ["limits", "status", "cgroup"] {
            let path = format!("/proc/{pid}/{name}");
            parts.add(format!("process/{name}"), read_end(Path::new(&path), SYSTEM_BYTES));
        }
    }
}

fn take_folder(parts: &mut Parts, folder: &Path) {
    let lines = events::in_folder(folder, 0).and_then(|events| {
        let mut lines = Vec::new();
        for event in &events {
            serde_json::to_writer(&mut lines, event)?;
            lines.push(b'\n');
        }
        Ok(lines)
    });
    parts.add("events.jsonl", lines);
    for name in LOGS.iter().chain(&FOLDER_FILES).filter(|name| folder.join(name).exists()) {
        let most = if LOGS.contains(name) { LOG_BYTES } else { SYSTEM_BYTES };
        parts.add(*name, read_end(&folder.join(name), most));
    }
    parts.add("folder.txt", listing(folder));
}

/// Lists the folder and its `drives` with sizes. Enters no other directory, because a mount may be there.
fn listing(folder: &Path) -> Result<Vec<u8>> {
    let mut text = String::from("length allocated name\n");
    for dir in [folder.to_owned(), folder.join("drives")] {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in entries {
            let entry = entry?;
            let found = entry.metadata()?;
            let name = entry.path();
            text += &format!("{} {} {}\n", found.len(), found.blocks() * 512, name.display());
        }
    }
    Ok(text.into_bytes())
}

/// Reads the last bytes of a file, at most `most`.
fn read_end(path: &Path, most: u64) -> Result<Vec<u8>> {
    let mut file = File::open(path)?;
    // Files in /proc report no length and are read from the start.
    let len = file.metadata()?.len();
    if len > most {
        file.seek(SeekFrom::Start(len - most))?;
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn without_token(parts: Vec<(String, Vec<u8>)>, token: &str) -> Vec<(String, Vec<u8>)> {
    let blank = |contents: Vec<u8>| {
        let text = String::from_utf8_lossy(&contents);
        match !token.is_empty() && text.contains(token) {
            true => text.replace(token, "[token]").into_bytes(),
            false => contents,
        }
    };
    parts.into_iter().map(|(name, contents)| (name, blank(contents))).collect()
}

fn write(path: &Path, parts: &[(String, Vec<u8>)], mtime_s: u64) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file = file.with_context(|| format!("{} cannot be made", path.display()))?;
    let mut tar = tar::Builder::new(file);
    for (name, contents) in parts {
        let mut header = tar::Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(0o600);
        header.set_mtime(mtime_s);
        let name = format!("penstock-debug/{name}");
        tar.append_data(&mut header, name, contents.as_slice())?;
    }
    let mut file = tar.into_inner()?;
    file.flush()?;
    Ok(file.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_blanked_wherever_it_is() {
        let parts = vec![("log".into(), b"before s3cret after".to_vec()), ("raw".into(), vec![0xff, 0])];
        let blanked = without_token(parts, "s3cret");
        assert_eq!(blanked[0].1, b"before [token] after");
        assert_eq!(blanked[1].1, [0xff, 0]);
    }
}
