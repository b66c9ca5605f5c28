//! The official sharded-optimizer test's protocol, for any network and world size. Every rank trains the same model on the
//! same rows with AdamW and with a sharded optimizer. The two must agree almost bitwise.
//!
//! Source: `tests/test_sharded_optimizer.py` of the assignment (Spring 2025).

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Context as _, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::{Device, Kind, Reduction, Tensor};

use super::learner::Learner;
use super::protocol::{Case, Report, Trial, on_ranks};
use super::sharded_optimizers::TestedOptimizer;
use crate::collective::Shared;
use crate::collective::ranks::{RankTask, parse_input};
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::{AdamWOptions, Optimizer, Sgd, zero_grad};
use crate::model::toy::{Blueprint, Toy};
use crate::parallel::sharded_optimizer::ParamGroup;
use crate::parallel::zero1::{Stepping, Zero1};
use crate::parallel::{DataParallel as _, Options, Replica, bucket, trained, trainer};
use crate::subject::rank::SubjectRank;
use crate::torch::Generator;
use crate::torch::autograd::backward;

mod conditioning;

pub const TASK: RankTask = RankTask { name: "sharded_optimizer_protocol", run: on_rank };

pub const STEPS: i64 = 10;
pub const ROWS: i64 = 32;
/// Both models' seed, on every rank.
pub const SEED: i64 = 42;
pub const ADAMW: AdamWOptions = AdamWOptions { lr: 0.1, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.1 };
/// `numpy.testing.assert_allclose`'s defaults, which the test uses. The owner must compute exactly as the unsharded
/// optimizer does, and the other ranks must copy its result.
pub const RTOL: f64 = 1e-7;
pub const ATOL: f64 = 0.0;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardedCase {
    pub blueprint: Blueprint,
    pub seed: i64,
    pub adamw: AdamWOptions,
    /// Parameters from this index on form a second group with half the learning rate and no weight decay.
    pub second_group_from: Option<usize>,
    /// The step at which the second group is added; until then it is frozen.
    pub joins_at_step: i64,
    /// Read by ZeRO-1.
    pub options: Options,
}

impl ShardedCase {
    pub fn official(blueprint: Blueprint, options: Options) -> Self {
        Self { blueprint, seed: SEED, adamw: ADAMW, second_group_from: None, joins_at_step: 0, options }
    }
}

/// A parameter and its name.
type Named = (String, Tensor);

/// The result of one trial of [`TASK`] on one rank.
#[derive(Default, Serialize, Deserialize)]
pub struct Seen {
    pub report: Report,
    /// For each case, the number of values that this rank's optimizer stepped.
    stepped_numel: Vec<usize>,
    /// For each case, the number of trained values, in total and in the largest parameter.
    trained_numel: Vec<(usize, usize)>,
}

impl Case for ShardedCase {
    fn run(world_size: usize, trials: &[Trial<Self>]) -> Result<Vec<Report>> {
        let seen = on_ranks(&TASK, world_size, trials)?;
        let our_padding = |trial: &Trial<Self>, number: usize| {
            // Flat buffers pad parameters and shards to the alignment. There are at most as many buckets as parameters.
            match trial.trainer.rsplit('@').next().and_then(trainer::zero1) {
                Some(_) => trial.cases[number].blueprint.layers.len() * 2 * (world_size + 1) * bucket::ALIGNMENT,
                None => 0,
            }
        };
        Ok(trials.iter().zip(seen).map(|(trial, ranks)| report(ranks, |number| our_padding(trial, number))).collect())
    }
}

/// Stricter than the official test: values were compared after every step, each value must be stepped by one rank only, and
/// ranks must own about equally many.
///
/// `padding` gives what may be stepped besides, of the case with this number.
pub fn report(ranks: Vec<Seen>, padding: impl Fn(usize) -> usize) -> Report {
    let mut findings = Vec::new();
    for (number, &(trained, largest)) in ranks[0].trained_numel.iter().enumerate() {
        let owned: Vec<usize> = ranks.iter().map(|seen| seen.stepped_numel[number]).collect();
        let words = undivided(&owned, (trained, largest), padding(number));
        findings.extend(words.map(|words| format!("case {number}: {words}")));
    }
    let owned = Report { findings, ..Report::default() };
    Report::over([owned].into_iter().chain(ranks.into_iter().map(|seen| seen.report)))
}

/// The values by which a subject on so many ranks may pad its shards: each to a multiple of 64.
pub fn subject_padding(ranks: usize) -> usize {
    63 * ranks
}

/// What is wrong with a number of values for each rank, of so many in total and in the largest parameter: each value must be stepped
/// by one rank only, and ranks must own about equally many: none owns several parameters alone. `padding` more are allowed.
pub fn undivided(owned: &[usize], (trained, largest): (usize, usize), padding: usize) -> Option<String> {
    let (sum, most) = (owned.iter().sum::<usize>(), owned.iter().max().copied().unwrap_or(0));
    let is_divided = (trained..=trained + padding).contains(&sum)
        && (most < sum || trained == largest || owned.len() == 1)
        && most <= trained / owned.len() + largest + padding.div_ceil(owned.len());
    (!is_divided).then(|| {
        format!(
            "the ranks step {owned:?} of {trained} values, the largest parameter's {largest}: each value's state must be kept by \
             one rank, and about equally many by each"
        )
    })
}

