//! `naive_ddp`: training on several ranks with one all-reduce a gradient ends where a single process ends.

use std::cell::RefCell;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use proptest::prelude::{Just, any, prop_oneof};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};
use serde_json::{Value, json};

use crate::cases::{CaseFile, data_parallel, require};
use crate::harness::problem::{Check, Problem, Verdict};
use crate::model::toy::{Bias, Blueprint, Layer, Toy, Weight};
use crate::parallel::protocol::{self, Case, Report};
use crate::parallel::{Options, mutants::MUTANTS};

const CHECKS: &[Check] = &[
    Check { name: "toy_model", part: "", run: || verdict(official(STRATEGY, Blueprint::toy())?) },
    Check { name: "tied_weights", part: "", run: || verdict(official(STRATEGY, Blueprint::tied())?) },
    Check { name: "random_networks", part: "", run: || random_networks(STRATEGY) },
    Check { name: "golden_cases", part: "", run: || golden_cases(STRATEGY) },
];

pub const PROBLEM: Problem = Problem { name: "naive_ddp", answers: &[""], checks: CHECKS, measured: None, facts };

const STRATEGY: &str = "naive";
/// The naive strategy has no buckets; the size is never read.
const OPTIONS: Options = Options { bucket_size_mb: 1.0 };

const WORLD_SIZE: usize = 2;
/// "Run the tests about 5 times", the handout advises, to meet a race if there is one.
const REPEATS: i64 = 5;
const RANDOM_WORLD_SIZES: [usize; 2] = [2, 3];
/// All of them train in one launch, because starting ranks takes far longer than training such networks.
const RANDOM_CASES: usize = 16;
/// Made by `suites/cases/make_data_parallel.py`.
const GOLDEN_CASES: [(&str, &[u8]); 2] = [
    ("data_parallel_toy", include_bytes!("../../suites/cases/data_parallel_toy.safetensors")),
    ("data_parallel_tied", include_bytes!("../../suites/cases/data_parallel_tied.safetensors")),
];

/// The official test of one of its two models, several times over with other rows and other models.
pub fn official(strategy: &str, blueprint: Blueprint) -> Result<Report> {
    let case = |repeat| Case { model_seed: 100 * repeat, ..Case::official(blueprint.clone(), repeat) };
    protocol::run(strategy, &OPTIONS, WORLD_SIZE, &(0..REPEATS).map(case).collect::<Vec<_>>())
}

/// A report without findings, as a verdict; the first findings otherwise.
pub fn verdict(report: Report) -> Result<Verdict> {
    const SHOWN: usize = 6;
    let found = report.findings.len();
    if found > 0 {
        let first = report.findings.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("\n");
        bail!("{found} findings, of which the first {}:\n{first}", found.min(SHOWN));
    }
    Verdict::passed(format!(
        "{} comparisons, largest difference from single-process training {:.1e}",
        report.comparisons, report.largest_error
    ))
}

/// The same protocol on random chains of layers: widths, depth, ties, frozen sets, biases, rows, seeds, world size.
pub fn random_networks(strategy: &str) -> Result<Verdict> {
    let whole = RefCell::new(Report::default());
    for world_size in RANDOM_WORLD_SIZES {
        let config = Config { cases: 1, max_shrink_iters: 8, failure_persistence: None, ..Config::default() };
        let seed = [world_size as u8; 32];
        let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &seed));
        let cases = proptest::collection::vec(any_case(), RANDOM_CASES);
        let outcome = runner.run(&cases, |cases| {
            let fail = |error: anyhow::Error| TestCaseError::fail(format!("{error:#}"));
            let report = protocol::run(strategy, &OPTIONS, world_size, &cases).map_err(fail)?;
            let mut whole = whole.borrow_mut();
            whole.comparisons += report.comparisons;
            whole.largest_error = whole.largest_error.max(report.largest_error);
            verdict(report).map(drop).map_err(fail)
        });
        match outcome {
            Ok(()) => {}
            Err(TestError::Fail(reason, cases)) => bail!("world_size {world_size}: {reason}\nsmallest: {cases:?}"),
            Err(TestError::Abort(reason)) => bail!("world_size {world_size}: no case could be made: {reason}"),
        }
    }
    verdict(whole.into_inner())
}

fn any_case() -> impl Strategy<Value = Case> {
    (any_blueprint(), 1..=12i64, 0..1000i64, 0..1000i64).prop_map(
        |(blueprint, rows_per_rank, data_seed, model_seed)| Case { blueprint, rows_per_rank, data_seed, model_seed },
    )
}

/// Two to four widths make one to three layers; a tied network has two more, the last of which is the one before them.
fn any_blueprint() -> impl Strategy<Value = Blueprint> {
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

/// What PyTorch itself computed in one process, held against this strategy's ranks.
pub fn golden_cases(strategy: &str) -> Result<Verdict> {
    let (mut compared, mut largest) = (0, 0f64);
    for (name, bytes) in GOLDEN_CASES {
        let case = CaseFile::parse(bytes, Path::new(name))?;
        let comparisons = data_parallel::compare_strategy(&case, strategy).with_context(|| name.to_string())?;
        largest = largest.max(require(&comparisons).with_context(|| name.to_string())?);
        compared += comparisons.len();
    }
    Verdict::passed(format!("{compared} tensors, largest difference from PyTorch {largest:.1e}"))
}

fn facts() -> Result<Value> {
    let model = |blueprint: Blueprint| -> Result<Value> {
        let network = Toy::new(&blueprint)?;
        Ok(json!({
            "trainable": network.num_trainable(),
            "gradient_bytes": 4 * network.num_trainable(),
            "parameters": network.named_parameters().len(),
            "all_reduces": network.named_parameters().iter().filter(|(_, tensor)| tensor.requires_grad()).count(),
        }))
    };
    Ok(json!({
        "toy": model(Blueprint::toy())?,
        "tied": model(Blueprint::tied())?,
        "world_size": WORLD_SIZE,
        "rows": 10 * WORLD_SIZE,
        "steps": protocol::STEPS,
        "lr": protocol::LEARNING_RATE,
        "rtol": protocol::RTOL,
        "atol": protocol::ATOL,
        "shuffle_seed": protocol::SHUFFLE_SEED,
        "repeats": REPEATS,
        "random_cases": RANDOM_CASES,
        "random_world_sizes": RANDOM_WORLD_SIZES,
        "checks": CHECKS.iter().map(|check| check.name).collect::<Vec<_>>(),
        "mutants": MUTANTS.len(),
    }))
}
