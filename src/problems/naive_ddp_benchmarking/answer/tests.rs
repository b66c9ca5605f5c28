//! The answer on made-up steps: each claim both ways, and what is missing.

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

fn answered(naive: Times, pytorch: f64) -> Answer {
    let steps = row(&[naive], Some(pytorch));
    answer(&MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records(), Audience::Ours)
        .unwrap()
}

#[test]
fn claims_and_numbers_follow_the_step() {
    let plain = answered(("naive", 1.5, 0.5, 0.5), 1.2);
    assert_eq!((plain.holds("hides-nothing"), plain.holds("pytorch-wins")), (Some(true), Some(true)));
    // 100 calls of 10 ms take as long as 1 GB at 1 GB/s.
    assert_eq!(plain.holds("calls-dominate"), Some(false), "a tie");
    assert!((plain.quoted()["share"]["value"].as_f64().unwrap() - 1.0 / 3.0).abs() < 1e-12);
    let odd = answered(("naive", 1.5, 0.5, 0.1), 1.6);
    assert_eq!((odd.holds("hides-nothing"), odd.holds("pytorch-wins")), (Some(false), Some(false)));
}

#[test]
fn without_a_measured_case_there_are_no_claims() {
    let records = MadeUp::gpu("x").out_of_memory("a", &params(Precision::Float32, None)).records();
    let none = answer(&records, Audience::Ours).unwrap();
    assert!(none.claims().is_empty() && none.quoted()["measured"] == false);
    assert!(none.tables()["steps-gpu"].markdown().contains("| float32 | OOM | – |"));
    assert!(answer(&Records::default(), Audience::Ours).is_err());
}
