//! The kernels against the definition, in the emulator and on a GPU, and what the host tells them.

use super::*;
use crate::attention::rule::{self, Case};
use crate::cuda::emulator;

#[test]
fn every_cut_and_type_computes_attention_and_its_gradient() {
    for (d, kind, is_causal) in [
        (16, Kind::Half, false),
        (32, Kind::BFloat16, true),
        (64, Kind::Float, true),
        (128, Kind::BFloat16, true),
        (128, Kind::Float, false),
    ] {
        for (n_queries, n_keys) in [(64, 128), (113, 203), (239, 1), (1, 200), (150, 140)] {
            let case = Case::draw(Device::Cpu, &[2], [n_queries, n_keys, d], kind, is_causal, 1.0).unwrap();
            case.hold(&Portable).unwrap();
        }
    }
}

#[test]
fn large_scores_equal_rows_strides_and_broadcasts() {
    for case in rule::adversarial(Device::Cpu, 64, Kind::Float).unwrap() {
        case.hold(&Portable).unwrap();
    }
}

#[test]
fn one_head_is_split_and_repeats_in_every_bit() {
    let case = Case::draw(Device::Cpu, &[], [300, 900, 64], Kind::Float, true, 1.0).unwrap();
    let run = |seed| {
        let settings = |settings: &mut emulator::Settings| (settings.seed, settings.multiprocessors) = (seed, 132);
        emulator::with(settings, || case.run(&Portable, Kind::Float).unwrap())
    };
    let variant = Variant { d: 64, element: Element::Float, is_causal: true };
    assert!(Forward::of(variant).split(300, 900, 1, 132).count > 1);
    assert!(Backward::of(variant).splits(300, 900, 1, 132).iter().all(|split| split.count > 1));
    assert!(run(1).iter().zip(run(2)).all(|(a, b)| a.equal(&b)));
}

/// Ragged lengths for each d and both kinds of types, keys that no query sees, and passes of which only one is split.
#[test]
fn parts_make_the_same_gradient() {
    for (d, kind, is_causal, n_queries, n_keys) in [
        (16, Kind::Float, true, 200, 290),
        (16, Kind::BFloat16, false, 150, 420),
        (32, Kind::Float, false, 70, 210),
        (32, Kind::BFloat16, true, 420, 300),
        (64, Kind::Float, true, 150, 330),
        (64, Kind::Half, false, 1, 530),
        (64, Kind::BFloat16, true, 420, 330),
        (128, Kind::Float, true, 140, 110),
        // The last tile's rows that are not there would see another part.
        (128, Kind::Float, true, 70, 200),
        (128, Kind::Float, false, 1, 100),
        (128, Kind::Float, false, 100, 1),
        (128, Kind::BFloat16, true, 260, 200),
    ] {
        let variant = Variant { d: d as u32, element: Element::of(kind).unwrap(), is_causal };
        let splits = Backward::of(variant).splits(n_queries, n_keys, 1, 132);
        assert!(splits.iter().any(|split| split.count > 1), "{variant:?} {n_queries} x {n_keys}: {splits:?}");
        let size = [i64::from(n_queries), i64::from(n_keys), d];
        let case = Case::draw(Device::Cpu, &[], size, kind, is_causal, 1.0).unwrap();
        emulator::with(|settings| settings.multiprocessors = 132, || case.hold(&Portable)).unwrap();
    }
}

#[test]
fn inputs_go_as_they_lie_or_as_a_copy_in_pieces_of_16_bytes() {
    let variant = Variant { d: 16, element: Element::Float, is_causal: true };
    let problem = Problem { variant, batch: 2, heads: 3, n_queries: 5, n_keys: 5 };
    let values = Tensor::arange(2 * 3 * 5 * 16, (Kind::Float, Device::Cpu)).reshape([2, 3, 5, 16]);
    let same = |a: &Tensor, b: &Tensor| a.data_ptr() == b.data_ptr();
    let inside = values.transpose(1, 2).contiguous().transpose(1, 2);
    let rows_of_ones = Tensor::ones([1, 1, 1, 16], (Kind::Float, Device::Cpu)).expand_as(&values);
    for readable in [&values, &inside, &rows_of_ones] {
        assert!(same(&problem.readable(readable).unwrap(), readable));
    }
    assert_eq!(problem.readable(&values.reshape([6, 5, 16])).unwrap().size(), [2, 3, 5, 16]);
    let ones = Tensor::ones([1, 1, 1, 1], (Kind::Float, Device::Cpu)).expand_as(&values);
    let odd = Tensor::zeros([2 * 3 * 5 * 16 + 1], (Kind::Float, Device::Cpu)).narrow(0, 1, 2 * 3 * 5 * 16);
    for unreadable in [ones, odd.reshape([2, 3, 5, 16])] {
        let copy = problem.readable(&unreadable).unwrap();
        assert!(!same(&copy, &unreadable) && lies_in_pieces(&copy) && copy.equal(&unreadable));
    }
}

#[test]
fn the_parameters_are_as_the_kernels_declare_them() {
    let variant = Variant { d: 64, element: Element::Half, is_causal: true };
    let problem = Problem { variant, batch: 2, heads: 3, n_queries: 1 << 17, n_keys: 5 };
    // 32 MiB of Q and O a head: one at a time.
    let [sizes, heads, scales, section] = problem.words(7);
    assert_eq!((sizes, heads, section), (word_of(1 << 17, 5), word_of(3, 2), word_of(1, 7)));
    assert_eq!(scales, word_of(0.125f32.to_bits(), 0.180_336_88f32.to_bits()));
    assert_eq!(problem.grid(1 << 17, 128, 2).unwrap(), 1024 * 6 * 2);
    let wide = Problem { batch: 60_000, heads: 60_000, ..problem };
    assert!(wide.grid(1, 128, 1).unwrap_err().to_string().contains("3600000000 tiles"));
}

#[test]
fn without_a_gpu_it_says_what_it_needs() {
    let words = |kind, device, d| Portable.supports(kind, device, d).unwrap_err();
    assert!(words(Kind::Double, Device::Cuda(0), 64).contains("bfloat16, float16 and float32"));
    assert!(words(Kind::Float, Device::Cuda(0), 80).contains("16, 32, 64 and 128"));
    assert!(words(Kind::Float, Device::Cpu, 64).contains("need a GPU"));
}
