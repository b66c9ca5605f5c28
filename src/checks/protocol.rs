//! The official data-parallel tests' protocol, for any trainer, network and world size. Each rank trains a replica on its
//! own rows, and a single-process model on all rows. The two are compared after every step.
//!
//! Source: `tests/test_ddp_individual_parameters.py` and `tests/common.py` of the assignment (Spring 2025).

use std::fmt::Debug;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Reduction, Tensor};

use super::learner::{Learner, OurReplica};
use crate::collective::Shared;
use crate::collective::ranks::{Launch, RankTask, launch, parse_input};
use crate::model::optim::{Optimizer as _, Sgd};
use crate::model::toy::{Blueprint, NO_GRAD_FIXED_PARAM, Toy};
use crate::parallel::Options;
use crate::torch::Generator;
use crate::torch::autograd::backward;

pub const TASK: RankTask = RankTask { name: "data_parallel_protocol", run: on_rank };

pub const STEPS: i64 = 5;
pub const LEARNING_RATE: f64 = 0.1;
/// The tests shuffle the rows after step i with this seed plus i.
pub const SHUFFLE_SEED: i64 = 42;
/// `torch.allclose`'s defaults, which the tests use. Ranks and a single process sum the rows in different orders, so
/// gradients differ by float32 rounding (about 1e-7 relative). These tolerances allow little more.
pub const RTOL: f64 = 1e-5;
pub const ATOL: f64 = 1e-8;

/// A launch that is not done by now hangs: a case takes milliseconds.
const DEADLINE: Duration = Duration::from_secs(120);

/// One network, how it is trained, and all random seeds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingCase {
    pub blueprint: Blueprint,
    pub options: Options,
    pub passes: Passes,
    pub zeroing: Zeroing,
    /// At least two if there are two passes.
    pub rows_per_rank: i64,
    pub data_seed: i64,
    /// Rank r draws its model from this seed plus r, so that the ranks start with different models.
    pub model_seed: i64,
}

/// How the replica processes a step's rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Passes {
    Once,
    /// In two passes. The gradients of the first are not averaged until the second.
    NoSync,
    /// In two passes, with gradients synchronised after each.
    FinishEach,
}

/// How gradients are reset between steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Zeroing {
    /// Set to zero in place.
    InPlace,
    /// Released; the backward pass allocates new ones.
    Release,
}

impl TrainingCase {
    /// The official test's case: ten rows a rank, rank r's model from seed r. Our rows are random; the test's are in a file.
    pub fn official(blueprint: Blueprint, options: Options, data_seed: i64) -> Self {
        let (passes, zeroing) = (Passes::Once, Zeroing::InPlace);
        Self { blueprint, options, passes, zeroing, rows_per_rank: 10, data_seed, model_seed: 0 }
    }
}

/// The result of a check on all ranks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// Descriptions of all mismatches.
    pub findings: Vec<String>,
    /// The number of compared tensors.
    pub comparisons: u64,
    /// The largest absolute difference between a replica and the single process's model after a step.
    pub largest_error: f64,
}

/// What one trainer, by name, is to train.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Trial<C> {
    pub trainer: String,
    pub cases: Vec<C>,
}

/// A case of one of the two protocols: this one, or that of the sharded optimizers.
pub trait Case: Clone + Debug + Sized {
    /// Runs all `trials` in one launch of `world_size` Gloo ranks, because starting ranks takes far longer than training
    /// such networks; a report of each. Wrong training gives findings; an `Err` means that a rank crashed or hung.
    fn run(world_size: usize, trials: &[Trial<Self>]) -> Result<Vec<Report>>;
}

impl Case for TrainingCase {
    fn run(world_size: usize, trials: &[Trial<Self>]) -> Result<Vec<Report>> {
        Ok(on_ranks(&TASK, world_size, trials)?.into_iter().map(Report::over).collect())
    }
}

