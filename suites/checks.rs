//! One test for each registered check, named `problem::check`. A skip has its reason. If every check is skipped, the run fails.

use std::process::ExitCode;

use cs336::collective::ranks::set_program;
use cs336::harness::problem::Verdict;
use cs336::problems::REGISTRY;
use libtest_mimic::{Arguments, Completion, Trial};

fn main() -> ExitCode {
    // Checks that launch ranks re-execute the product, not this test program.
    set_program(env!("CARGO_BIN_EXE_cs336").into());
    let trials: Vec<Trial> = REGISTRY
        .iter()
        .flat_map(|problem| {
            problem.checks.iter().map(move |check| (format!("{}::{}", problem.name, check.name), check.run))
        })
        .map(|(name, run)| {
            Trial::ignorable_test(name, move || match run() {
                Ok(Verdict::Passed { .. }) => Ok(Completion::Completed),
                Ok(Verdict::Skipped { reason }) => Ok(Completion::ignored_with(reason)),
                Err(error) => Err(format!("{error:#}").into()),
            })
        })
        .collect();
    let mut arguments = Arguments::from_args();
    // A check that launches ranks waits for them, and others can run meanwhile.
    arguments.test_threads.get_or_insert(2 * std::thread::available_parallelism().map_or(2, |cores| cores.get()));
    let filtered = arguments.filter.is_some() || !arguments.skip.is_empty() || arguments.list;
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.num_passed == 0 && !filtered {
        eprintln!("no check passed: a run that tests nothing is a failure");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
