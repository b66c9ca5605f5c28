//! Shapes, groups of heads, and every implementation against the definition.

use clap::ValueEnum as _;

use super::*;
use crate::torch::Generator;

#[test]
fn shapes_that_do_not_fit_are_named() {
    let t = |size: &[i64]| Tensor::zeros(size, (Kind::Float, Device::Cpu));
    let error = |q: &Tensor, k: &Tensor, v: &Tensor| Shape::of(q, k, v).unwrap_err().to_string();
    assert!(error(&t(&[3]), &t(&[3, 2]), &t(&[3, 2])).contains("q has shape [3]"));
    assert!(error(&t(&[2, 3, 4]), &t(&[3, 4]), &t(&[3, 4])).contains("k has shape [3, 4]"));
    assert!(error(&t(&[3, 4]), &t(&[5, 4]), &t(&[6, 4])).contains("v has shape [6, 4]"));
    for (n_queries, n_keys, d, batch) in [(0, 5, 4, 2), (3, 0, 4, 2), (3, 5, 0, 2), (3, 5, 4, 0)] {
        let (q, k) = (t(&[batch, n_queries, d]), t(&[batch, n_keys, d]));
        assert!(error(&q, &k, &k).contains("an empty one"));
        for &choice in ImplementationName::value_variants() {
            assert!(attention(choice, &q, &k, &k, false).unwrap_err().to_string().contains("an empty one"));
        }
    }
    assert!(error(&t(&[3, 4]), &t(&[5, 4]).to_kind(Kind::Half), &t(&[5, 4])).contains("k is Half"));
    let fits = Shape::of(&t(&[2, 3, 4]), &t(&[2, 5, 4]), &t(&[2, 5, 4])).unwrap();
    assert_eq!(fits, Shape { leading: vec![2], n_queries: 3, n_keys: 5, d: 4, group_size: 1 });
    let grouped = |heads: i64| Shape::of(&t(&[2, 6, 3, 4]), &t(&[2, heads, 5, 4]), &t(&[2, heads, 5, 4]));
    assert_eq!(grouped(2).unwrap().group_size, 3);
    assert!(grouped(4).unwrap_err().to_string().contains("q has 6 heads and k 4"));
    assert!(grouped(12).unwrap_err().to_string().contains("q has 6 heads and k 12"));
    assert!(error(&t(&[4, 3, 4]), &t(&[1, 4, 5, 4]), &t(&[1, 4, 5, 4])).contains("k has shape [1, 4, 5, 4]"));
}

#[test]
fn every_implementation_agrees_on_a_ragged_causal_case_and_its_gradient() {
    let generator = Generator::new(Device::Cpu, 5).unwrap();
    let draw = |heads: i64, n: i64| generator.randn(&[2, heads, n, 8], Kind::Float).unwrap();
    for (heads, kv_heads) in [(3, 3), (6, 2), (8, 1)] {
        let (q, k, v, d_o) = (draw(heads, 37), draw(kv_heads, 21), draw(kv_heads, 21), draw(heads, 37));
        let (o, lse) = naive::Naive.forward(&q, &k, &v, true).unwrap();
        let [dq, dk, dv] = naive::Naive.backward([&q, &k, &v, &o, &lse, &d_o], true).unwrap();
        for choice in ImplementationName::ON_CPU {
            let implementation = choice.implementation().unwrap().as_attention().unwrap();
            implementation.supports(Kind::Float, Device::Cpu, 8).unwrap();
            let (o2, lse2) = implementation.forward(&q, &k, &v, true).unwrap();
            let [dq2, dk2, dv2] = implementation.backward([&q, &k, &v, &o2, &lse2, &d_o], true).unwrap();
            for (a, b) in [(&o, &o2), (&lse, &lse2), (&dq, &dq2), (&dk, &dk2), (&dv, &dv2)] {
                assert!(a.allclose(b, 1e-4, 1e-5, false), "{}, {heads}/{kv_heads} heads", implementation.name());
            }
        }
    }
}

