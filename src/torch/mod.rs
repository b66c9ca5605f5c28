//! libtorch beyond `tch`: a small C++ shim and the safe functions over it.

mod bridge;
#[cfg(test)]
mod cuda_tests;
mod library;

pub mod autocast;
pub mod autograd;
pub mod gloo;
pub mod hooks;
pub mod memory;
pub mod meter;
pub mod stream;

pub use autocast::autocast;
pub use autograd::{backward, backward_from};
pub use library::{
    AllowTf32, allow_tf32, build_config, cpu_capability, cuda_device, cuda_version, cudnn_version, load_cuda,
    num_threads, parallel_info, set_allow_tf32, set_num_threads, version,
};
