//! To be written.

use crate::harness::problem::{Problem, no_facts};

pub const PROBLEM: Problem = Problem { name: "naive_ddp", answers: &[], checks: &[], measured: None, facts: no_facts };
