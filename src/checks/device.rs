//! Checks that need a GPU, of what several problems share; `problems::DEVICE_CHECKS` lists them beside the problems' own.

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
/// Ranks on two GPUs.
pub mod nccl_ranks;

/// The libraries that results depend on; one that is not here is left out.
pub fn versions() -> BTreeMap<&'static str, String> {
    let versions = [("torch", Some(torch::version())), ("nccl", nccl::version().ok())];
    versions.into_iter().filter_map(|(name, version)| Some((name, version?))).collect()
}

/// The error of what must fail.
pub fn error_of<T>(outcome: Result<T>) -> Result<Error> {
    outcome.err().context("it succeeded and must fail")
}
