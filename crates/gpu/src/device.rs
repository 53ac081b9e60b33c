//! A GPU with the kernels loaded, its memory, and time as it sees it.

use crate::driver::{Context, Event, Function};
use crate::error::GpuError;
use std::ffi::{CStr, CString};
use std::rc::Rc;

/// The kernels, as the driver compiles them for its GPU.
const PTX: &str = include_str!("../kernels/code.ptx");

/// A GPU. It belongs to the thread that opened it.
#[derive(Clone, Debug)]
pub struct Gpu {
    context: Rc<Context>,
}

/// A range of its memory, freed when it is dropped.
#[derive(Debug)]
pub struct DeviceMemory {
    gpu: Gpu,
    at: u64,
    bytes: usize,
}

/// A moment in the GPU's work.
#[derive(Debug)]
pub struct Marker {
    gpu: Gpu,
    event: Event,
}

impl Gpu {
    /// The GPU with this number.
    ///
    /// [`GpuError::NoDriver`] where there is none, [`GpuError::NoDevice`] where it finds fewer GPUs.
    pub fn open(number: usize) -> Result<Self, GpuError> {
        let ptx = CString::new(PTX).expect("a text without zeros");
        Ok(Self { context: Rc::new(Context::open(number, &ptx)?) })
    }

    /// What it calls itself, and its compute capability.
    pub fn name(&self) -> Result<String, GpuError> {
        let [major, minor] = self.context.capability()?;
        Ok(format!("{}, compute capability {major}.{minor}", self.context.name()?))
    }

    /// Memory with zeros.
    pub fn zeroed(&self, bytes: usize) -> Result<DeviceMemory, GpuError> {
        // The driver refuses to give nothing.
        let memory = DeviceMemory { gpu: self.clone(), at: self.context.alloc(bytes.max(1))?, bytes };
        self.context.set(memory.at, 0, bytes.max(1))?;
        Ok(memory)
    }

    /// Memory with these words.
    pub(crate) fn words<const N: usize>(
        &self,
        words: impl Iterator<Item = [u8; N]>,
    ) -> Result<DeviceMemory, GpuError> {
        let bytes: Vec<u8> = words.flatten().collect();
        let mut memory = self.zeroed(bytes.len())?;
        memory.write(0, &bytes)?;
        Ok(memory)
    }

    /// Whether both are the same one, opened once.
    pub(crate) fn is_same(&self, other: &Gpu) -> bool {
        Rc::ptr_eq(&self.context, &other.context)
    }

    /// Waits until all that was started is done.
    pub fn wait(&self) -> Result<(), GpuError> {
        self.context.wait()
    }

    /// A mark behind all that was started.
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
    /// Its bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// The GPU that has it.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Its address there.
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

    /// Copies bytes out of it, from `offset` on, after all that was started.
    pub fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), GpuError> {
        self.gpu.context.copy_out(to, self.range(offset, to.len())?)
    }

    /// Starts a copy of bytes at its beginning from the beginning of another memory.
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
        // The driver waits for kernels that are running before it frees. It fails only if the context is gone, and the
        // memory with it.
        let _ = self.gpu.context.free(self.at);
    }
}

impl Marker {
    /// Milliseconds that the GPU took from here to a later mark, for which this waits.
    pub fn until_ms(&self, later: &Marker) -> Result<f32, GpuError> {
        self.gpu.context.elapsed_ms(self.event, later.event)
    }
}

impl Drop for Marker {
    fn drop(&mut self) {
        // As for memory.
        let _ = self.gpu.context.destroy(self.event);
    }
}
