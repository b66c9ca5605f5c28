//! FlashAttention-2 forward: part (a) tiled tensor operations, part (b) kernels, part (c) the causal mask on both.

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use tch::{Kind, Tensor};

use crate::attention::accumulation_kind;
use crate::attention::cases::{self, Case, Tally as _};
use crate::attention::error_bounds::{self, LargestErrors};
use crate::attention::flash::textbook;
use crate::attention::flash_tolerance::Passes;
use crate::attention::tiled::{self, Tile};
use crate::checks::attention::{
    Differentiable, adversarial_cases, assert_close, differentiable, official_answer, official_inputs,
    over_adversarial_cases,
};
use crate::checks::attestation::Attested;
use crate::checks::flash_kernels::{self, TextbookFacts};
use crate::checks::subject::{golden_case, large_scores, official_and_drawn_inputs, promised_inputs};
use crate::harness::answer::{Answer, Audience, Records};
use crate::harness::problem::{Check, Problem, Verdict};
use crate::harness::subject::{Subject, SubjectCheck};
use crate::subject::attention::{FlashFunction, SubjectAttention};
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
    answer,
    reads: &[ATTESTED_BY],
};

/// Whose records hold what the kernels have passed on a GPU, both passes together.
const ATTESTED_BY: &str = "flash_backward";
const RANDOM_CASES: u32 = 200;
const KINDS: [Kind; 4] = [Kind::Float, Kind::BFloat16, Kind::Half, Kind::Double];

/// `(q, k, v, is_causal, tile) -> (o, lse)`: what the checks of the forward pass take.
pub type Forward<'a> = &'a dyn Fn(&Tensor, &Tensor, &Tensor, bool, Tile) -> Result<(Tensor, Tensor)>;

/// Random shapes, tiles, kinds, scales and seeds against float64; the bounds are derived in [`error_bounds::expected`].
pub fn forward_matches_naive(forward: Forward, is_causal: bool) -> Result<Verdict> {
    let is_causal = proptest::strategy::Just(is_causal);
    Verdict::passed(
        cases::over(RANDOM_CASES, cases::cases(is_causal), |case| forward_errors(forward, case))?.to_string(),
    )
}

/// Shapes and values that break a careless implementation, each in every kind.
pub fn adversarial_inputs(forward: Forward, is_causal: bool) -> Result<Verdict> {
    over_adversarial_cases(&KINDS.map(|kind| (kind, is_causal)), |case| forward_errors(forward, case))
}

fn forward_errors(forward: Forward, case: &Case) -> Result<LargestErrors> {
    let inputs = case.inputs()?;
    let expected = error_bounds::expected(&inputs, case.is_causal)?;
    let (o, lse) = forward(&inputs.q, &inputs.k, &inputs.v, case.is_causal, case.tile)?;
    let mut worst = error_bounds::compare("o", &o, case.kind, &expected.o)?;
    worst.merge(&error_bounds::compare("lse", &lse, accumulation_kind(case.kind), &expected.lse)?);
    worst.cases = 1;
    Ok(worst)
}

/// The official test: seed 0, q, k, v of (4, 128, 64), exactly one saved tensor of (4, 128) and it is the logsumexp,
/// o and L within rtol = atol = 1e-2 of the definition.
pub fn official_protocol(attention: Differentiable, is_causal: bool) -> Result<Verdict> {
    protocol_on(&[official_inputs()?], attention, is_causal)
}

/// The official test on each of these q, k, v.
fn protocol_on(inputs: &[[Tensor; 4]], attention: Differentiable, is_causal: bool) -> Result<Verdict> {
    let (mut o_error, mut lse_error) = (0f64, 0f64);
    for [q, k, v, _] in inputs {
        let leaves = [q, k, v].map(|t| t.set_requires_grad(true));
        let o = attention(&leaves[0], &leaves[1], &leaves[2], is_causal)?;
        let saved = autograd::saved_tensors(&o).context("reading what the output's node saved")?;
        let shape = &q.size()[..2];
        let mut rows = saved.iter().filter(|t| t.size() == shape);
        let (Some(lse), None) = (rows.next(), rows.next()) else {
            let sizes: Vec<_> = saved.iter().map(Tensor::size).collect();
            bail!("exactly one saved tensor must have shape {shape:?}; the node saved {sizes:?}");
        };
        let (o_expected, lse_expected) = official_answer(q, k, v, is_causal)?;
        let sizes = || format!("q of {:?}, {} keys", q.size(), k.size()[1]);
        o_error = o_error.max(assert_close("o", &o.detach(), &o_expected).with_context(sizes)?);
        lse_error = lse_error.max(assert_close("L", lse, &lse_expected).with_context(sizes)?);
    }
    Verdict::passed(format!("largest errors: o {o_error:.2e}, L {lse_error:.2e} (rtol 1e-2, atol 1e-2)"))
}

