//! Our own CUDA kernels: compiled at run time by NVRTC, kept in a cache, launched on libtorch's stream.
//!
//! The walk of a kernel: a [`Program`] names a file of `kernels/` and its macros; [`Compiler::build`] makes a cubin of
//! it for an [`Arch`], and needs no GPU for that; [`load`] puts the cubin into the context that libtorch uses;
//! [`Kernel::launch`], or a [`Pass`] of several that overlap, runs its entry points where libtorch's own kernels of the
//! calling thread go. On the processor the same walk ends in the [`emulator`], so that every kernel is tested on machines
//! without a GPU.

mod arch;
mod cache;
mod device;
pub mod emulator;
mod jit;
mod lane;
mod launch;
mod nvrtc;
mod pass;
mod report;
mod tensor_map;
mod toolchain;

pub use arch::Arch;
pub use cache::Cache;
pub use device::{compute_capability, multiprocessors};
pub use jit::{Built, Compiler, Origin, Program};
pub use lane::{Event, Stream, make_current};
pub use launch::{Arguments, Geometry, Kernel, Module, Scalar, load, word_of};
pub use pass::Pass;
pub use report::Resources;
pub use tensor_map::TensorMap;
pub use toolchain::compiler_version;
