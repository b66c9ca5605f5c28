//! Cases of kind `transformer`: a model's parameters, `tokens` and `targets`; expected `logits`, `loss`, `grad.<parameter>`.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{CaseFile, Comparison, MAX_POSITIONS, compare};
use crate::attention::ImplementationName;
use crate::model::{Config, Transformer, loss, transformer::check_parameters};
use crate::torch::Generator;
use crate::torch::random::SEED;

/// The inputs of a case, checked against one another.
pub struct Inputs<'a> {
    pub config: Config,
    /// All float64, or none.
    pub parameters: BTreeMap<String, Tensor>,
    /// (batch, seq) int64 both, each value a row of the embedding.
    pub tokens: &'a Tensor,
    pub targets: &'a Tensor,
}

/// A model's results. `gradients` are those of the loss, by parameter name.
pub struct Outputs {
    pub logits: Tensor,
    pub loss: Tensor,
    pub gradients: BTreeMap<String, Tensor>,
}

pub type Model<'a> = &'a dyn Fn(&Inputs) -> Result<Outputs>;

/// The model with each way of computing attention.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for choice in ImplementationName::ON_CPU {
        let name = format!("transformer ({} attention)", choice.name());
        comparisons.extend(run_with(case, &name, &|inputs| outputs(inputs, choice)).with_context(|| name.clone())?);
    }
    Ok(comparisons)
}

/// Runs `case` on any implementation, including mutants.
pub fn run_with(case: &CaseFile, name: &str, model: Model) -> Result<Vec<Comparison>> {
    let (rtol, atol) = case.tolerances()?;
    let inputs = inputs(case)?;
    let expected_loss = case.tensor("loss")?;
    // A file may store a scalar as a tensor of one element with any number of dimensions.
    let expected_loss = match expected_loss.numel() {
        1 => expected_loss.f_reshape([0_i64; 0])?,
        _ => expected_loss.shallow_clone(),
    };
    let Outputs { logits, loss, gradients } = model(&inputs)?;
    let mut comparisons = vec![
        compare(name, "logits", &logits, case.tensor("logits")?, rtol, atol),
        compare(name, "loss", &loss, &expected_loss, rtol, atol),
    ];
    for (key, expected) in &case.tensors {
        if let Some(parameter) = key.strip_prefix("grad.") {
            let actual =
                gradients.get(parameter).with_context(|| format!("{key:?}: the model has no such parameter"))?;
            comparisons.push(compare(name, key, actual, expected, rtol, atol));
        }
    }
    Ok(comparisons)
}

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
    let positions = config.context_length;
    ensure!(positions <= MAX_POSITIONS, "context_length is {positions}: it must be at most {MAX_POSITIONS}");
    let is_parameter =
        |name: &str| !["tokens", "targets", "logits", "loss"].contains(&name) && !name.starts_with("grad.");
    let parameters: BTreeMap<_, _> = case
        .tensors
        .iter()
        .filter(|(name, _)| is_parameter(name))
        .map(|(name, value)| (name.clone(), value.shallow_clone()))
        .collect();
    check_parameters(&config, &parameters)?;
    let wide = parameters.values().filter(|value| value.kind() == Kind::Double).count();
    ensure!(
        wide == 0 || wide == parameters.len(),
        "{wide} of {} parameters are float64: make all or none of them so",
        parameters.len()
    );
    let (tokens, targets) = (indices(case, "tokens", &config)?, indices(case, "targets", &config)?);
    ensure!(
        tokens.size() == targets.size(),
        "targets have shape {:?}, tokens {:?}: they must be equal",
        targets.size(),
        tokens.size()
    );
    Ok(Inputs { config, parameters, tokens, targets })
}

/// The case's (batch, seq) int64 tensor of that name, checked to index the vocabulary.
fn indices<'a>(case: &'a CaseFile, name: &str, config: &Config) -> Result<&'a Tensor> {
    let (tensor, vocab_size) = (case.tensor(name)?, config.vocab_size);
    ensure!(tensor.kind() == Kind::Int64, "{name} are {:?}: they must be int64", tensor.kind());
    ensure!(
        tensor.dim() == 2 && tensor.numel() > 0,
        "{name} have shape {:?}: it must be (batch, seq), neither zero",
        tensor.size()
    );
    let (least, most) = (tensor.f_min()?.f_int64_value(&[])?, tensor.f_max()?.f_int64_value(&[])?);
    ensure!(
        least >= 0 && most < vocab_size,
        "{name} range from {least} to {most}: they must be at least 0 and below vocab_size, {vocab_size}"
    );
    Ok(tensor)
}

fn outputs(inputs: &Inputs, attention: ImplementationName) -> Result<Outputs> {
    let mut model = Transformer::new(&inputs.config, attention, &Generator::new(Device::Cpu, SEED)?)?;
    if inputs.parameters.values().all(|value| value.kind() == Kind::Double) {
        widen(&model)?;
    }
    model.load(&inputs.parameters)?;
    let logits = model.forward(inputs.tokens)?;
    let loss = loss::cross_entropy(&logits, inputs.targets)?;
    loss.f_backward()?;
    let gradients = model.parameters().iter().map(|(name, value)| Ok((name.clone(), value.f_grad()?)));
    Ok(Outputs { gradients: gradients.collect::<Result<_>>()?, logits, loss })
}

/// Makes every parameter float64, like PyTorch's `Module.double`. The RoPE tables stay float32 as in the reference, so
/// the logits are accurate only to about 1e-7.
fn widen(model: &Transformer) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    for (name, parameter) in model.parameters() {
        let wide = parameter.f_to_kind(Kind::Double)?;
        parameter.shallow_clone().f_set_data(&wide).with_context(|| format!("widening {name}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn a_model_with_float64_parameters_computes_in_float64() {
        let bytes = include_bytes!("../../../suites/cases/transformer.safetensors");
        let mut case = CaseFile::parse(bytes, Path::new("transformer")).unwrap();
        for choice in ImplementationName::ON_CPU {
            assert_eq!(outputs(&inputs(&case).unwrap(), choice).unwrap().logits.kind(), Kind::Float);
        }
        for tensor in case.tensors.values_mut().filter(|tensor| tensor.is_floating_point()) {
            *tensor = tensor.to_kind(Kind::Double);
        }
        for choice in ImplementationName::ON_CPU {
            let Outputs { logits, loss, gradients } = outputs(&inputs(&case).unwrap(), choice).unwrap();
            assert!(gradients.values().chain([&logits, &loss]).all(|t| t.kind() == Kind::Double));
        }
    }
}
