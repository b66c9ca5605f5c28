//! Cases of kind `transformer`: a model's parameters, `tokens` and `targets`; expected `logits`, `loss`, `grad.<parameter>`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Tensor};

use super::{CaseFile, Comparison, compare};
use crate::attention::Choice;
use crate::model::{Config, Transformer, loss, transformer::check_parameters};

/// The inputs of a case, checked against one another.
pub struct Inputs<'a> {
    pub config: Config,
    pub parameters: BTreeMap<String, Tensor>,
    /// (batch, seq) int64 both.
    pub tokens: &'a Tensor,
    pub targets: &'a Tensor,
}

/// What a model makes of the inputs; `gradients` are of the loss, by parameter name.
pub struct Outputs {
    pub logits: Tensor,
    pub loss: Tensor,
    pub gradients: BTreeMap<String, Tensor>,
}

pub type Model<'a> = &'a dyn Fn(&Inputs) -> Result<Outputs>;

/// The model with each way of computing attention.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for choice in Choice::ALL {
        let name = format!("transformer ({} attention)", choice.name());
        comparisons.extend(run_with(case, &name, &|inputs| outputs(inputs, choice)).with_context(|| name.clone())?);
    }
    Ok(comparisons)
}

/// Runs `case` on any implementation; the mutants come in here.
pub fn run_with(case: &CaseFile, name: &str, model: Model) -> Result<Vec<Comparison>> {
    let (rtol, atol) = case.tolerances()?;
    let inputs = inputs(case)?;
    let Outputs { logits, loss, gradients } = model(&inputs)?;
    let mut comparisons = vec![
        compare(name, "logits", &logits, case.tensor("logits")?, rtol, atol),
        compare(name, "loss", &loss, case.tensor("loss")?, rtol, atol),
    ];
    for (key, expected) in &case.tensors {
        if let Some(parameter) = key.strip_prefix("grad.") {
            let actual = gradients.get(parameter).with_context(|| format!("{key}: no such parameter"))?;
            comparisons.push(compare(name, key, actual, expected, rtol, atol));
        }
    }
    Ok(comparisons)
}

/// A rope cache of more positions than this is no test of a model but of memory.
const MAX_CONTEXT_LENGTH: i64 = 1 << 20;

fn inputs(case: &CaseFile) -> Result<Inputs<'_>> {
    let config = Config {
        vocab_size: case.meta_as("vocab_size")?,
        context_length: case.meta_as("context_length")?,
        d_model: case.meta_as("d_model")?,
        num_layers: case.meta_as("num_layers")?,
        num_heads: case.meta_as("num_heads")?,
        d_ff: case.meta_as("d_ff")?,
        rope_theta: case.meta_as("rope_theta")?,
    };
    config.validate()?;
    ensure!(config.context_length <= MAX_CONTEXT_LENGTH, "context_length exceeds {MAX_CONTEXT_LENGTH}");
    let is_parameter =
        |name: &str| !["tokens", "targets", "logits", "loss"].contains(&name) && !name.starts_with("grad.");
    let parameters: BTreeMap<_, _> = case
        .tensors
        .iter()
        .filter(|(name, _)| is_parameter(name))
        .map(|(name, value)| (name.clone(), value.shallow_clone()))
        .collect();
    check_parameters(&config, &parameters)?;
    Ok(Inputs { config, parameters, tokens: case.tensor("tokens")?, targets: case.tensor("targets")? })
}

fn outputs(inputs: &Inputs, attention: Choice) -> Result<Outputs> {
    let mut model = Transformer::new(&inputs.config, Device::Cpu, 0, attention)?;
    model.load(&inputs.parameters)?;
    let logits = model.forward(inputs.tokens)?;
    let loss = loss::cross_entropy(&logits, inputs.targets)?;
    loss.f_backward()?;
    let gradients = model.parameters().iter().map(|(name, value)| Ok((name.clone(), value.f_grad()?)));
    Ok(Outputs { gradients: gradients.collect::<Result<_>>()?, logits, loss })
}
