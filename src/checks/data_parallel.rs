//! Checks that every data-parallel trainer must pass. Several problems register them.

use anyhow::{Context as _, Result, anyhow, bail};
use proptest::prelude::{Just, any, prop_oneof};
use proptest::strategy::{Strategy, ValueTree as _};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use serde::Serialize;

use super::mutants::{FAULTS, MUTANTS};
use super::protocol::{self, Case, Passes, Report, TrainingCase, Trial, Zeroing};
use super::{edge_cases, golden};
use crate::harness::problem::{Check, Verdict};
use crate::model::toy::{Bias, Blueprint, Layer, Weight};
use crate::parallel::Options;
use crate::parallel::trainer::zero1;
use crate::parallel::zero1::Stepping;

pub const WORLD_SIZE: usize = 2;
/// The handout advises to run the tests about five times, to detect races.
pub const REPEATS: i64 = 5;
/// The official bucketed test's.
pub const BUCKET_SIZES_MB: [f64; 3] = [0.0016, 0.0001, 0.01];
pub const RANDOM_WORLD_SIZES: [usize; 3] = [2, 3, 4];
/// All of them train in one launch, because starting ranks takes far longer than training such networks.
pub const RANDOM_CASES: usize = 5;
/// Odd, so that sizes do not divide evenly by chance.
pub const EDGES_WORLD_SIZE: usize = 3;
/// Made by `suites/cases/make_data_parallel.py`.
pub const GOLDEN_CASES: [(&str, &[u8]); 2] = [
    ("data_parallel_toy", include_bytes!("../../suites/cases/data_parallel_toy.safetensors")),
    ("data_parallel_tied", include_bytes!("../../suites/cases/data_parallel_tied.safetensors")),
];

/// The official test of one of its two models with each bucket size, repeated with other rows and other initial models.
pub fn official(trainer: &str, blueprint: &Blueprint, bucket_sizes_mb: &[f64]) -> Trial<TrainingCase> {
    let case = |(bucket_size_mb, repeat): (f64, i64)| TrainingCase {
        model_seed: 100 * repeat,
        ..TrainingCase::official(blueprint.clone(), Options { bucket_size_mb }, repeat)
    };
    let cases = bucket_sizes_mb.iter().flat_map(|&size| (0..REPEATS).map(move |repeat| (size, repeat)));
    Trial { trainer: trainer.into(), cases: cases.map(case).collect() }
}

/// Both official models with every step's rows in two passes, and with gradients that are dropped between steps.
pub fn accumulation(trainer: &str, bucket_sizes_mb: &[f64]) -> Trial<TrainingCase> {
    let mut cases = Vec::new();
    for (blueprint, &bucket_size_mb) in [Blueprint::toy(), Blueprint::tied()]
        .iter()
        .flat_map(|model| bucket_sizes_mb.iter().map(move |size| (model, size)))
    {
        let case = TrainingCase::official(blueprint.clone(), Options { bucket_size_mb }, 0);
        for (passes, zeroing) in [
            (Passes::Once, Zeroing::Release),
            (Passes::NoSync, Zeroing::InPlace),
            (Passes::NoSync, Zeroing::Release),
            (Passes::FinishEach, Zeroing::InPlace),
            (Passes::FinishEach, Zeroing::Release),
        ] {
            cases.push(allowed(trainer, TrainingCase { passes, zeroing, ..case.clone() }));
        }
    }
    Trial { trainer: trainer.into(), cases }
}

/// Passes if the trainer trains every case on [`WORLD_SIZE`] ranks as a single process does.
pub fn passes(trial: Trial<impl Case>) -> Result<Verdict> {
    verdict(Report::over(Case::run(WORLD_SIZE, &[trial])?))
}

/// Exact results with several dtypes in one model, and error messages on misuse.
pub fn at_the_edges(trainer: &str) -> Result<Verdict> {
    verdict(edge_cases::run(trainer, EDGES_WORLD_SIZE)?)
}

/// Passes if the report has no findings; else an error with the first findings.
pub fn verdict(report: Report) -> Result<Verdict> {
    const SHOWN: usize = 6;
    let found = report.findings.len();
    if found > 0 {
        let first = report.findings.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("\n");
        match found {
            1 => bail!("{first}"),
            2..=SHOWN => bail!("{found} findings:\n{first}"),
            _ => bail!("{found} findings, of which the first {SHOWN}:\n{first}"),
        }
    }
    Verdict::passed(format!(
        "{} comparisons, largest difference from single-process training {:.1e}",
        report.comparisons, report.largest_error
    ))
}

/// The official protocol on random chains of layers: widths, depth, ties, frozen sets, biases, rows, seeds, bucket sizes,
/// passes, world size.
pub fn random_networks(trainer: &str) -> Result<Verdict> {
    over_world_sizes(trainer, any_case().prop_map(|case| allowed(trainer, case)))
}

/// Adapts a case to `trainer`. A trainer that steps in the backward pass refuses a second finished pass ([`edge_cases`]
/// checks that), so its first pass runs under `no_sync`.
fn allowed(trainer: &str, case: TrainingCase) -> TrainingCase {
    let name = trainer.rsplit('@').next().unwrap_or(trainer);
    match case.passes {
        Passes::FinishEach if zero1(name) == Some(Stepping::InBackward) => {
            TrainingCase { passes: Passes::NoSync, ..case }
        }
        _ => case,
    }
}

