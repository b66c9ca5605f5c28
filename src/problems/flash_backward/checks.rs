//! The backward pass against autograd, difference quotients and the official test, for any implementation.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::attention::cases::{self, Case, Tally as _};
use crate::attention::error_bounds::{self, LargestErrors};
use crate::attention::tiled::{self, Tile};
use crate::attention::{Attention as _, accumulation_kind, naive};
use crate::checks::attention::{
    Differentiable, assert_close, official_answer, official_inputs, output_and_gradients, over_adversarial_cases,
};
use crate::checks::subject::{golden_case, large_scores, official_and_drawn_inputs, promised_inputs};
use crate::harness::problem::Verdict;
use crate::harness::subject::{Subject, SubjectCheck};
use crate::subject::attention::FlashFunction::{self, PyTorch, Triton};
use crate::subject::attention::SubjectAttention;
use crate::torch::Generator;

pub const RANDOM_CASES: u32 = 200;
/// Of the central differences, and what they may differ by; [`finite_differences`] says why.
pub const STEP: f64 = 1e-5;
pub const TOLERANCE: f64 = 1e-8;

/// What the backward pass reads.
pub struct Saved<'a> {
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    pub v: &'a Tensor,
    pub o: &'a Tensor,
    pub lse: &'a Tensor,
    pub d_o: &'a Tensor,
}

/// `(saved, is_causal, tile) -> [dq, dk, dv]`: what the checks of the backward pass take.
pub type Backward<'a> = &'a dyn Fn(&Saved, bool, Tile) -> Result<[Tensor; 3]>;

/// The tiled implementation in the checks' shape.
pub fn tiled_backward(s: &Saved, is_causal: bool, tile: Tile) -> Result<[Tensor; 3]> {
    tiled::backward([s.q, s.k, s.v, s.o, s.lse, s.d_o], is_causal, tile)
}

/// Random shapes, tiles, masks, kinds, scales and seeds against libtorch's autograd over Eq. 4-6 in float64; the
/// bounds are derived in [`error_bounds::expected`].
pub fn backward_matches_autograd(backward: Backward) -> Result<Verdict> {
    let random = cases::cases(proptest::bool::ANY);
    Verdict::passed(cases::over(RANDOM_CASES, random, |case| backward_errors(backward, case))?.to_string())
}

/// The forward pass's adversarial inputs, masked and not, in float32 and bfloat16.
pub fn adversarial_inputs(backward: Backward) -> Result<Verdict> {
    let variants = [(Kind::Float, false), (Kind::Float, true), (Kind::BFloat16, false), (Kind::BFloat16, true)];
    over_adversarial_cases(&variants, |case| backward_errors(backward, case))
}

/// Passes `backward` the exact o and lse, rounded as a forward pass stores them, so that forward errors do not count.
fn backward_errors(backward: Backward, case: &Case) -> Result<LargestErrors> {
    let inputs = case.inputs()?;
    let expected = error_bounds::expected(&inputs, case.is_causal)?;
    let o = expected.o.value.f_to_kind(case.kind)?;
    let lse = expected.lse.value.f_to_kind(accumulation_kind(case.kind))?;
    let saved = Saved { q: &inputs.q, k: &inputs.k, v: &inputs.v, o: &o, lse: &lse, d_o: &inputs.d_o };
    let [dq, dk, dv] = backward(&saved, case.is_causal, case.tile)?;
    let mut worst = error_bounds::compare("dq", &dq, case.kind, &expected.dq)?;
    worst.merge(&error_bounds::compare("dk", &dk, case.kind, &expected.dk)?);
    worst.merge(&error_bounds::compare("dv", &dv, case.kind, &expected.dv)?);
    worst.cases = 1;
    Ok(worst)
}

