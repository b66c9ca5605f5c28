//! Measures the memory of every pass and step of one model, with histories of a forward pass and of a training step.

use std::fs::{self, File};
use std::io::{BufWriter, Write as _};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Device;

use super::components::{Allocation, Components, Timeline, WeightCopies};
use super::steps::{MemoryBench, Phase, What};
use crate::attention::{FLASH_KERNELS, ImplementationName};
use crate::bench::device::{attention_for, device_for, update_for};
use crate::bench::training_step::handout;
use crate::harness::problem::Measure;
use crate::harness::record::Profile;
use crate::harness::store::Layout;
use crate::model::memory::{Memory, Update};
use crate::model::{Config, Precision, SizeName};
use crate::printable::shown_path;
use crate::torch::memory_history::{History, viewer};

/// One model, whose forward pass and training steps are all measured; what is left out is the handout's setting, but for
/// the attention.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    #[serde(default = "handout::vocab_size")]
    pub vocab_size: i64,
    #[serde(default = "handout::dtype")]
    pub dtype: Precision,
    /// Left out, [`attention_for`] the profile.
    pub attention: ImplementationName,
    /// The most points that a timeline is thinned to; 0 keeps none, and no file for a viewer.
    #[serde(default)]
    pub timeline_points: usize,
}

impl Params {
    pub fn config(&self) -> Config {
        Config::of_size(self.size.size(), self.vocab_size, self.context_length)
    }

    pub fn memory(&self) -> Memory {
        let Self { batch_size: batch, context_length: seq, dtype: precision, attention, .. } = *self;
        Memory { config: self.config(), batch, seq, precision, attention }
    }
}

/// Bytes throughout, and each a plain number: the same step allocates the same.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub parameters_bytes: u64,
    /// What the first step of the optimizer left behind.
    pub optimizer_state_bytes: u64,
    /// What a forward pass under `no_grad` gave back on leaving autocast.
    pub weight_copies_bytes: u64,
    /// Beside the parameters before any step: tables that layers share, and the workspaces of libraries after a warm-up.
    pub other_bytes: u64,
    /// Tokens and tables by counting, which predictions contain.
    pub inputs_and_tables_bytes: u64,
    /// Under `no_grad`.
    pub forward: Run,
    /// Recorded by autograd, without its backward pass.
    pub recorded_forward: Run,
    /// Forward, backward and optimizer, which has no state before.
    pub first_step: Run,
    /// The same with state.
    pub training_step: Run,
}

/// One pass or step, run twice: once for the allocator's statistics alone, once with its history kept.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Of the run without a history.
    pub phases: Vec<Phase>,
    /// The largest of the phases' peaks, each count for itself.
    pub peak: Usage,
    /// Whether the second run asked for as many bytes at its peak, by the statistics and by the history.
    pub repeated: bool,
    /// What was alive at the history's peak.
    pub at_peak: Components,
    /// The named ranges in which the peak was reached, and the operators that ran there.
    pub peak_range: String,
    pub peak_operators: String,
    /// What the forward pass allocated and left alive, weight copies included.
    pub saved_bytes: u64,
    pub predicted_bytes: u64,
    /// The largest allocations of the forward pass by size and source.
    pub largest: Vec<Allocation>,
    pub timeline: Option<Timeline>,
}

/// One moment of an allocator, or the largest of each count over a while.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Usage {
    /// In tensors, as asked for.
    pub requested_bytes: u64,
    /// In tensors, in the allocator's blocks. On a CPU, where blocks are unknown, as asked for.
    pub allocated_bytes: u64,
    /// The same, and what a stream still waits for.
    pub active_bytes: u64,
    /// Taken from the driver; `None` on a CPU, where nothing is kept.
    pub reserved_bytes: Option<u64>,
}

impl Usage {
    /// Errors: fewer bytes in blocks than in their tensors, or fewer from the driver than in blocks.
    fn validate(self) -> Result<()> {
        let Self { requested_bytes: requested, allocated_bytes: allocated, active_bytes: active, reserved_bytes } =
            self;
        let reserved = reserved_bytes.unwrap_or(active);
        let rises = requested <= allocated && allocated <= active && active <= reserved;
        ensure!(rises, "a part is larger than what holds it: {self:?}");
        Ok(())
    }
}

impl Run {
    /// Errors: the peak is not the highest of the phases, or its components, or a timeline's, do not add up.
    fn validate(&self, parameters_bytes: u64) -> Result<()> {
        self.phases.iter().try_for_each(|phase| phase.peak.validate())?;
        let highest = self.phases.iter().map(|phase| phase.peak).reduce(Usage::max).unwrap_or_default();
        ensure!(self.peak == highest, "the peak is {:?}, and the highest of the phases {highest:?}", self.peak);
        let (parts, requested) = (self.at_peak.total(), self.peak.requested_bytes);
        let adds_up = parts == requested || !self.repeated;
        ensure!(adds_up, "the components of the peak are {parts} bytes, and the peak {requested}");
        let parameters = self.at_peak.parameters;
        ensure!(parameters == parameters_bytes, "of {parameters_bytes} bytes of parameters the peak has {parameters}");
        ensure!(self.saved_bytes <= requested, "{} bytes are saved, of {requested}", self.saved_bytes);
        for group in &self.largest {
            let bytes = group.bytes_each;
            ensure!(bytes <= requested, "an allocation is {bytes} bytes, and the peak {requested}");
        }
        self.timeline.as_ref().map_or(Ok(()), Timeline::validate)?;
        let highest = self.timeline.as_ref().and_then(Timeline::highest).unwrap_or(parts);
        ensure!(highest <= parts, "the timeline reaches {highest} bytes, and the peak has {parts}");
        Ok(())
    }
}

