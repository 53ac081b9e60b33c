//! Prints reports as text for people.

use anyhow::Result;
use penstock_bench::Line;
use penstock_node::{
    ArrayReport, DamagedReport, DriveReport, Event, FileReport, FindingsReport, FsCheckProgress,
    FsCheckReport, FsReport, JobReport, LatencyReport, LayoutReport, MapCopyReport, MapRestoreReport,
    PlanReport, PoolReport, RebuildRate, ScrubSummary, SessionDetails, SessionReport, Severity, StackReport,
    StatusReport, TargetFilesReport,
};
use serde::Serialize;
use serde_json::Value;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

/// Prints a report as JSON, or as text.
pub fn print<T: Serialize + ?Sized>(json: bool, value: &T, text: impl FnOnce(&T)) -> Result<ExitCode> {
    match json {
        true => println!("{}", serde_json::to_string_pretty(value)?),
        false => text(value),
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats bytes with a binary unit and one decimal.
pub fn size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{value:.1} {}", units[unit]),
    }
}

/// Prints nested fields, each on a line of its own and indented by its depth. Lists of numbers stay on one.
pub fn tree(value: &Value) {
    branches(value, 0).iter().for_each(|line| println!("{line}"));
}

fn branches(value: &Value, depth: usize) -> Vec<String> {
    let indent = "  ".repeat(depth);
    let field = |name: &str, value: &Value| match value {
        Value::Array(items) if !items.iter().any(Value::is_object) => {
            let items: Vec<String> = items.iter().map(leaf).collect();
            vec![format!(
                "{indent}{name}: {}",
                if items.is_empty() { "none".into() } else { items.join(" ") }
            )]
        }
        Value::Object(fields) if fields.is_empty() => vec![format!("{indent}{name}: none")],
        Value::Object(_) | Value::Array(_) => {
            [vec![format!("{indent}{name}:")], branches(value, depth + 1)].concat()
        }
        end => vec![format!("{indent}{name}: {}", leaf(end))],
    };
    match value {
        Value::Object(fields) => fields.iter().flat_map(|(name, value)| field(name, value)).collect(),
        Value::Array(items) => {
            items.iter().enumerate().flat_map(|(at, item)| field(&at.to_string(), item)).collect()
        }
        end => vec![format!("{indent}{}", leaf(end))],
    }
}

fn leaf(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        Value::Array(items) => items.iter().map(leaf).collect::<Vec<_>>().join(":"),
        other => other.to_string(),
    }
}

fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}

pub fn status(status: &StatusReport) {
    println!("health   {}", status.health);
    status.reasons.iter().for_each(|reason| println!("         {reason}"));
    let used: Vec<String> =
        status.spaces.iter().map(|space| format!("{} {} % used", space.name, space.used_percent)).collect();
    let (free, total) = (size(status.free_bytes), size(status.total_bytes));
    println!("space    {free} free of {total}; {}", used.join(", "));
    let debt = status.redundancy_debt_stripes;
    println!("owed     {debt} stripes, {} copies of logs", status.redundancy_debt_carriers);
    println!("folder   {}", status.dir);
    for (name, found) in [("api", &status.api_url), ("tcp", &status.tcp_address)] {
        if let Some(address) = found {
            println!("{name}      {address}");
        }
    }
    let mounts: Vec<_> = status.sessions.iter().filter(|session| !session.mount.is_empty()).collect();
    if mounts.is_empty() {
        println!("mounts   none");
    }
    for session in mounts {
        let (mount, client) = (printable(&session.mount), printable(&session.client));
        println!("mounts   {mount}  ({client}{})", condition(session));
    }
    println!(
        "runs     process {}, version {}, I/O by {}, code by {}",
        status.pid, status.version, status.io_path, status.code_path
    );
    println!();
    arrays(&status.arrays);
    println!();
    drives(&status.drives);
}

