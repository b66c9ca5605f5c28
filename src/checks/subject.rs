//! The official protocols and the golden cases, for a subject: inputs that it cannot know, and verdicts computed here.

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use super::attention::{drawn_inputs, official_inputs};
use super::data_parallel::{WORLD_SIZE, verdict};
use super::golden::{self, CaseFile, Comparison};
use super::protocol::{LEARNING_RATE, Report, TrainingCase, Zeroing, run_case};
use super::sharded_protocol::{self, ADAMW, Seen, ShardedCase};
use crate::collective::Shared;
use crate::collective::ranks::{Launch, RankTask, launch, parse_input};
use crate::error::NotGraded;
use crate::harness::problem::Verdict;
use crate::harness::subject::Subject;
use crate::model::optim::AdamWOptions;
use crate::model::toy::Blueprint;
use crate::parallel::Options;
use crate::subject::attention::{FlashFunction, SubjectAttention};
use crate::subject::rank::{Adapter, OptimizerClass, SubjectRank, Trainee};
use crate::torch::Generator;

pub const TASK: RankTask = RankTask { name: "subject", run: on_rank };

/// Starting the subject's Python on every rank takes seconds, and each call has a limit of its own.
const DEADLINE: Duration = Duration::from_secs(900);

/// The tolerances between a subject's sharded optimizer and our AdamW: a subject's PyTorch may be another version than ours, and
/// another matrix product sums in another order. The official 1e-7 holds between it and an AdamW of its own process.
const SHARDED_TOLERANCES: (f64, f64) = (1e-4, 1e-5);

/// What one launch trains.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum Work {
    DataParallel(TrainingCase),
    Sharded(ShardedCase),
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    trainee: Trainee,
    work: Work,
}

/// The official inputs, which a subject may know by heart, and others of their sizes.
pub fn official_and_drawn_inputs(subject: &Subject) -> Result<[[Tensor; 4]; 2]> {
    Ok([official_inputs()?, drawn_inputs(subject.seed_for(50), [4, 128, 128, 64])?])
}

/// Sizes that the handout promises, powers of two from 16, with values that nobody knows before. Several are larger than the
/// official ones, for mistakes that smaller ones hide.
pub fn promised_inputs(subject: &Subject) -> Result<Vec<[Tensor; 4]>> {
    let sizes = [[4, 128, 128, 64], [1, 16, 256, 32], [2, 64, 16, 16], [8, 32, 64, 128], [2, 256, 256, 32]];
    sizes.into_iter().zip(0..).map(|(size, number)| drawn_inputs(subject.seed_for(number), size)).collect()
}

/// Scores that rise by 256 from one half of the keys to the other: without the maximum subtracted, exp overflows.
pub fn large_scores(subject: &Subject) -> Result<[Tensor; 4]> {
    let [q, k, v, d_o] = drawn_inputs(subject.seed_for(100), [2, 64, 64, 64])?;
    // All are powers of two, which TF32 keeps: 64 * (+-16) / sqrt(64) = +-128.
    let _ = q.f_select(-1, 0)?.f_fill_(64.0)?;
    let _ = k.f_select(-1, 0)?.f_fill_(16.0)?;
    let _ = k.f_narrow(1, 0, 32)?.f_select(-1, 0)?.f_fill_(-16.0)?;
    Ok([q, k, v, d_o])
}

/// The golden case whose sizes the handout promises.
const GOLDEN_CASE: [(&str, &[u8]); 1] =
    [("attention_float32", include_bytes!("../../suites/cases/attention_float32.safetensors"))];

/// [`GOLDEN_CASE`]; without its backward pass unless `with_backward`.
pub fn golden_case(subject: &Subject, function: FlashFunction, with_backward: bool) -> Result<Verdict> {
    golden::check(&GOLDEN_CASE, |case| {
        golden::attention::run_one(&case_for(function, case, with_backward), &SubjectAttention { subject, function })
    })
}

