//! Kernels in the context that libtorch uses, launched on the stream that libtorch's operators of this thread use. For
//! tensors on the CPU, kernels run in the emulator.

use std::marker::PhantomData;
use std::sync::Arc;

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, result};
use cudarc::nvrtc::Ptx;
use tch::Device;

use super::cache::Cache;
use super::dependent_launch::DependentLaunches;
use super::device::{compute_capability, context_of, in_context, keeping_current};
use super::emulator::{self, Emulation};
use super::jit::{Built, Compiler, Program};
use super::params::DeviceStruct;

/// A program on one device.
pub struct Module {
    device: Device,
    code: Code,
}

enum Code {
    Loaded { context: Arc<CudaContext>, module: Arc<CudaModule>, built: Built },
    Emulated(Arc<Emulation>),
}

/// Compiles `program` for `device` and loads it there, once in a process. For the CPU it is built for the emulator.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without the device or a compiler; those of [`Compiler::build`] and
/// [`emulator::load`]; CUDA's.
pub fn load(device: Device, program: &Program) -> Result<Arc<Module>> {
    static LOADED: Cache<String, Module> = Cache::new();
    if device == Device::Cpu {
        return Ok(Arc::new(Module { device, code: Code::Emulated(emulator::load(program)?) }));
    }
    let context = context_of(device)?;
    let built = Compiler::of_this_tree()?.build(program, compute_capability(device)?)?;
    LOADED.get(device, built.key.clone(), || {
        let ptx = Ptx::from_binary(built.cubin.clone());
        let module = keeping_current(|| context.load_module(ptx))
            .with_context(|| format!("loading kernels/{} onto {device:?}", program.file))?;
        Ok(Module { device, code: Code::Loaded { context, module, built } })
    })
}

impl Module {
    /// The entry point whose parameters are `P`. It is loaded onto the device now, because its first launch may be
    /// inside a graph's capture.
    ///
    /// Errors: no entry point of that name; parameters at other offsets than the fields of `P`; CUDA's.
    pub fn kernel<P: DeviceStruct>(&self) -> Result<Kernel<P>> {
        let (context, module, built) = match &self.code {
            Code::Emulated(emulation) => return Kernel::emulated(P::NAME, emulation.clone()),
            Code::Loaded { context, module, built } => (context, module, built),
        };
        built.resources_of(P::NAME)?;
        let find = || {
            let function = module.load_function(P::NAME)?;
            // SAFETY: the function belongs to a module that it keeps alive.
            unsafe { sys::cuFuncLoad(function.cu_function()) }.result()?;
            let parameters = parameters_of(&function)?;
            Ok((function, parameters))
        };
        let (function, parameters) =
            in_context(context, find).with_context(|| format!("finding kernel {}", P::NAME))?;
        require_fields::<P>(P::NAME, &parameters)?;
        let target = Target::Function { context: context.clone(), function };
        Ok(Kernel { name: P::NAME, device: self.device, target, params: PhantomData })
    }
}

/// Checks that a kernel with these parameters, each (offset, bytes), takes the fields of `P`.
fn require_fields<P: DeviceStruct>(kernel: &str, parameters: &[(usize, usize)]) -> Result<()> {
    let fields = P::FIELDS.iter().map(|field| (field.offset, field.bytes));
    ensure!(
        fields.clone().eq(parameters.iter().copied()),
        "{kernel} has parameters at (offset, bytes) {parameters:?}, and {} has fields at {:?}: make them equal",
        std::any::type_name::<P>(),
        fields.collect::<Vec<_>>()
    );
    Ok(())
}

/// An entry point of a loaded program, whose parameters are `P`.
#[derive(Debug, Clone)]
pub struct Kernel<P> {
    pub(super) name: &'static str,
    pub(super) device: Device,
    pub(super) target: Target,
    /// Covariant, so that a kernel takes addresses of any lifetime; a function pointer, so that it is `Send` and
    /// `Sync`.
    params: PhantomData<fn() -> P>,
}

#[derive(Debug, Clone)]
pub(super) enum Target {
    Function { context: Arc<CudaContext>, function: CudaFunction },
    Emulated(Arc<Emulation>),
}

/// Blocks, threads a block, and dynamic shared memory a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchConfig {
    pub grid: (u32, u32, u32),
    pub block: (u32, u32, u32),
    pub shared_bytes: u32,
}

/// The most blocks of a grid in each direction.
pub const GRID_LIMIT: (u32, u32, u32) = (i32::MAX as u32, 65_535, 65_535);

