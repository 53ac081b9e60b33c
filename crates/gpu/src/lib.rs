//! The erasure code and CRC32C for data in GPU memory, by CUDA: the same bytes as `penstock-raid`.
//!
//! Owns device memory, kernels and their launches. The caller brings the stripes to GPU memory. Moving data
//! to a GPU only to code it is not worthwhile: over PCIe that costs more than coding it on a processor core.
//!
//! ```text
//! driver.rs   libcuda, loaded at run time       code.rs    encode, decode, verify, checksums of stripes
//! device.rs   a GPU, its memory, time on it     tables.rs  coefficients and remainders for the kernels
//! error.rs    errors of the GPU path
//! kernels/code.cu   the kernels; kernels/code.ptx is made from it by kernels/compile.py, and loaded by
//!                   any driver from CUDA 11.8 on, for GPUs from compute capability 8.0 (A100) on
//! ```
//!
//! Invariants:
//! - Building and testing elsewhere needs nothing of CUDA. Without a driver or a GPU, [`Gpu::open`] returns
//!   an error that names the missing part, and never panics.
//! - A kernel accesses only the strips of its stripes: offsets and lengths are checked against the memory
//!   before a launch, and the memory that a pass uses lives as long as the pass.
//! - The results of a pass may be read after [`Gpu::wait`].

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
