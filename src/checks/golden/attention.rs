//! Cases of kind `attention`: q, k, v and optionally do, run through every implementation that supports their kind.

use anyhow::{Result, ensure};
use tch::{Device, Kind, Tensor};

use super::{CaseFile, Comparison, compare};
use crate::attention::{Attention, IMPLEMENTATIONS, Shape};
use crate::error::NotGraded;
use crate::harness::subject::Subject;
use crate::subject::SubjectFault;
use crate::subject::attention::{FlashFunction, SubjectAttention};

/// Runs every registered implementation on every device of this machine that it supports.
///
/// Expects `o` and `lse`, and with `do` also `dq`, `dk` and `dv`; shapes as in [`crate::attention`]. An implementation
/// that does not support the case (no kernel for the kind or head dimension) is skipped. One that supports it and fails
/// is a failed comparison.
pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    let inputs = Inputs::of(case)?;
    let tolerances = case.tolerances()?;
    let mut devices = vec![Device::Cpu];
    if tch::Cuda::is_available() {
        devices.push(Device::Cuda(0));
    }
    let mut comparisons = Vec::new();
    for device in devices {
        for implementation in IMPLEMENTATIONS.iter().filter_map(|entry| entry.as_attention()) {
            if implementation.supports(inputs.q.kind(), device, inputs.head_dim).is_ok() {
                comparisons.extend(inputs.run(implementation, device, tolerances)?);
            }
        }
    }
    Ok(comparisons)
}

/// Runs the subject's two functions; the first may ignore the mask, and is run on cases without one.
pub fn run_subject(case: &CaseFile, subject: &Subject) -> Result<Vec<Comparison>> {
    let is_causal: bool = case.meta_as("is_causal")?;
    let functions = [FlashFunction::PyTorch, FlashFunction::Triton];
    let mut comparisons = Vec::new();
    for function in functions.into_iter().filter(|function| !is_causal || *function == FlashFunction::Triton) {
        match run_one(case, &SubjectAttention { subject, function }) {
            // A case has no outcome of its own for this, and what the other function gave is still shown.
            Err(error) if SubjectFault::lacks_gpu(&error) => {
                comparisons.push(Comparison::of(function.adapter(), "o", Err(error), case.tolerances()?));
            }
            compared => comparisons.extend(compared?),
        }
    }
    Ok(comparisons)
}

/// Runs one implementation on the CPU.
///
/// Errors: [`NotGraded`]; a subject's function that needs a GPU.
pub fn run_one(case: &CaseFile, implementation: &dyn Attention) -> Result<Vec<Comparison>> {
    Inputs::of(case)?.run(implementation, Device::Cpu, case.tolerances()?)
}

/// The file's tensors, with consistent shapes and kinds.
struct Inputs<'a> {
    q: &'a Tensor,
    k: &'a Tensor,
    v: &'a Tensor,
    /// The upstream gradient and the expected dq, dk and dv.
    gradient: Option<(&'a Tensor, [&'a Tensor; 3])>,
    o: &'a Tensor,
    lse: &'a Tensor,
    head_dim: i64,
    is_causal: bool,
}

impl<'a> Inputs<'a> {
    fn of(case: &'a CaseFile) -> Result<Self> {
        case.only(&["q", "k", "v", "do", "o", "lse", "dq", "dk", "dv"])?;
        let [q, k, v] = [case.tensor("q")?, case.tensor("k")?, case.tensor("v")?];
        let shape = Shape::of(q, k, v)?;
        let floating = [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half].contains(&q.kind());
        ensure!(floating, "q is {:?}; attention takes floating-point tensors", q.kind());
        let gradient = match case.tensors.get("do") {
            Some(d_o) => {
                ensure!(d_o.size() == q.size(), "do has shape {:?}, must have q's {:?}", d_o.size(), q.size());
                ensure!(d_o.kind() == q.kind(), "do is {:?}, must be {:?} as q", d_o.kind(), q.kind());
                Some((d_o, [case.tensor("dq")?, case.tensor("dk")?, case.tensor("dv")?]))
            }
            None => {
                let expected = ["dq", "dk", "dv"].into_iter().find(|name| case.tensors.contains_key(*name));
                ensure!(expected.is_none(), "{} is expected, but do is missing", expected.unwrap_or_default());
                None
            }
        };
        let (o, lse) = (case.tensor("o")?, case.tensor("lse")?);
        Ok(Self { q, k, v, gradient, o, lse, head_dim: shape.d, is_causal: case.meta_as("is_causal")? })
    }

    /// Errors: [`NotGraded`]; a subject's function that needs a GPU. Any other one is a failed comparison.
    fn run(&self, implementation: &dyn Attention, device: Device, (rtol, atol): (f64, f64)) -> Result<Vec<Comparison>> {
        let name = match device {
            Device::Cpu => implementation.name().to_string(),
            _ => format!("{} on the GPU", implementation.name()),
        };
        let mut comparisons = Vec::new();
        let mut compare_with =
            |tensor: &str, actual, expected| comparisons.push(compare(&name, tensor, actual, expected, rtol, atol));
        match self.outputs(implementation, device) {
            Ok((o, lse, gradients)) => {
                compare_with("o", &o, self.o);
                compare_with("lse", &lse, self.lse);
                if let (Some(actual), Some((_, expected))) = (gradients, self.gradient) {
                    for ((tensor, actual), expected) in ["dq", "dk", "dv"].into_iter().zip(&actual).zip(expected) {
                        compare_with(tensor, actual, expected);
                    }
                }
            }
            Err(error) if NotGraded::of(&error).is_some() || SubjectFault::lacks_gpu(&error) => return Err(error),
            Err(error) => comparisons.push(Comparison::of(&name, "o", Err(error), (rtol, atol))),
        }
        Ok(comparisons)
    }

