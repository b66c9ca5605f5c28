//! Tables of made-up steps.

use super::super::made_up::params;
use super::*;
use crate::harness::answer::made_up::MadeUp;
use crate::model::Precision;

#[test]
fn a_case_that_was_not_run_has_a_line_with_its_reason() {
    let cases = MadeUp::gpu("x").not_run("a", &params(Precision::Float32, None)).records();
    let set = cases.main().unwrap();
    let cases = set.cases_as().unwrap();
    let table = steps_table(set, "arithmetic", &cases.iter().collect::<Vec<_>>(), |p| p.dtype.name().into()).markdown();
    assert!(table.contains("| float32 | not run: needs 6 GPUs, has 2 | – |"), "{table}");
    assert!(
        table.contains("Training steps of the tiny model on 2 ranks over Gloo (CPU), 1 sequence of 16 tokens a rank")
    );
}
