//! To be written.

use crate::harness::problem::{Problem, no_facts};

pub const PROBLEM: Problem =
    Problem { name: "flash_backward", answers: &[], checks: &[], measured: None, facts: no_facts };
