//! Tables of made-up steps.

use serde_json::json;

use super::super::made_up::{params, row};
use super::*;
use crate::harness::answer::made_up::{MadeUp, seconds};
use crate::model::Precision;

fn table_of(made_up: MadeUp, shown: Shown) -> String {
    let records = made_up.records();
    let cases: Vec<StepCase> = records.main().unwrap().cases_as().unwrap();
    steps_table(&cases.iter().collect::<Vec<_>>(), "dtype", |p| p.dtype.name().into(), shown).markdown()
}

#[test]
fn a_case_that_was_not_run_has_a_row_with_its_reason() {
    let not_run = || MadeUp::gpu("x").not_run("a", &params(Precision::Float32, None));
    let table = table_of(not_run(), Shown::Asked);
    assert!(table.contains("| float32 | not run: needs 6 GPUs, has 2 | – |"), "{table}");
    assert!(table.contains("the tiny model on 2 ranks over Gloo, 1 sequence of 16 tokens per rank"), "{table}");
    assert!(table_of(not_run(), Shown::Rest).contains("not run"), "a table has a row");
    let measured = not_run().measured("a", &params(Precision::Bfloat16, None), &row(&[("flat", 1.2, 0.2, 0.2)], None));
    assert!(!table_of(measured, Shown::Rest).contains("not run"));
}

#[test]
fn what_is_hidden_stands_apart_from_the_streams_own_overlap() {
    let steps = row(&[("naive", 1.4, 0.4, 0.4), ("overlap_bucketed", 1.1, 2.0, 0.02)], Some(1.2));
    let measured = || MadeUp::gpu("x").measured("a", &params(Precision::Float32, None), &steps);
    let asked = table_of(measured(), Shown::Asked);
    assert!(asked.contains("| float32 | naive | 1,400.0 | 400.0 | – | 400.0 |"), "{asked}");
    assert!(asked.contains("| float32 | overlap, buckets | 1,100.0 | 100.0 | 75% | 2,000.0 |"), "{asked}");
    assert!(asked.contains("| float32 | PyTorch DDP | 1,200.0 | 200.0 | 50% | – |"), "{asked}");
    assert!(asked.contains("tokens per rank, NVIDIA H200: medians of 1 steps, or ranges over 1 turns where unstable. Every strategy sends 1,000 MB per step."), "{asked}");
    let rest = table_of(measured(), Shown::Rest);
    assert!(rest.contains("| float32 | overlap, buckets | 1.000 | 20.0 | 99% | 100 |"), "{rest}");
}

#[test]
fn an_unstable_step_is_a_range_and_says_so() {
    let mut steps = row(&[("flat", 1.2, 0.2, 0.2)], None);
    steps["single"]["last_rank"] = seconds(&[1.0, 1.5]);
    steps["strategies"]["flat"]["step"]["last_rank"] = seconds(&[2.0, 2.0]);
    let params = Params { rounds: 2, ..params(Precision::Bfloat16, None) };
    let table = table_of(MadeUp::gpu("x").measured("a", &json!(params), &steps), Shown::All);
    assert!(table.contains("| single (no communication) | 1,000 to 1,500 | – | – | unstable, 1.500 |"), "{table}");
    assert!(table.contains("| flat | 2,000.0 | 500 to 1,000 | 200.0 | 1.000 |"), "{table}");
}
