//! GPU checks of code that several problems share. `problems::DEVICE_CHECKS` lists them and the problems' own checks.

use std::collections::BTreeMap;

use anyhow::{Context as _, Error, Result};

use crate::collective::nccl;
use crate::torch;

/// The fused AdamW.
pub mod adamw;
/// Attention by our kernels.
pub mod attention;
/// Streams, events and the management library.
pub mod cuda;
/// CUDA graphs.
pub mod graphs;
/// libtorch on a GPU.
pub mod libtorch;
/// Two ranks over NCCL.
pub mod nccl_ranks;

/// The versions of libraries that results depend on. Missing libraries are left out.
pub fn versions() -> BTreeMap<&'static str, String> {
    let versions = [("torch", Some(torch::version())), ("nccl", nccl::version().ok())];
    versions.into_iter().filter_map(|(name, version)| Some((name, version?))).collect()
}

/// The error of a call that must fail.
pub fn error_of<T>(outcome: Result<T>) -> Result<Error> {
    outcome.err().context("it succeeded and must fail")
}
