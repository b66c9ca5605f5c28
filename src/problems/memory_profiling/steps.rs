//! Runs the passes and steps whose memory is looked at, each from the same state of the allocator.

use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result, ensure};
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::measure::{Params, Usage};
use crate::bench::training_step::loss;
use crate::model::fused_adamw::adamw_for;
use crate::model::memory::Update;
use crate::model::optim::{AdamWOptions, Optimizer, zero_grad};
use crate::model::{Precision, Transformer, loss::cross_entropy};
use crate::torch::Generator;
use crate::torch::allocator_stats::AllocationTracker;
use crate::torch::autocast::autocast;
use crate::torch::autograd::backward;
use crate::torch::memory_history::{History, record};
use crate::torch::nvtx::range;
use crate::torch::random::SEED;
use crate::torch::{memory, stream};

/// The optimizer of a device, and how it updates.
pub fn adamw_on(device: Device) -> Result<(Box<dyn Optimizer>, Update)> {
    let update = if device == Device::Cpu { Update::ByOperators } else { Update::Fused };
    Ok((adamw_for(device, AdamWOptions::default())?, update))
}

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

pub struct MemoryBench<'a> {
    params: &'a Params,
    device: Device,
    model: Transformer,
    generator: Generator,
    optimizer: Box<dyn Optimizer>,
    pub update: Update,
    pub parameters_bytes: u64,
    pub state_bytes: u64,
    pub weight_copies_bytes: u64,
    pub other_bytes: u64,
    // Last, since fields are dropped in order: it counts what the others free.
    gauge: Gauge,
}

impl<'a> MemoryBench<'a> {
    /// A new model, after one pass forward and back, so that libraries have their workspaces.
    pub fn new(params: &'a Params, device: Device) -> Result<Self> {
        let gauge = Gauge::start(device)?;
        let generator = Generator::new(device, SEED)?;
        let model = Transformer::new(&params.config(), params.attention, &generator)?;
        let bytes = |(_, p): &(String, Tensor)| (p.numel() * p.kind().elt_size_in_bytes()) as u64;
        let parameters_bytes = model.parameters().iter().map(bytes).sum();
        let (optimizer, update) = adamw_on(device)?;
        let [state_bytes, weight_copies_bytes, other_bytes] = [0; 3];
        let mut bench = Self {
            params,
            device,
            model,
            generator,
            optimizer,
            update,
            parameters_bytes,
            state_bytes,
            weight_copies_bytes,
            other_bytes,
            gauge,
        };
        bench.warm_up().context("in the warm-up")?;
        Ok(bench)
    }

    fn warm_up(&mut self) -> Result<()> {
        let (tokens, targets) = self.batch()?;
        backward(&loss(&self.model, &tokens, &targets, self.params.dtype)?)?;
        drop((tokens, targets));
        zero_grad(self.model.parameters())?;
        stream::synchronize(self.device)?;
        let now = self.gauge.now()?.requested_bytes;
        let parameters = self.parameters_bytes;
        ensure!(now >= parameters, "{now} bytes are in use, fewer than the parameters' {parameters}");
        self.other_bytes = now - parameters;
        Ok(())
    }

    /// Runs `what` once as it is and once with its history kept, each from an emptied cache; a first step has a new
    /// optimizer each time.
    pub fn twice(&mut self, what: What) -> Result<(Step, Recorded)> {
        self.prepare(what)?;
        let plain = self.step(what)?;
        self.prepare(what)?;
        let before = self.gauge.now()?.requested_bytes;
        let (device, parameters_bytes, state_bytes) = (self.device, self.parameters_bytes, self.state_bytes);
        let (step, history) = record(device, before, || self.step(what))?;
        if what == What::FirstStep {
            let after = self.gauge.now()?.requested_bytes;
            ensure!(after >= before, "a first step left {after} bytes behind where there were {before}");
            self.state_bytes = after - before;
        }
        Ok((plain, Recorded { step, history, parameters_bytes, state_bytes }))
    }

    fn prepare(&mut self, what: What) -> Result<()> {
        if what == What::FirstStep {
            self.optimizer = adamw_on(self.device)?.0;
        }
        stream::synchronize(self.device)?;
        match self.device {
            Device::Cpu => Ok(()),
            device => memory::empty_cache(device),
        }
    }

