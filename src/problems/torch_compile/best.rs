//! Whole training steps at their best: ours in turns with each mode of torch.compile over SDPA and fused AdamW.

use std::cell::RefCell;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tch::Device;

use self::ours::OurStep;
use super::scratch::scratch;
use super::transformer::{Errors, expected_bytes, write_expected};
use crate::attention::ImplementationName;
use crate::bench::device::empty_cache;
use crate::bench::energy::{Energy, EnergyMeter};
use crate::bench::interleave::{ColumnOutcome, Laps, Turns, Variant, interleave, samples};
use crate::bench::model_bench::ModelBench;
use crate::bench::peer::{Compile, DEADLINE, Software, TorchPeer, Verified};
use crate::bench::timing::{BusyCalls, lap};
use crate::bench::training_step::{self, Execution, StepPass, handout};
use crate::harness::peer::NoAnswer;
use crate::harness::record::Profile;
use crate::harness::samples::{Samples, Work};
use crate::model::fused_adamw::adamw_for;
use crate::model::optim::AdamWOptions;
use crate::model::sizes::VOCAB_SIZE;
use crate::model::{Config, Precision, SizeName};
use crate::process::LockedFolder;
use crate::torch::{memory, safetensors};

mod ours;

/// The one column of a peer.
pub const COLUMN: &str = "compiled";

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    pub size: SizeName,
    pub context_length: i64,
    #[serde(default = "handout::batch_size")]
    pub batch_size: i64,
    pub dtype: Precision,
    /// Of our step; PyTorch's is SDPA.
    pub attention: ImplementationName,
    /// Of our step.
    pub execution: Execution,
    pub rounds: usize,
    pub warmup: usize,
    pub iterations: usize,
    /// Seconds of steps back to back by which the energy of a column is read; 0 reads none.
    #[serde(default)]
    pub energy_s: f64,
    /// Seconds in which `max-autotune` must have compiled and run its first passes; with 0 it is not tried.
    #[serde(default = "autotune_limit_s")]
    pub autotune_limit_s: u64,
}

fn autotune_limit_s() -> u64 {
    120
}

/// A mode of torch.compile, called as PyTorch calls it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    Default,
    ReduceOverhead,
    MaxAutotune,
}

impl Mode {
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::ReduceOverhead => "reduce-overhead",
            Self::MaxAutotune => "max-autotune",
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Row {
    pub default: Compared,
    pub reduce_overhead: Compared,
    pub max_autotune: Compared,
    /// None where our step could not be made.
    pub ours: Option<Ours>,
    /// Why a column has no energy though the suite asks for it.
    pub energy_missing: Option<String>,
    pub software: Software,
}

impl Row {
    /// Errors: a peak that cannot hold the parameters and both moments in float32.
    pub fn validate(&self, params: &Params) -> Result<()> {
        let least = 12.0 * params.config().num_parameters() as f64;
        let modes = [&self.default, &self.reduce_overhead, &self.max_autotune];
        let theirs = modes.into_iter().filter_map(|mode| mode.compiled.as_ref()?.peak.as_ref());
        let peaks = self.ours.iter().filter_map(|ours| ours.peak.as_ref()).chain(theirs);
        let lowest = peaks.flat_map(|peak| &peak.samples).copied().fold(f64::INFINITY, f64::min);
        ensure!(lowest >= least, "a peak is {lowest} bytes, and parameters and moments alone have {least}");
        Ok(())
    }
}

/// Our step and one mode of PyTorch, in turns.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compared {
    pub rust: ColumnOutcome<Step>,
    pub python: ColumnOutcome<Step>,
    /// None where it was not compiled.
    pub compiled: Option<Compiled>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Step {
    pub step: Samples,
}

/// What a mode of PyTorch cost, and its errors against our eager pass, measured before any timing.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Compiled {
    pub errors: Errors,
    pub compile: Option<Compile>,
    pub graphs_skipped: u64,
    pub peak: Option<Samples>,
    pub energy: Option<Energy>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ours {
    /// From the first warm-up step until the step was ready and proved.
    pub preparation: Samples,
    pub loss_error: Option<f64>,
    pub peak: Option<Samples>,
    pub energy: Option<Energy>,
}

impl Params {
    fn config(&self) -> Config {
        Config::of_size(self.size.size(), VOCAB_SIZE, self.context_length)
    }

    pub fn validate(&self) -> Result<()> {
        self.config().validate_with_batch(self.batch_size)?;
        let Self { energy_s, autotune_limit_s: limit, .. } = *self;
        ensure!((0.0..=60.0).contains(&energy_s), "energy_s is {energy_s}: it must lie between 0 and 60");
        ensure!(limit <= 3600, "autotune_limit_s is {limit}: it must not exceed 3600");
        self.turns().validate()
    }

