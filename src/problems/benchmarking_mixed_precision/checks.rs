//! What must hold of the bfloat16 option before it is timed.

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::attention::ImplementationName;
use crate::harness::problem::Verdict;
use crate::model::optim::zero_grad;
use crate::model::{Config, Precision, Transformer};
use crate::torch::Generator;

/// The benchmarked loss. A parameter of the check, so that tests can pass a wrong one.
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
    let generator = Generator::new(Device::Cpu, 7)?;
    let model = Transformer::new(&config, ImplementationName::Naive, &generator)?;
    let random = || generator.randint(0, config.vocab_size, &[4, config.context_length], Kind::Int64);
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
