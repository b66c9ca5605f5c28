//! The kernels against the definition on a GPU, and what only a GPU can show: that results repeat there.

use super::*;
use crate::attention::rule::{self, Case, Shares};
use crate::torch::cuda_device;
use crate::torch::stream::synchronize;

/// The first GPU; these tests are ignored unless asked for, and without one they fail rather than pass unrun.
fn gpu() -> Device {
    cuda_device(0).expect("run with --ignored only where a GPU is")
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

fn hold(cases: impl IntoIterator<Item = Case>) {
    let outcomes: Vec<Result<Shares>> = cases.into_iter().map(|case| case.hold(&Flash)).collect();
    let failures: Vec<String> = outcomes.iter().filter_map(|o| Some(format!("{:#}", o.as_ref().err()?))).collect();
    assert!(failures.is_empty(), "{} of {} cases fail:\n{}", failures.len(), outcomes.len(), failures.join("\n"));
}

#[test]
#[ignore = "needs a Hopper GPU; there, run cargo test --lib -- --ignored flash"]
fn every_variant_on_ragged_shapes() {
    for d in host::DIMENSIONS {
        for kind in [Kind::BFloat16, Kind::Half] {
            for is_causal in [true, false] {
                hold(LENGTHS.map(|(n_queries, n_keys)| {
                    Case::draw(gpu(), &[2, 3], [n_queries, n_keys, d], kind, is_causal, 1.0).unwrap()
                }));
            }
        }
    }
}

#[test]
#[ignore = "needs a Hopper GPU; there, run cargo test --lib -- --ignored flash"]
fn large_scores_equal_rows_strides_and_broadcasts() {
    for d in host::DIMENSIONS {
        hold(rule::adversarial(gpu(), d, Kind::BFloat16).unwrap());
    }
}

#[test]
#[ignore = "needs a Hopper GPU; there, run cargo test --lib -- --ignored flash"]
fn all_but_dq_repeat_in_every_bit() {
    for d in host::DIMENSIONS {
        let case = Case::draw(gpu(), &[1, 3], [777, 777, d], Kind::BFloat16, true, 1.0).unwrap();
        let run = || {
            let results = case.run(&Flash, Kind::BFloat16).unwrap();
            synchronize(gpu()).unwrap();
            results
        };
        let first = run();
        for _ in 0..200 {
            let again = run();
            for i in [0, 1, 3, 4] {
                assert!(first[i].equal(&again[i]), "result {i} of d {d} differs from its first run");
            }
        }
    }
}
