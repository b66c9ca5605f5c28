//! Flat data parallelism: after backward, one message carries all gradients, so that the cost of starting a collective
//! is paid once instead of once for each parameter.

use anyhow::{Context as _, Result};

use super::bucket::{Bucket, buckets};
use super::{DataParallel, Replica, Strategy, broadcast_parameters, trained};
use crate::collective::Op;

pub const STRATEGY: Strategy = Strategy { name: "flat", construct };

fn construct(Replica { parameters, collective, .. }: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    // One bucket, unless the model mixes dtypes: a message has one dtype.
    let (buckets, collective) = (buckets(&trained(parameters), f64::INFINITY)?, collective.clone());
    let average = move |bucket: &Bucket| {
        bucket.collect()?;
        collective.all_reduce(&bucket.flat, Op::Average).context("averaging all gradients at once")
    };
    Ok(Box::new(move || buckets.iter().try_for_each(&average)))
}
