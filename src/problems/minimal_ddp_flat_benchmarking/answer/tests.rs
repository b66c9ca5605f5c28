//! The answer on made-up steps: each claim both ways, and what is missing.

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

fn answered(strategies: &[Times]) -> Answer {
    let steps = row(strategies, None);
    answer(&MadeUp::cpu("x").measured("a", &params(Precision::Float32, None), &steps).records(), Audience::Ours)
        .unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 3] {
    ["flat-communicates-faster", "flat-step-is-faster", "the-flat-call-hides-no-communication"]
        .map(|id| answer.holds(id))
}

#[test]
fn claims_and_numbers_follow_the_two_steps() {
    let faster = answered(&[("naive", 1.5, 0.5, 0.5), ("flat", 1.2, 0.2, 0.2)]);
    assert_eq!(claims(&faster), [Some(true); 3]);
    assert!((faster.quoted()["difference"]["value"].as_f64().unwrap() - 0.3).abs() < 1e-12);
    assert!((faster.quoted()["share"]["value"].as_f64().unwrap() - 0.2).abs() < 1e-12);
    let slower = answered(&[("naive", 1.2, 0.2, 0.2), ("flat", 1.5, 0.2, 0.1)]);
    assert_eq!(claims(&slower), [Some(false); 3], "a tie in communication, too");
    assert!(slower.quoted()["difference"]["value"].as_f64().unwrap() > 0.0, "a length, whichever is longer");
}

#[test]
fn the_calls_that_are_saved_cost_their_overhead_and_none_saved_costs_nothing() {
    for (calls_of_flat, expected) in [(1, 0.99), (100, 0.0), (101, 0.0)] {
        let mut steps = row(&[("naive", 1.5, 0.5, 0.5), ("flat", 1.2, 0.2, 0.2)], None);
        steps["strategies"]["flat"]["calls"] = calls_of_flat.into();
        let records = MadeUp::cpu("x").measured("a", &params(Precision::Float32, None), &steps).records();
        let by_calls = answer(&records, Audience::Ours).unwrap().quoted()["by_calls"]["value"].as_f64().unwrap();
        assert!((by_calls - expected).abs() < 1e-12, "{calls_of_flat} calls: {by_calls}");
    }
}

#[test]
fn a_missing_strategy_or_case_leaves_no_claim() {
    assert_eq!(claims(&answered(&[("naive", 1.5, 0.5, 0.5)])), [None; 3]);
    let failed = MadeUp::cpu("x").failed("a", &params(Precision::Float32, None)).records();
    assert_eq!(claims(&answer(&failed, Audience::Ours).unwrap()), [None; 3]);
}
