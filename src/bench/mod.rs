//! Measuring code that several problems share.

/// All-reduces of known values, timed.
pub mod all_reduce;
/// Inputs and results of attention, and its passes as CUDA graphs.
pub mod attention;
/// The memory of plain attention, by formula.
pub mod attention_memory;
/// Data-parallel training steps, timed under several strategies.
pub mod ddp_step;
/// The device of a profile.
pub mod device;
/// Floating-point types and their rounding in software.
pub mod dtype;
/// Errors relative to the norm.
pub mod errors;
/// Time per call and bandwidth of the ranks' connection.
pub mod interconnect;
/// Variants timed in turns.
pub mod interleave;
/// Facts and peak speeds of this machine.
pub mod machine;
/// A model and random batches for it.
pub mod model_bench;
/// What NVML reports.
pub mod nvml;
/// The Python process that runs PyTorch's side.
pub mod peer;
/// Triton's `do_bench`.
pub mod timing;
/// Error bounds of timed results.
pub mod tolerance;
/// Training steps of one device, timed.
pub mod training_step;
/// Operations and bytes of attention.
pub mod work;
