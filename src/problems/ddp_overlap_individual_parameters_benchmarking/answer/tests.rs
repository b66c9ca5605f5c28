//! The answer on made-up steps: each claim both ways, and what is missing.

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

fn answered(strategies: &[Times]) -> Answer {
    let steps = row(strategies, None);
    answer(&MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records(), Audience::Ours)
        .unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 2] {
    ["overlap-wins", "backward-is-slower"].map(|id| answer.holds(id))
}

#[test]
fn claims_follow_the_three_steps() {
    let (naive, flat) = (("naive", 1.5, 0.5, 0.5), ("flat", 1.2, 0.2, 0.2));
    let well = answered(&[naive, flat, (OVERLAP, 1.15, 0.5, 0.1)]);
    assert_eq!(claims(&well), [Some(true); 2]);
    assert!((well.quoted()["hidden"]["value"].as_f64().unwrap() - 0.7).abs() < 1e-12, "by the step, not the stream");
    assert_eq!(well.figures().len(), 1);
    let ill = answered(&[naive, flat, (OVERLAP, 1.2, 0.5, 0.5)]);
    assert_eq!(claims(&ill), [Some(false); 2], "a tie is no lead");
}

#[test]
fn without_a_measured_case_there_is_no_claim_and_no_figure() {
    let failed = MadeUp::gpu("x").failed("a", &params(Precision::Float32, None)).records();
    let none = answer(&failed, Audience::Ours).unwrap();
    assert_eq!(claims(&none), [None; 2]);
    assert!(none.figures().is_empty() && none.tables().contains_key("steps-gpu"));
}
