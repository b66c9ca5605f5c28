//! `optimizer_state_sharding`: AdamW with its state shared out among the ranks ends, to the bit, where AdamW itself ends.

use anyhow::Result;
use proptest::prelude::any;
use proptest::strategy::Strategy;
use serde::Serialize;

use crate::checks::data_parallel::{
    BUCKET_SIZES_MB, EDGES_WORLD_SIZE, RANDOM_CASES, RANDOM_WORLD_SIZES, REPEATS, WORLD_SIZE, accumulation,
    any_blueprint, any_options, at_the_edges, over_world_sizes, passes, random_networks,
};
use crate::checks::golden::{self, training::compare_trainers};
use crate::checks::protocol::Trial;
use crate::checks::sharded_protocol::{self, ADAMW, ShardedCase};
use crate::checks::subject::{golden_training, sharded, sharded_adam};
use crate::harness::answer::{Answer, Audience, Records};
use crate::harness::problem::{Check, Problem, Verdict};
use crate::harness::subject::{Subject, SubjectCheck};
use crate::model::toy::Blueprint;
use crate::parallel::Options;
use crate::parallel::trainer::{SHARDED_OPTIMIZER, ZERO1, ZERO1_IN_BACKWARD};

const CHECKS: &[Check] = &[
    Check { name: "toy_model", part: "", run: || passes(official(SHARDED_OPTIMIZER, &Blueprint::toy())) },
    Check { name: "tied_weights", part: "", run: || passes(official(SHARDED_OPTIMIZER, &Blueprint::tied())) },
    Check { name: "random_networks", part: "", run: || random_groups(SHARDED_OPTIMIZER) },
    Check { name: "with_data_parallelism", part: "", run: || random_networks(SHARDED_OPTIMIZER) },
    Check { name: "edges", part: "", run: || at_the_edges(SHARDED_OPTIMIZER) },
    Check { name: "golden_cases", part: "", run: || golden_cases(SHARDED_OPTIMIZER) },
    Check { name: "zero1_toy_model", part: "", run: || passes(official(ZERO1, &Blueprint::toy())) },
    Check { name: "zero1_tied_weights", part: "", run: || passes(official(ZERO1, &Blueprint::tied())) },
    Check { name: "zero1_random_networks", part: "", run: || random_networks(ZERO1) },
    Check { name: "zero1_gradient_accumulation", part: "", run: || passes(accumulation(ZERO1, &BUCKET_SIZES_MB)) },
    Check { name: "zero1_edges", part: "", run: || at_the_edges(ZERO1) },
    Check { name: "zero1_golden_cases", part: "", run: || golden_cases(ZERO1) },
    Check {
        name: "zero1_in_backward_toy_model",
        part: "",
        run: || passes(official(ZERO1_IN_BACKWARD, &Blueprint::toy())),
    },
    Check {
        name: "zero1_in_backward_tied_weights",
        part: "",
        run: || passes(official(ZERO1_IN_BACKWARD, &Blueprint::tied())),
    },
    Check { name: "zero1_in_backward_random_networks", part: "", run: || random_networks(ZERO1_IN_BACKWARD) },
    Check {
        name: "zero1_in_backward_gradient_accumulation",
        part: "",
        run: || passes(accumulation(ZERO1_IN_BACKWARD, &BUCKET_SIZES_MB)),
    },
    Check { name: "zero1_in_backward_edges", part: "", run: || at_the_edges(ZERO1_IN_BACKWARD) },
    Check { name: "zero1_in_backward_golden_cases", part: "", run: || golden_cases(ZERO1_IN_BACKWARD) },
];

pub const PROBLEM: Problem =
    Problem { name: "optimizer_state_sharding", answers: &[""], checks: CHECKS, measured: None, answer, reads: &[] };

/// Made by `suites/cases/make_sharded_optimizer.py`.
const GOLDEN_CASES: [(&str, &[u8]); 2] = [
    ("sharded_optimizer_toy", include_bytes!("../../suites/cases/sharded_optimizer_toy.safetensors")),
    ("sharded_optimizer_tied", include_bytes!("../../suites/cases/sharded_optimizer_tied.safetensors")),
];

/// What a subject's optimizer is put to.
pub const SUBJECT: &[SubjectCheck] = &[
    subject("toy_model", |s| sharded(s, &Blueprint::toy())),
    subject("tied_weights", |s| sharded(s, &Blueprint::tied())),
    subject("another_optimizer", |s| sharded_adam(s, &Blueprint::toy())),
    subject("golden_cases", |s| golden_training(&GOLDEN_CASES, s, |_| true)),
];

const fn subject(name: &'static str, run: fn(&Subject) -> Result<Verdict>) -> SubjectCheck {
    SubjectCheck { problem: "optimizer_state_sharding", part: "", name, adapter: "get_sharded_optimizer", run }
}

/// The official test of one of its two models; ZeRO-1 in each of the official bucket sizes. Repeated, as a race would not
/// show every time.
pub fn official(optimizer: &str, blueprint: &Blueprint) -> Trial<ShardedCase> {
    let case = |&bucket_size_mb: &f64| ShardedCase::official(blueprint.clone(), Options { bucket_size_mb });
    let cases = (0..REPEATS).flat_map(|_| BUCKET_SIZES_MB.iter().map(case)).collect();
    Trial { trainer: optimizer.into(), cases }
}

/// The official protocol on random networks, some of whose parameters are a second group that may join in the midst of
/// training.
pub fn random_groups(optimizer: &str) -> Result<Verdict> {
    over_world_sizes(optimizer, any_case())
}

fn any_case() -> impl Strategy<Value = ShardedCase> {
    (any_blueprint(), any_options(), 0..1000i64, any::<bool>(), 0..3usize, 0..6i64).prop_map(
        |(blueprint, options, seed, grouped, split, joins_at_step)| ShardedCase {
            adamw: ADAMW,
            // The first layer's weight trains, so that there is always something to train in the first group.
            second_group_from: grouped.then_some(1 + usize::from(blueprint.fixed_parameter) + split),
            blueprint,
            seed,
            joins_at_step,
            options,
        },
    )
}

/// What PyTorch's AdamW computed in one process, held against every rank's parameters.
pub fn golden_cases(optimizer: &str) -> Result<Verdict> {
    golden::check(&GOLDEN_CASES, |case| compare_trainers(case, &[optimizer]))
}

/// What the sentences quote.
#[derive(Serialize)]
struct Quoted {
    checks: usize,
    world_size: usize,
    steps: i64,
    rows: i64,
    seed: i64,
    rtol: f64,
    lr: f64,
    weight_decay: f64,
    repeats: i64,
    random_cases: usize,
    random_world_sizes: Vec<usize>,
    edges_world_size: usize,
}

fn answer(_records: &Records, _audience: Audience) -> Result<Answer> {
    Answer::new(&Quoted {
        checks: CHECKS.len(),
        world_size: WORLD_SIZE,
        steps: sharded_protocol::STEPS,
        rows: sharded_protocol::ROWS,
        seed: sharded_protocol::SEED,
        rtol: sharded_protocol::RTOL,
        lr: ADAMW.lr,
        weight_decay: ADAMW.weight_decay,
        repeats: REPEATS,
        random_cases: RANDOM_CASES,
        random_world_sizes: RANDOM_WORLD_SIZES.to_vec(),
        edges_world_size: EDGES_WORLD_SIZE,
    })
}
