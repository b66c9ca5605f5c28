//! The kernels against the definition, in the emulator.

use super::splits::TileSplits;
use super::tile_config::{BackwardConfig, ForwardConfig};
use super::*;
use crate::attention::flash_tolerance::{self, Case};
use crate::cuda::emulator;

#[test]
fn every_tile_config_computes_attention_and_its_gradient() {
    for (d, kind, is_causal) in [
        (16, Kind::Half, false),
        (32, Kind::BFloat16, true),
        (64, Kind::BFloat16, true),
        (80, Kind::BFloat16, true),
        (80, Kind::Half, false),
        (96, Kind::BFloat16, true),
        (96, Kind::Half, false),
        (128, Kind::BFloat16, true),
        (128, Kind::Half, false),
    ] {
        // One tile, ragged tiles of both, a single row, and more keys than queries.
        for (n_queries, n_keys) in [(64, 128), (113, 203), (239, 1), (1, 200), (300, 140)] {
            let case = Case::draw(Device::Cpu, &[2], [n_queries, n_keys, d], kind, is_causal, 1.0).unwrap();
            case.check_each(&Hopper::SIZES, flash_tolerance::Passes::Both).unwrap();
        }
    }
}

#[test]
fn shorter_rows_run_in_the_kernels_of_the_next_dimension() {
    for (d, kind, is_causal) in [
        (8, Kind::Half, false),
        (24, Kind::BFloat16, true),
        (40, Kind::BFloat16, true),
        (72, Kind::BFloat16, true),
        (88, Kind::Half, false),
        (104, Kind::BFloat16, true),
        (120, Kind::BFloat16, true),
    ] {
        for (n_queries, n_keys) in [(113, 203), (239, 1), (1, 200)] {
            let case = Case::draw(Device::Cpu, &[2], [n_queries, n_keys, d], kind, is_causal, 1.0).unwrap();
            case.check_each(&Hopper::SIZES, flash_tolerance::Passes::Both).unwrap();
        }
    }
}

#[test]
fn query_heads_of_a_group_share_keys_and_their_gradients_are_added() {
    for (d, kind, is_causal, group_size, n_queries, n_keys) in [
        (64, Kind::BFloat16, true, 1, 130, 70),
        (64, Kind::BFloat16, true, 2, 300, 140),
        (64, Kind::BFloat16, true, 3, 113, 203),
        (64, Kind::BFloat16, true, 8, 70, 333),
        (128, Kind::Half, false, 4, 150, 260),
        (128, Kind::BFloat16, true, 5, 200, 170),
        (128, Kind::BFloat16, true, 7, 1, 200),
        (40, Kind::BFloat16, true, 6, 239, 1),
        (80, Kind::BFloat16, true, 2, 170, 150),
        (96, Kind::BFloat16, true, 3, 170, 150),
    ] {
        let size = [n_queries, n_keys, d];
        let case = Case::draw(Device::Cpu, &[2, 2 * group_size], size, kind, is_causal, 1.0).unwrap();
        let case = case.grouped(group_size).unwrap();
        case.check_each(&Hopper::SIZES, flash_tolerance::Passes::Both).unwrap();
    }
}

/// Ragged lengths. A split begins among the queries of one head and ends among those of another.
#[test]
fn splits_of_a_group_add_up_to_the_same_gradient() {
    for (d, is_causal, [batch, kv_heads, group_size], n_queries, n_keys, multiprocessors) in [
        (64, true, [1, 1, 2], 300, 200, 7),
        (64, false, [1, 1, 3], 300, 150, 4),
        (64, true, [1, 2, 8], 290, 140, 10),
        // No query sees the last two tiles of keys.
        (64, true, [1, 1, 8], 100, 300, 4),
        (128, true, [1, 1, 3], 170, 200, 7),
        (128, false, [1, 1, 2], 170, 140, 6),
        (80, true, [2, 1, 3], 170, 200, 15),
        (80, false, [1, 1, 2], 170, 140, 6),
        (96, true, [1, 1, 8], 170, 150, 6),
        (96, false, [1, 2, 3], 170, 140, 9),
    ] {
        let variant = Hopper::DEFAULT.variant(Kind::BFloat16, d, is_causal).unwrap();
        let config = BackwardConfig { group_size, ..BackwardConfig::of(variant) };
        let steps = config.steps(n_queries, n_keys);
        let splits = TileSplits::of(&steps, batch * kv_heads, multiprocessors).unwrap();
        let of_head = steps[0] / group_size;
        assert!(splits.steps > 1 && !of_head.is_multiple_of(splits.steps), "{steps:?} by {}", splits.steps);
        let leading = [batch, kv_heads * group_size].map(i64::from);
        let size = [n_queries.into(), n_keys.into(), d];
        let case = Case::draw(Device::Cpu, &leading, size, Kind::BFloat16, is_causal, 1.0).unwrap();
        let case = case.grouped(group_size.into()).unwrap();
        let check = || case.check_each(&[&Hopper::DEFAULT], flash_tolerance::Passes::Both);
        emulator::with(|settings| settings.multiprocessors = multiprocessors, check).unwrap();
    }
}

#[test]
fn adversarial_inputs_are_within_the_tolerance() {
    for d in [64, 80, 96] {
        for case in flash_tolerance::adversarial(Device::Cpu, d, Kind::BFloat16).unwrap() {
            case.check_each(&Hopper::SIZES, flash_tolerance::Passes::Both).unwrap();
        }
    }
}