impl LaunchConfig {
    /// A grid and blocks of one dimension, without dynamic shared memory.
    pub fn line(blocks: u32, threads: u32) -> Self {
        Self { grid: (blocks, 1, 1), block: (threads, 1, 1), shared_bytes: 0 }
    }

    /// Errors: a grid that is empty, or larger than CUDA allows.
    pub(super) fn check(&self) -> Result<()> {
        let (x, y, z) = self.grid;
        let fits =
            (1..=GRID_LIMIT.0).contains(&x) && (1..=GRID_LIMIT.1).contains(&y) && (1..=GRID_LIMIT.2).contains(&z);
        ensure!(fits, "a grid has from (1, 1, 1) to {GRID_LIMIT:?} blocks: use a smaller shape");
        Ok(())
    }
}

impl<P: DeviceStruct> Kernel<P> {
    /// The entry point `name` of a program for the emulator, which reports only the sizes of parameters.
    pub(super) fn emulated(name: &'static str, emulation: Arc<Emulation>) -> Result<Self> {
        let sizes = emulation.parameters(name)?;
        let offset = |i: usize| P::FIELDS.get(i).map_or(0, |field| field.offset);
        let parameters: Vec<_> = sizes.into_iter().enumerate().map(|(i, bytes)| (offset(i), bytes)).collect();
        require_fields::<P>(name, &parameters)?;
        Ok(Self { name, device: Device::Cpu, target: Target::Emulated(emulation), params: PhantomData })
    }

    /// Lets launches ask for this much dynamic shared memory, which without it is at most 48 KiB.
    pub fn allow_shared(self, bytes: u32) -> Result<Self> {
        if let Target::Function { context, function } = &self.target {
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let set = || function.set_attribute(attribute, i32::try_from(bytes).unwrap_or(i32::MAX));
            in_context(context, set).with_context(|| format!("giving {} {bytes} bytes of shared memory", self.name))?;
        }
        Ok(self)
    }

    /// Launches the kernel on the stream that libtorch's operators of this thread use, and does not wait for it. The
    /// emulator runs it to its end.
    ///
    /// The kernel's use of that memory is not checked. Tensors may be dropped right after: libtorch gives their memory
    /// to later work of the same stream only.
    ///
    /// Errors: a grid that CUDA does not allow; CUDA's, which may be those of earlier kernels; the emulator's.
    pub fn launch(&self, config: LaunchConfig, params: &P) -> Result<()> {
        let mut alone = DependentLaunches::default();
        alone.launch(self, config, params)?;
        alone.finish()
    }

    /// As [`Self::launch`], of a kernel that may begin while the one before it in the stream runs. Every block of it must call
    /// `await_last_kernel` as [`DependentLaunches`] says.
    pub fn launch_early(&self, config: LaunchConfig, params: &P) -> Result<()> {
        let mut alone = DependentLaunches::after_others();
        alone.launch(self, config, params)?;
        alone.finish()
    }
}

/// (offset from the first, bytes) of each parameter. CUDA is queried until it reports no further parameter, because the
/// driver may be too old for the call that gives their number.
///
/// CUDA counts from the start of the parameters' space, where a tensor map, which is aligned to 128 bytes, leaves a gap
/// before the first parameter (112 bytes on an H200).
fn parameters_of(function: &CudaFunction) -> Result<Vec<(usize, usize)>, result::DriverError> {
    let mut parameters = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        let index = parameters.len();
        // SAFETY: the function is loaded, and both pointers are to integers that outlive the call.
        let status = unsafe { sys::cuFuncGetParamInfo(function.cu_function(), index, &mut offset, &mut bytes) };
        match status {
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => break,
            status => status.result()?,
        }
        parameters.push((offset, bytes));
    }
    let first = parameters.first().map_or(0, |parameter| parameter.0);
    parameters.iter_mut().for_each(|parameter| parameter.0 -= first);
    Ok(parameters)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{Fault, fault_of};

    #[test]
    fn a_device_that_is_not_there_is_a_typed_fault() {
        let program = Program { file: "adamw.cu", defines: Vec::new() };
        for device in [Device::Mps, Device::Cuda(63)] {
            let error = load(device, &program).err().unwrap();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }

    #[test]
    fn a_grid_beyond_cudas_limits_is_refused() {
        let check = |grid| LaunchConfig { grid, block: (32, 1, 1), shared_bytes: 0 }.check().is_ok();
        let (x, y, z) = GRID_LIMIT;
        assert!(check((1, 1, 1)) && check((x, y, z)));
        for grid in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (x + 1, 1, 1), (1, y + 1, 1), (1, 1, z + 1)] {
            assert!(!check(grid), "{grid:?}");
        }
    }
}