/// Words after a comma: that others wait for a session, and the time for which a client of another process
/// has been silent; nothing below a second.
fn condition(session: &SessionReport) -> String {
    let recovers = if session.recovers { ", sends again what the restart may have lost" } else { "" };
    match session.silent_ms / 1000 {
        seconds if session.remote && seconds > 0 => format!("{recovers}, silent for {seconds} s"),
        _ => recovers.to_owned(),
    }
}

/// The client of a session, for people. Clients choose their names.
pub fn client(session: &SessionReport) -> String {
    match session.mount.as_str() {
        "" => printable(&session.client),
        mount => format!("{}, mounted at {}", printable(&session.client), printable(mount)),
    }
}

pub fn sessions(sessions: &[SessionDetails]) {
    println!("{:>8}{:>8}{:>9}{:>8}{:>8}  client", "session", "open", "leases", "locks", "owed");
    for details in sessions {
        let leases = details.shared_leases + details.exclusive_leases + details.attribute_leases;
        println!(
            "{:>8}{:>8}{:>9}{:>8}{:>8}  {}{}",
            details.session.id,
            details.session.open_inodes,
            leases,
            details.locks,
            details.unanswered_calls,
            client(&details.session),
            condition(&details.session)
        );
    }
}

pub fn session(details: &SessionDetails) {
    let SessionDetails { session, .. } = details;
    println!("session  {}", session.id);
    println!("client   {}{}", client(session), condition(session));
    if session.users > 0 || session.role != "mount" {
        println!("role     {}, for {} users", session.role, session.users);
    }
    match details.lease_ms {
        0 => println!("lease    none: it ends with the instance"),
        millis => println!("lease    {} s", millis / 1000),
    }
    println!("open     {} inodes", session.open_inodes);
    let SessionDetails { shared_leases, exclusive_leases, attribute_leases, .. } = details;
    println!(
        "leases   {shared_leases} shared, {exclusive_leases} exclusive, {attribute_leases} on attributes"
    );
    println!("locks    {}", details.locks);
    println!("owes     {} answers to calls", details.unanswered_calls);
    println!("runs     {} requests", details.requests);
}

pub fn tables(lines: &[penstock_bench::TableLine]) {
    println!(
        "{:>5}{:>12}{:>11}{:>10}{:>8}{:>10}{:>9}{:>11}{:>12}{:>10}{:>10}{:>11}{:>13}{:>11}",
        "TiB",
        "stripes",
        "table MiB",
        "create s",
        "open s",
        "target s",
        "swept s",
        "swept MiB",
        "memory MiB",
        "peak MiB",
        "used MiB",
        "counted s",
        "counted MiB",
        "report us"
    );
    for line in lines {
        println!(
            "{:>5}{:>12}{:>11}{:>10.2}{:>8.2}{:>10.2}{:>9.2}{:>11}{:>12}{:>10}{:>10}{:>11.2}{:>13}{:>11.1}",
            line.tib,
            line.stripes,
            line.table_mib,
            line.create_s,
            line.open_s,
            line.target_s,
            line.swept_s,
            line.swept_mib,
            line.memory_mib,
            line.peak_mib,
            line.used_mib,
            line.counted_s,
            line.counted_mib,
            line.report_us
        );
    }
}

pub fn plan(plan: &PlanReport, why: &str, unused: Option<&str>) {
    println!("plan      {}", plan.plan);
    println!("          {why}");
    println!("drives    {} of {}, {} in all", plan.drives, size(plan.drive_bytes), size(plan.raw_bytes));
    unused.into_iter().for_each(|unused| println!("          {unused}"));
    println!(
        "usable    {}, {:.1} % of it; {:.2} bytes on drives for each byte of data",
        size(plan.usable_bytes),
        plan.usable_percent,
        plan.overhead
    );
    println!("stripe    {} of data, in strips of {}", size(plan.stripe_bytes), size(plan.strip_bytes));
    println!("targets   {}", plan.targets);
    println!("survives  {}", plan.survives);
    match plan.rebuild_seconds {
        Some(seconds) => println!(
            "rebuild   {} for a full drive, if each reads {}/s and writes {}/s beside everything else",
            humantime::format_duration(std::time::Duration::from_secs_f64(seconds.ceil())),
            size(plan.read_rate),
            size(plan.write_rate)
        ),
        None => println!("rebuild   none: what a lost drive had is lost"),
    }
    println!("nothing was made");
}

