//! Benchmark of the code on a GPU, beside a copy of device memory.
//!
//! Run it with `cargo run --release -p penstock-gpu --example bench`; `--json` prints JSON for programs.
//! Rates are 10^9 bytes of data (k strips) per second, of data in GPU memory, by the GPU's clock. The ceiling
//! of a code is a copy of device memory measured in the same rounds, counting bytes read and written, times k
//! / (k + m). The ceiling of checksums is the copy itself. A latency is the time of a launch and its wait, by
//! the processor's clock. All values are medians of 9 rounds.
#![allow(clippy::disallowed_methods)]

use anyhow::{Context, Result, ensure};
use penstock_bench::Line;
use penstock_gpu::{DeviceMemory, Gpu, GpuCode, GpuError, Stripes, checksums};
use penstock_raid::Code;
use std::time::Instant;

const ROUNDS: usize = 9;
const STRIP_BYTES: usize = 256 << 10;
/// The number of stripes of a launch.
const BATCH: usize = 1000;
const GEOMETRIES: [(usize, usize); 7] = [(4, 1), (8, 1), (4, 2), (8, 2), (16, 2), (8, 3), (10, 4)];
/// The number of bytes that a copy reads.
const COPY_BYTES: usize = 4 << 30;

struct Bench {
    gpu: Gpu,
    copied: (DeviceMemory, DeviceMemory),
    lines: Vec<Line>,
}

impl Bench {
    /// Milliseconds that the GPU takes for `run`.
    fn timed(&self, run: impl FnOnce() -> Result<(), GpuError>) -> Result<f64, GpuError> {
        let start = self.gpu.mark()?;
        run()?;
        Ok(start.until_ms(&self.gpu.mark()?)?.into())
    }

    /// GB/s of a copy, counting bytes read and written.
    fn copy(&mut self) -> Result<f64, GpuError> {
        let start = self.gpu.mark()?;
        self.copied.0.copy_from(&self.copied.1, COPY_BYTES)?;
        let ms: f64 = start.until_ms(&self.gpu.mark()?)?.into();
        Ok(2.0 * COPY_BYTES as f64 / 1e6 / ms)
    }

    /// Adds a line with the rates of `run` in each round. The ceiling is the median copy of the same rounds
    /// times `share`.
    fn line(
        &mut self,
        name: String,
        bytes: usize,
        share: f64,
        limit: &'static str,
        run: impl Fn() -> Result<(), GpuError>,
    ) -> Result<(), GpuError> {
        let (mut rates, mut copies) = (Vec::new(), Vec::new());
        for round in 0..=ROUNDS {
            let copy = self.copy()?;
            let ms = self.timed(&run)?;
            // The first round is a warm-up that compiles the kernel and touches the memory.
            if round > 0 {
                copies.push(copy);
                rates.push(bytes as f64 / 1e6 / ms);
            }
        }
        copies.sort_by(f64::total_cmp);
        self.lines.push(Line::new(name, "GB/s", rates, copies[ROUNDS / 2] * share, limit));
        Ok(())
    }

    fn geometry(&mut self, k: usize, m: usize) -> Result<()> {
        let code = Code::new(k, m)?;
        let on_gpu = GpuCode::new(&self.gpu, &code);
        let mut memory = self.gpu.zeroed(BATCH * (k + m) * STRIP_BYTES)?;
        let expected = fill(&mut memory, &code)?;
        let stripes = Stripes::new(&memory, k + m, STRIP_BYTES)?;
        let data_bytes = BATCH * k * STRIP_BYTES;
        let share = |made: usize| k as f64 / (k + made) as f64;
        let limit = |rows: usize| match rows {
            1..=3 => "HBM",
            _ => "integer instructions: products bit by bit",
        };
        let encode = on_gpu.encode(&stripes)?;
        self.line(format!("{k}+{m} encode, {BATCH} stripes"), data_bytes, share(m), limit(m), || {
            encode.run()
        })?;
        let verify = on_gpu.verify(&stripes)?;
        self.line(format!("{k}+{m} verify, {BATCH} stripes"), data_bytes, share(m), limit(m), || {
            verify.run()
        })?;
        ensure!(
            verify.disagreements()?.iter().all(|rows| *rows == 0),
            "{k}+{m}: parity that was made verifies"
        );
        for lost in 1..=m.min(3) {
            let decode = on_gpu.decode(&stripes, &(0..lost).collect::<Vec<_>>())?;
            let limit = if lost == 1 || m < 4 { limit(1) } else { limit(4) };
            let name = format!("{k}+{m} decode {lost} lost, {BATCH} stripes");
            self.line(name, data_bytes, share(lost), limit, || decode.run())?;
        }
        self.gpu.wait()?;
        let mut made = vec![0; expected.len()];
        memory.read(0, &mut made)?;
        ensure!(made == expected, "{k}+{m}: the GPU makes the processor's bytes");
        Ok(())
    }

