//! To be written.

use crate::harness::problem::{Problem, no_facts};

pub const PROBLEM: Problem =
    Problem { name: "benchmarking_mixed_precision", answers: &[], checks: &[], measured: None, facts: no_facts };
