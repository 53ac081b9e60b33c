//! Runs the tests of this crate for the NEON tier on any machine: built for 64-bit Arm, under qemu's
//! emulation.
//!
//! Needs the target's standard library (`rustup target add aarch64-unknown-linux-musl`) and `qemu-aarch64`
//! (Debian's qemu-user). If one is missing, the test prints SKIPPED and the reason.

use std::io::Write;
use std::path::Path;
use std::process::Command;

const TARGET: &str = "aarch64-unknown-linux-musl";

/// The program that runs 64-bit Arm binaries, or the reason why there is none.
fn runner() -> Result<&'static str, String> {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let libraries = Command::new(rustc).args(["--print", "target-libdir", "--target", TARGET]).output();
    let found =
        libraries.is_ok_and(|output| Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir());
    if !found {
        return Err(format!("the standard library of {TARGET} is not installed"));
    }
    let runs = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    let found = ["qemu-aarch64", "qemu-aarch64-static"].into_iter().find(runs);
    found.ok_or_else(|| "qemu-aarch64 is not installed".into())
}

#[test]
#[cfg_attr(target_arch = "aarch64", ignore = "the other tests run on it as they are")]
fn the_tests_of_the_code_pass_on_64_bit_arm() {
    let runner = match runner() {
        Ok(runner) => runner,
        Err(why) => {
            let note = format!("SKIPPED the_tests_of_the_code_pass_on_64_bit_arm: {why}\n");
            std::io::stderr().write_all(note.as_bytes()).expect("stderr");
            return;
        }
    };
    let target_dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("aarch64");
    let output = Command::new(env!("CARGO"))
        .args([
            "test",
            "--quiet",
            "--package",
            "penstock-raid",
            "--lib",
            "--test",
            "code",
            "--target",
            TARGET,
        ])
        .arg("--target-dir")
        .arg(target_dir)
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER", "rust-lld")
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_RUNNER", runner)
        .output()
        .expect("cargo runs");
    let told =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{told}");
    assert!(told.contains("test result: ok"), "tests ran: {told}");
}
