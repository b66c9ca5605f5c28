//! FlashAttention-2 forward: part (a) tiled tensor operations, part (b) kernels, part (c) the causal mask on both.

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};
use tch::{Device, Kind, Tensor};

use super::flash_kernels;
use crate::attention::cases::{self, Case, Fill, Layout};
use crate::attention::inputs::Generator;
use crate::attention::oracle::{self, Worst};
use crate::attention::rule::Passes;
use crate::attention::tiled::{self, Tile};
use crate::attention::{Choice, accumulation_kind, attention, textbook};
use crate::harness::problem::{Check, Problem, Verdict};
use crate::torch::autograd;

pub const PROBLEM: Problem = Problem {
    name: "flash_forward",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "forward_matches_naive", part: "a", run: || forward_matches_naive(&tiled::forward, false) },
        Check { name: "adversarial_inputs", part: "a", run: || adversarial_inputs(&tiled::forward, false) },
        Check { name: "official_protocol", part: "a", run: || official_protocol(&differentiable, false) },
        Check { name: "textbook_kernel", part: "b", run: || flash_kernels::textbook(Passes::Forward) },
        Check { name: "hopper_kernel", part: "b", run: || flash_kernels::hopper(Passes::Forward) },
        Check { name: "portable_kernel", part: "b", run: || flash_kernels::portable(Passes::Forward) },
        Check { name: "causal_forward_matches_naive", part: "c", run: || forward_matches_naive(&tiled::forward, true) },
        Check { name: "causal_adversarial_inputs", part: "c", run: || adversarial_inputs(&tiled::forward, true) },
        Check { name: "causal_official_protocol", part: "c", run: || official_protocol(&differentiable, true) },
    ],
    measured: None,
    facts,
};

const RANDOM_CASES: u32 = 200;
const KINDS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double];

/// `(q, k, v, is_causal, tile) -> (o, lse)`: what the checks of the forward pass take.
pub type Forward<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor, bool, Tile) -> Result<(Tensor, Tensor)>;

/// `(q, k, v, is_causal) -> o`, recorded for autograd: what the official test calls.
pub type Differentiable<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor, bool) -> Result<Tensor>;