#[test]
fn one_head_is_split_and_its_splits_add_up() {
    for (d, n_queries, n_keys, is_causal) in [
        (64, 900, 900, true),
        (128, 700, 500, false),
        (64, 600, 1100, true),
        (64, 1000, 150, true),
        (40, 600, 900, true),
        (80, 500, 700, false),
        (96, 600, 500, true),
    ] {
        let case = Case::draw(Device::Cpu, &[], [n_queries, n_keys, d], Kind::BFloat16, is_causal, 1.0).unwrap();
        let variant = Hopper::DEFAULT.variant(Kind::BFloat16, d, is_causal).unwrap();
        let (n, keys) = (n_queries as u32, n_keys as u32);
        let forward = ForwardConfig::of(variant, TileSize::Large).steps(n, keys);
        let backward = BackwardConfig::of(variant).steps(n, keys);
        assert!(
            [&forward, &backward].iter().any(|steps| TileSplits::of(steps, 1, 132).is_some()),
            "{forward:?} and {backward:?} are left whole"
        );
        emulator::with(
            |settings| settings.multiprocessors = 132,
            || case.check_each(&Hopper::SIZES, flash_tolerance::Passes::Both),
        )
        .unwrap();
    }
}

#[test]
fn a_tile_is_the_same_whichever_cta_takes_it() {
    let run = |attention: &dyn Attention, case: &Case, seed, multiprocessors| {
        let change = |settings: &mut emulator::Settings| *settings = emulator::Settings { seed, multiprocessors };
        emulator::with(change, || attention.forward(&case.q, &case.k, &case.v, case.is_causal).unwrap())
    };
    // Tiles of a single step and of several; one multiprocessor's blocks take all that are not others' first ones.
    for (leading, n_queries, n_keys, d, is_causal) in [
        (&[2, 5][..], 500, 333, 64, true),
        (&[7], 300, 70, 128, false),
        (&[3], 450, 450, 128, true),
        (&[40], 50, 60, 16, true),
    ] {
        let case = Case::draw(Device::Cpu, leading, [n_queries, n_keys, d], Kind::BFloat16, is_causal, 1.0).unwrap();
        case.check_each(&Hopper::SIZES, flash_tolerance::Passes::Forward).unwrap();
        for attention in Hopper::SIZES {
            let (o, lse) = run(attention, &case, 1, 1);
            for (seed, multiprocessors) in [(2, 1), (3, 2), (4, 5)] {
                let (again, lse_again) = run(attention, &case, seed, multiprocessors);
                assert!(
                    o.equal(&again) && lse.equal(&lse_again),
                    "{}: seed {seed} on {multiprocessors} multiprocessors differs",
                    case.name
                );
            }
        }
    }
}

#[test]
fn every_tile_is_computed_once_if_heads_are_in_sections() {
    // So many keys that the heads are worked on by four and three, though the mask hides all but the first 700.
    let (heads, n_queries, n_keys, d) = (7, 700, 131_072, 16);
    assert_eq!(tile_config::heads_at_a_time(heads, 4 * n_keys * 16), 4);
    let options = (Kind::BFloat16, Device::Cpu);
    let case = Case::draw(Device::Cpu, &[heads.into()], [n_queries, n_queries, d], options.0, true, 1.0).unwrap();
    let longer = |t: &Tensor| {
        let hidden = Tensor::zeros([heads.into(), n_keys as i64 - n_queries, d], options);
        Tensor::cat(&[t, &hidden], 1)
    };
    for attention in Hopper::SIZES {
        let (o, lse) = attention.forward(&case.q, &case.k, &case.v, true).unwrap();
        let (same_o, same_lse) = attention.forward(&case.q, &longer(&case.k), &longer(&case.v), true).unwrap();
        assert!(o.equal(&same_o) && lse.equal(&same_lse), "{}", attention.name());
    }
}

#[test]
fn results_do_not_depend_on_the_order_of_threads_and_copies() {
    let case = Case::draw(Device::Cpu, &[2, 2], [400, 400, 64], Kind::BFloat16, true, 1.0).unwrap();
    for attention in Hopper::SIZES {
        let settings = |seed| move |settings: &mut emulator::Settings| settings.seed = seed;
        let run = |seed| emulator::with(settings(seed), || case.run(attention, Kind::BFloat16).unwrap());
        let first = run(1);
        for seed in 2..5 {
            for (i, (a, b)) in first.iter().zip(run(seed)).enumerate() {
                // Blocks run one after the other here, so that even dq's sums come in one order.
                assert!(a.equal(&b), "{}: result {i} of seed {seed} differs from seed 1's", attention.name());
            }
        }
    }
}

#[test]
fn without_a_hopper_gpu_it_says_what_it_needs() {
    let message = |kind, device, d| Hopper::DEFAULT.supports(kind, device, d).unwrap_err();
    assert!(message(Kind::Float, Device::Cuda(0), 64).contains("bfloat16 and float16"));
    for d in [12, 136] {
        assert!(message(Kind::Half, Device::Cuda(0), d).contains(&format!("multiples of 8 up to 128, not {d}")));
    }
    assert!(message(Kind::Half, Device::Cpu, 64).contains("need a GPU"));
}
