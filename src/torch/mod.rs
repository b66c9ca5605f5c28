//! libtorch beyond `tch`: a small C++ shim and the safe functions over it.

mod bridge;
mod library;

pub mod allocator_stats;
pub mod autocast;
pub mod autograd;
pub mod clock;
pub mod data_ptr;
pub mod fused_attention;
pub mod gloo;
pub mod graph;
pub mod hooks;
pub mod memory;
pub mod memory_history;
pub mod nvtx;
pub mod profiler;
pub mod random;
pub mod store;
pub mod stream;
pub mod trace;

pub use autocast::autocast;
pub use autograd::{backward, backward_from};
pub use library::{
    AllowTf32, allow_tf32, allowing_tf32, build_config, cpu_capability, cuda_device, cuda_version, cudnn_version,
    library_folder, load_cuda, load_shared_library, num_threads, parallel_info, set_allow_tf32, set_num_threads,
    version,
};
pub use random::Generator;
