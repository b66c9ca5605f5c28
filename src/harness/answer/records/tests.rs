//! Records as answers read them: which are complete, and what their cells and machines are called.

use serde_json::json;

use super::super::made_up::MadeUp;
use super::*;
use crate::harness::suite;

#[test]
fn a_cell_is_of_the_row_or_says_how_the_case_ended() {
    let made_up = MadeUp::cpu("x").measured("a", &json!({"n": 1}), &1.5).not_run("a", &json!({"n": 2}));
    let cases = made_up.records().main().unwrap().cases_as::<Value, f64>().unwrap();
    let cells: Vec<Cell> = cases.iter().map(|case| case.cell(|row| *row)).collect();
    assert_eq!(cells, [Cell::from(1.5), "not run".into()]);
    assert_eq!(cases.iter().filter_map(Case::measured).count(), 1);
    assert_eq!(cases[1].outcome.reason(), "needs 6 GPUs, has 2");
}

#[test]
fn records_are_complete_when_every_planned_case_ended_without_a_failure() {
    let planned = |made_up: MadeUp| {
        let read = |case: &Value, _: Profile| Ok(case.clone());
        let suite = suite::parse("[gpu.a]\nn = [1, 2]\n", "x.toml", &read).unwrap();
        Records { suite: Some(suite), ..made_up.records() }.are_complete()
    };
    let case = |n: i64| json!({"n": n});
    let one = || MadeUp::gpu("x").measured("a", &case(1), &1.5);
    assert!(planned(one().not_run("a", &case(2))) && planned(one().out_of_memory("a", &case(2))));
    assert!(!planned(one().failed("a", &case(2))), "a failed case");
    let with_column = |kind: &str| {
        let column = json!({"ours": [{"kind": kind, "reason": "none", "error": "it fails"}]});
        planned(one().measured("a", &case(2), &column))
    };
    assert!(with_column("not_run") && !with_column("failed"), "a column of a case failed");
    assert!(!planned(one()), "a planned case that is not recorded");
    let unmeasured = || MadeUp::gpu("x").not_run("a", &case(1));
    assert!(!planned(unmeasured().not_run("a", &case(2))) && !planned(unmeasured().out_of_memory("a", &case(2))));
    assert!(planned(MadeUp::cpu("x").measured("a", &case(1), &1.5)), "nothing is planned on a CPU");
}
