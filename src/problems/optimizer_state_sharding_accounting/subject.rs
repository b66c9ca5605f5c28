//! A subject's sharded optimizer under PyTorch's DDP, in turns with ours.

use anyhow::Result;

use super::BESIDE_SHARDED;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::beside::{Beside, BesideOurs, answer};
use crate::harness::problem::{Measured, Problem};
use crate::model::optim::AdamWOptions;
use crate::parallel::trainer::SHARDED_OPTIMIZER;
use crate::subject::rank::{Adapter, OptimizerClass};

pub const PROBLEM: Problem = Problem {
    name: "optimizer_state_sharding_accounting",
    answers: &["b"],
    checks: &[],
    measured: Some(Measured::of::<Beside<Sharded>>()),
    answer: |records, _| answer::answer(records, |params| params.dtype.name().into()),
    reads: &[],
};

pub struct Sharded;

impl BesideOurs for Sharded {
    const STRATEGIES: &'static [&'static str] = &[BESIDE_SHARDED, SHARDED_OPTIMIZER];

    fn adapter(_: &Params) -> Adapter {
        Adapter::Sharded(OptimizerClass::AdamW, AdamWOptions::default())
    }

    fn validate(params: &Params) -> Result<()> {
        params.validate()
    }
}