/// Draws cases for each of [`RANDOM_WORLD_SIZES`] and runs them, repeated, in one launch. The draws are always the same.
pub fn over_world_sizes<C: Case>(trainer: &str, any_case: impl Strategy<Value = C>) -> Result<Verdict> {
    let any_cases = proptest::collection::vec(any_case, RANDOM_CASES);
    let mut whole = Vec::new();
    for world_size in RANDOM_WORLD_SIZES {
        let seed = TestRng::from_seed(RngAlgorithm::ChaCha, &[world_size as u8; 32]);
        let tree = any_cases.new_tree(&mut TestRunner::new_with_rng(Config::default(), seed));
        let drawn = tree.map_err(|reason| anyhow!("no cases could be drawn: {reason}"))?.current();
        let cases = (0..REPEATS).flat_map(|_| drawn.clone()).collect();
        let report = Report::over(C::run(world_size, &[Trial { trainer: trainer.into(), cases }])?);
        verdict(report.clone()).with_context(|| format!("world_size {world_size}, in turn the cases {drawn:?}"))?;
        whole.push(report);
    }
    verdict(Report::over(whole))
}

fn any_case() -> impl Strategy<Value = TrainingCase> {
    let passes = prop_oneof![Just(Passes::Once), Just(Passes::NoSync), Just(Passes::FinishEach)];
    let zeroing = prop_oneof![Just(Zeroing::InPlace), Just(Zeroing::Release)];
    (any_blueprint(), any_options(), passes, zeroing, 2..=12i64, 0..1000i64, 0..1000i64).prop_map(
        |(blueprint, options, passes, zeroing, rows_per_rank, data_seed, model_seed)| TrainingCase {
            blueprint,
            options,
            passes,
            zeroing,
            rows_per_rank,
            data_seed,
            model_seed,
        },
    )
}

/// From less than the smallest parameter to more than the whole network.
pub fn any_options() -> impl Strategy<Value = Options> {
    prop_oneof![Just(1e-6), 1e-4..5e-3, Just(1.0)].prop_map(|bucket_size_mb| Options { bucket_size_mb })
}

/// Two to four widths make one to three layers; a tied network has two more, the last of which is the one before them.
pub fn any_blueprint() -> impl Strategy<Value = Blueprint> {
    let weight = || prop_oneof![3 => Just(Weight::Trained), 1 => Just(Weight::Frozen)];
    let bias = || prop_oneof![Just(Bias::None), Just(Bias::Trained), Just(Bias::Frozen)];
    // Wide enough that ReLU never silences a whole layer, which would leave a parameter untrained.
    let widths = proptest::collection::vec(8..=24i64, 2..=4);
    (widths, proptest::collection::vec((weight(), bias()), 5), any::<bool>(), any::<bool>()).prop_map(
        |(mut widths, parameters, tied, fixed_parameter)| {
            let untied = widths.len() - 1;
            if tied {
                widths.extend([widths[untied - 1], widths[untied]]);
            }
            let layer = |(i, pair): (usize, &[i64])| {
                let (weight, bias) = parameters[i].clone();
                Layer { name: format!("fc{}", i + 1), d_in: pair[0], d_out: pair[1], weight, bias }
            };
            let mut layers: Vec<Layer> = widths.windows(2).enumerate().map(layer).collect();
            if let Some(last) = layers.last_mut().filter(|_| tied) {
                last.weight = Weight::TiedTo(format!("fc{untied}"));
            }
            layers[0].weight = Weight::Trained;
            Blueprint { name: if tied { "random, tied" } else { "random" }.into(), fixed_parameter, layers }
        },
    )
}

/// Compares this trainer's ranks with PyTorch's results in one process.
pub fn golden_cases(trainer: &str) -> Result<Verdict> {
    golden::check(&GOLDEN_CASES, |case| golden::training::compare_trainers(case, &[trainer]))
}

/// The official protocol's settings, and how often it is repeated, for answers.
#[derive(Debug, Serialize)]
pub struct ProtocolFacts {
    /// How many checks a problem has.
    pub checks: usize,
    pub world_size: usize,
    pub rows: usize,
    pub steps: i64,
    pub lr: f64,
    pub rtol: f64,
    pub atol: f64,
    pub shuffle_seed: i64,
    pub repeats: i64,
    pub random_cases: usize,
    pub random_world_sizes: Vec<usize>,
    pub edges_world_size: usize,
    pub mutants: usize,
    pub faults: usize,
}

impl ProtocolFacts {
    pub fn of(checks: &[Check]) -> Self {
        Self {
            checks: checks.len(),
            world_size: WORLD_SIZE,
            rows: 10 * WORLD_SIZE,
            steps: protocol::STEPS,
            lr: protocol::LEARNING_RATE,
            rtol: protocol::RTOL,
            atol: protocol::ATOL,
            shuffle_seed: protocol::SHUFFLE_SEED,
            repeats: REPEATS,
            random_cases: RANDOM_CASES,
            random_world_sizes: RANDOM_WORLD_SIZES.to_vec(),
            edges_world_size: EDGES_WORLD_SIZE,
            mutants: MUTANTS.len(),
            faults: FAULTS.len(),
        }
    }
}
