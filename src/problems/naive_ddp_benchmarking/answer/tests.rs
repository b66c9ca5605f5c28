//! The answer on made-up steps: each claim both ways, and what is missing.

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

const HIDES_NOTHING: &str = "naive-ddp-hides-nothing";
const CALLS_DOMINATE: &str = "calls-outweigh-bytes";
const PYTORCH_IS_FASTER: &str = "pytorch-is-faster";

fn answered(naive: Times, calls: u64, pytorch: f64) -> Answer {
    let mut steps = row(&[naive], Some(pytorch));
    steps["strategies"]["naive"]["calls"] = calls.into();
    answer(&MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records(), Audience::Ours)
        .unwrap()
}

#[test]
fn claims_and_numbers_follow_the_step() {
    let claims = |answer: &Answer| [HIDES_NOTHING, CALLS_DOMINATE, PYTORCH_IS_FASTER].map(|id| answer.holds(id));
    // 100 calls of 10 ms take as long as 1 GB at 1 GB/s.
    let plain = answered(("naive", 1.5, 0.5, 0.5), 101, 1.2);
    assert_eq!(claims(&plain), [Some(true); 3]);
    assert!((plain.quoted()["share"]["value"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-12);
    let odd = answered(("naive", 1.5, 0.5, 0.1), 100, 1.5);
    assert_eq!(claims(&odd), [Some(false); 3], "a tie of calls and bytes, and of the two steps");
}

#[test]
fn without_a_measured_case_there_are_no_claims() {
    let records = MadeUp::gpu("x").out_of_memory("a", &params(Precision::Float32, None)).records();
    let none = answer(&records, Audience::Ours).unwrap();
    assert!(none.claims().is_empty() && none.quoted()["measured"] == false);
    assert!(none.tables()["steps-gpu"].markdown().contains("| float32 | OOM | – |"));
    assert!(answer(&Records::default(), Audience::Ours).is_err());
}
