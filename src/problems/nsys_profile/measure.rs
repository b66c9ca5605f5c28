//! Profiles a forward pass and a training step of one model, beside their times by the host's clock.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::step::{ProfiledBench, Seconds};
use super::summary::{Attention, Counted, Kernel, MatmulKernel, Matmuls, Passes, RangeWork, Summary, Tally};
use crate::attention::ImplementationName;
use crate::bench::device::{device_for, update_for};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::harness::store::Layout;
use crate::model::memory::{Memory, Update};
use crate::model::sizes::{BATCH_SIZE, VOCAB_SIZE};
use crate::model::{Config, Precision, SizeName};
use crate::torch::profiler::profile;
use crate::torch::stream::synchronize;

/// Whose figures these are; a record says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Collector {
    /// libtorch's profiler, in this process.
    Kineto,
}

/// How much is run and profiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The forward pass alone, under `no_grad`.
    Inference,
    /// The same, and then a whole training step: forward, backward, AdamW.
    TrainingStep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OptimizerName {
    /// AdamW for the whole model in one kernel of ours; on a GPU alone.
    Fused,
    /// AdamW as tensor operations, a dozen for each parameter.
    Plain,
}

/// One configuration; what is left out is the handout's setting.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    #[serde(default = "handout::vocab_size")]
    pub vocab_size: i64,
    #[serde(default = "handout::pass")]
    pub pass: Pass,
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    pub optimizer: OptimizerName,
    #[serde(default = "handout::warmup")]
    pub warmup: usize,
    /// Steps timed by the host's clock alone, before the one that is profiled.
    #[serde(default = "handout::steps")]
    pub steps: usize,
}

/// The settings of section 1.1.2; and since one profiled step has thousands of kernels, few steps.
mod handout {
    use super::*;

    pub fn batch_size() -> i64 {
        BATCH_SIZE
    }
    pub fn vocab_size() -> i64 {
        VOCAB_SIZE
    }
    pub fn pass() -> Pass {
        Pass::TrainingStep
    }
    pub fn dtype() -> Precision {
        Precision::Float32
    }
    pub fn warmup() -> usize {
        2
    }
    pub fn steps() -> usize {
        5
    }
}

impl Params {
    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), self.vocab_size, self.context_length)
    }

    /// "small-512", with what differs from the handout's setting.
    fn label(&self) -> String {
        let bfloat16 = if self.dtype == Precision::Bfloat16 { "-bfloat16" } else { "" };
        let pass = if self.pass == Pass::Inference { "inference" } else { "training_step" };
        let optimizer = match self.optimizer {
            OptimizerName::Fused => "fused",
            OptimizerName::Plain => "plain",
        };
        format!("{}-{}{bfloat16}-{pass}-{optimizer}", self.size.size().name, self.context_length)
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub collector: Collector,
    pub counted: Counted,
    /// On the host's clock, the device synchronised after each pass, without a profiler.
    pub host: Passes<Samples>,
    /// Whether this process had been profiled before `host` was timed.
    pub profiled_before: bool,
    /// The sum of the kernels of each pass, held to the machine's roofs.
    pub kernels: Passes<Samples>,
    pub passes: Passes<RangeWork>,
    /// Of forward and backward pass together, what takes the most time.
    pub top_of_both: Option<Kernel>,
    pub attention: Attention,
    pub matmuls: Matmuls,
    pub matmul_kernels: Vec<MatmulKernel>,
    pub outside: Tally,
    /// Kernels whose launch the profiler did not see; they are in the pass during which they ran.
    pub launches_unseen: u64,
    /// Where the trace was written, below the report's folder.
    pub trace: Option<String>,
}

impl Row {
    /// Without a file.
    fn new(params: &Params, host: Passes<Samples>, profiled_before: bool, summary: Summary) -> Result<Self> {
        let sum = |work: &RangeWork, least| Samples::seconds(vec![work.seconds], least);
        Ok(Self {
            collector: Collector::Kineto,
            counted: summary.counted,
            host,
            profiled_before,
            kernels: of_passes(params, &summary.passes, sum)?,
            passes: summary.passes,
            top_of_both: summary.top_of_both,
            attention: summary.attention,
            matmuls: summary.matmuls,
            matmul_kernels: summary.matmul_kernels,
            outside: summary.outside,
            launches_unseen: summary.launches_unseen,
            trace: None,
        })
    }
}

pub struct NsysProfile;

impl Measure for NsysProfile {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = &["adamw.cu"];