    fn step(&mut self, what: What) -> Result<Step> {
        let mut step = Step::default();
        let (tokens, targets) = self.batch()?;
        if what == What::Forward {
            let forward = || tch::no_grad(|| self.copies_of_forward(&tokens, &targets));
            self.weight_copies_bytes = self.gauge.phase(&mut step, "forward", forward)?;
            return Ok(step);
        }
        let forward = || loss(&self.model, &tokens, &targets, self.params.dtype);
        let loss = self.gauge.phase(&mut step, "forward", forward)?;
        if what == What::RecordedForward {
            return Ok(step);
        }
        self.gauge.phase(&mut step, "backward", || backward(&loss))?;
        self.gauge.phase(&mut step, "optimizer", || self.optimizer.step(self.model.parameters()))?;
        zero_grad(self.model.parameters())?;
        Ok(step)
    }

    /// A forward pass with its loss; the bytes that were given back when autocast ended.
    fn copies_of_forward(&self, tokens: &Tensor, targets: &Tensor) -> Result<u64> {
        let inside = || {
            drop(cross_entropy(&self.model.forward(tokens)?, targets)?);
            Ok(self.gauge.now()?.requested_bytes)
        };
        let before_the_end = match self.params.dtype {
            Precision::Float32 => inside()?,
            Precision::Bfloat16 => autocast(self.device, Kind::BFloat16, inside)?,
        };
        Ok(before_the_end.saturating_sub(self.gauge.now()?.requested_bytes))
    }

    fn batch(&self) -> Result<(Tensor, Tensor)> {
        let size = [self.params.batch_size, self.params.context_length];
        let random = || self.generator.randint(0, self.params.vocab_size, &size, Kind::Int64);
        Ok((random()?, random()?))
    }
}

/// What a device's allocator says.
struct Gauge {
    device: Device,
    /// The CPU's, which counts from here on.
    meter: Option<AllocationTracker>,
}

impl Gauge {
    fn start(device: Device) -> Result<Self> {
        let meter = (device == Device::Cpu).then(|| AllocationTracker::start(device)).transpose()?;
        Ok(Self { device, meter })
    }

    /// Runs `body` as the next phase of `step`.
    fn phase<T>(&self, step: &mut Step, name: &'static str, body: impl FnOnce() -> Result<T>) -> Result<T> {
        stream::synchronize(self.device)?;
        self.reset()?;
        let start = now_us();
        let value = range(name, body).with_context(|| format!("in the {name} phase"))?;
        stream::synchronize(self.device)?;
        step.times_us.push([start, now_us()]);
        step.phases.push(Phase { name: name.into(), peak: self.peak()? });
        Ok(value)
    }

    fn now(&self) -> Result<Usage> {
        match &self.meter {
            Some(meter) => Ok(Usage::of_cpu(meter.in_use()?)),
            None => Ok(Usage::of_cuda(&memory::stats(self.device)?, |gauge| gauge.current)),
        }
    }

    fn peak(&self) -> Result<Usage> {
        match &self.meter {
            Some(meter) => Ok(Usage::of_cpu(meter.peak()?)),
            None => Ok(Usage::of_cuda(&memory::stats(self.device)?, |gauge| gauge.peak)),
        }
    }

    fn reset(&self) -> Result<()> {
        match &self.meter {
            Some(meter) => meter.reset_peak(),
            None => memory::reset_peaks(self.device),
        }
    }
}

impl Usage {
    fn of_cpu(bytes: u64) -> Self {
        Self { requested_bytes: bytes, allocated_bytes: bytes, active_bytes: bytes, reserved_bytes: None }
    }

    fn of_cuda(stats: &memory::AllocatorStats, read: fn(&memory::Gauge) -> u64) -> Self {
        Self {
            requested_bytes: read(&stats.requested_bytes),
            allocated_bytes: read(&stats.allocated_bytes),
            active_bytes: read(&stats.active_bytes),
            reserved_bytes: Some(read(&stats.reserved_bytes)),
        }
    }

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
