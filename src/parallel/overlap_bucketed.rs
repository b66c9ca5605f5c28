//! Overlapped data parallelism in buckets: a bucket of gradients is averaged in one message as soon as backward has all of
//! them, while backward goes on to the buckets before it.

use anyhow::Result;
use tch::Tensor;

use super::bucket::{Bucket, buckets};
use super::ordered_launch::OrderedLaunch;
use super::{DataParallel, Options, Strategy, broadcast_parameters, trained};
use crate::collective::{Op, Shared};

pub const STRATEGY: Strategy = Strategy { name: "overlap_bucketed", construct };

fn construct(parameters: &[(String, Tensor)], collective: &Shared, options: &Options) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    let (buckets, collective) = (buckets(&trained(parameters), options.bucket_bytes()?)?, collective.clone());
    let launch = move |_, bucket: &Bucket| {
        bucket.collect()?;
        collective.all_reduce_async(&bucket.flat, Op::Average)
    };
    Ok(Box::new(OrderedLaunch::new(buckets, launch)?))
}
