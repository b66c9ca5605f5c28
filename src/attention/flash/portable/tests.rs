//! The kernels against the definition, in the emulator.

use tch::{Device, Kind};

use super::tile_config::{BackwardConfig, ForwardConfig};
use super::*;
use crate::attention::Attention as _;
use crate::attention::flash::variant::{Element, Variant};
use crate::attention::flash_tolerance::{self, Case, Passes};
use crate::cuda::emulator;

#[test]
fn every_tile_config_and_type_computes_attention_and_its_gradient() {
    for (d, kind, is_causal) in [
        (16, Kind::Half, false),
        (32, Kind::BFloat16, true),
        (64, Kind::Float, true),
        (128, Kind::BFloat16, true),
        (128, Kind::Float, false),
    ] {
        for (n_queries, n_keys) in [(64, 128), (113, 203), (239, 1), (1, 200), (150, 140)] {
            let case = Case::draw(Device::Cpu, &[2], [n_queries, n_keys, d], kind, is_causal, 1.0).unwrap();
            case.check_each(&[&Portable], Passes::Both).unwrap();
        }
    }
}

#[test]
fn adversarial_inputs_are_within_the_tolerance() {
    for case in flash_tolerance::adversarial(Device::Cpu, 64, Kind::Float).unwrap() {
        case.check_each(&[&Portable], Passes::Both).unwrap();
    }
}

#[test]
fn one_head_is_split_and_is_bitwise_reproducible() {
    let case = Case::draw(Device::Cpu, &[], [300, 900, 64], Kind::Float, true, 1.0).unwrap();
    let run = |seed| {
        let settings = |settings: &mut emulator::Settings| (settings.seed, settings.multiprocessors) = (seed, 132);
        emulator::with(settings, || case.run(&Portable, Kind::Float).unwrap())
    };
    let variant = Variant { d: 64, element: Element::Float, is_causal: true };
    assert!(ForwardConfig::of(variant).split(300, 900, 1, 132).count > 1);
    assert!(BackwardConfig::of(variant).splits(300, 900, 1, 132).iter().all(|split| split.count > 1));
    assert!(run(1).iter().zip(run(2)).all(|(a, b)| a.equal(&b)));
}

/// Ragged lengths for each d and both kinds of types, keys that no query sees, and passes of which only one is split.
#[test]
fn splits_add_up_to_the_same_gradient() {
    for (d, kind, is_causal, n_queries, n_keys) in [
        (16, Kind::Float, true, 200, 290),
        (16, Kind::BFloat16, false, 150, 420),
        (32, Kind::Float, false, 70, 210),
        (32, Kind::BFloat16, true, 420, 300),
        (64, Kind::Float, true, 150, 330),
        (64, Kind::Half, false, 1, 530),
        (64, Kind::BFloat16, true, 420, 330),
        (128, Kind::Float, true, 140, 110),
        // The missing rows of the last tile would see another split.
        (128, Kind::Float, true, 70, 200),
        (128, Kind::Float, false, 1, 100),
        (128, Kind::Float, false, 100, 1),
        (128, Kind::BFloat16, true, 260, 200),
    ] {
        let variant = Variant::of(kind, d, is_causal).unwrap();
        let splits = BackwardConfig::of(variant).splits(n_queries, n_keys, 1, 132);
        assert!(splits.iter().any(|split| split.count > 1), "{variant:?} {n_queries} x {n_keys}: {splits:?}");
        let size = [i64::from(n_queries), i64::from(n_keys), d];
        let case = Case::draw(Device::Cpu, &[], size, kind, is_causal, 1.0).unwrap();
        emulator::with(|settings| settings.multiprocessors = 132, || case.check_each(&[&Portable], Passes::Both))
            .unwrap();
    }
}

#[test]
fn query_heads_of_a_group_share_keys_and_their_gradients_are_added() {
    for (d, kind, is_causal, group_size, n_queries, n_keys) in [
        (64, Kind::Float, true, 2, 150, 130),
        (64, Kind::Float, true, 3, 113, 203),
        (64, Kind::Float, true, 8, 70, 133),
        (128, Kind::BFloat16, false, 4, 150, 160),
        (32, Kind::Half, true, 5, 200, 170),
        (16, Kind::BFloat16, true, 7, 1, 200),
        (16, Kind::BFloat16, true, 6, 239, 1),
    ] {
        let size = [n_queries, n_keys, d];
        let case = Case::draw(Device::Cpu, &[2, 2 * group_size], size, kind, is_causal, 1.0).unwrap();
        let case = case.grouped(group_size).unwrap();
        case.check_each(&[&Portable], Passes::Both).unwrap();
    }
}

