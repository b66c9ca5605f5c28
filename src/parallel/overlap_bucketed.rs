//! Overlapped data parallelism in buckets: a bucket of gradients is averaged in one message as soon as backward has all of
//! them, while backward goes on to the buckets before it.

use anyhow::Result;

use super::bucket::{Bucket, buckets};
use super::ordered_launch::OrderedLaunch;
use super::{DataParallel, Replica, Strategy, broadcast_parameters, trained};
use crate::collective::Op;

pub const STRATEGY: Strategy = Strategy { name: "overlap_bucketed", construct };

fn construct(Replica { parameters, collective, options }: Replica) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    let (buckets, collective) = (buckets(&trained(parameters), options.bucket_bytes()?)?, collective.clone());
    let launch = move |_, bucket: &Bucket| {
        bucket.collect()?;
        collective.all_reduce_async(&bucket.flat, Op::Average)
    };
    Ok(Box::new(OrderedLaunch::new(buckets, launch)?))
}
