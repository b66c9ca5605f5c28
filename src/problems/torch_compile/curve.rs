//! The loss of many steps on one stream of batches: our fused step beside autograd's, and autograd's with the batches in other
//! orders, which tells how much of a difference means nothing.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::best;
use crate::attention::ImplementationName;
use crate::bench::device::empty_cache;
use crate::bench::model_bench::{Batch, ModelBench};
use crate::bench::training_step::{Execution, handout};
use crate::harness::record::Profile;
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::{AdamWOptions, zero_grad};
use crate::model::{Config, FusedStep, Gradients, Precision, SizeName};
use crate::torch::Generator;
use crate::torch::autograd::backward;
use crate::torch::random::SEED;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    /// Small enough for the loss to fall within the steps.
    pub vocab_size: i64,
    pub dtype: Precision,
    /// Of all runs.
    pub attention: ImplementationName,
    /// As many as there are batches; each run sees each batch once.
    pub steps: usize,
    /// Other orders of the batches, a run by autograd each.
    pub orders: usize,
}

/// The losses of each run, step by step, and how far weights end apart: the norm of their difference over that of the way that
/// autograd's went from the start.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub autograd: Vec<f32>,
    pub fused: Vec<f32>,
    /// Autograd's, one run for each order.
    pub others: Vec<Vec<f32>>,
    pub fused_apart: f64,
    /// Of each other order.
    pub others_apart: Vec<f64>,
}

