//! To be written.

use crate::harness::problem::{Problem, no_facts};

pub const PROBLEM: Problem =
    Problem { name: "mixed_precision_accumulation", answers: &[], checks: &[], measured: None, facts: no_facts };
