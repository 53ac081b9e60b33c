//! The functions of the CUDA driver, loaded from `libcuda.so.1` on first use.
//!
//! Names, types and versions are those of `cuda.h` of CUDA 11 and later. The library stays loaded until the
//! process ends.
//!
//! Safety invariant: handles and device addresses that are passed come from the driver itself. Host pointers
//! are to memory of at least the length that is passed, which outlives the call. Every call here is done with
//! host memory when it returns; for launches the driver copies the parameters.

use crate::error::GpuError;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::LazyLock;

type Handle = *mut c_void;

/// Declares the functions, and a loader that finds all of them by name.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        struct Functions { $($field: unsafe extern "C" fn($($argument),*) -> c_int,)* }

        impl Functions {
            fn load() -> Result<Self, String> {
                // SAFETY: loading runs only the initialisers of the system's own driver library.
                let library = unsafe { libloading::Library::new("libcuda.so.1") }.map_err(|error| error.to_string())?;
                let library: &'static libloading::Library = Box::leak(Box::new(library));
                // SAFETY: the types are those of cuda.h.
                unsafe {
                    Ok(Self { $($field: *library.get(concat!($name, "\0").as_bytes()).map_err(|error| error.to_string())?,)* })
                }
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device_get = "cuDeviceGet": fn(*mut c_int, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, c_int);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, c_int);
    context_retain = "cuDevicePrimaryCtxRetain": fn(*mut Handle, c_int);
    context_release = "cuDevicePrimaryCtxRelease_v2": fn(c_int);
    context_set = "cuCtxSetCurrent": fn(Handle);
    module_load = "cuModuleLoadData": fn(*mut Handle, *const c_void);
    module_unload = "cuModuleUnload": fn(Handle);
    module_function = "cuModuleGetFunction": fn(*mut Handle, Handle, *const c_char);
    memory_alloc = "cuMemAlloc_v2": fn(*mut u64, usize);
    memory_free = "cuMemFree_v2": fn(u64);
    memory_set = "cuMemsetD8_v2": fn(u64, u8, usize);
    copy_in = "cuMemcpyHtoD_v2": fn(u64, *const c_void, usize);
    copy_out = "cuMemcpyDtoH_v2": fn(*mut c_void, u64, usize);
    copy_within = "cuMemcpyDtoDAsync_v2": fn(u64, u64, usize, Handle);
    launch = "cuLaunchKernel": fn(Handle, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, Handle, *mut *mut c_void, *mut *mut c_void);
    wait = "cuCtxSynchronize": fn();
    event_create = "cuEventCreate": fn(*mut Handle, c_uint);
    event_destroy = "cuEventDestroy_v2": fn(Handle);
    event_record = "cuEventRecord": fn(Handle, Handle);
    event_wait = "cuEventSynchronize": fn(Handle);
    event_elapsed = "cuEventElapsedTime": fn(*mut f32, Handle, Handle);
    error_text = "cuGetErrorString": fn(c_int, *mut *const c_char);
}

static FUNCTIONS: LazyLock<Result<Functions, String>> = LazyLock::new(|| {
    let functions = Functions::load()?;
    // SAFETY: this is the first call of the driver.
    match unsafe { (functions.init)(0) } {
        0 => Ok(functions),
        code => Err(format!("cuInit: {}", functions.text(code))),
    }
});

/// CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, then MINOR.
const CAPABILITY: [c_int; 2] = [75, 76];

/// A kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Function(Handle);

/// An event of the default stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event(Handle);

/// The primary context of a device with the kernels loaded, used by the thread that opened it.
#[derive(Debug)]
pub(crate) struct Context {
    device: c_int,
    context: Handle,
    module: Handle,
}

impl Functions {
    fn text(&self, code: c_int) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: the driver sets the pointer to a string of its own that is never freed.
        let known = unsafe { (self.error_text)(code, &raw mut text) } == 0 && !text.is_null();
        match known {
            // SAFETY: as above.
            true => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
            false => format!("error {code}"),
        }
    }
}

fn functions() -> Result<&'static Functions, GpuError> {
    FUNCTIONS.as_ref().map_err(|error| GpuError::NoDriver(error.clone()))
}

/// Turns the result of a driver call into an error that names the call.
fn check(call: &'static str, code: c_int) -> Result<(), GpuError> {
    match code {
        0 => Ok(()),
        code => Err(GpuError::Driver { call, reason: functions()?.text(code) }),
    }
}

/// Calls a function of the driver.
macro_rules! call {
    ($function:ident($($argument:expr),*)) => {{
        let functions = functions()?;
        // SAFETY: by the invariant of this file.
        check(stringify!($function), unsafe { (functions.$function)($($argument),*) })
    }};
}

