//! The grader graded: deliberately broken implementations that the checks must catch, each beside a sound control.

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

#[path = "mutants/attention.rs"]
mod attention;
#[path = "mutants/ddp.rs"]
mod ddp;
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
    let families: [fn() -> Vec<Trial>; 5] =
        [attention::trials, ddp::trials, kernels::trials, model::trials, numerics::trials];
    let trials: Vec<Trial> = families.iter().flat_map(|trials| trials()).collect();
    assert!(!trials.is_empty(), "no mutant is tested");
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