    /// Microseconds from the launch to the end of the wait, for one stripe and for a batch.
    fn latency(&mut self) -> Result<()> {
        let code = Code::new(8, 2)?;
        let on_gpu = GpuCode::new(&self.gpu, &code);
        for count in [1, BATCH] {
            let memory = self.gpu.zeroed(count * 10 * STRIP_BYTES)?;
            let stripes = Stripes::new(&memory, 10, STRIP_BYTES)?;
            let encode = on_gpu.encode(&stripes)?;
            let (mut runs, mut copies) = (Vec::new(), Vec::new());
            for round in 0..=ROUNDS {
                copies.push(self.copy()?);
                self.gpu.wait()?;
                let start = Instant::now();
                encode.run()?;
                self.gpu.wait()?;
                if round > 0 {
                    runs.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
            copies.sort_by(f64::total_cmp);
            let moved = (count * 10 * STRIP_BYTES) as f64;
            let ceiling = moved / (copies[copies.len() / 2] * 1e3);
            let name = format!("8+2 encode, latency of {count} stripes");
            self.lines.push(Line::new(name, "us", runs, ceiling, "launch and wait; then HBM"));
        }
        Ok(())
    }

    fn checksums(&mut self) -> Result<()> {
        let memory = self.gpu.zeroed(BATCH * 10 * STRIP_BYTES)?;
        let checks = checksums(&Stripes::new(&memory, 10, STRIP_BYTES)?)?;
        let name = format!("CRC32C of {} blocks", memory.len() / 4096);
        // A copy moves each byte twice, a checksum once.
        self.line(name, memory.len(), 1.0, "look-ups in shared memory", || checks.run())?;
        Ok(())
    }
}

/// Fills stripes with pseudo-random data and the processor's parity.
fn fill(memory: &mut DeviceMemory, code: &Code) -> Result<Vec<u8>, GpuError> {
    let mut all = vec![0; memory.len()];
    for (index, word) in all.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(
            &(index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23).to_le_bytes(),
        );
    }
    for stripe in all.chunks_exact_mut((code.k() + code.m()) * STRIP_BYTES) {
        let (data, parity) = stripe.split_at_mut(code.k() * STRIP_BYTES);
        let data: Vec<&[u8]> = data.chunks_exact(STRIP_BYTES).collect();
        code.encode(&data, &mut parity.chunks_exact_mut(STRIP_BYTES).collect::<Vec<_>>());
    }
    memory.write(0, &all)?;
    Ok(all)
}

fn main() -> Result<()> {
    let gpu = Gpu::open(0).context("the benchmark wants a GPU")?;
    let name = gpu.name()?;
    let copied = (gpu.zeroed(COPY_BYTES)?, gpu.zeroed(COPY_BYTES)?);
    let mut bench = Bench { gpu, copied, lines: Vec::new() };
    let mut copies = Vec::new();
    for _ in 0..ROUNDS {
        copies.push(bench.copy()?);
    }
    let mut sorted = copies.clone();
    sorted.sort_by(f64::total_cmp);
    let line =
        Line::new("copy in device memory, read and written", "GB/s", copies, sorted[ROUNDS / 2], "HBM");
    bench.lines.push(line);
    for (k, m) in GEOMETRIES {
        bench.geometry(k, m)?;
    }
    bench.checksums()?;
    bench.latency()?;
    if std::env::args().any(|argument| argument == "--json") {
        println!("{}", serde_json::to_string_pretty(&bench.lines)?);
        return Ok(());
    }
    println!("{name}\n\n| What | Measured | Spread | Ceiling | Share | Limit |\n|---|---|---|---|---|---|");
    for line in &bench.lines {
        let [low, high] = line.spread;
        let (share, unit) = (100.0 * line.efficiency, line.unit);
        println!(
            "| {} | {:.1} {unit} | {low:.1} to {high:.1} | {:.1} | {share:.0} % | {} |",
            line.name, line.measured, line.ceiling, line.limit
        );
    }
    Ok(())
}
