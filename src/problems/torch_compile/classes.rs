//! Whole steps taken apart by class of kernel: ours in each execution, and PyTorch's at its best, each from Kineto's trace.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::Device;

use super::best::{self, COLUMN, Files, Mode, verified};
use super::transformer::Errors;
use crate::attention::ImplementationName;
use crate::bench::device::empty_cache;
use crate::bench::interleave::{ColumnOutcome, samples};
use crate::bench::machine::{copy_bandwidth, product_rate};
use crate::bench::model_bench::{Batch, ModelBench};
use crate::bench::peer::{Compile, Software, TorchPeer};
use crate::bench::step_classes::{StepClass, StepProfile};
use crate::bench::training_step::captured::CapturedStep;
use crate::bench::training_step::eager::StepBench;
use crate::bench::training_step::{self, Execution, handout};
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Config, Precision, SizeName};
use crate::torch::profiler::profile;
use crate::torch::stream::synchronize;
use crate::torch::trace::Trace;

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    pub dtype: Precision,
    /// Of our steps but the first, which has plain attention; PyTorch's is SDPA.
    pub attention: ImplementationName,
    /// Of torch.compile: the one that is the fastest.
    pub mode: Mode,
    pub warmup: usize,
    /// Steps timed by the host's clock alone, before any is profiled.
    pub steps: usize,
    /// Steps with a profile each; the one of median time is shown.
    pub profiled: usize,
}

/// A way to run one step, in the order in which each is expected to take less than the one before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StepName {
    /// Ours, eager, with plain attention.
    Plain,
    Eager,
    Captured,
    /// PyTorch's.
    Compiled,
    Fused,
}

impl StepName {
    pub const ALL: [Self; 5] = [Self::Plain, Self::Eager, Self::Captured, Self::Compiled, Self::Fused];

    /// None of PyTorch's.
    fn ours(self, attention: ImplementationName) -> Option<(Execution, ImplementationName)> {
        match self {
            Self::Plain => Some((Execution::Eager, ImplementationName::Naive)),
            Self::Eager => Some((Execution::Eager, attention)),
            Self::Captured => Some((Execution::Captured, attention)),
            Self::Compiled => None,
            Self::Fused => Some((Execution::Fused, attention)),
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub steps: BTreeMap<StepName, ColumnOutcome<Step>>,
    /// The rates by which the floor is computed: of a large product, and of copies.
    pub product: Samples,
    pub copy: Samples,
    /// None where it was not compiled.
    pub compiled: Option<Compiled>,
    pub software: Software,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    /// Without the profiler.
    pub step: Samples,
    pub profiles: Vec<StepProfile>,
}

/// PyTorch's errors against our eager pass, measured before any timing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compiled {
    pub errors: Errors,
    pub compile: Option<Compile>,
    pub graphs_skipped: u64,
}

impl Params {
    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), VOCAB_SIZE, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        ensure!(
            self.mode != Mode::MaxAutotune,
            "mode is max-autotune: give default or reduce-overhead, which compile sooner"
        );
        for (key, value, most) in
            [("warmup", self.warmup, 1000), ("steps", self.steps, 1000), ("profiled", self.profiled, 20)]
        {
            ensure!((1..=most).contains(&value), "{key} is {value}: it must lie in 1..{most}");
        }
        Ok(())
    }

    /// One of our steps, as the best ones are.
    fn ours(&self, (execution, attention): (Execution, ImplementationName)) -> best::Params {
        let Self { size, context_length, batch_size, dtype, warmup, steps, .. } = *self;
        best::Params {
            size,
            context_length,
            batch_size,
            dtype,
            attention,
            execution,
            rounds: 1,
            warmup,
            iterations: steps,
            energy_s: 0.0,
            autotune_limit_s: 0,
        }
    }

    /// Only one step is in memory at a time.
    pub fn predicted_bytes(&self, profile: Profile) -> u64 {
        let ours = StepName::ALL.into_iter().filter_map(|name| Some(self.ours(name.ours(self.attention)?)));
        ours.map(|step| step.training_step().predicted_bytes(profile)).max().unwrap_or(0)
    }

    /// The least of a step, whichever way it runs.
    fn work(&self) -> Work {
        self.ours((Execution::Fused, self.attention)).work()
    }
}

pub fn measure(p: &Params, device: Device) -> Result<Row> {
    let (product, copy) = (product_rate(device, p.dtype)?, copy_bandwidth(device)?);
    empty_cache(device)?;
    let named = || StepName::ALL.into_iter().filter_map(|name| Some((name, name.ours(p.attention)?)));
    // All are timed before the first is profiled, and made anew: several of them do not fit into memory.
    let timed = named().map(|(name, ours)| Ok((name, ours, ColumnOutcome::of(timed(p, ours, device))?)));
    let timed = timed.collect::<Result<Vec<_>>>()?;
    let (theirs, compiled, software) = theirs(p, device)?;
    let mut steps = BTreeMap::from([(StepName::Compiled, theirs)]);
    for (name, ours, step) in timed {
        let step = step.try_map(|step| Ok(Step { step, profiles: profiled(p, ours, device)? }))?;
        steps.insert(name, step);
    }
    Ok(Row { steps, product, copy, compiled, software })
}

