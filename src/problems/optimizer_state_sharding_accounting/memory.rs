//! One rank's memory around its first and a later optimizer step: what is in use, what it is for, and the peaks on the way.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tch::Tensor;

use crate::attention::ImplementationName;
use crate::bench::ddp_step::Params;
use crate::bench::ddp_step::trainer::make_trainer;
use crate::bench::device::empty_cache;
use crate::bench::model_bench::Batch;
use crate::bench::training_step::loss;
use crate::collective::Shared;
use crate::collective::ranks::{Launch, RankTask, launch, parse_input};
use crate::model::Transformer;
use crate::model::optim::zero_grad;
use crate::torch::Generator;
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::autograd::backward;
use crate::torch::stream::synchronize;

pub const TASK: RankTask = RankTask { name: "sharding_memory", run };

const DEADLINE: Duration = Duration::from_secs(300);

/// One rank under one scheme.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankMemory {
    /// Parameters that the rank keeps optimizer state for.
    pub owned_values: u64,
    /// Whether the first peak begins with this scheme. Older records lack it: on a GPU the peak after initialization is
    /// there the highest since the last moment of the scheme before.
    #[serde(default)]
    pub peak_since_start: bool,
    pub moments: Vec<Moment>,
}

/// The names of a rank's moments, in order.
const MOMENTS: [&str; 5] =
    ["after init", "before the first step", "after the first step", "before a later step", "after a later step"];

/// The first of them with optimizer state.
const FIRST_WITH_STATE: usize = 2;

/// Bytes of tensors on the rank's device; the parts add up to what is in use.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    pub name: String,
    /// The most in use since the moment before this one.
    pub peak: u64,
    pub in_use: u64,
    pub parameters: u64,
    /// As the parameters have them, wherever they lie.
    pub gradients: u64,
    /// What the first step left behind.
    pub optimizer_state: u64,
    /// Tokens, tables, buffers of the scheme beside its gradients, workspaces of libraries.
    pub other: u64,
}

impl RankMemory {
    /// Errors: other moments than [`MOMENTS`], another number of parameters than `values`, more gradients than parameters, state before
    /// the first step or less after it than two moments of what is owned, parts that do not add up, or a peak below what is in use.
    pub fn validate(&self, values: u64) -> Result<()> {
        let names: Vec<&str> = self.moments.iter().map(|moment| moment.name.as_str()).collect();
        ensure!(names == MOMENTS, "its moments are {names:?}, and must be {MOMENTS:?}");
        for (k, moment) in self.moments.iter().enumerate() {
            let Moment { name, peak, in_use, parameters, gradients, optimizer_state, other } = moment;
            let parts = parameters + gradients + optimizer_state + other;
            ensure!(*in_use == parts, "{name}: {in_use} bytes are in use, and the parts add up to {parts}");
            ensure!(peak >= in_use, "{name}: the peak is {peak} bytes, less than the {in_use} in use");
            ensure!(gradients <= parameters, "{name}: {gradients} bytes of gradients, and {parameters} of parameters");
            // What the first step frees beside it is counted against the state.
            let least = 0.99 * 8.0 * self.owned_values as f64;
            let has_state = if k < FIRST_WITH_STATE { *optimizer_state == 0 } else { *optimizer_state as f64 >= least };
            ensure!(has_state, "{name}: {optimizer_state} bytes of optimizer state, of {} values", self.owned_values);
            ensure!(*parameters == 4 * values, "{name}: {parameters} bytes of parameters, of {values} in float32");
        }
        Ok(())
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Input {
    params: Params,
    schemes: Vec<String>,
}

/// By scheme, the memory of every rank; each scheme starts with a new model.
pub fn measure(params: &Params, schemes: &[&str]) -> Result<BTreeMap<String, Vec<RankMemory>>> {
    let input = Input { params: params.clone(), schemes: schemes.iter().map(|name| name.to_string()).collect() };
    let ranks = Launch { backend: params.backend, ..Launch::new(TASK.name, params.world_size, DEADLINE) };
    let mut by_scheme: BTreeMap<String, Vec<RankMemory>> = BTreeMap::new();
    for rank in launch(&ranks, &serde_json::to_value(input)?)? {
        let of_rank: BTreeMap<String, RankMemory> = serde_json::from_value(rank)?;
        of_rank.into_iter().for_each(|(scheme, memory)| by_scheme.entry(scheme).or_default().push(memory));
    }
    Ok(by_scheme)
}

fn run(collective: &Shared, input: Value) -> Result<Value> {
    let Input { params, schemes } = parse_input(input)?;
    let mut by_scheme = BTreeMap::new();
    for name in schemes {
        let memory = under(&name, &params, collective).with_context(|| format!("under {name}"))?;
        empty_cache(collective.device())?;
        by_scheme.insert(name, memory);
    }
    Ok(serde_json::to_value(by_scheme)?)
}

fn under(name: &str, params: &Params, collective: &Shared) -> Result<RankMemory> {
    let device = collective.device();
    // What earlier collectives kept has been let go of before anything is counted.
    collective.barrier()?;
    let meter = AllocationTracker::start(device)?;
    let generator = Generator::new(device, collective.rank() as i64)?;
    let model = Transformer::new(&params.config(), ImplementationName::Naive, &generator)?;
    let parameters = model.parameters();
    let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    let of_parameters = parameters.iter().map(|(_, parameter)| bytes(parameter)).sum();
    let gradients = || -> Result<u64> {
        let each =
            parameters.iter().map(|(_, parameter)| parameter.f_grad().map(|g| if g.defined() { bytes(&g) } else { 0 }));
        Ok(each.sum::<Result<u64, _>>()?)
    };
    let mut moments: Vec<Moment> = Vec::new();
    let mut note = |name: &str, state: u64| -> Result<u64> {
        synchronize(device)?;
        let (in_use, peak, gradients) = (meter.in_use()?, meter.peak()?, gradients()?);
        let known = of_parameters + gradients + state;
        let other = in_use.checked_sub(known);
        let other = other.with_context(|| format!("{name}: {in_use} bytes are in use, and {known} were counted"))?;
        let parameters = of_parameters;
        moments.push(Moment { name: name.into(), peak, in_use, parameters, gradients, optimizer_state: state, other });
        meter.reset_peak()?;
        Ok(in_use)
    };
    note("after init", 0)?;

    let mut trainer = make_trainer(name, parameters, collective, None)?;
    let mut state = 0;
    for step in ["the first", "a later"] {
        let size = [params.batch_size, params.context_length];
        let batch = Batch::draw(size, params.vocab_size, &generator)?;
        backward(&loss(&model, &batch.tokens, &batch.targets, params.dtype)?)?;
        trainer.parallel().finish_gradient_synchronization()?;
        let before = note(&format!("before {step} step"), state)?;
        trainer.step()?;
        synchronize(device)?;
        let after = meter.in_use()?;
        ensure!(after >= before, "a step left {after} bytes where there were {before}");
        state += after - before;
        note(&format!("after {step} step"), state)?;
        zero_grad(parameters)?;
    }
    Ok(RankMemory { owned_values: trainer.owned_numel() as u64, peak_since_start: true, moments })
}
