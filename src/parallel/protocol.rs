//! The official data-parallel tests' protocol, over any strategy, network and world size: each rank trains a replica on
//! its own rows beside a single process's model on all rows, and the two are compared after every step.
//!
//! Source: `tests/test_ddp_individual_parameters.py` and `tests/common.py` of the assignment (Spring 2025).

use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Reduction, Tensor};

use super::{DataParallel, Options, by_name};
use crate::collective::Shared;
use crate::collective::ranks::{Launch, RankTask, launch};
use crate::model::optim::{Optimizer as _, Sgd};
use crate::model::toy::{Blueprint, NO_GRAD_FIXED_PARAM, Toy};
use crate::torch::autograd::backward;

pub const TASK: RankTask = RankTask { name: "data_parallel_protocol", run: on_rank };

pub const STEPS: i64 = 5;
pub const LEARNING_RATE: f64 = 0.1;
/// The tests shuffle the rows after step i with this seed + i.
pub const SHUFFLE_SEED: i64 = 42;
/// `torch.allclose`'s defaults, which the tests use. A sum over ranks adds the rows in another order than a single
/// process does, so gradients differ by float32 rounding (about 1e-7 of their size); this leaves room for no more.
pub const RTOL: f64 = 1e-5;
pub const ATOL: f64 = 1e-8;

/// Starting a rank takes about a second; a launch that is not done by now hangs.
const DEADLINE: Duration = Duration::from_secs(120);

/// One network to train, and the seeds of everything random.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub blueprint: Blueprint,
    pub rows_per_rank: i64,
    pub data_seed: i64,
    /// Rank r draws its model from this seed + r, so that the ranks start apart.
    pub model_seed: i64,
}

impl Case {
    /// The official test's case: ten rows a rank, rank r's model from seed r. (Its rows come from a file; any will do.)
    pub fn official(blueprint: Blueprint, data_seed: i64) -> Self {
        Self { blueprint, rows_per_rank: 10, data_seed, model_seed: 0 }
    }
}

/// What the ranks saw.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Report {
    /// What must hold and did not, in words.
    pub findings: Vec<String>,
    /// Tensors that were compared.
    pub comparisons: u64,
    /// The largest absolute difference between a replica and the single process's model after a step.
    pub largest_error: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    strategy: String,
    options: Options,
    cases: Vec<Case>,
}

/// Runs all `cases` in one launch of `world_size` Gloo ranks. A strategy that trains wrongly gives findings; an error
/// is a rank that crashed or hung.
pub fn run(strategy: &str, options: &Options, world_size: usize, cases: &[Case]) -> Result<Report> {
    let input = Input { strategy: strategy.into(), options: options.clone(), cases: cases.to_vec() };
    let ranks = launch(&Launch { task: TASK.name, world_size, deadline: DEADLINE }, &serde_json::to_value(input)?)?;
    let mut whole = Report::default();
    for rank in ranks {
        let report: Report = serde_json::from_value(rank)?;
        whole.findings.extend(report.findings);
        whole.comparisons += report.comparisons;
        whole.largest_error = whole.largest_error.max(report.largest_error);
    }
    Ok(whole)
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let Input { strategy, options, cases } = serde_json::from_value(input)?;
    let strategy = by_name(&strategy)?;
    let mut report = Report::default();
    for (number, case) in cases.iter().enumerate() {
        collective.barrier()?;
        tch::manual_seed(case.model_seed + collective.rank() as i64);
        let single = Toy::new(&case.blueprint)?;
        let replica = single.deep_copy()?;
        let parallel = (strategy.construct)(replica.named_parameters(), collective, &options)?;
        let place = format!("case {number} ({}), rank {}", case.blueprint.name, collective.rank());
        Trial { case, collective, single, replica, parallel, report: &mut report, place }.run()?;
    }
    Ok(serde_json::to_value(report)?)
}

/// One case on one rank. A mismatch is noted and the trial goes on, so that all ranks make the same collective calls.
struct Trial<'a> {
    case: &'a Case,
    collective: &'a Shared,
    /// Trains on all rows, as if there were no other rank.
    single: Toy,
    replica: Toy,
    parallel: Box<dyn DataParallel>,
    report: &'a mut Report,
    place: String,
}