impl Context {
    /// Opens a device and loads the kernels from PTX text.
    pub(crate) fn open(number: usize, ptx: &CStr) -> Result<Self, GpuError> {
        let mut count = 0;
        call!(device_count(&raw mut count))?;
        let (wanted, found) = (number, usize::try_from(count).unwrap_or(0));
        if wanted >= found {
            return Err(GpuError::NoDevice { wanted, found });
        }
        let (mut device, mut context, mut module) = (0, std::ptr::null_mut(), std::ptr::null_mut());
        call!(device_get(&raw mut device, number as c_int))?;
        call!(context_retain(&raw mut context, device))?;
        // From here on, dropping this value releases the context.
        let mut opened = Self { device, context, module };
        call!(context_set(context))?;
        call!(module_load(&raw mut module, ptx.as_ptr().cast()))?;
        opened.module = module;
        Ok(opened)
    }

    pub(crate) fn name(&self) -> Result<String, GpuError> {
        let mut name = [0_u8; 256];
        call!(device_name(name.as_mut_ptr().cast(), name.len() as c_int - 1, self.device))?;
        Ok(CStr::from_bytes_until_nul(&name)
            .map_or_else(|_| String::new(), |name| name.to_string_lossy().into()))
    }

    /// Makes this the current context of the thread; the thread may have used another device since.
    fn enter(&self) -> Result<(), GpuError> {
        call!(context_set(self.context))
    }

    /// Compute capability, major and minor.
    pub(crate) fn capability(&self) -> Result<[i32; 2], GpuError> {
        let mut found = [0; 2];
        for (found, attribute) in found.iter_mut().zip(CAPABILITY) {
            call!(device_attribute(&raw mut *found, attribute, self.device))?;
        }
        Ok(found)
    }

    pub(crate) fn function(&self, name: &CStr) -> Result<Function, GpuError> {
        self.enter()?;
        let mut function = std::ptr::null_mut();
        call!(module_function(&raw mut function, self.module, name.as_ptr()))?;
        Ok(Function(function))
    }

    pub(crate) fn alloc(&self, bytes: usize) -> Result<u64, GpuError> {
        self.enter()?;
        let mut at = 0;
        call!(memory_alloc(&raw mut at, bytes))?;
        Ok(at)
    }

    pub(crate) fn free(&self, at: u64) -> Result<(), GpuError> {
        self.enter()?;
        call!(memory_free(at))
    }

    pub(crate) fn set(&self, at: u64, byte: u8, bytes: usize) -> Result<(), GpuError> {
        self.enter()?;
        call!(memory_set(at, byte, bytes))
    }

    pub(crate) fn copy_in(&self, to: u64, from: &[u8]) -> Result<(), GpuError> {
        self.enter()?;
        call!(copy_in(to, from.as_ptr().cast(), from.len()))
    }

    pub(crate) fn copy_out(&self, to: &mut [u8], from: u64) -> Result<(), GpuError> {
        self.enter()?;
        call!(copy_out(to.as_mut_ptr().cast(), from, to.len()))
    }

    pub(crate) fn copy_within(&self, to: u64, from: u64, bytes: usize) -> Result<(), GpuError> {
        self.enter()?;
        call!(copy_within(to, from, bytes, std::ptr::null_mut()))
    }

    /// Launches a kernel on the default stream. `parameters` are the kernel's parameters in order, 8 bytes
    /// each; the kernel reads as many of them as the parameter's type has.
    pub(crate) fn launch(
        &self,
        function: Function,
        [across, up]: [u32; 2],
        threads: u32,
        parameters: &[u64],
    ) -> Result<(), GpuError> {
        self.enter()?;
        let mut parameters = parameters.to_vec();
        let mut pointers: Vec<*mut c_void> =
            parameters.iter_mut().map(|value| (&raw mut *value).cast()).collect();
        let none = std::ptr::null_mut();
        call!(launch(
            function.0,
            across,
            up,
            1,
            threads,
            1,
            1,
            0,
            none,
            pointers.as_mut_ptr(),
            std::ptr::null_mut()
        ))
    }

    pub(crate) fn wait(&self) -> Result<(), GpuError> {
        self.enter()?;
        call!(wait())
    }

    pub(crate) fn event(&self) -> Result<Event, GpuError> {
        self.enter()?;
        let mut event = std::ptr::null_mut();
        call!(event_create(&raw mut event, 0))?;
        let event = Event(event);
        call!(event_record(event.0, std::ptr::null_mut()))?;
        Ok(event)
    }

    /// Waits for the event `to`, and returns the milliseconds between both events.
    pub(crate) fn elapsed_ms(&self, from: Event, to: Event) -> Result<f32, GpuError> {
        self.enter()?;
        let mut elapsed_ms = 0.0;
        call!(event_wait(to.0))?;
        call!(event_elapsed(&raw mut elapsed_ms, from.0, to.0))?;
        Ok(elapsed_ms)
    }

    pub(crate) fn destroy(&self, event: Event) -> Result<(), GpuError> {
        self.enter()?;
        call!(event_destroy(event.0))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // A driver that shuts down with the process may reject these calls; nothing is left to do then.
        if !self.module.is_null() {
            let _ = self.enter().and_then(|()| call!(module_unload(self.module)));
        }
        let _ = (|| call!(context_release(self.device)))();
    }
}
