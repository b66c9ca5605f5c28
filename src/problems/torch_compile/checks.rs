//! Checks before timing: the peer's protocol, and equal results of Python's operations and ours.

use anyhow::{Context as _, Result, ensure};
use serde_json::json;
use tch::{Device, Kind};

use super::{adamw, attention, transformer};
use crate::attention::ImplementationName;
use crate::bench::attention::Inputs;
use crate::bench::dtype::Dtype;
use crate::bench::model_bench::ModelBench;
use crate::bench::peer::with_kept;
use crate::bench::tolerance;
use crate::harness::problem::Verdict;
use crate::model::{Config, Precision};
use crate::torch::Generator;
use crate::torch::random::SEED;

/// Small enough that every element of every gradient is compared.
const CONFIG: Config = Config {
    vocab_size: 61,
    context_length: 24,
    d_model: 32,
    num_layers: 3,
    num_heads: 4,
    d_ff: 48,
    rope_theta: 10_000.0,
};

/// A greeting of our protocol and PyTorch, and a refusal that leaves the peer usable.
pub fn peer_speaks_our_protocol() -> Result<Verdict> {
    with_kept(Device::Cpu, |peer| {
        ensure!(peer.refuses_unknown_jobs()?, "a job of an unknown name must be refused, and the peer go on");
        let software = &peer.software;
        let triton = software.triton.as_deref().unwrap_or("none");
        Verdict::passed(format!("Python {}, PyTorch {}, Triton {triton}", software.python, software.torch))
    })
}

/// Python's eager attention against ours, output and gradients. Wrong values must be refused.
pub fn attention_is_the_same_in_python() -> Result<Verdict> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("attention.safetensors");
    let mut largest = 0.0_f64;
    let generator = Generator::new(Device::Cpu, SEED)?;
    with_kept(Device::Cpu, |peer| {
        for shape in [[2, 40, 16], [3, 17, 8]] {
            let inputs = Inputs::draw(&shape, Kind::Float, &generator)?;
            let mut expected = inputs.results(&attention::plain)?;
            inputs.write(&expected, &file)?;
            peer.open("attention", json!({ "shape": shape }))?;
            let verified = attention::verify(peer, "eager", &file)?;
            largest = largest.max(verified.measured().context("the eager column must run")?.errors.largest());
            expected[2] = expected[2].f_mul_scalar(1.0 + 10.0 * tolerance::attention(Dtype::Float32))?;
            inputs.write(&expected, &file)?;
            ensure!(attention::verify(peer, "eager", &file).is_err(), "a wrong dk was accepted");
            peer.close(None)?;
        }
        Ok(())
    })?;
    Verdict::passed(format!(
        "largest relative error {largest:.1e} (at most {:.0e})",
        tolerance::attention(Dtype::Float32)
    ))
}

/// Python's eager model against ours from the same weights and tokens: loss, logits and every gradient.
pub fn model_is_the_same_in_python() -> Result<Verdict> {
    const BATCH_SIZE: i64 = 2;
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("expected.safetensors");
    let mut notes = Vec::new();
    for dtype in [Precision::Float32, Precision::Bfloat16] {
        let bench = ModelBench::new(&CONFIG, ImplementationName::Naive, BATCH_SIZE, dtype, Device::Cpu)?;
        let errors = with_kept(Device::Cpu, |peer| {
            transformer::open(peer, &bench)?;
            transformer::write_expected(&bench, &file)?;
            let verified = transformer::verify(peer, "eager", dtype, &file)?;
            let errors = verified.measured().context("the eager column must run")?.errors.clone();
            // Other weights must be refused.
            tch::no_grad(|| bench.parameters()[5].1.shallow_clone().f_mul_scalar_(1.5).map(drop))?;
            transformer::write_expected(&bench, &file)?;
            ensure!(transformer::verify(peer, "eager", dtype, &file).is_err(), "another w1 was accepted");
            peer.close(None)?;
            Ok(errors)
        });
        let errors = errors.with_context(|| format!("in {}", dtype.name()))?;
        let logits = errors.logits.context("the eager column must report its logits")?;
        notes.push(format!("{}: logits {logits:.1e}, gradients {:.1e}", dtype.name(), errors.gradients));
    }
    Verdict::passed(format!("relative errors in {}", notes.join("; ")))
}

/// Both of PyTorch's AdamW implementations against ours over three steps.
pub fn adamw_is_the_same_in_python() -> Result<Verdict> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("adamw.safetensors");
    adamw::write_steps(&file, &Generator::new(Device::Cpu, SEED)?)?;
    with_kept(Device::Cpu, |peer| {
        peer.open("adamw", json!({ "shapes": [] }))?;
        for column in ["fused", "foreach"] {
            ensure!(adamw::verify(peer, column, &file)?.measured().is_some(), "the {column} column must run");
        }
        peer.close(None)?;
        Verdict::passed(format!("three steps within {:.0e} of the norm", tolerance::ADAMW))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_small_model_is_compared_element_by_element() {
        let largest = CONFIG.parameter_shapes().map(|(_, shape)| shape.iter().product::<i64>()).max().unwrap();
        assert!(largest < 1 << 16);
    }
}
