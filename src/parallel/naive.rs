//! Naive data parallelism: once backward is done, one blocking all-reduce for each parameter's gradient.

use anyhow::{Context as _, Result};
use tch::Tensor;

use super::{DataParallel, Replica, Strategy, broadcast_parameters, gradient_of, trained};
use crate::collective::Op;

pub const STRATEGY: Strategy = Strategy { name: "naive", construct };

fn construct(Replica { parameters, collective, .. }: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    let (trained, collective) = (trained(parameters), collective.clone());
    let average = move |(name, parameter): &(String, Tensor)| {
        let averaged = collective.all_reduce(&gradient_of(name, parameter)?, Op::Average);
        averaged.with_context(|| format!("averaging the gradient of {name}"))
    };
    Ok(Box::new(move || trained.iter().try_for_each(&average)))
}
