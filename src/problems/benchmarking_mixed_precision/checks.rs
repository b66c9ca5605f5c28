//! What must hold of autocast's types, of the rounded layer norm, and of the bfloat16 option before it is timed.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::dtypes::{Observe, on_cuda};
use super::layer_norm::{EPS, FEATURES, INPUTS, Normalise, Scheme, exact, largest_error, vector};
use crate::attention::ImplementationName;
use crate::bench::dtype::Dtype;
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

/// Autocast on every device: linear layers in the requested type, float32 parameters and gradients, and no effect outside
/// the region.
pub fn check_autocast(observe: Observe) -> Result<Verdict> {
    for dtype in [Dtype::Float16, Dtype::Bfloat16] {
        let seen = observe(dtype, Device::Cpu)?;
        for (what, got, expected) in [
            ("parameters", &seen.parameters, "float32"),
            ("fc1's output", &seen.fc1_output, dtype.name()),
            ("the logits", &seen.logits, dtype.name()),
            ("the gradients", &seen.gradients, "float32"),
            ("fc1's output outside the region", &seen.fc1_output_outside, "float32"),
        ] {
            ensure!(got == expected, "under {} autocast {what} is {got}, not {expected}", dtype.name());
        }
    }
    Verdict::passed("linear layers in the asked type, parameters and gradients in float32, on the CPU")
}

/// The table that PyTorch's CUDA autocast is known to give; needs a GPU.
pub fn check_autocast_on_cuda(observe: Observe) -> Result<Verdict> {
    if !tch::Cuda::is_available() {
        return Verdict::skipped("needs a CUDA GPU");
    }
    for dtype in [Dtype::Float16, Dtype::Bfloat16] {
        let seen = observe(dtype, Device::Cuda(0))?;
        ensure!(seen == on_cuda(dtype), "under {} autocast on CUDA: {seen:?}", dtype.name());
    }
    Verdict::passed("every step as published for CUDA")
}

/// Float32 statistics must match libtorch's own layer norm, which keeps its statistics in float32 too, and float64.
pub fn check_layer_norm(normalise: Normalise) -> Result<Verdict> {
    let mut worst: f64 = 0.0;
    for dtype in [Dtype::Float16, Dtype::Bfloat16] {
        let format = dtype.format();
        for input in INPUTS {
            let x = vector(&input, format);
            let ours = normalise(&x, format, Scheme::StatisticsInFloat32).output;
            let theirs = libtorch(&x, dtype.kind())?;
            // Outputs stay below 2, where neighbours are at most one ulp of 1 apart: half of it for the last rounding on either
            // side. The earlier float32 errors are far below the other half.
            let tolerance = format.ulp(1.0);
            for (what, expected) in [("libtorch", &theirs), ("float64", &exact(&x).output)] {
                let error = largest_error(&ours, expected);
                ensure!(
                    error <= tolerance,
                    "{dtype:?}, {}: {error} away from {what}, more than {tolerance}",
                    input.name
                );
                worst = worst.max(error / tolerance);
            }
        }
    }
    let large = vector(&INPUTS[1], Dtype::Float16.format());
    let overflown = normalise(&large, Dtype::Float16.format(), Scheme::Everything).variance;
    ensure!(overflown.is_infinite(), "the float16 variance of spread 500 is {overflown}; its squares overflow");
    Verdict::passed(format!("at most {worst:.2} ulp of 1 away from libtorch and float64"))
}

fn libtorch(x: &[f64], kind: Kind) -> Result<Vec<f64>> {
    let x = Tensor::from_slice(x).f_to_kind(kind)?;
    let y = x.f_layer_norm::<Tensor>([FEATURES as i64], None, None, EPS, false)?;
    Vec::<f64>::try_from(y.f_to_kind(Kind::Double)?).context("reading libtorch's layer norm")
}