/// The number of trained values, in total and in the largest parameter.
pub fn trained_numel(network: &Toy) -> (usize, usize) {
    let trained = network.named_parameters().iter().filter(|(_, p)| p.requires_grad()).map(|(_, p)| p.numel());
    (trained.clone().sum(), trained.max().unwrap_or(0))
}

fn on_rank(collective: &Shared, input: Value) -> Result<Value> {
    let trials: Vec<Trial<ShardedCase>> = parse_input(input)?;
    let mut results = Vec::new();
    for Trial { trainer: optimizer, cases } in &trials {
        let mut seen = Seen::default();
        for (number, case) in cases.iter().enumerate() {
            let place = format!("case {number} ({}), rank {}", case.blueprint.name, collective.rank());
            let make = |network| OurSharded::new(optimizer, case, network, collective);
            train(case, collective, &place, (RTOL, ATOL), &mut seen, make).with_context(|| place.clone())?;
        }
        if let Some(stepping) = trainer::zero1(optimizer) {
            seen.report.comparisons += 1;
            let outcome = narrow_weights_keep_small_updates(collective, stepping);
            seen.report.findings.extend(outcome.err().map(|error| format!("{error:#}")));
        }
        results.push(seen);
    }
    Ok(serde_json::to_value(results)?)
}

/// Trains one case with AdamW and with what `make` gives, and compares after every step.
pub fn train<L: ShardedLearner>(
    case: &ShardedCase,
    collective: &Shared,
    place: &str,
    tolerances: (f64, f64),
    seen: &mut Seen,
    make: impl FnOnce(Toy) -> Result<L>,
) -> Result<()> {
    collective.barrier()?;
    let generator = Generator::new(Device::Cpu, case.seed)?;
    let device = collective.device();
    let single = Toy::new(&case.blueprint, &generator)?.deep_copy(device)?;
    let (first, later) = case.groups(&single);
    let mut replica = make(single.deep_copy(device)?)?;
    let (mut first_adamw, mut second_adamw) = (adamw_for(device, case.adamw)?, adamw_for(device, case.second_adamw())?);
    freeze(&later, true)?;
    for step in 0..STEPS {
        if step == case.joins_at_step && case.second_group_from.is_some() {
            freeze(&later, false)?;
            replica.join_second_group()?;
        }
        let [x, y] = case.rows(&generator)?;
        let (x, y) = (x.f_to_device(device)?, y.f_to_device(device)?);
        single.zero_grad();
        squared_error(&single, &x, &y)?;
        first_adamw.step(first)?;
        second_adamw.step(&later)?;
        replica.step(&x, &y)?;
        let trained = replica.network().named_parameters();
        for ((name, single), (_, replica)) in single.named_parameters().iter().zip(trained) {
            seen.report.compare(replica, single, tolerances, |error| {
                let (rtol, atol) = tolerances;
                let away = "away from the unsharded optimizer's";
                format!("{place}, step {step}: {name} is {error:.2e} {away} (rtol {rtol:e}, atol {atol:e})")
            })?;
        }
        let own = replica.unsharded().map_or(&[][..], Toy::named_parameters);
        for ((name, own), (_, sharded)) in own.iter().zip(replica.network().named_parameters()) {
            seen.report.compare(sharded, own, (RTOL, ATOL), |error| {
                let away = "away from the unsharded optimizer's of the same process";
                format!("{place}, step {step}: {name} is {error:.2e} {away} (rtol {RTOL:e}, atol {ATOL:e})")
            })?;
        }
    }
    seen.trained_numel.push(trained_numel(&single));
    seen.stepped_numel.push(replica.stepped_numel());
    Ok(())
}

impl ShardedCase {
    /// `x` and `y` of the next step, on the generator's device.
    fn rows(&self, generator: &Generator) -> Result<[Tensor; 2]> {
        let x = generator.rand(&[ROWS, self.blueprint.d_in()], Kind::Float)?;
        Ok([x, generator.rand(&[ROWS, self.blueprint.d_out()], Kind::Float)?])
    }

    /// That of the second group.
    fn second_adamw(&self) -> AdamWOptions {
        AdamWOptions { lr: self.adamw.lr / 2.0, weight_decay: 0.0, ..self.adamw }
    }

    /// The parameters of the first group, and the trained ones of the second.
    fn groups<'a>(&self, network: &'a Toy) -> (&'a [Named], Vec<Named>) {
        let all = network.named_parameters();
        let (first, later) = all.split_at(self.second_group_from.map_or(all.len(), |from| from.min(all.len())));
        (first, trained(later))
    }
}

