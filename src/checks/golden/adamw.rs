//! Cases of kind `adamw`: metadata `lr beta1 beta2 eps weight_decay`; `param`, `grads` (steps, ...); expected `param_after`.

use anyhow::{Context as _, Result, ensure};
use tch::Tensor;

use super::{CaseFile, Comparison, compare};
use crate::model::optim::{AdamW, AdamWOptions};

/// `(options, param, grads)` to the parameter after one step for each gradient.
pub type ManySteps<'a> = &'a dyn Fn(AdamWOptions, &Tensor, &Tensor) -> Result<Tensor>;

pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    run_with(case, "adamw", &|options, param, grads| {
        let param = param.f_detach_copy()?;
        let mut adamw = AdamW::new(options)?;
        for i in 0..grads.size()[0] {
            adamw.update("param", &param, &grads.f_get(i)?)?;
        }
        Ok(param)
    })
}

/// Runs `case` on any implementation, including mutants.
pub fn run_with(case: &CaseFile, name: &str, many_steps: ManySteps) -> Result<Vec<Comparison>> {
    case.only(&["param", "grads", "param_after"])?;
    let (rtol, atol) = case.tolerances()?;
    let (param, grads) = (case.tensor("param")?, case.tensor("grads")?);
    ensure!(
        grads.dim() > 0 && grads.size()[1..] == param.size(),
        "grads {:?} must be (steps, ...) over the shape of param, {:?}",
        grads.size(),
        param.size()
    );
    // Without a step, any optimizer would pass.
    ensure!(grads.numel() > 0, "grads has shape {:?}: a case needs at least one step and one element", grads.size());
    ensure!(
        param.is_floating_point() && grads.kind() == param.kind(),
        "param is {:?} and grads {:?}: they must be of one floating dtype",
        param.kind(),
        grads.kind()
    );
    let after = many_steps(options(case)?, param, grads)?;
    Ok(vec![compare(name, "param_after", &after, case.tensor("param_after")?, rtol, atol)])
}

/// The hyperparameters in the metadata.
pub fn options(case: &CaseFile) -> Result<AdamWOptions> {
    let options = AdamWOptions {
        lr: case.meta_as("lr")?,
        beta1: case.meta_as("beta1")?,
        beta2: case.meta_as("beta2")?,
        eps: case.meta_as("eps")?,
        weight_decay: case.meta_as("weight_decay")?,
    };
    options.validate().context("metadata")?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::super::require;
    use super::*;
    use crate::harness::python;

    /// Random hyperparameters, one to 17 steps, four dtypes, none to two dimensions, without a tolerance: PyTorch makes the
    /// cases with the libtorch of this process.
    #[test]
    fn random_steps_are_those_of_torch_optim_adamw_in_every_bit() {
        const CASES: usize = 400;
        let folder = tempfile::tempdir().unwrap();
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/suites/cases/make_model.py");
        let mut python = Command::new(python::interpreter());
        let output = python.arg(script).arg(folder.path()).arg(CASES.to_string()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut files = 0;
        let mut wrong = Vec::new();
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let case = CaseFile::read(&entry.unwrap().path()).unwrap();
            let param = case.tensor("param").unwrap();
            let about = format!("{:?} {:?} {:?}", param.kind(), param.size(), case.metadata);
            wrong.extend(require(&run(&case).unwrap()).err().map(|error| format!("{about}: {error:#}")));
            files += 1;
        }
        assert_eq!((files, wrong.len()), (CASES, 0), "{}", wrong.join("\n"));
    }
}
