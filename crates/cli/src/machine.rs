//! The machine, as far as it bounds a store: usable cores, and memory that the process may use.

use std::path::{Path, PathBuf};

/// Cores that this process may use, as affinity and the limits of its control group have it.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, |cores| cores.get())
}

/// Bytes of memory that this process may use: those of the machine, or the limit of its control group if that
/// is less. None if nothing says it.
pub fn memory_bytes() -> Option<u64> {
    let read = |path: &Path| std::fs::read_to_string(path).ok();
    let machine = read(Path::new("/proc/meminfo")).and_then(|text| total_of(&text));
    let group = read(Path::new("/proc/self/cgroup")).and_then(|text| group_of(&text));
    let limits = group.into_iter().flat_map(|group| {
        let folders: Vec<PathBuf> = group.ancestors().map(Path::to_owned).collect();
        folders.into_iter().filter_map(|folder| read(&folder.join("memory.max"))?.trim().parse().ok())
    });
    machine.into_iter().chain(limits).min()
}

/// The memory of the machine, in /proc/meminfo.
fn total_of(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// The folder of the control group (version 2) in /proc/self/cgroup.
fn group_of(cgroup: &str) -> Option<PathBuf> {
    let path = cgroup.lines().find_map(|line| line.strip_prefix("0::/"))?;
    Some(Path::new("/sys/fs/cgroup").join(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_of_a_machine_is_read() {
        assert_eq!(total_of("MemTotal:       24576000 kB\nMemFree:  1 kB\n"), Some(24_576_000 << 10));
        assert_eq!((total_of("MemFree: 1 kB\n"), total_of("MemTotal: many kB\n")), (None, None));
        assert_eq!(group_of("1:cpu:/x\n0::/a/b\n"), Some("/sys/fs/cgroup/a/b".into()));
        assert_eq!(group_of("1:memory:/x\n"), None);
        assert!(cores() > 0 && memory_bytes().is_some_and(|bytes| bytes > 1 << 20));
    }
}