/// The case as this function is held to it. `tl.dot` rounds float32 operands to TF32 by default, which only the tolerance of
/// the official tests allows.
fn case_for(function: FlashFunction, case: &CaseFile, with_backward: bool) -> CaseFile {
    let is_backward = |name: &str| name.starts_with('d');
    let kept = case.tensors.iter().filter(|(name, _)| with_backward || !is_backward(name));
    let tensors = kept.map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect();
    let mut metadata = case.metadata.clone();
    if function == FlashFunction::Triton {
        metadata.extend(["rtol", "atol"].map(|tolerance| (tolerance.to_string(), "1e-2".to_string())));
    }
    CaseFile { path: case.path.clone(), metadata, tensors }
}

/// The official data-parallel test of one model; in each of these bucket sizes, or with a call per parameter.
pub fn data_parallel(subject: &Subject, blueprint: &Blueprint, bucket_sizes_mb: Option<&[f64]>) -> Result<Verdict> {
    let adapters: Vec<Adapter> = match bucket_sizes_mb {
        None => vec![Adapter::Individual { lr: LEARNING_RATE }],
        Some(sizes) => {
            sizes.iter().map(|&size| Adapter::Bucketed { lr: LEARNING_RATE, bucket_size_mb: size }).collect()
        }
    };
    let mut whole = Report::default();
    for (adapter, number) in adapters.into_iter().zip(0..) {
        let options = Options { bucket_size_mb: 1.0 };
        let case = TrainingCase {
            // What `optimizer.zero_grad()` does.
            zeroing: Zeroing::Release,
            model_seed: subject.seed_for(200 + number),
            ..TrainingCase::official(blueprint.clone(), options, subject.seed_for(300 + number))
        };
        let place = match adapter {
            Adapter::Bucketed { bucket_size_mb, .. } => format!("bucket_size_mb {bucket_size_mb:?}: "),
            _ => String::new(),
        };
        for mut report in on_ranks::<Report>(subject, adapter, Work::DataParallel(case))? {
            report.findings.iter_mut().for_each(|finding| finding.insert_str(0, &place));
            whole = Report::over([whole, report]);
        }
        if !whole.findings.is_empty() {
            // Each size costs seconds, and one that is wrong decides.
            break;
        }
    }
    verdict(whole)
}

/// The official test of the sharded optimizer on one model, and that each value's state is kept by one rank.
pub fn sharded(subject: &Subject, blueprint: &Blueprint) -> Result<Verdict> {
    sharded_around(subject, blueprint, OptimizerClass::AdamW, ADAMW)
}

/// As [`sharded`], around Adam with hyperparameters that no constructor has by itself: the handout's optimizer is of an arbitrary
/// class, which gets all arguments.
pub fn sharded_adam(subject: &Subject, blueprint: &Blueprint) -> Result<Verdict> {
    let drawn = Generator::new(Device::Cpu, subject.seed_for(500))?.rand(&[4], Kind::Double)?;
    let drawn = Vec::<f64>::try_from(drawn)?;
    let between = |low: f64, high: f64, at: usize| low + (high - low) * drawn[at];
    let adam = AdamWOptions {
        lr: between(0.02, 0.1, 0),
        beta1: between(0.5, 0.8, 1),
        beta2: between(0.9, 0.99, 2),
        eps: between(0.1, 1.0, 3),
        weight_decay: 0.0,
    };
    sharded_around(subject, blueprint, OptimizerClass::Adam, adam)
}

fn sharded_around(
    subject: &Subject,
    blueprint: &Blueprint,
    class: OptimizerClass,
    adamw: AdamWOptions,
) -> Result<Verdict> {
    let case = ShardedCase {
        seed: subject.seed_for(400),
        adamw,
        ..ShardedCase::official(blueprint.clone(), Options { bucket_size_mb: 1.0 })
    };
    let case = case.well_conditioned(SHARDED_TOLERANCES);
    let case = case.map_err(|error| NotGraded::while_doing("drawing the case of a sharded optimizer", error))?;
    let seen: Vec<Seen> = on_ranks(subject, Adapter::Sharded(class, adamw), Work::Sharded(case))?;
    verdict(sharded_protocol::report(seen, |_| sharded_protocol::subject_padding(WORLD_SIZE)))
}

