//! libtorch beyond `tch`: a small C++ shim and the safe functions over it.

mod bridge;

pub mod autograd;
pub mod gloo;
pub mod hooks;

pub use autograd::{backward, backward_from};
