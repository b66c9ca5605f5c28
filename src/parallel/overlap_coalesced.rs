//! Overlapped data parallelism in buckets without a copy: one coalesced all-reduce averages a bucket's gradients where
//! backward left them, while backward goes on to the buckets before it.

use anyhow::Result;
use tch::Tensor;

use super::bucket::planned;
use super::ordered_launch::OrderedLaunch;
use super::{DataParallel, Replica, Strategy, broadcast_parameters, gradient_of, trained};
use crate::collective::Op;

pub const STRATEGY: Strategy = Strategy { name: "overlap_coalesced", construct };

fn construct(Replica { parameters, collective, options }: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    let (units, collective) = (planned(&trained(parameters), options.bucket_bytes()?), collective.clone());
    let launch = move |_, unit: &Vec<(String, Tensor)>| {
        let gradients = unit.iter().map(|(name, parameter)| gradient_of(name, parameter));
        collective.all_reduce_coalesced_async(&gradients.collect::<Result<Vec<_>>>()?, Op::Average)
    };
    Ok(Box::new(OrderedLaunch::new(units, launch)?))
}