/// Runs `task`, which gives a result of each of `inputs`, on Gloo ranks: for each input, the ranks' results.
pub fn on_ranks<R: DeserializeOwned>(
    task: &RankTask,
    world_size: usize,
    inputs: &[impl Serialize],
) -> Result<Vec<Vec<R>>> {
    let ranks = launch(&Launch::new(task.name, world_size, DEADLINE), &serde_json::to_value(inputs)?)?;
    let mut by_input: Vec<Vec<R>> = inputs.iter().map(|_| Vec::new()).collect();
    for rank in ranks {
        let results: Vec<R> = serde_json::from_value(rank)?;
        ensure!(results.len() == inputs.len(), "a rank gave {} results of {} inputs", results.len(), inputs.len());
        by_input.iter_mut().zip(results).for_each(|(ranks, result)| ranks.push(result));
    }
    Ok(by_input)
}

impl Report {
    /// All that these reports hold.
    pub fn over(reports: impl IntoIterator<Item = Self>) -> Self {
        reports.into_iter().fold(Self::default(), |mut whole, other| {
            whole.findings.extend(other.findings);
            whole.comparisons += other.comparisons;
            whole.largest_error = whole.largest_error.max(other.largest_error);
            whole
        })
    }

    /// Compares two parameters by `torch.allclose`; `finding` gets the largest difference.
    pub fn compare(
        &mut self,
        actual: &Tensor,
        expected: &Tensor,
        (rtol, atol): (f64, f64),
        finding: impl FnOnce(f64) -> String,
    ) -> Result<()> {
        let (actual, expected) = (actual.f_detach()?, expected.f_detach()?);
        let error = actual.f_sub(&expected)?.f_abs()?.f_max()?.f_double_value(&[])?;
        self.comparisons += 1;
        // NaN and infinity become findings below; JSON cannot represent them.
        if error.is_finite() {
            self.largest_error = self.largest_error.max(error);
        }
        if !actual.f_allclose(&expected, rtol, atol, false)? {
            self.findings.push(finding(error));
        }
        Ok(())
    }
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let trials: Vec<Trial<TrainingCase>> = parse_input(input)?;
    let mut reports = Vec::new();
    for Trial { trainer, cases } in &trials {
        let mut report = Report::default();
        for (number, case) in cases.iter().enumerate() {
            let place = format!("case {number} ({})", case.blueprint.name);
            run_case(case, collective, &place, &mut report, |replica| {
                OurReplica::new(trainer, case, replica, collective)
            })?;
        }
        reports.push(report);
    }
    Ok(serde_json::to_value(reports)?)
}

/// Runs one case on this rank, with what `wrap` makes of the replica.
pub fn run_case<L: Learner>(
    case: &TrainingCase,
    collective: &Shared,
    place: &str,
    report: &mut Report,
    wrap: impl FnOnce(Toy) -> Result<L>,
) -> Result<()> {
    collective.barrier()?;
    let generator = Generator::new(Device::Cpu, case.model_seed + collective.rank() as i64)?;
    let single = Toy::new(&case.blueprint, &generator)?;
    let replica = wrap(single.deep_copy(Device::Cpu)?)?;
    let place = format!("{place}, rank {}", collective.rank());
    CaseOnRank { case, collective, single, replica, report, place }.run()
}

/// One case on one rank. After a mismatch it continues, so that all ranks make the same collective calls.
struct CaseOnRank<'a, L> {
    case: &'a TrainingCase,
    collective: &'a Shared,
    /// The single-process model, trained on all rows.
    single: Toy,
    replica: L,
    report: &'a mut Report,
    place: String,
}

