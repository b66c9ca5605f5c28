//! GPU checks of our attention kernels: gradients through autograd, and errors and determinism of the readable kernels.

use anyhow::{Context as _, Result, ensure};
use tch::{Device, Kind, Tensor};

use crate::attention::cases::{Case, Fill, Layout, Tally as _};
use crate::attention::error_bounds::{self, Bounded, LargestErrors};
use crate::attention::flash::DIMENSIONS;
use crate::attention::flash::textbook::Textbook;
use crate::attention::{Attention as _, FLASH_KERNELS, ImplementationName, attention};
use crate::checks::attention::output_and_gradients;
use crate::harness::device::DeviceCheck;
use crate::harness::problem::Verdict;
use crate::torch::{Generator, cuda_device};

const TEXTBOOK_KERNELS: &[&str] = &["textbook_forward.cu", "textbook_backward.cu"];

pub const CHECKS: &[DeviceCheck] = &[
    DeviceCheck::new(
        "the_kernels_are_an_autograd_node_like_the_others",
        "Gradients through our attention, the deterministic one too, are those of PyTorch's within the type's rounding.",
        the_kernels_are_an_autograd_node_like_the_others,
    )
    .with_kernels(FLASH_KERNELS),
    DeviceCheck::new(
        "both_passes_of_the_readable_kernels_are_within_the_error_bounds",
        "Every d, type and mask of the readable kernels is within the derived error bounds, on ragged and hostile inputs.",
        both_passes_of_the_readable_kernels_are_within_the_error_bounds,
    )
    .with_kernels(TEXTBOOK_KERNELS),
    DeviceCheck::new(
        "every_result_of_the_readable_kernels_repeats_in_every_bit",
        "51 runs of the readable kernels give the same bits, for every d.",
        every_result_of_the_readable_kernels_repeats_in_every_bit,
    )
    .with_kernels(TEXTBOOK_KERNELS),
];

fn the_kernels_are_an_autograd_node_like_the_others() -> Result<Verdict> {
    let device = cuda_device(0)?;
    let generator = Generator::new(device, 0)?;
    let each = |kind| [ImplementationName::Flash, ImplementationName::FlashDeterministic].map(|choice| (choice, kind));
    for (choice, kind) in [Kind::Float, Kind::BFloat16].into_iter().flat_map(each) {
        let draw = || Ok::<_, anyhow::Error>(generator.randn(&[2, 3, 77, 64], Kind::Float)?.to_kind(kind));
        let inputs = [draw()?, draw()?, draw()?, draw()?];
        let results = |choice| {
            let attention = |q: &_, k: &_, v: &_, is_causal| attention(choice, q, k, v, is_causal);
            output_and_gradients(&attention, inputs.each_ref(), true)
        };
        let (ours, theirs) = (results(choice)?, results(ImplementationName::Sdpa)?);
        let tolerance = if kind == Kind::Float { 1e-4 } else { 3e-2 };
        for (a, b) in ours.iter().zip(&theirs) {
            ensure!(a.kind() == kind && a.allclose(b, tolerance, tolerance, false), "{choice:?}, {kind:?}");
        }
    }
    Verdict::passed("two implementations in two types")
}

/// Ragged, tiny and whole tiles of these variants, and the inputs that break careless kernels.
fn cases(variants: impl Iterator<Item = (i64, Kind, bool)>) -> Vec<Case> {
    let lengths = [(1, 1), (1, 200), (200, 1), (63, 65), (113, 203), (128, 128), (300, 140)];
    let mut cases = Vec::new();
    for (d, kind, is_causal) in variants {
        let plain = Case { d, kind, is_causal, n_queries: 70, n_keys: 130, seed: d as u32, ..Case::plain() };
        cases.extend(lengths.map(|(n_queries, n_keys)| Case { n_queries, n_keys, ..plain.clone() }));
        cases.push(Case { scale: 6.0, ..plain.clone() });
        cases.push(Case { fill: Fill::Rising, ..plain.clone() });
        cases.push(Case { fill: Fill::EqualScores, ..plain.clone() });
        cases.push(Case { leading: vec![2, 3], layout: Layout::Reversed, ..plain });
    }
    cases
}

/// Every kind, d and mask.
fn every_variant() -> impl Iterator<Item = (i64, Kind, bool)> {
    let kinds = [Kind::Float, Kind::BFloat16, Kind::Half];
    let masks = move |d| kinds.into_iter().flat_map(move |kind| [false, true].map(|is_causal| (d, kind, is_causal)));
    DIMENSIONS.into_iter().flat_map(masks)
}

