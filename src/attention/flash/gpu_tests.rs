//! The kernels against the definition, on ragged and adversarial shapes; what only a GPU can show.

use tch::{Device, IndexOp as _, Kind, Tensor};

use super::*;
use crate::attention::naive::Naive;
use crate::torch::cuda_device;
use crate::torch::stream::synchronize;

/// The first GPU; these tests are ignored unless asked for, and without one they fail rather than pass unrun.
fn gpu() -> Device {
    cuda_device(0).expect("run with --ignored only where a GPU is")
}

/// Inputs and the upstream gradient of one case, in the kind that is tested.
struct Case {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_o: Tensor,
    is_causal: bool,
}

impl Case {
    fn draw(leading: &[i64], [n_queries, n_keys, d]: [i64; 3], kind: Kind, is_causal: bool, scale: f64) -> Self {
        tch::manual_seed(n_queries * 31 + n_keys * 7 + d);
        let draw = |n: i64| Tensor::randn([leading, &[n, d]].concat(), (Kind::Float, gpu())) * scale;
        let [q, k, v, d_o] = [draw(n_queries), draw(n_keys), draw(n_keys), draw(n_queries)].map(|t| t.to_kind(kind));
        Self { q, k, v, d_o, is_causal }
    }

    fn run(&self, implementation: &dyn Attention, widen: Option<Kind>) -> [Tensor; 5] {
        let [q, k, v, d_o] =
            [&self.q, &self.k, &self.v, &self.d_o].map(|t| widen.map_or(t.shallow_clone(), |kind| t.to_kind(kind)));
        let (o, lse) = implementation.forward(&q, &k, &v, self.is_causal).unwrap();
        let (dq, dk, dv) = implementation.backward(&q, &k, &v, &o, &lse, &d_o, self.is_causal).unwrap();
        synchronize(gpu()).unwrap();
        [o, lse, dq, dk, dv]
    }

    /// FlashAttention's own rule: at most twice the error of the plain operations in the narrow kind, and a rounding.
    fn check(&self, name: &str) -> Result<(), String> {
        let exact = self.run(&Naive, Some(Kind::Double));
        let plain = {
            let leaves = [&self.q, &self.k, &self.v].map(|t| t.copy().set_requires_grad(true));
            let o = crate::attention::naive::attention(&leaves[0], &leaves[1], &leaves[2], self.is_causal).unwrap();
            let gradients = Tensor::run_backward(&[(&o * &self.d_o).sum(Kind::Float)], &leaves, false, false);
            let [dq, dk, dv] = <[Tensor; 3]>::try_from(gradients).unwrap();
            [o.detach(), exact[1].copy(), dq, dk, dv]
        };
        let ours = self.run(&Flash, None);
        let largest = |a: &Tensor, b: &Tensor| (a.to_kind(Kind::Double) - b).abs().max().double_value(&[]);
        for (i, what) in ["o", "lse", "dq", "dk", "dv"].iter().enumerate() {
            let (error, allowed) = (largest(&ours[i], &exact[i]), largest(&plain[i], &exact[i]));
            let magnitude = exact[i].abs().max().double_value(&[]);
            let rounding = match *what {
                "lse" => 1e-4 * (1.0 + magnitude),
                _ => 2.0 * magnitude * if self.q.kind() == Kind::Half { 2f64.powi(-11) } else { 2f64.powi(-8) },
            };
            // An error that is not a number is within nothing.
            let within = error <= 2.0 * allowed + rounding;
            if !within {
                return Err(format!("{name}: {what} is off by {error:.2e}, the plain operations by {allowed:.2e}"));
            }
        }
        Ok(())
    }
}

/// FlashAttention's ragged lengths, and tiles, their neighbours and single rows.
const LENGTHS: [(i64, i64); 18] = [
    (64, 128),
    (128, 128),
    (192, 256),
    (384, 384),
    (1, 1),
    (1, 200),
    (200, 1),
    (63, 65),
    (113, 203),
    (239, 1),
    (799, 3),
    (108, 256),
    (256, 512),
    (640, 128),
    (1023, 1024),
    (1024, 1023),
    (1500, 1500),
    (2048, 2048),
];

#[test]
#[ignore = "needs a Hopper GPU; there, run cargo test --lib -- --ignored flash"]
fn every_variant_on_ragged_shapes() {
    let mut failures = Vec::new();
    for d in tile::DIMENSIONS {
        for (kind, is_causal) in
            [(Kind::BFloat16, true), (Kind::BFloat16, false), (Kind::Half, true), (Kind::Half, false)]
        {
            for (n_queries, n_keys) in LENGTHS {
                let case = Case::draw(&[2, 3], [n_queries, n_keys, d], kind, is_causal, 1.0);
                let name = format!("d {d}, {kind:?}, causal {is_causal}, {n_queries} x {n_keys}");
                failures.extend(case.check(&name).err());
            }
        }
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
#[ignore = "needs a Hopper GPU; there, run cargo test --lib -- --ignored flash"]
fn large_scores_equal_rows_strides_and_broadcasts() {
    let mut failures = Vec::new();
    for d in tile::DIMENSIONS {
        let shape = [300, 300, d];
        failures
            .extend(Case::draw(&[4], shape, Kind::BFloat16, true, 6.0).check(&format!("large scores, d {d}")).err());
        let mut equal = Case::draw(&[4], shape, Kind::BFloat16, false, 1.0);
        equal.k = equal.k.i((.., 0..1, ..)).expand_as(&equal.k).copy();
        failures.extend(equal.check(&format!("equal rows, d {d}")).err());
        let mut strided = Case::draw(&[2, 3], shape, Kind::BFloat16, true, 1.0);
        let turned = |t: &Tensor| t.transpose(1, 2).contiguous().transpose(1, 2);
        strided = Case { q: turned(&strided.q), k: turned(&strided.k), v: turned(&strided.v), ..strided };
        failures.extend(strided.check(&format!("heads inside rows, d {d}")).err());
        let mut broadcast = Case::draw(&[2, 3], shape, Kind::BFloat16, true, 1.0);
        broadcast.d_o = Tensor::ones([1, 1, 1, 1], (Kind::BFloat16, gpu())).expand_as(&broadcast.q);
        failures.extend(broadcast.check(&format!("do of ones, d {d}")).err());
    }
    assert!(failures.is_empty(), "{} cases fail:\n{}", failures.len(), failures.join("\n"));
}

#[test]
#[ignore = "needs a Hopper GPU; there, run cargo test --lib -- --ignored flash"]
fn all_but_dq_repeat_in_every_bit() {
    for d in tile::DIMENSIONS {
        let case = Case::draw(&[1, 3], [777, 777, d], Kind::BFloat16, true, 1.0);
        let first = case.run(&Flash, None);
        for _ in 0..200 {
            let again = case.run(&Flash, None);
            for i in [0, 1, 3, 4] {
                assert!(first[i].equal(&again[i]), "result {i} of d {d} differs from its first run");
            }
        }
    }
}
