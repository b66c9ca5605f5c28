//! Kernels in the context that libtorch uses, launched on the stream that its operators of this thread go to; for
//! tensors of the processor, in the emulator.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, ensure};
use cudarc::driver::sys::{self, CUfunction_attribute_enum as Attribute};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, result};
use cudarc::nvrtc::Ptx;
use tch::{Device, Tensor};

use super::arch::Arch;
use super::device::{compute_capability, context_of, in_context, keeping_current};
use super::emulator::{self, Emulation};
use super::jit::{Built, Compiler, Program};
use super::pass::Pass;
use super::tensor_map::TensorMap;
use crate::error::Fault;

/// A program on one device.
pub struct Module {
    device: Device,
    code: Code,
}

enum Code {
    Loaded { context: Arc<CudaContext>, module: Arc<CudaModule>, built: Built },
    Emulated(Arc<Emulation>),
}

/// Compiles `program` for `device` and loads it there; a program that is loaded already is given again. For the
/// processor it is built for the emulator.
///
/// Errors: [`crate::error::Fault::NotAvailable`] without the device or a compiler; those of [`Compiler::build`] and
/// [`emulator::load`]; CUDA's.
pub fn load(device: Device, program: &Program) -> Result<Arc<Module>> {
    static LOADED: Mutex<BTreeMap<(usize, String), Arc<Module>>> = Mutex::new(BTreeMap::new());
    let index = match device {
        Device::Cuda(index) => index,
        Device::Cpu => return Ok(Arc::new(Module { device, code: Code::Emulated(emulator::load(program)?) })),
        other => {
            return Err(
                Fault::NotAvailable { needs: "a CUDA GPU or the processor".into(), has: format!("{other:?}") }.into()
            );
        }
    };
    let (major, minor) = compute_capability(index)?;
    let context = context_of(index)?;
    let arch = Arch { major: u32::try_from(major)?, minor: u32::try_from(minor)? };
    let built = Compiler::of_this_tree()?.build(program, arch)?;
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(module) = loaded.get(&(index, built.key.clone())) {
        return Ok(module.clone());
    }
    let ptx = Ptx::from_binary(built.cubin.clone());
    let module = keeping_current(|| context.load_module(ptx))
        .with_context(|| format!("loading kernels/{} onto {device:?}", program.file))?;
    let key = (index, built.key.clone());
    let module = Arc::new(Module { device, code: Code::Loaded { context, module, built } });
    loaded.insert(key, module.clone());
    Ok(module)
}

impl Module {
    /// The entry point `name`, which is brought onto the device now: its first launch may be inside a graph's capture.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let (context, module, built) = match &self.code {
            Code::Emulated(emulation) => return Kernel::emulated(name, emulation.clone()),
            Code::Loaded { context, module, built } => (context.clone(), module, built),
        };
        built.resources_of(name)?;
        let (function, parameters) = in_context(&context, || {
            let function = module.load_function(name)?;
            // SAFETY: the function belongs to a module that it keeps alive.
            unsafe { sys::cuFuncLoad(function.cu_function()) }.result()?;
            let parameters = parameter_sizes(&function)?;
            Ok((function, parameters))
        })
        .with_context(|| format!("finding kernel {name}"))?;
        Ok(Kernel {
            name: name.into(),
            device: self.device,
            target: Target::Function { context, function },
            parameters,
        })
    }
}

/// An entry point of a loaded program.
#[derive(Debug, Clone)]
pub struct Kernel {
    pub(super) name: String,
    pub(super) device: Device,
    pub(super) target: Target,
    /// Bytes of each parameter.
    parameters: Vec<usize>,
}

#[derive(Debug, Clone)]
pub(super) enum Target {
    Function { context: Arc<CudaContext>, function: CudaFunction },
    Emulated(Arc<Emulation>),
}

/// Blocks, threads a block, and dynamic shared memory a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub grid: (u32, u32, u32),
    pub block: (u32, u32, u32),
    pub shared_bytes: u32,
}

impl Kernel {
    /// The entry point `name` of a program that was built for the processor.
    pub(super) fn emulated(name: &str, emulation: Arc<Emulation>) -> Result<Self> {
        let parameters = emulation.parameters(name)?;
        Ok(Self { name: name.into(), device: Device::Cpu, target: Target::Emulated(emulation), parameters })
    }

    /// Lets launches ask for more than 48 KiB of dynamic shared memory.
    pub fn allow_shared(&self, bytes: u32) -> Result<()> {
        let Target::Function { context, function } = &self.target else { return Ok(()) };
        let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let set = || function.set_attribute(attribute, i32::try_from(bytes).unwrap_or(i32::MAX));
        in_context(context, set).with_context(|| format!("giving {} {bytes} bytes of shared memory", self.name))
    }

    /// Launches the kernel on the stream that libtorch's operators of this thread go to, and does not wait for it; the
    /// emulator runs it to its end.
    ///
    /// The number of arguments, their sizes and the devices of tensors are checked; what the kernel does with the
    /// memory that it is given is the kernel's business. Memory of tensors that are dropped right after is safe: libtorch
    /// gives it to later work of the same stream only.
    ///
    /// Errors: arguments that do not fit the kernel; CUDA's, which may be those of earlier kernels; the emulator's.
    pub fn launch(&self, geometry: Geometry, arguments: &Arguments) -> Result<()> {
        let mut alone = Pass::default();
        alone.launch(self, geometry, arguments)?;
        alone.end()
    }