/// Checks both passes of the readable kernels by [`error_bounds`], which are those of sums in float32.
fn within_bounds(case: &Case, device: Device) -> Result<LargestErrors> {
    let inputs = case.inputs()?;
    let expected = error_bounds::expected(&inputs, case.is_causal)?;
    let there = |t: &Tensor| t.to_device(device);
    let [q, k, v, d_o] = [&inputs.q, &inputs.k, &inputs.v, &inputs.d_o].map(there);
    let (o, lse) = Textbook.forward(&q, &k, &v, case.is_causal)?;
    // P is rounded to v's kind before it multiplies v, which the bound for o does not include: the error of a
    // weighted mean of v is at most that much of its largest element.
    let rounding = match case.kind {
        Kind::BFloat16 => (-8.0_f64).exp2(),
        Kind::Half => (-11.0_f64).exp2() + (-24.0_f64).exp2() * case.n_keys as f64,
        _ => 0.0,
    };
    let most = rounding * inputs.v.to_kind(Kind::Double).abs().max().double_value(&[]);
    let o_bound = Bounded { value: expected.o.value.copy(), bound: &expected.o.bound + 1.01 * most };
    // The backward pass gets the exact o and lse, so that errors of the forward pass do not count.
    let (o_exact, lse_exact) = (expected.o.value.to_kind(case.kind), expected.lse.value.to_kind(Kind::Float));
    let (o_exact, lse_exact) = (there(&o_exact), there(&lse_exact));
    let [dq, dk, dv] = Textbook.backward([&q, &k, &v, &o_exact, &lse_exact, &d_o], case.is_causal)?;
    let mut worst = LargestErrors::default();
    for (name, actual, kind, expected) in [
        ("o", &o, case.kind, &o_bound),
        ("lse", &lse, Kind::Float, &expected.lse),
        ("dq", &dq, case.kind, &expected.dq),
        ("dk", &dk, case.kind, &expected.dk),
        ("dv", &dv, case.kind, &expected.dv),
    ] {
        worst.merge(&error_bounds::compare(name, &actual.to_device(Device::Cpu), kind, expected)?);
    }
    worst.cases = 1;
    Ok(worst)
}

fn all_within_bounds(device: Device, cases: &[Case]) -> Result<LargestErrors> {
    let (mut worst, mut failures) = (LargestErrors::default(), Vec::new());
    for case in cases {
        match within_bounds(case, device) {
            Ok(errors) => worst.merge(&errors),
            Err(error) => failures.push(format!("{case:?}: {error:#}")),
        }
    }
    ensure!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
    Ok(worst)
}

fn both_passes_of_the_readable_kernels_are_within_the_error_bounds() -> Result<Verdict> {
    let worst = all_within_bounds(cuda_device(0)?, &cases(every_variant()))?;
    Verdict::passed(worst.to_string())
}

fn every_result_of_the_readable_kernels_repeats_in_every_bit() -> Result<Verdict> {
    const RUNS: usize = 50;
    let generator = Generator::new(cuda_device(0)?, 0)?;
    for d in DIMENSIONS {
        let draw = || generator.randn(&[3, 777, d], Kind::Float);
        let (q, k, v, d_o) = (draw()?, draw()?, draw()?, draw()?);
        let run = || -> Result<[Tensor; 5]> {
            let (o, lse) = Textbook.forward(&q, &k, &v, true)?;
            let [dq, dk, dv] = Textbook.backward([&q, &k, &v, &o, &lse, &d_o], true)?;
            Ok([o, lse, dq, dk, dv])
        };
        let first = run().with_context(|| format!("d {d}"))?;
        for _ in 0..RUNS {
            ensure!(first.iter().zip(run()?).all(|(a, b)| a.equal(&b)), "d {d} differs from its first run");
        }
    }
    Verdict::passed(format!("{RUNS} repeats for each of {} d", DIMENSIONS.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_the_emulator_both_passes_of_the_readable_kernels_are_within_the_error_bounds() {
        // Every tiles, kind and mask; all their combinations take minutes to build.
        let variants =
            [(16, Kind::Float, true), (32, Kind::Half, false), (64, Kind::BFloat16, true), (128, Kind::Float, false)];
        all_within_bounds(Device::Cpu, &cases(variants.into_iter())).unwrap();
    }
}
