//! Cross-entropy, written as the reference writes it.

use anyhow::{Result, ensure};
use tch::{Kind, Tensor};

/// Mean over all positions of -log softmax(logits)[target].
///
/// `logits` is (..., vocab), `targets` (...) int64 below vocab. The maximum of each row is subtracted before exp.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let (logits_size, targets_size) = (logits.size(), targets.size());
    ensure!(targets.f_kind()? == Kind::Int64, "targets are {:?}: they must be int64", targets.kind());
    ensure!(
        !logits_size.is_empty() && logits_size[..logits_size.len() - 1] == targets_size[..],
        "targets {targets_size:?} do not fit logits {logits_size:?}: they need the same leading dimensions"
    );
    let log_probabilities = log_softmax(logits)?;
    let picked = log_probabilities.f_gather(-1, &targets.f_unsqueeze(-1)?, false)?;
    Ok(picked.f_neg()?.f_mean(None::<Kind>)?)
}

/// x - max - log(sum(exp(x - max))) over the last dimension.
fn log_softmax(x: &Tensor) -> Result<Tensor> {
    let (max, _) = x.f_max_dim(-1, true)?;
    let shifted = x.f_sub(&max)?;
    let log_sum = shifted.f_exp()?.f_sum_dim_intlist(-1, true, None)?.f_log()?;
    Ok(shifted.f_sub(&log_sum)?)
}
