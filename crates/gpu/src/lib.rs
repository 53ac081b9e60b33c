//! The erasure code and CRC32C for data that lies in GPU memory: the same bytes as `penstock-raid`, by CUDA.
//!
//! Owns device memory, kernels and their launches. Does not own where stripes come from, and moves no data to a GPU
//! only to code it: over PCIe that costs more than a processor core takes.
//!
//! ```text
//! driver.rs   libcuda, loaded at run time         code.rs    encode, decode, verify, checksums of many stripes
//! device.rs   a GPU, its memory, time on it       tables.rs  coefficients and remainders as the kernels take them
//! kernels/code.cu   the kernels; kernels/code.ptx is made from it by kernels/compile.py and loaded by any driver
//!                   from CUDA 11.8 on, for GPUs from compute capability 8.0 (A100) on
//! ```
//!
//! Invariants:
//! - Nothing of CUDA is needed to build or to test elsewhere; without a driver or a GPU [`Gpu::open`] is an error that
//!   says what is missing. No panic.
//! - A kernel touches the strips of its stripes only: offsets and lengths are checked against the memory before a
//!   launch, and memory that a pass uses lives as long as the pass.
//! - What a pass has made may be read after [`Gpu::wait`].

#![deny(unsafe_code)]

mod code;
mod device;
#[allow(unsafe_code)]
mod driver;
mod error;
mod tables;

pub use code::{Checks, GpuCode, Pass, Stripes, Verification, checksums};
pub use device::{DeviceMemory, Gpu, Marker};
pub use error::GpuError;