impl Row {
    fn runs(&self) -> [(&'static str, &Run); 4] {
        [
            ("forward", &self.forward),
            ("recorded_forward", &self.recorded_forward),
            ("first_step", &self.first_step),
            ("training_step", &self.training_step),
        ]
    }
}

pub struct MemoryProfiling;

impl Measure for MemoryProfiling {
    type Params = Params;
    type Row = Row;
    const REVISION: u32 = 1;
    const KERNELS: &'static [&'static str] = FLASH_KERNELS;

    fn kernels(params: &Params) -> &'static [&'static str] {
        if params.attention.runs_own_kernels() { Self::KERNELS } else { &[] }
    }

    fn defaults(profile: Profile) -> Vec<(&'static str, Value)> {
        vec![("attention", json!(attention_for(profile)))]
    }

    fn validate(params: &Params) -> Result<()> {
        params.config().validate_with_batch(params.batch_size)?;
        let timeline_points = params.timeline_points;
        ensure!(timeline_points <= 10_000, "timeline_points is {timeline_points}: it must not exceed 10000");
        Ok(())
    }

    fn validate_row(params: &Params, row: &Row) -> Result<()> {
        let memory = params.memory();
        let (parameters, expected) = (row.parameters_bytes, memory.parameters());
        ensure!(parameters == expected, "parameters_bytes is {parameters}, and the model's have {expected}");
        let (state, least) = (row.optimizer_state_bytes, memory.optimizer_state());
        ensure!(state >= least, "optimizer_state_bytes is {state}, less than the {least} of two moments");
        for (name, run) in [("forward", &row.forward), ("training_step", &row.training_step)] {
            let (is_asked, is_there) = (params.timeline_points > 0, run.timeline.is_some());
            ensure!(
                is_asked == is_there,
                "{name}: the case asks for a timeline: {is_asked}; its row has one: {is_there}"
            );
        }
        row.runs().into_iter().try_for_each(|(name, run)| run.validate(parameters).context(name))
    }

    fn predicted_bytes(params: &Params, profile: Profile) -> Option<u64> {
        Some(params.memory().step_peak(update_for(profile), true))
    }

    fn measure(params: &Params, profile: Profile) -> Result<Row> {
        let (row, histories) = measure_on(params, device_for(profile)?)?;
        if params.timeline_points > 0 {
            keep(params, profile, &histories)?;
        }
        Ok(row)
    }
}

/// Runs every pass and step of one model, and gives the histories of a forward pass and of a training step too.
pub fn measure_on(params: &Params, device: Device) -> Result<(Row, [History; 2])> {
    let mut bench = MemoryBench::new(params, device)?;
    let (memory, copies) = (params.memory(), WeightCopies::of(params));
    let update = if device == Device::Cpu { Update::ByOperators } else { Update::Fused };
    let mut run = |what: What, points: usize, predicted_bytes: u64| -> Result<(Run, History)> {
        let (plain, recorded) = bench.twice(what).with_context(|| format!("in {what:?}"))?;
        let run = super::components::run(plain, &recorded, &copies, points, predicted_bytes);
        Ok((run.with_context(|| format!("in the history of {what:?}"))?, recorded.history))
    };
    let points = params.timeline_points;
    let (forward, history_of_forward) = run(What::Forward, points, memory.forward_peak())?;
    let (recorded_forward, _) = run(What::RecordedForward, 0, memory.recorded_forward_peak())?;
    let (first_step, _) = run(What::FirstStep, 0, memory.step_peak(update, false))?;
    let (training_step, history_of_step) = run(What::TrainingStep, points, memory.step_peak(update, true))?;
    let row = Row {
        parameters_bytes: bench.parameters_bytes,
        optimizer_state_bytes: bench.state_bytes,
        weight_copies_bytes: bench.weight_copies_bytes,
        other_bytes: bench.other_bytes,
        inputs_and_tables_bytes: memory.inputs_and_tables(),
        forward,
        recorded_forward,
        first_step,
        training_step,
    };
    Ok((row, [history_of_forward, history_of_step]))
}

/// Writes what pytorch.org/memory_viz draws to report/traces/PROFILE.
fn keep(params: &Params, profile: Profile, histories: &[History; 2]) -> Result<()> {
    let folder = Layout::find()?.report().join("traces").join(profile.name());
    fs::create_dir_all(&folder).with_context(|| format!("failed to make {}", shown_path(&folder)))?;
    for (history, what) in histories.iter().zip(["forward", "training_step"]) {
        let Params { size, context_length, dtype, .. } = params;
        let size = size.size().name;
        let name = format!("memory_profiling-{size}-{context_length}-{}-{what}.pickle", dtype.name());
        let path = folder.join(name);
        let write = || -> Result<()> {
            let mut file = BufWriter::new(File::create(&path)?);
            viewer::write(history, &mut file)?;
            Ok(file.flush()?)
        };
        write().with_context(|| format!("failed to write {}", shown_path(&path)))?;
    }
    Ok(())
}
