//! The inputs that every set of kernels gets, and those that are refused.

use rstest::rstest;

use super::*;
use crate::attention::flash::hopper::Hopper;
use crate::attention::flash::portable::Portable;
use crate::attention::flash::textbook::Textbook;
use crate::cuda::TensorMap;
use crate::torch::Generator;

const SIZES: Sizes = Sizes { batch: 2, heads: 3, n_queries: 5, n_keys: 5, d: 16, group_size: 1 };

fn same(a: &Tensor, b: &Tensor) -> bool {
    a.data_ptr() == b.data_ptr()
}

#[test]
fn inputs_are_copied_only_where_kernels_cannot_read_them() {
    for kind in [Kind::BFloat16, Kind::Float] {
        let values = Tensor::arange(2 * 3 * 5 * 16, (kind, Device::Cpu)).reshape([2, 3, 5, 16]);
        let inside = values.transpose(1, 2).contiguous().transpose(1, 2);
        let row = Tensor::ones([1, 1, 1, 16], (kind, Device::Cpu)).expand_as(&values);
        let one = Tensor::ones([1, 1, 1, 1], (kind, Device::Cpu)).expand_as(&values);
        let odd = Tensor::zeros([2 * 3 * 5 * 16 + 1], (kind, Device::Cpu)).narrow(0, 1, 2 * 3 * 5 * 16);
        let odd = odd.reshape([2, 3, 5, 16]);
        let portable = |t: &Tensor| SIZES.readable(&Portable, t).unwrap();
        assert!([&values, &inside, &row].into_iter().all(|t| same(&portable(t), t)), "{kind:?}");
        assert_eq!(portable(&values.reshape([6, 5, 16])).size(), [2, 3, 5, 16]);
        let textbook = |t: &Tensor| SIZES.readable(&Textbook, t).unwrap();
        assert!(same(&textbook(&values), &values) && !same(&textbook(&inside), &inside), "{kind:?}");
        for unreadable in [&one, &odd] {
            let copy = portable(unreadable);
            assert!(!same(&copy, unreadable) && Portable.reads(&copy) && copy.equal(unreadable), "{kind:?}");
        }
        if kind == Kind::Float {
            continue;
        }
        let hopper = |t: &Tensor| SIZES.readable(&Hopper::DEFAULT, t).unwrap();
        assert!([&values, &inside].into_iter().all(|t| same(&hopper(t), t)));
        for unreadable in [&row, &one, &odd] {
            let copy = hopper(unreadable);
            assert!(!same(&copy, unreadable) && TensorMap::fits(&copy).is_ok() && copy.equal(unreadable));
        }
    }
}

#[test]
fn saved_tensors_that_do_not_fit_q_are_named() {
    let t = |size: &[i64], kind| Tensor::zeros(size, (kind, Device::Cpu));
    let (q, lse) = (t(&[3, 16], Kind::Half), t(&[3], Kind::Float));
    for set in [&Hopper::DEFAULT as &dyn Attention, &Portable, &Textbook] {
        let error = |o: &Tensor, lse: &Tensor, d_o: &Tensor| {
            set.backward([&q, &q, &q, o, lse, d_o], false).unwrap_err().to_string()
        };
        assert!(error(&t(&[2, 16], Kind::Half), &lse, &q).contains("o is [2, 16]"));
        assert!(error(&q, &lse, &t(&[3, 16], Kind::Float)).contains("do is [3, 16], Float"));
        assert!(error(&q, &t(&[3], Kind::Half), &q).contains("lse is [3], Half"));
    }
}

/// One head of 300 is split, five are whole tiles.
#[rstest]
#[case(&Hopper::DEFAULT, Kind::BFloat16)]
#[case(&Portable, Kind::Float)]
#[case(&Textbook, Kind::Float)]
fn a_result_is_the_same_in_rows_of_all_heads(#[case] set: &dyn Attention, #[case] kind: Kind) {
    for heads in [1, 5] {
        let [q, k, v] =
            [1, 2, 3].map(|seed| Generator::new(Device::Cpu, seed).unwrap().randn(&[2, heads, 300, 64], kind).unwrap());
        let (expected, expected_lse) = set.forward(&q, &k, &v, true).unwrap();
        let rows = Tensor::full([2, 300, heads, 64], f64::NAN, (kind, Device::Cpu));
        let lse = set.forward_into([&q, &k, &v], &rows.transpose(1, 2), true).unwrap();
        assert!(rows.transpose(1, 2).equal(&expected) && lse.equal(&expected_lse), "{} {heads}", set.name());
        let error = set.forward_into([&q, &k, &v], &rows, true).unwrap_err().to_string();
        assert!(error.contains("o is [2, 300,"), "{error}");
    }
}

#[test]
fn a_grid_that_cuda_does_not_allow_is_an_error_with_its_sizes() {
    assert_eq!(SIZES.for_all_heads(7).unwrap(), 42);
    let wide = Sizes { batch: 60_000, heads: 60_000, ..SIZES };
    assert_eq!(wide.all_heads(), 3_600_000_000);
    let error = wide.for_all_heads(1).unwrap_err().to_string();
    assert!(error.contains("1 tiles of each of 60000 x 60000 heads"), "{error}");
    assert!(SIZES.for_all_heads(u64::MAX).is_err());
    let largest = Sizes { batch: 1, heads: 1, ..SIZES };
    assert_eq!(largest.for_all_heads(i32::MAX as u64).unwrap(), i32::MAX as u32);
    let shape =
        |leading: &[i64], n: i64| Shape { leading: leading.into(), n_queries: n, n_keys: n, d: 16, group_size: 1 };
    for (leading, n, expected) in [
        (&[65_536, 1][..], 5, "65536 batches are more than the 65535"),
        (&[2, 65_536], 5, "65536 heads are more than the 65535"),
        (&[2], (1 << 30) + 1, "1073741825 queries are more than the 1073741824"),
    ] {
        let error = Sizes::of(&shape(leading, n)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn scales_are_those_of_eq_4() {
    let sizes = |d| Sizes { d, ..SIZES };
    assert_eq!((sizes(64).scale(), sizes(64).scale_log2()), (0.125, 0.180_336_88));
    assert_eq!(sizes(80).scale(), (1.0 / 80f64.sqrt()) as f32);
}

#[test]
fn a_call_that_fails_names_the_kernels_and_the_shape() {
    // A row for each of 65,536 heads, which the readable kernels' grid counts in one direction.
    let q = Tensor::zeros([2, 40_000, 1, 16], (Kind::Float, Device::Cpu));
    let error = format!("{:#}", Textbook.forward(&q, &q, &q, false).unwrap_err());
    assert!(error.contains("textbook attention of q [2, 40000, 1, 16] and k [2, 40000, 1, 16]"), "{error}");
    assert!(error.contains("80000") && error.contains("65535"), "{error}");
}

#[test]
fn the_readable_kernels_refuse_heads_in_groups() {
    let tensor = |heads: i64| Tensor::zeros([heads, 5, 16], (Kind::Float, Device::Cpu));
    let (q, k) = (tensor(6), tensor(2));
    let error = format!("{:#}", Textbook.forward(&q, &k, &k, false).unwrap_err());
    assert!(error.contains("q has 6 heads and k 2") && error.contains("use flash or sdpa"), "{error}");
}
