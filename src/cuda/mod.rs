//! Our own CUDA kernels: compiled at run time by NVRTC, kept in a cache, launched on libtorch's stream.
//!
//! The steps to a launch: a [`Program`] names a file of `kernels/` and its macros. [`Compiler::build`] compiles it to a
//! cubin for an [`Arch`], which needs no GPU. [`load`] loads the cubin into the context that libtorch uses.
//! [`Kernel::launch`], or [`DependentLaunches`] of several that overlap, runs its entry points on the calling thread's
//! libtorch stream. On the CPU the [`emulator`] runs the kernel instead, so that every kernel is tested on machines
//! without a GPU.
//!
//! A kernel's parameters are a struct ([`DeviceStruct`]) that borrows the tensors it points to.

mod cache;
mod counters;
mod dependent_launch;
mod device;
pub mod emulator;
mod jit;
mod launch;
mod matmul;
mod nvrtc;
mod params;
mod resources;
mod stream;
mod tensor_map;
mod toolchain;
mod trusted_folder;

pub use cache::Cache;
pub use counters::{Counters, clear_word, take_clear};
pub use dependent_launch::DependentLaunches;
pub use device::{Arch, compute_capability, most_shared_bytes, multiprocessors};
pub use jit::{Built, Compiler, Origin, Program, kernel_cache, use_package};
pub use launch::{Kernel, LaunchConfig, Module, load};
pub use matmul::{Choice, MatrixProducts};
pub(crate) use params::kernel_params;
#[cfg(test)]
pub(crate) use params::layout;
pub use params::{Address, DeviceStruct, Field, FieldType};
pub use resources::Resources;
pub use stream::{Event, Stream, is_capturing, least_seconds, make_current};
pub use tensor_map::TensorMap;
pub use toolchain::compiler_version;