pub fn drives(drives: &[DriveReport]) {
    println!("{:<10}{:<9}{:>10}{:>10}{:>8}  path", "drive", "state", "size", "checksum", "I/O");
    println!("{:<10}{:<9}{:>10}{:>10}{:>8}", "", "", "", "errors", "errors");
    for drive in drives {
        let (id, size) = (short(&drive.id), drive.size_bytes.map_or("unknown".to_owned(), size));
        println!(
            "{id:<10}{:<9}{size:>10}{:>10}{:>8}  {}",
            drive.state, drive.checksum_errors, drive.io_errors, drive.path
        );
    }
}

pub fn drive(drive: &DriveReport) {
    println!("id               {}", drive.id);
    println!("state            {} {}", drive.state, drive.reason);
    println!("path             {}", drive.path);
    println!("size             {}", drive.size_bytes.map_or("unknown".to_owned(), size));
    println!("arrays           {}", drive.arrays.join(", "));
    println!("read             {} in {} reads", size(drive.read_bytes), drive.reads);
    println!(
        "written          {} in {} writes, {} flushes",
        size(drive.write_bytes),
        drive.writes,
        drive.flushes
    );
    println!(
        "errors           {} I/O ({} without an answer), {} checksum",
        drive.io_errors, drive.timeouts, drive.checksum_errors
    );
    println!("repaired blocks  {}", drive.repaired_blocks);
}

fn job(what: &str, job: &JobReport) -> String {
    let left = job.remaining_s.map_or(String::new(), |seconds| format!(", about {seconds} s left"));
    format!("{what} {} of {} stripes{left}", job.done_stripes, job.total_stripes)
}

pub fn pools(pools: &[PoolReport]) {
    println!("{:<8}{:<7}{:<11}{:>8}{:>10}{:>10}  layout", "pool", "code", "state", "drives", "size", "free");
    for pool in pools {
        println!(
            "{:<8}{:<7}{:<11}{:>8}{:>10}{:>10}  {}",
            pool.name,
            pool.code,
            pool.state,
            pool.drives,
            size(pool.total_bytes),
            size(pool.free_bytes),
            pool.layout
        );
    }
}

pub fn stacks(stacks: &[StackReport]) {
    println!(
        "{:<7}{:<8}{:<11}{:>10}{:>10}{:>10}{:>8}  arrays",
        "stack", "target", "state", "size", "free", "rows", "work"
    );
    for stack in stacks {
        let rows = match stack.meta_budget_bytes {
            0 => "-".to_owned(),
            budget => format!("{} %", stack.meta_used_bytes * 100 / budget),
        };
        println!(
            "{:<7}{:<8}{:<11}{:>10}{:>10}{rows:>10}{:>8}  {}",
            stack.stack,
            stack.target,
            stack.state,
            size(stack.total_bytes),
            size(stack.free_bytes),
            stack.queued_work,
            stack.arrays.join(", ")
        );
    }
}

pub fn stack(stack: &StackReport) {
    stacks(std::slice::from_ref(stack));
    if let Some(why) = &stack.reason {
        println!("\nit does not serve: {why}");
        return;
    }
    println!("\nnames     {}", if stack.has_names { "here" } else { "in stack 0" });
    println!("space     {} of {} are available", size(stack.available_bytes), size(stack.total_bytes));
    if stack.borrowed_bytes > 0 || stack.lent_bytes > 0 {
        println!(
            "loans     {} from other targets, {} to others",
            size(stack.borrowed_bytes),
            size(stack.lent_bytes)
        );
    }
    println!("rows      {} of {}", size(stack.meta_used_bytes), size(stack.meta_budget_bytes));
    println!(
        "clients   {} written, {} read, {} commits",
        size(stack.written_bytes),
        size(stack.read_bytes),
        stack.commits
    );
    println!(
        "work      {} removals, truncations and changes of owners are yet to be done",
        stack.queued_work
    );
    if stack.suspect_groups > 0 {
        println!("groups    {} are not used until `penstock fs check --repair`", stack.suspect_groups);
    }
    if let Some(copy) = &stack.map_copy {
        map_copy(copy);
    }
}

