//! libtorch beyond `tch`: a small C++ shim and the safe functions over it.

use std::sync::{Mutex, MutexGuard, PoisonError};

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
pub mod operator;
pub mod profiler;
pub mod random;
pub mod safetensors;
pub mod store;
pub mod stream;
pub mod trace;

pub use autocast::autocast;
pub use autograd::{backward, backward_from};
pub use library::{
    allow_tf32, allowing_tf32, cpu_capability, cuda_device, cuda_version, cudnn_version, library_folder, load_cuda,
    load_shared_library, version,
};
pub use random::Generator;

/// Locks what a panic may have poisoned, because the panic is reported elsewhere.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