/// The golden cases of the subject's adapters that train.
pub fn golden_training(
    cases: &[(&str, &[u8])],
    subject: &Subject,
    is_meant: impl Fn(&Adapter) -> bool,
) -> Result<Verdict> {
    golden::check(cases, |case| -> Result<Vec<Comparison>> {
        golden::training::compare_adapters(case, subject, &is_meant)
    })
}

/// The results of one launch, rank by rank.
fn on_ranks<R: for<'a> Deserialize<'a>>(subject: &Subject, adapter: Adapter, work: Work) -> Result<Vec<R>> {
    Trainee::launch(subject, adapter, |trainee| {
        let input = serde_json::to_value(Input { trainee: trainee.clone(), work })?;
        let ranks = launch(&launch_of(TASK.name, WORLD_SIZE, subject), &input)?;
        ranks.into_iter().map(|rank| Ok(serde_json::from_value(rank)?)).collect()
    })
}

/// A launch of ranks that are idle while their subject's Python works: its own limits hold, and not the launch's patience.
pub fn launch_of<'a>(task: &'a str, world_size: usize, subject: &Subject) -> Launch<'a> {
    let deadline = subject.patience(DEADLINE);
    Launch { patience: deadline, ..Launch::new(task, world_size, deadline) }
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { trainee, work } = parse_input(input)?;
    Ok(match work {
        Work::DataParallel(case) => {
            let (mut report, blueprint) = (Report::default(), &case.blueprint);
            let start = |network| SubjectRank::start(&trainee, blueprint, network, collective);
            run_case(&case, collective, &blueprint.name, &mut report, start)?;
            serde_json::to_value(report)?
        }
        Work::Sharded(case) => {
            let (mut seen, blueprint) = (Seen::default(), &case.blueprint);
            let place = format!("{}, rank {}", blueprint.name, collective.rank());
            let start = |network| SubjectRank::start(&trainee, blueprint, network, collective);
            sharded_protocol::train(&case, collective, &place, SHARDED_TOLERANCES, &mut seen, start)?;
            serde_json::to_value(seen)?
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tch::{Device, Kind};

    use super::*;
    use crate::attention::Attention;
    use crate::attention::naive::Naive;

    /// Attention of operands with 10 bits of mantissa, as many as TF32 has.
    struct Rounded;

    impl Attention for Rounded {
        fn name(&self) -> &'static str {
            "rounded"
        }

        fn supports(&self, _: Kind, _: Device, _: i64) -> Result<(), String> {
            Ok(())
        }

        fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor, is_causal: bool) -> Result<(Tensor, Tensor)> {
            Naive.forward(&rounded(q)?, &rounded(k)?, &rounded(v)?, is_causal)
        }

        fn backward(&self, [q, k, v, o, lse, d_o]: [&Tensor; 6], is_causal: bool) -> Result<[Tensor; 3]> {
            Naive.backward([&rounded(q)?, &rounded(k)?, &rounded(v)?, o, lse, &rounded(d_o)?], is_causal)
        }
    }

    fn rounded(t: &Tensor) -> Result<Tensor> {
        Ok(t.f_to_kind(Kind::Half)?.f_to_kind(Kind::Float)?)
    }

    #[test]
    fn products_in_tf32_pass_the_golden_case_of_the_triton_function_alone() {
        let [(name, bytes)] = GOLDEN_CASE;
        let case = CaseFile::parse(bytes, Path::new(name)).unwrap();
        let failed = |function, with_backward| {
            let comparisons = golden::attention::run_one(&case_for(function, &case, with_backward), &Rounded).unwrap();
            assert_eq!(comparisons.len(), if with_backward { 5 } else { 2 });
            comparisons.iter().filter(|comparison| !comparison.passed).count()
        };
        assert_eq!((failed(FlashFunction::Triton, false), failed(FlashFunction::Triton, true)), (0, 0));
        assert!(failed(FlashFunction::PyTorch, false) > 0 && failed(FlashFunction::PyTorch, true) > 0);
    }
}