impl Params {
    fn config(&self) -> Config {
        Config::of_size(self.size.size(), self.vocab_size, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        for (key, value, least, most) in [("steps", self.steps, 2, 2000), ("orders", self.orders, 2, 20)] {
            ensure!((least..=most).contains(&value), "{key} is {value}: it must lie in {least}..{most}");
        }
        Ok(())
    }

    /// One run at a time, beside three copies of the weights.
    pub fn predicted_bytes(&self, profile: Profile) -> u64 {
        let Self { size, context_length, batch_size, dtype, attention, .. } = *self;
        let step = best::Params {
            size,
            context_length,
            batch_size,
            dtype,
            attention,
            execution: Execution::Eager,
            rounds: 1,
            warmup: 1,
            iterations: 1,
            energy_s: 0.0,
            autotune_limit_s: 0,
        };
        step.training_step().predicted_bytes(profile) + 3 * 4 * self.config().num_parameters()
    }

    /// Sequences in which each token follows from the one before it up to two bits of chance, so that there is something to learn.
    fn batches(&self, device: Device) -> Result<Vec<Batch>> {
        let generator = Generator::new(device, SEED)?;
        let (batch, seq) = (self.batch_size, self.context_length);
        let batch = |_| -> Result<Batch> {
            let chance = generator.randint(0, 4, &[batch, seq + 1], Kind::Int64)?;
            let mut tokens = vec![generator.randint(0, self.vocab_size, &[batch, 1], Kind::Int64)?];
            for at in 1..=seq {
                let last = &tokens[at as usize - 1];
                let next = last.f_mul_scalar(5)?.f_add_scalar(7)?.f_add(&chance.f_narrow(1, at, 1)?)?;
                tokens.push(next.f_remainder(self.vocab_size)?);
            }
            let tokens = Tensor::f_cat(&tokens, 1)?;
            let part = |from| tokens.f_narrow(1, from, seq)?.f_contiguous();
            Ok(Batch { tokens: part(0)?, targets: part(1)? })
        };
        (0..self.steps).map(batch).collect()
    }

    /// Order 0 is that of the stream.
    fn order(&self, order: usize) -> Result<Vec<usize>> {
        if order == 0 {
            return Ok((0..self.steps).collect());
        }
        let shuffled = Generator::new(Device::Cpu, SEED + order as i64)?.randperm(self.steps as i64)?;
        Ok(Vec::<i64>::try_from(shuffled)?.into_iter().map(|at| at as usize).collect())
    }
}

pub fn measure(p: &Params, device: Device) -> Result<Row> {
    let batches = p.batches(device)?;
    let start = weights(&bench(p, device)?)?;
    let autograd = autograd(p, device, &batches, 0)?;
    let way = norm_of_difference(&autograd.weights, &start)?;
    ensure!(way > 0.0, "{} steps left the weights where they were", p.steps);
    let apart = |run: &Trained| Ok::<_, anyhow::Error>(norm_of_difference(&run.weights, &autograd.weights)? / way);
    let fused = fused(p, device, &batches)?;
    let fused_apart = apart(&fused)?;
    let (mut others, mut others_apart) = (Vec::new(), Vec::new());
    for order in 1..=p.orders {
        let other = self::autograd(p, device, &batches, order)?;
        others_apart.push(apart(&other)?);
        others.push(other.losses);
    }
    Ok(Row { autograd: autograd.losses, fused: fused.losses, others, fused_apart, others_apart })
}

/// What a run leaves.
struct Trained {
    losses: Vec<f32>,
    /// All parameters one after the other.
    weights: Tensor,
}

/// The same model every time.
fn bench(p: &Params, device: Device) -> Result<ModelBench> {
    ModelBench::new(&p.config(), p.attention, p.batch_size, p.dtype, device)
}

fn autograd(p: &Params, device: Device, batches: &[Batch], order: usize) -> Result<Trained> {
    let bench = bench(p, device)?;
    let mut optimizer = adamw_for(device, AdamWOptions::default())?;
    let mut losses = Vec::with_capacity(batches.len());
    for at in p.order(order)? {
        let loss = bench.loss(&batches[at])?;
        backward(&loss)?;
        optimizer.step(bench.parameters())?;
        zero_grad(bench.parameters())?;
        losses.push(loss.f_detach()?);
    }
    trained(&bench, &losses)
}

fn fused(p: &Params, device: Device, batches: &[Batch]) -> Result<Trained> {
    let mut bench = bench(p, device)?;
    let options = AdamWOptions::default();
    let step = FusedStep::new(&mut bench.model, p.batch_size, p.dtype, Gradients::Passing, options)?;
    let train = |batch: &Batch| step.train(&bench.model, &batch.tokens, &batch.targets);
    let losses = batches.iter().map(train).collect::<Result<Vec<_>>>()?;
    trained(&bench, &losses)
}

fn trained(bench: &ModelBench, losses: &[Tensor]) -> Result<Trained> {
    let losses: Vec<f32> = Tensor::f_stack(losses, 0)?.f_to_kind(Kind::Float)?.try_into()?;
    ensure!(losses.iter().all(|loss| loss.is_finite()), "a loss is not finite: {losses:?}");
    let weights = weights(bench)?;
    empty_cache(bench.device)?;
    Ok(Trained { losses, weights })
}

fn weights(bench: &ModelBench) -> Result<Tensor> {
    let flat = bench.parameters().iter().map(|(_, parameter)| parameter.f_detach()?.f_flatten(0, -1));
    Ok(Tensor::f_cat(&flat.collect::<Result<Vec<_>, _>>()?, 0)?)
}

fn norm_of_difference(a: &Tensor, b: &Tensor) -> Result<f64> {
    Ok(a.f_sub(b)?.f_norm_scalaropt_dtype(2, Kind::Double)?.f_double_value(&[])?)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn params(dtype: &str) -> Params {
        let params = json!({"size": "tiny", "context_length": 16, "batch_size": 1, "vocab_size": 64, "dtype": dtype,
            "attention": "naive", "steps": 4, "orders": 2});
        serde_json::from_value(params).unwrap()
    }

    #[test]
    fn the_fused_step_follows_autograd_through_the_emulator() {
        for (dtype, most) in [("float32", 1e-4), ("bfloat16", 5e-2)] {
            let p = params(dtype);
            p.validate().unwrap();
            let row = measure(&p, Device::Cpu).unwrap();
            assert_eq!((row.autograd.len(), row.fused.len(), row.others.len()), (4, 4, 2));
            for (ours, theirs) in row.fused.iter().zip(&row.autograd) {
                assert!((ours - theirs).abs() < most, "{dtype}: {ours} {theirs}");
            }
            let nearest = row.others_apart.iter().copied().fold(f64::INFINITY, f64::min);
            assert!(row.fused_apart < nearest, "{dtype}: {row:?}");
        }
    }

    #[test]
    fn every_order_has_each_batch_once_and_the_first_is_the_streams() {
        let p = Params { steps: 50, ..params("float32") };
        assert_eq!(p.order(0).unwrap(), (0..50).collect::<Vec<_>>());
        let mut shuffled = p.order(1).unwrap();
        assert_ne!(shuffled, p.order(2).unwrap());
        shuffled.sort_unstable();
        assert_eq!(shuffled, p.order(0).unwrap());
        let Batch { tokens, targets } = &p.batches(Device::Cpu).unwrap()[0];
        assert_eq!(tokens.narrow(1, 1, 15), targets.narrow(1, 0, 15), "a target is the next token");
        assert!(Params { orders: 1, ..p }.validate().unwrap_err().to_string().contains("orders"));
    }
}
