//! Profiles a forward pass and a training step of one model, beside their times by the host's clock.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::step::ProfiledBench;
use super::summary::{Attention, Counted, Kernel, MatmulKernel, Matmuls, Passes, RangeWork, Summary};
use crate::attention::ImplementationName;
use crate::bench::device::{device_for, update_for};
use crate::bench::kernels::Tally;
use crate::bench::training_step::{handout, work_of_passes};
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::samples::Samples;
use crate::harness::store::Layout;
use crate::model::memory::{Memory, Update};
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
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pass {
    /// The forward pass alone, under `no_grad`.
    Inference,
    /// The same, and then a whole training step: forward, backward, AdamW.
    #[default]
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
    #[serde(default)]
    pub pass: Pass,
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    pub optimizer: OptimizerName,
    #[serde(default = "warmup")]
    pub warmup: usize,
    /// Steps timed by the host's clock alone, before the one that is profiled.
    #[serde(default = "steps")]
    pub steps: usize,
}

/// Few, as one profiled step has thousands of kernels.
fn warmup() -> usize {
    2
}

fn steps() -> usize {
    5
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

pub struct NsysProfile;

impl Measure for NsysProfile {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = &["adamw.cu"];

    fn validate(params: &Params) -> Result<()> {
        params.config().validate_with_batch(params.batch_size)?;
        let (steps, warmup) = (params.steps, params.warmup);
        ensure!((1..=1000).contains(&steps), "steps is {steps}: it must lie in 1..1000");
        ensure!((1..=1000).contains(&warmup), "warmup is {warmup}: it must lie in 1..1000");
        Ok(())
    }

    fn validate_row(_params: &Params, row: &Row) -> Result<()> {
        let Passes { inference, forward, backward, optimizer } = &row.passes;
        let works = [("inference", Some(inference)), ("forward", forward.as_ref()), ("backward", backward.as_ref())];
        let works = works.into_iter().chain([("optimizer", optimizer.as_ref())]);
        works.filter_map(|(name, work)| Some((name, work?))).try_for_each(|(name, work)| work.validate().context(name))
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
                memory.step_peak(update, true)
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
    let seconds = |of: fn(&Passes<f64>) -> Option<f64>| steps.iter().map(of).collect::<Option<Vec<_>>>();
    let host = Passes {
        inference: steps.iter().map(|step| step.inference).collect(),
        forward: seconds(|step| step.forward),
        backward: seconds(|step| step.backward),
        optimizer: seconds(|step| step.optimizer),
    };
    set_up_profiler(device)?;
    let (_, profile) = profile(device, || bench.step())?;
    drop(bench);
    if let Some(path) = trace {
        profile.save(path)?;
    }
    let counted = if device.is_cuda() { Counted::Kernels } else { Counted::Operators };
    let trace = profile.trace()?;
    let summary = Summary::of(&trace, counted)?;
    let passes = summary.passes()?;
    Ok(Row {
        collector: Collector::Kineto,
        counted,
        host: samples(params, host)?,
        profiled_before,
        kernels: samples(params, passes.map(|work| vec![work.seconds]))?,
        passes,
        top_of_both: summary.top_of_both(),
        attention: summary.attention()?,
        matmuls: summary.matmuls(),
        matmul_kernels: summary.matmul_kernels(),
        outside: summary.outside(),
        launches_unseen: summary.launches_unseen(),
        trace: None,
    })
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

/// Each pass with the least work that it does.
fn samples(params: &Params, seconds: Passes<Vec<f64>>) -> Result<Passes<Samples>> {
    let config = params.config();
    let flops = config.forward_flops(params.batch_size, params.context_length);
    let [forward, backward, optimizer] = work_of_passes(&config, flops, params.dtype.name());
    let with = |seconds: Option<Vec<f64>>, work| seconds.map(|seconds| Samples::seconds(seconds, work)).transpose();
    Ok(Passes {
        inference: Samples::seconds(seconds.inference, forward.clone())?,
        forward: with(seconds.forward, forward)?,
        backward: with(seconds.backward, backward)?,
        optimizer: with(seconds.optimizer, optimizer)?,
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
