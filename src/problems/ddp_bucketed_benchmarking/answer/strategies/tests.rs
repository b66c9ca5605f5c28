//! Tables of made-up steps: ties, cases that were not measured, and machines that must not be compared.

use super::*;
use crate::bench::ddp_step::made_up::{params, row};
use crate::harness::answer::made_up::MadeUp;

fn shown(records: &Records) -> String {
    let tables = side_by_side(&[("naive", records), ("flat", records)], Profile::Gpu).unwrap();
    tables.iter().map(Table::markdown).collect()
}

#[test]
fn the_shortest_step_is_shown_and_missing_cases_are_named() {
    let times = |step| row(&[("naive", step, 0.2, 0.2)], Some(1.1));
    let [small, large] = [1.0, 100.0].map(|mb| params(Precision::Float32, Some(mb)));
    let records = MadeUp::gpu("x").measured("a", &small, &times(1.5)).measured("a", &large, &times(1.25));
    let table = shown(&records.failed("a", &params(Precision::Bfloat16, None)).records());
    assert!(table.contains("| naive: a call a parameter (100 MB) | float32 | 1,250.0 | 1,000.0 | 1.250 |"), "{table}");
    assert!(table.contains("| naive: a call a parameter | bfloat16 | failed | – |"), "{table}");
    assert!(table.contains("| flat: one call | float32 | not measured | – |"), "{table}");
}

#[test]
fn the_spread_between_runs_is_given_for_one_machine_only() {
    let (naive, flat) = (("naive", 1.5, 0.2, 0.2), ("flat", 1.4, 0.1, 0.1));
    let [one, other] = [None, Some(1.0)].map(|bucket| params(Precision::Float32, bucket));
    let captioned = |gpu_of_flat| {
        let records = MadeUp::gpu("x").run("a", Some("NVIDIA H200")).measured("a", &one, &row(&[naive], None));
        let records = records.run("b", Some(gpu_of_flat)).measured("a", &other, &row(&[flat], None));
        // The table shows the machine of the newest run.
        let records = records.run("c", Some("NVIDIA H200"));
        shown(&records.measured("a", &params(Precision::Bfloat16, None), &row(&[naive, flat], None)).records())
    };
    let same = captioned("NVIDIA H200");
    assert!(
        same.contains("Between the runs that step differs by up to 0.0% in float32 and 0.0% in bfloat16."),
        "{same}"
    );
    let different = captioned("NVIDIA H100");
    assert!(different.contains("Between the runs that step differs by up to 0.0% in bfloat16."), "{different}");
}
