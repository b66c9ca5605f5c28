//! Measuring code that several problems share.
//!
//! Calls are timed in one of three ways: a kernel's many calls by [`timing::TimingBench`], an operation that Python times too
//! by [`timing::lap`], and the parts of a step by [`crate::torch::clock::Stopwatch`], on the host's clock and the device's.
//! Variants are compared by [`interleave`]: each takes its turn in every round. What they cost is recorded as samples with
//! their least work, which the harness compares with the peaks of [`machine`].

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
/// Joules a call, and the clock meanwhile.
pub mod energy;
/// Errors relative to the norm.
pub mod errors;
/// Time per call and bandwidth of the ranks' connection.
pub mod interconnect;
/// Variants timed in turns.
pub mod interleave;
/// Names of kernels, and their classes.
pub mod kernels;
/// Facts and peak speeds of this machine.
pub mod machine;
/// A model and random batches for it.
pub mod model_bench;
/// What NVLink can carry at most.
pub mod nvlink;
/// What NVML reports.
pub mod nvml;
/// The Python process that runs PyTorch's side.
pub mod peer;
/// A training step's time by class of kernel.
pub mod step_classes;
/// Whole steps on several ranks, with their collectives in one CUDA graph.
pub mod steps_on_ranks;
/// A call between two synchronisations, and Triton's `do_bench`.
pub mod timing;
/// Error bounds of timed results.
pub mod tolerance;
/// Training steps of one device, timed.
pub mod training_step;
/// Operations and bytes of attention.
pub mod work;
