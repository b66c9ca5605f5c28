//! The notes of part (a): how many matrix products a forward pass calls and runs, and on which units.

use anyhow::Result;
use serde::Serialize;

use super::super::kernels::Units;
use super::Profiled;
use crate::harness::answer::{Answer, Claim};

/// Counts over all profiles.
#[derive(Serialize)]
pub struct MatmulCounts {
    /// Forward passes that call 9 L + 1 products and run as many kernels, and the most kernels beyond that.
    run: usize,
    split: u64,
    #[serde(skip)]
    profiles: usize,
    /// Those that call as many.
    #[serde(skip)]
    call: usize,
    /// Names of matmul kernels: with tensor cores, and of units that they do not tell.
    #[serde(skip)]
    tensor_cores: usize,
    #[serde(skip)]
    unknown: usize,
}

/// 9 L + 1: seven linear layers and two products of attention in each layer, and the output layer.
fn expected(profile: &Profiled) -> u64 {
    9 * profile.params().size.size().num_layers.unsigned_abs() + 1
}

impl MatmulCounts {
    pub fn of(profiles: &[Profiled]) -> Self {
        let call = |p: &&Profiled| p.row.matmuls.operators == expected(p);
        let run = |p: &&Profiled| call(p) && p.row.matmuls.kernels == expected(p);
        let names = |units| {
            let kernels = profiles.iter().flat_map(|profile| &profile.row.matmul_kernels);
            kernels.filter(|kernel| kernel.units == units).count()
        };
        let beyond = |p: &Profiled| p.row.matmuls.kernels.saturating_sub(expected(p));
        Self {
            profiles: profiles.len(),
            call: profiles.iter().filter(call).count(),
            run: profiles.iter().filter(run).count(),
            split: profiles.iter().map(beyond).max().unwrap_or(0),
            tensor_cores: names(Units::TensorCores),
            unknown: names(Units::Unknown),
        }
    }

    pub fn claims(&self, answer: &mut Answer) -> Result<()> {
        let passes = self.profiles;
        answer.claim(Claim::all("calls-are-9L-plus-1", "forward passes with as many calls", self.call, passes))?;
        answer.claim(Claim::all("products-are-9L-plus-1", "with as many kernels, too", self.run, passes))?;
        let claim = Claim::new("no-tf32", self.tensor_cores == 0);
        let claim = claim.count("names of matmul kernels that use tensor cores", self.tensor_cores);
        answer.claim(claim.count("names that do not tell", self.unknown))
    }
}
