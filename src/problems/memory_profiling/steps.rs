//! Runs the passes and steps whose memory is looked at, each from the same state of the allocator.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use super::measure::{Params, Usage};
use crate::bench::device::empty_cache;
use crate::bench::model_bench::{Batch, ModelBench};
use crate::model::fused_adamw::adamw_for;
use crate::model::loss::cross_entropy;
use crate::model::optim::{AdamWOptions, Optimizer, zero_grad};
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::autograd::backward;
use crate::torch::memory_history::{History, record};
use crate::torch::nvtx::range;
use crate::torch::{memory, stream};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    Forward,
    RecordedForward,
    FirstStep,
    TrainingStep,
}

/// One part of a step, which ends when the device has done it, and the peaks that were reached in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Phase {
    /// Also the range around it: "forward", "backward" or "optimizer".
    pub name: String,
    pub peak: Usage,
}

/// The parts of one step, with the beginning and the end of each in microseconds since 1970.
#[derive(Debug, Default)]
pub struct Step {
    pub phases: Vec<Phase>,
    pub times_us: Vec<[i64; 2]>,
}

/// A step whose history was kept, and what was alive before it.
#[derive(Debug)]
pub struct Recorded {
    pub step: Step,
    pub history: History,
    pub parameters_bytes: u64,
    pub state_bytes: u64,
}

pub struct MemoryBench {
    bench: ModelBench,
    optimizer: Box<dyn Optimizer>,
    pub parameters_bytes: u64,
    pub state_bytes: u64,
    pub weight_copies_bytes: u64,
    pub other_bytes: u64,
    // Last, since fields are dropped in order: it counts what the others free.
    gauge: Gauge,
}

impl MemoryBench {
    /// A new model, after one pass forward and back, so that libraries have their workspaces.
    pub fn new(params: &Params, device: Device) -> Result<Self> {
        let gauge = Gauge::start(device)?;
        let bench = ModelBench::new(&params.config(), params.attention, params.batch_size, params.dtype, device)?;
        let parameters = bench.parameters();
        let bytes = |(_, p): &(String, Tensor)| (p.numel() * p.kind().elt_size_in_bytes()) as u64;
        let parameters_bytes = parameters.iter().map(bytes).sum();
        let optimizer = adamw_for(device, AdamWOptions::default())?;
        backward(&bench.loss(&bench.draw()?)?).context("in the warm-up")?;
        zero_grad(parameters)?;
        stream::synchronize(device)?;
        let now = gauge.now()?.requested_bytes;
        ensure!(now >= parameters_bytes, "{now} bytes are in use, fewer than the parameters' {parameters_bytes}");
        let other_bytes = now - parameters_bytes;
        Ok(Self { bench, optimizer, parameters_bytes, state_bytes: 0, weight_copies_bytes: 0, other_bytes, gauge })
    }

    /// Runs `what` once as it is and once with its history kept, each from an emptied cache; a first step has a new
    /// optimizer each time.
    pub fn twice(&mut self, what: What) -> Result<(Step, Recorded)> {
        self.prepare(what)?;
        let plain = self.step(what)?;
        self.prepare(what)?;
        let before = self.gauge.now()?.requested_bytes;
        let (device, parameters_bytes, state_bytes) = (self.bench.device, self.parameters_bytes, self.state_bytes);
        let (step, history) = record(device, before, || self.step(what))?;
        if what == What::FirstStep {
            let after = self.gauge.now()?.requested_bytes;
            ensure!(after >= before, "a first step left {after} bytes behind where there were {before}");
            self.state_bytes = after - before;
        }
        Ok((plain, Recorded { step, history, parameters_bytes, state_bytes }))
    }

    fn prepare(&mut self, what: What) -> Result<()> {
        let device = self.bench.device;
        if what == What::FirstStep {
            self.optimizer = adamw_for(device, AdamWOptions::default())?;
        }
        stream::synchronize(device)?;
        empty_cache(device)
    }

    fn step(&mut self, what: What) -> Result<Step> {
        let Self { bench, optimizer, gauge, .. } = self;
        let mut step = Step::default();
        let batch = bench.draw()?;
        if what == What::Forward {
            let forward = || tch::no_grad(|| copies_of_forward(bench, &batch, gauge));
            self.weight_copies_bytes = gauge.phase(&mut step, "forward", forward)?;
            return Ok(step);
        }
        let loss = gauge.phase(&mut step, "forward", || bench.loss(&batch))?;
        if what == What::RecordedForward {
            return Ok(step);
        }
        gauge.phase(&mut step, "backward", || backward(&loss))?;
        gauge.phase(&mut step, "optimizer", || optimizer.step(bench.parameters()))?;
        zero_grad(bench.parameters())?;
        Ok(step)
    }
}

/// A forward pass with its loss; the bytes that were given back when autocast ended.
fn copies_of_forward(bench: &ModelBench, batch: &Batch, gauge: &Gauge) -> Result<u64> {
    let before_the_end = bench.in_precision(|| {
        drop(cross_entropy(&bench.model.forward(&batch.tokens)?, &batch.targets)?);
        Ok(gauge.now()?.requested_bytes)
    })?;
    Ok(before_the_end.saturating_sub(gauge.now()?.requested_bytes))
}

/// What a device's allocator says.
struct Gauge {
    device: Device,
    tracker: AllocationTracker,
}

impl Gauge {
    fn start(device: Device) -> Result<Self> {
        Ok(Self { device, tracker: AllocationTracker::start(device)? })
    }

    /// Runs `body` as the next phase of `step`.
    fn phase<T>(&self, step: &mut Step, name: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
        stream::synchronize(self.device)?;
        self.tracker.reset_peak()?;
        let start = now_us();
        let value = range(name, body).with_context(|| format!("in the {name} phase"))?;
        stream::synchronize(self.device)?;
        step.times_us.push([start, now_us()]);
        step.phases.push(Phase { name: name.into(), peak: self.peak()? });
        Ok(value)
    }

    fn now(&self) -> Result<Usage> {
        self.usage(AllocationTracker::in_use, |gauge| gauge.current)
    }

    fn peak(&self) -> Result<Usage> {
        self.usage(AllocationTracker::peak, |gauge| gauge.peak)
    }

    fn usage(
        &self,
        on_cpu: fn(&AllocationTracker) -> Result<u64>,
        on_cuda: fn(&memory::Gauge) -> u64,
    ) -> Result<Usage> {
        if self.device == Device::Cpu {
            let [requested_bytes, allocated_bytes, active_bytes] = [on_cpu(&self.tracker)?; 3];
            return Ok(Usage { requested_bytes, allocated_bytes, active_bytes, reserved_bytes: None });
        }
        let stats = memory::stats(self.device)?;
        Ok(Usage {
            requested_bytes: on_cuda(&stats.requested_bytes),
            allocated_bytes: on_cuda(&stats.allocated_bytes),
            active_bytes: on_cuda(&stats.active_bytes),
            reserved_bytes: Some(on_cuda(&stats.reserved_bytes)),
        })
    }
}

impl Usage {
    /// The larger of each count.
    pub fn max(self, other: Self) -> Self {
        Self {
            requested_bytes: self.requested_bytes.max(other.requested_bytes),
            allocated_bytes: self.allocated_bytes.max(other.allocated_bytes),
            active_bytes: self.active_bytes.max(other.active_bytes),
            reserved_bytes: self.reserved_bytes.max(other.reserved_bytes),
        }
    }
}

fn now_us() -> i64 {
    // A clock before 1970 shifts a timeline and nothing else.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_micros() as i64)
}