    /// A training step as `benchmarking_script` measures it.
    pub fn training_step(&self) -> training_step::Params {
        let Self { size, context_length, batch_size, dtype, attention, execution, .. } = *self;
        training_step::Params {
            size,
            context_length,
            batch_size,
            vocab_size: VOCAB_SIZE,
            pass: StepPass::TrainingStep,
            dtype,
            attention,
            execution,
            allow_tf32: false,
            warmup: 3,
            steps: 1,
        }
    }

    /// Our step and one of PyTorch's, each with memory of its own.
    pub fn predicted_bytes(&self, profile: Profile) -> u64 {
        let ours = self.training_step();
        let eager = training_step::Params { execution: Execution::Eager, ..self.training_step() };
        ours.predicted_bytes(profile) + eager.predicted_bytes(profile)
    }

    fn turns(&self) -> Turns {
        Turns { rounds: self.rounds, warmup: self.warmup, iterations: self.iterations }
    }

    /// The least of a step: causal attention; each weight read forward and backward, its gradient written and read; and
    /// AdamW's float32 parameter and moments, read and written. In bfloat16 weights and gradients may have two bytes.
    pub fn work(&self) -> Work {
        let config = self.config();
        let (all, multiplied) = (config.num_parameters() as f64, config.num_matmul_parameters() as f64);
        let narrow = match self.dtype {
            Precision::Float32 => 4.0,
            Precision::Bfloat16 => 2.0,
        };
        let flops = 3.0 * config.causal_forward_flops(self.batch_size, self.context_length);
        let bytes = 3.0 * narrow * multiplied + (narrow + 24.0) * all;
        Work { flops, bytes, precision: self.dtype.name().into() }
    }
}

/// One mode after the other. Each has its own process: beside our step there is memory for one.
pub fn measure(p: &Params, device: Device) -> Result<Row> {
    let bench = ModelBench::new(&p.config(), p.attention, p.batch_size, p.dtype, device)?;
    let files = Files::write(&bench)?;
    empty_cache(device)?;
    if device.is_cuda() {
        memory::reset_peaks(device)?;
    }
    let optimizer = RefCell::new(adamw_for(device, AdamWOptions::default())?);
    let (ours, seconds) = lap(device, || ColumnOutcome::of(ours::prepare(p, &bench, &optimizer)))?;
    let case = Comparison { p, bench: &bench, files: &files, ours: &ours, meter: meter(p, device) };
    let mut missing = case.meter.as_ref().err().cloned().flatten();
    let (default, software) = case.beside(Mode::Default, &mut missing)?;
    let (reduce_overhead, _) = case.beside(Mode::ReduceOverhead, &mut missing)?;
    let (max_autotune, _) = case.beside(Mode::MaxAutotune, &mut missing)?;
    let mut of_ours = |step: &dyn OurStep| -> Result<Ours> {
        let busy = || BusyCalls::run(device, p.energy_s, &|| Ok(()), &mut || step.launch());
        Ok(Ours {
            preparation: Samples::seconds_unbounded(vec![seconds])?,
            loss_error: step.loss_error(),
            peak: match step.held_bytes() {
                Some(bytes) => Some(Samples::bytes(vec![bytes])?),
                None => peak(device)?,
            },
            energy: case.energy("ours", busy, &mut missing),
        })
    };
    let ours = ours.measured().map(|step| of_ours(step.as_ref())).transpose()?;
    Ok(Row { default, reduce_overhead, max_autotune, ours, energy_missing: missing, software })
}

/// The weights that both sides start from, and what our eager pass makes of random tokens.
pub struct Files {
    _folder: LockedFolder,
    weights: PathBuf,
    expected: PathBuf,
}

impl Files {
    pub fn write(bench: &ModelBench) -> Result<Self> {
        let folder = scratch(4 * bench.model.config().num_parameters() + expected_bytes(bench))?;
        let [weights, expected] = ["weights", "expected"].map(|name| folder.path().join(name));
        safetensors::write(bench.parameters(), &weights)?;
        write_expected(bench, &expected)?;
        Ok(Self { _folder: folder, weights, expected })
    }
}

/// The device's counter of energy; without one, why the suite's wish cannot be met, and no reason where it has none.
fn meter(p: &Params, device: Device) -> Result<EnergyMeter<'static>, Option<String>> {
    match device {
        _ if p.energy_s == 0.0 => Err(None),
        Device::Cpu => Err(Some("a CPU has no energy counter here".into())),
        _ => EnergyMeter::of_gpu().map_err(|error| Some(format!("{error:#}"))),
    }
}