pub fn layout(layout: &LayoutReport) {
    let turn = size(u64::from(layout.turn) * layout.chunk_bytes);
    match (layout.is_directory, layout.count) {
        (true, 0) => println!("{}: new files lie on all targets, {turn} in a row on each", layout.path),
        (true, count) => {
            println!("{}: new files lie on {count} targets, {turn} in a row on each", layout.path)
        }
        (false, _) => {
            let targets: Vec<String> = layout.targets.iter().map(u32::to_string).collect();
            let spread = if layout.is_spread {
                ""
            } else {
                "; so far the target of the names alone has something of it"
            };
            println!("{}: targets {}, {turn} in a row on each{spread}", layout.path, targets.join(", "));
        }
    }
}

pub fn pool(pool: &PoolReport) {
    pools(std::slice::from_ref(pool));
    println!("\ntargets   {}", pool.targets);
    println!("arrays    {}", pool.arrays.join(", "));
    println!("stripe    {} of data, in strips of {}", size(pool.stripe_bytes), size(pool.strip_bytes));
    let counting = if pool.is_counted { "" } else { "; stripes are being counted" };
    println!("owed      {} stripes lack strips{counting}", pool.redundancy_debt_stripes);
    let may_be_lost = match (pool.may_be_lost, pool.drives) {
        (0, _) => "none of them may be lost now".to_owned(),
        (any, drives) if any == drives => "any one of them may be lost now".to_owned(),
        (some, _) => format!("any one of {some} may be lost now"),
    };
    println!("drives    {}, {} online; {may_be_lost}", pool.drives, pool.drives_online);
    let rate = match pool.settings.rebuild_rate.0 {
        RebuildRate::Auto => "as fast as the latency of clients allows".to_owned(),
        RebuildRate::Max => "as fast as they can".to_owned(),
        RebuildRate::AtMost(bytes) => format!("at most {} a second", size(bytes)),
    };
    println!("rebuilds  {rate}");
}

fn jobs(array: &ArrayReport) -> String {
    let rebuild = array.rebuild.as_ref().map(|report| job("rebuild", report));
    let scrub = array.scrub.as_ref().map(|report| job("scrub", report));
    [rebuild, scrub].into_iter().flatten().collect::<Vec<_>>().join("; ")
}

pub fn arrays(arrays: &[ArrayReport]) {
    println!(
        "{:<8}{:<7}{:<11}{:>8}{:>18}{:>6}  {:<22}job",
        "array", "code", "state", "owed", "stripes", "log", "scrubbed"
    );
    for array in arrays {
        let stripes = format!("{} of {}", array.written_stripes, array.stripes);
        let log = format!("{}%", array.log_used_percent);
        let (name, debt) = (&array.name, array.redundancy_debt_stripes);
        let scrubbed = array.last_scrub.as_ref().map_or("never".into(), |scrub| time(scrub.ended_ns));
        println!(
            "{name:<8}{:<7}{:<11}{debt:>8}{stripes:>18}{log:>6}  {scrubbed:<22}{}",
            array.code,
            array.state,
            jobs(array)
        );
    }
}

