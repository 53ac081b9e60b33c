//! Tests that the kernels compile, and that `kernels/code.ptx` is the result.
//!
//! Needs NVRTC of CUDA 11.8, which `cargo xtask test` installs from PyPI into the target folder. Prints
//! SKIPPED without it.
#![allow(clippy::unwrap_used)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const INSIDE: &str = "nvidia/cuda_nvrtc/lib";

/// The Python interpreter and the folder of the compiler.
fn compiler() -> Option<(PathBuf, PathBuf)> {
    let python = std::env::var_os("PENSTOCK_PYTHON").map(PathBuf::from)?;
    let script = "import sysconfig; print(sysconfig.get_path('purelib'))";
    let output = Command::new(&python).args(["-c", script]).output().ok()?;
    let folder = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim()).join(INSIDE);
    folder.join("libnvrtc.so.11.2").exists().then_some((python, folder))
}

#[test]
fn the_kernels_compile_to_what_is_loaded() {
    let Some((python, folder)) = compiler() else {
        let note = "SKIPPED the_kernels_compile_to_what_is_loaded: NVRTC (nvidia-cuda-nvrtc-cu11) is not installed\n";
        std::io::stderr().write_all(note.as_bytes()).unwrap();
        return;
    };
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels");
    let output = Command::new(python).arg(kernels.join("compile.py")).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let found = std::fs::read(kernels.join("code.ptx")).unwrap();
    assert!(
        output.stdout == found,
        "code.ptx is not what code.cu compiles to: run kernels/compile.py FOLDER --write"
    );
}
