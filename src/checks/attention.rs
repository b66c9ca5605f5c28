//! Inputs, expected results and the tolerance for the checks of both attention passes.

use anyhow::{Context as _, Result, bail, ensure};
use tch::{Device, Kind, Tensor};

use super::golden::furthest;
use crate::attention::cases::{Case, Fill, Layout, Tally as _};
use crate::attention::error_bounds::LargestErrors;
use crate::attention::tiled::Tile;
use crate::attention::{ImplementationName, attention};
use crate::harness::problem::Verdict;
use crate::torch::Generator;
use crate::torch::autograd::backward_from;

/// `(q, k, v, is_causal) -> o` with an autograd graph, as the official test calls it.
pub type Differentiable<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor, bool) -> Result<Tensor>;

/// The tiled implementation with the official test's signature.
pub fn differentiable(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    attention(ImplementationName::Tiled, q, k, v, is_causal)
}

/// Adversarial shapes and values, each with a description.
pub fn adversarial_cases() -> Vec<(&'static str, Case)> {
    let plain = Case::plain;
    let tile = |queries, keys| Tile { queries, keys };
    vec![
        // d = 16 makes q.k/sqrt(d) = 4 scale^2 on average in size: far beyond the 88 at which exp overflows float32.
        ("scores near a thousand", Case { scale: 16.0, ..plain() }),
        ("scores near a thousand, one tile", Case { scale: 16.0, tile: tile(64, 64), ..plain() }),
        ("scores that keep rising", Case { fill: Fill::Rising, scale: 2.0, ..plain() }),
        ("all scores equal", Case { fill: Fill::EqualScores, ..plain() }),
        ("scores near zero", Case { scale: 1e-3, ..plain() }),
        ("one key", Case { n_keys: 1, ..plain() }),
        ("one query", Case { n_queries: 1, ..plain() }),
        ("one query and one key", Case { n_queries: 1, n_keys: 1, ..plain() }),
        ("d is one", Case { d: 1, ..plain() }),
        ("tiles of one", Case { tile: tile(1, 1), n_queries: 7, n_keys: 6, ..plain() }),
        ("tiles larger than everything", Case { tile: tile(500, 500), ..plain() }),
        ("a last tile of one key", Case { n_keys: 33, n_queries: 33, ..plain() }),
        ("unequal tiles across the diagonal", Case { tile: tile(24, 7), n_queries: 61, n_keys: 61, ..plain() }),
        ("fewer keys than queries", Case { n_queries: 50, n_keys: 9, ..plain() }),
        ("more keys than queries", Case { n_queries: 9, n_keys: 50, ..plain() }),
        ("no leading dimension", Case { leading: vec![], ..plain() }),
        ("heads and batch, strides reversed", Case { leading: vec![2, 3], layout: Layout::Reversed, ..plain() }),
    ]
}

/// Passes if `check` does on every adversarial case, each in these types and masks.
pub fn over_adversarial_cases(
    variants: &[(Kind, bool)],
    check: impl Fn(&Case) -> Result<LargestErrors>,
) -> Result<Verdict> {
    let mut worst = LargestErrors::default();
    for (what, case) in adversarial_cases() {
        for &(kind, is_causal) in variants {
            let case = Case { kind, is_causal, ..case.clone() };
            worst.merge(&check(&case).with_context(|| format!("{what}: {case:?}"))?);
        }
    }
    Verdict::passed(worst.to_string())
}

/// The official q, k, v and do: `manual_seed(0)`, then four times `randn(4, 128, 64)`.
pub fn official_inputs() -> Result<[Tensor; 4]> {
    drawn_inputs(0, [4, 128, 128, 64])
}

/// q, k, v and do of these `[batch, n_queries, n_keys, d]`, drawn as the official ones are.
pub fn drawn_inputs(seed: i64, [batch, n_queries, n_keys, d]: [i64; 4]) -> Result<[Tensor; 4]> {
    let generator = Generator::new(Device::Cpu, seed)?;
    let draw = |n: i64| generator.randn(&[batch, n, d], Kind::Float);
    Ok([draw(n_queries)?, draw(n_keys)?, draw(n_keys)?, draw(n_queries)?])
}

/// The official reference, which writes -1e6 (not minus infinity) over masked scores; differentiable.
pub fn official_answer(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
    let d = q.size()[q.dim() - 1] as f64;
    let mut scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div_scalar(d.sqrt())?;
    if is_causal {
        let mask = scores.f_ones_like()?.f_to_kind(Kind::Bool)?.f_triu(1)?;
        scores = scores.f_masked_fill(&mask, -1e6)?;
    }
    Ok((scores.f_softmax(-1, None)?.f_matmul(v)?, scores.f_logsumexp([-1_i64], false)?))
}

/// `[o, dq, dk, dv]` from `[q, k, v, do]` by `o.backward(do)`, as the official test calls it.
///
/// An error of a node keeps its type.
pub fn output_and_gradients(
    attention: Differentiable,
    [q, k, v, d_o]: [&Tensor; 4],
    is_causal: bool,
) -> Result<[Tensor; 4]> {
    let leaves = [q, k, v].map(|t| t.detach().set_requires_grad(true));
    let o = attention(&leaves[0], &leaves[1], &leaves[2], is_causal)?;
    backward_from(&o, d_o, false)?;
    let [dq, dk, dv] = leaves.map(|leaf| leaf.grad());
    ensure!([&dq, &dk, &dv].iter().all(|gradient| gradient.defined()), "q, k or v has no gradient");
    Ok([o.detach(), dq, dk, dv])
}

/// `torch.testing.assert_close(rtol=1e-2, atol=1e-2)` of kind, shape and values. Returns the largest error.
pub fn assert_close(name: &str, actual: &Tensor, expected: &Tensor) -> Result<f64> {
    ensure!(actual.kind() == expected.kind(), "{name} is {:?}, must be {:?}", actual.kind(), expected.kind());
    ensure!(actual.size() == expected.size(), "{name} has shape {:?}, must have {:?}", actual.size(), expected.size());
    let errors = actual.f_sub(expected)?.f_abs()?;
    let error = errors.f_max()?.f_double_value(&[])?;
    if !actual.f_allclose(expected, 1e-2, 1e-2, false)? {
        let bound = expected.f_abs()?.f_mul_scalar(1e-2)?;
        let worst = furthest(&errors.f_sub(&bound)?, actual, expected)?;
        bail!("{name} is off by up to {error:.3e}, beyond rtol = atol = 1e-2: it {worst}");
    }
    Ok(error)
}
