//! The tile configurations as a table, and results that do not depend on the order of threads;
//! `checks::device::attention` checks the kernels against the error bounds.

use tch::{Device, Kind};

use super::*;
use crate::attention::Attention as _;
use crate::attention::cases::{Case, Inputs};
use crate::cuda::emulator;

#[test]
fn every_tile_config_fits_a_block_and_divides_among_its_threads() {
    const SHARED_LIMIT: u32 = 99 * 1024;
    for tiles in Variant::all(crate::attention::flash::DIMENSIONS, Element::ALL)
        .flat_map(|variant| [TileConfig::forward(variant), TileConfig::backward(variant)])
    {
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
        let variant = Variant { d, element: Element::Float, is_causal: false };
        for (tiles, expected) in [(TileConfig::forward(variant), forward), (TileConfig::backward(variant), backward)] {
            assert_eq!((tiles.queries, tiles.keys, tiles.shared_bytes()), expected, "{tiles:?}");
        }
    }
}

#[test]
fn without_a_gpu_it_says_what_it_needs() {
    let message = |kind, device, d| Textbook.supports(kind, device, d).unwrap_err();
    assert!(message(Kind::Double, Device::Cuda(0), 64).contains("bfloat16, float16 and float32"));
    assert!(message(Kind::Half, Device::Cuda(0), 80).contains("16, 32, 64 and 128"));
    assert!(message(Kind::Float, Device::Cpu, 64).contains("need a GPU"));
}

#[test]
fn results_do_not_depend_on_the_order_of_threads() {
    let case = Case { n_queries: 150, n_keys: 150, d: 64, is_causal: true, ..Case::plain() };
    let Inputs { q, k, v, d_o } = case.inputs().unwrap();
    let run = |seed| {
        let settings = |settings: &mut emulator::Settings| settings.seed = seed;
        emulator::with(settings, || {
            let (o, lse) = Textbook.forward(&q, &k, &v, true).unwrap();
            let [dq, dk, dv] = Textbook.backward([&q, &k, &v, &o, &lse, &d_o], true).unwrap();
            [o, lse, dq, dk, dv]
        })
    };
    let first = run(1);
    for seed in 2..5 {
        assert!(first.iter().zip(run(seed)).all(|(a, b)| a.equal(&b)), "seed {seed} differs from seed 1");
    }
}
