//! A GPU with the kernels loaded, its memory, and time by its own clock.

use crate::driver::{Context, Event, Function};
use crate::error::GpuError;
use std::ffi::{CStr, CString};
use std::rc::Rc;

/// The kernels as PTX, which the driver compiles for its GPU.
const PTX: &str = include_str!("../kernels/code.ptx");

/// A GPU. Only the thread that opened it may use it.
#[derive(Clone, Debug)]
pub struct Gpu {
    context: Rc<Context>,
}

/// A range of a GPU's memory, freed when this is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    at: u64,
    bytes: usize,
}

/// A point in the sequence of the GPU's work.
#[derive(Debug)]
pub struct Marker {
    gpu: Gpu,
    event: Event,
}

impl Gpu {
    /// Opens the GPU with this number.
    ///
    /// Returns [`GpuError::NoDriver`] if no driver can be loaded and initialised, and [`GpuError::NoDevice`]
    /// if the driver finds no GPU of this number.
    pub fn open(number: usize) -> Result<Self, GpuError> {
        let ptx = CString::new(PTX).expect("a text without zeros");
        Ok(Self { context: Rc::new(Context::open(number, &ptx)?) })
    }

    /// The name that the driver reports, and the compute capability.
    pub fn name(&self) -> Result<String, GpuError> {
        let [major, minor] = self.context.capability()?;
        Ok(format!("{}, compute capability {major}.{minor}", self.context.name()?))
    }

    /// Allocates memory filled with zeros.
    pub fn zeroed(&self, bytes: usize) -> Result<DeviceMemory, GpuError> {
        // The driver rejects an allocation of zero bytes.
        let memory = DeviceMemory { gpu: self.clone(), at: self.context.alloc(bytes.max(1))?, bytes };
        self.context.set(memory.at, 0, bytes.max(1))?;
        Ok(memory)
    }

    /// Allocates memory filled with these words.
    pub(crate) fn words<const N: usize>(
        &self,
        words: impl Iterator<Item = [u8; N]>,
    ) -> Result<DeviceMemory, GpuError> {
        let bytes: Vec<u8> = words.flatten().collect();
        let mut memory = self.zeroed(bytes.len())?;
        memory.write(0, &bytes)?;
        Ok(memory)
    }

    /// True if both come from the same call of [`Gpu::open`].
    pub(crate) fn is_same(&self, other: &Gpu) -> bool {
        Rc::ptr_eq(&self.context, &other.context)
    }

    /// Waits until all work that was started is done.
    pub fn wait(&self) -> Result<(), GpuError> {
        self.context.wait()
    }

    /// Records a marker after all work that was started.
    pub fn mark(&self) -> Result<Marker, GpuError> {
        Ok(Marker { gpu: self.clone(), event: self.context.event()? })
    }

    pub(crate) fn function(&self, name: &CStr) -> Result<Function, GpuError> {
        self.context.function(name)
    }

    pub(crate) fn launch(
        &self,
        function: Function,
        grid: [u32; 2],
        threads: u32,
        parameters: &[u64],
    ) -> Result<(), GpuError> {
        self.context.launch(function, grid, threads, parameters)
    }
}

impl DeviceMemory {
    /// The size in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// True if the size is zero.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The GPU that the memory belongs to.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The address in the GPU's memory.
    pub(crate) fn address(&self) -> u64 {
        self.at
    }

    fn range(&self, offset: usize, bytes: usize) -> Result<u64, GpuError> {
        match offset.checked_add(bytes).is_some_and(|end| end <= self.bytes) {
            true => Ok(self.at + offset as u64),
            false => Err(GpuError::Shape(format!(
                "bytes {offset}+{bytes} are not in {} of device memory",
                self.bytes
            ))),
        }
    }

    /// Copies bytes into it, from `offset` on.
    pub fn write(&mut self, offset: usize, from: &[u8]) -> Result<(), GpuError> {
        self.gpu.context.copy_in(self.range(offset, from.len())?, from)
    }

    /// Copies bytes out of it, from `offset` on, after all work that was started.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), GpuError> {
        self.gpu.context.copy_out(to, self.range(offset, to.len())?)
    }

    /// Starts a copy of the first `bytes` bytes of `from` to the beginning of this memory.
    pub fn copy_from(&mut self, from: &DeviceMemory, bytes: usize) -> Result<(), GpuError> {
        if !self.gpu.is_same(&from.gpu) {
            return Err(GpuError::Shape("a copy from the memory of another GPU".into()));
        }
        self.gpu.context.copy_within(self.range(0, bytes)?, from.range(0, bytes)?, bytes)
    }

    /// Starts to fill it with zeros.
    pub(crate) fn clear(&self) -> Result<(), GpuError> {
        self.gpu.context.set(self.at, 0, self.bytes.max(1))
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // The driver waits for running kernels before it frees. It fails only if the context is gone, and the
        // memory with it.
        let _ = self.gpu.context.free(self.at);
    }
}

impl Marker {
    /// Waits for the marker `later`, and returns the milliseconds that the GPU took from this marker to it.
    pub fn until_ms(&self, later: &Marker) -> Result<f32, GpuError> {
        self.gpu.context.elapsed_ms(self.event, later.event)
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // As for memory, this fails only if the context is gone.
        let _ = self.gpu.context.destroy(self.event);
    }
}
