//! Tests of the checks: deliberately broken implementations, each with the check that must catch it and the expected
//! message, and correct implementations as controls.

use std::process::ExitCode;

use anyhow::Result;
use cs336::problems::REGISTRY;
use libtest_mimic::{Arguments, Failed, Trial};

#[path = "mutants/attention.rs"]
mod attention;
#[path = "mutants/ddp.rs"]
mod ddp;
#[path = "mutants/five_products.rs"]
mod five_products;
#[path = "mutants/fused_ranks.rs"]
mod fused_ranks;
#[path = "mutants/fused_step.rs"]
mod fused_step;
#[path = "mutants/head_groups.rs"]
mod head_groups;
#[path = "mutants/kernels.rs"]
mod kernels;
#[path = "mutants/model.rs"]
mod model;
#[path = "mutants/numerics.rs"]
mod numerics;

fn main() -> ExitCode {
    if let Some(code) = kernels::worker() {
        return code;
    }
    cs336::collective::ranks::set_program(env!("CARGO_BIN_EXE_cs336").into());
    let families: [fn() -> Vec<Trial>; 6] =
        [attention::trials, ddp::trials, fused_ranks::trials, kernels::trials, model::trials, numerics::trials];
    let trials: Vec<Trial> = families.iter().flat_map(|trials| trials()).collect();
    assert!(!trials.is_empty(), "no mutant is tested");
    let mut arguments = Arguments::from_args();
    // Many mutants wait for the ranks of one launch, and others can be tested meanwhile.
    arguments.test_threads.get_or_insert(2 * std::thread::available_parallelism().map_or(2, |cores| cores.get()));
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// A test that this check refuses the mutant with this message. Another message means that it caught another mistake, or
/// did not run at all.
///
/// `check` is `problem::check` of a registered one, or of the first problem that registers a check of several problems;
/// `run` is that check on the mutant.
fn caught<T: std::fmt::Debug>(
    family: &str,
    mutant: &str,
    check: &'static str,
    words: &'static str,
    run: impl FnOnce() -> Result<T> + Send + 'static,
) -> Trial {
    let is_registered = REGISTRY.iter().any(|problem| {
        let name = check.strip_prefix(problem.name).and_then(|rest| rest.strip_prefix("::"));
        name.is_some_and(|name| problem.checks.iter().any(|check| check.name == name))
    });
    assert!(is_registered, "{family}, {mutant}: no check is registered as {check:?}");
    assert!(!words.is_empty(), "{family}, {mutant}: what must {check} say?");
    Trial::test(format!("mutants::{family}::{mutant}_is_caught_by_{check}"), move || match run() {
        Ok(verdict) => Err(Failed::from(format!("{check} let it pass: {verdict:?}"))),
        Err(error) => requires(&format!("{error:#}"), check, words),
    })
}

fn requires(said: &str, check: &str, words: &str) -> Result<(), Failed> {
    match said.contains(words) {
        true => Ok(()),
        false => Err(Failed::from(format!("{check} does not say {words:?}, but: {said}"))),
    }
}

/// A test that the implementation passes without its mistake. A check that refuses everything would catch every mutant.
fn control<T>(family: &str, name: &str, run: impl FnOnce() -> Result<T> + Send + 'static) -> Trial {
    let run = move || run().map(drop).map_err(|error| Failed::from(format!("{error:#}")));
    Trial::test(format!("mutants::{family}::{name}_passes"), run)
}