/// The most that our allocator has held since its peaks were reset; `None` on a CPU, which counts nothing.
fn peak(device: Device) -> Result<Option<Samples>> {
    if !device.is_cuda() {
        return Ok(None);
    }
    Samples::bytes(vec![memory::stats(device)?.allocated_bytes.peak as f64]).map(Some)
}

/// What every mode is compared with.
struct Comparison<'a> {
    p: &'a Params,
    bench: &'a ModelBench,
    files: &'a Files,
    ours: &'a ColumnOutcome<Box<dyn OurStep + 'a>>,
    meter: Result<EnergyMeter<'static>, Option<String>>,
}

impl Comparison<'_> {
    fn beside(&self, mode: Mode, missing: &mut Option<String>) -> Result<(Compared, Software)> {
        let Self { p, ours, .. } = self;
        let mut peer = TorchPeer::start(self.bench.device)?;
        let software = peer.software.clone();
        let verified = verified(mode, self.bench, self.files, p.autotune_limit_s, &mut peer)?;
        let peer = RefCell::new(peer);
        let python = |_: &_| peer.borrow_mut().turn(COLUMN, p.warmup, p.iterations);
        let rust = Variant::prepared(ours, |step| step.turn(p.turns()));
        let [rust, python] = interleave(p.turns(), [rust, Variant::prepared(&verified, python)])?;
        let mut peer = peer.into_inner();
        let step =
            |column: ColumnOutcome<Laps>| column.try_map(|laps| Ok(Step { step: samples(&laps, "step", p.work())? }));
        let compiled = |verified: &Verified<Errors>| -> Result<Compiled> {
            let busy = || peer.job("busy", json!({ "column": COLUMN, "seconds": p.energy_s }));
            let energy = self.energy(mode.name(), busy, missing);
            Ok(Compiled {
                errors: verified.errors.clone(),
                compile: peer.close(Some(&verified.first_call_s))?,
                graphs_skipped: verified.graphs_skipped,
                peak: verified.peak_bytes.map(|bytes| Samples::bytes(vec![bytes])).transpose()?,
                energy,
            })
        };
        let compiled = verified.measured().map(compiled).transpose()?;
        Ok((Compared { rust: step(rust)?, python: step(python)?, compiled }, software))
    }

    /// Of steps back to back. Nothing is lost to a missing counter but the energy, and its reason is the first one.
    fn energy(
        &self,
        column: &str,
        busy: impl FnOnce() -> Result<BusyCalls>,
        missing: &mut Option<String>,
    ) -> Option<Energy> {
        let meter = self.meter.as_ref().ok()?;
        let measured = meter.measure(busy).map_err(|error| anyhow!("{column}: {error:#}"));
        measured.map_err(|error| missing.get_or_insert(error.to_string())).ok()
    }
}

/// Opens a whole step of PyTorch in `mode` and compares it with our eager pass. A mode that does not compile in time, does not
/// compile at all or gives wrong gradients ends its own column alone.
pub fn verified(
    mode: Mode,
    bench: &ModelBench,
    files: &Files,
    autotune_limit_s: u64,
    peer: &mut TorchPeer,
) -> Result<ColumnOutcome<Verified<Errors>>> {
    let (dtype, batch_size) = (bench.dtype, bench.batch_size);
    if mode == Mode::ReduceOverhead && !bench.device.is_cuda() {
        return Ok(ColumnOutcome::NotRun { reason: "needs a CUDA GPU (for CUDA graphs), has a CPU".into() });
    }
    if mode == Mode::MaxAutotune && autotune_limit_s == 0 {
        return Ok(ColumnOutcome::NotRun { reason: "not tried: it compiles for minutes".into() });
    }
    let settings = json!({ "config": bench.model.config(), "weights": files.weights, "dtype": dtype,
        "batch_size": batch_size, "mode": mode.name() });
    peer.open("whole_step", settings)?;
    let limit = if mode == Mode::MaxAutotune { Duration::from_secs(autotune_limit_s) } else { DEADLINE };
    let require = |errors: &Errors| errors.require_within_tolerance(mode.name(), dtype);
    Ok(match peer.verify_within(limit, COLUMN, &files.expected, require) {
        Ok(column) => column,
        Err(error) if error.downcast_ref::<NoAnswer>().is_some() => {
            ColumnOutcome::NotRun { reason: format!("did not compile within {} s", limit.as_secs()) }
        }
        Err(error) => ColumnOutcome::Failed { error: format!("{error:#}") },
    })
}

#[cfg(test)]
mod tests;
