//! Overlapped data parallelism: each parameter's gradient is averaged as soon as backward has it, while backward goes on
//! to the parameters before it.

use anyhow::Result;
use tch::Tensor;

use super::ordered_launch::OrderedLaunch;
use super::{DataParallel, Replica, Strategy, broadcast_parameters, gradient_of, trained};
use crate::collective::Op;

pub const STRATEGY: Strategy = Strategy { name: "overlap_individual_parameters", construct };

fn construct(Replica { parameters, collective, .. }: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    let (last_first, collective) = (trained(parameters).into_iter().rev(), collective.clone());
    let launch = move |_, [(name, parameter)]: &[(String, Tensor); 1]| {
        collective.all_reduce_async(&gradient_of(name, parameter)?, Op::Average)
    };
    Ok(Box::new(OrderedLaunch::new(last_first.map(|parameter| [parameter]).collect(), launch)?))
}