fn freeze(parameters: &[(String, Tensor)], frozen: bool) -> Result<()> {
    for (_, parameter) in parameters {
        let _ = parameter.shallow_clone().f_set_requires_grad(!frozen)?;
    }
    Ok(())
}

/// A [`Learner`] whose optimizer's state is divided over the ranks.
pub trait ShardedLearner: Learner {
    /// Trains the case's second group from now on.
    fn join_second_group(&mut self) -> Result<()>;

    /// The values that this rank's optimizer has stepped.
    fn stepped_numel(&self) -> usize;

    /// A network that its own process has trained without sharding, where that is another process than this one.
    fn unsharded(&self) -> Option<&Toy> {
        None
    }
}

impl ShardedLearner for SubjectRank {
    fn join_second_group(&mut self) -> Result<()> {
        bail!("a subject's case has one group")
    }

    fn stepped_numel(&self) -> usize {
        self.stepped_numel
    }

    fn unsharded(&self) -> Option<&Toy> {
        self.unsharded()
    }
}

/// A network with a sharded optimizer of ours, or a mutant.
struct OurSharded {
    network: Toy,
    later: Vec<(String, Tensor)>,
    later_adamw: AdamWOptions,
    optimizer: TestedOptimizer,
    stepped: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl OurSharded {
    fn new(optimizer: &str, case: &ShardedCase, network: Toy, collective: &Shared) -> Result<Self> {
        let (first, later) = case.groups(&network);
        let stepped = Arc::default();
        let group = ParamGroup::new(first, Recorded::adamw(collective.device(), case.adamw, &stepped)?);
        let optimizer = TestedOptimizer::new(optimizer, group, collective, &case.options)?;
        freeze(&later, true)?;
        Ok(Self { network, later, later_adamw: case.second_adamw(), optimizer, stepped })
    }
}

impl Learner for OurSharded {
    fn network(&self) -> &Toy {
        &self.network
    }

    fn step(&mut self, x: &Tensor, y: &Tensor) -> Result<()> {
        self.network.zero_grad();
        squared_error(&self.network, x, y)?;
        self.optimizer.step()
    }
}

impl ShardedLearner for OurSharded {
    fn join_second_group(&mut self) -> Result<()> {
        freeze(&self.later, false)?;
        let device = self.network.named_parameters()[0].1.device();
        let group = ParamGroup::new(&self.later, Recorded::adamw(device, self.later_adamw, &self.stepped)?);
        self.optimizer.add(group)
    }

    fn stepped_numel(&self) -> usize {
        BTreeMap::values(&self.stepped.lock().unwrap_or_else(PoisonError::into_inner)).sum()
    }
}

/// Backward through the sum of squared errors of these rows, the test's loss.
pub fn squared_error(network: &Toy, x: &Tensor, y: &Tensor) -> Result<()> {
    backward(&network.forward(x)?.f_mse_loss(y, Reduction::Sum)?)
}

/// An optimizer that counts the values that it steps, since it keeps state for them.
struct Recorded {
    inner: Box<dyn Optimizer>,
    stepped: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl Recorded {
    fn adamw(
        device: Device,
        options: AdamWOptions,
        stepped: &Arc<Mutex<BTreeMap<String, usize>>>,
    ) -> Result<Box<dyn Optimizer>> {
        Ok(Box::new(Self { inner: adamw_for(device, options)?, stepped: Arc::clone(stepped) }))
    }
}

impl Optimizer for Recorded {
    fn step(&mut self, parameters: &[(String, Tensor)]) -> Result<()> {
        let mut stepped = self.stepped.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, parameter) in parameters.iter().filter(|(_, parameter)| parameter.grad().defined()) {
            stepped.insert(name.clone(), parameter.numel());
        }
        self.inner.step(parameters)
    }
}

/// Fails unless ZeRO-1 keeps updates that bfloat16 would round away: 64 steps of 2^-10 from 1.
fn narrow_weights_keep_small_updates(collective: &Shared, stepping: Stepping) -> Result<()> {
    const UPDATES: i64 = 64;
    let lr = 2f64.powi(-10);
    let weight = Tensor::f_ones([10], (Kind::BFloat16, collective.device()))?.f_set_requires_grad(true)?;
    let parameters = [("weight".to_string(), weight)];
    let replica = Replica { parameters: &parameters, collective, options: &Options { bucket_size_mb: 1.0 } };
    let mut zero1 = Zero1::new(replica, Box::new(Sgd::new(lr)?), stepping)?;
    for _ in 0..UPDATES {
        zero_grad(&parameters)?;
        backward(&parameters[0].1.f_sum(Kind::Float)?)?;
        zero1.finish_gradient_synchronization()?;
        zero1.step()?;
    }
    let (reached, expected) = (parameters[0].1.f_double_value(&[0])?, 1.0 - UPDATES as f64 * lr);
    ensure!(reached == expected, "a bfloat16 weight of 1 is {reached} after {UPDATES} updates of {lr}, not {expected}");
    Ok(())
}