/// The tiled implementation as the official test sees it.
pub fn differentiable(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<Tensor> {
    attention(Choice::Tiled, q, k, v, is_causal)
}

/// Random shapes, tiles, kinds, scales and seeds against float64; the bounds are derived in [`oracle::expected`].
pub fn forward_matches_naive(forward: Forward, is_causal: bool) -> Result<Verdict> {
    let is_causal = proptest::strategy::Just(is_causal);
    Verdict::passed(cases::over(RANDOM_CASES, cases::cases(is_causal), |case| hold_forward(forward, case))?.to_string())
}

/// Shapes and values that break a careless implementation, each in every kind.
pub fn adversarial_inputs(forward: Forward, is_causal: bool) -> Result<Verdict> {
    let mut worst = Worst::default();
    for (what, case) in adversarial_cases() {
        for kind in KINDS {
            let case = Case { kind, is_causal, ..case.clone() };
            worst.merge(&hold_forward(forward, &case).with_context(|| format!("{what}: {case:?}"))?);
        }
    }
    Verdict::passed(worst.to_string())
}

/// The cases that [`adversarial_inputs`] goes through, by what is adversarial about them.
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

fn hold_forward(forward: Forward, case: &Case) -> Result<Worst> {
    let inputs = case.inputs()?;
    let expected = oracle::expected(&inputs, case.is_causal)?;
    let (o, lse) = forward(&inputs.q, &inputs.k, &inputs.v, case.is_causal, case.tile)?;
    let mut worst = oracle::hold("o", &o, case.kind, &expected.o)?;
    worst.merge(&oracle::hold("lse", &lse, accumulation_kind(case.kind), &expected.lse)?);
    worst.cases = 1;
    Ok(worst)
}

/// The official test: seed 0, q, k, v of (4, 128, 64), exactly one saved tensor of (4, 128) and it is the logsumexp,
/// o and L within rtol = atol = 1e-2 of the definition.
pub fn official_protocol(attention: Differentiable, is_causal: bool) -> Result<Verdict> {
    let [q, k, v, _] = official_inputs()?;
    let leaves = [&q, &k, &v].map(|t| t.set_requires_grad(true));
    let o = attention(&leaves[0], &leaves[1], &leaves[2], is_causal)?;
    let saved = autograd::saved_tensors(&o).context("reading what the output's node saved")?;
    let mut rows = saved.iter().filter(|t| t.size() == [4, 128]);
    let (Some(lse), None) = (rows.next(), rows.next()) else {
        let sizes: Vec<_> = saved.iter().map(Tensor::size).collect();
        anyhow::bail!("exactly one saved tensor must have shape [4, 128]; the node saved {sizes:?}");
    };
    let (o_expected, lse_expected) = official_answer(&q, &k, &v, is_causal)?;
    let o_error = assert_close("o", &o.detach(), &o_expected)?;
    let lse_error = assert_close("L", lse, &lse_expected)?;
    Verdict::passed(format!("largest errors: o {o_error:.2e}, L {lse_error:.2e} (rtol 1e-2, atol 1e-2)"))
}

/// The official q, k, v and do: `manual_seed(0)`, then four times `randn(4, 128, 64)`.
pub fn official_inputs() -> Result<[Tensor; 4]> {
    let mut random = Generator::new(0);
    let mut draw = || random.randn(&[4, 128, 64], Kind::Float, Device::Cpu);
    Ok([draw()?, draw()?, draw()?, draw()?])
}

/// The official reference, which writes -1e6 (not minus infinity) over masked scores; differentiable.
pub fn official_answer(q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
    let mut scores = q.f_matmul(&k.f_transpose(-2, -1)?)?.f_div_scalar(8.0)?;
    if is_causal {
        let mask = Tensor::f_ones([128, 128], (Kind::Bool, Device::Cpu))?.f_triu(1)?;
        scores = scores.f_masked_fill(&mask, -1e6)?;
    }
    Ok((scores.f_softmax(-1, None)?.f_matmul(v)?, scores.f_logsumexp([-1_i64], false)?))
}

/// `torch.testing.assert_close(rtol=1e-2, atol=1e-2)`: kind, shape and values; gives back the largest error.
pub fn assert_close(name: &str, actual: &Tensor, expected: &Tensor) -> Result<f64> {
    ensure!(actual.kind() == expected.kind(), "{name} is {:?}, must be {:?}", actual.kind(), expected.kind());
    ensure!(actual.size() == expected.size(), "{name} has shape {:?}, must have {:?}", actual.size(), expected.size());
    let error = actual.f_sub(expected)?.f_abs()?.f_max()?.f_double_value(&[])?;
    ensure!(
        actual.f_allclose(expected, 1e-2, 1e-2, false)?,
        "{name} is off by up to {error:.3e}, beyond rtol = atol = 1e-2"
    );
    Ok(error)
}

/// What the template says about the checks, so that it stays true when they change.
fn facts() -> Result<Value> {
    let Tile { queries, keys } = tiled::Tiled::DEFAULT.tile;
    let kinds = KINDS.map(|kind| match kind {
        Kind::Double => "float64",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        _ => "float32",
    });
    Ok(json!({
        "random_cases": RANDOM_CASES,
        "kernel_cases": flash_kernels::RANDOM_CASES,
        "kinds": kinds,
        "tile": { "queries": queries, "keys": keys },
        "adversarial": adversarial_cases().iter().map(|(what, _)| *what).collect::<Vec<_>>(),
        "textbook": textbook_facts(textbook::Cut::forward),
    }))
}

/// The readable kernels' threads a block, and their tiles for each d.
pub fn textbook_facts(cut: impl Fn(textbook::Variant) -> textbook::Cut) -> Value {
    let cuts =
        textbook::Variant::all().filter(|variant| variant.element == "float" && variant.is_causal).map(|variant| {
            let cut = cut(variant);
            json!({ "d": variant.d, "queries": cut.queries, "keys": cut.keys })
        });
    json!({ "threads": textbook::THREADS, "cuts": cuts.collect::<Vec<_>>() })
}
