//! Flat data parallelism: after backward, one message carries all gradients, so that the cost of starting a collective
//! is paid once instead of once for each parameter.

use anyhow::{Context as _, Result};
use tch::Tensor;

use super::bucket::{Bucket, unbounded};
use super::{DataParallel, Options, Strategy, broadcast_parameters, trained};
use crate::collective::{Op, Shared};

pub const STRATEGY: Strategy = Strategy { name: "flat", construct };

struct Flat {
    /// One, unless the model mixes dtypes: a message has one dtype.
    buckets: Vec<Bucket>,
    collective: Shared,
}

fn construct(
    parameters: &[(String, Tensor)],
    collective: &Shared,
    _options: &Options,
) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    Ok(Box::new(Flat { buckets: unbounded(&trained(parameters))?, collective: collective.clone() }))
}

impl DataParallel for Flat {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        for bucket in &self.buckets {
            bucket.collect()?;
            self.collective.all_reduce(&bucket.flat, Op::Average).context("averaging all gradients at once")?;
        }
        Ok(())
    }
}
