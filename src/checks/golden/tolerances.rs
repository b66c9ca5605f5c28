//! Refuses cases that code without a result would pass.

use anyhow::{Result, ensure};
use tch::Kind as DType;

use super::{CaseFile, compare};

impl CaseFile {
    /// Refuses tolerances within which zeros would do for all that is expected of a tensor. Where zeros are expected, or no more
    /// than rounding leaves beside the largest value of the file, ones must not do. The logarithms of `lse` do not grow with the
    /// values beside them.
    pub(super) fn require_expectations_that_can_fail(&self, expected: &[&str]) -> Result<()> {
        let is_expected = |name: &str| expected.iter().any(|e| name == *e || e.ends_with('.') && name.starts_with(e));
        let (rtol, atol) = self.tolerances()?;
        let mut largest_of = Vec::new();
        for (name, tensor) in self.tensors.iter().filter(|(name, _)| is_expected(name)) {
            ensure!(tensor.is_floating_point(), "{name:?} is {:?}: it must be of a floating dtype", tensor.kind());
            let magnitude = tensor.f_to_kind(DType::Double)?.f_abs()?.f_nan_to_num(0.0, 0.0, 0.0)?;
            largest_of.push((name, magnitude.f_max()?.f_double_value(&[])?));
        }
        let values = largest_of.iter().filter(|(name, _)| *name != "lse").map(|(_, largest)| *largest);
        let rounding = 4.0 * f64::from(f32::EPSILON) * values.fold(0.0, f64::max);
        for (name, largest) in largest_of {
            let (wrong, scale) = if largest > rounding { ("zeros", largest) } else { ("ones", 1.0) };
            ensure!(
                rtol * scale + atol < scale,
                "rtol {rtol:?} and atol {atol:?} let {wrong} pass (the largest value expected of {name:?} is {largest:?}); make \
                 them smaller"
            );
        }
        Ok(())
    }

    /// Refuses tolerances within which every tensor may stay as it was before training: code that trains nothing would pass.
    pub(super) fn require_change(&self, [before, after]: [&str; 2]) -> Result<()> {
        let (rtol, atol) = self.tolerances()?;
        let trained = || self.tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix(after)?, tensor)));
        let changes_beyond = |rtol, atol| {
            trained().any(|(name, tensor)| {
                let initial = self.tensors.get(&format!("{before}{name}"));
                initial.is_none_or(|initial| !compare("", "", initial, tensor, rtol, atol).passed)
            })
        };
        let smaller = if changes_beyond(0.0, 0.0) { "make them smaller, or " } else { "" };
        // What is missing is named where it is read.
        ensure!(
            trained().next().is_none() || changes_beyond(rtol, atol),
            "rtol {rtol:?} and atol {atol:?} let code pass that changes nothing ({before:?} is within them of {after:?}); \
             {smaller}take larger steps"
        );
        Ok(())
    }
}