/// What a subject's two functions are put to. The first may ignore the mask, as the official tests let it.
pub const SUBJECT: &[SubjectCheck] = &[
    subject("a", "official_protocol", |s| on_official_inputs(s, FlashFunction::PyTorch, false)),
    subject("a", "drawn_inputs", |s| on_drawn_inputs(s, FlashFunction::PyTorch, false)),
    subject("a", "large_scores", |s| on_large_scores(s, FlashFunction::PyTorch, false)),
    subject("a", "golden_case", |s| golden_case(s, FlashFunction::PyTorch, false)),
    subject("b", "triton_official_protocol", |s| on_official_inputs(s, FlashFunction::Triton, false)),
    subject("b", "triton_drawn_inputs", |s| on_drawn_inputs(s, FlashFunction::Triton, false)),
    subject("b", "triton_large_scores", |s| on_large_scores(s, FlashFunction::Triton, false)),
    subject("b", "triton_golden_case", |s| golden_case(s, FlashFunction::Triton, false)),
    subject("c", "causal_official_protocol", |s| on_official_inputs(s, FlashFunction::Triton, true)),
    subject("c", "causal_drawn_inputs", |s| on_drawn_inputs(s, FlashFunction::Triton, true)),
    subject("c", "causal_large_scores", |s| on_large_scores(s, FlashFunction::Triton, true)),
];

const fn subject(part: &'static str, name: &'static str, run: fn(&Subject) -> Result<Verdict>) -> SubjectCheck {
    let function = if matches!(part.as_bytes(), b"a") { FlashFunction::PyTorch } else { FlashFunction::Triton };
    SubjectCheck { problem: "flash_forward", part, name, adapter: function.adapter(), run }
}

fn on_official_inputs(subject: &Subject, function: FlashFunction, is_causal: bool) -> Result<Verdict> {
    of_subject(subject, function, &official_and_drawn_inputs(subject)?, is_causal)
}

/// Inputs that nobody knows before, of sizes that the handout promises: powers of two from 16.
fn on_drawn_inputs(subject: &Subject, function: FlashFunction, is_causal: bool) -> Result<Verdict> {
    of_subject(subject, function, &promised_inputs(subject)?, is_causal)
}

fn on_large_scores(subject: &Subject, function: FlashFunction, is_causal: bool) -> Result<Verdict> {
    of_subject(subject, function, &[large_scores(subject)?], is_causal)
}

fn of_subject(subject: &Subject, function: FlashFunction, inputs: &[[Tensor; 4]], is_causal: bool) -> Result<Verdict> {
    let attention = SubjectAttention { subject, function };
    protocol_on(inputs, &|q, k, v, is_causal| attention.differentiable(q, k, v, is_causal), is_causal)
}

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    random_cases: u32,
    kernel_cases: u32,
    kinds: [&'static str; 4],
    queries: i64,
    keys: i64,
    adversarial: Vec<&'static str>,
    textbook: TextbookFacts,
    attested: Attested,
}

fn answer(records: &Records, _audience: Audience) -> Result<Answer> {
    let Tile { queries, keys } = tiled::Tiled::DEFAULT.tile;
    let kinds = KINDS.map(|kind| match kind {
        Kind::Double => "float64",
        Kind::BFloat16 => "bfloat16",
        Kind::Half => "float16",
        _ => "float32",
    });
    let attested = Attested::of(records.other(ATTESTED_BY)?)?;
    let claim = attested.claim();
    let mut answer = Answer::new(&Quoted {
        random_cases: RANDOM_CASES,
        kernel_cases: flash_kernels::RANDOM_CASES,
        kinds,
        queries,
        keys,
        adversarial: adversarial_cases().iter().map(|(what, _)| *what).collect(),
        textbook: TextbookFacts::of(textbook::TileConfig::forward),
        attested,
    })?;
    answer.claim(claim)?;
    Ok(answer)
}
