//! Runs each command: calls the instance through REST and prints the answer.

use crate::args::{
    Args, Array, Bench, Command, Debug, Drive, Fs, FsLayout, Model, Pool, Session, Stack, Target,
};
use crate::folder::{Stop, is_free, last_stop, named};
use crate::remote::Remote;
use crate::show::{note, print};
use crate::{bundle, events, manual, mount, restore, show, up};
use anyhow::{Context, Result, anyhow, bail};
use penstock_base::num::{to_u32, to_usize};
use penstock_bench::model::Sheet;
use penstock_bench::{ArrayBench, ModelBench};
use penstock_drive::ReadOnlyDrive;
use penstock_node::{
    ArrayReport, DamagedReport, Detail, DriveReport, FsCheckReport, FsReport, LatencyReport, LayoutReport,
    MapCopyReport, PoolChange, PoolReport, ScrubSummary, SessionDetails, StackReport, StatusReport,
    TargetFilesReport,
};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Time that `down` gives sessions to end whose mount is not shown any more.
const ENDING: Duration = Duration::from_secs(3);
/// Time that `down` waits for the instance to end.
const DOWN: Duration = Duration::from_secs(120);

/// Runs a command and returns the exit status.
pub fn run(args: Args) -> Result<ExitCode> {
    let Args { dir, api, json, command } = args;
    match command {
        Command::Up(options) => return up::up(options, dir, json),
        Command::Mount(options) => return mount::mount(options, dir, api),
        // Other commands read its last argument; the guard does the same for all processes.
        Command::MountGuard { connection, thread, ends: _ } => {
            penstock_fuse::guard(connection, &thread).context("a mount has no guard")?;
            return Ok(ExitCode::SUCCESS);
        }
        Command::MountProbe { path } => return Ok(ExitCode::from(penstock_fuse::probe_directly(&path))),
        Command::MountSync { path } => return Ok(ExitCode::from(penstock_fuse::sync_directly(&path))),
        Command::Umount { path: Some(path) } => {
            return mount::umount(&path, dir.as_ref(), api.as_ref(), json);
        }
        Command::Bench(Bench::Array { code, model }) => return bench_array(code, &model, json),
        Command::Bench(Bench::Table { code, tib }) => return bench_table(code, &tib, json),
        Command::Bench(Bench::Codec { kernel, rounds, only, svg, quick }) => {
            return bench_codec(kernel.as_deref(), rounds, only, svg, quick, json);
        }
        Command::Down { dir: argument } => return down(&named(argument, dir)?, api.as_ref(), json),
        Command::Events { since, follow } => {
            return events::events(dir.as_ref(), api.as_ref(), since, follow, json);
        }
        Command::Completion { shell } => return Ok(manual::completion(shell)),
        Command::Man { dir } => return manual::man(&dir),
        Command::Debug(Debug::Bundle { file }) => {
            return bundle::bundle(dir.as_ref(), api.as_ref(), file, json);
        }
        Command::Fs(Fs::Check { map: true, accept_loss, keep_changed, force, yes, drive, .. }) => {
            let how = restore::How { accept_loss, keep_changed, force, yes, drive };
            return Ok(fs_restore(dir, how, json).unwrap_or_else(failed));
        }
        Command::Debug(Debug::Inspect { path, log, stripe }) => {
            return inspect(&path, &Detail { log, stripe }, json);
        }
        _ => {}
    }
    let remote = match Remote::find(dir.as_ref(), api.as_ref()) {
        // Their exit statuses tell a finding from a check that failed.
        Err(error) if matches!(command, Command::Fs(Fs::Check { .. } | Fs::Damaged { .. })) => {
            return Ok(failed(error));
        }
        found => found?,
    };
    match command {
        Command::Status { latency: false } => status(&remote, json),
        Command::Status { latency: true } => {
            let latencies: Vec<LatencyReport> = remote.get("/v1/latency")?;
            print(json, &latencies, |latencies| show::latencies(latencies))
        }
        Command::Drive(verb) => drive(&remote, verb, json),
        Command::Pool(verb) => pool(&remote, &verb, json),
        Command::Stack(verb) => stack(&remote, &verb, json),
        Command::Target(verb) => target(&remote, &verb, json),
        Command::Array(verb) => array(&remote, verb, json),
        Command::Fs(verb) => fs(&remote, verb, json),
        Command::Session(verb) => session(&remote, verb, json),
        Command::Umount { .. } => mount::umount_only(&remote, json),
        Command::Up(_)
        | Command::Mount(_)
        | Command::MountGuard { .. }
        | Command::MountProbe { .. }
        | Command::MountSync { .. }
        | Command::Bench(_)
        | Command::Debug(_)
        | Command::Completion { .. }
        | Command::Man { .. }
        | Command::Down { .. }
        | Command::Events { .. } => {
            unreachable!("done above")
        }
    }
}