/// Central differences of sum(o * do) in float64: a reference without any gradient formula.
///
/// With a step of 1e-5 the truncation error is about 1e-10 (step squared times the third derivative, which is of order
/// one here) and the rounding error about 1e-11 (2^-53 over the step), so 1e-8 leaves two digits and no room for a fault.
pub fn finite_differences(backward: Backward) -> Result<Verdict> {
    let mut largest = 0.0_f64;
    for is_causal in [false, true] {
        let generator = Generator::new(Device::Cpu, 17)?;
        let draw = |n: i64| generator.randn(&[2, n, 3], Kind::Double);
        let (q, k, v, d_o) = (draw(5)?, draw(4)?, draw(4)?, draw(5)?);
        let loss = |x: &[Tensor; 3]| -> Result<f64> {
            let (o, _) = naive::Naive.forward(&x[0], &x[1], &x[2], is_causal)?;
            Ok(o.f_mul(&d_o)?.f_sum(None)?.f_double_value(&[])?)
        };
        let (o, lse) = naive::Naive.forward(&q, &k, &v, is_causal)?;
        let saved = Saved { q: &q, k: &k, v: &v, o: &o, lse: &lse, d_o: &d_o };
        let [dq, dk, dv] = backward(&saved, is_causal, Tile { queries: 2, keys: 3 })?;
        for (which, (name, gradient)) in [("dq", dq), ("dk", dk), ("dv", dv)].into_iter().enumerate() {
            for at in 0..gradient.numel() as i64 {
                let moved = |step: f64| -> Result<f64> {
                    let x = [&q, &k, &v].map(Tensor::copy);
                    let _in_place = x[which].f_view([-1_i64])?.f_narrow(0, at, 1)?.f_add_scalar_(step)?;
                    loss(&x)
                };
                let difference = (moved(STEP)? - moved(-STEP)?) / (2.0 * STEP);
                let error = (gradient.f_reshape([-1_i64])?.f_double_value(&[at])? - difference).abs();
                ensure!(
                    error <= TOLERANCE,
                    "{name}[{at}] is off the difference quotient {difference:.9} by {error:.2e}"
                );
                largest = largest.max(error);
            }
        }
    }
    Verdict::passed(format!("largest error {largest:.2e} (atol {TOLERANCE:.0e})"))
}

/// The official test: seed 0, `.backward(do)`, dq, dk and dv within rtol = atol = 1e-2; it leaves the mask off, here
/// the masked case is held to the same.
pub fn official_protocol(attention: Differentiable) -> Result<Verdict> {
    protocol_on(&[official_inputs()?], attention, &[false, true])
}

/// The official test on each of these q, k, v and do, with these masks.
fn protocol_on(inputs: &[[Tensor; 4]], attention: Differentiable, masks: &[bool]) -> Result<Verdict> {
    let mut largest = 0.0_f64;
    for (inputs, &is_causal) in inputs.iter().flat_map(|inputs| masks.iter().map(move |mask| (inputs, mask))) {
        let official = |q: &_, k: &_, v: &_, is_causal| Ok(official_answer(q, k, v, is_causal)?.0);
        let expected = output_and_gradients(&official, inputs.each_ref(), is_causal)?;
        let actual = output_and_gradients(attention, inputs.each_ref(), is_causal)?;
        for ((name, actual), expected) in ["dq", "dk", "dv"].into_iter().zip(&actual[1..]).zip(&expected[1..]) {
            largest =
                largest.max(assert_close(name, actual, expected).with_context(|| format!("is_causal {is_causal}"))?);
        }
    }
    Verdict::passed(format!("largest error {largest:.2e} (rtol 1e-2, atol 1e-2)"))
}

/// What a subject's two functions are put to. The first may ignore the mask, as the official tests let it.
pub const SUBJECT: &[SubjectCheck] = &[
    subject("official_protocol_pytorch", PyTorch, |s| of_subject(s, PyTorch, &official_and_drawn_inputs(s)?)),
    subject("official_protocol_triton", Triton, |s| of_subject(s, Triton, &official_and_drawn_inputs(s)?)),
    subject("drawn_inputs_pytorch", PyTorch, |s| of_subject(s, PyTorch, &promised_inputs(s)?)),
    subject("drawn_inputs_triton", Triton, |s| of_subject(s, Triton, &promised_inputs(s)?)),
    // Not of the other one: TF32 rounds what cancels in these gradients by nearly the tolerance.
    subject("large_scores_pytorch", PyTorch, |s| of_subject(s, PyTorch, &[large_scores(s)?])),
    subject("golden_case_pytorch", PyTorch, |s| golden_case(s, PyTorch, true)),
    subject("golden_case_triton", Triton, |s| golden_case(s, Triton, true)),
];

const fn subject(name: &'static str, function: FlashFunction, run: fn(&Subject) -> Result<Verdict>) -> SubjectCheck {
    SubjectCheck { problem: "flash_backward", part: "", name, adapter: function.adapter(), run }
}

fn of_subject(subject: &Subject, function: FlashFunction, inputs: &[[Tensor; 4]]) -> Result<Verdict> {
    let attention = SubjectAttention { subject, function };
    let masks: &[bool] = if function == Triton { &[false, true] } else { &[false] };
    protocol_on(inputs, &|q, k, v, is_causal| attention.differentiable(q, k, v, is_causal), masks)
}
