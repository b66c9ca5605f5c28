//! Naive data parallelism: once backward is done, one blocking all-reduce for each parameter's gradient.

use anyhow::{Context as _, Result};
use tch::Tensor;

use super::{DataParallel, Options, Strategy, broadcast_parameters, gradient_of, trained};
use crate::collective::{Op, Shared};

pub const STRATEGY: Strategy = Strategy { name: "naive", construct };

struct Naive {
    trained: Vec<(String, Tensor)>,
    collective: Shared,
}

fn construct(
    parameters: &[(String, Tensor)],
    collective: &Shared,
    _options: &Options,
) -> Result<Box<dyn DataParallel>> {
    broadcast_parameters(parameters, collective)?;
    Ok(Box::new(Naive { trained: trained(parameters), collective: collective.clone() }))
}

impl DataParallel for Naive {
    fn finish_gradient_synchronization(&mut self) -> Result<()> {
        for (name, parameter) in &self.trained {
            let gradient = gradient_of(name, parameter)?;
            self.collective
                .all_reduce(&gradient, Op::Average)
                .with_context(|| format!("averaging the gradient of {name}"))?;
        }
        Ok(())
    }
}