fn status(remote: &Remote, json: bool) -> Result<ExitCode> {
    let status: StatusReport = remote.get("/v1/status")?;
    print(json, &status, show::status)
}

/// The status, after sessions whose mount is not shown here had a moment to end: umount(8) does not wait for
/// them. None if the instance does not report.
fn settled(remote: &Remote) -> Option<StatusReport> {
    assert!(ENDING < DOWN, "the instance has longer to end than a session");
    let start = Instant::now();
    loop {
        let status: StatusReport = remote.get("/v1/status").ok()?;
        let is_shown = |place: &str| {
            penstock_fuse::kind_at(Path::new(place)).ok().flatten().as_deref() == Some(penstock_fuse::KIND)
        };
        let mut mounts = status.sessions.iter().filter(|session| session.is_separate_mount());
        if mounts.all(|session| is_shown(&session.mount)) || start.elapsed() > ENDING {
            return Some(status);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn down(dir: &PathBuf, api: Option<&String>, json: bool) -> Result<ExitCode> {
    let remote = Remote::find(Some(dir), api)?;
    // Only for the note below: a store that cannot report stops all the same.
    let status = settled(&remote);
    let answer: Value = remote.post("/v1/down", &json!({}))?;
    if api.is_none() {
        let start = Instant::now();
        while !is_free(dir) {
            if start.elapsed() > DOWN {
                bail!(
                    "process {} does not end; it may still be making data durable, see its log",
                    answer["pid"]
                );
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        match last_stop(dir) {
            Some(Stop::Durable) => {}
            Some(Stop::NotDurable(why)) => bail!("stopped; not everything could be made durable: {why}"),
            None => bail!("it ended without reporting that all is durable, as after a kill; see its log"),
        }
    }
    let sessions = status.iter().flat_map(|status| &status.sessions);
    for session in sessions.filter(|session| session.is_separate_mount()) {
        note!(
            "{} still mounts it at {}: programs there wait until it runs again (`penstock umount` before \
             `penstock down` avoids that)",
            session.client,
            session.mount
        );
    }
    print(json, &answer, |_| println!("stopped"))
}

fn drive(remote: &Remote, verb: Drive, json: bool) -> Result<ExitCode> {
    match verb {
        Drive::List => {
            let drives: Vec<DriveReport> = remote.get("/v1/drives")?;
            print(json, &drives, |drives| show::drives(drives))
        }
        Drive::Show { id } => {
            print(json, &remote.get::<DriveReport>(&format!("/v1/drives/{id}"))?, show::drive)
        }
        Drive::Fail { id } => {
            let drive: DriveReport = remote.post(&format!("/v1/drives/{id}/fail"), &json!({}))?;
            print(json, &drive, |drive| println!("drive {} is {}: {}", drive.id, drive.state, drive.reason))
        }
        Drive::Replace { id, path, yes } => {
            let old: DriveReport = remote.get(&format!("/v1/drives/{id}"))?;
            let path = path.map(std::path::absolute).transpose()?;
            let place = path.as_ref().map_or(old.path.clone(), |path| path.display().to_string());
            if !yes && !confirmed(&format!("whatever is at {place} is overwritten by a blank drive; go on?"))?
            {
                bail!("nothing was changed; --yes overwrites without a question");
            }
            let drive: DriveReport =
                remote.post(&format!("/v1/drives/{}/replace", old.id), &json!({ "path": path }))?;
            print(json, &drive, |drive| {
                println!(
                    "drive {} at {} takes the place of {}; it is being rebuilt",
                    drive.id, drive.path, old.id
                );
                println!("`penstock array rebuild --wait` waits for it");
            })
        }
    }
}

fn confirmed(question: &str) -> Result<bool> {
    if !std::io::stdin().is_terminal() {
        return Ok(false);
    }
    // The standard output may be JSON for a program.
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

fn pool(remote: &Remote, verb: &Pool, json: bool) -> Result<ExitCode> {
    match verb {
        Pool::List => print(json, &remote.get::<Vec<PoolReport>>("/v1/pools")?, |pools| show::pools(pools)),
        Pool::Show { pool } => {
            print(json, &remote.get::<PoolReport>(&format!("/v1/pools/{pool}"))?, show::pool)
        }
        Pool::Set { pool, rebuild_rate } => {
            let body = serde_json::to_value(PoolChange { rebuild_rate: Some(*rebuild_rate) })?;
            print(json, &remote.post::<PoolReport>(&format!("/v1/pools/{pool}"), &body)?, show::pool)
        }
    }
}

fn stack(remote: &Remote, verb: &Stack, json: bool) -> Result<ExitCode> {
    match verb {
        Stack::List => {
            print(json, &remote.get::<Vec<StackReport>>("/v1/stacks")?, |stacks| show::stacks(stacks))
        }
        Stack::Show { stack } => {
            print(json, &remote.get::<StackReport>(&format!("/v1/stacks/{stack}"))?, show::stack)
        }
    }
}

fn target(remote: &Remote, verb: &Target, json: bool) -> Result<ExitCode> {
    let Target::Forget { target, yes } = verb;
    let lost: TargetFilesReport = remote.get(&format!("/v1/targets/{target}/files"))?;
    if !yes {
        if std::io::stdin().is_terminal() {
            show::files_on(&lost, std::io::stderr())?;
        }
        if !confirmed(&format!("what is on target {target} is lost for good; forget it?"))? {
            bail!(
                "nothing was changed: {} files have up to {} on target {target}\n--yes forgets it without a question",
                lost.files,
                show::size(lost.most_bytes)
            );
        }
    }
    let lost: TargetFilesReport = remote.post(&format!("/v1/targets/{target}/forget"), &json!({}))?;
    print(json, &lost, |lost| {
        let (files, bytes) = (lost.files, show::size(lost.most_bytes));
        println!("target {target} is forgotten; {files} files had up to {bytes} there, which are lost");
    })
}

/// The path from the root of the file system of a path in one of its mounts.
fn path_in_fs(remote: &Remote, path: &Path) -> Result<String> {
    let absolute = std::path::absolute(path)?;
    let status: StatusReport = remote.get("/v1/status")?;
    let separate = status.sessions.iter().map(|session| &session.mount).filter(|mount| !mount.is_empty());
    let mounts = status.mounts.iter().chain(separate);
    // The innermost one, if a mount lies in another.
    let within = mounts.filter_map(|mount| absolute.strip_prefix(mount).ok());
    let Some(rest) = within.min_by_key(|rest| rest.as_os_str().len()) else {
        bail!("{} is not in a mount of this file system; `penstock status` shows them", path.display());
    };
    let text = rest.to_str().ok_or_else(|| anyhow!("{} is no UTF-8", path.display()))?;
    Ok(format!("/{text}"))
}

fn layout(remote: &Remote, verb: &FsLayout, json: bool) -> Result<ExitCode> {
    match verb {
        FsLayout::Show { path } => {
            let at = path_in_fs(remote, path)?;
            let found: LayoutReport = remote.get(&format!("/v1/fs/main/layout?path={}", escaped(&at)))?;
            print(json, &found, show::layout)
        }
        FsLayout::Set { path, targets, turn } => {
            let at = path_in_fs(remote, path)?;
            let turn = match turn {
                None => None,
                Some(bytes) => {
                    let fs: FsReport = remote.get("/v1/fs/main")?;
                    let chunks = u16::try_from(bytes / fs.chunk_bytes).ok();
                    if !bytes.is_multiple_of(fs.chunk_bytes) || chunks.is_none_or(|chunks| chunks == 0) {
                        bail!(
                            "--turn is 1 to 65535 times {}, the chunk of this store",
                            show::size(fs.chunk_bytes)
                        );
                    }
                    chunks
                }
            };
            let body = json!({ "path": at, "count": targets, "turn": turn });
            print(json, &remote.post::<LayoutReport>("/v1/fs/main/layout", &body)?, show::layout)
        }
    }
}

/// Text as a value of a query: all but letters, digits and a few marks as their bytes.
fn escaped(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/-_.~".contains(&byte);
    let one = |byte: u8| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") };
    text.bytes().map(one).collect()
}

fn array(remote: &Remote, verb: Array, json: bool) -> Result<ExitCode> {
    match verb {
        Array::List => {
            let arrays: Vec<ArrayReport> = remote.get("/v1/arrays")?;
            print(json, &arrays, |arrays| show::arrays(arrays))
        }
        Array::Show { array } => {
            print(json, &remote.get::<ArrayReport>(&format!("/v1/arrays/{array}"))?, show::array)
        }
        Array::Rebuild { array, wait } => rebuild(remote, array.as_deref(), wait, json),
        Array::Scrub { array, wait } => scrub(remote, array.as_deref(), wait, json),
    }
}

/// Starts a job. With `wait`, shows its progress until it ends and returns its result; without, returns None.
fn job<T: DeserializeOwned>(
    remote: &Remote,
    verb: &str,
    array: Option<&str>,
    wait: bool,
) -> Result<Option<T>> {
    let which = array.unwrap_or("all");
    let started: Value = remote.post(&format!("/v1/arrays/{which}/{verb}"), &json!({}))?;
    let id = started["job"].as_u64().ok_or_else(|| anyhow!("the instance started no job"))?;
    if !wait {
        return Ok(None);
    }
    let mut bar = show::Bar::new();
    loop {
        let job: Value = remote.get(&format!("/v1/jobs/{id}"))?;
        match job["state"].as_str() {
            Some("running") => {
                bar.update(&remote.get::<Vec<ArrayReport>>("/v1/arrays")?);
                std::thread::sleep(Duration::from_millis(100));
            }
            Some("done") => {
                bar.end();
                return Ok(Some(serde_json::from_value(job["result"].clone())?));
            }
            _ => {
                bar.end();
                bail!("{verb} failed: {}", job["result"].as_str().unwrap_or("for no stated reason"));
            }
        }
    }
}

fn rebuild(remote: &Remote, array: Option<&str>, wait: bool, json: bool) -> Result<ExitCode> {
    let Some(result) = job::<Value>(remote, "rebuild", array, wait)? else {
        let arrays: Vec<ArrayReport> = remote.get("/v1/arrays")?;
        return print(json, &arrays, |arrays| show::arrays(arrays));
    };
    let debt = result["redundancy_debt_stripes"].as_u64().unwrap_or(u64::MAX);
    print(json, &result, |_| match debt {
        0 => println!("rebuilt: no redundancy is owed"),
        debt => println!("{debt} stripes still lack redundancy; `penstock status` says why"),
    })?;
    Ok(if debt == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn scrub(remote: &Remote, array: Option<&str>, wait: bool, json: bool) -> Result<ExitCode> {
    let Some(summaries) = job::<Vec<ScrubSummary>>(remote, "scrub", array, wait)? else {
        return print(json, &json!({ "started": true }), |_| {
            println!("scrub started; `penstock array list` shows it")
        });
    };
    let bad =
        summaries.iter().any(|summary| !summary.unreadable_stripes.is_empty() || summary.parity_defects > 0);
    print(json, &summaries, |summaries| show::scrubs(summaries))?;
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn fs(remote: &Remote, verb: Fs, json: bool) -> Result<ExitCode> {
    match verb {
        Fs::List => {
            let list: Vec<FsReport> = remote.get("/v1/fs")?;
            print(json, &list, |list| list.iter().for_each(show::filesystem))
        }
        Fs::Show { name } => {
            print(json, &remote.get::<FsReport>(&format!("/v1/fs/{name}"))?, show::filesystem)
        }
        Fs::Check { name, repair, yes, .. } => {
            Ok(fs_check(remote, &name, repair, yes, json).unwrap_or_else(failed))
        }
        Fs::CopyMap { name } => {
            let started: Value = remote.post(&format!("/v1/fs/{name}/map-copies"), &json!({}))?;
            let job = wait_job(remote, &started, |bar| {
                bar.line("copying names and maps");
                Ok(())
            })?;
            print(json, &serde_json::from_value::<Vec<MapCopyReport>>(job)?, |copies| {
                copies.iter().for_each(show::map_copy)
            })
        }
        Fs::Layout(verb) => layout(remote, &verb, json),
        Fs::Damaged { name } => Ok(fs_damaged(remote, &name, json).unwrap_or_else(failed)),
    }
}

fn session(remote: &Remote, verb: Session, json: bool) -> Result<ExitCode> {
    match verb {
        Session::List => {
            print(json, &remote.get::<Vec<SessionDetails>>("/v1/sessions")?, |list| show::sessions(list))
        }
        Session::Show { id } => {
            print(json, &remote.get::<SessionDetails>(&format!("/v1/sessions/{id}"))?, show::session)
        }
        Session::End { id, yes } => {
            let found: SessionDetails = remote.get(&format!("/v1/sessions/{id}"))?;
            let who = show::client(&found.session);
            let question = format!("session {id} ({who}) loses what it has not synced; end it?");
            if !yes && !confirmed(&question)? {
                bail!("nothing was changed; --yes ends the session without a question");
            }
            let ended: SessionDetails = remote.post(&format!("/v1/sessions/{id}/end"), &json!({}))?;
            print(json, &ended, |_| {
                println!("session {id} ({who}) has ended: every operation of its client fails from now on")
            })
        }
    }
}

/// Exit statuses of checks, with the meanings that fsck gives them. They distinguish findings from a check
/// that failed.
const MENDED: u8 = 1;
const DAMAGED: u8 = 4;
const NOT_CHECKED: u8 = 8;

fn failed(error: anyhow::Error) -> ExitCode {
    eprintln!("penstock: {error:#}");
    ExitCode::from(NOT_CHECKED)
}

fn fs_check(remote: &Remote, name: &str, repair: bool, yes: bool, json: bool) -> Result<ExitCode> {
    if repair && !yes && !confirmed(&format!("what is wrong with {name} will be repaired; go on?"))? {
        bail!("nothing was changed; --yes repairs without a question");
    }
    let path = format!("/v1/fs/{name}");
    let started: Value = remote.post(&format!("{path}/check"), &json!({ "repair": repair }))?;
    let job = wait_job(remote, &started, |bar| {
        if let Some(progress) = remote.get::<FsReport>(&path)?.check {
            bar.line(&show::check_progress(&progress));
        }
        Ok(())
    })?;
    let check: FsCheckReport = serde_json::from_value(job)?;
    print(json, &check, show::check)?;
    Ok(status_of(&check))
}

fn status_of(check: &FsCheckReport) -> ExitCode {
    match check.result.as_str() {
        "clean" => ExitCode::SUCCESS,
        "mended" => ExitCode::from(MENDED),
        _ => ExitCode::from(DAMAGED),
    }
}

/// Waits for a job that was started, and shows its progress meanwhile. Returns its result.
fn wait_job(remote: &Remote, started: &Value, show: impl Fn(&mut show::Bar) -> Result<()>) -> Result<Value> {
    let id = started["job"].as_u64().ok_or_else(|| anyhow!("the instance started no job"))?;
    let mut bar = show::Bar::new();
    let job = loop {
        let job: Value = remote.get(&format!("/v1/jobs/{id}"))?;
        if job["state"] != "running" {
            break job;
        }
        show(&mut bar)?;
        std::thread::sleep(Duration::from_millis(50));
    };
    bar.end();
    match job["state"] == "done" {
        true => Ok(job["result"].clone()),
        false => bail!("{}", job["result"].as_str().unwrap_or("it failed for no stated reason")),
    }
}

fn fs_restore(dir: Option<PathBuf>, how: restore::How, json: bool) -> Result<ExitCode> {
    let confirm = |why: &str| {
        eprintln!("{why}");
        confirmed("go on?")
    };
    restore::restore(dir, how, confirm, json).map(|check| status_of(&check))
}

fn fs_damaged(remote: &Remote, name: &str, json: bool) -> Result<ExitCode> {
    let damaged: DamagedReport = remote.get(&format!("/v1/fs/{name}/damaged"))?;
    print(json, &damaged, show::damaged)?;
    let whole = damaged.files.is_empty()
        && damaged.unreadable_metadata_stripes.is_empty()
        && damaged.absent_targets.iter().all(|lost| lost.files == 0);
    Ok(if whole { ExitCode::SUCCESS } else { ExitCode::from(DAMAGED) })
}

fn inspect(path: &Path, detail: &Detail, json: bool) -> Result<ExitCode> {
    let drive = ReadOnlyDrive::open(path).with_context(|| path.display().to_string())?;
    let found = penstock_worker::block_on(penstock_node::inspect(&drive, detail))?;
    print(json, &found, show::tree)
}

fn bench_array((k, m): (usize, usize), model: &Model, json: bool) -> Result<ExitCode> {
    let env = penstock_worker::Worker::env()?;
    let lines = match model.model {
        false => penstock_worker::block_on(penstock_bench::run_array(&env, ArrayBench { k, m }))??,
        true => {
            let bench = model_bench((k, m), model)?;
            match model.rebuild {
                true => penstock_worker::block_on(penstock_bench::run_rebuild(&env, bench))??,
                false => penstock_worker::block_on(penstock_bench::run_model(&env, bench))??,
            }
        }
    };
    print(json, &lines, |lines| show::lines(lines))
}

fn model_bench((k, m): (usize, usize), model: &Model) -> Result<ModelBench> {
    let sheet = Sheet { gbps: model.gbps.0, kiops: model.kiops.0, us: model.us.0 };
    if model.slower < 1.0 {
        bail!("--slower takes a factor of 1 or more");
    }
    let block = penstock_base::BLOCK_BYTES as u64;
    if model.strip == 0 || !model.strip.is_multiple_of(block) || model.strip > 1 << 20 {
        bail!("a strip has 4 KiB to 1 MiB, in whole blocks of 4 KiB");
    }
    let drives = model.drives.map_or(k + m, to_usize);
    Ok(ModelBench {
        k,
        m,
        drives,
        spares: model.spares.map(to_usize),
        strip_blocks: to_u32(model.strip / block),
        sheet,
        slower: model.slower,
        fill_bytes: model.fill,
    })
}

fn bench_table((k, m): (usize, usize), tib: &[u64], json: bool) -> Result<ExitCode> {
    let env = penstock_worker::Worker::env()?;
    let mut lines = Vec::new();
    for tib in tib {
        let bench = penstock_bench::TableBench { k, m, tib: *tib };
        lines.push(penstock_worker::block_on(penstock_bench::run_table(&env, bench))??);
    }
    print(json, &lines, |lines| show::tables(lines))
}

fn bench_codec(
    kernel: Option<&str>,
    rounds: u32,
    only: Option<String>,
    svg: Option<PathBuf>,
    quick: bool,
    json: bool,
) -> Result<ExitCode> {
    let kernel = kernel.map(|name| {
        let available = penstock_bench::codec::kernels();
        let found = available.iter().find(|(known, _)| *known == name).map(|(_, kernel)| *kernel);
        found.ok_or_else(|| {
            let names: Vec<&str> = available.iter().map(|(name, _)| *name).collect();
            anyhow!("no kernel {name} runs on this processor; those that do: {}", names.join(", "))
        })
    });
    let (kernel, rounds) = (kernel.transpose()?, rounds as usize);
    let bench = penstock_bench::CodecBench { kernel, rounds, quick, only };
    let terminal = std::io::stderr().is_terminal();
    let codec = penstock_bench::run_codec(&bench, &mut |next| {
        if terminal {
            eprint!("\r\x1b[Kmeasuring {next}");
        }
    });
    if terminal {
        eprint!("\r\x1b[K");
    }
    let codec = codec?;
    if let Some(path) = svg {
        let picture = penstock_bench::codec::picture::draw(&codec.roofline);
        std::fs::write(&path, picture).with_context(|| format!("{} cannot be written", path.display()))?;
    }
    print(json, &codec.lines, |lines| show::lines(lines))
}