    fn outputs(&self, implementation: &dyn Attention, device: Device) -> Result<(Tensor, Tensor, Option<[Tensor; 3]>)> {
        let [q, k, v] = [self.q.f_to_device(device)?, self.k.f_to_device(device)?, self.v.f_to_device(device)?];
        let (o, lse) = implementation.forward(&q, &k, &v, self.is_causal)?;
        let gradients = match self.gradient {
            Some((d_o, _)) => {
                let d_o = d_o.f_to_device(device)?;
                Some(implementation.backward([&q, &k, &v, &o, &lse, &d_o], self.is_causal)?)
            }
            None => None,
        };
        Ok((o, lse, gradients))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::{require, run};
    use super::*;
    use crate::attention::ImplementationName;
    use crate::attention::naive::Naive;
    use crate::subject::unavailable;

    /// A right case with a gradient, made by the definition.
    fn case() -> CaseFile {
        let generator = crate::torch::Generator::new(Device::Cpu, 3).unwrap();
        let draw = |n: i64| generator.randn(&[2, n, 4], Kind::Float).unwrap();
        let (q, k, v, d_o) = (draw(6), draw(5), draw(5), draw(6));
        let (o, lse) = Naive.forward(&q, &k, &v, true).unwrap();
        let [dq, dk, dv] = Naive.backward([&q, &k, &v, &o, &lse, &d_o], true).unwrap();
        let names = ["q", "k", "v", "do", "o", "lse", "dq", "dk", "dv"];
        let tensors = names.map(String::from).into_iter().zip([q, k, v, d_o, o, lse, dq, dk, dv]).collect();
        let metadata = [("kind", "attention"), ("is_causal", "true"), ("rtol", "1e-4"), ("atol", "1e-5")];
        let metadata = metadata.map(|(key, value)| (key.to_string(), value.to_string())).into();
        CaseFile { path: "made.safetensors".into(), metadata, tensors }
    }

    #[test]
    fn every_implementation_is_compared_in_all_five_outputs() {
        let comparisons = run(&case()).unwrap();
        require(&comparisons).unwrap();
        let by_implementation = comparisons.iter().fold(BTreeMap::new(), |mut counts, c| {
            *counts.entry(c.implementation.as_str()).or_insert(0) += 1;
            counts
        });
        for choice in ImplementationName::ON_CPU {
            assert_eq!(by_implementation.get(choice.name()), Some(&5), "{by_implementation:?}");
        }
    }

    #[test]
    fn a_wrong_value_fails_for_every_implementation() {
        let mut case = case();
        let _in_place = case.tensors["dk"].get(0).get(0).get(0).f_add_scalar_(0.01).unwrap();
        let failed: Vec<_> = run(&case).unwrap().into_iter().filter(|c| !c.passed).collect();
        let devices = 1 + usize::from(tch::Cuda::is_available());
        assert_eq!(failed.len(), ImplementationName::ON_CPU.len() * devices);
        assert!(failed.iter().all(|c| c.tensor == "dk"));
        case.metadata.insert("is_causal".into(), "false".into());
        assert!(run(&case).unwrap().iter().all(|c| !c.passed));
    }

    /// Attention that raises where there is no GPU.
    struct OnGpu;

    impl Attention for OnGpu {
        fn name(&self) -> &'static str {
            "on_gpu"
        }

        fn supports(&self, _: Kind, _: Device, _: i64) -> Result<(), String> {
            Ok(())
        }

        fn forward(&self, _: &Tensor, _: &Tensor, _: &Tensor, _: bool) -> Result<(Tensor, Tensor)> {
            Err(SubjectFault::needing_gpu("the function raises AssertionError").into())
        }

        fn backward(&self, _: [&Tensor; 6], _: bool) -> Result<[Tensor; 3]> {
            anyhow::bail!("it has no forward pass")
        }
    }

    #[test]
    fn a_function_that_needs_a_gpu_is_no_failed_comparison() {
        let error = run_one(&case(), &OnGpu).unwrap_err().context("attention_float32");
        let reason = unavailable(&error);
        assert_eq!(reason.as_deref(), Some("may need a GPU: the function raises AssertionError"));
    }

    #[test]
    fn malformed_cases_are_errors_that_name_what_is_wrong() {
        let message = |change: &dyn Fn(&mut CaseFile)| {
            let mut case = case();
            change(&mut case);
            format!("{:#}", run(&case).unwrap_err())
        };
        let missing = message(&|c| drop(c.tensors.remove("dv")));
        assert!(missing.contains("\"dv\""), "{missing}");
        let flag = message(&|c| drop(c.metadata.insert("is_causal".into(), "yes".into())));
        assert!(flag.contains("is_causal") && flag.contains("yes"), "{flag}");
        let shape =
            message(&|c| drop(c.tensors.insert("k".into(), Tensor::zeros([2, 5, 3], (Kind::Float, Device::Cpu)))));
        assert!(shape.contains("k has shape [2, 5, 3]"), "{shape}");
        let kind = message(&|c| {
            ["q", "k", "v"].iter().for_each(|n| {
                drop(c.tensors.insert(n.to_string(), Tensor::zeros([2, 5, 3], (Kind::Int64, Device::Cpu))))
            });
        });
        assert!(kind.contains("floating-point"), "{kind}");
    }
}
