//! The answer on made-up steps: each claim both ways, and what is missing.

use super::*;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::made_up::{Times, params, row};
use crate::harness::answer::made_up::{MadeUp, seconds};
use crate::model::Precision;

fn answered(naive: Times, pytorch: f64) -> Answer {
    let steps = row(&[naive], Some(pytorch));
    answer(&MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps).records(), Audience::Ours)
        .unwrap()
}

fn claims(answer: &Answer) -> [Option<bool>; 2] {
    ["the-fit-overstates", "pytorch-is-faster"].map(|id| answer.holds(id))
}

#[test]
fn claims_and_numbers_follow_the_step() {
    // By the fit 100 calls of 10 ms and 1 GB at 1 GB/s take 2 s.
    let plain = answered(("naive", 2.0, 0.5, 0.5), 1.2);
    assert_eq!(claims(&plain), [Some(true); 2]);
    let quoted = |name: &str| plain.quoted()[name]["value"].as_f64().unwrap();
    assert!((quoted("share") - 0.25).abs() < 1e-12 && (quoted("predicted") - 2.0).abs() < 1e-9);
    let odd = answered(("naive", 1.5, 1.95, 1.95), 1.5);
    assert_eq!(claims(&odd), [Some(false); 2], "a tie of the two steps, and a fit that is 3 % off");
}

#[test]
fn each_number_of_ranks_has_its_tables_and_what_is_said_is_of_the_fewest() {
    let steps = |naive| row(&[("naive", naive, 0.5, 0.5)], Some(1.2));
    let on = |ranks| Params { world_size: ranks, ..params(Precision::Float32, None) };
    let of = |made_up: MadeUp| answer(&made_up.records(), Audience::Ours).unwrap();
    let alone = of(MadeUp::gpu("x").measured("a", &on(2), &steps(2.0)));
    let beside = of(MadeUp::gpu("x").measured("a", &on(4), &steps(3.0)).measured("a", &on(2), &steps(2.0)));
    assert_eq!(alone.quoted()["step"]["value"], beside.quoted()["step"]["value"]);
    assert_eq!(beside.quoted()["world_size"], 2);
    for (table, ranks) in [("steps-gpu", 2), ("streams-gpu", 2), ("steps-gpu-4", 4), ("streams-gpu-4", 4)] {
        let table = beside.tables()[table].markdown();
        assert!(table.contains(&format!("on {ranks} ranks")) && table.matches("| naive |").count() == 1, "{table}");
    }
    let without = of(MadeUp::gpu("x").failed("a", &on(2)).measured("a", &on(4), &steps(3.0)));
    assert_eq!(without.quoted()["stable"], false);
}

#[test]
fn no_sentence_rests_on_a_case_that_is_not_stable() {
    let mut steps = row(&[("naive", 1.5, 0.5, 0.5)], None);
    steps["single"]["last_rank"] = seconds(&[1.0, 1.06]);
    let records = MadeUp::gpu("x").measured("a", &params(Precision::Bfloat16, None), &steps).records();
    let unstable = answer(&records, Audience::Ours).unwrap();
    assert!(unstable.claims().is_empty() && unstable.quoted()["stable"] == false);
    assert_eq!(unstable.quoted()["unstable"][0], "bfloat16");
    assert!(unstable.tables()["steps-gpu"].markdown().contains("1,000 to 1,060"));
}

#[test]
fn without_a_measured_case_there_are_no_claims() {
    let records = MadeUp::gpu("x").out_of_memory("a", &params(Precision::Float32, None)).records();
    let none = answer(&records, Audience::Ours).unwrap();
    assert!(none.claims().is_empty() && none.quoted()["stable"] == false);
    assert!(none.tables()["steps-gpu"].markdown().contains("| float32 | OOM | – |"));
    assert!(!none.tables().contains_key("streams-gpu"), "it would have no rows");
    assert!(answer(&Records::default(), Audience::Ours).is_err());
}
