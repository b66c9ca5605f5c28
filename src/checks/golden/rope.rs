//! Cases of kind `rope`: metadata `rope_theta`; tensor `x` (..., seq, d_head) at positions 0..seq; expected `y`.

use anyhow::{Result, bail, ensure};
use tch::{Device, Tensor};

use super::{CaseFile, Comparison, MAX_POSITIONS, compare};
use crate::model::rope::Rope;

/// `(theta, x)` to y.
pub type Rotation<'a> = &'a dyn Fn(f64, &Tensor) -> Result<Tensor>;

pub fn run(case: &CaseFile) -> Result<Vec<Comparison>> {
    run_with(case, "rope", &|theta, x| {
        let [.., seq, d_head] = x.size()[..] else {
            bail!("x has shape {:?}: it must be (..., seq, d_head)", x.size())
        };
        ensure!(seq <= MAX_POSITIONS, "x has {seq} positions, more than the {MAX_POSITIONS} that a case may have");
        Rope::new(theta, d_head, seq, Device::Cpu)?.rotate(x)
    })
}

/// Runs `case` on any implementation, including mutants.
pub fn run_with(case: &CaseFile, name: &str, rotate: Rotation) -> Result<Vec<Comparison>> {
    case.only(&["x", "y"])?;
    let (rtol, atol) = case.tolerances()?;
    let theta: f64 = case.meta_as("rope_theta")?;
    ensure!(theta.is_finite() && theta > 0.0, "rope_theta is {theta}: it must be positive and finite");
    let x = case.tensor("x")?;
    ensure!(x.is_floating_point(), "x is {:?}: it must be of a floating dtype", x.kind());
    let y = rotate(theta, x)?;
    Ok(vec![compare(name, "y", &y, case.tensor("y")?, rtol, atol)])
}
