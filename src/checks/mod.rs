//! Checks that several problems share, and what they need: golden cases, official protocols, mutants, fault tests, edge cases.

/// Inputs and tolerances of the checks of attention.
pub mod attention;
/// What a GPU has shown of the attention kernels.
pub mod attestation;
/// What every data-parallel trainer must pass.
pub mod data_parallel;
/// What must hold before a data-parallel step is timed.
pub mod ddp_step;
/// What only a GPU shows.
pub mod device;
/// Several dtypes in one model, missing gradients, models that differ.
pub mod edge_cases;
/// A rank that fails in a way that the caller names.
pub mod fault_test;
/// Runs in which a rank fails, and what must be left of them.
pub mod faulty_runs;
/// The attention kernels in the emulator.
pub mod flash_kernels;
/// A fused step on ranks.
pub mod fused_ranks;
/// Expected values from files.
pub mod golden;
/// A network on one rank with whatever trains it.
pub mod learner;
/// Broken strategies and networks that the checks must catch.
pub mod mutants;
/// The official data-parallel test.
pub mod protocol;
/// Values, order and records of every collective.
pub mod selftest;
/// The sharded optimizers that are tested, by name.
pub mod sharded_optimizers;
/// The official sharded-optimizer test.
pub mod sharded_protocol;
/// The official protocols and the golden cases, for a subject.
pub mod subject;
