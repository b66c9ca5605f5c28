//! The tile configurations as a table, and the kernels against the exact answers within derived bounds.

use super::*;
use crate::attention::Attention as _;
use crate::attention::cases::{Case, Fill, Inputs, Layout};
use crate::attention::error_bounds::{self, Bounded, LargestErrors};
use crate::cuda::emulator;

#[test]
fn every_tile_config_fits_a_block_and_divides_among_its_threads() {
    assert_eq!(Variant::all().count(), 24);
    for tiles in Variant::all().flat_map(|variant| [TileConfig::forward(variant), TileConfig::backward(variant)]) {
        assert!(tiles.shared_bytes() <= SHARED_LIMIT, "{tiles:?} takes {} bytes", tiles.shared_bytes());
        assert!(tiles.queries % GROUPS == 0 && tiles.keys % GROUPS == 0 && tiles.variant.d % LANES == 0, "{tiles:?}");
    }
}

#[test]
fn tile_configs_are_as_the_kernels_lay_them_out() {
    // d, then of each direction B_q, B_k and the bytes of its tiles.
    let table = [
        (16, (64, 64, 32_768), (64, 64, 37_888)),
        (32, (64, 64, 45_056), (64, 64, 54_272)),
        (64, (64, 64, 69_632), (64, 32, 61_440)),
        (128, (64, 32, 76_800), (32, 32, 72_192)),
    ];
    for (d, forward, backward) in table {
        let variant = Variant { d, element: "float", is_causal: false };
        for (tiles, expected) in [(TileConfig::forward(variant), forward), (TileConfig::backward(variant), backward)] {
            assert_eq!((tiles.queries, tiles.keys, tiles.shared_bytes()), expected, "{tiles:?}");
        }
    }
}

#[test]
fn without_a_gpu_it_says_what_it_needs() {
    let words = |kind, device, d| Textbook.supports(kind, device, d).unwrap_err();
    assert!(words(Kind::Double, Device::Cuda(0), 64).contains("float32, bfloat16 and float16"));
    assert!(words(Kind::Half, Device::Cuda(0), 80).contains("16, 32, 64 and 128"));
    assert!(words(Kind::Float, Device::Cpu, 64).contains("need a GPU"));
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

/// Checks both passes by [`error_bounds`], which are those of sums in float32.
fn check(case: &Case, device: Device) -> Result<LargestErrors> {
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
    // The backward pass from the exact o and lse, so that its errors are its own.
    let (o_exact, lse_exact) = (expected.o.value.to_kind(case.kind), expected.lse.value.to_kind(Kind::Float));
    let (dq, dk, dv) = Textbook.backward(&q, &k, &v, &there(&o_exact), &there(&lse_exact), &d_o, case.is_causal)?;
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
    Ok(worst)
}

fn check_all(device: Device, cases: &[Case]) {
    let failures: Vec<String> =
        cases.iter().filter_map(|case| Some(format!("{case:?}: {:#}", check(case, device).err()?))).collect();
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
#[ignore = "needs a GPU of compute capability 8.0 or above; there, run cargo test --lib -- --ignored textbook"]
fn on_a_gpu_both_passes_are_within_the_error_bounds() {
    let device = crate::torch::cuda_device(0).expect("run with --ignored only where a GPU is");
    check_all(device, &cases(every_variant()));
}

#[test]
#[ignore = "needs a GPU of compute capability 8.0 or above; there, run cargo test --lib -- --ignored textbook"]
fn on_a_gpu_every_result_repeats_in_every_bit() {
    let device = crate::torch::cuda_device(0).expect("run with --ignored only where a GPU is");
    let generator = crate::torch::Generator::new(device, 0).unwrap();
    for d in DIMENSIONS {
        let draw = || generator.randn(&[3, 777, d], Kind::Float).unwrap();
        let [q, k, v, d_o] = std::array::from_fn(|_| draw());
        let run = || {
            let (o, lse) = Textbook.forward(&q, &k, &v, true).unwrap();
            let (dq, dk, dv) = Textbook.backward(&q, &k, &v, &o, &lse, &d_o, true).unwrap();
            [o, lse, dq, dk, dv]
        };
        let first = run();
        for _ in 0..50 {
            assert!(first.iter().zip(run()).all(|(a, b)| a.equal(&b)), "d {d} differs from its first run");
        }
    }
}

#[test]
fn both_passes_are_within_the_error_bounds() {
    // Every tiles, kind and mask; all their combinations take minutes to build.
    let variants =
        [(16, Kind::Float, true), (32, Kind::Half, false), (64, Kind::BFloat16, true), (128, Kind::Float, false)];
    check_all(Device::Cpu, &cases(variants.into_iter()));
}

#[test]
fn results_do_not_depend_on_the_order_of_threads() {
    let case = Case { n_queries: 150, n_keys: 150, d: 64, is_causal: true, ..Case::plain() };
    let Inputs { q, k, v, d_o } = case.inputs().unwrap();
    let run = |seed| {
        emulator::with_seed(seed, || {
            let (o, lse) = Textbook.forward(&q, &k, &v, true).unwrap();
            let (dq, dk, dv) = Textbook.backward(&q, &k, &v, &o, &lse, &d_o, true).unwrap();
            [o, lse, dq, dk, dv]
        })
    };
    let first = run(1);
    for seed in 2..5 {
        assert!(first.iter().zip(run(seed)).all(|(a, b)| a.equal(&b)), "seed {seed} differs from seed 1");
    }
}
