//! A declarative test-and-report harness for Stanford CS336 Assignment 2; the modules stand in the order to read them.

/// Faults that callers tell apart: out of memory, not available.
pub mod error;
/// JSON from outside, read with errors that print as one line.
pub mod json;
/// Text from outside, made safe to print.
pub mod printable;
/// The folder that a checkout or a bundle lies in.
pub mod root;
/// Units, and numbers as people read them.
pub mod units;

/// Child processes: jobs and replies as lines, bounded waits, and no process left behind.
pub mod process;

/// libtorch where the `tch` crate has no call for it: autograd functions, hooks, profiler, memory, CUDA graphs, Gloo.
pub mod torch;

/// CUDA kernels: compiled at run time, launched, and emulated on the CPU.
pub mod cuda;

/// Scaled dot-product attention in several implementations behind one trait.
pub mod attention;
/// The handout's Transformer, its loss, its optimizer and its memory by formula.
pub mod model;

/// Communication between the processes of one run, over Gloo and NCCL.
pub mod collective;
/// Data parallelism: one strategy a file.
pub mod parallel;

/// The operators of the Python wheel.
pub mod python;

/// Suites, plans, runs, records, statistics and grades; it knows no tensor and no problem.
pub mod harness;
/// From answers and templates to Markdown, PDF and HTML.
pub mod report;

/// Somebody else's adapters in a confined Python process.
pub mod subject;

/// What several problems measure with.
pub mod bench;

/// Checks that several problems share.
pub mod checks;

/// The registry, and one module for each problem of the handout.
pub mod problems;

/// The command line, one file for each verb.
pub mod cli;
