//! Cases of kind `rmsnorm`: metadata `eps`; tensors `x` (..., d), `weight` (d); expected `y`.

use anyhow::{Result, ensure};
use tch::Tensor;

use super::{CaseFile, Comparison, compare};
use crate::model::norm::rms_norm;

/// `(x, weight, eps)` to y.
pub type RmsNorm<'a> = &'a dyn Fn(&Tensor, &Tensor, f64) -> Result<Tensor>;

pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    run_with(case, "rms_norm", &rms_norm)
}

/// Runs `case` on any implementation, including mutants.
pub fn run_with(case: &CaseFile, name: &str, rms_norm: RmsNorm) -> Result<Vec<Comparison>> {
    case.only(&["x", "weight", "y"])?;
    let (rtol, atol) = case.tolerances()?;
    let (x, weight, expected) = (case.tensor("x")?, case.tensor("weight")?, case.tensor("y")?);
    ensure!(x.is_floating_point() && weight.is_floating_point(), "x and weight must be of floating dtypes");
    ensure!(
        weight.dim() == 1 && x.size().last() == weight.size().last(),
        "weight {:?} does not fit the last dimension of x {:?}",
        weight.size(),
        x.size()
    );
    let y = rms_norm(x, weight, case.meta_positive("eps")?)?;
    ensure!(y.kind() == x.kind(), "y is {:?}: it must have the dtype of x, {:?}", y.kind(), x.kind());
    Ok(vec![compare(name, "y", &y, expected, rtol, atol)])
}
