//! Tests the arithmetic of the kernels without a GPU: `kernels/code.cu` compiled for the processor.
//!
//! The threads of a launch become a loop, and the results must be the bytes of `penstock-raid`. Needs a C++
//! compiler; prints SKIPPED if there is none.
#![allow(clippy::unwrap_used)]

#[path = "../src/tables.rs"]
mod tables;

use penstock_base::crc32c_blocks;
use penstock_raid::Code;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;

/// The compiled program, or the reason why there is none.
static PROGRAM: LazyLock<Result<PathBuf, String>> = LazyLock::new(|| {
    let compilers = ["c++", "g++", "clang++"];
    let is_there = |name: &&str| {
        Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success())
    };
    let compiler = compilers.into_iter().find(is_there).ok_or("there is no C++ compiler")?;
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/emulated.cpp");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-emulated");
    // Another run may compile at the same time, so each run writes its own file until it is complete.
    let own = program.with_extension(std::process::id().to_string());
    let mut command = Command::new(compiler);
    command.args(["-std=c++17", "-O2", "-Wall", "-Wno-unknown-pragmas", "-o"]).arg(&own).arg(source);
    let output = command.output().map_err(|error| error.to_string())?;
    assert!(output.status.success(), "the kernels compile: {}", String::from_utf8_lossy(&output.stderr));
    std::fs::rename(&own, &program).map_err(|error| error.to_string())?;
    Ok(program)
});

fn program(test: &str) -> Option<&'static Path> {
    match &*PROGRAM {
        Ok(program) => Some(program),
        Err(why) => {
            std::io::stderr().write_all(format!("SKIPPED {test}: {why}\n").as_bytes()).unwrap();
            None
        }
    }
}

fn run(program: &Path, head: [usize; 5], table: &[u32], input: &[u8]) -> Vec<u8> {
    let words = head.into_iter().map(|word| word as u32).chain([table.len() as u32]);
    let mut all: Vec<u8> = words.chain(table.iter().copied()).flat_map(u32::to_le_bytes).collect();
    all.extend(input);
    let mut child = Command::new(program).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    // The program reads all of its input before it writes.
    child.stdin.take().unwrap().write_all(&all).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{head:?}: {}", output.status);
    output.stdout
}

fn bytes(count: usize) -> Vec<u8> {
    let word =
        |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).to_le_bytes();
    (0..count.div_ceil(8)).flat_map(word).take(count).collect()
}

const STRIPES: usize = 2;
const STRIP_BYTES: usize = 2096;

/// Checks any rows of coefficients over random sources against the definition, with the kernel that fits
/// them.
fn check(
    program: &Path,
    rows: usize,
    k: usize,
    cell: impl Fn(usize, usize) -> u8,
    powers: bool,
    label: &str,
) {
    let sources = bytes(STRIPES * k * STRIP_BYTES);
    let mut expected = Vec::new();
    for stripe in sources.chunks_exact(k * STRIP_BYTES) {
        for row in 0..rows {
            let strips = stripe.chunks_exact(STRIP_BYTES);
            let mut sum = vec![0; STRIP_BYTES];
            for (column, strip) in strips.enumerate() {
                sum.iter_mut().zip(strip).for_each(|(sum, byte)| *sum ^= multiply(cell(row, column), *byte));
            }
            expected.extend(sum);
        }
    }
    assert_eq!(tables::are_powers(rows, k, &cell), powers, "{label}: which kernel");
    let table = if powers { Vec::new() } else { tables::products(rows, k, &cell) };
    let kind = usize::from(!powers);
    let made = run(program, [kind, rows, k, STRIPES, STRIP_BYTES], &table, &sources);
    assert!(made == expected, "{label}: encode");

    let mut both = sources.clone();
    both.extend(&expected);
    let head = [2 + kind, rows, k, STRIPES, STRIP_BYTES];
    assert_eq!(run(program, head, &table, &both), [0; 4 * STRIPES], "{label}: verify");
    // Changes the last byte of the last parity strip.
    *both.last_mut().unwrap() ^= 1;
    let mut wrong = vec![0; 4 * (STRIPES - 1)];
    wrong.extend((1_u32 << (rows - 1)).to_le_bytes());
    assert_eq!(run(program, head, &table, &both), wrong, "{label}: verify what is wrong");
}

/// The product by definition (docs/format/code.md).
fn multiply(a: u8, b: u8) -> u8 {
    (0..8).rev().fold(0_u8, |product, bit| {
        let doubled = (product << 1) ^ ((product >> 7) * 0x1d);
        if b >> bit & 1 != 0 { doubled ^ a } else { doubled }
    })
}

#[test]
fn kernels_make_the_bytes_of_the_code() {
    let Some(program) = program("kernels_make_the_bytes_of_the_code") else { return };
    for (k, m) in [(1, 1), (4, 1), (8, 1), (4, 2), (16, 2), (5, 3), (8, 3), (10, 4)] {
        let code = Code::new(k, m).unwrap();
        // With one data strip every row is a single 1, the zeroth power of any number.
        check(program, m, k, |row, column| code.coefficient(row, column), m < 4, &format!("{k}+{m}"));
    }
    for (k, m, lost) in
        [(4, 2, vec![0, 1]), (8, 3, vec![2, 9, 4]), (8, 2, vec![3]), (10, 4, vec![0, 1, 2, 3])]
    {
        let plan = Code::new(k, m).unwrap().plan(&lost).unwrap();
        let label = format!("{k}+{m} without {lost:?}");
        check(program, lost.len(), k, |row, column| plan.coefficient(row, column), lost.len() == 1, &label);
    }
}

#[test]
fn kernels_solve_for_lost_strips() {
    let Some(program) = program("kernels_solve_for_lost_strips") else { return };
    for (k, m, lost) in [(4, 2, 2), (16, 2, 2), (8, 3, 2), (8, 3, 3), (4, 3, 3)] {
        let code = Code::new(k, m).unwrap();
        let plan = code.plan(&(1..1 + lost).collect::<Vec<_>>()).unwrap();
        let inverse = tables::products(lost, lost, |row, column| plan.coefficient(row, k - lost + column));
        let data = bytes(STRIPES * k * STRIP_BYTES);
        let (mut input, mut expected) = (data.clone(), Vec::new());
        for stripe in data.chunks_exact(k * STRIP_BYTES) {
            let strips: Vec<&[u8]> = stripe.chunks_exact(STRIP_BYTES).collect();
            let mut parity = vec![vec![0; STRIP_BYTES]; m];
            code.encode(&strips, &mut parity.iter_mut().map(Vec::as_mut_slice).collect::<Vec<_>>());
            input.extend(parity[..lost].concat());
            expected.extend(strips[1..1 + lost].concat());
        }
        let made = run(program, [5, lost, k, STRIPES, STRIP_BYTES], &inverse, &input);
        assert!(made == expected, "{k}+{m} without {lost} strips");
    }
}

#[test]
fn kernels_make_the_checksums_of_blocks() {
    let Some(program) = program("kernels_make_the_checksums_of_blocks") else { return };
    let strips = bytes(3 * 2 * 4096);
    let made = run(program, [4, 0, 3, 1, 2 * 4096], &tables::checksums(), &strips);
    let expected: Vec<u8> = crc32c_blocks(&strips).into_iter().flat_map(u32::to_le_bytes).collect();
    assert_eq!(made, expected);
}
