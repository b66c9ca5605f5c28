//! The data types that autocast gives each step of the handout's toy model, observed while it trains.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Reduction, Tensor};

use crate::bench::dtype::Dtype;
use crate::harness::problem::Verdict;
use crate::torch::Generator;
use crate::torch::autocast;
use crate::torch::random::SEED;

/// Rows of the batch, and widths of the toy model; only the width of the layer norm is the handout's.
const ROWS: i64 = 8;
const WIDTHS: [i64; 3] = [16, 10, 5];

/// The data type of each step, as libtorch reports it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Observed {
    /// Inside the autocast region; all parameters agree.
    pub parameters: String,
    pub fc1_output: String,
    pub relu_output: String,
    pub ln_output: String,
    pub logits: String,
    pub loss: String,
    /// All gradients agree.
    pub gradients: String,
    /// The type of `fc1`'s output after the region.
    pub fc1_output_outside: String,
}

/// How the toy model's types are observed. A parameter of the checks, so that tests can pass a wrong one.
pub type Observe = fn(Dtype, Device) -> Result<Observed>;

/// One training step of Linear, ReLU, LayerNorm(10), Linear under autocast to `dtype`, cross-entropy loss.
pub fn observe(dtype: Dtype, device: Device) -> Result<Observed> {
    let generator = Generator::new(device, SEED)?;
    let model = Toy::new(&generator)?;
    let x = generator.randn(&[ROWS, WIDTHS[0]], Kind::Float)?;
    let targets = generator.randint(0, WIDTHS[2], &[ROWS], Kind::Int64)?;
    let (mut observed, loss) = autocast(device, dtype.kind(), || model.watched_forward(&x, &targets))?;
    crate::torch::backward(&loss)?;
    let gradients: Vec<Tensor> = model.parameters().iter().map(|p| p.grad()).collect();
    observed.gradients = common(&gradients.iter().collect::<Vec<_>>()).context("gradients")?;
    observed.fc1_output_outside = name(&x.f_linear::<Tensor>(&model.fc1, None)?);
    Ok(observed)
}

/// Float32 parameters, as the handout's model has them.
struct Toy {
    fc1: Tensor,
    ln_weight: Tensor,
    ln_bias: Tensor,
    fc2: Tensor,
}

impl Toy {
    fn new(generator: &Generator) -> Result<Self> {
        let options = (Kind::Float, generator.device());
        let leaf = |t: Tensor| t.f_set_requires_grad(true).context("making a parameter");
        Ok(Self {
            fc1: leaf(generator.randn(&[WIDTHS[1], WIDTHS[0]], Kind::Float)?)?,
            ln_weight: leaf(Tensor::f_ones([WIDTHS[1]], options)?)?,
            ln_bias: leaf(Tensor::f_zeros([WIDTHS[1]], options)?)?,
            fc2: leaf(generator.randn(&[WIDTHS[2], WIDTHS[1]], Kind::Float)?)?,
        })
    }

    fn parameters(&self) -> [&Tensor; 4] {
        [&self.fc1, &self.ln_weight, &self.ln_bias, &self.fc2]
    }

    /// The loss, and the data type of every step on the way to it.
    fn watched_forward(&self, x: &Tensor, targets: &Tensor) -> Result<(Observed, Tensor)> {
        let fc1 = x.f_linear::<Tensor>(&self.fc1, None)?;
        let relu = fc1.f_relu()?;
        let ln = relu.f_layer_norm([WIDTHS[1]], Some(&self.ln_weight), Some(&self.ln_bias), 1e-5, false)?;
        let logits = ln.f_linear::<Tensor>(&self.fc2, None)?;
        let loss = logits.f_cross_entropy_loss::<Tensor>(targets, None, Reduction::Mean, -100, 0.0)?;
        let observed = Observed {
            parameters: common(&self.parameters()).context("parameters")?,
            fc1_output: name(&fc1),
            relu_output: name(&relu),
            ln_output: name(&ln),
            logits: name(&logits),
            loss: name(&loss),
            gradients: String::new(),
            fc1_output_outside: String::new(),
        };
        Ok((observed, loss))
    }
}

/// The one data type of all tensors; fails where they differ.
fn common(tensors: &[&Tensor]) -> Result<String> {
    let first = tensors.first().map(|t| name(t)).unwrap_or_default();
    ensure!(tensors.iter().all(|t| name(t) == first), "their data types differ");
    Ok(first)
}

fn name(tensor: &Tensor) -> String {
    match tensor.f_kind() {
        Ok(Kind::Float) => "float32".into(),
        Ok(Kind::Half) => "float16".into(),
        Ok(Kind::BFloat16) => "bfloat16".into(),
        Ok(kind) => format!("{kind:?}").to_lowercase(),
        Err(_) => "undefined".into(),
    }
}

/// Autocast on every device: linear layers in the requested type, float32 parameters and gradients, and no effect outside
/// the region.
pub fn check_promises(observe: Observe) -> Result<Verdict> {
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
pub fn check_cuda(observe: Observe) -> Result<Verdict> {
    if !tch::Cuda::is_available() {
        return Verdict::skipped("needs a CUDA GPU");
    }
    for dtype in [Dtype::Float16, Dtype::Bfloat16] {
        let seen = observe(dtype, Device::Cuda(0))?;
        ensure!(seen == on_cuda(dtype), "under {} autocast on CUDA: {seen:?}", dtype.name());
    }
    Verdict::passed("every step as published for CUDA")
}

/// CUDA's lists (PyTorch, "Autocast op reference"): linear in the low type; layer_norm and cross_entropy_loss in float32.
pub fn on_cuda(dtype: Dtype) -> Observed {
    let (low, full) = (dtype.name().to_string(), "float32".to_string());
    Observed {
        parameters: full.clone(),
        fc1_output: low.clone(),
        relu_output: low.clone(),
        ln_output: full.clone(),
        logits: low,
        loss: full.clone(),
        gradients: full.clone(),
        fc1_output_outside: full,
    }
}
