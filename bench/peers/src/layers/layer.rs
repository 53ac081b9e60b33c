//! The layers that processor time is attributed to, and the rules that find the layer of a sample.
//!
//! A sample is the calls that were open at one time, innermost first. Code of the program is attributed to
//! the innermost source file, inlined calls included, of a crate that has a layer. The standard library and
//! crates without a layer count for their caller. The kernel's calls are put into classes by the functions
//! that are open. The first rule that matches counts; the most specific rules come first.

use serde::Serialize;

/// A layer of the program, or a class of the kernel's functions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Layer {
    Fuse,
    Client,
    Wire,
    Node,
    Meta,
    Kv,
    Chunk,
    Array,
    Raid,
    Crc,
    Drive,
    Runtime,
    Base,
    Api,
    Allocator,
    Libc,
    KernelFuseCopy,
    KernelFuse,
    KernelFiles,
    KernelUring,
    KernelMemory,
    KernelScheduler,
    KernelInterrupts,
    KernelRest,
    /// No rule finds a layer.
    Unknown,
}

impl Layer {
    /// All layers with their names, in the order of the tables.
    pub(crate) const ALL: [(Self, &'static str); 25] = [
        (Self::Fuse, "FUSE, ours"),
        (Self::Client, "client library"),
        (Self::Wire, "wire, fabric"),
        (Self::Node, "node"),
        (Self::Meta, "metadata target"),
        (Self::Kv, "key-value store"),
        (Self::Chunk, "chunks"),
        (Self::Array, "array"),
        (Self::Raid, "code"),
        (Self::Crc, "CRC32C"),
        (Self::Drive, "drives"),
        (Self::Runtime, "runtime"),
        (Self::Base, "buffers and words"),
        (Self::Api, "instance, REST"),
        (Self::Allocator, "allocator"),
        (Self::Libc, "C library, copies"),
        (Self::KernelFuseCopy, "kernel: FUSE device, copies"),
        (Self::KernelFuse, "kernel: FUSE device, rest"),
        (Self::KernelFiles, "kernel: drive files"),
        (Self::KernelUring, "kernel: io_uring"),
        (Self::KernelMemory, "kernel: page faults, maps"),
        (Self::KernelScheduler, "kernel: scheduler, wake-ups"),
        (Self::KernelInterrupts, "kernel: interrupts"),
        (Self::KernelRest, "kernel: entry, rest"),
        (Self::Unknown, "attributed to nothing"),
    ];
}

/// Returns the path of a source file below the folder of all crates or packages, or `None` outside of both.
pub(crate) fn inside(path: &str) -> Option<&str> {
    match path.split_once("/registry/src/") {
        Some((_, rest)) => rest.split_once('/').map(|(_, inside)| inside),
        None => {
            path.rsplit_once("/crates/").map(|(_, inside)| inside).or_else(|| path.strip_prefix("crates/"))
        }
    }
}

/// Returns the layer of a source file, or `None` if it counts for its caller.
pub(crate) fn of_file(path: &str) -> Option<Layer> {
    let inside = inside(path)?;
    if path.contains("/registry/src/") {
        return of_package(inside.split('/').next()?);
    }
    let (name, file) = inside.split_once('/')?;
    Some(match (name, file) {
        ("base", "src/crc.rs") => Layer::Crc,
        ("worker", _) => Layer::Runtime,
        ("base", _) => Layer::Base,
        ("fuse", _) => Layer::Fuse,
        ("client", _) => Layer::Client,
        ("wire" | "fabric", _) => Layer::Wire,
        ("node", _) => Layer::Node,
        ("meta" | "session", _) => Layer::Meta,
        ("kv", _) => Layer::Kv,
        ("chunk", _) => Layer::Chunk,
        ("array", _) => Layer::Array,
        ("raid", _) => Layer::Raid,
        ("drive", _) => Layer::Drive,
        ("api" | "cli", _) => Layer::Api,
        _ => return None,
    })
}

/// Returns the layer of a package from a registry, named with its version.
fn of_package(package: &str) -> Option<Layer> {
    let is = |name: &str| {
        package.strip_prefix(name).is_some_and(|rest| {
            rest.strip_prefix('-').is_some_and(|version| version.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    let table: [(Layer, &[&str]); 5] = [
        (Layer::Kv, &["redb"]),
        (Layer::Crc, &["crc-fast", "crc"]),
        (
            Layer::Runtime,
            &["compio-runtime", "compio-driver", "compio-executor", "compio-buf", "io-uring", "polling"],
        ),
        (Layer::Wire, &["prost", "bytes"]),
        (Layer::Api, &["axum", "hyper", "hyper-util", "ureq", "clap", "mio"]),
    ];
    table.into_iter().find(|(_, names)| names.iter().any(|name| is(name))).map(|(layer, _)| layer)
}

/// Returns the layer of a function of the C library or the loader.
pub(crate) fn of_libc(symbol: &str) -> Layer {
    const ALLOCATOR: [&str; 14] = [
        "malloc",
        "_int_malloc",
        "free",
        "_int_free",
        "cfree",
        "calloc",
        "realloc",
        "_int_realloc",
        "posix_memalign",
        "aligned_alloc",
        "_int_memalign",
        "unlink_chunk",
        "sysmalloc",
        "systrim",
    ];
    let name = symbol.trim_start_matches("__libc_").trim_start_matches("__GI_");
    let name = name.split('.').next().unwrap_or(name);
    match ALLOCATOR.contains(&name) || name.starts_with("malloc_") || name.starts_with("tcache_") {
        true => Layer::Allocator,
        false => Layer::Libc,
    }
}

/// Returns the class of the kernel's open functions, which are given innermost first.
pub(crate) fn of_kernel(functions: &[&str]) -> Layer {
    let begins =
        |words: &[&str]| functions.iter().any(|function| words.iter().any(|word| function.starts_with(word)));
    let holds = |word: &str| functions.iter().any(|function| function.contains(word));
    const SCHEDULER: [&str; 16] = [
        "schedule",
        "__schedule",
        "preempt_schedule",
        "try_to_wake_up",
        "wake_up",
        "__wake_up",
        "finish_task_switch",
        "futex_",
        "do_futex",
        "__x64_sys_futex",
        "eventfd_",
        "ep_",
        "do_epoll",
        "__x64_sys_epoll",
        "do_nanosleep",
        "hrtimer_",
    ];
    if begins(&["asm_sysvec_", "asm_common_interrupt", "handle_softirqs", "__do_softirq"])
        && !begins(&["__schedule"])
    {
        return Layer::KernelInterrupts;
    }
    // Work that runs with interrupts disabled is sampled at the place that enables them again. Here that is
    // the wake-up of the process that waits for the reply.
    let wakes = functions.first().is_some_and(|leaf| leaf.starts_with("_raw_spin_unlock_irq"))
        && begins(&["fuse_request_end", "fuse_aio_complete"]);
    if wakes || begins(&SCHEDULER) {
        return Layer::KernelScheduler;
    }
    const MEMORY: [&str; 8] = [
        "exc_page_fault",
        "asm_exc_page_fault",
        "__x64_sys_mmap",
        "__x64_sys_munmap",
        "__x64_sys_mremap",
        "__x64_sys_madvise",
        "__x64_sys_mprotect",
        "__x64_sys_brk",
    ];
    if begins(&MEMORY) {
        return Layer::KernelMemory;
    }
    if holds("fuse_") {
        let copies =
            begins(&["fuse_copy_do", "fuse_copy_one", "fuse_copy_folio", "fuse_copy_page", "fuse_copy_args"]);
        return if copies { Layer::KernelFuseCopy } else { Layer::KernelFuse };
    }
    const FILES: [&str; 12] = [
        "shmem_",
        "generic_perform_write",
        "generic_file_",
        "filemap_",
        "ext4_",
        "xfs_",
        "btrfs_",
        "iomap_",
        "blkdev_",
        "ksys_pread64",
        "ksys_pwrite64",
        "vfs_fallocate",
    ];
    if begins(&FILES) || begins(&["__x64_sys_pread64", "__x64_sys_pwrite64", "__x64_sys_fallocate"]) {
        return Layer::KernelFiles;
    }
    match begins(&["io_", "__io_", "__do_sys_io_uring", "__x64_sys_io_uring"]) {
        true => Layer::KernelUring,
        false => Layer::KernelRest,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_layer_has_one_row() {
        for (index, (layer, name)) in Layer::ALL.into_iter().enumerate() {
            assert_eq!(layer as usize, index, "{name}");
            assert_eq!(Layer::ALL.iter().filter(|(_, other)| *other == name).count(), 1, "{name}");
        }
    }

    #[test]
    fn files_have_the_layer_of_their_crate() {
        let registry = "/home/a/.cargo/registry/src/index.crates.io-1949cf8c6b5b557f";
        let table = [
            ("/src/penstock/crates/array/src/strip.rs".to_owned(), Some(Layer::Array)),
            ("crates/wire/src/lib.rs".to_owned(), Some(Layer::Wire)),
            ("/a/crates/penstock/crates/base/src/crc.rs".to_owned(), Some(Layer::Crc)),
            ("/a/crates/base/src/buf.rs".to_owned(), Some(Layer::Base)),
            ("/a/crates/worker/src/lib.rs".to_owned(), Some(Layer::Runtime)),
            ("/a/crates/drive/src/file.rs".to_owned(), Some(Layer::Drive)),
            ("/rustc/0123/library/core/src/ptr/mod.rs".to_owned(), None),
            (format!("{registry}/redb-4.4.0/src/tree.rs"), Some(Layer::Kv)),
            (format!("{registry}/crc-fast-1.10.0/src/lib.rs"), Some(Layer::Crc)),
            (format!("{registry}/futures-util-0.3.34/src/crates/array/src/x.rs"), None),
            (format!("{registry}/bytes-utils-0.1.4/src/lib.rs"), None),
        ];
        for (path, layer) in table {
            assert_eq!(of_file(&path), layer, "{path}");
        }
    }

    #[test]
    fn kernel_functions_have_classes() {
        let table: [(&[&str], Layer); 12] = [
            (
                &["_copy_to_iter", "fuse_copy_do", "fuse_copy_folio", "fuse_dev_do_read", "vfs_read"],
                Layer::KernelFuseCopy,
            ),
            (&["_raw_spin_lock", "fuse_dev_do_read", "vfs_read", "ksys_read"], Layer::KernelFuse),
            (&["__schedule", "schedule", "fuse_dev_do_read", "vfs_read"], Layer::KernelScheduler),
            (
                &[
                    "_raw_spin_unlock_irqrestore",
                    "fuse_aio_complete",
                    "fuse_request_end",
                    "fuse_dev_do_write",
                ],
                Layer::KernelScheduler,
            ),
            (
                &["rep_movs_alternative", "_copy_to_iter", "shmem_file_read_iter", "vfs_read"],
                Layer::KernelFiles,
            ),
            (
                &["clear_page_erms", "shmem_get_folio_gfp", "shmem_write_begin", "io_write"],
                Layer::KernelFiles,
            ),
            (&["io_submit_sqes", "__do_sys_io_uring_enter", "do_syscall_64"], Layer::KernelUring),
            (
                &["clear_page_erms", "do_anonymous_page", "exc_page_fault", "asm_exc_page_fault"],
                Layer::KernelMemory,
            ),
            (&["unmap_page_range", "__x64_sys_munmap", "do_syscall_64"], Layer::KernelMemory),
            (
                &["handle_softirqs", "asm_sysvec_apic_timer_interrupt", "shmem_file_read_iter"],
                Layer::KernelInterrupts,
            ),
            (
                &["__schedule", "preempt_schedule_irq", "asm_sysvec_apic_timer_interrupt"],
                Layer::KernelScheduler,
            ),
            (&["entry_SYSCALL_64_after_hwframe"], Layer::KernelRest),
        ];
        for (functions, layer) in table {
            assert_eq!(of_kernel(functions), layer, "{functions:?}");
        }
    }

    #[test]
    fn the_allocator_is_apart_from_the_rest_of_the_library() {
        let table = [
            ("malloc", Layer::Allocator),
            ("__libc_calloc", Layer::Allocator),
            ("_int_free", Layer::Allocator),
            ("unlink_chunk.isra.0", Layer::Allocator),
            ("__memmove_avx512_unaligned_erms", Layer::Libc),
            ("syscall", Layer::Libc),
            ("[unknown]", Layer::Libc),
        ];
        for (symbol, layer) in table {
            assert_eq!(of_libc(symbol), layer, "{symbol}");
        }
    }
}
