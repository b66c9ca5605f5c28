//! To be written.

use crate::harness::problem::{Problem, no_facts};

pub const PROBLEM: Problem =
    Problem { name: "pytorch_attention", answers: &[], checks: &[], measured: None, facts: no_facts };