impl Trial<'_> {
    fn run(mut self) -> Result<()> {
        self.check_start()?;
        self.check_replicas_equal("after construction")?;
        let rows = self.case.rows_per_rank * self.collective.world_size() as i64;
        tch::manual_seed(self.case.data_seed);
        let float = (Kind::Float, Device::Cpu);
        let mut x = Tensor::f_randn([rows, self.case.blueprint.d_in()], float)?;
        let mut y = Tensor::f_randn([rows, self.case.blueprint.d_out()], float)?;
        for step in 0..STEPS {
            self.step(step, &x, &y)?;
            tch::manual_seed(SHUFFLE_SEED + step);
            let order = Tensor::f_randperm(rows, (Kind::Int64, Device::Cpu))?;
            (x, y) = (x.f_index_select(0, &order)?, y.f_index_select(0, &order)?);
        }
        // Beyond the official test, which looks at rank 0 only from here on.
        self.check_replicas_equal("after the last step")
    }

    /// Rank 0 must still hold its own values; every other rank must hold other values than it drew.
    fn check_start(&mut self) -> Result<()> {
        let rank = self.collective.rank();
        for ((name, replica), (_, drawn)) in self.replica.named_parameters().iter().zip(self.single.named_parameters())
        {
            self.report.comparisons += 1;
            let keeps = rank == 0 || name == NO_GRAD_FIXED_PARAM;
            if keeps != close(replica, drawn)? {
                let finding = if keeps { "construction changed" } else { "construction left unbroadcast" };
                self.report.findings.push(format!("{}: {finding} {name}", self.place));
            }
        }
        Ok(())
    }

    /// `validate_ddp_net_equivalence`: every rank holds the same state.
    fn check_replicas_equal(&mut self, when: &str) -> Result<()> {
        for (name, tensor) in self.replica.state_dict()? {
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
        train(&self.single, x, y, LEARNING_RATE, || Ok(()))?;
        self.check_single_moved_alone(step)?;
        let (rows, first) = (self.case.rows_per_rank, self.collective.rank() as i64 * self.case.rows_per_rank);
        let (x, y) = (x.f_narrow(0, first, rows)?, y.f_narrow(0, first, rows)?);
        train(&self.replica, &x, &y, LEARNING_RATE, || self.parallel.finish_gradient_synchronization())?;
        self.check_replica_followed(step)
    }

    /// On rank 0, between the two steps: what trains has moved, what is frozen has not.
    fn check_single_moved_alone(&mut self, step: i64) -> Result<()> {
        if self.collective.rank() != 0 {
            return Ok(());
        }
        for ((name, single), (_, replica)) in self.single.named_parameters().iter().zip(self.replica.named_parameters())
        {
            self.report.comparisons += 1;
            if single.requires_grad() == close(replica, single)? {
                let how = if single.requires_grad() { "has not trained" } else { "has changed though it is frozen" };
                self.report.findings.push(format!("{}, step {step}: {name} {how}", self.place));
            }
        }
        Ok(())
    }

    /// On rank 0: the replica is where the single process is. (Other ranks' single models started elsewhere.)
    fn check_replica_followed(&mut self, step: i64) -> Result<()> {
        if self.collective.rank() != 0 {
            return Ok(());
        }
        for ((name, single), (_, replica)) in self.single.named_parameters().iter().zip(self.replica.named_parameters())
        {
            let error = (single.f_detach()? - replica.f_detach()?).abs().f_max()?.f_double_value(&[])?;
            self.report.comparisons += 1;
            // NaN and infinity are findings below; JSON has no word for them.
            if error.is_finite() {
                self.report.largest_error = self.report.largest_error.max(error);
            }
            if !close(replica, single)? {
                let place = &self.place;
                self.report.findings.push(format!(
                    "{place}, step {step}: {name} is {error:.2e} away from single-process training (rtol {RTOL:e}, atol {ATOL:e})"
                ));
            }
        }
        Ok(())
    }
}

/// One step of gradient descent on the mean squared error of these rows; `synchronise` runs between backward and step.
pub fn train(network: &Toy, x: &Tensor, y: &Tensor, lr: f64, synchronise: impl FnOnce() -> Result<()>) -> Result<()> {
    network.zero_grad();
    backward(&network.forward(x)?.f_mse_loss(y, Reduction::Mean)?)?;
    synchronise()?;
    Sgd::new(lr)?.step(network.named_parameters())
}

/// `torch.allclose(actual, expected)`; NaN is close to nothing.
fn close(actual: &Tensor, expected: &Tensor) -> Result<bool> {
    Ok(actual.f_detach()?.f_allclose(&expected.f_detach()?, RTOL, ATOL, false)?)
}
