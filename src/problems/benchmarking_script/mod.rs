//! Timing the forward pass, the backward pass and the optimizer step of Transformers of the handout's sizes.

use self::measure::BenchmarkingScript;
use crate::harness::problem::{Check, Measured, Problem};

mod answer;
mod checks;
pub(super) mod fused_adamw;
pub(super) mod fused_step;
mod measure;

pub const PROBLEM: Problem = Problem {
    name: "benchmarking_script",
    answers: &["a", "b", "c"],
    checks: &[
        Check { name: "parameter_counts", part: "a", run: checks::parameter_counts },
        Check { name: "parameter_names_and_order", part: "a", run: checks::parameter_names_and_order },
        Check { name: "logits_loss_and_gradients", part: "a", run: checks::logits_loss_and_gradients },
        Check { name: "norm_and_rotary_positions", part: "a", run: checks::norm_and_rotary_positions },
        Check { name: "adamw_over_many_steps", part: "a", run: checks::adamw_over_many_steps },
        Check { name: "fused_adamw_matches_plain", part: "a", run: fused_adamw::matches_plain },
        Check { name: "fused_adamw_counts_replays", part: "a", run: fused_adamw::counts_replays },
        Check { name: "fused_step_matches_autograd", part: "a", run: fused_step::matches_autograd },
        Check { name: "attention_choices_agree", part: "a", run: checks::attention_choices_agree },
        Check {
            name: "later_tokens_change_nothing_before",
            part: "a",
            run: checks::later_tokens_change_nothing_before,
        },
        Check { name: "loss_falls_on_one_batch", part: "a", run: checks::loss_falls_on_one_batch },
        Check { name: "every_pass_is_timed", part: "a", run: checks::every_pass_is_timed },
        Check {
            name: "captured_steps_train_like_eager_ones",
            part: "a",
            run: checks::captured_steps_train_like_eager_ones,
        },
    ],
    measured: Some(Measured::of::<BenchmarkingScript>()),
    answer: answer::answer,
    reads: &[],
};