pub fn array(array: &ArrayReport) {
    arrays(std::slice::from_ref(array));
    println!("\nlayout    {}", array.layout);
    println!("\nid        {}", array.id);
    if let Some(why) = &array.suspended {
        println!("suspended {why}");
    }
    println!("stripe    {} of data", size(array.stripe_bytes));
    let counting =
        if array.is_counted { "" } else { "; stripes are being counted, the rest is taken as owed" };
    println!("table     {} pages in memory, {} read{counting}", array.table_pages, array.table_reads);
    if array.lost_table_pages > 0 {
        println!("lost      {} pages of the table: no copy of them is left", array.lost_table_pages);
    }
    println!(
        "log       {} records, {} flushes, {} waits for its strips",
        array.log_records,
        array.log_flushes,
        size(array.dirty_bytes)
    );
    println!(
        "written   {} stripes past the log, {} through it; destaged {} stripes ({} read-modify, {} reconstruct, {} full)",
        array.fresh_stripes,
        size(array.logged_bytes),
        array.destaged_stripes,
        array.read_modify_writes,
        array.reconstruct_writes,
        array.full_writes
    );
    println!(
        "verified  {} checksum errors, {} blocks repaired, {} parity defects, {} degraded reads, {} unreadable stripes",
        array.checksum_errors,
        array.repaired_blocks,
        array.parity_defects,
        array.degraded_reads,
        array.unreadable_stripes
    );
    scrub_dates(array);
    println!("\n{:<8}{:<10}{:<12}{:>8}{:>8}  carrier", "member", "drive", "state", "stale", "moved");
    for (number, member) in array.members.iter().enumerate() {
        let carrier = if member.carrier { "yes" } else { "" };
        println!(
            "{number:<8}{:<10}{:<12}{:>8}{:>8}  {carrier}",
            short(&member.drive),
            member.state,
            member.stale_strips,
            member.moved_strips
        );
    }
}

fn scrub_dates(array: &ArrayReport) {
    let last = match &array.last_scrub {
        None => "never".to_owned(),
        Some(scrub) => format!(
            "{}: {} stripes, {} errors, {} blocks repaired, {} unreadable",
            time(scrub.ended_ns),
            scrub.stripes,
            scrub.checksum_errors,
            scrub.repaired_blocks,
            scrub.unreadable_stripes.len()
        ),
    };
    println!("scrubbed  {last}");
    println!("next      {}", array.next_scrub_ns.map_or("not by itself (--scrub-days 0)".to_owned(), time));
}

pub fn filesystem(fs: &FsReport) {
    println!(
        "{}  {} free of {}, chunks of {}, filesets: {}",
        fs.name,
        size(fs.available_bytes),
        size(fs.total_bytes),
        size(fs.chunk_bytes),
        fs.filesets.join(", ")
    );
    println!(
        "      metadata {} of {}; written {}, read {}",
        size(fs.meta_used_bytes),
        size(fs.meta_budget_bytes),
        size(fs.written_bytes),
        size(fs.read_bytes)
    );
    match &fs.map_copy {
        Some(copy) => map_copy(copy),
        None => println!("      no copy of names and maps"),
    }
}

pub fn map_copy(copy: &MapCopyReport) {
    let (time, size) = (time(copy.created_ns), size(copy.bytes));
    println!("      copy {} of names and maps: {time}, {} rows, {size}", copy.serial, copy.rows);
}

/// Lists what a restore has done.
fn restored(restored: &MapRestoreReport, is_one_of_several: bool) {
    let paths = |file: &FileReport| match file.paths.as_slice() {
        [] => format!("inode {}", file.inode),
        paths => paths.iter().map(|path| printable(path)).collect::<Vec<_>>().join(", "),
    };
    let of_target = match is_one_of_several {
        true => format!(" of target {}", restored.target),
        false => String::new(),
    };
    println!("RESTORED {} rows{of_target}, as of {}", restored.rows, time(restored.copy.created_ns));
    for file in &restored.listed_files {
        let what = match restored.changed_kept {
            true => "may show data that was written since, also that of others",
            false => "reads as zeros where it may have been written since",
        };
        println!("CHANGED  {}: {what}", paths(file));
    }
    let more = restored.changed_files - restored.listed_files.len() as u64;
    if more > 0 {
        println!("and {more} files more");
    }
    if let Some(file) = &restored.newer_file {
        let newer = size(restored.newer_blocks * penstock_base::BLOCK_BYTES as u64);
        println!("NEWER    {}: {newer} that were written since the copy", paths(file));
    }
}