    fn validate(params: &Params) -> Result<()> {
        params.config().validate()?;
        let (batch_size, steps, warmup) = (params.batch_size, params.steps, params.warmup);
        ensure!((1..=1 << 20).contains(&batch_size), "batch_size is {batch_size}: it must lie in 1..2^20");
        ensure!((1..=1000).contains(&steps), "steps is {steps}: it must lie in 1..1000");
        ensure!((1..=1000).contains(&warmup), "warmup is {warmup}: it must lie in 1..1000");
        Ok(())
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        let Params { batch_size: batch, context_length: seq, dtype: precision, .. } = *params;
        let memory = Memory { config: params.config(), batch, seq, precision, attention: ImplementationName::Naive };
        Some(match params.pass {
            Pass::Inference => memory.forward_peak(),
            Pass::TrainingStep => {
                let update = match params.optimizer {
                    OptimizerName::Fused => update_for(profile),
                    OptimizerName::Plain => Update::ByOperators,
                };
                memory.step_peak_with(update, true)
            }
        })
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let layout = Layout::find()?;
        let name = format!("traces/{profile}/nsys_profile-{}.json.gz", params.label());
        let mut row = measure_on(params, device_for(profile)?, Some(&layout.report().join(&name)))?;
        row.trace = Some(name);
        Ok(row)
    }
}

/// Warms up, times `steps` steps by the host's clock, then profiles one more; its trace goes to `trace`.
pub fn measure_on(params: &Params, device: Device, trace: Option<&Path>) -> Result<Row> {
    let mut bench = ProfiledBench::new(params, device)?;
    bench.warm_up()?;
    let profiled_before = PROFILED.load(Ordering::Relaxed);
    let steps = (0..params.steps).map(|_| bench.step()).collect::<Result<Vec<_>>>()?;
    set_up_profiler(device)?;
    let (_, profile) = profile(device, || bench.step())?;
    drop(bench);
    if let Some(path) = trace {
        profile.save(path)?;
    }
    let counted = if device.is_cuda() { Counted::Kernels } else { Counted::Operators };
    let summary = Summary::of(&profile.trace()?, counted)?;
    Row::new(params, host_times(params, &steps)?, profiled_before, summary)
}

/// Whether anything was profiled in this process yet.
static PROFILED: AtomicBool = AtomicBool::new(false);

/// The first profile of a process also sets up Kineto and CUPTI: one of next to nothing, so that no pass pays for it.
fn set_up_profiler(device: Device) -> Result<()> {
    if PROFILED.swap(true, Ordering::Relaxed) {
        return Ok(());
    }
    let nothing = || -> Result<()> {
        let _ = Tensor::f_ones([8, 8], (Kind::Float, device))?.f_mul_scalar(2.0)?;
        synchronize(device)
    };
    profile(device, nothing).map(drop).context("in the first profile of the process")
}

fn host_times(params: &Params, steps: &[Seconds]) -> Result<Passes<Samples>> {
    let part = |i: usize| steps.iter().map(|s| s.training.map(|t| t[i])).collect::<Option<Vec<f64>>>();
    let times = Passes {
        inference: steps.iter().map(|s| s.inference).collect(),
        forward: part(0),
        backward: part(1),
        optimizer: part(2),
    };
    of_passes(params, &times, |times: &Vec<f64>, least| Samples::seconds(times.clone(), least))
}

/// Each pass with the least work that it does: the operations of the matrix products, and the traffic of the parameters
/// that it must touch (read; read and gradients written; gradients and state read, all written).
fn of_passes<T>(
    params: &Params,
    passes: &Passes<T>,
    samples: impl Fn(&T, Work) -> Result<Samples>,
) -> Result<Passes<Samples>> {
    let config = params.config();
    let flops = config.forward_flops(params.batch_size, params.context_length);
    let (all, multiplied) = (config.num_parameters() as f64, config.num_matmul_parameters() as f64);
    let work = |flops, bytes, precision: Precision| Work { flops, bytes, precision: precision.name().into() };
    let forward = || work(flops, 4.0 * multiplied, params.dtype);
    let with = |value: &Option<T>, work| value.as_ref().map(|value| samples(value, work)).transpose();
    Ok(Passes {
        inference: samples(&passes.inference, forward())?,
        forward: with(&passes.forward, forward())?,
        backward: with(&passes.backward, work(2.0 * flops, 8.0 * multiplied, params.dtype))?,
        optimizer: with(&passes.optimizer, work(12.0 * all, 28.0 * all, Precision::Float32))?,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::harness::problem::Measured;

    #[test]
    fn parameters_that_mean_nothing_are_refused_by_name() {
        let fine = json!({"size": "tiny", "context_length": 32, "optimizer": "plain"});
        let parse = Measured::of::<NsysProfile>().parse;
        assert!(parse(&fine, Profile::Gpu).is_ok());
        for (key, value) in
            [("steps", json!(0)), ("warmup", json!(0)), ("optimizer", json!("sgd")), ("size", json!("3B"))]
        {
            let mut wrong = fine.clone();
            wrong[key] = value;
            assert!(parse(&wrong, Profile::Gpu).is_err(), "{key}");
        }
    }
}
