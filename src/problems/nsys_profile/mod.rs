//! Profiles of a forward pass and of a training step, kernel by kernel, taken in process by Kineto.

use self::measure::NsysProfile;
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
mod checks;
pub(super) mod device;
pub(crate) mod measure;
pub(crate) mod step;
mod summary;

pub const PROBLEM: Problem = Problem {
    name: "nsys_profile",
    answers: &["a", "b", "c", "d", "e"],
    checks: &[
        Check { name: "a_profiled_step_adds_up", part: "a", run: checks::a_profiled_step_adds_up },
        Check { name: "every_kernel_finds_its_range", part: "b", run: checks::every_kernel_finds_its_range },
    ],
    measured: Some(Measured::of::<NsysProfile>()),
    answer: answer::answer,
    reads: &[],
};
