//! Overlapped data parallelism: each parameter's gradient is averaged as soon as backward has it, while backward goes on
//! to the parameters before it.

use anyhow::Result;
use tch::Tensor;

use super::ordered_launch::OrderedLaunch;
use super::{DataParallel, Options, Strategy, broadcast_parameters, gradient_of, trained};
use crate::collective::{Op, Shared};

pub const STRATEGY: Strategy = Strategy { name: "overlap_individual_parameters", construct };

fn construct(
    parameters: &[(String, Tensor)],
    collective: &Shared,
    _options: &Options,
) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    let mut last_first = trained(parameters);
    last_first.reverse();
    let units: Vec<_> = last_first.iter().map(|(name, p)| vec![(name.clone(), p.shallow_clone())]).collect();
    let collective = collective.clone();
    let launch = move |unit: usize| {
        let (name, parameter) = &last_first[unit];
        collective.all_reduce_async(&gradient_of(name, parameter)?, Op::Average)
    };
    Ok(Box::new(OrderedLaunch::new(&units, Box::new(launch))?))
}
