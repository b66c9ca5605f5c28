//! Fused steps on ranks whose gradients are averaged wrongly.

use cs336::checks::fused_ranks::{Averaging, distance};
use cs336::collective::Backend;
use cs336::collective::ranks::Placement;
use cs336::model::Precision;
use libtest_mimic::Trial;

use super::caught;

const CHECK: &str = "ddp_bucketed_benchmarking::fused_ranks_train_as_one_process";
const APART: &str = "of the way trained from one process";

const MUTANTS: [(&str, Averaging, &str); 4] = [
    ("gradients_are_added", Averaging::Sum, APART),
    ("the_heads_gradient_is_not_averaged", Averaging::WithoutHead, "rank 1 differs from rank 0"),
    ("gradients_stay_local", Averaging::Local, "rank 1 differs from rank 0"),
    ("the_shares_of_others_are_not_gathered", Averaging::Ungathered, "rank 1 differs from rank 0"),
];

pub fn trials() -> Vec<Trial> {
    let trial = |(name, averaging, words)| {
        let run = move || distance(Backend::Gloo, Placement::GpuPerRank, Precision::Float32, averaging);
        caught("fused_ranks", name, CHECK, words, run)
    };
    MUTANTS.map(trial).into()
}