/// Writes a line to standard output. If that fails, because the file system of its file is full or the reader
/// is gone, the process continues; `println!` would end it.
macro_rules! say {
    ($($line:tt)*) => {
        $crate::show::write_line(&mut std::io::stdout().lock(), format_args!($($line)*))
    };
}

/// Writes a line to standard error, in the same way.
macro_rules! note {
    ($($line:tt)*) => {
        $crate::show::write_line(&mut std::io::stderr().lock(), format_args!($($line)*))
    };
}

pub(crate) use {note, say};

/// Writes a line and flushes; ignores errors.
pub fn write_line(out: &mut impl Write, line: std::fmt::Arguments<'_>) {
    // The error could be reported nowhere.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Standard error as the log's output. Drops a line that cannot be written and reports success.
pub struct LogOutput;

impl Write for LogOutput {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // The error could be reported nowhere.
        let _ = std::io::stderr().lock().write_all(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Escapes control characters in a file name: users choose names, and a terminal would execute such
/// characters as commands.
fn printable(path: &str) -> String {
    let plain = |c: char| if c.is_control() { c.escape_default().to_string() } else { c.to_string() };
    path.chars().map(plain).collect()
}

/// Maximum number of findings that are printed.
const SHOWN: usize = 50;

fn findings(title: &str, report: &FindingsReport) {
    let total: u64 = report.counts.values().sum();
    for finding in report.findings.iter().take(SHOWN) {
        let hopeless = if finding.repairable { "" } else { " (no repair)" };
        println!("{title}  {}: {}{hopeless}", finding.kind, finding.text);
        finding.paths.iter().for_each(|path| println!("         {}", printable(path)));
    }
    let shown = report.findings.len().min(SHOWN) as u64;
    if total > shown {
        println!("and {} more, in all:", total - shown);
        report.counts.iter().for_each(|(kind, count)| println!("{count:>9}  {kind}"));
    }
}

pub fn check(check: &FsCheckReport) {
    let is_one_of_several = check.restored.iter().any(|restored| restored.target > 0);
    check.restored.iter().for_each(|report| restored(report, is_one_of_several));
    println!(
        "{} inodes, {} names, {} chunks, {} blocks; {} removed files wait, {} blocks lie behind the end of their file",
        check.inodes, check.names, check.chunks, check.blocks, check.removed_files, check.blocks_beyond_end
    );
    let total: u64 = check.now.counts.values().sum();
    let unchecked = check.unchecked_targets.iter().map(|target| format!("target {target} is away"));
    unchecked.for_each(|target| println!("UNCHECKED {target}: `penstock stack list`"));
    let Some(repair) = &check.repair else {
        findings("FOUND", &check.now);
        return match (check.clean, total) {
            (true, 0) if check.result == "incomplete" => println!("nothing was found on the other targets"),
            (true, 0) => println!("clean"),
            (true, _) => println!("clean; a repair gives the wasted space back"),
            (false, _) => {
                println!("{total} findings; nothing was changed, --repair mends what can be mended")
            }
        };
    };
    // A restored store lacks all that only counts.
    if check.restored.is_empty() {
        findings("FOUND", &repair.before);
    }
    repair.mended.iter().for_each(|(kind, count)| println!("MENDED   {count} {kind}"));
    for file in &repair.suspect_files {
        let paths: Vec<String> = file.paths.iter().map(|path| printable(path)).collect();
        let paths = if paths.is_empty() { "no name".into() } else { paths.join(", ") };
        println!("SUSPECT  inode {}: {paths}: look at its contents", file.inode);
    }
    findings("LEFT ", &check.now);
    match check.result.as_str() {
        "clean" => println!("clean; there was nothing to mend"),
        "mended" => println!("mended; a second check found nothing"),
        "incomplete" => println!("nothing is left on the other targets; the store is not whole"),
        _ => println!("{total} findings are left; docs/fs-check.md says what they mean"),
    }
}

pub fn check_progress(progress: &FsCheckProgress) -> String {
    match progress.repair {
        true => format!("repair, round {}: {} ({} rows)", progress.round, progress.phase, progress.rows),
        false => format!("check: {} ({} rows)", progress.phase, progress.rows),
    }
}

/// The names of a file, for people.
fn names_of(inode: u64, paths: &[String]) -> Vec<String> {
    match paths {
        [] => vec![format!("inode {inode} (open, without a name)")],
        paths => paths.iter().map(|path| printable(path)).collect(),
    }
}

/// Writes the files that may have something on a target that does not serve.
pub fn files_on(lost: &TargetFilesReport, mut to: impl std::io::Write) -> std::io::Result<()> {
    writeln!(to, "target {} does not serve: {}", lost.target, lost.reason)?;
    for name in lost.listed_files.iter().flat_map(|file| names_of(file.inode, &file.paths)) {
        writeln!(to, "    {name}")?;
    }
    let more = lost.files.saturating_sub(lost.listed_files.len() as u64);
    if more > 0 {
        writeln!(to, "    and {more} more")?;
    }
    writeln!(to, "{} files have up to {} there", lost.files, size(lost.most_bytes))
}

pub fn damaged(damaged: &DamagedReport) {
    for lost in damaged.absent_targets.iter().filter(|lost| lost.files > 0) {
        // As with `println!`: a reader that is gone ends the program.
        if files_on(lost, std::io::stdout()).is_err() {
            std::process::exit(0);
        }
    }
    for file in &damaged.files {
        names_of(file.inode, &file.paths).iter().for_each(|name| println!("{name}"));
        for range in &file.ranges {
            println!(
                "    bytes {} to {} ({} blocks at volume block {})",
                range.offset_bytes,
                range.offset_bytes + range.length_bytes - 1,
                range.blocks,
                range.volume_block
            );
        }
    }
    let stripes = damaged.unreadable_metadata_stripes.len();
    if stripes > 0 {
        println!(
            "{stripes} stripes of the metadata volume cannot be read: names, maps or attributes may be lost"
        );
    }
    match (damaged.files.len(), damaged.unreadable_stripes) {
        (0, 0) if damaged.absent_targets.iter().any(|lost| lost.files > 0) => {}
        (0, 0) => {
            println!("no file is known to be damaged; `penstock array scrub --wait` looks at every stripe")
        }
        (0, stripes) => {
            println!("no file is damaged; {stripes} stripes that cannot be read hold nothing of a file")
        }
        (files, _) => println!("{files} files, {} cannot be read", size(damaged.damaged_bytes)),
    }
}

pub fn scrubs(summaries: &[ScrubSummary]) {
    for summary in summaries {
        println!(
            "{}: {} stripes verified, {} errors, {} blocks repaired, {} parity defects, {} unreadable{}",
            summary.array,
            summary.stripes,
            summary.checksum_errors,
            summary.repaired_blocks,
            summary.parity_defects,
            summary.unreadable_stripes.len(),
            if summary.clean { " - clean" } else { "" }
        );
    }
}

/// Formats a duration in us, ms or s.
fn duration(ns: u64) -> String {
    match ns {
        0..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.1} s", ns as f64 / 1e9),
    }
}

pub fn latencies(latencies: &[LatencyReport]) {
    println!(
        "{:<10}{:<13}{:<10}{:>12}{:>11}{:>11}{:>11}{:>11}",
        "layer", "operation", "of", "count", "p50", "p90", "p99", "max"
    );
    for found in latencies.iter().filter(|found| found.count > 0) {
        let of = if found.layer == "drive" { short(&found.object) } else { &found.object };
        let times = [found.p50_ns, found.p90_ns, found.p99_ns, found.max_ns].map(duration);
        println!(
            "{:<10}{:<13}{of:<10}{:>12}{:>11}{:>11}{:>11}{:>11}",
            found.layer, found.op, found.count, times[0], times[1], times[2], times[3]
        );
    }
    println!("percentiles are at most 25 % too high, max is exact; unused operations are left out");
}

/// Formats a time as UTC, to the second.
pub fn time(time_ns: i64) -> String {
    let since = std::time::Duration::from_nanos(time_ns.max(0).cast_unsigned());
    humantime::format_rfc3339_seconds(std::time::UNIX_EPOCH + since).to_string()
}

/// Shortens the id after `drive ` to its beginning, as the other outputs do.
fn object(object: &str) -> String {
    match object.strip_prefix("drive ") {
        Some(id) => format!("drive {}", short(id)),
        None => object.to_owned(),
    }
}

pub fn events(events: &[Event]) {
    for event in events {
        let severity = match event.severity {
            Severity::Info => "info",
            Severity::Warning => "warning",
            Severity::Error => "ERROR",
        };
        let (seq, time) = (event.seq, time(event.time_ns));
        println!("{seq:>6}  {time}  {severity:<8}{:<16}{}", object(&event.object), event.text);
    }
}

pub fn lines(lines: &[Line]) {
    for line in lines {
        println!(
            "{:<58}{:>9.2} {:<6} ({:.2} to {:.2})  {:>4.0} % of {:.2}  limit: {}",
            line.name,
            line.measured,
            line.unit,
            line.spread[0],
            line.spread[1],
            line.efficiency * 100.0,
            line.ceiling,
            line.limit
        );
        if let (Some(peer), Some(ratio), Some(name)) = (line.peer, line.ratio, &line.peer_name) {
            println!("{:<58}{peer:>9.2} {:<6} {ratio:.2} times {name}", "", line.unit);
        }
    }
}

/// Progress of jobs, on one line of standard error. Prints nothing if that is no terminal.
pub struct Bar {
    terminal: bool,
    shown: bool,
}

impl Bar {
    pub fn new() -> Self {
        Self { terminal: std::io::stderr().is_terminal(), shown: false }
    }

    pub fn update(&mut self, arrays: &[ArrayReport]) {
        let running: Vec<String> = arrays
            .iter()
            .filter(|array| array.rebuild.is_some() || array.scrub.is_some())
            .map(|array| format!("{}: {}", array.name, jobs(array)))
            .collect();
        self.line(&running.join("   "));
    }

    /// Replaces the line that is shown.
    pub fn line(&mut self, line: &str) {
        if !self.terminal {
            return;
        }
        eprint!("\r\x1b[K{line}");
        let _ = std::io::stderr().flush();
        self.shown = true;
    }

    pub fn end(&mut self) {
        if self.shown {
            eprint!("\r\x1b[K");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{branches, size};
    use serde_json::json;

    #[test]
    fn nested_fields_are_lines_by_name() {
        let value = json!({
            "seq": 7,
            "problems": {},
            "root": { "at": 4096, "newest": null, "behind": [], "carriers": [2, 0, 1] },
            "pairs": [[1, 5], [3, 9]],
            "slices": [{ "array": "a1" }, { "problem": "blank" }],
        });
        let wanted = [
            "pairs: 1:5 3:9",
            "problems: none",
            "root:",
            "  at: 4096",
            "  behind: none",
            "  carriers: 2 0 1",
            "  newest: none",
            "seq: 7",
            "slices:",
            "  0:",
            "    array: a1",
            "  1:",
            "    problem: blank",
        ];
        assert_eq!(branches(&value, 0), wanted);
        assert_eq!(branches(&json!("alone"), 1), ["  alone"]);
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            [size(0), size(1023), size(1 << 20), size(3 << 29)],
            ["0 B", "1023 B", "1.0 MiB", "1.5 GiB"]
        );
    }
}