/// One of our steps, ready to be run.
enum Ours {
    Eager(StepBench, Batch),
    Graph(CapturedStep),
}

impl Ours {
    /// It has run its warm-up steps; a graph is proved against eager passes.
    fn prepared(p: &Params, ours: (Execution, ImplementationName), device: Device) -> Result<Self> {
        let warmup = p.warmup;
        let params = training_step::Params { warmup, ..p.ours(ours).training_step() };
        if params.execution.is_graph() {
            let (mut step, _) = CapturedStep::warmed_up(&params, device)?;
            step.prove()?;
            return Ok(Self::Graph(step));
        }
        let mut bench = StepBench::new(&params, device)?;
        bench.whole_steps(warmup).context("in a warm-up step")?;
        let batch = bench.model.draw()?;
        Ok(Self::Eager(bench, batch))
    }

    /// A step on the tokens at hand, which need not have finished when this returns.
    fn launch(&mut self) -> Result<()> {
        match self {
            Self::Eager(bench, batch) => bench.train(batch).map(drop),
            Self::Graph(step) => step.replay(),
        }
    }

    fn timed(&mut self, count: usize) -> Result<Vec<f64>> {
        let laps = match self {
            Self::Eager(bench, _) => bench.whole_steps(count)?,
            Self::Graph(step) => (0..count).map(|_| step.timed_replay()).collect::<Result<_>>()?,
        };
        Ok(laps.into_iter().map(|lap| lap.host_s).collect())
    }
}

fn timed(p: &Params, ours: (Execution, ImplementationName), device: Device) -> Result<Samples> {
    let seconds = Ours::prepared(p, ours, device)?.timed(p.steps)?;
    empty_cache(device)?;
    Samples::seconds(seconds, p.work())
}

fn profiled(p: &Params, ours: (Execution, ImplementationName), device: Device) -> Result<Vec<StepProfile>> {
    let mut step = Ours::prepared(p, ours, device)?;
    let profiles = profiles(p, device, || {
        synchronize(device)?;
        let (host_s, profile) = profile(device, || {
            let start = Instant::now();
            step.launch()?;
            synchronize(device)?;
            Ok(start.elapsed().as_secs_f64())
        })?;
        Ok((profile.trace()?, host_s))
    })?;
    drop(step);
    empty_cache(device)?;
    Ok(profiles)
}

/// A profile of each step that `step` runs. The first one of a process sets up Kineto and CUPTI, and is dropped.
///
/// Errors: a trace without the step's products, as of a CUDA graph whose kernels the collector did not see.
fn profiles(p: &Params, device: Device, mut step: impl FnMut() -> Result<(Trace, f64)>) -> Result<Vec<StepProfile>> {
    step().context("in the first profile")?;
    let profile = |_| {
        let (trace, host_s) = step()?;
        let has_kernels = trace.events.iter().any(|event| event.source.is_gpu());
        let profile = StepProfile::of(&trace, host_s)?;
        let products = profile.classes.get(&StepClass::Products).map_or(0, |tally| tally.count);
        // Four packed products a layer at least, and two gradients of each.
        let least = 12 * p.config().num_layers as u64;
        ensure!(
            has_kernels == device.is_cuda() && products >= least,
            "the profile of a step has {products} products, not {least} at least: the collector missed kernels"
        );
        Ok(profile)
    };
    (0..p.profiled).map(profile).collect()
}

/// PyTorch's step: compared with our eager pass, timed, profiled.
fn theirs(p: &Params, device: Device) -> Result<(ColumnOutcome<Step>, Option<Compiled>, Software)> {
    let bench = ModelBench::new(&p.config(), p.attention, p.batch_size, p.dtype, device)?;
    let files = Files::write(&bench)?;
    empty_cache(device)?;
    let mut peer = TorchPeer::start(device)?;
    let verified = verified(p.mode, &bench, &files, 0, &mut peer)?;
    drop((bench, files));
    empty_cache(device)?;
    let mut compiled = None;
    let step = verified.try_map(|verified| {
        let step = samples(&peer.turn(COLUMN, p.warmup, p.steps)?, "step", p.work())?;
        let folder = tempfile::tempdir().context("creating a folder for PyTorch's traces")?;
        let file = folder.path().join("trace.json");
        let profiles = profiles(p, device, || their_profile(&mut peer, &file))?;
        let (errors, graphs_skipped) = (verified.errors, verified.graphs_skipped);
        compiled = Some(Compiled { errors, compile: peer.close(Some(&verified.first_call_s))?, graphs_skipped });
        Ok(Step { step, profiles })
    })?;
    Ok((step, compiled, peer.software.clone()))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Profiled {
    seconds: f64,
}

fn their_profile(peer: &mut TorchPeer, file: &Path) -> Result<(Trace, f64)> {
    let Profiled { seconds } = peer.job("profile", json!({ "column": COLUMN, "file": file }))?;
    let json = std::fs::read(file).context("reading PyTorch's trace")?;
    Ok((Trace::from_chrome_json(&json)?, seconds))
}

#[cfg(test)]
mod tests;
