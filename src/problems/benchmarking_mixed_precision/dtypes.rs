//! The data types that autocast gives each step of the handout's toy model, observed while it trains.

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Reduction, Tensor};

use crate::bench::dtype::Dtype;
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

/// One training step of Linear, ReLU, LayerNorm(10), Linear under autocast to `dtype`, cross-entropy loss; float32
/// parameters, as the handout's model has them.
pub fn observe(dtype: Dtype, device: Device) -> Result<Observed> {
    let generator = Generator::new(device, SEED)?;
    let random = |shape: [i64; 2]| generator.randn(&shape, Kind::Float);
    let (norm, options) = ([WIDTHS[1]], (Kind::Float, device));
    let parameters = [
        random([WIDTHS[1], WIDTHS[0]])?,
        Tensor::f_ones(norm, options)?,
        Tensor::f_zeros(norm, options)?,
        random([WIDTHS[2], WIDTHS[1]])?,
    ]
    .map(|parameter| parameter.set_requires_grad(true));
    let [fc1, ln_weight, ln_bias, fc2] = &parameters;
    let x = random([ROWS, WIDTHS[0]])?;
    let targets = generator.randint(0, WIDTHS[2], &[ROWS], Kind::Int64)?;
    let (inside, [fc1_output, relu, ln, logits, loss]) = autocast(device, dtype.kind(), || {
        let fc1_output = x.f_linear::<Tensor>(fc1, None)?;
        let relu = fc1_output.f_relu()?;
        let ln = relu.f_layer_norm(norm, Some(ln_weight), Some(ln_bias), 1e-5, false)?;
        let logits = ln.f_linear::<Tensor>(fc2, None)?;
        let loss = logits.f_cross_entropy_loss::<Tensor>(&targets, None, Reduction::Mean, -100, 0.0)?;
        Ok((common(&parameters).context("parameters")?, [fc1_output, relu, ln, logits, loss]))
    })?;
    crate::torch::backward(&loss)?;
    Ok(Observed {
        parameters: inside,
        fc1_output: name(&fc1_output),
        relu_output: name(&relu),
        ln_output: name(&ln),
        logits: name(&logits),
        loss: name(&loss),
        gradients: common(&parameters.each_ref().map(Tensor::grad)).context("gradients")?,
        fc1_output_outside: name(&x.f_linear::<Tensor>(fc1, None)?),
    })
}

/// The one data type of all tensors; fails where they differ.
fn common(tensors: &[Tensor; 4]) -> Result<String> {
    let names = tensors.each_ref().map(name);
    ensure!(names.iter().all(|name| *name == names[0]), "their data types differ");
    Ok(names[0].clone())
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
