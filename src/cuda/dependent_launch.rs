//! Kernels of one stream that overlap: programmatic dependent launch.

use anyhow::{Context as _, Result};
use cudarc::driver::sys;

use super::device::{Arch, compute_capability, in_context};
use super::emulator;
use super::launch::{Kernel, LaunchConfig, Target};
use super::params::DeviceStruct;
use crate::torch;

/// Kernels that are launched one after the other and overlap. Each but the first may begin while the one before it runs,
/// as soon as all blocks of that one have called `allow_next_kernel` (`kernels/lib/base.cuh`).
///
/// Every block of such a kernel must call `await_last_kernel` before it reads what the kernel before it writes, before it
/// writes what that kernel may still read, and in any case before it ends. Before compute capability 9.0 kernels do not
/// overlap.
///
/// The emulator runs all of them in [`Self::finish`], so that the last can begin first; without it nothing is computed.
/// Until then the parameters borrow their tensors.
#[derive(Default)]
pub struct DependentLaunches<'a> {
    has_begun: bool,
    queued: Vec<emulator::Launch<'a>>,
}

impl<'a> DependentLaunches<'a> {
    /// The first may begin while the kernel before it in the stream runs, as those after it.
    pub fn after_others() -> Self {
        Self { has_begun: true, ..Self::default() }
    }

    /// As [`Kernel::launch`], after the kernels that were given before; in the emulator by [`Self::finish`].
    pub fn launch<P: DeviceStruct + 'a>(&mut self, kernel: &Kernel<P>, config: LaunchConfig, params: &P) -> Result<()> {
        let launching = || format!("launching {} as {config:?}", kernel.name);
        config.check().with_context(launching)?;
        let follows = std::mem::replace(&mut self.has_begun, true);
        match &kernel.target {
            Target::Emulated(program) => {
                let (params, program) = (*params, program.clone());
                let arguments = Box::new(move || params.pointers());
                self.queued.push(emulator::Launch {
                    program,
                    kernel: kernel.name,
                    config,
                    arguments,
                    is_early: follows,
                });
            }
            Target::Function { context, function } => {
                let is_early = follows && compute_capability(kernel.device)? >= Arch::HOPPER;
                let stream = torch::stream::current_stream(kernel.device)? as sys::CUstream;
                let mut early = sys::CUlaunchAttribute {
                    id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                    pad: [0; 4],
                    value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
                };
                let LaunchConfig { grid, block, shared_bytes } = config;
                let launch = sys::CUlaunchConfig {
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
                let (function, mut parameters) = (function.cu_function(), params.pointers());
                let enqueue = || {
                    // SAFETY: the function is loaded and belongs to the context that is current, as the stream does. There
                    // is a pointer for each parameter, to as many bytes as it has (`Module::kernel` compared them). The
                    // launch and its attribute outlive the call, and CUDA copies all before it returns.
                    unsafe {
                        sys::cuLaunchKernelEx(&launch, function, parameters.as_mut_ptr(), std::ptr::null_mut()).result()
                    }
                };
                in_context(context, enqueue).with_context(launching)?;
            }
        }
        Ok(())
    }

    /// Call it after the last launch. Errors: the emulator's.
    pub fn finish(self) -> Result<()> {
        emulator::run_all(&self.queued)
    }
}