#[test]
fn a_query_head_reads_the_key_head_of_its_group() {
    let generator = Generator::new(Device::Cpu, 7).unwrap();
    let draw = |heads: i64, n: i64| generator.randn(&[2, heads, n, 8], Kind::Double).unwrap();
    let (q, k, v, d_o) = (draw(6, 9), draw(2, 11), draw(2, 11), draw(6, 9));
    let attend = |[q, k, v]: &[Tensor; 3]| naive::attention(q, k, v, true);
    let (o, [dq, dk, dv]) = differentiate([&q, &k, &v], &d_o, attend).unwrap();
    let head = |t: &Tensor, i: i64| t.narrow(1, i, 1);
    for kv_head in 0..2 {
        let (mut sum_dk, mut sum_dv) = (head(&dk, kv_head).zeros_like(), head(&dv, kv_head).zeros_like());
        for i in 3 * kv_head..3 * kv_head + 3 {
            let inputs = [&head(&q, i), &head(&k, kv_head), &head(&v, kv_head)];
            let (own_o, [own_dq, own_dk, own_dv]) = differentiate(inputs, &head(&d_o, i), attend).unwrap();
            assert!(own_o.allclose(&head(&o, i), 1e-12, 1e-12, false));
            assert!(own_dq.allclose(&head(&dq, i), 1e-12, 1e-12, false));
            (sum_dk, sum_dv) = (sum_dk + own_dk, sum_dv + own_dv);
        }
        assert!(sum_dk.allclose(&head(&dk, kv_head), 1e-12, 1e-12, false));
        assert!(sum_dv.allclose(&head(&dv, kv_head), 1e-12, 1e-12, false));
    }
}

#[test]
fn unsupported_inputs_are_refused_with_the_reasons_of_both_kernel_sets() {
    let q = Tensor::zeros([2, 5, 80], (Kind::Float, Device::Cpu));
    let error = format!("{:#}", attention(ImplementationName::Flash, &q, &q, &q, true).unwrap_err());
    assert!(error.contains("not Float") && error.contains("not 80"), "{error}");
    let q = Tensor::zeros([2, 5, 64], (Kind::BFloat16, Device::Cpu));
    for choice in [ImplementationName::Flash, ImplementationName::FlashDeterministic] {
        let error = format!("{:#}", attention(choice, &q, &q, &q, true).unwrap_err());
        assert_eq!(error.matches("need a GPU").count(), 2, "{error}");
    }
}

#[test]
fn under_autocast_the_tiled_node_keeps_its_scores_in_float32() {
    let generator = Generator::new(Device::Cpu, 8).unwrap();
    let draw = |kind| generator.randn(&[2, 40, 16], kind).unwrap();
    // As a model leaves them: rotated queries and keys in float32, values in bfloat16.
    let (q, k, v) = (draw(Kind::Float), draw(Kind::Float), draw(Kind::BFloat16));
    let leaf = q.copy().set_requires_grad(true);
    let tiled = || attention(ImplementationName::Tiled, &leaf, &k, &v, true);
    let o = crate::torch::autocast(Device::Cpu, Kind::BFloat16, tiled).unwrap();
    let lse = autograd::saved_tensors(&o).unwrap().remove(4);
    let narrow = |t: &Tensor| t.to_kind(Kind::BFloat16);
    let (expected_o, expected_lse) = naive::Naive.forward(&narrow(&q), &narrow(&k), &v, true).unwrap();
    assert!(lse.allclose(&expected_lse, 1e-6, 1e-6, false));
    assert_eq!(o.kind(), Kind::BFloat16);
    assert!(o.allclose(&expected_o, 1e-2, 1e-2, false));
}

#[test]
fn every_implementation_is_differentiable_and_gives_the_same_gradient() {
    let generator = Generator::new(Device::Cpu, 6).unwrap();
    let draw = || generator.randn(&[2, 19, 8], Kind::Float).unwrap();
    let (q, k, v, d_o) = (draw(), draw(), draw(), draw());
    let gradients = ImplementationName::ON_CPU
        .map(|choice| differentiate([&q, &k, &v], &d_o, |[q, k, v]| attention(choice, q, k, v, true)).unwrap().1);
    for other in &gradients[1..] {
        for (a, b) in gradients[0].iter().zip(other) {
            assert!(a.allclose(b, 1e-4, 1e-5, false));
        }
    }
}