impl<L: Learner> CaseOnRank<'_, L> {
    fn run(mut self) -> Result<()> {
        self.check_start()?;
        self.check_replicas_equal("after construction")?;
        let rows = self.case.rows_per_rank * self.collective.world_size() as i64;
        let generator = Generator::new(Device::Cpu, self.case.data_seed)?;
        let mut x = generator.randn(&[rows, self.case.blueprint.d_in()], Kind::Float)?;
        let mut y = generator.randn(&[rows, self.case.blueprint.d_out()], Kind::Float)?;
        for step in 0..STEPS {
            self.step(step, &x, &y)?;
            let order = Generator::new(Device::Cpu, SHUFFLE_SEED + step)?.randperm(rows)?;
            (x, y) = (x.f_index_select(0, &order)?, y.f_index_select(0, &order)?);
        }
        // The official test compares only rank 0 from here on.
        self.check_replicas_equal("after the last step")
    }

    /// Rank 0 must keep its values; every other rank's values must have changed.
    fn check_start(&mut self) -> Result<()> {
        let rank = self.collective.rank();
        let replica = self.replica.network().named_parameters();
        for ((name, replica), (_, drawn)) in replica.iter().zip(self.single.named_parameters()) {
            self.report.comparisons += 1;
            let keeps = rank == 0 || name == NO_GRAD_FIXED_PARAM;
            if keeps != close(replica, drawn)? {
                let finding = if keeps { "construction changed" } else { "construction did not broadcast" };
                self.report.findings.push(format!("{}: {finding} {name}", self.place));
            }
        }
        Ok(())
    }

    /// `validate_ddp_net_equivalence`: every rank holds the same state.
    fn check_replicas_equal(&mut self, when: &str) -> Result<()> {
        for (name, tensor) in self.replica.network().state_dict()? {
            let mine = tensor.f_detach()?;
            for (other, theirs) in self.collective.all_gather(&mine)?.iter().enumerate() {
                self.report.comparisons += 1;
                if !close(theirs, &mine)? {
                    let place = &self.place;
                    self.report.findings.push(format!("{place}: {name} is not that of rank {other} {when}"));
                }
            }
        }
        Ok(())
    }

    fn step(&mut self, step: i64, x: &Tensor, y: &Tensor) -> Result<()> {
        self.single.zero_grad();
        pass(&self.single, x, y, 1.0)?;
        Sgd::new(LEARNING_RATE)?.step(self.single.named_parameters())?;
        self.check_single_moved_alone(step)?;
        let (rows, first) = (self.case.rows_per_rank, self.collective.rank() as i64 * self.case.rows_per_rank);
        self.replica.step(&x.f_narrow(0, first, rows)?, &y.f_narrow(0, first, rows)?)?;
        self.check_replica_followed(step)
    }

    /// On rank 0, between the two steps: trained parameters have changed, frozen ones have not.
    fn check_single_moved_alone(&mut self, step: i64) -> Result<()> {
        if self.collective.rank() != 0 {
            return Ok(());
        }
        let replica = self.replica.network().named_parameters();
        for ((name, single), (_, replica)) in self.single.named_parameters().iter().zip(replica) {
            self.report.comparisons += 1;
            if single.requires_grad() == close(replica, single)? {
                let how = if single.requires_grad() { "has not trained" } else { "has changed though it is frozen" };
                self.report.findings.push(format!("{}, step {step}: {name} {how}", self.place));
            }
        }
        Ok(())
    }

    /// On rank 0: the replica equals the single-process model. Other ranks' single-process models had other initial values.
    fn check_replica_followed(&mut self, step: i64) -> Result<()> {
        if self.collective.rank() != 0 {
            return Ok(());
        }
        let Self { single, replica, report, place, .. } = self;
        for ((name, single), (_, replica)) in single.named_parameters().iter().zip(replica.network().named_parameters())
        {
            let away = "away from single-process training";
            report.compare(replica, single, (RTOL, ATOL), |error| {
                format!("{place}, step {step}: {name} is {error:.2e} {away} (rtol {RTOL:e}, atol {ATOL:e})")
            })?;
        }
        Ok(())
    }
}

/// Backward through the mean squared error of these rows, times `weight`.
pub fn pass(network: &Toy, x: &Tensor, y: &Tensor, weight: f64) -> Result<()> {
    backward(&network.forward(x)?.f_mse_loss(y, Reduction::Mean)?.f_mul_scalar(weight)?)
}

/// `torch.allclose(actual, expected)`. NaN is never close.
fn close(actual: &Tensor, expected: &Tensor) -> Result<bool> {
    Ok(actual.f_detach()?.f_allclose(&expected.f_detach()?, RTOL, ATOL, false)?)
}