    /// That the arguments are the kernel's, as far as their number, sizes and devices tell.
    pub(super) fn check(&self, arguments: &Arguments) -> Result<()> {
        let (name, given, wanted) = (&self.name, &arguments.list, &self.parameters);
        ensure!(given.len() == wanted.len(), "{name} has {} parameters, {} were given", wanted.len(), given.len());
        for (i, (given, wanted)) in given.iter().zip(wanted).enumerate() {
            ensure!(given.bytes == *wanted, "parameter {i} of {name} has {wanted} bytes, {} were given", given.bytes);
            let device = given.device.unwrap_or(self.device);
            ensure!(device == self.device, "argument {i} is on {device:?}, but {name} runs on {:?}", self.device);
        }
        Ok(())
    }
}

/// A kernel's arguments in order.
#[derive(Debug, Clone, Default)]
pub struct Arguments {
    /// Every argument starts at a word of its own.
    words: Vec<u64>,
    list: Vec<Argument>,
}

#[derive(Debug, Clone)]
struct Argument {
    first_word: usize,
    bytes: usize,
    /// Where the memory is that it points to, if it is a pointer.
    device: Option<Device>,
}

impl Arguments {
    pub fn new() -> Self {
        // Six tensor maps and what goes with them.
        Self { words: Vec::with_capacity(128), list: Vec::with_capacity(8) }
    }

    /// The address of a tensor's first element.
    pub fn tensor(mut self, tensor: &Tensor) -> Self {
        let address = tensor.data_ptr() as u64;
        self.push(&[address], size_of::<u64>(), Some(tensor.device()));
        self
    }

    pub fn scalar(mut self, value: impl Scalar) -> Self {
        let (word, bytes) = value.word();
        self.push(&[word], bytes, None);
        self
    }

    /// A tensor map, by value.
    pub fn map(self, map: &TensorMap) -> Self {
        self.words(map.words())
    }

    /// A struct by value, as the 8-byte words that it has in memory.
    pub fn words(mut self, words: &[u64]) -> Self {
        self.push(words, size_of_val(words), None);
        self
    }

    fn push(&mut self, words: &[u64], bytes: usize, device: Option<Device>) {
        self.list.push(Argument { first_word: self.words.len(), bytes, device });
        self.words.extend_from_slice(words);
    }

    /// As `cuLaunchKernel` takes them; they hold while `self` is borrowed and unchanged.
    pub(super) fn pointers(&self) -> Vec<*mut c_void> {
        self.list.iter().map(|argument| self.words[argument.first_word..].as_ptr().cast_mut().cast()).collect()
    }
}

/// Two 4-byte fields that follow one another in a struct, for [`Arguments::words`].
pub fn word_of(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// A number that a kernel takes by value.
pub trait Scalar {
    /// Its bytes at the low end of a word, and how many they are.
    fn word(self) -> (u64, usize);
}

macro_rules! scalars {
    ($($type:ty),*) => {$(
        impl Scalar for $type {
            fn word(self) -> (u64, usize) {
                let mut word = [0; 8];
                word[..size_of::<Self>()].copy_from_slice(&self.to_le_bytes());
                (u64::from_le_bytes(word), size_of::<Self>())
            }
        }
    )*};
}
scalars!(i32, u32, i64, u64, f32, f64);

/// Asks until CUDA says that there is no such parameter: the call for their number is younger than the driver may be.
fn parameter_sizes(function: &CudaFunction) -> Result<Vec<usize>, result::DriverError> {
    let mut sizes = Vec::new();
    loop {
        let (mut offset, mut bytes) = (0, 0);
        // SAFETY: the function is loaded, and both pointers are to integers that outlive the call.
        let status = unsafe { sys::cuFuncGetParamInfo(function.cu_function(), sizes.len(), &mut offset, &mut bytes) };
        match status {
            sys::CUresult::CUDA_ERROR_INVALID_VALUE => return Ok(sizes),
            status => status.result()?,
        }
        sizes.push(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::fault_of;

    #[test]
    fn arguments_lie_as_their_kernel_reads_them() {
        let arguments = Arguments::new().scalar(-1i32).scalar(1.5f32).words(&[1, 2, 3]).scalar(2.5f64);
        let sizes: Vec<usize> = arguments.list.iter().map(|argument| argument.bytes).collect();
        assert_eq!(sizes, [4, 4, 24, 8]);
        assert_eq!(arguments.words, [0xffff_ffff, u64::from(1.5f32.to_bits()), 1, 2, 3, 2.5f64.to_bits()]);
        let first: Vec<usize> = arguments.list.iter().map(|argument| argument.first_word).collect();
        assert_eq!(first, [0, 1, 2, 5]);
        assert_eq!(arguments.pointers()[3], arguments.words[5..].as_ptr().cast_mut().cast());
    }

    #[test]
    fn a_tensor_argument_is_its_address_and_knows_its_device() {
        let tensor = Tensor::zeros([3], (tch::Kind::Float, Device::Cpu));
        let arguments = Arguments::new().tensor(&tensor.narrow(0, 1, 2));
        assert_eq!(arguments.words, [tensor.data_ptr() as u64 + 4]);
        assert_eq!(arguments.list[0].device, Some(Device::Cpu));
    }

    #[test]
    fn a_device_that_is_not_there_is_a_typed_fault() {
        let program = Program { file: "adamw.cu", defines: Vec::new() };
        for device in [Device::Mps, Device::Cuda(63)] {
            let error = load(device, &program).err().unwrap();
            assert!(matches!(fault_of(&error), Some(Fault::NotAvailable { .. })), "{error:#}");
        }
    }
}
