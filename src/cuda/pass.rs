//! The kernels of one pass, launched one behind the other so that they overlap (programmatic dependent launch).

use std::ffi::c_void;

use anyhow::{Context as _, Result};
use cudarc::driver::{result, sys};
use tch::{Device, Tensor};

use super::device::{compute_capability, in_context};
use super::emulator;
use super::launch::{Arguments, Geometry, Kernel, Target};
use crate::torch;

/// Kernels that follow one another and overlap: each but the first may begin while the one before it still runs, from
/// when all of that one's blocks have allowed it (`allow_next_kernel` in `kernels/lib/base.cuh`).
///
/// Every block of such a kernel must wait for the end of the one before (`await_last_kernel`) before it reads what that
/// one makes, before it writes what that one may still read, and in any case before the block's own end. Before compute
/// capability 9.0 kernels run one after the other.
///
/// The emulator runs all of them when the pass ends, so that the last can begin first: their memory must be there till
/// then ([`Self::keep`]), and without [`Self::end`] nothing is computed.
#[derive(Default)]
pub struct Pass {
    has_begun: bool,
    held: Vec<emulator::Launch>,
    kept: Vec<Tensor>,
}

impl Pass {
    /// As [`Kernel::launch`], behind the kernels that were given before; in the emulator at the end of the pass.
    pub fn launch(&mut self, kernel: &Kernel, geometry: Geometry, arguments: &Arguments) -> Result<()> {
        kernel.check(arguments)?;
        let follows = std::mem::replace(&mut self.has_begun, true);
        match &kernel.target {
            Target::Emulated(program) => self.held.push(emulator::Launch {
                program: program.clone(),
                kernel: kernel.name.clone(),
                geometry,
                arguments: arguments.clone(),
                is_early: follows,
            }),
            Target::Function { context, function } => {
                let is_early = follows && overlaps(kernel.device)?;
                let stream = torch::stream::current_stream(kernel.device)? as sys::CUstream;
                let mut pointers = arguments.pointers();
                let launch = || {
                    // SAFETY: the function is loaded and belongs to the context that is current, as the stream does;
                    // every pointer is to as many bytes as the parameter has, which CUDA copies before it returns.
                    unsafe { enqueue(function.cu_function(), geometry, stream, &mut pointers, is_early) }
                };
                in_context(context, launch).with_context(|| format!("launching {} as {geometry:?}", kernel.name))?;
            }
        }
        Ok(())
    }

    /// Keeps tensors that the caller would drop before the pass ends.
    pub fn keep(&mut self, tensors: impl IntoIterator<Item = Tensor>) {
        self.kept.extend(tensors);
    }

    /// To be called when all kernels have been given. Errors: the emulator's.
    pub fn end(self) -> Result<()> {
        emulator::run_all(&self.held)
    }
}

fn overlaps(device: Device) -> Result<bool> {
    match device {
        Device::Cuda(index) => Ok(compute_capability(index)? >= (9, 0)),
        _ => Ok(false),
    }
}

/// Puts a kernel on `stream`.
///
/// # Safety
/// The function and the stream must be of the current context, and each pointer to the bytes of one parameter.
unsafe fn enqueue(
    function: sys::CUfunction,
    geometry: Geometry,
    stream: sys::CUstream,
    parameters: &mut [*mut c_void],
    is_early: bool,
) -> Result<(), result::DriverError> {
    let Geometry { grid, block, shared_bytes } = geometry;
    let mut early = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: grid.0,
        gridDimY: grid.1,
        gridDimZ: grid.2,
        blockDimX: block.0,
        blockDimY: block.1,
        blockDimZ: block.2,
        sharedMemBytes: shared_bytes,
        hStream: stream,
        attrs: &mut early,
        numAttrs: u32::from(is_early),
    };
    // SAFETY: the caller's; the config and the attribute outlive the call, which copies them.
    unsafe { sys::cuLaunchKernelEx(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) }.result()
}
