//! The answer on made-up steps: each claim both ways, and what is missing.

use super::*;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

fn answered(strategies: &[Times], calls_of_flat: u64) -> Answer {
    let mut steps = row(strategies, None);
    steps["strategies"]["flat"]["calls"] = calls_of_flat.into();
    answer(&MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records(), Audience::Ours)
        .unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 3] {
    ["flat-is-faster", "calls-cost-what-the-fit-says", "large-calls-beat-the-fit"].map(|id| answer.holds(id))
}

#[test]
fn claims_and_numbers_follow_the_two_steps() {
    // By the fit 99 calls of 10 ms take 0.99 s.
    let faster = answered(&[("naive", 1.5, 0.5, 0.5), ("flat", 1.2, 0.2, 0.25)], 1);
    assert_eq!(claims(&faster), [true, false, true].map(Some), "the one call takes 0.2 s for 1 GB");
    for (name, expected) in [
        ("saved", 0.3),
        ("less_communication", 0.3),
        ("share", 0.2),
        ("copies", 0.05),
        ("by_calls", 0.99),
        ("bandwidth", 5e9),
    ] {
        let value = faster.quoted()[name]["value"].as_f64().unwrap();
        assert!((value / expected - 1.0).abs() < 1e-9, "{name}: {value}");
    }
    // 30 calls less, which the fit prices as measured, as it does the bytes; a tie of the steps.
    let tie = answered(&[("naive", 2.0, 1.3, 1.3), ("flat", 2.0, 1.0, 1.0)], 70);
    assert_eq!(claims(&tie), [false, true, false].map(Some));
}

#[test]
fn copies_take_part_of_a_saving_only_where_communication_takes_less_time() {
    let copies = |flat| answered(&[("naive", 1.5, 0.5, 0.5), flat], 1).quoted()["copies"].is_object();
    assert!(copies(("flat", 1.2, 0.2, 0.25)));
    assert!(!copies(("flat", 1.2, 0.6, 0.65)), "it takes more");
    assert!(!copies(("flat", 1.2, 0.4, 0.1)), "no copy takes less than nothing");
}

#[test]
fn a_missing_strategy_or_case_leaves_no_claim() {
    let alone = row(&[("naive", 1.5, 0.5, 0.5)], None);
    let alone = MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &alone).records();
    assert_eq!(claims(&answer(&alone, Audience::Ours).unwrap()), [None; 3]);
    let failed = MadeUp::cpu("x").failed("a", &params(Precision::Float32, None)).records();
    assert_eq!(claims(&answer(&failed, Audience::Ours).unwrap()), [None; 3]);
}
