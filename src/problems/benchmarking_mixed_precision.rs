//! `benchmarking_mixed_precision`: which types autocast chooses, why layer norm is special, and what bfloat16 gains.

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::benchmarking_script::{self, BenchmarkingScript};
use super::mixed_precision_accumulation::format::Dtype;
use crate::attention::Choice;
use crate::harness::problem::{Check, Measure, Measured, Problem, Verdict};
use crate::harness::record::Profile;
use crate::model::optim::zero_grad;
use crate::model::{Config, Precision, Transformer};

pub mod dtypes;
pub mod layer_norm;

pub const PROBLEM: Problem = Problem {
    name: "benchmarking_mixed_precision",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "autocast_keeps_its_promises", part: "a", run: || dtypes::check_promises(dtypes::observe) },
        Check { name: "autocast_dtypes_on_cuda", part: "a", run: || dtypes::check_cuda(dtypes::observe) },
        Check { name: "layer_norm_by_rounding", part: "b", run: || layer_norm::check(layer_norm::normalise) },
        Check { name: "bfloat16_option", part: "c", run: || check_option(benchmarking_script::loss) },
    ],
    measured: Some(Measured::of::<MixedPrecision>()),
    facts,
};

/// One case: the toy model of part (a), or a timed model of part (c).
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "measure", rename_all = "snake_case", deny_unknown_fields)]
pub enum Params {
    Dtypes { autocast: Dtype },
    Timing(benchmarking_script::Params),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Row {
    Dtypes(dtypes::Observed),
    Timing(Box<benchmarking_script::Row>),
}

struct MixedPrecision;

impl Measure for MixedPrecision {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 2;

    fn validate(params: &Params) -> Result<()> {
        match params {
            Params::Dtypes { autocast } => {
                ensure!(*autocast != Dtype::Float32, "autocast is float32; it must be float16 or bfloat16");
                Ok(())
            }
            Params::Timing(params) => BenchmarkingScript::validate(params),
        }
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        match params {
            Params::Dtypes { .. } => None,
            Params::Timing(params) => BenchmarkingScript::predicted_bytes(params, profile),
        }
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        match params {
            Params::Dtypes { autocast } => {
                let device = super::device_for(profile)?;
                Ok(Row::Dtypes(dtypes::observe(*autocast, device)?))
            }
            Params::Timing(params) => Ok(Row::Timing(Box::new(BenchmarkingScript::measure(params, profile)?))),
        }
    }
}

/// The worked layer norms of part (b), and for part (a) what CUDA is known to give.
fn facts() -> Result<Value> {
    Ok(json!({
        "layer_norm": layer_norm::facts(),
        "on_cuda": {"float16": dtypes::on_cuda(Dtype::Float16), "bfloat16": dtypes::on_cuda(Dtype::Bfloat16)},
        "formats": Dtype::ALL.map(|d| json!({"name": d.name(), "significand_bits": d.format().significand_bits,
                                             "largest": d.format().largest})),
    }))
}

/// What the benchmark runs; a parameter of the check, so that tests can hand it a wrong one.
pub type Loss = fn(&Transformer, &Tensor, &Tensor, Precision) -> Result<Tensor>;

/// The option must change the arithmetic, but only as much as 8 binary digits explain, and leave gradients in float32.
pub fn check_option(loss: Loss) -> Result<Verdict> {
    let config = Config {
        vocab_size: 128,
        context_length: 32,
        d_model: 64,
        num_layers: 2,
        num_heads: 4,
        d_ff: 128,
        rope_theta: 10_000.0,
    };
    let model = Transformer::new(&config, Device::Cpu, 7, Choice::Naive)?;
    let random = || Tensor::f_randint(config.vocab_size, [4, config.context_length], (Kind::Int64, Device::Cpu));
    let (tokens, targets) = (random()?, random()?);
    let run = |dtype| -> Result<(f64, Tensor)> {
        zero_grad(model.parameters())?;
        let loss = loss(&model, &tokens, &targets, dtype)?;
        crate::torch::backward(&loss)?;
        let mut gradients = Vec::new();
        for (name, parameter) in model.parameters() {
            let gradient = parameter.grad();
            ensure!(gradient.f_kind()? == Kind::Float, "{dtype:?}: the gradient of {name} is {:?}", gradient.kind());
            gradients.push(gradient.f_flatten(0, -1)?.f_to_kind(Kind::Double)?);
        }
        Ok((loss.f_double_value(&[])?, Tensor::f_cat(&gradients, 0)?))
    };
    let (full, full_gradient) = run(Precision::Float32)?;
    let (low, low_gradient) = run(Precision::Bfloat16)?;
    let norm = |t: &Tensor| -> Result<f64> { Ok(t.f_norm()?.f_double_value(&[])?) };
    let loss_error = (low / full - 1.0).abs();
    let gradient_error = norm(&low_gradient.f_sub(&full_gradient)?)? / norm(&full_gradient)?;
    // One rounding to bfloat16 errs by up to 2^-9; some twenty roundings lie on the longest path, whose errors add up
    // like a random walk to under 1 % in each gradient. Float32 alone would repeat to about 1e-7.
    ensure!(gradient_error < 0.05, "the gradients differ by {gradient_error:.4} of their norm, more than 0.05");
    ensure!(gradient_error > 1e-4, "the gradients differ by {gradient_error:.1e} of their norm: was bfloat16 used?");
    ensure!(loss_error < 0.01, "the losses differ by {loss_error:.4}, more than 0.01");
    Verdict::passed(format!("gradients differ by {gradient_error:.4} of their norm, the loss by {loss_error:.1e}"))
}