/// Ragged lengths. A split begins among the queries of one head and ends among those of another.
#[test]
fn splits_of_a_group_add_up_to_the_same_gradient() {
    for (d, kind, is_causal, [batch, kv_heads, group_size], n_queries, n_keys, multiprocessors) in [
        (64, Kind::Float, true, [1, 1, 2], 150, 130, 12),
        (64, Kind::BFloat16, false, [1, 1, 3], 170, 140, 12),
        (32, Kind::BFloat16, true, [1, 2, 8], 150, 100, 12),
        (16, Kind::Half, false, [2, 1, 2], 150, 130, 12),
        (128, Kind::Float, false, [1, 1, 3], 70, 90, 12),
        (128, Kind::BFloat16, true, [1, 1, 8], 90, 130, 12),
    ] {
        let variant = Variant::of(kind, d, is_causal).unwrap();
        let config = BackwardConfig { group_size, ..BackwardConfig::of(variant) };
        let [keys, _] = config.splits(n_queries, n_keys, batch * kv_heads * group_size, multiprocessors);
        let of_head = n_queries.div_ceil(config.keys.stream);
        assert!(
            keys.count > 1 && !of_head.is_multiple_of(keys.blocks),
            "{variant:?}: {keys:?} of {of_head} blocks a head"
        );
        let leading = [batch, kv_heads * group_size].map(i64::from);
        let size = [n_queries.into(), n_keys.into(), d];
        let case = Case::draw(Device::Cpu, &leading, size, kind, is_causal, 1.0).unwrap();
        let case = case.grouped(group_size.into()).unwrap();
        let check = || case.check_each(&[&Portable], Passes::Both);
        emulator::with(|settings| settings.multiprocessors = multiprocessors, check).unwrap();
    }
}

/// Ragged lengths, several heads and batches, groups, and tiles that are whole (three multiprocessors) or split.
#[test]
fn tiles_of_keys_that_make_dq_too_compute_the_same_gradient() {
    for (d, is_causal, leading, group_size, n_queries, n_keys) in [
        (64, true, &[2, 3][..], 1, 113, 203),
        (64, false, &[2], 1, 239, 1),
        (64, true, &[1], 1, 150, 330),
        (64, false, &[3], 1, 1, 200),
        (64, true, &[2, 6], 3, 150, 130),
        (128, true, &[2], 1, 150, 140),
        (128, false, &[1], 1, 140, 110),
        (128, false, &[4], 2, 70, 200),
    ] {
        let size = [n_queries, n_keys, d];
        let case = Case::draw(Device::Cpu, leading, size, Kind::Float, is_causal, 1.0).unwrap();
        let case = case.grouped(group_size).unwrap();
        for multiprocessors in [3, 132] {
            emulator::with(
                |settings| settings.multiprocessors = multiprocessors,
                || case.check_each(&[&Fused], Passes::Both).unwrap(),
            );
        }
    }
}

#[test]
fn dq_is_bitwise_reproducible_if_tiles_of_keys_add_it() {
    let case = Case::draw(Device::Cpu, &[2], [200, 300, 64], Kind::Float, true, 1.0).unwrap();
    let run = |seed| emulator::with(|settings| settings.seed = seed, || case.run(&Fused, Kind::Float).unwrap());
    assert!(run(1).iter().zip(run(2)).all(|(a, b)| a.equal(&b)));
}

/// exp(-lse) is infinite in float32, and so would be the probability of a key that is not there.
#[test]
fn missing_keys_add_nothing_to_dq_where_every_score_is_very_negative() {
    for is_causal in [true, false] {
        let mut case = Case::draw(Device::Cpu, &[], [70, 70, 64], Kind::Float, is_causal, 1.0).unwrap();
        (case.q, case.k) = (case.q.ones_like() * 4.0, case.k.ones_like() * -4.0);
        case.check_each(&[&Fused], Passes::Both).unwrap();
    }
}

#[test]
fn without_a_gpu_it_says_what_it_needs() {
    let message = |kind, device, d| Portable.supports(kind, device, d).unwrap_err();
    assert!(message(Kind::Double, Device::Cuda(0), 64).contains("bfloat16, float16 and float32"));
    assert!(message(Kind::Float, Device::Cuda(0), 80).contains("16, 32, 64 and 128"));
    assert!(message(Kind::Float, Device::Cpu, 64).contains("need a GPU"));
}
